"""The rules of ownership as checks: cursors, payloads, block tables, counts. They read the device and wait for it."""

from collections.abc import Iterable, Sequence
from typing import Any

from specstate.backends import Backend
from specstate.config import StateConfig
from specstate.errors import SpecStateError
from specstate.metadata import StepMetadata
from specstate.preempted import Preempted
from specstate.requests import Request


def check_cursors(
    config: StateConfig,
    backend: Backend,
    requests: Iterable[Request],
    preempted: Iterable[Preempted],
    lent: set[int],
) -> None:
    """Each cursor is its owner's and within bounds; that of a preempted request is nobody's, of a free slot clean."""
    free = set(range(config.max_requests))
    cursors = backend.cursors([*free])
    runs_in: dict[int, str] = {}
    for parked in preempted:
        if parked.record_slot is None:
            continue
        free.discard(parked.record_slot)
        cursor = cursors[parked.record_slot]
        runs_in[cursor.checkpoint_slot] = parked.request_id
        if cursor.generation != 0:
            raise SpecStateError(
                f"record slot {parked.record_slot} is of generation {cursor.generation}, its owner "
                f"{parked.request_id!r} is preempted"
            )
        if cursor.pending_len and not parked.may_be_pending:
            raise SpecStateError(
                f"{parked.request_id!r}, preempted: {cursor.pending_len} records are pending, the host knows of none"
            )
    for request in requests:
        handle, cursor = request.handle, cursors[request.record_slot]
        free.discard(handle.record_slot)
        if cursor.generation != handle.generation:
            raise SpecStateError(
                f"record slot {handle.record_slot} is of generation {cursor.generation}, its owner is {handle}"
            )
        if not 0 <= cursor.pending_len <= config.record_capacity:
            raise SpecStateError(f"{handle}: pending_len = {cursor.pending_len} is outside 0..{config.record_capacity}")
        if cursor.checkpoint_len < 0:
            raise SpecStateError(f"{handle}: checkpoint_len = {cursor.checkpoint_len} is negative")
        slot = cursor.checkpoint_slot
        if slot != request.checkpoint_slot and not (request.moved and slot in lent):
            raise SpecStateError(
                f"{handle}: its cursor names checkpoint slot {slot}, it owns {request.checkpoint_slot}"
            )
        if runs_in.setdefault(slot, handle.request_id) != handle.request_id:
            raise SpecStateError(f"{handle} and {runs_in[slot]!r} both have their running checkpoint in slot {slot}")
        if cursor.boundary_len and not request.boundary_slot:
            raise SpecStateError(f"{handle}: a boundary checkpoint at {cursor.boundary_len} lies in no slot")
        if cursor.pending_len and not request.may_be_pending:
            raise SpecStateError(f"{handle}: {cursor.pending_len} records are pending, the host knows of none")
    for slot in free:
        if any(cursors[slot]):
            raise SpecStateError(f"record slot {slot} is free but its cursor is {cursors[slot]}")


def check_payloads(backend: Backend, requests: Iterable[Request]) -> None:
    """The backend's own rules: bytes, null slot, scratch row, conv histories."""
    # Between the verifies of a step the layers stand at different positions.
    settled = [r for r in requests if r.open_step is None or not r.open_step.between_verifies]
    backend.check_integrity({r.record_slot: r.folded_by_verify for r in settled})


def check_lines(
    config: StateConfig,
    backend: Backend,
    metadata: StepMetadata,
    requests: Sequence[Request | None],
    blocks: Any,
    lent: set[int],
    runs_in: dict[int, str],
    where: str,
) -> None:
    """A caller's block table: its positions are the cursors', its slots are reserved, and no two rows write one.

    runs_in: whose running checkpoint lies in a slot; nobody else may write there.
    """
    table, positions = (column.tolist() if hasattr(column, "tolist") else column for column in blocks)
    block_size = config.block_size
    assert block_size is not None
    writers: dict[int, int] = {}
    cursors = iter(backend.cursors([request.record_slot for request in requests if request is not None]))
    for row, request in enumerate(requests):
        if request is None:
            continue
        entry = row if metadata.batch_index is None else metadata.batch_index[row]
        cursor = next(cursors)
        if positions[entry] != cursor.committed_len:
            raise SpecStateError(
                f"positions[{entry}] = {positions[entry]} of row {row} (request {request.handle.request_id!r}), which "
                f"stands at {cursor.committed_len}{where}"
            )
        for column, slot in enumerate(table[entry]):
            name = f"block_table[{entry}][{column}] = {slot} of row {row}"
            if slot not in lent and slot not in (0, request.checkpoint_slot):
                raise SpecStateError(f"{name} is not reserved{where}")
            # Blocks that lie behind the row are read by whoever shares them, and written no more.
            if not slot or column < min(cursor.committed_len // block_size, len(table[entry]) - 1):
                continue
            if writers.setdefault(slot, row) != row:
                raise SpecStateError(f"{name} is also one that row {writers[slot]} may write{where}")
            if runs_in.get(slot, request.handle.request_id) != request.handle.request_id:
                raise SpecStateError(f"{name} holds the running checkpoint of request {runs_in[slot]!r}{where}")


def check_counts(
    backend: Backend,
    metadata: StepMetadata,
    requests: Sequence[Request | None],
    counts: Sequence[int],
    name: str,
    where: str,
) -> None:
    """Accepted counts, by row, are within bounds; the end of a finished request's window is not read."""
    for row, (request, least) in enumerate(zip(requests, metadata.least_accepted, strict=True)):
        if request is None:
            continue
        if backend.cursor(request.handle.record_slot).finished and not metadata.is_prompt(row):
            continue
        query_len = metadata.query_lens[row]
        if not least <= counts[row] <= query_len:
            raise SpecStateError(
                f"{name} = {counts[row]} of row {row} is outside {least}..query_lens[{row}] = {query_len}{where}"
            )
