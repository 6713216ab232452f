"""Storage released and bound again, and the caller's moved under living requests."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from specstate import PrefixKey, SpecStateError, StateManager, StepMetadata, StepOrderError
from tests.factories import (
    POLICIES,
    fingerprint,
    make_config,
    make_inputs,
    make_manager,
    make_params,
    make_twin,
    run_step,
)

#: What needs storage, and has none.
CALLS: dict[str, Callable[[StateManager], Any]] = {
    "admit": lambda m: m.admit("x"),
    "resume": lambda m: m.resume("a"),
    "restore": lambda m: m.restore(PrefixKey("k", 1), "x"),
    "reserve_checkpoints": lambda m: m.reserve_checkpoints(1),
    "begin_step": lambda m: m.begin_step(StepMetadata(handles=(), query_lens=())),
    "set_params": lambda m: m.set_params(make_params(m.config)),
    "checkpoints": lambda m: m.checkpoints(0),
    "warmup": lambda m: m.warmup(),
    "release_storage": lambda m: m.release_storage(),
}


@pytest.mark.parametrize("policy", POLICIES)
def test_a_retracted_request_outlives_the_storage(policy: str) -> None:
    config = make_config(fold_policy=policy)
    manager, twin = make_manager(config), make_twin(config)
    a = manager.admit("a")
    for seed in range(3):
        run_step(manager, [(a, twin, 4, 2)], seed)
    counted, planned = manager.counters(), manager.allocated_bytes
    manager.retract(a)
    manager.release_storage()
    assert manager.allocated_bytes == 0
    assert manager.counters().windows == counted.windows == 3
    assert manager.metrics().record_slots_in_use == 0
    manager.check_integrity()
    manager.digest()
    for verb, call in CALLS.items():
        with pytest.raises(StepOrderError, match=f"{verb}: the storage was released"):
            call(manager)
    manager.bind_storage()
    assert manager.allocated_bytes == planned
    assert manager.counters().windows == 3
    a = manager.resume("a")
    twin.check(manager, a)
    for seed in range(3):
        run_step(manager, [(a, twin, 4, 3)], seed)
    assert manager.counters().windows == 6
    manager.set_params(make_params(config, seed=9)) if policy == "eager" else manager.fence("flush")
    manager.check_integrity()


@pytest.mark.parametrize("holds", ["live", "preempted", "folded", "published", "reserved"])
def test_nothing_may_lie_in_a_slot(holds: str) -> None:
    config = make_config()
    manager, twin = make_manager(config), make_twin(config)
    a = manager.admit("a")
    run_step(manager, [(a, twin, 4, 4)], 0)
    if holds in ("published", "reserved"):
        manager.publish(a, PrefixKey("k", 4)) if holds == "published" else manager.reserve_checkpoints(1)
        manager.release(a)
    elif holds != "live":
        manager.preempt(a, fold=holds == "folded")
    before = fingerprint(manager)
    with pytest.raises(StepOrderError, match=r"release_storage: \d record slots and 1 checkpoint slots are taken"):
        manager.release_storage()
    assert fingerprint(manager) == before


@pytest.mark.parametrize("policy", POLICIES)
def test_the_callers_storage_moves_under_living_requests(policy: str) -> None:
    config = make_config(fold_policy=policy)
    manager, twins = make_manager(config), [make_twin(config) for _ in range(2)]
    handles = [manager.admit(name) for name in "ab"]
    for seed in range(3):
        run_step(manager, [(handles[0], twins[0], 4, 2), (handles[1], twins[1], 3, 1)], seed)
    views = [[torch.full_like(view, torch.nan) for view in manager.checkpoints(i)] for i in range(config.num_layers)]
    if policy != "eager":
        before = fingerprint(manager)
        with pytest.raises(StepOrderError, match="bind_storage: request 'a' may have pending records; flush first"):
            manager.bind_storage(views)
        assert fingerprint(manager) == before
    step = manager.begin_step(StepMetadata(handles=(handles[0],), query_lens=(1,)))
    with pytest.raises(StepOrderError, match="bind_storage: request 'a' is in step"):
        manager.bind_storage(views)
    step.cancel()
    manager.fence("flush")
    with pytest.raises(SpecStateError, match="storage = None"):
        manager.bind_storage()
    with pytest.raises(SpecStateError, match="storage must be a sequence of 2"):
        manager.bind_storage(views[:1])
    for index, pair in enumerate(views):
        for view, old in zip(pair, manager.checkpoints(index), strict=True):
            view.copy_(old)
    manager.bind_storage(views)
    for handle, twin in zip(handles, twins, strict=True):
        twin.check(manager, handle)
    for seed in range(3):
        run_step(manager, [(handles[0], twins[0], 4, 2), (handles[1], twins[1], 3, 1)], seed)
    manager.fence("flush")
    manager.check_integrity()
    recurrent, _ = manager.checkpoints(0)
    assert recurrent.data_ptr() == views[0][0].data_ptr()


def test_a_step_without_requests_may_be_cancelled_when_storage_is_gone() -> None:
    config = make_config(fold_policy="deferred")
    manager, twin = make_manager(config), make_twin(config)
    a = manager.admit("a")
    run_step(manager, [(a, twin, 4, 3)], 0)
    step = manager.begin_step(StepMetadata(handles=(a,), query_lens=(2,)))
    tensors = make_inputs(config, 2, 1)[0]
    step.verify(0, tensors.qkv, tensors.raw_gate, tensors.raw_beta)
    manager.release(a)
    manager.fence("drop")
    manager.release_storage()
    step.cancel()
    manager.bind_storage()
    manager.check_integrity()
