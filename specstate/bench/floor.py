"""The byte floor of a step: everything that it must read and write once, item by item.

One whole step of L layers over B rows with full windows of T tokens, n = B T. Per head K and V; C = H (2 K + V); a, s
and p are the bytes of an activation, of a value of the state and of a parameter (float32: 4). State = H V K s; a record
is H (4 V + 2 K a + 4): u in float32, key and gate, 1/|k|. Row r verifies over m_r pending records and folds f_r at the
step's end (0: it does not fold then); under "deferred", verify itself folds what is pending. D is the number of rows
that verify folds, E of those that the end folds.

| item | bytes a layer |
|---|---|
| state read | (B + E) State: by verify, and by the fold at the end, which is another pass |
| state written | (D + E) State |
| records read | (sum m_r + sum f_r) records |
| records written | n records |
| conv ring read | (B + E) (W - 1) C a: before the window, and the history that the fold at the end writes |
| conv ring written | n C a |
| conv history written | (D + E) (W - 1) C a |
| inputs | n (C + H K + H) a: q|k|v, raw gate, raw beta |
| outputs | n H V a |
| parameters | H p + H K p + C W p: A_log, dt_bias, conv weight |
| control, once a step | 4 (B (2 * staged + 4 * cursor + 2 * row + 2 * plan + 2) + 2 (B + 1) + n): see below |

Without a convolution its items are 0 and the parameters have no weight. What passes from one kernel of a layer to the
next (q|k|v after the conv) is no part of the floor: it need not leave the chip. Control counts, of each row, the staged
columns copied in and read, its cursor read and written twice at most (begin reads; the end reads and writes; 4 stands
for three and the generation's check), the row record written and read, the fold plan written and read, the committed
length and the accepted count; query_start_loc copied in and read; a position a token.
"""

from collections.abc import Sequence
from typing import NamedTuple

from specstate.config import StateConfig
from specstate.kernels import rows as at
from specstate.layout import DTYPE_BYTES

#: What `step_bytes` counts, in the order of the table.
ITEMS = (
    "state_read",
    "state_written",
    "records_read",
    "records_written",
    "conv_ring_read",
    "conv_ring_written",
    "conv_history_written",
    "inputs",
    "outputs",
    "parameters",
    "control",
)

PARAMETER_BYTES = 4

# Control, as said above; what counts rows + 1 gives a part to each row and a part to the step.
CONTROL_BYTES_PER_ROW = 4 * (
    2 * at.STAGED_COLUMNS + 4 * at.CURSOR_COLUMNS + 2 * at.ROW_COLUMNS + 2 * at.PLAN_COLUMNS + 2 + 2
)
CONTROL_BYTES_PER_STEP = 4 * 2
CONTROL_BYTES_PER_TOKEN = 4


def step_bytes(config: StateConfig, pending: Sequence[int], folded: Sequence[int]) -> dict[str, int]:
    """The table above for rows with ``pending`` records at verify, of which the step's end folds ``folded``."""
    sizes, layers, rows = Sizes(config), config.num_layers, len(pending)
    tokens = rows * config.max_query_len
    in_verify = sum(count > 0 for count in pending) if config.folds_in_verify else 0
    at_end = sum(count > 0 for count in folded)
    return {
        "state_read": layers * (rows + at_end) * sizes.state,
        "state_written": layers * (in_verify + at_end) * sizes.state,
        "records_read": layers * (sum(pending) + sum(folded)) * sizes.record,
        "records_written": layers * tokens * sizes.record,
        "conv_ring_read": layers * (rows + at_end) * sizes.history,
        "conv_ring_written": layers * tokens * sizes.conv_input,
        "conv_history_written": layers * (in_verify + at_end) * sizes.history,
        "inputs": layers * tokens * sizes.inputs,
        "outputs": layers * tokens * sizes.outputs,
        "parameters": layers * sizes.parameters,
        "control": CONTROL_BYTES_PER_STEP + rows * CONTROL_BYTES_PER_ROW + tokens * CONTROL_BYTES_PER_TOKEN,
    }


class Sizes:
    """What the table multiplies: bytes in one layer."""

    def __init__(self, config: StateConfig) -> None:
        spec = config.layer
        heads, k_dim, v_dim, channels = spec.num_heads, spec.head_k_dim, spec.head_v_dim, spec.conv_channels
        activation = DTYPE_BYTES[config.activation_dtype]
        self.state = heads * v_dim * k_dim * DTYPE_BYTES[config.checkpoint_dtype]
        """A row's."""
        self.history = spec.conv_history_len * channels * activation
        """A row's conv inputs before its window; 0 without a conv."""
        self.record = heads * (4 * v_dim + 2 * k_dim * activation + 4)
        self.conv_input = channels * activation if self.history else 0
        """A token's, kept for the conv."""
        self.inputs = (channels + heads * k_dim + heads) * activation
        """A token's, as all that follow."""
        self.outputs = heads * v_dim * activation
        taps = spec.conv_history_len + 1 if self.history else 0
        self.parameters = (heads + heads * k_dim + channels * taps) * PARAMETER_BYTES


class Folds(NamedTuple):
    """What a step folds of a row."""

    in_verify: bool
    """Its verify folds what is pending."""
    at_end: int
    """Records that the end of the step folds; 0: it does not fold."""
    left: int
    """Records that are pending after it."""


class FoldTiming:
    """When the records of a row are folded, under a config's policy: the fold timing of the contract, on the host."""

    def __init__(self, config: StateConfig) -> None:
        self._in_verify, self._most_pending = config.folds_in_verify, config.most_pending

    def of(self, pending: int, accepted: int) -> Folds:
        """In a step of a row with ``pending`` records at its verify."""
        in_verify = self._in_verify and pending > 0
        total = accepted if in_verify else pending + accepted
        return Folds(in_verify, total, 0) if total > self._most_pending else Folds(in_verify, 0, total)


class Rings:
    """How many records some rows have pending, step after step."""

    def __init__(self, config: StateConfig, rows: int) -> None:
        self._timing = FoldTiming(config)
        self.pending = [0] * rows
        self.committed = [0] * rows
        self.folds = 0
        """Rows folded, by verify or by the end of a step."""

    def step(self, accepted: Sequence[int]) -> tuple[list[int], list[int]]:
        """Ends a step; what was pending at its verify, and what its end folded, by row."""
        before = self.pending
        folds = [self._timing.of(pending, count) for pending, count in zip(before, accepted, strict=True)]
        self.folds += sum(row.in_verify + (row.at_end > 0) for row in folds)
        self.committed = [length + count for length, count in zip(self.committed, accepted, strict=True)]
        self.pending = [row.left for row in folds]
        return before, [row.at_end for row in folds]
