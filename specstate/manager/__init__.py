"""The state manager: who owns which slot, which steps are open, and the order in which things may happen.

Data flows one way: metadata -> rows -> kernels -> cursors. The manager decides on the host and never waits for the
device, save where a method says so.
"""

from collections.abc import Sequence
from typing import Any

from specstate.backends.tensors import TensorBackend
from specstate.errors import SpecStateError, StepOrderError
from specstate.manager.files import Files
from specstate.manager.lives import Lives
from specstate.manager.looking import Looking
from specstate.manager.publishing import Publishing
from specstate.manager.stepping import Stepping
from specstate.params import LayerParams, check_params

__all__ = ["StateManager"]


class StateManager(Lives, Publishing, Files, Stepping, Looking):
    """Owns the recurrent and conv state of many requests in many KDA layers.

    params: one LayerParams a layer, on ``device``; backend "metadata" reads none. backend: "triton" (a GPU, or a CPU
    under TRITON_INTERPRET=1), "reference" (torch, any device) or "metadata" (no payloads). storage: None, or one
    (recurrent [slots, H, V, K], conv [slots, C, W-1]) pair of views a layer, slots = num_checkpoints + 1, slot 0 the
    null slot, whose memory stays the caller's. recorder: writes every transition to a step trace. debug: checks every
    rule of ownership before a step begins and before it commits or defers (cancel and release are always a way out),
    and refuses what would otherwise be clamped; it waits for the device.

    Raises SpecStateError when config, params, storage and backend do not go together, CapacityError when the memory
    is not there. States do not depend on what torch is set to: gradients, autocast, inference mode, default device and
    dtype, precision of float32 products. Every method that refuses leaves the manager as it was; what the device itself
    runs into, memory that runs out in the middle of a fold say, may leave the requests concerned half done: release
    them. A manager is used by one thread; everything launches on the current stream.
    """

    # -- care

    def set_params(self, params: Sequence[LayerParams]) -> None:
        """New parameters from the next step on.

        Raises StepOrderError while a step is open or a record may be pending (it would be folded with another gate):
        ``fence("flush")`` first; and once a graph was captured, which holds the tensors it was captured with. Raises
        SpecStateError when they do not fit the config, or on backend "metadata". Parameters of other dtypes or
        alignment, or with another choice of biases, want a ``warmup`` before the next capture.
        """
        if not isinstance(self._backend, TensorBackend):
            raise SpecStateError("set_params needs payloads, which backend 'metadata' does not hold")
        self._require_storage("set_params")
        self._refuse_pending("set_params")
        self._refuse_captures("set_params")
        self._backend.set_params(check_params(params, self.config, self.device))
        self._record("set_params")

    def release_storage(self) -> None:
        """Gives all device memory back, between two phases of a training loop, say; ``bind_storage`` takes it again.

        Nothing may lie in a slot: behind ``fence("drop")``, or with every request retracted, nothing published and
        nothing reserved. Counters go on; ``warmup`` again before the next capture. Raises StepOrderError otherwise, and
        once a graph was captured, which holds addresses (``forget_captures``).
        """
        self._require_storage("release_storage")
        taken = self._ledger.record_slots.num_taken, self._ledger.checkpoint_slots.num_taken
        if any(taken):
            raise StepOrderError(
                f"release_storage: {taken[0]} record slots and {taken[1]} checkpoint slots are taken; "
                "fence('drop'), or retract, first"
            )
        self._refuse_captures("release_storage")
        self._backend.release_storage()
        self._is_released = True
        self._record("release_storage")

    def bind_storage(self, storage: Any = None) -> None:
        """Takes memory again after ``release_storage``; or puts other storage of the caller's under living requests.

        storage: as the constructor takes it; None after a release for the manager's own. For living requests slot i of
        the new views must hold what slot i held: the caller has moved it, behind a fence that left nothing pending.
        Views of other strides want a ``warmup`` before the next capture. Raises StepOrderError while a step is open or
        a record may be pending, and once a graph was captured, SpecStateError for unfit views, CapacityError when the
        memory is not there; nothing is changed then.
        """
        if not self._is_released:
            self._refuse_pending("bind_storage")
            if storage is None:
                raise SpecStateError("bind_storage: storage = None, the manager's own, is bound after release_storage")
        self._refuse_captures("bind_storage")
        self._backend.bind_storage(storage)
        self._is_released = False
        self._record("bind_storage")
