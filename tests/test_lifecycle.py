"""Every order of transitions that hypothesis can think of, against a model that knows only committed tokens.

The model keeps, per request, the list of its committed tokens and how many of them the fold policy leaves pending. What
is published, what lies at a boundary and what the caller's slots keep are lists of tokens, too; the oracle's state
after such a list is the same wherever it lies. After every rule the manager must agree: states, conv histories,
positions, fold timing, who uses which prefix and which is evicted next, integrity. Calls that come at the wrong moment
must be refused, and change nothing that the next check would see.
"""

import dataclasses
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
from specstate.prefixes import PrefixKey
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


@dataclass(eq=False)
class Published:
    """A prefix that was published and not evicted."""

    tokens: list[int]
    num_users: int = 0


@dataclass(eq=False)
class Life:
    """One life of a request."""

    handle: Handle
    home: int
    """Its own checkpoint slot."""
    tokens: list[int] = field(default_factory=list)
    """Committed ones."""
    most: int = 0
    least: int = 0
    """What the host knows of their number."""
    running: int = 0
    """Where its checkpoint lies: at home, or in one of the caller's slots."""
    slots: list[int] = field(default_factory=list)
    """The caller's, for this request's lines of block tables."""
    has_boundary_slot: bool = False
    boundary: list[int] = field(default_factory=list)
    """Tokens of the boundary checkpoint of its own; none: there is none."""
    source: Published | None = None
    pending: int = 0
    may_be_pending: bool = False  # what the host knows, which never asks the device
    finished: bool = False
    step: "OpenStep | None" = None

    def stands(self) -> None:
        """The host knows it, too."""
        self.most = self.least = len(self.tokens)

    def may_cross(self, query_len: int, block_size: int) -> bool:
        return (self.most + query_len) // block_size > self.least // block_size

    def continued(self, handle: Handle, home: int) -> "Life":
        """Another life at the same tokens, with nothing beside them."""
        return Life(handle, home, [*self.tokens], self.most, self.least, home, finished=self.finished)


@dataclass
class Parked:
    """A request between two lives, and which slots it keeps: "records" both, "folded" its checkpoint, "host" none."""

    life: Life
    keeps: str

    @property
    def slots(self) -> tuple[int, int]:
        """Record and checkpoint slots that it keeps."""
        return {
            "records": (1, 1 + self.life.has_boundary_slot),
            "folded": (0, 1),
            "host": (0, 0),
        }[self.keeps]


@dataclass
class Row:
    """A row of an open step; ``life`` is None for dummy rows and once the request was released."""

    life: Life | None
    query_len: int
    least: int
    entry: int
    tokens: list[int]
    """Of the window."""
    prompt: bool = False
    outputs: list[torch.Tensor] = field(default_factory=list)
    after: list[list[OracleState]] = field(default_factory=list)
    """By layer: the states after each token."""
    line: list[int] | None = None
    """Of the caller's block table; None: it gave none, empty: it may not be used."""


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


