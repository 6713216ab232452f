"""``specstate doctor``: what will run on this machine and why, and a small check of every kernel against the oracle."""

import platform
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Literal

import torch

from specstate.backends.build import PATHS, build_backend
from specstate.config import FoldPolicy, KDALayerSpec, StateConfig
from specstate.errors import SpecStateError
from specstate.kernels import rows as at
from specstate.kernels.philox import random_words
from specstate.kernels.sampling import log_exponential
from specstate.manager import StateManager
from specstate.metadata import Handle, StepMetadata
from specstate.oracle import Oracle, OracleState
from specstate.params import LayerParams
from specstate.sampling import HostSample, SamplingParams
from specstate.step import Step

NUM_LAYERS, TOKENS, ROWS, VOCAB = 2, 8, 2, 17
NOISY = SamplingParams(temperature=0.8, top_k=6, seed=2**40 + 11)

#: Head dimensions K and V of the checks on each path: small ones, odd where the kernels take such.
HEAD_DIMS = {"reference": (32, 48), "portable": (32, 48), "hopper": (128, 64)}

#: Relative error, in the norm of a tensor, that float32 may have after the few dozen tokens of a check: 16 roundings of
#: 2^-24 a token.
TOLERANCE = 3e-5


@dataclass(frozen=True, slots=True)
class Check:
    """One thing that was tried."""

    name: str
    ok: bool
    detail: str


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """What the doctor found."""

    ok: bool
    backend: str
    path: str
    """That of a model with heads of 128 x 128."""
    reason: str
    device: str
    versions: dict[str, str]
    checks: tuple[Check, ...]


def examine() -> Diagnosis:
    """Finds the backend that will run here and checks its kernels; well under a minute once they are compiled."""
    backend, device, reason = _choose()
    path = _path_of_a_model(backend, device)
    checks = tuple(check for each in _paths(backend, path) for check in _run_checks(backend, device, each))
    return Diagnosis(
        ok=all(check.ok for check in checks),
        backend=backend,
        path=path,
        reason=reason,
        device=torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or "cpu",
        versions={name: _version(name) for name in ("specstate", "torch", "triton", "pydantic")}
        | {"python": platform.python_version()},
        checks=checks,
    )


def _choose() -> tuple[Literal["triton", "reference"], torch.device, str]:
    if not torch.cuda.is_available():
        built = "" if torch.version.cuda or torch.version.hip else " (this torch is built for CPUs alone)"
        return "reference", torch.device("cpu"), f"torch sees no GPU{built}; the Triton kernels need one"
    device = torch.device("cuda", torch.cuda.current_device())
    if _version("triton") == "missing":
        return "reference", device, "triton is not installed"
    return "triton", device, "a GPU and triton are there"


def _path_of_a_model(backend: Literal["triton", "reference"], device: torch.device) -> str:
    """The kernels that a model with heads of 128 x 128 gets; the first of the backend's where none can be had."""
    layer = KDALayerSpec(num_heads=1, head_k_dim=128, head_v_dim=128, conv_kernel_size=None)
    config = StateConfig(num_layers=1, layer=layer, max_requests=1, max_query_len=1)
    try:
        params = (LayerParams(torch.zeros(1, device=device), torch.zeros(1, 128, device=device)),)
        return build_backend(config, params, device, backend, storage=None, debug=False).path
    except (SpecStateError, RuntimeError):  # the checks say why
        return PATHS[backend][0]


def _paths(backend: Literal["triton", "reference"], path: str) -> tuple[str, ...]:
    """Those that serve: the first of the backend's takes any model, ``path`` some."""
    return tuple(dict.fromkeys((PATHS[backend][0], path)))


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "missing"


