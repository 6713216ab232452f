"""Sampling against the reference: every length of agreement, end tokens, ties, filters, vocabularies and strides."""

import pytest
import torch

from specstate import SamplingParams
from specstate.kernels import rows as at
from tests.kernels.harness import Rig, Row, small_config

ROWS = [
    Row(7, 3, 4),
    Row(0, 0, 1),
    Row(12, 5, 3, kind="prompt"),
    Row(9, 4, 4, finished=True),
    Row(20, 1, 4, kind="prompt", finished=True),
    Row(3, 2, 4, late=True),
    Row(query_len=2, kind="dummy"),
    Row(2, 0, 4, least=3),
    *[Row(1, 0, 4) for _ in range(6)],
]
# The interpreter warns of infinities that a GPU takes as they come.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
NAMES = ("num_accepted", "tokens", "next_token", "finished")


def make(device: str, end_tokens: dict[int, list[int]] | None = None, rows: list[Row] = ROWS, window: int = 4) -> Rig:
    rig = Rig(small_config(record_capacity=2 * window, max_query_len=window), rows, device)
    for row, tokens in (end_tokens or {}).items():
        ends = rig.storage.sampling[rig.record_row(row), at.END_TOKENS :]
        ends[: len(tokens)] = torch.tensor(tokens, dtype=torch.int32)
    rig.copy_to_exact()
    return rig


def compare(
    rig: Rig,
    logits: torch.Tensor,
    drafts: torch.Tensor,
    pad: tuple[int, int] = (0, 0),
    probs: torch.Tensor | None = None,
) -> list[torch.Tensor]:
    steps = rig.begin(*pad)
    got = rig.kernels.sample(steps[0], logits, drafts, probs)
    want = rig.exact.sample(steps[1], logits.cpu(), drafts.cpu(), None if probs is None else probs.cpu())
    for name, ours, theirs in zip(NAMES, got, want, strict=True):
        assert ours.dtype is theirs.dtype, name
        assert ours.tolist() == theirs.tolist(), name
    return [tensor.cpu() for tensor in got]


