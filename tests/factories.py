"""Small configs, parameters, inputs and managers, and a model of what a manager's requests must hold."""

import os
from dataclasses import dataclass, field, fields
from typing import Any

import torch

from specstate import Folds, KDALayerSpec, LayerParams, Metrics, StateConfig, StateManager, StepMetadata
from specstate.metadata import Handle
from specstate.oracle import Oracle, OracleState
from specstate.step import Step
from specstate.validation import DTYPES

POLICIES = ("eager", "deferred", "ring")

LESS = bool(os.environ.get("CI")) and not torch.cuda.is_available()
"""CI has no GPU and two cores: of what is more of the same it runs a fixed part. A GPU, or CI unset, runs all."""


def amount(whole: int, in_ci: int) -> int:
    """How many steps, examples or bytes."""
    return in_ci if LESS else whole


def make_config(**changes: Any) -> StateConfig:
    """Two layers, two heads, K != V, window 4, float64; any field of StateConfig or KDALayerSpec may be changed."""
    spec = {"num_heads": 2, "head_k_dim": 6, "head_v_dim": 5, "conv_kernel_size": 4, "gate_lower_bound": None}
    rest = {
        "num_layers": 2,
        "max_requests": 3,
        "max_query_len": 4,
        "fold_policy": "ring",
        "checkpoint_dtype": "float64",
        "activation_dtype": "float64",
    }
    for name, value in changes.items():
        (spec if name in spec else rest)[name] = value
    return StateConfig(layer=KDALayerSpec(**spec), **rest)


