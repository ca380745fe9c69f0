"""What a planning process is told, as JSON."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ds_hydra.sampler.plan import GlobalBatch, IterationPlan
from ds_hydra.sampler.planner import plan_iteration
from ds_hydra.sampler.planner_settings import PlannerSettings
from ds_hydra.strategy.profiles.corrections import NO_CORRECTIONS, Corrections
from ds_hydra.strategy.profiles.profile import Profile
from ds_hydra.strategy.schemes.scheme import Strategy, parse_strategies


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanningTask:
    """Everything about planning that is the same for all iterations."""

    strategies: tuple[Strategy, ...]
    profile: Profile
    num_devices: int
    settings: PlannerSettings

    def plan(self, batch: GlobalBatch, corrections: Corrections = NO_CORRECTIONS) -> IterationPlan:
        """`plan_iteration` of `batch`."""
        return plan_iteration(
            batch,
            strategies=self.strategies,
            profile=self.profile,
            num_devices=self.num_devices,
            settings=self.settings,
            corrections=corrections,
        )

    def to_json(self) -> dict[str, Any]:
        """The task as a JSON document."""
        return {
            "strategies": [str(strategy) for strategy in self.strategies],
            "profile": self.profile.document,
            "num_devices": self.num_devices,
            "settings": self.settings.to_json(),
        }

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> PlanningTask:
        """The task in a document written by `to_json`."""
        return cls(
            strategies=parse_strategies(document["strategies"]),
            profile=Profile.from_json(document["profile"]),
            num_devices=document["num_devices"],
            settings=PlannerSettings.from_json(document["settings"]),
        )


def batch_to_json(batch: GlobalBatch) -> dict[str, Any]:
    """`batch` as a JSON document; `batch_from_json` restores it."""
    return {
        "iteration": batch.iteration,
        "sample_indices": batch.sample_indices,
        "lengths": batch.lengths,
        "num_label_tokens": batch.num_label_tokens,
    }


def batch_from_json(document: Mapping[str, Any]) -> GlobalBatch:
    """The batch in a document written by `batch_to_json`."""
    return GlobalBatch(
        iteration=document["iteration"],
        sample_indices=tuple(document["sample_indices"]),
        lengths=tuple(document["lengths"]),
        num_label_tokens=document["num_label_tokens"],
    )
