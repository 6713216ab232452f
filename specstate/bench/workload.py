"""Whole steps of a manager, as users run them: captured once, then staged, replayed and told to the manager."""

import math
from collections.abc import Sequence
from time import perf_counter_ns
from typing import NamedTuple

import torch

from specstate.bench.floor import Rings, step_bytes
from specstate.bench.timer import Machine, Timer
from specstate.config import StateConfig
from specstate.errors import SpecStateError
from specstate.manager import StateManager
from specstate.metadata import StepMetadata
from specstate.params import LayerParams
from specstate.validation import DTYPES

#: The chance that the draft at each position holds if all before it did: 4.04 tokens of 8 on average, the first token
#: of a window included. Shorter windows take the first rates; beyond them the last one holds.
CONDITIONAL_RATES = (0.82, 0.80, 0.78, 0.76, 0.75, 0.74, 0.73)

#: Between two uses of a state, so many times the L2's bytes of other states pass.
L2_TURNS = 4


class Inputs(NamedTuple):
    """One layer's, for all tokens of a step."""

    qkv: torch.Tensor
    raw_gate: torch.Tensor
    raw_beta: torch.Tensor


class Timed(NamedTuple):
    """What a run of timed steps gave."""

    times_ms: list[float]
    bytes: list[dict[str, int]]
    """The floor of each of those steps."""
    num_accepted: float
    """Mean over rows and steps."""
    folds_per_step: float


def window_rates(max_query_len: int, rates: Sequence[float] = CONDITIONAL_RATES) -> tuple[float, ...]:
    """A rate for each draft of a window; the last of ``rates`` holds for positions beyond."""
    return tuple(rates[min(i, len(rates) - 1)] for i in range(max_query_len - 1))


def draw_accepted(steps: int, rows: int, max_query_len: int, generator: torch.Generator) -> torch.Tensor:
    """[steps, rows] int32 on the generator's device: accepted tokens by CONDITIONAL_RATES, the first included."""
    device = generator.device
    chance = torch.rand(steps, rows, max_query_len - 1, generator=generator, device=device)
    held = chance < torch.tensor(window_rates(max_query_len), device=device)
    return 1 + held.to(torch.int32).cumprod(2, dtype=torch.int32).sum(2, dtype=torch.int32)


def turns(step_state_bytes: int, l2_bytes: int) -> int:
    """How many sets of requests take turns, so that no step finds its states in the L2."""
    return max(1, math.ceil(L2_TURNS * l2_bytes / step_state_bytes))


def enough_steps(accepted: Sequence[Sequence[int]], sets: int, least: int, tokens: int) -> int:
    """The fewest steps, at least ``least``, after which every row of every set has committed ``tokens``."""
    totals = [[0] * len(accepted[0]) for _ in range(sets)]
    for index, counts in enumerate(accepted):
        if index >= least and min(map(min, totals)) >= tokens:
            return index
        totals[index % sets] = [total + count for total, count in zip(totals[index % sets], counts, strict=True)]
    if min(map(min, totals)) < tokens:
        raise SpecStateError(f"{len(accepted)} steps do not commit {tokens} tokens in every row")
    return len(accepted)


