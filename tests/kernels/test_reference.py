"""The reference kernels against the token-serial oracle in float64, to an error budget that is derived, not tuned."""

import dataclasses
import math
import random
from typing import Any

import pytest
import torch

from specstate import LayerParams, StateConfig, StateManager, StepMetadata
from specstate.kernels.reference import NORM_EPS, inverse_norm, log_decay
from specstate.metadata import Handle
from specstate.oracle import Oracle
from specstate.validation import DTYPES
from tests.factories import (
    POLICIES,
    LayerInputs,
    Twin,
    fingerprint,
    make_config,
    make_inputs,
    make_params,
    raw_bytes,
    relative_error,
    verify_all,
)

#: Unit roundoff, the largest relative error of rounding once.
ROUNDOFF = {"float64": 2.0**-53, "float32": 2.0**-24, "float16": 2.0**-11, "bfloat16": 2.0**-8}

GATES = [pytest.param(None, id="softplus gate"), pytest.param(-5.0, id="bounded gate")]


def budget(config: StateConfig, tokens: int, folds: int) -> float:
    """Relative error, in the norm of a head's row, that the state may have after ``tokens`` tokens.

    Arithmetic: a token rounds each element of the state three times and its dot products a few times more, decays below
    1 let nothing grow; 16 roundings a token bound it. Activations behind a conv: the oracle rounds q, k and v too, but
    may round a value that lies between two neighbours the other way: one rounding for each of the three. Checkpoints of
    few bits: each fold rounds the state once, and the corrections that follow feed half of it back.
    """
    compute = "float64" if config.checkpoint_dtype == "float64" else "float32"
    error = 16 * tokens * ROUNDOFF[compute]
    if config.layer.conv_kernel_size is not None and config.activation_dtype != compute:
        error += 3 * ROUNDOFF[config.activation_dtype]
    if config.checkpoint_dtype == "bfloat16":
        error += 1.5 * folds * ROUNDOFF["bfloat16"]
    return error


class Pair:
    """A manager with some requests and, for each, its twin; windows of both are compared token by token."""

    def __init__(self, config: StateConfig, params: list[LayerParams] | None = None, requests: int = 2) -> None:
        params = params or make_params(config)
        self.config, self.manager = config, StateManager(config, params, debug=True)
        self.handles = [self.manager.admit(str(i)) for i in range(requests)]
        self.twins = [Twin(Oracle(config, tuple(params)), config.num_layers) for _ in range(requests)]
        self.tokens = self.steps = 0
        self.worst_output = self.worst_state = 0.0

    def step(self, windows: list[tuple[int, int, int]], seed: int) -> None:
        """One step of (request, query_len, num_accepted) rows, with float outputs, ended by defer."""
        lens = tuple(query_len for _, query_len, _ in windows)
        rows = tuple(self.handles[request] for request, _, _ in windows)
        inputs = make_inputs(self.config, sum(lens), seed)
        step = self.manager.begin_step(StepMetadata(handles=rows, query_lens=lens))
        spec = self.config.layer
        compute = torch.float64 if self.config.activation_dtype == "float64" else torch.float32
        outputs = []
        for layer, tensors in enumerate(inputs):
            out = torch.full((sum(lens), spec.num_heads, spec.head_v_dim), torch.nan, dtype=compute)
            outputs.append(step.verify(layer, tensors.qkv, tensors.raw_gate, tensors.raw_beta, out))
        start = 0
        for request, query_len, accepted in windows:
            here = slice(start, start + query_len)
            window = [tensors[here] for tensors in inputs]
            for got, wanted in zip(outputs, self.twins[request].window(window)[1], strict=True):
                assert got is not None
                self.worst_output = max(self.worst_output, row_error(got[here], wanted))
            self.twins[request].commit(window, accepted)
            start += query_len
        step.defer(torch.tensor([accepted for _, _, accepted in windows]))
        self.tokens += max(accepted for _, _, accepted in windows)
        self.steps += 1

    def check(self) -> None:
        """Outputs so far and states now are within the budget (outputs rounded once more); positions are equal."""
        allowed = budget(self.config, self.tokens + self.config.max_query_len, self.steps)
        for handle, twin in zip(self.handles, self.twins, strict=True):
            assert self.manager.committed_len(handle) == twin.committed_len
            for layer, state in enumerate(twin.states):
                held = self.manager.read(handle, layer)
                self.worst_state = max(self.worst_state, row_error(held.recurrent, state.recurrent))
                assert held.conv is None or torch.equal(held.conv.double(), state.conv)
        assert self.worst_state <= allowed
        out = "float64" if self.config.activation_dtype == "float64" else "float32"
        assert self.worst_output <= allowed + ROUNDOFF[out]


