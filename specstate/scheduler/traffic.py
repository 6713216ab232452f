"""The bytes that a step's state management moves: the table of bench/floor.py for rows of any length, and snapshots'.

Letters are those of that table: per head K and V, C conv channels, a bytes of an activation; B rows, n tokens.
"""

from dataclasses import dataclass
from typing import NamedTuple

from specstate.bench.floor import PARAMETER_BYTES
from specstate.config import StateConfig
from specstate.kernels import rows as at
from specstate.layout import DTYPE_BYTES


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
    spec, layers = config.layer, config.num_layers
    sizes = _Sizes(config)
    history = spec.conv_history_len * sizes.channel
    conv = 1 if history else 0
    heads, v_dim = spec.num_heads, spec.head_v_dim
    record = heads * (4 * v_dim + 2 * spec.head_k_dim * sizes.activation + 4)
    control = 2 * at.STAGED_COLUMNS + 4 * at.CURSOR_COLUMNS + 2 * at.ROW_COLUMNS + 2 * at.PLAN_COLUMNS + 2
    return Traffic(
        layers=layers,
        per_row=layers * (sizes.state + history) + 4 * (control + 2),
        per_token=layers * (record + conv * sizes.channel + sizes.token) + 4,
        per_record=layers * record,
        per_verify_fold=layers * (sizes.state + history),
        per_end_fold=layers * 2 * (sizes.state + history),
        per_step=layers * sizes.parameters + 8,
        checkpoint_bytes=layers * (sizes.state + history),
    )


def snapshot_traffic(config: StateConfig) -> Traffic:
    """Of a state for every token of the window: one read a row, one written a token, nothing to fold."""
    layers, sizes = config.num_layers, _Sizes(config)
    history = config.layer.conv_history_len * sizes.channel
    return Traffic(
        layers=layers,
        per_row=layers * (sizes.state + history),
        per_token=layers * (sizes.state + (sizes.channel if history else 0) + sizes.token),
        per_record=0.0,
        per_verify_fold=0.0,
        per_end_fold=0.0,
        per_step=layers * sizes.parameters,
        checkpoint_bytes=layers * (sizes.state + history),
    )


class _Sizes:
    """Bytes in one layer."""

    def __init__(self, config: StateConfig) -> None:
        spec = config.layer
        heads, k_dim, v_dim, channels = spec.num_heads, spec.head_k_dim, spec.head_v_dim, spec.conv_channels
        self.activation = DTYPE_BYTES[config.activation_dtype]
        self.state = heads * v_dim * k_dim * DTYPE_BYTES[config.checkpoint_dtype]
        self.channel = channels * self.activation
        """The conv's inputs of one token."""
        self.token = (channels + heads * k_dim + heads + heads * v_dim) * self.activation
        """Inputs and outputs of one token."""
        taps = spec.conv_kernel_size or 0
        self.parameters = (heads + heads * k_dim + channels * taps) * PARAMETER_BYTES
