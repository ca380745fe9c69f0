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


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannerSettings:
    """Settings by which plans are valued and searched for.

    `objective`: "exact" values a pipeline by the 1F1B recurrence over its own micro-batches,
    "closed_form" by Eq. (1). `dispatch`: "greedy" by Alg. 1, "ideal" starts from the integer
    program of Eq. (3): seconds, and more. `num_trials`: trials of Alg. 1 for each strategy.
    `forward_fraction`: part of T that is the forward pass. `max_refine_steps`: exchanges between
    packed pipelines, 0 for none (the heuristic plan). `num_perturbations`: restarts of the
    refinement from a disturbed plan, where the bound leaves more than 1%. `enough_gap`: a strategy
    is not refined further once it is this close to its lower bound. `solver`: for integer programs.
    The micro-batches of the slowest pipeline of the chosen plan are solved for where their bound
    leaves more than `solver_gap`, within `solver_max_nodes` and `solver_deadline_s`.
    `max_len_override`: MaxLen of schemes in tokens, in place of what the memory model says.
    `link_times`: pull and push of strategies. Among packed strategies the one wins whose iteration,
    with what pull and push add to it, is shortest; a strategy that is not there adds nothing.
    `overlaps_links`: layers are pulled and pushed one by one beside propagation.
    """

    objective: Literal["exact", "closed_form"] = "exact"
    dispatch: Literal["greedy", "ideal"] = "greedy"
    num_trials: int = 4
    seed: int = 0
    forward_fraction: float = FORWARD_FRACTION
    max_refine_steps: int = 400
    num_perturbations: int = 12
    enough_gap: float = 1e-3
    solver: Literal["cbc", "highs", "none"] = "cbc"
    solver_gap: float = 0.02
    solver_max_nodes: int = 500
    solver_deadline_s: float = 2.0
    max_len_override: Mapping[Scheme, int] = field(default_factory=dict)
    link_times: Mapping[Strategy, LinkTimes] = field(default_factory=dict)
    overlaps_links: bool = True

    def heuristic(self) -> PlannerSettings:
        """The same without refinement: plans in a fraction of the time."""
        return replace(self, dispatch="greedy", num_trials=1, max_refine_steps=0, solver="none")

    @property
    def solver_limits(self) -> SolverLimits | None:
        """Limits of integer programs; None where `solver` is "none"."""
        if self.solver == "none":
            return None
        return SolverLimits(
            solver=self.solver,
            gap_tolerance=self.solver_gap,
            max_nodes=self.solver_max_nodes,
            deadline_s=self.solver_deadline_s,
        )

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
