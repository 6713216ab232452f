"""``specstate bench host | gpu | tune | table | plot`` on the command line, and what each of them prints."""

import argparse
import json
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any, get_args

from specstate.bench.shapes import SHAPES, BenchShape, find_shape
from specstate.config import FoldPolicy

FINE, CHECK_FAILED = 0, 1

AddCommand = Callable[[Any, str, Callable[[argparse.Namespace], int], str], argparse.ArgumentParser]


def add_bench(commands: Any, add_command: AddCommand, count: Callable[[str], int]) -> None:
    """Adds ``bench`` and what it measures; ``count`` reads a whole number of at least 1."""
    summary = "measure what a step costs on this machine"
    bench = commands.add_parser("bench", help=summary, description=summary, allow_abbrev=False)
    benches = bench.add_subparsers(dest="bench", metavar="WHAT", required=True)
    _add_host(benches, add_command, count)
    _add_gpu(benches, add_command, count)
    _add_tune(benches, add_command, count)
    table = add_command(benches, "table", run_table, "results of bench gpu as a Markdown table")
    table.add_argument("results", metavar="RESULTS.json", help="what bench gpu --json printed")
    table.add_argument("--short", action="store_true", help="fewer columns")
    plot = add_command(benches, "plot", run_plot, "results of bench gpu beside the memory's limits, as a picture")
    plot.add_argument("results", metavar="RESULTS.json", help="what bench gpu --json printed")
    plot.add_argument("picture", metavar="FILE.png", help="where the picture goes")


def _add_host(benches: Any, add_command: AddCommand, count: Callable[[str], int]) -> None:
    host = add_command(benches, "host", run_host, "the host's part of a step, in microseconds")
    host.add_argument(
        "--rows", type=count, nargs="+", default=[1, 256], metavar="N", help="rows of a step (default: 1 256)"
    )
    host.add_argument("--steps", type=count, default=2000, metavar="N", help="steps to time (default: 2000)")
    host.add_argument("--policy", choices=get_args(FoldPolicy), default="ring", help="fold policy (default: ring)")


def _add_gpu(benches: Any, add_command: AddCommand, count: Callable[[str], int]) -> None:
    gpu = add_command(benches, "gpu", run_gpu, "whole steps under CUDA graphs, in milliseconds")
    gpu.add_argument("--shapes", nargs="+", metavar="NAME", help=f"of {', '.join(SHAPES)} (default: all)")
    gpu.add_argument(
        "--policies", choices=get_args(FoldPolicy), nargs="+", default=list(get_args(FoldPolicy)), help="default: all"
    )
    gpu.add_argument(
        "--replays", type=count, default=50, metavar="N", help="timed steps, more if a ring needs them (default: 50)"
    )
    gpu.add_argument("--layers", type=count, metavar="N", help="at most so many (default: the model's that fit)")
    gpu.add_argument(
        "--budget", type=count, default=900, metavar="SECONDS", help="starts nothing new after that (default: 900)"
    )
    gpu.add_argument("--plot", metavar="FILE.png", help="draws the results, too; needs matplotlib")


def _add_tune(benches: Any, add_command: AddCommand, count: Callable[[str], int]) -> None:
    tune = add_command(benches, "tune", run_tune, "measure the kernels' tiles on this GPU and write a table of them")
    tune.add_argument("--shapes", nargs="+", metavar="NAME", help=f"of {', '.join(SHAPES)} (default: all)")
    tune.add_argument(
        "--output", default="tiles.json", metavar="FILE", help="for SPECSTATE_TILES to name (default: tiles.json)"
    )
    tune.add_argument(
        "--budget", type=count, default=600, metavar="SECONDS", help="starts nothing new after that (default: 600)"
    )


def run_host(options: argparse.Namespace) -> int:
    from specstate.bench.host import measure_host

    report = measure_host(tuple(dict.fromkeys(options.rows)), options.steps, options.policy)
    print(json.dumps(report.to_json()) if options.json else report.to_text())
    return FINE


def run_gpu(options: argparse.Namespace) -> int:
    from specstate.bench.gpu import measure_gpu

    shapes = _shapes(options)
    if options.layers is not None:
        shapes = [replace(shape, num_layers=min(shape.num_layers, options.layers)) for shape in shapes]
    policies = tuple(dict.fromkeys(options.policies))
    if options.plot is not None:  # before minutes of measuring
        from specstate.bench.plot import check_plot

        check_plot(options.plot)
    report = measure_gpu(shapes, policies, options.replays, options.budget, _say)
    print(json.dumps(report.to_json()) if options.json else report.to_text(), flush=True)
    if options.plot is not None and report.results:
        from specstate.bench.plot import draw

        draw(report, options.plot)
    failed = not report.results or any(result.outputs_match is False for result in report.results)
    return CHECK_FAILED if failed else FINE


def run_tune(options: argparse.Namespace) -> int:
    from specstate.bench.tune import tune

    report = tune(_shapes(options), options.output, options.budget, _say)
    print(json.dumps(report.to_json()) if options.json else report.to_text())
    return FINE if report.timings else CHECK_FAILED


def run_table(options: argparse.Namespace) -> int:
    from specstate.bench.markdown import markdown
    from specstate.bench.results import load_results

    text = markdown(load_results(options.results), options.short)
    print(json.dumps({"markdown": text}) if options.json else text)
    return FINE


def run_plot(options: argparse.Namespace) -> int:
    from specstate.bench.plot import check_plot, draw
    from specstate.bench.results import load_results

    check_plot(options.picture)
    draw(load_results(options.results), options.picture)
    if options.json:
        print(json.dumps({"picture": options.picture}))
    return FINE


def _shapes(options: argparse.Namespace) -> list[BenchShape]:
    return [find_shape(name) for name in dict.fromkeys(options.shapes or SHAPES)]


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
