"""The reference: every kernel in plain torch, in the order of the mathematics. The oracle of all other backends.

Vectorised over rows and heads; a window is walked token by token, as the recurrence is written:

    g = -exp(A_log) softplus(x + dt_bias)        or   lower_bound sigmoid(exp(A_log) (x + dt_bias))
    S' = S diag(exp g);  u = b (v - S' k);  S <- S' + u k^T;  o = S q

with q and k normalised, q scaled by K^-1/2, b = sigmoid(raw beta) (Kimi Linear, arXiv 2510.26692, section 3; the
bounded gate is Kimi K3's). Everything is computed in float32, or float64 with float64 checkpoints, from values that
were rounded to the activation dtype first: what a verify uses and what a fold reads later are the same numbers.

Nothing here waits for the device. On a CPU, where looking at a value is free, rows without work are left out.
"""

from dataclasses import dataclass
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
    gather: torch.Tensor  # [length, rows] int64, token of each window entry; entries past query_len repeat a real one
    length: int  # longest window of the step


class Records(NamedTuple):
    """Pending records of some rows, newest first; entries past a row's last are zero."""

    u: torch.Tensor  # [rows, H, m, V]
    key: torch.Tensor  # [rows, H, m, K]
    gate: torch.Tensor  # [rows, H, m, K] raw
    valid: torch.Tensor | None  # [rows, 1, m, 1] bool, entries that hold a record; None: all of them


class RecordPlaces(NamedTuple):
    """Ring entries of some rows' pending records, newest first."""

    rows: torch.Tensor  # [rows, 1] int64
    entries: torch.Tensor  # [rows, m] int64
    valid: torch.Tensor | None  # [rows, 1, m, 1] bool; None: all of them


class Places(NamedTuple):
    """Where the rows of a step read and write, alike in every layer; made anew when the rows change."""

    slots: torch.Tensor  # [rows] int64, checkpoint slots
    folds: torch.Tensor  # [rows] bool, rows whose pending records this verify folds
    pending: RecordPlaces
    written: torch.Tensor  # [length, rows] int64, record row of each window entry; past query_len the scratch row
    positions: torch.Tensor  # [length, rows] int64
    answered: torch.Tensor  # [tokens, 1, 1] bool, tokens whose output is not zero


@dataclass(slots=True, eq=False)
class StepTensors:
    """A step's own device copy of its rows, and what attention and own kernels read."""

    rows: torch.Tensor  # [rows, ROW_COLUMNS] int32
    query_start_loc: torch.Tensor  # [rows + 1] int32
    positions: torch.Tensor  # [tokens] int32
    committed_lens: torch.Tensor  # [rows] int32
    window: Window
    folds_in_verify: bool
    places: Places | None = None  # None: the rows have changed since they were derived


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
    within = torch.minimum(steps[:, None], (rows[:, at.QUERY_LEN] - 1).clamp(min=0))
    gather = (rows[:, at.FIRST_TOKEN] + within).clamp(max=max(tokens - 1, 0))
    # Past a window, outputs are made and thrown away; the offset only has to point at one.
    window = Window(token_row, offset.long().clamp(max=max(length - 1, 0)), live, gather.long(), length)
    return StepTensors(rows, query_start_loc, positions.to(torch.int32), committed, window, folds_in_verify)


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
    window = step.window
    if not window.gather.numel():
        out.zero_()
        return
    places = _places(step, layer.record_u.shape[2])
    heads, v_dim, k_dim = layer.recurrent.shape[1:]
    compute = layer.record_u.dtype
    inputs = qkv[window.gather]
    mixed = _convolve(step, layer, params, inputs)
    query, key, value = (
        x.unflatten(-1, (heads, -1)) for x in mixed.split([heads * k_dim, heads * k_dim, heads * v_dim], -1)
    )
    raw_gate = raw_gate[window.gather].to(qkv.dtype)

    # The state at each window's first token, [rows, H, V, K].
    state = layer.recurrent[places.slots].to(compute)
    state = fold_records(state, read_records(layer, places.pending), params, lower_bound)
    folded = state.to(layer.recurrent.dtype, copy=True) if step.folds_in_verify else None

    # The window's vectors, token by token: [length, rows, H, ..]; keys and queries side by side, [.., 2, K].
    unit = torch.stack([key, query], 3).to(compute)
    inv_norm = inverse_norm(unit)
    unit *= inv_norm[..., None]
    unit[..., 1, :] *= k_dim**-0.5
    value = value.to(compute)
    decay = log_decay(raw_gate.to(compute), params, lower_bound).exp()
    strength = torch.sigmoid(raw_beta[window.gather].to(compute))[..., None]

    # Products are row vectors times S^T, since torch takes five times as long on a CPU for a product with one column;
    # S'q comes with S'k, and S q = S'q + u (k q).
    state, corrections, remainders = state.flatten(0, 1), [], []
    wanted = torch.stack([value, torch.zeros_like(value)], 3)
    for g, kq, vo, b in zip(*(x.flatten(1, 2) for x in (decay, unit, wanted, strength)), strict=True):
        state *= g[:, None]
        rest = torch.baddbmm(vo, kq, state.mT, alpha=-1.0)  # v - S'k and -S'q, [rows * H, 2, V]
        u = rest[:, 0] * b
        state.addcmul_(u[:, :, None], kq[:, :1])
        corrections.append(u)
        remainders.append(rest[:, 1])
    u, rest = (torch.stack(x).unflatten(1, (-1, heads)) for x in (corrections, remainders))
    o = u * unit.prod(3).sum(-1, keepdim=True) - rest
    out.copy_(torch.where(places.answered, o[window.token_offset, window.token_row], 0.0))

    # All writes come last, the fold at the very end: a verify that fails on the way has folded nothing, so that the
    # step can be cancelled and the window verified again.
    _write_records(places, layer, u, key, raw_gate, inv_norm[..., 0], inputs)
    if folded is None:
        return
    if layer.conv is not None:
        history = read_conv_history(layer, step.rows[:, at.RECORD_ROW], step.committed_lens)
        _write_slots(layer.conv, places.slots, history, places.folds)
    _write_slots(layer.recurrent, places.slots, folded, places.folds)


