"""``specstate simulate``: from the options of a command line (options.py) to reports, pictures and traces."""

import argparse
import json
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

import torch
from pydantic import ValidationError

from specstate.bench.results import h200_results, load_results
from specstate.bench.workload import CONDITIONAL_RATES, window_rates
from specstate.config import StateConfig
from specstate.errors import CapacityError, SpecStateError, shown
from specstate.presets import PRESETS, find_preset
from specstate.replay.checks import Differs
from specstate.scheduler.acceptance import (
    AcceptanceModel,
    GeometricAcceptance,
    RateAcceptance,
    ReplayedAcceptance,
    measured_rates,
    read_counts,
)
from specstate.scheduler.calibration import Calibration, held_table, leave_one_out, load_calibration, predicted
from specstate.scheduler.capacity import Deployment, Slots, divide
from specstate.scheduler.chrome import ChromeTrace
from specstate.scheduler.cost import load_cost, preset_cost
from specstate.scheduler.drafts import AdaptiveDrafts, DraftPolicy, FixedDrafts
from specstate.scheduler.executing import Executing, WithoutReads
from specstate.scheduler.managed import Managed
from specstate.scheduler.options import SWEPT
from specstate.scheduler.plot import check_plot, plot
from specstate.scheduler.progress import Progress
from specstate.scheduler.readers import RequestReader
from specstate.scheduler.report import Report
from specstate.scheduler.settings import EngineSettings, Policy
from specstate.scheduler.setup import Setup
from specstate.scheduler.simulator import Outcome, simulate
from specstate.scheduler.sweep import sweep_json, sweep_text
from specstate.scheduler.synthetic import SyntheticWorkload
from specstate.scheduler.tally import ConservationError
from specstate.scheduler.workloads import DEFAULT_BLOCK_SIZE, TracedRequest, WorkloadOptions
from specstate.trace import TraceRecorder


def run(options: argparse.Namespace) -> int:
    """Runs the command; its exit code: 1 when the oracle or the counts disagree."""
    if options.check_calibration is not None:
        return _check_calibration(options)
    choices = _choices(options)
    _check_outputs(options, len(choices))
    if options.plot is not None:
        check_plot(options.plot)
    settings, measured = choice_settings(options), load_calibration(options.bench_file)
    reports, failed = [], []
    for number, choice in enumerate(choices, 1):
        if len(choices) > 1 and not measured.knows(choice.policy):  # snapshots, where fla-core was not there
            failed.append(f"{choice.policy}, windows of {choice.max_query_len}: no result in {measured.source}")
            continue
        try:
            slots = divide(choice, settings)
        except (CapacityError, ValidationError) as error:
            if len(choices) == 1:
                raise
            reason = str(error) if isinstance(error, CapacityError) else error.errors()[0]["msg"]
            failed.append(f"{choice.policy}, windows of {choice.max_query_len}: {reason}")
            continue
        name = f"{choice.policy}, T = {choice.max_query_len}" + (
            f" ({number}/{len(choices)})" if len(choices) > 1 else ""
        )
        try:
            reports.append(_simulate(options, settings, choice, slots, measured, name))
        except (Differs, ConservationError) as error:
            print(f"specstate simulate: {' '.join(str(error).split())}", file=sys.stderr)
            return 1
    if not reports:
        raise CapacityError(failed[0])
    if options.plot is not None:
        plot(reports, options.plot)
    if options.sweep is None:
        print(json.dumps(reports[0].to_json()) if options.json else reports[0].to_text())
    else:
        print(json.dumps(sweep_json(reports, failed)) if options.json else sweep_text(reports, failed))
    return 0


def choice_settings(options: argparse.Namespace) -> EngineSettings:
    """The engine's settings; what was not given is the default."""
    names = (name for name in EngineSettings.model_fields if getattr(options, name, None) is not None)
    given = {name: getattr(options, name) for name in names}
    if "block_size" not in given and options.scale_blocks:
        size = DEFAULT_BLOCK_SIZE * options.length_factor
        if size != int(size) or size < 1:
            raise SpecStateError(
                f"--scale-blocks: blocks of {DEFAULT_BLOCK_SIZE} tokens times --length-factor = "
                f"{options.length_factor} are no whole number of tokens"
            )
        given["block_size"] = int(size)
    return EngineSettings(**given, prefix_cache=not options.no_prefix_cache)


