"""The model, its serial recurrence and its weights."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from model import Model, ModelConfig, load_model, save_model
from recurrence import SerialMixer

from .conftest import EXAMPLES

SMALL = ModelConfig(
    d_model=24, num_layers=2, num_heads=2, head_k_dim=8, head_v_dim=12, conv_kernel_size=4, gate_rank=4, mlp_hidden=16
)


def small_model(dtype: torch.dtype) -> Model:
    from train import initialise

    torch.manual_seed(0)
    model = Model(SMALL)
    initialise(model)
    for block in model.blocks:  # zero at the start of training, which would hide the mixer
        torch.nn.init.normal_(block.o_proj.weight, std=0.2)
        torch.nn.init.normal_(block.mlp_out.weight, std=0.2)
    return model.to(dtype).requires_grad_(False)


def test_serial_recurrence_equals_the_chunked_training_form() -> None:
    """Convolution, gate and chunked product of training, the latter two from fla-core, which is fp32 here."""
    kda = pytest.importorskip("fla.ops.kda.naive")
    gate = pytest.importorskip("fla.ops.kda.gate")
    from train import causal_conv

    model, batch, length = small_model(torch.float32), 3, 64
    tokens = torch.randint(0, 256, (batch * length,))

    def chunked(layer: int, qkv: torch.Tensor, raw_gate: torch.Tensor, raw_beta: torch.Tensor) -> torch.Tensor:
        block = model.blocks[layer]
        q, k, v = causal_conv(qkv.view(batch, length, -1), block.conv_weight, SMALL.num_heads, SMALL.head_k_dim)
        q, k = (x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6) for x in (q, k))
        g = gate.naive_kda_gate(raw_gate.view(q.shape), block.A_log, block.dt_bias.flatten())
        o, _ = kda.naive_chunk_kda(q, k, v, g, raw_beta.view(q.shape[:3]).sigmoid(), chunk_size=16)
        return o.flatten(0, 1)

    serial = model(tokens, SerialMixer(model.layer_params(), batch))
    assert (model(tokens, chunked) - serial).norm() < 1e-5 * serial.norm()


def test_serial_recurrence_may_stop_and_go_on() -> None:
    model, batch, length = small_model(torch.float64), 2, 13
    tokens = torch.randint(0, 256, (batch, length))
    whole, pieces = SerialMixer(model.layer_params(), batch), SerialMixer(model.layer_params(), batch)
    logits = model(tokens.flatten(), whole).view(batch, length, -1)
    parts = [model(part.flatten(), pieces).view(batch, part.shape[1], -1) for part in tokens.split([1, 2, 7, 3], 1)]
    torch.testing.assert_close(torch.cat(parts, 1), logits, rtol=1e-12, atol=1e-12)
    for one, other in zip(whole.recurrent + whole.conv, pieces.recurrent + pieces.conv, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


def test_outputs_depend_on_the_past_alone() -> None:
    model = small_model(torch.float64)
    tokens = torch.randint(0, 256, (12,))
    changed = tokens.clone()
    changed[8:] = (tokens[8:] + 1) % 256
    one, other = (model(t, SerialMixer(model.layer_params())) for t in (tokens, changed))
    torch.testing.assert_close(one[:8], other[:8], rtol=0, atol=0)
    assert not torch.equal(one[8], other[8])


def test_saved_model_loads_as_bf16_values(tmp_path: Path) -> None:
    model = small_model(torch.float32)
    save_model(model, tmp_path)
    loaded = load_model(tmp_path, torch.float64)
    assert loaded.config == SMALL
    for (name, mine), theirs in zip(model.named_parameters(), loaded.parameters(), strict=True):
        torch.testing.assert_close(theirs, mine.bfloat16().double(), rtol=0, atol=0, msg=name)


def test_missing_weights_are_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"model\.json"):
        load_model(tmp_path)


def test_shipped_weights(model: Any) -> None:
    weights = EXAMPLES / "weights" / "model.safetensors"
    assert weights.stat().st_size <= 8 * 2**20
    assert 2_000_000 <= model.num_parameters() <= 4_000_000
    assert model.config == ModelConfig()
    assert all(torch.isfinite(p).all() for p in model.parameters())


def test_held_out_loss(model: Any, prompts: list[bytes]) -> None:
    """On 8 held-out passages of 448 bytes, each from a zero state: 1.05 bits a byte as measured."""
    tokens = torch.tensor([list(prompt) for prompt in prompts[:8]])
    logits = model(tokens.flatten(), SerialMixer(model.layer_params(), len(tokens))).view(*tokens.shape, -1)
    loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten()) / math.log(2)
    assert loss < 1.2
