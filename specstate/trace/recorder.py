"""Writes the transitions of a manager to a step trace, while they happen and without holding anything up."""

import os
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, TextIO

import torch

from specstate.config import StateConfig
from specstate.errors import SpecStateError, shown
from specstate.limits import INT32_MAX, INT64_MAX
from specstate.trace.schema import EVENTS, End, Header, TraceError

#: What a caller hands to a step, and what an entry of it becomes in the trace.
_COLUMNS: dict[str, Callable[[Any], Any]] = {
    "num_accepted": lambda count: min(max(int(count), 0), INT32_MAX),
    "eager": bool,
    "finished": bool,
    "block_table": tuple,
    "positions": int,
}


@dataclass(slots=True, eq=False)
class _Pending:
    """An event that waits for its counts, or behind one that does."""

    kind: str
    fields: dict[str, Any]
    num_entries: int
    """Of its columns that are written: by row at the end of a step, as the caller's when it begins."""
    arrived: torch.cuda.Event | None


class TraceRecorder:
    """Records one manager: ``StateManager(..., recorder=TraceRecorder(path))``. A context manager.

    file: a path, which is created or overwritten, or a text file open for writing, which stays the caller's. seed: of
    the inputs that a replay derives. ``close`` (or the end of the ``with`` block) writes the last line; a trace without
    one is read as partial. What the manager does after that is not recorded.

    On a GPU the counts of a step are copied to pinned memory on the current stream; their line is written by a later
    call, once the copy has arrived, and lines keep the order of the calls. Nothing waits for the device but ``close``.

    Raises TraceError for a wrong argument, and when the file cannot be opened or takes no header. A write that fails
    later cannot undo the transition that it belongs to, so it raises nothing there: recording stops, ``failure`` says
    why, and ``close`` raises it.
    """

    def __init__(self, file: str | os.PathLike[str] | TextIO, seed: int = 0) -> None:
        if type(seed) is not int or not 0 <= seed <= INT64_MAX:
            raise TraceError(f"seed = {shown(seed)} is outside 0..{INT64_MAX}")
        self._owns_file = isinstance(file, str | os.PathLike)
        if not self._owns_file and not all(callable(getattr(file, verb, None)) for verb in ("write", "flush")):
            raise TraceError(f"file must be a path or a text file open for writing, not {type(file).__name__}")
        self._name = path_name("file", file) if self._owns_file else str(getattr(file, "name", "the trace"))
        self._file: Any = _open(self._name) if self._owns_file else file
        self._seed = seed
        self._started = self._closed = False
        self._failure: str | None = None
        self._num_events = 0
        self._queue: deque[_Pending] = deque()
        self._num_rows: dict[int, int] = {}  # of each open step
        self._progress: dict[int, tuple[int, int]] = {}  # what changed since the last event

    @property
    def failure(self) -> str | None:
        """Why recording stopped; None while it goes on."""
        return self._failure

    def __enter__(self) -> "TraceRecorder":
        return self

    def __exit__(self, error_type: object, error: object, traceback: object) -> None:
        # An error that is on its way already says more than that the recording stopped, too.
        self._finish()
        if error is None:
            self._raise_failure()

    def close(self) -> None:
        """Writes what is queued and the last line; waits for the device. Raises TraceError if recording had failed."""
        self._finish()
        self._raise_failure()

    # -- for the manager and its steps

    def start(self, config: StateConfig) -> None:
        """Writes the header. Raises SpecStateError for a second manager, TraceError when the file takes no line."""
        if self._started:
            raise SpecStateError(f"recorder of {self._name} serves a manager already")
        if self._closed:
            raise SpecStateError(f"recorder of {self._name} is closed")
        from specstate import __version__  # not at the top: the package itself imports this module

        header = Header(specstate_version=__version__, seed=self._seed, config=config)
        self._write(header.model_dump_json())
        self._raise_failure()
        self._started = True

    def record(self, kind: str, **fields: Any) -> None:
        """One transition that has happened; the fields are those of its event. Never waits for the device."""
        if self._closed or self._failure is not None:
            return
        num_entries = 0
        if kind == "begin_step":
            self._num_rows[fields["step"]] = len(fields["metadata"].handles)
            num_entries = fields["metadata"].num_entries
        elif kind in ("commit", "defer", "cancel"):
            num_entries = self._num_rows.pop(fields["step"], 0)
        if self._progress:
            fields["verified"], self._progress = self._progress, {}
        arrived = _copy_to_host(fields)
        self._queue.append(_Pending(kind, fields, num_entries, arrived))
        self._drain(wait=False)

    def progress(self, step: int, verified: int, written: int) -> None:
        """``verified`` layers of an open step have verified, ``written`` by write_records. Writes nothing yet."""
        self._progress[step] = (verified, written)

    # -- inside

    def _drain(self, *, wait: bool) -> None:
        while self._queue:
            arrived = self._queue[0].arrived
            if arrived is not None:
                if wait:
                    arrived.synchronize()
                elif not arrived.query():
                    return
            self._write_event(self._queue.popleft())

    def _write_event(self, pending: _Pending) -> None:
        try:
            line = EVENTS[pending.kind](**_host_fields(pending)).model_dump_json(exclude_none=True)
        except (ValueError, KeyError) as error:
            self._fail(f"event {self._num_events + 1} ({pending.kind}) does not fit the schema: {error}")
            return
        self._write(line)
        self._num_events += 1

    def _write(self, line: str) -> None:
        if self._failure is not None:
            return
        try:
            self._file.write(line + "\n")
        except (OSError, ValueError, TypeError) as error:  # a closed file raises ValueError, a binary one TypeError
            self._fail(f"event {self._num_events + 1} could not be written: {_reason(error)}")

    def _finish(self) -> None:
        if self._closed:
            return
        self._closed = True
        self._drain(wait=True)
        if self._started:
            self._write(End(events=self._num_events).model_dump_json())
        try:
            if self._owns_file:
                self._file.close()
            elif self._failure is None:
                self._file.flush()
        except (OSError, ValueError) as error:
            self._fail(f"the end could not be written: {_reason(error)}")

    def _fail(self, reason: str) -> None:
        if self._failure is None:
            self._failure = " ".join(f"{self._name}: {reason}".split())
        self._queue.clear()

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise TraceError(self._failure)


