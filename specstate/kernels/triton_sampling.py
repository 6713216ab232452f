"""Lossless speculative sampling; ``choose`` and ``accept`` in kernels/sampling.py are the reference of these two."""

import triton
import triton.language as tl

from specstate.kernels.triton_rows import CURSOR_COLUMNS


@triton.jit
def distances(p_token, start, vocab, largest, temperature, BLOCK: tl.constexpr):
    """[BLOCK] float32: how far logits start .. start + BLOCK lie below the largest, over the temperature."""
    o_v = start + tl.arange(0, BLOCK)
    b_logit = tl.load(p_token + o_v, mask=o_v < vocab, other=float("-inf")).to(largest.dtype)
    # The largest lies at 0 also where it is infinite.
    b_distance = tl.where(b_logit == largest, 0.0, ((largest - b_logit) / temperature).to(tl.float32))
    return tl.where(o_v < vocab, b_distance, float("inf"))


@triton.jit
def kept_mass(p_token, vocab, largest, temperature, limit, COUNT: tl.constexpr, BLOCK: tl.constexpr):
    """How much probability, less its normalisation, lies within ``limit`` of the largest; COUNT: how many tokens."""
    b_mass = tl.zeros([BLOCK], tl.float32)
    for start in range(0, vocab, BLOCK):
        b_distance = distances(p_token, start, vocab, largest, temperature, BLOCK)
        b_mass += tl.where(b_distance <= limit, 1.0 if COUNT else tl.exp(-b_distance), 0.0)
    return tl.sum(b_mass, axis=0)


@triton.jit
def least_limit(p_token, vocab, largest, temperature, wanted, highest, COUNT: tl.constexpr, BLOCK: tl.constexpr):
    """The least distance within which ``wanted`` lies, at most ``highest``.

    By bisection of its bits, which are in the order of the numbers since none is negative: up to 31 passes over the
    vocabulary, which a row without this filter does not pay.
    """
    low, high = 0, highest.to(tl.int32, bitcast=True)
    while low < high:
        middle = low + (high - low) // 2
        limit = middle.to(tl.float32, bitcast=True)
        if kept_mass(p_token, vocab, largest, temperature, limit, COUNT, BLOCK) >= wanted:
            high = middle
        else:
            low = middle + 1
    return high.to(tl.float32, bitcast=True)


@triton.jit
def random_words(seed, position, draw, start, BLOCK: tl.constexpr):
    """[BLOCK] uint32 for entries start .. start + BLOCK, as ``random_words`` of kernels/philox.py."""
    o_group = start // 4 + tl.arange(0, BLOCK // 4)
    b_zero = tl.zeros_like(o_group)
    b_0, b_1, b_2, b_3 = tl.philox(seed, o_group, b_zero + position, b_zero + draw, b_zero)
    return tl.interleave(tl.interleave(b_0, b_2), tl.interleave(b_1, b_3))


@triton.jit
def log_exponential(b_words):
    """As ``log_exponential`` of the reference; the constants are 2^-32 and 2^-24."""
    b_w = tl.minimum((b_words.to(tl.float32) + 0.5) * 2.3283064365386963e-10, 1 - 5.960464477539063e-08)
    b_series = 1.0 + b_w * (1 / 2 + b_w * (1 / 3 + b_w * (1 / 4 + b_w * (1 / 5 + b_w * (1 / 6)))))
    return tl.log(tl.where(b_w < 0.0625, b_w * b_series, -tl.log(1.0 - b_w)))


@triton.jit
def better(best, best_score, b_score, start):
    """The place of the largest score so far, the first of equals."""
    score = tl.max(b_score, axis=0)
    place = start + tl.argmax(b_score, axis=0, tie_break_left=True)
    return tl.where(score > best_score, place, best), tl.maximum(score, best_score)


