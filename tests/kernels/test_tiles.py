"""Tables of tiles: what they choose, how they are read and refused, and that a choice changes no bit."""

import json
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

from specstate import SpecStateError, StateManager, StepMetadata
from specstate.kernels.tile_table import TileTable, default_table, device_table, gpu_table, load_table
from specstate.kernels.tiles import PortableTile, Tiles, VerifyTile
from tests.factories import make_config, make_inputs, make_manager, raw_bytes, verify_all
from tests.kernels.harness import small_config

H200 = "NVIDIA H200"
EMPTY = {"gpu": "Some GPU", "date": "2026-12-01", "versions": {}}


def wide_config(**changes: Any) -> Any:
    sizes = {"num_heads": 12, "head_k_dim": 128, "head_v_dim": 128, "max_query_len": 8}
    return make_config(**{**sizes, "checkpoint_dtype": "float32", "activation_dtype": "bfloat16", **changes})


def written(folder: Path, **changes: Any) -> Path:
    path = folder / "tiles.json"
    path.write_text(json.dumps({**EMPTY, **changes}))
    return path


@pytest.mark.parametrize("table", [gpu_table(H200), default_table()], ids=["H200", "default"])
def test_tiles_follow_the_number_of_row_heads(table: TileTable) -> None:
    for v_dim, length, heads in product((64, 128, 192, 256), (1, 8, 9, 16), (1, 12, 32)):
        tiles = Tiles(wide_config(head_v_dim=v_dim, max_query_len=length, num_heads=heads), table)
        programs = 3 if length <= 8 else 2
        for rows in (0, 1, 2, 3, 4, 8, 9, 96, 97, 8192):
            is_small = v_dim % 128 or rows * heads * v_dim <= 96 * 128
            wanted = VerifyTile(64, True, programs) if is_small else VerifyTile(128, False, programs)
            assert tiles.verify(rows) == wanted
            assert wanted in tiles.all_verify
        assert len(tiles.all_verify) == (1 if v_dim % 128 else 2)


def test_narrow_checkpoints_crowd_an_h200_beyond_one_wave() -> None:
    for length, heads in product((2, 8), (12, 32)):
        config = wide_config(checkpoint_dtype="bfloat16", num_heads=heads, max_query_len=length, fold_policy="ring")
        tiles = Tiles(config, gpu_table(H200))
        for rows in (1, 8, 9, 12, 13, 33, 34, 8192):
            crowded = rows * heads > 3 * 132
            wanted = VerifyTile(64, True, 3) if rows * heads <= 96 else VerifyTile(128, False, 4 if crowded else 3)
            assert tiles.verify(rows) == wanted
    for changes in ({"fold_policy": "deferred"}, {"max_query_len": 9}):
        tiles = Tiles(wide_config(checkpoint_dtype="bfloat16", **changes), gpu_table(H200))
        assert {tile.programs for tile in tiles.all_verify} <= {2, 3}


def test_folds_follow_the_rows_of_a_plan() -> None:
    tiles = Tiles(wide_config(), gpu_table(H200))
    assert [tiles.fold(rows) for rows in (1, 16, 17, 512)] == [64, 64, 128, 128]
    assert tiles.all_folds == (64, 128)
    for narrow in (wide_config(head_v_dim=192), wide_config(record_capacity=33)):
        tiles = Tiles(narrow, gpu_table(H200))
        assert ([tiles.fold(rows) for rows in (1, 512)], tiles.all_folds) == ([64, 64], (64,))


@pytest.mark.parametrize("table", [gpu_table(H200), default_table()], ids=["H200", "default"])
def test_portable_tiles_hold_64_x_128_values(table: TileTable) -> None:
    for k_dim, v_dim in product((16, 100, 128), (16, 128, 256)):
        assert Tiles(wide_config(head_k_dim=k_dim, head_v_dim=v_dim), table).portable == PortableTile(64, 4)
    assert Tiles(wide_config(head_k_dim=129), table).portable == PortableTile(32, 4)


def test_rules_that_lack_something_leave_it_to_the_default() -> None:
    rule = {"block_v": 32, "at_once": True, "programs": 4}
    table = TileTable.model_validate_json(
        json.dumps(EMPTY | {"verify": [rule | {"checkpoint_dtype": "bfloat16", "most_row_heads": 24}]})
    )
    narrow = Tiles(wide_config(checkpoint_dtype="bfloat16"), table)
    assert narrow.verify(2) == VerifyTile(32, True, 4)
    assert narrow.verify(3) == VerifyTile(64, True, 3)
    assert Tiles(wide_config(), table).verify(1) == VerifyTile(64, True, 3)
    assert narrow.fold(17) == 128


def test_the_table_of_a_gpu_and_that_of_any_other() -> None:
    table = gpu_table(H200)
    assert (table.gpu, table.date, table.title) == (H200, "2026-12-01", "NVIDIA H200, 2026-12-01")
    assert gpu_table("NVIDIA H100 80GB HBM3") is gpu_table("../tiles") is default_table()
    assert device_table(torch.device("cpu")) is default_table()


