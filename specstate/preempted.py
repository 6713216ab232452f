"""Requests that are not live but keep their state: what preemption and retraction leave behind until they resume."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from specstate.errors import SpecStateError, shown
from specstate.image import ImagePayload
from specstate.requests import Owner


@dataclass(slots=True, eq=False)
class Preempted(Owner):
    """A request between two lives. Which slots it holds says how it was preempted.

    With its records: all its slots. Folded: the checkpoint slot. Retracted to the host: none.
    """

    request_id: str
    checkpoint_slot: int | None
    record_slot: int | None
    standing: Any
    """The backend's own note of where the request stands, when its record slot is given up."""
    payload: ImagePayload | None = None
    """The checkpoint on the host, when its checkpoint slot is given up; None without payloads."""


class PreemptedTable:
    """The preempted requests by id, in the order in which they were preempted."""

    def __init__(self) -> None:
        self._by_id: dict[str, Preempted] = {}

    def __len__(self) -> int:
        return len(self._by_id)

    def __iter__(self) -> Iterator[Preempted]:
        return iter(self._by_id.values())

    def __contains__(self, request_id: object) -> bool:
        return request_id in self._by_id

    def add(self, preempted: Preempted) -> None:
        self._by_id[preempted.request_id] = preempted

    def remove(self, preempted: Preempted) -> None:
        del self._by_id[preempted.request_id]

    def of(self, request_id: object, verb: str) -> Preempted:
        """The request of that id; raises SpecStateError when none of that id is preempted."""
        found = self._by_id.get(request_id) if isinstance(request_id, str) else None
        if found is None:
            raise SpecStateError(f"{verb}: request_id = {shown(request_id)} names no preempted request")
        return found
