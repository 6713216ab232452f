"""Times the reference verify against fla-core's token-serial KDA on the same batch.

    python -m tests.kernels.bench_reference

Both start from the same raw vectors, gates and betas. The reference reads its pending records, and writes its own; fla
gets a state that is up to date, computes norms and log decays with its own naive functions, then runs
``naive_recurrent_kda``, whose own time stands beside it. Medians a layer, in turns, in one process.
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
from tests.factories import make_config, make_inputs, make_params, verify_all


class Shape(NamedTuple):
    """Of a batch: every row verifies ``window`` tokens after ``pending`` records that are not folded."""

    rows: int
    heads: int
    k_dim: int
    v_dim: int
    window: int
    pending: int


#: A step derives its rows' places once and uses them in every layer, so one layer alone would pay for all.
LAYERS = 4

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
        f"{'rows':>5} {'heads':>5} {'K':>4} {'V':>4} {'T':>3} {'pending':>7} {'reference ms':>13} {'fla ms':>7} "
        f"{'recurrence ms':>14} {'ratio':>6}"
    )
    for shape in SHAPES:
        ours, theirs, recurrence = measure(shape, repeats)
        rows, heads, k_dim, v_dim, window, pending = shape
        print(
            f"{rows:5} {heads:5} {k_dim:4} {v_dim:4} {window:3} {pending:7} {ours * 1e3:13.3f} {theirs * 1e3:7.3f} "
            f"{recurrence * 1e3:14.3f} {ours / theirs:6.2f}"
        )
    return 0


def measure(shape: Shape, repeats: int) -> tuple[float, float, float]:
    """Median seconds a layer: of the reference's verify, of fla from the same inputs, and of its recurrence alone."""
    verify, naive = make_verify(shape), make_naive(shape)
    verify(), naive()
    times = [(verify(), *naive()) for _ in range(repeats)]
    ours, theirs, recurrence = (statistics.median(column) for column in zip(*times, strict=True))
    return ours, theirs, recurrence


def make_verify(shape: Shape) -> Callable[[], float]:
    """A function that verifies one window of every row, commits nothing, and returns the seconds that verify took."""
    rows, heads, k_dim, v_dim, window, pending = shape
    config = make_config(
        num_layers=LAYERS,
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
        verify_all(step, make_inputs(config, rows * query_len, seed=left))
        step.defer(torch.full((rows,), query_len))
        left -= query_len
    for handle in handles:
        assert manager._backend.cursor(handle.record_slot).pending_len == pending
    metadata = StepMetadata(handles=handles, query_lens=(window,) * rows)
    inputs = make_inputs(config, rows * window, seed=0)

    def verify() -> float:
        step = manager.begin_step(metadata)
        start = time.perf_counter()
        verify_all(step, inputs)
        seconds = time.perf_counter() - start
        step.cancel()
        return seconds / LAYERS

    return verify


def make_naive(shape: Shape) -> Callable[[], tuple[float, float]]:
    """A function that runs the same windows through fla-core; the seconds that it took, and the recurrence alone."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that this machine has no GPU
        from fla.ops.kda.gate import naive_kda_gate
        from fla.ops.kda.naive import naive_recurrent_kda

    rows, heads, k_dim, v_dim, window, _ = shape
    generator = torch.Generator().manual_seed(0)

    def normal(*sizes: int) -> torch.Tensor:
        return torch.randn(rows, window, heads, *sizes, generator=generator)

    raw_query, raw_key, value, raw_gate, raw_beta = normal(k_dim), normal(k_dim), normal(v_dim), normal(k_dim), normal()
    a_log, dt_bias = torch.zeros(heads), torch.zeros(heads * k_dim)
    state = torch.randn(rows, heads, k_dim, v_dim, generator=generator)

    def naive() -> tuple[float, float]:
        start = time.perf_counter()
        with torch.no_grad():
            query, key = (x * (x.square().sum(-1, keepdim=True) + 1e-6).rsqrt() for x in (raw_query, raw_key))
            decay, strength = naive_kda_gate(raw_gate, a_log, dt_bias), raw_beta.sigmoid()
            ready = time.perf_counter()
            naive_recurrent_kda(query, key, value, decay, strength, initial_state=state, output_final_state=True)
        end = time.perf_counter()
        return end - start, end - ready

    return naive


if __name__ == "__main__":
    sys.exit(main())
