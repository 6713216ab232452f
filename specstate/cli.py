"""The command line: ``specstate demo | plan | simulate | replay | bench | doctor``.

Exit codes: 0 fine; 1 a check failed; 2 bad input or usage, with one line on stderr. With ``--json`` one object goes
to stdout and nothing else.
"""

import argparse
import importlib.util
import json
import os
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn, get_args

from pydantic import ValidationError

import specstate
from specstate.bench.cli import add_bench
from specstate.config import ActivationDtype, CheckpointDtype, FoldPolicy
from specstate.errors import SpecStateError, shown
from specstate.plan_report import PlanRequest, build_plan_report
from specstate.presets import PRESETS, Preset, find_preset
from specstate.scheduler.options import add_options as add_simulate_options

FINE, CHECK_FAILED, BAD_INPUT = 0, 1, 2
#: What a shell reports for a process that SIGINT or SIGPIPE ended.
INTERRUPTED, PIPE_CLOSED = 130, 141

#: Packages that the demo needs on top of the core dependencies.
DEMO_PACKAGES = ("safetensors",)

#: Above this no shape is meant; below it every product of sizes prints.
LARGEST_COUNT = 2**31 - 1


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit code. Never raises for what a user can do."""
    command = "specstate"
    if hasattr(sys.stdout, "reconfigure"):  # a request or a prompt may have letters that the terminal has not
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        parser = build_parser()
        _complete(parser)
        try:
            options = parser.parse_args(argv)
        except SystemExit:  # --help and --version have printed
            return _flushed(FINE)
        command = " ".join(["specstate", options.command, *([options.bench] if "bench" in options else [])])
        return _flushed(int(options.run(options)))
    except UsageError as error:
        return _refuse(error)
    except BrokenPipeError:
        _discard_stdout()
        return PIPE_CLOSED
    except KeyboardInterrupt:
        return INTERRUPTED
    except (SpecStateError, ValidationError, OSError, MemoryError) as error:
        return _refuse(f"{command}: {error_text(error)}")


def build_parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="specstate",
        description="State manager for speculative decoding on Kimi Delta Attention layers.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"specstate {specstate.__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    _add_demo(commands)
    _add_plan(commands)
    _add_simulate(commands)
    _add_replay(commands)
    add_bench(commands, _add_command, _count)
    _add_command(commands, "doctor", run_doctor, "say what runs on this machine, and check its kernels")
    return parser


def _add_plan(commands: Any) -> None:
    plan = _add_command(
        commands, "plan", run_plan, "bytes per request under each fold policy, and the requests that fit"
    )
    plan.add_argument("--preset", metavar="NAME", help=f"a published model: {', '.join(PRESETS)}")
    shape = plan.add_argument_group("a shape of your own, in place of --preset")
    shape.add_argument("--num-layers", type=_count, metavar="N", help="KDA layers of the model")
    shape.add_argument("--num-heads", type=_count, metavar="N", help="heads of the model, over all ranks")
    shape.add_argument("--head-k-dim", type=_count, metavar="N", help="key dimension of a head (default: 128)")
    shape.add_argument("--head-v-dim", type=_count, metavar="N", help="value dimension of a head (default: the key's)")
    shape.add_argument(
        "--conv-kernel-size", type=_count_or_zero, metavar="N", help="0: the model convolves itself (default: 4)"
    )
    plan.add_argument("--tp", type=_count, default=1, metavar="N", help="tensor-parallel ranks (default: 1)")
    plan.add_argument(
        "--max-query-len", type=_count, default=8, metavar="T", help="tokens of the longest window (default: 8)"
    )
    plan.add_argument(
        "--memory-gib", type=float, default=80.0, metavar="GIB", help="memory for the state on one rank (default: 80)"
    )
    plan.add_argument("--checkpoint-dtype", choices=get_args(CheckpointDtype), default="float32")
    plan.add_argument("--activation-dtype", choices=get_args(ActivationDtype), default="bfloat16")


def run_plan(options: argparse.Namespace) -> int:
    report = build_plan_report(
        PlanRequest(
            model=_planned_model(options),
            tp=options.tp,
            max_query_len=options.max_query_len,
            memory_gib=options.memory_gib,
            checkpoint_dtype=options.checkpoint_dtype,
            activation_dtype=options.activation_dtype,
        )
    )
    print(json.dumps(report.to_json()) if options.json else report.to_text())
    return FINE


def _planned_model(options: argparse.Namespace) -> Preset:
    names = ("num_layers", "num_heads", "head_k_dim", "head_v_dim", "conv_kernel_size")
    shape = {name: getattr(options, name) for name in names if getattr(options, name) is not None}
    if options.preset is not None:
        if shape:
            raise SpecStateError(f"--preset and --{next(iter(shape)).replace('_', '-')} exclude each other")
        return find_preset(options.preset)
    if "num_layers" not in shape or "num_heads" not in shape:
        raise SpecStateError("a model is needed: --preset NAME, or --num-layers N and --num-heads N")
    k_dim = shape.get("head_k_dim", 128)
    return Preset(
        name="custom",
        num_layers=shape["num_layers"],
        num_heads=shape["num_heads"],
        head_k_dim=k_dim,
        head_v_dim=shape.get("head_v_dim", k_dim),
        conv_kernel_size=shape.get("conv_kernel_size", 4) or None,
        gate_lower_bound=None,  # the gate costs no bytes
    )


def _add_simulate(commands: Any) -> None:
    summary = "serve a trace of requests in simulated time: throughput, latency, slots"
    simulate = _add_command(commands, "simulate", run_simulate, summary)
    add_simulate_options(simulate, _count)


def run_simulate(options: argparse.Namespace) -> int:
    from specstate.scheduler.command import run

    return run(options)


def _add_demo(commands: Any) -> None:
    demo = _add_command(commands, "demo", run_demo, "decode a prompt with and without speculation, and compare the two")
    demo.add_argument("--examples", metavar="DIR", help="the examples/ folder of a checkout (default: look for it)")
    demo.add_argument("--drafter", choices=("ngram", "model"), default="ngram", help="who drafts (default: ngram)")
    demo.add_argument("--policy", choices=get_args(FoldPolicy), default="ring", help="fold policy (default: ring)")
    demo.add_argument("--window", type=_count, default=8, metavar="T", help="tokens verified in a step (default: 8)")
    demo.add_argument("--max-bytes", type=_count, default=256, metavar="N", help="bytes to decode (default: 256)")
    demo.add_argument(
        "--prompt", default="9", metavar="WHICH", help="index of a held-out prompt or a file (default: 9)"
    )
    demo.add_argument("--dtype", choices=("float32", "float64"), default="float32", help="of model and state")


def run_demo(options: argparse.Namespace) -> int:
    folder = find_examples(options.examples)
    missing = [name for name in DEMO_PACKAGES if importlib.util.find_spec(name) is None]
    if missing:
        raise SpecStateError(
            f"the demo in {folder} (--examples DIR for another) needs {', '.join(missing)}: "
            "install the extra specstate[demo]"
        )
    return int(_load_demo(folder).run(options))


def find_examples(given: str | None) -> Path:
    """The folder with demo.py: ``given``, else beside the package's checkout, else below the current directory."""
    beside_package = Path(specstate.__file__).parent.parent / "examples"
    places = [beside_package, Path("examples")] if given is None else [Path(given)]
    for folder in places:
        # Several of our own: another project may well have an examples/demo.py.
        if all((folder / name).is_file() for name in ("demo.py", "decode.py", "drafters.py", "weights/model.json")):
            return folder.resolve()
    looked = " and ".join(str(folder) for folder in places)
    raise SpecStateError(f"no demo and model in {looked}: name the examples/ folder of a checkout with --examples DIR")


