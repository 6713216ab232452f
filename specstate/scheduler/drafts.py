"""How many drafts a window is to have: always as many, or as many as the request's last windows make worthwhile."""

from typing import Protocol

from pydantic import BaseModel, ConfigDict, Field

from specstate.errors import SpecStateError, shown
from specstate.limits import MAX_QUERY_LEN


class DraftLength(Protocol):
    """One request's, from window to window."""

    @property
    def num_drafts(self) -> int:
        """Drafts of the next window."""

    def observe(self, num_drafts: int, num_accepted: int) -> None:
        """A window of ``num_drafts`` drafts has ended with ``num_accepted`` tokens, the first included.

        Raises SpecStateError when they cannot be of one window.
        """


class DraftPolicy(Protocol):
    """What a simulator is given."""

    @property
    def max_drafts(self) -> int:
        """The most that any window has: max_query_len - 1 must not be less."""

    def start(self) -> DraftLength:
        """The lengths of a new request."""


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class FixedDrafts(_Frozen):
    """The same number of drafts in every window; 0 decodes token by token. Raises pydantic's ``ValidationError``."""

    max_drafts: int = Field(ge=0, lt=MAX_QUERY_LEN)

    def start(self) -> "DraftLength":
        """See ``DraftPolicy``."""
        return _Fixed(self.max_drafts)


class AdaptiveDrafts(_Frozen):
    """One draft more than the request's windows accepted of late; none where almost nothing holds.

    The mean of accepted drafts is an exponentially weighted one, a, which begins at ``max_drafts``. A window of d > 0
    drafts of which n hold makes it a + smoothing (n - a), with d + 1 in place of n where all hold: the window was too
    short to show more, and without that a would never pass d. The next window has min(floor(a) + 1, max_drafts)
    drafts. Below ``give_up`` it has none, except that every ``probe_interval``-th has one, which may lift a again.

    The rule is ours, of the kind that engines use (SGLang follows a moving mean of accepted lengths too:
    sgl-project/sglang pull request 21599); its defaults are round numbers, fitted to nothing. Raises pydantic's
    ``ValidationError``.
    """

    max_drafts: int = Field(ge=0, lt=MAX_QUERY_LEN)
    smoothing: float = Field(default=0.2, gt=0.0, le=1.0, allow_inf_nan=False)
    """Weight of the last window."""
    give_up: float = Field(default=0.1, ge=0.0, lt=1.0, allow_inf_nan=False)
    """Drafts per window. Once so few hold, drafting stops."""
    probe_interval: int = Field(default=16, ge=1)
    """Windows from probe to probe."""

    def start(self) -> "DraftLength":
        """See ``DraftPolicy``."""
        return _Adaptive(self)


class _Fixed:
    def __init__(self, num_drafts: int) -> None:
        self.num_drafts = num_drafts

    def observe(self, num_drafts: int, num_accepted: int) -> None:
        _check_observed(num_drafts, num_accepted)


class _Adaptive:
    def __init__(self, policy: AdaptiveDrafts) -> None:
        self._policy = policy
        self._mean = float(policy.max_drafts)
        self._windows_without = 0

    @property
    def num_drafts(self) -> int:
        if self._mean >= self._policy.give_up:
            return min(int(self._mean) + 1, self._policy.max_drafts)
        is_probe = self._windows_without + 1 >= self._policy.probe_interval
        return min(int(is_probe), self._policy.max_drafts)

    def observe(self, num_drafts: int, num_accepted: int) -> None:
        _check_observed(num_drafts, num_accepted)
        if num_drafts:
            self._windows_without = 0
            held = num_accepted - 1
            self._mean += self._policy.smoothing * ((held if held < num_drafts else held + 1) - self._mean)
        else:
            self._windows_without += 1


def _check_observed(num_drafts: int, num_accepted: int) -> None:
    if type(num_drafts) is not int or not 0 <= num_drafts < MAX_QUERY_LEN:
        raise SpecStateError(f"num_drafts = {shown(num_drafts)} is outside 0..{MAX_QUERY_LEN - 1}")
    if type(num_accepted) is not int or not 1 <= num_accepted <= num_drafts + 1:
        raise SpecStateError(
            f"num_accepted = {shown(num_accepted)} is outside 1..{num_drafts + 1}, of a window of {num_drafts} drafts"
        )
