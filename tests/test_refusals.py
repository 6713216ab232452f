"""Every refusal: the error's class, a message with field, value, limit and step, and a manager that has not changed.

Each case refuses one call at one stage of a small story, and the story then goes on to the end as if nothing had
happened: bit for bit as without the call, which in turn is checked against the oracle.
"""

import array
import functools
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch

from specstate import (
    CapacityError,
    LayerParams,
    PrefixKey,
    SpecStateError,
    StaleHandleError,
    StateManager,
    StepMetadata,
    StepOrderError,
)
from specstate.limits import MAX_COMMITTED_LEN, MAX_POSITION
from specstate.metadata import Handle
from specstate.step import Step
from tests.factories import (
    LayerInputs,
    fingerprint,
    make_config,
    make_inputs,
    make_manager,
    make_params,
    make_twin,
    raw_bytes,
    run_step,
    verify_all,
)

QUERY_LENS = (4, 3)
TOKENS = sum(QUERY_LENS)
COUNTS = (3, 1)
VOCAB = 11

STAGES = (
    "idle",
    "flushed",
    "begun",
    "begun and flushed",
    "one layer verified",
    "verified",
    "committed",
    "deferred",
    "cancelled",
)


class World:
    """Two requests with pending records and, from stage "begun" on, an open step over both (step 1)."""

    def __init__(self, stage: str, policy: str, debug: bool = False) -> None:
        assert stage in STAGES
        self.stage = stage
        self.config = make_config(fold_policy=policy)
        self.manager = make_manager(self.config, debug=debug)
        self.params = make_params(self.config)
        self.gone = self.manager.admit("gone")
        self.manager.release(self.gone)
        self.a, self.b = self.manager.admit("a"), self.manager.admit("b")
        self.twins = [make_twin(self.config), make_twin(self.config)]
        run_step(self.manager, [(self.a, self.twins[0], 4, 2), (self.b, self.twins[1], 3, 3)], seed=1)
        self.inputs = make_inputs(self.config, TOKENS, seed=2)
        if stage == "flushed":
            self.manager.flush()
        self._step: Step | None = None
        if stage not in ("idle", "flushed"):
            self._begin()
        if stage == "begun and flushed":
            self.step.flush()
        if stage == "one layer verified":
            self._verify(0)
        if stage in ("verified", "committed", "deferred", "cancelled"):
            verify_all(self.step, self.inputs)
        if stage in ("committed", "deferred"):
            self._end("commit" if stage == "committed" else "defer")
        if stage == "cancelled":
            self.step.cancel()

    @property
    def step(self) -> Step:
        assert self._step is not None
        return self._step

    @property
    def steps(self) -> list[Step]:
        return [] if self._step is None else [self._step]

    @property
    def layer(self) -> LayerInputs:
        return self.inputs[0]

    @property
    def metadata(self) -> StepMetadata:
        return StepMetadata(handles=(self.a, self.b), query_lens=QUERY_LENS)

    @property
    def counts(self) -> torch.Tensor:
        return torch.tensor(COUNTS, dtype=torch.int32)

    def verify(self, **changes: Any) -> Any:
        tensors = {"qkv": self.layer.qkv, "raw_gate": self.layer.raw_gate, "raw_beta": self.layer.raw_beta}
        return self.step.verify(0, **{**tensors, **changes})

    def write_records(self, **changes: Any) -> Any:
        spec = self.config.layer
        key = torch.zeros(TOKENS, spec.num_heads, spec.head_k_dim, dtype=torch.float64)
        u = torch.zeros(TOKENS, spec.num_heads, spec.head_v_dim, dtype=torch.float64)
        given = {"u": u, "key": key, "gate": key, "conv_input": self.layer.qkv, **changes}
        return self.step.write_records(0, **given)

    def sample(self, **changes: Any) -> Any:
        given = {"target_logits": torch.zeros(TOKENS, VOCAB), "draft_tokens": torch.zeros(TOKENS, dtype=torch.int64)}
        return self.step.sample(**{**given, **changes})

    def states(self, **changes: Any) -> list[tuple[Any, Any]]:
        """For load; the second layer's recurrent or conv is replaced."""
        spec = self.config.layer
        recurrent = torch.ones(spec.num_heads, spec.head_v_dim, spec.head_k_dim, dtype=torch.float64)
        conv = torch.ones(spec.conv_channels, 3, dtype=torch.float64)
        return [(recurrent, conv), (changes.get("recurrent", recurrent), changes.get("conv", conv))]

    def with_params(self, layer: int = 1, **changes: Any) -> list[LayerParams]:
        fields = {name: getattr(self.params[layer], name) for name in ("A_log", "dt_bias", "conv_weight", "conv_bias")}
        changed = list(self.params)
        changed[layer] = LayerParams(**{**fields, **changes})
        return changed

    def finish(self) -> dict[str, Any]:
        """The rest of the story and one more step; all that came out and all that is held then."""
        outputs = []
        if self.stage not in ("committed", "deferred", "cancelled"):
            if self._step is None:
                self._begin()
            for layer in range(self.config.num_layers):
                if not self.step._verified[layer]:
                    outputs.append(raw_bytes(self._verify(layer)))
            self._end("defer")
        step = self.manager.begin_step(StepMetadata(handles=(self.b, self.a), query_lens=(4, 2)))
        outputs += [raw_bytes(output) for output in verify_all(step, make_inputs(self.config, 6, seed=3))]
        step.defer(torch.tensor([4, 1]))
        self.manager.load(self.manager.admit("c"), None, committed_len=7)
        self.manager.check_integrity()
        held = fingerprint(self.manager)
        del held["params"]  # by identity
        return {"outputs": outputs, **held}

    def _begin(self) -> None:
        self._step = self.manager.begin_step(self.metadata)

    def _verify(self, layer: int) -> torch.Tensor:
        tensors = self.inputs[layer]
        return self.step.verify(layer, tensors.qkv, tensors.raw_gate, tensors.raw_beta)

    def _end(self, verb: str) -> None:
        getattr(self.step, verb)(self.counts)

    def check_states(self) -> None:
        """After ``finish``: a and b are in the states that their committed tokens lead to."""
        both = [[x[:4] for x in self.inputs], [x[4:] for x in self.inputs]]
        last = make_inputs(self.config, 6, seed=3)
        lasts = [[x[4:] for x in last], [x[:4] for x in last]]
        for row, handle in enumerate((self.a, self.b)):
            twin = self.twins[row]
            twin.commit(both[row], 0 if self.stage == "cancelled" else COUNTS[row])
            twin.commit(lasts[row], (1, 4)[row])
            twin.check(self.manager, handle)


@functools.cache
def undisturbed(stage: str, policy: str) -> dict[str, Any]:
    """How the story ends without any refusal."""
    world = World(stage, policy)
    end = world.finish()
    world.check_states()
    return end


def goes_on_undisturbed(world: World) -> bool:
    end, wanted = world.finish(), undisturbed(world.stage, world.config.fold_policy)
    return [name for name in wanted if end[name] != wanted[name]] == []


@dataclass(frozen=True)
class Refusal:
    """One bad call: what must be raised, and which words its message must have."""

    name: str
    stage: str
    call: Callable[[World], Any]
    words: tuple[str, ...]
    error: type[SpecStateError] = SpecStateError

    @property
    def in_step(self) -> bool:
        return self.stage not in ("idle", "flushed")


def refusals(stage: str, *cases: tuple[Any, ...]) -> list[Refusal]:
    """Refusals at ``stage`` from (name, call, words, error) tuples; the error is SpecStateError when left out."""
    return [Refusal(f"{case[0]}, {stage}", stage, *case[1:]) for case in cases]


def meta(shape: tuple[int, ...], dtype: torch.dtype = torch.float64) -> torch.Tensor:
    """A tensor on another device than every manager here."""
    return torch.empty(shape, dtype=dtype, device="meta")


def f64(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.float64)


def inference_tensor(*shape: int) -> torch.Tensor:
    with torch.inference_mode():
        return f64(*shape)


ALIEN = Handle("nobody", 0, 1)


def nested(*shapes: tuple[int, ...]) -> torch.Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.nested.nested_tensor([f64(*shape) for shape in shapes])


def other_life(world: World) -> Handle:
    return Handle("a", world.a.record_slot, world.a.generation + 7)


