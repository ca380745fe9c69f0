"""How the sequences of one pipeline are packed into rows, and in which order the rows run (Eq. 1, App. C).

The number of rows V is not limited by UtilLen (App. C), because the constant of T already charges for
rows that are too short, and a limit can leave a feasible pipeline without a packing. Values of V are tried
in the order of their lower bound until none can win.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from ds_hydra.errors import InfeasiblePlanError
from ds_hydra.sampler.ilp import SolverLimits
from ds_hydra.sampler.order import EPSILON, shuffled_order
from ds_hydra.sampler.packing_ilp import solve_rows
from ds_hydra.sampler.schedule import (
    FORWARD_FRACTION,
    MAX_BALANCED_ROWS,
    FloatArray,
    IntArray,
    RowBalance,
    balance_rows,
    makespan_ms,
)
from ds_hydra.strategy.compiled import compiled
from ds_hydra.strategy.profile import LatencyModel


class PipelineCost(NamedTuple):
    """What packing has to know about a pipeline besides its sequences."""

    num_stages: int
    constant_ms: float
    max_len_tokens: int
    forward_fraction: float
    is_exact: bool
    balance: RowBalance


class Effort(NamedTuple):
    """How long packing searches: numbers of V to build, evaluations for each, and kicks of the best one."""

    num_row_counts: int
    num_evaluations: int
    num_kicks: int


_NUM_KICKED = 4
THOROUGH = Effort(12, 10_000, 40)


@dataclass(frozen=True, slots=True, kw_only=True)
class Packing:
    """Rows of one pipeline in 1F1B order; `rows[j]` lists positions in the given lengths."""

    rows: tuple[tuple[int, ...], ...]
    objective_ms: float
    lower_bound_ms: float

    @property
    def gap(self) -> float:
        """How far the objective may be above the optimum, relative to the lower bound."""
        return self.objective_ms / self.lower_bound_ms - 1 if self.lower_bound_ms > 0 else 0.0

    @property
    def is_optimal(self) -> bool:
        """Whether the lower bound proves that no packing is faster."""
        return self.gap <= EPSILON


@compiled
def min_num_rows(lengths: IntArray, max_len: int) -> int:
    """Lower bound of the rows that hold `lengths` (descending), each of them at most `max_len`.

    Bound L2 of Martello and Toth: for a threshold k, sequences above max_len - k share their row with
    nothing of k or more, those above max_len / 2 need a row each, the rest fills what these leave free.
    """
    best = -(-lengths.sum() // max_len)
    for threshold in lengths:
        if 2 * threshold > max_len:
            continue
        alone, half, half_tokens, rest_tokens = 0, 0, 0, 0
        for length in lengths:
            if length > max_len - threshold:
                alone += 1
            elif 2 * length > max_len:
                half += 1
                half_tokens += length
            elif length >= threshold:
                rest_tokens += length
        overflow = max(0, rest_tokens - (half * max_len - half_tokens))
        best = max(best, alone + half + -(-overflow // max_len))
    half = 0
    for length in lengths:
        half += 2 * length > max_len
    return int(max(best, half))


@compiled
def row_count_bound_ms(num_rows: int, load_ms: float, longest_ms: float, cost: PipelineCost) -> float:
    """Lower bound of the objective with `num_rows` rows; sequences cost `load_ms`, the longest `longest_ms`.

    Closed form: max(longest, load/V) + c, times PP-1+V. Exact, the largest of three:

    - No division into V rows beats `RowBalance.ratio`.
    - Some stage is busy with all rows, while the first and the last one also pass the other PP-1 stages.
    - The row of the longest sequence passes all stages forward and backward. On stage 0 meanwhile, earlier
      rows may run backward and later ones forward, but the forward passes of the former come before and the
      backward passes of the latter after it: PP t_longest + min(phi, 1-phi) (all other rows).
    """
    num_stages, constant = cost.num_stages, cost.constant_ms
    if not cost.is_exact:
        return (max(longest_ms, load_ms / num_rows) + constant) * (num_stages - 1 + num_rows)
    work = load_ms + num_rows * constant
    if num_stages == 1:
        return work
    ratio = 1.0 if num_rows > MAX_BALANCED_ROWS else cost.balance.ratio[num_rows]
    outside = min(cost.forward_fraction, 1.0 - cost.forward_fraction)
    around_longest = (num_stages - outside) * (longest_ms + constant) + outside * work
    return float(max(work * ratio, work + (num_stages - 1) * constant, around_longest))


@compiled
def pipeline_bound_ms(lengths: IntArray, sequence_ms: FloatArray, cost: PipelineCost) -> float:
    """Lower bound of the objective over every packing of these sequences (descending)."""
    if lengths.size == 0:
        return 0.0
    load, longest = sequence_ms.sum(), sequence_ms.max()
    best = np.inf
    for num_rows in range(min_num_rows(lengths, cost.max_len_tokens), lengths.size + 1):
        best = min(best, row_count_bound_ms(num_rows, load, longest, cost))
    return float(best)


@compiled
def row_times_ms(sequence_ms: FloatArray, rows: IntArray, num_rows: int, constant_ms: float) -> FloatArray:
    """T of every row: the constant once, and the costs of its sequences."""
    times = np.full(num_rows, constant_ms)
    for i in range(rows.size):
        times[rows[i]] += sequence_ms[i]
    return times


@compiled
def _fill_rows(order: IntArray, lengths: IntArray, max_len: int, rows: IntArray) -> int:
    """Best-fit of the sequences in `order`; writes `rows`, returns how many rows are used."""
    tokens = np.zeros(lengths.size, dtype=np.int64)
    num_rows = 0
    for i in order:
        best = -1
        for row in range(num_rows):
            fits = tokens[row] + lengths[i] <= max_len
            if fits and (best < 0 or tokens[row] > tokens[best]):
                best = row
        if best < 0:
            best = num_rows
            num_rows += 1
        tokens[best] += lengths[i]
        rows[i] = best
    return num_rows


@compiled
def _fewest_rows(lengths: IntArray, max_len: int, lower_bound: int, num_tries: int, rows: IntArray) -> int:
    """Writes a packing into few rows: best-fit decreasing, then with nearly decreasing orders."""
    order = np.arange(lengths.size)
    best = _fill_rows(order, lengths, max_len, rows)
    trial = np.empty_like(rows)
    for seed in range(num_tries):
        if best == lower_bound:
            break
        num_rows = _fill_rows(shuffled_order(lengths, 0.3, seed), lengths, max_len, trial)
        if num_rows < best:
            best = num_rows
            rows[:] = trial
    return best


@compiled
def _fill_targets(
    sequence_ms: FloatArray, lengths: IntArray, target_ms: FloatArray, max_len: int, rows: IntArray
) -> bool:
    """Gives each sequence, longest first, to the row furthest below its target where it fits.

    Changes `target_ms` to what is left of it. False if some sequence fits in no row.
    """
    tokens = np.zeros(target_ms.size, dtype=np.int64)
    for i in range(lengths.size):
        best = -1
        for row in range(target_ms.size):
            fits = tokens[row] + lengths[i] <= max_len
            if fits and (best < 0 or target_ms[row] > target_ms[best]):
                best = row
        if best < 0:
            return False
        tokens[best] += lengths[i]
        target_ms[best] -= sequence_ms[i]
        rows[i] = best
    return True


@compiled
def _balanced_targets(num_rows: int, load_ms: float, cost: PipelineCost) -> FloatArray:
    """Time of sequences that each row should get, in 1F1B order, so that the pipeline is fast."""
    if not cost.is_exact or num_rows > MAX_BALANCED_ROWS:
        return np.full(num_rows, load_ms / num_rows)
    work = load_ms + num_rows * cost.constant_ms
    targets = np.maximum(cost.balance.share[num_rows, :num_rows] * work - cost.constant_ms, 0.0)
    targets *= load_ms / targets.sum()
    return targets


@compiled
def _drop_empty_rows(rows: IntArray) -> int:
    """Renumbers rows so that each holds a sequence, their order kept; returns how many there are."""
    new_number = np.zeros(rows.max() + 1, dtype=np.int64)
    for row in rows:
        new_number[row] = 1
    num_rows = new_number.sum()
    new_number = np.cumsum(new_number) - 1
    for i in range(rows.size):
        rows[i] = new_number[rows[i]]
    return int(num_rows)


class _RowState(NamedTuple):
    """Rows while they are improved: time, tokens and number of sequences of each."""

    times: FloatArray
    tokens: IntArray
    counts: IntArray


@compiled
def _improve_rows(
    sequence_ms: FloatArray,
    lengths: IntArray,
    rows: IntArray,
    num_rows: int,
    cost: PipelineCost,
    num_evaluations: int,
) -> float:
    """Moves and swaps sequences, and swaps rows, while the objective falls; returns it.

    The number of rows stays. In the closed form only sequences of the slowest row are worth looking at,
    and the order of rows does not count.
    """
    times = row_times_ms(sequence_ms, rows, num_rows, cost.constant_ms)
    state = _RowState(times, np.zeros(num_rows, dtype=np.int64), np.zeros(num_rows, dtype=np.int64))
    for i in range(rows.size):
        state.tokens[rows[i]] += lengths[i]
        state.counts[rows[i]] += 1
    best = makespan_ms(times, cost.num_stages, cost.forward_fraction, cost.is_exact)
    left = num_evaluations
    while left > 0:
        before = best
        if cost.is_exact:
            best, left = _swap_rows(rows, state, cost, best, left)
        for i in range(rows.size):
            if cost.is_exact or state.times[rows[i]] == state.times.max():
                best, left = _move_sequence(sequence_ms, lengths, rows, i, state, cost, best, left)
                best, left = _swap_sequence(sequence_ms, lengths, rows, i, state, cost, best, left)
        if best == before:
            break
    return best


@compiled
def _swap_rows(
    rows: IntArray, state: _RowState, cost: PipelineCost, best: float, left: int
) -> tuple[float, int]:
    """Swaps the places of two rows wherever that helps; returns the objective and evaluations left."""
    for a in range(state.times.size):
        for b in range(a + 1, state.times.size):
            if left <= 0:
                return best, left
            state.times[a], state.times[b] = state.times[b], state.times[a]
            value = makespan_ms(state.times, cost.num_stages, cost.forward_fraction, cost.is_exact)
            left -= 1
            if value < best * (1 - EPSILON):
                best = value
                state.tokens[a], state.tokens[b] = state.tokens[b], state.tokens[a]
                state.counts[a], state.counts[b] = state.counts[b], state.counts[a]
                for i in range(rows.size):
                    if rows[i] == a:
                        rows[i] = b
                    elif rows[i] == b:
                        rows[i] = a
            else:
                state.times[a], state.times[b] = state.times[b], state.times[a]
    return best, left


@compiled
def _move_sequence(
    sequence_ms: FloatArray,
    lengths: IntArray,
    rows: IntArray,
    i: int,
    state: _RowState,
    cost: PipelineCost,
    best: float,
    left: int,
) -> tuple[float, int]:
    """Moves sequence `i` to any row where that helps; returns the objective and evaluations left."""
    for target in range(state.times.size):
        source = rows[i]
        if left <= 0 or state.counts[source] == 1:
            break
        if target == source or state.tokens[target] + lengths[i] > cost.max_len_tokens:
            continue
        state.times[source] -= sequence_ms[i]
        state.times[target] += sequence_ms[i]
        value = makespan_ms(state.times, cost.num_stages, cost.forward_fraction, cost.is_exact)
        left -= 1
        if value < best * (1 - EPSILON):
            best = value
            rows[i] = target
            state.tokens[source] -= lengths[i]
            state.tokens[target] += lengths[i]
            state.counts[source] -= 1
            state.counts[target] += 1
        else:
            state.times[source] += sequence_ms[i]
            state.times[target] -= sequence_ms[i]
    return best, left


@compiled
def _swap_sequence(
    sequence_ms: FloatArray,
    lengths: IntArray,
    rows: IntArray,
    i: int,
    state: _RowState,
    cost: PipelineCost,
    best: float,
    left: int,
) -> tuple[float, int]:
    """Swaps sequence `i` with shorter ones where that helps; returns the objective and evaluations left."""
    for j in range(i + 1, rows.size):
        source, target = rows[i], rows[j]
        tokens = lengths[i] - lengths[j]
        if left <= 0:
            break
        if source == target or tokens == 0 or state.tokens[target] + tokens > cost.max_len_tokens:
            continue
        delta = sequence_ms[i] - sequence_ms[j]
        state.times[source] -= delta
        state.times[target] += delta
        value = makespan_ms(state.times, cost.num_stages, cost.forward_fraction, cost.is_exact)
        left -= 1
        if value < best * (1 - EPSILON):
            best = value
            rows[i], rows[j] = target, source
            state.tokens[source] -= tokens
            state.tokens[target] += tokens
        else:
            state.times[source] += delta
            state.times[target] -= delta
    return best, left


@compiled
def pack_rows(
    lengths: IntArray, sequence_ms: FloatArray, cost: PipelineCost, effort: Effort, rows: IntArray
) -> tuple[float, int]:
    """Writes the row of every sequence (lengths descending); returns objective and number of rows."""
    if lengths.size == 0:
        return 0.0, 0
    min_rows = min_num_rows(lengths, cost.max_len_tokens)
    fewest = _fewest_rows(lengths, cost.max_len_tokens, min_rows, effort.num_row_counts, rows)
    times = row_times_ms(sequence_ms, rows, fewest, cost.constant_ms)
    best = makespan_ms(times, cost.num_stages, cost.forward_fraction, cost.is_exact)
    best_num_rows = fewest
    if cost.num_stages == 1 and cost.is_exact:
        return best, fewest
    fullest = rows.copy()
    trial = np.empty_like(rows)
    load, longest = sequence_ms.sum(), sequence_ms.max()
    bounds = np.full(lengths.size + 1, np.inf)
    for num_rows in range(min_rows, lengths.size + 1):
        bounds[num_rows] = row_count_bound_ms(num_rows, load, longest, cost)
    for _ in range(effort.num_row_counts):
        num_rows = int(np.argmin(bounds))
        if bounds[num_rows] >= best * (1 - EPSILON):
            break
        bounds[num_rows] = np.inf
        targets = _balanced_targets(num_rows, load, cost)
        if not _fill_targets(sequence_ms, lengths, targets, cost.max_len_tokens, trial):
            if num_rows < fewest:
                continue
            trial[:] = fullest
            _split_rows(lengths, trial, fewest, num_rows)
        num_rows = _drop_empty_rows(trial)
        value = _improve_rows(sequence_ms, lengths, trial, num_rows, cost, effort.num_evaluations)
        if value < best * (1 - EPSILON):
            best = value
            best_num_rows = num_rows
            rows[:] = trial
    for seed in range(effort.num_kicks if best_num_rows > 1 else 0):
        trial[:] = rows
        _kick(lengths, trial, best_num_rows, cost.max_len_tokens, seed)
        num_rows = _drop_empty_rows(trial)
        value = _improve_rows(sequence_ms, lengths, trial, num_rows, cost, effort.num_evaluations)
        if value < best * (1 - EPSILON):
            best = value
            best_num_rows = num_rows
            rows[:] = trial
    return best, best_num_rows


@compiled
def _kick(lengths: IntArray, rows: IntArray, num_rows: int, max_len: int, seed: int) -> None:
    """Moves a few sequences, chosen by `seed`, to other rows that can hold them, out of a local optimum."""
    order = shuffled_order(lengths, 1e6, seed)
    targets = shuffled_order(np.ones(min(lengths.size, _NUM_KICKED), dtype=np.int64), 1e6, seed + 1)
    tokens = np.zeros(num_rows, dtype=np.int64)
    for i in range(rows.size):
        tokens[rows[i]] += lengths[i]
    for k in range(targets.size):
        i = order[k]
        target = (rows[i] + 1 + targets[k]) % num_rows
        if tokens[target] + lengths[i] <= max_len:
            tokens[rows[i]] -= lengths[i]
            tokens[target] += lengths[i]
            rows[i] = target


@compiled
def _split_rows(lengths: IntArray, rows: IntArray, num_rows: int, wanted_rows: int) -> None:
    """Divides fullest rows until there are `wanted_rows`, so that a packing by capacity has enough rows."""
    while num_rows < wanted_rows:
        tokens = np.zeros(num_rows, dtype=np.int64)
        counts = np.zeros(num_rows, dtype=np.int64)
        for i in range(rows.size):
            tokens[rows[i]] += lengths[i]
            counts[rows[i]] += 1
        source = int(np.argmax(np.where(counts > 1, tokens, -1)))
        is_second = False
        for i in range(rows.size):
            if rows[i] == source:
                if is_second:
                    rows[i] = num_rows
                is_second = not is_second
        num_rows += 1


def pack_sequences(
    lengths: Sequence[int],
    *,
    latency: LatencyModel,
    num_stages: int,
    max_len_tokens: int,
    is_exact: bool = True,
    forward_fraction: float = FORWARD_FRACTION,
    limits: SolverLimits | None = None,
) -> Packing:
    """The best packing found for one pipeline; `limits` allow integer programs where the gap is large.

    Raises InfeasiblePlanError if a sequence is longer than `max_len_tokens`.
    """
    if lengths and max(lengths) > max_len_tokens:
        raise InfeasiblePlanError(
            f"a sequence of {max(lengths)} tokens does not fit a row of {max_len_tokens}; "
            f"lower hydra.context_length to {max_len_tokens} or raise hydra.memory_limit_bytes"
        )
    order = np.argsort(-np.array(lengths, dtype=np.int64), kind="stable")
    descending = np.array(lengths, dtype=np.int64)[order]
    sequence_ms = np.array([latency.sequence_ms(int(length)) for length in descending], dtype=np.float64)
    balance = balance_rows(num_stages, forward_fraction)
    cost = PipelineCost(
        num_stages, float(latency.constant_ms), max_len_tokens, forward_fraction, is_exact, balance
    )
    rows = np.zeros_like(descending)
    objective, num_rows = pack_rows(descending, sequence_ms, cost, THOROUGH, rows)
    lower_bound = pipeline_bound_ms(descending, sequence_ms, cost)
    if limits is not None and objective > lower_bound * (1 + limits.gap_tolerance):
        objective, num_rows, lower_bound = solve_packing(descending, sequence_ms, cost, limits, rows)
    return Packing(
        rows=tuple(tuple(order[rows == row].tolist()) for row in range(num_rows)),
        objective_ms=objective,
        lower_bound_ms=min(lower_bound, objective),
    )


def solve_packing(
    lengths: IntArray, sequence_ms: FloatArray, cost: PipelineCost, limits: SolverLimits, rows: IntArray
) -> tuple[float, int, float]:
    """Improves `rows` with integer programs, one for each V whose bound is below the best objective.

    Returns objective, number of rows and lower bound. By the closed form a program also raises the bound of
    its V; by the recurrence it shows only which V are possible, and its rows are a start for the search.
    """
    num_rows = int(rows.max()) + 1
    times = row_times_ms(sequence_ms, rows, num_rows, cost.constant_ms)
    best = makespan_ms(times, cost.num_stages, cost.forward_fraction, cost.is_exact)
    load, longest = float(sequence_ms.sum()), float(sequence_ms.max())
    bounds = {
        count: row_count_bound_ms(count, load, longest, cost)
        for count in range(min_num_rows(lengths, cost.max_len_tokens), lengths.size + 1)
    }
    for count in sorted(bounds, key=lambda count: bounds[count]):
        if bounds[count] * (1 + limits.gap_tolerance) >= best:
            break
        below = np.inf if cost.is_exact else best / (cost.num_stages - 1 + count) - cost.constant_ms
        start = rows if count == num_rows else None
        solution = solve_rows(
            lengths, sequence_ms, count, cost.max_len_tokens, limits=limits, below_ms=below, start=start
        )
        if not cost.is_exact:
            proven = (solution.load_bound_ms + cost.constant_ms) * (cost.num_stages - 1 + count)
            bounds[count] = max(bounds[count], min(proven, best))
        elif np.isinf(solution.load_bound_ms):
            bounds[count] = np.inf
        if solution.rows is not None:
            trial = solution.rows
            trial_rows = _drop_empty_rows(trial)
            value = _improve_rows(sequence_ms, lengths, trial, trial_rows, cost, THOROUGH.num_evaluations)
            if value < best * (1 - EPSILON):
                best, num_rows = value, trial_rows
                rows[:] = trial
    return best, num_rows, min(bounds.values())
