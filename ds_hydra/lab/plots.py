"""Pictures of a searched plan (one row for each stage, one box for each run of layers with one
strategy) and of a what-if sweep (tokens per second and time of an iteration over the value that was
varied).
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import cycle
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator

from ds_hydra.lab.search.galvatron import SearchPlan, run_lengths
from ds_hydra.lab.search.layers import LayerStrategy
from ds_hydra.lab.simulator.results import Comparison
from ds_hydra.lab.simulator.results import Figure as Mean
from ds_hydra.lab.simulator.sweep import swept_axis
from ds_hydra.lab.simulator.systems import LABELS

_COLORS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#F0E442", "#999999")
_LABEL_BOX = {"boxstyle": "round,pad=0.15", "facecolor": "white", "edgecolor": "none", "alpha": 0.8}
_LABEL: dict[str, Any] = {
    "ha": "center", "va": "center", "fontsize": 8, "color": "black", "bbox": _LABEL_BOX,
}  # fmt: skip


def plot_search(plan: SearchPlan, out_png: str | Path) -> None:
    """Write a PNG. Width is the number of layers, colour the layout, hatching checkpointing."""
    names = sorted({str(strategy) for stage in plan.stages for strategy in stage.strategies})
    plain = sorted({name.removesuffix("-c") for name in names})
    look: dict[str, dict[str, Any]] = {
        name: {
            "facecolor": _COLORS[plain.index(name.removesuffix("-c")) % len(_COLORS)],
            "hatch": "///" if name.endswith("-c") else None,
            "edgecolor": "white",
        }
        for name in names
    }
    figure = Figure(figsize=(10, 1.9 + 0.55 * plan.pp), layout="constrained", dpi=130)
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    for row, stage in enumerate(plan.stages):
        begin = 0
        for name, count in run_lengths(stage.strategies):
            axes.barh(row, count, left=begin, height=0.7, **look[name])
            if count > 1:
                axes.text(begin + count / 2, row, f"{count}", **_LABEL)
            begin += count
        note = f" {stage.compute_ms:.1f} ms, {stage.peak_mb / 1024:.1f} GB"
        axes.text(begin, row, note, va="center", fontsize=9)
    axes.set_xlim(0, 1.22 * max(plan.partition))
    axes.set_yticks(range(plan.pp), [f"stage {row}" for row in range(plan.pp)])
    axes.invert_yaxis()
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_xlabel("layers of the stage")
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_title(
        f"batch {plan.batch_size}, {plan.num_micro_batches} micro-batches: {plan.samples_per_s:.2f} samples/s",
        loc="left",
    )
    handles = [Patch(label=f"{name}   {_words(name)}", **look[name]) for name in names]
    figure.legend(handles=handles, loc="outside lower left", ncols=2, frameon=False, fontsize=8)
    figure.savefig(str(out_png))


def _words(name: str) -> str:
    strategy = LayerStrategy.parse(name)
    parts = [f"TP {strategy.tp}"] if strategy.tp > 1 else []
    if strategy.dp > 1:
        parts.append(f"{'SDP' if strategy.sdp > 1 else 'DP'} {strategy.dp}")
    if strategy.checkpoints:
        parts.append("checkpointed")
    return ", ".join(parts) or "one device"


_AXIS_TITLES = {
    "num_devices": "devices",
    "context_length": "context, tokens",
    "tokens_per_iteration": "tokens per iteration",
}
_STYLES = ("o-", "s--", "^:", "D-.", "v-", "P--", "X:", "<-.", ">-", "*--", "p:", "h-.")


def plot_sweep(comparisons: Sequence[Comparison], out_png: str | Path) -> None:
    """Write a PNG with one line for each system; bars are standard errors over global batches.

    Points that differ in more than one value are drawn at the value that was varied most often.
    """
    field = swept_axis(comparisons)
    ordered = sorted(comparisons, key=lambda c: getattr(c.workload, field))
    figure = Figure(figsize=(10, 4.6), layout="constrained", dpi=130)
    FigureCanvasAgg(figure)
    speed, duration = figure.subplots(1, 2)
    names = [name for name in LABELS if any(c.get(name) for c in ordered)]
    for name, style in zip(names, cycle(_STYLES)):
        points = [
            (getattr(c.workload, field), c, r) for c in ordered if (r := c.get(name)) is not None
        ]
        x = [value for value, _, _ in points]
        speed.plot(x, [c.tokens_per_s(r) for _, c, r in points], style, label=LABELS[name])
        times = [Mean.of(r.iteration_ms / 1e3) for _, _, r in points]
        duration.errorbar(
            x, [t.mean for t in times], [t.standard_error for t in times], fmt=style, capsize=3,
            label=LABELS[name],
        )  # fmt: skip
    # Before the limits are set: a logarithmic axis does not begin at 0
    speed.set_yscale("log", base=2)
    speed.yaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    _finish(speed, field, "tokens per second")
    _finish(duration, field, "iteration, s")
    workload = ordered[0].workload
    figure.suptitle(f"{workload.profile.name}, {workload.histogram.name}: simulated")
    figure.savefig(str(out_png))


def _finish(axes: Axes, field: str, title: str) -> None:
    axes.set_xscale("log", base=2)
    axes.set_xlabel(_AXIS_TITLES[field])
    axes.set_ylabel(title)
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    axes.grid(alpha=0.3)
    axes.legend()
    axes.set_ylim(bottom=0 if axes.get_yscale() == "linear" else None)
