"""What the Hopper kernels take of a multiprocessor: python -m tests.kernels.compiled [NAME ...]

Compiles them for compute capability 9.0 with what the launcher passes for a config, and looks at the machine code.
Needs no GPU, since Triton brings the tools, but a Triton that does not interpret: TRITON_INTERPRET must not be set.
Prints a line for each variant; with --json, one object.
"""

import json
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import triton
from triton.backends.compiler import GPUTarget

from specstate import StateConfig
from specstate.kernels import hopper
from specstate.kernels import rows as at
from specstate.kernels.arena import TorchAllocator
from specstate.kernels.cursors import StepTensors
from specstate.kernels.hopper_constants import (
    NUM_WARPS,
    REGISTERS,
    RESERVED_BYTES,
    SHARED_BYTES,
    fold_programs,
    share,
)
from specstate.kernels.tile_table import gpu_table
from specstate.kernels.tiles import Tiles, VerifyTile
from specstate.storage import Storage
from specstate.validation import DTYPES
from tests.factories import make_config, make_inputs, make_params


@dataclass(frozen=True)
class Variant:
    """A kernel, as one config launches it; the changes are those to ``model_config``."""

    tile: VerifyTile | int
    """Of the verify; of the fold its rows of V a program."""
    changes: dict[str, Any]
    gate: torch.dtype | None = None
    """Of raw gates, the activations' if left out."""

    @property
    def programs(self) -> int:
        """How many must fit on a multiprocessor."""
        if isinstance(self.tile, int):
            return fold_programs(model_config(**self.changes))
        return share(model_config(**self.changes), self.tile, self.gate).programs


