"""Which pipeline gets which sequence: Alg. 1 (greedy, many trials), refinement, and the exact ILP of Eq. (3).

Sequences are sorted by descending length, so those that fit on few pipelines are placed before those that fit
on many.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from ds_hydra.errors import InfeasiblePlanError
from ds_hydra.sampler.bounds import strategy_bound_ms
from ds_hydra.sampler.dispatch_ilp import solve_dispatch
from ds_hydra.sampler.ilp import SolverLimits
from ds_hydra.sampler.order import EPSILON, shuffled_order
from ds_hydra.sampler.problem import DispatchProblem, PipelineKind, make_problem
from ds_hydra.sampler.schedule import MAX_BALANCED_ROWS, FloatArray, IntArray
from ds_hydra.strategy.compiled import compiled

MAX_EXCHANGES = 8
"""Exchanges that one search hands back, best first."""


_MAX_OPEN = 64


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
    max_len: int,
    ratio: FloatArray,
    is_exact: bool,
    is_eq2: bool,
) -> float:
    """Time of a pipeline of `kind` with sequences of `tokens` and `load_ms` in all, `longest_ms` the longest of them.

    The number of rows is the best of those around sqrt((PP-1) load / c), where the closed form has its
    minimum, and not below tokens / MaxLen. Around a row that is much longer than the others about half of
    the others' time is hidden (at most 1 - min(phi, 1-phi), see `packing.row_count_bound_ms`).

    What follows `kind` is that of the `DispatchProblem`, one by one: counting references to its arrays takes ten
    times as long as the sums here.
    """
    if is_eq2:
        return float(load_ms + longest_ms * (num_stages - 1))
    min_rows = -(-tokens // max_len)
    if num_stages == 1 and is_exact:
        return float(load_ms + constant * min_rows)
    centre = MAX_BALANCED_ROWS
    if constant * centre * centre > (num_stages - 1) * load_ms:
        centre = int(np.sqrt((num_stages - 1) * load_ms / constant))
    best = np.inf
    for num_rows in range(max(min_rows, centre - 2, 1), max(min_rows, centre + 1) + 1):
        if is_exact:
            work = load_ms + num_rows * constant
            row_ratio = 1.0 if num_rows > MAX_BALANCED_ROWS else ratio[kind, num_rows]
            around_longest = (num_stages - 0.5) * (longest_ms + constant) + 0.5 * work
            value = max(work * row_ratio, around_longest)
        else:
            value = (max(longest_ms, load_ms / num_rows) + constant) * (num_stages - 1 + num_rows)
        best = min(best, value)
    return float(best)


@compiled
def dispatch_greedily(problem: DispatchProblem, order: IntArray, assignment: IntArray) -> float:
    """Alg. 1, one trial: gives each sequence of `order` to the pipeline that then ends first.

    Writes `assignment`, returns the time of the slowest pipeline; inf if a sequence fits nowhere. Where
    Alg. 1 takes the first pipeline that does not delay the slowest one, the pipeline that ends first
    is taken, which leaves more room for what follows. One heap for each kind makes a trial O(B K log D).
    """
    num_kinds, num_pipelines = problem.num_stages.size, problem.kind_of.size
    load = np.zeros(num_pipelines)
    tokens = np.zeros(num_pipelines, dtype=np.int64)
    longest = np.full(num_pipelines, -1)
    value = np.zeros(num_pipelines)
    heap = np.arange(num_pipelines)
    start = np.searchsorted(problem.kind_of, np.arange(num_kinds + 1))
    lengths, sequence_ms, max_len, ratio = (
        problem.lengths,
        problem.sequence_ms,
        problem.max_len_tokens,
        problem.ratio,
    )
    num_stages, constant, is_exact, is_eq2 = (
        problem.num_stages,
        problem.constant_ms,
        problem.is_exact,
        problem.is_eq2,
    )
    for i in order:
        best_kind, best = -1, np.inf
        for kind in range(num_kinds):
            if lengths[i] > max_len[kind] or start[kind] == start[kind + 1]:
                continue
            pipeline = heap[start[kind]]
            top = i if longest[pipeline] < 0 else min(i, longest[pipeline])
            ms = estimate_ms(
                load[pipeline] + sequence_ms[kind, i], tokens[pipeline] + lengths[i], sequence_ms[kind, top],
                kind, num_stages[kind], constant[kind], max_len[kind], ratio, is_exact, is_eq2,
            )  # fmt: skip
            if ms < best:
                best_kind, best = kind, ms
        if best_kind < 0:
            return np.inf
        pipeline = heap[start[best_kind]]
        assignment[i] = pipeline
        load[pipeline] += problem.sequence_ms[best_kind, i]
        tokens[pipeline] += problem.lengths[i]
        longest[pipeline] = i if longest[pipeline] < 0 else min(i, longest[pipeline])
        value[pipeline] = best
        _sift_down(heap[start[best_kind] : start[best_kind + 1]], value)
    return float(value.max())


@compiled
def _sift_down(heap: IntArray, value: FloatArray) -> None:
    """Restores the heap order (smallest value on top) after the value of the top pipeline has grown."""
    parent = 0
    while 2 * parent + 1 < heap.size:
        child = 2 * parent + 1
        if child + 1 < heap.size and value[heap[child + 1]] < value[heap[child]]:
            child += 1
        if value[heap[parent]] <= value[heap[child]]:
            return
        heap[parent], heap[child] = heap[child], heap[parent]
        parent = child


@compiled
def fit_within(problem: DispatchProblem, kinds: IntArray, limit_ms: float, assignment: IntArray) -> float:
    """First-fit: each sequence, longest first, goes to the first pipeline that stays within a limit.

    Kinds are tried in the order of `kinds`. Returns the time of the slowest pipeline, inf if some sequence
    did not fit. Long sequences gather on few pipelines, which Eq. (2) rewards where PP > 1. Only
    `_MAX_OPEN` pipelines of a kind are looked at for each sequence, counted from the first that is not full.
    """
    num_pipelines = problem.kind_of.size
    load = np.zeros(num_pipelines)
    tokens = np.zeros(num_pipelines, dtype=np.int64)
    longest = np.full(num_pipelines, -1)
    value = np.zeros(num_pipelines)
    first_open = np.searchsorted(problem.kind_of, np.arange(problem.num_stages.size))
    end = np.searchsorted(problem.kind_of, np.arange(problem.num_stages.size), side="right")
    lengths, sequence_ms, max_len, ratio = (
        problem.lengths,
        problem.sequence_ms,
        problem.max_len_tokens,
        problem.ratio,
    )
    num_stages, constant, is_exact, is_eq2 = (
        problem.num_stages,
        problem.constant_ms,
        problem.is_exact,
        problem.is_eq2,
    )
    last = lengths.size - 1
    for i in range(lengths.size):
        chosen = -1
        for kind in kinds:
            if lengths[i] > max_len[kind]:
                continue
            for pipeline in range(first_open[kind], min(end[kind], first_open[kind] + _MAX_OPEN)):
                top = i if longest[pipeline] < 0 else longest[pipeline]
                new_load = load[pipeline] + sequence_ms[kind, i]
                ms = estimate_ms(
                    new_load, tokens[pipeline] + lengths[i], sequence_ms[kind, top],
                    kind, num_stages[kind], constant[kind], max_len[kind], ratio, is_exact, is_eq2,
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
        if chosen == first_open[kind] and new_load + sequence_ms[kind, last] > limit_ms:
            first_open[kind] += 1
    return float(value.max())


@compiled
def fit_trials(
    problem: DispatchProblem, lower_ms: float, upper_ms: float, num_steps: int, assignment: IntArray
) -> float:
    """Smallest limit, by bisection, within which first-fit places everything (MULTIFIT).

    Every order of the kinds is tried for up to three kinds, else as given and reversed. Writes `assignment`
    and returns its time if that is below `upper_ms`.
    """
    num_kinds = problem.num_stages.size
    trial = np.empty_like(assignment)
    best = upper_ms
    num_orders = 6 if num_kinds == 3 else min(num_kinds, 2)
    for number in range(num_orders):
        kinds = np.roll(np.arange(num_kinds), number % num_kinds)
        if number >= num_kinds or (num_kinds > 3 and number == 1):
            kinds = kinds[::-1].copy()
        low, high = lower_ms, best
        for _ in range(num_steps):
            middle = (low + high) / 2
            value = fit_within(problem, kinds, middle, trial)
            if value < best * (1 - EPSILON):
                best = value
                assignment[:] = trial
            if value < np.inf:
                high = min(middle, value)
            else:
                low = middle
    return best


@compiled
def dispatch_trials(problem: DispatchProblem, num_trials: int, seed: int, assignment: IntArray) -> float:
    """Best of one trial in sorted order and `num_trials` - 1 in orders more and more shuffled."""
    best = np.inf
    trial = np.empty_like(assignment)
    for number in range(num_trials):
        order = shuffled_order(problem.lengths, 0.5 * number, seed + number)
        value = dispatch_greedily(problem, order, trial)
        if value < best * (1 - EPSILON):
            best = value
            assignment[:] = trial
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
    """Counts again what pipelines `a` and `b` hold, from scratch, so that rounding does not add up."""
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
def estimate_after_ms(
    problem: DispatchProblem, loads: Loads, pipeline: int, removed: int, added: int
) -> float:
    """Time of `pipeline` by estimate once sequence `removed` has left and `added` has come (-1: none)."""
    kind = problem.kind_of[pipeline]
    load, tokens, longest = loads.load_ms[pipeline], loads.tokens[pipeline], loads.first[pipeline]
    if removed >= 0:
        load -= problem.sequence_ms[kind, removed]
        tokens -= problem.lengths[removed]
        if removed == longest:
            longest = loads.second[pipeline]
    if added >= 0:
        load += problem.sequence_ms[kind, added]
        tokens += problem.lengths[added]
        longest = added if longest < 0 else min(longest, added)
    if longest < 0:
        return 0.0
    return estimate_ms(
        load, tokens, problem.sequence_ms[kind, longest], kind, problem.num_stages[kind], problem.constant_ms[kind],
        problem.max_len_tokens[kind], problem.ratio, problem.is_exact, problem.is_eq2,
    )  # fmt: skip


@compiled
def choose_targets(problem: DispatchProblem, value_ms: FloatArray, slowest: int, limit: int) -> FloatArray:
    """1.0 for pipelines worth exchanging with: the `limit` fastest, and the fastest of each kind."""
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
    """Moves (i, -1) and swaps (i, j) that by estimate make `slowest` and its partner both end earlier.

    `bias_ms` is what the estimate of each pipeline has to be corrected by. Writes up to `found.shape[0]` rows
    (i, j, pipeline) and the time of the slower of both pipelines, best first; returns how many.
    """
    limit = value_ms[slowest] * (1 - EPSILON)
    max_found = found_ms.size
    found_ms[:] = limit
    num_found = 0
    lengths, sequence_ms, kind_of, ratio = (
        problem.lengths,
        problem.sequence_ms,
        problem.kind_of,
        problem.ratio,
    )
    num_stages, constant, max_len = problem.num_stages, problem.constant_ms, problem.max_len_tokens
    is_exact, is_eq2 = problem.is_exact, problem.is_eq2
    load_ms, tokens, first, second = loads.load_ms, loads.tokens, loads.first, loads.second
    slow_kind = kind_of[slowest]
    previous_length = -1
    for i in range(assignment.size):
        if assignment[i] != slowest or lengths[i] == previous_length:
            continue
        previous_length = lengths[i]
        alone_ms = estimate_after_ms(problem, loads, slowest, i, -1) + bias_ms[slowest]
        left_ms, left_tokens = load_ms[slowest] - sequence_ms[slow_kind, i], tokens[slowest] - lengths[i]
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
                    slow_kind, num_stages[slow_kind], constant[slow_kind], max_len[slow_kind], ratio, is_exact, is_eq2,
                )  # fmt: skip
                new_ms -= sequence_ms[kind, j]
                new_tokens -= lengths[j]
                longest = second[target] if longest == j else longest
            if here_ms >= found_ms[max_found - 1]:
                continue
            there_ms = bias_ms[target] + estimate_ms(
                new_ms + sequence_ms[kind, i], new_tokens + lengths[i],
                sequence_ms[kind, i if longest < 0 else min(longest, i)],
                kind, num_stages[kind], constant[kind], max_len[kind], ratio, is_exact, is_eq2,
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
    problem: DispatchProblem, assignment: IntArray, enough_ms: float, max_steps: int, num_targets: int
) -> float:
    """Exchanges sequences of the slowest pipeline, by estimate, until none helps; returns its time."""
    loads = count_loads(problem, assignment)
    num_pipelines = problem.kind_of.size
    value = np.zeros(num_pipelines)
    for pipeline in range(num_pipelines):
        value[pipeline] = estimate_after_ms(problem, loads, pipeline, -1, -1)
    bias = np.zeros(num_pipelines)
    found_ms, found = np.zeros(1), np.zeros((1, 3), dtype=np.int64)
    for _ in range(max_steps):
        slowest = int(np.argmax(value))
        if value[slowest] <= enough_ms:
            break
        is_target = choose_targets(problem, value, slowest, num_targets)
        if find_exchanges(problem, assignment, loads, value, bias, slowest, is_target, found_ms, found) == 0:
            break
        apply_exchange(assignment, slowest, found[0])
        partner = int(found[0, 2])
        recount(problem, assignment, loads, slowest, partner)
        for pipeline in (slowest, partner):
            value[pipeline] = estimate_after_ms(problem, loads, pipeline, -1, -1)
    return float(value.max())


@dataclass(frozen=True, slots=True, kw_only=True)
class Dispatch:
    """Pipeline of every sequence, the objective of Eq. (3) without the constant of T, and a bound of it."""

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
    """The best dispatch found by Eq. (3); with `limits` by its integer program, started from the greedy one.

    Pipelines are numbered in the order of `kinds`. Raises InfeasiblePlanError if a sequence fits on none.
    """
    largest = max(kind.max_len_tokens for kind in kinds)
    if lengths and max(lengths) > largest:
        raise InfeasiblePlanError(
            f"a sequence of {max(lengths)} tokens does not fit; the largest MaxLen is {largest}; "
            f"lower hydra.context_length to {largest} or raise hydra.memory_limit_bytes"
        )
    pipelines = [kind._replace(num_pipelines=1) for kind in kinds for _ in range(kind.num_pipelines)]
    counts = Counter(pipelines)
    merged = [kind._replace(num_pipelines=count) for kind, count in counts.items()]
    kind_of = np.array([list(counts).index(pipeline) for pipeline in pipelines])
    order = np.argsort(-np.array(lengths, dtype=np.int64), kind="stable")
    problem = make_problem(np.array(lengths, dtype=np.int64)[order], merged, is_eq2=True)
    sorted_assignment = np.zeros(len(lengths), dtype=np.int64)
    objective = dispatch_trials(problem, _NUM_TRIALS, seed, sorted_assignment)
    lower_bound = strategy_bound_ms(problem, objective)
    objective = fit_trials(problem, lower_bound, objective, _NUM_FIT_STEPS, sorted_assignment)
    objective = improve_dispatch(problem, sorted_assignment, lower_bound, _MAX_STEPS, _NUM_TARGETS)
    if limits is not None and objective > lower_bound * (1 + limits.gap_tolerance):
        bound = solve_dispatch(problem, limits, sorted_assignment)
        objective = improve_dispatch(problem, sorted_assignment, lower_bound, _MAX_STEPS, _NUM_TARGETS)
        lower_bound = max(lower_bound, bound)
    position = np.argsort(kind_of, kind="stable")  # from pipelines grouped by kind to pipelines as given
    assignment = np.empty(len(lengths), dtype=np.int64)
    assignment[order] = position[sorted_assignment]
    return Dispatch(
        assignment=tuple(assignment.tolist()),
        objective_ms=objective,
        lower_bound_ms=min(lower_bound, objective),
    )
