"""``specstate doctor``: a clear answer on any machine, and exit code 1 when a kernel is broken."""

import json

import pytest
import torch

from specstate import doctor
from specstate.cli import CHECK_FAILED, main
from specstate.kernels.reference import ReferenceKernels


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


@pytest.mark.usefixtures("no_gpu")
def test_without_a_gpu_the_reference_is_checked(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert (answer["ok"], answer["backend"], answer["path"]) == (True, "reference", "reference")
    assert "no GPU" in answer["reason"]
    assert len(answer["checks"]) == 8
    assert all(check["ok"] and check["detail"] for check in answer["checks"])
    assert main(["doctor"]) == 0
    assert "backend 'reference'" in capsys.readouterr().out


@pytest.mark.usefixtures("no_gpu")
@pytest.mark.parametrize(
    ("kernel", "checks"),
    [
        ("flush", {"flush"}),
        ("sample", {"greedy sampling", "sampling with a temperature"}),
        ("verify", {"fold inside verify", "bounded gate"}),
    ],
)
def test_a_broken_kernel_fails_its_checks(
    kernel: str, checks: set[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> None:
        raise RuntimeError("broken")

    monkeypatch.setattr(ReferenceKernels, kernel, broken)
    assert main(["doctor", "--json"]) == CHECK_FAILED
    failed = {check["name"] for check in json.loads(capsys.readouterr().out)["checks"] if not check["ok"]}
    assert checks <= failed


@pytest.mark.usefixtures("no_gpu")
def test_a_wrong_state_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    right = ReferenceKernels.read_state

    def off(self: ReferenceKernels, plan: torch.Tensor, layer: int) -> tuple[torch.Tensor, torch.Tensor | None]:
        state, conv = right(self, plan, layer)
        return state * 1.001, conv

    monkeypatch.setattr(ReferenceKernels, "read_state", off)
    found = doctor.examine()
    assert not found.ok
    assert any("1.0e-03" in check.detail for check in found.checks)


@pytest.mark.gpu
def test_on_a_gpu_the_triton_kernels_are_checked() -> None:
    found = doctor.examine()
    assert found.ok, found
    assert (found.backend, found.path) == ("triton", "portable")
