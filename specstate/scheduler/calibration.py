"""How long state management takes: measured steps of ``specstate bench gpu``, interpolated between their sizes.

A step of L layers that moves X bytes takes L y(X / L) milliseconds, where y runs through the measured points of the
same policy (or S0's, for snapshots), straight from one to the next: launches and latency dominate where a layer moves
little, bandwidth where it moves much, and both show in the points. Beyond the last point y goes on at that point's
bandwidth; before the first, on the line through the first two, which ends at what launches cost. Each window length
that was measured has a y of its own, since the arithmetic of a window grows with it; where fewer than three sizes were
measured, it is that of the length with the most sizes, times the mean ratio at those that were. Lengths between two
measured ones mix their curves in proportion, others take the nearest.

Bytes are those of traffic.py, times are means over a ring's cycle (``mean_ms``), so that folds are in it. S0's are
fla-core's, without a convolution: snapshots come out cheaper than they are.
"""

from collections.abc import Iterable, Sequence
from itertools import accumulate, pairwise
from operator import mul
from pathlib import Path
from typing import Any, NamedTuple

import specstate
from specstate.bench.floor import FoldTiming
from specstate.bench.results import BenchReport, BenchResult, ShapeFigures, load_results
from specstate.bench.workload import CONDITIONAL_RATES, window_rates
from specstate.config import FoldPolicy, KDALayerSpec, StateConfig
from specstate.errors import SpecStateError, shown
from specstate.scheduler.settings import Policy
from specstate.scheduler.traffic import Traffic, Work, fold_traffic, snapshot_traffic

UNCALIBRATED_BYTES_PER_S = 4.3e12
"""What an H200 reads: 90 % of its 4.8 TB/s."""

ENOUGH_POINTS = 3
"""Of a curve: two show where launches end and bandwidth begins no better than one."""

SHIPPED_RESULTS = Path(specstate.__file__).parent / "bench" / "h200.json"
"""Measured on an H200; what is used unless the caller names a file."""


class Curve:
    """Milliseconds a layer by bytes a layer, through measured points."""

    def __init__(self, points: Iterable[tuple[float, float]], scale: float = 1.0) -> None:
        """Points of the same bytes are averaged; times are then multiplied by ``scale``.

        Raises SpecStateError when there is none.
        """
        by_bytes: dict[float, list[float]] = {}
        for size, ms in points:
            by_bytes.setdefault(size, []).append(ms)
        self._points = [(size, scale * sum(times) / len(times)) for size, times in sorted(by_bytes.items())]
        if not self._points:
            raise SpecStateError("a curve needs at least one measured point")

    def ms(self, size: float) -> float:
        """Of one layer that moves ``size`` bytes."""
        points = self._points
        first, last = points[0], points[-1]
        if size >= last[0]:
            return last[1] * size / last[0]
        if size <= first[0]:
            slope = _slope(first, points[1]) if len(points) > 1 else first[1] / first[0]
            return max(first[1] - max(slope, 0.0) * (first[0] - size), 0.0)
        for left, right in pairwise(points):
            if size <= right[0]:
                return left[1] + _slope(left, right) * (size - left[0])
        raise AssertionError("sizes are in order")


class Calibration:
    """Milliseconds of a step's state management, by policy and window. See the module."""

    def __init__(self, source: str, curves: dict[tuple[Policy, str], dict[int, Curve]]) -> None:
        self.source = source
        """For the report: whose figures these are."""
        self._curves = curves

    @property
    def is_measured(self) -> bool:
        """False: bytes over a bandwidth, nothing else."""
        return bool(self._curves)

    def knows(self, policy: Policy) -> bool:
        """Whether it was measured; bytes alone stand for every policy."""
        return not self._curves or any(name == policy for name, _ in self._curves)

    def state_ms(self, policy: Policy, config: StateConfig, traffic: Traffic, work: Work) -> float:
        """Of one step. Raises SpecStateError when nothing was measured under the policy."""
        if work.rows <= 0:
            return 0.0
        size = traffic.step_bytes(work)
        if not self._curves:
            return size / UNCALIBRATED_BYTES_PER_S * 1e3
        windows = self._windows(policy, config.checkpoint_dtype)
        return traffic.layers * self._at_window(windows, config.max_query_len, size / traffic.layers)

    def _windows(self, policy: Policy, dtype: str) -> dict[int, Curve]:
        found = self._curves.get((policy, dtype))
        if found is None:
            others = [curves for (name, _), curves in self._curves.items() if name == policy]
            if not others:
                raise SpecStateError(f"{self.source} has no result for policy {policy}")
            found = others[0]
        return found

    @staticmethod
    def _at_window(windows: dict[int, Curve], window: int, size: float) -> float:
        below = max((known for known in windows if known <= window), default=None)
        above = min((known for known in windows if known >= window), default=None)
        if below is None or above is None or below == above:
            nearest = below if above is None else above
            assert nearest is not None
            return windows[nearest].ms(size)
        share = (window - below) / (above - below)
        return (1 - share) * windows[below].ms(size) + share * windows[above].ms(size)


