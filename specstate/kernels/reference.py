"""The reference: every kernel in plain torch, in the order of the mathematics. The oracle of all other backends.

Vectorised over rows and heads; a window is walked token by token, as the recurrence is written:

    g = -exp(A_log) softplus(x + dt_bias)        or   lower_bound sigmoid(exp(A_log) (x + dt_bias))
    S' = S diag(exp g);  u = b (v - S' k);  S <- S' + u k^T;  o = S q

with q and k normalised, q scaled by K^-1/2, b = sigmoid(raw beta) (Kimi Linear, arXiv 2510.26692, section 3; the
bounded gate is Kimi K3's). Everything is computed in float32, or float64 with float64 checkpoints, from values that
were rounded to the activation dtype first: what a verify uses and what a fold reads later are the same numbers.

Nothing here waits for the device. On a CPU, where looking at a value is free, rows without work are left out.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F

from specstate.kernels import rows as at
from specstate.params import LayerParams
from specstate.storage import LayerStorage

#: Added to |k|^2 and |q|^2 before the root (design of the layer; fla-core's l2norm uses the same).
NORM_EPS = 1e-6


class Window(NamedTuple):
    """Where the tokens of a step lie; fixed when the step begins, the same for every layer."""

    token_row: torch.Tensor  # [tokens] int64, row of each token; for tokens of no row: any, see token_live
    token_offset: torch.Tensor  # [tokens] int64, place inside its window
    token_live: torch.Tensor  # [tokens] bool, False for padding
    gather: torch.Tensor  # [rows, length] int64, token of each window entry; entries past query_len repeat a real one
    length: int  # longest window of the step


class StepTensors(NamedTuple):
    """A step's own device copy of its rows, and what attention and own kernels read."""

    rows: torch.Tensor  # [rows, ROW_COLUMNS] int32
    query_start_loc: torch.Tensor  # [rows + 1] int32
    positions: torch.Tensor  # [tokens] int32
    committed_lens: torch.Tensor  # [rows] int32
    window: Window


class Records(NamedTuple):
    """Pending records of some rows, oldest first; entries past a row's length are zero."""

    u: torch.Tensor  # [rows, H, m, V]
    key: torch.Tensor  # [rows, H, m, K]
    gate: torch.Tensor  # [rows, H, m, K] raw
    lens: torch.Tensor  # [rows] int64


def log_decay(raw_gate: torch.Tensor, params: LayerParams, lower_bound: float | None) -> torch.Tensor:
    """g [..., H, K] <= 0 from the raw gate [..., H, K]; the one gate function of verify and fold."""
    rate = params.A_log.to(raw_gate.dtype).exp()[:, None]
    x = raw_gate + params.dt_bias.to(raw_gate.dtype)
    # Softplus and sigmoid spelled out: torch's own differ in the last bit with an element's place in the tensor, and a
    # fold must give the same bits whichever rows it shares a batch with.
    if lower_bound is None:
        return -rate * (x.clamp(min=0.0) + (-x.abs()).exp().log1p())
    return lower_bound / (1.0 + (-rate * x).exp())


def inverse_norm(vectors: torch.Tensor) -> torch.Tensor:
    """1/|x| [...] of x [..., K], with NORM_EPS under the root."""
    return (vectors.square().sum(-1) + NORM_EPS).rsqrt()


def begin(
    staged: torch.Tensor,
    query_start_loc: torch.Tensor,
    tokens: int,
    length: int,
    cursors: torch.Tensor,
    *,
    folds_in_verify: bool,
) -> StepTensors:
    """The row-record kernel: joins the host's columns with the cursors.

    ``staged`` [rows, STAGED_COLUMNS] int32, ``query_start_loc`` [rows + 1] int32, ``tokens`` the padded token count,
    ``length`` the longest window.
    """
    rows = F.pad(staged, (0, at.ROW_COLUMNS - at.STAGED_COLUMNS))
    refresh(rows, cursors, folds_in_verify=folds_in_verify)
    committed = rows[:, at.CHECKPOINT_LEN] + rows[:, at.PENDING_LEN]

    token = torch.arange(tokens, dtype=torch.int32, device=rows.device)
    # Padded rows start and end at the real token count, so the first end beyond a token is that of its own row.
    row_of = torch.searchsorted(query_start_loc[1:], token, right=True)
    live = row_of < rows.shape[0]
    token_row = row_of.clamp(max=max(rows.shape[0] - 1, 0))
    if rows.shape[0] and tokens:
        offset = token - rows[token_row, at.FIRST_TOKEN]
        positions = torch.where(live, committed[token_row] + offset, 0)
    else:
        offset, positions = torch.zeros_like(token), torch.zeros_like(token)
    steps = torch.arange(length, dtype=torch.int32, device=rows.device)
    within = torch.minimum(steps, (rows[:, at.QUERY_LEN, None] - 1).clamp(min=0))
    gather = (rows[:, at.FIRST_TOKEN, None] + within).clamp(max=max(tokens - 1, 0))
    window = Window(token_row, offset.long(), live, gather.long(), length)
    return StepTensors(rows, query_start_loc, positions.to(torch.int32), committed, window)


