"""Latencies and loads of a run, gathered while it goes."""

from array import array
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from specstate.scheduler.session import Session


class Quantiles(NamedTuple):
    """Of times in milliseconds; by the nearest rank, so every one is a time that occurred. None of nothing."""

    p50: float | None
    p90: float | None
    p99: float | None


def quantiles(values: Sequence[float]) -> Quantiles:
    """The smallest value that at least 50, 90, 99 % of all do not exceed."""
    ordered = sorted(values)
    if not ordered:
        return Quantiles(None, None, None)
    return Quantiles(*(ordered[-(-len(ordered) * share // 100) - 1] for share in (50, 90, 99)))


class Sample(NamedTuple):
    """The engine at one moment."""

    ms: float
    output_tokens: int
    running: int
    waiting: int
    record_slots: int
    checkpoint_slots: int
    published: int


@dataclass(slots=True)
class Meter:
    """What clients see, and how full the engine is. Times are simulated milliseconds."""

    slo_ttft_ms: float
    slo_tpot_ms: float
    ttft_ms: "array[float]" = field(default_factory=lambda: array("d"))
    tpot_ms: "array[float]" = field(default_factory=lambda: array("d"))
    finished_ms: "array[float]" = field(default_factory=lambda: array("d"))
    """When the requests of ``ttft_ms`` had finished."""
    tpot_finished_ms: "array[float]" = field(default_factory=lambda: array("d"))
    """The same for ``tpot_ms``, where requests of one token are not among."""
    gaps_ms: "array[float]" = field(default_factory=lambda: array("d"))
    """Between two deliveries to a client, one a window: its tokens come together."""
    samples: list[Sample] = field(default_factory=list)
    good_requests: int = 0
    """Finished within the SLO."""
    good_tokens: int = 0
    row_steps: int = 0
    """Windows and prompts in all steps."""
    window_steps: int = 0
    """Steps with at least one window."""
    window_rows: int = 0
    busy_ms: float = 0.0
    state_ms: float = 0.0
    """Of ``busy_ms``, state management."""
    end_ms: float = 0.0
    """When the last token was there."""

    def deliver(self, session: Session, ms: float) -> None:
        """Tokens of one step reach the client."""
        if session.first_token_ms < 0.0:
            session.first_token_ms = ms
        else:
            self.gaps_ms.append(ms - session.last_token_ms)
        session.last_token_ms = ms
        if ms > self.end_ms:
            self.end_ms = ms

    def finish(self, session: Session) -> None:
        """A request has all of its tokens."""
        ttft_ms = session.first_token_ms - session.request.arrival_ms
        count = session.request.output_len
        tpot_ms = (session.last_token_ms - session.first_token_ms) / (count - 1) if count > 1 else 0.0
        self.ttft_ms.append(ttft_ms)
        self.finished_ms.append(session.last_token_ms)
        if count > 1:
            self.tpot_ms.append(tpot_ms)
            self.tpot_finished_ms.append(session.last_token_ms)
        if ttft_ms <= self.slo_ttft_ms and tpot_ms <= self.slo_tpot_ms:
            self.good_requests += 1
            self.good_tokens += count


def moving_rate(samples: Sequence[Sample], window_ms: float) -> list[tuple[float, float]]:
    """(ms, output tokens per second over the ``window_ms`` before)."""
    times = [sample.ms for sample in samples]
    rates = []
    for index, sample in enumerate(samples):
        first = bisect_left(times, sample.ms - window_ms)
        begin = samples[first]
        if index > first and sample.ms > begin.ms:
            rates.append((sample.ms, 1e3 * (sample.output_tokens - begin.output_tokens) / (sample.ms - begin.ms)))
    return rates
