"""What a replay expects: every request recomputed token by token in float64, with a bound on honest rounding.

What rounding may do to a state, in layer and head (the worst head counts), enters the bound as a sum of squares, since
errors of different tokens are independent:

- Every token rounds sums of at most K, R or W terms: (number of terms) eps (|S| + |u|), far above what random signs
  leave of it.
- A backend that convolves in a narrower dtype may round an element of q, k or v to the activation dtype across the
  border. Only elements within the convolution's own rounding error of a border can, and what that would change is
  known: |dv| + 2 |dk|/|k| (|S| + |u|).
- Every fold stores the state in the checkpoint dtype.

None of it grows on its way through later tokens: S diag(e^g) (1 - b k k^T) does not expand, since g <= 0, |k| <= 1 and
0 <= b <= 1. A state differs when it is farther off than four times the root of the sum. In float64 that is about 1e-12
of the state after 100 tokens; a lost, doubled or misplaced record is off by a hundredth and more.
"""

from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from specstate.config import StateConfig
from specstate.metadata import Handle
from specstate.oracle import Oracle, OracleState
from specstate.params import LayerParams
from specstate.replay.inputs import TokenInputs, layer_params, life_key, token_inputs
from specstate.trace.schema import TraceError
from specstate.validation import DTYPES

#: Of a sum of squares of independent errors: beyond it is no accident.
_DEVIATIONS = 4.0


class Expected(NamedTuple):
    """One request in one layer after some tokens, and how far off a backend may be."""

    state: OracleState
    peak: float  # largest |S| + |u| so far, Frobenius norms of the worst head
    noise: float  # the sum of squares

    @property
    def tolerance(self) -> float:
        return float(_DEVIATIONS * self.noise**0.5)


class ExpectedToken(NamedTuple):
    """What one token gives."""

    after: Expected
    output: torch.Tensor  # [H, V] float64
    output_tolerance: float
    u: torch.Tensor  # [H, V] float64
    key: torch.Tensor  # [H, K] float64


#: Tokens of a load that are recomputed one by one, some 0.2 ms each and layer: more would take hours.
MAX_LOADED_LEN = 2**22

#: Tokens of a load whose inputs are derived together.
LOADED_AT_ONCE = 256


@dataclass(slots=True, eq=False)
class Life:
    """One life of a request, from admit to release, as the rules of the design have it."""

    handle: Handle
    checkpoint_slot: int
    """0: none, its state lies on the host."""
    key: int
    """See ``life_key``."""
    layers: list[Expected] = field(default_factory=list)
    """At committed_len, by layer; not kept up to date where there are no payloads."""
    committed_len: int = 0
    finished: bool = False
    open_step: int | None = None
    stood: dict[int, list[Expected]] = field(default_factory=dict)
    """What it had in its layers at positions where it stood: wherever its checkpoint may stand still."""
    home_slot: int = 0
    """Its own checkpoint slot; a block table may have moved its checkpoint elsewhere."""
    boundary_slot: int = 0
    boundary_len: int = 0
    boundary_layers: list[Expected] = field(default_factory=list)
    """Its own boundary checkpoint; at 0: none."""
    windows: dict[int, int] = field(default_factory=dict)
    """By position: in how many windows it was verified. Committed positions are left out: they do not come again."""

    def attempts(self, query_len: int) -> list[int]:
        """Which attempt each token of the next window is; counts the window."""
        positions = range(self.committed_len, self.committed_len + query_len)
        attempts = [self.windows.get(position, 0) for position in positions]
        self.windows.update((position, attempt + 1) for position, attempt in zip(positions, attempts, strict=True))
        return attempts

    def __post_init__(self) -> None:
        self.home_slot = self.checkpoint_slot
        self.stood[self.committed_len] = self.layers

    def stand_at(self, committed_len: int, capacity: int) -> None:
        """At the states in ``layers``; its checkpoint stands no more than ``capacity`` tokens behind."""
        self.committed_len = committed_len
        self.stood[committed_len] = self.layers
        self.stood = {
            position: layers for position, layers in self.stood.items() if position >= committed_len - capacity
        }
        self.windows = {position: n for position, n in self.windows.items() if position >= committed_len}


