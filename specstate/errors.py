"""The errors that specstate raises.

Every one is a ``ValueError`` too, so that a caller who only guards against bad values needs no import. A message
names the field, its value, the limit and, inside a step, the step.
"""


class SpecStateError(ValueError):
    """A bad value or a broken rule. Whatever was called has changed nothing."""


class CapacityError(SpecStateError):
    """No free slot, or not the memory that a config or captured steps ask for."""


class StaleHandleError(SpecStateError):
    """The handle's request is unknown, was released, or lives on under another generation."""


class StepOrderError(SpecStateError):
    """The call is right, its moment is not: a layer verified twice, a step ended twice, a flush between verifies."""


class RankDisagreementError(SpecStateError):
    """Ranks were about to end a step in different ways. The words are the same on every rank; the step is open."""


def shown(value: object) -> str:
    """``value`` for a message, on one line: its repr, cut to what helps; its type where it has none (an int of 5,000
    digits)."""
    try:
        text = " ".join(repr(value).split())
    except Exception:
        return f"<{type(value).__name__}>"
    return text if len(text) <= 80 else f"{text[:77]}..."
