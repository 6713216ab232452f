"""Compiles what a benchmark launches, several kernels at a time: Triton compiles them one after another in a process.

``python -m specstate.bench.precompile JOB ...`` runs one step for each job, given as JSON, and leaves the kernels in
Triton's cache on disk. What it could not compile is compiled when it is launched.
"""

import json
import os
import subprocess
import sys
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import NamedTuple

from specstate.config import StateConfig
from specstate.kernels.tile_table import VARIABLE, TileTable, load_table
from specstate.kernels.tiles import Tiles

#: Fewer are compiled sooner where they are launched: a process takes some seconds to start.
LEAST_JOBS = 3
TIMEOUT_S = 120.0


class Job(NamedTuple):
    """Steps of ``max_requests`` rows of one config, on the tiles that a file says, or on those of this machine."""

    config: StateConfig
    tiles: str | None = None


def precompile(jobs: Iterable[Job], table: TileTable, timeout_s: float = TIMEOUT_S) -> int:
    """Fills Triton's cache for ``jobs``; how many different ones that were. ``table``: the tiles of this machine."""
    small = list(dict.fromkeys(_small(job, table) for job in jobs))
    workers = min(len(small), (os.cpu_count() or 1) - 1)
    if len(small) < LEAST_JOBS or workers < 2:
        return 0

    def compile_some(texts: Sequence[str]) -> int:
        command = [sys.executable, "-m", "specstate.bench.precompile", *texts]
        with suppress(OSError, subprocess.SubprocessError):
            quiet = subprocess.DEVNULL
            done = subprocess.run(command, stdin=quiet, stdout=quiet, stderr=quiet, timeout=timeout_s, check=False)
            # The exit code says how many failed; of a process that was killed nothing is known.
            return max(0, len(texts) - done.returncode) if done.returncode >= 0 else 0
        return 0

    with ThreadPoolExecutor(workers) as pool:
        return sum(pool.map(compile_some, [small[place::workers] for place in range(workers)]))


def _small(job: Job, table: TileTable) -> str:
    # Kernels do not depend on how many layers there are, and on the rows by their tiles alone.
    rows = fewest_rows(job.config, table if job.tiles is None else load_table(job.tiles))
    small = job.config.model_copy(update={"num_layers": 1, "max_requests": rows, "num_checkpoints": rows})
    return json.dumps({"config": small.model_dump(mode="json"), "tiles": job.tiles})


def fewest_rows(config: StateConfig, table: TileTable) -> int:
    """The fewest rows that run on the same kernels as ``max_requests`` of them."""
    tiles, most = Tiles(config, table), config.max_requests
    if config.path == "portable" or not tiles.all_verify or not tiles.all_folds:
        return 1
    wanted = tiles.verify(most), tiles.fold(most)
    return next(rows for rows in range(1, most + 1) if (tiles.verify(rows), tiles.fold(rows)) == wanted)


def compile_step(config: StateConfig) -> None:
    """One full step of ``config`` by hand; without a conv S0 runs beside it."""
    from specstate.bench.peer import check_outputs, find_peer
    from specstate.bench.timer import Machine
    from specstate.bench.workload import Workload

    workload = Workload(Machine.gpu(), config, sets=1)
    if config.layer.conv_kernel_size is None:
        check_outputs(find_peer()[0], workload, windows=1)
    else:
        workload.step_by_hand(0, workload.counts.clone())


def main(jobs: Sequence[str]) -> int:
    """How many could not be compiled."""
    failed = 0
    for job in map(json.loads, jobs):
        if job["tiles"] is not None:
            os.environ[VARIABLE] = job["tiles"]
        try:
            compile_step(StateConfig.model_validate_json(json.dumps(job["config"])))
        except Exception as error:  # costs its own variant alone
            print(f"{job}: {error}", file=sys.stderr)
            failed += 1
    return failed


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
