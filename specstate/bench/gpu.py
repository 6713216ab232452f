"""``specstate bench gpu``: whole steps under CUDA graphs, beside their byte floor and fla-core's snapshots.

Each shape in one run: S0, then under each policy the step without a conv (its outputs checked against S0's) and with
one, and once how long reading and copying its states takes. The kernels one by one, under a profiler, come at the very
end: what a profiler leaves behind in the driver is not known, and then no figure can be disturbed any more. Steps are
those of a manager: begun, replayed, told. States of a step are not in the L2: sets of requests take turns until
``L2_TURNS`` times the L2's bytes lie between two uses, and where one step's states are as many, there is one set.
Counts are drawn on the device, by the seeded rates of ``workload.CONDITIONAL_RATES``; every ring is filled at least
twice while the clock runs.
"""

import gc
from collections.abc import Callable, Sequence
from dataclasses import replace
from statistics import fmean, median
from time import perf_counter

import torch

from specstate.bench.peer import TOLERANCE, check_outputs, find_peer
from specstate.bench.precompile import Job, precompile
from specstate.bench.ratios import Measured, build_report
from specstate.bench.results import BenchReport
from specstate.bench.results import load_results as load_results
from specstate.bench.s0 import PeerTimes
from specstate.bench.shapes import BenchShape
from specstate.bench.timer import Machine
from specstate.bench.traffic import Traffic, measure_traffic, profile_kernels
from specstate.bench.workload import Timed, Workload, turns
from specstate.config import FoldPolicy
from specstate.errors import SpecStateError
from specstate.kernels.tile_table import device_table
from specstate.layout import DTYPE_BYTES, plan_bytes

#: A workload that takes no more of the free memory waits for the profiler; a larger one is made anew.
KEPT_SHARE = 0.03

#: Steps without a graph in which the host's time is taken.
HOST_STEPS = 4


class OutOfTime(Exception):
    """The time budget is used up."""


