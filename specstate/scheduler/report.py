"""What a run says: one JSON object, or a table for a person. The same run gives the same bytes."""

from dataclasses import asdict, dataclass
from typing import Any

from specstate.plan_report import size_text
from specstate.scheduler.capacity import Slots
from specstate.scheduler.meter import Quantiles, quantiles
from specstate.scheduler.simulator import Outcome


@dataclass(frozen=True, slots=True)
class Report:
    """One run, in figures. Times are simulated; ``_ms`` are milliseconds, shares are of 1."""

    model: str
    tp: int
    policy: str
    max_query_len: int
    outcome: Outcome
    slots: Slots
    workload: str
    skipped_lines: int
    first_skipped: tuple[str, ...]

    @property
    def seconds(self) -> float:
        """From the first arrival to the last token."""
        return self.outcome.meter.end_ms / 1e3

    @property
    def throughput(self) -> float:
        """Output tokens a second."""
        return self.outcome.tally.output_tokens / self.seconds if self.seconds else 0.0

    @property
    def goodput(self) -> float:
        """Requests a second that finished within the SLO."""
        return self.outcome.meter.good_requests / self.seconds if self.seconds else 0.0

    @property
    def attainment(self) -> float:
        """Finished requests that were within the SLO; 0 without any."""
        finished = self.outcome.tally.finished
        return self.outcome.meter.good_requests / finished if finished else 0.0

    @property
    def state_share(self) -> float:
        """State management, of the time that steps took."""
        meter = self.outcome.meter
        return meter.state_ms / meter.busy_ms if meter.busy_ms else 0.0

    @property
    def mean_batch(self) -> float:
        """Windows of a step that has any."""
        meter = self.outcome.meter
        return meter.window_rows / meter.window_steps if meter.window_steps else 0.0

    @property
    def full_window_acceptance(self) -> float | None:
        """Accepted tokens of a full window that no end could have cut; None without one."""
        tally = self.outcome.tally
        return tally.full_accepted / tally.full_windows if tally.full_windows else None

    @property
    def wasted_share(self) -> float:
        """Verified tokens that nobody got: rejected drafts, what lay behind an end, windows of who had ended."""
        tally = self.outcome.tally
        return 1.0 - tally.committed_tokens / tally.verified_tokens if tally.verified_tokens else 0.0

    @property
    def occupancy(self) -> dict[str, float]:
        """Means over the samples: shares of slots in use, and bytes."""
        samples, config = self.outcome.meter.samples, self.slots.config
        count = max(1, len(samples))
        records = sum(sample.record_slots for sample in samples) / count
        checkpoints = sum(sample.checkpoint_slots for sample in samples) / count
        most = max((self.slots.held_bytes(s.record_slots, s.checkpoint_slots) for s in samples), default=0.0)
        return {
            "record_slots": records / config.max_requests,
            "checkpoint_slots": checkpoints / config.num_checkpoints,
            "mean_bytes_held": round(self.slots.held_bytes(records, checkpoints)),
            "most_bytes_held": round(most),
        }

    def to_json(self) -> dict[str, Any]:
        """One JSON object."""
        outcome, tally, meter = self.outcome, self.outcome.tally, self.outcome.meter
        setup, config, metrics = outcome.setup, self.slots.config, self.outcome.metrics
        return {
            "model": self.model,
            "tp": self.tp,
            "policy": self.policy,
            "max_query_len": self.max_query_len,
            "record_capacity": config.record_capacity,
            "requests_that_fit": self.slots.num_fitting,
            "max_requests": config.max_requests,
            "num_checkpoints": config.num_checkpoints,
            "bytes_per_request": self.slots.request_bytes,
            "total_bytes": self.slots.total_bytes,
            "workload": self.workload,
            "skipped_lines": self.skipped_lines,
            "requests": tally.arrived,
            "finished": tally.finished,
            "cancelled": tally.cancelled,
            "refused": tally.refused,
            "refusals": list(outcome.refusals),
            "simulated_s": self.seconds,
            "output_tokens": tally.output_tokens,
            "accepted_tokens": metrics.accepted_tokens,
            "mean_acceptance_length": metrics.mean_acceptance_length,
            "full_window_acceptance_length": self.full_window_acceptance,
            "expected_acceptance_length": setup.acceptance.mean_acceptance_length(setup.drafts.max_drafts),
            "throughput_tokens_per_s": self.throughput,
            "goodput_requests_per_s": self.goodput,
            "slo": {
                "ttft_ms": meter.slo_ttft_ms,
                "tpot_ms": meter.slo_tpot_ms,
                "attainment": self.attainment,
                "tokens_per_s": meter.good_tokens / self.seconds if self.seconds else 0.0,
            },
            "ttft_ms": quantiles(meter.ttft_ms)._asdict(),
            "tpot_ms": quantiles(meter.tpot_ms)._asdict(),
            "inter_token_ms": quantiles(meter.gaps_ms)._asdict(),
            "steps": tally.steps,
            "mean_batch": self.mean_batch,
            "occupancy": self.occupancy,
            "folds": asdict(metrics.folds) | {"per_step": sum(asdict(metrics.folds).values()) / max(1, tally.steps)},
            "wasted_verify_share": self.wasted_share,
            "tokens": {
                "verified": tally.verified_tokens,
                "accepted": tally.accepted,
                "cut": tally.cut_tokens,
                "late": tally.late_tokens,
                "prefills": tally.prefills,
                "prefilled": tally.prefilled_tokens,
                "restored": tally.restored_tokens,
            },
            "windows": {
                "ended": tally.windows,
                "wasted": tally.wasted_windows,
                "dropped": tally.dropped_windows,
            },
            "preemptions": tally.preemptions,
            "recomputed": tally.recomputed,
            "retracted": tally.retracted,
            "prefix_hits": tally.hits,
            "prefix_lookups": tally.lookups,
            "prefix_published": tally.published,
            "prefix_evictions": metrics.prefix_evictions,
            "state_management_share": self.state_share,
            "calibration": setup.calibration.source,
            "calibrated": setup.calibration.is_measured,
            "cost": setup.cost.model_dump(),
            "settings": setup.settings.model_dump(),
        }

    def to_text(self) -> str:
        """The same for a person."""
        outcome, tally, meter = self.outcome, self.outcome.tally, self.outcome.meter
        setup, config, metrics = outcome.setup, self.slots.config, self.outcome.metrics
        folds, occupancy = asdict(metrics.folds), self.occupancy
        lines = [
            f"{self.model}, {self.tp}-way tensor parallel, one rank; policy {self.policy}, windows of "
            f"{self.max_query_len}, R = {config.record_capacity}",
            f"{self.slots.num_fitting:,} requests of {size_text(self.slots.request_bytes)} fit; simulated with "
            f"{config.max_requests:,} record and {config.num_checkpoints:,} checkpoint slots, "
            f"{size_text(self.slots.total_bytes)}",
            f"{self.workload}: {tally.arrived:,} requests in {self.seconds:,.1f} s, {tally.steps:,} steps",
            "",
        ]
        rows = [
            ("requests", f"{tally.finished:,} finished, {tally.cancelled:,} cancelled, {tally.refused:,} refused"),
            ("output tokens", f"{tally.output_tokens:,} ({self.throughput:,.1f} a second)"),
            (
                "within the SLO",
                f"{self.attainment:.1%} of the finished, {self.goodput:.3f} requests a second (first token "
                f"{meter.slo_ttft_ms:g} ms, then {meter.slo_tpot_ms:g} ms a token)",
            ),
            ("time to first token", _times(quantiles(meter.ttft_ms))),
            ("time per output token", _times(quantiles(meter.tpot_ms))),
            ("between deliveries", _times(quantiles(meter.gaps_ms))),
            ("acceptance length", self._acceptance_text()),
            (
                "verify work wasted",
                f"{self.wasted_share:.1%} of {tally.verified_tokens:,} tokens; {tally.cut_tokens:,} tokens cut at an "
                f"end, {tally.late_tokens:,} came after one; {tally.wasted_windows:,} windows after an end token, "
                f"{tally.dropped_windows:,} dropped",
            ),
            ("batch", f"{self.mean_batch:.1f} windows a step on average"),
            (
                "slots in use",
                f"{occupancy['record_slots']:.1%} of record, {occupancy['checkpoint_slots']:.1%} of checkpoint slots; "
                f"{size_text(int(occupancy['mean_bytes_held']))} held on average, "
                f"{size_text(int(occupancy['most_bytes_held']))} at most",
            ),
            (
                "folds",
                f"{sum(folds.values()):,} ({sum(folds.values()) / max(1, tally.steps):.2f} a step): "
                + (
                    ", ".join(f"{count:,} {name.replace('_', ' ')}" for name, count in folds.items() if count) or "none"
                ),
            ),
            ("preemptions", f"{tally.recomputed:,} recomputed, {tally.retracted:,} retracted"),
            (
                "prefixes",
                f"{tally.hits:,} hits of {tally.lookups:,} look-ups, {tally.restored_tokens:,} of "
                f"{tally.restored_tokens + tally.prefilled_tokens:,} prompt tokens restored",
            ),
            ("state management", f"{self.state_share:.2%} of the time of steps"),
            ("calibration", setup.calibration.source),
            ("rest of the model", self._cost_text()),
        ]
        lines += [f"{name:<22} {text}" for name, text in rows]
        lines += [f"refused: {reason}" for reason in outcome.refusals]
        if self.skipped_lines:
            lines += [f"{self.skipped_lines:,} lines skipped, the first: {self.first_skipped[0]}"]
        return "\n".join(lines)

    def _acceptance_text(self) -> str:
        setup, full = self.outcome.setup, self.full_window_acceptance
        expected = setup.acceptance.mean_acceptance_length(setup.drafts.max_drafts)
        mean = self.outcome.metrics.mean_acceptance_length
        shown = "" if full is None else f"{full:.3f} over full windows (expected {expected:.3f}), "
        return f"{shown}{mean:.3f} over all with drafts"

    def _cost_text(self) -> str:
        cost = self.outcome.setup.cost
        return (
            f"{cost.step_ms:.3g} ms a step + {cost.ms_per_token:.3g} ms a token + {cost.ms_per_context_token:.3g} ms a "
            f"context token, prefill {cost.prefill_tokens_per_s:,.0f} tokens a second; {cost.source}"
        )


def _times(times: Quantiles) -> str:
    if times.p50 is None or times.p90 is None or times.p99 is None:
        return "none"
    return f"p50 {times.p50:,.1f} ms, p90 {times.p90:,.1f} ms, p99 {times.p99:,.1f} ms"
