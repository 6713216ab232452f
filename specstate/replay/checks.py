"""How a replay looks at its manager: each check raises ``Differs`` with what was seen and what was expected."""

from collections.abc import Callable, Iterable
from functools import partial
from typing import TypeVar

import torch

from specstate.errors import SpecStateError
from specstate.image import ImagePayload
from specstate.manager import StateManager
from specstate.metadata import StepMetadata
from specstate.replay.model import Expected, ExpectedToken, Life
from specstate.step import Step
from specstate.validation import bits

_T = TypeVar("_T")

#: What a manager may raise: a refusal; what torch raises on a bad shape or index; an invariant of its own. Anything
#: else, a name that is not there for instance, is a fault of the program and not of the trace.
_RAISED = (SpecStateError, RuntimeError, IndexError, AssertionError)


def out_of_memory(error: BaseException) -> bool:
    """Whether memory ran out; torch's allocator on a CPU says so with a RuntimeError."""
    return isinstance(error, MemoryError | torch.OutOfMemoryError) or "allocate memory" in str(error)


class Differs(Exception):
    """The manager and the trace, or the manager and the oracle, disagree; the text says where."""


class Checks:
    """Compares a manager with what is expected of it; keeps a copy of all checkpoints to see which slots change."""

    def __init__(self, manager: StateManager, payloads: bool) -> None:
        self._manager, self._payloads = manager, payloads
        self.device = manager.device
        self.clamps = self.dropped_ends = self.wasted_windows = self.misplaced_rows = 0
        """What the manager's counters must show."""
        self.watch()

    def watch(self) -> None:
        """From here on the storage is what it is now."""
        layers = range(self._manager.config.num_layers) if self._payloads else ()
        pools = ((layer, pool) for layer in layers for pool in self._manager.checkpoints(layer) if pool is not None)
        self._pools = [(layer, pool, pool.clone()) for layer, pool in pools]

    def call(self, call: Callable[[], _T]) -> _T:
        """Calls the manager. What it raises is a difference: the recorded manager went through."""
        try:
            return call()
        except _RAISED as error:
            if out_of_memory(error):
                raise
            raise Differs(f"{type(error).__name__}: {' '.join(str(error).split())}") from error

    def equal(self, what: str, got: object, wanted: object) -> None:
        if got != wanted:
            raise Differs(f"{what} is {got}, wanted {wanted}")

    def only_slots_changed(self, slots: Iterable[int], in_layer: int | None = None) -> None:
        """Every byte of checkpoint storage outside ``slots`` is as it was at the last call, the null slot included.

        in_layer: looks there alone, and leaves the others to a later call; None: everywhere.
        """
        taken = list(slots)
        for layer, pool, shadow in self._pools:
            if in_layer not in (None, layer):
                continue
            if taken:
                shadow[taken] = pool[taken]
            if torch.equal(bits(shadow), bits(pool)):
                continue
            changed = [slot for slot in range(len(pool)) if not torch.equal(bits(shadow[slot]), bits(pool[slot]))]
            raise Differs(f"checkpoint slots {changed} changed, only {sorted(taken)} may")

    def outputs(self, step: int, layer: int, out: torch.Tensor, tokens: dict[int, ExpectedToken]) -> None:
        """Outputs of a verify [tokens, H, V]: those of requests as the oracle has them, all others zero."""
        for place, token in tokens.items():
            error = _error(out[place], token.output)
            if not error <= token.output_tolerance:
                raise Differs(
                    f"output of token {place} of step {step} in layer {layer} is off by {error:.3g}, "
                    f"more than {token.output_tolerance:.3g}"
                )
        rest = torch.ones(len(out), dtype=torch.bool)
        rest[list(tokens)] = False
        if not torch.equal(out[rest], torch.zeros_like(out[rest])):
            raise Differs(f"output of step {step} in layer {layer} is not zero where no request has a token")

    def device_rows(self, step: Step, rows: list[Life | None], metadata: StepMetadata) -> None:
        """What attention reads from a step that has just begun."""
        padding = step.num_rows - len(rows)
        lens = [0 if life is None else life.committed_len for life in rows]
        starts = [0]
        for query_len in metadata.query_lens:
            starts.append(starts[-1] + query_len)
        positions = [start + offset for start, n in zip(lens, metadata.query_lens, strict=True) for offset in range(n)]
        positions += [0] * (step.num_tokens - len(positions))
        slots = [0 if life is None else life.checkpoint_slot for life in rows]
        records = [-1 if life is None else life.handle.record_slot for life in rows]
        for name, got, wanted in (
            ("query_start_loc", step.query_start_loc, starts + [starts[-1]] * padding),
            ("positions", step.positions, positions),
            ("committed_lens", step.committed_lens, lens + [0] * padding),
            ("checkpoint_slots", step.checkpoint_slots, slots + [0] * padding),
            ("record_slots", step.record_slots, records + [-1] * padding),
        ):
            self.equal(name, got.tolist(), wanted)

    def compare_state(self, life: Life, *, read: bool) -> None:
        """Length, and if ``read`` state and conv history of every layer, pending records included."""
        committed_len = self.call(lambda: self._manager.committed_len(life.handle))
        self.equal(f"committed_len of {life.handle}", committed_len, life.committed_len)
        if not self._payloads or not read:
            return
        for layer in range(self._manager.config.num_layers):
            state = self.call(partial(self._manager.read, life.handle, layer))
            what = f"{life.handle} in layer {layer} at {life.committed_len}"
            _compare(what, life.layers[layer], state.recurrent, state.conv)

    def compare_slot(self, what: str, slot: int, layers: list[Expected]) -> None:
        """A checkpoint itself: ``what`` lies in ``slot`` and must be ``layers``."""
        if not self._payloads:
            return
        for layer, expected in enumerate(layers):
            recurrent, conv = self._manager.checkpoints(layer)
            _compare(
                f"{what}, checkpoint slot {slot} in layer {layer}",
                expected,
                recurrent[slot],
                None if conv is None else conv[slot],
            )

    def compare_payload(self, what: str, payload: ImagePayload, layers: list[Expected]) -> None:
        """A checkpoint outside of the manager."""
        for layer, expected in enumerate(layers):
            conv = None if payload.conv is None else payload.conv[layer]
            _compare(f"{what} in layer {layer}", expected, payload.recurrent[layer], conv)

    def counters(self) -> None:
        """Clamps, dropped ends, wasted windows and misplaced rows."""
        counted = self.call(self._manager.counters)
        for name in ("clamps", "dropped_ends", "wasted_windows", "misplaced_rows"):
            self.equal(f"counter {name}", getattr(counted, name), getattr(self, name))

    def integrity(self) -> None:
        self.call(self._manager.check_integrity)


def _compare(what: str, expected: Expected, recurrent: torch.Tensor, conv: torch.Tensor | None) -> None:
    error = _error(recurrent, expected.state.recurrent)
    if not error <= expected.tolerance:
        raise Differs(f"state of {what} is off by {error:.3g}, more than {expected.tolerance:.3g}")
    # Conv inputs are only ever copied.
    if conv is not None and not torch.equal(conv.double().cpu(), expected.state.conv):
        raise Differs(f"conv history of {what} differs")


def _error(got: torch.Tensor, wanted: torch.Tensor) -> float:
    """Norm of the difference of the worst head of [H, ..]; NaN if either holds one."""
    return float((got.double().cpu() - wanted).flatten(1).norm(dim=1).max())
