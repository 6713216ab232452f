"""Whether all ranks are about to end a step alike.

Under tensor parallelism every rank has a manager over its own heads. Managers that go through the same transitions hand
out the same slots and stand at the same positions. One that counts another token as accepted, or takes its rows in
another order, drifts off without a word: its heads then answer for another text.
"""

import hashlib
import json
import struct
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from specstate.errors import RankDisagreementError, SpecStateError, StepOrderError, shown
from specstate.limits import INT64_MAX
from specstate.sampling import SampleResult
from specstate.step import Step

_MAX_ROWS_NAMED = 8
"""Rows that a message lists before it only counts."""


class RankAgreement:
    """Compares a step over all ranks of a process group, right before the step ends.

    group: a ``torch.distributed.ProcessGroup`` that this process is in; None: the default one. Tensors of the exchange
    lie on the CPU where the group takes them there (gloo), else on the current device (nccl), which the caller has set.
    Raises SpecStateError for another group, and before ``torch.distributed.init_process_group``.
    """

    def __init__(self, group: Any = None) -> None:
        self._group = group
        self._members()

    def check(self, step: Step, num_accepted: Any, finished: Any = None) -> None:
        """Comes back when all ranks of the group are about to end the same step alike; else raises on every rank.

        num_accepted and finished: what ``step.defer`` or ``step.commit`` will be given next; on all ranks a
        SampleResult, or on all ranks counts. Compared are the step's index and, row by row: request, generation, record
        slot, kind, query_len, min_accepted, whether the request was released or preempted since the step began; and of
        rows that still own something the accepted count, whether it finishes, and the tokens of a SampleResult. Counts
        are compared as given: they are clamped later, on the device. Not compared: padding, which holds nothing;
        ``batch_index``, since counts are compared by row; an ``eager`` mask, which only moves a fold.

        Every rank calls it once for each step, in the same order. It waits for the device and for all ranks: one that
        never calls it holds the others until the group's timeout, which raises an error of torch's own. One all_gather
        of 24 bytes a rank, and another one, of all rows, when ranks differ.

        Raises RankDisagreementError in the same words on every rank, with the rows that differ and what they are on
        which global ranks. A rank whose own arguments are refused raises what ``defer`` would (SpecStateError,
        StepOrderError), and the other ranks RankDisagreementError with its words. Inside of a CUDA graph's capture
        StepOrderError. Whatever is raised, nothing has changed: the step is open, and every rank may cancel it.
        """
        if torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():
            raise StepOrderError("check waits for the device, which a capture does not allow; end the step outside")
        ranks, device = self._members()
        refusal: SpecStateError | None = None
        try:
            report = _report(step, num_accepted, finished)
        except SpecStateError as error:
            # The others wait for this rank already: it takes part, and raises afterwards.
            refusal, report = error, _Report(refusal=str(error))
        text = json.dumps(report).encode()
        digest = [len(text), *struct.unpack("<2q", hashlib.blake2b(text, digest_size=16).digest())]
        digests = self._gather(torch.tensor(digest, dtype=torch.int64, device=device), len(ranks))
        if any(other != digests[0] for other in digests):
            padded = text.ljust(max(length for length, *_ in digests))
            texts = self._gather(torch.tensor(list(padded), dtype=torch.uint8, device=device), len(ranks))
            reports = [_Report.parse(bytes(other)) for other in texts]
            if refusal is None:
                raise RankDisagreementError(_disagreement(reports, ranks))
        if refusal is not None:
            raise refusal

    def _members(self) -> tuple[list[int], torch.device]:
        """Global ranks of the group, in its order, and where its collectives take tensors."""
        if not (dist.is_available() and dist.is_initialized()):
            raise SpecStateError(
                "RankAgreement: torch.distributed is not initialised; call torch.distributed.init_process_group first"
            )
        group = self._group
        if group is not None and not _is_ours(group):
            raise SpecStateError(f"group = {shown(group)} must be None or a ProcessGroup that this process is in")
        kinds = [entry.partition(":")[0] for entry in dist.get_backend_config(group).split(",")]
        return dist.get_process_group_ranks(group), torch.device("cpu" if "cpu" in kinds else kinds[0])

    def _gather(self, mine: torch.Tensor, num_ranks: int) -> list[list[int]]:
        """The [n] tensors of all ranks."""
        gathered = [torch.empty_like(mine) for _ in range(num_ranks)]
        dist.all_gather(gathered, mine, group=self._group)
        return [tensor.tolist() for tensor in gathered]


def _is_ours(group: object) -> bool:
    try:
        return isinstance(group, dist.ProcessGroup) and dist.get_rank(group) >= 0
    except ValueError:  # it was destroyed
        return False