#: What every method that takes a handle must refuse.
BAD_HANDLES: list[tuple[str, Callable[[World], Any], tuple[str, ...], type[SpecStateError]]] = [
    ("None", lambda w: None, ("Handle", "NoneType"), SpecStateError),
    ("an id", lambda w: "a", ("Handle", "str"), SpecStateError),
    ("a list", lambda w: [w.a], ("Handle", "list"), SpecStateError),
    ("an unknown request", lambda w: ALIEN, ("'nobody'", "not live"), StaleHandleError),
    ("a released request", lambda w: w.gone, ("'gone'", "not live"), StaleHandleError),
    ("another generation", other_life, ("'a'", "generation"), StaleHandleError),
]
#: What every method that takes a layer must refuse.
BAD_LAYERS = [-1, 2, None, "0", [0], 0.0, True, np.int64(0)]


def handle_cases() -> list[Refusal]:
    methods: dict[str, Callable[[World, Any], Any]] = {
        "load": lambda w, handle: w.manager.load(handle, w.states(), 3),
        "release": lambda w, handle: w.manager.release(handle),
        "fork": lambda w, handle: w.manager.fork(handle, ["c"]),
        "preempt": lambda w, handle: w.manager.preempt(handle),
        "preempt and fold": lambda w, handle: w.manager.preempt(handle, fold=True),
        "retract": lambda w, handle: w.manager.retract(handle),
        "publish": lambda w, handle: w.manager.publish(handle, (1, 2)),
        "read": lambda w, handle: w.manager.read(handle, 0),
        "committed_len": lambda w, handle: w.manager.committed_len(handle),
        "flush": lambda w, handle: w.manager.flush([w.b, handle]),
        "checkpoint_slots": lambda w, handle: w.manager.checkpoint_slots([w.b, handle]),
    }
    cases = []
    for method, call in methods.items():
        for name, make, words, error in BAD_HANDLES:
            where = ("handles[1]",) if method in ("flush", "checkpoint_slots") else ("handle",)

            def refused(world: World, call: Any = call, make: Any = make) -> Any:
                return call(world, make(world))

            cases += refusals("idle", (f"{method} of {name}", refused, words + where, error))
    for name, make, words, error in BAD_HANDLES[3:]:

        def begun(world: World, make: Any = make) -> Any:
            return world.manager.begin_step(StepMetadata(handles=(world.b, make(world)), query_lens=(1, 1)))

        cases += refusals("idle", (f"begin_step of {name}", begun, (*words, "handles[1]", "step 1"), error))
    return cases


def layer_cases() -> list[Refusal]:
    cases = []
    for bad in BAD_LAYERS:
        words = (f"layer = {bad!r}", "0..1")
        cases += refusals(
            "idle",
            (f"read of layer {bad!r}", lambda w, bad=bad: w.manager.read(w.a, bad), words),
            (f"checkpoints of layer {bad!r}", lambda w, bad=bad: w.manager.checkpoints(bad), words),
        )
        cases += refusals(
            "begun and flushed",
            (
                f"verify of layer {bad!r}",
                lambda w, bad=bad: w.step.verify(bad, w.layer.qkv, w.layer.raw_gate, w.layer.raw_beta),
                (*words, "step 1"),
            ),
            (
                f"write_records of layer {bad!r}",
                lambda w, bad=bad: w.step.write_records(bad, f64(7, 2, 5), f64(7, 2, 6), f64(7, 2, 6), w.layer.qkv),
                (*words, "step 1"),
            ),
        )
    return cases


def admit_cases() -> list[Refusal]:
    cases = []
    for bad in (None, 3, "", b"x", ["x"]):
        cases += refusals(
            "idle", (f"admit of {bad!r}", lambda w, bad=bad: w.manager.admit(bad), ("request_id", repr(bad)))
        )
    cases += refusals(
        "idle",
        ("admit of a lone surrogate", lambda w: w.manager.admit("\ud800"), ("request_id", r"'\ud800'", "UTF-8")),
        ("admit of a live id", lambda w: w.manager.admit("b"), ("request_id", "'b'", "live already")),
        ("admit with sampling as a dict", lambda w: w.manager.admit("c", {"seed": 1}), ("sampling", "dict", "'c'")),
        ("admit with sampling as a float", lambda w: w.manager.admit("c", 0.0), ("sampling", "float", "'c'")),
    )
    for bad in (None, "1", 1.5, True, [1], -1):
        cases += refusals(
            "idle", (f"can_admit of {bad!r}", lambda w, bad=bad: w.manager.can_admit(bad), ("n = ", repr(bad)))
        )
    return cases


def load_cases() -> list[Refusal]:
    cases = []
    for bad in (-1, None, "3", [3], 1.0, True, np.int64(3), 2**31 - 1, 2**40):
        cases += refusals(
            "idle",
            (
                f"load at {bad!r}",
                lambda w, bad=bad: w.manager.load(w.a, w.states(), bad),
                ("committed_len", repr(bad), "0..", "'a'"),
            ),
        )
    shapes: dict[str, Callable[[World], Any]] = {
        "a string": lambda w: "ab",
        "a number": lambda w: 5,
        "no layers": lambda w: [],
        "one layer": lambda w: w.states()[:1],
        "three layers": lambda w: w.states() + w.states()[:1],
        "a tensor": lambda w: f64(2, 2),
    }
    for name, make in shapes.items():
        cases += refusals(
            "idle",
            (
                f"load of {name}",
                lambda w, make=make: w.manager.load(w.a, make(w), 3),
                ("states", "2", "recurrent, conv"),
            ),
        )
    for name, bad in {"None": None, "a single": (f64(2, 5, 6),), "a triple": (1, 2, 3), "a string": "ab"}.items():
        words = ("states[1]", "pair")
        cases += refusals(
            "idle",
            (f"load of {name} as a pair", lambda w, bad=bad: w.manager.load(w.a, [w.states()[0], bad], 3), words),
        )
    for field, shape in (("recurrent", (2, 5, 6)), ("conv", (34, 3))):
        wanted = str(list(shape))
        for name, bad, words in (
            ("None", None, ("tensor", "NoneType")),
            ("a list", [[0.0]], ("tensor", "list")),
            ("an array", np.zeros(shape), ("tensor", "ndarray")),
            ("another rank", f64(*shape, 1), (wanted, str([*shape, 1]))),
            ("another size", f64(*shape[:-1], 9), (wanted, "9]")),
            ("transposed", f64(*shape[::-1]), (wanted, str(list(shape[::-1])))),
            ("float32", f64(*shape).float(), ("float64", "float32")),
            ("integers", f64(*shape).long(), ("float64", "int64")),
            ("on another device", meta(shape), ("cpu", "meta")),
            ("sparse", f64(*shape).to_sparse(), ("strided", "sparse")),
            ("nested", nested(shape[1:], shape[1:]), ("strided", "nested")),
        ):
            cases += refusals(
                "idle",
                (
                    f"load of {field} {name}",
                    lambda w, field=field, bad=bad: w.manager.load(w.a, w.states(**{field: bad}), 3),
                    (f"states[1].{field}", *words),
                ),
            )
    in_step = ("'a'", "step 1", "open")
    for stage in ("begun", "one layer verified", "verified"):
        cases += refusals(
            stage, ("load", lambda w: w.manager.load(w.a, w.states(), 3), ("load", *in_step), StepOrderError)
        )
    return cases


def begin_cases() -> list[Refusal]:
    def begin(world: World, handles: tuple[Any, ...], query_lens: tuple[int, ...], **more: Any) -> Any:
        return world.manager.begin_step(StepMetadata(handles=handles, query_lens=query_lens), **more)

    cases = []
    for bad in (None, {}, [], "rows", 3):
        words = ("metadata", type(bad).__name__, "step 1")
        cases += refusals("idle", (f"begin_step of {bad!r}", lambda w, bad=bad: w.manager.begin_step(bad), words))
    cases += refusals(
        "idle",
        (
            "begin_step of more rows than requests",
            lambda w: begin(w, (w.a, w.b, ALIEN, w.gone), (1, 1, 1, 1)),
            ("handles", "4 live rows", "max_requests = 3", "step 1"),
        ),
        (
            "begin_step of a request twice",
            lambda w: begin(w, (w.a, w.b, w.a), (1, 1, 1)),
            ("handles[2]", "'a'", "row 0", "step 1"),
        ),
        (
            "begin_step of a window too long",
            lambda w: begin(w, (w.a, w.b), (4, 5)),
            ("query_lens[1] = 5", "max_query_len = 4", "step 1"),
        ),
        (
            "begin_step of a dummy window too long",
            lambda w: w.manager.begin_step(
                StepMetadata(handles=(w.a, None), query_lens=(4, 9), row_kinds=("decode", "dummy"))
            ),
            ("query_lens[1] = 9", "max_query_len = 4", "step 1"),
        ),
    )
    for bad, words in (
        (1, ("rows = 1", "2")),
        (-1, ("rows = -1", "2")),
        *((bad, (f"rows = {bad}", "exceeds 1048576")) for bad in (2**20 + 1, 2**61, 2**70)),
        *(((2, bad), (f"tokens = {bad}", "exceeds 1048576")) for bad in (2**20 + 1, 2**40, 2**80)),
        ((2, 6), ("tokens = 6", "7")),
        ((1, 7), ("rows = 1", "2")),
        *(
            (bad, (repr(bad),))
            for bad in ("2", True, 2.0, (2,), (2, 9, 1), [2, 8], (True, 8), np.int64(4), (np.int64(4), 8))
        ),
    ):
        cases += refusals(
            "idle",
            (
                f"begin_step padded to {bad!r}",
                lambda w, bad=bad: begin(w, (w.a, w.b), QUERY_LENS, pad_to=bad),
                ("pad_to", "step 1", *words),
            ),
        )
    for stage in ("begun", "one layer verified", "verified"):
        cases += refusals(
            stage,
            (
                "begin_step of a request in an open step",
                lambda w: begin(w, (w.b,), (1,)),
                ("handles[0]", "'b'", "step 1", "open", "step 2"),
                StepOrderError,
            ),
        )
    return cases


