"""The reference: every kernel in plain torch, in the order of the mathematics. The oracle of all other backends.

Vectorised over rows and heads; a window is walked token by token, as the recurrence is written:

    g = -exp(A_log) softplus(x + dt_bias)        or   lower_bound sigmoid(exp(A_log) (x + dt_bias))
    S' = S diag(exp g);  u = b (v - S' k);  S <- S' + u k^T;  o = S q

with q and k normalised, q scaled by K^-1/2, b = sigmoid(raw beta) (Kimi Linear, arXiv 2510.26692, section 3; the
bounded gate is Kimi K3's). Everything is computed in float32, or float64 with float64 checkpoints, from values that
were rounded to the activation dtype first: what a verify uses and what a fold reads later are the same numbers.

Nothing here waits for the device. On a CPU, where looking at a value is free, rows without work are left out.
"""

from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from specstate.config import StateConfig
from specstate.kernels import Sampled, cursors, sampling
from specstate.kernels import rows as at
from specstate.kernels.arena import Allocator
from specstate.kernels.cursors import BlockTable, StepTensors, Window
from specstate.params import LayerParams
from specstate.storage import LayerStorage, Storage

#: Added to |k|^2 and |q|^2 before the root (design of the layer; fla-core's l2norm uses the same).
NORM_EPS = 1e-6


class ReferenceKernels:
    """The kernels of one manager, bound to its storage and parameters; see Kernels for what each call means."""

    path = "reference"

    def __init__(self, config: StateConfig, params: tuple[LayerParams, ...], storage: Storage) -> None:
        self.config, self.params, self.storage = config, params, storage
        self._bound = config.layer.gate_lower_bound

    def bind(self, params: tuple[LayerParams, ...]) -> None:
        self.params = params

    def warmup(self) -> None:
        """Nothing to compile; but cuBLAS makes its handle with the first product, and cannot under a capture."""
        one = self.storage.layers[0].record_u.new_ones(1, 1, 1)
        torch.baddbmm(one, one, one)

    def check_storage(self, where: str) -> None:
        """Nothing to check: tensors are looked up anew in every call."""

    def begin(
        self,
        staged: torch.Tensor,
        num_rows: int,
        num_tokens: int,
        length: int,
        allocator: Allocator,
        blocks: BlockTable | None = None,
    ) -> StepTensors:
        # Torch allocates in every operation here, so the step takes its memory from torch whatever the allocator.
        columns = num_rows * at.STAGED_COLUMNS
        return cursors.begin(
            staged[:columns].view(num_rows, at.STAGED_COLUMNS),
            staged[columns:],
            tokens=num_tokens,
            length=length,
            cursors=self.storage.cursors,
            counters=self.storage.counters,
            blocks=blocks,
            folds_in_verify=self.config.folds_in_verify,
        )

    def check_layout(self, name: str, tensor: torch.Tensor, where: str) -> None:
        """Torch follows any strides."""

    def refresh(self, step: StepTensors) -> None:
        cursors.refresh(step.rows, self.storage.cursors, folds_in_verify=self.config.folds_in_verify)
        step.places = None

    def null_row(self, step: StepTensors, row: int) -> None:
        cursors.null_row(step.rows, row)
        step.places = None

    def layout(self, qkv: torch.Tensor, raw_gate: torch.Tensor, raw_beta: torch.Tensor, out: torch.Tensor) -> Any:
        return None

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
        verify(step, self.storage.layers[layer], self.params[layer], self._bound, qkv, raw_gate, raw_beta, out)

    def write_records(
        self,
        step: StepTensors,
        layer: int,
        u: torch.Tensor,
        key: torch.Tensor,
        gate: torch.Tensor,
        conv_input: torch.Tensor | None,
    ) -> None:
        write_records(step, self.storage.layers[layer], u, key, gate, conv_input)

    def sample(
        self, step: StepTensors, logits: torch.Tensor, draft_tokens: torch.Tensor, draft_probs: torch.Tensor | None
    ) -> Sampled:
        table, longest = self.storage.sampling, self.config.max_query_len
        choice = sampling.choose(step, logits, draft_tokens, draft_probs, table)
        return sampling.accept(step, choice, draft_tokens, self.storage.cursors, table, longest)

    def end(
        self, step: StepTensors, counts: torch.Tensor, fold: torch.Tensor | bool, finished: torch.Tensor | None
    ) -> None:
        accepted = cursors.accepted_counts(step.rows, counts, finished, self.storage.cursors, self.storage.counters)
        self._fold(self._advance(step, accepted, fold), range(self.config.num_layers))

    def cancel(self, step: StepTensors, unverified: list[int]) -> None:
        self._fold(cursors.verify_fold_plan(step.rows), unverified)
        self._advance(step, None, False)

    def flush(self, step: StepTensors) -> None:
        # Whatever verify would have folded is folded here instead, so it must not count as folded already.
        step.rows[:, at.FOLD_LEN] = 0
        self._fold(self._advance(step, None, True), range(self.config.num_layers))

    def fold(self, plan: torch.Tensor) -> None:
        self._fold(plan, range(self.config.num_layers))

    def read_state(self, plan: torch.Tensor, layer: int) -> tuple[torch.Tensor, torch.Tensor | None]:
        return read_state(plan, self.storage.layers[layer], self.params[layer], self._bound)

    def _advance(self, step: StepTensors, accepted: torch.Tensor | None, fold: torch.Tensor | bool) -> torch.Tensor:
        storage, config = self.storage, self.config
        num_slots = len(storage.layers[0].recurrent)
        return cursors.advance(step, accepted, fold, storage.cursors, storage.counters, config, num_slots)

    def _fold(self, plan: torch.Tensor, layers: Iterable[int]) -> None:
        for layer in layers:
            fold(plan, self.storage.layers[layer], self.params[layer], self._bound)


