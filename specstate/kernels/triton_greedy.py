"""Greedy acceptance; ``greedy`` in kernels/greedy.py is its reference."""

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["logits_stride", "vocab"], do_not_specialize_on_alignment=["p_logits"])
def best_token_kernel(p_logits, logits_stride, p_best, vocab, BLOCK: tl.constexpr):
    """The first of the largest logits of each token. Grid: tokens; logits [tokens, vocab], best [tokens] int32."""
    token = tl.program_id(0)
    p_token = p_logits + token.to(tl.int64) * logits_stride
    WIDE: tl.constexpr = tl.float64 if p_logits.dtype.element_ty == tl.float64 else tl.float32
    best, best_value = 0, tl.full((), float("-inf"), WIDE)
    for start in range(0, vocab, BLOCK):
        o_v = start + tl.arange(0, BLOCK)
        b_logit = tl.load(p_token + o_v, mask=o_v < vocab, other=float("-inf")).to(WIDE)
        value = tl.max(b_logit, axis=0)
        place = start + tl.argmax(b_logit, axis=0, tie_break_left=True)
        best = tl.where(value > best_value, place, best)
        best_value = tl.maximum(best_value, value)
    tl.store(p_best + token, best)


@triton.jit(do_not_specialize=["drafts_stride"], do_not_specialize_on_alignment=["p_drafts"])
def accept_kernel(
    p_rows,
    p_best,
    p_drafts,
    drafts_stride,
    p_cursors,
    p_end_tokens,
    p_accepted,
    p_tokens,
    p_next,
    p_finished,
    T,
    ROW_COLUMNS: tl.constexpr,
    END_TOKENS: tl.constexpr,
    BT: tl.constexpr,
    PROMPT: tl.constexpr,
):
    """The longest run of drafts that the target agrees with, cut behind an end token. Grid: rows."""
    row = tl.program_id(0)
    p_row = p_rows + row * ROW_COLUMNS
    record_row = tl.load(p_row + 1)
    live = (tl.load(p_row) > 0) & (record_row >= 0)
    p_cursor = p_cursors + record_row * 4
    owned = live & (tl.load(p_cursor + 2, mask=live, other=0) == tl.load(p_row + 4))
    first_token = tl.load(p_row + 2)
    query_len = tl.load(p_row + 3)
    least = tl.load(p_row + 5)
    prompt = tl.load(p_row + 7) == PROMPT
    # A prompt row says that its request goes on.
    was_finished = owned & (tl.load(p_cursor + 3, mask=owned, other=0) != 0) & (prompt == 0)
    running = owned & (was_finished == 0)

    o_t = tl.arange(0, BT)
    m_t = (o_t < query_len) & running
    b_best = tl.load(p_best + first_token + o_t, mask=m_t, other=-1)
    m_draft = (o_t + 1 < query_len) & running
    o_draft = (first_token + 1 + o_t).to(tl.int64) * drafts_stride
    b_draft = tl.load(p_drafts + o_draft, mask=m_draft, other=-1)  # as wide as the caller's ids
    # The first draft that does not stand ends the run; without one, the window's end does.
    first_miss = tl.min(tl.where(m_draft & (b_draft == b_best), BT, o_t), axis=0)
    accepted = tl.maximum(tl.minimum(first_miss + 1, query_len), least)

    b_listed = tl.where(o_t == accepted - 1, b_best, b_draft.to(tl.int32))
    b_listed = tl.where(o_t < accepted, b_listed, -1)
    listed_len = accepted
    if prompt:  # lists no drafts, only the token that follows the prompt
        final = tl.sum(tl.where(o_t == accepted - 1, b_best, 0), axis=0)
        b_listed = tl.where(o_t == 0, final, -1)
        listed_len = 1
    first_end = BT
    for i in tl.static_range(END_TOKENS):
        end = tl.load(p_end_tokens + record_row * END_TOKENS + i, mask=owned, other=-1)
        first_end = tl.minimum(first_end, tl.min(tl.where((b_listed == end) & (end >= 0), o_t, BT), axis=0))
    finished = running & (first_end < BT)
    if finished:
        if prompt == 0:
            accepted = tl.maximum(tl.minimum(first_end + 2, accepted), least)
        b_listed = tl.where(o_t > first_end, -1, b_listed)
    next_token = tl.sum(tl.where(o_t == listed_len - 1, b_listed, 0), axis=0)

    tl.store(p_accepted + row, tl.where(running, accepted, 0))
    tl.store(p_tokens + row * T + o_t, tl.where(running, b_listed, -1), mask=o_t < T)
    tl.store(p_next + row, tl.where(running & (finished == 0), next_token, -1))
    tl.store(p_finished + row, finished | was_finished)
