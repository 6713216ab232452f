"""Requests in a file: one that moves to another manager, or all that a manager holds. The header stands in schema.py.

A transfer is a safetensors file. Its metadata has two entries: ``specstate``, a TransferHeader as JSON, and ``sha256``,
the digest of the whole file with the digest's own 64 digits read as zeros. Its tensors are the payloads of the
header's images, number i under the names ``i.recurrent``, ``i.conv`` and so on (image.py).

Weights are not in it, nor a sign of which they were: that both sides run the same is for the caller to see to.
"""

import hashlib
import os
import secrets
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO

import torch
from pydantic import ValidationError
from pydantic_core import from_json

from specstate.errors import SpecStateError, shown
from specstate.image import ImagePayload, RequestImage, check_image, payload_tensors
from specstate.transfer.schema import (
    TRANSFER_VERSION,
    ImageEntry,
    PublishedEntry,
    RequestEntry,
    TransferError,
    TransferHeader,
    check_fits,
    folds_on_arrival,
)
from specstate.validation import first_fault

__all__ = [
    "TRANSFER_VERSION",
    "ImageEntry",
    "PublishedEntry",
    "RequestEntry",
    "TransferError",
    "TransferHeader",
    "check_fits",
    "folds_on_arrival",
    "read_file",
    "write_file",
]

_DIGITS = 64
_NO_DIGEST = b"0" * _DIGITS


def write_file(file: str | os.PathLike[str] | BinaryIO, header: TransferHeader, images: Sequence[RequestImage]) -> None:
    """Writes a transfer whose images are those of ``header.images``.

    file: a path, whose file is there whole or stays as it was; or a binary file open for writing, which stays the
    caller's. Raises TransferError when the file cannot be written, safetensors is missing, or ``header`` and ``images``
    are none that ``read_file`` would take.
    """
    name = _name_of(file, "write", "open for writing")
    parts = _packed(name, header, images)
    if isinstance(file, str | os.PathLike):
        _replace(name, parts)
        return
    for part in parts:
        try:
            taken = file.write(part)
        except Exception as error:  # each kind of file has its own
            raise TransferError(f"{name}: cannot be written: {_reason(error)}") from error
        if type(taken) is int and taken != len(part):
            raise TransferError(f"{name}: took {taken} of {len(part)} bytes")


def read_file(file: str | os.PathLike[str] | BinaryIO) -> tuple[TransferHeader, tuple[RequestImage, ...]]:
    """The header of a transfer and the images of ``header.images``, in memory of their own.

    file: a path, or a binary file open for reading, which is read from where it stands to its end. Takes about twice
    the file's size in memory, whatever the file claims to hold. Raises TransferError, one line with the file and what
    is wrong, for damage of any kind: every byte counts.
    """
    name = _name_of(file, "read", "open for reading")
    try:
        data = Path(name).read_bytes() if isinstance(file, str | os.PathLike) else file.read()
    except Exception as error:  # each kind of file has its own
        raise TransferError(f"{name}: cannot be read: {_reason(error)}") from error
    if not isinstance(data, bytes | bytearray | memoryview):
        raise TransferError(f"{name}: must be a binary file, reading it gave {type(data).__name__}")
    data = bytes(data)
    header = _checked_header(name, data)
    try:
        tensors = _safetensors(name).load(data)
    except TransferError:
        raise
    except Exception as error:  # whatever it stumbles over, the file is none of ours
        raise TransferError(f"{name}: is no safetensors file: {_reason(error)}") from None
    return header, _unpacked(name, header, tensors)


# -- inside


def _packed(name: str, header: object, images: object) -> tuple[memoryview, bytes, memoryview]:
    """The bytes of a file: before its digest, the digest, and behind it."""
    if not isinstance(header, TransferHeader):
        raise TransferError(f"{name}: header must be a TransferHeader, not {type(header).__name__}")
    if not isinstance(images, Sequence) or not all(isinstance(image, RequestImage) for image in images):
        raise TransferError(f"{name}: images must be a sequence of RequestImage")
    try:
        text = header.model_dump_json()
        TransferHeader.model_validate_json(text)  # model_copy looks at nothing
    except ValidationError as error:
        raise TransferError(f"{name}: header: {first_fault(error)}") from None
    except ValueError as error:  # what JSON cannot hold
        raise TransferError(f"{name}: header: {_reason(error)}") from None
    if len(images) != len(header.images):
        raise TransferError(f"{name}: has {len(images)} images, the header lists {len(header.images)}")
    tensors: dict[str, torch.Tensor] = {}
    for index, (entry, image) in enumerate(zip(header.images, images, strict=True)):
        try:
            check_image(image, header.config)
            if ImageEntry.of(image) != entry:
                raise SpecStateError(f"the header says {entry!r}, the image is {ImageEntry.of(image)!r}")
        except SpecStateError as error:
            raise TransferError(f"{name}: image {index}: {error}") from None
        if image.payload is not None:
            tensors |= {f"{index}.{key}": tensor.contiguous() for key, tensor in image.payload.tensors().items()}
    packing = _safetensors(name)
    try:
        data = packing.save(tensors, metadata={"specstate": text, "sha256": _NO_DIGEST.decode()})
    except (RuntimeError, ValueError, MemoryError) as error:  # images that share memory, say
        raise TransferError(f"{name}: cannot be packed: {_reason(error)}") from None
    at = _digest_place(data, 8 + int.from_bytes(data[:8], "little"), _NO_DIGEST)
    assert at is not None
    view = memoryview(data)
    return view[:at], _digest(view, at).encode(), view[at + _DIGITS :]


