"""The examples that put fla-core's kernels in place of the manager's verify and of its prompt rows."""

import importlib.util
from types import ModuleType

import pytest
import torch

import kda_inputs
import own_verify
import prefill

needs_fla = pytest.mark.skipif(importlib.util.find_spec("fla") is None, reason="fla-core is not installed")
EXAMPLES = [pytest.param(own_verify, id="own verify"), pytest.param(prefill, id="prefill")]
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@needs_fla
@pytest.mark.filterwarnings("ignore:Triton is not supported")
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("example", EXAMPLES)
def test_agrees_with_the_managers_own(example: ModuleType, device: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert example.main(["--device", device]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == {own_verify: 2, prefill: 4}[example]
    # What the line says is what was compared: "<what>: differ by <value> of their norm at most (bound <bound>)".
    for line in lines:
        value, bound = (float(word) for word in line.replace(")", "").split() if "e-" in word)
        assert 0.0 < value < bound <= (1e-5 if device == "cpu" or example is own_verify else 2e-2)


@needs_fla
@pytest.mark.filterwarnings("ignore:Triton is not supported")
def test_a_wrong_correction_is_found(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    right = own_verify.corrections
    monkeypatch.setattr(own_verify, "corrections", lambda *inputs: right(*inputs) * 1.0001)
    assert own_verify.main(["--device", "cpu"]) == 1
    assert "states: differ by" in capsys.readouterr().out


@needs_fla
@pytest.mark.filterwarnings("ignore:Triton is not supported")
def test_a_verify_that_writes_checkpoints_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    real = own_verify.own_verify

    def writes(manager, step, layer, params, tokens):  # type: ignore[no-untyped-def]
        manager.checkpoints(layer)[0][1].add_(1.0)
        return real(manager, step, layer, params, tokens)

    monkeypatch.setattr(own_verify, "own_verify", writes)
    with pytest.raises(RuntimeError, match="wrote to a checkpoint in step 0"):
        own_verify.run(torch.device("cpu"))


@needs_fla
@pytest.mark.filterwarnings("ignore:Triton is not supported")
def test_a_state_that_is_not_carried_on_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the bound of a GPU, too."""
    real = prefill.chunked_kda
    monkeypatch.setattr(prefill, "chunked_kda", lambda state, inputs: real(torch.zeros_like(state), inputs))
    assert all(value > 5 * prefill.BOUND["cuda"] for value in prefill.run(torch.device("cpu")).values())


@pytest.mark.parametrize("example", EXAMPLES)
def test_needs_fla(example: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert example.main(["--device", "cpu"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "needs fla-core" in line and line.startswith(f"{example.__name__}.py")


@pytest.mark.skipif(torch.cuda.is_available(), reason="has a GPU")
def test_needs_a_gpu_when_told_so(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        own_verify.main(["--device", "cuda"])
    assert ended.value.code == 2
    assert "no GPU is available" in capsys.readouterr().err


def test_report_fails_beyond_the_bound(capsys: pytest.CaptureFixture[str]) -> None:
    assert kda_inputs.report({"outputs": 1e-5}, 1e-5) == 0
    assert kda_inputs.report({"outputs": 1e-6, "states": 1.1e-5}, 1e-5) == 1
    worst = kda_inputs.largest({"outputs": [0.0, float("nan"), 1e-9]})
    assert kda_inputs.report(worst, 1e-5) == 1
    assert "nan" in capsys.readouterr().out
