"""Trace of the stages in one iteration: recorded at the cost of a clock reading, gathered on
request.
"""

from __future__ import annotations

import contextlib
import socket
import time
import zlib
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from deepspeed.accelerator import get_accelerator
from torch import Tensor

from ds_hydra.engine.ranks.agreement import gather_by_hosts
from ds_hydra.engine.ranks.memory import forget_peak, process_bytes
from ds_hydra.records.timeline import Event, EventKind, Timeline, Track
from ds_hydra.sampler.plan import IterationPlan
from ds_hydra.strategy.schemes.placement import stages_of

_KINDS = tuple(EventKind)
_PASSES = (EventKind.FORWARD, EventKind.BACKWARD)
_TRACES_PER_OCTAVE = 100
"""Traces before the distance between them doubles, so that a file grows with the logarithm of a
run.
"""


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


class Recorder:
    """Spans of this rank since `begin()`, in the streams of the threads that had the work. Nothing
    here communicates, and but for `keep_up` nothing waits for the device.

    On an accelerator a span ends where the current stream reaches it: two events per span, read
    only after the device was synchronised for another reason.
    """

    def __init__(self, clock: DeviceClock | None = None) -> None:
        self.clock = clock or DeviceClock(torch.device("cpu"))
        self.begin()

    def begin(self) -> None:
        """Forget everything; now is time 0."""
        self._spans: list[tuple[EventKind, int, int, Any, Any]] = []
        self._pass_ends: list[Any] = []
        self._waits: list[tuple[int, Any, Any]] = []
        """Phase, begin and end of waits for slices between passes' layers."""
        self._rests: list[tuple[Any, Any]] = []
        """Waits for the link between passes and after them."""
        self.phase = 0
        """Number of the next span's phase in the iteration."""
        self._zero = self.clock.stamp()
        self.zero_s = time.perf_counter()
        """Host's time at time 0; on an accelerator, which comes there later, after `align`."""

    @contextmanager
    def span(self, kind: EventKind, micro_batch: int = -1) -> Iterator[None]:
        """Record the span of the block; one that raises is not recorded."""
        start = self.clock.stamp()
        yield
        self.add(kind, start, self.clock.stamp(), self.phase, micro_batch)

    @contextmanager
    def wait(self) -> Iterator[None]:
        """Record the block as a wait inside a pass."""
        start = self.clock.stamp()
        yield
        self.add_wait(start, self.clock.stamp())

    @contextmanager
    def rest(self) -> Iterator[None]:
        """Record the block as a wait outside of passes."""
        start = self.clock.stamp()
        yield
        self._rests.append((start, self.clock.stamp()))

    def add(self, kind: EventKind, start: Any, end: Any, phase: int, micro_batch: int = -1) -> None:
        """Record a span of `phase` between two stamps of the clock."""
        self._spans.append((kind, phase, micro_batch, start, end))
        if kind in _PASSES:
            self._pass_ends.append(end)

    def add_wait(self, start: Any, end: Any) -> None:
        """Record a wait inside a pass, between two stamps."""
        self._waits.append((self.phase, start, end))

    def keep_up(self, num_passes: int) -> None:
        """Let the host wait for an accelerator until fewer than `num_passes` passes are not
        over.
        """
        if len(self._pass_ends) >= num_passes:
            self.clock.settle(self._pass_ends[-num_passes])

    def align(self) -> None:
        """Find the host's time at time 0; the host waits for an accelerator."""
        if self.clock.has_streams:
            now = self.clock.stamp()
            self.clock.settle(now)
            self.zero_s = time.perf_counter() - self._ms(now) / 1e3

    @property
    def phases(self) -> list[int]:
        """Number of each span's phase in the iteration."""
        return [phase for _, phase, *_ in self._spans]

    def read(self) -> list[tuple[EventKind, int, float, float]]:
        """(kind, micro-batch, start, end) in ms since `begin()`; the device must have reached all
        of it, as for all that follows.
        """
        return [
            (kind, index, self._ms(start), self._ms(end))
            for kind, _, index, start, end in self._spans
        ]

    def total_ms(self, kind: EventKind) -> float:
        """Milliseconds of all spans of `kind`."""
        ms_between = self.clock.ms_between
        return sum(ms_between(start, end) for of, *_, start, end in self._spans if of is kind)

    def waited_ms(self, phase: int | None = None) -> float:
        """Milliseconds that passes have waited, of `phase` or all."""
        ms_between = self.clock.ms_between
        waits = (wait[1:] for wait in self._waits if phase in (None, wait[0]))
        return sum(ms_between(start, end) for start, end in waits)

    def rested_ms(self) -> float:
        """Milliseconds of waits outside of passes."""
        return sum(self.clock.ms_between(start, end) for start, end in self._rests)

    def busy_ms(self) -> float:
        """Milliseconds in passes, without their waits."""
        of_passes = [span[-2:] for span in self._spans if span[0] in _PASSES]
        passes = sorted((self._ms(start), self._ms(end)) for start, end in of_passes)
        begins = [start for start, _ in passes]
        busy_ms = sum(end - start for start, end in passes)
        for _, mark, until in self._waits:
            start = self._ms(mark)
            number = bisect_right(begins, start) - 1
            if number >= 0 and start < passes[number][1]:
                busy_ms -= self._ms(until) - start
        return busy_ms

    def _ms(self, stamp: Any) -> float:
        return self.clock.ms_between(self._zero, stamp)


