"""Makes the golden step traces: python tests/traces/make.py [DIRECTORY] (by default, where this file lies).

Each function below walks one kind of fault that state managers have had, under one fold policy. Traces hold no payload,
so most are recorded on backend "metadata", some of them at the size of a published model; those that write records or
change parameters need the reference, at a toy size. Everything is deterministic.
"""

import random
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from specstate.config import KDALayerSpec, StateConfig
from specstate.errors import CapacityError, SpecStateError, StepOrderError
from specstate.manager import StateManager
from specstate.metadata import Handle, StepMetadata
from specstate.params import LayerParams
from specstate.prefixes import PrefixKey
from specstate.presets import KIMI_K3, KIMI_LINEAR_48B
from specstate.sampling import SamplingParams
from specstate.step import Step
from specstate.trace import TraceRecorder
from specstate.validation import DTYPES

POLICIES = ("eager", "deferred", "ring")
TOY = KDALayerSpec(num_heads=2, head_k_dim=8, head_v_dim=12, conv_kernel_size=4, gate_lower_bound=-5.0)


class Script:
    """A manager with a recorder, and short words for what a decode loop does with it."""

    def __init__(self, path: Path, config: StateConfig, backend: str = "metadata") -> None:
        self.config, self.recorder = config, TraceRecorder(path)
        self.payloads = backend == "reference"
        params = self.params() if self.payloads else None
        self.manager = StateManager(config, params, backend=backend, recorder=self.recorder)
        self.handles: dict[str, Handle] = {}
        self.tables: dict[str, list[int]] = {}
        """A line of a block table for each request that has one."""

    def params(self) -> list[LayerParams]:
        spec = self.config.layer
        weight = None if spec.conv_kernel_size is None else torch.zeros(spec.conv_channels, spec.conv_kernel_size)
        one = LayerParams(torch.zeros(spec.num_heads), torch.zeros(spec.num_heads, spec.head_k_dim), weight)
        return [one] * self.config.num_layers

    def admit(self, *names: str, end_token_ids: tuple[int, ...] = ()) -> None:
        for name in names:
            self.handles[name] = self.manager.admit(name, SamplingParams(end_token_ids=end_token_ids))

    def release(self, *names: str) -> None:
        for name in names:
            self.manager.release(self.handles.pop(name))

    def fork(self, source: str, *names: str) -> None:
        self.handles.update(zip(names, self.manager.fork(self.handles[source], names), strict=True))

    def preempt(self, *names: str, fold: bool = False) -> None:
        for name in names:
            self.manager.preempt(self.handles.pop(name), fold)

    def retract(self, *names: str) -> None:
        for name in names:
            self.manager.retract(self.handles.pop(name))

    def resume(self, *names: str) -> None:
        for name in names:
            self.handles[name] = self.manager.resume(name)

    def publish(self, name: str, digest: str, num_tokens: int) -> None:
        self.manager.publish(self.handles[name], PrefixKey(digest, num_tokens))

    def restore(self, digest: str, num_tokens: int, *names: str) -> None:
        for name in names:
            self.handles[name] = self.manager.restore(PrefixKey(digest, num_tokens), name)

    def refuses(self, error: type[Exception], call: Callable[[], object]) -> None:
        """A call that leaves no event, and nothing else either."""
        try:
            call()
        except error:
            self.manager.check_integrity()
        else:
            raise AssertionError("was not refused")

    def load(self, name: str, committed_len: int) -> None:
        # A copied load needs payloads; which of the two it was is all that the trace keeps.
        states = None
        if self.payloads:
            spec, dtype = self.config.layer, DTYPES[self.config.activation_dtype]
            recurrent = torch.zeros(spec.num_heads, spec.head_v_dim, spec.head_k_dim)
            conv = torch.zeros(spec.conv_channels, spec.conv_history_len, dtype=dtype)
            states = [(recurrent, conv if spec.conv_kernel_size else None)] * self.config.num_layers
        self.manager.load(self.handles[name], states, committed_len)

    def begin(self, rows: Sequence[tuple[str | None, int]], pad_to: Any = None, **columns: Any) -> Step:
        """rows: (name, query_len) pairs; a name of None is a dummy."""
        blocks = {name: columns.pop(name, None) for name in ("block_table", "positions")}
        handles = tuple(None if name is None else self.handles[name] for name, _ in rows)
        if None in handles and "row_kinds" not in columns:
            columns["row_kinds"] = tuple("dummy" if handle is None else "decode" for handle in handles)
        metadata = StepMetadata(handles=handles, query_lens=tuple(n for _, n in rows), **columns)
        return self.manager.begin_step(metadata, pad_to, **blocks)

    def blocks(self, *entries: str | None, off: int = 0) -> dict[str, Any]:
        """The block table and positions of ``entries``; ``off``: how far the first of these is beside the truth."""
        width = len(next(iter(self.tables.values())))
        known = [name is not None and name in self.handles for name in entries]
        lines = [self.tables[name] if there else [99] * width for name, there in zip(entries, known, strict=True)]
        places = [
            self.manager.committed_len(self.handles[name]) if there else -5
            for name, there in zip(entries, known, strict=True)
        ]
        places[0] += off
        table, positions = (torch.tensor(column, dtype=torch.int32) for column in (lines, places))
        return {"block_table": table, "positions": positions}

    def verify(self, step: Step, layers: int | None = None) -> Step:
        """The next ``layers`` layers, by default all that are left."""
        first = step.num_verified
        for layer in range(first, self.config.num_layers if layers is None else first + layers):
            step.verify(layer, *self.tensors(step)) if self.payloads else step.verify(layer)
        return step

    def tensors(self, step: Step) -> list[torch.Tensor]:
        spec, dtype = self.config.layer, DTYPES[self.config.activation_dtype]
        shapes = ((spec.conv_channels,), (spec.num_heads, spec.head_k_dim), (spec.num_heads,))
        return [torch.zeros(step.num_tokens, *shape, dtype=dtype) for shape in shapes]

    def write(self, step: Step, layers: int | None = None) -> Step:
        """The same by write_records."""
        spec = self.config.layer
        qkv, gate, _ = self.tensors(step)
        u = torch.zeros(step.num_tokens, spec.num_heads, spec.head_v_dim)
        first = step.num_verified
        for layer in range(first, self.config.num_layers if layers is None else first + layers):
            step.write_records(layer, u, gate, gate, None if spec.conv_kernel_size is None else qkv)
        return step

    def defer(self, step: Step, counts: Sequence[int], **masks: Sequence[bool]) -> None:
        step.defer(self.column(counts), **{name: self.column(mask) for name, mask in masks.items()})

    def commit(self, step: Step, counts: Sequence[int], **masks: Sequence[bool]) -> None:
        step.commit(self.column(counts), **{name: self.column(mask) for name, mask in masks.items()})

    def column(self, values: Sequence[int] | Sequence[bool]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.bool if isinstance(values[0], bool) else torch.int32)

    def window(self, rows: Sequence[tuple[str | None, int]], counts: Sequence[int], **columns: Any) -> None:
        """A whole step, ended as the policy says."""
        self.defer(self.verify(self.begin(rows, **columns)), counts)

    def close(self) -> None:
        self.manager.digest()
        self.manager.check_integrity()
        self.recorder.close()


