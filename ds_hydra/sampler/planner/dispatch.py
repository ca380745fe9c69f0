"""Dispatch of sequences to pipelines: Alg. 1 (greedy, many trials), refinement, and the exact
(0,1)-integer program of Eq. (3), which is the reference and `dispatch: ideal`.

Sequences are sorted by descending length, so those that fit on few pipelines are placed before
those that fit on many.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ds_hydra.errors import InfeasiblePlanError
from ds_hydra.sampler.planner.bounds import strategy_bound_ms
from ds_hydra.sampler.planner.problem import (
    EPSILON,
    DispatchProblem,
    PipelineKind,
    SolverLimits,
    make_problem,
    shuffled_order,
    sift_down,
    solve_dispatch,
)
from ds_hydra.sampler.planner.refine import estimate_ms, improve_dispatch
from ds_hydra.sampler.schedule import IntArray
from ds_hydra.strategy.compiled import compiled

_MAX_OPEN = 64


@compiled
def _dispatch_greedily(problem: DispatchProblem, order: IntArray, assignment: IntArray) -> float:
    """Alg. 1, one trial: gives each sequence of `order` to the pipeline that then ends first.

    Writes `assignment`, returns the time of the slowest pipeline; inf if a sequence fits nowhere.
    Where Alg. 1 takes the first pipeline that does not delay the slowest one, the pipeline that
    ends first is taken, which leaves more room for what follows. One heap for each kind makes a
    trial O(B K log D).
    """
    num_kinds, num_pipelines = problem.num_stages.size, problem.kind_of.size
    load = np.zeros(num_pipelines)
    tokens = np.zeros(num_pipelines, dtype=np.int64)
    longest = np.full(num_pipelines, -1)
    value = np.zeros(num_pipelines)
    # Pipelines stand sorted by kind, so the heap of a kind is a range of one array.
    heap = np.arange(num_pipelines)
    start = np.searchsorted(problem.kind_of, np.arange(num_kinds + 1))
    # Each read of a field counts a reference, which the inner loop would pay for.
    lengths, sequence_ms, num_stages = problem.lengths, problem.sequence_ms, problem.num_stages
    constant, traffic, max_len = problem.constant_ms, problem.traffic_ms, problem.max_len_tokens
    ratio, is_exact, is_eq2 = problem.ratio, problem.is_exact, problem.is_eq2
    for i in order:
        best_kind, best = -1, np.inf
        for kind in range(num_kinds):
            if lengths[i] > max_len[kind] or start[kind] == start[kind + 1]:
                continue
            # Pipelines of a kind are alike but for their load: the one that ends first can win.
            pipeline = heap[start[kind]]
            # The smaller index is the longer sequence; a shuffled order may bring it later.
            top = i if longest[pipeline] < 0 else min(i, longest[pipeline])
            ms = estimate_ms(
                load[pipeline] + sequence_ms[kind, i], tokens[pipeline] + lengths[i], sequence_ms[kind, top],
                kind, num_stages[kind], constant[kind], traffic[kind], max_len[kind], ratio, is_exact, is_eq2,
            )  # fmt: skip
            if ms < best:
                best_kind, best = kind, ms
        if best_kind < 0:  # longer than every MaxLen: no order of the others helps
            return np.inf
        pipeline = heap[start[best_kind]]
        assignment[i] = pipeline
        load[pipeline] += problem.sequence_ms[best_kind, i]
        tokens[pipeline] += problem.lengths[i]
        longest[pipeline] = i if longest[pipeline] < 0 else min(i, longest[pipeline])
        value[pipeline] = best
        # Only the top one has grown: one sift restores the heap, where a sort would cost D log D.
        sift_down(heap[start[best_kind] : start[best_kind + 1]], value)
    return float(value.max())


@compiled
def _fit_within(
    problem: DispatchProblem, kinds: IntArray, limit_ms: float, assignment: IntArray
) -> float:
    """First-fit: each sequence, longest first, goes to the first pipeline that stays within a
    limit.

    Kinds are tried in the order of `kinds`. Returns the time of the slowest pipeline, inf if some
    sequence did not fit. Long sequences gather on few pipelines, which Eq. (2) rewards where PP >
    1. Only `_MAX_OPEN` pipelines of a kind are looked at for each sequence, counted from the first
    that is not full.
    """
    num_pipelines = problem.kind_of.size
    load = np.zeros(num_pipelines)
    tokens = np.zeros(num_pipelines, dtype=np.int64)
    longest = np.full(num_pipelines, -1)
    value = np.zeros(num_pipelines)
    first_open = np.searchsorted(problem.kind_of, np.arange(problem.num_stages.size))
    end = np.searchsorted(problem.kind_of, np.arange(problem.num_stages.size), side="right")
    lengths, sequence_ms, num_stages = problem.lengths, problem.sequence_ms, problem.num_stages
    constant, traffic, max_len = problem.constant_ms, problem.traffic_ms, problem.max_len_tokens
    ratio, is_exact, is_eq2 = problem.ratio, problem.is_exact, problem.is_eq2
    last = lengths.size - 1
    for i in range(lengths.size):
        chosen = -1
        for kind in kinds:
            if lengths[i] > max_len[kind]:
                continue
            for pipeline in range(first_open[kind], min(end[kind], first_open[kind] + _MAX_OPEN)):
                top = i if longest[pipeline] < 0 else longest[pipeline]
                new_load = load[pipeline] + sequence_ms[kind, i]
                # Not the sum alone: where PP > 1 a long sequence delays every stage behind it.
                ms = estimate_ms(
                    new_load, tokens[pipeline] + lengths[i], sequence_ms[kind, top],
                    kind, num_stages[kind], constant[kind], traffic[kind], max_len[kind], ratio, is_exact, is_eq2,
                )  # fmt: skip
                if ms <= limit_ms:
                    chosen = pipeline
                    break
            if chosen >= 0:
                break
        if chosen < 0:
            return np.inf
        assignment[i] = chosen
        longest[chosen] = top
        load[chosen] = new_load
        tokens[chosen] += lengths[i]
        value[chosen] = ms
        # Even the shortest sequence would not fit: nobody looks at this pipeline again.
        if chosen == first_open[kind] and new_load + sequence_ms[kind, last] > limit_ms:
            first_open[kind] += 1
    return float(value.max())


@compiled
def fit_trials(
    problem: DispatchProblem, lower_ms: float, upper_ms: float, num_steps: int, assignment: IntArray
) -> float:
    """Smallest limit, by bisection, within which first-fit places everything (MULTIFIT).

    Every order of the kinds is tried for up to three kinds, else as given and reversed. Writes
    `assignment` and returns its time if that is below `upper_ms`.
    """
    num_kinds = problem.num_stages.size
    trial = np.empty_like(assignment)
    best = upper_ms
    num_orders = 6 if num_kinds == 3 else min(num_kinds, 2)
    for number in range(num_orders):
        # Of three kinds: three rotations, and each of these reversed, are all six orders
        kinds = np.roll(np.arange(num_kinds), number % num_kinds)
        if number >= num_kinds or (num_kinds > 3 and number == 1):
            kinds = kinds[::-1].copy()
        # Below the bound nothing fits, and a limit above the best time found wins nothing.
        low, high = lower_ms, best
        for _ in range(num_steps):
            middle = (low + high) / 2
            value = _fit_within(problem, kinds, middle, trial)
            if value < best * (1 - EPSILON):
                best = value
                assignment[:] = trial
            # First-fit is not monotonic in its limit: this finds a good one, not the smallest.
            if value < np.inf:
                high = min(middle, value)
            else:
                low = middle
    return best


@compiled
def dispatch_trials(
    problem: DispatchProblem, num_trials: int, seed: int, assignment: IntArray
) -> float:
    """Best of one trial in sorted order and `num_trials` - 1 in orders more and more shuffled."""
    best = np.inf
    trial = np.empty_like(assignment)
    for number in range(num_trials):
        # The first order is not shuffled: longest first is the best single guess (LPT).
        order = shuffled_order(problem.lengths, 0.5 * number, seed + number)
        value = _dispatch_greedily(problem, order, trial)
        if value < best * (1 - EPSILON):
            best = value
            assignment[:] = trial
    return float(best)


@dataclass(frozen=True, slots=True, kw_only=True)
class Dispatch:
    """Pipeline of every sequence, the objective of Eq. (3) without the constant of T, and a bound
    of it.
    """

    assignment: tuple[int, ...]
    objective_ms: float
    lower_bound_ms: float


_NUM_TRIALS = 16
_NUM_FIT_STEPS = 14
_MAX_STEPS = 1000
_NUM_TARGETS = 64


def dispatch_sequences(
    lengths: Sequence[int],
    kinds: Sequence[PipelineKind],
    *,
    seed: int = 0,
    limits: SolverLimits | None = None,
) -> Dispatch:
    """The best dispatch found by Eq. (3); with `limits` by its integer program, started from the
    greedy one.

    Pipelines are numbered in the order of `kinds`. Raises InfeasiblePlanError if a sequence fits on
    none.
    """
    largest = max(kind.max_len_tokens for kind in kinds)
    if lengths and max(lengths) > largest:
        raise InfeasiblePlanError(
            f"a sequence of {max(lengths)} tokens does not fit; the largest MaxLen is {largest}; "
            f"lower hydra.context_length to {largest} or raise hydra.memory_limit_bytes"
        )
    pipelines = [
        kind._replace(num_pipelines=1) for kind in kinds for _ in range(kind.num_pipelines)
    ]
    # Pipelines of a kind have to be neighbours, and equal kinds may be given apart
    counts = Counter(pipelines)
    merged = [kind._replace(num_pipelines=count) for kind, count in counts.items()]
    kind_of = np.array([list(counts).index(pipeline) for pipeline in pipelines])
    order = np.argsort(-np.array(lengths, dtype=np.int64), kind="stable")
    problem = make_problem(np.array(lengths, dtype=np.int64)[order], merged, is_eq2=True)
    sorted_assignment = np.zeros(len(lengths), dtype=np.int64)
    # The bound is searched below what greedy found, and ends the search where it is reached.
    objective = dispatch_trials(problem, _NUM_TRIALS, seed, sorted_assignment)
    lower_bound = strategy_bound_ms(problem, objective)
    objective = fit_trials(problem, lower_bound, objective, _NUM_FIT_STEPS, sorted_assignment)
    objective = improve_dispatch(problem, sorted_assignment, lower_bound, _MAX_STEPS, _NUM_TARGETS)
    if limits is not None and objective > lower_bound * (1 + limits.gap_tolerance):
        bound = solve_dispatch(problem, limits, sorted_assignment)
        objective = improve_dispatch(
            problem, sorted_assignment, lower_bound, _MAX_STEPS, _NUM_TARGETS
        )
        lower_bound = max(lower_bound, bound)
    # From pipelines grouped by kind to pipelines as given
    position = np.argsort(kind_of, kind="stable")
    assignment = np.empty(len(lengths), dtype=np.int64)
    assignment[order] = position[sorted_assignment]
    return Dispatch(
        assignment=tuple(assignment.tolist()),
        objective_ms=objective,
        lower_bound_ms=min(lower_bound, objective),
    )
