"""The rows of a step and the cursors of its record slots, in plain torch; see kernels/rows.py for their columns."""

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from specstate.config import StateConfig
from specstate.kernels import rows as at
from specstate.kernels.arena import Allocator, TorchAllocator


class Window(NamedTuple):
    """Where the tokens of a step lie; fixed when the step begins, the same for every layer."""

    token_row: torch.Tensor  # [tokens] int64, row of each token; for tokens of no row: any, see token_live
    token_offset: torch.Tensor  # [tokens] int64, place inside its window
    token_live: torch.Tensor  # [tokens] bool, False for padding
    gather: torch.Tensor  # [length, rows] int64, token of each window entry; entries past query_len repeat a real one
    length: int  # longest window of the step


class BlockTable(NamedTuple):
    """A caller's slots for boundary checkpoints, entry batch_index[i] for row i."""

    slots: torch.Tensor  # [entries, blocks] int32; 0: none
    positions: torch.Tensor  # [entries] int32, tokens committed before the window by the caller's own account


@dataclass(slots=True, eq=False)
class StepTensors:
    """A step's own device copy of its rows, and what attention and own kernels read."""

    rows: torch.Tensor  # [rows, ROW_COLUMNS] int32
    query_start_loc: torch.Tensor  # [rows + 1] int32
    positions: torch.Tensor  # [tokens] int32
    committed_lens: torch.Tensor  # [rows] int32
    window: Window | None  # of the reference alone
    folds_in_verify: bool
    allocator: Allocator
    """Of whatever the step makes on its way."""
    blocks: BlockTable | None = None
    places: Any = None
    """What the reference derives from the rows, and keeps until they change."""

    def copy(self) -> "StepTensors":
        """The same step in memory of its own, ordinary tensors also in inference mode: a release writes them later."""
        with torch.inference_mode(False):
            return StepTensors(
                self.rows.clone(),
                self.query_start_loc.clone(),
                self.positions.clone(),
                self.committed_lens.clone(),
                self.window,
                self.folds_in_verify,
                TorchAllocator(self.rows.device),
                self.blocks,
            )

    @property
    def num_tokens(self) -> int:
        """Padding included."""
        return self.positions.shape[0]  # len() of a tensor takes microseconds

    @property
    def checkpoint_slots(self) -> torch.Tensor:
        return self.rows[:, at.CHECKPOINT_SLOT]

    @property
    def record_slots(self) -> torch.Tensor:
        return self.rows[:, at.RECORD_ROW]

    @property
    def boundary_slots(self) -> torch.Tensor:
        return self.rows[:, at.BOUNDARY_SLOT]


def begin(
    staged: torch.Tensor,
    query_start_loc: torch.Tensor,
    tokens: int,
    length: int,
    cursors: torch.Tensor,
    counters: torch.Tensor,
    blocks: BlockTable | None,
    *,
    folds_in_verify: bool,
) -> StepTensors:
    """The row-record kernel: joins the host's columns with the cursors.

    ``staged`` [rows, STAGED_COLUMNS] int32, ``query_start_loc`` [rows + 1] int32, ``tokens`` the padded token count,
    ``length`` the longest window. A row whose position in ``blocks`` is not its cursor's is counted, and its line of
    the table not used.
    """
    rows = F.pad(staged, (0, at.ROW_COLUMNS - at.STAGED_COLUMNS))
    refresh(rows, cursors, folds_in_verify=folds_in_verify)
    committed = rows[:, at.CHECKPOINT_LEN] + rows[:, at.PENDING_LEN]
    if blocks is not None and len(blocks.positions):
        stated = blocks.positions[_entries(rows, blocks)]
        misplaced = owned_rows(rows, cursors[rows[:, at.RECORD_ROW].long()]) & (stated != committed)
        rows[:, at.BOUNDARY_SLOT] = torch.where(misplaced, -1, 0)
        counters[at.COUNT_MISPLACED] += misplaced.sum()

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
    allocator = TorchAllocator(rows.device)
    positions = positions.to(torch.int32)
    return StepTensors(rows, query_start_loc, positions, committed, window, folds_in_verify, allocator, blocks)


def refresh(rows: torch.Tensor, cursors: torch.Tensor, *, folds_in_verify: bool) -> None:
    """Reads the cursors of live rows into ``rows``; null rows read as 0."""
    cursor = cursors[rows[:, at.RECORD_ROW].long()]
    live = owned_rows(rows, cursor)
    rows[:, at.CHECKPOINT_SLOT] = torch.where(live, cursor[:, at.CURSOR_SLOT], rows[:, at.CHECKPOINT_SLOT])
    pending = torch.where(live, cursor[:, at.CURSOR_PENDING_LEN], 0)
    rows[:, at.CHECKPOINT_LEN] = torch.where(live, cursor[:, at.CURSOR_CHECKPOINT_LEN], 0)
    rows[:, at.PENDING_LEN] = pending
    rows[:, at.FOLD_LEN] = pending if folds_in_verify else torch.zeros_like(pending)


