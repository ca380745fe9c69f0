"""What travels in a link, as values: blocks, messages, rounds, and the plan of one rank."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from functools import cached_property
from typing import NamedTuple

from ds_hydra.zero_link.layout import IntArray, Region

ALIGNMENT_BYTES = 64
"""Packed buffers begin at multiples of it."""

SINGLE_NUMEL = 1 << 15
"""Blocks of this many elements travel alone, without a copy where memory allows; smaller ones are
packed.
"""


@dataclass(frozen=True, slots=True)
class BucketEntry:
    """One slice in a bucket: which parameter, which rectangle, and whether its gradient is
    pushed.
    """

    param: int
    region: Region
    pushes_gradient: bool


Bucket = tuple[BucketEntry, ...]
RankBuckets = tuple[Bucket, ...]
"""The buckets of one rank in the order in which propagation needs them; empty for an idle rank."""


def keep_only(
    rank_buckets: Sequence[RankBuckets], keeps: Callable[[int], bool]
) -> list[RankBuckets]:
    """`rank_buckets` with an empty region in place of the slices of a parameter that `keeps` says
    no of, so that slots keep their numbers. Equal buckets that are one object stay one.
    """
    nothing = Region(0, 0, 0, 0)
    kept: dict[int, RankBuckets] = {}
    for buckets in rank_buckets:
        # By identity, because hashing a bucket is dear; the caller holds all of them meanwhile.
        if id(buckets) not in kept:
            kept[id(buckets)] = tuple(
                tuple(e if keeps(e.param) else replace(e, region=nothing) for e in bucket)
                for bucket in buckets
            )
    return [kept[id(buckets)] for buckets in rank_buckets]


class Store(IntEnum):
    """Where a block lies on one rank; its `key` is the parameter, the slot in the round's bucket,
    or a round.
    """

    SHARD = 0
    SLICE = 1
    RELAY = 2


class StridedBlock(NamedTuple):
    """A strided block in one store: `rows` runs of `cols` elements, `stride` elements from run to
    run.
    """

    key: int
    offset: int
    stride: int
    rows: int
    cols: int

    @property
    def numel(self) -> int:
        """Elements of the block."""
        return self.rows * self.cols

    @property
    def is_run(self) -> bool:
        """Whether the block is contiguous."""
        return self.rows == 1 or self.stride == self.cols


STAYS = 1 << 62
"""After every round of a plan."""

Message = tuple[StridedBlock, ...]
"""What travels together: one large block, or all small ones of a batch, in order."""


# No slots: cached properties live in the dict of an object.
@dataclass(frozen=True, eq=False)
class Batch:
    """Blocks of one store, [n, 5] as in `StridedBlock`, that go to (or come from) each of `peers`
    in one hop.
    """

    store: Store
    peers: tuple[int, ...]
    table: IntArray

    @property
    def numel(self) -> int:
        """Elements of one copy."""
        return int((self.table[:, 3] * self.table[:, 4]).sum())

    @cached_property
    def pieces(self) -> tuple[StridedBlock, ...]:
        """The blocks in order."""
        return tuple(map(StridedBlock._make, self.table.tolist()))

    @cached_property
    def messages(self) -> tuple[Message, ...]:
        """Messages for each peer; both ends cut them alike, because a block has the same size on
        both.
        """
        # Only order tells the messages between two ranks apart, so both ends cut in this one.
        alone = [(piece,) for piece in self.pieces if piece.numel >= SINGLE_NUMEL]
        packed = tuple(piece for piece in self.pieces if piece.numel < SINGLE_NUMEL)
        return (*alone, packed) if packed else tuple(alone)


@dataclass(frozen=True, slots=True, eq=False)
class Hop:
    """Messages that do not wait for each other, as a pull sees them; a push swaps `outgoing` and
    `incoming`.

    `local` pairs need no wire.
    """

    outgoing: tuple[Batch, ...]
    incoming: tuple[Batch, ...]
    local: tuple[tuple[Batch, Batch], ...]


@dataclass(frozen=True, slots=True, eq=False)
class Round:
    """One exchange as seen by one rank: one hop, or with node-aware routes two.

    `relayed_numel` elements of other nodes are relayed here from this round of a pull to round
    `relayed_until`, or until the link forgets them (`STAYS`).
    """

    hops: tuple[Hop, ...]
    relayed_numel: int = 0
    relayed_until: int = 0


@dataclass(frozen=True, kw_only=True, eq=False)
class LinkPlan:
    """All rounds of one rank for one strategy, in one direction.

    `digest` is of what all ranks planned from, so it is equal on all of them.
    """

    rank: int
    num_ranks: int
    ranks_per_node: int | None
    gradients: bool
    digest: int
    rounds: tuple[Round, ...]

    @cached_property
    def sent_elements(self) -> Counter[int]:
        """Elements that leave this rank over the wire in a pull, for each rank they go to."""
        return self._count(hop.outgoing for round_ in self.rounds for hop in round_.hops)

    @cached_property
    def received_elements(self) -> Counter[int]:
        """Elements that arrive over the wire in a pull, for each rank they come from."""
        return self._count(hop.incoming for round_ in self.rounds for hop in round_.hops)

    @cached_property
    def local_elements(self) -> int:
        """Elements copied inside this rank."""
        return sum(a.numel for round_ in self.rounds for hop in round_.hops for a, _ in hop.local)

    @cached_property
    def relayed_elements(self) -> int:
        """The most elements of other nodes that are relayed on this rank at once."""
        held = [0] * len(self.rounds)
        for begin, round_ in enumerate(self.rounds):
            for at in range(begin, min(round_.relayed_until + 1, len(held))):
                held[at] += round_.relayed_numel
        return max(held, default=0)

    @cached_property
    def traffic_balance(self) -> int:
        """64-bit sum of fingerprints of all messages, received ones negative: over all ranks they
        cancel.
        """
        total = 0
        for number, round_ in enumerate(self.rounds):
            for step, hop in enumerate(round_.hops):
                for sign, batches in ((1, hop.outgoing), (-1, hop.incoming)):
                    for batch in batches:
                        for peer in batch.peers:
                            # Sender first on both ends, so that the two signs of a message cancel.
                            pair = (self.rank, peer) if sign > 0 else (peer, self.rank)
                            # The same elements in other blocks would be other messages.
                            sizes = (len(batch.table), batch.numel)
                            total += sign * _fingerprint(number, step, *pair, *sizes)
        # In the range of int64: ranks send it in such a tensor, and add it up modulo 2^64.
        return (total + (1 << 63)) % (1 << 64) - (1 << 63)

    def _count(self, groups: Iterable[Iterable[Batch]]) -> Counter[int]:
        counts = Counter[int]()
        for batches in groups:
            for batch in batches:
                counts.update(dict.fromkeys(batch.peers, batch.numel))
        return counts

    def __str__(self) -> str:
        routes = f"nodes of {self.ranks_per_node} ranks" if self.ranks_per_node else "direct routes"
        names = ("from", "to") if self.gradients else ("to", "from")
        lines = [
            f"{'push' if self.gradients else 'pull'} of rank {self.rank} of {self.num_ranks}, {routes}, "
            f"{len(self.rounds)} rounds, digest {self.digest:016x}; elements",
            f"{'rank':>6} {names[0]:>14} {names[1]:>14}",
        ]
        for peer in sorted({*self.sent_elements, *self.received_elements}):
            sent, received = self.sent_elements[peer], self.received_elements[peer]
            lines.append(f"{peer:>6} {sent:>14,} {received:>14,}")
        sent, received = self.sent_elements.total(), self.received_elements.total()
        lines.append(f"{'all':>6} {sent:>14,} {received:>14,}")
        lines.append(
            f"{self.local_elements:,} copied on this rank, {self.relayed_elements:,} relayed for its node"
        )
        return "\n".join(lines)


def _fingerprint(*numbers: int) -> int:
    """FNV-1a over whole numbers."""
    value = 0xCBF29CE484222325
    for number in numbers:
        value = ((value ^ number) * 0x100000001B3) & 0xFFFFFFFFFFFFFFFF
        # Products carry upwards alone; without the shift low bits would never see high ones.
        value ^= value >> 29
    return value
