"""How the next tokens are chosen: a request's sampling parameters, and what a step's ``sample`` returns."""

import struct
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Annotated

import torch
from pydantic import BaseModel, ConfigDict, Field, field_validator

from specstate.kernels import rows as at
from specstate.limits import INT32_MAX, MAX_TEMPERATURE, MIN_TEMPERATURE

if TYPE_CHECKING:
    from specstate.step import Step


_TokenId = Annotated[int, Field(ge=0, le=INT32_MAX)]


class SamplingParams(BaseModel):
    """Given at admit. Raises pydantic's ``ValidationError`` (a ``ValueError``) naming field, value and limit.

    Tokens are filtered by temperature, then top-k, then top-p of what top-k has left; where several tokens are as
    likely as the last one kept, all of those are kept.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    temperature: float = Field(default=0.0, ge=0.0, le=MAX_TEMPERATURE, allow_inf_nan=False)
    """Logits are divided by it; 0: greedy."""
    top_k: int = Field(default=0, ge=0, le=INT32_MAX)
    """Keep the k likeliest tokens; 0 keeps all. Nothing changes under greedy sampling."""
    top_p: float = Field(default=1.0, gt=0.0, le=1.0)
    """Keep the smallest set of likeliest tokens with this probability in all. Nothing changes under greedy sampling."""
    seed: int = Field(default=0, ge=0, lt=2**63)
    """Of the request's random numbers."""
    end_token_ids: tuple[_TokenId, ...] = Field(default=(), max_length=at.MAX_END_TOKENS)
    """A request finishes with the first of these that it accepts or samples."""

    @field_validator("temperature")
    @classmethod
    def _fits_float32(cls, temperature: float) -> float:
        if 0.0 < temperature < MIN_TEMPERATURE:
            raise ValueError(f"temperature = {temperature} must be 0 (greedy) or at least {MIN_TEMPERATURE}")
        return temperature

    def checked(self) -> "SamplingParams":
        """The same, validated again: ``model_copy`` and ``model_construct`` look at nothing. Raises ValidationError."""
        return SamplingParams(**{name: getattr(self, name) for name in SamplingParams.model_fields})

    def columns(self) -> tuple[int, ...]:
        """A line of the device's sampling table, int32 [SAMPLING_COLUMNS]; see kernels/rows.py."""
        unused = (-1,) * (at.MAX_END_TOKENS - len(self.end_token_ids))
        packed = struct.pack("<ffiq", self.temperature, self.top_p, self.top_k, self.seed)
        return *struct.unpack("<5i", packed), *self.end_token_ids, *unused


@dataclass(frozen=True, slots=True, eq=False)
class HostSample:
    """A SampleResult's tensors on the host."""

    num_accepted: torch.Tensor
    tokens: torch.Tensor
    next_token: torch.Tensor
    finished: torch.Tensor


class HostCopy:
    """A copy to the host under way; ``ready()`` asks, ``wait()`` waits and returns the HostSample."""

    def __init__(self, sample: HostSample, event: torch.cuda.Event | None) -> None:
        self._sample, self._event = sample, event

    def ready(self) -> bool:
        """Whether the copy has arrived; never waits."""
        return self._event is None or self._event.query()

    def wait(self) -> HostSample:
        """The copy, once it has arrived."""
        if self._event is not None:
            self._event.synchronize()
        return self._sample


@dataclass(frozen=True, slots=True, eq=False)
class SampleResult:
    """Tokens that a step accepted and sampled, in row order, on the device. It belongs to its step.

    Padded and dummy rows: 0 accepted, no tokens. So also a window verified after its request had finished.
    """

    step: "Step"
    num_accepted: torch.Tensor
    """[rows] int32, the window's first token included."""
    tokens: torch.Tensor
    """[rows, T] int32: accepted drafts, then the next token, then -1. Prompt rows list the next token alone."""
    next_token: torch.Tensor
    """[rows] int32: first token of the next window; -1 for a finished row, whose ``tokens`` end with its end token."""
    finished: torch.Tensor
    """[rows] bool: an end token was listed; it cuts num_accepted, though not below min_accepted. A later window of the
    request counts as 0 accepted, unless it is a prompt row, which says that the prompt goes on: only the caller knows
    which chunk of a prompt is its last."""

    copied_from: "SampleResult | None" = None
    """The result inside a CUDA graph that this one was copied from."""

    def copy_for(self, step: "Step") -> "SampleResult":
        """This result as ``step``'s own: the next replay of the graph that made it leaves the copy alone."""
        return SampleResult(
            step,
            self.num_accepted.clone(),
            self.tokens.clone(),
            self.next_token.clone(),
            self.finished.clone(),
            copied_from=self,
        )

    def to_host_async(self) -> HostCopy:
        """Starts a copy into pinned memory, an event behind it, on the current stream. On a CPU it is there at once."""
        tensors = {field.name: getattr(self, field.name) for field in fields(HostSample)}
        if self.num_accepted.device.type == "cpu":
            return HostCopy(HostSample(**tensors), None)
        host = {}
        for name, tensor in tensors.items():
            pinned = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=True)
            host[name] = pinned.copy_(tensor, non_blocking=True)
        event = torch.cuda.Event()
        event.record()
        return HostCopy(HostSample(**host), event)
