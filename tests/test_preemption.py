"""Requests between lives: fork, preempt, retract, resume, discard and fence, at every moment and under every policy.

Every call goes to a manager with payloads and to one without, both under debug. They must answer alike and have one
digest, and every request must stand where its committed tokens alone put it (its twin).
"""

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from specstate import (
    CapacityError,
    Handle,
    SamplingParams,
    SpecStateError,
    StaleHandleError,
    StateManager,
    StepMetadata,
    StepOrderError,
)
from specstate.oracle import Oracle
from specstate.step import Step
from tests.factories import (
    POLICIES,
    LayerInputs,
    Twin,
    fingerprint,
    make_config,
    make_inputs,
    make_manager,
    make_params,
    make_twin,
    relative_error,
)

#: What a preempted request keeps: both slots, its checkpoint slot, or none.
KEEPS = ("records", "checkpoint", "host")
KEPT_SLOTS = {"records": (1, 1), "checkpoint": (0, 1), "host": (0, 0)}
#: Where the request's step stands; "flushed": as "begun", but nothing is pending any more.
MOMENTS = ("idle", "flushed", "begun", "verified")

GREEDY_ENDS = SamplingParams(end_token_ids=(3,))


@dataclass
class Window:
    """A step over some requests, open in both managers."""

    steps: list[Step]
    lens: dict[str, int]
    inputs: list[LayerInputs]
    gone: set[str] = field(default_factory=set)
    """Requests that have left it."""

    def of(self, name: str) -> list[LayerInputs]:
        start = 0
        for other, query_len in self.lens.items():
            if other == name:
                return [tensors[start : start + query_len] for tensors in self.inputs]
            start += query_len
        raise KeyError(name)


class Both:
    """Two managers of one config, and a twin for each request, live or preempted."""

    def __init__(self, policy: str, storage: Any = None, **changes: Any) -> None:
        self.config = make_config(**{"fold_policy": policy, "max_requests": 4, "num_checkpoints": 5, **changes})
        self.payload = make_manager(self.config, storage=storage)
        self.managers = [self.payload, StateManager(self.config, None, backend="metadata", debug=True)]
        self.handles: dict[str, Handle] = {}
        self.twins: dict[str, Twin] = {}
        self.windows: list[Window] = []
        self.seed = 0

    def call(self, name: str, *arguments: Any, **options: Any) -> Any:
        results = [getattr(manager, name)(*arguments, **options) for manager in self.managers]
        assert results[0] == results[1]
        return results[0]

    def refuses(self, error: type[SpecStateError], words: str, name: str, *arguments: Any, **options: Any) -> None:
        """Both managers, with ``words``, and neither has changed."""
        for index, manager in enumerate(self.managers):
            steps = [window.steps[index] for window in self.windows]
            before = fingerprint(manager, *steps)
            with pytest.raises(SpecStateError, match=words) as caught:
                getattr(manager, name)(*arguments, **options)
            assert type(caught.value) is error
            after = fingerprint(manager, *steps)
            assert [key for key in before if before[key] != after[key]] == []

    # -- lives

    def admit(self, *names: str, sampling: SamplingParams | None = None) -> None:
        for name in names:
            self.handles[name] = self.call("admit", name, sampling)
            self.twins[name] = make_twin(self.config)

    def fork(self, source: str, *names: str, sampling: list[SamplingParams] | None = None) -> None:
        handles = self.call("fork", self.handles[source], names, sampling)
        for name, handle in zip(names, handles, strict=True):
            twin = self.twins[source]
            self.handles[name] = handle
            self.twins[name] = Twin(twin.oracle, twin.num_layers, list(twin.states), twin.committed_len)

    def preempt(self, name: str, keeps: str) -> None:
        handle = self.handles.pop(name)
        if keeps == "host":
            self.call("retract", handle)
        else:
            self.call("preempt", handle, fold=keeps == "checkpoint")
        for window in self.windows:
            if name in window.lens:
                window.gone.add(name)

    def resume(self, name: str) -> None:
        self.handles[name] = self.call("resume", name)

    def release(self, name: str) -> None:
        self.call("release", self.handles.pop(name))

    # -- steps

    def begin(self, **lens: int) -> Window:
        metadata = StepMetadata(handles=tuple(self.handles[name] for name in lens), query_lens=tuple(lens.values()))
        self.seed += 1
        inputs = make_inputs(self.config, sum(lens.values()), self.seed)
        window = Window([manager.begin_step(metadata) for manager in self.managers], lens, inputs)
        self.windows.append(window)
        return window

    def verify(self, window: Window, *layers: int) -> None:
        """The layers, by default those that are left; outputs as the twins have them, zero for those that are gone."""
        for layer in layers or [i for i, done in enumerate(window.steps[0]._verified) if not done]:
            tensors = window.inputs[layer]
            out = window.steps[0].verify(layer, tensors.qkv, tensors.raw_gate, tensors.raw_beta)
            window.steps[1].verify(layer)
            assert out is not None
            start = 0
            for name, query_len in window.lens.items():
                got = out[start : start + query_len]
                if name in window.gone:
                    assert not got.any()
                else:
                    assert relative_error(got, self.twins[name].window(window.of(name))[1][layer]) < 1e-12
                start += query_len

    def defer(self, window: Window, finished: tuple[str, ...] = (), **accepted: int) -> None:
        counts = torch.tensor([accepted[name] for name in window.lens])
        mask = torch.tensor([name in finished for name in window.lens])
        for step in window.steps:
            step.defer(counts, finished=mask)
        self.windows.remove(window)
        for name in window.lens.keys() - window.gone:
            self.twins[name].commit(window.of(name), accepted[name])

    def run(self, finished: tuple[str, ...] = (), **rows: tuple[int, int]) -> None:
        """A whole step of (query_len, num_accepted) rows, and everything compared."""
        window = self.begin(**{name: row[0] for name, row in rows.items()})
        self.verify(window)
        self.defer(window, finished, **{name: row[1] for name, row in rows.items()})
        self.check()

    # -- what holds

    def cursor(self, handle: Handle) -> tuple[Any, ...]:
        both = [tuple(manager._backend.cursor(handle.record_slot)) for manager in self.managers]
        assert both[0] == both[1]
        return both[0]

    def pending(self, name: str) -> int:
        return int(self.payload._backend.cursor(self.handles[name].record_slot).pending_len)

    def check(self) -> None:
        """Slots, cursors, digests and counters of both; states of all live requests that may be read."""
        self.call("digest")
        self.call("counters")
        for manager in self.managers:
            manager.check_integrity()
        between = {name for window in self.windows if window.steps[0].between_verifies for name in window.lens}
        for name in self.handles.keys() - between:
            self.twins[name].check(self.payload, self.handles[name])

    def room(self) -> tuple[int, int]:
        """Free record and checkpoint slots."""
        both = [(m._ledger.record_slots.num_free, m._ledger.checkpoint_slots.num_free) for m in self.managers]
        assert both[0] == both[1]
        return both[0]


