"""Refinement of a dispatch: sequences change places between the slowest pipeline and fast ones.

Before packing a pipeline is valued by an estimate, and exchanges go on while estimates fall. Then
micro-batches are packed, so times are true, and an exchange stays only if both pipelines, packed
again, end before the slowest one did.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from ds_hydra.sampler.planner.bounds import PipelineCost
from ds_hydra.sampler.planner.packing import (
    SearchBudget,
    micro_batch_times_ms,
    pack_micro_batches,
)
from ds_hydra.sampler.planner.problem import EPSILON, DispatchProblem, shuffled_order
from ds_hydra.sampler.schedule import (
    MAX_BALANCED_MICRO_BATCHES,
    FloatArray,
    IntArray,
    MicroBatchBalance,
    linked_ms,
    one_f_one_b_ms,
)
from ds_hydra.strategy.compiled import compiled


class Loads(NamedTuple):
    """Contents of each pipeline: sums, and its two longest sequences (indices, -1 for none)."""

    load_ms: FloatArray
    tokens: IntArray
    first: IntArray
    second: IntArray


@compiled
def estimate_ms(
    load_ms: float,
    tokens: int,
    longest_ms: float,
    kind: int,
    num_stages: int,
    constant: float,
    traffic: float,
    max_len: int,
    ratio: FloatArray,
    is_exact: bool,
    is_eq2: bool,
) -> float:
    """Time of a pipeline of `kind` with sequences of `tokens` and `load_ms` in all, `longest_ms`
    the longest of them.

    The number of micro-batches is the best of those around sqrt((PP-1) load / c), where the closed
    form has its minimum, and not below tokens / MaxLen. Around a micro-batch that is much longer
    than the others about half of the others' time is hidden (at most 1 - min(phi, 1-phi), see
    `packing.micro_batch_count_bound_ms`).

    What follows `kind` is that of the `DispatchProblem`, one by one: counting references to its
    arrays takes ten times as long as the sums here.
    """
    if is_eq2:
        return float(load_ms + longest_ms * (num_stages - 1))
    min_micro_batches = -(-tokens // max_len)
    # Without a pipeline to fill the fewest micro-batches are best: each costs its constant, and by
    # the closed form as long as the longest sequence.
    if num_stages == 1 and is_exact:
        return float(max(load_ms + constant * min_micro_batches, traffic * min_micro_batches))
    centre = MAX_BALANCED_MICRO_BATCHES if num_stages > 1 else 0
    # Compared squared, so that a constant of 0 divides nothing.
    if constant * centre * centre > (num_stages - 1) * load_ms:
        centre = int(np.sqrt((num_stages - 1) * load_ms / constant))
    # Four counts: the closed form is flat around its minimum, and this runs for every trial move.
    best = np.inf
    for num_micro_batches in range(
        max(min_micro_batches, centre - 2, 1), max(min_micro_batches, centre + 1) + 1
    ):
        if is_exact:
            work = load_ms + num_micro_batches * constant
            micro_batch_ratio = (
                1.0
                if num_micro_batches > MAX_BALANCED_MICRO_BATCHES
                else ratio[kind, num_micro_batches]
            )
            # The longest micro-batch passes all stages and hides half of the others' work.
            around_longest = (num_stages - 0.5) * (longest_ms + constant) + 0.5 * work
            value = max(work * micro_batch_ratio, around_longest)
        else:
            value = (max(longest_ms, load_ms / num_micro_batches) + constant) * (
                num_stages - 1 + num_micro_batches
            )
        best = min(best, max(value, traffic * (num_stages - 1 + num_micro_batches)))
    return float(best)


@compiled
def count_loads(problem: DispatchProblem, assignment: IntArray) -> Loads:
    """Count the loads of each pipeline under `assignment`."""
    num_pipelines = problem.kind_of.size
    loads = Loads(
        np.zeros(num_pipelines),
        np.zeros(num_pipelines, dtype=np.int64),
        np.full(num_pipelines, -1),
        np.full(num_pipelines, -1),
    )
    for pipeline in range(num_pipelines):
        recount(problem, assignment, loads, pipeline, pipeline)
    return loads


@compiled
def recount(problem: DispatchProblem, assignment: IntArray, loads: Loads, a: int, b: int) -> None:
    """Counts the loads of pipelines `a` and `b` again, from scratch, so that rounding does not add
    up.
    """
    for pipeline in (a, b):
        loads.load_ms[pipeline] = 0.0
        loads.tokens[pipeline] = 0
        loads.first[pipeline] = -1
        loads.second[pipeline] = -1
    for i in range(assignment.size):
        pipeline = assignment[i]
        if pipeline in (a, b):
            loads.load_ms[pipeline] += problem.sequence_ms[problem.kind_of[pipeline], i]
            loads.tokens[pipeline] += problem.lengths[i]
            # Lengths descend: the first two that are met are the longest.
            if loads.first[pipeline] < 0:
                loads.first[pipeline] = i
            elif loads.second[pipeline] < 0:
                loads.second[pipeline] = i


@compiled
def estimate_after_ms(problem: DispatchProblem, loads: Loads, pipeline: int, removed: int) -> float:
    """Time of `pipeline` by estimate once sequence `removed` (-1: none) has left."""
    kind = problem.kind_of[pipeline]
    load, tokens, longest = loads.load_ms[pipeline], loads.tokens[pipeline], loads.first[pipeline]
    if removed >= 0:
        load -= problem.sequence_ms[kind, removed]
        tokens -= problem.lengths[removed]
        if removed == longest:
            longest = loads.second[pipeline]
    if longest < 0:
        return 0.0
    return estimate_ms(
        load, tokens, problem.sequence_ms[kind, longest], kind, problem.num_stages[kind], problem.constant_ms[kind],
        problem.traffic_ms[kind], problem.max_len_tokens[kind], problem.ratio, problem.is_exact, problem.is_eq2,
    )  # fmt: skip


@compiled
def choose_targets(
    problem: DispatchProblem, value_ms: FloatArray, slowest: int, limit: int
) -> FloatArray:
    """1.0 for pipelines worth exchanging with: the `limit` fastest, and the fastest of each
    kind.
    """
    num_pipelines = value_ms.size
    is_target = np.zeros(num_pipelines)
    # A stable sort: equal times in the order of pipelines, the same plan on every machine.
    by_value = np.argsort(value_ms, kind="mergesort")
    has_kind = np.zeros(problem.num_stages.size)
    for rank in range(num_pipelines):
        pipeline = by_value[rank]
        kind = problem.kind_of[pipeline]
        if pipeline != slowest and (rank < limit or has_kind[kind] < 2):
            is_target[pipeline] = 1.0
            has_kind[kind] += 1
    return is_target


@compiled
def find_exchanges(
    problem: DispatchProblem,
    assignment: IntArray,
    loads: Loads,
    value_ms: FloatArray,
    bias_ms: FloatArray,
    slowest: int,
    is_target: FloatArray,
    found_ms: FloatArray,
    found: IntArray,
) -> int:
    """Moves (i, -1) and swaps (i, j) that by estimate make `slowest` and its partner both end
    earlier.

    `bias_ms` is what the estimate of each pipeline has to be corrected by. Writes up to
    `found.shape[0]` rows (i, j, pipeline) and the time of the slower of both pipelines, best first;
    returns how many.
    """
    # Both must end before the slowest does now, by more than rounding, or exchanges go in circles.
    limit = value_ms[slowest] * (1 - EPSILON)
    max_found = found_ms.size
    # A list that begins full of the limit needs no other test for exchanges that do not help.
    found_ms[:] = limit
    num_found = 0
    lengths, sequence_ms, num_stages = problem.lengths, problem.sequence_ms, problem.num_stages
    constant, traffic, max_len = problem.constant_ms, problem.traffic_ms, problem.max_len_tokens
    ratio, is_exact, is_eq2 = problem.ratio, problem.is_exact, problem.is_eq2
    kind_of = problem.kind_of
    load_ms, tokens, first, second = loads.load_ms, loads.tokens, loads.first, loads.second
    slow_kind = kind_of[slowest]
    previous_length = -1
    for i in range(assignment.size):
        # Of sequences of one length one is tried: the others give the same times.
        if assignment[i] != slowest or lengths[i] == previous_length:
            continue
        previous_length = lengths[i]
        alone_ms = estimate_after_ms(problem, loads, slowest, i) + bias_ms[slowest]
        left_ms = load_ms[slowest] - sequence_ms[slow_kind, i]
        left_tokens = tokens[slowest] - lengths[i]
        left_first = second[slowest] if first[slowest] == i else first[slowest]
        # First partners j to swap with, all of them shorter, then pipelines to move to alone.
        for other in range(i + 1, assignment.size + is_target.size):
            j = other if other < assignment.size else -1
            target = assignment[j] if j >= 0 else other - assignment.size
            if is_target[target] == 0.0:
                continue
            kind = kind_of[target]
            if lengths[i] > max_len[kind]:
                continue
            new_ms, new_tokens, longest = load_ms[target], tokens[target], first[target]
            here_ms = alone_ms
            if j >= 0:
                if lengths[j] > max_len[slow_kind]:
                    continue
                here_ms = bias_ms[slowest] + estimate_ms(
                    left_ms + sequence_ms[slow_kind, j], left_tokens + lengths[j],
                    sequence_ms[slow_kind, j if left_first < 0 else min(left_first, j)],
                    slow_kind, num_stages[slow_kind], constant[slow_kind], traffic[slow_kind], max_len[slow_kind],
                    ratio, is_exact, is_eq2,
                )  # fmt: skip
                new_ms -= sequence_ms[kind, j]
                new_tokens -= lengths[j]
                longest = second[target] if longest == j else longest
            # The other side costs as much again: most candidates end here.
            if here_ms >= found_ms[max_found - 1]:
                continue
            there_ms = bias_ms[target] + estimate_ms(
                new_ms + sequence_ms[kind, i], new_tokens + lengths[i],
                sequence_ms[kind, i if longest < 0 else min(longest, i)],
                kind, num_stages[kind], constant[kind], traffic[kind], max_len[kind], ratio, is_exact, is_eq2,
            )  # fmt: skip
            worse_ms = max(here_ms, there_ms)
            if worse_ms >= found_ms[max_found - 1]:
                continue
            # Insertion into a short sorted list, which a heap would not beat.
            place = max_found - 1
            while place > 0 and found_ms[place - 1] > worse_ms:
                found_ms[place] = found_ms[place - 1]
                found[place] = found[place - 1]
                place -= 1
            found_ms[place] = worse_ms
            found[place, 0], found[place, 1], found[place, 2] = i, j, target
            num_found = min(num_found + 1, max_found)
    return num_found


@compiled
def apply_exchange(assignment: IntArray, slowest: int, exchange: IntArray) -> None:
    """Moves sequence `exchange[0]` to pipeline `exchange[2]`, and `exchange[1]`, if any, back."""
    assignment[exchange[0]] = exchange[2]
    if exchange[1] >= 0:
        assignment[exchange[1]] = slowest


@compiled
def improve_dispatch(
    problem: DispatchProblem,
    assignment: IntArray,
    enough_ms: float,
    max_steps: int,
    num_targets: int,
) -> float:
    """Exchanges sequences of the slowest pipeline, by estimate, until none helps; returns its
    time.
    """
    loads = count_loads(problem, assignment)
    num_pipelines = problem.kind_of.size
    value = np.zeros(num_pipelines)
    for pipeline in range(num_pipelines):
        value[pipeline] = estimate_after_ms(problem, loads, pipeline, -1)
    # Nothing is packed yet, so estimates stand for themselves: no bias, and the best one is taken.
    bias = np.zeros(num_pipelines)
    found_ms, found = np.zeros(1), np.zeros((1, 3), dtype=np.int64)
    for _ in range(max_steps):
        slowest = int(np.argmax(value))
        if value[slowest] <= enough_ms:
            break
        is_target = choose_targets(problem, value, slowest, num_targets)
        num_found = find_exchanges(
            problem, assignment, loads, value, bias, slowest, is_target, found_ms, found
        )
        if num_found == 0:
            break
        apply_exchange(assignment, slowest, found[0])
        partner = int(found[0, 2])
        recount(problem, assignment, loads, slowest, partner)
        for pipeline in (slowest, partner):
            value[pipeline] = estimate_after_ms(problem, loads, pipeline, -1)
    return float(value.max())


_NUM_EXCHANGES = 8
_FIRST_BUDGET = SearchBudget(2, 100, 0)
_EXCHANGE_BUDGET = SearchBudget(3, 600, 0)
_SLOWEST_BUDGET = SearchBudget(8, 4000, 4)


@compiled
def pipeline_cost(problem: DispatchProblem, kind: int) -> PipelineCost:
    """Costs of pipelines of `kind` for packing."""
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
    problem: DispatchProblem, assignment: IntArray, micro_batches: IntArray, is_lockstep: bool
) -> None:
    """Lets pipelines of one stage run their longest micro-batch last and the second longest first;
    in lockstep the longest first, so that long ones of all pipelines are one step. Changes
    `micro_batches`.

    Their time is the same in any order, but a pull hides behind the first forward and a push, which
    has more bytes, behind the last backward.
    """
    for pipeline in range(problem.kind_of.size):
        members = np.flatnonzero(assignment == pipeline)
        kind = problem.kind_of[pipeline]
        if members.size > 0 and problem.num_stages[kind] == 1:
            times = _computed_ms(problem, members, pipeline, micro_batches)
            times = np.maximum(times, problem.traffic_ms[kind])
            by_time = np.argsort(-times, kind="mergesort")
            # Longest -> last place (-1), second longest -> place 0, the others between them.
            first = 0 if is_lockstep else -1
            place = np.empty(by_time.size, dtype=np.int64)
            place[by_time] = (np.arange(by_time.size) + first) % by_time.size
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
    """Time of the slowest pipeline with its pull and push: `pipeline_ms` and their part beyond the
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
            times = _computed_ms(problem, members, pipeline, micro_batches)
            first_ms = times[0]
            times = np.maximum(times, problem.traffic_ms[problem.kind_of[pipeline]])
            num_stages = problem.num_stages[problem.kind_of[pipeline]]
            buckets = 0 if num_buckets == 0 else max(1, num_buckets // num_stages)
            alone = one_f_one_b_ms(times, num_stages, problem.forward_fraction)
            linked = linked_ms(
                times, num_stages, problem.forward_fraction, pull_ms, push_ms, buckets, first_ms
            )
            # The difference of two recurrences: `pipeline_ms` may be by the closed form.
            slowest = max(slowest, pipeline_ms[pipeline] + linked - alone)
    return slowest


@compiled
def _computed_ms(
    problem: DispatchProblem, members: IntArray, pipeline: int, micro_batches: IntArray
) -> FloatArray:
    """Milliseconds of computation of every micro-batch of `pipeline`, which holds the sequences
    `members`, one at least.
    """
    kind = problem.kind_of[pipeline]
    return micro_batch_times_ms(
        problem.sequence_ms[kind][members], micro_batches[members], problem.constant_ms[kind]
    )


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
        # Packed well before it is taken apart: what a quick packing lost is no reason to exchange.
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
    """Leaves a local optimum: moves a few sequences off the slowest pipeline, refines, keeps the
    better plan.

    Changes `assignment`, `micro_batches` and `pipeline_ms`; returns the time of the slowest
    pipeline.
    """
    for seed in range(num_perturbations):
        best = pipeline_ms.max()
        if best <= enough_ms:
            break
        # Each seed starts from the best plan so far, not from what the seed before has led to.
        new_assignment, new_micro_batches = assignment.copy(), micro_batches.copy()
        _perturb(problem, new_assignment, int(np.argmax(pipeline_ms)), seed)
        # On copies, all pipelines anew: most perturbations lead to nothing better.
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
        # Taken back whole: packing has renumbered the micro-batches of both.
        assignment[:] = old_assignment
        micro_batches[:] = old_micro_batches
    return -1
