"""How tokens spread over the experts of each layer, and how that went over a run."""

from __future__ import annotations

from collections.abc import Sequence
from math import isnan

from markupsafe import Markup

from ds_hydra.report import svg
from ds_hydra.report.lines import draw_lines
from ds_hydra.report.run_folder import Run

_FULLEST = 3.0
"""Tokens over the mean from which a cell's colour is no fuller."""
_MAX_TIPS = 4096


def draw_experts(runs: Sequence[Run]) -> list[Markup]:
    """A map of layers and experts, and the imbalance over iterations, for each run; nothing where
    none traced experts.
    """
    if not any(trace.expert_tokens for run in runs for trace in run.traces.values()):
        return []
    imbalances = [
        [(r.iteration, r.expert_imbalance) for r in run.records if not isnan(r.expert_imbalance)]
        for run in runs
    ]
    lines = draw_lines(runs, imbalances, "most chosen / mean - 1", "f0", from_zero=True, height=140)
    return [_draw_map(run) + line for run, line in zip(runs, lines, strict=True)]


def _draw_map(run: Run) -> Markup:
    traced = [i for i, trace in run.traces.items() if trace.expert_tokens]
    if not traced:
        return Markup('<p class="none">No experts were traced.</p>')
    tokens = run.traces[max(traced)].expert_tokens
    num_experts = max(map(len, tokens.values()))
    x = svg.linear_axis(-0.5, num_experts - 0.5, title="expert", num_ticks=8, integer=True)
    first, last = min(tokens) - 0.5, max(tokens) + 0.5
    y = svg.linear_axis(first, last, title="layer", num_ticks=6, integer=True)
    with_tips = num_experts * len(tokens) <= _MAX_TIPS
    marks = [svg.bar(0.0, 100.0, "0", "100%", "ground")]  # no lines of the grid behind cells
    for layer, counts in tokens.items():
        top, bottom = 100 - y.percent(layer + 0.5), 100 - y.percent(layer - 0.5)
        mean = sum(counts) / len(counts)
        for expert, count in enumerate(counts):
            share = count / mean if mean else 0.0
            cell = svg.bar(
                x.percent(expert - 0.5),
                x.percent(expert + 0.5),
                f"{top:g}%",
                f"{bottom - top:g}%",
                "cell",
                tip=f"layer {layer}, expert {expert}: {count:,} tokens, {share:.2f} of the mean"
                * with_tips,
            )
            shade = min(1.0, share / _FULLEST)
            marks.append(cell.replace("<rect ", f'<rect fill-opacity="{shade:.2f}" ', 1))
    height = min(420, max(90, 16 * (max(tokens) - min(tokens) + 1)))
    describe = f"tokens of each expert in iteration {max(traced)}"
    plot = svg.plot(marks, x, y, describe, height=height)
    return plot + Markup(
        '<p class="none">Iteration {}: no colour is no token, full colour {:g} times the mean or more.</p>'
    ).format(max(traced), _FULLEST)
