"""The manager over the Triton kernels: every order of transitions, golden traces, and no wait for the device."""

import itertools
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
import triton
from hypothesis import HealthCheck, settings

from specstate import (
    CapacityError,
    Handle,
    PrefixKey,
    SamplingParams,
    StateConfig,
    StateManager,
    StepMetadata,
    replay,
)
from specstate.backends.tensors import TensorBackend
from specstate.kernels import portable
from specstate.oracle import OracleState
from specstate.storage import Storage
from tests.factories import (
    POLICIES,
    Twin,
    make_inputs,
    make_manager,
    make_params,
    make_twin,
    raw_bytes,
    relative_error,
    run_step,
    verify_all,
    widened,
)
from tests.kernels.harness import AIM, no_waits, small_config
from tests.test_lifecycle import Lifecycle

#: Traces that the interpreter replays in seconds; all others wait for a GPU.
QUICK = (
    "class02_counts_out_of_range_ring",
    "class04_preempted_deferred",
    "class05_padding_eager",
    "class06_boundaries_ring",
    "class06_loads_in_place_deferred",
    "class07_eviction_deferred",
    "class08_forked_ring",
    "class13_cancel_deferred",
    "class13_new_parameters_deferred",
    "class13_written_records_ring",
)
TRACES = [
    pytest.param(path, id=path.stem, marks=() if path.stem in QUICK else pytest.mark.gpu)
    for path in sorted((Path(__file__).parents[1] / "traces").glob("*.jsonl"))
]
ON_GPU = torch.cuda.is_available()


class TritonLifecycle(Lifecycle):
    """The machine of tests/test_lifecycle.py; outputs of one head's token may nearly cancel, so that 1e-5 can show."""

    backend = "triton"
    device = "cuda" if ON_GPU else "cpu"
    sizes: ClassVar[dict[str, Any]] = {
        "head_k_dim": 16,
        "head_v_dim": 16,
        "checkpoint_dtype": "float32",
        "activation_dtype": "float32",
    }
    tolerance = 1e-4


class HopperLifecycle(TritonLifecycle):
    """The same over the kernels for Hopper GPUs."""

    sizes: ClassVar[dict[str, Any]] = widened("hopper", **TritonLifecycle.sizes, path="hopper")


class TestTritonLifecycle(TritonLifecycle.TestCase):
    """Few examples under the interpreter; SPECSTATE_TRITON_EXAMPLES asks for more."""

    settings = settings(
        max_examples=int(os.environ.get("SPECSTATE_TRITON_EXAMPLES", "100" if ON_GPU else "8")),
        stateful_step_count=20 if ON_GPU else 12,
        suppress_health_check=list(HealthCheck),
        deadline=None,
    )


@pytest.mark.hopper
class TestHopperLifecycle(HopperLifecycle.TestCase):
    """SPECSTATE_TRITON_EXAMPLES asks for more."""

    settings = settings(
        max_examples=int(os.environ.get("SPECSTATE_TRITON_EXAMPLES", "50")),
        stateful_step_count=20,
        suppress_health_check=list(HealthCheck),
        deadline=None,
    )