def toy(policy: str, **fields: Any) -> StateConfig:
    sizes = {"num_layers": 3, "max_requests": 4, "max_query_len": 4} | fields
    return StateConfig(layer=TOY, fold_policy=policy, **sizes)


def k3(policy: str, **fields: Any) -> StateConfig:
    return KIMI_K3.config(8, max_query_len=8, max_requests=4, fold_policy=policy, **fields)


def mixed_windows(path: Path, policy: str) -> None:
    """Class 1: steps without drafts, mixed lengths, rows swapped; at the size of Kimi K3."""
    s = Script(path, k3(policy))
    s.admit("a", "b", "c")
    for query_len, accepted in ((4, 3), (1, 1), (4, 4), (1, 1), (4, 2), (1, 1), (8, 8), (8, 1)):
        s.window([("a", query_len)], [accepted])
    s.load("b", 37)
    s.window([("a", 1), ("b", 4), ("c", 1)], [1, 2, 1])
    s.window([("c", 3), ("a", 8), ("b", 1)], [6, 1, 2], batch_index=(2, 0, 1))
    s.manager.digest()
    s.window([("b", 4), ("c", 2), ("a", 1)], [4, 1, 1])
    step = s.verify(s.begin([("a", 5), ("c", 8), ("b", 1)]))
    s.defer(step, [2, 7, 1], eager=[False, True, False])
    s.commit(s.verify(s.begin([("b", 3), ("a", 1)])), [1, 1])
    s.window([("a", 1), ("b", 1), ("c", 1)], [1, 1, 1])
    s.close()


def smallest_ring(path: Path, policy: str) -> None:
    """Class 1: the fewest records that the policy works with, gone round many times, also at its very edge."""
    windows = {"eager": 1, "deferred": 2, "ring": 2}[policy]
    s = Script(path, toy(policy, record_capacity=4 * windows))
    s.admit("full", "any", "one")
    chance = random.Random(1)
    for _ in range(16):
        query_len = chance.randint(1, 4)
        s.window([("full", 4), ("any", query_len), ("one", 1)], [4, chance.randint(1, query_len), 1])
    s.close()


def windows_and_singles(path: Path, policy: str) -> None:
    """Class 9: a window of four, accepted whole, and four windows of one."""
    s = Script(path, toy(policy))
    s.admit("whole", "singly")
    for _ in range(3):
        s.window([("whole", 4)], [4])
        for _ in range(4):
            s.window([("singly", 1)], [1])
    s.close()


def counts_out_of_range(path: Path, policy: str) -> None:
    """Class 2: counts below, above and at the limits; least counts; prompts; padded rows whose entry holds 1."""
    config = KIMI_LINEAR_48B.config(4, max_query_len=4, max_requests=4, fold_policy=policy)
    s = Script(path, config)
    s.admit("a", "b", "c")
    s.window([("a", 4), ("b", 4), ("c", 4)], [0, 5, 2**31 - 1])
    s.window([("a", 4), ("b", 4), ("c", 2)], [4, 1, 2])
    s.window([("a", 3), ("b", 4)], [1, 9], min_accepted=(2, 4))
    s.window([("a", 4), ("b", 3), ("c", 1)], [0, 1, 1], row_kinds=("prompt", "decode", "decode"))
    s.window([("a", 2), ("b", 4)], [1, 1, 1, 1], pad_to=(4, 12))
    s.window([("c", 4), (None, 2), ("a", 1)], [3, 1, 1, 1], pad_to=5)
    s.window([("a", 4), ("b", 4), ("c", 4)], [4, 4, 4])
    s.window([("a", 4), ("b", 4), ("c", 4)], [1, 1, 1])
    s.close()


