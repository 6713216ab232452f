"""Continuous-batching speculative decoding in one function, on specstate's public contract."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from model import Model
from specstate import (
    Handle,
    HostCopy,
    KDALayerSpec,
    LayerParams,
    SamplingParams,
    StateConfig,
    StateManager,
    StepMetadata,
)


class Drafter(Protocol):
    """What the loop asks of a drafter; `drafter.NgramDrafter` is one."""

    def extend(self, tokens: Sequence[int]) -> None:
        """Appends tokens to the text that drafts continue."""

    def propose(self, n: int) -> list[int]:
        """At most `n` drafts."""


@dataclass(eq=False)
class Generation:
    """A request: what it is fed and what it produced."""

    index: int
    tokens: list[int]
    """Prompt and output so far."""
    prompt_len: int
    handle: Handle | None = None
    committed_len: int = 0
    """Tokens in the manager's state; the next window begins with the one after them."""
    drafter: Drafter | None = None

    @property
    def output(self) -> bytes:
        return bytes(self.tokens[self.prompt_len :])


class Listener:
    """Is told how a run goes; this one does nothing with it."""

    def on_output(self, request: Generation, new: list[int]) -> None:
        """A window has yielded `new` tokens, which are in `request.tokens` already. The first one is the prompt's."""

    def on_done(self, request: Generation) -> None:
        """The request has all its output; its state can still be read."""


def make_manager(
    model: Model,
    max_requests: int,
    max_query_len: int,
    fold_policy: str,
    backend: str = "reference",
    device: torch.device | str | None = None,
) -> StateManager:
    """A manager of the model's state, in its dtype (float32 or float64) and, unless `device` says so, on its device."""
    sizes, dtype = model.config, str(model.embedding.dtype).removeprefix("torch.")
    device = model.embedding.device if device is None else device
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
    params = [LayerParams(*(x if x is None else x.to(device) for x in layer)) for layer in model.layer_params()]
    return StateManager(config, params, device=device, backend=backend)


def run_step(model: Model, manager: StateManager, metadata: StepMetadata, tokens: torch.Tensor) -> HostCopy:
    """A whole step over the windows `tokens`: the model's forward with the manager's verify, sampling, and its end."""
    step = manager.begin_step(metadata)
    logits = model(tokens, step.verify)
    result = step.sample(logits, tokens)
    # The copy stands in the stream before the step's end: the host has its tokens, and can go on to the next drafts,
    # while the device still folds.
    copy = result.to_host_async()
    step.defer(result)
    return copy


def decode(
    model: Model,
    manager: StateManager,
    prompts: Sequence[bytes],
    max_bytes: int,
    make_drafter: Callable[[], Drafter] | None = None,
    listener: Listener | None = None,
    sampling: SamplingParams | None = None,
    run: Callable[[Model, StateManager, StepMetadata, torch.Tensor], HostCopy] = run_step,
) -> list[Generation]:
    """Greedily continues every prompt by at most `max_bytes` bytes; requests enter as slots fall free, leave when done.

    A prompt enters the state in "prompt" rows, the last of which samples the first byte of output. From there on a
    window is the last byte, with drafts behind it where `make_drafter` is given. A request ends after `max_bytes`, or
    with the first of `sampling.end_token_ids`, which is kept. Prompts must hold at least one byte. `run` does one step:
    `graph_decode.py` has one that replays a CUDA graph.
    """
    device, longest = model.embedding.device, manager.config.max_query_len
    listener = listener or Listener()
    requests = [Generation(i, list(prompt), len(prompt)) for i, prompt in enumerate(prompts)]
    waiting, running = deque(requests), list[Generation]()

    while waiting or running:
        while waiting and manager.can_admit():
            request = waiting.popleft()
            request.handle = manager.admit(str(request.index), sampling)
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
        metadata = StepMetadata(handles=handles, query_lens=lengths, row_kinds=tuple(kinds))
        tokens = torch.tensor([token for window in windows for token in window], device=device)
        sampled = run(model, manager, metadata, tokens).wait()
        columns = (column.tolist() for column in (sampled.num_accepted, sampled.tokens, sampled.finished))
        # A padded step has more rows than requests.
        for request, num_accepted, row, finished in zip(list(running), *columns, strict=False):
            request.committed_len += num_accepted
            if request.committed_len < request.prompt_len:
                continue  # what a part of a prompt samples means nothing, an end token neither
            new = [token for token in row if token >= 0]
            request.tokens += new
            if request.drafter is not None:
                request.drafter.extend(new)
            listener.on_output(request, new)
            if finished or len(request.tokens) - request.prompt_len >= max_bytes:
                listener.on_done(request)
                manager.release(request.handle)
                running.remove(request)

    return requests
