"""A target's manager and a drafter's in step: every order of transitions, each against its own oracle.

The drafter has recurrent layers of its own, of another number, shape and fold policy. A request is admitted, preempted,
resumed and released in both. The drafter drafts in passes that are cancelled; both then verify the same window, and the
drafter's step ends with the target's counts, now or later. After every rule both hold the states of the tokens that
they have committed, and as many of them, but for windows that the target has ended and the drafter has not.
"""

import os
from dataclasses import dataclass
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tests.factories import POLICIES, amount
from tests.test_lifecycle import NAMES, End, OpenStep, Side


@dataclass
class Window:
    """One window, open in both managers."""

    target: OpenStep
    drafter: OpenStep
    end: End | None = None
    """How the target's step has ended; the drafter's is due."""


class TwoManagers(RuleBasedStateMachine):
    @initialize(
        policies=st.tuples(*[st.sampled_from(POLICIES)] * 2),
        windows=st.tuples(*[st.integers(0, 2)] * 2),
        taps=st.tuples(*[st.sampled_from([None, 2, 4])] * 2),
        checkpoints=st.tuples(*[st.integers(2, 4)] * 2),
        drafter_layers=st.sampled_from([1, 3]),
    )
    def build(self, policies: Any, windows: Any, taps: Any, checkpoints: Any, drafter_layers: int) -> None:
        target, drafter = zip(policies, windows, taps, checkpoints, strict=True)
        self.target = Side(*target, head_k_dim=3, head_v_dim=2)
        self.drafter = Side(*drafter, num_layers=drafter_layers, head_k_dim=2, head_v_dim=3)
        self.windows: list[Window] = []
        for name in NAMES[:2]:
            self._admit(name)

    # -- few rules with many faces each, as in test_lifecycle.py

    @rule(
        data=st.data(),
        face=st.sampled_from("admit,admit,load,release,stale,flush,flush,preempt,resume,resume".split(",")),
    )
    def request(self, data: st.DataObject, face: str) -> None:
        if face == "admit":
            self._admit(data.draw(st.sampled_from(NAMES)))
        elif face == "stale":
            self.target.use_stale_handles()
            self.drafter.use_stale_handles()
        elif face == "flush":
            self._flush(data)
        elif face == "resume":
            self._resume(data.draw(st.sampled_from(sorted(self.target.parked) or NAMES)))
        elif face == "preempt" and self._free():
            name = data.draw(st.sampled_from(self._free()))
            for side in self._sides:
                side.preempt(name, data.draw(st.sampled_from(["records", "folded", "host"])))
        elif self.target.lives and face == "release":
            self._release(data)
        elif self._free():
            # Prefilled by each, at one position.
            name, position = data.draw(st.sampled_from(self._free())), data.draw(st.integers(0, 40))
            for side in self._sides:
                side.load(name, position, data.draw(st.booleans()))

    @rule(data=st.data(), passes=st.integers(1, 3))
    def draft(self, data: st.DataObject, passes: int) -> None:
        """Passes of the drafter alone, each one token longer; nothing of them stays."""
        names = self.drafter.free()
        rows = self.drafter.draw_rows(data, names)
        for length in range(1, passes + 1):
            lens = tuple(min(n, length) for n in rows.lens)
            least = tuple(
                n if kind == "prompt" else min(few, n)
                for n, few, kind in zip(lens, rows.least, rows.kinds, strict=True)
            )
            step = self.drafter.begin(rows._replace(lens=lens, least=least, pad_to=None))
            assert step is not None
            if data.draw(st.integers(0, 4)) == 0:
                self.drafter.flush_step(step)
            layers = range(self.drafter.num_layers)
            self.drafter.verify(step, data.draw(st.permutations(layers))[: data.draw(st.sampled_from([1, 3, 3]))])
            self.drafter.cancel(step)

    @rule(data=st.data(), then=st.sampled_from("leave,verify,cancel,end target,end,end,end".split(",")))
    def begin(self, data: st.DataObject, then: str) -> None:
        rows = self.target.draw_rows(data, self._free())
        steps = [side.begin(rows) for side in self._sides]
        assert steps[0] is not None and steps[1] is not None
        window = Window(steps[0], steps[1])
        self.windows.append(window)
        if then == "cancel":
            self._verify_some(data, window)
            self._cancel(data, window)
        elif then != "leave":
            for side, step in zip(self._sides, steps, strict=True):
                side.verify(step, list(range(side.num_layers)))
            if then.startswith("end"):
                self._end_target(data, window)
            if then == "end":
                self._end_drafter(data, window)

    @precondition(lambda self: self.windows)
    @rule(
        data=st.data(),
        face=st.sampled_from("verify,verify some,write,flush,end,end,end,cancel,release,flush all".split(",")),
    )
    def proceed(self, data: st.DataObject, face: str) -> None:
        window = data.draw(st.sampled_from(self.windows))
        if face == "verify":
            for side, step in self._open(window):
                side.verify(step, list(range(side.num_layers)))
        elif face == "verify some":
            self._verify_some(data, window)
        elif face == "write":
            side, step = data.draw(st.sampled_from(self._open(window)))
            side.write_records(step, data.draw(st.integers(0, side.num_layers - 1)))
        elif face == "flush":
            side, step = data.draw(st.sampled_from(self._open(window)))
            side.flush_step(step)
        elif face == "end":
            if window.end is None:
                self._end_target(data, window)
            else:
                self._end_drafter(data, window)
        elif face == "cancel":
            if window.end is None:
                self._cancel(data, window)
        elif face == "flush all":
            data.draw(st.sampled_from(self._sides)).flush(None)
        elif self.target.lives:
            self._release(data)

    # -- what must hold after every rule

    @invariant()
    def agree(self) -> None:
        if not hasattr(self, "target"):
            return
        due = {id(row.life) for window in self.windows if window.end is not None for row in window.drafter.rows}
        assert self.target.lives.keys() == self.drafter.lives.keys()
        assert self.target.parked.keys() == self.drafter.parked.keys()
        for side in self._sides:
            side.agrees()
        for name, mine in self.target.lives.items():
            theirs = self.drafter.lives[name]
            if id(theirs) in due:
                continue
            lens = [side.manager.committed_len(side.lives[name].handle) for side in self._sides]
            assert lens[0] == lens[1]
            assert mine.finished == theirs.finished

    # -- transitions of both

    @property
    def _sides(self) -> list[Side]:
        return [self.target, self.drafter]

    def _open(self, window: Window) -> list[tuple[Side, OpenStep]]:
        """The steps of a window that have not ended."""
        pairs = [(self.target, window.target), (self.drafter, window.drafter)]
        return pairs if window.end is None else pairs[1:]

    def _free(self) -> list[str]:
        """Requests that are in no step of either."""
        theirs = self.drafter.free()
        return [name for name in self.target.free() if name in theirs]

    def _admit(self, name: str) -> None:
        for side in self._sides:
            side.admit(name)
        # One of them may have had no slot: the other gives its own back.
        for side, other in (self._sides, self._sides[::-1]):
            if name in side.lives and name not in other.lives:
                side.release(name)

    def _resume(self, name: str) -> None:
        for side in self._sides:
            side.resume(name)
        # One of them may have had no slot: the other lets it wait, too.
        for side, other in (self._sides, self._sides[::-1]):
            if name in side.lives and name in other.parked:
                side.preempt(name, "host")

    def _release(self, data: st.DataObject) -> None:
        """From both, whatever steps it is in; the ends to come leave it out."""
        name = data.draw(st.sampled_from(sorted(self.target.lives)))
        for side in self._sides:
            side.release(name)

    def _flush(self, data: st.DataObject) -> None:
        names = sorted(self.target.lives)
        for side in data.draw(st.sampled_from([self._sides, self._sides[:1], self._sides[1:]])):
            some = names and not data.draw(st.booleans())
            side.flush(data.draw(st.lists(st.sampled_from(names), unique=True)) if some else None)

    def _verify_some(self, data: st.DataObject, window: Window) -> None:
        for side, step in self._open(window):
            layers = st.lists(st.integers(0, side.num_layers - 1), unique=True)
            side.verify(step, data.draw(layers))

    def _cancel(self, data: st.DataObject, window: Window) -> None:
        for side, step in data.draw(st.permutations(self._open(window))):
            side.cancel(step)
        self.windows.remove(window)

    def _end_target(self, data: st.DataObject, window: Window) -> None:
        """The counts are the target's; they stay those of the window."""
        end = self.target.draw_end(data, window.target)
        if end.verb == "commit":  # which is given no finished rows
            end = end._replace(finished=[False] * len(end.finished))
        if self.target.end(window.target, end):
            window.end = end

    def _end_drafter(self, data: st.DataObject, window: Window) -> None:
        """With the target's counts and finished requests; what it folds now is the drafter's own choice."""
        assert window.end is not None
        own = self.drafter.draw_end(data, window.drafter)
        size = len(window.end.counts)
        verb = "defer" if any(window.end.finished) else own.verb
        end = window.end._replace(verb=verb, eager=[*own.eager, *[False] * size][:size])
        if self.drafter.end(window.drafter, end):
            self.windows.remove(window)


class TestTwoManagers(TwoManagers.TestCase):
    """80 examples of 30 steps, 30 in CI; SPECSTATE_EXAMPLES and SPECSTATE_STEPS ask for more."""

    settings = settings(
        max_examples=int(os.environ.get("SPECSTATE_EXAMPLES", amount(80, 30))),
        stateful_step_count=int(os.environ.get("SPECSTATE_STEPS", "30")),
    )