def flush_cases() -> list[Refusal]:
    cases = []
    for name, make in (
        ("a handle", lambda w: w.a),
        ("a number", lambda w: 5),
        ("a generator", lambda w: (h for h in [w.a])),
    ):
        words = ("handles", "sequence")
        cases += refusals(
            "idle",
            (f"flush of {name}", lambda w, make=make: w.manager.flush(make(w)), words),
            (f"checkpoint_slots of {name}", lambda w, make=make: w.manager.checkpoint_slots(make(w)), words),
        )
    cases += refusals(
        "idle",
        ("flush of a string", lambda w: w.manager.flush("a"), ("handles", "Handle", "str")),
        ("checkpoint_slots of None", lambda w: w.manager.checkpoint_slots(None), ("handles", "NoneType")),
        ("flush of a request twice", lambda w: w.manager.flush([w.a, w.b, w.a]), ("handles", "twice")),
    )
    middle = ("'a'", "step 1", "1 of", "2 layers")
    cases += refusals(
        "one layer verified",
        ("manager.flush of all", lambda w: w.manager.flush(), ("flush", *middle), StepOrderError),
        ("manager.flush of one", lambda w: w.manager.flush([w.a]), ("flush", *middle), StepOrderError),
        ("read", lambda w: w.manager.read(w.a, 0), ("read", *middle), StepOrderError),
        ("fork", lambda w: w.manager.fork(w.a, ["c"]), ("fork", *middle), StepOrderError),
        ("preempt", lambda w: w.manager.preempt(w.a), ("preempt", *middle), StepOrderError),
        ("preempt and fold", lambda w: w.manager.preempt(w.a, fold=True), ("preempt", *middle), StepOrderError),
        ("retract", lambda w: w.manager.retract(w.a), ("retract", *middle), StepOrderError),
        ("step.flush", lambda w: w.step.flush(), ("flush", "1 layers", "step 1"), StepOrderError),
    )
    cases += refusals(
        "verified", ("step.flush", lambda w: w.step.flush(), ("flush", "2 layers", "step 1"), StepOrderError)
    )
    for stage in ("begun", "one layer verified", "verified"):
        cases += refusals(
            stage,
            *(
                (
                    f"fence({mode!r})",
                    lambda w, mode=mode: w.manager.fence(mode),
                    ("fence", "'a'", "step 1"),
                    StepOrderError,
                )
                for mode in ("flush", "drop")
            ),
        )
    return cases


def between_lives_cases() -> list[Refusal]:
    taken = ["c", "b"]
    return refusals(
        "idle",
        ("fork into a live id", lambda w: w.manager.fork(w.a, taken), ("request_ids[1]", "'b'", "live already")),
        ("fork into itself", lambda w: w.manager.fork(w.a, ["a"]), ("request_ids[0]", "'a'", "live already")),
        ("fork into one id twice", lambda w: w.manager.fork(w.a, ["c", "c"]), ("request_ids", "twice")),
        ("fork into nothing", lambda w: w.manager.fork(w.a, []), ("request_ids", "[]")),
        ("fork into a string", lambda w: w.manager.fork(w.a, "cd"), ("request_ids", "'cd'")),
        (
            "fork beyond the slots",
            lambda w: w.manager.fork(w.a, ["c", "d"]),
            ("2 forks", "'a'", "1 of max_requests = 3", "1 of num_checkpoints = 3"),
            CapacityError,
        ),
        ("resume of a live request", lambda w: w.manager.resume("a"), ("resume", "request_id", "'a'")),
        ("discard of a released request", lambda w: w.manager.discard("gone"), ("discard", "request_id", "'gone'")),
        ("fence in another mode", lambda w: w.manager.fence("fold"), ("mode = 'fold'", "'flush' or 'drop'")),
    )


def prefix_cases() -> list[Refusal]:
    def publish(world: World, key: Any) -> Any:
        return world.manager.publish(world.a, key)

    def begin(world: World, **blocks: Any) -> Any:
        return world.manager.begin_step(world.metadata, **blocks)

    at_3, table, positions = PrefixKey("x", 3), torch.ones(2, 3, dtype=torch.int32), torch.ones(2, dtype=torch.int32)
    together = ("block_table, positions and block_size go together", "step 1")
    cases = refusals(
        "idle",
        ("publish of a position not held", lambda w: publish(w, at_3), ("num_tokens = 3", "'a'", "states at 0, 2")),
        ("publish under no tokens", lambda w: publish(w, ()), ("num_tokens = 0", "1..")),
        ("publish under a string", lambda w: publish(w, "ab"), ("tokens", "str")),
        ("publish under floats", lambda w: publish(w, [1.0, 2.0]), ("tokens", "integers")),
        ("is_published of None", lambda w: w.manager.is_published(None), ("tokens", "NoneType")),
        ("restore of nothing", lambda w: w.manager.restore(at_3, "c"), ("restore", "'x'", "num_tokens=3", "'c'")),
        ("restore of None", lambda w: w.manager.restore(None, "c"), ("tokens", "NoneType")),
        ("restore of a live id", lambda w: w.manager.restore(at_3, "b"), ("request_id", "'b'", "live already")),
        ("restore of no id", lambda w: w.manager.restore(at_3, ""), ("request_id", "''")),
        ("restore with sampling as a dict", lambda w: w.manager.restore(at_3, "c", {}), ("sampling", "dict", "'c'")),
        (
            "reserve_checkpoints beyond the slots",
            lambda w: w.manager.reserve_checkpoints(2),
            ("2 checkpoint slots to reserve", "1 of num_checkpoints = 3", "0 more hold prefixes"),
            CapacityError,
        ),
        ("return_checkpoints of a number", lambda w: w.manager.return_checkpoints(3), ("slots = 3", "sequence")),
        (
            "return_checkpoints of a free slot",
            lambda w: w.manager.return_checkpoints([3]),
            ("slots[0] = 3", "reserved"),
        ),
        ("return_checkpoints of an owned slot", lambda w: w.manager.return_checkpoints([1]), ("slots[0] = 1",)),
        ("return_checkpoints of the null slot", lambda w: w.manager.return_checkpoints([0]), ("slots[0] = 0",)),
        (
            "begin_step with a table, without block_size",
            lambda w: begin(w, block_table=table, positions=positions),
            (*together, ": block_size not given"),
        ),
        (
            "begin_step with a table alone",
            lambda w: begin(w, block_table=table),
            (*together, "positions and block_size not given"),
        ),
        (
            "begin_step with positions alone",
            lambda w: begin(w, positions=positions),
            (*together, "block_table and block_size not given"),
        ),
    )
    for bad in (0, -1, None, "2", 1.0, True):
        words = ("reserve_checkpoints", f"n = {bad!r}")
        cases += refusals(
            "idle",
            (f"reserve_checkpoints of {bad!r}", lambda w, bad=bad: w.manager.reserve_checkpoints(bad), words),
        )
    for stage, held in (("begun", "0, 2"), ("begun and flushed", "2"), ("verified", "2"), ("deferred", "2, 5")):
        cases += refusals(
            stage,
            (
                "publish of a position in the window",
                lambda w: publish(w, at_3),
                ("num_tokens = 3", "'a'", f"states at {held}"),
            ),
        )
    cases += refusals(
        "one layer verified",
        (
            "publish between verifies",
            lambda w: publish(w, PrefixKey("x", 2)),
            ("publish", "'a'", "step 1", "1 of whose 2 layers"),
            StepOrderError,
        ),
    )
    return cases