def row_error(got: torch.Tensor, wanted: torch.Tensor) -> float:
    """The largest error of a head, relative to the largest norm of a head: one that nearly cancels has no scale."""
    got, wanted = got.double(), wanted.double()
    scale = wanted.flatten(-1).norm(dim=-1).max()
    return float((got - wanted).norm(dim=-1).max() / scale) if scale > 0 else float(got.norm())


def random_steps(pair: Pair, steps: int, seed: int) -> None:
    """Windows of any length with any accepted count, rows in any order, now and then a request left out."""
    chance = random.Random(seed)
    for number in range(steps):
        rows = list(range(len(pair.handles)))
        chance.shuffle(rows)
        rows = rows[: chance.choice([1, len(rows), len(rows)])]
        lens = [chance.randint(1, pair.config.max_query_len) for _ in rows]
        windows = [(row, n, chance.randint(1, n)) for row, n in zip(rows, lens, strict=True)]
        pair.step(windows, seed=100 * seed + number)


DTYPE_CASES = [
    pytest.param("float64", "float64", id="fp64"),
    pytest.param("float64", "bfloat16", id="fp64 checkpoints, bf16"),
    pytest.param("float32", "float32", id="fp32"),
    pytest.param("float32", "bfloat16", id="fp32 checkpoints, bf16"),
    pytest.param("float32", "float16", id="fp32 checkpoints, fp16"),
    pytest.param("bfloat16", "bfloat16", id="bf16"),
    pytest.param("bfloat16", "float32", id="bf16 checkpoints, fp32"),
]


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("taps", [None, 4], ids=["no conv", "conv 4"])
@pytest.mark.parametrize(("checkpoint", "activation"), DTYPE_CASES)
def test_dtypes(checkpoint: str, activation: str, taps: int | None, policy: str) -> None:
    for bound in (None, -5.0):
        config = make_config(
            checkpoint_dtype=checkpoint,
            activation_dtype=activation,
            conv_kernel_size=taps,
            fold_policy=policy,
            gate_lower_bound=bound,
            num_layers=1,
            head_k_dim=16,
            head_v_dim=12,
        )
        pair = Pair(config)
        random_steps(pair, 8, seed=1)
        pair.check()


@pytest.mark.parametrize("bound", GATES)
@pytest.mark.parametrize("window", range(1, 17))
def test_windows_of_any_length(window: int, bound: float | None) -> None:
    policy = POLICIES[window % 3]
    pair = Pair(make_config(max_query_len=window, gate_lower_bound=bound, fold_policy=policy, num_layers=1))
    pair.step([(0, window, window), (1, 1, 1)], seed=1)
    pair.step([(1, window, 1), (0, 1, 1)], seed=2)
    random_steps(pair, 2, seed=3)
    pair.check()


@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])
@pytest.mark.parametrize("taps", [2, 3, 4, 7])
def test_convolutions(taps: int, bias: bool) -> None:
    config = make_config(conv_kernel_size=taps, max_query_len=3)
    params = make_params(config)
    if not bias:
        params = [dataclasses.replace(layer, conv_bias=None) for layer in params]
    pair = Pair(config, params)
    random_steps(pair, 8, seed=4)
    pair.check()


