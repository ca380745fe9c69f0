"""The picture of a what-if sweep: tokens per second and time of an iteration over the value that
was varied.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import cycle
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from ds_hydra.lab.simulator.comparison import Comparison
from ds_hydra.lab.simulator.comparison import Figure as Mean
from ds_hydra.lab.simulator.sweep import swept_axis
from ds_hydra.lab.simulator.systems import LABELS

_AXIS_TITLES = {
    "num_devices": "devices",
    "context_length": "context, tokens",
    "tokens_per_iteration": "tokens per iteration",
}
_STYLES = ("o-", "s--", "^:", "D-.", "v-", "P--", "X:", "<-.", ">-", "*--", "p:", "h-.")


def plot_sweep(comparisons: Sequence[Comparison], out_png: str | Path) -> None:
    """Write a PNG with one line for each system; bars are standard errors over mini-batches.

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
