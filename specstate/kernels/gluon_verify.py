"""A window of one layer in one launch, for Hopper GPUs: conv, verify over pending records, new records.

The mathematics is that of triton_verify; this is how it is laid out. A program takes a row, a head and BV rows of V:

1. What an earlier launch can have left unfinished is not read yet: the newest pending records are asked for, then the
   first part of the state, by TMA. The program waits for the launch before it and lets the next one start; the window's
   inputs follow, and more of the state once those are there. Memory answers in the order of requests: what is small and
   waited for, of this program and of others, must not stand behind what is large and comes to use later.
2. Key side, a thread a channel: convolution, decays as running products of e^g <= 1, norms. Norms are applied to sums,
   not to vectors.
3. Tokens of the window in pairs, k_s e^{c_s - c_t} k_t and the like: where no decay over the window is below e^-64, and
   there are more than four, by tensor cores, as F against k_t e^{-c_t}; else by products and sums over channels.
4. Pending records, newest first, sixteen at a time: their keys are decayed as soon as they are there. C = F kp^T by
   tensor cores, each warp on its own 32 channels; then P = U C.
5. P += S F^T, chunk by chunk as the state arrives. Its last chunks come into the memory of the pending records, once
   those are used: so three or four programs fit on a multiprocessor, fewer with many records or wide ones.
6. Forward substitution, a thread a row of V; corrections and outputs leave at once.

Products on tensor cores are three tf32 products of split operands (with bfloat16 checkpoints three bfloat16 products).
The large part of every four has a fresh accumulator (32 channels, of a bfloat16 state 64): tensor cores round towards
zero as they add.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from specstate.kernels import hopper_constants
from specstate.kernels.gluon_common import (
    FLAT,
    GROUP,
    LINE,
    LOG2_E,
    ROWS,
    WARPS,
    K,
    barrier,
    channel_sums,
    columns_of,
    decay_factor,
    decayed_keys,
    exp2,
    fetch_ring,
    fetch_rows,
    folded,
    group_keys,
    itemsize,
    key_step,
    log2_decay,
    padded,
    reciprocal,
    record_factors,
    rounded_parts,
    row_of,
    scalars,
    shared_rows,
    stacked,
    tile_layout,
    truncated_parts,
    whole_exp2,
    wrapped,
)
from specstate.kernels.triton_rows import (
    CHECKPOINT_LEN,
    CHECKPOINT_SLOT,
    FIRST_TOKEN,
    PENDING_LEN,
    QUERY_LEN,
    RECORD_ROW,
    ROW_COLUMNS,
)

#: Pending records at a time, at most.
PENDING_TILE = gl.constexpr(hopper_constants.PENDING_TILE)

#: By warp on its own 32 channels: [warps, columns of F, records].
BY_WARP = gl.constexpr(gl.NVMMADistributedLayout([2, 0], [4, 1, 1], [1, 16, 8]))
#: Rows of V by columns of F.
PRODUCT = gl.constexpr(gl.NVMMADistributedLayout([2, 0], [4, 1], [16, 8]))
#: Channels side by side, in an order that matrix loads read without bank conflicts.
BY_CHANNEL = gl.constexpr(gl.SwizzledSharedLayout(4, 1, 8, [0, 1]))
BY_WARP_CHANNEL = gl.constexpr(gl.SwizzledSharedLayout(4, 1, 8, [1, 2, 0]))


@gluon.constexpr_function
def num_columns(longest):
    """Columns of F, keys then queries: twice the window, padded to what a product takes."""
    return 16 if longest <= 8 else 32


@gluon.constexpr_function
def window_rows(longest):
    """Rows of a tile that holds a window: tiles are powers of two."""
    return next(size for size in (1, 2, 4, 8, 16) if size >= longest)


@gluon.constexpr_function
def pairs_before(token, longest):
    """Sums that earlier tokens make: each its own q k, then k k and q k with every later token."""
    return token * (2 * longest - token)


@gluon.jit
def load_history(p_ring, oldest, W: gl.constexpr, RING: gl.constexpr, C: gl.constexpr):
    """The W - 1 inputs before the window, of each thread's channel."""
    inputs = ()
    for i in gl.static_range(W - 1):
        inputs = inputs + (gl.load(p_ring + wrapped(oldest + i, RING) * C),)
    return inputs


@gluon.jit
def convolved(history, s_window, taps, bias, T: gl.constexpr, W: gl.constexpr):
    """SiLU of the causal conv of a window [rows, channels]: T vectors, rounded to the activation dtype."""
    inputs = ()
    for i in gl.static_range(W - 1):
        inputs = inputs + (history[i].to(gl.float32),)
    inputs = inputs + rows_of(s_window, T)
    outputs = ()
    for t in gl.static_range(T):
        x = bias
        for i in gl.static_range(W):
            x = x + inputs[t + i] * taps[i]
        y = x * reciprocal(1.0 + exp2(-LOG2_E * x))
        outputs = outputs + (y.to(s_window.dtype).to(gl.float32),)
    return outputs


@gluon.jit
def load_taps(p_weight, p_bias, first, COUNT: gl.constexpr, W: gl.constexpr, BIAS: gl.constexpr, WIDE: gl.constexpr):
    """Conv weights of COUNT channels from ``first`` on, a thread a channel: W vectors, and the bias.

    WIDE: a channel's taps are one load. Else each load of a warp touches four times the lines.
    """
    channel = gl.arange(0, COUNT, LINE)
    p_weight += first * W
    if WIDE:
        TAPS: gl.constexpr = gl.BlockedLayout([1, W], [32, 1], [WARPS, 1], [1, 0])
        o_channel = gl.arange(0, COUNT, gl.SliceLayout(1, TAPS))
        o_tap = gl.arange(0, W, gl.SliceLayout(0, TAPS))
        p_weight = gl.multiple_of(p_weight, W * itemsize(p_weight.dtype.element_ty))
        taps = columns_of(gl.load(p_weight + o_channel[:, None] * W + o_tap[None, :]).to(gl.float32), W)
    else:
        taps = ()
        for i in gl.static_range(W):
            taps = taps + (gl.load(p_weight + channel * W + i).to(gl.float32),)
    if BIAS:
        bias = gl.load(p_bias + first + channel).to(gl.float32)
    else:
        bias = gl.zeros([COUNT], gl.float32, LINE)
    return taps, bias


