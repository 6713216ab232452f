"""The Triton and Gluon kernels beside the reference in float64, over storages of equal content, without a manager.

Everything that no row of a step owns is NaN: the null slot, the scratch row, spare slots, ring entries that hold no
record. A kernel that reads what it should not shows NaN, one that writes what it should not shows in ``changed``.
"""

import dataclasses
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch

from specstate import LayerParams, StateConfig
from specstate.kernels import rows as at
from specstate.kernels.arena import TorchAllocator
from specstate.kernels.cursors import BlockTable, StepTensors
from specstate.kernels.portable import PortableKernels
from specstate.kernels.reference import ReferenceKernels, inverse_norm
from specstate.storage import Storage
from specstate.validation import DTYPES
from tests.factories import LayerInputs, make_config, make_inputs, make_params, widened

#: Unit roundoff, the largest relative error of rounding once.
ROUNDOFF = {"float32": 2.0**-24, "float16": 2.0**-11, "bfloat16": 2.0**-8}

#: Relative error in the norm of a row (all tokens and heads of a window, or all heads of a state) that the contract
#: aims at in every regime: about 16 roundings to float32.
AIM = 1e-6

KINDS = {"decode": at.DECODE, "prompt": at.PROMPT, "dummy": at.DUMMY}


@dataclass(frozen=True)
class Row:
    """One row of a step, and what its request holds."""

    checkpoint_len: int = 0
    pending_len: int = 0
    query_len: int = 1
    kind: Literal["decode", "prompt", "dummy"] = "decode"
    least: int = 1
    finished: bool = False
    late: bool = False
    """The record slot has another owner by now."""
    own: bool = False
    """It has a slot of its own for boundary checkpoints."""
    boundary_len: int = 0

    @property
    def committed_len(self) -> int:
        return self.checkpoint_len + self.pending_len


def small_config(**changes: Any) -> StateConfig:
    """One layer and head of 16 x 16 in float32, no conv, window of 4: what the interpreter is quick with.

    Under path "hopper" head dimensions are those that it covers, whatever ``changes`` say.
    """
    sizes = {"num_layers": 1, "num_heads": 1, "head_k_dim": 16, "head_v_dim": 16, "conv_kernel_size": None}
    dtypes = {"checkpoint_dtype": "float32", "activation_dtype": "float32"}
    return make_config(**widened(changes.get("path"), **{**sizes, **dtypes, **changes}))


def kernels_of(config: StateConfig) -> type[PortableKernels]:
    """The kernels that the config pins; portable ones where it pins none."""
    if config.path == "hopper":
        from specstate.kernels.hopper import HopperKernels  # only where a GPU can run them

        return HopperKernels
    return PortableKernels


def to_cpu(params: list[LayerParams]) -> tuple[LayerParams, ...]:
    """The same parameters for the reference, which runs on the CPU."""
    names = [field.name for field in dataclasses.fields(LayerParams)]
    tensors = [{name: getattr(layer, name) for name in names} for layer in params]
    return tuple(LayerParams(**{n: None if t is None else t.cpu() for n, t in layer.items()}) for layer in tensors)


@contextmanager
def no_waits() -> Iterator[None]:
    """Whatever makes the host wait for the GPU in here is an error."""
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def alike_on(tensor: torch.Tensor, device: str) -> torch.Tensor:
    """A copy of ``tensor`` on ``device`` with its strides."""
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device).copy_(tensor)


