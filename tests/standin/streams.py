"""Streams and events of the stand-in, and what may run at the same time on them.

Happens-before is kept by vector clocks: `clock[s][t]` is the last kernel of stream t that stream s
has waited for. Two kernels of different streams race where they touch the same bytes, one of them
writes, and the later one's stream has not waited for the earlier kernel.
"""

from __future__ import annotations

import contextlib
import itertools
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

DEFAULT_STREAM = 0
_stream_ids = itertools.count(1)
_local = threading.local()


def where() -> str:
    """The innermost lines and functions of ds_hydra, DeepSpeed and transformers' Trainer that led
    here, with the package of the first one.
    """
    places: list[str] = []
    frame = sys._getframe(1)
    while frame is not None and len(places) < 3:
        filename = frame.f_code.co_filename
        for package in ("ds_hydra", "deepspeed/runtime", "transformers/trainer.py"):
            if f"/{package}" in filename:
                file = f"{filename.rsplit('/', 1)[-1]}:{frame.f_lineno} {frame.f_code.co_name}"
                places.append(file if places else f"{package} {file}")
        frame = frame.f_back  # type: ignore[assignment]
    return " < ".join(places)


@contextlib.contextmanager
def elsewhere() -> Iterator[None]:
    """Kernels of this thread in here are not counted as `Observer.num_outside`."""
    before = getattr(_local, "is_elsewhere", False)
    _local.is_elsewhere = True
    try:
        yield
    finally:
        _local.is_elsewhere = before


def _is_outside() -> bool:
    """Whether a kernel is neither `elsewhere` nor of a thread of autograd."""
    is_autograd = isinstance(threading.current_thread(), threading._DummyThread)
    return not is_autograd and not getattr(_local, "is_elsewhere", False)


@dataclass(frozen=True, slots=True)
class Touch:
    """One kernel on one range of bytes."""

    begin: int
    end: int
    is_written: bool
    stream: int
    number: int
    name: str
    place: str


@dataclass
class Observer:
    """Everything that happens on the device while `is_on`; `races` and `waits` are findings."""

    is_on: bool = False
    num_starts: int = 0
    races: list[str] = field(default_factory=list)
    at_allocation: Callable[[], None] | None = None
    """What happens first where memory is taken, observed or not."""
    waits: Counter[str] = field(default_factory=Counter)
    waited_for: dict[str, int] = field(default_factory=dict)
    """Fewest kernels that a wait at a place was for."""
    num_kernels: int = 0
    num_outside: int = 0
    _clocks: dict[int, dict[int, int]] = field(default_factory=dict)
    _touches: dict[int, list[Touch]] = field(default_factory=dict)
    _homes: dict[int, int] = field(default_factory=dict)
    _used_by: dict[int, set[int]] = field(default_factory=dict)
    _last: dict[int, int] = field(default_factory=dict)
    _settled: dict[int, int] = field(default_factory=dict)
    _settled_all: int = -1
    _lock: Any = field(default_factory=threading.RLock)

    def start(self) -> None:
        """Forget everything, and observe from now on."""
        with self._lock:
            self.races, self.waits, self.num_kernels, self.num_outside = [], Counter(), 0, 0
            self._clocks, self._touches, self._homes, self._used_by = {}, {}, {}, {}
            self._last, self._settled, self._settled_all, self.waited_for = {}, {}, -1, {}
            self.is_on = True
            self.num_starts += 1

    def stop(self) -> None:
        """Observe no longer."""
        self.is_on = False

    def __call__(self, kind: str, name: str, accesses: list[tuple[int, int, int, bool]]) -> None:
        if kind == "allocate" and self.at_allocation is not None:
            self.at_allocation()
        if not self.is_on:
            return
        if kind == "wait":
            self.wait(name)
        elif kind == "allocate":
            self._allocate(accesses[0][0])
        elif kind == "free":
            self._free(accesses[0][0])
        else:
            self.kernel(name, accesses, current_stream().id)

    def wait(self, name: str, clock: dict[int, int] | None = None) -> None:
        """The host waits for what `clock` stands for, None for all of the device. A wait for what
        is over is none.
        """
        if self.is_on and not (clock is not None and self.has_settled(clock)):
            with self._lock:
                place = f"{name} at {where()}"
                self.waits[place] += 1
                num_kernels = self.num_kernels - max(0, self._settled_all, *self._settled.values())
                self.waited_for[place] = min(num_kernels, self.waited_for.get(place, num_kernels))
                if clock is None:
                    self._settled_all = self.num_kernels
                self.settle(clock or {})

    def settle(self, clock: dict[int, int]) -> None:
        """The host knows that what `clock` stands for is over."""
        with self._lock:
            for stream, number in clock.items():
                self._settled[stream] = max(self._settled.get(stream, -1), number)

    def has_settled(self, clock: dict[int, int] | None) -> bool:
        """Whether the host has waited for all kernels that an event stands for."""
        with self._lock:
            return not self.is_on or all(
                number <= max(self._settled.get(stream, -1), self._settled_all)
                for stream, number in (clock or {}).items()
            )

    def snapshot(self, stream: int) -> dict[int, int]:
        """What an event that is recorded now on `stream` stands for."""
        with self._lock:
            return {**self._clocks.get(stream, {}), stream: self.num_kernels}

    def given(self, stream: int) -> dict[int, int]:
        """The last kernels that `stream` was given, or comes after."""
        with self._lock:
            return {**self._clocks.get(stream, {}), stream: self._last.get(stream, -1)}

    def join(self, stream: int, clock: dict[int, int]) -> None:
        """`stream` goes on after an event."""
        with self._lock:
            mine = self._clocks.setdefault(stream, {})
            for other, number in clock.items():
                mine[other] = max(mine.get(other, -1), number)

    def kernel(self, name: str, accesses: list[tuple[int, int, int, bool]], stream: int) -> None:
        """A kernel on `stream`."""
        with self._lock:
            self.num_kernels += 1
            self._last[stream] = self.num_kernels
            self.num_outside += _is_outside()
            for storage, begin, end, is_written in accesses:
                touch = Touch(begin, end, is_written, stream, self.num_kernels, name, where())
                touches = self._touches.setdefault(storage, [])
                self.races += [
                    f"{name} on stream {stream} at {touch.place} and {other.name} on stream "
                    f"{other.stream} at {other.place}"
                    for other in touches
                    if (other.is_written or is_written)
                    and other.begin < end
                    and begin < other.end
                    and not self._is_before(other, stream)
                ]
                # What this touch covers on its own stream can race with nothing that it does not.
                touches[:] = [t for t in touches if not _covers(touch, t)]
                touches.append(touch)

    def record_stream(self, storage: int, stream: int) -> None:
        """`Tensor.record_stream`: the allocator waits for `stream` before it reuses the block."""
        with self._lock:
            self._used_by.setdefault(storage, set()).add(stream)

    def _is_before(self, other: Touch, stream: int) -> bool:
        return (
            other.stream == stream
            or self._clocks.get(stream, {}).get(other.stream, -1) >= other.number
        )

    def _allocate(self, storage: int) -> None:
        with self._lock:
            self._touches[storage] = []
            self._homes[storage] = current_stream().id

    def _free(self, storage: int) -> None:
        """A caching allocator hands the block out again on the stream that allocated it, at once:
        what the host has waited for by now is over.
        """
        with self._lock:
            home = self._homes.pop(storage, DEFAULT_STREAM)
            known = self._used_by.pop(storage, set())
            self.races += [
                f"freed for stream {home} at {where()} while {touch.name} on stream "
                f"{touch.stream} at {touch.place} may still run"
                for touch in self._touches.pop(storage, [])
                if touch.stream not in known
                and not self._is_before(touch, home)
                and not self.has_settled({touch.stream: touch.number})
            ]


