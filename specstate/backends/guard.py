"""Rule 3 of ownership, for debugging: a verify writes its own rows' records and folds its own pending, nothing else."""

import torch

from specstate.errors import SpecStateError
from specstate.kernels import rows as at
from specstate.storage import LayerStorage
from specstate.validation import bits


class LayerGuard:
    """A copy of one layer's storage, taken before a verify of ``rows`` [rows, ROW_COLUMNS] and compared after it."""

    def __init__(self, layer: LayerStorage, rows: torch.Tensor) -> None:
        self._layer = layer
        self._before = {name: tensor.clone() for name, tensor in layer._asdict().items() if tensor is not None}
        owned = (rows[:, at.CHECKPOINT_SLOT] > 0) & (rows[:, at.RECORD_ROW] >= 0)
        folding = rows[owned & (rows[:, at.FOLD_LEN] > 0), at.CHECKPOINT_SLOT].tolist()
        scratch = len(layer.record_u) - 1
        writing = [scratch, *rows[owned, at.RECORD_ROW].tolist()]
        self._may_change = {
            name: set(folding) if name in ("recurrent", "conv") else set(writing) for name in self._before
        }

    def check(self, what: str) -> None:
        """Raises SpecStateError naming the tensor and slot that changed but may not; the layer is as before then.

        Also when something else goes wrong here: the verify does not count then, so it must have folded nothing.
        """
        try:
            self._compare(what)
        except BaseException:
            self._restore()
            raise

    def _compare(self, what: str) -> None:
        for name, before in self._before.items():
            after = getattr(self._layer, name)
            for slot in set(range(len(before))) - self._may_change[name]:
                if not torch.equal(bits(before[slot]), bits(after[slot])):
                    raise SpecStateError(f"{what} changed slot {slot} of {name}, which no row of the step may change")

    def _restore(self) -> None:
        for name, before in self._before.items():
            getattr(self._layer, name).copy_(before)
