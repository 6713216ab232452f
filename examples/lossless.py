"""Shows that speculative decoding changes nothing: greedy output and state against a plain decode.

    python examples/lossless.py                          # 20 prompts x 512 bytes, windows 1..8, three fold policies

"Plain" is a loop over single tokens on `recurrence.SerialMixer`, which shares no code with the library. Where its two
best logits lie closer than `TIE`, either may be chosen: such a difference is counted as a tie, and the comparison goes
on from the plain text. Anything else that differs ends the script with exit code 1.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import torch
from torch import Tensor

from acceptance import Statistics
from decode import Generation, decode, make_manager, run_step
from drafter import NgramDrafter
from model import Model, load_model
from prompts import load_prompts
from recurrence import SerialMixer
from specstate import HostCopy, StateManager

TIE = 1e-4
STATE_ERROR_LIMIT = {torch.float32: 1e-5, torch.float64: 1e-12}


@dataclass(frozen=True)
class Plain:
    """A plain greedy decode of some prompts."""

    prompts: list[bytes]
    outputs: list[bytes]
    gaps: Tensor
    """[prompts, bytes]: distance of the two best logits at each output byte."""


@dataclass
class Report:
    """What one comparison found."""

    ties: int = 0
    mismatches: int = 0
    largest_state_error: float = 0.0
    statistics: Statistics | None = None
    """Of the run over the whole prompts."""

    def failed(self, dtype: torch.dtype) -> bool:
        """Whether outputs or states differ by more than the dtype allows; NaN counts as different."""
        return self.mismatches > 0 or not self.largest_state_error < STATE_ERROR_LIMIT[dtype]


def plain_decode(model: Model, prompts: Sequence[bytes], max_bytes: int) -> Plain:
    """Continues all prompts in lock-step, one token a call; a shorter prompt begins its output earlier."""
    mix = SerialMixer(model.layer_params(), len(prompts))
    texts = [list(prompt) for prompt in prompts]
    gaps: list[list[float]] = [[] for _ in prompts]
    for position in range(max(len(prompt) for prompt in prompts) + max_bytes - 1):
        tokens = torch.tensor([text[min(position, len(text) - 1)] for text in texts], device=model.embedding.device)
        logits = model(tokens, mix)
        best = logits.topk(2)
        for i, text in enumerate(texts):
            if position == len(text) - 1 and len(gaps[i]) < max_bytes:
                text.append(int(best.indices[i, 0]))
                gaps[i].append(float(best.values[i, 0] - best.values[i, 1]))
    outputs = [bytes(text[len(prompt) :]) for text, prompt in zip(texts, prompts, strict=True)]
    return Plain(list(prompts), outputs, torch.tensor(gaps))


@lru_cache(maxsize=64)  # runs that agree end in the same texts
def scratch_states(model: Model, tokens: bytes) -> list[tuple[Tensor, Tensor]]:
    """Recurrent [H, V, K] and conv [C, W-1] of every layer after `tokens`, from zero, by the serial recurrence."""
    mix = SerialMixer(model.layer_params())
    model(torch.tensor(list(tokens), device=model.embedding.device), mix)
    return [(recurrent[0], conv[0]) for recurrent, conv in zip(mix.recurrent, mix.conv, strict=True)]


def compare(
    model: Model,
    plain: Plain,
    policy: str,
    batch: int,
    window: int,
    backend: str = "reference",
    make_run: Callable[[Model, StateManager], Callable[..., HostCopy]] | None = None,
) -> Report:
    """Decodes the prompts of `plain` speculatively, `batch` at a time, and compares every byte and every end state.

    `make_run` makes what does a step, by default `decode.run_step`.
    """
    report, prompts = Report(), plain.prompts
    prompts_left = {i: (prompt, 0) for i, prompt in enumerate(prompts)}  # index: (prompt, output bytes it contains)
    while prompts_left:
        manager = make_manager(model, batch, window, policy, backend)
        run = run_step if make_run is None else make_run(model, manager)
        length = plain.gaps.shape[1]
        rest = list(prompts_left.items())
        prompts_left = {}
        # Requests of one call share max_bytes; what a tie cut short runs on its own.
        for group in [rest] if len(rest) == len(prompts) else [[item] for item in rest]:
            done = group[0][1][1]
            states = EndStates(manager)
            requests = decode(model, manager, [p for _, (p, _) in group], length - done, NgramDrafter, states, run=run)
            report.statistics = report.statistics or states
            for (i, _), request in zip(group, requests, strict=True):
                committed = bytes(request.tokens[: request.committed_len])
                error = _state_error(states.states[request.index], scratch_states(model, committed))
                report.largest_state_error = max(report.largest_state_error, error, key=_nan_is_largest)
                wanted = plain.outputs[i][done:]
                differs = [at for at, (a, b) in enumerate(zip(request.output, wanted, strict=True)) if a != b]
                if not differs:
                    continue
                at = done + differs[0]
                if plain.gaps[i, at] >= TIE:
                    report.mismatches += 1
                    continue
                report.ties += 1
                if at + 1 < length:
                    prompts_left[i] = (prompts[i] + plain.outputs[i][: at + 1], at + 1)
    return report


class EndStates(Statistics):
    """Keeps the state that every request ends with."""

    def __init__(self, manager: StateManager) -> None:
        super().__init__()
        self.manager = manager
        self.states: dict[int, list[tuple[Tensor, Tensor]]] = {}
        """By request, layer by layer."""

    def on_done(self, request: Generation) -> None:
        layers = range(self.manager.config.num_layers)
        self.states[request.index] = [self.manager.read(request.handle, layer) for layer in layers]


def _state_error(states: list[tuple[Tensor, Tensor]], expected: list[tuple[Tensor, Tensor]]) -> float:
    """Largest error of a layer's recurrent or conv state, relative to that state's norm."""
    pairs = [pair for got, want in zip(states, expected, strict=True) for pair in zip(got, want, strict=True)]
    return max((float((got - want).norm() / want.norm()) for got, want in pairs), key=_nan_is_largest)


def _nan_is_largest(error: float) -> float:
    return error if error == error else float("inf")


def main() -> int:
    """Runs the grid and prints a line a cell."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, default=20)
    parser.add_argument("--max-bytes", type=int, default=512)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--windows", type=int, nargs="+", default=range(1, 9))
    parser.add_argument("--policies", nargs="+", default=("eager", "deferred", "ring"))
    parser.add_argument("--dtype", choices=("float32", "float64"), default="float32")
    options = parser.parse_args()
    torch.set_num_threads(1)  # matrices this small gain nothing from a second thread
    folder, dtype, began = Path(__file__).parent, getattr(torch, options.dtype), time.monotonic()
    model = load_model(folder / "weights", dtype)
    prompts = [prompt for _, prompt in load_prompts(folder)[: options.prompts]]
    plain = plain_decode(model, prompts, options.max_bytes)
    print(f"plain: {len(prompts)} prompts x {options.max_bytes} bytes, smallest gap {plain.gaps.min():.1e}", flush=True)
    ties = failures = 0
    for policy in options.policies:
        for window in options.windows:
            report = compare(model, plain, policy, options.batch, window)
            ties += report.ties
            failures += report.failed(dtype)
            print(
                f"{policy:8} window {window}: {report.mismatches} mismatches, {report.ties} ties, "
                f"mean acceptance {report.statistics.mean_acceptance_length:.2f}, "
                f"state error {report.largest_state_error:.1e}",
                flush=True,
            )
    verdict = "DIFFERENT" if failures else "equal"
    print(f"{verdict}: {ties} ties, {failures} cells failed, {time.monotonic() - began:.0f} s")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
