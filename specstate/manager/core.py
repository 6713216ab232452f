"""What the parts of a manager share: what it holds, and the moves that several of them make."""

from collections.abc import Sequence
from typing import Any, Literal

import torch

from specstate.backends.build import build_backend
from specstate.batch import flush_batch
from specstate.capture import Capture
from specstate.config import StateConfig
from specstate.errors import SpecStateError, StepOrderError, shown
from specstate.integrity import check_cursors, check_payloads
from specstate.ledger import Ledger
from specstate.metadata import Handle
from specstate.params import LayerParams
from specstate.preempted import Preempted
from specstate.requests import Request
from specstate.step import DroppedEnds, StepHost
from specstate.trace import TraceRecorder
from specstate.validation import check_flag, resolve_device


class Core:
    """The state of a StateManager, which see, and its inner moves."""

    def __init__(
        self,
        config: StateConfig,
        params: Sequence[LayerParams] | None,
        device: torch.device | str = "cpu",
        backend: Literal["triton", "reference", "metadata"] = "reference",
        storage: Any = None,
        recorder: TraceRecorder | None = None,
        debug: bool = False,
    ) -> None:
        if not isinstance(config, StateConfig):
            raise SpecStateError(f"config must be a StateConfig, not {type(config).__name__}")
        if not isinstance(recorder, TraceRecorder | None):
            raise SpecStateError(f"recorder must be a TraceRecorder, not {type(recorder).__name__}")
        check_flag("debug", debug)
        self.config = config
        self.device = resolve_device(device)
        self._backend = build_backend(config, params, self.device, backend, storage, debug)
        self._recorder = recorder
        self._debug = debug
        self._ledger = Ledger(config)
        self._requests, self._preempted = self._ledger.requests, self._ledger.preempted
        self._num_preemptions = 0
        self._is_released = False
        self._next_step = 0
        self._dropped_ends = DroppedEnds()
        self._captures: dict[tuple[int, int], Capture] = {}
        checks = (self._check_step,) if debug else ()
        self._step_host = StepHost(config, self._backend, recorder, self._dropped_ends, checks)
        if recorder is not None:
            recorder.start(config)

    def _put_aside(self, request: Request, fold: bool, to_host: bool = False) -> None:
        """The request moves no more: its records are folded or stay as they are, an open step goes on without it.

        Should this fail on the way, another call finds what it needs: what may find no memory comes before anything
        that cannot be taken back, the cursor knows what verify has folded before the step is left, and is the last
        thing that ``release`` clears.
        """
        record_slot, folded_by_verify = request.record_slot, request.folded_by_verify
        if fold:
            self._fold_home(request)
        payload = self._backend.checkpoint_payload(request.checkpoint_slot) if to_host else None
        standing = self._backend.standing(record_slot) if fold else None
        self._backend.park(record_slot, folded_by_verify)
        self._leave_step(request)
        known = request.known()
        known["may_be_pending"] &= not (fold or folded_by_verify)
        if fold:
            self._backend.release(record_slot)
            known |= {"in_use": True, "boundary_slot": 0, "moved": False}
        preempted = Preempted(
            request_id=request.handle.request_id,
            checkpoint_slot=None if to_host else request.checkpoint_slot,
            record_slot=None if fold else record_slot,
            standing=standing,
            payload=payload,
            **known,
        )
        self._ledger.put_aside(request, preempted)
        self._num_preemptions += 1

    def _leave_step(self, request: Request) -> None:
        """Its open step goes on without it."""
        if request.open_step is not None:
            request.open_step.null_request(request)

    def _moved(self) -> dict[int, str]:
        """The slots where running checkpoints lie that a block table has moved, and whose they are; waits."""
        owners = [(r.handle.request_id, r.handle.record_slot) for r in self._requests if r.moved]
        owners += [(p.request_id, p.record_slot) for p in self._preempted if p.moved and p.record_slot is not None]
        cursors = self._backend.cursors([record_slot for _, record_slot in owners])
        return {cursor.checkpoint_slot: name for (name, _), cursor in zip(owners, cursors, strict=True)}

    def _release(self, request: Request) -> None:
        self._leave_step(request)
        self._backend.release(request.handle.record_slot)
        self._ledger.end(request)

    def _discard(self, preempted: Preempted) -> None:
        if preempted.record_slot is not None:
            self._backend.release(preempted.record_slot)
        self._ledger.end(preempted)

    def _drop_everything(self) -> None:
        for request in list(self._requests):
            self._release(request)
        for preempted in list(self._preempted):
            self._discard(preempted)
        self._ledger.drop_prefixes()

    def _fold_home(self, request: Request) -> None:
        """Folds all that is pending into the request's own checkpoint slot, wherever a block table has moved it."""
        self._fold_all([request])
        if request.moved:
            self._backend.copy_state(request.handle.record_slot, request.folded_by_verify, [request.checkpoint_slot])

    def _fold_all(self, requests: Sequence[Request]) -> None:
        """Folds all that is pending of ``requests``, none of which stands between the verifies of a step."""
        # What a verify has folded already is not folded again: the cursors learn of it when that step ends.
        due = [request for request in requests if request.may_be_pending and not request.folded_by_verify]
        if not due:
            return
        self._fold_owners([(request.handle, request.checkpoint_slot) for request in due])
        # A step that has verified needs its rows no more than for its end, which reads the cursors.
        for step in {id(r.open_step): r.open_step for r in due if r.open_step is not None}.values():
            if not step.num_verified:
                step.refresh()
        for request in due:
            request.may_be_pending = False

    def _fold_preempted(self) -> None:
        """The same for preempted requests that kept their records; their slots are of generation 0."""
        owners = []
        for preempted in self._preempted:
            if not preempted.may_be_pending:
                continue
            assert preempted.record_slot is not None and preempted.checkpoint_slot is not None
            owners.append((Handle(preempted.request_id, preempted.record_slot, 0), preempted.checkpoint_slot))
        if owners:
            self._fold_owners(owners)
        for preempted in self._preempted:
            preempted.may_be_pending = False

    def _fold_owners(self, owners: list[tuple[Handle, int]]) -> None:
        self._backend.flush(self._backend.begin(flush_batch(owners), ""))

    def _check_step(self, requests: Sequence[Request | None]) -> None:
        """Under debug. Whatever slot of the others is being written in place, the step's own are not."""
        self._check_ownership([request for request in requests if request is not None])

    def _check_ownership(self, settled: list[Request]) -> None:
        """Slots and cursors of all requests, payloads of ``settled`` ones."""
        self._ledger.check_integrity()
        if self._is_released:
            return
        check_cursors(self.config, self._backend, self._requests, self._preempted, self._ledger.lent)
        check_payloads(self._backend, settled)

    def _check_layer(self, layer: object) -> None:
        if type(layer) is not int or not 0 <= layer < self.config.num_layers:
            raise SpecStateError(f"layer = {shown(layer)} is outside 0..{self.config.num_layers - 1}")

    def _require_storage(self, verb: str) -> None:
        if self._is_released:
            raise StepOrderError(f"{verb}: the storage was released; bind_storage takes it again")

    def _refuse_captures(self, verb: str) -> None:
        if self._captures:
            raise StepOrderError(
                f"{verb}: graphs captured for {sorted(self._captures)} hold the present tensors; replay them no more, "
                "and call forget_captures"
            )

    def _refuse_pending(self, verb: str) -> None:
        for request in self._requests:
            self._refuse_open_step(verb, request)
            if request.may_be_pending:
                raise StepOrderError(
                    f"{verb}: request {request.handle.request_id!r} may have pending records; flush first"
                )
        for preempted in self._preempted:
            if preempted.may_be_pending:
                raise StepOrderError(
                    f"{verb}: request {preempted.request_id!r}, preempted, may have pending records; "
                    "fence('flush') folds them"
                )

    def _refuse_open_step(self, verb: str, request: Request) -> None:
        if request.open_step is not None:
            raise StepOrderError(
                f"{verb}: request {request.handle.request_id!r} is in step {request.open_step.index}, still open"
            )

    def _refuse_between_verifies(self, verb: str, request: Request) -> None:
        step = request.open_step
        if step is not None and step.between_verifies:
            raise StepOrderError(
                f"{verb}: request {request.handle.request_id!r} is in step {step.index}, {step.num_verified} of whose "
                f"{self.config.num_layers} layers have verified"
            )

    def _record(self, kind: str, **fields: Any) -> None:
        if self._recorder is not None:
            self._recorder.record(kind, **fields)
