"""What a manager asks of a backend. The lifecycle lives in the manager and its steps; a backend only moves data.

Two kinds: ``TensorBackend`` holds payloads and runs kernels on a device, ``MetadataBackend`` holds lengths alone.
Everything here happens in call order (on a GPU: in stream order), and nothing waits for the device unless it says so.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch

from specstate.batch import Batch
from specstate.image import ImagePayload, RequestImage
from specstate.kernels import rows as at
from specstate.metrics import Folds


class LayerState(NamedTuple):
    """A request's committed state in one layer."""

    recurrent: torch.Tensor
    """[H, V, K] in the compute dtype (float32, or float64 with float64 checkpoints)."""
    conv: torch.Tensor | None
    """[C, W-1] in the activation dtype, oldest input first; None when the model convolves itself."""


class Cursor(NamedTuple):
    """Where a record slot stands; reading it waits for the device."""

    checkpoint_len: int
    pending_len: int
    generation: int
    finished: bool
    checkpoint_slot: int
    """Where the running checkpoint lies."""
    boundary_len: int
    """Position of the checkpoint in the request's boundary slot; 0: it holds none."""

    @property
    def committed_len(self) -> int:
        return self.checkpoint_len + self.pending_len

    def settled(self, folded_by_verify: bool) -> "Cursor":
        """As it will be when the open step ends, should all that is pending have been folded by its verify."""
        return self._replace(checkpoint_len=self.committed_len, pending_len=0) if folded_by_verify else self


class LayerInputs(NamedTuple):
    """What one layer's verify is given; backend "metadata" is given nothing."""

    qkv: Any
    """[tokens, C]"""
    raw_gate: Any
    """[tokens, H, K]"""
    raw_beta: Any
    """[tokens, H]"""


class LayerRecords(NamedTuple):
    """What an own kernel hands in for one layer in place of a verify."""

    u: Any
    """[tokens, H, V]"""
    key: Any
    """[tokens, H, K]"""
    gate: Any
    """[tokens, H, K]"""
    conv_input: Any
    """[tokens, C], or None without a conv."""


@dataclass(frozen=True, slots=True)
class DeviceCounters:
    """Events that only the device sees."""

    clamps: int
    """Accepted counts outside [min_accepted, query_len] that were clamped."""
    dropped_ends: int
    """Row ends that met a slot of another generation."""
    wasted_windows: int
    """Windows verified for a request that had already finished."""
    misplaced_rows: int
    """Rows of a block table whose position was not the request's; their line was not used."""
    windows: int
    """Decode windows that ended."""
    draft_tokens: int
    """Drafts in them."""
    folds: Folds
    """Rows folded, by reason."""
    accepted: tuple[int, ...]
    """Windows with drafts, by accepted count 0 .. max_query_len, the first token included."""


def folds_of(values: Sequence[int]) -> Folds:
    """The device's counts of rows folded, in the order of kernels/rows.py, by name."""
    return Folds(
        at_end=values[at.FOLD_AT_END],
        when_full=values[at.FOLD_WHEN_FULL],
        by_mask=values[at.FOLD_BY_MASK],
        at_boundary=values[at.FOLD_AT_BOUNDARY],
        in_verify=values[at.FOLD_IN_VERIFY],
        by_flush=values[at.FOLD_BY_FLUSH],
    )