def widened(path: str | None, /, **sizes: Any) -> dict[str, Any]:
    """``sizes``, with head dimensions that kernels ``path`` cover: under "hopper" K is 128, V a multiple of 64."""
    if path == "hopper":
        assert sizes["head_k_dim"] <= 128
        sizes |= {"head_k_dim": 128, "head_v_dim": -(-sizes["head_v_dim"] // 64) * 64}
    return sizes


def make_params(config: StateConfig, seed: int = 0, device: str | torch.device = "cpu") -> list[LayerParams]:
    """Random parameters of usual size: rates around 1, decays that matter within a window."""
    generator = torch.Generator().manual_seed(seed)
    spec, dtype = config.layer, DTYPES[config.activation_dtype]
    wide = dtype if dtype is torch.float64 else torch.float32

    def normal(*shape: int, scale: float = 1.0) -> torch.Tensor:
        return (torch.randn(shape, generator=generator, dtype=torch.float64) * scale).to(device, wide)

    params = []
    for _ in range(config.num_layers):
        conv = None if spec.conv_kernel_size is None else normal(spec.conv_channels, spec.conv_kernel_size, scale=0.5)
        bias = None if conv is None else normal(spec.conv_channels, scale=0.1)
        params.append(
            LayerParams(normal(spec.num_heads, scale=0.3), normal(spec.num_heads, spec.head_k_dim), conv, bias)
        )
    return params


def make_manager(config: StateConfig | None = None, device: str | torch.device = "cpu", **options: Any) -> StateManager:
    """A manager over ``make_params``, in debug mode unless told otherwise."""
    config = config or make_config()
    return StateManager(config, make_params(config, device=device), device=device, **{"debug": True, **options})


def make_folds(**changes: int) -> Folds:
    """None but ``changes``."""
    return Folds(**{field.name: 0 for field in fields(Folds)} | changes)


def make_metrics(**changes: Any) -> Metrics:
    """Those of a manager, for windows of 4, to which nothing has happened but ``changes``."""
    nothing = {field.name: 0 for field in fields(Metrics)}
    return Metrics(**{**nothing, "accepted_per_position": (0, 0, 0), "folds": make_folds(), **changes})


@dataclass(frozen=True)
class LayerInputs:
    """What one layer's verify takes for some tokens."""

    qkv: torch.Tensor
    raw_gate: torch.Tensor
    raw_beta: torch.Tensor

    def __getitem__(self, index: Any) -> "LayerInputs":
        return LayerInputs(self.qkv[index], self.raw_gate[index], self.raw_beta[index])


def make_inputs(config: StateConfig, tokens: int, seed: int, device: str | torch.device = "cpu") -> list[LayerInputs]:
    """Random inputs of ``tokens`` tokens for every layer."""
    generator = torch.Generator().manual_seed(seed)
    spec, dtype = config.layer, DTYPES[config.activation_dtype]

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(device, dtype)

    return [
        LayerInputs(
            normal(tokens, spec.conv_channels),
            normal(tokens, spec.num_heads, spec.head_k_dim),
            normal(tokens, spec.num_heads),
        )
        for _ in range(config.num_layers)
    ]


def verify_all(step: Step, inputs: list[LayerInputs]) -> list[torch.Tensor]:
    """Verifies every layer of ``step``; the outputs."""
    outputs = []
    for layer, tensors in enumerate(inputs):
        output = step.verify(layer, tensors.qkv, tensors.raw_gate, tensors.raw_beta)
        assert output is not None
        outputs.append(output)
    return outputs


def relative_error(got: torch.Tensor, want: torch.Tensor) -> float:
    """|got - want| / |want| over the whole tensor, in float64; |got| where ``want`` is 0."""
    difference, scale = (got.double().cpu() - want.double().cpu()).norm(), want.double().cpu().norm()
    return float(difference / scale) if scale > 0 else float(difference)


@dataclass
class Twin:
    """The oracle's view of one request: its state after the committed tokens alone."""

    oracle: Oracle
    num_layers: int
    states: list[OracleState] = field(default_factory=list)
    committed_len: int = 0

    def __post_init__(self) -> None:
        self.states = self.states or [self.oracle.zero() for _ in range(self.num_layers)]

    def window(self, inputs: list[LayerInputs]) -> tuple[list[list[OracleState]], list[torch.Tensor]]:
        """States after each token of a window, and outputs [tokens, H, V], by layer; commits nothing."""
        states, outputs = [], []
        for layer, tensors in enumerate(inputs):
            state, after, out = self.states[layer], [], []
            for t in range(len(tensors.qkv)):
                token = self.oracle.token(layer, state, tensors.qkv[t], tensors.raw_gate[t], tensors.raw_beta[t])
                state = token.state
                after.append(state)
                out.append(token.output)
            states.append(after)
            outputs.append(torch.stack(out))
        return states, outputs

    def commit(self, inputs: list[LayerInputs], accepted: int) -> None:
        """Commits the first ``accepted`` tokens of a window."""
        if accepted:
            states, _ = self.window([tensors[:accepted] for tensors in inputs])
            self.states = [after[-1] for after in states]
            self.committed_len += accepted

    def check(self, manager: StateManager, handle: Handle, tolerance: float = 1e-12) -> None:
        """The manager holds this request at this position in this state, in every layer."""
        assert manager.committed_len(handle) == self.committed_len
        for layer, state in enumerate(self.states):
            held = manager.read(handle, layer)
            assert relative_error(held.recurrent, state.recurrent) < tolerance
            if held.conv is not None:
                assert relative_error(held.conv, state.conv) < tolerance


def make_twin(config: StateConfig) -> Twin:
    """A twin of a request without tokens, over ``make_params``."""
    return Twin(Oracle(config, tuple(make_params(config))), config.num_layers)


def run_step(
    manager: StateManager,
    rows: list[tuple[Handle, Twin, int, int]],
    seed: int,
    tolerance: float = 1e-12,
    end: str = "defer",
) -> None:
    """One step of (handle, twin, query_len, num_accepted) rows, checked against the twins: outputs and states."""
    query_lens = tuple(query_len for _, _, query_len, _ in rows)
    inputs = make_inputs(manager.config, sum(query_lens), seed, manager.device)
    step = manager.begin_step(StepMetadata(handles=tuple(row[0] for row in rows), query_lens=query_lens))
    outputs = verify_all(step, inputs)
    start = 0
    for _, twin, query_len, accepted in rows:
        window = [tensors[start : start + query_len] for tensors in inputs]
        _, wanted = twin.window(window)
        for got, want in zip(outputs, wanted, strict=True):
            assert relative_error(got[start : start + query_len], want) < tolerance
        twin.commit(window, accepted)
        start += query_len
    counts = torch.tensor([row[3] for row in rows], dtype=torch.int32, device=manager.device)
    step.commit(counts) if end == "commit" else step.defer(counts)
    for handle, twin, _, _ in rows:
        twin.check(manager, handle, tolerance)


def fingerprint(manager: StateManager, *steps: Step) -> dict[str, Any]:
    """Everything that a manager and some of its steps hold, by value: compare two to see what a call has changed."""
    backend, ledger = manager._backend, manager._ledger
    held: dict[str, Any] = {
        "pools": [(list(p._free), sorted(p._taken)) for p in (ledger.record_slots, ledger.checkpoint_slots)],
        "requests": [
            (r.handle, r.checkpoint_slot, r.boundary_slot, id(r.open_step), r.may_be_pending, id(r.restored_from))
            for r in manager._requests
        ],
        "preempted": [
            (
                *(p.request_id, p.record_slot, p.checkpoint_slot, p.boundary_slot, p.may_be_pending),
                *(id(p.standing), id(p.payload), id(p.restored_from)),
            )
            for p in manager._preempted
        ],
        "prefixes": [(p.key, p.checkpoint_slot, p.num_users) for p in ledger.prefixes],
        "lent": sorted(ledger.lent),
        "numbers": (manager._next_step, ledger.generation, manager._dropped_ends.count),
        "params": id(getattr(backend, "params", None)),
        "counters": manager.counters(),
    }
    for step in steps:
        flags = (step.index, step._ended_by, list(step._verified), step._flushed, step._num_written, step._num_released)
        columns = [step.query_start_loc, step.positions, step.committed_lens, step.checkpoint_slots, step.record_slots]
        rows = raw_bytes(step._rows.rows) if hasattr(step._rows, "rows") else repr(step._rows)
        samples = [id(sample) for sample in step._samples]
        held[f"step {step.index}"] = (flags, samples, rows, [column.tolist() for column in columns])
    if hasattr(backend, "storage"):
        storage = backend.storage
        tensors = {"cursors": storage.cursors, "sampling": storage.sampling, "counter tensor": storage.counters}
        for index, layer in enumerate(storage.layers):
            tensors |= {f"{name} of layer {index}": t for name, t in layer._asdict().items() if t is not None}
        held |= {name: raw_bytes(tensor) for name, tensor in tensors.items()}
    else:
        slots = range(manager.config.max_requests)
        held["cursors"] = [backend.cursor(slot) for slot in slots]
    return held


def raw_bytes(tensor: torch.Tensor) -> bytes:
    """A tensor's elements as bytes, so that NaN equals itself."""
    return tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes()