def at(moment: str, policy: str, **changes: Any) -> tuple[Both, Window | None]:
    """Requests "a" and "b" with records pending where the policy leaves any, their step at ``moment``."""
    both = Both(policy, **changes)
    both.admit("a", "b")
    both.run(a=(4, 3), b=(4, 2))
    if moment == "flushed":
        both.call("flush", None)
    if moment == "idle":
        return both, None
    window = both.begin(b=2, a=4)
    if moment == "verified":
        both.verify(window)
    return both, window


# -- fork


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize("taps", [None, 4], ids=["no conv", "conv 4"])
def test_a_fork_stands_where_its_source_stands(taps: int | None, moment: str, policy: str) -> None:
    both, window = at(moment, policy, conv_kernel_size=taps)
    source = both.handles["a"]
    before, read = both.cursor(source), [both.payload.read(source, layer) for layer in range(2)]
    both.fork("a", "c", "d")
    assert both.cursor(source) == before
    for name in ("c", "d"):
        assert both.cursor(both.handles[name])[:2] == (3, 0)
        for layer, state in enumerate(read):
            held = both.payload.read(both.handles[name], layer)
            assert torch.equal(held.recurrent, state.recurrent)
            assert held.conv is state.conv is None or torch.equal(held.conv, state.conv)
    both.check()
    # A step of the forks', before the source's ends.
    both.run(d=(4, 4), c=(1, 1))
    if window is not None:
        both.verify(window) if moment != "verified" else None
        both.defer(window, b=1, a=3)
        both.check()
    both.run(c=(4, 2), a=(3, 2), d=(2, 1), b=(4, 4))
    both.release("a")
    both.run(c=(4, 4), d=(4, 1))


@pytest.mark.parametrize("policy", POLICIES)
def test_a_fork_of_a_fork_of_a_request_that_has_no_tokens(policy: str) -> None:
    both = Both(policy)
    both.admit("a")
    both.fork("a", "b")
    both.fork("b", "c")
    both.run(c=(4, 2), b=(2, 2), a=(1, 1))
    both.fork("c", "d")
    both.run(d=(4, 4), c=(4, 1))


