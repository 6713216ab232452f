"""The cursor kernels against the reference, number by number: begin, refresh, and every way to advance."""

import dataclasses
import itertools
import random
from typing import NamedTuple

import pytest
import torch

from specstate.kernels import cursors
from specstate.kernels import rows as at
from specstate.kernels.cursors import BlockTable, StepTensors
from tests.kernels.harness import Rig, Row, small_config

POLICIES = ("eager", "deferred", "ring")
#: Every kind of row: decode, prompt tail, finished, finished but prompting, of another owner, dummy.
ROWS = [
    Row(7, 3, 4, least=2),
    Row(0, 0, 1),
    Row(12, 5, 3, kind="prompt"),
    Row(9, 4, 2, finished=True),
    Row(20, 1, 4, kind="prompt", finished=True),
    Row(3, 2, 4, late=True),
    Row(query_len=2, kind="dummy"),
    Row(31, 4, 4),
    Row(40, 9, 4),
]


def same_cursors(rig: Rig) -> None:
    assert torch.equal(rig.storage.cursors.cpu(), rig.exact_storage.cursors)
    assert rig.storage.counters.tolist() == rig.exact_storage.counters.tolist()


def make(path: str, policy: str, device: str, rows: list[Row] = ROWS, block_size: int | None = None) -> Rig:
    config = small_config(path=path, fold_policy=policy, record_capacity=13, block_size=block_size)
    return Rig(config, rows, device)


@pytest.mark.parametrize("padding", [(0, 0), (3, 0), (2, 5)], ids="{0[0]} rows, {0[1]} tokens".format)
@pytest.mark.parametrize("policy", POLICIES)
def test_begin(policy: str, padding: tuple[int, int], path: str, device: str) -> None:
    ours, theirs = make(path, policy, device).begin(*padding)
    assert torch.equal(ours.rows.cpu(), theirs.rows)
    for name in ("positions", "committed_lens", "query_start_loc", "checkpoint_slots", "record_slots"):
        got, want = getattr(ours, name), getattr(theirs, name)
        assert got.dtype is want.dtype is torch.int32
        assert got.tolist() == want.tolist(), name


def test_begin_without_rows(path: str, device: str) -> None:
    rig = make(path, "ring", device)
    staged = torch.tensor([0], dtype=torch.int32)
    ours, theirs = rig.begin_staged(staged, 0, 3, 0)
    assert ours.positions.tolist() == theirs.positions.tolist() == [0, 0, 0]


@pytest.mark.parametrize("policy", POLICIES)
def test_refresh_and_null_rows(policy: str, path: str, device: str) -> None:
    """After other hands moved the cursors; a nulled row, and one whose slot changed owner, read as 0."""
    rig = make(path, policy, device)
    steps = rig.begin(1)
    for storage, kernels, step in zip((rig.storage, rig.exact_storage), (rig.kernels, rig.exact), steps, strict=True):
        storage.cursors[1:, at.CURSOR_CHECKPOINT_LEN] += 5
        storage.cursors[2, at.CURSOR_GENERATION] += 1
        kernels.null_row(step, 7)
        kernels.refresh(step)
    assert torch.equal(steps[0].rows.cpu(), steps[1].rows)
    assert int(steps[0].rows[0, at.CHECKPOINT_LEN]) == 12
    assert steps[0].rows[[1, 7], at.CHECKPOINT_LEN].tolist() == [0, 0]


