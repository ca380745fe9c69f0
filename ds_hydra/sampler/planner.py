"""The decision of one iteration: which strategy, which sequences on which pipeline, packed into
which micro-batches.

`plan_iteration` is a pure function: equal arguments give equal plans, on any machine and in any
process.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ds_hydra.errors import HydraConfigError
from ds_hydra.sampler.batch_planner import BatchPlanner
from ds_hydra.sampler.plan import GlobalBatch, IterationPlan, PipelinePlan
from ds_hydra.sampler.planner_settings import DEFAULT_SETTINGS, PlannerSettings
from ds_hydra.sampler.schedule import FloatArray, ends_ms, makespan_ms
from ds_hydra.strategy.profiles.corrections import NO_CORRECTIONS, Corrections
from ds_hydra.strategy.profiles.profile import Profile
from ds_hydra.strategy.schemes.scheme import Strategy, check_one_phase


def plan_iteration(
    batch: GlobalBatch,
    *,
    strategies: Sequence[Strategy],
    profile: Profile,
    num_devices: int,
    settings: PlannerSettings = DEFAULT_SETTINGS,
    corrections: Corrections = NO_CORRECTIONS,
) -> IterationPlan:
    """The fastest plan found for `batch` over all `strategies`; the first of equals.

    T of the profile is corrected by `corrections`, which may also allow a strategy to be tried that
    is not the best as far as is known (`IterationPlan.trial_ms`).

    Fastest with `settings.link_times`, where given; `makespan_ms` of the plan is propagation alone.
    Strategies are planned in the order of their lower bounds until no other can win.
    `IterationPlan.lower_bound_ms` holds for the chosen strategy, whatever the dispatch and packing.

    Raises InfeasiblePlanError if a sequence fits on no pipeline of any strategy, HydraConfigError
    if a strategy needs more devices than there are or a scheme that was not profiled.
    """
    planner = BatchPlanner(batch, profile, num_devices, settings, corrections)
    return planner.plan(_check_strategies(strategies, num_devices))[0]


def heuristic_times(
    batch: GlobalBatch,
    *,
    strategies: Sequence[Strategy],
    profile: Profile,
    num_devices: int,
    settings: PlannerSettings = DEFAULT_SETTINGS,
) -> FloatArray:
    """What `batch` takes under each of `strategies` by a heuristic plan, with pull and push:
    [strategy], ms; inf where a sequence does not fit.

    The times of `BatchPlanner.plan` with `settings.heuristic()`, without plans and their bounds,
    which take longer than such a plan.
    """
    planner = BatchPlanner(batch, profile, num_devices, settings.heuristic())
    return np.array([planner.time_ms(strategy) for strategy in strategies], dtype=np.float64)


def profiled_times(
    plan: IterationPlan, profile: Profile, settings: PlannerSettings = DEFAULT_SETTINGS
) -> list[float | None]:
    """Time of each pipeline of `plan` by T of `profile`, in ms, whatever the plan was made with;
    None for a scheme that the profile has not.
    """
    found: list[float | None] = []
    for phase in plan.in_turn:
        times = [_profiled_ms(pipeline, plan, profile, settings) for pipeline in phase.pipelines]
        num_ranks = [pipeline.scheme.num_devices for pipeline in phase.pipelines]
        ends = ends_ms(np.array(times), num_ranks, plan.num_devices, profile.ranks_per_core)
        found += [
            end if pipeline.scheme in profile.latency else None
            for pipeline, end in zip(phase.pipelines, ends.tolist())
        ]
    return found


def _profiled_ms(
    pipeline: PipelinePlan, plan: IterationPlan, profile: Profile, settings: PlannerSettings
) -> float:
    """Of an unknown scheme as planned: others share cores with it."""
    if pipeline.scheme not in profile.latency:
        return pipeline.makespan_ms
    latency = profile.latency[pipeline.scheme]
    times = [latency.micro_batch_ms(plan.micro_batch_lengths(m)) for m in pipeline.micro_batches]
    return makespan_ms(
        np.array(times, dtype=np.float64),
        pipeline.scheme.pp,
        settings.forward_fraction,
        settings.objective == "exact",
    )


def bound_iterations(
    batch: GlobalBatch,
    *,
    strategies: Sequence[Strategy],
    profile: Profile,
    num_devices: int,
    settings: PlannerSettings = DEFAULT_SETTINGS,
) -> FloatArray:
    """What no plan of `batch` under each of `strategies` can beat: [propagation, with pull and
    push][strategy], ms.

    Infinite where a sequence does not fit.
    """
    planner = BatchPlanner(batch, profile, num_devices, settings)
    return np.array([planner.least_ms(strategy) for strategy in strategies], dtype=np.float64).T


def _check_strategies(strategies: Sequence[Strategy], num_devices: int) -> Sequence[Strategy]:
    if not strategies:
        raise HydraConfigError(
            "there is no candidate strategy; set hydra.strategies, e.g. ['1x<1,1>']"
        )
    for strategy in strategies:
        check_one_phase(strategy)
        if strategy.num_devices > num_devices:
            raise HydraConfigError(
                f"strategy {strategy} needs {strategy.num_devices} ranks, there are {num_devices}; "
                f"remove it from hydra.strategies or start {strategy.num_devices} ranks"
            )
    return strategies
