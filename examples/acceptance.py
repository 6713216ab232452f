"""How many tokens a window yields, and how fast: counts of a run, and their mean over all held-out prompts.

python examples/acceptance.py --drafter model        # 24 prompts x 256 bytes, windows of 8
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from decode import Generation, Listener, decode, make_manager
from drafters import KINDS, drafter_maker
from model import load_model
from prompts import load_prompts


class Statistics(Listener):
    """Counts and a clock over the decode windows of a run. The prompt's own forwards are not among them."""

    def __init__(self) -> None:
        self.yields: dict[int, list[int]] = {}
        """By request: the tokens that each of its decode windows yielded. Their sum is the output behind its first."""
        self._began: float | None = None
        self._ended = 0.0

    def on_output(self, request: Generation, new: list[int]) -> None:
        now = time.perf_counter()
        if request.index not in self.yields:  # the prompt's last row
            self.yields[request.index] = []
            self._began = now if self._began is None else self._began
        else:
            self.yields[request.index].append(len(new))
            self._ended = now

    @property
    def counts(self) -> list[int]:
        """Of all requests: the yield of every decode window."""
        return [count for counts in self.yields.values() for count in counts]

    @property
    def mean_acceptance_length(self) -> float:
        """Output tokens per decode window: accepted drafts and the bonus token."""
        return sum(self.counts) / len(self.counts)

    def acceptance_per_position(self, max_query_len: int) -> list[float]:
        """Share of all decode windows that accepted their first, second, ... (max_query_len - 1)-th draft.

        A window that offered fewer drafts counts as not accepting the rest, so 1 + the sum is the mean acceptance
        length.
        """
        counts = self.counts
        return [sum(count > position for count in counts) / len(counts) for position in range(1, max_query_len)]

    @property
    def forwards_per_token(self) -> float:
        """Decode windows per token of output, the first token (which the prompt's last row gave) included."""
        return len(self.counts) / (sum(self.counts) + len(self.yields))

    @property
    def tokens_per_second(self) -> float:
        """Of the decode windows, from the first output of any request to the last of all; 0 without any."""
        return sum(self.counts) / (self._ended - self._began) if self.counts and self._began is not None else 0.0


def main(argv: Sequence[str] | None = None) -> None:
    """Prints a line a prompt and the mean over all windows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--drafter", choices=KINDS, default="ngram")
    parser.add_argument("--prompts", type=int, default=24)
    parser.add_argument("--max-bytes", type=int, default=256)
    parser.add_argument("--window", type=int, default=8)
    parser.add_argument("--policy", choices=("eager", "deferred", "ring"), default="ring")
    options = parser.parse_args(argv)
    torch.set_num_threads(1)  # matrices this small gain nothing from a second thread
    folder = Path(__file__).parent
    model, prompts = load_model(folder / "weights"), load_prompts(folder)[: options.prompts]
    everything = Statistics()
    manager = make_manager(model, len(prompts), options.window, options.policy)
    drafter = drafter_maker(options.drafter, folder / "weights")(manager)
    decode(model, manager, [prompt for _, prompt in prompts], options.max_bytes, drafter, everything)
    for index, counts in sorted(everything.yields.items()):
        print(f"{sum(counts) / len(counts):5.2f}  {index:2} {prompts[index][0]}")
    print(
        f"{everything.mean_acceptance_length:5.2f}  tokens per window over all {len(everything.counts)} windows, "
        f"{everything.forwards_per_token:.3f} target forwards per token"
    )


if __name__ == "__main__":
    main()
