"""Every order of transitions that hypothesis can think of, against a model that knows only committed tokens.

The model keeps, per request, the oracle's state after its committed tokens and how many of them the fold policy leaves
pending. After every rule the manager must agree: states, conv histories, positions, fold timing, integrity. Calls that
come at the wrong moment must be refused, and change nothing that the next check would see.
"""

import functools
import os
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from specstate import CapacityError, SpecStateError, StaleHandleError, StepMetadata, StepOrderError
from specstate.metadata import Handle
from specstate.oracle import OracleState
from specstate.step import Step
from specstate.validation import DTYPES
from tests.factories import (
    POLICIES,
    LayerInputs,
    Twin,
    make_config,
    make_inputs,
    make_manager,
    make_params,
    make_twin,
    relative_error,
)

NAMES = ("a", "b", "c", "d")
NUM_LAYERS = 2


@dataclass
class Life:
    """One life of a request."""

    handle: Handle
    twin: Twin
    pending: int = 0
    may_be_pending: bool = False  # what the host knows, which never asks the device
    finished: bool = False
    step: "OpenStep | None" = None


@dataclass
class Parked:
    """A request between two lives, and which slots it keeps: "records" both, "folded" its checkpoint, "host" none."""

    life: Life
    keeps: str

    @property
    def slots(self) -> tuple[int, int]:
        """Record and checkpoint slots that it keeps."""
        return {"records": (1, 1), "folded": (0, 1), "host": (0, 0)}[self.keeps]


@dataclass
class Row:
    """A row of an open step; ``life`` is None for dummy rows and once the request was released."""

    life: Life | None
    query_len: int
    least: int
    entry: int
    inputs: list[LayerInputs]
    prompt: bool = False
    outputs: list[torch.Tensor] = field(default_factory=list)


@dataclass
class OpenStep:
    step: Step
    rows: list[Row]
    inputs: list[LayerInputs]
    verified: set[int] = field(default_factory=set)
    flushed: bool = False
    released: int = 0

    @property
    def between(self) -> bool:
        return 0 < len(self.verified) < len(self.inputs)


class Rows(NamedTuple):
    """What a step is begun with, by the names of its requests."""

    names: tuple[str | None, ...]
    lens: tuple[int, ...]
    kinds: tuple[str, ...]
    least: tuple[int, ...]
    entries: tuple[int, ...]
    pad_to: tuple[int, int] | None


class End(NamedTuple):
    """How a step ends; the columns are by entry."""

    verb: str
    counts: list[int]
    eager: list[bool]
    finished: list[bool]


