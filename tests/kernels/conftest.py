"""Where the kernel tests run: on the GPU, or without one on a CPU under Triton's interpreter.

The root conftest has set TRITON_INTERPRET before anything could import triton. Tests too large for the interpreter are
marked ``gpu``. What takes ``path`` runs on each set of kernels; those for Hopper GPUs are not interpreted, and tests on
them are marked ``hopper``. One thread: the interpreter's tensors are small, and a second one only waits for the first.
"""

import os
from collections import Counter
from collections.abc import Iterator

import pytest
import torch

from tests.factories import LESS

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

INTERPRETED_SHARE = 3
"""CI, which has no GPU, interprets every third case of a test, its first one always."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if not LESS:
        return
    num_seen: Counter[str] = Counter()
    for item in items:
        if not item.path.name.startswith("test_triton_") or item.get_closest_marker("hopper"):
            continue
        test = item.nodeid.partition("[")[0]
        if num_seen[test] % INTERPRETED_SHARE:
            item.add_marker(pytest.mark.skip(reason="CI interprets every third case; a GPU, or CI unset, runs all"))
        num_seen[test] += 1


@pytest.fixture(scope="session")
def device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


@pytest.fixture(params=["portable", pytest.param("hopper", marks=pytest.mark.hopper)])
def path(request: pytest.FixtureRequest) -> str:
    """The kernels that a test runs on, as StateConfig.path has them."""
    return str(request.param)


@pytest.fixture(autouse=True, scope="package")
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
