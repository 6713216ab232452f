"""The examples import each other by name; the model, its prompts and its plain decode are read once."""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

EXAMPLES = Path(__file__).parents[2] / "examples"
sys.path.insert(0, str(EXAMPLES))


@pytest.fixture(autouse=True, scope="session")
def one_thread() -> Iterator[None]:
    # The matrices are small: a second thread gains nothing, and waiting for it costs much on a busy machine.
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def model() -> Any:
    from model import load_model

    return load_model(EXAMPLES / "weights")


@pytest.fixture(scope="session")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder like `examples/weights`: the shipped model, and a draft model of random weights."""
    from model import Model, ModelConfig, save_model
    from train import initialise

    folder = tmp_path_factory.mktemp("weights")
    for name in ("model.json", "model.safetensors"):
        (folder / name).symlink_to(EXAMPLES / "weights" / name)
    torch.manual_seed(0)
    heads = {"num_heads": 2, "head_k_dim": 16, "head_v_dim": 24, "conv_kernel_size": 6}
    drafter = Model(ModelConfig(d_model=48, num_layers=1, gate_rank=8, mlp_hidden=64, **heads))
    initialise(drafter)
    for block in drafter.blocks:  # zero at the start of training, which would hide the mixer
        torch.nn.init.normal_(block.o_proj.weight, std=0.2)
        torch.nn.init.normal_(block.mlp_out.weight, std=0.2)
    save_model(drafter, folder / "drafter")
    return folder


@pytest.fixture(scope="session")
def prompts() -> list[bytes]:
    from prompts import load_prompts

    return [prompt for _, prompt in load_prompts(EXAMPLES)]
