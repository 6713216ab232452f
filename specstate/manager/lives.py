"""Requests: their life from admit to release, and what lies between two lives."""

from collections.abc import Sequence
from typing import Any, Literal

from specstate.errors import SpecStateError, shown
from specstate.limits import MAX_COMMITTED_LEN
from specstate.manager.core import Core
from specstate.metadata import Handle
from specstate.profiling import phase
from specstate.requests import Request
from specstate.sampling import SamplingParams
from specstate.validation import check_flag


class Lives(Core):
    """Requests: their life from admit to release, and what lies between two lives. Part of StateManager."""

    # -- capacity

    @property
    def num_requests(self) -> int:
        """Live requests."""
        return len(self._requests)

    def can_admit(self, n: int = 1) -> bool:
        """Whether ``n`` more requests find a record slot and a checkpoint slot, evictable ones among them.

        Raises SpecStateError for a bad n.
        """
        if type(n) is not int or n < 0:
            raise SpecStateError(f"n = {shown(n)} must be a number of requests, 0 or more")
        return n <= min(self._ledger.record_slots.num_free, self._ledger.num_checkpoints_left)

    # -- a request's life

    def admit(self, request_id: str, sampling: SamplingParams | None = None) -> Handle:
        """A request with zero state at position 0.

        sampling: how ``step.sample`` draws its tokens; greedily when None. Evicts a published prefix when checkpoint
        slots run short. Raises CapacityError without a slot, SpecStateError when the id is live already, or preempted.
        """
        self._require_storage("admit")
        sampling = self._ledger.check_new(request_id, SamplingParams() if sampling is None else sampling)
        self._ledger.require(1, 1, f"no slot for request {request_id!r}")
        with self._ledger.new_lives(self._backend, [request_id]) as ([handle], [checkpoint_slot]):
            self._backend.admit(checkpoint_slot, handle.record_slot, handle.generation, sampling.columns())
        self._requests.add(Request(handle, checkpoint_slot, sampling=sampling))
        self._record("admit", handle=handle, checkpoint_slot=checkpoint_slot, sampling=sampling)
        return handle

    @phase("specstate::load")
    def load(self, handle: Handle, states: Any, committed_len: int) -> None:
        """Puts a request at ``committed_len`` with a state made elsewhere (a prefill); what it had before is gone.

        states: one (recurrent [H, V, K] in the checkpoint dtype, conv [C, W-1] in the activation dtype, oldest input
        first) pair a layer, copied to where its checkpoint lies; or None when that slot has been written in place (see
        ``checkpoints``). Raises StaleHandleError, StepOrderError while the request has an open step, SpecStateError
        for a wrong shape, dtype, device or length.
        """
        request = self._requests.of(handle)
        self._refuse_open_step("load", request)
        if type(committed_len) is not int or not 0 <= committed_len <= MAX_COMMITTED_LEN:
            raise SpecStateError(
                f"committed_len = {shown(committed_len)} is outside 0..{MAX_COMMITTED_LEN} "
                f"(request {handle.request_id!r})"
            )
        self._backend.load(handle.record_slot, states, committed_len)
        request.may_be_pending, request.in_use = False, True
        request.stands_at(committed_len)
        self._record("load", handle=handle, committed_len=committed_len, in_place=states is None)

    def release(self, handle: Handle) -> None:
        """Ends a request and frees its slots. An open step goes on without it; its late end is dropped and counted."""
        self._release(self._requests.of(handle))
        self._record("release", handle=handle)

    # -- between lives

    @phase("specstate::fork")
    def fork(
        self, handle: Handle, request_ids: Sequence[str], sampling: Sequence[SamplingParams] | None = None
    ) -> list[Handle]:
        """Copies a request into new ones that stand where it stands; the source keeps its pending records.

        sampling: of each new request; by default the source's with seeds of their own, the source's plus 1, 2 and so on
        (modulo 2^63), so that parallel samples differ. Raises StaleHandleError, StepOrderError between the verifies of
        an open step, CapacityError without a record and a checkpoint slot for each, SpecStateError for a bad or taken
        id and for a sampling of another length; nothing is changed then.
        """
        source = self._requests.of(handle)
        self._refuse_between_verifies("fork", source)
        if not isinstance(request_ids, Sequence) or isinstance(request_ids, str | bytes) or not request_ids:
            raise SpecStateError(f"request_ids = {shown(request_ids)} must be a sequence of at least one string")
        if sampling is None:
            sampling = [
                source.sampling.model_copy(update={"seed": (source.sampling.seed + 1 + i) % 2**63})
                for i in range(len(request_ids))
            ]
        elif not isinstance(sampling, Sequence) or len(sampling) != len(request_ids):
            raise SpecStateError(f"sampling must be a sequence of {len(request_ids)} SamplingParams, as request_ids")
        checked = [
            self._ledger.check_new(name, params, f"[{i}]")
            for i, (name, params) in enumerate(zip(request_ids, sampling, strict=True))
        ]
        if len({*request_ids}) != len(request_ids):
            raise SpecStateError(f"request_ids = {shown(request_ids)} names a request twice")
        count = len(request_ids)
        self._ledger.require(count, count, f"no slots for {count} forks of request {handle.request_id!r}")
        with self._ledger.new_lives(self._backend, request_ids) as (handles, slots):
            self._backend.copy_state(handle.record_slot, source.folded_by_verify, slots)
            standing = self._backend.standing(handle.record_slot)
            for new, slot, params in zip(handles, slots, checked, strict=True):
                self._backend.attach(slot, new.record_slot, new.generation, standing, params.columns())
        for new, slot, params in zip(handles, slots, checked, strict=True):
            fork = Request(new, slot, sampling=params, in_use=True)
            fork.most_committed, fork.least_committed = source.most_committed, source.least_committed
            self._requests.add(fork)
        self._record(
            "fork",
            handle=handle,
            handles=tuple(handles),
            checkpoint_slots=tuple(slots),
            sampling=tuple(checked),
        )
        return handles

    @phase("specstate::preempt")
    def preempt(self, handle: Handle, fold: bool = False) -> None:
        """Ends a request's life but keeps its state on the device until ``resume``; the handle is stale from here on.

        fold: False keeps all its slots, pending records included, and makes no room; True folds what is pending and
        frees all but the checkpoint slot. An open step goes on without the request, its late end is dropped and
        counted. Raises StaleHandleError, and StepOrderError between the verifies of an open step.
        """
        check_flag("fold", fold)
        request = self._requests.of(handle)
        self._refuse_between_verifies("preempt", request)
        self._put_aside(request, fold)
        self._record("preempt", handle=handle, fold=fold)

    @phase("specstate::retract")
    def retract(self, handle: Handle) -> None:
        """Like ``preempt(handle, fold=True)``, but the checkpoint moves to the host and frees its slot, too.

        The copy into pinned memory is started on the current stream, without a wait. Raises as ``preempt``.
        """
        request = self._requests.of(handle)
        self._refuse_between_verifies("retract", request)
        self._put_aside(request, fold=True, to_host=True)
        self._record("retract", handle=handle)

    @phase("specstate::resume")
    def resume(self, request_id: str) -> Handle:
        """A preempted or retracted request lives again, where it stood, under a handle of another generation.

        Raises CapacityError without the slots that it gave up, SpecStateError when no request of that id is preempted.
        """
        self._require_storage("resume")
        preempted = self._preempted.of(request_id, "resume")
        record_slot, checkpoint_slot = preempted.record_slot, preempted.checkpoint_slot
        missing = int(record_slot is None), int(checkpoint_slot is None)
        self._ledger.require(*missing, f"no slot for request {request_id!r}")
        columns = preempted.sampling.columns()
        kept = record_slot, checkpoint_slot
        with self._ledger.new_lives(self._backend, [request_id], *kept) as ([handle], [checkpoint_slot]):
            if preempted.checkpoint_slot is None:
                self._backend.put_checkpoint(checkpoint_slot, preempted.payload)
            if record_slot is None:
                standing = preempted.standing
                self._backend.attach(checkpoint_slot, handle.record_slot, handle.generation, standing, columns)
            else:
                self._backend.unpark(record_slot, handle.generation)
        self._preempted.remove(preempted)
        self._requests.add(Request(handle=handle, checkpoint_slot=checkpoint_slot, **preempted.known()))
        self._record("resume", handle=handle, checkpoint_slot=checkpoint_slot)
        return handle

    def discard(self, request_id: str) -> None:
        """Gives up a preempted or retracted request and its slots. Raises SpecStateError when none of that id is."""
        preempted = self._preempted.of(request_id, "discard")
        self._discard(preempted)
        self._record("discard", request_id=preempted.request_id)

    def fence(self, mode: Literal["flush", "drop"]) -> None:
        """Nothing is pending behind it, so that weights may change.

        "flush" folds all that is pending, of preempted requests too; "drop" releases every request, preempted ones
        included, and forgets every published prefix. Raises StepOrderError while a step is open, SpecStateError for
        another mode; nothing is changed then.
        """
        if type(mode) is not str or mode not in ("flush", "drop"):
            raise SpecStateError(f"fence: mode = {shown(mode)} must be 'flush' or 'drop'")
        for request in self._requests:
            self._refuse_open_step("fence", request)
        if mode == "flush":
            self._fold_all([*self._requests])
            self._fold_preempted()
        else:
            self._drop_everything()
        self._record("fence", mode=mode)