def test_forks_have_seeds_of_their_own_unless_told_otherwise() -> None:
    both = Both("ring", max_requests=8, num_checkpoints=8)
    params = SamplingParams(temperature=0.9, top_k=7, top_p=0.5, seed=2**63 - 2, end_token_ids=(4, 5))
    both.admit("a", sampling=params)
    both.fork("a", "b", "c")
    both.fork("a", "d", sampling=[params])
    both.fork("c", "e")
    table = both.payload._backend.storage.sampling
    seeds = {"a": 2**63 - 2, "b": 2**63 - 1, "c": 0, "d": 2**63 - 2, "e": 1}
    for name, seed in seeds.items():
        wanted = params.model_copy(update={"seed": seed}).columns()
        assert tuple(table[both.handles[name].record_slot].tolist()) == wanted, name


def test_parallel_samples_differ() -> None:
    """Flat logits over a thousand tokens: forks draw other tokens by default, one of the same seed draws the same."""
    both = Both("ring", max_requests=5)
    params = SamplingParams(temperature=1.0, seed=11)
    both.admit("a", sampling=params)
    both.run(a=(3, 2))
    both.fork("a", "b", "c")
    both.fork("a", "d", sampling=[params])
    window = both.begin(a=1, b=1, c=1, d=1)
    both.verify(window)
    sampled = window.steps[0].sample(torch.zeros(4, 1000), torch.zeros(4, dtype=torch.int64)).next_token.tolist()
    assert sampled[0] == sampled[3]
    assert len({*sampled}) == 3


# -- preempt, retract, resume


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize("keeps", KEEPS)
@pytest.mark.parametrize("taps", [None, 4], ids=["no conv", "conv 4"])
def test_a_preempted_request_resumes_where_it_stood(taps: int | None, keeps: str, moment: str, policy: str) -> None:
    both, window = at(moment, policy, conv_kernel_size=taps)
    first, pending, room = both.handles["a"], both.pending("a"), both.room()
    folded_by_verify = policy == "deferred" and moment == "verified"
    assert pending == (0 if policy == "eager" or moment == "flushed" else 3)
    both.preempt("a", keeps)
    kept = KEPT_SLOTS[keeps]
    assert both.room() == (room[0] + 1 - kept[0], room[1] + 1 - kept[1])
    assert both.payload.num_requests == 1
    both.refuses(StaleHandleError, "not live", "committed_len", first)
    both.refuses(SpecStateError, "'a' is preempted", "admit", "a")
    both.check()

    # Others take what it gave up, and leave it used.
    others = [f"o{i}" for i in range(min(both.room()))]
    both.admit(*others)
    both.run(**dict.fromkeys(others, (4, 3)))
    if window is not None and moment != "verified":
        both.verify(window, 1)
    for name in others:
        both.release(name)
    both.admit("x")
    both.run(x=(4, 4))

    slot = 1  # the first that was handed out
    both.resume("a")
    second = both.handles["a"]
    assert second.generation > first.generation
    assert (int(both.payload.checkpoint_slots([second])[0]) == slot) == (keeps != "host")
    assert both.pending("a") == (pending if keeps == "records" and not folded_by_verify else 0)
    both.check()
    for verb, more in (("committed_len", ()), ("release", ()), ("fork", (["z"],)), ("preempt", ()), ("retract", ())):
        both.refuses(StaleHandleError, "generation", verb, first, *more)

    # The first life's end comes late, in the middle of the second life's step.
    if window is not None:
        again = both.begin(a=2)
        both.verify(again, 0)
        both.verify(window) if moment != "verified" else None
        both.defer(window, b=2, a=4)
        assert both.payload.counters().dropped_ends == 1
        both.verify(again)
        both.defer(again, a=2)
        both.check()
    both.run(a=(4, 3), x=(2, 1), b=(3, 3))
    both.run(b=(1, 1), a=(4, 4))
    both.call("flush", None)
    both.check()


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("keeps", KEEPS)
def test_a_late_end_of_the_first_life_changes_nothing(keeps: str, policy: str) -> None:
    """Neither while the request is preempted nor once it lives again, whatever its count says."""
    for resumed in (False, True):
        both, window = at("verified", policy)
        assert window is not None
        both.preempt("a", keeps)
        if resumed:
            both.resume("a")
        b = both.handles["b"]
        held = [both.payload._backend.cursor(slot) for slot in range(4) if slot != b.record_slot]
        digests = {slot: both.payload.checkpoints(0)[0][slot].clone() for slot in range(6)}
        both.defer(window, finished=("a",), b=1, a=4)
        both.check()
        assert [both.payload._backend.cursor(slot) for slot in range(4) if slot != b.record_slot] == held
        mine = int(both.payload.checkpoint_slots([b])[0])
        for slot, state in digests.items():
            assert slot == mine or torch.equal(both.payload.checkpoints(0)[0][slot], state)
        assert both.payload.counters().dropped_ends == 1


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("keeps", KEEPS)
def test_a_cancelled_step_of_a_preempted_request(keeps: str, policy: str) -> None:
    for moment in ("begun", "verified"):
        both, window = at(moment, policy)
        assert window is not None
        both.preempt("a", keeps)
        for step in window.steps:
            step.cancel()
        both.windows.clear()
        both.resume("a")
        both.check()
        both.run(a=(4, 2), b=(4, 2))
        assert both.payload.counters().dropped_ends == 0


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("keeps", KEEPS)
def test_preempted_again_and_again(keeps: str, policy: str) -> None:
    both = Both(policy, record_capacity=13)
    both.admit("a", "b")
    for accepted in (1, 4, 2, 3, 4, 1):
        both.run(a=(4, accepted), b=(2, 1))
        both.preempt("a", keeps)
        both.run(b=(3, 3))
        both.resume("a")
        both.check()


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("keeps", KEEPS)
def test_finished_flag_and_sampling_parameters_survive(keeps: str, policy: str) -> None:
    both = Both(policy)
    params = SamplingParams(temperature=0.7, top_k=3, top_p=0.25, seed=2**40 + 9, end_token_ids=(3, 8))
    both.admit("a", "b", sampling=params)
    both.run(a=(4, 3), b=(4, 2), finished=("a",))
    for name in ("a", "b"):
        both.preempt(name, keeps)
    both.admit("x", sampling=GREEDY_ENDS)  # in slots that they gave up
    for name in ("a", "b"):
        both.resume(name)
        row = both.payload._backend.storage.sampling[both.handles[name].record_slot]
        assert tuple(row.tolist()) == params.columns()
    window = both.begin(a=4, b=3)
    both.verify(window)
    both.defer(window, a=0, b=3)  # that of a finished request is not looked at
    both.check()
    assert both.payload.counters().wasted_windows == 1
    # A fork of what has finished has finished.
    both.fork("a", "f")
    window = both.begin(f=2)
    both.verify(window)
    both.defer(window, f=0)
    assert both.payload.counters().wasted_windows == 2


