"""The life of requests and steps on the reference backend, each test one story, checked against the oracle."""

import contextlib
import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch

from specstate import (
    CapacityError,
    Handle,
    SamplingParams,
    SpecStateError,
    StaleHandleError,
    StateConfig,
    StateManager,
    StepMetadata,
)
from specstate.kernels import reference
from specstate.oracle import Oracle
from specstate.step import Step
from tests.factories import (
    POLICIES,
    LayerInputs,
    Twin,
    amount,
    fingerprint,
    make_config,
    make_inputs,
    make_manager,
    make_params,
    make_twin,
    relative_error,
    run_step,
    verify_all,
)


def verify_layers(step: Step, inputs: list[LayerInputs], layers: range | list[int]) -> list[torch.Tensor]:
    outputs = []
    for layer in layers:
        output = step.verify(layer, inputs[layer].qkv, inputs[layer].raw_gate, inputs[layer].raw_beta)
        assert output is not None
        outputs.append(output)
    return outputs


def counts(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def pending_of(manager: StateManager, handle: Handle) -> int:
    return manager._backend.cursor(handle.record_slot).pending_len


def storage_of(manager: StateManager) -> Any:
    return manager._backend.storage  # type: ignore[attr-defined]


def poison_slots(manager: StateManager) -> None:
    """NaN in every payload that no live request owns, the null slot left alone."""
    owned_rows = {request.handle.record_slot for request in manager._requests}
    owned_slots = {0} | {request.checkpoint_slot for request in manager._requests}
    for layer in storage_of(manager).layers:
        for name, tensor in layer._asdict().items():
            if tensor is None:
                continue
            keep = owned_slots if name in ("recurrent", "conv") else owned_rows
            for slot in set(range(len(tensor))) - keep:
                tensor[slot] = torch.nan


def random_states(config: StateConfig, seed: int) -> list[tuple[torch.Tensor, torch.Tensor | None]]:
    generator = torch.Generator().manual_seed(seed)
    spec = config.layer

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    return [
        (
            normal(spec.num_heads, spec.head_v_dim, spec.head_k_dim),
            normal(spec.conv_channels, spec.conv_history_len) if spec.conv_kernel_size else None,
        )
        for _ in range(config.num_layers)
    ]


def load_twin(config: StateConfig, states: list[tuple[torch.Tensor, torch.Tensor | None]], committed_len: int) -> Twin:
    twin = make_twin(config)
    twin.committed_len = committed_len
    twin.states = [
        old._replace(recurrent=recurrent, conv=old.conv if conv is None else conv)
        for old, (recurrent, conv) in zip(twin.states, states, strict=True)
    ]
    return twin


class Story:
    """A manager with requests "a", "b", .. that have some tokens behind them, and their twins."""

    def __init__(
        self, policy: str = "ring", requests: int = 2, steps: int = 1, debug: bool = True, **changes: Any
    ) -> None:
        self.config = make_config(**{"fold_policy": policy, "max_requests": max(requests, 3), **changes})
        self.manager = make_manager(self.config, debug=debug)
        self.handles = [self.manager.admit("abcd"[i]) for i in range(requests)]
        self.twins = [make_twin(self.config) for _ in range(requests)]
        for number in range(steps):
            rows = [
                (handle, twin, 4, 2 + i % 3)
                for i, (handle, twin) in enumerate(zip(self.handles, self.twins, strict=True))
            ]
            run_step(self.manager, rows, seed=100 + number)

    def begin(self, *query_lens: int, seed: int = 0, **columns: Any) -> tuple[Step, list[LayerInputs]]:
        """A step over the first requests, and its inputs."""
        handles = tuple(self.handles[: len(query_lens)])
        pad_to = columns.pop("pad_to", None)
        step = self.manager.begin_step(StepMetadata(handles=handles, query_lens=query_lens, **columns), pad_to)
        return step, make_inputs(self.config, step.num_tokens, seed)

    def check(self) -> None:
        for handle, twin in zip(self.handles, self.twins, strict=True):
            twin.check(self.manager, handle)
        self.manager.check_integrity()

    def run(self, seed: int) -> None:
        """One more step for everyone."""
        rows = [
            (handle, twin, 4, 1 + (seed + i) % 4)
            for i, (handle, twin) in enumerate(zip(self.handles, self.twins, strict=True))
        ]
        run_step(self.manager, rows, seed=seed)


def window(inputs: list[LayerInputs], start: int, stop: int) -> list[LayerInputs]:
    return [tensors[start:stop] for tensors in inputs]


# -- admit and release


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("taps", [None, 4], ids=["no conv", "conv 4"])
def test_a_used_slot_is_clean_for_the_next_request(policy: str, taps: int | None) -> None:
    config = make_config(fold_policy=policy, max_requests=1, conv_kernel_size=taps)
    manager = make_manager(config, debug=False)
    for life in range(3):
        handle, twin = manager.admit("a"), make_twin(config)
        assert handle == Handle("a", 0, life + 1)
        twin.check(manager, handle)
        for seed in range(3):
            run_step(manager, [(handle, twin, 4, 3)], seed=10 * life + seed)
        manager.release(handle)
        poison_slots(manager)
    manager.check_integrity()


def test_release_with_pending_discards_it() -> None:
    story = Story(requests=1)
    assert pending_of(story.manager, story.handles[0]) == 2
    story.manager.release(story.handles[0])
    poison_slots(story.manager)
    handle, twin = story.manager.admit("b"), make_twin(story.config)
    assert handle.record_slot == story.handles[0].record_slot
    twin.check(story.manager, handle)
    run_step(story.manager, [(handle, twin, 4, 4)], seed=3)


@pytest.mark.parametrize(("requests", "checkpoints"), [(3, 1), (3, 2), (2, 3), (1, 4), (2, 2)])
def test_capacity_is_the_smaller_pool(requests: int, checkpoints: int) -> None:
    manager = make_manager(make_config(max_requests=requests, num_checkpoints=checkpoints))
    fits = min(requests, checkpoints)
    for life in range(3):
        assert [manager.can_admit(n) for n in range(fits + 2)] == [True] * (fits + 1) + [False]
        handles = []
        for n in range(fits):
            assert manager.num_requests == n
            handles.append(manager.admit(f"{life} {n}"))
        assert not manager.can_admit()
        assert manager.can_admit(0)
        with pytest.raises(CapacityError):
            manager.admit("one more")
        slots = manager.checkpoint_slots(handles).tolist()
        assert sorted(slots) == list(range(1, fits + 1))  # never the null slot
        assert sorted(handle.record_slot for handle in handles) == list(range(fits))
        for handle in handles:
            manager.release(handle)
        manager.check_integrity()


def test_a_handle_is_good_for_one_life() -> None:
    manager = make_manager()
    first = manager.admit("a")
    manager.release(first)
    second = manager.admit("a")
    assert (second.request_id, second.record_slot) == (first.request_id, first.record_slot)
    assert second.generation > first.generation
    for call in (
        lambda: manager.release(first),
        lambda: manager.load(first, None, 0),
        lambda: manager.read(first, 0),
        lambda: manager.committed_len(first),
        lambda: manager.flush([first]),
        lambda: manager.begin_step(StepMetadata(handles=(first,), query_lens=(1,))),
    ):
        with pytest.raises(StaleHandleError, match=r"'a' is at generation 2 .* of generation 1"):
            call()
    manager.release(second)


def test_slots_are_conserved_over_many_lives() -> None:
    manager = make_manager(
        make_config(num_layers=1, num_heads=1, head_k_dim=1, head_v_dim=1, conv_kernel_size=None), debug=False
    )
    live: list[Handle] = []
    generations = set()
    for number in range(1500):
        if not manager.can_admit() or (live and (number * 7919) % 5 < 2):
            manager.release(live.pop((number * 31) % len(live)))
        else:
            live.append(manager.admit(f"r{number}"))
            generations.add(live[-1].generation)
        assert len({handle.record_slot for handle in live}) == len(live)
    manager.check_integrity()
    assert len(generations) > 700


# -- load


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("taps", [None, 2, 4], ids=["no conv", "conv 2", "conv 4"])
@pytest.mark.parametrize("in_place", [False, True], ids=["copied", "in place"])
def test_load_goes_on_from_the_given_state(in_place: bool, taps: int | None, policy: str) -> None:
    config = make_config(fold_policy=policy, conv_kernel_size=taps)
    manager = make_manager(config)
    for position in (0, 1, 5, 6, 1000):
        states = random_states(config, seed=position)
        handle, twin = manager.admit("a"), load_twin(config, states, position)
        if in_place:
            slot = int(manager.checkpoint_slots([handle])[0])
            for layer, (recurrent, conv) in enumerate(states):
                views = manager.checkpoints(layer)
                views[0][slot] = recurrent
                if views[1] is not None and conv is not None:
                    views[1][slot] = conv
            manager.load(handle, None, committed_len=position)
        else:
            manager.load(handle, states, committed_len=position)
        twin.check(manager, handle)
        for seed in range(3):
            run_step(manager, [(handle, twin, 4, 1 + seed)], seed=seed)
        manager.release(handle)


def test_load_replaces_what_was_pending() -> None:
    story = Story(requests=2)
    states = random_states(story.config, seed=1)
    story.manager.load(story.handles[0], states, committed_len=9)
    assert pending_of(story.manager, story.handles[0]) == 0
    story.twins[0] = load_twin(story.config, states, 9)
    story.check()
    story.run(seed=2)


def test_load_from_the_storage_itself() -> None:
    """Two layers that change places, and a state that lies across two slots: copied as they were before the call."""
    config = make_config()
    manager, other = make_manager(config), make_manager(config)
    handle, _ = manager.admit("a"), manager.admit("b")
    slot = int(manager.checkpoint_slots([handle])[0])
    (first, first_conv), (second, second_conv) = (manager.checkpoints(layer) for layer in range(2))
    for tensor in (first, first_conv, second, second_conv):
        assert tensor is not None
        tensor[1:] = torch.randn(tensor[1:].shape, dtype=tensor.dtype)
    assert first_conv is not None and second_conv is not None
    manager.load(handle, None, committed_len=3)
    across = first.flatten()[first[0].numel() + 7 :][: first[0].numel()].view(first[0].shape)
    for states in (
        [(second[slot], second_conv[slot]), (first[slot], first_conv[slot])],
        [(across, first_conv[slot]), (second[slot], second_conv[slot])],
    ):
        copied = [(recurrent.clone(), conv.clone()) for recurrent, conv in states]
        manager.load(handle, states, committed_len=3)
        if not other.num_requests:
            other.admit("a")
        other.load(handle, copied, committed_len=3)
        for layer in range(2):
            got, wanted = manager.read(handle, layer), other.read(handle, layer)
            assert torch.equal(got.recurrent, wanted.recurrent)
            assert got.conv is not None and wanted.conv is not None and torch.equal(got.conv, wanted.conv)


def test_load_copies_and_keeps_no_graph() -> None:
    config = make_config()
    manager, twin = make_manager(config), load_twin(config, random_states(config, seed=1), 4)
    handle = manager.admit("a")
    states = [(recurrent.requires_grad_(), conv) for recurrent, conv in random_states(config, seed=1)]
    manager.load(handle, states, committed_len=4)
    for recurrent, conv in states:
        recurrent.data.fill_(torch.nan)
        assert conv is not None
        conv.fill_(torch.nan)
    twin.check(manager, handle)
    assert not any(layer.recurrent.requires_grad for layer in storage_of(manager).layers)
    run_step(manager, [(handle, twin, 4, 3)], seed=2)


def test_everything_works_across_inference_mode() -> None:
    """A manager built or used inside inference mode goes on outside of it, and the other way round."""
    config = make_config()
    with torch.inference_mode():
        manager, twin = make_manager(config), make_twin(config)
        handle = manager.admit("a")
        run_step(manager, [(handle, twin, 4, 3)], seed=1)
        step = manager.begin_step(StepMetadata(handles=(handle,), query_lens=(2,)))
    other = manager.admit("b")
    inputs = make_inputs(config, 2, seed=2)
    verify_all(step, inputs)
    step.defer(counts(2))
    twin.commit(inputs, 2)
    run_step(manager, [(handle, twin, 4, 1), (other, make_twin(config), 2, 2)], seed=3)
    with torch.inference_mode():
        manager.load(other, None, committed_len=3)
        run_step(manager, [(handle, twin, 4, 4)], seed=4)
        manager.release(other)
    for inside in (torch.inference_mode(), contextlib.nullcontext()):
        with inside:
            manager.retract(*manager.fork(handle, ["fork"]))
            manager.preempt(handle, fold=True)
        handle, fork = manager.resume("a"), manager.resume("fork")
        twin.check(manager, handle)
        twin.check(manager, fork)
        with torch.inference_mode():
            manager.preempt(fork)
        manager.release(manager.resume("fork"))
    manager.flush()
    twin.check(manager, handle)


# -- ends: late, out of order, after a release


@pytest.mark.parametrize("policy", POLICIES)
def test_disjoint_steps_may_interleave_and_end_in_any_order(policy: str) -> None:
    story = Story(policy, requests=3)
    inputs = [make_inputs(story.config, 4, seed=i) for i in range(3)]
    steps = [story.manager.begin_step(StepMetadata(handles=(handle,), query_lens=(4,))) for handle in story.handles]
    for layer in (1, 0):
        for i in (2, 0, 1):
            verify_layers(steps[i], inputs[i], [layer])
    for i, accepted in ((1, 4), (2, 1), (0, 2)):
        steps[i].defer(counts(accepted))
        story.twins[i].commit(inputs[i], accepted)
        story.manager.check_integrity()
    story.check()
    story.run(seed=9)


@pytest.mark.parametrize("policy", POLICIES)
def test_a_late_end_after_others_came_and_went(policy: str) -> None:
    story = Story(policy, requests=2)
    step, inputs = story.begin(3)
    verify_all(step, inputs)
    story.manager.release(story.handles[1])
    c, twin = story.manager.admit("c"), make_twin(story.config)
    for seed in range(4):
        run_step(story.manager, [(c, twin, 4, 3)], seed=seed)
    step.defer(counts(2))
    story.twins[0].commit(inputs, 2)
    story.twins[0].check(story.manager, story.handles[0])
    twin.check(story.manager, c)
    assert story.manager.counters().dropped_ends == 0


RELEASES = ["before verify", "between layers", "after verify", "after sample"]
ENDS = ["defer", "commit", "cancel"]


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("end", ENDS)
@pytest.mark.parametrize("when", RELEASES)
@pytest.mark.parametrize("debug", [False, True], ids=["", "debug"])
def test_release_in_an_open_step_leaves_the_next_owner_alone(debug: bool, when: str, end: str, policy: str) -> None:
    story = Story(policy, requests=2, debug=debug)
    manager, (a, b) = story.manager, story.handles
    step, inputs = story.begin(3, 4)
    wanted = story.twins[1].window(window(inputs, 3, 7))[1]
    outputs: list[torch.Tensor] = []
    before = {"before verify": 0, "between layers": 1, "after verify": 2, "after sample": 2}[when]
    outputs += verify_layers(step, inputs, range(before))
    if when == "after sample":
        step.sample(torch.zeros(7, 5), torch.zeros(7, dtype=torch.int64))

    manager.release(a)
    assert step.checkpoint_slots.tolist()[0] == 0
    assert step.record_slots.tolist()[0] == -1
    poison_slots(manager)
    states = random_states(story.config, seed=5)
    new = manager.admit("new")
    assert new.record_slot == a.record_slot
    manager.load(new, states, committed_len=7)
    twin = load_twin(story.config, states, 7)

    outputs += verify_layers(step, inputs, range(before, 2))
    for layer in range(before, 2):
        assert not outputs[layer][:3].any()  # the row owns nothing any more
    twin.check(manager, new)
    for layer in range(2):
        assert relative_error(outputs[layer][3:], wanted[layer]) < 1e-12
    if end == "cancel":
        step.cancel()
    else:
        getattr(step, end)(counts(3, 2))
        story.twins[1].commit(window(inputs, 3, 7), 2)
    assert manager.counters().dropped_ends == (end != "cancel")
    twin.check(manager, new)
    story.twins[1].check(manager, b)
    manager.check_integrity()
    run_step(manager, [(new, twin, 4, 4), (b, story.twins[1], 2, 1)], seed=6)
    run_step(manager, [(b, story.twins[1], 4, 4), (new, twin, 3, 1)], seed=7)


@pytest.mark.parametrize("policy", POLICIES)
def test_the_next_owner_may_be_in_a_step_of_its_own(policy: str) -> None:
    story = Story(policy, requests=2)
    manager = story.manager
    old, old_inputs = story.begin(3, 4, seed=1)
    verify_layers(old, old_inputs, [1])
    manager.release(story.handles[0])
    new, twin = manager.admit("a"), make_twin(story.config)
    step = manager.begin_step(StepMetadata(handles=(new,), query_lens=(4,)))
    inputs = make_inputs(story.config, 4, seed=2)
    verify_layers(step, inputs, [0])
    verify_layers(old, old_inputs, [0])
    verify_layers(step, inputs, [1])
    old.defer(counts(3, 4))
    step.defer(counts(2))
    twin.commit(inputs, 2)
    story.twins[1].commit(window(old_inputs, 3, 7), 4)
    twin.check(manager, new)
    story.twins[1].check(manager, story.handles[1])
    run_step(manager, [(new, twin, 4, 4), (story.handles[1], story.twins[1], 4, 1)], seed=3)


def test_all_rows_of_a_step_may_be_released() -> None:
    story = Story(requests=2, debug=False)
    step, inputs = story.begin(3, 4)
    verify_layers(step, inputs, [0])
    for handle in story.handles:
        story.manager.release(handle)
    held = [tensor.clone() for layer in storage_of(story.manager).layers for tensor in layer[:2]]
    output = verify_layers(step, inputs, [1])[0]
    step.commit(counts(3, 4))
    assert not output.any()
    assert story.manager.counters().dropped_ends == 2
    after = [tensor for layer in storage_of(story.manager).layers for tensor in layer[:2]]
    assert all(torch.equal(x, y) for x, y in zip(held, after, strict=True))
    story.manager.check_integrity()


@pytest.mark.parametrize("policy", POLICIES)
def test_an_end_for_a_slot_of_another_generation_is_dropped_and_counted(policy: str) -> None:
    """The device's own guard, should a host ever lose track: no cursor moves, no checkpoint is written, not slot 0."""
    story = Story(policy, requests=1, debug=False)
    step, inputs = story.begin(4)
    verify_all(step, inputs)
    storage = storage_of(story.manager)
    storage.cursors[story.handles[0].record_slot, 2] += 1
    held = [storage.cursors, *(tensor for layer in storage.layers for tensor in (layer.recurrent, layer.conv))]
    before = [tensor.clone() for tensor in held]
    step.defer(counts(3), eager=torch.tensor([True]), finished=torch.tensor([True]))
    assert [torch.equal(tensor, kept) for tensor, kept in zip(held, before, strict=True)] == [True] * len(held)
    assert story.manager.counters().dropped_ends == 1


# -- cancel


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("verified", [[], [0], [1], [2, 0], [0, 1, 2]], ids=["none", "first", "middle", "two", "all"])
@pytest.mark.parametrize("flushed", [False, True], ids=["", "after step.flush"])
def test_cancel_then_the_same_window_again(flushed: bool, verified: list[int], policy: str) -> None:
    story = Story(policy, requests=2, steps=2, num_layers=3)
    for attempt in range(2):
        step, inputs = story.begin(4, 3, seed=attempt)
        if flushed:
            step.flush()
        verify_layers(step, inputs, verified)
        step.cancel()
        assert not step.is_open
        story.check()
    step, inputs = story.begin(4, 3, seed=7)
    wanted = [
        twin.window(window(inputs, *bounds))[1] for twin, bounds in zip(story.twins, ((0, 4), (4, 7)), strict=True)
    ]
    for got, first, second in zip(verify_all(step, inputs), *wanted, strict=True):
        assert relative_error(got, torch.cat([first, second])) < 1e-12
    step.defer(counts(4, 1))
    story.twins[0].commit(window(inputs, 0, 4), 4)
    story.twins[1].commit(window(inputs, 4, 7), 1)
    story.check()
    story.run(seed=8)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("failing", [0, 1, 2], ids="layer {}".format)
def test_a_verify_that_fails_on_the_way_can_be_cancelled(
    failing: int, policy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As when memory runs out: the layer must not have folded, or cancel would fold its records twice."""
    story = Story(policy, requests=2, num_layers=3, debug=False)
    step, inputs = story.begin(4, 3)
    verify_layers(step, inputs, range(failing))

    def out_of_memory(*_: Any) -> None:
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr(reference, "_write_records", out_of_memory)
        with pytest.raises(MemoryError):
            verify_layers(step, inputs, [failing])
    step.cancel()
    story.check()
    story.run(seed=1)


# -- flush


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize(
    ("moment", "which"),
    [
        ("before verify", "all"),
        ("before verify", "one"),
        ("before verify", "step"),
        ("after verify", "all"),
        ("after verify", "one"),
        ("after the end", "all"),
        ("after the end", "one"),
    ],
)
def test_flush_at_every_allowed_moment(moment: str, which: str, policy: str) -> None:
    story = Story(policy, requests=3)
    manager = story.manager

    def flush() -> None:
        for _ in range(2):  # again is a no-op
            if which == "step":
                step.flush()
            else:
                manager.flush(None if which == "all" else [story.handles[1]])

    step, inputs = story.begin(4, 3)
    if moment == "before verify":
        flush()
        flushed = {"all": [0, 1, 2], "one": [1], "step": [0, 1]}[which]
        assert all(pending_of(manager, story.handles[i]) == 0 for i in flushed)
        story.check()
    wanted = [
        twin.window(window(inputs, *bounds))[1] for twin, bounds in zip(story.twins, ((0, 4), (4, 7)), strict=False)
    ]
    for got, first, second in zip(verify_all(step, inputs), *wanted, strict=True):
        assert relative_error(got, torch.cat([first, second])) < 1e-12
    if moment == "after verify":
        flush()
        story.check()
    step.defer(counts(2, 3))
    story.twins[0].commit(window(inputs, 0, 4), 2)
    story.twins[1].commit(window(inputs, 4, 7), 3)
    if moment == "after the end":
        flush()
    story.check()
    story.run(seed=4)


@pytest.mark.parametrize("policy", POLICIES)
def test_flush_makes_the_checkpoint_the_committed_state(policy: str) -> None:
    story = Story(policy, requests=2)
    story.manager.flush()
    slots = story.manager.checkpoint_slots(story.handles).tolist()
    for twin, slot in zip(story.twins, slots, strict=True):
        for layer, state in enumerate(twin.states):
            recurrent, conv = story.manager.checkpoints(layer)
            assert conv is not None
            assert relative_error(recurrent[slot], state.recurrent) < 1e-12
            assert torch.equal(conv[slot], state.conv)


@pytest.mark.parametrize("policy", POLICIES)
def test_flush_of_others_during_a_half_verified_step(policy: str) -> None:
    story = Story(policy, requests=3)
    step, inputs = story.begin(4, 3)
    verify_layers(step, inputs, [1])
    story.manager.flush([story.handles[2]])
    story.twins[2].check(story.manager, story.handles[2])
    verify_layers(step, inputs, [0])
    step.defer(counts(2, 3))
    story.twins[0].commit(window(inputs, 0, 4), 2)
    story.twins[1].commit(window(inputs, 4, 7), 3)
    story.check()


# -- records of the caller


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("taps", [None, 4], ids=["no conv", "conv 4"])
def test_records_of_another_kernel_serve_as_well_as_verify(taps: int | None, policy: str) -> None:
    story = Story(policy, requests=2, conv_kernel_size=taps)
    for attempt in range(3):
        step, inputs = story.begin(4, 3, seed=attempt)
        step.flush()
        oracle = story.twins[0].oracle
        for layer, tensors in enumerate(inputs):
            u, key = [], []
            for twin, rows in ((story.twins[0], range(4)), (story.twins[1], range(4, 7))):
                state = twin.states[layer]
                for t in rows:
                    token = oracle.token(layer, state, tensors.qkv[t], tensors.raw_gate[t], tensors.raw_beta[t])
                    state = token.state
                    u.append(token.u)
                    key.append(token.key)
            conv_input = None if taps is None else tensors.qkv
            step.write_records(layer, torch.stack(u), torch.stack(key), tensors.raw_gate, conv_input)
        step.defer(counts(3, 1 + attempt))
        story.twins[0].commit(window(inputs, 0, 4), 3)
        story.twins[1].commit(window(inputs, 4, 7), 1 + attempt)
        story.check()
    story.run(seed=5)


def test_write_records_needs_no_flush_when_nothing_is_pending() -> None:
    for prepare in (lambda s: s.manager.flush(), lambda s: s.manager.load(s.handles[0], None, committed_len=3)):
        story = Story(requests=1)
        prepare(story)
        step, inputs = story.begin(2)
        records = torch.zeros(2, 2, 5, dtype=torch.float64), torch.zeros(2, 2, 6, dtype=torch.float64)
        for layer, tensors in enumerate(inputs):
            step.write_records(layer, records[0], records[1], tensors.raw_gate, tensors.qkv)
        step.cancel()
    story = Story("eager", requests=1)
    step, inputs = story.begin(2)
    step.write_records(0, records[0], records[1], inputs[0].raw_gate, inputs[0].qkv)


# -- rows: padding, dummies, kinds, batch_index


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("pad_to", [2, 5, (2, 9), (4, 7), (6, 12)], ids=str)
def test_padding_changes_nothing_and_reads_zero(pad_to: int | tuple[int, int], policy: str) -> None:
    story = Story(policy, requests=2)
    step, inputs = story.begin(4, 3, pad_to=pad_to)
    rows, tokens = (pad_to, 7) if isinstance(pad_to, int) else pad_to
    assert (step.num_rows, step.num_tokens) == (rows, tokens)
    assert step.query_start_loc.tolist() == [0, 4] + [7] * (rows - 1)
    assert step.committed_lens.tolist() == [2, 3] + [0] * (rows - 2)
    assert step.positions.tolist() == [2, 3, 4, 5, 3, 4, 5] + [0] * (tokens - 7)
    assert step.record_slots.tolist() == [handle.record_slot for handle in story.handles] + [-1] * (rows - 2)
    slots = story.manager.checkpoint_slots(story.handles).tolist()
    assert step.checkpoint_slots.tolist() == slots + [0] * (rows - 2)
    for tensors in inputs:
        for tensor in (tensors.qkv, tensors.raw_gate, tensors.raw_beta):
            tensor[7:] = torch.nan
    for layer, tensors in enumerate(inputs):
        out = torch.full((tokens, 2, 5), torch.nan, dtype=torch.float64)
        got = step.verify(layer, tensors.qkv, tensors.raw_gate, tensors.raw_beta, out)
        assert got is out
        wanted = [
            twin.window(window(inputs, *bounds))[1][layer]
            for twin, bounds in zip(story.twins, ((0, 4), (4, 7)), strict=True)
        ]
        assert relative_error(out[:7], torch.cat(wanted)) < 1e-12
        assert torch.equal(out[7:], torch.zeros(tokens - 7, 2, 5, dtype=torch.float64))
    step.defer(counts(3, 1))  # padded rows read no entry
    story.twins[0].commit(window(inputs, 0, 4), 3)
    story.twins[1].commit(window(inputs, 4, 7), 1)
    story.check()
    assert story.manager.counters().clamps == 0
    story.run(seed=3)


@pytest.mark.parametrize("policy", POLICIES)
def test_dummy_rows_own_nothing(policy: str) -> None:
    story = Story(policy, requests=1)
    handle, twin = story.handles[0], story.twins[0]
    metadata = StepMetadata(handles=(None, handle, None), query_lens=(2, 3, 4), row_kinds=("dummy", "decode", "dummy"))
    for seed in range(4):
        step = story.manager.begin_step(metadata)
        assert step.record_slots.tolist() == [-1, handle.record_slot, -1]
        assert step.checkpoint_slots.tolist()[::2] == [0, 0]
        assert step.committed_lens.tolist() == [0, twin.committed_len, 0]
        inputs = make_inputs(story.config, 9, seed)
        for tensors in inputs:
            tensors.qkv[:2] = tensors.raw_gate[5:] = torch.nan
        wanted = twin.window(window(inputs, 2, 5))[1]
        for got, want in zip(verify_all(step, inputs), wanted, strict=True):
            assert relative_error(got[2:5], want) < 1e-12
            assert not got[:2].any()
            assert not got[5:].any()
        others = torch.tensor([True, False, True])
        step.defer(torch.tensor([77, 1 + seed % 3, -5]), eager=others, finished=others)
        twin.commit(window(inputs, 2, 5), 1 + seed % 3)
        twin.check(story.manager, handle)
    counted = story.manager.counters()
    assert (counted.clamps, counted.dropped_ends, counted.wasted_windows) == (0, 0, 0)
    story.manager.check_integrity()


def test_dummy_rows_do_not_count_against_max_requests() -> None:
    story = Story(requests=3)
    handles = (None, *story.handles, None)
    kinds = ("dummy", "decode", "decode", "decode", "dummy")
    step = story.manager.begin_step(StepMetadata(handles=handles, query_lens=(1,) * 5, row_kinds=kinds), pad_to=9)
    assert step.num_rows == 9
    step.cancel()


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("pad_to", [None, (0, 3), (4, 0), (3, 5)], ids=str)
def test_a_step_of_no_rows_is_a_no_op(pad_to: tuple[int, int] | None, policy: str) -> None:
    story = Story(policy, requests=2)
    before = fingerprint(story.manager)
    for verb in ENDS:
        step, inputs = story.begin(pad_to=pad_to)
        step.flush()
        for output in verify_all(step, inputs):
            assert not output.any()
        step.cancel() if verb == "cancel" else getattr(step, verb)(counts())
    after = fingerprint(story.manager)
    before["numbers"], after["numbers"] = before["numbers"][1:], after["numbers"][1:]  # but for the step's number
    assert [name for name in before if before[name] != after[name]] == []


def test_counts_may_be_longer_than_the_rows() -> None:
    story = Story(requests=2)
    step, inputs = story.begin(4, 3)
    verify_all(step, inputs)
    mask = torch.zeros(40, dtype=torch.bool)
    step.defer(torch.tensor([2, 3] + [99] * 38), eager=mask, finished=mask)
    story.twins[0].commit(window(inputs, 0, 4), 2)
    story.twins[1].commit(window(inputs, 4, 7), 3)
    story.check()
    assert story.manager.counters().clamps == 0


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
def test_batch_index_names_the_entry_of_each_row(dtype: torch.dtype) -> None:
    story = Story(requests=3)
    step, inputs = story.begin(4, 3, 2, batch_index=(6, 0, 3))
    verify_all(step, inputs)
    eager = torch.tensor([True, False, False, False, False, False, False])
    finished = torch.tensor([False, False, False, True, False, False, False])
    step.defer(torch.tensor([3, 99, 99, 2, 99, 99, 1], dtype=dtype), eager=eager, finished=finished)
    for twin, (start, stop), accepted in zip(story.twins, ((0, 4), (4, 7), (7, 9)), (1, 3, 2), strict=True):
        twin.commit(window(inputs, start, stop), accepted)
    story.check()
    cursors = [story.manager._backend.cursor(handle.record_slot) for handle in story.handles]
    assert [cursor.pending_len for cursor in cursors] == [2 + 1, 0, 4 + 2]
    assert [cursor.finished for cursor in cursors] == [False, False, True]


def test_prompt_rows_accept_every_token() -> None:
    story = Story(requests=2, debug=False)
    step, inputs = story.begin(4, 3, row_kinds=("prompt", "decode"))
    verify_all(step, inputs)
    step.defer(counts(1, 2))
    story.twins[0].commit(window(inputs, 0, 4), 4)
    story.twins[1].commit(window(inputs, 4, 7), 2)
    story.check()
    assert story.manager.counters().clamps == 1


@pytest.mark.parametrize(
    ("given", "applied", "clamps"),
    [((2, 3), (2, 3), 0), ((1, 0), (2, 1), 2), ((9, 4), (4, 3), 2), ((-(2**31), 2**31 - 1), (2, 3), 2)],
    ids=["inside", "below", "above", "far out"],
)
def test_counts_are_clamped_and_the_clamps_counted(
    given: tuple[int, int], applied: tuple[int, int], clamps: int
) -> None:
    for verb in ("defer", "commit"):
        story = Story(requests=2, debug=False)
        step, inputs = story.begin(4, 3, min_accepted=(2, 1))
        verify_all(step, inputs)
        getattr(step, verb)(counts(*given))
        story.twins[0].commit(window(inputs, 0, 4), applied[0])
        story.twins[1].commit(window(inputs, 4, 7), applied[1])
        story.check()
        assert story.manager.counters().clamps == clamps


@pytest.mark.parametrize("policy", POLICIES)
def test_windows_without_drafts_beside_full_ones(policy: str) -> None:
    """Fault class 1: widths change from step to step, rows change places."""
    story = Story(policy, requests=3, steps=0)
    a, b, c = ((handle, twin) for handle, twin in zip(story.handles, story.twins, strict=True))
    for seed, rows in enumerate(
        [
            [(*a, 1, 1), (*b, 4, 3), (*c, 1, 1)],
            [(*c, 4, 1), (*a, 4, 4), (*b, 1, 1)],
            [(*b, 1, 1), (*c, 1, 1), (*a, 1, 1)],
            [(*a, 4, 1), (*b, 4, 4), (*c, 3, 2)],
            [(*b, 4, 4)],
            [(*b, 1, 1), (*a, 2, 2)],
        ]
    ):
        run_step(story.manager, rows, seed)
    story.check()


# -- finished requests


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("verb", ["defer", "commit"])
def test_windows_after_the_end_token_count_for_nothing(verb: str, policy: str) -> None:
    story = Story(policy, requests=2, debug=False)
    step, inputs = story.begin(4, 3)
    verify_all(step, inputs)
    step.defer(counts(2, 3), finished=torch.tensor([True, False]))
    story.twins[0].commit(window(inputs, 0, 4), 2)
    story.twins[1].commit(window(inputs, 4, 7), 3)
    for attempt in range(3):
        step, inputs = story.begin(4, 3, seed=attempt)
        outputs = verify_all(step, inputs)
        wanted = story.twins[0].window(window(inputs, 0, 4))[1]
        assert all(relative_error(got[:4], want) < 1e-12 for got, want in zip(outputs, wanted, strict=True))
        getattr(step, verb)(counts(3, 1))
        story.twins[1].commit(window(inputs, 4, 7), 1)
        story.check()
        assert story.manager.counters().wasted_windows == attempt + 1
    # Loaded anew it runs again.
    states = random_states(story.config, seed=1)
    story.manager.load(story.handles[0], states, committed_len=20)
    story.twins[0] = load_twin(story.config, states, 20)
    story.run(seed=5)
    assert story.manager.counters().wasted_windows == 3
    assert story.manager.counters().clamps == 0


def test_counts_of_a_finished_row_are_not_refused_under_debug() -> None:
    story = Story(requests=1)
    step, inputs = story.begin(4)
    verify_all(step, inputs)
    step.defer(counts(2), finished=torch.tensor([True]))
    step, inputs = story.begin(4)
    verify_all(step, inputs)
    step.defer(counts(0))
    assert story.manager.counters().wasted_windows == 1


def test_a_finished_request_can_be_flushed_read_and_released() -> None:
    story = Story(requests=1)
    step, inputs = story.begin(4)
    verify_all(step, inputs)
    step.defer(counts(2), finished=torch.tensor([True]))
    story.twins[0].commit(inputs, 2)
    story.manager.flush()
    story.check()
    story.manager.release(story.handles[0])
    story.manager.check_integrity()


# -- when folds happen


@pytest.mark.parametrize("capacity", [8, 9, 11, 12, 16, 23])
def test_ring_folds_when_the_next_window_might_not_fit(capacity: int) -> None:
    """At the end of the step, if and only if pending + T > R."""
    story = Story("ring", requests=1, steps=0, record_capacity=capacity)
    pending = 0
    for seed, accepted in enumerate([1, 4, 2, 1, 1, 3, 4, 4, 4, 1, 1, 1, 1, 1, 1, 1, 4, 3, 2]):
        run_step(story.manager, [(story.handles[0], story.twins[0], 4, accepted)], seed)
        pending += accepted
        if pending + 4 > capacity:
            pending = 0
        assert pending_of(story.manager, story.handles[0]) == pending
        cursor = story.manager._backend.cursor(story.handles[0].record_slot)
        assert cursor.checkpoint_len == story.twins[0].committed_len - pending
    assert story.manager.counters().clamps == 0


@pytest.mark.parametrize("capacity", [8, 9, 16, 21])
def test_deferred_folds_in_the_next_verify_whatever_the_capacity(capacity: int) -> None:
    story = Story("deferred", requests=1, steps=0, record_capacity=capacity)
    handle, twin = story.handles[0], story.twins[0]
    for seed, accepted in enumerate([1, 4, 2, 1, 3, 4, 4]):
        before = twin.committed_len
        step, inputs = story.begin(4, seed=seed)
        verify_layers(step, inputs, [0])
        if before:  # folded in this layer already, the cursor does not know yet
            slot = int(story.manager.checkpoint_slots([handle])[0])
            assert relative_error(story.manager.checkpoints(0)[0][slot], twin.states[0].recurrent) < 1e-12
        verify_layers(step, inputs, [1])
        step.defer(counts(accepted))
        twin.commit(inputs, accepted)
        cursor = story.manager._backend.cursor(handle.record_slot)
        assert (cursor.checkpoint_len, cursor.pending_len) == (before, accepted)
        twin.check(story.manager, handle)


@pytest.mark.parametrize("capacity", [4, 7])
def test_eager_never_leaves_anything_pending(capacity: int) -> None:
    story = Story("eager", requests=1, steps=0, record_capacity=capacity)
    for seed, accepted in enumerate([1, 4, 2, 3]):
        run_step(story.manager, [(story.handles[0], story.twins[0], 4, accepted)], seed)
        cursor = story.manager._backend.cursor(story.handles[0].record_slot)
        assert (cursor.checkpoint_len, cursor.pending_len) == (story.twins[0].committed_len, 0)


@pytest.mark.parametrize("policy", POLICIES)
def test_commit_folds_older_pending_too(policy: str) -> None:
    story = Story(policy, requests=2, steps=1)
    step, inputs = story.begin(4)
    verify_all(step, inputs)
    step.commit(counts(3))
    story.twins[0].commit(inputs, 3)
    assert pending_of(story.manager, story.handles[0]) == 0
    assert pending_of(story.manager, story.handles[1]) == (0 if policy == "eager" else 3)
    story.check()
    slot = int(story.manager.checkpoint_slots(story.handles)[0])
    assert relative_error(story.manager.checkpoints(1)[0][slot], story.twins[0].states[1].recurrent) < 1e-12
    story.run(seed=3)


@pytest.mark.parametrize("policy", POLICIES)
def test_eager_rows_fold_all_they_have(policy: str) -> None:
    story = Story(policy, requests=3, steps=1)
    step, inputs = story.begin(4, 3, 2)
    verify_all(step, inputs)
    step.defer(counts(3, 2, 1), eager=torch.tensor([True, False, True]))
    for twin, (start, stop), accepted in zip(story.twins, ((0, 4), (4, 7), (7, 9)), (3, 2, 1), strict=True):
        twin.commit(window(inputs, start, stop), accepted)
    kept = {"eager": 0, "deferred": 2, "ring": 3 + 2}[policy]
    assert [pending_of(story.manager, handle) for handle in story.handles] == [0, kept, 0]
    story.check()
    story.run(seed=2)


# -- numbers


@pytest.mark.parametrize("policy", POLICIES)
def test_four_thousand_steps_fully_accepted_stay_bounded(policy: str) -> None:
    """Fault class 10: float32, every token of every window accepted, beside the same tokens in float64.

    CI takes a thousand under two of the policies.
    """
    num_blocks = 40 if policy == "ring" else amount(40, 10)
    sizes = {"num_layers": 1, "num_heads": 1, "head_k_dim": 4, "head_v_dim": 3, "conv_kernel_size": None}
    managers, handles = [], []
    for dtype, longest, fold_policy in (("float32", 3, policy), ("float64", 300, "eager")):
        config = make_config(
            **sizes, fold_policy=fold_policy, checkpoint_dtype=dtype, activation_dtype="float32", max_query_len=longest
        )
        # Slow decay: the longest memory, and so the most that rounding can gather.
        params = [dataclasses.replace(layer, dt_bias=layer.dt_bias - 6.0) for layer in make_params(config)]
        managers.append(StateManager(config, params))
        handles.append(managers[-1].admit("a"))

    def step(which: int, tensors: LayerInputs) -> None:
        step = managers[which].begin_step(StepMetadata(handles=(handles[which],), query_lens=(len(tensors.qkv),)))
        step.verify(0, tensors.qkv, tensors.raw_gate, tensors.raw_beta)
        step.defer(counts(len(tensors.qkv)))

    for block in range(num_blocks):
        inputs = make_inputs(managers[0].config, 300, seed=block)[0]
        for start in range(0, 300, 3):
            step(0, inputs[start : start + 3])
        step(1, inputs)
        if block % 10 == 9:
            got, wanted = (manager.read(handle, 0).recurrent for manager, handle in zip(managers, handles, strict=True))
            assert relative_error(got, wanted) < 1e-5
    assert managers[0].committed_len(handles[0]) == num_blocks * 300
    assert managers[0].counters().clamps == 0


@pytest.mark.parametrize("bound", [None, -5.0], ids=["softplus gate", "bounded gate"])
def test_the_strongest_gate_on_every_token_of_a_full_ring(bound: float | None) -> None:
    """Decays that leave nothing of what was: finite, and as exact as any other."""
    config = make_config(
        gate_lower_bound=bound,
        checkpoint_dtype="float32",
        activation_dtype="float32",
        record_capacity=20,
        max_query_len=4,
    )
    manager = make_manager(config)
    params = tuple(make_params(config))
    twin, handle = Twin(Oracle(config, params), config.num_layers), manager.admit("a")
    for seed, accepted in enumerate([4, 4, 4, 4, 4, 4]):
        step = manager.begin_step(StepMetadata(handles=(handle,), query_lens=(4,)))
        inputs = make_inputs(config, 4, seed)
        for tensors in inputs:
            tensors.raw_gate.fill_(1e4)
        wanted = twin.window(inputs)[1]
        for got, want in zip(verify_all(step, inputs), wanted, strict=True):
            assert got.isfinite().all()
            assert relative_error(got, want) < 1e-5
        step.defer(counts(accepted))
        twin.commit(inputs, accepted)
        twin.check(manager, handle, tolerance=1e-5)
        if seed == 3:
            assert pending_of(manager, handle) == 16  # one window short of a full ring


# -- digest, counters, parameters


def test_digest_is_of_ownership_and_lengths_alone() -> None:
    def walk(inputs_seed: int, **changes: Any) -> list[str]:
        config = make_config(**changes)
        manager = make_manager(config)
        digests = [manager.digest()]
        a = manager.admit("a")
        digests.append(manager.digest())
        b = manager.admit("b")
        for accepted in (2, 4):
            step = manager.begin_step(StepMetadata(handles=(b, a), query_lens=(4, 4)))
            verify_all(step, make_inputs(config, 8, inputs_seed))
            digests.append(manager.digest())
            step.defer(counts(accepted, 1))
            digests.append(manager.digest())
        manager.flush([a])
        digests.append(manager.digest())
        manager.release(b)
        digests.append(manager.digest())
        return digests

    first = walk(1)
    assert walk(2) == first
    assert walk(1, num_heads=1, head_k_dim=3, num_layers=1, conv_kernel_size=None) == first
    assert len(set(first)) == 7  # but for the two within a step, which changes nothing
    assert walk(1, fold_policy="eager") != first


@pytest.mark.parametrize("policy", POLICIES)
def test_digest_differs_by_each_of_its_parts(policy: str) -> None:
    story = Story(policy, requests=1)
    seen = {story.manager.digest()}
    story.manager.flush()
    seen.add(story.manager.digest())
    story.run(seed=1)
    seen.add(story.manager.digest())
    story.manager.release(story.handles[0])
    story.manager.admit("z")
    story.manager.admit("a")  # other slots, another generation
    seen.add(story.manager.digest())
    assert len(seen) == (3 if policy == "eager" else 4)  # under eager a flush changes nothing


def test_new_parameters_hold_from_the_next_step_on() -> None:
    story = Story(requests=2)
    story.manager.flush()
    params = make_params(story.config, seed=99)
    story.manager.set_params(params)
    for twin in story.twins:
        twin.oracle = Oracle(story.config, tuple(params))
    story.check()
    for seed in range(4):
        story.run(seed)


def test_new_parameters_after_releasing_everyone() -> None:
    story = Story(requests=2)
    step, _ = story.begin(4, 3)
    for handle in story.handles:
        story.manager.release(handle)
    story.manager.set_params(make_params(story.config, seed=99))
    assert step.is_open


def test_parameters_are_used_where_they_lie() -> None:
    config = make_config()
    params = make_params(config)
    manager, handle = StateManager(config, params), None
    handle = manager.admit("a")
    for layer in params:
        layer.dt_bias.add_(1.0)
    twin = Twin(Oracle(config, tuple(params)), config.num_layers)
    run_step(manager, [(handle, twin, 4, 3)], seed=1)


def test_reading_waits_for_no_one_and_changes_nothing() -> None:
    for policy in POLICIES:
        story = Story(policy, requests=2)
        step, inputs = story.begin(4, 3)
        for verified in (False, True):
            if verified:
                verify_all(step, inputs)
            before = fingerprint(story.manager, step)
            for handle in story.handles:
                story.manager.read(handle, 1)
                story.manager.committed_len(handle)
            story.manager.digest()
            story.manager.counters()
            assert story.manager.checkpoint_slots(story.handles).dtype is torch.int32
            assert fingerprint(story.manager, step) == before


def test_what_read_returns_is_a_copy() -> None:
    for steps in (0, 1):
        story = Story(requests=1, steps=steps)
        state = story.manager.read(story.handles[0], 0)
        state.recurrent.fill_(torch.nan)
        assert state.conv is not None
        state.conv.fill_(torch.nan)
        story.check()


@pytest.mark.parametrize("device", ["cpu", "cpu:0", torch.device("cpu"), torch.device("cpu", 0)], ids=str)
def test_device_by_any_name(device: Any) -> None:
    manager = make_manager(make_config(), device=device)
    assert manager.device == torch.device("cpu")
    manager.admit("a")


# -- check_integrity, rule by rule


def corrupt_cursor(column: int, value: int) -> Callable[[Story], None]:
    def corrupt(story: Story) -> None:
        storage_of(story.manager).cursors[story.handles[0].record_slot, column] = value

    return corrupt


def corrupt_layer(name: str, slot_of: Callable[[Story], int]) -> Callable[[Story], None]:
    def corrupt(story: Story) -> None:
        tensor = getattr(storage_of(story.manager).layers[1], name)
        tensor[slot_of(story)].view(-1)[3] += 1.0

    return corrupt


CORRUPTIONS: dict[str, tuple[Callable[[Story], None], str]] = {
    "record slot taken and free": (
        lambda s: s.manager._ledger.record_slots._free.append(s.handles[0].record_slot),
        r"record slots free and taken are .*, the pool has",
    ),
    "checkpoint slot lost": (
        lambda s: s.manager._ledger.checkpoint_slots._free.clear(),
        r"checkpoint slots free and taken are .*, the pool has",
    ),
    "checkpoint slot taken by no one": (
        lambda s: s.manager._ledger.checkpoint_slots.allocate() and None,
        r"checkpoint slots owned are \[1, 2\], taken are \[1, 2, 3\]",
    ),
    "two owners of a checkpoint slot": (
        lambda s: setattr(list(s.manager._requests)[1], "checkpoint_slot", 1),
        r"checkpoint slots owned are \[1, 1\], taken are \[1, 2\]",
    ),
    "the null slot owned": (
        lambda s: setattr(next(iter(s.manager._requests)), "checkpoint_slot", 0),
        r"checkpoint slots owned are \[0, 2\], taken are \[1, 2\]",
    ),
    "a request lost": (
        lambda s: s.manager._requests.remove(next(iter(s.manager._requests))),
        r"record slots owned are \[1\], taken are \[0, 1\]",
    ),
    "another generation on the device": (corrupt_cursor(2, 9), r"record slot 0 is of generation 9, its owner is .*'a'"),
    "pending beyond the ring": (corrupt_cursor(1, 17), r"'a'.*pending_len = 17 is outside 0\.\.16"),
    "pending negative": (corrupt_cursor(1, -1), r"'a'.*pending_len = -1 is outside 0\.\.16"),
    "position negative": (corrupt_cursor(0, -3), r"'a'.*checkpoint_len = -3 is negative"),
    "pending that the host does not know": (
        lambda s: setattr(next(iter(s.manager._requests)), "may_be_pending", False),
        r"'a'.*2 records are pending, the host knows of none",
    ),
    "a free slot with a cursor": (
        lambda s: storage_of(s.manager).cursors[2].copy_(torch.tensor([0, 0, 5, 0, 0, 0])),
        r"record slot 2 is free but its cursor is",
    ),
    "the scratch row with a cursor": (
        lambda s: storage_of(s.manager).cursors[-1, 1].fill_(1),
        r"scratch row's cursor is \[0, 1, 0, 0, 0, 0\]",
    ),
    "the null slot written": (corrupt_layer("recurrent", lambda s: 0), r"null slot was written in layer 1"),
    "the null slot's conv written": (corrupt_layer("conv", lambda s: 0), r"null slot was written in layer 1"),
    "bytes allocated beyond the plan": (
        lambda s: setattr(storage_of(s.manager), "allocated_bytes", 5),
        r"planned bytes are \d+, allocated are 5",
    ),
}


@pytest.mark.parametrize("name", CORRUPTIONS)
def test_integrity_finds(name: str) -> None:
    corrupt, message = CORRUPTIONS[name]
    story = Story("ring", requests=2, debug=False)
    story.manager.check_integrity()
    corrupt(story)
    with pytest.raises(SpecStateError, match=message):
        story.manager.check_integrity()


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("name", ["conv", "conv_ring"])
def test_integrity_finds_a_conv_history_of_another_position(name: str, policy: str) -> None:
    story = Story(policy, requests=2, debug=False)
    story.manager.flush()
    story.manager.check_integrity()
    slot = 1 if name == "conv" else 0
    tensor = getattr(storage_of(story.manager).layers[1], name)
    tensor[slot] += 1.0
    with pytest.raises(SpecStateError, match=r"layer 1: conv history of checkpoint slot 1 differs from the conv ring"):
        story.manager.check_integrity()


@pytest.mark.parametrize("again", [False, True], ids=["since admit", "of a request that ran"])
def test_debug_lets_a_slot_be_written_in_place_during_steps_of_others(again: bool) -> None:
    story = Story(requests=2)
    b = story.handles[1]
    if not again:
        story.manager.release(b)
        b = story.handles[1] = story.manager.admit("b")
    states = random_states(story.config, seed=7)
    slot = int(story.manager.checkpoint_slots([b])[0])
    step, inputs = story.begin(4)
    verify_layers(step, inputs, [0])
    for layer, (recurrent, conv) in enumerate(states):
        views = story.manager.checkpoints(layer)
        views[0][slot] = recurrent
        assert views[1] is not None and conv is not None
        views[1][slot] = conv
    verify_layers(step, inputs, [1])
    step.defer(counts(3))
    story.twins[0].commit(inputs, 3)
    run_step(story.manager, [(story.handles[0], story.twins[0], 4, 1)], seed=8)
    if not again:
        story.manager.check_integrity()
    story.manager.load(b, None, committed_len=6)
    story.twins[1] = load_twin(story.config, states, 6)
    story.check()
    story.run(seed=9)


def test_debug_refuses_a_step_over_a_slot_written_without_a_load() -> None:
    manager = make_manager()
    handle = manager.admit("a")
    conv = manager.checkpoints(1)[1]
    assert conv is not None
    conv[int(manager.checkpoint_slots([handle])[0])] = 1.0
    before = fingerprint(manager)
    with pytest.raises(SpecStateError, match="conv history of checkpoint slot 1 differs"):
        manager.begin_step(StepMetadata(handles=(handle,), query_lens=(2,)))
    assert fingerprint(manager) == before


@pytest.mark.parametrize("verb", ["commit", "defer"])
def test_debug_refuses_before_it_changes_anything(verb: str) -> None:
    """A breach found at the end of a step leaves the step open and the manager as it was; the ways out stay open."""
    story = Story(requests=2)
    step, inputs = story.begin(4, 3)
    verify_all(step, inputs)
    null = storage_of(story.manager).layers[1].recurrent[0, 0, 0]
    null[0] = 1.0
    before = fingerprint(story.manager, step)
    with pytest.raises(SpecStateError, match="null slot was written in layer 1"):
        getattr(step, verb)(counts(2, 3))
    assert fingerprint(story.manager, step) == before
    assert step.is_open
    null[0] = 0.0
    getattr(step, verb)(counts(2, 3))
    story.twins[0].commit(window(inputs, 0, 4), 2)
    story.twins[1].commit(window(inputs, 4, 7), 3)
    story.check()
    step, _ = story.begin(4, 3)
    null[0] = 1.0
    step.cancel()
    story.manager.release(story.handles[0])
    assert not step.is_open


@pytest.mark.parametrize("form", ["result", "its tensor", "other counts"])
@pytest.mark.parametrize("first_ends", [False, True])
def test_what_finishes_is_of_the_sample_handed_in(first_ends: bool, form: str) -> None:
    """Two samples of a step, one of which sees the end token: only the one that ends the step counts."""
    config = make_config()
    manager = make_manager(config)
    handle = manager.admit("a", SamplingParams(end_token_ids=(5,)))
    step = manager.begin_step(StepMetadata(handles=(handle,), query_lens=(3,)))
    verify_all(step, make_inputs(config, 3, seed=0))
    drafts, eye = torch.tensor([1, 2, 3]), torch.eye(8)
    ends, goes_on = eye[[5, 3, 4]], eye[[2, 3, 4]]
    first, second = (step.sample(logits, drafts) for logits in ((ends, goes_on) if first_ends else (goes_on, ends)))
    assert (first.finished.item(), second.finished.item()) == (first_ends, not first_ends)
    given = {"result": first, "its tensor": first.num_accepted, "other counts": first.num_accepted.clone()}[form]
    step.defer(given)
    finished = first_ends and form != "other counts"
    assert manager.committed_len(handle) == (1 if first_ends else 3)
    before = manager.committed_len(handle)
    step = manager.begin_step(StepMetadata(handles=(handle,), query_lens=(1,)))
    verify_all(step, make_inputs(config, 1, seed=1))
    step.defer(counts(1))
    assert manager.committed_len(handle) == before + (not finished)
    assert manager.counters().wasted_windows == finished


def test_a_draft_id_beyond_int32_is_no_other_token() -> None:
    config = make_config()
    manager = make_manager(config)
    handle = manager.admit("a", SamplingParams(end_token_ids=(2,)))
    metadata = StepMetadata(handles=(handle,), query_lens=(3,), min_accepted=(2,))
    step = manager.begin_step(metadata)
    verify_all(step, make_inputs(config, 3, seed=0))
    logits = torch.eye(8)[[3, 4, 5]]
    sample = step.sample(logits, torch.tensor([1, 2**32 + 3, 4]))
    assert sample.num_accepted.tolist() == [2]  # min_accepted, and no draft
    assert not step.sample(logits, torch.tensor([1, 2**32 + 2, 4])).finished.item()  # forced, and no end token
    assert step.sample(logits, torch.tensor([1, 3, 4])).num_accepted.tolist() == [3]


def test_debug_checks_at_every_step() -> None:
    for debug in (False, True):
        story = Story(requests=2, debug=debug)
        storage_of(story.manager).layers[1].recurrent[0, 0, 0, 0] = 1.0
        if not debug:
            story.begin(1, 1)
            continue
        with pytest.raises(SpecStateError, match="null slot was written in layer 1"):
            story.begin(1, 1)


@pytest.mark.parametrize("name", ["recurrent", "conv", "record_u", "conv_ring"])
def test_debug_finds_a_verify_that_writes_elsewhere(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rule 3: a verify writes its own rows' records and folds its own pending, nothing else."""
    story = Story(requests=2)
    step, inputs = story.begin(4)
    verify = reference.verify

    def stray(step_tensors: Any, layer: Any, *arguments: Any) -> None:
        verify(step_tensors, layer, *arguments)
        getattr(layer, name)[2 if name in ("recurrent", "conv") else 1] += 1.0

    before = fingerprint(story.manager, step)
    with monkeypatch.context() as patch:
        patch.setattr(reference, "verify", stray)
        with pytest.raises(SpecStateError, match=rf"verify of layer 0 \(step 1\) changed slot \d of {name}"):
            verify_layers(step, inputs, [0])
    assert fingerprint(story.manager, step) == before
    verify_all(step, inputs)
    step.defer(counts(3))
    story.twins[0].commit(inputs, 3)
    story.check()


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("top_k", 2**40),
        ("seed", 2**64),
        ("temperature", 1e39),
        ("temperature", -1.0),
        ("end_token_ids", tuple(range(9))),
    ],
)
def test_sampling_parameters_that_nobody_validated_are_refused(field: str, value: Any) -> None:
    manager = make_manager()
    with pytest.raises(ValueError, match=field):
        manager.admit("a", SamplingParams().model_copy(update={field: value}))
    assert manager.num_requests == 0 and manager.can_admit(manager.config.max_requests)


def test_sampling_parameters_belong_to_a_life() -> None:
    manager = make_manager()
    seed = 2**62 + 5
    a = manager.admit("a", SamplingParams(temperature=0.5, top_k=3, top_p=0.25, seed=seed, end_token_ids=(7, 9)))
    line, greedy = storage_of(manager).sampling[a.record_slot], [0, 0, 0, 0, 0] + [-1] * 8
    assert line[:2].view(torch.float32).tolist() == [0.5, 0.25] and line[2] == 3
    assert line[3:5].tolist() == [5, 2**30] and line[5:].tolist() == [7, 9] + [-1] * 6
    manager.release(a)
    assert line.tolist() == greedy
    assert manager.admit("b").record_slot == a.record_slot
    assert line[[0, 2, 3, 4]].tolist() == [0] * 4 and line[5:].tolist() == [-1] * 8
