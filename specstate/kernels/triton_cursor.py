"""The row records of a step and the cursors of its record slots; one program a row, see kernels/rows.py for columns."""

import triton
import triton.language as tl

from specstate.kernels.triton_rows import (
    BATCH_INDEX,
    BOUNDARY_SLOT,
    CHECKPOINT_LEN,
    CHECKPOINT_SLOT,
    COUNT_ACCEPTED,
    COUNT_CLAMPS,
    COUNT_DRAFT_TOKENS,
    COUNT_DROPPED,
    COUNT_FOLDS,
    COUNT_MISPLACED,
    COUNT_WASTED,
    COUNT_WINDOWS,
    CURSOR_BOUNDARY_LEN,
    CURSOR_CHECKPOINT_LEN,
    CURSOR_COLUMNS,
    CURSOR_FINISHED,
    CURSOR_GENERATION,
    CURSOR_PENDING_LEN,
    CURSOR_SLOT,
    DECODE,
    FIRST_TOKEN,
    FOLD_AT_BOUNDARY,
    FOLD_AT_END,
    FOLD_BY_FLUSH,
    FOLD_BY_MASK,
    FOLD_IN_VERIFY,
    FOLD_LEN,
    FOLD_WHEN_FULL,
    GENERATION,
    MIN_ACCEPTED,
    PENDING_LEN,
    PLAN_BOUNDARY_COUNT,
    PLAN_BOUNDARY_SLOT,
    PLAN_CHECKPOINT_LEN,
    PLAN_COLUMNS,
    PLAN_COUNT,
    PLAN_DESTINATION,
    PLAN_RECORD_ROW,
    PLAN_SOURCE,
    PROMPT,
    QUERY_LEN,
    RECORD_ROW,
    ROW_COLUMNS,
    ROW_KIND,
    STAGED_COLUMNS,
)


@triton.jit(
    do_not_specialize=["num_rows", "num_tokens", "stated_stride"],
    # p_starts lies behind the staged rows, wherever those end.
    do_not_specialize_on_alignment=["p_starts", "p_stated"],
)
def begin_kernel(
    p_staged,
    p_starts,
    p_cursors,
    p_counters,
    p_stated,
    stated_stride,
    p_rows,
    p_positions,
    p_committed,
    num_rows,
    num_tokens,
    BT: tl.constexpr,
    FOLDS: tl.constexpr,
    STATED: tl.constexpr,
):
    """Joins the staged columns with the cursors. Grid: rows + 1; the last program clears the positions of padding.

    STATED: whether the caller says where rows stand, with its block table. A line whose position is wrong is not used.
    """
    row = tl.program_id(0)
    if row == num_rows:
        for token in range(tl.load(p_starts + num_rows), num_tokens):
            tl.store(p_positions + token, 0)
        return
    p_row, p_stage = p_rows + row * ROW_COLUMNS, p_staged + row * STAGED_COLUMNS
    for column in tl.static_range(STAGED_COLUMNS):
        tl.store(p_row + column, tl.load(p_stage + column))
    # From the staged columns: what this program stores into the row it may not yet read back.
    committed_len = _read_cursor(p_stage, p_cursors, p_row, FOLDS)
    tl.store(p_committed + row, committed_len)
    if STATED:
        owned = _owned(p_stage, p_cursors)
        stated = tl.load(p_stated + tl.load(p_stage + BATCH_INDEX).to(tl.int64) * stated_stride, mask=owned, other=0)
        misplaced = owned & (stated != committed_len)
        tl.store(p_row + BOUNDARY_SLOT, tl.where(misplaced, -1, 0))
        tl.atomic_add(p_counters + COUNT_MISPLACED, 1, mask=misplaced)
    o_t = tl.arange(0, BT)
    p_window = p_positions + tl.load(p_stage + FIRST_TOKEN) + o_t
    tl.store(p_window, committed_len + o_t, mask=o_t < tl.load(p_stage + QUERY_LEN))


@triton.jit
def refresh_kernel(p_rows, p_cursors, FOLDS: tl.constexpr):
    """Reads the cursors into the rows again. Grid: rows."""
    p_row = p_rows + tl.program_id(0) * ROW_COLUMNS
    _read_cursor(p_row, p_cursors, p_row, FOLDS)


