"""A request inside the engine: what the host knows of it, and what is already so on the device.

The two differ while steps run whose counts the host has not read. Fields say whose they are.
"""

from dataclasses import dataclass, field
from enum import Enum

from specstate.metadata import Handle
from specstate.prefixes import PrefixKey
from specstate.scheduler.drafts import DraftLength
from specstate.scheduler.workloads import TracedRequest


class Phase(Enum):
    """Where a request stands, for the host."""

    WAITING = "waiting"
    """For slots, from the start or, once it was preempted, over again."""
    RETRACTED = "retracted"
    """It waits, with its state on the host."""
    PREFILL = "prefill"
    DECODE = "decode"
    ENDED = "ended"
    """Finished, cancelled or refused."""


@dataclass(slots=True, eq=False)
class Session:
    """One request from its arrival to its end."""

    name: str
    """Its id in the manager."""
    request: TracedRequest
    ends_by_length: bool
    drafts: DraftLength
    phase: Phase = Phase.WAITING
    handle: Handle | None = None

    # The host's.
    target_len: int = 0
    """Tokens to prefill in this life: the prompt, and after a preemption what was put out."""
    prefilled_len: int = 0
    """Of these, in steps planned so far, or restored."""
    num_known: int = 0
    """Tokens that the host has read, and sent to the client."""
    num_unread: int = 0
    """Rows in steps that the host has planned and not read."""
    read_len: int = 0
    """Committed tokens as of the last step that was read."""
    published_len: int = 0
    """Of the last boundary beyond the prompt that was offered for publication in this life."""

    # The device's.
    num_emitted: int = 0
    """Tokens put out."""
    is_finished: bool = False
    """It has met its end token: the device accepts nothing any more."""
    committed_len: int = 0
    """Tokens that its state stands for."""
    pending_len: int = 0
    """Records that are not folded."""
    boundary_len: int = 0
    """Of the boundary checkpoint in its own slot; 0: none."""
    num_windows: int = 0
    """Windows drawn, over all lives."""

    # Times in milliseconds.
    first_token_ms: float = -1.0
    last_token_ms: float = -1.0
    spans: list[tuple[str, float, float]] = field(default_factory=list)
    """For a timeline: (phase, from, to)."""
    since_ms: float = 0.0
    """When its present phase began."""

    @property
    def is_live(self) -> bool:
        return self.phase is Phase.PREFILL or self.phase is Phase.DECODE

    @property
    def full_len(self) -> int:
        """All tokens that the host knows of: what a life that starts over has to prefill."""
        return self.request.input_len + self.num_known

    def begin_life(self, handle: Handle, start_len: int) -> None:
        """Admitted or restored at ``start_len``; the rest is to be prefilled."""
        self.handle, self.phase = handle, Phase.PREFILL
        self.target_len, self.prefilled_len = self.full_len, start_len
        self.stand_at(start_len)
        self.read_len, self.published_len = start_len, 0

    def stand_at(self, committed_len: int) -> None:
        """The device has it there, nothing pending and no boundary kept."""
        self.committed_len, self.pending_len, self.boundary_len = committed_len, 0, 0

    def key_at(self, position: int, block_size: int, outputs: bool) -> PrefixKey | None:
        """The key of its first ``position`` tokens, a multiple of ``block_size``; None when nobody may look for it.

        outputs: prefixes that reach into what it put out have a key of its own.
        """
        request = self.request
        if position <= request.input_len:
            number = position // block_size - 1
            if request.block_size == block_size and number < len(request.prefix_hashes):
                return PrefixKey(str(request.prefix_hashes[number]), position)
            return None
        return PrefixKey(f"{self.name}, with outputs", position) if outputs else None
