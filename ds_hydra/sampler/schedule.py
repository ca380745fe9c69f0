"""Time of one pipeline for micro-batches of unequal time: 1F1B, exactly, and the closed form of Eq.
(1).

Times are milliseconds. `micro_batch_ms[j]` is T of micro-batch j in one stage, forward and backward
together (App. B.2); every stage of a pipeline has the same T. A fraction `forward_fraction` of it
is the forward pass: one third, because the backward pass has two matrix products (gradients of
inputs and of weights) for each one of the forward pass. With activation checkpointing it is one
quarter.

Left out: sending activations between stages.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ds_hydra.strategy.compiled import compiled
from ds_hydra.strategy.schemes.scheme import FORWARD_FRACTION

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]
BoolArray = NDArray[np.bool_]


@compiled
def one_f_one_b_ms(micro_batch_ms: FloatArray, num_stages: int, forward_fraction: float) -> float:
    """Time from the first forward to the last backward of non-interleaved 1F1B, micro-batches in
    the given order.

    Stage s runs w = min(PP-1-s, V) warm-up forwards, then one forward and one backward in turn,
    then drains. In wave k it runs F(k) and then B(k-w), so that with waves outside and stages
    inside

        end F(s,k) = max(end of the stage's last operation, end F(s-1,k)) + f_k
        end B(s,i) = max(end of the stage's last operation, end B(s+1,i)) + b_i,    i = k - (PP-1-s)

    where B(s+1,i) belongs to wave k-1. `run_passes` is the same recurrence with a history, which
    searches, who ask very often, would pay for with two thirds of their speed. Example:
    micro-batches of 3 ms, 2 stages, 2 micro-batches: (2-1+2) * 3 = 9 ms.
    """
    num_micro_batches = micro_batch_ms.size
    if num_stages == 1 or num_micro_batches == 0:
        return float(micro_batch_ms.sum())
    stage_end = np.zeros(num_stages)
    # One more than there are stages: the last one waits for no other, and reads the 0 behind it.
    backward_end = np.zeros(num_stages + 1)
    for wave in range(num_micro_batches + num_stages - 1):
        # Stages come inside a wave, so this is the end of the stage before, in the same wave.
        forward_end = 0.0
        for stage in range(num_stages):
            if wave < num_micro_batches:
                forward_end = (
                    max(stage_end[stage], forward_end) + forward_fraction * micro_batch_ms[wave]
                )
                stage_end[stage] = forward_end
            micro_batch = wave - (num_stages - 1 - stage)
            if 0 <= micro_batch < num_micro_batches:
                # Stage + 1 wrote it one wave ago, and overwrites it in this wave, after this read.
                start = max(stage_end[stage], backward_end[stage + 1])
                stage_end[stage] = start + (1.0 - forward_fraction) * micro_batch_ms[micro_batch]
                backward_end[stage] = stage_end[stage]
    return float(stage_end[0])


@compiled
def run_passes(
    forward_ms: FloatArray,
    backward_ms: FloatArray,
    hop_ms: FloatArray,
    begin_ms: float,
    pull_ms: float,
    num_buckets: int,
    forward_start: FloatArray,
    forward_end: FloatArray,
    backward_start: FloatArray,
    backward_end: FloatArray,
) -> None:
    """Fills the starts and ends, [stage, micro-batch], of non-interleaved 1F1B.

    In wave k stage s runs F(k) and then B(k - (PP-1-s)), from `begin_ms` on, each `hop_ms` after
    its neighbour's at least: the recurrence of `one_f_one_b_ms`, with stages that differ and a
    history. `num_buckets` 0: the pull ends before anything starts; else the first forward of a
    stage of that many layers takes them as they arrive.
    """
    num_stages, num_micro_batches = forward_ms.shape
    # No stage begins before the first of its layers is there
    free = np.full(
        num_stages, max(begin_ms, pull_ms if num_buckets == 0 else pull_ms / num_buckets)
    )
    for wave in range(num_micro_batches + num_stages - 1):
        for stage in range(num_stages):
            if wave < num_micro_batches:
                start = free[stage]
                if stage > 0:
                    start = max(start, forward_end[stage - 1, wave] + hop_ms[wave])
                end = start + forward_ms[stage, wave]
                # Layers come evenly over the pull: the last one is still to be computed after it.
                if wave == 0 and num_buckets > 0:
                    end = max(end, pull_ms + forward_ms[stage, wave] / num_buckets)
                forward_start[stage, wave] = start
                forward_end[stage, wave] = end
                free[stage] = end
            micro_batch = wave - (num_stages - 1 - stage)
            if 0 <= micro_batch < num_micro_batches:
                start = free[stage]
                if stage < num_stages - 1:
                    start = max(start, backward_end[stage + 1, micro_batch] + hop_ms[micro_batch])
                backward_start[stage, micro_batch] = start
                backward_end[stage, micro_batch] = start + backward_ms[stage, micro_batch]
                free[stage] = backward_end[stage, micro_batch]


@compiled
def forward_beside_pull_ms(
    total_ms: float, computed_ms: float, forward_fraction: float, pull_ms: float
) -> float:
    """Milliseconds of the forward in a first micro-batch's `total_ms`. `computed_ms` of it is
    computation, the rest waits for transfers of its gathered layers: as long as their pull, if that
    leaves backward its computation. Where nothing waits it is a fixed fraction.
    """
    left_ms = total_ms - (1.0 - forward_fraction) * computed_ms
    return max(forward_fraction * computed_ms, min(pull_ms, left_ms))


@compiled
def _equal_stages(
    micro_batch_ms: FloatArray,
    num_stages: int,
    forward_fraction: float,
    pull_ms: float,
    num_buckets: int,
    first_computed_ms: float,
) -> FloatArray:
    """Starts and ends of forwards, starts and ends of backwards, [4, stage, micro-batch], where all
    stages have the same T.
    """
    shape = (num_stages, micro_batch_ms.size)
    forward_ms, backward_ms, times = np.empty(shape), np.empty(shape), np.empty((4, *shape))
    forward_ms[:] = forward_fraction * micro_batch_ms
    backward_ms[:] = (1.0 - forward_fraction) * micro_batch_ms
    # Forward waits for the pull of gathered layers; what that leaves is backward
    if first_computed_ms < micro_batch_ms[0]:
        forward_ms[:, 0] = forward_beside_pull_ms(
            micro_batch_ms[0], first_computed_ms, forward_fraction, pull_ms
        )
        backward_ms[:, 0] = micro_batch_ms[0] - forward_ms[:, 0]
    run_passes(
        forward_ms,
        backward_ms,
        np.zeros(micro_batch_ms.size),
        0.0,
        pull_ms,
        num_buckets,
        times[0],
        times[1],
        times[2],
        times[3],
    )
    return times


@compiled
def linked_ms(
    micro_batch_ms: FloatArray,
    num_stages: int,
    forward_fraction: float,
    pull_ms: float,
    push_ms: float,
    num_buckets: int,
    first_computed_ms: float = np.inf,
) -> float:
    """Time from the start of the pull to the end of the push, both beside 1F1B, micro-batches in
    the given order.

    A stage of K = `num_buckets` layers takes them in its first forward as they arrive, and gives
    gradients away in its last backward as they are complete (Hydraulis, Fig. 8): it begins at pull
    / K, its first forward f ends at pull + f / K or later, the push at (begin of the last backward
    b) + b / K + push or (its end) + push / K, whichever is later. `num_buckets` 0: one after the
    other, without overlap. 0.0 without micro-batches. `first_computed_ms`: what the first one
    computes, where the rest of it waits for gathered layers. Example: one micro-batch of 3 ms, one
    stage, 10 layers, pull 2 ms, push 4 ms: the forward ends at 2.1 ms instead of 1 ms, the push at
    6.3 ms.
    `lab/simulator/events.py` has the same of stages that differ.
    """
    if micro_batch_ms.size == 0:
        return 0.0
    if num_buckets == 0:
        return pull_ms + one_f_one_b_ms(micro_batch_ms, num_stages, forward_fraction) + push_ms
    times = _equal_stages(
        micro_batch_ms, num_stages, forward_fraction, pull_ms, num_buckets, first_computed_ms
    )
    start, end = times[2, :, -1], times[3, :, -1]
    last_ms = (1.0 - forward_fraction) * micro_batch_ms[-1]
    # First and last at once: its backward is what `_equal_stages` has left of it
    if micro_batch_ms.size == 1 and first_computed_ms < micro_batch_ms[0]:
        last_ms = end[0] - start[0]
    first_gradient = start + last_ms / num_buckets
    return float(np.maximum(first_gradient + push_ms, end + push_ms / num_buckets).max())


@compiled
def makespan_ms(
    micro_batch_ms: FloatArray,
    num_stages: int,
    forward_fraction: float,
    is_exact: bool,
    traffic_ms: float,
) -> float:
    """Time of one pipeline by the objective in use: the 1F1B recurrence (`is_exact`), or the closed
    form of Eq. (1), (PP - 1 + V) times the slowest micro-batch, exact where all are equal.

    `micro_batch_ms` is what micro-batches compute; each takes `traffic_ms` at least, what its
    layers move.
    """
    # A copy only where it is needed: searches ask very often
    if traffic_ms > 0.0:
        micro_batch_ms = np.maximum(micro_batch_ms, traffic_ms)
    if is_exact:
        return one_f_one_b_ms(micro_batch_ms, num_stages, forward_fraction)
    if micro_batch_ms.size == 0:
        return 0.0
    return float((num_stages - 1 + micro_batch_ms.size) * micro_batch_ms.max())


def steps_ms(times_ms: Sequence[FloatArray]) -> FloatArray:
    """Time of each step of pipelines in lockstep, [step], where pipelines take `times_ms`
    [micro-batch] each, as many as they have.

    Ranks that gather each layer together wait for each other, so the n-th micro-batches of all
    pipelines are one step, which lasts as long as the longest of them: a phase in which every
    pipeline has one micro-batch.

    >>> steps_ms([np.array([30.0, 20.0]), np.array([10.0, 60.0, 5.0])])
    array([30., 60.,  5.])
    """
    steps = np.zeros(max((times.size for times in times_ms), default=0))
    for times in times_ms:
        steps[: times.size] = np.maximum(steps[: times.size], times)
    return steps


class MicroBatchBalance(NamedTuple):
    """Best division of a 1F1B pipeline's time between V micro-batches, for every V up to
    `ratio.size - 1`.

    `ratio[V]` is a lower bound of makespan / sum of micro-batch times over all divisions into V
    micro-batches, and `share[V, :V]` a division that comes close to it: short micro-batches first
    and last, because they fill and drain the pipeline. Example: with 2 stages and 3 micro-batches,
    shares (1, 3, 2) / 6 take 1.278 of the sum, equal micro-batches 1.333.
    """

    ratio: FloatArray
    share: FloatArray


MAX_BALANCED_MICRO_BATCHES = 32
_BALANCE_STEPS = 3000
_BALANCE_RATE = 0.06
_ROUNDING = 1e-9
"""Tolerance that keeps bounds valid: far above the rounding of the sums here, far below any
difference that a planner can notice.
"""


@lru_cache(maxsize=64)
def balance_micro_batches(
    num_stages: int, forward_fraction: float = FORWARD_FRACTION
) -> MicroBatchBalance:
    """`MicroBatchBalance` of a pipeline of `num_stages`, once per process (some 30 ms)."""
    ratio = np.ones(MAX_BALANCED_MICRO_BATCHES + 1)
    share = np.zeros((MAX_BALANCED_MICRO_BATCHES + 1, MAX_BALANCED_MICRO_BATCHES))
    for num_micro_batches in range(1, MAX_BALANCED_MICRO_BATCHES + 1):
        if num_stages == 1:
            share[num_micro_batches, :num_micro_batches] = 1.0 / num_micro_batches
        else:
            ratio[num_micro_batches] = _balance(
                num_stages, forward_fraction, share[num_micro_batches, :num_micro_batches]
            )
    return MicroBatchBalance(ratio, share)


@compiled
def _balance(num_stages: int, forward_fraction: float, share: FloatArray) -> float:
    """Writes the best division of 1 ms into `share.size` micro-batches; returns a lower bound of
    its makespan.

    The makespan is the longest of many paths through the schedule, each linear in the micro-batch
    times: a matrix game between the division and a mixture of paths. Multiplicative weights: rows
    on the critical path shrink. If g is the mean of the critical paths' coefficients, then makespan
    >= g . micro-batches >= min(g) * sum of micro-batches.
    """
    num_micro_batches = share.size
    micro_batches = np.full(num_micro_batches, 1.0 / num_micro_batches)
    mean = np.zeros(num_micro_batches)
    path = np.zeros(num_micro_batches)
    path_sum = np.zeros(num_micro_batches)
    # One stage has all the work, so 1 ms is a bound to begin with
    best, bound = np.inf, 1.0
    for step in range(1, _BALANCE_STEPS + 1):
        makespan = _critical_path(micro_batches, num_stages, forward_fraction, path)
        if makespan < best:
            best = makespan
            share[:] = micro_batches
        path_sum += path
        mean += micro_batches
        # The mean of all divisions is often better than any of them, but trying it is a recurrence.
        if step % 50 == 0:
            # min(g) of the docstring; rounding must not lift it above what it bounds
            bound = max(bound, path_sum.min() / step - _ROUNDING)
            if one_f_one_b_ms(mean / step, num_stages, forward_fraction) < best:
                best = one_f_one_b_ms(mean / step, num_stages, forward_fraction)
                share[:] = mean / step
        # The last path counts twice (optimistic steps): weights circle less and converge sooner.
        # Less the least sum, which changes no share: no exponent is above 0, and none overflows.
        micro_batches = np.exp(-_BALANCE_RATE / num_stages * (path_sum + path - path_sum.min()))
        micro_batches /= micro_batches.sum()
    return bound


@compiled
def _critical_path(
    micro_batch_ms: FloatArray, num_stages: int, forward_fraction: float, path: FloatArray
) -> float:
    """Makespan of 1F1B; `path[j]` becomes how often (in units of T) micro-batch j lies on its
    longest path.

    A walk back from the last backward pass of stage 0: an operation waited for its neighbour, or
    for the operation before it in its own stage, which is the other one of the pair of its wave
    where there is one.
    """
    num_micro_batches = micro_batch_ms.size
    times = _equal_stages(micro_batch_ms, num_stages, forward_fraction, 0.0, 0, np.inf)
    # No list of predecessors is kept: which one it was follows from the start itself.
    path[:] = 0.0
    stage, micro_batch, is_backward = 0, num_micro_batches - 1, True
    while stage > 0 or micro_batch > 0 or is_backward:
        warm_up = num_stages - 1 - stage
        if is_backward:
            path[micro_batch] += 1.0 - forward_fraction
            is_paired = micro_batch + warm_up < num_micro_batches
            if is_paired:
                before = times[1, stage, micro_batch + warm_up]
            else:
                before = times[3, stage, micro_batch - 1] if micro_batch > 0 else 0.0
            # It began after its stage was free, so it waited for the stage behind
            if stage < num_stages - 1 and times[2, stage, micro_batch] > before:
                stage += 1
            elif is_paired:
                micro_batch, is_backward = micro_batch + warm_up, False
            elif micro_batch > 0:
                micro_batch -= 1
            else:
                micro_batch, is_backward = num_micro_batches - 1, False
        else:
            path[micro_batch] += forward_fraction
            is_paired = micro_batch > warm_up
            if is_paired:
                before = times[3, stage, micro_batch - 1 - warm_up]
            else:
                before = times[1, stage, micro_batch - 1] if micro_batch > 0 else 0.0
            # Nothing precedes F(0) in its stage: it waited for the stage before
            if micro_batch == 0 or times[0, stage, micro_batch] > before:
                stage -= 1
            elif is_paired:
                micro_batch, is_backward = micro_batch - 1 - warm_up, True
            else:
                micro_batch -= 1
    # F(0) of stage 0, at which the walk has ended
    path[0] += forward_fraction
    return float(times[3, 0, num_micro_batches - 1])


def ends_ms(
    times_ms: FloatArray, num_ranks: Sequence[int], num_devices: int, ranks_per_core: float
) -> FloatArray:
    """Milliseconds at which pipelines of `num_ranks` of `num_devices` ranks end that take
    `times_ms` where all ranks work all the time: [pipeline].

    Where `ranks_per_core` ranks share a core, those that are idle or done leave it to the others,
    which run up to so many times as fast (processor sharing). Nothing changes where every rank has
    a core, or a device, of its own.

    >>> ends_ms(np.array([100.0, 60.0]), [1, 1], 2, 2.0)
    array([80., 60.])
    >>> ends_ms(np.array([100.0]), [1], 2, 2.0)
    array([50.])
    """
    if ranks_per_core <= 1.0 or not times_ms.size:
        return times_ms
    # Between two ends the same ranks run, all at one speed: piecewise linear, from end to end.
    order = np.argsort(times_ms, kind="stable")
    # Ranks of the pipelines that run until each end: its own and those that end after it.
    running = np.array(num_ranks)[order][::-1].cumsum()[::-1]
    # No rank is faster than with a core for itself
    speed = np.minimum(ranks_per_core, num_devices / running)
    ends = np.empty_like(times_ms)
    ends[order] = np.cumsum(np.diff(times_ms[order], prepend=0.0) / speed)
    return ends
