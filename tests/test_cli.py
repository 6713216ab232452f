"""The command line: exit codes, one line on stderr, nothing but one object on stdout under --json."""

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import pytest

from specstate import SpecStateError, plan_bytes
from specstate.cli import CHECK_FAILED, main
from specstate.presets import KIMI_K3

PLAN_K3 = ["plan", "--preset", "kimi-k3", "--tp", "8", "--max-query-len", "8", "--memory-gib", "80"]
COLUMNS = ["snapshot", "eager", "deferred", "ring"]


def refusal(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    """Runs a command that must be refused; returns its one line."""
    assert main(argv) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.endswith("\n")
    assert captured.err.count("\n") == 1
    return captured.err


def run(*argv: str, cwd: Path | None = None, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "specstate.cli", *argv],
        cwd=cwd,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def test_plan_json_agrees_with_the_plan(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*PLAN_K3, "--json"]) == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    report = json.loads(captured.out)
    assert list(report["bytes_per_request"]) == list(report["max_requests"]) == COLUMNS
    for policy in COLUMNS[1:]:
        plan = plan_bytes(KIMI_K3.config(tp=8, max_query_len=8, max_requests=1, fold_policy=policy))
        assert report["bytes_per_request"][policy] == plan.bytes_per_request
        assert report["overhead_bytes"][policy] == plan.overhead_bytes
        assert report["max_requests"][policy] == (80 * 2**30 - plan.overhead_bytes) // plan.bytes_per_request
        assert report["record_capacity"][policy] == {"eager": 8, "deferred": 16, "ring": 32}[policy]
    assert report["bytes_per_request"]["snapshot"] == plan.snapshot_bytes_per_request
    assert report["checkpoint_bytes_per_request"] == plan.checkpoint_bytes_per_request
    mib = [round(size / 2**20, 1) for size in report["bytes_per_request"].values()]
    assert mib == [462.5, 66.7, 73.2, 86.2]