@pytest.mark.parametrize("fold", ["nobody", "everybody", "a mask"])
@pytest.mark.parametrize("policy", POLICIES)
def test_end(policy: str, fold: str, path: str, device: str) -> None:
    """Counts below, inside and above their limits; masks of eager and of finished rows; the plan, and what it folds."""
    for seed in range(3):
        rig, generator = make(path, policy, device), random.Random(seed)
        steps = rig.begin(2)
        num = len(steps[1].rows)
        counts = torch.tensor([generator.randint(-1, 6) for _ in range(num)], dtype=torch.int32)
        mask = torch.tensor([generator.random() < 0.5 for _ in range(num)])
        finished = torch.tensor([generator.random() < 0.5 for _ in range(num)]) if seed else None
        folds = {"nobody": False, "everybody": True, "a mask": mask}[fold]
        moved = [x.to(device) if isinstance(x, torch.Tensor) else x for x in (counts, folds, finished)]
        plan = rig.kernels._advance(steps[0], *moved)
        accepted = cursors.accepted_counts(
            steps[1].rows, counts, finished, rig.exact_storage.cursors, rig.exact_storage.counters
        )
        wanted = rig.exact._advance(steps[1], accepted, folds)
        same_cursors(rig)
        # What a row without a fold says about its source is not read.
        assert torch.equal(plan[:, at.PLAN_COUNT].cpu(), wanted[:, at.PLAN_COUNT])
        some = wanted[:, at.PLAN_COUNT] > 0
        assert some.any() == (fold != "nobody" or policy == "ring")
        assert torch.equal(plan.cpu()[some], wanted[some])
        assert not rig.storage.cursors[-1].any(), "the scratch row's cursor"


# -- boundary checkpoints

BLOCK_SIZE = 5


class Ending(NamedTuple):
    """What a step of some rows ends with, by row, padded ones included."""

    counts: torch.Tensor
    fold: torch.Tensor | bool
    finished: torch.Tensor | None


def random_rows(rng: random.Random, count: int) -> list[Row]:
    """Of every kind, anywhere between boundaries, some with a slot of their own and an earlier checkpoint in it."""
    rows = []
    for _ in range(count):
        kind = rng.choice(["decode"] * 5 + ["prompt", "prompt", "dummy"])
        query_len, checkpoint_len = rng.randint(1, 4), rng.randint(0, 23)
        own = kind != "dummy" and rng.random() < 0.7
        rows.append(
            Row(
                checkpoint_len=0 if kind == "dummy" else checkpoint_len,
                pending_len=0 if kind == "dummy" else rng.randint(0, 9),
                query_len=query_len,
                kind=kind,
                least=rng.randint(1, query_len),
                finished=kind != "dummy" and rng.random() < 0.15,
                late=kind != "dummy" and rng.random() < 0.15,
                own=own,
                boundary_len=checkpoint_len // BLOCK_SIZE * BLOCK_SIZE if own else 0,
            )
        )
    return rows


def random_ending(rng: random.Random, count: int) -> Ending:
    def mask() -> torch.Tensor:
        return torch.tensor([rng.random() < 0.3 for _ in range(count)])

    counts = torch.tensor([rng.randint(-1, 6) for _ in range(count)], dtype=rng.choice([torch.int32, torch.int64]))
    return Ending(counts, rng.choice([False, True, mask()]), rng.choice([None, mask()]))


def random_blocks(rng: random.Random, rig: Rig, layout: str) -> tuple[BlockTable, list[int]]:
    """A table of every sort of entry, positions of which some are wrong, and the line of each row."""
    num_slots, width = rig.config.num_checkpoints + 1, rng.randint(1, 8)
    entries = rng.sample(range(len(rig.rows) + 3), len(rig.rows))
    none = [0, 0, -1, -(2**31), num_slots, num_slots + 7, 2**31 - 1]
    table = torch.zeros(len(rig.rows) + 3, width, dtype=torch.int32)
    positions = torch.zeros(len(table), dtype=torch.int32)
    for row, entry in enumerate(entries):
        # Few slots a line, so that both columns of a row name one now and then, also the one where it runs.
        slots = [rig.slot(row), *rng.sample(range(1, num_slots), 3)]
        line = [rng.choice(none) if rng.random() < 0.25 else rng.choice(slots) for _ in range(width)]
        table[entry] = torch.tensor(line, dtype=torch.int32)
        wrong = rng.random() < 0.2
        positions[entry] = rig.rows[row].committed_len + (rng.choice([-1, 1, 1000]) if wrong else 0)
    if layout == "sliced":
        wide = torch.full((2 * len(table), width + 3), -7, dtype=torch.int32)
        wide[::2, 1 : width + 1], table = table, wide[::2, 1 : width + 1]
        positions = positions.repeat_interleave(3)[::3]
    elif layout == "transposed":
        table = table.T.contiguous().T
    return BlockTable(table, positions), entries


