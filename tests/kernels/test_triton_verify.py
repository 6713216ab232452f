"""The verify kernel against the reference in float64: shapes, dtypes, gates, pending records all around the ring."""

import dataclasses

import pytest
import torch

from specstate import LayerParams
from specstate.validation import DTYPES
from tests.factories import LayerInputs, make_params
from tests.kernels.harness import (
    AIM,
    ROUNDOFF,
    Rig,
    Row,
    activation,
    bytes_of,
    check_verify,
    check_written,
    row_error,
    small_config,
)

GATES = [pytest.param(None, id="softplus gate"), pytest.param(-5.0, id="bounded gate")]
#: How many records may be pending under each policy is the policy's: none, one window, all but one window.
ROWS = {
    "eager": [Row(7, 0, 4), Row(0, 0, 2)],
    "deferred": [Row(5, 3, 4), Row(6, 0, 1), Row(2, 4, 3)],
    "ring": [Row(5, 12, 4), Row(6, 0, 1), Row(14, 9, 3)],
}
SHAPES = [
    ("portable", (1, 16, 16)),
    ("portable", (2, 24, 33)),
    ("portable", (3, 33, 24)),
    ("portable", (1, 64, 16)),
    ("portable", (1, 16, 128)),
    ("portable", (1, 128, 64)),
    ("portable", (1, 256, 33)),
    ("portable", (2, 33, 256)),
    pytest.param("portable", (12, 128, 128), marks=pytest.mark.gpu),
    pytest.param("portable", (4, 256, 256), marks=pytest.mark.gpu),
    pytest.param("portable", (5, 96, 192), marks=pytest.mark.gpu),
    pytest.param("hopper", (1, 128, 64), marks=pytest.mark.hopper),
    pytest.param("hopper", (12, 128, 128), marks=pytest.mark.hopper),
    pytest.param("hopper", (3, 128, 192), marks=pytest.mark.hopper),
    pytest.param("hopper", (2, 128, 256), marks=pytest.mark.hopper),
]


def shape_id(value: str | tuple[int, int, int]) -> str:
    return value if isinstance(value, str) else "H {}, K {}, V {}".format(*value)


def sizes(shape: tuple[int, int, int]) -> dict[str, int]:
    return dict(zip(("num_heads", "head_k_dim", "head_v_dim"), shape, strict=True))


