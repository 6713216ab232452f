"""A picture of one run or of several choices. Needs matplotlib: ``pip install 'specstate[plot]'``."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from specstate.errors import SpecStateError
from specstate.scheduler.meter import moving_rate, quantiles
from specstate.scheduler.report import Report
from specstate.scheduler.sweep import best

_COLOURS = {"snapshots": "#8c8c8c", "eager": "#d1495b", "deferred": "#2e86ab", "ring": "#3a9d5d"}
_WINDOWED_SHARE = 40
"""Moving averages go over this part of the run."""


def check_plot(path: str | os.PathLike[str]) -> None:
    """For before a long run: raises what ``plot`` would raise after it. Leaves no file behind."""
    try:
        import matplotlib.figure  # noqa: F401
    except ImportError:
        raise SpecStateError("--plot needs matplotlib: install the extra specstate[plot]") from None
    target = Path(path)
    was_there = target.exists()
    try:
        target.open("ab").close()
        if not was_there:
            target.unlink()
    except OSError as error:
        raise SpecStateError(f"{os.fspath(path)}: cannot be written: {error.strerror}") from None


def plot(reports: Sequence[Report], path: str | os.PathLike[str]) -> None:
    """Writes a PNG: the best run over time, and beside it the choices where there are several.

    Raises SpecStateError when matplotlib is not there or the file cannot be written.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        raise SpecStateError("--plot needs matplotlib: install the extra specstate[plot]") from None
    chosen = reports[best(reports)]
    several = len(reports) > 1
    figure = Figure(figsize=(15 if several else 11, 9), layout="constrained", dpi=110)
    FigureCanvasAgg(figure)
    figure.suptitle(
        f"{chosen.model}, TP {chosen.tp}: policy {chosen.policy}, windows of {chosen.max_query_len}\n{chosen.workload}",
        fontsize=12,
    )
    axes: Any = figure.subplots(3, 2 if several else 1, squeeze=False, width_ratios=[3, 2] if several else None)
    _throughput(axes[0][0], chosen)
    _latency(axes[1][0], chosen)
    _occupancy(axes[2][0], chosen)
    if several:
        _choices(axes[0][1], reports, "requests a second\nwithin the SLO", lambda report: report.goodput)
        _choices(axes[1][1], reports, "time per output token,\nmedian (ms)", _median_tpot_ms)
        _choices(axes[2][1], reports, "requests that fit", lambda report: report.slots.num_fitting)
    try:
        figure.savefig(path, format="png")
    except OSError as error:
        raise SpecStateError(f"{os.fspath(path)}: cannot be written: {error.strerror}") from None


def _throughput(axis: Any, report: Report) -> None:
    samples = report.outcome.meter.samples
    rates = moving_rate(samples, max(1e3 * report.seconds / _WINDOWED_SHARE, 1.0))
    axis.plot([ms / 1e3 for ms, _ in rates], [rate for _, rate in rates], color="#2e86ab")
    axis.axhline(report.throughput, color="#2e86ab", linestyle=":", linewidth=1)
    axis.annotate(
        f"mean {report.throughput:,.0f}",
        (1.0, report.throughput),
        xycoords=("axes fraction", "data"),
        xytext=(-4, 3),
        textcoords="offset points",
        ha="right",
        fontsize=8,
        bbox={"facecolor": "white", "alpha": 0.75, "linewidth": 0, "pad": 1},
    )
    _dress(axis, report, "output tokens a second")
    axis.set_ylim(bottom=0)


