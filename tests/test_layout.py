"""The byte plan, against the design's published figures and against a formula written out here."""

import itertools

import pytest

from specstate import KDALayerSpec, StateConfig, plan_bytes
from specstate.layout import BytePlan, gib, tensor_layouts
from specstate.presets import KIMI_K3

MIB = 2**20
BYTES = {"bfloat16": 2, "float16": 2, "float32": 4, "float64": 8}


def plan_k3(policy: str) -> BytePlan:
    return plan_bytes(KIMI_K3.config(tp=8, max_query_len=8, max_requests=1, fold_policy=policy))


def test_k3_checkpoint_and_snapshots() -> None:
    plan = plan_k3("eager")
    recurrent = next(tensor for tensor in plan.tensors if tensor.name == "recurrent")
    assert recurrent.bytes_per_slot / MIB == 51.75
    assert round(plan.checkpoint_bytes_per_request / MIB, 2) == 53.57
    assert round(plan.snapshot_bytes_per_request / MIB, 1) == 462.5


@pytest.mark.parametrize(("policy", "mib"), [("eager", 66.7), ("deferred", 73.2), ("ring", 86.2)])
def test_k3_bytes_per_request(policy: str, mib: float) -> None:
    assert round(plan_k3(policy).bytes_per_request / MIB, 1) == mib


SHAPES = list(
    itertools.product(
        [(1, 8, 8), (2, 8, 6), (3, 16, 32)],  # H, K, V
        [None, 2, 4],  # W
        [1, 3, 8],  # T
        [("float32", "bfloat16"), ("bfloat16", "float16"), ("float64", "float64"), ("float64", "bfloat16")],
        [("eager", 1, 1), ("deferred", 3, 2), ("ring", 2, 5)],  # policy, max_requests, num_checkpoints
    )
)


@pytest.mark.parametrize(("heads", "conv", "window", "dtypes", "counts"), SHAPES)
def test_plan_equals_the_written_out_formula(
    heads: tuple[int, int, int],
    conv: int | None,
    window: int,
    dtypes: tuple[str, str],
    counts: tuple[str, int, int],
) -> None:
    (h, k, v), (state_dtype, activation_dtype), (policy, requests, checkpoints), layers = heads, dtypes, counts, 3
    config = StateConfig(
        num_layers=layers,
        layer=KDALayerSpec(num_heads=h, head_k_dim=k, head_v_dim=v, conv_kernel_size=conv),
        max_requests=requests,
        max_query_len=window,
        fold_policy=policy,
        num_checkpoints=checkpoints,
        checkpoint_dtype=state_dtype,
        activation_dtype=activation_dtype,
    )
    plan = plan_bytes(config)

    state, activation, record = BYTES[state_dtype], BYTES[activation_dtype], 8 if state_dtype == "float64" else 4
    channels, history = h * (2 * k + v), (conv - 1 if conv else 0)
    ring_inputs = history + window if conv else 0
    window_inputs = history - 1 + window if conv else 0
    capacity = {"eager": 1, "deferred": 2, "ring": 4}[policy] * window
    checkpoint = layers * (h * k * v * state + history * channels * activation)
    records = layers * (ring_inputs * channels * activation + capacity * h * (v * record + 2 * k * activation + 4))
    cursors_and_sampling = plan.bytes_per_request - checkpoint - records
    snapshot = layers * (h * k * v * state + window_inputs * channels * activation)

    assert plan.checkpoint_bytes_per_request == checkpoint
    assert 0 < cursors_and_sampling <= 80
    assert cursors_and_sampling % 4 == 0
    assert plan.snapshot_bytes_per_request == window * snapshot
    assert plan.snapshot_overhead_bytes == snapshot
    once = plan.overhead_bytes - plan.bytes_per_request
    workspace = 1024 * channels * activation if conv else 0
    assert 0 < once - workspace < 1024
    record_slot = plan.bytes_per_request - checkpoint
    assert plan.total_bytes == (checkpoints + 1) * checkpoint + (requests + 1) * record_slot + once


def test_more_slots_cost_what_a_slot_costs() -> None:
    def total(max_requests: int, num_checkpoints: int) -> int:
        layer = KDALayerSpec(num_heads=2, head_k_dim=8, head_v_dim=6)
        config = StateConfig(
            num_layers=2, layer=layer, max_requests=max_requests, max_query_len=3, num_checkpoints=num_checkpoints
        )
        return plan_bytes(config).total_bytes

    plan = plan_bytes(
        StateConfig(
            num_layers=2, layer=KDALayerSpec(num_heads=2, head_k_dim=8, head_v_dim=6), max_requests=1, max_query_len=3
        )
    )
    assert total(4, 7) - total(4, 6) == plan.checkpoint_bytes_per_request
    assert total(5, 6) - total(4, 6) == plan.bytes_per_request - plan.checkpoint_bytes_per_request


def test_every_tensor_is_named_once_and_knows_its_slots() -> None:
    config = KIMI_K3.config(tp=8, max_query_len=8, max_requests=6, num_checkpoints=4)
    tensors = tensor_layouts(config)
    assert len({tensor.name for tensor in tensors}) == len(tensors)
    for tensor in tensors:
        if tensor.scope == "checkpoint slot":
            assert tensor.shape[tensor.slot_dim] == 4 + 1
        elif tensor.scope == "record slot":
            assert tensor.shape[tensor.slot_dim] == 6 + 1
        else:
            assert tensor.bytes_per_slot == 0


@pytest.mark.parametrize("policy", ["eager", "deferred", "ring"])
def test_requests_in_is_the_last_count_that_fits(policy: str) -> None:
    plan = plan_k3(policy)
    for requests in (1, 2, 17):
        exact = plan.overhead_bytes + requests * plan.bytes_per_request
        assert plan.requests_in(exact) == requests
        assert plan.requests_in(exact - 1) == requests - 1
        snapshots = plan.snapshot_overhead_bytes + requests * plan.snapshot_bytes_per_request
        assert plan.snapshot_requests_in(snapshots) == requests
        assert plan.snapshot_requests_in(snapshots - 1) == requests - 1
    assert plan.requests_in(0) == plan.snapshot_requests_in(0) == 0


def test_requests_in_agrees_with_a_config_of_that_many() -> None:
    plan = plan_k3("ring")
    memory = 3 * 2**30
    fits = plan.requests_in(memory)
    build = {"tp": 8, "max_query_len": 8, "fold_policy": "ring", "memory_limit_bytes": memory}
    assert plan_bytes(KIMI_K3.config(max_requests=fits, **build)).total_bytes <= memory
    with pytest.raises(ValueError, match="memory_limit_bytes"):
        KIMI_K3.config(max_requests=fits + 1, **build)


def test_gib() -> None:
    assert gib(3 * 2**29) == "1.50 GiB"
