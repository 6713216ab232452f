"""Step traces: ``TraceRecorder`` writes one, ``read_trace`` reads one. The schema stands in schema.py."""

import os
from pathlib import Path
from typing import TypeVar

from pydantic import BaseModel, ValidationError
from pydantic_core import from_json

from specstate.errors import shown
from specstate.trace.recorder import TraceRecorder, path_name
from specstate.trace.schema import EVENTS, TRACE_VERSION, BeginStep, End, Event, Header, Read, TraceError
from specstate.validation import check_flag, first_fault

__all__ = ["TRACE_VERSION", "TraceError", "TraceRecorder", "read_trace"]

_Model = TypeVar("_Model", bound=BaseModel)


def read_trace(path: str | os.PathLike[str], partial: bool = False) -> tuple[Header, tuple[Event, ...]]:
    """The header and all events of a trace. Event i (from 1) stands in line i + 1.

    partial: the trace may lack its ``end``, and its last line may be cut short, as of a process that died.

    Raises TraceError, one line with file, line number and what is wrong, for damage of any kind; SpecStateError for a
    wrong argument.
    """
    name = path_name("path", path)
    check_flag("partial", partial)
    try:
        data = Path(name).read_bytes()
    except (OSError, ValueError) as error:
        raise TraceError(f"{name}: cannot be read: {getattr(error, 'strerror', None) or error}") from None
    if not data:
        raise TraceError(f"{name}: is empty")
    *lines, torn = data.split(b"\n")
    if torn:
        if not partial:
            where = _place(name, len(lines) + 1)
            # Damage further up is named first.
            _parse_all(name, lines, partial=True)
            raise TraceError(f"{where} is cut short: no newline at its end (--partial replays what there is)")
        if _is_json(torn):
            lines.append(torn)
        elif not lines:
            raise TraceError(f"{_place(name, 1)} is cut short: no header")
    return _parse_all(name, lines, partial)


def _parse_all(name: str, lines: list[bytes], partial: bool) -> tuple[Header, tuple[Event, ...]]:
    header: Header | None = None
    events: list[Event] = []
    end: End | None = None
    for number, line in enumerate(lines, 1):
        place = _place(name, number)
        if end is not None:
            raise TraceError(f"{place} comes after the end")
        kind = _kind_of(line, place)
        if header is None:
            header = _parse_header(kind, line, place)
        elif kind == "end":
            end = _validated(End, line, place)
            if end.events != len(events):
                raise TraceError(f"{place}: end counts {end.events} events, the trace has {len(events)}")
        elif kind in EVENTS:
            event = _validated(EVENTS[kind], line, place)
            _check_against(header, event, place)
            events.append(event)
        else:
            raise TraceError(f"{place}: unknown event {shown(kind)}")
    if header is None:
        if lines or not partial:
            raise TraceError(f"{name}: has no header")
        raise TraceError(f"{_place(name, 1)} is cut short: no header")
    if end is None and not partial:
        raise TraceError(
            f"{_place(name, len(lines))} is the last, and no end: the trace was cut short or never closed "
            "(--partial replays what there is)"
        )
    return header, tuple(events)


def _kind_of(line: bytes, place: str) -> str:
    try:
        text = line.decode("utf-8")
    except UnicodeDecodeError as error:
        raise TraceError(f"{place} is not UTF-8: byte {error.start + 1}") from None
    try:
        value = from_json(text, allow_inf_nan=False)
    except ValueError as error:
        raise TraceError(f"{place} is not JSON: {_one_line(error)}") from None
    if not isinstance(value, dict) or not isinstance(value.get("kind"), str):
        raise TraceError(f"{place} is not an object with a kind: {shown(value)}")
    kind: str = value["kind"]
    if kind == "header" and value.get("trace_version") != TRACE_VERSION:
        raise TraceError(f"{place}: trace_version is {shown(value.get('trace_version'))}, this reads {TRACE_VERSION}")
    return kind


def _parse_header(kind: str, line: bytes, place: str) -> Header:
    if kind != "header":
        raise TraceError(f"{place} must be the header, not {shown(kind)}")
    return _validated(Header, line, place)


def _validated(model: type[_Model], line: bytes, place: str) -> _Model:
    try:
        return model.model_validate_json(line)
    except ValidationError as error:
        raise TraceError(f"{place}: {first_fault(error)}") from None


def _check_against(header: Header, event: Event, place: str) -> None:
    """What can only be judged beside the header: layers, and lengths of windows."""
    config = header.config
    for step, (verified, _) in (event.verified or {}).items():
        if verified > config.num_layers:
            raise TraceError(f"{place}: verified[{step}] = {verified} exceeds num_layers = {config.num_layers}")
    if isinstance(event, Read) and event.layer >= config.num_layers:
        raise TraceError(f"{place}: layer = {event.layer} is outside 0..{config.num_layers - 1}")
    if isinstance(event, BeginStep):
        longest = max(event.metadata.query_lens, default=0)
        if longest > config.max_query_len:
            raise TraceError(f"{place}: query_lens has {longest}, more than max_query_len = {config.max_query_len}")


def _is_json(text: bytes) -> bool:
    try:
        from_json(text)
    except ValueError:
        return False
    return True


def _place(name: str, number: int) -> str:
    return f"{name}, line {number}"


def _one_line(text: object) -> str:
    return " ".join(str(text).split())
