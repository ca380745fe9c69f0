"""The link beside computation, a thread on CPU ranks and a stream on accelerators, and the signals
between the two.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

from ds_hydra.engine.telemetry.trace import DeviceClock
from ds_hydra.errors import RankLostError

Result = TypeVar("Result")


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
