"""Lines over the iterations of runs, on axes that the runs share."""

from __future__ import annotations

from collections.abc import Sequence
from math import isfinite
from statistics import median

from markupsafe import Markup

from ds_hydra.report import svg
from ds_hydra.report.run_folder import Run


def draw_lines(
    runs: Sequence[Run],
    series: Sequence[Sequence[svg.Point]],
    label: str,
    css: str,
    *,
    from_zero: bool = False,
    with_median: bool = False,
    height: int = 180,
) -> list[Markup]:
    """A panel with one line for each run; nothing for a run without points."""
    x = iteration_axis(runs)
    values = (value for points in series for _, value in points)
    y = svg.value_axis(values, title=label, from_zero=from_zero)
    panels = []
    for points in series:
        marks = [svg.line(points, x, y, css)]
        finite = [value for _, value in points if isfinite(value)]
        if with_median and finite:
            marks.append(svg.horizontal(y.percent(median(finite)), "median"))
        gaps = len(points) - len(finite)
        panel = svg.plot(marks, x, y, f"{label} over {len(points)} iterations", height=height)
        if gaps:
            panel += Markup(
                f'<p class="warn">{gaps} of {len(points)} iterations have a {label} that is not a number.</p>'
            )
        panels.append(panel if points else Markup(""))
    return panels


def iteration_axis(runs: Sequence[Run]) -> svg.Axis:
    """From the first iteration of any run to the last."""
    numbers = [r.iteration for run in runs for r in run.records]
    first, last = min(numbers) - 0.5, max(numbers) + 0.5
    return svg.linear_axis(first, last, title="iteration", num_ticks=8, integer=True)


_REACH = 4
"""Neighbours on each side of which a running median is."""


def running_median(points: Sequence[svg.Point]) -> list[svg.Point]:
    """The median of each finite value and its neighbours."""
    known = [point for point in points if isfinite(point[1])]
    smooth = []
    for index, (place, _) in enumerate(known):
        near = known[max(0, index - _REACH) : index + _REACH + 1]
        smooth.append((place, median(value for _, value in near)))
    return smooth