def params_cases() -> list[Refusal]:
    cases = refusals(
        "idle",
        (
            "set_params while records are pending",
            lambda w: w.manager.set_params(w.params),
            ("set_params", "'a'", "flush"),
            StepOrderError,
        ),
    )
    for stage in ("begun", "one layer verified", "verified"):
        cases += refusals(
            stage,
            ("set_params", lambda w: w.manager.set_params(w.params), ("set_params", "'a'", "step 1"), StepOrderError),
        )
    for name, make, words in bad_params():
        cases += refusals(
            "flushed", (f"set_params with {name}", lambda w, make=make: w.manager.set_params(make(w)), words)
        )
    return cases


def bad_params() -> list[tuple[str, Callable[[World], Any], tuple[str, ...]]]:
    """Of a constructor and of set_params alike."""
    cases: list[tuple[str, Callable[[World], Any], tuple[str, ...]]] = [
        ("None", lambda w: None, ("params", "sequence of LayerParams")),
        ("a string", lambda w: "ab", ("params", "sequence of LayerParams")),
        ("a LayerParams alone", lambda w: w.params[0], ("params", "sequence of LayerParams")),
        ("a list of dicts", lambda w: [{}, {}], ("params", "sequence of LayerParams")),
        ("no layers", lambda w: [], ("params", "0 layers", "num_layers is 2")),
        ("three layers", lambda w: [*w.params, w.params[0]], ("params", "3 layers", "num_layers is 2")),
        (
            "a layer of another dtype",
            lambda w: w.with_params(A_log=w.params[1].A_log.float()),
            ("params[1].A_log", "float32", "float64"),
        ),
        (
            "a layer without the bias",
            lambda w: w.with_params(conv_bias=None),
            ("params[1].conv_bias", "None", "float64"),
        ),
    ]
    for field, shape in (("A_log", (2,)), ("dt_bias", (2, 6)), ("conv_weight", (34, 4)), ("conv_bias", (34,))):
        for name, bad, words in (
            ("None", None, ("tensor", "NoneType")),
            ("a list", [0.0], ("tensor", "list")),
            ("of another rank", f64(*shape, 1), (str(list(shape)), str([*shape, 1]))),
            ("of another size", f64(*shape[:-1], 9), (str(list(shape)), "9]")),
            ("of integers", f64(*shape).int(), ("float64", "int32")),
            ("on another device", meta(shape), ("cpu", "meta")),
        ):
            if field == "conv_bias" and bad is None:
                continue
            cases.append(
                (
                    f"{field} {name}",
                    lambda w, field=field, bad=bad: w.with_params(**{field: bad}),
                    (field, "layer 1", *words),
                )
            )
    return cases


#: Tensors of a step: name, good shape, good dtype and, as a message spells them, the dtypes that are taken.
STEP_TENSORS = {
    "qkv": ((TOKENS, 34), torch.float64, "float64"),
    "raw_gate": ((TOKENS, 2, 6), torch.float64, "float64"),
    "raw_beta": ((TOKENS, 2), torch.float64, "float64"),
    "out": ((TOKENS, 2, 5), torch.float64, "float64"),
    "u": ((TOKENS, 2, 5), torch.float64, "float64"),
    "key": ((TOKENS, 2, 6), torch.float64, "float64"),
    "gate": ((TOKENS, 2, 6), torch.float64, "float64"),
    "conv_input": ((TOKENS, 34), torch.float64, "float64"),
}


