"""A window of one layer over pending records, without the current state ever being formed.

Per row and head, with c_t the running gate sum of the window and d_t = e^{g_t} (design: section 3 of the README's
reference, Kimi Linear, arXiv 2510.26692):

    F_k = k_t e^{c_t}, F_q = q_t e^{c_t}                                                 [T, K]
    P   = S_0 diag(e^{G_m}) F^T + U (W F^T),  W = kp_j e^{G_m - G_j}                      [V, T] for k and for q
    for t:  u_t = b_t (v_t - P_k[t]);  P_k[s] += u_t <k_s, e^{c_s - c_t} k_t> for s > t;  P_q likewise, own token too
    o_t = P_q[t]

Decays inside the window are running products of d_t <= 1: differences of running sums would cancel, and e^{-c}
overflows under a strong gate. All products have float32 grade (three tf32 products on NVIDIA).
"""

import triton
import triton.language as tl

from specstate.kernels.triton_common import (
    fold_records,
    inverse_norm,
    log_decay,
    num_record_tiles,
    record_tile,
    rounded,
)


@triton.jit
def state_product(b_state, b_f, o_k, BK: tl.constexpr, PRECISION: tl.constexpr):
    """S F^T [BV, BT] of b_state [BV, BK] and b_f [BK, BT].

    Tensor cores round towards zero as they add, which pulls a long sum one way: every 32 channels get an accumulator of
    their own. They are joined by subtracting products of -F, since an addition would be merged into the next product.
    """
    b_product = tl.dot(b_state, tl.where((o_k < 32)[:, None], b_f, 0.0), input_precision=PRECISION)
    for chunk in tl.static_range(1, BK // 32):
        m_chunk = (o_k >= 32 * chunk) & (o_k < 32 * (chunk + 1))
        b_product = b_product - tl.dot(b_state, tl.where(m_chunk[:, None], -b_f, 0.0), input_precision=PRECISION)
    return b_product


# Whatever changes from call to call is not specialised on: a capture must find every variant compiled.
@triton.jit(
    do_not_specialize=[
        "first_row",
        "num_rows",
        "num_tokens",
        "mixed_stride",
        "gate_stride",
        "beta_stride",
        "out_stride",
    ],
    do_not_specialize_on_alignment=["p_starts", "p_mixed", "p_gate", "p_beta", "p_out"],
)
def verify_kernel(
    p_rows,
    p_starts,
    first_row,
    num_rows,
    num_tokens,
    p_mixed,
    mixed_stride,
    p_gate,
    gate_stride,
    p_beta,
    beta_stride,
    p_out,
    out_stride,
    p_recurrent,
    slot_stride,
    p_u,
    p_key_gate,
    p_inv_norm,
    p_a_log,
    p_dt_bias,
    lower_bound,
    H,
    T,
    R,
    ROW_COLUMNS: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    BT: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    BOUNDED: tl.constexpr,
    BY_ROW: tl.constexpr,
    FOLDS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Grid: rows from ``first_row`` on x H x blocks of V. Row num_rows stands for the tokens of no row: zero output.

    gate [tokens, H, K], beta [tokens, H], out [tokens, H, V] with token strides, else contiguous. mixed: q|k|v, the
    conv's [rows, T, C] if BY_ROW, else the caller's [tokens, C]. FOLDS: pending records are folded into the checkpoint
    in the same pass.
    """
    num_blocks: tl.constexpr = (V + BV - 1) // BV
    program = tl.program_id(0)
    v_block = program % num_blocks
    head = (program // num_blocks) % H
    place = program // (num_blocks * H)
    row = first_row + place
    o_v = v_block * BV + tl.arange(0, BV)
    m_v = o_v < V
    o_t = tl.arange(0, BT)
    ACTIVATION: tl.constexpr = p_mixed.dtype.element_ty
    OUTPUT: tl.constexpr = p_out.dtype.element_ty
    p_out += head * V + o_v

    if row == num_rows:
        for token in range(tl.load(p_starts + num_rows).to(tl.int64), num_tokens):
            tl.store(p_out + token * out_stride, tl.zeros([BV], OUTPUT), mask=m_v)
        return

    p_row = p_rows + row * ROW_COLUMNS
    slot = tl.load(p_row).to(tl.int64)
    record_row = tl.load(p_row + 1).to(tl.int64)
    first_token = tl.load(p_row + 2).to(tl.int64)
    query_len = tl.load(p_row + 3)
    checkpoint_len = tl.load(p_row + 9)
    pending = tl.load(p_row + 10)
    if (slot <= 0) | (record_row < 0):
        for t in range(query_len):
            tl.store(p_out + (first_token + t) * out_stride, tl.zeros([BV], OUTPUT), mask=m_v)
        return

    # Rows of this head's rings and parameters.
    head_row = record_row * H + head
    p_u += head_row * R * V
    p_key_gate += head_row * R * (2 * K)
    p_inv_norm += head_row * R
    o_k = tl.arange(0, BK)
    m_k = o_k < K
    b_bias = tl.load(p_dt_bias + head * K + o_k, mask=m_k, other=0.0).to(tl.float32)
    b_rate = tl.exp(tl.load(p_a_log + head).to(tl.float32))

    # The window's vectors, [BT, BK].
    m_t = o_t < query_len
    m_tk = m_t[:, None] & m_k[None, :]
    first_mixed = first_token
    if BY_ROW:
        first_mixed = place.to(tl.int64) * T
    p_token = p_mixed + (first_mixed + o_t)[:, None] * mixed_stride + head * K + o_k[None, :]
    b_q = tl.load(p_token, mask=m_tk, other=0.0).to(tl.float32)
    b_key = tl.load(p_token + H * K, mask=m_tk, other=0.0).to(tl.float32)
    p_raw = p_gate + (first_token + o_t)[:, None] * gate_stride + head * K + o_k[None, :]
    b_raw = rounded(tl.load(p_raw, mask=m_tk, other=0.0).to(tl.float32), ACTIVATION)
    b_decay = tl.where(m_tk, tl.exp(log_decay(b_raw, b_bias[None, :], b_rate, lower_bound, BOUNDED)), 1.0)
    b_inv_norm = inverse_norm(tl.sum(b_key * b_key, axis=1))
    b_q = b_q * (inverse_norm(tl.sum(b_q * b_q, axis=1)) * (1.0 / tl.sqrt_rn(K * 1.0)))[:, None]
    b_k = b_key * b_inv_norm[:, None]

    # Products of token t with those after it, newest t first: b_run[s] is the decay from behind t to s.
    b_run = tl.full([BT, BK], 1.0, tl.float32)
    b_kk = tl.zeros([BT, BT], tl.float32)  # [t, s]
    b_qk = tl.zeros([BT, BT], tl.float32)
    for i in range(query_len):
        t = query_len - 1 - i
        b_k_t = tl.sum(tl.where((o_t == t)[:, None], b_k, 0.0), axis=0)
        b_decay_t = tl.sum(tl.where((o_t == t)[:, None], b_decay, 0.0), axis=0)
        b_after = b_run * b_k_t[None, :]
        kk = tl.where(o_t > t, tl.sum(b_k * b_after, axis=1), 0.0)
        qk = tl.where(o_t >= t, tl.sum(b_q * b_after, axis=1), 0.0)
        b_kk = tl.where((o_t == t)[:, None], kk[None, :], b_kk)
        b_qk = tl.where((o_t == t)[:, None], qk[None, :], b_qk)
        b_run = tl.where((o_t >= t)[:, None], b_run * b_decay_t[None, :], b_run)
    b_fk = tl.trans(b_k * b_run)  # [BK, BT]
    b_fq = tl.trans(b_q * b_run)

    # The state's part, [BV, BT].
    p_state = p_recurrent + slot * slot_stride + head * (V * K) + o_v[:, None] * K + o_k[None, :]
    m_vk = m_v[:, None] & m_k[None, :]
    b_state = tl.load(p_state, mask=m_vk, other=0.0).to(tl.float32)
    first_entry = checkpoint_len % R
    if FOLDS:
        if pending > 0:
            b_state = fold_records(
                b_state, pending, first_entry, p_u, p_key_gate, p_inv_norm, b_bias, b_rate, lower_bound,
                o_v, o_k, R, K, V, BOUNDED,
            )  # fmt: skip
            CHECKPOINT: tl.constexpr = p_recurrent.dtype.element_ty
            tl.store(p_state, rounded(b_state, CHECKPOINT).to(CHECKPOINT), mask=m_vk)
        b_pk = state_product(b_state, b_fk, o_k, BK, PRECISION)
        b_pq = state_product(b_state, b_fq, o_k, BK, PRECISION)
    else:
        b_later = tl.zeros_like(b_bias)
        b_pk = tl.zeros([BV, BT], tl.float32)
        b_pq = tl.zeros([BV, BT], tl.float32)
        for tile in range(num_record_tiles(pending)):
            entry, m_j, b_pending, b_later = record_tile(
                tile, pending, first_entry, p_key_gate, p_inv_norm, b_bias, b_rate, lower_bound, b_later, o_k, R, K,
                BOUNDED,
            )  # fmt: skip
            b_u = tl.load(p_u + entry[None, :] * V + o_v[:, None], mask=m_v[:, None] & m_j[None, :], other=0.0)
            b_pk += tl.dot(b_u, tl.dot(b_pending, b_fk, input_precision=PRECISION), input_precision=PRECISION)
            b_pq += tl.dot(b_u, tl.dot(b_pending, b_fq, input_precision=PRECISION), input_precision=PRECISION)
        b_total = tl.exp(b_later)[:, None]
        b_pk += state_product(b_state, b_fk * b_total, o_k, BK, PRECISION)
        b_pq += state_product(b_state, b_fq * b_total, o_k, BK, PRECISION)

    # Forward substitution; each token's correction and output leave at once.
    committed_len = checkpoint_len + pending
    p_value = p_mixed + first_mixed * mixed_stride + 2 * H * K + head * V + o_v
    for t in range(query_len):
        token = first_token + t
        b_value = tl.load(p_value + t * mixed_stride, mask=m_v, other=0.0).to(tl.float32)
        raw_beta = tl.load(p_beta + token * beta_stride + head).to(tl.float32)
        strength = 1.0 / (1.0 + tl.exp(-raw_beta))
        b_u_t = strength * (b_value - tl.sum(tl.where((o_t == t)[None, :], b_pk, 0.0), axis=1))
        b_kk_t = tl.sum(tl.where((o_t == t)[:, None], b_kk, 0.0), axis=0)
        b_qk_t = tl.sum(tl.where((o_t == t)[:, None], b_qk, 0.0), axis=0)
        b_pk += b_u_t[:, None] * b_kk_t[None, :]
        b_pq += b_u_t[:, None] * b_qk_t[None, :]
        tl.store(p_u + (committed_len + t) % R * V + o_v, b_u_t, mask=m_v)
        b_out = tl.sum(tl.where((o_t == t)[None, :], b_pq, 0.0), axis=1)
        tl.store(p_out + token * out_stride, rounded(b_out, OUTPUT).to(OUTPUT), mask=m_v)

    if v_block == 0:
        entry = (committed_len + o_t) % R
        p_record = p_key_gate + entry[:, None] * (2 * K) + o_k[None, :]
        tl.store(p_record, b_key.to(ACTIVATION), mask=m_tk)
        tl.store(p_record + K, b_raw.to(ACTIVATION), mask=m_tk)
        tl.store(p_inv_norm + entry, b_inv_norm, mask=m_t)
