"""The lines of a step trace: a header, one event for every public transition of a manager, and the end.

Version 1. A trace holds no payload: which request, which slot, how many tokens, in which order, and nothing else.
``docs/trace.md`` says the same in prose. Whatever changes the meaning of a line needs a new ``TRACE_VERSION``.
"""

from typing import Annotated, Literal, Self

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, field_validator, model_validator

from specstate.config import StateConfig
from specstate.errors import SpecStateError
from specstate.limits import INT32_MAX, MAX_COMMITTED_LEN, MAX_STEP_SIZE
from specstate.metadata import Handle, StepMetadata, check_lengths
from specstate.prefixes import PrefixKey
from specstate.sampling import SamplingParams
from specstate.transfer.schema import ImageEntry, RequestEntry

TRACE_VERSION = 1


class TraceError(SpecStateError):
    """A trace that cannot be read or written: names the file, the line and what is wrong with it."""


def _named_life(handle: Handle) -> Handle:
    limits = (("record_slot", handle.record_slot, 0), ("generation", handle.generation, 1))
    for name, value, least in limits:
        if not least <= value <= INT32_MAX:
            raise ValueError(f"{name} = {value} is outside {least}..{INT32_MAX}")
    return handle


Count = Annotated[int, Field(ge=0, le=INT32_MAX)]
StepSize = Annotated[int, Field(ge=0, le=MAX_STEP_SIZE)]
CheckedHandle = Annotated[Handle, AfterValidator(_named_life)]
CheckpointSlot = Annotated[int, Field(ge=1, le=INT32_MAX)]
_Int32 = Annotated[int, Field(ge=-INT32_MAX - 1, le=INT32_MAX)]


