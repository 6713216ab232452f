"""The same records give the same bits, whoever folds them; a request's bits do not depend on its company.

And a step changes no byte that is not its own, seen over whole pools through a manager.
"""

from typing import Any

import pytest
import torch

from specstate import Handle, StateManager, StepMetadata
from specstate.validation import DTYPES
from tests.factories import POLICIES, LayerInputs, make_inputs, make_manager, make_params, raw_bytes, verify_all
from tests.kernels.harness import small_config, snapshot
from tests.kernels.test_graphs import Graph

LARGE = {"num_heads": 4, "head_k_dim": 128, "head_v_dim": 128, "max_query_len": 8}
SIZES = [
    pytest.param("portable", {"head_k_dim": 24, "max_query_len": 3}, id="portable, H 1, K 24, V 16, T 3"),
    pytest.param("portable", LARGE, id="portable, H 4, K 128, V 128, T 8", marks=pytest.mark.gpu),
    pytest.param(
        "portable",
        {"num_heads": 2, "head_k_dim": 256, "head_v_dim": 192, "max_query_len": 16},
        id="portable, H 2, K 256, V 192, T 16",
        marks=pytest.mark.gpu,
    ),
    pytest.param("hopper", {"max_query_len": 3}, id="hopper, H 1, K 128, V 64, T 3", marks=pytest.mark.hopper),
    pytest.param("hopper", LARGE, id="hopper, H 4, K 128, V 128, T 8", marks=pytest.mark.hopper),
    pytest.param(
        "hopper",
        {"num_heads": 2, "head_v_dim": 192, "max_query_len": 16},
        id="hopper, H 2, K 128, V 192, T 16",
        marks=pytest.mark.hopper,
    ),
]

WAYS = [
    ("ring", "manager.flush"),
    ("ring", "manager.flush of each"),
    ("ring", "step.flush"),
    ("ring", "commit"),
    ("ring", "eager rows"),
    ("eager", "the policy"),
    ("deferred", "manager.flush"),
    ("deferred", "commit"),
    ("deferred", "verify"),
    ("deferred", "verify in other company"),
    ("deferred", "verify of one layer, then cancel"),
]


def states_after(way: str, manager: StateManager, counts: tuple[int, int]) -> list[bytes]:
    """Loads two requests, verifies a window of each, accepts ``counts`` and folds it all; their checkpoints' bytes."""
    config, device = manager.config, manager.device
    spec, generator = config.layer, torch.Generator().manual_seed(9)
    state_shape, longest = (spec.num_heads, spec.head_v_dim, spec.head_k_dim), config.max_query_len
    loaded = [
        (
            torch.randn(state_shape, generator=generator).to(device, DTYPES[config.checkpoint_dtype]),
            torch.randn(spec.conv_channels, 3, generator=generator).to(device, DTYPES[config.activation_dtype]),
        )
        for _ in range(config.num_layers)
    ]
    handles = tuple(manager.admit(name) for name in "ab")
    for handle in handles:
        manager.load(handle, loaded, committed_len=5)
    metadata = StepMetadata(handles=handles, query_lens=(longest, longest))
    step = manager.begin_step(metadata)
    verify_all(step, make_inputs(config, 2 * longest, seed=5, device=device))
    accepted = torch.tensor(counts, device=device)
    if way == "commit":
        step.commit(accepted)
    else:
        step.defer(accepted, eager=torch.tensor([True, True], device=device) if way == "eager rows" else None)
    if way == "manager.flush":
        manager.flush()
    elif way == "manager.flush of each":
        for handle in reversed(handles):
            manager.flush([handle])
    elif way == "step.flush":
        step = manager.begin_step(metadata)
        step.flush()
        step.cancel()
    elif way.startswith("verify"):
        if "company" in way:
            kinds = ("decode", "dummy", "decode")
            metadata = StepMetadata(handles=(handles[1], None, handles[0]), query_lens=(1, 1, 2), row_kinds=kinds)
        step = manager.begin_step(metadata)
        layers = make_inputs(config, sum(metadata.query_lens), seed=6, device=device)
        for layer in range(1 if "one layer" in way else config.num_layers):
            step.verify(layer, layers[layer].qkv, layers[layer].raw_gate, layers[layer].raw_beta)
        step.cancel()
    slots = manager.checkpoint_slots(handles).tolist()
    assert all(manager._backend.cursor(handle.record_slot).pending_len == 0 for handle in handles)
    views = [view for layer in range(config.num_layers) for view in manager.checkpoints(layer)]
    return [raw_bytes(view[slot]) for slot in slots for view in views if view is not None]


