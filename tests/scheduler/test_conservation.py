"""Any engine and any workload: counts add up, slots come back, and whoever can be served is served."""

from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from specstate import TraceRecorder
from specstate.replay import replay_file
from specstate.scheduler.acceptance import GeometricAcceptance
from specstate.scheduler.drafts import AdaptiveDrafts, FixedDrafts
from specstate.scheduler.managed import Managed
from specstate.scheduler.setup import Setup
from specstate.scheduler.simulator import simulate
from specstate.scheduler.workloads import TracedRequest
from tests.factories import amount
from tests.scheduler.engine import make_setup, serve

LENGTHS = st.integers(1, 40)


@st.composite
def setups(draw: st.DrawFn) -> Setup:
    window = draw(st.integers(1, 6))
    slots = draw(st.integers(1, 5))
    cached = draw(st.booleans())
    most = window - 1
    longest = 40 + 40 + 3 * window
    return make_setup(
        policy=draw(st.sampled_from(["snapshots", "eager", "deferred", "ring"])),
        window=window,
        slots=slots,
        # A request that keeps a boundary needs three.
        checkpoints=draw(st.integers(max(3, slots - 1), slots + 6)),
        acceptance=GeometricAcceptance(rate=draw(st.sampled_from([0.0, 0.3, 0.7, 1.0])), seed=draw(st.integers(0, 9))),
        drafts=draw(st.sampled_from([FixedDrafts(max_drafts=most), AdaptiveDrafts(max_drafts=most)])),
        token_budget=draw(st.integers(window, 60)),
        max_batch=draw(st.integers(1, 6)),
        async_depth=draw(st.integers(0, 2)),
        prefill=draw(st.sampled_from(["kernel", "rows"])),
        prefix_cache=cached,
        cache_outputs=cached and draw(st.booleans()),
        block_size=draw(st.integers(max(window, 2), 12)),
        preemption=draw(st.sampled_from(["recompute", "retract"])),
        kv_tokens=draw(st.sampled_from([None, longest, 2 * longest])),
        max_context=draw(st.sampled_from([60, 1000])),
        cancel_share=draw(st.sampled_from([0.0, 0.5])),
        cancel_mean_ms=draw(st.sampled_from([30.0, 500.0])),
        length_share=draw(st.sampled_from([0.0, 0.5, 1.0])),
        seed=draw(st.integers(0, 9)),
    )


@st.composite
def workloads(draw: st.DrawFn, block: int = 8) -> list[TracedRequest]:
    arrival_ms, requests = 0.0, []
    for number in range(draw(st.integers(0, 14))):
        arrival_ms += draw(st.sampled_from([0.0, 1.0, 25.0, 400.0]))
        input_len = draw(LENGTHS)
        hashes = tuple(range(draw(st.integers(0, -(-input_len // block)))))
        requests.append(TracedRequest(f"r{number}", arrival_ms, input_len, draw(LENGTHS), hashes, block))
    return requests


@settings(max_examples=amount(100, 40))
@given(setups(), st.data())
def test_every_run_ends_and_its_counts_add_up(setup: Setup, data: st.DataObject) -> None:
    requests = data.draw(workloads(setup.settings.block_size))
    outcome = serve(setup, requests)  # raises ConservationError
    tally = outcome.tally
    assert tally.arrived == len(requests)
    if not setup.settings.cancel_share:
        served = [each for each in requests if each.input_len + each.output_len <= setup.settings.max_context]
        assert tally.finished == len(served)
        assert tally.output_tokens == sum(each.output_len for each in served)


@settings(max_examples=25)
@given(setups().filter(lambda setup: setup.policy != "snapshots"), st.data())
def test_every_run_replays(tmp_path_factory: Any, setup: Setup, data: st.DataObject) -> None:
    path = tmp_path_factory.mktemp("runs") / "trace.jsonl"
    with TraceRecorder(path) as recorder:
        simulate(setup, data.draw(workloads(setup.settings.block_size)), Managed(setup.config, recorder, debug=True))
    report = replay_file(path, backend="metadata")
    assert report.first_difference is None
