"""Sequences that change places between the slowest pipeline and others, while estimates fall."""

from __future__ import annotations

import numpy as np

from ds_hydra.sampler.dispatch.estimates import (
    Loads,
    count_loads,
    estimate_after_ms,
    estimate_ms,
    recount,
)
from ds_hydra.sampler.problem import EPSILON, DispatchProblem
from ds_hydra.sampler.schedule import FloatArray, IntArray
from ds_hydra.strategy.compiled import compiled


@compiled
def choose_targets(
    problem: DispatchProblem, value_ms: FloatArray, slowest: int, limit: int
) -> FloatArray:
    """1.0 for pipelines worth exchanging with: the `limit` fastest, and the fastest of each
    kind.
    """
    num_pipelines = value_ms.size
    is_target = np.zeros(num_pipelines)
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
    limit = value_ms[slowest] * (1 - EPSILON)
    max_found = found_ms.size
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
        if assignment[i] != slowest or lengths[i] == previous_length:
            continue
        previous_length = lengths[i]
        alone_ms = estimate_after_ms(problem, loads, slowest, i) + bias_ms[slowest]
        left_ms = load_ms[slowest] - sequence_ms[slow_kind, i]
        left_tokens = tokens[slowest] - lengths[i]
        left_first = second[slowest] if first[slowest] == i else first[slowest]
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
