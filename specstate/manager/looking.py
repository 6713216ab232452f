"""What a manager holds, for its caller to look at."""

import dataclasses
import hashlib
import json
from collections.abc import Sequence
from typing import Any

import torch

from specstate.backends import DeviceCounters, LayerState
from specstate.backends.tensors import TensorBackend
from specstate.errors import SpecStateError
from specstate.layout import BytePlan, plan_bytes
from specstate.manager.core import Core
from specstate.metadata import Handle
from specstate.metrics import Metrics, per_position


class Looking(Core):
    """What a manager holds, for its caller to look at. Part of StateManager."""

    @property
    def plan(self) -> BytePlan:
        """What the config costs."""
        return plan_bytes(self.config)

    @property
    def allocated_bytes(self) -> int:
        """Bytes of the manager's own tensors: ``plan.total_bytes``, less checkpoints in storage of the caller's.

        Not among them: rows, samples and fold plans, which belong to steps, or were made by ``warmup`` for captured
        ones, and backend "triton"'s table of addresses (64 bytes a layer).
        """
        return self._backend.allocated_bytes

    def read(self, handle: Handle, layer: int) -> LayerState:
        """The committed state of a request in one layer, pending records included; waits for the device.

        Raises StaleHandleError, StepOrderError between the verifies of an open step, SpecStateError for a wrong layer
        and on backend "metadata".
        """
        request = self._requests.of(handle)
        self._check_layer(layer)
        self._refuse_between_verifies("read", request)
        state = self._backend.read(handle.record_slot, layer, request.folded_by_verify)
        self._record("read", handle=handle, layer=layer)
        return state

    def committed_len(self, handle: Handle) -> int:
        """Tokens committed so far; waits for the device. Raises StaleHandleError."""
        request = self._requests.of(handle)
        committed_len = self._backend.cursor(request.handle.record_slot).committed_len
        if request.open_step is None:
            request.overcounted = request.most_committed - committed_len
        return committed_len

    def checkpoints(self, layer: int) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The storage of one layer itself: recurrent [slots, H, V, K] and conv [slots, C, W-1] (None without a conv).

        A prefill kernel may write a request's slot in place, followed by ``load(handle, None, committed_len=n)``. The
        views are detached: what is written through them with gradients leaves no graph behind. Raises SpecStateError
        for a wrong layer and on backend "metadata".
        """
        self._check_layer(layer)
        if not isinstance(self._backend, TensorBackend):
            raise SpecStateError("checkpoints needs payloads, which backend 'metadata' does not hold")
        self._require_storage("checkpoints")
        views = self._backend.storage.layers[layer]
        return views.recurrent.detach(), None if views.conv is None else views.conv.detach()

    def checkpoint_slots(self, handles: Sequence[Handle]) -> torch.Tensor:
        """[n] int32 on the device: where the requests' running checkpoints lie, once all that was launched has run.

        Raises StaleHandleError.
        """
        return self._backend.running_slots([request.handle.record_slot for request in self._requests.all_of(handles)])

    def counters(self) -> DeviceCounters:
        """What only the device sees, since the manager was built; waits for it. ``metrics`` has these, and more."""
        device = self._backend.counters()
        return dataclasses.replace(device, dropped_ends=device.dropped_ends + self._dropped_ends.count)

    def metrics(self) -> Metrics:
        """Counters since the manager was built, and what is in use now; waits for the device."""
        counted, ledger = self.counters(), self._ledger
        cursors = self._backend.cursors([request.record_slot for request in self._requests])
        owners = [*self._requests, *self._preempted]
        accepted_per_position, accepted_tokens = per_position(counted.accepted)
        return Metrics(
            windows=counted.windows,
            drafts=sum(counted.accepted),
            draft_tokens=counted.draft_tokens,
            accepted_tokens=accepted_tokens,
            accepted_per_position=accepted_per_position,
            folds=counted.folds,
            pending_rows=sum(
                cursor.settled(request.folded_by_verify).pending_len > 0
                for request, cursor in zip(self._requests, cursors, strict=True)
            ),
            late_ends_dropped=counted.dropped_ends,
            clamps=counted.clamps,
            wasted_windows=counted.wasted_windows,
            misplaced_rows=counted.misplaced_rows,
            record_slots_in_use=ledger.record_slots.num_taken,
            checkpoint_slots_in_use=ledger.checkpoint_slots.num_taken,
            boundary_slots=sum(owner.boundary_slot != 0 for owner in owners),
            published_slots=len(ledger.prefixes),
            reserved_slots=len(ledger.lent),
            prefix_hits=ledger.prefixes.hits,
            prefix_misses=ledger.prefixes.misses,
            prefix_evictions=ledger.prefixes.evictions,
            preemptions=self._num_preemptions,
        )

    def digest(self) -> str:
        """A short hash of who owns what and where each request stands (never of payloads); waits for the device.

        Managers that went through the same transitions have the same digest, whatever their backend or layer shape.
        """
        lines: list[list[Any]] = []
        requests = sorted(self._requests, key=lambda request: request.handle.request_id)
        cursors = self._backend.cursors([request.record_slot for request in requests])
        for request, cursor in zip(requests, cursors, strict=True):
            lens = cursor.committed_len, cursor.settled(request.folded_by_verify).pending_len
            lines.append([*dataclasses.astuple(request.handle), cursor.checkpoint_slot, *lens])
            if request.boundary_slot:
                lines.append([request.boundary_slot, cursor.boundary_len])
        for parked in sorted(self._preempted, key=lambda preempted: preempted.request_id):
            lines.append([parked.request_id, parked.record_slot, parked.checkpoint_slot])
            if parked.boundary_slot:
                lines.append([parked.boundary_slot])
        for prefix in self._ledger.prefixes:
            lines.append([*dataclasses.astuple(prefix.key), prefix.checkpoint_slot, prefix.num_users])
        if self._ledger.lent:
            lines.append(sorted(self._ledger.lent))
        value = hashlib.sha256(json.dumps(lines).encode()).hexdigest()[:16]
        self._record("digest", value=value)
        return value

    def check_integrity(self) -> None:
        """Checks every rule of ownership; waits for the device. Raises SpecStateError with both sides of a breach.

        A checkpoint slot that is being written in place, its load still to come, is a breach once the request has been
        loaded or in a step; not before.
        """
        self._check_ownership([request for request in self._requests if request.in_use])
