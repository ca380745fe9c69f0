"""Layers whose slices are dropped after use and pulled again before the next one (`hydra.link.repull_layers`).

[Note: Served re-pulls]
A round of the ordinary pull is collective over all ranks in one order, which no order of re-pulls can be: under 1F1B
every stage needs its layers again at times of its own. A re-pulled layer therefore never travels in such a round, not
even the first time. All ranks know the iteration's plan and with it the order in which every rank will need its
layers (`repull_plan.py`), so each owner of shards *serves* each reader in the reader's order, by messages between
the two:

- A *feeder* thread for each reader posts sends, `SENDS_AHEAD` layers ahead of what the reader has taken. It waits for
  that reader only, so a slow one holds up nobody else, and for nothing else: shards do not change during an iteration.
- A reader posts the receipt of a layer as soon as its slot is free, which is when its own computation has left the
  layer that was there; computation waits for a layer when it gets there.

Messages between two ranks arrive in the order in which they are sent, and both sides go through the same list. The
group is used for nothing else.

Why nothing can hang: number the uses of a rank's layers as its computation comes to them. The arrival for use k waits
for computation of *this* rank to leave a use before k, and for the feeders of this reader to come to k. These have
nothing in front of them but arrivals for earlier uses of the same rank, which are received before computation leaves
those uses. By induction over k computation never waits for ever at use k, whatever other ranks compute: no edge
between the computations of two ranks is added to those that 1F1B and TP have. Feeders run beside everything, also
where a rank waits in a collective, and need no thread that computes. At the end of the iteration every rank waits for
its feeders, that is for the last forward or backward of all readers, before the optimizer changes the shards; the
push, in another thread, waits for the same.

On an accelerator sends would be kernels that occupy it until they are received, on communicators of their own for
every ordered pair of ranks, in numbers and in an order that NCCL does not support beside each other. The option is
refused there (`check_repulls`).

Slices that are pulled again have the bits they had, so results are those without the option.
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ds_hydra.engine.link_session import Abandoned, DeviceClock, Flags, LinkThread
from ds_hydra.engine.repull_plan import Load, plan_loads
from ds_hydra.engine.slices import Slices
from ds_hydra.engine.trace import Recorder
from ds_hydra.simulator.timeline import EventKind
from ds_hydra.zero_link import LinkPlan
from ds_hydra.zero_link.buffers import ExchangeBuffers
from ds_hydra.zero_link.exchange import Link, RoundUnderWay

SENDS_AHEAD = 2
"""Layers that a feeder has posted and not seen taken: the one on the wire and the next, packed."""


@dataclass(frozen=True, slots=True)
class Uses:
    """The order in which this rank uses its re-pulled buckets, and in which each other rank uses its own.

    Positions among a rank's re-pulled buckets, which are the rounds of the link plan.
    """

    own: Sequence[int]
    of_readers: Mapping[int, Sequence[int]]


class RepullService:
    """Threads and buffers that serve re-pulls, for all iterations; threads start when they have something to do.

    `group` spans all ranks and serves nothing else; None where no layer is ever pulled again.
    """

    def __init__(
        self, group: dist.ProcessGroup | None, device: torch.device, clock: DeviceClock, *, overlap: bool
    ):
        self._group = group
        self._device = device
        self.clock = clock
        self.overlap = overlap
        self.receiver = self._new_worker()
        self._feeders: dict[int, tuple[LinkThread, Link]] = {}
        self._buffers: list[ExchangeBuffers] = [self.receiver[2]]

    @property
    def peak_bytes(self) -> int:
        """Most bytes of packed messages that were under way, each thread at its own worst moment."""
        return sum(buffers.peak_bytes for buffers in self._buffers)

    def feeder(self, reader: int) -> tuple[LinkThread, Link]:
        """The thread that sends to `reader`, and what it sends with."""
        if reader not in self._feeders:
            thread, link, buffers = self._new_worker()
            self._feeders[reader] = thread, link
            self._buffers.append(buffers)
        return self._feeders[reader]

    def give_up(self) -> None:
        """An iteration failed: messages of it may be under way for ever, so nothing can be served any more."""
        for thread, _ in (self.receiver[:2], *self._feeders.values()):
            thread.give_up()

    def close(self) -> None:
        """End all threads."""
        for thread, _ in (self.receiver[:2], *self._feeders.values()):
            thread.close()

    def _new_worker(self) -> tuple[LinkThread, Link, ExchangeBuffers]:
        buffers = ExchangeBuffers(self._device)
        link = Link(self._group, self._device, buffers=buffers)
        return LinkThread(self._device, overlap=True), link, buffers


@dataclass(frozen=True, slots=True, kw_only=True)
class RepullTimes:
    """Milliseconds of one iteration's re-pulls on this rank: receiving them, and what computation waited for."""

    repull_ms: float
    visible_repull_ms: float


