"""The tensors behind the slots: allocated here from the layout table, or, for checkpoints, handed in by the caller."""

from bisect import bisect_right
from collections.abc import Sequence
from typing import NamedTuple

import torch

from specstate.config import StateConfig
from specstate.errors import CapacityError, SpecStateError
from specstate.kernels import rows as at
from specstate.layout import TensorLayout, gib, tensor_layouts
from specstate.validation import DTYPES, check_apart, check_own_memory, check_tensor, memory_span


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
    strides, interleaved too; slot 0 of it is the null slot. Raises SpecStateError when a view has the wrong shape,
    dtype or device, was made in inference mode (it may not be written outside of it), shares memory with another or
    with itself, or when layers differ in layout; CapacityError when the memory is not there. ``replaces``: a storage
    whose records and cursors go on, over other checkpoints.
    """

    def __init__(
        self, config: StateConfig, device: torch.device, caller: object = None, replaces: "Storage | None" = None
    ) -> None:
        layouts = {layout.name: layout for layout in tensor_layouts(config)}
        views = None if caller is None else _check_views(caller, config, layouts, device)
        if views is not None:
            layouts = {name: layout for name, layout in layouts.items() if layout.scope != "checkpoint slot"}
        own: dict[str, torch.Tensor] = {}
        if replaces is not None:
            own = {name: tensor for name, tensor in replaces.own.items() if name in layouts}
        own |= _allocate(config, {name: layout for name, layout in layouts.items() if name not in own}, device)
        self.own: dict[str, torch.Tensor] = own
        """The manager's own tensors by name, as in the layout table."""
        self.owns_checkpoints = views is None
        self.allocated_bytes = sum(tensor.untyped_storage().nbytes() for tensor in own.values())
        self.cursors = own["cursors"]
        self.sampling = own["sampling"]
        if replaces is None:
            self.sampling[:, at.END_TOKENS :] = -1
        self.counters = own["counters"]
        self.conv_output = own.get("conv_output")
        """[tokens, C] workspace: q|k|v after the conv of the windows at hand, shared by all layers."""
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
        held = [*own.values(), *(view for pair in views for view in pair if view is not None)]
        self._starts, self._ends = _merged([memory_span(tensor) for tensor in held])

    def meets(self, tensor: torch.Tensor) -> bool:
        """Whether ``tensor`` reaches into what lies between the first and the last byte of a tensor held here."""
        return self.meets_span(*memory_span(tensor))

    def meets_span(self, start: int, end: int) -> bool:
        """The same for addresses from ``start`` to before ``end``."""
        before = bisect_right(self._starts, end - 1)
        return before > 0 and self._ends[before - 1] > start


def _allocate(config: StateConfig, layouts: dict[str, TensorLayout], device: torch.device) -> dict[str, torch.Tensor]:
    try:
        # Ordinary tensors, also when the manager is built in inference mode: they are written to outside of it as well.
        with torch.inference_mode(False):
            return {
                name: torch.zeros(layout.shape, dtype=DTYPES[layout.dtype], device=device)
                for name, layout in layouts.items()
            }
    except (RuntimeError, MemoryError) as error:  # of an allocator, torch.OutOfMemoryError among them
        needed = sum(layout.total_bytes for layout in layouts.values())
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise CapacityError(
            f"the state needs {needed} bytes ({gib(needed)}) on {device}, which are not there: num_layers = "
            f"{config.num_layers}, max_requests = {config.max_requests}, num_checkpoints = {config.num_checkpoints}, "
            f"record_capacity = {config.record_capacity} ({reason})"
        ) from error


def _merged(spans: list[tuple[int, int]]) -> tuple[list[int], list[int]]:
    """The spans as sorted starts and ends of disjoint ones."""
    starts: list[int] = []
    ends: list[int] = []
    for start, end in sorted(spans):
        if ends and start <= ends[-1]:
            ends[-1] = max(ends[-1], end)
        else:
            starts.append(start)
            ends.append(end)
    return starts, ends


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
            if tensor.is_inference():
                raise SpecStateError(f"{field} was made in inference mode, and may not be written outside of it")
            checked.append(check_own_memory(field, tensor))
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
    named = [zip((f"storage[{i}].recurrent", f"storage[{i}].conv"), pair, strict=True) for i, pair in enumerate(views)]
    check_apart([(name, view) for pair in named for name, view in pair if view is not None])
    return views
