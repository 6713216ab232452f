"""The training script's parts that need no GPU."""

import argparse
import json
from pathlib import Path

import pytest
import torch

import train
from model import ModelConfig, load_model


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    for i in range(120):
        path = tmp_path / "lib" / f"package{i % 7}" / f"module{i}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"value_{i} = [\n    {i},\n]\n" * 200)
    for name in ("encodings/cp1.py", "package0/site-packages/other.py"):
        path = tmp_path / "lib" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("table = 1\n")
    return tmp_path / "lib"


def test_whole_files_are_held_out(corpus: Path) -> None:
    files = train.corpus_files(corpus)
    assert len(files) == 120
    held_out = [path for path in files if train.is_held_out(path)]
    assert 0 < len(held_out) < 20
    seen, unseen = train.read_corpus(corpus, seed=1)
    for path in files:
        text = (corpus / path).read_bytes() + train.END_OF_FILE
        assert (text in bytes(unseen.tolist())) == (path in held_out)
        assert (text in bytes(seen.tolist())) == (path not in held_out)


def test_split_does_not_move() -> None:
    """The shipped prompts are held out only as long as the hash stays what it was."""
    prompts = json.loads((Path(train.__file__).parent / "prompts.json").read_text())
    assert len(prompts) >= 20
    assert len({prompt["file"] for prompt in prompts}) == len(prompts)
    assert all(train.is_held_out(Path(prompt["file"])) for prompt in prompts)
    assert all(384 <= len(prompt["text"].encode()) <= 512 for prompt in prompts)


def test_prompts_are_cut_at_a_line(corpus: Path) -> None:
    prompts = train.cut_prompts(corpus, seed=1, count=3)
    assert prompts == train.cut_prompts(corpus, seed=1, count=3)
    for prompt in prompts:
        text = (corpus / prompt["file"]).read_text()
        assert text[prompt["offset"] - 1] == "\n"
        assert text[prompt["offset"] :].startswith(prompt["text"])


def test_learning_rate_rises_and_ends_near_zero() -> None:
    rates = [train.learning_rate(step, 2200) for step in range(1, 2201)]
    assert rates[0] < 0.01
    assert max(rates) == 1.0
    assert 0 < rates[-1] < 1e-3


def test_orthogonalise() -> None:
    torch.manual_seed(0)
    values = torch.linalg.svdvals(train.orthogonalise(torch.randn(3, 40, 24)).float())
    assert values.min() > 0.5
    assert values.max() < 1.4


def test_a_few_steps_write_weights(corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small = ModelConfig(d_model=16, num_layers=1, num_heads=2, head_k_dim=8, head_v_dim=8, gate_rank=4, mlp_hidden=16)
    monkeypatch.setattr(train, "ModelConfig", lambda: small)
    options = argparse.Namespace(
        corpus=corpus, out=tmp_path / "out", device="cpu", steps=3, batch=2, length=16, log_every=3, seed=1
    )
    monkeypatch.setattr(train, "read_corpus", lambda *_: (torch.arange(4096).byte(), torch.arange(200).byte()))
    train.train(options)
    assert load_model(tmp_path / "out").config == small
    log = json.loads((tmp_path / "out" / "log.json").read_text())
    assert log["summary"]["trained_bytes"] == 3 * 2 * 16
    assert 0 < log["summary"]["held_out_bits_per_byte_16"] < 16
