"""The home of a host: one copy of the weights and sums of their gradients, for all ranks of a run.

[Note: Home]
A home holds every parameter whole, in memory that the ranks of the host share, so a rank reads the
weights of a layer where they are, and adds its gradients there, without another rank doing
anything for it. The ranks of the host share the cost: `itemsize + 8` bytes a parameter, divided by
their number.

ZeRO-3 cuts every parameter into a shard for each rank, and DeepSpeed's optimizer wants the shards
of a rank in one piece. So a parameter is never in one piece among the shards, and they cannot be
the home themselves: at the beginning of an iteration each rank copies its shards, a part of
1 / ranks of the weights, to their place in the home.

Sums are those of `exact_sums.py`. Of each, the upper half lies where the fp32 gradients of the
shards lie, which an engine has anyway and which `collect` replaces by the sums.

Accelerators have no memory that is one for all ranks of a host: `peer_home.py` is their home.
"""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from ds_hydra.engine.ranks.shared_memory import SharedMemory
from ds_hydra.engine.transfer.exact_sums import Adder, digit_width, value_of
from ds_hydra.engine.transfer.stream_plan import home_bytes
from ds_hydra.zero_link import ParamSpec, Region

PIECE_NUMEL = 1 << 17
"""Elements that are added under one lock: about half a millisecond."""

_ALIGNMENT = 64


class Home(ABC):
    """What a home does for streamed layers, wherever its memory is.

    `fill`, `begin_sums`, then a barrier, then `read`, `copy` and `add` in any order on any rank,
    `finish_adds`, then a barrier, then `collect`.
    """

    has_views: bool
    """Whether `read` gives what is in one piece."""
    grads_P: list[Tensor]
    """This rank's fp32 gradient shards, which `collect` may replace in place."""
    weight_bytes: int
    """This rank's part of the weights."""
    sum_bytes: int
    """This rank's part of the sums, without the memory of `grads_P`."""

    @abstractmethod
    def fill(self, shards_P: Sequence[Tensor]) -> None:
        """Take over this rank's shards of all parameters."""

    @abstractmethod
    def begin_sums(self, num_addends: int) -> None:
        """Set this rank's part of the sums to zero; every element gets at most `num_addends`."""

    @abstractmethod
    def read(self, param: int, region: Region) -> Tensor | None:
        """The weights in `region`, flat, where they are; None where they are not in one piece."""

    @abstractmethod
    def copy(self, param: int, region: Region, into: Tensor) -> None:
        """Copy the weights in `region` into the flat tensor `into`."""

    @abstractmethod
    def add(self, param: int, region: Region, grad: Tensor) -> None:
        """Add `grad`, any shape, to the sums of `region`; waits only for adds to the same rows. It
        may not change before `finish_adds`.
        """

    @abstractmethod
    def finish_adds(self) -> None:
        """Return once what this rank added is in the sums."""

    def collect(self, grads_P: Sequence[Tensor]) -> None:
        """Put the sums of this rank's shards, where they are trained, into `grads_P`; once in an
        iteration.
        """
        rank, num_ranks = dist.get_rank(), dist.get_world_size()
        for param, spec in enumerate(self._specs):
            if spec.requires_grad:
                numel = spec.shard_numel(num_ranks)
                self._evaluate(param, slice(rank * numel, (rank + 1) * numel), grads_P[param])

    @property
    @abstractmethod
    def address(self) -> int:
        """Where its memory, or this rank's part of it, begins."""

    @abstractmethod
    def close(self) -> None:
        """Let go of the memory."""

    _specs: Sequence[ParamSpec]

    @abstractmethod
    def _evaluate(self, param: int, run: slice, values: Tensor) -> None:
        """Put the sums of the elements `run` into `values`, which may lie in place of their upper
        half.
        """


class Sums(NamedTuple):
    """Those of a rectangle of a parameter: `high`, `low` [m, n], `top` [m, 1]."""

    high: Tensor
    low: Tensor
    top: Tensor


