"""The recurrence, one token at a time in float64, with no rings, records or slots: what every backend must agree with.

Written apart from the kernels on purpose: it shares no function with them, so an error in one does not hide in both.
"""

from typing import NamedTuple

import torch

from specstate.config import StateConfig
from specstate.params import LayerParams
from specstate.validation import DTYPES


class OracleState(NamedTuple):
    """One request in one layer after some tokens. Never changed in place."""

    recurrent: torch.Tensor  # [H, V, K] float64
    conv: torch.Tensor  # [C, W-1] float64, oldest input first; [C, 0] without a conv


class OracleToken(NamedTuple):
    """What one token gives."""

    state: OracleState
    output: torch.Tensor  # [H, V] float64
    u: torch.Tensor  # [H, V] float64, the correction
    key: torch.Tensor  # [H, K] float64, after conv and SiLU, rounded to the activation dtype, not normalised


class Oracle:
    """Token-serial KDA for one rank's heads: the recurrence of the Kimi Linear report, arXiv 2510.26692.

    The bounded gate, which that report does not have, is Kimi K3's: ``gate_lower_bound * sigmoid(exp(A_log) x)``.
    """

    def __init__(self, config: StateConfig, params: tuple[LayerParams, ...]) -> None:
        self.spec = config.layer
        self.activation = DTYPES[config.activation_dtype]
        self._params = [
            (
                layer.A_log.cpu().double(),
                layer.dt_bias.cpu().double(),
                None if layer.conv_weight is None else layer.conv_weight.cpu().double(),
                None if layer.conv_bias is None else layer.conv_bias.cpu().double(),
            )
            for layer in params
        ]

    def zero(self) -> OracleState:
        """The state of a request without tokens."""
        spec = self.spec
        recurrent = torch.zeros(spec.num_heads, spec.head_v_dim, spec.head_k_dim, dtype=torch.float64)
        return OracleState(recurrent, torch.zeros(spec.conv_channels, spec.conv_history_len, dtype=torch.float64))

    def token(
        self, layer: int, state: OracleState, qkv: torch.Tensor, raw_gate: torch.Tensor, raw_beta: torch.Tensor
    ) -> OracleToken:
        """Feeds one token: qkv [C], raw_gate [H, K], raw_beta [H], as verify takes them."""
        a_log, dt_bias, weight, bias = self._params[layer]
        heads, k_dim, v_dim = self.spec.num_heads, self.spec.head_k_dim, self.spec.head_v_dim
        mixed, conv = qkv.cpu().double(), state.conv
        if weight is not None:
            taps = torch.cat([conv, mixed[:, None]], 1)
            mixed = (taps * weight).sum(1) + (0.0 if bias is None else bias)
            mixed = self._rounded(mixed / (1.0 + (-mixed).exp()))
            conv = taps[:, 1:]
        query = mixed[: heads * k_dim].view(heads, k_dim)
        key = mixed[heads * k_dim : 2 * heads * k_dim].view(heads, k_dim)
        value = mixed[2 * heads * k_dim :].view(heads, v_dim)

        unit_query = query / (query.pow(2).sum(1, keepdim=True) + 1e-6).sqrt() / k_dim**0.5
        unit_key = key / (key.pow(2).sum(1, keepdim=True) + 1e-6).sqrt()
        x = self._rounded(raw_gate.cpu().double()) + dt_bias
        rate = a_log.exp()[:, None]
        bound = self.spec.gate_lower_bound
        # log1p(e^x), written so that a large x does not overflow.
        softplus = x.clamp(min=0.0) + torch.log1p((-x.abs()).exp())
        gate = -rate * softplus if bound is None else bound / (1.0 + (-rate * x).exp())

        decayed = state.recurrent * gate.exp()[:, None, :]
        strength = 1.0 / (1.0 + (-raw_beta.cpu().double()).exp())
        u = strength[:, None] * (value - torch.einsum("hvk,hk->hv", decayed, unit_key))
        recurrent = decayed + torch.einsum("hv,hk->hvk", u, unit_key)
        output = torch.einsum("hvk,hk->hv", recurrent, unit_query)
        return OracleToken(OracleState(recurrent, conv), output, u, key)

    def _rounded(self, x: torch.Tensor) -> torch.Tensor:
        return x.to(self.activation).double()
