"""docs/simulate.md says what the command does."""

import argparse
import contextlib
import io
import re
import shlex
from pathlib import Path

import pytest

from specstate.cli import build_parser
from specstate.scheduler.cost import CostLine, preset_cost

GUIDE = (Path(__file__).parents[2] / "docs" / "simulate.md").read_text()


def simulate_options() -> set[str]:
    commands = next(each for each in build_parser()._actions if isinstance(each, argparse._SubParsersAction))
    return {option for action in commands.choices["simulate"]._actions for option in action.option_strings}


def test_every_option_in_the_guide_exists() -> None:
    named = set(re.findall(r"--[a-z][a-z-]+", GUIDE))
    assert len(named) > 30
    assert named <= simulate_options()


def test_the_commands_parse() -> None:
    lines = "".join(re.findall(r"^```sh\n(.*?)^```", GUIDE, re.MULTILINE | re.DOTALL)).replace("\\\n", " ").splitlines()
    assert len(lines) == 4
    for line in lines:
        words = shlex.split(line.partition(">")[0])
        assert words[0] == "specstate"
        assert build_parser().parse_args(words[1:]).command == words[1]


def test_the_python_block_runs() -> None:
    [block] = re.findall(r"^```python\n(.*?)^```", GUIDE, re.MULTILINE | re.DOTALL)
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        exec(compile(block, "docs/simulate.md", "exec"), {})
    assert re.fullmatch(r"[0-9]+ tokens in [0-9]+ s\n", printed.getvalue())


def test_the_cost_file_is_one_and_the_defaults_are_those_of_the_table() -> None:
    [block] = re.findall(r"^```json\n(.*?)^```", GUIDE, re.MULTILINE | re.DOTALL)
    assert CostLine.model_validate_json(block).host_ms == 0.5
    rows = {
        row.split("|")[1].strip().strip("`"): row.split("|")[3:5] for row in GUIDE.splitlines() if row.startswith("| `")
    }
    for column, cost in enumerate((preset_cost("kimi-k3", 8), preset_cost("kimi-linear-48b", 1))):
        for name in ("step_ms", "ms_per_token", "ms_per_context_token", "prefill_tokens_per_s"):
            shown = float(rows[name][column].split(":")[-1].replace(",", ""))
            assert shown == pytest.approx(getattr(cost, name), rel=0.03)
