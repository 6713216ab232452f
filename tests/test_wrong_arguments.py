"""Every public call with every kind of wrong argument: an error that names the argument, and nothing changed.

A cross product: each argument of each call, in a call that otherwise goes through, takes each value of a catalogue.
Whatever is not listed here as accepted must raise SpecStateError or pydantic's ValidationError and leave the manager
as it was, bit for bit; whatever is listed must be accepted, so that the lists stay true. Moments at which a call may
not come are the matter of test_refusals.py.
"""

import dataclasses
import functools
import io
import warnings
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from pydantic import BaseModel, ValidationError

from specstate import (
    Handle,
    KDALayerSpec,
    LayerParams,
    PrefixKey,
    SampleResult,
    SamplingParams,
    SpecStateError,
    StateConfig,
    StateManager,
    StepMetadata,
    TraceRecorder,
    plan_bytes,
)
from specstate.plan_report import PlanRequest, build_plan_report
from specstate.presets import KIMI_K3, Preset, find_preset
from specstate.replay import replay_file
from specstate.step import Step
from specstate.trace import read_trace
from tests.factories import fingerprint, make_config, make_inputs, make_manager, make_params

TRACE = Path(__file__).parent / "traces" / "class13_new_parameters_ring.jsonl"
QUERY_LENS = (3, 2)
TOKENS = sum(QUERY_LENS)
VOCAB = 5
SIZES: dict[str, Any] = {"max_query_len": 3, "max_requests": 4, "block_size": 3, "num_checkpoints": 12}
CONFIG = make_config(num_heads=1, head_k_dim=2, head_v_dim=3, conv_kernel_size=3, **SIZES)
BACKENDS = ("reference", "metadata")
ALONE = ("metadata",)  # what has no manager needs no more than one


class World:
    """Requests "a" and "b" with pending records, unless the stage says otherwise; from "begun" on a step over both."""

    def __init__(self, stage: str, backend: str) -> None:
        self.stage, self.payloads = stage, backend == "reference"
        if self.payloads:
            self.manager = make_manager(CONFIG, debug=False)
        else:
            self.manager = StateManager(CONFIG, None, backend="metadata")
        self.gone = self.manager.admit("gone")
        self.manager.release(self.gone)
        self.a, self.b = self.manager.admit("a"), self.manager.admit("b")
        self.reserved = self.manager.reserve_checkpoints(2)
        if stage != "nothing pending":
            self.verify(self.begin()).defer(self.counts)
        if stage == "preempted":
            self.manager.preempt(self.b)
        if stage == "published":
            self.manager.publish(self.a, (1, 1))
        if stage in ("begun", "begun and flushed", "verified"):
            self.step = self.begin()
        if stage == "begun and flushed":
            self.step.flush()
        if stage == "verified":
            self.verify(self.step)

    @property
    def metadata(self) -> StepMetadata:
        return StepMetadata(handles=(self.a, self.b), query_lens=QUERY_LENS)

    @property
    def counts(self) -> torch.Tensor:
        return torch.tensor([2, 1])

    def begin(self) -> Step:
        return self.manager.begin_step(self.metadata)

    def verify(self, step: Step) -> Step:
        for layer, tensors in enumerate(make_inputs(CONFIG, step.num_tokens, seed=1)):
            given = (tensors.qkv, tensors.raw_gate, tensors.raw_beta) if self.payloads else ()
            step.verify(layer, *given)
        return step

    def held(self) -> dict[str, Any]:
        steps = [self.step] if hasattr(self, "step") else []
        manager = self.manager
        return {
            **fingerprint(manager, *steps),
            "digest": manager.digest(),
            "room": [manager.can_admit(n) for n in range(6)],
            "bytes": manager.allocated_bytes,
        }


# -- the catalogue


class Hostile:
    """Has no repr, no truth, no length and no order, and equals nothing."""

    def _refuse(self, *_: object) -> Any:
        raise TypeError("hostile")

    __repr__ = __bool__ = __len__ = __iter__ = __eq__ = __lt__ = __index__ = __float__ = _refuse
    __hash__ = None  # type: ignore[assignment]


class NumpyLike:
    """Has what duck typing looks for in an array, and is none."""

    dtype, shape, ndim, size, device = "int64", (2,), 1, 2, "cpu"

    def tolist(self) -> Any:
        raise RuntimeError("not an array")

    def __array__(self, *_: object, **__: object) -> Any:
        raise RuntimeError("not an array")


def other_step(world: World) -> Step:
    """Of another manager."""
    return World("verified", "reference").step


def other_sample(world: World) -> SampleResult:
    return other_step(world).sample(torch.zeros(TOKENS, VOCAB), torch.zeros(TOKENS, dtype=torch.int64))


