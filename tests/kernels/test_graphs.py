"""Steps inside CUDA graphs: the same bits as without, whatever rows come, go, or are released before the replay."""

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from specstate import (
    CapacityError,
    SamplingParams,
    SpecStateError,
    StateConfig,
    StateManager,
    StepMetadata,
    StepOrderError,
)
from specstate.metadata import Handle
from specstate.step import Step
from tests.factories import (
    POLICIES,
    LayerInputs,
    make_config,
    make_inputs,
    make_manager,
    make_twin,
    verify_all,
    widened,
)
from tests.kernels.harness import AIM, no_waits, row_error

VOCAB = 11


#: Paths of backend "triton", and backend "reference".
PATHS = ["portable", pytest.param("hopper", marks=pytest.mark.hopper), pytest.param(None, id="reference")]


def config_of(path: str | None, policy: str, **changes: Any) -> StateConfig:
    sizes = {"num_heads": 2, "head_k_dim": 32, "head_v_dim": 48, "max_requests": 4, "max_query_len": 4}
    dtypes = {"checkpoint_dtype": "float32", "activation_dtype": "bfloat16"}
    return make_config(**widened(path, path=path, fold_policy=policy, **sizes, **dtypes, **changes))


def manager_of(config: StateConfig) -> StateManager:
    """On the reference where the config pins no path."""
    backend = "reference" if config.path is None else "triton"
    return make_manager(config, "cuda", backend=backend, debug=False)


def test_capture_is_refused_without_a_gpu() -> None:
    manager = make_manager(debug=False)
    with pytest.raises(SpecStateError, match="needs a GPU"):
        manager.capture_step(2, 4)
    with pytest.raises(SpecStateError, match="rows = 0"):
        manager.capture_step(0, 4)
    with pytest.raises(SpecStateError, match="debug = True"):
        make_manager().capture_step(2, 4)


def test_replayed_is_refused_without_a_capture() -> None:
    manager = make_manager()
    step = manager.begin_step(StepMetadata(handles=(manager.admit("a"),), query_lens=(1,)))
    with pytest.raises(StepOrderError, match="without a captured size"):
        step.replayed("defer")


