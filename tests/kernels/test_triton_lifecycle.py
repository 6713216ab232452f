"""The manager over the Triton kernels: every order of transitions, golden traces, and no wait for the device."""

import os
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
import triton
from hypothesis import HealthCheck, settings

from specstate import SamplingParams, StateManager, StepMetadata
from specstate.kernels import portable
from specstate.replay import replay_file
from tests.factories import POLICIES, make_inputs, make_manager, make_params, make_twin, run_step, verify_all
from tests.kernels.harness import AIM, small_config
from tests.test_lifecycle import Lifecycle

#: Traces that the interpreter replays in seconds; all others wait for a GPU.
QUICK = (
    "class02_counts_out_of_range_ring",
    "class05_padding_eager",
    "class13_cancel_deferred",
    "class13_new_parameters_deferred",
    "class13_written_records_ring",
)
TRACES = [
    pytest.param(path, id=path.stem, marks=() if path.stem in QUICK else pytest.mark.gpu)
    for path in sorted((Path(__file__).parents[1] / "traces").glob("*.jsonl"))
]
ON_GPU = torch.cuda.is_available()


class TritonLifecycle(Lifecycle):
    """The machine of tests/test_lifecycle.py; outputs of one head's token may nearly cancel, so that 1e-5 can show."""

    backend = "triton"
    device = "cuda" if ON_GPU else "cpu"
    sizes: ClassVar[dict[str, Any]] = {
        "head_k_dim": 16,
        "head_v_dim": 16,
        "checkpoint_dtype": "float32",
        "activation_dtype": "float32",
    }
    tolerance = 1e-4


class TestTritonLifecycle(TritonLifecycle.TestCase):
    """Few examples under the interpreter; SPECSTATE_TRITON_EXAMPLES asks for more."""

    settings = settings(
        max_examples=int(os.environ.get("SPECSTATE_TRITON_EXAMPLES", "100" if ON_GPU else "8")),
        stateful_step_count=20 if ON_GPU else 12,
        suppress_health_check=list(HealthCheck),
        deadline=None,
    )


@pytest.mark.parametrize("trace", TRACES)
def test_golden_traces(trace: Path) -> None:
    report = replay_file(trace, backend="triton")
    assert report.first_difference is None
    assert report.ok and report.events > 0


def test_the_quick_traces_exist() -> None:
    assert set(QUICK) <= {trace.id for trace in TRACES}


@pytest.mark.parametrize("policy", POLICIES)
def test_sampled_steps_until_the_end(policy: str, device: str) -> None:
    """sample, defer, finish: what the device decides itself equals the reference, step by step."""
    config = small_config(fold_policy=policy, conv_kernel_size=4, max_requests=3)
    managers = [make_manager(config, device, backend=name, debug=False) for name in ("triton", "reference")]
    handles = [[manager.admit(name, SamplingParams(end_token_ids=(3, 5))) for name in "abc"] for manager in managers]
    for seed in range(6):
        inputs = make_inputs(config, 9, seed, device)
        generator = torch.Generator().manual_seed(seed)
        logits = torch.randn(9, 7, generator=generator).to(device)
        drafts = logits.argmax(-1).roll(1)
        results, counters = [], []
        for manager, rows in zip(managers, handles, strict=True):
            step = manager.begin_step(StepMetadata(handles=tuple(rows), query_lens=(4, 3, 2)))
            verify_all(step, inputs)
            result = step.sample(logits, drafts)
            step.defer(result)
            names = ("num_accepted", "tokens", "next_token", "finished")
            results.append([getattr(result, name).tolist() for name in names])
            counters.append((manager.counters(), [manager.committed_len(handle) for handle in rows]))
        assert results[0] == results[1]
        assert counters[0] == counters[1]
    assert counters[0][0].wasted_windows > 0


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("taps", [None, 3])
def test_steps_against_the_twin(taps: int | None, policy: str, device: str) -> None:
    """Rows in changing order and number, widths 1 to T, deferred and committed, checked after every step."""
    config = small_config(fold_policy=policy, conv_kernel_size=taps, num_layers=2, max_requests=3, record_capacity=9)
    manager = make_manager(config, device, backend="triton")
    rows = [(manager.admit(name), make_twin(config)) for name in "abc"]
    plan = [
        [(0, 4, 3), (1, 1, 1), (2, 4, 4)],
        [(2, 1, 1), (0, 4, 4)],
        [(1, 3, 2)],
        [(1, 4, 1), (2, 4, 2), (0, 2, 2)],
        [(0, 1, 1), (1, 4, 4)],
    ]
    for seed, windows in enumerate(plan):
        chosen = [(*rows[i], query_len, accepted) for i, query_len, accepted in windows]
        run_step(manager, chosen, seed, 10 * AIM, "commit" if seed == 3 else "defer")
    manager.flush()
    for handle, twin in rows:
        twin.check(manager, handle, 10 * AIM)


class FailedLaunch:
    """In place of a kernel: its launch finds no memory."""

    def __getitem__(self, grid: object) -> None:
        raise torch.OutOfMemoryError("out of memory")


