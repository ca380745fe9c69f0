"""How much slower computation and gradient synchronisation run beside each other: Galvatron-BMW, §V."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable

import torch
import torch.distributed as dist

from ds_hydra.engine.link_session import DeviceClock
from ds_hydra.engine.profile_document import ProbeRow, layer_params
from ds_hydra.engine.profiler import stage_ms
from ds_hydra.engine.propagation import Propagator
from ds_hydra.strategy import Strategy

_MESSAGE_BYTES = 25 << 20
"""At most this much in one all-reduce, as in the buckets of torch's DDP."""
_MAX_MESSAGES = 32


def overlap_slowdown(compute_ms: float, collective_ms: float, both_ms: float) -> float:
    """How many times as long either takes while both run, at least 1.

    They begin together, and the longer one ends alone.

    >>> round(overlap_slowdown(compute_ms=100, collective_ms=60, both_ms=60 * 1.3 + 40), 3)
    1.3
    """
    together = min(compute_ms, collective_ms)
    return max(1.0, (both_ms - abs(compute_ms - collective_ms)) / together)


def measure_overlap_slowdown(
    propagator: Propagator, strategy: Strategy, length: int, *, device: torch.device, repeats: int
) -> float:
    """The slowdown of a row of `length` tokens under `strategy` beside all-reduces of about as many milliseconds.

    Medians of `repeats` rounds that time each alone and both. Collective over all ranks, equal on all; makes a process
    group of its own, so that the all-reduces wait for nothing else.
    """
    skeleton = propagator.skeleton
    dtype = skeleton.params[0].dtype
    most = _MESSAGE_BYTES // dtype.itemsize
    message = torch.zeros(min(most, int(layer_params(skeleton))), dtype=dtype, device=device)
    group = dist.new_group()
    clock = DeviceClock(device)
    messages = [message]

    def synchronize() -> list[dist.Work]:
        return [dist.all_reduce(sent, group=group, async_op=True) for sent in messages]

    def collective_ms() -> float:
        dist.barrier()
        begin = clock.stamp()
        for work in synchronize():
            work.wait()
        return propagator.max_over_ranks(clock.ms_between(begin, clock.stamp()))

    def row_ms(beside: Callable[[], Iterable[dist.Work]] = tuple) -> float:
        passes = 2 * strategy.schemes[0].pp - 1
        return passes * stage_ms(propagator, strategy, ProbeRow(length), beside=beside)

    try:
        collective_ms()  # connects the ranks
        count = round(row_ms() / collective_ms())
        messages += [torch.zeros_like(message) for _ in range(min(_MAX_MESSAGES, count) - 1)]
        rounds = [(row_ms(), collective_ms(), row_ms(beside=synchronize)) for _ in range(repeats)]
    finally:
        dist.destroy_process_group(group)
    return overlap_slowdown(*map(statistics.median, zip(*rounds, strict=True)))
