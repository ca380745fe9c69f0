"""Pull and push of one iteration beside its computation (Fig. 8).

[Note: Overlap without deadlock]
A round is collective over all ranks, so no rank may hold a round back for something that could
itself wait for that round. One thread per rank posts every round of the iteration in one order,
equal on all ranks: the pull's rounds forwards, then the push's backwards.

- A pull round waits only for the round before the last (a window of two), never for computation.
- A push round also waits until this rank's own gradients of that bucket are complete, one in which
  it has no bucket until those of its last bucket are: a receive that is posted before the rank
  computes would occupy an accelerator all the while. Computation never waits for a push before its
  own end, and all pulls it does wait for have been posted before any push.

[Note: The host does not run ahead]
On an accelerator posting a round does not wait for it, and a pass is launched long before it runs.
A full launch queue stops the thread that launches, and with it perhaps the other one. So a rank has
posted all of its pull before its computation waits for another stage, which may need just these
rounds (`await_posts`); until then a round is posted when the one before the last is over. Passes
are launched at most two micro-batches ahead (`Recorder.keep_up`). No pass waits for what waits here
for another rank's passes. On the CPU every call waits anyway.

Ranks without a pipeline run the same thread. Since rounds, and the order of sums inside a round,
are the same as without the thread, results are bit-identical.

Errors of the thread are raised where computation waits for it; if computation fails, the thread
posts nothing more.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass
from typing import Any

import torch
from deepspeed.accelerator import get_accelerator
from torch import Tensor

from ds_hydra.engine.telemetry.trace import Recorder
from ds_hydra.engine.transfer.slices import Slices
from ds_hydra.errors import RankLostError
from ds_hydra.records.timeline import EventKind
from ds_hydra.zero_link import LinkPlan
from ds_hydra.zero_link.exchange import Link, RoundUnderWay

LEAVING_S = 5.0
"""How long a failed iteration waits for its exchanges to end."""


class DeviceClock:
    """Points in the work of the calling thread's stream, to wait for and to measure between.

    On an accelerator a stamp is an event on the current stream; on the CPU, where every call
    returns when its work is done, it is a reading of `time.perf_counter`.
    """

    def __init__(self, device: torch.device):
        self.has_streams = device.type != "cpu"

    def stamp(self) -> Any:
        """The present point of the current stream."""
        if not self.has_streams:
            return time.perf_counter()
        event = get_accelerator().Event(enable_timing=True)
        event.record(get_accelerator().current_stream())
        return event

    def wait_for(self, stamp: Any) -> None:
        """Let the current stream go on only after `stamp`."""
        if self.has_streams:
            get_accelerator().current_stream().wait_event(stamp)

    def settle(self, stamp: Any) -> None:
        """Wait, on the host, until `stamp` is reached and all that it comes after."""
        if self.has_streams:
            stamp.synchronize()

    def ms_between(self, begin: Any, end: Any) -> float:
        """Milliseconds from `begin` to `end`, both of them reached (`settle`)."""
        if not self.has_streams:
            return float(end - begin) * 1e3
        return float(begin.elapsed_time(end))


class Spans:
    """Spans of one kind of work, in the streams of the threads that did it."""

    def __init__(self, clock: DeviceClock):
        self._clock = clock
        self._spans: list[tuple[Any, Any]] = []

    def add(self, begin: Any, end: Any) -> None:
        """A span between two stamps."""
        self._spans.append((begin, end))

    @contextlib.contextmanager
    def measure(self) -> Iterator[None]:
        """The span of what happens inside; a block that raises has none."""
        begin = self._clock.stamp()
        yield
        self.add(begin, self._clock.stamp())

    def total_ms(self) -> float:
        """Milliseconds of all spans, all of them over (`settle`)."""
        return sum(self._clock.ms_between(begin, end) for begin, end in self._spans)

    def settle(self) -> None:
        """Wait, on the host, until the last span is over."""
        if self._spans:
            self._clock.settle(self._spans[-1][1])

    def join(self) -> None:
        """Let the current stream go on only after the last span."""
        if self._spans:
            self._clock.wait_for(self._spans[-1][1])

    def record(self, recorder: Recorder, kind: EventKind) -> None:
        """Hand all spans to `recorder`."""
        for begin, end in self._spans:
            recorder.add(kind, begin, end)


class LinkThread:
    """Runs jobs one after the other: in a thread with a side stream of its own, or at once if not
    `overlap`.
    """

    def __init__(self, device: torch.device, *, overlap: bool):
        self.overlap = overlap
        self.device = device
        self._jobs: queue.SimpleQueue[tuple[Callable[[], None], Future[None]] | None] = (
            queue.SimpleQueue()
        )
        self._thread: threading.Thread | None = None
        self._is_stuck = False

    def submit(self, job: Callable[[], None]) -> Future[None]:
        """The job's future; it holds what the job raised. Raises RankLostError after `give_up`."""
        if self._is_stuck:
            raise RankLostError(
                "an earlier error left an exchange between ranks in the middle of a round; restart from the last "
                "checkpoint"
            )
        future: Future[None] = Future()
        if not self.overlap:
            _run(job, future)
            return future
        if self._thread is None:
            # A daemon: a collective that never ends must not keep the process from ending.
            self._thread = threading.Thread(target=self._serve, name="ds_hydra link", daemon=True)
            self._thread.start()
        self._jobs.put((job, future))
        return future

    def give_up(self) -> None:
        """A job does not end: its buffers stay in use, and nothing can be submitted any more."""
        self._is_stuck = True

    def close(self) -> None:
        """End the thread after the jobs submitted so far. Safe to call twice."""
        if self._thread is not None:
            self._jobs.put(None)
            self._thread = None

    def _serve(self) -> None:
        context: contextlib.AbstractContextManager[Any] = contextlib.nullcontext()
        if self.device.type != "cpu":
            get_accelerator().set_device(self.device.index)  # a new thread starts on device 0
            # Other ranks wait for what is packed here; passes fill the device anyway
            context = get_accelerator().stream(get_accelerator().Stream(priority=-1))
        with context:
            while (entry := self._jobs.get()) is not None:
                _run(*entry)
                del entry  # nothing of the iteration stays alive while waiting


