"""Launches the sampling kernels, for every path: nothing here depends on the shape of a state."""

import torch

from specstate.kernels import Sampled
from specstate.kernels import rows as at
from specstate.kernels.cursors import StepTensors
from specstate.kernels.supported import WINDOW_TILE
from specstate.kernels.triton_sampling import accept_kernel, choose_kernel

#: Entries of a vocabulary that a program reads at a time.
VOCAB_TILE = 1024


def choose(
    step: StepTensors,
    logits: torch.Tensor,
    draft_tokens: torch.Tensor,
    draft_probs: torch.Tensor | None,
    sampling: torch.Tensor,
    max_query_len: int,
) -> torch.Tensor:
    """[tokens] int32, the choice of every token that a row may list; of other tokens, nothing is written."""
    num_rows, (num_tokens, vocab) = len(step.rows), logits.shape
    choice = step.allocator.empty((num_tokens,))
    logits = _rows_in_order(logits)
    probs = logits if draft_probs is None else _rows_in_order(draft_probs)
    if num_rows and num_tokens:
        choose_kernel[(num_rows * max_query_len,)](
            step.rows,
            step.positions,
            sampling,
            logits,
            logits.stride(0),
            draft_tokens,
            draft_tokens.stride(0),
            probs,
            probs.stride(0),
            choice,
            vocab,
            max_query_len,
            ROW_COLUMNS=at.ROW_COLUMNS,
            SAMPLING_COLUMNS=at.SAMPLING_COLUMNS,
            PROMPT=at.PROMPT,
            TARGET=at.DRAW_TARGET,
            ACCEPT=at.DRAW_ACCEPT,
            RESIDUAL=at.DRAW_RESIDUAL,
            PROBS=draft_probs is not None,
            BLOCK=VOCAB_TILE,
        )
    return choice


def _rows_in_order(tensor: torch.Tensor) -> torch.Tensor:
    """``tensor`` with its last dimension contiguous; a copy only where it is not."""
    return tensor if tensor.stride(1) == 1 else tensor.contiguous()


def accept(
    step: StepTensors,
    choice: torch.Tensor,
    draft_tokens: torch.Tensor,
    cursors: torch.Tensor,
    sampling: torch.Tensor,
    max_query_len: int,
) -> Sampled:
    """As ``accept`` of the reference."""
    num_rows, empty = len(step.rows), step.allocator.empty
    accepted, tokens, next_token = empty((num_rows,)), empty((num_rows, max_query_len)), empty((num_rows,))
    finished = empty((num_rows,), torch.bool)
    if num_rows:
        accept_kernel[(num_rows,)](
            step.rows,
            choice,
            draft_tokens,
            draft_tokens.stride(0),
            cursors,
            sampling,
            accepted,
            tokens,
            next_token,
            finished,
            max_query_len,
            ROW_COLUMNS=at.ROW_COLUMNS,
            SAMPLING_COLUMNS=at.SAMPLING_COLUMNS,
            END_TOKENS=at.END_TOKENS,
            BT=WINDOW_TILE,
            PROMPT=at.PROMPT,
            num_warps=1,
        )
    return accepted, tokens, next_token, finished
