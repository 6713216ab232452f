"""What a launched step does on the device: which drafts hold, who meets an end, what is folded, how long it takes.

The manager is told the same counts; this account follows it row by row, for the cost of a step and to be compared with
the manager's own at the end.
"""

from dataclasses import dataclass
from typing import NamedTuple

from specstate.bench.floor import FoldTiming
from specstate.config import StateConfig
from specstate.scheduler.acceptance import AcceptanceModel
from specstate.scheduler.calibration import Calibration
from specstate.scheduler.cost import CostLine
from specstate.scheduler.planner import Moved, Plan
from specstate.scheduler.session import Session
from specstate.scheduler.settings import EngineSettings, Policy
from specstate.scheduler.tally import Tally
from specstate.scheduler.traffic import Work, fold_traffic, snapshot_traffic


class Row(NamedTuple):
    """What a step's end does to one request in it."""

    session: Session
    life: object
    """The handle that it ran under."""
    query_len: int
    accepted: int
    """num_accepted."""
    given: int
    """Tokens put out: the count, less what lies beyond the end."""
    ends: bool
    """It met its end token."""
    is_prompt: bool
    is_wasted: bool
    """It had met its end token before."""
    is_full: bool
    """A window of max_query_len, which no end could have cut."""


@dataclass(slots=True)
class Launched:
    """A step on its way, its counts not yet read."""

    index: int
    """Number of the step, from 0; a step of prefill kernels alone has one too, though the manager sees no step."""
    start_ms: float
    end_ms: float
    rows: list[Row]
    """Those whose end has run: of requests that were cancelled before it there is none."""
    state_ms: float
    """Of it, state management."""
    tokens: int
    """Of windows and prompts."""


class Device:
    """Draws what comes out of windows, and prices steps."""

    def __init__(
        self,
        config: StateConfig,
        settings: EngineSettings,
        policy: Policy,
        acceptance: AcceptanceModel,
        cost: CostLine,
        calibration: Calibration,
        tally: Tally,
    ) -> None:
        self._config, self._policy, self._acceptance = config, policy, acceptance
        self._cost, self._calibration, self._tally = cost, calibration, tally
        self._traffic = snapshot_traffic(config) if policy == "snapshots" else fold_traffic(config)
        self._checkpoint_bytes = fold_traffic(config).checkpoint_bytes
        self._timing = FoldTiming(config)
        self._block_size = settings.block_size if settings.keeps_boundaries else None
        self._by_rows = settings.prefill == "rows"

    # -- what comes out

    def window(self, session: Session, query_len: int) -> Row:
        """A decode row: draws its count. Changes the device's side of nothing but the number of windows."""
        if session.is_finished:
            return Row(session, session.handle, query_len, 0, 0, False, False, True, False)
        count = self._acceptance.num_accepted(session.name, session.num_windows, query_len - 1)
        session.num_windows += 1
        left = session.request.output_len - session.num_emitted
        # Where the end could have cut it, only short counts would be whole: such windows are left out, cut or not.
        full = query_len == self._config.max_query_len and (left >= query_len or left <= 0)
        if left > count or left <= 0:  # goes on; or it had ended, which the device does not know
            return Row(session, session.handle, query_len, count, count if left > 0 else 0, False, False, False, full)
        if session.ends_by_length:
            return Row(session, session.handle, query_len, count, left, False, False, False, full)
        # The end token is the left-th that comes out. Behind an accepted draft the count is cut: the first token of the
        # window and the drafts up to the end token.
        cut = min(count, left + 1)
        return Row(session, session.handle, query_len, cut, left, True, False, False, full)

    def prompt_row(self, session: Session, query_len: int, is_last: bool) -> Row:
        """A piece of a prompt that runs through verify; the last one samples a token."""
        gives = int(is_last and session.request.output_len > session.num_emitted)
        ends = bool(gives) and not session.ends_by_length and session.request.output_len == session.num_emitted + 1
        return Row(session, session.handle, query_len, query_len, gives, ends, True, False, False)

    # -- what it costs

    def work(self, rows: list[Row]) -> Work:
        """Of state management, by what the rows have pending."""
        pending = tokens = verify_folds = end_folds = folded = 0
        for row in rows:
            tokens += row.query_len
            held = row.session.pending_len
            pending += held
            folds = self._timing.of(held, row.accepted)
            verify_folds += folds.in_verify
            end_folds += folds.at_end > 0
            folded += folds.at_end
        return Work(len(rows), tokens, pending, verify_folds, end_folds, folded)

    def state_ms(self, rows: list[Row], moved: Moved) -> float:
        """State management of a step: its windows, and the checkpoints that were copied before it."""
        ms = self._calibration.state_ms(self._policy, self._config, self._traffic, self.work(rows)) if rows else 0.0
        if moved.on_device:
            ms += 1e3 * moved.on_device * self._checkpoint_bytes / self._cost.copy_bytes_per_s
        if moved.over_host:
            ms += 1e3 * moved.over_host * self._checkpoint_bytes / self._cost.host_bytes_per_s
        return ms

    def rest_ms(self, plan: Plan) -> float:
        """The rest of the model."""
        tokens = sum(plan.query_lens)
        context = sum([session.committed_len for session in plan.windows])
        return self._cost.step_rest_ms(tokens, context, sum(piece.stop - piece.start for piece in plan.pieces))

    # -- the end of a step

    def accept(self, row: Row) -> bool:
        """The row's end has run: moves its request as the manager does; whether it kept a boundary checkpoint."""
        session, tally = row.session, self._tally
        folds = self._timing.of(session.pending_len, row.accepted)
        tally.folds += folds.in_verify + (folds.at_end > 0)
        held = folds.left
        before = session.committed_len
        after = session.committed_len = before + row.accepted
        session.num_emitted += row.given
        session.is_finished |= row.ends
        block = self._block_size
        crosses = block is not None and after // block > before // block
        if crosses:
            assert block is not None
            tally.boundary_folds += held > 0
            held, session.boundary_len = 0, after // block * block
        session.pending_len = held
        return crosses
