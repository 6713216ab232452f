"""Continuous-batching speculative decoding in one function, on specstate's public contract."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from model import Model
from specstate import (
    Handle,
    HostCopy,
    HostSample,
    KDALayerSpec,
    LayerParams,
    SamplingParams,
    StateConfig,
    StateManager,
    StepMetadata,
)


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

    @property
    def is_in_prompt(self) -> bool:
        """Some of the prompt is not in the state yet."""
        return self.committed_len < self.prompt_len

    @property
    def output(self) -> bytes:
        return bytes(self.tokens[self.prompt_len :])


class Drafter:
    """Drafts for all running requests at once; this one has no drafts. `drafters.py` names those that do."""

    state_bytes = 0
    """What a manager of the drafter's own keeps for a request."""

    def admit(self, request: Generation, sampling: SamplingParams | None) -> None:
        """The request enters, with its prompt in `request.tokens`."""

    def propose(self, requests: Sequence[Generation], rooms: Sequence[int]) -> list[list[int]]:
        """Drafts that go on after `request.tokens`, for each request at most as many as it has room for."""
        return [[] for _ in requests]

    def observe(
        self, requests: Sequence[Generation], metadata: StepMetadata, tokens: torch.Tensor, sampled: HostSample
    ) -> None:
        """The target has verified a window of every request: `tokens`, one window after another, as `metadata` says.

        What it accepted is in the first rows of `sampled`, and not in `request.tokens` yet.
        """

    def release(self, request: Generation) -> None:
        """The request leaves."""


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
    try:
        logits = model(tokens, step.verify)
        result = step.sample(logits, tokens)
    except BaseException:
        step.cancel()  # nothing of the window counts, and its requests can go on
        raise
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
    drafter: Drafter | None = None,
    listener: Listener | None = None,
    sampling: SamplingParams | None = None,
    run: Callable[[Model, StateManager, StepMetadata, torch.Tensor], HostCopy] = run_step,
) -> list[Generation]:
    """Continues every prompt by at most `max_bytes` bytes; requests enter as slots fall free, leave when done.

    A prompt enters the state in "prompt" rows, the last of which samples the first byte of output. From there on a
    window is the last byte, with the drafts of `drafter` behind it. A request ends after `max_bytes`, or
    with the first of `sampling.end_token_ids`, which is kept; it samples by `sampling`, the i-th prompt with its seed
    plus i, greedily without it. Prompts must hold at least one byte. `run` does one step:
    `graph_decode.py` has one that replays a CUDA graph.
    """
    device, longest = model.embedding.device, manager.config.max_query_len
    drafter, listener = drafter or Drafter(), listener or Listener()
    requests = [Generation(i, list(prompt), len(prompt)) for i, prompt in enumerate(prompts)]
    waiting, running = deque(requests), list[Generation]()

    while waiting or running:
        while waiting and manager.can_admit():
            request = waiting.popleft()
            # Requests with one seed would draw with the same numbers, and equal prompts give equal texts.
            own = sampling and sampling.model_copy(update={"seed": sampling.seed + request.index})
            request.handle = manager.admit(str(request.index), own)
            drafter.admit(request, own)
            running.append(request)

        generating = [request for request in running if not request.is_in_prompt]
        remaining = [request.prompt_len + max_bytes - len(request.tokens) for request in generating]
        rooms = [min(longest, n) - 1 for n in remaining]  # a window yields one token more than the drafts it accepts
        drafts = dict(zip(generating, drafter.propose(generating, rooms), strict=True))
        windows, kinds = [], []
        for request in running:
            unread = request.tokens[request.committed_len :]
            windows.append(unread[:longest] if request.is_in_prompt else unread + drafts[request])
            kinds.append("prompt" if request.is_in_prompt else "decode")

        handles = tuple(request.handle for request in running)
        lengths = tuple(len(window) for window in windows)
        metadata = StepMetadata(handles=handles, query_lens=lengths, row_kinds=tuple(kinds))
        tokens = torch.tensor([token for window in windows for token in window], device=device)
        sampled = run(model, manager, metadata, tokens).wait()
        drafter.observe(running, metadata, tokens, sampled)
        columns = (column.tolist() for column in (sampled.num_accepted, sampled.tokens, sampled.finished))
        # A padded step has more rows than requests.
        for request, num_accepted, row, finished in zip(list(running), *columns, strict=False):
            request.committed_len += num_accepted
            if request.is_in_prompt:
                continue  # what a part of a prompt samples means nothing, an end token neither
            new = [token for token in row if token >= 0]
            request.tokens += new
            listener.on_output(request, new)
            if finished or len(request.tokens) - request.prompt_len >= max_bytes:
                listener.on_done(request)
                manager.release(request.handle)
                drafter.release(request)
                running.remove(request)

    return requests