def _run(job: Callable[[], None], future: Future[None]) -> None:
    try:
        job()
    except BaseException as error:
        future.set_exception(error)
    else:
        future.set_result(None)


class Abandoned(Exception):
    """What a flag stands for will not happen."""


class Flags:
    """One flag per bucket, raised by one thread and awaited by another."""

    def __init__(self, count: int, clock: DeviceClock):
        self._clock = clock
        self._raised = [threading.Event() for _ in range(count)]
        self._stamps: list[Any] = [None] * count

    def __len__(self) -> int:
        return len(self._raised)

    def is_raised(self, index: int) -> bool:
        """Whether a wait for the flag would end at once."""
        return self._raised[index].is_set()

    def raise_flag(self, index: int) -> None:
        """Everything the current stream has been given so far belongs to the flag. Repeating it
        changes nothing.
        """
        if not self._raised[index].is_set():
            self._stamps[index] = self._clock.stamp()
            self._raised[index].set()

    def abandon(self) -> None:
        """Wake everyone who waits for a flag that is not raised."""
        for event in self._raised:
            event.set()

    def wait(self, index: int) -> None:
        """Wait for a flag, and let the current stream go on after it. Raises Abandoned."""
        self._raised[index].wait()
        if self._stamps[index] is None:
            raise Abandoned
        self._clock.wait_for(self._stamps[index])


