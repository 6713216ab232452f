"""Replays a step trace on a manager of its own and compares everything with the oracle, event by event.

The trace says what happened. ``inputs`` supplies the payload that it leaves out, ``model`` what must come
out of it, ``steps`` and ``driver`` call the manager, ``checks`` looks at it.
"""

import functools
import os
from collections.abc import Sequence
from dataclasses import dataclass

from specstate.backends.build import PATHS
from specstate.config import StateConfig
from specstate.errors import SpecStateError, shown
from specstate.layout import gib, plan_bytes
from specstate.replay.checks import Differs, out_of_memory
from specstate.replay.driver import Driver, ReplayBackend
from specstate.trace import read_trace
from specstate.trace.schema import (
    Admit,
    BeginStep,
    Event,
    Fork,
    Import,
    Publish,
    Recover,
    Reserve,
    Restore,
    Resume,
    TraceError,
)
from specstate.validation import check_flag

#: What a replay shrinks every trace to, unless it runs at full shape: faults of order and ownership need no more.
SHRUNK_LAYERS, SHRUNK_DIM = 2, 16

#: What a shrunk replay allocates at most. A thousand requests with a hundred records each need a twentieth of it; sizes
#: beyond are damaged ones, which would take the machine's memory.
MAX_SHRUNK_BYTES = 2**31


@dataclass(frozen=True, slots=True)
class Difference:
    """Where a replay left the trace or the oracle."""

    event: int
    """Number of the event, from 1: it stands in line ``event + 1``. One past the last for what shows at the end."""
    kind: str
    """Of the event; "end" past the last."""
    what: str


@dataclass(frozen=True, slots=True)
class ReplayReport:
    """What came of a replay."""

    ok: bool
    events: int
    """Events in the trace."""
    first_difference: Difference | None


def replay_file(
    path: str | os.PathLike[str],
    *,
    partial: bool = False,
    full_shape: bool = False,
    backend: ReplayBackend = "reference",
) -> ReplayReport:
    """Replays the trace at ``path`` up to its end or the first difference.

    partial: the trace may lack its end. full_shape: with the recorded layers, heads, dimensions and dtypes, in place of
    2 layers of 1 head of 16 x 16 in float64. backend: "triton" runs in float32, on the GPU if there is one; "metadata"
    compares lengths, slots, counters and digests alone.

    A call that the manager refuses, and a trace that contradicts itself, are differences. Raises TraceError (a
    SpecStateError) when the trace is damaged, no manager can be built for its config, a load is too long to recompute,
    or memory runs out; SpecStateError for a wrong argument.
    """
    check_flag("full_shape", full_shape)
    if type(backend) is not str or backend not in PATHS:
        raise SpecStateError(f"backend = {shown(backend)} is not one of {', '.join(map(repr, PATHS))}")
    header, events = read_trace(path, partial)
    try:
        config = _slots_in_use(replay_config(header.config, full_shape, backend), events)
        needed = plan_bytes(config).total_bytes
        if needed > MAX_SHRUNK_BYTES and backend != "metadata" and not full_shape:
            raise SpecStateError(f"{gib(needed)} of state, even shrunk; backend 'metadata' replays it without payloads")
        driver = Driver(header, config, backend)
    except (SpecStateError, RuntimeError, MemoryError) as error:  # torch's allocator raises RuntimeError
        reason = " ".join(str(error).split()) or type(error).__name__
        raise TraceError(f"{os.fspath(path)}, line 1: no manager can be built for this config: {reason}") from None
    steps = [(event.kind, functools.partial(driver.apply, event)) for event in events] + [("end", driver.finish)]
    for number, (kind, step) in enumerate(steps, 1):
        try:
            step()
        except Differs as difference:
            return ReplayReport(False, len(events), Difference(number, kind, str(difference)))
        except (TraceError, MemoryError, RuntimeError) as error:
            if not isinstance(error, TraceError) and not out_of_memory(error):
                raise
            reason = str(error) if isinstance(error, TraceError) else "out of memory"
            raise TraceError(f"{os.fspath(path)}, line {number + 1}: {reason}") from None
    return ReplayReport(True, len(events), None)


def _slots_in_use(config: StateConfig, events: Sequence[Event]) -> StateConfig:
    """``config`` with the slots that the trace names and one more of each, which nothing may touch.

    Pools hand out the lowest slots first, so those above were never anybody's. No event names the slots for boundary
    checkpoints, of which a life has one at most.
    """
    rows, slots, lives = {0}, {1}, 0
    for event in events:
        if isinstance(event, Admit | Resume | Restore | Import):
            lives += 1
            rows.add(event.handle.record_slot)
            slots.add(event.checkpoint_slot)
        elif isinstance(event, Publish):
            slots.add(event.checkpoint_slot)
        elif isinstance(event, Reserve):
            slots.update(event.checkpoint_slots)
        elif isinstance(event, BeginStep):
            slots.update(slot for line in event.block_table or () for slot in line if slot <= config.num_checkpoints)
        elif isinstance(event, Fork):
            lives += len(event.handles)
            rows.update(handle.record_slot for handle in event.handles)
            slots.update(event.checkpoint_slots)
        elif isinstance(event, Recover):
            lives += len(event.handles)
            rows.update(handle.record_slot for handle in event.handles)
            slots.update(event.checkpoint_slots, (prefix.checkpoint_slot for prefix in event.published))
    unnamed = 0 if config.block_size is None else lives
    fewer = {
        "max_requests": min(max(rows) + 2, config.max_requests),
        "num_checkpoints": min(max(slots) + 1 + unnamed, config.num_checkpoints),
    }
    return config.model_copy(update=fewer)


def replay_config(config: StateConfig, full_shape: bool, backend: ReplayBackend = "reference") -> StateConfig:
    """What a trace of ``config`` is replayed with: lengths, slots, convolution, gate and policy as recorded."""
    fields = config.model_dump() | {"path": None, "memory_limit_bytes": None}
    if not full_shape:
        fields["layer"] |= {"num_heads": 1, "head_k_dim": SHRUNK_DIM, "head_v_dim": SHRUNK_DIM}
        # The widest that the backend computes in: a fault of order or ownership then stands out from rounding.
        dtype = "float32" if backend == "triton" else "float64"
        fields |= {"num_layers": SHRUNK_LAYERS, "checkpoint_dtype": dtype, "activation_dtype": dtype}
    return StateConfig(**fields)
