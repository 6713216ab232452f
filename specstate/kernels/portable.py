"""Launches the portable Triton kernels: any shape, any GPU that Triton knows, and the CPU interpreter.

No tile is chosen by batch size, so a request's bits depend on its own inputs alone. Launches allocate no workspace:
what a step needs was made with the storage, or comes with the step.
"""

from itertools import product
from typing import Any

import torch
import triton
import triton.language as tl

from specstate.config import StateConfig
from specstate.kernels import Sampled, cursors, reference
from specstate.kernels import rows as at
from specstate.kernels.arena import Allocator, TorchAllocator
from specstate.kernels.cursors import BlockTable, StepTensors
from specstate.kernels.sampler import accept, choose
from specstate.kernels.supported import INTERPRETED, WINDOW_TILE, check_inner
from specstate.kernels.table import AddressTable
from specstate.kernels.tile_table import device_table
from specstate.kernels.tiles import Tiles
from specstate.kernels.triton_conv import conv_kernel
from specstate.kernels.triton_cursor import advance_kernel, begin_kernel, refresh_kernel
from specstate.kernels.triton_fold import fold_kernel
from specstate.kernels.triton_records import conv_inputs_kernel, records_kernel
from specstate.kernels.triton_verify import verify_kernel
from specstate.layout import CONV_OUTPUT_TOKENS
from specstate.params import LayerParams
from specstate.storage import Storage

_TRITON_DTYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}

CHANNEL_TILE = 256
NO_CAPACITY = 2**30


