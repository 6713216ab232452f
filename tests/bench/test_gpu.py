"""``specstate bench gpu`` where there is no GPU: floors by hand, tables and JSON of made-up figures, its errors, and a
run of the measuring code under the interpreter, call by call in place of graphs."""

import json
import math
import os
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from specstate import KDALayerSpec, SpecStateError
from specstate.bench import gpu, traffic
from specstate.bench.floor import ITEMS, Rings, step_bytes
from specstate.bench.gpu import Bench, OutOfTime, load_results, measure_gpu
from specstate.bench.peer import MISSING
from specstate.bench.precompile import Job, fewest_rows, precompile
from specstate.bench.precompile import main as compile_all
from specstate.bench.ratios import Measured, build_report
from specstate.bench.results import BenchReport, h200_results
from specstate.bench.s0 import PeerTimes, S0Time, num_layers
from specstate.bench.shapes import SHAPES, BenchShape, find_shape
from specstate.bench.timer import HostTimer, Machine
from specstate.bench.traffic import Traffic, kernels_of
from specstate.bench.workload import Timed, Workload, draw_accepted, enough_steps, turns
from specstate.cli import CHECK_FAILED, main
from specstate.config import StateConfig
from specstate.kernels.tile_table import gpu_table
from tests.factories import POLICIES, make_config

SPEC = KDALayerSpec(num_heads=1, head_k_dim=16, head_v_dim=16, gate_lower_bound=-5.0)
#: float32 activations: the interpreter truncates what fla stores in bfloat16.
TINY = BenchShape("tiny", SPEC, num_layers=2, rows=1, max_query_len=2, activation_dtype="float32")
SMALL = replace(TINY, rows=2, activation_dtype="bfloat16")


class FakeTimer(HostTimer):
    """Every step takes a millisecond more than the one before."""

    def stop(self) -> None:
        self._times.append(1.0 + len(self._times))


def on_cpu(l2_bytes: int = 1, free_bytes: int = 2**30) -> Machine:
    return Machine(torch.device("cpu"), "no GPU", l2_bytes, False, FakeTimer, lambda: free_bytes)


# -- floors

#: L = 2, B = 2, T = 2, n = 4. State 16 * 16 * 4 = 1024; record 4 * 16 + 2 * 16 * 2 + 4 = 132; C a = 48 * 2 = 96.
ALIKE = {
    "records_written": 2 * 4 * 132,
    "conv_ring_written": 2 * 4 * 96,
    "inputs": 2 * 4 * (48 + 16 + 1) * 2,
    "outputs": 2 * 4 * 16 * 2,
    "parameters": 2 * (1 + 16 + 48 * 4) * 4,
    "control": 4 * (2 * (2 * 9 + 4 * 6 + 2 * 12 + 2 * 7 + 2) + 2 * 3 + 4),
}


@pytest.mark.parametrize(
    ("policy", "pending", "folded", "wanted"),
    [
        ("eager", [0, 0], [2, 1], (8192, 4096, 792, 2304, 1152)),
        ("deferred", [2, 0], [0, 0], (4096, 2048, 528, 1152, 576)),
        ("ring", [5, 6], [0, 8], (6144, 2048, 5016, 1728, 576)),
        ("ring", [1, 2], [0, 0], (4096, 0, 792, 1152, 0)),
    ],
)
def test_floors_by_hand(policy: Any, pending: list[int], folded: list[int], wanted: tuple[int, ...]) -> None:
    names = ("state_read", "state_written", "records_read", "conv_ring_read", "conv_history_written")
    table = step_bytes(SMALL.config(policy), pending, folded)
    assert tuple(table) == ITEMS
    assert table == ALIKE | dict(zip(names, wanted, strict=True))
    bare = step_bytes(SMALL.config(policy, conv=False), pending, folded)
    changed = {name: 0 for name in ITEMS if name.startswith("conv")} | {"parameters": 2 * (1 + 16) * 4}
    assert bare == table | changed


def test_floor_of_narrow_states() -> None:
    wide, narrow = (
        step_bytes(replace(SMALL, checkpoint_dtype=dtype).config("deferred"), [1, 1], [0, 0])
        for dtype in ("float32", "bfloat16")
    )
    halved = {"state_read": 2 * 2 * 512, "state_written": 2 * 2 * 512}
    assert narrow == wide | halved


