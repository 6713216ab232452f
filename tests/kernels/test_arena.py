"""Memory made ahead: handed out once, aligned, and refused when it is used up."""

from typing import Any

import pytest
import torch

from specstate import CapacityError, StepMetadata
from specstate.kernels import rows as at
from specstate.kernels.arena import Arena, captured_bytes
from tests.factories import POLICIES, make_config, make_inputs, make_manager, verify_all

CPU = torch.device("cpu")


def test_pieces_are_apart_and_aligned() -> None:
    arena = Arena.of(4096, CPU)
    first = arena.empty((3, 5))
    mask = arena.empty((7,), torch.bool)
    last = arena.empty((2,), torch.int64)
    first.fill_(-1), mask.fill_(True), last.fill_(5)
    assert first.shape == (3, 5) and bool((first == -1).all()) and bool(mask.all()) and last.tolist() == [5, 5]
    assert len({x.data_ptr() % 512 for x in (first, mask, last)}) == 1


def test_a_used_arena_is_refused() -> None:
    arena = Arena.of(1024, CPU)
    arena.empty((128,))
    with pytest.raises(CapacityError, match=r"used 512 of the 1024 bytes .* needs 516"):
        arena.empty((129,))
    assert arena.empty((128,)).numel() == 128  # the refusal took nothing


def test_memory_that_is_not_there() -> None:
    with pytest.raises(CapacityError, match="captured steps need"):
        Arena.of(2**55, CPU)


@pytest.mark.parametrize("policy", POLICIES)
def test_the_bytes_of_a_captured_step_are_what_a_step_takes(policy: str, device: str) -> None:
    """By hand, from an arena in place of torch's allocator: flush, two samples, counts and masks of one's own."""
    sizes = {"head_k_dim": 16, "head_v_dim": 16, "max_query_len": 4, "max_requests": 4}
    config = make_config(fold_policy=policy, checkpoint_dtype="float32", activation_dtype="float32", **sizes)
    manager = make_manager(config, device, backend="triton", debug=False)
    backend: Any = manager._backend
    arena = Arena.of(captured_bytes(4, 16, config.max_query_len), torch.device(device))
    backend._allocator = arena
    arena.empty((4 * at.STAGED_COLUMNS + 5,))  # the staged columns, which a step by hand copies from elsewhere
    handles = tuple(manager.admit(name) for name in "abcd")
    step = manager.begin_step(StepMetadata(handles=handles, query_lens=(4, 4, 4, 4)))
    step.flush()
    verify_all(step, make_inputs(config, 16, 0, device))
    logits, drafts = torch.zeros(16, 5, device=device), torch.zeros(16, dtype=torch.int64, device=device)
    step.sample(logits, drafts), step.sample(logits, drafts)
    mask = torch.zeros(4, dtype=torch.bool, device=device)
    step.defer(torch.ones(4, dtype=torch.int64, device=device), eager=mask, finished=mask)
    spare = len(arena._bytes) - arena._used
    assert 0 <= spare < 22 * 512, "no more than an alignment for each of the tensors"


@pytest.mark.parametrize("sizes", [(1, 1, 1), (4, 16, 4), (17, 34, 3), (256, 2048, 8)])
def test_warmup_makes_room_for_as_many_as_it_says(sizes: tuple[int, int, int]) -> None:
    arena = Arena.of(4 * captured_bytes(*sizes), CPU)
    for _ in range(4):
        arena.part(captured_bytes(*sizes))
    with pytest.raises(CapacityError):
        arena.part(1)


@pytest.mark.parametrize("captures", [-1, True, 1.0, 5000])
def test_a_bad_number_of_captures_is_refused(captures: object) -> None:
    with pytest.raises(ValueError, match="captures = "):
        make_manager().warmup(captures)  # type: ignore[arg-type]
