"""The parameters of a KDA layer that the state manager needs."""

from collections.abc import Sequence
from dataclasses import dataclass, fields

import torch

from specstate.config import StateConfig
from specstate.errors import SpecStateError
from specstate.validation import DTYPES, check_tensor, resolve_device, unique_dtypes


@dataclass(frozen=True, slots=True, eq=False)
class LayerParams:
    """Of one layer, on one rank. Tensors are used where they lie; nothing is copied."""

    A_log: torch.Tensor
    """[H], float32 or the activation dtype: log of the decay's rate."""
    dt_bias: torch.Tensor
    """[H, K], same choice: added to the raw gate."""
    conv_weight: torch.Tensor | None = None
    """[C, W], any float dtype; column W - 1 meets the newest input. None when the model convolves itself."""
    conv_bias: torch.Tensor | None = None
    """[C] or None, like conv_weight."""

    def to(self, device: torch.device | str) -> "LayerParams":
        """The same parameters on ``device``. Raises SpecStateError for a field that is no tensor, or no such device."""
        target = resolve_device(device)
        moved = {}
        for field in fields(self):
            tensor = getattr(self, field.name)
            if tensor is None and field.name.startswith("conv"):
                continue
            if not isinstance(tensor, torch.Tensor):
                raise SpecStateError(f"{field.name} must be a tensor, not {type(tensor).__name__}")
            if tensor.is_meta:
                raise SpecStateError(f"{field.name} is on device meta, which has no memory to copy from")
            moved[field.name] = tensor.to(target)
        return LayerParams(**moved)


def check_params(params: object, config: StateConfig, device: torch.device) -> tuple[LayerParams, ...]:
    """The detached parameters of all layers. Raises SpecStateError naming layer and field.

    Layers must agree in which fields they have and in dtype: kernels read all layers through one table.
    """
    if not isinstance(params, Sequence) or not all(isinstance(layer, LayerParams) for layer in params):
        raise SpecStateError("params must be a sequence of LayerParams, one per layer")
    if len(params) != config.num_layers:
        raise SpecStateError(f"params has {len(params)} layers, num_layers is {config.num_layers}")
    checked = tuple(_check_layer(index, layer, config, device) for index, layer in enumerate(params))
    for index, layer in enumerate(checked):
        for field in fields(LayerParams):
            mine, first = getattr(layer, field.name), getattr(checked[0], field.name)
            if _kind(mine) != _kind(first):
                raise SpecStateError(
                    f"params[{index}].{field.name} is {_kind(mine)}, params[0].{field.name} is {_kind(first)}: "
                    "layers must not differ"
                )
    return checked


def _kind(tensor: torch.Tensor | None) -> str:
    return "None" if tensor is None else str(tensor.dtype).removeprefix("torch.")


def _check_layer(index: int, layer: LayerParams, config: StateConfig, device: torch.device) -> LayerParams:
    spec = config.layer
    gate_dtypes = unique_dtypes(torch.float32, DTYPES[config.activation_dtype])
    conv_dtypes = unique_dtypes(*gate_dtypes, torch.bfloat16, torch.float16)
    channels, taps = spec.conv_channels, spec.conv_kernel_size
    where = f" (layer {index})"
    wanted: dict[str, tuple[tuple[int, ...], tuple[torch.dtype, ...]]] = {
        "A_log": ((spec.num_heads,), gate_dtypes),
        "dt_bias": ((spec.num_heads, spec.head_k_dim), gate_dtypes),
    }
    if taps is None:
        if layer.conv_weight is not None or layer.conv_bias is not None:
            raise SpecStateError(f"conv_weight and conv_bias must be None when conv_kernel_size is None{where}")
    else:
        wanted["conv_weight"] = ((channels, taps), conv_dtypes)
        if layer.conv_bias is not None:
            wanted["conv_bias"] = ((channels,), conv_dtypes)
    checked = {
        name: check_tensor(name, getattr(layer, name), shape, dtypes, device, where).detach()
        for name, (shape, dtypes) in wanted.items()
    }
    return LayerParams(**checked)
