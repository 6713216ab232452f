"""Random numbers: known answers of Philox, the same words from Triton, and what is made of them."""

import math

import pytest
import torch
import triton
import triton.language as tl

from specstate.kernels.philox import philox, random_words
from specstate.kernels.sampling import log_exponential
from specstate.kernels.triton_sampling import log_exponential as triton_log_exponential
from specstate.kernels.triton_sampling import random_words as triton_random_words

# Counter, key and words of philox4x32-10 in Random123's kat_vectors.
KNOWN = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


@pytest.mark.parametrize(("counter", "key", "words"), KNOWN)
def test_known_answers(counter: tuple[int, ...], key: tuple[int, ...], words: tuple[int, ...]) -> None:
    got = philox(tuple(map(torch.tensor, counter)), tuple(map(torch.tensor, key)))  # type: ignore[arg-type]
    assert tuple(word.item() for word in got) == words


@triton.jit
def words_kernel(p_words, p_logs, seed_low, seed_high, position, draw, start, BLOCK: tl.constexpr):
    seed = seed_low.to(tl.uint32).to(tl.uint64) | (seed_high.to(tl.uint32).to(tl.uint64) << 32)
    b_words = triton_random_words(seed, position, draw, start, BLOCK)
    tl.store(p_words + tl.arange(0, BLOCK), b_words.to(tl.int64))
    tl.store(p_logs + tl.arange(0, BLOCK), triton_log_exponential(b_words))


@pytest.mark.parametrize("seed", [0, 5, 2**31, 2**40 + 77, 2**63 - 1])
def test_triton_draws_the_same_words(seed: int, device: str) -> None:
    for position, draw, start in ((1, 0, 0), (70000, 1, 0), (2**31 - 5, 2, 1024)):
        words = torch.empty(1024, dtype=torch.int64, device=device)
        logs = torch.empty(1024, device=device)
        halves = [half - 2**32 if half >= 2**31 else half for half in (seed & 0xFFFFFFFF, seed >> 32)]
        words_kernel[(1,)](words, logs, *halves, position, draw, start, BLOCK=1024)
        given = torch.tensor([seed]), torch.tensor([position], dtype=torch.int32)
        wanted = random_words(*given, draw, start + 1024)[0, start:]
        assert torch.equal(words.cpu(), wanted)
        assert torch.allclose(logs.cpu(), log_exponential(wanted), rtol=1e-5, atol=1e-6)


def test_words_depend_on_seed_position_draw_and_entry() -> None:
    seeds, positions = torch.tensor([1, 2, 1]), torch.tensor([4, 4, 5])
    words = torch.cat([random_words(seeds, positions, draw, 50) for draw in range(3)]).flatten()
    assert len(set(words.tolist())) == 3 * 3 * 50
    # A longer vocabulary has the same words in front.
    assert torch.equal(random_words(seeds, positions, 0, 7), random_words(seeds, positions, 0, 50)[:, :7])


def test_logs_of_exponentials_at_the_edges() -> None:
    """Finite for every word, and exact where E is small: the smallest decides a draw."""
    words = torch.tensor([0, 1, 1000, 2**24, 2**28 - 1, 2**28, 2**31, 2**32 - 1])
    got = log_exponential(words).double()
    wanted = [math.log(-math.log1p(-(word + 0.5) / 2**32)) for word in words[:-1].tolist()]
    assert torch.allclose(got[:-1], torch.tensor(wanted, dtype=torch.float64), rtol=1e-6, atol=2e-6)
    assert math.isfinite(got[-1]) and got[-1] > math.log(16)
