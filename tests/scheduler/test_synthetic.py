"""Synthetic requests: the same from the same seed, and in their statistics those of the trace they are fitted to."""

import math
import os
from collections.abc import Iterable, Sequence
from hashlib import sha256
from itertools import islice, pairwise
from pathlib import Path
from statistics import fmean, pstdev
from typing import Any

import pytest
from pydantic import ValidationError

from specstate.scheduler.readers import RequestReader
from specstate.scheduler.synthetic import (
    MOONCAKE_INPUT_LENS,
    MOONCAKE_OUTPUT_LENS,
    Lengths,
    LogNormal,
    PrefixPool,
    SyntheticWorkload,
)
from specstate.scheduler.workloads import TracedRequest

PERCENTS = (10, 25, 50, 75, 90, 99)
#: Of Mooncake's conversation trace: the least length that so many percent do not exceed.
INPUT_LENS = (964, 2306, 6909, 15368, 27367, 85401)
OUTPUT_LENS = (24, 156, 350, 472, 597, 1120)
NUM_REQUESTS = 12_031


def quantiles(lengths: Iterable[int]) -> tuple[int, ...]:
    ordered = sorted(lengths)
    return tuple(ordered[math.ceil(percent * len(ordered) / 100) - 1] for percent in PERCENTS)


def blocks_found(requests: Iterable[TracedRequest]) -> tuple[float, float]:
    """Of a cache of unlimited size: the share of all blocks it finds, and of requests that find more than one."""
    seen: set[int | str] = set()
    found, total = [], 0
    for request in requests:
        hashes = request.prefix_hashes
        found.append(next((i for i, block in enumerate(hashes) if block not in seen), len(hashes)))
        seen.update(hashes)
        total += len(hashes)
    return sum(found) / total, sum(count > 1 for count in found) / len(found)


def gaps(workload: SyntheticWorkload) -> list[float]:
    return [after.arrival_ms - before.arrival_ms for before, after in pairwise(workload.requests())]


@pytest.fixture(scope="module")
def requests() -> list[TracedRequest]:
    return list(SyntheticWorkload(num_requests=NUM_REQUESTS).requests())


def test_the_fitted_distributions_have_the_quantiles_of_the_trace() -> None:
    for lengths, trace in ((MOONCAKE_INPUT_LENS, INPUT_LENS), (MOONCAKE_OUTPUT_LENS, OUTPUT_LENS)):
        for percent, length in zip(PERCENTS, trace, strict=True):
            assert lengths.quantile(percent / 100) == pytest.approx(length, rel=0.04)


def test_drawn_lengths_have_the_quantiles_of_the_trace(requests: list[TracedRequest]) -> None:
    # 4 % of the fit, and what 12,031 draws add: some 3 standard errors, most of it at p10 and p99.
    for lens, trace in (
        ([request.input_len for request in requests], INPUT_LENS),
        ([request.output_len for request in requests], OUTPUT_LENS),
    ):
        drawn = quantiles(lens)
        assert drawn[1:5] == pytest.approx(trace[1:5], rel=0.10)
        assert drawn == pytest.approx(trace, rel=0.15)


def test_prefixes_are_found_as_often_as_in_the_trace(requests: list[TracedRequest]) -> None:
    assert blocks_found(requests) == pytest.approx((0.366, 0.387), abs=0.04)


@pytest.mark.skipif("SPECSTATE_TRACES" not in os.environ, reason="SPECSTATE_TRACES names no directory of traces")
def test_the_figures_of_the_trace_are_those_of_its_file() -> None:
    trace = list(RequestReader(Path(os.environ["SPECSTATE_TRACES"]) / "mooncake_conversation.jsonl"))
    assert len(trace) == NUM_REQUESTS
    assert quantiles(request.input_len for request in trace) == INPUT_LENS
    assert quantiles(request.output_len for request in trace) == OUTPUT_LENS
    assert blocks_found(trace) == pytest.approx((0.3664, 0.3872), abs=1e-4)
    assert trace[-1].arrival_ms == pytest.approx(1000 * NUM_REQUESTS / 3.4, rel=1e-3)


def test_the_same_seed_gives_the_same_bytes_everywhere() -> None:
    workload = SyntheticWorkload(num_requests=500, arrival_cv=2.0)
    lines = "\n".join(request.to_json_line() for request in workload.requests())
    assert sha256(lines.encode()).hexdigest() == "f005828ab896384019f0ad3b41c5e86dc564cb36d48a804822dc950680026485"
    assert lines != "\n".join(r.to_json_line() for r in workload.model_copy(update={"seed": 1}).requests())


def test_what_is_written_reads_back(tmp_path: Path) -> None:
    drawn = list(SyntheticWorkload(num_requests=50).requests())
    path = tmp_path / "requests"
    path.write_text("".join(request.to_json_line() + "\n" for request in drawn))
    assert list(RequestReader(path)) == drawn