class Records(NamedTuple):
    """Pending records of some rows, newest first; entries past a row's last are zero."""

    u: torch.Tensor  # [rows, H, m, V]
    key: torch.Tensor  # [rows, H, m, K]
    gate: torch.Tensor  # [rows, H, m, K] raw
    valid: torch.Tensor | None  # [rows, 1, m, 1] bool, entries that hold a record; None: all of them


class RecordPlaces(NamedTuple):
    """Ring entries of some rows' pending records, newest first."""

    rows: torch.Tensor  # [rows, 1] int64
    entries: torch.Tensor  # [rows, m] int64
    valid: torch.Tensor | None  # [rows, 1, m, 1] bool; None: all of them


class Places(NamedTuple):
    """Where the rows of a step read and write, alike in every layer; made anew when the rows change."""

    slots: torch.Tensor  # [rows] int64, checkpoint slots
    folds: torch.Tensor  # [rows] bool, rows whose pending records this verify folds
    pending: RecordPlaces
    written: torch.Tensor  # [length, rows] int64, record row of each window entry; past query_len the scratch row
    positions: torch.Tensor  # [length, rows] int64
    answered: torch.Tensor  # [tokens, 1, 1] bool, tokens whose output is not zero


def log_decay(raw_gate: torch.Tensor, params: LayerParams, lower_bound: float | None) -> torch.Tensor:
    """g [..., H, K] <= 0 from the raw gate [..., H, K]; the one gate function of verify and fold."""
    rate = params.A_log.to(raw_gate.dtype).exp()[:, None]
    x = raw_gate + params.dt_bias.to(raw_gate.dtype)
    # Softplus and sigmoid spelled out: torch's own differ in the last bit with an element's place in the tensor, and a
    # fold must give the same bits whichever rows it shares a batch with.
    if lower_bound is None:
        return -rate * (x.clamp(min=0.0) + (-x.abs()).exp().log1p())
    return lower_bound / (1.0 + (-rate * x).exp())


def inverse_norm(vectors: torch.Tensor) -> torch.Tensor:
    """1/|x| [...] of x [..., K], with NORM_EPS under the root."""
    return (vectors.square().sum(-1) + NORM_EPS).rsqrt()


