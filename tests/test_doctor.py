"""``specstate doctor``: a clear answer on any machine, and exit code 1 when a kernel is broken."""

import json

import pytest
import torch

from specstate import SpecStateError, doctor
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


@pytest.mark.parametrize(("path", "checked"), [("portable", ["portable"]), ("hopper", ["portable", "hopper"])])
def test_every_path_that_serves_is_checked(path: str, checked: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def not_run(backend: str, device: torch.device, path: str, *_: object) -> None:
        raise RuntimeError(f"of {path}")

    monkeypatch.setattr(doctor, "_choose", lambda: ("triton", torch.device("cpu"), "as if there were a GPU"))
    monkeypatch.setattr(doctor, "_path_of_a_model", lambda *_: path)
    monkeypatch.setattr(doctor, "Trial", not_run)
    found = doctor.examine()
    assert (found.ok, found.path) == (False, path)
    assert len(found.checks) == 8 * len(checked)
    flushes = [(check.name, check.detail) for check in found.checks if "flush" in check.name]
    assert flushes == [(f"{each}: flush", f"RuntimeError: of {each}") for each in checked]


def test_a_path_that_cannot_be_had_is_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise SpecStateError("no")

    monkeypatch.setattr(doctor, "build_backend", refuse)
    assert doctor._path_of_a_model("triton", torch.device("cpu")) == "portable"


def test_head_dimensions_of_a_trial_follow_its_path(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a GPU runs on, here computed by the reference."""
    monkeypatch.setitem(doctor.HEAD_DIMS, "reference", doctor.HEAD_DIMS["hopper"])
    trial = doctor.Trial("reference", torch.device("cpu"), "reference", "ring", None, None)
    spec = trial.config.layer
    assert (spec.head_k_dim, spec.head_v_dim, trial.config.path) == (128, 64, "reference")
    assert trial.decode(2) < doctor.TOLERANCE


@pytest.mark.gpu
def test_on_a_gpu_the_triton_kernels_are_checked() -> None:
    found = doctor.examine()
    assert found.ok, found
    on_hopper = torch.version.hip is None and torch.cuda.get_device_capability() == (9, 0)
    assert (found.backend, found.path) == ("triton", "hopper" if on_hopper else "portable")
    assert len(found.checks) == (18 if on_hopper else 9)
