"""Timelines of iterations, predicted beside measured: Gantt charts, and traces for Perfetto and
chrome://tracing.

[Note: The trace-event format]
A JSON object with `traceEvents`; "X" is a complete event, "M" metadata, "C" a counter, times in
whole microseconds. One process per source, one thread per stage; traced iterations follow each
other without the ones between them.
"""

from __future__ import annotations

import itertools
import json
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from markupsafe import Markup, escape

from ds_hydra.errors import HydraConfigError
from ds_hydra.records.metrics import IterationMetrics
from ds_hydra.records.timeline import Event, EventKind, Timeline
from ds_hydra.report import svg
from ds_hydra.report.run_folder import Run
from ds_hydra.sampler.plan import IterationPlan
from ds_hydra.strategy.schemes.placement import stages_of

_MAX_ROWS = 64
_KINDS = {
    EventKind.FORWARD: ("fwd", "forward"),
    EventKind.BACKWARD: ("bwd", "backward"),
    EventKind.P2P: ("p2p", "transfer to the next stage"),
    EventKind.PULL: ("pull", "pull"),
    EventKind.PUSH: ("push", "push"),
    EventKind.STEP: ("step", "optimizer step"),
}
_PASSES = (EventKind.FORWARD, EventKind.BACKWARD)
_LEAST_LABEL_PERCENT = 2.6
"""Blocks narrower than this part of the plot carry no number."""


@dataclass(frozen=True, slots=True)
class _Row:
    pipeline: int
    stage: int
    name: str
    detail: str


def draw_gantt(timelines: Sequence[Timeline], plan: IterationPlan | None = None) -> Markup:
    """The charts of `timelines`, one below the other, from 0 to the end of the longest.

    `plan` adds to the texts what the micro-batches hold. Of a cluster with more than 64 stages only
    the slowest and the fastest pipelines are drawn, which is said below the chart.
    """
    longest = max((timeline.duration_ms for timeline in timelines), default=0.0) or 1.0
    axis = svg.linear_axis(0.0, longest, title="ms", num_ticks=8)
    charts = Markup("").join(_draw_one(timeline, axis, plan) for timeline in timelines)
    kinds = {event.kind for timeline in timelines for event in timeline.events}
    entries = [(svg.swatch(css), text) for kind, (css, text) in _KINDS.items() if kind in kinds]
    entries.append((svg.swatch("hatched"), "idle"))
    return charts + svg.legend(entries)


def align(predicted: Timeline, measured: Timeline) -> Timeline:
    """`predicted` without pull, moved to where the first measured forward begins; else as it is."""
    if any(event.kind is EventKind.PULL for event in predicted.events) or not measured.passes():
        return predicted
    return predicted.shift(-min(event.start_ms for event in measured.passes()))


def _draw_one(timeline: Timeline, axis: svg.Axis, plan: IterationPlan | None) -> Markup:
    rows, num_left_out = _choose_rows(timeline)
    height = 22 if len(rows) <= 16 else 16 if len(rows) <= 32 else 11
    places = {(row.pipeline, row.stage): index for index, row in enumerate(rows)}
    marks = [
        *(svg.vertical(axis.percent(tick), "grid") for tick, _ in axis.ticks),
        *_idle(timeline, places, height, axis),
    ]
    for index, (above, below) in enumerate(itertools.pairwise(rows), start=1):
        if above.pipeline != below.pipeline:
            marks.append(
                f'<line class="between" x1="0" x2="100%" y1="{index * height}" y2="{index * height}"/>'
            )
    beside = _beside_passes(timeline)
    # Narrow blocks over wide ones
    for event in sorted(timeline.events, key=lambda event: event in beside):
        row = places.get((event.pipeline, event.stage))
        if row is not None:
            marks += _draw_event(event, row, height, axis, plan, is_narrow=event in beside)
    names = "".join(
        f'<div><b>{escape(row.name)}</b><span class="more"> {escape(row.detail)}</span></div>'
        for row in rows
    )
    left_out = (
        f'<p class="hint">{num_left_out} more pipelines are not drawn; these are the slowest and the fastest.</p>'
        if num_left_out
        else ""
    )
    title = f"{timeline.source}: {timeline.duration_ms:,.0f} ms"
    return Markup(
        f'<h4>{escape(title)}</h4><div class="gantt" style="--row:{height}px"><div class="names">{names}</div>'
        f'<svg class="rows" style="height:{height * len(rows)}px" role="img" '
        f'aria-label="{escape(title)}, {len(rows)} stages">{"".join(marks)}</svg>'
        f'<div class="xs">{svg.tick_labels(axis)}</div><div class="xl">{axis.title}</div></div>{left_out}'
    )


def _choose_rows(timeline: Timeline) -> tuple[list[_Row], int]:
    """Rows of all pipelines, or of the slowest and the fastest ones; and how many pipelines are
    left out.
    """
    ends = [0.0] * len(timeline.pipelines)
    for event in timeline.passes():
        ends[event.pipeline] = max(ends[event.pipeline], event.end_ms)
    chosen = list(range(len(ends)))
    if sum(track.scheme.pp for track in timeline.pipelines) > _MAX_ROWS:
        by_end = sorted(chosen, key=lambda index: -ends[index])
        alternating = [i for pair in zip(by_end, reversed(by_end)) for i in pair]
        chosen, room = [], _MAX_ROWS
        for index in dict.fromkeys(alternating):
            room -= timeline.pipelines[index].scheme.pp
            if room < 0 and chosen:
                break
            chosen.append(index)
        chosen.sort()
    rows = [row for index in chosen for row in _rows_of(timeline, index)]
    if any(event.pipeline < 0 for event in timeline.events):
        rows.append(_Row(-1, 0, "idle", "ranks in no pipeline"))
    return rows, len(ends) - len(chosen)


