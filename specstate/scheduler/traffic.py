"""The bytes that a step's state management moves: the table of bench/floor.py for rows of any length, and snapshots'.

B rows, n tokens, as there.
"""

from dataclasses import dataclass
from typing import NamedTuple

from specstate.bench.floor import (
    CONTROL_BYTES_PER_ROW,
    CONTROL_BYTES_PER_STEP,
    CONTROL_BYTES_PER_TOKEN,
    Sizes,
)
from specstate.config import StateConfig


class Work(NamedTuple):
    """What one step asks of a state manager, summed over its rows. Means over steps need not be whole numbers."""

    rows: float
    """B, windows."""
    tokens: float
    """n, of all windows."""
    pending: float = 0.0
    """Records that verify reads."""
    verify_folds: float = 0.0
    """Rows that verify folds."""
    end_folds: float = 0.0
    """Rows that the end of the step folds."""
    folded: float = 0.0
    """Records that the end of the step folds."""


@dataclass(frozen=True, slots=True)
class Traffic:
    """Bytes by what they are in proportion to, of one config; every layer counted."""

    layers: int
    per_row: float
    per_token: float
    per_record: float
    per_verify_fold: float
    per_end_fold: float
    per_step: float
    checkpoint_bytes: int
    """A recurrent state with its conv history, in all layers."""

    def step_bytes(self, work: Work) -> float:
        """Of a step, read and written. For full windows the sum of ``bench.floor.step_bytes``."""
        return (
            self.per_step
            + self.per_row * work.rows
            + self.per_token * work.tokens
            + self.per_record * (work.pending + work.folded)
            + self.per_verify_fold * work.verify_folds
            + self.per_end_fold * work.end_folds
        )


def fold_traffic(config: StateConfig) -> Traffic:
    """Of checkpoints and records, under the config's policy."""
    layers, sizes = config.num_layers, Sizes(config)
    checkpoint = layers * (sizes.state + sizes.history)
    return Traffic(
        layers=layers,
        per_row=checkpoint + CONTROL_BYTES_PER_ROW,
        per_token=layers * (sizes.record + sizes.conv_input + sizes.inputs + sizes.outputs) + CONTROL_BYTES_PER_TOKEN,
        per_record=layers * sizes.record,
        per_verify_fold=checkpoint,
        per_end_fold=2 * checkpoint,
        per_step=layers * sizes.parameters + CONTROL_BYTES_PER_STEP,
        checkpoint_bytes=checkpoint,
    )


def snapshot_traffic(config: StateConfig) -> Traffic:
    """Of a state for every token of the window: one read a row, one written a token, nothing to fold."""
    layers, sizes = config.num_layers, Sizes(config)
    checkpoint = layers * (sizes.state + sizes.history)
    return Traffic(
        layers=layers,
        per_row=checkpoint,
        per_token=layers * (sizes.state + sizes.conv_input + sizes.inputs + sizes.outputs),
        per_record=0.0,
        per_verify_fold=0.0,
        per_end_fold=0.0,
        per_step=layers * sizes.parameters,
        checkpoint_bytes=checkpoint,
    )
