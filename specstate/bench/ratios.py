"""From what was timed to the report: medians, floors in milliseconds, ratios, versions."""

import math
import platform
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from statistics import fmean, median
from typing import Any

import torch

import specstate
from specstate.bench.peer import TOLERANCE
from specstate.bench.results import BenchReport, BenchResult, ShapeFigures, StepFigures
from specstate.bench.shapes import BenchShape
from specstate.bench.traffic import Traffic
from specstate.bench.workload import Timed, Workload
from specstate.config import FoldPolicy
from specstate.errors import SpecStateError

#: Bytes a second that a GPU's memory gives at best, where it was measured: a device-to-device copy on an H200.
KNOWN_BANDWIDTH = {"H200": 4.3e12}


@dataclass(slots=True)
class Measured:
    """One shape under one policy, before ratios are taken."""

    shape: BenchShape
    policy: FoldPolicy
    with_conv: Timed
    without_conv: Timed
    traffic: Traffic
    sets: int
    s0_ms: float | None
    s0_layers: int | None
    output_error: float | None
    kernel_ms: dict[str, float]
    path: str = "portable"
    kernel_launches: dict[str, float] = field(default_factory=dict)
    host_us_per_layer: float | None = None
    s0_fp32_ms: float | None = None
    workload: Workload | None = None
    """What was timed with the conv, kept for the profiler."""


def build_report(
    measured: Sequence[Measured],
    gpu: str,
    notes: Sequence[str],
    peer_version: str | None = None,
    tiles: str | None = None,
) -> BenchReport:
    """Takes ratios: floors at the GPU's bandwidth where it is known, else at the best read of this run.

    ``tiles``: the title of the table of tiles that was in force.
    """
    known = [bandwidth for name, bandwidth in KNOWN_BANDWIDTH.items() if name in gpu]
    if not measured and not known:
        raise SpecStateError(f"nothing was measured: {'; '.join(notes)}")
    bandwidth = known[0] if known else max(each.traffic.read_bytes_per_s for each in measured)
    return BenchReport(
        results=tuple(_result(each, bandwidth) for each in measured),
        gpu=gpu,
        floor_bytes_per_s=bandwidth,
        versions=versions(peer_version) | ({} if tiles is None else {"tiles": tiles}),
        date=datetime.now(UTC).isoformat(timespec="seconds"),
        notes=tuple(notes),
    )


def _result(each: Measured, bandwidth: float) -> BenchResult:
    shape, spec = each.shape, each.shape.spec
    return BenchResult(
        **_step(each, each.with_conv, bandwidth),
        shape=ShapeFigures(
            name=shape.name,
            num_heads=spec.num_heads,
            head_k_dim=spec.head_k_dim,
            head_v_dim=spec.head_v_dim,
            conv_kernel_size=spec.conv_kernel_size,
            gate_lower_bound=spec.gate_lower_bound,
            layers=shape.num_layers,
            rows=shape.rows,
            max_query_len=shape.max_query_len,
            checkpoint_dtype=shape.checkpoint_dtype,
            activation_dtype=shape.activation_dtype,
        ),
        policy=each.policy,
        record_capacity=shape.config(each.policy).record_capacity,
        path=each.path,
        kernel_ms=each.kernel_ms,
        kernel_launches=each.kernel_launches,
        host_us_per_layer=each.host_us_per_layer,
        without_conv=StepFigures(**_step(each, each.without_conv, bandwidth)),
        state_bytes=each.traffic.state_bytes,
        read_ms=each.traffic.read_ms,
        copy_ms=each.traffic.copy_ms,
        sets=each.sets,
        replays=len(each.with_conv.times_ms),
        mean_accepted=each.with_conv.num_accepted,
        folds_per_step=each.with_conv.folds_per_step,
        s0_layers=each.s0_layers,
        output_error=None if each.output_error is None or math.isinf(each.output_error) else each.output_error,
        outputs_match=None if each.output_error is None else each.output_error <= TOLERANCE[shape.checkpoint_dtype],
    )


def _step(each: Measured, timed: Timed, bandwidth: float) -> dict[str, Any]:
    tables = sorted(timed.bytes, key=lambda table: sum(table.values()))
    table = tables[(len(tables) - 1) // 2]
    ms, floor_bytes = median(timed.times_ms), sum(table.values())
    floor_ms = floor_bytes / bandwidth * 1e3
    return {
        "ms": ms,
        "mean_ms": fmean(timed.times_ms),
        "floor_bytes": floor_bytes,
        "floor_ms": floor_ms,
        "ratio_to_floor": ms / floor_ms,
        "mean_floor_bytes": fmean(sum(items.values()) for items in timed.bytes),
        "s0_ms": each.s0_ms,
        "ratio_to_s0": None if each.s0_ms is None else each.s0_ms / ms,
        "s0_fp32_ms": each.s0_fp32_ms,
        "ratio_to_s0_fp32": None if each.s0_fp32_ms is None else each.s0_fp32_ms / ms,
        "floor_table": table,
    }


def versions(peer: str | None) -> dict[str, str]:
    return {
        "specstate": specstate.__version__,
        "torch": torch.__version__,
        "triton": _version("triton"),
        "fla-core": peer or "missing",
        "cuda": str(torch.version.cuda),
        "python": platform.python_version(),
    }


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "missing"
