"""The fold of all rows and layers in one launch, for Hopper GPUs; the contract and the columns are triton_fold's.

Most steps fold few rows, and which ones is known on the device alone. So the grid is as large as the GPU, and its
programs share the rows that are due: every program finds them in the plan, and takes one head of one row of one layer
at a time. Records and state come by 16-byte copies, the state in blocks that are folded as they arrive.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy

from specstate.kernels import hopper_constants
from specstate.kernels.gluon_common import (
    FLAT,
    LINE,
    LOG2_E,
    ROWS,
    K,
    barrier,
    decay_factor,
    decayed_keys,
    fetch_ring,
    folded,
    itemsize,
    key_step,
    record_factors,
)
from specstate.kernels.triton_rows import (
    PLAN_BOUNDARY_COUNT,
    PLAN_BOUNDARY_SLOT,
    PLAN_CHECKPOINT_LEN,
    PLAN_COLUMNS,
    PLAN_COUNT,
    PLAN_DESTINATION,
    PLAN_RECORD_ROW,
    PLAN_SOURCE,
)

#: Rows of the plan that a program looks at together.
ROW_BLOCK = gl.constexpr(256)
#: Rows of V that are folded together: a thread holds 8 x 4 values of them.
STATE_BLOCK = gl.constexpr(hopper_constants.FOLD_BLOCK)
STATE = gl.constexpr(gl.BlockedLayout([8, 4], [1, 32], [4, 1], [1, 0]))
#: Blocks of a state on their way at a time.
BUFFERS = gl.constexpr(hopper_constants.FOLD_BUFFERS)
#: Conv channels that a program takes at a time.
CHANNELS = gl.constexpr(256)


@gluon.jit
def _addresses(p_layer, column: gl.constexpr, DTYPE: gl.constexpr, ALIGNMENT: gl.constexpr):
    """A base address of the table as a pointer; vector loads need to know what the cast hides."""
    return gl.multiple_of(gl.load(p_layer + column).to(gl.pointer_type(DTYPE), bitcast=False), ALIGNMENT)


@gluon.jit
def _fetch_block(s_state, p_state, block, BV: gl.constexpr):
    """Starts copying a block of the state, if there is one, into the buffer whose turn it is: a group of its own."""
    if block < BV // STATE_BLOCK:
        VECTOR: gl.constexpr = 16 // itemsize(s_state.dtype)
        LAYOUT: gl.constexpr = gl.BlockedLayout([1, VECTOR], [32 * VECTOR // K, K // VECTOR], [4, 1], [1, 0])
        o_row = gl.arange(0, STATE_BLOCK, gl.SliceLayout(1, LAYOUT))
        o_k = gl.arange(0, K, gl.SliceLayout(0, LAYOUT))
        p_block = p_state + block * (STATE_BLOCK * K) + o_row[:, None] * K + o_k[None, :]
        async_copy.async_copy_global_to_shared(s_state.index(block % BUFFERS), p_block)
    async_copy.commit_group()


@gluon.jit
def _fold_head(
    p_source, p_destination, p_u, p_key_gate, p_inv_norm, entry, count, bias, rate, bound,
    R: gl.constexpr, V: gl.constexpr, BV: gl.constexpr, CAPACITY: gl.constexpr, BOUNDED: gl.constexpr,
):  # fmt: skip
    """BV rows of one state, ``count`` records later, from one place to another."""
    first = count - CAPACITY  # the newest record lies in the last row
    s_records = gl.allocate_shared_memory(p_key_gate.dtype.element_ty, [CAPACITY, 2 * K], ROWS)
    s_u = gl.allocate_shared_memory(gl.float32, [CAPACITY, BV], ROWS)
    s_state = gl.allocate_shared_memory(p_source.dtype.element_ty, [BUFFERS, STATE_BLOCK, K], ROWS)
    fetch_ring(s_records, p_key_gate, entry, first, R, 2 * K)
    fetch_ring(s_u, p_u, entry, first, R, V)
    async_copy.commit_group()
    for block in gl.static_range(BUFFERS):
        _fetch_block(s_state, p_source, block, BV)
    record = first + gl.arange(0, CAPACITY, LINE)
    s_norms, s_factors = record_factors(p_inv_norm, entry, record, decay_factor(rate, bound, BOUNDED), R)
    async_copy.wait_group(BUFFERS)
    barrier()

    later = decayed_keys(s_records, s_norms, s_factors, count, bias, rate, BOUNDED)
    s_later = gl.allocate_shared_memory(gl.float32, [K], FLAT, later)
    decayed = s_later.load(gl.SliceLayout(0, STATE))
    o_row = gl.arange(0, STATE_BLOCK, gl.SliceLayout(1, STATE))
    o_k = gl.arange(0, K, gl.SliceLayout(0, STATE))
    p_tile = p_destination + o_row[:, None] * K + o_k[None, :]
    for block in gl.static_range(BV // STATE_BLOCK):
        async_copy.wait_group(BUFFERS - 1)
        barrier()
        state = s_state.index(block % BUFFERS).load(STATE).to(gl.float32)
        barrier()
        _fetch_block(s_state, p_source, block + BUFFERS, BV)
        state = folded(state, decayed, s_records, 0, s_u, block, count, key_step(s_records.dtype), STATE)
        gl.store(p_tile + block * (STATE_BLOCK * K), state.to(p_destination.dtype.element_ty))
    barrier()


# A capture must find every variant compiled: whatever changes from call to call is not specialised on.
@gluon.jit(do_not_specialize=["num_rows", "num_layers"], do_not_specialize_on_alignment=["p_plan", "p_table"])
def fold_kernel(
    p_plan,
    p_table,
    num_rows,
    num_layers,
    slot_vectors,
    conv_slot_stride,
    conv_channel_stride,
    conv_token_stride,
    lower_bound,
    H: gl.constexpr,
    V: gl.constexpr,
    BV: gl.constexpr,
    R: gl.constexpr,
    CAPACITY: gl.constexpr,
    C: gl.constexpr,
    HISTORY: gl.constexpr,
    RING: gl.constexpr,
    TABLE_COLUMNS: gl.constexpr,
    BOUNDED: gl.constexpr,
    CHECKPOINT: gl.constexpr,
    ACTIVATION: gl.constexpr,
    A_LOG: gl.constexpr,
    DT_BIAS: gl.constexpr,
):
    """Columns of a table row as in triton_fold. slot_vectors: the checkpoints' slot stride in 16 bytes.

    CAPACITY: a power of two, at least R and GROUP. Grid: as many programs as may share the work.
    """
    heads: gl.constexpr = H * (V // BV)
    conv_blocks: gl.constexpr = (C + CHANNELS - 1) // CHANNELS
    slot_stride = slot_vectors.to(gl.int64) * (16 // itemsize(CHECKPOINT))
    channel = gl.arange(0, K, LINE)
    for first_row in range(0, num_rows, ROW_BLOCK):
        o_row = first_row + gl.arange(0, ROW_BLOCK, LINE)
        m_row = o_row < num_rows
        p_rows = p_plan + o_row * PLAN_COLUMNS
        due = gl.load(p_rows + PLAN_COUNT, mask=m_row, other=0) > 0
        due = due | (gl.load(p_rows + PLAN_BOUNDARY_SLOT, mask=m_row, other=0) > 0)
        due = due & (gl.load(p_rows + PLAN_SOURCE, mask=m_row, other=0) > 0)
        due = due & (gl.load(p_rows + PLAN_RECORD_ROW, mask=m_row, other=-1) >= 0)
        rank = gl.associative_scan(due.to(gl.int32), 0, _add)
        num_due = gl.sum(due.to(gl.int32), 0)

        for item in range(gl.program_id(0), num_due * num_layers * heads, gl.num_programs(0)):
            part = item % heads
            layer = item // heads % num_layers
            head = part // (V // BV)
            row = first_row + gl.sum((rank <= item // heads // num_layers).to(gl.int32), 0)
            p_row = p_plan + row * PLAN_COLUMNS
            p_layer = p_table + layer * TABLE_COLUMNS
            p_state = _addresses(p_layer, 0, CHECKPOINT, 16) + part * (BV * K)
            head_row = gl.load(p_row + PLAN_RECORD_ROW).to(gl.int64) * H + head
            p_u = _addresses(p_layer, 3, gl.float32, 16) + head_row * (R * V) + part % (V // BV) * BV
            p_key_gate = _addresses(p_layer, 4, ACTIVATION, 16) + head_row * (R * 2 * K)
            p_inv_norm = _addresses(p_layer, 5, gl.float32, 4) + head_row * R
            rate = gl.exp(gl.load(_addresses(p_layer, 6, A_LOG, 2) + head).to(gl.float32)) * LOG2_E
            bias = gl.load(_addresses(p_layer, 7, DT_BIAS, 2) + head * K + channel).to(gl.float32)

            entry = gl.load(p_row + PLAN_CHECKPOINT_LEN) % R
            source = gl.load(p_row + PLAN_SOURCE)
            count = gl.load(p_row + PLAN_COUNT)
            boundary_slot = gl.load(p_row + PLAN_BOUNDARY_SLOT)
            boundary_count = gl.load(p_row + PLAN_BOUNDARY_COUNT)
            destination = gl.where(count > 0, gl.load(p_row + PLAN_DESTINATION), 0)
            # Of a row whose two slots are one, both are the same state: it is written once.
            boundary_slot = gl.where(boundary_slot == destination, 0, boundary_slot)
            # What is written over the source comes last.
            is_boundary = boundary_slot != source
            for _ in range(2):
                slot = gl.where(is_boundary, boundary_slot, destination)
                if slot > 0:
                    _fold_head(
                        p_state + source.to(gl.int64) * slot_stride, p_state + slot.to(gl.int64) * slot_stride,
                        p_u, p_key_gate, p_inv_norm, entry, gl.where(is_boundary, boundary_count, count),
                        bias, rate, lower_bound * LOG2_E, R, V, BV, CAPACITY, BOUNDED,
                    )  # fmt: skip
                is_boundary = is_boundary == 0

        if HISTORY > 0:
            for item in range(gl.program_id(0), num_due * num_layers * conv_blocks, gl.num_programs(0)):
                layer = item // conv_blocks % num_layers
                row = first_row + gl.sum((rank <= item // conv_blocks // num_layers).to(gl.int32), 0)
                o_c = item % conv_blocks * CHANNELS + gl.arange(0, CHANNELS, LINE)
                p_row = p_plan + row * PLAN_COLUMNS
                record_row = gl.load(p_row + PLAN_RECORD_ROW).to(gl.int64)
                checkpoint_len = gl.load(p_row + PLAN_CHECKPOINT_LEN)
                p_layer = p_table + layer * TABLE_COLUMNS
                p_conv = _addresses(p_layer, 1, ACTIVATION, 2) + o_c.to(gl.int64) * conv_channel_stride
                p_ring = _addresses(p_layer, 2, ACTIVATION, 2) + record_row * (RING * C) + o_c
                # The input of position p lies in ring entry p + W - 1, so a history's oldest in entry `position`.
                count = gl.load(p_row + PLAN_COUNT)
                boundary_slot = gl.load(p_row + PLAN_BOUNDARY_SLOT).to(gl.int64)
                boundary = checkpoint_len + gl.load(p_row + PLAN_BOUNDARY_COUNT)
                destination = gl.load(p_row + PLAN_DESTINATION).to(gl.int64)
                for i in gl.static_range(HISTORY):
                    kept = gl.load(p_ring + (boundary + i) % RING * C, mask=(o_c < C) & (boundary_slot > 0))
                    p_kept = p_conv + boundary_slot * conv_slot_stride + i * conv_token_stride
                    gl.store(p_kept, kept, mask=(o_c < C) & (boundary_slot > 0))
                    moved = gl.load(p_ring + (checkpoint_len + count + i) % RING * C, mask=(o_c < C) & (count > 0))
                    p_moved = p_conv + destination * conv_slot_stride + i * conv_token_stride
                    gl.store(p_moved, moved, mask=(o_c < C) & (count > 0))


@gluon.jit
def _add(a, b):
    return a + b