def test_measured_choices_are_the_fastest_that_were_tried() -> None:
    timed = [rule for rule in gpu_table(H200).verify if rule.timings]
    assert timed
    for rule in timed:
        for rows in {timing.rows for timing in rule.timings}:
            assert rule.allows(rows * 12)
            tried = {(each.block_v, each.at_once, each.programs): each.us for each in rule.timings if each.rows == rows}
            assert tried[rule.block_v, rule.at_once, rule.programs] == min(tried.values())


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("no json", "Invalid JSON"),
        (json.dumps({"gpu": "x", "date": "y"}), "versions is missing"),
        (json.dumps(EMPTY | {"more": 1}), "more = 1: "),
        (json.dumps(EMPTY | {"portable": [{"block_v": 48, "num_warps": 4}]}), "portable.0.block_v = 48: "),
        (json.dumps(EMPTY | {"fold": [{"block_v": 64, "most_rows": 0}]}), "fold.0.most_rows = 0: "),
        (
            json.dumps(EMPTY | {"verify": [{"block_v": 64, "at_once": 1, "programs": 3}]}),
            "verify.0.at_once = 1: ",
        ),
        (
            json.dumps(EMPTY | {"verify": [{"block_v": 128, "at_once": True, "programs": 3, "head_v_dim": 192}]}),
            "block_v = 128 must divide head_v_dim = 192",
        ),
    ],
)
def test_a_bad_table_is_refused(text: str, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "tiles.json"
    path.write_text(text)
    with pytest.raises(SpecStateError) as refused:
        load_table(path)
    assert str(refused.value).startswith(f"{path} holds no table of tiles: ")
    assert says in str(refused.value)
    monkeypatch.setenv("SPECSTATE_TILES", str(path))
    with pytest.raises(SpecStateError, match=r"SPECSTATE_TILES = .*holds no table of tiles"):
        device_table(torch.device("cpu"))


def test_a_file_is_read_when_a_manager_is_built(tmp_path: Path, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPECSTATE_TILES", str(tmp_path / "none.json"))
    config = small_config(path="portable")
    with pytest.raises(SpecStateError, match=r"SPECSTATE_TILES = .*cannot read tiles from '.*none.json'"):
        make_manager(config, device, backend="triton")
    rule = {"block_v": 16, "num_warps": 8}
    monkeypatch.setenv("SPECSTATE_TILES", str(written(tmp_path, portable=[rule])))
    kernels = make_manager(config, device, backend="triton")._backend.kernels  # type: ignore[union-attr]
    assert kernels._tiles.portable == PortableTile(16, 8)  # type: ignore[attr-defined]


# -- bits


def bytes_of_steps(manager: StateManager, device: str) -> list[bytes]:
    """Outputs of some steps of three requests, and the checkpoints after a flush."""
    config = manager.config
    handles = tuple(manager.admit(name) for name in "abc")
    seen = []
    windows = [((8, 8, 3), (8, 2, 1)), ((8, 5, 8), (8, 5, 7)), ((1, 8, 8), (1, 3, 8)), ((8, 8, 8), (8, 1, 5))]
    for index, (lens, counts) in enumerate(windows):
        step = manager.begin_step(StepMetadata(handles=handles, query_lens=lens))
        outputs = verify_all(step, make_inputs(config, sum(lens), seed=index, device=device))
        step.defer(torch.tensor(counts, device=device))
        seen += map(raw_bytes, outputs)
    manager.flush()
    slots = manager.checkpoint_slots(handles).tolist()
    views = [view for layer in range(config.num_layers) for view in manager.checkpoints(layer)]
    return seen + [raw_bytes(view[slot]) for slot in slots for view in views if view is not None]


@pytest.mark.hopper
@pytest.mark.parametrize("bound", [None, -5.0], ids=["softplus gate", "bounded gate"])
@pytest.mark.parametrize(
    ("policy", "checkpoint", "tiles"),
    [
        ("ring", "float32", [(64, True, 3), (128, False, 3), (32, True, 4), (128, False, 4), (128, True, 2)]),
        ("ring", "bfloat16", [(64, True, 3), (128, False, 3), (128, False, 4)]),
        ("deferred", "bfloat16", [(64, True, 3), (128, False, 3), (128, False, 4)]),
        ("deferred", "float32", [(128, False, 3), (128, False, 4)]),
    ],
)
def test_bits_do_not_depend_on_the_tile(
    policy: str,
    checkpoint: str,
    tiles: list[tuple[int, bool, int]],
    bound: float | None,
    tmp_path: Path,
    device: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config = small_config(
        path="hopper",
        fold_policy=policy,
        checkpoint_dtype=checkpoint,
        activation_dtype="bfloat16",
        conv_kernel_size=4,
        num_layers=2,
        num_heads=12,
        head_k_dim=128,
        head_v_dim=128,
        max_query_len=8,
        gate_lower_bound=bound,
    )
    seen = {}
    for block_v, at_once, programs in tiles:
        rules = [{"block_v": block_v, "at_once": at_once, "programs": programs}]
        path = written(tmp_path, verify=rules, fold=[{"block_v": max(block_v, 64)}])
        monkeypatch.setenv("SPECSTATE_TILES", str(path))
        manager = make_manager(config, device, backend="triton", debug=False)
        seen[block_v, at_once, programs] = bytes_of_steps(manager, device)
    wanted = seen[tiles[0]]
    assert [tile for tile, held in seen.items() if held != wanted] == []