@pytest.mark.parametrize(
    "shape", [(1, 1, 1), (1, 2, 9), (3, 9, 2), (5, 17, 33)], ids="{0[0]} heads, K {0[1]}, V {0[2]}".format
)
def test_shapes(shape: tuple[int, int, int]) -> None:
    heads, k_dim, v_dim = shape
    for policy in POLICIES:
        pair = Pair(make_config(num_heads=heads, head_k_dim=k_dim, head_v_dim=v_dim, fold_policy=policy))
        random_steps(pair, 6, seed=5)
        pair.check()


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("spare", [0, 1, 5])
def test_ring_sizes(policy: str, spare: int) -> None:
    """Positions wrap at every offset, also where R is no multiple of T."""
    capacity = {"eager": 3, "deferred": 6, "ring": 6}[policy] + spare
    pair = Pair(make_config(max_query_len=3, record_capacity=capacity, fold_policy=policy, num_layers=1))
    random_steps(pair, 20, seed=6 + spare)
    pair.check()


@pytest.mark.parametrize("field", ["A_log", "dt_bias", "conv_weight", "conv_bias"])
def test_parameters_in_the_activation_dtype_mean_the_same(field: str) -> None:
    config = make_config(checkpoint_dtype="float32", activation_dtype="bfloat16")
    names = (field,) if field.startswith("conv") else ("A_log", "dt_bias")
    rounded = [
        dataclasses.replace(layer, **{name: getattr(layer, name).bfloat16() for name in names})
        for layer in make_params(config)
    ]
    upcast = [dataclasses.replace(layer, **{name: getattr(layer, name).float() for name in names}) for layer in rounded]
    pairs = [Pair(config, params) for params in (rounded, upcast)]
    for pair in pairs:
        random_steps(pair, 3, seed=8)
    states = [[raw_bytes(pair.manager.read(handle, 1).recurrent) for handle in pair.handles] for pair in pairs]
    assert states[0] == states[1]


def test_gate_and_beta_in_float32_are_rounded_like_the_activations() -> None:
    """The gate is rounded on entry, since a fold reads the rounded one; beta is used as it comes."""
    config = make_config(checkpoint_dtype="float32", activation_dtype="bfloat16", num_layers=1)
    inputs = make_inputs(config, 4, seed=1)[0]
    wide = LayerInputs(inputs.qkv, inputs.raw_gate.float() * (1 + 2.0**-11), inputs.raw_beta.float())
    assert torch.equal(wide.raw_gate.bfloat16(), inputs.raw_gate)
    outputs = []
    for given in (inputs, wide):
        pair = Pair(config, requests=1)
        step = pair.manager.begin_step(StepMetadata(handles=(pair.handles[0],), query_lens=(4,)))
        outputs.append(verify_all(step, [given])[0])
    assert torch.equal(outputs[0], outputs[1])


# -- pieces


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("bound", GATES)
def test_gate_function_against_its_formula(bound: float | None, dtype: str) -> None:
    config = make_config(checkpoint_dtype=dtype, activation_dtype=dtype, gate_lower_bound=bound)
    params = make_params(config)[0]
    raw = torch.linspace(-40, 40, 33, dtype=DTYPES[dtype])[:, None, None].expand(33, 2, 6)
    got = log_decay(raw, params, bound)
    for t, h, k in [(t, h, k) for t in range(33) for h in range(2) for k in range(6)]:
        rate, x = math.exp(params.A_log[h]), float(raw[t, h, k]) + float(params.dt_bias[h, k])
        if bound is None:
            want = -rate * (x + math.log1p(math.exp(-x)) if x > 0 else math.log1p(math.exp(x)))
        else:
            want = bound / (1 + math.exp(-rate * x))
        # x is rounded once before the function magnifies it by |x|.
        assert abs(float(got[t, h, k]) - want) <= 8 * (1 + abs(x)) * (1 + rate) * ROUNDOFF[dtype] * abs(want)


