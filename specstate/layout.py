"""Every tensor that a manager allocates, as a table; the byte plan is its sum, the storage is its allocation.

A plan that is derived from the same rows as the allocation cannot differ from it.
"""

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from specstate.errors import SpecStateError, shown
from specstate.kernels import rows as at

if TYPE_CHECKING:
    from specstate.config import StateConfig

DTYPE_BYTES: dict[str, int] = {"bfloat16": 2, "float16": 2, "float32": 4, "float64": 8, "int32": 4, "int64": 8}

#: Window tokens that a verify convolves at a time; more rows take more launches. Of a fixed size, so that what is paid
#: once does not grow with the requests.
CONV_OUTPUT_TOKENS = 1024

Scope = Literal["checkpoint slot", "record slot", "manager"]


@dataclass(frozen=True, slots=True)
class TensorLayout:
    """One allocation: its shape, and along which dimension (if any) its slots lie."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    scope: Scope
    """What one more of costs bytes: checkpoint and record slots lie along ``slot_dim``."""
    slot_dim: int = 0

    @property
    def total_bytes(self) -> int:
        return math.prod(self.shape) * DTYPE_BYTES[self.dtype]

    @property
    def bytes_per_slot(self) -> int:
        """Bytes of one slot over all layers; 0 for what the manager has once."""
        return 0 if self.scope == "manager" else self.total_bytes // self.shape[self.slot_dim]


@dataclass(frozen=True, slots=True)
class BytePlan:
    """What a config costs, in bytes. Figures are sums over ``tensors``, nothing is rounded."""

    tensors: tuple[TensorLayout, ...]
    total_bytes: int
    """All that the manager allocates, null slot, scratch row and counters included."""
    overhead_bytes: int
    """The null slot, the scratch row, and what the manager has once (workspace, counters): paid before any request."""
    checkpoint_bytes_per_request: int
    """One checkpoint slot: recurrent state and conv history of all layers."""
    bytes_per_request: int
    """One checkpoint slot and one record slot (conv ring, records, cursors)."""
    snapshot_bytes_per_request: int
    """The snapshot design beside it: T states, each with a conv window of W - 2 + T inputs."""
    snapshot_overhead_bytes: int
    """Its null slot, so that both designs are counted alike."""

    def requests_in(self, memory_bytes: int) -> int:
        """How many requests fit into ``memory_bytes`` when each has one checkpoint and one record slot."""
        _check_bytes(memory_bytes)
        return max(0, memory_bytes - self.overhead_bytes) // self.bytes_per_request

    def snapshot_requests_in(self, memory_bytes: int) -> int:
        """How many fit with a snapshot per token of the window."""
        _check_bytes(memory_bytes)
        return max(0, memory_bytes - self.snapshot_overhead_bytes) // self.snapshot_bytes_per_request


def tensor_layouts(config: "StateConfig") -> tuple[TensorLayout, ...]:
    """The allocations of ``config``, layers first: one allocation a kind, so that one descriptor covers all layers.

    Slot 0 of a checkpoint tensor is the null slot, the last row of a record tensor is the scratch row (row -1).
    """
    layer, layers = config.layer, config.num_layers
    heads, k_dim, v_dim = layer.num_heads, layer.head_k_dim, layer.head_v_dim
    slots, rows, capacity = config.num_checkpoints + 1, config.max_requests + 1, config.record_capacity
    activation = config.activation_dtype
    record = "float64" if config.checkpoint_dtype == "float64" else "float32"

    tensors = [
        TensorLayout("recurrent", (layers, slots, heads, v_dim, k_dim), config.checkpoint_dtype, "checkpoint slot", 1)
    ]
    if layer.conv_history_len:
        channels, history = layer.conv_channels, layer.conv_history_len
        ring = history + config.max_query_len
        tensors += [
            TensorLayout("conv", (layers, slots, channels, history), activation, "checkpoint slot", 1),
            TensorLayout("conv_ring", (layers, rows, ring, channels), activation, "record slot", 1),
            TensorLayout("conv_output", (CONV_OUTPUT_TOKENS, channels), activation, "manager"),
        ]
    tensors += [
        TensorLayout("record_u", (layers, rows, heads, capacity, v_dim), record, "record slot", 1),
        TensorLayout("record_key_gate", (layers, rows, heads, capacity, 2, k_dim), activation, "record slot", 1),
        TensorLayout("record_inv_norm", (layers, rows, heads, capacity), "float32", "record slot", 1),
        TensorLayout("cursors", (rows, at.CURSOR_COLUMNS), "int32", "record slot"),
        TensorLayout("sampling", (rows, at.SAMPLING_COLUMNS), "int32", "record slot"),
        TensorLayout("counters", (at.COUNT_ACCEPTED + config.max_query_len + 1,), "int64", "manager"),
    ]
    return tuple(tensors)


def plan_bytes(config: "StateConfig") -> BytePlan:
    """Adds up ``tensor_layouts(config)``.

    The snapshot design keeps, for each of the T tokens of a window, a whole recurrent state and a conv window of
    W - 2 + T inputs, in the same dtypes (vLLM's spec-decode layout for mamba-like layers).
    """
    from specstate.config import StateConfig  # not at the top: a config plans itself when it is built

    if not isinstance(config, StateConfig):
        raise SpecStateError(f"config must be a StateConfig, not {type(config).__name__}")
    tensors = tensor_layouts(config)
    layer = config.layer
    checkpoint = sum(t.bytes_per_slot for t in tensors if t.scope == "checkpoint slot")
    record = sum(t.bytes_per_slot for t in tensors if t.scope == "record slot")
    once = sum(t.total_bytes for t in tensors if t.scope == "manager")

    state = layer.num_heads * layer.head_v_dim * layer.head_k_dim * DTYPE_BYTES[config.checkpoint_dtype]
    window_inputs = layer.conv_history_len - 1 + config.max_query_len if layer.conv_history_len else 0
    conv_window = window_inputs * layer.conv_channels * DTYPE_BYTES[config.activation_dtype]
    snapshot = config.num_layers * (state + conv_window)
    return BytePlan(
        tensors=tensors,
        total_bytes=sum(t.total_bytes for t in tensors),
        overhead_bytes=checkpoint + record + once,
        checkpoint_bytes_per_request=checkpoint,
        bytes_per_request=checkpoint + record,
        snapshot_bytes_per_request=config.max_query_len * snapshot,
        snapshot_overhead_bytes=snapshot,
    )


def _check_bytes(memory_bytes: object) -> None:
    if type(memory_bytes) is not int or memory_bytes < 0:
        raise SpecStateError(f"memory_bytes = {shown(memory_bytes)} must be a whole number of bytes, 0 or more")


def gib(size_bytes: int) -> str:
    """``size_bytes`` for a person: '1.50 GiB'."""
    return f"{size_bytes / 2**30:.2f} GiB"