def test_rings_fold_as_the_contract_says() -> None:
    def rings(policy: str) -> Rings:
        return Rings(make_config(fold_policy=policy, max_query_len=4), rows=2)  # R = 4, 8, 16

    eager, deferred, ring = map(rings, POLICIES)
    assert [eager.step([4, 1]), eager.step([2, 0])] == [([0, 0], [4, 1]), ([0, 0], [2, 0])]
    assert (eager.folds, eager.committed) == (3, [6, 1])
    assert [deferred.step([4, 1]), deferred.step([2, 2])] == [([0, 0], [0, 0]), ([4, 1], [0, 0])]
    assert (deferred.folds, deferred.pending, deferred.committed) == (2, [2, 2], [6, 3])
    assert [ring.step([4, 4]) for _ in range(3)] == [([0, 0], [0, 0]), ([4, 4], [0, 0]), ([8, 8], [0, 0])]
    assert ring.step([1, 0]) == ([12, 12], [13, 0])
    assert (ring.folds, ring.pending, ring.committed) == (1, [0, 12], [13, 12])


# -- what is drawn, and how much of it


def test_accepted_counts_have_the_mean_of_their_rates() -> None:
    drawn = draw_accepted(4000, 8, 8, torch.Generator().manual_seed(0))
    assert (drawn.dtype, drawn.shape) == (torch.int32, (4000, 8))
    assert (int(drawn.min()), int(drawn.max())) == (1, 8)
    assert float(drawn.double().mean()) == pytest.approx(4.04, abs=0.05)
    again = draw_accepted(4000, 8, 8, torch.Generator().manual_seed(0))
    assert torch.equal(drawn, again)
    assert torch.equal(draw_accepted(3, 2, 1, torch.Generator()), torch.ones(3, 2, dtype=torch.int32))


def test_steps_until_every_ring_was_filled_twice() -> None:
    assert enough_steps([[2, 1]] * 9, sets=1, least=2, tokens=4) == 4
    assert enough_steps([[2, 1]] * 9, sets=2, least=2, tokens=4) == 8
    assert enough_steps([[4, 4]] * 9, sets=1, least=5, tokens=4) == 5
    assert enough_steps([[1]] * 4, sets=1, least=1, tokens=4) == 4
    with pytest.raises(SpecStateError, match="3 steps do not commit 4 tokens"):
        enough_steps([[1]] * 3, sets=1, least=1, tokens=4)


def test_sets_take_turns_until_the_l2_is_passed() -> None:
    l2_bytes = 60 * 2**20
    for name, sets in (("k3-1", 5), ("k3-8", 1), ("k3-1-bf16", 10), ("kimi-linear-1", 6), ("k3-256", 1)):
        shape = SHAPES[name]
        assert turns(shape.num_layers * shape.rows * shape.state_bytes, l2_bytes) == sets, name


def test_shapes() -> None:
    assert len(SHAPES) == 20
    k3, linear = find_shape("k3-8"), find_shape("kimi-linear-32-bf16")
    assert (k3.num_layers, k3.rows, k3.max_query_len, k3.spec.num_heads) == (69, 8, 8, 12)
    assert (k3.checkpoint_dtype, k3.activation_dtype, k3.state_bytes) == ("float32", "bfloat16", 12 * 128 * 128 * 4)
    assert k3.config("ring").record_capacity == 32
    assert (linear.num_layers, linear.max_query_len, linear.spec.num_heads) == (20, 4, 32)
    assert (linear.checkpoint_dtype, linear.spec.gate_lower_bound) == ("bfloat16", None)
    assert {SHAPES[f"k3-32-t{window}"].max_query_len for window in (2, 4)} == {2, 4}


class Span(NamedTuple):
    us: float

    def elapsed_us(self) -> float:
        return self.us


class DeviceType(NamedTuple):
    name: str


class Event(NamedTuple):
    name: str
    time_range: Span
    device_type: DeviceType = DeviceType("CUDA")
    is_user_annotation: bool = False


