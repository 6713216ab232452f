"""Decoding with the whole step in a CUDA graph: forward of the model, verify, sampling and the step's end.

    python examples/graph_decode.py          # on a GPU: held-out prompts, by hand and by graph, against a plain decode

`CapturedStep` takes the place of `decode.run_step`: it stages the windows of the moment, replays, tells the manager.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch

from acceptance import Statistics
from decode import Drafter, decode, make_manager
from lossless import TIE, compare, plain_decode
from model import Model, load_model
from ngram_drafter import NgramDrafter
from prompts import load_prompts
from specstate import HostCopy, StateManager, StepMetadata


class CapturedStep:
    """One captured step for as many rows and window tokens as `manager` can have; padding fills what a step leaves."""

    def __init__(self, model: Model, manager: StateManager) -> None:
        self.rows = manager.config.max_requests
        self.tokens = torch.zeros(
            self.rows * manager.config.max_query_len, dtype=torch.int64, device=model.embedding.device
        )
        # Libraries set themselves up in their first call, which must not be under capture: a step without requests.
        empty = manager.begin_step(StepMetadata(handles=(), query_lens=()), pad_to=(self.rows, len(self.tokens)))
        model(self.tokens, empty.verify)
        empty.cancel()
        manager.warmup()
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            step = manager.capture_step(self.rows, len(self.tokens))
            logits = model(self.tokens, step.verify)
            self.result = step.sample(logits, self.tokens)
            step.defer(self.result)

    def __call__(self, model: Model, manager: StateManager, metadata: StepMetadata, tokens: torch.Tensor) -> HostCopy:
        """Does what `decode.run_step` does."""
        step = manager.begin_step(metadata, pad_to=(self.rows, len(self.tokens)))
        self.tokens[: len(tokens)].copy_(tokens)
        self.graph.replay()
        step.replayed("defer")
        return self.result.to_host_async()


def main() -> int:
    """Decodes held-out prompts by hand and by graph; exit code 1 when a byte differs from the plain decode."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--max-bytes", type=int, default=256)
    parser.add_argument("--window", type=int, default=8)
    parser.add_argument("--policy", choices=("eager", "deferred", "ring"), default="ring")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("graph_decode: needs a GPU", file=sys.stderr)
        return 2
    folder = Path(__file__).parent
    model = load_model(folder / "weights", device="cuda")
    prompts = [prompt for _, prompt in load_prompts(folder)[: options.prompts]]
    plain = plain_decode(model, prompts, options.max_bytes)
    failed = False
    for title, run in (("by hand", None), ("by graph", CapturedStep)):
        report = compare(model, plain, options.policy, len(prompts), options.window, "triton", make_run=run)
        failed |= report.failed(torch.float32)
        print(
            f"{title}: {report.mismatches} mismatches, {report.ties} ties (gaps below {TIE:g}), state error "
            f"{report.target_error:.1e}"
        )
    print(f"tokens per second of {len(prompts)} requests, decode windows alone:")
    for title, window, drafter in (("plain", 1, Drafter), ("with speculation", options.window, NgramDrafter)):
        for way, run in (("by hand", None), ("by graph", CapturedStep)):
            figure = speed(model, prompts, options.max_bytes, options.policy, window, drafter, run)
            print(f"  {title:17} {way:9} {figure:8.0f}")
    return 1 if failed else 0


def speed(
    model: Model,
    prompts: list[bytes],
    max_bytes: int,
    policy: str,
    window: int,
    drafter: type[Drafter],
    run: type | None,
) -> float:
    """Tokens per second of the second of two runs."""
    manager = make_manager(model, len(prompts), window, policy, "triton")
    step = {} if run is None else {"run": run(model, manager)}
    for _ in range(2):
        statistics = Statistics()
        decode(model, manager, prompts, max_bytes, drafter(), statistics, **step)
    return statistics.tokens_per_second


if __name__ == "__main__":
    sys.exit(main())
