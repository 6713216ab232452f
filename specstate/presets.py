"""Published models whose KDA layers specstate can hold, with the sources of their figures."""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from specstate.config import KDALayerSpec, StateConfig
from specstate.errors import SpecStateError, shown


@dataclass(frozen=True, slots=True)
class Preset:
    """The KDA layers of a whole model; ``layer`` and ``config`` give one tensor-parallel rank's share of them."""

    name: str
    num_layers: int
    """KDA layers only; the full-attention layers between them keep a KV cache elsewhere."""
    num_heads: int
    """Heads of the whole model, before they are split over ranks."""
    head_k_dim: int
    head_v_dim: int
    conv_kernel_size: int | None
    gate_lower_bound: float | None
    """None: softplus gate. Negative: bounded gate."""

    def layer(self, tp: int = 1) -> KDALayerSpec:
        """The layer as one of ``tp`` ranks sees it. Raises SpecStateError where ``tp`` does not divide the heads."""
        if type(self.num_heads) is not int:
            raise SpecStateError(f"num_heads = {shown(self.num_heads)} of {self.name} must be a whole number")
        if type(tp) is not int or tp < 1 or self.num_heads % tp:
            raise SpecStateError(
                f"tp = {shown(tp)} cannot split {self.name}: its {self.num_heads} heads must divide evenly over the "
                "ranks"
            )
        return KDALayerSpec(
            num_heads=self.num_heads // tp,
            head_k_dim=self.head_k_dim,
            head_v_dim=self.head_v_dim,
            conv_kernel_size=self.conv_kernel_size,
            gate_lower_bound=self.gate_lower_bound,
        )

    def config(self, tp: int = 1, *, max_query_len: int, max_requests: int, **options: Any) -> StateConfig:
        """A ``StateConfig`` of one rank; ``options`` are its other fields (``fold_policy``, ``checkpoint_dtype``...).

        Raises SpecStateError for a ``tp`` that does not divide the heads, pydantic's ValidationError for the rest.
        """
        return StateConfig(
            num_layers=self.num_layers,
            layer=self.layer(tp),
            max_query_len=max_query_len,
            max_requests=max_requests,
            **options,
        )


KIMI_LINEAR_48B = Preset(
    name="kimi-linear-48b",
    num_layers=20,
    num_heads=32,
    head_k_dim=128,
    head_v_dim=128,
    conv_kernel_size=4,
    gate_lower_bound=None,
)
"""Kimi Linear 48B-A3B.

Source: ``linear_attn_config`` of ``config.json`` of moonshotai/Kimi-Linear-48B-A3B-Instruct: 20 entries in
``kda_layers``, ``num_heads`` 32, ``head_dim`` 128, ``short_conv_kernel_size`` 4. It names no gate bound; the gate is
the softplus gate of the technical report, arXiv 2510.26692.
"""

KIMI_K3 = Preset(
    name="kimi-k3",
    num_layers=69,
    num_heads=96,
    head_k_dim=128,
    head_v_dim=128,
    conv_kernel_size=4,
    gate_lower_bound=-5.0,
)
"""Kimi K3.

Source: ``text_config.linear_attn_config`` of ``config.json`` of moonshotai/Kimi-K3, as quoted by public ports of the
model: 69 KDA beside 24 full-attention layers (inference-sim/inference-sim issue 1638, tenstorrent/tt-metal pull
request 53979); 96 heads, head dimension 128, convolution 4 and ``gate_lower_bound`` -5.0 (tt-metal, the test of its
reference KDA config).
"""

PRESETS: Mapping[str, Preset] = MappingProxyType({preset.name: preset for preset in (KIMI_LINEAR_48B, KIMI_K3)})


def find_preset(name: str) -> Preset:
    """The preset called ``name``. Raises SpecStateError that lists the names there are."""
    if type(name) is not str or name not in PRESETS:
        raise SpecStateError(f"preset = {shown(name)} is unknown: choose from {', '.join(sorted(PRESETS))}")
    return PRESETS[name]
