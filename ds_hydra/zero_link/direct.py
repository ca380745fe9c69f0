"""Direct routes: every rank reads every shard itself."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ds_hydra.zero_link.layout import Blocks, IntArray, ParamSpec, Region, Regions, ShardTable
from ds_hydra.zero_link.messages import Batch, Bucket, BucketEntry, Phase, RankBuckets, Round, Store


class AskedBuckets:
    """Which of the distinct buckets each rank asks for in each round.

    Ranks of data parallel pipelines ask for equal buckets, so everything else is computed once for
    each of `buckets`, tuples of (slot, reference). `ids[rank, round]` is -1 where a rank has none.
    """

    def __init__(self, buckets: Sequence[tuple[tuple[int, BucketEntry], ...]], ids: IntArray):
        self.buckets = buckets
        self.ids = ids
        self.num_ranks, self.num_rounds = ids.shape

    @classmethod
    def of(cls, rank_buckets: Sequence[RankBuckets], gradients: bool) -> AskedBuckets:
        """From the buckets of all ranks; with `gradients` only the slices that push."""
        by_value: dict[Bucket, int] = {}
        by_object: dict[int, int] = {}
        ids = np.full(
            (len(rank_buckets), max(map(len, rank_buckets), default=0)), -1, dtype=np.int64
        )
        for rank, buckets in enumerate(rank_buckets):
            for index, bucket in enumerate(buckets):
                known = by_object.get(id(bucket))
                if known is None:  # hashing a bucket is dear: once for each object
                    known = by_object[id(bucket)] = by_value.setdefault(bucket, len(by_value))
                ids[rank, index] = known
        kept = [
            tuple(
                (slot, ref)
                for slot, ref in enumerate(bucket)
                if ref.region.numel and (ref.pushes_gradient or not gradients)
            )
            for bucket in by_value
        ]
        return cls(kept, ids)

    def peers_by_bucket(self, index: int, ranks: Iterable[int]) -> dict[int, tuple[int, ...]]:
        """For each distinct bucket of round `index`, those of `ranks` that ask for it."""
        groups: dict[int, list[int]] = {}
        for rank, bucket in zip(ranks, self.ids[list(ranks), index].tolist()):
            if bucket >= 0 and self.buckets[bucket]:
                groups.setdefault(bucket, []).append(rank)
        return {bucket: tuple(members) for bucket, members in groups.items()}


@dataclass(frozen=True, slots=True, eq=False)
class Asks:
    """What one reader needs in one round: regions, and the slice (slot and rectangle) each one is
    part of.
    """

    regions: Regions
    slot: IntArray
    slice_row: IntArray
    slice_col: IntArray
    slice_cols: IntArray
    cell: IntArray

    @classmethod
    def of(cls, items: Sequence[tuple[int, int, Region, Region, int]]) -> Asks:
        """From (param, slot, region, the slice's region, cell)."""
        slices = np.array(
            [(slot, s.row, s.col, s.num_cols, cell) for _, slot, _, s, cell in items],
            dtype=np.int64,
        ).reshape(-1, 5)
        return cls(
            Regions.of((param, region) for param, _, region, _, _ in items), *slices.T.copy()
        )

    def where(self, chosen: npt.NDArray[np.bool_]) -> Asks:
        """The chosen ones."""
        index = np.flatnonzero(chosen)
        columns = (self.slot, self.slice_row, self.slice_col, self.slice_cols, self.cell)
        return Asks(self.regions.take(index), *(column[index] for column in columns))


class DirectPlanner:
    """Direct routes: every rank reads every shard itself."""

    def __init__(self, params: Sequence[ParamSpec], asked: AskedBuckets, rank: int):
        self.table = ShardTable(params, asked.num_ranks)
        self.asked = asked
        self.rank = rank
        self._asks: dict[int, Asks] = {}

    def round(self, index: int) -> Round:
        """This rank's part in round `index`."""
        return Round((self.shard_phase(index, range(self.asked.num_ranks)),))

    def asks(self, rank: int, index: int) -> Asks:
        """What `rank` needs in round `index`."""
        bucket = int(self.asked.ids[rank, index])
        if bucket not in self._asks:
            kept = self.asked.buckets[bucket] if bucket >= 0 else ()
            self._asks[bucket] = Asks.of(
                [(r.param, slot, r.region, r.region, -1) for slot, r in kept]
            )
        return self._asks[bucket]

    def shard_phase(self, index: int, ranks: range) -> Phase:
        """Own shards to the readers among `ranks`, own slices out of the shards of `ranks`."""
        me = np.array([self.rank])
        own = self.asks(self.rank, index)
        outgoing = []
        for members in self.readers(index, ranks):
            asks = self.asks(members[0], index)
            outgoing.append(Batch(Store.SHARD, members, self.shard_pieces(asks.regions, me)))
        blocks = self.table.mutual_blocks(own.regions, me)
        local: tuple[tuple[Batch, Batch], ...] = ()
        if len(blocks.item):
            local = (
                (
                    Batch(Store.SHARD, (), self.shard_pieces(own.regions, me)),
                    Batch(Store.SLICE, (), slice_pieces(own, blocks, self.table)),
                ),
            )
        others = np.array([rank for rank in ranks if rank != self.rank], dtype=np.int64)
        return Phase(
            outgoing=tuple(batch for batch in outgoing if len(batch.table)),
            incoming=self.slices_from(own, others, others),
            local=local,
        )

    def readers(self, index: int, ranks: range) -> Iterable[tuple[int, ...]]:
        """Groups of other `ranks` that need the same in round `index`."""
        others = [rank for rank in ranks if rank != self.rank]
        return self.asked.peers_by_bucket(index, others).values()

    def shard_pieces(self, regions: Regions, owner: IntArray) -> IntArray:
        """Places of all blocks of `regions` in the shards of the one rank in `owner`."""
        blocks = self.table.mutual_blocks(regions, owner)
        param = regions.param[blocks.item]
        offset = blocks.start - owner[0] * self.table.shard_numel[param]
        return _pieces(param, offset, self.table.num_cols[param], blocks)

    def slices_from(self, asks: Asks, owners: IntArray, senders: IntArray) -> tuple[Batch, ...]:
        """Blocks of `asks` that arrive from each sender, out of the shards of `owners` that it
        serves.

        `senders` ascend; owners[i] is served by senders[i].
        """
        if not len(owners) or not len(asks.slot):
            return ()
        blocks = self.table.mutual_blocks(asks.regions, owners)
        pieces = slice_pieces(asks, blocks, self.table)
        return split_by_peer(Store.SLICE, senders[blocks.item // len(asks.slot)], pieces)


def slice_pieces(asks: Asks, blocks: Blocks, table: ShardTable) -> IntArray:
    """Places of all blocks in the reader's slices."""
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
