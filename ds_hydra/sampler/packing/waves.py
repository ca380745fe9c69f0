"""Rows for ranks that run in lockstep: the n-th rows of all ranks, a wave, take as long as the
longest of them.

So it is where ZeRO-3 or FSDP gather each layer for a forward and backward pass of every rank. Rows
are numbered wave * ranks + rank; sequences come in descending order.
"""

from __future__ import annotations

import numpy as np

from ds_hydra.sampler.packing.packing import fewest_micro_batches, fill_targets
from ds_hydra.sampler.packing.packing_bounds import min_num_micro_batches
from ds_hydra.sampler.problem import EPSILON
from ds_hydra.sampler.schedule import FloatArray, IntArray
from ds_hydra.strategy.compiled import compiled

_NUM_COUNTS = 4
"""Numbers of waves that are tried, from the fewest that hold the sequences."""
_NUM_TRIES = 12
_ENOUGH_GAP = 1e-3
_MAX_EVALUATIONS = 5_000_000
_EVENNESS = 1e-6
"""What a more even wave is worth, beside a shorter one: the way to exchanges that shorten it."""


def pack_waves(
    lengths: IntArray,
    sequence_ms: FloatArray,
    num_ranks: int,
    max_tokens: int,
    constant_ms: float,
) -> tuple[IntArray, int]:
    """The row of each sequence and the number of waves, so that the sum over waves of their longest
    rows is short.

    `lengths` and `sequence_ms` descend; no row has more than `max_tokens`; a wave costs
    `constant_ms` once. A row may be empty only in a wave of fewer sequences than ranks.
    """
    fullest = np.zeros_like(lengths)
    num_rows = fewest_micro_batches(
        lengths, max_tokens, min_num_micro_batches(lengths, max_tokens), _NUM_TRIES, fullest
    )
    fewest = -(-num_rows // num_ranks)
    first = -(-min_num_micro_batches(lengths, max_tokens) // num_ranks)
    best, best_ms, best_count = fullest, np.inf, fewest
    least_ms = max(float(sequence_ms[0]), float(sequence_ms.sum()) / num_ranks)
    for num_waves in range(first, fewest + _NUM_COUNTS):
        if least_ms + num_waves * constant_ms >= best_ms * (1 - EPSILON):
            break
        rows = np.zeros_like(lengths)
        targets = _targets(sequence_ms, num_ranks, num_waves)
        if not fill_targets(sequence_ms, lengths, targets, max_tokens, rows):
            if num_waves < fewest:
                continue
            rows = _in_waves(fullest, sequence_ms, num_rows)
        taken = improve_waves(
            sequence_ms,
            lengths,
            rows,
            num_ranks,
            num_waves,
            max_tokens,
            least_ms * (1 + _ENOUGH_GAP),
            _MAX_EVALUATIONS,
        )
        if taken + num_waves * constant_ms < best_ms * (1 - EPSILON):
            best, best_ms, best_count = rows, taken + num_waves * constant_ms, num_waves
    _fill_empty(sequence_ms, best, num_ranks, best_count)
    return _longest_first(best, sequence_ms, num_ranks, best_count), best_count


def _targets(sequence_ms: FloatArray, num_ranks: int, num_waves: int) -> FloatArray:
    """Time of sequences that each row should get: a wave is as long as the longest sequence that
    must be in it, or as its share of what the waves before it leave.
    """
    left, targets = float(sequence_ms.sum()), np.zeros(num_waves * num_ranks)
    for wave in range(num_waves):
        first = wave * num_ranks
        longest = sequence_ms[first] if first < sequence_ms.size else 0.0
        height = max(longest, left / (num_ranks * (num_waves - wave)))
        targets[first : first + num_ranks] = height
        left = max(0.0, left - num_ranks * height)
    return targets


def _in_waves(rows: IntArray, sequence_ms: FloatArray, num_rows: int) -> IntArray:
    """The same rows numbered by descending time, so that those of a wave are alike."""
    times = np.bincount(rows, weights=sequence_ms, minlength=num_rows)
    number = np.empty(num_rows, dtype=np.int64)
    number[np.argsort(-times, kind="stable")] = np.arange(num_rows)
    return number[rows]


def _fill_empty(sequence_ms: FloatArray, rows: IntArray, num_ranks: int, num_waves: int) -> None:
    """Gives empty rows the shortest sequence of the fullest row of their wave, which lengthens
    nothing.
    """
    counts = np.bincount(rows, minlength=num_waves * num_ranks)
    for row in np.flatnonzero(counts == 0):
        first = row - row % num_ranks
        source = first + int(counts[first : first + num_ranks].argmax())
        if counts[source] > 1:
            rows[np.flatnonzero(rows == source)[-1]] = row
            counts[source] -= 1
            counts[row] += 1


def _longest_first(
    rows: IntArray, sequence_ms: FloatArray, num_ranks: int, num_waves: int
) -> IntArray:
    """The longest wave first, so that what memory it takes is there for the others."""
    times = np.bincount(rows, weights=sequence_ms, minlength=num_waves * num_ranks)
    number = np.empty(num_waves, dtype=np.int64)
    height = times.reshape(num_waves, num_ranks).max(axis=1)
    number[np.argsort(-height, kind="stable")] = np.arange(num_waves)
    return number[rows // num_ranks] * num_ranks + rows % num_ranks


@compiled
def improve_waves(
    sequence_ms: FloatArray,
    lengths: IntArray,
    rows: IntArray,
    num_ranks: int,
    num_waves: int,
    max_tokens: int,
    enough_ms: float,
    max_evaluations: int,
) -> float:
    """Moves sequences out of the longest row of a wave, or swaps them with shorter ones of other
    rows, while the sum of longest rows falls; changes `rows`, returns the sum.
    """
    num_rows = num_waves * num_ranks
    times, tokens = np.zeros(num_rows), np.zeros(num_rows, dtype=np.int64)
    for i in range(rows.size):
        times[rows[i]] += sequence_ms[i]
        tokens[rows[i]] += lengths[i]
    others = np.zeros(num_rows)  # longest row of the wave without this one
    height = np.zeros(num_waves)
    weight = _EVENNESS / max(times.max(), 1e-300)
    left = max_evaluations
    is_better = True
    while is_better:
        is_better = False
        for wave in range(num_waves):
            _longest_others(times, others, height, num_ranks)
            if left <= 0 or height.sum() <= enough_ms:
                return float(height.sum())
            a, second, third_ms = _longest(times, wave * num_ranks, num_ranks)
            best, best_i, best_j, best_b = -EPSILON * weight * times[a] ** 2, -1, -1, -1
            for i in range(rows.size):
                if rows[i] != a:
                    continue
                left -= num_rows + rows.size
                for candidate in range(num_rows + rows.size):
                    # First every other row, for a move; then every shorter sequence, for a swap.
                    j = candidate - num_rows
                    b = candidate if j < 0 else rows[j]
                    change_ms = sequence_ms[i] - (sequence_ms[j] if j >= 0 else 0.0)
                    change = lengths[i] - (lengths[j] if j >= 0 else 0)
                    if b == a or change_ms <= 0 or tokens[b] + change > max_tokens:
                        continue
                    new_a, new_b = times[a] - change_ms, times[b] + change_ms
                    if b // num_ranks == wave:
                        rest = third_ms if b == second else others[a]
                        gain = max(new_a, new_b, rest) - height[wave]
                    else:
                        gain = max(new_a, others[a]) - height[wave]
                        gain += max(new_b, others[b]) - height[b // num_ranks]
                    # Sum of squares of the two rows, after less before.
                    gain += weight * 2 * change_ms * (new_b - times[a])
                    if gain < best:
                        best, best_i, best_j, best_b = gain, i, j, b
            if best_i < 0:
                continue
            i, j, b = best_i, best_j, best_b
            for row, sign in ((a, -1), (b, 1)):
                times[row] += sign * (sequence_ms[i] - (sequence_ms[j] if j >= 0 else 0.0))
                tokens[row] += sign * (lengths[i] - (lengths[j] if j >= 0 else 0))
            rows[i] = b
            if j >= 0:
                rows[j] = a
            is_better = True
    _longest_others(times, others, height, num_ranks)
    return float(height.sum())


@compiled
def _longest(times: FloatArray, first_row: int, num_ranks: int) -> tuple[int, int, float]:
    """The longest row of the wave from `first_row` on, the longest of the others (itself where
    there is none), and the time of the longest of the rest.
    """
    a = first_row
    for row in range(first_row, first_row + num_ranks):
        if times[row] > times[a]:
            a = row
    second, third_ms = a, 0.0
    for row in range(first_row, first_row + num_ranks):
        if row == a:
            continue
        if second == a:
            second = row
        elif times[row] > times[second]:
            third_ms = times[second]
            second = row
        else:
            third_ms = max(third_ms, times[row])
    return a, second, third_ms


@compiled
def _longest_others(
    times: FloatArray, others: FloatArray, height: FloatArray, num_ranks: int
) -> None:
    """Writes the longest row of each wave, and for each row the longest of the others there."""
    for wave in range(height.size):
        first_row = wave * num_ranks
        a, second, _ = _longest(times, first_row, num_ranks)
        height[wave] = times[a]
        others[first_row : first_row + num_ranks] = times[a]
        others[a] = times[second] if second != a else 0.0
