"""Launches of consecutive layers, which may overlap on a GPU: each must see all that came before it, and nothing else.

Behind a sleeping GPU launches queue up, so that one follows on another at once.
"""

import random

import pytest
import torch

from specstate import StateConfig, StateManager, StepMetadata
from specstate.step import Step
from specstate.storage import Storage
from tests.factories import POLICIES, LayerInputs, make_inputs, make_manager, make_twin, relative_error
from tests.kernels.harness import AIM, row_error, small_config
from tests.kernels.test_graphs import VOCAB, Graph

LAYERS, REPLAYS = 8, 40
RECORDS = ("record_u", "record_key_gate", "record_inv_norm")


def config_of(path: str, policy: str, dtype: str, v_dim: int, max_requests: int) -> StateConfig:
    return small_config(
        path=path,
        fold_policy=policy,
        num_layers=LAYERS,
        num_heads=4,
        head_k_dim=128,
        head_v_dim=v_dim,
        conv_kernel_size=4,
        max_query_len=8,
        max_requests=max_requests,
        activation_dtype=dtype,
    )


def storage_of(manager: StateManager) -> Storage:
    return manager._backend.storage  # type: ignore[attr-defined, no-any-return]


def let_launches_queue_up(device: str) -> None:
    """The GPU sleeps for some milliseconds."""
    if device == "cuda":
        torch.cuda._sleep(10_000_000)


def verify_layer(step: Step, layer: int, inputs: list[LayerInputs]) -> torch.Tensor:
    output = step.verify(layer, inputs[layer].qkv, inputs[layer].raw_gate, inputs[layer].raw_beta)
    assert output is not None
    return output


@pytest.mark.gpu
@pytest.mark.parametrize("policy", POLICIES)
def test_a_release_between_layers_is_seen_by_the_next(policy: str, path: str, device: str) -> None:
    """Its slots are another request's at once, and keep what that one brings: state, conv history, conv ring, records.

    Now and then the next layer's verify comes before the other request, right behind the release.
    """
    config = config_of(path, policy, "float32", 64, max_requests=2)
    spec = config.layer
    manager = make_manager(config, device, backend="triton", debug=False)
    layers = storage_of(manager).layers
    leaving = manager.admit("0")
    staying, twin = manager.admit("staying"), make_twin(config)
    generator = torch.Generator().manual_seed(7)
    for seed in range(50):
        # Records for the leaving one: those that a verify folds under "deferred".
        inputs = make_inputs(config, 16, 2 * seed, device)
        step = manager.begin_step(StepMetadata(handles=(leaving, staying), query_lens=(8, 8)))
        for layer in range(LAYERS):
            verify_layer(step, layer, inputs)
        step.defer(torch.tensor([7, 2], device=device))
        twin.commit([tensors[8:] for tensors in inputs], 2)

        recurrent = torch.randn(spec.num_heads, spec.head_v_dim, spec.head_k_dim, generator=generator).to(device)
        conv = torch.randn(spec.conv_channels, spec.conv_history_len, generator=generator).to(device)
        inputs = make_inputs(config, 16, 2 * seed + 1, device)
        counts = torch.tensor([8, 3], device=device)
        first_late = 1 + seed % (LAYERS - 1)
        row = leaving.record_slot
        held = [[getattr(layer, name)[row].clone() for name in RECORDS] for layer in layers[first_late:]]
        step = manager.begin_step(StepMetadata(handles=(leaving, staying), query_lens=(8, 8)))
        let_launches_queue_up(device)
        outputs = [verify_layer(step, layer, inputs) for layer in range(first_late)]
        manager.release(leaving)
        if seed % 3 == 0:
            outputs.append(verify_layer(step, first_late, inputs))
        coming = manager.admit(f"{seed + 1}")
        manager.load(coming, [(recurrent, conv)] * LAYERS, committed_len=seed)
        outputs += [verify_layer(step, layer, inputs) for layer in range(len(outputs), LAYERS)]
        step.defer(counts)

        assert coming.record_slot == row
        [slot] = manager.checkpoint_slots([coming]).tolist()
        for layer in layers:
            assert layer.conv is not None and layer.conv_ring is not None
            assert torch.equal(layer.recurrent[slot], recurrent), f"state, repetition {seed}"
            assert torch.equal(layer.conv[slot], conv), f"conv history, repetition {seed}"
            ring = torch.zeros_like(layer.conv_ring[row])
            for i in range(spec.conv_history_len):
                ring[(seed + i) % len(ring)] = conv[:, i]
            assert torch.equal(layer.conv_ring[row], ring), f"conv ring, repetition {seed}"
        for layer, wanted in zip(layers[first_late:], held, strict=True):
            for name, tensor in zip(RECORDS, wanted, strict=True):
                assert torch.equal(getattr(layer, name)[row], tensor), f"{name}, repetition {seed}"
        window = [tensors[8:] for tensors in inputs]
        for layer, (got, want) in enumerate(zip(outputs, twin.window(window)[1], strict=True)):
            assert not got[:8].any() or layer < first_late, f"output of layer {layer}, repetition {seed}"
            assert row_error(got[8:], want) < 10 * AIM
        twin.commit(window, 3)
        leaving = coming
    twin.check(manager, staying, 10 * AIM)
    assert manager.counters().dropped_ends == 50
    manager.check_integrity()


