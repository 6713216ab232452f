"""No payloads: lengths and cursors in plain integers. For planning, for simulation, and for tests of the lifecycle.

The arithmetic is that of ``begin``, ``accepted_counts`` and ``advance`` in kernels/reference.py, written once more for
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


@dataclass(slots=True, eq=False)
class MetadataRows:
    """A step's own copy of its rows, in columns."""

    batch: Batch
    checkpoint_slots_list: list[int]
    record_rows: list[int]
    checkpoint_lens: list[int]
    pending_lens: list[int]
    fold_lens: list[int]
    committed: list[int]

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
        return torch.tensor(self.checkpoint_slots_list, dtype=torch.int32, device="cpu")

    @property
    def record_slots(self) -> torch.Tensor:
        return torch.tensor(self.record_rows, dtype=torch.int32, device="cpu")


class MetadataBackend:
    """See Backend for what each call means. Its payload calls take nothing and return None, or refuse."""

    path = "metadata"
    allocated_bytes = 0

    def __init__(self, config: StateConfig) -> None:
        self.config = config
        slots = config.max_requests
        self._checkpoint_len = [0] * slots
        self._pending_len = [0] * slots
        self._generation = [0] * slots
        self._finished = [False] * slots
        self._clamps = self._dropped = self._wasted = 0

    # -- slots

    def admit(self, checkpoint_slot: int, record_row: int, generation: int, sampling: tuple[int, ...]) -> None:
        self._generation[record_row] = generation
        self.load(checkpoint_slot, record_row, None, 0)

    def load(self, checkpoint_slot: int, record_row: int, states: Any, committed_len: int) -> None:
        if states is not None:
            raise SpecStateError("states must be None on backend 'metadata', which holds no payloads")
        self._checkpoint_len[record_row] = committed_len
        self._pending_len[record_row] = 0
        self._finished[record_row] = False

    def release(self, record_row: int) -> None:
        self.load(0, record_row, None, 0)
        self._generation[record_row] = 0

    # -- a step

    def begin(self, batch: Batch, where: str) -> MetadataRows:
        zeros = [0] * len(batch.record_rows)
        rows = MetadataRows(batch, list(batch.checkpoint_slots), list(batch.record_rows), zeros, zeros, zeros, zeros)
        self.refresh(rows)
        rows.committed = [start + n for start, n in zip(rows.checkpoint_lens, rows.pending_lens, strict=True)]
        return rows

    def refresh(self, rows: MetadataRows) -> None:
        owned = [self._owns(rows, row) for row in range(len(rows.record_rows))]
        pairs = list(zip(owned, rows.record_rows, strict=True))
        rows.checkpoint_lens = [self._checkpoint_len[record] if own else 0 for own, record in pairs]
        rows.pending_lens = [self._pending_len[record] if own else 0 for own, record in pairs]
        rows.fold_lens = list(rows.pending_lens) if self.config.folds_in_verify else [0] * len(pairs)

    def null_row(self, rows: MetadataRows, row: int) -> None:
        rows.checkpoint_slots_list[row], rows.record_rows[row] = 0, -1
        rows.checkpoint_lens[row] = rows.pending_lens[row] = rows.fold_lens[row] = 0

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
        # Rows that own nothing may carry any entry.
        pairs = zip(rows.batch.batch_index, rows.record_rows, strict=True)
        return [values[entry] if record >= 0 else 0 for entry, record in pairs]

    def end(self, rows: MetadataRows, counts: list[int], fold: Any, finished: list[bool] | None) -> None:
        config = self.config
        for row, record in enumerate(rows.record_rows):
            if record < 0:
                continue
            if not self._owns(rows, row):
                self._dropped += 1
                continue
            accepted = 0
            # A prompt row says that its request goes on.
            if self._finished[record] and rows.batch.row_kinds[row] != at.PROMPT:
                self._wasted += 1
            else:
                accepted = min(max(counts[row], rows.batch.min_accepted[row]), rows.batch.query_lens[row])
                self._clamps += accepted != counts[row]
                self._finished[record] = finished is not None and bool(finished[row])
            pending = self._pending_len[record] - rows.fold_lens[row] + accepted
            asked = fold is True or (fold is not None and bool(fold[row]))
            full = config.folds_when_full and pending + config.max_query_len > config.record_capacity
            self._move(record, rows.fold_lens[row], pending, asked or full or config.folds_at_end)

    def cancel(self, rows: MetadataRows, unverified: list[int]) -> None:
        for row, record in enumerate(rows.record_rows):
            if record >= 0 and self._owns(rows, row):
                self._move(record, rows.fold_lens[row], self._pending_len[record] - rows.fold_lens[row], False)

    def flush(self, rows: MetadataRows) -> None:
        for row, record in enumerate(rows.record_rows):
            if record >= 0 and self._owns(rows, row):
                self._move(record, 0, self._pending_len[record], True)

    # -- looking at it

    def cursor(self, record_row: int) -> Cursor:
        return Cursor(
            self._checkpoint_len[record_row],
            self._pending_len[record_row],
            self._generation[record_row],
            self._finished[record_row],
        )

    def read(self, checkpoint_slot: int, record_row: int, layer: int, folded_by_verify: bool) -> LayerState:
        raise SpecStateError("read needs payloads, which backend 'metadata' does not hold")

    def counters(self) -> DeviceCounters:
        return DeviceCounters(clamps=self._clamps, dropped_ends=self._dropped, wasted_windows=self._wasted)

    def check_integrity(self, owners: dict[int, tuple[int, bool]]) -> None:
        """Without payloads there is none to check; the manager checks slots and cursors itself."""

    # -- inside

    def _owns(self, rows: MetadataRows, row: int) -> bool:
        record = rows.record_rows[row]
        return record >= 0 and self._generation[record] == rows.batch.generations[row]

    def _move(self, record: int, folded_by_verify: int, pending: int, folds: bool) -> None:
        count = pending if folds else 0
        self._checkpoint_len[record] += folded_by_verify + count
        self._pending_len[record] = pending - count


def _as_list(name: str, values: Any, kind: type, least_len: int, where: str) -> list[Any]:
    if isinstance(values, torch.Tensor):
        integers = (torch.int32, torch.int64)
        if values.dim() != 1 or values.dtype not in ((torch.bool,) if kind is bool else integers):
            raise SpecStateError(
                f"{name} must be one-dimensional and {kind.__name__}, got {list(values.shape)} {values.dtype}{where}"
            )
        if values.device.type != "cpu":
            raise SpecStateError(f"{name} must be on the CPU for backend 'metadata', got {values.device}{where}")
    # Of a tensor, a numpy array or an array.array: Python's own numbers.
    listed = values.tolist() if hasattr(values, "tolist") else values
    if not isinstance(listed, Sequence) or isinstance(listed, str | bytes) or any(type(x) is not kind for x in listed):
        raise SpecStateError(f"{name} must be a sequence of {kind.__name__} or a CPU tensor{where}")
    if len(listed) < least_len:
        raise SpecStateError(f"{name} has {len(listed)} entries, batch_index reads entry {least_len - 1}{where}")
    return list(listed)