class SharedMemoryHome(Home):
    """A home in memory of the host, for its ranks. Collective over all ranks of the run.

    `close` lets go of it.
    """

    has_views = True

    def __init__(
        self,
        specs: Sequence[ParamSpec],
        dtype: torch.dtype,
        device: torch.device,
        purpose: str,
    ):
        self._specs = specs
        self._rank, self._num_ranks = dist.get_rank(), dist.get_world_size()
        layout = Layout()
        padded = [spec.shard_numel(self._num_ranks) * self._num_ranks for spec in specs]
        trained = [spec.requires_grad for spec in specs]
        weights = [layout.reserve(n, dtype) for n in padded]
        high = [layout.reserve(n * t, torch.int32) for n, t in zip(padded, trained, strict=True)]
        low = [layout.reserve(n * t, torch.int32) for n, t in zip(padded, trained, strict=True)]
        top = [
            layout.reserve(spec.num_rows * t, torch.int32)
            for spec, t in zip(specs, trained, strict=True)
        ]
        ranks = tuple(range(self._num_ranks))
        self._memory = SharedMemory(ranks, layout.nbytes, purpose, device)
        bytes_ = self._memory.bytes
        self._weights = [take(bytes_) for take in weights]
        self._high, self._low, self._top = (
            [take(bytes_) for take in part] for part in (high, low, top)
        )
        self._high_begin = [take.keywords["begin"] for take in high]
        self.grads_P = [
            flat.view(torch.float32)[self._shard(spec)] if spec.requires_grad else torch.empty(0)
            for spec, flat in zip(specs, self._high, strict=True)
        ]
        widest = max(spec.num_cols for spec in specs)
        self._adder = Adder(max(PIECE_NUMEL, widest), device)
        self._width = 0
        own = home_bytes(specs, dtype.itemsize, self._num_ranks)
        self.weight_bytes = own.weights
        self.sum_bytes = own.sums + self._adder.nbytes

    def fill(self, shards_P: Sequence[Tensor]) -> None:
        """Copy this rank's shards to their place."""
        for spec, weights, shard_P in zip(self._specs, self._weights, shards_P, strict=True):
            weights[self._shard(spec)].copy_(shard_P)

    def begin_sums(self, num_addends: int) -> None:
        """Set this rank's part of the sums to zero; every element gets at most `num_addends`."""
        self._width = digit_width(num_addends)
        for spec, high, low in zip(self._specs, self._high, self._low, strict=True):
            if spec.requires_grad:
                high[self._shard(spec)].zero_()
                low[self._shard(spec)].zero_()
        for param in range(self._rank, len(self._specs), self._num_ranks):
            self._top[param].zero_()

    def read(self, param: int, region: Region) -> Tensor | None:
        """The weights in `region`, flat, where they are; None where they are not in one piece."""
        num_cols = self._specs[param].num_cols
        if region.num_cols != num_cols and region.num_rows > 1:
            return None
        begin = region.row * num_cols + region.col
        return self._weights[param][begin : begin + region.numel]

    def copy(self, param: int, region: Region, into: Tensor) -> None:
        """Copy the weights in `region` into the flat tensor `into`."""
        matrix = self._matrix(self._weights, param)
        rows = matrix[region.row : region.row + region.num_rows]
        into.view(region.num_rows, region.num_cols).copy_(
            rows[:, region.col : region.col + region.num_cols]
        )

    def add(self, param: int, region: Region, grad: Tensor) -> None:
        """Add `grad`, any shape, to the sums of `region`; waits only for adds to the same rows."""
        addend = grad.detach().reshape(region.num_rows, region.num_cols)
        sums = self._sums(param)
        num_cols = self._specs[param].num_cols
        for begin, end in self._pieces(region):
            rows = slice(region.row + begin, region.row + end)
            begin_byte = self._high_begin[param] + rows.start * num_cols * 4
            with self._memory.locked(begin_byte, (end - begin) * num_cols * 4):
                self._adder.add(
                    sums.high[rows],
                    sums.low[rows],
                    sums.top[rows],
                    addend[begin:end],
                    region.col,
                    self._width,
                )

    def finish_adds(self) -> None:
        """Nothing to wait for: they are done when `add` returns."""

    @property
    def address(self) -> int:
        """Where its memory begins."""
        return self._memory.bytes.untyped_storage().data_ptr()

    def close(self) -> None:
        """Let go of the memory."""
        self._memory.close()

    def _shard(self, spec: ParamSpec) -> slice:
        numel = spec.shard_numel(self._num_ranks)
        return slice(self._rank * numel, (self._rank + 1) * numel)

    def _evaluate(self, param: int, run: slice, values: Tensor) -> None:
        spec, sums = self._specs[param], self._sums(param)
        for rows, cols in rectangles(
            run.start, min(run.stop, spec.numel), spec.num_cols, PIECE_NUMEL
        ):
            high, low = sums.high[rows, cols], sums.low[rows, cols]
            value = value_of(high, low, sums.top[rows], self._width)
            begin = rows.start * spec.num_cols + cols.start - run.start
            values[begin : begin + value.numel()].copy_(value.flatten())

    def _matrix(self, flats: Sequence[Tensor], param: int) -> Tensor:
        spec = self._specs[param]
        return flats[param][: spec.numel].view(spec.num_rows, spec.num_cols)

    def _sums(self, param: int) -> Sums:
        high, low = self._matrix(self._high, param), self._matrix(self._low, param)
        return Sums(high, low, self._top[param].view(-1, 1))

    def _pieces(self, region: Region) -> Iterator[tuple[int, int]]:
        """Rows of `region` that are added under one lock; each rank begins elsewhere, so that few
        wait.
        """
        step = max(1, PIECE_NUMEL // max(region.num_cols, 1))
        count = -(-region.num_rows // step)
        for index in range(count):
            begin = (index + self._rank * count // self._num_ranks) % count * step
            yield begin, min(begin + step, region.num_rows)


class Layout:
    """Where tensors lie in one piece of memory."""

    def __init__(self) -> None:
        self.nbytes = 0

    def reserve(self, numel: int, dtype: torch.dtype) -> functools.partial[Tensor]:
        """What takes a flat tensor [numel] out of the memory, as bytes."""
        begin = self.nbytes
        self.nbytes += -(-numel * dtype.itemsize // _ALIGNMENT) * _ALIGNMENT
        return functools.partial(_cut, begin=begin, numel=numel, dtype=dtype)


def _cut(memory: Tensor, *, begin: int, numel: int, dtype: torch.dtype) -> Tensor:
    # By way of `data`, so that an add is no modification of weights that autograd has saved.
    return memory[begin : begin + numel * dtype.itemsize].view(dtype).data


def rectangles(
    begin: int, end: int, num_cols: int, piece_numel: int
) -> Iterator[tuple[slice, slice]]:
    """Elements [begin, end) of a row-major matrix as rectangles of at most `piece_numel` elements,
    or one row.

    >>> [(rows.start, cols.start, cols.stop) for rows, cols in rectangles(3, 11, 4, 8)]
    [(0, 3, 4), (1, 0, 4), (2, 0, 3)]
    """
    step = max(1, piece_numel // num_cols)
    while begin < end:
        row, col = divmod(begin, num_cols)
        if col or end - begin < num_cols:
            last = min(end - row * num_cols, num_cols)
            yield slice(row, row + 1), slice(col, last)
            begin = row * num_cols + last
        else:
            rows = min(step, (end - begin) // num_cols)
            yield slice(row, row + rows), slice(0, num_cols)
            begin += rows * num_cols
