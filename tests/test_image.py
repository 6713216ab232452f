"""Images of requests: what a backend exports is where a request stands, and what it imports goes on from there."""

import io
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

from specstate import Handle, SamplingParams, SpecStateError, StateManager, StepMetadata
from specstate.image import RequestImage, check_image, payload_tensors
from specstate.kernels import rows as at
from specstate.limits import MAX_POSITION
from specstate.requests import Request
from specstate.transfer import ImageEntry, RequestEntry, TransferHeader, folds_on_arrival, read_file, write_file
from tests.factories import (
    POLICIES,
    fingerprint,
    make_config,
    make_inputs,
    make_manager,
    make_twin,
    raw_bytes,
    run_step,
    verify_all,
)

SAMPLING = SamplingParams(temperature=0.7, top_k=5, top_p=0.9, seed=2**40 + 3, end_token_ids=(7, 11))

#: Counts after which 4 records lie at positions [7, 11), over the end of a ring of 8.
WRAPPED = (4, 3, 4)

#: What else a config may have: dtypes and a convolution.
KINDS = [
    pytest.param({}, id="float64"),
    pytest.param({"checkpoint_dtype": "float32", "activation_dtype": "float32"}, id="float32"),
    pytest.param({"checkpoint_dtype": "float32", "activation_dtype": "bfloat16"}, id="bfloat16 activations"),
    pytest.param({"checkpoint_dtype": "bfloat16", "activation_dtype": "bfloat16"}, id="bfloat16 checkpoints"),
    pytest.param({"conv_kernel_size": None}, id="no conv"),
    pytest.param({"conv_kernel_size": 2}, id="conv of 2"),
]
#: Where an image goes: other windows, capacities and policies than those of its source, R = 8 and T = 4 under ring.
PLACES = [
    pytest.param({}, id="the same"),
    pytest.param({"record_capacity": 11}, id="R 11"),
    pytest.param({"record_capacity": 40, "max_query_len": 9}, id="R 40, T 9"),
    pytest.param({"record_capacity": 7, "max_query_len": 1}, id="R 7, T 1"),
    pytest.param({"record_capacity": 9, "fold_policy": "deferred"}, id="deferred"),
    pytest.param({"record_capacity": 5, "fold_policy": "eager"}, id="eager"),
]


def make_source(**changes: Any) -> StateManager:
    return make_manager(make_config(**{"record_capacity": 8, **changes}))


def request_of(manager: StateManager, handle: Handle) -> Request:
    return manager._requests.of(handle)


def advance(manager: StateManager, handle: Handle, counts: Sequence[int], seed: int = 0) -> None:
    """A step for every count, with a full window each."""
    length = manager.config.max_query_len
    for index, count in enumerate(counts):
        step = manager.begin_step(StepMetadata(handles=(handle,), query_lens=(length,)))
        if manager._backend.path == "metadata":
            step.replayed("verify")
            step.defer([count])
        else:
            verify_all(step, make_inputs(manager.config, length, seed + index, manager.device))
            step.defer(torch.tensor([count], device=manager.device))


def export(manager: StateManager, handle: Handle, fold: bool = False) -> RequestImage:
    return manager._backend.export_image(handle.record_slot, request_of(manager, handle).folded_by_verify, fold)


def take(
    manager: StateManager, image: RequestImage, name: str = "taken", sampling: SamplingParams = SAMPLING
) -> Handle:
    """The request of an image, in the slots of one that was admitted for it."""
    handle = manager.admit(name)
    request = request_of(manager, handle)
    slots = request.checkpoint_slot, handle.record_slot, handle.generation
    manager._backend.import_image(*slots, image, sampling.columns())
    request.may_be_pending, request.in_use = image.pending_len > 0, True
    request.stands_at(image.committed_len)
    return handle


def bits_of(image: RequestImage) -> Any:
    """All of an image by value."""
    payload = image.payload
    named = None if payload is None else {name: raw_bytes(tensor) for name, tensor in payload.tensors().items()}
    return image.checkpoint_len, image.pending_len, image.finished, named


