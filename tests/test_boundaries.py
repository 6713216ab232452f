"""Boundary checkpoints: at every multiple of block_size, in a slot of the request's own or where a block table says.

Every call goes to a manager with payloads and to one without, both under debug: one digest, the same metrics. The
checkpoint at a boundary is compared with the oracle's state and conv history after exactly that many tokens.
"""

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from specstate import (
    CapacityError,
    PrefixKey,
    SamplingParams,
    SpecStateError,
    StateManager,
    StepMetadata,
    StepOrderError,
    TraceRecorder,
)
from specstate.oracle import OracleState
from specstate.replay import replay_file
from tests.factories import (
    POLICIES,
    fingerprint,
    make_config,
    make_folds,
    make_inputs,
    make_manager,
    relative_error,
    verify_all,
)
from tests.test_preemption import Both, Window

KEEPS = ("records", "checkpoint", "host")


class Blocks(Both):
    """Both managers with block_size; of every request, the states at all positions and where checkpoints must lie."""

    def __init__(self, policy: str, **changes: Any) -> None:
        super().__init__(policy, **{"block_size": 4, "num_checkpoints": 12, **changes})
        self.past: dict[str, dict[int, list[OracleState]]] = {}
        self.bounds: dict[str, int] = {}
        """Position of the checkpoint in the request's own boundary slot."""
        self.runs: dict[str, int] = {}
        """Slot of the running checkpoint, once a table has moved it."""
        self.ended: dict[int, list[OracleState]] = {}
        """By slot of a table: what it keeps of a block that has ended."""

    @property
    def block_size(self) -> int:
        assert self.config.block_size is not None
        return self.config.block_size

    # -- lives

    def admit(self, *names: str, sampling: SamplingParams | None = None) -> None:
        super().admit(*names, sampling=sampling)
        for name in names:
            self.past[name] = {0: list(self.twins[name].states)}

    def fork(self, source: str, *names: str, sampling: list[SamplingParams] | None = None) -> None:
        super().fork(source, *names, sampling=sampling)
        for name in names:
            self.past[name] = dict(self.past[source])

    def preempt(self, name: str, keeps: str) -> None:
        super().preempt(name, keeps)
        if keeps != "records":
            self.bounds.pop(name, None)
            self.runs.pop(name, None)

    def release(self, name: str) -> None:
        super().release(name)
        self.bounds.pop(name, None)
        self.runs.pop(name, None)
        for window in self.windows:
            if name in window.lens:
                window.gone.add(name)

    def load(self, name: str, position: int) -> None:
        """To a state that it had, or that another of the same tokens had."""
        states = self.past[name][position]
        pairs = [(state.recurrent, state.conv) for state in states]
        for manager, copied in zip(self.managers, (pairs, None), strict=True):
            manager.load(self.handles[name], copied, position)
        self.twins[name].states, self.twins[name].committed_len = list(states), position
        self.bounds.pop(name, None)

    # -- steps

    def begin_with(
        self,
        lens: dict[str, int],
        lines: dict[str, list[int]] | None = None,
        metadata: dict[str, Any] | None = None,
        **options: Any,
    ) -> Window:
        """lines: each row's of a block table; options: of begin_step, what is made of ``lines`` by default."""
        given = StepMetadata(
            handles=tuple(self.handles[name] for name in lens), query_lens=tuple(lens.values()), **(metadata or {})
        )
        if lines is not None:
            index = given.batch_index or range(len(lens))
            width, length = len(next(iter(lines.values()))), max(index, default=-1) + 1
            table, positions = torch.full((length, width), 99), torch.full((length,), -7)
            for entry, name in zip(index, lens, strict=True):
                table[entry] = torch.tensor(lines[name])
                positions[entry] = self.twins[name].committed_len
            options = {"block_table": table.int(), "positions": positions.int(), **options}
        self.seed += 1
        inputs = make_inputs(self.config, sum(lens.values()), self.seed)
        window = Window([manager.begin_step(given, **options) for manager in self.managers], lens, inputs)
        assert window.steps[0].boundary_slots.tolist() == window.steps[1].boundary_slots.tolist()
        self.windows.append(window)
        return window

    def begin(self, **lens: int) -> Window:
        return self.begin_with(lens)

    def end(
        self,
        window: Window,
        accepted: dict[str, int],
        verb: str = "defer",
        lines: dict[str, list[int]] | None = None,
        **masks: tuple[str, ...],
    ) -> None:
        """masks: the names for which ``eager`` or ``finished`` holds."""
        index = window.steps[0].metadata.batch_index or range(len(window.lens))
        counts = torch.zeros(max(index, default=-1) + 1, dtype=torch.int32)
        given = {field: torch.zeros(len(counts), dtype=torch.bool) for field in masks}
        for entry, name in zip(index, window.lens, strict=True):
            counts[entry] = accepted[name]
            for field, names in masks.items():
                given[field][entry] = name in names
        for step in window.steps:
            getattr(step, verb)(counts, **given)
        self.windows.remove(window)
        for name in window.lens:
            if name not in window.gone:
                self.went(name, window.of(name), accepted[name], None if lines is None else lines[name], lines)

    def went(self, name: str, inputs: Any, accepted: int, line: list[int] | None, by_table: Any = None) -> None:
        """The request has committed ``accepted`` tokens of its window: where its checkpoints must lie now."""
        twin, size = self.twins[name], self.block_size
        before = twin.committed_len
        for t in range(accepted):
            twin.commit([tensors[t : t + 1] for tensors in inputs], 1)
            self.past[name][before + t + 1] = list(twin.states)
        after = before + accepted
        boundary = after // size * size
        if accepted:  # the running one folds where it lies
            self.ended.pop(self.runs.get(name, 0), None)
        if boundary <= before:
            return
        if by_table is None:
            self.bounds[name] = boundary
            return
        if not line:  # not to be used
            return
        slots = [slot if 0 < slot <= self.config.num_checkpoints else 0 for slot in line]
        runs, ends = slots[min(after // size, len(slots) - 1)], boundary // size - 1
        if runs:
            self.runs[name] = runs
            self.ended.pop(runs, None)
        if ends < len(slots) and slots[ends] and (slots[ends] != self.runs.get(name) or after == boundary):
            self.ended[slots[ends]] = self.past[name][boundary]

    def defer(self, window: Window, finished: tuple[str, ...] = (), **accepted: int) -> None:
        self.end(window, accepted, finished=finished)

    def run_with(
        self, rows: dict[str, tuple[int, int]], lines: dict[str, list[int]] | None = None, **options: Any
    ) -> None:
        """A whole step over (query_len, num_accepted) rows, and everything compared."""
        window = self.begin_with({name: row[0] for name, row in rows.items()}, lines, **options)
        self.verify(window)
        self.end(window, {name: row[1] for name, row in rows.items()}, lines=lines)
        self.check()

    def reserve(self, n: int) -> list[int]:
        return list(self.call("reserve_checkpoints", n))

    # -- what holds

    def check(self) -> None:
        super().check()
        self.call("metrics")
        for name, handle in self.handles.items():
            assert self.cursor(handle)[5] == self.bounds.get(name, 0)
            slot = int(self.call_slots([name])[0])
            if name in self.runs:
                assert slot == self.runs[name]
            if name in self.bounds:
                own = [manager._requests.of(handle).boundary_slot for manager in self.managers]
                assert own[0] == own[1] not in (0, slot)
                self.holds(own[0], self.past[name][self.bounds[name]])
        for slot, states in self.ended.items():
            self.holds(slot, states)

    def call_slots(self, names: list[str]) -> list[int]:
        both = [m.checkpoint_slots([self.handles[name] for name in names]).tolist() for m in self.managers]
        assert both[0] == both[1]
        return list(both[0])

    def holds(self, slot: int, states: list[OracleState]) -> None:
        """The checkpoint slot holds these states, recurrent and conv history, in every layer."""
        for layer, state in enumerate(states):
            recurrent, conv = self.payload.checkpoints(layer)
            assert relative_error(recurrent[slot], state.recurrent) < 1e-12
            if conv is not None:
                assert relative_error(conv[slot], state.conv) < 1e-12

    def slots(self, names: str) -> list[int]:
        """The requests' own boundary slots."""
        return [self.payload._requests.of(self.handles[name]).boundary_slot for name in names]

    def trust(self) -> None:
        """No debug from here on."""
        for manager in self.managers:
            manager._debug = False


# -- where a window ends


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("verb", ["defer", "commit"])
@pytest.mark.parametrize("taps", [None, 4], ids=["no conv", "conv 4"])
def test_a_window_that_lands_on_a_boundary(taps: int | None, verb: str, policy: str) -> None:
    """Class 6: B - 2 committed, V{r:4} C{r:2}."""
    both = Blocks(policy, block_size=5, conv_kernel_size=taps)
    both.admit("r")
    both.run(r=(4, 3))
    for boundary in (5, 10):  # the second overwrites the first, in the same slot
        window = both.begin(r=4)
        both.verify(window)
        both.end(window, {"r": 2}, verb)
        both.check()
        assert both.bounds == {"r": boundary}
        assert both.pending("r") == 0
        assert both.slots("r") == [2]
        both.run(r=(4, 3))
        assert both.bounds == {"r": boundary}  # and stays, while the request goes on
    assert both.call("metrics").boundary_slots == 1


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("accepted", [1, 2, 3, 4])
@pytest.mark.parametrize("size", [4, 7])
def test_rows_from_everywhere_before_a_boundary(size: int, accepted: int, policy: str) -> None:
    """One step over four rows, 1 to 4 tokens short of the boundary: those that reach it, and those alone, fold."""
    both = Blocks(policy, block_size=size, max_requests=5)
    starts = {f"r{short}": size - short for short in (1, 2, 3, 4)}
    both.admit(*starts)
    for left in range(3, 0, -1):  # in windows of 4 at most; a request without tokens has none of them
        rows = {name: min(start - 3 * (left - 1), 3) for name, start in starts.items() if start > 3 * (left - 1)}
        if rows:
            both.run_with({name: (n, n) for name, n in rows.items()})
    assert {name: both.twins[name].committed_len for name in starts} == starts
    before, counted = {name: both.pending(name) for name in starts}, both.call("metrics").folds
    both.run_with(dict.fromkeys(starts, (4, accepted)))
    reach = {name for name, start in starts.items() if start + accepted >= size}
    assert both.bounds == dict.fromkeys(reach, size)
    folds = both.call("metrics").folds
    folded = folds.at_end - counted.at_end, folds.at_boundary - counted.at_boundary
    assert folded == ((4, 0) if policy == "eager" else (0, len(reach)))
    for name in starts.keys() - reach:
        kept = {"eager": 0, "deferred": accepted, "ring": before[name] + accepted}
        assert both.pending(name) == kept[policy]
    assert all(both.pending(name) == 0 for name in reach)


@pytest.mark.parametrize("policy", POLICIES)
def test_what_a_mask_asks_for_and_what_a_boundary_needs(policy: str) -> None:
    both = Blocks(policy, max_requests=4)
    both.admit("mask", "boundary", "both", "neither")
    both.run_with({"mask": (1, 1), "boundary": (3, 3), "both": (3, 3), "neither": (1, 1)})
    window = both.begin_with(dict.fromkeys(("neither", "both", "boundary", "mask"), 2))
    both.verify(window)
    both.end(window, dict.fromkeys(window.lens, 1), eager=("mask", "both"))
    both.check()
    assert both.bounds == {"boundary": 4, "both": 4}
    assert (both.pending("neither") == 0) == (policy == "eager")
    folds = both.call("metrics").folds
    if policy == "eager":
        assert folds == make_folds(at_end=8)
    else:  # of two reasons the mask counts
        assert folds == make_folds(by_mask=2, at_boundary=1, in_verify=4 if policy == "deferred" else 0)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize(("size", "boundary"), [(4, 4), (6, 6), (7, 0)], ids=["crossed", "reached", "missed"])
def test_an_end_token_before_the_boundary(size: int, boundary: int, policy: str) -> None:
    """Class 6: the end token is the third of four tokens that the target would accept."""
    both = Blocks(policy, block_size=size)
    both.admit("r", sampling=SamplingParams(end_token_ids=(3,)))
    both.run(r=(3, 3))
    window = both.begin(r=4)
    both.verify(window)
    logits = torch.nn.functional.one_hot(torch.tensor([1, 3, 2, 5]), 8).double()
    result = window.steps[0].sample(logits, torch.tensor([0, 1, 3, 2]))
    assert (result.num_accepted.tolist(), result.finished.tolist()) == ([3], [True])
    window.steps[0].defer(result)
    window.steps[1].defer([3], finished=[True])
    both.windows.remove(window)
    both.went("r", window.inputs, 3, None)
    both.check()
    assert both.bounds == ({"r": boundary} if boundary else {})
    # Windows after the end accept nothing, whatever the counts say.
    for _ in range(2):
        window = both.begin(r=4)
        both.verify(window)
        for step in window.steps:
            step.defer(torch.tensor([4]))
        both.windows.remove(window)
        both.check()
    metrics = both.call("metrics")
    assert (metrics.wasted_windows, both.twins["r"].committed_len) == (2, 6)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("verified", [0, 1, 2])
def test_a_cancelled_window_crosses_nothing(verified: int, policy: str) -> None:
    both = Blocks(policy)
    both.admit("a", "b")
    both.run(a=(4, 4), b=(3, 3))
    window = both.begin(b=4, a=4)
    if verified:
        both.verify(window, *range(verified))
    for step in window.steps:
        step.cancel()
    both.windows.remove(window)
    both.check()
    assert both.bounds == {"a": 4}
    both.run(b=(4, 4), a=(4, 4))
    assert both.bounds == {"a": 8, "b": 4}


@pytest.mark.parametrize("policy", POLICIES)
def test_prompt_rows_cross_boundaries(policy: str) -> None:
    """Also after an end token: a prompt row says that its request goes on."""
    both = Blocks(policy)
    both.admit("p", "d")
    for turn in range(5):
        window = both.begin_with({"p": 3, "d": 4}, metadata={"row_kinds": ("prompt", "decode")})
        both.verify(window)
        both.end(window, {"p": 3, "d": 2}, finished=("p",) if turn == 2 else ())
        both.check()
        assert both.bounds.get("p", 0) == 3 * (turn + 1) // 4 * 4
    assert both.call("metrics").wasted_windows == 0


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("leaves", ["release", *KEEPS])
@pytest.mark.parametrize("verified", [False, True], ids=["begun", "verified"])
def test_a_late_end_crosses_nothing_for_those_that_left(verified: bool, leaves: str, policy: str) -> None:
    both = Blocks(policy)
    both.admit("a", "b")
    both.run(a=(4, 4), b=(3, 3))
    window = both.begin(a=4, b=4)
    if verified:
        both.verify(window)
    own = both.slots("ab")
    assert window.steps[0].boundary_slots.tolist() == own
    if leaves == "release":
        both.release("a")
    else:
        both.preempt("a", leaves)
    assert [step.boundary_slots.tolist() for step in window.steps] == [[0, own[1]]] * 2
    if not verified:
        both.verify(window)
    if leaves != "records":  # whoever takes the slots that "a" gave up keeps them whole
        both.admit("c")
    both.end(window, {"a": 4, "b": 3})
    both.check()
    assert (both.bounds["b"], both.bounds.get("a")) == (4, 4 if leaves == "records" else None)
    assert both.call("metrics").late_ends_dropped == 1
    if leaves != "release":
        both.resume("a")
        both.check()
        both.run(a=(4, 4))
        assert both.bounds["a"] == 8


def test_a_block_is_no_shorter_than_a_window() -> None:
    with pytest.raises(ValidationError, match="block_size = 3 is smaller than max_query_len = 4"):
        make_config(block_size=3)


@pytest.mark.parametrize("policy", POLICIES)
def test_boundaries_in_storage_of_the_caller(policy: str) -> None:
    spec, slots = make_config().layer, 13
    storage = []
    for _ in range(2):
        # Pages of both, side by side, in reverse order of dimensions.
        page = torch.zeros(slots, 3 * spec.num_heads * spec.head_v_dim * spec.head_k_dim, dtype=torch.float64)
        recurrent = page[:, : 2 * 5 * 6].view(slots, spec.num_heads, spec.head_v_dim, spec.head_k_dim)
        storage.append((recurrent, page[:, 60 : 60 + 34 * 3].view(slots, 34, 3)))
    both = Blocks(policy, storage=storage)
    both.admit("a", "b")
    for counts in ((4, 1), (3, 4), (4, 2)):
        both.run(a=(4, counts[0]), b=(4, counts[1]))
    assert both.bounds == {"a": 8, "b": 4}
    table = both.reserve(4)
    for counts in ((4, 2), (2, 3)):
        both.run_with({"a": (4, counts[0]), "b": (4, counts[1])}, {"a": [*table[:2], 0, 0], "b": [0, 0, *table[2:]]})
    assert both.runs == {"b": table[3]}
    assert not any(bool(part[0].any()) for pair in storage for part in pair)


# -- the request's own slot


def test_a_slot_is_taken_once_a_window_might_get_so_far() -> None:
    """As far as the host knows, which asks nobody: its bounds are the lengths of the windows."""
    both = Blocks("ring", block_size=8)
    both.admit("a")

    def taken(query_len: int) -> bool:
        window = both.begin(a=query_len)
        for step in window.steps:
            step.cancel()
        both.windows.remove(window)
        return both.slots("a") != [0]

    assert not taken(4)
    both.run(a=(4, 1))
    assert not taken(3)
    both.run(a=(3, 2))  # at 3, but it could be 7
    room = both.room()
    assert taken(1)
    assert both.room() == (room[0], room[1] - 1)
    both.check()
    assert both.call("metrics").boundary_slots == 1
    assert taken(4)  # kept, and taken no second time
    assert both.room() == (room[0], room[1] - 1)


def test_no_slot_hangs_on_a_look() -> None:
    """Neither committed_len nor a publish that is refused tells the host what would move a slot; a publish does."""
    both = Blocks("ring", block_size=8)
    both.admit("a", "b")
    for _ in range(2):
        window = both.begin(a=4, b=4)
        both.verify(window)
        both.end(window, {"a": 1, "b": 1})
        both.payload.committed_len(both.handles["a"])  # of one of the two alone
        with pytest.raises(SpecStateError, match="holds states at"):
            both.payload.publish(both.handles["a"], PrefixKey("x", 7))
    assert both.slots("ab") != [0, 0]
    both.check()
    for name in "ab":
        both.release(name)
    both.admit("a")
    window = both.begin(a=4)
    both.verify(window)
    both.end(window, {"a": 1})
    both.call("publish", both.handles["a"], PrefixKey("a", 1))
    both.begin(a=4)  # 1 + 4, as the host knows now, not 4 + 4
    assert both.slots("a") == [0]


@pytest.mark.parametrize("policy", POLICIES)
def test_without_a_slot_a_step_is_refused(policy: str) -> None:
    names = [f"r{i}" for i in range(6)]
    both = Blocks(policy, max_requests=6, num_checkpoints=8)
    both.admit(*names)
    both.run_with(dict.fromkeys(names, (3, 3)))
    metadata = StepMetadata(handles=tuple(both.handles[name] for name in names), query_lens=(1,) * 6)
    words = (
        r"no slots for boundary checkpoints of 'r0', 'r1', 'r2', 'r3' and 2 more \(step 1\): .*"
        r"2 of num_checkpoints = 8 checkpoint slots"
    )
    both.refuses(CapacityError, words, "begin_step", metadata)
    both.run_with(dict.fromkeys(names[:2], (1, 1)))
    few = StepMetadata(handles=(both.handles["r0"], both.handles["r5"]), query_lens=(4, 1))
    both.refuses(CapacityError, r"of 'r5' \(step 2\)", "begin_step", few)
    both.run_with({"r0": (4, 4), "r1": (4, 4)})  # those that have one go on
    both.release("r1")
    both.run_with({"r0": (1, 1), "r5": (1, 1), "r2": (4, 4)})
    assert both.bounds == {"r0": 8, "r5": 4, "r2": 4}


def test_a_boundary_evicts_a_prefix() -> None:
    both = Blocks("ring", max_requests=2, num_checkpoints=2)
    both.admit("a")
    both.run(a=(2, 2))
    both.call("publish", both.handles["a"], PrefixKey("a", 2))
    both.run(a=(4, 3))
    assert both.call("published") == {}
    assert both.call("metrics").prefix_evictions == 1
    assert both.bounds == {"a": 4}


@pytest.mark.parametrize("policy", POLICIES)
def test_what_frees_the_slot_and_what_keeps_it(policy: str) -> None:
    both = Blocks(policy, max_requests=4)
    empty = both.room()

    def crossed() -> None:
        both.admit("a")
        both.run(a=(4, 4))
        both.run(a=(4, 2))
        assert both.room() == (empty[0] - 1, empty[1] - 2)

    crossed()
    both.release("a")
    assert both.room() == empty
    for keeps, (records, checkpoints) in {"checkpoint": (0, 1), "host": (0, 0), "records": (1, 2)}.items():
        crossed()
        both.preempt("a", keeps)
        assert both.room() == (empty[0] - records, empty[1] - checkpoints)
        assert both.call("metrics").boundary_slots == (keeps == "records")
        both.resume("a")
        both.check()
        both.run(a=(4, 2))  # reaches 8, in a slot of its own again
        assert both.bounds == {"a": 8}
        both.preempt("a", keeps)
        both.call("discard", "a")
        assert both.room() == empty
        both.bounds.clear()
    crossed()
    both.call("fence", "flush")
    assert both.call("metrics").boundary_slots == 1
    both.preempt("a", "records")
    both.admit("b")
    both.run(b=(4, 4))
    both.call("fence", "drop")
    both.handles.clear()
    assert both.room() == empty


@pytest.mark.parametrize("policy", POLICIES)
def test_a_fork_has_no_boundary_and_a_load_forgets_it(policy: str) -> None:
    both = Blocks(policy)
    both.admit("a")
    both.run(a=(4, 4))
    both.run(a=(4, 3))
    both.fork("a", "f")
    both.check()
    assert both.bounds == {"a": 4}
    both.load("a", 2)
    both.check()
    assert (both.bounds, both.slots("a")) == ({}, [2])
    both.refuses(SpecStateError, "holds states at 2", "publish", both.handles["a"], PrefixKey("a", 4))
    both.run(a=(4, 3), f=(1, 1))
    assert both.bounds == {"a": 4, "f": 8}
    assert both.slots("a") == [2]


# -- a block table of the caller's


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize(("size", "width"), [(4, 1), (4, 3), (4, 5), (6, 2)])
def test_blocks_end_where_the_table_says(size: int, width: int, policy: str) -> None:
    """Two rows through four blocks: the running checkpoint moves on, the last column is its last, and 0 is none."""
    both = Blocks(policy, block_size=size, num_checkpoints=20)
    both.admit("a", "b")
    slots, rnd = both.reserve(2 * width), random.Random(10 * size + width)
    while both.twins["a"].committed_len < 4 * size:
        lines = {"a": slots[:width], "b": slots[width:]}
        if rnd.random() < 0.3:  # no slot there this time, by any of the ways to say so
            lines["a"] = [slot if rnd.random() < 0.5 else 0 for slot in lines["a"]]
        rows = {name: (n := rnd.randint(1, 4), rnd.randint(1, n)) for name in rnd.sample("ab", 2)}
        options: dict[str, Any] = {"pad_to": 5} if rnd.random() < 0.5 else {}
        if rnd.random() < 0.5:
            options["metadata"] = {"batch_index": (3, 1)}
        both.run_with(rows, lines, **options)
    assert both.bounds == {}
    metrics = both.call("metrics")
    assert (metrics.reserved_slots, metrics.boundary_slots, metrics.misplaced_rows) == (2 * width, 0, 0)


def test_the_columns_that_a_request_goes_through() -> None:
    """One request, by hand: block j ends in column j, the running checkpoint lies in column committed_len // B."""
    both = Blocks("ring")
    both.admit("a")
    line = both.reserve(3)
    home = both.call_slots(["a"])[0]
    for accepted, column in ((3, None), (3, 1), (1, 1), (1, 2), (4, 2), (3, 2)):  # 3 6 7 8 12 15
        both.run_with({"a": (4, accepted)}, {"a": line})
        assert both.call_slots(["a"]) == [home if column is None else line[column]]
    assert [both.twins["a"].committed_len, sorted(both.ended)] == [15, line[:2]]
    both.holds(line[0], both.past["a"][4])
    both.holds(line[1], both.past["a"][8])


@pytest.mark.parametrize("policy", POLICIES)
def test_entries_that_are_no_slots_count_as_none(policy: str) -> None:
    both = Blocks(policy)
    both.admit("a", "b")
    both.trust()  # debug refuses them
    line = both.reserve(1)
    for _ in range(3):
        both.run_with({"a": (4, 3), "b": (4, 4)}, {"a": [13, -1, 2**31 - 1, -(2**31) + 1], "b": [*line, 99, -5, 13]})
    assert (both.runs, sorted(both.ended)) == ({}, line)


@pytest.mark.parametrize("policy", POLICIES)
def test_positions_that_are_not_the_request_s(policy: str) -> None:
    both = Blocks(policy)
    both.admit("a", "b")
    slots = both.reserve(4)
    lines = {"a": slots[:2], "b": slots[2:]}
    both.run_with({"a": (4, 3), "b": (4, 3)}, lines)
    wrong = torch.tensor([3, 2], dtype=torch.int32)
    metadata = StepMetadata(handles=(both.handles["a"], both.handles["b"]), query_lens=(4, 4))
    given = {"block_table": torch.tensor(list(lines.values()), dtype=torch.int32), "positions": wrong}
    words = r"positions\[1\] = 2 of row 1 \(request 'b'\), which stands at 3 \(step 1\)"
    both.refuses(SpecStateError, words, "begin_step", metadata, **given)
    both.trust()
    window = both.begin_with({"a": 4, "b": 4}, lines, positions=wrong)
    assert window.steps[0].boundary_slots.tolist() == [0, -1]
    both.verify(window)
    both.end(window, {"a": 2, "b": 4}, lines={**lines, "b": []})
    both.check()
    assert (both.runs, [*both.ended]) == ({"a": slots[1]}, [slots[0]])
    assert both.call("metrics").misplaced_rows == 1
    assert both.pending("b") == (0 if policy == "eager" else 4 if policy == "deferred" else 7)


FORMS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "a slice of a larger one": lambda t: torch.cat([t, t, t], 1)[:, 2:4],
    "every other column": lambda t: torch.stack([t, t + 50], 2).flatten(1)[:, ::2],
    "every other row": lambda t: torch.stack([t, t + 50], 1).flatten(0, 1)[::2],
    "transposed": lambda t: t.T.contiguous().T,
    "longer than it need be": lambda t: torch.cat([t, torch.full((3, 2), 99, dtype=torch.int32)]),
    "of inference mode": lambda t: _inference(t),
}


def _inference(tensor: torch.Tensor) -> torch.Tensor:
    with torch.inference_mode():
        return tensor.clone()


@pytest.mark.parametrize("form", FORMS)
def test_a_table_may_have_any_strides(form: str) -> None:
    both = Blocks("ring")
    both.admit("a", "b")
    slots = both.reserve(4)
    lines = {"a": slots[:2], "b": slots[2:]}
    table = FORMS[form](torch.tensor([*lines.values()], dtype=torch.int32))
    for counts in ((3, 4), (4, 3)):
        positions = torch.tensor([both.twins[name].committed_len for name in "ab"], dtype=torch.int32)
        both.run_with({"a": (4, counts[0]), "b": (4, counts[1])}, lines, block_table=table, positions=positions)
    assert both.runs == {"a": slots[1], "b": slots[3]}


def test_positions_may_be_longer_than_the_table() -> None:
    """Padded rows read neither, whichever entry theirs would be."""
    both = Blocks("ring")
    both.admit("a")
    line = both.reserve(2)
    positions = torch.tensor([0, 5, 6, 7], dtype=torch.int32)
    both.run_with({"a": (4, 4)}, {"a": line}, positions=positions, pad_to=4)
    assert both.runs == {"a": line[1]}


def test_a_table_may_be_lists_without_payloads() -> None:
    manager = StateManager(make_config(block_size=4, num_checkpoints=6), None, backend="metadata", debug=True)
    handle = manager.admit("a")
    line = manager.reserve_checkpoints(2)
    step = manager.begin_step(StepMetadata(handles=(handle,), query_lens=(4,)), block_table=[line], positions=(0,))
    step.replayed("verify")
    step.defer([4])
    assert manager.checkpoint_slots([handle]).tolist() == line[1:]


TABLE = torch.tensor([[2, 3], [4, 5]], dtype=torch.int32)
POSITIONS = torch.zeros(2, dtype=torch.int32)
BAD_TABLES: dict[str, tuple[dict[str, Any], str]] = {
    "no positions": ({"block_table": TABLE}, "positions not given"),
    "no table": ({"positions": POSITIONS}, "block_table not given"),
    "int64": ({"block_table": TABLE.long(), "positions": POSITIONS}, "block_table must be int32, got int64"),
    "bools": ({"block_table": TABLE.bool(), "positions": POSITIONS}, "block_table must be int32, got bool"),
    "floats": ({"block_table": TABLE.float(), "positions": POSITIONS}, "block_table must be int32, got float32"),
    "flat": ({"block_table": TABLE[0], "positions": POSITIONS}, r"block_table must have shape \[any, any\], got \[2\]"),
    "three dimensions": (
        {"block_table": TABLE[None], "positions": POSITIONS},
        r"block_table must have shape \[any, any\], got \[1, 2, 2\]",
    ),
    "elsewhere": ({"block_table": TABLE.to("meta"), "positions": POSITIONS}, "block_table must be on cpu, got meta"),
    "short": ({"block_table": TABLE[:1], "positions": POSITIONS}, "block_table.* 1 entries, .* entry 1"),
    "empty": ({"block_table": TABLE[:0], "positions": POSITIONS}, "block_table.* 0 entries, .* entry 1"),
    "no column": ({"block_table": TABLE[:, :0], "positions": POSITIONS}, "block_table"),
    "sparse": ({"block_table": TABLE.to_sparse(), "positions": POSITIONS}, "block_table must be strided"),
    "short positions": ({"block_table": TABLE, "positions": POSITIONS[:1]}, "positions has 1 entries, .* entry 1"),
    "positions a column": ({"block_table": TABLE, "positions": POSITIONS[:, None]}, r"positions .*\[2, 1\]"),
    "positions a scalar": ({"block_table": TABLE, "positions": POSITIONS[0]}, r"positions .*\[\]"),
    "positions of floats": ({"block_table": TABLE, "positions": POSITIONS.float()}, "positions .*float32"),
    "positions elsewhere": ({"block_table": TABLE, "positions": POSITIONS.to("meta")}, "positions must be on"),
    "a number": ({"block_table": 3, "positions": POSITIONS}, "block_table must be"),
    "a string": ({"block_table": "ab", "positions": POSITIONS}, "block_table must be"),
}


@pytest.mark.parametrize("name", BAD_TABLES)
def test_tables_that_are_refused(name: str) -> None:
    both = Blocks("deferred")
    both.admit("a", "b")
    assert both.reserve(4) == [3, 4, 5, 6]
    both.run(a=(3, 3), b=(2, 1))
    metadata = StepMetadata(handles=(both.handles["a"], both.handles["b"]), query_lens=(4, 2))
    given, words = BAD_TABLES[name]
    both.refuses(SpecStateError, rf"{words}.*\(step 1\)", "begin_step", metadata, **given)
    both.run(a=(4, 4), b=(2, 1))


def test_a_table_without_block_size_is_refused() -> None:
    both = Blocks("ring", block_size=None)
    handle = both.call("admit", "a")
    metadata = StepMetadata(handles=(handle,), query_lens=(2,))
    words = r"block_table, positions and block_size go together: {} not given \(step 0\)"
    for options, missing in (
        ({"block_table": TABLE, "positions": POSITIONS}, "block_size"),
        ({"block_table": TABLE}, "positions and block_size"),
        ({"positions": POSITIONS}, "block_table and block_size"),
    ):
        both.refuses(SpecStateError, words.format(missing), "begin_step", metadata, **options)


@pytest.mark.parametrize("values", [[[10**400, 2]], [[2, -(2**31)]]], ids=["vast", "beyond int32"])
def test_without_payloads_entries_are_int32_too(values: Any) -> None:
    """A recorded step could not be read again."""
    manager = StateManager(make_config(block_size=4), None, backend="metadata")
    handle = manager.admit("a")
    metadata = StepMetadata(handles=(handle,), query_lens=(2,))
    before = fingerprint(manager)
    with pytest.raises(SpecStateError, match=r"block_table must be within int32 \(step 0\)"):
        manager.begin_step(metadata, block_table=values, positions=[0])
    with pytest.raises(SpecStateError, match=r"positions must be within int32 \(step 0\)"):
        manager.begin_step(metadata, block_table=[[1]], positions=values[0])
    assert fingerprint(manager) == before


#: Lines for rows "a" and "b", which stand at 3 and at 9, over reserved slots 0 to 5; "home" is b's own, "c" runs in 5.
WRONG_LINES: dict[str, tuple[list[Any], list[Any], str]] = {
    "not reserved": ([0, "free"], [1, 2], r"block_table\[0\]\[1\] = {free} of row 0 is not reserved"),
    "another's own": ([0, "home"], [1, 2], r"block_table\[0\]\[1\] = {home} of row 0 is not reserved"),
    "no slot": ([0, "99"], [1, 2], r"block_table\[0\]\[1\] = 99 of row 0 is not reserved"),
    "negative": ([0, "-3"], [1, 2], r"block_table\[0\]\[1\] = -3 of row 0 is not reserved"),
    "in both rows": ([0, 1], [2, 1], r"block_table\[1\]\[1\] = .* of row 1 is also one that row 0 may write"),
    "in the last column of a row beyond it": (
        [0, 1],
        [2, 0],
        r"block_table\[1\]\[1\] = .* of row 1 is also one that row 0 may write",
    ),
    "another's running one": (
        [0, 5],
        [1, 2],
        r"block_table\[0\]\[1\] = .* holds the running checkpoint of request 'c'",
    ),
}


@pytest.mark.parametrize("name", WRONG_LINES)
def test_debug_looks_at_the_slots_of_a_table(name: str) -> None:
    both = Blocks("ring", num_checkpoints=14)
    both.admit("a", "b", "c")
    slots = both.reserve(6)
    both.run_with({"b": (4, 4), "a": (3, 3)})
    both.run_with({"b": (4, 4)})
    both.run_with({"b": (1, 1), "c": (4, 4)}, {"b": [0, 0], "c": [slots[4], slots[5]]})
    assert both.runs == {"c": slots[5]}
    named = {"home": both.call_slots(["b"])[0], "free": 14, "99": 99, "-3": -3}
    *lines, words = WRONG_LINES[name]
    table = [[slots[entry] if type(entry) is int else named[entry] for entry in line] for line in lines]
    metadata = StepMetadata(handles=(both.handles["a"], both.handles["b"]), query_lens=(4, 4))
    given = {
        "block_table": torch.tensor(table, dtype=torch.int32),
        "positions": torch.tensor([3, 9], dtype=torch.int32),
    }
    words = words.format(**named) + r".*\(step 3\)"
    both.refuses(SpecStateError, words, "begin_step", metadata, **given)
    # A block behind both of them may be shared, and a request's own slot may stand in its line.
    home = both.call_slots(["b"])[0]
    both.run_with({"a": (1, 1), "b": (4, 2)}, {"a": [slots[0], slots[1], 0], "b": [slots[0], slots[2], home]})


def test_slots_are_not_returned_while_a_table_may_write_them() -> None:
    both = Blocks("ring")
    both.admit("a")
    line, other = both.reserve(2), both.reserve(1)
    window = both.begin_with({"a": 4}, {"a": line})
    for manager in both.managers:
        for slots in (line, other):
            with pytest.raises(StepOrderError, match="return_checkpoints: request 'a' is in step 0, still open"):
                manager.return_checkpoints(slots)
    both.verify(window)
    both.end(window, {"a": 4}, lines={"a": line})
    both.call("return_checkpoints", other)
    both.check()


def test_debug_looks_again_when_the_step_ends() -> None:
    both = Blocks("ring")
    both.admit("a", "b")
    line = both.reserve(2)
    window = both.begin_with({"a": 4}, {"a": line})
    both.verify(window)
    step = window.steps[0]
    slots = step._rows.blocks.slots
    slots[0, 0] = 2  # that of "b": the caller's buffer has moved on
    for verb in (step.defer, step.commit):
        with pytest.raises(SpecStateError, match=r"block_table\[0\]\[0\] = 2 .* is not reserved \(step 0\)"):
            verb(torch.tensor([4]))
    slots[0, 0] = line[0]
    both.end(window, {"a": 4}, lines={"a": line})
    both.check()


def test_integrity_sees_two_requests_in_one_slot() -> None:
    both = Blocks("ring")
    both.admit("a", "b")
    line = both.reserve(2)
    both.trust()
    for name in "ab":
        window = both.begin_with({name: 4}, {name: line})
        both.verify(window)
        both.end(window, {name: 4}, lines={name: line})
    for manager in both.managers:
        with pytest.raises(SpecStateError, match=f"'a' both have their running checkpoint in slot {line[1]}"):
            manager.check_integrity()


# -- a checkpoint that was moved


def moved(policy: str, **changes: Any) -> tuple[Blocks, list[int]]:
    """A request "a" at 6 whose checkpoint a table has moved, and with records pending where the policy leaves any."""
    both = Blocks(policy, **changes)
    both.admit("a")
    line = both.reserve(3)
    both.run_with({"a": (4, 4)}, {"a": line})
    both.run_with({"a": (4, 2)}, {"a": line})
    assert both.runs == {"a": line[1]}
    assert both.pending("a") == (0 if policy == "eager" else 2)
    return both, line


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("moment", ["idle", "begun", "verified"])
@pytest.mark.parametrize("verb", ["flush", "fork", "publish", *KEEPS])
def test_a_moved_request(verb: str, moment: str, policy: str) -> None:
    both, line = moved(policy)
    window = both.begin_with({"a": 4}, {"a": line}) if moment != "idle" else None
    if window is not None and moment == "verified":
        both.verify(window)
    handle = both.handles["a"]
    if verb == "flush":
        both.call("flush", [handle])
        assert both.call_slots(["a"]) == [line[1]]
    elif verb == "fork":
        both.fork("a", "f")
    elif verb == "publish":
        both.call("publish", handle, PrefixKey("a", 6))
        both.holds(both.payload.published()[PrefixKey("a", 6)], both.past["a"][6])
    else:
        both.preempt("a", verb)
        assert both.call("metrics").preemptions == 1
    both.check()
    if window is not None:
        if moment == "begun":
            both.verify(window)
        both.end(window, {"a": 3}, lines={"a": line})
        both.check()
    if verb in KEEPS:
        if verb == "records":
            both.refuses(SpecStateError, f"of request 'a' lies in slot {line[1]}", "return_checkpoints", line)
        else:  # it has come home, nobody needs the table any more
            both.call("return_checkpoints", line)
            line = both.reserve(3)
            both.ended.clear()
        both.resume("a")
        assert (both.call_slots(["a"])[0] in line) == (verb == "records")
        both.check()
    both.run_with({"a": (4, 4)}, {"a": line})
    both.run(a=(4, 4))  # and without the table: into a slot of its own, running where it lies
    assert both.bounds["a"] % 4 == 0
    both.run_with({"a": (3, 3)}, {"a": [0, 0, 0]})


@pytest.mark.parametrize("policy", POLICIES)
def test_slots_in_which_a_checkpoint_lies_are_not_given_back(policy: str) -> None:
    both, line = moved(policy)
    words = f"return_checkpoints: the running checkpoint of request 'a' lies in slot {line[1]}"
    both.refuses(SpecStateError, words, "return_checkpoints", line)
    both.refuses(SpecStateError, words, "return_checkpoints", [line[1]])
    both.call("return_checkpoints", [line[0], line[2]])
    both.ended.clear()
    both.check()
    both.call("fence", "flush")
    both.refuses(SpecStateError, words, "return_checkpoints", [line[1]])
    both.release("a")
    both.call("return_checkpoints", [line[1]])
    both.check()
    assert both.call("metrics").checkpoint_slots_in_use == 0


@pytest.mark.parametrize("policy", POLICIES)
def test_a_fence_folds_where_the_checkpoint_lies(policy: str) -> None:
    both, line = moved(policy)
    both.preempt("a", "records")
    both.call("fence", "flush")
    both.resume("a")
    assert (both.pending("a"), both.call_slots(["a"])) == (0, [line[1]])
    both.check()
    both.holds(line[1], both.past["a"][6])


@pytest.mark.parametrize("policy", POLICIES)
def test_a_load_leaves_the_checkpoint_where_it_lies(policy: str) -> None:
    """Copied or in place, and without payloads, where the two cannot be told apart."""
    both, line = moved(policy)
    both.load("a", 3)
    both.check()
    assert both.call_slots(["a"]) == [line[1]]
    both.holds(line[1], both.past["a"][3])
    for layer, state in enumerate(both.past["a"][5]):
        recurrent, conv = both.payload.checkpoints(layer)
        recurrent[line[1]] = state.recurrent
        assert conv is not None
        conv[line[1]] = state.conv
    both.call("load", both.handles["a"], None, 5)
    both.twins["a"].states, both.twins["a"].committed_len = list(both.past["a"][5]), 5
    both.ended.clear()
    both.check()
    both.run_with({"a": (4, 4)}, {"a": line})
    assert both.runs == {"a": line[2]}


def test_reserved_slots() -> None:
    both = Blocks("ring", num_checkpoints=5)
    both.admit("a")
    line = both.reserve(3)
    assert len({*line, *both.call_slots(["a"])}) == 4
    assert both.call("can_admit", 1) and not both.call("can_admit", 2)
    both.refuses(
        CapacityError, "no 2 checkpoint slots to reserve: .* 1 of num_checkpoints = 5", "reserve_checkpoints", 2
    )
    both.run(a=(2, 2))
    both.call("publish", both.handles["a"], PrefixKey("x", 2))
    line += both.reserve(1)  # the prefix makes room
    assert both.call("published") == {}
    for bad, words in (
        ([line[0], line[0]], "is named twice"),
        ([line[0], both.call_slots(["a"])[0]], r"slots\[1\] = 1 is not reserved"),
        ([0], r"slots\[0\] = 0 is not reserved"),
        ([True], r"slots\[0\] = True is not reserved"),
        (line[0], "must be a sequence of slots"),
    ):
        both.refuses(SpecStateError, words, "return_checkpoints", bad)
    for n in (0, -1, True, "1", None, 1.0):
        both.refuses(SpecStateError, "reserve_checkpoints: n = .* must be a number of slots", "reserve_checkpoints", n)
    both.call("return_checkpoints", [])
    both.call("return_checkpoints", tuple(reversed(line)))
    assert both.call("metrics").reserved_slots == 0
    both.call("fence", "drop")


# -- records of it all


@pytest.mark.parametrize("full_shape", [False, True], ids=["shrunk", "full shape"])
@pytest.mark.parametrize("policy", POLICIES)
def test_a_trace_with_boundaries_replays(policy: str, full_shape: bool, tmp_path: Path) -> None:
    """With as many slots as were in use, those for boundaries included, which no event names."""
    path = tmp_path / "trace.jsonl"
    config = make_config(fold_policy=policy, block_size=4, num_checkpoints=40)
    with TraceRecorder(path) as recorder:
        manager = make_manager(config, recorder=recorder)
        a, b = manager.admit("a"), manager.admit("b")
        line = manager.reserve_checkpoints(3)
        for turn in range(4):
            step = manager.begin_step(StepMetadata(handles=(a, b), query_lens=(4, 3)))
            verify_all(step, make_inputs(config, 7, turn))
            step.defer(torch.tensor([4, 1 + turn % 2]))
            manager.digest()
        manager.publish(a, PrefixKey("a", 16))
        c = manager.restore(PrefixKey("a", 16), "c")
        positions = torch.tensor([16], dtype=torch.int32)
        table = torch.tensor([[0, 0, 0, *line]], dtype=torch.int32)
        step = manager.begin_step(StepMetadata(handles=(c,), query_lens=(4,)), block_table=table, positions=positions)
        verify_all(step, make_inputs(config, 4, 9))
        step.defer(torch.tensor([4]))
        spec = config.layer
        recurrent = torch.ones(spec.num_heads, spec.head_v_dim, spec.head_k_dim, dtype=torch.float64)
        conv = torch.ones(spec.conv_channels, spec.conv_history_len, dtype=torch.float64)
        manager.load(c, [(recurrent, conv)] * 2, 7)
        manager.digest()
    for backend in ("reference", "metadata"):
        report = replay_file(path, backend=backend, full_shape=full_shape)  # type: ignore[arg-type]
        assert report.ok, report.first_difference


# -- whatever comes


@st.composite
def _stories(draw: st.DrawFn) -> tuple[str, int, int, list[dict[str, tuple[int, int]]]]:
    longest = draw(st.integers(1, 5))
    size = draw(st.integers(longest, 3 * longest))
    window = st.integers(1, longest).flatmap(lambda n: st.tuples(st.just(n), st.integers(1, n)))
    steps = draw(st.lists(st.dictionaries(st.sampled_from("ab"), window, min_size=1), min_size=3, max_size=8))
    return draw(st.sampled_from(POLICIES)), longest, size, steps


@settings(max_examples=25)
@given(story=_stories(), by_table=st.booleans())
def test_after_every_step_the_boundary_is_the_oracle_s(
    story: tuple[str, int, int, list[dict[str, tuple[int, int]]]], by_table: bool
) -> None:
    policy, longest, size, steps = story
    both = Blocks(policy, max_query_len=longest, block_size=size, num_layers=1, num_checkpoints=30)
    both.admit("a", "b")
    slots = both.reserve(20)
    lines = {"a": slots[:10], "b": slots[10:]} if by_table else None
    for rows in steps:
        both.run_with(rows, lines)
