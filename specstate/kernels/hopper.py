"""Launches the kernels for Hopper GPUs (compute capability 9.0); what they do not cover runs on the portable ones.

One launch a layer, the convolution included, and one fold for all layers. Consecutive verifies of a step are
programmatic dependent launches: the next one's programs start, and ask for their states, while the last one's end.
"""

from itertools import product
from typing import Any, NamedTuple

import torch
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.runtime import driver

from specstate.config import StateConfig
from specstate.errors import SpecStateError
from specstate.kernels import rows as at
from specstate.kernels.arena import Allocator
from specstate.kernels.cursors import BlockTable, StepTensors
from specstate.kernels.gluon_fold import fold_kernel
from specstate.kernels.gluon_verify import verify_kernel
from specstate.kernels.hopper_constants import (
    CHUNK_BYTES,
    NUM_WARPS,
    fold_constants,
    fold_programs,
    verify_constants,
    verify_options,
)
from specstate.kernels.portable import PortableKernels
from specstate.kernels.supported import hopper_refusal
from specstate.kernels.tiles import VerifyTile
from specstate.params import LayerParams
from specstate.storage import Storage

_GLUON_DTYPES = {torch.float32: gl.float32, torch.bfloat16: gl.bfloat16, torch.float16: gl.float16}

#: Bytes of a vector load, and what addresses and strides of the window must be multiples of.
VECTOR_BYTES = 16

#: From token to token: offsets within a window of 16 are int32.
MOST_TOKEN_BYTES = 2**27


class FixedArguments(NamedTuple):
    """A layer's share of a verify's arguments: what does not change from step to step."""

    tensors: tuple[Any, ...]
    addresses: tuple[Any, ...]
    """The same, with addresses in place of tensors."""


class WindowLayout(NamedTuple):
    """Strides and dtypes of a window, as the kernel takes them; strides of 16 bytes, of beta in elements."""

    is_covered: bool
    """From token to token, qkv, gate and outputs step by multiples of 16 bytes, below MOST_TOKEN_BYTES."""
    qkv_stride: int
    gate_stride: int
    gate_dtype: torch.dtype
    beta_stride: int
    beta_is_wide: int
    """1 in float32, 0 in the activation dtype."""
    out_stride: int
    out_is_wide: int


