"""Memory made ahead, for what is captured into CUDA graphs: a capture that takes from it allocates nothing."""

import math
from typing import Protocol

import torch

from specstate.errors import CapacityError
from specstate.kernels import rows as at

#: Triton compiles another variant for a pointer that is not aligned to 16 bytes; torch's own allocations are to 512.
_ALIGNMENT = 512


def captured_bytes(num_rows: int, num_tokens: int, max_query_len: int) -> int:
    """Bytes that a captured step of that size takes: rows, a flush, two samples, an end by the caller's own counts."""
    begin = 4 * (num_rows * (at.STAGED_COLUMNS + at.ROW_COLUMNS + 2) + 1 + num_tokens)
    sample = num_rows * (4 * (3 + max_query_len) + 1) + 4 * num_tokens
    # Of int64 counts and of two masks, an entry index each and the entries.
    end = num_rows * (4 * at.PLAN_COLUMNS + 4 + 8 + 2 * (4 + 1))
    flush = 4 * num_rows * at.PLAN_COLUMNS
    tensors = 4 + 2 * 5 + 7 + 1
    return _aligned(begin + 2 * sample + end + flush + tensors * _ALIGNMENT)


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT


class Allocator(Protocol):
    """Makes the small tensors of a step: rows, counts, fold plans."""

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype = torch.int32) -> torch.Tensor:
        """Unwritten memory of that shape."""
        ...


class TorchAllocator:
    """Torch's own allocator."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype = torch.int32) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=self._device)


class Arena:
    """Memory [bytes] uint8 that is handed out once, in order."""

    def __init__(self, memory: torch.Tensor) -> None:
        self._bytes = memory
        self._used = 0

    @classmethod
    def of(cls, size: int, device: torch.device) -> "Arena":
        """``size`` new bytes. Raises CapacityError when they are not there."""
        try:
            # Ordinary memory, also when made in inference mode: it is written to outside of it as well.
            with torch.inference_mode(False):
                return cls(torch.empty(size, dtype=torch.uint8, device=device))
        except RuntimeError as error:  # torch.OutOfMemoryError among them
            raise CapacityError(f"captured steps need {size} bytes on {device}, which are not there") from error

    def part(self, size: int) -> "Arena":
        """``size`` of its bytes as an arena of their own. Raises CapacityError when too little is left."""
        return Arena(self.empty((size,), torch.uint8))

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype = torch.int32) -> torch.Tensor:
        """As Allocator says. Raises CapacityError when too little is left."""
        start, size = self._used, math.prod(shape) * dtype.itemsize
        if start + size > len(self._bytes):
            raise CapacityError(
                f"captured steps have used {start} of the {len(self._bytes)} bytes that warmup made, the next tensor "
                f"needs {size}: warmup(captures=...) makes more"
            )
        self._used = _aligned(start + size)
        return self._bytes[start : start + size].view(dtype).view(shape)
