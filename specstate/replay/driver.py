"""Drives a manager through the events of a trace, by its public face alone, and compares after each of them."""

import io
from collections.abc import Callable
from typing import Any, Literal

import torch

from specstate.config import StateConfig
from specstate.manager import StateManager
from specstate.metadata import Handle
from specstate.prefixes import PrefixKey
from specstate.replay.checks import Checks, Differs
from specstate.replay.files import OracleFiles
from specstate.replay.model import Expected, Life, Model, check_loaded_len
from specstate.replay.steps import OpenStep, Verifier
from specstate.trace.schema import (
    Admit,
    BeginStep,
    BindStorage,
    Cancel,
    Commit,
    Defer,
    Digest,
    Discard,
    Event,
    Export,
    Fence,
    Flush,
    Fork,
    Header,
    Import,
    Load,
    Preempt,
    Publish,
    Read,
    Recover,
    Release,
    ReleaseStorage,
    Reserve,
    Restore,
    Resume,
    Retract,
    Return,
    SetParams,
    Snapshot,
    StepFlush,
    TraceError,
)
from specstate.transfer import RequestEntry, read_file
from specstate.validation import DTYPES

#: Rows and tokens of a step, padding included, that a replay with payloads runs: what a graph pads to, many times over.
MAX_PADDED = 2**16

ReplayBackend = Literal["reference", "metadata", "triton"]


