"""The presets against their sources' figures, and tensor-parallel splits."""

import pytest
from pydantic import ValidationError

from specstate import SpecStateError
from specstate.presets import KIMI_K3, KIMI_LINEAR_48B, PRESETS, find_preset


@pytest.mark.parametrize(
    ("name", "num_layers", "num_heads", "gate_lower_bound"),
    [("kimi-linear-48b", 20, 32, None), ("kimi-k3", 69, 96, -5.0)],
)
def test_figures(name: str, num_layers: int, num_heads: int, gate_lower_bound: float | None) -> None:
    preset = find_preset(name)
    assert (preset.name, preset.num_layers, preset.num_heads) == (name, num_layers, num_heads)
    layer = preset.layer()
    assert (layer.num_heads, layer.head_k_dim, layer.head_v_dim) == (num_heads, 128, 128)
    assert layer.conv_kernel_size == 4
    assert layer.gate_lower_bound == gate_lower_bound


def test_every_preset_is_found_by_its_name() -> None:
    assert {name: find_preset(name).name for name in PRESETS} == {name: name for name in PRESETS}
    assert find_preset("kimi-k3") is KIMI_K3


def test_an_unknown_name_is_answered_with_the_known_ones() -> None:
    with pytest.raises(SpecStateError, match=r"'kimi-k4' is unknown: .*kimi-k3, kimi-linear-48b"):
        find_preset("kimi-k4")


@pytest.mark.parametrize(("tp", "heads"), [(1, 96), (3, 32), (8, 12), (96, 1)])
def test_ranks_share_the_heads(tp: int, heads: int) -> None:
    assert KIMI_K3.layer(tp).num_heads == heads
    assert KIMI_K3.layer(tp).conv_channels == 3 * 128 * heads


@pytest.mark.parametrize("tp", [-1, 0, 5, 7, 192])
def test_heads_that_do_not_divide_are_refused(tp: int) -> None:
    with pytest.raises(SpecStateError, match=rf"tp = {tp} cannot split kimi-k3: its 96 heads"):
        KIMI_K3.layer(tp)


def test_config_is_one_rank_with_the_options_given() -> None:
    config = KIMI_LINEAR_48B.config(tp=2, max_query_len=4, max_requests=3, fold_policy="deferred", num_checkpoints=9)
    assert config.num_layers == 20
    assert config.layer == KIMI_LINEAR_48B.layer(2)
    assert (config.max_query_len, config.max_requests, config.num_checkpoints) == (4, 3, 9)
    assert (config.fold_policy, config.record_capacity) == ("deferred", 8)


def test_config_refuses_what_a_state_config_refuses() -> None:
    with pytest.raises(ValidationError, match="record_capacity = 1"):
        KIMI_K3.config(max_query_len=4, max_requests=1, record_capacity=1)
    with pytest.raises(ValidationError, match="windows"):
        KIMI_K3.config(max_query_len=4, max_requests=1, windows=3)


@pytest.mark.parametrize("tp", ["8", 8.0, None, True, 0, 7])
def test_a_degree_that_is_no_divisor_is_refused(tp: object) -> None:
    with pytest.raises(SpecStateError, match="tp = "):
        KIMI_K3.layer(tp)  # type: ignore[arg-type]
