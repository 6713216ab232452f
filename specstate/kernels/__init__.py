"""Kernels and their launchers. Nothing in here knows the manager, a request or a handle: rows in, tensors out."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

# The layout table reads kernels/rows.py, and a plan needs no torch.
if TYPE_CHECKING:
    import torch

    from specstate.config import StateConfig
    from specstate.kernels.arena import Allocator
    from specstate.kernels.cursors import BlockTable, StepTensors
    from specstate.params import LayerParams
    from specstate.storage import Storage

Sampled = tuple["torch.Tensor", "torch.Tensor", "torch.Tensor", "torch.Tensor"]


class Kernels(Protocol):
    """What a backend launches, bound to one manager's storage and parameters. Arguments have been checked.

    ``step`` is what ``begin`` made; rows that own nothing never fold, move no cursor, and read zero.
    """

    path: str
    params: tuple[LayerParams, ...]

    def __init__(self, config: StateConfig, params: tuple[LayerParams, ...], storage: Storage) -> None: ...

    def bind(self, params: tuple[LayerParams, ...]) -> None:
        """Other parameters from now on."""
        ...

    def warmup(self) -> None:
        """Compiles whatever the config can launch, so that nothing compiles under a graph's capture."""
        ...

    def check_storage(self, where: str) -> None:
        """Raises SpecStateError when the storage no longer lies where the kernels were bound to it."""
        ...

    def begin(
        self,
        staged: torch.Tensor,
        num_rows: int,
        num_tokens: int,
        length: int,
        allocator: Allocator,
        blocks: BlockTable | None = None,
    ) -> StepTensors:
        """The step's rows from ``staged`` int32: [num_rows, STAGED_COLUMNS], then query_start_loc [num_rows + 1].

        ``length``: the longest window. ``allocator``: where the step's tensors come from. ``blocks``: where its rows
        keep boundary checkpoints, when that is the caller's to say.
        """
        ...

    def refresh(self, step: StepTensors) -> None:
        """Reads the cursors into the rows again."""
        ...

    def null_row(self, step: StepTensors, row: int) -> None:
        """The row owns nothing from here on."""
        ...

    def check_layout(self, name: str, tensor: torch.Tensor, where: str) -> None:
        """Raises SpecStateError for an argument whose strides these kernels cannot follow."""
        ...

    def layout(
        self, qkv: torch.Tensor, raw_gate: torch.Tensor, raw_beta: torch.Tensor, out: torch.Tensor
    ) -> object | None:
        """What ``verify`` needs to know of a window's strides and dtypes, for the caller to keep; None for nothing."""
        ...

    def verify(
        self,
        step: StepTensors,
        layer: int,
        qkv: torch.Tensor,
        raw_gate: torch.Tensor,
        raw_beta: torch.Tensor,
        out: torch.Tensor,
        layout: Any = None,
    ) -> None:
        """A window of one layer: qkv [tokens, C], raw_gate [tokens, H, K], raw_beta [tokens, H], out [tokens, H, V].

        layout: that of tensors with these strides and dtypes, if it is at hand.
        """
        ...

    def write_records(
        self,
        step: StepTensors,
        layer: int,
        u: torch.Tensor,
        key: torch.Tensor,
        gate: torch.Tensor,
        conv_input: torch.Tensor | None,
    ) -> None:
        """Records of the caller's own: u [tokens, H, V], key and gate [tokens, H, K], conv_input [tokens, C]."""
        ...

    def sample(
        self, step: StepTensors, logits: torch.Tensor, draft_tokens: torch.Tensor, draft_probs: torch.Tensor | None
    ) -> Sampled:
        """num_accepted [rows], tokens [rows, T], next_token [rows] int32 and finished [rows] bool."""
        ...

    def end(
        self, step: StepTensors, counts: torch.Tensor, fold: torch.Tensor | bool, finished: torch.Tensor | None
    ) -> None:
        """Accepts ``counts`` [rows], moves the cursors, folds what ``fold`` ([rows] bool, or one answer) or R asks."""
        ...

    def cancel(self, step: StepTensors, unverified: list[int]) -> None:
        """Folds in the unverified layers what verify folded in the others, and moves the cursors past it."""
        ...

    def flush(self, step: StepTensors) -> None:
        """Folds all that is pending of the rows; ``refresh`` them before they are used again."""
        ...

    def fold(self, plan: torch.Tensor) -> None:
        """Folds ``plan`` [rows, PLAN_COLUMNS] in all layers: see kernels/rows.py for its columns."""
        ...

    def read_state(self, plan: torch.Tensor, layer: int) -> tuple[torch.Tensor, torch.Tensor | None]:
        """What a fold of ``plan`` would write: [rows, H, V, K] in the compute dtype, [rows, C, W-1] or None."""
        ...
