"""The picture of a searched plan: one row for each stage, one box for each run of layers with one
strategy.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator

from ds_hydra.lab.search.galvatron import SearchPlan, run_lengths
from ds_hydra.lab.search.space import LayerStrategy

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
