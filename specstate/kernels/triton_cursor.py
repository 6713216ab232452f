"""The row records of a step and the cursors of its record slots; one program a row, see kernels/rows.py for columns."""

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["num_rows", "num_tokens"])
def begin_kernel(
    p_staged,
    p_starts,
    p_cursors,
    p_rows,
    p_positions,
    p_committed,
    num_rows,
    num_tokens,
    STAGED_COLUMNS: tl.constexpr,
    ROW_COLUMNS: tl.constexpr,
    BT: tl.constexpr,
    FOLDS: tl.constexpr,
):
    """Joins the staged columns with the cursors. Grid: rows + 1; the last program clears the positions of padding."""
    row = tl.program_id(0)
    if row == num_rows:
        for token in range(tl.load(p_starts + num_rows), num_tokens):
            tl.store(p_positions + token, 0)
        return
    p_row, p_stage = p_rows + row * ROW_COLUMNS, p_staged + row * STAGED_COLUMNS
    for column in tl.static_range(STAGED_COLUMNS):
        tl.store(p_row + column, tl.load(p_stage + column))
    checkpoint_len, pending = _read_cursor(p_stage, p_cursors)
    tl.store(p_row + 8, checkpoint_len)
    tl.store(p_row + 9, pending)
    tl.store(p_row + 10, pending if FOLDS else 0)
    tl.store(p_committed + row, checkpoint_len + pending)
    o_t = tl.arange(0, BT)
    p_window = p_positions + tl.load(p_stage + 2) + o_t
    tl.store(p_window, checkpoint_len + pending + o_t, mask=o_t < tl.load(p_stage + 3))


@triton.jit
def refresh_kernel(p_rows, p_cursors, ROW_COLUMNS: tl.constexpr, FOLDS: tl.constexpr):
    """Reads the cursors into the rows again. Grid: rows."""
    p_row = p_rows + tl.program_id(0) * ROW_COLUMNS
    checkpoint_len, pending = _read_cursor(p_row, p_cursors)
    tl.store(p_row + 8, checkpoint_len)
    tl.store(p_row + 9, pending)
    tl.store(p_row + 10, pending if FOLDS else 0)


@triton.jit
def _read_cursor(p_row, p_cursors):
    """(checkpoint_len, pending_len) of a row's record slot; 0 without loading them when the row owns nothing."""
    record_row = tl.load(p_row + 1)
    p_cursor = p_cursors + record_row * 4
    live = (tl.load(p_row) > 0) & (record_row >= 0)
    owned = live & (tl.load(p_cursor + 2, mask=live, other=0) == tl.load(p_row + 4))
    return tl.load(p_cursor, mask=owned, other=0), tl.load(p_cursor + 1, mask=owned, other=0)


@triton.jit(do_not_specialize_on_alignment=["p_counts", "p_fold", "p_finished"])
def advance_kernel(
    p_rows,
    p_counts,
    p_fold,
    p_finished,
    p_cursors,
    p_counters,
    p_plan,
    longest,
    capacity,
    ROW_COLUMNS: tl.constexpr,
    PLAN_COLUMNS: tl.constexpr,
    PROMPT: tl.constexpr,
    COUNTS: tl.constexpr,
    FOLD: tl.constexpr,
    FINISHED: tl.constexpr,
):
    """``accepted_counts`` and ``advance`` of the reference in one: the only writer of cursors. Grid: rows.

    COUNTS: False for a flush or a cancel, which accept nothing and judge no count. FOLD: "none", "mask" or "all".
    ``capacity``: R under the ring policy, else so large that no window ever fails to fit.
    """
    row = tl.program_id(0)
    p_row = p_rows + row * ROW_COLUMNS
    p_out = p_plan + row * PLAN_COLUMNS
    slot, record_row = tl.load(p_row), tl.load(p_row + 1)
    live = (slot > 0) & (record_row >= 0)
    p_cursor = p_cursors + record_row * 4
    owned = live & (tl.load(p_cursor + 2, mask=live, other=0) == tl.load(p_row + 4))
    accepted = 0
    if COUNTS:
        # A prompt row says that its request goes on.
        was_finished = (tl.load(p_cursor + 3, mask=owned, other=0) != 0) & (tl.load(p_row + 7) != PROMPT)
        running = owned & (was_finished == 0)
        # As wide as the caller's count, so that an absurd one is clamped and not wrapped.
        count = tl.load(p_counts + row, mask=owned, other=0)
        bounded = tl.minimum(tl.maximum(count, tl.load(p_row + 5)), tl.load(p_row + 3))
        tl.atomic_add(p_counters, 1, mask=running & (bounded != count))
        tl.atomic_add(p_counters + 1, 1, mask=live & (owned == 0))
        tl.atomic_add(p_counters + 2, 1, mask=owned & (running == 0))
        accepted = tl.where(running, bounded, 0).to(tl.int32)
        if FINISHED:
            was_finished |= tl.load(p_finished + row, mask=owned, other=0) != 0
        tl.store(p_cursor + 3, was_finished.to(tl.int32), mask=owned)
    fold_len = tl.load(p_row + 10)
    checkpoint_len = tl.load(p_cursor, mask=owned, other=0) + fold_len
    pending = tl.load(p_cursor + 1, mask=owned, other=0) - fold_len + accepted
    folds = pending + longest > capacity
    if FOLD == "all":
        folds = pending >= 0
    elif FOLD == "mask":
        folds |= tl.load(p_fold + row, mask=owned, other=0) != 0
    folded = tl.where(owned & folds, pending, 0)
    tl.store(p_cursor, checkpoint_len + folded, mask=owned)
    tl.store(p_cursor + 1, pending - folded, mask=owned)
    source = tl.where(owned, slot, 0)
    tl.store(p_out, source)
    tl.store(p_out + 1, source)
    tl.store(p_out + 2, record_row)
    tl.store(p_out + 3, checkpoint_len)
    tl.store(p_out + 4, folded)
    tl.store(p_out + 5, 0)
    tl.store(p_out + 6, 0)