class Rig:
    """Both kernels for ``rows``. Row i has record row i + 1 and checkpoint slot i + 2; slot 1, record 0 are spare.

    With block_size, three more slots a row follow: first one for each row's own boundary checkpoint, then spare ones.
    """

    def __init__(
        self,
        config: StateConfig,
        rows: list[Row],
        device: str,
        seed: int = 0,
        params: list[LayerParams] | None = None,
        storage: Any = None,
    ) -> None:
        num_slots = len(rows) + 2 + (0 if config.block_size is None else 3 * len(rows))
        sizes = {"max_requests": len(rows) + 1, "num_checkpoints": num_slots}
        self.config, self.rows = config.model_copy(update=sizes), rows
        exact = self.config.model_copy(update={"checkpoint_dtype": "float64"})
        self.params = make_params(config, seed, device) if params is None else params
        self.storage = Storage(self.config, torch.device(device), storage)
        self.exact_storage = Storage(exact, torch.device("cpu"))
        self._fill(seed)
        self.kernels = kernels_of(self.config)(self.config, tuple(self.params), self.storage)
        self.exact = ReferenceKernels(exact, to_cpu(self.params), self.exact_storage)
        self.device = device

    # -- where row i lies

    def slot(self, row: int) -> int:
        return 0 if self.rows[row].kind == "dummy" else row + 2

    def record_row(self, row: int) -> int:
        return -1 if self.rows[row].kind == "dummy" else row + 1

    def boundary_slot(self, row: int) -> int:
        return len(self.rows) + 3 + row if self.rows[row].own else 0

    @property
    def live(self) -> list[int]:
        return [row for row in range(len(self.rows)) if self.rows[row].kind != "dummy" and not self.rows[row].late]

    def window(self, row: int) -> slice:
        start = sum(r.query_len for r in self.rows[:row])
        return slice(start, start + self.rows[row].query_len)

    # -- content

    def _fill(self, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed + 100)

        def normal(tensor: torch.Tensor) -> torch.Tensor:
            return torch.randn(tensor.shape, generator=generator).to(tensor)

        for layer in self.storage.layers:
            for tensor in layer:
                if tensor is not None:
                    tensor.fill_(torch.nan)
            for index, row in enumerate(self.rows):
                if row.kind == "dummy":
                    continue
                record_row = self.record_row(index)
                layer.recurrent[self.slot(index)] = normal(layer.recurrent[0])
                entries = torch.arange(row.checkpoint_len, row.committed_len) % self.config.record_capacity
                for entry in entries.tolist():
                    layer.record_u[record_row, :, entry] = normal(layer.record_u[0, :, 0])
                    layer.record_key_gate[record_row, :, entry] = normal(layer.record_key_gate[0, :, 0])
                    key = layer.record_key[record_row, :, entry].float()
                    layer.record_inv_norm[record_row, :, entry] = inverse_norm(key.double()).float()
                if layer.conv_ring is not None:
                    size = layer.conv_ring.shape[1]
                    # The last W - 1 inputs, and those of the pending tokens as far as the ring still holds them.
                    for entry in range(row.committed_len, row.committed_len + size):
                        if entry < row.committed_len + self.config.layer.conv_history_len:
                            layer.conv_ring[record_row, entry % size] = normal(layer.conv_ring[0, 0])
        for index, row in enumerate(self.rows):
            if row.kind != "dummy":
                cursor = [row.checkpoint_len, row.pending_len, self.generation(index) + row.late, row.finished]
                cursor += [self.slot(index), row.boundary_len]
                self.storage.cursors[self.record_row(index)] = torch.tensor(cursor, dtype=torch.int32)
        self.copy_to_exact()

    def copy_to_exact(self) -> None:
        """The reference's storage gets the kernels' content, widened."""
        for ours, theirs in zip(self.storage.layers, self.exact_storage.layers, strict=True):
            for mine, exact in zip(ours, theirs, strict=True):
                if mine is not None:
                    exact.copy_(mine.cpu())
        self.exact_storage.cursors.copy_(self.storage.cursors.cpu())
        self.exact_storage.sampling.copy_(self.storage.sampling.cpu())

    def generation(self, row: int) -> int:
        return 10 + row

    # -- calls

    def begin(
        self,
        pad_rows: int = 0,
        pad_tokens: int = 0,
        blocks: BlockTable | None = None,
        entries: Sequence[int] | None = None,
    ) -> tuple[StepTensors, StepTensors]:
        """The step of all rows, for the kernels and for the reference; ``entries``: batch_index, by default i."""
        columns, start = [], 0
        for index, row in enumerate(self.rows):
            least = row.query_len if row.kind == "prompt" else row.least
            entry = index if entries is None else entries[index]
            place = [self.slot(index), self.record_row(index), start, row.query_len]
            columns += [*place, self.generation(index), least, entry, KINDS[row.kind]]
            columns.append(0 if blocks is not None else self.boundary_slot(index))
            start += row.query_len
        for _ in range(pad_rows):
            columns += [0, -1, start, 0, 0, 0, 0, at.DUMMY, 0]
        starts = [0]
        for row in self.rows:
            starts.append(starts[-1] + row.query_len)
        staged = torch.tensor(columns + starts + [start] * pad_rows, dtype=torch.int32)
        sizes = len(self.rows) + pad_rows, start + pad_tokens, max(row.query_len for row in self.rows)
        return self.begin_staged(staged, *sizes, blocks=blocks)

    def begin_staged(
        self, staged: torch.Tensor, *sizes: int, blocks: BlockTable | None = None
    ) -> tuple[StepTensors, StepTensors]:
        """The same from columns of one's own, for (rows, tokens, longest window)."""
        given = None if blocks is None else BlockTable(*(alike_on(tensor, self.device) for tensor in blocks))
        ours = self.kernels.begin(staged.to(self.device), *sizes, TorchAllocator(torch.device(self.device)), given)
        return ours, self.exact.begin(staged, *sizes, TorchAllocator(torch.device("cpu")), blocks)

    def inputs(self, tokens: int, seed: int = 1) -> list[LayerInputs]:
        return make_inputs(self.config, tokens, seed, self.device)

    def verify(
        self, steps: tuple[StepTensors, StepTensors], layer: int, inputs: LayerInputs, out: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Outputs [tokens, H, V] of both, the kernels' in float32 into NaN unless ``out`` is given."""
        spec, tokens = self.config.layer, len(inputs.qkv)
        shape = (tokens, spec.num_heads, spec.head_v_dim)
        out = torch.full(shape, torch.nan, device=self.device) if out is None else out
        self.kernels.verify(steps[0], layer, inputs.qkv, inputs.raw_gate, inputs.raw_beta, out)
        exact = torch.full(shape, torch.nan, dtype=torch.float64)
        given = (inputs.qkv.cpu(), inputs.raw_gate.cpu(), inputs.raw_beta.cpu())
        self.exact.verify(steps[1], layer, *given, exact)
        return out, exact

    # -- looking at it

    def snapshot(self) -> list[dict[str, torch.Tensor]]:
        return [snapshot(layer) for layer in self.storage.layers]

    def written(self, layer: int, before: dict[str, torch.Tensor]) -> dict[str, set[tuple[int, int]]]:
        """(slot, entry) pairs that changed since ``before``; entry of the ring, -1 for checkpoints."""
        found = {}
        for name, after in snapshot(self.storage.layers[layer]).items():
            changed = (bytes_of(after[..., None]) != bytes_of(before[name][..., None])).any(-1)
            if name in ("recurrent", "conv"):
                places = [(slot, -1) for slot in changed.flatten(1).any(1).nonzero()[:, 0].tolist()]
            else:
                ring = changed if name == "conv_ring" else changed.movedim(2, 1)  # entries before heads
                places = [(slot, entry) for slot, entry in ring.flatten(2).any(2).nonzero().tolist()]
            found[name] = set(places)
        return found

    def window_entries(self, ring_len: int, ahead: int = 0) -> set[tuple[int, int]]:
        """(record row, entry) of every live window's positions in a ring of ``ring_len``."""
        return {
            (self.record_row(i), (self.rows[i].committed_len + t + ahead) % ring_len)
            for i in self.live
            for t in range(self.rows[i].query_len)
        }

    def records(self, row: int, layer: int = 0) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
        """The window's records of one row, [H, query_len, ..] each: the kernels' and the reference's, on the CPU."""
        positions = torch.arange(self.rows[row].query_len) + self.rows[row].committed_len
        entry = positions % self.config.record_capacity
        names = ("record_u", "record_key", "record_gate", "record_inv_norm")
        ours, theirs = (
            {name: getattr(held.layers[layer], name).cpu()[self.record_row(row)][:, entry] for name in names}
            for held in (self.storage, self.exact_storage)
        )
        return ours, theirs


def snapshot(layer: Any) -> dict[str, torch.Tensor]:
    return {name: tensor.detach().cpu().clone() for name, tensor in layer._asdict().items() if tensor is not None}


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """[.., size * itemsize] uint8, so that NaN equals itself."""
    return tensor.contiguous().view(torch.uint8)


def row_error(got: torch.Tensor, want: torch.Tensor) -> float:
    """|got - want| / |want| over a whole row, in float64. NaN when anything is not finite."""
    difference = got.double().cpu() - want.double().cpu()
    return float(difference.norm() / want.double().norm().clamp(min=1e-30).cpu())


def rounding_budget(config: StateConfig) -> float:
    """Relative error in a row's norm of what a verify makes of exact inputs.

    Behind a conv, q, k and v are rounded to the activation dtype by both sides, and a value between two neighbours may
    go either way; at most one in a few hundred does, but each is allowed to.
    """
    dtype = config.activation_dtype
    conv = config.layer.conv_kernel_size is not None and dtype != "float32"
    return AIM + (3 * ROUNDOFF[dtype] if conv else 0.0)


def check_verify(
    rig: Rig,
    outputs: tuple[torch.Tensor, torch.Tensor],
    layer: int = 0,
) -> None:
    """Outputs and records of every live row against the reference in float64; zeros where no live row has a token."""
    got, want = outputs
    budget = rounding_budget(rig.config)
    exact_key = rig.config.layer.conv_kernel_size is None
    answered = torch.zeros(len(got), dtype=torch.bool)
    for row in rig.live:
        here = rig.window(row)
        answered[here] = True
        assert row_error(got[here], want[here]) <= budget, f"output of row {row}"
        ours, theirs = rig.records(row, layer)
        assert row_error(ours["record_u"], theirs["record_u"]) <= budget, f"u of row {row}"
        assert torch.equal(ours["record_gate"], theirs["record_gate"]), f"gate of row {row}"
        if exact_key:
            assert torch.equal(ours["record_key"], theirs["record_key"]), f"key of row {row}"
        else:
            limit = 2 * ROUNDOFF[rig.config.activation_dtype] + AIM
            torch.testing.assert_close(ours["record_key"], theirs["record_key"], rtol=limit, atol=AIM)
        # 1/|k| of the key that was written: a sum of K squares, a root and a quotient.
        wanted = inverse_norm(ours["record_key"].double())
        torch.testing.assert_close(ours["record_inv_norm"].double(), wanted, rtol=4 * 2.0**-24, atol=0.0)
    assert not bytes_of(got.cpu()[~answered]).any(), "output of tokens that no live row has"


def check_written(rig: Rig, layer: int, before: dict[str, torch.Tensor], folds: bool) -> None:
    """A verify wrote its own windows' ring entries, and checkpoints only where it folds."""
    written = rig.written(layer, before)
    ring = rig.window_entries(rig.config.record_capacity)
    for name in ("record_u", "record_key_gate", "record_inv_norm"):
        assert written[name] == ring, name
    if "conv_ring" in written:
        history = rig.config.layer.conv_history_len
        size = history + rig.config.max_query_len
        assert written["conv_ring"] == rig.window_entries(size, ahead=history)
    folding = {(rig.slot(row), -1) for row in rig.live if folds and rig.rows[row].pending_len}
    for name in ("recurrent", "conv"):
        assert written.get(name, folding) == folding, name


def activation(config: StateConfig) -> torch.dtype:
    return DTYPES[config.activation_dtype]
