"""What is allocated is what was planned, and a caller's storage of any stride serves as well as the manager's own."""

import itertools
from typing import Any

import pytest
import torch

from specstate import SpecStateError, StateConfig, StateManager, StepMetadata
from specstate.validation import DTYPES
from tests.factories import (
    POLICIES,
    make_config,
    make_inputs,
    make_manager,
    make_params,
    make_twin,
    raw_bytes,
    run_step,
)

SHAPES = {"1 x 8 x 8": (1, 8, 8), "3 x 5 x 7": (3, 5, 7)}
TYPES = [
    ("float32", "bfloat16"),
    ("bfloat16", "float16"),
    ("float32", "float32"),
    ("float64", "bfloat16"),
    ("float64", "float64"),
]


def allocations(manager: StateManager) -> dict[int, int]:
    """Bytes of every memory block behind the manager's tensors, by address; views of one block count once."""
    storage: Any = manager._backend.storage
    once = (storage.cursors, storage.sampling, storage.counters, storage.conv_output)
    tensors = [tensor for tensor in once if tensor is not None]
    for layer in storage.layers:
        tensors += [tensor for tensor in layer if tensor is not None]
    return {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}


@pytest.mark.parametrize("types", TYPES, ids="-".join)
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("shape", SHAPES)
def test_planned_equals_allocated(shape: str, policy: str, types: tuple[str, str]) -> None:
    heads, k_dim, v_dim = SHAPES[shape]
    grid = itertools.product([None, 2, 4], [1, 6], [(1, 1), (2, 5), (4, 3)], [None, 13])
    for taps, window, (requests, checkpoints), capacity in grid:
        config = make_config(
            num_heads=heads,
            head_k_dim=k_dim,
            head_v_dim=v_dim,
            conv_kernel_size=taps,
            num_layers=3,
            max_query_len=window,
            max_requests=requests,
            num_checkpoints=checkpoints,
            record_capacity=capacity,
            fold_policy=policy,
            checkpoint_dtype=types[0],
            activation_dtype=types[1],
        )
        manager = make_manager(config)
        measured = sum(allocations(manager).values())
        assert manager.plan.total_bytes == manager.allocated_bytes == measured, config
        per_request = manager.plan.bytes_per_request
        assert manager.plan.requests_in(manager.plan.overhead_bytes + 2 * per_request) == 2
        manager.check_integrity()


def test_checkpoints_of_the_caller_are_not_allocated() -> None:
    config = make_config()
    pages = Pages(config, "contiguous")
    manager = StateManager(config, make_params(config), storage=pages.storage)
    theirs = config.num_layers * (config.num_checkpoints + 1) * (2 * 5 * 6 + 34 * 3) * 8
    assert manager.allocated_bytes == manager.plan.total_bytes - theirs
    manager.check_integrity()


class Pages:
    """Caller's memory full of a pattern, and views of it in one of several layouts."""

    def __init__(self, config: StateConfig, layout: str) -> None:
        spec, slots = config.layer, config.num_checkpoints + 1
        heads, k_dim, v_dim, taps = spec.num_heads, spec.head_k_dim, spec.head_v_dim, spec.conv_history_len
        state, conv = (heads, v_dim, k_dim), (spec.conv_channels, taps)
        self.config = config
        self.memory: list[torch.Tensor] = []
        self.storage: list[tuple[torch.Tensor, torch.Tensor]] = []
        for _ in range(config.num_layers):
            if layout == "contiguous":
                pair = (self._block(slots, *state), self._block(slots, *conv))
            elif layout == "conv inputs first":
                pair = (self._block(slots, *state), self._block(slots, taps, conv[0]).mT)
            elif layout == "state transposed":
                pair = (self._block(slots, heads, k_dim, v_dim).mT, self._block(slots, *conv))
            elif layout == "every third page":
                pair = (self._block(slots * 3, *state)[1::3], self._block(slots * 3, *conv)[1::3])
            else:
                assert layout == "wide rows"
                wide = self._block(slots, heads, v_dim, k_dim + 3), self._block(slots, conv[0] + 5, taps + 2)
                pair = (wide[0][..., 2 : 2 + k_dim], wide[1][:, 4 : 4 + conv[0], :taps])
            self.storage.append(pair)

    def _block(self, *shape: int) -> torch.Tensor:
        dtype = DTYPES[self.config.checkpoint_dtype]
        block = torch.arange(torch.Size(shape).numel(), dtype=dtype).reshape(shape) + 0.5
        self.memory.append(block)
        return block

    def outside(self) -> list[bytes]:
        """All of the memory with what the views of slot 1 and up show taken out."""
        shown = [(recurrent.clone(), conv.clone()) for recurrent, conv in self.storage]
        for pair in self.storage:
            for view in pair:
                view[1:] = 0.0
        outside = [raw_bytes(block) for block in self.memory]
        for pair, was in zip(self.storage, shown, strict=True):
            for view, content in zip(pair, was, strict=True):
                view.copy_(content)
        return outside