# -- one run


def _simulate(
    options: argparse.Namespace,
    settings: EngineSettings,
    choice: Deployment,
    slots: Slots,
    measured: Calibration,
    name: str,
) -> Report:
    config = slots.config
    setup = Setup(
        config=config,
        policy=choice.policy,
        settings=settings,
        acceptance=_acceptance(options, config.max_query_len, settings.seed),
        drafts=_drafts(options, config.max_query_len),
        cost=preset_cost(choice.model.name, choice.tp) if options.cost is None else load_cost(options.cost),
        calibration=measured,
    )
    with ExitStack() as stack:
        if options.execute is not None:
            stack.enter_context(_one_thread())
        work = _Work(options, settings.seed)
        requests = stack.enter_context(work.opened())
        timeline = None
        if options.chrome_trace is not None:
            timeline = stack.enter_context(ChromeTrace(options.chrome_trace))
        managed = stack.enter_context(_managed(options, config, settings.seed))
        progress = stack.enter_context(Progress(name))
        outcome = simulate(setup, requests, managed, timeline, progress)
    if options.execute is not None:
        counts = ", ".join(f"{count:,} {what.replace('_', ' ')}" for what, count in managed.checked().items())
        print(f"agrees with the oracle: {counts}", file=sys.stderr)
    return _report(choice, slots, outcome, work)


