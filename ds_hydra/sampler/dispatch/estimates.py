"""What a pipeline will take for the sequences it was given, before they are packed."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from ds_hydra.sampler.problem import DispatchProblem
from ds_hydra.sampler.schedule import MAX_BALANCED_MICRO_BATCHES, FloatArray, IntArray
from ds_hydra.strategy.compiled import compiled


class Loads(NamedTuple):
    """What each pipeline holds: sums, and its two longest sequences (indices, -1 for none)."""

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
    if num_stages == 1 and is_exact:
        return float(max(load_ms + constant * min_micro_batches, traffic * min_micro_batches))
    centre = MAX_BALANCED_MICRO_BATCHES
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
    """What `assignment` gives to each pipeline."""
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
    """Counts again what pipelines `a` and `b` hold, from scratch, so that rounding does not add
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
