"""Layers that all ranks gather for every pass, as ZeRO-3 does: rounds of a link, in lockstep.

[Note: Gathering]
Nothing of a layer stays with a rank between its passes. Before a forward pass, and again before a
backward pass, a round of the pull brings the layer into one of `STREAM_WINDOW` slots; after the
backward pass of a micro-batch a round of the push takes its gradient to the owners' shards. Weights
and gradients of a rank are then those of two layers, whatever the model.

A round is collective over all ranks, and every rank has the same rounds in the same order
(`plan_rounds`): those of as many micro-batches as the pipeline with the most has. A rank that has
fewer micro-batches, or none, takes part with nothing of its own. So pipelines run their
micro-batches in lockstep, which costs nothing where each has one.

One thread per rank posts the rounds beside computation, each as soon as this rank's computation has
left the use before it that it waits for. Computation waits for the pull of the layer it comes to,
and for the push of the gradient that was in its slot before. Whatever comes before these in the
order of rounds waits for uses that this rank has left already, so no rank waits for itself; and
sums are those of the same rounds with and without the thread, to the bit.

Buckets that share a parameter (tied embeddings) are outside of the window: pulled once, their
gradients kept in fp32 and pushed at the end.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass

from torch import Tensor

from ds_hydra.engine.telemetry.trace import Recorder
from ds_hydra.engine.transfer.link_session import (
    LEAVING_S,
    Abandoned,
    DeviceClock,
    Flags,
    LinkThread,
    MeasuredLinkTimes,
    Spans,
)
from ds_hydra.engine.transfer.slices import Slices
from ds_hydra.engine.transfer.stream_plan import STREAM_WINDOW, Window, plan_loads
from ds_hydra.records.timeline import EventKind
from ds_hydra.zero_link import LinkPlan
from ds_hydra.zero_link.exchange import Link


@dataclass(frozen=True, slots=True)
class GatherRound:
    """One round of the iteration: of the pull or the push of `bucket`, once use `after` is left
    (-1: at once).
    """

    after: int
    is_push: bool
    bucket: int


@dataclass(frozen=True, slots=True, kw_only=True)
class GatherSchedule:
    """All rounds of an iteration, and what computation waits for.

    `uses`: buckets of the window in the order in which they are used; the last one, -1, stands for
    the end of computation. `pull_before`, `push_before`: rounds that have to be over when a use
    begins, -1 where none has.
    """

    uses: tuple[int, ...]
    order: tuple[GatherRound, ...]
    pull_before: tuple[int, ...]
    push_before: tuple[int, ...]


def plan_rounds(
    window: Window, num_buckets: int, num_micro_batches: int, *, training: bool
) -> GatherSchedule:
    """The rounds of an iteration in which the pipeline with the most micro-batches has
    `num_micro_batches`.

    >>> window = Window(buckets=(0, 1, 2), has_backward=(True,) * 3)
    >>> schedule = plan_rounds(window, 3, 1, training=True)
    >>> [("push" if r.is_push else "pull", r.bucket) for r in schedule.order]
    [('pull', 0), ('pull', 1), ('pull', 2), ('pull', 0), ('push', 2), ('push', 1), ('push', 0)]
    """
    positions: list[int] = []
    completes: list[bool] = []
    forward = range(len(window.buckets))
    backward = [p for p in reversed(forward) if training and window.has_backward[p]]
    for _ in range(num_micro_batches):
        for position, is_backward in [(p, False) for p in forward] + [(p, True) for p in backward]:
            if positions and positions[-1] == position:
                completes[-1] |= is_backward
            else:
                positions.append(position)
                completes.append(is_backward)
    kept = [bucket for bucket in range(num_buckets) if bucket not in window.buckets]
    end = len(positions)
    rounds = [GatherRound(-1, False, bucket) for bucket in kept]
    loads = {load.use: load for load in plan_loads(positions)}
    rounds += [GatherRound(x.after, False, window.buckets[x.position]) for x in loads.values()]
    pushed = [use for use in range(end) if completes[use]]
    rounds += [GatherRound(use, True, window.buckets[positions[use]]) for use in pushed]
    rounds += [GatherRound(end, True, bucket) for bucket in reversed(kept) if training]
    order = sorted(rounds, key=lambda r: (r.after, r.is_push))  # stable
    place = {(r.after, r.is_push, r.bucket): number for number, r in enumerate(order)}
    pull_before, push_before, of_slot = [-1] * (end + 1), [-1] * (end + 1), [-1] * STREAM_WINDOW
    for use, position in enumerate(positions):
        bucket = window.buckets[position]
        if use in loads:
            pull_before[use] = place[loads[use].after, False, bucket]
        if completes[use]:
            slot = position % STREAM_WINDOW
            push_before[use], of_slot[slot] = of_slot[slot], place[use, True, bucket]
    return GatherSchedule(
        uses=(*(window.buckets[position] for position in positions), -1),
        order=tuple(order),
        pull_before=tuple(pull_before),
        push_before=tuple(push_before),
    )


class GatherSession:
    """One iteration of layers that are gathered. A context manager; every rank runs it, with work
    or without.

    Computation calls `await_bucket` before every forward pass of a bucket, `enter` before its
    backward pass, and `finish` when it is over. `grads_P` is None where nothing is pushed. Should
    computation fail, the rank posts nothing more.
    """

    def __init__(
        self,
        thread: LinkThread,
        clock: DeviceClock,
        *,
        pull: tuple[Link, LinkPlan],
        push: tuple[Link, LinkPlan],
        schedule: GatherSchedule,
        shards_P: Sequence[Tensor],
        slices: Slices,
        grads_P: Sequence[Tensor] | None,
    ):
        self._thread = thread
        self._clock = clock
        self._pull_link, self._pull_plan = pull
        self._push_link, self._push_plan = push
        self._schedule = schedule
        self._shards_P = shards_P
        self._slices = slices
        self._grads_P = grads_P
        self._left = Flags(len(schedule.uses), clock)
        self._done = Flags(len(schedule.order), clock)
        self._pulled_at = {
            r.bucket: number for number, r in enumerate(schedule.order) if not r.is_push
        }
        self._next = 0
        self._use = -1
        self._posting: Future[None] | None = None
        self._pull_work, self._push_work, self._waits = Spans(clock), Spans(clock), Spans(clock)

    def __enter__(self) -> GatherSession:
        self._start = self._clock.stamp()
        if self._thread.overlap:
            self._posting = self._thread.submit(self._post_all)
        return self

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        if error is None or self._posting is None:
            return
        self._left.abandon()
        _, under_way = wait([self._posting], LEAVING_S)
        if under_way:  # a round that other ranks never join
            self._thread.give_up()

    def await_bucket(self, index: int) -> None:
        """Let computation read the slices of a bucket in a forward pass."""
        if index in self._schedule.uses:
            self.enter(index)
        else:
            self._wait_for(self._pulled_at[index])

    def await_all(self) -> None:
        """Nothing to wait for: layers come when they are needed."""

    def enter(self, bucket: int) -> None:
        """Computation leaves the bucket it was in and comes to `bucket`, if it is not there yet."""
        while self._use < 0 or self._schedule.uses[self._use] != bucket:
            if self._use + 2 >= len(self._schedule.uses):  # the next use is the end
                raise RuntimeError(
                    f"layer {bucket} was used out of the order of the iteration's plan"
                )
            self._go_on()

    def finish(self) -> MeasuredLinkTimes:
        """Computation is over: take part in the rounds that are left. Raises what the thread
        raised.
        """
        # What it waits for from here on counts as waiting for the push, as a whole.
        waits, self._waits = self._waits, Spans(self._clock)
        begin = self._clock.stamp()
        while self._use + 1 < len(self._schedule.uses):
            self._go_on()
        self._leave()
        if self._posting is not None:
            self._posting.result()
        self._pull_work.join()
        self._push_work.join()
        end = self._clock.stamp()
        self._clock.settle(end)
        has_push = self._grads_P is not None
        return MeasuredLinkTimes(
            pull_ms=self._pull_work.total_ms(),
            push_ms=self._push_work.total_ms(),
            visible_pull_ms=waits.total_ms(),
            visible_push_ms=self._clock.ms_between(begin, end) if has_push else 0.0,
        )

    def record(self, recorder: Recorder) -> None:
        """Hand the spans of all rounds to `recorder`; call after `finish`."""
        self._pull_work.record(recorder, EventKind.PULL)
        self._push_work.record(recorder, EventKind.PUSH)

    def _go_on(self) -> None:
        """Leave the present use for the next one."""
        self._leave()
        self._use += 1
        for before in (self._schedule.pull_before, self._schedule.push_before):
            if (number := before[self._use]) >= 0:
                self._wait_for(number)

    def _leave(self) -> None:
        if self._use >= 0:
            self._left.raise_flag(self._use)
        if self._posting is None:
            with self._waits.measure():
                self._post_until(self._use)

    def _wait_for(self, number: int) -> None:
        with self._waits.measure():
            if self._posting is None:
                self._post_until(-1)  # for a wait before the first use; `_leave` posts the others
            try:
                self._done.wait(number)
            except Abandoned:
                assert self._posting is not None
                self._posting.result()
                raise

    def _post_until(self, use: int) -> None:
        """Every round that waits for `use`, or for less."""
        order = self._schedule.order
        while self._next < len(order) and order[self._next].after <= use:
            self._post(self._next)
            self._next += 1

    def _post_all(self) -> None:
        self._clock.wait_for(self._start)
        try:
            for number, round_ in enumerate(self._schedule.order):
                if round_.after >= 0:
                    self._left.wait(round_.after)
                self._post(number)
        except Abandoned:
            pass  # computation has failed
        except BaseException:
            self._done.abandon()
            raise

    def _post(self, number: int) -> None:
        round_ = self._schedule.order[number]
        bucket, has_bucket = round_.bucket, round_.bucket < len(self._slices.bucket_S)
        begin = self._clock.stamp()
        if not round_.is_push:
            slices_S = self._slices.bucket_S[bucket] if has_bucket else ()
            link, work = self._pull_link, self._pull_work
            under_way = link.begin_pull(self._pull_plan, bucket, self._shards_P, slices_S)
        elif self._grads_P is not None:
            if has_bucket:
                self._slices.zero_missing(bucket)
            grads_S = self._slices.grad_bucket_S[bucket] if has_bucket else ()
            link, work = self._push_link, self._push_work
            under_way = link.begin_push(self._push_plan, bucket, grads_S, self._grads_P)
        else:
            self._done.raise_flag(number)
            return
        try:
            link.finish(under_way)
        except BaseException:
            link.abandon(under_way)
            raise
        if has_bucket:
            is_over = self._slices.expect_next if round_.is_push else self._slices.prepare
            is_over(bucket)
        self._done.raise_flag(number)
        work.add(begin, self._clock.stamp())
