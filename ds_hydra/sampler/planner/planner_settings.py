"""Limits of the planner, and everything else that is the same for all plans of a run: sent to
planning processes as JSON.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from ds_hydra.sampler.planner.problem import SolverLimits
from ds_hydra.strategy.profiles.profile import LinkTimes, Profile
from ds_hydra.strategy.schemes.scheme import FORWARD_FRACTION, Scheme, Strategy, parse_strategies

SOLVER_LIMITS = SolverLimits(gap_tolerance=0.02, max_nodes=500, deadline_s=2.0)
"""Limits of an integer program of one iteration."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannerSettings:
    """Settings by which plans are valued and searched for.

    `objective`: "exact" values a pipeline by the 1F1B recurrence over its own micro-batches,
    "closed_form" by Eq. (1). `dispatch`: "greedy" by Alg. 1, "ideal" starts from the integer
    program of Eq. (3): seconds, and more. `refines`: whether sequences change places between packed
    pipelines, after several trials of Alg. 1; without it a plan is heuristic. `seed`: of these
    trials. `forward_fraction`: part of T that is the forward pass. `solver`: for integer programs,
    also of the micro-batches of the slowest pipeline of the chosen plan (`SOLVER_LIMITS`).
    `max_len_override`: MaxLen of schemes in tokens, in place of what the memory model says.
    `link_times`: pull and push of strategies. Among packed strategies the one wins whose iteration,
    with what pull and push add to it, is shortest; a strategy that is not there adds nothing.
    `overlaps_links`: layers are pulled and pushed one by one beside propagation.
    """

    objective: Literal["exact", "closed_form"] = "exact"
    dispatch: Literal["greedy", "ideal"] = "greedy"
    refines: bool = True
    seed: int = 0
    forward_fraction: float = FORWARD_FRACTION
    solver: Literal["cbc", "highs", "none"] = "cbc"
    max_len_override: Mapping[Scheme, int] = field(default_factory=dict)
    link_times: Mapping[Strategy, LinkTimes] = field(default_factory=dict)
    overlaps_links: bool = True

    def heuristic(self) -> PlannerSettings:
        """The same without refinement: plans in a fraction of the time."""
        return replace(self, dispatch="greedy", refines=False, solver="none")

    @property
    def solver_limits(self) -> SolverLimits | None:
        """Limits of integer programs; None where `solver` is "none"."""
        return None if self.solver == "none" else replace(SOLVER_LIMITS, solver=self.solver)

    def to_json(self) -> dict[str, Any]:
        """The settings as a JSON document."""
        document = {name: getattr(self, name) for name in self.__slots__}
        document["max_len_override"] = [
            [scheme.tp, scheme.pp, tokens] if scheme.is_plain else [str(scheme), tokens]
            for scheme, tokens in self.max_len_override.items()
        ]
        document["link_times"] = {
            str(strategy): [times.pull_ms, times.push_ms]
            for strategy, times in self.link_times.items()
        }
        return document

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> PlannerSettings:
        """The settings in a document written by `to_json`."""
        override = {
            Scheme.parse(scheme[0]) if isinstance(scheme[0], str) else Scheme(*scheme): tokens
            for *scheme, tokens in document["max_len_override"]
        }
        links = {
            Strategy.parse(text): LinkTimes(pull_ms=pull, push_ms=push)
            for text, (pull, push) in document["link_times"].items()
        }
        return cls(**{**document, "max_len_override": override, "link_times": links})


DEFAULT_SETTINGS = PlannerSettings()


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanningTask:
    """Everything about planning that is the same for all iterations."""

    strategies: tuple[Strategy, ...]
    profile: Profile
    num_devices: int
    settings: PlannerSettings = DEFAULT_SETTINGS

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
