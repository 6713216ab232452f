"""The numbers of a manager: what follows from them, and from a histogram of accepted counts."""

import dataclasses
import inspect
import pickle
import random
from collections import Counter
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from specstate import Folds, Handle, Metrics, PrefixKey, SpecStateError, StateManager, StepMetadata
from specstate.metrics import per_position
from tests.factories import POLICIES, make_config, make_folds, make_inputs, make_manager, make_metrics, verify_all


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


# -- a manager's own, counted along


@dataclass
class Counted:
    """A request as plain lengths."""

    handle: Handle
    committed: int = 0
    pending: int = 0
    finished: bool = False
    has_boundary_slot: bool = False


class Run:
    """A random run on a manager with payloads and on one without; what happens is counted here once more."""

    T, R, B = 4, 11, 9

    def __init__(self, policy: str, seed: int) -> None:
        self.policy, self.rnd, self.seed = policy, random.Random(seed), seed
        capacity = {"eager": self.T, "deferred": 2 * self.T, "ring": self.R}[policy]
        sizes: dict[str, Any] = {
            "num_layers": 1,
            "num_heads": 1,
            "head_k_dim": 2,
            "head_v_dim": 2,
            "num_checkpoints": 14,
        }
        config = make_config(fold_policy=policy, record_capacity=capacity, block_size=self.B, max_requests=4, **sizes)
        self.config = config
        self.managers = [
            make_manager(config, debug=False),
            StateManager(config, None, backend="metadata"),
        ]
        self.live: dict[str, Counted] = {}
        self.parked: dict[str, Counted] = {}
        self.published: list[PrefixKey] = []
        self.reserved: list[int] = []
        self.n: Counter[str] = Counter()
        self.positions = [0] * (self.T - 1)
        self.folds: Counter[str] = Counter()
        self.names = 0

    def call(self, name: str, *arguments: Any) -> Any:
        results = [getattr(manager, name)(*arguments) for manager in self.managers]
        assert results[0] == results[1]
        return results[0]

    def fold(self, request: Counted, reason: str) -> None:
        self.folds[reason] += request.pending > 0
        request.pending = 0

    # -- what may happen

    def admit(self) -> None:
        if len(self.live) + len(self.parked) < 4:
            self.names += 1
            self.live[f"r{self.names}"] = Counted(self.call("admit", f"r{self.names}"))

    def release(self) -> None:
        self.call("release", self.live.pop(self.rnd.choice(list(self.live))).handle)

    def flush(self) -> None:
        self.call("flush", None)
        for request in self.live.values():
            self.fold(request, "by_flush")

    def preempt(self) -> None:
        name = self.rnd.choice(list(self.live))
        request, fold = self.live.pop(name), self.rnd.random() < 0.5
        self.call("preempt", request.handle, fold)
        if fold:
            self.fold(request, "by_flush")
            request.has_boundary_slot = False
        self.parked[name] = request
        self.n["preemptions"] += 1

    def resume(self) -> None:
        if self.parked:
            name, request = self.parked.popitem()
            request.handle = self.call("resume", name)
            self.live[name] = request

    def publish(self) -> None:
        request = self.rnd.choice(list(self.live.values()))
        key = PrefixKey(self.rnd.choice("xyz"), max(request.committed, 1))
        if key in self.published or not request.committed or len(self.published) == 2:
            return
        at_boundary = self.managers[0]._backend.cursor(request.handle.record_slot).boundary_len == request.committed
        self.call("publish", request.handle, key)
        request.has_boundary_slot &= not at_boundary  # handed over
        self.published.append(key)

    def look_up(self) -> None:
        if len(self.live) + len(self.parked) == 4:
            return
        if not self.published or self.rnd.random() < 0.3:
            self.n["prefix_misses"] += 1
            for manager in self.managers:
                with pytest.raises(SpecStateError, match="no state is published"):
                    manager.restore([1, 2, 3], "x")
            return
        key = self.rnd.choice(self.published)
        self.names += 1
        handle = self.call("restore", key, f"r{self.names}")
        self.live[f"r{self.names}"] = Counted(handle, key.num_tokens)
        self.n["prefix_hits"] += 1

    def reserve(self) -> None:
        if self.reserved:
            self.call("return_checkpoints", [self.reserved.pop()])
        else:
            self.reserved += self.call("reserve_checkpoints", 2)

    def step(self) -> None:
        names = self.rnd.sample(list(self.live), self.rnd.randint(1, len(self.live)))
        lens = [self.rnd.randint(1, self.T) for _ in names]
        kinds = [self.rnd.choice(["decode", "decode", "prompt"]) for _ in names]
        requests = [self.live[name] for name in names]
        metadata = StepMetadata(
            handles=tuple(request.handle for request in requests), query_lens=tuple(lens), row_kinds=tuple(kinds)
        )
        steps = [manager.begin_step(metadata) for manager in self.managers]
        self.seed += 1
        for request in requests:
            request.has_boundary_slot = self.managers[1]._requests.of(request.handle).boundary_slot != 0
        if self.rnd.random() < 0.1:
            for step in steps:
                step.cancel()
            return
        verify_all(steps[0], make_inputs(self.config, sum(lens), self.seed))
        steps[1].replayed("verify")
        gone = self.rnd.choice(names) if self.rnd.random() < 0.15 else None
        if gone is not None:
            self.call("release", self.live.pop(gone).handle)
        if self.policy == "deferred":
            for name, request in zip(names, requests, strict=True):
                if name != gone:  # what verify folds is counted when the step ends
                    self.fold(request, "in_verify")
        if self.rnd.random() < 0.1:
            for step in steps:
                step.cancel()
            return
        self.n["late_ends_dropped"] += gone is not None
        counts = [self.rnd.choice([0, *range(1, n + 1), n + 1]) for n in lens]
        eager, finished = ([self.rnd.random() < p for _ in names] for p in (0.2, 0.05))
        commit = self.rnd.random() < 0.2
        for step, make in zip(steps, (torch.tensor, list), strict=True):
            if commit:
                step.commit(make(counts), finished=make(finished))
            else:
                step.defer(make(counts), eager=make(eager), finished=make(finished))
        for row, name in enumerate(names):
            if name != gone:
                self.ended(requests[row], lens[row], kinds[row], counts[row], commit, eager[row])
                requests[row].finished |= finished[row]

    def ended(self, request: Counted, query_len: int, kind: str, count: int, commit: bool, asked: bool) -> None:
        if kind == "prompt":
            request.finished = False
        if request.finished:
            self.n["wasted_windows"] += 1
            accepted = 0
        else:
            accepted = min(max(count, query_len if kind == "prompt" else 1), query_len)
            self.n["clamps"] += accepted != count
            if kind == "decode":
                self.n["windows"] += 1
                self.n["drafts"] += query_len > 1
                self.n["draft_tokens"] += query_len - 1
                for position in range(accepted - 1):
                    self.positions[position] += 1
        before = request.committed
        request.committed += accepted
        request.pending += accepted
        if commit or self.policy == "eager":
            self.fold(request, "at_end")
        elif self.policy == "ring" and request.pending + self.T > self.R:
            self.fold(request, "when_full")
        elif asked:
            self.fold(request, "by_mask")
        elif request.committed // self.B > before // self.B:
            self.fold(request, "at_boundary")

    # -- what must be there

    def check(self) -> None:
        owners = [*self.live.values(), *self.parked.values()]
        boundaries = sum(request.has_boundary_slot for request in owners)
        folded = sum(self.managers[0]._preempted.of(name, "").record_slot is None for name in self.parked)
        wanted = make_metrics(
            **self.n,
            accepted_tokens=sum(self.positions),
            accepted_per_position=tuple(self.positions),
            folds=make_folds(**self.folds),
            pending_rows=sum(request.pending > 0 for request in self.live.values()),
            record_slots_in_use=len(owners) - folded,
            checkpoint_slots_in_use=len(owners) + boundaries + len(self.published) + len(self.reserved),
            boundary_slots=boundaries,
            published_slots=len(self.published),
            reserved_slots=len(self.reserved),
        )
        assert self.call("metrics") == wanted
        self.call("digest")


