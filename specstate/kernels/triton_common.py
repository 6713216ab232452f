"""What all Triton kernels share: rounding, the gate, and how pending records are read and folded.

Names: b_ values in registers, o_ offsets, m_ masks, p_ pointers; shapes stand beside them.
"""

import triton
import triton.language as tl

# Records are read in tiles of this many, the least that a matrix product takes.
RECORD_TILE = 16


@triton.jit
def rounded(x, DTYPE: tl.constexpr):
    """float32 x rounded to DTYPE and back, to nearest even.

    bf16 by integers: the interpreter's own conversion truncates. What is stored afterwards is exact in DTYPE.
    """
    if tl.bfloat16 == DTYPE:
        bits = x.to(tl.int32, bitcast=True)
        # A carry would turn some NaNs into zeros, and a cut others into infinity: those get their quiet bit.
        bits = tl.where(x == x, bits + (0x7FFF + ((bits >> 16) & 1)), bits | 0x400000) & -65536
        x = bits.to(tl.float32, bitcast=True)
    elif tl.float16 == DTYPE:
        x = x.to(tl.float16).to(tl.float32)
    return x


@triton.jit
def log_decay(raw, bias, rate, lower_bound, BOUNDED: tl.constexpr):
    """g <= 0 from the raw gate, as ``log_decay`` of the reference; rate = exp(A_log)."""
    x = raw + bias
    if BOUNDED:
        return lower_bound / (1.0 + tl.exp(-rate * x))
    # softplus(x) = max(x, 0) + log1p(y), y = e^-|x|. log1p by its atanh series: z <= 1/3, so that eight terms reach
    # float32, also for small y, where log(1 + y) would lose what makes a slow decay slow.
    y = tl.exp(-tl.abs(x))
    z = y / (2.0 + y)
    s = z * z
    series = 1.0 + s * (1 / 3 + s * (1 / 5 + s * (1 / 7 + s * (1 / 9 + s * (1 / 11 + s * (1 / 13 + s * (1 / 15)))))))
    return -rate * (tl.maximum(x, 0.0) + 2.0 * z * series)


@triton.jit
def inverse_norm(sum_of_squares):
    """1/|x| with 1e-6 under the root, correctly rounded: the approximate root costs a tenth of the error budget."""
    return tl.div_rn(1.0, tl.sqrt_rn(sum_of_squares + 1e-6))


@triton.jit
def num_record_tiles(count):
    """Tiles that cover ``count`` records and the gap before them; 0 without records."""
    return tl.where(count > 0, count // 16 + 1, 0)


@triton.jit
def record_tile(
    tile,
    count,
    first_entry,
    p_key_gate,
    p_inv_norm,
    b_bias,
    b_rate,
    lower_bound,
    b_later,
    o_k,
    R,
    K: tl.constexpr,
    BOUNDED: tl.constexpr,
):
    """Records count - 16 (tile + 1) .. count - 16 tile of a ring: newest tile first.

    b_later [BK]: gates of the records behind this tile, less the first of them. Returns ring entries [16], their
    mask [16], keys normalised and decayed to the newest record's end [16, BK], and b_later for the next older tile;
    behind the last tile it is the sum of all gates.

    Gates are added one record after another, newest first. A scan over the tile would be shorter, but its order follows
    the layout that the compiler chose for the kernel at hand, and a fold inside verify must give the bits of any other
    fold. The gate of record j + 1 is added, not that of j: a sum that includes the own gate would have to be reduced by
    it, and cancels. The oldest tile starts before record 0, so every gate is met.
    """
    first = count - 16 * (tile + 1)
    o_i = tl.arange(0, 16)
    m_j = first + o_i >= 0
    entry = (first_entry + tl.maximum(first + o_i, 0)) % R
    m_k = o_k < K
    m_jk = m_j[:, None] & m_k[None, :]
    b_key = tl.load(p_key_gate + entry[:, None] * (2 * K) + o_k[None, :], mask=m_jk, other=0.0).to(tl.float32)
    b_inv = tl.load(p_inv_norm + entry, mask=m_j, other=0.0)

    b_sum = tl.zeros_like(b_key)  # [16, BK]: the gates of all newer records
    for newer in range(16):  # not unrolled: 16 loads in flight would spill
        i = 15 - newer
        o_next = first + i + 1
        m_next = m_k & (o_next >= 0) & (o_next < count)
        p_gate = p_key_gate + (first_entry + tl.maximum(o_next, 0)) % R * (2 * K) + K
        b_raw = tl.load(p_gate + o_k, mask=m_next, other=0.0).to(tl.float32)
        b_later += tl.where(m_next, log_decay(b_raw, b_bias, b_rate, lower_bound, BOUNDED), 0.0)
        b_sum = tl.where((o_i == i)[:, None], b_later[None, :], b_sum)
    return entry, m_j, b_key * b_inv[:, None] * tl.exp(b_sum), b_later


@triton.jit
def fold_records(
    b_state,
    count,
    first_entry,
    p_u,
    p_key_gate,
    p_inv_norm,
    b_bias,
    b_rate,
    lower_bound,
    o_v,
    o_k,
    R,
    K: tl.constexpr,
    V: tl.constexpr,
    BOUNDED: tl.constexpr,
):
    """The one fold routine: S_0 diag(e^{G_m}) + sum_j u_j (k_j e^{G_m - G_j})^T for a tile of S_0 [BV, BK].

    Commit, flush and the next verify all come through here, so that they give the same bits. Products are plain
    float32: what tensor cores truncate here would stay in the state.
    """
    b_later = tl.zeros_like(b_bias)
    b_sum = tl.zeros_like(b_state)
    for tile in range(num_record_tiles(count)):
        entry, m_j, b_key, b_later = record_tile(
            tile, count, first_entry, p_key_gate, p_inv_norm, b_bias, b_rate, lower_bound, b_later, o_k, R, K, BOUNDED
        )
        m_vj = (o_v < V)[:, None] & m_j[None, :]
        b_u = tl.load(p_u + entry[None, :] * V + o_v[:, None], mask=m_vj, other=0.0)  # [BV, 16]
        b_sum += tl.dot(b_u, b_key, input_precision="ieee")
    return b_state * tl.exp(b_later)[None, :] + b_sum