def refresh(rows: torch.Tensor, cursors: torch.Tensor, *, folds_in_verify: bool) -> None:
    """Reads the cursors of live rows into ``rows``; null rows read as 0."""
    cursor = cursors[rows[:, at.RECORD_ROW].long()]
    live = live_rows(rows) & (cursor[:, at.CURSOR_GENERATION] == rows[:, at.GENERATION])
    pending = torch.where(live, cursor[:, at.CURSOR_PENDING_LEN], 0)
    rows[:, at.CHECKPOINT_LEN] = torch.where(live, cursor[:, at.CURSOR_CHECKPOINT_LEN], 0)
    rows[:, at.PENDING_LEN] = pending
    rows[:, at.FOLD_LEN] = pending if folds_in_verify else torch.zeros_like(pending)


def null_row(rows: torch.Tensor, row: int) -> None:
    """Makes ``row`` own nothing: later verifies write to scratch, its end changes nothing."""
    record = rows[row]
    record[at.CHECKPOINT_SLOT].zero_()
    record[at.RECORD_ROW].fill_(-1)
    record[at.CHECKPOINT_LEN :].zero_()


def verify(
    step: StepTensors,
    layer: LayerStorage,
    params: LayerParams,
    lower_bound: float | None,
    qkv: torch.Tensor,
    raw_gate: torch.Tensor,
    raw_beta: torch.Tensor,
    out: torch.Tensor,
) -> None:
    """One layer's window: writes records, conv inputs and ``out`` [tokens, H, V]; folds FOLD_LEN pending records.

    qkv [tokens, C] activation dtype, raw_gate [tokens, H, K], raw_beta [tokens, H].
    """
    rows, window = step.rows, step.window
    if not window.gather.numel():
        out.zero_()
        return
    heads, v_dim, k_dim = layer.recurrent.shape[1:]
    compute = layer.record_u.dtype
    mixed = _convolve(step, layer, params, qkv, compute)
    query, key, value = (
        x.unflatten(-1, (heads, -1)) for x in mixed.split([heads * k_dim, heads * k_dim, heads * v_dim], -1)
    )
    raw_gate = raw_gate.to(qkv.dtype)

    # The state at each window's first token, [rows, H, V, K].
    slots, folds = rows[:, at.CHECKPOINT_SLOT].long(), rows[:, at.FOLD_LEN] > 0
    state = layer.recurrent[slots].to(compute)
    records = read_records(layer, rows[:, at.RECORD_ROW], rows[:, at.CHECKPOINT_LEN], rows[:, at.PENDING_LEN])
    folded = fold_records(state, records, params, lower_bound)

    # The window's vectors, [rows, length, H, ..].
    q_unit, k_unit, value = query.to(compute), key.to(compute), value.to(compute)
    inv_norm = inverse_norm(k_unit)
    q_unit = q_unit * (inverse_norm(q_unit) * k_dim**-0.5)[..., None]
    k_unit = k_unit * inv_norm[..., None]
    decay = log_decay(raw_gate[window.gather].to(compute), params, lower_bound).exp()
    strength = torch.sigmoid(raw_beta[window.gather].to(compute))[..., None]

    # One token a round, with [1, .] a token and [rows * H] in front: S k and S q are row vectors times S^T, since torch
    # takes five times as long on a CPU for a product with one column.
    state, corrections, outputs = folded.flatten(0, 1).clone(), [], []
    vectors = (x.transpose(1, 2).flatten(0, 1).split(1, 1) for x in (decay, q_unit, k_unit, value, strength))
    for g, q, k, v, b in zip(*vectors, strict=True):
        state *= g
        u = b * (v - torch.bmm(k, state.mT))
        state.addcmul_(u.mT, k)
        corrections.append(u)
        outputs.append(torch.bmm(q, state.mT))

    def by_row(tokens: list[torch.Tensor]) -> torch.Tensor:
        return torch.cat(tokens, 1).unflatten(0, (-1, heads)).transpose(1, 2)

    u, o, key, inv_norm = (
        _by_token(window, x) for x in (by_row(corrections), by_row(outputs), key, inv_norm)
    )
    answered = (live_rows(rows)[window.token_row] & window.token_live)[:, None, None]
    out.copy_(torch.where(answered, o, 0.0))
    # All writes come last, the fold at the very end: a verify that fails on the way has folded nothing, so that the
    # step can be cancelled and the window verified again.
    if layer.conv_ring is not None:
        _write_conv_inputs(step, layer, qkv)
    _write_records(step, layer, u, key, raw_gate, inv_norm)
    if layer.conv is not None:
        _write_slots(layer.conv, slots, read_conv_history(layer, rows[:, at.RECORD_ROW], step.committed_lens), folds)
    _write_slots(layer.recurrent, slots, folded.to(layer.recurrent.dtype), folds)


