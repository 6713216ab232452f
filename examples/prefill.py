"""Your own prefill: fla-core's chunked kernel reads and writes specstate's checkpoint slots, then decoding goes on.

    python examples/prefill.py               # on a GPU: chunk_kda, bf16, Triton backend; without one: torch in float32

`manager.checkpoints(layer)` is the storage itself. Chunk by chunk a prompt starts from its slot's state and leaves its
end state and conv history there; `manager.load(handle, None, committed_len=n)` then says how far it came. A second
manager takes the same prompts in "prompt" rows of its own verify: outputs and states must agree within `BOUND`, and so
must those of the decode steps that follow. Exit code 1 where they do not, 2 without fla-core.
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
from specstate import Handle, LayerParams, StateConfig, StateManager, StepMetadata
from specstate.step import Step

LAYERS, WINDOW, DECODE_STEPS = 2, 8, 6
PROMPT_LENS, CHUNK = (150, 70), 64
"""The last chunk of a prompt may have any length: here 22 and 6."""
DTYPE = {"cuda": torch.bfloat16, "cpu": torch.float32}
"""Of activations: `chunk_kda` is made for bf16; on a CPU the bound can be tight."""
BOUND = {"cuda": 2e-2, "cpu": 1e-5}
"""bf16 rounds by up to 4e-3, and `chunk_kda` rounds keys, values and products of a chunk one after another."""


def prefill(
    manager: StateManager, handle: Handle, params: Sequence[LayerParams], prompt: Sequence[Tokens]
) -> list[Tensor]:
    """Takes a whole prompt (per layer) into the request's checkpoint slot: outputs [tokens, H, V] of every layer."""
    slot = int(manager.checkpoint_slots([handle]))
    history_len = SPEC.conv_kernel_size - 1
    length = len(prompt[0].qkv)
    outputs: list[list[Tensor]] = [[] for _ in prompt]
    for start in range(0, length, CHUNK):
        for layer, tokens in enumerate(prompt):
            recurrent, conv = (storage[slot] for storage in manager.checkpoints(layer))  # views [H, V, K], [C, W-1]
            chunk = tokens.part(start, start + CHUNK)
            conv_inputs = torch.cat([conv.mT, chunk.qkv])  # [W-1 + tokens, C]
            q, k, v = convolve(conv_inputs, params[layer])
            output, state = chunked_kda(recurrent, fla_inputs(q, k, v, chunk.raw_gate, chunk.raw_beta, params[layer]))
            recurrent.copy_(state)
            conv.copy_(conv_inputs[-history_len:].mT)
            outputs[layer].append(output)
    manager.load(handle, None, committed_len=length)
    return [torch.cat(parts) for parts in outputs]


def chunked_kda(state: Tensor, inputs: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """One sequence's chunk, inputs [tokens, H, ..], from state [H, V, K]: outputs [tokens, H, V] and the end state.

    fla-core's states are [K, V] unless `state_v_first`, which specstate's are; its torch kernel knows [K, V] alone.
    """
    from fla.ops.kda import chunk_kda
    from fla.ops.kda.naive import naive_recurrent_kda

    inputs = {name: x[None] for name, x in inputs.items()}
    if state.is_cuda:
        for name in ("q", "k", "v"):  # decays and beta stay float32
            inputs[name] = inputs[name].to(DTYPE["cuda"])
        output, state = chunk_kda(**inputs, initial_state=state[None], output_final_state=True, state_v_first=True)
        return output[0], state[0]
    output, state = naive_recurrent_kda(**inputs, initial_state=state[None].mT, output_final_state=True)
    return output[0], state[0].mT


def verify(step: Step, tokens: Sequence[Tokens], num_accepted: Sequence[int]) -> list[Tensor]:
    """A whole step: outputs [tokens, H, V] of every layer, float32."""
    shape = step.num_tokens, SPEC.num_heads, SPEC.head_v_dim
    outputs = []
    for layer, given in enumerate(tokens):
        outputs.append(step.verify(layer, *given, out=torch.empty(shape, device=given.qkv.device)))
    step.defer(torch.tensor(num_accepted, dtype=torch.int32).to(outputs[0].device))
    return outputs


def prompt_rows(manager: StateManager, handle: Handle, prompt: Sequence[Tokens]) -> list[Tensor]:
    """What `prefill` does, by the manager's own verify: windows of which every token is accepted."""
    outputs: list[list[Tensor]] = [[] for _ in prompt]
    for start in range(0, len(prompt[0].qkv), WINDOW):
        window = [tokens.part(start, start + WINDOW) for tokens in prompt]
        length = len(window[0].qkv)
        meta = StepMetadata(handles=(handle,), query_lens=(length,), row_kinds=("prompt",))
        for parts, output in zip(outputs, verify(manager.begin_step(meta), window, [length]), strict=True):
            parts.append(output)
    return [torch.cat(parts) for parts in outputs]


@torch.no_grad()
def run(device: torch.device) -> dict[str, float]:
    """The largest differences between a manager prefilled by fla-core and one prefilled by its own verify."""
    dtype, params = DTYPE[device.type], random_params(LAYERS, device)
    config = StateConfig(
        num_layers=LAYERS,
        layer=SPEC,
        max_requests=len(PROMPT_LENS),
        max_query_len=WINDOW,
        fold_policy="ring",
        checkpoint_dtype="float32",
        activation_dtype=str(dtype).removeprefix("torch."),
    )
    backend = "triton" if device.type == "cuda" else "reference"
    managers = [StateManager(config, params, device=device, backend=backend) for _ in range(2)]
    handles = [tuple(manager.admit(str(i)) for i in range(len(PROMPT_LENS))) for manager in managers]
    found: dict[str, list[float]] = {}

    def compare(stage: str, outputs: Sequence[list[Tensor]]) -> None:
        for layer in range(LAYERS):
            found.setdefault(f"outputs of {stage}", []).append(difference(outputs[0][layer], outputs[1][layer]))
            for pair in zip(*handles, strict=True):
                states = [m.read(handle, layer).recurrent for m, handle in zip(managers, pair, strict=True)]
                found.setdefault(f"states after {stage}", []).append(difference(*states))

    prompts = [random_tokens(LAYERS, n, device, dtype, seed=i) for i, n in enumerate(PROMPT_LENS)]
    by_fla = [prefill(managers[0], handle, params, prompt) for handle, prompt in zip(handles[0], prompts, strict=True)]
    by_rows = [prompt_rows(managers[1], handle, prompt) for handle, prompt in zip(handles[1], prompts, strict=True)]
    for outputs in zip(by_fla, by_rows, strict=True):
        compare("the prompts", outputs)

    choose = random.Random(0)
    for number in range(DECODE_STEPS):
        lengths = tuple(choose.randint(1, WINDOW) for _ in PROMPT_LENS)
        accepted = [choose.randint(1, n) for n in lengths]
        tokens = random_tokens(LAYERS, sum(lengths), device, dtype, seed=100 + number)
        metas = [StepMetadata(handles=own, query_lens=lengths) for own in handles]
        steps = [manager.begin_step(meta) for manager, meta in zip(managers, metas, strict=True)]
        compare("the decode steps", [verify(step, tokens, accepted) for step in steps])
    return largest(found)


def main(argv: Sequence[str] | None = None) -> int:
    device = run_script("prefill.py", "fla-core's chunked kernel as prefill", argv)
    return 2 if device is None else report(run(device), BOUND[device.type])


if __name__ == "__main__":
    sys.exit(main())
