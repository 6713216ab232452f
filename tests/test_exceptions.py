"""Exceptions in the middle of a model's forward: after ``cancel`` every request stands where it stood before.

Between layers, inside a caller's own mixer, and inside the manager's calls, where any operation of torch may be the one
that finds no memory or is interrupted. What is left is compared with the oracle, and the requests go on.
"""

import functools
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from specstate import PrefixKey, StateManager, StepMetadata, TraceRecorder
from specstate.replay import replay_file
from specstate.step import Step
from tests.factories import (
    POLICIES,
    make_config,
    make_inputs,
    make_manager,
    make_params,
    make_twin,
    relative_error,
    run_step,
    verify_all,
)

QUERY_LENS = (3, 2)
LAYERS = 3


class FailAt(TorchDispatchMode):
    """In place of operation ``index`` of torch raises ``error``."""

    def __init__(self, index: int, error: BaseException) -> None:
        super().__init__()
        self._left, self._error = index, error

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self._left -= 1
        if self._left == -1:
            raise self._error
        return func(*args, **(kwargs or {}))


class Story:
    """Requests "a" and "b" with some tokens behind them and their twins, and an open step over both."""

    def __init__(self, policy: str, *, debug: bool = False, **changes: Any) -> None:
        sizes = {"num_layers": LAYERS, "num_heads": 1, "head_k_dim": 2, "head_v_dim": 3, "conv_kernel_size": 3}
        self.config = make_config(**{"fold_policy": policy, "max_query_len": 3, **sizes, **changes})
        self.manager = make_manager(self.config, debug=debug)
        self.handles = [self.manager.admit("a"), self.manager.admit("b")]
        self.twins = [make_twin(self.config) for _ in self.handles]
        self.go_on(0)
        self.begin(0)

    def begin(self, seed: int) -> None:
        self.inputs = make_inputs(self.config, sum(QUERY_LENS), 1000 + seed)
        self.step = self.manager.begin_step(StepMetadata(handles=tuple(self.handles), query_lens=QUERY_LENS))

    def verify(self, layer: int) -> torch.Tensor:
        tensors = self.inputs[layer]
        out = self.step.verify(layer, tensors.qkv, tensors.raw_gate, tensors.raw_beta)
        assert out is not None
        return out

    def go_on(self, seed: int) -> None:
        """A whole step, its outputs and all states checked against the oracle."""
        rows = [(handle, twin, 3, 2 + row % 2) for row, (handle, twin) in enumerate(self.rows())]
        run_step(self.manager, rows, seed=2000 + seed)

    def refill(self, seed: int) -> None:
        """A short step, so that something is pending again, and the next one begun."""
        inputs = make_inputs(self.config, 3, 3000 + seed)
        step = self.manager.begin_step(StepMetadata(handles=tuple(self.handles), query_lens=(2, 1)))
        verify_all(step, inputs)
        step.defer(torch.tensor([2, 1]))
        for twin, accepted, start in zip(self.twins, (2, 1), (0, 2), strict=True):
            twin.commit([tensors[start:] for tensors in inputs], accepted)
        self.begin(seed)

    def rows(self) -> list[tuple[Any, Any]]:
        return list(zip(self.handles, self.twins, strict=True))

    def check(self) -> None:
        for handle, twin in self.rows():
            twin.check(self.manager, handle)
        self.manager.check_integrity()


# -- in the caller's own code


def interrupt() -> None:
    """As Ctrl-C does."""
    signal.raise_signal(signal.SIGINT)


def fail(error: BaseException) -> Callable[[], None]:
    def raises() -> None:
        raise error

    return raises


FAILURES = {
    "error": (fail(RuntimeError("of the mixer")), RuntimeError),
    "no memory": (fail(torch.OutOfMemoryError("CUDA out of memory")), torch.OutOfMemoryError),
    "interrupt": (interrupt, KeyboardInterrupt),
    "exit": (fail(SystemExit(3)), SystemExit),
}