def write_records(
    step: StepTensors,
    layer: LayerStorage,
    u: torch.Tensor,
    key: torch.Tensor,
    gate: torch.Tensor,
    conv_input: torch.Tensor | None,
) -> None:
    """Records of the caller's own verify: u [tokens, H, V], key, raw gate [tokens, H, K], conv_input [tokens, C]."""
    gather = step.window.gather
    if not gather.numel():
        return
    inv_norm = inverse_norm(key.to(layer.record_u.dtype))
    inputs = key if conv_input is None else conv_input  # not read without a conv
    by_row = (x[gather] for x in (u, key, gate, inv_norm, inputs))
    _write_records(_places(step, layer.record_u.shape[2]), layer, *by_row)


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
    records = read_records(layer, record_places(record_row, start, count, layer.record_u.shape[2]))
    state = fold_records(state, records, params, lower_bound)
    return state, None if layer.conv is None else read_conv_history(layer, record_row, start + count)


def fold_records(state: torch.Tensor, records: Records, params: LayerParams, lower_bound: float | None) -> torch.Tensor:
    """S_0 diag(e^{G_m}) + sum_j u_j (k_j e^{G_m - G_j})^T for state [rows, H, V, K], in place; the one fold routine.

    Sums of newer gates come from a running sum that starts at the newest: G_m - G_j as a difference would cancel.
    """
    if not records.u.shape[2]:
        return state
    compute = state.dtype
    key = records.key.to(compute)
    key = key * inverse_norm(key)[..., None]
    gate = log_decay(records.gate.to(compute).transpose(1, 2), params, lower_bound).transpose(1, 2)
    if records.valid is not None:
        gate = torch.where(records.valid, gate, 0.0)
    from_own = gate.cumsum(2)  # sum of the gates of record j and newer ones, [rows, H, m, K]
    newer = F.pad(from_own[:, :, :-1], (0, 0, 1, 0))
    state *= from_own[:, :, -1:].exp()
    weighted = key * newer.exp()
    state.flatten(0, 1).baddbmm_(records.u.flatten(0, 1).mT, weighted.flatten(0, 1))
    return state


