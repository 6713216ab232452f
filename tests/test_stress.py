"""A small share of `python -m tests.stress`, and that it would see what is wrong."""

import numpy as np
import pytest

from tests import stress
from tests.factories import POLICIES


def test_many_operations() -> None:
    report = stress.run(operations=1500, seed=1, slots=16)
    assert report.failure is None
    assert report.done.total() == 1500
    assert all(report.checked[what] > 0 for what in ("live", "preempted", "published", "boundaries"))
    assert 0.0 < report.worst_error < stress.TOLERANCE
    wanted = {"commit", "defer", "fork", "restore", "publish a boundary", "retract", "refused: CapacityError"}
    assert wanted <= report.done.keys()


@pytest.mark.parametrize("policy", POLICIES)
def test_a_wrong_state_is_found(policy: str) -> None:
    """One number of one layer, in a checkpoint that nothing writes any more."""
    world = stress.World(policy, slots=8, seed=3)
    for _ in range(150):
        world.run()
    while not world.published:
        world.publish()
    key = list(world.manager.published())[-1]
    recurrent, _ = world.manager.checkpoints(1)
    recurrent[world.manager.published()[key]] += 1e-6
    with pytest.raises(AssertionError, match="state of"):
        world.finish()


def test_a_failure_names_the_operation_and_the_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stress.Recurrence, "token", lambda self, recurrent, conv, inputs: (recurrent + 1.0, conv))
    report = stress.run(operations=300, seed=7, slots=8)
    assert report.failure is not None
    assert "of seed 7, " in report.failure
    assert "AssertionError: " in report.failure


def test_the_recurrence_forgets_nothing() -> None:
    """Without a gate to speak of, a state keeps what it was given."""
    recurrence = stress.World("ring", slots=1, seed=0).recurrence
    state = np.ones((1, *recurrence.zero.recurrent.shape))
    inputs = np.zeros((1, 2, recurrence.channels + recurrence.k_dim + 1))
    inputs[..., recurrence.channels : -1] = -1e3
    inputs[..., -1] = -1e3
    with np.errstate(over="ignore"):
        after, _ = recurrence.token(state, np.zeros((1, *recurrence.zero.conv.shape)), inputs)
    assert np.allclose(after, state)
