"""What the Gluon kernels for Hopper share: the gate, sums over channels, tuples of vectors as matrices, the fold.

A program has four warps, and K = 128: one thread a channel. Names as in triton_common: o_ offsets, m_ masks,
p_ pointers, s_ shared memory; a tuple holds one vector a token.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy

from specstate.kernels import hopper_constants

#: Waits for all threads of a program; triton 3.7 has given it another name.
barrier = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier

#: Channels of a key, and threads of a program.
K = gl.constexpr(128)
WARPS = gl.constexpr(4)
LOG2_E = gl.constexpr(1.4426950408889634)

#: Records that a fold adds at a time, so that their loads overlap; a part of a GROUP.
UNROLL = gl.constexpr(4)

#: Records whose keys are decayed together, and then lie side by side where the first of them lay.
GROUP = gl.constexpr(hopper_constants.KEY_GROUP)

#: A thread a channel, or a row of V.
LINE = gl.constexpr(gl.BlockedLayout([1], [32], [4], [0]))
FLAT = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [0]))
ROWS = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))


@gluon.jit
def exp2(x):
    """2^x by the special function unit, 2 units in the last place; denormal results are 0."""
    return gl.inline_asm_elementwise("ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1)


@gluon.jit
def whole_exp2(x):
    """2^x for x <= 0, within one unit in the last place: for what multiplies a whole state, fold after fold.

    2^x = 2^i 2^f with i the nearest integer: 2^i is exact, 2^f by its Taylor series, whose next term is below 6e-9.
    """
    x = gl.where(x < -150.0, -150.0, x)  # below are zeros; infinity has no fraction, and NaN stays
    i = (x + 12582912.0) - 12582912.0  # 1.5 * 2^23: the sum has no fraction
    f = x - i
    y = 1.5252733804059841e-05
    y = y * f + 0.00015403530393381608
    y = y * f + 0.0013333558146428443
    y = y * f + 0.009618129107628477
    y = y * f + 0.05550410866482158
    y = y * f + 0.2402265069591007
    y = y * f + 0.6931471805599453
    return (y * f + 1.0) * exp2(i)


@gluon.jit
def reciprocal(x):
    """1/x where both are normal numbers, within one unit in the last place."""
    return gl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1)


@gluon.jit
def unit_decay(raw, bias, rate, BOUNDED: gl.constexpr):
    """g of ``log_decay`` of the reference over its factor: a sigmoid with a lower bound, else a softplus.

    rate = e^A_log, in units of log2 e; finite even for an infinite gate.
    """
    x = raw + bias
    if BOUNDED:
        return reciprocal(1.0 + exp2(-rate * x))
    # The softplus of triton_common: its log1p by an atanh series.
    y = exp2(-gl.abs(x) * LOG2_E)
    z = y * reciprocal(2.0 + y)
    s = z * z
    series = 1.0 + s * (1 / 3 + s * (1 / 5 + s * (1 / 7 + s * (1 / 9 + s * (1 / 11 + s * (1 / 13 + s * (1 / 15)))))))
    return gl.minimum(gl.maximum(x, 0.0), 3e38) + 2.0 * z * series


@gluon.jit
def decay_factor(rate, lower_bound, BOUNDED: gl.constexpr):
    """What ``unit_decay`` is multiplied by to give log2 of a decay; rate and lower_bound in units of log2 e."""
    if BOUNDED:
        factor = lower_bound
    else:
        factor = -rate
    return factor


@gluon.jit
def log2_decay(raw, bias, rate, lower_bound, BOUNDED: gl.constexpr):
    """g of ``log_decay`` of the reference, times log2 e; rate = e^A_log and lower_bound both in units of log2 e."""
    return decay_factor(rate, lower_bound, BOUNDED) * unit_decay(raw, bias, rate, BOUNDED)


@gluon.jit
def wrapped(entry, SIZE: gl.constexpr):
    """A ring entry below 2 SIZE, brought below SIZE."""
    return gl.where(entry >= SIZE, entry - SIZE, entry)


@gluon.jit
def truncated_parts(x):
    """x as a sum of two numbers that tf32 products take: its first 11 bits, and the rest."""
    high = (x.to(gl.int32, bitcast=True) & -8192).to(gl.float32, bitcast=True)
    return high, x - high


@gluon.jit
def rounded_parts(x):
    """The same with the first part rounded to nearest, so that the rest has either sign.

    One side of a product must be rounded: what three products leave out, rest times rest, would else always shrink it.
    """
    high = ((x.to(gl.int32, bitcast=True) + 4096) & -8192).to(gl.float32, bitcast=True)
    return high, x - high


# -- tiles of global memory, by 16-byte copies


@gluon.constexpr_function
def tile_layout(columns, itemsize):
    """16 bytes a thread of a [rows, columns] tile; consecutive threads side by side."""
    vector = 16 // itemsize
    across = min(32, columns // vector)
    return gl.BlockedLayout([1, vector], [32 // across, across], [4, 1], [1, 0])


@gluon.constexpr_function
def itemsize(dtype):
    return dtype.primitive_bitwidth // 8


@gluon.jit
def fetch_rows(p_first, stride, last, NUM_ROWS: gl.constexpr, COLUMNS: gl.constexpr):
    """Starts copying rows [COLUMNS], ``stride`` apart, to shared memory. Rows behind ``last`` repeat it: no mask."""
    LAYOUT: gl.constexpr = tile_layout(COLUMNS, itemsize(p_first.dtype.element_ty))
    o_row = gl.arange(0, NUM_ROWS, gl.SliceLayout(1, LAYOUT))
    o_column = gl.arange(0, COLUMNS, gl.SliceLayout(0, LAYOUT))
    s_tile = gl.allocate_shared_memory(p_first.dtype.element_ty, [NUM_ROWS, COLUMNS], ROWS)
    p_tile = p_first + (gl.minimum(o_row, last) * stride)[:, None] + o_column[None, :]
    async_copy.async_copy_global_to_shared(s_tile, p_tile)
    return s_tile


@gluon.jit
def fetch_ring(s_tile, p_ring, start, first, SIZE: gl.constexpr, STRIDE: gl.constexpr):
    """Starts copying entries first, first + 1, .. of those that begin at ``start`` in a ring of SIZE, STRIDE apart.

    Into all rows of s_tile; before entry 0 stands entry 0.
    """
    LAYOUT: gl.constexpr = tile_layout(s_tile.shape[1], itemsize(s_tile.dtype))
    o_row = gl.arange(0, s_tile.shape[0], gl.SliceLayout(1, LAYOUT))
    o_column = gl.arange(0, s_tile.shape[1], gl.SliceLayout(0, LAYOUT))
    entry = wrapped(start + gl.maximum(first + o_row, 0), SIZE)
    async_copy.async_copy_global_to_shared(s_tile, p_ring + (entry * STRIDE)[:, None] + o_column[None, :])


@gluon.jit
def row_of(s_tile, row):
    """One row of a tile [rows, columns], a value a thread, in float32."""
    s_rows = s_tile._reinterpret(s_tile.dtype, s_tile.shape, FLAT)
    return s_rows.index(row).load(LINE).to(gl.float32)


# -- tuples of vectors and matrices


@gluon.jit
def stacked(vectors, COUNT: gl.constexpr):
    """COUNT vectors [N] as [N, COUNT]; COUNT a power of two, at least 8. Costs nothing: a thread keeps what it has."""
    SIZE: gl.constexpr = vectors[0].shape[0]
    pairs = ()
    for i in gl.static_range(COUNT // 2):
        pairs = pairs + (gl.join(vectors[i], vectors[i + COUNT // 2]),)
    fours = ()
    for i in gl.static_range(COUNT // 4):
        fours = fours + (gl.join(pairs[i], pairs[i + COUNT // 4]),)
    joined = ()
    for i in gl.static_range(COUNT // 8):
        joined = joined + (gl.join(fours[i], fours[i + COUNT // 8]),)
    if COUNT >= 16:
        eights = joined
        joined = ()
        for i in gl.static_range(COUNT // 16):
            joined = joined + (gl.join(eights[i], eights[i + COUNT // 16]),)
    if COUNT == 32:
        joined = (gl.join(joined[0], joined[1]),)
    return gl.reshape(joined[0], [SIZE, COUNT])


@gluon.jit
def padded(vectors, LENGTH: gl.constexpr, SIZE: gl.constexpr = K):
    """Zeros [SIZE] behind a tuple of vectors, up to LENGTH."""
    zero = gl.zeros([SIZE], gl.float32, LINE)
    for _ in gl.static_range(LENGTH - len(vectors)):
        vectors = vectors + (zero,)
    return vectors


@gluon.jit
def shared_rows(vectors, DTYPE: gl.constexpr):
    """Vectors as rows of a tile in shared memory, 8 or 16 of them; those behind the last are zero."""
    NUM_ROWS: gl.constexpr = 8 if len(vectors) <= 8 else 16
    SIZE: gl.constexpr = vectors[0].shape[0]
    s_tile = gl.allocate_shared_memory(DTYPE, [NUM_ROWS, SIZE], ROWS)
    # In one store: several into parts of one allocation would wait for each other.
    s_tile.permute([1, 0]).store(stacked(padded(vectors, NUM_ROWS, SIZE), NUM_ROWS).to(DTYPE))
    return s_tile


@gluon.jit
def channel_sums(vectors):
    """9 to 16 vectors [K], each summed over the channels: [16]."""
    tile = shared_rows(vectors, gl.float32).load(gl.BlockedLayout([1, 4], [4, 8], [4, 1], [1, 0]))
    return gl.sum(tile, 1)


@gluon.jit
def _split(matrices, COUNT: gl.constexpr):
    first = ()
    second = ()
    for i in gl.static_range(COUNT):
        a, b = gl.split(matrices[i])
        first = first + (a,)
        second = second + (b,)
    return first + second


@gluon.constexpr_function
def bits_of(count):
    """log2 of a power of two."""
    return count.bit_length() - 1


@gluon.jit
def columns_of(matrix, COUNT: gl.constexpr):
    """[N, COUNT], a row a thread -> COUNT vectors [N] in LINE; COUNT a power of two."""
    parts = (gl.reshape(matrix, [matrix.shape[0]] + [2] * bits_of(COUNT)),)
    for level in gl.static_range(bits_of(COUNT)):
        parts = _split(parts, 1 << level)
    vectors = ()
    for i in gl.static_range(COUNT):
        vectors = vectors + (gl.convert_layout(parts[i], LINE),)
    return vectors


# -- the fold


@gluon.constexpr_function
def key_step(dtype):
    """Lines [K] in float32 that a record in ``dtype`` takes."""
    return itemsize(dtype) // 2


@gluon.jit
def record_factors(p_inv_norm, entry, record, factor, R: gl.constexpr):
    """1/|k| of records, numbered from ring ``entry`` on, and what their unit decays are multiplied by: in shared
    memory, and 0 before record 0, so that such a record adds nothing.
    """
    exists = record >= 0
    norms = gl.load(p_inv_norm + wrapped(entry + gl.maximum(record, 0), R))
    s_norms = gl.allocate_shared_memory(gl.float32, record.shape, FLAT, gl.where(exists, norms, 0.0))
    s_factors = gl.allocate_shared_memory(gl.float32, record.shape, FLAT, gl.where(exists, factor, 0.0))
    return s_norms, s_factors


@gluon.jit
def scalars(s_values, COUNT: gl.constexpr):
    """COUNT numbers in shared memory, a power of two, as a tuple of [1], to be broadcast."""
    EVERYWHERE: gl.constexpr = gl.BlockedLayout([1, COUNT], [32, 1], [WARPS, 1], [1, 0])
    return columns_of(s_values._reinterpret(gl.float32, [1, COUNT], ROWS).load(EVERYWHERE), COUNT)


@gluon.jit
def group_keys(s_records, s_norms, s_factors, group, later, bias, rate, BOUNDED: gl.constexpr):
    """Normalised keys of a group of records, decayed to the end of the newest: a tuple of vectors, the oldest first.

    s_records [records, 2 K]; s_norms and s_factors [records] as ``record_factors`` gives them. ``later``: the gates of
    all records behind the group, in units of log2; it returns with the group's.
    """
    LENGTH: gl.constexpr = s_records.shape[0]
    s_halves = s_records._reinterpret(s_records.dtype, [2 * LENGTH, K], FLAT)
    norms = scalars(s_norms._reinterpret(gl.float32, [LENGTH // GROUP, GROUP], FLAT).index(group), GROUP)
    factors = scalars(s_factors._reinterpret(gl.float32, [LENGTH // GROUP, GROUP], FLAT).index(group), GROUP)
    keys = ()
    for i in gl.static_range(GROUP - 1, -1, -1):
        key = s_halves.index(2 * (group * GROUP + i)).load(LINE).to(gl.float32)
        raw = s_halves.index(2 * (group * GROUP + i) + 1).load(LINE).to(gl.float32)
        keys = (key * (exp2(later) * norms[i]),) + keys
        later = later + factors[i] * unit_decay(raw, bias, rate, BOUNDED)
    return keys, later


@gluon.jit
def decayed_keys(s_records, s_norms, s_factors, count, bias, rate, BOUNDED: gl.constexpr):
    """k_j e^{G_m - G_j} of the last ``count`` rows of a tile of records; the decay over all of them, [K].

    The newest record is in the last row. Keys, K columns in float32, take the place of their records, each group in the
    first lines of its own: all threads read a group before any writes it. In the oldest group, rows before the oldest
    record become zero.

    Gates are added and exponentiated once: a product of many decays would carry the error of each, and a state that
    decays slowly gathers those of all its folds.
    """
    STEP: gl.constexpr = key_step(s_records.dtype)
    GROUPS: gl.constexpr = s_records.shape[0] // GROUP
    s_groups = s_records._reinterpret(gl.float32, [GROUPS * STEP, GROUP, K], ROWS)
    later = gl.zeros([K], gl.float32, LINE)
    for turn in range((count + GROUP - 1) // GROUP):
        group = GROUPS - 1 - turn
        keys, later = group_keys(s_records, s_norms, s_factors, group, later, bias, rate, BOUNDED)
        barrier()
        # In one store: several into parts of one allocation would wait for each other.
        s_groups.index(group * STEP).permute([1, 0]).store(stacked(keys, GROUP))
    return whole_exp2(later)


@gluon.jit
def folded(state, later, s_keys, key_part, s_u, u_part, count, STEP: gl.constexpr, LAYOUT: gl.constexpr):
    """S diag(later) + sum_j u_j k_j^T for a tile of S [rows, columns] in LAYOUT; later [columns]. All in float32.

    Keys as ``decayed_keys`` leaves them, s_u [records, rows of V] likewise with the newest last: the tile is their
    parts ``key_part`` and ``u_part``. The one fold routine: its order of additions, oldest first, gives the bits.
    """
    LENGTH: gl.constexpr = s_u.shape[0]
    KEY_PARTS: gl.constexpr = K // state.shape[1]
    U_PARTS: gl.constexpr = s_u.shape[1] // state.shape[0]
    s_key_parts = s_keys._reinterpret(gl.float32, [LENGTH * STEP * KEY_PARTS, state.shape[1]], FLAT)
    s_u_parts = s_u._reinterpret(gl.float32, [LENGTH * U_PARTS, state.shape[0]], FLAT)
    state = state * gl.expand_dims(later, 0)
    for first in range(LENGTH - (count + UNROLL - 1) // UNROLL * UNROLL, LENGTH, UNROLL):
        line = first + first // GROUP * (GROUP * (STEP - 1))
        for i in gl.static_range(UNROLL):
            key = s_key_parts.index((line + i) * KEY_PARTS + key_part).load(gl.SliceLayout(0, LAYOUT))
            u = s_u_parts.index((first + i) * U_PARTS + u_part).load(gl.SliceLayout(1, LAYOUT))
            state = state + gl.expand_dims(u, 1) * gl.expand_dims(key, 0)
    return state
