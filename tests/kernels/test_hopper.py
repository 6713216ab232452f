"""The kernels for Hopper GPUs over all that they cover: windows, pending records, shapes, gates, convs and dtypes.

Every other test of verifies, folds and steps runs on them as well, by the fixture ``path``.
"""

import dataclasses
import itertools
from typing import Any

import pytest
import torch

from specstate.kernels.cursors import StepTensors
from tests.factories import LayerInputs, make_params
from tests.kernels.harness import (
    AIM,
    ROUNDOFF,
    Rig,
    Row,
    activation,
    check_verify,
    check_written,
    rounding_budget,
    row_error,
    small_config,
)
from tests.kernels.test_triton_verify import verify_and_check

pytestmark = pytest.mark.hopper

#: Around the tiles that records are read in.
PENDING = (0, 1, 7, 8, 9, 15, 16, 17, 24, 32)
GATES = [pytest.param(None, id="softplus gate"), pytest.param(-5.0, id="bounded gate")]


@pytest.mark.parametrize("most", [24, 32])
@pytest.mark.parametrize("length", range(1, 17))
def test_every_window_over_every_number_of_records(length: int, most: int, device: str) -> None:
    config = small_config(
        path="hopper", max_query_len=length, record_capacity=most + length, activation_dtype="bfloat16"
    )
    cases = itertools.product([pending for pending in PENDING if pending <= most], range(1, length + 1))
    rows = [Row(5 * i + 1, pending, query_len) for i, (pending, query_len) in enumerate(cases)]
    verify_and_check(Rig(config, rows, device))


@pytest.mark.parametrize(
    ("length", "bound"),
    [(4, -5.0), (5, -12.8), (6, -5.0), (7, -5.0), (8, -8.0), (8, -8.1), (9, -5.0), (12, -5.0), (13, -5.0), (16, -4.0)],
)
@pytest.mark.parametrize(("heads", "v_dim"), [(12, 64), (36, 128)], ids=["64 rows of V at once", "128 rows of V"])
@pytest.mark.parametrize("policy", ["ring", "deferred"])
def test_every_window_of_bounded_decays(
    length: int, bound: float, policy: str, heads: int, v_dim: int, device: str
) -> None:
    """Pairs of tokens by products as long as decays over a window are no less than e^-64: to that bound, and behind it.

    Gates at random, then at their ends: every decay is the least there is, or none, or either. Under the least, nearly
    all of a window's first output is one q k of random vectors, a sum that may cancel: over a rank's heads some do, all
    do not.
    """
    config = small_config(
        path="hopper",
        num_heads=heads,
        head_v_dim=v_dim,
        fold_policy=policy,
        max_query_len=length,
        gate_lower_bound=bound,
        activation_dtype="bfloat16",
    )
    rows = [Row(5 * i + 1, pending, query_len) for i, (pending, query_len) in enumerate([(0, length), (3, 2), (4, 1)])]
    generator = torch.Generator().manual_seed(length)
    for case in ("random", "least", "none", "either"):
        rig = Rig(config, rows, device)
        steps = rig.begin()
        inputs = rig.inputs(steps[1].num_tokens)[0]
        if case != "random":
            ends = torch.where(torch.rand(inputs.raw_gate.shape, generator=generator) < 0.5, -400.0, 400.0)
            raw_gate = ends if case == "either" else torch.full_like(ends, 400.0 if case == "least" else -400.0)
            inputs = dataclasses.replace(inputs, raw_gate=raw_gate.to(inputs.raw_gate))
        check_verify(rig, rig.verify(steps, 0, inputs))


