"""Published prefixes, and checkpoint slots for the caller's block tables."""

from collections.abc import Sequence

from specstate.errors import SpecStateError
from specstate.manager.core import Core
from specstate.metadata import Handle
from specstate.prefixes import PrefixKey
from specstate.profiling import phase
from specstate.requests import Request
from specstate.sampling import SamplingParams


class Publishing(Core):
    """Published prefixes, and checkpoint slots for the caller's block tables. Part of StateManager."""

    @phase("specstate::publish")
    def publish(self, handle: Handle, key: PrefixKey | Sequence[int]) -> None:
        """Keeps the state after exactly ``key.num_tokens`` tokens of a request in a checkpoint slot of its own.

        key: a PrefixKey, or the token ids themselves. The request must hold that state: what it has committed, what its
        checkpoint holds, or its latest boundary checkpoint, which is handed over without a copy while the request is in
        no step. A key that is published already counts as used. Evicts another prefix when slots run short; waits for
        the device. Raises StaleHandleError, StepOrderError between the verifies of an open step, SpecStateError for a
        position that the request does not hold, CapacityError without a slot.
        """
        request = self._requests.of(handle)
        key = PrefixKey.of(key)
        self._refuse_between_verifies("publish", request)
        prefixes = self._ledger.prefixes
        prefix = prefixes.get(key)
        if prefix is None:
            prefix = prefixes.add(key, self._take_state(request, key.num_tokens))
        else:
            prefixes.touch(key)
        self._record("publish", handle=handle, key=key, checkpoint_slot=prefix.checkpoint_slot)

    def published(self) -> dict[PrefixKey, int]:
        """The published keys and the checkpoint slots of their states: those in use, then those that nobody uses, in
        the order in which they would be evicted."""
        return {prefix.key: prefix.checkpoint_slot for prefix in self._ledger.prefixes}

    def is_published(self, key: PrefixKey | Sequence[int]) -> bool:
        """Whether ``restore`` would find it; counts neither as a hit nor as a use."""
        return PrefixKey.of(key) in self._ledger.prefixes

    @phase("specstate::restore")
    def restore(
        self, key: PrefixKey | Sequence[int], request_id: str, sampling: SamplingParams | None = None
    ) -> Handle:
        """A request that stands at ``key.num_tokens``, with a copy of the state published there.

        Until it ends, the prefix is not evicted. Raises CapacityError without a record and a checkpoint slot,
        SpecStateError when nothing is published under the key, which is counted, and as ``admit``.
        """
        self._require_storage("restore")
        sampling = self._ledger.check_new(request_id, SamplingParams() if sampling is None else sampling)
        key = PrefixKey.of(key)
        prefixes = self._ledger.prefixes
        prefix = prefixes.get(key)
        if prefix is None:
            prefixes.misses += 1
            raise SpecStateError(f"restore: no state is published under {key} (request {request_id!r})")
        self._ledger.require(1, 1, f"no slot for request {request_id!r}", spared=prefix)
        prefixes.join(prefix)
        try:
            with self._ledger.new_lives(self._backend, [request_id]) as ([handle], [checkpoint_slot]):
                standing, columns = self._backend.standing_at(key.num_tokens, finished=False), sampling.columns()
                self._backend.copy_slot(prefix.checkpoint_slot, checkpoint_slot)
                self._backend.attach(checkpoint_slot, handle.record_slot, handle.generation, standing, columns)
        except BaseException:
            prefixes.leave(prefix)
            raise
        prefixes.hits += 1
        request = Request(handle, checkpoint_slot, sampling=sampling, in_use=True, restored_from=prefix)
        request.stands_at(key.num_tokens)
        self._requests.add(request)
        self._record("restore", handle=handle, key=key, checkpoint_slot=checkpoint_slot, sampling=sampling)
        return handle

    # -- slots for block tables

    def reserve_checkpoints(self, n: int) -> list[int]:
        """``n`` checkpoint slots for the caller's block tables, its own until ``return_checkpoints``.

        Evicts published prefixes when slots run short. Raises CapacityError when they are not there, SpecStateError for
        a bad n.
        """
        self._require_storage("reserve_checkpoints")
        slots = self._ledger.lend(n)
        self._record("reserve", checkpoint_slots=tuple(slots))
        return slots

    def return_checkpoints(self, slots: Sequence[int]) -> None:
        """Gives reserved slots back; waits for the device.

        Raises SpecStateError for a slot that is not reserved or named twice, and while a request's running checkpoint
        lies in one of them, StepOrderError while a request is in a step with a block table, whose end may write any of
        them; nothing is changed then.
        """
        self._ledger.check_lent(slots)
        for request in self._requests:
            if request.open_step is not None and request.open_step.has_block_table:
                self._refuse_open_step("return_checkpoints", request)
        for slot, request_id in self._moved().items():
            if slot in slots:
                raise SpecStateError(
                    f"return_checkpoints: the running checkpoint of request {request_id!r} lies in slot {slot}"
                )
        self._ledger.take_back(slots)
        self._record("return", checkpoint_slots=tuple(slots))

    # -- inside

    def _take_state(self, request: Request, position: int) -> int:
        """A checkpoint slot that nobody else owns, with the request's state at ``position``. Waits for the device."""
        record_slot = request.record_slot
        cursor = self._backend.cursor(record_slot).settled(request.folded_by_verify)
        checkpoint_len = cursor.checkpoint_len
        at_boundary = request.boundary_slot != 0 and position == cursor.boundary_len
        if not at_boundary and position not in (checkpoint_len, cursor.committed_len):
            held = {checkpoint_len, cursor.committed_len, *([cursor.boundary_len] if cursor.boundary_len else [])}
            raise SpecStateError(
                f"publish: key.num_tokens = {position}, request {request.handle.request_id!r} holds states at "
                f"{', '.join(map(str, sorted(held)))}"
            )
        if at_boundary and request.open_step is None:
            self._backend.clear_boundary(record_slot)  # first: should it fail, the slot still has its owner
            slot, request.boundary_slot = request.boundary_slot, 0
            request.stands_at(cursor.committed_len)
            return slot
        self._ledger.require(0, 1, f"no slot to publish request {request.handle.request_id!r} at {position}")
        slot = self._ledger.take_checkpoint()
        try:
            if at_boundary:
                self._backend.copy_slot(request.boundary_slot, slot)
            elif position == cursor.committed_len:
                self._backend.copy_state(record_slot, request.folded_by_verify, [slot])
            else:
                self._backend.copy_slot(cursor.checkpoint_slot, slot)
        except BaseException:
            self._ledger.give_back_checkpoint(slot)
            raise
        if request.open_step is None:
            request.stands_at(cursor.committed_len)
        return slot
