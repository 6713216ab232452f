"""Backend "metadata" walks through the same transitions as "reference": same answers, same refusals, same digests."""

from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from specstate import Handle, SamplingParams, SpecStateError, StateManager, StepMetadata
from specstate.step import Step
from tests.factories import POLICIES, amount, make_config, make_inputs, make_manager, make_params, verify_all

NUM_LAYERS = 2
WINDOW = 3
NAMES = ("a", "b", "c", "d")


class Both:
    """The two managers; every call goes to both and must end alike."""

    def __init__(self, debug: bool = False, **changes: Any) -> None:
        config = make_config(
            **{
                "num_layers": NUM_LAYERS,
                "num_heads": 1,
                "head_k_dim": 2,
                "head_v_dim": 1,
                "max_query_len": WINDOW,
                **changes,
            }
        )
        self.config = config
        self.payload = StateManager(config, make_params(config), debug=debug)
        self.lengths = StateManager(config, None, backend="metadata", debug=debug)

    def call(self, method: str, *arguments: Any, **options: Any) -> Any:
        return agree(
            lambda: getattr(self.payload, method)(*arguments, **options),
            lambda: getattr(self.lengths, method)(*arguments, **options),
        )

    def check(self) -> None:
        managers = (self.payload, self.lengths)
        assert self.payload.digest() == self.lengths.digest()
        assert self.payload.counters() == self.lengths.counters()
        assert self.payload.num_requests == self.lengths.num_requests
        for n in range(5):
            assert self.payload.can_admit(n) == self.lengths.can_admit(n)
        for slot in range(self.config.max_requests):
            cursors = [manager._backend.cursor(slot) for manager in managers]
            assert cursors[0] == cursors[1]
        for request in self.payload._requests:
            lens = [manager.committed_len(request.handle) for manager in managers]
            slots = [manager.checkpoint_slots([request.handle]).tolist() for manager in managers]
            assert lens[0] == lens[1]
            assert slots[0] == slots[1]
        for manager in managers:
            manager.check_integrity()


def agree(one: Callable[[], Any], other: Callable[[], Any]) -> Any:
    """The results of both as a pair; None when both refused with the same class and words."""
    results: list[Any] = []
    for call in (one, other):
        try:
            results.append(call())
        except SpecStateError as error:
            results.append((type(error), str(error)))
    refused = [isinstance(result, tuple) and isinstance(result[0], type) for result in results]
    assert refused[0] == refused[1], results
    if refused[0]:
        assert results[0] == results[1]
        return None
    return results


def same_columns(steps: list[Step]) -> None:
    for name in ("query_start_loc", "positions", "committed_lens", "checkpoint_slots", "record_slots"):
        columns = [getattr(step, name) for step in steps]
        assert columns[0].dtype is columns[1].dtype is torch.int32
        assert torch.equal(columns[0], columns[1]), name
    for name in ("index", "num_rows", "num_tokens", "num_verified", "is_open", "between_verifies", "folded_by_verify"):
        assert getattr(steps[0], name) == getattr(steps[1], name), name


