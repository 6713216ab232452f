"""Small engines for the simulator's tests."""

import random
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from specstate import KDALayerSpec, StateConfig
from specstate.scheduler.acceptance import AcceptanceModel, RateAcceptance
from specstate.scheduler.calibration import uncalibrated
from specstate.scheduler.cost import CostLine
from specstate.scheduler.device import Launched
from specstate.scheduler.drafts import DraftPolicy, FixedDrafts
from specstate.scheduler.managed import Managed
from specstate.scheduler.planner import Plan
from specstate.scheduler.session import Session
from specstate.scheduler.settings import EngineSettings
from specstate.scheduler.setup import Setup
from specstate.scheduler.simulator import Outcome, simulate
from specstate.scheduler.workloads import TracedRequest

SPEC = KDALayerSpec(num_heads=2, head_k_dim=16, head_v_dim=16, conv_kernel_size=4)
COST = CostLine(step_ms=10.0, ms_per_token=0.01, ms_per_context_token=0.001, prefill_tokens_per_s=10_000.0)
RATES = (0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3)


def make_setup(
    *,
    policy: str = "ring",
    window: int = 4,
    slots: int = 4,
    checkpoints: int | None = None,
    layers: int = 3,
    acceptance: AcceptanceModel | None = None,
    drafts: DraftPolicy | None = None,
    cost: CostLine = COST,
    record_capacity: int | None = None,
    **settings: Any,
) -> Setup:
    """An engine of few slots; ``settings`` are those of EngineSettings."""
    engine = EngineSettings(**{"prefix_cache": False, "token_budget": 64, **settings})
    config = StateConfig(
        num_layers=layers,
        layer=SPEC,
        max_requests=slots,
        num_checkpoints=slots if checkpoints is None else checkpoints,
        max_query_len=window,
        fold_policy="eager" if policy == "snapshots" else policy,
        record_capacity=record_capacity,
        block_size=engine.block_size if engine.keeps_boundaries else None,
    )
    return Setup(
        config=config,
        policy=policy,
        settings=engine,
        acceptance=acceptance or RateAcceptance(rates=RATES[: window - 1], seed=engine.seed),
        drafts=drafts or FixedDrafts(max_drafts=window - 1),
        cost=cost,
        calibration=uncalibrated(),
    )


def serve(setup: Setup, requests: Iterable[TracedRequest], timeline: Any = None) -> Outcome:
    """In metadata mode."""
    return simulate(setup, requests, Managed(setup.config), timeline)


def request(
    name: str, arrival_ms: float = 0.0, input_len: int = 20, output_len: int = 10, **fields: Any
) -> TracedRequest:
    return TracedRequest(name, arrival_ms, input_len, output_len, **fields)


def conversations(
    count: int,
    seed: int = 0,
    block: int = 8,
    inputs: tuple[int, int] = (6, 40),
    outputs: tuple[int, int] = (1, 12),
    gap_ms: float = 15.0,
    chains: int = 3,
) -> list[TracedRequest]:
    """Requests whose prompts begin with some blocks of one of a few chains."""
    rng = random.Random(seed)
    arrival_ms, made = 0.0, []
    for number in range(count):
        input_len, output_len = rng.randint(*inputs), rng.randint(*outputs)
        blocks = -(-input_len // block)
        chain, shared = rng.randrange(chains), rng.randint(0, blocks)
        hashes = [f"{chain}/{i}" for i in range(shared)] + [f"own {number}/{i}" for i in range(blocks - shared)]
        made.append(TracedRequest(f"r{number}", arrival_ms, input_len, output_len, tuple(hashes), block))
        arrival_ms += rng.expovariate(1.0 / gap_ms) if gap_ms else 0.0
    return made


@dataclass
class Watched:
    """A timeline that remembers what it is told."""

    steps: list[tuple[Launched, int, int]] = field(default_factory=list)
    """Each with its windows and pieces of prompts."""
    ends: list[tuple[str, str, float]] = field(default_factory=list)
    """(request, outcome, last token's time)."""
    sessions: dict[str, Session] = field(default_factory=dict)

    def step(self, launched: Launched, plan: Plan) -> None:
        self.steps.append((launched, len(plan.windows), len(plan.pieces)))

    def request(self, session: Session, outcome: str) -> None:
        self.ends.append((session.name, outcome, session.last_token_ms))
        self.sessions[session.name] = session
