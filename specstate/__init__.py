"""specstate: the recurrent state of Kimi Delta Attention layers under speculative decoding.

Configs, plans and presets are imported at once. Whatever needs torch is imported when it is first used, and Triton
only by the kernels that run, so that importing the package touches no device.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from specstate import presets
from specstate.config import KDALayerSpec, StateConfig
from specstate.errors import CapacityError, RankDisagreementError, SpecStateError, StaleHandleError, StepOrderError
from specstate.layout import BytePlan, plan_bytes

if TYPE_CHECKING:
    from specstate.backends import DeviceCounters, LayerState
    from specstate.manager import StateManager
    from specstate.metadata import Handle, StepMetadata
    from specstate.metrics import Folds, Metrics
    from specstate.params import LayerParams
    from specstate.prefixes import PrefixKey
    from specstate.ranks import RankAgreement
    from specstate.sampling import HostCopy, HostSample, SampleResult, SamplingParams
    from specstate.step import Step
    from specstate.trace import TraceError, TraceRecorder
    from specstate.transfer import TransferError

__version__ = "0.1.0"

__all__ = [
    "BytePlan",
    "CapacityError",
    "DeviceCounters",
    "Folds",
    "Handle",
    "HostCopy",
    "HostSample",
    "KDALayerSpec",
    "LayerParams",
    "LayerState",
    "Metrics",
    "PrefixKey",
    "RankAgreement",
    "RankDisagreementError",
    "SampleResult",
    "SamplingParams",
    "SpecStateError",
    "StaleHandleError",
    "StateConfig",
    "StateManager",
    "Step",
    "StepMetadata",
    "StepOrderError",
    "TraceError",
    "TraceRecorder",
    "TransferError",
    "plan_bytes",
    "presets",
]

_LAZY = {
    "DeviceCounters": "specstate.backends",
    "Folds": "specstate.metrics",
    "Handle": "specstate.metadata",
    "HostCopy": "specstate.sampling",
    "HostSample": "specstate.sampling",
    "LayerParams": "specstate.params",
    "LayerState": "specstate.backends",
    "Metrics": "specstate.metrics",
    "PrefixKey": "specstate.prefixes",
    "RankAgreement": "specstate.ranks",
    "SampleResult": "specstate.sampling",
    "SamplingParams": "specstate.sampling",
    "StateManager": "specstate.manager",
    "Step": "specstate.step",
    "StepMetadata": "specstate.metadata",
    "TraceError": "specstate.trace",
    "TraceRecorder": "specstate.trace",
    "TransferError": "specstate.transfer",
}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module 'specstate' has no attribute {name!r}")
    value = getattr(import_module(_LAZY[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
