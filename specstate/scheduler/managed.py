"""The manager as the engine uses it, without payloads; executing.py has the same calls with real tensors."""

from collections.abc import Sequence
from typing import Any

from specstate.config import StateConfig
from specstate.manager import StateManager
from specstate.metadata import Handle, StepMetadata
from specstate.prefixes import PrefixKey
from specstate.step import Step
from specstate.trace import TraceRecorder


class Managed:
    """Every call of the public face that the engine makes. Raises whatever the manager raises.

    A subclass with payloads changes what lies around the calls, never which calls are made.
    """

    def __init__(self, config: StateConfig, recorder: TraceRecorder | None = None, debug: bool = False) -> None:
        self._is_recorded = recorder is not None
        self.manager = StateManager(config, None, backend="metadata", recorder=recorder, debug=debug)

    def admit(self, name: str) -> Handle:
        return self.manager.admit(name)

    def restore(self, key: PrefixKey, name: str) -> Handle:
        return self.manager.restore(key, name)

    def load(self, handle: Handle, committed_len: int) -> None:
        """A prefill kernel has written the state after ``committed_len`` tokens in place."""
        self.manager.load(handle, None, committed_len)

    def publish(self, handle: Handle, key: PrefixKey) -> None:
        self.manager.publish(handle, key)

    def retract(self, handle: Handle) -> None:
        self.manager.retract(handle)

    def resume(self, name: str) -> Handle:
        return self.manager.resume(name)

    def discard(self, name: str) -> None:
        self.manager.discard(name)

    def release(self, handle: Handle) -> None:
        self.manager.release(handle)

    def begin(self, metadata: StepMetadata) -> Step:
        return self.manager.begin_step(metadata)

    def verify(self, step: Step) -> None:
        """All layers."""
        step.replayed("verify")

    def defer(self, step: Step, counts: Sequence[int], finished: Sequence[bool] | None) -> None:
        step.defer(counts, finished=finished)

    def look(self) -> None:
        """Leaves a digest of who owns what in a trace, where there is one."""
        if self._is_recorded:
            self.manager.digest()

    def drop_prefixes(self) -> None:
        """The run is over and nothing is live: published states are given up."""
        self.manager.fence("drop")

    def checked(self) -> dict[str, Any]:
        """What was compared with the oracle; nothing here."""
        return {}