def end_both(rig: Rig, steps: tuple[StepTensors, StepTensors], ending: Ending) -> torch.Tensor:
    """Advances both and compares cursors, counters and all that is read of the plan; the reference's plan."""
    moved = [x.to(rig.device) if isinstance(x, torch.Tensor) else x for x in ending]
    plan = rig.kernels._advance(steps[0], *moved).cpu()
    held = rig.exact_storage
    accepted = cursors.accepted_counts(steps[1].rows, ending.counts, ending.finished, held.cursors, held.counters)
    wanted = rig.exact._advance(steps[1], accepted, ending.fold)
    same_cursors(rig)
    for column in (at.PLAN_COUNT, at.PLAN_BOUNDARY_SLOT):
        assert torch.equal(plan[:, column], wanted[:, column])
    used = (wanted[:, at.PLAN_COUNT] > 0) | (wanted[:, at.PLAN_BOUNDARY_SLOT] > 0)
    assert torch.equal(plan[used], wanted[used])
    assert not rig.storage.cursors[-1].any(), "the scratch row's cursor"
    return wanted


@pytest.mark.parametrize("policy", POLICIES)
def test_random_rows_with_slots_of_their_own(policy: str, path: str, device: str) -> None:
    written = kept = 0
    for seed in range(12):
        rng = random.Random(seed)
        rig = make(path, policy, device, random_rows(rng, 12), block_size=BLOCK_SIZE)
        steps = rig.begin(2, 1)
        assert torch.equal(steps[0].rows.cpu(), steps[1].rows)
        assert steps[0].boundary_slots.tolist() == [rig.boundary_slot(row) for row in range(12)] + [0, 0]
        wanted = end_both(rig, steps, random_ending(rng, 14))
        written += int((wanted[:, at.PLAN_BOUNDARY_SLOT] > 0).sum())
        kept += int((rig.storage.cursors[:, at.CURSOR_BOUNDARY_LEN] > 0).sum())
    assert written > 20
    assert kept > written


@pytest.mark.parametrize("layout", ["plain", "sliced", "transposed"])
@pytest.mark.parametrize("policy", POLICIES)
def test_random_rows_with_a_block_table(policy: str, layout: str, path: str, device: str) -> None:
    """Entries that are no slots, lines too short, positions that are not the manager's, lines in any order."""
    written = moved = misplaced = 0
    for seed in range(12):
        rng = random.Random(seed)
        rig = make(path, policy, device, random_rows(rng, 12), block_size=BLOCK_SIZE)
        blocks, entries = random_blocks(rng, rig, layout)
        steps = rig.begin(2, 1, blocks, entries)
        assert torch.equal(steps[0].rows.cpu(), steps[1].rows)
        assert rig.storage.counters.tolist() == rig.exact_storage.counters.tolist()
        misplaced += int(rig.storage.counters[at.COUNT_MISPLACED])
        wanted = end_both(rig, steps, random_ending(rng, 14))
        written += int((wanted[:, at.PLAN_BOUNDARY_SLOT] > 0).sum())
        moved += int((wanted[:, at.PLAN_SOURCE] != wanted[:, at.PLAN_DESTINATION])[wanted[:, at.PLAN_COUNT] > 0].sum())
        assert torch.equal(rig.storage.cursors[:, at.CURSOR_BOUNDARY_LEN] > 0, _earlier(rig))
    assert written > 10
    assert moved > 10
    assert misplaced > 5


