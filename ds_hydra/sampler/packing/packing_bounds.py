"""How fast a pipeline can be at best, whatever way its sequences are packed (Eq. 1, App. C)."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from ds_hydra.sampler.schedule import (
    MAX_BALANCED_MICRO_BATCHES,
    FloatArray,
    IntArray,
    MicroBatchBalance,
)
from ds_hydra.strategy.compiled import compiled


class PipelineCost(NamedTuple):
    """What packing has to know about a pipeline besides its sequences."""

    num_stages: int
    constant_ms: float
    traffic_ms: float
    max_len_tokens: int
    forward_fraction: float
    is_exact: bool
    balance: MicroBatchBalance


@compiled
def min_num_micro_batches(lengths: IntArray, max_len: int) -> int:
    """Lower bound of the micro-batches that hold `lengths` (descending), each of them at most
    `max_len`.

    Bound L2 of Martello and Toth: for a threshold k, sequences above max_len - k share their
    micro-batch with nothing of k or more, those above max_len / 2 need a micro-batch each, the rest
    fills what these leave free.
    """
    best = -(-lengths.sum() // max_len)
    for threshold in lengths:
        if 2 * threshold > max_len:  # two of these never share a micro-batch: counted below
            continue
        alone, half, half_tokens, rest_tokens = 0, 0, 0, 0
        for length in lengths:
            if length > max_len - threshold:
                alone += 1
            elif 2 * length > max_len:
                half += 1
                half_tokens += length
            elif length >= threshold:
                rest_tokens += length
        # Half-full micro-batches take what they have room for; what is over needs new ones.
        overflow = max(0, rest_tokens - (half * max_len - half_tokens))
        best = max(best, alone + half + -(-overflow // max_len))
    half = 0
    for length in lengths:
        half += 2 * length > max_len
    return int(max(best, half))


@compiled
def micro_batch_count_bound_ms(
    num_micro_batches: int, load_ms: float, longest_ms: float, cost: PipelineCost
) -> float:
    """Lower bound of the objective with `num_micro_batches` micro-batches; sequences cost
    `load_ms`, the longest `longest_ms`.

    Closed form: max(longest, load/V) + c, times PP-1+V. Exact, the largest of three. By either, V
    micro-batches of nothing but traffic take PP-1+V times that.

    - No division into V micro-batches beats `MicroBatchBalance.ratio`.
    - Some stage is busy with all micro-batches, while the first and the last one also pass the
      other PP-1 stages.
    - The micro-batch of the longest sequence passes all stages forward and backward. On stage 0
      meanwhile, earlier micro-batches may run backward and later ones forward, but the forward
      passes of the former come before and the backward passes of the latter after it: PP t_longest
      + min(phi, 1-phi) (all other micro-batches).
    """
    num_stages, constant = cost.num_stages, cost.constant_ms
    traffic = (num_stages - 1 + num_micro_batches) * cost.traffic_ms
    if not cost.is_exact:
        slowest = max(longest_ms, load_ms / num_micro_batches) + constant
        return float(max(traffic, slowest * (num_stages - 1 + num_micro_batches)))
    work = load_ms + num_micro_batches * constant
    if num_stages == 1:
        return float(max(traffic, work))
    ratio = (
        1.0
        if num_micro_batches > MAX_BALANCED_MICRO_BATCHES
        else cost.balance.ratio[num_micro_batches]
    )
    outside = min(cost.forward_fraction, 1.0 - cost.forward_fraction)
    around_longest = (num_stages - outside) * (longest_ms + constant) + outside * work
    return float(max(traffic, work * ratio, work + (num_stages - 1) * constant, around_longest))


@compiled
def pipeline_bound_ms(lengths: IntArray, sequence_ms: FloatArray, cost: PipelineCost) -> float:
    """Lower bound of the objective over every packing of these sequences (descending)."""
    if lengths.size == 0:
        return 0.0
    load, longest = sequence_ms.sum(), sequence_ms.max()
    best = np.inf
    for num_micro_batches in range(
        min_num_micro_batches(lengths, cost.max_len_tokens), lengths.size + 1
    ):
        best = min(best, micro_batch_count_bound_ms(num_micro_batches, load, longest, cost))
    return float(best)
