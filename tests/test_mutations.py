"""The table of mutations fits the source, and its runner tells a dead mutant from a live one.

The whole check takes minutes: python -m tests.mutations.
"""

from pathlib import Path

import pytest

from tests.mutations import MUTATIONS, ROOT, Mutation, check, main


def test_every_mutation_applies() -> None:
    assert len(MUTATIONS) >= 10
    assert len({str(mutation) for mutation in MUTATIONS}) == len(MUTATIONS)
    for mutation in MUTATIONS:
        source = (ROOT / mutation.file).read_text(encoding="utf-8")
        assert source.count(mutation.text) == 1, f"{mutation}: {mutation.text!r} has moved"
        assert (ROOT / mutation.tests[0]).is_file()
        if mutation.file.startswith("specstate/manager/"):
            compile(source.replace(mutation.text, mutation.replacement), mutation.file, "exec")


def test_rules_of_every_kind_have_one() -> None:
    assert {mutation.rule for mutation in MUTATIONS} >= {1, 2, 3, 4, 5, 7, 8, 9, 11, 12}
    assert sum(Path(mutation.file).name.startswith("triton_") for mutation in MUTATIONS) >= 2


def test_the_check_tells_the_dead_from_the_living(capsys: pytest.CaptureFixture[str]) -> None:
    """One guard of the table, the same one with nothing removed, and what no test could judge."""
    slots = "specstate/slots.py"
    [guard] = [mutation for mutation in MUTATIONS if mutation.file == slots]
    words = {
        guard: "killed",
        Mutation(9, "nothing", slots, guard.text, guard.text, guard.tests): "SURVIVES",
        Mutation(9, "no such text", slots, "no such text", "", guard.tests): "NOT APPLIED",
        Mutation(9, "what does not load", slots, guard.text, "if if:", guard.tests): "BROKEN",
        Mutation(9, "no such test", slots, guard.text, "if 0:", ("tests/test_slots.py", "-k", "nothing")): "NO TEST",
    }
    before = (ROOT / slots).read_bytes()
    outcomes = check(tuple(words))
    assert {mutation: what.split(":")[0] for mutation, what in outcomes.items()} == words
    assert (ROOT / slots).read_bytes() == before
    assert capsys.readouterr().out.count("rule  9") == len(words)


def test_an_unknown_word_picks_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["no such guard"]) == 2
    assert "no such guard" in capsys.readouterr().err
