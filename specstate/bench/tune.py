"""``specstate bench tune``: measures the tiles of the kernels on this GPU, and writes a table of the best.

Each candidate runs in a manager of its own that reads it from a file, as a user's does: the verifies of some layers
under a CUDA graph, over a fixed mix of pending records, sets of requests in turn so that no state is in the L2. The
portable kernels get one tile for all rows, the best of all shapes of a head; the Hopper verify one by rows times heads,
for policies that do not fold in it. Blocks of the fold, and "deferred", are not measured: the table leaves them to the
default. What fails costs its candidate alone.
"""

import gc
import json
import math
import os
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from itertools import product
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any, NamedTuple

import torch

from specstate.bench.precompile import Job, precompile
from specstate.bench.ratios import versions
from specstate.bench.shapes import BenchShape
from specstate.bench.timer import Machine
from specstate.bench.workload import Workload, turns
from specstate.config import StateConfig
from specstate.errors import SpecStateError, shown
from specstate.kernels.hopper_constants import share
from specstate.kernels.supported import hopper_refusal
from specstate.kernels.tile_table import (
    VARIABLE,
    PortableRule,
    PortableTiming,
    TileTable,
    VerifyRule,
    VerifyTiming,
    default_table,
)
from specstate.kernels.tiles import PortableTile, VerifyTile
from specstate.storage import Storage
from specstate.tables import aligned

#: Layers whose verifies follow one another, fewer where they do not fit.
LAYERS = 16
REPLAYS = 20
#: Steps by hand that leave records pending, one to a full window each: what a ring of four windows holds unfolded.
FILLING_STEPS = 3

#: The first is the default, whose outputs the others' are held against.
BLOCKS = (64, 128, 32)
WARPS = (4, 8)

#: Relative difference of outputs of portable tiles, which may add in another order; those of Hopper tiles are equal.
TOLERANCE = 1e-3


class Candidate(NamedTuple):
    """One tile of one set of kernels."""

    path: str
    tile: VerifyTile | PortableTile

    @property
    def label(self) -> str:
        if isinstance(self.tile, PortableTile):
            how = f"{self.tile.num_warps} warps"
        else:
            how = f"{'at once' if self.tile.at_once else 'in chunks'}, {self.tile.programs} programs"
        return f"{self.path}, {self.tile.block_v} rows of V, {how}"

    def table(self) -> TileTable:
        """With this tile for everything."""
        verify: tuple[VerifyRule, ...] = ()
        portable: tuple[PortableRule, ...] = ()
        if isinstance(self.tile, PortableTile):
            portable = (PortableRule.model_validate(self.tile._asdict()),)
        else:
            verify = (VerifyRule.model_validate(self.tile._asdict()),)
        return TileTable(gpu="", date="", versions={}, verify=verify, portable=portable)


@dataclass(frozen=True, slots=True)
class Timing:
    """What one candidate took on one shape."""

    shape: BenchShape
    candidate: Candidate
    us: float
    """A layer, its conv included: median of the replays."""

    @property
    def row_heads(self) -> int:
        return self.shape.rows * self.shape.spec.num_heads


@dataclass(frozen=True, slots=True)
class TuneReport:
    """What was measured, and the table that was written."""

    table: TileTable
    file: str
    timings: tuple[Timing, ...]
    notes: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        """One JSON object: the file, the table in it, every timing, what failed."""
        timings = [
            {"shape": each.shape.name, "path": each.candidate.path, **each.candidate.tile._asdict(), "us": each.us}
            for each in self.timings
        ]
        table = self.table.model_dump(mode="json", exclude_none=True)
        return {"file": self.file, "table": table, "timings": timings, "notes": list(self.notes)}

    def to_text(self) -> str:
        """The same for a person; the fastest of a shape and path has a star."""
        best: dict[tuple[str, str], float] = {}
        for each in self.timings:
            key = each.shape.name, each.candidate.path
            best[key] = min(each.us, best.get(key, math.inf))
        rows = [["shape", "tile", "rows x heads", "us a layer", ""]]
        for each in self.timings:
            star = "*" if each.us == best[each.shape.name, each.candidate.path] else ""
            rows.append([each.shape.name, each.candidate.label, str(each.row_heads), f"{each.us:.2f}", star])
        written = f"written to {self.file}: SPECSTATE_TILES={self.file} puts it in force"
        return "\n".join([self.table.title, "", *aligned(rows, 2), "", *self.notes, written])


