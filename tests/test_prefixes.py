"""Published prefixes: exact positions, copies on a hit, the prefix unused for longest given up first.

Every call goes to a manager with payloads and to one without, both under debug (see test_boundaries.py). Whatever is
published must hold the oracle's state after exactly that many tokens, for as long as it is published.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from specstate import (
    CapacityError,
    PrefixKey,
    SamplingParams,
    SpecStateError,
    StaleHandleError,
    StateManager,
    StepMetadata,
    StepOrderError,
    TraceRecorder,
)
from specstate.limits import INT64_MAX, MAX_COMMITTED_LEN
from specstate.oracle import OracleState
from specstate.replay import replay_file
from tests.factories import POLICIES, Twin, make_config, make_manager, raw_bytes
from tests.test_boundaries import KEEPS, Blocks


class Prefixes(Blocks):
    """Remembers what was published; keys are those of a request's name and a position."""

    def __init__(self, policy: str = "ring", **changes: Any) -> None:
        super().__init__(policy, **{"block_size": None, "max_requests": 6, "num_checkpoints": 8, **changes})
        self.kept: dict[PrefixKey, list[OracleState]] = {}

    def publish(self, name: str, position: int, digest: str | None = None) -> PrefixKey:
        key = PrefixKey(digest or name, position)
        self.call("publish", self.handles[name], key)
        self.kept.setdefault(key, self.past[name][position])
        return key

    def restore(self, key: PrefixKey, name: str, sampling: SamplingParams | None = None) -> None:
        self.handles[name] = self.call("restore", key, name, sampling)
        states = list(self.kept[key])
        self.twins[name] = Twin(self.some_twin.oracle, self.config.num_layers, states, key.num_tokens)
        self.past[name] = {key.num_tokens: states}

    @property
    def some_twin(self) -> Twin:
        return next(iter(self.twins.values()))

    def went(self, name: str, inputs: Any, accepted: int, line: list[int] | None, by_table: Any = None) -> None:
        if self.config.block_size is not None:
            return super().went(name, inputs, accepted, line, by_table)
        twin = self.twins[name]
        for t in range(accepted):
            twin.commit([tensors[t : t + 1] for tensors in inputs], 1)
            self.past[name][twin.committed_len] = list(twin.states)
        return None

    def published(self) -> list[str]:
        """Digests, in the order of ``published``."""
        return [key.digest for key in self.call("published")]

    def counts(self) -> tuple[int, int, int]:
        metrics = self.call("metrics")
        return metrics.prefix_hits, metrics.prefix_misses, metrics.prefix_evictions

    def check(self) -> None:
        super().check()
        published = self.call("published")
        assert self.call("metrics").published_slots == len(published)
        for key, slot in published.items():
            self.holds(slot, self.kept[key])


def filled(policy: str = "ring", **changes: Any) -> Prefixes:
    """Prefixes "p", "q" and "r" at 2, 1 and 3 tokens, published in that order; no request lives."""
    both = Prefixes(policy, **changes)
    for name, n in (("p", 2), ("q", 1), ("r", 3)):
        both.admit(name)
        both.run_with({name: (n, n)})
        both.publish(name, n)
        both.release(name)
    both.check()
    return both


# -- which states may be published


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("moment", ["idle", "flushed", "begun", "verified"])
@pytest.mark.parametrize("taps", [None, 4], ids=["no conv", "conv 4"])
def test_publish_what_is_committed_and_what_is_checkpointed(taps: int | None, moment: str, policy: str) -> None:
    """With records pending, which stay so; and what is published stays, while the request goes on."""
    both = Prefixes(policy, conv_kernel_size=taps)
    both.admit("a")
    both.run(a=(4, 3))
    both.call("flush", None)
    both.run(a=(4, 2))
    if moment == "flushed":
        both.call("flush", None)
    window = both.begin(a=4) if moment in ("begun", "verified") else None
    if window is not None and moment == "verified":
        both.verify(window)
    handle = both.handles["a"]
    before, room = both.cursor(handle), both.room()
    folded_by_verify = policy == "deferred" and moment == "verified"
    positions = {5} if folded_by_verify else {before[0], 5}
    assert positions == ({5} if policy == "eager" or moment == "flushed" or folded_by_verify else {3, 5})
    for position in positions:
        both.publish("a", position)
    assert both.cursor(handle) == before
    assert both.room() == (room[0], room[1] - len(positions))
    held = ", ".join(map(str, sorted(positions)))
    for wrong in {1, 2, 3, 4, 6, 7, 9, 99} - positions:
        words = rf"publish: key.num_tokens = {wrong}, request 'a' holds states at {held}$"
        both.refuses(SpecStateError, words, "publish", handle, PrefixKey("x", wrong))
    both.check()
    if window is not None:
        if moment == "begun":
            both.verify(window)
        both.end(window, {"a": 3})
    both.run(a=(4, 4))
    both.run(a=(4, 1))
    both.release("a")
    both.check()
    for position in positions:
        both.restore(PrefixKey("a", position), f"r{position}")
    both.run(**{f"r{position}": (4, 2) for position in positions})


