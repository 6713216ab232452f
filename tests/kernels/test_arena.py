"""Memory made ahead: handed out once, aligned, and refused when it is used up."""

import pytest
import torch

from specstate import CapacityError
from specstate.kernels.arena import Arena, captured_bytes
from tests.factories import make_manager

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


@pytest.mark.parametrize("sizes", [(1, 1, 1), (4, 16, 4), (256, 2048, 8)])
def test_the_bytes_of_a_captured_step_suffice(sizes: tuple[int, int, int]) -> None:
    rows, tokens, longest = sizes
    arena = Arena.of(2 * captured_bytes(*sizes), CPU).part(captured_bytes(*sizes))
    arena.empty((rows * 8 + rows + 1,)), arena.empty((rows, 11)), arena.empty((rows,)), arena.empty((tokens,))
    for _ in range(2):
        for shape in ((rows,), (rows,), (rows,), (rows, longest), (tokens,)):
            arena.empty(shape)
    for _ in range(3):
        arena.empty((rows, 7))
        for dtype in (torch.int64, torch.bool, torch.bool):
            arena.empty((rows,)), arena.empty((rows,), dtype)


@pytest.mark.parametrize("captures", [-1, True, 1.0, 5000])
def test_a_bad_number_of_captures_is_refused(captures: object) -> None:
    with pytest.raises(ValueError, match="captures = "):
        make_manager().warmup(captures)  # type: ignore[arg-type]
