"""Traces of iterations for Perfetto and chrome://tracing, predicted beside measured.

[Note: The trace-event format]
A JSON object with `traceEvents`; "X" is a complete event, "M" metadata, "C" a counter, times in
whole microseconds. One process per source, one thread per stage; traced iterations follow each
other without the ones between them.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from ds_hydra.errors import HydraConfigError
from ds_hydra.records.metrics import IterationMetrics
from ds_hydra.records.timeline import Event, EventKind, Timeline
from ds_hydra.report.run_folder import Run
from ds_hydra.sampler.plan import IterationPlan
from ds_hydra.strategy.schemes.placement import stages_of


def align(predicted: Timeline, measured: Timeline) -> Timeline:
    """`predicted` without pull, moved to where the first measured forward begins; else as it is."""
    if any(event.kind is EventKind.PULL for event in predicted.events) or not measured.passes():
        return predicted
    return predicted.shift(-min(event.start_ms for event in measured.passes()))


TraceEvent = dict[str, Any]

_ITERATIONS, _PREDICTED, _MEASURED = 1, 2, 3
"""Process ids, in the order in which viewers show them."""
_PROCESSES = {_ITERATIONS: "iterations", _PREDICTED: "predicted", _MEASURED: "measured"}
_NAMES = {EventKind.FORWARD: "F", EventKind.BACKWARD: "B"}
_THREADS = 1 << 20
"""Thread ids of a process begin at its id times this: Perfetto takes equal ids, and 0, for the same
thread.
"""
_LINK = 1 << 19
"""Offset of the threads of P2P, pulls and pushes, which may run beside a stage's passes."""


def trace_run(run: Run) -> dict[str, Any]:
    """The trace of all traced iterations of `run`; raises HydraConfigError where nothing can be
    drawn.
    """
    groups = [
        (_timelines_of(run, record.iteration), run.plans.get(record.iteration), record)
        for record in run.records
        if record.iteration in run.traces
    ]
    if not groups:
        raise HydraConfigError(
            f"run {run.name} has no traced iteration for --perfetto; set hydra.trace_every to 1 or more"
        )
    return describe_timelines(groups)


def _timelines_of(run: Run, iteration: int) -> list[Timeline]:
    """Measured and predicted timeline of a traced iteration, as far as the run has them."""
    measured, predicted = run.traces[iteration].timeline, run.predicted(iteration)
    return [measured] if predicted is None else [measured, align(predicted, measured)]


def write_trace(document: dict[str, Any], out: Path) -> None:
    """Write the trace file."""
    try:
        out.write_text(json.dumps(document, separators=(",", ":")), encoding="utf-8")
    except OSError as error:
        raise HydraConfigError(f"cannot write {out}: {error.strerror}") from error


def describe_timelines(
    groups: Iterable[tuple[list[Timeline], IterationPlan | None, IterationMetrics | None]],
) -> dict[str, Any]:
    """The trace of the timelines of iterations, one after the other, with what is known of each."""
    events: list[TraceEvent] = []
    threads: dict[tuple[int, int], str] = {(_ITERATIONS, _ITERATIONS * _THREADS): "iteration"}
    start_ms = 0.0
    for timelines, plan, record in groups:
        duration_ms = max(timeline.duration_ms for timeline in timelines)
        events.append(_iteration_event(timelines[0], record, start_ms, duration_ms))
        if record is not None:
            events.append(
                {
                    "name": "tokens per second",
                    "ph": "C",
                    "pid": _ITERATIONS,
                    "tid": _ITERATIONS * _THREADS,
                    "ts": _us(start_ms),
                    "args": {"tokens/s": record.tokens_per_s},
                }
            )
        for timeline in timelines:
            events += _timeline_events(timeline, plan, start_ms, threads)
        start_ms += 1.02 * duration_ms
    return {"traceEvents": [*_metadata(threads), *events], "displayTimeUnit": "ms"}


def _iteration_event(
    timeline: Timeline, record: IterationMetrics | None, start_ms: float, duration_ms: float
) -> TraceEvent:
    args: dict[str, Any] = {"strategy": timeline.strategy}
    if record is not None:
        args |= {
            "tokens": record.num_tokens,
            "loss": record.loss if record.loss == record.loss else None,
        }
    return {
        "name": f"iteration {timeline.iteration}: {timeline.strategy}",
        "cat": "iteration",
        "ph": "X",
        "pid": _ITERATIONS,
        "tid": _ITERATIONS * _THREADS,
        "ts": _us(start_ms),
        "dur": _us(duration_ms),
        "args": args,
    }


def _timeline_events(
    timeline: Timeline,
    plan: IterationPlan | None,
    start_ms: float,
    threads: dict[tuple[int, int], str],
) -> Iterator[TraceEvent]:
    process = _PREDICTED if timeline.source == "predicted" else _MEASURED
    for event in timeline.events:
        offset, name = _thread(timeline, event)
        thread = process * _THREADS + offset
        threads.setdefault((process, thread), name)
        yield {
            "name": f"{_NAMES[event.kind]}{event.micro_batch}"
            if event.kind in _NAMES
            else event.kind.value,
            "cat": event.kind.value,
            "ph": "X",
            "pid": process,
            "tid": thread,
            "ts": _us(start_ms + event.start_ms),
            "dur": _us(start_ms + event.end_ms) - _us(start_ms + event.start_ms),
            "args": _args(event, plan),
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
    if event.kind in (EventKind.P2P, EventKind.PULL, EventKind.PUSH):
        return _LINK + first, f"rank {first} link"
    return first, f"rank {first}"


def _args(event: Event, plan: IterationPlan | None) -> dict[str, Any]:
    args: dict[str, Any] = {"pipeline": event.pipeline, "stage": event.stage}
    if event.micro_batch >= 0:
        args["micro_batch"] = event.micro_batch
        if plan is not None:
            micro_batches = plan.pipelines[event.pipeline].micro_batches
            args["lengths"] = list(plan.micro_batch_lengths(micro_batches[event.micro_batch]))
    return args


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
