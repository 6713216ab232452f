"""Launches the kernels for Hopper GPUs (compute capability 9.0); what they do not cover runs on the portable ones.

One launch a layer, the convolution included, and one fold for all layers. Consecutive verifies of a step are
programmatic dependent launches: the next one's programs start, and ask for their states, while the last one's end.
"""

from itertools import product

import torch
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from specstate.config import StateConfig
from specstate.errors import SpecStateError
from specstate.kernels import rows as at
from specstate.kernels.arena import Allocator, TorchAllocator
from specstate.kernels.cursors import BlockTable, StepTensors
from specstate.kernels.gluon_fold import fold_kernel
from specstate.kernels.gluon_verify import verify_kernel
from specstate.kernels.portable import PortableKernels
from specstate.kernels.supported import hopper_refusal
from specstate.kernels.tiles import VerifyTile, fold_block, fold_blocks, verify_tile, verify_tiles
from specstate.params import LayerParams
from specstate.storage import Storage

_GLUON_DTYPES = {torch.float32: gl.float32, torch.bfloat16: gl.bfloat16, torch.float16: gl.float16}

#: Bytes of a vector load, and what addresses and strides of the window must be multiples of.
VECTOR_BYTES = 16

#: Bytes of a row of a state chunk, the widest that TMA swizzles.
CHUNK_BYTES = 128

#: Programs of the fold on a multiprocessor: as many as shared memory lets run.
FOLD_PROGRAMS = 3


