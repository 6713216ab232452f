"""Results of ``specstate bench gpu`` as a Markdown table, for documents."""

from specstate.bench.results import BenchReport, BenchResult, StepFigures

LEGEND = (
    "ms: median of a whole step over all layers; floor: its bytes at {bandwidth:.2f} TB/s; S0: fla-core with a "
    "snapshot a token, no conv, scaled from the layers in brackets; x S0: S0 / ms; with bfloat16 checkpoints also "
    "beside S0 in float32; bare: the same step without a conv."
)
LONG: tuple[str, ...] = (
    *("shape", "policy", "path", "ms", "floor ms", "/ floor", "S0 ms", "x S0", "x S0 fp32"),
    *("bare ms", "bare / floor", "bare x S0", "bare x S0 fp32", "kernels ms", "launches", "host us a layer"),
)
SHORT: tuple[str, ...] = (
    "shape",
    "policy",
    "ms",
    "/ floor",
    "x S0",
    "x S0 fp32",
    "bare / floor",
    "bare x S0",
    "bare x S0 fp32",
)


def markdown(report: BenchReport, short: bool = False) -> str:
    """What it was measured on, the table, what the columns are, and what was not measured."""
    names = SHORT if short else LONG
    cells = [_cells(result) for result in report.results]
    if not any(row["x S0 fp32"] != "-" for row in cells):
        names = tuple(name for name in names if not name.endswith("fp32"))
    lines = [_line(names), _line(["---", "---", *("---:" for _ in names[2:])])]
    lines += [_line([row[name] for name in names]) for row in cells]
    versions = ", ".join(f"{name} {text}" for name, text in report.versions.items())
    parts = [f"{report.gpu}; {versions}; {report.date}", "\n".join(lines)]
    parts.append(LEGEND.format(bandwidth=report.floor_bytes_per_s / 1e12))
    if report.notes:
        parts.append("\n".join(f"- {note}" for note in report.notes))
    return "\n\n".join(parts)


def _cells(result: BenchResult) -> dict[str, str]:
    bare = result.without_conv
    return {
        "shape": result.shape.name,
        "policy": result.policy,
        "path": result.path,
        "S0 ms": "-" if result.s0_ms is None else f"{result.s0_ms:.3f} ({result.s0_layers})",
        "kernels ms": _by_kernel(result.kernel_ms, "{} {:.3f}"),
        "launches": _by_kernel(result.kernel_launches, "{1:g} {0}"),
        "host us a layer": _number(result.host_us_per_layer, 1),
        **_step_cells(result, ""),
        **_step_cells(bare, "bare "),
    }


def _step_cells(step: StepFigures, prefix: str) -> dict[str, str]:
    return {
        f"{prefix}ms": f"{step.ms:.3f}",
        f"{prefix}floor ms": f"{step.floor_ms:.3f}",
        f"{prefix}/ floor": f"{step.ratio_to_floor:.2f}",
        f"{prefix}x S0": _number(step.ratio_to_s0, 2),
        f"{prefix}x S0 fp32": _number(step.ratio_to_s0_fp32, 2),
    }


def _by_kernel(figures: dict[str, float], form: str) -> str:
    return ", ".join(form.format(name, figure) for name, figure in figures.items()) or "-"


def _number(figure: float | None, digits: int) -> str:
    return "-" if figure is None else f"{figure:.{digits}f}"


def _line(cells: "list[str] | tuple[str, ...]") -> str:
    return f"| {' | '.join(cells)} |"
