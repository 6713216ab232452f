"""The causal convolution of a window: SiLU(sum_w weight[:, w] x[t + w - W + 1] + bias), in the activation dtype.

Inputs before the window come from the conv ring; the window's own are written to it, raw.
"""

import triton
import triton.language as tl

from specstate.kernels.triton_common import rounded


@triton.jit(do_not_specialize=["first_row", "qkv_stride"], do_not_specialize_on_alignment=["p_qkv"])
def conv_kernel(
    p_rows,
    first_row,
    p_qkv,
    qkv_stride,
    p_mixed,
    p_weight,
    p_bias,
    p_conv,
    conv_slot_stride,
    conv_channel_stride,
    conv_token_stride,
    p_ring,
    C,
    T,
    RING,
    ROW_COLUMNS: tl.constexpr,
    W: tl.constexpr,
    BT: tl.constexpr,
    BC: tl.constexpr,
    BIAS: tl.constexpr,
    FOLDS: tl.constexpr,
):
    """Grid: rows from ``first_row`` on x blocks of channels. qkv [tokens, C], ring [record rows, RING, C].

    mixed: [rows, T, C], contiguous, so that a window is found without its step.

    FOLDS: a row whose verify folds also brings its checkpoint's conv history to the window's start.
    """
    num_blocks = (C + BC - 1) // BC
    place = tl.program_id(0) // num_blocks
    row = first_row + place
    o_c = (tl.program_id(0) % num_blocks) * BC + tl.arange(0, BC)
    m_c = o_c < C
    p_row = p_rows + row * ROW_COLUMNS
    slot = tl.load(p_row).to(tl.int64)
    record_row = tl.load(p_row + 1).to(tl.int64)
    if (slot <= 0) | (record_row < 0):
        return
    first_token = tl.load(p_row + 2).to(tl.int64)
    query_len = tl.load(p_row + 3)
    committed_len = tl.load(p_row + 9) + tl.load(p_row + 10)
    p_ring += record_row * RING * C + o_c
    ACTIVATION: tl.constexpr = p_mixed.dtype.element_ty

    o_t = tl.arange(0, BT)
    m_t = o_t < query_len
    b_sum = tl.zeros([BT, BC], tl.float32)
    if BIAS:
        b_sum += tl.load(p_bias + o_c, mask=m_c, other=0.0).to(tl.float32)[None, :]
    p_window = p_qkv + first_token * qkv_stride + o_c
    for tap in tl.static_range(W):
        o_x = o_t + tap - (W - 1)  # of the window; negative: from the ring
        m_old = (m_t & (o_x < 0))[:, None] & m_c[None, :]
        m_new = (m_t & (o_x >= 0))[:, None] & m_c[None, :]
        entry = (committed_len + o_x + (W - 1)) % RING
        b_x = tl.load(p_ring[None, :] + entry[:, None] * C, mask=m_old, other=0.0).to(tl.float32)
        o_token = tl.maximum(o_x, 0).to(tl.int64)
        b_x += tl.load(p_window[None, :] + o_token[:, None] * qkv_stride, mask=m_new, other=0.0).to(tl.float32)
        b_weight = tl.load(p_weight + o_c * W + tap, mask=m_c, other=0.0).to(tl.float32)
        b_sum += b_x * b_weight[None, :]
    b_mixed = rounded(b_sum / (1.0 + tl.exp(-b_sum)), ACTIVATION)
    m_tc = m_t[:, None] & m_c[None, :]
    o_out = (place.to(tl.int64) * T + o_t)[:, None] * C + o_c[None, :]
    tl.store(p_mixed + o_out, b_mixed.to(ACTIVATION), mask=m_tc)

    b_raw = tl.load(p_window[None, :] + o_t.to(tl.int64)[:, None] * qkv_stride, mask=m_tc, other=0.0)
    entry = (committed_len + o_t + (W - 1)) % RING
    tl.store(p_ring[None, :] + entry[:, None] * C, b_raw, mask=m_tc)
    if FOLDS and tl.load(p_row + 11) > 0:
        p_history = p_conv + slot * conv_slot_stride + o_c.to(tl.int64) * conv_channel_stride
        for i in tl.static_range(W - 1):
            b_input = tl.load(p_ring + (committed_len + i) % RING * C, mask=m_c, other=0.0)
            tl.store(p_history, b_input, mask=m_c)
            p_history += conv_token_stride
