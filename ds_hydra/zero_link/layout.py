"""Which rank holds which region of which parameter, in the two layouts that a link connects.

[Note: Two layouts]
A parameter is seen as a row-major matrix [rows, cols]; a vector of n elements is [n, 1].

*Optimization layout* (ZeRO-3): the flat parameter is cut into N shards of ceil(numel / N) elements; rank r
owns [r * ceil(numel / N), (r + 1) * ceil(numel / N)), the last shard may be padded or empty.

*Propagation layout*: rank t of a TP group holds one rectangle of the matrix, its slice.

    colwise   rows [t * R / tp, (t + 1) * R / tp)   (output features: q, k, v, gate, up; vocabulary rows)
    rowwise   cols [t * C / tp, (t + 1) * C / tp)   (input features: o, down)

A colwise parameter made of indivisible blocks (attention heads) is cut between blocks; where there are fewer
blocks than ranks (grouped-query attention) neighbouring ranks hold the same block.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from math import prod

from ds_hydra.errors import HydraConfigError


class Slicing(str, Enum):
    """How the ranks of a TP group share one parameter."""

    REPLICATED = "replicated"
    """Every rank holds all of it and computes the complete gradient: only rank 0 of the group pushes."""
    REPLICATED_PARTIAL_GRAD = "replicated_partial_grad"
    """Every rank holds all of it and computes a part of the gradient (q/k norms): all push, owners sum."""
    COLWISE = "colwise"
    ROWWISE = "rowwise"
    FIRST_RANK = "first_rank"
    """Only rank 0 of the group holds it, the others see zeros (bias of a rowwise layer, added once)."""


@dataclass(frozen=True, slots=True)
class Region:
    """Rectangle of a parameter's [rows, cols] view: rows [row, row + num_rows), cols [col, col + num_cols)."""

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

    `num_blocks` is the number of indivisible row blocks of a colwise parameter (heads); 0 means that it
    may be cut between any two rows.
    """

    fqn: str
    shape: tuple[int, ...]
    slicing: Slicing = Slicing.REPLICATED
    num_blocks: int = 0
    requires_grad: bool = True

    @property
    def numel(self) -> int:
        """Elements of the whole parameter."""
        return prod(self.shape)

    @property
    def num_rows(self) -> int:
        """Rows of the matrix view."""
        return self.shape[0] if self.shape else 1

    @property
    def num_cols(self) -> int:
        """Columns of the matrix view."""
        return prod(self.shape[1:])

    def shard_numel(self, num_ranks: int) -> int:
        """Elements of one ZeRO-3 shard, padding included (DeepSpeed's `partition_numel`)."""
        return -(-self.numel // num_ranks)

    def slice_region(self, tp_size: int, tp_rank: int) -> Region:
        """The rectangle that rank `tp_rank` of a TP group of `tp_size` ranks holds (may be empty).

        Raises HydraConfigError where `num_blocks` and `tp_size` do not divide each other.
        """
        if self.slicing is Slicing.COLWISE:
            begin, end = self._row_range(tp_size, tp_rank)
            return Region(begin, end - begin, 0, self.num_cols)
        if self.slicing is Slicing.ROWWISE:
            begin, end = _even_range(self.num_cols, tp_size, tp_rank)
            return Region(0, self.num_rows, begin, end - begin)
        if self.slicing is Slicing.FIRST_RANK and tp_rank > 0:
            return Region(0, 0, 0, self.num_cols)
        return Region(0, self.num_rows, 0, self.num_cols)

    def slice_shape(self, region: Region) -> tuple[int, ...]:
        """Tensor shape of a slice; a FIRST_RANK slice keeps the full shape on every rank."""
        if self.slicing in (Slicing.COLWISE, Slicing.ROWWISE) and self.shape:
            if self.slicing is Slicing.ROWWISE:
                return (self.shape[0], region.num_cols)
            return (region.num_rows, *self.shape[1:])
        return self.shape

    def pushes_gradient(self, tp_rank: int) -> bool:
        """Whether rank `tp_rank` of the group contributes to this parameter's gradient at the owners."""
        if not self.requires_grad:
            return False
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
    return part * total // num_parts, (part + 1) * total // num_parts


@dataclass(frozen=True, slots=True)
class BlockCopy:
    """A strided block shared by a shard and a slice: `num_rows` runs of `num_cols` contiguous elements.

    Element (i, j) is at `shard_offset + i * shard_stride + j` of the flat shard and at
    `slice_offset + i * slice_stride + j` of the flat slice.
    """

    shard_offset: int
    shard_stride: int
    slice_offset: int
    slice_stride: int
    num_rows: int
    num_cols: int

    @property
    def numel(self) -> int:
        """Elements copied."""
        return self.num_rows * self.num_cols


def mutual_blocks(spec: ParamSpec, region: Region, shard_begin: int, shard_end: int) -> list[BlockCopy]:
    """The intersection of `region` with the flat range [shard_begin, shard_end): a mutual slice (§5.2).

    At most three blocks: the tail of a first row, whole rows, the head of a last row; in flat order.

    >>> spec = ParamSpec(fqn="w", shape=(4, 4), slicing=Slicing.ROWWISE)
    >>> [block.numel for block in mutual_blocks(spec, Region(0, 4, 0, 2), 1, 9)]
    [1, 2, 1]
    """
    return list(_mutual_blocks(spec, region, shard_begin, min(shard_end, spec.numel)))


def _mutual_blocks(spec: ParamSpec, region: Region, begin: int, end: int) -> Iterator[BlockCopy]:
    cols = spec.num_cols
    if region.numel == 0 or begin >= end:
        return
    if region.num_cols == cols:  # whole rows: one contiguous run
        low = max(begin, region.row * cols)
        high = min(end, (region.row + region.num_rows) * cols)
        if low < high:
            run = high - low
            yield BlockCopy(low - begin, run, low - region.row * cols, run, 1, run)
        return

    def block(row: int, num_rows: int, col: int, num_cols: int) -> BlockCopy:
        return BlockCopy(
            shard_offset=row * cols + col - begin,
            shard_stride=cols,
            slice_offset=(row - region.row) * region.num_cols + col - region.col,
            slice_stride=region.num_cols,
            num_rows=num_rows,
            num_cols=num_cols,
        )

    def partial_row(row: int) -> Iterator[BlockCopy]:
        low = max(begin - row * cols, region.col)
        high = min(end - row * cols, region.col + region.num_cols)
        if low < high:
            yield block(row, 1, low, high - low)

    first_row = max(region.row, begin // cols)
    last_row = min(region.row + region.num_rows, -(-end // cols))  # exclusive
    first_whole = max(first_row, -(-(begin - region.col) // cols))
    last_whole = min(last_row, (end - region.col - region.num_cols) // cols + 1)
    if first_whole >= last_whole:
        for row in range(first_row, last_row):
            yield from partial_row(row)
        return
    for row in range(first_row, first_whole):
        yield from partial_row(row)
    yield block(first_whole, last_whole - first_whole, region.col, region.num_cols)
    for row in range(last_whole, last_row):
        yield from partial_row(row)