@dataclass
class Graph:
    """A captured step over static inputs: all layers, sampling, and an end unless ``end`` is "verify"."""

    manager: StateManager
    rows: int
    tokens: int
    end: str = "defer"
    blocks: dict[str, torch.Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        config = self.manager.config
        self.inputs = make_inputs(config, self.tokens, seed=0, device="cuda")
        self.logits = torch.zeros(self.tokens, VOCAB, device="cuda")
        self.drafts = torch.zeros(self.tokens, dtype=torch.int64, device="cuda")
        self.manager.warmup()
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self.step = self.manager.capture_step(self.rows, self.tokens, **self.blocks)
            self.outputs = verify_all(self.step, self.inputs)
            self.result = self.step.sample(self.logits, self.drafts)
            if self.end == "defer":
                self.step.defer(self.result)
            elif self.end == "commit":
                self.step.commit(self.result)

    def fill(self, inputs: list[LayerInputs], logits: torch.Tensor, drafts: torch.Tensor) -> None:
        for mine, given in zip(self.inputs, inputs, strict=True):
            for name in ("qkv", "raw_gate", "raw_beta"):
                getattr(mine, name).copy_(getattr(given, name))
        self.logits.copy_(logits)
        self.drafts.copy_(drafts)

    def begin(self, metadata: StepMetadata) -> Step:
        return self.manager.begin_step(metadata, pad_to=(self.rows, self.tokens))


def windows(config: StateConfig, tokens: int, seed: int) -> tuple[list[LayerInputs], torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(tokens, VOCAB, generator=generator).cuda()
    # Often what the target would pick, so that windows of all lengths are accepted.
    drafts = torch.where(torch.rand(tokens, generator=generator).cuda() < 0.7, logits.argmax(1).roll(1), 0)
    return make_inputs(config, tokens, seed, device="cuda"), logits, drafts


@pytest.mark.gpu
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("policy", POLICIES)
def test_replays_give_the_bits_of_eager_steps(policy: str, path: str | None) -> None:
    config = config_of(path, policy)
    eager = manager_of(config)
    captured = manager_of(config)
    graph = Graph(captured, rows=4, tokens=12)
    rng = random.Random(1)
    pairs: dict[str, tuple[Handle, Handle]] = {}
    ends = (VOCAB - 1,)
    noisy = [
        SamplingParams(temperature=t, top_k=k, seed=17 * k, end_token_ids=ends) for t, k in ((0.0, 0), (0.7, 4), (1, 0))
    ]
    for seed in range(40):
        # Requests enter and leave; slots are used again.
        for name in list(pairs):
            if rng.random() < 0.15:
                first, second = pairs.pop(name)
                eager.release(first), captured.release(second)
        while len(pairs) < 3 and rng.random() < 0.7:
            name = f"{seed}-{len(pairs)}"
            params = rng.choice(noisy)
            pairs[name] = eager.admit(name, params), captured.admit(name, params)
        names = rng.sample(sorted(pairs), rng.randint(0, len(pairs)))
        lens = tuple(rng.randint(1, 4) for _ in names)
        kinds = tuple(rng.choice(["decode", "decode", "prompt"]) for _ in names)
        inputs, logits, drafts = windows(config, 12, seed)

        metadata = StepMetadata(handles=tuple(pairs[n][0] for n in names), query_lens=lens, row_kinds=kinds)
        step = eager.begin_step(metadata, pad_to=(4, 12))
        outputs = verify_all(step, inputs)
        result = step.sample(logits, drafts)
        step.defer(result)

        graph.fill(inputs, logits, drafts)
        metadata = StepMetadata(handles=tuple(pairs[n][1] for n in names), query_lens=lens, row_kinds=kinds)
        replay = graph.begin(metadata)
        graph.graph.replay()
        replay.replayed("defer")
        for mine, theirs in zip(graph.outputs, outputs, strict=True):
            assert torch.equal(mine, theirs)
        for name in ("num_accepted", "tokens", "next_token", "finished"):
            assert torch.equal(getattr(graph.result, name), getattr(result, name)), name
        assert torch.equal(replay.positions, step.positions)
        assert captured.digest() == eager.digest()
        for first, second in pairs.values():
            for layer in range(config.num_layers):
                mine, theirs = captured.read(second, layer), eager.read(first, layer)
                assert torch.equal(mine.recurrent, theirs.recurrent)
                assert mine.conv is not None and theirs.conv is not None and torch.equal(mine.conv, theirs.conv)
    captured.check_integrity()


@pytest.mark.gpu
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("keeps", ["own slots", "block table"])
@pytest.mark.parametrize("policy", POLICIES)
def test_replays_keep_the_boundaries_of_eager_steps(policy: str, keeps: str, path: str | None) -> None:
    """Every checkpoint slot has the same bits, though lines of the captured table move and change from step to step."""
    config, width, lines = config_of(path, policy, block_size=5, num_checkpoints=28), 4, 5
    managers = [manager_of(config) for _ in range(2)]
    table = torch.zeros(lines, width, dtype=torch.int32, device="cuda")
    positions = torch.zeros(lines, dtype=torch.int32, device="cuda")
    blocks = {"block_table": table, "positions": positions} if keeps == "block table" else {}
    graph = Graph(managers[1], rows=4, tokens=12, blocks=blocks)
    slots = managers[0].reserve_checkpoints(4 * width)
    assert managers[1].reserve_checkpoints(4 * width) == slots
    free = [slots[i * width : (i + 1) * width] for i in range(4)]
    rng = random.Random(2)
    pairs: dict[str, list[Handle]] = {}
    line_of: dict[str, list[int]] = {}
    for seed in range(40):
        for name in list(pairs):
            if rng.random() < 0.12:
                for manager, handle in zip(managers, pairs.pop(name), strict=True):
                    manager.release(handle)
                free.append(line_of.pop(name))
        while len(pairs) < 4 and rng.random() < 0.7:
            name = f"{seed}-{len(pairs)}"
            pairs[name], line_of[name] = [manager.admit(name) for manager in managers], free.pop()
        names = rng.sample(sorted(pairs), rng.randint(0, len(pairs)))
        lens = tuple(rng.randint(1, 3) for _ in names)
        entries = tuple(rng.sample(range(lines), len(names)))
        # A line is another entry in every step; some of its columns are not there, and some positions are wrong.
        rows = [[0] * width for _ in range(lines)]
        stated = [0] * lines
        for name, entry in zip(names, entries, strict=True):
            rows[entry] = [0 if rng.random() < 0.15 else slot for slot in line_of[name]]
            stated[entry] = managers[0].committed_len(pairs[name][0]) + (rng.random() < 0.1)
        table.copy_(torch.tensor(rows, dtype=torch.int32))
        positions.copy_(torch.tensor(stated, dtype=torch.int32))
        inputs, logits, drafts = windows(config, 12, seed)

        metadata = [
            StepMetadata(handles=tuple(pairs[n][i] for n in names), query_lens=lens, batch_index=entries)
            for i in range(2)
        ]
        given = {name: tensor.clone() for name, tensor in blocks.items()}
        step = managers[0].begin_step(metadata[0], pad_to=(4, 12), **given)
        outputs = verify_all(step, inputs)
        step.defer(step.sample(logits, drafts))
        graph.fill(inputs, logits, drafts)
        replay = graph.begin(metadata[1])
        graph.graph.replay()
        replay.replayed("defer")
        for mine, theirs in zip(graph.outputs, outputs, strict=True):
            assert torch.equal(mine, theirs)
        assert torch.equal(replay.boundary_slots, step.boundary_slots)
        assert managers[1].digest() == managers[0].digest()
        for layer in range(config.num_layers):
            for mine, theirs in zip(managers[1].checkpoints(layer), managers[0].checkpoints(layer), strict=True):
                assert mine is not None and theirs is not None and torch.equal(mine, theirs)
    assert managers[1].counters() == managers[0].counters()
    counted = managers[0].counters()
    assert (counted.misplaced_rows > 0) == (keeps == "block table")
    boundaries = counted.folds.at_end if policy == "eager" else counted.folds.at_boundary
    assert boundaries > 0
    for manager in managers:
        manager.check_integrity()


@pytest.mark.gpu
def test_a_captured_table_is_the_only_one(path: str) -> None:
    config = config_of(path, "ring", block_size=4, num_checkpoints=8)
    manager = manager_of(config)
    slots = torch.tensor([manager.reserve_checkpoints(2)], dtype=torch.int32, device="cuda")
    blocks = {"block_table": slots, "positions": torch.zeros(1, dtype=torch.int32, device="cuda")}
    graph = Graph(manager, rows=2, tokens=8, blocks=blocks)
    a, b = manager.admit("a"), manager.admit("b")
    with pytest.raises(SpecStateError, match="reads the one it was captured with"):
        manager.begin_step(StepMetadata(handles=(a,), query_lens=(4,)), pad_to=(2, 8), **blocks)
    with pytest.raises(SpecStateError, match="the captured block_table has 1"):
        graph.begin(StepMetadata(handles=(a, b), query_lens=(4, 4)))
    step = graph.begin(StepMetadata(handles=(a,), query_lens=(4,)))
    graph.graph.replay()
    step.replayed("defer")
    assert manager.counters().misplaced_rows == 0


@pytest.mark.gpu
@pytest.mark.parametrize("policy", POLICIES)
def test_a_captured_step_may_end_outside_of_the_graph_and_late(policy: str, path: str) -> None:
    config = config_of(path, policy)
    manager = manager_of(config)
    graph = Graph(manager, rows=2, tokens=8, end="verify")
    first, second = manager.admit("a"), manager.admit("b")
    steps = []
    twins = [make_twin(config), make_twin(config)]
    for seed, (handle, twin) in enumerate(zip((first, second), twins, strict=True)):
        inputs, logits, drafts = windows(config, 8, seed)
        graph.fill(inputs, logits, drafts)
        step = graph.begin(StepMetadata(handles=(handle,), query_lens=(4,)))
        with pytest.raises(StepOrderError, match="staged for the graph"):
            step.defer(torch.tensor([1], device="cuda"))
        graph.graph.replay()
        step.replayed("verify")
        steps.append((step, [tensors[:4] for tensors in inputs], twin))
    # The second replay wrote over the captured rows; the first step ends all the same.
    for step, inputs, twin in reversed(steps):
        step.defer(torch.tensor([3, 0], dtype=torch.int32, device="cuda"))
        twin.commit(inputs, 3)
    for handle, twin in zip((first, second), twins, strict=True):
        twin.check(manager, handle, 2e-2)  # bf16 activations: a conv may round the other way
        assert manager.committed_len(handle) == 3


@pytest.mark.gpu
def test_a_staged_step_blocks_its_buffers_until_it_is_replayed_or_cancelled(path: str) -> None:
    manager = manager_of(config_of(path, "ring"))
    graph = Graph(manager, rows=2, tokens=8)
    a, b = manager.admit("a"), manager.admit("b")
    step = graph.begin(StepMetadata(handles=(a,), query_lens=(2,)))
    with pytest.raises(StepOrderError, match="neither replayed nor cancelled"):
        graph.begin(StepMetadata(handles=(b,), query_lens=(2,)))
    with pytest.raises(SpecStateError, match="ends with 'defer'"):
        step.replayed("commit")
    step.cancel()
    graph.begin(StepMetadata(handles=(b,), query_lens=(2,)))
    graph.graph.replay()
    assert manager.committed_len(a) == 0


@pytest.mark.gpu
def test_a_release_before_the_replay_nulls_the_row(path: str) -> None:
    config = config_of(path, "deferred")
    manager = manager_of(config)
    graph = Graph(manager, rows=2, tokens=8)
    a, b = manager.admit("a"), manager.admit("b")
    step = graph.begin(StepMetadata(handles=(a, b), query_lens=(2, 3)))
    manager.release(a)
    late = manager.admit("late")  # into the slots that a left
    assert late.record_slot == a.record_slot
    graph.graph.replay()
    step.replayed("defer")
    assert not graph.outputs[0][:2].any()
    assert manager.committed_len(late) == 0 and manager.committed_len(b) >= 1
    assert manager.counters().dropped_ends == 1
    assert not manager.read(late, 0).recurrent.any()


@pytest.mark.gpu
def test_a_flush_between_begin_step_and_replay_is_not_folded_twice(path: str) -> None:
    config = config_of(path, "deferred")
    manager = manager_of(config)
    other = manager_of(config)
    graph = Graph(manager, rows=1, tokens=4)
    for seed in range(3):
        inputs, logits, drafts = windows(config, 4, seed)
        graph.fill(inputs, logits, drafts)
        for m in (manager, other):
            if seed == 0:
                m.admit("a")
        handle = next(iter(manager._requests)).handle
        step = graph.begin(StepMetadata(handles=(handle,), query_lens=(4,)))
        manager.flush()
        graph.graph.replay()
        step.replayed("defer")
        plain = other.begin_step(StepMetadata(handles=(next(iter(other._requests)).handle,), query_lens=(4,)))
        verify_all(plain, inputs)
        plain.defer(plain.sample(logits, drafts))
        assert manager.committed_len(handle) == other.committed_len(handle)
        states = [each.read(handle, 1).recurrent for each in (manager, other)]
        if path == "portable":
            assert torch.equal(*states)
        else:  # a window is verified over pending records, or over their fold: equal up to rounding
            assert row_error(*states) <= AIM


@pytest.mark.gpu
@pytest.mark.parametrize("policy", POLICIES)
def test_a_capture_allocates_nothing(policy: str, path: str) -> None:
    """With outputs of the caller's own: not in any call, nor for counts and masks of the caller's own."""
    manager = manager_of(config_of(path, policy))
    manager.warmup(captures=4)  # of the largest size, as below
    inputs, logits, drafts = windows(manager.config, 16, 0)
    v_dim = manager.config.layer.head_v_dim
    outs = [torch.empty(16, 2, v_dim, dtype=torch.bfloat16, device="cuda") for _ in inputs]
    counts = torch.ones(4, dtype=torch.int64, device="cuda")
    mask = torch.zeros(4, dtype=torch.bool, device="cuda")

    def allocations(of: Callable[[Step], None]) -> int:
        with torch.cuda.graph(torch.cuda.CUDAGraph()):
            before = torch.cuda.memory_stats()["allocation.all.allocated"]
            step = manager.capture_step(4, 16)
            for layer, tensors in enumerate(inputs):
                step.verify(layer, tensors.qkv, tensors.raw_gate, tensors.raw_beta, out=outs[layer])
            of(step)
            return int(torch.cuda.memory_stats()["allocation.all.allocated"] - before)

    assert allocations(lambda step: step.defer(step.sample(logits, drafts))) == 0
    assert allocations(lambda step: step.commit(counts)) == 0
    assert allocations(lambda step: step.defer(step.sample(logits, drafts).num_accepted, mask, mask)) == 0
    assert allocations(lambda step: step.defer(counts.clone())) == 1  # what the caller makes


@pytest.mark.gpu
def test_captures_beyond_what_warmup_made_are_refused(path: str) -> None:
    manager = manager_of(config_of(path, "ring"))
    manager.warmup(captures=1)
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        manager.capture_step(4, 16)
        with pytest.raises(CapacityError, match="warmup"):
            manager.capture_step(1024, 4096)


@pytest.mark.gpu
@pytest.mark.parametrize("keeps", ["nothing", "own slots", "block table"])
def test_nothing_waits_compiles_or_allocates_once_warm(keeps: str, path: str) -> None:
    """100 steps of decode by graph and by hand, while a wait for the device is an error."""
    config = config_of(path, "ring", block_size=None if keeps == "nothing" else 4, num_checkpoints=16)
    manager = manager_of(config)
    slots = torch.tensor(manager.reserve_checkpoints(8), dtype=torch.int32, device="cuda").view(2, 4)
    blocks = {"block_table": slots, "positions": torch.zeros(2, dtype=torch.int32, device="cuda")}
    given = blocks if keeps == "block table" else {}
    graph = Graph(manager, rows=2, tokens=8, blocks=given)
    handles = (manager.admit("a"), manager.admit("b"))
    inputs, logits, drafts = windows(config, 8, 0)
    outs = [torch.empty(8, 2, config.layer.head_v_dim, dtype=torch.bfloat16, device="cuda") for _ in inputs]
    with no_waits():
        for i in range(100):
            metadata = StepMetadata(handles=handles, query_lens=(4, 4))
            if i % 2:
                step = graph.begin(metadata)
                graph.graph.replay()
                step.replayed("defer")
                accepted = graph.result.num_accepted
            else:
                step = manager.begin_step(metadata, **given)
                for layer, tensors in enumerate(inputs):
                    step.verify(layer, tensors.qkv, tensors.raw_gate, tensors.raw_beta, out=outs[layer])
                result = step.sample(logits, drafts)
                step.defer(result)
                accepted = result.num_accepted
            blocks["positions"] += accepted
            if i % 10 == 0:
                manager.flush()
    assert manager.counters().misplaced_rows == 0
    manager.check_integrity()
