"""A small share of `python -m tests.kernels.stress_graphs`, and that it would see what is wrong."""

import pytest
import torch

from tests.kernels import stress_graphs
from tests.kernels.harness import AIM


@pytest.mark.skipif(torch.cuda.is_available(), reason="Triton is not interpreted where a GPU is")
def test_steps_by_hand() -> None:
    worlds, failure = stress_graphs.run(9, 0, "cpu", stress_graphs.INTERPRETED)
    assert failure is None
    assert all(world.checked > 0 for world in worlds)
    assert 0.0 < max(world.worst_error for world in worlds) < 10 * AIM


@pytest.mark.gpu
def test_steps_by_graph(path: str) -> None:
    worlds, failure = stress_graphs.run(300, 1, "cuda", stress_graphs.ON_GPU, path)
    assert failure is None
    done = [world.done for world in worlds]
    assert all(counts[f"step: {end}"] > 0 for counts in done for end in ("defer", "commit", "verify"))


def test_a_wrong_state_is_found(path: str, device: str) -> None:
    """One layer of a checkpoint moves by a hundredth, behind the manager's back."""
    world = stress_graphs.World("eager", stress_graphs.INTERPRETED, 0, device, path)
    world.step()
    world.check(10 * AIM)
    [slot, *_] = world.manager.checkpoint_slots([world.lives[0].handle]).tolist()
    recurrent, _ = world.manager.checkpoints(1)
    recurrent[slot] = recurrent[slot] * 1.01 + 1e-3
    with pytest.raises(AssertionError, match="states are wrong"):
        world.check(10 * AIM)