class Workload:
    """A manager with ``sets`` times ``rows`` requests, and one step over a set, whose states are unlike the last's."""

    def __init__(self, machine: Machine, config: StateConfig, sets: int, seed: int = 0) -> None:
        self.machine, self.config, self.sets = machine, config, sets
        self.rows = config.max_requests // sets
        self.tokens = self.rows * config.max_query_len
        device = machine.device
        self.generator = torch.Generator(device=device).manual_seed(seed)
        self.params = [layer_params(config, self.generator) for _ in range(config.num_layers)]
        self.manager = StateManager(config, self.params, device=device, backend="triton")
        handles = [self.manager.admit(str(i)) for i in range(config.max_requests)]
        self.handles = [tuple(handles[i * self.rows : (i + 1) * self.rows]) for i in range(sets)]
        windows = (config.max_query_len,) * self.rows
        self._metadata = [StepMetadata(handles=each, query_lens=windows) for each in self.handles]
        self.rings = [Rings(config, self.rows) for _ in range(sets)]
        self.inputs = [layer_inputs(config, self.tokens, self.generator) for _ in range(config.num_layers)]
        spec = config.layer
        self.outputs = [
            torch.full(
                (self.tokens, spec.num_heads, spec.head_v_dim),
                float("nan"),
                dtype=DTYPES[config.activation_dtype],
                device=device,
            )
            for _ in range(config.num_layers)
        ]
        self.counts = torch.ones(self.rows, dtype=torch.int32, device=device)
        self.graph: torch.cuda.CUDAGraph | None = None
        self.path = ""
        """The kernels that ran, once a step has."""

    def step_by_hand(self, turn: int, counts: torch.Tensor, shift: int = 0, timer: Timer | None = None) -> None:
        """One step of set ``turn`` without a graph, which compiles what a capture needs; layer l takes the inputs of
        layer l + ``shift``."""
        self.counts.copy_(counts)
        if timer is not None:
            timer.start()
        step = self.manager.begin_step(self._metadata[turn], pad_to=(self.rows, self.tokens))
        self.path = step.path
        for layer, out in enumerate(self.outputs):
            step.verify(layer, *self.inputs[(layer + shift) % len(self.inputs)], out=out)
        step.defer(self.counts)
        if timer is not None:
            timer.stop()

    def verify_us(self, steps: int) -> list[float]:
        """Microseconds that the host takes for each ``verify`` of ``steps`` steps of set 0 without a graph.

        Gradients are off, as in decode loops. The device is waited for between steps alone, so that its queue is
        never full. Before ``capture``, and after a step by hand, which compiles.
        """
        self.counts.fill_(1)
        times = []
        for _ in range(steps):
            self.machine.wait()
            step = self.manager.begin_step(self._metadata[0], pad_to=(self.rows, self.tokens))
            with torch.no_grad():
                for layer, (inputs, out) in enumerate(zip(self.inputs, self.outputs, strict=True)):
                    start = perf_counter_ns()
                    step.verify(layer, *inputs, out=out)
                    times.append((perf_counter_ns() - start) / 1e3)
            step.defer(self.counts)
            self.note(0, [1] * self.rows)
        return times

    def capture(self, ends: bool = True) -> None:
        """Captures the step; one by hand must have come before. ends: False for its verifies alone."""
        if not self.machine.graphs:
            return
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            step = self.manager.capture_step(self.rows, self.tokens)
            for layer, out in enumerate(self.outputs):
                step.verify(layer, *self.inputs[layer], out=out)
            if ends:
                step.defer(self.counts)
        self.graph = graph

    def replay(self, turn: int, counts: torch.Tensor, timer: Timer | None = None) -> None:
        """One step of set ``turn``: begun, replayed, told to the manager. The timer sees what the device does."""
        if self.graph is None:
            self.step_by_hand(turn, counts, timer=timer)
            return
        step = self.manager.begin_step(self._metadata[turn], pad_to=(self.rows, self.tokens))
        self.counts.copy_(counts)
        if timer is not None:
            timer.start()
        self.graph.replay()
        if timer is not None:
            timer.stop()
        step.replayed("defer")

    def replay_verifies(self, turn: int, timer: Timer) -> None:
        """The verifies of a step of set ``turn``, timed; then the step is cancelled, so nothing moves."""
        step = self.manager.begin_step(self._metadata[turn], pad_to=(self.rows, self.tokens))
        timer.start()
        if self.graph is not None:
            self.graph.replay()
        else:
            for layer, out in enumerate(self.outputs):
                step.verify(layer, *self.inputs[layer], out=out)
        timer.stop()
        if self.graph is not None:
            step.replayed("verify")
        step.cancel()

    def warm(self) -> None:
        """Some steps of counts from 1 to T alike, after which rows no longer fill their rings in the same step."""
        longest = self.config.max_query_len
        steps = self.sets * -(-4 * self.config.record_capacity // longest)
        shape = (steps, self.rows)
        self._run(torch.randint(1, longest + 1, shape, generator=self.generator, device=self.machine.device).int())

    def measure(self, replays: int) -> Timed:
        """At least ``replays`` timed steps, and until every ring has been filled twice; raises if one was not."""
        twice = 2 * self.config.record_capacity
        most = max(replays, self.sets * twice)  # a step commits at least one token a row
        drawn = draw_accepted(most, self.rows, self.config.max_query_len, self.generator)
        accepted = drawn.tolist()
        drawn = drawn[: enough_steps(accepted, self.sets, replays, twice)]
        before = [list(rings.committed) for rings in self.rings]
        folds = sum(rings.folds for rings in self.rings)
        timer = self.machine.make_timer()
        self.machine.head_start()
        tables = self._run(drawn, timer)
        times = timer.milliseconds()
        self.check()
        for rings, start in zip(self.rings, before, strict=True):
            cycled = min(now - then for now, then in zip(rings.committed, start, strict=True))
            if cycled < twice:
                raise SpecStateError(f"a ring of {twice // 2} records was not cycled twice: {cycled} tokens")
        mean = sum(map(sum, accepted[: len(drawn)])) / (len(drawn) * self.rows)
        folds = sum(rings.folds for rings in self.rings) - folds
        return Timed(times, tables, mean, folds / len(drawn))

    def note(self, turn: int, accepted: Sequence[int]) -> dict[str, int]:
        """A step of set ``turn`` has accepted so many: the host's account follows; the step's floor."""
        return step_bytes(self.config, *self.rings[turn].step(accepted))

    def check(self) -> None:
        """The device stands where the host's account says, in every request, and has folded as often."""
        for handles, rings in zip(self.handles, self.rings, strict=True):
            stands = [self.manager.committed_len(handle) for handle in handles]
            if stands != rings.committed:
                raise SpecStateError(f"requests stand at {stands[:8]}, not at {rings.committed[:8]}")
        folds, counted = self.manager.metrics().folds, sum(rings.folds for rings in self.rings)
        done = folds.at_end + folds.when_full + folds.in_verify
        if done != counted:
            raise SpecStateError(f"{done} rows were folded, not {counted}")
        for layer in (0, -1):
            if not bool(self.outputs[layer].isfinite().all()):
                raise SpecStateError("an output was not written, or is not finite")

    def states(self, turn: int) -> list[torch.Tensor]:
        """The recurrent states [rows, H, V, K] of a set, a view a layer."""
        slots = sorted(self.manager.checkpoint_slots(self.handles[turn]).tolist())
        first, last = slots[0], slots[-1] + 1
        if last - first != self.rows:
            raise SpecStateError(f"checkpoint slots {slots[:8]} do not lie side by side")
        return [self.manager.checkpoints(layer)[0][first:last] for layer in range(self.config.num_layers)]

    # -- inside

    def _run(self, drawn: torch.Tensor, timer: Timer | None = None) -> list[dict[str, int]]:
        """A step for each line of ``drawn``, sets in turn; their floors. The account is made once all is queued."""
        for index, counts in enumerate(drawn):
            self.replay(index % self.sets, counts, timer)
        return [self.note(index % self.sets, accepted) for index, accepted in enumerate(drawn.tolist())]


def layer_params(config: StateConfig, generator: torch.Generator) -> LayerParams:
    """Of usual size, on the generator's device: rates around 1, decays that matter within a window."""
    spec = config.layer
    taps = spec.conv_kernel_size
    conv = None if taps is None else _normal(generator, spec.conv_channels, taps).mul_(0.5)
    rates = _normal(generator, spec.num_heads).mul_(0.3)
    return LayerParams(rates, _normal(generator, spec.num_heads, spec.head_k_dim), conv, None)


def layer_inputs(config: StateConfig, tokens: int, generator: torch.Generator) -> Inputs:
    """Random, in the activation dtype, on the generator's device."""
    spec, dtype = config.layer, DTYPES[config.activation_dtype]
    return Inputs(
        _normal(generator, tokens, spec.conv_channels).to(dtype),
        _normal(generator, tokens, spec.num_heads, spec.head_k_dim).to(dtype),
        _normal(generator, tokens, spec.num_heads).to(dtype),
    )


def _normal(generator: torch.Generator, *shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=generator, device=generator.device, dtype=torch.float32)
