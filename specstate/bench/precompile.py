"""Compiles what a benchmark launches, several kernels at a time: Triton compiles them one after another in a process.

``python -m specstate.bench.precompile CONFIG`` runs one step of a config, given as JSON, and leaves the kernels in
Triton's cache on disk. What it could not compile is compiled when it is launched.
"""

import os
import subprocess
import sys
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

from specstate.config import StateConfig

#: Fewer are compiled sooner where they are launched: a process takes some seconds to start.
LEAST_CONFIGS = 3
TIMEOUT_S = 120.0


def precompile(configs: Iterable[StateConfig], timeout_s: float = TIMEOUT_S) -> int:
    """Fills Triton's cache for ``configs``, whatever their layers and requests; how many processes did."""
    small = list(dict.fromkeys(_small(config) for config in configs))
    workers = min(len(small), (os.cpu_count() or 1) // 2)
    if len(small) < LEAST_CONFIGS or workers < 2:
        return 0

    def compile_one(config: str) -> int:
        command = [sys.executable, "-m", "specstate.bench.precompile", config]
        with suppress(OSError, subprocess.SubprocessError):
            quiet = subprocess.DEVNULL
            done = subprocess.run(command, stdin=quiet, stdout=quiet, stderr=quiet, timeout=timeout_s, check=False)
            return int(done.returncode == 0)
        return 0

    with ThreadPoolExecutor(workers) as pool:
        return sum(pool.map(compile_one, small))


def _small(config: StateConfig) -> str:
    # Kernels do not depend on how many layers and rows there are.
    return config.model_copy(update={"num_layers": 1, "max_requests": 1, "num_checkpoints": 1}).model_dump_json()


def main(config: str) -> int:
    """One step of ``config`` by hand."""
    from specstate.bench.timer import Machine
    from specstate.bench.workload import Workload, draw_accepted

    workload = Workload(Machine.gpu(), StateConfig.model_validate_json(config), sets=1)
    workload.step_by_hand(0, draw_accepted(1, 1, workload.config.max_query_len, workload.generator)[0])
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
