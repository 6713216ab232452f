"""Transfers: what is written is what is read, and a file in which any byte is wrong is refused in one clear line."""

import builtins
import hashlib
import io
import json
import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError
from safetensors.torch import load, save

from specstate import PrefixKey, SamplingParams, SpecStateError, StateConfig
from specstate.image import ImagePayload, RequestImage, payload_tensors
from specstate.limits import INT32_MAX, MAX_COMMITTED_LEN, MAX_GENERATION, MAX_POSITION
from specstate.transfer import (
    TRANSFER_VERSION,
    ImageEntry,
    PublishedEntry,
    RequestEntry,
    TransferError,
    TransferHeader,
    check_fits,
    folds_on_arrival,
    read_file,
    write_file,
)
from tests.factories import make_config, raw_bytes

Transfer = tuple[TransferHeader, list[RequestImage]]


def small_config(**changes: Any) -> StateConfig:
    sizes = {"num_layers": 1, "num_heads": 1, "head_k_dim": 2, "head_v_dim": 1, "conv_kernel_size": 2}
    return make_config(**{**sizes, "checkpoint_dtype": "float32", "activation_dtype": "bfloat16", **changes})


def make_image(
    config: StateConfig, checkpoint_len: int = 5, pending_len: int = 0, seed: int = 0, finished: bool = False
) -> RequestImage:
    """Random tensors, a NaN and a -0.0 among them."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, wanted in payload_tensors(config, pending_len).items():
        tensor = torch.randn(wanted.shape, generator=generator, dtype=torch.float64).to(wanted.dtype)
        tensor.view(-1)[0] = torch.nan
        tensor.view(-1)[-1] = -0.0
        tensors[name] = tensor
    payload = ImagePayload(conv=tensors.pop("conv", None), **tensors)
    return RequestImage(checkpoint_len, pending_len, finished, payload)


def bare(image: RequestImage) -> RequestImage:
    return RequestImage(image.checkpoint_len, image.pending_len, image.finished, None)


def entry_of(image: RequestImage, name: str = "a", **fields: Any) -> RequestEntry:
    return RequestEntry(request_id=name, **{"sampling": SamplingParams(), **fields}, image=ImageEntry.of(image))


def of_request(config: StateConfig, image: RequestImage, **fields: Any) -> Transfer:
    header = TransferHeader(
        specstate_version="0.1.0", config=config, kind="request", requests=(entry_of(image, **fields),)
    )
    return header, [image]


KEYS = (PrefixKey("k", 4), PrefixKey("k", 8))


def of_snapshot(config: StateConfig) -> Transfer:
    """Live, preempted and published, one of each kind."""
    lengths = ((7, 2, False), (4, 0, True), (6, 0, False), (9, 0, False), (8, 0, True))
    images = [make_image(config, start, m, seed, end) for seed, (start, m, end) in enumerate(lengths)]
    preempted = (False, False, True, True, True)
    restored = (KEYS[1], None, None, KEYS[0], None)
    requests = tuple(
        entry_of(image, f"r{i}", preempted=preempted[i], restored_from=restored[i], sampling=SamplingParams(seed=i))
        for i, image in enumerate(images)
    )
    prefixes = [make_image(config, key.num_tokens, 0, seed=20 + key.num_tokens) for key in KEYS]
    published = tuple(
        PublishedEntry(key=key, image=ImageEntry.of(image)) for key, image in zip(KEYS, prefixes, strict=True)
    )
    header = TransferHeader(
        specstate_version="0.1.0",
        config=config,
        kind="snapshot",
        requests=requests,
        published=published,
        generation=12,
    )
    return header, [*images, *prefixes]


def written(header: TransferHeader, images: Any) -> bytes:
    file = io.BytesIO()
    write_file(file, header, images)
    return file.getvalue()


def bits_of(image: RequestImage) -> Any:
    payload = image.payload
    named = None if payload is None else {name: raw_bytes(tensor) for name, tensor in payload.tensors().items()}
    return image.checkpoint_len, image.pending_len, image.finished, named


def check_same(read: tuple[TransferHeader, tuple[RequestImage, ...]], wanted: Transfer) -> None:
    header, images = read
    assert header == wanted[0]
    assert [bits_of(image) for image in images] == [bits_of(image) for image in wanted[1]]
    for image, want in zip(images, wanted[1], strict=True):
        if image.payload is not None and want.payload is not None:
            pairs = zip(image.payload.tensors().values(), want.payload.tensors().values(), strict=True)
            assert all(got.dtype == of.dtype and got.shape == of.shape for got, of in pairs)


def refused(data: Any, words: str | None = None) -> str:
    with pytest.raises(TransferError, match=words) as caught:
        read_file(io.BytesIO(data))
    message = str(caught.value)
    assert message.startswith("the file: ")
    assert "\n" not in message
    return message


def forged(data: bytes, change: Callable[[dict[str, Any], dict[str, torch.Tensor]], object]) -> bytes:
    """The file with another header or other tensors, and the digest that belongs to them."""
    raw = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    header, tensors = json.loads(raw["__metadata__"]["specstate"]), load(data)
    change(header, tensors)
    return sealed(save(tensors, metadata={"specstate": json.dumps(header), "sha256": "0" * 64}))


def sealed(data: bytes) -> bytes:
    """A file whose digest is written as 64 zeros, with its digest."""
    words = b'"sha256":"' + b"0" * 64
    assert data.count(words) == 1
    return data.replace(words, b'"sha256":"' + hashlib.sha256(data).hexdigest().encode())


@pytest.fixture
def transfer() -> Transfer:
    config = small_config()
    return of_request(config, make_image(config, 5, 2))


@pytest.fixture
def data(transfer: Transfer) -> bytes:
    return written(*transfer)


# -- there and back


@pytest.mark.parametrize("pending_len", [0, 1, 16])
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"checkpoint_dtype": "bfloat16"},
        {"checkpoint_dtype": "float32", "activation_dtype": "float16"},
        {"checkpoint_dtype": "float64", "activation_dtype": "float64"},
        {"checkpoint_dtype": "float64", "activation_dtype": "bfloat16"},
        {"conv_kernel_size": None},
        {"num_layers": 3, "num_heads": 2, "head_k_dim": 4, "head_v_dim": 3, "conv_kernel_size": 4},
        {"gate_lower_bound": -5.0, "fold_policy": "deferred", "record_capacity": 17, "block_size": 64, "path": "x"},
    ],
    ids=lambda changes: ", ".join(f"{key} {value}" for key, value in changes.items()) or "plain",
)
def test_a_request_there_and_back(changes: dict[str, Any], pending_len: int) -> None:
    config = small_config(**changes)
    sampling = SamplingParams(temperature=0.1, top_k=3, top_p=0.3, seed=2**63 - 1, end_token_ids=(1, INT32_MAX))
    wanted = of_request(config, make_image(config, 0, pending_len, finished=True), sampling=sampling, name='é"\\\0')
    check_same(read_file(io.BytesIO(written(*wanted))), wanted)


def test_a_snapshot_there_and_back() -> None:
    wanted = of_snapshot(small_config())
    check_same(read_file(io.BytesIO(written(*wanted))), wanted)


def test_without_payloads_and_without_requests() -> None:
    header, images = of_snapshot(small_config())
    images = [bare(image) for image in images]
    requests = tuple(
        request.model_copy(update={"image": ImageEntry.of(image)})
        for request, image in zip(header.requests, images, strict=False)
    )
    published = tuple(
        state.model_copy(update={"image": ImageEntry.of(image)})
        for state, image in zip(header.published, images[5:], strict=True)
    )
    wanted = header.model_copy(update={"requests": requests, "published": published}), images
    data = written(*wanted)
    assert load(data) == {}
    check_same(read_file(io.BytesIO(data)), wanted)
    empty = TransferHeader(specstate_version="", config=small_config(), kind="snapshot", requests=(), generation=0)
    check_same(read_file(io.BytesIO(written(empty, []))), (empty, []))


def test_the_file_is_safetensors_with_two_entries(transfer: Transfer, data: bytes) -> None:
    raw = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    assert set(raw) == {"__metadata__", *(f"0.{name}" for name in transfer[1][0].payload.tensors())}  # type: ignore[union-attr]
    assert set(raw["__metadata__"]) == {"specstate", "sha256"}
    header = json.loads(raw["__metadata__"]["specstate"])
    assert header["transfer_version"] == TRANSFER_VERSION == 1
    assert header["requests"][0]["image"] == {
        "checkpoint_len": 5,
        "pending_len": 2,
        "finished": False,
        "has_payload": True,
    }
    digest = raw["__metadata__"]["sha256"]
    assert hashlib.sha256(data.replace(digest.encode(), b"0" * 64)).hexdigest() == digest


def test_a_memory_limit_stays_behind() -> None:
    config = small_config(memory_limit_bytes=10**6)
    header, images = of_request(config, make_image(config))
    assert header.config == small_config()
    assert read_file(io.BytesIO(written(header, images)))[0].config.memory_limit_bytes is None


DTYPES = [("float32", "bfloat16"), ("bfloat16", "float16"), ("float32", "float32"), ("float64", "float64")]
TEXTS = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=5)


@st.composite
def snapshots(draw: st.DrawFn) -> Transfer:
    checkpoint, activation = draw(st.sampled_from(DTYPES))
    config = small_config(
        checkpoint_dtype=checkpoint,
        activation_dtype=activation,
        num_layers=draw(st.integers(1, 3)),
        num_heads=draw(st.integers(1, 2)),
        conv_kernel_size=draw(st.sampled_from([None, 2, 3])),
        fold_policy=draw(st.sampled_from(["eager", "deferred", "ring"])),
        gate_lower_bound=draw(st.none() | st.floats(-9.0, -0.1)),
    )
    payloads = draw(st.booleans())

    def image(pending: int, start: int, finished: bool) -> RequestImage:
        made = make_image(config, start, pending, draw(st.integers(0, 2**32)), finished)
        return made if payloads else bare(made)

    keys = draw(st.lists(st.builds(PrefixKey, TEXTS, st.integers(1, MAX_COMMITTED_LEN)), max_size=2, unique=True))
    prefixes = [image(0, key.num_tokens, False) for key in keys]
    images, requests = [], []
    for name in draw(st.lists(TEXTS, max_size=3, unique=True)):
        preempted = draw(st.booleans())
        pending = 0 if preempted else draw(st.integers(0, config.record_capacity))
        images.append(image(pending, draw(st.integers(0, MAX_POSITION - pending)), draw(st.booleans())))
        sampling = SamplingParams(
            temperature=draw(st.just(0.0) | st.floats(1e-6, 1e6)),
            top_p=draw(st.floats(0.0, 1.0, exclude_min=True)),
            top_k=draw(st.integers(0, INT32_MAX)),
            seed=draw(st.integers(0, 2**63 - 1)),
            end_token_ids=tuple(draw(st.lists(st.integers(0, INT32_MAX), max_size=8))),
        )
        restored = draw(st.sampled_from([None, *keys]))
        requests.append(entry_of(images[-1], name, sampling=sampling, preempted=preempted, restored_from=restored))
    header = TransferHeader(
        specstate_version=draw(st.text(st.characters(exclude_categories=["Cs"]), max_size=4)),
        config=config,
        kind="snapshot",
        requests=tuple(requests),
        published=tuple(
            PublishedEntry(key=key, image=ImageEntry.of(made)) for key, made in zip(keys, prefixes, strict=True)
        ),
        generation=draw(st.integers(0, MAX_GENERATION)),
    )
    return header, images + prefixes


@given(snapshots(), st.data())
def test_any_snapshot_there_and_back_and_none_with_a_wrong_byte(wanted: Transfer, choose: st.DataObject) -> None:
    data = written(*wanted)
    check_same(read_file(io.BytesIO(data)), wanted)
    damaged = bytearray(data)
    damaged[choose.draw(st.integers(0, len(data) - 1))] ^= choose.draw(st.integers(1, 255))
    refused(damaged)


def test_what_is_read_is_in_memory_of_its_own(data: bytes) -> None:
    source = bytearray(data)
    _, [image] = read_file(io.BytesIO(source))
    before = bits_of(image)
    source[-8:] = bytes(8)
    assert image.payload is not None
    image.payload.recurrent.add_(1.0)
    assert image.payload.recurrent[0, 0, 0, 1] != 0
    assert bits_of(read_file(io.BytesIO(data))[1][0]) == before


def test_tensors_with_other_strides(transfer: Transfer) -> None:
    header, [image] = transfer
    assert image.payload is not None
    turned = {
        name: None if tensor is None else tensor.mT.contiguous().mT
        for name, tensor in ((name, getattr(image.payload, name)) for name in ImagePayload.__slots__)
    }
    moved = RequestImage(image.checkpoint_len, image.pending_len, image.finished, ImagePayload(**turned))
    check_same(read_file(io.BytesIO(written(header, [moved]))), transfer)


# -- damage


@pytest.mark.parametrize("mask", [0x01, 0x20, 0x80, 0xFF], ids=hex)
def test_every_byte_counts(data: bytes, mask: int) -> None:
    for index in range(len(data)):
        damaged = bytearray(data)
        damaged[index] ^= mask
        refused(damaged)


def test_every_shorter_file_is_refused(data: bytes) -> None:
    behind_header = 8 + int.from_bytes(data[:8], "little")
    for length in range(len(data)):
        words = (
            "is damaged or cut short" if length >= behind_header else f"is cut short, or no transfer: {length} bytes"
        )
        refused(data[:length], words)


@pytest.mark.parametrize("more", [b"\0", b" ", b"}", b"\n"])
def test_a_longer_file_is_refused(data: bytes, more: bytes) -> None:
    refused(data + more, "damaged or cut short")
    refused(more + data)
    refused(data + data)


def test_a_byte_left_out_or_put_in_is_refused(data: bytes) -> None:
    for index in range(len(data)):
        refused(data[:index] + data[index + 1 :])
        refused(data[:index] + b"0" + data[index:])


@pytest.mark.parametrize(
    "data",
    [
        b"", b"\0" * 8, b"\0" * 100, b"\xff" * 100, b"{}", b"PK\x03\x04" * 30, b"\x02" + b"\0" * 7 + b"{}",
        b"\x02" + b"\0" * 7 + b"[]", b"\x02" + b"\0" * 7 + b"\xff\xff", b"\x06" + b"\0" * 7 + b'"text"',
        (100_000).to_bytes(8, "little") + b"[" * 100_000, (50_000).to_bytes(8, "little") + b"9" * 50_000,
        (2**63).to_bytes(8, "little") + b"{}", save({}), save({"a": torch.ones(2)}, metadata={"specstate": "{}"}),
        save({}, metadata={"specstate": "{}", "sha256": ""}),
        save({}, metadata={"specstate": "{}", "sha256": "\u00e9" * 64}),
    ],
    ids=lambda data: f"{len(data)} bytes",  # safetensors puts metadata in an order of its own
)  # fmt: skip
def test_other_files_are_refused(data: bytes) -> None:
    refused(data, "no transfer|damaged")


def test_the_digest_is_looked_for_beside_the_header_alone(transfer: Transfer, data: bytes) -> None:
    """Were it looked for in the header's JSON too, a request's name could lead astray."""
    header, images = transfer
    name = '"sha256":"' + "0" * 64 + '"'
    named = TransferHeader(**{**dict(header), "requests": (entry_of(images[0], name),)})
    check_same(read_file(io.BytesIO(written(named, images))), (named, images))
    refused(data.replace(b'"sha256":', b'"sha256": '), "damaged")
    digest = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])["__metadata__"]["sha256"]
    refused(data.replace(digest.encode(), digest.upper().encode()), "damaged")


def test_a_third_entry_is_refused(transfer: Transfer) -> None:
    text = transfer[0].model_dump_json()
    more = sealed(save({}, metadata={"specstate": text, "sha256": "0" * 64, "more": ""}))
    refused(more, "it has no header with specstate and sha256")


# -- files that are whole, and wrong


def at(*path: Any, value: Any = None) -> Callable[[dict[str, Any], dict[str, torch.Tensor]], None]:
    """Sets an entry of the header; takes it out when no value is given."""

    def change(header: Any, tensors: Any) -> None:
        for key in path[:-1]:
            header = header[key]
        if value is None:
            del header[path[-1]]
        else:
            header[path[-1]] = value

    return change


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (at("transfer_version", value=2), "transfer_version is 2, this reads 1"),
        (at("transfer_version", value=True), "transfer_version is True, this reads 1"),
        (at("transfer_version"), "transfer_version is None, this reads 1"),
        (at("config"), "header: config is missing"),
        (at("kind"), "header: kind is missing"),
        (at("more", value=1), "header: more = 1: Extra inputs are not permitted"),
        (at("config", "num_layers", value=10**9), r"header: config.num_layers = 10{9}: "),
        (at("config", "num_layers", value="1"), "header: config.num_layers = '1': "),
        (at("config", "record_capacity", value=1), "header: config = .*: record_capacity = 1 is too small"),
        (at("kind", value="fork"), "header: kind = 'fork': "),
        (at("kind", value="snapshot"), "kind = 'snapshot' goes with a generation"),
        (at("generation", value=4), "kind = 'request' goes with one request"),
        (at("requests", value=[]), "kind = 'request' goes with one request"),
        (at("requests", 0, "request_id", value=""), "header: requests.0.request_id = '': it must be a string"),
        (at("requests", 0, "sampling", "top_p", value=1.5), "header: requests.0.sampling.top_p = 1.5: "),
        (at("requests", 0, "sampling"), "header: requests.0.sampling is missing"),
        (at("requests", 0, "preempted", value=True), "pending_len = 2 must be 0 of a preempted request"),
        (at("requests", 0, "restored_from", value={"digest": "k", "num_tokens": 4}), "goes with a live request"),
        (at("requests", 0, "image", "pending_len", value=17), "pending_len = 17 exceeds 16 records"),
        (at("requests", 0, "image", "pending_len", value=-1), "header: requests.0.image.pending_len = -1: "),
        (at("requests", 0, "image", "pending_len", value=2.0), "header: requests.0.image.pending_len = 2.0: "),
        (at("requests", 0, "image", "checkpoint_len", value=MAX_POSITION - 1), "add up to more than"),
        (at("requests", 0, "image", "finished", value=0), "header: requests.0.image.finished = 0: "),
        (at("requests", 0, "image", "pending_len", value=1), r"image 0: image.u must have shape \[1, 1, 1, 1\], got"),
        (at("requests", 0, "image", "pending_len", value=0), "tensor '0.conv_history' belongs to no image"),
        (at("requests", 0, "image", "has_payload", value=False), "tensor '0.conv' belongs to no image"),
        (at("config", "num_layers", value=2), r"image.recurrent must have shape \[2, 1, 1, 2\], got \[1, 1, 1, 2\]"),
        (at("config", "num_layers", value=4096), r"image.recurrent must have shape \[4096, "),
        (at("config", "layer", "head_v_dim", value=2**16), r"image.recurrent must have shape \[1, 1, 65536, 2\]"),
        (at("config", "layer", "conv_kernel_size", value=3), r"image.conv must have shape \[1, 5, 2\], got"),
        (at("config", "checkpoint_dtype", value="bfloat16"), "image.recurrent must be bfloat16, got float32"),
        (at("config", "activation_dtype", value="float32"), "image.conv must be float32, got bfloat16"),
    ],
)  # fmt: skip
def test_headers_that_do_not_fit(data: bytes, change: Any, words: str) -> None:
    assert refused(forged(data, change), words).count("the file") == 1


def test_headers_that_are_no_header(data: bytes) -> None:
    for text in ("", "[]", "1", "{", "null", "[" * 10_000, '{"transfer_version": NaN}', "1" * 10_000):
        made = sealed(save({}, metadata={"specstate": text, "sha256": "0" * 64}))
        refused(made, "its header is no JSON object")


@pytest.mark.parametrize("name", ["recurrent", "conv", "u", "key_gate", "inv_norm", "conv_history"])
def test_tensors_that_do_not_fit(data: bytes, name: str) -> None:
    def missing(header: Any, tensors: Any) -> None:
        del tensors[f"0.{name}"]

    def wider(header: Any, tensors: Any) -> None:
        tensors[f"0.{name}"] = tensors[f"0.{name}"].double()

    def longer(header: Any, tensors: Any) -> None:
        tensors[f"0.{name}"] = torch.cat([tensors[f"0.{name}"]] * 2)

    def flat(header: Any, tensors: Any) -> None:
        tensors[f"0.{name}"] = tensors[f"0.{name}"].flatten()

    def more(header: Any, tensors: Any) -> None:
        tensors[f"1.{name}"] = tensors[f"0.{name}"].clone()

    refused(forged(data, missing), f"tensor '0.{name}' is missing")
    refused(forged(data, wider), f"image 0: image.{name} must be ")
    refused(forged(data, longer), rf"image 0: image.{name} must have shape \[1, ")
    refused(forged(data, flat), rf"image 0: image.{name} must have shape \[1, ")
    refused(forged(data, more), f"tensor '1.{name}' belongs to no image")
    assert read_file(io.BytesIO(forged(data, lambda header, tensors: None)))[0].kind == "request"


@pytest.mark.parametrize(
    "index",
    [
        {"dtype": "F32", "shape": [2**40, 2**40], "data_offsets": [0, 8]},
        {"dtype": "F32", "shape": [2**62], "data_offsets": [0, 2**63]},
        {"dtype": "F32", "shape": [0, 2**62], "data_offsets": [0, 0]},
        {"dtype": "F32", "shape": [-1], "data_offsets": [0, 8]},
        {"dtype": "F32", "shape": [2], "data_offsets": [8, 0]},
        {"dtype": "X32", "shape": [2], "data_offsets": [0, 8]},
        {"dtype": "F8_E4M3", "shape": [8], "data_offsets": [0, 8]},
        [],
        None,
    ],
)
def test_an_index_of_absurd_sizes(index: Any, transfer: Transfer) -> None:
    text = transfer[0].model_dump_json()
    raw = json.dumps(
        {"__metadata__": {"specstate": text, "sha256": "0" * 64}, "0.recurrent": index}, separators=(",", ":")
    ).encode()
    refused(sealed(len(raw).to_bytes(8, "little") + raw + b"\0" * 8), "no safetensors file|is missing|belongs to")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (at("requests", 1, "request_id", value="r0"), "request_id 'r0' comes twice"),
        (at("requests", 0, "restored_from", "digest", value="k3"), "restored_from = .*'k3'.* is no key of published"),
        (at("requests", 0, "restored_from", "num_tokens", value=5), "restored_from = .*'k'.* is no key of published"),
        (at("published", 0, "key", "num_tokens", value=5), "a published state stands at num_tokens = 5"),
        (at("published", 0, "key", "num_tokens", value=0), "num_tokens = 0 is outside 1"),
        (at("published", 0, "image", "finished", value=True), "a published state stands at num_tokens = 4"),
        (at("published", 0, "image", "pending_len", value=1), "a published state stands at num_tokens = 4"),
        (at("published", 0, "image", "has_payload", value=False), "has_payload must be the same of all images"),
        (at("requests", 3, "image", "pending_len", value=1), "pending_len = 1 must be 0 of a preempted request"),
        (at("requests", 0, "preempted", value="slots"), "header: requests.0.preempted = 'slots': "),
        (at("generation", value=-1), "header: generation = -1: "),
        (at("generation", value=2**31), "header: generation = 2147483648: "),
        (at("generation"), "goes with a generation"),
    ],
)
def test_snapshots_that_do_not_agree(change: Any, words: str) -> None:
    refused(forged(written(*of_snapshot(small_config())), change), words)


# -- paths and files


def test_a_path_is_there_whole_or_as_it_was(
    tmp_path: Path, transfer: Transfer, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a.transfer"
    write_file(path, *transfer)
    check_same(read_file(path), transfer)
    check_same(read_file(str(path)), transfer)
    assert stat.S_IMODE(path.stat().st_mode) == 0o666 & ~_umask()
    before = path.read_bytes()

    def fails(*arguments: Any) -> None:
        raise OSError(28, "No space left on device")

    def stops(*arguments: Any) -> None:
        raise KeyboardInterrupt

    other = of_request(transfer[0].config, make_image(transfer[0].config, 9))
    for verb in ("fsync", "replace"):
        with monkeypatch.context() as patch:
            patch.setattr(os, verb, fails)
            with pytest.raises(TransferError, match=r"a\.transfer: cannot be written: No space left on device"):
                write_file(path, *other)
            patch.setattr(os, verb, stops)
            with pytest.raises(KeyboardInterrupt):
                write_file(path, *other)
        assert path.read_bytes() == before
        assert os.listdir(tmp_path) == ["a.transfer"]
    write_file(path, *other)
    check_same(read_file(path), other)


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def test_a_link_keeps_leading_to_its_file(tmp_path: Path, transfer: Transfer) -> None:
    (tmp_path / "there").mkdir()
    link = tmp_path / "link"
    link.symlink_to("there/file")
    write_file(link, *transfer)
    assert link.is_symlink()
    check_same(read_file(tmp_path / "there" / "file"), transfer)


def test_paths_that_take_no_file(tmp_path: Path, transfer: Transfer) -> None:
    for path, words in (
        (tmp_path, "is there already, and no regular file"),
        (tmp_path / "missing" / "a", "cannot be written: No such file or directory"),
        (f"{tmp_path}/a\0b", "cannot be written: "),
        ("", "cannot be written: |is there already"),
    ):
        with pytest.raises(TransferError, match=words):
            write_file(path, *transfer)
        with pytest.raises(TransferError, match="cannot be read: "):
            read_file(path)
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(TransferError, match="no regular file"):
        write_file(tmp_path / "pipe", *transfer)
    assert sorted(os.listdir(tmp_path)) == ["pipe"]


def test_a_damaged_path_is_named(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "a.transfer"
    path.write_bytes(data[:-1])
    with pytest.raises(TransferError, match=r"a\.transfer: is damaged or cut short"):
        read_file(path)


def test_an_open_file_stays_the_callers(tmp_path: Path, transfer: Transfer) -> None:
    path = tmp_path / "many"
    with open(path, "wb", buffering=0) as out:
        out.write(b"before")
        write_file(out, *transfer)
        assert not out.closed
    with open(path, "rb") as file:
        assert file.read(6) == b"before"
        check_same(read_file(file), transfer)
        assert not file.closed
    with open(path, "rb") as file, pytest.raises(TransferError, match="many: "):
        read_file(file)


class Odd:
    """A file that does not do what it should."""

    name = "odd"

    def __init__(self, result: Any) -> None:
        self.result = result

    def write(self, data: Any) -> Any:
        if isinstance(self.result, Exception):
            raise self.result
        return self.result

    def read(self) -> Any:
        return self.write(b"")


def test_files_that_do_not_work(tmp_path: Path, transfer: Transfer, data: bytes) -> None:
    text: Any = io.StringIO()
    with pytest.raises(TransferError, match="the file: cannot be written: "):
        write_file(text, *transfer)
    with pytest.raises(TransferError, match="the file: must be a binary file, reading it gave str"):
        read_file(text)
    closed = io.BytesIO(data)
    closed.close()
    for call in (lambda: write_file(closed, *transfer), lambda: read_file(closed)):
        with pytest.raises(TransferError, match=r"the file: cannot be (read|written): I/O operation on closed file"):
            call()
    error: Any = Odd(EOFError("the line is dead"))
    with pytest.raises(TransferError, match="odd: cannot be written: the line is dead"):
        write_file(error, *transfer)
    with pytest.raises(TransferError, match="odd: cannot be read: the line is dead"):
        read_file(error)
    short: Any = Odd(3)
    with pytest.raises(TransferError, match=r"odd: took 3 of \d+ bytes"):
        write_file(short, *transfer)
    silent: Any = Odd(None)
    write_file(silent, *transfer)
    with pytest.raises(TransferError, match="reading it gave NoneType"):
        read_file(silent)
    views: Any = Odd(memoryview(data))
    check_same(read_file(views), transfer)


@pytest.mark.parametrize("file", [None, 3, b"path", object(), ["a"]], ids=lambda file: type(file).__name__)
def test_what_is_no_file(file: Any, transfer: Transfer) -> None:
    kind = type(file).__name__
    with pytest.raises(TransferError, match=f"file must be a path or a binary file open for writing, not {kind}"):
        write_file(file, *transfer)
    with pytest.raises(TransferError, match=f"file must be a path or a binary file open for reading, not {kind}"):
        read_file(file)


def test_without_safetensors(tmp_path: Path, transfer: Transfer, data: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = builtins.__import__
    for package in ("safetensors", "numpy"):

        def without(name: str, *rest: Any, package: str = package, **options: Any) -> Any:
            if name.partition(".")[0] == package:
                raise ModuleNotFoundError(f"No module named {package!r}")
            return whole(name, *rest, **options)

        monkeypatch.setattr(builtins, "__import__", without)
        words = (
            rf"transfers need safetensors and numpy: pip install 'specstate\[transfer\]' \(No module named '{package}'"
        )
        with pytest.raises(TransferError, match=words):
            write_file(tmp_path / "a", *transfer)
        with pytest.raises(TransferError, match=words):
            read_file(io.BytesIO(data))
        monkeypatch.undo()
    assert os.listdir(tmp_path) == []


# -- what is not written


def test_headers_and_images_that_do_not_belong_together(transfer: Transfer) -> None:
    header, [image] = transfer
    config = header.config
    wrong: Any
    for wrong, words in (
        ([], "has 0 images, the header lists 1"),
        ([image, image], "has 2 images, the header lists 1"),
        ([make_image(config, 6, 2)], "image 0: the header says .*checkpoint_len=5.*, the image is .*checkpoint_len=6"),
        ([make_image(config, 5, 2, finished=True)], "image 0: the header says"),
        ([bare(image)], "image 0: the header says .*has_payload=True.*has_payload=False"),
        ([make_image(small_config(num_layers=2), 5, 2)], r"image 0: image.recurrent must have shape \[1, "),
        ([RequestImage(5, 2, False, make_image(config, 5, 3).payload)], r"image 0: image.u must have shape"),
        ([RequestImage(5, -2, False, None)], "image 0: image.pending_len = -2 is outside 0"),
        ([None], "images must be a sequence of RequestImage"),
        (image, "images must be a sequence of RequestImage"),
    ):
        with pytest.raises(TransferError, match=words):
            written(header, wrong)
    nothing: Any = None
    with pytest.raises(TransferError, match="header must be a TransferHeader, not NoneType"):
        written(nothing, [image])


def test_images_that_share_memory_are_refused() -> None:
    config = small_config()
    image = make_image(config, 4)
    header = TransferHeader(
        specstate_version="0",
        config=config,
        kind="snapshot",
        requests=(entry_of(image, "a"), entry_of(image, "b")),
        generation=2,
    )
    with pytest.raises(TransferError, match="cannot be packed: "):
        written(header, [image, image])


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"kind": "snapshot"}, "header: kind = 'snapshot' goes with a generation|header: .*goes with a generation"),
        ({"transfer_version": 2}, "header: transfer_version = 2: "),
        ({"specstate_version": "\ud800"}, "header: "),
        ({"generation": 3}, "goes with one request"),
    ],
)
def test_a_header_that_nobody_would_read_is_not_written(transfer: Transfer, changes: Any, words: str) -> None:
    header, images = transfer
    with pytest.raises(TransferError, match=words):
        written(header.model_copy(update=changes), images)


@pytest.mark.filterwarnings("ignore:Pydantic serializer warnings")
def test_parts_that_were_never_looked_at_are_not_written(transfer: Transfer) -> None:
    header, images = transfer
    request = header.requests[0]
    loose = request.sampling.model_copy(update={"top_p": 7.0})
    for changed in (
        request.model_copy(update={"sampling": loose}),
        request.model_copy(update={"request_id": "\ud800"}),
        request.model_copy(update={"request_id": 4}),
    ):
        with pytest.raises(TransferError, match="the file: header: "):
            written(header.model_copy(update={"requests": (changed,)}), images)


def test_entries_of_images_that_are_none() -> None:
    with pytest.raises(SpecStateError, match="image: checkpoint_len = -1: "):
        ImageEntry.of(RequestImage(-1, 0, False, None))
    with pytest.raises(ValidationError, match=r"it 'a\\ud800' cannot be written|valid"):
        entry_of(RequestImage(1, 0, False, None), "a\ud800")


def test_errors_are_specstate_errors() -> None:
    assert issubclass(TransferError, SpecStateError)


# -- what fits where


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"num_layers": 3}, "config.num_layers = 2 in the file, 3 in this manager: they must be the same"),
        ({"num_heads": 4}, "config.layer.num_heads = 2 in the file, 4 in"),
        ({"head_k_dim": 8}, "config.layer.head_k_dim = 6 in the file, 8 in"),
        ({"head_v_dim": 8}, "config.layer.head_v_dim = 5 in the file, 8 in"),
        ({"conv_kernel_size": None}, "config.layer.conv_kernel_size = 4 in the file, None in"),
        ({"gate_lower_bound": -5.0}, r"config.layer.gate_lower_bound = None in the file, -5\.0 in"),
        ({"checkpoint_dtype": "float32", "activation_dtype": "float32"}, "config.checkpoint_dtype = 'float64' in"),
        ({"activation_dtype": "float32"}, "config.activation_dtype = 'float64' in the file, 'float32' in"),
    ],
)
def test_what_must_agree(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(SpecStateError, match=words):
        check_fits(make_config(), make_config(**changes))
    check_fits(make_config(**changes), make_config(**changes))


def test_what_may_differ() -> None:
    changes = {
        "max_requests": 7,
        "num_checkpoints": 9,
        "max_query_len": 2,
        "fold_policy": "deferred",
        "record_capacity": 31,
        "block_size": 64,
        "memory_limit_bytes": 10**9,
        "path": "reference",
    }
    check_fits(make_config(), make_config(**changes))
    check_fits(make_config(**changes), make_config())
    spec = {*type(make_config().layer).model_fields}
    common = {"num_layers", "layer", "checkpoint_dtype", "activation_dtype"}
    assert {*StateConfig.model_fields} == common | {*changes}, "a new field has to agree, or may differ"
    assert spec == {"num_heads", "head_k_dim", "head_v_dim", "conv_kernel_size", "gate_lower_bound"}


@pytest.mark.parametrize(
    ("policy", "capacity", "stay", "fold"),
    [("ring", 11, range(8), range(8, 12)), ("deferred", 8, range(5), range(5, 9)), ("eager", 6, range(1), range(1, 7))],
)
def test_what_becomes_of_pending_records(policy: str, capacity: int, stay: range, fold: range) -> None:
    config = make_config(fold_policy=policy, record_capacity=capacity, max_query_len=4)
    assert [folds_on_arrival(m, config) for m in stay] == [False] * len(stay)
    assert [folds_on_arrival(m, config) for m in fold] == [True] * len(fold)
    with pytest.raises(
        SpecStateError, match=f"pending_len = {capacity + 1} exceeds record_capacity = {capacity}: expo"
    ):
        folds_on_arrival(capacity + 1, config)
