"""Traces: what a recorder writes is what happened, and a damaged trace is refused in one clear line."""

import io
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from specstate import PrefixKey, SamplingParams, SpecStateError, StateManager, StepMetadata, TraceRecorder
from specstate.limits import INT32_MAX
from specstate.replay import replay_file
from specstate.trace import TraceError, read_trace, recorder
from specstate.trace.schema import EVENTS, BeginStep, Defer, Event, Flush
from tests.factories import make_config, make_inputs, make_params, verify_all

TRACES = Path(__file__).parent / "traces"
SHORT = TRACES / "class13_new_parameters_ring.jsonl"


def recorded(manager: StateManager) -> None:
    """Every kind of event once or more, on the reference."""
    a = manager.admit("a", SamplingParams(end_token_ids=(7,)))
    b = manager.admit("b")
    manager.load(a, None, 5)
    step = manager.begin_step(StepMetadata(handles=(a, b), query_lens=(4, 2)), pad_to=(3, 8))
    step.flush()
    step.flush()
    inputs = make_inputs(manager.config, 8, seed=1)
    step.verify(0, inputs[0].qkv, inputs[0].raw_gate, inputs[0].raw_beta)
    c = manager.admit("c")
    step.verify(1, inputs[1].qkv, inputs[1].raw_gate, inputs[1].raw_beta)
    step.defer(torch.tensor([3, -1, 9]), eager=torch.tensor([True, False, True]))
    manager.read(a, 1)
    step = manager.begin_step(StepMetadata(handles=(c,), query_lens=(1,)))
    step.cancel()
    step = manager.begin_step(StepMetadata(handles=(None, b), query_lens=(1, 3), row_kinds=("dummy", "decode")))
    verify_all(step, make_inputs(manager.config, 4, seed=2))
    step.commit(torch.tensor([2**40, 2**40]))
    manager.flush([a])
    manager.flush()
    manager.set_params(make_params(manager.config, seed=3))
    manager.release(b)
    [d] = manager.fork(a, ["d"])
    manager.preempt(c)
    handle_of_c = manager.resume("c")
    manager.retract(d)
    manager.discard("d")
    manager.fence("flush")
    manager.release(handle_of_c)
    manager.publish(a, key := PrefixKey("a's", manager.committed_len(a)))
    manager.release(manager.restore(key, "e"))
    manager.return_checkpoints(manager.reserve_checkpoints(1))
    manager.export(a, one := io.BytesIO())
    manager.snapshot(all_of_it := io.BytesIO())
    one.seek(0), all_of_it.seek(0)
    manager.import_request(one, "f")
    manager.fence("drop")
    manager.release_storage()
    manager.bind_storage()
    manager.recover(all_of_it)
    manager.digest()


def record(path: Path) -> list[dict[str, Any]]:
    with TraceRecorder(path, seed=11) as trace:
        recorded(StateManager(make_config(), make_params(make_config()), recorder=trace))
    return [json.loads(line) for line in path.read_text().splitlines()]


# -- recording