LAYOUTS = ["contiguous", "conv inputs first", "state transposed", "every third page", "wide rows"]


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_storage_of_the_caller_gives_the_same_and_nothing_else_is_touched(layout: str, policy: str) -> None:
    config = make_config(fold_policy=policy, max_requests=2, num_checkpoints=3)
    pages = Pages(config, layout)
    before = pages.outside()
    managers = [
        StateManager(config, make_params(config), storage=storage, debug=True) for storage in (None, pages.storage)
    ]
    for manager in managers:
        a, b = manager.admit("a"), manager.admit("b")
        twins = [make_twin(config), make_twin(config)]
        for seed, (m, n) in enumerate([(3, 1), (1, 4), (4, 4), (2, 2)]):
            run_step(manager, [(a, twins[0], 4, m), (b, twins[1], n, n)], seed)
        manager.flush([a])
        manager.load(b, [(torch.ones(2, 5, 6).double(), torch.ones(34, 3).double())] * 2, committed_len=9)
        manager.release(a)
        run_step(manager, [(manager.admit("c"), make_twin(config), 4, 2)], seed=9)
    for layer in range(config.num_layers):
        own, theirs = managers[0].checkpoints(layer), managers[1].checkpoints(layer)
        for mine, view, given in zip(own, theirs, pages.storage[layer], strict=True):
            assert mine is not None
            assert view is not None
            assert view.data_ptr() == given.data_ptr()
            assert view.stride() == given.stride()
            for slot in (1, 2):  # the third was never handed out
                assert raw_bytes(mine[slot]) == raw_bytes(view[slot])
    assert pages.outside() == before
    assert managers[0].digest() == managers[1].digest()


