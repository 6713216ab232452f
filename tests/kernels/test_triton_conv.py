"""The conv kernel, seen through what verify keeps of it: keys as recorded, values as corrections, inputs in the ring.

A gate that decays everything and a beta of 1 make u = v, to the bit.
"""

import dataclasses

import pytest
import torch
import torch.nn.functional as F

from specstate.validation import DTYPES
from tests.factories import make_params
from tests.kernels.harness import ROUNDOFF, Rig, Row, bytes_of, check_verify, check_written, small_config

ROWS = [Row(5, 3, 4), Row(0, 0, 1), Row(query_len=2, kind="dummy"), Row(6, 0, 3), Row(2, 4, 2)]


def convolved(rig: Rig, row: int, window: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """SiLU of the conv [tokens, C] in float64 by torch's own convolution, and a bound of what float32 makes of it."""
    params, spec = rig.params[0], rig.config.layer
    assert params.conv_weight is not None and rig.storage.layers[0].conv_ring is not None
    ring, weight = (
        rig.storage.layers[0].conv_ring[rig.record_row(row)].cpu().double(),
        params.conv_weight.cpu().double(),
    )
    history = [ring[(rig.rows[row].committed_len + i) % len(ring)] for i in range(spec.conv_history_len)]
    taken = torch.cat([torch.stack(history), window.cpu().double()]).T[None]
    bias = None if params.conv_bias is None else params.conv_bias.cpu().double()
    x = F.conv1d(taken, weight[:, None], bias, groups=spec.conv_channels)[0].T
    size = F.conv1d(taken.abs(), weight[:, None].abs(), None if bias is None else bias.abs(), groups=spec.conv_channels)
    # Every product and sum rounds once, an exponential and a quotient a few times; SiLU's slope is at most 1.1.
    float32_error = (2 * (spec.conv_history_len + 2) * size[0].T + (8 + 2 * x.abs()) * x.abs()) * ROUNDOFF["float32"]
    return F.silu(x), float32_error


@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])
@pytest.mark.parametrize("taps", [2, 3, 4])
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_against_torch(dtype: str, taps: int, bias: bool, path: str, device: str) -> None:
    config = small_config(path=path, activation_dtype=dtype, conv_kernel_size=taps, head_k_dim=96, head_v_dim=80)
    spec = config.layer
    assert spec.conv_channels > 256, "more than one block of channels"
    params = make_params(config, 3, device)
    if not bias:
        params = [dataclasses.replace(layer, conv_bias=None) for layer in params]
    rig = Rig(config, ROWS, device, params=params)
    steps = rig.begin(1, 3)
    inputs, before = rig.inputs(steps[1].num_tokens)[0], rig.snapshot()[0]
    inputs.raw_gate.fill_(1e4)
    inputs.raw_beta.fill_(1e4)
    wanted = {row: convolved(rig, row, inputs.qkv[rig.window(row)]) for row in rig.live}
    rig.verify(steps, 0, inputs)
    check_written(rig, 0, before, folds=False)
    for row, (exact, float32_error) in wanted.items():
        ours = rig.records(row)[0]
        assert torch.equal(ours["record_u"], ours["record_u"].to(DTYPES[dtype]).float()), "v in the activation dtype"
        got = torch.cat([ours["record_key"][0].double(), ours["record_u"][0].double()], 1)
        exact, float32_error = exact[:, spec.head_k_dim :], float32_error[:, spec.head_k_dim :]
        budget = float32_error + ROUNDOFF[dtype] * (exact.abs() + float32_error)
        if dtype == "float16":
            budget = budget + 2.0**-25  # half of its smallest number
        assert ((got - exact).abs() <= budget).all()
        ring = rig.storage.layers[0].conv_ring[rig.record_row(row)]
        for t, given in enumerate(inputs.qkv[rig.window(row)]):
            entry = (rig.rows[row].committed_len + t + taps - 1) % len(ring)
            assert torch.equal(bytes_of(ring[entry]), bytes_of(given)), "the ring holds raw inputs"


@pytest.mark.parametrize("weight", ["float32", "bfloat16", "float16"])
def test_parameters_in_any_float_dtype(weight: str, path: str, device: str) -> None:
    """Weight and bias are read as what they are, also when they differ in dtype."""
    config = small_config(path=path, activation_dtype="bfloat16", conv_kernel_size=4)
    params = [
        dataclasses.replace(layer, conv_weight=layer.conv_weight.to(DTYPES[weight]))
        for layer in make_params(config, 3, device)
    ]
    rig = Rig(config, ROWS, device, params=params)
    steps = rig.begin()
    check_verify(rig, rig.verify(steps, 0, rig.inputs(steps[1].num_tokens)[0]))


@pytest.mark.parametrize("position", range(0, 14, 2))
def test_the_ring_wraps_anywhere(position: int, path: str, device: str) -> None:
    """Each place of a window in a ring of W - 1 + T entries, full and short windows."""
    config = small_config(path=path, conv_kernel_size=4)
    rig = Rig(config, [Row(position, 0, 4), Row(position + 1, 0, 2), Row(position, 2, 1)], device)
    steps, before = rig.begin(), rig.snapshot()[0]
    check_verify(rig, rig.verify(steps, 0, rig.inputs(7)[0]))
    check_written(rig, 0, before, folds=False)


def test_large_inputs(path: str, device: str) -> None:
    """SiLU far out: 0 and x, never NaN."""
    config = small_config(path=path, conv_kernel_size=2)
    params = [
        dataclasses.replace(layer, conv_weight=torch.ones_like(layer.conv_weight), conv_bias=None)
        for layer in make_params(config, 0, device)
    ]
    rig = Rig(config, [Row(0, 0, 2)], device, params=params)
    steps = rig.begin()
    inputs = rig.inputs(2)[0]
    inputs.qkv[0] = torch.where(torch.arange(config.layer.conv_channels, device=device) % 2 == 0, 1e4, -1e4)
    inputs.qkv[1] = 0.0
    rig.verify(steps, 0, inputs)
    keys = rig.records(0)[0]["record_key"][0]
    even = torch.arange(config.layer.head_k_dim) % 2 == 0
    assert keys.isfinite().all()
    assert (keys[:, even] > 9e3).all()
    assert (keys[:, ~even].abs() == 0.0).all()