#: By name: made anew for each call, since some can be used up.
VALUES: dict[str, Callable[[World], Any]] = {
    "None": lambda w: None,
    "True": lambda w: True,
    "False": lambda w: False,
    "0": lambda w: 0,
    "1": lambda w: 1,
    "3": lambda w: 3,
    "-1": lambda w: -1,
    "2**31": lambda w: 2**31,
    "2**63": lambda w: 2**63,
    "-2**63 - 1": lambda w: -(2**63) - 1,
    "10**400": lambda w: 10**400,
    "10**5000": lambda w: 10**5000,
    "-10**5000": lambda w: -(10**5000),
    "0.0": lambda w: 0.0,
    "-0.0": lambda w: -0.0,
    "1.0": lambda w: 1.0,
    "1.5": lambda w: 1.5,
    "-1.5": lambda w: -1.5,
    "nan": lambda w: float("nan"),
    "inf": lambda w: float("inf"),
    "-inf": lambda w: float("-inf"),
    "1j": lambda w: 1j,
    "empty string": lambda w: "",
    "string": lambda w: "x",
    "'3'": lambda w: "3",
    "surrogate": lambda w: "\ud800",
    "nul": lambda w: "a\0b",
    "long string": lambda w: "x" * 10_000,
    "empty bytes": lambda w: b"",
    "bytes": lambda w: b"x",
    "bytearray": lambda w: bytearray(b"xy"),
    "memoryview": lambda w: memoryview(b"xy"),
    "()": lambda w: (),
    "[]": lambda w: [],
    "{}": lambda w: {},
    "set": lambda w: {1, 2},
    "nested list": lambda w: [[1], [2, [3]]],
    "list of None": lambda w: [None, None],
    "tuple of None": lambda w: (None, None),
    "(1, 1)": lambda w: (1, 1),
    "[1, 1]": lambda w: [1, 1],
    "(1.0, 1.0)": lambda w: (1.0, 1.0),
    "(True, True)": lambda w: (True, True),
    "(10**5000, 1)": lambda w: (10**5000, 1),
    "dict": lambda w: {"a": 1},
    "range": lambda w: range(2),
    "generator": lambda w: (x for x in (1, 1)),
    "object": lambda w: object(),
    "hostile": lambda w: Hostile(),
    "numpy-like": lambda w: NumpyLike(),
    "function": lambda w: len,
    "class": lambda w: torch.Tensor,
    "exception": lambda w: ValueError("x"),
    "numpy int": lambda w: np.int64(1),
    "numpy float": lambda w: np.float64(1.0),
    "array": lambda w: np.zeros(2),
    "int array": lambda w: np.ones(2, dtype=np.int64),
    "scalar array": lambda w: np.array("reference"),
    "device": lambda w: torch.device("cpu"),
    "dtype": lambda w: torch.float64,
    "scalar tensor": lambda w: torch.tensor(1),
    "int tensor": lambda w: torch.tensor([1, 1]),
    "bool tensor": lambda w: torch.tensor([True, True]),
    "float tensor": lambda w: torch.zeros(2),
    "empty tensor": lambda w: torch.zeros(0),
    "sparse tensor": lambda w: torch.tensor([1, 1]).to_sparse(),
    "meta tensor": lambda w: torch.empty(2, device="meta"),
    "live handle": lambda w: w.a,
    "stale handle": lambda w: w.gone,
    "unknown handle": lambda w: Handle("nobody", 0, 1),
    "handle of another generation": lambda w: Handle("a", w.a.record_slot, w.a.generation + 9),
    "handle beyond every slot": lambda w: Handle("a", 2**31 - 1, 1),
    "handle of another manager": lambda w: StateManager(CONFIG, None, backend="metadata").admit("a"),
    "equal handle of another manager": lambda w: World("idle", "metadata").a,
    "[live handle]": lambda w: [w.a],
    "(stale handle,)": lambda w: (w.gone,),
    "manager": lambda w: w.manager,
    "step of another manager": other_step,
    "sample of another step": other_sample,
    "sample of no step": lambda w: SampleResult(None, *[torch.tensor([1, 1])] * 4),  # type: ignore[arg-type]
    "config": lambda w: CONFIG,
    "layer spec": lambda w: CONFIG.layer,
    "sampling": lambda w: SamplingParams(),
    "metadata": lambda w: StepMetadata(handles=(), query_lens=()),
    "params": lambda w: make_params(CONFIG)[0],
    "preset": lambda w: KIMI_K3,
    "prefix key": lambda w: PrefixKey("x", 2),
    "unknown prefix key": lambda w: PrefixKey("x", 9),
}


def nested(tensor: torch.Tensor) -> torch.Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.nested.nested_tensor([tensor, tensor])


def inference(tensor: torch.Tensor) -> torch.Tensor:
    with torch.inference_mode():
        return tensor.clone()


def strided(tensor: torch.Tensor) -> torch.Tensor:
    """The same elements, each apart from the next."""
    return torch.stack([tensor, tensor], -1)[..., 0]


