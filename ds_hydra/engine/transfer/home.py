"""The home of a host: one copy of the weights and sums of their gradients, for all ranks of a run.

[Note: Home]
ZeRO-3 cuts every parameter into a shard for each rank, and DeepSpeed's optimizer wants the shards
of a rank in one piece. So a parameter is never in one piece among the shards, and they cannot be
the home themselves: at the beginning of an iteration each rank copies its shards to its part of the
home, 1 / ranks of the weights. Its part of the sums, of the same elements, is read by nobody else.
The ranks share the cost: `itemsize + 8` bytes a parameter, divided by their number.

Sums are those of `exact_sums.py`, by rows within a shard. Of each, the upper half lies where the
fp32 gradients of the shards lie, which an engine has anyway and which `collect` replaces by the
sums.

There are two kinds of memory. Ranks of the CPU share all of it: a rank reads the weights of a layer
where they are, and adds its gradients to the sums itself, under locks (`SharedMemoryHome`). Devices
have a part each, which the others map: reading a layer copies its shards into the slots of two
layers, and a gradient is sent to the ranks that hold its shards ([Note: Inbox]), each of which adds
to its own sums (`PeerHome`). Gradients are sent and added by threads beside computation, which
waits for them only when `passing_bytes` of gradients are under way, and never for long.

[Note: Inbox]
Gradients go to the rank that sums them, and no rank waits for another one's computation. Each rank
of a host has a slot for every rank of it, itself included, in memory that all of them reach. A
sender waits until its slot is free, copies a piece there, and describes the piece in counters and
words of memory that the processes of the host share. The owner's thread finds the piece, adds it to
its own sums, and frees the slot. Sender and owner are threads that do nothing else. The owner's
thread ends when every sender has said that it is done.
"""

from __future__ import annotations

import functools
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, wait
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from ds_hydra.engine.parallel.groups import GroupPool
from ds_hydra.engine.ranks.agreement import raise_together
from ds_hydra.engine.ranks.hosts import ALLOCATORS, PeerMemory, SharedMemory
from ds_hydra.engine.ranks.process import find_overlap_problem
from ds_hydra.engine.transfer.exact_sums import Adder, digit_width, value_of
from ds_hydra.engine.transfer.link_thread import Cancelled, DeviceClock, LinkThread
from ds_hydra.engine.transfer.schedule import is_in_one_piece
from ds_hydra.errors import HydraConfigError
from ds_hydra.strategy.profiles.memory_model import STREAM_WINDOW
from ds_hydra.zero_link import ParamSpec, Region

_LOCKED_NUMEL = 1 << 17
"""Elements that are added under one lock: about half a millisecond."""
HELD_UP_S = 0.2
"""How long computation waits for gradients under way, which take some milliseconds."""
_SENT_NUMEL = 1 << 22
"""Elements that are sent at once: a device has no use for small pieces, and scratch of 32 MiB."""

_ALIGNMENT = 64

_POLL_S = 5e-5
"""Between two looks at words that another process writes."""
_STATE, _DONE, _DTYPE, _SHAPE, _WHAT = 0, 1, 2, slice(3, 5), slice(5, 12)
"""Places of the words of a slot."""
_WORDS = 12
_FREE, _FULL, _FAILED = 0, 1, 2
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class Part(NamedTuple):
    """What a home holds of a shard of one parameter: tensors [n], `top` [rows of the shard]."""

    weights: Tensor
    high: Tensor
    low: Tensor
    top: Tensor


class Sums(NamedTuple):
    """Those of a rectangle of a parameter: `high`, `low` [m, n], `top` [m, 1]."""

    high: Tensor
    low: Tensor
    top: Tensor


class Piece(NamedTuple):
    """A rectangle of whole rows of `param`, as far as they are in a shard; the columns of an addend
    begin at `addend_col` of it.
    """

    param: int
    shard: int
    begin_row: int
    end_row: int
    begin_col: int
    end_col: int
    addend_col: int = 0


