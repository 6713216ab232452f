"""Ranks compare their steps before they end them, and heads that are split over ranks stand where whole ones stand.

Three processes with gloo go through everything once; each test looks at what they wrote down. Rank 1 is the one that
differs, rank 2 does as rank 0.
"""

import os
import re
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from specstate import (
    LayerParams,
    RankAgreement,
    RankDisagreementError,
    SamplingParams,
    SpecStateError,
    StateConfig,
    StateManager,
    StepMetadata,
    StepOrderError,
)
from specstate.metadata import Handle
from specstate.step import Step
from tests.factories import POLICIES, LayerInputs, make_config, make_inputs, make_params, relative_error, verify_all
from tests.test_wrong_arguments import VALUES, World

RANKS = 3
TIMEOUT_S = 60
BACKENDS = ("reference", "metadata")
VOCAB = 11
TOLERANCE = 1e-12
"""Of float64: torch may add up tensors of fewer heads in another order."""


# -- one step of each rank, alike or not


@dataclass(frozen=True)
class Window:
    """A step of a rank over requests "a", "b" and "c", and what it is about to end with."""

    rows: str = "abc"
    """Requests in row order; "-" is a dummy."""
    lens: tuple[int, ...] = (3, 2, 4)
    counts: tuple[int, ...] = (2, 1, 4)
    finished: tuple[bool, ...] | None = None
    prompt: str = ""
    """The request whose row feeds a prompt."""
    least: tuple[int, ...] | None = None
    entries: tuple[int, ...] | None = None
    pad_to: tuple[int, int] | None = None
    before: str = ""
    """What this rank does before the step: "skip" a step, or release some requests in this order and admit them again
    in that of their names."""
    released: str = ""
    """Requests that are released while the step is open."""
    early: bool = False
    """The last layer has not verified."""

    def metadata(self, handles: dict[str, Handle]) -> StepMetadata:
        kinds = tuple("dummy" if r == "-" else "prompt" if r == self.prompt else "decode" for r in self.rows)
        return StepMetadata(
            handles=tuple(handles.get(row) for row in self.rows),
            query_lens=self.lens,
            row_kinds=kinds,  # type: ignore[arg-type]
            min_accepted=self.least,
            batch_index=self.entries,
        )


PLAIN = Window()
TEN = Window("abc" + "-" * 10, (3, 2, 4) + (1,) * 10)


@dataclass(frozen=True)
class Case:
    """Rank 1 ends ``other`` while the others end ``usual``. ``words``: what follows "ranks disagree: "; None: nothing.

    ``refused``: what rank 1 itself raises, should its own arguments be refused.
    """

    other: Window
    words: str | None
    usual: Window = PLAIN
    refused: str | None = None