def out_in(world: World, name: str, view: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """A verify whose out lies in the memory of one of its inputs, which is a copy with room behind it."""
    given = getattr(world.layer, name)
    room = f64(10 * given.numel())
    tensor = room[: given.numel()].view(given.shape).copy_(given)
    return world.verify(**{name: tensor, "out": view(tensor)})


def in_storage(world: World, name: str) -> torch.Tensor:
    held: Any = world.manager._backend
    tensor: torch.Tensor = getattr(held.storage.layers[1], name)
    return tensor.flatten()[3 : 3 + 10 * TOKENS].view(TOKENS, 2, 5)


def step_tensor_cases() -> list[Refusal]:
    cases = []
    for field, (shape, dtype, dtypes) in STEP_TENSORS.items():
        good = torch.zeros(shape, dtype=dtype)
        wanted = str(list(shape))
        for name, bad, words in (
            ("None", None, ("NoneType",)),
            ("a number", 0.0, ("float",)),
            ("a list", [[0.0]], ("list",)),
            ("an array", good.numpy(), ("ndarray",)),
            ("one token short", good[1:], (wanted, str([TOKENS - 1, *shape[1:]]))),
            ("one token long", torch.cat([good, good[:1]]), (wanted, str([TOKENS + 1, *shape[1:]]))),
            ("flat", good.flatten(), (wanted, f"[{good.numel()}]")),
            ("of another width", f64(*shape[:-1], 9), (wanted, "9]")),
            ("of float16", good.half(), (dtypes, "float16")),
            ("of integers", good.long(), (dtypes, "int64")),
            ("of bools", good.bool(), (dtypes, "bool")),
            ("on another device", meta(shape, dtype), ("cpu", "meta")),
            ("sparse", good.to_sparse(), ("strided", "sparse")),
            ("nested", nested(shape[1:], shape[1:]), ("strided", "nested")),
        ):
            if field == "out" and bad is None:
                continue
            method = "verify" if field in ("qkv", "raw_gate", "raw_beta", "out") else "write_records"
            stage = "begun" if method == "verify" else "begun and flushed"
            cases += refusals(
                stage,
                (
                    f"{method} with {field} {name}",
                    lambda w, method=method, field=field, bad=bad: getattr(w, method)(**{field: bad}),
                    (field, "step 1", *words),
                ),
            )
    cases += refusals(
        "begun",
        (
            "verify with out of shared elements",
            lambda w: w.verify(out=f64(1, 2, 5).expand(TOKENS, 2, 5)),
            ("out", "elements", "step 1"),
        ),
        (
            "verify with out of overlapping tokens",
            lambda w: w.verify(out=f64(60).as_strided((TOKENS, 2, 5), (5, 5, 1))),
            ("out", "overlap itself", "(5, 5, 1)", "step 1"),
        ),
        (
            "verify with out in qkv",
            lambda w: out_in(w, "qkv", lambda qkv: qkv[:, 3:13].view(TOKENS, 2, 5)),
            ("out", "qkv", "step 1"),
        ),
        (
            "verify with out in raw_gate",
            lambda w: out_in(w, "raw_gate", lambda gate: gate[..., 1:]),
            ("out", "raw_gate", "step 1"),
        ),
        (
            "verify with out in raw_beta",
            lambda w: out_in(w, "raw_beta", lambda beta: beta.as_strided((TOKENS, 2, 5), (10, 5, 1))),
            ("out", "raw_beta", "step 1"),
        ),
        *(
            (
                f"verify with out in {name}",
                lambda w, name=name: w.verify(out=in_storage(w, name)),
                ("out", "the manager's tensors", "step 1"),
            )
            for name in ("recurrent", "conv", "conv_ring", "record_u")
        ),
        (
            "verify with out of inference mode",
            lambda w: w.verify(out=inference_tensor(TOKENS, 2, 5)),
            ("out", "inference mode", "step 1"),
        ),
        (
            "verify with float32 qkv",
            lambda w: w.verify(qkv=w.layer.qkv.float()),
            ("qkv", "float64", "float32", "step 1"),
        ),
        (
            "write_records while records may be pending",
            lambda w: w.write_records(),
            ("row 0", "'a'", "step.flush()", "step 1"),
            StepOrderError,
        ),
    )
    return cases


def order_cases() -> list[Refusal]:
    def verbs(world: World) -> dict[str, Callable[[], Any]]:
        return {
            "verify": world.verify,
            "write_records": world.write_records,
            "flush": world.step.flush,
            "sample": world.sample,
            "commit": lambda: world.step.commit(world.counts),
            "defer": lambda: world.step.defer(world.counts),
            "cancel": world.step.cancel,
        }

    def call(verb: str) -> Callable[[World], Any]:
        return lambda world: verbs(world)[verb]()

    cases = []
    for stage, by in (("committed", "commit"), ("deferred", "defer"), ("cancelled", "cancel")):
        for verb in ("verify", "write_records", "flush", "sample", "commit", "defer", "cancel"):
            cases += refusals(stage, (verb, call(verb), (verb, f"ended by {by}", "step 1"), StepOrderError))
    for stage, missing in (("begun", "[0, 1]"), ("begun and flushed", "[0, 1]"), ("one layer verified", "[1]")):
        for verb in ("sample", "commit", "defer"):
            words = (verb, f"layers {missing} of 2", "step 1")
            cases += refusals(stage, (verb, call(verb), words, StepOrderError))
    for stage in ("one layer verified", "verified"):
        for verb in ("verify", "write_records"):
            words = (verb, "layer 0", "already", "step 1")
            cases += refusals(stage, (f"{verb} again", call(verb), words, StepOrderError))
    cases += refusals(
        "begun",
        *(
            (
                f"replayed({word!r}) without a graph",
                lambda w, word=word: w.step.replayed(word),
                (repr(word), "without a captured size", "step 1"),
                StepOrderError,
            )
            for word in ("commit", "verify")
        ),
    )
    return cases


def end_cases() -> list[Refusal]:
    cases = []
    counts = torch.tensor(COUNTS, dtype=torch.int32)
    for name, bad, words in (
        ("None", None, ("tensor", "NoneType")),
        ("a number", 3, ("tensor", "int")),
        ("a list", list(COUNTS), ("tensor", "list")),
        ("an array", counts.numpy(), ("tensor", "ndarray")),
        ("floats", counts.double(), ("int32 or int64", "float64")),
        ("bools", counts.bool(), ("int32 or int64", "bool")),
        ("int8", counts.to(torch.int8), ("int32 or int64", "int8")),
        ("a scalar", counts[0], ("[any]", "[]")),
        ("a column", counts[:, None], ("[any]", "[2, 1]")),
        ("one entry short", counts[:1], ("1 entries", "entry 1")),
        ("empty", counts[:0], ("0 entries", "entry 1")),
        ("on another device", meta((2,), torch.int32), ("cpu", "meta")),
    ):
        for verb in ("commit", "defer"):
            cases += refusals(
                "verified",
                (
                    f"{verb} with counts {name}",
                    lambda w, verb=verb, bad=bad: getattr(w.step, verb)(bad),
                    ("num_accepted", "step 1", *words),
                ),
            )
    mask = torch.tensor([True, False])
    for name, bad, words in (
        ("a bool", True, ("tensor", "bool")),
        ("a list", [True, False], ("tensor", "list")),
        ("integers", mask.int(), ("bool", "int32")),
        ("floats", mask.double(), ("bool", "float64")),
        ("a scalar", mask[0], ("[any]", "[]")),
        ("a column", mask[:, None], ("[any]", "[2, 1]")),
        ("one entry short", mask[:1], ("1 entries", "entry 1")),
        ("on another device", meta((2,), torch.bool), ("cpu", "meta")),
    ):
        for field in ("eager", "finished"):
            cases += refusals(
                "verified",
                (
                    f"defer with {field} {name}",
                    lambda w, field=field, bad=bad: w.step.defer(w.counts, **{field: bad}),
                    (field, "step 1", *words),
                ),
            )
    logits, drafts = torch.zeros(TOKENS, VOCAB), torch.zeros(TOKENS, dtype=torch.int64)
    for field, name, bad, words in (
        ("target_logits", "None", None, ("tensor", "NoneType")),
        ("target_logits", "a list", [[0.0]], ("tensor", "list")),
        ("target_logits", "flat", logits.flatten(), (f"[{TOKENS}, any]", f"[{TOKENS * VOCAB}]")),
        ("target_logits", "one token short", logits[1:], (f"[{TOKENS}, any]", f"[{TOKENS - 1}, {VOCAB}]")),
        ("target_logits", "of integers", logits.int(), ("float32", "int32")),
        ("target_logits", "on another device", meta((TOKENS, VOCAB)), ("cpu", "meta")),
        ("target_logits", "without a vocabulary", logits[:, :0], ("vocabulary",)),
        ("draft_tokens", "None", None, ("tensor", "NoneType")),
        ("draft_tokens", "a list", [0] * TOKENS, ("tensor", "list")),
        ("draft_tokens", "one token short", drafts[1:], (f"[{TOKENS}]", f"[{TOKENS - 1}]")),
        ("draft_tokens", "as a column", drafts[:, None], (f"[{TOKENS}]", f"[{TOKENS}, 1]")),
        ("draft_tokens", "of floats", drafts.double(), ("int64 or int32", "float64")),
        ("draft_tokens", "of bools", drafts.bool(), ("int64 or int32", "bool")),
        ("draft_tokens", "on another device", meta((TOKENS,), torch.int64), ("cpu", "meta")),
        ("draft_probs", "a list", [0.0] * TOKENS, ("tensor", "list")),
        ("draft_probs", "one token short", logits[1:], (f"[{TOKENS}, {VOCAB}]", f"[{TOKENS - 1}, {VOCAB}]")),
        ("draft_probs", "of another vocabulary", logits[:, 1:], (f"[{TOKENS}, {VOCAB}]", f"[{TOKENS}, {VOCAB - 1}]")),
        ("draft_probs", "of float64", logits.double(), ("float32", "float64")),
        ("draft_probs", "on another device", meta((TOKENS, VOCAB), torch.float32), ("cpu", "meta")),
    ):
        cases += refusals(
            "verified",
            (
                f"sample with {field} {name}",
                lambda w, field=field, bad=bad: w.sample(**{field: bad}),
                (field, "step 1", *words),
            ),
        )
    return cases


CASES = [
    *handle_cases(),
    *layer_cases(),
    *admit_cases(),
    *load_cases(),
    *begin_cases(),
    *flush_cases(),
    *between_lives_cases(),
    *prefix_cases(),
    *params_cases(),
    *step_tensor_cases(),
    *order_cases(),
    *end_cases(),
]


def refused(call: Callable[[], Any], error: type[SpecStateError], words: tuple[str, ...]) -> None:
    """``call`` raises exactly ``error``, with all ``words`` in the message."""
    with pytest.raises(ValueError) as caught:
        call()
    assert type(caught.value) is error
    missing = [word for word in words if word not in str(caught.value)]
    assert not missing, f"{missing} not in {str(caught.value)!r}"


# "deferred" folds in verify, so a refusal that comes too late shows at once; "ring" is the default.
@pytest.mark.parametrize("case", CASES, ids=[case.name for case in CASES])
def test_refusal_changes_nothing(case: Refusal) -> None:
    world = World(case.stage, "deferred")
    before = fingerprint(world.manager, *world.steps)
    refused(lambda: case.call(world), case.error, case.words)
    after = fingerprint(world.manager, *world.steps)
    assert [name for name in before if before[name] != after[name]] == []
    assert goes_on_undisturbed(world)


# Under eager nothing is ever pending, so write_records needs no flush there.
ORDER_CASES = [
    case
    for case in CASES
    if case.error is StepOrderError and case.in_step and not case.name.startswith("write_records while")
]


@pytest.mark.parametrize("policy", ["eager", "ring"])
@pytest.mark.parametrize("case", ORDER_CASES, ids=[case.name for case in ORDER_CASES])
def test_refusal_of_a_moment_under_other_policies(case: Refusal, policy: str) -> None:
    world = World(case.stage, policy)
    before = fingerprint(world.manager, *world.steps)
    refused(lambda: case.call(world), case.error, case.words)
    assert fingerprint(world.manager, *world.steps) == before
    assert goes_on_undisturbed(world)


@pytest.mark.parametrize("verb", ["commit", "defer"])
def test_refuses_the_sample_of_another_step(verb: str) -> None:
    world = World("verified", "ring")
    other = world.manager.admit("c")
    later = world.manager.begin_step(StepMetadata(handles=(other,), query_lens=(TOKENS - 3,)))
    verify_all(later, [x[:4] for x in world.inputs])
    sample = later.sample(torch.zeros(4, VOCAB), torch.zeros(4, dtype=torch.int64))
    before = fingerprint(world.manager, world.step, later)
    refused(lambda: getattr(world.step, verb)(sample), SpecStateError, ("num_accepted", "step 2", "step 1"))
    assert fingerprint(world.manager, world.step, later) == before
    later.cancel()
    world.manager.release(other)
    world.finish()
    world.check_states()


@pytest.mark.parametrize("field", ["num_accepted", "eager", "finished"])
@pytest.mark.parametrize("length", [2, 5])
def test_refuses_batch_index_beyond_the_counts(field: str, length: int) -> None:
    world = World("idle", "ring")
    step = world.manager.begin_step(StepMetadata(handles=(world.a, world.b), query_lens=QUERY_LENS, batch_index=(1, 5)))
    verify_all(step, world.inputs)
    enough: dict[str, Any] = {"num_accepted": torch.tensor([0, 3, 0, 0, 0, 1])}
    short = torch.zeros(length, dtype=torch.int64 if field == "num_accepted" else torch.bool)
    before = fingerprint(world.manager, step)
    refused(
        lambda: step.defer(**{**enough, field: short}),
        SpecStateError,
        (field, f"{length} entries", "entry 5", "step 1"),
    )
    assert fingerprint(world.manager, step) == before
    step.defer(**enough)
    assert [world.manager.committed_len(handle) for handle in (world.a, world.b)] == [2 + 3, 3 + 1]


@pytest.mark.parametrize(
    ("row", "count", "words"),
    [
        pytest.param(0, 0, ("row 0", "0", "1..query_lens[0] = 4"), id="zero"),
        pytest.param(0, -1, ("row 0", "-1", "1..query_lens[0] = 4"), id="negative"),
        pytest.param(0, 5, ("row 0", "5", "1..query_lens[0] = 4"), id="above query_len"),
        pytest.param(1, 1, ("row 1", "1", "2..query_lens[1] = 3"), id="below min_accepted"),
        pytest.param(2, 1, ("row 2", "1", "2..query_lens[2] = 2"), id="part of a prompt"),
    ],
)
@pytest.mark.parametrize("verb", ["commit", "defer"])
def test_debug_refuses_counts_out_of_range(row: int, count: int, words: tuple[str, ...], verb: str) -> None:
    world = World("idle", "deferred", debug=True)
    c = world.manager.admit("c")
    metadata = StepMetadata(
        handles=(world.a, world.b, c),
        query_lens=(4, 3, 2),
        row_kinds=("decode", "decode", "prompt"),
        min_accepted=(1, 2, 2),
    )
    step = world.manager.begin_step(metadata)
    verify_all(step, make_inputs(world.config, 9, seed=5))
    counts = [4, 3, 2]
    bad = torch.tensor([count if i == row else good for i, good in enumerate(counts)])
    before = fingerprint(world.manager, step)
    refused(lambda: getattr(step, verb)(bad), SpecStateError, (verb, "num_accepted", "step 1", *words))
    assert fingerprint(world.manager, step) == before
    getattr(step, verb)(torch.tensor(counts))
    assert [world.manager.committed_len(handle) for handle in (world.a, world.b, c)] == [6, 6, 2]


@pytest.mark.parametrize(
    ("sizes", "words"),
    [
        pytest.param(
            {"max_requests": 2, "num_checkpoints": 5},
            ("0 of max_requests = 2", "3 of num_checkpoints = 5"),
            id="record slots",
        ),
        pytest.param(
            {"max_requests": 5, "num_checkpoints": 2},
            ("3 of max_requests = 5", "0 of num_checkpoints = 2"),
            id="checkpoints",
        ),
    ],
)
def test_admit_refuses_without_a_free_slot(sizes: dict[str, int], words: tuple[str, ...]) -> None:
    manager = make_manager(make_config(**sizes))
    first = manager.admit("a")
    manager.admit("b")
    before = fingerprint(manager)
    refused(lambda: manager.admit("c"), CapacityError, ("'c'", *words))
    assert fingerprint(manager) == before
    manager.release(first)
    assert manager.admit("c").record_slot == first.record_slot


def test_a_failed_admit_gives_back_what_it_took(monkeypatch: pytest.MonkeyPatch) -> None:
    manager = make_manager()
    before = fingerprint(manager)

    def out_of_memory(*_: Any) -> None:
        raise torch.OutOfMemoryError("no memory")

    with monkeypatch.context() as patch:
        patch.setattr(manager._backend, "admit", out_of_memory)
        with pytest.raises(torch.OutOfMemoryError):
            manager.admit("a")
    assert fingerprint(manager) == before
    manager.admit("a")


@pytest.mark.parametrize("verb", ["begin", "release"])
def test_a_step_that_finds_no_memory_has_changed_nothing(verb: str, monkeypatch: pytest.MonkeyPatch) -> None:
    world = World("idle", "ring")
    before = fingerprint(world.manager)

    def out_of_memory(*_: Any) -> None:
        raise torch.OutOfMemoryError("no memory")

    with monkeypatch.context() as patch:
        patch.setattr(world.manager._backend, verb, out_of_memory)
        with pytest.raises(torch.OutOfMemoryError):
            _ = world.manager.begin_step(world.metadata) if verb == "begin" else world.manager.release(world.a)
    assert fingerprint(world.manager) == before
    assert goes_on_undisturbed(world)


def test_refuses_positions_beyond_int32() -> None:
    """The host knows a bound, not the position: it moves by whole windows until committed_len has looked."""
    config = make_config(max_query_len=2**16, record_capacity=2**17, num_heads=1, head_k_dim=1, head_v_dim=1)
    for backend in ("reference", "metadata"):
        params = make_params(config) if backend == "reference" else None
        manager = StateManager(config, params, backend=backend)  # type: ignore[arg-type]
        handle = manager.admit("a")
        manager.load(handle, None, committed_len=MAX_COMMITTED_LEN)
        before = fingerprint(manager)

        def begin(query_len: int, manager: StateManager = manager, handle: Handle = handle) -> Step:
            return manager.begin_step(StepMetadata(handles=(handle,), query_lens=(query_len,)))

        room = MAX_POSITION - MAX_COMMITTED_LEN
        words = ("handles[0]", "'a'", str(MAX_COMMITTED_LEN), f"query_lens[0] = {room + 1}", "step 0")
        refused(lambda begin=begin, room=room: begin(room + 1), SpecStateError, words)  # type: ignore[misc]
        assert fingerprint(manager) == before
        step = begin(4)
        assert int(step.positions[-1]) == MAX_COMMITTED_LEN + 3
        for layer in range(config.num_layers):
            tensors = make_inputs(config, 4, seed=layer)[layer]
            step.verify(layer, *(() if params is None else (tensors.qkv, tensors.raw_gate, tensors.raw_beta)))
        step.defer(torch.tensor([1]))
        refused(lambda begin=begin, room=room: begin(room - 1), SpecStateError, ("committed_len",))  # type: ignore[misc]
        assert manager.committed_len(handle) == MAX_COMMITTED_LEN + 1
        begin(room - 1).cancel()


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        pytest.param(([], 0, 1), ("request_id", "str", "list"), id="id a list"),
        pytest.param((b"a", 0, 1), ("request_id", "str", "bytes"), id="id of bytes"),
        pytest.param(("a", None, 1), ("record_slot", "int", "NoneType"), id="slot None"),
        pytest.param(("a", 0, True), ("generation", "int", "bool"), id="generation a bool"),
        pytest.param(("a", 0, [1]), ("generation", "int", "list"), id="generation a list"),
    ],
)
def test_a_handle_has_fields_of_its_types(fields: tuple[Any, ...], words: tuple[str, ...]) -> None:
    refused(lambda: Handle(*fields), SpecStateError, words)


