"""``specstate bench host``: what a step costs the host, on backend "metadata", where nothing else is left.

The requests really advance: window lengths and accepted counts vary from step to step, rings fill and fold.
"""

import platform
import random
from dataclasses import dataclass
from statistics import median
from time import perf_counter_ns
from typing import Any

from specstate.config import FoldPolicy, StateConfig
from specstate.errors import SpecStateError
from specstate.limits import MAX_STEP_SIZE
from specstate.manager import StateManager
from specstate.metadata import StepMetadata
from specstate.presets import KIMI_K3

MAX_QUERY_LEN = 8

#: The calls of a step, in their order; what is measured of each is its time on the host.
PARTS = ("metadata", "begin_step", "replayed", "defer")

#: Of which nothing is reported: caches fill, requests reach different positions.
WARMUP_STEPS = 50


@dataclass(frozen=True, slots=True)
class HostTimes:
    """Microseconds of a step with so many rows."""

    num_rows: int
    part_us: dict[str, float]
    """Median of each part."""
    step_us: float
    """Median of the parts together."""
    fastest_step_us: float


@dataclass(frozen=True, slots=True)
class HostReport:
    """What was measured, and of what."""

    config: StateConfig
    num_steps: int
    times: tuple[HostTimes, ...]

    def to_json(self) -> dict[str, Any]:
        """One JSON object; every time is in microseconds, by number of rows."""
        return {
            "us_per_step": {str(times.num_rows): times.step_us for times in self.times},
            "fastest_us_per_step": {str(times.num_rows): times.fastest_step_us for times in self.times},
            "us_per_part": {str(times.num_rows): times.part_us for times in self.times},
            "steps": self.num_steps,
            "policy": self.config.fold_policy,
            "num_layers": self.config.num_layers,
            "max_query_len": self.config.max_query_len,
            "python": platform.python_version(),
        }

    def to_text(self) -> str:
        """The same for a person."""
        columns = ("rows", *PARTS, "all", "fastest")
        lines = [
            f"microseconds per step on the host, medians of {self.num_steps:,} steps: backend metadata, policy "
            f"{self.config.fold_policy}, {self.config.num_layers} KDA layers, windows of 1 to "
            f"{self.config.max_query_len} tokens, Python {platform.python_version()}",
            "",
            "".join(f"{name:>12}" for name in columns),
        ]
        for times in self.times:
            figures = (*times.part_us.values(), times.step_us, times.fastest_step_us)
            lines.append(f"{times.num_rows:>12}" + "".join(f"{figure:>12.1f}" for figure in figures))
        return "\n".join(lines)


def measure_host(num_rows: tuple[int, ...], num_steps: int, policy: FoldPolicy) -> HostReport:
    """Times ``num_steps`` steps of each of ``num_rows``. Raises SpecStateError for more rows than a step may have."""
    most_rows = MAX_STEP_SIZE // MAX_QUERY_LEN
    for rows in num_rows:
        if rows > most_rows:
            raise SpecStateError(f"rows = {rows} exceeds {most_rows}")
    times = tuple(_measure(_config(rows, policy), num_steps) for rows in num_rows)
    return HostReport(_config(1, policy), num_steps, times)


def _config(num_rows: int, policy: FoldPolicy) -> StateConfig:
    return KIMI_K3.config(tp=8, max_query_len=MAX_QUERY_LEN, max_requests=num_rows, fold_policy=policy)


def _measure(config: StateConfig, num_steps: int) -> HostTimes:
    manager = StateManager(config, None, backend="metadata")
    handles = tuple(manager.admit(f"request {i}") for i in range(config.max_requests))
    committed_lens = [0] * len(handles)
    chance = random.Random(0)
    parts: dict[str, list[int]] = {name: [] for name in PARTS}
    steps: list[int] = []
    for index in range(WARMUP_STEPS + num_steps):
        query_lens = tuple(chance.choices(range(1, config.max_query_len + 1), k=len(handles)))
        num_accepted = [1 + int(chance.random() * query_len) for query_len in query_lens]
        committed_lens = [n + accepted for n, accepted in zip(committed_lens, num_accepted, strict=True)]

        start = perf_counter_ns()
        metadata = StepMetadata(handles=handles, query_lens=query_lens)
        built = perf_counter_ns()
        step = manager.begin_step(metadata)
        begun = perf_counter_ns()
        step.replayed("verify")
        verified = perf_counter_ns()
        step.defer(num_accepted)
        ended = perf_counter_ns()

        if index >= WARMUP_STEPS:
            times = (built - start, begun - built, verified - begun, ended - verified)
            for name, time in zip(PARTS, times, strict=True):
                parts[name].append(time)
            steps.append(ended - start)
    manager.check_integrity()
    assert [manager.committed_len(handle) for handle in handles] == committed_lens
    return HostTimes(
        num_rows=len(handles),
        part_us={name: _us(median(values)) for name, values in parts.items()},
        step_us=_us(median(steps)),
        fastest_step_us=_us(min(steps)),
    )


def _us(time_ns: float) -> float:
    return round(time_ns / 1000, 2)