#: What is nearly the tensor that is wanted.
TENSORS: dict[str, Callable[[torch.Tensor], Any]] = {
    "one short": lambda t: t[1:],
    "one long": lambda t: torch.cat([t, t[:1]]),
    "no rows": lambda t: t[:0],
    "flat": lambda t: t.flatten() if t.dim() > 1 else t[:, None],
    "one dimension more": lambda t: t[None],
    "one wider": lambda t: torch.cat([t, t[..., :1]], -1) if t.dim() > 1 else t[0],
    "no width": lambda t: t[..., :0],
    "float16": lambda t: t.half(),
    "float32": lambda t: t.float(),
    "float64": lambda t: t.double(),
    "int32": lambda t: t.int(),
    "int64": lambda t: t.long(),
    "uint8": lambda t: t.byte(),
    "bools": lambda t: t.bool(),
    "complex": lambda t: t.to(torch.complex128),
    "on meta": lambda t: t.to("meta"),
    "sparse": lambda t: t.to_sparse(),
    "nested": nested,
    "as array": lambda t: t.numpy(),
    "as list": lambda t: t.tolist(),
    "strided": strided,
    "backwards": lambda t: t.flip(0),
    "of inference mode": inference,
}
#: Of a floating dtype alone.
FLOATS: dict[str, Callable[[torch.Tensor], Any]] = {
    "requires grad": lambda t: t.clone().requires_grad_(),
    "of a graph": lambda t: t.clone().requires_grad_() * 1,
    "parameter": torch.nn.Parameter,
    "all NaN": lambda t: torch.full_like(t, torch.nan),
    "all inf": lambda t: torch.full_like(t, torch.inf),
}
FINE = {"strided", "backwards", "of inference mode", *FLOATS}
ANY_TENSOR = {*(n for n in VALUES if n.endswith("tensor")), *TENSORS, *FLOATS}
ANY_TENSOR -= {"meta tensor", "on meta", "as array", "as list"}
INTEGERS = {"0", "1", "3", "2**31", "2**63", "10**400", "10**5000"}


# -- the calls


class Call(NamedTuple):
    """A call that goes through with ``arguments``; ``accepted``: by argument, what of the catalogue it takes, too.

    A path leads into an argument: ("states", 1, 0) is the recurrent state of the second layer, and its error must have
    the word "states[1].recurrent" (see ``words``; by default the argument's name).
    """

    name: str
    arguments: Callable[[World], dict[str, Any]]
    run: Callable[[World, dict[str, Any]], Any]
    accepted: dict[Any, set[str]]
    stage: str = "idle"
    backends: tuple[str, ...] = BACKENDS
    words: dict[Any, Any] = {}  # noqa: RUF012 - never changed


def states(world: World) -> list[Any]:
    spec = CONFIG.layer
    recurrent = torch.ones(spec.num_heads, spec.head_v_dim, spec.head_k_dim, dtype=torch.float64)
    return [(recurrent, torch.ones(spec.conv_channels, spec.conv_history_len, dtype=torch.float64))] * 2


def inputs(world: World) -> dict[str, Any]:
    tensors = make_inputs(CONFIG, TOKENS, seed=2)[0]
    out = torch.zeros(TOKENS, CONFIG.layer.num_heads, CONFIG.layer.head_v_dim, dtype=torch.float64)
    return {"layer": 0, "qkv": tensors.qkv, "raw_gate": tensors.raw_gate, "raw_beta": tensors.raw_beta, "out": out}


def records(world: World) -> dict[str, Any]:
    given = inputs(world)
    return {
        "layer": 0,
        "u": given["out"],
        "key": given["raw_gate"],
        "gate": given["raw_gate"].clone(),
        "conv_input": given["qkv"],
    }


def storage() -> list[Any]:
    spec, slots = CONFIG.layer, CONFIG.num_checkpoints + 1
    return [
        (
            torch.zeros(slots, spec.num_heads, spec.head_v_dim, spec.head_k_dim, dtype=torch.float64),
            torch.zeros(slots, spec.conv_channels, spec.conv_history_len, dtype=torch.float64),
        )
        for _ in range(CONFIG.num_layers)
    ]


def method(name: str) -> Callable[[World, dict[str, Any]], Any]:
    return lambda world, arguments: getattr(world.manager, name)(**arguments)


def of_step(name: str) -> Callable[[World, dict[str, Any]], Any]:
    return lambda world, arguments: getattr(world.step, name)(**arguments)


def built(make: Callable[..., Any]) -> Callable[[World, dict[str, Any]], Any]:
    return lambda world, arguments: make(**arguments)


def capture(world: World, arguments: dict[str, Any]) -> None:
    """Sizes are checked before the device, of which there is none here."""
    try:
        world.manager.capture_step(**arguments)
    except SpecStateError as error:
        if "needs a GPU" not in str(error):
            raise


def with_table(world: World) -> dict[str, Any]:
    table = torch.tensor([[1, 2, 3], [4, 5, 6]], dtype=torch.int32)
    positions = torch.tensor([2, 1], dtype=torch.int32)
    return {"metadata": world.metadata, "pad_to": (4, 9), "block_table": table, "positions": positions}


