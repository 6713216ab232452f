"""Greedy acceptance against a slow model of it, and the forms in which its result is handed on."""

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from specstate import SamplingParams, SpecStateError, StateManager, StepMetadata, StepOrderError
from specstate.sampling import SampleResult
from specstate.step import Step
from tests.factories import make_config, make_inputs, make_manager, verify_all

VOCAB = 4
WINDOW = 4
TINY = {"num_layers": 1, "num_heads": 1, "head_k_dim": 1, "head_v_dim": 1, "conv_kernel_size": None}


@dataclass(frozen=True)
class Row:
    """One row: its window's ids, and the target's best token after each of them."""

    kind: str
    window: tuple[int, ...]
    best: tuple[int, ...]
    least: int
    ends: tuple[int, ...]


def model(row: Row, already_finished: bool) -> tuple[int, list[int], int, bool]:
    """num_accepted, the listed tokens, the next token and whether the request finishes, one token at a time."""
    if row.kind == "dummy":
        return 0, [], -1, False
    if already_finished and row.kind != "prompt":
        return 0, [], -1, True
    if row.kind == "prompt":  # its request goes on, whatever was sampled before
        token = row.best[-1]
        done = token in row.ends
        return len(row.window), [token], -1 if done else token, done
    accepted = 1
    while accepted < len(row.window) and row.window[accepted] == row.best[accepted - 1]:
        accepted += 1
    accepted = max(accepted, row.least)
    listed = [*row.window[1:accepted], row.best[accepted - 1]]
    for place, token in enumerate(listed):
        if token in row.ends:
            # The end token is the window's token place + 1, unless it is the sampled one.
            return max(min(place + 2, accepted), row.least), listed[: place + 1], -1, True
    return accepted, listed, listed[-1], False


@st.composite
def rows_of(draw: st.DrawFn, kinds: tuple[str, ...]) -> Row:
    kind = draw(st.sampled_from(kinds))
    length = draw(st.integers(1, WINDOW))
    token = st.integers(0, VOCAB - 1)
    best = draw(st.lists(token, min_size=length, max_size=length))
    # Often right drafts, so that long acceptances are common.
    window = [draw(token)]
    for place in range(1, length):
        window.append(draw(st.one_of(st.just(best[place - 1]), token)))
    least = length if kind == "prompt" else draw(st.integers(1, length))
    ends = draw(st.lists(token, max_size=2, unique=True))
    return Row(kind, tuple(window), tuple(best), least, tuple(ends))


def begin(manager: StateManager, handles: list[Any], rows: list[Row], padding: tuple[int, int]) -> Step:
    num_rows, num_tokens = len(rows) + padding[0], sum(len(row.window) for row in rows) + padding[1]
    metadata = StepMetadata(
        handles=tuple(handles),
        query_lens=tuple(len(row.window) for row in rows),
        row_kinds=tuple(row.kind for row in rows),
        min_accepted=tuple(row.least for row in rows),
    )
    step = manager.begin_step(metadata, pad_to=(num_rows, num_tokens))
    verify_all(step, make_inputs(manager.config, num_tokens, seed=0))
    return step


def sample(step: Step, rows: list[Row], logit_dtype: torch.dtype, id_dtype: torch.dtype) -> SampleResult:
    best = torch.tensor([token for row in rows for token in row.best], dtype=torch.int64)
    logits = torch.full((step.num_tokens, VOCAB), torch.nan, dtype=logit_dtype)
    logits[: len(best)] = torch.linspace(0, 0.5, VOCAB, dtype=logit_dtype)
    logits[torch.arange(len(best)), best] = 1.0
    drafts = torch.full((step.num_tokens,), -7, dtype=id_dtype)
    drafts[: len(best)] = torch.tensor([token for row in rows for token in row.window], dtype=id_dtype)
    return step.sample(logits, drafts)


def check(result: SampleResult, wanted: list[tuple[int, list[int], int, bool]], padded_rows: int) -> None:
    wanted = wanted + [(0, [], -1, False)] * padded_rows
    for name in ("num_accepted", "next_token"):
        assert getattr(result, name).dtype is torch.int32
        assert getattr(result, name).shape == (len(wanted),)
    assert result.tokens.dtype is torch.int32
    assert result.finished.dtype is torch.bool
    assert result.num_accepted.tolist() == [row[0] for row in wanted]
    assert result.tokens.tolist() == [row[1] + [-1] * (WINDOW - len(row[1])) for row in wanted]
    assert result.next_token.tolist() == [row[2] for row in wanted]
    assert result.finished.tolist() == [row[3] for row in wanted]


