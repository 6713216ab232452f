"""Payloads on a device: checks what comes in, keeps the storage, launches kernels."""

from dataclasses import dataclass
from typing import Any

import torch

from specstate.backends import Cursor, DeviceCounters, LayerState
from specstate.backends.guard import LayerGuard
from specstate.batch import Batch
from specstate.config import StateConfig
from specstate.errors import SpecStateError
from specstate.kernels import reference as kernels
from specstate.kernels import rows as at
from specstate.kernels.greedy import greedy
from specstate.layout import plan_bytes
from specstate.params import LayerParams
from specstate.storage import Storage
from specstate.validation import DTYPES, bits, check_tensor, check_writable, unique_dtypes


@dataclass(frozen=True, slots=True, eq=False)
class TensorRows:
    """A step's device rows, and the host's word on how many tokens there are."""

    step: kernels.StepTensors
    num_tokens: int

    @property
    def query_start_loc(self) -> torch.Tensor:
        return self.step.query_start_loc

    @property
    def positions(self) -> torch.Tensor:
        return self.step.positions

    @property
    def committed_lens(self) -> torch.Tensor:
        return self.step.committed_lens

    @property
    def checkpoint_slots(self) -> torch.Tensor:
        return self.step.rows[:, at.CHECKPOINT_SLOT]

    @property
    def record_slots(self) -> torch.Tensor:
        return self.step.rows[:, at.RECORD_ROW]


