"""A packing made faster: sequences change rows, rows change places, while the objective falls."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from ds_hydra.sampler.order import EPSILON, shuffled_order
from ds_hydra.sampler.packing.packing_bounds import PipelineCost
from ds_hydra.sampler.schedule import FloatArray, IntArray, makespan_ms
from ds_hydra.strategy.compiled import compiled

_NUM_PERTURBED = 4


@compiled
def row_times_ms(
    sequence_ms: FloatArray, rows: IntArray, num_rows: int, constant_ms: float
) -> FloatArray:
    """T of every row: the constant once, and the costs of its sequences."""
    times = np.full(num_rows, constant_ms)
    for i in range(rows.size):
        times[rows[i]] += sequence_ms[i]
    return times


class _RowState(NamedTuple):
    """Rows while they are improved: time, tokens and number of sequences of each."""

    times: FloatArray
    tokens: IntArray
    counts: IntArray


@compiled
def improve_rows(
    sequence_ms: FloatArray,
    lengths: IntArray,
    rows: IntArray,
    num_rows: int,
    cost: PipelineCost,
    num_evaluations: int,
) -> float:
    """Moves and swaps sequences, and swaps rows, while the objective falls; returns it.

    The number of rows stays. In the closed form only sequences of the slowest row are worth looking
    at, and the order of rows does not count.
    """
    times = row_times_ms(sequence_ms, rows, num_rows, cost.constant_ms)
    state = _RowState(times, np.zeros(num_rows, dtype=np.int64), np.zeros(num_rows, dtype=np.int64))
    for i in range(rows.size):
        state.tokens[rows[i]] += lengths[i]
        state.counts[rows[i]] += 1
    best = makespan_ms(
        times, cost.num_stages, cost.forward_fraction, cost.is_exact, cost.traffic_ms
    )
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
    """Swaps the places of two rows wherever that helps; returns the objective and evaluations
    left.
    """
    for a in range(state.times.size):
        for b in range(a + 1, state.times.size):
            if left <= 0:
                return best, left
            state.times[a], state.times[b] = state.times[b], state.times[a]
            value = makespan_ms(
                state.times, cost.num_stages, cost.forward_fraction, cost.is_exact, cost.traffic_ms
            )
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
    """Moves sequence `i` to any row where that helps; returns the objective and evaluations
    left.
    """
    for target in range(state.times.size):
        source = rows[i]
        if left <= 0 or state.counts[source] == 1:
            break
        if target == source or state.tokens[target] + lengths[i] > cost.max_len_tokens:
            continue
        state.times[source] -= sequence_ms[i]
        state.times[target] += sequence_ms[i]
        value = makespan_ms(
            state.times, cost.num_stages, cost.forward_fraction, cost.is_exact, cost.traffic_ms
        )
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
    """Swaps sequence `i` with shorter ones where that helps; returns the objective and evaluations
    left.
    """
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
        value = makespan_ms(
            state.times, cost.num_stages, cost.forward_fraction, cost.is_exact, cost.traffic_ms
        )
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
def perturb(lengths: IntArray, rows: IntArray, num_rows: int, max_len: int, seed: int) -> None:
    """Moves a few sequences, chosen by `seed`, to other rows that can hold them, out of a local
    optimum.
    """
    order = shuffled_order(lengths, 1e6, seed)
    targets = shuffled_order(
        np.ones(min(lengths.size, _NUM_PERTURBED), dtype=np.int64), 1e6, seed + 1
    )
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
