"""What tensors look like, apart from where they lie: a window that looks like an earlier one needs no second check."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from specstate.validation import memory_span

#: Looks that are remembered. A loop has a few, one for each size of its steps.
MOST_LOOKS = 256


class Known(NamedTuple):
    """What is known of windows that look alike."""

    reaches: tuple[int, ...]
    """Bytes from the first to behind the last of qkv, raw_gate, raw_beta and out; 0 of one that was not given."""
    layout: Any
    """What the kernels make of their strides and dtypes; None: they look for themselves."""


class WindowLooks:
    """Looks of windows that passed every check which does not ask where a tensor lies."""

    def __init__(self) -> None:
        self._known: dict[Any, Known] = {}

    def find(self, num_tokens: int, tensors: Sequence[Any]) -> Known | None:
        """What is known of a window of ``num_tokens`` that looks like ``tensors``; None: it must be checked."""
        return self._known.get((num_tokens, _looks(tensors)))

    def keep(self, num_tokens: int, tensors: Sequence[torch.Tensor | None], layout: Any = None) -> Known:
        """Remembers a window that has been checked."""
        spans = [(0, 0) if tensor is None else memory_span(tensor) for tensor in tensors]
        known = Known(tuple(end - start for start, end in spans), layout)
        looks = _looks(tensors)
        if looks is not None:
            if len(self._known) >= MOST_LOOKS:
                self._known.clear()
            self._known[num_tokens, looks] = known
        return known


def _looks(tensors: Sequence[Any]) -> tuple[Any, ...] | None:
    """None when one of them is no plain tensor: a subclass may answer as it likes, and anything else not at all."""
    looks: list[Any] = []
    for tensor in tensors:
        if tensor is None:
            looks.append(None)
        elif type(tensor) is torch.Tensor and tensor.layout is torch.strided and not tensor.is_nested:
            looks += (tensor.dtype, tensor.device, tensor.shape, tensor.stride())
        else:
            return None
    return tuple(looks)
