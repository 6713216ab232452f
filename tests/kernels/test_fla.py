"""The reference and the oracle against fla-core on a CPU: recurrence and gates that nobody here wrote."""

import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from specstate import LayerParams, StateConfig, StateManager, StepMetadata
from specstate.kernels.reference import log_decay
from specstate.oracle import Oracle
from tests.factories import POLICIES, LayerInputs, make_config, make_inputs, make_params, relative_error
from tests.kernels.bench_reference import Shape, measure

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # fla warns when a machine has no GPU
    pytest.importorskip("fla", reason="fla-core is not installed")
    from fla.ops.kda.gate import naive_kda_gate, naive_kda_lowerbound_gate
    from fla.ops.kda.naive import naive_recurrent_kda

#: float32 unit roundoff.
ROUNDOFF = 2.0**-24
GATES = [pytest.param(None, id="softplus gate"), pytest.param(-5.0, id="bounded gate")]
SHAPES = [
    pytest.param({"num_heads": 2, "head_k_dim": 16, "head_v_dim": 16}, id="2 x 16 x 16"),
    pytest.param({"num_heads": 3, "head_k_dim": 8, "head_v_dim": 24}, id="3 heads, K 8, V 24"),
    pytest.param({"num_heads": 1, "head_k_dim": 33, "head_v_dim": 7}, id="1 head, K 33, V 7"),
]


def budget(tokens: int) -> float:
    """Relative error that two float32 recurrences of ``tokens`` tokens may differ by.

    A token rounds each element of the state three times (decay, correction, sum) and its dot products a few times more,
    in both implementations; decays below 1 keep earlier errors from growing, so 16 roundings a token bound it.
    """
    return 16 * tokens * ROUNDOFF


def float32_config(**changes: Any) -> StateConfig:
    return make_config(**{"checkpoint_dtype": "float32", "activation_dtype": "float32", "num_layers": 1, **changes})


