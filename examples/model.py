"""A byte-level language model made of KDA layers, small enough to decode on a CPU.

The token mixer is not part of the model. `Model.forward(tokens, mix)` hands each layer's projections to the callable
`mix(layer, qkv, raw_gate, raw_beta)`, so one model serves training (`train.py` passes convolution + a chunked kernel),
decoding (`decode.py` passes `step.verify`) and checking (`recurrence.py` passes a plain loop over tokens).
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

Mixer = Callable[[int, Tensor, Tensor, Tensor], Tensor]
NORM_EPS = 1e-6


@dataclass(frozen=True)
class ModelConfig:
    """Sizes of the model; the defaults are those of the shipped weights (3.9 million parameters)."""

    vocab_size: int = 256
    d_model: int = 256
    num_layers: int = 5
    num_heads: int = 4
    head_k_dim: int = 64
    head_v_dim: int = 64
    conv_kernel_size: int = 4
    gate_rank: int = 64
    mlp_hidden: int = 576

    @property
    def conv_channels(self) -> int:
        """Channels C = H (2 K + V) of the packed projection [q | k | v]."""
        return self.num_heads * (2 * self.head_k_dim + self.head_v_dim)


class Block(nn.Module):
    """One layer: KDA with a gated output, then a SwiGLU MLP, each behind an RMSNorm.

    `project` and `finish` stand on either side of the mixer, which is the only part that mixes tokens.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        d, heads = config.d_model, config.num_heads
        keys, values = heads * config.head_k_dim, heads * config.head_v_dim
        self.mixer_norm = nn.Parameter(torch.ones(d))
        self.qkv_proj = nn.Linear(d, config.conv_channels, bias=False)
        self.gate_down = nn.Linear(d, config.gate_rank, bias=False)
        self.gate_up = nn.Linear(config.gate_rank, keys, bias=False)
        self.beta_proj = nn.Linear(d, heads, bias=False)
        self.output_gate_down = nn.Linear(d, config.gate_rank, bias=False)
        self.output_gate_up = nn.Linear(config.gate_rank, values, bias=False)
        self.output_norm = nn.Parameter(torch.ones(config.head_v_dim))
        self.o_proj = nn.Linear(values, d, bias=False)
        # The mixer's own parameters: the model only stores them, whoever mixes reads them.
        self.conv_weight = nn.Parameter(torch.empty(config.conv_channels, config.conv_kernel_size))
        self.A_log = nn.Parameter(torch.empty(heads))
        self.dt_bias = nn.Parameter(torch.empty(heads, config.head_k_dim))
        self.mlp_norm = nn.Parameter(torch.ones(d))
        self.mlp_in = nn.Linear(d, 2 * config.mlp_hidden, bias=False)
        self.mlp_out = nn.Linear(config.mlp_hidden, d, bias=False)

    def project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """From the residual stream [tokens, d_model] to qkv [tokens, C], raw gate [tokens, H, K], raw beta [tokens, H]
        and the raw output gate [tokens, H, V]."""
        config = self.config
        h = F.rms_norm(x, (config.d_model,), self.mixer_norm, NORM_EPS)
        raw_gate = self.gate_up(self.gate_down(h)).view(-1, config.num_heads, config.head_k_dim)
        output_gate = self.output_gate_up(self.output_gate_down(h)).view(-1, config.num_heads, config.head_v_dim)
        return self.qkv_proj(h), raw_gate, self.beta_proj(h), output_gate

    def finish(self, x: Tensor, o: Tensor, output_gate: Tensor) -> Tensor:
        """Adds the mixed values o [tokens, H, V] and the MLP to the residual stream x [tokens, d_model]."""
        o = F.rms_norm(o.to(x.dtype), (self.config.head_v_dim,), self.output_norm, NORM_EPS)
        x = x + self.o_proj((o * torch.sigmoid(output_gate)).flatten(1))
        up, gate = self.mlp_in(F.rms_norm(x, (self.config.d_model,), self.mlp_norm, NORM_EPS)).chunk(2, dim=-1)
        return x + self.mlp_out(up * F.silu(gate))


class Model(nn.Module):
    """Byte-level KDA language model with tied embeddings; the token mixer is an argument of `forward`."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.embedding = nn.Parameter(torch.empty(config.vocab_size, config.d_model))
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.num_layers))
        self.final_norm = nn.Parameter(torch.ones(config.d_model))

    def forward(self, tokens: Tensor, mix: Mixer) -> Tensor:
        """Next-byte logits [tokens, vocab] of flat tokens [tokens] int64; sequences lie one after another.

        `mix(layer, qkv [tokens, C], raw_gate [tokens, H, K], raw_beta [tokens, H]) -> o [tokens, H, V]` knows where
        each sequence begins and which state it continues.
        """
        x = F.rms_norm(self.embedding[tokens], (self.config.d_model,), eps=NORM_EPS)
        for layer, block in enumerate(self.blocks):
            qkv, raw_gate, raw_beta, output_gate = block.project(x)
            x = block.finish(x, mix(layer, qkv, raw_gate, raw_beta), output_gate)
        return F.linear(F.rms_norm(x, (self.config.d_model,), self.final_norm, NORM_EPS), self.embedding)

    def layer_params(self) -> list[tuple[Tensor, Tensor, Tensor, None]]:
        """A_log [H], dt_bias [H, K], conv_weight [C, W] and conv_bias (None) of each layer, for `LayerParams`."""
        return [(b.A_log.detach(), b.dt_bias.detach(), b.conv_weight.detach(), None) for b in self.blocks]

    def num_parameters(self) -> int:
        """Number of scalars in all parameters, the tied embedding counted once."""
        return sum(p.numel() for p in self.parameters())


def save_model(model: Model, directory: Path) -> None:
    """Writes `model.safetensors` (bf16) and `model.json` (the sizes) into `directory`."""
    directory.mkdir(parents=True, exist_ok=True)
    tensors = {name: p.detach().to("cpu", torch.bfloat16).contiguous() for name, p in model.state_dict().items()}
    save_file(tensors, str(directory / "model.safetensors"))
    (directory / "model.json").write_text(json.dumps(asdict(model.config), indent=2) + "\n")


def load_model(directory: Path | str, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu") -> Model:
    """Reads the model that `save_model` wrote; parameters are bf16 values held in `dtype`.

    Raises FileNotFoundError when `model.json` or `model.safetensors` is missing, ValueError when they are no model.
    """
    directory = Path(directory)
    try:
        config = ModelConfig(**json.loads((directory / "model.json").read_text()))
        with torch.device("meta"):
            model = Model(config)
        tensors = load_file(str(directory / "model.safetensors"))
        model.load_state_dict({name: t.to(device, dtype) for name, t in tensors.items()}, assign=True)
    except (SafetensorError, RuntimeError, TypeError) as error:  # a damaged file, or sizes that are another model's
        raise ValueError(f"{directory} holds no model of this program: {str(error).splitlines()[0]}") from error
    return model.requires_grad_(False).eval()
