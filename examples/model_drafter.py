"""Drafts by a small model, whose own state a second manager keeps: both are rolled back by the same counts.

For each step of the target this drafter does two things with its manager:

    propose    begin_step over [last token, drafts so far], verify, sample the next draft, cancel: one pass a draft
    observe    begin_step over the target's windows, verify, defer by what the target accepted: the roll-back

A draft pass commits nothing, so that any number of them may be wrong; the target's window is what the state goes on by.
Keeping the last pass open, and ending it by the target's counts, would save one pass in eight, and let the state
trail by a token whenever all drafts were accepted.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from decode import Drafter, Generation
from model import Model
from specstate import Handle, HostSample, SamplingParams, StateManager, StepMetadata


class ModelDrafter(Drafter):
    """Drafts for the requests of a target; `manager` has its number of requests and its longest window."""

    def __init__(self, model: Model, manager: StateManager) -> None:
        self.model = model
        self.manager = manager
        self.handles: dict[Generation, Handle] = {}
        """Of the requests in this drafter's own manager."""

    @property
    def state_bytes(self) -> int:
        return self.manager.plan.bytes_per_request

    def admit(self, request: Generation, sampling: SamplingParams | None) -> None:
        # Drafts are sampled as the target samples. Only the target says where a text ends: a request that had met an
        # end token would sample nothing more.
        if sampling is not None:
            sampling = sampling.model_copy(update={"end_token_ids": ()})
        self.handles[request] = self.manager.admit(str(request.index), sampling)

    def propose(self, requests: Sequence[Generation], rooms: Sequence[int]) -> list[list[int]]:
        """Drafts of all requests together, one more a pass."""
        windows = {request: [request.tokens[-1]] for request in requests}
        for num_drafts in range(1, max(rooms, default=0) + 1):
            drafting = [request for request, room in zip(requests, rooms, strict=True) if room >= num_drafts]
            for request, token in zip(drafting, self._next_tokens(drafting, windows), strict=True):
                windows[request].append(token)
        return [window[1:] for window in windows.values()]

    def _next_tokens(self, requests: list[Generation], windows: dict[Generation, list[int]]) -> list[int]:
        # Of a prompt row all tokens count as accepted, so what it samples follows the last of them.
        metadata = StepMetadata(
            handles=tuple(self.handles[request] for request in requests),
            query_lens=tuple(len(windows[request]) for request in requests),
            row_kinds=("prompt",) * len(requests),
        )
        flat = [token for request in requests for token in windows[request]]
        tokens = torch.tensor(flat, device=self.model.embedding.device)
        step = self.manager.begin_step(metadata)
        try:
            sampled = step.sample(self.model(tokens, step.verify), tokens)
        finally:
            step.cancel()  # a draft pass commits nothing
        return sampled.next_token.tolist()

    def observe(
        self, requests: Sequence[Generation], metadata: StepMetadata, tokens: torch.Tensor, sampled: HostSample
    ) -> None:
        """Takes the target's windows into the state, and of each as much as the target accepted."""
        own = StepMetadata(
            handles=tuple(self.handles[request] for request in requests),
            query_lens=metadata.query_lens,
            row_kinds=metadata.row_kinds,
        )
        tokens = tokens.to(self.model.embedding.device)  # the target may live elsewhere
        step = self.manager.begin_step(own)
        try:
            self.model(tokens, step.verify)
        except BaseException:
            step.cancel()
            raise
        counts, finished = (column.to(tokens.device) for column in (sampled.num_accepted, sampled.finished))
        step.defer(counts, finished=finished)

    def release(self, request: Generation) -> None:
        self.manager.release(self.handles.pop(request))