class Walk(RuleBasedStateMachine):
    @initialize(policy=st.sampled_from(POLICIES), spare=st.integers(0, 4), checkpoints=st.integers(2, 4))
    def build(self, policy: str, spare: int, checkpoints: int) -> None:
        least = {"eager": WINDOW, "deferred": 2 * WINDOW, "ring": 2 * WINDOW}[policy]
        self.both = Both(
            fold_policy=policy,
            record_capacity=least + spare,
            max_requests=3,
            num_checkpoints=checkpoints,
            conv_kernel_size=2,
        )
        self.handles: dict[str, Handle] = {}
        self.steps: list[list[Step]] = []

    def _handles(self, data: st.DataObject) -> list[Handle]:
        return data.draw(st.lists(st.sampled_from(list(self.handles.values())), max_size=3, unique=True))

    @rule(name=st.sampled_from(NAMES))
    def admit(self, name: str) -> None:
        made = self.both.call("admit", name, SamplingParams(end_token_ids=(1,)))
        if made is not None:
            assert made[0] == made[1]
            self.handles[name] = made[0]
        self.both.check()

    @precondition(lambda self: self.handles)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(list(self.handles)))
        self.both.call("release", self.handles[name])
        if data.draw(st.booleans()):  # or else later calls meet a stale handle
            del self.handles[name]
        self.both.check()

    @precondition(lambda self: self.handles)
    @rule(data=st.data(), position=st.integers(-1, 20))
    def load(self, data: st.DataObject, position: int) -> None:
        self.both.call("load", data.draw(st.sampled_from(list(self.handles.values()))), None, committed_len=position)
        self.both.check()

    @precondition(lambda self: self.handles)
    @rule(data=st.data(), everyone=st.booleans())
    def flush(self, data: st.DataObject, everyone: bool) -> None:
        self.both.call("flush", None if everyone else self._handles(data))
        self.both.check()

    @rule(
        data=st.data(),
        verb=st.sampled_from("fork,preempt,fold,retract,resume,resume,resume,discard,fence".split(",")),
        name=st.sampled_from(NAMES),
    )
    def between_lives(self, data: st.DataObject, verb: str, name: str) -> None:
        """Live or not, so that some are refused."""
        handle = self.handles.get(name)
        if verb == "fence":
            self.both.call("fence", data.draw(st.sampled_from(["flush", "flush", "drop"])))
        elif verb == "resume":
            made = self.both.call("resume", name)
            if made is not None:
                assert made[0] == made[1]
                self.handles[name] = made[0]
        elif verb == "discard":
            self.both.call("discard", name)
        elif handle is not None and verb == "fork":
            made = self.both.call("fork", handle, data.draw(st.lists(st.sampled_from(NAMES), min_size=1, max_size=2)))
            if made is not None:
                assert made[0] == made[1]
                self.handles.update((new.request_id, new) for new in made[0])
        elif handle is not None and verb == "retract":
            self.both.call("retract", handle)
        elif handle is not None:
            self.both.call("preempt", handle, fold=verb == "fold")
        self.both.check()

    @rule(data=st.data(), dummies=st.integers(0, 2), indexed=st.booleans(), padding=st.integers(-1, 3))
    def begin(self, data: st.DataObject, dummies: int, indexed: bool, padding: int) -> None:
        handles: list[Handle | None] = [*self._handles(data), *[None] * dummies] if self.handles else [None] * dummies
        handles = data.draw(st.permutations(handles))
        rows = len(handles)
        lens = [data.draw(st.integers(1, WINDOW)) for _ in handles]
        kinds = ["dummy" if h is None else data.draw(st.sampled_from(["decode", "decode", "prompt"])) for h in handles]
        least = [n if kind == "prompt" else data.draw(st.integers(1, n)) for kind, n in zip(kinds, lens, strict=True)]
        metadata = StepMetadata(
            handles=tuple(handles),
            query_lens=tuple(lens),
            row_kinds=tuple(kinds),
            min_accepted=tuple(least),
            batch_index=tuple(data.draw(st.permutations(range(rows + 2)))[:rows]) if indexed else None,
        )
        pad_to = None if padding < 0 else (rows + padding, sum(lens) + data.draw(st.integers(0, 3)))
        steps = self.both.call("begin_step", metadata, pad_to)
        if steps is not None:
            same_columns(steps)
            self.steps.append(steps)
        self.both.check()

    @precondition(lambda self: self.handles)
    @rule(data=st.data(), cancel=st.integers(0, 5))
    def whole_step(self, data: st.DataObject, cancel: int) -> None:
        """Chance alone seldom brings begin, verify and end together."""
        handles = list(self.handles.values())
        lens = [data.draw(st.integers(1, WINDOW)) for _ in handles]
        steps = self.both.call("begin_step", StepMetadata(handles=tuple(handles), query_lens=tuple(lens)))
        if steps is None:
            return
        self.steps.append(steps)
        self._verify(steps, range(NUM_LAYERS))
        if cancel:
            counts = [data.draw(st.integers(0, WINDOW + 1)) for _ in handles]
            finished = [data.draw(st.sampled_from([False, False, False, True])) for _ in handles]
            self._end(steps, "defer", counts, {"finished": finished}, as_list=True)
        else:
            agree(steps[0].cancel, steps[1].cancel)
        self._forget(steps)
        self.both.check()

    @precondition(lambda self: self.steps)
    @rule(data=st.data(), layer=st.integers(0, NUM_LAYERS), all_layers=st.booleans())
    def verify(self, data: st.DataObject, layer: int, all_layers: bool) -> None:
        steps = data.draw(st.sampled_from(self.steps))
        self._verify(steps, range(NUM_LAYERS) if all_layers else [layer])
        self.both.check()

    @precondition(lambda self: self.steps)
    @rule(data=st.data())
    def step_flush(self, data: st.DataObject) -> None:
        steps = data.draw(st.sampled_from(self.steps))
        agree(steps[0].flush, steps[1].flush)
        same_columns(steps)
        self.both.check()

    @precondition(lambda self: self.steps)
    @rule(
        data=st.data(),
        verb=st.sampled_from(["defer", "defer", "commit"]),
        masks=st.integers(0, 3),
        as_list=st.booleans(),
    )
    def end(self, data: st.DataObject, verb: str, masks: int, as_list: bool) -> None:
        steps = data.draw(st.sampled_from(self.steps))
        # Now and then too short for the batch_index, and counts that must be clamped.
        length = data.draw(st.sampled_from([7, 7, 7, 2, 0]))
        counts = [data.draw(st.integers(-1, WINDOW + 2)) for _ in range(length)]
        given: dict[str, list[bool]] = {}
        if verb == "defer":
            for bit, name in ((1, "eager"), (2, "finished")):
                if masks & bit:
                    given[name] = [data.draw(st.sampled_from([False, False, True])) for _ in range(length)]
        self._end(steps, verb, counts, given, as_list)
        self._forget(steps)
        self.both.check()

    @precondition(lambda self: self.steps)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        steps = data.draw(st.sampled_from(self.steps))
        agree(steps[0].cancel, steps[1].cancel)
        self._forget(steps)
        self.both.check()

    def _verify(self, steps: list[Step], layers: Iterable[int]) -> None:
        inputs = make_inputs(self.both.config, steps[0].num_tokens, seed=0)
        for layer in layers:
            tensors = inputs[min(layer, NUM_LAYERS - 1)]
            arguments = (layer, tensors.qkv, tensors.raw_gate, tensors.raw_beta)
            agree(lambda a=arguments: steps[0].verify(*a), lambda a=arguments: steps[1].verify(a[0]))
        same_columns(steps)

    def _end(
        self, steps: list[Step], verb: str, counts: list[int], masks: dict[str, list[bool]], as_list: bool
    ) -> None:
        tensors = {name: torch.tensor(mask, dtype=torch.bool) for name, mask in masks.items()}
        count_tensor = torch.tensor(counts, dtype=torch.int64)
        agree(
            lambda: getattr(steps[0], verb)(count_tensor, **tensors),
            lambda: getattr(steps[1], verb)(counts if as_list else count_tensor, **(masks if as_list else tensors)),
        )

    def _forget(self, steps: list[Step]) -> None:
        same_columns(steps)
        if not steps[0].is_open:
            self.steps.remove(steps)


