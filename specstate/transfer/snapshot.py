"""Requests and all that a manager holds as transfers: taken from a ledger and a backend, and brought into others."""

from collections.abc import Sequence

from specstate import __version__
from specstate.backends import Backend
from specstate.batch import flush_batch
from specstate.config import StateConfig
from specstate.errors import SpecStateError
from specstate.image import RequestImage, check_room
from specstate.ledger import Ledger
from specstate.preempted import Preempted
from specstate.prefixes import Prefix
from specstate.requests import Request
from specstate.sampling import SamplingParams
from specstate.transfer.schema import (
    ImageEntry,
    PublishedEntry,
    RequestEntry,
    TransferHeader,
    folds_on_arrival,
)
from specstate.transfer.schema import check_fits as check_configs


def request_header(config: StateConfig, request: Request, image: RequestImage) -> TransferHeader:
    """Of one live request."""
    entry = RequestEntry(request_id=request.handle.request_id, sampling=request.sampling, image=ImageEntry.of(image))
    return TransferHeader(specstate_version=__version__, config=config, kind="request", requests=(entry,))


def take(config: StateConfig, ledger: Ledger, backend: Backend) -> tuple[TransferHeader, list[RequestImage]]:
    """The header and images of a snapshot; waits for the device.

    Live requests as they lie there, records included. Preempted ones folded: they will come back on the host.
    """
    requests, images = [], []
    for request in ledger.requests:
        images.append(backend.export_image(request.record_slot, request.folded_by_verify, fold=False))
        requests.append(_entry(request.handle.request_id, request, images[-1]))
    for preempted in ledger.preempted:
        images.append(_image_of(preempted, backend))
        requests.append(_entry(preempted.request_id, preempted, images[-1]))
    published = []
    # Those that nobody uses first, the oldest use before others: what finds no slot later is missed least.
    for prefix in sorted(ledger.prefixes, key=lambda prefix: prefix.num_users > 0):
        payload = backend.checkpoint_payload(prefix.checkpoint_slot)
        images.append(RequestImage(prefix.key.num_tokens, 0, False, payload))
        published.append(PublishedEntry(key=prefix.key, image=ImageEntry.of(images[-1])))
    backend.wait()  # for the copies to the host
    header = TransferHeader(
        specstate_version=__version__,
        config=config,
        kind="snapshot",
        requests=tuple(requests),
        published=tuple(published),
        generation=ledger.generation,
    )
    return header, images


def check_fits(header: TransferHeader, config: StateConfig, backend: Backend) -> None:
    """Raises SpecStateError, before anything is changed, when what a file holds cannot live in a manager."""
    check_configs(header.config, config)
    for entry in header.requests:
        try:
            check_room(entry.image.pending_len, config)
        except SpecStateError as error:
            raise SpecStateError(f"request {entry.request_id!r}: {error}") from None
    if backend.path != "metadata" and not all(image.has_payload for image in header.images):
        raise SpecStateError(f"the file has no payload, as from backend 'metadata'; path {backend.path!r} needs one")


def bring(
    header: TransferHeader, images: Sequence[RequestImage], config: StateConfig, ledger: Ledger, backend: Backend
) -> None:
    """Fills an empty ledger and its backend with a snapshot that ``check_fits`` has let pass.

    Live requests come first; published states take what checkpoint slots are left, those used last before others.
    """
    ledger.generation = max(ledger.generation, header.generation or 0)
    entries = list(zip(header.requests, images, strict=False))
    live = [(entry, image) for entry, image in entries if not entry.preempted]
    states = list(zip(header.published, images[len(entries) :], strict=True))
    states = states[max(len(states) - (ledger.checkpoint_slots.num_free - len(live)), 0) :]
    for state, image in states:
        slot = ledger.take_checkpoint()
        ledger.prefixes.add(state.key, slot)
        backend.put_checkpoint(slot, image.payload)
    for entry, image in live:
        bring_request(entry, image, entry.request_id, entry.sampling, config, ledger, backend)
    for entry, image in entries:
        if entry.preempted:
            ledger.preempted.add(_preempted(entry, image, ledger, backend))


def bring_request(
    entry: RequestEntry,
    image: RequestImage,
    request_id: str,
    sampling: SamplingParams,
    config: StateConfig,
    ledger: Ledger,
    backend: Backend,
) -> Request:
    """A live request from its image; what is pending folds if it must. Its slots are known to be there."""
    folds = folds_on_arrival(image.pending_len, config)
    prefix = None if entry.restored_from is None else ledger.prefixes.get(entry.restored_from)
    with ledger.new_lives(backend, [request_id]) as ([handle], [checkpoint_slot]):
        backend.import_image(checkpoint_slot, handle.record_slot, handle.generation, image, sampling.columns())
        if folds:
            backend.flush(backend.begin(flush_batch([(handle, checkpoint_slot)]), ""))
    request = Request(handle, checkpoint_slot, sampling=sampling, in_use=True, restored_from=prefix)
    request.may_be_pending = image.pending_len > 0 and not folds
    request.stands_at(image.committed_len)
    if prefix is not None:
        ledger.prefixes.join(prefix)
    ledger.requests.add(request)
    return request


def _entry(request_id: str, owner: Request | Preempted, image: RequestImage) -> RequestEntry:
    return RequestEntry(
        request_id=request_id,
        sampling=owner.sampling,
        image=ImageEntry.of(image),
        preempted=isinstance(owner, Preempted),
        restored_from=None if owner.restored_from is None else owner.restored_from.key,
    )


def _image_of(preempted: Preempted, backend: Backend) -> RequestImage:
    if preempted.record_slot is not None:
        return backend.export_image(preempted.record_slot, folded_by_verify=False, fold=True)
    committed_len, finished = backend.position(preempted.standing)
    payload = preempted.payload
    if preempted.checkpoint_slot is not None:
        payload = backend.checkpoint_payload(preempted.checkpoint_slot)
    return RequestImage(committed_len, 0, finished, payload)


def _preempted(entry: RequestEntry, image: RequestImage, ledger: Ledger, backend: Backend) -> Preempted:
    standing = backend.standing_at(image.committed_len, image.finished)  # first, since it may find no memory
    prefix: Prefix | None = None
    if entry.restored_from is not None and (prefix := ledger.prefixes.get(entry.restored_from)) is not None:
        ledger.prefixes.join(prefix)
    return Preempted(
        request_id=entry.request_id,
        sampling=entry.sampling,
        most_committed=image.committed_len,
        least_committed=image.committed_len,
        in_use=True,
        restored_from=prefix,
        checkpoint_slot=None,
        record_slot=None,
        standing=standing,
        payload=image.payload,
    )
