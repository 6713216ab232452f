"""What the Hopper kernels are compiled with for a config: constants, and how many programs share a multiprocessor."""

from typing import Any, NamedTuple

import torch

from specstate.config import StateConfig
from specstate.kernels.tiles import VerifyTile
from specstate.validation import DTYPES

#: Bytes of a row of a state chunk, the widest that TMA swizzles.
CHUNK_BYTES = 128

#: Bytes of a state's row that are asked for before the pending records are used, at most; not with a tile that asks for
#: all at once, nor with a fold inside, whose chunks never come later.
EARLY_BYTES = 256

#: Tokens of a window are compared by products from LEAST_COMPARED on (chosen, not measured), and up to decays of
#: e^-MOST_LOG_DECAY over a window: k e^64 is finite in float32 for |k| up to 5e10.
LEAST_COMPARED, MOST_LOG_DECAY = 5, 64.0

#: One thread a channel.
NUM_WARPS = 4

#: Of a multiprocessor: its shared memory, what each program takes beside its own, registers of 32 bits. Source: NVIDIA,
#: CUDA C++ Programming Guide, "Technical Specifications per Compute Capability", 9.0.
SHARED_BYTES, RESERVED_BYTES, REGISTERS = 228 * 1024, 1024, 65536

#: Records whose keys are decayed together.
KEY_GROUP = 8

#: Rows of V that a fold takes at a time, and how many times as many are on their way.
FOLD_BLOCK, FOLD_BUFFERS = 32, 2

#: Pending records that the verify takes at a time, and what a program needs besides what is counted here while it needs
#: most: norms, decays and strengths are not all there then.
PENDING_TILE, SMALL_BYTES = 16, 256


class Share(NamedTuple):
    """What a program of the verify gets of a multiprocessor."""

    programs: int
    """How many there are: those of the tile, or fewer."""
    early: int
    """Chunks of the state that have memory from the beginning."""
    chunks: int
    """The same once the pending records are used; with FOLDS no more than at first."""


def share(config: StateConfig, tile: VerifyTile, gate: torch.dtype | None = None) -> Share:
    """As the kernel's stages take memory: what lets ``tile.programs`` in, or fewer where none of the state has room.

    ``gate``: dtype of raw gates, the activations' if left out.
    """
    gate = gate or DTYPES[config.activation_dtype]
    for programs in range(tile.programs, 1, -1):
        divided = _divided(config, tile, gate, programs)
        if divided.early > 0:
            return divided
    return _divided(config, tile, gate, 1)


def _divided(config: StateConfig, tile: VerifyTile, gate: torch.dtype, programs: int) -> Share:
    spec, block_v, item = config.layer, tile.block_v, DTYPES[config.activation_dtype].itemsize
    window = 8 if config.max_query_len <= 8 else 16
    vector = 4 * spec.head_k_dim
    pending = PENDING_TILE + second_tile(config)
    if config.folds_in_verify and fold_capacity(config) > PENDING_TILE:
        pending += fold_capacity(config)  # as they are, for the fold
    records = pending * (2 * spec.head_k_dim * item + 4 * block_v)
    keys = 3 * spec.head_k_dim if spec.conv_kernel_size else 2 * spec.head_k_dim  # k, q, k behind the conv
    inputs = window * ((keys + block_v) * item + spec.head_k_dim * gate.itemsize)
    is_wide = config.checkpoint_dtype == "float32"
    matrix = 2 * window * (vector if is_wide else 3 * vector // 2)  # F, or its three parts in bfloat16
    while_pending = records + max(inputs, 2 * window * vector)
    pairs = 4 * window * (2 * window if compares_by_products(config) else window)
    room = SHARED_BYTES // programs - RESERVED_BYTES - SMALL_BYTES - pairs
    chunk, most = block_v * CHUNK_BYTES, spec.head_k_dim * DTYPES[config.checkpoint_dtype].itemsize // CHUNK_BYTES
    chunks = min((room - matrix - (records if config.folds_in_verify else 0)) // chunk, most)
    early = min((room - while_pending) // chunk, chunks)
    if config.folds_in_verify:  # its records stay where they are
        return Share(programs, early, early)
    return Share(programs, early if tile.at_once else min(early, EARLY_BYTES // CHUNK_BYTES), chunks)


def compares_by_products(config: StateConfig) -> bool:
    """Tokens of a window are compared by matrix products: where decays have a bound, and windows are worth them."""
    length, bound = config.max_query_len, config.layer.gate_lower_bound
    return bound is not None and length >= LEAST_COMPARED and -bound * length <= MOST_LOG_DECAY


def second_tile(config: StateConfig) -> int:
    """Pending records that have memory beside the newest PENDING_TILE: all that a row can have, up to as many again."""
    most = config.record_capacity if config.folds_in_verify else config.most_pending
    return min(PENDING_TILE, max(0, -(-(most - PENDING_TILE) // KEY_GROUP) * KEY_GROUP))


def fold_capacity(config: StateConfig) -> int:
    """Records that a fold reads: a power of two, at least those that it takes together."""
    return max(KEY_GROUP, 1 << (config.record_capacity - 1).bit_length())


def verify_constants(config: StateConfig, tile: VerifyTile, gate: torch.dtype | None = None) -> dict[str, Any]:
    """Constants of the verify kernel; BIAS and WIDE_TAPS are not among them, since the parameters say those."""
    spec, part = config.layer, share(config, tile, gate)
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
        "SECOND": second_tile(config),
        "EARLY": part.early,
        "BUFFERS": part.chunks,
        "AT_ONCE": tile.at_once,
        "PRODUCTS": compares_by_products(config),
    }


def verify_options(config: StateConfig, tile: VerifyTile, gate: torch.dtype | None = None) -> dict[str, Any]:
    """How the verify kernel is compiled and launched: registers come in eights, 255 at most."""
    registers = min(255, REGISTERS // (share(config, tile, gate).programs * 32 * NUM_WARPS) // 8 * 8)
    return {"num_warps": NUM_WARPS, "maxnreg": registers, "launch_pdl": True}


def fold_programs(config: StateConfig) -> int:
    """Programs of the fold that share a multiprocessor: as many as its memory takes, and registers allow."""
    spec, capacity = config.layer, fold_capacity(config)
    item, state = DTYPES[config.activation_dtype].itemsize, DTYPES[config.checkpoint_dtype].itemsize
    records = capacity * (2 * spec.head_k_dim * item + 4 * min(128, spec.head_v_dim))
    blocks = FOLD_BUFFERS * FOLD_BLOCK * spec.head_k_dim * state
    vectors = 8 * capacity + 4 * spec.head_k_dim  # norms, factors of decays, the decay over all
    return max(1, min(4, SHARED_BYTES // (records + blocks + vectors + RESERVED_BYTES)))


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
