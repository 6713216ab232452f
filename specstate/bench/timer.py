"""Clocks for work on a device, and a way to run the same work as a CUDA graph."""

from collections.abc import Callable
from dataclasses import dataclass
from time import perf_counter
from typing import Any, Protocol

import torch

from specstate.errors import SpecStateError

#: Of the free memory.
MEMORY_SHARE = 0.85


class Timer(Protocol):
    """Takes the time of each start .. stop, in order."""

    def start(self) -> None: ...

    def stop(self) -> None: ...

    def milliseconds(self) -> list[float]:
        """Of every start .. stop so far; waits for the device."""
        ...


class EventTimer:
    """By CUDA events on the current stream: nothing waits, so work queues up and no launch shows as a gap."""

    def __init__(self) -> None:
        self._pairs: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []

    def start(self) -> None:
        pair = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        self._pairs.append(pair)
        pair[0].record()

    def stop(self) -> None:
        self._pairs[-1][1].record()

    def milliseconds(self) -> list[float]:
        torch.cuda.synchronize()
        return [start.elapsed_time(end) for start, end in self._pairs]


class HostTimer:
    """By the host's clock, for work that is done when it returns."""

    def __init__(self) -> None:
        self._start = 0.0
        self._times: list[float] = []

    def start(self) -> None:
        self._start = perf_counter()

    def stop(self) -> None:
        self._times.append((perf_counter() - self._start) * 1e3)

    def milliseconds(self) -> list[float]:
        return self._times


@dataclass(frozen=True, slots=True)
class Machine:
    """Where it is measured."""

    device: torch.device
    name: str
    l2_bytes: int
    graphs: bool
    """Steps are captured and replayed; without, they run call by call."""
    make_timer: Callable[[], Timer]
    free_bytes: Callable[[], int]

    @classmethod
    def gpu(cls) -> "Machine":
        """The current CUDA device."""
        device = torch.device("cuda", torch.cuda.current_device())
        properties = torch.cuda.get_device_properties(device)

        def free_bytes() -> int:
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
            return torch.cuda.mem_get_info(device)[0]

        return cls(device, properties.name, properties.L2_cache_size, True, EventTimer, free_bytes)

    def fitting_layers(self, most: int, layer_bytes: int, least: int) -> int:
        """How many of ``most`` layers fit into the free memory. Raises SpecStateError when ``least`` do not."""
        free = self.free_bytes()
        layers = min(most, int(MEMORY_SHARE * free) // layer_bytes)
        if layers < least:
            raise SpecStateError(f"{least} layers of {layer_bytes} bytes do not fit into {free} free bytes")
        return layers

    def wait(self) -> None:
        """Until the device has done all that is queued."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def head_start(self) -> None:
        """Keeps the device busy for some 20 ms, while the host queues the first of what is timed: no launch waits."""
        if self.graphs:
            torch.cuda._sleep(40_000_000)

    def captured(self, work: Callable[[], Any]) -> Callable[[], Any]:
        """``work`` as a graph, once it has run by itself; ``work`` where there are no graphs."""
        work()
        if not self.graphs:
            return work
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            work()
        return graph.replay
