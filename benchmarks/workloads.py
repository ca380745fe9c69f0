"""Global batches of the end-to-end benchmark, and how each contender places one on the
ranks.

Pure: numbers in, numbers out. Every rank of every contender computes the same from the same
arguments.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import ceil
from pathlib import Path

import numpy as np

from ds_hydra.sampler.data.batches import TokenBudgetSampler
from ds_hydra.strategy.proposal.histogram import LengthHistogram

LENGTHS = Path(__file__).parent.parent / "ds_hydra" / "configs" / "lengths"
PAPER_CONTEXT = 32_768

Batch = tuple[int, ...]
"""Lengths, in tokens, of the sequences of one global batch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """One line of the benchmark: where lengths come from, and who takes part.

    `limits_memory`: a rank may use no more than one rank of `<2,1>` needs for a micro-batch of the
    context, so that long sequences run on groups only. `contenders` are names of
    `contenders.CONTENDERS`.
    """

    name: str
    title: str
    draw: Callable[[int, int, int, int], list[int]]
    """(context, tokens per iteration, number of global batches, seed) -> lengths of at least as
    many global batches.
    """
    contenders: tuple[str, ...]
    limits_memory: bool = False

    def batches(
        self, context_length: int, tokens_per_iteration: int, num: int, seed: int = 0
    ) -> list[Batch]:
        """`num` global batches as ds_hydra's own sampler cuts them from the stream of lengths."""
        lengths = self.draw(context_length, tokens_per_iteration, num + 1, seed)
        labels = [length - 1 for length in lengths]
        sampler = TokenBudgetSampler(lengths, labels, tokens_per_iteration, shuffle=False)
        return [next(sampler).lengths for _ in range(num)]