CASES = {
    "alike": Case(PLAIN, None),
    "count": Case(
        replace(PLAIN, counts=(2, 2, 4)), "row 1 (request 'b'): num_accepted = 1 on ranks [0, 2], 2 on rank 1 (step 1)"
    ),
    "counts beyond the window": Case(
        # The device would take both for 2.
        replace(PLAIN, counts=(2, 9, 4)),
        "row 1 (request 'b'): num_accepted = 8 on ranks [0, 2], 9 on rank 1 (step 1)",
        replace(PLAIN, counts=(2, 8, 4)),
    ),
    "two counts": Case(
        replace(PLAIN, counts=(1, 1, 3)),
        "row 0 (request 'a'): num_accepted = 2 on ranks [0, 2], 1 on rank 1; "
        "row 2 (request 'c'): num_accepted = 4 on ranks [0, 2], 3 on rank 1 (step 1)",
    ),
    "finished": Case(
        replace(PLAIN, finished=(False, False, True)),
        "row 2 (request 'c'): finished = False on ranks [0, 2], True on rank 1 (step 1)",
    ),
    "nothing finished": Case(replace(PLAIN, finished=(False,) * 3), None),
    "order": Case(
        Window("bac", (2, 3, 4), (1, 2, 4)),
        "row 0: request 'a' on ranks [0, 2], request 'b' on rank 1; "
        "row 1: request 'b' on ranks [0, 2], request 'a' on rank 1 (step 1)",
    ),
    "order of the counts": Case(replace(PLAIN, counts=(4, 2, 1), entries=(1, 2, 0)), None),
    "counts in an old order": Case(
        replace(PLAIN, counts=(2, 1, 4), entries=(1, 0, 2)),
        "row 0 (request 'a'): num_accepted = 2 on ranks [0, 2], 1 on rank 1; "
        "row 1 (request 'b'): num_accepted = 1 on ranks [0, 2], 2 on rank 1 (step 1)",
    ),
    "request": Case(
        Window("ac", (3, 2), (2, 1)),
        "row 1: request 'b' on ranks [0, 2], request 'c' on rank 1 (step 1)",
        Window("ab", (3, 2), (2, 1)),
    ),
    "generation": Case(
        replace(PLAIN, before="b"), "row 1 (request 'b'): generation = 2 on ranks [0, 2], 4 on rank 1 (step 1)"
    ),
    "record slots": Case(
        replace(PLAIN, before="bc"),
        "row 1 (request 'b'): generation = 2 on ranks [0, 2], 4 on rank 1, and record_slot = 1 on ranks [0, 2], 2 on "
        "rank 1; "
        "row 2 (request 'c'): generation = 3 on ranks [0, 2], 5 on rank 1, and record_slot = 2 on ranks [0, 2], 1 on "
        "rank 1 (step 1)",
    ),
    "step": Case(replace(PLAIN, before="skip"), "step = 1 on ranks [0, 2], 2 on rank 1"),
    "query_len": Case(
        replace(PLAIN, lens=(4, 2, 4)), "row 0 (request 'a'): query_len = 3 on ranks [0, 2], 4 on rank 1 (step 1)"
    ),
    "kind": Case(
        replace(PLAIN, prompt="c"),
        "row 2 (request 'c'): kind = 'decode' on ranks [0, 2], 'prompt' on rank 1, and min_accepted = 1 on ranks "
        "[0, 2], 4 on rank 1 (step 1)",
    ),
    "min_accepted": Case(
        replace(PLAIN, least=(2, 1, 1)),
        "row 0 (request 'a'): min_accepted = 1 on ranks [0, 2], 2 on rank 1 (step 1)",
    ),
    "one row more": Case(
        PLAIN,
        "rows = 2 on ranks [0, 2], 3 on rank 1; row 2: nothing on ranks [0, 2], request 'c' on rank 1 (step 1)",
        Window("ab", (3, 2), (2, 1)),
    ),
    "no rows": Case(
        Window("", (), ()),
        "rows = 1 on ranks [0, 2], 0 on rank 1; row 0: request 'a' on ranks [0, 2], nothing on rank 1 (step 1)",
        Window("a", (3,), (2,)),
    ),
    "padding": Case(replace(PLAIN, pad_to=(7, 20), counts=(2, 1, 4, 1, -1, 9, 0)), None),
    "counts of dummies": Case(Window("a-c", (3, 2, 4), (2, 9, 4)), None, Window("a-c", (3, 2, 4), (2, -1, 4))),
    "a dummy": Case(
        Window("a-c", (3, 2, 4), (2, 1, 4)), "row 1: request 'b' on ranks [0, 2], a dummy on rank 1 (step 1)"
    ),
    "query_len of a dummy": Case(
        Window("a-c", (3, 1, 4), (2, 1, 4)),
        "row 1 (a dummy): query_len = 2 on ranks [0, 2], 1 on rank 1 (step 1)",
        Window("a-c", (3, 2, 4), (2, 1, 4)),
    ),
    "many rows": Case(
        replace(TEN, lens=(3, 2, 4) + (2,) * 10),
        "; ".join(f"row {row} (a dummy): query_len = 1 on ranks [0, 2], 2 on rank 1" for row in range(3, 11))
        + "; 2 more rows (step 1)",
        TEN,
    ),
    "released": Case(
        replace(PLAIN, released="b"),
        "row 1 (request 'b'): released = False on ranks [0, 2], True on rank 1, and num_accepted = 1 on ranks [0, 2], "
        "None on rank 1, and finished = False on ranks [0, 2], None on rank 1 (step 1)",
    ),
    "counts of the released": Case(replace(PLAIN, released="b", counts=(2, 2, 4)), None, replace(PLAIN, released="b")),
    "one count": Case(
        replace(PLAIN, counts=(2,)),
        "rank 1 was refused: num_accepted has 1 entries, batch_index reads entry 2 (step 1)",
        refused="num_accepted has 1 entries, batch_index reads entry 2 (step 1)",
    ),
    "too early": Case(
        replace(PLAIN, early=True),
        "rank 1 was refused: check: layers [1] of 2 have not verified (step 1)",
        refused="check: layers [1] of 2 have not verified (step 1)",
    ),
}