@pytest.mark.parametrize("policy", POLICIES)
def test_between_verifies_nothing_is_published(policy: str) -> None:
    both = Prefixes(policy)
    both.admit("a", "b")
    both.run(a=(4, 3), b=(4, 2))
    both.publish("b", 2)
    window = both.begin(a=4)
    both.verify(window, 0)
    words = "publish: request 'a' is in step 1, 1 of whose 2 layers have verified"
    for key in (PrefixKey("a", 3), PrefixKey("b", 2)):  # published already or not
        both.refuses(StepOrderError, words, "publish", both.handles["a"], key)
    both.verify(window)
    both.publish("a", 3)
    both.end(window, {"a": 1})
    both.check()


@pytest.mark.parametrize("policy", POLICIES)
def test_a_handle_of_another_life_publishes_nothing(policy: str) -> None:
    both = Prefixes(policy)
    both.admit("a")
    both.run(a=(4, 3))
    first = both.handles["a"]
    both.preempt("a", "records")
    both.refuses(StaleHandleError, "not live", "publish", first, PrefixKey("a", 3))
    both.resume("a")
    both.refuses(StaleHandleError, "generation", "publish", first, PrefixKey("a", 3))


def test_a_request_without_tokens_has_nothing_to_publish() -> None:
    both = Prefixes()
    both.admit("a")
    both.refuses(SpecStateError, "holds states at 0", "publish", both.handles["a"], PrefixKey("a", 1))


def test_publishing_again_keeps_the_first() -> None:
    both = Prefixes()
    both.admit("a", "b")
    both.run(a=(4, 3), b=(3, 3))
    both.publish("a", 3, "key")
    slot, room = both.call("published")[PrefixKey("key", 3)], both.room()
    for name in "abab":  # whoever publishes under the key: it is its tokens that are named
        both.publish(name, 3, "key")
    both.run(a=(4, 1))
    both.publish("a", 3, "key")  # also who does not hold that position any more
    assert (both.call("published"), both.room()) == ({PrefixKey("key", 3): slot}, room)
    assert both.counts() == (0, 0, 0)
    both.check()


# -- keys


def test_a_key_may_be_the_tokens_themselves() -> None:
    both = Prefixes()
    both.admit("a")
    both.run(a=(4, 3))
    tokens = [7, -1, INT64_MAX]
    key = PrefixKey.of(tokens)
    both.call("publish", both.handles["a"], tokens)
    both.kept[key] = both.past["a"][3]
    assert key == PrefixKey.of(tuple(tokens)) == PrefixKey(key.digest, 3) != PrefixKey.of([7, -1, 3])
    assert hash(key) == hash(PrefixKey.of(tokens))
    assert [both.call("is_published", given) for given in (tokens, tuple(tokens), key, tokens[:2])] == [
        *[True] * 3,
        False,
    ]
    both.refuses(SpecStateError, "key.num_tokens = 2, request 'a' holds", "publish", both.handles["a"], tokens[:2])
    both.call("restore", tokens, "r")
    assert not both.call("is_published", range(3))
    assert both.counts() == (1, 0, 0)