def _from_histogram(name: str) -> Callable[[int, int, int, int], list[int]]:
    def draw(context_length: int, tokens: int, num: int, seed: int) -> list[int]:
        """The paper's 32K context scaled down: every length is divided by the same number."""
        histogram = LengthHistogram.load(LENGTHS / f"{name}.json").limit(PAPER_CONTEXT)
        scale = PAPER_CONTEXT // context_length
        batches = histogram.draw_batches(tokens * scale, num + 1, seed)
        return [max(2, int(length) // scale) for batch in batches for length in batch]

    return draw


def _equal(context_length: int, tokens: int, num: int, seed: int) -> list[int]:
    length = context_length // 4
    return [length] * (tokens // length * num)


def _one_long(context_length: int, tokens: int, num: int, seed: int) -> list[int]:
    """In every global batch one sequence of the whole context; the rest of the budget is 32 times
    as short or less.
    """
    rng = np.random.Generator(np.random.PCG64(seed))
    lengths: list[int] = []
    for _ in range(num):
        shorts: list[int] = []
        while (room := tokens - context_length - sum(shorts)) > context_length // 32:
            shorts.append(int(rng.integers(context_length // 64, context_length // 32 - 1)))
        shorts.append(room)
        place = int(rng.integers(len(shorts)))
        lengths += [*shorts[:place], context_length, *shorts[place:]]
    return lengths


_BALANCED = ("padding", "packing", "rebalance", "kk_tokens", "kk_flops", "hydra_static", "hydra")

WORKLOADS = {
    w.name: w
    for w in (
        Workload(
            name="github",
            title="GitHub-like lengths",
            draw=_from_histogram("github"),
            contenders=("packing_sdpa", *_BALANCED),
        ),
        Workload(
            name="commoncrawl",
            title="CommonCrawl-like lengths",
            draw=_from_histogram("commoncrawl"),
            contenders=_BALANCED,
        ),
        Workload(
            name="equal",
            title="equal lengths",
            draw=_equal,
            contenders=("padding", "packing", "hydra_static", "hydra"),
        ),
        Workload(
            name="one_long",
            title="one very long sequence among short ones",
            draw=_one_long,
            contenders=_BALANCED,
        ),
        Workload(
            name="memory",
            title="memory limit, GitHub-like lengths: long sequences fit on groups only",
            draw=_from_histogram("github"),
            contenders=("ulysses", "autotp", "checkpointing", "hydra_static", "hydra"),
            limits_memory=True,
        ),
    )
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """What placement depends on besides the lengths; FLOPs per token, and of attention per token
    squared.
    """

    num_ranks: int
    context_length: int
    tokens_per_iteration: int
    linear_flops: float
    quadratic_flops: float

    @property
    def num_slots(self) -> int:
        """Micro-batches of every rank (gradient accumulation): as many micro-batches of the context
        as the budget needs.
        """
        return ceil(self.tokens_per_iteration / (self.num_ranks * self.context_length))

    def flops(self, length: int) -> float:
        """Forward + backward FLOPs of one sequence."""
        return self.linear_flops * length + self.quadratic_flops * length * length


Placement = list[list[list[int]]]
"""[slot][rank] -> positions in the global batch of the sequences of that micro-batch."""


def place_evenly(batch: Batch, shape: Shape) -> Placement:
    """As drawn, as many sequences in every micro-batch (what a batch size per device does)."""
    parts = np.array_split(np.arange(len(batch)), shape.num_slots * shape.num_ranks)
    return _slots([part.tolist() for part in parts], shape)


def place_first_fit(batch: Batch, shape: Shape) -> Placement:
    """First-fit decreasing into micro-batches of the context length; what fits nowhere goes to the
    emptiest micro-batch.
    """
    micro_batches: list[list[int]] = [[] for _ in range(shape.num_slots * shape.num_ranks)]
    tokens = [0] * len(micro_batches)
    for index in sorted(range(len(batch)), key=lambda i: -batch[i]):
        fitting = (
            r for r, held in enumerate(tokens) if held + batch[index] <= shape.context_length
        )
        micro_batch = next(fitting, tokens.index(min(tokens)))
        micro_batches[micro_batch].append(index)
        tokens[micro_batch] += batch[index]
    return _slots(micro_batches, shape)


def place_rebalanced(batch: Batch, shape: Shape) -> Placement:
    """transformers' own `BatchRebalanceSampler` on this global batch."""
    from transformers.trainer_pt_utils import BatchRebalanceSampler

    if len(batch) < shape.num_slots * shape.num_ranks:
        return place_evenly(batch, shape)
    per_rank = [
        list(
            BatchRebalanceSampler(
                list(batch), len(batch), shape.num_ranks, shape.num_slots, shuffle=False, rank=rank
            )
        )
        for rank in range(shape.num_ranks)
    ]
    return [
        [list(per_rank[r][slot]) for r in range(shape.num_ranks)] for slot in range(shape.num_slots)
    ]


def place_balanced_tokens(batch: Batch, shape: Shape) -> Placement:
    """Karmarkar-Karp on tokens."""
    return _slots(karmarkar_karp(list(batch), shape.num_slots * shape.num_ranks), shape)


def place_balanced_flops(batch: Batch, shape: Shape) -> Placement:
    """Karmarkar-Karp on tokens + tokens squared, weighed as the model's FLOPs are."""
    costs = [shape.flops(length) for length in batch]
    parts = karmarkar_karp(costs, shape.num_slots * shape.num_ranks)
    parts.sort(key=lambda part: -sum(costs[i] for i in part))
    return _slots(parts, shape)


def _slots(parts: Sequence[list[int]], shape: Shape) -> Placement:
    """Neighbours run at the same time: part s * ranks + r on rank r in slot s."""
    n = shape.num_ranks
    return [[parts[slot * n + rank] for rank in range(n)] for slot in range(shape.num_slots)]


def karmarkar_karp(costs: Sequence[float], num_parts: int) -> list[list[int]]:
    """The largest differencing method for `num_parts` parts: indices of `costs` in each part.

    >>> sorted(sum([8, 7, 6, 5, 4][i] for i in part) for part in karmarkar_karp([8, 7, 6, 5, 4], 2))
    [14, 16]
    """
    # Largest spread first, of equal ones the first: (-spread, number, parts from light to heavy)
    empty: list[tuple[float, list[int]]] = [(0.0, [])] * (num_parts - 1)
    heap = [(-cost, i, [*empty, (cost, [i])]) for i, cost in enumerate(costs)]
    heapq.heapify(heap)
    while len(heap) > 1:
        (_, number, heavy), (_, _, light) = heapq.heappop(heap), heapq.heappop(heap)
        both = zip(heavy, reversed(light))
        merged = sorted((a + b, [*own, *other]) for (a, own), (b, other) in both)
        heapq.heappush(heap, (merged[0][0] - merged[-1][0], number, merged))
    return [part for _, part in heap[0][2]] if heap else [[] for _ in range(num_parts)]


def imbalance(batch: Batch, placement: Placement, shape: Shape) -> float:
    """FLOPs of the slowest rank over the mean, slot by slot (ranks of ZeRO-3 wait in every layer of
    a slot).
    """
    cost = [[sum(shape.flops(batch[i]) for i in part) for part in slot] for slot in placement]
    return sum(max(slot) for slot in cost) / (sum(map(sum, cost)) / shape.num_ranks)