def _slope(left: tuple[float, float], right: tuple[float, float]) -> float:
    return (right[1] - left[1]) / (right[0] - left[0])


# -- from results


def load_calibration(path: str | Path | None = None) -> Calibration:
    """From a file of ``specstate bench gpu --json``; None: the H200's that the package brings, or bytes alone.

    Raises SpecStateError as ``load_results``.
    """
    if path is not None:
        return calibration(load_results(path), str(path))
    if SHIPPED_RESULTS.is_file():
        return calibration(load_results(SHIPPED_RESULTS), "the package's own H200 results")
    return uncalibrated()


def uncalibrated() -> Calibration:
    """Every byte at the bandwidth of an H200, launches free: a lower bound, not a forecast."""
    return Calibration(f"not calibrated: bytes at {UNCALIBRATED_BYTES_PER_S / 1e12:.1f} TB/s, launches not counted", {})


def calibration(report: BenchReport, name: str) -> Calibration:
    """Curves through what was measured. Raises SpecStateError when there is no result at all."""
    if not report.results:
        raise SpecStateError(f"{name} has no results to calibrate with")
    points: dict[tuple[Policy, str], dict[int, list[tuple[float, float]]]] = {}
    for result in report.results:
        for policy, point in _points(result):
            windows = points.setdefault((policy, result.shape.checkpoint_dtype), {})
            windows.setdefault(result.shape.max_query_len, []).append(point)
    curves = {key: _curves(windows) for key, windows in points.items()}
    return Calibration(f"{name} ({report.gpu}, {report.date})", curves)


def _curves(windows: dict[int, list[tuple[float, float]]]) -> dict[int, Curve]:
    """One for each window length: its own points where there are enough, else the best known curve, scaled to them."""
    sizes = {window: len({size for size, _ in points}) for window, points in windows.items()}  # S0's come once a policy
    best = max(windows, key=lambda window: (sizes[window], window))
    reference, curves = Curve(windows[best]), {}
    for window, points in windows.items():
        if window == best or sizes[window] >= ENOUGH_POINTS:
            curves[window] = Curve(points)
        else:
            ratios = [ms / reference.ms(size) for size, ms in points]
            curves[window] = Curve(windows[best], sum(ratios) / len(ratios))
    return curves


def _points(result: BenchResult) -> list[tuple[Policy, tuple[float, float]]]:
    layers = result.shape.layers
    found: list[tuple[Policy, tuple[float, float]]] = [
        (result.policy, (result.mean_floor_bytes / layers, result.mean_ms / layers))
    ]
    if result.s0_ms is not None:
        config = shape_config(result.shape, "eager")
        size = snapshot_traffic(config).step_bytes(full_windows(result.shape.rows, config.max_query_len))
        found.append(("snapshots", (size / layers, result.s0_ms / layers)))
    return found


def shape_config(shape: ShapeFigures, policy: FoldPolicy, record_capacity: int | None = None) -> StateConfig:
    """What was timed, as a config. record_capacity: None for the policy's default."""
    capacity: dict[str, Any] = {"record_capacity": record_capacity}
    spec = KDALayerSpec(
        num_heads=shape.num_heads,
        head_k_dim=shape.head_k_dim,
        head_v_dim=shape.head_v_dim,
        conv_kernel_size=shape.conv_kernel_size,
        gate_lower_bound=shape.gate_lower_bound,
    )
    return StateConfig(
        num_layers=shape.layers,
        layer=spec,
        max_requests=shape.rows,
        max_query_len=shape.max_query_len,
        fold_policy=policy,
        **capacity,
        checkpoint_dtype=shape.checkpoint_dtype,
        activation_dtype=shape.activation_dtype,
    )


# -- a step on average


def full_windows(rows: int, max_query_len: int) -> Work:
    """Of ``rows`` full windows, nothing pending and nothing folded."""
    return Work(rows, rows * max_query_len)


