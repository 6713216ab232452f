"""Files of requests: ``RequestReader`` goes through one without holding more than a line of it."""

import os
from collections.abc import Generator, Iterator
from fractions import Fraction
from itertools import chain
from types import TracebackType
from typing import Self

from specstate.errors import SpecStateError, shown
from specstate.scheduler.formats import FORMATS, NS_PER_MS, Row, detect_format
from specstate.scheduler.lines import Line, LineFault, LineFile
from specstate.scheduler.workloads import (
    MAX_ARRIVAL_MS,
    MAX_REQUEST_LEN,
    SkippedLines,
    TracedRequest,
    WorkloadError,
    WorkloadFormat,
    WorkloadOptions,
    num_blocks,
)


class RequestReader:
    """The requests of a file, in its order; their arrivals count from the first of them.

    An iterator, to be used once; it closes the file at its end, and ``with`` closes it earlier.

    Raises WorkloadError with file, line, field and value: when it is built, for a file that cannot be read, is empty
    or of no known format; when it comes to a line that cannot be used, unless ``skip_bad`` is on; at the end, when
    there was no request. Times that go backwards count as unusable lines.
    """

    def __init__(self, path: str | os.PathLike[str], options: WorkloadOptions | None = None) -> None:
        options = WorkloadOptions() if options is None else options
        if not isinstance(options, WorkloadOptions):
            raise SpecStateError(f"options must be WorkloadOptions, not {type(options).__name__}")
        self.skipped = SkippedLines()
        self._options = options
        # Exactly the decimal number that was given: 10 tokens times 1.1 are 11, and not a token more.
        self._length_factor = Fraction(repr(options.length_factor)).as_integer_ratio()
        self._file = LineFile(path)
        try:
            lines = iter(self._file)
            first = next(lines, None)
            if first is None:
                raise WorkloadError(f"{self._file.name}: is empty")
            try:
                text = first.text()
                self.format: WorkloadFormat = options.format or detect_format(text)
                parser = FORMATS[self.format]
                self._parse = parser.start(text)
            except LineFault as fault:
                raise self._file.fault(first, fault) from None
            self._time_field = parser.time_field
            self._requests = self._read(lines if parser.has_header else chain([first], lines))
        except BaseException:
            self._file.close()
            raise

    def __iter__(self) -> Iterator[TracedRequest]:
        return self

    def __next__(self) -> TracedRequest:
        return next(self._requests)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Closes the file; there are no more requests."""
        self._requests.close()
        self._file.close()

    def _read(self, lines: Iterator[Line]) -> Generator[TracedRequest, None, None]:
        began_ns, before, count = 0, Row(0, None, 1, 1), 0
        try:
            for line in lines:
                try:
                    row = self._parse(line.text())
                    if count and row.arrival_ns < before.arrival_ns:
                        raise LineFault(
                            f"{self._time_field} = {shown(row.time)} is before {shown(before.time)}, the request "
                            "above it"
                        )
                    began_ns = began_ns if count else row.arrival_ns
                    request = self._request(row, began_ns, line.number)
                except LineFault as fault:
                    error = self._file.fault(line, fault)
                    if not self._options.skip_bad:
                        raise error from None
                    self.skipped.add(error)
                    continue
                yield request
                before, count = row, count + 1
                if count == self._options.limit:
                    return
            if not count:
                passed = f", and {self.skipped.count} bad lines: {self.skipped.first[0]}" if self.skipped.count else ""
                raise WorkloadError(f"{self._file.name}: has no request{passed}")
        finally:
            self._file.close()

    def _request(self, row: Row, began_ns: int, number: int) -> TracedRequest:
        arrival_ms = (row.arrival_ns - began_ns) / NS_PER_MS / self._options.rate_factor
        if arrival_ms > MAX_ARRIVAL_MS:
            raise LineFault(
                f"{self._time_field} = {shown(row.time)} is {arrival_ms:.0f} ms behind the first, with rate_factor = "
                f"{self._options.rate_factor}; the limit is {MAX_ARRIVAL_MS:.0f}"
            )
        input_len = self._scaled("input", row.input_len)
        block_size = self._scaled_block(row.block_size) if self._options.scale_blocks else row.block_size
        return TracedRequest(
            row.request_id or str(number),
            arrival_ms,
            input_len,
            self._scaled("output", row.output_len),
            row.prefix_hashes[: num_blocks(input_len, block_size)],
            block_size,
        )

    def _scaled_block(self, block_size: int) -> int:
        numerator, denominator = self._length_factor
        scaled, rest = divmod(block_size * numerator, denominator)
        if rest or not 1 <= scaled <= MAX_REQUEST_LEN:
            raise LineFault(
                f"a block of {block_size} tokens times length_factor = {self._options.length_factor} is no whole "
                f"number in 1..{MAX_REQUEST_LEN}, as scale_blocks needs it"
            )
        return scaled

    def _scaled(self, what: str, length: int) -> int:
        numerator, denominator = self._length_factor
        scaled = -(-length * numerator // denominator)
        if scaled > MAX_REQUEST_LEN:
            raise LineFault(
                f"an {what} of {length} tokens times length_factor = {self._options.length_factor} exceeds "
                f"{MAX_REQUEST_LEN}"
            )
        return scaled