def row_identity(path: Path, policy: str) -> None:
    """Class 3: compacted batches, ends that come late or out of order, slots that change hands inside a step."""
    s = Script(path, toy(policy))
    s.admit("a", "b", "c")
    s.window([("a", 4), ("b", 3), ("c", 2)], [2, 3, 1])
    s.release("a")
    s.window([("c", 4), ("b", 1)], [7, 1, 3], batch_index=(2, 1))

    # The first life's end arrives when a second one has its slots.
    s.admit("a")
    s.window([("a", 4)], [3])
    late = s.verify(s.begin([("a", 4), ("b", 2)]))
    s.release("a")
    s.admit("a")
    s.window([("a", 2)], [1])
    s.defer(late, [4, 1])
    s.window([("a", 3), ("b", 4)], [3, 2])

    # Released between two layers; its slots go to d, which goes on before the other layers run.
    late = s.verify(s.begin([("b", 2), ("a", 4), ("c", 1)]), 1)
    s.release("a")
    s.admit("d")
    s.load("d", 5)
    s.window([("d", 3)], [2])
    s.defer(s.verify(late), [2, 4, 1])
    s.window([("d", 4), ("c", 4)], [2, 4])

    # Two steps open at a time, ended in the other order.
    first, second = s.begin([("b", 4)]), s.begin([("d", 2), ("c", 3)])
    s.verify(second, 2)
    s.verify(first)
    s.verify(second)
    s.defer(second, [2, 1])
    s.defer(first, [3])
    s.close()


def slot_reuse(path: Path, policy: str) -> None:
    """Class 4: slots handed on with records pending, a failed admit, requests that resume; at the size of Kimi K3."""
    s = Script(path, k3(policy, num_checkpoints=3))
    s.admit("a")
    s.window([("a", 8)], [5])
    s.release("a")
    s.admit("b")
    s.window([("b", 8)], [6])
    s.admit("c", "d")
    try:
        s.manager.admit("e")
    except CapacityError:
        s.manager.check_integrity()
    s.window([("d", 4), ("c", 2)], [4, 1])
    s.release("c", "b")
    s.admit("b")  # from zero state, its tokens anew as a prompt
    s.window([("b", 6)], [6], row_kinds=("prompt",))
    s.admit("c")
    s.load("c", 3)
    s.window([("b", 8), ("c", 8), ("d", 8)], [2, 8, 1])
    s.load("c", 3)  # back to where it was, pending records dropped
    s.window([("c", 1), ("d", 1)], [1, 1])

    chance = random.Random(2)
    for i in range(24):
        if s.handles and chance.random() < 0.4:
            s.release(chance.choice(sorted(s.handles)))
        if s.manager.can_admit() and chance.random() < 0.7:
            s.admit(f"r{i % 7}" if f"r{i % 7}" not in s.handles else f"s{i}")
        rows = [(name, chance.randint(1, 8)) for name in sorted(s.handles) if chance.random() < 0.6]
        if rows:
            s.window(rows, [chance.randint(1, n) for _, n in rows])
    s.close()


def preempted(path: Path, policy: str) -> None:
    """Class 4: preempted with records pending or folded, resumed in slots that others used; first lives end late."""
    s = Script(path, toy(policy, num_checkpoints=5))
    s.admit("a", "b", "c")
    s.window([("a", 4), ("b", 3), ("c", 4)], [3, 2, 4])
    s.preempt("a")
    s.preempt("b", fold=True)
    s.admit("d")  # in b's record slot
    s.window([("d", 4), ("c", 2)], [4, 1])
    s.manager.digest()
    s.resume("a")
    s.window([("a", 4), ("d", 1)], [2, 1])
    s.release("d")
    s.resume("b")
    s.window([("b", 4), ("a", 4), ("c", 1)], [1, 4, 1])

    # The end of a's first life comes while it is preempted, that of b's when it lives again.
    late, later = s.verify(s.begin([("a", 4), ("c", 2)])), s.verify(s.begin([("b", 3)]))
    s.preempt("a")
    s.preempt("b", fold=True)
    s.defer(late, [4, 2])
    s.resume("b")
    again = s.verify(s.begin([("b", 4)]), 1)
    s.defer(later, [3])
    s.defer(s.verify(again), [2])
    s.resume("a")
    s.window([("a", 2), ("b", 4), ("c", 4)], [1, 4, 2])

    # Before any layer has verified; the step goes on without it, in all layers or after the rest of its first life.
    step = s.begin([("c", 4), ("a", 4)])
    s.preempt("a")
    s.defer(s.verify(step), [3, 4])
    s.resume("a")
    step = s.begin([("a", 4), ("b", 1)])
    s.preempt("a", fold=True)
    s.resume("a")
    s.verify(step).cancel()
    s.preempt("c")
    s.manager.discard("c")
    s.admit("c")  # anew
    s.window([("c", 4), ("a", 4), ("b", 4)], [2, 3, 1])
    s.close()


def retracted(path: Path, policy: str) -> None:
    """Class 8: retracted with records pending, restored into other slots, verified; at every moment that allows it."""
    s = Script(path, k3(policy))
    s.admit("a", "b", "c")
    s.load("b", 21)
    s.window([("a", 8), ("b", 8), ("c", 2)], [5, 3, 2])
    s.retract("a")
    s.admit("d", "e")  # a's slots, and those that are left
    s.window([("d", 8), ("e", 8)], [8, 1])
    s.manager.digest()
    s.release("b")
    s.resume("a")
    s.window([("a", 8), ("d", 8), ("c", 8)], [6, 2, 8])
    s.window([("a", 1)], [1])

    # What was verified and not committed stays behind.
    begun, verified = s.begin([("a", 8), ("c", 4)]), s.verify(s.begin([("d", 8), ("e", 4)]))
    s.retract("a", "d")
    s.admit("f")
    s.window([("f", 8)], [4])
    s.defer(s.verify(begun), [8, 1])
    s.defer(verified, [8, 4])
    s.resume("d")
    s.release("f")
    s.resume("a")
    s.window([("d", 8), ("a", 8), ("c", 8), ("e", 8)], [1, 4, 8, 2])
    s.retract("a")
    s.manager.discard("a")
    s.admit("a")
    s.window([("a", 8), ("d", 4)], [3, 3])
    s.close()


