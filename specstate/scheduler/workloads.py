"""A request as a workload knows it: when it comes, how long it is, which blocks of its prompt others may share."""

import json
from dataclasses import dataclass, field
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from specstate.errors import SpecStateError, shown

WorkloadFormat = Literal["mooncake", "azure", "burstgpt", "specstate"]

MAX_REQUEST_LEN = 2**24
"""Tokens of an input, and of an output: eight times the longest published context. More is a damaged number."""
MAX_ARRIVAL_MS = 1e13
"""Three centuries, so that wall clocks in milliseconds fit."""
DEFAULT_BLOCK_SIZE = 512
"""Tokens that one prefix hash stands for, as in the Mooncake traces."""
SHOWN_FAULTS = 5


class WorkloadError(SpecStateError):
    """A file of a workload that cannot be used: names the file, the line, the field and its value."""


@dataclass(frozen=True, slots=True)
class TracedRequest:
    """One request of a trace or a generator.

    Raises SpecStateError for a length outside 1..MAX_REQUEST_LEN, an arrival outside 0..MAX_ARRIVAL_MS, a block size
    outside 1..MAX_REQUEST_LEN, or more hashes than the input has blocks.
    """

    request_id: str
    arrival_ms: float
    """Milliseconds from the first request of the workload on."""
    input_len: int
    """Tokens of the prompt."""
    output_len: int
    """Tokens that are generated, the first included."""
    prefix_hashes: tuple[int | str, ...] = ()
    """Hash i names all tokens before (i + 1) * block_size. Two requests that share it share that prefix. The last
    hash may stand for a block that is not full. Blocks without a hash are shared with nobody."""
    block_size: int = DEFAULT_BLOCK_SIZE
    """Tokens that each hash adds."""

    def __post_init__(self) -> None:
        for name, value in (
            ("input_len", self.input_len),
            ("output_len", self.output_len),
            ("block_size", self.block_size),
        ):
            if type(value) is not int or not 1 <= value <= MAX_REQUEST_LEN:
                raise SpecStateError(f"TracedRequest: {name} = {shown(value)} is outside 1..{MAX_REQUEST_LEN}")
        if not 0 <= self.arrival_ms <= MAX_ARRIVAL_MS:
            raise SpecStateError(
                f"TracedRequest: arrival_ms = {shown(self.arrival_ms)} is outside 0..{MAX_ARRIVAL_MS:.0f}"
            )
        if len(self.prefix_hashes) > num_blocks(self.input_len, self.block_size):
            raise SpecStateError(
                f"TracedRequest: prefix_hashes has {len(self.prefix_hashes)} entries, input_len = {self.input_len} has "
                f"{num_blocks(self.input_len, self.block_size)} blocks of {self.block_size}"
            )

    def to_json_line(self) -> str:
        """The request as a line of specstate's own format, without the newline; ``RequestReader`` reads it back."""
        line: dict[str, object] = {
            "request_id": self.request_id,
            "arrival_ms": self.arrival_ms,
            "input_len": self.input_len,
            "output_len": self.output_len,
        }
        if self.prefix_hashes:
            line |= {"prefix_hashes": self.prefix_hashes, "block_size": self.block_size}
        return json.dumps(line, separators=(",", ":"))


def num_blocks(num_tokens: int, block_size: int) -> int:
    """Blocks that ``num_tokens`` reach into, the last of which may not be full."""
    return -(-num_tokens // block_size)


class WorkloadOptions(BaseModel):
    """How a file of requests is read. Raises pydantic's ``ValidationError`` that names the field and the limit."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    format: WorkloadFormat | None = None
    """None: by the first line."""
    limit: int | None = Field(default=None, ge=1)
    """Only so many requests, the first of the file."""
    length_factor: float = Field(default=1.0, gt=0, le=1e6, allow_inf_nan=False)
    """Inputs and outputs are so many times as long, rounded up. Hashes of blocks beyond a shorter input fall away."""
    scale_blocks: bool = False
    """Blocks of hashes become longer or shorter with the lengths, so that requests share what they shared. Lines whose
    blocks would not be whole numbers of tokens cannot be used."""
    rate_factor: float = Field(default=1.0, ge=1e-6, le=1e6, allow_inf_nan=False)
    """Requests come so many times as often."""
    skip_bad: bool = False
    """Lines that cannot be used are counted, in place of an error at the first."""


@dataclass(slots=True)
class SkippedLines:
    """What ``skip_bad`` has passed over so far."""

    count: int = 0
    first: list[str] = field(default_factory=list)
    """What was wrong with the first few, as the error would have said it."""

    def add(self, fault: WorkloadError) -> None:
        """Counts one line more."""
        self.count += 1
        if len(self.first) < SHOWN_FAULTS:
            self.first.append(str(fault))
