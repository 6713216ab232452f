"""Steps: opened over some requests, captured into CUDA graphs; and flushes between them."""

import functools
from collections.abc import Sequence
from typing import Any

import torch

from specstate.backends.tensors import TensorBackend
from specstate.batch import find_requests, padded_shape, step_batch
from specstate.capture import Capture
from specstate.errors import SpecStateError, StepOrderError, shown
from specstate.integrity import check_lines
from specstate.limits import MAX_CAPTURES, MAX_STEP_SIZE
from specstate.manager.core import Core
from specstate.metadata import Handle, StepMetadata
from specstate.profiling import phase
from specstate.requests import Request
from specstate.step import Step, StepHost


class Stepping(Core):
    """Steps: opened over some requests, captured into CUDA graphs; and flushes between them. Part of StateManager."""

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
        used = blocks if capture is None else capture.rows.blocks
        by_table = used is not None
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
                self._ledger.give_back_checkpoint(request.boundary_slot)
                request.boundary_slot = 0
            raise
        if by_table:
            for moving in requests:
                if moving is not None:
                    moving.moved = True
        self._next_step = index + 1
        host = self._step_host
        if self._debug and blocks is not None:  # once more when it ends: the table may have changed by then
            again = functools.partial(self._check_lines, metadata, blocks, where)
            host = host._replace(checks=(*host.checks, again))
        step = Step(index, metadata, requests, shape, rows, host, capture)
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

    def forget_captures(self) -> None:
        """Graphs captured so far will not be replayed again: what they hold the manager to no longer counts.

        Raises StepOrderError while a step waits for a replay.
        """
        for capture in self._captures.values():
            if capture.occupant is not None:
                raise StepOrderError(f"forget_captures: step {capture.occupant.index} waits for a replay")
        self._captures.clear()

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
                raise SpecStateError(f"handles = {shown(handles)} names a request twice")
        for request in requests:
            self._refuse_between_verifies("flush", request)
        self._fold_all(requests)
        self._record("flush", handles=None if handles is None else tuple(handles))

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
