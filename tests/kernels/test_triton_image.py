"""Images of requests that the Triton kernels wrote, and that they go on from."""

from typing import Any

import pytest
import torch

from specstate import StateManager, StepMetadata
from tests.factories import make_inputs, make_manager, make_twin, raw_bytes, run_step, verify_all
from tests.kernels.harness import small_config
from tests.test_image import WRAPPED, advance, bits_of, checkpoint, export, take

TOLERANCE = 1e-4


def make_triton(path: str, device: str, **changes: Any) -> StateManager:
    config = small_config(path=path, **{"record_capacity": 8, "conv_kernel_size": 3, "max_requests": 2, **changes})
    return make_manager(config, device, backend="triton")


@pytest.mark.parametrize("checkpoint_dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("place", [{}, {"record_capacity": 11, "max_query_len": 3}], ids=["the same", "R 11, T 3"])
def test_a_pending_image_goes_on(place: dict[str, Any], checkpoint_dtype: str, path: str, device: str) -> None:
    source = make_triton(path, device, checkpoint_dtype=checkpoint_dtype)
    handle = source.admit("a")
    advance(source, handle, WRAPPED)
    image = export(source, handle)
    assert (image.checkpoint_len, image.pending_len) == (7, 4)
    goal = make_triton(path, device, checkpoint_dtype=checkpoint_dtype, **place)
    advance(goal, goal.admit("former"), [1] * 5, seed=50)
    taken = take(goal, image)
    assert bits_of(export(goal, taken)) == bits_of(image)
    outputs = []
    for manager, life in ((source, handle), (goal, taken)):
        step = manager.begin_step(StepMetadata(handles=(life,), query_lens=(3,)))
        outputs.append([raw_bytes(out) for out in verify_all(step, make_inputs(manager.config, 3, 9, device))])
        step.defer(torch.tensor([2], device=device))
        manager.flush()
    assert outputs[0] == outputs[1]
    assert checkpoint(source, handle) == checkpoint(goal, taken)
    goal.check_integrity()


@pytest.mark.parametrize("policy", ["deferred", "ring"])
def test_a_folded_image_is_what_read_returns(policy: str, path: str, device: str) -> None:
    source = make_triton(path, device, fold_policy=policy)
    handle, twin = source.admit("a"), make_twin(source.config)
    for seed, count in enumerate(WRAPPED):
        run_step(source, [(handle, twin, 4, count)], seed, TOLERANCE)
    image = export(source, handle, fold=True)
    assert image.payload is not None and image.payload.conv is not None
    read = source.read(handle, 0)
    assert read.conv is not None
    assert raw_bytes(image.payload.recurrent[0]) == raw_bytes(read.recurrent)
    assert raw_bytes(image.payload.conv[0]) == raw_bytes(read.conv)
    goal = make_triton(path, device, fold_policy="eager", record_capacity=4)
    taken = take(goal, image)
    goal.check_integrity()
    run_step(goal, [(taken, twin, 4, 3)], 40, TOLERANCE)


def test_from_the_reference_and_back(path: str, device: str) -> None:
    """One image is of both: nothing in it is a matter of kernels."""
    kernels = make_triton(path, device)
    reference = make_manager(kernels.config.model_copy(update={"path": None}))
    handle, twin = reference.admit("a"), make_twin(reference.config)
    for seed, count in enumerate(WRAPPED):
        run_step(reference, [(handle, twin, 4, count)], seed, TOLERANCE)
    image = export(reference, handle)
    taken = take(kernels, image)
    assert bits_of(export(kernels, taken)) == bits_of(image)
    run_step(kernels, [(taken, twin, 4, 1)], 40, TOLERANCE)
    back = take(reference, export(kernels, taken), "back")
    twin.check(reference, back, TOLERANCE)
    run_step(reference, [(back, twin, 4, 2)], 41, TOLERANCE)
