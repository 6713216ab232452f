"""Thousands of steps by CUDA graphs over one path's kernels, with random lives around them, against float64.

    python -m tests.kernels.stress_graphs --steps 10000 --path hopper

One manager a fold policy, in turn. Every step begins into a captured size: graphs that defer or commit, and graphs
without an end, whose steps are ended late, after others of disjoint rows. Accepted counts are made on the device; the
host reads them some steps later. Between the steps, and between begin and replay, requests come, fork, are preempted,
published, restored and released. Every so often, and in the end, all that is held is recomputed from committed tokens
by a recurrence of its own, vectorised over requests.

Without a GPU, or with --interpret-smoke, some dozen steps of small sizes run by hand under Triton's interpreter.
"""

import argparse
import os
import random
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import torch

from specstate import CapacityError, Handle, PrefixKey, SpecStateError, StateConfig, StateManager, StepMetadata
from specstate.step import Step
from tests.factories import POLICIES, LayerInputs, make_config, make_inputs, make_params, verify_all, widened

BLOCK_SIZE = 7
BANK = 4096
#: Requests of so many tokens are released; what they are recomputed from stays short.
LONGEST = 300
#: Steps whose counts the host has not read.
LATE = 12
MAX_FLIGHTS = 4

End = Literal["defer", "commit", "verify"]


class Scale(NamedTuple):
    """How large a run is."""

    graphs: tuple[tuple[int, int, End], ...]
    """(rows, tokens, end) of every captured step."""
    max_requests: int
    steps_between_checks: int


ON_GPU = Scale(
    graphs=(
        (8, 32, "defer"),
        (16, 64, "defer"),
        (32, 128, "defer"),
        (16, 72, "commit"),
        (8, 36, "verify"),
        (16, 68, "verify"),
    ),
    max_requests=48,
    steps_between_checks=1000,
)
INTERPRETED = Scale(
    graphs=((2, 8, "defer"), (3, 12, "defer"), (3, 13, "commit"), (2, 9, "verify"), (3, 14, "verify")),
    max_requests=6,
    steps_between_checks=24,
)


class Oracle:
    """KDA in float64 for many requests at once; shares no code with the package."""

    def __init__(self, config: StateConfig, bank: list[LayerInputs], device: str) -> None:
        spec = config.layer
        self.heads, self.k_dim, self.v_dim = spec.num_heads, spec.head_k_dim, spec.head_v_dim
        params = make_params(config, device=device)
        self._rate = torch.stack([p.A_log.double().exp() for p in params])[:, :, None]  # [layers, H, 1]
        self._bias = torch.stack([p.dt_bias.double() for p in params])  # [layers, H, K]
        self._weight = torch.stack([p.conv_weight.double() for p in params if p.conv_weight is not None])
        self._conv_bias = torch.stack([p.conv_bias.double() for p in params if p.conv_bias is not None])
        self._bank, self._device = bank, device

    def states(self, sequences: list[list[int]]) -> tuple[torch.Tensor, torch.Tensor]:
        """Recurrent [n, layers, H, V, K] and conv [n, layers, C, W-1] states after tokens of the bank."""
        longest = max(map(len, sequences), default=0)
        padded = torch.tensor([tokens + [0] * (longest - len(tokens)) for tokens in sequences], device=self._device)
        lens = torch.tensor([len(tokens) for tokens in sequences], device=self._device)
        layers, channels, taps = self._weight.shape
        shape = (len(sequences), layers, self.heads, self.v_dim, self.k_dim)
        recurrent = torch.zeros(shape, dtype=torch.float64, device=self._device)
        conv = torch.zeros(len(sequences), layers, channels, taps - 1, dtype=torch.float64, device=self._device)
        qkv, gate, beta = (
            torch.stack([getattr(layer, name) for layer in self._bank], 1).double()
            for name in ("qkv", "raw_gate", "raw_beta")
        )  # [bank, layers, ..]
        for index in range(longest):
            token, running = padded[:, index], index < lens
            window = torch.cat([conv, qkv[token][..., None]], -1)
            after = self._token(recurrent, window, gate[token], beta[token])
            recurrent = torch.where(running[:, None, None, None, None], after, recurrent)
            conv = torch.where(running[:, None, None, None], window[..., 1:], conv)
        return recurrent, conv

    def _token(
        self, recurrent: torch.Tensor, window: torch.Tensor, gate: torch.Tensor, beta: torch.Tensor
    ) -> torch.Tensor:
        mixed = (window * self._weight).sum(-1) + self._conv_bias
        mixed = (mixed / (1.0 + (-mixed).exp())).float().double()  # rounded to the activation dtype
        wide = self.heads * self.k_dim
        key = mixed[..., wide : 2 * wide].unflatten(-1, (self.heads, self.k_dim))
        value = mixed[..., 2 * wide :].unflatten(-1, (self.heads, self.v_dim))
        key = key / (key.square().sum(-1, keepdim=True) + 1e-6).sqrt()
        x = gate + self._bias
        decay = (-self._rate * (x.clamp(min=0.0) + (-x.abs()).exp().log1p())).exp()
        decayed = recurrent * decay[..., None, :]
        u = (value - (decayed * key[..., None, :]).sum(-1)) / (1.0 + (-beta).exp())[..., None]
        return decayed + u[..., None] * key[..., None, :]


