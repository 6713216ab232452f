"""Real traffic, scaled down, in executing mode: no state differs, with preemption and prefix hits really happening.

Of Mooncake's conversation trace where SPECSTATE_TRACES names the folder that it lies in, else of requests fitted to it.
Here 30 requests. All of the first 300, by hand, some minutes for each policy:

    specstate simulate --trace mooncake_conversation.jsonl --limit 300 --length-factor 0.03125 --scale-blocks \\
        --preset kimi-k3 --tp 8 --max-query-len 4 --record-capacity 8 --max-requests 8 --num-checkpoints 96 \\
        --kv-tokens 3000 --token-budget 64 --prefill rows --cache-outputs --length-share 0.2 --cancel-share 0.05 \\
        --cancel-mean-ms 60000 --execute reference --policy ring
"""

import json
import os
from pathlib import Path

import pytest

from specstate.cli import main
from specstate.scheduler.synthetic import SyntheticWorkload

SCALED = [
    *("--limit", "30", "--length-factor", "0.015625", "--scale-blocks", "--preset", "kimi-k3", "--tp", "8"),
    *("--max-query-len", "4", "--record-capacity", "8", "--max-requests", "8", "--num-checkpoints", "24"),
    *("--kv-tokens", "600", "--token-budget", "256", "--cache-outputs", "--length-share", "0.2"),
    *("--cancel-share", "0.1", "--cancel-mean-ms", "30000", "--execute", "reference", "--json"),
]


@pytest.fixture(scope="module")
def requests(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A file of requests at their full lengths."""
    if "SPECSTATE_TRACES" in os.environ:
        return str(Path(os.environ["SPECSTATE_TRACES"]) / "mooncake_conversation.jsonl")
    path = tmp_path_factory.mktemp("requests") / "synthetic.jsonl"
    workload = SyntheticWorkload(num_requests=30, requests_per_s=20.0)
    path.write_text("".join(request.to_json_line() + "\n" for request in workload.requests()))
    return str(path)


@pytest.mark.parametrize(
    ("policy", "more"),
    [
        ("eager", []),
        ("deferred", ["--preemption", "retract", "--async-depth", "2"]),
        ("ring", []),
    ],
)
def test_thirty_requests_agree_with_the_oracle(
    capsys: pytest.CaptureFixture[str], requests: str, policy: str, more: list[str]
) -> None:
    assert main(["simulate", "--trace", requests, *SCALED, "--policy", policy, *more]) == 0
    captured = capsys.readouterr()
    assert captured.err.startswith("agrees with the oracle: ")
    report = json.loads(captured.out)
    assert report["requests"] == 30
    assert report["finished"] >= 24
    assert min(report["preemptions"], report["prefix_hits"]) > 0
    assert report["windows"]["ended"] > 50
