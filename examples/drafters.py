"""The kinds of drafters, by name."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch

from decode import Drafter, make_manager
from model import load_model
from model_drafter import ModelDrafter
from ngram_drafter import NgramDrafter
from specstate import StateManager

KINDS = ("ngram", "model")
MakeDrafter = Callable[[StateManager], Drafter]
"""Makes a drafter for the requests of a target's manager."""


def drafter_maker(kind: str, weights: Path, dtype: torch.dtype = torch.float32) -> MakeDrafter:
    """Of "ngram" or "model". The draft model is read from `weights / "drafter"`, once for all drafters, to a CPU."""
    if kind == "ngram":
        return lambda target: NgramDrafter()
    model = load_model(weights / "drafter", dtype)

    def make(target: StateManager) -> ModelDrafter:
        config = target.config
        return ModelDrafter(model, make_manager(model, config.max_requests, config.max_query_len, config.fold_policy))

    return make