class Model:
    """The oracle over the inputs that ``inputs`` derives, for one config, seed and version of parameters."""

    def __init__(self, config: StateConfig, seed: int) -> None:
        self.config, self.seed = config, seed
        self._version = 0
        self._activation = DTYPES[config.activation_dtype]
        self.out_dtype = torch.float64 if self._activation == torch.float64 else torch.float32
        """In which outputs are asked for."""
        self._checkpoint = DTYPES[config.checkpoint_dtype]
        self.compute_dtype = torch.float64 if self._checkpoint == torch.float64 else torch.float32
        self._compute_eps = torch.finfo(self.compute_dtype).eps
        spec = config.layer
        self._terms = 2 * (spec.head_k_dim + config.record_capacity) + 8 * ((spec.conv_kernel_size or 0) + 4)
        self.params = layer_params(config, seed, self._version)
        self._oracle = Oracle(config, self.params)

    def next_params(self) -> tuple[LayerParams, ...]:
        """Another version of the parameters, from now on."""
        self._version += 1
        self.params = layer_params(self.config, self.seed, self._version)
        self._oracle = Oracle(self.config, self.params)
        return self.params

    def life(self, handle: Handle, checkpoint_slot: int) -> Life:
        """Zero state at position 0."""
        zero = Expected(self._oracle.zero(), 0.0, 0.0)
        return Life(handle, checkpoint_slot, life_key(self.seed, handle), [zero] * self.config.num_layers)

    def continued(self, source: Life, handle: Handle, checkpoint_slot: int) -> Life:
        """A new life at the position and state of another; what it is fed from here on is its own."""
        return Life(
            handle,
            checkpoint_slot,
            life_key(self.seed, handle),
            list(source.layers),
            source.committed_len,
            source.finished,
        )

    def restored(self, layers: list[Expected], handle: Handle, checkpoint_slot: int, committed_len: int) -> Life:
        """A new life at a published state."""
        return Life(handle, checkpoint_slot, life_key(self.seed, handle), list(layers), committed_len)

    def loaded(self, life: Life, committed_len: int) -> list[Expected]:
        """The states after the life's first tokens, each in its first attempt, as a checkpoint holds them."""
        layers = []
        for layer in range(self.config.num_layers):
            state, peak = self._oracle.zero(), 0.0
            # A long prompt takes time, but no memory.
            for start in range(0, committed_len, LOADED_AT_ONCE):
                positions = range(start, min(start + LOADED_AT_ONCE, committed_len))
                keys, attempts = [life.key] * len(positions), [0] * len(positions)
                inputs = token_inputs(self.config, keys, positions, attempts, layer)
                for i in range(len(positions)):
                    state = self._oracle.token(layer, state, *(column[i] for column in inputs)).state
                    peak = max(peak, _norm(state.recurrent))
            # The manager is given this very state, so it starts without error.
            state = OracleState(state.recurrent.to(self._checkpoint).double(), state.conv)
            layers.append(Expected(state, peak, 0.0))
        return layers

    def token(self, layer: int, before: Expected, inputs: TokenInputs, index: int) -> ExpectedToken:
        """Feeds token ``index`` of ``inputs``."""
        qkv, gate, beta = (column[index] for column in inputs)
        token = self._oracle.token(layer, before.state, qkv, gate, beta)
        peak = max(before.peak, _norm(token.state.recurrent) + _norm(token.u))
        query_doubt, key_doubt, value_doubt = self._doubts(layer, before.state.conv, qkv)
        rounding = self._terms * self._compute_eps * peak
        crossing = value_doubt + 2.0 * key_doubt * peak
        after = Expected(token.state, peak, before.noise + rounding**2 + crossing**2)
        scale = self.config.layer.head_k_dim**-0.5  # of a query
        output_tolerance = scale * (after.tolerance + 2.0 * query_doubt * peak + rounding)
        output_tolerance += torch.finfo(self.out_dtype).eps * _norm(token.output)
        return ExpectedToken(after, token.output, output_tolerance, token.u, token.key)

    def folded(self, before: Expected) -> Expected:
        """A fold may have stored the state once more."""
        if self._checkpoint.itemsize >= 4:
            return before  # no narrower than what a token rounds in any case
        return before._replace(noise=before.noise + (torch.finfo(self._checkpoint).eps * before.peak) ** 2)

    def _doubts(self, layer: int, conv: torch.Tensor, qkv: torch.Tensor) -> tuple[float, float, float]:
        """What rounding across a border would change: |dq|/|q|, |dk|/|k| and |dv| of the worst head."""
        params, spec = self.params[layer], self.config.layer
        if params.conv_weight is None or self._activation == torch.float64:
            return 0.0, 0.0, 0.0  # given rounded; or not rounded beyond what every token rounds
        bias = torch.zeros(()) if params.conv_bias is None else params.conv_bias
        taps = torch.cat([conv, qkv[:, None]], 1)
        products = taps * params.conv_weight.double()
        mixed = products.sum(1) + bias.double()
        mixed = mixed * torch.sigmoid(mixed)
        # The sum of W + 1 terms and a SiLU, whose slope is below 1.1.
        margin = (products.shape[1] + 6) * self._compute_eps * (products.abs().sum(1) + bias.double().abs())
        moved = (mixed + margin).to(self._activation).double() - (mixed - margin).to(self._activation).double()
        keys = spec.num_heads * spec.head_k_dim
        sizes, moves = (x.split([keys, keys, len(x) - 2 * keys]) for x in (mixed, moved))
        query, key, value = (
            (move.view(spec.num_heads, -1).norm(dim=1), size.view(spec.num_heads, -1).norm(dim=1))
            for move, size in zip(moves, sizes, strict=True)
        )
        return float((query[0] / query[1]).max()), float((key[0] / key[1]).max()), float(value[0].max())


def check_loaded_len(what: str, committed_len: int) -> None:
    """Raises TraceError when ``what`` stands at more tokens than a replay recomputes."""
    if committed_len > MAX_LOADED_LEN:
        raise TraceError(
            f"{what} at {committed_len} tokens is beyond the {MAX_LOADED_LEN} that a replay recomputes; backend "
            "'metadata' replays it without payloads"
        )


def _norm(per_head: torch.Tensor) -> float:
    """Frobenius norm of the worst head of [H, ..]."""
    return float(per_head.flatten(1).norm(dim=1).max())
