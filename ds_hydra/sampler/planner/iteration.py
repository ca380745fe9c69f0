"""The decision of one iteration: which strategy, which sequences on which pipeline, packed into
which micro-batches.

`plan_iteration` is a pure function: equal arguments give equal plans, on any machine and in any
process.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from ds_hydra.errors import HydraConfigError, InfeasiblePlanError
from ds_hydra.sampler.plan import GlobalBatch, IterationPlan, PipelinePlan
from ds_hydra.sampler.planner.menus import plan_phases
from ds_hydra.sampler.planner.phase_plan import PhasePlan, PlanningProblem
from ds_hydra.sampler.planner.planner_settings import (
    DEFAULT_SETTINGS,
    PlannerSettings,
    PlanningTask,
)
from ds_hydra.sampler.schedule import FloatArray, ends_ms, makespan_ms
from ds_hydra.strategy.profiles.learned import NO_CORRECTIONS, Corrections
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

    T of the profile is corrected by `corrections`.

    Fastest with `settings.link_times`, where given; `makespan_ms` of the plan is propagation alone.
    Strategies are planned in the order of their lower bounds until no other can win.
    `IterationPlan.lower_bound_ms` holds for the chosen strategy, whatever the dispatch and packing.

    Raises InfeasiblePlanError if a sequence fits on no pipeline of any strategy, HydraConfigError
    if a strategy needs more devices than there are or a scheme that was not profiled.
    """
    _check_strategies(strategies, num_devices)
    return plan_with_time(
        PlanningProblem(batch, profile, num_devices, settings, corrections), strategies
    )[0]


def plan_task(
    task: PlanningTask, batch: GlobalBatch, corrections: Corrections = NO_CORRECTIONS
) -> IterationPlan:
    """`plan_iteration` of `batch` with the settings of all iterations."""
    return plan_iteration(
        batch,
        strategies=task.strategies,
        profile=task.profile,
        num_devices=task.num_devices,
        settings=task.settings,
        corrections=corrections,
    )


def iteration_bound_ms(
    planning: PlanningProblem, strategy: Strategy, limit_ms: float = np.inf
) -> float:
    """Lower bound of an iteration with `strategy` by prices of time and tokens (`bounds.py`), pull
    and push counted, or `limit_ms` where it is above that. Infinite where a sequence does not fit.
    """
    if not planning.is_held(planning.longest(strategy)):
        return np.inf
    phase = PhasePlan.of(planning, strategy)
    # Needs no dispatch, and is enough for a strategy that cannot win
    if np.isfinite(limit_ms) and phase.is_beyond(limit_ms):
        return limit_ms
    planning.bounded[strategy] = phase.dispatch()
    return phase.least_ms


def plan_strategy(
    planning: PlanningProblem, strategy: Strategy, limit_ms: float = np.inf
) -> PhasePlan | None:
    """`strategy` for all sequences; None where one does not fit. Searches longer where that may
    take less than `limit_ms`, and knows when it is good enough where the bound was asked for.
    """
    # One whose bound was asked for is dispatched already: its search goes on from there
    phase = planning.bounded.get(strategy)
    if phase is None:
        if not planning.is_held(planning.longest(strategy)):
            return None
        phase = PhasePlan.of(planning, strategy).dispatch(is_bounded=False)
    return phase.search(limit_ms)


