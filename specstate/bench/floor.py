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


def step_bytes(config: StateConfig, pending: Sequence[int], folded: Sequence[int]) -> dict[str, int]:
    """The table above for rows with ``pending`` records at verify, of which the step's end folds ``folded``."""
    spec, layers, rows = config.layer, config.num_layers, len(pending)
    heads, k_dim, v_dim = spec.num_heads, spec.head_k_dim, spec.head_v_dim
    activation = DTYPE_BYTES[config.activation_dtype]
    state = heads * v_dim * k_dim * DTYPE_BYTES[config.checkpoint_dtype]
    record = heads * (4 * v_dim + 2 * k_dim * activation + 4)
    tokens, history = rows * config.max_query_len, spec.conv_history_len
    channel = spec.conv_channels * activation
    in_verify = sum(count > 0 for count in pending) if config.folds_in_verify else 0
    at_end = sum(count > 0 for count in folded)
    conv = 1 if history else 0
    weights = heads + heads * k_dim + conv * spec.conv_channels * (history + 1)
    control = rows * (
        2 * at.STAGED_COLUMNS + 4 * at.CURSOR_COLUMNS + 2 * at.ROW_COLUMNS + 2 * at.PLAN_COLUMNS + 2
    ) + 2 * (rows + 1)
    return {
        "state_read": layers * (rows + at_end) * state,
        "state_written": layers * (in_verify + at_end) * state,
        "records_read": layers * (sum(pending) + sum(folded)) * record,
        "records_written": layers * tokens * record,
        "conv_ring_read": layers * (rows + at_end) * history * channel,
        "conv_ring_written": layers * conv * tokens * channel,
        "conv_history_written": layers * (in_verify + at_end) * history * channel,
        "inputs": layers * tokens * (spec.conv_channels + heads * k_dim + heads) * activation,
        "outputs": layers * tokens * heads * v_dim * activation,
        "parameters": layers * weights * PARAMETER_BYTES,
        "control": 4 * (control + tokens),
    }


class Rings:
    """How many records some rows have pending, step after step: the fold timing of the contract, on the host."""

    def __init__(self, config: StateConfig, rows: int) -> None:
        self._config = config
        self.pending = [0] * rows
        self.committed = [0] * rows
        self.folds = 0
        """Rows folded, by verify or by the end of a step."""

    def step(self, accepted: Sequence[int]) -> tuple[list[int], list[int]]:
        """Ends a step; what was pending at its verify, and what its end folded, by row."""
        config, before, folded = self._config, self.pending, []
        after = []
        for pending, count in zip(before, accepted, strict=True):
            if config.folds_in_verify and pending:
                self.folds += 1
                pending = 0
            total = pending + count
            full = config.folds_when_full and total + config.max_query_len > config.record_capacity
            fold = total if config.folds_at_end or full else 0
            self.folds += fold > 0
            folded.append(fold)
            after.append(total - fold)
        self.committed = [length + count for length, count in zip(self.committed, accepted, strict=True)]
        self.pending = after
        return before, folded