class Blocks(NamedTuple):
    """A caller's block table, by entry, and by how much it is wrong about where each row stands."""

    lines: list[list[int]]
    off: list[int]


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
        self.states: dict[tuple[int, ...], list[OracleState]] = {(): [self.oracle.zero() for _ in range(num_layers)]}
        """By layer, after a list of tokens; no token is ever at two places, but by a fork or a hit."""
        self.num_tokens = 0
        self.used: list[Published] = []
        self.idle: list[Published] = []
        """Published prefixes; those that nobody uses in the order in which they are evicted."""
        self.lent: list[int] = []
        self.kept: dict[int, list[int]] = {}
        """By slot of the caller's: tokens of the state that it keeps; what nothing has written yet is left out."""
        self.hits = self.misses = self.evictions = self.misplaced = 0
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
            self._take(1)
            handle = self.manager.admit(name)
            self.lives[name] = Life(handle, self._slot_of(handle), running=self._slot_of(handle))

    def load(self, name: str, position: int, in_place: bool) -> None:
        life = self.lives[name]
        states = self._random_states() if position else self.states[()]
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
        life.tokens, life.boundary = self._new_tokens(position), []
        life.stands()
        self.states[(*life.tokens,)] = states
        life.pending, life.may_be_pending, life.finished = 0, False, False

    def release(self, name: str) -> None:
        life = self.lives[name]
        self.manager.release(life.handle)
        if life.step is not None and life.step.between:
            self.kept.pop(life.running, None)  # folded in some layers
        elif life.running != life.home:
            self.kept[life.running] = life.tokens[
                : len(life.tokens) - (0 if self._folded_by_verify(life) else life.pending)
            ]
        self._leave(life)
        self._end_of(life)

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
        self._take(len(names))
        for new, handle in zip(names, self.manager.fork(life.handle, names), strict=True):
            self.lives[new] = life.continued(handle, self._slot_of(handle))

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
        if keeps != "records":
            self._move(life, life.home, len(life.tokens))
            life.has_boundary_slot, life.boundary = False, []
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
        if parked.keeps == "host":
            self._take(1)
        handle, before = self.manager.resume(name), parked.life
        assert handle.generation > max([before.handle.generation, *(h.generation for h in self.stale)])
        del self.parked[name]
        if parked.keeps == "host":
            before.home = before.running = self._slot_of(handle)
        self.lives[name] = dataclasses.replace(before, handle=handle)

    def discard(self, name: str) -> None:
        if name not in self.parked:
            with pytest.raises(SpecStateError, match="names no preempted request"):
                self.manager.discard(name)
            return
        self.manager.discard(name)
        life = self.parked.pop(name).life
        if life.running != life.home:
            self.kept[life.running] = life.tokens[: len(life.tokens) - life.pending]
        self._end_of(life)

    def fence(self, mode: str) -> None:
        """And new parameters behind it, which happen to be the old ones."""
        if any(life.step is not None for life in self.lives.values()):
            with pytest.raises(StepOrderError, match="still open"):
                self.manager.fence(mode)
            return
        self.set_params()
        self.manager.fence(mode)
        if mode == "drop":
            for life in [*self.lives.values(), *(parked.life for parked in self.parked.values())]:
                if life.running != life.home:
                    self.kept[life.running] = life.tokens[: len(life.tokens) - life.pending]
            for life in list(self.lives.values()):
                self._leave(life)
            self.parked.clear()
            self.used.clear()
            self.idle.clear()
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
        """Free record slots, and checkpoint slots that are free or would be after evictions."""
        kept = [parked.slots for parked in self.parked.values()]
        records = self.config.max_requests - len(self.lives) - sum(slots[0] for slots in kept)
        return records, self.num_free + len(self.idle)

    @property
    def num_free(self) -> int:
        """Free checkpoint slots."""
        taken = len(self.lives) + sum(life.has_boundary_slot for life in self.lives.values())
        taken += sum(parked.slots[1] for parked in self.parked.values())
        return self.config.num_checkpoints - taken - len(self.used) - len(self.idle) - len(self.lent)

    # -- published prefixes, and slots for block tables

    def held(self, life: Life) -> list[int]:
        """Positions at which it may be published."""
        behind = 0 if self._folded_by_verify(life) else life.pending
        places = {len(life.tokens), len(life.tokens) - behind, len(life.boundary)}
        return sorted(places - {0})

    def publish(self, name: str, position: int) -> None:
        life = self.lives[name]
        tokens = [*life.tokens, -1][:position]
        publish = functools.partial(self.manager.publish, life.handle, tokens)
        known = next((prefix for prefix in [*self.used, *self.idle] if prefix.tokens == tokens), None)
        at_boundary = position == len(life.boundary)
        hands_over = at_boundary and life.step is None
        for refused, error, words in (
            (life.step is not None and life.step.between, StepOrderError, "have verified"),
            (known is None and position not in self.held(life), SpecStateError, "holds states at"),
            (known is None and not hands_over and self.room[1] == 0, CapacityError, "no slot to publish"),
        ):
            if refused:
                with pytest.raises(error, match=words):
                    publish()
                return
        if known is None and not hands_over:
            self._take(1)
        publish()
        if known in self.idle:
            self.idle.remove(known)
            self.idle.append(known)
        elif known is None:
            self.idle.append(Published(tokens))
            if hands_over:
                life.has_boundary_slot, life.boundary = False, []
            if life.step is None:
                life.stands()

    def restore(self, name: str, tokens: list[int]) -> None:
        known = next((prefix for prefix in [*self.used, *self.idle] if prefix.tokens == tokens), None)
        taken = name in self.lives or name in self.parked
        self.misses += known is None and not taken
        for refused, error, words in (
            (taken, SpecStateError, "is live already|is preempted"),
            (known is None, SpecStateError, "no state is published"),
            (min(self.room[0], self.room[1] - (known in self.idle)) == 0, CapacityError, "no slot for request"),
        ):
            if refused:
                with pytest.raises(error, match=words):
                    self.manager.restore(tokens, name)
                return
        assert known is not None
        if known in self.idle:
            self.idle.remove(known)
            self.used.append(known)
        known.num_users += 1
        self._take(1)
        self.hits += 1
        handle = self.manager.restore(tokens, name)
        slot = self._slot_of(handle)
        life = self.lives[name] = Life(handle, slot, [*tokens], running=slot, source=known)
        life.stands()

    def reserve(self, count: int) -> None:
        if count > self.room[1]:
            with pytest.raises(CapacityError, match="to reserve"):
                self.manager.reserve_checkpoints(count)
            return
        self._take(count)
        self.lent += self.manager.reserve_checkpoints(count)

    def give_back(self, slot: int) -> None:
        """A slot of the caller's, or one that is none; while a step with a table is open, none goes back."""
        owners = [*self.lives.values(), *(parked.life for parked in self.parked.values())]
        owner = next((life for life in owners if slot in life.slots), None)
        steps = [life.step for life in self.lives.values() if life.step is not None]
        for refused, words in (
            (slot not in self.lent, "is not reserved"),
            (any(row.life and row.line is not None for step in steps for row in step.rows), "still open"),
            (owner is not None and owner.running == slot, "running checkpoint of request"),
        ):
            if refused:
                with pytest.raises(SpecStateError, match=words):
                    self.manager.return_checkpoints([slot])
                return
        self.manager.return_checkpoints([slot])
        self.lent.remove(slot)
        self.kept.pop(slot, None)
        if owner is not None:
            owner.slots.remove(slot)

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

    def draw_blocks(self, data: st.DataObject, rows: Rows) -> Blocks:
        """Lines of the caller's slots, in any order, among entries that are none; now and then beside the truth."""
        owners = [*self.lives.values(), *(parked.life for parked in self.parked.values())]
        for name in rows.names:
            if name is not None and (not self.lives[name].slots or data.draw(st.booleans())):
                taken = {slot for life in owners for slot in life.slots}
                self.lives[name].slots += [slot for slot in self.lent if slot not in taken][
                    : data.draw(st.integers(1, 3))
                ]
        size = max([*rows.entries, 0]) + 1 + data.draw(st.integers(0, 1))
        width = data.draw(st.sampled_from([6, 6, 1, 2, 3]))
        lines = [[99] * width for _ in range(size)]
        off = [7] * size
        for name, entry in zip(rows.names, rows.entries, strict=True):
            if name is not None:
                life = self.lives[name]
                slots = [*life.slots * 3, life.home, 0, data.draw(st.sampled_from([0, -3, 2**31 - 1]))]
                lines[entry] = [data.draw(st.sampled_from(slots)) for _ in range(width)]
                off[entry] = data.draw(st.sampled_from([0, 0, 0, 0, 0, 1, -2]))
        return Blocks(lines, off)

    def begin(self, rows: Rows, blocks: Blocks | None = None) -> OpenStep | None:
        """The step over ``rows``; None when it was refused: one of them has an open step, or finds no boundary slot."""
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
        block_size, given = self.config.block_size, {}
        if blocks is not None:
            given = self._as_given(rows, blocks)
        elif block_size is not None:
            due = [
                life
                for life, n in zip(chosen, rows.lens, strict=True)
                if life is not None and not life.has_boundary_slot and life.may_cross(n, block_size)
            ]
            if len(due) > self.room[1]:
                with pytest.raises(CapacityError, match="no slots for boundary"):
                    self.manager.begin_step(metadata, rows.pad_to)
                return None
            self._take(len(due))
            for life in due:
                life.has_boundary_slot = True
        tokens = sum(rows.lens) if rows.pad_to is None else rows.pad_to[1]
        self.seed += 1
        inputs = make_inputs(self.config, tokens, self.seed, self.device)
        step = OpenStep(self.manager.begin_step(metadata, rows.pad_to, **given), [], inputs)
        start = 0
        columns = (chosen, rows.lens, rows.least, rows.entries, rows.kinds)
        for life, query_len, minimum, entry, kind in zip(*columns, strict=True):
            window = [tensors[start : start + query_len] for tensors in inputs]
            row = Row(life, query_len, minimum, entry, self._new_tokens(query_len), prompt=kind == "prompt")
            if life is not None:
                life.step = step
                row.after, row.outputs = self._twin(life).window(window)
                if blocks is not None:
                    row.line = [] if blocks.off[entry] else blocks.lines[entry]
                    self.misplaced += blocks.off[entry] != 0
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
            before = len(life.tokens)
            for count in range(1, accepted + 1):
                states = [after[count - 1] for after in row.after]
                self.states[(*life.tokens, *row.tokens[:count])] = states
            life.tokens = life.tokens + row.tokens[:accepted]
            life.most += row.query_len
            life.least += row.query_len if row.prompt else 0
            folded = 0 if step.flushed or self.config.fold_policy != "deferred" else life.pending
            life.pending = life.pending - folded + accepted
            at_boundary = self._cross(life, row, before)
            full = self.config.fold_policy == "ring" and life.pending + 3 > self.config.record_capacity
            folds = verb == "commit" or self.config.fold_policy == "eager"
            life.may_be_pending = not folds
            if folds or full or at_boundary or (verb == "defer" and eager[row.entry]):
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
        assert (counters.clamps, counters.misplaced_rows) == (self.clamped, self.misplaced)
        assert self.manager.num_requests == len(self.lives)
        assert self.manager.can_admit(min(self.room)) and not self.manager.can_admit(min(self.room) + 1)
        self._prefixes_agree()
        for slot, tokens in self.kept.items():
            self._holds(slot, tokens)
        for parked in self.parked.values():
            if parked.keeps == "records":
                life = parked.life
                cursor = self.manager._backend.cursor(life.handle.record_slot)
                assert (cursor.pending_len, cursor.committed_len) == (life.pending, len(life.tokens))
                self._boundary_agrees(life, self.manager._preempted.of(life.handle.request_id, ""))
        for life in self.lives.values():
            assert self.manager._backend.cursor(life.handle.record_slot).pending_len == life.pending
            assert self._slot_of(life.handle) == life.running
            self._boundary_agrees(life, self.manager._requests.of(life.handle))
            if life.step is not None and life.step.between:
                with pytest.raises(StepOrderError, match="have verified"):
                    self.manager.read(life.handle, 0)
            else:
                self._twin(life).check(self.manager, life.handle, self.tolerance)

    def _prefixes_agree(self) -> None:
        metrics, published = self.manager.metrics(), self.manager.published()
        assert (metrics.prefix_hits, metrics.prefix_misses) == (self.hits, self.misses)
        assert (metrics.prefix_evictions, metrics.reserved_slots) == (self.evictions, len(self.lent))
        keys = [*map(PrefixKey.of, (prefix.tokens for prefix in [*self.used, *self.idle]))]
        assert [*published][len(self.used) :] == keys[len(self.used) :]
        assert {*published} == {*keys}
        for prefix, key in zip([*self.used, *self.idle], keys, strict=True):
            self._holds(published[key], prefix.tokens)

    def _boundary_agrees(self, life: Life, owner: Any) -> None:
        cursor = self.manager._backend.cursor(life.handle.record_slot)
        assert bool(owner.boundary_slot) == life.has_boundary_slot
        assert cursor.boundary_len == len(life.boundary)
        if life.boundary:
            self._holds(owner.boundary_slot, life.boundary)

    def _holds(self, slot: int, tokens: list[int]) -> None:
        """A checkpoint slot holds the state after these tokens, in every layer."""
        for layer, state in enumerate(self.states[(*tokens,)]):
            recurrent, conv = self.manager.checkpoints(layer)
            assert relative_error(recurrent[slot], state.recurrent) < self.tolerance
            if conv is not None:
                assert relative_error(conv[slot], state.conv) < self.tolerance

    # -- helpers

    def _twin(self, life: Life) -> Twin:
        return Twin(self.oracle, self.num_layers, self.states[(*life.tokens,)], len(life.tokens))

    def _new_tokens(self, count: int) -> list[int]:
        """Ids that no other token has."""
        self.num_tokens += count
        return [*range(self.num_tokens - count, self.num_tokens)]

    def _slot_of(self, handle: Handle) -> int:
        """Where its checkpoint lies."""
        return int(self.manager.checkpoint_slots([handle])[0])

    def _take(self, count: int) -> None:
        """So many checkpoint slots are about to be taken: what is evicted for them."""
        evicted = max(count - self.num_free, 0)
        self.evictions += evicted
        del self.idle[:evicted]

    def _move(self, life: Life, slot: int, checkpoint_len: int) -> None:
        """The running checkpoint lies in ``slot`` from here on; where it lay it stays, at ``checkpoint_len``."""
        if slot == life.running:
            return
        if life.running != life.home:
            self.kept[life.running] = life.tokens[:checkpoint_len]
        life.running = slot
        self.kept.pop(slot, None)

    def _cross(self, life: Life, row: Row, before: int) -> bool:
        """What the end of a row's window does at a boundary; whether the row folds for it."""
        block_size, after = self.config.block_size, len(life.tokens)
        if block_size is None or after // block_size * block_size <= before:
            return False
        column = after // block_size
        boundary = life.tokens[: column * block_size]
        if row.line is None:
            if life.has_boundary_slot:
                life.boundary = boundary
            return life.has_boundary_slot
        if not row.line:
            return False
        line = [slot if 0 < slot <= self.config.num_checkpoints else 0 for slot in row.line]
        source, target = life.running, line[min(column, len(line) - 1)] or life.running
        ends = line[column - 1] if column <= len(line) else 0
        self._move(life, target, after - life.pending)
        if ends and (ends != target or after % block_size == 0):
            if ends not in (target, life.home):
                self.kept[ends] = boundary
            return True
        return target != source

    def _as_given(self, rows: Rows, blocks: Blocks) -> dict[str, torch.Tensor]:
        """``blocks`` as begin_step takes them."""
        positions = [*blocks.off]
        for name, entry in zip(rows.names, rows.entries, strict=True):
            if name is not None:
                positions[entry] += len(self.lives[name].tokens)
        given = {"block_table": blocks.lines, "positions": positions}
        return {name: torch.tensor(v, dtype=torch.int32, device=self.device) for name, v in given.items()}

    def _end_of(self, life: Life) -> None:
        """It has ended, live or preempted: the prefix that it came from has one user less."""
        prefix = life.source
        if prefix is not None:
            prefix.num_users -= 1
            if not prefix.num_users:
                self.used.remove(prefix)
                self.idle.append(prefix)

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
            state = self.oracle.zero() if row.life is None else self._twin(row.life).states[layer]
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
    #: Who keeps boundary checkpoints: nobody, the requests themselves, or the caller by its block tables.
    blocks: ClassVar[tuple[str, ...]] = ("none", "own", "table")

    @initialize(
        policy=st.sampled_from(POLICIES),
        windows=st.integers(0, 2),
        taps=st.sampled_from([None, 2, 4]),
        checkpoints=st.integers(2, 4),
        kind=st.integers(0, 2),
        block_size=st.integers(3, 6),
        position=st.integers(0, 7),
    )
    def build(
        self,
        policy: str,
        windows: int,
        taps: int | None,
        checkpoints: int,
        kind: int,
        block_size: int,
        position: int,
    ) -> None:
        options = {"backend": self.backend, "device": self.device, "tolerance": self.tolerance, **self.sizes}
        blocks = self.blocks[kind % len(self.blocks)]
        self.with_tables = blocks == "table"
        if blocks != "none":
            options["block_size"] = block_size
            checkpoints += 7 if self.with_tables else 3
        self.side = Side(policy, windows, taps, checkpoints, **options)
        if self.with_tables:
            self.side.reserve(4)
        for name in NAMES[:2]:
            self.side.admit(name)
            if position:
                self.side.load(name, position, in_place=False)

    # -- few rules with many faces each: hypothesis leaves out whole rules at random, and none of these may be missing

    @rule(
        data=st.data(),
        face=st.sampled_from(
            (
                "admit,admit,load,release,stale,flush,flush,fork,preempt,preempt,resume,resume,discard,fence,fence,"
                "publish,publish,restore,restore,restore,reserve,return"
            ).split(",")
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
        elif face == "reserve":
            side.reserve(data.draw(st.integers(1, 3)))
        elif face == "return":
            moved = [life.running for life in side.lives.values() if life.running != life.home]
            side.give_back(data.draw(st.sampled_from([*side.lent, *moved, 1])))
        elif face == "restore":
            # Mostly what is published, under a name that is free.
            if side.lives and not side.used and not side.idle:
                self._between_lives(data, "publish", None)
            known = [prefix.tokens for prefix in [*side.idle, *side.used]]
            tokens = known if known and data.draw(st.integers(0, 5)) else [[0, -1]]
            side.restore(self._draw_new_name(data), data.draw(st.sampled_from(tokens)))
        elif face in ("resume", "discard"):
            # Mostly one that is preempted.
            names = sorted(side.parked) if side.parked and data.draw(st.integers(0, 5)) else NAMES
            getattr(side, face)(data.draw(st.sampled_from(names)))
        elif side.lives and face in ("fork", "preempt", "publish"):
            self._between_lives(data, face, None)
        elif side.lives and face == "load":
            side.load(self._draw_name(data), data.draw(st.integers(0, 40)), data.draw(st.booleans()))
        elif side.lives:
            side.release(self._draw_name(data))

    @rule(data=st.data(), then=st.sampled_from("leave,verify,cancel,end,end,end,end,fork,preempt,publish".split(",")))
    def begin(self, data: st.DataObject, then: str) -> None:
        side = self.side
        # Mostly requests that are free, so that steps get going, seldom none; sometimes one that must be refused.
        if not side.free() and data.draw(st.integers(0, 3)):
            side.admit(self._draw_new_name(data))
        names = side.free() if data.draw(st.integers(0, 5)) else sorted(side.lives)
        rows = side.draw_rows(data, names)
        free = all(name is None or side.lives[name].step is None for name in rows.names)
        blocks = side.draw_blocks(data, rows) if self.with_tables and free and data.draw(st.integers(0, 3)) else None
        step = side.begin(rows, blocks)
        if step is None or then == "leave":
            return
        if then == "cancel":
            side.verify(step, data.draw(st.sampled_from([[0], [1], [0, 1]])))
            side.cancel(step)
            return
        early = data.draw(st.booleans())
        if then in ("fork", "preempt", "publish") and early:
            self._between_lives(data, then, step)
        side.verify(step, [0, 1])
        if then in ("fork", "preempt", "publish") and not early:
            self._between_lives(data, then, step)
        if then != "verify":
            side.end(step, side.draw_end(data, step))

    @precondition(lambda self: self.side.open)
    @rule(
        data=st.data(),
        face=st.sampled_from(
            "verify one,verify,write,flush,end,end,end,cancel,release,flush all,fork,preempt,publish,fence".split(",")
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
        elif face in ("fork", "preempt", "publish"):
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

    def _draw_new_name(self, data: st.DataObject) -> str:
        """Mostly one that is free."""
        free = [name for name in NAMES if name not in self.side.lives and name not in self.side.parked]
        return data.draw(st.sampled_from(free if free and data.draw(st.integers(0, 5)) else NAMES))

    def _between_lives(self, data: st.DataObject, face: str, step: OpenStep | None) -> None:
        """Of a request in ``step``, or of any."""
        lives = self.side.lives.values() if step is None else [row.life for row in step.rows if row.life is not None]
        if not lives:
            return
        if face == "publish":  # seldom one that has no tokens
            lives = [life for life in lives if life.tokens] or lives
        name = data.draw(st.sampled_from(sorted(life.handle.request_id for life in lives)))
        if face == "fork":
            # Mostly names that are free.
            free = [new for new in NAMES if new not in self.side.lives and new not in self.side.parked]
            names = free if free and data.draw(st.integers(0, 5)) else NAMES
            size = data.draw(st.sampled_from([1, 1, 2]))
            self.side.fork(name, data.draw(st.lists(st.sampled_from(names), unique=True, min_size=1, max_size=size)))
        elif face == "publish":
            # Mostly at a position that it holds.
            held = self.side.held(self.side.lives[name])
            anywhere = not held or not data.draw(st.integers(0, 5))
            self.side.publish(name, data.draw(st.integers(1, 40) if anywhere else st.sampled_from(held)))
        else:
            self.side.preempt(name, data.draw(st.sampled_from(["records", "records", "folded", "host"])))

    def _draw_names(self, data: st.DataObject) -> list[str] | None:
        """Some requests, or None: all of them."""
        names = sorted(self.side.lives)
        if data.draw(st.booleans()):
            return None
        return data.draw(st.lists(st.sampled_from(names), unique=True)) if names else []


SETTINGS = settings(
    max_examples=max(int(os.environ.get("SPECSTATE_EXAMPLES", "150")) // 3, 1),
    stateful_step_count=int(os.environ.get("SPECSTATE_STEPS", "30")),
)
"""150 examples of 30 steps, a third for each class below; SPECSTATE_EXAMPLES and SPECSTATE_STEPS ask for more."""


class WithoutBoundaries(Lifecycle):
    blocks = ("none",)


class WithBoundaries(Lifecycle):
    blocks = ("own",)


class WithBlockTables(Lifecycle):
    blocks = ("table",)


class TestWithoutBoundaries(WithoutBoundaries.TestCase):
    settings = SETTINGS


class TestWithBoundaries(WithBoundaries.TestCase):
    settings = SETTINGS


class TestWithBlockTables(WithBlockTables.TestCase):
    settings = SETTINGS
