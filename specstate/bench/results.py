"""What ``specstate bench gpu`` found: typed, written and read as JSON, and as tables for a person."""

from importlib.resources import files
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from specstate.config import ActivationDtype, CheckpointDtype, FoldPolicy
from specstate.errors import SpecStateError, shown
from specstate.tables import aligned

Count = Annotated[int, Field(ge=1)]
Positive = Annotated[float, Field(gt=0.0, allow_inf_nan=False)]
NotNegative = Annotated[float, Field(ge=0.0, allow_inf_nan=False)]
Bytes = Annotated[int, Field(ge=0)]


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class ShapeFigures(_Frozen):
    """What was timed: one rank's layers, and a full window a row."""

    name: str
    num_heads: Count
    head_k_dim: Count
    head_v_dim: Count
    conv_kernel_size: int | None
    gate_lower_bound: float | None
    layers: Count
    rows: Count
    max_query_len: Count
    checkpoint_dtype: CheckpointDtype
    activation_dtype: ActivationDtype


class StepFigures(_Frozen):
    """A whole step over all layers. Times in milliseconds."""

    ms: Positive
    """Median of the replays."""
    mean_ms: Positive
    """Their mean: with few rows the median step folds nothing under "ring", and the mean has its share of folds."""
    floor_bytes: Annotated[int, Field(ge=1)]
    """Of the median step: the replay whose bytes are the lower median."""
    floor_ms: Positive
    ratio_to_floor: Positive
    """ms / floor_ms."""
    mean_floor_bytes: Positive
    s0_ms: Positive | None
    """S0 of as many layers, without a conv; None when it was not measured."""
    ratio_to_s0: Positive | None
    """s0_ms / ms: above 1, ours is faster."""
    s0_fp32_ms: Positive | None = None
    """Of bfloat16 checkpoints: S0 with float32 snapshots; None of others, and when it was not measured."""
    ratio_to_s0_fp32: Positive | None = None
    """s0_fp32_ms / ms."""
    floor_table: dict[str, Bytes]
    """``floor_bytes`` item by item; see bench/floor.py."""


class BenchResult(StepFigures):
    """One shape under one policy; its own figures are with the conv."""

    shape: ShapeFigures
    policy: FoldPolicy
    path: str
    """Which kernels ran."""
    record_capacity: Count
    kernel_ms: dict[str, NotNegative]
    """Of each kernel in a step, all its launches; means of a few replays. Empty when not profiled."""
    kernel_launches: dict[str, NotNegative] = {}
    """Launches of each kernel in a step."""
    host_us_per_layer: Positive | None = None
    """Host time of one ``verify`` without a graph, the device not waited for: median over layers and a few steps."""
    without_conv: StepFigures
    """The same step where the model convolves itself."""
    state_bytes: Count
    """The recurrent states of one step."""
    read_ms: Positive
    """Reading them once."""
    copy_ms: Positive
    """Copying them once."""
    sets: Count
    """Sets of requests that took turns, so that the L2 held no step's states."""
    replays: Count
    mean_accepted: Positive
    folds_per_step: NotNegative
    """Rows that were folded, by verify or by the step's end."""
    s0_layers: int | None
    """Layers of S0 that were timed; its times are scaled to ``layers``."""
    output_error: float | None
    """Largest relative difference of a layer's outputs from S0's with the same inputs; None: infinite, or no S0."""
    outputs_match: bool | None
    """Whether that is no more than the roundings of both; None without S0."""


