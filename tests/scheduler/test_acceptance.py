"""Accepted counts: sampled means meet their closed forms, and a request's counts are its own."""

import json
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
from pydantic import ValidationError

from specstate import SpecStateError
from specstate.limits import MAX_QUERY_LEN
from specstate.scheduler.acceptance import (
    AcceptanceModel,
    GeometricAcceptance,
    RateAcceptance,
    ReplayedAcceptance,
    measured_rates,
    read_counts,
    uniform,
)
from specstate.scheduler.drafts import AdaptiveDrafts, DraftPolicy, FixedDrafts
from specstate.scheduler.workloads import WorkloadError

RATES = RateAcceptance(rates=(0.9, 0.5, 0.8, 1.0, 0.25), seed=7)
MODELS: list[AcceptanceModel] = [
    RATES,
    GeometricAcceptance(rate=0.7),
    GeometricAcceptance(rate=0.0),
    GeometricAcceptance(rate=1.0),
    ReplayedAcceptance(counts=(1, 6, 3, 1, 2, 4, 4)),
]


# -- models


@pytest.mark.parametrize("model", MODELS, ids=lambda model: type(model).__name__)
@pytest.mark.parametrize("num_drafts", [1, 5])
def test_the_sampled_mean_is_the_closed_form(model: AcceptanceModel, num_drafts: int) -> None:
    # Counts in 1..6 deviate by 2 at most: 1 % of a mean of 1 or more is 3 standard errors of 40,000 windows and more.
    counts = [model.num_accepted(f"r{i % 40}", i // 40, num_drafts) for i in range(40_000)]
    assert {*counts} <= {*range(1, num_drafts + 2)}
    assert fmean(counts) == pytest.approx(model.mean_acceptance_length(num_drafts), rel=0.01)


def test_closed_forms() -> None:
    assert RATES.mean_acceptance_length(0) == 1.0
    assert RATES.mean_acceptance_length(3) == pytest.approx(1 + 0.9 + 0.45 + 0.36)
    assert GeometricAcceptance(rate=0.5).mean_acceptance_length(3) == 1.875
    assert GeometricAcceptance(rate=1.0).mean_acceptance_length(7) == 8.0
    assert GeometricAcceptance(rate=0.7).mean_acceptance_length(4) == pytest.approx(
        RateAcceptance(rates=(0.7,) * 4).mean_acceptance_length(4)
    )
    assert ReplayedAcceptance(counts=(1, 6, 2)).mean_acceptance_length(2) == 2.0


def test_rates_are_given_that_those_before_hold() -> None:
    counts = [RATES.num_accepted("a", window, 5) for window in range(20_000)]
    for draft, rate in enumerate(RATES.rates, 1):
        reached = [count for count in counts if count >= draft]
        assert fmean(count > draft for count in reached) == pytest.approx(rate, abs=0.02)


def test_a_constant_rate_is_equal_rates() -> None:
    constant, each = GeometricAcceptance(rate=0.6, seed=3), RateAcceptance(rates=(0.6,) * 6, seed=3)
    for window in range(500):
        assert constant.num_accepted("a", window, 6) == each.num_accepted("a", window, 6)


@pytest.mark.parametrize("model", MODELS, ids=lambda model: type(model).__name__)
def test_counts_depend_on_request_and_window_alone_and_shorter_windows_are_cut(model: AcceptanceModel) -> None:
    forward = {(name, window): model.num_accepted(name, window, 5) for name in "ab" for window in range(50)}
    for (name, window), count in reversed(forward.items()):
        assert model.num_accepted(name, window, 5) == count
        assert model.num_accepted(name, window, 2) == min(count, 3)


def test_seeds_requests_and_windows_draw_apart() -> None:
    draws = {uniform(seed, name, window) for seed in (0, 1) for name in ("", "a", "\ud800") for window in (0, 1, 256)}
    assert len(draws) == 18
    assert all(0 <= draw < 1 for draw in draws)
    assert uniform(0, "a", 0) == 0.27064353825694143  # the same on every machine


def test_replayed_counts_go_round_from_a_place_of_the_requests_own() -> None:
    model = ReplayedAcceptance(counts=(1, 2, 3, 4, 5))
    begins = set()
    for name in map(str, range(30)):
        counts = [model.num_accepted(name, window, 7) for window in range(10)]
        assert all(after == before % 5 + 1 for before, after in pairwise(counts))
        begins.add(counts[0])
    assert begins == {1, 2, 3, 4, 5}


def test_arguments_out_of_range_are_refused() -> None:
    for model in MODELS:
        with pytest.raises(SpecStateError, match=r"window = -1 is outside 0\.\."):
            model.num_accepted("a", -1, 2)
        for bad in (-1, 2.0, True, MAX_QUERY_LEN):
            with pytest.raises(SpecStateError, match=f"num_drafts = {bad} is outside 0..65535"):
                model.num_accepted("a", 0, bad)  # type: ignore[arg-type]
            with pytest.raises(SpecStateError, match=f"num_drafts = {bad} is outside"):
                model.mean_acceptance_length(bad)  # type: ignore[arg-type]
    with pytest.raises(SpecStateError, match="num_drafts = 6 exceeds the 5 positions that have rates"):
        RATES.num_accepted("a", 0, 6)


@pytest.mark.parametrize(
    ("model", "fields"),
    [
        (RateAcceptance, {"rates": (0.5, 1.5)}),
        (RateAcceptance, {"rates": (float("nan"),)}),
        (RateAcceptance, {"rates": 0.5}),
        (GeometricAcceptance, {"rate": -0.1}),
        (GeometricAcceptance, {"rate": 0.5, "seed": -1}),
        (ReplayedAcceptance, {"counts": ()}),
        (ReplayedAcceptance, {"counts": (0,)}),
    ],
)
def test_fields_out_of_range_are_refused(model: Any, fields: dict[str, Any]) -> None:
    with pytest.raises(ValidationError, match=list(fields)[-1]):
        model(**fields)


# -- files


def write(folder: Path, content: str | bytes) -> Path:
    path = folder / "file"
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


@pytest.mark.parametrize(
    "content",
    [
        "num_accepted\n1\n8\n3",
        "request_id,num_accepted\r\na,1\r\nb,8\r\n\r\na,3\r\n",
        '{"num_accepted": 1}\n{"num_accepted": 8, "window": 0}\n{"num_accepted": 3}\n',
    ],
)
def test_counts_are_read(tmp_path: Path, content: str) -> None:
    assert read_counts(write(tmp_path, content)) == (1, 8, 3)


@pytest.mark.parametrize(
    ("content", "what"),
    [
        ("", ": has no counts"),
        ("num_accepted\n", ": has no counts"),
        ("accepted\n1\n", ", line 1: column num_accepted is missing: there are 'accepted'"),
        ("num_accepted\n1\n0\n", ", line 3: num_accepted = 0 is no integer in 1..65536"),
        ("num_accepted\n-1\n", ", line 2: num_accepted = '-1' is no"),
        ("num_accepted\n1.5", ", line 2: num_accepted = '1.5' is no"),
        ("a,num_accepted\n1,2\n1\n", ", line 3: num_accepted is missing"),
        ('num_accepted\n"1\n', ", line 2: unexpected end of data"),
        ('{"num_accepted": true}\n', ", line 1: num_accepted = True is no"),
        ('{"num_accepted": 1}\n{}\n', ", line 2: num_accepted = None is no"),
        ('{"num_accepted": 1}\n{"num', ", line 2: not JSON"),
        (b"num_accepted\n\xff\n", ", line 2: not UTF-8 at byte 1"),
        (b"num_accepted\n1\0\n", ", line 2: byte 2 is NUL"),
    ],
)
def test_bad_counts_are_named(tmp_path: Path, content: str | bytes, what: str) -> None:
    with pytest.raises(WorkloadError) as raised:
        read_counts(write(tmp_path, content))
    assert str(raised.value).startswith(f"{tmp_path / 'file'}{what}")


def test_measured_shares_become_rates(tmp_path: Path) -> None:
    # As the demo prints them: of all windows, those whose first, second, ... draft holds.
    report = {"acceptance_per_position": [0.8, 0.4, 0.4, 0, 0], "mean_acceptance_length": 2.6, "tokens_per_second": 1}
    model = measured_rates(write(tmp_path, json.dumps(report, indent=1)), seed=5)
    assert model == RateAcceptance(rates=(0.8, 0.5, 1.0, 0.0, 0.0), seed=5)
    assert model.mean_acceptance_length(5) == pytest.approx(2.6)


@pytest.mark.parametrize(
    ("content", "what"),
    [
        ("", "not JSON"),
        ("[]", "not a JSON object"),
        ("{}", "acceptance_per_position = None must be a list"),
        ('{"acceptance_per_position": []}', "must be a list of shares, not empty"),
        ('{"acceptance_per_position": [0.5, 0.6]}', "acceptance_per_position[1] = 0.6 is outside 0..0.5"),
        ('{"acceptance_per_position": [1.5]}', "acceptance_per_position[0] = 1.5 is outside 0..1.0"),
        ('{"acceptance_per_position": [-0.1]}', "acceptance_per_position[0] = -0.1 is outside"),
        ('{"acceptance_per_position": ["x"]}', "acceptance_per_position[0] = 'x' is outside"),
        ('{"acceptance_per_position": [0.5, true]}', "acceptance_per_position[1] = True is outside"),
        ('{"acceptance_per_position": [0.5, 0.5], "mean_acceptance_length": 1.75}', "1.75 is not 1 + the sum"),
        ('{"acceptance_per_position": [0.5], "mean_acceptance_length": "x"}', "mean_acceptance_length = 'x' is not"),
        (b"\xff", "not UTF-8"),
        (b"{\0}", "NUL"),
    ],
)
def test_a_bad_report_is_named(tmp_path: Path, content: str | bytes, what: str) -> None:
    with pytest.raises(WorkloadError) as raised:
        measured_rates(write(tmp_path, content))
    message = str(raised.value)
    assert message.startswith(f"{tmp_path / 'file'}: ") and what in message and "\n" not in message


def test_files_that_cannot_be_read_are_named(tmp_path: Path) -> None:
    for read in (measured_rates, read_counts):
        with pytest.raises(WorkloadError, match="cannot be read: Is a directory"):
            read(tmp_path)
        with pytest.raises(WorkloadError, match="path must be a path, not int"):
            read(3)  # type: ignore[arg-type]


# -- drafts of a window


def follow(policy: DraftPolicy, holds: list[int]) -> list[int]:
    """Drafts of each window, when ``holds[i]`` drafts of window i hold at most."""
    length, asked = policy.start(), []
    for most in holds:
        asked.append(length.num_drafts)
        length.observe(length.num_drafts, 1 + min(most, length.num_drafts))
    return asked


def test_fixed_drafts() -> None:
    assert follow(FixedDrafts(max_drafts=7), [0, 7, 3]) == [7, 7, 7]
    assert follow(FixedDrafts(max_drafts=0), [0, 0]) == [0, 0]


def test_adaptive_drafts_follow_what_holds() -> None:
    policy = AdaptiveDrafts(max_drafts=7)
    assert follow(policy, [7] * 20) == [7] * 20
    asked = follow(policy, [2] * 40 + [7] * 40)
    assert asked[:40] == sorted(asked[:40], reverse=True) and asked[0] == 7 and asked[39] == 3
    assert asked[40:] == sorted(asked[40:]) and asked[79] == 7
    assert follow(AdaptiveDrafts(max_drafts=0), [0] * 40) == [0] * 40


def test_adaptive_drafts_stop_and_probe() -> None:
    asked = follow(AdaptiveDrafts(max_drafts=2, smoothing=0.5, probe_interval=4), [0] * 5 + [0] * 8 + [9] * 12)
    # The mean falls 2, 1, 0.5, 0.25, 0.125, 0.0625, which is below 0.1: then every fourth window probes.
    assert asked[:13] == [2, 2, 1, 1, 1, 0, 0, 0, 1, 0, 0, 0, 1]
    # A probe that holds lifts the mean above 1, and the drafts come back.
    assert asked[13:] == [0, 0, 0, 1] + [2] * 8


def test_a_policy_keeps_nothing_of_a_request() -> None:
    policy = AdaptiveDrafts(max_drafts=7)
    first = policy.start()
    for _ in range(20):
        first.observe(7, 1)
    assert first.num_drafts == 0
    assert policy.start().num_drafts == 7


@pytest.mark.parametrize("policy", [FixedDrafts(max_drafts=3), AdaptiveDrafts(max_drafts=3)])
def test_windows_that_cannot_be_are_refused(policy: DraftPolicy) -> None:
    length = policy.start()
    for num_drafts, num_accepted, what in (
        (3, 0, "num_accepted = 0 is outside 1..4, of a window of 3 drafts"),
        (3, 5, "num_accepted = 5 is outside 1..4"),
        (3, 1.0, "num_accepted = 1.0 is outside"),
        (-1, 1, "num_drafts = -1 is outside 0.."),
    ):
        with pytest.raises(SpecStateError, match=what):
            length.observe(num_drafts, num_accepted)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("fields", "what"),
    [
        ({"max_drafts": -1}, "max_drafts"),
        ({"smoothing": 0.0}, "smoothing"),
        ({"give_up": 1.0}, "give_up"),
        ({"probe_interval": 0}, "probe_interval"),
    ],
)
def test_policies_out_of_range_are_refused(fields: dict[str, Any], what: str) -> None:
    with pytest.raises(ValidationError, match=what):
        AdaptiveDrafts(**{"max_drafts": 3, **fields})