@dataclass
class Rank:
    """The manager of one rank, with requests "a", "b" and "c" of a few tokens."""

    manager: StateManager
    handles: dict[str, Handle] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.handles = {name: self.manager.admit(name) for name in "abc"}
        self.open(PLAIN).defer(self.column(PLAIN.counts))

    def column(self, values: tuple[Any, ...]) -> torch.Tensor:
        dtype = torch.bool if values and type(values[0]) is bool else torch.int32
        return torch.tensor(values, dtype=dtype, device=self.manager.device)

    def do(self, before: str) -> None:
        if before == "skip":
            self.manager.begin_step(StepMetadata(handles=(), query_lens=())).cancel()
            return
        for name in before:
            self.manager.release(self.handles[name])
        for name in sorted(before):
            self.handles[name] = self.manager.admit(name)

    def open(self, window: Window) -> Step:
        step = self.manager.begin_step(window.metadata(self.handles), pad_to=window.pad_to)
        layers = range(self.manager.config.num_layers - window.early)
        inputs = make_inputs(self.manager.config, step.num_tokens, seed=step.index, device=self.manager.device)
        for layer in layers:
            if self.manager._backend.path == "metadata":
                step.verify(layer)
            else:
                step.verify(layer, inputs[layer].qkv, inputs[layer].raw_gate, inputs[layer].raw_beta)
        for name in window.released:
            self.manager.release(self.handles.pop(name))
        return step


def make_rank(backend: str, device: str) -> Rank:
    config = make_config(
        num_heads=1, head_k_dim=2, head_v_dim=2, checkpoint_dtype="float32", activation_dtype="float32"
    )
    params = None if backend == "metadata" else make_params(config, device=device)
    return Rank(StateManager(config, params, device=device, backend=backend))  # type: ignore[arg-type]


def said(check: Callable[[], None]) -> tuple[str, str] | None:
    """What a check raised: class and words."""
    try:
        check()
    except SpecStateError as error:
        return type(error).__name__, str(error)
    return None


def play(case: Case, rank: int, backend: str, device: str, agreement: RankAgreement) -> dict[str, Any]:
    """A step of every rank; if they differ it is cancelled, what made them differ is mended, and it runs again."""
    mine, others = (case.other, case.usual) if rank == 1 else (case.usual, case.other)
    side = make_rank(backend, device)
    side.do(mine.before)
    step = side.open(mine)
    before = side.manager.digest()
    finished = None if mine.finished is None else side.column(mine.finished)
    counts = side.column(mine.counts)
    outcome: dict[str, Any] = {"said": said(lambda: agreement.check(step, counts, finished))}
    outcome["unchanged"] = step.is_open and side.manager.digest() == before
    if outcome["said"] is not None:
        step.cancel()
        side.do(others.before)
        for name in {*others.released} - {*mine.released}:
            side.manager.release(side.handles.pop(name))
        again = Window("ac", (3, 4), (2, 4))
        step, counts, finished = side.open(again), side.column(again.counts), None
        outcome["said again"] = said(lambda: agreement.check(step, counts))
    step.defer(counts, finished=finished)
    side.manager.check_integrity()
    return {**outcome, "digest": side.manager.digest()}


# -- samples


def play_samples(rank: int, device: str, agreement: RankAgreement) -> dict[str, Any]:
    """Ranks that hand in what they sampled: alike, with other tokens, with an end token, and with counts broadcast."""
    side, outcome = make_rank("reference", device), {}
    side.manager.release(side.handles["b"])
    side.handles["b"] = side.manager.admit("b", SamplingParams(end_token_ids=(7,)))
    window = Window("ab", (2, 1), (2, 1))
    drafts = torch.tensor([1, 5, 2], device=device)

    def sampled(step: Step, bonus: int, last: int) -> Any:
        """Row 0 accepts its draft and goes on with ``bonus``, row 1 with ``last``."""
        tokens = torch.tensor([5, bonus, last], device=device)
        return step.sample(torch.nn.functional.one_hot(tokens, VOCAB).float(), drafts)

    step = side.open(window)
    result = sampled(step, 3, 4)
    outcome["alike"] = said(lambda: agreement.check(step, result))
    step.defer(result)
    step = side.open(window)
    result = sampled(step, 6 if rank == 1 else 3, 7)
    outcome["tokens"] = said(lambda: agreement.check(step, result))
    outcome["tokens not handed in"] = said(lambda: agreement.check(step, result.num_accepted))
    # One rank has sampled, the others got its counts: the sample's finished rows go with its very tensor.
    given = result.num_accepted if rank == 0 else result.num_accepted.clone()
    outcome["finished with the sample alone"] = said(lambda: agreement.check(step, given))
    finished = side.column((False, True))
    outcome["finished told to all"] = said(lambda: agreement.check(step, given, finished))
    outcome["a sample and counts"] = said(lambda: agreement.check(step, result if rank == 0 else given, finished))
    step.cancel()
    return outcome