def windows(rig: Rig, vocab: int, seed: int, extra: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits, and drafts that agree with them in three of four places."""
    generator = torch.Generator().manual_seed(seed)
    tokens = sum(row.query_len for row in rig.rows) + extra
    logits = torch.randn(tokens, vocab, generator=generator)
    drafts = torch.cat([torch.zeros(1, dtype=torch.int64), logits.argmax(-1)[:-1]])
    other = torch.randint(vocab, (tokens,), generator=generator)
    agrees = torch.rand(tokens, generator=generator) < 0.75
    return logits.to(rig.device), torch.where(agrees, drafts, other).to(rig.device)


@pytest.mark.parametrize("vocab", [1, 3, 1023, 1024, 2500, pytest.param(163840, marks=pytest.mark.gpu)])
def test_random_windows(vocab: int, device: str) -> None:
    rig = make(device)
    accepted = set()
    for seed in range(3):
        got = compare(rig, *windows(rig, vocab, seed, extra=3), pad=(2, 3))
        accepted |= set(got[0].tolist())
    assert accepted == {0, 1, 2, 3, 4} or vocab < 4


FILTERS = {
    "temperature": {"temperature": 0.7},
    "top-k": {"temperature": 1.0, "top_k": 5},
    "top-k of 1": {"temperature": 2.0, "top_k": 1},
    "top-p": {"temperature": 1.3, "top_p": 0.6},
    "tiny top-p": {"temperature": 1.3, "top_p": 1e-50},
    "top-k and top-p": {"temperature": 1.0, "top_k": 20, "top_p": 0.8},
    "greedy": {},
}


@pytest.mark.parametrize("vocab", [3, 2500, pytest.param(163840, marks=pytest.mark.gpu)])
@pytest.mark.parametrize("with_probs", [False, True], ids=["point mass", "probabilities"])
def test_random_windows_with_noise(with_probs: bool, vocab: int, device: str) -> None:
    """A row for each filter, every one with a seed of its own; drafts that the target likes."""
    rig = make(device, rows=[*(Row(3 * i, i, 4) for i in range(len(FILTERS))), Row(5, 1, 3, kind="prompt")])
    for row, changes in enumerate([*FILTERS.values(), {"temperature": 1.0}]):
        line = SamplingParams(seed=2**63 - 1 - 2**31 * row, **changes).columns()
        rig.storage.sampling[rig.record_row(row)] = torch.tensor(line, dtype=torch.int32)
    rig.copy_to_exact()
    accepted = set()
    # A vocabulary of several tiles takes the interpreter seconds.
    for seed in range(1 if device == "cpu" and vocab > 3 else 3):
        logits, drafts = windows(rig, vocab, seed, extra=2)
        probs = torch.softmax(3 * logits.roll(1, 0) + torch.randn_like(logits) / 8, -1) if with_probs else None
        accepted |= set(compare(rig, 3 * logits, drafts, (1, 2), probs)[0].tolist())
    assert {1, 2} <= accepted


def test_extreme_logits_with_noise(device: str) -> None:
    """Infinities, a vocabulary of forbidden tokens, ties at the edge of top-k, drafts that are no tokens."""
    rig = make(device, rows=[Row(query_len=4)])
    rig.storage.sampling[rig.record_row(0)] = torch.tensor(SamplingParams(temperature=1e-6, top_k=2, seed=3).columns())
    rig.copy_to_exact()
    logits = torch.zeros(4, 1100)
    logits[0] = -torch.inf
    logits[0, 1090] = -5.0
    logits[1, 7] = torch.inf
    logits[2, [3, 1050, 1060]] = 1e30
    logits[3] = -torch.inf
    for drafts in ([0, 1090, 7, 1050], [0, -1, 2**40, 1100]):
        given = torch.tensor(drafts).to(device)
        tokens = compare(rig, logits.to(device), given)[1][0].tolist()
        compare(rig, logits.to(device), given, probs=torch.full((4, 1100), 1 / 1100, device=device))
        assert tokens[0] == 1090
    # The three are as likely as the second: all are kept, and drawn.
    drawn = set()
    for seed in range(12):
        line = SamplingParams(temperature=1.0, top_k=2, seed=seed).columns()
        rig.storage.sampling[rig.record_row(0)] = torch.tensor(line, dtype=torch.int32)
        rig.copy_to_exact()
        drawn.add(int(compare(rig, logits[[2, 2, 2, 2]].to(device), given)[2]))
    assert drawn == {3, 1050, 1060}


@pytest.mark.parametrize("ends", [1, 3, 8])
def test_end_tokens(ends: int, device: str) -> None:
    """A few tokens in a small vocabulary, so that windows end at every place, at several tokens, and not at all."""
    rig = make(device, {row: [(row + i) % 11 for i in range(ends)] for row in (0, 1, 2, 4, 7, 8, 9, 10)})
    finished = []
    for seed in range(4):
        finished += compare(rig, *windows(rig, 11, seed))[3].tolist()
    assert any(finished)
    assert not all(finished)


def test_a_forced_draft_beyond_int32_is_no_end_token(device: str) -> None:
    rig = make(device, {0: [5]}, rows=[Row(query_len=4, least=3)])
    logits = torch.eye(8)[[1, 2, 3, 4]].to(device)
    got = compare(rig, logits, torch.tensor([0, 2**32 + 5, 2**32 + 3, 7], device=device))
    assert not got[3].any()


@pytest.mark.parametrize("length", [1, 16])
def test_shortest_and_longest_window(length: int, device: str) -> None:
    rig = make(device, rows=[Row(query_len=length), Row(query_len=length), Row(query_len=1)], window=length)
    logits, drafts = windows(rig, 50, 1)
    # Row 0 agrees everywhere, row 1 nowhere.
    best = logits.argmax(-1)
    drafts[1:length] = best[: length - 1]
    drafts[length + 1 : 2 * length] = (best[length : 2 * length - 1] + 1) % 50
    assert compare(rig, logits, drafts)[0].tolist() == [length, 1, 1]


def test_ties_go_to_the_first_token(device: str) -> None:
    """Also across the blocks that a vocabulary is read in."""
    rig = make(device, rows=[Row(query_len=4)])
    logits = torch.zeros(4, 5000)
    logits[0, [7, 900, 3000]] = 2.0
    logits[1, [1023, 1024]] = 1.0
    logits[2] = -torch.inf
    logits[3, [4999, 4998]] = 3.0
    drafts = torch.tensor([0, 7, 1023, 0])
    assert compare(rig, logits.to(device), drafts.to(device))[1].tolist() == [[7, 1023, 0, 4998]]


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
def test_logit_dtypes(dtype: str, device: str) -> None:
    """float64 logits that only float64 can tell apart, too."""
    rig = make(device, rows=[Row(query_len=2), Row(query_len=3)])
    logits, drafts = windows(rig, 300, 5)
    logits = logits.to(getattr(torch, dtype))
    if dtype == "float64":
        logits[:, 100] = 50.0
        logits[:, 200] = 50.0 + 1e-12
    best = compare(rig, logits, drafts)[2]
    assert dtype != "float64" or best.tolist() == [200, 200]


@pytest.mark.parametrize("dtype", ["int32", "int64"])
def test_strided_logits_and_drafts(dtype: str, device: str) -> None:
    """Columns of a wider projection, a transposed one, and every second draft of a caller's buffer."""
    rig = make(device)
    logits, drafts = windows(rig, 40, 6)
    drafts = drafts.to(getattr(torch, dtype))
    wanted = [tensor.tolist() for tensor in compare(rig, logits, drafts)]
    wide = torch.full((len(logits), 64), torch.inf, device=device)
    wide[:, 10:50] = logits
    turned = logits.T.contiguous().T
    second = torch.stack([drafts, torch.full_like(drafts, -7)], 1)[:, 0]
    for given in (wide[:, 10:50], turned):
        assert [tensor.tolist() for tensor in compare(rig, given, second)] == wanted


def test_without_tokens(device: str) -> None:
    rig = make(device, rows=[Row()])
    staged = torch.tensor([0, -1, 0, 0, 0, 0, 0, 2, 0, 0, 0], dtype=torch.int32)
    ours, theirs = rig.begin_staged(staged, 1, 0, 0)
    logits, drafts = torch.zeros(0, 5), torch.zeros(0, dtype=torch.int64)
    got, want = (
        rig.kernels.sample(ours, logits.to(device), drafts.to(device), None),
        rig.exact.sample(theirs, logits, drafts, None),
    )
    assert [tensor.tolist() for tensor in got] == [tensor.tolist() for tensor in want]
