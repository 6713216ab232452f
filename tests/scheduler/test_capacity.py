"""From memory to slots."""

from typing import Any

import pytest

from specstate import CapacityError, SpecStateError, plan_bytes
from specstate.presets import KIMI_K3
from specstate.scheduler.capacity import Deployment, divide
from specstate.scheduler.settings import EngineSettings


def deployment(**fields: Any) -> Deployment:
    given: dict[str, Any] = {"memory_bytes": 80 * 2**30, "max_query_len": 8, "policy": "ring", **fields}
    return Deployment(model=KIMI_K3, tp=8, **given)


@pytest.mark.parametrize("policy", ["eager", "deferred", "ring"])
def test_slots_fill_the_memory_and_do_not_exceed_it(policy: Any) -> None:
    slots = divide(deployment(policy=policy), EngineSettings(max_batch=10_000))
    total = plan_bytes(slots.config).total_bytes
    assert slots.total_bytes == total
    assert total <= 80 * 2**30 < total + slots.request_bytes + slots.checkpoint_bytes
    assert slots.config.max_requests == slots.num_fitting
    kept = (slots.config.num_checkpoints - slots.config.max_requests) * slots.checkpoint_bytes
    assert kept == pytest.approx(20 * 2**30, rel=0.01)


def test_without_a_prefix_cache_all_is_for_requests_as_plan_says() -> None:
    slots = divide(deployment(), EngineSettings(prefix_cache=False, max_batch=10_000))
    assert slots.config.max_requests == slots.config.num_checkpoints
    assert slots.config.max_requests == plan_bytes(slots.config).requests_in(80 * 2**30)


def test_snapshots_hold_fewer() -> None:
    slots = divide(deployment(policy="snapshots"), EngineSettings(prefix_cache=False))
    assert slots.config.max_requests == plan_bytes(slots.config).snapshot_requests_in(80 * 2**30)
    assert slots.config.fold_policy == "eager"
    assert slots.held_bytes(2, 3) == pytest.approx(2 * slots.request_bytes + slots.checkpoint_bytes)


def test_a_small_batch_leaves_more_for_prefixes() -> None:
    slots = divide(deployment(), EngineSettings(max_batch=16))
    assert slots.config.max_requests == 16
    assert slots.config.num_checkpoints > 1400
    assert slots.num_fitting == divide(deployment(), EngineSettings(max_batch=900)).num_fitting


@pytest.mark.parametrize(
    ("fields", "what"),
    [
        ({"memory_bytes": 2**27}, "hold no request"),
        ({"max_requests": 2000}, "max_requests = 2000 .* more than the 80.00 GiB"),
        ({"num_checkpoints": 2000}, "num_checkpoints = 2000 need .* more than the 80.00 GiB"),
    ],
)
def test_what_does_not_fit_is_refused(fields: dict[str, Any], what: str) -> None:
    with pytest.raises(CapacityError, match=what):
        divide(deployment(**fields), EngineSettings())


def test_the_share_of_prefixes_is_a_share() -> None:
    with pytest.raises(SpecStateError, match=r"prefix_share = 1\.0"):
        divide(deployment(prefix_share=1.0), EngineSettings())


@pytest.mark.parametrize(
    ("settings", "block_size"), [({}, None), ({"cache_outputs": True}, 512), ({"prefill": "rows"}, 512)]
)
def test_boundaries_are_kept_where_they_are_needed(settings: dict[str, Any], block_size: int | None) -> None:
    assert divide(deployment(), EngineSettings(**settings)).config.block_size == block_size