# -- heads


def make_whole(policy: str) -> StateConfig:
    return make_config(num_heads=4, fold_policy=policy)


def by_head(channels: torch.Tensor, config: StateConfig) -> list[torch.Tensor]:
    """[C, ...] -> q, k and v by head, [H, K, ...] or [H, V, ...]."""
    spec, (key, value) = config.layer, (config.layer.head_k_dim, config.layer.head_v_dim)
    parts = channels.split([spec.num_heads * key, spec.num_heads * key, spec.num_heads * value])
    return [part.unflatten(0, (spec.num_heads, -1)) for part in parts]


def joined(parts: list[torch.Tensor]) -> torch.Tensor:
    """The inverse of by_head."""
    return torch.cat([part.flatten(0, 1) for part in parts])


def shard(channels: torch.Tensor, config: StateConfig, heads: slice) -> torch.Tensor:
    """The channels of some heads."""
    return joined([part[heads] for part in by_head(channels, config)])


def unshard(channels: list[torch.Tensor], config: StateConfig) -> torch.Tensor:
    """The channels of all heads, from those of each rank, whose config this is."""
    return joined([torch.cat(parts) for parts in zip(*(by_head(c, config) for c in channels), strict=True)])


def shard_params(params: LayerParams, config: StateConfig, heads: slice) -> LayerParams:
    assert params.conv_weight is not None and params.conv_bias is not None
    conv = [shard(tensor, config, heads) for tensor in (params.conv_weight, params.conv_bias)]
    return LayerParams(params.A_log[heads], params.dt_bias[heads], *conv)


def shard_inputs(inputs: LayerInputs, config: StateConfig, heads: slice) -> LayerInputs:
    qkv = shard(inputs.qkv.T, config, heads).T
    return LayerInputs(qkv, inputs.raw_gate[:, heads], inputs.raw_beta[:, heads])


def decode(
    policy: str, heads: slice, check: Callable[[Step, torch.Tensor], None] = lambda step, counts: None
) -> dict[str, Any]:
    """Ten steps of random windows and acceptance with ``heads`` of four: outputs of all steps, and states at the end.

    A request leaves in the middle and another takes its slots. ``check`` is called before a step ends.
    """
    whole, draw = make_whole(policy), torch.Generator().manual_seed(5)
    config = make_config(num_heads=len(range(4)[heads]), fold_policy=policy)
    params = [shard_params(layer, whole, heads) for layer in make_params(whole)]
    manager = StateManager(config, params, debug=True)
    handles = {name: manager.admit(name) for name in "abc"}
    outputs, most_pending = [], 0
    for index in range(10):
        if index == 6:
            manager.release(handles.pop("b"))
            handles["d"] = manager.admit("d")
        lens = torch.randint(1, config.max_query_len + 1, (3,), generator=draw)
        counts = (torch.rand(3, generator=draw) * lens).long() + 1
        step = manager.begin_step(StepMetadata(handles=tuple(handles.values()), query_lens=tuple(lens.tolist())))
        inputs = make_inputs(whole, step.num_tokens, seed=index)
        outputs.append(verify_all(step, [shard_inputs(layer, whole, heads) for layer in inputs]))
        check(step, counts)
        step.defer(counts)
        most_pending = max([most_pending, *(manager._backend.cursor(slot).pending_len for slot in range(3))])
    states = {name: [tuple(manager.read(h, layer)) for layer in range(2)] for name, h in handles.items()}
    return {"outputs": outputs, "states": states, "digest": manager.digest(), "most_pending": most_pending}


# -- the processes


