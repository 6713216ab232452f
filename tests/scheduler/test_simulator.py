"""The engine in simulated time: conservation, latencies, late discovery, preemption, prefixes, cancellation."""

import dataclasses
from itertools import pairwise
from typing import Any

import pytest

from specstate import SpecStateError
from specstate.bench.floor import Rings, step_bytes
from specstate.scheduler.acceptance import GeometricAcceptance, RateAcceptance, ReplayedAcceptance
from specstate.scheduler.calibration import UNCALIBRATED_BYTES_PER_S
from specstate.scheduler.clients import Clients
from specstate.scheduler.device import Launched
from specstate.scheduler.drafts import AdaptiveDrafts, FixedDrafts
from specstate.scheduler.managed import Managed
from specstate.scheduler.planner import Plan
from specstate.scheduler.session import Session
from specstate.scheduler.setup import Setup
from specstate.scheduler.simulator import simulate
from specstate.scheduler.synthetic import Lengths, LogNormal, SyntheticWorkload
from specstate.scheduler.tally import ConservationError, Tally, check_conservation
from specstate.scheduler.workloads import TracedRequest
from tests.scheduler.engine import COST, RATES, SPEC, Watched, conversations, make_setup, request, serve

POLICIES = ["eager", "deferred", "ring"]


# -- conservation


@pytest.mark.parametrize("depth", [0, 1, 2])
@pytest.mark.parametrize("policy", ["snapshots", *POLICIES])
def test_counts_add_up_with_everything_happening(policy: str, depth: int) -> None:
    setup = make_setup(
        policy=policy,
        slots=5,
        checkpoints=14,
        async_depth=depth,
        prefix_cache=True,
        block_size=8,
        cache_outputs=True,
        kv_tokens=150,
        cancel_share=0.3,
        cancel_mean_ms=400.0,
        length_share=0.4,
        max_context=70,
    )
    tally = serve(
        setup, conversations(120, gap_ms=10.0, outputs=(1, 40))
    ).tally  # which checks all equations at its end
    assert tally.arrived == 120 == tally.finished + tally.cancelled + tally.refused
    assert min(tally.finished, tally.cancelled, tally.refused, tally.preemptions, tally.hits) > 0
    assert tally.cut_tokens > 0
    if depth:
        assert tally.wasted_windows > 0 and tally.late_tokens > 0
    else:
        assert tally.wasted_windows == 0 and tally.dropped_windows > 0


def test_finished_requests_got_exactly_what_they_asked_for() -> None:
    requests = conversations(60, outputs=(1, 30))
    watched = Watched()
    outcome = serve(make_setup(slots=6, length_share=0.5, async_depth=2), requests, watched)
    assert outcome.tally.output_tokens == sum(each.output_len for each in requests)
    assert all(watched.sessions[each.request_id].num_known == each.output_len for each in requests)


@pytest.mark.parametrize("name", [field.name for field in dataclasses.fields(Tally) if field.name in (
    "finished", "output_tokens", "prefills", "accepted", "cut_tokens", "late_tokens", "windows", "wasted_windows",
    "dropped_windows", "folds", "boundary_folds", "retracted", "hits",
)])  # fmt: skip
def test_a_count_that_is_off_by_one_is_noticed(name: str) -> None:
    outcome = serve(make_setup(), conversations(10))
    setattr(outcome.tally, name, getattr(outcome.tally, name) + 1)
    metrics = dataclasses.replace(
        outcome.metrics, record_slots_in_use=0, checkpoint_slots_in_use=outcome.metrics.published_slots
    )
    with pytest.raises(ConservationError, match="differ"):
        check_conservation(outcome.tally, metrics)


def test_a_slot_that_is_not_given_back_is_noticed() -> None:
    setup = make_setup()

    class Forgets(Managed):
        def release(self, handle: Any) -> None:
            if handle.request_id != "r3":
                super().release(handle)

    with pytest.raises(ConservationError, match="record slots in use and none differ: 1 and 0"):
        simulate(setup, conversations(10), Forgets(setup.config))


# -- acceptance


