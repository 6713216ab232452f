"""What a caller's torch happens to be set to must not change a state: gradients, autocast, reduced float32 products, or
another current GPU."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any, Concatenate, ParamSpec, TypeVar

import torch

P = ParamSpec("P")
R = TypeVar("R")

#: Where torch keeps how float32 matrix products are rounded on a device; "none" and "ieee" are float32 throughout.
_BACKENDS: Any = torch.backends
_PRODUCTS: dict[str, Any] = {"cpu": _BACKENDS.mkldnn.matmul, "cuda": _BACKENDS.cuda.matmul}
_WHOLE = ("none", "ieee")


def shielded(method: Callable[Concatenate[Any, P], R]) -> Callable[Concatenate[Any, P], R]:
    """``method`` of a backend with a ``device``, without gradients and autocast, its float32 products in float32.

    The setting of products is the process's own: where a caller has lowered it, it is raised for the time of the call.
    """

    @wraps(method)
    def call(self: Any, *args: P.args, **kwargs: P.kwargs) -> R:
        kind = self.device.type
        if kind == "cuda" and torch.cuda.current_device() != self.device.index:
            # Kernels are launched on the current device.
            with torch.cuda.device(self.device):
                return call(self, *args, **kwargs)
        is_plain = not torch.is_autocast_enabled(kind) and (
            kind not in _PRODUCTS or _PRODUCTS[kind].fp32_precision in _WHOLE
        )
        if is_plain and not torch.is_grad_enabled():  # as in most decode loops, which then pay for no context
            return method(self, *args, **kwargs)
        with torch.no_grad():
            if is_plain:
                return method(self, *args, **kwargs)
            with torch.autocast(kind, enabled=False), _whole_products(kind):
                return method(self, *args, **kwargs)

    return call


@contextmanager
def _whole_products(kind: str) -> Iterator[None]:
    products = _PRODUCTS.get(kind)
    if products is None or products.fp32_precision in _WHOLE:
        yield
        return
    given, products.fp32_precision = products.fp32_precision, "ieee"
    try:
        yield
    finally:
        # Inherited, if that is what it was: written back, it would outlast what the caller sets next.
        products.fp32_precision = "none"
        if products.fp32_precision != given:
            products.fp32_precision = given