def checkpoint(manager: StateManager, handle: Handle) -> list[bytes]:
    slot = request_of(manager, handle).checkpoint_slot
    pairs = [manager.checkpoints(layer) for layer in range(manager.config.num_layers)]
    return [raw_bytes(tensor[slot]) for pair in pairs for tensor in pair if tensor is not None]


def window(manager: StateManager, handle: Handle, length: int, count: int, seed: int) -> list[bytes]:
    """The outputs of one more step."""
    inputs = make_inputs(manager.config, length, seed)
    step = manager.begin_step(StepMetadata(handles=(handle,), query_lens=(length,)))
    outputs = [raw_bytes(out) for out in verify_all(step, inputs)]
    step.defer(torch.tensor([count]))
    return outputs


# -- there and back


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("kind", KINDS)
def test_a_pending_image_goes_on_to_the_bit(kind: dict[str, Any], place: dict[str, Any]) -> None:
    source = make_source(**kind)
    handle = source.admit("a", SAMPLING)
    advance(source, handle, WRAPPED)
    image = export(source, handle)
    assert (image.checkpoint_len, image.pending_len) == (7, 4)

    # Slots and rings of the destination have held another request, and a neighbour stays there.
    changes = {"record_capacity": 8, **kind, **place}
    goal = make_manager(make_config(**changes))
    neighbour = goal.admit("neighbour")
    advance(goal, neighbour, [1] * 5, seed=50)
    former = goal.admit("former")
    advance(goal, former, [1] * 13, seed=70)
    goal.release(former)
    before = bits_of(export(goal, neighbour))
    taken = take(goal, image)
    assert bits_of(export(goal, taken)) == bits_of(image)
    assert bits_of(export(goal, neighbour)) == before
    sampling = [m._backend.storage.sampling[h.record_slot] for m, h in ((source, handle), (goal, taken))]
    assert torch.equal(*sampling)
    cursor = goal._backend.cursor(taken.record_slot)
    assert cursor[:4] == (7, 4, taken.generation, False)

    length = min(goal.config.max_query_len, goal.config.record_capacity - 4, 4)
    assert window(source, handle, length, 1, seed=9) == window(goal, taken, length, 1, seed=9)
    source.flush()
    goal.flush()
    # Other policies have folded in two parts, which rounds otherwise.
    if goal.config.fold_policy == "ring":
        assert checkpoint(source, handle) == checkpoint(goal, taken)
    goal.check_integrity()


@pytest.mark.parametrize("kind", KINDS)
def test_both_go_on_alike_in_every_step(kind: dict[str, Any]) -> None:
    source, goal = make_source(**kind), make_source(**kind)
    handle = source.admit("a")
    advance(source, handle, WRAPPED)
    taken = take(goal, export(source, handle))
    for seed, count in enumerate((1, 4, 2, 3, 1, 1, 4)):
        assert window(source, handle, 4, count, 20 + seed) == window(goal, taken, 4, count, 20 + seed)
        assert checkpoint(source, handle) == checkpoint(goal, taken)
        assert bits_of(export(source, handle)) == bits_of(export(goal, taken))


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("place", PLACES)
def test_the_taken_request_follows_its_twin(place: dict[str, Any], policy: str) -> None:
    source = make_manager(make_config(fold_policy=policy, record_capacity=8))
    handle, twin = source.admit("a"), make_twin(source.config)
    for seed, count in enumerate(WRAPPED):
        run_step(source, [(handle, twin, 4, count)], seed)
    goal = make_manager(make_config(**{"record_capacity": 8, **place}))
    image = export(source, handle)
    taken = take(goal, image)
    twin.check(goal, taken)
    if folds_on_arrival(image.pending_len, goal.config):
        goal.flush()
    for seed, count in enumerate((1, 2, 3, 1), 30):
        length = min(goal.config.max_query_len, 4)
        run_step(goal, [(taken, twin, length, min(count, length))], seed)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("kind", KINDS)