class Driver:
    """One replay. ``config``: what it runs with, in place of the header's.

    Building it raises what building the manager raises; ``apply`` and ``finish`` raise Differs.
    """

    def __init__(self, header: Header, config: StateConfig, backend: ReplayBackend) -> None:
        self._config, self._model = config, Model(config, header.seed)
        on_gpu = backend == "triton" and torch.cuda.is_available()
        self._device = torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")
        self._payloads = backend != "metadata"
        params = [layer.to(self._device) for layer in self._model.params] if self._payloads else None
        # Without debug, which refuses the counts out of range that a trace may hold; the checks follow every event.
        self._manager = StateManager(config, params, device=self._device, backend=backend)
        self._checks = Checks(self._manager, self._payloads)
        self._verifier = Verifier(self._model, self._checks, header.config.num_layers, self._payloads)
        self._lives: dict[Handle, Life] = {}
        self._files = OracleFiles(config, self._model, self._payloads)
        self._is_released = False
        self._preempted: dict[str, Life] = {}
        self._prefixes: dict[PrefixKey, list[Expected]] = {}
        """What is published, and what was evicted since the last publish."""
        self._ended_blocks: list[tuple[str, int, list[Expected]]] = []
        """Of a step that is ending: boundary checkpoints in the caller's slots."""
        self._steps: dict[int, OpenStep] = {}
        self._apply: dict[type[Event], Callable[[Any], list[Life]]] = {
            Admit: self._admit,
            Load: self._load,
            Release: self._release,
            Fork: self._fork,
            Preempt: self._preempt,
            Retract: self._preempt,
            Resume: self._resume,
            Discard: self._discard,
            Publish: self._publish,
            Restore: self._restore,
            Reserve: self._reserve,
            Return: self._return,
            Export: self._export,
            Import: self._import,
            Snapshot: self._snapshot,
            Recover: self._recover,
            ReleaseStorage: self._release_storage,
            BindStorage: self._bind_storage,
            BeginStep: self._begin_step,
            StepFlush: self._step_flush,
            Commit: self._end_step,
            Defer: self._end_step,
            Cancel: self._cancel,
            Flush: self._flush,
            Fence: self._fence,
            Read: self._read,
            SetParams: self._set_params,
            Digest: self._digest,
        }

    def apply(self, event: Event) -> None:
        """Does what the event says and compares the requests that it concerns."""
        for number, (verified, written) in sorted((event.verified or {}).items()):
            self._verifier.catch_up(self._open(number), verified, written)
        self._compare(self._apply[type(event)](event))

    def finish(self) -> None:
        """The state of every request once the trace has ended: as it stands, and with all pending records folded."""
        self._compare(list(self._lives.values()))
        for open_step in list(self._steps.values()):
            self._cancel_step(open_step)
        self._compare(self._flush_everyone())

    # -- one method a kind; each returns the requests that the event concerns

    def _admit(self, event: Admit) -> list[Life]:
        handle = self._checks.call(lambda: self._manager.admit(event.handle.request_id, event.sampling))
        slot = int(self._manager.checkpoint_slots([handle])[0])
        self._checks.equal("handle", handle, event.handle)
        self._checks.equal("checkpoint slot", slot, event.checkpoint_slot)
        life = self._lives[handle] = self._model.life(handle, slot)
        self._checks.only_slots_changed({slot})
        return [life]

    def _load(self, event: Load) -> list[Life]:
        life = self._life(event.handle)
        states = None
        if self._payloads:
            check_loaded_len("a load", event.committed_len)
            life.layers = self._model.loaded(life, event.committed_len)
            states = [self._as_stored(expected) for expected in life.layers]
            if event.in_place:
                for layer, (recurrent, conv) in enumerate(states):
                    pool, conv_pool = self._manager.checkpoints(layer)
                    pool[life.checkpoint_slot] = recurrent
                    if conv_pool is not None and conv is not None:
                        conv_pool[life.checkpoint_slot] = conv
                states = None
        self._checks.call(lambda: self._manager.load(event.handle, states, event.committed_len))
        life.windows.clear()
        life.stood.clear()
        life.stand_at(event.committed_len, self._config.record_capacity)
        life.finished, life.boundary_len = False, 0
        self._checks.only_slots_changed({life.checkpoint_slot})
        return [life]

    def _release(self, event: Release) -> list[Life]:
        life = self._life(event.handle)
        self._checks.call(lambda: self._manager.release(event.handle))
        del self._lives[event.handle]
        self._leave_step(life)
        self._checks.only_slots_changed(set())
        return []

    def _fork(self, event: Fork) -> list[Life]:
        source, names = self._life(event.handle), [handle.request_id for handle in event.handles]
        handles = self._checks.call(lambda: self._manager.fork(event.handle, names, event.sampling))
        slots = tuple(self._manager.checkpoint_slots(handles).tolist())
        self._checks.equal("handles", tuple(handles), event.handles)
        self._checks.equal("checkpoint slots", slots, event.checkpoint_slots)
        lives = [self._model.continued(source, handle, slot) for handle, slot in zip(handles, slots, strict=True)]
        self._lives.update(zip(handles, lives, strict=True))
        self._folded(lives)
        return [source, *lives]

    def _preempt(self, event: Preempt | Retract) -> list[Life]:
        life, name = self._life(event.handle), event.handle.request_id
        if isinstance(event, Retract):
            self._checks.call(lambda: self._manager.retract(event.handle))
        else:
            self._checks.call(lambda: self._manager.preempt(event.handle, fold=event.fold))
        if isinstance(event, Retract) or event.fold:
            # Folded where it lay, and copied home from wherever a block table had moved it.
            lay, life.checkpoint_slot = life.checkpoint_slot, life.home_slot
            life.boundary_slot = life.boundary_len = 0
            self._folded([life], {lay})
        else:  # what its step has verified may have been folded there, and its end will not say so
            life.layers = [self._model.folded(expected) for expected in life.layers]
        del self._lives[event.handle]
        self._leave_step(life)
        if isinstance(event, Retract):
            life.checkpoint_slot = 0
        self._preempted[name] = life
        self._checks.only_slots_changed(set())
        return []

    def _resume(self, event: Resume) -> list[Life]:
        name = event.handle.request_id
        handle = self._checks.call(lambda: self._manager.resume(name))
        slot = int(self._manager.checkpoint_slots([handle])[0])
        self._checks.equal("handle", handle, event.handle)
        preempted = self._preempted.pop(name)
        life = self._lives[handle] = self._model.continued(preempted, handle, event.checkpoint_slot)
        if preempted.checkpoint_slot:  # else it had none
            life.checkpoint_slot = preempted.checkpoint_slot
            life.stood |= preempted.stood
            life.boundary_slot, life.boundary_len = preempted.boundary_slot, preempted.boundary_len
            life.boundary_layers = preempted.boundary_layers
            life.home_slot = preempted.home_slot
        self._checks.equal("checkpoint slot", slot, life.checkpoint_slot)
        self._checks.equal("checkpoint slot of its own", life.home_slot, event.checkpoint_slot)
        self._checks.only_slots_changed({slot})
        return [life]

    def _discard(self, event: Discard) -> list[Life]:
        self._checks.call(lambda: self._manager.discard(event.request_id))
        self._preempted.pop(event.request_id)
        self._checks.only_slots_changed(set())
        return []

    def _fence(self, event: Fence) -> list[Life]:
        if event.mode == "flush":
            return self._flush_everyone()
        self._checks.call(lambda: self._manager.fence("drop"))
        self._lives.clear()
        self._preempted.clear()
        self._prefixes.clear()
        self._checks.only_slots_changed(set())
        return []

    def _publish(self, event: Publish) -> list[Life]:
        life, key = self._life(event.handle), event.key
        # Of what was evicted the digest tells, by the slots of what is left.
        published = self._manager.published()
        self._prefixes = {known: layers for known, layers in self._prefixes.items() if known in published}
        self._checks.call(lambda: self._manager.publish(event.handle, key))
        slot = self._manager.published().get(key)
        self._checks.equal("checkpoint slot", slot, event.checkpoint_slot)
        if key not in self._prefixes:
            self._prefixes[key] = self._published_layers(life, key.num_tokens)
            if key.num_tokens == life.boundary_len and life.open_step is None:
                life.boundary_slot = life.boundary_len = 0  # handed over
        self._checks.only_slots_changed({event.checkpoint_slot})
        self._checks.compare_slot(f"{key}", event.checkpoint_slot, self._prefixes[key])
        return [life]

    def _published_layers(self, life: Life, num_tokens: int) -> list[Expected]:
        if num_tokens == life.committed_len:
            layers = life.layers
        elif num_tokens == life.boundary_len:
            layers = life.boundary_layers
        elif num_tokens in life.stood:
            layers = life.stood[num_tokens]
        else:
            raise Differs(f"{life.handle} never stood at {num_tokens} tokens, and publishing them was not refused")
        return self._stored(layers)

    def _stored(self, layers: list[Expected]) -> list[Expected]:
        """As a checkpoint holds them."""
        return [self._model.folded(expected) for expected in layers]

    def _restore(self, event: Restore) -> list[Life]:
        name, key = event.handle.request_id, event.key
        handle = self._checks.call(lambda: self._manager.restore(key, name, event.sampling))
        slot = int(self._manager.checkpoint_slots([handle])[0])
        self._checks.equal("handle", handle, event.handle)
        self._checks.equal("checkpoint slot", slot, event.checkpoint_slot)
        if key not in self._prefixes:
            raise Differs(f"{key} was never published, and restoring it was not refused")
        life = self._lives[handle] = self._model.restored(self._prefixes[key], handle, slot, key.num_tokens)
        self._checks.only_slots_changed({slot})
        return [life]

    def _reserve(self, event: Reserve) -> list[Life]:
        slots = self._checks.call(lambda: self._manager.reserve_checkpoints(len(event.checkpoint_slots)))
        self._checks.equal("reserved slots", tuple(slots), event.checkpoint_slots)
        return []

    def _return(self, event: Return) -> list[Life]:
        self._checks.call(lambda: self._manager.return_checkpoints(event.checkpoint_slots))
        return []

    def _export(self, event: Export) -> list[Life]:
        life, file = self._life(event.handle), io.BytesIO()
        self._checks.call(lambda: self._manager.export(event.handle, file, event.fold))
        file.seek(0)
        [image] = read_file(file)[1]
        self._checks.equal("committed_len of the export", image.committed_len, life.committed_len)
        if event.fold and image.payload is not None:
            self._checks.compare_payload(f"the export of {life.handle}", image.payload, self._stored(life.layers))
        self._checks.only_slots_changed(set())
        return [life]

    def _import(self, event: Import) -> list[Life]:
        entry = event.image.model_copy(update={"has_payload": self._payloads})
        life, name = self._model.life(event.handle, event.checkpoint_slot), event.handle.request_id
        file = self._files.request(life, RequestEntry(request_id=name, sampling=event.sampling, image=entry))
        handle = self._checks.call(lambda: self._manager.import_request(file))
        self._checks.equal("handle", handle, event.handle)
        self._lives[handle] = life
        self._checks.equal("checkpoint slot", int(self._manager.checkpoint_slots([handle])[0]), life.checkpoint_slot)
        self._folded([life])
        return [life]

    def _snapshot(self, event: Snapshot) -> list[Life]:
        self._checks.call(lambda: self._manager.snapshot(io.BytesIO()))
        self._checks.only_slots_changed(set())
        return list(self._lives.values())

    def _recover(self, event: Recover) -> list[Life]:
        lives = [self._model.life(h, slot) for h, slot in zip(event.handles, event.checkpoint_slots, strict=True)]
        parked = [entry.request_id for entry in event.requests if entry.preempted]
        # Their tokens are those of a life that nobody else has.
        preempted = [self._model.life(Handle(name, 0, 0), 0) for name in parked]
        file = self._files.snapshot(event, [*lives, *preempted], self._prefixes)
        handles = self._checks.call(lambda: self._manager.recover(file))
        self._checks.equal("handles", tuple(handles.values()), event.handles)
        self._lives.update(zip(event.handles, lives, strict=True))
        self._preempted.update(zip(parked, preempted, strict=True))
        slots = {state.key: state.checkpoint_slot for state in event.published}
        self._checks.equal("published", self._manager.published(), slots)
        self._folded(lives, {*slots.values()})
        return lives

    def _release_storage(self, event: ReleaseStorage) -> list[Life]:
        self._checks.call(self._manager.release_storage)
        self._is_released = True
        return []

    def _bind_storage(self, event: BindStorage) -> list[Life]:
        # Other storage under living requests has the same content: a replay keeps its own.
        if self._is_released:
            self._checks.call(self._manager.bind_storage)
            self._checks.watch()
            self._is_released = False
        return list(self._lives.values())

    def _begin_step(self, event: BeginStep) -> list[Life]:
        metadata = event.metadata
        if self._payloads and event.pad_to is not None and max(event.pad_to) > MAX_PADDED:
            raise TraceError(
                f"pad_to = {list(event.pad_to)} is beyond the {MAX_PADDED} that a replay runs; backend 'metadata' "
                "replays it without payloads"
            )
        # Where no row reads an entry there is none, and no number of blocks.
        table, positions = (
            torch.tensor(column, dtype=torch.int32, device=self._device) if column else None
            for column in (event.block_table, event.positions)
        )
        step = self._checks.call(lambda: self._manager.begin_step(metadata, event.pad_to, table, positions))
        self._checks.equal("number of the step", step.index, event.step)
        rows = [None if handle is None else self._life(handle) for handle in metadata.handles]
        for life in rows:
            if life is not None:
                if life.open_step is not None:
                    raise Differs(f"{life.handle} is in step {life.open_step}, still open, and was not refused")
                life.open_step = event.step
        open_step = self._steps[event.step] = OpenStep(step, metadata, rows)
        if event.block_table is None or event.positions is None:
            for life, slot in zip(rows, step.boundary_slots.tolist(), strict=False):
                if life is not None:
                    life.boundary_slot = slot
        else:
            open_step.lines = [self._line(event, row, life) for row, life in enumerate(rows)]
            misplaced = [-1 if life and not line else 0 for life, line in zip(rows, open_step.lines, strict=True)]
            self._checks.equal("boundary_slots", step.boundary_slots.tolist()[: len(rows)], misplaced)
        self._checks.device_rows(step, rows, metadata)
        self._checks.only_slots_changed(set())
        return open_step.lives

    def _step_flush(self, event: StepFlush) -> list[Life]:
        open_step = self._open(event.step)
        self._checks.call(open_step.step.flush)
        self._folded(open_step.lives)
        return open_step.lives

    def _end_step(self, event: Commit | Defer) -> list[Life]:
        open_step = self._open(event.step)
        num_rows = len(open_step.rows)
        if len(event.num_accepted) != num_rows:
            raise Differs(f"num_accepted has {len(event.num_accepted)} entries, step {event.step} has {num_rows} rows")
        self._verifier.finish(open_step)
        step = open_step.step
        counts = open_step.by_entry(event.num_accepted, 2**30).to(self._device)
        eager, finished = (
            None if mask is None else open_step.by_entry(mask, True).to(self._device)
            for mask in (event.eager, event.finished)
        )
        if isinstance(event, Defer):
            self._checks.call(lambda: step.defer(counts, eager=eager, finished=finished))
        elif eager is None:
            self._checks.call(lambda: step.commit(counts, finished=finished))
        else:
            raise Differs("a commit folds every row, it has no eager mask")
        written: set[int] = set()
        for row, life in enumerate(open_step.rows):
            if life is not None:
                written |= self._accept(open_step, row, life, event)
        self._checks.dropped_ends += open_step.num_released
        lives = self._ended(open_step, written)
        for life in lives:
            self._compare_boundary(life)
        return lives

    def _cancel(self, event: Cancel) -> list[Life]:
        return self._cancel_step(self._open(event.step))

    def _flush(self, event: Flush) -> list[Life]:
        lives = list(self._lives.values()) if event.handles is None else [self._life(h) for h in event.handles]
        self._checks.call(lambda: self._manager.flush(event.handles))
        self._folded(lives)
        return lives

    def _read(self, event: Read) -> list[Life]:
        return [self._life(event.handle)]  # every comparison reads

    def _set_params(self, event: SetParams) -> list[Life]:
        params = [layer.to(self._device) for layer in self._model.next_params()]
        if self._payloads:
            self._checks.call(lambda: self._manager.set_params(params))
        self._checks.only_slots_changed(set())
        return list(self._lives.values())

    def _digest(self, event: Digest) -> list[Life]:
        self._checks.equal("digest", self._checks.call(self._manager.digest), event.value)
        return list(self._lives.values())

    # -- ends of steps

    def _accept(self, open_step: OpenStep, row: int, life: Life, event: Commit | Defer) -> set[int]:
        """What one row's end must do: the count clamped, or 0 once the request has finished; slots it may write."""
        count, accepted = event.num_accepted[row], 0
        if life.finished and not open_step.is_prompt(row):
            self._checks.wasted_windows += 1
        else:
            accepted = min(max(count, open_step.least_accepted(row)), open_step.metadata.query_lens[row])
            self._checks.clamps += accepted != count
            life.finished = event.finished is not None and event.finished[row]
        before = life.committed_len
        written: set[int] = set()
        boundary = self._config.block_size and (before + accepted) // self._config.block_size * self._config.block_size
        if boundary is not None and boundary > before:
            states = [self._model.folded(state) for state in self._prefix(open_step, row, boundary - before)]
            written |= self._cross(open_step, row, life, boundary, before + accepted, states)
        life.layers = self._prefix(open_step, row, accepted)
        life.stand_at(before + accepted, self._config.record_capacity)
        return written

    def _prefix(self, open_step: OpenStep, row: int, accepted: int) -> list[Expected]:
        """The states after ``accepted`` tokens of a row's window; none without payloads."""
        if not self._payloads:
            return []
        return [open_step.prefixes[layer][row][accepted] for layer in range(self._config.num_layers)]

    def _cross(
        self, open_step: OpenStep, row: int, life: Life, boundary: int, after: int, states: list[Expected]
    ) -> set[int]:
        """A row reaches a boundary: where its checkpoint goes, and where a block table moves the running one."""
        if open_step.lines is None:
            if life.boundary_slot:
                life.boundary_len, life.boundary_layers = boundary, states
            return {life.boundary_slot}
        line, block_size = open_step.lines[row], self._config.block_size
        if not line or block_size is None:
            return set()
        ends, runs = boundary // block_size - 1, min(after // block_size, len(line) - 1)
        life.checkpoint_slot = line[runs] or life.checkpoint_slot
        if ends >= len(line) or not line[ends]:
            return {life.checkpoint_slot}
        if line[ends] != life.checkpoint_slot:
            self._ended_blocks.append((f"block {ends} of {life.handle}", line[ends], states))
        return {life.checkpoint_slot, line[ends]}

    def _line(self, event: BeginStep, row: int, life: Life | None) -> tuple[int, ...]:
        """A row's line of the block table; empty when it is not to be used."""
        if life is None or event.block_table is None or event.positions is None:
            return ()
        entry = row if event.metadata.batch_index is None else event.metadata.batch_index[row]
        if event.positions[entry] != life.committed_len:
            self._checks.misplaced_rows += 1
            return ()
        num_slots = self._config.num_checkpoints
        return tuple(slot if 0 < slot <= num_slots else 0 for slot in event.block_table[entry])

    def _cancel_step(self, open_step: OpenStep) -> list[Life]:
        self._checks.call(open_step.step.cancel)
        return self._ended(open_step)

    def _ended(self, open_step: OpenStep, written: set[int] | None = None) -> list[Life]:
        del self._steps[open_step.step.index]
        lives = open_step.lives
        for life in lives:
            life.open_step = None
        self._folded(lives, written)
        for what, slot, states in self._ended_blocks:
            self._checks.compare_slot(what, slot, states)
        self._ended_blocks.clear()
        return lives

    # -- inside

    def _compare(self, lives: list[Life]) -> None:
        self._checks.counters()
        self._checks.integrity()
        layers = self._config.num_layers
        for life in lives:
            between = life.open_step is not None and 0 < self._steps[life.open_step].num_verified < layers
            self._checks.compare_state(life, read=not between)
        if not self._is_released:
            self._checks.only_slots_changed(set())

    def _compare_boundary(self, life: Life) -> None:
        """Its own boundary checkpoint, if it holds one."""
        if life.boundary_slot and life.boundary_len:
            what = f"boundary of {life.handle} at {life.boundary_len}"
            self._checks.compare_slot(what, life.boundary_slot, life.boundary_layers)

    def _leave_step(self, life: Life) -> None:
        if life.open_step is not None:
            self._steps[life.open_step].release(life)
            life.open_step = None

    def _flush_everyone(self) -> list[Life]:
        """Folds what is pending of all, preempted ones too, and compares the checkpoints; the live ones."""
        self._checks.call(lambda: self._manager.fence("flush"))
        lives = [*self._lives.values(), *self._preempted.values()]
        self._folded(lives)
        for life in lives:
            if life.checkpoint_slot:
                self._checks.compare_slot(f"{life.handle} at {life.committed_len}", life.checkpoint_slot, life.layers)
            self._compare_boundary(life)
        for key, layers in self._prefixes.items():
            if (slot := self._manager.published().get(key)) is not None:
                self._checks.compare_slot(f"{key}", slot, layers)
        return [*self._lives.values()]

    def _folded(self, lives: list[Life], written: set[int] | None = None) -> None:
        """Whatever was called may have folded the records of ``lives``; it wrote no checkpoint beside ``written``."""
        for life in lives:
            life.layers = [self._model.folded(expected) for expected in life.layers]
        slots = {life.checkpoint_slot for life in lives} | (written or set())
        self._checks.only_slots_changed(slots - {0})

    def _as_stored(self, expected: Expected) -> tuple[torch.Tensor, torch.Tensor | None]:
        recurrent = expected.state.recurrent.to(self._device, DTYPES[self._config.checkpoint_dtype])
        if self._config.layer.conv_kernel_size is None:
            return recurrent, None
        return recurrent, expected.state.conv.to(self._device, DTYPES[self._config.activation_dtype])

    def _life(self, handle: Handle) -> Life:
        if handle not in self._lives:
            raise Differs(f"{handle} is not live in this trace")
        return self._lives[handle]

    def _open(self, number: int) -> OpenStep:
        if number not in self._steps:
            raise Differs(f"step {number} was never begun, or has ended")
        return self._steps[number]