BAD_KEYS: dict[str, tuple[Callable[[], Any], str]] = {
    "None": (lambda: None, "tokens must be a PrefixKey or a list of token ids, not NoneType"),
    "a string": (lambda: "abc", "tokens must be a PrefixKey or a list of token ids, not str"),
    "bytes": (lambda: b"abc", "tokens must be a PrefixKey or a list of token ids, not bytes"),
    "a tensor": (lambda: torch.tensor([1, 2, 3]), "tokens must be a PrefixKey or a list of token ids, not Tensor"),
    "a set": (lambda: {1, 2, 3}, "tokens must be a PrefixKey or a list of token ids, not set"),
    "no tokens": (list, "num_tokens = 0 is outside 1"),
    "floats": (lambda: [1.0, 2.0], "tokens must be integers"),
    "bools": (lambda: [True, False], "tokens must be integers"),
    "mixed": (lambda: [1, "2"], "tokens must be integers"),
    "nested": (lambda: [[1], [2]], "tokens must be integers"),
    "beyond int64": (lambda: [1, 2**63], "tokens must be integers within int64"),
    "vast": (lambda: [-(10**5000)], "tokens must be integers within int64"),
    "an empty digest": (lambda: PrefixKey("", 3), "digest = '' must be a string, not empty"),
    "a digest of bytes": (lambda: PrefixKey(b"x", 3), "digest = b'x' must be a string"),  # type: ignore[arg-type]
    "a digest that is no text": (lambda: PrefixKey("\ud800", 3), "cannot be written as UTF-8"),
    "zero tokens": (lambda: PrefixKey("x", 0), "num_tokens = 0 is outside 1"),
    "fewer": (lambda: PrefixKey("x", -1), "num_tokens = -1 is outside 1"),
    "too many": (lambda: PrefixKey("x", MAX_COMMITTED_LEN + 1), f"num_tokens = .* is outside 1..{MAX_COMMITTED_LEN}"),
    "a bool": (lambda: PrefixKey("x", True), "num_tokens = True is outside 1"),
    "a float": (lambda: PrefixKey("x", 3.0), "num_tokens = 3.0 is outside 1"),  # type: ignore[arg-type]
}


@pytest.mark.parametrize("name", BAD_KEYS)
def test_keys_that_are_refused(name: str) -> None:
    make, words = BAD_KEYS[name]
    both = Prefixes()
    both.admit("a")
    both.run(a=(3, 3))
    try:
        key = make()
    except SpecStateError:
        with pytest.raises(SpecStateError, match=words):
            make()
        return
    both.refuses(SpecStateError, words, "publish", both.handles["a"], key)
    both.refuses(SpecStateError, words, "restore", key, "r")
    both.refuses(SpecStateError, words, "is_published", key)
    assert both.counts() == (0, 0, 0)


# -- hits and misses


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("taps", [None, 4], ids=["no conv", "conv 4"])
def test_a_hit_is_a_copy(taps: int | None, policy: str) -> None:
    """Class 7: the sharers' later commits leave the published bytes as they are; so does the publisher's end."""
    both = Prefixes(policy, conv_kernel_size=taps)
    both.admit("a")
    both.run(a=(4, 3))
    key = both.publish("a", 3)
    slot = both.call("published")[key]

    def held() -> list[bytes]:
        views = [both.payload.checkpoints(layer) for layer in range(2)]
        return [raw_bytes(view[slot]) for pair in views for view in pair if view is not None]

    before = held()
    both.restore(key, "s", SamplingParams(temperature=0.5, seed=7, end_token_ids=(3,)))
    both.restore(key, "t")
    assert both.cursor(both.handles["s"])[:2] == (3, 0)
    assert slot not in both.call_slots(["a", "s", "t"])
    wanted = SamplingParams(temperature=0.5, seed=7, end_token_ids=(3,)).columns()
    assert tuple(both.payload._backend.storage.sampling[both.handles["s"].record_slot].tolist()) == wanted
    both.run(s=(4, 4), t=(2, 1), a=(4, 2))
    both.run(t=(4, 4), s=(4, 1))
    both.fork("s", "f")
    both.release("a")
    both.preempt("t", "checkpoint")
    both.run(f=(4, 3), s=(4, 3))
    assert held() == before
    assert both.counts() == (2, 0, 0)
    assert both.call("published") == {key: slot}
    both.check()


def test_a_miss_is_refused_and_counted() -> None:
    both = filled()
    both.admit("a")
    words = r"restore: no state is published under PrefixKey\(digest='p', num_tokens=3\) \(request 'x'\)"
    before = both.counts()
    both.refuses(SpecStateError, words, "restore", PrefixKey("p", 3), "x")  # another position is another prefix
    both.refuses(SpecStateError, "no state is published", "restore", PrefixKey("nobody", 1), "x")
    assert both.counts() == (before[0], before[1] + 2, before[2])
    for name, words in (("a", "'a' is live already"), ("", "request_id must be a string")):
        both.refuses(SpecStateError, words, "restore", PrefixKey("p", 2), name)
    both.refuses(SpecStateError, "sampling must be SamplingParams", "restore", PrefixKey("p", 2), "x", 1.0)
    both.preempt("a", "host")
    both.refuses(SpecStateError, "'a' is preempted", "restore", PrefixKey("p", 2), "a")
    assert not both.call("is_published", PrefixKey("p", 3))
    assert both.counts() == (before[0], before[1] + 2, before[2])
    both.check()


