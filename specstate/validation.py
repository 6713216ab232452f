"""Checks of what comes from outside, tensors first; every message names the field, what was wanted and what came."""

from collections.abc import Sequence

import torch
from pydantic import ValidationError

from specstate.errors import SpecStateError, shown

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
    if tensor.layout is not torch.strided or tensor.is_nested:
        kind = "nested" if tensor.is_nested else str(tensor.layout).removeprefix("torch.")
        raise SpecStateError(f"{name} must be strided, got {kind}{where}")
    sizes = list(tensor.shape)
    if len(sizes) != len(shape) or any(want not in (None, got) for want, got in zip(shape, sizes, strict=True)):
        wanted = ", ".join("any" if want is None else str(want) for want in shape)
        raise SpecStateError(f"{name} must have shape [{wanted}], got {sizes}{where}")
    if tensor.dtype not in dtypes:
        wanted = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
        raise SpecStateError(f"{name} must be {wanted}, got {str(tensor.dtype).removeprefix('torch.')}{where}")
    if tensor.device != device:
        raise SpecStateError(f"{name} must be on {device}, got {tensor.device}{where}")
    return tensor


def check_own_memory(name: str, tensor: torch.Tensor, where: str = "") -> torch.Tensor:
    """``tensor`` if every element has memory of its own; else raises SpecStateError.

    A step along a dimension must lead past all that the dimensions of smaller strides reach.
    """
    if not tensor.is_contiguous():
        reached = 1
        for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
            if size > 1 and stride < reached:
                raise SpecStateError(
                    f"{name} must not overlap itself: elements share memory, shape {list(tensor.shape)} has strides "
                    f"{tensor.stride()}{where}"
                )
            reached += stride * (size - 1)
    return tensor


def memory_span(tensor: torch.Tensor) -> tuple[int, int]:
    """Addresses from the first byte of ``tensor`` to behind its last; (0, 0) of an empty one."""
    if not tensor.numel():
        return 0, 0
    if tensor.is_contiguous():
        reach = tensor.numel()
    else:
        reach = 1 + sum(stride * (size - 1) for stride, size in zip(tensor.stride(), tensor.shape, strict=True))
    start = tensor.data_ptr()
    return start, start + reach * tensor.element_size()


def check_apart(named: Sequence[tuple[str, torch.Tensor]]) -> None:
    """Raises SpecStateError with both names when two tensors share an element; their elements may lie interleaved."""
    # Relative to the lowest, since an address may lie above int64.
    lowest = min(tensor.data_ptr() for _, tensor in named)
    starts, lengths, owners = [], [], []
    for index, (_, tensor) in enumerate(named):
        offsets, length = _dense_runs(tensor)
        starts.append(offsets + (tensor.data_ptr() - lowest))
        lengths.append(torch.full_like(offsets, length))
        owners.append(torch.full_like(offsets, index))
    start, order = torch.cat(starts).sort()
    clashes = (start + torch.cat(lengths)[order])[:-1] > start[1:]
    if bool(clashes.any()):
        first = int(clashes.int().argmax())
        one, other = (named[int(torch.cat(owners)[order[i]])][0] for i in (first, first + 1))
        raise SpecStateError(f"{one} and {other} share memory")


def _dense_runs(tensor: torch.Tensor) -> tuple[torch.Tensor, int]:
    """Where elements lie side by side: byte offsets of the runs' starts [n] int64, and the bytes of a run."""
    run, starts = 1, torch.zeros(1, dtype=torch.int64, device="cpu")
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if stride == run and len(starts) == 1:
            run *= size
        elif size > 1:
            starts = (starts[:, None] + stride * torch.arange(size, dtype=torch.int64, device="cpu")).flatten()
    return starts * tensor.element_size(), run * tensor.element_size()


def resolve_device(device: object) -> torch.device:
    """``device`` as tensors name theirs. Raises SpecStateError when it is none, has no memory, or is not there."""
    try:
        resolved = torch.device(device)  # type: ignore[call-overload]
    except (RuntimeError, TypeError, ValueError) as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise SpecStateError(f"device = {shown(device)} is not a device: {reason}") from None
    if resolved.type == "meta":
        raise SpecStateError(
            f"device = {shown(device)} has no memory; backend 'metadata' needs none and takes device='cpu'"
        )
    if resolved.type == "cpu":  # tensors never name its index
        return torch.device("cpu")
    if resolved.type == "cuda":
        if not torch.cuda.is_available():
            raise SpecStateError(f"device = {shown(device)}: no GPU is available; device='cpu' runs the reference")
        if resolved.index is None:  # tensors name their index, so the manager does too
            resolved = torch.device("cuda", torch.cuda.current_device())
    try:
        torch.empty(0, device=resolved)
    except (RuntimeError, AssertionError, ImportError) as error:  # each kind of device has its own
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise SpecStateError(f"device = {shown(device)} is not there: {reason}") from None
    return resolved


def check_flag(name: str, value: object) -> None:
    """Raises SpecStateError when ``value`` is no bool: what is truthy by accident would be taken for a wish."""
    if type(value) is not bool:
        raise SpecStateError(f"{name} = {shown(value)} must be True or False")


def unique_dtypes(*dtypes: torch.dtype) -> tuple[torch.dtype, ...]:
    """``dtypes`` in order, each once."""
    return tuple(dict.fromkeys(dtypes))


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of ``tensor`` [n] uint8, so that NaN equals itself and -0.0 differs from 0.0."""
    return tensor.flatten().contiguous().view(torch.uint8)


def first_fault(error: ValidationError) -> str:
    """The first thing that a model refused, on one line: the field, its value, and what is wrong with it."""
    first = error.errors(include_url=False)[0]
    field = ".".join(str(part) for part in first["loc"] if part != "[key]")
    if len(field) > 80 or not field.isprintable():  # keys of a damaged file may be anything
        field = shown(field)
    if first["type"] == "missing":  # the input is then all that is there
        return f"{field} is missing"
    what = f"{field} = {shown(first['input'])}: " if field else ""
    return what + " ".join(first["msg"].removeprefix("Value error, ").split())