def test_kernels_of_a_profile() -> None:
    events = [
        Event("verify_kernel", Span(30.0)),
        Event("verify_kernel", Span(10.0)),
        Event("void other_kernel<float, 4>(int)", Span(6.0)),
        Event("void at::native::index(int)", Span(2.0)),
        Event("void at::native::clamp(int)", Span(4.0)),
        Event("Memcpy HtoD (Pinned -> Device)", Span(99.0)),
        Event("specstate::begin_step", Span(99.0)),
        Event("range", Span(99.0), is_user_annotation=True),
        Event("cudaGraphLaunch", Span(99.0), DeviceType("CPU")),
    ]
    kernels = kernels_of(events, 2)
    assert kernels.ms == pytest.approx({"verify": 0.02, "other": 0.003, "torch": 0.003})
    assert kernels.launches == {"verify": 1.0, "other": 0.5, "torch": 1.0}


# -- reports of made-up figures


def made_up(**changes: Any) -> Measured:
    table = dict.fromkeys(ITEMS, 1000)
    whole = Timed([3.0, 1.0, 2.0], [table, table | {"state_read": 4000}, table | {"state_read": 2000}], 4.0, 0.5)
    bare = Timed([1.0, 1.0], [table, table], 4.0, 0.5)
    measured = Measured(
        SMALL, "ring", whole, bare, Traffic(2_000_000, 0.5, 0.9), 2, 6.0, 1, 1e-4, {"verify": 1.25, "fold": 0.5}
    )
    return replace(measured, **changes)


def test_ratios() -> None:
    (result,) = build_report([made_up()], "NVIDIA H200", []).results
    assert (result.ms, result.mean_ms, result.floor_bytes) == (2.0, 2.0, 12_000)
    assert result.floor_table["state_read"] == 2000
    assert result.mean_floor_bytes == pytest.approx(37_000 / 3)
    assert result.floor_ms == pytest.approx(12_000 / 4.3e12 * 1e3)
    assert result.ratio_to_floor == pytest.approx(2.0 / result.floor_ms)
    assert (result.s0_ms, result.ratio_to_s0, result.without_conv.ratio_to_s0) == (6.0, 3.0, 6.0)
    assert result.without_conv.floor_ms == pytest.approx(11_000 / 4.3e12 * 1e3)
    assert result.shape.model_dump(include={"num_heads", "layers", "rows", "max_query_len", "checkpoint_dtype"}) == {
        "num_heads": 1,
        "layers": 2,
        "rows": 2,
        "max_query_len": 2,
        "checkpoint_dtype": "float32",
    }


def test_another_gpu_is_held_against_its_best_read() -> None:
    slow = made_up(traffic=Traffic(2_000_000, 1.0, 2.0))
    report = build_report([slow, made_up()], "Some GPU", [])
    assert report.floor_bytes_per_s == pytest.approx(2_000_000 / 0.5e-3)
    with pytest.raises(SpecStateError, match="nothing was measured: it broke"):
        build_report([], "Some GPU", ["it broke"])


def test_tables() -> None:
    without = made_up(policy="eager", s0_ms=None, s0_layers=None, output_error=None, kernel_ms={"verify": 2.0})
    text = build_report([made_up(), without], "NVIDIA H200", [MISSING]).to_text()
    lines = text.splitlines()
    assert lines[0].startswith("NVIDIA H200; specstate ")
    head = next(i for i, line in enumerate(lines) if line.startswith("shape"))
    assert lines[head].split()[-4:] == ["/", "floor", "x", "S0"]
    ring, bare, eager, _ = (line.split() for line in lines[head + 1 : head + 5])
    assert ring[:7] == ["tiny", "ring", "8", "2", "yes", "2.000", "2.000"]
    assert ring[-4:-2] == ["6.000", "(1)"] and ring[-1] == "3.00"
    assert bare[4:7] == ["no", "1.000", "1.000"] and bare[-1] == "6.00"
    assert eager[-1] == "-" and eager[-3] == "-"
    assert any(line.split() == ["tiny", "ring", "1.250", "0.500"] for line in lines)
    assert any(line.split() == ["tiny", "eager", "2.000", "-"] for line in lines)
    assert lines[-1] == MISSING