# -- what is given up, and when


def test_the_prefix_unused_for_longest_goes_first() -> None:
    both = filled()
    assert both.published() == ["p", "q", "r"]
    both.restore(PrefixKey("p", 2), "a")
    assert both.published() == ["p", "q", "r"]  # in use, then the others
    both.release("a")
    assert both.published() == ["q", "r", "p"]
    both.call("is_published", PrefixKey("q", 1))  # no use of it
    both.admit("a")
    both.run(a=(3, 3))
    both.publish("a", 3, "r")  # published already, which counts as used
    assert both.published() == ["q", "p", "r"]
    both.release("a")
    for left in (["p", "r"], ["r"], []):
        both.call("reserve_checkpoints", both.room()[1] + 1)
        assert both.published() == left
    assert both.counts() == (1, 0, 3)
    both.check()


def full_of_prefixes(**changes: Any) -> Prefixes:
    """Prefixes "p", "q" and "r" in the last three checkpoint slots, requests "a" at 3 and "b" preempted at 2."""
    both = filled(num_checkpoints=5, **changes)
    both.admit("a", "b")
    both.run(a=(3, 3), b=(2, 2))
    both.preempt("b", "host")
    both.call("reserve_checkpoints", 1)
    assert both.room()[1] == 0
    return both


VERBS: dict[str, Callable[[Prefixes], Any]] = {
    "admit": lambda both: both.admit("c"),
    "fork": lambda both: both.fork("a", "c"),
    "resume": lambda both: both.resume("b"),
    "restore": lambda both: both.restore(PrefixKey("q", 1), "c"),
    "publish": lambda both: both.publish("a", 3),
    "reserve": lambda both: both.call("reserve_checkpoints", 1),
    "boundary": lambda both: both.run_with({"a": (1, 1)}),
}


@pytest.mark.parametrize("verb", VERBS)
def test_what_runs_short_of_slots_evicts(verb: str) -> None:
    both = full_of_prefixes(block_size=4)
    hits = both.counts()[0]
    VERBS[verb](both)
    left = {"restore": ["q", "r"], "publish": ["q", "r", "a"]}.get(verb, ["q", "r"])
    assert both.published() == left
    assert both.counts() == (hits + (verb == "restore"), 0, 1)
    both.check()


@pytest.mark.parametrize("verb", [verb for verb in VERBS if verb != "restore"])
def test_a_prefix_in_use_is_not_evicted(verb: str) -> None:
    both = filled(num_checkpoints=7, block_size=4)
    keys = [PrefixKey("p", 2), PrefixKey("q", 1), PrefixKey("r", 3)]
    both.restore(keys[0], "p1")
    both.restore(keys[1], "q1")
    both.restore(keys[2], "a")
    both.preempt("p1", "checkpoint")  # neither a preempted one's
    both.preempt("q1", "host")
    both.call("reserve_checkpoints", both.room()[1])
    assert both.room()[1] == 0 and not both.call("can_admit", 1)
    metadata = StepMetadata(handles=(both.handles["a"],), query_lens=(1,))
    refused: dict[str, tuple[Any, ...]] = {
        "admit": ("admit", "c"),
        "fork": ("fork", both.handles["a"], ["c"]),
        "resume": ("resume", "q1"),
        "publish": ("publish", both.handles["a"], PrefixKey("a", 3)),
        "reserve": ("reserve_checkpoints", 1),
        "boundary": ("begin_step", metadata),
    }
    both.refuses(CapacityError, "0 more hold prefixes that may be evicted", *refused[verb])
    both.call("discard", "q1")
    assert both.published() == ["p", "r", "q"]
    if verb == "resume":
        both.call("discard", "p1")
        return
    both.call("can_admit", 1)
    VERBS[verb](both)
    assert "q" not in both.published()
    both.check()


