"""Requests: which slots a live one owns, and what the host knows of its state without asking the device."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any

from specstate.errors import SpecStateError, StaleHandleError, shown
from specstate.metadata import Handle
from specstate.prefixes import Prefix
from specstate.sampling import SamplingParams

if TYPE_CHECKING:
    from specstate.step import Step


@dataclass(slots=True, eq=False, kw_only=True)
class Owner:
    """What the host knows of a request, live or preempted, without asking the device."""

    sampling: SamplingParams
    may_be_pending: bool = False
    """False only when the device surely holds no pending record."""
    in_use: bool = False
    """Loaded or stepped since admit; until then the caller may be writing its checkpoint slot in place."""
    most_committed: int = 0
    """It has committed no more tokens than these, once every step that has ended has run."""
    least_committed: int = 0
    """Nor fewer than these, as far as the host knows."""
    boundary_slot: int = 0
    """Checkpoint slot of its own for boundary checkpoints; 0: none yet."""
    moved: bool = False
    """Its running checkpoint may lie in a slot that a block table named, not in ``checkpoint_slot``."""
    restored_from: Prefix | None = None

    def known(self) -> dict[str, Any]:
        """All of this by name, for another life of the request."""
        return {field.name: getattr(self, field.name) for field in fields(Owner)}


@dataclass(slots=True, eq=False)
class Request(Owner):
    """One life of a request, from admit to release."""

    handle: Handle
    checkpoint_slot: int
    open_step: "Step | None" = field(default=None, repr=False)
    overcounted: int = 0
    """By how much ``most_committed`` is too high, as the last ``committed_len`` saw. Who takes which slot goes by the
    other two alone: a look must not change it."""

    @property
    def record_slot(self) -> int:
        return self.handle.record_slot

    @property
    def folded_by_verify(self) -> bool:
        """Its open step has folded what was pending, in all layers; the cursor learns of it when that step ends."""
        return self.open_step is not None and self.open_step.folded_by_verify

    def may_cross(self, query_len: int, block_size: int) -> bool:
        """Whether a window of ``query_len`` could bring it to a boundary that it has not passed for certain."""
        return (self.most_committed + query_len) // block_size > self.least_committed // block_size

    def stands_at(self, committed_len: int) -> None:
        """The host knows."""
        self.most_committed = self.least_committed = committed_len
        self.overcounted = 0


def check_request_id(request_id: object, what: str) -> None:
    """Raises SpecStateError, naming the argument ``what``, when it is no string that a trace can hold."""
    if not isinstance(request_id, str) or not request_id:
        raise SpecStateError(f"{what} must be a string with at least one character, got {shown(request_id)}")
    try:
        request_id.encode()
    except UnicodeEncodeError:
        raise SpecStateError(f"{what} {request_id!r} cannot be written as UTF-8") from None


class RequestTable:
    """The live requests by id; turns handles into requests and refuses those of another life."""

    def __init__(self) -> None:
        self._by_id: dict[str, Request] = {}

    def __len__(self) -> int:
        return len(self._by_id)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._by_id.values())

    def __contains__(self, request_id: object) -> bool:
        return request_id in self._by_id

    def add(self, request: Request) -> None:
        self._by_id[request.handle.request_id] = request

    def remove(self, request: Request) -> None:
        del self._by_id[request.handle.request_id]

    def find(self, handles: Sequence[Handle | None]) -> list[Request | None] | None:
        """The live request of every handle, None for None; None for all of them where ``of`` would refuse one."""
        by_id = self._by_id
        try:
            requests = [None if handle is None else by_id[handle.request_id] for handle in handles]
        except (KeyError, AttributeError, TypeError):  # not live, or no Handle
            return None
        # The very handles that admit returned are the same without a look into them.
        return requests if [request and request.handle for request in requests] == [*handles] else None

    def all_of(self, handles: object) -> list[Request]:
        """The live requests of a sequence of handles; raises as ``of``, naming the entry."""
        if not isinstance(handles, Sequence):
            raise SpecStateError(f"handles must be a sequence of Handle, not {type(handles).__name__}")
        return [self.of(handle, f"handles[{i}]") for i, handle in enumerate(handles)]

    def of(self, handle: object, what: str = "handle", where: str = "") -> Request:
        """The live request of ``handle``.

        Raises SpecStateError when it is no Handle, StaleHandleError when its request is unknown or lives on under
        another generation. ``what`` and ``where`` name the argument and the step in the message.
        """
        if not isinstance(handle, Handle):
            raise SpecStateError(f"{what} must be a Handle from admit, not {type(handle).__name__}{where}")
        request = self._by_id.get(handle.request_id)
        if request is None:
            raise StaleHandleError(f"{what}: request {handle.request_id!r} is not live{where}")
        if request.handle != handle:
            raise StaleHandleError(
                f"{what}: request {handle.request_id!r} is at generation {request.handle.generation} in record slot "
                f"{request.handle.record_slot}, the handle is of generation {handle.generation} in record slot "
                f"{handle.record_slot}{where}"
            )
        return request
