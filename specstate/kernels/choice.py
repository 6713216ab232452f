"""Which Triton kernels a manager gets."""

from specstate.config import StateConfig
from specstate.kernels import Kernels
from specstate.kernels.portable import PortableKernels
from specstate.kernels.supported import hopper_refusal
from specstate.params import LayerParams
from specstate.storage import Storage


def triton_kernels(config: StateConfig, params: tuple[LayerParams, ...], storage: Storage) -> Kernels:
    """Those that ``config.path`` pins; else the Hopper kernels where they serve, and the portable ones anywhere else.

    Raises SpecStateError when the pinned kernels do not serve.
    """
    wanted = config.path == "hopper" or (config.path is None and hopper_refusal(config, storage) is None)
    if not wanted:
        return PortableKernels(config, params, storage)
    # Imported where used: Gluon is of no use elsewhere.
    from specstate.kernels.hopper import HopperKernels

    return HopperKernels(config, params, storage)