@dataclass(eq=False)
class Life:
    """A request from admit to release, preemptions included."""

    name: str
    tokens: list[int] = field(default_factory=list)
    """Of the bank, as far as the host has read the counts."""
    handle: Handle | None = None
    boundary_len: int = 0
    flight: "Flight | None" = None
    restored_from: PrefixKey | None = None


@dataclass(eq=False)
class Flight:
    """A step from begin to end."""

    step: Step
    lives: list[Life | None]
    """None for dummy rows, and once the request has left the step."""
    windows: list[list[int]]
    least: list[int]
    entries: list[int]


class Graph:
    """One captured step over buffers of its own: all layers, random counts, and an end unless that is "verify".

    Without a GPU the same calls are made by hand.
    """

    def __init__(self, manager: StateManager, rows: int, tokens: int, end: End) -> None:
        self.manager, self.rows, self.tokens, self.end = manager, rows, tokens, end
        device = manager.device
        self.inputs = make_inputs(manager.config, tokens, 0, device)
        self.noise = torch.zeros(rows, device=device)
        self.eager = torch.zeros(rows, dtype=torch.bool, device=device)
        self.counts = torch.zeros(rows, dtype=torch.int32, device=device)
        self._graph: torch.cuda.CUDAGraph | None = None
        # Once by hand, since libraries set themselves up in their first call, which must not be under capture.
        step = manager.begin_step(StepMetadata(handles=(), query_lens=()), pad_to=(rows, tokens))
        self._calls(step)
        if end == "verify":
            step.cancel()

    def capture(self) -> None:
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph):
            self._calls(self.manager.capture_step(self.rows, self.tokens))

    def _calls(self, step: Step) -> None:
        verify_all(step, self.inputs)
        self.counts.copy_(random_counts(step, self.noise, self.manager.config.max_query_len))
        if self.end == "defer":
            step.defer(self.counts, eager=self.eager)
        elif self.end == "commit":
            step.commit(self.counts)

    def fill(self, bank: list[LayerInputs], tokens: list[int], generator: torch.Generator) -> None:
        """Inputs of these tokens of the bank, of others for padding; new noise."""
        index = torch.tensor(tokens + [7] * (self.tokens - len(tokens)), device=self.manager.device)
        for mine, all_of in zip(self.inputs, bank, strict=True):
            for name in ("qkv", "raw_gate", "raw_beta"):
                torch.index_select(getattr(all_of, name), 0, index, out=getattr(mine, name))
        self.noise.uniform_(generator=generator)
        torch.lt(self.noise.roll(1), 0.2, out=self.eager)

    def run(self, step: Step) -> None:
        if self._graph is None:
            self._calls(step)
        else:
            self._graph.replay()
            step.replayed(self.end)


def random_counts(step: Step, noise: torch.Tensor, longest: int) -> torch.Tensor:
    """[rows] int32 on the device, 1 .. query_len each, of rows without tokens 1."""
    lens = step.query_start_loc.diff().clamp(min=1)
    return torch.minimum((noise * longest).int() + 1, lens).int()