@pytest.mark.parametrize("conv", ["0", "4"])
@pytest.mark.parametrize("window", ["1", "5"])
def test_plan_columns_add_up(capsys: pytest.CaptureFixture[str], conv: str, window: str) -> None:
    shape = ["--num-layers", "3", "--num-heads", "4", "--head-k-dim", "16", "--conv-kernel-size", conv]
    assert main(["plan", *shape, "--tp", "2", "--max-query-len", window, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["num_heads"], report["head_k_dim"], report["head_v_dim"]) == (2, 16, 16)
    assert report["conv_kernel_size"] == (4 if conv == "4" else None)
    for column in COLUMNS:
        assert sum(report["tensor_bytes_per_request"][column].values()) == report["bytes_per_request"][column]


def test_plan_table_shows_every_tensor_and_the_requests(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(PLAN_K3) == 0
    lines = capsys.readouterr().out.splitlines()
    cells = {line.split("  ")[0]: line for line in lines}
    assert lines[0].startswith("kimi-k3, 8-way tensor parallel, one rank: 69 KDA layers, 12 heads")
    assert cells["per request"].split()[2:] == COLUMNS
    for tensor in plan_bytes(KIMI_K3.config(tp=8, max_query_len=8, max_requests=1)).tensors:
        assert (tensor.name in cells) == (tensor.scope != "manager")
    assert cells["recurrent"].split()[1:] == ["414.00", "MiB"] + ["51.75", "MiB"] * 3
    assert cells["total"].split()[1::2] == ["462.52", "66.73", "73.23", "86.22"]
    main([*PLAN_K3, "--json"])
    fits = json.loads(capsys.readouterr().out)["max_requests"]
    assert cells["requests in 80 GiB"].split()[4:] == [str(fits[column]) for column in COLUMNS]
    table = lines[2:]
    assert len({len(line) for line in table}) == 1


def test_plan_follows_the_dtypes(capsys: pytest.CaptureFixture[str]) -> None:
    states = {}
    for dtype in ("bfloat16", "float32", "float64"):
        assert main([*PLAN_K3, "--checkpoint-dtype", dtype, "--activation-dtype", "float16", "--json"]) == 0
        report = json.loads(capsys.readouterr().out)
        assert (report["checkpoint_dtype"], report["activation_dtype"]) == (dtype, "float16")
        states[dtype] = report["tensor_bytes_per_request"]["eager"]["recurrent"]
    assert states["float64"] == 2 * states["float32"] == 4 * states["bfloat16"]


def test_plan_in_too_little_memory_fits_none(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--preset", "kimi-k3", "--memory-gib", "1e-9", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["memory_bytes"] == 1
    assert set(report["max_requests"].values()) == {0}


@pytest.mark.parametrize("memory", ["0", "-1", "nan", "inf", "-inf", "1e308"])
def test_plan_refuses_memory_that_is_no_size(capsys: pytest.CaptureFixture[str], memory: str) -> None:
    assert "memory_gib = " in refusal(capsys, "plan", "--preset", "kimi-k3", f"--memory-gib={memory}")


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        ("plan", "--preset NAME, or --num-layers N and --num-heads N"),
        ("plan --num-layers 4", "--preset NAME, or"),
        ("plan --preset kimi-k4", "preset = 'kimi-k4' is unknown"),
        ("plan --preset kimi-k3 --tp 7", "tp = 7 cannot split kimi-k3: its 96 heads"),
        ("plan --preset kimi-k3 --tp 0", "argument --tp: 0 is outside 1.."),
        ("plan --preset kimi-k3 --tp two", "argument --tp: 'two' is not a whole number"),
        ("plan --preset kimi-k3 --max-query-len 0", "argument --max-query-len: 0 is outside 1.."),
        ("plan --preset kimi-k3 --max-query-len 99999999999", "argument --max-query-len: 99999999999 is outside"),
        ("plan --preset kimi-k3 --memory-gib much", "argument --memory-gib"),
        ("plan --preset kimi-k3 --num-heads 4", "--preset and --num-heads exclude each other"),
        ("plan --preset kimi-k3 --activation-dtype float64", "activation_dtype = 'float64' needs"),
        ("plan --preset kimi-k3 --checkpoint-dtype int8", "argument --checkpoint-dtype: invalid choice: 'int8'"),
        ("plan --num-layers 1 --num-heads 1 --conv-kernel-size 1", "conv_kernel_size = 1: "),
        ("plan --pre kimi-k3", "unrecognized arguments: --pre kimi-k3"),
        ("", "required: COMMAND"),
        ("schedule", "invalid choice: 'schedule'"),
        ("replay", "required: FILE"),
        ("demo --window 0", "argument --window: 0 is outside 1.."),
    ],
)
@pytest.mark.parametrize("as_json", [False, True], ids=["text", "json"])
def test_bad_input_gets_one_line(capsys: pytest.CaptureFixture[str], argv: str, says: str, as_json: bool) -> None:
    line = refusal(capsys, *argv.split(), *(["--json"] if as_json and argv else []))
    assert line.startswith("specstate")
    assert says in line


DEMO = """
import neighbour

def run(options):
    o = options
    print(o.json, o.drafter, o.policy, o.window, o.max_bytes, o.prompt, o.dtype, neighbour.NAME)
    return 1 if o.prompt == "bad" else 0
"""


@pytest.fixture
def examples(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "examples"
    folder.mkdir()
    (folder / "demo.py").write_text(DEMO)
    (folder / "neighbour.py").write_text("NAME = 'beside'\n")
    (folder / "decode.py").touch()
    (folder / "drafters.py").touch()
    (folder / "weights").mkdir()
    (folder / "weights" / "model.json").touch()
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "demo", raising=False)
    monkeypatch.delitem(sys.modules, "neighbour", raising=False)
    return folder


def test_demo_runs_the_examples_with_its_options(capsys: pytest.CaptureFixture[str], examples: Path) -> None:
    assert main(["demo", "--examples", str(examples)]) == 0
    assert capsys.readouterr().out == "False ngram ring 8 256 9 float32 beside\n"
    options = "--json --drafter model --policy eager --window 4 --max-bytes 9 --prompt bad --dtype float64".split()
    assert main(["demo", "--examples", str(examples), *options]) == CHECK_FAILED
    assert capsys.readouterr().out == "True model eager 4 9 bad float64 beside\n"


def test_demo_looks_beside_the_package_then_here(
    capsys: pytest.CaptureFixture[str], examples: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    elsewhere = examples.parent / "site-packages" / "specstate" / "__init__.py"
    monkeypatch.setattr("specstate.__file__", str(elsewhere))
    monkeypatch.chdir(examples.parent)
    assert main(["demo"]) == 0
    assert capsys.readouterr().out.endswith("beside\n")

    monkeypatch.chdir(examples)
    line = refusal(capsys, "demo")
    assert "--examples DIR" in line
    assert str(elsewhere.parent.parent / "examples") in line

    monkeypatch.setattr("specstate.__file__", str(examples.parent / "specstate" / "__init__.py"))
    assert main(["demo"]) == 0


def test_demo_says_which_folder_has_no_demo(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    line = refusal(capsys, "demo", "--json", "--examples", str(tmp_path))
    assert str(tmp_path) in line
    assert "--examples DIR" in line


def test_demo_is_not_any_file_of_that_name(capsys: pytest.CaptureFixture[str], examples: Path) -> None:
    (examples / "weights" / "model.json").unlink()
    assert str(examples) in refusal(capsys, "demo", "--examples", str(examples))


def test_demo_names_the_extra_that_is_missing(
    capsys: pytest.CaptureFixture[str], examples: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("specstate.cli.DEMO_PACKAGES", ("a_package_nobody_has",))
    line = refusal(capsys, "demo", "--examples", str(examples))
    assert "a_package_nobody_has" in line
    assert "specstate[demo]" in line
    assert "--examples DIR" in line


@pytest.mark.parametrize(
    ("statement", "code"),
    [
        ("raise KeyboardInterrupt", 130),
        ("raise BrokenPipeError", 141),
        ("raise FileNotFoundError(2, 'No such file', 'prompt.txt')", 2),
        ("import specstate; raise specstate.SpecStateError('one\\n  two')", 2),
    ],
)
def test_demo_ends_without_a_traceback(
    capfd: pytest.CaptureFixture[str], examples: Path, statement: str, code: int
) -> None:
    (examples / "demo.py").write_text(f"def run(options):\n    {statement}\n")
    assert main(["demo", "--examples", str(examples)]) == code
    err = capfd.readouterr().err
    assert "Traceback" not in err
    assert err.count("\n") == (1 if code == 2 else 0)


def test_demo_lets_a_fault_of_its_own_be_seen(examples: Path) -> None:
    (examples / "demo.py").write_text("def run(options):\n    raise ZeroDivisionError\n")
    with pytest.raises(ZeroDivisionError):
        main(["demo", "--examples", str(examples)])


@dataclass
class Difference:
    event: int
    kind: str
    what: str


@dataclass
class Report:
    ok: bool
    events: int
    first_difference: Difference | None


@pytest.fixture
def replays(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Path, dict[str, object]]]:
    """Stands in for specstate.replay: the outcome is chosen by the file's name."""
    calls: list[tuple[Path, dict[str, object]]] = []

    def replay_file(path: Path, **options: object) -> Report:
        calls.append((path, options))
        if path.name == "damaged":
            raise SpecStateError("line 3: unknown event 'x'")
        if path.name == "differs":
            return Report(False, 9, Difference(4, "defer", "state of a, layer 1"))
        return Report(True, 9, None)

    module = ModuleType("specstate.replay")
    module.replay_file = replay_file  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "specstate.replay", module)
    return calls


def test_replay_passes_its_options_on(
    capsys: pytest.CaptureFixture[str], replays: list[tuple[Path, dict[str, object]]]
) -> None:
    assert main(["replay", "good"]) == 0
    assert capsys.readouterr().out == "9 events replayed, no difference\n"
    assert main(["replay", "good", "--partial", "--full-shape", "--backend", "reference"]) == 0
    assert replays == [
        (Path("good"), {"partial": False, "full_shape": False, "backend": "reference"}),
        (Path("good"), {"partial": True, "full_shape": True, "backend": "reference"}),
    ]


@pytest.mark.usefixtures("replays")
def test_replay_reports_the_first_difference(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["replay", "differs"]) == CHECK_FAILED
    assert capsys.readouterr().out == "first difference at event 4 (defer): state of a, layer 1\n"
    assert main(["replay", "differs", "--json"]) == CHECK_FAILED
    captured = capsys.readouterr()
    assert captured.err == ""
    assert json.loads(captured.out) == {
        "ok": False,
        "events": 9,
        "first_difference": {"event": 4, "kind": "defer", "what": "state of a, layer 1"},
    }
    assert main(["replay", "good", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"ok": True, "events": 9, "first_difference": None}


@pytest.mark.usefixtures("replays")
def test_replay_refuses_a_damaged_trace(capsys: pytest.CaptureFixture[str]) -> None:
    assert refusal(capsys, "replay", "damaged") == "specstate replay: line 3: unknown event 'x'\n"


def test_version_and_help_go_to_stdout() -> None:
    version, usage = run("--version"), run("plan", "--help")
    assert (version.returncode, usage.returncode) == (0, 0)
    assert version.stdout.startswith("specstate ")
    assert "--memory-gib" in usage.stdout
    assert version.stderr == usage.stderr == ""


def test_the_process_ends_with_the_exit_code() -> None:
    refused = run("plan", "--preset", "kimi-k3", "--tp", "7")
    assert refused.returncode == 2
    assert refused.stdout == ""
    assert refused.stderr.startswith("specstate plan: tp = 7")
    assert json.loads(run(*PLAN_K3, "--json").stdout)["tp"] == 8


@pytest.mark.parametrize(("argv", "codes"), [(PLAN_K3, {141}), (["--help"], {0, 141})], ids=["plan", "help"])
def test_a_closed_pipe_leaves_no_traceback(argv: list[str], codes: set[int]) -> None:
    read_end, write_end = os.pipe()
    os.close(read_end)
    try:
        ended = subprocess.run(
            [sys.executable, "-m", "specstate.cli", *argv],
            stdout=write_end,
            stderr=subprocess.PIPE,
            text=True,
            timeout=120,
            check=False,
        )
    finally:
        os.close(write_end)
    assert ended.stderr == ""
    assert ended.returncode in codes  # argparse itself may swallow it while it prints help


def test_a_shell_can_complete_commands(tmp_path: Path) -> None:
    answer = tmp_path / "answer"
    line = "specstate pl"
    ended = run(
        _ARGCOMPLETE="1",
        _ARGCOMPLETE_STDOUT_FILENAME=str(answer),
        COMP_LINE=line,
        COMP_POINT=str(len(line)),
        _ARGCOMPLETE_SUPPRESS_SPACE="1",
    )
    assert ended.returncode == 0
    assert answer.read_text() == "plan"


def test_the_package_runs_as_a_module() -> None:
    command = [
        sys.executable,
        "-m",
        "specstate",
        "plan",
        "--preset",
        "kimi-k3",
        "--tp",
        "8",
        "--memory-gib",
        "80",
        "--json",
    ]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert ended.returncode == 0, ended.stderr
    assert "bytes_per_request" in json.loads(ended.stdout)
