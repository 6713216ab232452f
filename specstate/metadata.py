"""What a caller says about a step: which requests, in which row order, with how many tokens each."""

from dataclasses import dataclass
from typing import Annotated, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from specstate.errors import SpecStateError, shown
from specstate.limits import INT32_MAX, MAX_STEP_SIZE

RowKind = Literal["decode", "prompt", "dummy"]
_Int32 = Annotated[int, Field(ge=-INT32_MAX, le=INT32_MAX)]
_QueryLen = Annotated[int, Field(ge=1, le=INT32_MAX)]


@dataclass(frozen=True, slots=True)
class Handle:
    """What ``admit`` returns. It names a request's life: a request admitted again has another generation.

    Raises SpecStateError for a field of another type, or a number beyond int32.
    """

    request_id: str
    record_slot: int
    generation: int

    def __post_init__(self) -> None:
        for name, value, kind in (
            ("request_id", self.request_id, str),
            ("record_slot", self.record_slot, int),
            ("generation", self.generation, int),
        ):
            if type(value) is not kind:
                raise SpecStateError(
                    f"Handle: {name} = {shown(value)} must be {kind.__name__}, not {type(value).__name__}"
                )
            if isinstance(value, int) and not -INT32_MAX <= value <= INT32_MAX:
                raise SpecStateError(f"Handle: {name} = {shown(value)} is outside {-INT32_MAX}..{INT32_MAX}")


def check_lengths(model: BaseModel, first: str, others: tuple[str, ...]) -> None:
    """Raises ValueError when a field of ``others`` is not None and not as long as the field ``first``."""
    length = len(getattr(model, first))
    for name in others:
        column = getattr(model, name)
        if column is not None and len(column) != length:
            raise ValueError(f"{name} has {len(column)} entries, {first} has {length}")


class StepMetadata(BaseModel):
    """The rows of one step, in columns; entry i of every column describes row i.

    Raises pydantic's ``ValidationError`` (a ``ValueError``) that names the column, the row and the limit. What depends
    on the manager (live handles, ``max_query_len``) is checked by ``begin_step``.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    handles: tuple[Handle | None, ...]
    """None for dummy rows."""
    query_lens: tuple[_QueryLen, ...]
    """Tokens of each window, the last sampled token included."""
    row_kinds: tuple[RowKind, ...] | None = None
    """By default all "decode". "prompt": every token counts as accepted. "dummy": a row that owns nothing."""
    min_accepted: tuple[_Int32, ...] | None = None
    """Least accepted count of each row, 1..query_len; by default 1, for prompt rows query_len. Dummy rows: not read.
    It holds against an end token too: a count is never below it, though the row's ``tokens`` end with that token."""
    batch_index: tuple[_Int32, ...] | None = None
    """Entry of row i in caller-made counts and masks; unique over live rows, by default i. Dummy rows: not read."""

    @property
    def least_accepted(self) -> tuple[int, ...]:
        """The least accepted count of every row: ``min_accepted``, else all of a prompt row and 1 of any other."""
        if self.min_accepted is not None:
            return self.min_accepted
        if self.row_kinds is None:
            return (1,) * len(self.query_lens)
        return tuple(n if kind == "prompt" else 1 for kind, n in zip(self.row_kinds, self.query_lens, strict=True))

    @property
    def num_entries(self) -> int:
        """Entries that caller-made counts and masks must have: one more than the largest that a live row reads."""
        if self.batch_index is None:
            num_rows = len(self.handles)
            while num_rows and self.handles[num_rows - 1] is None:
                num_rows -= 1
            return num_rows
        pairs = zip(self.batch_index, self.handles, strict=True)
        return 1 + max([entry for entry, handle in pairs if handle is not None], default=-1)

    def is_prompt(self, row: int) -> bool:
        """Whether ``row`` feeds a prompt."""
        return self.row_kinds is not None and self.row_kinds[row] == "prompt"

    def check_lengths(self) -> None:
        """Raises ValueError when the columns are not of one length; ``model_copy`` looks at none of them."""
        check_lengths(self, "handles", ("query_lens", "row_kinds", "min_accepted", "batch_index"))

    @model_validator(mode="after")
    def _columns_agree(self) -> Self:
        self.check_lengths()
        # A handle is always true; `None in handles` would ask each whether it equals None.
        if self.row_kinds is not None or not all(self.handles):
            self._check_kinds()
        if self.min_accepted is not None:
            self._check_min_accepted(self.min_accepted)
        if self.batch_index is not None:
            self._check_batch_index(self.batch_index)
        return self

    def _check_kinds(self) -> None:
        kinds = self.row_kinds or ("decode",) * len(self.handles)
        for row, (handle, kind) in enumerate(zip(self.handles, kinds, strict=True)):
            if (handle is None) != (kind == "dummy"):
                wants = (
                    "None, since the row is a dummy"
                    if kind == "dummy"
                    else f"given, since row_kinds[{row}] is {kind!r}"
                )
                raise ValueError(f"handles[{row}] = {handle} must be {wants}")

    def _check_min_accepted(self, min_accepted: tuple[int, ...]) -> None:
        kinds = self.row_kinds or ("decode",) * len(self.handles)
        for row, (kind, least, query_len) in enumerate(zip(kinds, min_accepted, self.query_lens, strict=True)):
            if kind == "dummy":
                continue
            if not 1 <= least <= query_len:
                raise ValueError(f"min_accepted[{row}] = {least} is outside 1..query_lens[{row}] = {query_len}")
            if kind == "prompt" and least != query_len:
                raise ValueError(
                    f"min_accepted[{row}] = {least} must be query_lens[{row}] = {query_len} for a prompt row"
                )

    def _check_batch_index(self, batch_index: tuple[int, ...]) -> None:
        taken: dict[int, int] = {}
        for row, (handle, entry) in enumerate(zip(self.handles, batch_index, strict=True)):
            if handle is None:
                continue
            if not 0 <= entry < MAX_STEP_SIZE:
                limit = "is negative" if entry < 0 else f"must be below {MAX_STEP_SIZE}"
                raise ValueError(f"batch_index[{row}] = {entry} {limit}")
            if taken.setdefault(entry, row) != row:
                raise ValueError(f"batch_index[{row}] = {entry} is also that of row {taken[entry]}")