def _load_demo(folder: Path) -> ModuleType:
    # The examples import each other by name, as they do when one of them is run as a script.
    sys.path.insert(0, str(folder))
    spec = importlib.util.spec_from_file_location("demo", folder / "demo.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["demo"] = module
    spec.loader.exec_module(module)
    return module


def _add_replay(commands: Any) -> None:
    replay = _add_command(commands, "replay", run_replay, "replay a step trace against the oracle")
    replay.add_argument("file", metavar="FILE", help="a trace, one JSON object a line")
    replay.add_argument("--partial", action="store_true", help="accept a trace that was never closed")
    replay.add_argument("--full-shape", action="store_true", help="replay at the recorded sizes, not shrunk")
    replay.add_argument("--backend", choices=("reference", "triton", "metadata"), default="reference")


def run_replay(options: argparse.Namespace) -> int:
    from specstate.replay import replay_file

    report = replay_file(
        Path(options.file), partial=options.partial, full_shape=options.full_shape, backend=options.backend
    )
    first = report.first_difference
    if options.json:
        difference = None if first is None else {"event": first.event, "kind": first.kind, "what": first.what}
        print(json.dumps({"ok": report.ok, "events": report.events, "first_difference": difference}))
    elif first is None:
        print(f"{report.events} events replayed, no difference")
    else:
        print(f"first difference at event {first.event} ({first.kind}): {first.what}")
    return FINE if report.ok else CHECK_FAILED


def run_doctor(options: argparse.Namespace) -> int:
    from dataclasses import asdict

    from specstate.doctor import examine

    found = examine()
    if options.json:
        print(json.dumps(asdict(found)))
        return FINE if found.ok else CHECK_FAILED
    print(f"{', '.join(f'{name} {text}' for name, text in found.versions.items())}; {found.device}")
    print(f"backend {found.backend!r}, path {found.path!r}: {found.reason}")
    for check in found.checks:
        print(f"{'ok    ' if check.ok else 'FAILED'} {check.name}: {check.detail}")
    return FINE if found.ok else CHECK_FAILED


class UsageError(Exception):
    """A command line that does not parse; the text already names the command."""


class _Parser(argparse.ArgumentParser):
    """Raises in place of argparse's usage block and exit."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{self.prog}: {message} ({self.prog} --help lists the options)")


def _add_command(
    commands: Any, name: str, run: Callable[[argparse.Namespace], int], summary: str
) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = commands.add_parser(name, help=summary, description=summary, allow_abbrev=False)
    parser.add_argument("--json", action="store_true", help="print one JSON object and nothing else")
    parser.set_defaults(run=run)
    return parser


def _complete(parser: argparse.ArgumentParser) -> None:
    # Shell completion, where the extra specstate[cli] is installed; returns at once unless a shell asks for it.
    with suppress(ImportError):
        import argcomplete

        argcomplete.autocomplete(parser)


def _count(text: str) -> int:
    return _integer(text, 1)


def _count_or_zero(text: str) -> int:
    return _integer(text, 0)


def _integer(text: str, least: int) -> int:
    try:
        value = int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text[:40]!r} is not a whole number") from None
    if not least <= value <= LARGEST_COUNT:
        raise argparse.ArgumentTypeError(f"{value} is outside {least}..{LARGEST_COUNT}")
    return value


def error_text(error: Exception) -> str:
    """What ``error`` says, for one line: pydantic's errors as ``field = value: reason``."""
    if not isinstance(error, ValidationError):
        return str(error) or type(error).__name__
    reasons = []
    for entry in error.errors(include_url=False):
        field = ".".join(map(str, entry["loc"]))
        reason = entry["msg"].removeprefix("Value error, ")
        reasons.append(f"{field} = {shown(entry['input'])}: {reason}" if field else reason)
    return "; ".join(reasons)


def _flushed(code: int) -> int:
    # A closed pipe shows here, while main still watches, and not in the interpreter's own flush at exit.
    if sys.stdout is not None:
        sys.stdout.flush()
    return code


def _refuse(reason: object) -> int:
    print(" ".join(str(reason).split()), file=sys.stderr)
    return BAD_INPUT


def _discard_stdout() -> None:
    # What is still buffered has no reader.
    with suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


if __name__ == "__main__":
    sys.exit(main())
