"""The home of a node of accelerators: a part on each device, which the others reach.

[Note: Home of accelerators]
The part of a rank holds its own shards, so filling and emptying touch no other device; reading a
layer copies its shards from the devices that hold them, into the slots of two layers;
adding sends a gradient to the ranks that hold its shards ([Note: Inbox]), each of which adds to its
own sums, in threads beside computation, which waits for them only when `passing_bytes` of gradients
are under way. Sums are kept as `exact_sums.py` says, by rows within a shard, so they have the same
bits in any order.
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from ds_hydra.engine.parallel.groups import GroupPool
from ds_hydra.engine.ranks.peer_memory import ALLOCATORS, PeerMemory
from ds_hydra.engine.ranks.shared_memory import SharedMemory
from ds_hydra.engine.transfer.exact_sums import Adder, digit_width, value_of
from ds_hydra.engine.transfer.home import Home, Layout, SharedMemoryHome, Sums, rectangles
from ds_hydra.engine.transfer.inbox import Inbox, control_bytes
from ds_hydra.engine.transfer.link_session import DeviceClock, LinkThread
from ds_hydra.engine.transfer.stream_plan import STREAM_WINDOW
from ds_hydra.zero_link import ParamSpec, Region

PIECE_NUMEL = 1 << 22
"""Elements that are added at once: a device has no use for small pieces, and scratch of 32 MiB."""


class _Part(NamedTuple):
    """What a rank holds of one parameter, its shard: tensors [n], `top` [rows of the shard]."""

    weights: Tensor
    high: Tensor
    low: Tensor
    top: Tensor


class _ShardRun(NamedTuple):
    """Elements [begin, end) of a flat parameter, within one shard."""

    begin: int
    end: int
    shard: int


class _Piece(NamedTuple):
    """What a sender says of a piece of a gradient: its columns begin at `addend_col` of the
    rectangle of `param` in which they lie.
    """

    param: int
    shard: int
    begin_row: int
    end_row: int
    begin_col: int
    end_col: int
    addend_col: int


class PeerHome(Home):
    """A `Home` on the devices of a host, whose ranks `group` has, all of the run. Collective.

    It adds in threads of its own, whether or not the link overlaps: no rank could wait for another
    that computes.
    """

    has_views = False

    def __init__(
        self,
        specs: Sequence[ParamSpec],
        dtype: torch.dtype,
        device: torch.device,
        group: dist.ProcessGroup,
        purpose: str,
        passing_bytes: int,
    ):
        self._specs = specs
        self._rank, num_ranks = dist.get_rank(), dist.get_world_size()
        self._numels = [spec.shard_numel(num_ranks) for spec in specs]
        widest, largest = (max(numel) for numel in zip(*((s.num_cols, s.numel) for s in specs)))
        piece_numel = max(widest, min(PIECE_NUMEL, largest))
        layout = _parts_layout(specs, self._numels, dtype)
        take_slots = layout.reserve(num_ranks * piece_numel, torch.float32)
        self._memory = PeerMemory(group, layout.nbytes, purpose, device)
        ranks = tuple(range(num_ranks))
        self._control = SharedMemory(ranks, control_bytes(num_ranks), purpose, device)
        self._parts = [layout.cut(part) for part in self._memory.parts]
        own = self._parts[self._rank]
        self.grads_P = [
            part.high.view(torch.float32) if spec.requires_grad else torch.empty(0)
            for spec, part in zip(specs, own, strict=True)
        ]
        self._clock = DeviceClock(device)
        self._inbox = Inbox(
            [take_slots(p).view(torch.uint8).view(num_ranks, -1) for p in self._memory.parts],
            self._control,
            self._rank,
            self._clock,
        )
        self._sender = LinkThread(device, overlap=True)
        self._server = LinkThread(device, overlap=True)
        self._pending: deque[tuple[Future[None], int]] = deque()
        self._passing_bytes = passing_bytes
        self._serving: Future[None] | None = None
        self._adder, self._piece_numel = Adder(piece_numel, device), piece_numel
        self._width = 0
        self.weight_bytes = sum(part.weights.nbytes for part in own)
        self.sum_bytes = (
            layout.nbytes
            - self.weight_bytes
            - sum(grad_P.nbytes for grad_P in self.grads_P)
            + self._adder.nbytes
            + passing_bytes
        )
        """This rank's part of the sums, without `grads_P`, and gradients under way."""

    def fill(self, shards_P: Sequence[Tensor]) -> None:
        """Copy this rank's shards to their place."""
        own = [part.weights for part in self._parts[self._rank]]
        torch._foreach_copy_(own, list(shards_P))

    def begin_sums(self, num_addends: int) -> None:
        """Set this rank's part of the sums to zero; every element gets at most `num_addends`."""
        self._inbox.begin()  # ends what an iteration that failed has left
        while self._pending:
            self._pending.popleft()[0].exception()
        self._width = digit_width(num_addends)
        own = [
            part
            for spec, part in zip(self._specs, self._parts[self._rank], strict=True)
            if spec.requires_grad
        ]
        torch._foreach_zero_([sums for part in own for sums in (part.high, part.low, part.top)])
        serve = functools.partial(self._serve, self._clock.stamp())
        self._serving = self._server.submit(serve)

    def read(self, param: int, region: Region) -> Tensor | None:
        """None: weights come in copies."""
        return None

    def copy(self, param: int, region: Region, into: Tensor) -> None:
        """Copy the weights in `region` into the flat tensor `into`."""
        spec = self._specs[param]
        targets, sources = [], []
        matrix = into.view(region.num_rows, region.num_cols)
        for run in self._shard_runs(param, region):
            begin = self._numels[param] * run.shard
            weights = self._parts[run.shard][param].weights
            if region.num_cols == spec.num_cols:
                offset = region.row * spec.num_cols
                targets.append(into[run.begin - offset : run.end - offset])
                sources.append(weights[run.begin - begin : run.end - begin])
                continue
            for rows, cols in rectangles(run.begin, run.end, spec.num_cols, self._piece_numel):
                shared = _common(cols, region)
                if shared is None:
                    continue
                targets.append(matrix[_shifted(rows, region.row), _shifted(shared, region.col)])
                sources.append(_rectangle(weights, begin, rows, shared, spec.num_cols))
        torch._foreach_copy_(targets, sources)

    def add(self, param: int, region: Region, grad: Tensor) -> None:
        """Let `grad`, any shape, be added to the sums of `region`; it may not change any more."""
        addend = grad.detach().reshape(region.num_rows, region.num_cols)
        job = functools.partial(self._send, param, region, addend, self._clock.stamp())
        self._pending.append((self._sender.submit(job), grad.nbytes))
        while len(self._pending) > 1 and (
            sum(nbytes for _, nbytes in self._pending) > self._passing_bytes
        ):
            self._pending.popleft()[0].result()

    def finish_adds(self) -> None:
        """Return once what was added is in the sums, and let the current stream go on after it.
        Raises what went wrong.
        """
        while self._pending:
            self._pending.popleft()[0].result()
        if self._serving is not None:
            self._inbox.finish()
            self._serving.result()  # which others' ranks finish, without waiting for this one
            self._serving = None
            if self._inbox.served is not None:
                self._clock.wait_for(self._inbox.served)

    @property
    def address(self) -> int:
        """Where this rank's part begins."""
        return self._memory.parts[self._rank].untyped_storage().data_ptr()

    def close(self) -> None:
        """Let go of the memory."""
        self._inbox.begin()  # ends what is under way
        self._sender.close()
        self._server.close()
        self._control.close()

    def _shard_runs(self, param: int, region: Region) -> Iterator[_ShardRun]:
        """The rows of `region`, by shards."""
        num_cols = self._specs[param].num_cols
        begin, end = region.row * num_cols, (region.row + region.num_rows) * num_cols
        return _by_shards(begin, end, self._numels[param])

    def _send(self, param: int, region: Region, addend: Tensor, stamp: Any) -> None:
        """Give the parts of a gradient to the ranks that hold them; each begins elsewhere."""
        self._clock.wait_for(stamp)
        num_cols = self._specs[param].num_cols
        runs = list(self._shard_runs(param, region))
        first = len(runs) * self._rank // len(self._parts)
        for run in runs[first:] + runs[:first]:
            for rows, cols in rectangles(run.begin, run.end, num_cols, self._piece_numel):
                shared = _common(cols, region)
                if shared is not None:
                    part = addend[_shifted(rows, region.row), _shifted(shared, region.col)]
                    corners = rows.start, rows.stop, cols.start, cols.stop
                    addend_col = shared.start - cols.start
                    self._inbox.send(
                        run.shard, _Piece(param, run.shard, *corners, addend_col), part
                    )

    def _serve(self, stamp: Any) -> None:
        self._clock.wait_for(stamp)
        self._inbox.serve(self._add)

    def _add(self, what: list[int], addend: Tensor) -> None:
        piece = _Piece._make(what)
        rows = slice(piece.begin_row, piece.end_row)
        block = self._block(piece.param, piece.shard, rows, slice(piece.begin_col, piece.end_col))
        self._adder.add(*block, addend, piece.addend_col, self._width)

    def _block(self, param: int, shard: int, rows: slice, cols: slice) -> Sums:
        """Sums of a rectangle of whole rows, as far as they are in the shard."""
        num_cols, first = self._specs[param].num_cols, shard * self._numels[param]
        part = self._parts[shard][param]
        high, low = (
            _rectangle(flat, first, rows, cols, num_cols) for flat in (part.high, part.low)
        )
        return Sums(high, low, part.top[_shifted(rows, first // num_cols)].view(-1, 1))

    def _evaluate(self, param: int, run: slice, values: Tensor) -> None:
        if self._inbox.served is not None:
            self._clock.wait_for(self._inbox.served)
        end = min(run.stop, self._specs[param].numel)
        num_cols = self._specs[param].num_cols
        for part in _by_shards(run.start, end, self._numels[param]):
            for rows, cols in rectangles(part.begin, part.end, num_cols, self._piece_numel):
                block = self._block(param, part.shard, rows, cols)
                value = value_of(block.high, block.low, block.top, self._width)
                offset = rows.start * num_cols + cols.start - run.start
                values[offset : offset + value.numel()].copy_(value.flatten())


def open_home(
    specs: Sequence[ParamSpec],
    layers: Sequence[Sequence[int]],
    dtype: torch.dtype,
    device: torch.device,
    groups: GroupPool,
    purpose: str,
) -> Home:
    """The home of the run's host, on devices such as `device`, for `layers` of these parameters.
    Collective over all ranks.
    """
    if device.type not in ALLOCATORS:
        return SharedMemoryHome(specs, dtype, device, purpose)
    everyone = range(dist.get_world_size())
    groups.create([("home", everyone)])
    group = groups.get("home", everyone)
    widest = max(sum(specs[param].numel for param in layer) for layer in layers)
    passing_bytes = STREAM_WINDOW * widest * dtype.itemsize
    return PeerHome(specs, dtype, device, group, purpose, passing_bytes)


class _PartsLayout(Layout):
    """Where the tensors of all parameters lie in a rank's part."""

    def __init__(self) -> None:
        super().__init__()
        self._takes: list[list[Any]] = []

    def add(self, *tensors: tuple[int, torch.dtype]) -> None:
        """Room for the tensors of one parameter, by size and dtype."""
        self._takes.append([self.reserve(numel, dtype) for numel, dtype in tensors])

    def cut(self, memory: Tensor) -> list[_Part]:
        """The tensors of each parameter in a part."""
        return [_Part(*(take(memory) for take in row)) for row in self._takes]


def _parts_layout(
    specs: Sequence[ParamSpec], numels: Sequence[int], dtype: torch.dtype
) -> _PartsLayout:
    layout = _PartsLayout()
    for spec, numel in zip(specs, numels, strict=True):
        num_rows = min(spec.num_rows, (numel - 1) // spec.num_cols + 2)
        sums = numel * spec.requires_grad, torch.int32
        top = num_rows * spec.requires_grad, torch.int32
        layout.add((numel, dtype), sums, sums, top)
    return layout


def _by_shards(begin: int, end: int, shard_numel: int) -> Iterator[_ShardRun]:
    """
    >>> [tuple(run) for run in _by_shards(3, 9, 4)]
    [(3, 4, 0), (4, 8, 1), (8, 9, 2)]
    """
    while begin < end:
        shard = begin // shard_numel
        last = min(end, (shard + 1) * shard_numel)
        yield _ShardRun(begin, last, shard)
        begin = last


def _rectangle(flat: Tensor, first: int, rows: slice, cols: slice, num_cols: int) -> Tensor:
    """Elements of a matrix, of which `flat` holds those from `first` on."""
    offset = flat.storage_offset() + rows.start * num_cols + cols.start - first
    shape = rows.stop - rows.start, cols.stop - cols.start
    return flat.as_strided(shape, (num_cols, 1), offset)


def _common(cols: slice, region: Region) -> slice | None:
    """Columns that are in both."""
    begin, end = max(cols.start, region.col), min(cols.stop, region.col + region.num_cols)
    return slice(begin, end) if begin < end else None


def _shifted(part: slice, offset: int) -> slice:
    """`part`, counted from `offset` on."""
    return slice(part.start - offset, part.stop - offset)
