"""The README, the CI script and the package metadata say the same thing."""

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import specstate
from specstate.cli import main

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
README = (ROOT / "README.md").read_text()


def readme_block(heading: str, language: str) -> str:
    """The first fenced block of a language in the section under ``## heading``."""
    section = re.search(rf"^## {re.escape(heading)}\n(.*?)(?=^## |\Z)", README, re.MULTILINE | re.DOTALL)
    assert section is not None, heading
    block = re.search(rf"^```{language}\n(.*?)^```", section.group(1), re.MULTILINE | re.DOTALL)
    assert block is not None, heading
    return block.group(1)


def ci_command(checkout: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["bash", str(checkout / ".ci" / "run"), "--print"], capture_output=True, text=True, timeout=60, check=False
    )


def test_ci_runs_the_test_command_of_the_readme() -> None:
    assert ci_command(ROOT).stdout == readme_block("Tests", "sh")
    assert os.access(ROOT / ".ci" / "run", os.X_OK)


def test_ci_follows_the_readme_and_fails_without_a_command(tmp_path: Path) -> None:
    (tmp_path / ".ci").mkdir()
    (tmp_path / ".ci" / "run").write_text((ROOT / ".ci" / "run").read_text())
    readme = tmp_path / "README.md"
    readme.write_text("# x\n\n## Use\n\n```sh\nfirst\n```\n\n## Tests\n\n```sh\nsecond\n```\n\n```sh\nthird\n```\n")
    assert ci_command(tmp_path).stdout == "second\n"
    readme.write_text("# x\n\n## Tests\n\nNone.\n\n## Other\n\n```sh\nother\n```\n")
    assert ci_command(tmp_path).returncode == 1


def test_the_test_command_lints_checks_types_and_measures_coverage_before_the_last_summary() -> None:
    steps = readme_block("Tests", "sh").strip().split(" && ")
    assert steps[0] == "pip install -c constraints.txt -e '.[test]'"
    assert steps[1:3] == ["ruff check .", "mypy"]
    assert steps[-1] == "pytest --cov -n auto"
    tool = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]
    assert tool["coverage"]["run"]["source"] == tool["mypy"]["files"] == ["specstate"]
    assert tool["coverage"]["report"]["fail_under"] >= 80


def test_the_first_command_ends_in_the_demo() -> None:
    first = re.search(r"^```sh\n(.*?)^```", README, re.MULTILINE | re.DOTALL)
    assert first is not None
    steps = first.group(1).strip().split(" && ")
    assert steps[0] == "pip install -c constraints.txt -e '.[demo]'"
    assert steps[-1] == "specstate demo"


def test_core_dependencies_and_extras() -> None:
    assert PROJECT["dependencies"][:2] == ["torch>=2.11", "triton>=3.6; platform_system == 'Linux'"]
    names = [re.split(r"[><=;\[]", requirement)[0] for requirement in PROJECT["dependencies"]]
    assert names == ["torch", "triton", "pydantic"]
    assert set(PROJECT["optional-dependencies"]) == {
        "test",
        "demo",
        "cli",
        "prometheus",
        "transfer",
        "peer",
        "plot",
        "progress",
    }
    assert PROJECT["optional-dependencies"]["transfer"][0] == "safetensors>=0.4"
    assert PROJECT["optional-dependencies"]["demo"] == ["specstate[transfer]"]
    assert "specstate[demo,cli,prometheus,peer,plot,progress]" in PROJECT["optional-dependencies"]["test"]
    assert PROJECT["optional-dependencies"]["peer"] == ["fla-core>=0.6", "einops>=0.7"]
    assert PROJECT["requires-python"] == ">=3.11"
    assert PROJECT["scripts"] == {"specstate": "specstate.cli:main"}


def test_constraints_pin_what_ci_runs_with() -> None:
    # The oracle of the kernel tests and the build backend among them.
    pins = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if not line.startswith("#")]
    assert {"torch==2.13.0", "triton==3.7.1", "fla-core==0.6.0"} <= set(pins)
    tests = [re.split(r"[><=;\[]", name)[0] for name in PROJECT["optional-dependencies"]["test"]]
    pinned = {pin.partition("==")[0] for pin in pins}
    assert {*tests, "hatchling"} - {"specstate"} <= pinned
    assert all(re.fullmatch(r"[a-z0-9-]+==[0-9.]+", pin) for pin in pins)


def test_the_package_is_typed_and_licensed() -> None:
    assert (Path(specstate.__file__).parent / "py.typed").is_file()
    assert PROJECT["license"] == "Apache-2.0"
    assert "Version 2.0, January 2004" in (ROOT / "LICENSE").read_text()


@pytest.mark.parametrize("command", ["demo", "plan", "replay", "bench", "doctor"])
def test_the_readme_names_each_command(command: str) -> None:
    assert f"specstate {command}" in README


def test_every_python_block_of_the_readme_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """In one go, as they build on one another; then the trace that they leave behind is replayed."""
    blocks = re.findall(r"^```python\n(.*?)^```", README, re.MULTILINE | re.DOTALL)
    assert len(blocks) == 4
    script = tmp_path / "example.py"
    script.write_text("\n".join(blocks))
    ended = subprocess.run(
        [sys.executable, str(script)], cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False
    )
    assert ended.returncode == 0, ended.stderr
    counts = re.fullmatch(r"accepted of a and b: (\d+) (\d+)\nc stands at 11\n", ended.stdout)
    assert counts is not None, ended.stdout
    assert 1 <= int(counts.group(1)) <= 4
    assert int(counts.group(2)) == 1

    assert readme_block("Traces", "sh") == "specstate replay trace.jsonl\n"
    assert main(["replay", str(tmp_path / "trace.jsonl")]) == 0
    assert capsys.readouterr().out == "3 events replayed, no difference\n"


def test_every_python_block_of_the_lifecycle_runs(tmp_path: Path) -> None:
    blocks = re.findall(r"^```python\n(.*?)^```", (ROOT / "docs/lifecycle.md").read_text(), re.MULTILINE | re.DOTALL)
    script = tmp_path / "example.py"
    script.write_text("\n".join(blocks))
    ended = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=300, check=False)
    assert ended.returncode == 0, ended.stderr
    block, *rest = ended.stdout.splitlines()
    kept, running = map(int, re.fullmatch(r"block 0 is in slot (\d+) and c runs in slot (\d+)", block).groups())
    assert kept != running
    assert rest == ["shared stands at 8", "moved to 4", "recovered a"]


def test_links_of_the_documents_lead_somewhere() -> None:
    for document in (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md")):
        for target in re.findall(r"\]\(([^)#:]+)\)", document.read_text()):
            assert (document.parent / target).is_file(), f"{document.name}: {target}"


def test_the_readme_table_is_what_plan_prints(capsys: pytest.CaptureFixture[str]) -> None:
    command = "plan --preset kimi-k3 --tp 8 --max-query-len 8 --memory-gib 80"
    assert f"specstate {command}" in README
    assert main(command.split()) == 0
    assert readme_block("Bytes", "text") == capsys.readouterr().out
