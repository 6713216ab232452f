"""What a simulation is made of."""

from dataclasses import dataclass

from specstate.config import StateConfig
from specstate.errors import SpecStateError
from specstate.scheduler.acceptance import AcceptanceModel
from specstate.scheduler.calibration import Calibration
from specstate.scheduler.cost import CostLine
from specstate.scheduler.drafts import DraftPolicy
from specstate.scheduler.settings import EngineSettings, Policy


@dataclass(frozen=True, slots=True)
class Setup:
    """What is simulated. Raises SpecStateError when its parts do not go together."""

    config: StateConfig
    """Of the manager: slots, windows, and the policy by which records are folded."""
    policy: Policy
    """By which steps are priced: the config's, or "snapshots", whose lifecycle is run under "eager"."""
    settings: EngineSettings
    acceptance: AcceptanceModel
    drafts: DraftPolicy
    cost: CostLine
    calibration: Calibration

    def __post_init__(self) -> None:
        config, settings = self.config, self.settings
        if self.drafts.max_drafts >= config.max_query_len:
            raise SpecStateError(
                f"max_drafts = {self.drafts.max_drafts} needs windows of {self.drafts.max_drafts + 1}: "
                f"max_query_len = {config.max_query_len}"
            )
        run_as = "eager" if self.policy == "snapshots" else self.policy
        if config.fold_policy != run_as:
            raise SpecStateError(f"fold_policy = {config.fold_policy!r} of the config must be {run_as!r}")
        if settings.token_budget < config.max_query_len:
            raise SpecStateError(
                f"token_budget = {settings.token_budget} is less than one window of max_query_len = "
                f"{config.max_query_len}"
            )
        wanted = settings.block_size if settings.keeps_boundaries else None
        if config.block_size != wanted:
            raise SpecStateError(
                f"block_size = {config.block_size} of the config must be {wanted}, as the settings want"
            )
        if settings.keeps_boundaries and config.num_checkpoints < 3:
            raise SpecStateError(
                f"num_checkpoints = {config.num_checkpoints} is less than 3: one each for a request, its "
                "prefix and its boundary checkpoint"
            )
        self.acceptance.mean_acceptance_length(self.drafts.max_drafts)  # raises where it has no rate for a draft
