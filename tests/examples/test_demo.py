"""`specstate demo` as its command line calls it."""

import argparse
import json
import shutil
from pathlib import Path
from typing import Any

import pytest

import demo

from .conftest import EXAMPLES


def options(**changes: Any) -> argparse.Namespace:
    values = {"json": True, "drafter": "ngram", "policy": "ring", "window": 8, "max_bytes": 24, "prompt": "0"}
    return argparse.Namespace(**(values | {"dtype": "float32"} | changes))


def test_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert demo.run(options()) == 0
    printed = capsys.readouterr()
    assert printed.err == ""
    report = json.loads(printed.out)
    assert set(report) == {
        "outputs_equal",
        "mean_acceptance_length",
        "acceptance_per_position",
        "target_forwards_per_token",
        "tokens_per_second",
        "plain_tokens_per_second",
        "state_bytes",
        "snapshot_bytes",
        "drafter",
        "drafter_state_bytes",
    }
    assert report["outputs_equal"] is True
    assert 1 <= report["mean_acceptance_length"] <= 8
    assert report["mean_acceptance_length"] == pytest.approx(1 + sum(report["acceptance_per_position"]))
    assert len(report["acceptance_per_position"]) == 7
    assert 0 < report["state_bytes"] < report["snapshot_bytes"]
    assert (report["drafter"], report["drafter_state_bytes"]) == ("ngram", 0)


@pytest.fixture
def folder(weights: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The demo's folder, with a draft model of random weights."""
    (tmp_path / "prompts.json").symlink_to(demo.FOLDER / "prompts.json")
    (tmp_path / "weights").symlink_to(weights)
    monkeypatch.setattr(demo, "FOLDER", tmp_path)
    return tmp_path


def test_draft_model(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "own.py").write_text("def first(x):\n    return x")
    few: dict[str, Any] = {"prompt": str(folder / "own.py"), "max_bytes": 8}
    assert demo.run(options(**few)) == 0
    with_ngrams = json.loads(capsys.readouterr().out)
    assert demo.run(options(drafter="model", **few)) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["outputs_equal"] is True
    assert report["drafter"] == "model"
    assert 0 < report["drafter_state_bytes"] < report["state_bytes"] == with_ngrams["state_bytes"]

    assert demo.run(options(drafter="model", json=False, **few)) == 0
    assert "drafter model" in capsys.readouterr().out


def test_missing_draft_model(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "weights").unlink()
    (folder / "weights").mkdir()
    for name in ("model.json", "model.safetensors"):
        (folder / "weights" / name).symlink_to(EXAMPLES / "weights" / name)
    assert demo.run(options(drafter="model")) == 2
    printed = capsys.readouterr()
    assert "drafter/model.json" in printed.err and printed.err.count("\n") == 1


def test_text(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "own.py").write_text("import os\nimport s")
    prompt = str(tmp_path / "own.py")
    assert demo.run(options(json=False, window=1, dtype="float64", max_bytes=8, prompt=prompt)) == 0
    printed = capsys.readouterr().out
    for piece in ("own.py", "import os", "outputs equal", "target forwards per token", "KiB"):
        assert piece in printed


@pytest.mark.parametrize("policy", ["eager", "deferred"])
def test_prompt_from_a_file(policy: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "own.py").write_text("def é():\n    return [")
    assert demo.run(options(policy=policy, prompt=str(tmp_path / "own.py"))) == 0
    assert json.loads(capsys.readouterr().out)["outputs_equal"] is True


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"prompt": "99"}, "prompt 99 is outside 0..23"),
        ({"prompt": "-1"}, "prompt -1 is outside 0..23"),
        ({"prompt": "no/such/file"}, "prompt 'no/such/file' is neither an index nor a file"),
        ({"prompt": "."}, "prompt '.' is neither"),
    ],
)
def test_bad_prompt(changes: dict[str, Any], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert demo.run(options(**changes)) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert message in printed.err
    assert printed.err.count("\n") == 1


def test_empty_prompt_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "empty").touch()
    assert demo.run(options(prompt=str(tmp_path / "empty"))) == 2
    assert "is empty" in capsys.readouterr().err


def test_missing_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "prompts.json").write_text((demo.FOLDER / "prompts.json").read_text())
    monkeypatch.setattr(demo, "FOLDER", tmp_path)
    assert demo.run(options()) == 2
    printed = capsys.readouterr()
    assert "model.json" in printed.err and printed.err.count("\n") == 1


@pytest.mark.parametrize("damage", ["no tensors", "another model's sizes", "an unknown size"])
def test_damaged_weights_are_bad_input(
    damage: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "weights"
    shutil.copytree(EXAMPLES / "weights", folder)
    if damage == "no tensors":
        (folder / "drafter/model.safetensors").write_text("version of a pointer file\n")
    elif damage == "an unknown size":
        (folder / "drafter/model.json").write_text('{"num_wheels": 4}')
    else:
        shutil.copy(folder / "model.safetensors", folder / "drafter")
    monkeypatch.setattr(demo, "FOLDER", tmp_path)
    shutil.copy(EXAMPLES / "prompts.json", tmp_path)
    assert demo.run(options(drafter="model", max_bytes=4)) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1 and "holds no model of this program" in err
