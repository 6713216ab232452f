"""What torch happens to be set to around a call changes nothing: outputs, states and lifecycle keep their bits."""

import contextlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch

from specstate import SamplingParams, StateManager, StepMetadata
from specstate.backends.ambient import shielded
from tests.factories import (
    POLICIES,
    fingerprint,
    make_config,
    make_inputs,
    make_manager,
    make_params,
    raw_bytes,
    verify_all,
)


@contextlib.contextmanager
def setting(get: Callable[[], Any], put: Callable[[Any], None], value: Any) -> Iterator[None]:
    before = get()
    put(value)
    try:
        yield
    finally:
        put(before)


def default_dtype(dtype: torch.dtype) -> AbstractContextManager[None]:
    return setting(torch.get_default_dtype, torch.set_default_dtype, dtype)


def default_device(device: str) -> AbstractContextManager[None]:
    return setting(lambda: None, torch.set_default_device, device)


def products(precision: str) -> AbstractContextManager[None]:
    return setting(torch.get_float32_matmul_precision, torch.set_float32_matmul_precision, precision)


def deterministic() -> AbstractContextManager[None]:
    return setting(torch.are_deterministic_algorithms_enabled, torch.use_deterministic_algorithms, True)


MODES: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "autocast to bfloat16": lambda: torch.autocast("cpu", torch.bfloat16),
    "autocast to float16": lambda: torch.autocast("cpu", torch.float16),
    "device meta": lambda: torch.device("meta"),
    "default device meta": lambda: default_device("meta"),
    "default dtype float64": lambda: default_dtype(torch.float64),
    "default dtype bfloat16": lambda: default_dtype(torch.bfloat16),
    "products in bfloat16": lambda: products("medium"),
    "deterministic": deterministic,
    "gradients": torch.enable_grad,
    "no gradients": torch.no_grad,
    "inference": torch.inference_mode,
}


def story(policy: str, mode: Callable[[], AbstractContextManager[Any]], types: tuple[str, str]) -> dict[str, Any]:
    """Every call of a manager's life under ``mode``; what came out, and what is held in the end."""
    config = make_config(
        fold_policy=policy, checkpoint_dtype=types[0], activation_dtype=types[1], head_k_dim=16, head_v_dim=16
    )
    params = make_params(config)
    inputs = [make_inputs(config, 7, seed) for seed in range(5)]
    logits = torch.randn(7, 11, generator=torch.Generator().manual_seed(1))
    drafts = logits.argmax(-1).roll(1)
    spec = config.layer
    state = torch.full((spec.num_heads, spec.head_v_dim, spec.head_k_dim), 0.5, dtype=params[0].A_log.dtype)
    conv = torch.full((spec.conv_channels, 3), 0.25, dtype=torch.get_default_dtype()).to(inputs[0][0].qkv.dtype)
    own_counts, outputs = torch.tensor([3, 1], dtype=torch.int32), []
    with mode():
        manager = StateManager(config, params, debug=True)
        a, b = manager.admit("a", SamplingParams(end_token_ids=(7,))), manager.admit("b")
        manager.load(b, [(state, conv)] * 2, committed_len=5)
        for number in range(5):
            step = manager.begin_step(StepMetadata(handles=(a, b), query_lens=(4, 3)), pad_to=3)
            if number == 2:
                step.flush()
            outputs += [raw_bytes(output) for output in verify_all(step, inputs[number])]
            if number == 1:
                step.cancel()
            elif number == 3:
                sample = step.sample(logits, drafts)
                outputs += [raw_bytes(getattr(sample.to_host_async().wait(), n)) for n in ("tokens", "finished")]
                step.commit(sample)
            else:
                step.defer(own_counts)
        outputs.append(raw_bytes(manager.read(a, 1).recurrent))
        assert manager.checkpoint_slots([a, b]).tolist() == [1, 2]
        manager.flush()
        manager.check_integrity()
        manager.digest()
        manager.release(b)
        c = manager.admit("c")
        [d] = manager.fork(a, ["d"])
        manager.preempt(a)
        manager.preempt(c, fold=True)
        manager.retract(d)
        a, _, d = (manager.resume(name) for name in "acd")
        step = manager.begin_step(StepMetadata(handles=(d, a), query_lens=(4, 3)))
        outputs += [raw_bytes(output) for output in verify_all(step, inputs[0])]
        step.defer(own_counts)
        manager.fence("flush")
        manager.check_integrity()
    held = fingerprint(manager)
    del held["params"]
    return {"outputs": outputs, **held}


