"""Speculative decoding on the real model changes no byte of greedy output, and leaves the right state behind.

`examples/lossless.py` does the comparison and runs the long grid; here prompts are cut short, outputs are not.
"""

from typing import Any

import pytest
import torch

from acceptance import Statistics, main
from decode import Generation, decode, make_manager
from lossless import Plain, Report, compare, plain_decode
from model import load_model
from ngram_drafter import NgramDrafter
from specstate import SamplingParams

from .conftest import EXAMPLES

MAX_BYTES = 256
POLICIES = ("eager", "deferred", "ring")


def cut(prompts: list[bytes]) -> list[bytes]:
    """Nine prompts of 40 to 96 bytes: more than a batch, so that a request enters when the first leaves."""
    return [prompt[: 96 - 7 * i] for i, prompt in enumerate(prompts[:9])]


@pytest.fixture(scope="module")
def plain(model: Any, prompts: list[bytes]) -> Plain:
    return plain_decode(model, cut(prompts), MAX_BYTES)


@pytest.fixture(scope="module")
def ties() -> Any:
    """Ties found in the whole grid."""
    found: list[int] = []
    yield found
    assert sum(found) <= 5


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("window", [1, 4, 8])
@pytest.mark.parametrize("batch", [1, 8])
def test_greedy_output_is_the_plain_output(
    model: Any, plain: Plain, ties: list[int], policy: str, window: int, batch: int
) -> None:
    if batch == 1:
        plain = Plain(plain.prompts[:2], plain.outputs[:2], plain.gaps[:2])
    report = compare(model, plain, policy, batch, window)
    ties.append(report.ties)
    assert not report.failed(torch.float32), report


@pytest.fixture(scope="module")
def float64(prompts: list[bytes]) -> tuple[Any, Plain]:
    model = load_model(EXAMPLES / "weights", torch.float64)
    return model, plain_decode(model, cut(prompts)[:3], 96)


@pytest.mark.parametrize("policy", POLICIES)
def test_float64_has_no_ties(float64: tuple[Any, Plain], policy: str) -> None:
    model, plain = float64
    report = compare(model, plain, policy, batch=2, window=8)
    assert not report.failed(torch.float64), report
    assert report.ties == 0


def test_mean_acceptance_length(model: Any, prompts: list[bytes]) -> None:
    """Window 8, eight whole held-out prompts, the bonus token counted."""
    manager, statistics = make_manager(model, 8, 8, "ring"), Statistics()
    decode(model, manager, prompts[:8], MAX_BYTES, NgramDrafter(), statistics)
    assert statistics.mean_acceptance_length >= 2.5
    assert manager.num_requests == 0


class Collected(Statistics):
    def __init__(self) -> None:
        super().__init__()
        self.pieces: dict[int, bytes] = {}
        self.done: list[int] = []

    def on_output(self, request: Generation, new: list[int]) -> None:
        super().on_output(request, new)
        self.pieces[request.index] = self.pieces.get(request.index, b"") + bytes(new)

    def on_done(self, request: Generation) -> None:
        self.done.append(request.index)


def test_text_is_streamed_and_counted(model: Any, prompts: list[bytes]) -> None:
    heard, manager = Collected(), make_manager(model, 2, 4, "eager")
    requests = decode(model, manager, [prompt[:9] for prompt in prompts[:3]], 20, NgramDrafter(), heard)
    for request in requests:
        assert heard.pieces[request.index] == request.output
        assert len(request.output) == 1 + sum(heard.yields[request.index]) == 20
        assert request.committed_len == 9 + 20 - 1
    assert sorted(heard.done) == [0, 1, 2]
    assert heard.mean_acceptance_length == 57 / len(heard.counts)
    assert heard.mean_acceptance_length == pytest.approx(1 + sum(heard.acceptance_per_position(4)))
    assert heard.forwards_per_token == len(heard.counts) / 60
    assert heard.tokens_per_second > 0


@pytest.mark.parametrize("policy", POLICIES)
def test_a_request_ends_with_its_end_token(model: Any, prompts: list[bytes], policy: str) -> None:
    """Whether it is sampled or an accepted draft; what was sampled inside a prompt does not end it."""
    few, end = [prompt[:96] for prompt in prompts[:5]], b"\n"
    whole = decode(model, make_manager(model, 2, 8, policy), few, 80, NgramDrafter())
    sampling = SamplingParams(end_token_ids=(end[0],))
    cut_short = decode(model, make_manager(model, 2, 8, policy), few, 80, NgramDrafter(), sampling=sampling)
    for request, reference in zip(cut_short, whole, strict=True):
        assert request.output == reference.output[: reference.output.find(end) + 1] or end not in reference.output
    assert any(len(request.output) < 80 for request in cut_short)


def test_a_manager_may_be_elsewhere(model: Any) -> None:
    manager = make_manager(model, 1, 2, "ring", backend="reference", device="cpu")
    assert manager.device == model.embedding.device


def test_acceptance_prints_a_line_a_prompt_and_the_mean(capsys: pytest.CaptureFixture[str]) -> None:
    threads = torch.get_num_threads()
    main(["--prompts", "2", "--max-bytes", "12", "--window", "3"])
    torch.set_num_threads(threads)
    first, second, mean = capsys.readouterr().out.splitlines()
    assert first.split()[1] == "0" and second.split()[1] == "1"
    assert "tokens per window over all" in mean


def test_a_tie_is_counted_and_the_comparison_goes_on(model: Any, prompts: list[bytes]) -> None:
    prompt, at, length = prompts[0][:40], 5, 16
    first = plain_decode(model, [prompt], length)
    start = first.outputs[0][:at] + b"@"
    rest = plain_decode(model, [prompt + start], length - at - 1)
    other = Plain([prompt], [start + rest.outputs[0]], first.gaps.clone())
    other.gaps[0, at] = 5e-5
    report = compare(model, other, "ring", batch=1, window=4)
    assert (report.ties, report.mismatches) == (1, 0)

    other.gaps[0, at] = 5e-4
    report = compare(model, other, "ring", batch=1, window=4)
    assert (report.ties, report.mismatches) == (0, 1)
    assert report.failed(torch.float32)


def test_a_wrong_state_is_a_failure() -> None:
    assert not Report(target_error=9e-6).failed(torch.float32)
    assert Report(target_error=2e-5).failed(torch.float32)
    assert Report(target_error=9e-6).failed(torch.float64)
    assert Report(target_error=float("nan")).failed(torch.float32)
    assert Report(drafter_error=2e-5).failed(torch.float32)