TestWalk = Walk.TestCase
TestWalk.settings = settings(max_examples=amount(100, 40), stateful_step_count=25)


@pytest.mark.parametrize("policy", POLICIES)
def test_one_call_marks_all_layers(policy: str) -> None:
    both = Both(fold_policy=policy, debug=True)
    a, _ = both.call("admit", "a")
    for accepted in (2, 1, 3, 3, 2):
        steps = both.call("begin_step", StepMetadata(handles=(a,), query_lens=(3,)))
        verify_all(steps[0], make_inputs(both.config, 3, seed=0))
        steps[1].replayed("verify")
        same_columns(steps)
        steps[0].defer(torch.tensor([accepted]))
        steps[1].defer([accepted])
        both.check()
    assert both.lengths.committed_len(a) == 11


def test_debug_refuses_the_same_counts() -> None:
    both = Both(debug=True)
    a, _ = both.call("admit", "a")
    steps = both.call("begin_step", StepMetadata(handles=(a,), query_lens=(3,), min_accepted=(2,)))
    verify_all(steps[0], make_inputs(both.config, 3, seed=0))
    steps[1].replayed("verify")
    for count in (1, 0, 4):
        refused = agree(lambda n=count: steps[0].commit(torch.tensor([n])), lambda n=count: steps[1].commit([n]))
        assert refused is None
        assert steps[0].is_open
    agree(lambda: steps[0].commit(torch.tensor([2])), lambda: steps[1].commit([2]))
    both.check()


