"""Regions of parameters that each rank holds, in the two layouts that a link connects. Their
transfers are values: blocks, batches, rounds, and the plan of one rank.

[Note: Two layouts]
A parameter is seen as a row-major matrix [rows, cols]; a vector of n elements is [n, 1].

*Optimization layout* (ZeRO-3): the flat parameter is cut into N shards of ceil(numel / N) elements;
rank r owns [r * ceil(numel / N), (r + 1) * ceil(numel / N)), the last may be padded or empty.

*Propagation layout*: rank t of a TP group holds one rectangle of the matrix, its slice.

    colwise   rows [t * R / tp, (t + 1) * R / tp)   (output features: q, k, v, gate, up; vocabulary)
    rowwise   cols [t * C / tp, (t + 1) * C / tp)   (input features: o, down)

A rowwise parameter may have more dimensions, and be cut along any of them: what stands before that
dimension are its rows. Two matrices that one dimension packs are rows as well, so that every rank
gets a part of both: of the gate_up [E, 2 I, H] of E experts seen as [E * 2, I * H] each rank has
columns, and of their down [E, H, I] seen as [E * H, I].

A colwise parameter made of indivisible blocks (attention heads) is cut between blocks; where there
are fewer blocks than ranks (grouped-query attention) neighbouring ranks hold the same block.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum, IntEnum
from functools import cached_property
from math import prod
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ds_hydra.errors import HydraConfigError


class Slicing(str, Enum):
    """Way in which the ranks of a TP group share one parameter."""

    REPLICATED = "replicated"
    """Every rank holds all of it and computes the complete gradient: only rank 0 of the group
    pushes.
    """
    REPLICATED_PARTIAL_GRAD = "replicated_partial_grad"
    """Every rank holds all of it and computes a part of the gradient (q/k norms): all push, owners
    sum.
    """
    COLWISE = "colwise"
    ROWWISE = "rowwise"
    FIRST_RANK = "first_rank"
    """Only rank 0 of the group holds it, the others see zeros (bias of a rowwise layer, added
    once).
    """


@dataclass(frozen=True, slots=True)
class Region:
    """Rectangle of a parameter's [rows, cols] view: rows [row, row + num_rows), cols [col, col +
    num_cols).
    """

    row: int
    num_rows: int
    col: int
    num_cols: int

    @property
    def numel(self) -> int:
        """Elements in the rectangle."""
        return self.num_rows * self.num_cols


@dataclass(frozen=True, slots=True, kw_only=True)
class ParamSpec:
    """One parameter of the model as the link sees it.

    `num_blocks` is the number of indivisible row blocks of a colwise parameter (heads); 0 means
    that it may be cut between any two rows. A rowwise one is cut along dimension `cut_dim`, which
    packs `num_packed` matrices, at multiples of `cut_multiple`. The first
    dimension of the `num_experts` of a layer is shared under EP.
    """

    fqn: str
    shape: tuple[int, ...]
    slicing: Slicing = Slicing.REPLICATED
    num_blocks: int = 0
    cut_dim: int = 1
    num_packed: int = 1
    cut_multiple: int = 1
    num_experts: int = 0
    requires_grad: bool = True

    @property
    def numel(self) -> int:
        """Elements of the whole parameter."""
        return prod(self.shape)

    @property
    def num_rows(self) -> int:
        """Rows of the matrix view."""
        if self.slicing is Slicing.ROWWISE:
            return prod(self.shape[: self.cut_dim]) * self.num_packed
        return self.shape[0] if self.shape else 1

    @property
    def num_cols(self) -> int:
        """Columns of the matrix view."""
        if self.slicing is Slicing.ROWWISE:
            return self.shape[self.cut_dim] // self.num_packed * self._cut_unit
        return prod(self.shape[1:])

    @property
    def num_steps(self) -> int:
        """Parts of a rowwise parameter that are not cut further."""
        return self.shape[self.cut_dim] // self.num_packed // self.cut_multiple

    @property
    def _cut_unit(self) -> int:
        """Columns that one step along the cut dimension takes."""
        return prod(self.shape[self.cut_dim + 1 :])

    def shard_numel(self, num_ranks: int) -> int:
        """Elements of one ZeRO-3 shard, padding included (DeepSpeed's `partition_numel`)."""
        return -(-self.numel // num_ranks)

    def slice_region(
        self, tp_size: int, tp_rank: int, ep_size: int = 1, ep_rank: int = 0
    ) -> Region:
        """The rectangle that rank `tp_rank` of a TP group of `tp_size` ranks holds (may be empty);
        of experts that ranks share part `ep_rank` of `ep_size`, whole ones.

        Raises HydraConfigError where `num_blocks` and `tp_size` do not divide each other.
        """
        # First, because experts that ranks share under EP are whole, however TP would cut them.
        if ep_size > 1 and self.num_experts:
            begin, end = _even_range(self.num_experts, ep_size, ep_rank)
            each = self.num_rows // self.num_experts
            return Region(begin * each, (end - begin) * each, 0, self.num_cols)
        if self.slicing is Slicing.COLWISE:
            begin, end = self._row_range(tp_size, tp_rank)
            return Region(begin, end - begin, 0, self.num_cols)
        if self.slicing is Slicing.ROWWISE:
            unit = self._cut_unit * self.cut_multiple
            begin, end = _even_range(self.num_steps, tp_size, tp_rank)
            return Region(0, self.num_rows, begin * unit, (end - begin) * unit)
        if self.slicing is Slicing.FIRST_RANK and tp_rank > 0:
            return Region(0, 0, 0, self.num_cols)
        return Region(0, self.num_rows, 0, self.num_cols)

    def slice_shape(self, region: Region) -> tuple[int, ...]:
        """Tensor shape of a slice; a FIRST_RANK slice keeps the full shape on every rank."""
        # Fewer rows than all are a part of the experts: TP cuts these by columns.
        if region.num_rows < self.num_rows and self.num_experts:
            return (self.num_experts * region.num_rows // self.num_rows, *self.shape[1:])
        if self.slicing in (Slicing.COLWISE, Slicing.ROWWISE) and self.shape:
            if self.slicing is Slicing.ROWWISE:
                width = region.num_cols // self._cut_unit * self.num_packed
                return (*self.shape[: self.cut_dim], width, *self.shape[self.cut_dim + 1 :])
            return (region.num_rows, *self.shape[1:])
        return self.shape

    def pushes_gradient(self, tp_rank: int, ep_size: int = 1) -> bool:
        """Whether rank `tp_rank` of the group contributes to this parameter's gradient at the
        owners.
        """
        if not self.requires_grad:
            return False
        if ep_size > 1 and self.num_experts:
            return True
        return tp_rank == 0 or self.slicing not in (Slicing.REPLICATED, Slicing.FIRST_RANK)

    def _row_range(self, tp_size: int, tp_rank: int) -> tuple[int, int]:
        blocks = self.num_blocks or self.num_rows
        block_rows = self.num_rows // blocks
        if self.num_blocks and blocks % tp_size and tp_size % blocks:
            raise HydraConfigError(
                f"{self.fqn}: TP {tp_size} and {blocks} heads do not divide each other; "
                f"use TP degrees that divide {blocks} in hydra.strategies"
            )
        if blocks < tp_size and self.num_blocks:
            begin, end = tp_rank * blocks // tp_size, tp_rank * blocks // tp_size + 1
        else:
            begin, end = _even_range(blocks, tp_size, tp_rank)
        return begin * block_rows, end * block_rows


def _even_range(total: int, num_parts: int, part: int) -> tuple[int, int]:
    # The end of a part is rounded as the begin of the next one, so that parts meet.
    return part * total // num_parts, (part + 1) * total // num_parts


IntArray = npt.NDArray[np.int64]


class Blocks(NamedTuple):
    """Mutual slices (§5.2) of many regions with many shards, one entry of each array per block, in
    flat order.

    Block b belongs to pair `item[b]` and is `rows[b]` runs of `cols[b]` contiguous elements; the
    first run starts at element `start[b]` of the flat parameter, the next ones a row of the
    parameter later each.
    """

    item: IntArray
    start: IntArray
    rows: IntArray
    cols: IntArray


class Regions(NamedTuple):
    """Rectangles of parameters as columns: parameter `param[i]`, rows and columns as in
    `Region`.
    """

    param: IntArray
    row: IntArray
    num_rows: IntArray
    col: IntArray
    num_cols: IntArray

    @classmethod
    def of(cls, regions: Iterable[tuple[int, Region]]) -> Regions:
        """Build the table from pairs of parameter and rectangle."""
        # Reshaped, because without regions the array has one dimension and no columns.
        table = np.array(
            [(param, r.row, r.num_rows, r.col, r.num_cols) for param, r in regions], dtype=np.int64
        ).reshape(-1, 5)
        return cls(*np.ascontiguousarray(table.T))

    def take(self, index: IntArray) -> Regions:
        """The rectangles at `index`."""
        return Regions(*(column[index] for column in self))


class ShardTable:
    """Shapes of all parameters and of their shards, for intersections of many regions at once."""

    def __init__(self, params: Sequence[ParamSpec], num_ranks: int):
        self.num_ranks = num_ranks
        self.numel = np.array([spec.numel for spec in params], dtype=np.int64)
        self.num_cols = np.array([spec.num_cols for spec in params], dtype=np.int64)
        self.shard_numel = np.array(
            [spec.shard_numel(num_ranks) for spec in params], dtype=np.int64
        )
        self._known: dict[bytes, Blocks] = {}

    def mutual_blocks(self, regions: Regions, owners: IntArray) -> Blocks:
        """The part of each region in each owner's shard; item `o * len(regions) + i` is region i,
        owners[o].

        At most three blocks for each pair: the tail of a first row, whole rows, the head of a last
        row.

        >>> spec = ParamSpec(fqn="w", shape=(4, 4), slicing=Slicing.ROWWISE)
        >>> regions = Regions.of([(0, Region(0, 4, 1, 2))])
        >>> blocks = ShardTable([spec], 2).mutual_blocks(regions, np.array([1]))
        >>> blocks.start.tolist(), blocks.rows.tolist(), blocks.cols.tolist()
        ([9], [2], [2])
        """
        param, *places = regions
        shape = (self.num_cols[param], self.numel[param])
        # The number of owners tells apart arrays that are only equal one behind the other.
        key = np.concatenate([*shape, *places, owners, [len(owners)]]).tobytes()
        if key not in self._known:  # the layers of a model differ in nothing that matters here
            self._known[key] = self._find_blocks(regions, owners)
        return self._known[key]

    def _find_blocks(self, regions: Regions, owners: IntArray) -> Blocks:
        size = (len(owners), len(regions.param))

        def spread(column: IntArray) -> IntArray:
            return np.broadcast_to(column, size).ravel()

        row_len = spread(self.num_cols[regions.param])
        numel = spread(self.numel[regions.param])
        shard = self.shard_numel[regions.param]
        # Shards are equally long, so that the last ones may lie beyond the parameter, empty.
        begin = np.minimum((owners[:, None] * shard[None, :]).ravel(), numel)
        end = np.minimum(begin + spread(shard), numel)
        row, col = spread(regions.row), spread(regions.col)
        row_end, col_end = row + spread(regions.num_rows), col + spread(regions.num_cols)
        is_some = (begin < end) & (row < row_end) & (col < col_end)
        is_run = (col_end - col) == row_len  # whole rows of the parameter: one contiguous run

        # Rows of the region of which the shard has any element.
        first = np.maximum(row, begin // row_len)
        last = np.minimum(row_end, -(-end // row_len))  # exclusive
        # Those of them whose columns of the region all lie in the shard: row r from r * row_len +
        # col, which is not before `begin`, to r * row_len + col_end, which is not behind `end`.
        first_whole = np.maximum(first, -(-(begin - col) // row_len))
        last_whole = np.minimum(last, (end - col_end) // row_len + 1)
        has_whole = first_whole < last_whole
        has_head = (first < last) & (~has_whole | (first < first_whole))
        # Without whole rows there are two partial ones where the shard reaches over the end of a
        # row.
        has_tail = np.where(has_whole, last > last_whole, last > first + 1)

        def partial_row(at: IntArray) -> tuple[IntArray, IntArray]:
            low = np.maximum(begin - at * row_len, col)
            return at * row_len + low, np.minimum(end - at * row_len, col_end) - low

        # Computed for every pair, sensible or not: `found` picks those that exist.
        head_start, head_cols = partial_row(first)
        tail_start, tail_cols = partial_row(last - 1)
        # Whole rows of the parameter are one run, which takes the place of the head.
        run_start = np.maximum(begin, row * row_len)
        run_cols = np.minimum(end, row_end * row_len) - run_start
        head_start, head_cols = (
            np.where(is_run, run_start, head_start),
            np.where(is_run, run_cols, head_cols),
        )
        # A row of which the shard has a part may have none of the region's columns in it.
        found = np.stack(
            [
                is_some & (is_run | has_head) & (head_cols > 0),
                is_some & ~is_run & has_whole,
                is_some & ~is_run & has_tail & (tail_cols > 0),
            ],
            axis=1,
        )
        one = np.ones_like(row)
        # In row-major order: pair by pair, and in flat order inside each.
        item, part = np.nonzero(found)
        starts = np.stack([head_start, first_whole * row_len + col, tail_start], axis=1)
        rows = np.stack([one, last_whole - first_whole, one], axis=1)
        cols = np.stack([head_cols, col_end - col, tail_cols], axis=1)
        return Blocks(item, starts[item, part], rows[item, part], cols[item, part])


ALIGNMENT_BYTES = 64
"""Packed buffers begin at multiples of it."""


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


class Store(IntEnum):
    """Memory of a block on one rank; its `key` is the parameter, the slot in the round's bucket, or
    a round.
    """

    SHARD = 0
    SLICE = 1
    RELAY = 2


STAYS = 1 << 62
"""Number of a round after every round of a plan."""


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """Strided blocks of one store that go to (or come from) each of `peers` in one hop.

    `table` [n, 5] has key, offset, stride, rows and columns of each: rows runs of columns elements,
    stride elements from run to run.
    """

    store: Store
    peers: tuple[int, ...]
    table: IntArray

    @property
    def numel(self) -> int:
        """Elements of one copy."""
        return int((self.table[:, 3] * self.table[:, 4]).sum())


@dataclass(frozen=True, slots=True, eq=False)
class Hop:
    """Batches that do not wait for each other, as a pull sees them; a push swaps `outgoing` and
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
    gradients: bool
    digest: int
    rounds: tuple[Round, ...]

    @cached_property
    def traffic_balance(self) -> int:
        """64-bit sum of fingerprints of all messages, received ones negative: over all ranks they
        cancel.
        """
        total = 0
        for number, round_ in enumerate(self.rounds):
            # Round and hop are part of the fingerprint: messages of others must not cancel.
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


def _fingerprint(*numbers: int) -> int:
    """FNV-1a over whole numbers."""
    value = 0xCBF29CE484222325
    for number in numbers:
        value = ((value ^ number) * 0x100000001B3) & 0xFFFFFFFFFFFFFFFF
        # Products carry upwards alone; without the shift low bits would never see high ones.
        value ^= value >> 29
    return value