def verify(
    step: StepTensors,
    layer: LayerStorage,
    params: LayerParams,
    lower_bound: float | None,
    qkv: torch.Tensor,
    raw_gate: torch.Tensor,
    raw_beta: torch.Tensor,
    out: torch.Tensor,
) -> None:
    """One layer's window: writes records, conv inputs and ``out`` [tokens, H, V]; folds FOLD_LEN pending records.

    qkv [tokens, C] activation dtype, raw_gate [tokens, H, K], raw_beta [tokens, H].
    """
    window = _window(step)
    if not window.gather.numel():
        out.zero_()
        return
    places = _places(step, layer.record_u.shape[2])
    heads, v_dim, k_dim = layer.recurrent.shape[1:]
    compute = layer.record_u.dtype
    inputs = qkv[window.gather]
    mixed = _convolve(step, layer, params, inputs)
    query, key, value = (
        x.unflatten(-1, (heads, -1)) for x in mixed.split([heads * k_dim, heads * k_dim, heads * v_dim], -1)
    )
    raw_gate = raw_gate[window.gather].to(qkv.dtype)

    # The state at each window's first token, [rows, H, V, K].
    state = layer.recurrent[places.slots].to(compute)
    state = fold_records(state, read_records(layer, places.pending), params, lower_bound)
    folded = state.to(layer.recurrent.dtype, copy=True) if step.folds_in_verify else None

    # The window's vectors, token by token: [length, rows, H, ..]; keys and queries side by side, [.., 2, K].
    unit = torch.stack([key, query], 3).to(compute)
    inv_norm = inverse_norm(unit)
    unit *= inv_norm[..., None]
    unit[..., 1, :] *= k_dim**-0.5
    value = value.to(compute)
    decay = log_decay(raw_gate.to(compute), params, lower_bound).exp()
    strength = torch.sigmoid(raw_beta[window.gather].to(compute))[..., None]

    # Products are row vectors times S^T, since torch takes five times as long on a CPU for a product with one column;
    # S'q comes with S'k, and S q = S'q + u (k q).
    state, corrections, remainders = state.flatten(0, 1), [], []
    wanted = torch.stack([value, torch.zeros_like(value)], 3)
    for g, kq, vo, b in zip(*(x.flatten(1, 2) for x in (decay, unit, wanted, strength)), strict=True):
        state *= g[:, None]
        rest = torch.baddbmm(vo, kq, state.mT, alpha=-1.0)  # v - S'k and -S'q, [rows * H, 2, V]
        u = rest[:, 0] * b
        state.addcmul_(u[:, :, None], kq[:, :1])
        corrections.append(u)
        remainders.append(rest[:, 1])
    u, rest = (torch.stack(x).unflatten(1, (-1, heads)) for x in (corrections, remainders))
    o = u * unit.prod(3).sum(-1, keepdim=True) - rest
    out.copy_(torch.where(places.answered, o[window.token_offset, window.token_row], 0.0))

    # All writes come last, the fold at the very end: a verify that fails on the way has folded nothing, so that the
    # step can be cancelled and the window verified again.
    _write_records(places, layer, u, key, raw_gate, inv_norm[..., 0], inputs)
    if folded is None:
        return
    if layer.conv is not None:
        history = read_conv_history(layer, step.rows[:, at.RECORD_ROW], step.committed_lens)
        _write_slots(layer.conv, places.slots, history, places.folds)
    _write_slots(layer.recurrent, places.slots, folded, places.folds)


def write_records(
    step: StepTensors,
    layer: LayerStorage,
    u: torch.Tensor,
    key: torch.Tensor,
    gate: torch.Tensor,
    conv_input: torch.Tensor | None,
) -> None:
    """Records of the caller's own verify: u [tokens, H, V], key, raw gate [tokens, H, K], conv_input [tokens, C]."""
    gather = _window(step).gather
    if not gather.numel():
        return
    inv_norm = inverse_norm(key.to(layer.record_u.dtype))
    inputs = key if conv_input is None else conv_input  # not read without a conv
    by_row = (x[gather] for x in (u, key, gate, inv_norm, inputs))
    _write_records(_places(step, layer.record_u.shape[2]), layer, *by_row)


