"""How others place sequences on equal pipelines: micro-batches of a fixed length, balanced groups,
and transformers' own sampler.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from workloads import karmarkar_karp

MicroBatches = list[list[int]]
"""Packed micro-batches of one pipeline, as sequence lengths."""


def fixed_length(
    lengths: Sequence[int], max_len: int, num_pipelines: int, *, is_best_fit: bool
) -> list[MicroBatches]:
    """First-fit or best-fit decreasing into micro-batches of `max_len`; micro-batches are dealt out
    in turn.
    """
    micro_batches: MicroBatches = []
    for length in sorted(lengths, reverse=True):
        fitting = [
            micro_batch for micro_batch in micro_batches if sum(micro_batch) + length <= max_len
        ]
        if not fitting:
            micro_batches.append([length])
        elif is_best_fit:
            max(fitting, key=sum).append(length)
        else:
            fitting[0].append(length)
    return [micro_batches[pipeline::num_pipelines] for pipeline in range(num_pipelines)]


def divide(lengths: Sequence[int], num_groups: int, weight: Callable[[int], float]) -> MicroBatches:
    """`lengths` in groups of close sums of `weight`."""
    groups = karmarkar_karp([weight(length) for length in lengths], num_groups)
    return [[lengths[index] for index in group] for group in groups]


def balanced(
    lengths: Sequence[int], max_len: int, num_pipelines: int, weight: Callable[[int], float]
) -> list[MicroBatches]:
    """Karmarkar-Karp over the pipelines, and again inside each into the fewest micro-batches that
    hold its share.
    """
    pipelines = []
    for share in divide(lengths, num_pipelines, weight):
        num_micro_batches = max(1, -(-sum(share) // max_len))
        while share:
            micro_batches = divide(share, num_micro_batches, weight)
            if all(sum(micro_batch) <= max_len for micro_batch in micro_batches):
                break
            num_micro_batches += 1
        pipelines.append(
            [micro_batch for micro_batch in micro_batches if micro_batch] if share else []
        )
    return pipelines


def batch_rebalance(
    lengths: Sequence[int], max_len: int, num_pipelines: int, num_micro_batches: int
) -> list[MicroBatches]:
    """`train_sampling_strategy="batch_rebalance"` of transformers, micro-batches padded to their
    longest sequence.

    It knows no memory limit, so padded micro-batches above `max_len` are divided until they fit.
    """
    from transformers.trainer_pt_utils import BatchRebalanceSampler

    num_micro_batches = min(num_micro_batches, len(lengths) // num_pipelines)
    pipelines = []
    for rank in range(num_pipelines):
        sampler = BatchRebalanceSampler(
            list(lengths), len(lengths), num_pipelines, num_micro_batches, shuffle=False, rank=rank
        )
        micro_batches = []
        for micro_batch in sampler:
            longest = max((lengths[i] for i in micro_batch), default=0)
            while micro_batch:
                micro_batches.append([longest] * min(len(micro_batch), max_len // longest))
                micro_batch = micro_batch[len(micro_batches[-1]) :]
        pipelines.append(micro_batches)
    return pipelines