class HopperKernels(PortableKernels):
    """The kernels of one manager on a Hopper GPU. Raises SpecStateError when they cannot follow its storage."""

    path = "hopper"

    def __init__(self, config: StateConfig, params: tuple[LayerParams, ...], storage: Storage) -> None:
        refusal = hopper_refusal(config, storage)
        if refusal is not None:
            raise SpecStateError(f"path 'hopper': {refusal}")
        spec = config.layer
        self._descriptors: dict[tuple[int, int], TensorDescriptor] = {}
        self._fold_programs = FOLD_PROGRAMS * _num_multiprocessors(storage.cursors.device)
        capacity = max(4, _power_of_two(config.record_capacity))
        window = {"T": config.max_query_len, "R": config.record_capacity, "H": spec.num_heads, "V": spec.head_v_dim}
        gate = {"BOUNDED": spec.gate_lower_bound is not None}
        self._verify_shape = {
            **window,
            **gate,
            "W": spec.conv_kernel_size or 0,
            "BIAS": params[0].conv_bias is not None,
            "FOLDS": config.folds_in_verify,
            "CAPACITY": capacity if config.folds_in_verify else 16,
        }
        self._fold_shape = {
            **gate,
            "H": spec.num_heads,
            "V": spec.head_v_dim,
            "R": config.record_capacity,
            "CAPACITY": capacity,
            "C": spec.conv_channels,
            "HISTORY": spec.conv_history_len,
            "RING": spec.conv_history_len + config.max_query_len,
            "CHECKPOINT": _GLUON_DTYPES[storage.layers[0].recurrent.dtype],
            "ACTIVATION": _GLUON_DTYPES[storage.layers[0].record_key_gate.dtype],
        }
        self._last: tuple[StepTensors, int] | None = None
        super().__init__(config, params, storage)

    def bind(self, params: tuple[LayerParams, ...]) -> None:
        super().bind(params)
        self._last = None
        self._verify_shape["BIAS"] = params[0].conv_bias is not None
        names = {"A_LOG": params[0].A_log, "DT_BIAS": params[0].dt_bias}
        self._fold_shape |= {name: _GLUON_DTYPES[tensor.dtype] for name, tensor in names.items()}

    def warmup(self) -> None:
        super().warmup()
        # That met the tiles of a small step. A window that is not aligned runs on the portable kernels.
        spec, device = self.config.layer, self.storage.cursors.device
        activation = self.storage.layers[0].record_key_gate.dtype

        def zeros(*shape: int, dtype: torch.dtype = activation) -> torch.Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        staged = torch.zeros(at.STAGED_COLUMNS + 2, dtype=torch.int32, device=device)
        staged[at.RECORD_ROW], staged[at.QUERY_LEN], staged[-1] = -1, 1, 1
        step = self.begin(staged, 1, 1, 1, TorchAllocator(device))
        qkv, beta = zeros(1, spec.conv_channels), zeros(1, spec.num_heads)
        out = zeros(1, spec.num_heads, spec.head_v_dim)
        for tile, dtype in product(verify_tiles(self.config), {activation, torch.float32}):
            gate = zeros(1, spec.num_heads, spec.head_k_dim, dtype=dtype)
            self._launch_verify(tile, step, 0, qkv, gate, beta, out)
        for dtypes in product((activation, torch.float32), repeat=3):
            raw_gate = zeros(1, spec.num_heads, spec.head_k_dim, dtype=dtypes[0])
            super().verify(step, 0, qkv, raw_gate, beta.to(dtypes[1]), out.to(dtypes[2]))
        for block in fold_blocks(self.config):
            self._launch_fold(block, zeros(1, at.PLAN_COLUMNS, dtype=torch.int32), 0, 1)

    # -- a step

    def begin(
        self,
        staged: torch.Tensor,
        num_rows: int,
        num_tokens: int,
        length: int,
        allocator: Allocator,
        blocks: BlockTable | None = None,
    ) -> StepTensors:
        self._last = None
        return super().begin(staged, num_rows, num_tokens, length, allocator, blocks)

    def refresh(self, step: StepTensors) -> None:
        self._last = None
        super().refresh(step)

    def null_row(self, step: StepTensors, row: int) -> None:
        self._last = None
        super().null_row(step, row)

    def verify(
        self,
        step: StepTensors,
        layer: int,
        qkv: torch.Tensor,
        raw_gate: torch.Tensor,
        raw_beta: torch.Tensor,
        out: torch.Tensor,
    ) -> None:
        if not len(step.positions):
            return
        if not (_is_aligned(qkv) and _is_aligned(raw_gate) and _is_aligned(out)):
            self._last = None
            super().verify(step, layer, qkv, raw_gate, raw_beta, out)
            return
        self._launch_verify(verify_tile(self.config, len(step.rows)), step, layer, qkv, raw_gate, raw_beta, out)

    def _launch_verify(
        self,
        tile: VerifyTile,
        step: StepTensors,
        layer: int,
        qkv: torch.Tensor,
        raw_gate: torch.Tensor,
        raw_beta: torch.Tensor,
        out: torch.Tensor,
    ) -> None:
        views, params, spec = self.storage.layers[layer], self.params[layer], self.config.layer
        num_rows = len(step.rows)
        stream = torch.cuda.current_stream(qkv.device).cuda_stream
        is_chained = self._last is not None and self._last[0] is step and self._last[1] == stream
        conv, ring = views.conv, views.conv_ring
        verify_kernel[((num_rows + 1) * spec.num_heads * (spec.head_v_dim // tile.block_v),)](
            int(is_chained),
            step.rows,
            step.query_start_loc,
            num_rows,
            len(step.positions),
            qkv,
            qkv.stride(0) * qkv.element_size() // VECTOR_BYTES,
            raw_gate,
            raw_gate.stride(0) * raw_gate.element_size() // VECTOR_BYTES,
            raw_beta.data_ptr(),
            raw_beta.stride(0),
            int(raw_beta.dtype is torch.float32),
            out.data_ptr(),
            out.stride(0) * out.element_size() // VECTOR_BYTES,
            int(out.dtype is torch.float32),
            self._descriptor(layer, tile.block_v),
            views.recurrent,
            views.recurrent.stride(0),
            views.record_u,
            views.record_key_gate,
            views.record_inv_norm,
            params.A_log,
            params.dt_bias,
            params.A_log if params.conv_weight is None else params.conv_weight,
            params.A_log if params.conv_bias is None else params.conv_bias,
            views.record_key_gate if ring is None else ring,
            views.record_key_gate if conv is None else conv,
            *((0, 0, 0) if conv is None else conv.stride()),
            self._bound,
            BV=tile.block_v,
            EARLY=self._early_chunks(tile),
            AT_ONCE=tile.at_once,
            **self._verify_shape,
            num_warps=4,
            maxnreg=tile.registers,
            launch_pdl=True,
        )
        self._last = step, stream

    def _early_chunks(self, tile: VerifyTile) -> int:
        """Chunks of a program's states that have shared memory of their own, so that three programs fit."""
        chunks = self.config.layer.head_k_dim * self.storage.layers[0].recurrent.element_size() // CHUNK_BYTES
        if chunks < 4 or tile.block_v < 128:
            return chunks
        return 3 if self.config.folds_in_verify else 2

    def _descriptor(self, layer: int, block_v: int) -> TensorDescriptor:
        """A layer's states [slots, H V, K] in boxes of a program's rows and 128 bytes of channels."""
        key = layer, block_v
        if key not in self._descriptors:
            recurrent = self.storage.layers[layer].recurrent
            slots, heads, v_dim, k_dim = recurrent.shape
            bits = 8 * recurrent.element_size()
            self._descriptors[key] = TensorDescriptor(
                recurrent,
                [slots, heads * v_dim, k_dim],
                [recurrent.stride(0), k_dim, 1],
                [1, block_v, 8 * CHUNK_BYTES // bits],
                gl.NVMMASharedLayout(CHUNK_BYTES, bits, 3),
            )
        return self._descriptors[key]

    def write_records(
        self,
        step: StepTensors,
        layer: int,
        u: torch.Tensor,
        key: torch.Tensor,
        gate: torch.Tensor,
        conv_input: torch.Tensor | None,
    ) -> None:
        self._last = None
        super().write_records(step, layer, u, key, gate, conv_input)

    # -- folds

    def _fold(self, plan: torch.Tensor, first_layer: int, num_layers: int) -> None:
        """Folds ``plan`` in layers first_layer .. first_layer + num_layers, in one launch."""
        self._last = None
        if len(plan):
            self._launch_fold(fold_block(self.config, len(plan)), plan, first_layer, num_layers)

    def _launch_fold(self, block_v: int, plan: torch.Tensor, first_layer: int, num_layers: int) -> None:
        views = self.storage.layers[0]
        fold_kernel[(self._fold_programs,)](
            plan,
            self._table.tensor[first_layer:],
            len(plan),
            num_layers,
            views.recurrent.stride(0) * views.recurrent.element_size() // VECTOR_BYTES,
            *((0, 0, 0) if views.conv is None else views.conv.stride()),
            self._bound,
            BV=block_v,
            TABLE_COLUMNS=self._table.tensor.shape[1],
            **self._fold_shape,
            num_warps=4,
        )


def _is_aligned(tensor: torch.Tensor) -> bool:
    """Whether every token's values start at a multiple of 16 bytes."""
    return tensor.data_ptr() % VECTOR_BYTES == 0 and tensor.stride(0) * tensor.element_size() % VECTOR_BYTES == 0


def _num_multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


def _power_of_two(value: int) -> int:
    return 1 << (value - 1).bit_length()
