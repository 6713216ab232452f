"""The state manager: who owns which slot, which steps are open, and the order in which things may happen.

Data flows one way: metadata -> rows -> kernels -> cursors. The manager decides on the host and never waits for the
device, save where a method says so.
"""

import dataclasses
import hashlib
import json
from collections.abc import Sequence
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
from specstate.requests import Request, RequestTable
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
        SpecStateError when the id is live already.
        """
        if not isinstance(request_id, str) or not request_id:
            raise SpecStateError(f"request_id must be a string with at least one character, got {shown(request_id)}")
        try:
            request_id.encode()
        except UnicodeEncodeError:
            raise SpecStateError(f"request_id {request_id!r} cannot be written as UTF-8") from None
        sampling = SamplingParams() if sampling is None else sampling
        if not isinstance(sampling, SamplingParams):
            raise SpecStateError(
                f"sampling must be SamplingParams, not {type(sampling).__name__} (request {request_id!r})"
            )
        sampling = sampling.checked()
        if request_id in self._requests:
            raise SpecStateError(f"request_id {request_id!r} is live already")
        if not self.can_admit():
            raise CapacityError(
                f"no slot for request {request_id!r}: free are {self._record_slots.num_free} of max_requests = "
                f"{self.config.max_requests} record slots and {self._checkpoint_slots.num_free} of num_checkpoints = "
                f"{self.config.num_checkpoints} checkpoint slots"
            )
        handle = Handle(request_id, self._record_slots.allocate(), self._generation + 1)
        request = Request(handle, self._checkpoint_slots.allocate())
        try:
            self._backend.admit(request.checkpoint_slot, handle.record_slot, handle.generation, sampling.columns())
        except BaseException:  # the device's own, such as running out of memory
            self._record_slots.free(handle.record_slot)
            self._checkpoint_slots.free(request.checkpoint_slot)
            raise
        self._generation = handle.generation
        self._requests.add(request)
        self._record(
            "admit", handle=handle, checkpoint_slot=request.checkpoint_slot, sampling=sampling.model_dump(mode="json")
        )
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
        request = self._requests.of(handle)
        if request.open_step is not None:
            request.open_step.null_request(request)
        self._backend.release(handle.record_slot)
        self._requests.remove(request)
        self._record_slots.free(handle.record_slot)
        self._checkpoint_slots.free(request.checkpoint_slot)
        self._record("release", handle=handle)

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

        Raises StaleHandleError, and StepOrderError when an open step of one of them stands between its first and its
        last layer's verify.
        """
        if handles is None:
            requests = list(self._requests)
        else:
            requests = self._requests.all_of(handles)
            if len({id(request) for request in requests}) != len(requests):
                raise SpecStateError("handles names a request twice")
        for request in requests:
            self._refuse_between_verifies("flush", request)
        # What a verify has folded already is not folded again: the cursors learn of it when that step ends.
        due = [request for request in requests if request.may_be_pending and not request.folded_by_verify]
        if due:
            self._backend.flush(self._backend.begin(flush_batch(due), ""))
            # A step that has verified needs its rows no more than for its end, which reads the cursors.
            for step in {id(r.open_step): r.open_step for r in due if r.open_step is not None}.values():
                if not step.num_verified:
                    step.refresh()
            for request in due:
                request.may_be_pending = False
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
        lines = []
        for request in sorted(self._requests, key=lambda request: request.handle.request_id):
            cursor = self._backend.cursor(request.handle.record_slot)
            pending = 0 if request.folded_by_verify else cursor.pending_len
            lines.append([*dataclasses.astuple(request.handle), request.checkpoint_slot, cursor.committed_len, pending])
        value = hashlib.sha256(json.dumps(lines).encode()).hexdigest()[:16]
        self._record("digest", value=value)
        return value

    # -- care

    def set_params(self, params: Sequence[LayerParams]) -> None:
        """New parameters from the next step on.

        Raises StepOrderError while a step is open or a record may be pending (it would be folded with another gate):
        ``flush`` first; and once a graph was captured, which holds the tensors it was captured with. Raises
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

    def _check_step(self, requests: Sequence[Request | None]) -> None:
        """Under debug. Whatever slot of the others is being written in place, the step's own are not."""
        self._check_ownership([request for request in requests if request is not None])

    def _check_ownership(self, settled: list[Request]) -> None:
        """Slots and cursors of all requests, payloads of ``settled`` ones."""
        check_slots(self._record_slots, self._checkpoint_slots, self._requests)
        check_cursors(self.config, self._backend, self._requests)
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
