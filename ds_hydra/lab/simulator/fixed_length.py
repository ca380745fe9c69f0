"""Placement of sequences by other systems: first-fit-decreasing micro-batches dealt out evenly, and
Karmarkar-Karp balance.

Lengths are given in descending order; results are arrays of micro-batch or group numbers in that
order.
"""

from __future__ import annotations

from heapq import heapify, heappop, heappush

import numpy as np

from ds_hydra.sampler.schedule import FloatArray, IntArray
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


_FEW_GROUPS = 15
"""Number of groups up to which insertion is fastest, and numpy's own way: it is stable."""


@compiled
def _sort_in_place(sums: FloatArray, first: IntArray, last: IntArray) -> None:
    for i in range(1, sums.size):
        own, own_first, own_last, k = sums[i], first[i], last[i], i
        while k > 0 and own < sums[k - 1]:
            sums[k], first[k], last[k] = sums[k - 1], first[k - 1], last[k - 1]
            k -= 1
        sums[k], first[k], last[k] = own, own_first, own_last


@compiled
def karmarkar_karp(weights: FloatArray, num_groups: int, groups: IntArray) -> None:
    """Writes the group of each item so that the groups' sums are close: the largest differencing
    method.

    Every item begins as a division of its own into one full and empty groups. The two divisions
    with the largest spread are merged, the largest group of one with the smallest of the other,
    until one is left.
    """
    num_items = weights.size
    sums = np.zeros((num_items, num_groups))
    first = np.full((num_items, num_groups), -1, dtype=np.int64)  # items of a group: a linked list
    last = np.full((num_items, num_groups), -1, dtype=np.int64)
    following = np.full(num_items, -1, dtype=np.int64)
    # Largest spread first, of equal ones the first: pairs (-spread, item) in a heap.
    open_ = [(-weights[i], i) for i in range(num_items)]
    heapify(open_)
    for i in range(num_items):
        sums[i, num_groups - 1] = weights[i]
        first[i, num_groups - 1] = i
        last[i, num_groups - 1] = i
    for _ in range(num_items - 1):
        a, b = heappop(open_)[1], heappop(open_)[1]
        for k in range(num_groups):
            j = num_groups - 1 - k
            sums[a, k] += sums[b, j]
            if first[b, j] >= 0:
                if first[a, k] < 0:
                    first[a, k] = first[b, j]
                else:
                    following[last[a, k]] = first[b, j]
                last[a, k] = last[b, j]
        if num_groups <= _FEW_GROUPS:
            _sort_in_place(sums[a], first[a], last[a])
        else:
            order = np.argsort(sums[a])
            sums[a] = sums[a][order]
            first[a] = first[a][order]
            last[a] = last[a][order]
        heappush(open_, (sums[a, 0] - sums[a, num_groups - 1], a))
    root = open_[0][1]
    for k in range(num_groups):
        item = first[root, k]
        while item >= 0:
            groups[item] = k
            item = following[item]


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


def balanced_groups(weights: FloatArray, num_groups: int) -> list[IntArray]:
    """The items of each group, by Karmarkar-Karp."""
    group = np.zeros(weights.size, dtype=np.int64)
    if weights.size:
        karmarkar_karp(weights, num_groups, group)
    return [np.flatnonzero(group == number) for number in range(num_groups)]


def _members(micro_batch_of: IntArray, num_micro_batches: int) -> MicroBatches:
    order = np.argsort(micro_batch_of, kind="stable")
    ends = np.bincount(micro_batch_of, minlength=num_micro_batches).cumsum().tolist()
    return [order[begin:end] for begin, end in zip([0, *ends], ends)]