@pytest.mark.parametrize("policy", POLICIES)
def test_metrics_of_a_random_run_are_those_counted_along(policy: str) -> None:
    run = Run(policy, seed=POLICIES.index(policy))
    for _ in range(250):
        verbs = ["step"] * 8 + ["release", "preempt", "flush", "publish"] if run.live else []
        getattr(run, run.rnd.choice([*verbs, "admit", "admit", "resume", "look_up", "look_up", "reserve"]))()
        run.check()
    # It was a run worth counting.
    metrics = run.call("metrics")
    folds = {name for name, count in dataclasses.asdict(metrics.folds).items() if count}
    reasons = {"eager": {"at_end"}, "deferred": {"at_end", "by_mask", "at_boundary", "in_verify", "by_flush"}}
    assert folds == reasons.get(policy, {"at_end", "when_full", "by_mask", "at_boundary", "by_flush"})
    zero = {name for name, value in dataclasses.asdict(metrics).items() if not value}
    assert zero <= {"pending_rows", "reserved_slots", "boundary_slots", "misplaced_rows", "prefix_evictions"}


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("verb", ["commit", "eager"])
def test_a_finished_request_folds_what_it_had(verb: str, policy: str) -> None:
    """Its window accepts nothing, and folds all the same; so the two backends agree, and count alike."""
    run = Run(policy, seed=0)
    run.admit()
    (request,) = run.live.values()
    for finished, end in ((True, "defer"), (False, verb)):
        steps = [m.begin_step(StepMetadata(handles=(request.handle,), query_lens=(3,))) for m in run.managers]
        verify_all(steps[0], make_inputs(run.config, 3, 1))
        steps[1].replayed("verify")
        for step in steps:
            if end == "commit":
                step.commit(torch.tensor([2]))
            else:
                step.defer(torch.tensor([2]), torch.tensor([end == "eager"]), torch.tensor([finished]))
    assert run.call("committed_len", request.handle) == 2
    folds = {"eager": {"at_end": 1}, "deferred": {"in_verify": 1}}
    ring = {"at_end": 1} if verb == "commit" else {"by_mask": 1}
    assert run.call("metrics").folds == make_folds(**folds.get(policy, ring))
    run.call("digest")