@pytest.mark.parametrize("window", [1, 3, 8])
def test_acceptance_over_full_uncut_windows_is_that_of_the_closed_form(window: int) -> None:
    setup = make_setup(
        window=window, slots=8, token_budget=512, acceptance=RateAcceptance(rates=RATES[: window - 1], seed=5)
    )
    tally = serve(setup, [request(f"r{i}", 1.0 * i, 20, 3000) for i in range(16)]).tally
    assert tally.full_windows > 9_000
    assert tally.full_accepted / tally.full_windows == pytest.approx(
        setup.acceptance.mean_acceptance_length(window - 1), rel=0.01
    )


@pytest.mark.parametrize("length_share", [0.0, 1.0])
def test_short_answers_do_not_bend_the_acceptance_over_full_windows(length_share: float) -> None:
    acceptance = GeometricAcceptance(rate=0.8, seed=5)
    setup = make_setup(window=8, slots=8, token_budget=512, acceptance=acceptance, length_share=length_share)
    tally = serve(setup, [request(f"r{i}", output_len=24) for i in range(3000)]).tally
    assert tally.full_windows > 9_000
    assert tally.full_accepted / tally.full_windows == pytest.approx(acceptance.mean_acceptance_length(7), rel=0.01)


def test_shorter_windows_of_an_adaptive_drafter_are_no_full_ones() -> None:
    setup = make_setup(window=4, acceptance=GeometricAcceptance(rate=0.05), drafts=AdaptiveDrafts(max_drafts=3))
    outcome = serve(setup, [request("a", output_len=400)])
    assert outcome.tally.verified_tokens < 2.5 * outcome.tally.windows
    assert outcome.tally.full_windows < 20 < outcome.tally.windows


# -- latency


@pytest.mark.parametrize("depth", [0, 1, 2])
@pytest.mark.parametrize("policy", ["snapshots", *POLICIES])
def test_latency_at_low_load_is_that_of_one_request_alone(policy: str, depth: int) -> None:
    setup = make_setup(policy=policy, async_depth=depth, window=4, acceptance=GeometricAcceptance(rate=0.6, seed=3))
    requests = [request(f"r{i}", 1e6 * i, 150, 40) for i in range(20)]
    outcome = serve(setup, requests)
    # 150 tokens under a budget of 64 are three steps.
    ttft_ms = 3 * COST.step_ms + 1e3 * 150 / COST.prefill_tokens_per_s
    assert list(outcome.meter.ttft_ms) == pytest.approx([ttft_ms] * 20)
    # So exactly that a fold too many or too few would show.
    assert list(outcome.meter.tpot_ms) == pytest.approx([_alone_ms(setup, each) / 39 for each in requests], rel=1e-9)


def _alone_ms(setup: Setup, each: TracedRequest) -> float:
    """From the first token to the last, with a whole device to itself."""
    config, ms, known, number, context = setup.config, 0.0, 1, 0, each.input_len
    rings = Rings(config, 1)
    while known < each.output_len:
        count = setup.acceptance.num_accepted(each.request_id, number, config.max_query_len - 1)
        count = min(count, each.output_len - known + 1)
        if setup.policy == "snapshots":  # T states written, one read; the conv's window and history with them
            spec = config.layer
            state, channel = 2 * 16 * 16 * 4, 2 * spec.conv_channels
            token = 2 * (spec.conv_channels + 2 * 16 + 2 + 2 * 16)
            parameters = 4 * (2 + 2 * 16 + spec.conv_channels * 4)
            size = config.num_layers * (state + 3 * channel + 4 * (state + channel + token) + parameters)
        else:
            size = sum(step_bytes(config, *rings.step([count])).values())
        ms += COST.step_ms + 4 * COST.ms_per_token + context * COST.ms_per_context_token
        ms += 1e3 * size / UNCALIBRATED_BYTES_PER_S
        context, known, number = context + count, known + count, number + 1
    return ms


def test_the_host_delays_the_device_only_when_it_waits_for_counts() -> None:
    cost = COST.model_copy(update={"host_ms": 4.0})
    ends = []
    for depth in (0, 1):
        outcome = serve(make_setup(cost=cost, async_depth=depth), [request("a", output_len=200)])
        ends.append((outcome.meter.end_ms, outcome.tally.steps - outcome.tally.wasted_windows))
    (sync_ms, sync_steps), (async_ms, async_steps) = ends
    assert sync_steps == async_steps
    assert sync_ms - async_ms == pytest.approx(4.0 * (sync_steps - 1))


