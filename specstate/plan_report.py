"""What ``specstate plan`` reports: the bytes of every tensor under each fold policy, beside a snapshot per token."""

import math
import sys
from dataclasses import dataclass
from typing import Any, get_args

from specstate.config import ActivationDtype, CheckpointDtype, FoldPolicy, StateConfig
from specstate.errors import SpecStateError, shown
from specstate.layout import BytePlan, plan_bytes
from specstate.presets import Preset
from specstate.tables import aligned

POLICIES: tuple[FoldPolicy, ...] = get_args(FoldPolicy)


@dataclass(frozen=True, slots=True)
class PlanRequest:
    """The question: which model, split over how many ranks, with which windows, in how much memory."""

    model: Preset
    tp: int
    max_query_len: int
    memory_gib: float
    checkpoint_dtype: CheckpointDtype = "float32"
    activation_dtype: ActivationDtype = "bfloat16"


@dataclass(frozen=True, slots=True)
class PlanReport:
    """The answer, one config and one byte plan for each fold policy with its default record capacity."""

    request: PlanRequest
    memory_bytes: int
    configs: dict[str, StateConfig]
    plans: dict[str, BytePlan]

    @property
    def bytes_per_request(self) -> dict[str, int]:
        ours = {policy: plan.bytes_per_request for policy, plan in self.plans.items()}
        return {"snapshot": self._any_plan.snapshot_bytes_per_request, **ours}

    @property
    def overhead_bytes(self) -> dict[str, int]:
        ours = {policy: plan.overhead_bytes for policy, plan in self.plans.items()}
        return {"snapshot": self._any_plan.snapshot_overhead_bytes, **ours}

    @property
    def max_requests(self) -> dict[str, int]:
        ours = {policy: plan.requests_in(self.memory_bytes) for policy, plan in self.plans.items()}
        return {"snapshot": self._any_plan.snapshot_requests_in(self.memory_bytes), **ours}

    @property
    def tensor_bytes_per_request(self) -> dict[str, dict[str, int]]:
        """Column, tensor, bytes: what one request costs of each tensor. Columns add up to ``bytes_per_request``."""
        columns = {
            policy: {tensor.name: tensor.bytes_per_slot for tensor in plan.tensors if tensor.scope != "manager"}
            for policy, plan in self.plans.items()
        }
        recurrent = self.request.max_query_len * columns["eager"]["recurrent"]
        snapshot = {"recurrent": recurrent, "conv": self._any_plan.snapshot_bytes_per_request - recurrent}
        return {"snapshot": {kind: size for kind, size in snapshot.items() if kind in columns["eager"]}, **columns}

    def to_json(self) -> dict[str, Any]:
        """One JSON object; every size is in bytes."""
        request, layer = self.request, self._any_config.layer
        return {
            "model": request.model.name,
            "tp": request.tp,
            "num_layers": self._any_config.num_layers,
            "num_heads": layer.num_heads,
            "head_k_dim": layer.head_k_dim,
            "head_v_dim": layer.head_v_dim,
            "conv_kernel_size": layer.conv_kernel_size,
            "max_query_len": request.max_query_len,
            "checkpoint_dtype": request.checkpoint_dtype,
            "activation_dtype": request.activation_dtype,
            "record_capacity": {policy: config.record_capacity for policy, config in self.configs.items()},
            "memory_gib": request.memory_gib,
            "memory_bytes": self.memory_bytes,
            "tensor_bytes_per_request": self.tensor_bytes_per_request,
            "checkpoint_bytes_per_request": self._any_plan.checkpoint_bytes_per_request,
            "bytes_per_request": self.bytes_per_request,
            "overhead_bytes": self.overhead_bytes,
            "max_requests": self.max_requests,
        }

    def to_text(self) -> str:
        """The same for a person."""
        request, layer = self.request, self._any_config.layer
        columns = self.tensor_bytes_per_request
        capacities = {policy: str(config.record_capacity) for policy, config in self.configs.items()}
        tensor_names = list(columns["eager"])
        rows = [["per request", *columns], ["records (R)", "-", *capacities.values()]]
        for name in tensor_names:
            rows.append([name, *(size_text(column[name]) if name in column else "-" for column in columns.values())])
        rows += [
            ["total", *map(size_text, self.bytes_per_request.values())],
            ["paid once", *map(size_text, self.overhead_bytes.values())],
            [f"requests in {request.memory_gib:g} GiB", *map(str, self.max_requests.values())],
        ]
        title = (
            f"{request.model.name}, {request.tp}-way tensor parallel, one rank: {self._any_config.num_layers} KDA "
            f"layers, {layer.num_heads} heads, K = {layer.head_k_dim}, V = {layer.head_v_dim}, "
            f"windows of {request.max_query_len}, {request.checkpoint_dtype} state, "
            f"{request.activation_dtype} activations"
        )
        lines = aligned(rows)
        rule = "-" * len(lines[0])
        lines[1:1] = [rule]
        lines[-3:-3] = [rule]
        return "\n".join([title, "", *lines])

    @property
    def _any_plan(self) -> BytePlan:
        # What a checkpoint or a snapshot costs does not depend on the policy.
        return self.plans["eager"]

    @property
    def _any_config(self) -> StateConfig:
        return self.configs["eager"]


def build_plan_report(request: PlanRequest) -> PlanReport:
    """Plans ``request`` under every policy. Raises SpecStateError or ValidationError for what cannot work."""
    if not isinstance(request, PlanRequest):
        raise SpecStateError(f"request must be a PlanRequest, not {type(request).__name__}")
    if not isinstance(request.model, Preset):
        raise SpecStateError(f"model must be a Preset, not {type(request.model).__name__}")
    size = request.memory_gib * 2**30 if type(request.memory_gib) in (int, float) else math.nan
    if not 0 < size <= sys.float_info.max:
        raise SpecStateError(f"memory_gib = {shown(request.memory_gib)} must be above 0 and a finite number of bytes")
    configs: dict[str, StateConfig] = {
        policy: request.model.config(
            request.tp,
            max_query_len=request.max_query_len,
            max_requests=1,  # a plan per request is the same whatever their number
            fold_policy=policy,
            checkpoint_dtype=request.checkpoint_dtype,
            activation_dtype=request.activation_dtype,
        )
        for policy in POLICIES
    }
    plans = {policy: plan_bytes(config) for policy, config in configs.items()}
    return PlanReport(request=request, memory_bytes=int(size), configs=configs, plans=plans)


def size_text(size_bytes: int) -> str:
    """``size_bytes`` in the largest binary unit that keeps it at 1 or above: '32 B', '48.52 KiB', '51.75 MiB'."""
    for unit, scale in (("TiB", 2**40), ("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if size_bytes >= scale:
            return f"{size_bytes / scale:.2f} {unit}"
    return f"{size_bytes} B"
