"""What the Hopper kernels are compiled with for a config: constants, and how many programs share a multiprocessor."""

from typing import Any

from specstate.config import StateConfig
from specstate.kernels.tiles import VerifyTile
from specstate.validation import DTYPES

#: Bytes of a row of a state chunk, the widest that TMA swizzles.
CHUNK_BYTES = 128

#: Programs of the verify and of the fold on a multiprocessor: as many as shared memory lets run.
PROGRAMS = 3

#: One thread a channel.
NUM_WARPS = 4


def early_chunks(config: StateConfig, tile: VerifyTile) -> int:
    """Chunks of a program's states that have shared memory of their own, so that PROGRAMS of them fit."""
    chunks = config.layer.head_k_dim * DTYPES[config.checkpoint_dtype].itemsize // CHUNK_BYTES
    if chunks < 4 or tile.block_v < 128:
        return chunks
    # More than 32 records to fold leave no room for a third.
    return 3 if config.folds_in_verify and fold_capacity(config) <= 32 else 2


def fold_capacity(config: StateConfig) -> int:
    """Records that a fold reads: a power of two."""
    return max(4, 1 << (config.record_capacity - 1).bit_length())


def verify_constants(config: StateConfig, tile: VerifyTile) -> dict[str, Any]:
    """Constants of the verify kernel; BIAS, whether the conv has one, the parameters say."""
    spec = config.layer
    return {
        "H": spec.num_heads,
        "V": spec.head_v_dim,
        "BV": tile.block_v,
        "T": config.max_query_len,
        "R": config.record_capacity,
        "W": spec.conv_kernel_size or 0,
        "BOUNDED": spec.gate_lower_bound is not None,
        "FOLDS": config.folds_in_verify,
        "CAPACITY": fold_capacity(config) if config.folds_in_verify else 16,  # which nothing reads then
        "EARLY": early_chunks(config, tile),
        "AT_ONCE": tile.at_once,
    }


def verify_options(tile: VerifyTile) -> dict[str, Any]:
    """How the verify kernel is compiled and launched."""
    return {"num_warps": NUM_WARPS, "maxnreg": tile.registers, "launch_pdl": True}


def fold_constants(config: StateConfig, block_v: int) -> dict[str, Any]:
    """Constants of the fold kernel; dtypes come from the storage and the parameters."""
    spec = config.layer
    return {
        "H": spec.num_heads,
        "V": spec.head_v_dim,
        "BV": block_v,
        "R": config.record_capacity,
        "CAPACITY": fold_capacity(config),
        "C": spec.conv_channels,
        "HISTORY": spec.conv_history_len,
        "RING": spec.conv_history_len + config.max_query_len,
        "BOUNDED": spec.gate_lower_bound is not None,
    }