@contextmanager
def _one_thread() -> Iterator[None]:
    """Products of 16 x 16 gain nothing from a second thread, and lose a lot where that has no core of its own."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _report(choice: Deployment, slots: Slots, outcome: Outcome, work: "_Work") -> Report:
    return Report(
        model=choice.model.name,
        tp=choice.tp,
        policy=choice.policy,
        max_query_len=choice.max_query_len,
        outcome=outcome,
        slots=slots,
        workload=work.name,
        skipped_lines=work.skipped_lines,
        first_skipped=work.first_skipped,
    )


@contextmanager
def _managed(options: argparse.Namespace, config: StateConfig, seed: int) -> Iterator[Managed]:
    recorder_type = TraceRecorder if options.execute is None else WithoutReads
    with ExitStack() as stack:
        recorder = None
        if options.record is not None:
            recorder = stack.enter_context(recorder_type(options.record, seed))
        if options.execute is None:
            yield Managed(config, recorder, options.debug)
        else:
            assert isinstance(recorder, WithoutReads | None)
            yield Executing(config, seed, options.execute, recorder, options.debug)


@dataclass(slots=True)
class _Work:
    """Where the requests come from, and what was passed over on the way."""

    options: argparse.Namespace
    seed: int
    skipped_lines: int = 0
    first_skipped: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """For the report."""
        options = self.options
        factors = [
            f"{what} times {factor:g}"
            for what, factor in (("lengths", options.length_factor), ("rate", options.rate_factor))
            if factor != 1.0 and options.trace is not None
        ]
        base = f"{options.synthetic} synthetic requests" if options.trace is None else Path(options.trace).name
        return ", ".join([base, *factors])

    @contextmanager
    def opened(self) -> Iterator[Iterator[TracedRequest]]:
        """The requests, one at a time."""
        options = self.options
        if (options.trace is None) == (options.synthetic is None):
            raise SpecStateError("requests are needed: --trace FILE, or --synthetic N, and not both")
        if options.trace is None:
            yield SyntheticWorkload(
                num_requests=options.synthetic,
                seed=self.seed,
                requests_per_s=options.requests_per_s,
                arrival_cv=options.arrival_cv,
            ).requests()
            return
        fields = ("format", "limit", "length_factor", "scale_blocks", "rate_factor", "skip_bad")
        with RequestReader(
            options.trace, WorkloadOptions(**{name: getattr(options, name) for name in fields})
        ) as reader:
            yield reader
            self.skipped_lines, self.first_skipped = reader.skipped.count, tuple(reader.skipped.first)


def _acceptance(options: argparse.Namespace, window: int, seed: int) -> AcceptanceModel:
    given = [name for name in ("rates", "geometric", "counts", "measured") if getattr(options, name) is not None]
    if len(given) > 1:
        raise SpecStateError(f"--{given[0]} and --{given[1]} exclude each other")
    if options.geometric is not None:
        return GeometricAcceptance(rate=options.geometric, seed=seed)
    if options.counts is not None:
        return ReplayedAcceptance(counts=read_counts(options.counts), seed=seed)
    if options.measured is not None:
        return measured_rates(options.measured, seed)
    rates = CONDITIONAL_RATES if options.rates is None else _rates(options.rates)
    return RateAcceptance(rates=window_rates(window, rates), seed=seed)


def _rates(text: str) -> tuple[float, ...]:
    try:
        rates = tuple(float(part) for part in text.split(","))
    except ValueError:
        raise SpecStateError(f"--rates = {shown(text)} must be numbers with commas between them") from None
    for rate in rates:  # those beyond the window too, which no model would look at
        if not 0.0 <= rate <= 1.0:
            raise SpecStateError(f"--rates = {shown(text)}: {rate} is outside 0..1")
    return rates


def _drafts(options: argparse.Namespace, window: int) -> DraftPolicy:
    return AdaptiveDrafts(max_drafts=window - 1) if options.adaptive else FixedDrafts(max_drafts=window - 1)


# -- choices


def _choices(options: argparse.Namespace) -> list[Deployment]:
    if options.preset is None:
        raise SpecStateError(f"a model is needed: --preset NAME, of {', '.join(PRESETS)}")
    if not 0 < options.memory_gib < 1e9:
        raise SpecStateError(f"--memory-gib = {options.memory_gib} must be above 0 and a finite number of bytes")
    one = Deployment(
        model=find_preset(options.preset),
        tp=options.tp,
        memory_bytes=int(options.memory_gib * 2**30),
        max_query_len=options.max_query_len,
        policy=options.policy,
        checkpoint_dtype=options.checkpoint_dtype,
        record_capacity=options.record_capacity,
        prefix_share=options.prefix_share,
        max_requests=options.max_requests,
        num_checkpoints=options.num_checkpoints,
    )
    if options.sweep is None:
        return [one]
    swept = options.sweep.split(",")
    for name in swept:
        if name not in SWEPT:
            raise SpecStateError(f"--sweep = {shown(options.sweep)}: {shown(name)} is none of {', '.join(SWEPT)}")
    policies: list[Policy] = list(dict.fromkeys(options.policies)) if "policy" in swept else [one.policy]
    windows = list(dict.fromkeys(options.windows)) if "max_query_len" in swept else [one.max_query_len]
    return [replace(one, policy=policy, max_query_len=window) for policy, window in product(policies, windows)]


def _check_outputs(options: argparse.Namespace, num_choices: int) -> None:
    for name in ("chrome_trace", "record", "execute"):
        option = f"--{name.replace('_', '-')}"
        if getattr(options, name) is None:
            continue
        if num_choices > 1:
            raise SpecStateError(f"{option} is for one run, not for a sweep")
        if name != "chrome_trace" and options.policy == "snapshots":
            raise SpecStateError(f"{option} needs a fold policy: snapshots are priced, not run")


def _check_calibration(options: argparse.Namespace) -> int:
    points = leave_one_out(h200_results() if options.bench_file is None else load_results(options.bench_file))
    if options.check_calibration:
        points = predicted(load_results(options.check_calibration).results, load_calibration(options.bench_file))
    if options.json:
        rows: list[dict[str, Any]] = [{**point._asdict(), "error": point.error} for point in points]
        print(json.dumps({"points": rows}))
    else:
        print(held_table(points))
    return 0
