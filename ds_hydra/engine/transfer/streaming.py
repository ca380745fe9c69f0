"""Layers that stream: weights are read from the node's home, gradients are added there.

[Note: Streaming]
An iteration begins with every rank's own shards in the home and ends with the sums of its own
shards; a barrier follows the first and comes before the second. In between nothing is posted by one
rank for another: each reads and adds when its own computation is there, so ranks may have any
micro-batches, or none.

- A slice in one piece is a view of the home. One that is not (columns of a row-wise parameter
  under TP) is copied, and the copies of streamed layers share `STREAM_WINDOW` slots: while one
  layer computes, a thread copies the next one, forward and backward, in the order in which the
  stage will use them (`plan_loads`).
- The gradient of a streamed parameter is added to the sums after every micro-batch and dropped.
  Layers that do not stream keep their gradients in memory of their own, and add them once, at the
  end.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any

import torch.distributed as dist
from torch import Tensor

from ds_hydra.engine.telemetry.trace import Recorder
from ds_hydra.engine.transfer.home import Home
from ds_hydra.engine.transfer.link_session import (
    Abandoned,
    DeviceClock,
    Flags,
    LinkThread,
    MeasuredLinkTimes,
    Spans,
)
from ds_hydra.engine.transfer.slices import Slices
from ds_hydra.engine.transfer.stream_plan import StageStreams, only_copied, plan_loads
from ds_hydra.records.timeline import EventKind
from ds_hydra.zero_link import ParamSpec, RankBuckets, SliceRef


class HomeSlices:
    """What `Slices` needs to know of a home: which slices are views, which gradients go there."""

    def __init__(
        self,
        home: Home,
        specs: Sequence[ParamSpec],
        buckets: RankBuckets,
        streams: StageStreams,
    ):
        self.streams = streams
        self.copied = only_copied(buckets, streams.copied)
        self._home = home
        self._refs = {ref.param: ref for bucket in buckets for ref in bucket}
        self.views: dict[int, Tensor] = {}
        for ref in self._refs.values():
            if ref.param not in streams.copied and ref.region.numel:
                view = home.read(ref.param, ref.region)
                assert view is not None, specs[ref.param].fqn
                self.views[ref.param] = view

    def add(self, param: int, grad: Tensor) -> None:
        """Add the gradient of a slice, unless another rank of the TP group adds the same."""
        ref = self._refs[param]
        if ref.pushes_gradient:
            self._home.add(param, ref.region, grad)

    def load(self, ref: SliceRef, into: Tensor) -> None:
        """Copy a slice that is not in one piece."""
        if ref.region.numel:
            self._home.copy(ref.param, ref.region, into)


class StreamSession:
    """One iteration on a home. A context manager; every rank runs it, with work or without.

    `num_addends` bounds the addends of an element, `uses` is the order in which this rank uses the
    buckets of its window. `grads_P` is None where nobody wants the sums; nothing is added where
    `slices` have no gradients. Computation calls `await_bucket` before every forward pass of a
    bucket and `enter` before its backward pass, and `finish` when it is over.
    """

    def __init__(
        self,
        thread: LinkThread,
        clock: DeviceClock,
        home: Home,
        *,
        num_addends: int,
        uses: Sequence[int],
        shards_P: Sequence[Tensor],
        buckets: RankBuckets,
        slices: Slices,
        grads_P: Sequence[Tensor] | None,
        with_gradients: bool,
    ):
        assert slices.home is not None
        self._thread = thread
        self._clock = clock
        self._home = home
        self._num_addends = num_addends
        self._uses = uses
        self._shards_P = shards_P
        self._buckets = buckets
        self._slices = slices
        self._slices_home = slices.home
        self._grads_P = grads_P
        self._with_gradients = with_gradients
        self._window = slices.home.streams.window.buckets
        self._loads = plan_loads(uses)
        self._load_of_use = {load.use: number for number, load in enumerate(self._loads)}
        self._left = Flags(len(uses), clock)
        self._arrived = Flags(len(self._loads), clock)
        self._use = -1
        self._copied: set[int] = set()
        self._loading: Future[None] | None = None
        self._work, self._visible = Spans(clock), Spans(clock)

    def __enter__(self) -> StreamSession:
        begin = self._clock.stamp()
        self._home.fill(self._shards_P)
        if self._with_gradients:
            self._home.begin_sums(self._num_addends)
        dist.barrier()
        end = self._clock.stamp()
        self._work.add(begin, end)
        self._visible.add(begin, end)
        if self._thread.overlap and self._loads:
            self._loading = self._thread.submit(functools.partial(self._load_all, end))
        return self

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        if error is not None:
            self._left.abandon()
            if self._loading is not None:
                self._loading.exception()

    def await_bucket(self, index: int) -> None:
        """Let computation read the slices of a bucket in a forward pass."""
        if index in self._window:
            self.enter(index)
        elif index not in self._copied:
            self._copied.add(index)
            self._load(index)

    def await_all(self) -> None:
        """Nothing to wait for: what is not in one piece comes when it is needed."""

    def await_posts(self) -> None:
        """Nothing to wait for: the home is filled without messages."""

    def enter(self, bucket: int) -> None:
        """Computation leaves the bucket of the window it was in and comes to `bucket`.

        Nothing happens where it is in `bucket` already, as when a checkpointed layer is recomputed.
        """
        while self._use < 0 or self._window[self._uses[self._use]] != bucket:
            if self._use + 1 == len(self._uses):
                raise RuntimeError(
                    f"layer {bucket} of this stage was used out of the order of the iteration's plan"
                )
            self._go_on()

    def finish(self) -> MeasuredLinkTimes:
        """Computation is over: add what was kept, and take the sums. Raises what the thread
        raised.
        """
        while self._use + 1 < len(self._uses):  # what a backward that needed nothing has left out
            self._go_on()
        if self._loading is not None:
            self._loading.result()
        begin = self._clock.stamp()
        if self._with_gradients and not self._slices_home.streams.is_streamed:
            self._add_kept()
        self._home.finish_adds()
        dist.barrier()  # everyone has read and added
        if self._grads_P is not None:
            self._home.collect(self._grads_P)
        end = self._clock.stamp()
        self._clock.settle(end)
        pull_ms = self._work.total_ms()
        push_ms = visible_push_ms = 0.0
        if self._grads_P is not None:
            push_ms = visible_push_ms = self._clock.ms_between(begin, end)
        return MeasuredLinkTimes(
            pull_ms=pull_ms,
            push_ms=push_ms,
            visible_pull_ms=self._visible.total_ms(),
            visible_push_ms=visible_push_ms,
        )

    def record(self, recorder: Recorder) -> None:
        """Hand the spans in which weights and sums moved to `recorder`; call after `finish`."""
        self._work.record(recorder, EventKind.PULL)

    def _add_kept(self) -> None:
        """Add what buckets that do not stream have kept."""
        for index, bucket in enumerate(self._buckets):
            for ref, grad in zip(bucket, self._slices.grad_bucket_S[index], strict=True):
                if self._slices.has_gradient(index, ref.param):
                    self._slices_home.add(ref.param, grad)

    def _go_on(self) -> None:
        """Leave the present use for the next one."""
        if self._use >= 0:
            self._left.raise_flag(self._use)
        self._use += 1
        number = self._load_of_use.get(self._use)
        if number is None:
            return
        with self._visible.measure():
            if self._loading is None:
                self._load(self._window[self._loads[number].position])
            else:
                try:
                    self._arrived.wait(number)
                except Abandoned:
                    self._loading.result()
                    raise

    def _load_all(self, filled: Any) -> None:
        """Every load in order, each as soon as its slot is free, after the stamp `filled`."""
        try:
            self._clock.wait_for(filled)
            for number, load in enumerate(self._loads):
                if load.after >= 0:  # its slot is free
                    self._left.wait(load.after)
                self._load(self._window[load.position])
                self._arrived.raise_flag(number)
        except Abandoned:
            return  # computation has failed
        except BaseException:
            self._arrived.abandon()
            raise

    def _load(self, bucket: int) -> None:
        """Copy what of a bucket is not in one piece."""
        copied = self._slices_home.copied[bucket]
        if not copied:
            return
        with self._work.measure():
            for ref, flat in zip(copied, self._slices.bucket_S[bucket], strict=True):
                self._slices_home.load(ref, flat)