def _earlier(rig: Rig) -> torch.Tensor:
    """Record rows whose own slot held a boundary checkpoint from the start; a table changes none of them."""
    lens = torch.zeros(len(rig.storage.cursors), dtype=torch.int32, device=rig.device)
    for row, held in enumerate(rig.rows):
        if held.kind != "dummy":
            lens[rig.record_row(row)] = held.boundary_len
    return lens > 0


@pytest.mark.parametrize("tabled", [False, True], ids=["own slots", "block table"])
def test_a_boundary_is_written_where_it_is_reached_or_crossed(tabled: bool, path: str, device: str) -> None:
    """Before it, exactly at it, and past it: slots, counts and positions by hand."""
    rows = [Row(2, 1, 4, own=True), Row(2, 1, 4, own=True), Row(2, 1, 4, own=True), Row(5, 1, 4, own=True)]
    rig = make(path, "ring", device, rows, block_size=BLOCK_SIZE)
    spare = 2 * len(rows) + 3
    table = torch.arange(spare, spare + 8, dtype=torch.int32).view(4, 2)
    blocks = BlockTable(table, torch.tensor([3, 3, 3, 6], dtype=torch.int32)) if tabled else None
    steps = rig.begin(blocks=blocks)
    plan = rig.kernels._advance(steps[0], torch.tensor([1, 2, 4, 3], device=device), False, None).tolist()
    boundary = [int(table[row, 0]) if tabled else rig.boundary_slot(row) for row in range(4)]
    home = [rig.slot(row) for row in range(4)]
    runs = [int(table[row, 1]) if tabled else rig.slot(row) for row in range(4)]
    assert plan[1] == [home[1], runs[1], 2, 2, 3, boundary[1], 3]
    assert plan[2] == [home[2], runs[2], 3, 2, 5, boundary[2], 3]
    for row in (0, 3):
        assert (plan[row][at.PLAN_COUNT], plan[row][at.PLAN_BOUNDARY_SLOT]) == (0, 0)
    held = 0 if tabled else BLOCK_SIZE
    assert rig.storage.cursors[1:5].tolist() == [
        [2, 2, 10, 0, home[0], 0],
        [5, 0, 11, 0, runs[1], held],
        [7, 0, 12, 0, runs[2], held],
        [5, 4, 13, 0, home[3], 0],
    ]
    folds = rig.storage.counters[at.COUNT_FOLDS : at.COUNT_ACCEPTED].tolist()
    assert folds == [0, 0, 0, 2, 0, 0]


@pytest.mark.parametrize("policy", POLICIES)
def test_windows_drafts_and_accepted_counts(policy: str, path: str, device: str) -> None:
    """By hand: decode windows alone, those with drafts by their count, neither late nor finished ones."""
    rows = [Row(0, 0, 4), Row(0, 0, 4), Row(0, 0, 1), Row(0, 0, 3, kind="prompt"), Row(0, 0, 2, finished=True)]
    rows += [Row(0, 0, 2, late=True), Row(query_len=3, kind="dummy"), Row(0, 0, 3)]
    rig = make(path, policy, device, rows)
    rig.kernels.end(rig.begin(1)[0], torch.tensor([3, 9, 1, 3, 2, 2, 2, 3, 1], device=device), False, None)
    counters = rig.storage.counters.tolist()
    assert counters[: at.COUNT_FOLDS] == [1, 1, 1, 0, 4, 3 + 3 + 2]
    assert counters[at.COUNT_ACCEPTED :] == [0, 0, 0, 2, 1]


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("verb", ["flush", "cancel"])
def test_flush_and_cancel_accept_nothing(verb: str, policy: str, path: str, device: str) -> None:
    """Neither judges a count, touches a finished flag nor counts a dropped end."""
    rig = make(path, policy, device, [dataclasses.replace(row, late=False) for row in ROWS])
    flags = rig.storage.cursors[:, at.CURSOR_FINISHED].clone()
    steps = rig.begin()
    if verb == "flush":
        rig.kernels.flush(steps[0])
        rig.exact.flush(steps[1])
    else:
        rig.kernels.cancel(steps[0], [0])
        rig.exact.cancel(steps[1], [0])
    same_cursors(rig)
    folds = [at.COUNT_FOLDS + at.FOLD_BY_FLUSH, at.COUNT_FOLDS + at.FOLD_IN_VERIFY]
    others = [entry for entry in range(len(rig.storage.counters)) if entry not in folds]
    assert not rig.storage.counters[others].any()
    assert torch.equal(rig.storage.cursors[:, at.CURSOR_FINISHED], flags)
    pending = rig.storage.cursors[:, at.CURSOR_PENDING_LEN]
    assert bool(pending.any()) == (verb == "cancel" and policy != "deferred")