class PortableKernels:
    """The kernels of one manager, bound to its storage and parameters. Same calls as ReferenceKernels."""

    path = "portable"

    def __init__(self, config: StateConfig, params: tuple[LayerParams, ...], storage: Storage) -> None:
        self.config, self.storage = config, storage
        spec = config.layer
        self._bounded = spec.gate_lower_bound is not None
        self._bound = spec.gate_lower_bound if spec.gate_lower_bound is not None else 0.0
        self._folds = config.folds_in_verify
        self._history = spec.conv_history_len
        self._ring = self._history + config.max_query_len
        block_k = max(16, triton.next_power_of_2(spec.head_k_dim))
        block_v = max(16, triton.next_power_of_2(spec.head_v_dim))
        self._tiles = Tiles(config, device_table(storage.cursors.device))
        # The interpreter pays per program and not per element, so it takes a head at once.
        tile = block_v if INTERPRETED else min(block_v, self._tiles.portable.block_v)
        self._num_warps = self._tiles.portable.num_warps
        self._shape = {"K": spec.head_k_dim, "V": spec.head_v_dim, "BK": block_k, "BV": tile}
        self._whole_v = block_v
        self._v_blocks = triton.cdiv(spec.head_v_dim, tile)
        on_nvidia = storage.cursors.is_cuda and torch.version.hip is None
        # Three tf32 products have float32 grade; elsewhere plain float32.
        self._precision = "tf32x3" if on_nvidia else "ieee"
        self.bind(params)

    def bind(self, params: tuple[LayerParams, ...]) -> None:
        """Builds the address table over storage and ``params``."""
        self._table = AddressTable(self.storage, params)
        self.params = params

    def check_storage(self, where: str) -> None:
        self._table.check(where)

    def warmup(self) -> None:
        """Launches every variant once, over a step of one dummy row and one token: nothing but scratch is touched."""
        step = self._dummy_step()
        steps = [step]
        if self.config.block_size is not None:
            slots, positions = (self._zeros(*shape, dtype=torch.int32) for shape in ((2, 2), (2,)))
            steps.append(self._dummy_step(BlockTable(slots, positions)))
        self.refresh(step)
        activation = self._activation
        for dtypes in product({activation, torch.float32}, repeat=3):
            self.verify(step, 0, *self._dummy_window(*dtypes))
        qkv, key, _, u = self._dummy_window(activation, activation, torch.float32)
        self.write_records(step, 0, u, key, key, qkv if self._history else None)
        floats = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
        probs = (None, self._zeros(1, 2, dtype=torch.float32))
        for logits, ids, given in product(floats, (torch.int32, torch.int64), probs):
            self.sample(step, self._zeros(1, 2, dtype=logits), self._zeros(1, dtype=ids), given)
        mask = self._zeros(1, dtype=torch.bool)
        folds: tuple[torch.Tensor | bool, ...] = (True, False, mask)
        for each, counts, fold, finished in product(steps, (torch.int32, torch.int64), folds, (None, mask)):
            self.end(each, self._zeros(1, dtype=counts), fold, finished)
        self.cancel(step, [0])
        self.flush(step)

    @property
    def _activation(self) -> torch.dtype:
        return self.storage.layers[0].record_key_gate.dtype

    def _zeros(self, *shape: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.zeros(shape, dtype=dtype, device=self.storage.cursors.device)

    def _dummy_step(self, blocks: BlockTable | None = None) -> StepTensors:
        """Of one row without records, and one token."""
        staged = self._zeros(at.STAGED_COLUMNS + 2, dtype=torch.int32)
        staged[at.RECORD_ROW], staged[at.QUERY_LEN], staged[-1] = -1, 1, 1
        return self.begin(staged, 1, 1, 1, TorchAllocator(staged.device), blocks)

    def _dummy_window(
        self, gate: torch.dtype, beta: torch.dtype, out: torch.dtype
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """qkv, raw gate and raw beta of one token, and where its output goes."""
        spec = self.config.layer
        return (
            self._zeros(1, spec.conv_channels, dtype=self._activation),
            self._zeros(1, spec.num_heads, spec.head_k_dim, dtype=gate),
            self._zeros(1, spec.num_heads, dtype=beta),
            self._zeros(1, spec.num_heads, spec.head_v_dim, dtype=out),
        )

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
        step = StepTensors(
            rows=allocator.empty((num_rows, at.ROW_COLUMNS)),
            query_start_loc=staged[num_rows * at.STAGED_COLUMNS :],
            positions=allocator.empty((num_tokens,)),
            committed_lens=allocator.empty((num_rows,)),
            window=None,
            folds_in_verify=self._folds,
            allocator=allocator,
            blocks=blocks,
        )
        begin_kernel[(num_rows + 1,)](
            staged,
            step.query_start_loc,
            self.storage.cursors,
            self.storage.counters,
            staged if blocks is None else blocks.positions,
            1 if blocks is None else blocks.positions.stride(0),
            step.rows,
            step.positions,
            step.committed_lens,
            num_rows,
            num_tokens,
            BT=WINDOW_TILE,
            FOLDS=self._folds,
            STATED=blocks is not None,
            num_warps=1,
        )
        return step

    def refresh(self, step: StepTensors) -> None:
        if len(step.rows):
            refresh_kernel[(len(step.rows),)](step.rows, self.storage.cursors, FOLDS=self._folds, num_warps=1)

    def check_layout(self, name: str, tensor: torch.Tensor, where: str) -> None:
        check_inner(name, tensor, where)

    def null_row(self, step: StepTensors, row: int) -> None:
        cursors.null_row(step.rows, row)

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
        num_rows, num_tokens = len(step.rows), len(step.positions)
        if not num_tokens:
            return
        # The conv's output is kept for so many rows at a time; without a conv, one launch does all.
        at_once = CONV_OUTPUT_TOKENS // self.config.max_query_len if self._history else num_rows
        for first_row in range(0, max(num_rows, 1), max(at_once, 1)):
            rows = min(at_once, num_rows - first_row)
            is_last = first_row + rows == num_rows
            mixed = self._convolve(step, layer, qkv, first_row, rows) if self._history else qkv
            # Behind the last row, one more stands for the tokens of no row.
            self._verify(step, layer, mixed, raw_gate, raw_beta, out, first_row, rows + is_last)

    def _convolve(self, step: StepTensors, layer: int, qkv: torch.Tensor, first_row: int, rows: int) -> torch.Tensor:
        """q|k|v of ``rows`` windows after the conv, [rows * T, C]; a view of the workspace that all layers share."""
        views, params, channels = self.storage.layers[layer], self.params[layer], self.config.layer.conv_channels
        mixed, longest = self.storage.conv_output, self.config.max_query_len
        assert mixed is not None and views.conv is not None
        if rows:
            conv_kernel[(rows * triton.cdiv(channels, CHANNEL_TILE),)](
                step.rows,
                first_row,
                qkv,
                qkv.stride(0),
                mixed,
                params.conv_weight,
                params.conv_weight if params.conv_bias is None else params.conv_bias,
                views.conv,
                *views.conv.stride(),
                views.conv_ring,
                channels,
                longest,
                self._ring,
                ROW_COLUMNS=at.ROW_COLUMNS,
                W=self._history + 1,
                BT=WINDOW_TILE,
                BC=CHANNEL_TILE,
                BIAS=params.conv_bias is not None,
                FOLDS=self._folds,
            )
        return mixed

    def _verify(
        self,
        step: StepTensors,
        layer: int,
        mixed: torch.Tensor,
        raw_gate: torch.Tensor,
        raw_beta: torch.Tensor,
        out: torch.Tensor,
        first_row: int,
        rows: int,
    ) -> None:
        views, params, heads = self.storage.layers[layer], self.params[layer], self.config.layer.num_heads
        if not rows:
            return
        verify_kernel[(rows * heads * self._v_blocks,)](
            step.rows,
            step.query_start_loc,
            first_row,
            len(step.rows),
            len(step.positions),
            mixed,
            mixed.stride(0),
            raw_gate,
            raw_gate.stride(0),
            raw_beta,
            raw_beta.stride(0),
            out,
            out.stride(0),
            views.recurrent,
            views.recurrent.stride(0),
            views.record_u,
            views.record_key_gate,
            views.record_inv_norm,
            params.A_log,
            params.dt_bias,
            self._bound,
            heads,
            self.config.max_query_len,
            self.config.record_capacity,
            ROW_COLUMNS=at.ROW_COLUMNS,
            BT=WINDOW_TILE,
            BOUNDED=self._bounded,
            BY_ROW=self._history > 0,
            FOLDS=self._folds,
            PRECISION=self._precision,
            **self._shape,
            num_warps=self._num_warps,
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
        views, spec, num_rows = self.storage.layers[layer], self.config.layer, len(step.rows)
        if not num_rows or not len(step.positions):
            return
        records_kernel[(num_rows * spec.num_heads,)](
            step.rows,
            u.contiguous(),
            key.contiguous(),
            gate.contiguous(),
            views.record_u,
            views.record_key_gate,
            views.record_inv_norm,
            spec.num_heads,
            self.config.record_capacity,
            ROW_COLUMNS=at.ROW_COLUMNS,
            BT=WINDOW_TILE,
            **{**self._shape, "BV": self._whole_v},
        )
        if conv_input is not None:
            conv_inputs_kernel[(num_rows * triton.cdiv(spec.conv_channels, CHANNEL_TILE),)](
                step.rows,
                conv_input.contiguous(),
                views.conv_ring,
                spec.conv_channels,
                self._ring,
                self._history,
                ROW_COLUMNS=at.ROW_COLUMNS,
                BT=WINDOW_TILE,
                BC=CHANNEL_TILE,
            )

    def sample(
        self, step: StepTensors, logits: torch.Tensor, draft_tokens: torch.Tensor, draft_probs: torch.Tensor | None
    ) -> Sampled:
        storage, longest = self.storage, self.config.max_query_len
        choice = choose(step, logits, draft_tokens, draft_probs, storage.sampling, longest)
        return accept(step, choice, draft_tokens, storage.cursors, storage.sampling, longest)

    # -- cursors and folds

    def end(
        self, step: StepTensors, counts: torch.Tensor, fold: torch.Tensor | bool, finished: torch.Tensor | None
    ) -> None:
        self._fold(self._advance(step, counts, fold, finished), 0, self.config.num_layers)

    def cancel(self, step: StepTensors, unverified: list[int]) -> None:
        plan = cursors.verify_fold_plan(step.rows).contiguous()
        for layer in unverified:
            self._fold(plan, layer, 1)
        self._advance(step, None, False, None)

    def flush(self, step: StepTensors) -> None:
        # Whatever verify would have folded is folded here instead, so it must not count as folded already.
        step.rows[:, at.FOLD_LEN] = 0
        self._fold(self._advance(step, None, True, None), 0, self.config.num_layers)

    def fold(self, plan: torch.Tensor) -> None:
        self._fold(plan, 0, self.config.num_layers)

    def read_state(self, plan: torch.Tensor, layer: int) -> tuple[torch.Tensor, torch.Tensor | None]:
        bound = self.config.layer.gate_lower_bound
        return reference.read_state(plan, self.storage.layers[layer], self.params[layer], bound)

    def _advance(
        self,
        step: StepTensors,
        counts: torch.Tensor | None,
        fold: torch.Tensor | bool,
        finished: torch.Tensor | None,
    ) -> torch.Tensor:
        """``accepted_counts`` and ``advance`` of the reference in one launch; the fold plan."""
        rows, config = step.rows, self.config
        plan = step.allocator.empty((len(rows), at.PLAN_COLUMNS))
        may_be_full = config.folds_when_full and counts is not None
        table = None if step.blocks is None else step.blocks.slots
        blocks = "none" if config.block_size is None or counts is None else "own" if table is None else "table"
        if len(rows):
            advance_kernel[(len(rows),)](
                rows,
                rows if counts is None else counts,
                rows if isinstance(fold, bool) else fold,
                rows if finished is None else finished,
                rows if table is None else table,
                *((1, 1, 1) if table is None else (*table.stride(), table.shape[1])),
                self.storage.cursors,
                self.storage.counters,
                plan,
                config.max_query_len,
                config.record_capacity if may_be_full else NO_CAPACITY,
                config.block_size or 1,
                len(self.storage.layers[0].recurrent),
                COUNTS=counts is not None,
                FOLD="mask" if not isinstance(fold, bool) else "all" if fold else "none",
                FINISHED=finished is not None,
                BLOCKS=blocks,
                num_warps=1,
            )
        return plan

    def _fold(self, plan: torch.Tensor, first_layer: int, num_layers: int) -> None:
        """Folds ``plan`` in layers first_layer .. first_layer + num_layers, in one launch."""
        if not len(plan):
            return
        spec, views, params = self.config.layer, self.storage.layers[0], self.params[0]
        programs = spec.num_heads * self._v_blocks
        if self._history:
            programs += triton.cdiv(spec.conv_channels, CHANNEL_TILE)
        fold_kernel[(num_layers * len(plan) * programs,)](
            plan,
            self._table.tensor[first_layer:],
            len(plan),
            views.recurrent.stride(0),
            *((0, 0, 0) if views.conv is None else views.conv.stride()),
            self._bound,
            spec.num_heads,
            self.config.record_capacity,
            spec.conv_channels,
            self._ring,
            PLAN_COLUMNS=at.PLAN_COLUMNS,
            TABLE_COLUMNS=self._table.tensor.shape[1],
            HISTORY=self._history,
            ALIGNMENT=self._table.alignment,
            BC=CHANNEL_TILE,
            BOUNDED=self._bounded,
            CHECKPOINT=_TRITON_DTYPES[views.recurrent.dtype],
            ACTIVATION=_TRITON_DTYPES[views.record_key_gate.dtype],
            A_LOG=_TRITON_DTYPES[params.A_log.dtype],
            DT_BIAS=_TRITON_DTYPES[params.dt_bias.dtype],
            **self._shape,
            num_warps=self._num_warps,
        )
