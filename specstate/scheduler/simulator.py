"""The engine's loop, in simulated time: read what has come back, plan, launch; a step takes what the cost model says.

    host     plan n+1 | read n-1 | plan n+2 | read n ...      with async_depth 1
    device   [ step n ............ ][ step n+1 ............ ]

With depth d the host plans a step once it has read all counts but those of the last d steps. What is planned has then
been launched and ended on the device in stream order; only the host is late. Clients get their tokens when a step ends.
"""

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Protocol

from specstate.errors import CapacityError
from specstate.metadata import Handle, RowKind, StepMetadata
from specstate.metrics import Metrics
from specstate.scheduler.clients import Clients
from specstate.scheduler.device import Device, Launched, Row
from specstate.scheduler.drafts import FixedDrafts
from specstate.scheduler.managed import Managed
from specstate.scheduler.meter import Meter, Sample
from specstate.scheduler.planner import Plan, Planner
from specstate.scheduler.session import Phase, Session
from specstate.scheduler.setup import Setup
from specstate.scheduler.tally import ConservationError, Tally, check_conservation
from specstate.scheduler.workloads import SHOWN_FAULTS, TracedRequest
from specstate.step import Step

SAMPLED_STEPS = 16
"""Steps between two samples of the engine's load."""


class Timeline(Protocol):
    """What a timeline is told, in the order of the events."""

    def step(self, launched: Launched, plan: Plan) -> None:
        """A step was launched."""

    def request(self, session: Session, outcome: str) -> None:
        """A request has ended: finished, cancelled or refused."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of it."""

    setup: Setup
    tally: Tally
    meter: Meter
    metrics: Metrics
    """The manager's, before published states were dropped."""
    refusals: tuple[str, ...]
    """Why the first few refused requests were."""


def simulate(
    setup: Setup,
    requests: Iterable[TracedRequest],
    managed: Managed,
    timeline: Timeline | None = None,
    progress: Callable[[Tally, float], None] | None = None,
) -> Outcome:
    """Serves ``requests``, in the order of their arrival, to the end.

    managed: the manager of ``setup.config``, with or without payloads: both give the same events. progress: called
    every so often with the counts and the simulated milliseconds. Raises SpecStateError when a request arrives before
    the one above it, ConservationError when the counts do not add up at the end, whatever the manager raises, for its
    refusals are faults here, and in executing mode Differs.
    """
    return _Simulation(setup, requests, managed, timeline, progress).run()