def path_name(what: str, path: object) -> str:
    """``path`` as text. Raises TraceError, naming the argument ``what``, when it is none."""
    name = None
    if isinstance(path, str | os.PathLike):
        with suppress(TypeError):  # of a path that says it is another thing
            name = os.fspath(path)
    if not isinstance(name, str):
        raise TraceError(f"{what} must be a path, not {type(path).__name__}")
    return name


def _open(path: str) -> TextIO:
    try:
        # Line by line, so that a process that dies leaves a partial trace that can be replayed.
        return open(path, "w", encoding="utf-8", newline="\n", buffering=1)
    except (OSError, ValueError) as error:
        raise TraceError(f"{path}: cannot be written: {_reason(error)}") from None


def _reason(error: Exception) -> str:
    return getattr(error, "strerror", None) or str(error)


def _copy_to_host(fields: dict[str, Any]) -> "torch.cuda.Event | None":
    """Starts copies of device columns in ``fields``, in place of which it puts their host side; the event behind them.

    Columns that lie on the host become lists at once: the caller may write to its tensors afterwards.
    """
    on_device = False
    for name in _COLUMNS:
        column = fields.get(name)
        if not isinstance(column, torch.Tensor):
            continue
        if column.is_cuda:
            pinned = torch.empty(column.shape, dtype=column.dtype, device="cpu", pin_memory=True)
            fields[name] = pinned.copy_(column, non_blocking=True)
            on_device = True
        else:
            fields[name] = column.tolist()
    if not on_device:
        return None
    arrived = torch.cuda.Event()
    arrived.record()
    return arrived


def _host_fields(pending: _Pending) -> dict[str, Any]:
    """The fields as their model takes them: columns as tuples, without what no row reads."""
    fields = pending.fields
    for name, convert in _COLUMNS.items():
        column = fields.get(name)
        if column is not None:
            values = column.tolist() if isinstance(column, torch.Tensor) else column
            fields[name] = tuple(convert(value) for value in values[: pending.num_entries])
    return fields