def exported(world: World, verb: str, *handles: Handle) -> io.BytesIO:
    file = io.BytesIO()
    getattr(world.manager, verb)(*handles, file)
    file.seek(0)
    return file


def recover(world: World, arguments: dict[str, Any]) -> None:
    """Into a manager that holds nothing, and holds nothing after a refusal."""
    empty = make_manager(CONFIG) if world.payloads else StateManager(CONFIG, None, backend="metadata")
    try:
        empty.recover(**arguments)
    except SpecStateError:
        assert empty.metrics().checkpoint_slots_in_use == empty.num_requests == 0
        raise


def recorder(world: World, arguments: dict[str, Any]) -> None:
    """Built, and given to a manager."""
    with TraceRecorder(**arguments) as trace:
        StateManager(CONFIG, None, backend="metadata", recorder=trace)


def fields_of(model: BaseModel) -> dict[str, Any]:
    return {name: getattr(model, name) for name in type(model).model_fields}


PARAMS = {f.name: getattr(make_params(CONFIG)[0], f.name) for f in dataclasses.fields(LayerParams)}
PLAN = PlanRequest(model=KIMI_K3, tp=8, max_query_len=8, memory_gib=80.0)
LIVE = {"live handle", "equal handle of another manager"}  # a handle is its fields, so that traces can name it
HANDLE = {"handle": LIVE}
PER_LAYER = {"0", "1"}
FOREIGN = {"numpy int", "numpy float", "scalar tensor"}  # pydantic takes them for the floats that they become
COUNTS = {*FINE, "one long", "int32", "int64"}
MASK = {"None", *FINE, "one long", "bools", "bool tensor"}
#: Forms of a block table that both backends take; its contents are the caller's affair unless under debug.
TABLES = {*FINE, "one long", "one wider"}
PLACES = {*FINE, "one long"}
TABLE_WORDS = {"block_table": ("block_table",), "positions": ("positions",)}
KEYS = {"(1, 1)", "[1, 1]", "range", "prefix key"}  # of two tokens, as many as "a" has committed
KEY_WORDS = ("tokens", "key.num_tokens", "num_tokens = ")
# Any sequence of live handles, an empty one too.
HANDLES = {"()", "[]", "empty string", "empty bytes", "[live handle]"}