def _latency(axis: Any, report: Report) -> None:
    meter = report.outcome.meter
    for name, colour, dark, at_ms, times_ms, slo_ms in (
        ("first token", "#d1495b", "#7a1f2b", meter.finished_ms, meter.ttft_ms, meter.slo_ttft_ms),
        ("each later token", "#2e86ab", "#174a60", meter.tpot_finished_ms, meter.tpot_ms, meter.slo_tpot_ms),
    ):
        points = sorted((at / 1e3, ms / 1e3) for at, ms in zip(at_ms, times_ms, strict=True))
        axis.scatter(*zip(*points, strict=True), s=4, alpha=0.3, color=colour, linewidths=0) if points else None
        medians = _medians(points)
        axis.plot([at for at, _ in medians], [time for _, time in medians], color=dark, linewidth=1.5, label=name)
        axis.axhline(slo_ms / 1e3, color=colour, linestyle="--", linewidth=1)
    axis.set_yscale("log")
    axis.yaxis.set_major_formatter("{x:g}")
    _dress(axis, report, "seconds to a token\n(points, median; SLO dashed)")
    axis.legend(loc="lower right", bbox_to_anchor=(1, 1), frameon=False, fontsize=8, ncols=2)


def _medians(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Of successive parts of some points in the order of time, each at the time of its middle."""
    width = max(1, len(points) // _WINDOWED_SHARE)
    parts = [points[start : start + width] for start in range(0, len(points), width)]
    return [(part[len(part) // 2][0], sorted(time for _, time in part)[len(part) // 2]) for part in parts]


def _occupancy(axis: Any, report: Report) -> None:
    samples, config = report.outcome.meter.samples, report.slots.config
    seconds = [sample.ms / 1e3 for sample in samples]
    lines = (
        ("record slots", "#3a9d5d", [sample.record_slots / config.max_requests for sample in samples]),
        ("checkpoint slots", "#2e86ab", [sample.checkpoint_slots / config.num_checkpoints for sample in samples]),
    )
    for name, colour, shares in lines:
        axis.plot(seconds, [100 * share for share in shares], label=name, color=colour)
    axis.set_ylim(-3, 103)
    _dress(axis, report, "slots in use (%)")
    queue = axis.twinx()
    waiting = [sample.waiting for sample in samples]
    area = queue.fill_between(seconds, waiting, label="waiting", color="#8c8c8c", alpha=0.35, linewidth=0)
    queue.set_ylabel("requests waiting")
    queue.set_ylim(0, 1.05 * max(1, *waiting))
    queue.yaxis.get_major_locator().set_params(integer=True)
    queue.spines["top"].set_visible(False)
    axis.set_zorder(queue.get_zorder() + 1)  # lines before the area
    axis.patch.set_visible(False)
    handles = [*axis.get_lines(), area]
    axis.legend(handles=handles, loc="lower right", bbox_to_anchor=(1, 1), frameon=False, fontsize=8, ncols=3)
    axis.set_xlabel("simulated time (s)")


def _choices(axis: Any, reports: Sequence[Report], label: str, value: Any) -> None:
    """Bars: a group a window length, a bar a policy."""
    windows = sorted({report.max_query_len for report in reports})
    policies = list(dict.fromkeys(report.policy for report in reports))
    width = 0.8 / len(policies)
    for place, policy in enumerate(policies):
        found = {report.max_query_len: value(report) for report in reports if report.policy == policy}
        at = [windows.index(window) + (place - (len(policies) - 1) / 2) * width for window in found]
        bars = axis.bar(at, list(found.values()), width * 0.92, label=policy, color=_COLOURS[policy])
        if len(windows) * len(policies) <= 16:
            axis.bar_label(bars, fmt=_figure, fontsize=7, padding=1)
    axis.set_xticks(range(len(windows)), [f"T = {window}" for window in windows])
    axis.set_ylabel(label)
    axis.margins(y=0.12)
    for side in ("top", "right"):
        axis.spines[side].set_visible(False)
    if label.startswith("requests a second"):
        axis.legend(frameon=False, fontsize=8, ncols=len(policies), loc="lower center", bbox_to_anchor=(0.5, 1.0))


def _figure(value: float) -> str:
    return f"{value:,.0f}" if value >= 10 else f"{value:.2f}"


def _median_tpot_ms(report: Report) -> float:
    return quantiles(report.outcome.meter.tpot_ms).p50 or 0.0


def _dress(axis: Any, report: Report, label: str) -> None:
    axis.set_ylabel(label)
    axis.set_xlim(0, report.seconds or 1.0)
    axis.grid(axis="y", alpha=0.25)
    axis.spines["top"].set_visible(False)