@settings(max_examples=200)
@given(
    rows=st.lists(rows_of(("decode", "decode", "decode", "prompt", "dummy")), min_size=1, max_size=3),
    again=st.lists(rows_of(("decode", "prompt")), min_size=3, max_size=3),
    padding=st.sampled_from([(0, 0), (1, 0), (0, 2), (2, 3)]),
    logit_dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16, torch.float64]),
    id_dtype=st.sampled_from([torch.int32, torch.int64]),
    policy=st.sampled_from(["eager", "deferred", "ring"]),
)
def test_greedy_equals_the_model(
    rows: list[Row],
    again: list[Row],
    padding: tuple[int, int],
    logit_dtype: torch.dtype,
    id_dtype: torch.dtype,
    policy: str,
) -> None:
    manager = make_manager(make_config(**TINY, max_query_len=WINDOW, fold_policy=policy))
    handles = [
        None if row.kind == "dummy" else manager.admit(str(i), SamplingParams(end_token_ids=row.ends))
        for i, row in enumerate(rows)
    ]
    step = begin(manager, handles, rows, padding)
    result = sample(step, rows, logit_dtype, id_dtype)
    wanted = [model(row, False) for row in rows]
    check(result, wanted, padding[0])
    step.defer(result)

    # The next windows of the same requests: those that have finished count for nothing.
    live = [i for i, handle in enumerate(handles) if handle is not None]
    following = [Row(**{**vars(again[i]), "ends": rows[i].ends}) for i in live]
    if not live:
        return
    step = begin(manager, [handles[i] for i in live], following, (0, 0))
    result = sample(step, following, logit_dtype, id_dtype)
    second = [model(row, wanted[i][3]) for i, row in zip(live, following, strict=True)]
    check(result, second, 0)
    step.commit(result)
    for i, row in zip(live, second, strict=True):
        handle = handles[i]
        assert handle is not None
        assert manager.committed_len(handle) == wanted[i][0] + row[0]
    wasted = [wanted[i][3] and row.kind != "prompt" for i, row in zip(live, following, strict=True)]
    assert manager.counters().wasted_windows == sum(wasted)
    assert manager.counters().clamps == 0


# -- the result


def one_step(**sampling: Any) -> tuple[StateManager, Any, Step]:
    manager = make_manager(make_config(**TINY, max_query_len=WINDOW))
    handle = manager.admit("a", SamplingParams(**sampling))
    step = manager.begin_step(StepMetadata(handles=(handle,), query_lens=(3,)))
    return manager, handle, step


def logits_of(*best: int) -> torch.Tensor:
    return torch.nn.functional.one_hot(torch.tensor(best), VOCAB).float()


def test_result_on_the_host_equals_the_result() -> None:
    _, _, step = one_step(end_token_ids=(2,))
    verify_all(step, make_inputs(step._host.config, 3, seed=0))
    result = step.sample(logits_of(1, 2, 3), torch.tensor([0, 1, 2]))
    copy = result.to_host_async()
    assert copy.ready()
    host = copy.wait()
    assert host.num_accepted.tolist() == [3]
    assert host.tokens.tolist() == [[1, 2, -1, -1]]
    assert host.next_token.tolist() == [-1]
    assert host.finished.tolist() == [True]
    for name in ("num_accepted", "tokens", "next_token", "finished"):
        assert torch.equal(getattr(host, name), getattr(result, name))
        assert getattr(host, name).device.type == "cpu"


def test_result_counts_may_be_handed_in_as_a_tensor() -> None:
    manager, handle, step = one_step(end_token_ids=(2,))
    verify_all(step, make_inputs(manager.config, 3, seed=0))
    result = step.sample(logits_of(1, 2, 3), torch.tensor([0, 1, 0]))
    assert result.num_accepted.tolist() == [2]
    step.defer(result.num_accepted)
    assert manager.committed_len(handle) == 2
    # That the request has finished is known from the sample all the same.
    step = manager.begin_step(StepMetadata(handles=(handle,), query_lens=(1,)))
    verify_all(step, make_inputs(manager.config, 1, seed=0))
    step.defer(torch.tensor([1]))
    assert manager.committed_len(handle) == 2
    assert manager.counters().wasted_windows == 1