def test_a_recorder_writes_what_happened(tmp_path: Path) -> None:
    header, *events, end = record(tmp_path / "trace")
    assert header["seed"] == 11
    assert header["trace_version"] == 1
    assert header["config"] == make_config().model_dump(mode="json")
    kinds = (
        "admit admit load begin_step step_flush admit defer read begin_step cancel begin_step commit "
        "flush flush set_params release fork preempt resume retract discard fence "
        "release publish restore release reserve return export snapshot import fence release_storage bind_storage "
        "recover digest"
    ).split()
    assert [event["kind"] for event in events] == kinds
    assert end == {"kind": "end", "events": len(kinds)}
    assert set(kinds) == set(EVENTS)

    a = {"request_id": "a", "record_slot": 0, "generation": 1}
    assert events[0]["handle"] == a
    assert events[0]["checkpoint_slot"] == 1
    assert events[0]["sampling"]["end_token_ids"] == [7]
    assert events[2] == {"kind": "load", "handle": a, "committed_len": 5, "in_place": True}
    assert events[3]["pad_to"] == [3, 8]
    # One of two layers stood verified when "c" was admitted, both when the step ended.
    assert events[5]["verified"] == {"0": [1, 0]}
    # The padded row is cut; a count below 0 stands as 0, one above int32 as the largest.
    assert events[6] == {
        "kind": "defer", "verified": {"0": [2, 0]}, "step": 0, "num_accepted": [3, 0], "eager": [True, False],
    }  # fmt: skip
    assert events[9] == {"kind": "cancel", "step": 1}
    assert events[11]["num_accepted"] == [INT32_MAX, INT32_MAX]
    assert events[12]["handles"] == [a]
    assert "handles" not in events[13]
    d = {"request_id": "d", "record_slot": 1, "generation": 4}
    assert events[16].items() >= {"handle": a, "handles": [d], "checkpoint_slots": [2]}.items()
    assert events[16]["sampling"] == [{**events[0]["sampling"], "seed": 1}]
    assert events[17:20] == [
        {"kind": "preempt", "handle": {"request_id": "c", "record_slot": 2, "generation": 3}, "fold": False},
        {"kind": "resume", "handle": {"request_id": "c", "record_slot": 2, "generation": 5}, "checkpoint_slot": 3},
        {"kind": "retract", "handle": d},
    ]
    assert events[20:22] == [{"kind": "discard", "request_id": "d"}, {"kind": "fence", "mode": "flush"}]
    key = {"digest": "a's", "num_tokens": 8}
    assert events[23] == {"kind": "publish", "handle": a, "key": key, "checkpoint_slot": 3}
    assert events[24]["key"] == key
    assert events[28] == {"kind": "export", "handle": a, "fold": True}
    at_eight = {"checkpoint_len": 8, "pending_len": 0, "finished": False, "has_payload": True}
    assert events[30]["image"] == at_eight
    (entry,) = events[34]["requests"]
    assert entry["request_id"] == "a" and entry["image"] == at_eight
    assert events[34]["published"] == [{"key": key, "checkpoint_slot": 3}]


def test_a_recorded_run_replays(tmp_path: Path) -> None:
    record(tmp_path / "trace")
    for backend in ("reference", "metadata"):
        report = replay_file(tmp_path / "trace", backend=backend)
        assert report.first_difference is None
        assert report.events == 36


def test_reading_gives_back_what_was_written() -> None:
    for path in TRACES.glob("*.jsonl"):
        lines = path.read_text().splitlines()
        header, events = read_trace(path)
        assert header.model_dump_json() == lines[0]
        assert [event.model_dump_json(exclude_none=True) for event in events] == lines[1:-1]


def test_counts_are_taken_when_the_step_ends(tmp_path: Path) -> None:
    config = make_config()
    with TraceRecorder(tmp_path / "trace") as trace:
        manager = StateManager(config, None, backend="metadata", recorder=trace)
        step = manager.begin_step(StepMetadata(handles=(manager.admit("a"),), query_lens=(4,)))
        step.replayed("verify")
        counts, finished = torch.tensor([3]), [True]
        step.defer(counts, finished=finished)
        counts[0], finished[0] = 1, False
    _, events = read_trace(tmp_path / "trace")
    assert isinstance(events[-1], Defer)
    assert (events[-1].num_accepted, events[-1].finished) == ((3,), (True,))


def test_a_recorder_writes_to_a_file_of_the_callers(tmp_path: Path) -> None:
    text = io.StringIO()
    with TraceRecorder(text) as trace:
        StateManager(make_config(), None, backend="metadata", recorder=trace).admit("ä\n")
        assert len(text.getvalue().splitlines()) == 2  # at once, on a CPU
    path = tmp_path / "trace"
    path.write_text(text.getvalue(), encoding="utf-8")
    _, events = read_trace(path)
    assert events[0].handle.request_id == "ä\n"  # type: ignore[attr-defined]


def test_a_recorder_serves_one_manager(tmp_path: Path) -> None:
    trace = TraceRecorder(tmp_path / "trace")
    manager = StateManager(make_config(), None, backend="metadata", recorder=trace)
    with pytest.raises(SpecStateError, match="serves a manager already"):
        StateManager(make_config(), None, backend="metadata", recorder=trace)
    trace.close()
    trace.close()
    manager.admit("after the end")
    assert read_trace(tmp_path / "trace")[1] == ()
    unused = TraceRecorder(tmp_path / "unused")
    unused.close()
    with pytest.raises(SpecStateError, match="is closed"):
        StateManager(make_config(), None, backend="metadata", recorder=unused)