def forward(step: Step, story: Story, mixer: Callable[[int], None]) -> None:
    """A model whose layers each mix, verify and mix again; ``mixer`` is told how many mixers came before."""
    assert int(step.positions[0]) == int(step.committed_lens[0])  # as attention reads them
    for layer in range(LAYERS):
        mixer(2 * layer)
        story.verify(layer)
        mixer(2 * layer + 1)


#: A failure for each place: all of them under each policy, none always in the same place.
PLACES = [
    (policy, place, list(FAILURES)[(place + shift) % len(FAILURES)])
    for shift, policy in enumerate(POLICIES)
    for place in range(2 * LAYERS)
]


@pytest.mark.parametrize(("policy", "place", "failure"), PLACES)
def test_a_mixer_that_fails(policy: str, place: int, failure: str) -> None:
    story = Story(policy, debug=place % 2 == 0)
    what, error = FAILURES[failure]
    for attempt in range(2):  # the same window meets the same fate again
        with pytest.raises(error):
            forward(story.step, story, lambda index: what() if index == place else None)
        assert story.step.num_verified == (place + 1) // 2
        story.step.cancel()
        story.check()
        story.begin(attempt)
    forward(story.step, story, lambda index: None)
    story.step.defer(torch.tensor([3, 1]))
    for twin, accepted, start in zip(story.twins, (3, 1), (0, 3), strict=True):
        twin.commit([tensors[start : start + 3] for tensors in story.inputs], accepted)
    story.check()
    story.go_on(1)


@pytest.mark.parametrize("policy", POLICIES)
def test_the_same_window_after_a_failure_gives_the_same_outputs(policy: str) -> None:
    story = Story(policy)
    wanted = [twin.window([x[start : start + n] for x in story.inputs])[1] for twin, start, n in _windows(story)]
    with pytest.raises(RuntimeError):
        forward(story.step, story, lambda index: FAILURES["error"][0]() if index == 3 else None)
    story.step.cancel()
    story.begin(0)
    for layer, out in enumerate(verify_all(story.step, story.inputs)):
        assert relative_error(out, torch.cat([rows[layer] for rows in wanted])) < 1e-12
    story.step.cancel()
    story.check()


def _windows(story: Story) -> list[tuple[Any, int, int]]:
    starts = (0, QUERY_LENS[0])
    return list(zip(story.twins, starts, QUERY_LENS, strict=True))


@pytest.mark.parametrize("policy", POLICIES)
def test_a_request_may_be_released_in_place_of_the_cancel(policy: str) -> None:
    story = Story(policy)
    with pytest.raises(RuntimeError):
        forward(story.step, story, lambda index: FAILURES["error"][0]() if index == 3 else None)
    story.manager.release(story.handles.pop(0))
    story.twins.pop(0)
    story.step.cancel()
    story.check()
    story.handles.append(story.manager.admit("c"))  # into the slots that were left in the middle of a step
    story.twins.append(make_twin(story.config))
    story.go_on(1)
    story.check()


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("backend", ["reference", "metadata"])
def test_a_failed_forward_is_recorded_and_replays(backend: str, policy: str, tmp_path: Path) -> None:
    config = make_config(fold_policy=policy, num_layers=LAYERS)
    params = make_params(config) if backend == "reference" else None
    with TraceRecorder(tmp_path / "trace.jsonl") as recorder:
        manager = StateManager(config, params, backend=backend, recorder=recorder)  # type: ignore[arg-type]
        handles = (manager.admit("a"), manager.admit("b"))
        for failing in (None, 0, 1, 2, None):
            step = manager.begin_step(StepMetadata(handles=handles, query_lens=QUERY_LENS))
            try:
                for layer, x in enumerate(make_inputs(config, sum(QUERY_LENS), seed=1)):
                    if layer == failing:
                        raise RuntimeError("of the mixer")
                    step.verify(layer, *((x.qkv, x.raw_gate, x.raw_beta) if params else ()))
                step.defer(torch.tensor([2, 1]))
            except RuntimeError:
                step.cancel()
        manager.digest()
    report = replay_file(tmp_path / "trace.jsonl")
    assert report.ok, report.first_difference


