"""Plots as inline SVG that follows the width of its page: marks in percent, text as HTML beside
them, and lines over the iterations of runs.

A plot has no size of its own. Horizontal positions are percentages of whatever width it gets,
heights are CSS pixels, so that text and lines keep their size from a telephone to a wide screen.
Colours are CSS classes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from math import ceil, floor, isfinite, log2, log10
from statistics import median

from markupsafe import Markup, escape

from ds_hydra.report.run_folder import Run

Point = tuple[float, float]

_GRID = 1000
"""Side of the square in which paths are drawn before they are stretched to the plot."""
_MAX_LINE_BINS = 600


@dataclass(frozen=True, slots=True)
class Axis:
    """A scale from `low` to `high` (logarithmic to base 2 if asked for) with its title, and its
    tick marks and their labels.
    """

    low: float
    high: float
    ticks: tuple[tuple[float, str], ...]
    title: str = ""
    is_log: bool = False

    def percent(self, value: float) -> float:
        """Place of `value` between `low` (0) and `high` (100), not beyond."""
        low, high = (log2(self.low), log2(self.high)) if self.is_log else (self.low, self.high)
        place = log2(max(value, self.low)) if self.is_log else value
        return round(min(100.0, max(0.0, 100 * (place - low) / (high - low))), 3)


def linear_axis(
    low: float,
    high: float,
    *,
    title: str = "",
    num_ticks: int = 5,
    label: Callable[[float], str] | None = None,
    integer: bool = False,
) -> Axis:
    """An axis from exactly `low` to `high` with ticks at round numbers."""
    if not high > low:
        low, high = low - 0.5, high + 0.5
    step = _round_step((high - low) / num_ticks, (1, 2, 5, 10) if integer else (1, 2, 2.5, 5, 10))
    step = max(1.0, step) if integer else step
    ticks = [
        index * step for index in range(ceil(low / step - 1e-9), floor(high / step + 1e-9) + 1)
    ]
    digits = max(0, -floor(log10(step)))
    make = label or (lambda value: f"{value:,.{digits}f}")
    return Axis(low, high, tuple((tick, make(tick)) for tick in ticks), title)


def value_axis(
    values: Iterable[float],
    *,
    title: str = "",
    from_zero: bool = False,
    label: Callable[[float], str] | None = None,
) -> Axis:
    """A vertical axis that holds all finite `values` with some air, from 0 if asked for."""
    finite = [value for value in values if isfinite(value)] or [0.0, 1.0]
    low, high = min(finite), max(finite)
    air = 0.06 * (high - low) or 0.05 * abs(high) or 0.5
    begin = min(0.0, low) if from_zero else low - air
    return linear_axis(begin, high + air, title=title, label=label)


def log_axis(low: float, high: float, *, title: str = "") -> Axis:
    """A logarithmic axis with ticks at powers of two, at most ten of them."""
    first, last = ceil(log2(low)), floor(log2(high))
    step = max(1, ceil((last - first + 1) / 10))
    ticks = tuple((float(2**power), f"{2**power:,}") for power in range(first, last + 1, step))
    return Axis(low, high, ticks, title, is_log=True)


def _round_step(raw: float, factors: Sequence[float]) -> float:
    """A factor times a power of ten, next to `raw`."""
    magnitude = 10.0 ** floor(log10(raw))
    return min((factor * magnitude for factor in factors), key=lambda step: abs(log2(step / raw)))


def plot(marks: Iterable[str], x: Axis, y: Axis, describe: str, *, height: int = 180) -> Markup:
    """A framed plot; `describe` is its text for screen readers."""
    grid = "".join(
        f'<line class="grid" x1="0" x2="100%" y1="{100 - y.percent(t):g}%" y2="{100 - y.percent(t):g}%"/>'
        for t, _ in y.ticks
    )
    y_ticks = "".join(
        f'<span style="top:{100 - y.percent(t):g}%">{escape(text)}</span>' for t, text in y.ticks
    )
    return Markup(
        f'<div class="plot" style="--h:{height}px"><div class="yl">{escape(y.title)}</div>'
        f'<div class="ys">{y_ticks}</div>'
        f'<svg class="canvas" role="img" aria-label="{escape(describe)}">{grid}{"".join(marks)}</svg>'
        f'<div class="xs">{tick_labels(x)}</div><div class="xl">{escape(x.title)}</div></div>'
    )


def tick_labels(axis: Axis) -> str:
    """Texts below a horizontal axis; every other one is left out where there is little room."""
    return "".join(
        f'<span class="t{index % 2}" style="left:{axis.percent(tick):g}%">{escape(text)}</span>'
        for index, (tick, text) in enumerate(axis.ticks)
    )


def line(points: Sequence[Point], x: Axis, y: Axis, css: str) -> str:
    """A line through `points`, interrupted where a value is not finite; single points become
    dots.
    """
    pieces: list[list[Point]] = [[]]
    for point in thin_line(points):
        if isfinite(point[1]):
            pieces[-1].append(point)
        elif pieces[-1]:
            pieces.append([])
    paths = "".join(_path(piece, x, y) for piece in pieces if len(piece) > 1)
    dots = "".join(dot(piece[0], x, y, css) for piece in pieces if len(piece) == 1)
    return (
        f'<svg class="stretch" viewBox="0 0 {_GRID} {_GRID}" preserveAspectRatio="none">'
        f'<path class="line {css}" d="{paths}"/></svg>{dots}'
    )


def _path(points: Sequence[Point], x: Axis, y: Axis) -> str:
    scale = _GRID / 100
    corners = (
        f"{x.percent(px) * scale:.4g},{_GRID - y.percent(py) * scale:.4g}" for px, py in points
    )
    return "M" + "L".join(corners)


def thin_line(points: Sequence[Point]) -> list[Point]:
    """Lowest and highest point of each of some hundred bins, in order; few points stay as they
    are.
    """
    size = ceil(len(points) / _MAX_LINE_BINS)
    if size <= 2:
        return list(points)
    thinned: list[Point] = []
    for start in range(0, len(points), size):
        piece = points[start : start + size]
        finite = [p for p in piece if isfinite(p[1])] or piece[:1]
        ends = {min(finite, key=lambda p: p[1]), max(finite, key=lambda p: p[1])}
        thinned += sorted(ends)
    return thinned


def dot(point: Point, x: Axis, y: Axis, css: str, *, marker: int = 0, tip: str = "") -> str:
    """A marker (circle, square, triangle, diamond) with a text that is shown when it is pointed
    at.
    """
    return (
        f'<use href="#m{marker % 4}" class="{css}" x="{x.percent(point[0]):g}%" '
        f'y="{100 - y.percent(point[1]):g}%"{_tip(tip)}/>'
    )


def bar(left: float, right: float, top: str, height: str, css: str, *, tip: str = "") -> str:
    """A rectangle between two percentages; `top` and `height` are SVG lengths."""
    width = max(0.0, right - left)
    return f'<rect class="{css}" x="{left:g}%" width="{width:.5g}%" y="{top}" height="{height}"{_tip(tip)}/>'


def vertical(percent: float, css: str) -> str:
    """A vertical line over the whole height."""
    return f'<line class="{css}" x1="{percent:g}%" x2="{percent:g}%" y1="0" y2="100%"/>'


def horizontal(percent: float, css: str) -> str:
    """A horizontal line over the whole width, `percent` above the lower edge."""
    return f'<line class="{css}" x1="0" x2="100%" y1="{100 - percent:g}%" y2="{100 - percent:g}%"/>'


def legend(entries: Iterable[tuple[str, str]]) -> Markup:
    """(HTML of the sign, text) pairs in a row that wraps."""
    items = "".join(f"<li>{sign}<span>{escape(text)}</span></li>" for sign, text in entries)
    return Markup(f'<ul class="legend">{items}</ul>')


def swatch(css: str) -> str:
    """A filled square as the sign of a legend entry."""
    return f'<svg class="swatch"><rect class="{css}" width="100%" height="100%"/></svg>'


def sign(css: str, marker: int) -> str:
    """A marker as the sign of a legend entry."""
    return f'<svg class="swatch"><use href="#m{marker % 4}" class="{css}" x="50%" y="50%"/></svg>'


def stroke(css: str) -> str:
    """A line as the sign of a legend entry."""
    return f'<svg class="swatch"><line class="{css}" x1="0" x2="100%" y1="50%" y2="50%"/></svg>'


def _tip(text: str) -> str:
    return f' data-tip="{escape(text)}"' if text else ""


def draw_lines(
    runs: Sequence[Run],
    series: Sequence[Sequence[Point]],
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
    y = value_axis(values, title=label, from_zero=from_zero)
    panels = []
    for points in series:
        marks = [line(points, x, y, css)]
        finite = [value for _, value in points if isfinite(value)]
        if with_median and finite:
            marks.append(horizontal(y.percent(median(finite)), "median"))
        gaps = len(points) - len(finite)
        panel = plot(marks, x, y, f"{label} over {len(points)} iterations", height=height)
        if gaps:
            panel += Markup(
                f'<p class="warn">{gaps} of {len(points)} iterations have a {label} that is not a number.</p>'
            )
        panels.append(panel if points else Markup(""))
    return panels


def iteration_axis(runs: Sequence[Run]) -> Axis:
    """Axis from the first iteration of any run to the last."""
    numbers = [r.iteration for run in runs for r in run.records]
    first, last = min(numbers) - 0.5, max(numbers) + 0.5
    return linear_axis(first, last, title="iteration", num_ticks=8, integer=True)


_REACH = 4
"""Neighbours on each side of which a running median is."""


def running_median(points: Sequence[Point]) -> list[Point]:
    """The median of each finite value and its neighbours."""
    known = [point for point in points if isfinite(point[1])]
    smooth = []
    for index, (place, _) in enumerate(known):
        near = known[max(0, index - _REACH) : index + _REACH + 1]
        smooth.append((place, median(value for _, value in near)))
    return smooth