class _Line(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class Header(_Line):
    """The first line."""

    kind: Literal["header"] = "header"
    trace_version: Literal[1] = 1
    """TRACE_VERSION of the writer."""
    specstate_version: str
    """Of the package that wrote the trace; a reader does not look at it."""
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0
    """From which a replay derives inputs and parameters."""
    config: StateConfig
    """Of the recorded manager."""

    @field_validator("config", mode="before")
    @classmethod
    def _sizes_are_stated(cls, config: object) -> object:
        # A config in code may leave them to defaults; a trace must not change with the defaults.
        for name in ("record_capacity", "num_checkpoints"):
            if isinstance(config, dict) and config.get(name) is None:
                raise ValueError(f"{name} is not stated")
        return config


class Event(_Line):
    """What all events have."""

    kind: str
    verified: dict[Count, tuple[Count, Count]] | None = None
    """By number of an open step: layers that had verified when this event happened, and how many of them by
    ``write_records``. Lists the steps whose figures changed since the event before."""

    @model_validator(mode="after")
    def _written_have_verified(self) -> Self:
        for step, (verified, written) in (self.verified or {}).items():
            if written > verified:
                raise ValueError(f"verified[{step}] = [{verified}, {written}]: more layers written than verified")
        return self


class Admit(Event):
    kind: Literal["admit"] = "admit"
    handle: CheckedHandle
    checkpoint_slot: CheckpointSlot
    sampling: SamplingParams


class Load(Event):
    kind: Literal["load"] = "load"
    handle: CheckedHandle
    committed_len: Annotated[int, Field(ge=0, le=MAX_COMMITTED_LEN)]
    in_place: bool
    """The checkpoint slot had been written by the caller; otherwise the states were copied."""


class Release(Event):
    kind: Literal["release"] = "release"
    handle: CheckedHandle


class Fork(Event):
    """New requests that stand where ``handle`` stood; its pending records stay with it."""

    kind: Literal["fork"] = "fork"
    handle: CheckedHandle
    handles: Annotated[tuple[CheckedHandle, ...], Field(min_length=1)]
    checkpoint_slots: tuple[CheckpointSlot, ...]
    sampling: tuple[SamplingParams, ...]

    @model_validator(mode="after")
    def _columns_agree(self) -> Self:
        check_lengths(self, "handles", ("checkpoint_slots", "sampling"))
        return self


class Preempt(Event):
    """The request is live no more; it keeps all its slots, or, folded, its checkpoint slot alone."""

    kind: Literal["preempt"] = "preempt"
    handle: CheckedHandle
    fold: bool


class Retract(Event):
    """The request is live no more, its state lies on the host."""

    kind: Literal["retract"] = "retract"
    handle: CheckedHandle


class Resume(Event):
    """A preempted or retracted request under its new handle."""

    kind: Literal["resume"] = "resume"
    handle: CheckedHandle
    checkpoint_slot: CheckpointSlot


class Discard(Event):
    """A preempted or retracted request was given up."""

    kind: Literal["discard"] = "discard"
    request_id: str


class Fence(Event):
    """Nothing is pending any more: all folded, or all released."""

    kind: Literal["fence"] = "fence"
    mode: Literal["flush", "drop"]


class Publish(Event):
    """The state of a request at ``key.num_tokens`` has a checkpoint slot of its own, or had it already."""

    kind: Literal["publish"] = "publish"
    handle: CheckedHandle
    key: PrefixKey
    checkpoint_slot: CheckpointSlot


class Restore(Event):
    """A new request stands at ``key.num_tokens``, with a copy of what was published there."""

    kind: Literal["restore"] = "restore"
    handle: CheckedHandle
    key: PrefixKey
    checkpoint_slot: CheckpointSlot
    sampling: SamplingParams


class Reserve(Event):
    """Slots for the caller's block tables."""

    kind: Literal["reserve"] = "reserve"
    checkpoint_slots: Annotated[tuple[CheckpointSlot, ...], Field(min_length=1)]


class Return(Event):
    """The caller gave reserved slots back."""

    kind: Literal["return"] = "return"
    checkpoint_slots: tuple[CheckpointSlot, ...]


class Export(Event):
    """The request's committed state was written into a file; folded, or with its records."""

    kind: Literal["export"] = "export"
    handle: CheckedHandle
    fold: bool


class Import(Event):
    """A request from a file; ``image`` says where it stands there. A replay recomputes it under its new handle."""

    kind: Literal["import"] = "import"
    handle: CheckedHandle
    checkpoint_slot: CheckpointSlot
    sampling: SamplingParams
    image: ImageEntry


class Snapshot(Event):
    """All that the manager held was written into a file."""

    kind: Literal["snapshot"] = "snapshot"


class Published(_Line):
    """A published state that a snapshot brought."""

    key: PrefixKey
    checkpoint_slot: CheckpointSlot


class Recover(Event):
    """An empty manager took a snapshot. A replay recomputes all of it."""

    kind: Literal["recover"] = "recover"
    handles: tuple[CheckedHandle, ...]
    """Of the live requests, in the order of ``requests``."""
    checkpoint_slots: tuple[CheckpointSlot, ...]
    requests: tuple[RequestEntry, ...]
    """As the file has them: live ones, then preempted ones."""
    published: tuple[Published, ...]
    """Those that found a slot, in the order of the file, in which they took it."""
    generation: Annotated[int, Field(ge=0, le=INT32_MAX)]
    """That the snapshot's manager gave last."""

    @model_validator(mode="after")
    def _columns_agree(self) -> Self:
        check_lengths(self, "handles", ("checkpoint_slots",))
        live = sum(not entry.preempted for entry in self.requests)
        if live != len(self.handles):
            raise ValueError(f"requests has {live} live ones, handles has {len(self.handles)}")
        return self


class ReleaseStorage(Event):
    """All memory was given back."""

    kind: Literal["release_storage"] = "release_storage"


class BindStorage(Event):
    """Memory was taken again; or other storage of the caller's, with the same content, put in place."""

    kind: Literal["bind_storage"] = "bind_storage"


class BeginStep(Event):
    kind: Literal["begin_step"] = "begin_step"
    step: Count
    """Number of the step in its manager, from 0."""
    metadata: StepMetadata
    """The rows, in columns."""
    pad_to: tuple[StepSize, StepSize] | None = None
    """Rows and tokens that the device saw, padding included; None without padding."""
    block_table: tuple[tuple[_Int32, ...], ...] | None = None
    """The caller's slots for boundary checkpoints, entry batch_index[i] for row i; None for none."""
    positions: tuple[_Int32, ...] | None = None
    """With it: tokens that each entry's row had committed by the caller's account."""

    @model_validator(mode="after")
    def _rows_in_range(self) -> Self:
        metadata = self.metadata
        if (self.block_table is None) != (self.positions is None):
            raise ValueError("block_table and positions go together")
        for name, column in (("block_table", self.block_table), ("positions", self.positions)):
            if column is not None and len(column) < metadata.num_entries:
                raise ValueError(f"{name} has {len(column)} entries, the rows read {metadata.num_entries}")
        if len({*map(len, self.block_table or ())}) > 1:
            raise ValueError("the lines of block_table differ in length")
        if sum(metadata.query_lens) > MAX_STEP_SIZE:
            raise ValueError(f"query_lens add up to {sum(metadata.query_lens)}, more than {MAX_STEP_SIZE}")
        for handle in metadata.handles:
            if handle is not None:
                _named_life(handle)
        return self


class StepFlush(Event):
    """``Step.flush``, the first of a step; another one does nothing and leaves no event."""

    kind: Literal["step_flush"] = "step_flush"
    step: Count


class _StepEnd(Event):
    step: Count
    num_accepted: tuple[Count, ...]
    """By row, before clamping; what a caller gave below 0 or above int32 stands here as the nearest int32 >= 0, which
    is clamped to the same count."""
    eager: tuple[bool, ...] | None = None
    """By row: rows that folded all they had; None for none."""
    finished: tuple[bool, ...] | None = None
    """By row: requests that ended with this window, whether the caller or ``sample`` said so; None for none."""

    @model_validator(mode="after")
    def _columns_agree(self) -> Self:
        check_lengths(self, "num_accepted", ("eager", "finished"))
        return self


class Commit(_StepEnd):
    kind: Literal["commit"] = "commit"


class Defer(_StepEnd):
    kind: Literal["defer"] = "defer"


class Cancel(Event):
    kind: Literal["cancel"] = "cancel"
    step: Count


class Flush(Event):
    """``StateManager.flush``."""

    kind: Literal["flush"] = "flush"
    handles: tuple[CheckedHandle, ...] | None = None
    """None: all live requests."""


class Read(Event):
    kind: Literal["read"] = "read"
    handle: CheckedHandle
    layer: Count


class SetParams(Event):
    """New parameters: the next version of the pure function that a replay takes them from."""

    kind: Literal["set_params"] = "set_params"


class Digest(Event):
    kind: Literal["digest"] = "digest"
    value: str
    """``StateManager.digest``: ownership and cursors, never payloads."""


class End(_Line):
    """The last line, written when the recorder is closed."""

    kind: Literal["end"] = "end"
    events: Count
    """Events in the trace; header and end do not count."""


EVENTS: dict[str, type[Event]] = {
    model.model_fields["kind"].default: model
    for model in (
        *(Admit, Load, Release, Fork, Preempt, Retract, Resume, Discard),
        *(Publish, Restore, Reserve, Return),
        *(Export, Import, Snapshot, Recover, ReleaseStorage, BindStorage),
        *(BeginStep, StepFlush, Commit, Defer, Cancel),
        *(Flush, Fence, Read, SetParams, Digest),
    )
}
"""The model of each kind of event."""
