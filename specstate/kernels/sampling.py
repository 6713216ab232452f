"""Lossless speculative sampling in plain torch; see the reference for the conventions.

Every window token gets its *choice*: the token that stands behind it if the run of accepted drafts reaches it. A draft
stands if and only if it is the choice of the token before it. How a choice is made, for target probabilities p (after
temperature, top-k and top-p, in this order) and the next token's draft d:

    temperature 0          the first of the largest logits
    no draft_probs         x ~ p. The draft stands with probability p(d), the most that a draft without probabilities
                           can have, and x depends neither on d nor on there being a draft.
    draft_probs q          d with probability min(1, p(d) / q(d)), else x ~ max(p - q, 0) normalised (Leviathan et al.,
                           arXiv 2211.17192; Chen et al., arXiv 2302.01318). Behind the last draft x ~ p.

x ~ p is drawn as argmax_v (log p_v - log E_v) with E_v exponentially distributed, which needs no normalised p. A draft
model that draws with the same numbers (same seed, same position) picks the target's token far more often than chance,
and needs no draft_probs (Daliri et al., "Coupling without communication and drafter-invariant speculative decoding",
arXiv 2408.07978).
"""

import torch
import torch.nn.functional as F

from specstate.kernels import rows as at
from specstate.kernels.cursors import StepTensors, finished_rows, owned_rows
from specstate.kernels.philox import random_words


def choose(
    step: StepTensors,
    logits: torch.Tensor,
    draft_tokens: torch.Tensor,
    draft_probs: torch.Tensor | None,
    sampling: torch.Tensor,
) -> torch.Tensor:
    """[tokens] int64, the choice of every token; what it says of padding and of the middle of a prompt is not read.

    logits [tokens, vocab]; draft_tokens [tokens]; draft_probs [tokens, vocab] float32, line i is what the draft at
    token i was drawn from; sampling [record rows, SAMPLING_COLUMNS].
    """
    window = step.window
    assert window is not None
    if not window.gather.numel():
        return draft_tokens  # no row has a window: no choice is read
    greedy = logits.argmax(-1)
    params = sampling[step.rows[window.token_row, at.RECORD_ROW].long()]
    temperature = params[:, at.TEMPERATURE].contiguous().view(torch.float32)
    # A device is not asked: it would have to be waited for.
    if params.device.type == "cpu" and not bool((temperature > 0).any()):
        return greedy
    distance = distances(logits, temperature)
    kept = distance <= last_kept(distance, params)[:, None]
    weight = torch.where(kept, torch.exp(-distance), 0)
    seed = params[:, at.SEED_LOW].long() & 0xFFFFFFFF | params[:, at.SEED_HIGH].long() << 32
    position, vocab = step.positions + 1, logits.shape[1]
    noise = log_exponential(random_words(seed, position, at.DRAW_TARGET, vocab))
    chosen = torch.where(kept, -distance - noise, -torch.inf).argmax(-1)
    if draft_probs is not None:
        has_draft = window.token_offset + 1 < step.rows[window.token_row, at.QUERY_LEN]
        following = torch.arange(1, len(logits) + 1, device=logits.device).clamp(max=len(logits) - 1)
        draft, q = draft_tokens[following].long(), draft_probs[following]
        p = weight / weight.sum(-1, keepdim=True)
        place = draft.clamp(0, vocab - 1)[:, None]
        p_draft = torch.where((draft >= 0) & (draft < vocab), p.gather(1, place)[:, 0], 0)
        uniform = (random_words(seed, position, at.DRAW_ACCEPT, 1)[:, 0] >> 8) * 2.0**-24  # below 1
        stands = draft_stands(uniform, p_draft, q.gather(1, place)[:, 0])
        noise = log_exponential(random_words(seed, position, at.DRAW_RESIDUAL, vocab))
        other = torch.log(residual(p, q)) - noise
        # Without any rest, p and q differ by rounding alone.
        replacement = torch.where(other.amax(-1) > -torch.inf, other.argmax(-1), chosen)
        chosen = torch.where(has_draft, torch.where(stands, draft, replacement), chosen)
    return torch.where(temperature > 0, chosen, greedy)


