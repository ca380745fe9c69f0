"""What one rank exchanges to get its slices out of the ZeRO-3 shards, and gradients back to the owners.

[Note: Rounds]
The unit of exchange is a bucket: the slices of one decoder layer, of the embedding, or of the head. In round r
every rank receives its own r-th bucket and serves the r-th bucket of everyone else, with one all-to-all over
all ranks. Ranks with fewer buckets (later pipeline stages, idle ranks) take part in every round, because they
own shards that others need.

A push is the pull with roles swapped, over the slices whose gradient this rank contributes; owners add up what
arrives. That one rule subsumes data parallel reduction, tied embeddings and shared key-value heads.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ds_hydra.zero_link.layout import BlockCopy, ParamSpec, Region, mutual_blocks


@dataclass(frozen=True, slots=True)
class SliceRef:
    """One slice in a bucket: which parameter, which rectangle, and whether its gradient is pushed."""

    param: int
    region: Region
    pushes_gradient: bool


Bucket = tuple[SliceRef, ...]
RankBuckets = tuple[Bucket, ...]
"""The buckets of one rank in the order in which propagation needs them; empty for an idle rank."""


@dataclass(frozen=True, slots=True)
class Transfer:
    """One block on its way between a flat shard and a slice, through a packed exchange buffer.

    `slot` is the index of the slice in its bucket, `buffer_offset` the block's place in the packed buffer.
    """

    param: int
    slot: int
    buffer_offset: int
    block: BlockCopy


@dataclass(frozen=True, slots=True, kw_only=True)
class Round:
    """One exchange, as seen by one rank.

    `shard_side` reads (pull) or accumulates into (push) this rank's shards, ordered by the other rank;
    `slice_side` writes (pull) or reads (push) this rank's slices, ordered by the owner; `local` needs no wire.
    Splits count elements per other rank.
    """

    shard_side: tuple[Transfer, ...]
    shard_splits: tuple[int, ...]
    slice_side: tuple[Transfer, ...]
    slice_splits: tuple[int, ...]
    local: tuple[Transfer, ...]


@dataclass(frozen=True, kw_only=True)
class LinkPlan:
    """All rounds of one rank for one strategy, in one direction."""

    rank: int
    num_ranks: int
    rounds: tuple[Round, ...]

    @property
    def sent_elements(self) -> int:
        """Elements that leave this rank's shards over the wire in a pull (arrive there in a push)."""
        return sum(sum(r.shard_splits) for r in self.rounds)

    @property
    def received_elements(self) -> int:
        """Elements that arrive in this rank's slices over the wire in a pull (leave them in a push)."""
        return sum(sum(r.slice_splits) for r in self.rounds)

    @property
    def local_elements(self) -> int:
        """Elements copied inside this rank."""
        return sum(t.block.numel for r in self.rounds for t in r.local)


def plan_link(
    params: Sequence[ParamSpec], rank_buckets: Sequence[RankBuckets], rank: int, *, gradients: bool = False
) -> LinkPlan:
    """The part of `rank` in pulling every rank's buckets; with `gradients`, the slices that are pushed.

    Pure: every rank computes its own part from the same arguments, and the parts fit together because
    both ends enumerate (bucket slot, block) in the same order.
    """
    num_ranks = len(rank_buckets)
    num_rounds = max((len(buckets) for buckets in rank_buckets), default=0)
    rounds = []
    for index in range(num_rounds):
        buckets = [buckets[index] if index < len(buckets) else () for buckets in rank_buckets]
        rounds.append(_plan_round(params, buckets, rank, num_ranks, gradients))
    return LinkPlan(rank=rank, num_ranks=num_ranks, rounds=tuple(rounds))


def _plan_round(
    params: Sequence[ParamSpec], buckets: Sequence[Bucket], rank: int, num_ranks: int, gradients: bool
) -> Round:
    # Members of data parallel pipelines ask for identical buckets: intersect each distinct bucket once.
    served = {bucket: _blocks_of_owner(params, bucket, rank, num_ranks, gradients) for bucket in set(buckets)}
    per_reader = [served[bucket] for bucket in buckets]
    per_owner = [
        _blocks_of_owner(params, buckets[rank], owner, num_ranks, gradients) for owner in range(num_ranks)
    ]
    shard_side, shard_splits = _pack(per_reader, skip=rank)
    slice_side, slice_splits = _pack(per_owner, skip=rank)
    local, _ = _pack([served[buckets[rank]]], skip=None)
    return Round(
        shard_side=shard_side,
        shard_splits=shard_splits,
        slice_side=slice_side,
        slice_splits=slice_splits,
        local=local,
    )


_Blocks = list[tuple[int, int, BlockCopy]]  # (param, slot, block)


def _blocks_of_owner(
    params: Sequence[ParamSpec], bucket: Bucket, owner: int, num_ranks: int, gradients: bool
) -> _Blocks:
    """Blocks of every slice in `bucket` that lie in the shards of rank `owner`."""
    blocks: _Blocks = []
    for slot, ref in enumerate(bucket):
        if gradients and not ref.pushes_gradient:
            continue
        spec = params[ref.param]
        shard = spec.shard_numel(num_ranks)
        found = mutual_blocks(spec, ref.region, owner * shard, (owner + 1) * shard)
        blocks += [(ref.param, slot, block) for block in found]
    return blocks


def _pack(per_peer: Sequence[_Blocks], skip: int | None) -> tuple[tuple[Transfer, ...], tuple[int, ...]]:
    """Consecutive places in one buffer for the blocks of all peers, and the elements of each peer."""
    transfers: list[Transfer] = []
    splits: list[int] = []
    offset = 0
    for peer, blocks in enumerate(per_peer):
        begin = offset
        if peer != skip:
            for param, slot, block in blocks:
                transfers.append(Transfer(param, slot, offset, block))
                offset += block.numel
        splits.append(offset - begin)
    return tuple(transfers), tuple(splits)
