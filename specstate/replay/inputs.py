"""The payload that a trace leaves out: inputs of tokens and parameters of layers, as pure functions of a few integers.

Built from a 32-bit integer hash in exact int64 arithmetic, scaled by products and sums in float64, so that every
machine gets the same bits: no random stream, no transcendental function. What decides each value:

- an input: (seed, request_id, generation, position, attempt, layer, channel). The generation is that of the request's
  life, so that an id that is admitted again brings other tokens, and leftovers of its former life show. ``attempt``
  counts the earlier windows in which this life verified this position: 0 at first, 1 after one rejection or cancel.
- a parameter: (seed, version, layer, field, index); ``version`` counts the set_params events before.
"""

import hashlib
import json
from collections.abc import Sequence
from typing import NamedTuple

import torch

from specstate.config import KDALayerSpec, StateConfig
from specstate.metadata import Handle
from specstate.params import LayerParams
from specstate.validation import DTYPES

_WORD = 0xFFFFFFFF
#: Multipliers of the 32-bit finaliser "lowbias32" (C. Wellons, hash-prospector), as signed 32-bit numbers: a product
#: with 32 bits then fits into int64.
_MULTIPLIERS = (0x7FEB352D, 0x846CA68B - 2**32)


class TokenInputs(NamedTuple):
    """Of n tokens in one layer, float64; qkv and raw_gate have been rounded to the activation dtype."""

    qkv: torch.Tensor  # [n, C]
    raw_gate: torch.Tensor  # [n, H, K]
    raw_beta: torch.Tensor  # [n, H]


def life_key(seed: int, handle: Handle) -> int:
    """32 bits that stand for one life of a request."""
    return _key("life", seed, handle.request_id, handle.generation)


def token_inputs(
    config: StateConfig, keys: Sequence[int], positions: Sequence[int], attempts: Sequence[int], layer: int
) -> TokenInputs:
    """Inputs of the tokens (keys[i], positions[i], attempts[i]), where keys are those of ``life_key``.

    Uniform: qkv and raw_gate within [-2, 2), raw_beta within [-2, 2). All are rounded to the activation dtype.
    """
    spec = config.layer
    heads, k_dim, channels = spec.num_heads, spec.head_k_dim, spec.conv_channels
    token = torch.zeros(len(keys), dtype=torch.int64)
    for word in (keys, positions, attempts):
        token = _mixed(token ^ torch.tensor(word, dtype=torch.int64))
    token = _mixed(token ^ layer)
    width = channels + heads * k_dim + heads
    values = 2.0 * _uniform(_mixed(token[:, None] ^ torch.arange(width)))
    values = values.to(DTYPES[config.activation_dtype]).double()
    qkv, gate, beta = values.split([channels, heads * k_dim, heads], 1)
    return TokenInputs(qkv, gate.unflatten(1, (heads, k_dim)), beta)


def layer_params(config: StateConfig, seed: int, version: int) -> tuple[LayerParams, ...]:
    """Parameters of all layers: rates exp(A_log) in 1..2.7, dt_bias in -5..-1, so that memory is long in some channels.

    The convolution has a bias. float32, or float64 with a float64 activation dtype.
    """
    dtype = torch.float64 if config.activation_dtype == "float64" else torch.float32
    return tuple(
        _one_layer(config.layer, _key("params", seed, version, layer), dtype) for layer in range(config.num_layers)
    )


def _one_layer(spec: KDALayerSpec, key: int, dtype: torch.dtype) -> LayerParams:
    def field(number: int, *shape: int) -> torch.Tensor:
        count = torch.Size(shape).numel()
        start = _mixed(torch.tensor(key ^ number))
        return _uniform(_mixed(start ^ torch.arange(count))).view(shape)

    weight = bias = None
    if spec.conv_kernel_size is not None:
        weight = field(2, spec.conv_channels, spec.conv_kernel_size).to(dtype)
        bias = (0.5 * field(3, spec.conv_channels)).to(dtype)
    return LayerParams(
        A_log=(0.5 + 0.5 * field(0, spec.num_heads)).to(dtype),
        dt_bias=(-3.0 + 2.0 * field(1, spec.num_heads, spec.head_k_dim)).to(dtype),
        conv_weight=weight,
        conv_bias=bias,
    )


def _key(*words: str | int) -> int:
    return int.from_bytes(hashlib.sha256(json.dumps(words).encode()).digest()[:4], "big")


def _mixed(words: torch.Tensor) -> torch.Tensor:
    """A bijection of 32-bit words (in int64) that lets every bit depend on every other."""
    first, second = _MULTIPLIERS
    words = ((words ^ (words >> 16)) * first) & _WORD
    words = ((words ^ (words >> 15)) * second) & _WORD
    return words ^ (words >> 16)


def _uniform(words: torch.Tensor) -> torch.Tensor:
    """[-1, 1) in steps of 2^-23: exact in float32 and wider."""
    return (words >> 8).double() * 2.0**-23 - 1.0
