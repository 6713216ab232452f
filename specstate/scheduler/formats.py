"""The formats of a workload: what one line of each says, as a ``Row``. Every format has one request a line.

| format | a line | time | lengths | prefix hashes |
|---|---|---|---|---|
| mooncake | JSON object | timestamp, ms | input_length, output_length | hash_ids, of 512 tokens |
| azure | CSV, header | TIMESTAMP, UTC to 100 ns | ContextTokens, GeneratedTokens | none |
| burstgpt | CSV, header | Timestamp, s | Request tokens, Response tokens | none |
| specstate | JSON object | arrival_ms | input_len, output_len | prefix_hashes of block_size tokens |

Sources: kvcache-ai/Mooncake, FAST25-release/traces; Azure/AzurePublicDataset, the LLM inference traces of 2023 (and
2024, whose times end in +00:00); HPMLL/BurstGPT, whose newer files have Session ID and Elapsed time besides. BurstGPT
writes a request that failed as one of 0 response tokens: read such files with ``skip_bad``, or those named
without_fails.

A line of specstate's own format has the fields of ``TracedRequest`` under their names: arrival_ms, input_len and
output_len; if it likes, request_id (else the line's number is its name), prefix_hashes (else none) and block_size
(else 512):

    {"request_id": "a", "arrival_ms": 12.5, "input_len": 1100, "output_len": 80, "prefix_hashes": [0, 7, "x"]}
"""

import csv
import re
from collections.abc import Callable, Mapping
from datetime import datetime
from decimal import Decimal
from typing import Annotated, NamedTuple, Self

from pydantic import BaseModel, ConfigDict, Field, PlainValidator, model_validator

from specstate.errors import shown
from specstate.limits import INT64_MAX
from specstate.scheduler.lines import LineFault, parse_object, validated
from specstate.scheduler.workloads import (
    DEFAULT_BLOCK_SIZE,
    MAX_ARRIVAL_MS,
    MAX_REQUEST_LEN,
    WorkloadFormat,
    num_blocks,
)

NS_PER_MS, NS_PER_S = 10**6, 10**9


class Row(NamedTuple):
    """A line in our words, before it is scaled."""

    arrival_ns: int
    time: object
    """As the file has it."""
    input_len: int
    output_len: int
    prefix_hashes: tuple[int | str, ...] = ()
    block_size: int = DEFAULT_BLOCK_SIZE
    request_id: str | None = None


ParseLine = Callable[[str], Row]
"""What makes rows of lines. Raises LineFault for a value that is wrong, or is not there."""


def detect_format(first: str) -> WorkloadFormat:
    """The format whose fields a file's first line has most of."""
    is_json = first.lstrip().startswith("{")
    fields = set(parse_object(first) if is_json else _cells(first))
    common = {name: len(fields & form.fields) for name, form in FORMATS.items() if form.has_header != is_json}
    best = max(common, key=lambda name: common[name])
    if not common[best]:
        likely_first = sorted(FORMATS, key=lambda name: name not in common)
        known = "; ".join(f"{name}: {', '.join(sorted(FORMATS[name].fields))}" for name in likely_first)
        raise LineFault(f"{shown(first)} is of no known format ({known})")
    return best


# -- JSON, one object a line

_Length = Annotated[int, Field(ge=1, le=MAX_REQUEST_LEN)]
_ArrivalMs = Annotated[float, Field(ge=0, le=MAX_ARRIVAL_MS, allow_inf_nan=False)]
_IntHash = Annotated[int, Field(ge=-INT64_MAX, le=INT64_MAX)]


def _hash(value: object) -> int | str:
    # As a union of types, its errors would name the types' places in the union, as if they were fields.
    if (isinstance(value, str) and value) or (type(value) is int and -INT64_MAX <= value <= INT64_MAX):
        return value
    raise ValueError("must be an integer within int64, or a string that is not empty")