@pytest.mark.parametrize("keeps", KEEPS)
def test_a_preempted_request_uses_its_prefix(keeps: str) -> None:
    both = filled()
    both.restore(PrefixKey("p", 2), "a")
    both.run(a=(4, 2))
    both.preempt("a", keeps)
    both.check()
    taken = both.call("reserve_checkpoints", both.room()[1] + 2)
    assert both.published() == ["p"]
    both.refuses(CapacityError, "0 more hold", "reserve_checkpoints", 1)
    both.call("return_checkpoints", taken)
    both.resume("a")
    both.run(a=(4, 3))
    assert both.payload._ledger.prefixes.num_evictable == 0
    both.load("a", 4)  # whatever it holds now: until it ends
    assert both.payload._ledger.prefixes.num_evictable == 0
    both.fork("a", "f")  # has copied from "a"
    both.release("a")
    assert both.payload._ledger.prefixes.num_evictable == 1
    both.check()


def test_can_admit_counts_what_may_be_evicted() -> None:
    both = filled(num_checkpoints=4)
    assert [both.call("can_admit", n) for n in (1, 4, 5)] == [True, True, False]
    both.restore(PrefixKey("r", 3), "a")
    assert [both.call("can_admit", n) for n in (2, 3)] == [True, False]
    both.fork("a", "b", "c")
    assert not both.call("can_admit", 1) and both.call("can_admit", 0)
    assert both.published() == ["r"]
    both.check()


def test_the_prefix_that_is_restored_makes_no_room_for_itself() -> None:
    both = filled(num_checkpoints=3)
    both.call("reserve_checkpoints", 2)
    assert both.published() == ["r"]
    hits = both.counts()
    assert both.call("can_admit", 1)
    words = "no slot for request 'c': .* 0 more hold prefixes"
    both.refuses(CapacityError, words, "restore", PrefixKey("r", 3), "c")
    assert both.counts() == hits
    both.admit("c")
    assert both.published() == []


def test_a_restore_without_a_record_slot() -> None:
    both = filled(max_requests=1)
    both.admit("a")
    both.refuses(CapacityError, "0 of max_requests = 1 record slots", "restore", PrefixKey("q", 1), "c")
    assert both.counts()[0] == 0


def test_a_fence_keeps_or_drops_what_is_published() -> None:
    both = filled()
    both.restore(PrefixKey("p", 2), "a")
    both.restore(PrefixKey("p", 2), "b")
    both.run(a=(4, 3))
    both.preempt("b", "host")
    both.call("fence", "flush")
    assert both.published() == ["p", "q", "r"]
    both.call("fence", "drop")
    both.handles.clear()
    assert both.published() == []
    assert both.call("metrics").checkpoint_slots_in_use == 0
    assert both.counts() == (2, 0, 0)  # nobody ran short
    both.check()
    both.refuses(SpecStateError, "no state is published", "restore", PrefixKey("p", 2), "c")


# -- at a boundary


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("moment", ["idle", "begun", "verified"])
def test_a_boundary_checkpoint_is_handed_over_or_copied(moment: str, policy: str) -> None:
    both = Prefixes(policy, block_size=4)
    both.admit("a")
    both.run(a=(4, 3))
    both.run(a=(4, 3))
    window = both.begin(a=4) if moment != "idle" else None
    if window is not None and moment == "verified":
        both.verify(window)
    (own,), room = both.slots("a"), both.room()
    key = both.publish("a", 4)
    slot = both.call("published")[key]
    if moment == "idle":
        assert (slot, both.slots("a"), both.room()) == (own, [0], room)
        both.bounds.clear()
        position = both.cursor(both.handles["a"])[0]
        if position != 4:
            words = f"holds states at ({position}, )?6$"
            both.refuses(SpecStateError, words, "publish", both.handles["a"], PrefixKey("x", 4))
    else:
        assert slot != own and both.slots("a") == [own]
        assert both.room() == (room[0], room[1] - 1)
    both.check()
    if window is not None:
        if moment == "begun":
            both.verify(window)
        both.end(window, {"a": 3})
        both.check()
    both.run(a=(4, 4))  # the next boundary is another state
    both.restore(key, "r")
    both.run(r=(4, 4), a=(1, 1))
    assert both.bounds["r"] == 8