@triton.jit
def _owned(p_row, p_cursors):
    """Whether the row owns a record slot that is still its own; the cursor of one that owns none is not loaded."""
    record_row = tl.load(p_row + RECORD_ROW)
    live = (tl.load(p_row + CHECKPOINT_SLOT) > 0) & (record_row >= 0)
    p_generation = p_cursors + record_row * CURSOR_COLUMNS + CURSOR_GENERATION
    return live & (tl.load(p_generation, mask=live, other=0) == tl.load(p_row + GENERATION))


@triton.jit
def _read_cursor(p_named, p_cursors, p_row, FOLDS: tl.constexpr):
    """Writes what the cursor of the row at ``p_named`` says to ``p_row``, 0 if it owns nothing; its committed_len."""
    owned = _owned(p_named, p_cursors)
    p_cursor = p_cursors + tl.load(p_named + RECORD_ROW) * CURSOR_COLUMNS
    checkpoint_len = tl.load(p_cursor + CURSOR_CHECKPOINT_LEN, mask=owned, other=0)
    pending = tl.load(p_cursor + CURSOR_PENDING_LEN, mask=owned, other=0)
    slot = tl.load(p_cursor + CURSOR_SLOT, mask=owned, other=0)
    tl.store(p_row + CHECKPOINT_SLOT, slot, mask=owned)
    tl.store(p_row + CHECKPOINT_LEN, checkpoint_len)
    tl.store(p_row + PENDING_LEN, pending)
    tl.store(p_row + FOLD_LEN, pending if FOLDS else 0)
    return checkpoint_len + pending


