"""Who owns which slot: live and preempted requests, published prefixes, slots lent to the caller."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from specstate.config import StateConfig
from specstate.errors import CapacityError, SpecStateError, shown
from specstate.limits import MAX_GENERATION
from specstate.metadata import Handle
from specstate.preempted import Preempted, PreemptedTable
from specstate.prefixes import Prefix, PrefixTable
from specstate.requests import Request, RequestTable, check_request_id
from specstate.sampling import SamplingParams
from specstate.slots import SlotPool

if TYPE_CHECKING:
    from specstate.backends import Backend


class Ledger:
    """Every slot is free or has one owner. What runs short of checkpoint slots evicts prefixes that nobody uses."""

    def __init__(self, config: StateConfig) -> None:
        self._config = config
        self.requests = RequestTable()
        self.preempted = PreemptedTable()
        self.prefixes = PrefixTable()
        self.lent: set[int] = set()
        """Checkpoint slots that the caller's block tables name."""
        self.record_slots = SlotPool("record slot", 0, config.max_requests)
        self.checkpoint_slots = SlotPool("checkpoint slot", 1, config.num_checkpoints)
        self.generation = 0
        """Of the last life that began."""

    # -- what may be taken

    @property
    def num_checkpoints_left(self) -> int:
        """Free checkpoint slots, and those that eviction would free."""
        return self.checkpoint_slots.num_free + self.prefixes.num_evictable

    def check_new(self, request_id: object, sampling: object, entry: str = "") -> SamplingParams:
        """Raises what refuses a new request of that id; its sampling parameters. ``entry``: "[i]" of sequences."""
        name = f"request_ids{entry}" if entry else "request_id"
        check_request_id(request_id, name)
        if not isinstance(sampling, SamplingParams):
            raise SpecStateError(
                f"sampling{entry} must be SamplingParams, not {type(sampling).__name__} (request {request_id!r})"
            )
        sampling = sampling.checked()
        if request_id in self.requests:
            raise SpecStateError(f"{name} {request_id!r} is live already")
        if request_id in self.preempted:
            raise SpecStateError(f"{name} {request_id!r} is preempted: resume or discard it")
        return sampling

    def require(self, records: int, checkpoints: int, what: str, spared: Prefix | None = None) -> None:
        """Raises CapacityError without so many slots, free or evictable; ``spared`` is not to be evicted for them."""
        if self.generation > MAX_GENERATION:
            raise CapacityError(f"{what}: {self.generation} lives have begun, there is no generation for another")
        evictable = self.prefixes.num_evictable - (spared is not None and not spared.num_users)
        if records > self.record_slots.num_free or checkpoints > self.checkpoint_slots.num_free + evictable:
            raise CapacityError(
                f"{what}: free are {self.record_slots.num_free} of max_requests = {self._config.max_requests} record "
                f"slots and {self.checkpoint_slots.num_free} of num_checkpoints = {self._config.num_checkpoints} "
                f"checkpoint slots, {evictable} more hold prefixes that may be evicted"
            )

    def take_checkpoint(self) -> int:
        """A checkpoint slot; evicts a prefix when none is free. ``require`` has said that there is one."""
        return self.checkpoint_slots.allocate() if self.checkpoint_slots.num_free else self.prefixes.evict()

    @contextmanager
    def new_lives(
        self,
        backend: "Backend",
        request_ids: Sequence[str],
        record_slot: int | None = None,
        checkpoint_slot: int | None = None,
    ) -> Iterator[tuple[list[Handle], list[int]]]:
        """Handles of the next generations and checkpoint slots, new ones unless one is kept.

        Around what the device does for them: when that fails, by running out of memory say, all is as it was, but for
        prefixes that were evicted.
        """
        count = len(request_ids)
        record_slots = [self.record_slots.allocate() for _ in range(count)] if record_slot is None else []
        checkpoint_slots = [self.take_checkpoint() for _ in range(count)] if checkpoint_slot is None else []
        rows = record_slots if record_slot is None else [record_slot]
        slots = checkpoint_slots if checkpoint_slot is None else [checkpoint_slot]
        generations = range(self.generation + 1, self.generation + 1 + count)
        try:
            handles = [Handle(*life) for life in zip(request_ids, rows, generations, strict=True)]
            yield handles, slots
        except BaseException:
            for slot in reversed(record_slots):
                backend.release(slot)
                self.record_slots.free(slot)
            for slot in reversed(checkpoint_slots):
                self.checkpoint_slots.free(slot)
            raise
        self.generation += count

    # -- what is given back

    def end(self, owner: Request | Preempted) -> None:
        """A request has ended, live or preempted: its slots are free, the prefix it came from has one user less."""
        self._free(owner, None)
        if owner.restored_from is not None:
            self.prefixes.leave(owner.restored_from)

    def put_aside(self, request: Request, preempted: Preempted) -> None:
        """A request was preempted: what it does not keep is free."""
        self._free(request, preempted)
        self.preempted.add(preempted)

    def _free(self, owner: Request | Preempted, keeper: Preempted | None) -> None:
        if isinstance(owner, Request):
            self.requests.remove(owner)
        else:
            self.preempted.remove(owner)
        if owner.record_slot is not None and (keeper is None or keeper.record_slot is None):
            self.record_slots.free(owner.record_slot)
        if owner.checkpoint_slot is not None and (keeper is None or keeper.checkpoint_slot is None):
            self.checkpoint_slots.free(owner.checkpoint_slot)
        if owner.boundary_slot and (keeper is None or not keeper.boundary_slot):
            self.checkpoint_slots.free(owner.boundary_slot)

    def give_back_checkpoint(self, slot: int) -> None:
        """The other way of ``take_checkpoint``, when what it was for has failed."""
        self.checkpoint_slots.free(slot)

    def order(self) -> tuple[int, list[int], list[int]]:
        """Which generation and which slots come next: for ``restore_order``, of a ledger that holds nothing."""
        return self.generation, self.record_slots.order, self.checkpoint_slots.order

    def restore_order(self, order: tuple[int, list[int], list[int]]) -> None:
        """Nothing is held again, and what comes next is what would have come."""
        self.generation, self.record_slots.order, self.checkpoint_slots.order = order

    def drop_prefixes(self) -> None:
        """All requests have ended; nothing is published any more."""
        for slot in self.prefixes.drop():
            self.checkpoint_slots.free(slot)

    # -- slots for the caller's block tables

    def lend(self, count: object) -> list[int]:
        """``count`` checkpoint slots for the caller. Raises CapacityError when they are not there."""
        if type(count) is not int or count < 1:
            raise SpecStateError(f"reserve_checkpoints: n = {shown(count)} must be a number of slots, 1 or more")
        self.require(0, count, f"no {shown(count)} checkpoint slots to reserve")
        slots = [self.take_checkpoint() for _ in range(count)]
        self.lent.update(slots)
        return slots

    def check_lent(self, slots: object) -> None:
        """Raises SpecStateError when one of ``slots`` was not lent or is named twice."""
        if not isinstance(slots, Sequence) or isinstance(slots, str | bytes):
            raise SpecStateError(f"return_checkpoints: slots = {shown(slots)} must be a sequence of slots")
        named: set[int] = set()
        for i, slot in enumerate(slots):
            if type(slot) is not int or slot not in self.lent:
                raise SpecStateError(f"return_checkpoints: slots[{i}] = {shown(slot)} is not reserved")
            if slot in named:
                raise SpecStateError(f"return_checkpoints: slots[{i}] = {slot} is named twice")
            named.add(slot)

    def take_back(self, slots: Sequence[int]) -> None:
        """The caller needs them no more."""
        for slot in slots:
            self.lent.remove(slot)
            self.checkpoint_slots.free(slot)

    # -- care

    def check_integrity(self) -> None:
        """Slots are conserved, and taken exactly by their owners. Raises SpecStateError with both sides of a breach."""
        owned: list[tuple[int | None, int | None]] = [(r.handle.record_slot, r.checkpoint_slot) for r in self.requests]
        owned += [(p.record_slot, p.checkpoint_slot) for p in self.preempted]
        owners: list[Request | Preempted] = [*self.requests, *self.preempted]
        owned += [(None, owner.boundary_slot or None) for owner in owners]
        owned += [(None, prefix.checkpoint_slot) for prefix in self.prefixes]
        owned += [(None, slot) for slot in self.lent]
        for pool, column in ((self.record_slots, 0), (self.checkpoint_slots, 1)):
            pool.check_integrity()
            slots = [slot for pair in owned if (slot := pair[column]) is not None]
            if sorted(slots) != sorted(pool.taken):
                raise SpecStateError(f"{pool.name}s owned are {sorted(slots)}, taken are {sorted(pool.taken)}")
        for prefix in self.prefixes:
            users = sum(owner.restored_from is prefix for owner in owners)
            if users != prefix.num_users:
                raise SpecStateError(f"{prefix.key} is used by {users} requests, counted are {prefix.num_users}")