class _Row(NamedTuple):
    """One row as a rank has it; None: no such thing."""

    request: str | None
    generation: int | None
    record_slot: int | None
    kind: str
    query_len: int
    min_accepted: int | None
    released: bool
    num_accepted: int | None
    finished: bool | None
    tokens: list[int] | None

    @property
    def owner(self) -> str:
        return "a dummy" if self.request is None else f"request {shown(self.request)}"


class _Report(NamedTuple):
    """What a rank is about to do, or why it cannot. It travels as JSON, without the names of fields."""

    step: int | None = None
    rows: tuple[_Row, ...] = ()
    refusal: str | None = None

    @classmethod
    def parse(cls, text: bytes) -> "_Report":
        step, rows, refusal = json.loads(text)
        return cls(step, tuple(_Row(*row) for row in rows), refusal)


def _report(step: object, num_accepted: Any, finished: Any) -> _Report:
    """Reads the device. Raises SpecStateError for what ``step`` would refuse to end with."""
    if not isinstance(step, Step):
        raise SpecStateError(f"step must be a Step from begin_step, not {type(step).__name__}")
    ends, metadata = step.end_columns("check", num_accepted, None, finished), step.metadata
    counts = _on_host(ends.num_accepted)
    finishes = [False] * step.num_rows if ends.finished is None else _on_host(ends.finished)
    # Of the very tensor of a sample's counts, which a caller may have broadcast, no tokens: other ranks have none.
    tokens = ends.sample.tokens.tolist() if ends.sample and isinstance(num_accepted, SampleResult) else None
    kinds, least = metadata.row_kinds or ("decode",) * len(metadata.handles), metadata.least_accepted
    rows = []
    for row, (handle, owns) in enumerate(zip(metadata.handles, step.owning, strict=True)):
        rows.append(
            _Row(
                request=None if handle is None else handle.request_id,
                generation=None if handle is None else handle.generation,
                record_slot=None if handle is None else handle.record_slot,
                kind=kinds[row],
                query_len=metadata.query_lens[row],
                min_accepted=None if handle is None else least[row],
                released=handle is not None and not owns,
                # Backend "metadata" takes any int; beyond int64 all are one.
                num_accepted=max(min(counts[row], INT64_MAX), -INT64_MAX) if owns else None,
                finished=finishes[row] if owns else None,
                tokens=tokens[row] if owns and tokens else None,
            )
        )
    return _Report(step.index, tuple(rows))


def _on_host(column: Any) -> list[Any]:
    return column.tolist() if isinstance(column, torch.Tensor) else column


def _disagreement(reports: list[_Report], ranks: list[int]) -> str:
    """How the reports of ``ranks`` differ, in words; it depends on nothing else, so that all ranks say the same."""
    refused = [(report.refusal, rank) for report, rank in zip(reports, ranks, strict=True) if report.refusal]
    if refused:
        return "ranks disagree: " + "; ".join(f"rank {rank} was refused: {words}" for words, rank in refused)
    steps = [report.step for report in reports]
    lengths = [len(report.rows) for report in reports]
    parts = [f"{name} = {_by_rank(v, ranks)}" for name, v in (("step", steps), ("rows", lengths)) if _differ(v)]
    differing = []
    for row in range(max(lengths)):
        words = _row_differences([r.rows[row] if row < len(r.rows) else None for r in reports], ranks)
        if words:
            differing.append(f"row {row}{words}")
    parts += differing[:_MAX_ROWS_NAMED]
    if len(differing) > _MAX_ROWS_NAMED:
        parts.append(f"{len(differing) - _MAX_ROWS_NAMED} more rows")
    where = "" if _differ(steps) else f" (step {steps[0]})"
    return f"ranks disagree: {'; '.join(parts)}{where}"


def _row_differences(rows: list[_Row | None], ranks: list[int]) -> str:
    """What of one row differs, "" if nothing; None stands for a rank that has no such row."""
    owners = ["nothing" if row is None else row.owner for row in rows]
    present = [row for row in rows if row is not None]
    if len(present) < len(rows) or _differ([row.request for row in present]):
        return f": {_by_rank(owners, ranks, str)}"
    columns = zip(_Row._fields, zip(*present, strict=True), strict=True)
    words = [f"{name} = {_by_rank(column, ranks)}" for name, column in columns if _differ(column)]
    return f" ({owners[0]}): {', and '.join(words)}" if words else ""


def _differ(values: Any) -> bool:
    return any(value != values[0] for value in values)


def _by_rank(values: Any, ranks: list[int], words: Any = shown) -> str:
    """For example: 3 on ranks [0, 2], 5 on rank 1."""
    holders: list[tuple[Any, list[int]]] = []
    for value, rank in zip(values, ranks, strict=True):
        for held, those in holders:
            if held == value:
                those.append(rank)
                break
        else:
            holders.append((value, [rank]))
    return ", ".join(
        f"{words(value)} on {f'rank {those[0]}' if len(those) == 1 else f'ranks {those}'}" for value, those in holders
    )
