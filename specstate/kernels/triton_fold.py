"""The fold: pending records into checkpoints, recurrent state and conv history together, all layers in one launch.

Layers are reached through a table of base addresses, so their storage may lie anywhere. Per row of the plan: source,
destination (may be the source), record row, source position, count, boundary slot (0: none), boundary count. Both
destinations get the state and the conv history that belong to their own position.
"""

import triton
import triton.language as tl

from specstate.kernels.triton_common import fold_records, rounded


@triton.jit(do_not_specialize=["num_rows"], do_not_specialize_on_alignment=["p_table"])
def fold_kernel(
    p_plan,
    p_table,
    num_rows,
    slot_stride,
    conv_slot_stride,
    conv_channel_stride,
    conv_token_stride,
    lower_bound,
    H,
    R,
    C,
    RING,
    PLAN_COLUMNS: tl.constexpr,
    TABLE_COLUMNS: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    HISTORY: tl.constexpr,
    ALIGNMENT: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    BC: tl.constexpr,
    BOUNDED: tl.constexpr,
    CHECKPOINT: tl.constexpr,
    ACTIVATION: tl.constexpr,
    A_LOG: tl.constexpr,
    DT_BIAS: tl.constexpr,
):
    """Columns of a table row: recurrent, conv, conv_ring, record_u, record_key_gate, record_inv_norm, A_log, dt_bias.

    Grid: layers x rows x (H x blocks of V, then blocks of conv channels), in one dimension.

    HISTORY = W - 1, 0 without a convolution; RING = W - 1 + T entries of the conv ring. ALIGNMENT: bytes that divide
    every recurrent base address.
    """
    num_v_blocks: tl.constexpr = (V + BV - 1) // BV
    state_programs = H * num_v_blocks
    programs = state_programs
    if HISTORY > 0:
        programs += (C + BC - 1) // BC
    part = tl.program_id(0) % programs
    row = (tl.program_id(0) // programs) % num_rows
    layer = tl.program_id(0) // (programs * num_rows)

    p_row = p_plan + row * PLAN_COLUMNS
    count = tl.load(p_row + 4)
    boundary_slot = tl.load(p_row + 5)
    if (count <= 0) & (boundary_slot <= 0):
        return
    source = tl.load(p_row).to(tl.int64)
    destination = tl.load(p_row + 1).to(tl.int64)
    record_row = tl.load(p_row + 2).to(tl.int64)
    checkpoint_len = tl.load(p_row + 3)
    boundary_count = tl.load(p_row + 6)
    if (source <= 0) | (record_row < 0):
        return
    p_layer = p_table + layer * TABLE_COLUMNS

    if part < state_programs:
        head = part // num_v_blocks
        o_v = (part % num_v_blocks) * BV + tl.arange(0, BV)
        o_k = tl.arange(0, BK)
        m_k = o_k < K
        m_vk = (o_v < V)[:, None] & m_k[None, :]
        head_row = record_row * H + head
        p_u = tl.load(p_layer + 3).to(tl.pointer_type(tl.float32)) + head_row * R * V
        p_key_gate = tl.load(p_layer + 4).to(tl.pointer_type(ACTIVATION)) + head_row * R * (2 * K)
        p_inv_norm = tl.load(p_layer + 5).to(tl.pointer_type(tl.float32)) + head_row * R
        b_rate = tl.exp(tl.load(tl.load(p_layer + 6).to(tl.pointer_type(A_LOG)) + head).to(tl.float32))
        p_bias = tl.load(p_layer + 7).to(tl.pointer_type(DT_BIAS)) + head * K
        b_bias = tl.load(p_bias + o_k, mask=m_k, other=0.0).to(tl.float32)
        # Vector loads need to know what the cast hides.
        p_recurrent = tl.multiple_of(tl.load(p_layer).to(tl.pointer_type(CHECKPOINT)), ALIGNMENT)
        o_state = head * (V * K) + o_v[:, None] * K + o_k[None, :]
        b_source = tl.load(p_recurrent + source * slot_stride + o_state, mask=m_vk, other=0.0).to(tl.float32)
        if boundary_slot > 0:
            b_state = fold_records(
                b_source, boundary_count, checkpoint_len % R, p_u, p_key_gate, p_inv_norm, b_bias, b_rate,
                lower_bound, o_v, o_k, R, K, V, BOUNDED,
            )  # fmt: skip
            p_state = p_recurrent + boundary_slot.to(tl.int64) * slot_stride + o_state
            tl.store(p_state, rounded(b_state, CHECKPOINT).to(CHECKPOINT), mask=m_vk)
        if count > 0:
            b_state = fold_records(
                b_source, count, checkpoint_len % R, p_u, p_key_gate, p_inv_norm, b_bias, b_rate,
                lower_bound, o_v, o_k, R, K, V, BOUNDED,
            )  # fmt: skip
            p_state = p_recurrent + destination * slot_stride + o_state
            tl.store(p_state, rounded(b_state, CHECKPOINT).to(CHECKPOINT), mask=m_vk)
    else:
        o_c = (part - state_programs) * BC + tl.arange(0, BC)
        m_c = o_c < C
        p_input = tl.load(p_layer + 1).to(tl.pointer_type(ACTIVATION))
        p_input += o_c.to(tl.int64) * conv_channel_stride
        p_ring = tl.load(p_layer + 2).to(tl.pointer_type(ACTIVATION)) + record_row * RING * C + o_c
        # The input of position p lies in ring entry p + W - 1, so a history's oldest lies in entry `position`.
        for i in tl.static_range(HISTORY):
            if boundary_slot > 0:
                entry = (checkpoint_len + boundary_count + i) % RING
                b_input = tl.load(p_ring + entry * C, mask=m_c, other=0.0)
                tl.store(p_input + boundary_slot.to(tl.int64) * conv_slot_stride, b_input, mask=m_c)
            if count > 0:
                entry = (checkpoint_len + count + i) % RING
                b_input = tl.load(p_ring + entry * C, mask=m_c, other=0.0)
                tl.store(p_input + destination * conv_slot_stride, b_input, mask=m_c)
            p_input += conv_token_stride