class BenchReport(_Frozen):
    """All that one run found."""

    results: tuple[BenchResult, ...]
    gpu: str
    floor_bytes_per_s: Positive
    """What floor_ms divides by."""
    versions: dict[str, str]
    date: str
    notes: tuple[str, ...] = ()
    """What was not measured, and why."""

    def to_json(self) -> dict[str, Any]:
        """One JSON object."""
        return self.model_dump(mode="json")

    def to_text(self) -> str:
        """The same for a person: times, then kernels, then the floor's bytes."""
        versions = ", ".join(f"{name} {text}" for name, text in self.versions.items())
        lines = [
            f"{self.gpu}; {versions}; {self.date}",
            f"milliseconds of a whole step over all layers, CUDA graphs, medians; floor at "
            f"{self.floor_bytes_per_s / 1e12:.2f} TB/s; S0: fla-core, a snapshot a token, no conv, scaled from "
            "(layers); last columns: step / floor, S0 / step",
        ]
        if self.results:
            lines += ["", *aligned(_time_rows(self.results), 2), "", "kernels, milliseconds a step, conv included"]
            lines += [*aligned(_kernel_rows(self.results), 2), "", "the floor's bytes, MiB a step, conv included"]
            lines += aligned(_floor_rows(self.results), 2)
        return "\n".join([*lines, *self.notes])


def load_results(path: str | Path) -> BenchReport:
    """Reads the JSON of ``specstate bench gpu --json`` back.

    Raises SpecStateError for a file that is not there, is no JSON or is no such report; it names the file, and the
    field and its value.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeError, TypeError, ValueError) as error:
        raise SpecStateError(f"cannot read results from {shown(path)}: {error}") from error
    try:
        return BenchReport.model_validate_json(text)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        field = ".".join(map(str, first["loc"]))
        what = f"{field} = {shown(first['input'])}: {first['msg']}" if field else first["msg"]
        more = f" and {error.error_count() - 1} more" if error.error_count() > 1 else ""
        raise SpecStateError(f"{path} holds no results of bench gpu: {what}{more}") from error


def h200_results() -> BenchReport:
    """The results of an H200 that came with the package. Raises SpecStateError where they are missing."""
    path = Path(str(files("specstate.bench"))) / "h200.json"
    if not path.is_file():
        raise SpecStateError("this package has no results of an H200: specstate/bench/h200.json is missing")
    return load_results(path)


def _time_rows(results: tuple[BenchResult, ...]) -> list[list[str]]:
    rows = [
        [
            *("shape", "policy", "R", "layers", "conv", "step", "mean", "folds", "read", "copy", "floor", "S0"),
            *("/ floor", "x S0"),
        ]
    ]
    for result in results:
        for conv, step in (("yes", result), ("no", result.without_conv)):
            s0 = "-" if step.s0_ms is None else f"{step.s0_ms:.3f} ({result.s0_layers})"
            rows.append(
                [
                    *(result.shape.name, result.policy, str(result.record_capacity), str(result.shape.layers), conv),
                    *(f"{step.ms:.3f}", f"{step.mean_ms:.3f}", f"{result.folds_per_step:.2f}"),
                    *(f"{result.read_ms:.3f}", f"{result.copy_ms:.3f}", f"{step.floor_ms:.3f}", s0),
                    f"{step.ratio_to_floor:.2f}",
                    "-" if step.ratio_to_s0 is None else f"{step.ratio_to_s0:.2f}",
                ]
            )
    return rows


def _kernel_rows(results: tuple[BenchResult, ...]) -> list[list[str]]:
    names = list(dict.fromkeys(name for result in results for name in result.kernel_ms))
    rows = [["shape", "policy", *names]]
    for result in results:
        times = (f"{result.kernel_ms[name]:.3f}" if name in result.kernel_ms else "-" for name in names)
        rows.append([result.shape.name, result.policy, *times])
    return rows


def _floor_rows(results: tuple[BenchResult, ...]) -> list[list[str]]:
    items = list(results[0].floor_table)
    rows = [["shape", "policy", *(item.replace("_", " ") for item in items), "all"]]
    for result in results:
        sizes = [*(result.floor_table.get(item, 0) for item in items), result.floor_bytes]
        rows.append([result.shape.name, result.policy, *(f"{size / 2**20:.2f}" for size in sizes)])
    return rows
