"""Ranges in a real profile: each call once, inside the caller's, closed whatever happens; none without a profiler."""

import inspect
import threading
from collections import Counter
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch.autograd.profiler_util import FunctionEvent
from torch.profiler import ProfilerActivity, profile, record_function

from specstate import StateManager, StepMetadata, StepOrderError
from specstate.metadata import Handle
from specstate.profiling import phase
from specstate.step import Step
from tests.factories import make_config, make_inputs, make_manager, verify_all

STEP_PHASES = ("flush", "verify", "write_records", "sample", "commit", "defer", "cancel", "replayed")
MANAGER_PHASES = ("begin_step", "flush", "fork", "preempt", "retract", "resume", "load")

VOCAB = 11


def ranges(work: Callable[[], Any], **options: Any) -> list[FunctionEvent]:
    """specstate's and this file's ranges in a profile of ``work``, by their start."""
    with profile(activities=[ProfilerActivity.CPU], **options) as profiled:
        work()
    events = [event for event in profiled.events() if event.name.startswith(("specstate::", "test::"))]
    return sorted(events, key=lambda event: event.time_range.start)


def names(work: Callable[[], Any]) -> list[str]:
    return [event.name for event in ranges(work)]


def begin(manager: StateManager, *handles: Handle) -> Step:
    return manager.begin_step(StepMetadata(handles=handles, query_lens=(4,) * len(handles)))


def verified(manager: StateManager, *handles: Handle) -> Step:
    step = begin(manager, *handles)
    verify_all(step, make_inputs(manager.config, 4 * len(handles), seed=1))
    return step


def sample(step: Step) -> Any:
    return step.sample(torch.randn(step.num_tokens, VOCAB), torch.zeros(step.num_tokens, dtype=torch.int32))


def decode(manager: StateManager, *handles: Handle) -> None:
    step = verified(manager, *handles)
    step.defer(sample(step))


# -- a step


def test_a_step_shows_each_call_once_inside_the_callers_range() -> None:
    manager = make_manager()
    a, b = manager.admit("a"), manager.admit("b")
    decode(manager, a, b)

    def work() -> None:
        with record_function("test::step"):
            decode(manager, a, b)

    outer, *inner = ranges(work)
    assert outer.name == "test::step"
    verifies = ["specstate::verify"] * manager.config.num_layers
    assert [event.name for event in inner] == [
        "specstate::begin_step",
        *verifies,
        "specstate::sample",
        "specstate::defer",
    ]
    assert all(event.cpu_parent is outer for event in inner)
    for before, after in pairwise(inner):
        assert before.time_range.end <= after.time_range.start


def test_what_torch_does_in_a_call_lies_in_its_range() -> None:
    manager = make_manager()
    a = manager.admit("a")
    with profile(activities=[ProfilerActivity.CPU]) as profiled:
        decode(manager, a)

    def phase_of(event: FunctionEvent) -> str:
        while event.cpu_parent is not None:
            event = event.cpu_parent
        return event.name

    inside = Counter(phase_of(event) for event in profiled.events() if event.name.startswith("aten::"))
    for name in ("begin_step", "verify", "sample", "defer"):
        assert inside[f"specstate::{name}"] > 0


def test_other_ends_of_a_step() -> None:
    manager = make_manager()
    a = manager.admit("a")
    step = verified(manager, a)
    counts = torch.tensor([2], dtype=torch.int32)
    assert names(lambda: step.commit(counts)) == ["specstate::commit"]
    step = verified(manager, a)
    assert names(step.cancel) == ["specstate::cancel"]
    step = begin(manager, a)
    assert names(step.flush) == ["specstate::step_flush"]
    spec = manager.config.layer
    records = (
        torch.zeros(4, spec.num_heads, spec.head_v_dim, dtype=torch.float64),
        torch.ones(4, spec.num_heads, spec.head_k_dim, dtype=torch.float64),
        torch.zeros(4, spec.num_heads, spec.head_k_dim, dtype=torch.float64),
        torch.zeros(4, spec.conv_channels, dtype=torch.float64),
    )
    assert names(lambda: step.write_records(0, *records)) == ["specstate::write_records"]
    manager = StateManager(make_config(), None, backend="metadata")
    step = begin(manager, manager.admit("a"))
    assert names(lambda: step.replayed("verify")) == ["specstate::replayed"]