def test_a_slot_being_written_in_place_is_no_breach_after_a_resume() -> None:
    """Its load is still to come, as before the preemption."""
    manager = make_manager(make_config(), debug=False)
    handle = manager.admit("a")
    _, conv = manager.checkpoints(0)
    assert conv is not None
    conv[int(manager.checkpoint_slots([handle])[0])] = 1.0
    manager.preempt(handle)
    manager.check_integrity()
    handle = manager.resume("a")
    manager.check_integrity()
    manager.load(handle, None, committed_len=3)
    manager.check_integrity()


@pytest.mark.parametrize("policy", POLICIES)
def test_what_is_retracted_lies_apart_from_the_storage(policy: str) -> None:
    """Everything in the storage may be overwritten meanwhile."""
    both = Both(policy)
    both.admit("a")
    both.run(a=(4, 3))
    both.preempt("a", "host")
    for layer in both.payload._backend.storage.layers:
        for tensor in layer:
            if tensor is not None:
                tensor[1:-1] = torch.nan  # but for the null slot and the scratch row
    both.payload._backend.storage.layers[0].recurrent[-1] = torch.nan
    both.resume("a")
    both.run(a=(4, 2))


def free_the_record_slot(manager: StateManager) -> None:
    manager._ledger.record_slots.free(0)


def free_the_checkpoint_slot(manager: StateManager) -> None:
    manager._ledger.checkpoint_slots.free(1)


def give_the_cursor_an_owner(manager: StateManager) -> None:
    manager._backend.unpark(0, 9)


def forget_that_records_are_pending(manager: StateManager) -> None:
    [preempted] = manager._preempted
    preempted.may_be_pending = False


