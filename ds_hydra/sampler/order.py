"""In which order sequences and pipelines are tried, and when one time is better than another; the
same on every machine.
"""

from __future__ import annotations

import numpy as np

from ds_hydra.sampler.schedule import FloatArray, IntArray
from ds_hydra.strategy.compiled import compiled

EPSILON = 1e-9
"""Relative improvement below which two times count as equal: rounding must not decide."""


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