def mean_work(config: StateConfig, rows: int, rates: Sequence[float] = CONDITIONAL_RATES) -> Work:
    """Of a step of ``rows`` full windows, in the long run.

    rates: as ``RateAcceptance`` takes them; the last one holds for positions beyond. Under "ring" from the stationary
    distribution of what a row has pending, a Markov chain over 0..R.
    """
    window = config.max_query_len
    chances = _count_chances(window, rates)
    mean = sum(count * chance for count, chance in chances.items())
    full = full_windows(rows, window)
    if config.folds_at_end:
        return full._replace(end_folds=rows, folded=rows * mean)
    if config.folds_in_verify:
        return full._replace(pending=rows * mean, verify_folds=rows)
    timing = FoldTiming(config)
    steps = {
        held: [(timing.of(held, count), share) for count, share in chances.items()]
        for held in range(config.record_capacity + 1)
    }
    pending = {0: 1.0}
    for _ in range(64 * (config.record_capacity // window + 1)):  # mixes within a few folds
        after: dict[int, float] = {}
        for held, chance in pending.items():
            for step, share in steps[held]:
                after[step.left] = after.get(step.left, 0.0) + 0.5 * chance * share
            after[held] = after.get(held, 0.0) + 0.5 * chance  # lazy: the same limit, also where all counts are alike
        pending = after
    folds = folded = 0.0
    for held, chance in pending.items():
        for step, share in steps[held]:
            folds += chance * share * (step.at_end > 0)
            folded += chance * share * step.at_end
    mean_pending = sum(held * chance for held, chance in pending.items())
    return full._replace(pending=rows * mean_pending, end_folds=rows * folds, folded=rows * folded)


def predicted_state_ms(
    config: StateConfig,
    rows: int,
    measured: Calibration,
    policy: Policy | None = None,
    rates: Sequence[float] = CONDITIONAL_RATES,
) -> float:
    """State management of a step of ``rows`` full windows, in milliseconds, on average.

    policy: None for the config's; "snapshots" for a state a token. Raises SpecStateError for rows that are none.
    """
    if type(rows) is not int or rows < 1:
        raise SpecStateError(f"rows = {shown(rows)} must be a number of rows, 1 or more")
    if policy == "snapshots":
        work = full_windows(rows, config.max_query_len)
        return measured.state_ms("snapshots", config, snapshot_traffic(config), work)
    return measured.state_ms(policy or config.fold_policy, config, fold_traffic(config), mean_work(config, rows, rates))


def _count_chances(window: int, rates: Sequence[float]) -> dict[int, float]:
    """Of each accepted count 1..T of a full window."""
    shares: list[float] = [1.0, *accumulate(window_rates(window, rates), mul), 0.0]
    return {count: shares[count - 1] - shares[count] for count in range(1, window + 1)}


# -- how well it predicts


class Held(NamedTuple):
    """A measured point beside what the other points of its file predict for it."""

    shape: str
    policy: Policy
    rows: int
    window: int
    measured_ms: float
    predicted_ms: float

    @property
    def error(self) -> float:
        """Of the prediction, relative to the measurement."""
        return self.predicted_ms / self.measured_ms - 1.0


def leave_one_out(report: BenchReport) -> tuple[Held, ...]:
    """Each result against a calibration without its shape. Results whose policy nothing else shows are left out."""
    found: list[Held] = []
    for shape in dict.fromkeys(result.shape for result in report.results):
        others = tuple(other for other in report.results if other.shape != shape)
        if others:
            rest = calibration(report.model_copy(update={"results": others}), "the rest")
            found += predicted([result for result in report.results if result.shape == shape], rest)
    return tuple(found)


def predicted(results: Iterable[BenchResult], measured: Calibration) -> tuple[Held, ...]:
    """Results beside what ``measured``, which need not know them, says of them; S0 once a shape."""
    found: dict[tuple[ShapeFigures, Policy], Held] = {}
    for result in results:
        shape, config = result.shape, shape_config(result.shape, result.policy, result.record_capacity)
        timed: dict[Policy, float | None] = {"snapshots": result.s0_ms, result.policy: result.mean_ms}
        for policy, ms in timed.items():
            if ms is not None and measured.knows(policy):
                predicted_ms = predicted_state_ms(config, shape.rows, measured, policy)
                held = Held(shape.name, policy, shape.rows, shape.max_query_len, ms, predicted_ms)
                found.setdefault((shape, policy), held)
    return tuple(found.values())


def held_table(points: Sequence[Held]) -> str:
    """For a person: measured and predicted milliseconds."""
    lines = [f"{'shape':<20} {'policy':<10} {'rows':>5} {'T':>3} {'measured':>10} {'predicted':>10} {'error':>7}"]
    lines += [
        f"{point.shape:<20} {point.policy:<10} {point.rows:>5} {point.window:>3} {point.measured_ms:>10.3f} "
        f"{point.predicted_ms:>10.3f} {point.error:>+7.1%}"
        for point in points
    ]
    return "\n".join(lines)
