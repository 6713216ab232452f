"""The state manager: who owns which slot, which steps are open, and the order in which things may happen.

Data flows one way: metadata -> rows -> kernels -> cursors. The manager decides on the host and never waits for the
device, save where a method says so.
"""

import dataclasses
import functools
import hashlib
import json
import os
from collections.abc import Sequence
from typing import Any, BinaryIO, Literal

import torch

from specstate.backends import DeviceCounters, LayerState
from specstate.backends.build import build_backend
from specstate.backends.tensors import TensorBackend
from specstate.batch import find_requests, flush_batch, padded_shape, step_batch
from specstate.capture import Capture
from specstate.config import StateConfig
from specstate.errors import SpecStateError, StepOrderError, shown
from specstate.integrity import check_cursors, check_lines, check_payloads
from specstate.layout import BytePlan, plan_bytes
from specstate.ledger import Ledger
from specstate.limits import MAX_CAPTURES, MAX_COMMITTED_LEN, MAX_STEP_SIZE
from specstate.metadata import Handle, StepMetadata
from specstate.metrics import Metrics, per_position
from specstate.params import LayerParams, check_params
from specstate.preempted import Preempted
from specstate.prefixes import PrefixKey
from specstate.profiling import phase
from specstate.requests import Request
from specstate.sampling import SamplingParams
from specstate.step import DroppedEnds, Step, StepHost
from specstate.trace import TraceRecorder
from specstate.trace.schema import Published
from specstate.transfer import read_file, snapshot, write_file
from specstate.transfer.snapshot import request_header
from specstate.validation import check_flag, resolve_device


