"""The distribution of what is sampled is the target's, whatever drafts; and a seed's tokens depend on nothing else.

The target is a Markov chain over five tokens, so that the exact distribution of what follows is a product. Thousands of
requests, each with a seed of its own, decode side by side; Pearson's chi-squared statistic over all sequences of three
tokens is held to its 0.999 quantile.
"""

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from specstate import SamplingParams, StateManager, StepMetadata
from specstate.kernels import sampling
from tests.factories import make_config, make_manager

VOCAB, LENGTH, FIRST, LEVEL = 5, 3, 2, 1e-3
TINY = {
    "num_layers": 1,
    "num_heads": 1,
    "head_k_dim": 16,
    "head_v_dim": 16,
    "conv_kernel_size": None,
    "checkpoint_dtype": "float32",
    "activation_dtype": "float32",
}
LOGITS = 1.5 * torch.randn(VOCAB, VOCAB, generator=torch.Generator().manual_seed(4))
#: What drafts are drawn from: neither the target nor uniform, and never token 4 after token 1.
DRAFTS = torch.softmax(torch.randn(VOCAB, VOCAB, generator=torch.Generator().manual_seed(5)), 1)
DRAFTS[1, 4] = 0.0
DRAFTS /= DRAFTS.sum(1, keepdim=True)
FILTERS = {
    "temperature 1": {"temperature": 1.0},
    "temperature 0.6": {"temperature": 0.6},
    "top-k": {"temperature": 1.0, "top_k": 3},
    "top-p": {"temperature": 1.2, "top_p": 0.8},
    "top-k and top-p": {"temperature": 1.5, "top_k": 4, "top_p": 0.7},
}


def target(temperature: float, top_k: int = 0, top_p: float = 1.0) -> list[list[float]]:
    """The target's probabilities, one token at a time in Python's floats."""
    chain = []
    for line in LOGITS.tolist():
        weights = [math.exp((x - max(line)) / temperature) for x in line]
        order = sorted(range(VOCAB), key=lambda v: -weights[v])[: top_k or VOCAB]
        mass, kept = 0.0, []
        for v in order:
            kept.append(v)
            mass += weights[v]
            if mass >= top_p * sum(weights[w] for w in order):
                break
        chain.append([weights[v] / mass if v in kept else 0.0 for v in range(VOCAB)])
    return chain


@dataclass
class Decoding:
    """Many requests over the chain, each from token FIRST on.

    drafts: "none", "point mass" (a function of the token before), "probabilities" (drawn, with what they were drawn
    from), or "drawn" (without).
    """

    device: str
    params: Sequence[SamplingParams]
    drafts: str = "none"
    window: int = 3
    config: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        sizes = TINY | {"max_requests": len(self.params), "max_query_len": self.window} | self.config
        backend = "triton" if self.device == "cuda" else "reference"
        self.manager: StateManager = make_manager(make_config(**sizes), self.device, backend=backend, debug=False)
        self.generator = torch.Generator().manual_seed(9)

    def propose(self, last: int) -> list[int]:
        tokens = []
        for _ in range(self.window - 1 if self.drafts != "none" else 0):
            if self.drafts == "point mass":
                last = (2 * last + 1) % VOCAB
            else:
                last = int(torch.multinomial(DRAFTS[last], 1, generator=self.generator))
            tokens.append(last)
        return tokens

    def run(self, length: int = LENGTH) -> list[tuple[int, ...]]:
        """The first ``length`` tokens of every request."""
        manager, spec = self.manager, self.manager.config.layer
        handles = [manager.admit(str(i), params) for i, params in enumerate(self.params)]
        texts: list[list[int]] = [[FIRST] for _ in handles]
        while any(len(text) <= length for text in texts):
            due = [i for i, text in enumerate(texts) if len(text) <= length]
            windows = [[texts[i][-1], *self.propose(texts[i][-1])] for i in due]
            tokens = torch.tensor([token for window in windows for token in window])
            before = torch.tensor([token for window in windows for token in [0, *window[:-1]]])
            metadata = StepMetadata(
                handles=tuple(handles[i] for i in due), query_lens=tuple(len(window) for window in windows)
            )
            step = manager.begin_step(metadata)
            shapes = ((spec.conv_channels,), (spec.num_heads, spec.head_k_dim), (spec.num_heads,))
            step.verify(0, *(torch.zeros(len(tokens), *shape, device=self.device) for shape in shapes))
            probs = DRAFTS[before].to(self.device) if self.drafts == "probabilities" else None
            result = step.sample(LOGITS[tokens].to(self.device), tokens.to(self.device), probs)
            step.defer(result)
            for i, row in zip(due, result.tokens.tolist(), strict=True):
                texts[i] += [token for token in row if token >= 0]
        return [tuple(text[1 : length + 1]) for text in texts]


def chi_squared(texts: list[tuple[int, ...]], chain: list[list[float]]) -> float:
    """Probability of a statistic at least as large as that of ``texts``; 0 when one is impossible.

    Sequences that are expected fewer than five times are counted together.
    """
    statistic, cells, rare, rare_wanted = 0.0, 0, 0, 0.0
    counts: dict[tuple[int, ...], int] = {}
    for text in texts:
        counts[text] = counts.get(text, 0) + 1
    for text in itertools.product(range(VOCAB), repeat=LENGTH):
        path = (FIRST, *text)
        wanted = len(texts) * math.prod(chain[a][b] for a, b in itertools.pairwise(path))
        got = counts.get(text, 0)
        if wanted == 0.0 and got:
            return 0.0
        if wanted < 5:
            rare, rare_wanted = rare + got, rare_wanted + wanted
        else:
            statistic += (got - wanted) ** 2 / wanted
            cells += 1
    if rare_wanted >= 5:
        statistic += (rare - rare_wanted) ** 2 / rare_wanted
        cells += 1
    assert cells > 3
    half = torch.tensor([(cells - 1) / 2, statistic / 2], dtype=torch.float64)
    return float(torch.special.gammaincc(half[0], half[1]))


