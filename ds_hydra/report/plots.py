"""Picture of a run as a file, by matplotlib: which ranks formed which pipelines, how long those
took, and the loss.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle
from matplotlib.ticker import MaxNLocator

from ds_hydra.errors import HydraConfigError
from ds_hydra.records.metrics import IterationMetrics
from ds_hydra.report.run_report import read_metrics
from ds_hydra.strategy import Scheme

_HUES = (
    "#4e79a7", "#f28e2b", "#59a14f", "#b07aa1", "#e15759", "#76b7b2", "#edc948", "#9c755f", "#ff9da7", "#a0cbe8",
    "#b6992d", "#79706e",
)  # fmt: skip
"""Colours of schemes that can be told apart; further ones are darker."""

Colors: TypeAlias = dict[Scheme, tuple[float, float, float]]

_IDLE = "#ececec"
_INK = "#2b2b2b"
_MAX_FRAMED_ITERATIONS = 250
"""Number of iterations above which a frame around every pipeline would hide its colour."""


def plot_run(run_dir: str | Path, out_png: str | Path) -> None:
    """Write a PNG of the run in `run_dir`; raises HydraConfigError where there is no readable
    run.
    """
    plot_records(read_metrics(run_dir), out_png)


def plot_records(records: Sequence[IterationMetrics], out_png: str | Path) -> None:
    """Write a PNG of these iterations; raises HydraConfigError where the file cannot be written."""
    figure = Figure(figsize=(13, 8.5), layout="constrained", dpi=130)
    FigureCanvasAgg(figure)
    strategy_axes, time_axes, loss_axes = figure.subplots(
        3, 1, sharex=True, gridspec_kw={"height_ratios": [1.15, 1.25, 0.8]}
    )
    colors = choose_colors(sorted({p.scheme for r in records for p in r.pipelines}))
    _draw_strategies(strategy_axes, records, colors)
    _draw_times(time_axes, records, colors)
    _draw_loss(loss_axes, records)
    _tidy(time_axes)
    _tidy(loss_axes)
    try:
        figure.savefig(out_png)
    except OSError as error:
        raise HydraConfigError(
            f"cannot write {out_png}: {error.strerror}; name a folder with --out"
        ) from error


def choose_colors(schemes: Sequence[Scheme]) -> Colors:
    """Return one colour per scheme."""
    colors = {}
    for index, scheme in enumerate(schemes):
        hue = np.array(to_rgb(_HUES[index % len(_HUES)]))
        red, green, blue = hue * 0.6 ** (index // len(_HUES))
        colors[scheme] = (float(red), float(green), float(blue))
    return colors


def _draw_strategies(axes: Axes, records: Sequence[IterationMetrics], colors: Colors) -> None:
    """Ranks (downwards) by iterations, coloured by the scheme of the rank's pipeline."""
    image = paint_ranks(records, colors)
    num_ranks = len(image)
    extent = (records[0].iteration - 0.5, records[-1].iteration + 0.5, num_ranks - 0.5, -0.5)
    axes.imshow(image, aspect="auto", interpolation="nearest", extent=extent)
    if len(records) <= _MAX_FRAMED_ITERATIONS:
        _frame_pipelines(axes, records, num_ranks)
    axes.yaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    axes.set_ylabel("rank")
    handles = [Patch(color=color, label=str(s)) for s, color in colors.items()]
    if any(len(_idle_ranks(record, num_ranks)) for record in records):
        handles.append(Patch(facecolor=_IDLE, edgecolor="#bbbbbb", hatch="////", label="idle"))
    axes.spines[:].set_visible(False)
    _head(axes, "Pipelines of each iteration", handles)


def paint_ranks(records: Sequence[IterationMetrics], colors: Colors) -> npt.NDArray[np.float64]:
    """Colours [num_ranks, last - first iteration + 1, RGB]; white where an iteration is missing."""
    num_ranks = 1 + max(rank for r in records for p in r.pipelines for rank in p.ranks)
    first, last = records[0].iteration, records[-1].iteration
    image = np.ones((num_ranks, last - first + 1, 3))
    for record in records:
        column = record.iteration - first
        image[:, column] = to_rgb(_IDLE)
        for pipeline in record.pipelines:
            image[list(pipeline.ranks), column] = colors[pipeline.scheme]
    return image


def _frame_pipelines(axes: Axes, records: Sequence[IterationMetrics], num_ranks: int) -> None:
    for record in records:
        busy: dict[str, Any] = {"edgecolor": "white", "linewidth": 1.2}
        frames = [(min(p.ranks), len(p.ranks), busy) for p in record.pipelines]
        idle: dict[str, Any] = {"edgecolor": "#bbbbbb", "linewidth": 0, "hatch": "////"}
        frames += [(rank, 1, idle) for rank in _idle_ranks(record, num_ranks)]
        for first, height, look in frames:
            corner = (record.iteration - 0.5, first - 0.5)
            axes.add_patch(Rectangle(corner, 1, height, fill=False, **look))


def _idle_ranks(record: IterationMetrics, num_ranks: int) -> list[int]:
    busy = {rank for pipeline in record.pipelines for rank in pipeline.ranks}
    return [rank for rank in range(num_ranks) if rank not in busy]


def _draw_times(axes: Axes, records: Sequence[IterationMetrics], colors: Colors) -> None:
    """A bar per pipeline, side by side in its iteration: the lower ones waited for the highest.

    A long run has a dot in place of each bar, which takes a hundredth of the time to draw.
    """
    is_long = len(records) > _MAX_FRAMED_ITERATIONS
    bars = defaultdict(list)
    for record in records:
        width = 0.86 / len(record.pipelines)
        for place, pipeline in enumerate(record.pipelines):
            left = record.iteration - 0.43 + place * width
            bars[pipeline.scheme].append((left, pipeline.measured_ms, width))
    for scheme, scheme_bars in bars.items():
        lefts, heights, widths = zip(*scheme_bars, strict=True)
        color = colors[scheme]
        if is_long:
            axes.plot(lefts, heights, ".", markersize=2, color=color)
        else:
            look: dict[str, Any] = {"color": color, "edgecolor": "white", "linewidth": 0.4}
            axes.bar(lefts, heights, widths, align="edge", **look)
    iterations = np.array([r.iteration for r in records])
    predicted = axes.hlines(
        [r.predicted_ms for r in records],
        iterations - 0.48,
        iterations + 0.48,
        colors=_INK,
        linewidth=1.6,
        label="predicted, slowest pipeline",
    )
    axes.set_ylabel("time, ms")
    _head(axes, "Measured time of each pipeline", [predicted])


def _draw_loss(axes: Axes, records: Sequence[IterationMetrics]) -> None:
    iterations = [r.iteration for r in records]
    losses = [r.loss for r in records]
    axes.plot(
        iterations, losses, color="#e15759", linewidth=1.6, marker="." if len(records) == 1 else ""
    )
    axes.set_ylabel("loss")
    axes.set_xlabel("iteration")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    _head(axes, "Loss, mean over label tokens")


def _head(axes: Axes, title: str, handles: Sequence[Artist] = ()) -> None:
    """Title to the left of the axes' upper edge, legend to its right."""
    axes.set_title(title, loc="left", fontsize=11, color=_INK)
    if handles:
        axes.legend(
            handles=handles,
            loc="lower right",
            bbox_to_anchor=(1, 1),
            ncols=len(handles),
            frameon=False,
        )


def _tidy(axes: Axes) -> None:
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(length=3)
    axes.grid(axis="y", color="#e6e6e6", linewidth=0.6)
    axes.set_axisbelow(True)
