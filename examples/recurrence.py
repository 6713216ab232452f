"""KDA in its plainest form: one token after another, every state in full.

Nothing here is fast. It is the yardstick: training compares its chunked kernel with it, the tests decode with it and
compare states with it, and it shares no code with the library.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

QK_NORM_EPS = 1e-6


class SerialMixer:
    """A token mixer that continues `num_sequences` equally long sequences from zero states.

    A call takes the flat tokens of all sequences, [num_sequences x length], one sequence after another, and moves the
    states on by `length` tokens. `recurrent` holds one [B, H, V, K] and `conv` one [B, C, W-1] (oldest input first) a
    layer, both of the parameters' dtype.
    """

    def __init__(self, params: Sequence[tuple[Tensor, Tensor, Tensor, Tensor | None]], num_sequences: int = 1) -> None:
        self.params = params
        self.num_sequences = num_sequences
        self.recurrent: list[Tensor] = []
        self.conv: list[Tensor] = []
        for _, dt_bias, conv_weight, _ in params:
            heads, head_k_dim = dt_bias.shape
            channels, kernel = conv_weight.shape
            head_v_dim = channels // heads - 2 * head_k_dim
            self.recurrent.append(dt_bias.new_zeros(num_sequences, heads, head_v_dim, head_k_dim))
            self.conv.append(dt_bias.new_zeros(num_sequences, channels, kernel - 1))

    def __call__(self, layer: int, qkv: Tensor, raw_gate: Tensor, raw_beta: Tensor) -> Tensor:
        """Outputs [tokens, H, V] of qkv [tokens, C], raw_gate [tokens, H, K] and raw_beta [tokens, H]."""
        A_log, dt_bias, conv_weight, conv_bias = self.params[layer]
        batch, (heads, head_k_dim) = self.num_sequences, dt_bias.shape
        inputs = qkv.to(A_log.dtype).view(batch, -1, qkv.shape[-1])
        length, width = inputs.shape[1], conv_weight.shape[1]

        history = torch.cat([self.conv[layer], inputs.transpose(1, 2)], dim=2)  # [B, C, W-1 + length]
        self.conv[layer] = history[..., length:]
        mixed = F.silu(
            sum(history[..., i : i + length] * conv_weight[:, i, None] for i in range(width))
            + (0.0 if conv_bias is None else conv_bias[:, None])
        )
        keys = heads * head_k_dim
        q, k, v = mixed.transpose(1, 2).split([keys, keys, mixed.shape[1] - 2 * keys], dim=-1)
        q, k, v = (x.unflatten(-1, (heads, -1)) for x in (q, k, v))  # [B, length, H, K or V]
        q = q / torch.sqrt(q.square().sum(-1, keepdim=True) + QK_NORM_EPS) * head_k_dim**-0.5
        k = k / torch.sqrt(k.square().sum(-1, keepdim=True) + QK_NORM_EPS)
        raw_gate = raw_gate.to(A_log.dtype).view(batch, length, heads, head_k_dim)
        decay = torch.exp(-torch.exp(A_log)[:, None] * F.softplus(raw_gate + dt_bias))
        beta = torch.sigmoid(raw_beta.to(A_log.dtype)).view(batch, length, heads, 1)

        state, outputs = self.recurrent[layer], []
        for t in range(length):
            state = state * decay[:, t, :, None, :]
            u = beta[:, t] * (v[:, t] - (state @ k[:, t, :, :, None])[..., 0])
            state = state + u[..., :, None] * k[:, t, :, None, :]
            outputs.append((state @ q[:, t, :, :, None])[..., 0])
        self.recurrent[layer] = state
        return torch.stack(outputs, dim=1).flatten(0, 1)
