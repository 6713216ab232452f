"""No payloads: lengths and cursors in plain integers. For planning, for simulation, and for tests of the lifecycle.

The arithmetic is that of ``begin``, ``accepted_counts`` and ``advance`` in kernels/cursors.py, written once more for
one row at a time, so that a step of a few hundred rows costs microseconds.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch

from specstate.backends import Cursor, DeviceCounters, LayerInputs, LayerRecords, LayerState, folds_of
from specstate.batch import Batch
from specstate.config import StateConfig
from specstate.errors import SpecStateError
from specstate.image import ImagePayload, RequestImage, check_image, check_room
from specstate.kernels import rows as at
from specstate.limits import INT32_MAX
from specstate.validation import check_tensor


@dataclass(slots=True)
class MetadataCursor:
    """Where one life of a request stands. A row that comes late moves what nobody reads any more."""

    generation: int
    checkpoint_slot: int = 0
    checkpoint_len: int = 0
    committed_len: int = 0
    boundary_len: int = 0
    finished: bool = False


@dataclass(slots=True, eq=False)
class MetadataRows:
    """A step's own copy of its rows, in columns, those of its batch among them."""

    batch: Batch
    cursors: list[MetadataCursor]
    """Those of the rows' owners; for rows that own nothing one that is nobody's."""
    committed: list[int]
    """When the step began."""
    blocks: list[list[int]] | None
    """By row, what the caller's block table says; none for rows that may not use it."""
    all_decode: bool
    """As of the batch, until a row is nulled."""

    @property
    def query_start_loc(self) -> torch.Tensor:
        lens = torch.tensor([0, *self.batch.query_lens], dtype=torch.int32, device="cpu")
        return lens.cumsum(0, dtype=torch.int32)

    @property
    def positions(self) -> torch.Tensor:
        flat = [start + t for start, n in zip(self.committed, self.batch.query_lens, strict=True) for t in range(n)]
        return torch.tensor(flat + [0] * (self.batch.num_tokens - len(flat)), dtype=torch.int32, device="cpu")

    @property
    def committed_lens(self) -> torch.Tensor:
        return torch.tensor(self.committed, dtype=torch.int32, device="cpu")

    @property
    def checkpoint_slots(self) -> torch.Tensor:
        owners = zip(self.batch.handles, self.cursors, strict=True)
        slots = [0 if owner is None else cursor.checkpoint_slot for owner, cursor in owners]
        return torch.tensor(slots, dtype=torch.int32, device="cpu")

    @property
    def boundary_slots(self) -> torch.Tensor:
        lines = [None] * len(self.cursors) if self.blocks is None else self.blocks
        owners = zip(self.batch.handles, self.batch.boundary_slots, lines, strict=True)
        # A line that may not be used is empty.
        slots = [-1 if owner and line == [] else slot for owner, slot, line in owners]
        return torch.tensor(slots, dtype=torch.int32, device="cpu")

    @property
    def record_slots(self) -> torch.Tensor:
        slots = [-1 if handle is None else handle.record_slot for handle in self.batch.handles]
        return torch.tensor(slots, dtype=torch.int32, device="cpu")