def null_row(rows: torch.Tensor, row: int) -> None:
    """Makes ``row`` own nothing: later verifies write to scratch, its end changes nothing."""
    columns = rows[row]
    columns[at.CHECKPOINT_SLOT].zero_()
    columns[at.RECORD_ROW].fill_(-1)
    columns[at.BOUNDARY_SLOT :].zero_()


def accepted_counts(
    rows: torch.Tensor,
    counts: torch.Tensor,
    finished: torch.Tensor | None,
    cursors: torch.Tensor,
    counters: torch.Tensor,
) -> torch.Tensor:
    """[rows] int32 of accepted tokens that ``advance`` may apply: clamped for live rows, 0 for all others.

    ``counts`` [rows] in row order. Counts clamps, rows of another generation, windows of finished requests, windows and
    their drafts; moves the finished flags to what ``finished`` [rows] bool says, on top of those that stay.
    """
    cursor_rows = rows[:, at.RECORD_ROW].long()
    cursor = cursors[cursor_rows]
    named = live_rows(rows)
    owned = owned_rows(rows, cursor)
    was_finished = finished_rows(rows, cursor)
    running = owned & ~was_finished
    bounded = torch.minimum(torch.maximum(counts, rows[:, at.MIN_ACCEPTED]), rows[:, at.QUERY_LEN])
    counters[at.COUNT_CLAMPS] += (running & (bounded != counts)).sum()
    counters[at.COUNT_DROPPED] += (named & ~owned).sum()
    counters[at.COUNT_WASTED] += (owned & ~running).sum()
    accepted = torch.where(running, bounded, 0).to(torch.int32)
    decoding = running & (rows[:, at.ROW_KIND] == at.DECODE)
    num_drafts = torch.where(decoding, rows[:, at.QUERY_LEN] - 1, 0)
    counters[at.COUNT_WINDOWS] += decoding.sum()
    counters[at.COUNT_DRAFT_TOKENS] += num_drafts.sum()
    counters[at.COUNT_ACCEPTED :].index_add_(0, accepted, (num_drafts > 0).long())
    flags = was_finished if finished is None else was_finished | finished
    cursors[cursor_rows, at.CURSOR_FINISHED] = torch.where(owned, flags.int(), cursor[:, at.CURSOR_FINISHED])
    return accepted


def advance(
    step: StepTensors,
    accepted: torch.Tensor | None,
    fold: torch.Tensor | bool,
    cursors: torch.Tensor,
    counters: torch.Tensor,
    config: StateConfig,
    num_slots: int,
) -> torch.Tensor:
    """The cursor kernel: moves the cursors past what verify folded and what was accepted, and decides folds.

    ``accepted`` [rows] int32, None for a flush or a cancel; ``fold``: rows that fold all they have, [rows] bool or one
    answer for all. Under "ring", rows whose next window might not fit fold too: pending + T > R. So do rows that reach
    or cross a boundary, a multiple of block_size, if they have a slot for the checkpoint there. Returns the fold plan
    [rows, PLAN_COLUMNS] int32. What moves, of one row at checkpoint_len c with p pending, f of them folded by verify:

                      checkpoint     pending records
        before        c              [c, c + p)
        no fold       c + f          [c + f, c + p + accepted)
        fold          c + p + accepted    none
    """
    rows = step.rows
    cursor_rows = rows[:, at.RECORD_ROW].long()
    cursor = cursors[cursor_rows]
    owned = owned_rows(rows, cursor)
    ends = accepted is not None
    if accepted is None:
        accepted = torch.zeros_like(rows[:, 0])
    before = cursor[:, at.CURSOR_CHECKPOINT_LEN] + cursor[:, at.CURSOR_PENDING_LEN]
    checkpoint_len = cursor[:, at.CURSOR_CHECKPOINT_LEN] + rows[:, at.FOLD_LEN]
    pending = before + accepted - checkpoint_len
    slots = torch.where(owned, rows[:, at.CHECKPOINT_SLOT], 0)
    boundary, boundary_slots, destinations = torch.zeros_like(slots), torch.zeros_like(slots), slots
    if config.block_size is not None:
        boundary = (before + accepted) // config.block_size * config.block_size
        crosses = owned & (boundary > before)
        boundary_slots, destinations = _blocks(step, before + accepted, crosses, config.block_size, num_slots)
        destinations = torch.where(owned, destinations, 0)

    full = pending + config.max_query_len > config.record_capacity
    full &= ends and config.folds_when_full
    reasons: dict[int, torch.Tensor | bool] = {
        (at.FOLD_AT_END if ends else at.FOLD_BY_FLUSH): fold is True,
        at.FOLD_WHEN_FULL: full,
        at.FOLD_BY_MASK: fold,
        at.FOLD_AT_BOUNDARY: (boundary_slots > 0) | (destinations != slots),
    }
    due = torch.zeros_like(owned)
    for holds in reasons.values():
        due |= holds
    count = torch.where(owned & due, pending, 0)
    _count_folds(counters, count, torch.where(owned, rows[:, at.FOLD_LEN], 0), reasons)

    # Rows that own nothing write back what they read: null rows the scratch cursor's 0, late rows their successor's.
    held = torch.where(
        (boundary_slots > 0) & (rows[:, at.BOUNDARY_SLOT] > 0), boundary, cursor[:, at.CURSOR_BOUNDARY_LEN]
    )
    for column, value in (
        (at.CURSOR_CHECKPOINT_LEN, checkpoint_len + count),
        (at.CURSOR_PENDING_LEN, pending - count),
        (at.CURSOR_SLOT, destinations),
        (at.CURSOR_BOUNDARY_LEN, held),
    ):
        cursors[cursor_rows, column] = torch.where(owned, value, cursor[:, column])
    boundary_count = torch.where(boundary_slots > 0, boundary - checkpoint_len, 0)
    record_rows = rows[:, at.RECORD_ROW]
    return torch.stack([slots, destinations, record_rows, checkpoint_len, count, boundary_slots, boundary_count], 1)