def forked(path: Path, policy: str) -> None:
    """Class 8: forks of requests with and without pending records, in the middle of a step of the source's, too."""
    s = Script(path, toy(policy, max_requests=6))
    s.admit("a", end_token_ids=(5,))
    s.fork("a", "zero")
    s.window([("a", 4), ("zero", 2)], [3, 2])
    s.fork("a", "b", "c")
    s.window([("c", 4), ("a", 4), ("b", 1)], [1, 4, 1])
    s.manager.flush([s.handles["a"]])
    s.fork("a", "d")
    s.window([("d", 4), ("a", 2)], [2, 2])
    s.manager.digest()
    s.release("zero", "b")

    begun = s.begin([("a", 4), ("c", 4)])
    s.fork("a", "e")  # where it stands, not where it might go
    s.window([("e", 4)], [4])
    s.verify(begun)
    s.fork("c", "f")
    s.window([("f", 4)], [3])
    s.defer(begun, [1, 4])
    s.window([("a", 3), ("c", 3), ("e", 3), ("f", 3)], [3, 1, 2, 3])

    s.release("d")
    s.preempt("f")
    s.defer(s.verify(s.begin([("a", 4)])), [4], finished=[True])
    s.release("c")
    s.fork("a", "g")  # has finished, too
    s.window([("g", 2), ("e", 4)], [2, 1])
    s.resume("f")
    s.window([("f", 4), ("a", 1)], [1, 1])
    s.close()


def padding(path: Path, policy: str) -> None:
    """Class 5: padded rows and tokens, dummies, a batch that shrinks; steps of nothing but padding."""
    s = Script(path, toy(policy))
    s.window([(None, 4), (None, 4)], [4, 4], pad_to=(6, 24))
    s.defer(s.verify(s.begin([], pad_to=(4, 16))), [1, 1, 1, 1])
    s.begin([]).cancel()
    s.admit("a", "b", "c")
    s.window([("a", 4), ("b", 4), ("c", 4)], [4, 3, 2], pad_to=(6, 24))
    s.window([("c", 2), ("a", 1)], [1, 1, 1], pad_to=(6, 24))
    s.window([("b", 3)], [2], pad_to=(6, 24))
    s.window([(None, 4), ("a", 2), (None, 1), ("b", 4)], [4, 2, 1, 3], pad_to=(6, 24))
    s.release("b")
    s.window([("c", 4), (None, 1)], [4, 1], pad_to=(6, 7))
    step = s.verify(s.begin([("a", 4), (None, 3), ("c", 4)], pad_to=(5, 20)), 1)
    s.release("a")
    s.defer(s.verify(step), [4, 3, 4])
    s.window([("c", 1)], [1], pad_to=3)
    s.close()


def end_tokens(path: Path, policy: str) -> None:
    """Class 6: lengths of 8 met and crossed; end tokens inside a window, and windows verified after them."""
    s = Script(path, toy(policy, max_query_len=5))
    s.admit("a", "b", "c", "d", end_token_ids=(2, 9))
    s.load("a", 6)
    s.window([("a", 4)], [2])  # exactly on 8
    for committed_len, accepted in ((7, 2), (6, 3), (6, 4), (6, 5), (4, 5)):
        s.load("b", committed_len)
        s.window([("b", 5), ("c", 2)], [accepted, 1])
    step = s.verify(s.begin([("a", 5), ("b", 5), ("c", 5)]))
    s.defer(step, [3, 5, 1], finished=[True, False, False])  # the third of five ends it
    s.window([("a", 5), ("b", 2), ("c", 1)], [4, 2, 1])
    s.manager.flush([s.handles["a"]])
    s.window([("c", 5), ("a", 3)], [7, 0, 4], batch_index=(2, 0))
    step = s.verify(s.begin([("d", 5), ("a", 5), ("b", 3)]))
    s.commit(step, [5, 5, 1], finished=[False, False, True])
    s.window([("d", 5), ("a", 5), ("b", 5)], [2, 5, 5])
    s.load("b", 12)  # goes on from elsewhere: no longer finished
    s.release("a")
    s.admit("a")
    s.window([("b", 5), ("a", 4)], [4, 3])
    s.close()


