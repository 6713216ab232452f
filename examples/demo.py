"""Decodes one prompt with and without speculation on a CPU, and compares the two (`specstate demo`)."""

from __future__ import annotations

import argparse
import codecs
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from decode import Decoded, acceptance_per_position, decode, make_manager, mean_acceptance_length
from drafter import NgramDrafter
from model import Model, load_model
from specstate import plan_bytes

FOLDER = Path(__file__).parent
LONGEST_PROMPT_BYTES = 4096


class BadInput(ValueError):
    """Something that the user gave, or a file that should be there, is not usable."""


def load_prompts(folder: Path) -> list[tuple[str, bytes]]:
    """File name and text of each held-out prompt in `prompts.json`."""
    entries = json.loads((folder / "prompts.json").read_text())
    return [(entry["file"], entry["text"].encode()) for entry in entries]


def find_prompt(which: str) -> tuple[str, bytes]:
    """Name and bytes of a prompt: an index into the held-out prompts, or the end of a file."""
    if which.lstrip("-").isdecimal():
        prompts = load_prompts(FOLDER)
        if not 0 <= int(which) < len(prompts):
            raise BadInput(f"prompt {which} is outside 0..{len(prompts) - 1}, the held-out prompts")
        return prompts[int(which)]
    path = Path(which)
    if not path.is_file():
        raise BadInput(f"prompt {which!r} is neither an index nor a file")
    text = path.read_bytes()[-LONGEST_PROMPT_BYTES:]
    if not text:
        raise BadInput(f"prompt file {which!r} is empty")
    return path.name, text


def run(options: argparse.Namespace) -> int:
    """`specstate demo`: 0, 1 when the two outputs differ, 2 with a line on stderr for bad input.

    options: json, policy, window, max_bytes, prompt (index or path, as text), dtype ("float32" or "float64").
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # matrices this small gain nothing from a second thread
    try:
        return _run(options)
    except (ValueError, OSError) as error:
        print(f"specstate demo: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    finally:
        torch.set_num_threads(threads)


def _run(options: argparse.Namespace) -> int:
    if options.max_bytes < 2:
        raise ValueError(f"--max-bytes {options.max_bytes} must be at least 2: the prompt's own forward gives the first")
    name, prompt = find_prompt(options.prompt)
    model = load_model(FOLDER / "weights", getattr(torch, options.dtype))
    plan = plan_bytes(make_manager(model, 1, options.window, options.policy).config)
    decode(model, make_manager(model, 1, options.window, options.policy), [prompt[-16:]], 8)  # warms up

    results: dict[str, Decoded] = {}
    if not options.json:
        print(f"--- prompt: {name}\n{prompt.decode(errors='replace')}")
    for title, make_drafter in (("without speculation", None), ("with speculation", NgramDrafter)):
        if not options.json:
            print(f"\n--- {title}")
        manager = make_manager(model, 1, options.window, options.policy)
        show = None if options.json else _printer()
        results[title] = decode(model, manager, [prompt], options.max_bytes, make_drafter, show)
    (plain,), (ours,) = (result.requests for result in results.values())

    report = {
        "outputs_equal": ours.output == plain.output,
        "mean_acceptance_length": mean_acceptance_length([ours]),
        "acceptance_per_position": acceptance_per_position([ours], options.window),
        "tokens_per_second": ours.tokens_per_second,
        "plain_tokens_per_second": plain.tokens_per_second,
        "state_bytes": plan.bytes_per_request,
        "snapshot_bytes": plan.snapshot_bytes_per_request,
    }
    if options.json:
        print(json.dumps(report))
    else:
        print("\n" + _table(report, options, model, len(ours.accepted_counts) / len(ours.output)))
    return 0 if report["outputs_equal"] else 1


def _printer() -> Callable[[int, bytes], None]:
    # A window may end inside a character of several bytes.
    decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
    return lambda _, piece: print(decoder.decode(piece), end="", flush=True)


def _table(report: dict[str, Any], options: argparse.Namespace, model: Model, forwards_per_token: float) -> str:
    ours, snapshots = report["state_bytes"] / 1024, report["snapshot_bytes"] / 1024
    rows = [
        ("outputs equal", "yes" if report["outputs_equal"] else "NO"),
        ("mean acceptance length, bonus included", f"{report['mean_acceptance_length']:.2f}"),
        ("acceptance per position", " ".join(f"{share:.2f}" for share in report["acceptance_per_position"]) or "-"),
        ("target forwards per token", f"{forwards_per_token:.2f} (plain: 1.00)"),
        ("tokens per second", f"{report['tokens_per_second']:.0f} (plain: {report['plain_tokens_per_second']:.0f})"),
        ("state memory per request", f"{ours:.0f} KiB (a snapshot per token: {snapshots:.0f} KiB)"),
    ]
    title = f"{model.num_parameters():,} parameters, {options.dtype}, policy {options.policy}, window {options.window}"
    return "\n".join([f"--- {title}", *(f"{label:40} {value}" for label, value in rows)])


def main() -> int:
    """The same from the command line, without the package's own entry point."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="print one JSON object and nothing else")
    parser.add_argument("--policy", choices=("eager", "deferred", "ring"), default="ring")
    parser.add_argument("--window", type=int, default=8, help="tokens verified in a step")
    parser.add_argument("--max-bytes", type=int, default=256)
    parser.add_argument("--prompt", default="0", help="index of a held-out prompt, or a file")
    parser.add_argument("--dtype", choices=("float32", "float64"), default="float32")
    return run(parser.parse_args())


if __name__ == "__main__":
    sys.exit(main())