@triton.jit(
    do_not_specialize=["table_stride", "block_stride", "width", "block_size", "num_slots"],
    do_not_specialize_on_alignment=["p_counts", "p_fold", "p_finished", "p_table"],
)
def advance_kernel(
    p_rows,
    p_counts,
    p_fold,
    p_finished,
    p_table,
    table_stride,
    block_stride,
    width,
    p_cursors,
    p_counters,
    p_plan,
    longest,
    capacity,
    block_size,
    num_slots,
    COUNTS: tl.constexpr,
    FOLD: tl.constexpr,
    FINISHED: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    """``accepted_counts`` and ``advance`` of the reference in one: within steps the only writer of cursors. Grid: rows.

    COUNTS: False for a flush or a cancel, which accept nothing and judge no count. FOLD: "none", "mask" or "all".
    ``capacity``: R under the ring policy, else so large that no window ever fails to fit. BLOCKS: who says where
    boundary checkpoints go: nobody ("none"), the row record ("own") or the caller's table [entries, width] ("table").
    """
    row = tl.program_id(0)
    p_row = p_rows + row * ROW_COLUMNS
    p_out = p_plan + row * PLAN_COLUMNS
    slot, record_row = tl.load(p_row + CHECKPOINT_SLOT), tl.load(p_row + RECORD_ROW)
    live = (slot > 0) & (record_row >= 0)
    p_cursor = p_cursors + record_row * CURSOR_COLUMNS
    owned = _owned(p_row, p_cursors)
    accepted = 0
    if COUNTS:
        # A prompt row says that its request goes on.
        kind = tl.load(p_row + ROW_KIND)
        was_finished = (tl.load(p_cursor + CURSOR_FINISHED, mask=owned, other=0) != 0) & (kind != PROMPT)
        running = owned & (was_finished == 0)
        # As wide as the caller's count, so that an absurd one is clamped and not wrapped.
        count = tl.load(p_counts + row, mask=owned, other=0)
        query_len = tl.load(p_row + QUERY_LEN)
        bounded = tl.minimum(tl.maximum(count, tl.load(p_row + MIN_ACCEPTED)), query_len)
        accepted = tl.where(running, bounded, 0).to(tl.int32)
        tl.atomic_add(p_counters + COUNT_CLAMPS, 1, mask=running & (bounded != count))
        tl.atomic_add(p_counters + COUNT_DROPPED, 1, mask=live & (owned == 0))
        tl.atomic_add(p_counters + COUNT_WASTED, 1, mask=owned & (running == 0))
        decoding = running & (kind == DECODE)
        tl.atomic_add(p_counters + COUNT_WINDOWS, 1, mask=decoding)
        tl.atomic_add(p_counters + COUNT_DRAFT_TOKENS, query_len - 1, mask=decoding & (query_len > 1))
        tl.atomic_add(p_counters + COUNT_ACCEPTED + accepted, 1, mask=decoding & (query_len > 1))
        if FINISHED:
            was_finished |= tl.load(p_finished + row, mask=owned, other=0) != 0
        tl.store(p_cursor + CURSOR_FINISHED, was_finished.to(tl.int32), mask=owned)
    fold_len = tl.load(p_row + FOLD_LEN)
    before = tl.load(p_cursor + CURSOR_CHECKPOINT_LEN, mask=owned, other=0)
    checkpoint_len = before + fold_len
    before += tl.load(p_cursor + CURSOR_PENDING_LEN, mask=owned, other=0)
    pending = before + accepted - checkpoint_len
    source = tl.where(owned, slot, 0)
    destination = source
    boundary_slot = 0
    boundary = 0
    if BLOCKS != "none":
        column = (before + accepted) // block_size
        boundary = column * block_size
        crosses = owned & (boundary > before)
        given = tl.load(p_row + BOUNDARY_SLOT)
        if BLOCKS == "own":
            boundary_slot = tl.where(crosses, given, 0)
            tl.store(p_cursor + CURSOR_BOUNDARY_LEN, boundary, mask=boundary_slot > 0)
        else:
            # The running checkpoint moves to column after // block_size, the boundary's into the one before: see
            # `_blocks` of the reference.
            crosses &= given == 0
            p_line = p_table + tl.load(p_row + BATCH_INDEX).to(tl.int64) * table_stride
            moved = tl.load(p_line + tl.minimum(column, width - 1) * block_stride, mask=crosses, other=0)
            destination = tl.where((moved > 0) & (moved < num_slots), moved, source)
            ends_here = crosses & (column <= width)
            boundary_slot = tl.load(p_line + (column - 1) * block_stride, mask=ends_here, other=0)
            apart = (boundary_slot != destination) | (boundary == before + accepted)
            boundary_slot = tl.where((boundary_slot > 0) & (boundary_slot < num_slots) & apart, boundary_slot, 0)
            tl.store(p_cursor + CURSOR_SLOT, destination, mask=owned)
    asked = pending < 0
    if FOLD == "all":
        asked = pending >= 0
    elif FOLD == "mask":
        asked = tl.load(p_fold + row, mask=owned, other=0) != 0
    full = pending + longest > capacity
    at_boundary = (boundary_slot > 0) | (destination != source)
    folded = tl.where(owned & (asked | full | at_boundary), pending, 0)
    tl.store(p_cursor + CURSOR_CHECKPOINT_LEN, checkpoint_len + folded, mask=owned)
    tl.store(p_cursor + CURSOR_PENDING_LEN, pending - folded, mask=owned)
    # Of the reasons that hold, the first: all fold, full, asked for, at a boundary.
    reason = tl.where(full, FOLD_WHEN_FULL, tl.where(asked, FOLD_BY_MASK, FOLD_AT_BOUNDARY))
    if FOLD == "all":
        reason = FOLD_AT_END if COUNTS else FOLD_BY_FLUSH
    tl.atomic_add(p_counters + COUNT_FOLDS + reason, 1, mask=folded > 0)
    tl.atomic_add(p_counters + COUNT_FOLDS + FOLD_IN_VERIFY, 1, mask=owned & (fold_len > 0))
    tl.store(p_out + PLAN_SOURCE, source)
    tl.store(p_out + PLAN_DESTINATION, destination)
    tl.store(p_out + PLAN_RECORD_ROW, record_row)
    tl.store(p_out + PLAN_CHECKPOINT_LEN, checkpoint_len)
    tl.store(p_out + PLAN_COUNT, folded)
    tl.store(p_out + PLAN_BOUNDARY_SLOT, boundary_slot)
    tl.store(p_out + PLAN_BOUNDARY_COUNT, tl.where(boundary_slot > 0, boundary - checkpoint_len, 0))