def test_a_folded_image_is_what_a_fold_makes(kind: dict[str, Any], policy: str) -> None:
    source = make_source(**kind, fold_policy=policy)
    handle = source.admit("a")
    advance(source, handle, WRAPPED)
    before = fingerprint(source)
    image = export(source, handle, fold=True)
    assert (image.checkpoint_len, image.pending_len) == (11, 0)
    assert image.payload is not None
    assert set(image.payload.tensors()) == {"recurrent", "conv"} - (
        {"conv"} if not source.config.layer.conv_history_len else set()
    )
    assert fingerprint(source) == before, "an export changes nothing"
    for index in range(source.config.num_layers):
        read = source.read(handle, index)
        dtype = image.payload.recurrent.dtype
        assert raw_bytes(image.payload.recurrent[index]) == raw_bytes(read.recurrent.to(dtype))
    goal = make_manager(make_config(**kind, record_capacity=4, fold_policy="eager"))
    taken = take(goal, image)
    source.flush()
    assert checkpoint(source, handle) == checkpoint(goal, taken)
    assert bits_of(export(source, handle)) == bits_of(image) == bits_of(export(goal, taken))
    goal.check_integrity()
    assert window(source, handle, 4, 2, seed=5) == window(goal, taken, 4, 2, seed=5)


def test_an_image_is_in_memory_of_its_own() -> None:
    source = make_source()
    handle = source.admit("a")
    advance(source, handle, WRAPPED)
    images = [export(source, handle, fold) for fold in (False, True)]
    before = [bits_of(image) for image in images]
    for layer in source._backend.storage.layers:
        for tensor in layer:
            tensor.fill_(torch.nan)
    assert [bits_of(image) for image in images] == before


def test_nothing_else_of_the_rings_is_read() -> None:
    source = make_source()
    handle = source.admit("a")
    advance(source, handle, WRAPPED)
    goal = make_source()
    for layer in goal._backend.storage.layers:
        for tensor in (layer.record_u, layer.record_key_gate, layer.record_inv_norm):
            tensor.fill_(torch.nan)
    taken = take(goal, export(source, handle))
    rings = [layer.record_u[taken.record_slot] for layer in goal._backend.storage.layers]
    assert all(ring.isnan().any(0).any(-1).tolist() == [False] * 3 + [True] * 4 + [False] for ring in rings)
    assert window(source, handle, 4, 4, seed=5) == window(goal, taken, 4, 4, seed=5)


@pytest.mark.parametrize("fold", [False, True], ids=["as it lies", "folded"])
@pytest.mark.parametrize("moment", ["begun", "verified"])
@pytest.mark.parametrize("policy", POLICIES)
def test_an_open_step_is_not_seen(policy: str, moment: str, fold: bool) -> None:
    """Under deferred, verify has folded what was pending, and the cursor does not know it yet."""
    source = make_source(fold_policy=policy)
    handle = source.admit("a")
    advance(source, handle, WRAPPED)
    committed = export(source, handle, fold=True)
    step = source.begin_step(StepMetadata(handles=(handle,), query_lens=(4,)))
    if moment == "verified":
        verify_all(step, make_inputs(source.config, 4, seed=8))
    image = export(source, handle, fold)
    pending = {"eager": 0, "deferred": 0 if moment == "verified" else 4, "ring": 4}[policy]
    assert (image.committed_len, image.pending_len) == (11, 0 if fold else pending)
    if not image.pending_len:
        assert bits_of(image) == bits_of(committed)
    goal = make_source(fold_policy=policy)
    taken = take(goal, image)
    step.cancel()
    source.flush()
    goal.flush()
    assert checkpoint(source, handle) == checkpoint(goal, taken)


def test_a_finished_request_stays_finished() -> None:
    source = make_source()
    handle = source.admit("a")
    advance(source, handle, [2])
    step = source.begin_step(StepMetadata(handles=(handle,), query_lens=(4,)))
    verify_all(step, make_inputs(source.config, 4, seed=8))
    step.defer(torch.tensor([1]), finished=torch.tensor([True]))
    for fold in (False, True):
        goal = make_source()
        taken = take(goal, export(source, handle, fold))
        assert goal._backend.cursor(taken.record_slot).finished
        advance(goal, taken, [3])
        assert goal.committed_len(taken) == 3
        assert goal.counters().wasted_windows == 1


