"""What ``import specstate`` costs and drags in."""

import json
import subprocess
import sys

import specstate

PROBE = """
import json, sys, time
import torch
torch_alone = set(sys.modules)
began = time.perf_counter()
import specstate
seconds = time.perf_counter() - began
print(json.dumps({
    "seconds": seconds,
    "added": sorted(set(sys.modules) - torch_alone),
    "cuda": torch.cuda.is_initialized(),
}))
"""


def probe(source: str) -> dict[str, object]:
    ended = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, timeout=120, check=True)
    answer: dict[str, object] = json.loads(ended.stdout)
    return answer


def roots(modules: object) -> set[str]:
    assert isinstance(modules, list)
    return {name.partition(".")[0] for name in modules}


def test_import_adds_no_triton_and_nothing_optional_and_touches_no_device() -> None:
    answer = probe(PROBE)
    assert roots(answer["added"]).isdisjoint(
        {"triton", "fla", "einops", "safetensors", "argcomplete", "prometheus_client", "matplotlib", "pytest"}
    )
    assert answer["cuda"] is False


def test_import_takes_under_two_seconds_beyond_torch() -> None:
    assert any(float(str(probe(PROBE)["seconds"])) < 2.0 for _ in range(2))


def test_every_public_name_is_there_and_adds_no_triton() -> None:
    answer = probe(
        "import json, sys, torch; before = set(sys.modules)\n"
        "from specstate import *\n"
        "import specstate\n"
        "missing = [name for name in specstate.__all__ if name not in globals()]\n"
        "print(json.dumps({'missing': missing, 'added': sorted(set(sys.modules) - before),"
        " 'cuda': torch.cuda.is_initialized()}))"
    )
    assert answer["missing"] == []
    assert roots(answer["added"]).isdisjoint(
        {"triton", "fla", "einops", "safetensors", "argcomplete", "prometheus_client", "matplotlib"}
    )
    assert answer["cuda"] is False


def test_a_plan_needs_no_torch() -> None:
    answer = probe(
        "import json, sys, specstate.cli\n"
        "specstate.plan_bytes(specstate.presets.KIMI_K3.config(max_query_len=8, max_requests=1))\n"
        "print(json.dumps({'loaded': sorted(sys.modules)}))"
    )
    assert roots(answer["loaded"]).isdisjoint({"torch", "triton", "numpy"})


def test_metrics_need_neither_torch_nor_a_client_of_prometheus() -> None:
    answer = probe(
        "import json, sys, specstate, specstate.prometheus\n"
        "specstate.Metrics, specstate.Folds\n"
        "print(json.dumps({'loaded': sorted(sys.modules)}))"
    )
    assert roots(answer["loaded"]).isdisjoint({"torch", "triton", "numpy", "prometheus_client"})


def test_names_are_listed_and_others_refused() -> None:
    assert set(specstate.__all__) <= set(dir(specstate))
    assert not hasattr(specstate, "no_such_name")


def test_errors_are_value_errors() -> None:
    for error in (
        specstate.CapacityError,
        specstate.RankDisagreementError,
        specstate.StaleHandleError,
        specstate.StepOrderError,
    ):
        assert issubclass(error, specstate.SpecStateError)
    assert issubclass(specstate.SpecStateError, ValueError)
