"""How much slower computation and gradient synchronisation run beside each other: Galvatron-BMW,
§V.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable

import torch
import torch.distributed as dist

from ds_hydra.engine.profiling.profile_document import ProbeMicroBatch, layer_params
from ds_hydra.engine.profiling.profiler import measure_stage_ms
from ds_hydra.engine.propagation import Propagator
from ds_hydra.engine.transfer.link_thread import DeviceClock
from ds_hydra.strategy import Strategy

_MESSAGE_BYTES = 25 << 20
"""At most this much in one all-reduce, as in the buckets of torch's DDP."""
_MAX_MESSAGES = 4096
_LEAST_SHARE = 0.2
"""Of the longer one that the shorter one must last: the slowdown is a small difference of long
times otherwise.
"""


def overlap_slowdown(compute_ms: float, collective_ms: float, both_ms: float) -> float:
    """How many times as long either takes while both run, at least 1.

    They begin together, and the longer one ends alone. 0.0 where one is too short to tell.

    >>> round(overlap_slowdown(compute_ms=100, collective_ms=60, both_ms=60 * 1.3 + 40), 3)
    1.3
    >>> overlap_slowdown(compute_ms=100, collective_ms=10, both_ms=103)
    0.0
    """
    together, longer = sorted((compute_ms, collective_ms))
    if together < _LEAST_SHARE * longer:
        return 0.0
    return max(1.0, (both_ms - (longer - together)) / together)


def measure_overlap_slowdown(
    propagator: Propagator, strategy: Strategy, length: int, *, device: torch.device, repeats: int
) -> float:
    """The slowdown of a micro-batch of `length` tokens under `strategy` beside all-reduces of about
    as many milliseconds.

    Medians of `repeats` rounds that time each alone and both; 0.0 where even thousands of
    all-reduces are too short beside the micro-batch. Collective over all ranks, equal on all. The
    all-reduces have a process group of their own, besides those of the propagator, so that they
    wait for nothing else, and one buffer: nobody reads what is in it.
    """
    stage_model = propagator.stage_model
    dtype = stage_model.params[0].dtype
    most = _MESSAGE_BYTES // dtype.itemsize
    message = torch.zeros(min(most, int(layer_params(stage_model))), dtype=dtype, device=device)
    group = dist.new_group()
    clock = DeviceClock(device)
    count = 1

    def synchronize() -> list[dist.Work]:
        return [dist.all_reduce(message, group=group, async_op=True) for _ in range(count)]

    def collective_ms() -> float:
        dist.barrier()
        begin = clock.stamp()
        for work in synchronize():
            work.wait()
        end = clock.stamp()
        clock.settle(end)
        return propagator.max_over_ranks(clock.ms_between(begin, end))

    def micro_batch_ms(beside: Callable[[], Iterable[dist.Work]] = tuple) -> float:
        passes = 2 * strategy.schemes[0].pp - 1
        return passes * measure_stage_ms(
            propagator, strategy, ProbeMicroBatch(length), beside=beside
        )

    try:
        micro_batch_ms()  # compiles and allocates
        collective_ms()  # connects the ranks
        count = max(1, min(_MAX_MESSAGES, round(micro_batch_ms() / collective_ms())))
        rounds = [
            (micro_batch_ms(), collective_ms(), micro_batch_ms(beside=synchronize))
            for _ in range(repeats)
        ]
    finally:
        dist.destroy_process_group(group)
    return overlap_slowdown(*map(statistics.median, zip(*rounds, strict=True)))
