"""From a manager's arguments to its backend: device, parameters, storage and kernels, each checked."""

import torch

from specstate.backends import Backend
from specstate.backends.metadata import MetadataBackend
from specstate.backends.tensors import TensorBackend
from specstate.config import StateConfig
from specstate.errors import SpecStateError, shown
from specstate.kernels.reference import ReferenceKernels
from specstate.params import check_params
from specstate.storage import Storage

#: Kernels that each backend can run; StateConfig.path pins one.
PATHS: dict[str, tuple[str, ...]] = {
    "triton": ("portable", "hopper"),
    "reference": ("reference",),
    "metadata": ("metadata",),
}


def build_backend(
    config: StateConfig, params: object, device: torch.device, backend: object, storage: object, debug: bool
) -> Backend:
    """The backend of a manager. Raises SpecStateError when its parts do not go together, before allocating anything."""
    if not isinstance(backend, str) or backend not in PATHS:
        raise SpecStateError(f"backend = {shown(backend)} is not one of {', '.join(map(repr, PATHS))}")
    if config.path not in (None, *PATHS[backend]):
        raise SpecStateError(
            f"config.path = {config.path!r} is no path of backend {backend!r}, which has "
            f"{', '.join(map(repr, PATHS[backend]))}"
        )
    if backend == "metadata":
        if storage is not None:
            raise SpecStateError("storage must be None on backend 'metadata', which holds no payloads")
        return MetadataBackend(config)
    checked = check_params(params, config, device)
    if backend == "triton":
        # Imported where used: the package itself loads no Triton.
        from specstate.kernels.choice import triton_kernels
        from specstate.kernels.supported import check_supported

        check_supported(config, device)
        return TensorBackend(config, triton_kernels, checked, Storage(config, device, storage), device, debug)
    return TensorBackend(config, ReferenceKernels, checked, Storage(config, device, storage), device, debug)
