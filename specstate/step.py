"""One step: a window for each of some requests, from begin_step to the one call that ends it.

    open --verify or write_records, every layer once--> verified --sample, as wished--> commit | defer | cancel

``flush`` comes before the first verify, if at all. ``cancel`` may come at any time before the end. A step of a captured
size is begun, its graph replayed by the caller, and ``replayed`` takes the place of the calls that are in the graph.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from specstate.backends import Backend, LayerInputs, LayerRecords
from specstate.config import StateConfig
from specstate.errors import SpecStateError, StepOrderError, shown
from specstate.integrity import check_counts
from specstate.metadata import StepMetadata
from specstate.profiling import phase
from specstate.requests import Request
from specstate.sampling import SampleResult

if TYPE_CHECKING:
    from specstate.capture import Capture
    from specstate.trace import TraceRecorder


@dataclass(slots=True, eq=False)
class DroppedEnds:
    """Row ends of a manager's steps that came after their request was released or preempted."""

    count: int = 0


class StepHost(NamedTuple):
    """What a step needs of its manager."""

    config: StateConfig
    backend: Backend
    recorder: "TraceRecorder | None"
    dropped_ends: DroppedEnds
    checks: Sequence[Callable[[Sequence[Request | None]], None]]
    """Under debug: each refuses to go on when a rule of ownership is broken for the requests of a step."""


class EndColumns(NamedTuple):
    """What a step is to end with, in row order: tensors on the device, on backend "metadata" lists."""

    num_accepted: Any
    """As given; of rows that own nothing any value."""
    eager: Any
    finished: Any
    """What the sample saw end, too. None: no row finishes."""
    num_entries: int | None
    """Entries of caller-made counts; None of a sample."""
    sample: SampleResult | None
    """Whose counts these are."""


