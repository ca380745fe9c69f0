"""Which layers each pipeline stage gets: Galvatron-BMW, §IV-B.

A partition is the number of layers of each stage, in order; every stage has at least one.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.float64]
Partition = tuple[int, ...]


def even_partition(num_layers: int, num_stages: int) -> Partition:
    """As many layers for each stage as possible alike; the first stages take what is left over."""
    share, rest = divmod(num_layers, num_stages)
    return tuple(share + (stage < rest) for stage in range(num_stages))


def balanced_partition(weight: FloatArray, extra: FloatArray) -> Partition:
    """The contiguous partition whose heaviest stage is lightest.

    `weight[P, L]` is what layer l adds to stage p, `extra[P]` what the stage has of its own. Exact,
    O(P L^2).
    """
    num_stages, num_layers = weight.shape
    below = np.concatenate([np.zeros((num_stages, 1)), np.cumsum(weight, axis=1)], axis=1)
    heaviest = np.full((num_stages + 1, num_layers + 1), np.inf)
    begin = np.zeros((num_stages + 1, num_layers + 1), dtype=np.int64)
    heaviest[0, 0] = 0.0
    for stage in range(1, num_stages + 1):
        for end in range(stage, num_layers - (num_stages - stage) + 1):
            starts = np.arange(stage - 1, end)
            own = below[stage - 1, end] - below[stage - 1, starts] + extra[stage - 1]
            worst = np.maximum(heaviest[stage - 1, starts], own)
            best = int(np.argmin(worst))
            heaviest[stage, end], begin[stage, end] = worst[best], starts[best]
    sizes, end = [], num_layers
    for stage in range(num_stages, 0, -1):
        sizes.append(end - int(begin[stage, end]))
        end = int(begin[stage, end])
    return tuple(reversed(sizes))


def lighter_partitions(partition: Partition, slowest: int) -> list[Partition]:
    """`partition` with one boundary layer of stage `slowest` moved to a neighbour
    (PP_Partition_Adjust).
    """
    moved = []
    for neighbour in (slowest - 1, slowest + 1):
        if 0 <= neighbour < len(partition) and partition[slowest] > 1:
            sizes = list(partition)
            sizes[slowest] -= 1
            sizes[neighbour] += 1
            moved.append(tuple(sizes))
    return moved


def balance_degree(loads: Sequence[float]) -> float:
    """alpha of Eq. 6: 1 - max / sum; 1 - 1 / P is perfect balance."""
    return 1.0 - max(loads) / sum(loads) if sum(loads) > 0 else 0.0


def layer_ranges(partition: Partition) -> list[tuple[int, int]]:
    """(first layer, end) of every stage."""
    ends = np.cumsum(partition).tolist()
    return [(end - size, end) for size, end in zip(partition, ends, strict=True)]