def test_a_requests_transitions() -> None:
    manager = make_manager()
    a = manager.admit("a")
    decode(manager, a)
    assert names(manager.flush) == ["specstate::flush"]
    assert names(lambda: manager.load(a, None, committed_len=3)) == ["specstate::load"]
    assert names(lambda: manager.fork(a, ["b"])) == ["specstate::fork"]
    assert names(lambda: manager.preempt(a, fold=True)) == ["specstate::preempt"]
    assert names(lambda: manager.resume("a")) == ["specstate::resume"]
    (again,) = [request.handle for request in manager._requests if request.handle.request_id == "a"]
    assert names(lambda: manager.retract(again)) == ["specstate::retract"]


# -- when a range is opened, and closed


def test_nothing_is_recorded_while_no_profiler_is_on(monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[str] = []
    real = torch.autograd.profiler.record_function

    def spy(name: str) -> Any:
        opened.append(name)
        return real(name)

    monkeypatch.setattr(torch.autograd.profiler, "record_function", spy)
    manager = make_manager()
    a = manager.admit("a")
    decode(manager, a)
    with profile(activities=[ProfilerActivity.CPU]):
        pass
    decode(manager, a)
    assert opened == []
    with profile(activities=[ProfilerActivity.CPU]):
        decode(manager, a)
    assert len(opened) == 3 + manager.config.num_layers
    decode(manager, a)
    assert len(opened) == 3 + manager.config.num_layers


def test_an_error_passes_through_and_closes_its_range() -> None:
    manager = make_manager()
    a = manager.admit("a")
    step = verified(manager, a)

    def work() -> None:
        with record_function("test::outer"):
            with pytest.raises(StepOrderError, match="layer 0 has verified already"):
                verify_all(step, make_inputs(manager.config, 4, seed=1))
            step.cancel()
        with record_function("test::next"):
            pass

    outer, failed, cancelled, after = ranges(work)
    assert [event.name for event in (failed, cancelled)] == ["specstate::verify", "specstate::cancel"]
    assert failed.cpu_parent is outer
    assert cancelled.cpu_parent is outer
    assert after.cpu_parent is None


def test_a_profiler_of_all_threads_sees_every_one_of_them() -> None:
    @phase("specstate::here")
    def here() -> None:
        torch.ones(2)

    def work() -> None:
        here()
        thread = threading.Thread(target=here)
        thread.start()
        thread.join()

    everywhere = torch.profiler._ExperimentalConfig(profile_all_threads=True)
    events = ranges(work, experimental_config=everywhere)
    assert [event.name for event in events] == ["specstate::here"] * 2
    assert len({event.thread for event in events}) == 2


@pytest.mark.gpu
def test_ranges_are_nvtx_ranges_too(monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[str] = []
    real = torch.autograd.profiler.record_function

    def spy(name: str) -> Any:
        opened.append(name)
        return real(name)

    monkeypatch.setattr(torch.autograd.profiler, "record_function", spy)
    manager = make_manager(device="cuda")
    a = manager.admit("a")
    with torch.autograd.profiler.emit_nvtx():
        begin(manager, a)
    assert opened == ["specstate::begin_step"]


# -- what a decorated function still is


@pytest.mark.parametrize(
    "method",
    [*(getattr(Step, name) for name in STEP_PHASES), *(getattr(StateManager, name) for name in MANAGER_PHASES)],
    ids=lambda method: method.__qualname__,
)
def test_a_method_keeps_its_name_docstring_and_signature(method: Any) -> None:
    plain = inspect.unwrap(method)
    assert plain is not method
    assert (method.__doc__, method.__name__, method.__qualname__, method.__module__) == (
        plain.__doc__,
        plain.__name__,
        plain.__qualname__,
        plain.__module__,
    )
    assert plain.__doc__
    assert inspect.signature(method) == inspect.signature(plain)
    assert next(iter(inspect.signature(method).parameters)) == "self"


def test_arguments_and_result_pass_through() -> None:
    @phase("specstate::echo")
    def echo(*args: Any, **kwargs: Any) -> Any:
        return args, kwargs

    def check() -> None:
        value = object()
        assert echo(value, 2, name=value, call=3) == ((value, 2), {"name": value, "call": 3})

    check()
    assert names(check) == ["specstate::echo"]