def seeded(count: int, **changes: Any) -> list[SamplingParams]:
    return [SamplingParams(seed=1000 + seed, **changes) for seed in range(count)]


@pytest.mark.parametrize("drafts", ["none", "point mass", "probabilities"])
@pytest.mark.parametrize("name", FILTERS)
def test_the_output_is_distributed_as_the_target(name: str, drafts: str, device: str) -> None:
    texts = Decoding(device, seeded(4000, **FILTERS[name]), drafts).run()
    level = chi_squared(texts, target(**FILTERS[name]))
    print(f"\n{name}, {drafts}: level {level:.3f}")
    assert level > LEVEL


def stands_always(uniform: torch.Tensor, p_draft: torch.Tensor, q_draft: torch.Tensor) -> torch.Tensor:
    return p_draft >= 0


def stands_by_target_alone(uniform: torch.Tensor, p_draft: torch.Tensor, q_draft: torch.Tensor) -> torch.Tensor:
    return uniform < p_draft


def residual_is_the_target(p: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    return p


WRONG = [
    ("draft_stands", stands_always),
    ("draft_stands", stands_by_target_alone),
    ("residual", residual_is_the_target),
]


@pytest.mark.parametrize(("rule", "wrong"), WRONG, ids=[wrong.__name__ for _, wrong in WRONG])
def test_a_wrong_rule_is_found(rule: str, wrong: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampling, rule, wrong)
    texts = Decoding("cpu", seeded(4000, temperature=1.0), "probabilities").run()
    assert chi_squared(texts, target(1.0)) < LEVEL


def test_a_filter_that_is_left_out_is_found() -> None:
    texts = Decoding("cpu", seeded(4000, temperature=1.0), "point mass").run()
    for name in ("temperature 0.6", "top-k", "top-p"):
        assert chi_squared(texts, target(**FILTERS[name])) < LEVEL


def test_drafts_with_probabilities_are_accepted_as_often_as_can_be(device: str) -> None:
    """sum_v min(p, q), the most that any lossless rule can accept (Leviathan et al.); a point mass p(d)."""
    chain = torch.tensor(target(1.0))
    for drafts in ("probabilities", "point mass"):
        decoding = Decoding(device, seeded(3000, temperature=1.0), drafts, window=2)
        texts = decoding.run(1)
        assert len(texts) == 3000
        accepted = sum(decoding.manager.committed_len(request.handle) == 2 for request in decoding.manager._requests)
        likely = chain[FIRST, (2 * FIRST + 1) % VOCAB]
        wanted = torch.minimum(chain[FIRST], DRAFTS[FIRST]).sum() if drafts == "probabilities" else likely
        assert abs(accepted / 3000 - wanted) < 4 * math.sqrt(0.25 / 3000)


MIXED = [SamplingParams(seed=i, **FILTERS[name]) for i, name in enumerate(FILTERS)]


def test_a_seed_gives_the_same_tokens_with_any_window_and_any_drafts(device: str) -> None:
    """Drafts without probabilities never show in the output, not even whether there are any."""
    wanted = Decoding(device, MIXED).run(12)
    for drafts, window in (("point mass", 2), ("point mass", 8), ("none", 4), ("drawn", 3)):
        assert Decoding(device, MIXED, drafts, window).run(12) == wanted, (drafts, window)
    assert len(set(wanted)) == len(wanted)


@pytest.mark.parametrize("drafts", ["point mass", "probabilities"])
def test_a_seed_gives_the_same_tokens_in_any_row_and_on_any_rank(drafts: str, device: str) -> None:
    """Alone, in a batch, in another row; with other heads, as on another tensor-parallel rank; under another policy.

    Drafts with probabilities are one and the same where they are drawn by the same generator, in the first window.
    """
    length = 12 if drafts == "point mass" else 1
    batch = Decoding(device, MIXED, drafts).run(length)
    assert Decoding(device, MIXED[:1], drafts).run(length)[0] == batch[0]
    for changes in ({"num_heads": 2}, {"fold_policy": "eager"}, {"max_query_len": 5, "max_requests": 9}):
        assert Decoding(device, MIXED, drafts, config=changes).run(length) == batch
    if drafts == "point mass":
        assert Decoding(device, MIXED[::-1], drafts).run(length) == batch[::-1]
        for params, text in zip(MIXED, batch, strict=True):
            assert Decoding(device, [params], drafts).run(length) == [text]


def test_a_draft_model_of_the_same_seed_agrees_more_often(device: str) -> None:
    """It samples in a manager of its own, from a distribution near the target's: the numbers are the same."""
    near = LOGITS + 0.3 * torch.randn(VOCAB, VOCAB, generator=torch.Generator().manual_seed(6))
    agreed = {}
    for name, shift in (("same seed", 0), ("another seed", 10**6)):
        params = seeded(2000, temperature=1.0)
        drafting = [p.model_copy(update={"seed": p.seed + shift}) for p in params]
        with pytest.MonkeyPatch.context() as patch:
            patch.setitem(globals(), "LOGITS", near)
            drafted = Decoding(device, drafting).run(1)
        agreed[name] = sum(a == b for a, b in zip(drafted, Decoding(device, params).run(1), strict=True)) / 2000
    assert agreed["same seed"] > 0.85 > agreed["another seed"] + 0.2
