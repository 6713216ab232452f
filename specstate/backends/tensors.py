"""Payloads on a device: checks what comes in, keeps the storage, launches kernels."""

from array import array
from collections.abc import Callable
from itertools import accumulate, chain
from typing import Any

import torch

from specstate.backends import Cursor, DeviceCounters, LayerInputs, LayerRecords, LayerState, folds_of
from specstate.backends.ambient import shielded
from specstate.backends.guard import LayerGuard
from specstate.backends.looks import WindowLooks
from specstate.batch import Batch
from specstate.config import StateConfig
from specstate.errors import SpecStateError
from specstate.image import ImagePayload, RequestImage, check_image, check_room
from specstate.kernels import Kernels
from specstate.kernels import rows as at
from specstate.kernels.arena import Allocator, Arena, TorchAllocator, captured_bytes
from specstate.kernels.cursors import BlockTable, StepTensors, null_row
from specstate.kernels.reference import read_conv_history
from specstate.layout import plan_bytes
from specstate.params import LayerParams
from specstate.storage import LayerStorage, Storage
from specstate.validation import DTYPES, bits, check_own_memory, check_tensor, unique_dtypes


class TensorBackend:
    """Checks what comes in and launches kernels over ``storage``; see Backend for what each call means."""

    def __init__(
        self,
        config: StateConfig,
        make_kernels: Callable[[StateConfig, tuple[LayerParams, ...], Storage], Kernels],
        params: tuple[LayerParams, ...],
        storage: Storage,
        device: torch.device,
        debug: bool,
    ) -> None:
        self.config, self.device = config, device
        kernels = make_kernels(config, params, storage)
        self._kernels: Kernels | None = kernels
        self._storage: Storage | None = storage
        self._params, self._make_kernels = params, make_kernels
        self.path = kernels.path
        self._debug = debug
        self._looks = WindowLooks()
        self._activation = DTYPES[config.activation_dtype]
        self._compute = storage.layers[0].record_u.dtype
        self._allocator: Allocator = TorchAllocator(device)
        self._counted = storage.counters
        """The counters of a storage that was released."""
        self._arena: Arena | None = None
        """Of captured steps, once ``warmup`` made it; until then they take the graph's own memory."""

    # -- storage

    @property
    def kernels(self) -> Kernels:
        """Raises SpecStateError while there is no storage."""
        if self._kernels is None:
            raise SpecStateError("the storage was released: bind_storage makes another")
        return self._kernels

    @property
    def storage(self) -> Storage:
        """Raises SpecStateError while there is none."""
        if self._storage is None:
            raise SpecStateError("the storage was released: bind_storage makes another")
        return self._storage

    @property
    def allocated_bytes(self) -> int:
        return 0 if self._storage is None else self._storage.allocated_bytes

    def set_params(self, params: tuple[LayerParams, ...]) -> None:
        self.kernels.bind(params)
        self._params = params

    def release_storage(self) -> None:
        self._counted = self.storage.counters.clone()
        self._storage = self._kernels = self._arena = None

    def bind_storage(self, caller: object) -> None:
        storage = Storage(self.config, self.device, caller, replaces=self._storage)
        kernels = self._make_kernels(self.config, self._params, storage)
        if self._storage is None:
            storage.counters.copy_(self._counted)
        self._storage, self._kernels, self.path = storage, kernels, kernels.path
        self._looks = WindowLooks()

    # -- slots

    @shielded
    def admit(self, checkpoint_slot: int, record_row: int, generation: int, sampling: tuple[int, ...]) -> None:
        for layer in self.storage.layers:
            layer.recurrent[checkpoint_slot].zero_()
            if layer.conv is not None and layer.conv_ring is not None:
                layer.conv[checkpoint_slot].zero_()
                layer.conv_ring[record_row].zero_()
        self.storage.sampling[record_row] = self._to_device(sampling)
        cursor = [0] * at.CURSOR_COLUMNS
        cursor[at.CURSOR_GENERATION], cursor[at.CURSOR_SLOT] = generation, checkpoint_slot
        self.storage.cursors[record_row] = self._to_device(cursor)

    @shielded
    def load(self, record_row: int, states: Any, committed_len: int) -> None:
        if states is not None:
            self._check_states(states)
            # What lies in the storage itself may be overwritten before its turn comes.
            apart = [[self._apart(state) for state in pair] for pair in states]
            slot = self.storage.cursors[record_row, at.CURSOR_SLOT :][:1].long()
            for layer, (recurrent, conv) in zip(self.storage.layers, apart, strict=True):
                layer.recurrent.index_copy_(0, slot, recurrent[None])
                if layer.conv is not None:
                    layer.conv.index_copy_(0, slot, conv[None])
        self._fill_ring(record_row, self._to_device([committed_len]))
        cursor = self.storage.cursors[record_row]
        cursor[at.CURSOR_CHECKPOINT_LEN].fill_(committed_len)
        for column in (at.CURSOR_PENDING_LEN, at.CURSOR_FINISHED, at.CURSOR_BOUNDARY_LEN):
            cursor[column].zero_()

    @shielded
    def release(self, record_row: int) -> None:
        self.storage.sampling[record_row].zero_()
        self.storage.sampling[record_row, at.END_TOKENS :].fill_(-1)
        # The last: until then a preemption that failed on the way may be called again.
        self.storage.cursors[record_row].zero_()

    @shielded
    def standing(self, record_row: int) -> torch.Tensor:
        cursor = self.storage.cursors[record_row].clone()
        cursor[at.CURSOR_CHECKPOINT_LEN] += cursor[at.CURSOR_PENDING_LEN]
        cursor[at.CURSOR_PENDING_LEN].zero_()  # an assignment would bring its 0 from the host, and wait
        return cursor

    @shielded
    def attach(
        self, checkpoint_slot: int, record_row: int, generation: int, standing: torch.Tensor, sampling: tuple[int, ...]
    ) -> None:
        self.storage.sampling[record_row] = self._to_device(sampling)
        cursor = self.storage.cursors[record_row]
        cursor.copy_(standing)
        cursor[at.CURSOR_GENERATION].fill_(generation)
        cursor[at.CURSOR_SLOT].fill_(checkpoint_slot)
        cursor[at.CURSOR_BOUNDARY_LEN].zero_()
        self._fill_ring(record_row, cursor[at.CURSOR_CHECKPOINT_LEN :][:1])

    @shielded
    def park(self, record_row: int, folded_by_verify: bool) -> None:
        cursor = self.storage.cursors[record_row]
        if folded_by_verify:
            cursor.copy_(self.standing(record_row))
        cursor[at.CURSOR_GENERATION].zero_()

    @shielded
    def unpark(self, record_row: int, generation: int) -> None:
        self.storage.cursors[record_row, at.CURSOR_GENERATION].fill_(generation)

    @shielded
    def copy_state(self, record_row: int, folded_by_verify: bool, destinations: list[int]) -> None:
        self.check_storage("")
        plan = self._to_device([[0, 0, record_row, 0, 0, slot, 0] for slot in destinations])
        self._place(plan, record_row, folded_by_verify, at.PLAN_BOUNDARY_COUNT)
        self.kernels.fold(plan)

    @shielded
    def copy_slot(self, source: int, destination: int) -> None:
        for layer in self.storage.layers:
            layer.recurrent[destination].copy_(layer.recurrent[source])
            if layer.conv is not None:
                layer.conv[destination].copy_(layer.conv[source])

    @shielded
    def clear_boundary(self, record_row: int) -> None:
        self.storage.cursors[record_row, at.CURSOR_BOUNDARY_LEN].zero_()

    @shielded
    def running_slots(self, record_rows: list[int]) -> torch.Tensor:
        return self.storage.cursors[:, at.CURSOR_SLOT].index_select(0, self._to_device(record_rows))

    @shielded
    def standing_at(self, committed_len: int, finished: bool) -> torch.Tensor:
        cursor = torch.zeros(at.CURSOR_COLUMNS, dtype=torch.int32, device=self.device)
        cursor[at.CURSOR_CHECKPOINT_LEN].fill_(committed_len)
        cursor[at.CURSOR_FINISHED].fill_(int(finished))
        return cursor

    def position(self, standing: torch.Tensor) -> tuple[int, bool]:
        values = standing.tolist()
        return values[at.CURSOR_CHECKPOINT_LEN], bool(values[at.CURSOR_FINISHED])

    # -- images

    @shielded
    def checkpoint_payload(self, checkpoint_slot: int) -> ImagePayload:
        layers = self.storage.layers
        convs = [layer.conv[checkpoint_slot] for layer in layers if layer.conv is not None]
        recurrent = self._to_host([layer.recurrent[checkpoint_slot] for layer in layers])
        return ImagePayload(recurrent, self._to_host(convs) if convs else None)

    @shielded
    def put_checkpoint(self, checkpoint_slot: int, payload: ImagePayload | None) -> None:
        payload = self._with_payload(payload)
        for index, layer in enumerate(self.storage.layers):
            layer.recurrent[checkpoint_slot].copy_(self._pinned(payload.recurrent[index]), non_blocking=True)
            if layer.conv is not None and payload.conv is not None:
                layer.conv[checkpoint_slot].copy_(self._pinned(payload.conv[index]), non_blocking=True)

    @shielded
    def export_image(self, record_row: int, folded_by_verify: bool, fold: bool) -> RequestImage:
        cursor = self.cursor(record_row).settled(folded_by_verify)
        start, count = cursor.checkpoint_len, cursor.pending_len
        parts = []
        for index, layer in enumerate(self.storage.layers):
            if fold and count:
                recurrent, conv = self.read(record_row, index, folded_by_verify)
                part = {"recurrent": recurrent.to(layer.recurrent.dtype), "conv": conv}
            else:
                part = _image_part(layer, cursor.checkpoint_slot, record_row, start, count)
            # Layer by layer, so that the device holds only one of them twice.
            parts.append({name: tensor.cpu() for name, tensor in part.items() if tensor is not None})
        if fold:
            start, count = start + count, 0
        stacked = {name: torch.stack([part[name] for part in parts]) for name in parts[0]}
        return RequestImage(start, count, cursor.finished, ImagePayload(conv=stacked.pop("conv", None), **stacked))

    @shielded
    def import_image(
        self, checkpoint_slot: int, record_row: int, generation: int, image: RequestImage, sampling: tuple[int, ...]
    ) -> None:
        check_image(image, self.config)
        check_room(image.pending_len, self.config)
        tensors, start, end = self._with_payload(image.payload).tensors(), image.checkpoint_len, image.committed_len
        entries = torch.arange(start, end, device=self.device) % self.config.record_capacity
        for index, layer in enumerate(self.storage.layers):
            part = {name: self._from_host(tensor[index]) for name, tensor in tensors.items()}
            layer.recurrent[checkpoint_slot].copy_(part["recurrent"])
            if image.pending_len:
                layer.record_u[record_row].index_copy_(1, entries, part["u"])
                layer.record_key_gate[record_row].index_copy_(1, entries, part["key_gate"])
                layer.record_inv_norm[record_row].index_copy_(1, entries, part["inv_norm"])
            if layer.conv is not None and layer.conv_ring is not None:
                layer.conv[checkpoint_slot].copy_(part["conv"])
                # As in _fill_ring, but of the position behind what is pending.
                history = part.get("conv_history", part["conv"]).mT
                places = torch.arange(end, end + len(history), device=self.device) % layer.conv_ring.shape[1]
                layer.conv_ring[record_row].index_copy_(0, places, history)
        self.storage.sampling[record_row] = self._to_device(sampling)
        cursor = self.storage.cursors[record_row]
        cursor.zero_()
        cursor[at.CURSOR_CHECKPOINT_LEN].fill_(image.checkpoint_len)
        cursor[at.CURSOR_PENDING_LEN].fill_(image.pending_len)
        cursor[at.CURSOR_FINISHED].fill_(int(image.finished))
        cursor[at.CURSOR_SLOT].fill_(checkpoint_slot)
        cursor[at.CURSOR_GENERATION].fill_(generation)

    # -- a step

    def check_blocks(self, block_table: Any, positions: Any, least_len: int, where: str) -> BlockTable:
        check_tensor("block_table", block_table, (None, None), (torch.int32,), self.device, where)
        if not block_table.shape[1]:
            raise SpecStateError(f"block_table has no column{where}")
        check_tensor("positions", positions, (None,), (torch.int32,), self.device, where)
        for name, tensor in (("block_table", block_table), ("positions", positions)):
            _check_len(name, tensor, least_len, where)
        # Padded rows read any entry, but one that is there.
        length = min(len(block_table), len(positions))
        return BlockTable(block_table.detach()[:length], positions.detach()[:length])

    @shielded
    def begin(self, batch: Batch, where: str, blocks: BlockTable | None = None) -> StepTensors:
        self.check_storage(where)
        # Ordinary tensors even under inference mode: a release may null a row outside of it.
        with torch.inference_mode(False), torch.no_grad():  # the first turns gradients on
            # By way of an array, in a third of the time that torch.tensor takes over a list.
            staged = self._to_device(torch.frombuffer(array("i", self.staged_columns(batch)), dtype=torch.int32))
            length = max(batch.query_lens, default=0)
            return self.kernels.begin(staged, len(batch.query_lens), batch.num_tokens, length, self._allocator, blocks)

    def check_storage(self, where: str) -> None:
        """Raises SpecStateError when storage was replaced under the kernels' table of addresses."""
        self.kernels.check_storage(where)

    def staged_columns(self, batch: Batch) -> list[int]:
        """What one copy carries to the device: the row columns, then query_start_loc."""
        starts = [0, *accumulate(batch.query_lens)]
        columns = (
            batch.checkpoint_slots,
            [-1 if handle is None else handle.record_slot for handle in batch.handles],
            starts[:-1],
            batch.query_lens,
            [0 if handle is None else handle.generation for handle in batch.handles],
            batch.min_accepted,
            range(len(batch.handles)) if batch.batch_index is None else batch.batch_index,
            batch.row_kinds,
            batch.boundary_slots,
        )
        return [*chain.from_iterable(zip(*columns, strict=True)), *starts]

    @shielded
    def capture(self, num_rows: int, num_tokens: int, blocks: BlockTable | None) -> tuple[torch.Tensor, StepTensors]:
        """Buffers for steps of one size inside a CUDA graph: staged columns, and the rows that its first node makes."""
        size, longest = num_rows * at.STAGED_COLUMNS + num_rows + 1, self.config.max_query_len
        allocator = self._allocator
        if self._arena is not None:  # the whole step's share: what is missing is missing before anything changed
            allocator = self._arena.part(captured_bytes(num_rows, num_tokens, longest))
        with torch.inference_mode(False), torch.no_grad():
            # Not filled here: under capture that would become part of the graph, and undo every staging.
            staged = allocator.empty((size,))
            return staged, self.kernels.begin(staged, num_rows, num_tokens, longest, allocator, blocks)

    @shielded
    def null_staged_row(self, staged: torch.Tensor, num_rows: int, row: int) -> None:
        """``null_row`` for a step that waits for its replay."""
        null_row(staged[: num_rows * at.STAGED_COLUMNS].view(num_rows, at.STAGED_COLUMNS), row)

    @shielded
    def warmup(self, captures: int) -> None:
        """Compiles every kernel that the config can launch; makes the small tensors of ``captures`` captured steps."""
        self.kernels.warmup()
        if self.device.type == "cuda":
            rows, longest = self.config.max_requests, self.config.max_query_len
            self._arena = Arena.of(captures * captured_bytes(rows, rows * longest, longest), self.device)

    @shielded
    def refresh(self, rows: StepTensors) -> None:
        self.kernels.refresh(rows)

    @shielded
    def null_row(self, rows: StepTensors, row: int) -> None:
        self.kernels.null_row(rows, row)

    @shielded
    def verify(self, rows: StepTensors, layer: int, inputs: LayerInputs, out: Any, where: str) -> torch.Tensor:
        given, num_tokens = (*inputs, out), rows.num_tokens
        known = self._looks.find(num_tokens, given)
        if known is None:
            self._check_window(num_tokens, inputs, out, where)
            known = self._looks.keep(num_tokens, given, None if out is None else self.kernels.layout(*given))
        qkv, gate, beta = inputs
        if out is None:
            spec = self.config.layer
            shape = (num_tokens, spec.num_heads, spec.head_v_dim)
            out = torch.empty(shape, dtype=self._activation, device=self.device)
        else:
            self._check_out(out, inputs, known.reaches, where)
        guard = LayerGuard(self.storage.layers[layer], rows.rows) if self._debug else None
        self.kernels.verify(rows, layer, qkv, gate, beta, out, known.layout)
        if guard is not None:
            guard.check(f"verify of layer {layer}{where}")
        return out

    @shielded
    def write_records(self, rows: StepTensors, layer: int, records: LayerRecords, where: str) -> None:
        spec, tokens, device = self.config.layer, rows.num_tokens, self.device
        heads, k_dim, v_dim = spec.num_heads, spec.head_k_dim, spec.head_v_dim
        u, key, gate, conv_input = records
        check_tensor("u", u, (tokens, heads, v_dim), [self._compute], device, where)
        check_tensor("key", key, (tokens, heads, k_dim), [self._activation], device, where)
        check_tensor("gate", gate, (tokens, heads, k_dim), [self._activation], device, where)
        if spec.conv_kernel_size is None:
            if conv_input is not None:
                raise SpecStateError(f"conv_input must be None when conv_kernel_size is None{where}")
        else:
            check_tensor("conv_input", conv_input, (tokens, spec.conv_channels), [self._activation], device, where)
        self.kernels.write_records(rows, layer, u, key, gate, conv_input)

    @shielded
    def sample(
        self, rows: StepTensors, target_logits: Any, draft_tokens: Any, draft_probs: Any, where: str
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        floats = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
        check_tensor("target_logits", target_logits, (rows.num_tokens, None), floats, self.device, where)
        if rows.num_tokens and not target_logits.shape[1]:
            raise SpecStateError(f"target_logits has an empty vocabulary{where}")
        integers = (torch.int64, torch.int32)
        check_tensor("draft_tokens", draft_tokens, (rows.num_tokens,), integers, self.device, where)
        if draft_probs is not None:
            check_tensor("draft_probs", draft_probs, tuple(target_logits.shape), [torch.float32], self.device, where)
        if self._debug:
            _check_numbers(rows, target_logits, draft_tokens, draft_probs, where)
        return self.kernels.sample(rows, target_logits, draft_tokens, draft_probs)

    def check_counts(self, name: str, values: Any, least_len: int, where: str) -> torch.Tensor:
        check_tensor(name, values, (None,), (torch.int32, torch.int64), self.device, where)
        return _check_len(name, values, least_len, where)

    def check_mask(self, name: str, values: Any, least_len: int, where: str) -> torch.Tensor:
        check_tensor(name, values, (None,), (torch.bool,), self.device, where)
        return _check_len(name, values, least_len, where)

    @shielded
    def by_row(self, rows: StepTensors, values: torch.Tensor) -> torch.Tensor:
        if not len(values):  # no live row, so no entry is read
            return values.new_zeros(rows.rows.shape[0])
        empty, shape = rows.allocator.empty, (len(rows.rows),)
        entry = torch.clamp(rows.rows[:, at.BATCH_INDEX], max=len(values) - 1, out=empty(shape))
        return torch.index_select(values, 0, entry, out=empty(shape, values.dtype))

    @shielded
    def end(self, rows: StepTensors, counts: torch.Tensor, fold: Any, finished: torch.Tensor | None) -> None:
        self.kernels.end(rows, counts, self.config.folds_at_end or (fold is not None and fold), finished)

    @shielded
    def cancel(self, rows: StepTensors, unverified: list[int]) -> None:
        # Once storage was released, no row owns anything.
        if self.config.folds_in_verify and self._kernels is not None:
            self.kernels.cancel(rows, unverified)

    @shielded
    def flush(self, rows: StepTensors) -> None:
        self.kernels.flush(rows)

    # -- looking at it

    def wait(self) -> None:
        self.storage.counters[:1].tolist()

    def cursors(self, record_rows: list[int]) -> list[Cursor]:
        if not record_rows:
            return []
        table = self.storage.cursors.tolist()
        return [_cursor_of(table[row]) for row in record_rows]

    def cursor(self, record_row: int) -> Cursor:
        return _cursor_of(self.storage.cursors[record_row].tolist())

    @shielded
    def read(self, record_row: int, layer: int, folded_by_verify: bool) -> LayerState:
        plan = self._to_device([[0, 0, record_row, 0, 0, 0, 0]])
        self._place(plan, record_row, folded_by_verify, at.PLAN_COUNT)
        recurrent, conv = self.kernels.read_state(plan, layer)
        return LayerState(recurrent[0], None if conv is None else conv[0])

    def counters(self) -> DeviceCounters:
        values = (self._counted if self._storage is None else self._storage.counters).tolist()
        return DeviceCounters(
            clamps=values[at.COUNT_CLAMPS],
            dropped_ends=values[at.COUNT_DROPPED],
            wasted_windows=values[at.COUNT_WASTED],
            misplaced_rows=values[at.COUNT_MISPLACED],
            windows=values[at.COUNT_WINDOWS],
            draft_tokens=values[at.COUNT_DRAFT_TOKENS],
            folds=folds_of(values[at.COUNT_FOLDS : at.COUNT_ACCEPTED]),
            accepted=tuple(values[at.COUNT_ACCEPTED :]),
        )

    @shielded
    def check_integrity(self, owners: dict[int, bool]) -> None:
        planned = plan_bytes(self.config).total_bytes
        if self.storage.owns_checkpoints and self.allocated_bytes != planned:
            raise SpecStateError(f"planned bytes are {planned}, allocated are {self.allocated_bytes}")
        scratch = self.storage.cursors[-1].tolist()
        if any(scratch):
            raise SpecStateError(f"the scratch row's cursor is {scratch}, it must stay 0")
        cursors = self.cursors([*owners])
        for index, layer in enumerate(self.storage.layers):
            null = [layer.recurrent[0]] if layer.conv is None else [layer.recurrent[0], layer.conv[0]]
            if self.storage.owns_checkpoints and any(bool(tensor.any()) for tensor in null):
                raise SpecStateError(f"the null slot was written in layer {index}")
            if layer.conv is None:
                continue
            for cursor, (record_row, folded_by_verify) in zip(cursors, owners.items(), strict=True):
                checkpoint_slot = cursor.checkpoint_slot
                if cursor.pending_len and not folded_by_verify:
                    continue
                position = self._to_device([cursor.committed_len])
                ring = read_conv_history(layer, self._to_device([record_row]), position)[0]
                if not torch.equal(bits(ring), bits(layer.conv[checkpoint_slot])):
                    raise SpecStateError(
                        f"layer {index}: conv history of checkpoint slot {checkpoint_slot} differs from the conv ring "
                        f"of record slot {record_row} at position {position.item()}"
                    )

    # -- inside

    def _check_states(self, states: Any) -> None:
        if not isinstance(states, list | tuple) or len(states) != self.config.num_layers:
            raise SpecStateError(
                f"states must be a list of {self.config.num_layers} (recurrent, conv) pairs, one per layer"
            )
        for index, (pair, layer) in enumerate(zip(states, self.storage.layers, strict=True)):
            if not isinstance(pair, list | tuple) or len(pair) != 2:
                raise SpecStateError(f"states[{index}] must be a (recurrent, conv) pair")
            for name, state, target in zip(("recurrent", "conv"), pair, (layer.recurrent, layer.conv), strict=True):
                if target is None:
                    if state is not None:
                        raise SpecStateError(f"states[{index}].conv must be None when conv_kernel_size is None")
                else:
                    check_tensor(f"states[{index}].{name}", state, target.shape[1:], [target.dtype], self.device)

    def _place(self, plan: torch.Tensor, record_row: int, folded_by_verify: bool, count: int) -> None:
        """Fills the rows of a fold plan with where a record slot stands, its pending records in column ``count``."""
        cursor = self.storage.cursors[record_row]
        start, pending = cursor[at.CURSOR_CHECKPOINT_LEN], cursor[at.CURSOR_PENDING_LEN]
        if folded_by_verify:
            start, pending = start + pending, torch.zeros_like(pending)
        plan[:, at.PLAN_SOURCE] = plan[:, at.PLAN_DESTINATION] = cursor[at.CURSOR_SLOT]
        plan[:, at.PLAN_CHECKPOINT_LEN], plan[:, count] = start, pending

    def _fill_ring(self, record_row: int, position: torch.Tensor) -> None:
        """The conv ring of a request that stands at ``position`` [1], from the checkpoint's history."""
        slot = self.storage.cursors[record_row, at.CURSOR_SLOT :][:1]
        for layer in self.storage.layers:
            if layer.conv is not None and layer.conv_ring is not None:
                # Entry of position p is p + W - 1, so the history's oldest input lies at `position`.
                size, history = layer.conv_ring.shape[1], layer.conv.shape[-1]
                entry = (position + torch.arange(history, device=self.device)) % size
                layer.conv_ring[record_row].index_copy_(0, entry, layer.conv.index_select(0, slot)[0].mT)

    def _with_payload(self, payload: ImagePayload | None) -> ImagePayload:
        if payload is None:
            raise SpecStateError(f"the image has no payload, as from backend 'metadata'; path {self.path!r} needs one")
        return payload

    def _to_host(self, tensors: list[torch.Tensor]) -> torch.Tensor:
        """Tensors of one shape stacked on the host, by copies that are started without a wait."""
        shape, on_gpu = (len(tensors), *tensors[0].shape), self.device.type == "cuda"
        host = torch.empty(shape, dtype=tensors[0].dtype, device="cpu", pin_memory=on_gpu)
        for place, tensor in zip(host, tensors, strict=True):
            place.copy_(tensor, non_blocking=True)
        return host

    def _apart(self, state: Any) -> Any:
        """``state``, a tensor or None, in memory that no tensor of the storage shares."""
        return state.clone() if state is not None and self.storage.meets(state) else state

    def _check_window(self, tokens: int, inputs: LayerInputs, out: Any, where: str) -> None:
        """Everything about a window's tensors but where they lie."""
        spec, device = self.config.layer, self.device
        wide = unique_dtypes(self._activation, torch.float32, self._compute)
        check_tensor("qkv", inputs.qkv, (tokens, spec.conv_channels), [self._activation], device, where)
        check_tensor("raw_gate", inputs.raw_gate, (tokens, spec.num_heads, spec.head_k_dim), wide, device, where)
        check_tensor("raw_beta", inputs.raw_beta, (tokens, spec.num_heads), wide, device, where)
        if out is not None:
            shape, dtypes = (tokens, spec.num_heads, spec.head_v_dim), unique_dtypes(self._activation, torch.float32)
            check_own_memory("out", check_tensor("out", out, shape, dtypes, device, where), where)
        for name, tensor in (*inputs._asdict().items(), ("out", out)):
            if tensor is not None:
                self.kernels.check_layout(name, tensor, where)

    def _check_out(self, out: torch.Tensor, inputs: LayerInputs, reaches: tuple[int, ...], where: str) -> None:
        """``out`` is written while inputs and state are read, so it must have memory of its own."""
        if out.is_inference() and not torch.is_inference_mode_enabled():
            raise SpecStateError(f"out is an inference tensor and may only be written in inference mode{where}")
        if not reaches[-1]:
            return
        start = out.data_ptr()
        end = start + reaches[-1]
        for name, tensor, reach in zip(inputs._fields, inputs, reaches, strict=False):
            first = tensor.data_ptr()
            if start < first + reach and first < end:
                raise SpecStateError(f"out must not share memory with {name}{where}")
        if self.storage.meets_span(start, end):
            raise SpecStateError(f"out must not share memory with the manager's tensors or the caller's storage{where}")

    def _to_device(self, values: Any) -> torch.Tensor:
        return self._from_host(torch.as_tensor(values, dtype=torch.int32, device="cpu"))

    def _from_host(self, host: torch.Tensor) -> torch.Tensor:
        return self._pinned(host).to(self.device, non_blocking=True)

    def _pinned(self, host: torch.Tensor) -> torch.Tensor:
        """``host`` where a copy to the device does not wait for it: not in pageable memory."""
        return host if self.device.type == "cpu" else host.pin_memory()


def _cursor_of(values: list[int]) -> Cursor:
    return Cursor(
        checkpoint_len=values[at.CURSOR_CHECKPOINT_LEN],
        pending_len=values[at.CURSOR_PENDING_LEN],
        generation=values[at.CURSOR_GENERATION],
        finished=bool(values[at.CURSOR_FINISHED]),
        checkpoint_slot=values[at.CURSOR_SLOT],
        boundary_len=values[at.CURSOR_BOUNDARY_LEN],
    )


def _image_part(
    layer: LayerStorage, checkpoint_slot: int, record_row: int, start: int, count: int
) -> dict[str, torch.Tensor | None]:
    """One layer of an image payload: the checkpoint at ``start`` and the ``count`` records behind it."""
    part: dict[str, torch.Tensor | None] = {
        "recurrent": layer.recurrent[checkpoint_slot],
        "conv": None if layer.conv is None else layer.conv[checkpoint_slot],
    }
    if count:
        device, capacity = layer.record_u.device, layer.record_u.shape[2]
        entries = torch.arange(start, start + count, device=device) % capacity
        for name, ring in (
            ("u", layer.record_u),
            ("key_gate", layer.record_key_gate),
            ("inv_norm", layer.record_inv_norm),
        ):
            part[name] = ring[record_row].index_select(1, entries)
        if layer.conv is not None:
            rows, position = (torch.full((1,), number, device=device) for number in (record_row, start + count))
            part["conv_history"] = read_conv_history(layer, rows, position)[0]
    return part


def _check_numbers(
    rows: StepTensors, logits: torch.Tensor, draft_tokens: torch.Tensor, draft_probs: torch.Tensor | None, where: str
) -> None:
    """What only a look at the numbers shows: logits that allow no token, lines of draft_probs that are none. Waits."""
    for row in rows.rows.tolist():
        first, last = row[at.FIRST_TOKEN], row[at.FIRST_TOKEN] + row[at.QUERY_LEN] - 1
        # Of a prompt only the last token's line is read.
        for token in range(last if row[at.ROW_KIND] == at.PROMPT else first, last + 1):
            line = logits[token]
            if bool(line.isnan().any()) or float(line.max()) == float("-inf"):
                raise SpecStateError(f"target_logits[{token}] has a NaN, or allows no token at all{where}")
            if draft_probs is None or token == first or row[at.ROW_KIND] == at.PROMPT:
                continue
            if not 0 <= int(draft_tokens[token]) < logits.shape[1]:
                continue
            q, total = draft_probs[token], float(draft_probs[token].sum())
            if not abs(total - 1.0) < 1e-3 or float(q.min()) < 0.0:
                raise SpecStateError(
                    f"draft_probs[{token}] adds up to {total:.6g}, its least is {float(q.min()):.6g}: no probabilities"
                    f"{where}"
                )


def _check_len(name: str, values: torch.Tensor, least_len: int, where: str) -> torch.Tensor:
    if len(values) < least_len:
        raise SpecStateError(f"{name} has {len(values)} entries, batch_index reads entry {least_len - 1}{where}")
    return values
