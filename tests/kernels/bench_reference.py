"""Times the reference verify against fla-core's token-serial KDA on the same batch.

    python -m tests.kernels.bench_reference

The reference reads its pending records, normalises, computes gates and writes its records; ``naive_recurrent_kda`` is
handed normalised vectors, log decays and a state that is up to date. Medians, in turns, in one process.
"""

import argparse
import statistics
import sys
import time
import warnings
from collections.abc import Callable
from typing import NamedTuple

import torch

from specstate import StateManager, StepMetadata
from tests.factories import make_config, make_inputs, make_params


class Shape(NamedTuple):
    """Of a batch: every row verifies ``window`` tokens after ``pending`` records that are not folded."""

    rows: int
    heads: int
    k_dim: int
    v_dim: int
    window: int
    pending: int


SHAPES = [
    Shape(1, 2, 32, 32, 8, 8),
    Shape(1, 4, 64, 64, 8, 8),
    Shape(4, 4, 64, 64, 1, 8),
    Shape(4, 4, 64, 64, 8, 0),
    Shape(4, 4, 64, 64, 8, 8),
    Shape(4, 4, 64, 64, 8, 24),
    Shape(4, 4, 64, 64, 16, 16),
    Shape(8, 8, 64, 64, 8, 8),
    Shape(4, 4, 128, 128, 8, 8),
    Shape(8, 12, 128, 128, 8, 8),
]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=15, help="timed calls of each, in turns")
    parser.add_argument(
        "--threads", type=int, default=1, help="of torch; more than the idle cores measures the waiting"
    )
    arguments = parser.parse_args()
    repeats = arguments.repeats
    torch.set_num_threads(arguments.threads)
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads, float32, medians of {repeats}")
    print(
        f"{'rows':>5} {'heads':>5} {'K':>4} {'V':>4} {'T':>3} {'pending':>7} {'reference ms':>13} {'naive ms':>9} "
        f"{'ratio':>6}"
    )
    for shape in SHAPES:
        ours, theirs = measure(shape, repeats)
        rows, heads, k_dim, v_dim, window, pending = shape
        print(
            f"{rows:5} {heads:5} {k_dim:4} {v_dim:4} {window:3} {pending:7} {ours * 1e3:13.3f} {theirs * 1e3:9.3f} "
            f"{ours / theirs:6.2f}"
        )
    return 0


def measure(shape: Shape, repeats: int) -> tuple[float, float]:
    """Median seconds of one layer's verify and of ``naive_recurrent_kda``."""
    verify, naive = make_verify(shape), make_naive(shape)
    verify(), naive()
    pairs = [(verify(), naive()) for _ in range(repeats)]
    return statistics.median(pair[0] for pair in pairs), statistics.median(pair[1] for pair in pairs)


def make_verify(shape: Shape) -> Callable[[], float]:
    """A function that verifies one window of every row, commits nothing, and returns the seconds that verify took."""
    rows, heads, k_dim, v_dim, window, pending = shape
    config = make_config(
        num_layers=1,
        max_requests=rows,
        num_heads=heads,
        head_k_dim=k_dim,
        head_v_dim=v_dim,
        conv_kernel_size=None,
        checkpoint_dtype="float32",
        activation_dtype="float32",
        max_query_len=max(window, pending // 2, 1),
        record_capacity=2 * (window + pending),
    )
    manager = StateManager(config, make_params(config))
    handles = tuple(manager.admit(str(row)) for row in range(rows))
    left = pending
    while left:
        query_len = min(left, config.max_query_len)
        step = manager.begin_step(StepMetadata(handles=handles, query_lens=(query_len,) * rows))
        inputs = make_inputs(config, rows * query_len, seed=left)[0]
        step.verify(0, inputs.qkv, inputs.raw_gate, inputs.raw_beta)
        step.defer(torch.full((rows,), query_len))
        left -= query_len
    for handle in handles:
        assert manager._backend.cursor(handle.record_slot).pending_len == pending
    metadata = StepMetadata(handles=handles, query_lens=(window,) * rows)
    inputs = make_inputs(config, rows * window, seed=0)[0]

    def verify() -> float:
        step = manager.begin_step(metadata)
        start = time.perf_counter()
        step.verify(0, inputs.qkv, inputs.raw_gate, inputs.raw_beta)
        seconds = time.perf_counter() - start
        step.cancel()
        return seconds

    return verify


def make_naive(shape: Shape) -> Callable[[], float]:
    """A function that runs the same windows through fla-core, and returns the seconds that it took."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that this machine has no GPU
        from fla.ops.kda.naive import naive_recurrent_kda

    rows, heads, k_dim, v_dim, window, _ = shape
    generator = torch.Generator().manual_seed(0)

    def normal(*sizes: int) -> torch.Tensor:
        return torch.randn(rows, window, heads, *sizes, generator=generator)

    query, key = (torch.nn.functional.normalize(normal(k_dim), dim=-1) for _ in range(2))
    value, decay, strength = normal(v_dim), -normal(k_dim).abs(), normal().sigmoid()
    state = torch.randn(rows, heads, k_dim, v_dim, generator=generator)

    def naive() -> float:
        start = time.perf_counter()
        with torch.no_grad():
            naive_recurrent_kda(query, key, value, decay, strength, initial_state=state, output_final_state=True)
        return time.perf_counter() - start

    return naive


if __name__ == "__main__":
    sys.exit(main())