def _run_checks(backend: Literal["triton", "reference"], device: torch.device, path: str) -> Iterator[Check]:
    def trial(
        policy: FoldPolicy, gate_lower_bound: float | None = None, sampling: SamplingParams | None = None
    ) -> Trial:
        return Trial(backend, device, path, policy, gate_lower_bound, sampling)

    tried: list[tuple[str, Callable[[], str]]] = [
        ("conv, verify and fold at commit", lambda: _judge(trial("eager").decode(6))),
        ("fold inside verify", lambda: _judge(trial("deferred").decode(6))),
        ("verify over a ring that wraps", lambda: _judge(trial("ring").decode(12))),
        ("bounded gate", lambda: _judge(trial("ring", gate_lower_bound=-5.0).decode(6))),
        ("flush", lambda: _judge(trial("ring").decode(4, flush=True))),
        ("records of the caller's own verify", lambda: _judge(trial("ring").decode(4, own_verify=True))),
        ("greedy sampling", lambda: trial("ring").sample()),
        ("sampling with a temperature", lambda: trial("ring", sampling=NOISY).draw()),
    ]
    if device.type == "cuda":
        tried.append(("a step inside a CUDA graph", lambda: trial("ring").replay()))
    for what, attempt in tried:
        name = what if backend == "reference" else f"{path}: {what}"
        try:
            yield Check(name, True, attempt())
        except (SpecStateError, RuntimeError) as failure:
            yield Check(name, False, f"{type(failure).__name__}: {' '.join(str(failure).split())}")


def _judge(error: float) -> str:
    _require(error < TOLERANCE, f"largest relative error {error:.1e} is above {TOLERANCE:.0e}")
    return f"largest relative error {error:.1e}"


def _require(holds: bool, otherwise: str) -> None:
    if not holds:
        raise SpecStateError(otherwise)


