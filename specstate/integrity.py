"""The rules of ownership as checks: slots, owners, cursors, payloads, counts. They read the device and wait for it."""

from collections.abc import Iterable, Sequence

from specstate.backends import Backend
from specstate.config import StateConfig
from specstate.errors import SpecStateError
from specstate.metadata import StepMetadata
from specstate.preempted import Preempted
from specstate.requests import Request
from specstate.slots import SlotPool


def check_slots(
    record_slots: SlotPool, checkpoint_slots: SlotPool, requests: Iterable[Request], preempted: Iterable[Preempted]
) -> None:
    """Slots are conserved, and taken exactly by live and preempted requests. Raises SpecStateError with both sides."""
    owned: list[tuple[int | None, int | None]] = [(r.handle.record_slot, r.checkpoint_slot) for r in requests]
    owned += [(p.record_slot, p.checkpoint_slot) for p in preempted]
    for pool, column in ((record_slots, 0), (checkpoint_slots, 1)):
        pool.check_integrity()
        slots = [slot for pair in owned if (slot := pair[column]) is not None]
        if sorted(slots) != sorted(pool.taken):
            raise SpecStateError(f"{pool.name}s owned are {sorted(slots)}, taken are {sorted(pool.taken)}")


def check_cursors(
    config: StateConfig, backend: Backend, requests: Iterable[Request], preempted: Iterable[Preempted]
) -> None:
    """Each cursor is its owner's and within bounds; that of a preempted request is nobody's, of a free slot clean."""
    free = set(range(config.max_requests))
    for parked in preempted:
        if parked.record_slot is None:
            continue
        free.discard(parked.record_slot)
        cursor = backend.cursor(parked.record_slot)
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
        handle, cursor = request.handle, backend.cursor(request.handle.record_slot)
        free.discard(handle.record_slot)
        if cursor.generation != handle.generation:
            raise SpecStateError(
                f"record slot {handle.record_slot} is of generation {cursor.generation}, its owner is {handle}"
            )
        if not 0 <= cursor.pending_len <= config.record_capacity:
            raise SpecStateError(f"{handle}: pending_len = {cursor.pending_len} is outside 0..{config.record_capacity}")
        if cursor.checkpoint_len < 0:
            raise SpecStateError(f"{handle}: checkpoint_len = {cursor.checkpoint_len} is negative")
        if cursor.pending_len and not request.may_be_pending:
            raise SpecStateError(f"{handle}: {cursor.pending_len} records are pending, the host knows of none")
    for slot in free:
        if any(backend.cursor(slot)):
            raise SpecStateError(f"record slot {slot} is free but its cursor is {backend.cursor(slot)}")


def check_payloads(backend: Backend, requests: Iterable[Request]) -> None:
    """The backend's own rules: bytes, null slot, scratch row, conv histories."""
    # Between the verifies of a step the layers stand at different positions.
    settled = [r for r in requests if r.open_step is None or not r.open_step.between_verifies]
    backend.check_integrity({r.handle.record_slot: (r.checkpoint_slot, r.folded_by_verify) for r in settled})


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
