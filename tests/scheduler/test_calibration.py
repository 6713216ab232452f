"""What state management costs: bytes, curves through measured points, and how well they predict."""

import itertools
from pathlib import Path
from typing import Any

import pytest

from specstate import SpecStateError, StateConfig
from specstate.bench.floor import Rings, step_bytes
from specstate.bench.results import BenchReport, BenchResult, ShapeFigures, StepFigures
from specstate.bench.workload import CONDITIONAL_RATES
from specstate.presets import KIMI_K3, KIMI_LINEAR_48B
from specstate.scheduler.acceptance import RateAcceptance
from specstate.scheduler.calibration import (
    UNCALIBRATED_BYTES_PER_S,
    Curve,
    calibration,
    full_windows,
    held_table,
    leave_one_out,
    load_calibration,
    mean_work,
    predicted_state_ms,
    shape_config,
    uncalibrated,
)
from specstate.scheduler.traffic import Work, fold_traffic, snapshot_traffic

POLICIES = ["eager", "deferred", "ring"]
LAUNCH_MS, BYTES_PER_S = 0.004, 3.9e12


def shape(rows: int, window: int = 8, layers: int = 69, heads: int = 12, **fields: Any) -> ShapeFigures:
    return ShapeFigures(
        **{
            "name": f"h{heads}-{rows}-t{window}",
            "num_heads": heads,
            "head_k_dim": 128,
            "head_v_dim": 128,
            "conv_kernel_size": 4,
            "gate_lower_bound": -5.0,
            "layers": layers,
            "rows": rows,
            "max_query_len": window,
            "checkpoint_dtype": "float32",
            "activation_dtype": "bfloat16",
            **fields,
        }
    )


def made_result(figures: ShapeFigures, policy: str, noise: float = 1.0, s0: bool = True) -> BenchResult:
    """A GPU that takes 4 us a layer, and what its bytes take at a bandwidth that falls off with longer windows."""
    config = shape_config(figures, policy)
    size = fold_traffic(config).step_bytes(mean_work(config, figures.rows))
    slower = 1.0 + 0.02 * figures.max_query_len
    ms = noise * slower * (config.num_layers * LAUNCH_MS + 1e3 * size / BYTES_PER_S)
    snapshots = snapshot_traffic(config).step_bytes(full_windows(figures.rows, config.max_query_len))
    s0_ms = noise * slower * (config.num_layers * LAUNCH_MS + 1e3 * snapshots / BYTES_PER_S) if s0 else None
    step: dict[str, Any] = {
        "ms": ms,
        "mean_ms": ms,
        "floor_bytes": round(size),
        "floor_ms": 1e3 * size / 4.3e12,
        "ratio_to_floor": ms / (1e3 * size / 4.3e12),
        "mean_floor_bytes": size,
        "s0_ms": s0_ms,
        "ratio_to_s0": None if s0_ms is None else s0_ms / ms,
        "floor_table": {"state_read": round(size)},
    }
    return BenchResult(
        **step,
        shape=figures,
        policy=policy,
        path="portable",
        record_capacity=config.record_capacity,
        kernel_ms={},
        without_conv=StepFigures(**step),
        state_bytes=1,
        read_ms=1.0,
        copy_ms=1.0,
        sets=1,
        replays=50,
        mean_accepted=4.04,
        folds_per_step=1.0,
        s0_layers=69 if s0 else None,
        output_error=None,
        outputs_match=None,
    )


def made_report(noise: tuple[float, ...] = (1.0,)) -> BenchReport:
    """Twelve shapes under each policy."""
    shapes = [shape(rows) for rows in (1, 8, 32, 128, 256)]
    shapes += [shape(32, 4), shape(32, 2)]
    shapes += [shape(rows, 4, layers=20, heads=32) for rows in (1, 32, 128)]
    noises = itertools.cycle(noise)
    results = tuple(made_result(each, policy, next(noises)) for each in shapes for policy in POLICIES)
    return BenchReport(
        results=results, gpu="a GPU that was made up", floor_bytes_per_s=4.3e12, versions={}, date="2026"
    )


# -- bytes


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("conv", [None, 4])
def test_bytes_of_full_windows_are_those_of_the_floor(policy: str, conv: int | None) -> None:
    config = shape_config(shape(4, conv_kernel_size=conv), policy)
    pending, folded = [0, 3, 5, 8], [1, 0, 4, 0]
    verify_folds = 3 if policy == "deferred" else 0
    work = Work(4, 32, sum(pending), verify_folds, 2, sum(folded))
    assert fold_traffic(config).step_bytes(work) == sum(step_bytes(config, pending, folded).values())


def test_snapshots_write_a_state_a_token() -> None:
    config = KIMI_K3.config(8, max_query_len=8, max_requests=1)
    one, two = (snapshot_traffic(config).step_bytes(Work(rows, 8 * rows)) for rows in (1, 2))
    states = 9 * 69 * 12 * 128 * 128 * 4
    assert states < two - one < 1.05 * states


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("window", [1, 2, 8])
def test_mean_work_is_the_mean_of_many_steps(policy: str, window: int) -> None:
    config = KIMI_K3.config(8, max_query_len=window, max_requests=1, fold_policy=policy)
    model = RateAcceptance(rates=CONDITIONAL_RATES[: window - 1], seed=1)
    rings, rows, steps = Rings(config, 16), 16, 1500
    bytes_moved = 0.0
    for step in range(steps):
        counts = [model.num_accepted(str(row), step, window - 1) for row in range(rows)]
        pending, folded = rings.step(counts)
        bytes_moved += sum(step_bytes(config, pending, folded).values())
    expected = fold_traffic(config).step_bytes(mean_work(config, rows))
    assert bytes_moved / steps == pytest.approx(expected, rel=0.005)