def interleaved(config: StateConfig, layout: str) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Storage of all layers in one block of memory."""
    spec, layers, slots = config.layer, config.num_layers, config.num_checkpoints + 1
    state = (spec.num_heads, spec.head_v_dim, spec.head_k_dim)
    conv = (spec.conv_channels, spec.conv_history_len)
    sizes = (torch.Size(state).numel(), torch.Size(conv).numel())
    if layout == "pages":  # a page holds a slot of every layer
        pages = torch.zeros(slots, layers, sum(sizes) + 7, dtype=DTYPES[config.checkpoint_dtype])
        parts = [pages[:, layer, 3 : 3 + sum(sizes)].split(sizes, -1) for layer in range(layers)]
    else:
        assert layout == "every other head"  # of a state, and every other channel of a conv
        heads = torch.zeros(slots, state[0], layers, *state[1:], dtype=DTYPES[config.checkpoint_dtype])
        channels = torch.zeros(slots, conv[0], layers, conv[1], dtype=DTYPES[config.activation_dtype])
        return [(heads[:, :, layer], channels[:, :, layer]) for layer in range(layers)]
    return [(recurrent.unflatten(-1, state), history.unflatten(-1, conv)) for recurrent, history in parts]


@pytest.mark.parametrize("layout", ["pages", "every other head"])
def test_layers_may_lie_interleaved(layout: str) -> None:
    config = make_config(num_layers=3)
    manager = StateManager(config, make_params(config), storage=interleaved(config, layout), debug=True)
    a, b, twins = manager.admit("a"), manager.admit("b"), [make_twin(config), make_twin(config)]
    for seed in range(5):
        run_step(manager, [(a, twins[0], 4, 1 + seed % 4), (b, twins[1], 3, 2)], seed)
    manager.flush()
    twins[0].check(manager, a)
    twins[1].check(manager, b)


def test_the_callers_null_slot_may_hold_anything() -> None:
    config = make_config()
    pages = Pages(config, "contiguous")
    for pair in pages.storage:
        for view in pair:
            view[0] = torch.nan
    manager = StateManager(config, make_params(config), storage=pages.storage, debug=True)
    run_step(manager, [(manager.admit("a"), make_twin(config), 4, 3)], seed=1)
    assert all(bool(view[0].isnan().all()) for pair in pages.storage for view in pair)


def test_views_that_require_grad_are_detached() -> None:
    config = make_config()
    pages = Pages(config, "contiguous")
    storage = [(recurrent.requires_grad_(), conv.requires_grad_()) for recurrent, conv in pages.storage]
    manager = StateManager(config, make_params(config), storage=storage, debug=True)
    run_step(manager, [(manager.admit("a"), make_twin(config), 4, 3)], seed=1)
    recurrent, conv = manager.checkpoints(0)
    assert not recurrent.requires_grad
    assert conv is not None
    assert not conv.requires_grad


def test_tensors_start_clean() -> None:
    manager = make_manager()
    storage: Any = manager._backend.storage
    assert not storage.cursors.any()
    assert not storage.counters.any()
    assert (storage.sampling[:, 5:] == -1).all() and not storage.sampling[:, :5].any()
    for layer in storage.layers:
        assert not any(tensor.any() for tensor in layer if tensor is not None)


@pytest.mark.parametrize("layout", ["contiguous", "wide rows"])
def test_load_in_place_reads_the_callers_memory(layout: str) -> None:
    config = make_config()
    pages = Pages(config, layout)
    manager = StateManager(config, make_params(config), storage=pages.storage, debug=True)
    handle = manager.admit("a")
    slot = int(manager.checkpoint_slots([handle])[0])
    for recurrent, conv in pages.storage:
        recurrent[slot] = 0.25
        conv[slot] = 0.125
    manager.load(handle, None, committed_len=11)
    twin = make_twin(config)
    twin.committed_len = 11
    twin.states = [
        state._replace(recurrent=torch.full_like(state.recurrent, 0.25), conv=torch.full_like(state.conv, 0.125))
        for state in twin.states
    ]
    twin.check(manager, handle)
    run_step(manager, [(handle, twin, 4, 2)], seed=3)
    run_step(manager, [(handle, twin, 4, 4)], seed=4)


def test_a_plan_above_the_limit_is_refused_before_anything_is_allocated() -> None:
    total = make_manager().plan.total_bytes
    assert make_manager(make_config(memory_limit_bytes=total)).allocated_bytes == total
    with pytest.raises(ValueError, match=rf"memory_limit_bytes = {total - 1} .*needs {total} bytes"):
        make_config(memory_limit_bytes=total - 1)


def test_inputs_of_a_step_are_not_kept() -> None:
    """Records hold copies: a caller may reuse its buffers as soon as verify returns."""
    config = make_config()
    manager, twin = make_manager(config), make_twin(config)
    handle = manager.admit("a")
    inputs = make_inputs(config, 4, seed=1)
    twin.commit(inputs, 3)
    step = manager.begin_step(StepMetadata(handles=(handle,), query_lens=(4,)))
    for layer, tensors in enumerate(make_inputs(config, 4, seed=1)):
        step.verify(layer, tensors.qkv, tensors.raw_gate, tensors.raw_beta)
        for tensor in (tensors.qkv, tensors.raw_gate, tensors.raw_beta):
            tensor.fill_(torch.nan)
    step.defer(torch.tensor([3]))
    twin.check(manager, handle)


@pytest.mark.parametrize("field", ["recurrent", "conv"])
def test_storage_that_overlaps_itself_is_refused(field: str) -> None:
    config = make_config()
    pages = Pages(config, "contiguous")
    views = {"recurrent": pages.storage[0][0], "conv": pages.storage[0][1]}
    views[field] = views[field][:1].expand_as(views[field])
    with pytest.raises(SpecStateError, match=rf"storage\[0\]\.{field} must not overlap itself"):
        StateManager(config, make_params(config), storage=[(views["recurrent"], views["conv"])] * 2)