class World:
    """One manager, its graphs, and what its requests have committed."""

    def __init__(self, policy: str, scale: Scale, seed: int, device: str, path: str = "portable") -> None:
        self.config = make_config(
            path=path,
            fold_policy=policy,
            num_layers=2,
            num_heads=2,
            **widened(path, head_k_dim=32, head_v_dim=32),
            conv_kernel_size=4,
            checkpoint_dtype="float32",
            activation_dtype="float32",
            max_requests=scale.max_requests,
            num_checkpoints=2 * scale.max_requests + scale.max_requests // 3,
            block_size=BLOCK_SIZE,
        )
        params = make_params(self.config, device=device)
        self.manager = StateManager(self.config, params, device, backend="triton")
        self.bank = make_inputs(self.config, BANK, 99, device)
        self.oracle = Oracle(self.config, self.bank, device)
        self.rng = random.Random(f"{policy} {seed}")
        self.generator = torch.Generator(device).manual_seed(seed)
        self.graphs = [Graph(self.manager, *graph) for graph in scale.graphs]
        if device == "cuda":
            self.manager.warmup()
            for graph in self.graphs:
                graph.capture()
        self.lives: list[Life] = []
        self.parked: list[Life] = []
        self.flights: list[Flight] = []
        self.published: dict[PrefixKey, list[int]] = {}
        self.done: Counter[str] = Counter()
        self.worst_error = 0.0
        self.checked = 0
        self.running = ""
        self._log: list[tuple[torch.Tensor | None, Callable[[list[int]], None]]] = []
        self._named = 0

    # -- what the host learns late

    def _later(self, apply: Callable[[list[int]], None], counts: torch.Tensor | None = None) -> None:
        """``apply`` is called with ``counts`` once the host has read all counts up to here."""
        self._log.append((None if counts is None else counts.clone(), apply))

    def resolve(self) -> None:
        """Reads the counts of all steps that have ended."""
        tensors = [counts for counts, _ in self._log if counts is not None]
        values = torch.cat(tensors).tolist() if tensors else []
        start = 0
        for counts, apply in self._log:
            size = 0 if counts is None else len(counts)
            apply(values[start : start + size])
            start += size
        self._log.clear()

    def _no_boundary(self, life: Life) -> None:
        def apply(_: list[int]) -> None:
            life.boundary_len = 0

        self._later(apply)

    def _accept(self, flight: Flight, counts: torch.Tensor) -> None:
        """The step has ended: its rows move, those of requests that have left it do not."""
        rows = [
            (life, window, least, entry)
            for life, window, least, entry in zip(
                flight.lives, flight.windows, flight.least, flight.entries, strict=True
            )
            if life is not None
        ]

        def apply(values: list[int]) -> None:
            for life, window, least, entry in rows:
                before = len(life.tokens)
                life.tokens.extend(window[: min(max(values[entry], least), len(window))])
                boundary = len(life.tokens) // BLOCK_SIZE * BLOCK_SIZE
                if boundary > before:
                    life.boundary_len = boundary

        self._later(apply, counts)
        for life, *_ in rows:
            life.flight = None
        if sum(counts is not None for counts, _ in self._log) >= LATE:
            self.resolve()

    # -- steps

    def step(self) -> None:
        """One step into a captured size, and something around it."""
        for _ in range(self.rng.randint(0, 2)):
            self._something()
        if self.flights and (len(self.flights) == MAX_FLIGHTS or self.rng.random() < 0.4):
            self._end(self.rng.choice(self.flights))
        flight = None
        while flight is None:
            while len([life for life in self.lives if life.flight is None]) < 2:
                self._make_room()
            flight, graph = self._begin()
        if self.rng.random() < 0.1:
            self._before_the_replay(flight)
        self.running = f"replay of {graph.rows} rows, {graph.end}"
        graph.run(flight.step)
        self.done[f"step: {graph.end}"] += 1
        if graph.end == "verify":
            self.flights.append(flight)
        else:
            self._accept(flight, graph.counts)

    def _begin(self) -> tuple[Flight | None, Graph]:
        self.running = "begin_step"
        rng, graph = self.rng, self.rng.choice(self.graphs)
        idle = [life for life in self.lives if life.flight is None]
        lives: list[Life | None] = [*rng.sample(idle, rng.randint(1, min(graph.rows, len(idle))))]
        if len(lives) < graph.rows and rng.random() < 0.2:
            lives.insert(rng.randrange(len(lives) + 1), None)
        windows = [[rng.randrange(BANK) for _ in range(rng.randint(1, self.config.max_query_len))] for _ in lives]
        kinds = ["dummy" if life is None else rng.choices(["decode", "prompt"], [8, 1])[0] for life in lives]
        least = [len(w) if kind == "prompt" else 1 for w, kind in zip(windows, kinds, strict=True)]
        shuffled = rng.random() < 0.3
        entries = rng.sample(range(graph.rows), len(lives)) if shuffled else list(range(len(lives)))
        metadata = StepMetadata(
            handles=tuple(None if life is None else life.handle for life in lives),
            query_lens=tuple(map(len, windows)),
            row_kinds=tuple(kinds),
            batch_index=tuple(entries) if shuffled else None,
        )
        graph.fill(self.bank, [token for window in windows for token in window], self.generator)
        try:
            step = self.manager.begin_step(metadata, pad_to=(graph.rows, graph.tokens))
        except CapacityError:
            self.done["refused: CapacityError"] += 1
            self._make_room()
            return None, graph
        flight = Flight(step, lives, windows, least, entries)
        for life in lives:
            if life is not None:
                life.flight = flight
        return flight, graph

    def _before_the_replay(self, flight: Flight) -> None:
        chosen = self.rng.choice([life for life in flight.lives if life is not None])
        how = self.rng.choice(["release", "preempt", "retract", "flush"])
        self.running = f"{how} before the replay"
        if how == "release":
            self._release(chosen)
        elif how == "flush":
            self.manager.flush([chosen.handle] if chosen.handle is not None else [])
        else:
            self._park(chosen, how)
        self.done[f"{how} before the replay"] += 1

    def _end(self, flight: Flight) -> None:
        """Late, by hand, with counts made now."""
        self.running = "a late end"
        self.flights.remove(flight)
        noise = torch.rand(flight.step.num_rows, generator=self.generator, device=self.manager.device)
        counts = random_counts(flight.step, noise, self.config.max_query_len)
        how = self.rng.choices(["defer", "defer with a mask", "commit", "cancel"], [6, 3, 2, 1])[0]
        if how == "cancel":
            flight.step.cancel()
            for life in flight.lives:
                if life is not None:
                    life.flight = None
        elif how == "commit":
            flight.step.commit(counts)
        else:
            flight.step.defer(counts, eager=noise.roll(1) < 0.3 if "mask" in how else None)
        if how != "cancel":
            self._accept(flight, counts)
        self.done[f"late {how}"] += 1

    # -- between steps

    def _something(self) -> None:
        kinds = list(BETWEEN)
        [self.running] = self.rng.choices(kinds, [BETWEEN[kind][1] for kind in kinds])
        try:
            done = BETWEEN[self.running][0](self)
        except CapacityError:
            self.done["refused: CapacityError"] += 1
            return
        self.done[self.running] += done

    def _make_room(self) -> None:
        """Fewer preempted and long requests, more that can step."""
        for life in list(self.lives):
            if life.flight is None and len(life.tokens) > LONGEST // 2:
                self._release(life)
        if self.parked:
            self.discard()
        elif self.flights:
            self._end(self.flights[0])
        elif len(self.lives) > self.config.max_requests // 2:
            self._release(self.rng.choice(self.lives))
        if self.manager.can_admit():
            self.admit()

    def _name(self) -> str:
        self._named += 1
        return f"r{self._named}"

    def _leave(self, life: Life) -> None:
        if life.flight is not None:
            flight, life.flight = life.flight, None
            flight.lives[flight.lives.index(life)] = None

    def _release(self, life: Life) -> None:
        self.manager.release(life.handle)  # type: ignore[arg-type]
        self.lives.remove(life)
        self._leave(life)

    def _park(self, life: Life, how: str) -> None:
        assert life.handle is not None
        if how == "retract":
            self.manager.retract(life.handle)
        else:
            self.manager.preempt(life.handle, fold=how == "preempt, folded")
        self.lives.remove(life)
        self.parked.append(life)
        self._leave(life)
        life.handle = None
        if how != "preempt":
            self._no_boundary(life)

    def admit(self) -> bool:
        if not self.manager.can_admit():
            return False
        name = self._name()
        self.lives.append(Life(name, handle=self.manager.admit(name)))
        return True

    def release(self) -> bool:
        chosen = [life for life in self.lives if len(life.tokens) > LONGEST] or self.lives
        if not chosen:
            return False
        self._release(self.rng.choice(chosen))
        return True

    def fork(self) -> bool:
        if not self.lives:
            return False
        source = self.rng.choice(self.lives)
        names = [self._name() for _ in range(self.rng.randint(1, 2))]
        handles = self.manager.fork(source.handle, names)  # type: ignore[arg-type]
        new = [Life(name, handle=handle) for name, handle in zip(names, handles, strict=True)]
        self.lives += new

        def apply(_: list[int]) -> None:
            for life in new:
                life.tokens = list(source.tokens)

        self._later(apply)
        return True

    def park(self, how: str) -> bool:
        if not self.lives or len(self.parked) > self.config.max_requests // 4:
            return False
        self._park(self.rng.choice(self.lives), how)
        return True

    def resume(self) -> bool:
        if not self.parked:
            return False
        life = self.rng.choice(self.parked)
        life.handle = self.manager.resume(life.name)
        self.parked.remove(life)
        self.lives.append(life)
        return True

    def discard(self) -> bool:
        if not self.parked:
            return False
        self.manager.discard(self.parked.pop(self.rng.randrange(len(self.parked))).name)
        return True

    def publish(self) -> bool:
        self.resolve()
        chosen = [life for life in self.lives if life.tokens]
        if not chosen:
            return False
        life = self.rng.choice(chosen)
        at_boundary = life.boundary_len > 0 and self.rng.random() < 0.6
        key = PrefixKey(self._name(), life.boundary_len if at_boundary else len(life.tokens))
        self.manager.publish(life.handle, key)  # type: ignore[arg-type]
        self.published[key] = life.tokens[: key.num_tokens]
        if key.num_tokens == life.boundary_len and life.flight is None:
            life.boundary_len = 0  # its slot was handed over
        return True

    def _forget(self) -> None:
        """Evicted prefixes leave the model, too; none of them may be in use."""
        held = self.manager.published()
        used = {life.restored_from for life in (*self.lives, *self.parked)}
        for key in [key for key in self.published if key not in held]:
            assert key not in used, f"{key} is in use and was evicted"
            del self.published[key]
            self.done["evicted"] += 1

    def restore(self) -> bool:
        self._forget()
        if not self.published:
            return False
        key, name = self.rng.choice(list(self.published)), self._name()
        if key.num_tokens > LONGEST:
            return False
        handle = self.manager.restore(key, name)
        self.lives.append(Life(name, list(self.published[key]), handle, restored_from=key))
        return True

    def flush(self) -> bool:
        self.manager.flush()
        return True

    def fence(self) -> bool:
        while self.flights:
            self._end(self.flights[0])
        self.manager.fence("flush")
        return True

    # -- checks

    def check(self, tolerance: float) -> None:
        """Everything that is held, against the oracle: live, published, and where every request stands."""
        self.running = "check"
        self.resolve()
        self._forget()
        self.manager.check_integrity()
        held = self.manager.published()
        what = [f"prefix {key}" for key in self.published] + [f"request {life.name}" for life in self.lives]
        sequences = [*self.published.values(), *(life.tokens for life in self.lives)]
        got: list[list[tuple[torch.Tensor, torch.Tensor]]] = []
        layers = range(self.config.num_layers)
        for key in self.published:
            views = [self.manager.checkpoints(layer) for layer in layers]
            got.append([(recurrent[held[key]], conv[held[key]]) for recurrent, conv in views if conv is not None])
        for life in self.lives:
            assert life.handle is not None
            committed_len = self.manager.committed_len(life.handle)
            assert committed_len == len(life.tokens), f"{life.name} is at {committed_len}, not {len(life.tokens)}"
            states = [self.manager.read(life.handle, layer) for layer in layers]
            got.append([(state.recurrent, state.conv) for state in states if state.conv is not None])
        if not got:
            return
        recurrent, conv = self.oracle.states(sequences)
        mine = torch.stack([torch.stack([state for state, _ in pairs]) for pairs in got]).double()
        histories = torch.stack([torch.stack([history for _, history in pairs]) for pairs in got]).double()
        # A row's norm: all heads of a state.
        errors = (mine - recurrent).flatten(2).norm(dim=2) / recurrent.flatten(2).norm(dim=2).clamp(min=1e-30)
        wrong = (histories != conv).flatten(1).any(1).tolist()
        for name, tokens, row, history_is_wrong in zip(what, sequences, errors.tolist(), wrong, strict=True):
            assert max(row) <= tolerance, f"{name} at {len(tokens)}: states are wrong by {row}"
            assert not history_is_wrong, f"{name} at {len(tokens)}: conv history"
            self.worst_error = max(self.worst_error, *row)
        self.checked += len(what)

    def finish(self, tolerance: float) -> None:
        """Ends and checks all, preempted requests and boundary checkpoints too, and counts the slots."""
        self.running = "the end"
        while self.flights:
            self._end(self.flights[0])
        self.check(tolerance)
        self.running = "the end: boundary checkpoints"
        for life in list(self.lives):
            if life.boundary_len:
                key = PrefixKey(self._name(), life.boundary_len)
                self.manager.publish(life.handle, key)  # type: ignore[arg-type]
                self.published[key] = life.tokens[: life.boundary_len]
                self.done["boundary checkpoints at the end"] += 1
        self.check(tolerance)
        self.running = "the end: preempted requests"
        for life in list(self.lives):
            self._release(life)
        while self.parked:
            self.resume()
        self.check(tolerance)
        for life in list(self.lives):
            self._release(life)
        self.running = "the end: slots"
        metrics = self.manager.metrics()
        assert metrics.record_slots_in_use == 0
        assert metrics.checkpoint_slots_in_use == metrics.published_slots
        self.manager.fence("drop")
        assert self.manager.metrics().checkpoint_slots_in_use == 0
        self.manager.check_integrity()


