"""Checks of tensors that come from outside; every message names the field, what was wanted and what came."""

from collections.abc import Sequence

import torch

from specstate.errors import SpecStateError

DTYPES: dict[str, torch.dtype] = {
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float32": torch.float32,
    "float64": torch.float64,
    "int32": torch.int32,
    "int64": torch.int64,
}


def check_tensor(
    name: str,
    tensor: object,
    shape: Sequence[int | None],
    dtypes: Sequence[torch.dtype],
    device: torch.device,
    where: str = "",
) -> torch.Tensor:
    """``tensor`` if it has ``shape`` (None: any size), one of ``dtypes`` and ``device``; else raises SpecStateError."""
    if not isinstance(tensor, torch.Tensor):
        raise SpecStateError(f"{name} must be a tensor, not {type(tensor).__name__}{where}")
    sizes = list(tensor.shape)
    if len(sizes) != len(shape) or any(want not in (None, got) for want, got in zip(shape, sizes, strict=True)):
        wanted = ", ".join("any" if want is None else str(want) for want in shape)
        raise SpecStateError(f"{name} must have shape [{wanted}], got {sizes}{where}")
    if tensor.dtype not in dtypes:
        wanted = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
        raise SpecStateError(f"{name} must be {wanted}, got {str(tensor.dtype).removeprefix('torch.')}{where}")
    if tensor.device != device:
        raise SpecStateError(f"{name} must be on {device}, got {tensor.device}{where}")
    if tensor.layout is not torch.strided:
        raise SpecStateError(f"{name} must be strided, got {str(tensor.layout).removeprefix('torch.')}{where}")
    return tensor


def check_writable(name: str, tensor: torch.Tensor, where: str = "") -> torch.Tensor:
    """``tensor`` if every element has memory of its own and may be written here; else raises SpecStateError."""
    if any(stride == 0 and size > 1 for stride, size in zip(tensor.stride(), tensor.shape, strict=True)):
        raise SpecStateError(f"{name} must not be expanded: elements share memory, strides {tensor.stride()}{where}")
    if tensor.is_inference() and not torch.is_inference_mode_enabled():
        raise SpecStateError(f"{name} is an inference tensor and may only be written in inference mode{where}")
    return tensor


def unique_dtypes(*dtypes: torch.dtype) -> tuple[torch.dtype, ...]:
    """``dtypes`` in order, each once."""
    return tuple(dict.fromkeys(dtypes))


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of ``tensor`` [n] uint8, so that NaN equals itself and -0.0 differs from 0.0."""
    return tensor.flatten().contiguous().view(torch.uint8)
