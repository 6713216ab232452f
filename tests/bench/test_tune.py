"""``specstate bench tune`` where there is no GPU: what is tried, what is chosen of made-up times, a run under the
interpreter, and what becomes of candidates that fail."""

import json
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from specstate import SpecStateError
from specstate.bench import tune as tuning
from specstate.bench.shapes import SHAPES
from specstate.bench.tune import (
    Candidate,
    Timing,
    Tuner,
    candidates,
    filling_counts,
    in_force,
    portable_rules,
    time_verifies,
    tune,
    verify_rules,
)
from specstate.bench.workload import Workload
from specstate.cli import CHECK_FAILED, main
from specstate.kernels.tile_table import load_table
from specstate.kernels.tiles import PortableTile, Tiles, VerifyTile
from tests.bench.test_gpu import TINY, needs_interpreter, on_cpu

K3 = SHAPES["k3-8"]
SMALL, LARGE = Candidate("hopper", VerifyTile(64, True, 3)), Candidate("hopper", VerifyTile(128, False, 4))
FOUR, EIGHT = Candidate("portable", PortableTile(64, 4)), Candidate("portable", PortableTile(64, 8))


@pytest.fixture(autouse=True)
def no_variable(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.delenv("SPECSTATE_TILES", raising=False)
    yield
    assert "SPECSTATE_TILES" not in os.environ


def hopper_times(*times: tuple[int, float, float], **changes: Any) -> list[Timing]:
    """Rows, then microseconds of SMALL and of LARGE."""
    return [
        Timing(replace(K3, rows=rows, **changes), candidate, us)
        for rows, *both in times
        for candidate, us in zip((SMALL, LARGE), both, strict=True)
    ]


# -- what is tried


def test_candidates(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu = torch.device("cpu")
    portable = [("portable", (block, warps)) for block in (64, 128, 32) for warps in (4, 8)]
    assert candidates(K3, cpu) == portable
    assert candidates(TINY, cpu) == [("portable", (16, 4)), ("portable", (16, 8))]
    monkeypatch.setattr(tuning, "hopper_refusal", lambda *_: None)
    hopper = [
        ("hopper", (block, once, programs)) for block in (64, 128, 32) for once in (True, False) for programs in (3, 4)
    ]
    assert candidates(K3, cpu) == hopper + portable
    wide = replace(K3, spec=K3.spec.model_copy(update={"head_v_dim": 192}), max_query_len=9)
    tiles = [each.tile for each in candidates(wide, cpu) if each.path == "hopper"]
    assert tiles == [VerifyTile(block, once, 2) for block in (64, 32) for once in (True, False)]


def test_a_candidate_is_a_table_of_its_own(tmp_path: Path) -> None:
    path = tmp_path / "tiles.json"
    path.write_text(LARGE.table().model_dump_json())
    for policy in ("ring", "deferred"):
        assert Tiles(K3.config(policy), load_table(path)).all_verify == (LARGE.tile,)
    assert Tiles(K3.config("ring"), EIGHT.table()).portable == PortableTile(64, 8)


def test_pending_records_are_mixed_and_fit_the_ring() -> None:
    for longest, rows in ((8, 32), (4, 128), (2, 32), (1, 3), (16, 5)):
        steps = [filling_counts(rows, longest, step) for step in range(3)]
        assert all(1 <= count <= longest for counts in steps for count in counts)
        pending = [sum(counts) for counts in zip(*steps, strict=True)]
        assert max(pending) + longest <= 4 * longest
        assert len(set(pending)) > 1 or longest == 1
    assert [filling_counts(1, 8, step) for step in range(3)] == [[5], [2], [7]]


# -- what is chosen


def test_borders_lie_between_what_was_measured() -> None:
    timings = hopper_times((1, 5.0, 6.0), (8, 7.0, 8.0), (32, 20.0, 15.0), (128, 60.0, 50.0))
    small, large = verify_rules(timings)
    assert (small.head_v_dim, small.checkpoint_dtype, small.most_query_len) == (128, "float32", 8)
    assert (small.block_v, small.at_once, small.programs, small.most_row_heads) == (64, True, 3, 192)
    assert (large.block_v, large.at_once, large.programs, large.most_row_heads) == (128, False, 4, None)
    assert not any(rule.covers(K3.config("deferred")) for rule in (small, large))
    assert [(each.rows, each.us) for each in small.timings] == [(1, 5.0), (1, 6.0), (8, 7.0), (8, 8.0)]
    assert {each.rows for each in large.timings} == {32, 128}


def test_each_window_and_dtype_has_rules_of_its_own() -> None:
    timings = hopper_times((32, 2.0, 1.0), max_query_len=8) + hopper_times((32, 1.0, 2.0), max_query_len=4)
    timings += hopper_times((32, 1.0, 2.0), checkpoint_dtype="bfloat16")
    found = [(rule.checkpoint_dtype, rule.most_query_len, rule.block_v) for rule in verify_rules(timings)]
    assert found == [("bfloat16", 8, 64), ("float32", 4, 64), ("float32", 8, 128)]


def test_a_portable_tile_is_the_best_over_all_rows() -> None:
    times = {(8, FOUR): 10.0, (8, EIGHT): 9.0, (128, FOUR): 100.0, (128, EIGHT): 200.0}
    timings = [Timing(replace(K3, rows=rows), candidate, us) for (rows, candidate), us in times.items()]
    # Faster where it ran, but it did not run everywhere.
    timings.append(Timing(K3, Candidate("portable", PortableTile(128, 8)), 1.0))
    (rule,) = portable_rules(timings)
    assert (rule.block_v, rule.num_warps, rule.most_head_k_dim, rule.head_v_dim) == (64, 4, 128, 128)
    assert len(rule.timings) == 5
    assert verify_rules(timings) == () and portable_rules(hopper_times((1, 1.0, 2.0))) == ()


# -- a run


@needs_interpreter
def test_a_run_writes_a_table(tmp_path: Path) -> None:
    said: list[str] = []
    file = str(tmp_path / "tiles.json")
    report = tune([TINY], file, 600.0, said.append, on_cpu())
    # A millisecond for the first replay, one more for each that follows: 20 of 2 layers.
    assert [(each.candidate, each.us) for each in report.timings] == [
        (("portable", (16, 4)), 5250.0),
        (("portable", (16, 8)), 5250.0),
    ]
    assert report.notes == ()
    table = load_table(file)
    assert table == report.table
    assert (table.gpu, table.verify, table.fold) == ("no GPU", (), ())
    assert Tiles(TINY.config("ring"), table).portable == PortableTile(16, 4)
    assert any("tiny, portable, 16 rows of V, 4 warps: 5250.00 us a layer" in line for line in said)
    text = report.to_text()
    assert f"SPECSTATE_TILES={file}" in text and "5250.00  *" in text
    assert json.loads(json.dumps(report.to_json()))["timings"][0]["us"] == 5250.0


@needs_interpreter
def test_nothing_moves_while_verifies_are_timed() -> None:
    workload = Workload(on_cpu(), TINY.config("ring"), sets=1)
    workload.step_by_hand(0, torch.tensor([2], dtype=torch.int32))
    workload.note(0, [2])
    outputs = []
    for _ in range(2):
        workload.replay_verifies(0, workload.machine.make_timer())
        outputs.append(workload.outputs[-1].clone())
    workload.check()
    assert torch.equal(*outputs) and outputs[0].any()


@needs_interpreter
def test_the_path_that_ran_is_the_one_that_is_meant(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuning, "_config", lambda shape, path, layers, sets: TINY.config("ring"))
    with pytest.raises(SpecStateError, match="path 'portable' ran"):
        time_verifies(on_cpu(), TINY, "hopper")


def test_what_fails_costs_its_candidate_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def time(machine: Any, shape: Any, path: str) -> tuple[float, torch.Tensor]:
        tile = Tiles(shape.config("ring"), load_table(os.environ["SPECSTATE_TILES"])).portable
        if tile == (64, 8):
            raise RuntimeError("out of\nresource")
        return float(tile.num_warps), torch.full((2,), 2.0 if tile == (128, 4) else 1.0)

    monkeypatch.setattr(tuning, "time_verifies", time)
    said: list[str] = []
    tuner = Tuner(on_cpu(), 60.0, said.append)
    tuner.run([K3], tmp_path)
    assert [each.candidate.tile for each in tuner.timings] == [(64, 4), (128, 8), (32, 4), (32, 8)]
    assert tuner.notes == [
        "k3-8, portable, 64 rows of V, 8 warps: RuntimeError: out of resource",
        "k3-8, portable, 128 rows of V, 4 warps: SpecStateError: outputs differ from the first tile's by 1.0e+00",
    ]


def test_a_lost_device_and_a_spent_budget_end_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def time(*_: Any) -> tuple[float, torch.Tensor]:
        raise RuntimeError("illegal memory access")

    monkeypatch.setattr(tuning, "time_verifies", time)
    monkeypatch.setattr(Tuner, "_device_is_well", lambda self: False)
    tuner = Tuner(on_cpu(), 60.0, lambda text: None)
    tuner.run([K3], tmp_path)
    assert len(tuner.notes) == 2
    assert tuner.notes[1] == "the device does not answer any more: 5 candidates not measured"
    late = Tuner(on_cpu(), -1.0, lambda text: None)
    late.run([K3], tmp_path)
    assert late.notes == ["out of time after -1 s: 6 candidates not measured"]


def test_the_variable_is_put_back(monkeypatch: pytest.MonkeyPatch) -> None:
    with in_force("a"):
        with pytest.raises(RuntimeError, match="no luck"), in_force("b"):
            raise RuntimeError("no luck")
        assert os.environ["SPECSTATE_TILES"] == "a"


# -- the command line


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(tuning.Machine, "gpu", lambda: on_cpu())
    times = {"portable": 1.0}
    monkeypatch.setattr(tuning, "time_verifies", lambda machine, shape, path: (times[path], torch.ones(2)))
    file = tmp_path / "tiles.json"
    argv = ["bench", "tune", "--shapes", "k3-8", "--output", str(file), "--json"]
    assert main(argv) == 0
    captured = capsys.readouterr()
    assert json.loads(captured.out)["file"] == str(file)
    assert "us a layer" in captured.err
    assert load_table(file).portable[0].num_warps == 4
    file.unlink()
    times.clear()
    assert main(argv) == CHECK_FAILED
    assert not file.exists()


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        ("", "needs a GPU: torch sees none"),
        ("--shapes k4-8", "shape 'k4-8' is unknown"),
        ("--budget 0", "--budget: 0 is outside 1.."),
    ],
)
def test_refuses(argv: str, says: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main(["bench", "tune", *argv.split()]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1 and says in captured.err


def test_an_output_without_a_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SpecStateError, match="its folder is not there"):
        tune([K3], str(tmp_path / "none" / "tiles.json"), 1.0, print, on_cpu())
