"""The numbers of a manager: what follows from them, and from a histogram of accepted counts."""

import dataclasses
import inspect
import pickle
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specstate import Folds, Metrics
from specstate.metrics import per_position
from tests.factories import make_metrics


def test_a_snapshot_stays_as_it_is() -> None:
    metrics = make_metrics()
    for record in (metrics, metrics.folds):
        for field in dataclasses.fields(record):
            with pytest.raises(dataclasses.FrozenInstanceError):
                setattr(record, field.name, 1)
        assert not hasattr(record, "__dict__")
    assert hash(metrics) == hash(make_metrics())
    assert pickle.loads(pickle.dumps(metrics)) == metrics == make_metrics()
    assert make_metrics(windows=1) != metrics


@pytest.mark.parametrize("kind", [Metrics, Folds])
def test_every_field_says_what_it_counts(kind: Any) -> None:
    lines = inspect.getsource(kind).splitlines()
    for field in dataclasses.fields(kind):
        (at,) = [i for i, line in enumerate(lines) if line.startswith(f"    {field.name}: ")]
        assert lines[at + 1].startswith('    """')


def test_numbers_are_given_by_name_and_all_of_them() -> None:
    with pytest.raises(TypeError):
        Folds(1, 2, 3, 4, 5, 6)  # type: ignore[misc]
    with pytest.raises(TypeError):
        Folds(at_end=1)  # type: ignore[call-arg]


def test_acceptance_is_that_of_vllm() -> None:
    # 10 windows of 3 drafts each, 18 of which hold: 2.8 tokens a window with the next one.
    metrics = make_metrics(drafts=10, draft_tokens=30, accepted_tokens=18)
    assert metrics.mean_acceptance_length == pytest.approx(2.8)
    assert metrics.acceptance_rate == pytest.approx(0.6)


def test_acceptance_without_drafts_is_a_number() -> None:
    metrics = make_metrics(windows=7)
    assert metrics.mean_acceptance_length == 1.0
    assert metrics.acceptance_rate == 0.0


@pytest.mark.parametrize(
    ("hist", "accepted", "tokens"),
    [
        ([0, 0], (), 0),
        ([0, 9], (), 0),
        ([0, 0, 0, 0, 0], (0, 0, 0), 0),
        ([4, 3, 0, 0, 0], (0, 0, 0), 0),
        ([0, 0, 0, 0, 5], (5, 5, 5), 15),
        ([1, 2, 3, 4, 5], (12, 9, 5), 26),
    ],
)
def test_positions_of_a_histogram(hist: list[int], accepted: tuple[int, ...], tokens: int) -> None:
    assert per_position(hist) == (accepted, tokens)
    assert per_position(tuple(hist)) == (accepted, tokens)


@given(
    st.integers(1, 9).flatmap(lambda longest: st.lists(st.integers(0, longest), min_size=0).map(lambda n: (longest, n)))
)
def test_positions_are_those_counted_window_by_window(case: tuple[int, list[int]]) -> None:
    longest, counts = case
    hist = [counts.count(n) for n in range(longest + 1)]
    accepted, tokens = per_position(hist)
    assert accepted == tuple(sum(count - 1 > position for count in counts) for position in range(longest - 1))
    assert tokens == sum(max(count - 1, 0) for count in counts)