def _checked_header(name: str, data: bytes) -> TransferHeader:
    """The header of a file whose bytes are those that its digest was made of."""
    length = int.from_bytes(data[:8], "little")
    if len(data) < 8 or length > len(data) - 8:
        raise TransferError(f"{name}: is cut short, or no transfer: {len(data)} bytes")
    end = 8 + length
    try:
        metadata = from_json(data[8:end], allow_inf_nan=False)["__metadata__"]
        text, digest = metadata["specstate"], metadata["sha256"]
        if len(metadata) != 2 or not isinstance(text, str) or not isinstance(digest, str):
            raise TypeError
    except (ValueError, TypeError, KeyError, IndexError):
        raise TransferError(f"{name}: is damaged, or no transfer: it has no header with specstate and sha256") from None
    at = _digest_place(data, end, digest.encode(errors="replace"))
    if at is None:
        raise TransferError(f"{name}: is damaged: sha256 = {shown(digest)} is no digest")
    if _digest(memoryview(data), at) != digest:
        raise TransferError(f"{name}: is damaged or cut short: its bytes are not those of its sha256")
    try:
        version = from_json(text, allow_inf_nan=False).get("transfer_version")
    except (ValueError, AttributeError):
        raise TransferError(f"{name}: its header is no JSON object") from None
    if type(version) is not int or version != TRANSFER_VERSION:
        raise TransferError(f"{name}: transfer_version is {shown(version)}, this reads {TRANSFER_VERSION}")
    try:
        return TransferHeader.model_validate_json(text)
    except ValidationError as error:
        raise TransferError(f"{name}: header: {first_fault(error)}") from None


def _unpacked(name: str, header: TransferHeader, tensors: dict[str, torch.Tensor]) -> tuple[RequestImage, ...]:
    wanted = [
        [*payload_tensors(header.config, entry.pending_len)] if entry.has_payload else [] for entry in header.images
    ]
    known = {f"{index}.{key}" for index, keys in enumerate(wanted) for key in keys}
    for missing, what in ((known - {*tensors}, "is missing"), ({*tensors} - known, "belongs to no image")):
        if missing:
            raise TransferError(f"{name}: tensor {shown(min(missing))} {what}")
    images = []
    for index, (entry, keys) in enumerate(zip(header.images, wanted, strict=True)):
        payload = None
        if entry.has_payload:
            named = {key: tensors[f"{index}.{key}"] for key in keys}
            payload = ImagePayload(conv=named.pop("conv", None), **named)
        image = RequestImage(entry.checkpoint_len, entry.pending_len, entry.finished, payload)
        try:
            check_image(image, header.config)
        except SpecStateError as error:
            raise TransferError(f"{name}: image {index}: {error}") from None
        images.append(image)
    return tuple(images)


def _digest_place(data: bytes, end: int, digest: bytes) -> int | None:
    """Where the digits of ``digest`` lie in a file whose header ends at ``end``; None when they do not."""
    # Quotes inside of the other entry are escaped, so that it cannot have these words.
    key = b'"sha256":"'
    found = data.find(key + digest + b'"', 8, end)
    return None if found < 0 else found + len(key)


def _digest(data: memoryview, at: int) -> str:
    """sha256 of the whole file in hex, lower case, with the digits at ``at`` read as zeros."""
    value = hashlib.sha256(data[:at])
    value.update(_NO_DIGEST)
    value.update(data[at + _DIGITS :])
    return value.hexdigest()


def _replace(name: str, parts: tuple[memoryview | bytes, ...]) -> None:
    """Writes beside the file and renames, so that no half file ever has its name."""
    try:
        target = os.path.realpath(name)  # a link keeps leading there
        if os.path.exists(target) and not os.path.isfile(target):
            raise TransferError(f"{name}: is there already, and no regular file")
        neighbour = os.path.join(os.path.dirname(target), f".{secrets.token_hex(8)}.part")
        try:
            with open(neighbour, "xb") as out:
                out.writelines(parts)
                out.flush()
                os.fsync(out.fileno())
            os.replace(neighbour, target)
        except BaseException:
            with suppress(OSError):
                os.unlink(neighbour)
            raise
    except TransferError:
        raise
    except (OSError, ValueError) as error:
        raise TransferError(f"{name}: cannot be written: {_reason(error)}") from None


def _name_of(file: object, verb: str, wanted: str) -> str:
    """A path as text; of another file what messages call it."""
    name: object = None
    if isinstance(file, str | os.PathLike):
        with suppress(TypeError):  # of a path that says it is another thing
            name = os.fspath(file)
    elif callable(getattr(file, verb, None)):
        name = str(getattr(file, "name", "the file"))
    if not isinstance(name, str):
        raise TransferError(f"file must be a path or a binary file {wanted}, not {type(file).__name__}")
    return name


def _safetensors(name: str) -> Any:
    try:
        import numpy  # noqa: F401 - safetensors takes tensors' bytes by way of it
        import safetensors.torch
    except ImportError as error:
        raise TransferError(
            f"{name}: transfers need safetensors and numpy: pip install 'specstate[transfer]' ({error})"
        ) from None
    return safetensors.torch


def _reason(error: BaseException) -> str:
    text = getattr(error, "strerror", None) or str(error) or type(error).__name__
    return " ".join(str(text).split())