def draft_stands(uniform: torch.Tensor, p_draft: torch.Tensor, q_draft: torch.Tensor) -> torch.Tensor:
    """[tokens] bool, true with probability min(1, p / q) for uniform numbers in [0, 1).

    A draft that q never draws does not stand: where a line of q is empty, the token is drawn from p alone.
    """
    return (q_draft > 0) & (uniform * q_draft < p_draft)


def residual(p: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    """[tokens, vocab]: what the target wants beyond what accepted drafts bring; not normalised."""
    return (p - q).clamp(min=0)


def distances(logits: torch.Tensor, temperature: torch.Tensor) -> torch.Tensor:
    """[tokens, vocab] float32 >= 0, -log p and a constant: how far a logit lies below the largest, over temperature."""
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    largest = wide.amax(-1, keepdim=True)
    # The largest lies at 0 also where it is infinite.
    return torch.where(wide == largest, 0, (largest - wide) / temperature[:, None]).float()


def last_kept(distance: torch.Tensor, params: torch.Tensor) -> torch.Tensor:
    """[tokens] float32: the largest distance that top-k and then top-p keep; all tokens at that distance are kept."""
    top_k, top_p = params[:, at.TOP_K], params[:, at.TOP_P].contiguous().view(torch.float32)
    ordered, vocab = distance.sort(-1).values, distance.shape[1]
    limit = torch.where((top_k > 0) & (top_k < vocab), top_k, vocab)
    kth = ordered.gather(1, limit.long()[:, None] - 1)
    mass = torch.where(ordered <= kth, torch.exp(-ordered), 0).double().cumsum(-1)
    # As many as lie before the one with which the wanted mass is reached, and that one.
    before = (mass < top_p[:, None] * mass[:, -1:]).sum(-1, keepdim=True)
    last = torch.minimum(ordered.gather(1, before.clamp(max=vocab - 1)), kth)
    return torch.where(top_p < 1, last[:, 0], kth[:, 0])


def log_exponential(words: torch.Tensor) -> torch.Tensor:
    """log E, float32, of exponentially distributed E = -log(1 - w), w = (word + 1/2) / 2^32.

    The smallest E decides a draw: a series keeps them exact where 1 - w rounds. w stays below 1, since an infinite E
    would lose against nothing at all.
    """
    w = ((words.float() + 0.5) * 2.0**-32).clamp(max=1 - 2.0**-24)
    series = w * (1 + w * (1 / 2 + w * (1 / 3 + w * (1 / 4 + w * (1 / 5 + w * (1 / 6))))))
    return torch.log(torch.where(w < 0.0625, series, -torch.log(1 - w)))


def accept(
    step: StepTensors,
    choice: torch.Tensor,
    draft_tokens: torch.Tensor,
    cursors: torch.Tensor,
    sampling: torch.Tensor,
    max_query_len: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """The longest run of drafts that are the choice of the token before them, cut behind an end token.

    choice and draft_tokens [tokens], the latter the window's own ids. Returns num_accepted [rows] int32, tokens
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
    chosen = choice[window.gather.mT]  # [rows, length]
    drafts = draft_tokens.long()[window.gather.mT][:, 1:]
    agrees = (drafts == chosen[:, :-1]) & (place[1:] < query_len)
    accepted = torch.maximum(1 + agrees.int().cumprod(1).sum(1, dtype=torch.int32), least)

    last = (accepted - 1)[:, None]
    listed = torch.where(place == last, chosen, F.pad(drafts, (0, 1)))
    listed = torch.where(place <= last, listed, -1)
    # A prompt row lists no drafts, only the token that follows the prompt.
    prompt = rows[:, at.ROW_KIND, None] == at.PROMPT
    final = chosen.gather(1, last.long().clamp(min=0))
    listed = torch.where(prompt, torch.where(place == 0, final, -1), listed)
    listed_len = torch.where(prompt[:, 0], 1, accepted)

    ends = sampling[rows[:, at.RECORD_ROW].long(), at.END_TOKENS :]  # [rows, MAX_END_TOKENS], -1 where unused
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
