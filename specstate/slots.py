"""Who owns which slot."""

from specstate.errors import CapacityError, SpecStateError


class SlotPool:
    """Numbered slots ``first .. first + count - 1``, each free or taken.

    The slot freed last is handed out first: its memory is the warmest, and a fault that leaves something behind in a
    slot shows at once rather than after a round through the pool.
    """

    def __init__(self, name: str, first: int, count: int) -> None:
        self.name = name
        self._all = range(first, first + count)
        self._free = list(reversed(self._all))
        self._taken: set[int] = set()

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_taken(self) -> int:
        return len(self._taken)

    @property
    def taken(self) -> frozenset[int]:
        return frozenset(self._taken)

    @property
    def order(self) -> list[int]:
        """The free slots, the next to be handed out last."""
        return list(self._free)

    @order.setter
    def order(self, free: list[int]) -> None:
        assert sorted(free) == sorted(self._free)
        self._free = list(free)

    def allocate(self) -> int:
        """A free slot. Raises CapacityError when there is none."""
        if not self._free:
            raise CapacityError(f"no free {self.name}: all {len(self._all)} are taken")
        slot = self._free.pop()
        self._taken.add(slot)
        return slot

    def free(self, slot: int) -> None:
        """Gives ``slot`` back. Raises SpecStateError when nobody holds it."""
        if slot not in self._taken:
            raise SpecStateError(f"{self.name} {slot} is freed but not taken")
        self._taken.remove(slot)
        self._free.append(slot)

    def check_integrity(self) -> None:
        """Every slot is free or taken, once. Raises SpecStateError with both sides."""
        counted = sorted([*self._free, *self._taken])
        if counted != list(self._all):
            raise SpecStateError(f"{self.name}s free and taken are {counted}, the pool has {list(self._all)}")
