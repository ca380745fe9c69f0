"""Times that scatter: of single micro-batches, and of ranks for a whole iteration."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import numpy as np

from ds_hydra.records.events import Scatter
from ds_hydra.sampler.schedule import FloatArray

_LEAST = 0.2
"""What is left of a time at least, however far it was drawn from the mean."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Noise:
    """Standard deviations of what times are multiplied with, normal around 1: of each micro-batch
    of a group of ranks, and of each rank in an iteration, of which the slowest of a group counts.

    `is_planned_for`: ds_hydra's planner knows `of_micro_batch`.
    """

    of_micro_batch: float = 0.0
    of_rank: float = 0.0
    is_planned_for: bool = True
    seed: int = 0

    def drawn(self, iteration: int, num_devices: int) -> Scatter:
        """What becomes of the times of one iteration, step by step."""
        generator = np.random.Generator(np.random.PCG64([self.seed, iteration]))
        of_ranks = 1 + self.of_rank * generator.standard_normal(num_devices)

        def scatter(
            times_ms: Sequence[FloatArray], ranks: Sequence[Sequence[int]]
        ) -> list[FloatArray]:
            found = []
            for own, of_group in zip(times_ms, ranks, strict=True):
                each = 1 + self.of_micro_batch * generator.standard_normal(own.size)
                slowest = of_ranks[list(of_group)].max()
                found.append(own * np.maximum(_LEAST, slowest * each))
            return found

        return scatter


def neighbours(sizes: Iterable[int]) -> list[range]:
    """Ranks of groups of these sizes side by side."""
    ends = [0, *accumulate(sizes)]
    return [range(*pair) for pair in pairwise(ends)]
