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
def prompts() -> list[bytes]:
    from prompts import load_prompts

    return [prompt for _, prompt in load_prompts(EXAMPLES)]