class _Simulation:
    def __init__(
        self,
        setup: Setup,
        requests: Iterable[TracedRequest],
        managed: Managed,
        timeline: Timeline | None,
        progress: Callable[[Tally, float], None] | None,
    ) -> None:
        settings = setup.settings
        self._setup, self._settings, self._managed = setup, settings, managed
        self._timeline, self._progress = timeline, progress
        self._tally = Tally()
        self._meter = Meter(settings.slo_ttft_ms, settings.slo_tpot_ms)
        self._planner = Planner(setup.config, settings, managed, self._tally)
        self._device = Device(
            setup.config, settings, setup.policy, setup.acceptance, setup.cost, setup.calibration, self._tally
        )
        self._clients = Clients(requests, settings, setup.drafts)
        self._launched: deque[Launched] = deque()
        self._clock_ms = self._device_free_ms = 0.0
        self._adapts = not isinstance(setup.drafts, FixedDrafts)
        self._refusals: list[str] = []

    def run(self) -> Outcome:
        depth = self._settings.async_depth
        while True:
            while len(self._launched) > depth:
                self._read()
            self._arrive()
            self._cancel_until(self._clock_ms)
            plan = self._planner.plan(self._clock_ms)
            if plan:
                self._launch(plan)
            elif self._launched:
                self._read()
            elif not self._idle():
                break
        return self._finish()

    # -- time passes

    def _idle(self) -> bool:
        """Nobody is there: on to the next arrival; whether there is one."""
        waiting, running = self._planner.waiting, self._planner.running
        assert not waiting and not running, f"{len(waiting)} requests wait, {len(running)} run, and nothing is planned"
        if self._clients.next_ms is None:
            return False
        self._clock_ms = max(self._clock_ms, self._clients.next_ms)
        return True

    def _arrive(self) -> None:
        for session in self._clients.arrived(self._clock_ms):
            self._tally.arrived += 1
            self._tally.input_tokens += session.request.input_len
            reason = self._planner.fits(session)
            if reason is None:
                self._planner.waiting.append(session)
                continue
            session.phase = Phase.ENDED
            self._tally.refused += 1
            if len(self._refusals) < SHOWN_FAULTS:
                self._refusals.append(f"request {session.request.request_id!r}: {reason}")
            self._end_of(session, "refused")

    def _cancel_until(self, ms: float) -> None:
        """Clients that have gone away by then."""
        for at_ms, session in self._clients.gone(ms):
            if session.phase is not Phase.ENDED:
                self._planner.now_ms = max(at_ms, self._planner.now_ms)
                self._planner.end(session)
                self._tally.cancelled += 1
                self._end_of(session, "cancelled")

    # -- a step

    def _launch(self, plan: Plan) -> None:
        start_ms = max(self._device_free_ms, self._clock_ms + self._setup.cost.host_ms)
        self._clock_ms += self._setup.cost.host_ms
        step, rows = self._begin(plan)
        moved = self._planner.moved
        state_ms = self._device.state_ms(rows, moved)
        end_ms = start_ms + state_ms + self._device.rest_ms(plan)
        moved.on_device = moved.over_host = 0
        if self._settings.async_depth == 0:
            # The host ends the step itself, once it has the logits; who has gone away by then is in it no more.
            self._cancel_until(end_ms)
        if step is not None:
            # Nothing reads the count of a request that was released meanwhile: 0, which is what a trace then holds.
            counts = [row.accepted if row.session.handle is row.life else 0 for row in rows]
            finished = [row.ends and row.session.handle is row.life for row in rows]
            self._managed.defer(step, counts, finished if any(finished) else None)
        launched = Launched(self._tally.steps, start_ms, end_ms, [], state_ms, sum(row.query_len for row in rows))
        for row in rows:
            self._end_row(launched, row)
        for piece in plan.pieces:
            if self._settings.prefill == "kernel":
                self._run_piece(launched, piece.session, piece.start, piece.stop)
            elif piece.is_last and piece.session.handle is not None:
                self._planner.decode(piece.session, end_ms)
        self._account(launched, plan)

    def _begin(self, plan: Plan) -> tuple[Step | None, list[Row]]:
        """Opens the step and verifies it; None for one that has no rows."""
        device, by_rows = self._device, self._settings.prefill == "rows"
        while plan:
            pieces = plan.pieces if by_rows else []
            sessions = [*plan.windows, *(piece.session for piece in pieces)]
            if not sessions:
                break
            handles = tuple([session.handle for session in sessions])
            lens = (*plan.query_lens, *(piece.stop - piece.start for piece in pieces))
            kinds = _row_kinds(len(plan.windows), len(pieces)) if pieces else None
            try:
                step = self._managed.begin(StepMetadata(handles=handles, query_lens=lens, row_kinds=kinds))
            except CapacityError:
                if not self._planner.make_boundary_room(plan):
                    raise
                continue
            self._managed.verify(step)
            rows = [device.window(*window) for window in zip(plan.windows, plan.query_lens, strict=True)]
            rows += [device.prompt_row(piece.session, piece.stop - piece.start, piece.is_last) for piece in pieces]
            return step, rows
        return None, []

    def _end_row(self, launched: Launched, row: Row) -> None:
        """The row's end has run on the device."""
        tally, session = self._tally, row.session
        if not row.is_prompt:
            tally.verified_tokens += row.query_len
        if session.handle is not row.life:
            tally.dropped_windows += 1
            return
        crosses = self._device.accept(row)
        if row.is_prompt:
            tally.prefilled_tokens += row.query_len
            tally.prefills += row.given
            session.read_len = session.committed_len
            if crosses:
                self._planner.publish(session, session.boundary_len)
        elif row.is_wasted:
            tally.wasted_windows += 1
        else:
            tally.windows += 1
            tally.accepted += row.accepted
            if row.is_full:
                tally.full_windows += 1
                tally.full_accepted += row.accepted
        session.num_unread += 1
        launched.rows.append(row)

    def _run_piece(self, launched: Launched, session: Session, start: int, stop: int) -> None:
        """A prefill kernel brings a request from ``start`` to ``stop``."""
        if session.handle is None:  # its client has gone away
            return
        block = self._settings.block_size
        boundary = stop // block * block if self._settings.prefix_cache else 0
        if boundary > start and session.key_at(boundary, block, self._settings.cache_outputs) is not None:
            self._load(session, boundary)
            self._planner.publish(session, boundary)
        if session.committed_len < stop:
            self._load(session, stop)
        self._tally.prefilled_tokens += stop - start
        launched.tokens += stop - start
        if stop == session.target_len:
            row = self._device.prompt_row(session, stop - start, True)
            session.num_emitted += row.given
            self._tally.prefills += row.given
            self._planner.decode(session, launched.end_ms)
            session.num_unread += 1
            launched.rows.append(row)

    def _load(self, session: Session, committed_len: int) -> None:
        handle = session.handle
        assert isinstance(handle, Handle)
        self._managed.load(handle, committed_len)
        session.stand_at(committed_len)
        session.read_len = committed_len

    def _account(self, launched: Launched, plan: Plan) -> None:
        meter, tally = self._meter, self._tally
        tally.steps += 1
        self._device_free_ms = launched.end_ms
        self._launched.append(launched)
        meter.busy_ms += launched.end_ms - launched.start_ms
        meter.state_ms += launched.state_ms
        meter.row_steps += len(plan.windows) + len(plan.pieces)
        meter.window_steps += bool(plan.windows)
        meter.window_rows += len(plan.windows)
        if self._timeline is not None:
            self._timeline.step(launched, plan)
        if tally.steps % SAMPLED_STEPS == 1:
            self._sample(launched.end_ms)

    # -- counts come back

    def _read(self) -> None:
        """The host reads the oldest step that it has not read."""
        launched = self._launched.popleft()
        end_ms = launched.end_ms
        self._cancel_until(end_ms)  # before its tokens came
        self._clock_ms = max(self._clock_ms, end_ms)
        self._planner.now_ms = end_ms
        for row in launched.rows:
            self._read_row(row, end_ms)

    def _read_row(self, row: Row, ms: float) -> None:
        session, tally, given = row.session, self._tally, row.given
        session.num_unread -= 1
        if session.phase is Phase.ENDED:
            # Cancelled, or at an end that the device knew nothing of.
            tally.late_tokens += given if row.is_prompt else row.accepted
            tally.late_prefills += given if row.is_prompt else 0
            return
        if not row.is_prompt:
            tally.cut_tokens += row.accepted - given
            session.read_len += row.accepted
            if self._adapts and not row.is_wasted:
                session.drafts.observe(row.query_len - 1, row.accepted)
        if given:
            session.num_known += given
            tally.output_tokens += given
            self._meter.deliver(session, ms)
        if self._settings.cache_outputs and session.phase is Phase.DECODE:
            self._publish_output(session)
        if session.num_known == session.request.output_len:
            self._planner.end(session)
            tally.finished += 1
            self._meter.finish(session)
            self._end_of(session, "finished")

    def _publish_output(self, session: Session) -> None:
        """Its latest boundary, unless windows whose counts are not known may have gone past the next one."""
        block, boundary = self._settings.block_size, session.boundary_len
        latest = session.read_len + session.num_unread * self._setup.config.max_query_len
        if session.published_len < boundary <= session.read_len and latest < boundary + block:
            session.published_len = boundary
            self._planner.publish(session, boundary)

    def _end_of(self, session: Session, outcome: str) -> None:
        if self._timeline is not None:
            self._timeline.request(session, outcome)

    # -- the end

    def _sample(self, ms: float) -> None:
        metrics, planner = self._managed.manager.metrics(), self._planner
        tally, meter = self._tally, self._meter
        sample = Sample(
            ms,
            tally.output_tokens,
            len(planner.running),
            len(planner.waiting),
            metrics.record_slots_in_use,
            metrics.checkpoint_slots_in_use,
            metrics.published_slots,
        )
        meter.samples.append(sample)
        self._managed.look()
        if self._progress is not None:
            self._progress(tally, ms)

    def _finish(self) -> Outcome:
        self._sample(self._device_free_ms)
        metrics = self._managed.manager.metrics()
        check_conservation(self._tally, metrics)
        self._managed.drop_prefixes()
        self._managed.manager.check_integrity()
        left = self._managed.manager.metrics()
        if left.record_slots_in_use or left.checkpoint_slots_in_use:
            raise ConservationError(
                f"conservation: {left.record_slots_in_use} record slots and {left.checkpoint_slots_in_use} checkpoint "
                "slots are not free at the end"
            )
        return Outcome(self._setup, self._tally, self._meter, metrics, tuple(self._refusals))


def _row_kinds(num_windows: int, num_prompts: int) -> tuple[RowKind, ...]:
    decode: RowKind = "decode"
    prompt: RowKind = "prompt"
    return (decode,) * num_windows + (prompt,) * num_prompts
