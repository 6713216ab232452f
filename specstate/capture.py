"""A step inside a CUDA graph: fixed buffers that later steps of its size are staged into.

    capture:   capture_step -> verify ... [sample] [defer | commit], recorded, changes no lifecycle
    each step: begin_step(meta, pad_to=size) stages the rows -> the caller replays -> step.replayed(...)

The graph's first node builds the row records from the staged columns and the cursors of that moment.
"""

from array import array
from collections import deque
from typing import TYPE_CHECKING, Any

import torch

from specstate.batch import Batch
from specstate.errors import SpecStateError, StepOrderError
from specstate.kernels.cursors import BlockTable

if TYPE_CHECKING:
    from specstate.backends.tensors import TensorBackend
    from specstate.step import Step


class PinnedStaging:
    """Page-locked buffers that take turns: one that is still being copied from is not written to."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._buffers: deque[tuple[torch.Tensor, torch.cuda.Event]] = deque()

    def copy_to(self, target: torch.Tensor, values: list[int]) -> None:
        """Copies ``values`` into ``target`` [size] int32 on the current stream, without a wait."""
        if self._buffers and self._buffers[0][1].query():
            buffer, event = self._buffers.popleft()
        else:
            buffer, event = self._new_buffer(), torch.cuda.Event()
        buffer.copy_(torch.frombuffer(array("i", values), dtype=torch.int32))
        target.copy_(buffer, non_blocking=True)
        event.record()
        self._buffers.append((buffer, event))

    def _new_buffer(self) -> torch.Tensor:
        # An ordinary tensor also in inference mode: it is written to again, in any mode.
        with torch.inference_mode(False):
            return torch.empty(self._size, dtype=torch.int32, device="cpu", pin_memory=True)


class Capture:
    """What ``capture_step`` made: the recorded step, the buffers that it reads, and the step that is staged in them."""

    def __init__(self, backend: "TensorBackend", num_rows: int, num_tokens: int, blocks: BlockTable | None) -> None:
        self.shape = num_rows, num_tokens
        self._backend = backend
        self.staged, self.rows = backend.capture(num_rows, num_tokens, blocks)
        self._staging = PinnedStaging(len(self.staged))
        self.recorded: Step | None = None
        """Set by the manager: the step whose calls are in the graph."""
        self.occupant: Step | None = None
        """The step staged here that has not been replayed or cancelled."""

    def check_free(self, least_len: int, where: str) -> None:
        """Raises StepOrderError while another step is staged, SpecStateError when a row reads past captured counts."""
        if self.occupant is not None:
            raise StepOrderError(
                f"pad_to = {self.shape}: step {self.occupant.index} is staged in the captured buffers of this size and "
                f"was neither replayed nor cancelled{where}"
            )
        assert self.recorded is not None
        blocks = self.rows.blocks
        columns = {"num_accepted": self.recorded.num_entries}
        if blocks is not None:
            columns |= {"block_table": len(blocks.slots), "positions": len(blocks.positions)}
        for name, captured_len in columns.items():
            if captured_len is not None and captured_len < least_len:
                raise SpecStateError(
                    f"batch_index reads entry {least_len - 1}, the captured {name} has {captured_len}{where}"
                )

    def stage(self, batch: Batch, where: str) -> Any:
        """Copies the rows of ``batch`` into the buffers, for the next replay; the step's rows."""
        self._backend.check_storage(where)
        self._staging.copy_to(self.staged, self._backend.staged_columns(batch))
        return self.rows

    def null_row(self, row: int) -> None:
        """The staged row owns nothing: the replay to come treats it so."""
        self._backend.null_staged_row(self.staged, self.shape[0], row)
