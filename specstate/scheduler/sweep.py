"""Several choices side by side, and the best of them: the fastest of those that serve most requests within the SLO."""

from collections.abc import Sequence
from typing import Any

from specstate.plan_report import size_text
from specstate.scheduler.report import Report
from specstate.tables import aligned

HEADER = (
    *("policy", "T", "fit", "memory", "tokens/s", "goodput/s", "in SLO", "TTFT p50", "p99", "TPOT p50", "p99"),
    *("batch", "state"),
)


#: Choices whose requests within the SLO differ by less are alike: of 1,000 requests another seed moves as many.
ALIKE = 0.02

#: With a smaller share of requests within the SLO, a deployment has more to do than it can.
LEAST_ATTAINMENT = 0.5


def best(reports: Sequence[Report]) -> int:
    """Index of the report with the most throughput, then the least memory a request, of those that are alike.

    Not by goodput a second: all have the same requests, and a run that ends earlier serves no more of them.
    """
    return max(_nearly_most(reports), key=lambda i: (reports[i].throughput, -reports[i].slots.request_bytes, -i))


def alike(reports: Sequence[Report]) -> list[int]:
    """Indices of the other choices that serve as many requests within the SLO, within ALIKE."""
    chosen = best(reports)
    return [i for i in _nearly_most(reports) if i != chosen]


def _nearly_most(reports: Sequence[Report]) -> list[int]:
    served = [report.outcome.meter.good_requests for report in reports]
    return [i for i, good in enumerate(served) if good >= (1 - ALIKE) * max(served)]


def sweep_json(reports: Sequence[Report], failed: Sequence[str]) -> dict[str, Any]:
    """One JSON object: the best choice's own, all choices, and why others could not be simulated."""
    chosen = reports[best(reports)]
    return {
        **chosen.to_json(),
        "best": _choice(chosen),
        "alike": [_choice(reports[i]) for i in alike(reports)],
        "choices": [report.to_json() for report in reports],
        "not_possible": list(failed),
    }


def _choice(report: Report) -> dict[str, Any]:
    return {"policy": report.policy, "max_query_len": report.max_query_len}


def sweep_text(reports: Sequence[Report], failed: Sequence[str]) -> str:
    """A table, a line a choice, the best one marked and those that are alike."""
    chosen, close = best(reports), alike(reports)
    rows = [HEADER, *(_row(report) for report in reports)]
    lines = aligned(rows)
    for choice, mark in ((chosen, "best"), *((other, "alike") for other in close)):
        lines[choice + 1] += f"  <- {mark}"
    report = reports[chosen]
    meter, setup = report.outcome.meter, report.outcome.setup
    lines += [
        "",
        f"best: policy {report.policy}, windows of {report.max_query_len}: {report.goodput:.3f} requests a second with "
        f"the first token within {meter.slo_ttft_ms:g} ms and {meter.slo_tpot_ms:g} ms a token after it, at "
        f"{size_text(report.slots.request_bytes)} a request",
        *(
            [f"alike: as many requests within these limits, to {ALIKE:.0%}; the best has most throughput of them"]
            if close
            else []
        ),
        *([_overload(report)] if report.attainment < LEAST_ATTAINMENT else []),
        f"times in ms; {report.model}, {report.tp}-way tensor parallel; {report.workload}",
        f"calibration: {setup.calibration.source}",
        f"rest of the model: {setup.cost.source}",
        *(f"not possible: {reason}" for reason in failed),
    ]
    return "\n".join(lines)


def _overload(report: Report) -> str:
    return (
        f"overloaded: even so, only {report.attainment:.1%} of the requests are served within these limits; fewer "
        "requests (--rate-factor, --requests-per-s), more ranks or other limits tell more"
    )


def _row(report: Report) -> tuple[str, ...]:
    values = report.to_json()
    ttft, tpot = values["ttft_ms"], values["tpot_ms"]
    times = (ttft["p50"], ttft["p99"], tpot["p50"], tpot["p99"])
    return (
        report.policy,
        str(report.max_query_len),
        str(report.slots.num_fitting),
        size_text(report.slots.request_bytes),
        f"{report.throughput:,.0f}",
        f"{report.goodput:.3f}",
        f"{report.attainment:.1%}",
        *("-" if ms is None else f"{ms:,.1f}" for ms in times),
        f"{report.mean_batch:.1f}",
        f"{report.state_share:.1%}",
    )