def test_a_checkpoint_that_a_block_table_moved_is_found() -> None:
    source = make_source(num_checkpoints=5)
    handle = source.admit("a")
    advance(source, handle, WRAPPED)
    before = [bits_of(export(source, handle, fold)) for fold in (False, True)]
    first, backend = request_of(source, handle).checkpoint_slot, source._backend
    backend.copy_slot(first, 5)
    backend.storage.cursors[handle.record_slot, at.CURSOR_SLOT] = 5
    for layer in backend.storage.layers:
        layer.recurrent[first] = layer.conv[first] = torch.nan
    assert [bits_of(export(source, handle, fold)) for fold in (False, True)] == before


def test_a_request_without_tokens_and_one_that_is_loaded() -> None:
    source, goal = make_source(), make_source()
    fresh, loaded = source.admit("fresh"), source.admit("loaded")
    config = source.config
    generator = torch.Generator().manual_seed(3)
    states = [
        (
            torch.randn(2, 5, 6, generator=generator, dtype=torch.float64),
            torch.randn(config.layer.conv_channels, 3, generator=generator, dtype=torch.float64),
        )
        for _ in range(2)
    ]
    source.load(loaded, states, committed_len=1_000_003)
    for handle, committed_len in ((fresh, 0), (loaded, 1_000_003)):
        image = export(source, handle)
        assert (image.checkpoint_len, image.pending_len) == (committed_len, 0)
        taken = take(goal, image, handle.request_id)
        assert window(source, handle, 4, 2, seed=1) == window(goal, taken, 4, 2, seed=1)
        assert bits_of(export(source, handle)) == bits_of(export(goal, taken))


def test_a_checkpoint_written_in_place_is_exported_with_its_own_history() -> None:
    source, goal = make_source(), make_source()
    handle = source.admit("a")
    slot = request_of(source, handle).checkpoint_slot
    for layer in range(2):
        recurrent, conv = source.checkpoints(layer)
        recurrent[slot], conv[slot] = 2.0 + layer, 3.0 + layer
    image = export(source, handle, fold=True)
    assert image.payload is not None and image.payload.conv is not None
    assert image.payload.conv[1].unique().tolist() == [4.0]
    taken = take(goal, image)
    source.load(handle, None, committed_len=0)
    assert window(source, handle, 4, 2, seed=1) == window(goal, taken, 4, 2, seed=1)


def test_by_way_of_a_file() -> None:
    source = make_source(checkpoint_dtype="float32", activation_dtype="bfloat16")
    handle = source.admit("a", SAMPLING)
    advance(source, handle, WRAPPED)
    image = export(source, handle)
    entry = RequestEntry(request_id="a", sampling=SAMPLING, image=ImageEntry.of(image))
    header = TransferHeader(specstate_version="0", config=source.config, kind="request", requests=(entry,))
    file = io.BytesIO()
    write_file(file, header, [image])
    file.seek(0)
    read, [moved] = read_file(file)
    assert read == header
    goal = make_source(checkpoint_dtype="float32", activation_dtype="bfloat16", max_query_len=3)
    taken = take(goal, moved, sampling=read.requests[0].sampling)
    assert window(source, handle, 3, 2, seed=1) == window(goal, taken, 3, 2, seed=1)


def test_what_torch_is_set_to_does_not_matter() -> None:
    source, goal = make_source(), make_source()
    handle = source.admit("a")
    advance(source, handle, WRAPPED)
    plain = [bits_of(export(source, handle, fold)) for fold in (False, True)]
    with torch.inference_mode(), torch.autocast("cpu", dtype=torch.bfloat16):
        torch.set_default_dtype(torch.float64)
        try:
            images = [export(source, handle, fold) for fold in (False, True)]
            taken = take(goal, images[0])
        finally:
            torch.set_default_dtype(torch.float32)
    assert [bits_of(image) for image in images] == plain
    assert window(source, handle, 4, 2, seed=1) == window(goal, taken, 4, 2, seed=1)


