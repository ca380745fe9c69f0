"""Whole-cluster accounting of a link: who sends how much to whom, across nodes, special cases,
predicted time.

Counts the elements of the blocks that plans are made of, for all ranks at once and each distinct
bucket once; a test compares them with the plans of all ranks, which take some fifty times as long
to make.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from ds_hydra.strategy.cost_models.topology import Interconnects
from ds_hydra.zero_link.layout import IntArray, ParamSpec, RankBuckets, Region, Regions, ShardTable
from ds_hydra.zero_link.plan import BucketRequests, NodeRectCache, Nodes


@dataclass(frozen=True, slots=True)
class SpecialCase:
    """Rounds in which `ranks` all need the same bucket: it is packed once and sent to all of
    them.
    """

    ranks: tuple[int, ...]
    num_rounds: int
    is_everyone: bool

    def describe(self, gradients: bool) -> str:
        """Name of the collective that this part of the exchange amounts to."""
        if self.is_everyone:
            return "reduce-scatter, summed in the order of ranks" if gradients else "all-gather"
        return "reduction in the order of ranks" if gradients else "broadcast"


@dataclass(frozen=True, kw_only=True, eq=False)
class LinkTraffic:
    """Elements of one direction of a link under one kind of routes, as a pull sees them (a push
    goes back).

    `hops[p, src, dst]` sums hop p of all rounds; `seconds` is the predicted time, rounds one
    after the other.
    """

    gradients: bool
    ranks_per_node: int | None
    hops: IntArray
    local: IntArray
    seconds: float | None

    @cached_property
    def pairs(self) -> IntArray:
        """[src, dst] elements over the wire."""
        total: IntArray = self.hops.sum(axis=0)
        return total

    def across_nodes(self, nodes: Nodes) -> IntArray:
        """[node, node] elements from one node to another; the diagonal has those inside."""
        node = np.arange(nodes.num_ranks) // nodes.ranks_per_node
        folded = np.zeros((nodes.num_nodes, nodes.num_nodes), dtype=np.int64)
        # Many pairs of ranks are one pair of nodes, of which an indexed += would keep one.
        np.add.at(folded, (node[:, None], node[None, :]), self.pairs)
        return folded


class LinkAccounts:
    """Counts for one strategy and direction; `rank_buckets` as for `plan_link`."""

    def __init__(
        self,
        params: Sequence[ParamSpec],
        rank_buckets: Sequence[RankBuckets],
        ranks_per_node: int,
        *,
        gradients: bool = False,
    ):
        self.asked = BucketRequests.of(rank_buckets, gradients)
        self.gradients = gradients
        self.nodes = Nodes(self.asked.num_ranks, min(ranks_per_node, self.asked.num_ranks))
        self._table = ShardTable(params, self.asked.num_ranks)
        self._cells = NodeRectCache(self.asked, self.nodes, independent_rounds=False)

    def direct(self, interconnects: Interconnects | None = None, itemsize: int = 1) -> LinkTraffic:
        """Every rank reads every shard itself."""
        return self._sum(None, self._direct_rounds(), 1, interconnects, itemsize)

    def node_aware(
        self, interconnects: Interconnects | None = None, itemsize: int = 1
    ) -> LinkTraffic:
        """Across nodes once, to the relay rank, and from there inside the node."""
        if self.nodes.num_nodes == 1:
            return self.direct(interconnects, itemsize)
        return self._sum(self.nodes.ranks_per_node, self._node_rounds(), 2, interconnects, itemsize)

    def least_across_nodes(self) -> int:
        """Elements that must cross a boundary: each once for every node that needs it and does not
        hold it.
        """
        total = 0
        for node in range(self.nodes.num_nodes):
            members = self.nodes.ranks(node)
            count = self._table.owned_elements(self._cells.get(node).regions)
            total += int(count.sum() - count[members.start : members.stop].sum())
        return total

    def special_cases(self) -> list[SpecialCase]:
        """Groups of ranks that need the same bucket in the same round, most frequent first."""
        found: Counter[tuple[int, ...]] = Counter()
        for index in range(self.asked.num_rounds):
            by_content: dict[tuple[tuple[int, Region], ...], list[int]] = {}
            for bucket, ranks in self.asked.peers_by_bucket(
                index, range(self.asked.num_ranks)
            ).items():
                content = tuple((ref.param, ref.region) for _, ref in self.asked.buckets[bucket])
                by_content.setdefault(content, []).extend(ranks)
            found.update(tuple(sorted(group)) for group in by_content.values() if len(group) > 1)
        return [
            SpecialCase(ranks, count, len(ranks) == self.asked.num_ranks)
            for ranks, count in sorted(found.items(), key=lambda item: (-item[1], item[0]))
        ]

    def _direct_rounds(self) -> Iterator[list[IntArray]]:
        num_ranks = self.asked.num_ranks
        for index in range(self.asked.num_rounds):
            matrix = np.zeros((num_ranks, num_ranks), dtype=np.int64)
            for bucket, members in self.asked.peers_by_bucket(index, range(num_ranks)).items():
                regions = Regions.of(
                    (ref.param, ref.region) for _, ref in self.asked.buckets[bucket]
                )
                matrix[:, list(members)] = self._table.owned_elements(regions)[:, None]
            yield [matrix]

    def _node_rounds(self) -> Iterator[list[IntArray]]:
        nodes, num_ranks = self.nodes, self.asked.num_ranks
        everyone = np.arange(num_ranks)
        nothing = np.zeros(num_ranks, dtype=np.int64)
        for index in range(self.asked.num_rounds):
            first = np.zeros((num_ranks, num_ranks), dtype=np.int64)
            second = np.zeros_like(first)
            known: dict[tuple[int, int], IntArray] = {}
            for node in range(nodes.num_nodes):
                cells, members = self._cells.get(node), nodes.ranks(node)
                relay = members.start + everyone % nodes.ranks_per_node % len(members)
                is_inside = (everyone >= members.start) & (everyone < members.stop)
                # Nodes with the same pipelines share one object of cells, which is counted once.
                if (id(cells), -1) not in known:
                    entering_cells = np.flatnonzero((cells.round == index) & cells.is_shared)
                    regions = cells.regions.take(entering_cells)
                    known[id(cells), -1] = self._table.owned_elements(regions)
                entering = np.where(is_inside, 0, known[id(cells), -1])
                # Each owner has a row of its own, so no place is addressed twice.
                first[everyone, relay] += entering
                for place, member in enumerate(members):
                    for kind, asks in enumerate((cells.asks, cells.shared)):
                        if (place, index) not in asks:
                            continue
                        key = (id(cells), 2 * place + kind)
                        if key not in known:
                            known[key] = self._table.owned_elements(asks[place, index].regions)
                    needed = known.get((id(cells), 2 * place), nothing)
                    shared = known.get((id(cells), 2 * place + 1), nothing)
                    # Shards inside the node are read directly, so only those outside leave shared
                    # cells to relays.
                    first[:, member] += np.where(is_inside, needed, needed - shared)
                    # Weighted counts are float64, which is exact for whole numbers below 2^53.
                    second[:, member] += np.bincount(
                        relay, weights=np.where(is_inside, 0, shared), minlength=num_ranks
                    ).astype(np.int64)
            yield [first, second]

    def _sum(
        self,
        ranks_per_node: int | None,
        rounds: Iterator[list[IntArray]],
        num_phases: int,
        interconnects: Interconnects | None,
        itemsize: int,
    ) -> LinkTraffic:
        num_ranks = self.asked.num_ranks
        total = np.zeros((num_phases, num_ranks, num_ranks), dtype=np.int64)
        local = np.zeros(num_ranks, dtype=np.int64)
        seconds = 0.0
        for hops in rounds:
            for number, matrix in enumerate(hops):
                if number == 0:
                    local += np.diagonal(matrix)
                np.fill_diagonal(matrix, 0)
                total[number] += matrix
                if interconnects is not None:
                    seconds += exchange_s(
                        interconnects, (matrix.T if self.gradients else matrix) * itemsize
                    )
        return LinkTraffic(
            gradients=self.gradients,
            ranks_per_node=ranks_per_node,
            hops=total,
            local=local,
            seconds=None if interconnects is None else seconds,
        )


def exchange_s(interconnects: Interconnects, num_bytes: IntArray) -> float:
    """Seconds of one exchange of `num_bytes[src, dst]`: the busiest device, sending and receiving
    at once.

    A device sends to its peers one after the other, alpha + bytes / beta each, as in HexiScale's
    Eqs. 1 and 2. Left out: contention between devices of a node, packing, and what overlaps with
    other rounds.
    """
    # The rate of a device to itself may be 0, and nothing is sent there.
    rate = np.where(np.eye(len(num_bytes), dtype=bool), 1.0, interconnects.bytes_per_s)
    times = np.where(num_bytes > 0, interconnects.latency_s + num_bytes / rate, 0.0)
    return float(max(times.sum(axis=1).max(), times.sum(axis=0).max()))
