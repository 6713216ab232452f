"""Your own verify: fla-core's recurrent kernel computes the window, specstate keeps the states.

    python examples/own_verify.py                # on a GPU: Triton backend and kernel; without one: torch throughout

A kernel that does not replay pending records needs three things: `step.flush()`, so that the checkpoints are the
committed states; `step.checkpoint_slots`, to find them; and `step.write_records`, to hand in what a later fold will
read. Windows and counts here are random, and a second manager verifies the same windows itself: outputs, and states
after every step, must agree within `BOUND`. Exit code 1 where they do not, 2 without fla-core.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Sequence

import torch
from torch import Tensor

from kda_inputs import (
    SPEC,
    Tokens,
    convolve,
    difference,
    fla_inputs,
    largest,
    random_params,
    random_tokens,
    report,
    run_script,
)
from specstate import LayerParams, StateConfig, StateManager, StepMetadata
from specstate.step import Step

LAYERS, REQUESTS, STEPS = 2, 3, 12
CONFIG = StateConfig(
    num_layers=LAYERS,
    layer=SPEC,
    max_requests=REQUESTS,
    max_query_len=6,
    fold_policy="ring",
    checkpoint_dtype="float32",
    activation_dtype="float32",
)
BOUND = 1e-5
"""Of two float32 computations in different orders, over `STEPS` windows."""


def own_verify(manager: StateManager, step: Step, layer: int, params: LayerParams, tokens: Tokens) -> Tensor:
    """In place of `step.verify(layer, ...)`, after `step.flush()`: outputs [tokens, H, V]; the records are handed in.

    For steps without padding. Checkpoints are read and not written.
    """
    starts, slots = step.query_start_loc.long(), step.checkpoint_slots.long()
    # Windows side by side, [rows, T, ..]. Shorter ones end in zeros, which no token before them sees.
    row = torch.repeat_interleave(starts.diff(), output_size=step.num_tokens)
    place = torch.arange(step.num_tokens, device=row.device) - starts[row]

    def windows(values: Tensor) -> Tensor:
        padded = values.new_zeros(step.num_rows, manager.config.max_query_len, *values.shape[1:])
        padded[row, place] = values
        return padded

    recurrent, conv = manager.checkpoints(layer)
    state = recurrent[slots]  # [rows, H, V, K]
    q, key, v = convolve(torch.cat([conv[slots].mT, windows(tokens.qkv)], dim=1), params)
    inputs = fla_inputs(q, key, v, windows(tokens.raw_gate), windows(tokens.raw_beta), params)
    output = recurrent_kda(state, inputs)
    u = corrections(state, inputs["k"], inputs["v"], inputs["g"], inputs["beta"])
    # u in float32; the key as it left the convolution, not normalised; gate and conv inputs raw.
    step.write_records(layer, u[row, place], key[row, place], tokens.raw_gate, tokens.qkv)
    return output[row, place]


def recurrent_kda(state: Tensor, inputs: dict[str, Tensor]) -> Tensor:
    """fla-core's recurrence from state [rows, H, V, K]: outputs [rows, T, H, V].

    Not with `ssm_state_indices`, although pool and slots would fit: in that mode the kernel stores the state after
    every token, over the checkpoints. A gathered copy costs one state a row instead of one a token.
    """
    from fla.ops.kda import fused_recurrent_kda
    from fla.ops.kda.naive import naive_recurrent_kda

    if state.is_cuda:
        return fused_recurrent_kda(**inputs, initial_state=state, state_v_first=True)[0]
    return naive_recurrent_kda(**inputs, initial_state=state.mT)[0]


def corrections(state: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
    """u_t = beta_t (v_t - S'_t k_t) [rows, T, H, V], which fla-core's kernel computes but does not hand out.

    With c_t the running sum of g, S'_t k_t = S_0 (e^{c_t} k_t) + sum over s < t of u_s <k_s, e^{c_t - c_s} k_t>, so a
    whole window's u is the solution of one triangular system of T rows. A kernel of one's own would just store its u.
    """
    k, v, c = k.transpose(1, 2), v.transpose(1, 2), g.cumsum(1).transpose(1, 2)  # [rows, H, T, ..]
    beta = beta.transpose(1, 2)[..., None]
    decay = (c[:, :, :, None] - c[:, :, None]).clamp(max=0.0).exp()  # [rows, H, t, s, K]
    weights = (k[:, :, :, None] * decay * k[:, :, None]).sum(-1)
    rest = v - (k * c.exp()) @ state.mT
    u = torch.linalg.solve_triangular(beta * weights, beta * rest, upper=False, unitriangular=True)
    return u.transpose(1, 2)


@torch.no_grad()
def run(device: torch.device) -> dict[str, float]:
    """The largest differences between a manager with this file's verify and one with its own."""
    params = random_params(LAYERS, device)
    backend = "triton" if device.type == "cuda" else "reference"
    manager, other = (StateManager(CONFIG, params, device=device, backend=backend) for _ in range(2))
    handles, other_handles = (tuple(m.admit(str(i)) for i in range(REQUESTS)) for m in (manager, other))
    choose = random.Random(0)
    differences: dict[str, list[float]] = {"outputs": [], "states": []}

    for number in range(STEPS):
        lengths = tuple(choose.randint(1, CONFIG.max_query_len) for _ in handles)
        accepted = torch.tensor([choose.randint(1, n) for n in lengths], dtype=torch.int32).to(device)
        tokens = random_tokens(LAYERS, sum(lengths), device, torch.float32, seed=number)

        step = manager.begin_step(StepMetadata(handles=handles, query_lens=lengths))
        step.flush()
        before = [recurrent.clone() for recurrent, _ in map(manager.checkpoints, range(LAYERS))]
        outputs = [own_verify(manager, step, layer, params[layer], tokens[layer]) for layer in range(LAYERS)]
        if not all(torch.equal(manager.checkpoints(layer)[0], then) for layer, then in enumerate(before)):
            raise RuntimeError(f"own_verify wrote to a checkpoint in step {number}")
        step.defer(accepted)

        step = other.begin_step(StepMetadata(handles=other_handles, query_lens=lengths))
        for layer in range(LAYERS):
            differences["outputs"].append(difference(outputs[layer], step.verify(layer, *tokens[layer])))
        step.defer(accepted)
        for mine, its in zip(handles, other_handles, strict=True):
            for layer in range(LAYERS):
                got, want = manager.read(mine, layer), other.read(its, layer)
                differences["states"].append(difference(got.recurrent, want.recurrent))
    return largest(differences)


def main(argv: Sequence[str] | None = None) -> int:
    device = run_script("own_verify.py", "fla-core's recurrent kernel as verify", argv)
    return 2 if device is None else report(run(device), BOUND)


if __name__ == "__main__":
    sys.exit(main())
