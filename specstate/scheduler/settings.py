"""How an engine is set up: its limits, how it prefills, when it makes room, and how late its host learns things."""

from typing import Literal, Self, get_args

from pydantic import BaseModel, ConfigDict, Field, model_validator

from specstate.limits import INT64_MAX, MAX_BLOCK_SIZE
from specstate.scheduler.workloads import DEFAULT_BLOCK_SIZE, MAX_REQUEST_LEN

Policy = Literal["snapshots", "eager", "deferred", "ring"]
"""A fold policy, or a whole state for every token of the window, which is only priced, not run."""
POLICIES: tuple[Policy, ...] = get_args(Policy)

Preemption = Literal["recompute", "retract"]
Prefill = Literal["kernel", "rows"]


class EngineSettings(BaseModel):
    """What the simulated engine does. Raises pydantic's ``ValidationError`` that names the field and the limit."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    token_budget: int = Field(default=2048, ge=1, le=2**20)
    """Tokens of a step: windows first, then pieces of prompts."""
    max_batch: int = Field(default=256, ge=1, le=2**16)
    """Requests that are prefilled or decoded at a time; no more than the manager's ``max_requests``."""
    async_depth: int = Field(default=1, ge=0, le=2)
    """Steps that the host plans without the counts of the steps before: with 0 it has read all of them; with 1 or 2
    it learns of ends, lengths and boundaries so many steps late, and the device never waits for it."""
    prefill: Prefill = "kernel"
    """"kernel": a prefill kernel writes the state of a whole piece in place, and ``load`` says so. "rows": pieces of
    at most ``max_query_len`` tokens go through ``verify`` as rows of kind "prompt"."""
    prefix_cache: bool = True
    """A prompt starts from the longest of its prefixes that is published; of every piece of a prompt the state at the
    last block boundary in it is published."""
    block_size: int = Field(default=DEFAULT_BLOCK_SIZE, ge=1, le=MAX_BLOCK_SIZE)
    """Tokens of a block; requests whose hashes stand for blocks of another size share nothing."""
    cache_outputs: bool = False
    """What is decoded is published at block boundaries, too. Published traces do not say which prompts go on from an
    answer, so only requests that are preempted and recomputed find these states again."""
    preemption: Preemption = "recompute"
    """Of the request that was admitted last, when slots or the KV cache run short. "recompute": it is released, and
    prefilled again with all it has put out. "retract": its state waits on the host."""
    kv_tokens: int | None = Field(default=None, ge=1)
    """Tokens that the KV cache of the attention layers holds; None: as many as come."""
    max_context: int = Field(default=2 * MAX_REQUEST_LEN, ge=2)
    """Prompt and output of one request; longer ones are refused."""
    cancel_share: float = Field(default=0.0, ge=0.0, le=1.0, allow_inf_nan=False)
    """Requests whose client goes away unless it has everything in time."""
    cancel_mean_ms: float = Field(default=10_000.0, gt=0.0, le=1e12, allow_inf_nan=False)
    """Their patience: exponentially distributed, counted from the arrival."""
    length_share: float = Field(default=0.0, ge=0.0, le=1.0, allow_inf_nan=False)
    """Requests that end because they have as many tokens as they asked for, which the device knows nothing of. The
    others end with an end token, behind which the device accepts nothing."""
    seed: int = Field(default=0, ge=0, le=INT64_MAX)
    """Of who is cancelled when, and who ends how."""
    slo_ttft_ms: float = Field(default=2000.0, gt=0.0, allow_inf_nan=False)
    """Goodput counts requests whose first token came within this,"""
    slo_tpot_ms: float = Field(default=50.0, gt=0.0, allow_inf_nan=False)
    """and whose later tokens took no longer than this each, on average."""

    @model_validator(mode="after")
    def _go_together(self) -> Self:
        if self.cache_outputs and not self.prefix_cache:
            raise ValueError("cache_outputs = True needs prefix_cache = True")
        return self

    @property
    def keeps_boundaries(self) -> bool:
        """Steps write boundary checkpoints: the manager's ``block_size`` is set."""
        return self.prefix_cache and (self.cache_outputs or self.prefill == "rows")