class TensorBackend:
    """The reference kernels over a Storage; see Backend for what each call means."""

    path = "reference"

    def __init__(
        self,
        config: StateConfig,
        params: tuple[LayerParams, ...],
        storage: Storage,
        device: torch.device,
        debug: bool,
    ) -> None:
        self.config, self.params, self.storage, self.device = config, params, storage, device
        self._debug = debug
        self.allocated_bytes = storage.allocated_bytes
        self._bound = config.layer.gate_lower_bound
        self._folds_in_verify = config.fold_policy == "deferred"
        self._activation = DTYPES[config.activation_dtype]
        self._compute = storage.layers[0].record_u.dtype

    # -- slots

    def admit(self, checkpoint_slot: int, record_row: int, generation: int, end_tokens: tuple[int, ...]) -> None:
        for layer in self.storage.layers:
            layer.recurrent[checkpoint_slot].zero_()
            if layer.conv is not None and layer.conv_ring is not None:
                layer.conv[checkpoint_slot].zero_()
                layer.conv_ring[record_row].zero_()
        padded = (*end_tokens, *[-1] * (self.storage.end_tokens.shape[1] - len(end_tokens)))
        self.storage.end_tokens[record_row] = self._to_device(padded)
        self.storage.cursors[record_row] = self._to_device([0, 0, generation, 0])

    @torch.no_grad()
    def load(self, checkpoint_slot: int, record_row: int, states: Any, committed_len: int) -> None:
        if states is not None:
            self._check_states(states)
            for layer, (recurrent, conv) in zip(self.storage.layers, states, strict=True):
                layer.recurrent[checkpoint_slot].copy_(recurrent)
                if layer.conv is not None:
                    layer.conv[checkpoint_slot].copy_(conv)
        for layer in self.storage.layers:
            if layer.conv is not None and layer.conv_ring is not None:
                # Entry of position p is p + W - 1, so the history's oldest input lies at committed_len.
                size, history = layer.conv_ring.shape[1], layer.conv.shape[-1]
                for i in range(history):
                    layer.conv_ring[record_row, (committed_len + i) % size].copy_(layer.conv[checkpoint_slot, :, i])
        cursor = self.storage.cursors[record_row]
        cursor[at.CURSOR_CHECKPOINT_LEN].fill_(committed_len)
        cursor[at.CURSOR_PENDING_LEN].zero_()
        cursor[at.CURSOR_FINISHED].zero_()

    def release(self, record_row: int) -> None:
        self.storage.cursors[record_row].zero_()
        self.storage.end_tokens[record_row].fill_(-1)

    # -- a step

    def begin(self, batch: Batch) -> TensorRows:
        starts = [0]
        for query_len in batch.query_lens:
            starts.append(starts[-1] + query_len)
        columns = zip(
            batch.checkpoint_slots,
            batch.record_rows,
            starts,
            batch.query_lens,
            batch.generations,
            batch.min_accepted,
            batch.batch_index,
            batch.row_kinds,
            strict=False,
        )
        # Ordinary tensors even under inference mode: a release may null a row outside of it.
        with torch.inference_mode(False), torch.no_grad():
            # One copy carries the row columns and the starts.
            flat = self._to_device([*starts, *(entry for row in columns for entry in row)])
            rows = len(batch.query_lens)
            step = kernels.begin(
                flat[rows + 1 :].view(rows, at.STAGED_COLUMNS),
                flat[: rows + 1],
                tokens=batch.num_tokens,
                length=max(batch.query_lens, default=0),
                cursors=self.storage.cursors,
                folds_in_verify=self._folds_in_verify,
            )
        return TensorRows(step, batch.num_tokens)

    def refresh(self, rows: TensorRows) -> None:
        kernels.refresh(rows.step.rows, self.storage.cursors, folds_in_verify=self._folds_in_verify)
        rows.step.places = None

    def null_row(self, rows: TensorRows, row: int) -> None:
        kernels.null_row(rows.step.rows, row)
        rows.step.places = None

    @torch.no_grad()
    def verify(self, rows: TensorRows, layer: int, inputs: tuple[Any, Any, Any], out: Any, where: str) -> torch.Tensor:
        spec, tokens, device = self.config.layer, rows.num_tokens, self.device
        wide = unique_dtypes(self._activation, torch.float32, self._compute)
        qkv = check_tensor("qkv", inputs[0], (tokens, spec.conv_channels), [self._activation], device, where)
        gate = check_tensor("raw_gate", inputs[1], (tokens, spec.num_heads, spec.head_k_dim), wide, device, where)
        beta = check_tensor("raw_beta", inputs[2], (tokens, spec.num_heads), wide, device, where)
        shape = (tokens, spec.num_heads, spec.head_v_dim)
        if out is None:
            out = torch.empty(shape, dtype=self._activation, device=device)
        check_tensor("out", out, shape, unique_dtypes(self._activation, torch.float32), device, where)
        check_writable("out", out, where)
        guard = LayerGuard(self.storage.layers[layer], rows.step.rows) if self._debug else None
        kernels.verify(rows.step, self.storage.layers[layer], self.params[layer], self._bound, qkv, gate, beta, out)
        if guard is not None:
            guard.check(f"verify of layer {layer}{where}")
        return out

    @torch.no_grad()
    def write_records(self, rows: TensorRows, layer: int, records: tuple[Any, Any, Any, Any], where: str) -> None:
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
        kernels.write_records(rows.step, self.storage.layers[layer], u, key, gate, conv_input)

    @torch.no_grad()
    def sample(
        self, rows: TensorRows, target_logits: Any, draft_tokens: Any, where: str
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        floats = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
        check_tensor("target_logits", target_logits, (rows.num_tokens, None), floats, self.device, where)
        if rows.num_tokens and not target_logits.shape[1]:
            raise SpecStateError(f"target_logits has an empty vocabulary{where}")
        integers = (torch.int64, torch.int32)
        check_tensor("draft_tokens", draft_tokens, (rows.num_tokens,), integers, self.device, where)
        storage = self.storage
        return greedy(
            rows.step, target_logits, draft_tokens, storage.cursors, storage.end_tokens, self.config.max_query_len
        )

    def check_counts(self, name: str, values: Any, least_len: int, where: str) -> torch.Tensor:
        check_tensor(name, values, (None,), (torch.int32, torch.int64), self.device, where)
        return _check_len(name, values, least_len, where)

    def check_mask(self, name: str, values: Any, least_len: int, where: str) -> torch.Tensor:
        check_tensor(name, values, (None,), (torch.bool,), self.device, where)
        return _check_len(name, values, least_len, where)

    def by_row(self, rows: TensorRows, values: torch.Tensor) -> torch.Tensor:
        if not len(values):  # no live row, so no entry is read
            return values.new_zeros(rows.step.rows.shape[0])
        entry = rows.step.rows[:, at.BATCH_INDEX].long().clamp(max=len(values) - 1)
        return values[entry]

    @torch.no_grad()
    def end(self, rows: TensorRows, counts: torch.Tensor, fold: Any, finished: torch.Tensor | None) -> None:
        table, storage, policy = rows.step.rows, self.storage, self.config.fold_policy
        accepted = kernels.accepted_counts(table, counts, finished, storage.cursors, storage.counters)
        folds = True if policy == "eager" else False if fold is None else fold
        self._advance_and_fold(table, accepted, folds, self.config.record_capacity if policy == "ring" else None)

    @torch.no_grad()
    def cancel(self, rows: TensorRows, unverified: list[int]) -> None:
        table = rows.step.rows
        self._fold(kernels.verify_fold_plan(table), unverified)
        self._advance(table, torch.zeros_like(table[:, 0]), False, None)

    @torch.no_grad()
    def flush(self, rows: TensorRows) -> None:
        # Whatever verify would have folded is folded here instead, so it must not count as folded already.
        table = rows.step.rows
        table[:, at.FOLD_LEN] = 0
        self._advance_and_fold(table, torch.zeros_like(table[:, 0]), True, None)

    # -- looking at it

    def cursor(self, record_row: int) -> Cursor:
        checkpoint_len, pending_len, generation, finished = self.storage.cursors[record_row].tolist()
        return Cursor(checkpoint_len, pending_len, generation, bool(finished))

    @torch.no_grad()
    def read(self, checkpoint_slot: int, record_row: int, layer: int, folded_by_verify: bool) -> LayerState:
        cursor = self.cursor(record_row)
        start, count = cursor.checkpoint_len, cursor.pending_len
        if folded_by_verify:
            start, count = start + count, 0
        plan = self._to_device([[checkpoint_slot, checkpoint_slot, record_row, start, count]])
        recurrent, conv = kernels.read_state(plan, self.storage.layers[layer], self.params[layer], self._bound)
        return LayerState(recurrent[0], None if conv is None else conv[0])

    def counters(self) -> DeviceCounters:
        values = self.storage.counters.tolist()
        return DeviceCounters(
            clamps=values[at.COUNT_CLAMPS],
            dropped_ends=values[at.COUNT_DROPPED],
            wasted_windows=values[at.COUNT_WASTED],
        )

    def check_integrity(self, owners: dict[int, tuple[int, bool]]) -> None:
        planned = plan_bytes(self.config).total_bytes
        if self.storage.owns_checkpoints and self.allocated_bytes != planned:
            raise SpecStateError(f"planned bytes are {planned}, allocated are {self.allocated_bytes}")
        scratch = self.storage.cursors[-1].tolist()
        if any(scratch):
            raise SpecStateError(f"the scratch row's cursor is {scratch}, it must stay 0")
        for index, layer in enumerate(self.storage.layers):
            null = [layer.recurrent[0]] if layer.conv is None else [layer.recurrent[0], layer.conv[0]]
            if self.storage.owns_checkpoints and any(bool(tensor.any()) for tensor in null):
                raise SpecStateError(f"the null slot was written in layer {index}")
            if layer.conv is None:
                continue
            for record_row, (checkpoint_slot, folded_by_verify) in owners.items():
                cursor = self.cursor(record_row)
                if cursor.pending_len and not folded_by_verify:
                    continue
                position = self._to_device([cursor.checkpoint_len + cursor.pending_len])
                ring = kernels.read_conv_history(layer, self._to_device([record_row]), position)[0]
                if not torch.equal(bits(ring), bits(layer.conv[checkpoint_slot])):
                    raise SpecStateError(
                        f"layer {index}: conv history of checkpoint slot {checkpoint_slot} differs from the conv ring "
                        f"of record slot {record_row} at position {position.item()}"
                    )

    # -- inside

    def _advance_and_fold(
        self, table: torch.Tensor, accepted: torch.Tensor, fold: torch.Tensor | bool, capacity: int | None
    ) -> None:
        self._fold(self._advance(table, accepted, fold, capacity), range(self.config.num_layers))

    def _advance(
        self, table: torch.Tensor, accepted: torch.Tensor, fold: torch.Tensor | bool, capacity: int | None
    ) -> torch.Tensor:
        return kernels.advance(table, accepted, fold, self.storage.cursors, capacity, self.config.max_query_len)

    def _fold(self, plan: torch.Tensor, layers: Any) -> None:
        for layer in layers:
            kernels.fold(plan, self.storage.layers[layer], self.params[layer], self._bound)

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

    def _to_device(self, values: Any) -> torch.Tensor:
        host = torch.tensor(values, dtype=torch.int32)
        if self.device.type == "cpu":
            return host
        # From pinned memory, since a copy from pageable memory waits for the device.
        return host.pin_memory().to(self.device, non_blocking=True)


def _check_len(name: str, values: torch.Tensor, least_len: int, where: str) -> torch.Tensor:
    if len(values) < least_len:
        raise SpecStateError(f"{name} has {len(values)} entries, batch_index reads entry {least_len - 1}{where}")
    return values