@pytest.mark.parametrize(
    ("corrupt", "words"),
    [
        (free_the_record_slot, r"record slots owned are \[0, 1\], taken are \[1\]"),
        (free_the_checkpoint_slot, r"checkpoint slots owned are \[1, 2\], taken are \[2\]"),
        (give_the_cursor_an_owner, "record slot 0 is of generation 9, its owner 'a' is preempted"),
        (forget_that_records_are_pending, "'a', preempted: 3 records are pending, the host knows of none"),
    ],
)
def test_integrity_finds(corrupt: Callable[[StateManager], None], words: str) -> None:
    both, _ = at("idle", "ring")
    both.preempt("a", "records")
    both.check()
    for manager in both.managers:
        corrupt(manager)
        with pytest.raises(SpecStateError, match=words):
            manager.check_integrity()


@pytest.mark.parametrize("policy", POLICIES)
def test_in_the_callers_storage(policy: str) -> None:
    """Slots with others' memory between them, conv histories with the channels side by side."""
    config = make_config(fold_policy=policy, max_requests=4, num_checkpoints=5)
    spec = config.layer
    pages = [
        (
            torch.zeros(6, 2, spec.num_heads, spec.head_v_dim, spec.head_k_dim, dtype=torch.float64),
            torch.zeros(6, 2, spec.conv_history_len, spec.conv_channels, dtype=torch.float64),
        )
        for _ in range(config.num_layers)
    ]
    both = Both(policy, storage=[(recurrent[:, 0], conv[:, 0].mT) for recurrent, conv in pages])
    both.admit("a", "b")
    both.run(a=(4, 3), b=(4, 2))
    both.fork("a", "c")
    both.preempt("a", "host")
    both.preempt("b", "checkpoint")
    both.admit("x")
    both.run(x=(4, 4), c=(2, 1))
    both.resume("a")
    both.resume("b")
    both.check()
    both.run(a=(4, 4), b=(3, 2), c=(1, 1))
    assert not any(page[:, 1].any() for pair in pages for page in pair)


# -- refusals


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize(
    ("verb", "arguments"),
    [("fork", (["c"],)), ("preempt", ()), ("preempt", (True,)), ("retract", ())],
    ids=["fork", "preempt", "preempt and fold", "retract"],
)
def test_between_verifies_it_is_refused(verb: str, arguments: tuple[Any, ...], policy: str) -> None:
    both, window = at("begun", policy)
    assert window is not None
    both.verify(window, 1)
    both.refuses(
        StepOrderError, f"{verb}: request 'a' is in step 1, 1 of whose 2 layers", verb, both.handles["a"], *arguments
    )
    both.verify(window)
    both.defer(window, b=2, a=3)
    both.check()
    both.run(a=(4, 1), b=(4, 4))


def test_ids_that_are_taken() -> None:
    both = Both("ring")
    both.admit("a", "b", "p")
    both.preempt("p", "checkpoint")
    a = both.handles["a"]
    both.refuses(SpecStateError, "'b' is live already", "fork", a, ["c", "b"])
    both.refuses(SpecStateError, "'a' is live already", "fork", a, ["a"])
    both.refuses(SpecStateError, "'p' is preempted: resume or discard it", "fork", a, ["p"])
    both.refuses(SpecStateError, "'p' is preempted: resume or discard it", "admit", "p")
    both.refuses(SpecStateError, "names a request twice", "fork", a, ["c", "c"])
    for verb in ("resume", "discard"):
        both.refuses(SpecStateError, f"{verb}: request_id = 'a' names no preempted request", verb, "a")
        both.refuses(SpecStateError, f"{verb}: request_id = 'z' names no preempted request", verb, "z")
    both.resume("p")
    both.refuses(SpecStateError, "names no preempted request", "resume", "p")
    both.refuses(SpecStateError, "'p' is live already", "admit", "p")


def test_samplings_of_a_fork_are_one_a_request() -> None:
    both = Both("ring")
    both.admit("a")
    a = both.handles["a"]
    for bad in ([], [SamplingParams()] * 3, SamplingParams(), {"seed": 1}):
        both.refuses(SpecStateError, "sampling must be a sequence of 2", "fork", a, ["b", "c"], bad)
    both.refuses(
        SpecStateError,
        r"sampling\[1\] must be SamplingParams, not NoneType .*'c'",
        "fork",
        a,
        ["b", "c"],
        [SamplingParams(), None],
    )


