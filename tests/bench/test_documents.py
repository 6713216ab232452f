"""``specstate bench table`` and ``plot``: results as documents show them, of made-up figures."""

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest

from specstate.bench import plot
from specstate.bench.markdown import markdown
from specstate.bench.ratios import build_report
from specstate.bench.results import BenchReport
from specstate.cli import main
from tests.bench.test_gpu import SMALL, made_up

needs_matplotlib = pytest.mark.skipif(importlib.util.find_spec("matplotlib") is None, reason="needs matplotlib")


@pytest.fixture
def report() -> BenchReport:
    first = made_up(path="hopper", kernel_launches={"verify": 69.0, "fold": 1.0}, host_us_per_layer=33.33)
    second = made_up(policy="eager", s0_ms=None, s0_layers=None, kernel_ms={}, output_error=None)
    return build_report([first, second], "NVIDIA H200", ["not all was measured"], "0.6.0")


@pytest.fixture
def results(report: BenchReport, tmp_path: Path) -> Path:
    path = tmp_path / "results.json"
    path.write_text(json.dumps(report.to_json()))
    return path


def cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip("|").split("|")]


def test_a_table_has_a_line_a_result(report: BenchReport) -> None:
    head, table, legend, notes = markdown(report).split("\n\n")
    assert head.startswith("NVIDIA H200; specstate ")
    names, rule, ring, eager = map(cells, table.splitlines())
    assert len(names) == len(rule) == len(ring) == len(eager) == 14
    first = dict(zip(names, ring, strict=True))
    assert first["shape"] == SMALL.name
    assert (first["policy"], first["path"], first["ms"], first["bare ms"]) == ("ring", "hopper", "2.000", "1.000")
    assert (first["S0 ms"], first["x S0"], first["bare x S0"]) == ("6.000 (1)", "3.00", "6.00")
    assert first["/ floor"] == f"{report.results[0].ratio_to_floor:.2f}"
    assert first["kernels ms"] == "verify 1.250, fold 0.500"
    assert (first["launches"], first["host us a layer"]) == ("69 verify, 1 fold", "33.3")
    second = dict(zip(names, eager, strict=True))
    assert {second[name] for name in ("S0 ms", "x S0", "bare x S0", "kernels ms", "launches", "host us a layer")} == {
        "-"
    }
    assert "4.30 TB/s" in legend
    assert notes == "- not all was measured"


def test_a_short_table_and_narrow_checkpoints(report: BenchReport) -> None:
    short = cells(markdown(report, short=True).split("\n\n")[1].splitlines()[0])
    assert short == ["shape", "policy", "ms", "/ floor", "x S0", "bare / floor", "bare x S0"]
    narrow = markdown(build_report([made_up(s0_fp32_ms=8.0)], "NVIDIA H200", []), short=True)
    names, _, line = map(cells, narrow.split("\n\n")[1].splitlines())
    assert dict(zip(names, line, strict=True))["x S0 fp32"] == "4.00"


def test_the_command_prints_a_table(results: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "table", str(results), "--short"]) == 0
    text = capsys.readouterr().out
    assert text.startswith("NVIDIA H200; ") and "| tiny | ring | 2.000 |" in text
    assert main(["bench", "table", str(results), "--json"]) == 0
    assert list(json.loads(capsys.readouterr().out)) == ["markdown"]


@pytest.mark.parametrize("command", ["table RESULTS", "plot RESULTS picture.png"])
def test_bad_results_are_refused(
    command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plot, "check_plot", lambda path: None)
    path = tmp_path / "results.json"
    for text, says in ((None, "cannot read results from"), ("{}", "holds no results of bench gpu")):
        if text is not None:
            path.write_text(text)
        assert main(["bench", *command.replace("RESULTS", str(path)).split()]) == 2
        captured = capsys.readouterr()
        assert captured.out == ""
        assert captured.err.count("\n") == 1 and says in captured.err


def test_a_plot_without_matplotlib_is_refused_before_anything_is_measured(
    results: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def measure(*_: Any) -> BenchReport:
        raise AssertionError("measured")

    monkeypatch.setattr("specstate.bench.gpu.measure_gpu", measure)
    find_spec = importlib.util.find_spec
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == "matplotlib" else find_spec(name))
    for command in (f"plot {results} picture.png", "gpu --shapes k3-1 --plot picture.png"):
        assert main(["bench", *command.split()]) == 2
        assert "install the extra specstate[plot]" in capsys.readouterr().err


@pytest.mark.parametrize(("name", "says"), [("picture.txt", "must end in .png"), ("none/picture.png", "is not there")])
def test_places_that_take_no_picture(
    name: str,
    says: str,
    tmp_path: Path,
    results: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda _: True)
    assert main(["bench", "plot", str(results), str(tmp_path / name)]) == 2
    assert says in capsys.readouterr().err


def test_what_is_drawn(report: BenchReport) -> None:
    assert plot.achieved(report.results[0]) == (12_000.0, pytest.approx(12_000 / 2e-3))
    assert plot.read_curve(report) == [(2_000_000.0, pytest.approx(4e9))]
    assert plot.copy_curve(report) == [(4_000_000.0, pytest.approx(4e6 / 0.9e-3))]


@needs_matplotlib
def test_a_picture(results: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, head in (("picture.png", b"\x89PNG"), ("picture.svg", b"<?xml")):
        assert main(["bench", "plot", str(results), str(tmp_path / name), "--json"]) == 0
        assert json.loads(capsys.readouterr().out) == {"picture": str(tmp_path / name)}
        assert (tmp_path / name).read_bytes().startswith(head)