@pytest.mark.parametrize(("length", "capacity"), [(1, 2), (5, 10), (8, 16), (9, 18), (16, 32), (4, 20), (4, 36)])
def test_every_window_that_folds_records(length: int, capacity: int, device: str) -> None:
    """With more pending than a window, too: the kernel takes what it is given."""
    config = small_config(
        path="hopper",
        fold_policy="deferred",
        max_query_len=length,
        record_capacity=capacity,
        activation_dtype="bfloat16",
        conv_kernel_size=4,
    )
    counts = [pending for pending in PENDING if pending <= capacity - length]
    cases = itertools.product(counts, sorted({1, (length + 1) // 2, length}))
    rows = [Row(5 * i + 1, pending, query_len) for i, (pending, query_len) in enumerate(cases)]
    verify_and_check(Rig(config, rows, device))


def test_conv_weights_that_start_anywhere(device: str) -> None:
    config = small_config(
        path="hopper", max_query_len=8, record_capacity=32, activation_dtype="bfloat16", conv_kernel_size=4
    )
    moved = []
    for layer in make_params(config, 3, device):
        weight = layer.conv_weight
        assert weight is not None
        flat = torch.empty(weight.numel() + 1, dtype=weight.dtype, device=device)[1:]
        moved.append(dataclasses.replace(layer, conv_weight=flat.view(weight.shape).copy_(weight)))
    rows = [Row(5, 17, 8), Row(6, 0, 1), Row(14, 9, 3)]
    verify_and_check(Rig(config, rows, device, params=moved))


#: V, heads, gate bound, conv taps, conv bias, checkpoints, activations, policy.
KINDS = [
    (64, 1, None, None, False, "float32", "bfloat16", "ring"),
    (64, 3, -5.0, 2, True, "bfloat16", "float16", "deferred"),
    (64, 12, None, 3, False, "float32", "float32", "ring"),
    (128, 1, -5.0, 4, True, "float32", "bfloat16", "deferred"),
    (128, 3, None, 4, True, "bfloat16", "bfloat16", "ring"),
    (128, 12, -5.0, 4, False, "float32", "bfloat16", "ring"),
    (128, 12, None, None, False, "bfloat16", "float32", "deferred"),
    (192, 1, None, 2, False, "bfloat16", "float32", "ring"),
    (192, 3, -5.0, None, False, "float32", "bfloat16", "deferred"),
    (192, 12, None, 4, True, "float32", "float16", "ring"),
    (256, 1, -5.0, 3, True, "bfloat16", "bfloat16", "ring"),
    (256, 3, None, 4, False, "float32", "bfloat16", "deferred"),
    (256, 12, -5.0, None, False, "float32", "float16", "ring"),
    (256, 3, -5.0, 2, False, "float32", "float32", "deferred"),
]
ROWS = {
    "ring": [Row(5, 32, 8), Row(6, 0, 1), Row(14, 9, 3), Row(query_len=2, kind="dummy"), Row(39, 17, 8), Row(1, 1, 5)],
    "deferred": [Row(5, 8, 8), Row(6, 0, 1), Row(14, 7, 3), Row(query_len=2, kind="dummy"), Row(39, 1, 8)],
}


@pytest.mark.parametrize(
    ("v_dim", "heads", "bound", "taps", "bias", "checkpoint", "dtype", "policy"),
    KINDS,
    ids=["V {}, H {}, bound {}, conv {}, bias {}, {}, {}, {}".format(*kind) for kind in KINDS],
)
def test_every_kind(
    v_dim: int,
    heads: int,
    bound: float | None,
    taps: int | None,
    bias: bool,
    checkpoint: str,
    dtype: str,
    policy: str,
    device: str,
) -> None:
    """A verify and a fold of all that it wrote; with gate, beta and output in float32, and as narrow as activations."""
    config = small_config(
        path="hopper",
        num_heads=heads,
        head_v_dim=v_dim,
        gate_lower_bound=bound,
        conv_kernel_size=taps,
        checkpoint_dtype=checkpoint,
        activation_dtype=dtype,
        fold_policy=policy,
        max_query_len=8,
        record_capacity=40 if policy == "ring" else 16,
    )
    params = make_params(config, 3, device)
    if not bias:
        params = [dataclasses.replace(layer, conv_bias=None) for layer in params]
    outputs = []
    for wide in (True, False):
        rig = Rig(config, ROWS[policy], device, params=params)
        steps = rig.begin(1, 3)
        inputs, before = rig.inputs(steps[1].num_tokens)[0], rig.snapshot()[0]
        out_dtype = torch.float32 if wide else activation(config)
        out = torch.full((len(inputs.qkv), heads, v_dim), torch.nan, dtype=out_dtype, device=device)
        if wide:
            inputs = LayerInputs(inputs.qkv, inputs.raw_gate.float(), inputs.raw_beta.float())
        pair = rig.verify(steps, 0, inputs, out)
        outputs.append(pair[0])
        if wide:
            check_verify(rig, pair)
        check_written(rig, 0, before, folds=policy == "deferred")
        fold_and_check(rig, steps)
    assert torch.equal(outputs[0].to(outputs[1].dtype), outputs[1])


def fold_and_check(rig: Rig, steps: tuple[StepTensors, StepTensors]) -> None:
    """Accepts all windows and folds all records, beside a reference that holds the same ones."""
    rig.copy_to_exact()
    counts = torch.tensor([row.query_len for row in rig.rows] + [0] * (len(steps[1].rows) - len(rig.rows)))
    rig.kernels.end(steps[0], counts.to(rig.device), True, None)
    rig.exact.end(steps[1], counts, True, None)
    assert torch.equal(rig.storage.cursors.cpu(), rig.exact_storage.cursors)
    limit = AIM + (ROUNDOFF["bfloat16"] if rig.config.checkpoint_dtype == "bfloat16" else 0.0)
    ours, theirs = rig.storage.layers[0], rig.exact_storage.layers[0]
    for row in rig.live:
        slot = rig.slot(row)
        assert row_error(ours.recurrent[slot], theirs.recurrent[slot]) <= limit, f"state of row {row}"
        if ours.conv is not None and theirs.conv is not None:
            assert torch.equal(ours.conv[slot].cpu(), theirs.conv[slot]), f"conv history of row {row}"


def test_every_mix_of_wide_and_narrow(device: str) -> None:
    """Gate, beta and output each in float32 or bfloat16: the same bits."""
    config = small_config(path="hopper", num_heads=2, conv_kernel_size=4, activation_dtype="bfloat16")
    rows = [Row(5, 12, 4), Row(6, 0, 1), Row(14, 9, 3)]
    seen = []
    for gate, beta, out_dtype in itertools.product((torch.bfloat16, torch.float32), repeat=3):
        rig = Rig(config, rows, device)
        steps, inputs = rig.begin(), rig.inputs(8)[0]
        out = torch.full((8, 2, config.layer.head_v_dim), torch.nan, dtype=out_dtype, device=device)
        rig.verify(steps, 0, LayerInputs(inputs.qkv, inputs.raw_gate.to(gate), inputs.raw_beta.to(beta)), out)
        seen.append([out.bfloat16().cpu(), *(rig.records(row)[0]["record_u"] for row in rig.live)])
    for held in seen[1:]:
        assert all(torch.equal(ours, first) for ours, first in zip(held, seen[0], strict=True))


@pytest.mark.parametrize("bound", GATES)
@pytest.mark.parametrize(("taps", "dtype"), [(None, "bfloat16"), (4, "bfloat16"), (4, "float32")])
@pytest.mark.parametrize("policy", ["ring", "deferred"])
def test_beside_the_portable_kernels(
    policy: str, taps: int | None, dtype: str, bound: float | None, device: str
) -> None:
    """Each within its budget of float64, and so of the other by twice that."""
    made: dict[str, Any] = {}
    for path in ("portable", "hopper"):
        config = small_config(
            path=path,
            num_heads=3,
            head_k_dim=128,
            head_v_dim=128,
            gate_lower_bound=bound,
            conv_kernel_size=taps,
            activation_dtype=dtype,
            fold_policy=policy,
            max_query_len=8,
            record_capacity=40 if policy == "ring" else 16,
        )
        rig = Rig(config, ROWS[policy], device)
        steps = rig.begin(1, 3)
        pair = rig.verify(steps, 0, rig.inputs(steps[1].num_tokens)[0])
        check_verify(rig, pair)
        made[path] = [pair[0][rig.window(row)] for row in rig.live]
        made[path] += [rig.records(row)[0]["record_u"] for row in rig.live]
        made[path] += [rig.storage.layers[0].recurrent[rig.slot(row)] for row in rig.live]
        budget = 2 * rounding_budget(config)
    for ours, theirs in zip(made["hopper"], made["portable"], strict=True):
        assert row_error(ours, theirs) <= budget


def test_the_kernels_say_what_they_are(device: str) -> None:
    assert Rig(small_config(path="hopper"), [Row()], device).kernels.path == "hopper"