def test_requests_share_the_budget_and_windows_come_first() -> None:
    watched = Watched()
    serve(
        make_setup(slots=4, token_budget=10), [request(f"r{i}", input_len=30, output_len=20) for i in range(4)], watched
    )
    assert max(launched.tokens for launched, _, _ in watched.steps) <= 10
    assert any(windows == 2 and pieces for _, windows, pieces in watched.steps)
    starts = [(launched.start_ms, launched.end_ms) for launched, _, _ in watched.steps]
    assert all(before[1] <= after[0] for before, after in pairwise(starts))


# -- late discovery


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_the_host_learns_of_an_end_token_so_many_windows_late(depth: int) -> None:
    outcome = serve(make_setup(async_depth=depth), [request("a", output_len=50)])
    assert outcome.tally.wasted_windows == outcome.metrics.wasted_windows == depth
    assert outcome.tally.late_tokens == 0


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_windows_behind_an_end_by_length_accept_tokens_that_nobody_gets(depth: int) -> None:
    acceptance = ReplayedAcceptance(counts=(3,))
    outcome = serve(
        make_setup(async_depth=depth, length_share=1.0, acceptance=acceptance), [request("a", output_len=50)]
    )
    # One of the prefill and 16 windows of 3 are 49: the next one is cut by 2.
    assert outcome.tally.cut_tokens == 2
    assert outcome.tally.late_tokens == 3 * depth
    assert outcome.tally.wasted_windows == 0


def test_tokens_of_prompts_are_no_part_of_the_verify_work() -> None:
    setup = make_setup(async_depth=2, cancel_share=1.0, cancel_mean_ms=15.0, acceptance=GeometricAcceptance(rate=0.0))
    tally = serve(setup, [request(f"r{i}", 100.0 * i, output_len=3) for i in range(40)]).tally
    assert tally.late_prefills > 0
    # Every window accepts its first token: of use, or late.
    assert tally.committed_tokens == tally.output_tokens - (tally.prefills - tally.late_prefills)
    assert 0 <= tally.committed_tokens <= tally.accepted


def test_an_end_token_inside_an_accepted_run_cuts_its_count() -> None:
    acceptance = ReplayedAcceptance(counts=(4,))
    outcome = serve(make_setup(async_depth=0, acceptance=acceptance), [request("a", output_len=7)])
    # One of the prefill, a window of 4, and one that ends with its second token: an accepted draft, so 3 are counted.
    assert (outcome.tally.accepted, outcome.tally.cut_tokens, outcome.tally.full_windows) == (7, 1, 1)
    assert outcome.metrics.accepted_tokens == 5


def test_a_first_token_that_is_the_last() -> None:
    outcome = serve(make_setup(async_depth=2), [request("a", output_len=1)])
    assert outcome.tally.output_tokens == 1
    assert len(outcome.meter.tpot_ms) == 0


def test_a_prompt_row_says_that_its_first_token_is_the_end() -> None:
    outcome = serve(make_setup(async_depth=2, prefill="rows"), [request("a", output_len=1)])
    assert outcome.tally.wasted_windows == 2
    assert outcome.tally.late_tokens == 0


# -- who makes room


@pytest.mark.parametrize("prefill", ["kernel", "rows"])
@pytest.mark.parametrize("preemption", ["recompute", "retract"])
def test_a_short_kv_cache_preempts_and_everybody_finishes(preemption: str, prefill: str) -> None:
    setup = make_setup(slots=6, kv_tokens=200, preemption=preemption, prefill=prefill, async_depth=2)
    outcome = serve(setup, [request(f"r{i}", input_len=20, output_len=100) for i in range(8)])
    tally = outcome.tally
    assert tally.finished == 8
    assert (tally.recomputed > 0, tally.retracted > 0) == (preemption == "recompute", preemption == "retract")
    # Each life of a request gives one token when its prompt is done, unless it is preempted before.
    assert 8 + (tally.recomputed > 0) <= tally.prefills <= 8 + tally.recomputed
    assert outcome.metrics.preemptions == tally.retracted


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_what_runs_never_exceeds_the_kv_cache(depth: int) -> None:
    used: list[int] = []

    class Counts(Watched):
        def step(self, launched: Launched, plan: Plan) -> None:
            used.append(sum(s.committed_len for s in plan.windows) + sum(piece.stop for piece in plan.pieces))

    setup = make_setup(slots=6, kv_tokens=200, async_depth=depth, acceptance=GeometricAcceptance(rate=1.0))
    serve(setup, [request(f"r{i}", input_len=20, output_len=100) for i in range(8)], Counts())
    assert 150 < max(used) <= 200


