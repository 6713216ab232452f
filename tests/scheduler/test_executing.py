"""Executing mode: real tensors, every state against the oracle, and the same events as without payloads."""

import io
import json
from pathlib import Path
from typing import Any

import pytest

from specstate import SpecStateError, TraceRecorder
from specstate.kernels import reference
from specstate.replay import replay_file
from specstate.replay.checks import Differs
from specstate.scheduler.executing import Executing, WithoutReads
from specstate.scheduler.managed import Managed
from specstate.scheduler.setup import Setup
from specstate.scheduler.simulator import Outcome, simulate
from specstate.scheduler.tally import ConservationError
from specstate.scheduler.workloads import TracedRequest
from tests.scheduler.engine import conversations, make_setup

POLICIES = ["eager", "deferred", "ring"]


def busy_setup(policy: str, **settings: Any) -> Setup:
    """Few slots, a short KV cache, small blocks: requests preempt one another and find prefixes."""
    fields: dict[str, Any] = {
        "slots": 4,
        "checkpoints": 12,
        "window": 4,
        "prefix_cache": True,
        "block_size": 8,
        "kv_tokens": 110,
        "async_depth": 1,
        "length_share": 0.3,
        "cancel_share": 0.5,
        "cancel_mean_ms": 600.0,
    }
    return make_setup(policy=policy, **fields | settings)


def twenty(seed: int = 1) -> list[TracedRequest]:
    return conversations(20, seed=seed, inputs=(6, 30), outputs=(1, 24), gap_ms=8.0, chains=2)


def traced(setup: Setup, requests: list[TracedRequest], executing: bool) -> tuple[Outcome, list[str], dict[str, Any]]:
    """A run, its trace without the header and without how many layers had verified, and what was compared."""
    file = io.StringIO()
    recorder = WithoutReads(file, seed=3) if executing else TraceRecorder(file, seed=3)
    with recorder:
        managed = Executing(setup.config, 3, recorder=recorder) if executing else Managed(setup.config, recorder)
        outcome = simulate(setup, requests, managed)
    events = [json.loads(line) for line in file.getvalue().splitlines()[1:]]
    for event in events:
        for progress in event.get("verified", {}).values():
            progress[0] = progress[0] > 0
    return outcome, [json.dumps(event) for event in events], managed.checked()


@pytest.mark.parametrize(
    ("policy", "settings"),
    [
        ("eager", {"prefill": "rows", "preemption": "retract"}),
        ("deferred", {"prefill": "rows", "preemption": "retract", "async_depth": 2, "cache_outputs": True}),
        ("ring", {"prefill": "rows", "cache_outputs": True}),
        ("ring", {"prefill": "kernel", "preemption": "retract", "async_depth": 2}),
        (
            "deferred",
            {"prefill": "kernel", "async_depth": 0, "cache_outputs": True, "cancel_mean_ms": 200.0, "seed": 2},
        ),
    ],
)
def test_twenty_requests_agree_with_the_oracle_and_with_metadata_mode(policy: str, settings: dict[str, Any]) -> None:
    setup = busy_setup(policy, **settings)
    depth = setup.settings.async_depth
    outcome, events, checked = traced(setup, twenty(), executing=True)
    tally = outcome.tally
    assert min(tally.finished, tally.preemptions, tally.hits) > 0
    assert checked["states"] > 300
    assert (checked["dropped_ends"] > 0, checked["wasted_windows"] > 0) == (not depth, depth > 0)
    bare, bare_events, nothing = traced(setup, twenty(), executing=False)
    assert nothing == {}
    assert events == bare_events
    assert (tally, outcome.metrics, outcome.meter) == (bare.tally, bare.metrics, bare.meter)


@pytest.mark.parametrize("policy", POLICIES)
def test_the_triton_kernels_agree_with_the_oracle(policy: str) -> None:
    # Few tokens: without a GPU the kernels are interpreted.
    setup = make_setup(
        policy=policy,
        window=2,
        slots=2,
        checkpoints=7,
        prefix_cache=True,
        block_size=4,
        kv_tokens=22,
        preemption="retract",
        cache_outputs=True,
    )
    requests = conversations(4, seed=45, block=4, inputs=(5, 9), outputs=(2, 7), chains=1)
    executing = Executing(setup.config, 3, "triton")
    tally = simulate(setup, requests, executing).tally
    assert min(tally.finished, tally.hits, tally.preemptions, tally.cut_tokens, tally.wasted_windows) > 0
    assert min(executing.checked()["states"], executing.checked()["outputs"]) >= 30
    assert tally == simulate(setup, requests, Managed(setup.config)).tally


@pytest.mark.parametrize("policy", POLICIES)
def test_a_recorded_run_replays(policy: str, tmp_path: Path) -> None:
    setup = busy_setup(policy, prefill="rows", cache_outputs=True, async_depth=2)
    path = tmp_path / "trace.jsonl"
    with TraceRecorder(path, seed=9) as recorder:
        outcome = simulate(setup, twenty(2), Managed(setup.config, recorder))
    assert min(outcome.tally.preemptions, outcome.tally.hits) > 0
    report = replay_file(path, backend="metadata")
    assert report.ok and report.events > 200
    assert replay_file(path).ok


def test_debug_finds_nothing_to_refuse() -> None:
    setup = busy_setup("ring", prefill="rows", cache_outputs=True)
    assert simulate(setup, twenty(), Managed(setup.config, debug=True)).tally.finished > 0
    assert simulate(setup, twenty()[:8], Executing(setup.config, 3, debug=True)).tally.finished > 0


def test_a_fold_that_is_slightly_off_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    exact = reference.fold_records
    monkeypatch.setattr(reference, "fold_records", lambda state, *rest: exact(state, *rest) * (1.0 + 1e-9))
    setup = busy_setup("eager")
    with pytest.raises(Differs, match="is off by"):
        simulate(setup, twenty(), Executing(setup.config, 3))


def test_counts_that_the_manager_gets_otherwise_are_found() -> None:
    setup = busy_setup("ring")

    class Forgetful(Executing):
        def defer(self, step: Any, counts: Any, finished: Any) -> None:
            super().defer(step, [max(count - 1, 1) for count in counts], finished)

    with pytest.raises(ConservationError, match="accepted tokens and the manager's differ"):
        simulate(setup, twenty(), Forgetful(setup.config, 3))


def test_a_state_that_is_written_behind_the_managers_back_is_found() -> None:
    setup = busy_setup("deferred")

    class Careless(Executing):
        def release(self, handle: Any) -> None:
            slots = self.manager.published().values()
            for slot in list(slots)[:1]:
                self.manager.checkpoints(0)[0][slot] += 1.0
            super().release(handle)

    with pytest.raises(Differs, match="changed"):
        simulate(setup, twenty(), Careless(setup.config, 3))


def test_a_counter_that_is_off_is_found() -> None:
    setup = busy_setup("ring")
    executing = Executing(setup.config, 3)
    executing._checks.wasted_windows += 1
    with pytest.raises(Differs, match="counter wasted_windows is 0, wanted 1"):
        simulate(setup, twenty(), executing)


def test_a_recorder_with_reads_is_refused() -> None:
    recorder: Any = TraceRecorder(io.StringIO())
    with pytest.raises(SpecStateError, match="give a WithoutReads"):
        Executing(busy_setup("ring").config, 0, recorder=recorder)
