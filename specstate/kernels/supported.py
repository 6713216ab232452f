"""What the Triton kernels do not do: refused with value, limit and what to use, before anything is allocated."""

import torch
import triton

from specstate.config import StateConfig
from specstate.errors import SpecStateError
from specstate.storage import Storage

INTERPRETED: bool = triton.knobs.runtime.interpret

#: Window tokens are padded to this, the least width of a matrix product.
WINDOW_TILE = 16


def check_supported(config: StateConfig, device: torch.device) -> None:
    """Raises SpecStateError for a device, dtype or shape that these kernels do not cover."""
    spec, instead = config.layer, "use backend='reference'"
    if device.type == "cpu" and not INTERPRETED:
        raise SpecStateError(
            f"backend 'triton' needs a GPU, device is {str(device)!r}; {instead}, or set TRITON_INTERPRET=1 before the "
            "first import of triton to try the kernels on a CPU"
        )
    if device.type != "cpu" and INTERPRETED:
        raise SpecStateError(f"TRITON_INTERPRET is set, so kernels run on a CPU alone, device is {str(device)!r}")
    for name, dtype in (("checkpoint_dtype", config.checkpoint_dtype), ("activation_dtype", config.activation_dtype)):
        if dtype == "float64":
            raise SpecStateError(f"{name} = 'float64' is not computed by backend 'triton'; {instead}")
    for name, size, least, most in (
        ("head_k_dim", spec.head_k_dim, 16, 256),
        ("head_v_dim", spec.head_v_dim, 16, 256),
        ("conv_kernel_size", spec.conv_kernel_size or 2, 2, 4),
        ("max_query_len", config.max_query_len, 1, WINDOW_TILE),
    ):
        if not least <= size <= most:
            raise SpecStateError(f"{name} = {size} is outside {least}..{most} of backend 'triton'; {instead}")
    if config.path == "hopper":
        refusal = _hopper_config_refusal(config, device)
        if refusal is not None:
            raise SpecStateError(f"path 'hopper': {refusal}")


def hopper_refusal(config: StateConfig, storage: Storage) -> str | None:
    """Why the Hopper kernels do not serve ``config`` over ``storage``; None when they do."""
    refusal = _hopper_config_refusal(config, storage.cursors.device)
    if refusal is not None:
        return refusal
    for index, layer in enumerate(storage.layers):
        stride = layer.recurrent.stride(0) * layer.recurrent.element_size()
        if layer.recurrent.data_ptr() % 16 or stride % 16:
            return f"storage[{index}].recurrent must start, and step from slot to slot, at multiples of 16 bytes"
    return None


def _hopper_config_refusal(config: StateConfig, device: torch.device) -> str | None:
    """The same without a storage, which may be too large to be made in vain."""
    spec = config.layer
    if device.type != "cuda" or torch.version.hip is not None or torch.cuda.get_device_capability(device) != (9, 0):
        return f"needs a GPU of compute capability 9.0, the manager is on {device}"
    if spec.head_k_dim != 128:
        return f"head_k_dim = {spec.head_k_dim} must be 128"
    if spec.head_v_dim % 64:
        return f"head_v_dim = {spec.head_v_dim} must be a multiple of 64"
    if config.record_capacity > 64:
        return f"record_capacity = {config.record_capacity} must be at most 64"
    return None


def check_inner(name: str, tensor: torch.Tensor, where: str = "") -> None:
    """All dimensions but the first must be contiguous: a token's or a slot's values lie side by side."""
    if tensor.shape[0] and not tensor[0].is_contiguous():
        raise SpecStateError(
            f"{name} must be contiguous behind its first dimension for backend 'triton', has strides {tensor.stride()}"
            f"{where}"
        )
