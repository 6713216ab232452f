"""Results of ``specstate bench gpu`` as a picture: how much of the memory's bandwidth each step reaches.

A step's work is its byte floor, and what a step achieves is that over its time. Arithmetic intensity would say little:
every shape has nearly the same. So the bytes are the abscissa: they tell small steps, which wait for launches and for
one another, from large ones, which wait for the memory. Reading and copying the same states in the same run, drawn at
the bytes that they move, is what a kernel can reach at that size.
"""

import importlib.util
from pathlib import Path
from typing import Any

from specstate.bench.results import BenchReport, BenchResult
from specstate.errors import SpecStateError, shown

MISSING = "a plot needs matplotlib: install the extra specstate[plot]"

#: Told apart by people who see few colours (Okabe and Ito).
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00")
READ, COPY, GREY = "#777777", "#AAAAAA", "#444444"

Curve = list[tuple[float, float]]


def check_plot(path: str) -> None:
    """Raises SpecStateError when matplotlib is missing or ``path`` is no place for a picture."""
    if importlib.util.find_spec("matplotlib") is None:
        raise SpecStateError(MISSING)
    if Path(path).suffix not in (".png", ".svg", ".pdf"):
        raise SpecStateError(f"picture {shown(path)} must end in .png, .svg or .pdf")
    if not Path(path).absolute().parent.is_dir():
        raise SpecStateError(f"cannot write {shown(path)}: its folder is not there")


def achieved(result: BenchResult) -> tuple[float, float]:
    """The floor's bytes of a whole step, and those bytes a second."""
    return float(result.floor_bytes), result.floor_bytes / (result.ms * 1e-3)


def read_curve(report: BenchReport) -> Curve:
    """Bytes and bytes a second of reading the states, by size; the best where a size was measured again."""
    return _best((r.state_bytes, r.state_bytes / (r.read_ms * 1e-3)) for r in _widest(report))


def copy_curve(report: BenchReport) -> Curve:
    """The same of copying them, which moves each byte twice."""
    return _best((2 * r.state_bytes, 2 * r.state_bytes / (r.copy_ms * 1e-3)) for r in _widest(report))


def _widest(report: BenchReport) -> list[BenchResult]:
    """Results with float32 states, if there are any: torch, which reads and copies here, is slower with narrow ones."""
    wide = [result for result in report.results if result.shape.checkpoint_dtype == "float32"]
    return wide or list(report.results)


def draw(report: BenchReport, path: str) -> None:
    """Writes the picture: a panel a policy, a mark a shape, its rows beside it."""
    check_plot(path)
    if not report.results:
        raise SpecStateError("there are no results to draw")
    try:
        from matplotlib.figure import Figure
    except ImportError as error:  # of whatever it needs
        raise SpecStateError(f"{MISSING} ({error})") from error

    policies = list(dict.fromkeys(result.policy for result in report.results))
    models = list(dict.fromkeys(_model(result) for result in report.results))
    figure = Figure(figsize=(1.2 + 4.6 * len(policies), 5.6), layout="constrained")
    panels = figure.subplots(1, len(policies), sharex=True, sharey=True, squeeze=False)[0]
    for panel, policy in zip(panels, policies, strict=True):
        _draw_limits(panel, report)
        for colour, model in zip(_colours(len(models)), models, strict=True):
            for dtype in ("float32", "bfloat16"):
                results = [
                    r
                    for r in report.results
                    if (r.policy, _model(r), r.shape.checkpoint_dtype) == (policy, model, dtype)
                ]
                if results:
                    _draw_steps(panel, results, colour, f"{model}, {dtype}")
        panel.set_title(policy, fontsize=11)
        panel.set_xlabel("byte floor of a step, MB")
    panels[0].set_ylabel("floor bytes / time, TB/s")
    top = max([report.floor_bytes_per_s, *(y for _, y in [*read_curve(report), *copy_curve(report)])])
    panels[0].set_ylim(0.0, 1.12 * top / 1e12)
    handles, labels = _legend(panels)
    figure.legend(handles, labels, loc="outside lower center", ncols=4, fontsize=8, frameon=False)
    figure.suptitle(
        f"Whole speculative steps, conv and folds included: {report.gpu}, {report.date[:10]}, "
        f"torch {report.versions.get('torch', '?')}, triton {report.versions.get('triton', '?')}\n"
        "numbers beside the marks: rows",
        fontsize=10,
    )
    try:
        figure.savefig(path, dpi=150)
    except OSError as error:
        raise SpecStateError(f"cannot write {shown(path)}: {error}") from error


def _draw_limits(panel: Any, report: BenchReport) -> None:
    limit = report.floor_bytes_per_s / 1e12
    panel.axhline(
        limit, color=GREY, linestyle="--", linewidth=1.0, label=f"what the floor divides by: {limit:.2f} TB/s"
    )
    for curve, colour, style, name in (
        (read_curve(report), READ, "-", "reading the states"),
        (copy_curve(report), COPY, "-.", "copying the states, read and written"),
    ):
        panel.plot([x / 1e6 for x, _ in curve], [y / 1e12 for _, y in curve], style, color=colour, label=name, zorder=1)
    panel.set_xscale("log")
    panel.grid(True, which="major", color="#E6E6E6", linewidth=0.6)
    panel.set_axisbelow(True)


def _draw_steps(panel: Any, results: list[BenchResult], colour: str, label: str) -> None:
    points = sorted((*achieved(result), result.shape.rows) for result in results)
    if len(points) == 1:  # which needs no number beside it
        label = f"{label}, {points[0][2]} rows"
    narrow = results[0].shape.checkpoint_dtype == "bfloat16"
    panel.plot(
        [x / 1e6 for x, _, _ in points],
        [y / 1e12 for _, y, _ in points],
        marker="s" if narrow else "o",
        markersize=6,
        markerfacecolor="white" if narrow else colour,
        color=colour,
        linewidth=0.9,
        linestyle=":" if narrow else "-",
        label=label,
        zorder=3,
    )
    for x, y, rows in points if len(points) > 1 else ():
        offset = (6, -11) if narrow else (-6, 6)
        panel.annotate(
            str(rows),
            (x / 1e6, y / 1e12),
            xytext=offset,
            textcoords="offset points",
            ha="left" if narrow else "right",
            fontsize=7,
            color=colour,
        )


def _legend(panels: Any) -> tuple[list[Any], list[str]]:
    """Each label once, over all panels."""
    found: dict[str, Any] = {}
    for panel in panels:
        for handle, label in zip(*panel.get_legend_handles_labels(), strict=True):
            found.setdefault(label, handle)
    return [*found.values()], [*found]


def _model(result: BenchResult) -> str:
    shape = result.shape
    return f"H = {shape.num_heads}, {shape.layers} layers, T = {shape.max_query_len}"


def _colours(count: int) -> list[str]:
    return [COLOURS[place % len(COLOURS)] for place in range(count)]


def _best(points: Any) -> Curve:
    best: dict[int, float] = {}
    for size, rate in points:
        best[size] = max(rate, best.get(size, 0.0))
    return sorted((float(size), rate) for size, rate in best.items())