# -- construction


def test_memory_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    config = make_config()
    params, needed = make_params(config), make_manager(config).plan.total_bytes
    for error in (torch.OutOfMemoryError("CUDA out of memory"), RuntimeError("overflowed"), MemoryError()):

        def allocate(*_: Any, error: BaseException = error, **__: Any) -> None:
            raise error

        with monkeypatch.context() as patch:
            patch.setattr("specstate.storage.torch.zeros", allocate)
            words = (f"{needed} bytes", "on cpu", "max_requests = 3", "num_checkpoints = 3", "record_capacity = 16")
            refused(lambda: StateManager(config, params), CapacityError, words)
    StateManager(config, params)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        pytest.param({"config": None}, ("config", "StateConfig", "NoneType"), id="config None"),
        pytest.param({"config": {"num_layers": 2}}, ("config", "StateConfig", "dict"), id="config a dict"),
        pytest.param({"recorder": "x.jsonl"}, ("recorder", "TraceRecorder", "str"), id="recorder a path"),
        pytest.param({"recorder": 3}, ("recorder", "TraceRecorder", "int"), id="recorder a number"),
        pytest.param({"backend": "cuda"}, ("backend", "'cuda'", "'reference'"), id="backend unknown"),
        pytest.param({"backend": None}, ("backend", "None", "'reference'"), id="backend None"),
        pytest.param({"backend": ["reference"]}, ("backend", "['reference']"), id="backend a list"),
        pytest.param({"device": None}, ("device", "None"), id="device None"),
        pytest.param({"device": "gpu"}, ("device", "'gpu'"), id="device unknown"),
        pytest.param({"device": 1.5}, ("device", "1.5"), id="device a float"),
        pytest.param({"device": ["cpu"]}, ("device", "['cpu']"), id="device a list"),
        pytest.param({"device": "meta"}, ("device", "'meta'"), id="device without memory"),
        pytest.param(
            {"config": make_config(path="gluon")}, ("config.path", "'gluon'", "'reference'"), id="path unknown"
        ),
        pytest.param(
            {"config": make_config(path="reference"), "backend": "metadata", "params": None},
            ("config.path", "'reference'", "'metadata'"),
            id="path of another backend",
        ),
        pytest.param(
            {"backend": "metadata", "params": None, "storage": []},
            ("storage", "None", "metadata"),
            id="storage without payloads",
        ),
    ],
)
def test_construction_refuses(change: dict[str, Any], words: tuple[str, ...]) -> None:
    config = make_config()
    good = {"config": config, "params": make_params(config), "device": "cpu", "backend": "reference"}
    refused(lambda: StateManager(**{**good, **change}), SpecStateError, words)
    StateManager(**good)


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
@pytest.mark.parametrize("device", ["cuda", "cuda:7", torch.device("cuda")], ids=str)
def test_construction_refuses_a_gpu_that_is_not_there(device: Any) -> None:
    config = make_config()
    refused(
        lambda: StateManager(config, make_params(config), device=device), SpecStateError, ("device", "cuda", "no GPU")
    )


