"""Decodes one prompt with and without speculation on a CPU, and compares the two (`specstate demo`)."""

from __future__ import annotations

import argparse
import codecs
import json
import sys
from pathlib import Path
from typing import Any

import torch

from acceptance import Statistics
from decode import Drafter, Generation, decode, make_manager
from drafters import KINDS, drafter_maker
from model import Model, load_model
from prompts import load_prompts
from specstate.cli import error_text

FOLDER = Path(__file__).parent
LONGEST_PROMPT_BYTES = 4096


def find_prompt(which: str) -> tuple[str, bytes]:
    """Name and bytes of a prompt: an index into the held-out prompts, or the end of a file."""
    if which.lstrip("-").isdecimal():
        prompts = load_prompts(FOLDER)
        if not 0 <= int(which) < len(prompts):
            raise ValueError(f"prompt {which} is outside 0..{len(prompts) - 1}, the held-out prompts")
        return prompts[int(which)]
    path = Path(which)
    if not path.is_file():
        raise ValueError(f"prompt {which!r} is neither an index nor a file")
    text = path.read_bytes()[-LONGEST_PROMPT_BYTES:]
    if not text:
        raise ValueError(f"prompt file {which!r} is empty")
    return path.name, text


def run(options: argparse.Namespace) -> int:
    """`specstate demo`: 0, 1 when the two outputs differ, 2 with a line on stderr for bad input.

    options: json, drafter ("ngram" or "model"), policy, window, max_bytes, prompt (index or path, as text), dtype
    ("float32" or "float64").
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # matrices this small gain nothing from a second thread
    try:
        return _run(options)
    except (ValueError, OSError) as error:
        print(f"specstate demo: {' '.join(error_text(error).split())}", file=sys.stderr)
        return 2
    finally:
        torch.set_num_threads(threads)


def _run(options: argparse.Namespace) -> int:
    if options.max_bytes < 2:
        raise ValueError(f"--max-bytes {options.max_bytes} must be 2 or more: the prompt's own forward gives the first")
    name, prompt = find_prompt(options.prompt)
    weights, dtype = FOLDER / "weights", getattr(torch, options.dtype)
    model = load_model(weights, dtype)
    manager = make_manager(model, 1, options.window, options.policy)
    drafter = drafter_maker(options.drafter, weights, dtype)(manager)
    decode(model, manager, [prompt[-16:]], 8, drafter)  # warms up

    runs: list[tuple[bytes, Statistics]] = []
    if not options.json:
        print(f"--- prompt: {name}\n{prompt.decode(errors='replace')}")
    for title, drafts_of in (("without speculation", Drafter()), ("with speculation", drafter)):
        if not options.json:
            print(f"\n--- {title}")
        statistics = Statistics() if options.json else ShownStatistics()
        (request,) = decode(model, manager, [prompt], options.max_bytes, drafts_of, statistics)
        runs.append((request.output, statistics))
    (plain_output, plain), (output, ours) = runs

    report = {
        "outputs_equal": output == plain_output,
        "mean_acceptance_length": ours.mean_acceptance_length,
        "acceptance_per_position": ours.acceptance_per_position(options.window),
        "target_forwards_per_token": ours.forwards_per_token,
        "tokens_per_second": ours.tokens_per_second,
        "plain_tokens_per_second": plain.tokens_per_second,
        "state_bytes": manager.plan.bytes_per_request,
        "snapshot_bytes": manager.plan.snapshot_bytes_per_request,
        "drafter": options.drafter,
        "drafter_state_bytes": drafter.state_bytes,
    }
    if options.json:
        print(json.dumps(report))
    else:
        print("\n" + _table(report, options, model))
    return 0 if report["outputs_equal"] else 1


class ShownStatistics(Statistics):
    """Prints the text as it comes."""

    def __init__(self) -> None:
        super().__init__()
        # A window may end inside a character of several bytes.
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def on_output(self, request: Generation, new: list[int]) -> None:
        super().on_output(request, new)
        print(self._decoder.decode(bytes(new)), end="", flush=True)


def _table(report: dict[str, Any], options: argparse.Namespace, model: Model) -> str:
    ours, snapshots = report["state_bytes"] / 1024, report["snapshot_bytes"] / 1024
    rows = [
        ("outputs equal", "yes" if report["outputs_equal"] else "NO"),
        ("mean acceptance length, bonus included", f"{report['mean_acceptance_length']:.2f}"),
        ("acceptance per position", " ".join(f"{share:.2f}" for share in report["acceptance_per_position"]) or "-"),
        ("target forwards per token", f"{report['target_forwards_per_token']:.2f} (plain: 1.00)"),
        ("tokens per second", f"{report['tokens_per_second']:.0f} (plain: {report['plain_tokens_per_second']:.0f})"),
        ("state memory per request", f"{ours:.0f} KiB (a snapshot per token: {snapshots:.0f} KiB)"),
        ("the drafter's own", f"{report['drafter_state_bytes'] / 1024:.0f} KiB"),
    ]
    how = f"{options.dtype}, policy {options.policy}, window {options.window}, drafter {options.drafter}"
    title = f"{model.num_parameters():,} parameters, {how}"
    return "\n".join([f"--- {title}", *(f"{label:40} {value}" for label, value in rows)])


def main() -> int:
    """The same from the command line, without the package's own entry point."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="print one JSON object and nothing else")
    parser.add_argument("--drafter", choices=KINDS, default="ngram", help="who drafts (default: ngram)")
    parser.add_argument("--policy", choices=("eager", "deferred", "ring"), default="ring")
    parser.add_argument("--window", type=int, default=8, help="tokens verified in a step")
    parser.add_argument("--max-bytes", type=int, default=256)
    parser.add_argument("--prompt", default="9", help="index of a held-out prompt, or a file")
    parser.add_argument("--dtype", choices=("float32", "float64"), default="float32")
    return run(parser.parse_args())


if __name__ == "__main__":
    sys.exit(main())
