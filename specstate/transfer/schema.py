"""What stands in a transfer beside its tensors, and which manager can take it.

Version 1. Whatever changes the meaning of a file needs a new ``TRANSFER_VERSION``.
"""

from collections.abc import Hashable, Iterable
from typing import Annotated, Literal, Self

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from specstate.config import KDALayerSpec, StateConfig
from specstate.errors import SpecStateError, shown
from specstate.image import RequestImage, check_room
from specstate.limits import MAX_GENERATION, MAX_POSITION
from specstate.prefixes import PrefixKey
from specstate.requests import check_request_id
from specstate.sampling import SamplingParams
from specstate.validation import first_fault

TRANSFER_VERSION = 1

#: Beside the layers, what two configs must have in common for a state of one to be a state of the other.
_COMMON = ("num_layers", "checkpoint_dtype", "activation_dtype")


class TransferError(SpecStateError):
    """A transfer that cannot be read or written: names the file and what is wrong with it."""


def _text(value: str) -> str:
    check_request_id(value, "it")
    return value


Text = Annotated[str, AfterValidator(_text)]
Position = Annotated[int, Field(ge=0, le=MAX_POSITION)]


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class ImageEntry(_Part):
    """A RequestImage without its payload."""

    checkpoint_len: Position
    pending_len: Position
    finished: bool
    has_payload: bool
    """False from backend "metadata"."""

    @classmethod
    def of(cls, image: RequestImage) -> Self:
        """The entry of ``image``. Raises SpecStateError for lengths that none has."""
        try:
            return cls(
                checkpoint_len=image.checkpoint_len,
                pending_len=image.pending_len,
                finished=image.finished,
                has_payload=image.payload is not None,
            )
        except ValidationError as error:
            raise SpecStateError(f"image: {first_fault(error)}") from None

    @model_validator(mode="after")
    def _is_a_position(self) -> Self:
        if self.checkpoint_len + self.pending_len > MAX_POSITION:
            raise ValueError(
                f"checkpoint_len = {self.checkpoint_len} and pending_len = {self.pending_len} add up to more than "
                f"{MAX_POSITION}"
            )
        return self


class RequestEntry(_Part):
    """One request."""

    request_id: Text
    sampling: SamplingParams
    image: ImageEntry
    preempted: bool = False
    """False: it was live."""
    restored_from: PrefixKey | None = None
    """The key of the published state that it began with."""

    @model_validator(mode="after")
    def _folded_if_without_records(self) -> Self:
        if self.preempted and self.image.pending_len:
            raise ValueError(f"pending_len = {self.image.pending_len} must be 0 of a preempted request")
        return self


class PublishedEntry(_Part):
    """A published prefix."""

    key: PrefixKey
    image: ImageEntry

    @model_validator(mode="after")
    def _stands_at_its_key(self) -> Self:
        image = self.image
        if image.checkpoint_len != self.key.num_tokens or image.pending_len or image.finished:
            raise ValueError(
                f"a published state stands at num_tokens = {self.key.num_tokens}, nothing pending and not finished, "
                f"this one has checkpoint_len = {image.checkpoint_len}, pending_len = {image.pending_len}, finished = "
                f"{image.finished}"
            )
        return self


class TransferHeader(_Part):
    """What a transfer holds, all but the tensors.

    Raises pydantic's ``ValidationError`` (a ``ValueError``) that names the field, its value and the limit.
    """

    transfer_version: Literal[1] = 1
    """TRANSFER_VERSION of the writer."""
    specstate_version: str
    """Of the package that wrote the file; a reader does not look at it."""
    config: StateConfig
    """Of the manager that wrote it, without its memory limit: that says nothing about a state, and a plan of another
    version might exceed it."""
    kind: Literal["request", "snapshot"]
    requests: tuple[RequestEntry, ...]
    """A request: that one. A snapshot: live ones, and preempted ones in the order in which they were preempted."""
    published: tuple[PublishedEntry, ...] = ()
    """Of a snapshot, oldest use first."""
    generation: Annotated[int, Field(ge=0, le=MAX_GENERATION)] | None = None
    """Of a snapshot: the generation that the manager gave last."""

    @property
    def images(self) -> tuple[ImageEntry, ...]:
        """The file's images in order: of the requests, then of what is published."""
        return *(request.image for request in self.requests), *(state.image for state in self.published)

    @field_validator("config")
    @classmethod
    def _has_no_limit(cls, config: StateConfig) -> StateConfig:
        return config.model_copy(update={"memory_limit_bytes": None})

    @model_validator(mode="after")
    def _agrees(self) -> Self:
        if self.kind == "request":
            if len(self.requests) != 1 or self.published or self.generation is not None:
                raise ValueError("kind = 'request' goes with one request, nothing published and no generation")
            if self.requests[0].preempted or self.requests[0].restored_from is not None:
                raise ValueError("kind = 'request' goes with a live request that has no restored_from")
        elif self.generation is None:
            raise ValueError("kind = 'snapshot' goes with a generation")
        _refuse_twice("request_id", (request.request_id for request in self.requests))
        keys = _refuse_twice("key", (state.key for state in self.published))
        for request in self.requests:
            if request.restored_from is not None and request.restored_from not in keys:
                raise ValueError(f"restored_from = {request.restored_from} is no key of published")
        images = self.images
        for image in images:
            if image.pending_len > self.config.record_capacity:
                raise ValueError(f"pending_len = {image.pending_len} exceeds {self.config.record_capacity} records")
            if image.has_payload != images[0].has_payload:
                raise ValueError("has_payload must be the same of all images")
        return self


def check_fits(header_config: StateConfig, config: StateConfig) -> None:
    """Raises SpecStateError, naming the field, when a state of a file's config is none of a manager's.

    Policy, capacities, slots, block size, path and memory limit may differ.
    """
    pairs = [
        (f"layer.{name}", getattr(header_config.layer, name), getattr(config.layer, name))
        for name in KDALayerSpec.model_fields
    ]
    pairs += [(name, getattr(header_config, name), getattr(config, name)) for name in _COMMON]
    for field, theirs, ours in pairs:
        if theirs != ours:
            raise SpecStateError(
                f"config.{field} = {theirs!r} in the file, {ours!r} in this manager: they must be the same"
            )


def folds_on_arrival(pending_len: int, config: StateConfig) -> bool:
    """Whether an image with ``pending_len`` records folds in a manager of ``config`` as soon as it is there.

    With m pending, T the longest window and R the records that a request can hold:

        m = 0                            there is nothing to fold
        m + T <= R, policy not eager     stays pending
        m <= R                           folds on arrival
        m > R                            raises SpecStateError: it has to be exported folded
    """
    check_room(pending_len, config)
    next_window_fits = pending_len + config.max_query_len <= config.record_capacity
    return pending_len > 0 and (config.folds_at_end or not next_window_fits)


def _refuse_twice(name: str, values: Iterable[Hashable]) -> set[Hashable]:
    """``values``; raises ValueError when one comes twice."""
    seen: set[Hashable] = set()
    for value in values:
        if value in seen:
            raise ValueError(f"{name} {shown(value)} comes twice")
        seen.add(value)
    return seen
