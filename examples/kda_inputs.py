"""Random KDA layers, and their tokens in the form that fla-core's kernels take: for `own_verify.py` and `prefill.py`.

A model would feed a layer's output to the next layer; here every layer is fed random numbers, which is as good for
comparing two ways to the same state.
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from specstate import KDALayerSpec, LayerParams

SPEC = KDALayerSpec(num_heads=2, head_k_dim=64, head_v_dim=64, conv_kernel_size=4)
NORM_EPS = 1e-6


class Tokens(NamedTuple):
    """Some tokens' inputs to one layer, all in the activation dtype."""

    qkv: Tensor  # [tokens, C], before the convolution
    raw_gate: Tensor  # [tokens, H, K]
    raw_beta: Tensor  # [tokens, H]

    def part(self, start: int, end: int) -> Tokens:
        """Tokens start .. end."""
        return Tokens(*(x[start:end] for x in self))


def random_params(num_layers: int, device: torch.device, seed: int = 0) -> list[LayerParams]:
    """Layers of `SPEC` that remember some tens of tokens; all float32."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int, scale: float, mean: float = 0.0) -> Tensor:
        return (torch.randn(shape, generator=generator) * scale + mean).to(device)

    heads, channels = SPEC.num_heads, SPEC.conv_channels
    return [
        LayerParams(
            A_log=normal(heads, scale=0.3),
            dt_bias=normal(heads, SPEC.head_k_dim, scale=1.0, mean=-3.0),
            conv_weight=normal(channels, SPEC.conv_kernel_size, scale=0.5),
            conv_bias=normal(channels, scale=0.1),
        )
        for _ in range(num_layers)
    ]


def random_tokens(num_layers: int, length: int, device: torch.device, dtype: torch.dtype, seed: int) -> list[Tokens]:
    """`length` tokens for every layer."""
    generator = torch.Generator().manual_seed(seed)
    heads, k_dim = SPEC.num_heads, SPEC.head_k_dim
    shapes = (length, SPEC.conv_channels), (length, heads, k_dim), (length, heads)
    return [
        Tokens(*(torch.randn(shape, generator=generator).to(device, dtype) for shape in shapes))
        for _ in range(num_layers)
    ]


def convolve(inputs: Tensor, params: LayerParams) -> tuple[Tensor, Tensor, Tensor]:
    """Convolution and SiLU of inputs [.., W-1 + T, C], history first: q, k [.., T, H, K] and v [.., T, H, V].

    Computed in float32 and rounded to the inputs' dtype, as the manager's own verify does.
    """
    taps = params.conv_weight.shape[1]
    length = inputs.shape[-2] - (taps - 1)
    mixed = params.conv_bias.float()
    for tap in range(taps):
        mixed = mixed + inputs[..., tap : tap + length, :].float() * params.conv_weight[:, tap].float()
    mixed = F.silu(mixed).to(inputs.dtype)
    keys = SPEC.num_heads * SPEC.head_k_dim
    q, k, v = mixed.split([keys, keys, mixed.shape[-1] - 2 * keys], dim=-1)
    return tuple(x.unflatten(-1, (SPEC.num_heads, -1)) for x in (q, k, v))


def fla_inputs(
    q: Tensor, k: Tensor, v: Tensor, raw_gate: Tensor, raw_beta: Tensor, params: LayerParams
) -> dict[str, Tensor]:
    """What fla-core calls q, k, v, g and beta, all float32: unit q and k, log decay, sigmoided beta.

    fla-core scales q by K^-1/2 itself. Its GPU kernels can also take raw values and do all this inside
    (`use_qk_l2norm_in_kernel`, `use_gate_in_kernel`, `use_beta_sigmoid_in_kernel`); its plain torch ones cannot.
    """
    q, k, v, raw_gate, raw_beta = (x.float() for x in (q, k, v, raw_gate, raw_beta))
    q, k = (x * torch.rsqrt(x.square().sum(-1, keepdim=True) + NORM_EPS) for x in (q, k))
    g = -params.A_log.exp()[:, None] * F.softplus(raw_gate + params.dt_bias)
    return {"q": q, "k": k, "v": v, "g": g, "beta": raw_beta.sigmoid()}


def difference(got: Tensor, want: Tensor) -> float:
    """|got - want| / |want|, over the whole tensor."""
    got, want = got.double(), want.double()
    return float((got - want).norm() / want.norm())


def largest(differences: dict[str, list[float]]) -> dict[str, float]:
    """The largest of each; NaN where there is one."""
    return {what: float(torch.tensor(values, dtype=torch.float64).max()) for what, values in differences.items()}


def run_script(name: str, description: str, argv: Sequence[str] | None) -> torch.device | None:
    """Reads `--device`; None, after one line on stderr, without fla-core."""
    parser = argparse.ArgumentParser(prog=name, description=description)
    default = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", choices=("cuda", "cpu"), default=default, help="default: a GPU if there is one")
    device = parser.parse_args(argv).device
    if device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: no GPU is available")
    if importlib.util.find_spec("fla") is None:
        print(f"{name}: needs fla-core: python -m pip install 'fla-core>=0.6' einops", file=sys.stderr)
        return None
    return torch.device(device)


def report(differences: dict[str, float], bound: float) -> int:
    """Prints each difference beside `bound`; the exit code: 1 where one exceeds it or is NaN."""
    for what, value in differences.items():
        print(f"{what}: differ by {value:.1e} of their norm at most (bound {bound:.0e})")
    return 0 if all(value <= bound for value in differences.values()) else 1