class Side:
    """One manager, and what each of its requests must hold."""

    def __init__(
        self,
        policy: str,
        windows: int,
        taps: int | None,
        checkpoints: int,
        *,
        backend: str = "reference",
        device: str = "cpu",
        num_layers: int = NUM_LAYERS,
        tolerance: float = 1e-11,
        **sizes: Any,
    ) -> None:
        least = {"eager": 3, "deferred": 6, "ring": 6}[policy]
        self.device, self.num_layers, self.tolerance = device, num_layers, tolerance
        self.config = make_config(
            fold_policy=policy,
            max_query_len=3,
            record_capacity=least + 2 * windows,
            conv_kernel_size=taps,
            max_requests=3,
            num_checkpoints=checkpoints,
            num_layers=num_layers,
            num_heads=1,
            **sizes,
        )
        self.dtype = DTYPES[self.config.checkpoint_dtype]
        self.manager = make_manager(self.config, device, backend=backend, debug=False)
        self.oracle = make_twin(self.config).oracle
        self.lives: dict[str, Life] = {}
        self.parked: dict[str, Parked] = {}
        self.stale: list[Handle] = []
        self.open: list[OpenStep] = []
        self.seed = 0
        self.dropped = self.wasted = self.clamped = 0

    # -- a request's life

    def admit(self, name: str) -> None:
        if name in self.lives:
            with pytest.raises(SpecStateError, match="live already"):
                self.manager.admit(name)
        elif name in self.parked:
            with pytest.raises(SpecStateError, match="is preempted"):
                self.manager.admit(name)
        elif min(self.room) == 0:
            assert not self.manager.can_admit()
            with pytest.raises(CapacityError):
                self.manager.admit(name)
        else:
            assert self.manager.can_admit()
            self.lives[name] = Life(self.manager.admit(name), make_twin(self.config))

    def load(self, name: str, position: int, in_place: bool) -> None:
        life = self.lives[name]
        states = self._random_states()
        if life.step is not None:
            with pytest.raises(StepOrderError):
                self.manager.load(life.handle, [(s.recurrent, None) for s in states], committed_len=position)
            return
        recurrents = [self._given(state.recurrent) for state in states]
        conv = [None if self.config.layer.conv_kernel_size is None else self._given(s.conv) for s in states]
        if in_place:
            slot = int(self.manager.checkpoint_slots([life.handle])[0])
            for layer in range(self.num_layers):
                recurrent, history = self.manager.checkpoints(layer)
                recurrent[slot] = recurrents[layer]
                if history is not None:
                    history[slot] = conv[layer]
            self.manager.load(life.handle, None, committed_len=position)
        else:
            self.manager.load(life.handle, list(zip(recurrents, conv, strict=True)), committed_len=position)
        life.twin = Twin(self.oracle, self.num_layers, states, position)
        life.pending, life.may_be_pending, life.finished = 0, False, False

    def release(self, name: str) -> None:
        life = self.lives[name]
        self.manager.release(life.handle)
        self._leave(life)

    def fork(self, name: str, names: list[str]) -> None:
        life = self.lives[name]
        taken = [new for new in names if new in self.lives or new in self.parked]
        for refused, error, words in (
            (life.step is not None and life.step.between, StepOrderError, "have verified"),
            (taken, SpecStateError, "is live already|is preempted"),
            (len(names) > min(self.room), CapacityError, "no slots"),
        ):
            if refused:
                with pytest.raises(error, match=words):
                    self.manager.fork(life.handle, names)
                return
        for new, handle in zip(names, self.manager.fork(life.handle, names), strict=True):
            twin = Twin(self.oracle, self.num_layers, list(life.twin.states), life.twin.committed_len)
            self.lives[new] = Life(handle, twin, finished=life.finished)

    def preempt(self, name: str, keeps: str) -> None:
        """``keeps``: see Parked; "host" is a retraction."""
        life = self.lives[name]
        if keeps == "host":
            preempt = functools.partial(self.manager.retract, life.handle)
        else:
            preempt = functools.partial(self.manager.preempt, life.handle, fold=keeps == "folded")
        if life.step is not None and life.step.between:
            with pytest.raises(StepOrderError, match="have verified"):
                preempt()
            return
        preempt()
        if keeps != "records" or self._folded_by_verify(life):
            life.pending, life.may_be_pending = 0, False
        self._leave(life)
        self.parked[name] = Parked(life, keeps)

    def resume(self, name: str) -> None:
        if name not in self.parked:
            with pytest.raises(SpecStateError, match="names no preempted request"):
                self.manager.resume(name)
            return
        parked = self.parked[name]
        if any(kept == 0 and free == 0 for kept, free in zip(parked.slots, self.room, strict=True)):
            with pytest.raises(CapacityError, match="no slot"):
                self.manager.resume(name)
            return
        handle, before = self.manager.resume(name), parked.life
        assert handle.generation > max([before.handle.generation, *(h.generation for h in self.stale)])
        del self.parked[name]
        self.lives[name] = Life(handle, before.twin, before.pending, before.may_be_pending, before.finished)

    def discard(self, name: str) -> None:
        if name not in self.parked:
            with pytest.raises(SpecStateError, match="names no preempted request"):
                self.manager.discard(name)
            return
        self.manager.discard(name)
        del self.parked[name]

    def fence(self, mode: str) -> None:
        """And new parameters behind it, which happen to be the old ones."""
        if any(life.step is not None for life in self.lives.values()):
            with pytest.raises(StepOrderError, match="still open"):
                self.manager.fence(mode)
            return
        self.set_params()
        self.manager.fence(mode)
        if mode == "drop":
            for life in list(self.lives.values()):
                self._leave(life)
            self.parked.clear()
        for life in [*self.lives.values(), *(parked.life for parked in self.parked.values())]:
            life.pending, life.may_be_pending = 0, False
        self.set_params()

    def set_params(self) -> None:
        params = make_params(self.config, device=self.device)
        if any(life.may_be_pending for life in [*self.lives.values(), *(p.life for p in self.parked.values())]):
            with pytest.raises(StepOrderError, match="may have pending records"):
                self.manager.set_params(params)
        else:
            self.manager.set_params(params)

    @property
    def room(self) -> tuple[int, int]:
        """Free record and checkpoint slots."""
        kept = [parked.slots for parked in self.parked.values()]
        records = self.config.max_requests - len(self.lives) - sum(slots[0] for slots in kept)
        return records, self.config.num_checkpoints - len(self.lives) - sum(slots[1] for slots in kept)

    def use_stale_handles(self) -> None:
        for handle in self.stale:
            metadata = StepMetadata(handles=(handle,), query_lens=(1,))
            for call, arguments in (
                (self.manager.read, (handle, 0)),
                (self.manager.release, (handle,)),
                (self.manager.flush, ([handle],)),
                (self.manager.load, (handle, None, 0)),
                (self.manager.begin_step, (metadata,)),
                (self.manager.fork, (handle, ["z"])),
                (self.manager.preempt, (handle,)),
                (self.manager.retract, (handle,)),
            ):
                with pytest.raises(StaleHandleError):
                    call(*arguments)

    # -- a step

    def draw_rows(self, data: st.DataObject, names: list[str]) -> Rows:
        """A step over some of ``names``, and maybe a dummy row."""
        dummies, shuffle = data.draw(st.integers(0, 1)), data.draw(st.booleans())
        padding = data.draw(st.sampled_from([None, 1, (1, 2)]))
        chosen = data.draw(st.lists(st.sampled_from(names), unique=True, min_size=1)) if names else []
        rows: list[str | None] = [*chosen, *[None] * dummies]
        lens = [data.draw(st.integers(1, 3)) for _ in rows]
        kind = st.sampled_from(["decode", "decode", "prompt"])
        kinds = ["dummy" if name is None else data.draw(kind) for name in rows]
        least = [n if kind == "prompt" else data.draw(st.integers(1, n)) for kind, n in zip(kinds, lens, strict=True)]
        entries = data.draw(st.permutations(range(len(rows) + 1)))[: len(rows)] if shuffle else range(len(rows))
        pad_to = None
        if padding is not None:
            extra_rows, extra_tokens = padding if isinstance(padding, tuple) else (padding, 0)
            pad_to = (len(rows) + extra_rows, sum(lens) + extra_tokens)
        return Rows(tuple(rows), tuple(lens), tuple(kinds), tuple(least), tuple(entries), pad_to)

    def free(self) -> list[str]:
        """Requests that are in no open step."""
        return [name for name in sorted(self.lives) if self.lives[name].step is None]

    def begin(self, rows: Rows) -> OpenStep | None:
        """The step over ``rows``; None when it was refused, as it must be when one of them has an open step."""
        chosen = [None if name is None else self.lives[name] for name in rows.names]
        metadata = StepMetadata(
            handles=tuple(None if life is None else life.handle for life in chosen),
            query_lens=rows.lens,
            row_kinds=rows.kinds,
            min_accepted=rows.least,
            batch_index=rows.entries,
        )
        if any(life is not None and life.step is not None for life in chosen):
            with pytest.raises(StepOrderError, match="still open"):
                self.manager.begin_step(metadata, rows.pad_to)
            return None
        tokens = sum(rows.lens) if rows.pad_to is None else rows.pad_to[1]
        self.seed += 1
        inputs = make_inputs(self.config, tokens, self.seed, self.device)
        step = OpenStep(self.manager.begin_step(metadata, rows.pad_to), [], inputs)
        start = 0
        columns = (chosen, rows.lens, rows.least, rows.entries, rows.kinds)
        for life, query_len, minimum, entry, kind in zip(*columns, strict=True):
            window = [tensors[start : start + query_len] for tensors in inputs]
            row = Row(life, query_len, minimum, entry, window, prompt=kind == "prompt")
            if life is not None:
                life.step = step
                row.outputs = life.twin.window(window)[1]
            step.rows.append(row)
            start += query_len
        self.open.append(step)
        return step

    def verify(self, step: OpenStep, layers: list[int]) -> None:
        for index in layers:
            tensors = step.inputs[index]
            if index in step.verified:
                with pytest.raises(StepOrderError, match="verified already"):
                    step.step.verify(index, tensors.qkv, tensors.raw_gate, tensors.raw_beta)
                continue
            output = step.step.verify(index, tensors.qkv, tensors.raw_gate, tensors.raw_beta)
            assert output is not None
            step.verified.add(index)
            start = 0
            for row in step.rows:
                got = output[start : start + row.query_len]
                if row.life is None:
                    assert not got.any()
                else:
                    assert relative_error(got, row.outputs[index]) < self.tolerance
                start += row.query_len
            assert not output[start:].any()

    def write_records(self, step: OpenStep, layer: int) -> None:
        if layer in step.verified:
            return
        records = self._records_of(step, layer)
        if not step.flushed and any(row.life is not None and row.life.may_be_pending for row in step.rows):
            with pytest.raises(StepOrderError, match="may have pending"):
                step.step.write_records(layer, *records)
            return
        step.step.write_records(layer, *records)
        step.verified.add(layer)

    def flush_step(self, step: OpenStep) -> None:
        if step.verified:
            with pytest.raises(StepOrderError):
                step.step.flush()
            return
        step.step.flush()
        step.flushed = True
        for row in step.rows:
            if row.life is not None:
                row.life.pending, row.life.may_be_pending = 0, False

    def draw_end(self, data: st.DataObject, step: OpenStep) -> End:
        """Counts in and out of range, with and without masks, maybe longer than need be."""
        verb, masks = data.draw(st.sampled_from(["defer", "defer", "defer", "commit"])), data.draw(st.booleans())
        longer = data.draw(st.integers(0, 2))
        size = max([row.entry + 1 for row in step.rows] or [0]) + longer
        return End(
            verb,
            [data.draw(st.integers(-1, 5)) for _ in range(size)],
            [masks and data.draw(st.booleans()) for _ in range(size)],
            [masks and data.draw(st.integers(0, 4)) == 0 for _ in range(size)],
        )

    def end(self, step: OpenStep, how: End) -> bool:
        """Whether the step has ended, as it must when all layers have verified."""
        verb, counts, eager, finished = how
        given = torch.tensor(counts, dtype=torch.int64, device=self.device)
        if verb == "commit":
            end = functools.partial(step.step.commit, given)
        else:
            masks_given = (torch.tensor(mask, dtype=torch.bool, device=self.device) for mask in (eager, finished))
            end = functools.partial(step.step.defer, given, *masks_given)
        if len(step.verified) < self.num_layers:
            with pytest.raises(StepOrderError, match="not verified"):
                end()
            return False
        end()
        self._close(step)
        self.dropped += step.released
        for row in step.rows:
            life = row.life
            if life is None:
                continue
            accepted = min(max(counts[row.entry], row.least), row.query_len)
            if life.finished and not row.prompt:
                accepted = 0
                self.wasted += 1
            else:
                self.clamped += accepted != counts[row.entry]
                life.finished = verb == "defer" and finished[row.entry]
            life.twin.commit(row.inputs, accepted)
            folded = 0 if step.flushed or self.config.fold_policy != "deferred" else life.pending
            life.pending = life.pending - folded + accepted
            full = self.config.fold_policy == "ring" and life.pending + 3 > self.config.record_capacity
            folds = verb == "commit" or self.config.fold_policy == "eager"
            life.may_be_pending = not folds
            if folds or full or (verb == "defer" and eager[row.entry]):
                life.pending = 0
        with pytest.raises(StepOrderError, match="ended"):
            end()
        return True

    def cancel(self, step: OpenStep) -> None:
        step.step.cancel()
        self._close(step)
        if step.verified and self.config.fold_policy == "deferred":
            for row in step.rows:
                if row.life is not None:
                    row.life.pending = 0
        with pytest.raises(StepOrderError, match="ended"):
            step.step.cancel()

    def flush(self, names: list[str] | None) -> None:
        """Of ``names``, or of all requests."""
        lives = [self.lives[name] for name in (self.lives if names is None else names)]
        handles = None if names is None else [life.handle for life in lives]
        if any(life.step is not None and life.step.between for life in lives):
            with pytest.raises(StepOrderError, match="have verified"):
                self.manager.flush(handles)
            return
        self.manager.flush(handles)
        for life in lives:
            # What a verify has folded leaves the cursors when the step ends, not here.
            if not self._folded_by_verify(life):
                life.pending, life.may_be_pending = 0, False

    # -- what must hold after every rule

    def agrees(self) -> None:
        self.manager.check_integrity()
        counters = self.manager.counters()
        assert (counters.dropped_ends, counters.wasted_windows) == (self.dropped, self.wasted)
        assert counters.clamps == self.clamped
        assert self.manager.num_requests == len(self.lives)
        assert self.manager.can_admit(min(self.room)) and not self.manager.can_admit(min(self.room) + 1)
        for parked in self.parked.values():
            if parked.keeps == "records":
                life = parked.life
                cursor = self.manager._backend.cursor(life.handle.record_slot)
                assert (cursor.pending_len, cursor.committed_len) == (life.pending, life.twin.committed_len)
        for life in self.lives.values():
            assert self.manager._backend.cursor(life.handle.record_slot).pending_len == life.pending
            if life.step is not None and life.step.between:
                with pytest.raises(StepOrderError, match="have verified"):
                    self.manager.read(life.handle, 0)
            else:
                life.twin.check(self.manager, life.handle, self.tolerance)

    # -- helpers

    def _folded_by_verify(self, life: Life) -> bool:
        step = life.step
        return self.config.fold_policy == "deferred" and step is not None and len(step.verified) == self.num_layers

    def _leave(self, life: Life) -> None:
        """Its handle is stale, its open step goes on without it."""
        if life.step is not None:
            for row in life.step.rows:
                if row.life is life:
                    row.life = None
            life.step.released += 1
            life.step = None
        del self.lives[life.handle.request_id]
        self.stale.append(life.handle)

    def _close(self, step: OpenStep) -> None:
        self.open.remove(step)
        for row in step.rows:
            if row.life is not None:
                row.life.step = None

    def _given(self, values: torch.Tensor) -> torch.Tensor:
        """``values`` as the manager takes them."""
        return values.to(self.device, self.dtype)

    def _random_states(self) -> list[OracleState]:
        """States that the manager's dtype holds exactly."""
        self.seed += 1
        generator = torch.Generator().manual_seed(self.seed)
        zero = self.oracle.zero()
        return [
            OracleState(
                torch.randn(zero.recurrent.shape, generator=generator, dtype=torch.float64).to(self.dtype).double(),
                torch.randn(zero.conv.shape, generator=generator, dtype=torch.float64).to(self.dtype).double(),
            )
            for _ in range(self.num_layers)
        ]

    def _records_of(self, step: OpenStep, layer: int) -> tuple[torch.Tensor | None, ...]:
        """u, key, gate and conv_input of a step's tokens as a kernel of the caller's would make them."""
        tensors = step.inputs[layer]
        spec = self.config.layer
        u = torch.zeros(len(tensors.qkv), spec.num_heads, spec.head_v_dim, dtype=torch.float64)
        key = torch.zeros(len(tensors.qkv), spec.num_heads, spec.head_k_dim, dtype=torch.float64)
        start = 0
        for row in step.rows:
            state = self.oracle.zero() if row.life is None else row.life.twin.states[layer]
            for t in range(start, start + row.query_len):
                token = self.oracle.token(layer, state, tensors.qkv[t], tensors.raw_gate[t], tensors.raw_beta[t])
                state, u[t], key[t] = token.state, token.u, token.key
            start += row.query_len
        return self._given(u), self._given(key), tensors.raw_gate, tensors.qkv if spec.conv_kernel_size else None