@pytest.mark.parametrize("bound", GATES)
def test_extreme_gates_are_finite_and_never_grow(bound: float | None) -> None:
    config = make_config(checkpoint_dtype="float32", activation_dtype="float32", gate_lower_bound=bound)
    raw = torch.tensor([-1e30, -1e4, -100.0, 0.0, 100.0, 1e4, 1e30])[:, None, None].expand(7, 2, 6)
    got = log_decay(raw, make_params(config)[0], bound)
    assert got.isfinite().all()
    assert (got <= 0).all()
    assert bound is None or (got >= bound).all()


def test_inverse_norm_of_zero_is_finite() -> None:
    assert inverse_norm(torch.zeros(3, 4)).tolist() == pytest.approx([NORM_EPS**-0.5] * 3)
    vector = torch.tensor([3.0, 4.0], dtype=torch.float64)
    assert float(inverse_norm(vector)) == pytest.approx(1 / math.sqrt(25 + NORM_EPS), rel=1e-15)


def test_zero_keys_and_queries_give_zero() -> None:
    pair = Pair(make_config(conv_kernel_size=None, num_layers=1), requests=1)
    inputs = make_inputs(pair.config, 3, seed=1)[0]
    inputs.qkv[:, :24] = 0.0
    step = pair.manager.begin_step(StepMetadata(handles=(pair.handles[0],), query_lens=(3,)))
    assert not verify_all(step, [inputs])[0].any()
    step.commit(torch.tensor([3]))
    assert not pair.manager.read(pair.handles[0], 0).recurrent.any()


# -- equal ways


@pytest.mark.parametrize("bound", GATES)
@pytest.mark.parametrize("policy", POLICIES)
def test_one_window_of_four_equals_four_of_one(policy: str, bound: float | None) -> None:
    config = make_config(fold_policy=policy, gate_lower_bound=bound)
    inputs = make_inputs(config, 4, seed=3)
    results = []
    for lens in ((4,), (1, 1, 1, 1), (3, 1), (1, 2, 1)):
        pair, start, outputs = Pair(config, requests=1), 0, []
        pair.step([(0, 4, 3)], seed=2)
        for n in lens:
            step = pair.manager.begin_step(StepMetadata(handles=(pair.handles[0],), query_lens=(n,)))
            outputs.append(verify_all(step, [tensors[start : start + n] for tensors in inputs]))
            step.defer(torch.tensor([n]))
            start += n
        states = [pair.manager.read(pair.handles[0], layer) for layer in range(config.num_layers)]
        results.append(([torch.cat(by_layer) for by_layer in zip(*outputs, strict=True)], states))
    for outputs, states in results[1:]:
        for got, want in zip(outputs, results[0][0], strict=True):
            assert relative_error(got, want) < 1e-13
        for got, want in zip(states, results[0][1], strict=True):
            assert relative_error(got.recurrent, want.recurrent) < 1e-13
            assert got.conv is not None
            assert torch.equal(got.conv, want.conv)


def folded_states(pair: Pair, rows: list[int]) -> dict[int, list[bytes]]:
    """The checkpoints of some requests as they lie in memory, nothing pending any more."""
    slots = pair.manager.checkpoint_slots(pair.handles)
    states = {}
    for row in rows:
        assert pair.manager._backend.cursor(pair.handles[row].record_slot).pending_len == 0
        views = [pair.manager.checkpoints(layer) for layer in range(pair.config.num_layers)]
        states[row] = [raw_bytes(view[int(slots[row])]) for pair_of in views for view in pair_of if view is not None]
    return states


