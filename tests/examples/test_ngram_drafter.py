"""The n-gram drafter against a search through the whole text."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ngram_drafter import NgramTable

texts = st.lists(st.integers(0, 3), max_size=40)


def search(text: list[int], n: int, max_order: int, min_order: int) -> list[int]:
    """What `propose` promises: the follower of the longest known suffix of text and drafts; last occurrence wins."""
    drafts: list[int] = []
    while len(drafts) < n:
        whole = text + drafts
        token = None
        for order in range(min(max_order, len(whole)), min_order - 1, -1):
            suffix = whole[len(whole) - order :]
            places = [i for i in range(len(text) - order) if text[i : i + order] == suffix]
            if places:
                token = text[places[-1] + order]
                break
        if token is None:
            break
        drafts.append(token)
    return drafts


@given(text=texts, n=st.integers(0, 7), min_order=st.integers(1, 3), more=st.integers(0, 4))
def test_propose_follows_the_longest_suffix(text: list[int], n: int, min_order: int, more: int) -> None:
    table = NgramTable(text, max_order=min_order + more, min_order=min_order)
    assert table.propose(n) == search(text, n, min_order + more, min_order)


@given(text=texts, cut=st.integers(0, 40))
def test_text_may_come_in_pieces(text: list[int], cut: int) -> None:
    table = NgramTable(text[:cut])
    table.propose(3)
    table.extend(text[cut:])
    assert table.num_tokens == len(text)
    assert table.propose(7) == NgramTable(text).propose(7)


def test_nothing_known_nothing_proposed() -> None:
    assert NgramTable().propose(7) == []
    assert NgramTable([1, 2, 3]).propose(7) == []


def test_draft_runs_on_past_the_end_of_the_text() -> None:
    assert NgramTable(b"ababab").propose(5) == list(b"ababa")


def test_most_recent_follower_wins() -> None:
    assert NgramTable(b"ab1 ab2 ab", max_order=2).propose(1) == list(b"2")


@pytest.mark.parametrize(("max_order", "min_order"), [(2, 3), (2, 0)])
def test_orders_are_checked(max_order: int, min_order: int) -> None:
    with pytest.raises(ValueError, match=f"min_order = {min_order}"):
        NgramTable(max_order=max_order, min_order=min_order)