def plan_with_time(
    planning: PlanningProblem, strategies: Sequence[Strategy]
) -> tuple[IterationPlan, float]:
    """The best plan over `strategies` and their phases, and its time with pull and push."""
    # Nothing is proved of phases: they are planned first, quickly, and strategies have to beat them
    best = plan_phases(planning, strategies)
    phases, time_ms, is_proved = best.phases, best.time_ms, False
    # Those that are proved to be no faster have `time_ms` as their bound, and end the loop
    bounds_ms = {s: iteration_bound_ms(planning, s, time_ms) for s in strategies}
    for strategy in sorted(bounds_ms, key=bounds_ms.__getitem__):
        if bounds_ms[strategy] >= time_ms:
            break
        phase = plan_strategy(planning, strategy, time_ms)
        # Of equals the one whose bound says how good it is
        if phase and (phase.iteration_ms, is_proved) < (time_ms, True):
            phases, time_ms, is_proved = [phase], phase.iteration_ms, True
    if not phases:
        raise _no_plan(planning, strategies)
    # A solver's time limit is for one strategy; phases would take it once each.
    if len(phases) == 1:
        phases[0].solve_slowest()
    return _finish(planning, phases), sum(phase.iteration_ms for phase in phases)


def _finish(planning: PlanningProblem, phases: Sequence[PhasePlan]) -> IterationPlan:
    batch = planning.batch
    found = [phase.pipelines() for phase in phases]
    # In lockstep pipelines wait for each other, which is in no time of a single one
    makespan = sum(
        max(pipeline.makespan_ms for pipeline in pipelines) + phase.wait_ms
        for phase, pipelines in zip(phases, found)
    )
    return IterationPlan(
        iteration=batch.iteration,
        num_devices=planning.num_devices,
        strategy=Strategy.of_phases([phase.strategy for phase in phases]),
        sample_indices=batch.sample_indices,
        lengths=batch.lengths,
        num_label_tokens=batch.num_label_tokens,
        pipelines=tuple(pipeline for pipelines in found for pipeline in pipelines),
        makespan_ms=makespan,
        lower_bound_ms=min(makespan, sum(phase.least_propagation_ms for phase in phases)),
    )


def _no_plan(planning: PlanningProblem, strategies: Iterable[Strategy]) -> InfeasiblePlanError:
    largest = max(planning.longest(strategy) for strategy in strategies)
    # Sorted by length: where any sequence has no place the first one has none
    position = int(planning.order[0])
    advice = (
        f"lower hydra.context_length to {largest} or less, or "
        if largest > 0
        else f"states and slices alone fill the memory of {planning.num_devices} devices; take more of them, "
    )
    return InfeasiblePlanError(
        f"iteration {planning.batch.iteration}: sequence {position} has {planning.lengths[0]} tokens, the "
        f"largest MaxLen over all candidate strategies is {largest}; {advice}raise "
        "hydra.memory_limit_bytes or add a strategy with higher TP to hydra.strategies"
    )


def times_alone(planning: PlanningProblem, strategies: Sequence[Strategy]) -> FloatArray:
    """Milliseconds of a global batch under each of `strategies` with pull and push: [strategy]; inf
    where a sequence does not fit.

    The times of `plan_with_time`, without plans and their bounds, which take longer than a
    heuristic plan.
    """
    plans = [plan_strategy(planning, strategy) for strategy in strategies]
    return np.array([plan.iteration_ms if plan else np.inf for plan in plans], dtype=np.float64)


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
            None if profile.entry_of(pipeline.scheme) is None else end
            for pipeline, end in zip(phase.pipelines, ends.tolist())
        ]
    return found


def _profiled_ms(
    pipeline: PipelinePlan, plan: IterationPlan, profile: Profile, settings: PlannerSettings
) -> float:
    """Milliseconds of the pipeline by the profile alone. An unknown scheme keeps its planned time:
    others share cores with it.
    """
    if profile.entry_of(pipeline.scheme) is None:
        return pipeline.makespan_ms
    latency = profile.get_latency(pipeline.scheme)
    times = [latency.micro_batch_ms(plan.micro_batch_lengths(m)) for m in pipeline.micro_batches]
    # Traffic 0: `micro_batch_ms` has its floor already
    return makespan_ms(
        np.array(times, dtype=np.float64),
        pipeline.scheme.pp,
        settings.forward_fraction,
        settings.objective == "exact",
        0.0,
    )


def _check_strategies(strategies: Sequence[Strategy], num_devices: int) -> None:
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
