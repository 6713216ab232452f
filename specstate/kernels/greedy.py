"""Greedy acceptance in plain torch; see the reference for the conventions."""

import torch
import torch.nn.functional as F

from specstate.kernels import rows as at
from specstate.kernels.cursors import StepTensors, finished_rows, owned_rows


def greedy(
    step: StepTensors,
    logits: torch.Tensor,
    draft_tokens: torch.Tensor,
    cursors: torch.Tensor,
    end_tokens: torch.Tensor,
    max_query_len: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Greedy acceptance: a draft stands while it equals the target's best token before it.

    logits [tokens, vocab]; draft_tokens [tokens], the window's own ids. Returns num_accepted [rows] int32, tokens
    [rows, max_query_len] int32 (accepted drafts, then the next token, then -1), next_token [rows] int32, finished
    [rows] bool. A row ends with its end token if one is listed; the accepted count is then cut behind it.
    """
    rows, window = step.rows, step.window
    assert window is not None
    num_rows, device = rows.shape[0], rows.device
    if not window.gather.numel():
        empty = torch.zeros(num_rows, dtype=torch.int32, device=device)
        return empty, empty.new_full((num_rows, max_query_len), -1), empty - 1, empty.bool()
    query_len, least = rows[:, at.QUERY_LEN, None], rows[:, at.MIN_ACCEPTED]
    cursor = cursors[rows[:, at.RECORD_ROW].long()]
    owned = owned_rows(rows, cursor)
    was_finished = owned & finished_rows(rows, cursor)
    running = owned & ~was_finished

    place = torch.arange(window.length, dtype=torch.int32, device=device)
    # In int64 throughout: an id that does not fit int32 must not become another one.
    best = logits.argmax(-1)[window.gather.mT]  # [rows, length]
    drafts = draft_tokens.long()[window.gather.mT][:, 1:]
    agrees = (drafts == best[:, :-1]) & (place[1:] < query_len)
    accepted = torch.maximum(1 + agrees.int().cumprod(1).sum(1, dtype=torch.int32), least)

    last = (accepted - 1)[:, None]
    listed = torch.where(place == last, best, F.pad(drafts, (0, 1)))
    listed = torch.where(place <= last, listed, -1)
    # A prompt row lists no drafts, only the token that follows the prompt.
    prompt = rows[:, at.ROW_KIND, None] == at.PROMPT
    final = best.gather(1, last.long().clamp(min=0))
    listed = torch.where(prompt, torch.where(place == 0, final, -1), listed)
    listed_len = torch.where(prompt[:, 0], 1, accepted)

    ends = end_tokens[rows[:, at.RECORD_ROW].long()]  # [rows, MAX_END_TOKENS], -1 where unused
    is_end = (listed[:, :, None] == ends[:, None, :]).any(2) & (listed >= 0)
    finished = running & is_end.any(1)
    first_end = is_end.int().argmax(1).to(torch.int32)  # of the rows that have one
    cut = torch.where(prompt[:, 0], accepted, torch.minimum(first_end + 2, accepted))
    accepted = torch.where(finished, torch.maximum(cut, least), accepted)
    listed = torch.where(finished[:, None] & (place > first_end[:, None]), -1, listed)
    next_token = listed.gather(1, (listed_len - 1).long().clamp(min=0)[:, None])[:, 0]

    accepted = torch.where(running, accepted, 0)
    listed = torch.where(running[:, None], listed, -1)
    next_token = torch.where(running & ~finished, next_token, -1)
    listed = F.pad(listed, (0, max_query_len - window.length), value=-1)
    return accepted, listed.to(torch.int32), next_token.to(torch.int32), finished | was_finished
