"""``specstate bench host``, and the speed that it measures, with room for machines that do other things meanwhile."""

import json
import random
import subprocess
import sys
from collections.abc import Callable
from statistics import median
from time import perf_counter_ns

import pytest

from specstate import Handle, StateManager
from specstate.bench.host import PARTS, measure_host
from specstate.cli import main
from specstate.config import FoldPolicy
from tests.factories import POLICIES, make_config

#: Microseconds of a step by its rows, on an idle core; a busy one is given several times as long.
AIM_US = {"1": 20.0, "256": 150.0}
ALLOWANCE = 4.0

NUM_REQUESTS = 10_000
#: Operations at either end of them whose medians are compared.
NUM_COMPARED = 1_000


def test_json_has_the_keys(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "host", "--json", "--steps", "3"]) == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    assert captured.out.count("\n") == 1
    report = json.loads(captured.out)
    assert list(report["us_per_step"]) == list(report["us_per_part"]) == ["1", "256"]
    for rows, us in report["us_per_step"].items():
        parts = report["us_per_part"][rows]
        assert tuple(parts) == PARTS
        assert 0 < report["fastest_us_per_step"][rows] <= us
        assert all(0 < part < 2 * us for part in parts.values())
    assert (report["steps"], report["policy"], report["max_query_len"]) == (3, "ring", 8)


def test_a_table_otherwise(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "host", "--rows", "3", "1", "3", "--steps", "2", "--policy", "deferred"]) == 0
    title, empty, header, *rows = capsys.readouterr().out.splitlines()
    assert "medians of 2 steps: backend metadata, policy deferred" in title
    assert empty == ""
    assert header.split() == ["rows", *PARTS, "all", "fastest"]
    assert [row.split()[0] for row in rows] == ["3", "1"]
    assert all(len(row.split()) == len(header.split()) for row in rows)


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        ("bench", "WHAT"),
        ("bench guest", "invalid choice: 'guest'"),
        ("bench host --rows", "--rows: expected at least one"),
        ("bench host --rows 0", "--rows: 0 is outside 1.."),
        ("bench host --rows many", "'many' is not a whole number"),
        ("bench host --rows 1 131073", "rows = 131073 exceeds 131072"),
        ("bench host --steps 0", "--steps: 0 is outside 1.."),
        ("bench host --policy lazy", "invalid choice: 'lazy'"),
        ("bench host --json --rows x", "'x' is not a whole number"),
    ],
)
def test_refuses_bad_usage(argv: str, says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(argv.split()) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1
    assert captured.err.startswith("specstate bench")
    assert says in captured.err


def test_a_step_costs_the_host_microseconds() -> None:
    def times_of_the_aim() -> float:
        # In a process of its own, where no coverage is measured: that takes several times as long as the step.
        command = [sys.executable, "-m", "specstate.cli", "bench", "host", "--json", "--steps", "500"]
        ended = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
        us_per_step = json.loads(ended.stdout)["us_per_step"]
        print(f"us per step, by rows: {us_per_step}, the aim is {AIM_US}")
        return max(us_per_step[rows] / aim for rows, aim in AIM_US.items())

    assert retried(times_of_the_aim, ALLOWANCE) <= ALLOWANCE


@pytest.mark.parametrize("policy", POLICIES)
def test_its_requests_advance_under_every_policy(policy: FoldPolicy) -> None:
    """``measure_host`` itself compares where they stand; here, that the figures are all there."""
    report = measure_host((1, 5), 30, policy)
    assert [(times.num_rows, tuple(times.part_us)) for times in report.times] == [(1, PARTS), (5, PARTS)]
    assert report.config.fold_policy == policy


class Churn:
    """Admits and releases on backend "metadata", and keeps what each call took."""

    def __init__(self, num_slots: int) -> None:
        self.manager = StateManager(make_config(max_requests=num_slots), None, backend="metadata")
        self.live: list[Handle] = []
        self.admit_ns: list[int] = []
        self.release_ns: list[int] = []

    def admit(self, name: str) -> None:
        start = perf_counter_ns()
        handle = self.manager.admit(name)
        self.admit_ns.append(perf_counter_ns() - start)
        self.live.append(handle)

    def release(self) -> str:
        handle = self.live.pop()
        start = perf_counter_ns()
        self.manager.release(handle)
        self.release_ns.append(perf_counter_ns() - start)
        return handle.request_id

    @property
    def growth(self) -> float:
        """How many times as long the last calls took as the first ones, of whichever call grew more."""
        return max(
            median(times[-NUM_COMPARED:]) / median(times[:NUM_COMPARED]) for times in (self.admit_ns, self.release_ns)
        )


def all_at_once() -> float:
    """All live together, released in random order, admitted again, released again."""
    churn, chance = Churn(NUM_REQUESTS), random.Random(0)
    for _ in range(2):
        for i in range(NUM_REQUESTS):
            churn.admit(f"request {i}")
        chance.shuffle(churn.live)
        for _ in range(NUM_REQUESTS):
            churn.release()
    churn.manager.check_integrity()
    return churn.growth


def a_few_at_a_time() -> float:
    """Through a few slots, freed in random order; every other request has lived before."""
    churn, chance = Churn(64), random.Random(0)
    gone: list[str] = []
    for i in range(NUM_REQUESTS):
        if not churn.manager.can_admit():
            chance.shuffle(churn.live)
            gone += [churn.release() for _ in range(chance.randint(1, 64))]
        churn.admit(gone.pop() if gone and i % 2 else f"request {i}")
    churn.manager.check_integrity()
    return churn.growth


@pytest.mark.parametrize("lives", [all_at_once, a_few_at_a_time])
def test_admission_and_release_cost_the_same_however_many_came_before(lives: Callable[[], float]) -> None:
    growth = retried(lives, 2.0)
    print(f"the last {NUM_COMPARED} calls took {growth:.2f} times as long as the first")
    assert growth <= 2.0


def retried(measure: Callable[[], float], limit: float, attempts: int = 5) -> float:
    """The least of several measurements, or the first that keeps ``limit``."""
    figures = [measure()]
    while min(figures) > limit and len(figures) < attempts:
        figures.append(measure())
    return min(figures)
