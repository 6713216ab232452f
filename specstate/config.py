"""What a manager is built for: the shape of a layer, how many requests, which fold policy."""

from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from specstate.layout import gib, plan_bytes
from specstate.limits import (
    INT64_MAX,
    MAX_BLOCK_SIZE,
    MAX_CONV_KERNEL_SIZE,
    MAX_HEAD_DIM,
    MAX_HEADS,
    MAX_LAYERS,
    MAX_QUERY_LEN,
    MAX_RECORD_CAPACITY,
    MAX_SLOTS,
    MIN_GATE_LOWER_BOUND,
)

FoldPolicy = Literal["eager", "deferred", "ring"]
CheckpointDtype = Literal["float32", "bfloat16", "float64"]
ActivationDtype = Literal["bfloat16", "float16", "float32", "float64"]

#: Records per request, in windows of max_query_len: the least that each policy works with, and the default.
MINIMUM_WINDOWS: dict[str, int] = {"eager": 1, "deferred": 2, "ring": 2}
DEFAULT_WINDOWS: dict[str, int] = {"eager": 1, "deferred": 2, "ring": 4}

#: Stands for a size that follows from others; a built config states the size itself.
_FOLLOWS: Any = None
_FOLLOWING = ("record_capacity", "num_checkpoints")


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class KDALayerSpec(_Frozen):
    """One KDA layer as one tensor-parallel rank sees it. All layers of a manager share it.

    The convolution runs over the packed projection [q | k | v] of ``conv_channels`` = H (2 K + V) channels: all query
    heads, all key heads, all value heads.
    """

    num_heads: int = Field(ge=1, le=MAX_HEADS)
    """H, heads of this rank."""
    head_k_dim: int = Field(ge=1, le=MAX_HEAD_DIM)
    """K, the key (and query, and gate) dimension of a head."""
    head_v_dim: int = Field(ge=1, le=MAX_HEAD_DIM)
    """V, the value dimension of a head."""
    conv_kernel_size: int | None = Field(default=4, ge=2, le=MAX_CONV_KERNEL_SIZE)
    """W, taps of the causal convolution; None when the model convolves itself."""
    gate_lower_bound: float | None = Field(default=None, ge=MIN_GATE_LOWER_BOUND, lt=0.0, allow_inf_nan=False)
    """None: softplus gate (Kimi Linear). A negative bound: the bounded gate (Kimi K3, -5.0)."""

    @property
    def conv_channels(self) -> int:
        """C = H (2 K + V)."""
        return self.num_heads * (2 * self.head_k_dim + self.head_v_dim)

    @property
    def conv_history_len(self) -> int:
        """W - 1, the inputs that a convolution looks back to; 0 without a convolution."""
        return 0 if self.conv_kernel_size is None else self.conv_kernel_size - 1


class StateConfig(_Frozen):
    """Everything that decides what a manager allocates. A config that cannot work is refused here.

    Raises pydantic's ``ValidationError`` (a ``ValueError``) that names the field, its value and the limit.
    """

    num_layers: int = Field(ge=1, le=MAX_LAYERS)
    """KDA layers of this rank."""
    layer: KDALayerSpec
    max_requests: int = Field(ge=1, le=MAX_SLOTS)
    """Record slots: requests that can be decoded at a time."""
    max_query_len: int = Field(ge=1, le=MAX_QUERY_LEN)
    """T, the longest window: the last sampled token and T - 1 drafts."""
    fold_policy: FoldPolicy = "ring"
    record_capacity: int = Field(default=_FOLLOWS, ge=1, le=MAX_RECORD_CAPACITY)
    """R, records a request can hold; by default T, 2 T and 4 T under eager, deferred and ring."""
    num_checkpoints: int = Field(default=_FOLLOWS, ge=1, le=MAX_SLOTS)
    """Checkpoint slots, the null slot not counted; by default max_requests."""
    checkpoint_dtype: CheckpointDtype = "float32"
    """Of the recurrent state. float64 is for the reference backend."""
    activation_dtype: ActivationDtype = "bfloat16"
    """Of qkv, keys, gates and the conv inputs."""
    block_size: int | None = Field(default=None, ge=1, le=MAX_BLOCK_SIZE)
    """Tokens between boundary checkpoints; None for none."""
    memory_limit_bytes: int | None = Field(default=None, ge=1, le=INT64_MAX)
    """A plan above it is refused."""
    path: str | None = None
    """Pins the kernels that run, "portable" or "hopper" of backend "triton"; None lets the backend choose."""

    @property
    def folds_in_verify(self) -> bool:
        """Pending records are folded by the next verify, in the same pass."""
        return self.fold_policy == "deferred"

    @property
    def folds_at_end(self) -> bool:
        """Accepted records are folded when their step ends."""
        return self.fold_policy == "eager"

    @property
    def folds_when_full(self) -> bool:
        """Records are folded at the end of a step when the next window might not fit: pending + T > R."""
        return self.fold_policy == "ring"

    @property
    def most_pending(self) -> int:
        """Records that the end of a step may leave pending; a row with more is folded then."""
        if self.folds_at_end:
            return 0
        return self.record_capacity - self.max_query_len if self.folds_when_full else self.record_capacity

    @model_validator(mode="before")
    @classmethod
    def _follow(cls, data: object) -> object:
        """Sizes that follow from others. Where those are wrong nothing is filled in, and they are what is refused."""
        if not isinstance(data, dict):
            return data
        filled = {name: value for name, value in data.items() if value is not None or name not in _FOLLOWING}
        policy, window = filled.get("fold_policy", "ring"), filled.get("max_query_len")
        if isinstance(policy, str) and policy in DEFAULT_WINDOWS and isinstance(window, int):
            filled.setdefault("record_capacity", DEFAULT_WINDOWS[policy] * window)
        if isinstance(filled.get("max_requests"), int):
            filled.setdefault("num_checkpoints", filled["max_requests"])
        return filled

    @model_validator(mode="after")
    def _can_work(self) -> Self:
        least = MINIMUM_WINDOWS[self.fold_policy] * self.max_query_len
        if self.record_capacity < least:
            raise ValueError(
                f"record_capacity = {self.record_capacity} is too small: fold_policy {self.fold_policy!r} with "
                f"max_query_len = {self.max_query_len} needs at least {least}"
            )
        if self.block_size is not None and self.block_size < self.max_query_len:
            raise ValueError(
                f"block_size = {self.block_size} is smaller than max_query_len = {self.max_query_len}: "
                "one window could cross two boundaries"
            )
        if self.activation_dtype == "float64" and self.checkpoint_dtype != "float64":
            raise ValueError(
                f"activation_dtype = 'float64' needs checkpoint_dtype = 'float64', not {self.checkpoint_dtype!r}"
            )
        if self.memory_limit_bytes is not None:
            total = plan_bytes(self).total_bytes
            if total > self.memory_limit_bytes:
                raise ValueError(
                    f"memory_limit_bytes = {self.memory_limit_bytes} ({gib(self.memory_limit_bytes)}) is exceeded: "
                    f"the plan needs {total} bytes ({gib(total)})"
                )
        return self
