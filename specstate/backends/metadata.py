"""No payloads: lengths and cursors in plain integers. For planning, for simulation, and for tests of the lifecycle.

The arithmetic is that of ``begin``, ``accepted_counts`` and ``advance`` in kernels/cursors.py, written once more for
one row at a time, so that a step of a few hundred rows costs microseconds.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from specstate.backends import Cursor, DeviceCounters, LayerInputs, LayerRecords, LayerState
from specstate.batch import Batch
from specstate.config import StateConfig
from specstate.errors import SpecStateError
from specstate.kernels import rows as at
from specstate.limits import INT32_MAX
from specstate.validation import check_tensor


@dataclass(slots=True)
class MetadataCursor:
    """Where one life of a request stands. A row that comes late moves what nobody reads any more."""

    generation: int
    checkpoint_len: int = 0
    committed_len: int = 0
    finished: bool = False


@dataclass(slots=True, eq=False)
class MetadataRows:
    """A step's own copy of its rows, in columns, those of its batch among them."""

    batch: Batch
    cursors: list[MetadataCursor]
    """Those of the rows' owners; for rows that own nothing one that is nobody's."""
    committed: list[int]
    """When the step began."""

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
        return torch.tensor(self.batch.checkpoint_slots, dtype=torch.int32, device="cpu")

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
        self._clamps = self._wasted = 0

    # -- slots

    def admit(self, checkpoint_slot: int, record_row: int, generation: int, sampling: tuple[int, ...]) -> None:
        self._cursors[record_row] = MetadataCursor(generation)

    def load(self, checkpoint_slot: int, record_row: int, states: Any, committed_len: int) -> None:
        if states is not None:
            raise SpecStateError("states must be None on backend 'metadata', which holds no payloads")
        cursor = self._cursors[record_row]
        cursor.checkpoint_len, cursor.committed_len, cursor.finished = committed_len, committed_len, False

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
        self._cursors[record_row] = MetadataCursor(generation, committed_len, committed_len, finished)

    def park(self, record_row: int, folded_by_verify: bool) -> None:
        cursor = self._cursors[record_row]
        cursor.generation = 0
        if folded_by_verify:
            cursor.checkpoint_len = cursor.committed_len

    def unpark(self, record_row: int, generation: int) -> None:
        self._cursors[record_row].generation = generation

    def copy_state(
        self, checkpoint_slot: int, record_row: int, folded_by_verify: bool, destinations: list[int]
    ) -> None:
        """No state to copy; where it stands goes with ``standing``."""

    def image(self, checkpoint_slot: int) -> None:
        """No checkpoint to copy."""

    def put_image(self, checkpoint_slot: int, image: None) -> None:
        """No checkpoint to copy."""

    # -- a step

    def begin(self, batch: Batch, where: str) -> MetadataRows:
        table, nobody = self._cursors, self._nobody
        cursors = [nobody if owner is None else table[owner.record_slot] for owner in batch.handles]
        return MetadataRows(batch, cursors, [cursor.committed_len for cursor in cursors])

    def refresh(self, rows: MetadataRows) -> None:
        """The rows hold the cursors themselves."""

    def null_row(self, rows: MetadataRows, row: int) -> None:
        batch = rows.batch
        batch.handles[row], batch.checkpoint_slots[row], batch.row_kinds[row] = None, 0, at.DUMMY
        rows.cursors[row] = self._nobody

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
        if index is None and all(owners):
            return values[: len(owners)]
        # For rows that own nothing there may be no entry, or any.
        entries = range(len(owners)) if index is None else index
        return [0 if owner is None else values[entry] for owner, entry in zip(owners, entries, strict=True)]

    def end(self, rows: MetadataRows, counts: list[int], fold: Any, finished: list[bool] | None) -> None:
        config, batch = self.config, rows.batch
        self._pass_verify_folds(rows)
        if at.PROMPT in batch.row_kinds:  # which says that its request goes on
            for cursor, kind in zip(rows.cursors, batch.row_kinds, strict=True):
                cursor.finished &= kind != at.PROMPT
        most_pending = config.record_capacity - config.max_query_len if config.folds_when_full else INT32_MAX
        if fold is True or config.folds_at_end:
            most_pending = 0
        for cursor, count, least, query_len in zip(
            rows.cursors, counts, batch.min_accepted, batch.query_lens, strict=True
        ):
            if cursor.finished:
                self._wasted += cursor is not self._nobody
                count = 0
            elif not least <= count <= query_len:
                self._clamps += 1
                count = min(max(count, least), query_len)
            committed_len = cursor.committed_len = cursor.committed_len + count
            if committed_len - cursor.checkpoint_len > most_pending:
                cursor.checkpoint_len = committed_len
        if finished is not None:
            for cursor, ends in zip(rows.cursors, finished, strict=True):
                cursor.finished |= ends
        if isinstance(fold, list):
            for cursor, asked in zip(rows.cursors, fold, strict=True):
                if asked:
                    cursor.checkpoint_len = cursor.committed_len

    def cancel(self, rows: MetadataRows, unverified: list[int]) -> None:
        self._pass_verify_folds(rows)

    def flush(self, rows: MetadataRows) -> None:
        for cursor in rows.cursors:
            cursor.checkpoint_len = cursor.committed_len

    # -- looking at it

    def cursor(self, record_row: int) -> Cursor:
        cursor = self._cursors[record_row]
        pending_len = cursor.committed_len - cursor.checkpoint_len
        return Cursor(cursor.checkpoint_len, pending_len, cursor.generation, cursor.finished)

    def read(self, checkpoint_slot: int, record_row: int, layer: int, folded_by_verify: bool) -> LayerState:
        raise SpecStateError("read needs payloads, which backend 'metadata' does not hold")

    def counters(self) -> DeviceCounters:
        # Rows that come late were nulled, and are counted by their steps.
        return DeviceCounters(clamps=self._clamps, dropped_ends=0, wasted_windows=self._wasted)

    def check_integrity(self, owners: dict[int, tuple[int, bool]]) -> None:
        """Without payloads there is none to check; the manager checks slots and cursors itself."""

    # -- inside

    def _pass_verify_folds(self, rows: MetadataRows) -> None:
        # All that was pending when the step began: until it ends, nothing else is accepted.
        if self.config.folds_in_verify:
            self.flush(rows)


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