# -- curves


def test_a_curve_goes_through_its_points_and_on() -> None:
    curve = Curve([(300.0, 5.0), (100.0, 2.0), (100.0, 4.0)])
    assert curve.ms(100.0) == 3.0
    assert curve.ms(200.0) == 4.0
    assert curve.ms(600.0) == 10.0
    assert curve.ms(50.0) == 2.5
    assert curve.ms(0.0) == 2.0
    assert Curve([(100.0, 3.0)]).ms(50.0) == 1.5
    with pytest.raises(SpecStateError, match="at least one measured point"):
        Curve([])


def test_without_results_bytes_go_at_the_bandwidth() -> None:
    config = KIMI_K3.config(8, max_query_len=8, max_requests=64)
    size = fold_traffic(config).step_bytes(mean_work(config, 64))
    assert predicted_state_ms(config, 64, uncalibrated()) == pytest.approx(1e3 * size / UNCALIBRATED_BYTES_PER_S)
    assert not uncalibrated().is_measured
    assert "4.3 TB/s" in uncalibrated().source


def test_measured_points_are_met_and_points_between_them_predicted() -> None:
    measured = calibration(made_report(), "made up")
    for rows, window in ((1, 8), (256, 8), (32, 4), (32, 2)):
        for policy in POLICIES:
            figures = shape(rows, window)
            config = shape_config(figures, policy)
            assert predicted_state_ms(config, rows, measured) == pytest.approx(made_result(figures, policy).ms)
    for rows, window in ((4, 8), (64, 8), (200, 8), (32, 3), (64, 6)):
        for policy in POLICIES:
            figures = shape(rows, window)
            config = shape_config(figures, policy)
            assert predicted_state_ms(config, rows, measured) == pytest.approx(made_result(figures, policy).ms, rel=0.1)


def test_a_window_with_one_measured_size_follows_the_one_with_most() -> None:
    measured = calibration(made_report(), "made up")
    for rows in (1, 8, 200):
        figures = shape(rows, 2)
        config = shape_config(figures, "ring")
        made = made_result(figures, "ring")
        assert predicted_state_ms(config, rows, measured) == pytest.approx(made.ms, rel=0.05)
        # S0's one size stands in the file three times, with each policy.
        assert predicted_state_ms(config, rows, measured, "snapshots") == pytest.approx(made.s0_ms, rel=0.05)


def test_snapshots_are_predicted_from_s0() -> None:
    measured = calibration(made_report(), "made up")
    figures = shape(64)
    wanted = made_result(figures, "ring").s0_ms
    config: StateConfig = shape_config(figures, "ring")
    assert predicted_state_ms(config, 64, measured, "snapshots") == pytest.approx(wanted, rel=0.02)


def test_a_policy_that_was_not_measured_is_refused() -> None:
    report = made_report()
    only = tuple(made_result(each.shape, "ring", s0=False) for each in report.results if each.policy == "ring")
    measured = calibration(report.model_copy(update={"results": only}), "half.json")
    config = KIMI_LINEAR_48B.config(1, max_query_len=4, max_requests=1, fold_policy="eager")
    for policy in ("eager", "snapshots"):
        with pytest.raises(SpecStateError, match=rf"half.json .* has no result for policy {policy}"):
            predicted_state_ms(config, 1, measured, policy)
    with pytest.raises(SpecStateError, match="has no results"):
        calibration(report.model_copy(update={"results": ()}), "empty.json")


@pytest.mark.parametrize("rows", [0, -1, 1.5, True])
def test_rows_that_are_none_are_refused(rows: Any) -> None:
    with pytest.raises(SpecStateError, match="rows = "):
        predicted_state_ms(KIMI_K3.config(8, max_query_len=8, max_requests=1), rows, uncalibrated())


# -- leave one out


def test_each_point_is_predicted_from_the_others() -> None:
    points = leave_one_out(made_report(noise=(1.0, 1.04, 0.97, 1.02)))
    assert {point.policy for point in points} == {"snapshots", *POLICIES}
    inner = [point for point in points if point.rows in (8, 32, 128) and point.window == 8]
    assert len(inner) == 12
    assert max(abs(point.error) for point in inner) < 0.15
    table = held_table(points).splitlines()
    assert len(table) == 1 + len(points)
    assert table[0].split() == ["shape", "policy", "rows", "T", "measured", "predicted", "error"]


def test_a_point_that_the_others_contradict_stands_out() -> None:
    report = made_report()
    results = tuple(
        made_result(each.shape, each.policy, 1.5) if each.shape.name == "h12-32-t8" else each for each in report.results
    )
    errors = {
        (point.shape, point.policy): point.error
        for point in leave_one_out(report.model_copy(update={"results": results}))
    }
    assert all(errors["h12-32-t8", policy] < -0.25 for policy in POLICIES)


def test_a_file_of_results_is_read_and_named(tmp_path: Path) -> None:
    path = tmp_path / "gpu.json"
    path.write_text(made_report().model_dump_json())
    measured = load_calibration(path)
    assert measured.is_measured
    assert measured.source == f"{path} (a GPU that was made up, 2026)"
    path.write_text("{}")
    with pytest.raises(SpecStateError, match="holds no results of bench gpu"):
        load_calibration(path)