def test_storage_of_the_callers_own() -> None:
    config = make_config(record_capacity=8)
    slots, channels = config.num_checkpoints + 1, config.layer.conv_channels
    pages = torch.zeros(slots, 2, 1000, dtype=torch.float64)
    storage = [
        (
            pages[:, i, :60].unflatten(1, (2, 5, 6)),
            pages[:, i, 100 : 100 + 3 * channels].unflatten(1, (channels, 3)),
        )
        for i in range(2)
    ]
    source, goal = make_source(), make_manager(config, storage=storage)
    handle = source.admit("a")
    advance(source, handle, WRAPPED)
    taken = take(goal, export(source, handle))
    assert bits_of(export(goal, taken)) == bits_of(export(source, handle))
    assert window(source, handle, 4, 2, seed=1) == window(goal, taken, 4, 2, seed=1)


# -- without payloads


@dataclass
class Pair:
    """One request in a manager with payloads and in one without."""

    managers: list[StateManager]
    handles: list[Handle]

    @classmethod
    def of(cls, **changes: Any) -> "Pair":
        payload = make_source(**changes)
        managers = [payload, StateManager(payload.config, None, backend="metadata", debug=True)]
        return cls(managers, [manager.admit("a") for manager in managers])


@pytest.mark.parametrize("fold", [False, True], ids=["as it lies", "folded"])
@pytest.mark.parametrize("policy", POLICIES)
def test_backend_metadata_has_the_lengths(policy: str, fold: bool) -> None:
    pair = Pair.of(fold_policy=policy)
    for manager, handle in zip(pair.managers, pair.handles, strict=True):
        advance(manager, handle, WRAPPED)
    steps = []
    for verified in (False, True):
        images = [export(m, h, fold) for m, h in zip(pair.managers, pair.handles, strict=True)]
        assert bits_of(images[0])[:3] == bits_of(images[1])[:3]
        assert images[0].payload is not None and images[1].payload is None
        for image in images:  # a payload that is there goes unused
            goal = StateManager(make_config(record_capacity=9), None, backend="metadata", debug=True)
            taken = take(goal, image)
            assert bits_of(export(goal, taken)) == (image.checkpoint_len, image.pending_len, False, None)
            assert goal._backend.cursor(taken.record_slot).generation == taken.generation
            advance(goal, taken, [2, 2])
            assert goal.committed_len(taken) == 15
            goal.check_integrity()
        if not verified:
            for manager, handle in zip(pair.managers, pair.handles, strict=True):
                steps.append(manager.begin_step(StepMetadata(handles=(handle,), query_lens=(4,))))
            verify_all(steps[0], make_inputs(pair.managers[0].config, 4, seed=8))
            steps[1].replayed("verify")


def test_backend_metadata_keeps_the_finished_flag() -> None:
    source, goal = (StateManager(make_config(), None, backend="metadata", debug=True) for _ in range(2))
    handle = source.admit("a")
    step = source.begin_step(StepMetadata(handles=(handle,), query_lens=(1,)))
    step.replayed("verify")
    step.defer([1], finished=[True])
    taken = take(goal, export(source, handle))
    assert goal._backend.cursor(taken.record_slot)[:4] == (0, 1, taken.generation, True)


# -- what does not fit


def refuses(manager: StateManager, image: RequestImage, words: str) -> None:
    handle = manager.admit("refused")
    slots = request_of(manager, handle).checkpoint_slot, handle.record_slot, handle.generation
    before = fingerprint(manager)
    with pytest.raises(SpecStateError, match=words):
        manager._backend.import_image(*slots, image, SAMPLING.columns())
    assert fingerprint(manager) == before
    manager.release(handle)


@pytest.fixture
def image() -> RequestImage:
    source = make_source()
    handle = source.admit("a")
    advance(source, handle, WRAPPED)
    return export(source, handle)


