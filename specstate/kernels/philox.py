"""Counter-based random numbers: Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011).

A number is a function of a key and a counter, with no state between calls. Here the key is a request's seed and the
counter says what the number is for: (vocabulary entry / 4, position of the token, draw, 0), one of whose four words
belongs to each of four entries. So a token's numbers do not depend on its row, its window, its batch or its rank.
Triton has the same function as ``tl.philox``.
"""

import torch

_WORD = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 10


def philox(counter: tuple[torch.Tensor, ...], key: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """Four words for four of a counter and two of a key; all int64 with values in 0..2^32 - 1, broadcast together."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_ROUNDS):
        high0, low0 = _multiply(c0, _MULTIPLIERS[0])
        high1, low1 = _multiply(c2, _MULTIPLIERS[1])
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = (k0 + _WEYL[0]) & _WORD, (k1 + _WEYL[1]) & _WORD
    return c0, c1, c2, c3


def _multiply(x: torch.Tensor, factor: int) -> tuple[torch.Tensor, torch.Tensor]:
    """High and low word of x * factor. In halves, since int64 does not hold the product of two unsigned words."""
    high = ((x >> 16) * factor + ((x & 0xFFFF) * factor >> 16)) >> 16
    return high, (x * factor) & _WORD


def random_words(seed: torch.Tensor, position: torch.Tensor, draw: int, count: int) -> torch.Tensor:
    """[tokens, count] int64 in 0..2^32 - 1, a word for each entry of a vocabulary; seed and position [tokens]."""
    group = torch.arange(-(-count // 4), device=seed.device)
    key = seed[:, None] & _WORD, seed[:, None] >> 32 & _WORD
    zero = torch.zeros_like(group)
    words = philox((group[None], position[:, None].long(), zero + draw, zero), key)
    return torch.stack(torch.broadcast_tensors(*words), -1).flatten(1)[:, :count]
