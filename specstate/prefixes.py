"""Published states: checkpoints under the tokens that led to them, shared by copying, evicted when slots run short."""

import hashlib
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from specstate.errors import SpecStateError, shown
from specstate.limits import INT64_MAX, MAX_COMMITTED_LEN


@dataclass(frozen=True, slots=True)
class PrefixKey:
    """Names a prefix of tokens: a digest of your own and how many tokens it stands for.

    Raises SpecStateError when the digest is no string of at least one character, or the count outside
    1..MAX_COMMITTED_LEN.
    """

    digest: str
    num_tokens: int

    def __post_init__(self) -> None:
        if not isinstance(self.digest, str) or not self.digest:
            raise SpecStateError(f"PrefixKey: digest = {shown(self.digest)} must be a string, not empty")
        try:
            self.digest.encode()
        except UnicodeEncodeError:
            raise SpecStateError(f"PrefixKey: digest {self.digest!r} cannot be written as UTF-8") from None
        if type(self.num_tokens) is not int or not 1 <= self.num_tokens <= MAX_COMMITTED_LEN:
            raise SpecStateError(f"PrefixKey: num_tokens = {shown(self.num_tokens)} is outside 1..{MAX_COMMITTED_LEN}")

    @classmethod
    def of(cls, tokens: "PrefixKey | Sequence[int]") -> "PrefixKey":
        """The key of token ids, by 128 bits of SHA-256 over them as int64; of a key the key itself.

        Raises SpecStateError when it is no sequence of integers within int64; of a tensor take ``tolist()``.
        """
        if isinstance(tokens, PrefixKey):
            return tokens
        if not isinstance(tokens, Sequence) or isinstance(tokens, str | bytes | bytearray | memoryview):
            raise SpecStateError(f"tokens must be a PrefixKey or a list of token ids, not {type(tokens).__name__}")
        if {*map(type, tokens)} - {int} or (tokens and not -INT64_MAX <= min(tokens) <= max(tokens) <= INT64_MAX):
            raise SpecStateError("tokens must be integers within int64")
        return cls(hashlib.sha256(array("q", tokens)).hexdigest()[:32], len(tokens))


@dataclass(slots=True, eq=False)
class Prefix:
    """A published state and the checkpoint slot that is its own."""

    key: PrefixKey
    checkpoint_slot: int
    num_users: int = 0
    """Requests restored from it that have not ended."""


class PrefixTable:
    """The published prefixes by key. Those that no request uses can be evicted, the one used longest ago first."""

    def __init__(self) -> None:
        self._used: dict[PrefixKey, Prefix] = {}
        self._idle: dict[PrefixKey, Prefix] = {}  # in the order of their last use
        self.hits = self.misses = self.evictions = 0

    def __len__(self) -> int:
        return len(self._used) + len(self._idle)

    def __iter__(self) -> Iterator[Prefix]:
        """Those in use, then the others, longest unused first."""
        yield from self._used.values()
        yield from self._idle.values()

    def __contains__(self, key: PrefixKey) -> bool:
        return key in self._used or key in self._idle

    @property
    def num_evictable(self) -> int:
        return len(self._idle)

    def get(self, key: PrefixKey) -> Prefix | None:
        """What is published under ``key``; no use of it."""
        return self._used.get(key) or self._idle.get(key)

    def add(self, key: PrefixKey, checkpoint_slot: int) -> Prefix:
        prefix = self._idle[key] = Prefix(key, checkpoint_slot)
        return prefix

    def touch(self, key: PrefixKey) -> None:
        """It is the last to be evicted from here on."""
        if key in self._idle:
            self._idle[key] = self._idle.pop(key)

    def join(self, prefix: Prefix) -> None:
        """One more request uses it: it is not evicted until all of them have ended."""
        self._idle.pop(prefix.key, None)
        self._used[prefix.key] = prefix
        prefix.num_users += 1

    def leave(self, prefix: Prefix) -> None:
        """A request that used it has ended."""
        prefix.num_users -= 1
        if not prefix.num_users:
            self._idle[prefix.key] = self._used.pop(prefix.key)

    def evict(self) -> int:
        """Forgets the prefix that was used longest ago; its checkpoint slot."""
        key = next(iter(self._idle))
        self.evictions += 1
        return self._idle.pop(key).checkpoint_slot

    def drop(self) -> list[int]:
        """Forgets all of them, which nobody uses; their checkpoint slots."""
        assert not self._used
        slots = [prefix.checkpoint_slot for prefix in self._idle.values()]
        self._idle.clear()
        return slots