class Bench:
    """One run on one machine, within ``budget_s`` seconds; ``say`` gets a line for whatever is done."""

    def __init__(self, machine: Machine, replays: int, budget_s: float, say: Callable[[str], None]) -> None:
        self.machine, self.replays = machine, replays
        self._budget_s, self._say = budget_s, say
        self._start = perf_counter()
        self._peer, found = find_peer()
        self.peer_version = None if self._peer is None else found
        self.notes: list[str] = [] if self._peer is not None else [found]
        self._s0 = PeerTimes(self._peer, machine, replays, self.note)
        self.table = device_table(machine.device)
        self.measured: list[Measured] = []

    def run(self, shapes: Sequence[BenchShape], policies: Sequence[FoldPolicy]) -> None:
        """Measures everything; what does not fit into memory or time is noted."""
        say_budget = f"time budget {self._budget_s:.0f} s, for {len(shapes)} shapes under {len(policies)} policies"
        self.say(f"{self.machine.name}: {say_budget}; tiles of {self.table.title}")
        if self.machine.graphs:
            jobs = [Job(s.config(policy, conv)) for s in shapes for policy in policies for conv in (False, True)]
            done = precompile(jobs, self.table, min(120.0, self._budget_s / 2))
            self.say(f"{done} variants compiled ahead")
        for place, shape in enumerate(shapes):
            try:
                self._check_time()
                self._measure_shape(shape, policies)
            except OutOfTime:
                skipped = ", ".join(each.name for each in shapes[place:])
                self.note(f"out of time after {self._budget_s:.0f} s: not measured, or not in full: {skipped}")
                break
            except Exception as error:  # whatever it is, it must not cost the figures that are there
                self.note(f"{shape.name}: {_told(error)}")
            self._free()
        self._profile()

    def say(self, text: str) -> None:
        """A line of progress, with the seconds since the start."""
        self._say(f"[{perf_counter() - self._start:6.1f} s] {text}")

    def note(self, text: str) -> None:
        """Something that the report must tell."""
        self.notes.append(text)
        self.say(text)

    # -- a shape

    def _measure_shape(self, given: BenchShape, policies: Sequence[FoldPolicy]) -> None:
        shape = replace(given, num_layers=self._layers_that_fit(given, policies))
        sets = turns(shape.num_layers * shape.rows * shape.state_bytes, self.machine.l2_bytes)
        s0, wide_s0 = self._s0.of(shape), None
        if shape.checkpoint_dtype == "bfloat16":
            wide_s0 = self._s0.of(replace(shape, checkpoint_dtype="float32"))
        traffic = None
        for policy in policies:
            self._check_time()
            try:
                measured = self._measure_policy(shape, policy, sets, traffic)
            except Exception as error:  # one policy's failure must not cost the others
                self.note(f"{shape.name} {policy}: {_told(error)}")
                continue
            finally:
                self._free()
            traffic = measured.traffic
            if s0 is not None:
                measured.s0_ms, measured.s0_layers = s0
            measured.s0_fp32_ms = None if wide_s0 is None else wide_s0.ms
            self.measured.append(measured)
            self._tell(measured)

    def _measure_policy(self, shape: BenchShape, policy: FoldPolicy, sets: int, traffic: Traffic | None) -> Measured:
        """Without S0's times and kernels."""
        plain = Workload(self.machine, shape.config(policy, False, sets), sets)
        error = check_outputs(self._peer, plain)
        if traffic is None:
            traffic = measure_traffic(plain)
        without = self._time(plain)
        del plain
        self._free()
        whole = Workload(self.machine, shape.config(policy, True, sets), sets)
        self._by_hand(whole)
        host_us = median(whole.verify_us(HOST_STEPS))
        measured = Measured(shape, policy, self._time(whole), without, traffic, sets, None, None, error, {}, whole.path)
        measured.host_us_per_layer = host_us
        if plan_bytes(whole.config).total_bytes <= KEPT_SHARE * self.machine.free_bytes():
            measured.workload = whole
        return measured

    def _tell(self, each: Measured) -> None:
        name, timed, without, traffic = (
            f"{each.shape.name} {each.policy}",
            each.with_conv,
            each.without_conv,
            each.traffic,
        )
        s0 = "" if each.s0_ms is None else f", S0 {each.s0_ms:.3f} (of {each.s0_layers} layers)"
        if each.s0_fp32_ms is not None:
            s0 += f", S0 in float32 {each.s0_fp32_ms:.3f}"
        if each.output_error is not None:
            s0 += f", outputs differ from S0's by {each.output_error:.1e}"
            if not each.output_error <= TOLERANCE[each.shape.checkpoint_dtype]:
                self.note(f"{name}: outputs differ from S0's by {each.output_error:.1e}: a check failed")
        self.say(
            f"{name}, {each.shape.num_layers} layers, {each.path}: {median(timed.times_ms):.3f} ms, mean "
            f"{fmean(timed.times_ms):.3f}; without conv {median(without.times_ms):.3f}, mean "
            f"{fmean(without.times_ms):.3f}{s0}; read {traffic.read_ms:.3f}, copy {traffic.copy_ms:.3f}; "
            f"{len(timed.times_ms)} replays, {timed.folds_per_step:.2f} folds a step, {each.sets} sets, "
            f"host {each.host_us_per_layer or 0.0:.1f} us a layer"
        )

    def _time(self, workload: Workload) -> Timed:
        workload.capture()
        workload.warm()
        return workload.measure(self.replays)

    def _by_hand(self, workload: Workload) -> None:
        """Compiles what a capture needs."""
        workload.step_by_hand(0, workload.counts.clone())
        workload.note(0, [1] * workload.rows)

    def _layers_that_fit(self, shape: BenchShape, policies: Sequence[FoldPolicy]) -> int:
        """So many of the shape's layers fit: states twice (a copy of them is timed), records, inputs, outputs."""
        one, spec = replace(shape, num_layers=1), shape.spec
        widths = spec.conv_channels + spec.num_heads * (spec.head_k_dim + spec.head_v_dim + 1)
        flows = shape.tokens * widths * DTYPE_BYTES[shape.activation_dtype]
        flows += 4 * spec.conv_channels * ((spec.conv_kernel_size or 0) + 1)
        layer = max(plan_bytes(one.config(policy)).total_bytes for policy in policies)
        return self.machine.fitting_layers(shape.num_layers, layer + shape.rows * shape.state_bytes + flows, 1)

    # -- kernels

    def _profile(self) -> None:
        """Of every shape and policy that was measured; of the large ones anew."""
        if not self.machine.graphs:
            return
        for each in self.measured:
            try:
                self._check_time()
                workload = each.workload or self._made_anew(each)
                kernels = profile_kernels(workload)
                if each.workload is not None and not kernels.ms:  # should a graph older than the profiler hide its own
                    each.workload = None
                    workload = self._made_anew(each)
                    kernels = profile_kernels(workload)
                each.kernel_ms, each.kernel_launches = kernels
            except OutOfTime:
                self.note("out of time: not all kernels were profiled")
                break
            except Exception as error:  # the profiler's own, too
                self.note(f"{each.shape.name} {each.policy}: not profiled: {_told(error)}")
            finally:
                workload = each.workload = None  # type: ignore[assignment]
                self._free()
            times = ", ".join(f"{name} {time:.3f}" for name, time in each.kernel_ms.items())
            self.say(f"{each.shape.name} {each.policy} kernels: {times or 'none seen'}")

    def _made_anew(self, each: Measured) -> Workload:
        workload = Workload(self.machine, each.shape.config(each.policy, True, each.sets), each.sets)
        self._by_hand(workload)
        workload.capture()
        workload.warm()
        return workload

    # -- inside

    def _free(self) -> None:
        gc.collect()
        if self.machine.graphs:
            torch.cuda.empty_cache()

    def _check_time(self) -> None:
        if perf_counter() - self._start > self._budget_s:
            raise OutOfTime


def measure_gpu(
    shapes: Sequence[BenchShape],
    policies: Sequence[FoldPolicy],
    replays: int,
    budget_s: float,
    say: Callable[[str], None],
    machine: Machine | None = None,
) -> BenchReport:
    """Times at least ``replays`` steps of each shape under each policy. Raises SpecStateError without a GPU."""
    if machine is None:
        if not torch.cuda.is_available():
            raise SpecStateError("needs a GPU: torch sees none")
        machine = Machine.gpu()
    bench = Bench(machine, replays, budget_s, say)
    # Whatever is loaded by now stays: it need not be looked through again whenever a workload is collected.
    gc.collect()
    gc.freeze()
    try:
        bench.run(shapes, policies)
    finally:
        gc.unfreeze()
    return build_report(bench.measured, machine.name, bench.notes, bench.peer_version, bench.table.title)


def _told(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:500]}"