def fold_by(way: str, pair: Pair, counts: tuple[int, int]) -> None:
    """Windows of four with these counts, and then a fold of all that is pending."""
    manager, handles = pair.manager, tuple(pair.handles)
    metadata = StepMetadata(handles=handles, query_lens=(4, 4))
    step = manager.begin_step(metadata)
    verify_all(step, make_inputs(pair.config, 8, seed=5))
    accepted = torch.tensor(counts)
    if way == "commit":
        step.commit(accepted)
        return
    step.defer(accepted, eager=torch.tensor([True, True]) if way == "eager rows" else None)
    if way == "manager.flush":
        manager.flush()
    elif way == "manager.flush of each":
        for handle in reversed(handles):
            manager.flush([handle])
    elif way == "step.flush":
        step = manager.begin_step(metadata)
        step.flush()
        step.cancel()
    elif way in ("verify", "verify of one layer, then cancel"):
        step = manager.begin_step(metadata)
        layers = make_inputs(pair.config, 8, seed=6)
        for layer in range(pair.config.num_layers if way == "verify" else 1):
            step.verify(layer, layers[layer].qkv, layers[layer].raw_gate, layers[layer].raw_beta)
        step.cancel()


@pytest.mark.parametrize("counts", [(3, 3), (4, 1)], ids=["equal counts", "unequal counts"])
@pytest.mark.parametrize(
    ("checkpoint", "activation"),
    [("float32", "float32"), ("float32", "bfloat16"), ("bfloat16", "bfloat16")],
    ids=["fp32", "fp32, bf16", "bf16"],
)
def test_every_way_to_fold_gives_the_same_bits(checkpoint: str, activation: str, counts: tuple[int, int]) -> None:
    sizes = {"head_k_dim": 20, "head_v_dim": 12, "checkpoint_dtype": checkpoint, "activation_dtype": activation}
    ways = [
        ("ring", "manager.flush"),
        ("ring", "manager.flush of each"),
        ("ring", "step.flush"),
        ("ring", "commit"),
        ("ring", "eager rows"),
        ("eager", "the policy"),
        ("deferred", "manager.flush"),
        ("deferred", "step.flush"),
        ("deferred", "commit"),
        ("deferred", "verify"),
        ("deferred", "verify of one layer, then cancel"),
    ]
    states = {}
    for policy, way in ways:
        pair = Pair(make_config(fold_policy=policy, **sizes))
        generator = torch.Generator().manual_seed(9)
        spec = pair.config.layer
        loaded = [
            (
                torch.randn(spec.num_heads, spec.head_v_dim, spec.head_k_dim, generator=generator).to(
                    DTYPES[checkpoint]
                ),
                torch.randn(spec.conv_channels, 3, generator=generator).to(DTYPES[activation]),
            )
            for _ in range(pair.config.num_layers)
        ]
        for handle in pair.handles:
            pair.manager.load(handle, loaded, committed_len=5)
        fold_by(way, pair, counts)
        states[f"{policy}, {way}"] = folded_states(pair, [0, 1])
    wanted = states["ring, manager.flush"]
    assert [way for way, state in states.items() if state != wanted] == []


# -- what a verify may touch


def poison(manager: StateManager, rows: set[int], slots: set[int]) -> None:
    """NaN in everything that none of these record rows and checkpoint slots owns."""
    storage: Any = manager._backend.storage
    for layer in storage.layers:
        for name, tensor in layer._asdict().items():
            keep = slots | {0} if name in ("recurrent", "conv") else rows
            for slot in set(range(len(tensor))) - keep:
                tensor[slot] = torch.nan


