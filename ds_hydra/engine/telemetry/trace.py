"""Trace of the stages in one iteration: recorded at the cost of a clock reading, gathered on
request.
"""

from __future__ import annotations

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


class Recorder:
    """Spans of this rank since `begin()`. Nothing here communicates, and but for `keep_up` nothing
    waits for the device.

    On an accelerator a span ends where the current stream reaches it: two events per span, read
    only after the device was synchronised for another reason.
    """

    def __init__(self) -> None:
        self._on_device = not get_accelerator().is_synchronized_device()
        self._spans: list[tuple[EventKind, int, Any, Any]] = []
        self._waits: list[tuple[Any, Any]] = []
        self.phases: list[int] = []
        """Number of each span's phase in the iteration."""
        self.phase = 0
        """Number of the next span's phase."""
        self.begin()

    def begin(self) -> None:
        """Forget everything; now is time 0."""
        self._spans.clear()
        self._waits.clear()
        self.phases.clear()
        self.phase = 0
        self._zero = self._mark()
        self.zero_s = time.perf_counter()
        """Host's time at time 0; on an accelerator, which comes there later, after `align`."""

    @contextmanager
    def span(self, kind: EventKind, micro_batch: int = -1) -> Iterator[None]:
        """Record the span of the block; one that raises is not recorded."""
        start = self._mark()
        yield
        self.add(kind, start, self._mark(), self.phase, micro_batch)

    def add(self, kind: EventKind, start: Any, end: Any, phase: int, micro_batch: int = -1) -> None:
        """Record a span of `phase` between two marks: `perf_counter()` on a CPU, events on an
        accelerator.
        """
        self._spans.append((kind, micro_batch, start, end))
        self.phases.append(phase)

    def add_wait(self, start: Any, end: Any) -> None:
        """Record a wait inside a pass, between two marks taken elsewhere."""
        self._waits.append((start, end))

    def keep_up(self, num_spans: int) -> None:
        """Let the host wait for an accelerator until fewer than `num_spans` spans are not over."""
        if self._on_device and len(self._spans) >= num_spans:
            self._spans[-num_spans][3].synchronize()

    def align(self) -> None:
        """Find the host's time at time 0; the host waits for an accelerator."""
        if self._on_device:
            now = self._mark()
            now.synchronize()
            self.zero_s = time.perf_counter() - self._ms(now) / 1e3

    def read(self) -> list[tuple[EventKind, int, float, float]]:
        """(kind, micro-batch, start, end) in ms since `begin()`; the device must have reached all
        of it.
        """
        return [
            (kind, index, self._ms(start), self._ms(end)) for kind, index, start, end in self._spans
        ]

    def busy_ms(self) -> float:
        """Milliseconds in passes, without their waits; the device has reached all of these."""
        of_passes = [span[2:] for span in self._spans if span[0] in _PASSES]
        passes = sorted((self._ms(start), self._ms(end)) for start, end in of_passes)
        begins = [start for start, _ in passes]
        busy_ms = sum(end - start for start, end in passes)
        for mark, until in self._waits:
            start = self._ms(mark)
            number = bisect_right(begins, start) - 1
            if number >= 0 and start < passes[number][1]:
                busy_ms -= self._ms(until) - start
        return busy_ms

    def _mark(self) -> Any:
        if not self._on_device:
            return time.perf_counter()
        event = get_accelerator().Event(enable_timing=True)
        event.record()
        return event

    def _ms(self, mark: Any) -> float:
        return (
            float(self._zero.elapsed_time(mark)) if self._on_device else (mark - self._zero) * 1e3
        )


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