def write_records(
    step: StepTensors,
    layer: LayerStorage,
    u: torch.Tensor,
    key: torch.Tensor,
    gate: torch.Tensor,
    conv_input: torch.Tensor | None,
) -> None:
    """Records of the caller's own verify: u [tokens, H, V], key, raw gate [tokens, H, K], conv_input [tokens, C]."""
    if not step.window.gather.numel():
        return
    if conv_input is not None:
        _write_conv_inputs(step, layer, conv_input)
    _write_records(step, layer, u, key, gate, inverse_norm(key.to(layer.record_u.dtype)))


def accepted_counts(
    rows: torch.Tensor,
    counts: torch.Tensor,
    finished: torch.Tensor | None,
    cursors: torch.Tensor,
    counters: torch.Tensor,
) -> torch.Tensor:
    """[rows] int32 of accepted tokens that ``advance`` may apply: clamped for live rows, 0 for all others.

    ``counts`` [rows] in row order. Counts clamps, rows of another generation, windows of finished requests; moves the
    finished flags to what ``finished`` [rows] bool says, on top of those that stay.
    """
    cursor_rows = rows[:, at.RECORD_ROW].long()
    cursor = cursors[cursor_rows]
    named = live_rows(rows)
    owned = named & (cursor[:, at.CURSOR_GENERATION] == rows[:, at.GENERATION])
    was_finished = finished_rows(rows, cursor)
    running = owned & ~was_finished
    bounded = torch.minimum(torch.maximum(counts, rows[:, at.MIN_ACCEPTED]), rows[:, at.QUERY_LEN])
    counters[at.COUNT_CLAMPS] += (running & (bounded != counts)).sum()
    counters[at.COUNT_DROPPED] += (named & ~owned).sum()
    counters[at.COUNT_WASTED] += (owned & ~running).sum()
    flags = was_finished if finished is None else was_finished | finished
    cursors[cursor_rows, at.CURSOR_FINISHED] = torch.where(owned, flags.int(), cursor[:, at.CURSOR_FINISHED])
    return torch.where(running, bounded, 0).to(torch.int32)


def advance(
    rows: torch.Tensor,
    accepted: torch.Tensor,
    fold: torch.Tensor | bool,
    cursors: torch.Tensor,
    capacity: int | None,
    max_query_len: int,
) -> torch.Tensor:
    """The cursor kernel: moves the cursors past what verify folded and what was accepted, and decides folds.

    ``accepted`` [rows] int32; ``fold``: rows that fold all they have, [rows] bool or one answer for all. With a
    ``capacity`` R, rows whose next window might not fit fold too: pending + T > R. Returns the fold plan
    [rows, PLAN_COLUMNS] int32. What moves, of one row at checkpoint_len c with p pending, f of them folded by verify:

                      checkpoint     pending records
        before        c              [c, c + p)
        no fold       c + f          [c + f, c + p + accepted)
        fold          c + p + accepted    none
    """
    cursor_rows = rows[:, at.RECORD_ROW].long()
    cursor = cursors[cursor_rows]
    owned = live_rows(rows) & (cursor[:, at.CURSOR_GENERATION] == rows[:, at.GENERATION])
    checkpoint_len = cursor[:, at.CURSOR_CHECKPOINT_LEN] + rows[:, at.FOLD_LEN]
    pending = cursor[:, at.CURSOR_PENDING_LEN] - rows[:, at.FOLD_LEN] + accepted
    folds = owned & fold
    if capacity is not None:
        folds |= owned & (pending + max_query_len > capacity)
    count = torch.where(folds, pending, 0)
    # Rows that own nothing write back what they read: null rows the scratch cursor's 0, late rows their successor's.
    for column, value in ((at.CURSOR_CHECKPOINT_LEN, checkpoint_len + count), (at.CURSOR_PENDING_LEN, pending - count)):
        cursors[cursor_rows, column] = torch.where(owned, value, cursor[:, column])
    slots = torch.where(owned, rows[:, at.CHECKPOINT_SLOT], 0)
    return torch.stack([slots, slots, rows[:, at.RECORD_ROW], checkpoint_len, count], 1)