def _covers(new: Touch, old: Touch) -> bool:
    return (
        old.stream == new.stream
        and old.begin >= new.begin
        and old.end <= new.end
        and (new.is_written or not old.is_written)
    )


observer = Observer()


class Stream:
    """A queue of kernels. They run at once; only their order in `observer` is the queue's."""

    def __init__(self, device: Any = None, priority: int = 0, **_: Any):
        self.id = self.stream_id = next(_stream_ids)
        self.device = torch.device("standin", 0)

    def wait_event(self, event: Event) -> None:
        if event.clock is not None:
            observer.join(self.id, event.clock)

    def wait_stream(self, other: Stream) -> None:
        self.wait_event(other.record_event())

    def record_event(self, event: Event | None = None) -> Event:
        event = event or Event()
        event.record(self)
        return event

    def synchronize(self) -> None:
        observer.wait("Stream.synchronize", observer.given(self.id))

    def query(self) -> bool:
        return True

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Stream) and other.id == self.id

    def __hash__(self) -> int:
        return self.id

    def __enter__(self) -> Stream:
        self._switch = stream(self)
        return self._switch.__enter__()

    def __exit__(self, *error: Any) -> None:
        self._switch.__exit__(*error)


class Event:
    """A point in a stream."""

    def __init__(self, enable_timing: bool = False, **_: Any):
        self.clock: dict[int, int] | None = None
        self._is_timed = enable_timing
        self._start = 0
        self._recorded_s: float | None = None

    def record(self, on: Stream | None = None) -> None:
        self.clock = observer.snapshot((on or current_stream()).id)
        self._recorded_s = time.perf_counter()
        self._start = observer.num_starts

    def wait(self, on: Stream | None = None) -> None:
        (on or current_stream()).wait_event(self)

    def synchronize(self) -> None:
        assert self._recorded_s is not None, "synchronize of an event that was never recorded"
        if self._start == observer.num_starts:  # earlier ones are over
            observer.wait("Event.synchronize", self.clock)

    def query(self) -> bool:
        return self._start < observer.num_starts or observer.has_settled(self.clock)

    def elapsed_time(self, end: Event) -> float:
        assert self._is_timed, "elapsed_time needs enable_timing=True"
        assert end._is_timed, "elapsed_time needs enable_timing=True"
        assert self._recorded_s is not None, "elapsed_time of an event that was never recorded"
        assert end._recorded_s is not None, "elapsed_time of an event that was never recorded"
        assert self.query(), "elapsed_time of an event that the host has not waited for"
        assert end.query(), "elapsed_time of an event that the host has not waited for"
        return (end._recorded_s - self._recorded_s) * 1e3


class stream:
    """Kernels of the block go to a stream; one of each thread."""

    def __init__(self, to: Stream | None):
        self._to = to

    def __enter__(self) -> Stream | None:
        self._before = getattr(_local, "stream", None)
        _local.stream = self._to or self._before
        return self._to

    def __exit__(self, *error: Any) -> None:
        _local.stream = self._before


def _make_default() -> Stream:
    made = Stream.__new__(Stream)
    made.id = made.stream_id = DEFAULT_STREAM
    return made


_default = _make_default()


def current_stream(device: Any = None) -> Stream:
    """The stream of the calling thread."""
    return getattr(_local, "stream", None) or _default


def default_stream(device: Any = None) -> Stream:
    """The stream that all threads start on."""
    return _default


def set_stream(to: Stream) -> None:
    """Kernels of the calling thread go to `to` from now on."""
    _local.stream = to
