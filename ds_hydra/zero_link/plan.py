"""Exchanges of one rank to get its slices out of the ZeRO-3 shards, and gradients back to the
owners: pure, by node-aware routes.

[Note: Rounds]
The unit of exchange is a bucket: the slices of one decoder layer, of the embedding, or of the head.
In round r every rank receives its own r-th bucket and serves the r-th bucket of everyone else.
Ranks with fewer buckets (later pipeline stages, idle ranks) take part in every round, because they
own shards that others need.

A push is the pull with roles swapped and rounds reversed, over the slices whose gradient a rank
contributes; owners add up what arrives. That one rule subsumes data parallel reduction, tied
embeddings and shared key-value heads. What several ranks need alike is packed once and sent to
each: an all-gather where that is everything, a broadcast where it is a part; their pushes are a
reduce-scatter and a reduction, in the order of ranks.

[Note: Node-aware routes]
What several ranks of a node need crosses its boundary once. On one node, and between nodes of one
rank, no boundary is crossed for several: every rank reads every shard itself (direct routes). The
rectangles that a node's ranks need of a parameter cut each other into cells. A cell that several of
them need crosses the node's boundary once: in the first round in which one needs it, to the rank of
the node that has the owner's place (owner modulo ranks per node), which keeps it and spreads it
inside the node in a second hop, now and in later rounds. A push sums such a cell on the relay rank
in the order of ranks, and sends the sum to the owner in that first round, the last one of the push
to need it. Cells that one rank of a node needs go straight to it, and shards inside the node are
read directly.

[Note: Weights on the node]
Gathered layers are pulled again and again, each time in a round of its own. Where what is relayed
stays (`Relayed.STAYS`), a round that was carried out once can be carried out again by a plan in
which nothing that is relayed crosses nodes (`Relayed.IS_THERE`). This is hpZ of ZeRO++
(arXiv:2306.10209, section 3.2), whose secondary partition is here what each rank relays.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Hashable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from enum import Enum
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ds_hydra.zero_link.layout import (
    STAYS,
    Batch,
    Blocks,
    Bucket,
    Hop,
    IntArray,
    LinkPlan,
    ParamSpec,
    RankBuckets,
    Region,
    Regions,
    Round,
    ShardTable,
    Store,
)


class Relayed(Enum):
    """Lifetime of relayed parts of gathered layers: [Note: Weights on the node]."""

    LEAVES = "leaves"
    """Kept until the last round of the plan that needs it."""
    STAYS = "stays"
    """Kept until the link forgets it."""
    IS_THERE = "is there"
    """Kept as under STAYS, and rounds of such a plan have brought it already."""


class BucketRequests:
    """Numbers of the distinct buckets that each rank asks for in each round.

    Ranks of data parallel pipelines ask for equal buckets, so everything else is computed once for
    each of `buckets`, tuples of (slot, reference). `ids[rank, round]` is -1 where a rank has none.
    """

    def __init__(self, rank_buckets: Sequence[RankBuckets], *, gradients: bool):
        """Find the distinct buckets of all ranks; with `gradients` only the slices that push."""
        self.num_ranks = len(rank_buckets)
        self.num_rounds = max(map(len, rank_buckets), default=0)
        self.ids = np.full((self.num_ranks, self.num_rounds), -1, dtype=np.int64)
        by_value: dict[Bucket, int] = {}
        by_object: dict[int, int] = {}
        for rank, buckets in enumerate(rank_buckets):
            for index, bucket in enumerate(buckets):
                known = by_object.get(id(bucket))
                if known is None:  # hashing a bucket is dear: once for each object
                    known = by_object[id(bucket)] = by_value.setdefault(bucket, len(by_value))
                self.ids[rank, index] = known
        self.buckets = [
            tuple(
                (slot, ref)
                # Numbered before any is left out: a slot is a place in the whole bucket.
                for slot, ref in enumerate(bucket)
                # A FIRST_RANK parameter has an empty region on the other ranks of its TP group.
                if ref.region.numel and (ref.pushes_gradient or not gradients)
            )
            for bucket in by_value
        ]


class Requests(NamedTuple):
    """Needs of one reader in one round: regions, and the slice (slot and rectangle) of each."""

    regions: Regions
    slot: IntArray
    slice_row: IntArray
    slice_col: IntArray
    slice_cols: IntArray
    cell: IntArray

    @classmethod
    def of(cls, items: Sequence[tuple[int, int, Region, Region, int]]) -> Requests:
        """Build requests from (param, slot, region, the slice's region, cell)."""
        # Reshaped, because without items the array has one dimension and no columns.
        slices = np.array(
            [(slot, s.row, s.col, s.num_cols, cell) for _, slot, _, s, cell in items],
            dtype=np.int64,
        ).reshape(-1, 5)
        return cls(
            Regions.of((param, region) for param, _, region, _, _ in items), *slices.T.copy()
        )

    def where(self, chosen: npt.NDArray[np.bool_]) -> Requests:
        """The chosen ones."""
        index = np.flatnonzero(chosen)
        regions, *columns = self
        return Requests(regions.take(index), *(column[index] for column in columns))


class DirectPlanner:
    """Direct routes: every rank reads every shard itself."""

    def __init__(self, params: Sequence[ParamSpec], asked: BucketRequests, rank: int):
        self.table = ShardTable(params, asked.num_ranks)
        self.asked = asked
        self.rank = rank
        self._asks: dict[int, Requests] = {}

    def round(self, index: int) -> Round:
        """This rank's part in round `index`."""
        return Round((self.shard_phase(index, range(self.asked.num_ranks)),))

    def asks(self, rank: int, index: int) -> Requests:
        """Requests of `rank` in round `index`."""
        bucket = int(self.asked.ids[rank, index])
        if bucket not in self._asks:
            kept = self.asked.buckets[bucket] if bucket >= 0 else ()
            # A whole slice is asked for: direct routes have no cells (-1).
            self._asks[bucket] = Requests.of(
                [(r.param, slot, r.region, r.region, -1) for slot, r in kept]
            )
        return self._asks[bucket]

    def shard_phase(self, index: int, ranks: range) -> Hop:
        """Hop from own shards to readers among `ranks`, and from their shards to own slices."""
        me = np.array([self.rank])
        own = self.asks(self.rank, index)
        outgoing = []
        for members in self.readers(index, ranks):
            # All of a group need the same, so any member stands for all.
            asks = self.asks(members[0], index)
            outgoing.append(Batch(Store.SHARD, members, self.shard_pieces(asks.regions, me)))
        local = self.kept_here(Store.SHARD, self.shard_pieces(own.regions, me), own, me)
        others = np.array([rank for rank in ranks if rank != self.rank], dtype=np.int64)
        return Hop(
            # A reader expects no batch from a shard that has nothing for it.
            outgoing=tuple(batch for batch in outgoing if len(batch.table)),
            incoming=self.slices_from(own, others, others),
            local=local,
        )

    def kept_here(
        self, store: Store, held: IntArray, own: Requests, owners: IntArray
    ) -> tuple[tuple[Batch, Batch], ...]:
        """Pairs that need no wire: this rank's slices out of its own `held` parts of `owners`."""
        if not len(held):
            return ()
        # The same blocks in the same order as in `held`: rows of both tables are pairs.
        slices = slice_pieces(own, self.table.mutual_blocks(own.regions, owners), self.table)
        return ((Batch(store, (), held), Batch(Store.SLICE, (), slices)),)

    def readers(self, index: int, ranks: range) -> Iterable[tuple[int, ...]]:
        """Groups of other `ranks` that need the same in round `index`."""
        asked = self.asked.ids[:, index].tolist()
        return _group_equal(
            {m: asked[m] for m in ranks if m != self.rank and len(self.asks(m, index).slot)}
        )

    def shard_pieces(self, regions: Regions, owner: IntArray) -> IntArray:
        """Places of all blocks of `regions` in the shards of the one rank in `owner`."""
        blocks = self.table.mutual_blocks(regions, owner)
        param = regions.param[blocks.item]
        offset = blocks.start - owner[0] * self.table.shard_numel[param]
        return _pieces(param, offset, self.table.num_cols[param], blocks)

    def slices_from(self, asks: Requests, owners: IntArray, senders: IntArray) -> tuple[Batch, ...]:
        """Blocks of `asks` that arrive from each sender, out of the shards of `owners` that it
        serves.

        `senders` ascend; owners[i] is served by senders[i].
        """
        if not len(owners) or not len(asks.slot):
            return ()
        blocks = self.table.mutual_blocks(asks.regions, owners)
        pieces = slice_pieces(asks, blocks, self.table)
        # Blocks come owner by owner, so senders that ascend make one batch each.
        return split_by_peer(Store.SLICE, senders[blocks.item // len(asks.slot)], pieces)


def slice_pieces(asks: Requests, blocks: Blocks, table: ShardTable) -> IntArray:
    """Places of all blocks in the reader's slices."""
    # Pairs are numbered owner by owner, so the remainder is the request.
    ask = blocks.item % max(len(asks.slot), 1)
    row_len = table.num_cols[asks.regions.param[ask]]
    width = asks.slice_cols[ask]
    offset = (blocks.start // row_len - asks.slice_row[ask]) * width
    offset += blocks.start % row_len - asks.slice_col[ask]
    return _pieces(asks.slot[ask], offset, width, blocks)


def _pieces(key: IntArray, offset: IntArray, stride: IntArray, blocks: Blocks) -> IntArray:
    stride = np.where(blocks.rows == 1, blocks.cols, stride)
    return np.stack([key, offset, stride, blocks.rows, blocks.cols], axis=1)


def split_by_peer(store: Store, peers: IntArray, pieces: IntArray) -> tuple[Batch, ...]:
    """One batch for each run of equal `peers`."""
    if not len(peers):
        return ()
    cuts = np.flatnonzero(np.diff(peers)) + 1
    bounds = [0, *cuts.tolist(), len(peers)]
    firsts = peers[bounds[:-1]].tolist()
    return tuple(
        Batch(store, (peer,), pieces[a:b]) for peer, a, b in zip(firsts, bounds, bounds[1:])
    )


@dataclass(frozen=True, slots=True, eq=False)
class NodeRects:
    """The rectangles into which the needs of a node's ranks cut each other.

    `round[c]` is the first round that needs cell c, `is_shared[c]` whether it is needed more than
    once; `asks[place, round]` is what the rank at `place` needs then, `shared` and `alone` its two
    parts.
    """

    regions: Regions
    round: IntArray
    is_shared: npt.NDArray[np.bool_]
    asks: dict[tuple[int, int], Requests]
    shared: dict[tuple[int, int], Requests]
    alone: dict[tuple[int, int], Requests]

    def first_shared_in(self, index: int) -> IntArray:
        """Cells that are relayed, and first needed in round `index`."""
        return np.flatnonzero((self.round == index) & self.is_shared)


@dataclass(frozen=True, slots=True, eq=False)
class RelayMemory:
    """Memory of a rank's relays from the ranks `owners` of other nodes, by the round in which they
    come.

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
        asked: BucketRequests,
        rank: int,
        ranks_per_node: int,
        independent_rounds: bool,
        relayed: Relayed,
    ):
        super().__init__(params, asked, rank)
        self._relayed = relayed
        self.nodes = Nodes(asked.num_ranks, ranks_per_node)
        self.node = self.nodes.node_of(rank)
        self._of_nodes = NodeRectCache(asked, self.nodes, independent_rounds)
        self._cells = self._of_nodes.get(self.node)
        self._relay = self._place_relayed()

    def asks(self, rank: int, index: int) -> Requests:
        """Requests of `rank`, of this node, in round `index`, as cells."""
        return self._part(self._cells.asks, rank, index)

    def _part(self, asks: dict[tuple[int, int], Requests], rank: int, index: int) -> Requests:
        return asks.get((rank - self.nodes.ranks(self.node).start, index), _NOTHING)

    def readers(self, index: int, ranks: range) -> Iterable[tuple[int, ...]]:
        """Groups of other ranks of this node that need the same in round `index`."""
        return _group_equal(self._cells_of(self._cells.asks, ranks, index))

    def _cells_of(
        self, asks: dict[tuple[int, int], Requests], ranks: range, index: int
    ) -> dict[int, bytes]:
        """Cells that each of other `ranks` of this node needs in round `index`, if any."""
        parts = {m: self._part(asks, m, index) for m in ranks if m != self.rank}
        return {m: part.cell.tobytes() for m, part in parts.items() if len(part.cell)}

    def round(self, index: int) -> Round:
        """Shards across nodes to the relay ranks and inside the node; then what is relayed, inside
        the node.
        """
        first = self.shard_phase(index, self.nodes.ranks(self.node))
        crosses = self._relayed is not Relayed.IS_THERE
        across = self._relayed_from_owners(index) if crosses else ()
        outside = self.nodes.outside(self.node)
        alone = self.slices_from(self._part(self._cells.alone, self.rank, index), outside, outside)
        # Both ends list what goes between them in this order: inside the node, relayed, straight to
        # one rank.
        first = Hop(
            outgoing=(*first.outgoing, *self._shards_to_nodes(index)),
            incoming=(*first.incoming, *across, *alone),
            local=first.local,
        )
        hops = first, self._spread_phase(index)
        leaves = self._relayed is Relayed.LEAVES
        until = self._relay.until[index] if leaves else STAYS
        return Round(hops, self._relay.numel[index] if crosses else 0, until)

    def _shards_to_nodes(self, index: int) -> Iterable[Batch]:
        """Batches of own shards to the relay rank of other nodes that need them for the first time,
        and to lone readers.
        """
        kinds: dict[int, list[int]] = {}
        for node in range(self.nodes.num_nodes):
            if node != self.node:
                kinds.setdefault(id(self._of_nodes.get(node)), []).append(node)
        # Nodes with the same pipelines: what they need alike is packed once for all of them.
        for nodes in kinds.values():
            cells = self._of_nodes.get(nodes[0])
            regions = cells.regions.take(cells.first_shared_in(index))
            pieces = self.shard_pieces(regions, np.array([self.rank]))
            # IS_THERE: the relay ranks have kept these cells since an earlier pull.
            if len(pieces) and self._relayed is not Relayed.IS_THERE:
                yield Batch(
                    Store.SHARD,
                    tuple(self.nodes.relay_rank(self.rank, n) for n in nodes),
                    pieces,
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
            # Several cells come in one round, of which an indexed assignment would keep the last.
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
        """Batches that arrive from other nodes in round `index`."""
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
        # `before` only grows, so the running maximum is where the pair's first block begins.
        before -= np.maximum.accumulate(np.where(is_first, before, 0))
        offset = self._relay.begin[owner, cell[ask]] + before
        round_ = self._cells.round[cell[ask]]
        return owner, np.stack([round_, offset, blocks.cols, blocks.rows, blocks.cols], axis=1)

    def _spread_phase(self, index: int) -> Hop:
        """Hop inside the node: cells that this rank relays to the ranks that need them now, and
        those that they relay to it.
        """
        outgoing = []
        ranks = self.nodes.ranks(self.node)
        # Beside a smaller last node some ranks of a node relay nothing.
        if len(self._relay.owners):
            # One packed buffer serves all ranks that need the same cells.
            for members in _group_equal(self._cells_of(self._cells.shared, ranks, index)):
                asks = self._part(self._cells.shared, members[0], index)
                _, pieces = self._relay_pieces(asks.regions, asks.cell)
                if len(pieces):
                    outgoing.append(Batch(Store.RELAY, members, pieces))
        own = self._part(self._cells.shared, self.rank, index)
        incoming: list[Batch] = []
        for server in ranks:
            owners = self.nodes.owners_relayed_by(server)
            if server != self.rank:
                incoming += self.slices_from(own, owners, np.full(len(owners), server))
        _, relayed = self._relay_pieces(own.regions, own.cell)
        local = self.kept_here(Store.RELAY, relayed, own, self._relay.owners)
        return Hop(tuple(outgoing), tuple(incoming), local)


_NOTHING = Requests.of([])


def _group_equal(keys: Mapping[int, Hashable]) -> list[tuple[int, ...]]:
    """Ranks with equal keys."""
    groups: dict[Hashable, list[int]] = {}
    for rank, key in keys.items():
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
        """The rank of `node` that receives messages for it from `owner`, in another node."""
        ranks = self.ranks(node)
        # The last node may have fewer ranks than the place of the owner in its own.
        return ranks[owner % self.ranks_per_node % len(ranks)]

    def owners_relayed_by(self, rank: int) -> IntArray:
        """Ranks of other nodes whose elements `rank` relays, ascending."""
        node = self.node_of(rank)
        others = self.outside(node).tolist()
        return np.array([o for o in others if self.relay_rank(o, node) == rank], dtype=np.int64)


class NodeRectCache:
    """NodeRects of every node; nodes whose ranks ask for the same share one object."""

    def __init__(self, asked: BucketRequests, nodes: Nodes, independent_rounds: bool):
        self._asked = asked
        self._nodes = nodes
        self._independent = independent_rounds
        self._known: dict[bytes, NodeRects] = {}

    def get(self, node: int) -> NodeRects:
        """The cells of `node`."""
        ids = self._asked.ids[list(self._nodes.ranks(node))]
        # Rows are equally long, so a node of fewer ranks has fewer bytes and another key.
        key = ids.tobytes()
        if key not in self._known:
            self._known[key] = self._cut(ids)
        return self._known[key]

    def _cut(self, ids: IntArray) -> NodeRects:
        wants: dict[tuple[int, int], list[_Want]] = {}
        for place, buckets in enumerate(ids.tolist()):
            for index, bucket in enumerate(buckets):
                if bucket < 0:
                    continue
                for slot, ref in self._asked.buckets[bucket]:
                    # With its round in the key a cell is never shared between rounds, which may
                    # then run alone.
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
        asks = {key: Requests.of(value) for key, value in items.items()}
        return NodeRects(
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


PLAN_VERSION = 4
"""Part of the digest: ranks with different planners do not exchange."""


def plan_link(
    params: Sequence[ParamSpec],
    rank_buckets: Sequence[RankBuckets],
    rank: int,
    *,
    gradients: bool = False,
    ranks_per_node: int | None = None,
    independent_rounds: bool = False,
    relayed: Relayed = Relayed.LEAVES,
) -> LinkPlan:
    """The part of `rank` in pulling every rank's buckets; with `gradients`, in pushing their
    gradients.

    `ranks_per_node` asks for node-aware routes between nodes of that many consecutive ranks (the
    last node may have fewer). With `independent_rounds` no round needs what an earlier one relayed,
    so that any round can run alone; a cell may then cross a node's boundary once for each round.
    `relayed` says how long it stays there.

    Pure: every rank computes its own part from the same arguments, and the parts fit together
    because both ends enumerate blocks in the same order.
    """
    asked = BucketRequests(rank_buckets, gradients=gradients)
    if ranks_per_node is not None and ranks_per_node < asked.num_ranks:
        planner: DirectPlanner = NodePlanner(
            params, asked, rank, ranks_per_node, independent_rounds, relayed
        )
    else:
        # One node has no boundary to spare: its plan has the digest of direct routes.
        ranks_per_node = None
        planner = DirectPlanner(params, asked, rank)
    return LinkPlan(
        rank=rank,
        num_ranks=asked.num_ranks,
        gradients=gradients,
        digest=_digest(
            params, asked, (gradients, ranks_per_node, independent_rounds, relayed.value)
        ),
        rounds=tuple(planner.round(index) for index in range(asked.num_rounds)),
    )


def _digest(params: Sequence[ParamSpec], asked: BucketRequests, options: tuple[object, ...]) -> int:
    """63 bits of everything that the parts of all ranks follow from."""
    digest = hashlib.blake2b(digest_size=8)
    digest.update(repr((PLAN_VERSION, options, asked.ids.shape)).encode())
    digest.update(
        repr([(s.fqn, s.shape, s.slicing.value, s.requires_grad) for s in params]).encode()
    )
    # What the numbers in `ids` stand for: equal numbers of other buckets are other requests.
    for bucket in asked.buckets:
        refs = [
            (slot, r.param, r.region.row, r.region.num_rows, r.region.col, r.region.num_cols)
            for slot, r in bucket
        ]
        digest.update(repr(refs).encode())
    digest.update(asked.ids.tobytes())
    # Below 2^63, because ranks compare it in a tensor of int64.
    return int.from_bytes(digest.digest(), "big") >> 1
