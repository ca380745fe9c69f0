"""Placement of sequences by other systems: first-fit-decreasing micro-batches dealt out evenly.

Lengths are given in descending order; results are arrays of micro-batch numbers in that order.
"""

from __future__ import annotations

import numpy as np

from ds_hydra.sampler.schedule import IntArray
from ds_hydra.strategy.compiled import compiled


@compiled
def first_fit_decreasing(
    lengths: IntArray, micro_batch_tokens: int, micro_batches: IntArray
) -> int:
    """Writes the micro-batch of each sequence, the first with room for it; returns how many
    micro-batches there are.

    `lengths` descend and none is above `micro_batch_tokens`. Example: 6, 5, 4, 3 into micro-batches
    of 9: micro-batches 0, 1, 1, 0.
    """
    free = np.empty(lengths.size, dtype=np.int64)
    num_micro_batches = 0
    for i in range(lengths.size):
        micro_batch = 0
        while micro_batch < num_micro_batches and free[micro_batch] < lengths[i]:
            micro_batch += 1
        if micro_batch == num_micro_batches:
            free[micro_batch] = micro_batch_tokens
            num_micro_batches += 1
        free[micro_batch] -= lengths[i]
        micro_batches[i] = micro_batch
    return num_micro_batches


MicroBatches = list[IntArray]
"""Packed micro-batches of one pipeline, each an array of positions in the descending lengths."""


def pack_fixed_length(
    lengths: IntArray, micro_batch_tokens: int, num_pipelines: int
) -> list[MicroBatches]:
    """First-fit-decreasing micro-batches of at most `micro_batch_tokens`, dealt to the pipelines in
    turn (Megatron-LM).
    """
    micro_batch_of = np.zeros(lengths.size, dtype=np.int64)
    micro_batches = _members(
        micro_batch_of, first_fit_decreasing(lengths, micro_batch_tokens, micro_batch_of)
    )
    return [micro_batches[pipeline::num_pipelines] for pipeline in range(num_pipelines)]


def pack_evenly(
    lengths: IntArray, micro_batch_tokens: int, num_pipelines: int
) -> list[MicroBatches]:
    """The same number of micro-batches for each pipeline, longest sequence first to the one with
    fewest tokens, and longest micro-batch first to the pipeline with fewest.

    So no last micro-batch is left nearly empty. As `pack_fixed_length` where a sequence does not
    fit that way.
    """
    micro_batch_of = np.zeros(lengths.size, dtype=np.int64)
    fewest = first_fit_decreasing(lengths, micro_batch_tokens, micro_batch_of)
    count = -(-fewest // num_pipelines) * num_pipelines
    if not count or not emptiest_first(lengths, micro_batch_tokens, count, micro_batch_of):
        return pack_fixed_length(lengths, micro_batch_tokens, num_pipelines)
    micro_batches = [m for m in _members(micro_batch_of, count) if m.size]
    tokens = np.array([lengths[members].sum() for members in micro_batches])
    order = np.argsort(-tokens, kind="stable")
    pipeline_of = np.zeros(order.size, dtype=np.int64)
    emptiest_first(tokens[order], int(tokens.sum()), num_pipelines, pipeline_of)
    return [
        [micro_batches[k] for k in order[pipeline_of == pipeline]]
        for pipeline in range(num_pipelines)
    ]


@compiled
def emptiest_first(lengths: IntArray, room: int, num_bins: int, bins: IntArray) -> bool:
    """Writes the bin of each item, the one with least in it; False where it has no room."""
    filled = np.zeros(num_bins, dtype=np.int64)
    for i in range(lengths.size):
        emptiest = np.argmin(filled)
        if filled[emptiest] + lengths[i] > room:
            return False
        filled[emptiest] += lengths[i]
        bins[i] = emptiest
    return True


def _members(micro_batch_of: IntArray, num_micro_batches: int) -> MicroBatches:
    order = np.argsort(micro_batch_of, kind="stable")
    ends = np.bincount(micro_batch_of, minlength=num_micro_batches).cumsum().tolist()
    return [order[begin:end] for begin, end in zip([0, *ends], ends)]
