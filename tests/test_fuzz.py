"""Damaged traces, configs, command lines and parameters: a clear refusal or a meaningful answer, and soon.

The command line is called in this process, so that whatever it lets through is seen: exit code 0 or 1 with its answer
on stdout, or 2 with one line on stderr. SPECSTATE_EXAMPLES asks for that many examples of each test.
"""

import functools
import io
import json
import math
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from specstate import (
    KDALayerSpec,
    LayerParams,
    SamplingParams,
    SpecStateError,
    StateConfig,
    StateManager,
    StepMetadata,
    plan_bytes,
)
from specstate.cli import error_text, main
from specstate.replay import model, replay_file
from specstate.trace import TraceError
from tests.factories import POLICIES, amount, make_config, make_inputs, make_params, make_twin, run_step, verify_all
from tests.test_trace import leaves, replaced

TRACES = Path(__file__).parent / "traces"
#: Short ones, and together every kind of event.
BASES = [
    "class02_counts_out_of_range_eager",
    "class04_preempted_deferred",
    "class05_padding_deferred",
    "class06_end_tokens_ring",
    "class08_forked_eager",
    "class09_model_convolves_deferred",
    "class13_fence_ring",
    "class13_new_parameters_ring",
    "class13_written_records_deferred",
]
#: No example may take longer; most take milliseconds.
LIMIT_S = 20