@pytest.mark.parametrize(
    ("sizes", "words"),
    [
        ({"max_requests": 3, "num_checkpoints": 9}, "1 of max_requests = 3 record slots and 7 of num_checkpoints = 9"),
        ({"max_requests": 9, "num_checkpoints": 3}, "7 of max_requests = 9 record slots and 1 of num_checkpoints = 3"),
    ],
    ids=["record slots", "checkpoint slots"],
)
def test_a_fork_without_slots_changes_nothing(sizes: dict[str, int], words: str) -> None:
    both = Both("ring", **sizes)
    both.admit("a", "b")
    both.run(a=(4, 2), b=(1, 1))
    a = both.handles["a"]
    both.refuses(CapacityError, f"no slots for 2 forks of request 'a': free are {words}", "fork", a, ["c", "d"])
    both.fork("a", "c")
    both.refuses(CapacityError, "no slots for 1 forks", "fork", a, ["d"])
    both.run(a=(4, 2), c=(4, 3))


@pytest.mark.parametrize(
    ("keeps", "sizes", "words"),
    [
        ("checkpoint", {"max_requests": 2, "num_checkpoints": 9}, "0 of max_requests = 2 record slots and 6"),
        ("host", {"max_requests": 2, "num_checkpoints": 9}, "0 of max_requests = 2 record slots and 7"),
        ("host", {"max_requests": 9, "num_checkpoints": 2}, "7 of max_requests = 9 record slots and 0"),
    ],
    ids=["folded, record slots", "retracted, record slots", "retracted, checkpoint slots"],
)
def test_a_resume_without_slots_changes_nothing(keeps: str, sizes: dict[str, int], words: str) -> None:
    both = Both("ring", **sizes)
    both.admit("a")
    both.run(a=(4, 2))
    both.preempt("a", keeps)
    both.admit("b", "c")
    both.refuses(CapacityError, f"no slot for request 'a': free are {words}", "resume", "a")
    both.release("b")
    both.resume("a")
    both.run(a=(4, 2), c=(4, 3))


def test_one_that_kept_its_slots_resumes_in_a_full_manager() -> None:
    both = Both("ring", max_requests=2, num_checkpoints=2)
    both.admit("a")
    both.run(a=(4, 2))
    both.preempt("a", "records")
    both.admit("b")
    both.refuses(CapacityError, "no slot for request 'c'", "admit", "c")
    both.resume("a")
    both.run(a=(4, 2), b=(4, 3))


@pytest.mark.parametrize("keeps", KEEPS)
def test_discard_frees_what_was_kept(keeps: str) -> None:
    both = Both("ring")
    room = both.room()
    both.admit("a")
    both.run(a=(4, 2))
    both.preempt("a", keeps)
    both.call("discard", "a")
    assert both.room() == room
    both.check()
    both.refuses(SpecStateError, "names no preempted request", "resume", "a")
    both.admit("a")  # anew, from zero
    both.run(a=(4, 2))