@dataclass(frozen=True)
class Cost:
    """What the machine code of one variant takes."""

    registers: int
    most_registers: int
    """What the tile allows."""
    stack_bytes: int
    shared_bytes: int
    """Of a program, with what is reserved for it."""
    instructions: int
    seconds: float

    @property
    def programs(self) -> int:
        """How many fit on a multiprocessor."""
        registers = -(-self.registers // 8) * 8  # as the hardware gives them out
        return min(SHARED_BYTES // self.shared_bytes, REGISTERS // (registers * 32 * NUM_WARPS))


TABLE = gpu_table("NVIDIA H200")
SMALL, LARGE, CROWDED = VerifyTile(64, True, 3), VerifyTile(128, False, 3), VerifyTile(128, False, 4)

VARIANTS = {
    "ring, no conv": Variant(LARGE, {"conv_kernel_size": None}),
    "ring": Variant(LARGE, {}),
    "deferred": Variant(LARGE, {"fold_policy": "deferred"}),
    "deferred, wide gate": Variant(LARGE, {"fold_policy": "deferred"}, gate=torch.float32),
    "deferred, bfloat16": Variant(LARGE, {"fold_policy": "deferred", "checkpoint_dtype": "bfloat16"}),
    "small batch": Variant(SMALL, {}),
    "bfloat16 checkpoints": Variant(LARGE, {"checkpoint_dtype": "bfloat16"}),
    "bfloat16, four programs": Variant(CROWDED, {"checkpoint_dtype": "bfloat16"}),
    "softplus gate": Variant(LARGE, {"gate_lower_bound": None, "max_query_len": 4, "num_heads": 32}),
    "windows of 16": Variant(VerifyTile(128, False, 2), {"max_query_len": 16}),
    "fold of few rows": Variant(64, {}),
    "fold": Variant(128, {}),
    "fold, bfloat16": Variant(128, {"checkpoint_dtype": "bfloat16"}),
    "fold of few records": Variant(128, {"fold_policy": "eager"}),
}


def model_config(**changes: Any) -> StateConfig:
    """One layer of a rank of Kimi K3 with windows of 8, and whatever ``changes`` say."""
    layer = {"num_heads": 12, "head_k_dim": 128, "head_v_dim": 128, "gate_lower_bound": -5.0}
    dtypes = {"checkpoint_dtype": "float32", "activation_dtype": "bfloat16"}
    return make_config(**{"num_layers": 1, "max_requests": 1, "max_query_len": 8, **layer, **dtypes, **changes})


class Target:
    """As much of a Triton driver as compiling needs."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


@contextmanager
def launcher_on_a_cpu() -> Iterator[None]:
    """HopperKernels can be built over a CPU's storage in here, to see what it would launch."""
    with (
        mock.patch.object(hopper, "hopper_refusal", return_value=None),
        mock.patch.object(hopper, "_num_multiprocessors", return_value=132),
        mock.patch.object(hopper, "driver", mock.Mock(active=Target())),
    ):
        yield


class Compiled:
    """Stands for a kernel of the launcher: compiles what would be launched, and keeps it."""

    def __init__(self, kernel: Any) -> None:
        self._kernel = kernel
        self.code: Any = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._kernel, name)

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def compile_it(*arguments: Any, **constants: Any) -> None:
            self.code = self._kernel.warmup(*arguments, grid=grid, **constants)

        return compile_it


def compile_variant(variant: Variant) -> Any:
    """The compiled kernel that the launcher asks for."""
    config, device = model_config(**variant.changes), torch.device("cpu")
    triton.runtime.driver.set_active(Target())
    name = "fold_kernel" if isinstance(variant.tile, int) else "verify_kernel"
    kernel = Compiled(getattr(hopper, name))
    with launcher_on_a_cpu(), mock.patch.object(hopper, name, kernel):
        kernels = hopper.HopperKernels(config, tuple(make_params(config)), Storage(config, device))
        if isinstance(variant.tile, int):
            assert variant.tile in Tiles(config, TABLE).all_folds
            kernels._launch_fold(variant.tile, torch.zeros(1, at.PLAN_COLUMNS, dtype=torch.int32), 0, 1)
        else:
            assert variant.tile in Tiles(config, TABLE).all_verify
            gate = variant.gate or DTYPES[config.activation_dtype]
            kernels._fixed[variant.tile, gate] = [kernels._fixed_arguments(variant.tile, gate, 0)]
            spec, inputs = config.layer, make_inputs(config, 1, 0)[0]
            out = torch.zeros(1, spec.num_heads, spec.head_v_dim, dtype=DTYPES[config.activation_dtype])
            window = inputs.qkv, inputs.raw_gate.to(gate), inputs.raw_beta, out
            addresses = tuple(tensor.data_ptr() for tensor in window)
            kernels._launch_verify(variant.tile, _one_row(config), 0, window[:2], addresses, kernels.layout(*window))
    return kernel.code


def _one_row(config: StateConfig) -> StepTensors:
    none = torch.zeros(2, dtype=torch.int32)
    rows = torch.zeros(1, at.ROW_COLUMNS, dtype=torch.int32)
    return StepTensors(
        rows, none, none[:1], none[:1], None, config.folds_in_verify, TorchAllocator(torch.device("cpu"))
    )


def cost(variant: Variant) -> Cost:
    """Compiles a variant and looks at what came out."""
    start = time.monotonic()
    code = compile_variant(variant)
    [usage] = re.findall(r"REG:(\d+) STACK:(\d+)", _dump(code, "-res-usage"))
    return Cost(
        registers=int(usage[0]),
        most_registers=code.metadata.maxnreg or 255,
        stack_bytes=int(usage[1]),
        shared_bytes=code.metadata.shared + RESERVED_BYTES,
        instructions=len(re.findall(r"^\s+/\*[0-9a-f]{4,}\*/\s+\S", _dump(code, "-sass"), re.MULTILINE)),
        seconds=time.monotonic() - start,
    )


def _dump(code: Any, option: str) -> str:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "kernel.cubin"
        file.write_bytes(code.asm["cubin"])
        command = [triton.knobs.nvidia.cuobjdump.path, option, str(file)]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def main(arguments: list[str]) -> None:
    names = [name for name in arguments if name != "--json"] or [*VARIANTS]
    if "--json" in arguments:
        print(json.dumps({name: asdict(cost(VARIANTS[name])) for name in names}))
        return
    print(f"{'triton ' + triton.__version__:21} registers   stack  shared  programs  instructions  seconds")
    for name in names:
        made = cost(VARIANTS[name])
        print(
            f"{name:21} {made.registers:3} of {made.most_registers}  {made.stack_bytes:6}  {made.shared_bytes:6}  "
            f"{made.programs:8}  {made.instructions:12}  {made.seconds:7.1f}",
            flush=True,
        )


if __name__ == "__main__":
    main(sys.argv[1:])