class FailingFile(io.StringIO):
    """Takes so many lines, then the disk is full."""

    name = "full"

    def __init__(self, lines: int) -> None:
        super().__init__()
        self.lines = lines

    def write(self, text: str) -> int:
        if not self.lines:
            raise OSError(28, "No space left on device")
        self.lines -= 1
        return super().write(text)


@pytest.mark.parametrize("lines", range(1, 12))
def test_a_file_that_fails_leaves_the_manager_whole(lines: int) -> None:
    trace = TraceRecorder(FailingFile(lines))
    manager = StateManager(make_config(), make_params(make_config()), recorder=trace)
    recorded(manager)
    manager.check_integrity()
    assert manager.num_requests == 1
    assert trace.failure == f"full: event {lines} could not be written: No space left on device"
    with pytest.raises(TraceError, match="No space left on device"):
        trace.close()


def test_a_file_that_fails_at_once_is_said_at_once(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="No space left"):
        StateManager(make_config(), None, backend="metadata", recorder=TraceRecorder(FailingFile(0)))
    for path in (tmp_path / "no" / "folder", tmp_path):
        with pytest.raises(TraceError, match="cannot be written"):
            TraceRecorder(path)


def test_an_error_inside_the_block_is_the_one_that_is_raised() -> None:
    def failing_run(error: Exception | None) -> None:
        with TraceRecorder(FailingFile(1)) as trace:
            StateManager(make_config(), None, backend="metadata", recorder=trace).admit("a")
            assert trace.failure is not None
            if error is not None:
                raise error

    with pytest.raises(KeyError, match="mine"):
        failing_run(KeyError("mine"))
    with pytest.raises(TraceError, match="No space left"):
        failing_run(None)


class FakeEvent:
    """Stands in for a CUDA event."""

    def __init__(self) -> None:
        self.passed = False

    def query(self) -> bool:
        return self.passed

    def synchronize(self) -> None:
        self.passed = True


def test_lines_keep_the_order_of_the_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    """A line waits for its counts, later ones wait behind it, and only close waits for the device."""
    right, copies = recorder._copy_to_host, []

    def copy_to_host(fields: dict[str, Any]) -> FakeEvent | None:
        right(fields)
        if "num_accepted" not in fields:
            return None
        copies.append(FakeEvent())
        return copies[-1]

    monkeypatch.setattr(recorder, "_copy_to_host", copy_to_host)
    text = io.StringIO()
    trace = TraceRecorder(text)
    manager = StateManager(make_config(), None, backend="metadata", recorder=trace)

    def kinds() -> list[str]:
        return [json.loads(line)["kind"] for line in text.getvalue().splitlines()]

    handles = [manager.admit("a"), manager.admit("b")]
    for handle in handles:
        step = manager.begin_step(StepMetadata(handles=(handle,), query_lens=(2,)))
        step.replayed("verify")
        step.defer([1])
    assert kinds() == ["header", "admit", "admit", "begin_step"]
    copies[1].passed = True
    manager.flush()
    assert kinds() == ["header", "admit", "admit", "begin_step"]
    copies[0].passed = True
    manager.release(handles[0])
    assert kinds() == ["header", "admit", "admit", *["begin_step", "defer"] * 2, "flush", "release"]
    step = manager.begin_step(StepMetadata(handles=(handles[1],), query_lens=(2,)))
    step.replayed("verify")
    step.defer([2])
    trace.close()
    assert kinds()[-3:] == ["begin_step", "defer", "end"]
    assert copies[2].passed