CALLS = [
    Call(
        "StateManager",
        lambda w: {
            "config": CONFIG,
            "params": make_params(CONFIG),
            "device": "cpu",
            "backend": "reference",
            "storage": storage(),
            "recorder": None,
            "debug": False,
        },
        built(StateManager),
        {
            "config": {"config"},
            "device": {"device"},
            "storage": {"None"},
            "recorder": {"None"},
            "debug": {"True", "False"},
            **{("storage", 1, i): FINE - {"strided", "of inference mode"} for i in (0, 1)},
        },
        words={("storage", 1): "storage[1]", ("storage", 1, 0): "storage[", ("storage", 1, 1): "storage["},
    ),
    Call("can_admit", lambda w: {"n": 1}, method("can_admit"), {"n": INTEGERS}),
    Call(
        "admit",
        lambda w: {"request_id": "c", "sampling": None},
        method("admit"),
        {
            "request_id": {"string", "'3'", "nul", "long string"},
            "sampling": {"None", "sampling"},
        },
    ),
    Call(
        "load",
        lambda w: {"handle": w.a, "states": states(w), "committed_len": 5},
        method("load"),
        {
            **HANDLE,
            "states": {"None"},
            "committed_len": {"0", "1", "3"},
            ("states", 1, 0): FINE,
            ("states", 1, 1): FINE,
        },
        backends=("reference",),
        words={
            ("states", 1): "states[1]",
            ("states", 1, 0): "states[1].recurrent",
            ("states", 1, 1): "states[1].conv",
        },
    ),
    Call(
        "load without payloads",
        lambda w: {"handle": w.a, "states": None, "committed_len": 5},
        method("load"),
        {**HANDLE, "states": {"None"}, "committed_len": {"0", "1", "3"}},
        backends=("metadata",),
    ),
    Call("release", lambda w: {"handle": w.a}, method("release"), HANDLE),
    Call(
        "fork",
        lambda w: {"handle": w.a, "request_ids": ["c", "d"], "sampling": [SamplingParams(), SamplingParams(seed=3)]},
        method("fork"),
        {
            **HANDLE,
            "sampling": {"None"},
            ("request_ids", 1): {"string", "'3'", "nul", "long string"},
            ("sampling", 1): {"sampling"},
        },
        words={("request_ids", 1): "request_ids[1]", ("sampling", 1): "sampling"},
    ),
    Call("preempt", lambda w: {"handle": w.a, "fold": False}, method("preempt"), {**HANDLE, "fold": {"True", "False"}}),
    Call("retract", lambda w: {"handle": w.a}, method("retract"), HANDLE),
    *(Call(verb, lambda w: {"request_id": "b"}, method(verb), {}, stage="preempted") for verb in ("resume", "discard")),
    Call("fence", lambda w: {"mode": "flush"}, method("fence"), {}),
    Call("committed_len", lambda w: {"handle": w.a}, method("committed_len"), HANDLE),
    Call(
        "read",
        lambda w: {"handle": w.a, "layer": 1},
        method("read"),
        {**HANDLE, "layer": PER_LAYER},
        backends=("reference",),
    ),
    Call("checkpoints", lambda w: {"layer": 1}, method("checkpoints"), {"layer": PER_LAYER}, backends=("reference",)),
    Call(
        "flush",
        lambda w: {"handles": [w.a]},
        method("flush"),
        {"handles": {"None", *HANDLES}, ("handles", 0): LIVE},
        words={("handles", 0): "handles[0]"},
    ),
    Call(
        "checkpoint_slots",
        lambda w: {"handles": [w.a]},
        method("checkpoint_slots"),
        {"handles": HANDLES, ("handles", 0): LIVE},
        words={("handles", 0): "handles[0]"},
    ),
    Call(
        "begin_step",
        lambda w: {"metadata": w.metadata, "pad_to": (4, 9)},
        method("begin_step"),
        {"metadata": {"metadata"}, "pad_to": {"None", "3"}},
    ),
    Call(
        "begin_step with a table",
        with_table,
        method("begin_step"),
        {
            "metadata": {"metadata"},
            "pad_to": {"None", "3"},
            "block_table": TABLES,
            "positions": PLACES,
        },
        backends=("reference",),
        words=TABLE_WORDS,
    ),
    Call(
        "begin_step with a table, without payloads",
        with_table,
        method("begin_step"),
        {
            "metadata": {"metadata"},
            "pad_to": {"None", "3"},
            "block_table": {*TABLES, "as list"},
            "positions": {
                *PLACES,
                "bytearray",
                "memoryview",
                "as list",
                "as array",
                "int64",
                "(1, 1)",
                "[1, 1]",
                "range",
                "int array",
                "int tensor",
            },
        },
        backends=("metadata",),
        words=TABLE_WORDS,
    ),
    Call(
        "publish",
        lambda w: {"handle": w.a, "key": (5, 6)},
        method("publish"),
        {**HANDLE, "key": KEYS},
        words={"key": KEY_WORDS},
    ),
    Call(
        "is_published",
        lambda w: {"key": (1, 1)},
        method("is_published"),
        {"key": {*KEYS, "unknown prefix key"}},
        stage="published",
        words={"key": KEY_WORDS},
    ),
    Call(
        "restore",
        lambda w: {"key": (1, 1), "request_id": "c", "sampling": SamplingParams(seed=3)},
        method("restore"),
        {
            "key": {"(1, 1)", "[1, 1]"},
            "request_id": {"string", "'3'", "nul", "long string"},
            "sampling": {"None", "sampling"},
        },
        stage="published",
        words={"key": (*KEY_WORDS, "no state is published under")},
    ),
    Call(
        "export",
        lambda w: {"handle": w.a, "file": io.BytesIO(), "fold": False},
        method("export"),
        {**HANDLE, "file": {"string", "'3'"}, "fold": {"True", "False"}},
        words={"file": ("file", "cannot be written")},
    ),
    Call(
        "import_request",
        lambda w: {"file": exported(w, "export", w.a), "request_id": "c", "sampling": SamplingParams(seed=3)},
        method("import_request"),
        {"request_id": {"string", "'3'", "nul", "long string"}, "sampling": {"None", "sampling"}},
        words={"file": ("file", "cannot be read")},
    ),
    Call(
        "snapshot",
        lambda w: {"file": io.BytesIO()},
        method("snapshot"),
        {"file": {"string", "'3'"}},
        words={"file": ("file", "cannot be written")},
    ),
    Call(
        "recover", lambda w: {"file": exported(w, "snapshot")}, recover, {}, words={"file": ("file", "cannot be read")}
    ),
    Call(
        "bind_storage",
        lambda w: {"storage": storage()},
        method("bind_storage"),
        {("storage", 1, i): FINE - {"strided", "of inference mode"} for i in (0, 1)},
        stage="nothing pending",
        backends=("reference",),
        words={("storage", 1): "storage[1]", ("storage", 1, 0): "storage[", ("storage", 1, 1): "storage["},
    ),
    Call(
        "reserve_checkpoints",
        lambda w: {"n": 2},
        method("reserve_checkpoints"),
        {"n": {"1", "3"}},
        words={"n": ("n = ", "no ")},
    ),
    Call(
        "return_checkpoints",
        lambda w: {"slots": w.reserved},
        method("return_checkpoints"),
        {"slots": {"()", "[]"}},
        stage="published",
        words={("slots", 1): "slots"},
    ),
    Call(
        "PrefixKey",
        lambda w: {"digest": "x", "num_tokens": 3},
        built(PrefixKey),
        {"digest": {"string", "'3'", "nul", "long string"}, "num_tokens": {"1", "3"}},
        backends=ALONE,
    ),
    Call(
        "PrefixKey.of",
        lambda w: {"tokens": (5, 6)},
        built(PrefixKey.of),
        {"tokens": {"(1, 1)", "[1, 1]", "range", "prefix key", "unknown prefix key"}},
        words={"tokens": ("tokens", "num_tokens")},
        backends=ALONE,
    ),
    Call("warmup", lambda w: {"captures": 1}, method("warmup"), {"captures": {"0", "1", "3"}}),
    Call("capture_step", lambda w: {"rows": 2, "tokens": 8}, capture, {"rows": {"1", "3"}, "tokens": {"1", "3"}}),
    Call(
        "set_params",
        lambda w: {"params": make_params(CONFIG)},
        method("set_params"),
        {
            ("params", 1): {"params"},
            **{("params", 1, name): FINE for name in PARAMS},
        },
        stage="nothing pending",
        backends=("reference",),
        words={("params", 1): "params", **{("params", 1, name): name for name in PARAMS}},
    ),
    Call(
        "verify",
        inputs,
        of_step("verify"),
        {
            "layer": PER_LAYER,
            "qkv": FINE,
            "raw_gate": {*FINE, "float32"},
            "raw_beta": {*FINE, "float32"},
            "out": {"None", *FINE, "float32"} - {"of inference mode"},
        },
        stage="begun",
        backends=("reference",),
    ),
    Call(
        "verify without payloads",
        lambda w: {"layer": 0, "qkv": None, "raw_gate": None, "raw_beta": None, "out": None},
        of_step("verify"),
        {"layer": PER_LAYER, **{name: {"None"} for name in ("qkv", "raw_gate", "raw_beta", "out")}},
        stage="begun",
        backends=("metadata",),
    ),
    Call(
        "write_records",
        records,
        of_step("write_records"),
        {"layer": PER_LAYER, "u": FINE, "key": FINE, "gate": FINE, "conv_input": FINE},
        stage="begun and flushed",
        backends=("reference",),
    ),
    Call(
        "replayed",
        lambda w: {"what": "verify"},
        of_step("replayed"),
        {},
        stage="begun",
        backends=("metadata",),
        words={"what": "replayed"},
    ),
    Call(
        "sample",
        lambda w: {
            "target_logits": torch.zeros(TOKENS, VOCAB),
            "draft_tokens": torch.zeros(TOKENS, dtype=torch.int64),
            "draft_probs": torch.full((TOKENS, VOCAB), 1 / VOCAB),
        },
        of_step("sample"),
        {
            "target_logits": {*FINE, "float16", "float32", "float64"},
            "draft_tokens": {*FINE, "int32", "int64"},
            "draft_probs": {"None", *FINE},
        },
        stage="verified",
        backends=("reference",),
        words={"target_logits": ("target_logits", "draft_probs")},  # of another vocabulary than the logits
    ),
    *(
        Call(
            verb,
            lambda w, verb=verb: {  # type: ignore[misc]
                "num_accepted": w.counts,
                "finished": torch.tensor([False, True]),
                **({"eager": torch.tensor([True, False])} if verb == "defer" else {}),
            },
            of_step(verb),
            {"num_accepted": {*COUNTS, "int tensor"}, "finished": MASK, "eager": MASK},
            stage="verified",
            backends=("reference",),
        )
        for verb in ("commit", "defer")
    ),
    *(
        Call(
            f"{verb} without payloads",
            lambda w, verb=verb: {  # type: ignore[misc]
                "num_accepted": w.counts,
                "finished": torch.tensor([False, True]),
                **({"eager": torch.tensor([True, False])} if verb == "defer" else {}),
            },
            of_step(verb),
            {
                "num_accepted": {
                    *COUNTS,
                    *("int tensor", "(1, 1)", "[1, 1]", "(10**5000, 1)", "range", "int array", "memoryview"),
                    *("bytearray", "as array", "as list", "uint8 as array"),
                },
                "finished": {*MASK, "(True, True)", "as array", "as list"},
                "eager": {*MASK, "(True, True)", "as array", "as list"},
            },
            stage="verified",
            backends=("metadata",),
        )
        for verb in ("commit", "defer")
    ),
    # -- models
    Call(
        "StepMetadata",
        lambda w: {
            "handles": (w.a, w.b),
            "query_lens": (3, 3),
            "row_kinds": ("decode", "decode"),
            "min_accepted": (1, 1),
            "batch_index": (0, 1),
        },
        built(StepMetadata),
        {
            "query_lens": {"(1, 1)"},
            "row_kinds": {"None"},
            "min_accepted": {"None", "(1, 1)"},
            "batch_index": {"None"},
            ("handles", 0): {name for name in VALUES if "handle" in name and "[" not in name and "(" not in name},
            ("query_lens", 0): {"1", "3"},
            ("min_accepted", 0): {"1", "3"},
            ("batch_index", 0): {"0", "3"},
        },
        words={
            ("handles", 0): "handles",
            ("query_lens", 0): "query_lens",
            ("row_kinds", 0): "row_kinds",
            ("min_accepted", 0): "min_accepted",
            ("batch_index", 0): "batch_index",
        },
        backends=ALONE,
    ),
    Call(
        "StateConfig",
        lambda w: fields_of(CONFIG.model_copy(update={"block_size": 8, "memory_limit_bytes": 2**40})),
        built(StateConfig),
        {
            "num_layers": {"1", "3"},
            "layer": {"layer spec"},
            "max_requests": {"1", "3"},
            "max_query_len": {"1", "3"},
            "record_capacity": {"None"},
            "num_checkpoints": {"None", "1", "3"},
            "block_size": {"None", "3"},
            "memory_limit_bytes": {"None", "2**31"},
            "path": {"None", "empty string", "string", "'3'", "nul", "long string", "surrogate"},  # known to backends
        },
        backends=ALONE,
    ),
    Call(
        "KDALayerSpec",
        lambda w: fields_of(CONFIG.layer),
        built(KDALayerSpec),
        {
            **{name: {"1", "3"} for name in ("num_heads", "head_k_dim", "head_v_dim")},
            "conv_kernel_size": {"None", "3"},
            "gate_lower_bound": {"None", "-1", "-1.5"},
        },
        backends=ALONE,
    ),
    Call(
        "SamplingParams",
        lambda w: {"temperature": 0.0, "top_k": 0, "top_p": 1.0, "seed": 0, "end_token_ids": (1, 2)},
        built(SamplingParams),
        {
            "temperature": {"0", "1", "3", "0.0", "-0.0", "1.0", "1.5", *FOREIGN},
            "top_k": {"0", "1", "3"},
            "top_p": {"1", "1.0", *FOREIGN},
            "seed": {"0", "1", "3", "2**31"},
            "end_token_ids": {"()", "(1, 1)"},
            ("end_token_ids", 0): {"0", "1", "3"},
        },
        words={("end_token_ids", 0): "end_token_ids"},
        backends=ALONE,
    ),
    Call(
        "Handle",
        lambda w: {"request_id": "a", "record_slot": 0, "generation": 1},
        built(Handle),
        {
            "request_id": {"empty string", "string", "'3'", "surrogate", "nul", "long string"},
            "record_slot": {"0", "1", "3", "-1"},
            "generation": {"0", "1", "3", "-1"},
        },
        backends=ALONE,
    ),
    Call(
        "LayerParams.to",
        lambda w: {**PARAMS, "device": "cpu"},
        lambda w, arguments: LayerParams(**{name: arguments[name] for name in PARAMS}).to(arguments["device"]),
        # Which tensors fit only the config of a manager says.
        {
            "device": {"device"},
            **{name: ANY_TENSOR | ({"None"} if name.startswith("conv") else set()) for name in PARAMS},
        },
        backends=ALONE,
    ),
    # -- plans
    Call("plan_bytes", lambda w: {"config": CONFIG}, built(plan_bytes), {"config": {"config"}}, backends=ALONE),
    *(
        Call(
            name,
            lambda w: {"memory_bytes": 2**30},
            lambda w, arguments, name=name: getattr(plan_bytes(CONFIG), name)(**arguments),  # type: ignore[misc]
            {"memory_bytes": INTEGERS},
            backends=ALONE,
        )
        for name in ("requests_in", "snapshot_requests_in")
    ),
    Call(
        "find_preset", lambda w: {"name": "kimi-k3"}, built(find_preset), {}, backends=ALONE, words={"name": "preset"}
    ),
    Call("Preset.layer", lambda w: {"tp": 2}, built(KIMI_K3.layer), {"tp": {"1", "3"}}, backends=ALONE),
    Call(
        "Preset",
        lambda w: {f.name: getattr(KIMI_K3, f.name) for f in dataclasses.fields(Preset)},
        lambda w, arguments: Preset(**arguments).config(1, max_query_len=8, max_requests=1),
        {
            "name": set(VALUES),
            **{name: {"1", "3"} for name in ("num_layers", "num_heads", "head_k_dim", "head_v_dim")},
            "conv_kernel_size": {"None", "3"},
            "gate_lower_bound": {"None", "-1", "-1.5"},
        },
        backends=ALONE,
    ),
    Call(
        "Preset.config",
        lambda w: {"tp": 8, "max_query_len": 8, "max_requests": 2, "fold_policy": "ring"},
        built(KIMI_K3.config),
        {"tp": {"1", "3"}, "max_query_len": {"1", "3"}, "max_requests": {"1", "3"}},
        backends=ALONE,
    ),
    Call(
        "build_plan_report",
        lambda w: {"request": PLAN},
        built(build_plan_report),
        {
            ("request", "model"): {"preset"},
            ("request", "tp"): {"1", "3"},
            ("request", "max_query_len"): {"1", "3"},
            ("request", "memory_gib"): {"1", "3", "1.0", "1.5", "2**31", "2**63"},
        },
        words={("request", f.name): f.name for f in dataclasses.fields(PlanRequest)},
        backends=ALONE,
    ),
    # -- traces
    Call(
        "TraceRecorder",
        lambda w: {"file": io.StringIO(), "seed": 0},
        recorder,
        {"file": {"string", "'3'"}, "seed": {"0", "1", "3", "2**31"}},
        words={"file": ("file", "cannot be written")},
        backends=ALONE,
    ),
    Call(
        "read_trace",
        lambda w: {"path": TRACE, "partial": False},
        built(read_trace),
        {"partial": {"True", "False"}},
        words={"path": ("path", "cannot be read")},
        backends=ALONE,
    ),
    Call(
        "replay_file",
        lambda w: {"path": TRACE, "partial": False, "full_shape": False, "backend": "metadata"},
        built(replay_file),
        {"partial": {"True", "False"}, "full_shape": {"True", "False"}},
        words={"path": ("path", "cannot be read")},
        backends=ALONE,
    ),
]


