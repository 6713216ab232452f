"""From memory to slots: how many requests a manager is built for, and how many states of prefixes it keeps beside."""

from dataclasses import dataclass

from specstate.config import ActivationDtype, CheckpointDtype, FoldPolicy, StateConfig
from specstate.errors import CapacityError, SpecStateError, shown
from specstate.layout import gib, plan_bytes
from specstate.limits import MAX_SLOTS
from specstate.presets import Preset
from specstate.scheduler.settings import EngineSettings, Policy


@dataclass(frozen=True, slots=True)
class Deployment:
    """One rank of a model, and the memory that it has for states."""

    model: Preset
    tp: int
    memory_bytes: int
    max_query_len: int
    policy: Policy
    checkpoint_dtype: CheckpointDtype = "float32"
    activation_dtype: ActivationDtype = "bfloat16"
    record_capacity: int | None = None
    prefix_share: float = 0.25
    """Of the memory that is kept for published prefixes and boundary checkpoints, where there is a prefix cache."""
    max_requests: int | None = None
    """None: as many as fit, at most ``max_batch``."""
    num_checkpoints: int | None = None
    """None: what the memory leaves."""


@dataclass(frozen=True, slots=True)
class Slots:
    """What the memory is divided into."""

    config: StateConfig
    num_fitting: int
    """Requests that would fit beside what is kept for prefixes, whatever the batch may be."""
    request_bytes: int
    """One running request's: its checkpoint and records, or its snapshots."""
    checkpoint_bytes: int
    """One published state's."""
    overhead_bytes: int

    @property
    def total_bytes(self) -> int:
        extra = self.config.num_checkpoints - self.config.max_requests
        return self.overhead_bytes + self.config.max_requests * self.request_bytes + extra * self.checkpoint_bytes

    def held_bytes(self, record_slots: float, checkpoint_slots: float) -> float:
        """Of so many slots in use."""
        return record_slots * (self.request_bytes - self.checkpoint_bytes) + checkpoint_slots * self.checkpoint_bytes


def divide(deployment: Deployment, settings: EngineSettings) -> Slots:
    """Slots for ``deployment``. Raises CapacityError when not even one request fits, and as ``Preset.config``.

    "snapshots" keeps T states a request and folds nothing; its lifecycle is run by a manager of policy "eager", and a
    published prefix is one state for it, too.
    """
    if not 0.0 <= deployment.prefix_share < 1.0:
        raise SpecStateError(f"prefix_share = {shown(deployment.prefix_share)} is outside 0..1")
    one = _config(deployment, settings, max_requests=1, num_checkpoints=2)
    plan = plan_bytes(one)
    snapshots = deployment.policy == "snapshots"
    request_bytes = plan.snapshot_bytes_per_request if snapshots else plan.bytes_per_request
    overhead_bytes = plan.snapshot_overhead_bytes if snapshots else plan.overhead_bytes
    checkpoint_bytes, memory = plan.checkpoint_bytes_per_request, deployment.memory_bytes
    kept = deployment.prefix_share if settings.prefix_cache else 0.0
    fit = int((memory * (1.0 - kept) - overhead_bytes) // request_bytes)
    max_requests = deployment.max_requests or min(fit, settings.max_batch)
    if max_requests < 1:
        raise CapacityError(
            f"{gib(memory)} hold no request: {gib(overhead_bytes)} are paid once, {gib(request_bytes)} for each, and "
            f"{kept:.0%} are kept for prefixes"
        )
    extra = 0
    if settings.prefix_cache:
        left = memory - overhead_bytes - max_requests * request_bytes
        extra = max(0, min(left // checkpoint_bytes, MAX_SLOTS - max_requests))
    config = _config(deployment, settings, max_requests, deployment.num_checkpoints or max_requests + extra)
    slots = Slots(config, max(fit, 0), request_bytes, checkpoint_bytes, overhead_bytes)
    if slots.total_bytes > memory:
        raise CapacityError(
            f"max_requests = {config.max_requests} and num_checkpoints = {config.num_checkpoints} need "
            f"{gib(slots.total_bytes)}, more than the {gib(memory)} there are"
        )
    return slots


def _config(deployment: Deployment, settings: EngineSettings, max_requests: int, num_checkpoints: int) -> StateConfig:
    policy: FoldPolicy = "eager" if deployment.policy == "snapshots" else deployment.policy
    return deployment.model.config(
        deployment.tp,
        max_query_len=deployment.max_query_len,
        max_requests=max_requests,
        num_checkpoints=num_checkpoints,
        fold_policy=policy,
        record_capacity=deployment.record_capacity,
        checkpoint_dtype=deployment.checkpoint_dtype,
        activation_dtype=deployment.activation_dtype,
        block_size=settings.block_size if settings.keeps_boundaries else None,
    )
