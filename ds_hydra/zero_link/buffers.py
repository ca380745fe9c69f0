"""Memory of an exchange: shards, slices and packed buffers as views, which strided copies fill and
empty a buffer, and buffers that outlive their round.

[Note: One all-to-all]
The host pays for every message and every copy, beside kernel launches of the same interpreter. So
all that goes to a rank in one hop lies together in one buffer, and blocks that lie alike for
consecutive ranks are one copy. CPU ranks do the same.

[Note: Sums in packed buffers]
Owners add what arrives in the order of ranks. Where ranks that contribute the same blocks
contribute to disjoint elements than all others, each such class is summed in a buffer of its own,
one addition for each rank: the same additions of each element in the same order.

Legend: tensors ending in `_P` are flat ZeRO-3 shards of one parameter, tensors ending in `_S` flat
slices.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from ds_hydra.zero_link.layout import (
    ALIGNMENT_BYTES,
    Batch,
    Hop,
    IntArray,
    Store,
)


@dataclass(frozen=True, slots=True)
class StridedCopy:
    """A block of [count, rows, cols] elements, in a store and in a packed buffer."""

    store: Store
    key: int
    begin: int
    strides: tuple[int, int]
    shape: tuple[int, int, int]
    packed_begin: int
    packed_stride: int

    @property
    def is_plain(self) -> bool:
        """Whether its elements lie one after another on both sides."""
        count, rows, cols = self.shape
        is_block = rows == 1 or self.strides[1] == cols
        return is_block and (count == 1 or self.strides[0] == self.packed_stride == rows * cols)


@dataclass(frozen=True, slots=True)
class Copies:
    """Copies of one list, plain ones first: the host decides once which go into one kernel."""

    each: tuple[StridedCopy, ...]
    num_plain: int

    @classmethod
    def of(cls, copies: Iterable[StridedCopy]) -> Copies:
        """`copies` in the order of the list."""
        each = sorted(copies, key=lambda copy: not copy.is_plain)
        return cls(tuple(each), sum(copy.is_plain for copy in each))


@dataclass(frozen=True, slots=True)
class PackedBuffer:
    """Layout of a send or receive buffer: elements for every rank, and the copies between stores
    and buffer.
    """

    splits: tuple[int, ...]
    copies: Copies

    @property
    def numel(self) -> int:
        """Elements of the buffer."""
        return sum(self.splits)


_FEW = 2
"""Contributions to a block that are added where the sum belongs."""


# No slots: cached properties live in the dict of an object.
@dataclass(frozen=True)
class OrderedSum:
    """Contributions to equal blocks of this rank's shards, in the order of ranks: where each begins
    in the receive buffer, None for this rank's own.
    """

    numel: int
    begins: tuple[int | None, ...]
    targets: Copies
    own: Copies

    @cached_property
    def is_direct(self) -> bool:
        """Whether a sum in fp32 is made where it belongs: for two ranks that takes half of the
        kernels, for many the host would pay for a view of every block of each.
        """
        own, blocks = (
            [(copy.shape, copy.packed_begin) for copy in copies.each]
            for copies in (self.own, self.targets)
        )
        # Own blocks are added to targets pair by pair, so both have to have merged alike.
        return len(self.begins) <= _FEW and (not own or own == blocks)


@dataclass(frozen=True, slots=True)
class PackedHop:
    """Buffers of a hop of a round. `shards`, or relayed parts of other nodes, are sent in a pull
    and received in a push; `slices`, or parts to be relayed, the other way round.
    """

    shards: PackedBuffer
    slices: PackedBuffer
    additions: tuple[OrderedSum, ...]
    owned: Copies
    needed: Copies
    """Blocks that this rank both owns and needs: in the shard, and in slices."""


def pack_hop(hop: Hop, rank: int, num_ranks: int) -> PackedHop:
    """Plan the packing of `hop`: the copies that fill and empty its buffers. Pure."""
    shards = _packed_buffer(hop.outgoing, num_ranks)
    local = [
        tuple(_block(batch, piece) for batch, piece in zip(both, pieces))
        for both in hop.local
        for pieces in zip(*(batch.table.tolist() for batch in both), strict=True)
    ]
    # A pair may share the one kernel only if both of its ends are plain.
    local.sort(key=lambda both: not all(copy.is_plain for copy in both))
    num_plain = sum(all(copy.is_plain for copy in both) for both in local)
    owned, needed = zip(*local) if local else ((), ())
    return PackedHop(
        shards=shards,
        slices=_packed_buffer(hop.incoming, num_ranks),
        additions=tuple(_ordered_sums(hop, rank, shards.splits)),
        owned=Copies(owned, num_plain),
        needed=Copies(needed, num_plain),
    )


def _block(batch: Batch, piece: Sequence[int]) -> StridedCopy:
    """A row of the table of `batch`, in its store alone."""
    key, offset, stride, rows, cols = piece
    # Goes straight from store to store, hence no place in a packed buffer.
    return StridedCopy(batch.store, key, offset, (0, stride), (1, rows, cols), 0, 0)


def _packed_buffer(batches: Sequence[Batch], num_ranks: int) -> PackedBuffer:
    """Messages in the order of ranks, batches of a rank in their order, as both ends have them."""
    splits = [0] * num_ranks
    for batch in batches:
        for peer in batch.peers:
            splits[peer] += batch.numel
    begins = np.concatenate([[0], np.cumsum(splits)])[:-1].tolist()
    by_peer: list[tuple[int, Batch]] = [(peer, b) for b in batches for peer in b.peers]
    places = []
    for peer, batch in sorted(by_peer, key=lambda entry: entry[0]):  # stable: batches in order
        places.append((batch, begins[peer]))
        begins[peer] += batch.numel
    return PackedBuffer(tuple(splits), _merge_blocks(places))


def _merge_blocks(places: Iterable[tuple[Batch, int]]) -> Copies:
    """Copies between the blocks of each batch and a buffer in which they begin at a given place,
    one after another; equal blocks at equal distances are one copy.
    """
    known: dict[_Kind, list[_Places]] = {}
    runs: list[tuple[_Kind, _Places]] = []
    for batch, begin in places:
        for key, offset, stride, rows, cols in batch.table.tolist():
            kind = (batch.store, key, stride, rows, cols)
            alike = known.setdefault(kind, [])
            # Not the last run alone: blocks of two runs may alternate.
            run = next((run for run in alike if _goes_on(run, offset, begin)), None)
            if run is None:
                run = []
                alike.append(run)
                runs.append((kind, run))
            run.append((offset, begin))
            begin += rows * cols
    return Copies.of(_copy_of(kind, run) for kind, run in runs)


_Kind = tuple[Store, int, int, int, int]
"""Store, key, stride, rows and columns of a block."""
_Places = list[tuple[int, int]]
"""Begins of equal blocks, in the store and in the buffer, at equal distances."""


def _distance(run: _Places) -> tuple[int, int]:
    if len(run) == 1:
        return 0, 0
    (offset, begin), (next_offset, next_begin) = run[:2]
    return next_offset - offset, next_begin - begin


def _goes_on(run: _Places, offset: int, begin: int) -> bool:
    """Whether a block there continues `run`."""
    last_offset, last_begin = run[-1]
    step = offset - last_offset, begin - last_begin
    # `as_strided` takes no negative stride, and no place of the buffer is filled twice.
    return step[0] >= 0 and step[1] > 0 and (len(run) == 1 or step == _distance(run))


def _copy_of(kind: _Kind, run: _Places) -> StridedCopy:
    store, key, stride, rows, cols = kind
    (offset, begin), step = run[0], _distance(run)
    shape = (len(run), rows, cols)
    return StridedCopy(store, key, offset, (step[0], stride), shape, begin, step[1])


_NOTHING = Copies((), 0)


def _ordered_sums(hop: Hop, rank: int, splits: Sequence[int]) -> Iterator[OrderedSum]:
    """Sums into this rank's shards. Classes of ranks where these are disjoint, else rank by
    rank.
    """
    begins = np.concatenate([[0], np.cumsum(splits)])[:-1].tolist()
    parts: list[tuple[int, Batch, int | None, Copies]] = []
    for batch in hop.outgoing:
        for peer in batch.peers:
            parts.append((peer, batch, begins[peer], _NOTHING))
            begins[peer] += batch.numel
    for target, source in hop.local:
        parts.append((rank, target, None, _merge_blocks([(source, 0)])))
    # Stable: what this rank adds itself takes its place in the order, and batches keep theirs.
    parts.sort(key=lambda part: part[0])
    # What a hop serves is of one store, so equal tables are the same elements.
    classes: dict[bytes, list[tuple[int, Batch, int | None, Copies]]] = {}
    for part in parts:
        classes.setdefault(part[1].table.tobytes(), []).append(part)
    # Where an element is in two classes they would change the order in which ranks add to it.
    are_apart = len(classes) < 2 or _are_disjoint([found[0][1].table for found in classes.values()])
    for found in classes.values() if are_apart else [[part] for part in parts]:
        batch = found[0][1]
        # At most one is this rank's own, as a hop has at most one pair of local batches.
        own = next((copies for *_, copies in found if copies.each), _NOTHING)
        targets = _merge_blocks([(batch, 0)])
        yield OrderedSum(batch.numel, tuple(part[2] for part in found), targets, own)


def _are_disjoint(tables: Sequence[IntArray]) -> bool:
    """Whether no element of a shard is in two of `tables`, one at least."""
    pieces = np.concatenate(tables)
    # Run by run, because strided blocks may lie between each other's runs and still be disjoint.
    keys, offsets, strides, rows, cols = np.repeat(pieces, pieces[:, 3], axis=0).T
    row = np.arange(len(rows)) - np.repeat(pieces[:, 3].cumsum() - pieces[:, 3], pieces[:, 3])
    begins = offsets + row * strides
    order = np.lexsort((begins, keys))
    # Of runs of elements in order, each has to end before the next one of its tensor begins
    keys, begins, ends = keys[order], begins[order], (begins + cols)[order]
    return not ((keys[1:] == keys[:-1]) & (begins[1:] < ends[:-1])).any()


@dataclass(frozen=True, slots=True)
class Stores:
    """The tensors that one round reads and writes, of one type; those it does not touch may be
    empty.
    """

    dtype: torch.dtype
    shards_P: Sequence[Tensor]
    slices_S: Sequence[Tensor]
    stages: dict[int, Tensor]

    def views(self, copies: Copies) -> list[Tensor]:
        """[count, rows, cols] of each copy in its store."""
        of = (self.shards_P, self.slices_S, self.stages)  # as `Store` numbers them
        # `as_strided` counts from where the storage begins, which other slices share.
        return [
            tensor.as_strided(copy.shape, (*copy.strides, 1), tensor.storage_offset() + copy.begin)
            for copy in copies.each
            for tensor in (of[copy.store][copy.key],)
        ]


def packed_views(buffer: Tensor, copies: Copies) -> list[Tensor]:
    """[count, rows, cols] of each copy in the packed buffer."""
    begin = buffer.storage_offset()
    return [
        buffer.as_strided(
            copy.shape, (copy.packed_stride, copy.shape[2], 1), begin + copy.packed_begin
        )
        for copy in copies.each
    ]


def run_pairs(
    targets: list[Tensor],
    sources: list[Tensor],
    num_plain: int,
    run: Callable[[list[Tensor], list[Tensor]], object] = torch._foreach_copy_,
) -> None:
    """Call `run` on pairs: the plain ones, which come first, in one kernel where the device has
    one.
    """
    if num_plain:
        run(targets[:num_plain], sources[:num_plain])
    # One strided pair in the list would make torch run all of it tensor by tensor.
    for number in range(num_plain, len(targets)):
        run([targets[number]], [sources[number]])


class ExchangeBuffers:
    """Packed send and receive buffers of one thread's rounds, taken when a round begins and given
    back when it ends.

    On the CPU they are kept for the rounds to come, because touching memory for the first time is
    slow there: as many as were in use at once, none larger than the largest that was wanted.
    Elsewhere the device's caching allocator does the same.
    """

    def __init__(self, device: torch.device):
        self._device = device
        self._caches = device.type == "cpu"
        self._free: list[Tensor] = []
        self._taken: dict[int, Tensor] = {}

    @property
    def nbytes(self) -> int:
        """Bytes held, in use or not."""
        return sum(memory.numel() for memory in (*self._free, *self._taken.values()))

    def forget_failed(self) -> None:
        """Release buffers that failed rounds did not give back; call when no round is under way."""
        self._taken.clear()  # a message may still write to them

    def take(self, numel: int, dtype: torch.dtype) -> Tensor:
        """A flat tensor [numel] of unknown content."""
        nbytes = -(-numel * dtype.itemsize // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
        # An empty tensor is never in `_taken`: its address would not tell it from others.
        if not nbytes or not self._caches:
            return torch.empty(numel, dtype=dtype, device=self._device)
        self._free.sort(key=Tensor.numel)
        index = next((i for i, m in enumerate(self._free) if m.numel() >= nbytes), -1)
        # The smallest one that has room; else the largest one goes, before a larger one is made.
        memory = self._free.pop(index) if self._free else torch.empty(0, dtype=torch.uint8)
        if memory.numel() < nbytes:
            del memory
            memory = torch.empty(nbytes, dtype=torch.uint8)
        # By address, because `give_back` gets a view of another type and length.
        self._taken[memory.data_ptr()] = memory
        return memory[: numel * dtype.itemsize].view(dtype)

    def give_back(self, tensor: Tensor) -> None:
        """Let later rounds use the memory of `tensor`, which `take` returned."""
        if tensor.numel() and self._caches:
            self._free.append(self._taken.pop(tensor.data_ptr()))
