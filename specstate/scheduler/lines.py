"""Lines of a file that may be damaged: each comes with its number, and no line takes more memory than the limit."""

import os
from collections.abc import Iterator
from typing import BinaryIO, NamedTuple, NoReturn, TypeVar

from pydantic import BaseModel, ValidationError
from pydantic_core import from_json

from specstate.errors import shown
from specstate.scheduler.workloads import WorkloadError
from specstate.validation import first_fault

_Model = TypeVar("_Model", bound=BaseModel)

MAX_LINE_BYTES = 2**21
"""A prompt of 16 million tokens fits, at 512 tokens a hash and 60 characters each."""


class LineFault(ValueError):
    """What is wrong with a line; the file and the line are added by who knows them."""


class Line(NamedTuple):
    """A line as it stands in the file."""

    number: int
    """From 1."""
    data: bytes
    """Without its end; of a line that is too long, the beginning."""
    has_end: bool
    """A newline follows. The last line of a file may lack it."""

    def text(self) -> str:
        """The line decoded. Raises LineFault when it is too long, has a NUL byte, or is not UTF-8."""
        if len(self.data) > MAX_LINE_BYTES:
            raise LineFault(f"longer than {MAX_LINE_BYTES} bytes")
        if b"\0" in self.data:
            raise LineFault(f"byte {self.data.index(0) + 1} is NUL")
        try:
            return self.data.decode()
        except UnicodeDecodeError as error:
            raise LineFault(f"not UTF-8 at byte {error.start + 1}") from None


class LineFile:
    """A file to be read once, line by line. Lines end in LF or CRLF; blank ones and a byte order mark are no lines.

    Raises WorkloadError with the file's name when it cannot be read, when it is opened or later.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        if not isinstance(path, str | os.PathLike):
            raise WorkloadError(f"path must be a path, not {type(path).__name__}")
        self.name = os.fsdecode(path)
        try:
            self._file: BinaryIO = open(path, "rb")  # noqa: SIM115
        except (OSError, ValueError) as error:
            self._refuse_reading(error)

    def __iter__(self) -> Iterator[Line]:
        number = 0
        while data := self._next_line():
            number += 1
            has_end = data.endswith(b"\n")
            if not has_end and len(data) > MAX_LINE_BYTES:
                has_end = self._skip_rest()
            data = data.rstrip(b"\r\n")
            if number == 1:
                data = data.removeprefix(b"\xef\xbb\xbf")
            if data and not data.isspace():
                yield Line(number, data, has_end)

    def close(self) -> None:
        self._file.close()

    def fault(self, line: Line, what: object) -> WorkloadError:
        """The error that says ``what`` is wrong with ``line``."""
        torn = "" if line.has_end else " (the file ends inside this line, without a newline)"
        return WorkloadError(f"{self.name}, line {line.number}: {what}{torn}")

    def _next_line(self) -> bytes:
        try:
            return self._file.readline(MAX_LINE_BYTES + 3)  # and CRLF
        except OSError as error:
            self._refuse_reading(error)

    def _skip_rest(self) -> bool:
        """Passes over the rest of a line that is too long, in pieces; whether it has an end."""
        while piece := self._next_line():
            if piece.endswith(b"\n"):
                return True
        return False

    def _refuse_reading(self, error: Exception) -> NoReturn:
        reason = getattr(error, "strerror", None) or error
        raise WorkloadError(f"{self.name}: cannot be read: {reason}") from None


def parse_object(text: str) -> dict[str, object]:
    """The JSON object that ``text`` is. Raises LineFault when it is none."""
    try:
        value = from_json(text, allow_inf_nan=False)
    except ValueError as error:
        raise LineFault(f"not JSON: {' '.join(str(error).split())}") from None
    if not isinstance(value, dict):
        raise LineFault(f"not a JSON object: {shown(value)}")
    return value


def validated(model: type[_Model], text: str) -> _Model:
    """``text`` as a ``model``. Raises LineFault that names the field and its value."""
    try:
        return model.model_validate_json(text)
    except ValidationError as error:
        raise LineFault(first_fault(error)) from None