# -- failures on the way


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("moment", ["begun", "verified"])
@pytest.mark.parametrize("keeps", KEEPS)
@pytest.mark.parametrize("failing", ["checkpoint_payload", "standing", "park", "null_row", "release"])
def test_a_preemption_that_fails_is_called_again(
    failing: str, keeps: str, moment: str, policy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    both, window = at(moment, policy)
    assert window is not None

    def fail(*_: Any) -> None:
        raise torch.OutOfMemoryError("no memory")

    calls: dict[str, Callable[[], None]] = {
        "records": lambda: both.payload.preempt(both.handles["a"]),
        "checkpoint": lambda: both.payload.preempt(both.handles["a"], fold=True),
        "host": lambda: both.payload.retract(both.handles["a"]),
    }
    reached = {"checkpoint_payload": ("host",), "standing": ("checkpoint", "host"), "release": ("checkpoint", "host")}
    if keeps in reached.get(failing, KEEPS):
        with monkeypatch.context() as patch:
            patch.setattr(both.payload._backend, failing, fail)
            with pytest.raises(torch.OutOfMemoryError):
                calls[keeps]()
    if failing in ("checkpoint_payload", "standing"):  # what allocates comes before anything that cannot be taken back
        both.payload.check_integrity()
        both.twins["a"].check(both.payload, both.handles["a"])
    both.preempt("a", keeps)
    both.verify(window) if moment != "verified" else None
    both.defer(window, b=2, a=4)
    both.resume("a")
    both.check()
    both.run(a=(4, 3), b=(4, 1))


@pytest.mark.parametrize("keeps", KEEPS)
def test_a_resume_that_fails_gives_back_what_it_took(keeps: str, monkeypatch: pytest.MonkeyPatch) -> None:
    both, _ = at("idle", "ring")
    both.preempt("a", keeps)
    failing = {"records": ["unpark"], "checkpoint": ["attach"], "host": ["put_checkpoint", "attach"]}

    def fail(*_: Any) -> None:
        raise torch.OutOfMemoryError("no memory")

    for name in failing[keeps]:
        pools, digest = both.room(), both.payload.digest()
        with monkeypatch.context() as patch:
            patch.setattr(both.payload._backend, name, fail)
            with pytest.raises(torch.OutOfMemoryError):
                both.payload.resume("a")
        assert (both.room(), both.payload.digest()) == (pools, digest)
        both.check()
    both.resume("a")
    both.run(a=(4, 3), b=(4, 1))


@pytest.mark.parametrize("failing", ["copy_state", "standing", "attach"])
def test_a_fork_that_fails_gives_back_what_it_took(failing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    both, _ = at("idle", "ring")
    right, calls = getattr(both.payload._backend, failing), []

    def fail(*arguments: Any) -> Any:
        calls.append(arguments)
        if failing != "attach" or len(calls) == 2:  # the second fork's
            raise torch.OutOfMemoryError("no memory")
        return right(*arguments)

    pools, digest = both.room(), both.payload.digest()
    with monkeypatch.context() as patch:
        patch.setattr(both.payload._backend, failing, fail)
        with pytest.raises(torch.OutOfMemoryError):
            both.payload.fork(both.handles["a"], ["c", "d"])
    assert (both.room(), both.payload.digest()) == (pools, digest)
    both.check()
    both.fork("a", "c", "d")
    both.run(a=(4, 3), c=(4, 1), d=(2, 2))


# -- fence


def preempted_in_every_way(policy: str) -> Both:
    """Live "a" and "b", and preempted "records", "checkpoint" and "host", all with four tokens or fewer behind them."""
    both = Both(policy, max_requests=5, num_checkpoints=5)
    both.admit("a", "b", *KEEPS)
    both.run(a=(4, 3), b=(4, 2), records=(4, 4), checkpoint=(4, 1), host=(4, 3))
    for keeps in KEEPS:
        both.preempt(keeps, keeps)
    return both


@pytest.mark.parametrize("policy", POLICIES)
def test_new_parameters_behind_a_fence(policy: str) -> None:
    """All that was pending was folded with the old ones, of live and of preempted requests."""
    both = preempted_in_every_way(policy)
    params = make_params(both.config, seed=7)
    both.payload.flush()
    if policy != "eager":
        with pytest.raises(StepOrderError, match="'records', preempted, may have pending records; fence"):
            both.payload.set_params(params)
    both.call("flush", None)
    both.run(a=(4, 3), b=(4, 2))
    both.call("fence", "flush")
    both.check()
    for slot in range(5):
        assert both.payload._backend.cursor(slot).pending_len == 0
    both.payload.set_params(params)
    for twin in both.twins.values():
        twin.oracle = Oracle(both.config, tuple(params))
    for keeps in KEEPS:
        both.resume(keeps)
    both.check()
    both.run(**dict.fromkeys(("a", "b", *KEEPS), (4, 3)))
    both.run(**dict.fromkeys((*KEEPS, "b", "a"), (2, 1)))


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("mode", ["flush", "drop"])
def test_a_fence_refuses_open_steps(mode: str, policy: str) -> None:
    both = preempted_in_every_way(policy)
    window = both.begin(b=3)
    for _ in range(3):
        both.refuses(
            StepOrderError, f"fence: request 'b' is in step {window.steps[0].index}, still open", "fence", mode
        )
        if window.steps[0].num_verified < 2:
            both.verify(window, window.steps[0].num_verified)
    both.defer(window, b=2)
    both.call("fence", mode)
    both.check() if mode == "flush" else None


@pytest.mark.parametrize("policy", POLICIES)
def test_a_fence_that_drops_leaves_nobody(policy: str) -> None:
    both = preempted_in_every_way(policy)
    handles = list(both.handles.values())
    both.call("fence", "drop")
    both.handles.clear()
    assert both.room() == (5, 5) and both.payload.num_requests == 0
    for handle in handles:
        both.refuses(StaleHandleError, "not live", "committed_len", handle)
    for keeps in KEEPS:
        both.refuses(SpecStateError, "names no preempted request", "resume", keeps)
    both.payload.set_params(make_params(both.config))
    both.admit("a", *KEEPS)  # clean
    both.run(**dict.fromkeys(("a", *KEEPS), (4, 3)))


def test_a_request_that_left_its_step_holds_up_no_fence() -> None:
    both, window = at("verified", "ring")
    assert window is not None
    both.preempt("a", "records")
    both.refuses(StepOrderError, "request 'b' is in step 1", "fence", "flush")
    both.preempt("b", "records")
    both.call("fence", "flush")
    both.defer(window, b=2, a=4)
    for name in ("a", "b"):
        both.resume(name)
    both.check()
    both.run(a=(4, 1), b=(4, 2))


def test_flush_is_of_live_requests_alone() -> None:
    both, _ = at("idle", "ring")
    both.preempt("a", "records")
    both.call("flush", None)
    both.resume("a")
    assert (both.pending("a"), both.pending("b")) == (3, 0)


# -- digest


@pytest.mark.parametrize("keeps", KEEPS)
def test_a_digest_tells_the_preempted(keeps: str) -> None:
    both, _ = at("idle", "ring")
    digests = [both.call("digest")]
    both.preempt("a", keeps)
    digests.append(both.call("digest"))
    both.call("discard", "a")
    digests.append(both.call("digest"))
    assert len({*digests}) == 3


# -- slots


def test_slots_are_conserved_over_ten_thousand_operations() -> None:
    """Without payloads: every call at random, with capacity that is often short, against a count of slots."""
    config = make_config(max_requests=5, num_checkpoints=7)
    manager = StateManager(config, None, backend="metadata")
    chance = random.Random(8)
    live: dict[str, Handle] = {}
    kept: dict[str, tuple[int, int]] = {}
    steps: dict[str, Step] = {}
    seen = dict.fromkeys(("admit", "fork", "preempt", "retract", "resume", "discard", "release", "step", "fence"), 0)
    refusals = 0
    for number in range(10_000):
        verb = chance.choices(list(seen), (8, 6, 4, 4, 8, 2, 6, 12, 0.1))[0]
        name = chance.choice(sorted(live)) if live else None
        parked = chance.choice(sorted(kept)) if kept else None
        free = [5 - len(live) - sum(k[0] for k in kept.values()), 7 - len(live) - sum(k[1] for k in kept.values())]
        enough = True
        try:
            if verb == "admit":
                enough = min(free) >= 1
                live[f"r{number}"] = manager.admit(f"r{number}")
            elif verb == "fork" and name:
                names = [f"r{number}.{i}" for i in range(chance.randint(1, 3))]
                enough = min(free) >= len(names)
                live.update(zip(names, manager.fork(live[name], names), strict=True))
            elif verb in ("preempt", "retract") and name:
                fold = chance.random() < 0.5
                manager.retract(live[name]) if verb == "retract" else manager.preempt(live[name], fold)
                kept[name] = (0, 0) if verb == "retract" else (int(not fold), 1)
                steps.pop(name, None)
                del live[name]
            elif verb == "resume" and parked:
                enough = all(keeps or room for keeps, room in zip(kept[parked], free, strict=True))
                live[parked] = manager.resume(parked)
                del kept[parked]
            elif verb == "discard" and parked:
                manager.discard(parked)
                del kept[parked]
            elif verb == "release" and name:
                manager.release(live.pop(name))
                steps.pop(name, None)
            elif verb == "step" and name:
                if name in steps:
                    steps[name].replayed("verify")
                    steps.pop(name).defer([chance.randint(1, 4)])
                else:
                    steps[name] = manager.begin_step(StepMetadata(handles=(live[name],), query_lens=(4,)))
            elif verb == "fence":
                for open_step in steps.values():
                    open_step.cancel()
                steps.clear()
                mode = chance.choice(["flush", "drop"])
                manager.fence(mode)
                if mode == "drop":
                    live.clear()
                    kept.clear()
            else:
                continue
        except CapacityError:
            assert not enough
            refusals += 1
        else:
            assert enough
            seen[verb] += 1
        free = [5 - len(live) - sum(k[0] for k in kept.values()), 7 - len(live) - sum(k[1] for k in kept.values())]
        assert [manager._ledger.record_slots.num_free, manager._ledger.checkpoint_slots.num_free] == free
        assert manager.num_requests == len(live)
        manager.check_integrity()
    assert min(seen.values()) >= 5 and refusals > 500
    for open_step in steps.values():
        open_step.cancel()
    manager.fence("drop")
    assert manager.can_admit(5) and manager._ledger.checkpoint_slots.num_free == 7
