"""The other side of the engine: requests arrive, and some clients do not wait for their answer."""

from collections.abc import Iterable, Iterator
from heapq import heappop, heappush
from math import log

from specstate.errors import SpecStateError
from specstate.scheduler.acceptance import uniform
from specstate.scheduler.drafts import DraftPolicy
from specstate.scheduler.session import Session
from specstate.scheduler.settings import EngineSettings
from specstate.scheduler.workloads import TracedRequest


class Clients:
    """Requests in the order of their arrival, one looked at ahead.

    Who ends how, and who goes away when, follows from the seed and the request's name alone.
    """

    def __init__(self, requests: Iterable[TracedRequest], settings: EngineSettings, drafts: DraftPolicy) -> None:
        self._requests, self._settings, self._drafts = iter(requests), settings, drafts
        self._next = next(self._requests, None)
        self._names: set[str] = set()
        self._leaving: list[tuple[float, int, Session]] = []
        self._num_arrived = 0

    @property
    def next_ms(self) -> float | None:
        """When the next request arrives; None when all are there."""
        return None if self._next is None else self._next.arrival_ms

    def arrived(self, ms: float) -> Iterator[Session]:
        """Those that have come by then. Raises SpecStateError for one that comes before the one above it."""
        while self._next is not None and self._next.arrival_ms <= ms:
            request = self._next
            self._num_arrived += 1
            session = self._session(request)
            patience_ms = self._patience_ms(session.name)
            if patience_ms is not None:
                heappush(self._leaving, (request.arrival_ms + patience_ms, self._num_arrived, session))
            yield session
            self._next = next(self._requests, None)
            if self._next is not None and self._next.arrival_ms < request.arrival_ms:
                raise SpecStateError(
                    f"request {self._next.request_id!r} arrives at {self._next.arrival_ms} ms, before request "
                    f"{request.request_id!r} above it, at {request.arrival_ms} ms"
                )

    def gone(self, ms: float) -> Iterator[tuple[float, Session]]:
        """(when, who): clients whose patience has ended by then, whatever became of their request."""
        while self._leaving and self._leaving[0][0] <= ms:
            at_ms, _, session = heappop(self._leaving)
            yield at_ms, session

    # -- inside

    def _session(self, request: TracedRequest) -> Session:
        name, settings = request.request_id, self._settings
        if name in self._names:  # ids of a file need not differ, those of a manager must
            name = f"{name} (request {self._num_arrived})"
        self._names.add(name)
        by_length = settings.length_share > 0 and uniform(settings.seed, f"{name}/end", 0) < settings.length_share
        return Session(name, request, by_length, self._drafts.start(), since_ms=request.arrival_ms)

    def _patience_ms(self, name: str) -> float | None:
        settings = self._settings
        if not settings.cancel_share or uniform(settings.seed, f"{name}/cancel", 0) >= settings.cancel_share:
            return None
        return -settings.cancel_mean_ms * log(1.0 - uniform(settings.seed, f"{name}/cancel", 1))