@pytest.mark.parametrize(("path", "sizes"), SIZES)
@pytest.mark.parametrize(
    ("checkpoint", "activation", "bound"),
    [
        pytest.param("float32", "bfloat16", None, id="fp32, bf16, softplus gate"),
        pytest.param("bfloat16", "bfloat16", -5.0, id="bf16, bf16, bounded gate"),
        pytest.param("float32", "float32", -5.0, id="fp32, fp32, bounded gate"),
    ],
)
def test_every_way_to_fold_gives_the_same_bits(
    checkpoint: str, activation: str, bound: float | None, path: str, sizes: dict[str, int], device: str
) -> None:
    states = {}
    for policy, way in WAYS:
        config = small_config(
            path=path,
            fold_policy=policy,
            conv_kernel_size=4,
            num_layers=2,
            max_requests=2,
            checkpoint_dtype=checkpoint,
            activation_dtype=activation,
            gate_lower_bound=bound,
            **sizes,
        )
        manager = make_manager(config, device, backend="triton", debug=False)
        states[f"{policy}, {way}"] = states_after(way, manager, (config.max_query_len, 2))
    wanted = states["ring, manager.flush"]
    assert [way for way, state in states.items() if state != wanted] == []


@pytest.mark.parametrize(("path", "sizes"), SIZES)
@pytest.mark.parametrize("checkpoint", ["float32", "bfloat16"])
@pytest.mark.parametrize("policy", POLICIES)
def test_a_boundary_checkpoint_has_the_bits_of_a_flush_there(
    policy: str, checkpoint: str, path: str, sizes: dict[str, int], device: str
) -> None:
    """In a slot of the request's own or of a block table; and so has the checkpoint that runs on from there."""
    base = small_config(
        path=path,
        fold_policy=policy,
        conv_kernel_size=4,
        num_layers=2,
        max_requests=1,
        num_checkpoints=4,
        checkpoint_dtype=checkpoint,
        activation_dtype="bfloat16",
        **sizes,
    )
    longest = base.max_query_len

    def after(accepted: int, kept: str) -> dict[int, list[bytes]]:
        """Bytes of every checkpoint slot, T - 1 + ``accepted`` tokens in; the slots are 1, 2 and 3."""
        config = base.model_copy(update={"block_size": None if kept == "nothing" else longest})
        manager = make_manager(config, device, backend="triton", debug=False)
        handle, blocks = manager.admit("a"), {}
        if kept == "block table":
            slots = manager.reserve_checkpoints(2)
            table, positions = torch.tensor([slots], dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
            blocks = {"block_table": table.to(device), "positions": positions.to(device)}
        for seed, count in enumerate((longest - 1, accepted)):
            if seed and blocks:
                blocks["positions"] += longest - 1
            step = manager.begin_step(StepMetadata(handles=(handle,), query_lens=(longest,)), **blocks)
            verify_all(step, make_inputs(config, longest, seed, device))
            step.defer(torch.tensor([count], device=device))
        manager.flush()
        assert manager.counters().misplaced_rows == 0
        views = [view for layer in range(2) for view in manager.checkpoints(layer)]
        return {slot: [raw_bytes(view[slot]) for view in views if view is not None] for slot in (1, 2, 3)}

    at_boundary, beyond = after(1, "nothing")[1], after(2, "nothing")[1]
    own = after(2, "own slot")
    assert own[2] == at_boundary
    assert own[1] == beyond
    tabled = after(2, "block table")
    assert tabled[2] == at_boundary
    assert tabled[3] == beyond


def life_of_a(
    path: str,
    policy: str,
    device: str,
    company: int,
    place: int,
    pad: tuple[int, int],
    sizes: dict[str, int],
    captured: bool = False,
) -> list[bytes]:
    """Request "a" over some steps among ``company`` others, in row ``place``: all that it has and gets.

    captured: the steps are replays of a graph, which has room for full windows.
    """
    config = small_config(
        path=path, fold_policy=policy, conv_kernel_size=4, max_requests=128, activation_dtype="bfloat16", **sizes
    )
    manager = make_manager(config, device, backend="triton", debug=False)
    longest = config.max_query_len
    others = [manager.admit(f"other {i}") for i in range(company)]
    graph = None
    if captured:
        graph = Graph(manager, company + 1 + pad[0], longest * (company + 1) + pad[1], end="verify")
    handle = manager.admit("a")
    seen = []
    for seed, (query_len, accepted) in enumerate([(longest, 3), (2, 2), (longest, longest), (1, 1)]):
        rows = list(others)
        rows.insert(min(place, company), handle)
        lens = [query_len if row == handle else 1 + (i + seed) % 2 for i, row in enumerate(rows)]
        start = sum(lens[: rows.index(handle)])
        tokens = sum(lens) + pad[1] if graph is None else graph.tokens
        [inputs] = make_inputs(config, tokens, 100 + seed, device)
        [own] = make_inputs(config, query_len, seed, device)
        for name in ("qkv", "raw_gate", "raw_beta"):
            getattr(inputs, name)[start : start + query_len] = getattr(own, name)
        metadata = StepMetadata(handles=tuple(rows), query_lens=tuple(lens))
        if graph is None:
            step = manager.begin_step(metadata, (len(rows) + pad[0], tokens))
            [output] = verify_all(step, [inputs])
        else:
            graph.fill([inputs], graph.logits, graph.drafts)
            step = graph.begin(metadata)
            graph.graph.replay()
            step.replayed("verify")
            [output] = graph.outputs
        seen.append(raw_bytes(output[start : start + query_len]))
        counts = [accepted if row == handle else 1 for row in rows]
        step.defer(torch.tensor(counts, device=device))
        seen += held_by(manager, handle)
    return seen


def held_by(manager: StateManager, handle: Handle) -> list[bytes]:
    """What a request holds in layer 0."""
    layer: Any = manager._backend.storage.layers[0]
    slot = int(manager.checkpoint_slots([handle])[0])
    held = [raw_bytes(tensor[slot]) for tensor in (layer.recurrent, layer.conv)]
    # Each ring entry was written by now, or is still the zero that it was allocated as.
    held += [raw_bytes(tensor[handle.record_slot]) for tensor in (layer.record_u, layer.record_key_gate)]
    return held + [raw_bytes(tensor[handle.record_slot]) for tensor in (layer.record_inv_norm, layer.conv_ring)]


@pytest.mark.parametrize(
    ("path", "company", "sizes"),
    [
        pytest.param("portable", 3, {"head_k_dim": 24}, id="portable, 4 rows"),
        pytest.param("portable", 63, LARGE, id="portable, 64 rows", marks=pytest.mark.gpu),
        *(
            pytest.param("hopper", company, LARGE, id=f"hopper, {company + 1} rows", marks=pytest.mark.hopper)
            for company in (7, 31, 100)
        ),
    ],
)
@pytest.mark.parametrize("policy", POLICIES)
def test_a_request_has_the_same_bits_in_any_company(
    policy: str, path: str, company: int, sizes: dict[str, int], device: str
) -> None:
    """Alone, in the first row, in the middle and in the last, with padding and without."""
    alone = life_of_a(path, policy, device, 0, 0, (0, 0), sizes)
    for place, pad in ((0, (0, 0)), (company // 2, (2, 0)), (company, (1, 5))):
        assert life_of_a(path, policy, device, company, place, pad, sizes) == alone
    assert life_of_a(path, policy, device, 0, 0, (7, 3), sizes) == alone


@pytest.mark.gpu
@pytest.mark.parametrize("policy", POLICIES)
def test_a_request_has_the_same_bits_in_a_graph(policy: str, path: str, device: str) -> None:
    """Of few rows and of many, against the same steps alone and by hand."""
    alone = life_of_a(path, policy, device, 0, 0, (0, 0), LARGE)
    for company, place, pad in ((0, 0, (0, 0)), (7, 3, (2, 5)), (100, 100, (0, 0))):
        assert life_of_a(path, policy, device, company, place, pad, LARGE, captured=True) == alone, company


@pytest.mark.parametrize("policy", POLICIES)
def test_a_step_changes_no_byte_that_is_not_its_own(policy: str, path: str, device: str) -> None:
    """Through a manager, over whole pools, with everything unowned NaN: other requests, free slots, null, scratch."""
    config = small_config(
        path=path, fold_policy=policy, conv_kernel_size=4, num_layers=2, max_requests=6, num_checkpoints=7
    )
    manager = StateManager(config, make_params(config, device=device), device, backend="triton")
    handles = [manager.admit(name) for name in "abcd"]
    metadata = StepMetadata(handles=tuple(handles), query_lens=(4, 3, 2, 4))
    step = manager.begin_step(metadata)
    verify_all(step, make_inputs(config, 13, 0, device))
    step.defer(torch.tensor([3, 3, 1, 4], device=device))
    storage: Any = manager._backend.storage
    inside = [handles[2], handles[0]]
    records = {handle.record_slot for handle in inside}
    slots = set(manager.checkpoint_slots(inside).tolist())
    for layer in storage.layers:
        for name, tensor in layer._asdict().items():
            for slot in set(range(len(tensor))) - (slots if name in ("recurrent", "conv") else records):
                tensor[slot] = torch.nan
    before = [snapshot(layer) for layer in storage.layers]
    kinds = ("decode", "decode", "dummy")
    metadata = StepMetadata(handles=(*inside, None), query_lens=(3, 4, 2), row_kinds=kinds)
    step = manager.begin_step(metadata, pad_to=(5, 12))
    inputs = [LayerInputs(*(t.clone() for t in vars(i).values())) for i in make_inputs(config, 12, 1, device)]
    for tensors in inputs:
        for tensor in vars(tensors).values():
            tensor[7:] = torch.nan  # the dummy's tokens and padding
    for output in verify_all(step, inputs):
        assert output[:7].isfinite().all()
        assert not output[7:].any()
    folds = policy == "deferred"
    verified = [snapshot(layer) for layer in storage.layers]
    assert changed_slots(before, verified, ("recurrent", "conv")) == (slots if folds else set())
    assert changed_slots(before, verified, RECORDS) == records
    step.commit(torch.tensor([2, 4, 0], device=device))
    ended = [snapshot(layer) for layer in storage.layers]
    assert changed_slots(before, ended, ("recurrent", "conv")) == slots
    assert changed_slots(verified, ended, RECORDS) == set()


RECORDS = ("conv_ring", "record_u", "record_key_gate", "record_inv_norm")


def changed_slots(
    before: list[dict[str, torch.Tensor]], after: list[dict[str, torch.Tensor]], names: tuple[str, ...]
) -> set[int]:
    """Slots of which every named tensor changed in every layer; a slot that changed in some alone is -1."""
    found = [
        {slot for slot in range(len(old[name])) if raw_bytes(old[name][slot]) != raw_bytes(new[name][slot])}
        for old, new in zip(before, after, strict=True)
        for name in names
    ]
    return found[0] if all(slots == found[0] for slots in found) else {-1}
