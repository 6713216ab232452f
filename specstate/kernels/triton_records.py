"""Records that a caller's own verify made, into the rings."""

import triton
import triton.language as tl

from specstate.kernels.triton_common import inverse_norm


@triton.jit(do_not_specialize_on_alignment=["p_u_in", "p_key_in", "p_gate_in"])
def records_kernel(
    p_rows,
    p_u_in,
    p_key_in,
    p_gate_in,
    p_u,
    p_key_gate,
    p_inv_norm,
    H,
    R,
    ROW_COLUMNS: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    BT: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
):
    """Grid: rows x H. Inputs u [tokens, H, V], key and gate [tokens, H, K], contiguous; BV covers V."""
    head = tl.program_id(0) % H
    row = tl.program_id(0) // H
    p_row = p_rows + row * ROW_COLUMNS
    record_row = tl.load(p_row + 1).to(tl.int64)
    if (tl.load(p_row) <= 0) | (record_row < 0):
        return
    first_token = tl.load(p_row + 2).to(tl.int64)
    committed_len = tl.load(p_row + 9) + tl.load(p_row + 10)
    o_t, o_k, o_v = tl.arange(0, BT), tl.arange(0, BK), tl.arange(0, BV)
    m_t = o_t < tl.load(p_row + 3)
    m_tk = m_t[:, None] & (o_k < K)[None, :]
    m_tv = m_t[:, None] & (o_v < V)[None, :]
    head_row = record_row * H + head
    entry = head_row * R + (committed_len + o_t) % R
    token = ((first_token + o_t) * H + head)[:, None]
    b_u = tl.load(p_u_in + token * V + o_v[None, :], mask=m_tv, other=0.0)
    b_key = tl.load(p_key_in + token * K + o_k[None, :], mask=m_tk, other=0.0)
    b_gate = tl.load(p_gate_in + token * K + o_k[None, :], mask=m_tk, other=0.0)
    p_record = p_key_gate + entry[:, None] * (2 * K) + o_k[None, :]
    tl.store(p_u + entry[:, None] * V + o_v[None, :], b_u, mask=m_tv)
    tl.store(p_record, b_key, mask=m_tk)
    tl.store(p_record + K, b_gate, mask=m_tk)
    b_wide = b_key.to(tl.float32)
    tl.store(p_inv_norm + entry, inverse_norm(tl.sum(b_wide * b_wide, axis=1)), mask=m_t)


@triton.jit(do_not_specialize_on_alignment=["p_qkv"])
def conv_inputs_kernel(
    p_rows,
    p_qkv,
    p_ring,
    C,
    RING,
    HISTORY,
    ROW_COLUMNS: tl.constexpr,
    BT: tl.constexpr,
    BC: tl.constexpr,
):
    """The raw inputs [tokens, C] of a window into the conv ring. Grid: rows x blocks of channels."""
    num_blocks = (C + BC - 1) // BC
    row = tl.program_id(0) // num_blocks
    o_c = (tl.program_id(0) % num_blocks) * BC + tl.arange(0, BC)
    p_row = p_rows + row * ROW_COLUMNS
    record_row = tl.load(p_row + 1).to(tl.int64)
    if (tl.load(p_row) <= 0) | (record_row < 0):
        return
    committed_len = tl.load(p_row + 9) + tl.load(p_row + 10)
    o_t = tl.arange(0, BT)
    m_tc = (o_t < tl.load(p_row + 3))[:, None] & (o_c < C)[None, :]
    token = (tl.load(p_row + 2).to(tl.int64) + o_t)[:, None]
    b_input = tl.load(p_qkv + token * C + o_c[None, :], mask=m_tc, other=0.0)
    entry = record_row * RING + (committed_len + o_t + HISTORY) % RING
    tl.store(p_ring + entry[:, None] * C + o_c[None, :], b_input, mask=m_tc)
