"""How the sequences of one pipeline are packed into rows, and in which order the rows run (Eq. 1,
App. C).

The number of rows V is not limited by UtilLen (App. C), because the constant of T already charges
for rows that are too short, and a limit can leave a feasible pipeline without a packing. Values of
V are tried in the order of their lower bound until none can win.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from ds_hydra.errors import InfeasiblePlanError
from ds_hydra.sampler.ilp import SolverLimits
from ds_hydra.sampler.order import EPSILON, shuffled_order
from ds_hydra.sampler.packing.local_search import improve_rows, perturb, row_times_ms
from ds_hydra.sampler.packing.packing_bounds import (
    PipelineCost,
    min_num_rows,
    pipeline_bound_ms,
    row_count_bound_ms,
)
from ds_hydra.sampler.packing.packing_ilp import solve_rows
from ds_hydra.sampler.schedule import (
    MAX_BALANCED_ROWS,
    FloatArray,
    IntArray,
    balance_rows,
    makespan_ms,
)
from ds_hydra.strategy.compiled import compiled
from ds_hydra.strategy.profiles.profile import LatencyModel
from ds_hydra.strategy.schemes.options import FORWARD_FRACTION


class Effort(NamedTuple):
    """How long packing searches: numbers of V to build, evaluations for each, and perturbations of
    the best one.
    """

    num_row_counts: int
    num_evaluations: int
    num_perturbations: int


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
def _fewest_rows(
    lengths: IntArray, max_len: int, lower_bound: int, num_tries: int, rows: IntArray
) -> int:
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
    """Renumbers rows so that each holds a sequence, their order kept; returns how many there
    are.
    """
    new_number = np.zeros(rows.max() + 1, dtype=np.int64)
    for row in rows:
        new_number[row] = 1
    num_rows = new_number.sum()
    new_number = np.cumsum(new_number) - 1
    for i in range(rows.size):
        rows[i] = new_number[rows[i]]
    return int(num_rows)


@compiled
def pack_rows(
    lengths: IntArray, sequence_ms: FloatArray, cost: PipelineCost, effort: Effort, rows: IntArray
) -> tuple[float, int]:
    """Writes the row of every sequence (lengths descending); returns objective and number of
    rows.
    """
    if lengths.size == 0:
        return 0.0, 0
    min_rows = min_num_rows(lengths, cost.max_len_tokens)
    fewest = _fewest_rows(lengths, cost.max_len_tokens, min_rows, effort.num_row_counts, rows)
    times = row_times_ms(sequence_ms, rows, fewest, cost.constant_ms)
    best = makespan_ms(
        times, cost.num_stages, cost.forward_fraction, cost.is_exact, cost.traffic_ms
    )
    best_num_rows = fewest
    if cost.num_stages == 1 and cost.is_exact and times.min() >= cost.traffic_ms:
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
        value = improve_rows(sequence_ms, lengths, trial, num_rows, cost, effort.num_evaluations)
        if value < best * (1 - EPSILON):
            best = value
            best_num_rows = num_rows
            rows[:] = trial
    for seed in range(effort.num_perturbations if best_num_rows > 1 else 0):
        trial[:] = rows
        perturb(lengths, trial, best_num_rows, cost.max_len_tokens, seed)
        num_rows = _drop_empty_rows(trial)
        value = improve_rows(sequence_ms, lengths, trial, num_rows, cost, effort.num_evaluations)
        if value < best * (1 - EPSILON):
            best = value
            best_num_rows = num_rows
            rows[:] = trial
    return best, best_num_rows


@compiled
def _split_rows(lengths: IntArray, rows: IntArray, num_rows: int, wanted_rows: int) -> None:
    """Divides fullest rows until there are `wanted_rows`, so that a packing by capacity has enough
    rows.
    """
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
    """The best packing found for one pipeline; `limits` allow integer programs where the gap is
    large.

    Raises InfeasiblePlanError if a sequence is longer than `max_len_tokens`.
    """
    if lengths and max(lengths) > max_len_tokens:
        raise InfeasiblePlanError(
            f"a sequence of {max(lengths)} tokens does not fit a row of {max_len_tokens}; "
            f"lower hydra.context_length to {max_len_tokens} or raise hydra.memory_limit_bytes"
        )
    order = np.argsort(-np.array(lengths, dtype=np.int64), kind="stable")
    descending = np.array(lengths, dtype=np.int64)[order]
    sequence_ms = np.array(
        [latency.sequence_ms(int(length)) for length in descending], dtype=np.float64
    )
    balance = balance_rows(num_stages, forward_fraction)
    cost = PipelineCost(
        num_stages,
        float(latency.constant_ms),
        float(latency.traffic_ms),
        max_len_tokens,
        forward_fraction,
        is_exact,
        balance,
    )
    rows = np.zeros_like(descending)
    objective, num_rows = pack_rows(descending, sequence_ms, cost, THOROUGH, rows)
    lower_bound = pipeline_bound_ms(descending, sequence_ms, cost)
    if limits is not None and objective > lower_bound * (1 + limits.gap_tolerance):
        objective, num_rows, lower_bound = solve_packing(
            descending, sequence_ms, cost, limits, rows
        )
    return Packing(
        rows=tuple(tuple(order[rows == row].tolist()) for row in range(num_rows)),
        objective_ms=objective,
        lower_bound_ms=min(lower_bound, objective),
    )


def solve_packing(
    lengths: IntArray,
    sequence_ms: FloatArray,
    cost: PipelineCost,
    limits: SolverLimits,
    rows: IntArray,
) -> tuple[float, int, float]:
    """Improves `rows` with integer programs, one for each V whose bound is below the best
    objective.

    Returns objective, number of rows and lower bound. By the closed form a program also raises the
    bound of its V; by the recurrence it shows only which V are possible, and its rows are a start
    for the search.
    """
    num_rows = int(rows.max()) + 1
    times = row_times_ms(sequence_ms, rows, num_rows, cost.constant_ms)
    best = makespan_ms(
        times, cost.num_stages, cost.forward_fraction, cost.is_exact, cost.traffic_ms
    )
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
            lengths,
            sequence_ms,
            count,
            cost.max_len_tokens,
            limits=limits,
            below_ms=below,
            start=start,
        )
        if not cost.is_exact:
            proven = (solution.load_bound_ms + cost.constant_ms) * (cost.num_stages - 1 + count)
            bounds[count] = max(bounds[count], min(proven, best))
        elif np.isinf(solution.load_bound_ms):
            bounds[count] = np.inf
        if solution.rows is not None:
            trial = solution.rows
            trial_rows = _drop_empty_rows(trial)
            value = improve_rows(
                sequence_ms, lengths, trial, trial_rows, cost, THOROUGH.num_evaluations
            )
            if value < best * (1 - EPSILON):
                best, num_rows = value, trial_rows
                rows[:] = trial
    return best, num_rows, min(bounds.values())