# -- inside a call of the manager


def verify(layer: int, story: Story) -> None:
    story.verify(layer)


def write_records(layer: int, story: Story) -> None:
    """After ``step.flush``, with whatever records: none of them may count."""
    spec, tokens = story.config.layer, story.step.num_tokens
    u = torch.ones(tokens, spec.num_heads, spec.head_v_dim, dtype=torch.float64)
    key = torch.ones(tokens, spec.num_heads, spec.head_k_dim, dtype=torch.float64)
    story.step.write_records(layer, u, key, key, story.inputs[layer].qkv)


def sample(story: Story) -> None:
    tokens = story.step.num_tokens
    story.step.sample(torch.zeros(tokens, 4), torch.zeros(tokens, dtype=torch.int64))


#: What has verified before the call, whether the step was flushed, and the call in which an operation fails.
CALLS: dict[str, tuple[list[int], bool, Callable[[Story], None]]] = {
    "the first verify": ([], False, functools.partial(verify, 1)),
    "the last verify": ([1], False, functools.partial(verify, 0)),
    "write_records": ([0], True, functools.partial(write_records, 1)),
    "sample": ([0, 1], False, sample),
}


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("debug", [False, True], ids=["", "debug"])
@pytest.mark.parametrize("call", CALLS)
def test_any_operation_may_fail(call: str, debug: bool, policy: str) -> None:
    """Operations of torch in turn, as a Python loop sees them: each of the last ones, which write, some of the others.

    Under debug the check behind a verify is among them.
    """
    verified, flushed, act = CALLS[call]
    story = Story(policy, debug=debug, num_layers=2)
    total = _operations(story, verified, flushed, act)
    # Only "deferred" writes checkpoints in a verify, so only there a write may be left without its mark.
    writing = 36 if policy == "deferred" and "verify" in call and not debug else 6
    failed = 0
    for index in [*range(index_of(call, policy) % 13, total - writing, 13), *range(total - writing, total)]:
        _prepare(story, verified, flushed)
        failed += _fails(functools.partial(act, story), index, (MemoryError, KeyboardInterrupt)[index % 2]())
        story.step.cancel()
        story.check()
        story.refill(index)
    assert failed > writing
    story.step.cancel()
    story.go_on(1)


def index_of(call: str, policy: str) -> int:
    """So that cases look at other operations."""
    return 4 * list(CALLS).index(call) + POLICIES.index(policy)


def _prepare(story: Story, verified: list[int], flushed: bool) -> None:
    if flushed:
        story.step.flush()
    for layer in verified:
        story.verify(layer)


def _operations(story: Story, verified: list[int], flushed: bool, act: Callable[[Story], None]) -> int:
    """Operations in the call, told by one that goes through; one or the other depends on where a ring wraps."""
    count = FailAt(-1, AssertionError())
    _prepare(story, verified, flushed)
    with count:
        act(story)
    story.step.cancel()
    story.refill(0)
    return -1 - count._left


def _fails(act: Callable[[], Any], index: int, error: BaseException) -> bool:
    """Whether the call has an operation ``index``, in place of which ``error`` is raised."""
    try:
        with FailAt(index, error):
            act()
    except type(error):
        return True
    return False


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("call", ["begin_step", "read", "committed_len"])
def test_any_operation_of_what_changes_no_state_may_fail(call: str, policy: str) -> None:
    story = Story(policy, num_layers=2)
    story.step.cancel()
    acts: dict[str, Callable[[], Any]] = {
        "begin_step": lambda: story.begin(0),
        "read": lambda: story.manager.read(story.handles[0], 1),
        "committed_len": lambda: story.manager.committed_len(story.handles[0]),
    }
    index = 0
    while _fails(acts[call], index, MemoryError()):
        story.check()
        index += 1
    assert index > 0
    if call == "begin_step":  # the last one went through
        story.step.cancel()
    story.go_on(1)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("verified", [[], [1], [0, 1]], ids=["none", "one layer", "all layers"])