@pytest.mark.parametrize("dtype", ["int64", "int32"])
def test_absurd_counts_are_clamped_and_not_wrapped(dtype: str, path: str, device: str) -> None:
    values = {"int64": [2**40 + 1, -(2**40), 2**32, 2**63 - 1, -(2**63)], "int32": [2**31 - 1, -(2**31), 9, 0, -1]}
    rows = [Row(8 * i, 0, 4, least=2) for i in range(5)]
    rig = make(path, "ring", device, rows)
    steps = rig.begin()
    counts = torch.tensor(values[dtype], dtype=getattr(torch, dtype))
    rig.kernels.end(steps[0], counts.to(device), False, None)
    rig.exact.end(steps[1], counts, False, None)
    same_cursors(rig)
    wanted = [min(max(value, 2), 4) for value in values[dtype]]
    assert rig.storage.cursors[1:6, at.CURSOR_PENDING_LEN].tolist() == wanted
    assert int(rig.storage.counters[at.COUNT_CLAMPS]) == 5


@pytest.mark.parametrize("capacity", [8, 11, 16])
def test_ring_folds_when_the_next_window_might_not_fit(capacity: int, path: str, device: str) -> None:
    """pending + T > R, and not one record earlier, whatever was accepted."""
    for pending, accepted in itertools.product(range(capacity - 3), (1, 4)):
        rig = Rig(small_config(path=path, record_capacity=capacity), [Row(3, pending, 4)], device)
        steps = rig.begin()
        rig.kernels.end(steps[0], torch.tensor([accepted], dtype=torch.int32, device=device), False, None)
        total = pending + accepted
        full = total + 4 > capacity
        assert rig.storage.cursors[1, :2].tolist() == ([3 + total, 0] if full else [3, total])


def test_late_end_leaves_the_new_owner_alone(path: str, device: str) -> None:
    rig = make(path, "eager", device, [Row(5, 0, 4), Row(9, 0, 4)])
    steps = rig.begin()
    rig.storage.cursors[1] = torch.tensor([100, 2, 77, 0, 1, 96], dtype=torch.int32)
    before = rig.snapshot()[0]
    finished = torch.tensor([True, False], device=device)
    rig.kernels.end(steps[0], torch.tensor([4, 3], device=device), True, finished)
    assert rig.storage.cursors[1].tolist() == [100, 2, 77, 0, 1, 96]
    assert rig.storage.counters.tolist()[:3] == [0, 1, 0]
    assert rig.written(0, before)["recurrent"] == {(rig.slot(1), -1)}


@pytest.mark.gpu
def test_counters_add_up_over_many_rows(device: str) -> None:
    """Atomics: 4,096 rows that all clamp."""
    rig = Rig(small_config(), [Row(0, 0, 1)] * 4096, device)
    steps = rig.begin()
    rig.kernels.end(steps[0], torch.full((4096,), 3, device=device), False, None)
    assert rig.storage.counters.tolist()[:3] == [4096, 0, 0]
