"""A phase of a round as one all-to-all: which strided copies fill its buffers and empty them.

On an accelerator the host pays for every message and every copy, beside kernel launches of the
same interpreter. So all that goes to a rank lies together in one buffer, and blocks that lie alike
for consecutive ranks are one copy.

[Note: Sums in packed buffers]
Owners add what arrives in the order of ranks. Where ranks that contribute the same blocks
contribute to disjoint elements than all others, each such class is summed in a buffer of its own,
one addition for each rank: the same additions of each element in the same order.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from ds_hydra.zero_link.layout import IntArray
from ds_hydra.zero_link.messages import Batch, Phase, Store

MAX_MARKED = 1 << 23
"""Elements that are marked at most to see whether sums are disjoint; larger shards are of few
ranks, which have few blocks.
"""


@dataclass(frozen=True, slots=True)
class Copy:
    """A block of [count, rows, cols] elements, in a store and in a packed buffer."""

    store: Store
    key: int
    begin: int
    strides: tuple[int, int]
    shape: tuple[int, int, int]
    packed_begin: int
    packed_stride: int


@dataclass(frozen=True, slots=True)
class Side:
    """What a rank sends, or receives: elements for every rank, and the copies between stores and
    buffer.
    """

    splits: tuple[int, ...]
    copies: tuple[Copy, ...]

    @property
    def numel(self) -> int:
        """Elements of the buffer."""
        return sum(self.splits)


@dataclass(frozen=True, slots=True)
class Addition:
    """Contributions to equal blocks of this rank's shards, in the order of ranks: where each begins
    in the receive buffer, None for this rank's own.
    """

    numel: int
    begins: tuple[int | None, ...]
    targets: tuple[Copy, ...]
    own: tuple[Copy, ...]


@dataclass(frozen=True, slots=True)
class PackedPhase:
    """A phase of a round. `shards`, or what is relayed of other nodes, is sent in a pull and
    received in a push; `slices`, or what comes to be relayed, the other way round.
    """

    shards: Side
    slices: Side
    additions: tuple[Addition, ...]


def pack_phase(phase: Phase, rank: int, num_ranks: int) -> PackedPhase:
    """How `phase` fills and empties its buffers. Pure."""
    shards = _side(phase.outgoing, num_ranks)
    return PackedPhase(
        shards=shards,
        slices=_side(phase.incoming, num_ranks),
        additions=tuple(_additions(phase, rank, shards.splits)),
    )


def _side(batches: Sequence[Batch], num_ranks: int) -> Side:
    """Messages in the order of ranks, batches of a rank in their order, as both ends have them."""
    splits = [0] * num_ranks
    for batch in batches:
        for peer in batch.peers:
            splits[peer] += batch.numel
    begins = np.concatenate([[0], np.cumsum(splits)])[:-1].tolist()
    by_peer: list[tuple[int, Batch]] = [(peer, b) for b in batches for peer in b.peers]
    open_: dict[tuple[int, ...], list[_Run]] = {}
    runs: list[_Run] = []
    for peer, batch in sorted(by_peer, key=lambda entry: entry[0]):  # stable: batches in order
        for key, offset, stride, rows, cols in batch.table.tolist():
            kind = (int(batch.store), key, stride, rows, cols)
            known = open_.setdefault(kind, [])
            run = next((run for run in known if run.takes(offset, begins[peer])), None)
            if run is None:
                run = _Run(batch.store, key, offset, stride, rows, cols, begins[peer])
                known.append(run)
                runs.append(run)
            else:
                run.add(offset, begins[peer])
            begins[peer] += rows * cols
    return Side(tuple(splits), tuple(run.copy() for run in runs))


class _Run:
    """Equal blocks at equal distances, in the store and in the buffer."""

    __slots__ = ("_count", "_first", "_kind", "_last", "_step")

    def __init__(
        self, store: Store, key: int, offset: int, stride: int, rows: int, cols: int, begin: int
    ):
        self._kind = (store, key, stride, rows, cols)
        self._first = self._last = (offset, begin)
        self._step = (0, 0)
        self._count = 1

    def takes(self, offset: int, begin: int) -> bool:
        step = (offset - self._last[0], begin - self._last[1])
        if step[0] < 0 or step[1] <= 0:
            return False
        return self._count == 1 or step == self._step

    def add(self, offset: int, begin: int) -> None:
        self._step = (offset - self._last[0], begin - self._last[1])
        self._last = (offset, begin)
        self._count += 1

    def copy(self) -> Copy:
        store, key, stride, rows, cols = self._kind
        offset, begin = self._first
        shape = (self._count, rows, cols)
        return Copy(store, key, offset, (self._step[0], stride), shape, begin, self._step[1])


def _alone(batch: Batch) -> tuple[Copy, ...]:
    """Copies between one message of `batch` and a buffer that begins with it."""
    copies, begin = [], 0
    for key, offset, stride, rows, cols in batch.table.tolist():
        copies.append(Copy(batch.store, key, offset, (0, stride), (1, rows, cols), begin, 0))
        begin += rows * cols
    return tuple(copies)


def _additions(phase: Phase, rank: int, splits: Sequence[int]) -> Iterator[Addition]:
    """What is added to this rank's shards. Classes of ranks where these are disjoint, else rank by
    rank.
    """
    begins = np.concatenate([[0], np.cumsum(splits)])[:-1].tolist()
    parts: list[tuple[int, Batch, int | None, tuple[Copy, ...]]] = []
    for batch in phase.outgoing:
        for peer in batch.peers:
            parts.append((peer, batch, begins[peer], ()))
            begins[peer] += batch.numel
    for target, source in phase.local:
        parts.append((rank, target, None, _alone(source)))
    parts.sort(key=lambda part: part[0])
    classes: dict[bytes, list[tuple[int, Batch, int | None, tuple[Copy, ...]]]] = {}
    for part in parts:
        classes.setdefault(part[1].table.tobytes(), []).append(part)
    are_apart = len(classes) == 1 or _are_disjoint(
        [found[0][1].table for found in classes.values()]
    )
    for found in classes.values() if are_apart else [[part] for part in parts]:
        batch = found[0][1]
        own = next((copies for *_, copies in found if copies), ())
        yield Addition(batch.numel, tuple(part[2] for part in found), _alone(batch), own)


def _are_disjoint(tables: Sequence[IntArray]) -> bool:
    """Whether no element of a shard is in two of `tables`; False where that is too long to find
    out.
    """
    pieces = [piece for table in tables for piece in table.tolist()]
    sizes: dict[int, int] = {}
    for key, offset, stride, rows, cols in pieces:
        sizes[key] = max(sizes.get(key, 0), offset + (rows - 1) * stride + cols)
    if sum(sizes.values()) > MAX_MARKED:
        return False
    marked = {key: np.zeros(size, dtype=bool) for key, size in sizes.items()}
    for key, offset, stride, rows, cols in pieces:
        inside = marked[key][offset : offset + (rows - 1) * stride + cols]
        item = np.lib.stride_tricks.as_strided(inside, (rows, cols), (stride, 1))
        if item.any():
            return False
        item[:] = True
    return True