@gluon.jit
def rows_of(s_tile, T: gl.constexpr):
    """The first T rows of a tile, T vectors in float32."""
    vectors = ()
    for t in gl.static_range(T):
        vectors = vectors + (row_of(s_tile, t),)
    return vectors


@gluon.jit
def store_rows(p_ring, s_tile, first, query_len, SIZE: gl.constexpr, STRIDE: gl.constexpr):
    """Rows of a tile, in the ring's dtype, into entries first, first + 1, .. below 2 SIZE: query_len of them."""
    LAYOUT: gl.constexpr = tile_layout(s_tile.shape[1], itemsize(s_tile.dtype))
    o_row = gl.arange(0, s_tile.shape[0], gl.SliceLayout(1, LAYOUT))
    o_column = gl.arange(0, s_tile.shape[1], gl.SliceLayout(0, LAYOUT))
    entry = wrapped(first + o_row, SIZE)
    mask = (o_row < query_len)[:, None] & (o_column >= 0)[None, :]
    values = s_tile.load(LAYOUT).to(p_ring.dtype.element_ty)
    gl.store(p_ring + (entry * STRIDE)[:, None] + o_column[None, :], values, mask=mask)


@gluon.jit
def store_outputs(address, stride, is_wide, s_tile, query_len, ACTIVATION: gl.constexpr):
    """Rows of a float32 tile to tokens ``stride`` vectors of 16 bytes apart, as float32 or in the activation dtype."""
    LAYOUT: gl.constexpr = tile_layout(s_tile.shape[1], itemsize(ACTIVATION))
    o_row = gl.arange(0, s_tile.shape[0], gl.SliceLayout(1, LAYOUT))
    o_column = gl.arange(0, s_tile.shape[1], gl.SliceLayout(0, LAYOUT))
    mask = (o_row < query_len)[:, None] & (o_column >= 0)[None, :]
    values = s_tile.load(LAYOUT)
    if is_wide:
        p_wide = gl.multiple_of(address.to(gl.pointer_type(gl.float32)), 16)
        gl.store(p_wide + (o_row * (stride * 4))[:, None] + o_column[None, :], values, mask=mask)
    else:
        p_narrow = gl.multiple_of(address.to(gl.pointer_type(ACTIVATION)), 16)
        o_token = o_row * (stride * (16 // itemsize(ACTIVATION)))
        gl.store(p_narrow + o_token[:, None] + o_column[None, :], values.to(ACTIVATION), mask=mask)


@gluon.jit
def store_history(p_conv, history, channel, channel_stride, token_stride, W: gl.constexpr):
    """The W - 1 inputs before the window: the conv history of a checkpoint that stands there."""
    for i in gl.static_range(W - 1):
        gl.store(p_conv + channel.to(gl.int64) * channel_stride + i * token_stride, history[i])


@gluon.jit
def shared_scalars(values):
    """Sixteen numbers in shared memory."""
    return gl.allocate_shared_memory(gl.float32, [16], FLAT, values)


@gluon.jit
def pair_sums(keys, queries, decays, T: gl.constexpr):
    """Sums over channels of k_s e^{c_s - c_t} k_t and q_s e^{c_s - c_t} k_t, as batches of 16 in shared memory.

    For each t its q k, then k k and q k with every later s.
    """
    batches = ()
    values = ()
    for t in gl.static_range(T):
        values = values + (queries[t] * keys[t],)
        key = keys[t]
        for s in gl.static_range(t + 1, T):
            key = key * decays[s]
            values = values + (keys[s] * key, queries[s] * key)
        for _ in gl.static_range(pairs_before(t, T) // 16, pairs_before(t + 1, T) // 16):
            batches = batches + (shared_scalars(channel_sums(values[:16])),)
            values = values[16:]
    if T % 4 != 0:  # T^2 sums do not fill the last batch
        batches = batches + (shared_scalars(channel_sums(padded(values, 16))),)
    return batches


@gluon.jit
def vector_norms(keys, queries, T: gl.constexpr):
    """1/|k| of key t at t, K^-1/2/|q| of query t at T + t, as batches of 16 in shared memory."""
    batches = ()
    squares = ()
    for t in gl.static_range(T):
        squares = squares + (keys[t] * keys[t],)
    for t in gl.static_range(T):
        squares = squares + (queries[t] * queries[t],)
    squares = padded(squares, 16 if T <= 8 else 32)
    for batch in gl.static_range(len(squares) // 16):
        sums = channel_sums(squares[16 * batch : 16 * batch + 16])
        is_key = 16 * batch + gl.arange(0, 16, sums.type.layout) < T
        # Correctly rounded: an approximate root costs a tenth of the error budget.
        norms = gl.div_rn(gl.where(is_key, 1.0, 0.08838834764831845), gl.sqrt_rn(sums + 1e-6))
        batches = batches + (shared_scalars(norms),)
    return batches


@gluon.jit
def fetch_pending(s_records, s_u, p_key_gate, p_u, entry, count, V: gl.constexpr, R: gl.constexpr):
    """Starts copying the last of ``count`` records, those that begin at ring ``entry``, into all rows of a tile."""
    first = count - s_records.shape[0]
    fetch_ring(s_records, p_key_gate, entry, first, R, 2 * K)
    fetch_ring(s_u, p_u, entry, first, R, V)


@gluon.jit
def pending_factors(p_inv_norm, entry, pending, factor, SECOND: gl.constexpr, R: gl.constexpr):
    """``record_factors`` of the newest records, then of the SECOND that come before them."""
    o_n = gl.arange(0, PENDING_TILE if SECOND == 0 else 2 * PENDING_TILE, LINE)
    record = pending - PENDING_TILE + o_n
    record = gl.where(o_n < PENDING_TILE, record, record - PENDING_TILE - SECOND)
    return record_factors(p_inv_norm, entry, record, factor, R)


@gluon.jit
def pending_keys(s_records, s_norms, s_factors, TILE: gl.constexpr, pending, later, bias, rate, BOUNDED: gl.constexpr):
    """``group_keys`` of a tile of one or two groups, [warps, 32, records]; the gates behind it.

    s_norms and s_factors hold those of all tiles, of which this is number TILE.
    """
    RECORDS: gl.constexpr = s_records.shape[0]
    s_norm = s_norms.slice(TILE * PENDING_TILE, RECORDS)
    s_factor = s_factors.slice(TILE * PENDING_TILE, RECORDS)
    keys, later = group_keys(s_records, s_norm, s_factor, RECORDS // GROUP - 1, later, bias, rate, BOUNDED)
    if RECORDS > GROUP:
        older = padded((), GROUP)
        if pending > TILE * PENDING_TILE + GROUP:
            older, later = group_keys(s_records, s_norm, s_factor, 0, later, bias, rate, BOUNDED)
        keys = older + keys
    return gl.reshape(stacked(keys, RECORDS), [WARPS, 32, RECORDS]), later


@gluon.jit
def early_keys(s_records, s_norms, s_factors, pending, bias, rate, BOUNDED: gl.constexpr):
    """``pending_keys`` of all tiles that were fetched, each in its records' own memory; the gates behind them."""
    later = gl.zeros([K], gl.float32, LINE)
    for tile in gl.static_range(len(s_records)):
        if pending > tile * PENDING_TILE:
            keys, later = pending_keys(s_records[tile], s_norms, s_factors, tile, pending, later, bias, rate, BOUNDED)
            barrier()
            key_tile(s_records[tile]).store(keys)
    return later


@gluon.jit
def key_tile(s_records):
    """Memory of a tile of records for its keys [warps, channels, records] in float32: they need no more."""
    RECORDS: gl.constexpr = s_records.shape[0]
    s_first = s_records.slice(0, RECORDS // key_step(s_records.dtype))
    return s_first._reinterpret(gl.float32, [WARPS, 32, RECORDS], BY_WARP_CHANNEL)


@gluon.jit
def key_products(s_keys, f_high, f_low, COLUMNS: gl.constexpr):
    """F kp^T [COLUMNS, records]: each warp takes its own 32 channels, then shares are added up."""
    RECORDS: gl.constexpr = s_keys.shape[2]
    high, low = truncated_parts(s_keys.load(gl.DotOperandLayout(1, BY_WARP, 1)))
    zeros = gl.zeros([WARPS, COLUMNS, RECORDS], gl.float32, BY_WARP)
    small = mma_v2(f_high, low, mma_v2(f_low, high, zeros, "tf32"), "tf32")
    shares = mma_v2(f_high, high, zeros, "tf32") + small
    s_shares = gl.allocate_shared_memory(
        gl.float32, [WARPS, COLUMNS, RECORDS], gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0]), shares
    )
    s_warps = s_shares._reinterpret(gl.float32, [WARPS, COLUMNS, RECORDS], ROWS)
    PAIRS: gl.constexpr = gl.BlockedLayout([1, 2], [64 // RECORDS, RECORDS // 2], [4, 1], [1, 0])
    c = s_warps.index(0).load(PAIRS)
    for warp in gl.static_range(1, WARPS):
        c = c + s_warps.index(warp).load(PAIRS)
    return c


@gluon.jit
def pair_products(keys, decays, f_high, f_low, T: gl.constexpr, COLUMNS: gl.constexpr):
    """What ``pair_sums`` gives, as products of F and k_t e^{-c_t}: for each t a row [COLUMNS] in shared memory.

    For decays whose product over the window is no less than e^-64, and keys below 5e10: beyond that is infinity. Sums
    with an earlier s are not to be read.
    """
    run = decays[0]
    undecayed = (keys[0] * reciprocal(run),)
    for t in gl.static_range(1, T):
        run = run * decays[t]
        undecayed = undecayed + (keys[t] * reciprocal(run),)
    TOKENS: gl.constexpr = COLUMNS // 2
    matrix = gl.reshape(stacked(padded(undecayed, TOKENS), TOKENS), [WARPS, 32, TOKENS])
    s_keys = gl.allocate_shared_memory(gl.float32, matrix.shape, BY_WARP_CHANNEL, matrix)
    c = key_products(s_keys, f_high, f_low, COLUMNS)
    s_rows = gl.allocate_shared_memory(gl.float32, [TOKENS, COLUMNS], ROWS, gl.permute(c, (1, 0)))
    s_rows = s_rows._reinterpret(gl.float32, [TOKENS, COLUMNS], FLAT)
    rows = ()
    for t in gl.static_range(T):
        rows = rows + (s_rows.index(t),)
    return rows


@gluon.jit
def correction_products(product, low, s_u, s_c):
    """product [BV, COLUMNS] + U C^T; the small parts gather in ``low``."""
    c_high, c_low = rounded_parts(s_c.permute([1, 0]).load(gl.DotOperandLayout(1, PRODUCT, 1)))
    u_high, u_low = truncated_parts(s_u.permute([1, 0]).load(gl.DotOperandLayout(0, PRODUCT, 1)))
    low = mma_v2(u_high, c_low, mma_v2(u_low, c_high, low, "tf32"), "tf32")
    return product + mma_v2(u_high, c_high, gl.zeros(product.shape, gl.float32, PRODUCT), "tf32"), low


@gluon.jit
def add_pending(product, low, s_keys, s_u, f_high, f_low, COLUMNS: gl.constexpr):
    """product [BV, COLUMNS] + U (kp F^T) of a tile of records; the small parts gather in ``low``."""
    c = key_products(s_keys, f_high, f_low, COLUMNS)
    if s_keys.shape[2] == 8:
        c = gl.reshape(gl.permute(gl.join(c, gl.zeros_like(c)), (0, 2, 1)), [COLUMNS, 16])
    s_c = gl.allocate_shared_memory(gl.float32, [COLUMNS, 16], gl.SwizzledSharedLayout(4, 2, 4, [1, 0]), c)
    return correction_products(product, low, s_u, s_c)


@gluon.jit
def add_state32(product, low, s_state, s_f):
    """product + S F^T for 32 channels of a float32 state; the small parts gather in ``low``."""
    f_high, f_low = rounded_parts(s_f.load(gl.DotOperandLayout(1, PRODUCT, 1)))
    s_high, s_low = truncated_parts(s_state.load(gl.DotOperandLayout(0, PRODUCT, 1)))
    low = mma_v2(s_high, f_low, low, "tf32")
    low = mma_v2(s_low, f_high, low, "tf32")
    large = mma_v2(s_high, f_high, gl.zeros(product.shape, gl.float32, PRODUCT), "tf32")
    return product + large, low


@gluon.jit
def bfloat16_head(x):
    """The first 8 bits of x in bfloat16, and the rest in float32. By integers: conversions are slow."""
    bits = x.to(gl.int32, bitcast=True)
    head = (bits >> 16).to(gl.int16).to(gl.bfloat16, bitcast=True)
    return head, x - (bits & -65536).to(gl.float32, bitcast=True)


@gluon.jit
def shared_parts(matrix):
    """A matrix [K, COLUMNS] as a sum of three in bfloat16 without loss, each in shared memory."""
    COLUMNS: gl.constexpr = matrix.shape[1]
    LAYOUT: gl.constexpr = gl.SwizzledSharedLayout(8, 64 // COLUMNS, COLUMNS // 8, [1, 0])
    parts = ()
    for _ in gl.static_range(3):
        head, matrix = bfloat16_head(matrix)
        parts = parts + (gl.allocate_shared_memory(gl.bfloat16, matrix.shape, LAYOUT, head),)
    return parts


@gluon.jit
def add_state16(product, low, s_state, s_f, FIRST: gl.constexpr):
    """The same for channels from FIRST on of a bfloat16 state, which is exact; F as ``shared_parts`` has it."""
    B: gl.constexpr = gl.DotOperandLayout(1, PRODUCT, 2)
    large = gl.zeros(product.shape, gl.float32, PRODUCT)
    for i in gl.static_range(s_state.shape[1] // 32):
        state = s_state.slice(i * 32, 32, dim=1).load(gl.DotOperandLayout(0, PRODUCT, 2))
        low = mma_v2(state, s_f[2].slice(FIRST + i * 32, 32).load(B), low)
        low = mma_v2(state, s_f[1].slice(FIRST + i * 32, 32).load(B), low)
        large = mma_v2(state, s_f[0].slice(FIRST + i * 32, 32).load(B), large)
    return product + large, low


@gluon.jit
def load_beta(address, index, is_wide, ACTIVATION: gl.constexpr):
    """Raw beta at ``index``, float32 or in the activation dtype."""
    if is_wide:
        beta = gl.load(address.to(gl.pointer_type(gl.float32)) + index)
    else:
        beta = gl.load(address.to(gl.pointer_type(ACTIVATION)) + index).to(gl.float32)
    return beta


@gluon.jit
def clear_tokens(address, stride, is_wide, first, end, o_out, ACTIVATION: gl.constexpr):
    """Zero outputs for tokens first .. end - 1."""
    for token in range(first, end):
        o_token = token.to(gl.int64) * stride
        if is_wide:
            p_wide = address.to(gl.pointer_type(gl.float32)) + o_token * 4 + o_out
            gl.store(p_wide, gl.zeros(o_out.shape, gl.float32, LINE))
        else:
            p_narrow = address.to(gl.pointer_type(ACTIVATION)) + o_token * (16 // itemsize(ACTIVATION)) + o_out
            gl.store(p_narrow, gl.zeros(o_out.shape, ACTIVATION, LINE))


@gluon.jit
def window_matrix(keys, queries, decays, T: gl.constexpr, COLUMNS: gl.constexpr):
    """F = [k_t e^{c_t} | q_t e^{c_t}], COLUMNS vectors [K]: keys from column 0 on, queries from COLUMNS / 2 on."""
    run = decays[0]
    f_keys = (keys[0] * run,)
    f_queries = (queries[0] * run,)
    for t in gl.static_range(1, T):
        run = run * decays[t]
        f_keys = f_keys + (keys[t] * run,)
        f_queries = f_queries + (queries[t] * run,)
    return padded(f_keys, COLUMNS // 2) + padded(f_queries, COLUMNS // 2)


@gluon.jit
def scaled(vectors, factor):
    """Each of some vectors times one vector."""
    products = ()
    for i in gl.static_range(len(vectors)):
        products = products + (vectors[i] * factor,)
    return products


@gluon.jit
def fold_chunk(s_state, s_decay, s_keys, s_u, p_chunk, chunk: gl.constexpr, count, STEP: gl.constexpr):
    """A chunk of the state [BV, channels], ``count`` records later, into the checkpoint."""
    SIZE: gl.constexpr = s_state.shape[0]
    CHUNK: gl.constexpr = s_state.shape[1]
    LAYOUT: gl.constexpr = gl.BlockedLayout([SIZE * CHUNK // 512, 4], [128 // CHUNK, CHUNK // 4], [4, 1], [1, 0])
    later = s_decay._reinterpret(gl.float32, [K // CHUNK, CHUNK], FLAT).index(chunk).load(gl.SliceLayout(0, LAYOUT))
    state = s_state.load(LAYOUT).to(gl.float32)
    state = folded(state, later, s_keys, chunk, s_u, 0, count, STEP, LAYOUT)
    o_row = gl.arange(0, SIZE, gl.SliceLayout(1, LAYOUT))
    o_k = gl.arange(0, CHUNK, gl.SliceLayout(0, LAYOUT))
    gl.store(p_chunk + o_row[:, None] * K + o_k[None, :], state.to(s_state.dtype))


@gluon.jit
def substituted(
    product, values, s_strength, s_pairs, s_norms, T: gl.constexpr, COLUMNS: gl.constexpr, PRODUCTS: gl.constexpr
):
    """Corrections and outputs of a window, T vectors [BV] each, a thread a row of V. Norms are applied here.

    s_pairs as ``pair_products`` or ``pair_sums`` gives them.
    """
    s_product = gl.allocate_shared_memory(
        gl.float32, product.shape, gl.SwizzledSharedLayout(4, 32 // COLUMNS, COLUMNS // 4, [1, 0]), product
    )
    p = columns_of(s_product.load(gl.BlockedLayout([1, COLUMNS], [32, 1], [4, 1], [1, 0])), COLUMNS)
    from_keys = p[: COLUMNS // 2]
    from_queries = p[COLUMNS // 2 :]
    strengths = scalars(s_strength, s_strength.shape[0])
    norms = ()
    for batch in gl.static_range(len(s_norms)):
        norms = norms + scalars(s_norms[batch], 16)
    corrections = ()
    outputs = ()
    pairs = ()  # a batch at a time takes few registers
    for t in gl.static_range(T):
        if PRODUCTS:
            row = scalars(s_pairs[t], COLUMNS)
            pairs = (row[COLUMNS // 2 + t],)
            for s in gl.static_range(t + 1, T):
                pairs = pairs + (row[s], row[COLUMNS // 2 + s])
        else:
            for batch in gl.static_range((pairs_before(t, T) + 15) // 16, (pairs_before(t + 1, T) + 15) // 16):
                pairs = pairs + scalars(s_pairs[batch], 16)
        u = strengths[t] * (values[t] - norms[t] * from_keys[0])
        normed = u * norms[t]
        corrections = corrections + (u,)
        outputs = outputs + ((from_queries[0] + normed * pairs[0]) * norms[T + t],)
        later_keys = ()
        later_queries = ()
        for s in gl.static_range(1, T - t):
            later_keys = later_keys + (from_keys[s] + normed * pairs[2 * s - 1],)
            later_queries = later_queries + (from_queries[s] + normed * pairs[2 * s],)
        from_keys = later_keys
        from_queries = later_queries
        pairs = pairs[2 * (T - t) - 1 :]
    return corrections, outputs


# Whatever changes from call to call is not specialised on, and beta and outputs come as addresses with a flag for their
# dtype: a capture must find every variant compiled, and each takes seconds. An address is int64 even if the first one
# fits into 32 bits. qkv, gate and the rings are multiples of 16 bytes; strides of the window and the outputs count 16
# bytes.
@gluon.jit(
    do_not_specialize=[
        "is_chained",
        "num_rows",
        "num_tokens",
        "qkv_stride",
        "gate_stride",
        "beta",
        "beta_stride",
        "beta_is_wide",
        "out",
        "out_stride",
        "out_is_wide",
    ],
    do_not_specialize_on_alignment=[
        "p_rows",
        "p_starts",
        "p_inv_norm",
        "p_a_log",
        "p_dt_bias",
        "p_weight",
        "p_conv_bias",
        "p_conv",
    ],
)
def verify_kernel(
    is_chained,
    p_rows,
    p_starts,
    num_rows,
    num_tokens,
    p_qkv,
    qkv_stride,
    p_gate,
    gate_stride,
    beta: gl.int64,
    beta_stride,
    beta_is_wide,
    out: gl.int64,
    out_stride,
    out_is_wide,
    d_state,
    p_state,
    slot_stride,
    p_u,
    p_key_gate,
    p_inv_norm,
    p_a_log,
    p_dt_bias,
    p_weight,
    p_conv_bias,
    p_ring,
    p_conv,
    conv_slot_stride,
    conv_channel_stride,
    conv_token_stride,
    lower_bound,
    H: gl.constexpr,
    V: gl.constexpr,
    BV: gl.constexpr,
    T: gl.constexpr,
    R: gl.constexpr,
    W: gl.constexpr,
    BIAS: gl.constexpr,
    WIDE_TAPS: gl.constexpr,
    BOUNDED: gl.constexpr,
    FOLDS: gl.constexpr,
    CAPACITY: gl.constexpr,
    SECOND: gl.constexpr,
    EARLY: gl.constexpr,
    BUFFERS: gl.constexpr,
    AT_ONCE: gl.constexpr,
    PRODUCTS: gl.constexpr,
):
    """Grid: (rows + 1) x H x V / BV, in one dimension. Row num_rows stands for the tokens of no row: zero output.

    is_chained: the launch before this one is a verify of the same step, which changes nothing that is read before the
    wait. qkv [tokens, C] as the conv takes it, or behind it when W = 0; gate [tokens, H, K], beta [tokens, H], out
    [tokens, H, V]; d_state describes this layer's states as [slots, H V, K]. WIDE_TAPS: taps of a channel are aligned
    to all their bytes. FOLDS: pending records are folded into the checkpoint in the same pass, CAPACITY of them
    at most, a power of two. SECOND: 0, 8 or 16 older records that have memory beside the newest 16. EARLY: chunks of
    the state that have memory of their own: one is asked for before the wait, the others behind the window's inputs, or
    AT_ONCE all before the wait. More, up to BUFFERS, come once pending records are used, the rest in place of the
    first. PRODUCTS: pairs of tokens by ``pair_products``.
    """
    v_blocks: gl.constexpr = V // BV
    v_block = gl.program_id(0) % v_blocks
    head = gl.program_id(0) // v_blocks % H
    row = gl.program_id(0) // (v_blocks * H)
    channel = gl.arange(0, K, LINE)
    o_v = v_block * BV + gl.arange(0, BV, LINE)
    ACTIVATION: gl.constexpr = p_key_gate.dtype.element_ty
    if is_chained == 0:
        gdc_wait()
    if row == num_rows:
        gdc_wait()
        first_free = gl.load(p_starts + num_rows)
        clear_tokens(out, out_stride, out_is_wide != 0, first_free, num_tokens, head * V + o_v, ACTIVATION)
        return

    p_row = p_rows + row * ROW_COLUMNS
    slot = gl.load(p_row + CHECKPOINT_SLOT)
    record_row = gl.load(p_row + RECORD_ROW)
    first_token = gl.load(p_row + FIRST_TOKEN)
    query_len = gl.load(p_row + QUERY_LEN)
    checkpoint_len = gl.load(p_row + CHECKPOINT_LEN)
    pending = gl.load(p_row + PENDING_LEN)
    if (slot <= 0) | (record_row < 0):
        gdc_wait()
        last_token = first_token + query_len
        clear_tokens(out, out_stride, out_is_wide != 0, first_token, last_token, head * V + o_v, ACTIVATION)
        return
    if query_len == 0:
        return
    first_token = first_token.to(gl.int64)

    # -- everything that is asked of memory, in the order in which it is needed

    STATE: gl.constexpr = d_state.dtype
    CHUNK: gl.constexpr = d_state.block_shape[2]  # channels
    CHUNKS: gl.constexpr = K // CHUNK
    s_arrived = gl.allocate_shared_memory(gl.int64, [CHUNKS, 1], mbarrier.MBarrierLayout())
    for c in gl.static_range(CHUNKS):
        mbarrier.init(s_arrived.index(c), count=1)
    for c in gl.static_range(CHUNKS):
        mbarrier.expect(s_arrived.index(c), BV * CHUNK * itemsize(STATE))
    s_chunks = ()
    for _ in gl.static_range(EARLY):
        s_chunks = s_chunks + (gl.allocate_shared_memory(STATE, [1, BV, CHUNK], d_state.layout),)
    v_row = head * V + v_block * BV

    head_row = record_row.to(gl.int64) * H + head
    p_u += head_row * (R * V) + v_block * BV
    p_key_gate += head_row * (R * 2 * K)
    p_inv_norm += head_row * R
    entry = checkpoint_len % R
    U_LAYOUT: gl.constexpr = ROWS if FOLDS else gl.SwizzledSharedLayout(8, 1, 4, [1, 0])
    TILES: gl.constexpr = 1 if SECOND == 0 else 2
    # The older tile comes first. A product takes sixteen records: if it has eight, it is read with the newer one's
    # first eight, which meet zeros. So a view may reach beyond its block.
    s_u_blocks = gl.allocate_shared_memory(gl.float32, [(PENDING_TILE + SECOND) // 8, 8, BV], U_LAYOUT)
    s_u = ()
    s_records = ()
    for tile in gl.static_range(TILES):
        s_records = s_records + (
            gl.allocate_shared_memory(ACTIVATION, [SECOND if tile else PENDING_TILE, 2 * K], ROWS),
        )
        s_block = s_u_blocks.index(0 if tile else SECOND // 8)
        s_u = s_u + (s_block._reinterpret(gl.float32, [PENDING_TILE, BV], U_LAYOUT),)
        if pending > tile * PENDING_TILE:
            s_rows = s_block._reinterpret(gl.float32, [SECOND if tile else PENDING_TILE, BV], U_LAYOUT)
            fetch_pending(s_records[tile], s_rows, p_key_gate, p_u, entry, pending - tile * PENDING_TILE, V, R)
    if FOLDS:
        if CAPACITY > PENDING_TILE:
            s_fold_records = gl.allocate_shared_memory(ACTIVATION, [CAPACITY, 2 * K], ROWS)
            s_fold_u = gl.allocate_shared_memory(gl.float32, [CAPACITY, BV], ROWS)
            fetch_ring(s_fold_records, p_key_gate, entry, pending - CAPACITY, R, 2 * K)
            fetch_ring(s_fold_u, p_u, entry, pending - CAPACITY, R, V)
    async_copy.commit_group()
    FIRST: gl.constexpr = EARLY if AT_ONCE else 1
    for c in gl.static_range(FIRST):
        tma.async_copy_global_to_shared(d_state, [slot, v_row, c * CHUNK], s_arrived.index(c), s_chunks[c])
    rate = gl.exp(gl.load(p_a_log + head).to(gl.float32)) * LOG2_E
    bias = gl.load(p_dt_bias + head * K + channel).to(gl.float32)
    bound = lower_bound * LOG2_E
    factor = decay_factor(rate, bound, BOUNDED)
    s_norms, s_factors = pending_factors(p_inv_norm, entry, pending, factor, SECOND, R)
    if FOLDS:
        if CAPACITY > PENDING_TILE:
            record = pending - CAPACITY + gl.arange(0, CAPACITY, LINE)
            s_fold_norms, s_fold_factors = record_factors(p_inv_norm, entry, record, factor, R)
    if W > 0:
        q_taps, q_bias = load_taps(p_weight, p_conv_bias, head * K, K, W, BIAS, WIDE_TAPS)
        k_taps, k_bias = load_taps(p_weight, p_conv_bias, (H + head) * K, K, W, BIAS, WIDE_TAPS)
        v_taps, v_bias = load_taps(p_weight, p_conv_bias, 2 * H * K + v_row, BV, W, BIAS, WIDE_TAPS)
        C: gl.constexpr = H * (2 * K + V)
        RING: gl.constexpr = W - 1 + T
        p_ring += record_row.to(gl.int64) * (RING * C)
        p_ring_q = p_ring + head * K
        p_ring_k = p_ring + (H + head) * K
        p_ring_v = p_ring + 2 * H * K + v_row
        oldest = (checkpoint_len + pending) % RING
        q_history = load_history(p_ring_q + channel, oldest, W, RING, C)
        k_history = load_history(p_ring_k + channel, oldest, W, RING, C)
        v_history = load_history(p_ring_v + gl.arange(0, BV, LINE), oldest, W, RING, C)

    if AT_ONCE and not FOLDS:
        async_copy.wait_group(0)
        barrier()
        later = early_keys(s_records, s_norms, s_factors, pending, bias, rate, BOUNDED)
    gdc_wait()
    gdc_launch_dependents()

    WINDOW: gl.constexpr = window_rows(T)
    VECTOR: gl.constexpr = 16 // itemsize(p_qkv.dtype.element_ty)
    GATE_VECTOR: gl.constexpr = 16 // itemsize(p_gate.dtype.element_ty)
    last = query_len - 1
    p_window = p_qkv + first_token * (qkv_stride * VECTOR)
    p_v = p_window + 2 * H * K + v_row
    s_gate = fetch_rows(
        p_gate + first_token * (gate_stride * GATE_VECTOR) + head * K, gate_stride * GATE_VECTOR, last, WINDOW, K
    )
    s_key = fetch_rows(p_window + (H + head) * K, qkv_stride * VECTOR, last, WINDOW, K)
    s_query = fetch_rows(p_window + head * K, qkv_stride * VECTOR, last, WINDOW, K)
    s_value = fetch_rows(p_v, qkv_stride * VECTOR, last, WINDOW, BV)
    async_copy.commit_group()
    o_t = gl.arange(0, WINDOW, LINE)
    o_beta = (first_token + gl.minimum(o_t, last)) * beta_stride + head
    raw_beta = load_beta(beta, o_beta, beta_is_wide != 0, ACTIVATION)
    if not AT_ONCE and not FOLDS:
        async_copy.wait_group(1)
        barrier()
        later = early_keys(s_records, s_norms, s_factors, pending, bias, rate, BOUNDED)
    async_copy.wait_group(0)
    barrier()
    # Not before: what is small, of this program and of the others, would wait behind it.
    for c in gl.static_range(FIRST, EARLY):
        tma.async_copy_global_to_shared(d_state, [slot, v_row, c * CHUNK], s_arrived.index(c), s_chunks[c])

    # -- key side, a thread a channel

    newest = wrapped(entry + pending, R)
    if W > 0:
        keys = convolved(k_history, s_key, k_taps, k_bias, T, W)
        queries = convolved(q_history, s_query, q_taps, q_bias, T, W)
        values = convolved(v_history, s_value, v_taps, v_bias, T, W)
        s_new_key = shared_rows(keys, ACTIVATION)
        store_rows(p_ring_v, s_value, oldest + W - 1, query_len, RING, C)
        if v_block == 0:
            store_rows(p_ring_k, s_key, oldest + W - 1, query_len, RING, C)
            store_rows(p_ring_q, s_query, oldest + W - 1, query_len, RING, C)
        if FOLDS:
            if pending > 0:
                p_history = p_conv + slot.to(gl.int64) * conv_slot_stride
                o_c = 2 * H * K + head * V + o_v
                store_history(p_history, v_history, o_c, conv_channel_stride, conv_token_stride, W)
                if v_block == 0:
                    o_q = head * K + channel
                    store_history(p_history, q_history, o_q, conv_channel_stride, conv_token_stride, W)
                    store_history(p_history, k_history, o_q + H * K, conv_channel_stride, conv_token_stride, W)
    else:
        keys = rows_of(s_key, T)
        queries = rows_of(s_query, T)
        values = rows_of(s_value, T)
        s_new_key = s_key
    if v_block == 0:
        store_rows(p_key_gate, s_new_key, newest, query_len, R, 2 * K)
        store_rows(p_key_gate + K, s_gate, newest, query_len, R, 2 * K)
    # Behind the window its last token is repeated: what that gives stays in columns that nobody reads.
    decays = ()
    for t in gl.static_range(T):
        raw = row_of(s_gate, t).to(ACTIVATION).to(gl.float32)
        decays = decays + (exp2(log2_decay(raw, bias, rate, bound, BOUNDED)),)
    s_strength = gl.allocate_shared_memory(gl.float32, [WINDOW], FLAT, reciprocal(1.0 + exp2(-LOG2_E * raw_beta)))
    s_new_norms = vector_norms(keys, queries, T)
    if v_block == 0:
        o_new = gl.arange(0, 16, LINE)
        gl.store(p_inv_norm + wrapped(newest + o_new, R), s_new_norms[0].load(LINE), mask=o_new < query_len)
    if not PRODUCTS:
        s_pairs = pair_sums(keys, queries, decays, T)

    # -- F = [k_t | q_t] e^{c_t}, and what is pending

    COLUMNS: gl.constexpr = num_columns(T)
    f = window_matrix(keys, queries, decays, T, COLUMNS)
    product = gl.zeros([BV, COLUMNS], gl.float32, PRODUCT)
    low = gl.zeros([BV, COLUMNS], gl.float32, PRODUCT)
    if FOLDS:
        later = gl.zeros([K], gl.float32, LINE)
    by_warp = gl.reshape(stacked(f, COLUMNS), [WARPS, 32, COLUMNS])
    s_by_warp = gl.allocate_shared_memory(gl.float32, by_warp.shape, BY_WARP_CHANNEL, by_warp)
    f_high, f_low = rounded_parts(s_by_warp.permute([0, 2, 1]).load(gl.DotOperandLayout(0, BY_WARP, 1)))
    if PRODUCTS:
        s_pairs = pair_products(keys, decays, f_high, f_low, T, COLUMNS)
    for tile in gl.static_range(TILES):
        if pending > tile * PENDING_TILE:
            if FOLDS:
                # The fold needs the records as they are, so these keys get memory of their own.
                decayed, later = pending_keys(
                    s_records[tile], s_norms, s_factors, tile, pending, later, bias, rate, BOUNDED
                )
                s_keys = gl.allocate_shared_memory(gl.float32, decayed.shape, BY_WARP_CHANNEL, decayed)
            else:
                s_keys = key_tile(s_records[tile])
            product, low = add_pending(product, low, s_keys, s_u[tile], f_high, f_low, COLUMNS)
    if R > 2 * PENDING_TILE:  # tiles that had no memory so far
        for turn in range(TILES, (pending + PENDING_TILE - 1) // PENDING_TILE):
            older = pending - turn * PENDING_TILE
            barrier()
            fetch_pending(s_records[0], s_u[0], p_key_gate, p_u, entry, older, V, R)
            async_copy.commit_group()
            s_older_norms, s_older_factors = pending_factors(p_inv_norm, entry, older, factor, 0, R)
            async_copy.wait_group(0)
            barrier()
            decayed, later = pending_keys(
                s_records[0], s_older_norms, s_older_factors, 0, older, later, bias, rate, BOUNDED
            )
            barrier()
            s_keys = key_tile(s_records[0])
            s_keys.store(decayed)
            product, low = add_pending(product, low, s_keys, s_u[0], f_high, f_low, COLUMNS)
    if FOLDS:
        if CAPACITY <= PENDING_TILE:
            s_fold_records = s_records[0]
            s_fold_u = s_u[0]
            s_fold_norms = s_norms
            s_fold_factors = s_factors
        fold_decay = decayed_keys(s_fold_records, s_fold_norms, s_fold_factors, pending, bias, rate, BOUNDED)
        s_decay = gl.allocate_shared_memory(gl.float32, [K], FLAT, fold_decay)
    if EARLY < BUFFERS:  # into the memory of the pending records
        barrier()
        fence_async_shared()
        for c in gl.static_range(EARLY, BUFFERS):
            s_chunks = s_chunks + (gl.allocate_shared_memory(STATE, [1, BV, CHUNK], d_state.layout),)
            tma.async_copy_global_to_shared(d_state, [slot, v_row, c * CHUNK], s_arrived.index(c), s_chunks[c])
    matrix = stacked(scaled(f, whole_exp2(later)), COLUMNS)
    if itemsize(STATE) == 4:
        s_f = gl.allocate_shared_memory(gl.float32, [K, COLUMNS], BY_CHANNEL, matrix)
    else:
        s_f = shared_parts(matrix)

    # -- the state's part, as it arrives

    for c in gl.static_range(CHUNKS):
        mbarrier.wait(s_arrived.index(c), 0)
        s_state = s_chunks[c % BUFFERS]._reinterpret(
            STATE, [BV, CHUNK], gl.NVMMASharedLayout(CHUNK * itemsize(STATE), 8 * itemsize(STATE), 2)
        )
        if FOLDS:
            if pending > 0:
                p_chunk = p_state + slot.to(gl.int64) * slot_stride + v_row * K + c * CHUNK
                fold_chunk(s_state, s_decay, s_fold_records, s_fold_u, p_chunk, c, pending, key_step(ACTIVATION))
        if itemsize(STATE) == 4:
            product, low = add_state32(product, low, s_state, s_f.slice(c * CHUNK, CHUNK))
        else:
            product, low = add_state16(product, low, s_state, s_f, c * CHUNK)
        if c + BUFFERS < CHUNKS:  # its buffer takes another chunk
            barrier()
            fence_async_shared()
            tma.async_copy_global_to_shared(
                d_state, [slot, v_row, (c + BUFFERS) * CHUNK], s_arrived.index(c + BUFFERS), s_chunks[c % BUFFERS]
            )

    corrections, outputs = substituted(product + low, values, s_strength, s_pairs, s_new_norms, T, COLUMNS, PRODUCTS)
    s_corrections = shared_rows(corrections, gl.float32)
    s_outputs = shared_rows(outputs, gl.float32)
    store_rows(p_u, s_corrections, newest, query_len, R, V)
    item = gl.where(out_is_wide != 0, 4, itemsize(ACTIVATION))
    first_output = out + first_token * (out_stride * 16) + v_row * item
    store_outputs(first_output, out_stride, out_is_wide != 0, s_outputs, query_len, ACTIVATION)