class TraceChoice:
    """Choice of the iterations to trace: every n-th one, later fewer, and any that is slower than
    all before.

    A pure function of what it was asked, so ranks that ask the same agree without talking.
    """

    def __init__(self, every: int):
        self._every = every
        self._slowest = 0.0
        self._num_asked = 0

    def wants(self, iteration: int, slowdown: float) -> bool:
        """Whether to trace `iteration`, which took `slowdown` times the predicted time."""
        if not self._every:
            return False
        self._num_asked += 1
        octave = max(0, (iteration // (_TRACES_PER_OCTAVE * self._every)).bit_length() - 1)
        is_slowest = slowdown > self._slowest
        if self._num_asked > 1:  # a first iteration warms everything up and would beat all others
            self._slowest = max(self._slowest, slowdown)
        return iteration % (self._every << octave) == 0 or is_slowest


def gather_timeline(recorder: Recorder, plan: IterationPlan, device: torch.device) -> Timeline:
    """Gather the spans of all stages on every rank; a stage is represented by its first rank.

    Collective over all ranks. Clocks: ranks of one host share one, and hosts are aligned where
    their first rank began, which all do when the check of the plan's digest lets them go.
    """
    recorder.align()
    spans = recorder.read()
    host = float(zlib.crc32(socket.gethostname().encode()))
    mine = torch.tensor([len(spans), host, recorder.zero_s * 1e3], dtype=torch.float64)
    counts, hosts, zeros_ms = gather_by_hosts(mine, device).T.tolist()
    # As long as the longest one: an all-gather takes tables of one size.
    table = torch.zeros(int(max(counts)), 5, dtype=torch.float64)
    for row, (phase, (kind, micro_batch, *interval_ms)) in enumerate(zip(recorder.phases, spans)):
        table[row] = torch.tensor(
            [phase, _KINDS.index(kind), micro_batch, *interval_ms], dtype=torch.float64
        )
    tables = gather_by_hosts(table.flatten(), device).view(len(counts), -1, 5)
    first = {host: min(z for h, z in zip(hosts, zeros_ms) if h == host) for host in set(hosts)}
    offsets_ms = [zero - first[host] for host, zero in zip(hosts, zeros_ms)]
    events = [
        event
        for rank, phase, pipeline, stage in _representatives(plan)
        for event in _events(
            tables[rank, : int(counts[rank])], phase, pipeline, stage, offsets_ms[rank]
        )
    ]
    return Timeline(
        iteration=plan.iteration,
        strategy=str(plan.strategy),
        num_devices=plan.num_devices,
        pipelines=tuple(
            Track(scheme=p.scheme, ranks=p.ranks, num_micro_batches=len(p.micro_batches))
            for p in plan.pipelines
        ),
        events=tuple(events),
        duration_ms=max((event.end_ms for event in events), default=0.0),
    )


def _representatives(plan: IterationPlan) -> Iterator[tuple[int, int, int, int]]:
    """(rank, phase, pipeline, stage) of the first rank of each stage, and of the first rank that
    idles.
    """
    index = 0
    for number, phase in enumerate(plan.in_turn):
        for pipeline in phase.pipelines:
            for stage, ranks in enumerate(stages_of(pipeline.scheme, pipeline.ranks)):
                yield ranks[0], number, index, stage
            index += 1
        if phase.strategy.num_devices < plan.num_devices:
            yield phase.strategy.num_devices, number, -1, 0


def _events(
    table: Tensor, phase: int, pipeline: int, stage: int, offset_ms: float
) -> Iterator[Event]:
    rows: Sequence[Sequence[float]] = table.tolist()
    for of_phase, kind, micro_batch, start_ms, end_ms in rows:
        if of_phase == phase:
            yield Event(
                pipeline=pipeline,
                stage=stage,
                kind=_KINDS[int(kind)],
                micro_batch=int(micro_batch),
                start_ms=round(start_ms + offset_ms, 3),
                end_ms=round(end_ms + offset_ms, 3),
            )


class MemoryWatch:
    """The most memory that this rank has used since the engine was started.

    On a CPU: pages of the process above what it held at the start. On an accelerator: what was
    allocated.
    """

    def __init__(self) -> None:
        self._on_device = not get_accelerator().is_synchronized_device()
        self._before = 0
        # An accelerator is not touched before DeepSpeed has chosen the device
        if not self._on_device:
            forget_peak()
            self._before = process_bytes("VmRSS")

    def peak_bytes(self) -> int:
        """Bytes; 0 where the system does not say."""
        if self._on_device:
            return int(get_accelerator().max_memory_allocated())
        return max(0, process_bytes("VmHWM") - self._before)
