"""How many drafts of a window hold: rates by position, a constant rate, or the counts of a recorded run.

Counts are those of ``StateManager``: they include the first token of a window, which always holds, so a window of d
drafts has ``num_accepted`` in 1..d + 1. Draws come from a hash of seed, request and window. A request's counts are
therefore the same in every batch and order, and shorter windows hold the same drafts as far as they go.
"""

import csv
import os
from collections.abc import Iterator
from functools import cached_property
from hashlib import blake2b
from itertools import accumulate
from operator import mul
from typing import Annotated, Protocol, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from specstate.errors import SpecStateError, shown
from specstate.limits import INT64_MAX, MAX_QUERY_LEN
from specstate.scheduler.lines import LineFault, LineFile, parse_object
from specstate.scheduler.workloads import WorkloadError
from specstate.validation import first_fault

_Rate = Annotated[float, Field(ge=0.0, le=1.0, allow_inf_nan=False)]
_Seed = Annotated[int, Field(ge=0, le=INT64_MAX)]


class AcceptanceModel(Protocol):
    """What a simulator asks about every window."""

    def num_accepted(self, request_id: str, window: int, num_drafts: int) -> int:
        """Accepted tokens, the first included: 1..num_drafts + 1.

        window: how many windows the request has had, from 0. Raises SpecStateError for a window or a number of drafts
        that is negative, or for more drafts than the model knows of.
        """

    def mean_acceptance_length(self, num_drafts: int) -> float:
        """The mean of ``num_accepted`` over windows of ``num_drafts`` drafts. Raises SpecStateError as that does."""


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class RateAcceptance(_Frozen):
    """Each position has its rate.

    Raises pydantic's ``ValidationError`` for a rate outside 0..1 or a seed outside int64.
    """

    rates: tuple[_Rate, ...] = Field(max_length=MAX_QUERY_LEN)
    """Rate i is the probability that draft i holds, given that those before it do."""
    seed: _Seed = 0

    def num_accepted(self, request_id: str, window: int, num_drafts: int) -> int:
        """See ``AcceptanceModel``. By inversion of one uniform number: draft i holds when it is below r_1 ... r_i."""
        _check_window(window, num_drafts)
        shares = self._first_shares(num_drafts)
        draw = uniform(self.seed, request_id, window)
        return 1 + sum(draw < share for share in shares)

    def mean_acceptance_length(self, num_drafts: int) -> float:
        """1 + the sum over i of r_1 ... r_i: the expectation of a sum of indicators, draft i holding with all before
        it."""
        _check_window(0, num_drafts)
        return 1.0 + sum(self._first_shares(num_drafts))

    @cached_property
    def shares(self) -> tuple[float, ...]:
        """Entry i: of all windows that have the draft, those in which it holds, r_1 ... r_i."""
        return tuple(accumulate(self.rates, mul))

    def _first_shares(self, num_drafts: int) -> tuple[float, ...]:
        if num_drafts > len(self.rates):
            raise SpecStateError(f"num_drafts = {num_drafts} exceeds the {len(self.rates)} positions that have rates")
        return self.shares[:num_drafts]

    @classmethod
    def from_shares(cls, shares: tuple[float, ...], seed: int = 0) -> Self:
        """Of shares of all windows, as ``specstate demo --json`` prints them: rate i is share i over share i - 1.

        Raises SpecStateError when a share is outside 0..1 or above the one before it.
        """
        rates, before = [], 1.0
        for position, share in enumerate(shares):
            if type(share) not in (int, float) or not 0 <= share <= before:
                raise SpecStateError(
                    f"acceptance_per_position[{position}] = {shown(share)} is outside 0..{before}: a draft holds only "
                    "where the one before it does"
                )
            rates.append(share / before if before else 0.0)
            before = float(share)
        return cls(rates=tuple(rates), seed=seed)


class GeometricAcceptance(_Frozen):
    """Every draft holds at the same rate, given that those before it do; windows of any length.

    Raises pydantic's ``ValidationError`` for a rate outside 0..1 or a seed outside int64.
    """

    rate: _Rate
    seed: _Seed = 0

    def num_accepted(self, request_id: str, window: int, num_drafts: int) -> int:
        """See ``AcceptanceModel``."""
        _check_window(window, num_drafts)
        draw, share, count = uniform(self.seed, request_id, window), self.rate, 1
        while count <= num_drafts and draw < share:
            share *= self.rate
            count += 1
        return count

    def mean_acceptance_length(self, num_drafts: int) -> float:
        """(1 - r^(d + 1)) / (1 - r), the sum of r^i over 0..d; Leviathan et al., arXiv 2211.17192, equation 1."""
        _check_window(0, num_drafts)
        if self.rate == 1.0:
            return float(num_drafts + 1)
        return float((1.0 - self.rate ** (num_drafts + 1)) / (1.0 - self.rate))


