"""Traces of measured iterations for Perfetto and chrome://tracing.

[Note: The trace-event format]
A JSON object with `traceEvents`; "X" is a complete event, "M" metadata, "C" a counter, times in
whole microseconds. One process for iterations and one for their stages, each with a thread; traced
iterations follow each other without the ones between them.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ds_hydra.errors import HydraConfigError
from ds_hydra.records.metrics import IterationMetrics
from ds_hydra.records.timeline import Event, EventKind, Timeline
from ds_hydra.report.run_folder import Run
from ds_hydra.strategy.schemes.placement import stages_of

TraceEvent = dict[str, Any]

_ITERATIONS, _MEASURED = 1, 2
"""Process ids, in the order in which viewers show them."""
_PROCESSES = {_ITERATIONS: "iterations", _MEASURED: "measured"}
_NAMES = {EventKind.FORWARD: "F", EventKind.BACKWARD: "B"}
_THREADS = 1 << 20
"""Thread ids of a process begin at its id times this: Perfetto takes equal ids, and 0, for the same
thread.
"""
_LINK = 1 << 19
"""Offset of the threads of pulls and pushes, which may run beside a stage's passes."""


def trace_run(run: Run) -> dict[str, Any]:
    """The trace of all traced iterations of `run`, one after the other; raises HydraConfigError
    where nothing can be drawn.
    """
    traced = [record for record in run.records if record.iteration in run.traces]
    if not traced:
        raise HydraConfigError(
            f"run {run.name} has no traced iteration for --perfetto; set hydra.trace_every to 1 or more"
        )
    events: list[TraceEvent] = []
    threads: dict[tuple[int, int], str] = {(_ITERATIONS, _ITERATIONS * _THREADS): "iteration"}
    start_ms = 0.0
    for record in traced:
        timeline = run.traces[record.iteration].timeline
        events += _iteration_events(timeline, record, start_ms)
        events += _timeline_events(timeline, start_ms, threads)
        start_ms += 1.02 * timeline.duration_ms
    return {"traceEvents": [*_metadata(threads), *events], "displayTimeUnit": "ms"}


def write_trace(document: dict[str, Any], out: Path) -> None:
    """Write the trace file."""
    try:
        out.write_text(json.dumps(document, separators=(",", ":")), encoding="utf-8")
    except OSError as error:
        raise HydraConfigError(f"cannot write {out}: {error.strerror}") from error


def _iteration_events(
    timeline: Timeline, record: IterationMetrics, start_ms: float
) -> Iterator[TraceEvent]:
    place = {"pid": _ITERATIONS, "tid": _ITERATIONS * _THREADS, "ts": _us(start_ms)}
    yield {
        "name": f"iteration {timeline.iteration}: {timeline.strategy}",
        "cat": "iteration",
        "ph": "X",
        **place,
        "dur": _us(timeline.duration_ms),
        "args": {
            "strategy": timeline.strategy,
            "tokens": record.num_tokens,
            "loss": record.loss if record.loss == record.loss else None,
        },
    }
    rate = {"tokens/s": record.tokens_per_s}
    yield {"name": "tokens per second", "ph": "C", **place, "args": rate}


def _timeline_events(
    timeline: Timeline, start_ms: float, threads: dict[tuple[int, int], str]
) -> Iterator[TraceEvent]:
    for event in timeline.events:
        offset, name = _thread(timeline, event)
        thread = _MEASURED * _THREADS + offset
        threads.setdefault((_MEASURED, thread), name)
        is_pass = event.kind in _NAMES
        args = {"pipeline": event.pipeline, "stage": event.stage}
        yield {
            "name": f"{_NAMES[event.kind]}{event.micro_batch}" if is_pass else event.kind.value,
            "cat": event.kind.value,
            "ph": "X",
            "pid": _MEASURED,
            "tid": thread,
            "ts": _us(start_ms + event.start_ms),
            "dur": _us(start_ms + event.end_ms) - _us(start_ms + event.start_ms),
            "args": args | ({"micro_batch": event.micro_batch} if is_pass else {}),
        }


def _thread(timeline: Timeline, event: Event) -> tuple[int, str]:
    """Place among the threads and name: a stage's first rank; what may overlap its passes has its
    own thread.
    """
    if event.pipeline < 0:
        first = max((max(track.ranks) for track in timeline.pipelines), default=-1) + 1
        return first, f"rank {first} and idle ones after it"
    track = timeline.pipelines[event.pipeline]
    first = stages_of(track.scheme, track.ranks)[event.stage][0]
    if event.kind in (EventKind.PULL, EventKind.PUSH):
        return _LINK + first, f"rank {first} link"
    return first, f"rank {first}"


def _metadata(threads: dict[tuple[int, int], str]) -> Iterator[TraceEvent]:
    for process in sorted({process for process, _ in threads}):
        first = min(thread for other, thread in threads if other == process)
        yield _meta("process_name", process, first, {"name": _PROCESSES[process]})
        yield _meta("process_sort_index", process, first, {"sort_index": process})
    for (process, thread), name in sorted(threads.items()):
        yield _meta("thread_name", process, thread, {"name": name})
        yield _meta(
            "thread_sort_index",
            process,
            thread,
            {"sort_index": 2 * (thread % _LINK) + int(thread % _THREADS >= _LINK)},
        )


def _meta(name: str, process: int, thread: int, args: dict[str, Any]) -> TraceEvent:
    return {"name": name, "ph": "M", "pid": process, "tid": thread, "ts": 0, "args": args}


def _us(time_ms: float) -> int:
    """Whole microseconds: rounding both ends alike keeps neighbours from overlapping."""
    return round(time_ms * 1000)
