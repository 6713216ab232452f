"""Settings of every test: no GPU, no gpu and hopper tests, and Triton interpreted; hypothesis repeats itself in CI."""

import os
from collections import Counter
from collections.abc import Generator

import pytest
import torch
from hypothesis import HealthCheck, Phase, settings

from tests import interpreter
from tests.tracing import untraced

# Triton reads this once, when it is first imported: here, before any test module or plugin of fla's can import it.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
if os.environ.get("TRITON_INTERPRET") == "1":
    interpreter.quicken()

# Matrices here are small: a second thread gains nothing, and two pools that wait for each other's cores lose much.
torch.set_num_threads(1)

# The first draw of an example builds a manager, and a busy machine makes any deadline a coin toss.
settings.register_profile("ci", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("dev", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("unshrunk", settings.get_profile("ci"), phases=[Phase.explicit, Phase.generate])
settings.load_profile("ci" if os.environ.get("CI") else "dev")


#: Of a test with many cases coverage sees the first ones in each process.
TRACED_CASES = 6
_num_cases: Counter[str] = Counter()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, object, object]:
    test = item.nodeid.partition("[")[0]
    _num_cases[test] += 1
    with untraced(_num_cases[test] > TRACED_CASES):
        return (yield)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    on_gpu = torch.cuda.is_available()
    on_hopper = on_gpu and torch.version.hip is None and torch.cuda.get_device_capability() == (9, 0)
    for item in items:
        if item.get_closest_marker("gpu") and not on_gpu:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
        if item.get_closest_marker("hopper") and not on_hopper:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device of compute capability 9.0"))