BAD_PARAMS = bad_params()


@pytest.mark.parametrize(("name", "make", "words"), BAD_PARAMS, ids=[name for name, _, _ in BAD_PARAMS])
def test_construction_refuses_params(name: str, make: Callable[[World], Any], words: tuple[str, ...]) -> None:
    world = World("idle", "ring")
    refused(lambda: StateManager(world.config, make(world)), SpecStateError, words)


@pytest.mark.parametrize("field", ["conv_weight", "conv_bias"])
def test_construction_refuses_conv_params_without_a_conv(field: str) -> None:
    config = make_config(conv_kernel_size=None)
    params = make_params(config)
    shape = {"conv_weight": (34, 4), "conv_bias": (34,)}[field]
    params[1] = LayerParams(params[1].A_log, params[1].dt_bias, **{field: f64(*shape)})
    refused(lambda: StateManager(config, params), SpecStateError, (field, "None", "conv_kernel_size", "layer 1"))


def test_construction_allocates_nothing_before_it_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    config = make_config()

    def allocate(*_: Any, **__: Any) -> None:
        raise AssertionError("allocated")

    params, storage = make_params(config), bad_storage()["another dtype"][0]
    monkeypatch.setattr("specstate.storage.torch.zeros", allocate)
    for arguments in (
        {"params": params[:1]},
        {"params": params, "storage": storage},
        {"params": params, "backend": "x"},
        {"params": params, "recorder": "x"},
    ):
        with pytest.raises(SpecStateError):
            StateManager(config, **arguments)


def bad_storage() -> dict[str, tuple[Any, tuple[str, ...]]]:
    """Storage that does not fit make_config(): 3 + 1 slots of recurrent [2, 5, 6] and conv [34, 3] in two layers."""
    recurrent, conv = f64(4, 2, 5, 6), f64(4, 34, 3)
    good = (recurrent, conv)
    block, pages = f64(1000), f64(10, 2, 5, 6)
    fits = "[4, 2, 5, 6]"
    return {
        "a number": (5, ("storage", "2 (recurrent, conv) pairs")),
        "a dict": ({0: good, 1: good}, ("storage", "2 (recurrent, conv) pairs")),
        "one layer": ([good], ("storage", "2 (recurrent, conv) pairs")),
        "three layers": ([good] * 3, ("storage", "2 (recurrent, conv) pairs")),
        "None for a layer": ([good, None], ("storage[1]", "pair")),
        "a triple": ([good, (recurrent, conv, conv)], ("storage[1]", "pair")),
        "a string": (["ab", "cd"], ("storage[0].recurrent", "str")),
        "None for recurrent": ([good, (None, conv)], ("storage[1].recurrent", "tensor", "NoneType")),
        "None for conv": ([good, (recurrent, None)], ("storage[1].conv", "tensor", "NoneType")),
        "an array": ([good, (recurrent.numpy(), conv)], ("storage[1].recurrent", "ndarray")),
        "a slot short": ([good, (recurrent[1:], conv)], ("storage[1].recurrent", fits, "[3, 2, 5, 6]")),
        "a slot more": ([good, (f64(5, 2, 5, 6), conv)], ("storage[1].recurrent", fits, "[5, 2, 5, 6]")),
        "another rank": ([good, (recurrent.flatten(2), conv)], ("storage[1].recurrent", fits, "[4, 2, 30]")),
        "conv transposed": ([good, (recurrent, f64(4, 3, 34))], ("storage[1].conv", "[4, 34, 3]", "[4, 3, 34]")),
        "another dtype": ([good, (recurrent.float(), conv)], ("storage[1].recurrent", "float64", "float32")),
        "another dtype of conv": ([good, (recurrent, conv.float())], ("storage[1].conv", "float64", "float32")),
        "another device": ([good, (meta((4, 2, 5, 6)), conv)], ("storage[1].recurrent", "cpu", "meta")),
        "layers of different strides": (
            [good, (f64(4, 2, 6, 5).mT, conv)],
            ("storage[1].recurrent", "strides", "(60, 30, 1, 5)", "(60, 30, 6, 1)"),
        ),
        "slots that share memory": (
            [(f64(1, 2, 5, 6).expand(4, 2, 5, 6), conv)] * 2,
            ("storage[0].recurrent", "elements"),
        ),
        "slots that overlap": (
            [(f64(200).as_strided((4, 2, 5, 6), (30, 30, 6, 1)), conv)] * 2,
            ("storage[0].recurrent", "elements", "(30, 30, 6, 1)"),
        ),
        "nested": ([good, (nested(*[(2, 5, 6)] * 4), conv)], ("storage[1].recurrent", "nested")),
        "one recurrent for two layers": (
            [good, (recurrent, f64(4, 34, 3))],
            ("storage[0].recurrent", "storage[1].recurrent", "share memory"),
        ),
        "one conv for two layers": (
            [good, (f64(4, 2, 5, 6), conv)],
            ("storage[0].conv", "storage[1].conv", "share memory"),
        ),
        "a conv in a recurrent": (
            [(block[:240].view(4, 2, 5, 6), block[239:647].view(4, 34, 3)), good],
            ("storage[0].recurrent", "storage[0].conv", "share memory"),
        ),
        "pages of which one is shared": (
            [(pages[0:8:2], f64(4, 34, 3)), (pages[2:10:2], f64(4, 34, 3))],
            ("storage[0].recurrent", "storage[1].recurrent", "share memory"),
        ),
        "made in inference mode": (
            [good, (inference_tensor(4, 2, 5, 6), f64(4, 34, 3))],
            ("storage[1].recurrent", "inference mode"),
        ),
    }


BAD_STORAGE = bad_storage()


@pytest.mark.parametrize("name", BAD_STORAGE)
def test_construction_refuses_storage(name: str) -> None:
    config, (storage, words) = make_config(), BAD_STORAGE[name]
    refused(lambda: StateManager(config, make_params(config), storage=storage), SpecStateError, words)


def test_construction_refuses_conv_storage_without_a_conv() -> None:
    config = make_config(conv_kernel_size=None)
    storage = [(f64(4, 2, 5, 6), None), (f64(4, 2, 5, 6), f64(4, 34, 3))]
    words = ("storage[1].conv", "None", "conv_kernel_size")
    refused(lambda: StateManager(config, make_params(config), storage=storage), SpecStateError, words)


def test_without_a_conv_its_tensors_are_refused() -> None:
    config = make_config(conv_kernel_size=None)
    manager = make_manager(config)
    handle = manager.admit("a")
    before = fingerprint(manager)
    states = [(f64(2, 5, 6), None), (f64(2, 5, 6), f64(34, 3))]
    refused(lambda: manager.load(handle, states, 3), SpecStateError, ("states[1].conv", "None", "conv_kernel_size"))
    assert fingerprint(manager) == before
    step = manager.begin_step(StepMetadata(handles=(handle,), query_lens=(2,)))
    before = fingerprint(manager, step)
    words = ("conv_input", "None", "conv_kernel_size", "step 0")
    records = (f64(2, 2, 5), f64(2, 2, 6), f64(2, 2, 6))
    refused(lambda: step.write_records(0, *records, f64(2, 34)), SpecStateError, words)
    assert fingerprint(manager, step) == before
    step.write_records(0, *records)


# -- backend "metadata"


