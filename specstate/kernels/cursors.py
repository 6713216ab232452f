"""The rows of a step and the cursors of its record slots, in plain torch; see kernels/rows.py for their columns."""

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from specstate.kernels import rows as at
from specstate.kernels.arena import Allocator, TorchAllocator


class Window(NamedTuple):
    """Where the tokens of a step lie; fixed when the step begins, the same for every layer."""

    token_row: torch.Tensor  # [tokens] int64, row of each token; for tokens of no row: any, see token_live
    token_offset: torch.Tensor  # [tokens] int64, place inside its window
    token_live: torch.Tensor  # [tokens] bool, False for padding
    gather: torch.Tensor  # [length, rows] int64, token of each window entry; entries past query_len repeat a real one
    length: int  # longest window of the step


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
            )

    @property
    def num_tokens(self) -> int:
        """Padding included."""
        return len(self.positions)

    @property
    def checkpoint_slots(self) -> torch.Tensor:
        return self.rows[:, at.CHECKPOINT_SLOT]

    @property
    def record_slots(self) -> torch.Tensor:
        return self.rows[:, at.RECORD_ROW]


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
    allocator = TorchAllocator(rows.device)
    return StepTensors(rows, query_start_loc, positions.to(torch.int32), committed, window, folds_in_verify, allocator)


def refresh(rows: torch.Tensor, cursors: torch.Tensor, *, folds_in_verify: bool) -> None:
    """Reads the cursors of live rows into ``rows``; null rows read as 0."""
    cursor = cursors[rows[:, at.RECORD_ROW].long()]
    live = owned_rows(rows, cursor)
    pending = torch.where(live, cursor[:, at.CURSOR_PENDING_LEN], 0)
    rows[:, at.CHECKPOINT_LEN] = torch.where(live, cursor[:, at.CURSOR_CHECKPOINT_LEN], 0)
    rows[:, at.PENDING_LEN] = pending
    rows[:, at.FOLD_LEN] = pending if folds_in_verify else torch.zeros_like(pending)


def null_row(rows: torch.Tensor, row: int) -> None:
    """Makes ``row`` own nothing: later verifies write to scratch, its end changes nothing."""
    columns = rows[row]
    columns[at.CHECKPOINT_SLOT].zero_()
    columns[at.RECORD_ROW].fill_(-1)
    columns[at.CHECKPOINT_LEN :].zero_()


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
    owned = owned_rows(rows, cursor)
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
    owned = owned_rows(rows, cursor)
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
    none = torch.zeros_like(count)
    return torch.stack([slots, slots, rows[:, at.RECORD_ROW], checkpoint_len, count, none, none], 1)


def verify_fold_plan(rows: torch.Tensor) -> torch.Tensor:
    """The plan of what this step's verify folds, for layers that did not verify when a step is cancelled."""
    columns = [at.CHECKPOINT_SLOT, at.CHECKPOINT_SLOT, at.RECORD_ROW, at.CHECKPOINT_LEN, at.FOLD_LEN]
    # Column by column: an index by a list would be copied to the device, and wait for it.
    return F.pad(torch.stack([rows[:, c] for c in columns], 1), (0, at.PLAN_COLUMNS - len(columns)))


def live_rows(rows: torch.Tensor) -> torch.Tensor:
    """[rows] bool: rows that own a checkpoint slot and a record row. All others never fold and move no cursor."""
    return (rows[:, at.CHECKPOINT_SLOT] > 0) & (rows[:, at.RECORD_ROW] >= 0)


def owned_rows(rows: torch.Tensor, cursor: torch.Tensor) -> torch.Tensor:
    """[rows] bool: live rows whose record slot still has the owner they were made for; their ``cursor`` [rows, 4]."""
    return live_rows(rows) & (cursor[:, at.CURSOR_GENERATION] == rows[:, at.GENERATION])


def finished_rows(rows: torch.Tensor, cursor: torch.Tensor) -> torch.Tensor:
    """[rows] bool: windows of requests that have finished, for the rows' own cursors [rows, 4].

    A prompt row says that its request goes on: an end token sampled in the middle of a prompt ended nothing.
    """
    return (cursor[:, at.CURSOR_FINISHED] != 0) & (rows[:, at.ROW_KIND] != at.PROMPT)