@pytest.mark.parametrize("kernel", ["conv_kernel", "verify_kernel"])
@pytest.mark.parametrize("layer", [0, 1])
def test_a_launch_that_fails_can_be_cancelled(
    layer: int, kernel: str, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also between the two launches of a layer, of which the first writes conv histories and the second folds."""
    config = small_config(fold_policy="deferred", conv_kernel_size=3, num_layers=2)
    manager, twin = make_manager(config, device, backend="triton", debug=False), make_twin(config)
    handle = manager.admit("a")
    run_step(manager, [(handle, twin, 3, 2)], seed=1, tolerance=10 * AIM)
    step = manager.begin_step(StepMetadata(handles=(handle,), query_lens=(2,)))
    inputs = make_inputs(config, 2, seed=2, device=device)
    for index in range(layer):
        step.verify(index, inputs[index].qkv, inputs[index].raw_gate, inputs[index].raw_beta)
    with monkeypatch.context() as patch:
        patch.setattr(portable, kernel, FailedLaunch())
        with pytest.raises(torch.OutOfMemoryError):
            step.verify(layer, inputs[layer].qkv, inputs[layer].raw_gate, inputs[layer].raw_beta)
    step.cancel()
    twin.check(manager, handle, 10 * AIM)
    run_step(manager, [(handle, twin, 4, 4)], seed=3, tolerance=10 * AIM)


@pytest.mark.gpu
@pytest.mark.parametrize("policy", POLICIES)
def test_a_hundred_steps_wait_for_nothing(policy: str, device: str) -> None:
    """Admission, steps of changing shape with sampling and every end but a read: no synchronisation of the host."""
    config = small_config(
        fold_policy=policy, conv_kernel_size=4, num_layers=2, num_heads=2, max_requests=8, activation_dtype="bfloat16"
    )
    manager = StateManager(config, make_params(config, device=device), device, backend="triton")
    handles = [manager.admit(f"{i}") for i in range(8)]
    shapes = [tuple(1 + (i + n) % 4 for i in range(n)) for n in range(1, 9)]
    inputs = {lens: make_inputs(config, sum(lens), 0, device) for lens in shapes}
    logits = {lens: torch.randn(sum(lens), 32, device=device) for lens in shapes}
    drafts = {lens: torch.zeros(sum(lens), dtype=torch.int64, device=device) for lens in shapes}
    counts = {lens: torch.ones(len(lens), dtype=torch.int32, device=device) for lens in shapes}
    eager = {lens: torch.ones(len(lens), dtype=torch.bool, device=device) for lens in shapes}

    def decode(index: int) -> None:
        lens = shapes[index % 8]
        step = manager.begin_step(StepMetadata(handles=tuple(handles[: len(lens)]), query_lens=lens))
        if index % 7 == 6:
            step.flush()
        verify_all(step, inputs[lens])
        if index % 5 == 0:
            step.defer(step.sample(logits[lens], drafts[lens]))
        elif index % 5 == 1:
            step.commit(counts[lens])
        elif index % 5 == 2:
            step.defer(counts[lens], eager=eager[lens])
        elif index % 5 == 3:
            step.cancel()
        else:
            step.defer(counts[lens])
        if index % 10 == 9:
            manager.flush()

    for index in range(40):  # compiles every variant, which may wait
        decode(index)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for index in range(100):
            decode(index)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    manager.check_integrity()


@pytest.mark.gpu
@pytest.mark.parametrize("policy", POLICIES)
def test_nothing_compiles_after_warmup(policy: str, device: str) -> None:
    """Steps of 1, 2, 16 and 17 rows, padded and not, inputs as slices, every end: all of it was compiled before."""
    # A shape that no other test has, so that nothing is cached in this process already.
    config = small_config(
        fold_policy=policy, conv_kernel_size=4, head_k_dim=40, max_requests=17, activation_dtype="bfloat16"
    )
    manager = StateManager(config, make_params(config, device=device), device, backend="triton")
    handles = tuple(manager.admit(f"{i}") for i in range(17))
    manager.warmup()
    compiled: list[str] = []
    before = triton.knobs.runtime.jit_post_compile_hook
    triton.knobs.runtime.jit_post_compile_hook = lambda **what: compiled.append(str(what.get("repr")))
    try:
        for rows in (1, 2, 16, 17):
            for verb, pad in (("defer", 0), ("commit", 3), ("sample", 1), ("cancel", 0)):
                tokens = 2 * rows + pad
                [inputs] = make_inputs(config, tokens, rows, device)
                wide = torch.cat([inputs.qkv, inputs.qkv[:, :3]], 1)[:, 1 : 1 + inputs.qkv.shape[1]]
                metadata = StepMetadata(handles=handles[:rows], query_lens=(2,) * rows)
                step = manager.begin_step(metadata, pad_to=(rows + pad, tokens))
                step.verify(0, wide, inputs.raw_gate, inputs.raw_beta)
                counts = torch.ones(rows, dtype=torch.int32, device=device)
                if verb == "sample":
                    logits = torch.randn(tokens, 50, device=device)
                    step.defer(step.sample(logits, torch.zeros(tokens, dtype=torch.int64, device=device)))
                elif verb == "cancel":
                    step.cancel()
                else:
                    step.defer(counts) if verb == "defer" else step.commit(counts)
        manager.flush()
    finally:
        triton.knobs.runtime.jit_post_compile_hook = before
    assert compiled == []
