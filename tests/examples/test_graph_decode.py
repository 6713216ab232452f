"""The real model on a GPU: Triton kernels by hand and inside a CUDA graph, against the plain decode."""

from typing import Any

import pytest
import torch

from lossless import compare, plain_decode
from model import load_model

from .conftest import EXAMPLES


@pytest.mark.gpu
@pytest.mark.parametrize("policy", ["eager", "deferred", "ring"])
@pytest.mark.parametrize("graph", [False, True], ids=["by hand", "by graph"])
def test_greedy_output_is_the_plain_output(prompts: list[bytes], policy: str, graph: bool) -> None:
    from graph_decode import CapturedStep

    model: Any = load_model(EXAMPLES / "weights", device="cuda")
    plain = plain_decode(model, [prompt[:64] for prompt in prompts[:3]], 128)
    # A batch of two, so that the third prompt enters when one of them leaves.
    report = compare(model, plain, policy, 2, 8, "triton", make_run=CapturedStep if graph else None)
    assert not report.failed(torch.float32), report


def test_the_script_needs_a_gpu(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    import graph_decode

    monkeypatch.setattr("sys.argv", ["graph_decode.py"])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert graph_decode.main() == 2
    assert capsys.readouterr().err == "graph_decode: needs a GPU\n"