@pytest.mark.gpu
def test_counts_on_a_gpu_are_recorded_without_a_wait(tmp_path: Path) -> None:
    config = make_config(checkpoint_dtype="float32", activation_dtype="float32")
    with TraceRecorder(tmp_path / "trace") as trace:
        manager = StateManager(config, make_params(config, device="cuda"), device="cuda", recorder=trace)
        handle = manager.admit("a")
        for count in (3, 1, 4):
            step = manager.begin_step(StepMetadata(handles=(handle,), query_lens=(4,)), pad_to=3)
            verify_all(step, make_inputs(config, 4, seed=count, device="cuda"))
            counts = torch.tensor([count, 1, 1], device="cuda")
            torch.cuda.set_sync_debug_mode("error")
            try:
                step.defer(counts)
            finally:
                torch.cuda.set_sync_debug_mode("default")
            counts.zero_()
    _, events = read_trace(tmp_path / "trace")
    assert [event.num_accepted for event in events if isinstance(event, Defer)] == [(3,), (1,), (4,)]
    assert replay_file(tmp_path / "trace").ok


# -- damage


def refusal(path: Path, **options: Any) -> str:
    with pytest.raises(TraceError) as caught:
        read_trace(path, **options)
    text = str(caught.value)
    assert len(text.splitlines()) == 1
    assert len(text) < 600
    assert text.startswith(str(path))
    return text.removeprefix(str(path))


@pytest.fixture
def damaged(tmp_path: Path) -> Callable[[bytes], Path]:
    def write(data: bytes) -> Path:
        path = tmp_path / "damaged"
        path.write_bytes(data)
        return path

    return write


def test_a_trace_cut_anywhere_is_refused(damaged: Callable[[bytes], Path]) -> None:
    data = SHORT.read_bytes()
    header, whole = read_trace(SHORT)
    for size in range(len(data)):
        path = damaged(data[:size])
        refusal(path)
        if size < data.index(b"\n"):
            assert size == 0 or "line 1" in refusal(path, partial=True)
            continue
        kept_header, kept = read_trace(path, partial=True)
        assert kept_header == header
        lines = data[:size].count(b"\n")
        # A last line that lacks nothing but its newline counts.
        assert kept in (whole[: lines - 1], whole[:lines])


WRONG = (None, True, -1, 2**31, 2**63, 1.5, "x", "", [], {}, [1, 2, 3], {"a": 1}, float("nan"))


