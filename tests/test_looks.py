"""A window that looks like an earlier one is not checked in full again; where an output lies is asked every time."""

from typing import Any

import pytest
import torch

from specstate import SpecStateError, StateManager, StepMetadata
from specstate.backends import looks
from specstate.backends.looks import WindowLooks
from tests.factories import make_config, make_inputs, make_params


class Loop:
    """A manager with one request, and steps that are taken back."""

    def __init__(self) -> None:
        self.config = make_config(num_layers=1)
        self.manager = StateManager(self.config, make_params(self.config), device="cpu", backend="reference")
        self.handle = self.manager.admit("a")

    def verify(self, tensors: list[Any]) -> torch.Tensor:
        step = self.manager.begin_step(StepMetadata(handles=(self.handle,), query_lens=(3,)))
        try:
            out = step.verify(0, *tensors[:3], out=tensors[3])
            assert out is not None
            return out.clone()
        finally:
            step.cancel()

    def windows(self) -> list[Any]:
        """qkv, raw_gate, raw_beta and an output of a window of three."""
        spec, inputs = self.config.layer, make_inputs(self.config, 3, 0)[0]
        out = torch.zeros(3, spec.num_heads, spec.head_v_dim, dtype=torch.float64)
        return [inputs.qkv, inputs.raw_gate, inputs.raw_beta, out]


@pytest.fixture
def loop() -> Loop:
    return Loop()


def test_known_windows_give_what_new_ones_give(loop: Loop) -> None:
    first = loop.verify(loop.windows())
    assert torch.equal(loop.verify(loop.windows()), first)


@pytest.mark.parametrize("place", [0, 1, 2, 3])
@pytest.mark.parametrize("change", ["dtype", "shape", "not a tensor", "None", "strides"])
def test_what_looks_otherwise_is_checked(loop: Loop, place: int, change: str) -> None:
    loop.verify(loop.windows())
    tensors = loop.windows()
    given = tensors[place]
    if change == "strides":
        # An output that shares its tokens' memory; inputs may.
        tensors[place] = given[:1].expand(given.shape)
    else:
        other = {"dtype": given.half(), "shape": given[:2], "not a tensor": given.tolist(), "None": None}
        tensors[place] = other[change]
    if (change == "None" and place == 3) or (change == "strides" and place < 3):
        loop.verify(tensors)
        return
    with pytest.raises(SpecStateError, match=r"qkv|raw_gate|raw_beta|out"):
        loop.verify(tensors)
    loop.verify(loop.windows())


@pytest.mark.parametrize("name", ["qkv", "raw_gate", "raw_beta", "the manager's"])
def test_where_an_output_lies_is_asked_every_time(loop: Loop, name: str) -> None:
    spec = loop.config.layer
    size = 3 * spec.num_heads * spec.head_v_dim
    for _ in range(3):
        tensors = loop.windows()
        loop.verify(tensors)
        if name == "the manager's":
            tensors[3] = loop.manager.checkpoints(0)[0].flatten()[:size].view(tensors[3].shape)
        else:
            place = ["qkv", "raw_gate", "raw_beta"].index(name)
            memory = torch.zeros(tensors[place].numel() + size, dtype=torch.float64)
            tensors[place] = memory[: tensors[place].numel()].view(tensors[place].shape).copy_(tensors[place])
            # The last value of the one is the first of the other.
            tensors[3] = memory[tensors[place].numel() - 1 :][:size].view(tensors[3].shape)
        with pytest.raises(SpecStateError, match=f"out must not share memory with {name}"):
            loop.verify(tensors)


def test_subclasses_are_checked_every_time(loop: Loop) -> None:
    tensors = [torch.nn.Parameter(tensor) for tensor in loop.windows()[:3]]
    for _ in range(2):
        loop.verify([*tensors, loop.windows()[3]])
    assert WindowLooks().find(3, tensors) is None
    assert not loop.manager._backend._looks._known


def test_no_more_than_some_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(looks, "MOST_LOOKS", 4)
    known, tensor = WindowLooks(), torch.zeros(2, 2)
    for tokens in range(9):
        known.keep(tokens, (tensor,) * 4)
        assert known.find(tokens, (tensor,) * 4) == ((16,) * 4, None)
        assert len(known._known) <= 4