@pytest.mark.parametrize("policy", POLICIES)
def test_verify_reads_and_writes_only_its_own_rows(policy: str) -> None:
    config = make_config(fold_policy=policy, max_requests=5)
    pair = Pair(config, requests=4)
    pair.step([(0, 4, 2), (1, 4, 3), (2, 3, 1), (3, 2, 2)], seed=1)
    manager, inside = pair.manager, (2, 0)
    slots = {int(manager.checkpoint_slots([pair.handles[row]])[0]) for row in inside}
    rows = {pair.handles[row].record_slot for row in inside}
    poison(manager, rows, slots)
    before = {name: tensor.clone() for name, tensor in tensors_of(manager)}
    starts = {row: pair.twins[row].committed_len for row in inside}
    inputs = make_inputs(config, 7, seed=2)
    manager._debug = False  # the poison breaks its rules
    step = manager.begin_step(StepMetadata(handles=tuple(pair.handles[row] for row in inside), query_lens=(3, 4)))
    outputs = verify_all(step, inputs)
    for row, here in ((2, slice(0, 3)), (0, slice(3, 7))):
        wanted = pair.twins[row].window([tensors[here] for tensors in inputs])[1]
        assert all(relative_error(got[here], want) < 1e-12 for got, want in zip(outputs, wanted, strict=True))

    scratch, folds = config.max_requests, policy == "deferred"
    lens = {2: 3, 0: 4}
    for name, after in tensors_of(manager):
        may_change = torch.zeros_like(after, dtype=torch.bool)
        for row in inside:
            record, slot = pair.handles[row].record_slot, int(manager.checkpoint_slots([pair.handles[row]])[0])
            window = torch.arange(starts[row], starts[row] + lens[row])
            if name.endswith("conv_ring"):
                may_change[record, (window + 3) % (3 + 4)] = True
            elif "record" in name:
                may_change[record, :, window % config.record_capacity] = True
            elif folds:
                may_change[slot] = True
        if "record" in name or "ring" in name:
            may_change[scratch] = True
        same = (after == before[name]) | (after.isnan() & before[name].isnan())
        assert (same | may_change).all(), name
        assert (name.endswith(("recurrent", "conv")) and not folds) or not same.all(), name


def tensors_of(manager: StateManager) -> list[tuple[str, torch.Tensor]]:
    storage: Any = manager._backend.storage
    return [
        (f"layer {index} {name}", tensor)
        for index, layer in enumerate(storage.layers)
        for name, tensor in layer._asdict().items()
    ]


@pytest.mark.parametrize("policy", POLICIES)
def test_a_row_of_nan_stays_in_its_row(policy: str) -> None:
    pair = Pair(make_config(fold_policy=policy))
    pair.step([(0, 4, 2), (1, 4, 3)], seed=1)
    step = pair.manager.begin_step(StepMetadata(handles=tuple(pair.handles), query_lens=(2, 3)))
    inputs = make_inputs(pair.config, 5, seed=2)
    for tensors in inputs:
        for tensor in (tensors.qkv, tensors.raw_gate, tensors.raw_beta):
            tensor[:2] = torch.nan
    outputs = verify_all(step, inputs)
    window = [tensors[2:] for tensors in inputs]
    for got, want in zip(outputs, pair.twins[1].window(window)[1], strict=True):
        assert got[:2].isnan().all()
        assert relative_error(got[2:], want) < 1e-12
    pair.twins[1].commit(window, 3)
    step.commit(torch.tensor([1, 3]))
    pair.twins[1].check(pair.manager, pair.handles[1])


def test_verify_again_after_cancel_writes_the_same_bits() -> None:
    for policy in ("eager", "ring"):
        pair = Pair(make_config(fold_policy=policy))
        pair.step([(0, 4, 2), (1, 4, 3)], seed=1)
        states = []
        for _ in range(2):
            step = pair.manager.begin_step(StepMetadata(handles=tuple(pair.handles), query_lens=(4, 2)))
            verify_all(step, make_inputs(pair.config, 6, seed=2))
            held = fingerprint(pair.manager)
            states.append({name: value for name, value in held.items() if name not in ("requests", "numbers")})
            step.cancel()
        assert states[0] == states[1], policy


def test_handles_of_a_step_may_come_in_any_order() -> None:
    pair = Pair(make_config(max_requests=4), requests=4)
    for seed, order in enumerate([(0, 1, 2, 3), (3, 1, 0, 2), (2, 3), (1,), (2, 0, 3, 1)]):
        pair.step([(row, 1 + (row + seed) % 4, 1 + (row + seed) % 4) for row in order], seed)
    pair.check()
    assert all(isinstance(handle, Handle) for handle in pair.handles)
