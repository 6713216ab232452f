"""Who runs in the next step: admission, pieces of prompts under the token budget, and who makes room.

It knows what the host knows, no more: counts that have not been read count as whole windows.
"""

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from specstate.config import StateConfig
from specstate.errors import CapacityError
from specstate.prefixes import PrefixKey
from specstate.scheduler.managed import Managed
from specstate.scheduler.session import Phase, Session
from specstate.scheduler.settings import EngineSettings
from specstate.scheduler.tally import Tally


class Piece(NamedTuple):
    """Tokens [start, stop) of a prompt that run in a step."""

    session: Session
    start: int
    stop: int

    @property
    def is_last(self) -> bool:
        return self.stop == self.session.target_len


@dataclass(slots=True)
class Plan:
    """One step. Windows come first in the batch, then prompt rows."""

    windows: list[Session] = field(default_factory=list)
    query_lens: list[int] = field(default_factory=list)
    pieces: list[Piece] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.windows or self.pieces)


@dataclass(slots=True)
class Moved:
    """Checkpoints that were copied since the last step, whose time belongs to the next one."""

    on_device: int = 0
    over_host: int = 0


class Planner:
    """Owns the queue and the running batch; calls the manager for whatever takes or frees slots."""

    def __init__(self, config: StateConfig, settings: EngineSettings, managed: Managed, tally: Tally) -> None:
        self._settings, self._managed, self._tally = settings, managed, tally
        self._window = config.max_query_len
        self._max_batch = min(settings.max_batch, config.max_requests)
        self.waiting: deque[Session] = deque()
        self.running: dict[str, Session] = {}
        """In the order of admission: the last one makes room first."""
        self.moved = Moved()
        self.now_ms = 0.0

    # -- the queue

    def fits(self, session: Session) -> str | None:
        """Why a request can never run; None when it can."""
        request, settings = session.request, self._settings
        total = request.input_len + request.output_len
        if total > settings.max_context:
            return f"{total} tokens of prompt and output exceed max_context = {settings.max_context}"
        most = self._most_kv(total)
        if settings.kv_tokens is not None and most > settings.kv_tokens:
            return f"{most} tokens, with the windows in flight, exceed kv_tokens = {settings.kv_tokens}"
        return None

    def end(self, session: Session) -> None:
        """Finished or cancelled: gives back whatever it has."""
        if session.phase is Phase.RETRACTED:
            self._managed.discard(session.name)
            self.waiting.remove(session)
        elif session.phase is Phase.WAITING:
            self.waiting.remove(session)
        else:
            assert session.handle is not None
            self._managed.release(session.handle)
            del self.running[session.name]
        session.handle = None
        self._turn(session, Phase.ENDED)

    def decode(self, session: Session, ms: float) -> None:
        """Its prompt is in a step that has been launched and ends then."""
        self._turn(session, Phase.DECODE, ms)

    # -- a step

    def plan(self, now_ms: float) -> Plan:
        """The next step; an empty one when nobody can run."""
        self.now_ms = now_ms
        made_room = self._make_kv_room()
        plan = Plan()
        budget = self._plan_windows(plan)
        for session in self.running.values():
            if session.phase is Phase.PREFILL and budget:
                budget -= self._plan_piece(plan, session, budget)
        while budget and not made_room and (admitted := self._admit()) is not None:
            if admitted.phase is Phase.PREFILL:
                budget -= self._plan_piece(plan, admitted, budget)
            else:  # resumed in the middle of its answer
                budget -= self._plan_window(plan, admitted, budget)
        return plan

    def make_boundary_room(self, plan: Plan) -> bool:
        """A step found no slot for a boundary checkpoint: the request admitted last leaves the plan and makes room.

        False when only one is left, which three checkpoint slots rule out: preempted requests come back before others
        are admitted, so all that keep a prefix once ran side by side, with a slot each beside it.
        """
        if len(self.running) == 1:
            return False
        victim = self.running[next(reversed(self.running))]
        if victim in plan.windows:
            place = plan.windows.index(victim)
            del plan.windows[place], plan.query_lens[place]
        for piece in plan.pieces:
            if piece.session is victim:
                victim.prefilled_len = piece.start
        plan.pieces = [piece for piece in plan.pieces if piece.session is not victim]
        self._preempt(victim)
        return True

    def publish(self, session: Session, position: int) -> bool:
        """Publishes the state there, which the manager must have; whether there was something to publish."""
        key = session.key_at(position, self._settings.block_size, self._settings.cache_outputs)
        if key is None:
            return False
        assert session.handle is not None
        is_new = not self._managed.manager.is_published(key)
        handed_over = position == session.boundary_len
        try:
            self._managed.publish(session.handle, key)
        except CapacityError:
            self._tally.unpublished += 1
            return False
        if is_new:
            self._tally.published += 1
            self.moved.on_device += not handed_over
            if handed_over:
                session.boundary_len = 0
        return True

    # -- inside

    def _plan_windows(self, plan: Plan) -> int:
        budget = self._settings.token_budget
        for session in self.running.values():
            if session.phase is not Phase.DECODE:
                continue
            taken = self._plan_window(plan, session, budget)
            if not taken:
                break
            budget -= taken
        return budget

    def _plan_window(self, plan: Plan, session: Session, budget: int) -> int:
        """Tokens taken; 0 when the window does not fit."""
        query_len = session.drafts.num_drafts + 1
        if query_len > budget:
            return 0
        plan.windows.append(session)
        plan.query_lens.append(query_len)
        return query_len

    def _plan_piece(self, plan: Plan, session: Session, budget: int) -> int:
        start = session.prefilled_len
        length = min(session.target_len - start, budget)
        if self._settings.prefill == "rows":
            length = min(length, self._window)
        session.prefilled_len = start + length
        plan.pieces.append(Piece(session, start, start + length))
        return length

    def _admit(self) -> Session | None:
        if not self.waiting or len(self.running) >= self._max_batch:
            return None
        session = self.waiting[0]
        # Of a request that was preempted, all counts must have come in: they say what it has to prefill.
        if session.num_unread or not self._managed.manager.can_admit() or not self._kv_has_room(session):
            return None
        if session.phase is Phase.RETRACTED:
            session.handle = self._managed.resume(session.name)
            self.moved.over_host += 1
            self._turn(session, Phase.PREFILL if session.prefilled_len < session.target_len else Phase.DECODE)
        else:
            self._begin_life(session)
        self.running[session.name] = self.waiting.popleft()
        return session

    def _begin_life(self, session: Session) -> None:
        key, handle = self._find_prefix(session), None
        if key is not None:
            try:
                handle = self._managed.restore(key, session.name)
            except CapacityError:  # the only slot that could be evicted is that of the prefix itself
                key = None
        if handle is None:
            handle = self._managed.admit(session.name)
        start_len = 0 if key is None else key.num_tokens
        self._turn(session, Phase.PREFILL)
        session.begin_life(handle, start_len)
        if key is not None:
            self._tally.hits += 1
            self._tally.restored_tokens += start_len
            self.moved.on_device += 1

    def _find_prefix(self, session: Session) -> PrefixKey | None:
        """The longest published one that leaves at least one token to run."""
        settings, manager = self._settings, self._managed.manager
        if not settings.prefix_cache:
            return None
        is_there = False
        for key in self._keys(session):
            if not is_there:
                self._tally.lookups += 1
                is_there = True
            if manager.is_published(key):
                return key
        return None

    def _keys(self, session: Session) -> Iterator[PrefixKey]:
        block = self._settings.block_size
        for position in range((session.full_len - 1) // block * block, 0, -block):
            key = session.key_at(position, block, self._settings.cache_outputs)
            if key is not None:
                yield key

    def _make_kv_room(self) -> bool:
        """Preempts until what runs fits into the KV cache, one window more of each included."""
        limit = self._settings.kv_tokens
        if limit is None:
            return False
        used = sum(map(self._kv_of, self.running.values()))
        made_room = False
        while used > limit:
            victim = self.running[next(reversed(self.running))]
            used -= self._kv_of(victim)
            self._preempt(victim)
            made_room = True
        return made_room

    def _kv_has_room(self, session: Session) -> bool:
        limit = self._settings.kv_tokens
        if limit is None:
            return True
        return sum(map(self._kv_of, self.running.values())) + self._kv_of(session) <= limit

    def _kv_of(self, session: Session) -> int:
        return session.full_len + (session.num_unread + 1) * self._window

    def _most_kv(self, total: int) -> int:
        return total + (self._settings.async_depth + 1) * self._window

    def _preempt(self, session: Session) -> None:
        assert session.handle is not None
        if self._settings.preemption == "retract":
            self._managed.retract(session.handle)
            session.stand_at(session.committed_len)
            self._turn(session, Phase.RETRACTED)
            self._tally.retracted += 1
            self.moved.over_host += 1
        else:
            self._managed.release(session.handle)
            self._turn(session, Phase.WAITING)
            self._tally.recomputed += 1
        session.handle = None
        del self.running[session.name]
        self.waiting.appendleft(session)

    def _turn(self, session: Session, phase: Phase, ms: float | None = None) -> None:
        # Not before its present phase began: a prompt's ends with its step, and the host may end a request before that.
        at_ms = max(self.now_ms if ms is None else ms, session.since_ms)
        session.spans.append((session.phase.value, session.since_ms, at_ms))
        session.phase, session.since_ms = phase, at_ms
