"""A timeline in the Trace Event Format, which Perfetto and chrome://tracing open.

Steps lie on one track of the process "device", with state management as a slice at the head of each; requests lie on as
many tracks of the process "requests" as run at a time, a slice a phase. Times are simulated.
"""

import json
import os
from heapq import heappop, heappush
from typing import Any, TextIO

from specstate.errors import SpecStateError
from specstate.scheduler.device import Launched
from specstate.scheduler.planner import Plan
from specstate.scheduler.session import Phase, Session

_DEVICE, _REQUESTS = 1, 2


class ChromeTrace:
    """Written while the run goes; a context manager. Raises SpecStateError when the file cannot be written."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._name = os.fspath(path)
        try:
            self._file: TextIO = open(path, "w", encoding="utf-8", newline="\n")  # noqa: SIM115
        except OSError as error:
            raise SpecStateError(f"{self._name}: cannot be written: {error.strerror}") from None
        self._is_first = True
        self._free_tracks: list[int] = []
        self._busy_tracks: list[tuple[float, int]] = []
        self._num_tracks = 0
        self._requests: list[tuple[Session, str]] = []
        self._file.write('{"displayTimeUnit":"ms","traceEvents":[\n')
        for process, name in ((_DEVICE, "device"), (_REQUESTS, "requests")):
            self._write({"ph": "M", "name": "process_name", "pid": process, "tid": 0, "args": {"name": name}})

    def __enter__(self) -> "ChromeTrace":
        return self

    def __exit__(self, error_type: object, error: object, traceback: object) -> None:
        # Tracks are given out in the order of beginnings, which is not that of the ends.
        for session, outcome in sorted(self._requests, key=lambda entry: entry[0].request.arrival_ms):
            self._write_request(session, outcome)
        try:
            self._file.write("\n]}\n")
            self._file.close()
        except OSError as failed:  # a full disk shows when what is buffered is written
            raise SpecStateError(f"{self._name}: cannot be written: {failed.strerror}") from None

    def step(self, launched: Launched, plan: Plan) -> None:
        """See ``Timeline``."""
        prompts = sum(piece.stop - piece.start for piece in plan.pieces)
        self._slice(
            _DEVICE,
            0,
            "step",
            launched.start_ms,
            launched.end_ms,
            {"step": launched.index, "windows": len(plan.windows), "prompt_tokens": prompts, "tokens": launched.tokens},
        )
        if launched.state_ms:
            self._slice(_DEVICE, 0, "state management", launched.start_ms, launched.start_ms + launched.state_ms, {})
        rows = {"windows": len(plan.windows), "prompts": len(plan.pieces)}
        self._write({"ph": "C", "name": "batch", "pid": _DEVICE, "ts": _us(launched.start_ms), "args": rows})

    def request(self, session: Session, outcome: str) -> None:
        """See ``Timeline``."""
        self._requests.append((session, outcome))

    # -- inside

    def _write_request(self, session: Session, outcome: str) -> None:
        spans = [span for span in session.spans if span[0] != Phase.ENDED.value and span[2] > span[1]]
        if not spans:
            return
        track = self._track(spans[0][1], spans[-1][2])
        about = {
            "request": session.name,
            "outcome": outcome,
            "input_len": session.request.input_len,
            "output_len": session.request.output_len,
        }
        for phase, begin_ms, end_ms in spans:
            self._slice(_REQUESTS, track, phase, begin_ms, end_ms, about)

    def _track(self, begin_ms: float, end_ms: float) -> int:
        while self._busy_tracks and self._busy_tracks[0][0] <= begin_ms:
            heappush(self._free_tracks, heappop(self._busy_tracks)[1])
        if self._free_tracks:
            track = heappop(self._free_tracks)
        else:
            self._num_tracks += 1
            track = self._num_tracks
        heappush(self._busy_tracks, (end_ms, track))
        return track

    def _slice(
        self, process: int, track: int, name: str, begin_ms: float, end_ms: float, about: dict[str, Any]
    ) -> None:
        event = {"ph": "X", "name": name, "pid": process, "tid": track, "ts": _us(begin_ms)}
        self._write(event | {"dur": round(_us(end_ms) - _us(begin_ms), 3), "args": about})

    def _write(self, event: dict[str, Any]) -> None:
        try:
            self._file.write(("" if self._is_first else ",\n") + json.dumps(event, separators=(",", ":")))
        except OSError as failed:
            raise SpecStateError(f"{self._name}: cannot be written: {failed.strerror}") from None
        self._is_first = False


def _us(ms: float) -> float:
    return round(ms * 1e3, 3)
