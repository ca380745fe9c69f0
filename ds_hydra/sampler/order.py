"""In which order sequences are tried, and when one time is better than another; the same on every
machine.
"""

from __future__ import annotations

import numpy as np

from ds_hydra.sampler.schedule import IntArray
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