def test_json_comes_back(tmp_path: Path) -> None:
    report = build_report([made_up(), made_up(output_error=math.inf)], "NVIDIA H200", ["a note"], "0.6.0")
    assert [result.outputs_match for result in report.results] == [True, False]
    path = tmp_path / "results.json"
    path.write_text(json.dumps(report.to_json()))
    assert load_results(path) == report
    first = json.loads(path.read_text())["results"][0]
    keys = {"shape", "policy", "ms", "kernel_ms", "floor_bytes", "floor_ms", "ratio_to_floor", "s0_ms", "ratio_to_s0"}
    assert keys <= set(first)
    assert set(first["without_conv"]) >= keys - {"shape", "policy", "kernel_ms"}
    assert report.versions["fla-core"] == "0.6.0"


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda data: data.pop("gpu"), r"gpu = .*: Field required"),
        (lambda data: data["results"][0].update(ms=-1.0), r"results\.0\.ms = -1\.0: .*greater than 0"),
        (lambda data: data["results"][0].update(policy="lazy"), r"results\.0\.policy = 'lazy'"),
        (lambda data: data["results"][0]["shape"].update(rows="8", more=1), r"results\.0\.shape\.rows = '8'.* 1 more"),
    ],
)
def test_load_results_names_what_is_wrong(change: Any, says: str, tmp_path: Path) -> None:
    data = build_report([made_up()], "NVIDIA H200", []).to_json()
    change(data)
    path = tmp_path / "results.json"
    path.write_text(json.dumps(data))
    with pytest.raises(SpecStateError, match=rf"results\.json holds no results of bench gpu: {says}"):
        load_results(path)


def test_load_results_needs_a_file_of_json(tmp_path: Path) -> None:
    with pytest.raises(SpecStateError, match=r"cannot read results from .*absent\.json"):
        load_results(tmp_path / "absent.json")
    (tmp_path / "text.json").write_text("no { json")
    with pytest.raises(SpecStateError, match="Invalid JSON"):
        load_results(tmp_path / "text.json")
    (tmp_path / "bytes.json").write_bytes(b"\xff\xfe\xff")
    with pytest.raises(SpecStateError, match="cannot read results"):
        load_results(tmp_path / "bytes.json")


