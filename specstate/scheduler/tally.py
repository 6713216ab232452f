"""What a run counts, and the equations that must hold between the counts when it is over."""

from dataclasses import dataclass

from specstate.errors import SpecStateError
from specstate.metrics import Metrics


class ConservationError(SpecStateError):
    """Counts of a run do not add up: a fault of the simulator or of the manager."""


@dataclass(slots=True)
class Tally:
    """Counted by the simulator itself, apart from what the manager counts."""

    arrived: int = 0
    finished: int = 0
    cancelled: int = 0
    refused: int = 0
    """Longer than any capacity."""
    input_tokens: int = 0
    """Of prompts that arrived."""
    output_tokens: int = 0
    """Sent to clients, those of requests that were cancelled later among them."""
    steps: int = 0
    prefills: int = 0
    """Prompts that were prefilled to their end, each of which gives one token; a request that was recomputed has
    more than one."""
    prefilled_tokens: int = 0
    restored_tokens: int = 0
    """Of prompts, found published."""
    windows: int = 0
    """That ended while their request was in them and had not met its end token."""
    accepted: int = 0
    """The sum of their num_accepted."""
    cut_tokens: int = 0
    """Accepted in the window in which a request ended, beyond its end."""
    late_tokens: int = 0
    """Accepted, or given by a prefill, after a request had ended or was cancelled, before the host knew of it."""
    late_prefills: int = 0
    """Of these, given by a prefill."""
    wasted_windows: int = 0
    """Verified after the end token: nothing was accepted."""
    dropped_windows: int = 0
    """Verified for a request that was cancelled before the step ended."""
    verified_tokens: int = 0
    """Of all windows, rejected drafts included."""
    full_windows: int = 0
    """Of max_query_len tokens, and so far from the end that it could not cut them."""
    full_accepted: int = 0
    folds: int = 0
    """By verify or by the end of a step, boundaries left out."""
    boundary_folds: int = 0
    recomputed: int = 0
    """Preemptions by release."""
    retracted: int = 0
    """Preemptions to the host."""
    hits: int = 0
    lookups: int = 0
    """Prompts that could have found a prefix."""
    published: int = 0
    unpublished: int = 0
    """States that found no slot."""

    @property
    def preemptions(self) -> int:
        return self.recomputed + self.retracted

    @property
    def committed_tokens(self) -> int:
        """Of windows, that were of use to somebody."""
        return self.accepted - self.cut_tokens - (self.late_tokens - self.late_prefills)


def check_conservation(tally: Tally, metrics: Metrics) -> None:
    """At the end of a run, before published states are dropped. Raises ConservationError with both sides."""
    folds = metrics.folds
    for what, left, right in (
        (
            "requests in and finished + cancelled + refused",
            tally.arrived,
            tally.finished + tally.cancelled + tally.refused,
        ),
        (
            "output tokens and prefills + accepted - cut - late",
            tally.output_tokens,
            tally.prefills + tally.accepted - tally.cut_tokens - tally.late_tokens,
        ),
        ("windows and the manager's", tally.windows, metrics.windows),
        ("accepted tokens and the manager's", tally.accepted, metrics.windows + metrics.accepted_tokens),
        ("wasted windows and the manager's", tally.wasted_windows, metrics.wasted_windows),
        ("dropped windows and the manager's late ends", tally.dropped_windows, metrics.late_ends_dropped),
        ("folds and the manager's", tally.folds, folds.at_end + folds.when_full + folds.in_verify),
        ("folds at boundaries and the manager's", tally.boundary_folds, folds.at_boundary),
        ("retracted requests and the manager's preemptions", tally.retracted, metrics.preemptions),
        ("prefix hits and the manager's", tally.hits, metrics.prefix_hits),
        ("clamped counts and none", metrics.clamps, 0),
        ("record slots in use and none", metrics.record_slots_in_use, 0),
        ("checkpoint slots in use and published states", metrics.checkpoint_slots_in_use, metrics.published_slots),
    ):
        if left != right:
            raise ConservationError(f"conservation: {what} differ: {left} and {right}")
