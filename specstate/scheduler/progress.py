"""A progress bar on stderr, for runs that somebody watches: tqdm's where it is installed, else a plain line."""

import sys
import time
from types import TracebackType
from typing import Any

from specstate.scheduler.tally import Tally

_INTERVAL_S = 0.5


class Progress:
    """A context manager; silent unless stderr is a terminal."""

    def __init__(self, what: str) -> None:
        self._what = what
        self._is_watched = sys.stderr is not None and sys.stderr.isatty()
        self._bar: Any = None
        self._shown_s = 0.0

    def __enter__(self) -> "Progress":
        if self._is_watched:
            try:
                from tqdm import tqdm
            except ImportError:
                return self
            self._bar = tqdm(desc=self._what, unit=" requests", leave=False, file=sys.stderr)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.close()
        elif self._is_watched:
            print("\r\033[K", end="", file=sys.stderr, flush=True)

    def __call__(self, tally: Tally, ms: float) -> None:
        """So far."""
        ended = tally.finished + tally.cancelled + tally.refused
        if self._bar is not None:
            self._bar.n = ended
            self._bar.set_postfix_str(f"simulated {ms / 1e3:,.0f} s", refresh=False)
            self._bar.update(0)
        elif self._is_watched and time.monotonic() - self._shown_s > _INTERVAL_S:
            self._shown_s = time.monotonic()
            text = f"\r\033[K{self._what}: {ended:,} requests, simulated {ms / 1e3:,.0f} s"
            print(text, end="", file=sys.stderr, flush=True)
