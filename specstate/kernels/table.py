"""Where every layer's tensors lie: the table through which one launch reaches all layers."""

import torch

from specstate.errors import SpecStateError
from specstate.kernels.supported import check_inner
from specstate.params import LayerParams
from specstate.storage import Storage


def address(pointer: int) -> int:
    """A device address as int64 holds it: two's complement, the identity below 2^63. Kernels reinterpret it."""
    if not 0 <= pointer < 2**64:
        raise SpecStateError(f"address {pointer} is outside 0..2^64")
    return pointer - 2**64 if pointer >= 2**63 else pointer


class AddressTable:
    """Base addresses of ``storage`` and ``params``, one row a layer, and the memory of where it was built.

    Raises SpecStateError when a tensor's strides are none that the kernels follow.
    """

    def __init__(self, storage: Storage, params: tuple[LayerParams, ...]) -> None:
        for index, layer in enumerate(storage.layers):
            check_inner(f"storage[{index}].recurrent", layer.recurrent)
        for index, given in enumerate(params):
            for name in ("A_log", "dt_bias", "conv_weight", "conv_bias"):
                tensor = getattr(given, name)
                if tensor is not None and not tensor.is_contiguous():
                    raise SpecStateError(f"params[{index}].{name} must be contiguous, has strides {tensor.stride()}")
        self._storage = storage
        self._built_over = self._checkpoints()
        # In the order of triton_fold's columns.
        rows = [
            (
                layer.recurrent,
                layer.conv,
                layer.conv_ring,
                layer.record_u,
                layer.record_key_gate,
                layer.record_inv_norm,
                given.A_log,
                given.dt_bias,
            )
            for layer, given in zip(storage.layers, params, strict=True)
        ]
        addresses = [[0 if tensor is None else address(tensor.data_ptr()) for tensor in row] for row in rows]
        self.tensor = torch.tensor(addresses, dtype=torch.int64, device="cpu").to(storage.cursors.device)
        """[layers, 8] int64 on the device."""
        # A caller's memory may start anywhere; vector loads may not.
        aligned = all(layer.recurrent.data_ptr() % 16 == 0 for layer in storage.layers)
        self.alignment = 16 if aligned else storage.layers[0].recurrent.element_size()
        """Bytes that divide every recurrent base address."""

    def check(self, where: str) -> None:
        """Raises SpecStateError when the checkpoints no longer lie where the table points."""
        for layer, (now, then) in enumerate(zip(self._checkpoints(), self._built_over, strict=True)):
            if now != then:
                raise SpecStateError(
                    f"storage[{layer}] was replaced: it lies at {now}, the address table was built over {then}{where}"
                )

    def _checkpoints(self) -> list[tuple[int, int]]:
        return [
            (layer.recurrent.data_ptr(), 0 if layer.conv is None else layer.conv.data_ptr())
            for layer in self._storage.layers
        ]