@pytest.mark.parametrize("trace", TRACES)
def test_golden_traces(trace: Path, path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A replay shrinks heads to 16 x 16, which not all kernels cover: here to the least that they do."""
    shrunk = replay.replay_config

    def on_path(*given: Any) -> StateConfig:
        config = shrunk(*given)
        layer = config.layer.model_copy(update=widened(path, head_k_dim=16, head_v_dim=16))
        return config.model_copy(update={"layer": layer, "path": path})

    monkeypatch.setattr(replay, "replay_config", on_path)
    report = replay.replay_file(trace, backend="triton")
    assert report.first_difference is None
    assert report.ok and report.events > 0


def test_the_quick_traces_exist() -> None:
    assert set(QUICK) <= {trace.id for trace in TRACES}


@pytest.mark.parametrize("policy", POLICIES)
def test_sampled_steps_until_the_end(policy: str, path: str, device: str) -> None:
    """sample, defer, finish: what the device decides itself equals the reference, step by step."""
    config = small_config(path=path, fold_policy=policy, conv_kernel_size=4, max_requests=3)
    exact = config.model_copy(update={"path": None})
    managers = [
        make_manager(each, device, backend=name, debug=False)
        for each, name in ((config, "triton"), (exact, "reference"))
    ]
    handles = [[manager.admit(name, SamplingParams(end_token_ids=(3, 5))) for name in "abc"] for manager in managers]
    for seed in range(6):
        inputs = make_inputs(config, 9, seed, device)
        generator = torch.Generator().manual_seed(seed)
        logits = torch.randn(9, 7, generator=generator).to(device)
        drafts = logits.argmax(-1).roll(1)
        results, counters = [], []
        for manager, rows in zip(managers, handles, strict=True):
            step = manager.begin_step(StepMetadata(handles=tuple(rows), query_lens=(4, 3, 2)))
            verify_all(step, inputs)
            result = step.sample(logits, drafts)
            step.defer(result)
            names = ("num_accepted", "tokens", "next_token", "finished")
            results.append([getattr(result, name).tolist() for name in names])
            counters.append((manager.counters(), [manager.committed_len(handle) for handle in rows]))
        assert results[0] == results[1]
        assert counters[0] == counters[1]
    assert counters[0][0].wasted_windows > 0


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("taps", [None, 3])
def test_steps_against_the_twin(taps: int | None, policy: str, path: str, device: str) -> None:
    """Rows in changing order and number, widths 1 to T, deferred and committed, checked after every step."""
    config = small_config(
        path=path, fold_policy=policy, conv_kernel_size=taps, num_layers=2, max_requests=3, record_capacity=9
    )
    manager = make_manager(config, device, backend="triton")
    rows = [(manager.admit(name), make_twin(config)) for name in "abc"]
    plan = [
        [(0, 4, 3), (1, 1, 1), (2, 4, 4)],
        [(2, 1, 1), (0, 4, 4)],
        [(1, 3, 2)],
        [(1, 4, 1), (2, 4, 2), (0, 2, 2)],
        [(0, 1, 1), (1, 4, 4)],
    ]
    for seed, windows in enumerate(plan):
        chosen = [(*rows[i], query_len, accepted) for i, query_len, accepted in windows]
        run_step(manager, chosen, seed, 10 * AIM, "commit" if seed == 3 else "defer")
    manager.flush()
    for handle, twin in rows:
        twin.check(manager, handle, 10 * AIM)


def storage_of(manager: StateManager) -> Storage:
    backend = manager._backend
    assert isinstance(backend, TensorBackend)
    return backend.storage


def bytes_by_slot(manager: StateManager) -> dict[tuple[str, int, int], bytes]:
    """Every tensor of the storage by name, layer and slot."""
    return {
        (name, index, slot): raw_bytes(tensor[slot])
        for index, layer in enumerate(storage_of(manager).layers)
        for name, tensor in layer._asdict().items()
        if tensor is not None
        for slot in range(len(tensor))
    }


@pytest.mark.parametrize("taps", [None, 3], ids=["no conv", "conv 3"])
@pytest.mark.parametrize("pending", [0, 1, 7])
def test_a_copied_state_is_the_committed_one(pending: int, taps: int | None, path: str, device: str) -> None:
    """With no record, one, and as many as pass the ring's end: destinations get the same, nothing else moves."""
    config = small_config(
        path=path, conv_kernel_size=taps, num_layers=2, max_requests=2, num_checkpoints=5, record_capacity=11
    )
    manager = make_manager(config, device, backend="triton")
    manager.admit("other")
    handle, twin = manager.admit("a"), make_twin(config)
    run_step(manager, [(handle, twin, 4, 3)], 1, 10 * AIM)
    run_step(manager, [(handle, twin, 4, 4)], 2, 10 * AIM)
    manager.flush()
    for seed, accepted in enumerate({0: (), 1: (1,), 7: (4, 3)}[pending]):
        run_step(manager, [(handle, twin, 4, accepted)], 3 + seed, 10 * AIM)
    assert manager._backend.cursor(handle.record_slot).pending_len == pending
    [source] = manager.checkpoint_slots([handle]).tolist()
    before, cursors = bytes_by_slot(manager), storage_of(manager).cursors.clone()
    manager._backend.copy_state(handle.record_slot, False, [4, 3])
    after = bytes_by_slot(manager)
    assert torch.equal(storage_of(manager).cursors, cursors)
    changed = {(name, slot) for (name, layer, slot), held in after.items() if held != before[name, layer, slot]}
    names = ("recurrent",) if taps is None else ("recurrent", "conv")
    assert changed == {(name, slot) for name in names for slot in (3, 4)}
    for index, layer in enumerate(storage_of(manager).layers):
        for name in names:
            assert after[name, index, 3] == after[name, index, 4]
        if not pending:
            assert after["recurrent", index, 3] == after["recurrent", index, source]
        assert relative_error(layer.recurrent[3], twin.states[index].recurrent) < 10 * AIM
        if layer.conv is not None:
            assert torch.equal(layer.conv[3].cpu().double(), twin.states[index].conv)


@pytest.mark.parametrize("position", [0, 2, 5, 6, 2**31 - 9])
def test_attach_rebuilds_the_conv_ring(position: int, path: str, device: str) -> None:
    """The history's oldest input lies in entry ``position``, wherever the ring wraps; no other entry is written."""
    config = small_config(path=path, conv_kernel_size=4, num_layers=2, max_requests=2)
    manager = make_manager(config, device, backend="triton", debug=False)
    backend, storage = manager._backend, storage_of(manager)
    for layer in storage.layers:
        assert layer.conv is not None and layer.conv_ring is not None
        layer.conv_ring[1] = torch.nan
        layer.conv[2].copy_(torch.randn(layer.conv[2].shape, generator=torch.Generator().manual_seed(1)))
    standing = torch.tensor([position, 0, 9, 1, 1, 0], dtype=torch.int32, device=device)
    params = SamplingParams(temperature=0.5, seed=2**50 + 1, end_token_ids=(4,))
    backend.attach(2, 1, 12, standing, params.columns())
    assert tuple(backend.cursor(1)) == (position, 0, 12, True, 2, 0)
    assert storage.sampling[1].tolist() == list(params.columns())
    for layer in storage.layers:
        assert layer.conv is not None and layer.conv_ring is not None
        size, history = layer.conv_ring.shape[1], layer.conv.shape[-1]
        entries = [(position + i) % size for i in range(history)]
        assert torch.equal(layer.conv_ring[1, entries].mT, layer.conv[2])
        rest = [entry for entry in range(size) if entry not in entries]
        assert layer.conv_ring[1, rest].isnan().all()


@pytest.mark.parametrize("folded_by_verify", [False, True])
def test_a_parked_cursor_is_nobodys(folded_by_verify: bool, path: str, device: str) -> None:
    config = small_config(path=path, fold_policy="deferred", conv_kernel_size=3)
    manager = make_manager(config, device, backend="triton", debug=False)
    handle, twin = manager.admit("a"), make_twin(config)
    run_step(manager, [(handle, twin, 4, 3)], 1, 10 * AIM)
    backend, row = manager._backend, handle.record_slot
    records = bytes_by_slot(manager)
    backend.park(row, folded_by_verify)
    lens, slot = (3, 0) if folded_by_verify else (0, 3), int(manager.checkpoint_slots([handle])[0])
    assert tuple(backend.cursor(row)) == (*lens, 0, False, slot, 0)
    backend.unpark(row, 7)
    assert tuple(backend.cursor(row)) == (*lens, 7, False, slot, 0)
    assert bytes_by_slot(manager) == records


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("taps", [None, 3], ids=["no conv", "conv 3"])
def test_between_lives_against_the_twin(taps: int | None, policy: str, path: str, device: str) -> None:
    """Forks, preempted and restored requests go on from their committed tokens, in slots that others have used."""
    config = small_config(
        path=path, fold_policy=policy, conv_kernel_size=taps, num_layers=2, max_requests=6, record_capacity=9
    )
    manager = make_manager(config, device, backend="triton")
    rows = {name: (manager.admit(name), make_twin(config)) for name in "abc"}
    tolerance = 10 * AIM

    def run(seed: int, **windows: tuple[int, int]) -> None:
        run_step(manager, [(*rows[name], *window) for name, window in windows.items()], seed, tolerance)

    def fork(source: str, name: str) -> None:
        handle, twin = rows[source]
        [new] = manager.fork(handle, [name])
        rows[name] = new, Twin(twin.oracle, twin.num_layers, list(twin.states), twin.committed_len)
        rows[name][1].check(manager, new, tolerance)

    run(1, a=(4, 3), b=(4, 2), c=(2, 2))
    fork("a", "d")
    # All layers have verified: under "deferred" they have folded, and the cursors do not know.
    step = manager.begin_step(StepMetadata(handles=(rows["b"][0], rows["c"][0]), query_lens=(3, 4)))
    verify_all(step, make_inputs(config, 7, 2, device))
    fork("b", "e")
    manager.preempt(rows["b"][0])
    manager.preempt(rows["c"][0], fold=True)
    manager.retract(rows["a"][0])
    used = [manager.admit(f"used {i}") for i in range(2)]
    run_step(manager, [(handle, make_twin(config), 4, 4) for handle in used], 3, tolerance)
    for handle in used:
        manager.release(handle)
    step.defer(torch.tensor([3, 4], device=device))  # too late for either
    for name in "abc":
        rows[name] = manager.resume(name), rows[name][1]
        rows[name][1].check(manager, rows[name][0], tolerance)
    assert manager.counters().dropped_ends == 2
    run(4, c=(4, 1), e=(4, 4), a=(1, 1), b=(4, 3), d=(2, 2))
    manager.preempt(rows["b"][0])
    manager.fence("flush")
    rows["b"] = manager.resume("b"), rows["b"][1]
    assert all(manager._backend.cursor(slot).pending_len == 0 for slot in range(6))
    run(5, a=(4, 4), b=(4, 1), c=(4, 2), d=(4, 3), e=(1, 1))


@dataclass
class Story:
    """Requests of one manager by name, their twins, and what every twin held after each of its tokens."""

    manager: StateManager
    rows: dict[str, tuple[Handle, Twin]] = field(default_factory=dict)
    past: dict[str, dict[int, list[OracleState]]] = field(default_factory=dict)

    def add(self, name: str, handle: Handle, source: str = "", position: int = 0) -> None:
        """A request that stands where ``source`` stood at ``position``."""
        twin, past = make_twin(self.manager.config), self.past.get(source, {})
        if position:
            twin = Twin(twin.oracle, twin.num_layers, list(past[position]), position)
        self.rows[name], self.past[name] = (handle, twin), dict(past)
        self.check(name)

    def check(self, name: str) -> None:
        handle, twin = self.rows[name]
        twin.check(self.manager, handle, 10 * AIM)

    def run(self, seed: int, table: torch.Tensor | None = None, **windows: tuple[int, int]) -> None:
        """A step of (query_len, num_accepted) windows; line i of ``table`` belongs to the i-th of them."""
        chosen = [self.rows[name] for name in windows]
        lens = tuple(query_len for query_len, _ in windows.values())
        device = self.manager.device
        inputs = make_inputs(self.manager.config, sum(lens), seed, device)
        blocks = {}
        if table is not None:
            positions = torch.tensor([twin.committed_len for _, twin in chosen], dtype=torch.int32, device=device)
            blocks = {"block_table": table, "positions": positions}
        step = self.manager.begin_step(StepMetadata(handles=tuple(h for h, _ in chosen), query_lens=lens), **blocks)
        verify_all(step, inputs)
        start, counts = 0, torch.tensor([accepted for _, accepted in windows.values()], device=device)
        for name, (query_len, accepted) in windows.items():
            twin = self.rows[name][1]
            for token in range(start, start + accepted):
                twin.commit([tensors[token : token + 1] for tensors in inputs], 1)
                self.past[name][twin.committed_len] = list(twin.states)
            start += query_len
        step.defer(counts)
        for name in windows:
            self.check(name)

    def check_slot(self, slot: int, name: str, position: int) -> None:
        """The checkpoint slot holds what ``name`` held at ``position``, conv histories to the bit."""
        for index, state in enumerate(self.past[name][position]):
            recurrent, conv = self.manager.checkpoints(index)
            assert relative_error(recurrent[slot], state.recurrent) < 10 * AIM
            if conv is not None:
                assert torch.equal(conv[slot].cpu().double(), state.conv)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("taps", [None, 3], ids=["no conv", "conv 3"])
def test_publish_restore_and_fork_against_the_twin(taps: int | None, policy: str, path: str, device: str) -> None:
    """At boundaries and in between, with records pending, from slots that were evicted and used again."""
    config = small_config(
        path=path,
        fold_policy=policy,
        conv_kernel_size=taps,
        num_layers=2,
        max_requests=6,
        num_checkpoints=13,
        block_size=5,
    )
    story = Story(make_manager(config, device, backend="triton"))
    manager = story.manager
    for name in "ab":
        story.add(name, manager.admit(name))
    story.run(1, a=(4, 3), b=(4, 4))
    story.run(2, a=(4, 4), b=(4, 1))
    keys = {(name, position): PrefixKey(f"{name} {position}", position) for name, position in (("a", 5), ("b", 5))}
    for (name, _), key in keys.items():
        manager.publish(story.rows[name][0], key)
    keys["a", 7] = PrefixKey("a 7", 7)
    manager.publish(story.rows["a"][0], keys["a", 7])
    for (name, position), key in keys.items():
        story.check_slot(manager.published()[key], name, position)
    story.add("c", manager.restore(keys["a", 5], "c"), "a", 5)
    story.run(3, c=(4, 3), a=(4, 2), b=(3, 3))
    story.add("d", manager.fork(story.rows["c"][0], ["d"])[0], "c", 8)
    story.run(4, d=(4, 4), a=(2, 2), c=(1, 1), b=(4, 4))  # all but c cross 10
    manager.publish(story.rows["d"][0], PrefixKey("d 10", 10))
    manager.preempt(story.rows["d"][0])
    manager.retract(story.rows["b"][0])
    with pytest.raises(CapacityError):
        manager.reserve_checkpoints(14)
    free = manager.reserve_checkpoints(13 - manager.metrics().checkpoint_slots_in_use)
    assert manager.metrics().prefix_evictions == 0
    story.add("e", manager.restore(keys["a", 7], "e"), "a", 7)  # in the place of what b left, unused longest
    assert keys["b", 5] not in manager.published()
    manager.return_checkpoints(free)
    for name in "db":
        story.rows[name] = manager.resume(name), story.rows[name][1]
        story.check(name)
    story.run(5, e=(4, 4), d=(4, 1), b=(4, 3))
    for key, position, name in ((keys["a", 5], 5, "a"), (PrefixKey("d 10", 10), 10, "d")):
        story.check_slot(manager.published()[key], name, position)
    manager.check_integrity()


@pytest.mark.parametrize("policy", POLICIES)
def test_a_block_table_keeps_every_boundary(policy: str, path: str, device: str) -> None:
    config = small_config(
        path=path,
        fold_policy=policy,
        conv_kernel_size=3,
        num_layers=2,
        max_requests=4,
        num_checkpoints=14,
        block_size=4,
    )
    story = Story(make_manager(config, device, backend="triton"))
    manager = story.manager
    for name in "ab":
        story.add(name, manager.admit(name))
    slots = torch.tensor(manager.reserve_checkpoints(8), dtype=torch.int32, device=device).view(4, 2)
    table = slots.T  # [2, 4], line i in column i of what was reserved
    story.run(1, table, a=(4, 3), b=(4, 4))
    story.run(2, table, a=(4, 4), b=(2, 1))
    manager.preempt(story.rows["a"][0], fold=True)
    story.run(3, table.flip(0), b=(4, 3))
    story.rows["a"] = manager.resume("a"), story.rows["a"][1]
    story.run(4, table.flip(0), b=(4, 4), a=(4, 1))
    story.run(5, table, a=(3, 2), b=(1, 1))
    story.add("c", manager.fork(story.rows["b"][0], ["c"])[0], "b", 13)
    for line, name in enumerate("ab"):
        for block in range(story.rows[name][1].committed_len // 4):
            story.check_slot(int(table[line, block]), name, 4 * (block + 1))
    running = manager.checkpoint_slots([story.rows[name][0] for name in "ab"])
    assert running.tolist() == [int(table[0, 2]), int(table[1, 3])]
    assert manager.counters().misplaced_rows == 0


class FailedLaunch:
    """In place of a kernel: its launch finds no memory."""

    def __getitem__(self, grid: object) -> None:
        raise torch.OutOfMemoryError("out of memory")


@pytest.mark.parametrize("kernel", ["conv_kernel", "verify_kernel"])
@pytest.mark.parametrize("layer", [0, 1])
def test_a_launch_that_fails_can_be_cancelled(
    layer: int, kernel: str, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also between the two launches of a layer, of which the first writes conv histories and the second folds."""
    config = small_config(path="portable", fold_policy="deferred", conv_kernel_size=3, num_layers=2)
    manager, twin = make_manager(config, device, backend="triton", debug=False), make_twin(config)
    handle = manager.admit("a")
    run_step(manager, [(handle, twin, 3, 2)], seed=1, tolerance=10 * AIM)
    step = manager.begin_step(StepMetadata(handles=(handle,), query_lens=(2,)))
    inputs = make_inputs(config, 2, seed=2, device=device)
    for index in range(layer):
        step.verify(index, inputs[index].qkv, inputs[index].raw_gate, inputs[index].raw_beta)
    with monkeypatch.context() as patch:
        patch.setattr(portable, kernel, FailedLaunch())
        with pytest.raises(torch.OutOfMemoryError):
            step.verify(layer, inputs[layer].qkv, inputs[layer].raw_gate, inputs[layer].raw_beta)
    step.cancel()
    twin.check(manager, handle, 10 * AIM)
    run_step(manager, [(handle, twin, 4, 4)], seed=3, tolerance=10 * AIM)


def stated_positions(manager: StateManager, handles: list[Handle]) -> torch.Tensor:
    """[n] int32, where requests in no step stand, as a caller's own lengths on the device would say."""
    rows = torch.tensor([handle.record_slot for handle in handles], dtype=torch.int64)
    if manager.device.type == "cuda":
        rows = rows.pin_memory().to(manager.device, non_blocking=True)
    return storage_of(manager).cursors.index_select(0, rows)[:, :2].sum(1).to(torch.int32)


@pytest.mark.gpu
@pytest.mark.parametrize("keeps", ["nothing", "own slots", "block table"])
@pytest.mark.parametrize("policy", POLICIES)
def test_a_hundred_steps_wait_for_nothing(policy: str, keeps: str, path: str, device: str) -> None:
    """Admission, steps of changing shape with sampling and every end but a read: no synchronisation of the host."""
    config = small_config(
        path=path,
        fold_policy=policy,
        conv_kernel_size=4,
        num_layers=2,
        num_heads=2,
        max_requests=8,
        num_checkpoints=48,
        activation_dtype="bfloat16",
        block_size=None if keeps == "nothing" else 6,
    )
    manager = StateManager(config, make_params(config, device=device), device, backend="triton")
    lines = torch.tensor(manager.reserve_checkpoints(32), dtype=torch.int32, device=device).view(8, 4)
    handles = [manager.admit(f"{i}") for i in range(8)]
    shapes = [tuple(1 + (i + n) % 4 for i in range(n)) for n in range(1, 9)]
    inputs = {lens: make_inputs(config, sum(lens), 0, device) for lens in shapes}
    logits = {lens: torch.randn(sum(lens), 32, device=device) for lens in shapes}
    drafts = {lens: torch.zeros(sum(lens), dtype=torch.int64, device=device) for lens in shapes}
    counts = {lens: torch.ones(len(lens), dtype=torch.int32, device=device) for lens in shapes}
    eager = {lens: torch.ones(len(lens), dtype=torch.bool, device=device) for lens in shapes}

    def decode(index: int) -> None:
        lens, blocks = shapes[index % 8], {}
        if keeps == "block table":
            blocks = {"block_table": lines, "positions": stated_positions(manager, handles)}
        step = manager.begin_step(StepMetadata(handles=tuple(handles[: len(lens)]), query_lens=lens), **blocks)
        if index % 7 == 6:
            step.flush()
        verify_all(step, inputs[lens])
        if index % 5 == 0:
            step.defer(step.sample(logits[lens], drafts[lens]))
        elif index % 5 == 1:
            step.commit(counts[lens])
        elif index % 5 == 2:
            step.defer(counts[lens], eager=eager[lens])
        elif index % 5 == 3:
            step.cancel()
        else:
            step.defer(counts[lens])
        if index % 10 == 9:
            manager.flush()

    for index in range(40):  # compiles every variant, which may wait
        decode(index)
    with no_waits():
        for index in range(100):
            decode(index)
    manager.check_integrity()
    assert manager.counters().misplaced_rows == 0
    assert (manager.counters().folds.at_boundary > 0) == (keeps != "nothing" and policy != "eager")


@pytest.mark.gpu
@pytest.mark.parametrize("policy", POLICIES)
def test_nothing_between_lives_waits(policy: str, path: str, device: str) -> None:
    config = small_config(
        path=path,
        fold_policy=policy,
        conv_kernel_size=4,
        num_layers=2,
        max_requests=8,
        num_checkpoints=17,
        block_size=4,
    )
    manager = StateManager(config, make_params(config, device=device), device, backend="triton")
    inputs, counts = make_inputs(config, 12, 0, device), torch.full((4,), 2, device=device)
    handles = [manager.admit(f"{i}") for i in range(4)]
    key = PrefixKey("prefix", 2)
    run = manager.begin_step(StepMetadata(handles=tuple(handles), query_lens=(3,) * 4))
    verify_all(run, inputs)
    run.defer(counts)
    manager.publish(handles[0], key)

    def story(index: int) -> None:
        step = manager.begin_step(StepMetadata(handles=tuple(handles), query_lens=(3,) * 4))
        if index % 2:
            verify_all(step, inputs)
        forks = manager.fork(handles[0], [f"{index} {i}" for i in range(2)])
        manager.preempt(handles[1])
        manager.preempt(handles[2], fold=True)
        manager.retract(handles[3])
        step.defer(counts) if index % 2 else step.cancel()
        handles[1:] = [manager.resume(f"{i}") for i in (1, 2, 3)]
        manager.preempt(forks[0])
        manager.discard(f"{index} 0")
        manager.fence("flush")
        manager.release(forks[1])
        manager.release(manager.restore(key, f"restored {index}"))

    for index in range(4):  # compiles what it needs, and pins memory, which may wait
        story(index)
    with no_waits():
        for index in range(8):
            story(index)
    manager.check_integrity()


@contextmanager
def compilations() -> Iterator[list[str]]:
    """What Triton compiles in here."""
    compiled: list[str] = []
    before = triton.knobs.runtime.jit_post_compile_hook
    triton.knobs.runtime.jit_post_compile_hook = lambda **what: compiled.append(str(what.get("repr")))
    try:
        yield compiled
    finally:
        triton.knobs.runtime.jit_post_compile_hook = before


@pytest.mark.gpu
@pytest.mark.parametrize("policy", POLICIES)
def test_nothing_compiles_after_warmup(policy: str, path: str, device: str) -> None:
    """Steps of 1, 2, 16 and 17 rows, padded and not, inputs as slices, every end: all of it was compiled before."""
    # A shape that no other test here has, so that nothing is cached in this process already.
    shape = {"head_k_dim": 40} if path == "portable" else {"head_v_dim": 128}
    config = small_config(
        path=path, fold_policy=policy, conv_kernel_size=4, max_requests=17, activation_dtype="bfloat16", **shape
    )
    manager = StateManager(config, make_params(config, device=device), device, backend="triton")
    handles = tuple(manager.admit(f"{i}") for i in range(17))
    manager.warmup()
    with compilations() as compiled:
        for rows in (1, 2, 16, 17):
            for verb, pad in (("defer", 0), ("commit", 3), ("sample", 1), ("cancel", 0)):
                tokens = 2 * rows + pad
                [inputs] = make_inputs(config, tokens, rows, device)
                wide = torch.cat([inputs.qkv, inputs.qkv[:, :3]], 1)[:, 1 : 1 + inputs.qkv.shape[1]]
                metadata = StepMetadata(handles=handles[:rows], query_lens=(2,) * rows)
                step = manager.begin_step(metadata, pad_to=(rows + pad, tokens))
                step.verify(0, wide, inputs.raw_gate, inputs.raw_beta)
                counts = torch.ones(rows, dtype=torch.int32, device=device)
                if verb == "sample":
                    logits = torch.randn(tokens, 50, device=device)
                    step.defer(step.sample(logits, torch.zeros(tokens, dtype=torch.int64, device=device)))
                elif verb == "cancel":
                    step.cancel()
                else:
                    step.defer(counts) if verb == "defer" else step.commit(counts)
        manager.flush()
        manager.release(handles[3])
        manager.retract(handles[0])
        manager.preempt(handles[1], fold=True)
        manager.discard("1")
        manager.fork(handles[2], ["fork"])
        manager.resume("0")
    assert compiled == []


@pytest.mark.gpu
@pytest.mark.parametrize("policy", POLICIES)
def test_nothing_compiles_after_warmup_with_boundaries(policy: str, path: str, device: str) -> None:
    """Own slots, and tables of other widths, strides and alignments; odd and even numbers of rows."""
    # A shape that no other test here has, so that nothing is cached in this process already.
    shape = {"head_k_dim": 48, "head_v_dim": 40} if path == "portable" else {"head_v_dim": 192}
    config = small_config(
        path=path,
        fold_policy=policy,
        conv_kernel_size=3,
        **shape,
        max_requests=20,
        num_checkpoints=160,
        activation_dtype="bfloat16",
        block_size=4,
    )
    manager = StateManager(config, make_params(config, device=device), device, backend="triton")
    handles = [manager.admit(f"{i}") for i in range(20)]
    manager.warmup()
    memory = torch.zeros(4096, dtype=torch.int32, device=device)

    def table(offset: int, width: int, line_stride: int, block_stride: int) -> torch.Tensor:
        """Without a slot in it."""
        return memory[offset:].as_strided((20, width), (line_stride, block_stride))

    tables = [None, table(0, 16, 16, 1), table(1, 1, 1, 1), table(3, 5, 7, 1), table(4, 3, 1, 20), table(2, 4, 32, 3)]
    stated = [torch.zeros(20, dtype=torch.int32, device=device), memory[1:21], memory[::2][:20]]
    with compilations() as compiled:
        for index, (rows, lines) in enumerate(itertools.product((1, 3, 8, 16, 20), tables)):
            [inputs] = make_inputs(config, 3 * rows, rows, device)
            blocks = {} if lines is None else {"block_table": lines, "positions": stated[index % 3]}
            step = manager.begin_step(StepMetadata(handles=tuple(handles[:rows]), query_lens=(3,) * rows), **blocks)
            step.verify(0, inputs.qkv, inputs.raw_gate, inputs.raw_beta)
            counts = torch.full((rows,), 2, dtype=(torch.int32, torch.int64)[index % 2], device=device)
            mask = torch.ones(rows, dtype=torch.bool, device=device)
            ends = (
                lambda step, counts, _: step.defer(counts),
                lambda step, counts, mask: step.defer(counts, eager=mask),
                lambda step, counts, mask: step.defer(counts, eager=mask, finished=~mask),
                lambda step, counts, _: step.commit(counts),
                lambda step, counts, mask: step.commit(counts, finished=~mask),
                lambda step, *_: step.cancel(),
            )
            ends[index % 7 % 6](step, counts, mask)
        key = PrefixKey("key", manager.committed_len(handles[0]))
        manager.publish(handles[0], key)
        manager.preempt(handles[1], fold=True)
        manager.restore(key, "restored")
        manager.resume("1") if manager.can_admit() else manager.discard("1")
        manager.flush()
    assert compiled == []


@pytest.mark.gpu
@pytest.mark.parametrize("policy", POLICIES)
def test_counts_of_another_stream_are_ordered_by_an_event_alone(policy: str, path: str, device: str) -> None:
    """A side stream makes the accepted counts long after the host has ended the step, gone on and begun the next."""
    config = small_config(
        path=path, fold_policy=policy, conv_kernel_size=4, num_layers=2, max_requests=2, num_checkpoints=4, block_size=4
    )
    manager = StateManager(config, make_params(config, device=device), device, backend="triton")
    rows = [(manager.admit(name), make_twin(config)) for name in "ab"]
    side, counts = torch.cuda.Stream(), torch.zeros(2, dtype=torch.int32, device=device)
    accepted = [(3, 1), (4, 2), (2, 3), (1, 2), (3, 3), (4, 1)]
    made = [torch.tensor(pair, dtype=torch.int32, device=device) for pair in accepted]
    inputs = [make_inputs(config, 7, seed, device) for seed in range(len(made))]

    def decode(index: int, spin: int) -> torch.cuda.Event:
        step = manager.begin_step(StepMetadata(handles=tuple(h for h, _ in rows), query_lens=(4, 3)))
        verify_all(step, inputs[index])
        current, ready = torch.cuda.current_stream(), torch.cuda.Event()
        side.wait_stream(current)  # an earlier step's counts have been read
        with torch.cuda.stream(side):
            torch.cuda._sleep(spin)
            counts.copy_(made[index])
            ready.record()
        current.wait_event(ready)
        step.defer(counts)
        counts.zero_()  # what reads too early finds nothing to accept
        return ready

    for index in range(3):  # compiles every variant, which may wait
        decode(index, 1000)
    manager.flush()
    with no_waits():
        events = [decode(index, 500_000_000) for index in range(3, 6)]
        assert not any(event.query() for event in events), "the host has waited for the counts"
    for seed, pair in enumerate(accepted):
        for (_, twin), window, count in zip(rows, (slice(0, 4), slice(4, 7)), pair, strict=True):
            twin.commit([tensors[window] for tensors in inputs[seed]], count)
    for handle, twin in rows:
        twin.check(manager, handle, 10 * AIM)
    assert manager.counters().clamps == 0