def examples(whole: int) -> settings:
    """A third of them in CI."""
    count = int(os.environ.get("SPECSTATE_EXAMPLES", amount(whole, whole // 3)))
    return settings(max_examples=count, suppress_health_check=list(HealthCheck))


@contextmanager
def soon(seconds: int = LIMIT_S) -> Iterator[None]:
    """Fails what takes longer, also when it never comes back."""

    def late(*_: object) -> None:
        pytest.fail(f"took longer than {seconds} s")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def command(*argv: str) -> tuple[int, str]:
    """Runs a command that must not crash; its exit code and what it said."""
    out, err = io.StringIO(), io.StringIO()
    with soon(), redirect_stdout(out), redirect_stderr(err):
        code = main(argv)
    said, complaint = out.getvalue(), err.getvalue()
    if code == 2:
        assert said == ""
        assert complaint.startswith("specstate")
        assert complaint.endswith("\n") and len(complaint.splitlines()) == 1
        assert len(complaint) < 1000 + sum(map(len, argv))
        return code, complaint
    assert code in (0, 1)
    assert complaint == ""
    return code, said


# -- values


#: Numbers at limits, around them, and beyond what any number type holds.
NUMBERS = st.one_of(
    st.integers(-3, 9),
    st.integers(0, 5),
    st.sampled_from([2**k + d for k in (8, 16, 20, 31, 32, 53, 63, 64) for d in (-1, 0, 1)]),
    st.sampled_from([-(2**31), -(2**63) - 1, 10**30, 10**400]),
    st.floats(),
)
JSON = st.recursive(
    st.none() | st.booleans() | NUMBERS | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=6), inner, max_size=4),
    max_leaves=8,
)
#: What json.dumps does not write: pieces of a line in place of a value.
PIECES = st.sampled_from(
    [
        "NaN", "-Infinity", "1e999", "-0", "01", "1.", "9" * 5000, "-" + "9" * 5000, "1e-9999", "'a'", "", ",", "}",
        "[" * 3000, "[" * 3000 + "]" * 3000, '{"a":' * 3000, '"\\ud800"', '"\\u0000"', '"\u2028"', '"a\x00"', "nul",
        '"' + "x" * 200_000 + '"', '{"kind":"admit","kind":"load"}', '"end"', '"header"',
    ]
)  # fmt: skip


@functools.cache
def base_lines(name: str) -> list[bytes]:
    return (TRACES / f"{name}.jsonl").read_bytes().splitlines(keepends=True)


@st.composite
def damaged_traces(draw: st.DrawFn) -> bytes:
    """A golden trace that tells another story, or is damaged, or both; its end may count right all the same."""
    lines = list(base_lines(draw(st.sampled_from(BASES))))
    stories, damages = draw(st.sampled_from([(1, 0), (1, 0), (2, 0), (3, 0), (0, 1), (1, 1), (0, 3)]))
    for _ in range(stories):
        lines = draw(st.sampled_from([move_lines, put_like, put_like, put_number]))(draw, lines)
    if draw(st.integers(0, 4)):
        end = {"kind": "end", "events": len(lines) - 2}
        lines = [*(line for line in lines if b'"kind":"end"' not in line), json.dumps(end).encode() + b"\n"]
    for _ in range(damages):
        lines = draw(st.sampled_from(DAMAGE))(draw, lines)
    return b"".join(lines)


def _place(draw: st.DrawFn, lines: list[bytes]) -> int:
    return draw(st.integers(0, max(len(lines) - 1, 0)))


def flip_bytes(draw: st.DrawFn, lines: list[bytes]) -> list[bytes]:
    data = bytearray(b"".join(lines))
    for _ in range(draw(st.integers(1, 4))):
        if data:
            data[draw(st.integers(0, len(data) - 1))] = draw(st.integers(0, 255))
    return [bytes(data)]


def cut(draw: st.DrawFn, lines: list[bytes]) -> list[bytes]:
    data = b"".join(lines)
    return [data[: draw(st.integers(0, len(data)))]]


def move_lines(draw: st.DrawFn, lines: list[bytes]) -> list[bytes]:
    """One is dropped, told twice, or changes places with another."""
    if not lines:
        return lines
    i, j, what = _place(draw, lines), _place(draw, lines), draw(st.sampled_from(["drop", "twice", "swap", "join"]))
    if what == "drop":
        return lines[:i] + lines[i + 1 :]
    if what == "twice":
        return [*lines[:j], lines[i], *lines[j:]]
    if what == "join":
        return [*lines[:i], lines[i].rstrip(b"\n"), *lines[i + 1 :]]
    lines[i], lines[j] = lines[j], lines[i]
    return lines


def put_like(draw: st.DrawFn, lines: list[bytes]) -> list[bytes]:
    """In place of a value another one of the same field, from anywhere in the trace."""
    i = draw(st.integers(1, len(lines) - 1))
    line = json.loads(lines[i])
    path = draw(st.sampled_from([path for path in leaves(line) if path] or [()]))
    values = []
    for other in map(json.loads, lines[1:]):
        values += [_at(other, there) for there in leaves(other) if there and path and there[-1] == path[-1]]
    return _with(lines, i, replaced(line, path, draw(st.sampled_from(values)))) if values else lines


def put_number(draw: st.DrawFn, lines: list[bytes]) -> list[bytes]:
    """Another number in place of one, in the header's config too."""
    i = _place(draw, lines)
    line = json.loads(lines[i])
    paths = [path for path in leaves(line) if type(_at(line, path)) in (int, float)]
    return _with(lines, i, replaced(line, draw(st.sampled_from(paths)), draw(NUMBERS))) if paths else lines


def _with(lines: list[bytes], i: int, line: Any) -> list[bytes]:
    return [*lines[:i], json.dumps(line, separators=(",", ":")).encode() + b"\n", *lines[i + 1 :]]


def _at(value: Any, path: tuple[Any, ...]) -> Any:
    for key in path:
        value = value[key]
    return value


def put_value(draw: st.DrawFn, lines: list[bytes]) -> list[bytes]:
    """Any JSON, or nearly JSON, in place of any value; the number of events stays right."""
    i = _place(draw, lines)
    try:
        line = json.loads(lines[i])
    except (IndexError, ValueError, RecursionError):
        return lines
    path = draw(st.sampled_from(list(leaves(line))))
    if draw(st.booleans()):
        text = json.dumps(replaced(line, path, draw(JSON)))
    else:
        text = json.dumps(replaced(line, path, "<here>")).replace('"<here>"', draw(PIECES))
    return [*lines[:i], text.encode("utf-8", "surrogatepass") + b"\n", *lines[i + 1 :]]


def put_key(draw: st.DrawFn, lines: list[bytes]) -> list[bytes]:
    """A key more, maybe one that is there already."""
    i = _place(draw, lines)
    if not lines or not lines[i].startswith(b"{"):
        return lines
    known = ["kind", "step", "verified", "handle", "layer", "pad_to", "more", "two\nlines", "x" * 100_000]
    key = draw(st.sampled_from(known) | st.text(max_size=4))
    value = json.dumps(draw(JSON))
    return [*lines[:i], b"{" + f"{json.dumps(key)}:{value},".encode() + lines[i][1:], *lines[i + 1 :]]


def put_line(draw: st.DrawFn, lines: list[bytes]) -> list[bytes]:
    line = draw(
        st.sampled_from([b"\n", b"\r\n", b"\xef\xbb\xbf", b"\xff\xfe\n", b"{}\n", b"null\n", b"x" * 100_000 + b"\n"])
        | st.binary(max_size=20)
    )
    i = _place(draw, lines)
    return [*lines[:i], line, *lines[i:]]


DAMAGE = [flip_bytes, cut, move_lines, put_value, put_value, put_value, put_key, put_line]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("fuzz")


@pytest.fixture
def few_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """Loads that a replay would recompute for minutes are refused as the far longer ones are."""
    monkeypatch.setattr(model, "MAX_LOADED_LEN", 300)


def replay(path: Path, **options: Any) -> int:
    """Any answer but a crash, in words and as JSON, and by the library's own call."""
    flags = [f"--{name.replace('_', '-')}" for name, value in options.items() if value is True]
    argv = ("replay", str(path), "--backend", options["backend"], *flags)
    code, said = command(*argv, "--json")
    if code == 2:
        with soon(), pytest.raises(TraceError) as refused:
            replay_file(path, **options)
        assert len(str(refused.value).splitlines()) == 1 and len(str(refused.value)) < 1000
    else:
        answer = json.loads(said)
        assert answer.keys() == {"ok", "events", "first_difference"}
        assert answer["ok"] == (answer["first_difference"] is None) == (code == 0)
    assert command(*argv)[0] == code
    return code


@examples(400)
@given(data=damaged_traces(), partial=st.booleans(), full_shape=st.booleans())
def test_damaged_traces_without_payloads(folder: Path, data: bytes, partial: bool, full_shape: bool) -> None:
    path = folder / "trace.jsonl"
    path.write_bytes(data)
    replay(path, backend="metadata", partial=partial, full_shape=full_shape)


@pytest.mark.usefixtures("few_tokens")
@examples(60)
@given(data=damaged_traces(), partial=st.booleans())
def test_damaged_traces_on_the_reference(folder: Path, data: bytes, partial: bool) -> None:
    path = folder / "trace.jsonl"
    path.write_bytes(data)
    replay(path, backend="reference", partial=partial)


def test_what_is_no_trace_at_all(tmp_path: Path) -> None:
    for name, data in {
        "empty": b"",
        "one newline": b"\n",
        "zeros": bytes(4096),
        "a long line": b'{"kind":"' + b"x" * 30_000_000,
        "many lines": b"{}\n" * 300_000,
        "deep": b"[" * 5_000_000 + b"\n",
        "an archive": b"PK\x03\x04" + bytes(range(256)) * 16,
    }.items():
        path = tmp_path / name
        path.write_bytes(data)
        assert command("replay", str(path))[0] == 2, name
        assert command("replay", str(path), "--partial")[0] == 2, name
    for path in (tmp_path, tmp_path / "missing", tmp_path / "empty" / "below", Path("nul\0"), Path("x" * 300)):
        assert command("replay", str(path))[0] == 2
    assert command("replay", "\udcff\ud800")[0] == 2


@pytest.mark.parametrize("encoding", ["ascii", "cp1252"])
def test_answers_that_the_terminal_cannot_show(encoding: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A request may be called anything: what stdout has no letters for is spelled out."""
    lines = b"".join(base_lines("class13_new_parameters_ring")).replace(b'"a"', '"\u65e5\u2028"'.encode())
    path = tmp_path / "trace.jsonl"
    path.write_bytes(lines.replace(b'"record_slot":0', b'"record_slot":1'))
    shown = io.BytesIO()
    monkeypatch.setattr("sys.stdout", io.TextIOWrapper(shown, encoding=encoding))
    assert main(["replay", str(path)]) == 1
    said = shown.getvalue().decode(encoding)
    assert r"request_id='\u65e5\u2028'" in said and len(said.splitlines()) == 1


# -- configs and plans

FIELDS: dict[str, st.SearchStrategy[Any]] = {
    "num_layers": NUMBERS,
    "max_requests": NUMBERS,
    "max_query_len": NUMBERS,
    "fold_policy": st.sampled_from([*POLICIES, "lazy"]),
    "record_capacity": NUMBERS | st.none(),
    "num_checkpoints": NUMBERS | st.none(),
    "checkpoint_dtype": st.sampled_from(["float32", "bfloat16", "float64", "float16"]),
    "activation_dtype": st.sampled_from(["float32", "bfloat16", "float64", "int8"]),
    "block_size": NUMBERS | st.none(),
    "memory_limit_bytes": NUMBERS | st.none(),
    "path": st.none() | st.text(max_size=4),
}
SPEC: dict[str, st.SearchStrategy[Any]] = {
    "num_heads": NUMBERS,
    "head_k_dim": NUMBERS,
    "head_v_dim": NUMBERS,
    "conv_kernel_size": NUMBERS | st.none(),
    "gate_lower_bound": NUMBERS | st.none(),
}


@st.composite
def config_fields(draw: st.DrawFn) -> dict[str, Any]:
    """A config that works, with some fields changed or left out; now and then any JSON in one of them."""
    fields: dict[str, Any] = make_config().model_dump()
    for of, strategies in ((fields, FIELDS), (fields["layer"], SPEC)):
        for name in draw(st.lists(st.sampled_from(list(strategies)), max_size=3)):
            what = draw(st.integers(0, 9))
            if what == 0:
                of.pop(name, None)
            else:
                of[name] = draw(JSON if what == 1 else strategies[name])
    if draw(st.integers(0, 9)) == 0:
        fields[draw(st.text(max_size=4))] = draw(JSON)
    return fields


@examples(300)
@given(fields=config_fields())
def test_configs_are_refused_or_plan(fields: dict[str, Any]) -> None:
    try:
        layer = KDALayerSpec(**fields["layer"]) if isinstance(fields.get("layer"), dict) else fields.get("layer")
        config = StateConfig(**{**fields, "layer": layer})
    except ValidationError as refused:
        error_text(refused)  # what the command line makes of it must not fail itself
        return
    plan = plan_bytes(config)
    assert plan.total_bytes == sum(tensor.total_bytes for tensor in plan.tensors) > 0
    assert plan.requests_in(plan.total_bytes) >= min(config.max_requests, config.num_checkpoints)
    assert StateConfig.model_validate_json(config.model_dump_json()) == config
    with soon():
        manager = StateManager(config, None, backend="metadata") if config.path is None else None
    assert manager is None or manager.can_admit()


@examples(150)
@given(value=JSON | config_fields())
@pytest.mark.parametrize("model", [StateConfig, KDALayerSpec, SamplingParams, StepMetadata])
def test_any_json_in_place_of_a_model(model: Any, value: Any) -> None:
    """As Python takes it, and as text: both refuse, or both read the same."""
    read = []
    for take in (model.model_validate, lambda given: model.model_validate_json(json.dumps(given))):
        try:
            read.append(take(value))
        except ValidationError as refused:
            error_text(refused)
            read.append(None)
    if read[0] is not None:  # text has no NaN, and lists where Python has tuples
        assert read[1] is None or read[1] == read[0]


ARGUMENTS = st.one_of(
    NUMBERS.map(str),
    st.text(max_size=6),
    st.sampled_from(["kimi-k3", "kimi-linear-48b", "float32", "float64", "bfloat16", "9" * 5000, "-", "--", "1e400"]),
)
PLAN_OPTIONS = (
    "--preset --num-layers --num-heads --head-k-dim --head-v-dim --conv-kernel-size --tp --max-query-len --memory-gib "
    "--checkpoint-dtype --activation-dtype --json --help-me"
).split()
WELL = {
    "--preset": st.sampled_from(["kimi-k3", "kimi-linear-48b"]),
    "--tp": st.sampled_from(["1", "2", "8", "96"]),
    "--num-layers": st.integers(1, 2**12).map(str),
    "--num-heads": st.integers(1, 2**16).map(str),
    "--memory-gib": st.floats(allow_nan=False).map(str),
    "--max-query-len": st.integers(1, 2**16).map(str),
}


@st.composite
def plan_arguments(draw: st.DrawFn) -> list[str]:
    """Options with values that are right more often than not, in any order, some of them twice."""
    shape = draw(st.sampled_from([["--preset"], ["--num-layers", "--num-heads"], []]))
    argv = []
    for name in [*shape, *draw(st.lists(st.sampled_from(PLAN_OPTIONS), max_size=4))]:
        value = draw(WELL[name] if name in WELL and draw(st.integers(0, 3)) else ARGUMENTS)
        argv += [name] if name == "--json" else [f"{name}={value}"] if draw(st.booleans()) else [name, value]
    return argv


@examples(150)
@given(argv=plan_arguments())
def test_plan_arguments(argv: list[str]) -> None:
    code, said = command("plan", *argv)
    assert code != 1
    if code == 0 and "--json" in argv:
        assert all(math.isfinite(size) for size in json.loads(said)["bytes_per_request"].values())


# -- parameters

VALUES = st.sampled_from([0.0, -1.0, 1.0, 90.0, -90.0, 1e30, -1e30, float("inf"), -float("inf"), float("nan")])
CONFIG = make_config(num_heads=1, head_k_dim=2, head_v_dim=2, conv_kernel_size=3, max_query_len=3)


@st.composite
def layer_params(draw: st.DrawFn) -> LayerParams:
    """Tensors that fit more often than not, of any value; some of another shape or dtype, or none."""
    good, fields = make_params(CONFIG)[0], {}
    for name in ("A_log", "dt_bias", "conv_weight", "conv_bias"):
        tensor, what = getattr(good, name), draw(st.integers(0, 11))
        if what == 0:
            shape = draw(st.lists(st.integers(0, 3), max_size=4))
            tensor = torch.zeros(shape, dtype=torch.float64)
        elif what == 1:
            tensor = tensor.to(draw(st.sampled_from([torch.float32, torch.float16, torch.int64, torch.complex64])))
        elif what == 2:
            tensor = draw(st.sampled_from([None, 0.0, [0.0], tensor.numpy()]))
        elif what < 6:
            tensor = tensor.clone()
            tensor.view(-1)[draw(st.integers(0, tensor.numel() - 1))] = draw(VALUES)
        elif what < 8:
            tensor = torch.full_like(tensor, draw(VALUES))
        fields[name] = tensor
    return LayerParams(**fields)


@examples(100)
@given(params=st.lists(layer_params(), min_size=1, max_size=3), policy=st.sampled_from(POLICIES), debug=st.booleans())
def test_parameters_are_refused_or_used(params: list[LayerParams], policy: str, debug: bool) -> None:
    """Whatever they make of a request's states, the slots are as good as new for the next one."""
    config = CONFIG.model_copy(update={"fold_policy": policy, "record_capacity": 6})
    if len(params) == 1:
        params = params * 2
    with soon():
        reason = ""
        try:
            manager = StateManager(config, params, debug=debug)
        except SpecStateError as refused:
            reason = str(refused) or "none given"
        if reason:
            assert any(name in reason for name in ("params", "A_log", "dt_bias", "conv_"))
            return
        for attempt in range(2):
            handle = manager.admit("a")
            for seed in range(3):
                step = manager.begin_step(StepMetadata(handles=(handle,), query_lens=(3,)))
                outputs = verify_all(step, make_inputs(config, 3, seed))
                assert all(output.shape == (3, 1, 2) for output in outputs)
                drafts = torch.zeros(3, dtype=torch.int64)
                logits = torch.cat([output.flatten(1) for output in outputs], 1)
                if debug:  # refuses logits that are NaN, which these parameters may well make
                    logits = logits.nan_to_num()
                sampled = step.sample(logits, drafts)
                assert 1 <= int(sampled.num_accepted[0]) <= 3 and 0 <= int(sampled.next_token[0]) < 4
                step.defer(sampled) if seed else step.cancel()
            manager.read(handle, attempt)
            manager.release(handle)
        manager.check_integrity()
        manager.set_params(make_params(config))
        run_step(manager, [(manager.admit("b"), make_twin(config), 3, 2)], seed=1)