def verify_and_check(rig: Rig, pad_rows: int = 0, pad_tokens: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """One verify of every layer, against the reference, with nothing else written."""
    steps = rig.begin(pad_rows, pad_tokens)
    folds = rig.config.folds_in_verify
    for layer, inputs in enumerate(rig.inputs(steps[1].num_tokens)):
        before = rig.snapshot()[layer]
        outputs = rig.verify(steps, layer, inputs)
        check_verify(rig, outputs, layer)
        check_written(rig, layer, before, folds)
        for row in rig.live if folds else []:
            if rig.rows[row].pending_len:
                ours, theirs = (
                    held.layers[layer].recurrent[rig.slot(row)] for held in (rig.storage, rig.exact_storage)
                )
                limit = AIM + (ROUNDOFF["bfloat16"] if rig.config.checkpoint_dtype == "bfloat16" else 0.0)
                assert row_error(ours, theirs) <= limit, f"state that row {row} folded"
                check_history(rig, layer, row)
    return outputs


def check_history(rig: Rig, layer: int, row: int) -> None:
    """A fold brought the conv history to the window's start, bit by bit."""
    ours, theirs = (held.layers[layer].conv for held in (rig.storage, rig.exact_storage))
    if ours is not None and theirs is not None:
        assert torch.equal(ours[rig.slot(row)].cpu(), theirs[rig.slot(row)])


@pytest.mark.parametrize("bound", GATES)
@pytest.mark.parametrize(("path", "shape"), SHAPES, ids=shape_id)
def test_shapes(path: str, shape: tuple[int, int, int], bound: float | None, device: str) -> None:
    policy = "ring" if bound is None else "deferred"
    config = small_config(
        path=path, **sizes(shape), gate_lower_bound=bound, fold_policy=policy, activation_dtype="bfloat16"
    )
    verify_and_check(Rig(config, ROWS[policy], device))


@pytest.mark.parametrize("policy", ROWS)
@pytest.mark.parametrize("checkpoint", ["float32", "bfloat16"])
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_dtypes(dtype: str, checkpoint: str, policy: str, path: str, device: str) -> None:
    names = {"checkpoint_dtype": checkpoint, "activation_dtype": dtype}
    config = small_config(path=path, fold_policy=policy, conv_kernel_size=4, num_layers=2, **names)
    verify_and_check(Rig(config, ROWS[policy], device))


@pytest.mark.parametrize("policy", ["ring", "deferred"])
@pytest.mark.parametrize("length", [1, 2, 5, pytest.param(11, marks=pytest.mark.gpu), 16])
def test_windows(length: int, policy: str, path: str, device: str) -> None:
    """T = 1 and R = 2 are sizes that a compiler may treat as constants."""
    config = small_config(path=path, max_query_len=length, fold_policy=policy, record_capacity=2 * length)
    rows = [Row(3, length if policy == "deferred" else 0, length), Row(1, length, (length + 1) // 2)]
    verify_and_check(Rig(config, rows, device))
    verify_and_check(Rig(config, rows[:1], device))


@pytest.mark.parametrize("capacity", [8, 23, 32])
def test_every_pending_count_wraps_around_the_ring(capacity: int, path: str, device: str) -> None:
    """m from 0 to R - T, beyond one tile of 16, at places that run over the ring's end; R no multiple of the tile."""
    config = small_config(path=path, max_query_len=2, record_capacity=capacity, head_k_dim=24)
    rows = [Row(checkpoint_len=5 * m + 1, pending_len=m, query_len=1 + m % 2) for m in range(capacity - 1)]
    assert any(row.checkpoint_len % capacity + row.pending_len > capacity for row in rows)
    verify_and_check(Rig(config, rows, device))


@pytest.mark.parametrize("position", [2**31 - 2**17, 2**24 + 1], ids=["just below 2^31", "beyond 2^24"])
def test_late_positions(position: int, path: str, device: str) -> None:
    config = small_config(path=path, conv_kernel_size=4, record_capacity=11)
    rig = Rig(config, [Row(position, 7, 4), Row(position + 3, 2, 3)], device)
    steps = rig.begin()
    assert steps[0].positions.tolist() == steps[1].positions.tolist()
    assert int(steps[0].positions[0]) == position + 7
    verify_and_check(rig)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("field", ["A_log", "dt_bias"])
def test_parameters_in_the_activation_dtype(field: str, dtype: str, path: str, device: str) -> None:
    config = small_config(path=path, num_heads=2, activation_dtype="bfloat16", fold_policy="deferred")
    params = [
        dataclasses.replace(layer, **{field: getattr(layer, field).to(DTYPES[dtype])})
        for layer in make_params(config, 3, device)
    ]
    rig = Rig(config, ROWS["deferred"], device, params=params)
    verify_and_check(rig)


def test_gate_and_beta_in_float32_are_rounded_like_the_activations(path: str, device: str) -> None:
    """The gate is rounded on entry, since a fold reads the rounded one; beta is used as it comes."""
    config = small_config(path=path, activation_dtype="bfloat16")
    outputs = []
    for wide in (False, True):
        rig = Rig(config, ROWS["ring"], device)
        steps = rig.begin()
        inputs = rig.inputs(steps[1].num_tokens)[0]
        if wide:
            gate = inputs.raw_gate.float() * (1 + 2.0**-11)
            assert torch.equal(gate.bfloat16(), inputs.raw_gate)
            inputs = LayerInputs(inputs.qkv, gate, inputs.raw_beta.float())
        outputs.append(rig.verify(steps, 0, inputs)[0])
    assert torch.equal(*outputs)
    assert not torch.equal(outputs[0], torch.zeros_like(outputs[0]))


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_output_in_the_activation_dtype_is_the_rounded_one(dtype: str, path: str, device: str) -> None:
    config = small_config(path=path, activation_dtype=dtype, head_v_dim=33)
    outputs = []
    for out_dtype in (torch.float32, DTYPES[dtype]):
        rig = Rig(config, ROWS["ring"], device)
        steps = rig.begin()
        out = torch.full((8, 1, config.layer.head_v_dim), torch.nan, dtype=out_dtype, device=device)
        outputs.append(rig.verify(steps, 0, rig.inputs(8)[0], out)[0])
    assert torch.equal(outputs[0].to(DTYPES[dtype]), outputs[1])


@pytest.mark.parametrize("bound", GATES)
@pytest.mark.parametrize("raw", [1e4, 3e38, -1e4], ids=["strongest", "largest", "weakest"])
def test_extreme_gates(raw: float, bound: float | None, path: str, device: str) -> None:
    """A full ring of the strongest gate, and a window of it, are finite and exact; so is no decay at all."""
    config = small_config(path=path, gate_lower_bound=bound, activation_dtype="bfloat16")
    rig = Rig(config, ROWS["ring"], device)
    for held in (rig.storage, rig.exact_storage):
        gate = held.layers[0].record_gate
        gate.copy_(torch.where(gate.isnan(), gate, raw))
    steps = rig.begin()
    inputs = rig.inputs(8)[0]
    inputs.raw_gate.fill_(raw)
    outputs = rig.verify(steps, 0, inputs)
    assert outputs[0].isfinite().all()
    check_verify(rig, outputs)


def test_zero_keys_and_queries(path: str, device: str) -> None:
    """|k| = 0: the norm's epsilon keeps everything finite, and nothing is added to the state or read from it."""
    config = small_config(path=path)
    rig = Rig(config, ROWS["ring"], device)
    steps = rig.begin()
    inputs = rig.inputs(8)[0]
    inputs.qkv[:, : 2 * config.layer.head_k_dim] = 0.0
    outputs = rig.verify(steps, 0, inputs)
    assert not outputs[0].any()
    torch.testing.assert_close(
        rig.records(0)[0]["record_inv_norm"], torch.full((1, 4), 1e3), rtol=4 * ROUNDOFF["float32"], atol=0.0
    )


@pytest.mark.parametrize("policy", ROWS)
def test_padding_dummies_and_poison(policy: str, path: str, device: str) -> None:
    """Rows that own nothing, padded rows and tokens read zero and write nothing; all unowned memory is NaN."""
    config = small_config(path=path, fold_policy=policy, conv_kernel_size=3, num_layers=2, num_heads=2)
    rows = [Row(query_len=3, kind="dummy"), *ROWS[policy], Row(query_len=1, kind="dummy")]
    got, _ = verify_and_check(Rig(config, rows, device), pad_rows=2, pad_tokens=5)
    assert len(got) == sum(row.query_len for row in rows) + 5


def test_padding_alone(path: str, device: str) -> None:
    """A batch in which no row owns anything, and one without tokens beyond padding."""
    config = small_config(path=path, conv_kernel_size=4)
    rig = Rig(config, [Row(query_len=2, kind="dummy")], device)
    verify_and_check(rig, pad_rows=1, pad_tokens=3)


@pytest.mark.parametrize("policy", ROWS)
def test_nan_stays_behind_its_token(policy: str, path: str, device: str) -> None:
    """NaN in a draft leaves earlier tokens of its window, and every other row, the same bits."""
    config = small_config(path=path, fold_policy=policy, conv_kernel_size=4)
    rows = ROWS[policy]
    outputs = []
    for poisoned in (False, True):
        rig = Rig(config, rows, device)
        steps = rig.begin()
        inputs = rig.inputs(sum(row.query_len for row in rows))[0]
        if poisoned:
            for tensor in (inputs.qkv, inputs.raw_gate, inputs.raw_beta):
                tensor[2:4] = torch.nan
        outputs.append(torch.full((len(inputs.qkv), 1, config.layer.head_v_dim), torch.nan, device=device))
        rig.kernels.verify(steps[0], 0, inputs.qkv, inputs.raw_gate, inputs.raw_beta, outputs[-1])
    clean, poisoned_out = (bytes_of(out.cpu()) for out in outputs)
    assert torch.equal(clean[:2], poisoned_out[:2])
    assert torch.equal(clean[4:], poisoned_out[4:])
    assert outputs[1][2:4].isnan().all()


def test_activations_are_what_the_config_says(path: str, device: str) -> None:
    """The harness compares what it means to compare: key, gate and conv inputs in the activation dtype."""
    rig = Rig(small_config(path=path, activation_dtype="float16"), ROWS["ring"], device)
    assert rig.storage.layers[0].record_key_gate.dtype is activation(rig.config) is torch.float16
    assert rig.exact_storage.layers[0].recurrent.dtype is torch.float64
    assert isinstance(rig.params[0], LayerParams)