@pytest.mark.parametrize("types", [("float32", "bfloat16"), ("float32", "float32")], ids="-".join)
@pytest.mark.parametrize("policy", POLICIES)
def test_nothing_changes_under_any_mode(policy: str, types: tuple[str, str]) -> None:
    wanted = story(policy, contextlib.nullcontext, types)
    for name, mode in MODES.items():
        held = story(policy, mode, types)
        assert [field for field in wanted if held[field] != wanted[field]] == [], name


@pytest.mark.parametrize("mode", ["device meta", "default device meta"])
def test_backend_metadata_keeps_to_the_host(mode: str) -> None:
    with MODES[mode]():
        manager = StateManager(make_config(), None, backend="metadata", debug=True)
        handle = manager.admit("a")
        step = manager.begin_step(StepMetadata(handles=(handle,), query_lens=(3,)), pad_to=(2, 5))
        for column in (step.query_start_loc, step.positions, step.committed_lens, step.checkpoint_slots):
            assert column.device.type == "cpu"
        assert step.record_slots.tolist() == [0, -1]
        step.replayed("verify")
        step.defer([2])
        assert manager.committed_len(handle) == 2


def test_the_settings_of_the_caller_come_back() -> None:
    matmul: Any = torch.backends.mkldnn.matmul  # type: ignore[attr-defined]

    class Holder:
        device = torch.device("cpu")

        @shielded
        def seen(self) -> tuple[bool, bool, str]:
            return torch.is_grad_enabled(), torch.is_autocast_enabled("cpu"), matmul.fp32_precision

        @shielded
        def fails(self) -> None:
            raise KeyError

    holder = Holder()
    assert holder.seen()[:2] == (False, False)
    with products("medium"), torch.autocast("cpu", torch.bfloat16), torch.enable_grad():
        given = matmul.fp32_precision
        assert holder.seen() == (False, False, "ieee")
        with pytest.raises(KeyError):
            holder.fails()
        assert (torch.is_grad_enabled(), torch.is_autocast_enabled("cpu"), matmul.fp32_precision) == (True, True, given)


def test_an_inherited_setting_stays_inherited() -> None:
    backends, matmul = torch.backends, torch.backends.mkldnn.matmul  # type: ignore[attr-defined]
    manager = make_manager()
    before = backends.fp32_precision
    matmul.fp32_precision = "none"  # inherits, whatever a test before this one has set
    try:
        backends.fp32_precision = "bf16"
        manager.admit("a")
        assert matmul.fp32_precision == "bf16"
        backends.fp32_precision = "ieee"
        assert matmul.fp32_precision == "ieee"
    finally:
        backends.fp32_precision = before


def test_what_is_written_in_place_with_gradients_leaves_no_graph() -> None:
    manager = make_manager()
    handle = manager.admit("a")
    slot = int(manager.checkpoint_slots([handle])[0])
    weight = torch.ones(2, 5, 6, dtype=torch.float64, requires_grad=True)
    for layer in range(2):
        recurrent, conv = manager.checkpoints(layer)
        recurrent[slot] = weight * 2.0
        assert conv is not None
        conv[slot] = 1.0
    manager.load(handle, None, committed_len=3)
    assert not any(manager.checkpoints(layer)[0].requires_grad for layer in range(2))
    state = manager.read(handle, 0).recurrent
    assert not state.requires_grad
    assert (state == 2.0).all()
