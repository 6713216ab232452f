"""Times whole steps of the portable kernels under CUDA graphs, beside a copy of the same states.

    python -m tests.kernels.bench_portable

Kimi K3 on one of eight ranks: H = 12, K = V = 128, conv 4, windows of 8, bf16 activations, float32 checkpoints,
default record capacities. A step verifies 16 layers, samples nothing, advances the cursors and folds what is due;
accepted counts are drawn from 1..8 anew for each step, so that the ring cycles. Medians of 60 replays; the states of
one step exceed the L2 from 8 rows on.
"""

import statistics
import sys

import torch

from specstate import StateManager, StepMetadata
from tests.factories import POLICIES, make_config, make_inputs, make_params, verify_all

LAYERS, WINDOW, REPLAYS = 16, 8, 60


def main() -> int:
    properties = torch.cuda.get_device_properties(0)
    print(f"{properties.name}, torch {torch.__version__}, {LAYERS} layers, medians of {REPLAYS} replays")
    print(f"{'policy':>9} {'rows':>5} {'step ms':>8} {'us a layer':>11} {'copying states ms':>18} {'folds a step':>13}")
    for policy in POLICIES:
        for rows in (1, 8, 32, 128):
            step, folds, copy = measure(policy, rows)
            layer = step / LAYERS * 1e3
            print(f"{policy:>9} {rows:5} {step:8.3f} {layer:11.1f} {copy:18.3f} {folds:13.2f}", flush=True)
    return 0


def measure(policy: str, rows: int) -> tuple[float, float, float]:
    """Median milliseconds of a step, folds a row and step, and milliseconds of copying the states once."""
    config = make_config(
        num_layers=LAYERS,
        num_heads=12,
        head_k_dim=128,
        head_v_dim=128,
        gate_lower_bound=-5.0,
        max_requests=rows,
        max_query_len=WINDOW,
        fold_policy=policy,
        checkpoint_dtype="float32",
        activation_dtype="bfloat16",
    )
    manager = StateManager(config, make_params(config, device="cuda"), device="cuda", backend="triton")
    handles = tuple(manager.admit(str(row)) for row in range(rows))
    tokens = rows * WINDOW
    inputs = make_inputs(config, tokens, seed=0, device="cuda")
    counts = torch.ones(rows, dtype=torch.int32, device="cuda")
    manager.warmup()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = manager.capture_step(rows, tokens)
        verify_all(captured, inputs)
        captured.defer(counts)
    metadata = StepMetadata(handles=handles, query_lens=(WINDOW,) * rows)
    times, folds, before = [], 0, [0] * rows
    for replay in range(REPLAYS + 10):
        counts.random_(1, WINDOW + 1)
        step = manager.begin_step(metadata, pad_to=(rows, tokens))
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        step.replayed("defer")
        end.synchronize()
        now = [manager._backend.cursor(handle.record_slot).checkpoint_len for handle in handles]
        if replay >= 10:
            times.append(start.elapsed_time(end))
            folds += sum(a != b for a, b in zip(now, before, strict=True))
        before = now
    return statistics.median(times), folds / rows / REPLAYS, copy_milliseconds(manager)


def copy_milliseconds(manager: StateManager) -> float:
    """Median milliseconds of copying every layer's recurrent states."""
    states = [manager.checkpoints(layer)[0] for layer in range(LAYERS)]
    copies = [torch.empty_like(state) for state in states]
    times = []
    for _ in range(20):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for state, copy in zip(states, copies, strict=True):
            copy.copy_(state)
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return statistics.median(times)


if __name__ == "__main__":
    sys.exit(main())