def tune(
    shapes: Sequence[BenchShape],
    output: str,
    budget_s: float,
    say: Callable[[str], None],
    machine: Machine | None = None,
) -> TuneReport:
    """Measures the candidates on ``shapes`` and writes the table to ``output``, also when only a part was measured.

    Raises SpecStateError without a GPU, and for an output that cannot be written.
    """
    if machine is None:
        if not torch.cuda.is_available():
            raise SpecStateError("needs a GPU: torch sees none")
        machine = Machine.gpu()
    if not Path(output).absolute().parent.is_dir():
        raise SpecStateError(f"cannot write tiles to {shown(output)}: its folder is not there")
    tuner = Tuner(machine, budget_s, say)
    with tempfile.TemporaryDirectory() as folder:
        tuner.run(shapes, Path(folder))
    table = TileTable(
        gpu=machine.name,
        date=datetime.now(UTC).date().isoformat(),
        versions={name: text for name, text in versions(None).items() if text != "missing"},
        notes=(
            f"timings: microseconds a layer with its conv, {LAYERS} layers in a CUDA graph, records pending; medians",
            *tuner.notes,
        ),
        verify=verify_rules(tuner.timings),
        portable=portable_rules(tuner.timings),
    )
    if tuner.timings:
        try:
            Path(output).write_text(json.dumps(table.model_dump(mode="json", exclude_defaults=True), indent=1) + "\n")
        except OSError as error:
            raise SpecStateError(f"cannot write tiles to {shown(output)}: {error}") from error
    return TuneReport(table, output, tuple(tuner.timings), tuple(tuner.notes))


class Tuner:
    """One run on one machine, within ``budget_s`` seconds; ``say`` gets a line for whatever is done."""

    def __init__(self, machine: Machine, budget_s: float, say: Callable[[str], None]) -> None:
        self._machine, self._budget_s, self._say = machine, budget_s, say
        self._start = perf_counter()
        self.timings: list[Timing] = []
        self.notes: list[str] = []

    def run(self, shapes: Sequence[BenchShape], folder: Path) -> None:
        """Every candidate on every shape; ``folder`` takes the files that managers read them from."""
        work = [(shape, each) for shape in shapes for each in candidates(shape, self._machine.device)]
        tried = dict.fromkeys(candidate for _, candidate in work)
        files = {candidate: str(folder / f"{place}.json") for place, candidate in enumerate(tried)}
        for candidate, file in files.items():
            Path(file).write_text(candidate.table().model_dump_json())
        if self._machine.graphs:
            jobs = [Job(_config(replace(s, rows=1), c.path, 1, 1), files[c]) for s, c in work]
            done = precompile(jobs, default_table(), min(120.0, self._budget_s / 2))
            self._tell(f"{done} variants compiled ahead")
        wanted: dict[tuple[BenchShape, str], torch.Tensor] = {}
        for place, (shape, candidate) in enumerate(work):
            if perf_counter() - self._start > self._budget_s:
                self._note(f"out of time after {self._budget_s:.0f} s: {len(work) - place} candidates not measured")
                break
            name = f"{shape.name}, {candidate.label}"
            try:
                with in_force(files[candidate]):
                    us, outputs = time_verifies(self._machine, shape, candidate.path)
                error = _difference(outputs, wanted.setdefault((shape, candidate.path), outputs))
                if not error <= (0.0 if candidate.path == "hopper" else TOLERANCE):
                    raise SpecStateError(f"outputs differ from the first tile's by {error:.1e}")
                self.timings.append(Timing(shape, candidate, us))
                self._tell(f"{name}: {us:.2f} us a layer")
            except Exception as error:  # whatever it is, it costs this candidate alone
                self._note(f"{name}: {type(error).__name__}: {' '.join(str(error).split())[:300]}")
                if not self._device_is_well():
                    self._note(f"the device does not answer any more: {len(work) - place - 1} candidates not measured")
                    break
            gc.collect()

    def _device_is_well(self) -> bool:
        try:
            self._machine.wait()
            torch.zeros(1, device=self._machine.device).item()
        except Exception:
            return False
        return True

    def _tell(self, text: str) -> None:
        self._say(f"[{perf_counter() - self._start:6.1f} s] {text}")

    def _note(self, text: str) -> None:
        self.notes.append(text)
        self._tell(text)


def candidates(shape: BenchShape, device: torch.device) -> list[Candidate]:
    """Tiles worth a try for ``shape`` on ``device``."""
    small = _config(replace(shape, rows=1), None, 1, 1)
    v_dim, found = shape.spec.head_v_dim, []
    if hopper_refusal(small, Storage(small, device)) is None:
        blocks = [block for block in BLOCKS if v_dim % block == 0]
        programs = (3, 4) if shape.max_query_len <= 8 else (2,)  # a longer window's values take more registers
        tiles = [VerifyTile(*tile) for tile in product(blocks, (True, False), programs)]
        # One that leaves no room for so many programs is that of fewer.
        found += [Candidate("hopper", tile) for tile in tiles if share(small, tile).programs == tile.programs]
    narrow = [block for block in BLOCKS if block <= v_dim] or [16]
    return found + [Candidate("portable", PortableTile(*tile)) for tile in product(narrow, WARPS)]


@contextmanager
def in_force(file: str) -> Iterator[None]:
    """Managers that are built meanwhile take their tiles from ``file``."""
    before = os.environ.get(VARIABLE)
    os.environ[VARIABLE] = file
    try:
        yield
    finally:
        if before is None:
            del os.environ[VARIABLE]
        else:
            os.environ[VARIABLE] = before


