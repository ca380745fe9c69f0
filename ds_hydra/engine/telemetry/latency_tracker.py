"""How the engine learns from measured times: logs how far predictions are off, and may correct the
plans to come.

Every rank takes in the same times, so every rank holds the same fit; only rank 0 plans with it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from ds_hydra.configs.hydra_config import PlannerConfig
from ds_hydra.sampler.plan import IterationPlan
from ds_hydra.strategy import LatencyModel, Profile, Scheme
from ds_hydra.strategy.profiles.online_fit import OnlineFit, OnlineFitSettings

_QUIET_ITERATIONS = 100
"""Iterations without another warning of drift."""


class LatencyTracker:
    """The profile of every iteration, and what measured iterations say of it. Nothing is
    collective.

    With `refit` "plan" the models fitted after iteration k, every `refit_interval` iterations, hold
    for the iterations from k + `lookahead` on: the first that is not planned yet. So what an
    iteration is planned with does not depend on when a plan is made, and a checkpoint that holds
    `state_dict` continues with the very same profiles.
    """

    def __init__(
        self, profile: Profile, planner: PlannerConfig, state: Mapping[str, Any] | None = None
    ):
        self.profiled = profile
        self._planner = planner
        self._fit = OnlineFit(
            profile.latency, OnlineFitSettings(drift_threshold=planner.drift_threshold)
        )
        self._quiet_until = 0
        self._schedule: list[tuple[int, Profile]] = [(0, profile)]
        if state:
            self._fit.load_state_dict(state["samples"])
            if planner.refit == "plan":
                self._schedule += [
                    (begin, profile.with_latency(_models_from_json(models)))
                    for begin, models in state["schedule"]
                ]

    def profile_for(self, iteration: int) -> Profile:
        """What `iteration` is planned with: the profile, or its last correction that is due by
        then.
        """
        due = (profile for begin, profile in reversed(self._schedule) if begin <= iteration)
        return next(due, self._schedule[0][1])

    def observe(self, plan: IterationPlan, measured_ms: Sequence[float]) -> str | None:
        """Take in the measured time of every pipeline of `plan`; returns a warning now and then
        while it drifts.
        """
        planned_with = self.profile_for(plan.iteration).latency
        for pipeline, measured in zip(plan.pipelines, measured_ms, strict=True):
            if pipeline.scheme in planned_with and min(measured, pipeline.makespan_ms) > 0:
                self._fit.observe(
                    pipeline.scheme,
                    [
                        plan.micro_batch_lengths(micro_batch)
                        for micro_batch in pipeline.micro_batches
                    ],
                    predicted_ms=pipeline.makespan_ms,
                    measured_ms=measured,
                    model=planned_with[pipeline.scheme],
                )
        if (
            self._planner.refit == "plan"
            and (plan.iteration + 1) % self._planner.refit_interval == 0
        ):
            self._correct(plan.iteration)
        warning = self._fit.drift_warning() if plan.iteration >= self._quiet_until else None
        if warning is not None:
            self._quiet_until = plan.iteration + _QUIET_ITERATIONS
        return warning

    def _correct(self, iteration: int) -> None:
        begin = iteration + self._planner.lookahead
        self._schedule.append((begin, self.profiled.with_latency(self._fit.models())))
        # What is due before the next iteration is only needed in its last version.
        while len(self._schedule) > 1 and self._schedule[1][0] <= iteration + 1:
            del self._schedule[0]

    def state_dict(self) -> dict[str, Any]:
        """The samples and the corrections that plans still need, for a checkpoint."""
        return {
            "samples": self._fit.state_dict(),
            "schedule": [
                (begin, {str(scheme): asdict(model) for scheme, model in profile.latency.items()})
                for begin, profile in self._schedule
                if profile is not self.profiled
            ],
        }


def _models_from_json(models: Mapping[str, Mapping[str, float]]) -> dict[Scheme, LatencyModel]:
    return {Scheme.parse(text): LatencyModel(**m) for text, m in models.items()}
