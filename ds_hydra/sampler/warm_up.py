"""Compiles all of planner and proposal before the first plan."""

from __future__ import annotations

import numpy as np

from ds_hydra.sampler.cuts import cut_micro_batch
from ds_hydra.sampler.plan import GlobalBatch
from ds_hydra.sampler.planner.bounds import is_impossible, pipeline_bound_ms, strategy_bound_ms
from ds_hydra.sampler.planner.dispatch import dispatch_trials, fit_trials
from ds_hydra.sampler.planner.group_steps import plan_steps
from ds_hydra.sampler.planner.iteration import plan_iteration
from ds_hydra.sampler.planner.menus import GroupMenu, MenuEntry
from ds_hydra.sampler.planner.planner_settings import PlannerSettings
from ds_hydra.sampler.planner.problem import PipelineKind, make_problem
from ds_hydra.sampler.planner.refine import (
    improve_dispatch,
    iteration_ms,
    order_micro_batches,
    pack_pipelines,
    perturb_and_refine,
    pipeline_cost,
    refine_pipelines,
)
from ds_hydra.sampler.sample_bench import FastEstimator
from ds_hydra.strategy.cost_models.costs import World
from ds_hydra.strategy.profiles.profile import NO_LINKS, LatencyModel, load_profile
from ds_hydra.strategy.proposal.histogram import LengthHistogram
from ds_hydra.strategy.proposal.program import ProposalSettings, relaxed_strategies
from ds_hydra.strategy.schemes.scheme import Scheme, Strategy


def warm_up() -> None:
    """Loads (the first time ever: compiles) the compiled code, so that the first plan takes no
    longer.
    """
    latency = LatencyModel(quadratic_ms=0.0, linear_ms=1.0, constant_ms=1.0)
    for is_exact in (True, False):
        kinds = [PipelineKind(1, 2, 20, latency), PipelineKind(1, 1, 9, latency)]
        problem = make_problem(np.arange(9, 0, -1), kinds, is_exact=is_exact)
        assignment, micro_batches = np.zeros(9, dtype=np.int64), np.zeros(9, dtype=np.int64)
        estimate = dispatch_trials(problem, 1, 0, assignment)
        bound = strategy_bound_ms(problem, estimate)
        is_impossible(problem, bound)
        fit_trials(problem, bound, estimate, 1, assignment)
        improve_dispatch(problem, assignment, bound, 1, 1)
        pipeline_ms = pack_pipelines(problem, assignment, micro_batches)
        refine_pipelines(problem, assignment, micro_batches, pipeline_ms, bound, 1, 1)
        perturb_and_refine(problem, assignment, micro_batches, pipeline_ms, bound, 1, 1, 1)
        order_micro_batches(problem, assignment, micro_batches, False)
        iteration_ms(problem, assignment, micro_batches, pipeline_ms, 0.0, 0.0, 1)
        members = np.flatnonzero(assignment == 0)
        costs = problem.sequence_ms[0, members]
        pipeline_bound_ms(problem.lengths[members], costs, pipeline_cost(problem, 0))
    cut_micro_batch(range(3), [9, 3, 3], 2)
    gathered = Scheme(1, 1, gather=True), Scheme(1, 1, sp=2, gather=True)
    menu = GroupMenu(tuple(MenuEntry(s, latency, 1.0, 9 * s.sp, NO_LINKS) for s in gathered))
    plan_steps([menu.groups_of_step(2)], problem.lengths, lambda slowest: float(slowest.sum()))
    _warm_up_proposal()


def _warm_up_proposal() -> None:
    """Run the functions that `propose` runs before it plans anything, and one plan as a whole."""
    profile = load_profile("a800_llama2_7b")
    lengths = np.array([100, 2000], dtype=np.int64)
    histogram = LengthHistogram(name="two", lengths_tokens=lengths, counts=lengths // 100)
    settings = ProposalSettings(tokens_per_iteration=4000)
    world = World.of(profile, None, 8, 2000)
    relaxed_strategies(world, histogram, settings)
    batch = GlobalBatch(iteration=0, sample_indices=(0,), lengths=(100,), num_label_tokens=99)
    strategies = (Strategy((Scheme(8, 1),)),)
    FastEstimator(strategies, world).estimates_ms(batch)
    plan_iteration(
        batch, strategies=strategies, profile=profile, num_devices=8, settings=PlannerSettings()
    )