def run_fla(
    config: StateConfig, params: LayerParams, inputs: LayerInputs
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Outputs [tokens, H, V], state [H, V, K] and conv history [C, W-1] of one sequence from the zero state."""
    spec = config.layer
    mixed, history = inputs.qkv, inputs.qkv[:0].T
    if params.conv_weight is not None:
        taps = params.conv_weight.shape[1]
        padded = F.pad(inputs.qkv.T, (taps - 1, 0))
        history = padded[:, padded.shape[1] - (taps - 1) :]
        mixed = F.silu(F.conv1d(padded[None], params.conv_weight[:, None], params.conv_bias, groups=len(padded))[0].T)
    heads, k_dim = spec.num_heads, spec.head_k_dim
    query, key, value = mixed.split([heads * k_dim, heads * k_dim, heads * spec.head_v_dim], -1)
    query, key = (x.unflatten(-1, (heads, k_dim)) for x in (query, key))
    query, key = (x * torch.rsqrt(x.pow(2).sum(-1, keepdim=True) + 1e-6) for x in (query, key))
    output, state = naive_recurrent_kda(
        query[None],
        key[None],
        value.unflatten(-1, (heads, -1))[None],
        fla_gate(config, params, inputs.raw_gate)[None],
        inputs.raw_beta.sigmoid()[None],
        output_final_state=True,
    )
    return output[0], state[0].mT, history


def fla_gate(config: StateConfig, params: LayerParams, raw_gate: torch.Tensor) -> torch.Tensor:
    bound, bias = config.layer.gate_lower_bound, params.dt_bias.flatten()
    if bound is None:
        return naive_kda_gate(raw_gate, params.A_log, bias)
    return naive_kda_lowerbound_gate(raw_gate, params.A_log, bias, lower_bound=bound)


def run_manager(
    config: StateConfig, params: LayerParams, inputs: LayerInputs, windows: list[tuple[int, int]]
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """The same through speculative steps: (query_len, num_accepted) windows take in the tokens one after another."""
    manager = StateManager(config, [params], debug=True)
    handle = manager.admit("a")
    outputs, start = [], 0
    for query_len, accepted in windows:
        # What lies behind the accepted tokens is a draft that will be rejected: any other token.
        window = inputs[start : start + accepted]
        drafts = make_inputs(config, query_len - accepted, seed=1000 + start)[0]
        qkv, gate, beta = (
            torch.cat([getattr(window, name), getattr(drafts, name)]) for name in ("qkv", "raw_gate", "raw_beta")
        )
        step = manager.begin_step(StepMetadata(handles=(handle,), query_lens=(query_len,)))
        output = step.verify(0, qkv, gate, beta)
        assert output is not None
        outputs.append(output[:accepted])
        step.defer(torch.tensor([accepted]))
        start += accepted
    assert start == len(inputs.qkv)
    state = manager.read(handle, 0)
    return torch.cat(outputs), state.recurrent, state.conv


WINDOWS = [(4, 4), (4, 1), (1, 1), (3, 2), (4, 3), (2, 2), (4, 4), (4, 2), (1, 1), (4, 4)]
TOKENS = sum(accepted for _, accepted in WINDOWS)


@pytest.mark.parametrize("bound", GATES)
@pytest.mark.parametrize("taps", [None, 2, 4])
@pytest.mark.parametrize("shape", SHAPES)
def test_reference_equals_fla(shape: dict[str, int], taps: int | None, bound: float | None) -> None:
    for policy in POLICIES:
        config = float32_config(**shape, conv_kernel_size=taps, gate_lower_bound=bound, fold_policy=policy)
        params, inputs = make_params(config)[0], make_inputs(config, TOKENS, seed=7)[0]
        wanted, state, history = run_fla(config, params, inputs)
        got, recurrent, conv = run_manager(config, params, inputs, WINDOWS)
        assert relative_error(got, wanted) < budget(TOKENS), policy
        assert relative_error(recurrent, state) < budget(TOKENS), policy
        assert conv is None or torch.equal(conv, history), policy


@pytest.mark.parametrize("bound", GATES)
@pytest.mark.parametrize("taps", [None, 4])
def test_oracle_equals_fla(taps: int | None, bound: float | None) -> None:
    config = float32_config(conv_kernel_size=taps, gate_lower_bound=bound)
    params, inputs = make_params(config)[0], make_inputs(config, 30, seed=8)[0]
    wanted, last_state, history = run_fla(config, params, inputs)
    oracle = Oracle(config, (params,))
    state, outputs = oracle.zero(), []
    for t in range(30):
        token = oracle.token(0, state, inputs.qkv[t], inputs.raw_gate[t], inputs.raw_beta[t])
        state = token.state
        outputs.append(token.output)
    assert relative_error(torch.stack(outputs), wanted) < budget(30)
    assert relative_error(state.recurrent, last_state) < budget(30)
    assert taps is None or relative_error(state.conv, history) == 0.0


@pytest.mark.parametrize("bound", [*GATES, pytest.param(-0.1, id="narrow bound")])
def test_gates_equal_fla(bound: float | None) -> None:
    config = float32_config(num_heads=3, head_k_dim=50, gate_lower_bound=bound)
    params = make_params(config)[0]
    usual = torch.randn(40, 3, 50, generator=torch.Generator().manual_seed(3)) * 3
    extreme = torch.tensor([-1e4, -90.0, -20.0, 0.0, 20.0, 90.0, 1e4])[:, None, None].expand(7, 3, 50)
    for raw_gate in (usual, extreme):
        got, wanted = log_decay(raw_gate, params, bound), fla_gate(config, params, raw_gate)
        # exp, softplus or sigmoid, and two products: a few roundings each side, of values as they are.
        torch.testing.assert_close(got, wanted, rtol=32 * ROUNDOFF, atol=1e-37)
        assert got.isfinite().all()


def test_reference_is_no_slower_than_fla() -> None:
    """At the shape of Kimi K3 on one of eight ranks, eight rows; bench_reference.py has the terms and other shapes."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # two pools that wait for each other's cores measure nothing
    try:
        # A busy machine slows one call or the other down: the best of a few tries is the one with the least noise.
        ratios = []
        for _ in range(5):
            ours, theirs, _ = measure(Shape(rows=8, heads=12, k_dim=128, v_dim=128, window=8, pending=8), repeats=3)
            ratios.append(ours / theirs)
            if ratios[-1] <= 1.0:
                break
    finally:
        torch.set_num_threads(threads)
    assert min(ratios) <= 1.0
