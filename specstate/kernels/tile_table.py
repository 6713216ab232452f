"""Tables of tiles: how the kernels divide their work, as it was measured on one GPU. Data, read from JSON.

A table has a list of rules for each kernel, and the first rule that applies decides; a criterion that a rule leaves out
holds for every shape. Where no rule of a table applies, those of ``default.json`` do, which leave no shape out. The
tables of the package are in ``tile_tables/``, a file a GPU; ``specstate bench tune`` writes one for another, and the
environment variable SPECSTATE_TILES names a file that takes the place of all of them.
"""

import os
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Literal, Self

import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from specstate.config import CheckpointDtype, StateConfig
from specstate.errors import SpecStateError, shown
from specstate.validation import first_fault

#: Names a file in place of the package's tables; read when a manager is built.
VARIABLE = "SPECSTATE_TILES"

#: Records of a ring beyond which 128 rows of V and their corrections no longer fit into a fold's shared memory.
MOST_RECORDS_OF_WIDE_FOLDS = 32

Count = Annotated[int, Field(ge=1)]
Programs = Literal[2, 3, 4]
Microseconds = Annotated[float, Field(gt=0.0, allow_inf_nan=False)]


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class VerifyTiming(_Frozen):
    """What one tile took, the rule's or another that was tried."""

    rows: Count
    num_heads: Count
    block_v: Count
    at_once: bool
    programs: Programs
    us: Microseconds
    """A layer."""


class PortableTiming(_Frozen):
    """The same of the portable kernels."""

    rows: Count
    num_heads: Count
    block_v: Count
    num_warps: Count
    us: Microseconds


class VerifyRule(_Frozen):
    """A tile of the Hopper verify. Its results are the same bits under any."""

    head_v_dim: Count | None = None
    checkpoint_dtype: CheckpointDtype | None = None
    folds_in_verify: bool | None = None
    """True: for fold policy "deferred" alone; False: for the others."""
    most_query_len: Count | None = None
    """T of the config, at most."""
    most_row_heads: Count | None = None
    """Rows of the step times heads, at most."""
    block_v: Literal[32, 64, 128]
    """Rows of V a program."""
    at_once: bool
    """All of the state that has room is asked for before the window's inputs."""
    programs: Programs
    """How many share a multiprocessor, its registers and shared memory; fewer where the records leave no room."""
    timings: tuple[VerifyTiming, ...] = ()

    @model_validator(mode="after")
    def _divides(self) -> Self:
        _check_divides(self.head_v_dim, self.block_v)
        return self

    def covers(self, config: StateConfig) -> bool:
        """Applies to ``config``, if the rows do not forbid it."""
        v_dim = config.layer.head_v_dim
        return (
            self.head_v_dim in (None, v_dim)
            and self.checkpoint_dtype in (None, config.checkpoint_dtype)
            and self.folds_in_verify in (None, config.folds_in_verify)
            and _within(config.max_query_len, self.most_query_len)
            and v_dim % self.block_v == 0
        )

    def allows(self, row_heads: int) -> bool:
        return _within(row_heads, self.most_row_heads)


class FoldRule(_Frozen):
    """A block of the Hopper fold. Its results are the same bits under any."""

    head_v_dim: Count | None = None
    most_rows: Count | None = None
    """Rows of the plan, at most."""
    block_v: Literal[64, 128]
    """Rows of V a program."""

    @model_validator(mode="after")
    def _divides(self) -> Self:
        _check_divides(self.head_v_dim, self.block_v)
        return self

    def covers(self, config: StateConfig) -> bool:
        v_dim = config.layer.head_v_dim
        fits = self.block_v < 128 or config.record_capacity <= MOST_RECORDS_OF_WIDE_FOLDS
        return self.head_v_dim in (None, v_dim) and v_dim % self.block_v == 0 and fits

    def allows(self, num_rows: int) -> bool:
        return _within(num_rows, self.most_rows)


class PortableRule(_Frozen):
    """A tile of the portable verify and fold. Never by rows: a request's bits must not depend on its company."""

    most_head_k_dim: Count | None = None
    head_v_dim: Count | None = None
    block_v: Literal[16, 32, 64, 128, 256]
    """Rows of V a program, at most: a head of fewer takes them all."""
    num_warps: Literal[1, 2, 4, 8]
    timings: tuple[PortableTiming, ...] = ()

    def covers(self, config: StateConfig) -> bool:
        spec = config.layer
        return self.head_v_dim in (None, spec.head_v_dim) and _within(spec.head_k_dim, self.most_head_k_dim)


class TileTable(_Frozen):
    """The rules, and where they come from."""

    gpu: str
    """What they were measured on."""
    date: str
    versions: dict[str, str]
    notes: tuple[str, ...] = ()
    verify: tuple[VerifyRule, ...] = ()
    fold: tuple[FoldRule, ...] = ()
    portable: tuple[PortableRule, ...] = ()

    @property
    def title(self) -> str:
        """For a report."""
        return f"{self.gpu}, {self.date}"


def load_table(path: str | Path) -> TileTable:
    """Reads a table. Raises SpecStateError that names the file, the field and its value."""
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeError, ValueError) as error:
        raise SpecStateError(f"cannot read tiles from {shown(str(path))}: {error}") from error
    try:
        return TileTable.model_validate_json(text)
    except ValidationError as error:
        raise SpecStateError(f"{path} holds no table of tiles: {first_fault(error)}") from error


def device_table(device: torch.device) -> TileTable:
    """The file that SPECSTATE_TILES names; else the package's table of the GPU, else the default."""
    path = os.environ.get(VARIABLE)
    if path:
        try:
            return load_table(path)
        except SpecStateError as error:
            raise SpecStateError(f"{VARIABLE} = {shown(path)}: {error}") from error
    return gpu_table(torch.cuda.get_device_name(device)) if device.type == "cuda" else default_table()


def gpu_table(gpu: str) -> TileTable:
    """The package's table for a GPU by its name; the default where there is none."""
    name = gpu.lower().replace(" ", "-")
    return _packaged(name) if (_folder() / f"{name}.json").is_file() else default_table()


def default_table() -> TileTable:
    """Rules that leave no shape out."""
    return _packaged("default")


@cache
def _packaged(name: str) -> TileTable:
    return load_table(_folder() / f"{name}.json")


def _folder() -> Path:
    return Path(str(files("specstate.kernels"))) / "tile_tables"


def _within(value: int, most: int | None) -> bool:
    return most is None or value <= most


def _check_divides(head_v_dim: int | None, block_v: int) -> None:
    if head_v_dim is not None and head_v_dim % block_v:
        raise ValueError(f"block_v = {block_v} must divide head_v_dim = {head_v_dim}")
