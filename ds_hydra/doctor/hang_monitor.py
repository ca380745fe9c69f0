"""Watch for ranks that keep the others waiting. Where a step does not end, every rank tells where
it is, and rank 0 judges.

Through the store that the ranks met in, in a thread of its own: it speaks while the rank is stuck
in a collective, whatever the backend.
"""

from __future__ import annotations

import contextlib
import json
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch.distributed as dist

_BEAT_S = 0.5
_SILENCE_S = 6.0
"""Seconds in which every rank that lives says where it is."""
_FAREWELL_S = 10.0
"""Seconds that other ranks wait for the report of rank 0."""
_PACKAGE = "ds_hydra"


@dataclass(frozen=True, slots=True)
class State:
    """State of a rank when a step did not end."""

    rank: int
    step: int
    text: str
    seconds: float
    places: Sequence[str]
    error: str
    is_gone: bool = False

    def __str__(self) -> str:
        if self.is_gone:
            return f"rank {self.rank} is gone"
        where = f" at {', '.join(self.places)}" if self.places else ""
        if self.error:
            return f"rank {self.rank} failed in {self.text!r}: {self.error}"
        return f"rank {self.rank} is in {self.text!r} since {self.seconds:.0f} s{where}"


def judge(states: Sequence[State]) -> str:
    """Name the rank that the others wait for, and the place of every rank.

    >>> waiting = State(0, 7, "push", 3.0, [], "")
    >>> print(judge([waiting, State(1, 6, "pull", 4.0, ["b.py:2"], "")]))
    others wait for rank 1: rank 1 is in 'pull' since 4 s at b.py:2; rank 0 is in 'push' since 3 s
    """
    failed = [state for state in states if state.error]
    gone = [state for state in states if state.is_gone]
    first = min(state.step for state in states)
    behind = [s for s in states if s.step == first] if len({s.step for s in states}) > 1 else []
    guilty = gone or failed or behind
    rest = [state for state in states if state not in guilty]
    ordered = [*guilty, *rest]
    shown = "; ".join(map(str, ordered[:8])) + ("; ..." if len(ordered) > 8 else "")
    if guilty:
        return f"others wait for rank {', '.join(str(s.rank) for s in guilty)}: {shown}"
    return f"all ranks wait in the same step: {shown}"


class HangMonitor:
    """Watches over the steps of this rank. Steps are collective; the monitor itself is not.

    `on_end(text)` is called on rank 0, in the monitor's thread, when a step of any rank has not
    ended in `limit_s` or has failed, with what `judge` says; on the other ranks after rank 0 has
    done so, with "". The examination is over then: ranks are in the middle of collectives.
    """

    def __init__(
        self,
        store: dist.Store,  # type: ignore[name-defined]
        rank: int,
        num_ranks: int,
        *,
        limit_s: float,
        on_end: Callable[[str], None],
    ):
        self._store = store.clone()  # another connection: `wait` of a store holds its lock
        self._rank, self._num_ranks = rank, num_ranks
        self._limit_s, self._on_end = limit_s, on_end
        self._step, self._text, self._since = 0, "start", time.monotonic()
        self._error = ""
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._serve, name="ds_hydra monitor", daemon=True)
        self._thread.start()

    @contextlib.contextmanager
    def step(self, text: str) -> Iterator[None]:
        """Take the step `text` inside, which ends within the limit."""
        self._step, self._text, self._since = self._step + 1, text, time.monotonic()
        yield

    def fail(self, error: BaseException) -> None:
        """This rank cannot go on; does not return before the examination has ended everywhere."""
        self._error = f"{type(error).__name__}: {str(error).strip()[:500]}"
        self._thread.join()

    def close(self) -> None:
        """All steps have ended, on all ranks."""
        self._is_over.set()
        self._thread.join()

    def _serve(self) -> None:
        while not self._is_over.wait(_BEAT_S):
            late = time.monotonic() - self._since > self._limit_s
            try:
                if late or self._error:
                    self._store.set("doctor/alarm", "1")
                if self._store.check(["doctor/alarm"]):
                    self._conclude()
                    return
            except RuntimeError as error:  # the store is in the process of rank 0 or its launcher
                if self._rank == 0 or late:
                    self._end(f"the store of rank 0 is gone: {str(error)[:200]}")
                    return

    def _conclude(self) -> None:
        """Say where this rank is; rank 0 waits for the others and ends, which they wait for."""
        state = [
            self._step,
            self._text,
            time.monotonic() - self._since,
            find_places(),
            self._error,
        ]
        keys = [f"doctor/state/{rank}" for rank in range(self._num_ranks)]
        waited_for = ["doctor/told"] if self._rank else keys
        end = time.monotonic() + _SILENCE_S + (_FAREWELL_S if self._rank else 0.0)
        with contextlib.suppress(RuntimeError):  # the store ends with rank 0
            self._store.set(keys[self._rank], json.dumps(state))
            while time.monotonic() < end and not self._store.check(waited_for):
                time.sleep(_BEAT_S)
        self._end("" if self._rank else judge([*map(self._read_state, range(self._num_ranks))]))

    def _end(self, text: str) -> None:
        self._is_over.set()
        try:
            self._on_end(text)
        finally:
            if self._rank == 0:
                with contextlib.suppress(RuntimeError):
                    self._store.set("doctor/told", "1")

    def _read_state(self, rank: int) -> State:
        key = f"doctor/state/{rank}"
        if not self._store.check([key]):
            return State(rank, 0, "start", 0.0, (), "", is_gone=True)
        return State(rank, *json.loads(self._store.get(key)))


def find_places() -> list[str]:
    """`file:line function` of the innermost frame of this package in each other thread, main
    thread first. Threads that only wait for work are left out.
    """
    frames, main = sys._current_frames(), threading.main_thread().ident
    places = []
    for thread in sorted(frames.keys() - {threading.get_ident()}, key=lambda own: own != main):
        for frame in reversed(traceback.extract_stack(frames[thread])):
            _, is_inside, file = frame.filename.rpartition(f"/{_PACKAGE}/")
            if is_inside:
                if frame.name not in ("_serve", "_serve_until_closing"):
                    places.append(f"{file}:{frame.lineno} {frame.name}")
                break
    return places
