"""Shows that speculative decoding changes nothing: greedy output and states against a plain decode.

    python examples/lossless.py          # 20 prompts x 512 bytes, both drafters, windows 1..8, three fold policies

"Plain" is a loop over single tokens on `recurrence.SerialMixer`, which shares no code with the library. Where its two
best logits lie closer than `TIE`, either may be chosen: such a difference is counted as a tie, and the comparison goes
on from the plain text. Anything else that differs ends the script with exit code 1. A draft model's state, which its
own manager rolls back, is compared like the target's.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import product
from pathlib import Path

import torch
from torch import Tensor

from acceptance import Statistics
from decode import Drafter, Generation, decode, make_manager, run_step
from drafters import KINDS, MakeDrafter, drafter_maker
from model import Model, load_model
from model_drafter import ModelDrafter
from ngram_drafter import NgramDrafter
from prompts import load_prompts
from recurrence import SerialMixer
from specstate import Handle, HostCopy, StateManager

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
    target_error: float = 0.0
    drafter_error: float = 0.0
    """Largest errors of an end state, as in `EndStates`."""
    statistics: Statistics | None = None
    """Of the run over the whole prompts."""

    def failed(self, dtype: torch.dtype) -> bool:
        """Whether outputs or states differ by more than the dtype allows; NaN counts as different."""
        errors = (self.target_error, self.drafter_error)
        return self.mismatches > 0 or not all(error < STATE_ERROR_LIMIT[dtype] for error in errors)


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
    make_drafter: MakeDrafter = lambda target: NgramDrafter(),
    make_run: Callable[[Model, StateManager], Callable[..., HostCopy]] | None = None,
) -> Report:
    """Decodes the prompts of `plain` speculatively, `batch` at a time, and compares every byte and every end state.

    `make_run` makes what does a step, by default `decode.run_step`.
    """
    report, prompts = Report(), plain.prompts
    prompts_left = {i: (prompt, 0) for i, prompt in enumerate(prompts)}  # index: (prompt, output bytes it contains)
    while prompts_left:
        manager = make_manager(model, batch, window, policy, backend)
        drafter = make_drafter(manager)
        run = run_step if make_run is None else make_run(model, manager)
        length = plain.gaps.shape[1]
        rest = list(prompts_left.items())
        prompts_left = {}
        # Requests of one call share max_bytes; what a tie cut short runs on its own.
        for group in [rest] if len(rest) == len(prompts) else [[item] for item in rest]:
            done = group[0][1][1]
            states = EndStates(model, manager, drafter)
            requests = decode(model, manager, [p for _, (p, _) in group], length - done, drafter, states, run=run)
            report.statistics = report.statistics or states
            report.target_error = max(report.target_error, states.target_error, key=_nan_is_largest)
            report.drafter_error = max(report.drafter_error, states.drafter_error, key=_nan_is_largest)
            for (i, _), request in zip(group, requests, strict=True):
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
    """Compares every state that a request ends with, the target's and a draft model's, with `scratch_states`."""

    def __init__(self, model: Model, manager: StateManager, drafter: Drafter) -> None:
        super().__init__()
        self.model, self.manager, self.drafter = model, manager, drafter
        self.target_error = self.drafter_error = 0.0
        """The largest of all requests, layers, and recurrent and conv states, relative to the state's norm."""

    def on_done(self, request: Generation) -> None:
        committed = bytes(request.tokens[: request.committed_len])
        error = _state_error(self.model, self.manager, request.handle, committed)
        self.target_error = max(self.target_error, error, key=_nan_is_largest)
        if isinstance(self.drafter, ModelDrafter):
            own = self.drafter
            error = _state_error(own.model, own.manager, own.handles[request], committed)
            self.drafter_error = max(self.drafter_error, error, key=_nan_is_largest)


def _state_error(model: Model, manager: StateManager, handle: Handle, committed: bytes) -> float:
    errors = []
    for layer, expected in enumerate(scratch_states(model, committed)):
        for got, want in zip(manager.read(handle, layer), expected, strict=True):
            errors.append(float((got - want).norm() / want.norm()))
    return max(errors, key=_nan_is_largest)


def _nan_is_largest(error: float) -> float:
    return error if error == error else float("inf")


def main() -> int:
    """Runs the grid and prints a line a cell."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, default=20)
    parser.add_argument("--max-bytes", type=int, default=512)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--windows", type=int, nargs="+", default=range(1, 9))
    parser.add_argument("--drafters", nargs="+", choices=KINDS, default=KINDS)
    parser.add_argument("--policies", nargs="+", default=("eager", "deferred", "ring"))
    parser.add_argument("--dtype", choices=("float32", "float64"), default="float32")
    options = parser.parse_args()
    torch.set_num_threads(1)  # matrices this small gain nothing from a second thread
    folder, dtype, began = Path(__file__).parent, getattr(torch, options.dtype), time.monotonic()
    model = load_model(folder / "weights", dtype)
    prompts = [prompt for _, prompt in load_prompts(folder)[: options.prompts]]
    plain = plain_decode(model, prompts, options.max_bytes)
    print(f"plain: {len(prompts)} prompts x {options.max_bytes} bytes, smallest gap {plain.gaps.min():.1e}", flush=True)
    makers = {kind: drafter_maker(kind, folder / "weights", dtype) for kind in options.drafters}
    ties = failures = 0
    for kind, policy, window in product(options.drafters, options.policies, options.windows):
        report = compare(model, plain, policy, options.batch, window, make_drafter=makers[kind])
        ties += report.ties
        failures += report.failed(dtype)
        print(
            f"{kind:5} {policy:8} window {window}: {report.mismatches} mismatches, {report.ties} ties, "
            f"mean acceptance {report.statistics.mean_acceptance_length:.2f}, "
            f"state error {report.target_error:.1e}, the drafter's {report.drafter_error:.1e}",
            flush=True,
        )
    verdict = "DIFFERENT" if failures else "equal"
    print(f"{verdict}: {ties} ties, {failures} cells failed, {time.monotonic() - began:.0f} s")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
