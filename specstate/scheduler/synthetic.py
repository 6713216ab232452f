"""Requests out of a seed: arrivals, lengths and shared prefixes, alike to one of the published traces by default.

The lengths of ``SyntheticWorkload``'s defaults are fitted to Mooncake's conversation trace (kvcache-ai/Mooncake,
FAST25-release/traces/conversation_trace.jsonl, 12,031 requests in 3,537 s), the only one of the published formats that
also shows which prefixes are shared. Quantiles in tokens, of the trace and of the fitted mixtures (exact, not sampled):

| | p10 | p25 | p50 | p75 | p90 | p99 |
|---|---|---|---|---|---|---|
| input, trace | 964 | 2,306 | 6,909 | 15,368 | 27,367 | 85,401 |
| input, fitted | 957 | 2,333 | 6,809 | 14,813 | 28,235 | 82,264 |
| output, trace | 24 | 156 | 350 | 472 | 597 | 1,120 |
| output, fitted | 24 | 156 | 350 | 470 | 596 | 1,122 |

One log-normal cannot do it (through the trace's mean and deviation of logarithms, p10 of inputs is 39 % too high, p50
of outputs 41 % too low): a twelfth of the inputs has close to 900 tokens, and a third of the outputs is short. So
inputs are a mixture of three, outputs of two. Input and output are drawn independently; the correlation of their
logarithms in the trace is 0.05.

Prefixes have a model of their own (``PrefixPool``), since a pool is simpler than the conversations that made the trace.
It is fitted to what a cache of unlimited size finds, over as many requests as the trace has (seed 0):

| | blocks found | requests that find more than one | blocks found a request: p50 | p75 | p90 | p95 | p99 |
|---|---|---|---|---|---|---|---|
| trace | 36.6 % | 38.7 % | 1 | 7 | 25 | 43 | 106 |
| pool | 36.1 % | 39.7 % | 1 | 9 | 25 | 42 | 80 |

The pool does not age: of a longer workload more is found, some two fifths of the blocks in the end.

Arrivals are Poisson by default. Those of the trace are not: it groups them by three seconds.
"""

import math
from bisect import bisect
from collections.abc import Iterator
from functools import cached_property
from itertools import accumulate
from random import Random
from statistics import NormalDist
from typing import Annotated, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from specstate.limits import INT64_MAX
from specstate.scheduler.workloads import DEFAULT_BLOCK_SIZE, MAX_REQUEST_LEN, TracedRequest

_STANDARD_NORMAL = NormalDist()
_Length = Annotated[int, Field(ge=1, le=MAX_REQUEST_LEN)]
_Share = Annotated[float, Field(ge=0.0, le=1.0, allow_inf_nan=False)]


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class LogNormal(_Frozen):
    """One part of a mixture of lengths."""

    weight: float = Field(default=1.0, gt=0.0, le=1e6, allow_inf_nan=False)
    """Relative to the other parts'."""
    median: float = Field(gt=0.0, le=MAX_REQUEST_LEN, allow_inf_nan=False)
    """Tokens."""
    sigma: float = Field(ge=0.0, le=10.0, allow_inf_nan=False)
    """Standard deviation of the natural logarithm."""

    def draw(self, random: Random) -> float:
        """A length, not yet rounded."""
        return self.median * math.exp(self.sigma * _normal(random))


class Lengths(_Frozen):
    """Lengths in tokens: a mixture of log-normals, rounded to the nearest and clamped.

    Raises pydantic's ``ValidationError``, as every model here, naming the field and the limit.
    """

    parts: tuple[LogNormal, ...] = Field(min_length=1, max_length=64)
    least: _Length = 1
    most: _Length = MAX_REQUEST_LEN

    @model_validator(mode="after")
    def _in_order(self) -> Self:
        if self.least > self.most:
            raise ValueError(f"least = {self.least} exceeds most = {self.most}")
        return self

    def draw(self, random: Random) -> int:
        """One length; takes two numbers of ``random``."""
        bounds = self.cumulative_weights
        part = self.parts[min(bisect(bounds, random.random() * bounds[-1]), len(self.parts) - 1)]
        return round(min(max(part.draw(random), self.least), self.most))

    @cached_property
    def cumulative_weights(self) -> tuple[float, ...]:
        """Of the parts, up to and with each."""
        return tuple(accumulate(part.weight for part in self.parts))

    def quantile(self, share: float) -> float:
        """The length that ``share`` of all lengths stay below, not rounded; by bisection of the distribution."""
        total = self.cumulative_weights[-1]
        low, high = math.log(self.least), math.log(self.most)
        for _ in range(64):
            middle = (low + high) / 2
            below = sum(part.weight * _below(middle - math.log(part.median), part.sigma) for part in self.parts)
            low, high = (middle, high) if below < share * total else (low, middle)
        return math.exp(high)


class PrefixPool(_Frozen):
    """Prefixes that requests share, in blocks of 512 tokens.

    The first ``common_blocks`` of a prompt are those of every other one. ``join_share`` of the requests go on with a
    prefix of a group: group k, from 1, is chosen with a probability in proportion to k^-``zipf_exponent`` (Zipf's law),
    and the request takes U^(1 / ``depth_power``) of its own blocks from it, U uniform in (0, 1). What follows is its
    own, at least the block in which the prompt ends. Only full blocks are shared.
    """

    common_blocks: int = Field(default=1, ge=0, le=2**15)
    num_groups: int = Field(default=200, ge=1, le=2**20)
    zipf_exponent: float = Field(default=0.8, ge=0.0, le=10.0, allow_inf_nan=False)
    join_share: _Share = 0.46
    depth_power: float = Field(default=8.0, gt=0.0, le=1e3, allow_inf_nan=False)