def fold(plan: torch.Tensor, layer: LayerStorage, params: LayerParams, lower_bound: float | None) -> None:
    """Folds ``plan`` in one layer, recurrent state and conv history together.

    The destination gets what holds at the source's position + count, the boundary slot what holds at + boundary count.
    Either may be the source itself.
    """
    wanted = (at.PLAN_DESTINATION, at.PLAN_COUNT), (at.PLAN_BOUNDARY_SLOT, at.PLAN_BOUNDARY_COUNT)
    writes = []
    for slot, count in wanted:
        part = plan.clone()
        part[:, at.PLAN_COUNT] = plan[:, count]
        mask = plan[:, at.PLAN_COUNT] > 0 if slot == at.PLAN_DESTINATION else plan[:, slot] > 0
        if not plan.is_cuda:
            part, mask = part[mask], mask[mask]
        if len(part):
            writes.append((part[:, slot].long(), mask, *read_state(part, layer, params, lower_bound)))
    # Both are read before either is written. Of a row whose two slots are one, both are the same state.
    for slots, mask, state, history in writes:
        _write_slots(layer.recurrent, slots, state.to(layer.recurrent.dtype), mask)
        if layer.conv is not None and history is not None:
            _write_slots(layer.conv, slots, history, mask)


def read_state(
    plan: torch.Tensor, layer: LayerStorage, params: LayerParams, lower_bound: float | None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """What ``fold`` would write: state [rows, H, V, K] in the compute dtype, conv history [rows, C, W-1] or None."""
    record_row, start, count = (plan[:, c] for c in (at.PLAN_RECORD_ROW, at.PLAN_CHECKPOINT_LEN, at.PLAN_COUNT))
    state = layer.recurrent[plan[:, at.PLAN_SOURCE].long()].to(layer.record_u.dtype)
    records = read_records(layer, record_places(record_row, start, count, layer.record_u.shape[2]))
    state = fold_records(state, records, params, lower_bound)
    return state, None if layer.conv is None else read_conv_history(layer, record_row, start + count)


def fold_records(state: torch.Tensor, records: Records, params: LayerParams, lower_bound: float | None) -> torch.Tensor:
    """S_0 diag(e^{G_m}) + sum_j u_j (k_j e^{G_m - G_j})^T for state [rows, H, V, K], in place; the one fold routine.

    Sums of newer gates come from a running sum that starts at the newest: G_m - G_j as a difference would cancel.
    """
    if not records.u.shape[2]:
        return state
    compute = state.dtype
    key = records.key.to(compute)
    key = key * inverse_norm(key)[..., None]
    gate = log_decay(records.gate.to(compute).transpose(1, 2), params, lower_bound).transpose(1, 2)
    if records.valid is not None:
        gate = torch.where(records.valid, gate, 0.0)
    from_own = gate.cumsum(2)  # sum of the gates of record j and newer ones, [rows, H, m, K]
    newer = F.pad(from_own[:, :, :-1], (0, 0, 1, 0))
    state *= from_own[:, :, -1:].exp()
    weighted = key * newer.exp()
    state.flatten(0, 1).baddbmm_(records.u.flatten(0, 1).mT, weighted.flatten(0, 1))
    return state


def record_places(record_rows: torch.Tensor, start: torch.Tensor, count: torch.Tensor, capacity: int) -> RecordPlaces:
    """The places of positions start .. start + count of each row; [rows] int32 tensors, rings of ``capacity``."""
    # On a GPU counts are not known here: the whole ring is read, and masked.
    on_host = not count.is_cuda and count.numel() > 0
    place = torch.arange(int(count.max()) if on_host else capacity, device=count.device)
    valid = None if on_host and int(count.min()) == len(place) else (place < count[:, None])[:, None, :, None]
    return RecordPlaces(record_rows.long()[:, None], ((start + count)[:, None] - 1 - place) % capacity, valid)


def read_records(layer: LayerStorage, places: RecordPlaces) -> Records:
    """The records at ``places``. Entries without a record of their row may hold anything, NaN too; they read as 0."""
    # Rows and entries index dimensions that stand apart, so the result is [rows, m, H, ..], with heads out of place.
    u, key_gate = (
        ring[places.rows, :, places.entries].transpose(1, 2) for ring in (layer.record_u, layer.record_key_gate)
    )
    if places.valid is not None:
        u, key_gate = torch.where(places.valid, u, 0.0), torch.where(places.valid[..., None], key_gate, 0.0)
    return Records(u, key_gate[..., 0, :], key_gate[..., 1, :], places.valid)


def read_conv_history(layer: LayerStorage, record_rows: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
    """The W - 1 conv inputs before ``position`` [rows], as [rows, C, W-1], oldest first."""
    assert layer.conv is not None and layer.conv_ring is not None
    # The input of position p lies in entry p + W - 1, so the oldest of them lies in entry `position`.
    entry = position[:, None] + torch.arange(layer.conv.shape[-1], dtype=position.dtype, device=position.device)
    return layer.conv_ring[record_rows.long()[:, None], (entry % layer.conv_ring.shape[1]).long()].mT


def _places(step: StepTensors, capacity: int) -> Places:
    places: Places | None = step.places
    if places is None:
        rows, window = step.rows, _window(step)
        record_row, live = rows[:, at.RECORD_ROW], cursors.live_rows(rows)
        place = torch.arange(window.length, device=rows.device)
        step.places = places = Places(
            slots=rows[:, at.CHECKPOINT_SLOT].long(),
            folds=rows[:, at.FOLD_LEN] > 0,
            pending=record_places(record_row, rows[:, at.CHECKPOINT_LEN], rows[:, at.PENDING_LEN], capacity),
            written=torch.where(place[:, None] < rows[:, at.QUERY_LEN], record_row, -1).long(),
            positions=step.committed_lens + place[:, None],
            answered=(live[window.token_row] & window.token_live)[:, None, None],
        )
    return places


def _window(step: StepTensors) -> Window:
    assert step.window is not None
    return step.window


def _convolve(step: StepTensors, layer: LayerStorage, params: LayerParams, inputs: torch.Tensor) -> torch.Tensor:
    """q|k|v of the windows after conv and SiLU, [length, rows, C] in the activation dtype; inputs alike."""
    if layer.conv is None or params.conv_weight is None:
        return inputs
    history = read_conv_history(layer, step.rows[:, at.RECORD_ROW], step.committed_lens)
    compute = layer.record_u.dtype
    taken = torch.cat([history.movedim(2, 0), inputs]).to(compute)  # [W-1+length, rows, C]
    weight = params.conv_weight.to(compute)
    mixed = taken.new_zeros(()) if params.conv_bias is None else params.conv_bias.to(compute)
    for tap in range(weight.shape[1]):
        mixed = mixed + taken[tap : tap + len(inputs)] * weight[:, tap]
    return F.silu(mixed).to(inputs.dtype)


def _write_records(
    places: Places,
    layer: LayerStorage,
    u: torch.Tensor,
    key: torch.Tensor,
    gate: torch.Tensor,
    inv_norm: torch.Tensor,
    inputs: torch.Tensor,
) -> None:
    """Writes [length, rows, ..] of a window into the rings; conv ``inputs`` only where there is a conv."""
    entry = places.positions % layer.record_u.shape[2]
    for ring, values in (
        (layer.record_u, u),
        (layer.record_key, key),
        (layer.record_gate, gate),
        (layer.record_inv_norm, inv_norm),
    ):
        ring[places.written, :, entry] = values.to(ring.dtype)
    if layer.conv_ring is not None and layer.conv is not None:
        entry = (places.positions + layer.conv.shape[-1]) % layer.conv_ring.shape[1]
        layer.conv_ring[places.written, entry] = inputs


def _write_slots(slots_of: torch.Tensor, slots: torch.Tensor, values: torch.Tensor, mask: torch.Tensor) -> None:
    """slots_of[slots] = values where ``mask`` [rows]; every other slot keeps its bytes."""
    if slots_of.is_cuda:  # choosing rows would wait for the device, so the others write back what they hold
        keep = slots_of[slots]
        slots_of[slots] = torch.where(mask.view(-1, *[1] * (values.dim() - 1)), values, keep)
    elif mask.any():
        slots_of[slots[mask]] = values[mask]
