"""How packed pipelines are evened out: sequences change places between the slowest pipeline and
fast ones.

Dispatch values a pipeline by an estimate; here micro-batches are packed, so times are true, and an
exchange stays only if both pipelines, packed again, end before the slowest one did.
"""

from __future__ import annotations

import numpy as np

from ds_hydra.sampler.dispatch.estimates import count_loads, estimate_after_ms, recount
from ds_hydra.sampler.dispatch.exchange import apply_exchange, choose_targets, find_exchanges
from ds_hydra.sampler.packing.packing import SearchBudget, pack_micro_batches
from ds_hydra.sampler.packing.packing_bounds import PipelineCost
from ds_hydra.sampler.problem import EPSILON, DispatchProblem, shuffled_order
from ds_hydra.sampler.schedule import (
    FloatArray,
    IntArray,
    MicroBatchBalance,
    linked_ms,
    one_f_one_b_ms,
)
from ds_hydra.strategy.compiled import compiled

_NUM_EXCHANGES = 8
_FIRST_BUDGET = SearchBudget(2, 100, 0)
_EXCHANGE_BUDGET = SearchBudget(3, 600, 0)
_SLOWEST_BUDGET = SearchBudget(8, 4000, 4)


@compiled
def pipeline_cost(problem: DispatchProblem, kind: int) -> PipelineCost:
    """What packing has to know about pipelines of `kind`."""
    return PipelineCost(
        problem.num_stages[kind],
        problem.constant_ms[kind],
        problem.traffic_ms[kind],
        problem.max_len_tokens[kind],
        problem.forward_fraction,
        problem.is_exact,
        MicroBatchBalance(problem.ratio[kind], problem.share[kind]),
    )


@compiled
def _pack_pipeline(
    problem: DispatchProblem,
    assignment: IntArray,
    pipeline: int,
    budget: SearchBudget,
    micro_batches: IntArray,
) -> float:
    """Packs the sequences of `pipeline`, writes their `micro_batches`, returns the time of the
    pipeline.
    """
    members = np.flatnonzero(assignment == pipeline)
    kind = problem.kind_of[pipeline]
    packed = np.zeros(members.size, dtype=np.int64)
    cost = pipeline_cost(problem, kind)
    time = pack_micro_batches(
        problem.lengths[members], problem.sequence_ms[kind][members], cost, budget, packed
    )
    micro_batches[members] = packed
    return time


@compiled
def pack_pipelines(
    problem: DispatchProblem, assignment: IntArray, micro_batches: IntArray
) -> FloatArray:
    """Packs all pipelines quickly; writes `micro_batches`, returns the time of each pipeline."""
    pipeline_ms = np.zeros(problem.kind_of.size)
    for pipeline in range(pipeline_ms.size):
        pipeline_ms[pipeline] = _pack_pipeline(
            problem, assignment, pipeline, _FIRST_BUDGET, micro_batches
        )
    return pipeline_ms


@compiled
def order_micro_batches(
    problem: DispatchProblem, assignment: IntArray, micro_batches: IntArray
) -> None:
    """Lets pipelines of one stage run their longest micro-batch last and the second longest first;
    changes `micro_batches`.

    Their time is the same in any order, but a pull hides behind the first forward and a push, which
    has more bytes, behind the last backward.
    """
    for pipeline in range(problem.kind_of.size):
        members = np.flatnonzero(assignment == pipeline)
        if members.size > 0 and problem.num_stages[problem.kind_of[pipeline]] == 1:
            by_time = np.argsort(
                -_micro_batch_times_ms(problem, members, pipeline, micro_batches), kind="mergesort"
            )
            place = np.empty(by_time.size, dtype=np.int64)
            place[by_time] = (np.arange(by_time.size) - 1) % by_time.size
            micro_batches[members] = place[micro_batches[members]]