class HopperKernels(PortableKernels):
    """The kernels of one manager on a Hopper GPU. Raises SpecStateError when they cannot follow its storage."""

    path = "hopper"

    def __init__(self, config: StateConfig, params: tuple[LayerParams, ...], storage: Storage) -> None:
        refusal = hopper_refusal(config, storage)
        if refusal is not None:
            raise SpecStateError(f"path 'hopper': {refusal}")
        self._device_index = storage.cursors.device.index
        self._fold_programs = fold_programs(config) * _num_multiprocessors(storage.cursors.device)
        self._compiled: dict[Any, Any] = {}
        self._last: tuple[StepTensors, int] | None = None
        super().__init__(config, params, storage)

    def bind(self, params: tuple[LayerParams, ...]) -> None:
        super().bind(params)
        self._last = None
        self._compiled.clear()
        # Whatever a constant says must hold for all layers: they share what is compiled.
        self._wide_taps = all(_has_wide_taps(each.conv_weight) for each in params)
        layers = range(self.config.num_layers)
        self._fixed = {
            (tile, gate): [self._fixed_arguments(tile, gate, layer) for layer in layers]
            for tile, gate in product(self._tiles.all_verify, {self._activation, torch.float32})
        }
        layer, given = self.storage.layers[0], params[0]
        dtypes = {
            "CHECKPOINT": layer.recurrent.dtype,
            "ACTIVATION": layer.record_key_gate.dtype,
            "A_LOG": given.A_log.dtype,
            "DT_BIAS": given.dt_bias.dtype,
        }
        self._fold_dtypes = {name: _GLUON_DTYPES[dtype] for name, dtype in dtypes.items()}

    def warmup(self) -> None:
        super().warmup()
        # That met the tiles of a small step. A window that is not aligned runs on the portable kernels.
        step, activation = self._dummy_step(), self._activation
        for tile, gate in product(self._tiles.all_verify, {activation, torch.float32}):
            window = self._dummy_window(gate, activation, activation)
            qkv, raw_gate, raw_beta, out = window
            addresses = qkv.data_ptr(), raw_gate.data_ptr(), raw_beta.data_ptr(), out.data_ptr()
            self._launch_verify(tile, step, 0, (qkv, raw_gate), addresses, self.layout(*window))
        for dtypes in product({activation, torch.float32}, repeat=3):
            super().verify(step, 0, *self._dummy_window(*dtypes))
        for block in self._tiles.all_folds:
            self._launch_fold(block, self._zeros(1, at.PLAN_COLUMNS, dtype=torch.int32), 0, 1)

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

    def layout(
        self, qkv: torch.Tensor, raw_gate: torch.Tensor, raw_beta: torch.Tensor, out: torch.Tensor
    ) -> WindowLayout:
        steps = [tensor.stride(0) * tensor.element_size() for tensor in (qkv, raw_gate, out)]
        vectors = [step // VECTOR_BYTES for step in steps]
        return WindowLayout(
            is_covered=all(step % VECTOR_BYTES == 0 and step < MOST_TOKEN_BYTES for step in steps),
            qkv_stride=vectors[0],
            gate_stride=vectors[1],
            gate_dtype=raw_gate.dtype,
            beta_stride=raw_beta.stride(0),
            beta_is_wide=int(raw_beta.dtype is torch.float32),
            out_stride=vectors[2],
            out_is_wide=int(out.dtype is torch.float32),
        )

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
        if not step.num_tokens:
            return
        if layout is None:
            layout = self.layout(qkv, raw_gate, raw_beta, out)
        addresses = qkv.data_ptr(), raw_gate.data_ptr(), raw_beta.data_ptr(), out.data_ptr()
        starts_in_vectors = (addresses[0] | addresses[1] | addresses[3]) % VECTOR_BYTES == 0
        if not (layout.is_covered and starts_in_vectors):
            self._last = None
            super().verify(step, layer, qkv, raw_gate, raw_beta, out)
            return
        tile = self._tiles.verify(step.rows.shape[0])
        self._launch_verify(tile, step, layer, (qkv, raw_gate), addresses, layout)

    def _launch_verify(
        self,
        tile: VerifyTile,
        step: StepTensors,
        layer: int,
        tensors: tuple[torch.Tensor, torch.Tensor],
        addresses: tuple[int, int, int, int],
        layout: WindowLayout,
    ) -> None:
        """``tensors``: qkv and raw_gate, for a first launch; ``addresses``: theirs, raw_beta's and out's."""
        spec, num_rows, num_tokens = self.config.layer, step.rows.shape[0], step.num_tokens
        device, stream = driver.active.get_current_device(), driver.active.get_current_stream(self._device_index)
        is_chained = self._last is not None and self._last[0] is step and self._last[1] == stream
        grid = ((num_rows + 1) * spec.num_heads * (spec.head_v_dim // tile.block_v), 1, 1)
        gate_dtype = layout.gate_dtype
        fixed = self._fixed[tile, gate_dtype][layer]
        key = device, tile, gate_dtype
        compiled = self._compiled.get(key)
        # Triton's own launch looks at every argument anew, for several times what the launch itself takes. What was
        # compiled for a layer holds for all: nothing that differs from call to call is specialised on.
        rows: Any = step.rows if compiled is None else step.rows.data_ptr()
        starts: Any = step.query_start_loc if compiled is None else step.query_start_loc.data_ptr()
        qkv, gate = tensors if compiled is None else addresses[:2]
        arguments = (
            int(is_chained),
            rows,
            starts,
            num_rows,
            num_tokens,
            qkv,
            layout.qkv_stride,
            gate,
            layout.gate_stride,
            addresses[2],
            layout.beta_stride,
            layout.beta_is_wide,
            addresses[3],
            layout.out_stride,
            layout.out_is_wide,
        )
        if compiled is None:
            options = verify_options(self.config, tile, gate_dtype)
            self._compiled[key] = verify_kernel[grid](*arguments, *fixed.tensors, **options)
        else:
            compiled[grid](*arguments, *fixed.addresses, stream=stream)
        self._last = step, stream

    def _fixed_arguments(self, tile: VerifyTile, gate: torch.dtype, layer: int) -> FixedArguments:
        """What every verify of a layer hands to the kernel; ``gate``: dtype of raw gates."""
        views, params = self.storage.layers[layer], self.params[layer]
        nothing, conv = views.record_key_gate, views.conv
        given = {"BIAS": params.conv_bias is not None, "WIDE_TAPS": self._wide_taps}
        constants = verify_constants(self.config, tile, gate) | given
        tensors = (
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
            nothing if views.conv_ring is None else views.conv_ring,
            nothing if conv is None else conv,
            *((0, 0, 0) if conv is None else conv.stride()),
            self._bound,
            *(constants[verify_kernel.arg_names[place]] for place in verify_kernel.constexprs),
        )
        addresses = tuple(each.data_ptr() if isinstance(each, torch.Tensor) else each for each in tensors)
        return FixedArguments(tensors, addresses)

    def _descriptor(self, layer: int, block_v: int) -> TensorDescriptor:
        """A layer's states [slots, H V, K] in boxes of a program's rows and 128 bytes of channels."""
        recurrent = self.storage.layers[layer].recurrent
        slots, heads, v_dim, k_dim = recurrent.shape
        bits = 8 * recurrent.element_size()
        return TensorDescriptor(
            recurrent,
            [slots, heads * v_dim, k_dim],
            [recurrent.stride(0), k_dim, 1],
            [1, block_v, 8 * CHUNK_BYTES // bits],
            gl.NVMMASharedLayout(CHUNK_BYTES, bits, 3),
        )

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
            self._launch_fold(self._tiles.fold(len(plan)), plan, first_layer, num_layers)

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
            TABLE_COLUMNS=self._table.tensor.shape[1],
            **self._fold_dtypes,
            **fold_constants(self.config, block_v),
            num_warps=NUM_WARPS,
        )


def _num_multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


def _has_wide_taps(weight: torch.Tensor | None) -> bool:
    """The taps [W] of every channel may be loaded together, as 2 to 16 bytes."""
    if weight is None or weight.shape[1] not in (2, 4):
        return False
    return weight.data_ptr() % (weight.shape[1] * weight.element_size()) == 0