def test_boundary_checkpoints_that_find_no_slot_preempt_the_last_request() -> None:
    setup = make_setup(slots=4, checkpoints=5, prefix_cache=True, cache_outputs=True, block_size=8)
    outcome = serve(setup, [request(f"r{i}", input_len=20, output_len=60) for i in range(4)])
    assert outcome.tally.recomputed > 0
    assert outcome.tally.finished == 4


def test_a_request_that_was_retracted_resumes_when_it_is_alone() -> None:
    setup = make_setup(slots=2, window=1, kv_tokens=83, token_budget=2, async_depth=0, preemption="retract")
    outcome = serve(setup, [request("a", input_len=3, output_len=40), request("b", input_len=1, output_len=40)])
    assert outcome.tally.retracted > 0
    assert outcome.tally.finished == 2


def test_three_checkpoint_slots_are_enough_for_anything() -> None:
    setup = make_setup(
        slots=3, checkpoints=3, window=2, preemption="retract", prefix_cache=True, block_size=4, cache_outputs=True,
        prefill="rows",
    )  # fmt: skip
    tally = serve(setup, conversations(40, block=4, inputs=(5, 20), outputs=(5, 25), chains=2)).tally
    assert tally.finished == 40
    assert tally.retracted > 0


def test_the_oldest_request_is_never_preempted() -> None:
    watched = Watched()
    requests = [request(f"r{i}", 1.0 * i, input_len=20, output_len=100) for i in range(8)]
    serve(make_setup(slots=6, kv_tokens=200, preemption="retract"), requests, watched)
    phases = [[span[0] for span in watched.sessions[f"r{i}"].spans] for i in range(8)]
    assert phases[0] == ["waiting", "prefill", "decode"]
    assert any("retracted" in each for each in phases)


def test_retracted_states_cost_their_way_over_the_host() -> None:
    slow = COST.model_copy(update={"host_bytes_per_s": 1e6})
    ends = [
        serve(
            make_setup(slots=6, kv_tokens=200, preemption="retract", cost=cost),
            [request(f"r{i}", input_len=20, output_len=100) for i in range(8)],
        ).meter.busy_ms
        for cost in (COST, slow)
    ]
    assert ends[1] > 1.05 * ends[0]


# -- prefixes


def test_a_prefix_is_found_again_and_spares_its_prefill() -> None:
    setup = make_setup(prefix_cache=True, block_size=8, checkpoints=8)
    hashes = ("a", "b", "c")
    requests = [request("first", 0, 24, 4, prefix_hashes=hashes, block_size=8)]
    requests += [request("same", 1e4, 24, 4, prefix_hashes=hashes, block_size=8)]
    requests += [request("longer", 2e4, 40, 4, prefix_hashes=(*hashes, "d", "e"), block_size=8)]
    requests += [request("other", 3e4, 24, 4, prefix_hashes=("x", "b", "c"), block_size=8)]
    tally = serve(setup, requests).tally
    # The last token of a prompt has to run, so the second request cannot start at 24, which is all that is published.
    assert tally.hits == 1
    assert tally.restored_tokens == 24
    assert tally.prefilled_tokens == 24 + 24 + (40 - 24) + 24


@pytest.mark.parametrize("prefill", ["kernel", "rows"])
def test_copies_of_checkpoints_take_their_time(prefill: str) -> None:
    hashes = tuple(range(6))
    requests = [request(f"r{i}", 1e5 * i, 43, 9, prefix_hashes=hashes, block_size=8) for i in range(3)]
    outcomes = []
    for rate in (1e9, 1e6):
        cost = COST.model_copy(update={"copy_bytes_per_s": rate})
        setup = make_setup(prefix_cache=True, block_size=8, checkpoints=9, cost=cost, prefill=prefill)
        outcomes.append(serve(setup, requests))
    tally = outcomes[0].tally
    assert tally.hits == 2
    # What a step has kept at a boundary is handed over; a kernel's state is copied, and so is what is restored.
    copies = tally.hits + (tally.published if prefill == "kernel" else 0)
    size = 3 * (2 * 16 * 16 * 4 + 3 * 2 * SPEC.conv_channels)
    slower_ms = outcomes[1].meter.busy_ms - outcomes[0].meter.busy_ms
    assert slower_ms == pytest.approx(1e3 * copies * size * (1e-6 - 1e-9))


