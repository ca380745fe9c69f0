"""What pipelines wait for each other where all ranks gather layers for every pass."""

from __future__ import annotations

import numpy as np

from ds_hydra.sampler.problem import DispatchProblem
from ds_hydra.sampler.schedule import FloatArray, IntArray


def lockstep_wait_ms(
    problem: DispatchProblem, assignment: IntArray, micro_batches: IntArray, value: FloatArray
) -> float:
    """What the steps of all pipelines take longer than the slowest pipeline alone (`value`): the
    n-th micro-batches of all pipelines run together, each step as long as its longest.

    0.0 where no pipeline has more than one.
    """
    if not micro_batches.size or not micro_batches.max():
        return 0.0
    steps = np.zeros(int(micro_batches.max()) + 1)
    for pipeline, kind in enumerate(problem.kind_of):
        members = np.flatnonzero(assignment == pipeline)
        numbers = micro_batches[members]
        if members.size:
            times = np.bincount(
                numbers, weights=problem.sequence_ms[kind, members], minlength=steps.size
            )
            times = np.maximum(times + problem.constant_ms[kind], problem.traffic_ms[kind])
            is_there = np.bincount(numbers, minlength=steps.size) > 0
            steps = np.maximum(steps, np.where(is_there, times, 0.0))
    return max(0.0, float(steps.sum() - value.max()))
