"""What a manager counts, as plain numbers: drafts and how many of them hold, folds, slots, refusals.

Counts grow from the day that the manager was built; what says "now" goes up and down. Units are those of the field's
name: windows, tokens, requests, slots.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate


@dataclass(frozen=True, slots=True, kw_only=True)
class Folds:
    """Folds by their reason. One is all that a request had pending, brought into its checkpoint in every layer."""

    at_end: int
    """By the end of a step that folds whatever it has accepted: policy "eager", or a commit."""
    when_full: int
    """By the end of a step after which the next window might not fit into the records: policy "ring"."""
    by_mask: int
    """By the end of a step, for a row of the mask ``eager``."""
    at_boundary: int
    """By the end of a step that reached a boundary."""
    in_verify: int
    """By a verify, in its pass over the state: policy "deferred". Counted when its step ends, for those still in it."""
    by_flush: int
    """By a flush, and by whatever flushes first: a fence, a fold at preemption, a retraction."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Metrics:
    """What ``StateManager.metrics`` returns: a snapshot that stays as it is."""

    windows: int
    """Windows of decode rows that ended."""
    drafts: int
    """Those with at least one draft."""
    draft_tokens: int
    """Drafts in them: their lengths, without the first token of each."""
    accepted_tokens: int
    """Drafts that were accepted."""
    accepted_per_position: tuple[int, ...]
    """T - 1 counts, the first draft's first: windows in which the draft at that position was accepted."""
    folds: Folds
    """By their reason."""
    pending_rows: int
    """Live requests that have pending records now."""
    late_ends_dropped: int
    """Row ends that came after their request was released or preempted."""
    clamps: int
    """Accepted counts outside [min_accepted, query_len] that were clamped."""
    wasted_windows: int
    """Windows verified for a request that had already finished."""
    misplaced_rows: int
    """Rows of a block table whose position was not the request's; their line was not used."""
    record_slots_in_use: int
    """Record slots taken now."""
    checkpoint_slots_in_use: int
    """Checkpoint slots taken now, for whatever; the next three are among them."""
    boundary_slots: int
    """Requests' own, for their state at a boundary."""
    published_slots: int
    """Those that the prefix cache holds."""
    reserved_slots: int
    """Those that the caller holds for its block tables."""
    prefix_hits: int
    """Look-ups in the prefix cache that found a state."""
    prefix_misses: int
    """Look-ups that found none."""
    prefix_evictions: int
    """Published states that were given up for their slot."""
    preemptions: int
    """Requests preempted or retracted."""

    @property
    def mean_acceptance_length(self) -> float:
        """Tokens that a window with drafts yields, the next token included; 1 without any.

        1 + accepted_tokens / drafts, as vLLM computes it (vllm/v1/spec_decode/metrics.py).
        """
        return 1.0 + self.accepted_tokens / self.drafts if self.drafts else 1.0

    @property
    def acceptance_rate(self) -> float:
        """Accepted drafts by drafts, 0 to 1; 0 without any."""
        return self.accepted_tokens / self.draft_tokens if self.draft_tokens else 0.0


def per_position(accepted_hist: Sequence[int]) -> tuple[tuple[int, ...], int]:
    """``accepted_per_position`` and ``accepted_tokens`` of a histogram of accepted counts.

    accepted_hist[n]: windows with drafts of which n tokens were accepted, n = 0 .. T. A count includes the window's
    first token, so the draft at position i, from 0, was accepted where the count is at least i + 2.
    """
    at_least = [*accumulate(reversed(accepted_hist))][::-1]  # [n]: windows whose count is n or more
    accepted = tuple(at_least[2:])
    return accepted, sum(accepted)
