"""SlotPool against a set, under any order of allocate and free."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specstate import CapacityError, SpecStateError
from specstate.slots import SlotPool


@given(
    first=st.sampled_from([0, 1, 5]),
    count=st.integers(1, 6),
    moves=st.lists(st.one_of(st.none(), st.integers(-1, 12)), max_size=40),
)
def test_slots_are_conserved(first: int, count: int, moves: list[int | None]) -> None:
    """A move is None for allocate, or the slot to free."""
    pool, taken = SlotPool("slot", first, count), set()
    for move in moves:
        if move is None and len(taken) < count:
            slot = pool.allocate()
            assert first <= slot < first + count
            assert slot not in taken
            taken.add(slot)
        elif move is None:
            with pytest.raises(CapacityError, match=f"no free slot: all {count} are taken"):
                pool.allocate()
        elif move in taken:
            pool.free(move)
            taken.remove(move)
        else:
            with pytest.raises(SpecStateError, match=f"slot {move} is freed but not taken"):
                pool.free(move)
        assert pool.taken == taken
        assert pool.num_free == count - len(taken)
        pool.check_integrity()


def test_slots_come_in_order_and_the_last_freed_first() -> None:
    pool = SlotPool("slot", 1, 4)
    assert [pool.allocate() for _ in range(4)] == [1, 2, 3, 4]
    pool.free(2)
    pool.free(4)
    assert [pool.allocate(), pool.allocate()] == [4, 2]


@pytest.mark.parametrize(
    "corrupt",
    [
        pytest.param(lambda pool: pool._free.append(1), id="free and taken"),
        pytest.param(lambda pool: pool._free.append(3), id="free twice"),
        pytest.param(lambda pool: pool._free.pop(), id="lost from the free"),
        pytest.param(lambda pool: pool._taken.remove(1), id="lost from the taken"),
        pytest.param(lambda pool: pool._taken.add(0), id="the null slot taken"),
        pytest.param(lambda pool: pool._free.append(9), id="a slot of no pool"),
    ],
)
def test_integrity_names_both_sides(corrupt: object) -> None:
    pool = SlotPool("slot", 1, 3)
    pool.allocate()
    pool.check_integrity()
    corrupt(pool)
    with pytest.raises(SpecStateError, match=r"slots free and taken are .*, the pool has \[1, 2, 3\]"):
        pool.check_integrity()