def test_blocks_of_another_size_share_nothing() -> None:
    setup = make_setup(prefix_cache=True, block_size=16, checkpoints=8)
    requests = [
        request(f"r{i}", 1e4 * i, 40, 4, prefix_hashes=("a", "b", "c", "d", "e"), block_size=8) for i in range(2)
    ]
    tally = serve(setup, requests).tally
    assert (tally.hits, tally.lookups, tally.published) == (0, 0, 0)


def test_a_recomputed_request_starts_from_what_it_had_put_out() -> None:
    setup = make_setup(slots=6, checkpoints=24, kv_tokens=200, prefix_cache=True, cache_outputs=True, block_size=8)
    tally = serve(setup, [request(f"r{i}", input_len=20, output_len=100) for i in range(8)]).tally
    assert tally.recomputed > 0 and tally.hits > 0


def test_a_host_that_is_late_misses_boundaries_that_windows_may_have_passed() -> None:
    published = []
    for depth in (0, 1, 2):
        setup = make_setup(
            async_depth=depth, prefix_cache=True, cache_outputs=True, block_size=4, checkpoints=40,
            acceptance=ReplayedAcceptance(counts=(4,)),
        )  # fmt: skip
        published.append(serve(setup, [request("a", input_len=4, output_len=41)]).tally.published)
    # Every window of 4 reaches a boundary. The host of depth 0 publishes each; a late one cannot tell where the
    # windows in flight have led.
    assert published == [10, 0, 0]


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_prompts_as_rows_publish_at_boundaries(depth: int) -> None:
    setup = make_setup(prefix_cache=True, block_size=8, checkpoints=12, prefill="rows", async_depth=depth)
    outcome = serve(setup, conversations(40))
    assert outcome.tally.hits > 5
    assert outcome.metrics.folds.at_boundary > 0


# -- requests that do not get through


def test_a_request_beyond_any_capacity_is_refused_and_explained() -> None:
    requests = [request("long", 0, 400, 4), request("fits", 1, 20, 4), request("wide", 2, 90, 4)]
    outcome = serve(make_setup(max_context=300, kv_tokens=100, async_depth=1), requests)
    assert (outcome.tally.refused, outcome.tally.finished) == (2, 1)
    assert outcome.refusals == (
        "request 'long': 404 tokens of prompt and output exceed max_context = 300",
        "request 'wide': 102 tokens, with the windows in flight, exceed kv_tokens = 100",
    )


@pytest.mark.parametrize("depth", [0, 1])
def test_clients_go_away_while_they_wait_and_while_they_are_served(depth: int) -> None:
    setup = make_setup(slots=2, cancel_share=1.0, cancel_mean_ms=150.0, async_depth=depth)
    watched = Watched()
    outcome = serve(setup, conversations(60, outputs=(30, 60), gap_ms=30.0), watched)
    phases = {watched.sessions[name].spans[-1][0] for name, end, _ in watched.ends if end == "cancelled"}
    assert phases >= {"waiting", "decode"}
    assert (outcome.tally.dropped_windows > 0) == (depth == 0)
    assert outcome.metrics.late_ends_dropped == outcome.tally.dropped_windows