def verify_fold_plan(rows: torch.Tensor) -> torch.Tensor:
    """The plan of what this step's verify folds, for layers that did not verify when a step is cancelled."""
    columns = [at.CHECKPOINT_SLOT, at.CHECKPOINT_SLOT, at.RECORD_ROW, at.CHECKPOINT_LEN, at.FOLD_LEN]
    return rows[:, columns]


def fold(plan: torch.Tensor, layer: LayerStorage, params: LayerParams, lower_bound: float | None) -> None:
    """Folds ``plan`` in one layer: recurrent state and conv history together, both then at source position + count."""
    if not plan.is_cuda:
        plan = plan[plan[:, at.PLAN_COUNT] > 0]
    if not plan.shape[0]:
        return
    destination, mask = plan[:, at.PLAN_DESTINATION].long(), plan[:, at.PLAN_COUNT] > 0
    state, history = read_state(plan, layer, params, lower_bound)
    _write_slots(layer.recurrent, destination, state.to(layer.recurrent.dtype), mask)
    if layer.conv is not None and history is not None:
        _write_slots(layer.conv, destination, history, mask)


def read_state(
    plan: torch.Tensor, layer: LayerStorage, params: LayerParams, lower_bound: float | None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """What ``fold`` would write: state [rows, H, V, K] in the compute dtype, conv history [rows, C, W-1] or None."""
    record_row, start, count = (plan[:, c] for c in (at.PLAN_RECORD_ROW, at.PLAN_CHECKPOINT_LEN, at.PLAN_COUNT))
    state = layer.recurrent[plan[:, at.PLAN_SOURCE].long()].to(layer.record_u.dtype)
    state = fold_records(state, read_records(layer, record_row, start, count), params, lower_bound)
    return state, None if layer.conv is None else read_conv_history(layer, record_row, start + count)


def fold_records(state: torch.Tensor, records: Records, params: LayerParams, lower_bound: float | None) -> torch.Tensor:
    """S_0 diag(e^{G_m}) + sum_j u_j (k_j e^{G_m - G_j})^T for state [rows, H, V, K]; the one fold routine.

    Sums of later gates come from a reverse running sum: G_m - G_j as a difference would cancel.
    """
    if not records.u.shape[2]:
        return state
    compute = state.dtype
    key, valid = records.key.to(compute), _valid(records)
    key = key * inverse_norm(key)[..., None]
    gate = log_decay(records.gate.to(compute).transpose(1, 2), params, lower_bound).transpose(1, 2)
    gate = torch.where(valid, gate, 0.0)
    from_own = gate.flip(2).cumsum(2).flip(2)  # sum of the gates of record j and later, [rows, H, m, K]
    later = F.pad(from_own[:, :, 1:], (0, 0, 0, 1))
    decayed, weighted = state * from_own[:, :, :1].exp(), key * later.exp()
    # decayed + u^T weighted in one pass
    folded = torch.baddbmm(decayed.flatten(0, 1), records.u.flatten(0, 1).mT, weighted.flatten(0, 1))
    return folded.view_as(state)


def read_records(layer: LayerStorage, record_rows: torch.Tensor, start: torch.Tensor, count: torch.Tensor) -> Records:
    """Records of positions start .. start + count of each row, gathered from the ring; [rows] tensors."""
    capacity = layer.record_u.shape[2]
    entries = capacity if count.is_cuda or not count.numel() else int(count.max())
    ring = (start[:, None] + torch.arange(entries, dtype=start.dtype, device=start.device)) % capacity
    index = (
        record_rows.long()[:, None],
        slice(None),
        ring.long(),
    )  # advanced indices apart: the result is [rows, m, H, ..]
    u, key, gate = (x[index].transpose(1, 2) for x in (layer.record_u, layer.record_key, layer.record_gate))
    records = Records(u, key, gate, count.long())
    # Entries that hold no record of this row may hold anything, NaN too.
    valid = _valid(records)
    u, key, gate = (torch.where(valid, x, 0.0) for x in (u, key, gate))
    return Records(u, key, gate, records.lens)


def read_conv_history(layer: LayerStorage, record_rows: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
    """The W - 1 conv inputs before ``position`` [rows], as [rows, C, W-1], oldest first."""
    assert layer.conv is not None and layer.conv_ring is not None
    # The input of position p lies in entry p + W - 1, so the oldest of them lies in entry `position`.
    entry = position[:, None] + torch.arange(layer.conv.shape[-1], dtype=position.dtype, device=position.device)
    return layer.conv_ring[record_rows.long()[:, None], (entry % layer.conv_ring.shape[1]).long()].mT


def live_rows(rows: torch.Tensor) -> torch.Tensor:
    """[rows] bool: rows that own a checkpoint slot and a record row. All others never fold and move no cursor."""
    return (rows[:, at.CHECKPOINT_SLOT] > 0) & (rows[:, at.RECORD_ROW] >= 0)


def finished_rows(rows: torch.Tensor, cursor: torch.Tensor) -> torch.Tensor:
    """[rows] bool: windows of requests that have finished, for the rows' own cursors [rows, 4].

    A prompt row says that its request goes on: an end token sampled in the middle of a prompt ended nothing.
    """
    return (cursor[:, at.CURSOR_FINISHED] != 0) & (rows[:, at.ROW_KIND] != at.PROMPT)


def _valid(records: Records) -> torch.Tensor:
    """[rows, 1, m, 1] bool: entries that hold a record."""
    entries = torch.arange(records.u.shape[2], device=records.u.device)
    return (entries < records.lens[:, None])[:, None, :, None]


def _by_token(window: Window, x: torch.Tensor) -> torch.Tensor:
    """[rows, length, ..] -> [tokens, ..]; padding gets anything."""
    return x[window.token_row, window.token_offset.clamp(max=window.length - 1)]


def _convolve(
    step: StepTensors, layer: LayerStorage, params: LayerParams, qkv: torch.Tensor, compute: torch.dtype
) -> torch.Tensor:
    """q|k|v of the windows after conv and SiLU, [rows, length, C] in the activation dtype."""
    window_inputs = qkv[step.window.gather]
    if layer.conv is None or params.conv_weight is None:
        return window_inputs
    history = read_conv_history(layer, step.rows[:, at.RECORD_ROW], step.committed_lens).mT
    inputs = torch.cat([history, window_inputs], 1).to(compute)  # [rows, W-1+length, C]
    weight = params.conv_weight.to(compute)
    mixed = inputs.new_zeros(()) if params.conv_bias is None else params.conv_bias.to(compute)
    for tap in range(weight.shape[1]):
        mixed = mixed + inputs[:, tap : tap + step.window.length] * weight[:, tap]
    return F.silu(mixed).to(qkv.dtype)


def _token_entries(step: StepTensors, ring: int, offset: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Record row [tokens] and ring entry [tokens] that each token writes; padding writes to scratch."""
    window = step.window
    record_row = torch.where(window.token_live, step.rows[window.token_row, at.RECORD_ROW], -1)
    return record_row.long(), ((step.positions + offset) % ring).long()


def _write_records(
    step: StepTensors,
    layer: LayerStorage,
    u: torch.Tensor,
    key: torch.Tensor,
    gate: torch.Tensor,
    inv_norm: torch.Tensor,
) -> None:
    record_row, entry = _token_entries(step, layer.record_u.shape[2])
    for ring, values in (
        (layer.record_u, u),
        (layer.record_key, key),
        (layer.record_gate, gate),
        (layer.record_inv_norm, inv_norm),
    ):
        ring[record_row, :, entry] = values.to(ring.dtype)


def _write_conv_inputs(step: StepTensors, layer: LayerStorage, qkv: torch.Tensor) -> None:
    assert layer.conv is not None and layer.conv_ring is not None
    record_row, entry = _token_entries(step, layer.conv_ring.shape[1], layer.conv.shape[-1])
    layer.conv_ring[record_row, entry] = qkv


def _write_slots(slots_of: torch.Tensor, slots: torch.Tensor, values: torch.Tensor, mask: torch.Tensor) -> None:
    """slots_of[slots] = values where ``mask`` [rows]; every other slot keeps its bytes."""
    if slots_of.is_cuda:  # choosing rows would wait for the device, so the others write back what they hold
        keep = slots_of[slots]
        slots_of[slots] = torch.where(mask.view(-1, *[1] * (values.dim() - 1)), values, keep)
    elif mask.any():
        slots_of[slots[mask]] = values[mask]