def random_windows(rng: random.Random, rows: int, padded_rows: int) -> tuple[tuple[int, ...], torch.Tensor]:
    """How long the windows of ``rows`` rows are, and how many tokens of each are accepted, 0 in padded rows."""
    lens = tuple(rng.randint(1, 8) for _ in range(rows))
    accepted = [rng.randint(1, size) for size in lens] + [0] * (padded_rows - rows)
    return lens, torch.tensor(accepted, device="cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("policy", POLICIES)
def test_layers_behind_one_another_in_a_graph_against_float64(policy: str, path: str) -> None:
    config = config_of(path, policy, "float32", 64, max_requests=8)
    exact_config = config.model_copy(update={"checkpoint_dtype": "float64", "path": None})
    manager = make_manager(config, "cuda", backend="triton", debug=False)
    exact = make_manager(exact_config, "cuda", backend="reference", debug=False)
    graph = Graph(manager, rows=8, tokens=64, end="verify")
    pairs = [(manager.admit(f"{i}"), exact.admit(f"{i}")) for i in range(8)]
    rng = random.Random(3)
    for seed in range(REPLAYS):
        rng.shuffle(pairs)
        chosen = pairs[: rng.randint(5, 8)]
        lens, counts = random_windows(rng, len(chosen), 8)
        inputs = make_inputs(config, 64, seed, "cuda")
        graph.fill(inputs, graph.logits, graph.drafts)
        step = graph.begin(StepMetadata(handles=tuple(ours for ours, _ in chosen), query_lens=lens))
        graph.graph.replay()
        step.replayed("verify")
        wanted = exact.begin_step(
            StepMetadata(handles=tuple(theirs for _, theirs in chosen), query_lens=lens), pad_to=(8, 64)
        )
        for layer in range(LAYERS):
            want, start = verify_layer(wanted, layer, inputs), 0
            for row, size in enumerate(lens):
                error = row_error(graph.outputs[layer][start : start + size], want[start : start + size])
                assert error < 10 * AIM, f"layer {layer}, row {row}, replay {seed}"
                start += size
            assert not graph.outputs[layer][start:].any(), f"padding, layer {layer}, replay {seed}"
        step.defer(counts)
        wanted.defer(counts)
    for ours, theirs in pairs:
        assert manager.committed_len(ours) == exact.committed_len(theirs)
        for layer in range(LAYERS):
            got, state = manager.read(ours, layer), exact.read(theirs, layer)
            assert relative_error(got.recurrent, state.recurrent) < 10 * AIM
            assert got.conv is not None and state.conv is not None and torch.equal(got.conv, state.conv)


@pytest.mark.gpu
@pytest.mark.parametrize("policy", POLICIES)
def test_launches_that_overlap_give_the_bits_of_launches_apart(policy: str, path: str) -> None:
    """32 rows: with a wait for the GPU behind every launch, queued up by hand, and in a graph."""
    config = config_of(path, policy, "bfloat16", 128, max_requests=32)
    apart, queued, captured = (make_manager(config, "cuda", backend="triton", debug=False) for _ in range(3))
    graph = Graph(captured, rows=32, tokens=256, end="verify")
    handles = {manager: [manager.admit(f"{i}") for i in range(32)] for manager in (apart, queued, captured)}
    rng = random.Random(4)
    logits, drafts = torch.zeros(256, VOCAB, device="cuda"), torch.zeros(256, dtype=torch.int64, device="cuda")
    for seed in range(REPLAYS):
        order = rng.sample(range(32), 32)
        lens, counts = random_windows(rng, 32, 32)
        inputs = make_inputs(config, 256, seed, "cuda")
        metadata = {
            manager: StepMetadata(handles=tuple(rows[i] for i in order), query_lens=lens)
            for manager, rows in handles.items()
        }
        step = apart.begin_step(metadata[apart], pad_to=(32, 256))
        wanted = []
        for layer in range(LAYERS):
            wanted.append(verify_layer(step, layer, inputs))
            torch.cuda.synchronize()
        step.defer(counts)

        step = queued.begin_step(metadata[queued], pad_to=(32, 256))
        let_launches_queue_up("cuda")
        by_hand = [verify_layer(step, layer, inputs) for layer in range(LAYERS)]
        step.defer(counts)

        graph.fill(inputs, logits, drafts)
        step = graph.begin(metadata[captured])
        graph.graph.replay()
        step.replayed("verify")
        for layer in range(LAYERS):
            assert torch.equal(by_hand[layer], wanted[layer]), f"by hand, layer {layer}, step {seed}"
            assert torch.equal(graph.outputs[layer], wanted[layer]), f"in a graph, layer {layer}, replay {seed}"
        step.defer(counts)
    for manager in (queued, captured):
        for layer, ours in enumerate(storage_of(manager).layers):
            for name, wanted_tensor in storage_of(apart).layers[layer]._asdict().items():
                # The null slot and the scratch row are nobody's.
                own = slice(1, None) if name in ("recurrent", "conv") else slice(0, 32)
                assert torch.equal(getattr(ours, name)[own], wanted_tensor[own]), f"{name} of layer {layer}"