# -- the command line


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        ("--shapes k4-8", "shape 'k4-8' is unknown: choose from k3-1, k3-8"),
        ("--shapes", "--shapes: expected at least one"),
        ("--policies lazy", "invalid choice: 'lazy'"),
        ("--replays 0", "--replays: 0 is outside 1.."),
        ("--layers none", "'none' is not a whole number"),
        ("--budget 0", "--budget: 0 is outside 1.."),
        ("--json --shapes k3-8", "needs a GPU: torch sees none"),
    ],
)
def test_refuses(argv: str, says: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main(["bench", "gpu", *argv.split()]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1
    assert captured.err.startswith("specstate bench gpu: ")
    assert says in captured.err


def test_the_command_prints_a_report(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    error: float | None = None

    def measure(shapes: Any, policies: Any, replays: int, budget_s: float, say: Any) -> BenchReport:
        say("a line of progress")
        assert ([shape.num_layers for shape in shapes], policies, replays) == ([3, 3], ("ring",), 10)
        return build_report([made_up(output_error=error)], "NVIDIA H200", [])

    monkeypatch.setattr(gpu, "measure_gpu", measure)
    argv = "bench gpu --shapes k3-8 k3-1 k3-8 --policies ring ring --replays 10 --layers 3 --json".split()
    for outcome, code in ((1e-5, 0), (None, 0), (1.0, CHECK_FAILED)):
        error = outcome
        assert main(argv) == code
        captured = capsys.readouterr()
        assert captured.err == "a line of progress\n"
        assert len(json.loads(captured.out)["results"]) == 1
    assert main(argv[:-1]) == CHECK_FAILED
    assert capsys.readouterr().out.startswith("NVIDIA H200; ")


# -- measuring, without graphs


needs_interpreter = pytest.mark.skipif(torch.cuda.is_available(), reason="Triton is not interpreted where a GPU is")


@pytest.fixture(scope="module")
def said() -> list[str]:
    return []


@pytest.fixture(scope="module")
def report(said: list[str]) -> BenchReport:
    # One set of requests under "ring": a step's states are above four times this L2.
    return measure_gpu([TINY], ["ring"], 2, 600.0, said.append, on_cpu())


@needs_interpreter
def test_a_run(report: BenchReport, said: list[str]) -> None:
    (result,) = report.results
    assert (result.shape.name, result.policy, result.shape.layers, result.sets) == ("tiny", "ring", 2, 1)
    assert (result.state_bytes, result.read_ms, result.copy_ms) == (2 * 1024, 10.5, 10.5)
    assert (result.record_capacity, result.kernel_ms, result.kernel_launches) == (8, {}, {})
    assert result.path == "portable"
    assert result.host_us_per_layer is not None and result.host_us_per_layer > 0.0
    assert (result.s0_fp32_ms, result.ratio_to_s0_fp32) == (None, None)
    assert report.versions["tiles"] == "NVIDIA H200, 2026-12-01"
    # Each step of the fake clock takes one more millisecond; the ring of 8 was filled twice by windows of 2.
    assert result.replays >= 8
    assert result.ms == result.mean_ms == (result.replays + 1) / 2
    assert result.mean_accepted * result.replays >= 16
    assert 0 < result.folds_per_step < 0.5
    assert result.floor_table["state_read"] in (2048, 4096)
    assert "time budget 600 s" in said[0]
    assert any("tiny ring, 2 layers" in line for line in said)


@needs_interpreter
def test_outputs_of_a_run_are_those_of_fla(report: BenchReport) -> None:
    pytest.importorskip("fla", reason="fla-core is not installed")
    (result,) = report.results
    assert report.notes == ()
    assert result.outputs_match
    assert result.output_error is not None and result.output_error < 1e-6
    # Three steps warm S0 up; its median of sets * 2 steps, or of the replays asked for.
    assert (result.s0_ms, result.s0_layers) == (1.5, 2)


@needs_interpreter
def test_sets_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    shape = replace(TINY, num_layers=1, max_query_len=1)
    workload = Workload(on_cpu(), shape.config("eager", conv=False, sets=2), sets=2)
    turns_taken = []
    replay = workload.replay

    def watched(turn: int, *args: Any) -> None:
        turns_taken.append(turn)
        replay(turn, *args)

    monkeypatch.setattr(workload, "replay", watched)
    timed = workload.measure(3)
    assert turns_taken == [0, 1, 0, 1]
    assert timed.times_ms == [1.0, 2.0, 3.0, 4.0]
    assert (timed.num_accepted, timed.folds_per_step) == (1.0, 1.0)
    first, second = (workload.states(turn)[0] for turn in range(2))
    assert first.data_ptr() != second.data_ptr() and first.any() and second.any()
    assert traffic.profile_kernels(workload) == ({}, {})
    # What the device did and the host's account does not have is found out.
    workload.step_by_hand(0, workload.counts.clone())
    with pytest.raises(SpecStateError, match=r"requests stand at \[3\], not at \[2\]"):
        workload.check()


@needs_interpreter
def test_a_ring_that_was_not_cycled_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    workload = Workload(on_cpu(), replace(TINY, num_layers=1, max_query_len=1).config("ring", conv=False), sets=1)
    monkeypatch.setattr("specstate.bench.workload.enough_steps", lambda *args: 2)
    with pytest.raises(SpecStateError, match="a ring of 4 records was not cycled twice: 2 tokens"):
        workload.measure(2)


@needs_interpreter
def test_what_is_not_measured_is_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "find_peer", lambda: (None, MISSING))
    said: list[str] = []
    small = Bench(on_cpu(free_bytes=100), 1, 60.0, said.append)
    small.run([TINY], ["ring"])
    assert small.measured == []
    assert small.notes[0] == MISSING
    assert "tiny: SpecStateError: 1 layers of" in small.notes[1] and "100 free bytes" in small.notes[1]
    late = Bench(on_cpu(), 1, -1.0, said.append)
    late.run([TINY, SMALL], ["ring"])
    assert late.notes[1] == "out of time after -1 s: not measured, or not in full: tiny, tiny"
    with pytest.raises(OutOfTime):
        late._check_time()


@needs_interpreter
def test_a_policy_that_fails_costs_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "find_peer", lambda: (None, MISSING))

    def measure(shape: BenchShape, policy: str, sets: int, known: Traffic | None) -> Measured:
        if policy == "eager":
            raise RuntimeError("no\nluck")
        assert (known is None) == (policy == "deferred")
        return made_up(policy=policy, output_error=1.0)

    bench = Bench(on_cpu(), 1, 60.0, lambda text: None)
    monkeypatch.setattr(bench, "_measure_policy", measure)
    bench.run([TINY], POLICIES)
    assert [each.policy for each in bench.measured] == ["deferred", "ring"]
    assert bench.notes[1:] == [
        "tiny eager: RuntimeError: no luck",
        *(f"tiny {policy}: outputs differ from S0's by 1.0e+00: a check failed" for policy in ("deferred", "ring")),
    ]


def test_layers_that_fit() -> None:
    shape = SHAPES["k3-256"]
    bench = Bench(on_cpu(free_bytes=140 * 2**30), 1, 60.0, print)
    assert bench._layers_that_fit(shape, POLICIES) == 69
    bench = Bench(on_cpu(free_bytes=40 * 2**30), 1, 60.0, print)
    layers = bench._layers_that_fit(shape, POLICIES)
    # 86.2 MiB a request, 51.75 once more for the copies, and what flows through.
    assert layers == pytest.approx(0.85 * 40 * 1024 / ((86.2 + 51.75 + 12) / 69 * 256), rel=0.05)


def test_few_variants_are_compiled_where_they_are_launched(monkeypatch: pytest.MonkeyPatch) -> None:
    commands = []

    class Done(NamedTuple):
        returncode: int

    def run(command: list[str], **options: Any) -> Done:
        commands.append(command)
        return Done(sum("eager" in job for job in command[3:]))

    monkeypatch.setattr("os.cpu_count", lambda: 3)
    monkeypatch.setattr("subprocess.run", run)
    shapes = [SHAPES["k3-1"], SHAPES["k3-8"]]
    table = gpu_table("NVIDIA H200")
    assert precompile([Job(shape.config("ring")) for shape in shapes], table) == 0
    assert commands == []
    jobs = [Job(shape.config(policy)) for shape in shapes for policy in POLICIES]
    assert precompile(jobs, table) == 2  # all but the one that failed
    assert len(commands) == 2  # a process for all cores but one
    given = [
        StateConfig.model_validate_json(json.dumps(json.loads(job)["config"])) for each in commands for job in each[3:]
    ]
    assert {config.fold_policy for config in given} == set(POLICIES)
    assert {(config.num_layers, config.max_requests, config.num_checkpoints) for config in given} == {(1, 1, 1)}


def test_variants_are_compiled_for_the_rows_that_run() -> None:
    table = gpu_table("NVIDIA H200")
    rows = {name: fewest_rows(SHAPES[name].config("ring"), table) for name in SHAPES}
    assert {rows[name] for name in ("k3-1", "k3-8", "kimi-linear-1")} == {1}
    # Beyond 96 rows times heads another verify, beyond 16 rows of a plan another fold.
    assert {rows[name] for name in ("k3-32", "k3-128", "k3-32-bf16", "k3-32-t4", "kimi-linear-128")} == {17}
    # Beyond 396 in bfloat16 four programs a multiprocessor.
    assert {rows[name] for name in ("k3-128-bf16", "k3-256-bf16")} == {34}
    pinned = SHAPES["k3-128"].config("ring").model_copy(update={"path": "portable"})
    assert fewest_rows(pinned, table) == 1


def test_compiling_counts_what_failed(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    seen = []

    def compile_step(config: StateConfig) -> None:
        seen.append((config.max_requests, os.environ["SPECSTATE_TILES"]))
        if config.max_requests == 2:
            raise RuntimeError("no luck")

    monkeypatch.setenv("SPECSTATE_TILES", "")
    monkeypatch.setattr("specstate.bench.precompile.compile_step", compile_step)
    configs = [replace(TINY, rows=rows).config("ring").model_dump(mode="json") for rows in (1, 2, 3)]
    jobs = [{"config": config, "tiles": tiles} for config, tiles in zip(configs, (None, "a", "b"), strict=True)]
    assert compile_all([json.dumps(job) for job in jobs]) == 1
    assert seen == [(1, ""), (2, "a"), (3, "b")]
    assert "no luck" in capsys.readouterr().err


# -- S0


def test_s0_is_timed_on_enough_layers() -> None:
    machine = on_cpu(free_bytes=140 * 2**30)
    layers = {name: num_layers(SHAPES[name], machine) for name in ("k3-1", "k3-32", "k3-128", "kimi-linear-128")}
    # At 8 GiB of snapshots: 48 MiB a layer at B = 8, 192 MiB at B = 32.
    assert layers == {"k3-1": 69, "k3-32": 42, "k3-128": 16, "kimi-linear-128": 16}
    with pytest.raises(SpecStateError, match=r"16 layers of .* do not fit"):
        num_layers(SHAPES["k3-128"], on_cpu(free_bytes=2**30))


def test_s0_of_a_shape_is_measured_once(monkeypatch: pytest.MonkeyPatch) -> None:
    measured = []

    def measure(self: PeerTimes, shape: BenchShape, forward: Any) -> S0Time | None:
        measured.append(shape.name)
        return S0Time(0.5, 1) if shape.checkpoint_dtype == "float32" else None

    monkeypatch.setattr(PeerTimes, "_measure", measure)
    times = PeerTimes(lambda **_: None, on_cpu(), 1, print)
    assert times.of(SHAPES["k3-8"]) == (34.5, 1)
    narrow = SHAPES["k3-8-bf16"]
    assert times.of(replace(narrow, checkpoint_dtype="float32", num_layers=2)) == (1.0, 1)
    assert times.of(narrow) is times.of(narrow) is None
    assert measured == ["k3-8", "k3-8-bf16"]
    assert PeerTimes(None, on_cpu(), 1, print).of(narrow) is None


def test_ratios_to_s0_in_float32() -> None:
    (result,) = build_report([made_up(s0_fp32_ms=8.0)], "NVIDIA H200", []).results
    assert (result.s0_fp32_ms, result.ratio_to_s0_fp32, result.without_conv.ratio_to_s0_fp32) == (8.0, 4.0, 8.0)


@needs_interpreter
def test_narrow_checkpoints_are_held_against_s0_in_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def of(self: PeerTimes, shape: BenchShape) -> S0Time:
        asked.append(shape.checkpoint_dtype)
        return S0Time(3.0 if shape.checkpoint_dtype == "float32" else 2.0, 1)

    monkeypatch.setattr(gpu, "find_peer", lambda: (None, MISSING))
    monkeypatch.setattr(PeerTimes, "of", of)
    bench = Bench(on_cpu(), 1, 60.0, lambda text: None)
    monkeypatch.setattr(bench, "_measure_policy", lambda shape, policy, sets, known: made_up(policy=policy))
    bench.run([replace(TINY, checkpoint_dtype="bfloat16"), TINY], ["ring"])
    assert asked == ["bfloat16", "float32", "float32"]
    assert [(each.s0_ms, each.s0_fp32_ms) for each in bench.measured] == [(2.0, 3.0), (3.0, None)]


# -- what is kept for the profiler


@needs_interpreter
def test_small_workloads_wait_for_the_profiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "find_peer", lambda: (None, MISSING))
    profiled, empty = [], []

    def profile(workload: Workload) -> traffic.Kernels:
        profiled.append(workload)
        return empty.pop() if empty else traffic.Kernels({"verify": 1.0}, {"verify": 2.0})

    monkeypatch.setattr(gpu, "profile_kernels", profile)
    monkeypatch.setattr(gpu, "precompile", lambda *_: 0)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    # What is kept does not depend on what a step does: none is run.
    monkeypatch.setattr(Workload, "step_by_hand", lambda *_, **__: None)
    monkeypatch.setattr(Workload, "verify_us", lambda *_: [1.0])
    monkeypatch.setattr(Workload, "warm", lambda self: None)
    monkeypatch.setattr(Workload, "measure", lambda *_: made_up().with_conv)
    for share, is_kept, unseen in ((1.0, True, 0), (0.0, False, 0), (1.0, True, 1)):
        monkeypatch.setattr(gpu, "KEPT_SHARE", share)
        profiled.clear()
        empty[:] = [traffic.Kernels({}, {})] * unseen
        bench = Bench(on_cpu(), 1, 60.0, lambda text: None)
        bench.run([TINY], ["ring"])
        assert (bench.measured[0].workload is not None) is is_kept
        # Were there graphs, the profiler would follow.
        held = bench.measured[0].workload
        monkeypatch.setattr(bench, "machine", replace(bench.machine, graphs=True))
        monkeypatch.setattr(Workload, "capture", lambda self: None)
        bench._profile()
        assert bench.notes == [MISSING]
        assert [workload is held for workload in profiled] == [is_kept] + [False] * unseen
        assert bench.measured[0].workload is None
        assert (bench.measured[0].kernel_ms, bench.measured[0].kernel_launches) == ({"verify": 1.0}, {"verify": 2.0})


def test_results_of_an_h200() -> None:
    if (Path(gpu.__file__).parent / "h200.json").is_file():
        assert "H200" in h200_results().gpu
    else:
        with pytest.raises(SpecStateError, match=r"specstate/bench/h200\.json is missing"):
            h200_results()
