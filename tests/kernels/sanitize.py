"""Every kernel a few times over on a GPU, small and without pytest, for a memory checker to watch.

compute-sanitizer --tool memcheck python -m tests.kernels.sanitize
compute-sanitizer --tool racecheck python -m tests.kernels.sanitize hopper
"""

import sys

import torch

from specstate import PrefixKey, SamplingParams, StepMetadata
from tests.factories import POLICIES, make_config, make_inputs, make_manager, make_twin, run_step, verify_all, widened


def main(path: str = "portable") -> int:
    for policy in POLICIES:
        config = make_config(
            path=path,
            fold_policy=policy,
            max_query_len=6,
            gate_lower_bound=None if policy == "eager" else -5.0,
            **widened(path, head_k_dim=24, head_v_dim=40),
            checkpoint_dtype="float32",
            activation_dtype="bfloat16" if policy == "ring" else "float32",
        )
        manager = make_manager(config, "cuda", backend="triton", debug=False)
        tolerance = 3e-2 if policy == "ring" else 1e-5
        noisy = SamplingParams(temperature=0.9, top_k=40, top_p=0.9, seed=5, end_token_ids=(7,))
        a, b = manager.admit("a", noisy), manager.admit("b")
        twins = make_twin(config), make_twin(config)
        for seed in range(4):
            run_step(manager, [(a, twins[0], 4, 1 + seed % 4), (b, twins[1], 2, 1)], seed, tolerance)
        manager.flush()
        # Padding, a dummy row, sampling, a cancel between layers, records of the caller's own.
        metadata = StepMetadata(handles=(a, None), query_lens=(3, 2), row_kinds=("decode", "dummy"))
        inputs = make_inputs(config, 8, 9, "cuda")
        step = manager.begin_step(metadata, pad_to=(4, 8))
        verify_all(step, inputs)
        logits, drafts = torch.randn(8, 1500, device="cuda"), torch.zeros(8, dtype=torch.int64, device="cuda")
        step.sample(logits, drafts, torch.softmax(logits.flip(0), 1))
        step.defer(step.sample(logits, drafts))
        step = manager.begin_step(metadata, pad_to=(4, 8))
        step.verify(1, inputs[1].qkv, inputs[1].raw_gate, inputs[1].raw_beta)
        step.cancel()
        step = manager.begin_step(metadata, pad_to=(4, 8))
        step.flush()
        for layer, tensors in enumerate(inputs):
            u = torch.randn(8, 2, config.layer.head_v_dim, device="cuda")
            step.write_records(layer, u, torch.randn_like(tensors.raw_gate), tensors.raw_gate, tensors.qkv)
        step.commit(torch.tensor([2, 0], device="cuda"))
        manager.check_integrity()
        print(policy, "done", flush=True)
        for tabled in (False, True):
            boundaries(path, policy, tabled)
        print(policy, "with boundaries done", flush=True)
    return 0


def boundaries(path: str, policy: str, tabled: bool) -> None:
    """Boundary checkpoints in own slots or by a table, wrong entries among them; then publish, restore and the like."""
    config = make_config(
        path=path,
        fold_policy=policy,
        max_requests=5,
        num_checkpoints=24,
        **widened(path, head_k_dim=24, head_v_dim=40),
        checkpoint_dtype="float32",
        activation_dtype="float32",
        block_size=5,
    )
    manager = make_manager(config, "cuda", backend="triton", debug=False)
    handles = [manager.admit(name) for name in "abc"]
    lens = [0, 0, 0]
    lines = torch.tensor(manager.reserve_checkpoints(12), dtype=torch.int32, device="cuda").view(3, 4)
    lines[0, 1], lines[1, 2], lines[2, 0] = 0, 25, -3
    for seed in range(8):
        positions = torch.tensor([*lens[::-1], 0, 0, 0], dtype=torch.int32, device="cuda")[::2] if seed == 3 else None
        if positions is None:
            positions = torch.tensor(lens, dtype=torch.int32, device="cuda")
        blocks = {"block_table": lines[:, : 2 + seed % 3], "positions": positions} if tabled else {}
        metadata = StepMetadata(handles=(*handles, None), query_lens=(4, 3, 2, 1), row_kinds=(*["decode"] * 3, "dummy"))
        step = manager.begin_step(metadata, pad_to=(6, 12), **blocks)
        verify_all(step, make_inputs(config, 12, seed, "cuda"))
        step.defer(torch.tensor([1 + seed % 4, 3, 2, 0], device="cuda"))
        lens = [manager.committed_len(handle) for handle in handles]
    manager.publish(handles[1], PrefixKey("b", lens[1]))
    manager.restore(PrefixKey("b", lens[1]), "restored")
    manager.fork(handles[0], ["fork"])
    manager.preempt(handles[0])
    manager.retract(handles[2])
    manager.fence("flush")
    manager.resume("a")
    manager.resume("c")
    manager.check_integrity()


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