class ReplayedAcceptance(_Frozen):
    """The counts of a recorded run, in their order and over again; a shorter window cuts a count.

    Each request begins at a place of its own, by a hash of seed and request: requests would else go in step. A window
    that is longer than the recorded ones holds no more than those did.

    Raises pydantic's ``ValidationError`` for no counts, one outside 1..MAX_QUERY_LEN, or a seed outside int64.
    """

    counts: tuple[Annotated[int, Field(ge=1, le=MAX_QUERY_LEN)], ...] = Field(min_length=1)
    """Accepted tokens of each window, the first included."""
    seed: _Seed = 0

    def num_accepted(self, request_id: str, window: int, num_drafts: int) -> int:
        """See ``AcceptanceModel``."""
        _check_window(window, num_drafts)
        begin = int(uniform(self.seed, request_id, 0) * len(self.counts))
        return min(self.counts[(begin + window) % len(self.counts)], num_drafts + 1)

    def mean_acceptance_length(self, num_drafts: int) -> float:
        """The mean of all counts, each cut to num_drafts + 1."""
        _check_window(0, num_drafts)
        return sum(min(count, num_drafts + 1) for count in self.counts) / len(self.counts)


def uniform(seed: int, request_id: str, window: int) -> float:
    """A number in [0, 1), the same on every machine: 53 bits of BLAKE2b over seed, window and request."""
    # Both numbers have a fixed length, so no two triples give the same bytes.
    text = seed.to_bytes(8, "little") + window.to_bytes(8, "little") + request_id.encode(errors="surrogatepass")
    return (int.from_bytes(blake2b(text, digest_size=8).digest(), "little") >> 11) * 2.0**-53


def _check_window(window: int, num_drafts: int) -> None:
    for name, value, limit in (("window", window, INT64_MAX), ("num_drafts", num_drafts, MAX_QUERY_LEN - 1)):
        if type(value) is not int or not 0 <= value <= limit:
            raise SpecStateError(f"{name} = {shown(value)} is outside 0..{limit}")


# -- files


def read_counts(path: str | os.PathLike[str]) -> tuple[int, ...]:
    """Counts for ``ReplayedAcceptance``, one window a line, the first token included.

    CSV with a header that has a column num_accepted, or JSON objects with a field num_accepted; other columns and
    fields are not looked at. Raises WorkloadError with file, line and value.
    """
    file = LineFile(path)
    try:
        counts = tuple(_counts(file))
    finally:
        file.close()
    if not counts:
        raise WorkloadError(f"{file.name}: has no counts")
    return counts


def _counts(file: LineFile) -> Iterator[int]:
    column: int | None = None
    is_json: bool | None = None
    for line in file:
        try:
            text = line.text()
            is_json = text.lstrip().startswith("{") if is_json is None else is_json
            if is_json:
                yield _count(parse_object(text).get("num_accepted"))
                continue
            cells = next(csv.reader((text,), strict=True))
            if column is None:
                if "num_accepted" not in cells:
                    raise LineFault(f"column num_accepted is missing: there are {', '.join(map(shown, cells))}")
                column = cells.index("num_accepted")
            elif column >= len(cells):
                raise LineFault("num_accepted is missing")
            else:
                cell = cells[column]
                yield _count(int(cell) if cell.isascii() and cell.isdigit() and len(cell) < 20 else cell)
        except (LineFault, csv.Error) as fault:
            raise file.fault(line, fault) from None


def _count(value: object) -> int:
    if type(value) is not int or not 1 <= value <= MAX_QUERY_LEN:
        raise LineFault(f"num_accepted = {shown(value)} is no integer in 1..{MAX_QUERY_LEN}")
    return value


def measured_rates(path: str | os.PathLike[str], seed: int = 0) -> RateAcceptance:
    """Rates from what ``specstate demo --json`` has printed.

    Its acceptance_per_position are no rates: share i is that of all windows whose draft i holds. Windows that offered
    fewer drafts count as not accepting the rest, so the rates are those of the run with its drafter, not of drafts
    alone. mean_acceptance_length, where there is one, must be 1 + the sum of the shares: other lists are refused.

    Raises WorkloadError with file, field and value.
    """
    file = LineFile(path)
    try:
        report = parse_object("\n".join(line.text() for line in file))
        shares = report.get("acceptance_per_position")
        if not isinstance(shares, list) or not shares:
            raise LineFault(f"acceptance_per_position = {shown(shares)} must be a list of shares, not empty")
        model = RateAcceptance.from_shares(tuple(shares), seed)
        expected = model.mean_acceptance_length(len(shares))
        mean = report.get("mean_acceptance_length", expected)
        if not isinstance(mean, int | float) or not abs(mean - expected) <= 1e-3:
            raise LineFault(
                f"mean_acceptance_length = {shown(mean)} is not 1 + the sum of acceptance_per_position, "
                f"{expected:.4f}: its entries must be shares of all windows"
            )
    except ValidationError as error:
        raise WorkloadError(f"{file.name}: {first_fault(error)}") from None
    except (LineFault, SpecStateError) as error:
        raise WorkloadError(f"{file.name}: {error}") from None
    finally:
        file.close()
    return model
