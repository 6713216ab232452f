"""How long it takes to read, and to copy, the recurrent states of a step; and how long each kernel takes."""

from collections import defaultdict
from collections.abc import Callable, Iterable
from statistics import median
from typing import Any, NamedTuple

import torch

from specstate.bench.timer import Machine
from specstate.bench.workload import Workload, draw_accepted

REPLAYS = 20
#: Steps that are profiled.
PROFILED_STEPS = 8


class Traffic(NamedTuple):
    """Of the recurrent states of one set of requests, in all layers."""

    state_bytes: int
    read_ms: float
    copy_ms: float

    @property
    def read_bytes_per_s(self) -> float:
        return self.state_bytes / (self.read_ms * 1e-3)


def measure_traffic(workload: Workload) -> Traffic:
    """Medians over replays in which the sets take turns: a sum over each layer's states; a copy of each."""
    machine, states = workload.machine, [workload.states(turn) for turn in range(workload.sets)]
    copies = [torch.empty_like(state) for state in states[0]]

    def copy(layers: list[torch.Tensor]) -> None:
        for state, place in zip(layers, copies, strict=True):
            place.copy_(state)

    def read(layers: list[torch.Tensor]) -> None:
        for state in layers:
            state.sum()

    return Traffic(
        sum(state.nbytes for state in states[0]), _median(machine, read, states), _median(machine, copy, states)
    )


def _median(machine: Machine, work: Callable[[list[torch.Tensor]], None], sets: list[list[torch.Tensor]]) -> float:
    runs = [machine.captured(lambda layers=layers: work(layers)) for layers in sets]  # type: ignore[misc]
    for run in runs:
        run()
    timer = machine.make_timer()
    machine.head_start()
    for index in range(max(REPLAYS, len(runs))):
        timer.start()
        runs[index % len(runs)]()
        timer.stop()
    return median(timer.milliseconds())


class Kernels(NamedTuple):
    """By kernel, torch's own together; a step's share."""

    ms: dict[str, float]
    launches: dict[str, float]


def profile_kernels(workload: Workload) -> Kernels:
    """The kernels in a step, by torch's profiler; none without graphs. The account of the workload does not follow
    these steps."""
    if workload.graph is None:
        return Kernels({}, {})
    drawn = draw_accepted(PROFILED_STEPS, workload.rows, workload.config.max_query_len, workload.generator)
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        for index, counts in enumerate(drawn):
            workload.replay(index % workload.sets, counts)
        torch.cuda.synchronize()
    return kernels_of(profiler.events() or (), len(drawn))


def kernels_of(events: Iterable[Any], steps: int) -> Kernels:
    """Milliseconds and launches a step by kernel, from a profiler's events."""
    times_us: defaultdict[str, float] = defaultdict(float)
    launches: defaultdict[str, int] = defaultdict(int)
    for event in events:
        if event.device_type.name == "CPU" or getattr(event, "is_user_annotation", False):
            continue
        # Copies stage rows outside of the graph; ranges lie over kernels and would count them again.
        if event.name.startswith(("Mem", "specstate::", "ProfilerStep")):
            continue
        name = _short(event.name)
        times_us[name] += event.time_range.elapsed_us()
        launches[name] += 1
    return Kernels(
        {name: time / 1e3 / steps for name, time in times_us.items()},
        {name: count / steps for name, count in launches.items()},
    )


def _short(name: str) -> str:
    if "at::" in name:
        return "torch"
    return name.split("(")[0].split("<")[0].split()[-1].removesuffix("_kernel")
