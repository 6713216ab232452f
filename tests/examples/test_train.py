"""The training script's parts that need no GPU."""

import argparse
import json
from pathlib import Path

import pytest
import torch

import train
from model import Model, ModelConfig, load_model, save_model
from recurrence import SerialMixer


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


SMALL = ModelConfig(d_model=16, num_layers=1, num_heads=2, head_k_dim=8, head_v_dim=8, gate_rank=4, mlp_hidden=16)


@pytest.fixture
def options(corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> argparse.Namespace:
    """Three steps on a CPU."""
    monkeypatch.setattr(train, "read_corpus", lambda *_: (torch.arange(4096).byte(), torch.arange(200).byte()))
    sizes = {"steps": 3, "batch": 2, "length": 16, "passages": 4, "log_every": 3}
    return argparse.Namespace(
        corpus=corpus, out=tmp_path / "out", target=tmp_path / "target", device="cpu", seed=1, **sizes
    )


def small_target() -> Model:
    torch.manual_seed(2)
    target = Model(SMALL)
    train.initialise(target)
    for block in target.blocks:  # zero at the start of training, which would hide the mixer
        torch.nn.init.normal_(block.o_proj.weight, std=0.2)
        torch.nn.init.normal_(block.mlp_out.weight, std=0.2)
    return target


def summary(options: argparse.Namespace) -> dict[str, float]:
    return json.loads((options.out / "log.json").read_text())["summary"]


def test_a_few_steps_write_weights(options: argparse.Namespace, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(train, "ModelConfig", lambda: SMALL)
    train.train_target(options)
    assert load_model(options.out).config == SMALL
    assert summary(options)["trained_bytes"] == 3 * 2 * 16
    assert 0 < summary(options)["held_out_bits_per_byte_16"] < 16


def test_a_few_steps_write_a_drafter(options: argparse.Namespace, monkeypatch: pytest.MonkeyPatch) -> None:
    wider = ModelConfig(**{**vars(SMALL), "d_model": 24, "conv_kernel_size": 6})
    monkeypatch.setattr(train, "DRAFTER", wider)
    monkeypatch.setattr(train, "PASSAGE_LEN", 24)
    monkeypatch.setattr(train, "PASSAGE_PROMPT_LEN", 16)
    save_model(small_target(), options.target)
    train.train_drafter(options)
    assert load_model(options.out).config == wider
    assert load_model(options.target).config == SMALL
    for name in ("held_out_agreement", "continuation_agreement"):
        assert 0 <= summary(options)[name] <= 1


def test_the_target_continues_passages_greedily(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(train, "PASSAGE_LEN", 12)
    monkeypatch.setattr(train, "PASSAGE_PROMPT_LEN", 5)
    target, text = small_target(), torch.randint(0, 256, (50,)).byte()
    passages = train.continued_passages(target, text, 3, seed=1)
    assert passages.dtype == torch.uint8
    for passage in passages:
        assert bytes(passage[:5].tolist()) in bytes(text.tolist())
        best = target(passage.long(), SerialMixer(target.layer_params())).argmax(-1)
        assert torch.equal(best[4:-1], passage[5:])


def test_every_text_has_its_share_of_a_batch() -> None:
    zeros, ones = torch.zeros(40).byte(), torch.ones(9).byte()
    window = next(train.batches([zeros, ones], 4, 8, 1, torch.device("cpu")))
    assert window.sum(1).tolist() == [0, 0, 9, 9]


def test_distillation_is_least_at_the_target() -> None:
    target = small_target()
    window = torch.randint(0, 256, (2, 9))
    inputs = window[:, :-1].flatten()
    # A serial mixer goes on from where it stands, so each forward has its own.
    logits = target(inputs, SerialMixer(target.layer_params(), 2)).detach().requires_grad_()
    loss = train.distillation_loss(target, SerialMixer(target.layer_params(), 2))(logits, window)
    loss.backward()
    assert loss.item() == pytest.approx(torch.distributions.Categorical(logits=logits).entropy().mean().item())
    assert logits.grad.abs().max() < 1e-6


def test_agreement_is_the_share_of_equal_best_bytes() -> None:
    target, data = small_target(), torch.randint(0, 256, (65,)).byte()
    assert train.agreement(target, target, train.serial_mixer, data, length=16, batch=3) == 1.0
    other = small_target()
    other.final_norm.data.neg_()  # its best byte is the target's worst
    assert train.agreement(other, target, train.serial_mixer, data, length=16, batch=3) == 0.0