def boundaries(path: Path, policy: str) -> None:
    """Class 6: checkpoints at multiples of 5: met exactly, crossed by 1 .. T, by several rows, not met after all."""
    s = Script(path, toy(policy, block_size=5, max_requests=5, num_checkpoints=11))
    s.admit("a", "b", "c")
    s.load("a", 3)
    s.window([("a", 4)], [2])  # exactly on 5
    s.load("a", 4)
    s.window([("a", 4)], [1])  # by its first token
    for accepted in (1, 2, 3, 4):  # beyond 10 by 0 .. 3
        s.load("b", 9)
        s.window([("b", 4), ("c", 1)], [accepted, 1])
    s.manager.digest()
    s.window([("c", 3), ("a", 4), ("b", 4)], [3, 4, 3], batch_index=(2, 0, 1))  # of c the last count, too
    s.window([("a", 4), ("b", 4), ("c", 4)], [3, 2, 4], pad_to=(5, 16))
    s.commit(s.verify(s.begin([("b", 4), ("c", 4)])), [4, 1])
    s.defer(s.verify(s.begin([("c", 4), ("b", 1), ("a", 2)])), [4, 1, 2], eager=[False, True, False])

    # An end token before the boundary: what was verified beyond it leaves nothing behind.
    s.load("a", 8)
    s.defer(s.verify(s.begin([("a", 4), ("b", 2)])), [1, 2], finished=[True, False])
    s.window([("a", 4), ("c", 2)], [4, 2])
    s.admit("d")
    s.load("d", 19)
    s.defer(s.verify(s.begin([("d", 4)])), [1], finished=[True])  # on it
    s.window([("d", 4), ("a", 4)], [4, 4], row_kinds=("prompt", "decode"))
    s.manager.digest()

    # Neither a cancel nor a flush reaches one; a count in place of which the end is dropped does not either.
    s.load("a", 13)
    s.verify(s.begin([("a", 4), ("b", 4), ("c", 4)]), 1).cancel()
    step = s.verify(s.begin([("a", 4), ("b", 4)]))
    s.manager.flush(None)
    s.defer(step, [3, 1])
    late = s.verify(s.begin([("a", 4), ("c", 4)]))
    s.release("a")
    s.admit("e")  # in its slots
    s.window([("e", 4)], [4])
    s.defer(late, [4, 4])

    # Between lives: kept with the records, given up with them, and never taken along by a fork.
    s.window([("e", 2), ("c", 4)], [1, 4])
    s.preempt("e")
    s.preempt("b", fold=True)
    s.manager.digest()
    s.retract("c")
    s.resume("e", "c", "b")
    s.window([("e", 4), ("c", 4), ("b", 4)], [2, 4, 4])
    s.fork("e", "f")
    late = s.verify(s.begin([("f", 4), ("e", 4), ("c", 1)]))
    s.preempt("f")
    s.defer(late, [4, 4, 1])
    s.resume("f")
    s.window([("f", 4), ("e", 4), ("b", 4)], [4, 4, 4])
    s.window([("f", 4), ("d", 1)], [3, 1])
    s.manager.fence("flush")
    s.close()


def block_tables(path: Path, policy: str) -> None:
    """Class 6: boundary checkpoints in the caller's slots, while the running one moves from block to block."""
    s = Script(path, toy(policy, block_size=5, num_checkpoints=18))
    s.admit("a", "b", "c")
    for name in ("a", "b"):
        s.tables[name] = s.manager.reserve_checkpoints(4)
    s.window([("a", 4), ("b", 3)], [3, 2], **s.blocks("a", "b"))
    s.window([("a", 4), ("b", 4)], [2, 4], **s.blocks("a", "b"))  # exactly on 5, and beyond it
    s.window([("b", 4), ("a", 1)], [3, 1], batch_index=(1, 0), **s.blocks("a", "b"))
    s.window([("a", 4), ("b", 4)], [4, 4], **s.blocks("a", "b"))
    s.manager.digest()

    # Dummies, padding and entries that no row reads; c has a line of zeros, and one of what are no slots.
    s.tables["c"] = [0, 0, 0, 0]
    s.load("c", 4)
    rows = [("c", 3), (None, 2), ("a", 4)]
    s.window(rows, [1, 2, 1, 3], batch_index=(3, 7, 1), pad_to=(5, 12), **s.blocks(None, "a", "b", "c"))
    s.tables["c"] = [-7, 2**31 - 1, 19, 0]
    s.window([("c", 4), ("b", 1)], [3, 1], **s.blocks("c", "b"))
    s.window([("c", 4), ("b", 1)], [4, 1], **s.blocks("c", "b"))

    # A position that is not the request's: its line is left alone, the others are not.
    s.window([("a", 4), ("b", 4)], [4, 2], **s.blocks("a", "b", off=1))
    s.window([("b", 4), ("a", 4)], [4, 2], **s.blocks("b", "a", off=-5))
    s.window([("b", 4), ("a", 4)], [2, 4], **s.blocks("b", "a"))
    s.manager.digest()

    # Beyond the last block the running checkpoint stays there, and nothing is kept of later ones; nor in steps without.
    s.window([("a", 4), ("b", 4)], [4, 4], **s.blocks("a", "b"))
    s.window([("a", 4), ("b", 4)], [3, 4], **s.blocks("a", "b"))
    s.window([("a", 4), ("c", 4)], [4, 4])
    s.manager.digest()

    # Moved about between lives: a fork and what is folded stand in slots of their own again.
    s.window([("a", 4), ("b", 4)], [1, 2], **s.blocks("a", "b"))
    s.preempt("a")
    s.fork("b", "f")
    s.refuses(SpecStateError, lambda: s.manager.return_checkpoints(s.tables["a"]))
    s.resume("a")
    s.window([("a", 4), ("b", 4)], [2, 1])
    s.preempt("b", fold=True)
    s.manager.return_checkpoints(s.tables.pop("b"))
    s.admit("g")
    s.retract("a")
    s.manager.return_checkpoints(s.tables["a"][1:])
    s.tables = {"a": [s.tables["a"][0], *s.manager.reserve_checkpoints(7)]}
    s.resume("a")
    s.window([("a", 4), ("f", 2)], [4, 2])
    s.window([("a", 4)], [4], **s.blocks("a"))
    late = s.verify(s.begin([("a", 4), ("g", 4)], **s.blocks("a", None)))
    s.release("a")
    s.admit("h")
    s.load("h", 4)
    s.tables["h"] = s.tables["a"][::-1]
    s.defer(late, [4, 4])
    step = s.begin([("h", 4), ("g", 1)], **s.blocks("h", None))
    s.manager.flush(None)
    s.defer(s.verify(step), [4, 1])
    s.load("h", 9)
    s.window([("h", 4)], [1], **s.blocks("h"))
    s.begin([], pad_to=(2, 4), **s.blocks(None)).cancel()
    s.manager.fence("flush")
    s.close()


