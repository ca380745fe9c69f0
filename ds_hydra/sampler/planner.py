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
from ds_hydra.sampler.plan import GlobalBatch, IterationPlan
from ds_hydra.sampler.planner_settings import DEFAULT_SETTINGS, PlannerSettings
from ds_hydra.sampler.schedule import FloatArray
from ds_hydra.strategy.profiles.profile import Profile
from ds_hydra.strategy.schemes.scheme import Strategy, check_one_phase


def plan_iteration(
    batch: GlobalBatch,
    *,
    strategies: Sequence[Strategy],
    profile: Profile,
    num_devices: int,
    settings: PlannerSettings = DEFAULT_SETTINGS,
) -> IterationPlan:
    """The fastest plan found for `batch` over all `strategies`; the first of equals.

    Fastest with `settings.link_times`, where given; `makespan_ms` of the plan is propagation alone.
    Strategies are planned in the order of their lower bounds until no other can win.
    `IterationPlan.lower_bound_ms` holds for the chosen strategy, whatever the dispatch and packing.

    Raises InfeasiblePlanError if a sequence fits on no pipeline of any strategy, HydraConfigError
    if a strategy needs more devices than there are or a scheme that was not profiled.
    """
    return plan_with_time(
        batch, strategies=strategies, profile=profile, num_devices=num_devices, settings=settings
    )[0]


def plan_with_time(
    batch: GlobalBatch,
    *,
    strategies: Sequence[Strategy],
    profile: Profile,
    num_devices: int,
    settings: PlannerSettings = DEFAULT_SETTINGS,
) -> tuple[IterationPlan, float]:
    """`plan_iteration`, and the time by which its strategy was chosen: with pull and push, in
    ms.
    """
    planner = BatchPlanner(batch, profile, num_devices, settings)
    return planner.plan(_check_strategies(strategies, num_devices))


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

    The times of `plan_with_time` with `settings.heuristic()`, without plans and their bounds, which
    take longer than such a plan.
    """
    planner = BatchPlanner(batch, profile, num_devices, settings.heuristic())
    return np.array([planner.time_ms(strategy) for strategy in strategies], dtype=np.float64)


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
