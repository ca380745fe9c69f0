"""Gantt charts of one iteration: a row per stage, predicted above measured, on one axis of time."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from markupsafe import Markup, escape

from ds_hydra.records.timeline import Event, EventKind, Timeline
from ds_hydra.report import svg
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
