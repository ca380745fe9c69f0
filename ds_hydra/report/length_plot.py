"""The picture of a length histogram: how many sequences, and how many tokens, there are of each
length.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from ds_hydra.strategy.proposal.histogram import LengthHistogram

_BINS_PER_OCTAVE = 4


def plot_lengths(histogram: LengthHistogram, out_png: str | Path) -> None:
    """Write a PNG: share of sequences and share of tokens over the length on a logarithmic axis."""
    lengths, counts = histogram.lengths_tokens, histogram.counts
    num_bins = (
        max(1, int(_BINS_PER_OCTAVE * np.log2(lengths[-1] / lengths[0]))) if lengths.size > 1 else 1
    )
    edges = np.geomspace(lengths[0], lengths[-1] + 1, num_bins + 1)
    figure = Figure(figsize=(8, 4.5), layout="constrained", dpi=130)
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    for weights, label in ((counts, "sequences"), (counts * lengths, "tokens")):
        share, _ = np.histogram(lengths, bins=edges, weights=weights / weights.sum())
        axes.stairs(100 * share, edges, fill=True, alpha=0.55, label=label)
    axes.set_xscale("log", base=2)
    axes.set_xlabel("length, tokens")
    axes.set_ylabel("share, %")
    axes.set_title(
        f"{histogram.name}: {histogram.num_sequences:,} sequences, {histogram.num_tokens:,} tokens"
    )
    axes.legend()
    figure.savefig(str(out_png))
