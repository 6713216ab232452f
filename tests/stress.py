"""Random transitions of many requests for a long time, against a model that knows only committed tokens.

    python -m tests.stress --operations 100000 --slots 64

One manager a fold policy on the reference backend, in turn. Requests come, step with several steps of disjoint rows in
flight, ended late and out of order, and fork, are preempted, published, restored, released; slots run short, so that
prefixes are evicted and calls refused. The model is a recurrence of its own in NumPy, float64, vectorised over rows and
layers. In the end every state is compared, every slot is counted, and the process must not have grown.
"""

import argparse
import gc
import os
import random
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from specstate import CapacityError, Handle, PrefixKey, SpecStateError, StateConfig, StateManager, StepMetadata
from specstate.errors import StepOrderError
from specstate.step import Step
from tests.factories import POLICIES, make_config, make_params

TOLERANCE = 1e-9
GROWTH_LIMIT_MIB = 6.0
BLOCK_SIZE = 6
MAX_ROWS = 8
MAX_OPEN = 5


@dataclass(frozen=True)
class State:
    """One request after some tokens, all layers; never changed in place."""

    position: int
    recurrent: np.ndarray  # [layers, V, K]
    conv: np.ndarray  # [layers, C, W-1], oldest input first


class Recurrence:
    """KDA with one head, a token of many requests at a time; shares no code with the package."""

    def __init__(self, config: StateConfig) -> None:
        self.k_dim = config.layer.head_k_dim
        params = make_params(config)
        self._rate = np.exp(np.stack([p.A_log.numpy() for p in params]))  # [layers, 1]
        self._bias = np.stack([p.dt_bias.numpy()[0] for p in params])  # [layers, K]
        weights = [p.conv_weight for p in params]
        biases = [p.conv_bias for p in params]
        self._weight = np.stack([w.numpy() for w in weights if w is not None])  # [layers, C, W]
        self._conv_bias = np.stack([b.numpy() for b in biases if b is not None])  # [layers, C]
        self.channels, self.history = self._weight.shape[1], self._weight.shape[2] - 1
        self.zero = State(
            0,
            np.zeros((len(params), config.layer.head_v_dim, self.k_dim)),
            np.zeros((len(params), self.channels, self.history)),
        )

    def token(self, recurrent: np.ndarray, conv: np.ndarray, inputs: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """States [rows, layers, ..] after a token of ``inputs`` [rows, layers, C + K + 1]: qkv, gate and beta."""
        qkv, gate, beta = np.split(inputs, [self.channels, self.channels + self.k_dim], -1)
        taps = np.concatenate([conv, qkv[..., None]], -1)
        mixed = (taps * self._weight).sum(-1) + self._conv_bias
        mixed = mixed / (1.0 + np.exp(-mixed))
        key, value = mixed[..., self.k_dim : 2 * self.k_dim], mixed[..., 2 * self.k_dim :]
        key = key / np.sqrt((key * key).sum(-1, keepdims=True) + 1e-6)
        decayed = recurrent * np.exp(-self._rate * np.logaddexp(0.0, gate + self._bias))[..., None, :]
        u = (value - (decayed * key[..., None, :]).sum(-1)) / (1.0 + np.exp(-beta))
        return decayed + u[..., None] * key[..., None, :], taps[..., 1:]


@dataclass(eq=False)
class Life:
    """A request from admit to release, preemptions included."""

    name: str
    state: State
    handle: Handle | None = None
    """None while it is preempted."""
    boundary: State | None = None
    finished: bool = False
    flight: "Flight | None" = None
    restored_from: PrefixKey | None = None
    keeps_records: bool = True
    """Of a preempted one."""


@dataclass(eq=False)
class Flight:
    """An open step."""

    step: Step
    lives: list[Life | None]
    """None for dummy rows, and once the request has left the step."""
    lens: list[int]
    prompts: list[bool]
    least: list[int]
    entries: list[int]
    inputs: np.ndarray  # [layers, tokens, C + K + 1]
    verified: int = 0
    left: int = 0


@dataclass
class Tally:
    """What the device counts, by the model's account."""

    clamps: int = 0
    dropped: int = 0
    wasted: int = 0
    windows: int = 0


class World:
    """One manager and the model of it."""

    def __init__(self, policy: str, slots: int, seed: int) -> None:
        self.config = make_config(
            fold_policy=policy,
            num_layers=2,
            num_heads=1,
            head_k_dim=4,
            head_v_dim=4,
            conv_kernel_size=3,
            max_requests=slots,
            num_checkpoints=2 * slots + slots // 4,
            block_size=BLOCK_SIZE,
        )
        self.manager = StateManager(self.config, make_params(self.config))
        self.recurrence = Recurrence(self.config)
        self.rng, self.noise = random.Random(f"{policy} {seed}"), np.random.default_rng([seed, len(policy)])
        self.lives: list[Life] = []
        self.parked: list[Life] = []
        self.flights: list[Flight] = []
        self.published: dict[PrefixKey, State] = {}
        self.lent: list[int] = []
        self.tally = Tally()
        self.worst_error = 0.0
        self.running = ""
        """The operation at hand."""
        self.done: Counter[str] = Counter()
        self._named = 0

    # -- one operation

    def run(self) -> None:
        """A random operation, another one where there is nothing to do it to."""
        what: str | None = "nothing"
        while what == "nothing":
            [self.running] = self.rng.choices(KINDS, WEIGHTS)
            what = OPERATIONS[self.running][0](self)
        self.done[what or self.running] += 1

    def _name(self) -> str:
        self._named += 1
        return f"r{self._named}"

    def _refused(self, error: type[SpecStateError], call: Callable[[], Any]) -> str:
        try:
            call()
        except error:
            return f"refused: {error.__name__}"
        raise AssertionError(f"{error.__name__} was expected")

    def _pick(self) -> Life | None:
        return self.rng.choice(self.lives) if self.lives else None

    def _between(self, life: Life) -> bool:
        return life.flight is not None and 0 < life.flight.verified < self.config.num_layers

    def _add(self, life: Life, handle: Handle) -> None:
        life.handle = handle
        self.lives.append(life)

    def _leave(self, life: Life) -> None:
        """It is in no step any more; the step's end will be dropped."""
        if life.flight is not None:
            flight, life.flight = life.flight, None
            flight.lives[flight.lives.index(life)] = None
            flight.left += 1

    # -- lives

    def admit(self) -> str | None:
        if not self.manager.can_admit():
            return self._refused(CapacityError, lambda: self.manager.admit("none"))
        name = self._name()
        self._add(Life(name, self.recurrence.zero), self.manager.admit(name))
        return None

    def load(self) -> str | None:
        life = self._pick()
        if life is None or life.handle is None:
            return "nothing"
        zero, position = self.recurrence.zero, self.rng.randint(1, 40)
        state = State(position, *(self.noise.standard_normal(x.shape) for x in (zero.recurrent, zero.conv)))
        states = [
            (torch.from_numpy(recurrent)[None], torch.from_numpy(conv))
            for recurrent, conv in zip(state.recurrent, state.conv, strict=True)
        ]
        if life.flight is not None:
            return self._refused(StepOrderError, lambda: self.manager.load(life.handle, states, position))
        self.manager.load(life.handle, states, position)
        life.state, life.boundary, life.finished = state, None, False
        return None

    def release(self) -> str | None:
        life = self._pick()
        if life is None:
            return "nothing"
        self.manager.release(life.handle)
        self.lives.remove(life)
        self._leave(life)
        return None

    def fork(self) -> str | None:
        life = self._pick()
        if life is None:
            return "nothing"
        names = [self._name() for _ in range(self.rng.randint(1, 3))]
        if self._between(life):
            return self._refused(StepOrderError, lambda: self.manager.fork(life.handle, names))
        if not self.manager.can_admit(len(names)):
            return self._refused(CapacityError, lambda: self.manager.fork(life.handle, names))
        for name, handle in zip(names, self.manager.fork(life.handle, names), strict=True):
            self._add(Life(name, life.state, finished=life.finished), handle)
        return None

    def _park(self, how: str, call: Callable[[Handle], None]) -> str | None:
        life = self._pick()
        if life is None or life.handle is None:
            return "nothing"
        if self._between(life):
            handle = life.handle
            return self._refused(StepOrderError, lambda: call(handle))
        call(life.handle)
        self.lives.remove(life)
        self.parked.append(life)
        self._leave(life)
        life.handle, life.keeps_records = None, how == "kept"
        if how != "kept":
            life.boundary = None
        return None

    def preempt(self) -> str | None:
        return self._park("kept", self.manager.preempt)

    def preempt_folded(self) -> str | None:
        return self._park("folded", lambda handle: self.manager.preempt(handle, fold=True))

    def retract(self) -> str | None:
        return self._park("retracted", self.manager.retract)

    def resume(self) -> str | None:
        if not self.parked:
            return "nothing"
        life = self.rng.choice(self.parked)
        try:
            handle = self.manager.resume(life.name)
        except CapacityError:
            if life.keeps_records or self.manager.can_admit():
                raise
            return "refused: CapacityError"
        self.parked.remove(life)
        self._add(life, handle)
        return None

    def discard(self) -> str | None:
        if not self.parked:
            return "nothing"
        life = self.parked.pop(self.rng.randrange(len(self.parked)))
        self.manager.discard(life.name)
        return None

    # -- prefixes

    def publish(self) -> str | None:
        life = self._pick()
        if life is None or not life.state.position:
            return "nothing"
        at_boundary = life.boundary is not None and self.rng.random() < 0.6
        state = life.boundary if at_boundary and life.boundary is not None else life.state
        key = PrefixKey(self._name(), state.position)
        if self._between(life):
            return self._refused(StepOrderError, lambda: self.manager.publish(life.handle, key))
        try:
            self.manager.publish(life.handle, key)
        except CapacityError:
            return "refused: CapacityError"
        self.published[key] = state
        if life.boundary is not None and state.position == life.boundary.position and life.flight is None:
            life.boundary = None  # its slot was handed over
        if len(self.published) > 4 * self.config.max_requests:
            self._forget()
        return "publish a boundary" if at_boundary else "publish"

    def _forget(self) -> None:
        """Evicted prefixes leave the model, too; none of them may be in use."""
        held = self.manager.published()
        used = {life.restored_from for life in (*self.lives, *self.parked)}
        for key in [key for key in self.published if key not in held]:
            assert key not in used, f"{key} is in use and was evicted"
            del self.published[key]
        assert held.keys() == self.published.keys()

    def restore(self) -> str | None:
        if not self.published:
            return "nothing"
        key, name = self.rng.choice(list(self.published)), self._name()
        if not self.manager.is_published(key):
            self._forget()
            return self._refused(SpecStateError, lambda: self.manager.restore(key, name))
        try:
            handle = self.manager.restore(key, name)
        except CapacityError:
            return "refused: CapacityError"
        self._add(Life(name, self.published[key], restored_from=key), handle)
        return None

    def reserve(self) -> str | None:
        """Slots are lent and given back: the pools are out of order."""
        if self.lent:
            self.manager.return_checkpoints(self.lent)
            self.lent = []
            return "return"
        try:
            self.lent = self.manager.reserve_checkpoints(self.rng.randint(1, 4))
        except CapacityError:
            return "refused: CapacityError"
        return None

    # -- steps

    def begin(self) -> str | None:
        rng, idle = self.rng, [life for life in self.lives if life.flight is None]
        if not idle or len(self.flights) == MAX_OPEN:
            return self.end()
        lives: list[Life | None] = [*rng.sample(idle, rng.randint(1, min(MAX_ROWS, len(idle))))]
        if rng.random() < 0.2:
            lives.insert(rng.randrange(len(lives) + 1), None)
        lens = [rng.randint(1, self.config.max_query_len) for _ in lives]
        kinds = ["dummy" if life is None else rng.choices(["decode", "prompt"], [8, 1])[0] for life in lives]
        least = [n if kind == "prompt" else rng.choice([1, 1, 1, n]) for n, kind in zip(lens, kinds, strict=True)]
        entries = rng.sample(range(len(lives) + 2), len(lives))
        metadata = StepMetadata(
            handles=tuple(None if life is None else life.handle for life in lives),
            query_lens=tuple(lens),
            row_kinds=tuple(kinds),
            min_accepted=tuple(least),
            batch_index=tuple(entries),
        )
        tokens = sum(lens) + rng.choice([0, 0, 3])
        try:
            step = self.manager.begin_step(metadata, pad_to=(len(lives) + rng.choice([0, 0, 2]), tokens))
        except CapacityError:
            return "refused: CapacityError"
        width = self.recurrence.channels + self.recurrence.k_dim + 1
        inputs = self.noise.standard_normal((self.config.num_layers, tokens, width))
        flight = Flight(step, lives, lens, [kind == "prompt" for kind in kinds], least, entries, inputs)
        self.flights.append(flight)
        for life in lives:
            if life is not None:
                life.flight = flight
        if rng.random() < 0.05:
            step.flush()
        if rng.random() < 0.85:
            self._verify(flight, self.config.num_layers)
        return None

    def _verify(self, flight: Flight, layers: int) -> None:
        channels, k_dim = self.recurrence.channels, self.recurrence.k_dim
        for layer in range(flight.verified, min(flight.verified + layers, self.config.num_layers)):
            given = torch.from_numpy(flight.inputs[layer])
            gate = given[:, None, channels : channels + k_dim]
            flight.step.verify(layer, given[:, :channels], gate, given[:, channels + k_dim :])
            flight.verified += 1

    def verify(self) -> str | None:
        waiting = [flight for flight in self.flights if flight.verified < self.config.num_layers]
        if not waiting:
            return "nothing"
        self._verify(self.rng.choice(waiting), 1)
        return None

    def end(self) -> str | None:
        if not self.flights:
            return "nothing"
        flight = self.rng.choice(self.flights)
        self._verify(flight, self.config.num_layers)
        rng, count = self.rng, len(flight.lives) + 2
        counts = [rng.randint(1, self.config.max_query_len + (rng.random() < 0.05)) for _ in range(count)]
        finished = [rng.random() < 0.02 for _ in range(count)] if rng.random() < 0.3 else None
        given = torch.tensor(counts, dtype=rng.choice([torch.int32, torch.int64]))
        mask = None if finished is None else torch.tensor(finished)
        commits = rng.random() < 0.2
        if commits:
            flight.step.commit(given, finished=mask)
        else:
            eager = torch.tensor([rng.random() < 0.3 for _ in range(count)]) if rng.random() < 0.3 else None
            flight.step.defer(given, eager=eager, finished=mask)
        self._accept(flight, counts, finished)
        self._close(flight)
        return "commit" if commits else "defer"

    def _accept(self, flight: Flight, counts: list[int], finished: list[bool] | None) -> None:
        """What the step's end does to every request that is still in it."""
        rows: list[tuple[Life, int, int]] = []
        start = 0
        for row, (life, query_len) in enumerate(zip(flight.lives, flight.lens, strict=True)):
            if life is not None:
                prompt, entry = flight.prompts[row], flight.entries[row]
                running = prompt or not life.finished
                accepted = min(max(counts[entry], flight.least[row]), query_len) if running else 0
                self.tally.clamps += running and accepted != counts[entry]
                self.tally.wasted += not running
                self.tally.windows += running and not prompt
                life.finished = not running or (finished is not None and finished[entry])
                if accepted:
                    rows.append((life, start, accepted))
            start += query_len
        self.tally.dropped += flight.left
        if not rows:
            return
        recurrent = np.stack([life.state.recurrent for life, _, _ in rows])
        conv = np.stack([life.state.conv for life, _, _ in rows])
        for offset in range(max(accepted for _, _, accepted in rows)):
            tokens = [start + min(offset, accepted - 1) for _, start, accepted in rows]
            recurrent, conv = self.recurrence.token(recurrent, conv, flight.inputs[:, tokens].swapaxes(0, 1))
            for row, (life, _, accepted) in enumerate(rows):
                position = life.state.position + 1
                if offset >= accepted:
                    continue
                life.state = State(position, recurrent[row].copy(), conv[row].copy())
                if position % BLOCK_SIZE == 0:
                    life.boundary = life.state

    def _close(self, flight: Flight) -> None:
        self.flights.remove(flight)
        for life in flight.lives:
            if life is not None:
                life.flight = None

    def cancel(self) -> str | None:
        if not self.flights:
            return "nothing"
        flight = self.rng.choice(self.flights)
        flight.step.cancel()
        self._close(flight)
        return None

    # -- all at once

    def flush(self) -> str | None:
        chosen = self.rng.sample(self.lives, min(len(self.lives), self.rng.randint(1, 6)))
        handles = [life.handle for life in chosen if life.handle is not None]
        if any(self._between(life) for life in chosen):
            return self._refused(StepOrderError, lambda: self.manager.flush(handles))
        self.manager.flush(handles)
        return None

    def fence(self) -> str | None:
        if any(life.flight is not None for life in self.lives):
            return self._refused(StepOrderError, lambda: self.manager.fence("flush"))
        self.manager.fence("flush")
        return None

    def settle(self) -> str | None:
        """Every open step ends, then a fence; now and then everything is dropped."""
        while self.flights:
            self.end()
        if self.rng.random() < 0.1:
            self.manager.fence("drop")
            self.lives, self.parked, self.published = [], [], {}
            return "fence: drop"
        self.manager.fence("flush")
        return "fence: flush"

    # -- checks

    def look(self) -> str | None:
        life = self._pick()
        if life is None:
            return "nothing"
        if self._between(life):
            return self._refused(StepOrderError, lambda: self.manager.read(life.handle, 0))
        self.check(life)
        return None

    def integrity(self) -> str | None:
        self.manager.check_integrity()
        counted, tally = self.manager.counters(), self.tally
        waiting = [counted.clamps, counted.dropped_ends, counted.wasted_windows, counted.windows]
        assert waiting == [tally.clamps, tally.dropped, tally.wasted, tally.windows], f"{counted}, counted here {tally}"
        return None

    def check(self, life: Life) -> None:
        """A live request stands where the model says, in that state."""
        assert life.handle is not None
        committed_len = self.manager.committed_len(life.handle)
        assert committed_len == life.state.position, f"{life.name} at {committed_len}, not {life.state.position}"
        for layer in range(self.config.num_layers):
            held = self.manager.read(life.handle, layer)
            self._compare(life.name, life.state, layer, held.recurrent, held.conv)

    def check_slot(self, what: str, state: State, slot: int) -> None:
        for layer in range(self.config.num_layers):
            recurrent, conv = self.manager.checkpoints(layer)
            self._compare(what, state, layer, recurrent[slot], None if conv is None else conv[slot])

    def _compare(self, what: str, state: State, layer: int, recurrent: torch.Tensor, conv: torch.Tensor | None) -> None:
        wanted = state.recurrent[layer]
        error = float(np.abs(recurrent[0].numpy() - wanted).max() / max(1.0, np.abs(wanted).max()))
        self.worst_error = max(self.worst_error, error)
        assert error < TOLERANCE, f"state of {what} at {state.position} in layer {layer} is wrong by {error:.1e}"
        assert conv is not None
        assert np.array_equal(conv.numpy(), state.conv[layer]), f"conv history of {what} at {state.position}"

    def finish(self) -> Counter[str]:
        """Checks everything that is held, gives all of it back, and counts the slots; what was checked."""
        while self.flights:
            self.end()
        self.integrity()
        self._forget()
        checked = Counter(live=len(self.lives), preempted=len(self.parked), published=len(self.published))
        held = self.manager.published()
        for key, state in self.published.items():
            self.check_slot(f"prefix {key}", state, held[key])
        for life in list(self.lives):
            self.check(life)
            if life.boundary is not None and life.handle is not None:
                key = PrefixKey("the last of " + life.name, life.boundary.position)
                self.manager.publish(life.handle, key)
                self.check_slot(f"boundary of {life.name}", life.boundary, self.manager.published()[key])
                checked["boundaries"] += 1
            self.manager.release(life.handle)
        for life in list(self.parked):
            life.handle = self.manager.resume(life.name)
            self.check(life)
            self.manager.release(life.handle)
        if self.lent:
            self.manager.return_checkpoints(self.lent)
        self.integrity()
        metrics = self.manager.metrics()
        assert metrics.record_slots_in_use == 0
        assert metrics.checkpoint_slots_in_use == metrics.published_slots
        self.manager.fence("drop")
        assert self.manager.metrics().checkpoint_slots_in_use == 0
        self.manager.check_integrity()
        return checked


#: What may happen, and how often.
OPERATIONS: dict[str, tuple[Callable[[World], str | None], float]] = {
    "begin": (World.begin, 26),
    "verify": (World.verify, 6),
    "end": (World.end, 22),
    "cancel": (World.cancel, 2),
    "admit": (World.admit, 9),
    "load": (World.load, 2),
    "release": (World.release, 9),
    "fork": (World.fork, 4),
    "preempt": (World.preempt, 4),
    "preempt, folded": (World.preempt_folded, 4),
    "retract": (World.retract, 4),
    "resume": (World.resume, 11),
    "discard": (World.discard, 3),
    "publish": (World.publish, 8),
    "restore": (World.restore, 7),
    "reserve": (World.reserve, 1),
    "flush": (World.flush, 2),
    "fence": (World.fence, 0.5),
    "settle": (World.settle, 0.15),
    "look": (World.look, 4),
    "integrity": (World.integrity, 0.5),
}
KINDS, WEIGHTS = list(OPERATIONS), [weight for _, weight in OPERATIONS.values()]


@dataclass
class Report:
    """What a run did."""

    seconds: float = 0.0
    done: Counter[str] = field(default_factory=Counter)
    checked: Counter[str] = field(default_factory=Counter)
    worst_error: float = 0.0
    rss_mib: tuple[float, float] = (0.0, 0.0)
    """After the first tenth and at the end."""
    failure: str | None = None

    @property
    def growth_mib(self) -> float:
        return self.rss_mib[1] - self.rss_mib[0]


def rss_mib() -> float:
    """Memory of this process that is in RAM."""
    gc.collect()
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20


def run(operations: int, seed: int, slots: int, policies: tuple[str, ...] = POLICIES) -> Report:
    """``operations`` in all, each by one of the managers at random; a failure names the operation."""
    report, rng = Report(), random.Random(seed)
    worlds = {policy: World(policy, slots, seed) for policy in policies}
    started, warm = time.perf_counter(), operations // 10
    first = 0.0
    index, world = 0, worlds[policies[0]]
    try:
        for index in range(operations):
            if index == warm:
                first = rss_mib()
            world = worlds[rng.choice(policies)]
            world.run()
        report.rss_mib = first, rss_mib()
        for world in worlds.values():
            world.running = "the end"
            report.checked += world.finish()
    except Exception as error:
        where = f"operation {index} of seed {seed}, {world.running!r} under policy {world.config.fold_policy!r}"
        report.failure = f"{where}: {type(error).__name__}: {error}"
    report.seconds = time.perf_counter() - started
    for world in worlds.values():
        report.done += world.done
        report.worst_error = max(report.worst_error, world.worst_error)
    return report


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--operations", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--slots", type=int, default=64, help="record slots of each manager")
    parser.add_argument("--policy", choices=POLICIES, help="one manager alone; by default one a policy, in turn")
    options = parser.parse_args()
    torch.set_num_threads(1)
    policies = POLICIES if options.policy is None else (options.policy,)
    report = run(options.operations, options.seed, options.slots, policies)
    for name, count in sorted(report.done.items()):
        print(f"  {name:26} {count:8}")
    held = ", ".join(f"{count} {name}" for name, count in report.checked.items())
    print(
        f"{report.done.total()} operations in {report.seconds:.1f} s, seed {options.seed}; states checked at the end: "
        f"{held or 'none'}; worst error {report.worst_error:.1e}; RSS {report.rss_mib[0]:.1f} MiB after a tenth, "
        f"{report.rss_mib[1]:.1f} MiB at the end"
    )
    if report.failure is None and report.growth_mib > GROWTH_LIMIT_MIB:
        report.failure = f"the process has grown by {report.growth_mib:.1f} MiB"
    if report.failure is not None:
        print(f"FAILED: {report.failure}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