MOONCAKE_INPUT_LENS = Lengths(
    parts=(
        LogNormal(weight=0.082, median=904.0, sigma=0.01),
        LogNormal(weight=0.098, median=1300.0, sigma=0.225),
        LogNormal(weight=0.820, median=8960.0, sigma=0.985),
    ),
    least=891,
    most=126_195,
)
MOONCAKE_OUTPUT_LENS = Lengths(
    parts=(LogNormal(weight=0.335, median=55.4, sigma=1.58), LogNormal(weight=0.665, median=410.0, sigma=0.315)),
    least=1,
    most=2000,
)


class SyntheticWorkload(_Frozen):
    """A workload that follows from its fields alone: the same requests on every machine and with every Python.

    Arrivals, lengths and prefixes have generators of their own, so that a change to one leaves the others as they are.
    """

    num_requests: int = Field(ge=1, le=10**9)
    seed: int = Field(default=0, ge=0, le=INT64_MAX)
    requests_per_s: float = Field(default=3.4, ge=1e-6, le=1e6, allow_inf_nan=False)
    """The mean; by default that of Mooncake's trace, 12,031 in 3,537 s."""
    arrival_cv: float = Field(default=1.0, ge=0.0, le=20.0, allow_inf_nan=False)
    """Coefficient of variation of the times between arrivals, which are Gamma: 1 is Poisson, more comes in bursts, 0 is
    a clock."""
    input_lens: Lengths = MOONCAKE_INPUT_LENS
    output_lens: Lengths = MOONCAKE_OUTPUT_LENS
    prefixes: PrefixPool | None = PrefixPool()
    """None: no prompt shares anything."""

    def requests(self) -> Iterator[TracedRequest]:
        """The requests, the first at 0 ms; named by their number from 0. Times are whole microseconds."""
        gaps, lengths, prefixes = (Random(f"{self.seed}/{name}") for name in ("arrivals", "lengths", "prefixes"))
        hashes = None if self.prefixes is None else _Hashes(self.prefixes, self.input_lens.most, prefixes)
        mean_gap_us, arrival_us = 1e6 / self.requests_per_s, 0
        for number in range(self.num_requests):
            input_len, output_len = self.input_lens.draw(lengths), self.output_lens.draw(lengths)
            yield TracedRequest(
                str(number),
                arrival_us / 1000,
                input_len,
                output_len,
                () if hashes is None else hashes.draw(input_len),
                DEFAULT_BLOCK_SIZE,
            )
            # In integers: no sum of rounding errors, and a library's last bit is rounded away.
            arrival_us += round(mean_gap_us * _gamma(gaps, self.arrival_cv))


class _Hashes:
    """Hashes of prompts. Numbers, laid out so that nothing is remembered: common blocks, groups, then blocks of one
    request's own, counted up."""

    def __init__(self, pool: PrefixPool, longest_input: int, random: Random) -> None:
        self._pool, self._random = pool, random
        self._group_blocks = longest_input // DEFAULT_BLOCK_SIZE
        self._bounds = list(accumulate(k**-pool.zipf_exponent for k in range(1, pool.num_groups + 1)))
        self._next_own = pool.common_blocks + pool.num_groups * self._group_blocks

    def draw(self, input_len: int) -> tuple[int, ...]:
        """A hash for each block of a prompt; takes three numbers of the generator, whatever comes of them."""
        pool, random = self._pool, self._random
        joins = random.random() < pool.join_share
        group = min(bisect(self._bounds, random.random() * self._bounds[-1]), pool.num_groups - 1)
        share = random.random() ** (1.0 / pool.depth_power)
        blocks = -(-input_len // DEFAULT_BLOCK_SIZE)
        common = min(pool.common_blocks, blocks - 1)
        shared = max(common, min(int(share * blocks), blocks - 1)) if joins else common
        first = pool.common_blocks + group * self._group_blocks
        own = range(self._next_own, self._next_own + blocks - shared)
        self._next_own = own.stop
        return (*range(common), *range(first + common, first + shared), *own)


# Python promises the same numbers of random() in every version, and of nothing that is built on it.


def _normal(random: Random) -> float:
    """A standard normal number, by inversion."""
    return _STANDARD_NORMAL.inv_cdf(random.random() or 2.0**-54)  # 0 has no inverse


def _gamma(random: Random, cv: float) -> float:
    """A Gamma number of mean 1 and the given coefficient of variation: shape k = 1 / cv^2, scale 1 / k.

    By rejection: Marsaglia and Tsang, "A simple method for generating gamma variables", ACM TOMS 26 (2000), with their
    U^(1/k) for shapes below 1.
    """
    if cv == 0.0:
        return 1.0
    if cv == 1.0:
        return -math.log(1.0 - random.random())
    shape = 1.0 / cv**2
    boost = (1.0 - random.random()) ** (1.0 / shape) if shape < 1.0 else 1.0
    d = (shape if shape >= 1.0 else shape + 1.0) - 1.0 / 3.0
    c = 1.0 / math.sqrt(9.0 * d)
    while True:
        x, u = _normal(random), 1.0 - random.random()
        v = (1.0 + c * x) ** 3
        if v > 0.0 and math.log(u) < 0.5 * x * x + d - d * v + d * math.log(v):
            return boost * d * v / shape


def _below(distance: float, sigma: float) -> float:
    """The share of a normal distribution that lies at most ``distance`` above its middle."""
    return 0.5 * math.erfc(-distance / (sigma * math.sqrt(2.0))) if sigma else float(distance >= 0.0)
