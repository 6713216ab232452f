"""The held-out prompts that the other examples decode."""

from __future__ import annotations

import json
from pathlib import Path


def load_prompts(folder: Path) -> list[tuple[str, bytes]]:
    """File name and text of each held-out prompt in `prompts.json`."""
    entries = json.loads((folder / "prompts.json").read_text())
    return [(entry["file"], entry["text"].encode()) for entry in entries]