@pytest.mark.parametrize("policy", POLICIES)
def test_the_positions_that_a_refusal_names(policy: str) -> None:
    both = Prefixes(policy, block_size=4)
    both.admit("a")
    both.run(a=(4, 3))
    both.run(a=(4, 3))
    both.run(a=(1, 1))
    checkpoint = {"eager": 7, "deferred": 6, "ring": 6}[policy]
    held = ", ".join(map(str, sorted({4, checkpoint, 7})))
    both.refuses(SpecStateError, f"holds states at {held}$", "publish", both.handles["a"], PrefixKey("x", 5))
    for position in (4, checkpoint, 7):
        both.publish("a", position, f"at {position}")
        if position == 4:
            both.bounds.clear()
    both.check()


@pytest.mark.parametrize("policy", POLICIES)
def test_a_request_that_landed_on_the_boundary_hands_it_over(policy: str) -> None:
    both = Prefixes(policy, block_size=4)
    both.admit("a")
    both.run(a=(4, 4))
    (own,) = both.slots("a")
    key = both.publish("a", 4)
    assert both.call("published") == {key: own}
    both.bounds.clear()
    both.run(a=(4, 4))
    assert both.slots("a") not in ([0], [own])
    both.check()


# -- failures on the way


def broken(*_: Any, **__: Any) -> None:
    raise torch.OutOfMemoryError("no memory")


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize(
    ("verb", "call"),
    [
        ("publish committed", "copy_state"),
        ("publish checkpoint", "copy_slot"),
        ("publish boundary", "clear_boundary"),
        ("publish boundary in a step", "copy_slot"),
        ("restore", "standing_at"),
        ("restore", "copy_slot"),
        ("restore", "attach"),
        ("boundary", "begin"),
        ("fork", "copy_state"),
        ("resume", "attach"),
    ],
)
def test_a_failure_leaves_every_slot_its_owner(
    verb: str, call: str, policy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without room but what prefixes hold: one of those may be gone, nothing else."""
    if (verb, policy) == ("publish checkpoint", "eager"):
        pytest.skip("it stands where the request does")
    both = filled(policy, block_size=4, num_checkpoints=6)
    both.admit("a")
    if verb != "boundary":
        both.run(a=(4, 3))
        both.run(a=(4, 3))
        both.run(a=(1, 1))
    if verb == "resume":
        both.preempt("a", "host")
    if verb == "publish boundary in a step":
        both.begin(a=1)
    if both.room()[1]:
        both.call("reserve_checkpoints", both.room()[1])
    positions = {"committed": 7, "checkpoint": 6, "boundary": 4}
    before, counts = both.call("metrics"), both.counts()
    metadata = StepMetadata(handles=(both.handles["a"],), query_lens=(4,)) if verb != "resume" else None
    acts: dict[str, Callable[[StateManager], Any]] = {
        "restore": lambda m: m.restore(PrefixKey("q", 1), "c"),
        "boundary": lambda m: m.begin_step(metadata),  # type: ignore[arg-type]
        "fork": lambda m: m.fork(both.handles["a"], ["c"]),
        "resume": lambda m: m.resume("a"),
    }
    for name, position in positions.items():
        if verb.startswith(f"publish {name}"):
            acts[verb] = lambda m, position=position: m.publish(  # type: ignore[misc]
                both.handles["a"], PrefixKey("a", position)
            )
    for manager in both.managers:
        with monkeypatch.context() as patch:
            patch.setattr(manager._backend, call, broken)
            with pytest.raises(torch.OutOfMemoryError):
                acts[verb](manager)
        manager.check_integrity()
    evicted = both.counts()[2] - counts[2]
    after = both.call("metrics")
    assert evicted == (verb != "publish boundary")
    assert after.published_slots == before.published_slots - evicted
    assert after.checkpoint_slots_in_use == before.checkpoint_slots_in_use - evicted
    assert (after.prefix_hits, after.boundary_slots) == (before.prefix_hits, before.boundary_slots)
    both.check()
    for manager in both.managers:  # and once more, with memory
        acts[verb](manager)
    both.call("digest")


def test_a_recorder_sees_the_slot_of_a_key_that_was_there(tmp_path: Any) -> None:
    path = tmp_path / "trace.jsonl"
    with TraceRecorder(path) as recorder:
        manager = make_manager(make_config(num_checkpoints=9), recorder=recorder)
        a = manager.admit("a")
        manager.load(a, None, 3)
        manager.publish(a, [1, 2, 3])
        for i in range(2):
            with pytest.raises(SpecStateError):
                manager.restore([1, 2], "x")
            manager.publish(a, [1, 2, 3])
            manager.restore([1, 2, 3], f"r{i}")
        manager.digest()
    report = replay_file(path)
    assert report.ok, report.first_difference
