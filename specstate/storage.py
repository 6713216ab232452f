"""The tensors behind the slots: allocated here from the layout table, or, for checkpoints, handed in by the caller."""

from collections.abc import Sequence
from typing import NamedTuple

import torch

from specstate.config import StateConfig
from specstate.errors import SpecStateError
from specstate.layout import TensorLayout, tensor_layouts
from specstate.validation import DTYPES, check_tensor, check_writable


class LayerStorage(NamedTuple):
    """One layer's views. Conv entries are None when the model convolves itself."""

    recurrent: torch.Tensor  # [slots, H, V, K] checkpoint dtype
    conv: torch.Tensor | None  # [slots, C, W-1] activation dtype, oldest input first
    conv_ring: torch.Tensor | None  # [record rows, W-1+T, C] activation dtype
    record_u: torch.Tensor  # [record rows, H, R, V] float32, or float64 with float64 checkpoints
    record_key_gate: torch.Tensor  # [record rows, H, R, 2, K] activation dtype: see record_key and record_gate
    record_inv_norm: torch.Tensor  # [record rows, H, R] float32, 1/|k|

    @property
    def record_key(self) -> torch.Tensor:
        """[record rows, H, R, K], after conv and SiLU, not normalised."""
        return self.record_key_gate[:, :, :, 0]

    @property
    def record_gate(self) -> torch.Tensor:
        """[record rows, H, R, K], raw."""
        return self.record_key_gate[:, :, :, 1]


class Storage:
    """All payload tensors and cursors of a manager.

    ``caller`` is a sequence of (recurrent [slots, H, V, K], conv [slots, C, W-1] or None) views, one a layer, with any
    strides; slot 0 of it is the null slot. Raises SpecStateError when a view has the wrong shape, dtype or device, or
    when layers differ in layout.
    """

    def __init__(self, config: StateConfig, device: torch.device, caller: object = None) -> None:
        layouts = {layout.name: layout for layout in tensor_layouts(config)}
        views = None if caller is None else _check_views(caller, config, layouts, device)
        if views is not None:
            layouts = {name: layout for name, layout in layouts.items() if layout.scope != "checkpoint slot"}
        # Ordinary tensors, also when the manager is built in inference mode: they are written to outside of it as well.
        with torch.inference_mode(False):
            own = {
                name: torch.zeros(layout.shape, dtype=DTYPES[layout.dtype], device=device)
                for name, layout in layouts.items()
            }
        self.owns_checkpoints = views is None
        self.allocated_bytes = sum(tensor.untyped_storage().nbytes() for tensor in own.values())
        self.cursors = own["cursors"]
        self.end_tokens = own["end_tokens"].fill_(-1)
        self.counters = own["counters"]
        ring = own.get("conv_ring")
        if views is None:
            conv = own.get("conv")
            views = [(own["recurrent"][i], None if conv is None else conv[i]) for i in range(config.num_layers)]
        self.layers = tuple(
            LayerStorage(
                recurrent=recurrent,
                conv=conv,
                conv_ring=None if ring is None else ring[i],
                record_u=own["record_u"][i],
                record_key_gate=own["record_key_gate"][i],
                record_inv_norm=own["record_inv_norm"][i],
            )
            for i, (recurrent, conv) in enumerate(views)
        )


def _check_views(
    caller: object, config: StateConfig, layouts: dict[str, TensorLayout], device: torch.device
) -> list[tuple[torch.Tensor, torch.Tensor | None]]:
    if not isinstance(caller, Sequence) or len(caller) != config.num_layers:
        raise SpecStateError(
            f"storage must be a sequence of {config.num_layers} (recurrent, conv) pairs, one per layer"
        )
    views: list[tuple[torch.Tensor, torch.Tensor | None]] = []
    for index, pair in enumerate(caller):
        if not isinstance(pair, Sequence) or len(pair) != 2:
            raise SpecStateError(f"storage[{index}] must be a (recurrent, conv) pair")
        checked: list[torch.Tensor | None] = []
        for name, view in zip(("recurrent", "conv"), pair, strict=True):
            layout = layouts.get(name)
            if layout is None:
                if view is not None:
                    raise SpecStateError(f"storage[{index}].{name} must be None when conv_kernel_size is None")
                checked.append(None)
                continue
            field = f"storage[{index}].{name}"
            tensor = check_tensor(field, view, layout.shape[1:], [DTYPES[layout.dtype]], device)
            checked.append(check_writable(field, tensor))
        recurrent, conv = checked
        assert recurrent is not None
        views.append((recurrent.detach(), None if conv is None else conv.detach()))
    for index, view_pair in enumerate(views):
        for name, view, first in zip(("recurrent", "conv"), view_pair, views[0], strict=True):
            if view is not None and first is not None and view.stride() != first.stride():
                raise SpecStateError(
                    f"storage[{index}].{name} has strides {view.stride()}, storage[0].{name} has {first.stride()}: "
                    "layers must not differ in layout"
                )
    return views