@pytest.mark.parametrize("prefill", ["kernel", "rows"])
@pytest.mark.parametrize("depth", [0, 1, 2])
def test_a_prompt_is_prefilled_until_its_step_ends(depth: int, prefill: str) -> None:
    watched = Watched()
    serve(make_setup(window=4, async_depth=depth, prefill=prefill), [request("a", input_len=4)], watched)
    first = watched.steps[0][0]
    phases = {name: (begin_ms, end_ms) for name, begin_ms, end_ms in watched.sessions["a"].spans}
    assert phases["prefill"] == (0.0, first.end_ms)
    assert phases["decode"] == (first.end_ms, watched.sessions["a"].last_token_ms)


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_nobody_is_served_who_has_gone_away(depth: int) -> None:
    setup = make_setup(cancel_share=1.0, cancel_mean_ms=40.0, async_depth=depth)
    requests = [request(f"r{i}", 200.0 * i, output_len=4) for i in range(40)]
    gone_ms = {session.name: ms for ms, session in _gone(setup, requests)}
    watched = Watched()
    serve(setup, requests, watched)
    assert {end for _, end, _ in watched.ends} == {"finished", "cancelled"}
    assert all(last_ms < gone_ms[name] for name, _, last_ms in watched.ends)


def _gone(setup: Setup, requests: list[TracedRequest]) -> list[tuple[float, Session]]:
    clients = Clients(requests, setup.settings, setup.drafts)
    assert len(list(clients.arrived(1e9))) == len(requests)
    return list(clients.gone(1e9))


def test_retracted_requests_can_be_cancelled() -> None:
    setup = make_setup(slots=6, kv_tokens=200, preemption="retract", cancel_share=1.0, cancel_mean_ms=800.0)
    watched = Watched()
    serve(setup, [request(f"r{i}", input_len=20, output_len=100) for i in range(12)], watched)
    assert "retracted" in {watched.sessions[name].spans[-1][0] for name, end, _ in watched.ends if end == "cancelled"}


def test_ids_may_repeat() -> None:
    assert serve(make_setup(), [request("same"), request("same"), request("same", 1e5)]).tally.finished == 3


def test_nothing_at_all() -> None:
    assert serve(make_setup(), []).tally == Tally()


# -- what does not go together


def test_arrivals_that_go_backwards_are_refused() -> None:
    with pytest.raises(SpecStateError, match=r"'b' arrives at 1\.0 ms, before request 'a' above it, at 2\.0 ms"):
        serve(make_setup(), [request("a", 2.0), request("b", 1.0)])


@pytest.mark.parametrize(
    ("fields", "what"),
    [
        ({"drafts": FixedDrafts(max_drafts=4)}, "max_drafts = 4 needs windows of 5"),
        ({"token_budget": 3}, "token_budget = 3 is less than one window"),
        (
            {"slots": 1, "checkpoints": 2, "prefix_cache": True, "cache_outputs": True},
            "num_checkpoints = 2 is less than 3",
        ),
        ({"acceptance": RateAcceptance(rates=(0.5,))}, "num_drafts = 3 exceeds the 1 positions"),
        ({"cache_outputs": True}, "cache_outputs = True needs prefix_cache = True"),
        ({"async_depth": 3}, "async_depth"),
    ],
)
def test_a_setup_that_does_not_go_together_is_refused(fields: dict[str, Any], what: str) -> None:
    with pytest.raises(ValueError, match=what):
        make_setup(**fields)


def test_the_policies_of_config_and_setup_must_agree() -> None:
    for policy in ("snapshots", "eager", "deferred"):
        with pytest.raises(SpecStateError, match=r"fold_policy = 'ring' of the config must be '(eager|deferred)'"):
            dataclasses.replace(make_setup(), policy=policy)


def test_the_block_size_of_config_and_settings_must_agree() -> None:
    setup = make_setup(prefix_cache=True, cache_outputs=True, block_size=8, checkpoints=8)
    with pytest.raises(SpecStateError, match="block_size = None of the config must be 8"):
        dataclasses.replace(setup, config=setup.config.model_copy(update={"block_size": None}))


# -- the same again


def test_the_same_seed_gives_the_same_run_and_another_one_another() -> None:
    workload = SyntheticWorkload(
        num_requests=50,
        requests_per_s=20.0,
        input_lens=Lengths(parts=(LogNormal(median=40.0, sigma=0.5),), most=200),
        output_lens=Lengths(parts=(LogNormal(median=20.0, sigma=0.8),), most=100),
        prefixes=None,
    )
    runs = []
    for seed in (1, 1, 2):
        watched = Watched()
        setup = make_setup(cancel_share=0.3, cancel_mean_ms=500.0, seed=seed)
        runs.append((serve(setup, workload.requests(), watched).tally, watched.ends))
    assert runs[0] == runs[1] != runs[2]