class Trial:
    """Two requests decoded with random windows on a small shape, beside the oracle."""

    def __init__(
        self,
        backend: Literal["triton", "reference"],
        device: torch.device,
        path: str,
        policy: FoldPolicy,
        gate_lower_bound: float | None,
        sampling: SamplingParams | None,
    ) -> None:
        head_k_dim, head_v_dim = HEAD_DIMS[path]
        layer = KDALayerSpec(
            num_heads=2, head_k_dim=head_k_dim, head_v_dim=head_v_dim, gate_lower_bound=gate_lower_bound
        )
        self.config = StateConfig(
            num_layers=NUM_LAYERS,
            layer=layer,
            max_requests=ROWS,
            max_query_len=TOKENS // ROWS,
            fold_policy=policy,
            activation_dtype="float32",
            path=path,
        )
        self._device = device
        self._random = torch.Generator().manual_seed(0)
        heads, k_dim, channels = layer.num_heads, layer.head_k_dim, layer.conv_channels
        params = tuple(
            LayerParams(self._normal(heads), self._normal(heads, k_dim), self._normal(channels, 4))
            for _ in range(NUM_LAYERS)
        )
        self.manager = StateManager(self.config, params, device=device, backend=backend)
        self._oracle = Oracle(self.config, params)
        self._handles = [self.manager.admit(name, sampling) for name in ("a", "b")]
        self._states = [[self._oracle.zero() for _ in range(NUM_LAYERS)] for _ in self._handles]

    def decode(self, steps: int, flush: bool = False, own_verify: bool = False) -> float:
        """Runs ``steps`` steps; the largest relative error of any output or state."""
        worst = 0.0
        for number in range(steps):
            step = self.manager.begin_step(self._metadata())
            accepted = [1 + number % 4, 4 - number % 3]
            if own_verify:
                step.flush()
            for layer in range(NUM_LAYERS):
                worst = max(worst, self._verify(step, layer, accepted, own_verify))
            step.defer(torch.tensor(accepted, device=self._device))
            if flush:
                self.manager.flush()
            for handle, states in zip(self._handles, self._states, strict=True):
                worst = max(worst, self._state_error(handle, states))
        return worst

    def sample(self) -> str:
        """Drafts of which the first row's all stand, and the second row's first falls."""
        best = torch.arange(TOKENS, device="cpu") + 3
        drafts = torch.tensor([0, 3, 4, 5, 0, 1, 8, 9], device=self._device)
        sample = self._sample(torch.nn.functional.one_hot(best, VOCAB).float(), drafts)
        got = sample.num_accepted.tolist(), sample.tokens.tolist()
        _require(got == ([4, 1], [[3, 4, 5, 6], [7, -1, -1, -1]]), f"counts and tokens are {got}")
        return "counts and tokens as expected"

    def draw(self) -> str:
        """The first token of each row, beside the same draw in plain torch on the CPU."""
        logits = torch.randn(TOKENS, VOCAB, generator=self._random, device="cpu")
        sample = self._sample(logits, torch.full((TOKENS,), -1, device=self._device))
        first, top_k = logits[:: TOKENS // ROWS], NOISY.top_k
        kept = first >= first.topk(top_k).values[:, -1:]
        seeds = torch.full((ROWS,), NOISY.seed, device="cpu")
        noise = log_exponential(random_words(seeds, torch.ones_like(seeds), at.DRAW_TARGET, VOCAB))
        wanted = torch.where(kept, first / NOISY.temperature - noise, -torch.inf).argmax(1).tolist()
        _require(sample.next_token.tolist() == wanted, f"tokens are {sample.next_token.tolist()}, not {wanted}")
        return "tokens as drawn in torch"

    def _sample(self, logits: torch.Tensor, drafts: torch.Tensor) -> HostSample:
        step = self.manager.begin_step(self._metadata())
        for layer in range(NUM_LAYERS):
            self._verify(step, layer, [0, 0], own_verify=False)
        sample = step.sample(logits.to(self._device), drafts).to_host_async().wait()
        step.cancel()
        return sample

    def replay(self) -> str:
        """A captured step, replayed; its outputs must have the bits of a step without a graph."""
        inputs = [self._inputs() for _ in range(NUM_LAYERS)]
        step = self.manager.begin_step(self._metadata())
        wanted = [self._output(step, layer, inputs[layer]) for layer in range(NUM_LAYERS)]
        step.cancel()
        self.manager.warmup()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = self.manager.capture_step(ROWS, TOKENS)
            got = [self._output(captured, layer, inputs[layer]) for layer in range(NUM_LAYERS)]
        step = self.manager.begin_step(self._metadata(), pad_to=(ROWS, TOKENS))
        graph.replay()
        step.replayed("verify")
        step.cancel()
        same = all(torch.equal(a, b) for a, b in zip(got, wanted, strict=True))
        _require(same, "a replay gives other bits than a step without a graph")
        return "the same bits as without a graph"

    # -- inside

    def _metadata(self) -> StepMetadata:
        return StepMetadata(handles=tuple(self._handles), query_lens=(TOKENS // ROWS,) * ROWS)

    def _normal(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=self._random, device="cpu").to(self._device)

    def _inputs(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        layer = self.config.layer
        heads, k_dim = layer.num_heads, layer.head_k_dim
        gate, beta = self._normal(TOKENS, heads, k_dim), self._normal(TOKENS, heads)
        return self._normal(TOKENS, layer.conv_channels), gate, beta

    def _output(self, step: Step, layer: int, inputs: tuple[torch.Tensor, torch.Tensor, torch.Tensor]) -> torch.Tensor:
        output = step.verify(layer, *inputs)
        assert output is not None
        return output

    def _verify(self, step: Step, layer: int, accepted: list[int], own_verify: bool) -> float:
        """One layer of both windows, also by the oracle, which keeps the accepted prefix; the error of the output."""
        qkv, gate, beta = self._inputs()
        wanted, u, key = [], [], []
        for row, states in enumerate(self._states):
            state = states[layer]
            for place in range(TOKENS // ROWS):
                t = row * (TOKENS // ROWS) + place
                token = self._oracle.token(layer, state, qkv[t], gate[t], beta[t])
                state = token.state
                wanted.append(token.output)
                u.append(token.u)
                key.append(token.key)
                if place + 1 == accepted[row]:
                    states[layer] = state
        if own_verify:
            mine, own_key = (torch.stack(x).float().to(self._device) for x in (u, key))
            step.write_records(layer, mine, own_key, gate, qkv)
            return 0.0
        return _error(self._output(step, layer, (qkv, gate, beta)), torch.stack(wanted))

    def _state_error(self, handle: Handle, states: list[OracleState]) -> float:
        worst = 0.0
        for layer, state in enumerate(states):
            held = self.manager.read(handle, layer)
            assert held.conv is not None
            worst = max(worst, _error(held.recurrent, state.recurrent), _error(held.conv, state.conv))
        return worst


def _error(got: torch.Tensor, want: torch.Tensor) -> float:
    return float((got.double().cpu() - want).norm() / want.norm().clamp(min=1e-30))