class Home(ABC):
    """What a home does for streamed layers, wherever its memory is. Collective over all ranks of
    the run, all of one host.

    `fill`, `begin_sums`, then a barrier, then `read`, `copy` and `add` in any order on any rank,
    `finish_adds`, then a barrier, then `collect`.
    """

    has_views: bool
    """Whether what is in one piece can be `read`."""

    def __init__(
        self,
        specs: Sequence[ParamSpec],
        parts: Sequence[Sequence[Part]],
        piece_numel: int,
        sender: LinkThread,
        passing_bytes: int = 0,
    ):
        self._specs, self._parts, self._rank = specs, parts, dist.get_rank()
        self._own = parts[self._rank]
        self._numels = [part.weights.numel() for part in self._own]
        self._clock = DeviceClock(sender.device)
        self._sender, self._passing_bytes = sender, passing_bytes
        self._pending: deque[tuple[Future[None], int]] = deque()
        self._held_up: Future[None] | None = None
        self._adder, self._piece_numel = Adder(piece_numel, sender.device), piece_numel
        self._width = 0
        self.grads_P = [
            part.high.view(torch.float32) if spec.requires_grad else torch.empty(0)
            for spec, part in zip(specs, self._own, strict=True)
        ]
        """This rank's fp32 gradient shards, which `collect` may replace in place."""
        self.weight_bytes = sum(part.weights.nbytes for part in self._own)
        """This rank's part of the weights."""
        sums = sum(tensor.nbytes for part in self._own for tensor in (part.low, part.top))
        self.sum_bytes = sums + self._adder.nbytes + passing_bytes
        """This rank's part of the sums, without the memory of `grads_P`, and gradients under
        way.
        """

    def fill(self, shards_P: Sequence[Tensor]) -> None:
        """Copy this rank's shards of all parameters to their place."""
        torch._foreach_copy_([part.weights for part in self._own], list(shards_P))

    def begin_sums(self, num_addends: int) -> None:
        """Set this rank's part of the sums to zero; every element gets at most `num_addends`."""
        while self._pending:  # what an iteration that failed has left
            self._pending.popleft()[0].exception()
        self._width = digit_width(num_addends)
        sums = [t for part in self._own for t in (part.high, part.low, part.top) if t.numel()]
        if sums:
            torch._foreach_zero_(sums)

    def read(self, param: int, region: Region) -> Tensor:
        """The weights in `region`, flat and where they are, of a home that `has_views`."""
        raise NotImplementedError

    def copy(self, param: int, region: Region, into: Tensor) -> None:
        """Copy the weights in `region` into the flat tensor `into`."""
        num_cols = self._specs[param].num_cols
        # Whole rows of a row-major matrix are a vector, which is in fewer pieces.
        if region.num_cols == num_cols:
            region, num_cols = Region(region.row * num_cols, region.numel, 0, 1), 1
        matrix = into.view(region.num_rows, region.num_cols)
        targets, sources = [], []
        for piece, rows, cols in self._pieces(param, region, num_cols):
            targets.append(matrix[_shifted(rows, region.row), _shifted(cols, region.col)])
            weights = self._parts[piece.shard][param].weights
            first = self._numels[param] * piece.shard
            sources.append(_rectangle(weights, first, rows, cols, num_cols))
        torch._foreach_copy_(targets, sources)

    def add(self, param: int, region: Region, grad: Tensor) -> None:
        """Let `grad`, any shape, be added to the sums of `region`; it may not change before
        `finish_adds`.
        """
        addend = grad.detach().reshape(region.num_rows, region.num_cols)
        job = functools.partial(self._add_all, param, region, addend, self._clock.stamp())
        self._pending.append((self._sender.submit(job), grad.nbytes))
        # Gradients under way hold memory that the next layer's backward pass wants.
        while sum(nbytes for _, nbytes in self._pending) > self._passing_bytes:
            first = self._pending[0][0]
            # The owner's thread may be held by a launch that waits for a collective which this rank
            # posts next ([Note: A kernel's first use]): memory gives way, and once for each wait.
            if not first.done() and (first is self._held_up or not wait([first], HELD_UP_S).done):
                self._held_up = first
                break
            self._pending.popleft()
            first.result()

    def finish_adds(self) -> None:
        """Return once what this rank added is in the sums. Raises what went wrong."""
        while self._pending:
            self._pending.popleft()[0].result()

    def collect(self, grads_P: Sequence[Tensor]) -> None:
        """Put the sums of this rank's shards, where they are trained, into `grads_P`; once in an
        iteration.
        """
        for param, (spec, numel) in enumerate(zip(self._specs, self._numels, strict=True)):
            if not spec.requires_grad:
                continue
            first = numel * self._rank
            end = min(first + numel, spec.numel)
            for rows, cols in rectangles(first, end, spec.num_cols, self._piece_numel):
                sums = self._sums(_piece(param, self._rank, rows, cols))
                value = value_of(*sums, self._width)
                offset = rows.start * spec.num_cols + cols.start - first
                grads_P[param][offset : offset + value.numel()].copy_(value.flatten())

    @property
    def address(self) -> int:
        """Where its memory, or this rank's part of it, begins."""
        return self._own[0].weights.untyped_storage().data_ptr()

    @abstractmethod
    def close(self) -> None:
        """Let go of the memory."""

    @abstractmethod
    def _deliver(self, piece: Piece, addend: Tensor) -> None:
        """See to it that `addend` comes to the sums of `piece`."""

    def _add_all(self, param: int, region: Region, addend: Tensor, stamp: Any) -> None:
        """Deliver a gradient shard by shard; each rank begins elsewhere, so that few wait."""
        # This thread's stream may not read the gradient before backward's has written it.
        self._clock.wait_for(stamp)
        pieces = list(self._pieces(param, region, self._specs[param].num_cols))
        first = len(pieces) * self._rank // len(self._parts)
        for piece, rows, cols in pieces[first:] + pieces[:first]:
            self._deliver(piece, addend[_shifted(rows, region.row), _shifted(cols, region.col)])

    def _pieces(
        self, param: int, region: Region, num_cols: int
    ) -> Iterator[tuple[Piece, slice, slice]]:
        """`region`, of a matrix of `num_cols`, in pieces of at most `piece_numel` elements, with
        their rows and columns.
        """
        numel = self._numels[param]
        piece_numel = self._piece_numel * num_cols // max(region.num_cols, 1)
        begin, end = region.row * num_cols, (region.row + region.num_rows) * num_cols
        for shard in range(begin // numel, -(-end // numel)):
            bounds = max(begin, shard * numel), min(end, (shard + 1) * numel)
            for rows, cols in rectangles(*bounds, num_cols, piece_numel):
                shared = slice(
                    max(cols.start, region.col), min(cols.stop, region.col + region.num_cols)
                )
                if shared.start < shared.stop:
                    yield _piece(param, shard, rows, cols, shared.start - cols.start), rows, shared

    def _sums(self, piece: Piece) -> Sums:
        part, num_cols = self._parts[piece.shard][piece.param], self._specs[piece.param].num_cols
        first = piece.shard * self._numels[piece.param]
        rows = slice(piece.begin_row, piece.end_row)
        cols = slice(piece.begin_col, piece.end_col)
        high, low = (
            _rectangle(flat, first, rows, cols, num_cols) for flat in (part.high, part.low)
        )
        return Sums(high, low, part.top[_shifted(rows, first // num_cols)].view(-1, 1))


class SharedMemoryHome(Home):
    """A home in memory of the host, for ranks of the CPU."""

    has_views = True

    def __init__(
        self, specs: Sequence[ParamSpec], dtype: torch.dtype, device: torch.device, purpose: str
    ):
        num_ranks = dist.get_world_size()
        layout = Layout(specs, dtype, num_ranks, num_parts=num_ranks)
        self._memory = SharedMemory(tuple(range(num_ranks)), layout.nbytes, purpose, device)
        wholes = layout.cut(self._memory.bytes)
        self._weights = [whole.weights for whole in wholes]
        split = [[tensor.chunk(num_ranks) for tensor in whole] for whole in wholes]
        parts = [[Part(*(chunks[r] for chunks in row)) for row in split] for r in range(num_ranks)]
        numel = _piece_numel(specs, _LOCKED_NUMEL)
        super().__init__(specs, parts, numel, LinkThread(device, overlap=False))

    def read(self, param: int, region: Region) -> Tensor:
        """The weights in `region`, flat, where they are in one piece."""
        assert is_in_one_piece(self._specs[param], region), self._specs[param].fqn
        begin = region.row * self._specs[param].num_cols + region.col
        return self._weights[param][begin : begin + region.numel]

    def close(self) -> None:
        """Let go of the memory."""
        self._memory.close()

    def _deliver(self, piece: Piece, addend: Tensor) -> None:
        sums = self._sums(piece)
        begin_byte = sums.high.data_ptr() - self._memory.bytes.data_ptr()
        # Other processes add to the same rows.
        with self._memory.locked(begin_byte, sums.high.nbytes):
            self._adder.add(*sums, addend, piece.addend_col, self._width)


def control_bytes(num_ranks: int) -> int:
    """Of the words that `num_ranks` ranks of a host share."""
    return num_ranks * num_ranks * _WORDS * 8


class Inbox:
    """The slots of the ranks of a host, as rank number `place` among them uses them: [Note: Inbox].

    `slots[owner]` are bytes [sender, size]. One thread sends, another one serves. Not collective.
    """

    def __init__(
        self, slots: Sequence[Tensor], control: SharedMemory, place: int, clock: DeviceClock
    ):
        self._slots = slots
        self._place = place
        self._clock = clock
        num_ranks = len(slots)
        words = control.bytes[: control_bytes(num_ranks)].view(torch.int64)
        self._control = words.view(num_ranks, num_ranks, _WORDS).numpy()
        self._round = 0
        self._sent: Any = None
        self.served: Any = None
        """Where the serving thread's stream was when it last added."""

    def begin(self) -> None:
        """Forget what was under way, and begin a round; every rank calls it, then a barrier."""
        self._round += 1
        # Of its own slots alone: a slot's owner is the one who frees it.
        self._control[self._place, :, _STATE] = _FREE

    def send(self, owner: int, what: Sequence[int], piece: Tensor) -> None:
        """Give `piece` [m, n] to `owner`, with up to 7 numbers that say `what` it is."""
        words = self._wait_for_slot(owner)
        slot = self._slots[owner][self._place]
        if owner == self._place and self.served is not None:
            # Both streams are this rank's: the one that read the slot may be behind its host.
            self._clock.wait_for(self.served)
        slot[: piece.nbytes].view(piece.dtype).view(piece.shape).copy_(piece)
        self._sent = self._clock.stamp()
        # Another process knows nothing of this stream: it may read the slot when the copy is over.
        self._clock.settle(self._sent)
        words[_DTYPE] = _DTYPES.index(piece.dtype)
        words[_SHAPE] = piece.shape
        words[_WHAT][: len(what)] = what
        # Last: the owner reads the other words once it finds the slot full.
        words[_STATE] = _FULL

    def finish(self) -> None:
        """Wait until all that was sent has been added, and tell every owner."""
        for owner in range(len(self._slots)):
            # The slot is free, so the last piece has been added before the owner reads this word.
            self._wait_for_slot(owner)[_DONE] = self._round

    def serve(self, add: Callable[[list[int], Tensor], None]) -> None:
        """`add(what, piece)` what comes until every sender has finished. In a thread of its own."""
        mine, round_ = self._control[self._place], self._round
        try:
            # A round that was begun anew ends this one: its iteration has failed.
            while self._round == round_ and (mine[:, _DONE] != round_).any():
                senders = (mine[:, _STATE] == _FULL).nonzero()[0].tolist()
                for sender in senders:
                    self._take(mine[sender], sender, add)
                if not senders:
                    time.sleep(_POLL_S)
        except BaseException:
            # Else every sender would wait for its slot until the watchdog ends the run.
            mine[:, _STATE] = _FAILED
            raise

    def _take(self, words: Any, sender: int, add: Callable[[list[int], Tensor], None]) -> None:
        dtype, shape = _DTYPES[words[_DTYPE]], words[_SHAPE].tolist()
        nbytes = shape[0] * shape[1] * dtype.itemsize
        piece = self._slots[self._place][sender][:nbytes].view(dtype).view(shape)
        if sender == self._place:
            self._clock.wait_for(self._sent)
        add(words[_WHAT].tolist(), piece)
        self.served = self._clock.stamp()
        # The sender writes the next piece as soon as the slot is free.
        self._clock.settle(self.served)
        words[_STATE] = _FREE

    def _wait_for_slot(self, owner: int) -> Any:
        words, round_ = self._control[owner, self._place], self._round
        while words[_STATE] != _FREE:
            if words[_STATE] == _FAILED:
                raise RuntimeError(f"rank {owner} of this host could not add to its sums")
            if self._round != round_:
                raise Cancelled
            time.sleep(_POLL_S)
        return words


class PeerHome(Home):
    """A home on the devices of a host, whose ranks `group` has.

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
        num_ranks, piece_numel = dist.get_world_size(), _piece_numel(specs, _SENT_NUMEL)
        layout = Layout(specs, dtype, num_ranks)
        take_slots = layout.reserve(num_ranks * piece_numel, torch.float32)
        self._memory = PeerMemory(group, layout.nbytes, purpose, device)
        ranks = tuple(range(num_ranks))
        self._control = SharedMemory(ranks, control_bytes(num_ranks), purpose, device)
        parts = [layout.cut(part) for part in self._memory.parts]
        sender = LinkThread(device, overlap=True)
        super().__init__(specs, parts, piece_numel, sender, passing_bytes)
        slots = [take_slots(p).view(torch.uint8).view(num_ranks, -1) for p in self._memory.parts]
        self._inbox = Inbox(slots, self._control, self._rank, self._clock)
        self.sum_bytes += slots[self._rank].nbytes
        self._server = LinkThread(device, overlap=True)
        self._serving: Future[None] | None = None

    def begin_sums(self, num_addends: int) -> None:
        """Set this rank's part of the sums to zero; every element gets at most `num_addends`."""
        self._inbox.begin()  # ends what an iteration that failed has left
        super().begin_sums(num_addends)
        self._serving = self._server.submit(functools.partial(self._serve, self._clock.stamp()))

    def finish_adds(self) -> None:
        """Return once what was added is in the sums, and let the current stream go on after it.
        Raises what went wrong.
        """
        super().finish_adds()
        if self._serving is not None:
            # What this rank sent is added, but not yet all that others send here.
            self._inbox.finish()
            self._serving.result()  # which others' ranks finish, without waiting for this one
            self._serving = None
            if self._inbox.served is not None:
                self._clock.wait_for(self._inbox.served)

    def close(self) -> None:
        """Let go of the memory."""
        self._inbox.begin()  # ends what is under way
        self._sender.close()
        self._server.close()
        self._control.close()

    def _deliver(self, piece: Piece, addend: Tensor) -> None:
        self._inbox.send(piece.shard, piece, addend)

    def _serve(self, stamp: Any) -> None:
        self._clock.wait_for(stamp)
        self._inbox.serve(self._add)

    def _add(self, what: Sequence[int], addend: Tensor) -> None:
        piece = Piece._make(what)
        self._adder.add(*self._sums(piece), addend, piece.addend_col, self._width)


def open_home(
    specs: Sequence[ParamSpec],
    layers: Sequence[Sequence[int]],
    dtype: torch.dtype,
    device: torch.device,
    groups: GroupPool,
    purpose: str,
) -> Home:
    """The home of the run's host, on devices such as `device`, for `layers` of these parameters.
    Collective over all ranks. Raises HydraConfigError on all where threads beside computation could
    hang on some rank's device.
    """
    if device.type not in ALLOCATORS:
        return SharedMemoryHome(specs, dtype, device, purpose)
    error = None
    if problem := find_overlap_problem(device):
        error = HydraConfigError(
            f"streamed layers (;stream in hydra.strategies) are added up in threads beside computation: {problem}"
        )
    raise_together(error, device)
    everyone = range(dist.get_world_size())
    groups.create([("home", everyone)])
    widest = max(sum(specs[param].numel for param in layer) for layer in layers)
    passing_bytes = STREAM_WINDOW * widest * dtype.itemsize
    group = groups.get("home", everyone)
    return PeerHome(specs, dtype, device, group, purpose, passing_bytes)


class Layout:
    """Where tensors lie in memory: those of `num_parts` shards of each parameter, side by side, of
    `num_ranks` shards in all.
    """

    def __init__(
        self, specs: Sequence[ParamSpec], dtype: torch.dtype, num_ranks: int, num_parts: int = 1
    ):
        self.nbytes = 0
        self._takes = []
        for spec in specs:
            numel = spec.shard_numel(num_ranks)
            num_rows = min(spec.num_rows, (numel - 1) // spec.num_cols + 2)
            sums = [(n * spec.requires_grad, torch.int32) for n in (numel, numel, num_rows)]
            self._takes.append([self.reserve(n * num_parts, t) for n, t in [(numel, dtype), *sums]])

    def reserve(self, numel: int, dtype: torch.dtype) -> functools.partial[Tensor]:
        """What takes a flat tensor [numel] out of the memory, as bytes."""
        begin = self.nbytes
        self.nbytes += -(-numel * dtype.itemsize // _ALIGNMENT) * _ALIGNMENT
        return functools.partial(_cut, begin=begin, numel=numel, dtype=dtype)

    def cut(self, memory: Tensor) -> list[Part]:
        """The tensors of each parameter."""
        return [Part(*(take(memory) for take in row)) for row in self._takes]


def _cut(memory: Tensor, *, begin: int, numel: int, dtype: torch.dtype) -> Tensor:
    # By way of `data`, so that an add is no modification of weights that autograd has saved.
    return memory[begin : begin + numel * dtype.itemsize].view(dtype).data


def _piece_numel(specs: Sequence[ParamSpec], wanted: int) -> int:
    """`wanted` elements as far as a parameter has them, and a row at least."""
    return max(max(spec.num_cols for spec in specs), min(wanted, max(spec.numel for spec in specs)))


def _piece(param: int, shard: int, rows: slice, cols: slice, addend_col: int = 0) -> Piece:
    return Piece(param, shard, rows.start, rows.stop, cols.start, cols.stop, addend_col)


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


def _rectangle(flat: Tensor, first: int, rows: slice, cols: slice, num_cols: int) -> Tensor:
    """Elements of a matrix, of which `flat` holds those from `first` on."""
    offset = flat.storage_offset() + rows.start * num_cols + cols.start - first
    shape = rows.stop - rows.start, cols.stop - cols.start
    return flat.as_strided(shape, (num_cols, 1), offset)


def _shifted(part: slice, offset: int) -> slice:
    """`part`, counted from `offset` on."""
    return slice(part.start - offset, part.stop - offset)
