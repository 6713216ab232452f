"""The draft model: its drafts, and its state, which a second manager rolls back with the target's."""

from pathlib import Path
from typing import Any

import pytest
import torch

from acceptance import Statistics
from decode import Generation, decode, make_manager
from drafters import KINDS, MakeDrafter, drafter_maker
from lossless import Plain, compare, plain_decode
from model import load_model
from model_drafter import ModelDrafter
from ngram_drafter import NgramDrafter
from recurrence import SerialMixer
from specstate import HostSample, SamplingParams, StateManager, StepMetadata
from tests.factories import amount

from .conftest import EXAMPLES

MAX_BYTES = amount(64, 24)
POLICIES = ("eager", "deferred", "ring")


def cut(prompts: list[bytes]) -> list[bytes]:
    """Five prompts of 20 to 52 bytes: more than a batch, so that a request enters when the first leaves."""
    return [prompt[: 52 - 8 * i] for i, prompt in enumerate(prompts[:5])]


@pytest.fixture(scope="module")
def plain(model: Any, prompts: list[bytes]) -> Plain:
    return plain_decode(model, cut(prompts), MAX_BYTES)


@pytest.fixture(scope="module")
def make_drafter(weights: Path) -> MakeDrafter:
    return drafter_maker("model", weights)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("window", [1, 2, 5, 8])
def test_output_is_the_plain_output_and_both_states_are_right(
    model: Any, plain: Plain, make_drafter: MakeDrafter, policy: str, window: int
) -> None:
    report = compare(model, plain, policy, 3, window, make_drafter=make_drafter)
    assert not report.failed(torch.float32), report
    assert report.drafter_error > 0.0


@pytest.mark.parametrize("policy", POLICIES)
def test_a_target_that_drafts_for_itself_accepts_everything(prompts: list[bytes], weights: Path, policy: str) -> None:
    """Every draft is right only as long as the drafter's state is."""
    model: Any = load_model(weights, torch.float64)
    plain = plain_decode(model, cut(prompts)[:3], 30)

    def make(target: StateManager) -> ModelDrafter:
        return ModelDrafter(model, make_manager(model, 2, 4, policy))

    report = compare(model, plain, policy, 2, 4, make_drafter=make)
    assert not report.failed(torch.float64), report
    assert report.statistics is not None
    assert list(report.statistics.yields.values()) == [[4] * 7 + [1]] * 3


class CommitsEverything(ModelDrafter):
    """Forgets to roll back."""

    def observe(
        self, requests: list[Generation], metadata: StepMetadata, tokens: torch.Tensor, sampled: HostSample
    ) -> None:
        whole = torch.tensor(metadata.query_lens, dtype=torch.int32)
        unrolled = HostSample(whole, sampled.tokens, sampled.next_token, sampled.finished)
        super().observe(requests, metadata, tokens, unrolled)


def test_a_state_that_was_not_rolled_back_is_found(model: Any, plain: Plain, weights: Path) -> None:
    draft_model = load_model(weights / "drafter")

    def make(target: StateManager) -> ModelDrafter:
        return CommitsEverything(draft_model, make_manager(draft_model, 3, 4, "ring"))

    report = compare(model, plain, "ring", 3, 4, make_drafter=make)
    assert report.mismatches == 0 and report.target_error < 1e-5
    assert report.failed(torch.float32), report