def test_an_image_without_payload_needs_backend_metadata(image: RequestImage) -> None:
    refuses(make_source(), replace(image, payload=None), "no payload, as from backend 'metadata'; path 'reference'")


@pytest.mark.parametrize("backend", ["reference", "metadata"])
def test_more_records_than_the_ring_holds(image: RequestImage, backend: Any) -> None:
    config = make_config(max_query_len=1, record_capacity=3)
    refuses(make_manager(config, backend=backend), image, "pending_len = 4 exceeds record_capacity = 3: export it fold")
    exact = make_config(max_query_len=1, record_capacity=4)
    take(make_manager(exact, backend=backend), image)


@pytest.mark.parametrize("backend", ["reference", "metadata"])
@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"checkpoint_len": -1}, "image.checkpoint_len = -1 is outside 0"),
        ({"pending_len": True}, "image.pending_len = True is outside 0"),
        ({"checkpoint_len": MAX_POSITION - 3}, f"image.committed_len = {MAX_POSITION + 1} exceeds {MAX_POSITION}"),
        ({"finished": 1}, "image.finished = 1 must be True or False"),
        ({"pending_len": 3}, r"image.u must have shape \[2, 2, 3, 5\], got \[2, 2, 4, 5\]"),
        ({"pending_len": 0}, "image.u must be None when nothing is pending"),
    ],
)
def test_lengths_that_are_none(image: RequestImage, backend: Any, changes: dict[str, Any], words: str) -> None:
    refuses(make_manager(backend=backend), replace(image, **changes), words)


@pytest.mark.parametrize("name", ["recurrent", "conv", "u", "key_gate", "inv_norm", "conv_history"])
def test_tensors_that_are_none(image: RequestImage, name: str) -> None:
    payload = image.payload
    assert payload is not None
    tensor = payload.tensors()[name]
    for wrong, words in (
        (None, f"image.{name} must be a tensor, not NoneType"),
        (tensor[:1], rf"image.{name} must have shape \[2, "),
        (tensor.int(), f"image.{name} must be float"),
        (tensor.to("meta"), f"image.{name} must be on cpu, got meta"),
    ):
        refuses(make_source(), replace(image, payload=replace(payload, **{name: wrong})), words)


def test_a_conv_where_there_is_none(image: RequestImage) -> None:
    refuses(make_source(conv_kernel_size=None), image, "image.(recurrent|key_gate|conv)")
    payload = image.payload
    assert payload is not None
    small = make_config(conv_kernel_size=None)
    with pytest.raises(SpecStateError, match=r"image\.conv must be None without a convolution"):
        check_image(image, small)


@pytest.mark.parametrize("kind", KINDS)
def test_the_table_of_tensors_is_what_an_export_makes(kind: dict[str, Any]) -> None:
    source = make_source(**kind)
    handle = source.admit("a")
    advance(source, handle, WRAPPED)
    for fold in (False, True):
        image = export(source, handle, fold)
        assert image.payload is not None
        made = {name: (tuple(t.shape), t.dtype) for name, t in image.payload.tensors().items()}
        wanted = payload_tensors(source.config, image.pending_len)
        assert made == {name: (tensor.shape, tensor.dtype) for name, tensor in wanted.items()}
        check_image(image, source.config)


def test_other_columns_of_a_cursor_are_cleared(image: RequestImage) -> None:
    goal = make_source()
    handle = goal.admit("a")
    request = request_of(goal, handle)
    goal._backend.storage.cursors[handle.record_slot] = 99
    slots = request.checkpoint_slot, handle.record_slot, handle.generation
    goal._backend.import_image(*slots, image, SAMPLING.columns())
    cursor = goal._backend.storage.cursors[handle.record_slot].tolist()
    named = {
        at.CURSOR_CHECKPOINT_LEN: 7,
        at.CURSOR_PENDING_LEN: 4,
        at.CURSOR_FINISHED: 0,
        at.CURSOR_GENERATION: handle.generation,
        at.CURSOR_SLOT: request.checkpoint_slot,
    }
    assert cursor == [named.get(column, 0) for column in range(at.CURSOR_COLUMNS)]