def time_verifies(machine: Machine, shape: BenchShape, path: str) -> tuple[float, torch.Tensor]:
    """Microseconds of a layer's verify, and the outputs of the last layer for the first set of requests."""
    per_layer = 3 * shape.rows * shape.state_bytes  # states, and records of at most twice their bytes
    layers = machine.fitting_layers(min(LAYERS, shape.num_layers), per_layer, 1)
    sets = turns(layers * shape.rows * shape.state_bytes, machine.l2_bytes)
    workload = Workload(machine, _config(shape, path, layers, sets), sets)
    for turn in range(sets):
        for step in range(FILLING_STEPS):
            counts = filling_counts(shape.rows, shape.max_query_len, step)
            workload.step_by_hand(turn, torch.tensor(counts, dtype=torch.int32))
            workload.note(turn, counts)
    if workload.path != path:
        raise SpecStateError(f"path {workload.path!r} ran")
    workload.capture(ends=False)
    workload.replay_verifies(0, machine.make_timer())
    timer = machine.make_timer()
    machine.head_start()
    for index in range(max(REPLAYS, 2 * sets)):
        workload.replay_verifies(index % sets, timer)
    us = median(timer.milliseconds()) * 1e3 / layers
    workload.replay_verifies(0, machine.make_timer())
    machine.wait()
    return us, workload.outputs[-1].float().cpu()


def filling_counts(rows: int, max_query_len: int, step: int) -> list[int]:
    """Accepted tokens of each row in one of the steps that fill the rings: 1 to a full window, alike in every run."""
    return [1 + (max_query_len // 2 + 3 * row + 5 * step) % max_query_len for row in range(rows)]


def verify_rules(timings: Sequence[Timing]) -> tuple[VerifyRule, ...]:
    """For each V, checkpoint dtype and window the fastest tile by rows times heads; between two that were measured the
    border lies at their geometric mean."""
    groups: defaultdict[tuple[int, str, int], list[Timing]] = defaultdict(list)
    for each in timings:
        if each.candidate.path == "hopper":
            shape = each.shape
            groups[shape.spec.head_v_dim, shape.checkpoint_dtype, shape.max_query_len].append(each)
    rules = []
    for (v_dim, dtype, longest), group in sorted(groups.items()):
        sizes = sorted({each.row_heads for each in group})
        best = [_fastest([each for each in group if each.row_heads == size]) for size in sizes]
        first = 0
        for place, size in enumerate(sizes):
            is_last = place + 1 == len(sizes)
            if not is_last and best[place + 1] == best[place]:
                continue
            covered = [each for each in group if each.row_heads in sizes[first : place + 1]]
            rules.append(
                VerifyRule.model_validate(
                    {
                        "head_v_dim": v_dim,
                        "checkpoint_dtype": dtype,
                        "folds_in_verify": False,
                        "most_query_len": longest,
                        "most_row_heads": None if is_last else math.isqrt(size * sizes[place + 1]),
                        **best[place].tile._asdict(),
                        "timings": tuple(VerifyTiming.model_validate(_timing(each)) for each in covered),
                    }
                )
            )
            first = place + 1
    return tuple(rules)


def portable_rules(timings: Sequence[Timing]) -> tuple[PortableRule, ...]:
    """For each K and V the tile that is fastest over all its shapes, in the geometric mean."""
    groups: defaultdict[tuple[int, int], list[Timing]] = defaultdict(list)
    for each in timings:
        if each.candidate.path == "portable":
            groups[each.shape.spec.head_k_dim, each.shape.spec.head_v_dim].append(each)
    rules = []
    for (k_dim, v_dim), group in sorted(groups.items()):
        best = _fastest(group)
        measured = tuple(PortableTiming.model_validate(_timing(each)) for each in group)
        rules.append(
            PortableRule.model_validate(
                {
                    "most_head_k_dim": k_dim,
                    "head_v_dim": v_dim,
                    **best.tile._asdict(),
                    "timings": measured,
                }
            )
        )
    return tuple(rules)


def _fastest(timings: Sequence[Timing]) -> Candidate:
    """Of those that were measured on the most shapes, the one of the least geometric mean."""
    by_candidate: defaultdict[Candidate, list[float]] = defaultdict(list)
    for each in timings:
        by_candidate[each.candidate].append(math.log(each.us))
    most = max(map(len, by_candidate.values()))
    return min((c for c, logs in by_candidate.items() if len(logs) == most), key=lambda c: sum(by_candidate[c]))


def _timing(each: Timing) -> dict[str, Any]:
    shape, us = each.shape, round(each.us, 3)
    return {"rows": shape.rows, "num_heads": shape.spec.num_heads, **each.candidate.tile._asdict(), "us": us}


def _config(shape: BenchShape, path: str | None, layers: int, sets: int) -> StateConfig:
    return replace(shape, num_layers=layers).config("ring", sets=sets).model_copy(update={"path": path})


def _difference(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    """Relative, in the norm of all; 0 where they are equal."""
    if torch.equal(ours, theirs):
        return 0.0
    return float((ours - theirs).norm() / theirs.norm())
