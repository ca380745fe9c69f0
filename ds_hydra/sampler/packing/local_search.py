"""A packing made faster: sequences change micro-batches, micro-batches change places, while the
objective falls.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from ds_hydra.sampler.packing.packing_bounds import PipelineCost
from ds_hydra.sampler.problem import EPSILON, shuffled_order
from ds_hydra.sampler.schedule import FloatArray, IntArray, makespan_ms
from ds_hydra.strategy.compiled import compiled

_NUM_PERTURBED = 4


@compiled
def micro_batch_times_ms(
    sequence_ms: FloatArray, micro_batches: IntArray, num_micro_batches: int, constant_ms: float
) -> FloatArray:
    """T of every micro-batch: the constant once, and the costs of its sequences."""
    times = np.full(num_micro_batches, constant_ms)
    for i in range(micro_batches.size):
        times[micro_batches[i]] += sequence_ms[i]
    return times


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
    times = micro_batch_times_ms(sequence_ms, micro_batches, num_micro_batches, cost.constant_ms)
    state = _MicroBatchState(
        times,
        np.zeros(num_micro_batches, dtype=np.int64),
        np.zeros(num_micro_batches, dtype=np.int64),
    )
    for i in range(micro_batches.size):
        state.tokens[micro_batches[i]] += lengths[i]
        state.counts[micro_batches[i]] += 1
    best = makespan_ms(
        times, cost.num_stages, cost.forward_fraction, cost.is_exact, cost.traffic_ms
    )
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
            value = makespan_ms(
                state.times, cost.num_stages, cost.forward_fraction, cost.is_exact, cost.traffic_ms
            )
            left -= 1
            if value < best * (1 - EPSILON):
                best = value
                state.tokens[a], state.tokens[b] = state.tokens[b], state.tokens[a]
                state.counts[a], state.counts[b] = state.counts[b], state.counts[a]
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
        source = micro_batches[i]
        # The last sequence stays: how many micro-batches there are is decided elsewhere.
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
        if source == target or tokens == 0 or state.tokens[target] + tokens > cost.max_len_tokens:
            continue
        delta = sequence_ms[i] - sequence_ms[j]
        # Taking back adds the same number again: rounding stays below what EPSILON lets count.
        state.times[source] -= delta
        state.times[target] += delta
        value = makespan_ms(
            state.times, cost.num_stages, cost.forward_fraction, cost.is_exact, cost.traffic_ms
        )
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
        target = (micro_batches[i] + 1 + targets[k]) % num_micro_batches
        if tokens[target] + lengths[i] <= max_len:
            tokens[micro_batches[i]] -= lengths[i]
            tokens[target] += lengths[i]
            micro_batches[i] = target