def words_of(call: Call, path: Any) -> tuple[str, ...]:
    """Of which a message about the argument at ``path`` must have one."""
    words = call.words.get(path, path)
    return (words,) if isinstance(words, str) else words


def paths_of(call: Call, arguments: dict[str, Any]) -> list[Any]:
    """The arguments, and the places inside them that the call names."""
    return [*arguments, *(path for path in call.words if isinstance(path, tuple))]


def at(value: Any, path: Iterable[Any]) -> Any:
    for key in path:
        value = getattr(value, key) if dataclasses.is_dataclass(value) else value[key]
    return value


def put(value: Any, path: tuple[Any, ...], wrong: Any) -> Any:
    """A copy of ``value`` with ``wrong`` at ``path``."""
    if not path:
        return wrong
    changed = put(at(value, path[:1]), path[1:], wrong)
    if dataclasses.is_dataclass(value):
        return dataclasses.replace(value, **{path[0]: changed})  # type: ignore[type-var]
    if isinstance(value, dict):
        return {**value, path[0]: changed}
    return type(value)(changed if i == path[0] else kept for i, kept in enumerate(value))


CASES = [
    pytest.param(call, path, backend, id=f"{call.name}-{path}-{backend}")
    for call in CALLS
    for backend in call.backends
    for path in paths_of(call, call.arguments(World("idle", backend)))
]


