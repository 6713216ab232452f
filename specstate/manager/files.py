"""Requests in files, one or all of them."""

import os
from typing import BinaryIO

from specstate.errors import SpecStateError, StepOrderError
from specstate.manager.core import Core
from specstate.metadata import Handle
from specstate.profiling import phase
from specstate.sampling import SamplingParams
from specstate.trace.schema import Published
from specstate.transfer import read_file, snapshot, write_file
from specstate.validation import check_flag


class Files(Core):
    """Requests in files, one or all of them. Part of StateManager."""

    @phase("specstate::export")
    def export(self, handle: Handle, file: str | os.PathLike[str] | BinaryIO, fold: bool = True) -> None:
        """Writes one request into a file, at what it has committed: windows of an open step are not in it.

        file: a path, whose file is there whole or stays as it was, or a binary file open for writing. fold: True writes
        the state with everything pending folded in, as ``read`` gives it; False checkpoint, pending records and lengths
        as they lie there. The request goes on as if nothing had happened. Waits for the device; needs safetensors
        (``specstate[transfer]``). Raises StaleHandleError, StepOrderError between the verifies of an open step,
        TransferError when the file cannot be written.
        """
        check_flag("fold", fold)
        request = self._requests.of(handle)
        self._refuse_between_verifies("export", request)
        image = self._backend.export_image(request.record_slot, request.folded_by_verify, fold)
        write_file(file, snapshot.request_header(self.config, request, image), [image])
        self._record("export", handle=handle, fold=fold)

    @phase("specstate::import_request")
    def import_request(
        self,
        file: str | os.PathLike[str] | BinaryIO,
        request_id: str | None = None,
        sampling: SamplingParams | None = None,
    ) -> Handle:
        """A request from a file that ``export`` has written, here or in another manager; it stands where it stood.

        request_id, sampling: those of the file when None. Layers and dtypes of both managers must agree, everything
        else may differ: what is pending stays so if the next window fits behind it, and is folded if it does not. What
        backend "metadata" wrote has no state, and only that backend takes it. Raises TransferError for a damaged file,
        SpecStateError when it does not fit, CapacityError without slots, and as ``admit``.
        """
        self._require_storage("import_request")
        header, images = read_file(file)
        if header.kind != "request":
            raise SpecStateError("import_request: the file holds a snapshot: recover takes it")
        [entry], [image] = header.requests, images
        name = entry.request_id if request_id is None else request_id
        sampling = self._ledger.check_new(name, entry.sampling if sampling is None else sampling)
        snapshot.check_fits(header, self.config, self._backend)
        self._ledger.require(1, 1, f"no slot for request {name!r}")
        request = snapshot.bring_request(entry, image, name, sampling, self.config, self._ledger, self._backend)
        self._record(
            "import",
            handle=request.handle,
            checkpoint_slot=request.checkpoint_slot,
            sampling=sampling,
            image=entry.image,
        )
        return request.handle

    @phase("specstate::snapshot")
    def snapshot(self, file: str | os.PathLike[str] | BinaryIO) -> None:
        """Writes live and preempted requests and published prefixes into a file.

        Windows of open steps are not in it, nor boundary checkpoints that were not published, nor reservations. Waits
        for the device. Raises StepOrderError between the verifies of an open step, TransferError when the file cannot
        be written.
        """
        for request in self._requests:
            self._refuse_between_verifies("snapshot", request)
        write_file(file, *snapshot.take(self.config, self._ledger, self._backend))
        self._record("snapshot")

    @phase("specstate::recover")
    def recover(self, file: str | os.PathLike[str] | BinaryIO) -> dict[str, Handle]:
        """Takes a snapshot into this manager, which must hold nothing; the handles of the live requests by id.

        Old handles are stale. Preempted requests come back on the host, to be resumed; published prefixes as far as
        checkpoint slots are left, those used last first. What may differ between the managers is as for
        ``import_request``. Raises StepOrderError when the manager holds a request, a prefix or reserved slots,
        TransferError for a damaged file, SpecStateError when it does not fit, CapacityError when its live requests do
        not; nothing is changed then.
        """
        self._require_storage("recover")
        if len(self._requests) or len(self._preempted) or self._ledger.checkpoint_slots.num_taken:
            raise StepOrderError("recover: the manager holds something already; fence('drop') empties it")
        header, images = read_file(file)
        if header.kind != "snapshot":
            raise SpecStateError("recover: the file holds one request: import_request takes it")
        snapshot.check_fits(header, self.config, self._backend)
        live = sum(not entry.preempted for entry in header.requests)
        self._ledger.require(live, live, f"the snapshot has {live} live requests")
        before = self._ledger.order()
        try:
            snapshot.bring(header, images, self.config, self._ledger, self._backend)
        except BaseException:
            self._drop_everything()
            self._ledger.restore_order(before)
            raise
        lives = [*self._requests]
        self._record(
            "recover",
            handles=tuple(request.handle for request in lives),
            checkpoint_slots=tuple(request.checkpoint_slot for request in lives),
            requests=header.requests,
            published=tuple(
                Published(key=state.key, checkpoint_slot=prefix.checkpoint_slot)
                for state in header.published
                if (prefix := self._ledger.prefixes.get(state.key)) is not None
            ),
            generation=header.generation,
        )
        return {request.handle.request_id: request.handle for request in lives}
