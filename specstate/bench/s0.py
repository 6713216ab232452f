"""S0's times for the shapes of a run, each measured once."""

import gc
from collections.abc import Callable
from dataclasses import replace
from statistics import median
from typing import NamedTuple

import torch

from specstate.bench.peer import Forward, Snapshots, time_snapshots
from specstate.bench.shapes import BenchShape
from specstate.bench.timer import Machine
from specstate.bench.workload import layer_inputs, layer_params, turns
from specstate.layout import DTYPE_BYTES

#: S0 of fewer layers says little about all of them.
LEAST_LAYERS = 16

#: More snapshots change no median, and take seconds to step through.
MOST_BYTES = 8 * 2**30


class S0Time(NamedTuple):
    """Of S0 over all layers of a shape."""

    ms: float
    layers: int
    """So many were timed; ``ms`` is scaled from them."""


class PeerTimes:
    """Times S0 when it is first asked for. ``note`` is told what could not be measured."""

    def __init__(self, forward: Forward | None, machine: Machine, replays: int, note: Callable[[str], None]) -> None:
        self._forward, self._machine, self._replays, self._note = forward, machine, replays, note
        self._per_layer: dict[BenchShape, S0Time | None] = {}

    def of(self, shape: BenchShape) -> S0Time | None:
        """None where it was not measured, which is noted once."""
        if self._forward is None:
            return None
        key = replace(shape, name="", num_layers=1)
        if key not in self._per_layer:
            self._per_layer[key] = self._measure(shape, self._forward)
        one = self._per_layer[key]
        return None if one is None else S0Time(one.ms * shape.num_layers, one.layers)

    def _measure(self, shape: BenchShape, forward: Forward) -> S0Time | None:
        """Of one layer."""
        machine, peer, inputs = self._machine, None, None
        try:
            layers = num_layers(shape, machine)
            config = replace(shape, num_layers=layers).config("ring", conv=False)
            generator = torch.Generator(device=machine.device).manual_seed(0)
            params = [layer_params(config, generator) for _ in range(layers)]
            inputs = [layer_inputs(config, shape.tokens, generator) for _ in range(layers)]
            sets = turns(layers * shape.tokens * shape.state_bytes, machine.l2_bytes)
            peer = Snapshots(forward, machine, config, shape.rows, layers, sets)
            times = time_snapshots(peer, machine, inputs, params, max(self._replays, 2 * sets))
            return S0Time(median(times) / layers, layers)
        except Exception as error:  # not ours to fail by
            of_dtype = f" with {shape.checkpoint_dtype} snapshots"
            self._note(f"{shape.name}: S0{of_dtype} is not measured: {type(error).__name__}: {error}")
            return None
        finally:
            peer = inputs = None
            gc.collect()
            if machine.graphs:
                torch.cuda.empty_cache()


def num_layers(shape: BenchShape, machine: Machine) -> int:
    """How many of the shape's layers S0 is timed on: as many as MOST_BYTES and the memory hold, LEAST_LAYERS at least.

    Raises SpecStateError when those do not fit.
    """
    spec = shape.spec
    widths = 2 * spec.conv_channels + spec.num_heads * (spec.head_k_dim + spec.head_v_dim + 1)
    snapshots = shape.tokens * shape.state_bytes
    layer_bytes = snapshots + shape.state_bytes + shape.tokens * widths * DTYPE_BYTES[shape.activation_dtype]
    least = min(LEAST_LAYERS, shape.num_layers)
    wanted = min(shape.num_layers, max(least, MOST_BYTES // snapshots))
    return machine.fitting_layers(wanted, layer_bytes, least)