def test_a_change_to_one_thing_leaves_the_others_as_they_are() -> None:
    plain = SyntheticWorkload(num_requests=100)
    bursty = list(plain.model_copy(update={"arrival_cv": 3.0, "requests_per_s": 50.0}).requests())
    apart = list(plain.model_copy(update={"prefixes": None}).requests())
    for before, late, alone in zip(plain.requests(), bursty, apart, strict=True):
        assert late.input_len == before.input_len == alone.input_len
        assert late.prefix_hashes == before.prefix_hashes and alone.prefix_hashes == ()
        assert alone.arrival_ms == before.arrival_ms


@pytest.mark.parametrize("cv", [0.0, 0.5, 1.0, 3.0])
def test_arrivals_have_the_mean_and_variation_asked_for(cv: float) -> None:
    short = Lengths(parts=(LogNormal(median=5.0, sigma=0.0),))
    times = gaps(
        SyntheticWorkload(
            num_requests=20_001, requests_per_s=8.0, arrival_cv=cv, input_lens=short, output_lens=short, prefixes=None
        )
    )
    mean = fmean(times)
    # Of a mean the standard error is cv / sqrt(20,000); of a cv it is some sqrt(1 / 2 + cv^2) cv / sqrt(20,000).
    assert mean == pytest.approx(125.0, rel=4 * cv / math.sqrt(20_000) + 1e-6)
    assert pstdev(times) / mean == pytest.approx(cv, rel=5 * math.sqrt(0.5 + cv**2) / math.sqrt(20_000), abs=1e-6)


def test_prefixes_nest_and_only_full_blocks_are_shared() -> None:
    requests = list(SyntheticWorkload(num_requests=2000).requests())
    led_here: dict[int | str, tuple[int | str, ...]] = {}
    users: dict[int | str, list[TracedRequest]] = {}
    for request in requests:
        assert len(request.prefix_hashes) == -(-request.input_len // 512)
        for depth, block in enumerate(request.prefix_hashes):
            # A hash names all that stands before it, too.
            assert led_here.setdefault(block, request.prefix_hashes[:depth]) == request.prefix_hashes[:depth]
            users.setdefault(block, []).append(request)
    shared = {block: those for block, those in users.items() if len(those) > 1}
    assert len(shared[0]) == len(requests)
    for block, those in shared.items():
        assert all((request.prefix_hashes.index(block) + 1) * 512 <= request.input_len for request in those)


def test_popular_groups_are_joined_by_zipfs_law() -> None:
    pool = PrefixPool(common_blocks=0, num_groups=3, zipf_exponent=1.0, join_share=1.0, depth_power=1000.0)
    lens = Lengths(parts=(LogNormal(median=600.0, sigma=0.0),), most=600)
    workload = SyntheticWorkload(num_requests=6000, input_lens=lens, output_lens=lens, prefixes=pool)
    firsts = [request.prefix_hashes[0] for request in workload.requests()]
    shares = [firsts.count(first) / len(firsts) for first in (0, 1, 2)]
    assert shares == pytest.approx([6 / 11, 3 / 11, 2 / 11], abs=0.03)


def test_lengths_are_clamped() -> None:
    lens = Lengths(parts=(LogNormal(median=1.0, sigma=10.0),), least=3, most=700)
    workload = SyntheticWorkload(num_requests=300, input_lens=lens, output_lens=lens)
    drawn = {request.input_len for request in workload.requests()}
    assert min(drawn) == 3 and max(drawn) == 700
    assert (lens.quantile(0.1), lens.quantile(0.9)) == (pytest.approx(3.0), pytest.approx(700.0))


def test_a_billion_requests_cost_nothing_until_they_are_asked_for() -> None:
    assert len(list(islice(SyntheticWorkload(num_requests=10**9).requests(), 3))) == 3


@pytest.mark.parametrize(
    ("model", "fields"),
    [
        (SyntheticWorkload, {"num_requests": 0}),
        (SyntheticWorkload, {"seed": -1}),
        (SyntheticWorkload, {"requests_per_s": 0.0}),
        (SyntheticWorkload, {"arrival_cv": float("nan")}),
        (SyntheticWorkload, {"arrivals": 1}),
        (PrefixPool, {"join_share": 1.5}),
        (PrefixPool, {"num_groups": 0}),
        (LogNormal, {"median": 0.0}),
        (LogNormal, {"sigma": -1.0}),
        (Lengths, {"parts": ()}),
        (Lengths, {"least": 0}),
    ],
)
def test_fields_out_of_range_are_refused(model: Any, fields: dict[str, Any]) -> None:
    usual: dict[Any, dict[str, Any]] = {
        SyntheticWorkload: {"num_requests": 1},
        PrefixPool: {},
        LogNormal: {"median": 1.0, "sigma": 1.0},
        Lengths: {"parts": (LogNormal(median=1.0, sigma=1.0),)},
    }
    with pytest.raises(ValidationError, match=next(iter(fields))):
        model(**{**usual[model], **fields})


def test_a_clamp_must_be_in_order() -> None:
    parts: Sequence[LogNormal] = (LogNormal(median=1.0, sigma=1.0),)
    with pytest.raises(ValidationError, match="least = 5 exceeds most = 4"):
        Lengths(parts=tuple(parts), least=5, most=4)