@pytest.mark.parametrize(("call", "path", "backend"), CASES)
def test_wrong_arguments(call: Call, path: Any, backend: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # where a path is wanted, some values name a file
    place = (path,) if isinstance(path, str) else path
    accepted, says = call.accepted.get(path, set()), words_of(call, path)
    world = World(call.stage, backend)
    before = world.held()
    good = at(call.arguments(world), place)
    values: dict[str, Callable[[World], Any]] = dict(VALUES)
    if isinstance(good, torch.Tensor):
        kinds = {**TENSORS, **(FLOATS if good.is_floating_point() else {})}
        right = str(good.dtype).removeprefix("torch.")
        values |= {n: functools.partial(lambda make, w: make(good), make) for n, make in kinds.items() if n != right}
    wrong = []
    for name, make in values.items():
        arguments = put(call.arguments(world), place, make(world))
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                call.run(world, arguments)
        except (SpecStateError, ValidationError) as error:
            if name in accepted:
                wrong.append(f"{name}: refused: {error}")
            elif not any(word in str(error) for word in says):
                wrong.append(f"{name}: {says} not in {str(error)!r}")
            elif world.held() != before:
                wrong.append(f"{name}: changed {[key for key, value in before.items() if world.held()[key] != value]}")
            else:
                continue
        except Exception as error:
            wrong.append(f"{name}: raised {type(error).__name__}: {error}")
        else:
            if name not in accepted:
                wrong.append(f"{name}: accepted")
        world = World(call.stage, backend)
        before = world.held()
    assert wrong == []
    call.run(world, call.arguments(world))


def test_every_public_method_is_in_the_table() -> None:
    """What takes nothing, or belongs to a GPU, is left out."""
    called = {call.name.split()[0] for call in CALLS}
    nothing = {"counters", "metrics", "digest", "check_integrity", "published", "cancel"}
    nothing |= {"forget_captures", "release_storage"}
    inside = {"null_request", "refresh", "end_columns"}  # of the step, for its manager and RankAgreement
    for kind in (StateManager, Step):
        names = {name for name, value in vars(kind).items() if callable(value) and not name.startswith("_")}
        assert names - called - nothing - inside == set(), kind