#: What happens between steps, and how often.
BETWEEN: dict[str, tuple[Callable[[World], bool], float]] = {
    "admit": (World.admit, 14),
    "release": (World.release, 10),
    "fork": (World.fork, 5),
    "preempt": (lambda world: world.park("preempt"), 5),
    "preempt, folded": (lambda world: world.park("preempt, folded"), 4),
    "retract": (lambda world: world.park("retract"), 4),
    "resume": (World.resume, 14),
    "discard": (World.discard, 1),
    "publish": (World.publish, 6),
    "restore": (World.restore, 6),
    "flush": (World.flush, 2),
    "fence": (World.fence, 0.5),
}


def run(steps: int, seed: int, device: str, scale: Scale, path: str = "portable") -> tuple[list[World], str | None]:
    """``steps`` in all, a third under each policy; what failed, or None."""
    from tests.kernels.harness import AIM  # imports triton, which must know by then whether to interpret

    tolerance = 10 * AIM
    worlds: list[World] = []
    index = 0
    try:
        for policy in POLICIES:
            worlds.append(World(policy, scale, seed, device, path))
        for index in range(steps):
            worlds[index % len(worlds)].step()
            if (index + 1) % scale.steps_between_checks == 0:
                for world in worlds:
                    world.check(tolerance)
        for world in worlds:
            world.finish(tolerance)
    except (AssertionError, SpecStateError, RuntimeError) as error:
        where = [f"{world.config.fold_policy}: {world.running or 'nothing yet'}" for world in worlds]
        return worlds, f"step {index} of seed {seed} (last, {'; '.join(where)}): {type(error).__name__}: {error}"
    return worlds, None


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, help="10000 by default, 48 under the interpreter")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--path", default="portable", help="kernels that run: portable (the default) or hopper")
    parser.add_argument("--interpret-smoke", action="store_true", help="no graphs, on the CPU, also where a GPU is")
    options = parser.parse_args()
    interpreted = options.interpret_smoke or not torch.cuda.is_available()
    if interpreted:
        os.environ["TRITON_INTERPRET"] = "1"
        torch.set_num_threads(1)
    steps = options.steps or (48 if interpreted else 10_000)
    started = time.perf_counter()
    where = ("cpu", INTERPRETED) if interpreted else ("cuda", ON_GPU)
    worlds, failure = run(steps, options.seed, *where, options.path)
    seconds = time.perf_counter() - started
    done: Counter[str] = sum((world.done for world in worlds), Counter())
    for name, count in sorted(done.items()):
        print(f"  {name:34} {count:7}")
    worst = max((world.worst_error for world in worlds), default=0.0)
    print(
        f"{steps} steps {'by hand, interpreted' if interpreted else 'by graph'} in {seconds:.1f} s, seed "
        f"{options.seed}; {sum(world.checked for world in worlds)} states checked, worst error {worst:.1e}"
    )
    if failure is not None:
        print(f"FAILED: {failure}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