class MetadataBackend:
    """See Backend for what each call means. Its payload calls take nothing and return None, or refuse."""

    path = "metadata"
    allocated_bytes = 0

    def __init__(self, config: StateConfig) -> None:
        self.config = config
        self._cursors = [MetadataCursor(0) for _ in range(config.max_requests)]
        # Stands where it is: windows of a finished request accept nothing.
        self._nobody = MetadataCursor(0, finished=True)
        self._clamps = self._wasted = self._misplaced = self._windows = self._draft_tokens = 0
        self._folds = [0] * (at.COUNT_ACCEPTED - at.COUNT_FOLDS)
        self._accepted = [0] * (config.max_query_len + 1)

    # -- slots

    def release_storage(self) -> None:
        """No storage to release."""

    def bind_storage(self, caller: Any) -> None:
        if caller is not None:
            raise SpecStateError("storage must be None on backend 'metadata', which holds no payloads")

    def admit(self, checkpoint_slot: int, record_row: int, generation: int, sampling: tuple[int, ...]) -> None:
        self._cursors[record_row] = MetadataCursor(generation, checkpoint_slot)

    def load(self, record_row: int, states: Any, committed_len: int) -> None:
        if states is not None:
            raise SpecStateError("states must be None on backend 'metadata', which holds no payloads")
        cursor = self._cursors[record_row]
        cursor.checkpoint_len = cursor.committed_len = committed_len
        cursor.boundary_len, cursor.finished = 0, False

    def release(self, record_row: int) -> None:
        self._cursors[record_row] = MetadataCursor(0)

    def standing(self, record_row: int) -> tuple[int, bool]:
        cursor = self._cursors[record_row]
        return cursor.committed_len, cursor.finished

    def attach(
        self,
        checkpoint_slot: int,
        record_row: int,
        generation: int,
        standing: tuple[int, bool],
        sampling: tuple[int, ...],
    ) -> None:
        committed_len, finished = standing
        self._cursors[record_row] = MetadataCursor(
            generation, checkpoint_slot, committed_len, committed_len, finished=finished
        )

    def park(self, record_row: int, folded_by_verify: bool) -> None:
        cursor = self._cursors[record_row]
        cursor.generation = 0
        if folded_by_verify:
            cursor.checkpoint_len = cursor.committed_len

    def unpark(self, record_row: int, generation: int) -> None:
        self._cursors[record_row].generation = generation

    def copy_state(self, record_row: int, folded_by_verify: bool, destinations: list[int]) -> None:
        """No state to copy; where it stands goes with ``standing``."""

    def copy_slot(self, source: int, destination: int) -> None:
        """No checkpoint to copy."""

    def clear_boundary(self, record_row: int) -> None:
        self._cursors[record_row].boundary_len = 0

    def running_slots(self, record_rows: list[int]) -> torch.Tensor:
        slots = [self._cursors[row].checkpoint_slot for row in record_rows]
        return torch.tensor(slots, dtype=torch.int32, device="cpu")

    def standing_at(self, committed_len: int, finished: bool) -> tuple[int, bool]:
        return committed_len, finished

    def position(self, standing: tuple[int, bool]) -> tuple[int, bool]:
        return standing

    # -- images

    def checkpoint_payload(self, checkpoint_slot: int) -> None:
        """No checkpoint to copy."""

    def put_checkpoint(self, checkpoint_slot: int, payload: ImagePayload | None) -> None:
        """No checkpoint to copy."""

    def export_image(self, record_row: int, folded_by_verify: bool, fold: bool) -> RequestImage:
        cursor = self._cursors[record_row]
        checkpoint_len = cursor.committed_len if fold or folded_by_verify else cursor.checkpoint_len
        return RequestImage(checkpoint_len, cursor.committed_len - checkpoint_len, cursor.finished, None)

    def import_image(
        self, checkpoint_slot: int, record_row: int, generation: int, image: RequestImage, sampling: tuple[int, ...]
    ) -> None:
        """A payload is not looked for; one that is there goes unused."""
        check_image(image, self.config)
        check_room(image.pending_len, self.config)
        self._cursors[record_row] = MetadataCursor(
            generation, checkpoint_slot, image.checkpoint_len, image.committed_len, finished=image.finished
        )

    # -- a step

    def check_blocks(
        self, block_table: Any, positions: Any, least_len: int, where: str
    ) -> tuple[list[list[int]], list[int]]:
        if isinstance(block_table, torch.Tensor):
            check_tensor("block_table", block_table, (None, None), (torch.int32,), torch.device("cpu"), where)
            block_table = block_table.tolist()
        if not isinstance(block_table, Sequence) or isinstance(block_table, str | bytes):
            raise SpecStateError(f"block_table must be a sequence of lines or a CPU tensor{where}")
        lines = [_as_list(f"block_table[{i}]", line, int, 1, where) for i, line in enumerate(block_table)]
        if len({*map(len, lines)}) > 1:
            raise SpecStateError(f"block_table must be two-dimensional, its lines have {[*map(len, lines)]}{where}")
        if len(lines) < least_len:
            raise SpecStateError(
                f"block_table has {len(lines)} entries, batch_index reads entry {least_len - 1}{where}"
            )
        placed = _as_list("positions", positions, int, least_len, where)
        for name, values in (("block_table", [*chain(*lines)]), ("positions", placed)):
            if values and not -INT32_MAX <= min(values) <= max(values) <= INT32_MAX:
                raise SpecStateError(f"{name} must be within int32{where}")
        return lines, placed

    def begin(self, batch: Batch, where: str, blocks: tuple[list[list[int]], list[int]] | None = None) -> MetadataRows:
        table, nobody = self._cursors, self._nobody
        cursors = [nobody if owner is None else table[owner.record_slot] for owner in batch.handles]
        committed = [cursor.committed_len for cursor in cursors]
        lines = None if blocks is None else self._lines(batch, committed, *blocks)
        return MetadataRows(batch, cursors, committed, lines, batch.all_decode)

    def refresh(self, rows: MetadataRows) -> None:
        """The rows hold the cursors themselves."""

    def null_row(self, rows: MetadataRows, row: int) -> None:
        batch = rows.batch
        batch.handles[row], batch.checkpoint_slots[row], batch.row_kinds[row] = None, 0, at.DUMMY
        batch.boundary_slots[row] = 0
        rows.cursors[row], rows.all_decode = self._nobody, False

    def verify(self, rows: MetadataRows, layer: int, inputs: LayerInputs, out: Any, where: str) -> None:
        for name, value in {**inputs._asdict(), "out": out}.items():
            if value is not None:
                raise SpecStateError(f"{name} must be None on backend 'metadata', which holds no payloads{where}")

    def write_records(self, rows: MetadataRows, layer: int, records: LayerRecords, where: str) -> None:
        raise SpecStateError(f"write_records needs payloads, which backend 'metadata' does not hold{where}")

    def sample(self, rows: MetadataRows, target_logits: Any, draft_tokens: Any, draft_probs: Any, where: str) -> Any:
        raise SpecStateError(f"sample needs logits; backend 'metadata' takes counts: step.defer(num_accepted){where}")

    def check_counts(self, name: str, values: Any, least_len: int, where: str) -> list[int]:
        return _as_list(name, values, int, least_len, where)

    def check_mask(self, name: str, values: Any, least_len: int, where: str) -> list[bool]:
        return _as_list(name, values, bool, least_len, where)

    def by_row(self, rows: MetadataRows, values: list[Any]) -> list[Any]:
        owners, index = rows.batch.handles, rows.batch.batch_index
        if index is None and rows.all_decode:
            return values[: len(owners)]
        # For rows that own nothing there may be no entry, or any.
        entries = range(len(owners)) if index is None else index
        return [0 if owner is None else values[entry] for owner, entry in zip(owners, entries, strict=True)]

    def end(self, rows: MetadataRows, counts: list[int], fold: Any, finished: list[bool] | None) -> None:
        config, batch = self.config, rows.batch
        self._pass_verify_folds(rows)
        if not rows.all_decode and at.PROMPT in batch.row_kinds:  # which says that its request goes on
            for cursor, kind in zip(rows.cursors, batch.row_kinds, strict=True):
                cursor.finished &= kind != at.PROMPT
        most_pending, reason = config.most_pending, at.FOLD_WHEN_FULL
        if fold is True or config.folds_at_end:
            most_pending, reason = 0, at.FOLD_AT_END
        before = [] if config.block_size is None else [cursor.committed_len for cursor in rows.cursors]
        num_folds, as_given = 0, rows.all_decode
        for cursor, count, least, query_len in zip(
            rows.cursors, counts, batch.min_accepted, batch.query_lens, strict=True
        ):
            if cursor.finished:
                self._wasted += cursor is not self._nobody
                count, as_given = 0, False
            elif not least <= count <= query_len:
                self._clamps += 1
                count, as_given = min(max(count, least), query_len), False
            committed_len = cursor.committed_len = cursor.committed_len + count
            if committed_len - cursor.checkpoint_len > most_pending:
                cursor.checkpoint_len = committed_len
                num_folds += 1
        self._folds[reason] += num_folds
        self._count_windows(rows, counts, as_given)
        if finished is not None:
            for cursor, ends in zip(rows.cursors, finished, strict=True):
                cursor.finished |= ends
        if isinstance(fold, list):
            for cursor, asked in zip(rows.cursors, fold, strict=True):
                if asked:
                    self._fold(cursor, at.FOLD_BY_MASK)
        if config.block_size is not None:
            self._keep_boundaries(rows, before, config.block_size)

    def cancel(self, rows: MetadataRows, unverified: list[int]) -> None:
        self._pass_verify_folds(rows)

    def flush(self, rows: MetadataRows) -> None:
        for cursor in rows.cursors:
            self._fold(cursor, at.FOLD_BY_FLUSH)

    # -- looking at it

    def wait(self) -> None:
        """No device to wait for."""

    def cursors(self, record_rows: list[int]) -> list[Cursor]:
        return [self.cursor(row) for row in record_rows]

    def cursor(self, record_row: int) -> Cursor:
        cursor = self._cursors[record_row]
        pending_len = cursor.committed_len - cursor.checkpoint_len
        return Cursor(
            checkpoint_len=cursor.checkpoint_len,
            pending_len=pending_len,
            generation=cursor.generation,
            finished=cursor.finished,
            checkpoint_slot=cursor.checkpoint_slot,
            boundary_len=cursor.boundary_len,
        )

    def read(self, record_row: int, layer: int, folded_by_verify: bool) -> LayerState:
        raise SpecStateError("read needs payloads, which backend 'metadata' does not hold")

    def counters(self) -> DeviceCounters:
        return DeviceCounters(
            clamps=self._clamps,
            dropped_ends=0,  # rows that come late were nulled, and are counted by their steps
            wasted_windows=self._wasted,
            misplaced_rows=self._misplaced,
            windows=self._windows,
            draft_tokens=self._draft_tokens,
            folds=folds_of(self._folds),
            accepted=tuple(self._accepted),
        )

    def check_integrity(self, owners: dict[int, bool]) -> None:
        """Without payloads there is none to check; the manager checks slots and cursors itself."""

    # -- inside

    def _count_windows(self, rows: MetadataRows, counts: list[int], as_given: bool) -> None:
        """Windows and their drafts. ``as_given``: every row decodes, and its count stands."""
        batch = rows.batch
        query_lens: Sequence[int] = batch.query_lens
        taken: Sequence[int] = counts
        if not as_given:
            columns = zip(batch.row_kinds, rows.cursors, query_lens, batch.min_accepted, counts, strict=True)
            decoding = [
                (query_len, min(max(count, least), query_len))
                for kind, cursor, query_len, least, count in columns
                if kind == at.DECODE and not cursor.finished
            ]
            query_lens, taken = [n for n, _ in decoding], [n for _, n in decoding]
        self._windows += len(taken)
        self._draft_tokens += sum(query_lens) - len(query_lens)
        if len(taken) < 8 or self.config.max_query_len >= 256:
            for count in taken:
                self._accepted[count] += 1
        else:
            # Bytes are searched in a twentieth of the time that a list takes.
            query_lens, taken = bytes(query_lens), bytes(taken)
            for count in range(1, self.config.max_query_len + 1):
                self._accepted[count] += taken.count(count)
        self._accepted[1] -= query_lens.count(1)  # windows without drafts, of which one token was accepted

    def _fold(self, cursor: MetadataCursor, reason: int) -> None:
        self._folds[reason] += cursor.committed_len > cursor.checkpoint_len
        cursor.checkpoint_len = cursor.committed_len

    def _pass_verify_folds(self, rows: MetadataRows) -> None:
        # All that was pending when the step began: until it ends, nothing else is accepted.
        if self.config.folds_in_verify:
            for cursor in rows.cursors:
                self._fold(cursor, at.FOLD_IN_VERIFY)

    def _lines(
        self, batch: Batch, committed: list[int], table: list[list[int]], positions: list[int]
    ) -> list[list[int]]:
        """By row, its line of a caller's table; none where the position beside it is wrong, or nobody owns the row."""
        entries = range(len(batch.handles)) if batch.batch_index is None else batch.batch_index
        lines: list[list[int]] = []
        for owner, entry, committed_len in zip(batch.handles, entries, committed, strict=True):
            if owner is None:
                lines.append([])
                continue
            placed = positions[entry] == committed_len
            self._misplaced += not placed
            lines.append([slot if 0 < slot <= self.config.num_checkpoints else 0 for slot in table[entry] if placed])
        return lines

    def _keep_boundaries(self, rows: MetadataRows, before: list[int], block_size: int) -> None:
        """``_blocks`` of kernels/cursors.py and what ``advance`` does with it, one row at a time."""
        for row, (cursor, start) in enumerate(zip(rows.cursors, before, strict=True)):
            column = cursor.committed_len // block_size
            if column * block_size <= start:
                continue
            if rows.blocks is None:
                if rows.batch.boundary_slots[row]:
                    self._fold(cursor, at.FOLD_AT_BOUNDARY)
                    cursor.boundary_len = column * block_size
                continue
            line = rows.blocks[row]
            if not line:
                continue
            moved = line[min(column, len(line) - 1)] or cursor.checkpoint_slot
            boundary_slot = line[column - 1] if column <= len(line) else 0
            apart = boundary_slot != moved or cursor.committed_len % block_size == 0
            if (boundary_slot and apart) or moved != cursor.checkpoint_slot:
                self._fold(cursor, at.FOLD_AT_BOUNDARY)
            cursor.checkpoint_slot = moved


def _as_list(name: str, values: Any, kind: type, least_len: int, where: str) -> list[Any]:
    if isinstance(values, torch.Tensor):
        if values.device.type != "cpu":
            raise SpecStateError(f"{name} must be on the CPU for backend 'metadata', got {values.device}{where}")
        dtypes = (torch.bool,) if kind is bool else (torch.int32, torch.int64)
        check_tensor(name, values, (None,), dtypes, values.device, where)
    # Of a tensor, a numpy array or an array.array: Python's own numbers.
    listed = values
    if hasattr(values, "tolist"):
        try:
            listed = values.tolist()
        except Exception:  # whatever has a method of that name, and means another thing by it
            listed = None
    if not isinstance(listed, Sequence) or isinstance(listed, str | bytes) or {*map(type, listed)} - {kind}:
        raise SpecStateError(f"{name} must be a sequence of {kind.__name__} or a CPU tensor{where}")
    if len(listed) < least_len:
        raise SpecStateError(f"{name} has {len(listed)} entries, batch_index reads entry {least_len - 1}{where}")
    return list(listed)
