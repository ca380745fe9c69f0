"""How fast a strategy can be at best for one mini-batch: a proven lower bound of the iteration.

For a limit M on the iteration, a pipeline of kind k can take at most `cap_k(M)` ms of sequences, and a
sequence can run on kind k only if one row with it alone ends within M. If sequences may be divided freely
between the remaining kinds and still do not fit, no plan ends within M. By duality that is so if

    sum_i min_k(w_k * cost_ik) > sum_k w_k * count_k * cap_k(M)      for some weights w >= 0

so that every w found proves its M; the bound is the largest M for which one was found.
"""

from __future__ import annotations

import numpy as np

from ds_hydra.sampler.compiled import compiled
from ds_hydra.sampler.problem import DispatchProblem
from ds_hydra.sampler.schedule import MAX_BALANCED_ROWS, FloatArray

_WEIGHT_STEPS = 40
_PRECISION = 2e-4


@compiled
def _capacity_ms(problem: DispatchProblem, kind: int, limit_ms: float, densest_row_ms: float) -> float:
    """cap_k(M): most sequence time that a pipeline of `kind` finishes within `limit_ms`, over every V.

    With V rows the load is at most what V rows of MaxLen tokens can hold (`densest_row_ms` each), and, from
    the bounds of one pipeline (`packing.row_count_bound_ms`), at most what V rows can do in that time.
    """
    if problem.is_eq2:
        return limit_ms
    num_stages, constant = problem.num_stages[kind], problem.constant_ms[kind]
    best = 0.0
    for num_rows in range(1, problem.lengths.size + 1):
        if problem.is_exact:
            ratio = 1.0 if num_rows > MAX_BALANCED_ROWS else problem.ratio[kind, num_rows]
            work = min(limit_ms / ratio, limit_ms - (num_stages - 1) * constant)
        else:
            work = limit_ms * num_rows / (num_stages - 1 + num_rows)
        load = work - num_rows * constant
        best = max(best, min(load, num_rows * densest_row_ms))
        if num_rows * densest_row_ms >= limit_ms and num_rows > MAX_BALANCED_ROWS:
            break
    return best


@compiled
def _is_impossible(problem: DispatchProblem, limit_ms: float, weights: FloatArray) -> bool:
    """Whether some weights prove that nothing ends within `limit_ms`; `weights` start and end the search."""
    num_kinds, num_sequences = problem.num_stages.size, problem.lengths.size
    capacity = np.zeros(num_kinds)
    first_allowed = np.zeros(num_kinds, dtype=np.int64)
    for kind in range(num_kinds):
        first = 0
        constant, num_stages = problem.constant_ms[kind], problem.num_stages[kind]
        while first < num_sequences and (
            problem.lengths[first] > problem.max_len_tokens[kind]
            or num_stages * (problem.sequence_ms[kind, first] + constant) > limit_ms
        ):
            first += 1
        first_allowed[kind] = first
        if first < num_sequences:
            per_token = problem.sequence_ms[kind, first] / problem.lengths[first]
            densest_row_ms = per_token * problem.max_len_tokens[kind]
            count = np.sum(problem.kind_of == kind)
            capacity[kind] = count * _capacity_ms(problem, kind, limit_ms, densest_row_ms)
    if first_allowed.min() > 0 or capacity.sum() == 0.0:
        return True
    assigned = np.zeros(num_kinds)
    for step in range(_WEIGHT_STEPS):
        assigned[:] = 0.0
        for i in range(num_sequences):
            best = -1
            for kind in range(num_kinds):
                if i >= first_allowed[kind] and (
                    best < 0
                    or weights[kind] * problem.sequence_ms[kind, i]
                    < weights[best] * problem.sequence_ms[best, i]
                ):
                    best = kind
            assigned[best] += problem.sequence_ms[best, i]
        if np.sum(weights * (assigned - capacity)) > 0:
            return True
        if num_kinds == 1:
            return False
        scale = np.maximum(assigned, capacity)
        weights *= np.exp((0.5 / (1 + 0.2 * step)) * (assigned - capacity) / np.maximum(scale, 1e-300))
        weights /= weights.sum()
    return False


@compiled
def strategy_bound_ms(problem: DispatchProblem, upper_ms: float) -> float:
    """Lower bound of the slowest pipeline over every dispatch and packing, searched up to `upper_ms`.

    Every sequence must fit on some pipeline.
    """
    if problem.lengths.size == 0:
        return 0.0
    low = 0.0
    for i in range(problem.lengths.size):
        alone = np.inf
        for kind in range(problem.num_stages.size):
            if problem.lengths[i] <= problem.max_len_tokens[kind]:
                time = problem.num_stages[kind] * (problem.sequence_ms[kind, i] + problem.constant_ms[kind])
                alone = min(alone, time)
        low = max(low, alone)
    weights = np.full(problem.num_stages.size, 1.0 / problem.num_stages.size)
    high = upper_ms
    while low < high * (1 - _PRECISION):
        middle = (low + high) / 2
        if _is_impossible(problem, middle, weights):
            low = middle
        else:
            high = middle
    return float(min(low, upper_ms))
