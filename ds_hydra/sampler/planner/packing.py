"""Packing of the sequences of one pipeline into micro-batches, and the order in which these run
(Eq. 1, App. C).

The number of micro-batches V is not limited by UtilLen (App. C), because the constant of T already
charges for micro-batches that are too short, and a limit can leave a feasible pipeline without a
packing. Values of V are tried in the order of their lower bound until none can win.

Then a packing is made faster: sequences change micro-batches, micro-batches change places, while
the objective falls (`improve_micro_batches`).
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from ds_hydra.sampler.planner.bounds import (
    PipelineCost,
    micro_batch_count_bound_ms,
    min_num_micro_batches,
)
from ds_hydra.sampler.planner.problem import (
    EPSILON,
    SolverLimits,
    shuffled_order,
    solve_micro_batches,
)
from ds_hydra.sampler.schedule import MAX_BALANCED_MICRO_BATCHES, FloatArray, IntArray, makespan_ms
from ds_hydra.strategy.compiled import compiled

_NUM_PERTURBED = 4


@compiled
def micro_batch_times_ms(
    sequence_ms: FloatArray, micro_batches: IntArray, constant_ms: float
) -> FloatArray:
    """T of every micro-batch: the constant once, and the costs of its sequences, of which there is
    one at least.
    """
    times = np.full(micro_batches.max() + 1, constant_ms)
    for i in range(micro_batches.size):
        times[micro_batches[i]] += sequence_ms[i]
    return times


@compiled
def _objective_ms(times: FloatArray, cost: PipelineCost) -> float:
    """Time of the pipeline whose micro-batches compute `times`."""
    return makespan_ms(
        times, cost.num_stages, cost.forward_fraction, cost.is_exact, cost.traffic_ms
    )


class _MicroBatchState(NamedTuple):
    """Micro-batches while they are improved: time, tokens and number of sequences of each."""

    times: FloatArray
    tokens: IntArray
    counts: IntArray


@compiled
def improve_micro_batches(
    sequence_ms: FloatArray,
    lengths: IntArray,
    micro_batches: IntArray,
    num_micro_batches: int,
    cost: PipelineCost,
    num_evaluations: int,
) -> float:
    """Moves and swaps sequences, and swaps micro-batches, while the objective falls; returns it.

    The number of micro-batches stays. In the closed form only sequences of the slowest micro-batch
    are worth looking at, and the order of micro-batches does not count.
    """
    times = micro_batch_times_ms(sequence_ms, micro_batches, cost.constant_ms)
    state = _MicroBatchState(
        times,
        np.zeros(num_micro_batches, dtype=np.int64),
        np.zeros(num_micro_batches, dtype=np.int64),
    )
    for i in range(micro_batches.size):
        state.tokens[micro_batches[i]] += lengths[i]
        state.counts[micro_batches[i]] += 1
    best = _objective_ms(times, cost)
    left = num_evaluations
    while left > 0:
        before = best
        # Places count by the recurrence alone: short micro-batches fill and drain a pipeline best.
        if cost.is_exact:
            best, left = _swap_micro_batches(micro_batches, state, cost, best, left)
        for i in range(micro_batches.size):
            # By the closed form nothing counts but the slowest micro-batch.
            if cost.is_exact or state.times[micro_batches[i]] == state.times.max():
                best, left = _move_sequence(
                    sequence_ms, lengths, micro_batches, i, state, cost, best, left
                )
                best, left = _swap_sequence(
                    sequence_ms, lengths, micro_batches, i, state, cost, best, left
                )
        # Every gain is above EPSILON, so without one this is the very same number
        if best == before:
            break
    return best


@compiled
def _swap_micro_batches(
    micro_batches: IntArray, state: _MicroBatchState, cost: PipelineCost, best: float, left: int
) -> tuple[float, int]:
    """Swaps the places of two micro-batches wherever that helps; returns the objective and
    evaluations left.
    """
    for a in range(state.times.size):
        for b in range(a + 1, state.times.size):
            if left <= 0:
                return best, left
            # Tried in place and taken back: copies would cost as much as the recurrence itself.
            state.times[a], state.times[b] = state.times[b], state.times[a]
            value = _objective_ms(state.times, cost)
            left -= 1
            if value < best * (1 - EPSILON):
                best = value
                state.tokens[a], state.tokens[b] = state.tokens[b], state.tokens[a]
                state.counts[a], state.counts[b] = state.counts[b], state.counts[a]
                # Sequences know their micro-batch by its place, which has changed
                for i in range(micro_batches.size):
                    if micro_batches[i] == a:
                        micro_batches[i] = b
                    elif micro_batches[i] == b:
                        micro_batches[i] = a
            else:
                state.times[a], state.times[b] = state.times[b], state.times[a]
    return best, left


@compiled
def _move_sequence(
    sequence_ms: FloatArray,
    lengths: IntArray,
    micro_batches: IntArray,
    i: int,
    state: _MicroBatchState,
    cost: PipelineCost,
    best: float,
    left: int,
) -> tuple[float, int]:
    """Moves sequence `i` to any micro-batch where that helps; returns the objective and evaluations
    left.
    """
    for target in range(state.times.size):
        # Read anew for each target: a move that helped has changed it
        source = micro_batches[i]
        # The last sequence stays: how many micro-batches there are is decided elsewhere.
        if left <= 0 or state.counts[source] == 1:
            break
        if target == source or state.tokens[target] + lengths[i] > cost.max_len_tokens:
            continue
        state.times[source] -= sequence_ms[i]
        state.times[target] += sequence_ms[i]
        value = _objective_ms(state.times, cost)
        left -= 1
        if value < best * (1 - EPSILON):
            best = value
            micro_batches[i] = target
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
    micro_batches: IntArray,
    i: int,
    state: _MicroBatchState,
    cost: PipelineCost,
    best: float,
    left: int,
) -> tuple[float, int]:
    """Swaps sequence `i` with shorter ones where that helps; returns the objective and evaluations
    left.
    """
    for j in range(i + 1, micro_batches.size):
        source, target = micro_batches[i], micro_batches[j]
        # Lengths descend, so j is never the longer one, and only its micro-batch can overflow.
        tokens = lengths[i] - lengths[j]
        if left <= 0:
            break
        # Sequences of one length cost the same: to swap them changes nothing
        if source == target or tokens == 0 or state.tokens[target] + tokens > cost.max_len_tokens:
            continue
        delta = sequence_ms[i] - sequence_ms[j]
        # Taking back adds the same number again: rounding stays below what EPSILON lets count.
        state.times[source] -= delta
        state.times[target] += delta
        value = _objective_ms(state.times, cost)
        left -= 1
        if value < best * (1 - EPSILON):
            best = value
            micro_batches[i], micro_batches[j] = target, source
            state.tokens[source] -= tokens
            state.tokens[target] += tokens
        else:
            state.times[source] += delta
            state.times[target] -= delta
    return best, left


@compiled
def perturb(
    lengths: IntArray, micro_batches: IntArray, num_micro_batches: int, max_len: int, seed: int
) -> None:
    """Moves a few sequences, chosen by `seed`, to other micro-batches that can hold them, out of a
    local optimum.
    """
    # Noise so far above all lengths makes a uniform order of it.
    order = shuffled_order(lengths, 1e6, seed)
    targets = shuffled_order(
        np.ones(min(lengths.size, _NUM_PERTURBED), dtype=np.int64), 1e6, seed + 1
    )
    tokens = np.zeros(num_micro_batches, dtype=np.int64)
    for i in range(micro_batches.size):
        tokens[micro_batches[i]] += lengths[i]
    for k in range(targets.size):
        i = order[k]
        # Where micro-batches are few this may be its own, and then nothing moves
        target = (micro_batches[i] + 1 + targets[k]) % num_micro_batches
        if tokens[target] + lengths[i] <= max_len:
            tokens[micro_batches[i]] -= lengths[i]
            tokens[target] += lengths[i]
            micro_batches[i] = target


class SearchBudget(NamedTuple):
    """Limits of the search for a packing: numbers of V to build, evaluations for each, and
    perturbations of the best one.
    """

    num_micro_batch_counts: int
    num_evaluations: int
    num_perturbations: int


THOROUGH = SearchBudget(12, 10_000, 40)


@compiled
def _fill_micro_batches(
    order: IntArray, lengths: IntArray, max_len: int, micro_batches: IntArray
) -> int:
    """Best-fit of the sequences in `order`; writes `micro_batches`, returns how many micro-batches
    are used.
    """
    tokens = np.zeros(lengths.size, dtype=np.int64)
    num_micro_batches = 0
    for i in order:
        best = -1
        for micro_batch in range(num_micro_batches):
            fits = tokens[micro_batch] + lengths[i] <= max_len
            # The fullest that has room: gaps stay as large as they can be.
            if fits and (best < 0 or tokens[micro_batch] > tokens[best]):
                best = micro_batch
        if best < 0:
            best = num_micro_batches
            num_micro_batches += 1
        tokens[best] += lengths[i]
        micro_batches[i] = best
    return num_micro_batches


@compiled
def fewest_micro_batches(
    lengths: IntArray, max_len: int, lower_bound: int, num_tries: int, micro_batches: IntArray
) -> int:
    """Writes a packing into few micro-batches: best-fit decreasing, then with nearly decreasing
    orders.
    """
    order = np.arange(lengths.size)
    best = _fill_micro_batches(order, lengths, max_len, micro_batches)
    trial = np.empty_like(micro_batches)
    for seed in range(num_tries):
        if best == lower_bound:  # proved: no packing has fewer
            break
        # Lengths are scaled by 1 to 1.3, so that only similar ones change places
        num_micro_batches = _fill_micro_batches(
            shuffled_order(lengths, 0.3, seed), lengths, max_len, trial
        )
        if num_micro_batches < best:
            best = num_micro_batches
            micro_batches[:] = trial
    return best


@compiled
def fill_targets(
    sequence_ms: FloatArray,
    lengths: IntArray,
    target_ms: FloatArray,
    max_len: int,
    micro_batches: IntArray,
) -> bool:
    """Gives each sequence, longest first, to the micro-batch furthest below its target where it
    fits.

    Changes `target_ms` to what is left of it. False if some sequence fits in no micro-batch.
    """
    # Targets are unequal: short micro-batches fill and drain a pipeline best.
    tokens = np.zeros(target_ms.size, dtype=np.int64)
    for i in range(lengths.size):
        best = -1
        for micro_batch in range(target_ms.size):
            fits = tokens[micro_batch] + lengths[i] <= max_len
            if fits and (best < 0 or target_ms[micro_batch] > target_ms[best]):
                best = micro_batch
        if best < 0:
            return False
        tokens[best] += lengths[i]
        target_ms[best] -= sequence_ms[i]
        micro_batches[i] = best
    return True


@compiled
def _balanced_targets(num_micro_batches: int, load_ms: float, cost: PipelineCost) -> FloatArray:
    """Time of sequences that each micro-batch should get, in 1F1B order, so that the pipeline is
    fast.
    """
    even = np.full(num_micro_batches, load_ms / num_micro_batches)
    if not cost.is_exact or num_micro_batches > MAX_BALANCED_MICRO_BATCHES:
        return even
    # Shares are of whole micro-batch times; what sequences may take is left without the constant,
    # and shares that are below it are 0, so that the rest is scaled to the load again.
    work = load_ms + num_micro_batches * cost.constant_ms
    targets = np.maximum(
        cost.balance.share[num_micro_batches, :num_micro_batches] * work - cost.constant_ms, 0.0
    )
    # Sequences may add nothing to the constant, and then nothing is left to be scaled.
    left_ms = targets.sum()
    return targets * (load_ms / left_ms) if left_ms > 0.0 else even


@compiled
def _drop_empty_micro_batches(micro_batches: IntArray) -> int:
    """Renumbers micro-batches so that each holds a sequence, their order kept; returns how many
    there are.
    """
    new_number = np.zeros(micro_batches.max() + 1, dtype=np.int64)
    for micro_batch in micro_batches:
        new_number[micro_batch] = 1
    num_micro_batches = new_number.sum()
    new_number = np.cumsum(new_number) - 1
    for i in range(micro_batches.size):
        micro_batches[i] = new_number[micro_batches[i]]
    return int(num_micro_batches)


@compiled
def _improve_trial(
    sequence_ms: FloatArray,
    lengths: IntArray,
    trial: IntArray,
    cost: PipelineCost,
    num_evaluations: int,
    best: float,
    micro_batches: IntArray,
) -> float:
    """Improves the packing `trial`, and writes it to `micro_batches`, whose objective is `best`, if
    it is then better; returns the objective of these.
    """
    # An empty micro-batch would be charged its constant all the same
    num_micro_batches = _drop_empty_micro_batches(trial)
    value = improve_micro_batches(
        sequence_ms, lengths, trial, num_micro_batches, cost, num_evaluations
    )
    if value >= best * (1 - EPSILON):
        return best
    micro_batches[:] = trial
    return value


@compiled
def pack_micro_batches(
    lengths: IntArray,
    sequence_ms: FloatArray,
    cost: PipelineCost,
    budget: SearchBudget,
    micro_batches: IntArray,
) -> float:
    """Writes the micro-batch of every sequence (lengths descending); returns the objective."""
    if lengths.size == 0:
        return 0.0
    min_micro_batches = min_num_micro_batches(lengths, cost.max_len_tokens)
    fewest = fewest_micro_batches(
        lengths,
        cost.max_len_tokens,
        min_micro_batches,
        budget.num_micro_batch_counts,
        micro_batches,
    )
    times = micro_batch_times_ms(sequence_ms, micro_batches, cost.constant_ms)
    best = _objective_ms(times, cost)
    # One stage: time is the sum, so the fewest micro-batches are optimal, whatever they hold.
    if cost.num_stages == 1 and cost.is_exact and times.min() >= cost.traffic_ms:
        return best
    fullest = micro_batches.copy()
    trial = np.empty_like(micro_batches)
    load, longest = sequence_ms.sum(), sequence_ms.max()
    # Counts that cannot hold the sequences stay infinite, as those do that were tried
    bounds = np.full(lengths.size + 1, np.inf)
    for num_micro_batches in range(min_micro_batches, lengths.size + 1):
        bounds[num_micro_batches] = micro_batch_count_bound_ms(
            num_micro_batches, load, longest, cost
        )
    # Most promising count first, so that the bounds of the others soon exceed the best one found.
    for _ in range(budget.num_micro_batch_counts):
        num_micro_batches = int(np.argmin(bounds))
        if bounds[num_micro_batches] >= best * (1 - EPSILON):
            break
        bounds[num_micro_batches] = np.inf
        targets = _balanced_targets(num_micro_batches, load, cost)
        # Balanced filling minds MaxLen last and may fail where a packing by capacity is known.
        if not fill_targets(sequence_ms, lengths, targets, cost.max_len_tokens, trial):
            if num_micro_batches < fewest:
                continue
            trial[:] = fullest
            _split_micro_batches(lengths, trial, fewest, num_micro_batches)
        # Targets are unequal, and few long sequences may leave the least of them without any.
        elif num_micro_batches <= lengths.size:
            num_filled = _drop_empty_micro_batches(trial)
            _split_micro_batches(lengths, trial, num_filled, num_micro_batches)
        best = _improve_trial(
            sequence_ms, lengths, trial, cost, budget.num_evaluations, best, micro_batches
        )
    # Out of a single micro-batch no sequence can move
    for seed in range(budget.num_perturbations if micro_batches.max() > 0 else 0):
        trial[:] = micro_batches
        perturb(lengths, trial, trial.max() + 1, cost.max_len_tokens, seed)
        best = _improve_trial(
            sequence_ms, lengths, trial, cost, budget.num_evaluations, best, micro_batches
        )
    return best


@compiled
def _split_micro_batches(
    lengths: IntArray, micro_batches: IntArray, num_micro_batches: int, wanted_micro_batches: int
) -> None:
    """Divides fullest micro-batches until there are `wanted_micro_batches`, so that a packing by
    capacity has enough micro-batches.
    """
    # It ends: as long as there are fewer micro-batches than sequences, one has two
    while num_micro_batches < wanted_micro_batches:
        tokens = np.zeros(num_micro_batches, dtype=np.int64)
        counts = np.zeros(num_micro_batches, dtype=np.int64)
        for i in range(micro_batches.size):
            tokens[micro_batches[i]] += lengths[i]
            counts[micro_batches[i]] += 1
        # Every other sequence leaves: lengths descend, so both halves get long and short ones.
        source = int(np.argmax(np.where(counts > 1, tokens, -1)))
        is_second = False
        for i in range(micro_batches.size):
            if micro_batches[i] == source:
                if is_second:
                    micro_batches[i] = num_micro_batches
                is_second = not is_second
        num_micro_batches += 1


def solve_packing(
    lengths: IntArray,
    sequence_ms: FloatArray,
    cost: PipelineCost,
    limits: SolverLimits,
    micro_batches: IntArray,
) -> tuple[float, float]:
    """Improves `micro_batches` with integer programs, one for each V whose bound is below the best
    objective.

    Returns objective and lower bound. By the closed form a program also raises the bound of its V;
    by the recurrence it shows only which V are possible, and its micro-batches are a start for the
    search.
    """
    times = micro_batch_times_ms(sequence_ms, micro_batches, cost.constant_ms)
    best = _objective_ms(times, cost)
    load, longest = float(sequence_ms.sum()), float(sequence_ms.max())
    bounds = {
        count: micro_batch_count_bound_ms(count, load, longest, cost)
        for count in range(min_num_micro_batches(lengths, cost.max_len_tokens), lengths.size + 1)
    }
    for count in sorted(bounds, key=lambda count: bounds[count]):
        if bounds[count] * (1 + limits.gap_tolerance) >= best:
            break
        # By Eq. (1) better is (PP - 1 + V) (slowest + c) < best. By the recurrence a slower
        # micro-batch may still make a faster pipeline, so there is no limit
        below = np.inf if cost.is_exact else best / (cost.num_stages - 1 + count) - cost.constant_ms
        start = micro_batches if count == micro_batches.max() + 1 else None
        solution = solve_micro_batches(
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
            # Slower than `below` was not looked for, so nothing above `best` is proved
            bounds[count] = max(bounds[count], min(proven, best))
        elif np.isinf(solution.load_bound_ms):
            # MaxLen alone rules this V out, by whatever objective
            bounds[count] = np.inf
        if solution.micro_batches is not None:
            best = _improve_trial(
                sequence_ms,
                lengths,
                solution.micro_batches,
                cost,
                THOROUGH.num_evaluations,
                best,
                micro_batches,
            )
    return best, min(bounds.values())
