"""Continuous-batching speculative decoding in one function, on specstate's public contract."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch

from model import Model
from specstate import Handle, KDALayerSpec, LayerParams, StateConfig, StateManager, StepMetadata


class Drafter(Protocol):
    """What the loop asks of a drafter; `drafter.NgramDrafter` is one."""

    def extend(self, tokens: Sequence[int]) -> None:
        """Appends tokens to the text that drafts continue."""

    def propose(self, n: int) -> list[int]:
        """At most `n` drafts."""


@dataclass(eq=False)
class Generation:
    """A request: what it is fed, what it produced, and counts over its decode windows."""

    index: int
    tokens: list[int]
    """Prompt and output so far."""
    prompt_len: int
    handle: Handle | None = None
    committed_len: int = 0
    """Tokens in the manager's state; the next window begins with the one after them."""
    drafter: Drafter | None = None
    accepted_counts: list[int] = field(default_factory=list)
    """Accepted tokens of each decode window, its first token included: their sum is the output behind its first byte."""
    began: float = 0.0
    ended: float = 0.0
    """Clock readings in seconds, before the first decode window and after the last."""

    @property
    def tokens_per_second(self) -> float:
        """Of the decode windows; 0 without any."""
        return sum(self.accepted_counts) / (self.ended - self.began) if self.accepted_counts else 0.0

    @property
    def output(self) -> bytes:
        return bytes(self.tokens[self.prompt_len :])


@dataclass
class Decoded:
    """Outputs of a run, in the order of the prompts, and what it took."""

    requests: list[Generation]
    target_forwards: int
    """Calls of the model, prompt processing included."""
    seconds: float


def make_manager(model: Model, max_requests: int, max_query_len: int, fold_policy: str) -> StateManager:
    """A manager of the model's state, on its device and in its dtype (float32 or float64)."""
    sizes, dtype = model.config, str(model.embedding.dtype).removeprefix("torch.")
    layer = KDALayerSpec(
        num_heads=sizes.num_heads,
        head_k_dim=sizes.head_k_dim,
        head_v_dim=sizes.head_v_dim,
        conv_kernel_size=sizes.conv_kernel_size,
    )
    config = StateConfig(
        num_layers=sizes.num_layers,
        layer=layer,
        max_requests=max_requests,
        max_query_len=max_query_len,
        fold_policy=fold_policy,
        checkpoint_dtype=dtype,
        activation_dtype=dtype,
    )
    params = [LayerParams(*tensors) for tensors in model.layer_params()]
    return StateManager(config, params, device=model.embedding.device, backend="reference")


def decode(
    model: Model,
    manager: StateManager,
    prompts: Sequence[bytes],
    max_bytes: int,
    make_drafter: Callable[[], Drafter] | None = None,
    on_text: Callable[[int, bytes], None] | None = None,
) -> Decoded:
    """Greedily continues every prompt by `max_bytes` bytes; requests enter as slots fall free, and leave when done.

    A prompt enters the state in "prompt" rows, the last of which samples the first byte of output. From there on a
    window is the last byte, with drafts behind it where `make_drafter` is given. `on_text(index, piece)` gets the output
    as it comes. Prompts must hold at least one byte.
    """
    device, longest = model.embedding.device, manager.config.max_query_len
    requests = [Generation(i, list(prompt), len(prompt)) for i, prompt in enumerate(prompts)]
    waiting, running = deque(requests), list[Generation]()
    target_forwards, began = 0, time.perf_counter()

    while waiting or running:
        while waiting and manager.can_admit():
            request = waiting.popleft()
            request.handle = manager.admit(str(request.index))
            if make_drafter is not None:
                request.drafter = make_drafter()
                request.drafter.extend(request.tokens)
            running.append(request)

        windows, kinds = [], []
        for request in running:
            unread = request.tokens[request.committed_len :]
            if request.committed_len < request.prompt_len:
                windows.append(unread[:longest])
                kinds.append("prompt")
            else:
                remaining = request.prompt_len + max_bytes - len(request.tokens)
                room = min(longest, remaining) - 1  # a window yields one token more than the drafts it accepts
                windows.append(unread + (request.drafter.propose(room) if request.drafter and room else []))
                kinds.append("decode")

        handles = tuple(request.handle for request in running)
        lengths = tuple(len(window) for window in windows)
        step = manager.begin_step(StepMetadata(handles=handles, query_lens=lengths, row_kinds=tuple(kinds)))
        tokens = torch.tensor([token for window in windows for token in window], device=device)
        logits = model(tokens, step.verify)
        target_forwards += 1
        result = step.sample(logits, tokens)
        copy = result.to_host_async()
        step.defer(result)

        sampled = copy.wait()
        rows = zip(list(running), kinds, sampled.num_accepted.tolist(), sampled.tokens.tolist(), strict=True)
        for request, kind, num_accepted, row in rows:
            request.committed_len += num_accepted
            if request.committed_len < request.prompt_len:
                continue
            new = [token for token in row if token >= 0]
            request.tokens += new
            if kind == "decode":
                request.accepted_counts.append(num_accepted)
            else:
                request.began = time.perf_counter()
            if request.drafter is not None:
                request.drafter.extend(new)
            if on_text is not None:
                on_text(request.index, bytes(new))
            if len(request.tokens) - request.prompt_len >= max_bytes:
                request.ended = time.perf_counter()
                manager.release(request.handle)
                running.remove(request)

    return Decoded(requests, target_forwards, time.perf_counter() - began)


def mean_acceptance_length(requests: Sequence[Generation]) -> float:
    """Output tokens per decode window: accepted drafts and the bonus token."""
    return sum(sum(r.accepted_counts) for r in requests) / sum(len(r.accepted_counts) for r in requests)


def acceptance_per_position(requests: Sequence[Generation], max_query_len: int) -> list[float]:
    """Share of all decode windows that accepted their first, second, ... (max_query_len - 1)-th draft.

    A window that offered fewer drafts counts as not accepting the rest, so 1 + the sum is the mean acceptance length.
    """
    counts = [count for r in requests for count in r.accepted_counts]
    return [sum(count > position for count in counts) / len(counts) for position in range(1, max_query_len)]