class Lifecycle(RuleBasedStateMachine):
    #: What a machine for another backend changes.
    backend = "reference"
    device = "cpu"
    sizes: ClassVar[dict[str, Any]] = {"head_k_dim": 3, "head_v_dim": 2}
    tolerance = 1e-11

    @initialize(
        policy=st.sampled_from(POLICIES),
        windows=st.integers(0, 2),
        taps=st.sampled_from([None, 2, 4]),
        checkpoints=st.integers(2, 4),
    )
    def build(self, policy: str, windows: int, taps: int | None, checkpoints: int) -> None:
        options = {"backend": self.backend, "device": self.device, "tolerance": self.tolerance, **self.sizes}
        self.side = Side(policy, windows, taps, checkpoints, **options)
        for name in NAMES[:2]:
            self.side.admit(name)

    # -- few rules with many faces each: hypothesis leaves out whole rules at random, and none of these may be missing

    @rule(
        data=st.data(),
        face=st.sampled_from(
            "admit,admit,load,release,stale,flush,flush,fork,preempt,preempt,resume,resume,discard,fence,fence".split(
                ","
            )
        ),
    )
    def request(self, data: st.DataObject, face: str) -> None:
        side = self.side
        if face == "admit":
            side.admit(data.draw(st.sampled_from(NAMES)))
        elif face == "flush":
            side.flush(self._draw_names(data))
        elif face == "stale":
            side.use_stale_handles()
        elif face == "fence":
            side.fence(data.draw(st.sampled_from(["flush", "flush", "flush", "drop"])))
        elif face in ("resume", "discard"):
            # Mostly one that is preempted.
            names = sorted(side.parked) if side.parked and data.draw(st.integers(0, 5)) else NAMES
            getattr(side, face)(data.draw(st.sampled_from(names)))
        elif side.lives and face in ("fork", "preempt"):
            self._between_lives(data, face, None)
        elif side.lives and face == "load":
            side.load(self._draw_name(data), data.draw(st.integers(0, 40)), data.draw(st.booleans()))
        elif side.lives:
            side.release(self._draw_name(data))

    @rule(data=st.data(), then=st.sampled_from("leave,verify,cancel,end,end,end,fork,preempt".split(",")))
    def begin(self, data: st.DataObject, then: str) -> None:
        side = self.side
        # Mostly requests that are free, so that steps get going; sometimes one that must be refused.
        names = side.free() if data.draw(st.integers(0, 5)) else sorted(side.lives)
        step = side.begin(side.draw_rows(data, names))
        if step is None or then == "leave":
            return
        if then == "cancel":
            side.verify(step, data.draw(st.sampled_from([[0], [1], [0, 1]])))
            side.cancel(step)
            return
        early = data.draw(st.booleans())
        if then in ("fork", "preempt") and early:
            self._between_lives(data, then, step)
        side.verify(step, [0, 1])
        if then in ("fork", "preempt") and not early:
            self._between_lives(data, then, step)
        if then != "verify":
            side.end(step, side.draw_end(data, step))

    @precondition(lambda self: self.side.open)
    @rule(
        data=st.data(),
        face=st.sampled_from(
            "verify one,verify,write,flush,end,end,end,cancel,release,flush all,fork,preempt,fence".split(",")
        ),
    )
    def proceed(self, data: st.DataObject, face: str) -> None:
        side = self.side
        step = data.draw(st.sampled_from(side.open))
        layer = data.draw(st.integers(0, NUM_LAYERS - 1))
        if face == "verify":
            side.verify(step, list(range(NUM_LAYERS)))
        elif face == "verify one":
            side.verify(step, [layer])
        elif face == "write":
            side.write_records(step, layer)
        elif face == "flush":
            side.flush_step(step)
        elif face == "end":
            side.end(step, side.draw_end(data, step))
        elif face == "cancel":
            side.cancel(step)
        elif face == "flush all":
            side.flush(None)
        elif face == "fence":
            side.fence(data.draw(st.sampled_from(["flush", "drop"])))
        elif face in ("fork", "preempt"):
            self._between_lives(data, face, step)
        elif side.lives:
            side.release(self._draw_name(data))

    @invariant()
    def agrees(self) -> None:
        if hasattr(self, "side"):
            self.side.agrees()

    # -- helpers

    def _draw_name(self, data: st.DataObject) -> str:
        return data.draw(st.sampled_from(sorted(self.side.lives)))

    def _between_lives(self, data: st.DataObject, face: str, step: OpenStep | None) -> None:
        """Of a request in ``step``, or of any."""
        lives = self.side.lives.values() if step is None else [row.life for row in step.rows if row.life is not None]
        if not lives:
            return
        name = data.draw(st.sampled_from(sorted(life.handle.request_id for life in lives)))
        if face == "fork":
            # Mostly names that are free.
            free = [new for new in NAMES if new not in self.side.lives and new not in self.side.parked]
            names = free if free and data.draw(st.integers(0, 5)) else NAMES
            size = data.draw(st.sampled_from([1, 1, 2]))
            self.side.fork(name, data.draw(st.lists(st.sampled_from(names), unique=True, min_size=1, max_size=size)))
        else:
            self.side.preempt(name, data.draw(st.sampled_from(["records", "records", "folded", "host"])))

    def _draw_names(self, data: st.DataObject) -> list[str] | None:
        """Some requests, or None: all of them."""
        names = sorted(self.side.lives)
        if data.draw(st.booleans()):
            return None
        return data.draw(st.lists(st.sampled_from(names), unique=True)) if names else []


class TestLifecycle(Lifecycle.TestCase):
    """100 examples of 30 steps; SPECSTATE_EXAMPLES and SPECSTATE_STEPS ask for more."""

    settings = settings(
        max_examples=int(os.environ.get("SPECSTATE_EXAMPLES", "100")),
        stateful_step_count=int(os.environ.get("SPECSTATE_STEPS", "30")),
    )
