"""Executing mode: the engine's calls with real tensors of a small shape, every state compared with the oracle.

Layers shrink to 2 of 1 head, 16 x 16, as in a replay; lengths, slots, windows and policy stay. The inputs of a token
follow from the seed, the request's life, the position and the attempt (replay/inputs.py), so that nothing is stored.
"""

from collections.abc import Sequence
from typing import Any, Literal

import torch

from specstate.config import StateConfig
from specstate.errors import SpecStateError
from specstate.manager import StateManager
from specstate.metadata import Handle, StepMetadata
from specstate.prefixes import PrefixKey
from specstate.replay import replay_config
from specstate.replay.checks import Checks
from specstate.replay.inputs import token_inputs
from specstate.replay.model import Expected, Life, Model
from specstate.replay.steps import OpenStep, Verifier
from specstate.scheduler.managed import Managed
from specstate.step import Step
from specstate.trace import TraceRecorder
from specstate.validation import DTYPES


class WithoutReads(TraceRecorder):
    """Leaves out reads: they are the oracle's looks, and no part of the traffic."""

    def record(self, kind: str, **fields: Any) -> None:
        if kind != "read":
            super().record(kind, **fields)


class Executing(Managed):
    """``Managed`` on backend "reference" or "triton". Raises Differs at the first state, output, conv history, slot or
    counter that the oracle has otherwise; a recorder must be ``WithoutReads``."""

    def __init__(
        self,
        config: StateConfig,
        seed: int,
        backend: Literal["reference", "triton"] = "reference",
        recorder: WithoutReads | None = None,
        debug: bool = False,
    ) -> None:
        if not isinstance(recorder, WithoutReads | None):
            raise SpecStateError("recorder: the oracle's reads would stand in the trace; give a WithoutReads")
        self._is_recorded = recorder is not None
        self._config = replay_config(config, False, backend)
        self._model = Model(self._config, seed)
        on_gpu = backend == "triton" and torch.cuda.is_available()
        self._device = torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")
        params = [layer.to(self._device) for layer in self._model.params]
        self.manager = StateManager(
            self._config, params, device=self._device, backend=backend, recorder=recorder, debug=debug
        )
        self._checks = Checks(self.manager, payloads=True)
        self._verifier = Verifier(self._model, self._checks, self._config.num_layers, payloads=True)
        self._lives: dict[Handle, Life] = {}
        self._aside: dict[str, Life] = {}
        self._prefixes: dict[PrefixKey, list[Expected]] = {}
        self._open: dict[int, OpenStep] = {}
        self._num_states = self._num_outputs = 0

    # -- requests

    def admit(self, name: str) -> Handle:
        handle = super().admit(name)
        self._lives[handle] = self._model.life(handle, self._slot(handle))
        self._compare([self._lives[handle]])
        return handle

    def restore(self, key: PrefixKey, name: str) -> Handle:
        handle = super().restore(key, name)
        life = self._model.restored(self._prefixes[key], handle, self._slot(handle), key.num_tokens)
        self._lives[handle] = life
        self._compare([life])
        return handle

    def load(self, handle: Handle, committed_len: int) -> None:
        life = self._lives[handle]
        life.layers = [self._prefilled(life, layer, committed_len) for layer in range(self._config.num_layers)]
        for layer, expected in enumerate(life.layers):
            recurrent, conv = self.manager.checkpoints(layer)
            recurrent[life.checkpoint_slot] = expected.state.recurrent.to(self._device, recurrent.dtype)
            if conv is not None:
                conv[life.checkpoint_slot] = expected.state.conv.to(self._device, conv.dtype)
        super().load(handle, committed_len)
        life.windows.clear()
        life.stood.clear()
        life.stand_at(committed_len, self._config.record_capacity)
        life.finished, life.boundary_len = False, 0
        self._compare([life])

    def publish(self, handle: Handle, key: PrefixKey) -> None:
        life, known = self._lives[handle], self.manager.is_published(key)
        super().publish(handle, key)
        slot = self.manager.published()[key]
        if not known:
            at_boundary = key.num_tokens == life.boundary_len
            layers = life.boundary_layers if at_boundary else life.layers
            self._prefixes[key] = [self._model.folded(expected) for expected in layers]
            if at_boundary:
                life.boundary_slot = life.boundary_len = 0  # handed over
        self._checks.compare_slot(f"{key}", slot, self._prefixes[key])
        self._compare([life], {slot})

    def retract(self, handle: Handle) -> None:
        super().retract(handle)
        life = self._end(handle)
        life.layers = [self._model.folded(expected) for expected in life.layers]
        self._aside[handle.request_id] = life
        self._compare([], {life.checkpoint_slot})

    def resume(self, name: str) -> Handle:
        handle = super().resume(name)
        life = self._lives[handle] = self._model.continued(self._aside.pop(name), handle, self._slot(handle))
        self._compare([life])
        return handle

    def discard(self, name: str) -> None:
        super().discard(name)
        del self._aside[name]
        self._compare([])

    def release(self, handle: Handle) -> None:
        super().release(handle)
        self._end(handle)
        self._compare([])

    def drop_prefixes(self) -> None:
        super().drop_prefixes()
        self._prefixes.clear()
        self._compare([])

    # -- steps

    def begin(self, metadata: StepMetadata) -> Step:
        step = super().begin(metadata)
        rows = [None if handle is None else self._lives[handle] for handle in metadata.handles]
        for life, slot in zip(rows, step.boundary_slots.tolist(), strict=True):
            assert life is not None
            life.open_step, life.boundary_slot = step.index, slot
        self._open[step.index] = OpenStep(step, metadata, rows)
        self._checks.device_rows(step, rows, metadata)
        self._compare([])
        return step

    def verify(self, step: Step) -> None:
        self._verifier.finish(self._open[step.index])
        self._num_outputs += step.num_tokens * self._config.num_layers

    def defer(self, step: Step, counts: Sequence[int], finished: Sequence[bool] | None) -> None:
        opened = self._open.pop(step.index)
        mask = None if finished is None else torch.tensor(finished, device=self._device)
        step.defer(torch.tensor(counts, dtype=torch.int32, device=self._device), finished=mask)
        slots, crossed = set(opened.slots), []
        for row, life in enumerate(opened.rows):
            if life is not None:
                life.open_step = None
                if self._accept(opened, row, life, counts[row], finished is not None and finished[row]):
                    crossed.append(life)
                    slots.add(life.boundary_slot)
        self._checks.dropped_ends += opened.num_released
        for life in opened.lives:
            life.layers = [self._model.folded(expected) for expected in life.layers]
        self._compare(opened.lives, slots)
        for life in crossed:
            what = f"boundary of {life.handle} at {life.boundary_len}"
            self._checks.compare_slot(what, life.boundary_slot, life.boundary_layers)
            self._num_states += self._config.num_layers

    def checked(self) -> dict[str, Any]:
        return {
            "states": self._num_states,
            "outputs": self._num_outputs,
            "dropped_ends": self._checks.dropped_ends,
            "wasted_windows": self._checks.wasted_windows,
        }

    # -- inside

    def _accept(self, opened: OpenStep, row: int, life: Life, count: int, ends: bool) -> bool:
        """What the end of its row must do to a request; whether it kept a boundary checkpoint."""
        if life.finished and not opened.is_prompt(row):
            self._checks.wasted_windows += 1
            count = 0
        else:
            life.finished = ends
        before, block = life.committed_len, self._config.block_size
        after = before + count
        crosses = block is not None and after // block > before // block
        if crosses:
            assert block is not None
            boundary = after // block * block
            layers = self._states(opened, row, boundary - before)
            life.boundary_len = boundary
            life.boundary_layers = [self._model.folded(expected) for expected in layers]
        life.layers = self._states(opened, row, count)
        life.stand_at(after, self._config.record_capacity)
        return crosses

    def _prefilled(self, life: Life, layer: int, stop: int) -> Expected:
        """What a prefill kernel writes that goes on from where the request stands, restored prefixes included."""
        positions, expected = range(life.committed_len, stop), life.layers[layer]
        inputs = token_inputs(self._config, [life.key] * len(positions), positions, [0] * len(positions), layer)
        for index in range(len(positions)):
            expected = self._model.token(layer, expected, inputs, index).after
        state = expected.state
        stored = state._replace(recurrent=state.recurrent.to(DTYPES[self._config.checkpoint_dtype]).double())
        return expected._replace(state=stored, noise=0.0)  # the manager is given this very state

    def _states(self, opened: OpenStep, row: int, count: int) -> list[Expected]:
        return [opened.prefixes[layer][row][count] for layer in range(self._config.num_layers)]

    def _compare(self, lives: list[Life], written: set[int] | None = None) -> None:
        """Every state of ``lives``, all counters and rules; nothing else was written but ``written``."""
        self._checks.only_slots_changed({life.checkpoint_slot for life in lives} | (written or set()))
        self._checks.counters()
        self._checks.integrity()
        for life in lives:
            self._checks.compare_state(life, read=True)
            self._num_states += self._config.num_layers

    def _end(self, handle: Handle) -> Life:
        """A life ends, in the middle of a step maybe."""
        life = self._lives.pop(handle)
        if life.open_step is not None:
            self._open[life.open_step].release(life)
            life.open_step = None
        return life

    def _slot(self, handle: Handle) -> int:
        return int(self.manager.checkpoint_slots([handle])[0])
