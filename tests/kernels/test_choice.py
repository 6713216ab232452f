"""Which kernels a manager gets, how those for Hopper GPUs divide their work, and when their launches may overlap.

All of it is the host's, so a CPU tests it: where a kernel would be launched on a Hopper GPU, its arguments are seen.
"""

import dataclasses
import itertools
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from specstate import SpecStateError, StateConfig, StateManager, StepMetadata
from specstate.backends import build
from specstate.kernels import choice, hopper
from specstate.kernels import rows as at
from specstate.kernels.arena import TorchAllocator
from specstate.kernels.cursors import StepTensors
from specstate.kernels.hopper_constants import fold_constants, share, verify_constants, verify_options
from specstate.kernels.portable import PortableKernels
from specstate.kernels.supported import hopper_refusal
from specstate.kernels.tile_table import default_table, gpu_table
from specstate.kernels.tiles import Tiles, VerifyTile
from specstate.storage import Storage
from tests.factories import LayerInputs, make_inputs, make_params
from tests.kernels.compiled import Target, launcher_on_a_cpu, model_config
from tests.kernels.harness import small_config

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="is of a CPU, with Triton interpreted")

CPU = torch.device("cpu")
COVERED = small_config(path="hopper", num_heads=2, head_v_dim=64).model_copy(update={"path": None})


def storage_on_a_gpu(*states: torch.Tensor) -> Any:
    """As much of a storage on a GPU as the refusal looks at."""
    return SimpleNamespace(
        cursors=SimpleNamespace(device=torch.device("cuda", 0)),
        layers=[SimpleNamespace(recurrent=state) for state in states],
    )


@pytest.fixture
def on_a_hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _=None: (9, 0))


# -- what the Hopper kernels refuse


@pytest.mark.usefixtures("on_a_hopper")
@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({}, None),
        ({"head_v_dim": 192, "record_capacity": 64}, None),
        ({"head_k_dim": 64}, "head_k_dim = 64 must be 128"),
        ({"head_k_dim": 256}, "head_k_dim = 256 must be 128"),
        ({"head_v_dim": 96}, "head_v_dim = 96 must be a multiple of 64"),
        ({"record_capacity": 65}, "record_capacity = 65 must be at most 64"),
    ],
)
def test_a_config_is_refused(changes: dict[str, int], words: str | None) -> None:
    config = model_config(**changes)
    assert hopper_refusal(config, storage_on_a_gpu(torch.zeros(2, 4))) == words


@pytest.mark.parametrize(("capability", "hip"), [((8, 0), None), ((10, 0), None), ((9, 0), "6.4")])
def test_a_gpu_is_refused(capability: tuple[int, int], hip: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _=None: capability)
    monkeypatch.setattr(torch.version, "hip", hip)
    refusal = hopper_refusal(model_config(), storage_on_a_gpu(torch.zeros(2, 4)))
    assert refusal == "needs a GPU of compute capability 9.0, the manager is on cuda:0"


@pytest.mark.usefixtures("on_a_hopper")
def test_a_storage_is_refused() -> None:
    """The second layer's states start at 4 bytes, or lie 20 bytes apart."""
    good, memory = torch.zeros(2, 4), torch.zeros(11)
    for bad in (memory[1:9].view(2, 4), memory[:10].view(2, 5)[:, :4]):
        refusal = hopper_refusal(model_config(), storage_on_a_gpu(good, bad))
        assert refusal is not None and refusal.startswith("storage[1].recurrent must start")