@triton.jit(
    do_not_specialize=["logits_stride", "drafts_stride", "probs_stride", "vocab"],
    do_not_specialize_on_alignment=["p_logits", "p_drafts", "p_probs"],
)
def choose_kernel(
    p_rows,
    p_positions,
    p_sampling,
    p_logits,
    logits_stride,
    p_drafts,
    drafts_stride,
    p_probs,
    probs_stride,
    p_choice,
    vocab,
    T,
    ROW_COLUMNS: tl.constexpr,
    SAMPLING_COLUMNS: tl.constexpr,
    PROMPT: tl.constexpr,
    TARGET: tl.constexpr,
    ACCEPT: tl.constexpr,
    RESIDUAL: tl.constexpr,
    PROBS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The choice of one window token. Grid: rows * T.

    logits and probs [tokens, vocab] with token strides; PROBS: whether drafts come with probabilities.
    """
    row, t = tl.program_id(0) // T, tl.program_id(0) % T
    p_row = p_rows + row * ROW_COLUMNS
    record_row, query_len = tl.load(p_row + 1), tl.load(p_row + 3)
    if (tl.load(p_row) <= 0) | (record_row < 0) | (t >= query_len):
        return
    if (tl.load(p_row + 7) == PROMPT) & (t + 1 < query_len):
        return
    token = (tl.load(p_row + 2) + t).to(tl.int64)
    p_token = p_logits + token * logits_stride
    p_params = p_sampling + record_row * SAMPLING_COLUMNS
    # TEMPERATURE, TOP_P, TOP_K, SEED_LOW and SEED_HIGH of kernels/rows.py.
    temperature = tl.load(p_params).to(tl.float32, bitcast=True)

    WIDE: tl.constexpr = tl.float64 if p_logits.dtype.element_ty == tl.float64 else tl.float32
    best, largest = 0, tl.full((), float("-inf"), WIDE)
    for start in range(0, vocab, BLOCK):
        o_v = start + tl.arange(0, BLOCK)
        b_logit = tl.load(p_token + o_v, mask=o_v < vocab, other=float("-inf")).to(WIDE)
        best, largest = better(best, largest, b_logit, start)
    if temperature <= 0:
        tl.store(p_choice + token, best)
        return

    limit = tl.full((), float("inf"), tl.float32)
    top_p, top_k = tl.load(p_params + 1).to(tl.float32, bitcast=True), tl.load(p_params + 2)
    if (top_k > 0) & (top_k < vocab):
        limit = least_limit(p_token, vocab, largest, temperature, top_k.to(tl.float32), limit, True, BLOCK)
    if top_p < 1:
        wanted = top_p * kept_mass(p_token, vocab, largest, temperature, limit, False, BLOCK)
        limit = least_limit(p_token, vocab, largest, temperature, wanted, limit, False, BLOCK)

    seed_low = tl.load(p_params + 3).to(tl.uint32, bitcast=True).to(tl.uint64)
    seed = seed_low | (tl.load(p_params + 4).to(tl.uint32, bitcast=True).to(tl.uint64) << 32)
    position = tl.load(p_positions + token) + 1
    if PROBS:  # noqa: SIM102 -- this one is settled when the kernel is compiled
        if t + 1 < query_len:
            mass = kept_mass(p_token, vocab, largest, temperature, limit, False, BLOCK)
            p_q = p_probs + (token + 1) * probs_stride
            draft = tl.load(p_drafts + (token + 1) * drafts_stride).to(tl.int64)
            known = (draft >= 0) & (draft < vocab)
            logit = tl.load(p_token + draft, mask=known, other=float("-inf")).to(WIDE)
            distance = tl.where(logit == largest, 0.0, ((largest - logit) / temperature).to(tl.float32))
            p_draft = tl.where(known & (distance <= limit), tl.exp(-distance) / mass, 0.0)
            word = tl.sum(tl.where(tl.arange(0, 4) == 0, random_words(seed, position, ACCEPT, 0, 4), 0), axis=0)
            uniform = (word.to(tl.uint32) >> 8).to(tl.float32) * 5.960464477539063e-08
            q_draft = tl.load(p_q + tl.minimum(tl.maximum(draft, 0), vocab - 1))
            if (q_draft > 0) & (uniform * q_draft < p_draft):
                tl.store(p_choice + token, draft.to(tl.int32))
                return
            best, best_score = 0, tl.full((), float("-inf"), tl.float32)
            for start in range(0, vocab, BLOCK):
                o_v = start + tl.arange(0, BLOCK)
                b_distance = distances(p_token, start, vocab, largest, temperature, BLOCK)
                b_p = tl.where(b_distance <= limit, tl.exp(-b_distance) / mass, 0.0)
                b_rest = tl.maximum(b_p - tl.load(p_q + o_v, mask=o_v < vocab, other=0.0), 0.0)
                b_score = tl.log(b_rest) - log_exponential(random_words(seed, position, RESIDUAL, start, BLOCK))
                best, best_score = better(best, best_score, b_score, start)
            if best_score > float("-inf"):
                tl.store(p_choice + token, best)
                return
            # Without any rest, p and q differ by rounding alone.

    best, best_score = 0, tl.full((), float("-inf"), tl.float32)
    for start in range(0, vocab, BLOCK):
        b_distance = distances(p_token, start, vocab, largest, temperature, BLOCK)
        b_score = -b_distance - log_exponential(random_words(seed, position, TARGET, start, BLOCK))
        best, best_score = better(best, best_score, tl.where(b_distance <= limit, b_score, float("-inf")), start)
    tl.store(p_choice + token, best)


@triton.jit(do_not_specialize=["drafts_stride"], do_not_specialize_on_alignment=["p_drafts"])
def accept_kernel(
    p_rows,
    p_choice,
    p_drafts,
    drafts_stride,
    p_cursors,
    p_sampling,
    p_accepted,
    p_tokens,
    p_next,
    p_finished,
    T,
    ROW_COLUMNS: tl.constexpr,
    SAMPLING_COLUMNS: tl.constexpr,
    END_TOKENS: tl.constexpr,
    BT: tl.constexpr,
    PROMPT: tl.constexpr,
):
    """The longest run of drafts that are the choice of the token before them, cut behind an end token. Grid: rows."""
    row = tl.program_id(0)
    p_row = p_rows + row * ROW_COLUMNS
    record_row = tl.load(p_row + 1)
    live = (tl.load(p_row) > 0) & (record_row >= 0)
    p_cursor = p_cursors + record_row * CURSOR_COLUMNS
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
    b_choice = tl.load(p_choice + first_token + o_t, mask=m_t, other=-1)
    m_draft = (o_t + 1 < query_len) & running
    o_draft = (first_token + 1 + o_t).to(tl.int64) * drafts_stride
    b_draft = tl.load(p_drafts + o_draft, mask=m_draft, other=-1)  # as wide as the caller's ids
    # The first draft that does not stand ends the run; without one, the window's end does.
    first_miss = tl.min(tl.where(m_draft & (b_draft == b_choice), BT, o_t), axis=0)
    accepted = tl.maximum(tl.minimum(first_miss + 1, query_len), least)

    # In the ids' own width: one that does not fit int32 must not become another one, an end token say.
    b_choice = b_choice.to(b_draft.dtype)
    b_listed = tl.where(o_t == accepted - 1, b_choice, b_draft)
    b_listed = tl.where(o_t < accepted, b_listed, -1)
    listed_len = accepted
    if prompt:  # lists no drafts, only the token that follows the prompt
        final = tl.sum(tl.where(o_t == accepted - 1, b_choice, 0), axis=0)
        b_listed = tl.where(o_t == 0, final, -1)
        listed_len = 1
    first_end = BT
    for i in tl.static_range(END_TOKENS, SAMPLING_COLUMNS):
        end = tl.load(p_sampling + record_row * SAMPLING_COLUMNS + i, mask=owned, other=-1)
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
