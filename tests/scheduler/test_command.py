"""``specstate simulate`` from the outside: its object, its table, its files, and what it refuses."""

import io
import json
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from specstate.cli import main
from specstate.scheduler.executing import Executing
from tests.scheduler.engine import conversations
from tests.scheduler.test_calibration import made_report

K3 = ["--preset", "kimi-k3", "--tp", "8"]
SMALL = [
    *K3,
    *(
        "--max-query-len",
        "4",
        "--max-requests",
        "4",
        "--num-checkpoints",
        "12",
        "--block-size",
        "8",
        "--kv-tokens",
        "120",
    ),
    *("--token-budget", "64", "--prefill", "rows", "--cache-outputs"),
]
KEYS = {
    *("finished", "cancelled", "refused", "output_tokens", "accepted_tokens", "mean_acceptance_length"),
    *("throughput_tokens_per_s", "ttft_ms", "tpot_ms", "folds", "preemptions", "prefix_hits"),
}


@pytest.fixture
def trace(tmp_path: Path) -> str:
    """Twenty requests in the package's own format."""
    path = tmp_path / "requests.jsonl"
    lines = [each.to_json_line() for each in conversations(20, inputs=(6, 30), outputs=(1, 20), gap_ms=5.0, chains=2)]
    path.write_text("\n".join(lines) + "\n")
    return str(path)


