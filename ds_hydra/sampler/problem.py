"""One mini-batch and the pipelines of one strategy, as the arrays that compiled code works on; in
which order they are tried, and when one time is better than another.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from ds_hydra.sampler.schedule import FloatArray, IntArray, balance_micro_batches
from ds_hydra.strategy.compiled import compiled
from ds_hydra.strategy.profiles.profile import LatencyModel
from ds_hydra.strategy.schemes.scheme import FORWARD_FRACTION

EPSILON = 1e-9
"""Relative improvement below which two times count as equal: rounding must not decide."""


class PipelineKind(NamedTuple):
    """`num_pipelines` interchangeable pipelines: same scheme, same MaxLen."""

    num_pipelines: int
    num_stages: int
    max_len_tokens: int
    latency: LatencyModel


class DispatchProblem(NamedTuple):
    """Sequences (descending) and pipelines of one strategy.

    `kind_of[j]` is the kind of pipeline j; pipelines of one kind are consecutive. `sequence_ms[k,
    i]` is a l^2 + b l of sequence i on kind k; no micro-batch takes less than `traffic_ms[k]`;
    `ratio[k]` and `share[k]` are its `MicroBatchBalance`. A pipeline is valued by Eq. (2) without
    the constant of T (`is_eq2`), as in Eq. (3), or else by the time that an even packing will take,
    which is what the planner needs: by the closed form, or nearly by the 1F1B recurrence
    (`is_exact`).
    """

    lengths: IntArray
    sequence_ms: FloatArray
    kind_of: IntArray
    num_stages: IntArray
    constant_ms: FloatArray
    traffic_ms: FloatArray
    max_len_tokens: IntArray
    ratio: FloatArray
    share: FloatArray
    forward_fraction: float
    is_exact: bool
    is_eq2: bool


def make_problem(
    lengths: IntArray,
    kinds: Sequence[PipelineKind],
    *,
    forward_fraction: float = FORWARD_FRACTION,
    is_exact: bool = True,
    is_eq2: bool = False,
) -> DispatchProblem:
    """The problem of dispatching `lengths` (descending) to the pipelines of `kinds`."""
    latency = [kind.latency for kind in kinds]
    balance = [balance_micro_batches(kind.num_stages, forward_fraction) for kind in kinds]
    return DispatchProblem(
        lengths=np.array(lengths, dtype=np.int64),
        sequence_ms=np.array([t.sequences_ms(lengths) for t in latency]),
        kind_of=np.repeat(np.arange(len(kinds)), [kind.num_pipelines for kind in kinds]),
        num_stages=np.array([kind.num_stages for kind in kinds], dtype=np.int64),
        constant_ms=np.array([0.0 if is_eq2 else t.constant_ms for t in latency], dtype=np.float64),
        traffic_ms=np.array([0.0 if is_eq2 else t.traffic_ms for t in latency], dtype=np.float64),
        max_len_tokens=np.array([kind.max_len_tokens for kind in kinds], dtype=np.int64),
        ratio=np.array([b.ratio for b in balance]),
        share=np.array([b.share for b in balance]),
        forward_fraction=forward_fraction,
        is_exact=is_exact,
        is_eq2=is_eq2,
    )


@compiled
def shuffled_order(lengths: IntArray, spread: float, seed: int) -> IntArray:
    """Positions of `lengths` by descending length, where each length is first scaled by 1 to 1 +
    `spread`.

    `spread` 0 sorts, a large one shuffles. The generator is a small LCG of its own, so that a seed
    means the same order everywhere.
    """
    keys = np.empty(lengths.size)
    state = seed % 2**31
    for i in range(lengths.size):
        state = (state * 1103515245 + 12345) % 2**31
        keys[i] = -lengths[i] * (1.0 + spread * state / 2**31)
    return np.argsort(keys, kind="mergesort")


@compiled
def sift_down(heap: IntArray, value: FloatArray) -> None:
    """Restores the order of a heap of positions in `value`, the smallest value on top, after the
    value of the top one has grown.
    """
    parent = 0
    while 2 * parent + 1 < heap.size:
        child = 2 * parent + 1
        if child + 1 < heap.size and value[heap[child + 1]] < value[heap[child]]:
            child += 1
        if value[heap[parent]] <= value[heap[child]]:
            return
        heap[parent], heap[child] = heap[child], heap[parent]
        parent = child