class Backend(Protocol):
    """See the module's docstring. ``rows`` is what ``begin`` returned; ``where`` names the step in messages."""

    path: str

    @property
    def allocated_bytes(self) -> int: ...

    def release_storage(self) -> None:
        """Lets go of all that the device holds; counters go on. Only ``bind_storage`` comes after it."""
        ...

    def bind_storage(self, caller: Any) -> None:
        """Checkpoints of the caller's in place of the present ones, or, after a release, everything anew."""
        ...

    def admit(self, checkpoint_slot: int, record_row: int, generation: int, sampling: tuple[int, ...]) -> None:
        """Zero state at position 0; ``sampling`` is a line of the sampling table."""
        ...

    def load(self, record_row: int, states: Any, committed_len: int) -> None:
        """Copies ``states`` to where the checkpoint lies (None: it lies there); stands at ``committed_len``."""
        ...

    def release(self, record_row: int) -> None:
        """The record slot is nobody's."""
        ...

    def standing(self, record_row: int) -> Any:
        """Where the request stands, for ``attach``; kept on the device, its committed length not known here."""
        ...

    def attach(
        self, checkpoint_slot: int, record_row: int, generation: int, standing: Any, sampling: tuple[int, ...]
    ) -> None:
        """A record slot for the state that lies in the checkpoint slot: nothing pending, at ``standing``."""
        ...

    def park(self, record_row: int, folded_by_verify: bool) -> None:
        """Nobody's until ``unpark``, with all that is pending. ``folded_by_verify``: pending records are folded."""
        ...

    def unpark(self, record_row: int, generation: int) -> None:
        """The record slot is its owner's again, in another life."""
        ...

    def copy_state(self, record_row: int, folded_by_verify: bool, destinations: list[int]) -> None:
        """Writes the committed state, pending records included, into checkpoint slots; changes nothing else."""
        ...

    def copy_slot(self, source: int, destination: int) -> None:
        """Copies a checkpoint as it lies there."""
        ...

    def clear_boundary(self, record_row: int) -> None:
        """The boundary slot of its owner is another's, or another one."""
        ...

    def running_slots(self, record_rows: list[int]) -> torch.Tensor:
        """[n] int32 on the device: where the checkpoints of these record slots lie."""
        ...

    def standing_at(self, committed_len: int, finished: bool) -> Any:
        """A standing that is known on the host."""
        ...

    def position(self, standing: Any) -> tuple[int, bool]:
        """committed_len and whether finished, of a standing; waits for the device."""
        ...

    # -- images

    def checkpoint_payload(self, checkpoint_slot: int) -> ImagePayload | None:
        """A copy of a checkpoint on the host, started without a wait; None without payloads."""
        ...

    def put_checkpoint(self, checkpoint_slot: int, payload: ImagePayload | None) -> None:
        """The other way. Raises SpecStateError when there is none and the backend needs one."""
        ...

    def export_image(self, record_row: int, folded_by_verify: bool, fold: bool) -> RequestImage:
        """The committed state, on the CPU; changes nothing and waits for the device.

        fold: True gives the state at committed_len, nothing pending: that of ``read``, in the checkpoint dtype. False
        gives checkpoint, records and lengths as they lie there, bit for bit.
        """
        ...

    def import_image(
        self, checkpoint_slot: int, record_row: int, generation: int, image: RequestImage, sampling: tuple[int, ...]
    ) -> None:
        """The request of ``image`` lives in these slots, with what was pending; does not wait.

        Raises SpecStateError, before changing anything, for an image that does not fit the config, has more records
        than a record slot holds, or lacks the payload that the backend needs.
        """
        ...

    def check_blocks(self, block_table: Any, positions: Any, least_len: int, where: str) -> Any:
        """A caller's block table and positions with at least ``least_len`` entries each; else SpecStateError."""
        ...

    def begin(self, batch: Batch, where: str, blocks: Any = None) -> Any:
        """Builds the step's rows from the batch and the cursors; ``blocks`` of ``check_blocks``."""
        ...

    def refresh(self, rows: Any) -> None:
        """Reads the cursors into the rows again, after a flush before the first verify."""
        ...

    def null_row(self, rows: Any, row: int) -> None:
        """The row owns nothing from here on."""
        ...

    def verify(self, rows: Any, layer: int, inputs: LayerInputs, out: Any, where: str) -> Any:
        """One layer of a window. Raises SpecStateError before changing anything."""
        ...

    def write_records(self, rows: Any, layer: int, records: LayerRecords, where: str) -> None:
        """The caller's own records. Raises SpecStateError before changing anything."""
        ...

    def sample(
        self, rows: Any, target_logits: Any, draft_tokens: Any, draft_probs: Any, where: str
    ) -> tuple[Any, Any, Any, Any]:
        """num_accepted, tokens, next_token and finished, in row order."""
        ...

    def check_counts(self, name: str, values: Any, least_len: int, where: str) -> Any:
        """Caller-made counts with at least ``least_len`` entries, in the backend's own form; else SpecStateError."""
        ...

    def check_mask(self, name: str, values: Any, least_len: int, where: str) -> Any:
        """The same for a caller-made mask of bools."""
        ...

    def by_row(self, rows: Any, values: Any) -> Any:
        """Caller-made counts or mask, entry batch_index[i] for row i."""
        ...

    def end(self, rows: Any, counts: Any, fold: Any, finished: Any) -> None:
        """Accepts counts, advances the cursors, folds what is due. ``fold``: True, or a mask of rows, or None."""
        ...

    def cancel(self, rows: Any, unverified: list[int]) -> None:
        """Completes what verify folded in the layers that did not verify, and moves the cursors past it."""
        ...

    def flush(self, rows: Any) -> None:
        """Folds all that is pending in ``rows``."""
        ...

    def wait(self) -> None:
        """For all that was launched on the current stream."""
        ...

    def cursors(self, record_rows: list[int]) -> list[Cursor]:
        """Waits for the device, once."""
        ...

    def cursor(self, record_row: int) -> Cursor:
        """Waits for the device."""
        ...

    def read(self, record_row: int, layer: int, folded_by_verify: bool) -> LayerState:
        """Waits for the device."""
        ...

    def counters(self) -> DeviceCounters:
        """Waits for the device."""
        ...

    def check_integrity(self, owners: dict[int, bool]) -> None:
        """Payload rules; ``owners``: whether verify folded already, by record row. Waits."""
        ...