class Step:
    """Made by ``StateManager.begin_step``; see there for errors. Tensors named below lie on the manager's device.

    A step keeps its own copy of its rows: it may be ended late, in any order among other steps, and after some of its
    requests were released.
    """

    def __init__(
        self,
        index: int,
        metadata: StepMetadata,
        requests: list[Request | None],
        shape: tuple[int, int],
        rows: Any,
        host: StepHost,
        capture: "Capture | None" = None,
    ) -> None:
        self.index = index
        """Number of the step in its manager, as in every message about it."""
        self.metadata = metadata
        self.num_rows, self.num_tokens = shape
        """Padding included."""
        self._host = host
        self._rows = rows
        self._capture = capture  # while the step waits for its replay
        self._requests = requests  # by row; None for dummy rows and, from then on, released requests
        self._num_released = 0
        self._verified = [False] * host.config.num_layers
        self._num_written = 0
        self._flushed = False
        self._samples: list[SampleResult] = []
        self._ended_by: str | None = None
        self._end_fields: dict[str, Any] = {}
        self.num_entries: int | None = None
        """Entries of the caller-made counts that ended it; None without any."""
        if capture is not None:
            capture.occupant = self
        for request in requests:
            if request is not None:
                request.open_step, request.in_use = self, True

    # -- what attention and own kernels read

    @property
    def path(self) -> str:
        """Which kernels run."""
        return self._host.backend.path

    @property
    def query_start_loc(self) -> torch.Tensor:
        """[rows + 1] int32: row i's window is tokens query_start_loc[i] .. query_start_loc[i + 1]."""
        return self._rows.query_start_loc

    @property
    def positions(self) -> torch.Tensor:
        """[tokens] int32: position of each token in its request; 0 for padding."""
        return self._rows.positions

    @property
    def committed_lens(self) -> torch.Tensor:
        """[rows] int32: tokens that each request had committed when the step began (in a CUDA graph: when its replay
        began), 0 for rows that owned nothing then. Neither a flush nor a release changes it, nor ``positions``."""
        return self._rows.committed_lens

    @property
    def checkpoint_slots(self) -> torch.Tensor:
        """[rows] int32; 0 for rows that own nothing."""
        return self._rows.checkpoint_slots

    @property
    def record_slots(self) -> torch.Tensor:
        """[rows] int32; -1 for rows that own nothing."""
        return self._rows.record_slots

    @property
    def boundary_slots(self) -> torch.Tensor:
        """[rows] int32: a request's own slot for its boundary checkpoint; 0 without one. -1 marks rows whose line of a
        block table is not used, since its position is not the request's."""
        return self._rows.boundary_slots

    # -- where the step stands, for the host

    @property
    def has_block_table(self) -> bool:
        """Its boundary checkpoints go where a table of the caller's says."""
        return self._rows.blocks is not None

    @property
    def num_verified(self) -> int:
        """Layers that have verified."""
        return sum(self._verified)

    @property
    def is_open(self) -> bool:
        return self._ended_by is None

    @property
    def between_verifies(self) -> bool:
        """Some layers have verified, others have not: the layers may stand at different positions."""
        return 0 < self.num_verified < len(self._verified)

    @property
    def folded_by_verify(self) -> bool:
        """All layers have folded what was pending when the step began; the cursors learn of it when the step ends."""
        return self._host.config.folds_in_verify and all(self._verified)

    @property
    def owning(self) -> list[bool]:
        """By row, without padding: it owns slots. Dummy rows never do, nor a request that was released or preempted."""
        return [request is not None for request in self._requests]

    # -- transitions

    @phase("specstate::step_flush")
    def flush(self) -> None:
        """Folds everything pending of the step's rows, for a verify that reads checkpoints and does not replay.

        Again is a no-op. Raises StepOrderError once a layer has verified.
        """
        self._check_open("flush")
        if self.num_verified:
            raise StepOrderError(
                f"flush must come before the first verify, {self.num_verified} layers have verified{self._where}"
            )
        if self._flushed:
            return
        self._host.backend.flush(self._rows)
        self._host.backend.refresh(self._rows)
        self._flushed = True
        for request in self._live_requests():
            request.may_be_pending = False
        self._record("step_flush")

    @phase("specstate::verify")
    def verify(
        self,
        layer: int,
        qkv: torch.Tensor | None = None,
        raw_gate: torch.Tensor | None = None,
        raw_beta: torch.Tensor | None = None,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor | None:
        """Runs one layer over the window of every row, after whatever each request has pending.

        layer: 0 .. num_layers - 1, each once, in any order. qkv [tokens, C] in the activation dtype (before the conv,
        or after it when conv_kernel_size is None); raw_gate [tokens, H, K] and raw_beta [tokens, H] in the activation
        dtype or float32 (the gate is rounded to the activation dtype); out [tokens, H, V] in the activation dtype or
        float32, made when None. Returns out; rows that own nothing and padding read zero. Backend "metadata" takes no
        tensors and returns None.

        Raises SpecStateError for a wrong layer, shape, dtype or device, and for an out that shares memory with an
        input, a state or itself; StepOrderError for a layer verified twice or a step that has ended; nothing is
        changed then.
        """
        self._check_layer("verify", layer)
        result = self._host.backend.verify(self._rows, layer, LayerInputs(qkv, raw_gate, raw_beta), out, self._where)
        self._mark_verified(layer)
        return result

    @phase("specstate::write_records")
    def write_records(
        self, layer: int, u: torch.Tensor, key: torch.Tensor, gate: torch.Tensor, conv_input: torch.Tensor | None = None
    ) -> None:
        """In place of ``verify``: the caller's own kernel hands in its records.

        u [tokens, H, V] in the compute dtype; key [tokens, H, K] after conv and SiLU, before normalisation, gate
        [tokens, H, K] raw, and conv_input [tokens, C] (the qkv before the conv; None without one) in the activation
        dtype. The kernel read the checkpoints, so nothing may be pending: call ``flush`` first, or StepOrderError.
        """
        self._check_layer("write_records", layer)
        if not self._flushed:
            for row, request in enumerate(self._requests):
                if request is not None and request.may_be_pending:
                    raise StepOrderError(
                        f"write_records: row {row} (request {request.handle.request_id!r}) may have pending records; "
                        f"call step.flush() before the first layer{self._where}"
                    )
        self._host.backend.write_records(self._rows, layer, LayerRecords(u, key, gate, conv_input), self._where)
        self._num_written += 1
        self._mark_verified(layer)

    @phase("specstate::replayed")
    def replayed(self, what: str) -> None:
        """The graph that holds this step's calls was replayed: moves the lifecycle as the calls would have.

        what: "defer" or "commit" when that is how the graph ends its step, "verify" when the end comes outside of the
        graph. Backend "metadata": "verify" marks all layers in one call, without a capture. Raises SpecStateError when
        the graph ended another way, StepOrderError when nothing waits for a replay.
        """
        self._check_open("replayed", waiting=True)
        if type(what) is not str:
            raise SpecStateError(f"replayed: what = {shown(what)} must be 'verify', 'defer' or 'commit'{self._where}")
        if self._host.backend.path == "metadata":
            if what != "verify":
                raise SpecStateError(f"replayed({what!r}): backend 'metadata' takes 'verify'{self._where}")
            if self.num_verified:
                raise StepOrderError(
                    f"replayed('verify'): {self.num_verified} layers have verified already{self._where}"
                )
            self._mark_all_verified()
            return
        capture = self._capture
        if capture is None or capture.recorded is None:
            raise StepOrderError(f"replayed({what!r}): the step was begun without a captured size{self._where}")
        recorded = capture.recorded
        if what != (recorded._ended_by or "verify"):
            raise SpecStateError(
                f"replayed({what!r}): the graph of {capture.shape} ends with {recorded._ended_by or 'verify'!r}"
                f"{self._where}"
            )
        self._capture = capture.occupant = None
        self._mark_all_verified()
        if what != "verify":
            self._finish(what, **recorded._end_fields)
            return
        # The next replay writes over the captured rows and sample; this step may end after it.
        self._rows = self._rows.copy()
        self._samples = [sample.copy_for(self) for sample in recorded._samples]

    @phase("specstate::sample")
    def sample(
        self, target_logits: torch.Tensor, draft_tokens: torch.Tensor, draft_probs: torch.Tensor | None = None
    ) -> SampleResult:
        """Accepts drafts and draws the next token, so that the output is distributed as the target's own.

        Each row goes by the ``sampling`` that its request was admitted with; under temperature 0, the longest run of
        drafts that are the target's best tokens is accepted. target_logits [tokens, vocab] float; draft_tokens [tokens]
        int32 or int64, the windows' ids laid out like qkv. draft_probs [tokens, vocab] float32: line i is the
        distribution that token i was drawn from; lines of first tokens are not read, and where a token is none, -1 say,
        the line must be zero. Without draft_probs a draft stands when it is the token that the target draws itself,
        which depends on no draft and no window; a draft model of the same seed in a manager of its own agrees with it
        often. Under ``debug``, lines that are no probabilities are refused, and logits that allow no token.

        Random numbers are a function of the request's seed and the token's position (kernels/philox.py): the same seed
        gives the same tokens in any row, batch, graph and rank. A count is at least min_accepted, also where an end
        token comes sooner: the row's tokens end with that token, its count does not. Changes no state; end the step
        with the result, or with one of several. Raises SpecStateError for a wrong shape, dtype or device,
        StepOrderError before all layers have verified.
        """
        self._check_all_verified("sample")
        sampled = self._host.backend.sample(self._rows, target_logits, draft_tokens, draft_probs, self._where)
        self._samples.append(SampleResult(self, *sampled))
        return self._samples[-1]

    @phase("specstate::commit")
    def commit(self, num_accepted: Any, finished: Any = None) -> None:
        """Accepts and folds everything of the step's rows now, older pending records included, under every policy.

        num_accepted: a SampleResult of this step, with which its finished rows finish; or [n] int32 or int64 with an
        entry batch_index[i] for row i, which finishes no row (unless it is the very tensor of a SampleResult of this
        step); backend "metadata" takes sequences too. Counts are clamped to [min_accepted, query_len] on the device and
        the clamps counted (under ``debug`` they are refused). finished: as ``defer`` takes it. Raises StepOrderError
        before all layers have verified or when the step has ended, SpecStateError for a wrong shape, dtype, device or
        length; nothing is changed then.
        """
        self._end("commit", num_accepted, eager=None, finished=finished)

    @phase("specstate::defer")
    def defer(self, num_accepted: Any, eager: Any = None, finished: Any = None) -> None:
        """Accepts as the fold policy says: "eager" folds now, "deferred" in the next verify, "ring" when R runs short.

        eager [n] bool: rows that fold all they have now. finished [n] bool: requests that end with this window, beside
        those that the SampleResult handed in saw end; later windows of theirs count as 0 accepted. Both are indexed by
        batch_index like num_accepted. For the rest, and for errors, see ``commit``.
        """
        self._end("defer", num_accepted, eager, finished)

    @phase("specstate::cancel")
    def cancel(self) -> None:
        """Ends the step and commits nothing of its window. Layers that did not verify fold what the others folded."""
        self._check_open("cancel", waiting=True)
        if self._capture is not None:
            self._capture.occupant = None
        elif self.num_verified:
            self._host.backend.cancel(self._rows, [i for i, done in enumerate(self._verified) if not done])
        self._ended_by = "cancel"
        for request in self._live_requests():
            request.open_step = None
        self._record("cancel")

    # -- for the manager, and for RankAgreement

    def null_request(self, request: Request) -> None:
        """The request is released or preempted: its row owns nothing from here on, and its end will be dropped."""
        row = self._requests.index(request)
        if self._capture is not None:
            self._capture.null_row(row)
        else:
            self._host.backend.null_row(self._rows, row)
        self._requests[row] = None
        self._num_released += 1
        # Should the rest of it fail, a second call finds no step to leave.
        request.open_step = None

    def refresh(self) -> None:
        """Some of its requests were flushed before its first verify. A replay to come reads the cursors itself."""
        if self._capture is None:
            self._host.backend.refresh(self._rows)

    def end_columns(self, verb: str, num_accepted: Any, eager: Any, finished: Any) -> EndColumns:
        """What ``verb`` is to end the step with, checked and by row. Raises as ``commit``; changes nothing."""
        self._check_all_verified(verb)
        backend, rows, least_len, where = self._host.backend, self._rows, self.metadata.num_entries, self._where
        num_entries, sample = None, self._own_sample(verb, num_accepted)
        if sample is not None and isinstance(num_accepted, SampleResult):
            counts = sample.num_accepted
        else:
            given = num_accepted if sample is None else sample.num_accepted
            checked = backend.check_counts("num_accepted", given, least_len, where)
            counts, num_entries = backend.by_row(rows, checked), len(checked)
        if eager is not None:
            eager = backend.by_row(rows, backend.check_mask("eager", eager, least_len, where))
        if finished is not None:
            finished = backend.by_row(rows, backend.check_mask("finished", finished, least_len, where))
        if sample is not None:
            # In place: by_row has copied the caller's mask, and a capture allocates nothing.
            finished = sample.finished if finished is None else finished.logical_or_(sample.finished)
        return EndColumns(counts, eager, finished, num_entries, sample)

    # -- inside

    @property
    def _where(self) -> str:
        return f" (step {self.index})"

    def _live_requests(self) -> list[Request]:
        return [request for request in self._requests if request is not None]

    def _check_open(self, verb: str, waiting: bool = False) -> None:
        """``waiting``: the call is for steps that wait for their replay, too."""
        if self._ended_by is not None:
            raise StepOrderError(f"{verb}: the step was ended by {self._ended_by}{self._where}")
        if self._capture is not None and not waiting:
            raise StepOrderError(
                f"{verb}: the step is staged for the graph of {self._capture.shape}; replay it and call replayed, or "
                f"cancel{self._where}"
            )

    def _check_layer(self, verb: str, layer: object) -> None:
        self._check_open(verb)
        num_layers = len(self._verified)
        if type(layer) is not int or not 0 <= layer < num_layers:
            raise SpecStateError(f"{verb}: layer = {shown(layer)} is outside 0..{num_layers - 1}{self._where}")
        if self._verified[layer]:
            raise StepOrderError(f"{verb}: layer {layer} has verified already{self._where}")

    def _check_all_verified(self, verb: str) -> None:
        self._check_open(verb)
        if not all(self._verified):
            missing = [layer for layer, done in enumerate(self._verified) if not done]
            raise StepOrderError(f"{verb}: layers {missing} of {len(self._verified)} have not verified{self._where}")

    def _mark_verified(self, layer: int) -> None:
        self._verified[layer] = True
        self._record_progress()

    def _mark_all_verified(self) -> None:
        self._verified = [True] * len(self._verified)
        self._record_progress()

    def _end(self, verb: str, num_accepted: Any, eager: Any, finished: Any) -> None:
        backend, rows, where = self._host.backend, self._rows, self._where
        counts, eager, finished, num_entries, _ = self.end_columns(verb, num_accepted, eager, finished)
        if self._host.checks:
            counted = [int(count) for count in counts]
            check_counts(backend, self.metadata, self._requests, counted, f"{verb}: num_accepted", where)
            for check in self._host.checks:
                check(self._requests)
        backend.end(rows, counts, True if verb == "commit" else eager, finished)
        self.num_entries = num_entries
        self._finish(verb, num_accepted=counts, eager=eager, finished=finished)

    def _finish(self, verb: str, **fields: Any) -> None:
        """The device has ended the step, or will in stream order: the host follows."""
        self._end_fields = fields
        self._host.dropped_ends.count += self._num_released
        self._ended_by = verb
        may_be_pending = not (verb == "commit" or self._host.config.folds_at_end)
        for request, query_len in zip(self._requests, self.metadata.query_lens, strict=True):
            if request is not None:
                request.open_step = None
                request.may_be_pending = may_be_pending
                request.most_committed += query_len
        if self.metadata.row_kinds is not None:
            # Of a decode row not even one token is certain: its request may have finished.
            for row, request in enumerate(self._requests):
                if request is not None and self.metadata.is_prompt(row):
                    request.least_committed += self.metadata.query_lens[row]
        self._record(verb, **fields)

    def _own_sample(self, verb: str, given: Any) -> SampleResult | None:
        """This step's sample that ``given`` is, or is the counts of; None for counts of the caller's own.

        What the graph sampled stands for this step's copy of it.
        """
        for sample in self._samples:
            for mine in (sample, sample.copied_from):
                if mine is not None and (given is mine or given is mine.num_accepted):
                    return sample
        if isinstance(given, SampleResult):
            other = f"step {given.step.index}" if isinstance(given.step, Step) else f"no step: {shown(given.step)}"
            raise SpecStateError(f"{verb}: num_accepted is the sample of {other}{self._where}")
        return None

    def _record(self, kind: str, **fields: Any) -> None:
        if self._host.recorder is not None:
            self._host.recorder.record(kind, step=self.index, **fields)

    def _record_progress(self) -> None:
        if self._host.recorder is not None:
            self._host.recorder.progress(self.index, self.num_verified, self._num_written)
