"""Drafts by looking up what followed the last bytes before (prompt look-up), with no second model."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from decode import Drafter, Generation
from specstate import SamplingParams


class NgramDrafter(Drafter):
    """Keeps an n-gram table of every running request."""

    def __init__(self) -> None:
        self.tables: dict[Generation, NgramTable] = {}

    def admit(self, request: Generation, sampling: SamplingParams | None) -> None:
        self.tables[request] = NgramTable()

    def propose(self, requests: Sequence[Generation], rooms: Sequence[int]) -> list[list[int]]:
        drafts = []
        for request, room in zip(requests, rooms, strict=True):
            table = self.tables[request]
            table.extend(request.tokens[table.num_tokens :])
            drafts.append(table.propose(room))
        return drafts

    def release(self, request: Generation) -> None:
        del self.tables[request]


class NgramTable:
    """Proposes continuations of one growing text from its own past.

    The byte after the longest known suffix, of at most `max_order` and at least `min_order` tokens, is proposed;
    the most recent occurrence wins. Each proposed token joins the suffix for the next one, so a draft may leave the
    passage that it began in. Appending a token and proposing one cost O(max_order), whatever the length of the text.
    """

    def __init__(self, tokens: Iterable[int] = (), max_order: int = 16, min_order: int = 1) -> None:
        if not 1 <= min_order <= max_order:
            raise ValueError(f"min_order = {min_order} must be within 1..max_order = {max_order}")
        self.orders = range(max_order, min_order - 1, -1)
        self._suffix: tuple[int, ...] = ()
        self._followers: dict[tuple[int, ...], int] = {}
        self.num_tokens = 0
        """Length of the text so far."""
        self.extend(tokens)

    def extend(self, tokens: Iterable[int]) -> None:
        """Appends tokens to the text: the prompt at first, then what each window accepted."""
        suffix = self._suffix
        for token in tokens:
            for order in self.orders:
                if order <= len(suffix):
                    self._followers[suffix[-order:]] = token
            suffix = (*suffix, token)[-self.orders.start :]
            self.num_tokens += 1
        self._suffix = suffix

    def propose(self, n: int) -> list[int]:
        """At most `n` draft tokens; fewer where no suffix has occurred before."""
        suffix, drafts = self._suffix, []
        while len(drafts) < n:
            keys = (suffix[-order:] for order in self.orders if order <= len(suffix))
            token = next((self._followers[key] for key in keys if key in self._followers), None)
            if token is None:
                break
            drafts.append(token)
            suffix = (*suffix, token)[-self.orders.start :]
        return drafts
