"""WLB-LLM's Table 2, of packing methods: how uneven four micro-batches of 128K tokens are.

Work of a document of l tokens is that of its matmuls, (4 H^2 + 3 H I) 2 l, and of its attention,
2 H l^2, whose FLOPs may cost more than a matmul's. Imbalance is the longest micro-batch times the
number of micro-batches over the sum of all.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ds_hydra.sampler.schedule import FloatArray, IntArray
from ds_hydra.strategy.compiled import compiled
from ds_hydra.strategy.proposal.histogram import LengthHistogram

HIDDEN, INTERMEDIATE = 4096, 11008
NUM_MICRO_BATCHES, MICRO_BATCH_TOKENS = 4, 131072
LONGEST_DOCUMENT = 125_000
FITTED_ATTENTION = 2.0
"""Cost of a FLOP of attention over one of a matmul, fitted to the published imbalances."""
QUEUES = (73728, 106496)
"""Documents above the first wait for three others up to the second, those above that for three of
theirs. The paper does not say where its queues begin: fitted, in steps of 8K, to its mean delay of
0.5 iterations.
"""
NUM_DOCUMENTS = 1500
"""Drawn for a global batch, more than it can need."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PackingTable:
    """Mean imbalances of global batches, and how many iterations a delayed token waits on average
    over all tokens.
    """

    original: float
    fixed_greedy: float
    variable: float
    queued: float
    mean_delay: float


def packing_table(
    histogram: LengthHistogram, *, attention_cost: float, num_batches: int = 200, seed: int = 1
) -> PackingTable:
    """The table for documents of `histogram`."""
    limited = histogram.limit(LONGEST_DOCUMENT)
    share = limited.counts / limited.num_sequences
    generator = np.random.Generator(np.random.PCG64(seed))
    batches, original = [], []
    for _ in range(num_batches):
        drawn = generator.choice(limited.lengths_tokens, NUM_DOCUMENTS, p=share)
        pieces, micro_batch = cut(drawn)
        original.append(_imbalance(pieces, micro_batch, attention_cost))
        batches.append(np.sort(pieces)[::-1].copy())
    queued, mean_delay = _queued(batches)
    return PackingTable(
        original=float(np.mean(original)),
        fixed_greedy=float(np.mean([_packed(own, attention_cost, 1) for own in batches])),
        variable=float(np.mean([_packed(own, attention_cost, 4) for own in batches])),
        queued=float(np.mean([_packed(own, attention_cost, 4) for own in queued])),
        mean_delay=mean_delay,
    )


def cut(drawn: IntArray) -> tuple[IntArray, IntArray]:
    """Documents one after the other, cut where a micro-batch is full: pieces, and the micro-batch
    of each.
    """
    total = NUM_MICRO_BATCHES * MICRO_BATCH_TOKENS
    ends = np.cumsum(drawn)
    edges = np.arange(1, NUM_MICRO_BATCHES + 1) * MICRO_BATCH_TOKENS
    bounds = np.unique(np.concatenate([[0], ends[ends < total], edges]))
    return np.diff(bounds), bounds[:-1] // MICRO_BATCH_TOKENS


def work(lengths: IntArray, attention_cost: float) -> FloatArray:
    """FLOPs of a layer's forward pass, those of attention times `attention_cost`."""
    tokens = lengths.astype(np.float64)
    linear = 2 * (4 * HIDDEN**2 + 3 * HIDDEN * INTERMEDIATE)
    return linear * tokens + attention_cost * 2 * HIDDEN * tokens**2


def _imbalance(lengths: IntArray, micro_batch: IntArray, attention_cost: float) -> float:
    sums = np.bincount(micro_batch, work(lengths, attention_cost), minlength=NUM_MICRO_BATCHES)
    return float(sums.max() * NUM_MICRO_BATCHES / sums.sum())


def _packed(lengths: IntArray, attention_cost: float, longer: int) -> float:
    """Imbalance with each document, longest first, where work is least among those with room;
    `longer` times as much room as tokens in a micro-batch.
    """
    if not lengths.size:
        return 1.0
    micro_batch = np.zeros(lengths.size, dtype=np.int64)
    room = longer * max(MICRO_BATCH_TOKENS, int(lengths.sum()) // NUM_MICRO_BATCHES)
    _least_work(lengths, work(lengths, attention_cost), room, micro_batch)
    return _imbalance(lengths, micro_batch, attention_cost)


@compiled
def _least_work(lengths: IntArray, work: FloatArray, room: int, micro_batch: IntArray) -> None:
    """Writes the micro-batch of each document; the emptiest where none has room."""
    tokens = np.zeros(NUM_MICRO_BATCHES, dtype=np.int64)
    sums = np.zeros(NUM_MICRO_BATCHES)
    for i in range(lengths.size):
        best = -1
        for k in range(NUM_MICRO_BATCHES):
            if tokens[k] + lengths[i] <= room and (best < 0 or sums[k] < sums[best]):
                best = k
        if best < 0:
            best = int(np.argmin(tokens))
        micro_batch[i] = best
        tokens[best] += lengths[i]
        sums[best] += work[i]


def _queued(batches: list[IntArray]) -> tuple[list[IntArray], float]:
    """The global batches with outliers from the queues, and the iterations that a token waits on
    average; what is left at the end is left out.
    """
    waiting: list[list[tuple[int, int]]] = [[] for _ in QUEUES]
    found, waited, total = [], 0, 0
    for number, lengths in enumerate(batches):
        own = lengths[lengths <= QUEUES[0]].tolist()
        for queue, lowest, highest in zip(waiting, QUEUES, (*QUEUES[1:], LONGEST_DOCUMENT)):
            outliers = lengths[(lengths > lowest) & (lengths <= highest)]
            queue += [(int(length), number) for length in outliers]
            released = len(queue) // NUM_MICRO_BATCHES * NUM_MICRO_BATCHES
            own += [length for length, _ in queue[:released]]
            waited += sum(length * (number - since) for length, since in queue[:released])
            del queue[:released]
        found.append(np.sort(np.array(own, dtype=np.int64))[::-1].copy())
        total += sum(own)
    return found, waited / total
