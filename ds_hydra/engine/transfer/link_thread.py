"""The link beside computation, a thread on CPU ranks and a stream on accelerators, and the signals
between the two.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any, TypeVar

import torch
from deepspeed.accelerator import get_accelerator

from ds_hydra.engine.telemetry.trace import Recorder
from ds_hydra.errors import RankLostError
from ds_hydra.records.timeline import EventKind

Result = TypeVar("Result")


class DeviceClock:
    """Points in the work of the calling thread's stream, to wait for and to measure between.

    On an accelerator a stamp is an event on the current stream; on the CPU, where every call
    returns when its work is done, it is a reading of `time.perf_counter`.
    """

    def __init__(self, device: torch.device):
        self.has_streams = device.type != "cpu"
        self._index = device.index
        # What torch makes of a stream each time it is asked takes 20 microseconds, and an iteration
        # asks some hundred times.
        is_known = device.type == "cuda" and device.index is not None
        self._find_raw = getattr(torch._C, "_cuda_getCurrentRawStream", None) if is_known else None
        self._streams: dict[int, Any] = {}
        self._beside: Any = None

    def beside(self) -> contextlib.AbstractContextManager[Any]:
        """Use a stream beside computation inside, the same each time; on the CPU there is none."""
        if not self.has_streams:
            return contextlib.nullcontext()
        if self._beside is None:
            # Other ranks wait for what is packed here; passes fill the device anyway
            self._beside = get_accelerator().Stream(priority=-1)
        return get_accelerator().stream(self._beside)

    def stamp(self) -> Any:
        """The present point of the current stream."""
        if not self.has_streams:
            return time.perf_counter()
        event = get_accelerator().Event(enable_timing=True)
        event.record(self._current_stream())
        return event

    def wait_for(self, stamp: Any) -> None:
        """Let the current stream go on only after `stamp`."""
        if self.has_streams:
            self._current_stream().wait_event(stamp)

    def _current_stream(self) -> Any:
        """The current stream of the calling thread."""
        if self._find_raw is None:
            return get_accelerator().current_stream()
        raw = self._find_raw(self._index)
        if raw not in self._streams:
            self._streams[raw] = get_accelerator().current_stream()
        return self._streams[raw]

    def settle(self, stamp: Any) -> None:
        """Wait, on the host, until `stamp` is reached and all that it comes after."""
        if self.has_streams:
            stamp.synchronize()

    def is_reached(self, stamp: Any) -> bool:
        """Whether `settle` would return at once."""
        return not self.has_streams or bool(stamp.query())

    def ms_between(self, begin: Any, end: Any) -> float:
        """Milliseconds from `begin` to `end`, both of them reached (`settle`)."""
        if not self.has_streams:
            return float(end - begin) * 1e3
        return float(begin.elapsed_time(end))


class Spans:
    """Spans of one kind of work, in the streams of the threads that did it."""

    def __init__(self, clock: DeviceClock):
        self.phase = 0
        """The iteration's phase at the next span."""
        self._clock = clock
        self._spans: list[tuple[Any, Any, int]] = []

    def add(self, begin: Any, end: Any) -> None:
        """A span between two stamps."""
        self._spans.append((begin, end, self.phase))

    @contextlib.contextmanager
    def measure(self) -> Iterator[None]:
        """Measure the span of the block; one that raises has none."""
        begin = self._clock.stamp()
        yield
        self.add(begin, self._clock.stamp())

    def total_ms(self, phase: int | None = None) -> float:
        """Milliseconds of all spans, or those of `phase`; the device has reached all of them."""
        return sum(
            self._clock.ms_between(begin, end)
            for begin, end, of_phase in self._spans
            if phase in (None, of_phase)
        )

    def join(self) -> None:
        """Let the current stream go on only after the last span."""
        if self._spans:
            self._clock.wait_for(self._spans[-1][1])

    def record_waits(self, recorder: Recorder) -> None:
        """Hand all spans to `recorder` as waits of passes."""
        for begin, end, _ in self._spans:
            recorder.add_wait(begin, end)

    def record(self, recorder: Recorder, kind: EventKind, first_phase: int = 0) -> None:
        """Hand all spans to `recorder`, which counts phases before `first_phase`, too."""
        for begin, end, phase in self._spans:
            recorder.add(kind, begin, end, first_phase + phase)


class LinkThread:
    """Runs jobs one after the other in a thread beside computation, where `overlap` allows it."""

    def __init__(self, *, overlap: bool):
        self.overlap = overlap
        self._jobs: queue.SimpleQueue[tuple[Callable[[], Any], Future[Any]] | None] = (
            queue.SimpleQueue()
        )
        self._thread: threading.Thread | None = None
        self._is_stuck = False

    def submit(self, job: Callable[[], Result]) -> Future[Result]:
        """The job's future. Raises RankLostError after `give_up`."""
        self.check_usable()
        future: Future[Result] = Future()
        if self._thread is None:
            # A daemon: a collective that never ends must not keep the process from ending.
            self._thread = threading.Thread(target=self._serve, name="ds_hydra link", daemon=True)
            self._thread.start()
        self._jobs.put((job, future))
        return future

    def check_usable(self) -> None:
        """Raise RankLostError after `give_up`."""
        # Its buffers are part of a round that other ranks may still join.
        if self._is_stuck:
            raise RankLostError(
                "an earlier error left an exchange between ranks in the middle of a round; restart from the last "
                "checkpoint"
            )

    def give_up(self) -> None:
        """A job does not end: its buffers stay in use, and nothing can be submitted any more."""
        self._is_stuck = True

    def close(self) -> None:
        """End the thread after the jobs submitted so far. Safe to call twice."""
        if self._thread is not None:
            # Not joined: a collective that never ends would keep this process, too.
            self._jobs.put(None)
            self._thread = None

    def _serve(self) -> None:
        while (entry := self._jobs.get()) is not None:
            _run(*entry)
            del entry  # nothing of the iteration stays alive while waiting


def _run(job: Callable[[], Result], future: Future[Result]) -> None:
    try:
        future.set_result(job())
    # Whatever it is: who waits for the future would wait for ever.
    except BaseException as error:
        future.set_exception(error)


class Cancelled(Exception):
    """The event will not be recorded."""


class BucketEvents:
    """Numbered events, each recorded once by one thread and awaited by another."""

    def __init__(self, count: int, clock: DeviceClock):
        self._clock = clock
        self._recorded = [threading.Event() for _ in range(count)]
        self._stamps: list[Any] = [None] * count

    def __len__(self) -> int:
        return len(self._recorded)

    def is_recorded(self, index: int) -> bool:
        """Whether a wait for the event would end at once on the host."""
        return self._recorded[index].is_set()

    def record(self, index: int) -> None:
        """Everything the current stream has been given so far belongs to the event. Repeating it
        changes nothing.
        """
        if not self._recorded[index].is_set():
            # Before the event is set: who waits reads the stamp as soon as it is.
            self._stamps[index] = self._clock.stamp()
            self._recorded[index].set()

    def cancel(self) -> None:
        """Wake everyone who waits for an event that is not recorded."""
        # Without a stamp, by which who waits tells it from an event that was recorded before.
        for event in self._recorded:
            event.set()

    def wait(self, index: int) -> None:
        """Wait until the event is recorded, and let the current stream go on after it. Raises
        Cancelled.
        """
        self._recorded[index].wait()
        if self._stamps[index] is None:
            raise Cancelled
        self._clock.wait_for(self._stamps[index])