@compiled
def iteration_ms(
    problem: DispatchProblem,
    assignment: IntArray,
    micro_batches: IntArray,
    pipeline_ms: FloatArray,
    pull_ms: float,
    push_ms: float,
    num_buckets: int,
) -> float:
    """Time of the slowest pipeline with its pull and push: `pipeline_ms` and what they add to the
    1F1B recurrence.

    `num_buckets` layers of the model are pulled and pushed one by one beside propagation; 0: not
    beside it.
    """
    if pull_ms + push_ms == 0.0:
        return float(pipeline_ms.max())
    slowest = pull_ms + push_ms
    for pipeline in range(pipeline_ms.size):
        members = np.flatnonzero(assignment == pipeline)
        if members.size > 0:
            times = _micro_batch_times_ms(problem, members, pipeline, micro_batches)
            num_stages = problem.num_stages[problem.kind_of[pipeline]]
            buckets = 0 if num_buckets == 0 else max(1, num_buckets // num_stages)
            alone = one_f_one_b_ms(times, num_stages, problem.forward_fraction)
            linked = linked_ms(
                times, num_stages, problem.forward_fraction, pull_ms, push_ms, buckets
            )
            slowest = max(slowest, pipeline_ms[pipeline] + linked - alone)
    return slowest


@compiled
def _micro_batch_times_ms(
    problem: DispatchProblem, members: IntArray, pipeline: int, micro_batches: IntArray
) -> FloatArray:
    """T of every micro-batch of `pipeline`, which holds the sequences `members`, one at least."""
    kind = problem.kind_of[pipeline]
    times = np.full(micro_batches[members].max() + 1, problem.constant_ms[kind])
    for i in members:
        times[micro_batches[i]] += problem.sequence_ms[kind, i]
    times[:] = np.maximum(times, problem.traffic_ms[kind])
    return times


@compiled
def refine_pipelines(
    problem: DispatchProblem,
    assignment: IntArray,
    micro_batches: IntArray,
    pipeline_ms: FloatArray,
    enough_ms: float,
    max_steps: int,
    num_targets: int,
) -> float:
    """Exchanges sequences until the iteration gets no shorter, or lasts `enough_ms` at most.

    Changes `assignment`, `micro_batches` and `pipeline_ms`; returns the time of the slowest
    pipeline.
    """
    loads = count_loads(problem, assignment)
    is_searched = np.zeros(pipeline_ms.size, dtype=np.bool_)
    found_ms, found = np.zeros(_NUM_EXCHANGES), np.zeros((_NUM_EXCHANGES, 3), dtype=np.int64)
    # What packing made of a pipeline beyond its estimate: most of it stays when a sequence changes,
    # so estimate + bias tells better which exchange is worth packing.
    bias = np.zeros(pipeline_ms.size)
    for pipeline in range(pipeline_ms.size):
        bias[pipeline] = pipeline_ms[pipeline] - estimate_after_ms(problem, loads, pipeline, -1)
    for _ in range(max_steps):
        slowest = int(np.argmax(pipeline_ms))
        if pipeline_ms[slowest] <= enough_ms:
            break
        if not is_searched[slowest]:
            is_searched[slowest] = True
            old_micro_batches = micro_batches.copy()
            time = _pack_pipeline(problem, assignment, slowest, _SLOWEST_BUDGET, micro_batches)
            if time < pipeline_ms[slowest]:
                bias[slowest] += time - pipeline_ms[slowest]
                pipeline_ms[slowest] = time
                continue
            micro_batches[:] = old_micro_batches
        is_target = choose_targets(problem, pipeline_ms, slowest, num_targets)
        num_found = find_exchanges(
            problem, assignment, loads, pipeline_ms, bias, slowest, is_target, found_ms, found
        )
        partner = _try_exchanges(
            problem, assignment, micro_batches, pipeline_ms, slowest, found[:num_found]
        )
        if partner < 0:
            break
        recount(problem, assignment, loads, slowest, partner)
        for pipeline in (slowest, partner):
            bias[pipeline] = pipeline_ms[pipeline] - estimate_after_ms(problem, loads, pipeline, -1)
            is_searched[pipeline] = False
    return float(pipeline_ms.max())


@compiled
def perturb_and_refine(
    problem: DispatchProblem,
    assignment: IntArray,
    micro_batches: IntArray,
    pipeline_ms: FloatArray,
    enough_ms: float,
    max_steps: int,
    num_targets: int,
    num_perturbations: int,
) -> float:
    """Leaves a local optimum: moves a few sequences off the slowest pipeline, refines, keeps what
    is better.

    Changes `assignment`, `micro_batches` and `pipeline_ms`; returns the time of the slowest
    pipeline.
    """
    for seed in range(num_perturbations):
        best = pipeline_ms.max()
        if best <= enough_ms:
            break
        new_assignment, new_micro_batches = assignment.copy(), micro_batches.copy()
        _perturb(problem, new_assignment, int(np.argmax(pipeline_ms)), seed)
        new_ms = pack_pipelines(problem, new_assignment, new_micro_batches)
        time = refine_pipelines(
            problem, new_assignment, new_micro_batches, new_ms, enough_ms, max_steps, num_targets
        )
        if time < best * (1 - EPSILON):
            assignment[:] = new_assignment
            micro_batches[:] = new_micro_batches
            pipeline_ms[:] = new_ms
    return float(pipeline_ms.max())


@compiled
def _perturb(problem: DispatchProblem, assignment: IntArray, slowest: int, seed: int) -> None:
    """Moves one to three sequences of `slowest`, chosen by `seed`, to any pipelines that can hold
    them.
    """
    members = np.flatnonzero(assignment == slowest)
    order = shuffled_order(np.ones(members.size, dtype=np.int64), 1.0, seed)
    targets = shuffled_order(np.ones(assignment.max() + 1, dtype=np.int64), 1.0, seed + 1)
    num_perturbed = min(1 + seed % 3, members.size, targets.size)
    for k in range(num_perturbed):
        i, target = members[order[k]], targets[k]
        if problem.lengths[i] <= problem.max_len_tokens[problem.kind_of[target]]:
            assignment[i] = target


@compiled
def _try_exchanges(
    problem: DispatchProblem,
    assignment: IntArray,
    micro_batches: IntArray,
    pipeline_ms: FloatArray,
    slowest: int,
    exchanges: IntArray,
) -> int:
    """Carries out the first of `exchanges` that helps once packed; returns its partner, -1 if none
    does.
    """
    old_assignment, old_micro_batches = assignment.copy(), micro_batches.copy()
    for number in range(exchanges.shape[0]):
        partner = int(exchanges[number, 2])
        apply_exchange(assignment, slowest, exchanges[number])
        here = _pack_pipeline(problem, assignment, slowest, _EXCHANGE_BUDGET, micro_batches)
        # The partner is packed only where this side gains: packing is what takes long.
        if here < pipeline_ms[slowest] * (1 - EPSILON):
            there = _pack_pipeline(problem, assignment, partner, _EXCHANGE_BUDGET, micro_batches)
            if there < pipeline_ms[slowest] * (1 - EPSILON):
                pipeline_ms[slowest], pipeline_ms[partner] = here, there
                return partner
        assignment[:] = old_assignment
        micro_batches[:] = old_micro_batches
    return -1
