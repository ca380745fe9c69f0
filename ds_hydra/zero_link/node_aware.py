"""Node-aware routes: what several ranks of a node need crosses its boundary once.

[Note: Node-aware routes]
The rectangles that a node's ranks need of a parameter cut each other into cells. A cell that
several of them need crosses the node's boundary once: in the first round in which one needs it, to
the rank of the node that has the owner's place (owner modulo ranks per node), which keeps it and
spreads it inside the node in a second phase, now and in later rounds. A push sums such a cell on
the relay rank in the order of ranks, and sends the sum to the owner in that first round, the last
one of the push to need it. Cells that one rank of a node needs go straight to it, and shards inside
the node are read directly.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence, Set
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ds_hydra.zero_link.direct import AskedBuckets, Asks, DirectPlanner, slice_pieces, split_by_peer
from ds_hydra.zero_link.layout import IntArray, ParamSpec, Region, Regions
from ds_hydra.zero_link.messages import Batch, Phase, Round, Store


@dataclass(frozen=True, slots=True, eq=False)
class Cells:
    """The rectangles into which the needs of a node's ranks cut each other.

    `round[c]` is the first round that needs cell c, `is_shared[c]` whether it is needed more than
    once; `asks[place, round]` is what the rank at `place` needs then, `shared` and `alone` its two
    parts.
    """

    regions: Regions
    round: IntArray
    is_shared: npt.NDArray[np.bool_]
    asks: dict[tuple[int, int], Asks]
    shared: dict[tuple[int, int], Asks]
    alone: dict[tuple[int, int], Asks]

    def first_shared_in(self, index: int) -> IntArray:
        """Cells that are relayed, and first needed in round `index`."""
        return np.flatnonzero((self.round == index) & self.is_shared)


@dataclass(frozen=True, slots=True, eq=False)
class RelayMemory:
    """What a rank relays from the ranks `owners` of other nodes, by the round in which it comes.

    `begin` [owners, cells] is where a cell begins in the memory of its round; that of round i has
    `numel[i]` elements, and the last round that needs it is `until[i]`.
    """

    owners: IntArray
    begin: IntArray
    numel: list[int]
    until: list[int]


class NodePlanner(DirectPlanner):
    """Node-aware routes ([Note: Node-aware routes])."""

    def __init__(
        self,
        params: Sequence[ParamSpec],
        asked: AskedBuckets,
        rank: int,
        ranks_per_node: int,
        independent_rounds: bool,
    ):
        super().__init__(params, asked, rank)
        self.nodes = Nodes(asked.num_ranks, ranks_per_node)
        self.node = self.nodes.node_of(rank)
        self._of_nodes = CellsOfNodes(asked, self.nodes, independent_rounds)
        self._cells = self._of_nodes.get(self.node)
        self._relay = self._place_relayed()

    def asks(self, rank: int, index: int) -> Asks:
        """What `rank`, of this node, needs in round `index`, as cells."""
        return self._part(self._cells.asks, rank, index)

    def _part(self, asks: dict[tuple[int, int], Asks], rank: int, index: int) -> Asks:
        return asks.get((rank - self.nodes.ranks(self.node).start, index), _NOTHING)

    def readers(self, index: int, ranks: range) -> Iterable[tuple[int, ...]]:
        """Groups of other ranks of this node that need the same in round `index`."""
        return _group_equal(
            {m: self.asks(m, index).cell.tobytes() for m in ranks if m != self.rank}
        )

    def round(self, index: int) -> Round:
        """Shards across nodes to the relay ranks and inside the node; then what is relayed, inside
        the node.
        """
        first = self.shard_phase(index, self.nodes.ranks(self.node))
        across = self._relayed_from_owners(index)
        outside = self.nodes.outside(self.node)
        alone = self.slices_from(self._part(self._cells.alone, self.rank, index), outside, outside)
        # Both ends list what goes between them in this order: inside the node, relayed, straight to
        # one rank.
        first = Phase(
            outgoing=(*first.outgoing, *self._shards_to_nodes(index)),
            incoming=(*first.incoming, *across, *alone),
            local=first.local,
        )
        phases = first, self._spread_phase(index)
        return Round(phases, self._relay.numel[index], self._relay.until[index])

    def _shards_to_nodes(self, index: int) -> Iterable[Batch]:
        """Own shards to the relay rank of other nodes that need them for the first time, and to
        lone readers.
        """
        kinds: dict[int, list[int]] = {}
        for node in range(self.nodes.num_nodes):
            if node != self.node:
                kinds.setdefault(id(self._of_nodes.get(node)), []).append(node)
        for nodes in kinds.values():
            cells = self._of_nodes.get(nodes[0])
            regions = cells.regions.take(cells.first_shared_in(index))
            pieces = self.shard_pieces(regions, np.array([self.rank]))
            if len(pieces):
                yield Batch(
                    Store.SHARD, tuple(self.nodes.relay_rank(self.rank, n) for n in nodes), pieces
                )
            for place in range(self.nodes.ranks_per_node):
                alone = cells.alone.get((place, index))
                if alone is not None:
                    pieces = self.shard_pieces(alone.regions, np.array([self.rank]))
                    if len(pieces):
                        readers = tuple(self.nodes.ranks(node)[place] for node in nodes)
                        yield Batch(Store.SHARD, readers, pieces)

    def _place_relayed(self) -> RelayMemory:
        cells, num_rounds = self._cells, self.asked.num_rounds
        owners = self.nodes.owners_relayed_by(self.rank)
        # Cells arrive once: a round's memory is needed until the last round that asks for one.
        until = np.arange(num_rounds)
        for (_, index), asks in cells.shared.items():
            np.maximum.at(until, cells.round[asks.cell], index)
        blocks = self.table.mutual_blocks(cells.regions, owners)
        shape = len(owners), len(cells.round)
        of_pairs = np.bincount(blocks.item, blocks.rows * blocks.cols, minlength=math.prod(shape))
        numel = of_pairs.astype(np.int64).reshape(shape)
        begin, of_rounds = np.zeros_like(numel), []
        for index in range(num_rounds):
            mine = cells.first_shared_in(index)
            flat = numel[:, mine].ravel()
            begin[:, mine] = (np.cumsum(flat) - flat).reshape(len(owners), len(mine))
            of_rounds.append(int(flat.sum()))
        return RelayMemory(owners=owners, begin=begin, numel=of_rounds, until=until.tolist())

    def _relayed_from_owners(self, index: int) -> tuple[Batch, ...]:
        """What arrives from other nodes in round `index`."""
        mine = self._cells.first_shared_in(index)
        owner, pieces = self._relay_pieces(self._cells.regions.take(mine), mine)
        return split_by_peer(Store.RELAY, self._relay.owners[owner], pieces)

    def _relay_pieces(self, regions: Regions, cell: IntArray) -> tuple[IntArray, IntArray]:
        """Index of the owner and place in relay memory of all blocks of cells that are relayed
        here.
        """
        blocks = self.table.mutual_blocks(regions, self._relay.owners)
        numel = blocks.rows * blocks.cols
        owner, ask = np.divmod(blocks.item, max(len(cell), 1))
        before = np.cumsum(numel) - numel  # of the block inside its (owner, cell) pair
        is_first = np.diff(blocks.item, prepend=-1) != 0
        before -= np.maximum.accumulate(np.where(is_first, before, 0))
        offset = self._relay.begin[owner, cell[ask]] + before
        round_ = self._cells.round[cell[ask]]
        return owner, np.stack([round_, offset, blocks.cols, blocks.rows, blocks.cols], axis=1)

    def _spread_phase(self, index: int) -> Phase:
        """What this rank relayed to the other ranks of its node that need it now; what they relayed
        for it.
        """
        outgoing = []
        ranks = self.nodes.ranks(self.node)
        if len(self._relay.owners):
            parts = {m: self._part(self._cells.shared, m, index) for m in ranks if m != self.rank}
            for members in _group_equal({m: part.cell.tobytes() for m, part in parts.items()}):
                asks = parts[members[0]]
                _, pieces = self._relay_pieces(asks.regions, asks.cell)
                if len(pieces):
                    outgoing.append(Batch(Store.RELAY, members, pieces))
        own = self._part(self._cells.shared, self.rank, index)
        incoming: list[Batch] = []
        for server in ranks:
            owners = self.nodes.owners_relayed_by(server)
            if server != self.rank:
                incoming += self.slices_from(own, owners, np.full(len(owners), server))
        local: tuple[tuple[Batch, Batch], ...] = ()
        _, relayed = self._relay_pieces(own.regions, own.cell)
        if len(relayed):
            blocks = self.table.mutual_blocks(own.regions, self._relay.owners)
            slices = slice_pieces(own, blocks, self.table)
            local = ((Batch(Store.RELAY, (), relayed), Batch(Store.SLICE, (), slices)),)
        return Phase(tuple(outgoing), tuple(incoming), local)


_NOTHING = Asks.of([])


def _group_equal(keys: dict[int, bytes]) -> list[tuple[int, ...]]:
    """Ranks with equal, not empty keys."""
    groups: dict[bytes, list[int]] = {}
    for rank, key in keys.items():
        if key:
            groups.setdefault(key, []).append(rank)
    return [tuple(members) for members in groups.values()]


@dataclass(frozen=True, slots=True)
class Nodes:
    """Consecutive ranks in nodes of `ranks_per_node`; the last node may have fewer."""

    num_ranks: int
    ranks_per_node: int

    @property
    def num_nodes(self) -> int:
        """Nodes."""
        return -(-self.num_ranks // self.ranks_per_node)

    def node_of(self, rank: int) -> int:
        """The node of `rank`."""
        return rank // self.ranks_per_node

    def ranks(self, node: int) -> range:
        """Ranks of `node`."""
        begin = node * self.ranks_per_node
        return range(begin, min(begin + self.ranks_per_node, self.num_ranks))

    def outside(self, node: int) -> IntArray:
        """Ranks of all other nodes, ascending."""
        ranks = self.ranks(node)
        return np.array([r for r in range(self.num_ranks) if r not in ranks], dtype=np.int64)

    def relay_rank(self, owner: int, node: int) -> int:
        """The rank of `node` that receives what `owner`, in another node, has for it."""
        ranks = self.ranks(node)
        return ranks[owner % self.ranks_per_node % len(ranks)]

    def owners_relayed_by(self, rank: int) -> IntArray:
        """Ranks of other nodes whose elements `rank` relays, ascending."""
        node = self.node_of(rank)
        others = self.outside(node).tolist()
        return np.array([o for o in others if self.relay_rank(o, node) == rank], dtype=np.int64)


class CellsOfNodes:
    """Cells of every node; nodes whose ranks ask for the same share one object."""

    def __init__(self, asked: AskedBuckets, nodes: Nodes, independent_rounds: bool):
        self._asked = asked
        self._nodes = nodes
        self._independent = independent_rounds
        self._known: dict[bytes, Cells] = {}

    def get(self, node: int) -> Cells:
        """The cells of `node`."""
        ids = self._asked.ids[list(self._nodes.ranks(node))]
        key = ids.tobytes()
        if key not in self._known:
            self._known[key] = self._cut(ids)
        return self._known[key]

    def _cut(self, ids: IntArray) -> Cells:
        wants: dict[tuple[int, int], list[_Want]] = {}
        for place, buckets in enumerate(ids.tolist()):
            for index, bucket in enumerate(buckets):
                if bucket < 0:
                    continue
                for slot, ref in self._asked.buckets[bucket]:
                    key = (index if self._independent else 0, ref.param)
                    wants.setdefault(key, []).append(_Want(place, index, slot, ref.region))
        regions: list[tuple[int, Region]] = []
        rounds: list[int] = []
        is_shared: list[bool] = []
        inside: dict[frozenset[Region], dict[Region, set[Region]]] = {}
        items: dict[tuple[int, int], list[tuple[int, int, Region, Region, int]]] = {}
        for (_, param), group in sorted(wants.items()):
            distinct = frozenset(want.region for want in group)
            if distinct not in inside:  # the layers of a model are cut alike
                inside[distinct] = {
                    cell: {region for region in distinct if _contains(region, cell)}
                    for cell in cut_cells(distinct)
                }
            for cell, covering in inside[distinct].items():
                readers = [want for want in group if want.region in covering]
                for want in readers:
                    item = (param, want.slot, cell, want.region, len(regions))
                    items.setdefault((want.place, want.round), []).append(item)
                regions.append((param, cell))
                rounds.append(min(want.round for want in readers))
                is_shared.append(len(readers) > 1)
        shared = np.array(is_shared, dtype=bool)
        asks = {key: Asks.of(value) for key, value in items.items()}
        return Cells(
            regions=Regions.of(regions),
            round=np.array(rounds, dtype=np.int64),
            is_shared=shared,
            asks=asks,
            shared={
                key: part for key, a in asks.items() if len((part := a.where(shared[a.cell])).cell)
            },
            alone={
                key: part for key, a in asks.items() if len((part := a.where(~shared[a.cell])).cell)
            },
        )


class _Want(NamedTuple):
    place: int
    round: int
    slot: int
    region: Region


def cut_cells(regions: Set[Region]) -> list[Region]:
    """Rectangles that do not overlap, cover what `regions` cover, and lie inside or outside of each
    of them.

    >>> cut_cells({Region(0, 4, 0, 3), Region(2, 2, 0, 3)})
    [Region(row=0, num_rows=2, col=0, num_cols=3), Region(row=2, num_rows=2, col=0, num_cols=3)]
    """
    if len(regions) == 1:
        return list(regions)
    row_cuts = sorted({edge for r in regions for edge in (r.row, r.row + r.num_rows)})
    col_cuts = sorted({edge for r in regions for edge in (r.col, r.col + r.num_cols)})
    grid = [
        Region(row, row_end - row, col, col_end - col)
        for row, row_end in pairwise(row_cuts)
        for col, col_end in pairwise(col_cuts)
    ]
    return [cell for cell in grid if any(_contains(region, cell) for region in regions)]


def _contains(outer: Region, inner: Region) -> bool:
    return (
        outer.row <= inner.row
        and inner.row + inner.num_rows <= outer.row + outer.num_rows
        and outer.col <= inner.col
        and inner.col + inner.num_cols <= outer.col + outer.num_cols
    )
