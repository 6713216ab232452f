"""The cursor kernels against the reference, number by number: begin, refresh, and every way to advance."""

import dataclasses
import itertools
import random

import pytest
import torch

from specstate.kernels import cursors
from specstate.kernels import rows as at
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


def make(policy: str, device: str, rows: list[Row] = ROWS) -> Rig:
    return Rig(small_config(fold_policy=policy, record_capacity=13), rows, device)


@pytest.mark.parametrize("padding", [(0, 0), (3, 0), (2, 5)], ids="{0[0]} rows, {0[1]} tokens".format)
@pytest.mark.parametrize("policy", POLICIES)
def test_begin(policy: str, padding: tuple[int, int], device: str) -> None:
    ours, theirs = make(policy, device).begin(*padding)
    assert torch.equal(ours.rows.cpu(), theirs.rows)
    for name in ("positions", "committed_lens", "query_start_loc", "checkpoint_slots", "record_slots"):
        got, want = getattr(ours, name), getattr(theirs, name)
        assert got.dtype is want.dtype is torch.int32
        assert got.tolist() == want.tolist(), name


def test_begin_without_rows(device: str) -> None:
    rig = make("ring", device)
    staged = torch.tensor([0], dtype=torch.int32)
    ours, theirs = rig.begin_staged(staged, 0, 3, 0)
    assert ours.positions.tolist() == theirs.positions.tolist() == [0, 0, 0]


@pytest.mark.parametrize("policy", POLICIES)
def test_refresh_and_null_rows(policy: str, device: str) -> None:
    """After other hands moved the cursors; a nulled row, and one whose slot changed owner, read as 0."""
    rig = make(policy, device)
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
def test_end(policy: str, fold: str, device: str) -> None:
    """Counts below, inside and above their limits; masks of eager and of finished rows; the plan, and what it folds."""
    for seed in range(3):
        rig, generator = make(policy, device), random.Random(seed)
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
        capacity = 13 if policy == "ring" else None
        wanted = cursors.advance(steps[1].rows, accepted, folds, rig.exact_storage.cursors, capacity, 4)
        same_cursors(rig)
        # What a row without a fold says about its source is not read.
        assert torch.equal(plan[:, at.PLAN_COUNT].cpu(), wanted[:, at.PLAN_COUNT])
        some = wanted[:, at.PLAN_COUNT] > 0
        assert some.any() == (fold != "nobody" or policy == "ring")
        assert torch.equal(plan.cpu()[some], wanted[some])
        assert not rig.storage.cursors[-1].any(), "the scratch row's cursor"


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("verb", ["flush", "cancel"])
def test_flush_and_cancel_accept_nothing(verb: str, policy: str, device: str) -> None:
    """Neither judges a count, touches a finished flag nor counts a dropped end."""
    rig = make(policy, device, [dataclasses.replace(row, late=False) for row in ROWS])
    flags = rig.storage.cursors[:, at.CURSOR_FINISHED].clone()
    steps = rig.begin()
    if verb == "flush":
        rig.kernels.flush(steps[0])
        rig.exact.flush(steps[1])
    else:
        rig.kernels.cancel(steps[0], [0])
        rig.exact.cancel(steps[1], [0])
    same_cursors(rig)
    assert not rig.storage.counters.any()
    assert torch.equal(rig.storage.cursors[:, at.CURSOR_FINISHED], flags)
    pending = rig.storage.cursors[:, at.CURSOR_PENDING_LEN]
    assert bool(pending.any()) == (verb == "cancel" and policy != "deferred")


@pytest.mark.parametrize("dtype", ["int64", "int32"])
def test_absurd_counts_are_clamped_and_not_wrapped(dtype: str, device: str) -> None:
    values = {"int64": [2**40 + 1, -(2**40), 2**32, 2**63 - 1, -(2**63)], "int32": [2**31 - 1, -(2**31), 9, 0, -1]}
    rows = [Row(8 * i, 0, 4, least=2) for i in range(5)]
    rig = make("ring", device, rows)
    steps = rig.begin()
    counts = torch.tensor(values[dtype], dtype=getattr(torch, dtype))
    rig.kernels.end(steps[0], counts.to(device), False, None)
    rig.exact.end(steps[1], counts, False, None)
    same_cursors(rig)
    wanted = [min(max(value, 2), 4) for value in values[dtype]]
    assert rig.storage.cursors[1:6, at.CURSOR_PENDING_LEN].tolist() == wanted
    assert int(rig.storage.counters[at.COUNT_CLAMPS]) == 5


@pytest.mark.parametrize("capacity", [8, 11, 16])
def test_ring_folds_when_the_next_window_might_not_fit(capacity: int, device: str) -> None:
    """pending + T > R, and not one record earlier, whatever was accepted."""
    for pending, accepted in itertools.product(range(capacity - 3), (1, 4)):
        rig = Rig(small_config(record_capacity=capacity), [Row(3, pending, 4)], device)
        steps = rig.begin()
        rig.kernels.end(steps[0], torch.tensor([accepted], dtype=torch.int32, device=device), False, None)
        total = pending + accepted
        full = total + 4 > capacity
        assert rig.storage.cursors[1, :2].tolist() == ([3 + total, 0] if full else [3, total])


def test_late_end_leaves_the_new_owner_alone(device: str) -> None:
    rig = make("eager", device, [Row(5, 0, 4), Row(9, 0, 4)])
    steps = rig.begin()
    rig.storage.cursors[1] = torch.tensor([100, 2, 77, 0], dtype=torch.int32)
    before = rig.snapshot()[0]
    finished = torch.tensor([True, False], device=device)
    rig.kernels.end(steps[0], torch.tensor([4, 3], device=device), True, finished)
    assert rig.storage.cursors[1].tolist() == [100, 2, 77, 0]
    assert rig.storage.counters.tolist()[:3] == [0, 1, 0]
    assert rig.written(0, before)["recurrent"] == {(rig.slot(1), -1)}


@pytest.mark.gpu
def test_counters_add_up_over_many_rows(device: str) -> None:
    """Atomics: 4,096 rows that all clamp."""
    rig = Rig(small_config(), [Row(0, 0, 1)] * 4096, device)
    steps = rig.begin()
    rig.kernels.end(steps[0], torch.full((4096,), 3, device=device), False, None)
    assert rig.storage.counters.tolist()[:3] == [4096, 0, 0]