# -- which kernels a manager gets


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Hopper kernels that are portable ones of another name; they serve when this list is empty."""

    class Named(PortableKernels):
        path = "hopper"

    reasons = ["not here"]
    monkeypatch.setattr(choice, "hopper_refusal", lambda *_: reasons[0] if reasons else None)
    monkeypatch.setattr(hopper, "HopperKernels", Named)
    return reasons


@pytest.mark.parametrize(
    ("pinned", "serves", "path"),
    [
        (None, True, "hopper"),
        (None, False, "portable"),
        ("portable", True, "portable"),
        ("portable", False, "portable"),
        ("hopper", True, "hopper"),
        ("hopper", False, "hopper"),
    ],
)
def test_the_choice(pinned: str | None, serves: bool, path: str, served: list[str]) -> None:
    """A pinned path is never exchanged for another: kernels that do not serve refuse to be made."""
    if serves:
        served.clear()
    config = COVERED.model_copy(update={"path": pinned})
    kernels = choice.triton_kernels(config, tuple(make_params(config)), Storage(config, CPU))
    assert kernels.path == path


def test_a_cpu_gets_portable_kernels() -> None:
    manager = StateManager(COVERED, make_params(COVERED), device="cpu", backend="triton")
    step = manager.begin_step(StepMetadata(handles=(), query_lens=()))
    assert step.path == "portable"


def test_hopper_kernels_are_refused_on_a_cpu_before_anything_is_allocated(monkeypatch: pytest.MonkeyPatch) -> None:
    config = COVERED.model_copy(update={"path": "hopper"})
    refusal = "path 'hopper': needs a GPU of compute capability 9.0, the manager is on cpu"
    with pytest.raises(SpecStateError, match=refusal):
        hopper.HopperKernels(config, tuple(make_params(config)), Storage(config, CPU))
    made: list[object] = []
    monkeypatch.setattr(build, "Storage", lambda *arguments: made.append(arguments))
    with pytest.raises(SpecStateError, match=refusal):
        StateManager(config, make_params(config), device="cpu", backend="triton")
    assert not made


def test_another_storage_may_change_the_path(served: list[str]) -> None:
    manager = StateManager(COVERED, make_params(COVERED), device="cpu", backend="triton")
    for serves in (True, False):
        served[:] = [] if serves else ["not here"]
        manager.release_storage()
        manager.bind_storage()
        step = manager.begin_step(StepMetadata(handles=(), query_lens=()))
        assert step.path == ("hopper" if serves else "portable")
        step.cancel()


# -- how the work is divided


def tiles_of(config: StateConfig) -> Tiles:
    return Tiles(config, default_table())


@pytest.mark.parametrize(
    ("changes", "num_rows", "tile"),
    [
        ({}, 8, VerifyTile(64, True, 3)),
        ({}, 9, VerifyTile(128, False, 3)),
        ({"num_heads": 32}, 3, VerifyTile(64, True, 3)),
        ({"num_heads": 32}, 4, VerifyTile(128, False, 3)),
        ({"head_v_dim": 192}, 1000, VerifyTile(64, True, 3)),
        ({"max_query_len": 9}, 9, VerifyTile(128, False, 2)),
    ],
)
def test_the_tile_of_a_verify(changes: dict[str, int], num_rows: int, tile: VerifyTile) -> None:
    config = model_config(**changes)
    assert tiles_of(config).verify(num_rows) == tile
    assert tile in tiles_of(config).all_verify


@pytest.mark.parametrize(
    ("changes", "blocks"),
    [({}, (64, 128)), ({"record_capacity": 33}, (64, 64)), ({"head_v_dim": 64}, (64, 64))],
)
def test_the_block_of_a_fold(changes: dict[str, int], blocks: tuple[int, int]) -> None:
    config = model_config(**changes)
    assert (tiles_of(config).fold(16), tiles_of(config).fold(17)) == blocks
    assert set(tiles_of(config).all_folds) == set(blocks)


def test_chunks_of_the_state_that_come_early() -> None:
    tiles = VerifyTile(64, True, 3), VerifyTile(128, False, 3), VerifyTile(128, False, 4)
    deferred, narrow = model_config(fold_policy="deferred"), model_config(checkpoint_dtype="bfloat16")
    assert [share(model_config(), tile) for tile in tiles] == [(3, 4, 4), (3, 2, 4), (4, 1, 2)]
    assert [share(deferred, tile) for tile in tiles] == [(3, 4, 4), (3, 3, 3), (4, 1, 1)]
    assert [share(narrow, tile) for tile in tiles] == [(3, 2, 2), (3, 2, 2), (4, 1, 2)]
    # Windows of 2 leave room for a third chunk, which would be in the way.
    assert share(model_config(max_query_len=2), tiles[1]) == (3, 2, 4)


@pytest.mark.parametrize(
    ("changes", "wanted", "programs"),
    [
        ({"record_capacity": 32, "checkpoint_dtype": "bfloat16"}, 4, 4),
        ({"record_capacity": 33, "checkpoint_dtype": "bfloat16"}, 4, 3),
        ({"record_capacity": 33}, 3, 3),
        ({"record_capacity": 33, "activation_dtype": "float32"}, 3, 2),
        ({"fold_policy": "deferred", "record_capacity": 17}, 3, 2),
        ({"fold_policy": "deferred", "record_capacity": 33}, 3, 1),
    ],
)
def test_fewer_programs_where_the_records_leave_no_room(changes: dict[str, Any], wanted: int, programs: int) -> None:
    config, tile = model_config(**changes), VerifyTile(128, False, wanted)
    assert share(config, tile).programs == programs
    assert verify_options(config, tile)["maxnreg"] == {4: 128, 3: 168, 2: 255, 1: 255}[programs]


@pytest.mark.parametrize("gpu", ["NVIDIA H200", "any other"])
@pytest.mark.parametrize("length", range(1, 17))
def test_as_many_programs_as_a_packaged_table_says(length: int, gpu: str) -> None:
    """With the activations of its timings, and the record capacity that a policy has if nobody says another."""
    choices = itertools.product(("ring", "eager", "deferred"), ("float32", "bfloat16"), (128, 256), (4, None))
    for policy, checkpoints, v_dim, taps in choices:
        config = model_config(
            max_query_len=length,
            fold_policy=policy,
            checkpoint_dtype=checkpoints,
            head_v_dim=v_dim,
            conv_kernel_size=taps,
        )
        for tile in Tiles(config, gpu_table(gpu)).all_verify:
            part = share(config, tile)
            assert part.programs == tile.programs, (config, tile)
            assert 1 <= part.early <= part.chunks


@pytest.mark.parametrize(
    ("bound", "length", "products"),
    [(None, 8, False), (-5.0, 4, False), (-5.0, 5, True), (-5.0, 12, True), (-5.0, 13, False), (-8.1, 8, False)],
)
def test_pairs_of_tokens_by_products_where_decays_have_a_bound(
    bound: float | None, length: int, products: bool
) -> None:
    config = model_config(gate_lower_bound=bound, max_query_len=length)
    assert verify_constants(config, VerifyTile(128, False, 2))["PRODUCTS"] is products


@pytest.mark.parametrize(
    ("changes", "rows"),
    [
        ({}, 8),  # 24 may be pending
        ({"record_capacity": 24}, 0),
        ({"record_capacity": 25}, 8),
        ({"record_capacity": 33}, 16),
        ({"max_query_len": 16}, 16),
        ({"fold_policy": "eager"}, 0),
        ({"fold_policy": "deferred"}, 0),
        ({"fold_policy": "deferred", "record_capacity": 17}, 8),
    ],
)
def test_pending_records_beside_the_newest(changes: dict[str, Any], rows: int) -> None:
    config = model_config(**changes)
    assert verify_constants(config, VerifyTile(64, True, 2))["SECOND"] == rows


@pytest.mark.parametrize(("capacity", "rounded"), [(2, 8), (8, 8), (9, 16), (33, 64), (64, 64)])
def test_a_fold_has_room_for_every_record(capacity: int, rounded: int) -> None:
    config = model_config(fold_policy="deferred", max_query_len=1, record_capacity=capacity)
    assert fold_constants(config, 64)["CAPACITY"] == rounded
    assert verify_constants(config, tiles_of(config).all_verify[0])["CAPACITY"] == rounded


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("taps", "offset", "is_wide"), [(4, 0, True), (2, 0, True), (3, 0, False), (4, 1, False)])
def test_taps_are_loaded_together_where_all_layers_let_them(
    dtype: torch.dtype, taps: int, offset: int, is_wide: bool
) -> None:
    config = COVERED.model_copy(update={"layer": COVERED.layer.model_copy(update={"conv_kernel_size": taps})})
    aligned, moved = (
        torch.zeros(config.layer.conv_channels * taps + start, dtype=dtype)[start:].view(-1, taps)
        for start in (0, offset)
    )
    params = [dataclasses.replace(layer, conv_weight=aligned) for layer in make_params(config)]
    params[-1] = dataclasses.replace(params[-1], conv_weight=moved)
    with launcher_on_a_cpu():
        kernels = hopper.HopperKernels(config, tuple(params), Storage(config, CPU))
        assert kernels._wide_taps is is_wide
        kernels.bind(tuple(dataclasses.replace(layer, conv_weight=aligned) for layer in params))
        assert kernels._wide_taps is (taps != 3)


# -- when a launch may start before the last one has ended


class Launches:
    """Stands for a kernel; ``chained`` has the first argument of every launch."""

    arg_names: tuple[str, ...] = ()
    constexprs: tuple[int, ...] = ()

    def __init__(self) -> None:
        self.chained: list[Any] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        return lambda first, *_, **__: self.chained.append(first)


class Launcher:
    """Kernels for a Hopper GPU over a CPU's storage, and a step of one row that owns nothing."""

    def __init__(self, config: StateConfig) -> None:
        self.kernels = hopper.HopperKernels(config, tuple(make_params(config)), Storage(config, CPU))
        self.step = self.begin()
        self.inputs = make_inputs(config, 1, 0)
        self.out = torch.zeros(1, config.layer.num_heads, config.layer.head_v_dim)

    def begin(self) -> StepTensors:
        staged = torch.zeros(at.STAGED_COLUMNS + 2, dtype=torch.int32)
        staged[at.RECORD_ROW], staged[at.QUERY_LEN], staged[-1] = -1, 1, 1
        return self.kernels.begin(staged, 1, 1, 1, TorchAllocator(CPU))

    def verify(self, layer: int, step: StepTensors | None = None, inputs: LayerInputs | None = None) -> None:
        given = inputs or self.inputs[layer]
        self.kernels.verify(step or self.step, layer, given.qkv, given.raw_gate, given.raw_beta, self.out)

    def unaligned(self) -> LayerInputs:
        given = self.inputs[0]
        moved = torch.zeros(given.qkv.numel() + 1)[1:].view(given.qkv.shape)
        return LayerInputs(moved, given.raw_gate, given.raw_beta)


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> Iterator[Launches]:
    seen = Launches()
    monkeypatch.setattr(hopper, "verify_kernel", seen)
    monkeypatch.setattr(hopper, "fold_kernel", Launches())
    with launcher_on_a_cpu():
        yield seen