class StateManager:
    """Owns the recurrent and conv state of many requests in many KDA layers.

    params: one LayerParams a layer, on ``device``; backend "metadata" reads none. backend: "triton" (a GPU, or a CPU
    under TRITON_INTERPRET=1), "reference" (torch, any device) or "metadata" (no payloads). storage: None, or one
    (recurrent [slots, H, V, K], conv [slots, C, W-1]) pair of views a layer, slots = num_checkpoints + 1, slot 0 the
    null slot, whose memory stays the caller's. recorder: writes every transition to a step trace. debug: checks every
    rule of ownership before a step begins and before it commits or defers (cancel and release are always a way out),
    and refuses what would otherwise be clamped; it waits for the device.

    Raises SpecStateError when config, params, storage and backend do not go together, CapacityError when the memory
    is not there. States do not depend on what torch is set to: gradients, autocast, inference mode, default device and
    dtype, precision of float32 products. Every method that refuses leaves the manager as it was; what the device itself
    runs into, memory that runs out in the middle of a fold say, may leave the requests concerned half done: release
    them. A manager is used by one thread; everything launches on the current stream.
    """

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
        if recorder is not None:
            recorder.start(config)

    # -- capacity

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
        self._requests.add(Request(handle, checkpoint_slot, sampling))
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
            raise SpecStateError("request_ids names a request twice")
        count = len(request_ids)
        self._ledger.require(count, count, f"no slots for {count} forks of request {handle.request_id!r}")
        with self._ledger.new_lives(self._backend, request_ids) as (handles, slots):
            self._backend.copy_state(handle.record_slot, source.folded_by_verify, slots)
            standing = self._backend.standing(handle.record_slot)
            for new, slot, params in zip(handles, slots, checked, strict=True):
                self._backend.attach(slot, new.record_slot, new.generation, standing, params.columns())
        for new, slot, params in zip(handles, slots, checked, strict=True):
            fork = Request(new, slot, params, in_use=True)
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

        fold: False keeps both slots, pending records included; True folds what is pending and frees the record slot. An
        open step goes on without the request, its late end is dropped and counted. Raises StaleHandleError, and
        StepOrderError between the verifies of an open step.
        """
        check_flag("fold", fold)
        request = self._requests.of(handle)
        self._refuse_between_verifies("preempt", request)
        preempted = self._stop(request, fold)
        if fold:
            self._backend.release(handle.record_slot)
            preempted.record_slot, preempted.boundary_slot = None, 0
        self._put_aside(request, preempted)
        self._record("preempt", handle=handle, fold=fold)

    @phase("specstate::retract")
    def retract(self, handle: Handle) -> None:
        """Like ``preempt(handle, fold=True)``, but the checkpoint moves to the host and frees its slot, too.

        The copy into pinned memory is started on the current stream, without a wait. Raises as ``preempt``.
        """
        request = self._requests.of(handle)
        self._refuse_between_verifies("retract", request)
        self._fold_home(request)
        payload = self._backend.checkpoint_payload(request.checkpoint_slot)  # first, since it may find no memory
        preempted = self._stop(request, fold=True)
        self._backend.release(handle.record_slot)
        preempted.payload = payload
        preempted.record_slot = preempted.checkpoint_slot = None
        preempted.boundary_slot = 0
        self._put_aside(request, preempted)
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
        self._requests.add(
            Request(
                handle,
                checkpoint_slot,
                preempted.sampling,
                may_be_pending=preempted.may_be_pending,
                in_use=preempted.in_use,
                most_committed=preempted.most_committed,
                least_committed=preempted.least_committed,
                boundary_slot=preempted.boundary_slot,
                moved=preempted.moved,
                restored_from=preempted.restored_from,
            )
        )
        self._record("resume", handle=handle, checkpoint_slot=checkpoint_slot)
        return handle

    def discard(self, request_id: str) -> None:
        """Gives up a preempted or retracted request and its slots. Raises SpecStateError when none of that id is."""
        preempted = self._preempted.of(request_id, "discard")
        self._discard(preempted)
        self._record("discard", request_id=preempted.request_id)

    # -- published prefixes

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
        key = key if isinstance(key, PrefixKey) else PrefixKey.of(key)
        self._refuse_between_verifies("publish", request)
        prefixes = self._ledger.prefixes
        if key in prefixes:
            prefixes.touch(key)
        else:
            prefixes.add(key, self._take_state(request, key.num_tokens))
        published = prefixes.get(key)
        assert published is not None
        self._record("publish", handle=handle, key=key, checkpoint_slot=published.checkpoint_slot)

    def published(self) -> dict[PrefixKey, int]:
        """The published keys and the checkpoint slots of their states: those in use, then those that nobody uses, in
        the order in which they would be evicted."""
        return {prefix.key: prefix.checkpoint_slot for prefix in self._ledger.prefixes}

    def is_published(self, key: PrefixKey | Sequence[int]) -> bool:
        """Whether ``restore`` would find it; counts neither as a hit nor as a use."""
        return (key if isinstance(key, PrefixKey) else PrefixKey.of(key)) in self._ledger.prefixes

    @phase("specstate::restore")
    def restore(
        self, key: PrefixKey | Sequence[int], request_id: str, sampling: SamplingParams | None = None
    ) -> Handle:
        """A request that stands at ``key.num_tokens``, with a copy of the state published there.

        Until it ends, the prefix is not evicted. Raises CapacityError without a record and a checkpoint slot,
        SpecStateError when nothing is published under the key, which is counted, and as ``admit``.
        """
        sampling = self._ledger.check_new(request_id, SamplingParams() if sampling is None else sampling)
        key = key if isinstance(key, PrefixKey) else PrefixKey.of(key)
        prefixes = self._ledger.prefixes
        prefix = prefixes.get(key)
        if prefix is None:
            prefixes.misses += 1
            raise SpecStateError(f"restore: no state is published under {key} (request {request_id!r})")
        self._ledger.require(1, 1, f"no slot for request {request_id!r}", spared=prefix)
        prefixes.join(prefix)
        try:
            with self._ledger.new_lives(self._backend, [request_id]) as ([handle], [checkpoint_slot]):
                self._backend.admit(checkpoint_slot, handle.record_slot, handle.generation, sampling.columns())
                self._backend.copy_slot(prefix.checkpoint_slot, checkpoint_slot)
                self._backend.load(handle.record_slot, None, key.num_tokens)
        except BaseException:
            prefixes.leave(prefix)
            raise
        prefixes.hits += 1
        request = Request(handle, checkpoint_slot, sampling, in_use=True, restored_from=prefix)
        request.stands_at(key.num_tokens)
        self._requests.add(request)
        self._record("restore", handle=handle, key=key, checkpoint_slot=checkpoint_slot, sampling=sampling)
        return handle

    # -- files

    @phase("specstate::export")
    def export(self, handle: Handle, file: str | os.PathLike[str] | BinaryIO, fold: bool = True) -> None:
        """Writes one request into a file, at what it has committed: windows of an open step are not in it.

        file: a path, whose file is there whole or stays as it was, or a binary file open for writing. fold: True writes
        the state with everything pending folded in, as ``read`` gives it; False checkpoint, pending records and lengths
        as they lie there. The request goes on as if nothing had happened. Waits for the device; needs safetensors
        (``specstate[transfer]``). Raises StaleHandleError, StepOrderError between the verifies of an open step,
        TransferError when the file cannot be written.
        """
        check_flag("fold", fold)
        request = self._requests.of(handle)
        self._refuse_between_verifies("export", request)
        image = self._backend.export_image(request.record_slot, request.folded_by_verify, fold)
        write_file(file, request_header(self.config, request, image), [image])
        self._record("export", handle=handle, fold=fold)

    @phase("specstate::import_request")
    def import_request(
        self,
        file: str | os.PathLike[str] | BinaryIO,
        request_id: str | None = None,
        sampling: SamplingParams | None = None,
    ) -> Handle:
        """A request from a file that ``export`` has written, here or in another manager; it stands where it stood.

        request_id, sampling: those of the file when None. Layers and dtypes of both managers must agree, everything
        else may differ: what is pending stays so if the next window fits behind it, and is folded if it does not. What
        backend "metadata" wrote has no state, and only that backend takes it. Raises TransferError for a damaged file,
        SpecStateError when it does not fit, CapacityError without slots, and as ``admit``.
        """
        self._require_storage("import_request")
        header, images = read_file(file)
        if header.kind != "request":
            raise SpecStateError("import_request: the file holds a snapshot: recover takes it")
        [entry], [image] = header.requests, images
        name = entry.request_id if request_id is None else request_id
        sampling = self._ledger.check_new(name, entry.sampling if sampling is None else sampling)
        snapshot.check_fits(header, self.config, self._backend)
        self._ledger.require(1, 1, f"no slot for request {name!r}")
        request = snapshot.bring_request(entry, image, name, sampling, self.config, self._ledger, self._backend)
        self._record(
            "import",
            handle=request.handle,
            checkpoint_slot=request.checkpoint_slot,
            sampling=sampling,
            image=entry.image,
        )
        return request.handle

    @phase("specstate::snapshot")
    def snapshot(self, file: str | os.PathLike[str] | BinaryIO) -> None:
        """Writes all that the manager holds into a file: live and preempted requests and published prefixes.

        Windows of open steps are not in it. Waits for the device. Raises StepOrderError between the verifies of an open
        step, TransferError when the file cannot be written.
        """
        for request in self._requests:
            self._refuse_between_verifies("snapshot", request)
        write_file(file, *snapshot.take(self.config, self._ledger, self._backend))
        self._record("snapshot")

    @phase("specstate::recover")
    def recover(self, file: str | os.PathLike[str] | BinaryIO) -> dict[str, Handle]:
        """Takes a snapshot into this manager, which must hold nothing; the handles of the live requests by id.

        Old handles are stale. Preempted requests come back on the host, to be resumed; published prefixes as far as
        checkpoint slots are left, those used last first. What may differ between the managers is as for
        ``import_request``. Raises StepOrderError when the manager holds a request, a prefix or reserved slots,
        TransferError for a damaged file, SpecStateError when it does not fit, CapacityError when its live requests do
        not; nothing is changed then.
        """
        self._require_storage("recover")
        if len(self._requests) or len(self._preempted) or len(self._ledger.checkpoint_slots.taken):
            raise StepOrderError("recover: the manager holds something already; fence('drop') empties it")
        header, images = read_file(file)
        if header.kind != "snapshot":
            raise SpecStateError("recover: the file holds one request: import_request takes it")
        snapshot.check_fits(header, self.config, self._backend)
        live = sum(entry.kept is None for entry in header.requests)
        self._ledger.require(live, live, f"the snapshot has {live} live requests")
        try:
            snapshot.bring(header, images, self.config, self._ledger, self._backend)
        except BaseException:
            self._drop_everything()
            raise
        lives = [*self._requests]
        self._record(
            "recover",
            handles=tuple(request.handle for request in lives),
            checkpoint_slots=tuple(request.checkpoint_slot for request in lives),
            requests=header.requests,
            published=tuple(Published(key=key, checkpoint_slot=slot) for key, slot in self.published().items()),
            generation=header.generation,
        )
        return {request.handle.request_id: request.handle for request in lives}

    # -- slots for block tables

    def reserve_checkpoints(self, n: int) -> list[int]:
        """``n`` checkpoint slots for the caller's block tables, its own until ``return_checkpoints``.

        Evicts published prefixes when slots run short. Raises CapacityError when they are not there, SpecStateError for
        a bad n.
        """
        slots = self._ledger.lend(n)
        self._record("reserve", checkpoint_slots=tuple(slots))
        return slots

    def return_checkpoints(self, slots: Sequence[int]) -> None:
        """Gives reserved slots back; waits for the device.

        Raises SpecStateError for a slot that is not reserved or named twice, and while a request's running checkpoint
        lies in one of them; nothing is changed then.
        """
        self._ledger.check_lent(slots)
        for slot, request_id in self._moved().items():
            if slot in slots:
                raise SpecStateError(
                    f"return_checkpoints: the running checkpoint of request {request_id!r} lies in slot {slot}"
                )
        self._ledger.take_back(slots)
        self._record("return", checkpoint_slots=tuple(slots))

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

    # -- steps

    @phase("specstate::begin_step")
    def begin_step(
        self,
        metadata: StepMetadata,
        pad_to: int | tuple[int, int] | None = None,
        block_table: Any = None,
        positions: Any = None,
    ) -> Step:
        """Opens a step over the rows of ``metadata``: one copy to the device, no wait.

        pad_to: rows, or (rows, tokens), that the device sees; padded rows have query_len 0, padded tokens belong to no
        row. With ``block_size``, the end of the step writes a boundary checkpoint of every row that reaches or crosses
        a multiple of it: into a slot of the request's own, taken here from the pool when its window might get so far,
        or, block_table [n, blocks] int32 and positions [n] int32 on the device given, entry batch_index[i] for row i,
        into the caller's slots (``reserve_checkpoints``). Block j then keeps the state after (j + 1) * block_size
        tokens in its column, 0 for none; the running checkpoint moves to column committed_len // block_size, at most
        the last. ``positions`` are the tokens committed before the window; a row for which they are not the manager's
        is counted, and its line left alone. Both are read until the step has ended. A captured size brings its own.

        Raises StaleHandleError, StepOrderError for a request whose last step is still open, CapacityError without a
        slot for a boundary checkpoint, SpecStateError for more live rows than max_requests, a handle given twice, a
        query_len above max_query_len, a position that could leave int32, a pad_to that is too small or too large, or a
        block table, positions and block_size that do not come together; each names field, value, limit and step.
        """
        self._require_storage("begin_step")
        index, where = self._next_step, f" (step {self._next_step})"
        if not isinstance(metadata, StepMetadata):
            raise SpecStateError(f"metadata must be StepMetadata, not {type(metadata).__name__}{where}")
        requests = find_requests(metadata, self._requests, self.config, where)
        shape = padded_shape(metadata, pad_to, where)
        capture = self._captures.get(shape) if isinstance(pad_to, tuple) else None
        blocks = self._check_blocks(block_table, positions, metadata.num_entries, where)
        if capture is not None:
            capture.check_free(metadata.num_entries, where)
            if blocks is not None:
                raise SpecStateError(f"block_table: the graph of {shape} reads the one it was captured with{where}")
        by_table = (blocks if capture is None else capture.rows.blocks) is not None
        if self._debug:
            self._check_step(requests)
            if blocks is not None:
                self._check_lines(metadata, blocks, where, requests)
        own = self.config.block_size is not None and not by_table
        taken = self._take_boundary_slots(metadata, requests, where) if own else []
        try:
            batch = step_batch(metadata, requests, shape, own)
            rows = self._backend.begin(batch, where, blocks) if capture is None else capture.stage(batch, where)
        except BaseException:
            for request in reversed(taken):
                self._ledger.checkpoint_slots.free(request.boundary_slot)
                request.boundary_slot = 0
            raise
        if by_table:
            for moving in requests:
                if moving is not None:
                    moving.moved = True
        self._next_step = index + 1
        checks = [self._check_step] if self._debug else []
        if self._debug and blocks is not None:  # once more when it ends: the table may have changed by then
            checks.append(functools.partial(self._check_lines, metadata, blocks, where))
        host = StepHost(self.config, self._backend, self._recorder, self._dropped_ends, checks)
        step = Step(index, metadata, requests, shape, rows, host, capture)
        used = blocks if capture is None else capture.rows.blocks
        table, stated = (None, None) if used is None else used
        pad_to = None if pad_to is None else shape
        self._record("begin_step", step=index, metadata=metadata, pad_to=pad_to, block_table=table, positions=stated)
        return step

    def warmup(self, captures: int = 64) -> None:
        """Compiles every kernel variant that the config can launch, for what is captured later; takes a while.

        captures: how many steps of max_requests full windows will be captured, or as much of smaller ones. Their small
        tensors (rows, samples, fold plans) are made now, so that a capture allocates nothing beyond what its caller
        makes (given ``out``, and logits whose last dimension is contiguous); a capture made again takes new ones. On a
        CPU there are none. Called again, it makes new ones. Raises SpecStateError for a bad count,
        CapacityError when the memory is not there.
        """
        self._require_storage("warmup")
        if type(captures) is not int or not 0 <= captures <= MAX_CAPTURES:
            raise SpecStateError(f"warmup: captures = {shown(captures)} is outside 0..{MAX_CAPTURES}")
        if isinstance(self._backend, TensorBackend):
            self._backend.warmup(captures)

    def capture_step(self, rows: int, tokens: int, block_table: Any = None, positions: Any = None) -> Step:
        """Inside a CUDA graph's capture: a step of dummy rows over fixed buffers, whose calls go into the graph.

        Verify every layer, sample and end it as wished; none of it changes the lifecycle. Afterwards
        ``begin_step(meta, pad_to=(rows, tokens))`` stages real rows for the next replay, and ``step.replayed`` follows
        it. Replay only what a begin_step has staged. A new capture of a size takes the place of the old one.
        block_table and positions, as ``begin_step`` takes them, are read anew by every replay. Raises SpecStateError
        for a wrong size or under ``debug``, and as ``begin_step`` for a block table, StepOrderError outside of a
        capture, CapacityError when what ``warmup`` made for captures is used up.
        """
        self._require_storage("capture_step")
        for name, size in (("rows", rows), ("tokens", tokens)):
            if type(size) is not int or not 1 <= size <= MAX_STEP_SIZE:
                raise SpecStateError(f"capture_step: {name} = {shown(size)} is outside 1..{MAX_STEP_SIZE}")
        if self._debug:
            raise SpecStateError("capture_step: debug = True waits for the device, which a capture does not allow")
        backend = self._backend
        if not isinstance(backend, TensorBackend) or self.device.type != "cuda":
            raise SpecStateError(f"capture_step needs a GPU, the manager is on {self.device} with {backend.path!r}")
        if not torch.cuda.is_current_stream_capturing():
            raise StepOrderError("capture_step must be called while the current stream is capturing a CUDA graph")
        replaced = self._captures.get((rows, tokens))
        if replaced is not None and replaced.occupant is not None:
            raise StepOrderError(f"capture_step: step {replaced.occupant.index} waits for a replay of {(rows, tokens)}")
        blocks = self._check_blocks(block_table, positions, 1, "")
        capture = Capture(backend, rows, tokens, blocks)
        host = StepHost(self.config, backend, None, self._dropped_ends, [])
        empty = StepMetadata(handles=(), query_lens=())
        capture.recorded = Step(-1, empty, [], capture.shape, capture.rows, host)
        self._captures[capture.shape] = capture
        return capture.recorded

    @phase("specstate::flush")
    def flush(self, handles: Sequence[Handle] | None = None) -> None:
        """Folds everything pending of ``handles``, or of all requests; afterwards checkpoints are the committed states.

        Preempted requests keep their records (``fence`` folds those, too). Raises StaleHandleError, and StepOrderError
        when an open step of one of them stands between its first and its last layer's verify.
        """
        if handles is None:
            requests = list(self._requests)
        else:
            requests = self._requests.all_of(handles)
            if len({id(request) for request in requests}) != len(requests):
                raise SpecStateError("handles names a request twice")
        for request in requests:
            self._refuse_between_verifies("flush", request)
        self._fold_all(requests)
        self._record("flush", handles=None if handles is None else tuple(handles))

    # -- looking at states

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
        """Clamps, dropped ends and wasted windows since the manager was built; waits for the device."""
        device = self._backend.counters()
        return dataclasses.replace(device, dropped_ends=device.dropped_ends + self._dropped_ends.count)

    def metrics(self) -> Metrics:
        """Counters since the manager was built, and what is in use now; waits for the device."""
        counted, ledger = self.counters(), self._ledger
        owners = [*self._requests, *self._preempted]
        accepted_per_position, accepted_tokens = per_position(counted.accepted)
        return Metrics(
            windows=counted.windows,
            drafts=sum(counted.accepted),
            draft_tokens=counted.draft_tokens,
            accepted_tokens=accepted_tokens,
            accepted_per_position=accepted_per_position,
            folds=counted.folds,
            pending_rows=sum(self._pending_len(request) > 0 for request in self._requests),
            late_ends_dropped=counted.dropped_ends,
            clamps=counted.clamps,
            wasted_windows=counted.wasted_windows,
            misplaced_rows=counted.misplaced_rows,
            record_slots_in_use=len(ledger.record_slots.taken),
            checkpoint_slots_in_use=len(ledger.checkpoint_slots.taken),
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
        for request in sorted(self._requests, key=lambda request: request.handle.request_id):
            cursor = self._backend.cursor(request.record_slot)
            lens = cursor.committed_len, self._pending_len(request)
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

    # -- care

    def forget_captures(self) -> None:
        """Graphs captured so far will not be replayed again: what they hold the manager to no longer counts.

        Raises StepOrderError while a step waits for a replay.
        """
        for capture in self._captures.values():
            if capture.occupant is not None:
                raise StepOrderError(f"forget_captures: step {capture.occupant.index} waits for a replay")
        self._captures.clear()

    def release_storage(self) -> None:
        """Gives all device memory back, between two phases of a training loop, say; ``bind_storage`` takes it again.

        Nothing may lie in a slot: behind ``fence("drop")``, or with every request retracted, nothing published and
        nothing reserved. Counters go on. Raises StepOrderError otherwise, and once a graph was captured, which holds
        addresses (``forget_captures``).
        """
        self._require_storage("release_storage")
        taken = len(self._ledger.record_slots.taken), len(self._ledger.checkpoint_slots.taken)
        if any(taken):
            raise StepOrderError(
                f"release_storage: {taken[0]} record slots and {taken[1]} checkpoint slots are taken; "
                "fence('drop'), or retract, first"
            )
        self._refuse_captures("release_storage")
        self._backend.release_storage()
        self._is_released = True
        self._record("release_storage")

    def bind_storage(self, storage: Any = None) -> None:
        """Takes memory again after ``release_storage``; or puts other storage of the caller's under living requests.

        storage: as the constructor takes it; None after a release for the manager's own. For living requests slot i of
        the new views must hold what slot i held: the caller has moved it, behind a fence that left nothing pending.
        Raises StepOrderError while a step is open or a record may be pending, and once a graph was captured,
        SpecStateError for unfit views, CapacityError when the memory is not there; nothing is changed then.
        """
        if not self._is_released:
            self._refuse_pending("bind_storage")
            if storage is None:
                raise SpecStateError("bind_storage: storage = None, the manager's own, is bound after release_storage")
        self._refuse_captures("bind_storage")
        self._backend.bind_storage(storage)
        self._is_released = False
        self._record("bind_storage")

    def set_params(self, params: Sequence[LayerParams]) -> None:
        """New parameters from the next step on.

        Raises StepOrderError while a step is open or a record may be pending (it would be folded with another gate):
        ``fence("flush")`` first; and once a graph was captured, which holds the tensors it was captured with. Raises
        SpecStateError when they do not fit the config, or on backend "metadata".
        """
        if not isinstance(self._backend, TensorBackend):
            raise SpecStateError("set_params needs payloads, which backend 'metadata' does not hold")
        self._refuse_pending("set_params")
        self._refuse_captures("set_params")
        self._backend.set_params(check_params(params, self.config, self.device))
        self._record("set_params")

    def check_integrity(self) -> None:
        """Checks every rule of ownership; waits for the device. Raises SpecStateError with both sides of a breach.

        A checkpoint slot that is being written in place, its load still to come, is a breach once the request has been
        loaded or in a step; not before.
        """
        self._check_ownership([request for request in self._requests if request.in_use])

    # -- inside

    def _check_blocks(self, block_table: Any, positions: Any, least_len: int, where: str) -> Any:
        if block_table is None and positions is None:
            return None
        given = {"block_table": block_table, "positions": positions, "block_size": self.config.block_size}
        missing = [name for name, value in given.items() if value is None]
        if missing:
            raise SpecStateError(
                f"block_table, positions and block_size go together: {' and '.join(missing)} not given{where}"
            )
        return self._backend.check_blocks(block_table, positions, least_len, where)

    def _check_lines(self, metadata: StepMetadata, blocks: Any, where: str, requests: Sequence[Request | None]) -> None:
        """Under debug."""
        lent = self._ledger.lent
        check_lines(self.config, self._backend, metadata, requests, blocks, lent, self._moved(), where)

    def _moved(self) -> dict[int, str]:
        """The slots where running checkpoints lie that a block table has moved, and whose they are; waits."""
        owners = [(r.handle.request_id, r.handle.record_slot) for r in self._requests if r.moved]
        owners += [(p.request_id, p.record_slot) for p in self._preempted if p.moved and p.record_slot is not None]
        return {self._backend.cursor(record_slot).checkpoint_slot: name for name, record_slot in owners}

    def _take_boundary_slots(self, metadata: StepMetadata, requests: list[Request | None], where: str) -> list[Request]:
        """Gives a slot to every request whose window might reach a boundary and that has none; those requests."""
        block_size = self.config.block_size
        assert block_size is not None
        due = [
            request
            for request, query_len in zip(requests, metadata.query_lens, strict=True)
            if request is not None and not request.boundary_slot and request.may_cross(query_len, block_size)
        ]
        if due:
            names = ", ".join(repr(request.handle.request_id) for request in due[:4])
            more = f" and {len(due) - 4} more" if len(due) > 4 else ""
            self._ledger.require(0, len(due), f"no slots for boundary checkpoints of {names}{more}{where}")
        for request in due:
            request.boundary_slot = self._ledger.take_checkpoint()
        return due

    def _take_state(self, request: Request, position: int) -> int:
        """A checkpoint slot that nobody else owns, with the request's state at ``position``. Waits for the device."""
        record_slot, cursor = request.handle.record_slot, self._backend.cursor(request.handle.record_slot)
        checkpoint_len = cursor.committed_len if request.folded_by_verify else cursor.checkpoint_len
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
            self._ledger.checkpoint_slots.free(slot)
            raise
        if request.open_step is None:
            request.stands_at(cursor.committed_len)
        return slot

    def _stop(self, request: Request, fold: bool) -> Preempted:
        """The request moves no more: its records are folded or stay as they are, an open step goes on without it.

        Should this or what follows fail on the way, another call finds what it needs: the cursor knows what verify has
        folded before the step is left, and is the last thing that ``release`` clears.
        """
        handle, folded_by_verify = request.handle, request.folded_by_verify
        if fold:
            self._fold_home(request)
        standing = self._backend.standing(handle.record_slot) if fold else None
        self._backend.park(handle.record_slot, folded_by_verify)
        self._leave_step(request)
        return Preempted(
            request_id=handle.request_id,
            sampling=request.sampling,
            most_committed=request.most_committed,
            least_committed=request.least_committed,
            may_be_pending=request.may_be_pending and not (fold or folded_by_verify),
            in_use=request.in_use or fold,
            boundary_slot=request.boundary_slot,
            moved=request.moved and not fold,
            restored_from=request.restored_from,
            checkpoint_slot=request.checkpoint_slot,
            record_slot=handle.record_slot,
            standing=standing,
        )

    def _put_aside(self, request: Request, preempted: Preempted) -> None:
        """The ledger follows: what the preempted request does not keep is free."""
        self._ledger.put_aside(request, preempted)
        self._num_preemptions += 1

    def _leave_step(self, request: Request) -> None:
        """Its open step goes on without it."""
        if request.open_step is not None:
            request.open_step.null_request(request)

    def _pending_len(self, request: Request) -> int:
        """Waits for the device."""
        return 0 if request.folded_by_verify else self._backend.cursor(request.record_slot).pending_len

    def _release(self, request: Request) -> None:
        self._leave_step(request)
        self._backend.release(request.handle.record_slot)
        self._ledger.end(request)

    def _drop_everything(self) -> None:
        for request in list(self._requests):
            self._release(request)
        for preempted in list(self._preempted):
            self._discard(preempted)
        self._ledger.drop_prefixes()

    def _discard(self, preempted: Preempted) -> None:
        if preempted.record_slot is not None:
            self._backend.release(preempted.record_slot)
        self._ledger.end(preempted)

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