def last_blocks(path: Path, policy: str) -> None:
    """Class 6: windows that end on a boundary behind which the table has no block, or none yet.

    Source, destination and boundary are one slot then: a fold that takes them one after another folds twice.
    """
    s = Script(path, toy(policy, block_size=5, num_checkpoints=8))
    s.admit("a", "b")
    s.tables = {"a": s.manager.reserve_checkpoints(1), "b": s.manager.reserve_checkpoints(1)}
    s.window([("a", 4), ("b", 4)], [3, 4], **s.blocks("a", "b"))
    s.window([("a", 4), ("b", 4)], [2, 1], **s.blocks("a", "b"))  # exactly on 5, the end of the only block
    s.manager.digest()
    s.tables["a"] += [0, 0]
    s.tables["b"] += [*s.manager.reserve_checkpoints(1), 0]
    s.window([("a", 4), ("b", 4)], [4, 3], **s.blocks("a", "b"))
    s.window([("a", 4), ("b", 4)], [1, 2], **s.blocks("a", "b"))  # exactly on 10: no block there yet, and none behind
    s.manager.digest()
    s.window([("a", 4), ("b", 4)], [4, 3], **s.blocks("a", "b"))
    s.manager.fence("flush")
    s.close()


def loads_in_place(path: Path, policy: str) -> None:
    """Class 6: a prefill that writes the running checkpoint where a block table moved it, and one that is copied."""
    s = Script(path, toy(policy, block_size=4, num_checkpoints=12), backend="reference")
    s.admit("a")
    s.tables["a"] = s.manager.reserve_checkpoints(3)
    s.window([("a", 4)], [4], **s.blocks("a"))
    s.manager.load(s.handles["a"], None, 6)
    s.window([("a", 4)], [3], **s.blocks("a"))
    s.load("a", 3)
    s.window([("a", 4)], [4], **s.blocks("a"))
    step = s.begin([("a", 4)], **s.blocks("a"))
    step.flush()
    s.defer(s.write(step), [4])
    s.close()


def publication(path: Path, policy: str) -> None:
    """Class 7: at what is committed, with records pending; at the checkpoint; at a boundary, in a step and in none."""
    s = Script(path, toy(policy, block_size=5, max_requests=5, num_checkpoints=26))
    s.admit("a", "b")
    s.window([("a", 4), ("b", 2)], [3, 1])
    s.publish("a", "a", 3)  # with records pending
    s.refuses(SpecStateError, lambda: s.publish("a", "none", 2))
    s.window([("a", 4), ("b", 4)], [4, 2])  # beyond 5
    s.publish("a", "a", 5)  # which is handed over
    s.publish("a", "a", 7)
    s.publish("a", "a", 5)  # is there already
    s.manager.digest()
    s.window([("a", 4)], [2])
    s.window([("a", 4), ("b", 4)], [4, 2])  # beyond 10, in a new slot
    step = s.begin([("a", 4), ("b", 4)])
    s.publish("a", "a", 10)  # a copy, for the step may write the slot
    s.verify(step, 1)
    s.refuses(StepOrderError, lambda: s.publish("b", "none", 5))
    s.verify(step)
    s.publish("b", "b", 5)
    s.publish("a", "a", 13)  # what verify folded, or what is pending still
    s.defer(step, [4, 2])
    s.publish("a", "a", 15)
    if policy != "eager":
        # The checkpoint lies behind what is pending.
        s.commit(s.verify(s.begin([("b", 2)])), [1])
        s.window([("b", 2)], [1])
        s.publish("b", "b", 8)
    s.window([("a", 4), ("b", 4)], [2, 2])

    # Copies: neither the sharers nor the publisher touch what is published.
    s.restore("a", 5, "c", "d")
    s.window([("c", 4), ("d", 4), ("a", 4)], [4, 2, 4])
    s.window([("d", 4), ("c", 4)], [3, 4])
    s.publish("c", "c", 13)
    s.publish("d", "d", 10)
    s.manager.digest()
    s.release("a")
    s.restore("c", 13, "e")
    s.preempt("c")  # uses what it came from still
    s.window([("e", 4), ("b", 1)], [2, 1])
    s.publish("e", "e", 15)
    s.retract("d")
    s.resume("d", "c")
    s.fork("e", "f")
    s.window([("e", 1), ("c", 4), ("d", 4), ("f", 4)], [1, 1, 4, 4])
    s.defer(s.verify(s.begin([("f", 4), ("c", 2)])), [2, 1], finished=[True, False])
    s.publish("f", "f", s.manager.committed_len(s.handles["f"]))
    s.manager.fence("flush")
    s.manager.digest()
    s.manager.fence("drop")
    s.handles.clear()
    s.refuses(SpecStateError, lambda: s.restore("a", 5, "x"))
    s.admit("a")
    s.window([("a", 4)], [4])
    s.publish("a", "a", 4)
    s.restore("a", 4, "b")
    s.window([("a", 4), ("b", 4)], [1, 4])
    s.close()