#: What may come between two verifies of a step, and changes something that the second reads before it waits, or may.
BETWEEN = {
    "refresh": lambda m: m.kernels.refresh(m.step),
    "null_row": lambda m: m.kernels.null_row(m.step, 0),
    "begin": lambda m: m.begin(),
    "fold": lambda m: m.kernels.fold(torch.zeros(1, at.PLAN_COLUMNS, dtype=torch.int32)),
    "flush": lambda m: m.kernels.flush(m.step),
    "cancel": lambda m: m.kernels.cancel(m.step, [0]),
    "bind": lambda m: m.kernels.bind(tuple(make_params(m.kernels.config, 3))),
    "write_records": lambda m: m.kernels.write_records(
        m.step, 0, m.out, m.inputs[0].raw_gate, m.inputs[0].raw_gate, None
    ),
    "portable verify": lambda m: m.verify(0, inputs=m.unaligned()),
    "another_step": lambda m: m.verify(0, step=m.step.copy()),
}


def test_verifies_of_a_step_are_chained(launches: Launches) -> None:
    launcher = Launcher(COVERED.model_copy(update={"num_layers": 3}))
    for layer in range(3):
        launcher.verify(layer)
    assert launches.chained == [0, 1, 1]


@pytest.mark.parametrize("what", BETWEEN)
def test_nothing_is_chained_to_what_changes_its_rows(what: str, launches: Launches) -> None:
    launcher = Launcher(COVERED)
    launcher.verify(0)
    BETWEEN[what](launcher)
    launcher.verify(0)
    assert set(launches.chained) == {0}


def test_nothing_is_chained_across_streams(launches: Launches, monkeypatch: pytest.MonkeyPatch) -> None:
    launcher = Launcher(COVERED)
    launcher.verify(0)
    monkeypatch.setattr(Target, "get_current_stream", lambda *_: 1)
    launcher.verify(0)
    assert launches.chained == [0, 0]