def leaves(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    yield path
    if isinstance(value, dict | list):
        for key, inner in value.items() if isinstance(value, dict) else enumerate(value):
            yield from leaves(inner, (*path, key))


def replaced(value: Any, path: tuple[Any, ...], wrong: Any) -> Any:
    if not path:
        return wrong
    copy = dict(value) if isinstance(value, dict) else list(value)
    copy[path[0]] = replaced(value[path[0]], path[1:], wrong)
    return copy


def stands_in(stated: Any, read: Any) -> bool:
    """Whether all that a line states is what was read; what it left out, or null in a field, may read as a default."""
    if isinstance(stated, dict):
        return all(value is None or stands_in(value, read[key]) for key, value in stated.items())
    if isinstance(stated, list):
        return len(stated) == len(read) and all(map(stands_in, stated, read))
    return bool(stated == read)


def test_every_wrong_value_is_refused_or_kept_as_it_is(damaged: Callable[[bytes], Path], tmp_path: Path) -> None:
    """In every place of every kind of line: nothing is turned into something else, nothing else is raised."""
    record(tmp_path / "trace")
    lines = (tmp_path / "trace").read_bytes().splitlines(keepends=True)
    refused = 0
    for index, line in enumerate(lines[:-1]):
        value = json.loads(line)
        for place in leaves(value):
            for wrong in WRONG:
                changed = replaced(value, place, wrong)
                path = damaged(b"".join([*lines[:index], json.dumps(changed).encode() + b"\n", *lines[index + 1 :]]))
                try:
                    header, events = read_trace(path)
                except TraceError:
                    refused += 1
                    continue
                read = header if index == 0 else events[index - 1]
                assert stands_in(changed, read.model_dump(mode="json"))
    assert refused > 2000


@pytest.mark.parametrize(
    ("kind", "change", "says"),
    [
        ("defer", {"num_accepted": [3, -1]}, "num_accepted.1 = -1: Input should be greater than or equal to 0"),
        ("defer", {"num_accepted": [2**31, 1]}, "num_accepted.0 = 2147483648: Input should be less than"),
        ("defer", {"num_accepted": "33"}, "num_accepted = '33': Input should be a valid"),
        ("defer", {"num_accepted": [3, 1.0]}, "num_accepted.1 = 1.0"),
        ("defer", {"finished": [True]}, "finished has 1 entries, num_accepted has 2"),
        ("defer", {"verified": {"0": [4, 0]}}, "verified[0] = 4 exceeds num_layers = 3"),
        ("defer", {"verified": {"0": [2, 3]}}, "more layers written than verified"),
        ("defer", {"verified": {"zero": [2, 1]}}, "verified.zero = 'zero'"),
        ("defer", {"more": 1}, "more = 1: Extra inputs are not permitted"),
        ("defer", {"kind": "postpone"}, "unknown event 'postpone'"),
        ("defer", {"kind": 3}, "is not an object with a kind"),
        ("defer", {"kind": "header"}, "trace_version is None, this reads 1"),
        ("defer", {"kind": "end"}, "events is missing"),
        ("begin_step", {"step": -1}, "step = -1"),
        ("begin_step", {"pad_to": [2**40, 1]}, "pad_to.0 = 1099511627776"),
        ("begin_step", {"metadata": {"handles": [None], "query_lens": [1]}}, "handles[0] = None must be given"),
        ("admit", {"checkpoint_slot": 0}, "checkpoint_slot = 0"),
        (
            "admit",
            {"handle": {"request_id": "a", "record_slot": -1, "generation": 1}},
            "record_slot = -1 is outside 0..",
        ),
        ("admit", {"handle": {"request_id": "a", "record_slot": 0, "generation": 0}}, "generation = 0 is outside 1.."),
        ("admit", {"handle": {"request_id": "a", "record_slot": 0}}, "handle.generation is missing"),
        ("admit", {"sampling": {"temperature": -1.0}}, "sampling.temperature = -1.0"),
    ],
)
def test_a_damaged_event_is_named(
    damaged: Callable[[bytes], Path], kind: str, change: dict[str, Any], says: str
) -> None:
    events = [json.loads(line) for line in SHORT.read_text().splitlines()]
    index = next(i for i, event in enumerate(events) if event["kind"] == kind)
    events[index].update(change)
    text = refusal(damaged("".join(json.dumps(event) + "\n" for event in events).encode()))
    assert text.startswith(f", line {index + 1}")
    assert says in text


@pytest.mark.parametrize(
    ("kind", "change", "says"),
    [
        ("fork", {"handles": []}, "handles = []: Tuple should have at least 1 item"),
        ("fork", {"checkpoint_slots": [2, 3, 4]}, "checkpoint_slots has 3 entries, handles has 1"),
        ("fork", {"checkpoint_slots": [0]}, "checkpoint_slots.0 = 0"),
        ("fork", {"sampling": []}, "sampling has 0 entries, handles has 1"),
        ("preempt", {"fold": 1}, "fold = 1"),
        ("resume", {"checkpoint_slot": 0}, "checkpoint_slot = 0"),
        ("discard", {"request_id": 3}, "request_id = 3"),
        ("fence", {"mode": "fold"}, "mode = 'fold'"),
    ],
)
def test_a_damaged_event_between_lives_is_named(
    damaged: Callable[[bytes], Path], tmp_path: Path, kind: str, change: dict[str, Any], says: str
) -> None:
    events = record(tmp_path / "trace")
    next(event for event in events if event["kind"] == kind).update(change)
    assert says in refusal(damaged("".join(json.dumps(event) + "\n" for event in events).encode()))


def test_lengths_are_checked_against_the_header(damaged: Callable[[bytes], Path]) -> None:
    data = SHORT.read_bytes()
    for found, put, says in (
        (b'"max_query_len":4', b'"max_query_len":2', "query_lens has 4, more than max_query_len = 2"),
        (b'"num_layers":3', b'"num_layers":2', "verified[0] = 3 exceeds num_layers = 2"),
        (b'"record_capacity":16', b'"record_capacity":3', "record_capacity = 3 is too small"),
        (b'"trace_version":1', b'"trace_version":2', "trace_version is 2, this reads 1"),
        (b'"trace_version":1,', b"", "trace_version is None, this reads 1"),
        (b'"seed":0', b'"seed":-1', "seed = -1"),
        (b'"kind":"header"', b'"kind":"admit"', "must be the header, not 'admit'"),
    ):
        assert says in refusal(damaged(data.replace(found, put)))
    written = TRACES / "class13_written_records_ring.jsonl"
    assert "layer = 9" in refusal(damaged(written.read_bytes().replace(b'"layer":1}', b'"layer":9}')))


def test_damaged_files_are_named(damaged: Callable[[bytes], Path], tmp_path: Path) -> None:
    data = SHORT.read_bytes()
    lines = data.splitlines(keepends=True)
    last = len(lines)
    body = b"".join(lines[:-1])
    for wrong, says in (
        (b"", ": is empty"),
        (b"\n", ", line 1 is not JSON"),
        (body, f", line {last - 1} is the last, and no end"),
        (body, "(--partial replays what there is)"),
        (body[:-9], "(--partial replays what there is)"),
        (data + lines[1], f", line {last + 1} comes after the end"),
        (data + b"\n", f", line {last + 1} comes after the end"),
        (data + lines[-1], f", line {last + 1} comes after the end"),
        (data + b"x", f", line {last + 1}"),
        (body + b'{"kind":"end","events":9}\n', "end counts 9 events, the trace has 15"),
        (lines[0] + data, ", line 2: unknown event 'header'"),
        (b"".join(lines[1:]), ", line 1 must be the header, not 'set_params'"),
        (lines[0] + b"\n" + b"".join(lines[1:]), ", line 2 is not JSON"),
        (lines[0] + b'{"kind":"\xff"}\n', ", line 2 is not UTF-8: byte 10"),
        (lines[0] + b"[" * 9000 + b"\n", ", line 2 is not JSON: recursion limit"),
        (lines[0] + b'{"kind":"flush"} {}\n', ", line 2 is not JSON: trailing"),
        (lines[0] + b'{"kind":"\\ud800"}\n', ", line 2 is not JSON"),
        (lines[0] + b"[1]\n", ", line 2 is not an object with a kind: [1]"),
        (b"\x1f\x8b\x08\x00 a compressed file\n", ", line 1 is not UTF-8"),
        (data.decode().encode("utf-16"), ", line 1 is not UTF-8"),
    ):
        assert says in refusal(damaged(wrong)), wrong[-60:]
    assert "cannot be read: No such file" in refusal(tmp_path / "missing")
    assert "cannot be read: Is a directory" in refusal(tmp_path)
    assert "cannot be read" in refusal(tmp_path / "nul\0")


def test_a_partial_trace_may_lack_its_end_and_no_more(damaged: Callable[[bytes], Path]) -> None:
    lines = SHORT.read_bytes().splitlines(keepends=True)
    assert len(read_trace(damaged(b"".join(lines[:-1])), partial=True)[1]) == 15
    assert len(read_trace(damaged(b"".join(lines[:5]) + b'{"kind":"\xc3'), partial=True)[1]) == 4
    assert len(read_trace(SHORT, partial=True)[1]) == 15
    assert "line 3 is not JSON" in refusal(damaged(lines[0] + lines[1] + b"{\n" + lines[2]), partial=True)
    assert "unknown event" in refusal(damaged(lines[0] + b'{"kind":"x"}'), partial=True)
    assert "is cut short: no header" in refusal(damaged(lines[0][:50]), partial=True)


def test_events_are_frozen_and_name_their_kind() -> None:
    for kind, model in EVENTS.items():
        assert issubclass(model, Event)
        assert model.model_fields["kind"].default == kind
        assert model.model_config["frozen"] and model.model_config["extra"] == "forbid"
    with pytest.raises(ValueError, match="frozen"):
        Flush().handles = ()  # type: ignore[misc]
    with pytest.raises(ValueError, match="add up to"):
        BeginStep(step=0, metadata=StepMetadata(handles=(None,) * 2, query_lens=(2**20, 1), row_kinds=("dummy",) * 2))