def eviction(path: Path, policy: str) -> None:
    """Class 7: slots run short: what was used longest ago goes, what is in use stays, a name comes back for another."""
    s = Script(path, toy(policy, block_size=4, max_requests=5, num_checkpoints=6))
    s.admit("a")
    for number in (1, 2, 3):
        s.window([("a", 4)], [4])
        s.publish("a", "a", 4 * number)  # handed over, each time
    s.restore("a", 4, "b")
    s.publish("a", "a", 8)  # used again: 12 is the oldest now
    s.manager.digest()
    s.admit("c")  # into the last free slot
    s.window([("c", 2)], [2])
    s.admit("d")  # into that of 12
    s.refuses(SpecStateError, lambda: s.restore("a", 12, "x"))
    s.window([("d", 3), ("b", 3)], [3, 3])
    s.refuses(CapacityError, lambda: s.begin([("a", 4), ("b", 1), ("c", 2)]))
    s.window([("b", 1)], [1])  # its boundary goes into that of 8
    s.refuses(CapacityError, lambda: s.publish("d", "d", 3))
    s.publish("b", "a", 8)  # under a name that was evicted, another state
    s.refuses(CapacityError, lambda: s.restore("a", 8, "x"))  # not in place of itself
    s.manager.digest()
    s.release("d")
    s.restore("a", 8, "e")
    s.window([("b", 3), ("e", 3), ("c", 1)], [2, 3, 1])
    s.preempt("b", fold=True)
    s.release("c")
    s.window([("e", 4), ("a", 3)], [3, 3])  # beyond 12
    s.release("e")
    slots = s.manager.reserve_checkpoints(2)  # of which one held a prefix
    s.resume("b")
    s.window([("b", 4)], [2])
    s.publish("b", "a", 12)
    s.refuses(CapacityError, lambda: s.begin([("b", 4), ("a", 4)]))
    s.manager.return_checkpoints(slots[:1])
    s.window([("b", 4), ("a", 1)], [4, 1])
    s.release("b")
    s.admit("f", "g")  # in place of what was published
    s.manager.digest()
    s.window([("a", 4), ("g", 2)], [3, 1])
    s.close()


def cancel(path: Path, policy: str) -> None:
    """Class 13: an exception in the forward: cancel after none, some and all layers, then the same window again."""
    s = Script(path, toy(policy))
    s.admit("a", "b", "c")
    s.window([("a", 4), ("b", 3)], [3, 3])
    for layers in (0, 1, 2, 3):
        s.verify(s.begin([("b", 4), ("a", 3), ("c", 2)]), layers).cancel()
        s.window([("b", 4), ("a", 3), ("c", 2)], [2, 3, 1])
    for layers in (0, 2, 3):
        step = s.begin([("a", 2), ("c", 4)], pad_to=(4, 10))
        step.flush()
        s.verify(step, layers).cancel()
    step = s.verify(s.begin([("a", 4), ("b", 4), ("c", 4)]), 2)
    s.release("b")
    step.cancel()
    s.admit("b")
    s.window([("c", 4), ("b", 4), ("a", 1)], [3, 2, 1])
    for layers in (1, 3, 1):
        s.verify(s.begin([("c", 4)]), layers).cancel()
    s.window([("c", 4), ("a", 4), ("b", 4)], [4, 4, 4])
    s.close()


def flush(path: Path, policy: str) -> None:
    """Class 13: flushes before the first verify, after the last, twice, and of others in between."""
    s = Script(path, toy(policy))
    s.admit("a", "b", "c")
    s.window([("a", 4), ("b", 3), ("c", 2)], [3, 2, 1])
    step = s.begin([("a", 4), ("b", 2)])
    s.manager.flush([s.handles["a"], s.handles["c"]])
    s.manager.flush([s.handles["a"]])
    s.defer(s.verify(step), [4, 1])

    step = s.verify(s.begin([("b", 4), ("c", 4)]))
    s.manager.flush([s.handles["b"]])
    s.manager.flush(None)
    s.defer(step, [3, 4])

    step = s.begin([("a", 4), ("c", 3)])
    step.flush()
    step.flush()
    s.manager.flush([s.handles["c"]])
    s.defer(s.verify(step), [2, 3])

    step = s.verify(s.begin([("a", 3)]), 2)
    s.manager.flush([s.handles["b"], s.handles["c"]])
    s.manager.digest()
    s.defer(s.verify(step), [1], eager=[True])

    other = s.begin([("b", 4), ("c", 1)])
    s.manager.flush(None)
    s.verify(other, 1)
    s.window([("a", 4)], [4])
    s.commit(s.verify(other), [1, 1])
    s.manager.flush(None)
    s.window([("c", 4), ("b", 4), ("a", 4)], [1, 4, 2])
    s.close()


def written_records(path: Path, policy: str) -> None:
    """Class 13: records of the caller's own kernel, in all layers or in some, after a flush of the step."""
    s = Script(path, toy(policy), backend="reference")
    s.admit("a", "b")
    s.load("b", 6)
    s.window([("a", 4), ("b", 2)], [3, 2])
    step = s.begin([("b", 4), ("a", 4)], pad_to=(3, 10))
    step.flush()
    s.defer(s.write(step), [2, 4])
    s.manager.read(s.handles["a"], 1)
    step = s.begin([("a", 2), ("b", 3)])
    step.flush()
    s.defer(s.verify(s.write(step, 2)), [2, 1])
    step = s.begin([("a", 3), ("b", 4)])
    step.flush()
    s.write(step, 2)
    s.release("b")
    s.admit("c")
    s.commit(s.write(step), [2, 4])
    s.window([("c", 4), ("a", 4)], [4, 1])
    step = s.begin([("c", 4), ("a", 4)])
    step.flush()
    s.write(step, 1).cancel()
    s.window([("c", 4), ("a", 4)], [3, 2])
    s.manager.read(s.handles["c"], 2)
    s.close()