class TwoInFlight:
    """Rounds of `link`, each posted (`begin`) while the one before is on the wire; `is_over`
    follows the end of each, and `work` gets their spans. While `is_bounded` the host waits for the
    round before the last. A context manager: at its end all rounds are over, also after Abandoned;
    after another error, what is on the wire is abandoned.
    """

    def __init__(
        self,
        link: Link,
        begin: Callable[[int], RoundUnderWay],
        work: Spans,
        is_over: Callable[[int], None] = lambda index: None,
        is_bounded: Callable[[], bool] = lambda: True,
    ):
        self._link, self._begin, self._work, self._is_over = link, begin, work, is_over
        self._is_bounded = is_bounded
        self._under_way: dict[int, RoundUnderWay] = {}

    def __enter__(self) -> TwoInFlight:
        return self

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        try:
            if error is None or isinstance(error, Abandoned):
                self.settle()
        finally:
            for under_way in self._under_way.values():
                self._link.abandon(under_way)

    def post(self, index: int) -> None:
        """Begin round `index`, then finish the one before."""
        if self._is_bounded():
            self._work.settle()
        with self._work.measure():
            before = list(self._under_way)
            self._under_way[index] = self._begin(index)
            for other in before:
                self._finish(other)

    def settle(self) -> None:
        """Finish what is under way."""
        for index in list(self._under_way):
            with self._work.measure():
                self._finish(index)

    def _finish(self, index: int) -> None:
        self._link.finish(self._under_way[index])
        del self._under_way[index]
        self._is_over(index)


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredLinkTimes:
    """Milliseconds of one iteration's exchanges on this rank.

    `pull_ms` and `push_ms` are the link's own: packing, transport, unpacking or summing, and
    waiting for other ranks in it, but not for this rank's gradients. `visible_*` is the part that
    computation waited for.
    """

    pull_ms: float
    push_ms: float
    visible_pull_ms: float
    visible_push_ms: float


