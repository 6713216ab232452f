"""How the Hopper kernels divide their work, by the size of the batch."""

from typing import NamedTuple

from specstate.config import StateConfig


class VerifyTile(NamedTuple):
    """One way to run the verify."""

    block_v: int
    """Rows of V a program."""
    at_once: bool
    """The whole state is asked for before the window's inputs."""
    registers: int
    """Most a thread may have."""


def verify_tiles(config: StateConfig) -> tuple[VerifyTile, ...]:
    """All that ``verify_tile`` may choose for ``config``."""
    registers = 168 if config.max_query_len <= 8 else 255
    small = VerifyTile(64, True, registers)
    if config.layer.head_v_dim % 128:
        return (small,)
    return small, VerifyTile(128, False, registers)


def verify_tile(config: StateConfig, num_rows: int) -> VerifyTile:
    """For a step of ``num_rows`` rows."""
    tiles = verify_tiles(config)
    return tiles[0] if num_rows * config.layer.num_heads * config.layer.head_v_dim <= 96 * 128 else tiles[-1]


def fold_blocks(config: StateConfig) -> tuple[int, ...]:
    """Rows of V a program of the fold: all that ``fold_block`` may choose for ``config``."""
    return (64,) if config.layer.head_v_dim % 128 or config.record_capacity > 32 else (64, 128)


def fold_block(config: StateConfig, num_rows: int) -> int:
    """For a plan of ``num_rows`` rows: small ones are divided finely, so that they reach the whole GPU."""
    blocks = fold_blocks(config)
    return blocks[0] if num_rows <= 16 else blocks[-1]
