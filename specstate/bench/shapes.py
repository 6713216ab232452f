"""The shapes that ``specstate bench gpu`` times, by name."""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from specstate.config import ActivationDtype, CheckpointDtype, FoldPolicy, KDALayerSpec, StateConfig
from specstate.errors import SpecStateError, shown
from specstate.layout import DTYPE_BYTES
from specstate.presets import KIMI_K3, KIMI_LINEAR_48B


@dataclass(frozen=True, slots=True)
class BenchShape:
    """One rank's KDA layers and a batch of full windows. ``num_layers`` is what fits, at most the model's."""

    name: str
    spec: KDALayerSpec
    num_layers: int
    rows: int
    max_query_len: int
    checkpoint_dtype: CheckpointDtype = "float32"
    activation_dtype: ActivationDtype = "bfloat16"

    @property
    def tokens(self) -> int:
        """B T: every row has a full window."""
        return self.rows * self.max_query_len

    @property
    def state_bytes(self) -> int:
        """One recurrent state of one layer: H V K values."""
        spec = self.spec
        return spec.num_heads * spec.head_v_dim * spec.head_k_dim * DTYPE_BYTES[self.checkpoint_dtype]

    def config(self, policy: FoldPolicy, conv: bool = True, sets: int = 1) -> StateConfig:
        """With the policy's default record capacity: T, 2 T, 4 T. ``sets`` of requests take turns."""
        spec = self.spec if conv else self.spec.model_copy(update={"conv_kernel_size": None})
        return StateConfig(
            num_layers=self.num_layers,
            layer=spec,
            max_requests=self.rows * sets,
            max_query_len=self.max_query_len,
            fold_policy=policy,
            checkpoint_dtype=self.checkpoint_dtype,
            activation_dtype=self.activation_dtype,
        )


def _all() -> dict[str, BenchShape]:
    k3, linear = KIMI_K3.layer(tp=8), KIMI_LINEAR_48B.layer(tp=1)
    sizes = [(f"k3-{rows}", k3, KIMI_K3.num_layers, rows, 8) for rows in (1, 8, 32, 128, 256)]
    sizes += [(f"k3-32-t{window}", k3, KIMI_K3.num_layers, 32, window) for window in (4, 2)]
    sizes += [(f"kimi-linear-{rows}", linear, KIMI_LINEAR_48B.num_layers, rows, 4) for rows in (1, 32, 128)]
    shapes = {}
    dtypes: tuple[tuple[str, CheckpointDtype], ...] = (("", "float32"), ("-bf16", "bfloat16"))
    for suffix, dtype in dtypes:
        for name, spec, num_layers, rows, window in sizes:
            shapes[name + suffix] = BenchShape(name + suffix, spec, num_layers, rows, window, dtype)
    return shapes


SHAPES: Mapping[str, BenchShape] = MappingProxyType(_all())
"""Kimi K3 on one of eight ranks at T = 8 (-t4, -t2: shorter windows), Kimi Linear on one rank at T = 4; the number is
rows. float32 checkpoints; -bf16: bfloat16 ones. Activations are bfloat16."""


def find_shape(name: str) -> BenchShape:
    """The shape called ``name``. Raises SpecStateError that lists the names there are."""
    if type(name) is not str or name not in SHAPES:
        raise SpecStateError(f"shape {shown(name)} is unknown: choose from {', '.join(SHAPES)}")
    return SHAPES[name]