def test_metadata_holds_no_tensors() -> None:
    manager = Both().lengths
    assert manager.allocated_bytes == 0
    assert manager.plan.total_bytes > 0
    handle = manager.admit("a")
    step = manager.begin_step(StepMetadata(handles=(handle,), query_lens=(2,)))
    assert step.path == "metadata"
    assert [step.verify(layer) for layer in range(NUM_LAYERS)] == [None, None]
    step.commit((2,))
    assert manager.committed_len(handle) == 2


def test_a_released_prompt_row_wakes_no_finished_request() -> None:
    """Rows that own nothing stand still in every later step, whatever a row of theirs once was."""
    both = Both(debug=False)
    a, _ = both.call("admit", "a")
    steps = both.call("begin_step", StepMetadata(handles=(a,), query_lens=(2,), row_kinds=("prompt",)))
    verify_all(steps[0], make_inputs(both.config, 2, seed=0))
    steps[1].replayed("verify")
    both.call("release", a)
    agree(lambda: steps[0].defer(torch.tensor([2])), lambda: steps[1].defer([2]))
    both.check()
    metadata = StepMetadata(handles=(None,), query_lens=(3,), row_kinds=("dummy",))
    for _ in range(2):
        steps = both.call("begin_step", metadata, (3, 5))
        same_columns(steps)
        assert steps[1].committed_lens.tolist() == [0, 0, 0]
        verify_all(steps[0], make_inputs(both.config, 5, seed=0))
        steps[1].replayed("verify")
        agree(lambda s=steps: s[0].commit(torch.tensor([1])), lambda s=steps: s[1].commit([1]))
        both.check()


@pytest.mark.parametrize("backend", ["reference", "metadata"])
@pytest.mark.parametrize(
    ("name", "column"),
    [
        ("query_lens", (2, 2)),
        ("query_lens", (2, 2, 2, 2)),
        ("row_kinds", ("decode",)),
        ("min_accepted", (1,)),
        ("batch_index", (0,)),
    ],
)
def test_columns_of_another_length_are_refused_when_the_step_begins(backend: str, name: str, column: Any) -> None:
    """pydantic's model_copy validates nothing; what is uneven must not be found when half of an end is applied."""
    manager = make_manager(make_config(max_requests=3), backend=backend)
    handles = tuple(manager.admit(request_id) for request_id in "abc")
    metadata = StepMetadata(handles=handles, query_lens=(2, 2, 2)).model_copy(update={name: column})
    with pytest.raises(SpecStateError, match=rf"{name} has {len(column)} entries, handles has 3 \(step 0\)"):
        manager.begin_step(metadata)
    manager.begin_step(StepMetadata(handles=handles, query_lens=(2, 2, 2)))