class RepullSession:
    """The re-pulls of one iteration. A context manager; every rank runs it with its part of the same `plan`.

    Computation calls `enter` before it reads the slices of a re-pulled bucket, forward or backward, and `finish` when
    it is over. Without `overlap` nothing is received ahead; serving others needs its threads all the same.
    """

    def __init__(
        self,
        service: RepullService,
        plan: LinkPlan,
        uses: Uses,
        buckets: Sequence[int],
        shards_P: Sequence[Tensor],
        slices: Slices,
    ):
        """`buckets[position]` is the bucket among `slices` at a position of `uses.own`."""
        self._service = service
        self._plan = plan
        self._uses = uses
        self._buckets = buckets
        self._shards_P = shards_P
        self._slices = slices
        self._loads = plan_loads(uses.own)
        self._load_of_use = {load.use: number for number, load in enumerate(self._loads)}
        self._left = Flags(len(uses.own), service.clock)
        self._arrived = Flags(len(self._loads), service.clock)
        self._use = -1
        self._serving: list[Future[None]] = []
        self._receiving: Future[None] | None = None
        self._error: BaseException | None = None
        self._waits: list[tuple[Any, Any]] = []
        self._work: list[tuple[Any, Any]] = []

    def __enter__(self) -> RepullSession:
        self._start = self._service.clock.stamp()
        for reader, order in self._uses.of_readers.items():
            thread, link = self._service.feeder(reader)
            positions = [load.position for load in plan_loads(order)]
            self._serving.append(thread.submit(functools.partial(self._serve, reader, positions, link)))
        if self._service.overlap and self._loads:
            self._receiving = self._service.receiver[0].submit(self._receive_all)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None and (self._loads or self._serving):
            self._left.abandon()
            self._service.give_up()

    def enter(self, bucket: int) -> None:
        """Computation leaves the re-pulled bucket it was in and comes to `bucket`: wait until that is there.

        Raises what receiving or serving raised. Nothing happens where computation is in `bucket` already, as when a
        checkpointed layer is recomputed.
        """
        while self._use < 0 or self._buckets[self._uses.own[self._use]] != bucket:
            if self._use + 1 == len(self._uses.own):
                raise RuntimeError(
                    f"layer {bucket} of this stage was used out of the order of the iteration's plan"
                )
            self._go_on()

    def finish(self) -> RepullTimes:
        """Computation is over: wait until this rank has served all others. Raises what a thread raised."""
        while self._use + 1 < len(self._uses.own):  # what a backward that needed nothing has left out
            self._go_on()
        for job in (*self._serving, *([self._receiving] if self._receiving is not None else [])):
            job.result()
        if self._work:
            self._service.clock.wait_for(self._work[-1][1])
        return RepullTimes(
            repull_ms=self._total_ms(self._work), visible_repull_ms=self._total_ms(self._waits)
        )

    def record(self, recorder: Recorder) -> None:
        """Hand the spans in which layers arrived to `recorder`; call after `finish`."""
        for begin, end in self._work:
            recorder.add(EventKind.PULL, begin, end)

    def _go_on(self) -> None:
        """Leave the present use for the next one."""
        if self._use >= 0:
            self._left.raise_flag(self._use)
        self._use += 1
        number = self._load_of_use.get(self._use)
        if number is None:
            return
        begin = self._service.clock.stamp()
        if self._receiving is None:
            self._arrive(self._begin(self._loads[number]), number)
        try:
            self._arrived.wait(number)
        except Abandoned:
            assert self._error is not None
            raise self._error from None
        self._waits.append((begin, self._service.clock.stamp()))

    def _serve(self, reader: int, positions: Sequence[int], link: Link) -> None:
        """Send `reader` what it needs of this rank's shards, in its order."""
        self._service.clock.wait_for(self._start)  # shards are up to date
        under_way: deque[RoundUnderWay] = deque()
        try:
            for position in positions:
                under_way.append(link.begin_send(self._plan, position, reader, self._shards_P))
                if len(under_way) == SENDS_AHEAD:
                    link.finish(under_way.popleft())
            while under_way:
                link.finish(under_way.popleft())
        except BaseException as error:
            self._fail(error)
            raise

    def _receive_all(self) -> None:
        """Every load in order, each posted as soon as its slot is free."""
        self._service.clock.wait_for(self._start)
        under_way: tuple[RoundUnderWay, int] | None = None
        try:
            for number, load in enumerate(self._loads):
                if load.after >= 0:
                    if under_way is not None and not self._left.is_raised(load.after):
                        self._arrive(*under_way)  # computation may need it before it frees the slot
                        under_way = None
                    self._left.wait(load.after)
                posted = self._begin(load)
                if under_way is not None:
                    self._arrive(*under_way)
                under_way = posted, number
            if under_way is not None:
                self._arrive(*under_way)
        except Abandoned:
            return  # computation has failed
        except BaseException as error:
            self._fail(error)
            raise

    def _fail(self, error: BaseException) -> None:
        """Let computation raise `error` at the next re-pulled layer; others may wait for what will not be sent."""
        self._error = error
        self._arrived.abandon()

    def _begin(self, load: Load) -> RoundUnderWay:
        begin = self._service.clock.stamp()
        bucket = self._buckets[load.position]
        self._slices.prepare(bucket)
        link = self._service.receiver[1]
        posted = link.begin_receive(self._plan, load.position, self._shards_P, self._slices.bucket_S[bucket])
        self._work.append((begin, self._service.clock.stamp()))
        return posted

    def _arrive(self, posted: RoundUnderWay, number: int) -> None:
        begin = self._service.clock.stamp()
        self._service.receiver[1].finish(posted)
        self._arrived.raise_flag(number)
        self._work.append((begin, self._service.clock.stamp()))

    def _total_ms(self, intervals: Sequence[tuple[Any, Any]]) -> float:
        return sum(self._service.clock.ms_between(begin, end) for begin, end in intervals)
