"""The options of ``specstate simulate``. Apart from command.py, so that a command line is parsed without torch."""

import argparse
from collections.abc import Callable
from typing import get_args

from specstate.config import CheckpointDtype
from specstate.presets import PRESETS
from specstate.scheduler.settings import POLICIES, EngineSettings

SWEPT = ("policy", "max_query_len")
_SETTINGS = EngineSettings()


def add_options(parser: argparse.ArgumentParser, count: Callable[[str], int]) -> None:
    """The options of ``specstate simulate``. count: parses a whole number of 1 or more."""
    _add_requests(parser, count)
    _add_deployment(parser, count)
    _add_drafts(parser)
    _add_engine(parser, count)
    _add_cost(parser)
    _add_output(parser, count)


def _add_requests(parser: argparse.ArgumentParser, count: Callable[[str], int]) -> None:
    work = parser.add_argument_group("requests")
    work.add_argument("--trace", metavar="FILE", help="Mooncake JSONL, Azure or BurstGPT CSV, or JSONL of our own")
    work.add_argument(
        "--synthetic", type=count, metavar="N", help="N requests that resemble Mooncake's, in place of --trace"
    )
    work.add_argument(
        "--format", choices=("mooncake", "azure", "burstgpt", "specstate"), help="default: by the first line"
    )
    work.add_argument("--limit", type=count, metavar="N", help="the first N requests of the file")
    work.add_argument("--length-factor", type=float, default=1.0, metavar="X", help="lengths times X, rounded up")
    work.add_argument("--scale-blocks", action="store_true", help="blocks of prefix hashes times X, too")
    work.add_argument("--rate-factor", type=float, default=1.0, metavar="X", help="requests X times as often")
    work.add_argument("--skip-bad", action="store_true", help="count lines that cannot be used, and go on")
    work.add_argument("--requests-per-s", type=float, default=3.4, metavar="X", help="of --synthetic (default: 3.4)")
    work.add_argument(
        "--arrival-cv", type=float, default=1.0, metavar="X", help="of --synthetic: above 1 in bursts (default: 1)"
    )


def _add_deployment(parser: argparse.ArgumentParser, count: Callable[[str], int]) -> None:
    model = parser.add_argument_group("deployment")
    model.add_argument("--preset", metavar="NAME", help=f"a published model: {', '.join(PRESETS)}")
    model.add_argument("--tp", type=count, default=1, metavar="N", help="tensor-parallel ranks (default: 1)")
    model.add_argument(
        "--memory-gib", type=float, default=80.0, metavar="GIB", help="for states on one rank (default: 80)"
    )
    model.add_argument(
        "--policy", choices=POLICIES, default="ring", help="fold policy, or a snapshot a token (default: ring)"
    )
    model.add_argument("--max-query-len", type=count, default=8, metavar="T", help="tokens of a window (default: 8)")
    model.add_argument("--record-capacity", type=count, metavar="R", help="default: the policy's")
    model.add_argument("--checkpoint-dtype", choices=get_args(CheckpointDtype)[:2], default="float32")
    model.add_argument(
        "--max-requests", type=count, metavar="N", help="record slots (default: what fits, up to --max-batch)"
    )
    model.add_argument(
        "--num-checkpoints", type=count, metavar="N", help="checkpoint slots (default: what the memory leaves)"
    )
    model.add_argument(
        "--prefix-share", type=float, default=0.25, metavar="X", help="of the memory, for prefixes (default: 0.25)"
    )


def _add_drafts(parser: argparse.ArgumentParser) -> None:
    drafts = parser.add_argument_group("drafts")
    drafts.add_argument(
        "--rates", metavar="R,R,..", help="chance of each draft, given those before it; the last one holds on"
    )
    drafts.add_argument("--geometric", type=float, metavar="R", help="the same chance for every draft")
    drafts.add_argument("--counts", metavar="FILE", help="accepted counts of a recorded run, in a column num_accepted")
    drafts.add_argument("--measured", metavar="FILE", help="the output of specstate demo --json")
    drafts.add_argument("--adaptive", action="store_true", help="as many drafts as the last windows made worthwhile")


def _add_engine(parser: argparse.ArgumentParser, count: Callable[[str], int]) -> None:
    engine = parser.add_argument_group("engine")
    for name, kind, text in (
        ("token_budget", count, "tokens of a step"),
        ("max_batch", count, "requests at a time"),
        ("async_depth", int, "steps planned ahead of the counts, 0 to 2"),
        ("block_size", count, "tokens of a prefix block"),
        ("kv_tokens", count, "tokens that the KV cache holds"),
        ("max_context", count, "tokens of prompt and output"),
        ("cancel_share", float, "requests whose client may go away"),
        ("cancel_mean_ms", float, "mean patience of those"),
        ("length_share", float, "requests that end by length, not by an end token"),
        ("slo_ttft_ms", float, "time to first token that counts as good"),
        ("slo_tpot_ms", float, "time per output token that counts as good"),
        ("seed", int, "of all that is drawn"),
    ):
        option = f"--{name.replace('_', '-')}"
        engine.add_argument(
            option, type=kind, metavar="N" if kind is not float else "X", help=text + _default_note(name)
        )
    engine.add_argument(
        "--prefill",
        choices=("kernel", "rows"),
        default="kernel",
        help="prompts by a kernel in place, or as rows of steps",
    )
    engine.add_argument("--preemption", choices=("recompute", "retract"), default="recompute")
    engine.add_argument("--no-prefix-cache", action="store_true", help="every prompt is prefilled whole")
    engine.add_argument("--cache-outputs", action="store_true", help="publish decoded blocks, too")


def _add_cost(parser: argparse.ArgumentParser) -> None:
    cost = parser.add_argument_group("cost")
    cost.add_argument(
        "--bench", dest="bench_file", metavar="FILE", help="results of specstate bench gpu --json (default: an H200's)"
    )
    cost.add_argument("--cost", metavar="FILE", help="the rest of the model (default: derived for the preset)")
    cost.add_argument(
        "--check-calibration",
        nargs="?",
        const="",
        metavar="FILE",
        help="predict the results in FILE from those of --bench; without FILE each of --bench from the others",
    )


def _add_output(parser: argparse.ArgumentParser, count: Callable[[str], int]) -> None:
    out = parser.add_argument_group("output")
    out.add_argument("--sweep", metavar="WHAT", help="policy, max_query_len or both: compare choices in one table")
    out.add_argument(
        "--policies",
        choices=POLICIES,
        nargs="+",
        default=list(POLICIES),
        metavar="NAME",
        help="of a sweep (default: all)",
    )
    out.add_argument(
        "--windows", type=count, nargs="+", default=[1, 2, 4, 8], metavar="T", help="of a sweep (default: 1 2 4 8)"
    )
    out.add_argument("--plot", metavar="FILE", help="a PNG of throughput, latency and occupancy")
    out.add_argument("--chrome-trace", metavar="FILE", help="a timeline for Perfetto")
    out.add_argument("--record", metavar="FILE", help="a step trace for specstate replay")
    out.add_argument(
        "--execute", choices=("reference", "triton"), help="run a small shape for real, every state against the oracle"
    )
    out.add_argument("--debug", action="store_true", help="the manager checks every rule at every step")


def _default_note(name: str) -> str:
    default = getattr(_SETTINGS, name)
    if default is None:
        return ""
    return f" (default: {f'{default:g}' if isinstance(default, float) else default})"
