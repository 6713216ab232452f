"""StateConfig and KDALayerSpec: defaults, and the refusals of what cannot work."""

import math
from typing import Any

import pytest
from pydantic import ValidationError

from specstate import KDALayerSpec, StateConfig, plan_bytes

LAYER = KDALayerSpec(num_heads=2, head_k_dim=8, head_v_dim=6)


def make_config(**fields: Any) -> StateConfig:
    return StateConfig(**{"num_layers": 3, "layer": LAYER, "max_requests": 5, "max_query_len": 4, **fields})


@pytest.mark.parametrize(("policy", "windows"), [("eager", 1), ("deferred", 2), ("ring", 4)])
@pytest.mark.parametrize("max_query_len", [1, 4, 16])
def test_record_capacity_defaults_to_windows_of_the_policy(policy: str, windows: int, max_query_len: int) -> None:
    config = make_config(fold_policy=policy, max_query_len=max_query_len)
    assert config.record_capacity == windows * max_query_len


def test_defaults() -> None:
    config = make_config()
    assert config.fold_policy == "ring"
    assert config.num_checkpoints == config.max_requests == 5
    assert (config.checkpoint_dtype, config.activation_dtype) == ("float32", "bfloat16")
    assert config.block_size is None
    assert config.memory_limit_bytes is None
    assert config.path is None
    assert LAYER.conv_kernel_size == 4
    assert LAYER.gate_lower_bound is None


def test_explicit_none_means_the_default() -> None:
    config = make_config(record_capacity=None, num_checkpoints=None)
    assert (config.record_capacity, config.num_checkpoints) == (16, 5)


@pytest.mark.parametrize("num_checkpoints", [1, 4, 9])
def test_checkpoints_may_be_fewer_or_more_than_requests(num_checkpoints: int) -> None:
    assert make_config(num_checkpoints=num_checkpoints).num_checkpoints == num_checkpoints


@pytest.mark.parametrize(("policy", "least"), [("eager", 4), ("deferred", 8), ("ring", 8)])
def test_refuses_a_ring_too_small_for_the_window(policy: str, least: int) -> None:
    assert make_config(fold_policy=policy, record_capacity=least).record_capacity == least
    with pytest.raises(
        ValidationError, match=rf"record_capacity = {least - 1} .*'{policy}'.*max_query_len = 4 .*at least {least}"
    ):
        make_config(fold_policy=policy, record_capacity=least - 1)


def test_refuses_a_block_smaller_than_the_window() -> None:
    assert make_config(block_size=4).block_size == 4
    with pytest.raises(ValidationError, match=r"block_size = 3 .*max_query_len = 4"):
        make_config(block_size=3)


@pytest.mark.parametrize("field", ["num_layers", "max_requests", "max_query_len", "num_checkpoints", "record_capacity"])
@pytest.mark.parametrize("value", [0, -1])
def test_refuses_no_slots(field: str, value: int) -> None:
    with pytest.raises(ValidationError) as refusal:
        make_config(**{field: value})
    entries = {entry["loc"]: entry for entry in refusal.value.errors()}
    assert entries[(field,)]["input"] == value
    assert "greater than or equal to 1" in entries[(field,)]["msg"]


def test_refuses_more_memory_than_the_limit() -> None:
    needed = plan_bytes(make_config()).total_bytes
    assert make_config(memory_limit_bytes=needed).memory_limit_bytes == needed
    with pytest.raises(ValidationError, match=rf"memory_limit_bytes = {needed - 1} .*needs {needed} bytes"):
        make_config(memory_limit_bytes=needed - 1)


def test_refuses_float64_activations_beside_a_smaller_state() -> None:
    assert make_config(activation_dtype="float64", checkpoint_dtype="float64").activation_dtype == "float64"
    with pytest.raises(ValidationError, match=r"activation_dtype = 'float64' .*not 'float32'"):
        make_config(activation_dtype="float64")


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("fold_policy", "lazy"),
        ("fold_policy", []),
        ("fold_policy", {}),
        ("checkpoint_dtype", "float16"),
        ("activation_dtype", "int8"),
        ("max_query_len", "4"),
        ("max_requests", 2.0),
        ("max_query_lens", 4),
        ("layer", None),
    ],
)
def test_refuses_wrong_types_and_unknown_fields(field: str, value: object) -> None:
    with pytest.raises(ValidationError) as refusal:
        make_config(**{field: value})
    assert refusal.value.errors()[0]["loc"][0] == field
    assert refusal.value.errors()[0]["input"] == value


@pytest.mark.parametrize("field", ["num_heads", "head_k_dim", "head_v_dim"])
def test_layer_refuses_no_size(field: str) -> None:
    with pytest.raises(ValidationError, match=field):
        KDALayerSpec(**{"num_heads": 2, "head_k_dim": 8, "head_v_dim": 8, field: 0})


@pytest.mark.parametrize(
    ("field", "most"),
    [
        ("num_layers", 2**12),
        ("max_requests", 2**20),
        ("num_checkpoints", 2**20),
        ("max_query_len", 2**16),
        ("record_capacity", 2**20),
        ("block_size", 2**30),
        ("memory_limit_bytes", 2**63 - 1),
    ],
)
def test_every_size_has_an_upper_bound(field: str, most: int) -> None:
    assert getattr(make_config(**{field: most}), field) == most
    for value in (most + 1, 2**70):
        with pytest.raises(ValidationError) as refusal:
            make_config(**{field: value})
        entries = {entry["loc"]: entry for entry in refusal.value.errors()}
        assert entries[(field,)]["ctx"] == {"le": most}


@pytest.mark.parametrize(
    ("field", "most"), [("num_heads", 2**16), ("head_k_dim", 2**16), ("head_v_dim", 2**16), ("conv_kernel_size", 64)]
)
def test_every_size_of_a_layer_has_an_upper_bound(field: str, most: int) -> None:
    fields = {"num_heads": 2, "head_k_dim": 8, "head_v_dim": 8}
    assert getattr(KDALayerSpec(**{**fields, field: most}), field) == most
    with pytest.raises(ValidationError, match=rf"{field}\s.*less than or equal to {most}"):
        KDALayerSpec(**{**fields, field: most + 1})


@pytest.mark.parametrize("bound", [0.0, 5.0, -1e308, -math.inf, math.nan])
def test_layer_refuses_a_gate_bound_out_of_range(bound: float) -> None:
    with pytest.raises(ValidationError, match="gate_lower_bound"):
        KDALayerSpec(num_heads=2, head_k_dim=8, head_v_dim=8, gate_lower_bound=bound)


def test_layer_refuses_a_convolution_of_one_tap() -> None:
    with pytest.raises(ValidationError, match="conv_kernel_size"):
        KDALayerSpec(num_heads=2, head_k_dim=8, head_v_dim=8, conv_kernel_size=1)


@pytest.mark.parametrize(("kernel", "history"), [(None, 0), (2, 1), (4, 3)])
def test_layer_counts_channels_and_history(kernel: int | None, history: int) -> None:
    layer = KDALayerSpec(num_heads=3, head_k_dim=8, head_v_dim=6, conv_kernel_size=kernel)
    assert layer.conv_channels == 3 * 8 + 3 * 8 + 3 * 6
    assert layer.conv_history_len == history


def test_a_built_config_does_not_change() -> None:
    config = make_config()
    with pytest.raises(ValidationError, match="frozen"):
        config.max_requests = 7  # type: ignore[misc]
    assert config == make_config()