def record_places(record_rows: torch.Tensor, start: torch.Tensor, count: torch.Tensor, capacity: int) -> RecordPlaces:
    """The places of positions start .. start + count of each row; [rows] int32 tensors, rings of ``capacity``."""
    # On a GPU counts are not known here: the whole ring is read, and masked.
    on_host = not count.is_cuda and count.numel() > 0
    place = torch.arange(int(count.max()) if on_host else capacity, device=count.device)
    valid = None if on_host and int(count.min()) == len(place) else (place < count[:, None])[:, None, :, None]
    return RecordPlaces(record_rows.long()[:, None], ((start + count)[:, None] - 1 - place) % capacity, valid)


def read_records(layer: LayerStorage, places: RecordPlaces) -> Records:
    """The records at ``places``. Entries that hold no record of their row may hold anything, NaN too; they read as 0."""
    # Rows and entries index dimensions that stand apart, so the result is [rows, m, H, ..], with heads out of place.
    u, key_gate = (
        ring[places.rows, :, places.entries].transpose(1, 2) for ring in (layer.record_u, layer.record_key_gate)
    )
    if places.valid is not None:
        u, key_gate = torch.where(places.valid, u, 0.0), torch.where(places.valid[..., None], key_gate, 0.0)
    return Records(u, key_gate[..., 0, :], key_gate[..., 1, :], places.valid)


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


def _places(step: StepTensors, capacity: int) -> Places:
    if step.places is None:
        rows, window = step.rows, step.window
        record_row, live = rows[:, at.RECORD_ROW], live_rows(rows)
        place = torch.arange(window.length, device=rows.device)
        step.places = Places(
            slots=rows[:, at.CHECKPOINT_SLOT].long(),
            folds=rows[:, at.FOLD_LEN] > 0,
            pending=record_places(record_row, rows[:, at.CHECKPOINT_LEN], rows[:, at.PENDING_LEN], capacity),
            written=torch.where(place[:, None] < rows[:, at.QUERY_LEN], record_row, -1).long(),
            positions=step.committed_lens + place[:, None],
            answered=(live[window.token_row] & window.token_live)[:, None, None],
        )
    return step.places


def _convolve(step: StepTensors, layer: LayerStorage, params: LayerParams, inputs: torch.Tensor) -> torch.Tensor:
    """q|k|v of the windows after conv and SiLU, [length, rows, C] in the activation dtype; inputs alike."""
    if layer.conv is None or params.conv_weight is None:
        return inputs
    history = read_conv_history(layer, step.rows[:, at.RECORD_ROW], step.committed_lens)
    compute = layer.record_u.dtype
    taken = torch.cat([history.movedim(2, 0), inputs]).to(compute)  # [W-1+length, rows, C]
    weight = params.conv_weight.to(compute)
    mixed = taken.new_zeros(()) if params.conv_bias is None else params.conv_bias.to(compute)
    for tap in range(weight.shape[1]):
        mixed = mixed + taken[tap : tap + len(inputs)] * weight[:, tap]
    return F.silu(mixed).to(inputs.dtype)


def _write_records(
    places: Places,
    layer: LayerStorage,
    u: torch.Tensor,
    key: torch.Tensor,
    gate: torch.Tensor,
    inv_norm: torch.Tensor,
    inputs: torch.Tensor,
) -> None:
    """Writes [length, rows, ..] of a window into the rings; conv ``inputs`` only where there is a conv."""
    entry = places.positions % layer.record_u.shape[2]
    for ring, values in (
        (layer.record_u, u),
        (layer.record_key, key),
        (layer.record_gate, gate),
        (layer.record_inv_norm, inv_norm),
    ):
        ring[places.written, :, entry] = values.to(ring.dtype)
    if layer.conv_ring is not None and layer.conv is not None:
        entry = (places.positions + layer.conv.shape[-1]) % layer.conv_ring.shape[1]
        layer.conv_ring[places.written, entry] = inputs


def _write_slots(slots_of: torch.Tensor, slots: torch.Tensor, values: torch.Tensor, mask: torch.Tensor) -> None:
    """slots_of[slots] = values where ``mask`` [rows]; every other slot keeps its bytes."""
    if slots_of.is_cuda:  # choosing rows would wait for the device, so the others write back what they hold
        keep = slots_of[slots]
        slots_of[slots] = torch.where(mask.view(-1, *[1] * (values.dim() - 1)), values, keep)
    elif mask.any():
        slots_of[slots[mask]] = values[mask]