def test_result_in_row_order_needs_no_batch_index() -> None:
    manager = make_manager(make_config(**TINY, max_query_len=WINDOW))
    handles = tuple(manager.admit(name) for name in "ab")
    step = manager.begin_step(StepMetadata(handles=handles, query_lens=(3, 2), batch_index=(9, 4)))
    verify_all(step, make_inputs(manager.config, 5, seed=0))
    result = step.sample(logits_of(1, 2, 3, 0, 0), torch.tensor([0, 1, 2, 3, 1]))
    assert result.num_accepted.tolist() == [3, 1]
    step.defer(result)
    assert [manager.committed_len(handle) for handle in handles] == [3, 1]


def test_sampling_changes_no_state_until_the_step_ends() -> None:
    manager, handle, step = one_step(end_token_ids=(1,))
    verify_all(step, make_inputs(manager.config, 3, seed=0))
    before = manager._backend.cursor(handle.record_slot)
    step.sample(logits_of(1, 1, 1), torch.tensor([0, 1, 1]))
    assert manager._backend.cursor(handle.record_slot) == before
    # A second sample replaces the first.
    result = step.sample(logits_of(2, 3, 0), torch.tensor([0, 2, 3]))
    step.defer(result)
    assert manager._backend.cursor(handle.record_slot).finished is False
    assert manager.committed_len(handle) == 3


def test_sample_before_the_last_verify_is_refused() -> None:
    manager = make_manager(make_config(**{**TINY, "num_layers": 2}, max_query_len=WINDOW))
    step = manager.begin_step(StepMetadata(handles=(manager.admit("a"),), query_lens=(2,)))
    inputs = make_inputs(manager.config, 2, seed=0)
    for verified in range(2):
        with pytest.raises(StepOrderError, match=r"sample: layers .* of 2 have not verified \(step 0\)"):
            step.sample(logits_of(1, 2), torch.tensor([0, 1]))
        tensors = inputs[verified]
        step.verify(verified, tensors.qkv, tensors.raw_gate, tensors.raw_beta)
    step.sample(logits_of(1, 2), torch.tensor([0, 1]))


def test_sample_of_no_rows() -> None:
    manager = make_manager(make_config(**TINY, max_query_len=WINDOW))
    step = manager.begin_step(StepMetadata(handles=(), query_lens=()), pad_to=(2, 3))
    verify_all(step, make_inputs(manager.config, 3, seed=0))
    result = step.sample(torch.zeros(3, VOCAB), torch.zeros(3, dtype=torch.int64))
    check(result, [], 2)
    step.defer(result)


def test_ties_go_to_the_first_token() -> None:
    manager, _, step = one_step()
    verify_all(step, make_inputs(manager.config, 3, seed=0))
    result = step.sample(torch.zeros(3, VOCAB), torch.tensor([0, 0, 1]))
    assert result.num_accepted.tolist() == [2]
    assert result.tokens.tolist() == [[0, 0, -1, -1]]


@pytest.mark.parametrize("how", ["load", "admit"])
def test_a_new_life_is_not_finished(how: str) -> None:
    manager, handle, step = one_step(end_token_ids=(1,))
    verify_all(step, make_inputs(manager.config, 3, seed=0))
    step.defer(step.sample(logits_of(1, 1, 1), torch.tensor([0, 2, 2])))
    assert manager._backend.cursor(handle.record_slot).finished
    if how == "load":
        manager.load(handle, None, committed_len=5)
    else:
        manager.release(handle)
        handle = manager.admit("b")
        manager.load(handle, None, committed_len=5)
    step = manager.begin_step(StepMetadata(handles=(handle,), query_lens=(3,)))
    verify_all(step, make_inputs(manager.config, 3, seed=0))
    result = step.sample(logits_of(1, 1, 1), torch.tensor([0, 2, 2]))
    # End tokens stay with the request, so after a load it finishes once more; another request has none.
    assert result.finished.tolist() == [how == "load"]
    step.defer(result)
    assert manager.committed_len(handle) == 6


# -- parameters