def _rows_of(timeline: Timeline, index: int) -> Iterator[_Row]:
    track = timeline.pipelines[index]
    for stage, (first, *others) in enumerate(stages_of(track.scheme, track.ranks)):
        ranks = f"ranks {first}-{others[-1]}" if others else f"rank {first}"
        name = f"{track.scheme}" if track.scheme.pp == 1 else f"{track.scheme} s{stage}"
        yield _Row(index, stage, name, ranks)


def _idle(
    timeline: Timeline, places: dict[tuple[int, int], int], height: int, axis: svg.Axis
) -> Iterator[str]:
    """Hatching from the first forward to the last backward of any pipeline; blocks are drawn over
    it.
    """
    passes = timeline.passes()
    if not passes:
        return
    start = axis.percent(min(event.start_ms for event in passes))
    end = axis.percent(max(event.end_ms for event in passes))
    for row in places.values():
        yield svg.bar(start, end, f"{row * height + 1}", f"{height - 2}", "hatched")


def _beside_passes(timeline: Timeline) -> set[Event]:
    """Events during which the stage may compute: P2P, and pulls and pushes that overlap a forward
    or backward.
    """
    passes: defaultdict[tuple[int, int], list[Event]] = defaultdict(list)
    for event in timeline.passes():
        passes[event.pipeline, event.stage].append(event)
    return {
        event
        for event in timeline.events
        if event.kind is EventKind.P2P
        or (
            event.kind in (EventKind.PULL, EventKind.PUSH)
            and any(
                other.start_ms < event.end_ms and event.start_ms < other.end_ms
                for other in passes[event.pipeline, event.stage]
            )
        )
    }


def _draw_event(
    event: Event,
    row: int,
    height: int,
    axis: svg.Axis,
    plan: IterationPlan | None,
    *,
    is_narrow: bool,
) -> Iterator[str]:
    css, text = _KINDS[event.kind]
    left, right = axis.percent(event.start_ms), axis.percent(event.end_ms)
    tip = _describe(event, text, plan)
    if is_narrow:
        yield svg.bar(left, right, f"{(row + 1) * height - 5}", "4", f"{css} narrow", tip=tip)
        return
    top = row * height + 1
    yield svg.bar(left, right, f"{top}", f"{height - 2}", f"{css} block", tip=tip)
    if event.kind in _PASSES and height > 12 and right - left >= _LEAST_LABEL_PERCENT:
        roomy = "" if right - left >= 3 * _LEAST_LABEL_PERCENT else " tight"
        yield (
            f'<text class="on-{css}{roomy}" x="{(left + right) / 2:.5g}%" y="{top + height / 2 - 1:g}">'
            f"{event.micro_batch}</text>"
        )


def _describe(event: Event, text: str, plan: IterationPlan | None) -> str:
    words = f"{event.start_ms:,.1f} to {event.end_ms:,.1f} ms ({event.duration_ms:,.1f} ms)"
    if event.micro_batch < 0:
        return f"{text}: {words}"
    words = f"{text} of micro-batch {event.micro_batch}: {words}"
    if plan is None or event.pipeline >= len(plan.pipelines):
        return words
    rows = plan.pipelines[event.pipeline].micro_batches
    if event.micro_batch >= len(rows):
        return words
    lengths = plan.micro_batch_lengths(rows[event.micro_batch])
    return f"{words}; {sum(lengths):,} tokens in {len(lengths)} sequences, longest {max(lengths):,}"


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


def timelines_of(run: Run, iteration: int) -> list[Timeline]:
    """Predicted and measured timeline of an iteration, as far as the run has them."""
    trace, predicted = run.traces.get(iteration), run.predicted(iteration)
    if trace is None:
        return [] if predicted is None else [predicted]
    if predicted is None:
        return [trace.timeline]
    return [align(predicted, trace.timeline), trace.timeline]


def trace_run(run: Run) -> dict[str, Any]:
    """The trace of all traced iterations of `run`; raises HydraConfigError where nothing can be
    drawn.
    """
    groups = [
        (timelines_of(run, record.iteration)[::-1], run.plans.get(record.iteration), record)
        for record in run.records
        if record.iteration in run.traces
    ]
    if not groups:
        raise HydraConfigError(
            f"run {run.name} has no traced iteration for --perfetto; set hydra.trace_every to 1 or more"
        )
    return _document(groups)


def trace_timelines(timelines: Iterable[Timeline]) -> dict[str, Any]:
    """The trace of simulated (or any) timelines; those of one iteration are shown at the same
    time.
    """
    groups: dict[int, list[Timeline]] = {}
    for timeline in timelines:
        groups.setdefault(timeline.iteration, []).append(timeline)
    return _document([(group, None, None) for _, group in sorted(groups.items())])


def write_trace(document: dict[str, Any], out: Path) -> None:
    """Write the trace file."""
    try:
        out.write_text(json.dumps(document, separators=(",", ":")), encoding="utf-8")
    except OSError as error:
        raise HydraConfigError(f"cannot write {out}: {error.strerror}") from error


def _document(
    groups: Iterable[tuple[list[Timeline], IterationPlan | None, IterationMetrics | None]],
) -> dict[str, Any]:
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