class _JsonLine(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class _MooncakeLine(_JsonLine):
    timestamp: _ArrivalMs
    input_length: _Length
    output_length: _Length
    hash_ids: tuple[_IntHash, ...]

    @model_validator(mode="after")
    def _hashes_fit(self) -> Self:
        _check_hashes("hash_ids", self.hash_ids, "input_length", self.input_length, DEFAULT_BLOCK_SIZE)
        return self

    def row(self) -> Row:
        arrival_ns = round(self.timestamp * NS_PER_MS)
        return Row(arrival_ns, self.timestamp, self.input_length, self.output_length, self.hash_ids)


class _OwnLine(_JsonLine):
    request_id: Annotated[str, Field(min_length=1)] | None = None
    arrival_ms: _ArrivalMs
    input_len: _Length
    output_len: _Length
    prefix_hashes: tuple[Annotated[int | str, PlainValidator(_hash)], ...] = ()
    block_size: _Length = DEFAULT_BLOCK_SIZE

    @model_validator(mode="after")
    def _hashes_fit(self) -> Self:
        _check_hashes("prefix_hashes", self.prefix_hashes, "input_len", self.input_len, self.block_size)
        return self

    def row(self) -> Row:
        return Row(
            round(self.arrival_ms * NS_PER_MS),
            self.arrival_ms,
            self.input_len,
            self.output_len,
            self.prefix_hashes,
            self.block_size,
            self.request_id,
        )


def _check_hashes(name: str, hashes: tuple[int | str, ...], length_name: str, input_len: int, block_size: int) -> None:
    blocks = num_blocks(input_len, block_size)
    if len(hashes) > blocks:
        raise ValueError(
            f"{name} has {len(hashes)} entries, {length_name} = {input_len} has {blocks} blocks of {block_size} tokens"
        )


class _Json(NamedTuple):
    time_field: str
    model: type[_MooncakeLine] | type[_OwnLine]
    has_header: bool = False

    @property
    def fields(self) -> frozenset[str]:
        return frozenset(self.model.model_fields)

    def start(self, first: str) -> ParseLine:
        return lambda text: validated(self.model, text).row()


# -- CSV, its header first


class _Csv(NamedTuple):
    time_field: str
    input_field: str
    output_field: str
    read_time: Callable[[str], int | None]
    """Nanoseconds, of any origin; None of what is no time."""
    time_is: str
    unused: tuple[str, ...] = ()
    """Columns that may be there."""
    has_header: bool = True

    @property
    def fields(self) -> frozenset[str]:
        return frozenset((self.time_field, self.input_field, self.output_field, *self.unused))

    def start(self, first: str) -> ParseLine:
        columns = _cells(first)
        wanted = (self.time_field, self.input_field, self.output_field)
        for name in wanted:
            if name not in columns:
                raise LineFault(f"column {name} is missing: there are {', '.join(map(shown, columns))}")
        for name in columns:
            if name not in self.fields or columns.count(name) > 1:
                what = "is there twice" if name in self.fields else "is none of this format"
                raise LineFault(f"column {shown(name)} {what}: it has {', '.join(sorted(self.fields))}")
        time_at, input_at, output_at = map(columns.index, wanted)

        def parse(text: str) -> Row:
            cells = _cells(text)
            if len(cells) != len(columns):
                raise LineFault(f"{len(cells)} columns, the header has {len(columns)}")
            arrival_ns = self.read_time(cells[time_at])
            if arrival_ns is None:
                raise LineFault(f"{self.time_field} = {shown(cells[time_at])} is not {self.time_is}")
            if not 0 <= arrival_ns <= MAX_ARRIVAL_MS * NS_PER_MS:
                raise LineFault(f"{self.time_field} = {shown(cells[time_at])} is outside 0..{MAX_ARRIVAL_MS:.0f} ms")
            return Row(
                arrival_ns,
                cells[time_at],
                _length(self.input_field, cells[input_at]),
                _length(self.output_field, cells[output_at]),
            )

        return parse


def _cells(text: str) -> list[str]:
    try:
        return next(csv.reader((text,), strict=True), [])
    except csv.Error as error:
        raise LineFault(f"not CSV: {error}") from None


_WHOLE_NUMBER = re.compile(r"-?[0-9]{1,40}")
_NUMBER = re.compile(r"-?[0-9]{1,20}(\.[0-9]{0,20})?([eE][+-]?[0-9]{1,2})?")
_UTC_TIME = re.compile(r"([0-9]{4}-[0-9]{2}-[0-9]{2}[ T][0-9:]{8})(?:\.([0-9]{1,9}))?(?:\+00:00|Z)?")


def _length(name: str, text: str) -> int:
    if not _WHOLE_NUMBER.fullmatch(text):
        raise LineFault(f"{name} = {shown(text)} is not a whole number")
    value = int(text)
    if not 1 <= value <= MAX_REQUEST_LEN:
        raise LineFault(f"{name} = {value} is outside 1..{MAX_REQUEST_LEN}")
    return value


def _seconds(text: str) -> int | None:
    return int(Decimal(text) * NS_PER_S) if _NUMBER.fullmatch(text) else None


def _utc(text: str) -> int | None:
    # By hand behind the second: datetime knows microseconds only, the traces have seven digits.
    match = _UTC_TIME.fullmatch(text)
    if match is None:
        return None
    try:
        day = datetime.fromisoformat(match[1])
    except ValueError:
        return None
    seconds = ((day.toordinal() - _EPOCH) * 24 + day.hour) * 3600 + day.minute * 60 + day.second
    return seconds * NS_PER_S + int((match[2] or "0").ljust(9, "0"))


_EPOCH = datetime(1970, 1, 1).toordinal()

FORMATS: Mapping[WorkloadFormat, _Json | _Csv] = {
    "mooncake": _Json("timestamp", _MooncakeLine),
    "azure": _Csv("TIMESTAMP", "ContextTokens", "GeneratedTokens", _utc, "a time like 2023-11-16 18:15:46.6805900"),
    "burstgpt": _Csv(
        "Timestamp",
        "Request tokens",
        "Response tokens",
        _seconds,
        "a number of seconds",
        ("Session ID", "Elapsed time", "Model", "Total tokens", "Log Type"),
    ),
    "specstate": _Json("arrival_ms", _OwnLine),
}