def _blocks(
    step: StepTensors, after: torch.Tensor, crosses: torch.Tensor, block_size: int, num_slots: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Where rows that cross a boundary write its checkpoint (0: nowhere), and where their running one moves.

    [rows] int32 each; ``after`` [rows] tokens committed with this window. Without a table the running checkpoint stays.
    With one it moves to column after // block_size, the last if there is none, and the boundary's goes to the column
    before the boundary: block j ends at position (j + 1) * block_size. A line that is too short for both keeps the
    running one. Entries that are no slots count as 0.
    """
    rows, stays = step.rows, step.rows[:, at.CHECKPOINT_SLOT]
    if step.blocks is None:
        return torch.where(crosses, rows[:, at.BOUNDARY_SLOT], 0), stays
    table = step.blocks.slots
    if not table.numel():
        return torch.zeros_like(stays), stays
    lines = table[_entries(rows, step.blocks)]
    lines = torch.where((lines > 0) & (lines < num_slots), lines, 0)
    last = table.shape[1] - 1
    column = after // block_size
    moved = lines.gather(1, column.clamp(max=last)[:, None].long())[:, 0]
    bound = lines.gather(1, (column - 1).clamp(0, last)[:, None].long())[:, 0]
    usable = crosses & (rows[:, at.BOUNDARY_SLOT] == 0)
    destinations = torch.where(usable & (moved > 0), moved, stays)
    # Where both would lie in one slot, both must be the same state.
    apart = (column - 1 <= last) & ((bound != destinations) | (after % block_size == 0))
    return torch.where(usable & apart, bound, 0), destinations


def _count_folds(
    counters: torch.Tensor, count: torch.Tensor, folded_by_verify: torch.Tensor, reasons: dict[int, torch.Tensor | bool]
) -> None:
    """Rows folded, each under the first of ``reasons`` that holds for it; [rows] bool, or one answer."""
    uncounted = count > 0
    for reason, holds in reasons.items():
        counters[at.COUNT_FOLDS + reason] += (uncounted & holds).sum()
        uncounted &= torch.logical_not(holds) if isinstance(holds, torch.Tensor) else not holds
    counters[at.COUNT_FOLDS + at.FOLD_IN_VERIFY] += (folded_by_verify > 0).sum()


def _entries(rows: torch.Tensor, blocks: BlockTable) -> torch.Tensor:
    """[rows] int64: each row's line of the table; any for rows that own nothing."""
    return rows[:, at.BATCH_INDEX].clamp(0, len(blocks.positions) - 1).long()


def verify_fold_plan(rows: torch.Tensor) -> torch.Tensor:
    """The plan of what this step's verify folds, for layers that did not verify when a step is cancelled."""
    columns = [at.CHECKPOINT_SLOT, at.CHECKPOINT_SLOT, at.RECORD_ROW, at.CHECKPOINT_LEN, at.FOLD_LEN]
    # Column by column: an index by a list would be copied to the device, and wait for it.
    return F.pad(torch.stack([rows[:, c] for c in columns], 1), (0, at.PLAN_COLUMNS - len(columns)))


def live_rows(rows: torch.Tensor) -> torch.Tensor:
    """[rows] bool: rows that own a checkpoint slot and a record row. All others never fold and move no cursor."""
    return (rows[:, at.CHECKPOINT_SLOT] > 0) & (rows[:, at.RECORD_ROW] >= 0)


def owned_rows(rows: torch.Tensor, cursor: torch.Tensor) -> torch.Tensor:
    """[rows] bool: live rows whose record slot still has the owner they were made for.

    ``cursor`` [rows, CURSOR_COLUMNS]: their own.
    """
    return live_rows(rows) & (cursor[:, at.CURSOR_GENERATION] == rows[:, at.GENERATION])


def finished_rows(rows: torch.Tensor, cursor: torch.Tensor) -> torch.Tensor:
    """[rows] bool: windows of requests that have finished, for the rows' own cursors [rows, CURSOR_COLUMNS].

    A prompt row says that its request goes on: an end token sampled in the middle of a prompt ended nothing.
    """
    return (cursor[:, at.CURSOR_FINISHED] != 0) & (rows[:, at.ROW_KIND] != at.PROMPT)
