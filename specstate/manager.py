"""The state manager: who owns which slot, which steps are open, and the order in which things may happen.

Data flows one way: metadata -> rows -> kernels -> cursors. The manager decides on the host and never waits for the
device, save where a method says so.
"""

import dataclasses
import hashlib
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal

import torch

from specstate.backends import DeviceCounters, LayerState
from specstate.backends.build import build_backend
from specstate.backends.tensors import TensorBackend
from specstate.batch import find_requests, flush_batch, padded_shape, step_batch
from specstate.capture import Capture
from specstate.config import StateConfig
from specstate.errors import CapacityError, SpecStateError, StepOrderError, shown
from specstate.integrity import check_cursors, check_payloads, check_slots
from specstate.layout import BytePlan, plan_bytes
from specstate.limits import MAX_CAPTURES, MAX_COMMITTED_LEN, MAX_STEP_SIZE
from specstate.metadata import Handle, StepMetadata
from specstate.params import LayerParams, check_params
from specstate.preempted import Preempted, PreemptedTable
from specstate.requests import Request, RequestTable, check_request_id
from specstate.sampling import SamplingParams
from specstate.slots import SlotPool
from specstate.step import DroppedEnds, Step, StepHost
from specstate.trace import TraceRecorder
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
        self._requests = RequestTable()
        self._preempted = PreemptedTable()
        self._record_slots = SlotPool("record slot", 0, config.max_requests)
        self._checkpoint_slots = SlotPool("checkpoint slot", 1, config.num_checkpoints)
        self._generation = 0
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
        """Whether ``n`` more requests find a record slot and a checkpoint slot. Raises SpecStateError for a bad n."""
        if type(n) is not int or n < 0:
            raise SpecStateError(f"n = {shown(n)} must be a number of requests, 0 or more")
        return n <= min(self._record_slots.num_free, self._checkpoint_slots.num_free)

    # -- a request's life

    def admit(self, request_id: str, sampling: SamplingParams | None = None) -> Handle:
        """A request with zero state at position 0.

        sampling: how ``step.sample`` draws its tokens; greedily when None. Raises CapacityError without a free slot,
        SpecStateError when the id is live already, or preempted.
        """
        sampling = self._check_new(request_id, SamplingParams() if sampling is None else sampling)
        self._require_slots(1, 1, f"no slot for request {request_id!r}")
        with self._new_lives([request_id]) as ([handle], [checkpoint_slot]):
            self._backend.admit(checkpoint_slot, handle.record_slot, handle.generation, sampling.columns())
        self._requests.add(Request(handle, checkpoint_slot, sampling))
        self._record("admit", handle=handle, checkpoint_slot=checkpoint_slot, sampling=sampling)
        return handle

    def load(self, handle: Handle, states: Any, committed_len: int) -> None:
        """Puts a request at ``committed_len`` with a state made elsewhere (a prefill); what it had before is gone.

        states: one (recurrent [H, V, K] in the checkpoint dtype, conv [C, W-1] in the activation dtype, oldest input
        first) pair a layer, copied; or None when the request's checkpoint slot has been written in place (see
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
        self._backend.load(request.checkpoint_slot, handle.record_slot, states, committed_len)
        request.may_be_pending, request.in_use, request.most_committed = False, True, committed_len
        self._record("load", handle=handle, committed_len=committed_len, in_place=states is None)

    def release(self, handle: Handle) -> None:
        """Ends a request and frees its slots. An open step goes on without it; its late end is dropped and counted."""
        self._release(self._requests.of(handle))
        self._record("release", handle=handle)

    # -- between lives

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
            self._check_new(name, params, f"[{i}]")
            for i, (name, params) in enumerate(zip(request_ids, sampling, strict=True))
        ]
        if len({*request_ids}) != len(request_ids):
            raise SpecStateError("request_ids names a request twice")
        count = len(request_ids)
        self._require_slots(count, count, f"no slots for {count} forks of request {handle.request_id!r}")
        with self._new_lives(request_ids) as (handles, slots):
            self._backend.copy_state(source.checkpoint_slot, handle.record_slot, source.folded_by_verify, slots)
            standing = self._backend.standing(handle.record_slot)
            for new, slot, params in zip(handles, slots, checked, strict=True):
                self._backend.attach(slot, new.record_slot, new.generation, standing, params.columns())
        for new, slot, params in zip(handles, slots, checked, strict=True):
            self._requests.add(Request(new, slot, params, in_use=True, most_committed=source.most_committed))
        self._record(
            "fork",
            handle=handle,
            handles=tuple(handles),
            checkpoint_slots=tuple(slots),
            sampling=tuple(checked),
        )
        return handles

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
            preempted.record_slot = None
            self._free_record_slot(handle.record_slot)
        self._requests.remove(request)
        self._preempted.add(preempted)
        self._record("preempt", handle=handle, fold=fold)

    def retract(self, handle: Handle) -> None:
        """Like ``preempt(handle, fold=True)``, but the checkpoint moves to the host and frees its slot, too.

        The copy into pinned memory is started on the current stream, without a wait. Raises as ``preempt``.
        """
        request = self._requests.of(handle)
        self._refuse_between_verifies("retract", request)
        self._fold_all([request])
        image = self._backend.image(request.checkpoint_slot)  # first, since it may find no memory
        preempted = self._stop(request, fold=True)
        preempted.image = image
        preempted.record_slot = preempted.checkpoint_slot = None
        self._release(request)
        self._preempted.add(preempted)
        self._record("retract", handle=handle)

    def resume(self, request_id: str) -> Handle:
        """A preempted or retracted request lives again, where it stood, under a handle of another generation.

        Raises CapacityError without the slots that it gave up, SpecStateError when no request of that id is preempted.
        """
        preempted = self._preempted.of(request_id, "resume")
        record_slot, checkpoint_slot = preempted.record_slot, preempted.checkpoint_slot
        missing = int(record_slot is None), int(checkpoint_slot is None)
        self._require_slots(*missing, f"no slot for request {request_id!r}")
        columns = preempted.sampling.columns()
        with self._new_lives([request_id], record_slot, checkpoint_slot) as ([handle], [checkpoint_slot]):
            if preempted.image is not None:
                self._backend.put_image(checkpoint_slot, preempted.image)
            if record_slot is None:
                standing = preempted.standing
                self._backend.attach(checkpoint_slot, handle.record_slot, handle.generation, standing, columns)
            else:
                self._backend.unpark(record_slot, handle.generation)
        self._preempted.remove(preempted)
        request = Request(handle, checkpoint_slot, preempted.sampling, in_use=preempted.in_use)
        request.may_be_pending, request.most_committed = preempted.may_be_pending, preempted.most_committed
        self._requests.add(request)
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
        included. Raises StepOrderError while a step is open, SpecStateError for another mode; nothing is changed then.
        """
        if type(mode) is not str or mode not in ("flush", "drop"):
            raise SpecStateError(f"fence: mode = {shown(mode)} must be 'flush' or 'drop'")
        for request in self._requests:
            self._refuse_open_step("fence", request)
        if mode == "flush":
            self._fold_all([*self._requests])
            self._fold_preempted()
        else:
            for request in list(self._requests):
                self._release(request)
            for preempted in list(self._preempted):
                self._discard(preempted)
        self._record("fence", mode=mode)

    # -- steps

    def begin_step(self, metadata: StepMetadata, pad_to: int | tuple[int, int] | None = None) -> Step:
        """Opens a step over the rows of ``metadata``: one copy to the device, no wait.

        pad_to: rows, or (rows, tokens), that the device sees; padded rows have query_len 0, padded tokens belong to no
        row. Raises StaleHandleError, StepOrderError for a request whose last step is still open, SpecStateError for
        more live rows than max_requests, a handle given twice, a query_len above max_query_len, a position that could
        leave int32, or a pad_to that is too small or too large; each names field, value, limit and step.
        """
        index, where = self._next_step, f" (step {self._next_step})"
        if not isinstance(metadata, StepMetadata):
            raise SpecStateError(f"metadata must be StepMetadata, not {type(metadata).__name__}{where}")
        requests = find_requests(metadata, self._requests, self.config, where)
        shape = padded_shape(metadata, pad_to, where)
        batch = step_batch(metadata, requests, shape)
        if self._debug:
            self._check_step(requests)
        capture = self._captures.get(shape) if isinstance(pad_to, tuple) else None
        if capture is None:
            rows = self._backend.begin(batch, where)
        else:
            capture.check_free(metadata.num_entries, where)
            rows = capture.stage(batch, where)
        self._next_step = index + 1
        check = self._check_step if self._debug else None
        host = StepHost(self.config, self._backend, self._recorder, self._dropped_ends, check)
        step = Step(index, metadata, requests, shape, rows, host, capture)
        self._record("begin_step", step=index, metadata=metadata, pad_to=None if pad_to is None else shape)
        return step

    def warmup(self, captures: int = 64) -> None:
        """Compiles every kernel variant that the config can launch, for what is captured later; takes a while.

        captures: how many steps of max_requests full windows will be captured, or as much of smaller ones. Their small
        tensors (rows, samples, fold plans) are made now, so that a capture allocates nothing beyond what its caller
        makes (given ``out``, and logits whose last dimension is contiguous); a capture made again takes new ones. On a
        CPU there are none. Called again, it makes new ones. Raises SpecStateError for a bad count,
        CapacityError when the memory is not there.
        """
        if type(captures) is not int or not 0 <= captures <= MAX_CAPTURES:
            raise SpecStateError(f"warmup: captures = {shown(captures)} is outside 0..{MAX_CAPTURES}")
        if isinstance(self._backend, TensorBackend):
            self._backend.warmup(captures)

    def capture_step(self, rows: int, tokens: int) -> Step:
        """Inside a CUDA graph's capture: a step of dummy rows over fixed buffers, whose calls go into the graph.

        Verify every layer, sample and end it as wished; none of it changes the lifecycle. Afterwards
        ``begin_step(meta, pad_to=(rows, tokens))`` stages real rows for the next replay, and ``step.replayed`` follows
        it. Replay only what a begin_step has staged. A new capture of a size takes the place of the old one. Raises
        SpecStateError for a wrong size or under ``debug``, StepOrderError outside of a capture, CapacityError when
        what ``warmup`` made for captures is used up.
        """
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
        capture = Capture(backend, rows, tokens)
        host = StepHost(self.config, backend, None, self._dropped_ends, None)
        empty = StepMetadata(handles=(), query_lens=())
        capture.recorded = Step(-1, empty, [], capture.shape, capture.rows, host)
        self._captures[capture.shape] = capture
        return capture.recorded

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
        state = self._backend.read(request.checkpoint_slot, handle.record_slot, layer, request.folded_by_verify)
        self._record("read", handle=handle, layer=layer)
        return state

    def committed_len(self, handle: Handle) -> int:
        """Tokens committed so far; waits for the device. Raises StaleHandleError."""
        request = self._requests.of(handle)
        committed_len = self._backend.cursor(request.handle.record_slot).committed_len
        if request.open_step is None:
            request.most_committed = committed_len
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
        views = self._backend.storage.layers[layer]
        return views.recurrent.detach(), None if views.conv is None else views.conv.detach()

    def checkpoint_slots(self, handles: Sequence[Handle]) -> torch.Tensor:
        """[n] int32 on the device: where the requests' checkpoints lie now. Raises StaleHandleError."""
        slots = [request.checkpoint_slot for request in self._requests.all_of(handles)]
        return torch.tensor(slots, dtype=torch.int32, device="cpu").to(self.device)

    def counters(self) -> DeviceCounters:
        """Clamps, dropped ends and wasted windows since the manager was built; waits for the device."""
        device = self._backend.counters()
        return dataclasses.replace(device, dropped_ends=device.dropped_ends + self._dropped_ends.count)

    def digest(self) -> str:
        """A short hash of who owns what and where each request stands (never of payloads); waits for the device.

        Managers that went through the same transitions have the same digest, whatever their backend or layer shape.
        """
        lines: list[list[Any]] = []
        for request in sorted(self._requests, key=lambda request: request.handle.request_id):
            cursor = self._backend.cursor(request.handle.record_slot)
            pending = 0 if request.folded_by_verify else cursor.pending_len
            lines.append([*dataclasses.astuple(request.handle), request.checkpoint_slot, cursor.committed_len, pending])
        for parked in sorted(self._preempted, key=lambda preempted: preempted.request_id):
            lines.append([parked.request_id, parked.record_slot, parked.checkpoint_slot])
        value = hashlib.sha256(json.dumps(lines).encode()).hexdigest()[:16]
        self._record("digest", value=value)
        return value

    # -- care

    def set_params(self, params: Sequence[LayerParams]) -> None:
        """New parameters from the next step on.

        Raises StepOrderError while a step is open or a record may be pending (it would be folded with another gate):
        ``fence("flush")`` first; and once a graph was captured, which holds the tensors it was captured with. Raises
        SpecStateError when they do not fit the config, or on backend "metadata".
        """
        if not isinstance(self._backend, TensorBackend):
            raise SpecStateError("set_params needs payloads, which backend 'metadata' does not hold")
        for request in self._requests:
            self._refuse_open_step("set_params", request)
            if request.may_be_pending:
                raise StepOrderError(
                    f"set_params: request {request.handle.request_id!r} may have pending records; flush first"
                )
        for preempted in self._preempted:
            if preempted.may_be_pending:
                raise StepOrderError(
                    f"set_params: request {preempted.request_id!r}, preempted, may have pending records; "
                    "fence('flush') folds them"
                )
        if self._captures:
            raise StepOrderError(
                f"set_params: graphs captured for {sorted(self._captures)} hold the old parameters; copy new values "
                "into those tensors"
            )
        self._backend.kernels.bind(check_params(params, self.config, self.device))
        self._record("set_params")

    def check_integrity(self) -> None:
        """Checks every rule of ownership; waits for the device. Raises SpecStateError with both sides of a breach.

        A checkpoint slot that is being written in place, its load still to come, is a breach once the request has been
        loaded or in a step; not before.
        """
        self._check_ownership([request for request in self._requests if request.in_use])

    # -- inside

    def _check_new(self, request_id: object, sampling: object, entry: str = "") -> SamplingParams:
        """Raises what refuses a new request of that id; its sampling parameters. ``entry``: "[i]" of sequences."""
        name = f"request_ids{entry}" if entry else "request_id"
        check_request_id(request_id, name)
        if not isinstance(sampling, SamplingParams):
            raise SpecStateError(
                f"sampling{entry} must be SamplingParams, not {type(sampling).__name__} (request {request_id!r})"
            )
        sampling = sampling.checked()
        if request_id in self._requests:
            raise SpecStateError(f"{name} {request_id!r} is live already")
        if request_id in self._preempted:
            raise SpecStateError(f"{name} {request_id!r} is preempted: resume or discard it")
        return sampling

    def _require_slots(self, records: int, checkpoints: int, what: str) -> None:
        if records > self._record_slots.num_free or checkpoints > self._checkpoint_slots.num_free:
            raise CapacityError(
                f"{what}: free are {self._record_slots.num_free} of max_requests = {self.config.max_requests} record "
                f"slots and {self._checkpoint_slots.num_free} of num_checkpoints = {self.config.num_checkpoints} "
                "checkpoint slots"
            )

    @contextmanager
    def _new_lives(
        self, request_ids: Sequence[str], record_slot: int | None = None, checkpoint_slot: int | None = None
    ) -> Iterator[tuple[list[Handle], list[int]]]:
        """Handles of the next generations and checkpoint slots, new ones unless one is kept.

        Around what the device does for them: when that fails, by running out of memory say, all is as it was.
        """
        count = len(request_ids)
        record_slots = [self._record_slots.allocate() for _ in range(count)] if record_slot is None else []
        checkpoint_slots = [self._checkpoint_slots.allocate() for _ in range(count)] if checkpoint_slot is None else []
        rows = record_slots if record_slot is None else [record_slot]
        slots = checkpoint_slots if checkpoint_slot is None else [checkpoint_slot]
        generations = range(self._generation + 1, self._generation + 1 + count)
        handles = [Handle(*life) for life in zip(request_ids, rows, generations, strict=True)]
        try:
            yield handles, slots
        except BaseException:
            for slot in reversed(record_slots):
                self._free_record_slot(slot)
            for slot in reversed(checkpoint_slots):
                self._checkpoint_slots.free(slot)
            raise
        self._generation += count

    def _stop(self, request: Request, fold: bool) -> Preempted:
        """The request moves no more: its records are folded or stay as they are, an open step goes on without it.

        Should this or what follows fail on the way, another call finds what it needs: the cursor knows what verify has
        folded before the step is left, and is the last thing that ``release`` clears.
        """
        handle, folded_by_verify = request.handle, request.folded_by_verify
        if fold:
            self._fold_all([request])
        standing = self._backend.standing(handle.record_slot) if fold else None
        self._backend.park(handle.record_slot, folded_by_verify)
        self._leave_step(request)
        return Preempted(
            request_id=handle.request_id,
            sampling=request.sampling,
            most_committed=request.most_committed,
            may_be_pending=request.may_be_pending and not (fold or folded_by_verify),
            in_use=request.in_use or fold,
            checkpoint_slot=request.checkpoint_slot,
            record_slot=handle.record_slot,
            standing=standing,
        )

    def _free_record_slot(self, record_slot: int) -> None:
        self._backend.release(record_slot)
        self._record_slots.free(record_slot)

    def _leave_step(self, request: Request) -> None:
        """Its open step goes on without it."""
        if request.open_step is not None:
            request.open_step.null_request(request)

    def _release(self, request: Request) -> None:
        self._leave_step(request)
        self._backend.release(request.handle.record_slot)
        self._requests.remove(request)
        self._record_slots.free(request.handle.record_slot)
        self._checkpoint_slots.free(request.checkpoint_slot)

    def _discard(self, preempted: Preempted) -> None:
        if preempted.record_slot is not None:
            self._free_record_slot(preempted.record_slot)
        if preempted.checkpoint_slot is not None:
            self._checkpoint_slots.free(preempted.checkpoint_slot)
        self._preempted.remove(preempted)

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
        check_slots(self._record_slots, self._checkpoint_slots, self._requests, self._preempted)
        check_cursors(self.config, self._backend, self._requests, self._preempted)
        check_payloads(self._backend, settled)

    def _check_layer(self, layer: object) -> None:
        if type(layer) is not int or not 0 <= layer < self.config.num_layers:
            raise SpecStateError(f"layer = {shown(layer)} is outside 0..{self.config.num_layers - 1}")

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