def metadata_world() -> tuple[StateManager, Handle, Step]:
    manager = StateManager(make_config(), None, backend="metadata", debug=True)
    handle = manager.admit("a")
    return manager, handle, manager.begin_step(StepMetadata(handles=(handle,), query_lens=(3,)))


METADATA_CASES: dict[str, tuple[Callable[[StateManager, Handle, Step], Any], tuple[str, ...]]] = {
    "read": (lambda m, h, s: m.read(h, 0), ("read", "metadata")),
    "checkpoints": (lambda m, h, s: m.checkpoints(0), ("checkpoints", "metadata")),
    "set_params": (lambda m, h, s: m.set_params([]), ("set_params", "metadata")),
    "write_records": (lambda m, h, s: s.write_records(0, None, None, None), ("write_records", "metadata", "step 0")),
    "verify with qkv": (lambda m, h, s: s.verify(0, f64(3, 34)), ("qkv", "None", "metadata", "step 0")),
    "verify with out": (lambda m, h, s: s.verify(0, out=f64(3, 2, 5)), ("out", "None", "metadata", "step 0")),
    "verify of layer 2": (lambda m, h, s: s.verify(2), ("layer = 2", "0..1", "step 0")),
    "commit before verify": (lambda m, h, s: s.commit([1]), ("commit", "[0, 1] of 2", "step 0")),
    "replayed of another word": (lambda m, h, s: s.replayed("defer"), ("'defer'", "'verify'", "step 0")),
}


@pytest.mark.parametrize("name", METADATA_CASES)
def test_backend_metadata_refuses(name: str) -> None:
    manager, handle, step = metadata_world()
    call, words = METADATA_CASES[name]
    before = fingerprint(manager, step)
    with pytest.raises(SpecStateError) as caught:
        call(manager, handle, step)
    assert [word for word in words if word not in str(caught.value)] == []
    assert fingerprint(manager, step) == before
    step.replayed("verify")
    step.defer([2])
    assert manager.committed_len(handle) == 2


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        pytest.param({"num_accepted": None}, ("num_accepted", "sequence of int"), id="counts None"),
        pytest.param({"num_accepted": 2}, ("num_accepted", "sequence of int"), id="counts a number"),
        pytest.param({"num_accepted": "2"}, ("num_accepted", "sequence of int"), id="counts a string"),
        pytest.param({"num_accepted": [2.0]}, ("num_accepted", "sequence of int"), id="counts of floats"),
        pytest.param({"num_accepted": [True]}, ("num_accepted", "sequence of int"), id="counts of bools"),
        pytest.param({"num_accepted": [None]}, ("num_accepted", "sequence of int"), id="counts of None"),
        pytest.param({"num_accepted": np.array([2.0])}, ("num_accepted", "sequence of int"), id="counts a float array"),
        pytest.param(
            {"num_accepted": np.array([[2]])}, ("num_accepted", "sequence of int"), id="counts a column array"
        ),
        pytest.param({"num_accepted": np.array(2)}, ("num_accepted", "sequence of int"), id="counts a scalar array"),
        pytest.param({"num_accepted": b"\2"}, ("num_accepted", "sequence of int"), id="counts of bytes"),
        pytest.param({"num_accepted": {2}}, ("num_accepted", "sequence of int"), id="counts a set"),
        pytest.param({"num_accepted": []}, ("num_accepted", "0 entries", "entry 0"), id="counts empty"),
        pytest.param({"num_accepted": torch.tensor([2.0])}, ("num_accepted", "float32"), id="counts a float tensor"),
        pytest.param({"num_accepted": torch.tensor([[2]])}, ("num_accepted", "[1, 1]"), id="counts a column"),
        pytest.param({"num_accepted": torch.tensor(2)}, ("num_accepted", "[]"), id="counts a scalar tensor"),
        pytest.param({"num_accepted": meta((1,), torch.int32)}, ("num_accepted", "CPU", "meta"), id="counts elsewhere"),
        pytest.param({"num_accepted": [0]}, ("num_accepted = 0", "1..query_lens[0] = 3"), id="count zero"),
        pytest.param({"num_accepted": [4]}, ("num_accepted = 4", "1..query_lens[0] = 3"), id="count above query_len"),
        pytest.param({"num_accepted": [2], "eager": [1]}, ("eager", "sequence of bool"), id="eager of integers"),
        pytest.param({"num_accepted": [2], "eager": True}, ("eager", "sequence of bool"), id="eager a bool"),
        pytest.param({"num_accepted": [2], "eager": []}, ("eager", "0 entries"), id="eager empty"),
        pytest.param(
            {"num_accepted": [2], "finished": [0]}, ("finished", "sequence of bool"), id="finished of integers"
        ),
    ],
)
def test_backend_metadata_refuses_ends(arguments: dict[str, Any], words: tuple[str, ...]) -> None:
    manager, handle, step = metadata_world()
    step.replayed("verify")
    before = fingerprint(manager, step)
    refused(lambda: step.defer(**arguments), SpecStateError, ("step 0", *words))
    assert fingerprint(manager, step) == before
    step.defer([2])
    assert manager.committed_len(handle) == 2


@pytest.mark.parametrize(
    ("num_accepted", "mask"),
    [
        pytest.param(range(2, 4), (True, False), id="range and tuple"),
        pytest.param(array.array("i", [2, 3]), [True, False], id="array and list"),
        pytest.param(np.array([2, 3], dtype=np.int16), np.array([True, False]), id="numpy"),
        pytest.param(torch.tensor([2, 3]), torch.tensor([True, False]), id="tensors"),
    ],
)
def test_backend_metadata_takes_any_sequence(num_accepted: Any, mask: Any) -> None:
    manager = StateManager(make_config(), None, backend="metadata", debug=True)
    handles = tuple(manager.admit(name) for name in "ab")
    step = manager.begin_step(StepMetadata(handles=handles, query_lens=(3, 3)))
    step.replayed("verify")
    step.defer(num_accepted, eager=mask, finished=mask)
    held = [manager._backend.cursor(handle.record_slot) for handle in handles]
    assert [(cursor.committed_len, cursor.pending_len, cursor.finished) for cursor in held] == [
        (2, 0, True),
        (3, 3, False),
    ]


def test_backend_metadata_refuses_the_rest_too() -> None:
    manager, handle, step = metadata_world()
    refused(lambda: step.sample(None, None), StepOrderError, ("sample", "step 0"))
    step.verify(0)
    refused(lambda: step.replayed("verify"), StepOrderError, ("replayed", "1 layers", "step 0"))
    step.verify(1)
    refused(lambda: step.sample(f64(3, 9), None), SpecStateError, ("sample", "metadata", "step 0"))
    step.commit([3])
    refused(lambda: step.replayed("verify"), StepOrderError, ("replayed", "ended by commit", "step 0"))
    refused(lambda: manager.load(handle, [], 3), SpecStateError, ("states", "None", "metadata"))
    refused(lambda: manager.admit("a"), SpecStateError, ("request_id", "'a'"))
    assert manager.committed_len(handle) == 3


class _NoHandle:
    def __init__(self) -> None:
        self.request_id = ["unhashable"]


@pytest.mark.parametrize("foreign", ["a", 0, _NoHandle()], ids=["an id", "a slot", "another class"])
def test_begin_step_refuses_a_handle_of_another_type(foreign: Any) -> None:
    """Metadata that was never validated may hold anything."""
    manager = make_manager()
    handle = manager.admit("a")
    before = fingerprint(manager)
    metadata = StepMetadata.model_construct(handles=(handle, foreign), query_lens=(1, 1))
    with pytest.raises(SpecStateError, match=r"handles\[1\] must be a Handle from admit, not .* \(step 0\)"):
        manager.begin_step(metadata)
    assert fingerprint(manager) == before


def test_a_handle_may_be_a_copy() -> None:
    manager = make_manager()
    handle = manager.admit("a")
    copy = Handle(handle.request_id, handle.record_slot, handle.generation)
    step = manager.begin_step(StepMetadata(handles=(copy,), query_lens=(1,)))
    assert step.record_slots.tolist() == [handle.record_slot]


def test_positions_are_bounded_by_each_row_s_own_window() -> None:
    """The longest window of a step says nothing about the row that stands furthest."""
    manager = make_manager()
    a, b = manager.admit("a"), manager.admit("b")
    request = next(iter(manager._requests))
    request.most_committed = MAX_POSITION - 1
    step = manager.begin_step(StepMetadata(handles=(a, b), query_lens=(1, 4)))
    step.cancel()
    with pytest.raises(SpecStateError, match=r"handles\[0\]: request 'a' may stand at .* query_lens\[0\] = 2"):
        manager.begin_step(StepMetadata(handles=(a, b), query_lens=(2, 1)))
