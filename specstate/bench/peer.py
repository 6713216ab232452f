"""S0, the peer: a snapshot of the state for every token, by fla-core's fused recurrent KDA kernel.

It has no convolution: q, k and v come convolved, and its time stands beside ours with the conv, too.
"""

import importlib.util
import math
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch

from specstate.bench.timer import Machine, Timer
from specstate.bench.workload import Inputs, Workload, draw_accepted
from specstate.config import StateConfig
from specstate.params import LayerParams
from specstate.validation import DTYPES

MISSING = "S0 is not measured: fla-core is not installed (pip install 'specstate[peer]')"
Forward = Callable[..., Any]

#: Relative difference of outputs, in the norm of a layer's window: both are rounded to bfloat16 from float32 results
#: that differ in the last bits, and rarely fall apart. Snapshots in bfloat16 round the state once more a window.
TOLERANCE = {"float32": 1e-3, "bfloat16": 2e-2}


def find_peer() -> tuple[Forward | None, str]:
    """fla-core's ``fused_recurrent_kda_fwd`` and its version; None and why, where it cannot be had."""
    if importlib.util.find_spec("fla") is None:
        return None, MISSING
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # fla warns when a machine has no GPU
        try:
            import fla
            from fla.ops.kda.fused_recurrent import fused_recurrent_kda_fwd
        except Exception as error:  # of whatever it imports
            return None, f"S0 is not measured: fla-core does not load: {' '.join(str(error).split())}"
    return fused_recurrent_kda_fwd, str(fla.__version__)


class Snapshots:
    """T states a row and layer, for ``sets`` times ``rows`` requests; one step reads one of each and writes all."""

    def __init__(
        self, forward: Forward, machine: Machine, config: StateConfig, rows: int, num_layers: int, sets: int
    ) -> None:
        self._forward, self.config, self.sets = forward, config, sets
        spec, device, window = config.layer, machine.device, config.max_query_len
        shape = (1 + sets * rows * window, spec.num_heads, spec.head_v_dim, spec.head_k_dim)
        dtype = DTYPES[config.checkpoint_dtype]
        self._pools = [torch.zeros(shape, dtype=dtype, device=device) for _ in range(num_layers)]
        slots = torch.arange(1, shape[0], dtype=torch.int32, device=device)
        self._slots = slots.view(sets, rows, window)
        self.indices = self._slots[0].clone()
        """[rows, T] int32: the slots of the set at hand, a state for each token of its windows."""
        self.accepted = torch.ones(rows, dtype=torch.int32, device=device)
        """[rows] int32, of the window before."""

    def turn(self, index: int, accepted: torch.Tensor) -> None:
        """The next step is of set ``index``, whose last windows accepted so many."""
        self.indices.copy_(self._slots[index])
        self.accepted.copy_(accepted)

    def prepared(self, inputs: Inputs) -> dict[str, torch.Tensor]:
        """The tensors that fla takes: q, k [B, T, H, K], v [B, T, H, V], g and beta raw."""
        spec, rows = self.config.layer, len(self.accepted)
        keys = spec.num_heads * spec.head_k_dim
        parts = inputs.qkv.split([keys, keys, spec.num_heads * spec.head_v_dim], -1)
        query, key, value = (part.reshape(rows, -1, spec.num_heads, part.shape[-1] // spec.num_heads) for part in parts)
        return {
            "q": query.contiguous(),
            "k": key.contiguous(),
            "v": value.contiguous(),
            "g": inputs.raw_gate.reshape(key.shape),
            "beta": inputs.raw_beta.reshape(key.shape[:3]),
        }

    def window(self, layer: int, tensors: dict[str, torch.Tensor], params: LayerParams, out: torch.Tensor) -> None:
        """All windows of one layer; ``out`` [B, T, H, V]."""
        self._forward(
            **tensors,
            A_log=params.A_log,
            dt_bias=params.dt_bias.view(-1),
            initial_state=self._pools[layer],
            inplace_final_state=True,
            state_v_first=True,
            ssm_state_indices=self.indices,
            num_accepted_tokens=self.accepted,
            use_qk_l2norm_in_kernel=True,
            use_gate_in_kernel=True,
            use_beta_sigmoid_in_kernel=True,
            lower_bound=self.config.layer.gate_lower_bound,
            out=out,
        )


def check_outputs(forward: Forward | None, workload: Workload, windows: int = 3) -> float | None:
    """Some steps by hand of set 0 and, with ``forward``, of S0 in the first and the last layer with the same inputs.

    Returns the largest relative difference of a layer's outputs, to be held against TOLERANCE; None without
    ``forward``. The workload must have no convolution, which fla has not, and no step before.
    """
    config, rows = workload.config, workload.rows
    layers = sorted({0, config.num_layers - 1})
    peer = None if forward is None else Snapshots(forward, workload.machine, config, rows, len(layers), 1)
    worst = 0.0
    previous = torch.ones(rows, dtype=torch.int32, device=workload.machine.device)
    drawn = draw_accepted(windows, rows, config.max_query_len, workload.generator)
    for index in range(windows):
        workload.step_by_hand(0, drawn[index], shift=index)
        workload.note(0, drawn[index].tolist())
        if peer is None:
            continue
        peer.turn(0, previous)
        for place, layer in enumerate(layers):
            tensors = peer.prepared(workload.inputs[(layer + index) % config.num_layers])
            out = torch.full_like(tensors["v"], float("nan"))
            peer.window(place, tensors, workload.params[layer], out)
            ours, theirs = workload.outputs[layer].float(), out.view(workload.outputs[layer].shape).float()
            error = float((ours - theirs).norm() / theirs.norm())
            worst = max(worst, math.inf if math.isnan(error) else error)
        previous = drawn[index]
    return None if peer is None else worst


def time_snapshots(
    peer: Snapshots, machine: Machine, inputs: Sequence[Inputs], params: Sequence[LayerParams], replays: int
) -> list[float]:
    """Milliseconds of ``replays`` steps of S0 over ``inputs`` and ``params``, an entry a layer; sets in turn."""
    rows, window = peer.indices.shape
    tensors = [peer.prepared(each) for each in inputs]
    outputs = [torch.empty_like(each["v"]) for each in tensors]

    def step() -> None:
        for layer, (each, given, out) in enumerate(zip(tensors, params, outputs, strict=True)):
            peer.window(layer, each, given, out)

    run = machine.captured(step)
    generator = torch.Generator(device=machine.device).manual_seed(1)
    warm = 3 * peer.sets
    drawn = draw_accepted(warm + replays, rows, window, generator)
    timer: Timer = machine.make_timer()
    machine.head_start()
    for index, accepted in enumerate(drawn):
        peer.turn(index % peer.sets, accepted)
        if index >= warm:
            timer.start()
        run()
        if index >= warm:
            timer.stop()
    return timer.milliseconds()
