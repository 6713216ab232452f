"""StepMetadata: what its columns accept, what they refuse and how the message names it."""

from typing import Any

import pytest
from pydantic import ValidationError

from specstate import Handle, StepMetadata

A, B, C = Handle("a", 0, 1), Handle("b", 1, 2), Handle("c", 2, 3)


def make(**changes: Any) -> StepMetadata:
    return StepMetadata(**{"handles": (A, B, C), "query_lens": (1, 4, 2), **changes})


def test_defaults_are_left_open() -> None:
    metadata = make()
    assert metadata.handles == (A, B, C)
    assert (metadata.row_kinds, metadata.min_accepted, metadata.batch_index) == (None, None, None)


@pytest.mark.parametrize(
    "columns",
    [
        pytest.param({"handles": (), "query_lens": ()}, id="no rows"),
        pytest.param(
            {"handles": (), "query_lens": (), "row_kinds": (), "batch_index": ()}, id="no rows, empty columns"
        ),
        pytest.param({"row_kinds": ("decode", "prompt", "decode")}, id="a prompt"),
        pytest.param({"handles": (A, None, C), "row_kinds": ("decode", "dummy", "prompt")}, id="a dummy"),
        pytest.param({"handles": (None,) * 3, "row_kinds": ("dummy",) * 3}, id="dummies alone"),
        pytest.param({"min_accepted": (1, 4, 2)}, id="min_accepted at query_len"),
        pytest.param(
            {"min_accepted": (1, 4, 1), "row_kinds": ("prompt", "prompt", "decode")}, id="min_accepted of prompts"
        ),
        pytest.param({"batch_index": (7, 0, 3)}, id="batch_index out of order"),
        pytest.param(
            {"handles": (A, None, C), "row_kinds": ("decode", "dummy", "decode"), "batch_index": (0, 0, 1)},
            id="batch_index of a dummy is not read",
        ),
        pytest.param(
            {"handles": (A, None, C), "row_kinds": ("decode", "dummy", "decode"), "min_accepted": (1, -5, 1)},
            id="min_accepted of a dummy is not read",
        ),
        pytest.param({"handles": (A, A, A)}, id="a request twice, which begin_step refuses"),
    ],
)
def test_accepts(columns: dict[str, Any]) -> None:
    metadata = make(**columns)
    for name, value in columns.items():
        assert getattr(metadata, name) == value


@pytest.mark.parametrize(
    ("columns", "words"),
    [
        pytest.param({"query_lens": (1, 0, 2)}, ("query_lens", "1", "greater than or equal to 1"), id="query_len zero"),
        pytest.param({"query_lens": (1, -3, 2)}, ("query_lens", "-3"), id="query_len negative"),
        pytest.param({"query_lens": (1, 2)}, ("query_lens has 2 entries", "handles has 3"), id="query_lens short"),
        pytest.param({"query_lens": (1, 2, 3, 4)}, ("query_lens has 4 entries", "handles has 3"), id="query_lens long"),
        pytest.param({"row_kinds": ("decode",)}, ("row_kinds has 1 entries", "handles has 3"), id="row_kinds short"),
        pytest.param({"min_accepted": (1,)}, ("min_accepted has 1 entries", "handles has 3"), id="min_accepted short"),
        pytest.param({"batch_index": ()}, ("batch_index has 0 entries", "handles has 3"), id="batch_index empty"),
        pytest.param(
            {"row_kinds": ("decode", "draft", "decode")}, ("row_kinds", "draft", "'prompt'"), id="kind unknown"
        ),
        pytest.param(
            {"row_kinds": ("decode", "dummy", "decode")},
            ("handles[1]", "'b'", "must be None", "dummy"),
            id="dummy with a handle",
        ),
        pytest.param({"handles": (A, None, C)}, ("handles[1]", "None", "'decode'"), id="handle left out"),
        pytest.param(
            {"handles": (A, None, C), "row_kinds": ("decode", "prompt", "decode")},
            ("handles[1]", "None", "'prompt'"),
            id="prompt without a handle",
        ),
        pytest.param(
            {"min_accepted": (1, 0, 1)}, ("min_accepted[1] = 0", "1..query_lens[1] = 4"), id="min_accepted zero"
        ),
        pytest.param(
            {"min_accepted": (1, 5, 1)}, ("min_accepted[1] = 5", "1..query_lens[1] = 4"), id="min_accepted above"
        ),
        pytest.param(
            {"min_accepted": (1, 3, 1), "row_kinds": ("decode", "prompt", "decode")},
            ("min_accepted[1] = 3", "query_lens[1] = 4", "prompt"),
            id="min_accepted of part of a prompt",
        ),
        pytest.param({"batch_index": (0, -1, 2)}, ("batch_index[1] = -1", "negative"), id="batch_index negative"),
        pytest.param({"batch_index": (3, 1, 3)}, ("batch_index[2] = 3", "row 0"), id="batch_index twice"),
        pytest.param(
            {"batch_index": (0, 2**20, 1)}, ("batch_index[1] = 1048576", "below 1048576"), id="batch_index too large"
        ),
        pytest.param({"batch_index": (0, 2**31, 1)}, ("batch_index", "2147483647"), id="batch_index beyond int32"),
        pytest.param({"min_accepted": (1, 10**40, 1)}, ("min_accepted", "2147483647"), id="min_accepted beyond int32"),
        pytest.param({"query_lens": [1, 4, 2]}, ("query_lens", "tuple"), id="a list"),
        pytest.param({"query_lens": (1, 4.0, 2)}, ("query_lens", "1", "integer"), id="a float"),
        pytest.param({"query_lens": (1, "4", 2)}, ("query_lens", "1", "integer"), id="a string"),
        pytest.param({"query_lens": (True, 4, 2)}, ("query_lens", "0", "integer"), id="a bool"),
        pytest.param({"handles": (A, "b", C)}, ("handles", "1", "Handle"), id="an id for a handle"),
        pytest.param({"handles": A}, ("handles", "tuple"), id="a handle alone"),
        pytest.param({"handles": None}, ("handles", "tuple"), id="handles None"),
        pytest.param({"rows": 3}, ("rows", "not permitted"), id="an unknown column"),
    ],
)
def test_refuses(columns: dict[str, Any], words: tuple[str, ...]) -> None:
    with pytest.raises(ValidationError) as caught:
        make(**columns)
    assert [word for word in words if word not in str(caught.value)] == []


def test_is_frozen() -> None:
    with pytest.raises(ValidationError, match="frozen"):
        make().query_lens = (1, 1, 1)


def test_a_handle_is_frozen_and_compares_by_value() -> None:
    assert Handle("a", 0, 1) == A != Handle("a", 0, 2)
    with pytest.raises(AttributeError):
        A.generation = 2  # type: ignore[misc]