def test_drafts_are_what_the_draft_model_would_write(weights: Path, prompts: list[bytes]) -> None:
    """From prompts that have not been read: a state of zero, and the last token of the prompt."""
    model: Any = load_model(weights / "drafter", torch.float64)
    drafter = ModelDrafter(model, make_manager(model, 3, 6, "ring"))
    requests = [Generation(i, list(prompt), len(prompt)) for i, prompt in enumerate(prompts[:3])]
    for request in requests:
        drafter.admit(request, SamplingParams(end_token_ids=tuple(range(8))))
    drafts = drafter.propose(requests, [5, 0, 2])
    assert [len(row) for row in drafts] == [5, 0, 2]
    assert drafts == drafter.propose(requests, [5, 0, 2])  # nothing was committed
    for request, row in zip(requests, drafts, strict=True):
        text = [request.tokens[-1], *row]
        best = model(torch.tensor(text), SerialMixer(model.layer_params())).argmax(-1).tolist()
        assert row == best[:-1]
        drafter.release(request)
    assert drafter.propose([], []) == []
    assert drafter.manager.num_requests == 0


def test_end_tokens_end_requests_not_drafts(model: Any, prompts: list[bytes], weights: Path) -> None:
    """With drafts that are right, which go on behind an end token."""

    def ends(drafting: Any, make: MakeDrafter) -> list[bytes]:
        manager, sampling = make_manager(drafting, 2, 6, "ring"), SamplingParams(end_token_ids=(ord("\n"),))
        requests = decode(drafting, manager, cut(prompts), MAX_BYTES, make(manager), sampling=sampling)
        return [request.output for request in requests]

    def itself(target: StateManager) -> ModelDrafter:
        return ModelDrafter(model, make_manager(model, 2, 6, "ring"))

    assert ends(model, itself) == ends(model, lambda target: NgramDrafter())


@pytest.mark.parametrize("kind", KINDS)
def test_drafters_by_name(model: Any, plain: Plain, weights: Path, kind: str) -> None:
    manager = make_manager(model, 4, 5, "deferred")
    drafter, statistics = drafter_maker(kind, weights)(manager), Statistics()
    requests = decode(model, manager, plain.prompts, 16, drafter, statistics)
    assert [request.output for request in requests] == [output[:16] for output in plain.outputs]
    assert (drafter.state_bytes > 0) == (kind == "model")


def test_a_drafter_takes_after_its_target(model: Any, weights: Path) -> None:
    drafter: Any = drafter_maker("model", weights, torch.float64)(make_manager(model, 4, 5, "deferred"))
    config = drafter.manager.config
    assert (config.max_requests, config.max_query_len, config.fold_policy) == (4, 5, "deferred")
    assert (config.num_layers, config.checkpoint_dtype) == (1, "float64")


def test_the_draft_model_yields_more_than_ngrams(model: Any, prompts: list[bytes]) -> None:
    """The shipped weights, on held-out code; all 24 prompts x 256 bytes: `python examples/acceptance.py`."""
    means, few = {}, prompts[: amount(6, 2)]
    for kind in KINDS:
        manager, statistics = make_manager(model, 6, 8, "ring"), Statistics()
        decode(model, manager, few, 96, drafter_maker(kind, EXAMPLES / "weights")(manager), statistics)
        means[kind] = statistics.mean_acceptance_length
    print(f"\nmean acceptance {means}")
    assert means["model"] > means["ngram"] + 1.0


def test_sampled_output_is_the_same_with_any_drafter(prompts: list[bytes]) -> None:
    """In float64, where no rounding decides a draw. The draft model's tokens are drawn with the target's numbers."""
    model: Any = load_model(EXAMPLES / "weights", torch.float64)
    sampling, outputs, means = SamplingParams(temperature=0.8, top_p=0.95, seed=11), {}, {}
    for kind in ("none", *KINDS):
        manager, statistics = make_manager(model, 3, 6, "deferred"), Statistics()
        drafter = None if kind == "none" else drafter_maker(kind, EXAMPLES / "weights", torch.float64)(manager)
        requests = decode(model, manager, [p[:160] for p in prompts[:3]], 48, drafter, statistics, sampling)
        outputs[kind], means[kind] = [request.output for request in requests], statistics.mean_acceptance_length
    assert outputs["ngram"] == outputs["none"] == outputs["model"]
    assert means["model"] > means["ngram"] > means["none"] == 1.0