def simulated(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[dict[str, Any], str]:
    """The object of a run, and what stood on stderr."""
    assert main(["simulate", *argv, "--json"]) == 0
    captured = capsys.readouterr()
    assert captured.out.count("\n") == 1
    return json.loads(captured.out), captured.err


def refusal(capsys: pytest.CaptureFixture[str], *argv: str, code: int = 2) -> str:
    assert main(["simulate", *argv]) == code
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1
    return captured.err


def test_json_has_the_contracts_keys_and_says_what_it_used(capsys: pytest.CaptureFixture[str], trace: str) -> None:
    report, errors = simulated(capsys, "--trace", trace, *SMALL)
    assert errors == ""
    assert report.keys() >= KEYS
    for name in ("ttft_ms", "tpot_ms", "inter_token_ms"):
        assert list(report[name]) == ["p50", "p90", "p99"]
        assert 0 < report[name]["p50"] <= report[name]["p90"] <= report[name]["p99"]
    assert report["finished"] == report["requests"] == 20
    assert report["preemptions"] > 0 < report["prefix_hits"]
    assert 0 < report["state_management_share"] < 1
    assert report["max_requests"] == 4 < report["requests_that_fit"]
    assert report["cost"]["source"].startswith("derived for 8 ranks")
    tokens = report["tokens"]
    useful = tokens["accepted"] - tokens["cut"] - tokens["late"]
    assert report["wasted_verify_share"] == pytest.approx(1 - useful / tokens["verified"])
    assert report["output_tokens"] == tokens["prefills"] + useful
    alone, _ = simulated(capsys, "--trace", trace, *SMALL, "--limit", "1")
    assert alone["mean_batch"] == 1.0


def test_the_table_says_the_same(capsys: pytest.CaptureFixture[str], trace: str) -> None:
    report, _ = simulated(capsys, "--trace", trace, *SMALL)
    assert main(["simulate", "--trace", trace, *SMALL]) == 0
    text = capsys.readouterr().out
    assert f"{report['output_tokens']:,} ({report['throughput_tokens_per_s']:,.1f} a second)" in text
    assert f"{report['state_management_share']:.2%} of the time of steps" in text
    assert f"calibration            {report['calibration']}" in text


def test_the_same_run_gives_the_same_bytes_and_executing_mode_too(
    capsys: pytest.CaptureFixture[str], trace: str, tmp_path: Path
) -> None:
    outputs, traces = [], []
    for more in ([], [], ["--execute", "reference"], ["--seed", "1"]):
        path = tmp_path / "steps.jsonl"
        assert main(["simulate", "--trace", trace, *SMALL, *more, "--json", "--record", str(path)]) == 0
        captured = capsys.readouterr()
        outputs.append(captured.out)
        traces.append([line for line in path.read_text().splitlines() if '"kind":"end"' in line])
        assert captured.err.startswith("agrees with the oracle: " if "--execute" in more else "")
    assert outputs[0] == outputs[1] == outputs[2] != outputs[3]
    assert traces[0] == traces[1] == traces[2]


@pytest.mark.parametrize("policy", ["eager", "deferred", "ring"])
def test_a_recorded_run_is_accepted_by_replay(
    capsys: pytest.CaptureFixture[str], trace: str, tmp_path: Path, policy: str
) -> None:
    path = str(tmp_path / "steps.jsonl")
    simulated(capsys, "--trace", trace, *SMALL, "--policy", policy, "--record", path)
    assert main(["replay", path, "--backend", "metadata", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["ok"]


def test_an_oracle_that_disagrees_is_exit_code_1(
    capsys: pytest.CaptureFixture[str], trace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    release = Executing.release

    def careless(self: Executing, handle: Any) -> None:
        self.manager.checkpoints(0)[0][0] += 1.0  # the null slot
        release(self, handle)

    monkeypatch.setattr(Executing, "release", careless)
    error = refusal(capsys, "--trace", trace, *SMALL, "--execute", "reference", code=1)
    assert error.startswith("specstate simulate: checkpoint slots [0] changed, only [] may")


# -- sweeps and pictures


def test_a_sweep_names_the_best_of_its_choices(capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["--synthetic", "12", *K3, "--sweep", "policy,max_query_len", "--windows", "2", "8", "--rate", "0.5"]
    argv[argv.index("--rate")] = "--requests-per-s"
    report, _ = simulated(capsys, *argv)
    choices = report["choices"]
    assert [(each["policy"], each["max_query_len"]) for each in choices] == [
        (policy, window) for policy in ("snapshots", "eager", "deferred", "ring") for window in (2, 8)
    ]
    best = max(each["goodput_requests_per_s"] for each in choices)
    assert report["goodput_requests_per_s"] == best
    assert report["best"] == {"policy": report["policy"], "max_query_len": report["max_query_len"]}
    fits = {(each["policy"], each["max_query_len"]): each["requests_that_fit"] for each in choices}
    assert fits["eager", 8] > 5 * fits["snapshots", 8]
    assert main(["simulate", *argv]) == 0
    lines = capsys.readouterr().out.splitlines()
    marked = [line for line in lines if line.endswith("<- best")]
    assert len(marked) == 1
    assert marked[0].split()[:2] == [report["policy"], str(report["max_query_len"])]
    close = [line.split()[:2] for line in lines if line.endswith("<- alike")]
    assert close == [[each["policy"], str(each["max_query_len"])] for each in report["alike"]]


def test_an_overloaded_deployment_is_named(capsys: pytest.CaptureFixture[str], trace: str) -> None:
    """Nobody gets a first token within a tenth of a millisecond."""
    assert main(["simulate", "--trace", trace, *K3, "--sweep", "policy", "--slo-ttft-ms", "0.1"]) == 0
    [told] = [line for line in capsys.readouterr().out.splitlines() if line.startswith("overloaded")]
    assert "0.0% of the requests" in told
    assert (
        main(["simulate", "--trace", trace, *K3, "--sweep", "policy", "--slo-ttft-ms", "1e9", "--slo-tpot-ms", "1e9"])
        == 0
    )
    assert "overloaded" not in capsys.readouterr().out


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no device that is always full")
def test_a_timeline_that_cannot_be_written_is_named(capsys: pytest.CaptureFixture[str], trace: str) -> None:
    assert "/dev/full: cannot be written" in refusal(capsys, "--trace", trace, *K3, "--chrome-trace", "/dev/full")


def test_a_sweep_goes_on_where_a_choice_does_not_fit(capsys: pytest.CaptureFixture[str], trace: str) -> None:
    argv = ["--trace", trace, *K3, "--memory-gib", "0.6", "--sweep", "policy"]
    report, _ = simulated(capsys, *argv)
    assert [each["policy"] for each in report["choices"]] == ["eager", "deferred", "ring"]
    assert report["not_possible"][0].startswith("snapshots, windows of 8: 0.60 GiB hold no request")
    assert "0.10 GiB hold no request" in refusal(
        capsys, "--trace", trace, *K3, "--memory-gib", "0.1", "--sweep", "policy"
    )


@pytest.mark.parametrize("sweep", [[], ["--sweep", "policy"]])
def test_a_picture_is_a_png(capsys: pytest.CaptureFixture[str], trace: str, tmp_path: Path, sweep: list[str]) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / "run.png"
    simulated(capsys, "--trace", trace, *K3, *sweep, "--plot", str(path))
    assert path.read_bytes().startswith(b"\x89PNG")
    assert path.stat().st_size > 20_000


def test_a_picture_without_matplotlib_is_refused(
    capsys: pytest.CaptureFixture[str], trace: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    error = refusal(capsys, "--trace", trace, *K3, "--plot", str(tmp_path / "run.png"))
    assert "install the extra specstate[plot]" in error


@pytest.mark.parametrize("matplotlib", [True, False])
def test_a_picture_that_cannot_be_is_refused_before_the_run(
    capsys: pytest.CaptureFixture[str], trace: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, matplotlib: bool
) -> None:
    if matplotlib:
        pytest.importorskip("matplotlib")
    else:
        monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    monkeypatch.setattr("specstate.scheduler.command.simulate", lambda *args: pytest.fail("it ran"))
    path = tmp_path / "missing" / "run.png" if matplotlib else tmp_path / "run.png"
    error = refusal(capsys, "--trace", trace, *K3, "--plot", str(path))
    assert (f"{path}: cannot be written: No such file" if matplotlib else "install the extra") in error
    assert not list(tmp_path.glob("**/*.png"))


def test_a_timeline_has_every_step_and_request(capsys: pytest.CaptureFixture[str], trace: str, tmp_path: Path) -> None:
    path = tmp_path / "timeline.json"
    report, _ = simulated(capsys, "--trace", trace, *SMALL, "--chrome-trace", str(path))
    events = json.loads(path.read_text())["traceEvents"]
    steps = [event for event in events if event["name"] == "step"]
    assert len(steps) == report["steps"]
    assert all(left["ts"] + left["dur"] <= right["ts"] + 0.01 for left, right in pairwise(steps))
    slices = [event for event in events if event["ph"] == "X"]
    assert all(event["dur"] >= 0 and event["ts"] >= 0 for event in slices)
    assert {event["args"]["request"] for event in slices if event["pid"] == 2} == {f"r{i}" for i in range(20)}
    assert {event["name"] for event in slices if event["pid"] == 2} == {"waiting", "prefill", "decode"}
    tracks: dict[int, list[tuple[float, float]]] = {}
    for event in slices:
        if event["pid"] == 2:
            tracks.setdefault(event["tid"], []).append((event["ts"], event["ts"] + event["dur"]))
    for spans in tracks.values():  # slices of a track lie beside each other
        assert all(left[1] <= right[0] + 0.01 for left, right in pairwise(sorted(spans)))


class Terminal(io.StringIO):
    """A stderr that somebody watches."""

    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("bar", [True, False])
def test_progress_is_shown_to_who_watches(
    capsys: pytest.CaptureFixture[str], trace: str, monkeypatch: pytest.MonkeyPatch, bar: bool
) -> None:
    if bar:
        pytest.importorskip("tqdm")
    else:
        monkeypatch.setitem(sys.modules, "tqdm", None)
    shown = Terminal()
    monkeypatch.setattr(sys, "stderr", shown)
    simulated(capsys, "--trace", trace, *SMALL)
    assert "ring, T = 4: " in shown.getvalue()
    assert shown.getvalue().splitlines()[-1].strip("\r \x1b[K") == ""  # and wiped out at the end


# -- costs


def test_results_of_bench_calibrate(capsys: pytest.CaptureFixture[str], trace: str, tmp_path: Path) -> None:
    path = tmp_path / "gpu.json"
    path.write_text(made_report().model_dump_json())
    bare, _ = simulated(capsys, "--trace", trace, *K3)
    report, _ = simulated(capsys, "--trace", trace, *K3, "--bench", str(path))
    assert report["calibrated"]
    assert report["calibration"] == f"{path} (a GPU that was made up, 2026)"
    assert report["state_management_share"] != bare["state_management_share"]


def test_a_sweep_leaves_out_what_was_not_measured(
    capsys: pytest.CaptureFixture[str], trace: str, tmp_path: Path
) -> None:
    path, report = tmp_path / "gpu.json", made_report()
    without = tuple(each.model_copy(update={"s0_ms": None}) for each in report.results)  # no fla-core there
    path.write_text(report.model_copy(update={"results": without}).model_dump_json())
    swept, _ = simulated(capsys, "--trace", trace, *K3, "--bench", str(path), "--sweep", "policy")
    assert [each["policy"] for each in swept["choices"]] == ["eager", "deferred", "ring"]
    assert swept["not_possible"] == [f"snapshots, windows of 8: no result in {path} (a GPU that was made up, 2026)"]
    argv = ("--trace", trace, *K3, "--bench", str(path), "--policy", "snapshots")
    assert "has no result for policy snapshots" in refusal(capsys, *argv)


def test_the_calibration_can_be_checked(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "gpu.json"
    path.write_text(made_report().model_dump_json())
    assert main(["simulate", "--check-calibration", "--bench", str(path)]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 1 + 4 * 10
    points = simulated(capsys, "--check-calibration", "--bench", str(path))[0]["points"]
    assert {point["policy"] for point in points} == {"snapshots", "eager", "deferred", "ring"}
    measured = simulated(capsys, "--check-calibration")[0]["points"]
    assert len(measured) > len(points)  # of the results in the package
    other = tmp_path / "other.json"
    other.write_text(made_report(noise=(1.1,)).model_dump_json())
    points = simulated(capsys, "--bench", str(path), "--check-calibration", str(other))[0]["points"]
    assert all(point["error"] == pytest.approx(1 / 1.1 - 1, abs=0.01) for point in points)


def test_a_cost_file_takes_the_place_of_the_presets(
    capsys: pytest.CaptureFixture[str], trace: str, tmp_path: Path
) -> None:
    path = tmp_path / "cost.json"
    line = {"step_ms": 100.0, "ms_per_token": 0.0, "ms_per_context_token": 0.0, "prefill_tokens_per_s": 1e9}
    path.write_text(json.dumps(line))
    report, _ = simulated(capsys, "--trace", trace, *K3, "--cost", str(path), "--limit", "1")
    assert report["ttft_ms"]["p50"] == pytest.approx(100.0, rel=1e-3)
    assert report["cost"]["source"] == "a cost file"
    path.write_text(json.dumps(line | {"step_ms": -1.0}))
    error = refusal(capsys, "--trace", trace, *K3, "--cost", str(path))
    assert error.startswith(f"specstate simulate: {path}: step_ms = -1.0")
    path.write_text("[1")
    assert f"{path}: " in refusal(capsys, "--trace", trace, *K3, "--cost", str(path))
    assert "cannot be read" in refusal(capsys, "--trace", trace, *K3, "--cost", str(tmp_path / "none.json"))


# -- acceptance


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        (["--rates", "0.5,0.25"], 1 + 0.5 + 0.125 + 0.03125),
        (["--geometric", "0.5"], 1.875),
        (["--counts", "COUNTS"], 2.0),
        (["--measured", "DEMO"], 2.2),
    ],
)
def test_where_acceptance_comes_from(
    capsys: pytest.CaptureFixture[str], trace: str, tmp_path: Path, argv: list[str], expected: float
) -> None:
    (tmp_path / "COUNTS").write_text("num_accepted\n1\n3\n")
    (tmp_path / "DEMO").write_text(json.dumps({"acceptance_per_position": [0.7, 0.4, 0.1]}))
    given = [str(tmp_path / text) if text.isupper() else text for text in argv]
    report, _ = simulated(capsys, "--trace", trace, *SMALL, *given)
    assert report["expected_acceptance_length"] == pytest.approx(expected)


# -- refusals

GOOD = '{"timestamp": 0, "input_length": 9, "output_length": 3, "hash_ids": [1]}\n'


@pytest.mark.parametrize(
    ("line", "what"),
    [
        ('{"timestamp": 1, "input_length": -9, "output_length": 3, "hash_ids": []}\n', "line 2: input_length = -9"),
        ('{"timestamp": 1, "input_len": 9, "output_length": 3, "hash_ids": []}\n', "line 2: input_length"),
        ('{"timestamp": 1, "input_length": 9, "outp', "line 2: Invalid JSON"),
        ('{"timestamp": -1, "input_length": 9, "output_length": 3, "hash_ids": []}\n', "line 2: timestamp = -1"),
    ],
)
def test_a_bad_line_is_named_or_skipped(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, line: str, what: str
) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_text(GOOD + line)
    error = refusal(capsys, "--trace", str(path), *K3)
    assert error.startswith(f"specstate simulate: {path}, {what}")
    path.write_text(GOOD + line.rstrip("\n") + "\n" + GOOD)
    report, _ = simulated(capsys, "--trace", str(path), *K3, "--skip-bad")
    assert (report["finished"], report["skipped_lines"]) == (2, 1)


def test_times_that_go_backwards_and_columns_that_are_missing(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = tmp_path / "requests.csv"
    path.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.5,10,5\n2023-11-16 18:15:45.5,10,5\n")
    error = refusal(capsys, "--trace", str(path), *K3)
    assert "line 3: TIMESTAMP = '2023-11-16 18:15:45.5' is before '2023-11-16 18:15:46.5'" in error
    path.write_text("TIMESTAMP,ContextTokens\n2023-11-16 18:15:46.5,10\n")
    assert "line 1: column GeneratedTokens is missing" in refusal(capsys, "--trace", str(path), *K3)


@pytest.mark.parametrize(
    ("argv", "what"),
    [
        ([], "a model is needed: --preset NAME"),
        ([*K3], "requests are needed: --trace FILE, or --synthetic N"),
        ([*K3, "--trace", "x", "--synthetic", "3"], "requests are needed"),
        ([*K3, "--trace", "no such file"], "no such file: cannot be read"),
        ([*K3, "--synthetic", "3", "--memory-gib", "0"], "--memory-gib = 0.0 must be above 0"),
        ([*K3, "--synthetic", "3", "--memory-gib", "0.1"], "0.10 GiB hold no request"),
        ([*K3, "--synthetic", "3", "--async-depth", "3"], "async_depth = 3"),
        ([*K3, "--synthetic", "3", "--token-budget", "4"], "token_budget = 4 is less than one window"),
        ([*K3, "--synthetic", "3", "--rates", "0.5,x"], "--rates = '0.5,x' must be numbers"),
        ([*K3, "--synthetic", "3", "--rates", "1.5"], "--rates = '1.5': 1.5 is outside 0..1"),
        ([*K3, "--synthetic", "3", "--rates", "0.9,7", "--max-query-len", "2"], "7.0 is outside 0..1"),
        ([*K3, "--synthetic", "3", "--rates", "nan"], "nan is outside 0..1"),
        ([*K3, "--synthetic", "3", "--sweep", "policy", "--seed", "-1"], "simulate: seed = -1"),
        (
            [*K3, "--synthetic", "3", "--rates", "0.5", "--geometric", "0.5"],
            "--rates and --geometric exclude each other",
        ),
        ([*K3, "--synthetic", "3", "--sweep", "tp"], "'tp' is none of policy, max_query_len"),
        ([*K3, "--synthetic", "3", "--sweep", "policy", "--record", "x"], "--record is for one run"),
        ([*K3, "--synthetic", "3", "--policy", "snapshots", "--record", "x"], "snapshots are priced, not run"),
        ([*K3, "--synthetic", "3", "--bench", "no such file"], "cannot read results from 'no such file'"),
        ([*K3, "--synthetic", "3", "--requests-per-s", "0"], "requests_per_s = 0.0"),
        ([*K3, "--synthetic", "3", "--slo-ttft-ms", "-1"], "slo_ttft_ms = -1.0"),
        ([*K3, "--synthetic", "3", "--length-factor", "0.1", "--scale-blocks"], "are no whole number of tokens"),
        ([*K3, "--synthetic", "3", "--chrome-trace", "/no/such/place.json"], "/no/such/place.json: cannot be written"),
        (["--preset", "kimi-k3", "--tp", "7", "--synthetic", "3"], "tp = 7 cannot split kimi-k3"),
        (["--preset", "gpt", "--synthetic", "3"], "preset = 'gpt' is unknown"),
    ],
)
def test_what_cannot_be_meant_is_refused_in_one_line(
    capsys: pytest.CaptureFixture[str], argv: list[str], what: str
) -> None:
    assert what in refusal(capsys, *argv)


def test_a_run_in_which_nobody_is_served(capsys: pytest.CaptureFixture[str], trace: str) -> None:
    report, _ = simulated(capsys, "--trace", trace, *K3, "--max-context", "2")
    assert (report["refused"], report["throughput_tokens_per_s"]) == (20, 0.0)
    assert report["ttft_ms"] == {"p50": None, "p90": None, "p99": None}
    assert main(["simulate", "--trace", trace, *K3, "--max-context", "2"]) == 0
    assert "time to first token    none" in capsys.readouterr().out


def test_requests_longer_than_any_capacity_are_counted_and_explained(
    capsys: pytest.CaptureFixture[str], trace: str
) -> None:
    report, _ = simulated(capsys, "--trace", trace, *K3, "--max-context", "35")
    assert 0 < report["refused"] < 20
    assert "exceed max_context = 35" in report["refusals"][0]
    assert main(["simulate", "--trace", trace, *K3, "--max-context", "35"]) == 0
    assert "refused: request 'r" in capsys.readouterr().out