def test_a_release_that_fails_in_an_open_step_is_called_again(verified: list[int], policy: str) -> None:
    index, failed = 0, True
    while failed:
        story = Story(policy, num_layers=2)
        _prepare(story, verified, flushed=False)
        handle, _ = story.handles.pop(0), story.twins.pop(0)
        failed = _fails(functools.partial(story.manager.release, handle), index, KeyboardInterrupt())
        if failed:
            story.manager.release(handle)
        for layer in {0, 1} - set(verified):
            story.verify(layer)
        story.step.defer(torch.tensor([1, 2]))
        story.twins[0].commit([tensors[3:] for tensors in story.inputs], 2)
        assert story.manager.counters().dropped_ends == 1
        story.check()
        story.handles.append(story.manager.admit("c"))
        story.twins.append(make_twin(story.config))
        story.go_on(1)
        index += 1
    assert index > 2


@pytest.mark.parametrize("policy", POLICIES)
def test_an_admit_that_fails_takes_no_slot(policy: str) -> None:
    story = Story(policy, max_requests=3)
    story.step.cancel()
    index = 0
    while _fails(lambda: story.manager.admit("c"), index, MemoryError()):
        story.check()
        assert story.manager.can_admit(1) and not story.manager.can_admit(2)
        index += 1
    assert index > LAYERS and not story.manager.can_admit()
    story.check()


#: What takes checkpoint slots beside an admit, and how many, of requests that stand at 10 and at 9.
TAKES: dict[str, tuple[Callable[[StateManager, list[Any]], Any], int]] = {
    "publish what is committed": (lambda m, handles: m.publish(handles[0], PrefixKey("new", 10)), 1),
    "publish a boundary": (lambda m, handles: m.publish(handles[0], PrefixKey("new", 9)), 0),
    "restore": (lambda m, handles: m.restore(PrefixKey("old", 2), "new"), 1),
    "fork": (lambda m, handles: m.fork(handles[0], ["new"]), 1),
    "a window that may cross": (
        lambda m, handles: m.begin_step(StepMetadata(handles=(handles[1],), query_lens=(3,))),
        1,
    ),
}


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("verb", TAKES)
def test_what_fails_takes_no_slot(verb: str, policy: str) -> None:
    """With a published prefix, which nobody needs to give up here, and boundary checkpoints of both requests."""
    act, takes = TAKES[verb]
    story = Story(policy, max_requests=4, num_checkpoints=8, num_layers=2, block_size=3)
    story.manager.publish(story.handles[0], PrefixKey("old", 2))
    story.step.cancel()
    rows = story.rows()
    for seed, counts in enumerate(((3, 3), (3, 2), (2, 1))):
        run_step(story.manager, [(*row, 3, n) for row, n in zip(rows, counts, strict=True)], seed=4000 + seed)
    assert [twin.committed_len for twin in story.twins] == [10, 9]
    # What the second has at its boundary is handed over, so that it needs another slot.
    story.manager.publish(story.handles[1], PrefixKey("handed over", 9))
    before, index = story.manager.metrics(), 0
    while _fails(lambda: act(story.manager, story.handles), index, (MemoryError, KeyboardInterrupt)[index % 2]()):
        story.check()
        assert story.manager.metrics() == before
        index += 1 if policy == "ring" else 3  # which has no say in most of them
    assert index > 0
    story.check()
    assert story.manager.metrics().checkpoint_slots_in_use == before.checkpoint_slots_in_use + takes
    if "window" in verb:
        story.manager._requests.of(story.handles[1]).open_step.cancel()  # type: ignore[union-attr]
    story.go_on(1)
