"""From a step's metadata to the columns that a backend gets: which rows own what, padded to the device's size."""

from collections.abc import Sequence
from typing import NamedTuple

from specstate.config import StateConfig
from specstate.errors import SpecStateError, StepOrderError, shown
from specstate.kernels import rows as at
from specstate.limits import MAX_POSITION, MAX_STEP_SIZE
from specstate.metadata import Handle, StepMetadata
from specstate.requests import Request, RequestTable

_ROW_KINDS = {"decode": at.DECODE, "prompt": at.PROMPT, "dummy": at.DUMMY}


class Batch(NamedTuple):
    """The host's columns of a step, padded rows included."""

    handles: list[Handle | None]
    """Whose row it is; None for dummy and padded rows, which own nothing."""
    checkpoint_slots: list[int]
    """0 for rows that own nothing."""
    query_lens: list[int]
    min_accepted: list[int]
    batch_index: list[int] | None
    """None: entry i is row i's."""
    row_kinds: list[int]
    boundary_slots: list[int]
    """The owner's slot for its next boundary checkpoint; 0: none."""
    num_tokens: int
    """Padding included."""
    all_decode: bool
    """Every row is a request's, and none feeds a prompt."""


def find_requests(metadata: StepMetadata, table: RequestTable, config: StateConfig, where: str) -> list[Request | None]:
    """The live request of every row, None for dummy rows. Raises whatever refuses the step, see ``begin_step``."""
    try:
        metadata.check_lengths()
    except ValueError as error:
        raise SpecStateError(f"{error}{where}") from None
    requests = table.find(metadata.handles)
    longest = max(metadata.query_lens, default=0)
    # A column at a time. Only what seems wrong is looked at row by row, which finds the words for it.
    if requests is None or longest > config.max_query_len or not _may_step(requests, longest, config):
        return _find_by_row(metadata, table, config, where)
    return requests


def _may_step(requests: list[Request | None], longest: int, config: StateConfig) -> bool:
    """Whether the requests are no more than fit, each there once, in no open step, and far from the last position."""
    live = [request for request in requests if request is not None]
    latest = MAX_POSITION - longest
    return len(live) == len(set(live)) <= config.max_requests and not [
        request for request in live if request.open_step is not None or request.most_committed > latest
    ]


def _find_by_row(metadata: StepMetadata, table: RequestTable, config: StateConfig, where: str) -> list[Request | None]:
    num_live = sum(handle is not None for handle in metadata.handles)
    if num_live > config.max_requests:
        raise SpecStateError(f"handles has {num_live} live rows, max_requests = {config.max_requests}{where}")
    requests: list[Request | None] = []
    row_of: dict[str, int] = {}
    for row, (handle, query_len) in enumerate(zip(metadata.handles, metadata.query_lens, strict=True)):
        if query_len > config.max_query_len:
            raise SpecStateError(
                f"query_lens[{row}] = {query_len} exceeds max_query_len = {config.max_query_len}{where}"
            )
        if handle is None:
            requests.append(None)
            continue
        request = table.of(handle, f"handles[{row}]", where)
        name = f"handles[{row}]: request {handle.request_id!r}"
        if row_of.setdefault(handle.request_id, row) != row:
            raise SpecStateError(f"{name} is also row {row_of[handle.request_id]}{where}")
        if request.open_step is not None:
            raise StepOrderError(
                f"{name} is in step {request.open_step.index}, still open; end it, or cancel it if its forward failed"
                f"{where}"
            )
        most_committed = request.most_committed - request.overcounted
        if most_committed + query_len > MAX_POSITION:
            raise SpecStateError(
                f"{name} may stand at {most_committed}, query_lens[{row}] = {query_len} could lead past "
                f"{MAX_POSITION}; committed_len waits for the device and says where it stands{where}"
            )
        requests.append(request)
    return requests


def padded_shape(metadata: StepMetadata, pad_to: object, where: str) -> tuple[int, int]:
    """(rows, tokens) that the device sees. Raises SpecStateError when ``pad_to`` or a size is out of range."""
    shape = len(metadata.handles), sum(metadata.query_lens)
    padded = shape if pad_to is None else pad_to if isinstance(pad_to, tuple) else (pad_to, shape[1])
    if len(padded) != 2 or any(type(size) is not int for size in padded):
        raise SpecStateError(f"pad_to = {shown(pad_to)} must be rows or (rows, tokens){where}")
    for name, size, least in zip(("rows", "tokens"), padded, shape, strict=True):
        if size < least:
            raise SpecStateError(f"pad_to {name} = {shown(size)} is less than the step's {least}{where}")
        if size > MAX_STEP_SIZE:
            field = name if pad_to is None else f"pad_to {name}"
            raise SpecStateError(f"{field} = {shown(size)} exceeds {MAX_STEP_SIZE}{where}")
    return padded


def step_batch(
    metadata: StepMetadata, requests: list[Request | None], shape: tuple[int, int], keeps_boundaries: bool
) -> Batch:
    """The columns of a step. Dummy and padded rows own nothing, and no caller-made entry is read for them.

    ``keeps_boundaries``: boundary checkpoints go into the requests' own slots.
    """
    kinds, padding = metadata.row_kinds, shape[0] - len(requests)
    zeros = [0] * padding
    owned = all(requests)
    least: Sequence[int] = metadata.least_accepted
    entries: Sequence[int] | None = metadata.batch_index
    if not owned:
        least = [0 if r is None else n for r, n in zip(requests, least, strict=True)]
        if entries is not None:
            entries = [0 if r is None else entry for r, entry in zip(requests, entries, strict=True)]
    return Batch(
        handles=[*metadata.handles, *[None] * padding],
        checkpoint_slots=[0 if r is None else r.checkpoint_slot for r in requests] + zeros,
        query_lens=[*metadata.query_lens, *zeros],
        min_accepted=[*least, *zeros],
        batch_index=None if entries is None else [*entries, *zeros],
        row_kinds=([at.DECODE] * len(requests) if kinds is None else [_ROW_KINDS[kind] for kind in kinds])
        + [at.DUMMY] * padding,
        boundary_slots=(
            [0 if r is None else r.boundary_slot for r in requests] if keeps_boundaries else [0] * len(requests)
        )
        + zeros,
        num_tokens=shape[1],
        all_decode=owned and kinds is None and not padding,
    )


def flush_batch(owners: list[tuple[Handle, int]]) -> Batch:
    """Rows without tokens, for a flush outside of any step; ``owners`` with their checkpoint slots."""
    zeros = [0] * len(owners)
    return Batch(
        handles=[handle for handle, _ in owners],
        checkpoint_slots=[slot for _, slot in owners],
        query_lens=zeros,
        min_accepted=zeros,
        batch_index=None,
        row_kinds=[at.DUMMY] * len(owners),
        boundary_slots=zeros,
        num_tokens=0,
        all_decode=False,
    )