class LinkSession:
    """The exchanges of one iteration. A context manager: when it ends, no round of the iteration is
    under way.

    Collective over all ranks: each runs it with its part of the same plans. `grads_P` is None where
    nothing is pushed. Computation calls `await_bucket` before it reads the slices of a bucket and
    `gradients_complete` when its own gradients of a bucket are; `finish` ends the iteration.
    """

    def __init__(
        self,
        thread: LinkThread,
        clock: DeviceClock,
        *,
        pull: tuple[Link, LinkPlan],
        push: tuple[Link, LinkPlan],
        shards_P: Sequence[Tensor],
        slices: Slices,
        grads_P: Sequence[Tensor] | None,
    ):
        self._thread = thread
        self._clock = clock
        self._pull_link, self._pull_plan = pull
        self._push_link, self._push_plan = push
        self._shards_P = shards_P
        self._slices = slices
        self._grads_P = grads_P
        num_buckets = len(slices.bucket_S)
        self._pulled = Flags(num_buckets, clock)
        self._gradients = Flags(num_buckets if grads_P is not None else 0, clock)
        self._awaited: set[int] = set()
        self._is_pull_bounded = True
        self._waits, self._pull_work, self._push_work = Spans(clock), Spans(clock), Spans(clock)

    def __enter__(self) -> LinkSession:
        if self._grads_P is not None:
            self._slices.on_gradient = self.gradients_complete
        self._start = self._clock.stamp()
        self._pulling = self._thread.submit(self._pull)
        self._pushing: Future[None] | None = None
        if self._thread.overlap:
            self._pushing = self._thread.submit(self._push)
        else:
            # Computation begins when the pull is over: it has waited for all of it.
            self._waits.add(self._start, self._clock.stamp())
            self._pulling.result()
        return self

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        # Else slices and session hold each other, and a whole stage's memory, until the garbage
        # collector comes.
        self._slices.on_gradient = None
        if error is None:
            return
        # The pull needs nothing of this rank's computation and ends by itself; the push stops
        # before its next round. A round that other ranks never join does not end: they may be
        # waiting for what has just failed here.
        self._gradients.abandon()
        _, under_way = wait([job for job in (self._pulling, self._pushing) if job], LEAVING_S)
        if under_way:
            self._thread.give_up()
        else:
            self._join_streams()

    def await_bucket(self, index: int) -> None:
        """Wait until the slices of a bucket are pulled. Raises what the pull raised."""
        if index in self._awaited:
            return
        begin = self._clock.stamp()
        try:
            self._pulled.wait(index)
        except Abandoned:
            self._pulling.result()
            raise
        if self._thread.overlap:
            self._waits.add(begin, self._clock.stamp())
        self._awaited.add(index)

    def await_all(self) -> None:
        """Wait until everything is pulled."""
        self._pulling.result()
        for index in range(len(self._pulled)):
            self.await_bucket(index)

    def await_posts(self) -> None:
        """Wait until all rounds of the pull are posted: [Note: The host does not run ahead]. Raises
        what the pull raised.
        """
        if self._clock.has_streams:
            self._is_pull_bounded = False
            self._pulling.result()

    def gradients_complete(self, index: int) -> None:
        """This rank adds nothing more to its gradients of a bucket."""
        self._gradients.raise_flag(index)

    def finish(self) -> MeasuredLinkTimes:
        """Computation is over: wait for the rest of the push. Raises what the thread raised."""
        for index in range(len(self._gradients)):
            if not self._gradients.is_raised(index):
                self._slices.zero_missing(index)
                self.gradients_complete(index)
        begin = self._clock.stamp()
        if self._pushing is None:
            self._pushing = self._thread.submit(self._push)
        self._pulling.result()
        self._pushing.result()
        self._join_streams()
        end = self._clock.stamp()
        self._clock.settle(end)
        has_push = self._grads_P is not None
        return MeasuredLinkTimes(
            pull_ms=self._pull_work.total_ms(),
            push_ms=self._push_work.total_ms(),
            visible_pull_ms=self._waits.total_ms(),
            visible_push_ms=self._clock.ms_between(begin, end) if has_push else 0.0,
        )

    def record(self, recorder: Recorder) -> None:
        """Hand the spans of all rounds to `recorder`; call after `finish`."""
        self._pull_work.record(recorder, EventKind.PULL)
        self._push_work.record(recorder, EventKind.PUSH)

    def _join_streams(self) -> None:
        """Let the current stream go on only after all rounds."""
        self._pull_work.join()
        self._push_work.join()

    def _pull(self) -> None:
        """All pull rounds in order."""

        def begin(index: int) -> RoundUnderWay:
            bucket = self._slices.bucket_S[index] if index < len(self._pulled) else ()
            return self._pull_link.begin_pull(self._pull_plan, index, self._shards_P, bucket)

        def is_over(index: int) -> None:
            if index < len(self._pulled):
                self._pulled.raise_flag(index)

        # Shards are up to date, and memory of the last iteration is free
        self._clock.wait_for(self._start)
        try:
            with TwoInFlight(
                self._pull_link,
                begin,
                self._pull_work,
                is_over,
                is_bounded=lambda: self._is_pull_bounded,
            ) as rounds:
                for index in range(len(self._pull_plan.rounds)):
                    rounds.post(index)
        except BaseException:
            self._pulled.abandon()
            raise

    def _push(self) -> None:
        """All push rounds, last bucket first; a round is finished early where the next gradient is
        not there yet.
        """
        grads_P = self._grads_P
        if grads_P is None or self._pulling.exception() is not None:
            return

        def begin(index: int) -> RoundUnderWay:
            bucket = self._slices.grad_bucket_S[index] if index < len(self._gradients) else ()
            return self._push_link.begin_push(self._push_plan, index, bucket, grads_P)

        with (
            contextlib.suppress(Abandoned),  # computation has failed
            TwoInFlight(self._push_link, begin, self._push_work) as rounds,
        ):
            for index in reversed(range(len(self._push_plan.rounds))):
                own = min(index, len(self._gradients) - 1)  # -1: this rank is in no pipeline
                if own >= 0:
                    if not self._gradients.is_raised(own):
                        rounds.settle()
                    self._gradients.wait(own)
                rounds.post(index)