def new_parameters(path: Path, policy: str) -> None:
    """Class 13: weights change between steps, with nothing pending: after a flush, after commits, before any step."""
    s = Script(path, toy(policy), backend="reference")
    s.manager.set_params(s.params())
    s.admit("a", "b")
    s.window([("a", 4), ("b", 4)], [3, 1])
    s.manager.flush(None)
    s.manager.set_params(s.params())
    s.window([("a", 4), ("b", 4)], [2, 4])
    s.commit(s.verify(s.begin([("b", 1), ("a", 4)])), [1, 4])
    s.manager.set_params(s.params())
    s.window([("a", 2), ("b", 2)], [2, 1])
    s.close()


def fence(path: Path, policy: str) -> None:
    """Class 13: fences for new weights: all folded, also of the preempted, or nobody left."""
    s = Script(path, toy(policy), backend="reference")
    s.admit("a", "b", "c", "d")
    s.window([("a", 4), ("b", 4), ("c", 4), ("d", 4)], [3, 1, 4, 2])
    s.preempt("b")
    s.preempt("c", fold=True)
    s.retract("d")
    s.manager.fence("flush")
    s.manager.set_params(s.params())
    s.window([("a", 4)], [2])
    s.resume("d", "b")
    s.window([("b", 4), ("d", 4), ("a", 1)], [4, 1, 1])
    step = s.verify(s.begin([("b", 2), ("d", 3)]))
    s.preempt("b", "d")  # which leaves the step to nobody
    s.manager.fence("flush")
    s.manager.set_params(s.params())
    s.defer(step, [2, 3])
    s.resume("b", "c", "d")
    s.window([("b", 4), ("d", 4), ("a", 1), ("c", 4)], [4, 1, 1, 2])
    s.manager.digest()

    s.preempt("b")
    s.retract("d")
    s.manager.fence("drop")
    s.handles.clear()
    s.manager.set_params(s.params())
    s.admit("b", "a", "d")
    s.window([("a", 4), ("b", 4), ("d", 4)], [2, 4, 1])
    s.close()


def late_ends(path: Path, policy: str) -> None:
    """Class 13: steps end after their requests are gone, and between the verifies of others; at the size of Kimi K3."""
    s = Script(path, k3(policy))
    s.admit("a", "b", "c", "d")
    s.window([("a", 8), ("b", 8), ("c", 8), ("d", 8)], [8, 1, 4, 7])
    first = s.verify(s.begin([("a", 8), ("b", 4)]))
    second = s.verify(s.begin([("c", 8), ("d", 2)]), 30)
    s.release("b")
    s.defer(first, [2, 4])
    s.verify(second, 10)
    s.release("c", "d")
    s.admit("e", "f")
    s.window([("e", 5), ("f", 3), ("a", 8)], [5, 1, 8])
    s.commit(s.verify(second), [8, 2])
    s.window([("a", 1), ("f", 8), ("e", 8)], [1, 8, 3])
    third = s.verify(s.begin([("a", 2), ("e", 2), ("f", 2)]))
    s.release("a", "e", "f")
    s.admit("a", "e", "f")
    s.defer(third, [2, 2, 2])
    s.window([("f", 8), ("e", 8), ("a", 8)], [3, 4, 5])
    s.close()


def model_convolves(path: Path, policy: str) -> None:
    """Class 9: a model that convolves itself, so that there is no conv history; softplus gate."""
    layer = KDALayerSpec(num_heads=2, head_k_dim=8, head_v_dim=12, conv_kernel_size=None)
    s = Script(path, StateConfig(num_layers=2, layer=layer, max_requests=2, max_query_len=3, fold_policy=policy))
    s.admit("a", "b")
    s.load("a", 9)
    for counts in ([3, 1], [1, 3], [2, 2], [3, 3]):
        s.window([("a", 3), ("b", 3)], counts)
    s.verify(s.begin([("b", 2), ("a", 3)]), 1).cancel()
    s.window([("b", 2), ("a", 3)], [1, 2])
    s.close()


TRACES: dict[str, tuple[Callable[[Path, str], None], tuple[str, ...]]] = {
    "class01_mixed_windows": (mixed_windows, POLICIES),
    "class01_smallest_ring": (smallest_ring, POLICIES),
    "class02_counts_out_of_range": (counts_out_of_range, POLICIES),
    "class03_row_identity": (row_identity, POLICIES),
    "class04_slot_reuse": (slot_reuse, POLICIES),
    "class04_preempted": (preempted, POLICIES),
    "class05_padding": (padding, POLICIES),
    "class06_end_tokens": (end_tokens, POLICIES),
    "class06_boundaries": (boundaries, POLICIES),
    "class06_block_tables": (block_tables, POLICIES),
    "class06_last_blocks": (last_blocks, POLICIES),
    "class06_loads_in_place": (loads_in_place, POLICIES),
    "class07_publication": (publication, POLICIES),
    "class07_eviction": (eviction, POLICIES),
    "class08_forked": (forked, POLICIES),
    "class08_retracted": (retracted, POLICIES),
    "class09_windows_and_singles": (windows_and_singles, ("ring",)),
    "class09_model_convolves": (model_convolves, ("deferred", "ring")),
    "class13_cancel": (cancel, POLICIES),
    "class13_fence": (fence, POLICIES),
    "class13_flush": (flush, POLICIES),
    "class13_late_ends": (late_ends, POLICIES),
    "class13_new_parameters": (new_parameters, POLICIES),
    "class13_written_records": (written_records, POLICIES),
}


def make_all(directory: Path) -> list[Path]:
    """Writes every trace into ``directory`` and returns their paths."""
    paths = []
    for name, (make, policies) in TRACES.items():
        for policy in policies:
            path = directory / f"{name}_{policy}.jsonl"
            make(path, policy)
            paths.append(path)
    return paths


if __name__ == "__main__":
    print(*make_all(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent), sep="\n")