def test_defaults_are_greedy() -> None:
    params = SamplingParams()
    assert (params.temperature, params.top_k, params.top_p, params.seed, params.end_token_ids) == (0.0, 0, 1.0, 0, ())


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        pytest.param(
            {"temperature": -0.1}, ("temperature", "-0.1", "greater than or equal to 0"), id="temperature negative"
        ),
        pytest.param({"temperature": float("nan")}, ("temperature", "nan"), id="temperature nan"),
        pytest.param({"temperature": float("inf")}, ("temperature", "finite"), id="temperature inf"),
        pytest.param({"temperature": "0"}, ("temperature", "number"), id="temperature a string"),
        pytest.param({"temperature": True}, ("temperature", "number"), id="temperature a bool"),
        pytest.param({"temperature": None}, ("temperature", "number"), id="temperature None"),
        pytest.param({"top_k": -1}, ("top_k", "-1", "greater than or equal to 0"), id="top_k negative"),
        pytest.param({"top_k": 1.0}, ("top_k", "integer"), id="top_k a float"),
        pytest.param({"top_k": True}, ("top_k", "integer"), id="top_k a bool"),
        pytest.param({"top_p": 0.0}, ("top_p", "greater than 0"), id="top_p zero"),
        pytest.param({"top_p": 1.01}, ("top_p", "1.01", "less than or equal to 1"), id="top_p above one"),
        pytest.param({"top_p": float("nan")}, ("top_p", "nan"), id="top_p nan"),
        pytest.param({"seed": -1}, ("seed", "-1"), id="seed negative"),
        pytest.param({"seed": 2**63}, ("seed", "9223372036854775808"), id="seed beyond int64"),
        pytest.param({"end_token_ids": [1]}, ("end_token_ids", "tuple"), id="ends a list"),
        pytest.param({"end_token_ids": 1}, ("end_token_ids", "tuple"), id="ends a number"),
        pytest.param({"end_token_ids": (-1,)}, ("end_token_ids", "-1"), id="end negative"),
        pytest.param({"end_token_ids": (2**31,)}, ("end_token_ids", "2147483648"), id="end beyond int32"),
        pytest.param({"end_token_ids": (1.0,)}, ("end_token_ids", "integer"), id="end a float"),
        pytest.param({"end_token_ids": tuple(range(9))}, ("end_token_ids", "at most 8"), id="nine ends"),
        pytest.param({"end_tokens": (1,)}, ("end_tokens", "not permitted"), id="unknown field"),
    ],
)
def test_params_refuse(fields: dict[str, Any], words: tuple[str, ...]) -> None:
    with pytest.raises(ValidationError) as caught:
        SamplingParams(**fields)
    assert [word for word in words if word not in str(caught.value)] == []


def test_params_are_frozen() -> None:
    with pytest.raises(ValidationError, match="frozen"):
        SamplingParams().seed = 3


def test_eight_end_tokens_all_count() -> None:
    ends = tuple(range(40, 48))
    for end in ends:
        manager, _, step = one_step(end_token_ids=ends)
        verify_all(step, make_inputs(manager.config, 3, seed=0))
        result = step.sample(
            torch.nn.functional.one_hot(torch.tensor([end] * 3), 50).float(), torch.tensor([0, end, 1])
        )
        assert (result.finished.tolist(), result.num_accepted.tolist()) == ([True], [2])
        assert result.tokens.tolist() == [[end, -1, -1, -1]]


@pytest.mark.parametrize(
    ("logits", "probs", "message"),
    [
        ([(1, 2, torch.nan)], [], r"target_logits\[1\] has a NaN"),
        ([(3, slice(None), -torch.inf)], [], r"target_logits\[3\] .* allows no token"),
        ([], [(2, slice(None), 0.0)], r"draft_probs\[2\] adds up to 0, its least is 0"),
        ([], [(1, 0, torch.nan)], r"draft_probs\[1\] adds up to nan"),
        ([], [(1, 0, -0.25), (1, 1, 0.75)], r"draft_probs\[1\] adds up to 1, its least is -0.25"),
    ],
)
def test_numbers_that_mean_nothing_are_refused_under_debug(
    logits: list[tuple[Any, Any, float]], probs: list[tuple[Any, Any, float]], message: str
) -> None:
    """Where the first token's line, a line for no token, and the middle of a prompt may hold anything."""
    manager = make_manager(make_config(max_query_len=WINDOW, **TINY))
    metadata = StepMetadata(
        handles=(manager.admit("a", SamplingParams(temperature=1.0)), manager.admit("b")),
        query_lens=(4, 2),
        row_kinds=("decode", "prompt"),
    )
    step = manager.begin_step(metadata)
    verify_all(step, make_inputs(manager.config, 6, seed=0))
    given, q = torch.zeros(6, VOCAB), torch.full((6, VOCAB), 1 / VOCAB)
    given[4], q[0], q[3], q[4:] = torch.nan, torch.nan, 0.0, torch.nan
    drafts = torch.tensor([0, 1, 2, -1, 0, 0])
    step.sample(given, drafts, q)
    for tensor, changes in ((given, logits), (q, probs)):
        for token, entry, value in changes:
            tensor[token, entry] = value
    with pytest.raises(SpecStateError, match=message + r".* \(step 0\)"):
        step.sample(given, drafts, q)
    assert step.is_open