def run_rank(rank: int, folder: str, transport: str) -> None:
    """One process: everything, in an order that all share."""
    torch.set_num_threads(1)
    if sys.platform == "linux":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # the host's name may lead nowhere
    device, size = "cpu", RANKS
    if transport == "nccl":
        device, size = f"cuda:{rank}", 2
        torch.cuda.set_device(rank)
    limit = timedelta(seconds=TIMEOUT_S)
    dist.init_process_group(transport, f"file://{folder}/store", timeout=limit, world_size=size, rank=rank)
    agreement = RankAgreement()
    told: dict[str, Any] = {"samples": play_samples(rank, device, agreement)}
    for backend in BACKENDS if transport == "gloo" else ("reference",):
        for name, case in CASES.items():
            told[f"{backend} {name}"] = play(case, rank, backend, device, agreement)
    if transport == "gloo":
        told |= run_group(rank)
    torch.save(told, f"{folder}/rank{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()


def run_group(rank: int) -> dict[str, Any]:
    """Ranks 1 and 2 share four heads; rank 0 has no part in it."""
    group = dist.new_group([1, 2])
    if rank == 0:
        return {"outside": said(lambda: RankAgreement(group) and None)}
    agreement, told = RankAgreement(group), {}
    heads = slice(0, 2) if rank == 1 else slice(2, 4)
    for policy in POLICIES:
        told[policy] = decode(policy, heads, agreement.check)
    side = make_rank("metadata", "cpu")
    step = side.open(PLAIN)
    counts = list(PLAIN.counts if rank == 1 else (3, 1, 4))
    told["inside"] = said(lambda: agreement.check(step, counts))
    dist.destroy_process_group(group)
    told["after"] = said(lambda: agreement.check(step, counts))
    return told


def spawn(folder: Path, transport: str, num_ranks: int) -> list[dict[str, Any]]:
    """What each rank wrote down. Raises what a rank raised; no process outlives it."""
    context = mp.spawn(run_rank, (str(folder), transport), nprocs=num_ranks, join=False)
    assert context is not None
    deadline = time.monotonic() + 2 * TIMEOUT_S
    try:
        while not context.join(timeout=1.0):
            assert time.monotonic() < deadline, "the ranks hang"
    finally:
        for process in context.processes:
            process.kill()
    return [torch.load(folder / f"rank{rank}.pt", weights_only=False) for rank in range(num_ranks)]


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return spawn(tmp_path_factory.mktemp("ranks"), "gloo", RANKS)


def check_case(case: Case, outcomes: list[dict[str, Any]]) -> None:
    assert all(outcome["unchanged"] for outcome in outcomes)
    error = "RankDisagreementError", f"ranks disagree: {case.words}"
    if case.words is None:
        assert [outcome["said"] for outcome in outcomes] == [None] * len(outcomes)
    elif case.refused is None:
        assert [outcome["said"] for outcome in outcomes] == [error] * len(outcomes)
    else:
        own = outcomes[1]["said"]
        assert own[0] in ("SpecStateError", "StepOrderError") and own[1] == case.refused
        assert all(outcome["said"] == error for outcome in outcomes if outcome is not outcomes[1])
    assert all(outcome.get("said again") is None for outcome in outcomes)
    assert len({outcome["digest"] for outcome in outcomes}) == 1


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", CASES)
def test_ranks_agree_or_all_raise(told: list[dict[str, Any]], backend: str, name: str) -> None:
    check_case(CASES[name], [rank[f"{backend} {name}"] for rank in told])


def test_samples_agree_in_tokens_too(told: list[dict[str, Any]]) -> None:
    def everywhere(what: str) -> Any:
        words = [rank["samples"][what] for rank in told]
        assert words[0] == words[1] == words[2], what
        return words[0] and words[0][1]

    assert everywhere("alike") is None
    assert everywhere("tokens") == (
        "ranks disagree: row 0 (request 'a'): tokens = [5, 3, -1, -1] on ranks [0, 2], [5, 6, -1, -1] on rank 1 "
        "(step 2)"
    )
    assert everywhere("tokens not handed in") is None
    assert everywhere("finished with the sample alone") == (
        "ranks disagree: row 1 (request 'b'): finished = True on rank 0, False on ranks [1, 2] (step 2)"
    )
    assert everywhere("finished told to all") is None
    assert "tokens = [7, -1, -1, -1] on rank 0, None on ranks [1, 2]" in everywhere("a sample and counts")


def test_a_group_names_global_ranks(told: list[dict[str, Any]]) -> None:
    words = "ranks disagree: row 0 (request 'a'): num_accepted = 2 on rank 1, 3 on rank 2 (step 1)"
    assert [rank["inside"] for rank in told[1:]] == [("RankDisagreementError", words)] * 2


def test_a_group_without_this_process_is_refused(told: list[dict[str, Any]]) -> None:
    refusal = "must be None or a ProcessGroup that this process is in"
    for name, words in [told[0]["outside"], told[1]["after"], told[2]["after"]]:
        assert name == "SpecStateError" and words.startswith("group = ") and words.endswith(refusal)


@pytest.mark.parametrize("policy", POLICIES)
def test_split_heads_join_to_the_whole(told: list[dict[str, Any]], policy: str) -> None:
    whole, parts = decode(policy, slice(0, 4)), [rank[policy] for rank in told[1:]]
    config = make_config(num_heads=2)
    assert whole["digest"] == parts[0]["digest"] == parts[1]["digest"]
    assert (whole["most_pending"] > 0) == (policy != "eager")
    for step, outputs in enumerate(whole["outputs"]):
        for layer, output in enumerate(outputs):
            heads = torch.cat([part["outputs"][step][layer] for part in parts], dim=1)
            assert relative_error(heads, output) < TOLERANCE
    for name, states in whole["states"].items():
        for layer, (recurrent, conv) in enumerate(states):
            held = [part["states"][name][layer] for part in parts]
            assert relative_error(torch.cat([shard for shard, _ in held]), recurrent) < TOLERANCE
            assert torch.equal(conv, unshard([shard for _, shard in held], config))


# -- a single process


@pytest.fixture
def alone() -> Iterator[RankAgreement]:
    """A group of one."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield RankAgreement()
    dist.destroy_process_group()


def test_nothing_works_before_torch_distributed(alone: RankAgreement) -> None:
    side = make_rank("metadata", "cpu")
    step = side.open(PLAIN)
    agreement = RankAgreement()
    agreement.check(step, PLAIN.counts)
    dist.destroy_process_group()
    for call in (RankAgreement, lambda: agreement.check(step, PLAIN.counts)):
        with pytest.raises(SpecStateError, match="is not initialised; call "):
            call()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    agreement.check(step, PLAIN.counts)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("argument", ["step", "num_accepted", "finished"])
def test_wrong_arguments_are_refused_as_defer_refuses_them(alone: RankAgreement, backend: str, argument: str) -> None:
    for name, make in VALUES.items():
        world = World("verified", backend)
        given = {"step": world.step, "num_accepted": torch.tensor([1, 1]), "finished": None, argument: make(world)}
        before = world.held()
        ours = said(lambda given=given: alone.check(**given))
        assert world.held() == before, name
        if argument == "step":
            assert ours is not None or name == "step of another manager", name
            assert ours is None or "step must be a Step from begin_step" in ours[1], name
            continue
        wanted = said(lambda world=world, given=given: world.step.defer(given["num_accepted"], None, given["finished"]))
        assert (ours and ours[1].removeprefix("check: ")) == (wanted and wanted[1].removeprefix("defer: ")), name


def test_wrong_groups_are_refused(alone: RankAgreement) -> None:
    for name, make in VALUES.items():
        if name != "None":
            with pytest.raises(SpecStateError, match=r"^group = .* must be None or a ProcessGroup"):
                RankAgreement(make(World("idle", "metadata")))


def test_an_ended_step_is_refused(alone: RankAgreement) -> None:
    step = make_rank("metadata", "cpu").open(PLAIN)
    step.defer(PLAIN.counts)
    with pytest.raises(StepOrderError, match=re.escape("check: the step was ended by defer (step 1)")):
        alone.check(step, PLAIN.counts)


def test_what_torch_is_set_to_changes_nothing(alone: RankAgreement) -> None:
    step = make_rank("reference", "cpu").open(PLAIN)
    counts = torch.tensor(PLAIN.counts)
    with torch.device("meta"), torch.inference_mode():
        alone.check(step, counts)
    alone.check(step, counts)


def test_counts_beyond_int64_are_compared(alone: RankAgreement) -> None:
    alone.check(make_rank("metadata", "cpu").open(PLAIN), [10**5000, -(10**5000), 1])


def test_a_disagreement_is_a_value_error_of_its_own() -> None:
    assert issubclass(RankDisagreementError, SpecStateError)
    assert not issubclass(RankDisagreementError, StepOrderError)


# -- GPUs


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_ranks_agree_or_all_raise_over_nccl(tmp_path: Path) -> None:
    told = spawn(tmp_path, "nccl", 2)
    for name, case in CASES.items():
        words = case.words and case.words.replace("ranks [0, 2]", "rank 0")
        check_case(replace(case, words=words), [rank[f"reference {name}"] for rank in told])
