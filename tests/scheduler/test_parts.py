"""Parts of the simulator that a whole run shows only now and then."""

from collections.abc import Sequence
from math import log
from types import SimpleNamespace
from typing import Any

import pytest

from specstate.scheduler.clients import Clients
from specstate.scheduler.drafts import FixedDrafts
from specstate.scheduler.managed import Managed
from specstate.scheduler.meter import Sample, moving_rate, quantiles
from specstate.scheduler.planner import Planner
from specstate.scheduler.session import Phase, Session
from specstate.scheduler.settings import EngineSettings
from specstate.scheduler.sweep import best
from specstate.scheduler.tally import Tally
from tests.scheduler.engine import Watched, make_setup, request, serve

DRAFTS = FixedDrafts(max_drafts=3)


def test_quantiles_are_values_that_occurred() -> None:
    assert quantiles([]) == (None, None, None)
    assert quantiles([7.0]) == (7.0, 7.0, 7.0)
    assert quantiles([3.0, 1.0, 2.0]) == (2.0, 3.0, 3.0)
    assert quantiles([float(i) for i in range(200, 0, -1)]) == (100.0, 180.0, 198.0)


def test_rates_are_those_of_the_time_before() -> None:
    samples = [Sample(1e3 * second, 10 * second**2, 0, 0, 0, 0, 0) for second in range(5)]
    assert moving_rate(samples, 2e3) == [(1e3, 10.0), (2e3, 20.0), (3e3, 40.0), (4e3, 60.0)]


@pytest.mark.parametrize(("ttft_ms", "tpot_ms", "good"), [(1e6, 1e6, 4), (1e6, 1e-3, 0), (1e-3, 1e6, 0)])
def test_good_requests_meet_both_limits(ttft_ms: float, tpot_ms: float, good: int) -> None:
    setup = make_setup(slo_ttft_ms=ttft_ms, slo_tpot_ms=tpot_ms)
    meter = serve(setup, [request(f"r{i}") for i in range(4)]).meter
    assert (meter.good_requests, meter.good_tokens) == (good, 10 * good)


def test_patience_is_exponentially_distributed() -> None:
    settings = EngineSettings(cancel_share=0.5, cancel_mean_ms=300.0, seed=4)
    clients = Clients([request(f"r{i}") for i in range(8000)], settings, DRAFTS)
    assert len(list(clients.arrived(0.0))) == 8000
    times = [ms for ms, _ in clients.gone(1e9)]
    assert times == sorted(times)
    assert len(times) == pytest.approx(4000, rel=0.05)
    assert sum(times) / len(times) == pytest.approx(300.0, rel=0.05)
    assert times[len(times) // 2] == pytest.approx(300.0 * log(2.0), rel=0.05)


def test_who_ends_by_length_is_a_share_of_all() -> None:
    clients = Clients([request(f"r{i}") for i in range(4000)], EngineSettings(length_share=0.25), DRAFTS)
    assert sum(session.ends_by_length for session in clients.arrived(0.0)) == pytest.approx(1000, rel=0.1)


def test_a_preempted_request_waits_for_its_last_counts() -> None:
    setup = make_setup()
    planner = Planner(setup.config, setup.settings, Managed(setup.config), Tally())
    session = Session("a", request("a"), False, DRAFTS.start(), num_unread=1)
    planner.waiting.append(session)
    assert not planner.plan(0.0)
    session.num_unread = 0
    assert planner.plan(0.0)
    assert session.phase is Phase.PREFILL


@pytest.mark.parametrize("preemption", ["recompute", "retract"])
def test_who_made_room_comes_back_before_others_begin(preemption: str) -> None:
    watched = Watched()
    requests = [request(f"r{i}", 1.0 * i, input_len=20, output_len=100) for i in range(12)]
    serve(make_setup(slots=6, kv_tokens=200, preemption=preemption, async_depth=0), requests, watched)
    spans = {name: session.spans for name, session in watched.sessions.items()}
    aside = {"recompute": "waiting", "retract": "retracted"}[preemption]
    first_waits = {name: each[0] for name, each in spans.items()}
    away = [(name, begin, end) for name, each in spans.items() for phase, begin, end in each[1:] if phase == aside]
    assert away
    for name, begin, end in away:
        begun = [other for other, (_, _, began) in first_waits.items() if begin < began < end]
        assert not begun, f"{begun} began while {name} waited to come back"


@pytest.mark.parametrize(
    ("choices", "chosen"),
    [
        ([(1, 9.0, 5), (2, 1.0, 5)], 1),
        ([(1, 9.0, 5), (1, 10.0, 6)], 1),
        ([(1, 9.0, 5), (1, 9.0, 4)], 1),
        ([(1, 9.0, 5), (1, 9.0, 5)], 0),
    ],
)
def test_the_best_serves_most_requests_then_has_most_throughput_then_the_smallest_requests(
    choices: Sequence[tuple[int, float, int]], chosen: int
) -> None:
    reports: Any = [
        SimpleNamespace(
            outcome=SimpleNamespace(meter=SimpleNamespace(good_requests=good)),
            goodput=throughput * good / 100.0,  # of a run that ends early it is high
            throughput=throughput,
            slots=SimpleNamespace(request_bytes=size),
        )
        for good, throughput, size in choices
    ]
    assert best(reports) == chosen
