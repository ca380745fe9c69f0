"""The plots of a run. Each function draws one panel per run, on axes that the runs share."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import replace
from math import ceil, isnan
from typing import TypeVar

import numpy as np
from markupsafe import Markup

from ds_hydra.report import svg
from ds_hydra.report.run_folder import RankMemory, Run, rank_memory
from ds_hydra.report.run_report import divide_time
from ds_hydra.report.strategies import NUM_COLORS
from ds_hydra.report.svg import draw_lines, iteration_axis, running_median
from ds_hydra.strategy import Scheme

_Item = TypeVar("_Item")

_MAX_DOTS = 1500
_MAX_BARS = 256
_BINS_PER_OCTAVE = 4


def draw_losses(runs: Sequence[Run]) -> list[Markup]:
    """Loss over iterations."""
    return draw_lines(
        runs, [[(r.iteration, r.loss) for r in run.records] for run in runs], "loss", "f0"
    )


def draw_throughputs(runs: Sequence[Run]) -> list[Markup]:
    """Useful tokens per second over iterations, with the median."""
    series = [[(r.iteration, r.tokens_per_s) for r in run.records] for run in runs]
    panels = draw_lines(runs, series, "tokens/s", "f2", from_zero=True, with_median=True)
    entries = [(svg.stroke("line f2"), "each iteration"), (svg.stroke("median"), "median")]
    return [panel + svg.legend(entries) for panel in panels]


def draw_scatter(runs: Sequence[Run]) -> list[Markup]:
    """Measured over predicted time, a marker per pipeline and iteration."""
    schemes = _schemes(runs)
    pairs = [
        (p.predicted_ms, p.measured_ms) for run in runs for r in run.records for p in r.pipelines
    ]
    highest = 1.06 * max((max(pair) for pair in pairs), default=1.0) or 1.0
    x = svg.linear_axis(0.0, highest, title="predicted, ms", num_ticks=6)
    y = svg.linear_axis(0.0, highest, title="measured, ms", num_ticks=4)
    describe = "measured over predicted time of each pipeline"
    panels = []
    for run in runs:
        marks = [svg.line([(0.0, 0.0), (highest, highest)], x, y, "ideal")]
        for record, pipeline in _thin(
            [(r, p) for r in run.records for p in r.pipelines if p.measured_ms > 0]
        ):
            tip = (
                f"iteration {record.iteration}, {pipeline.scheme}: predicted {pipeline.predicted_ms:,.0f} ms, "
                f"measured {pipeline.measured_ms:,.0f} ms"
            )
            index = schemes.index(pipeline.scheme)
            point = (pipeline.predicted_ms, pipeline.measured_ms)
            marks.append(svg.dot(point, x, y, _dot_class(index), marker=index, tip=tip))
        legend = _scheme_legend(schemes, (svg.stroke("line ideal"), "as predicted"))
        panels.append(svg.plot(marks, x, y, describe, height=260) + legend)
    return panels


def draw_errors(runs: Sequence[Run]) -> list[Markup]:
    """Error of the prediction of each pipeline over iterations, with running medians: as planned,
    and where plans were corrected by the profile alone.
    """
    schemes = _schemes(runs)
    errors = [
        [
            (record, pipeline, 100 * (pipeline.measured_ms / pipeline.predicted_ms - 1))
            for record in run.records
            for pipeline in record.pipelines
            if pipeline.predicted_ms > 0 and pipeline.measured_ms > 0
        ]
        for run in runs
    ]
    before = [_trend(run, "profile_error") for run in runs]
    everything = sorted(
        [*(e for points in errors for *_, e in points), *(e for line in before for _, e in line)]
    )
    # A few wild iterations must not flatten all others: they are drawn at the edge, with their
    # value as text.
    kept = everything[len(everything) // 50 : len(everything) - len(everything) // 50] or everything
    x = iteration_axis(runs)
    y = svg.value_axis(
        [*kept, 0.0],
        title="measured over predicted, minus 1",
        label=lambda value: f"{value:+.0f}%" if value else "0%",
    )
    describe = "error of the predicted time of each pipeline over iterations"
    panels = []
    for run, points, uncorrected in zip(runs, errors, before, strict=True):
        marks = [svg.horizontal(y.percent(0.0), "zero")]
        for record, pipeline, error in _thin(points):
            tip = f"iteration {record.iteration}, {pipeline.scheme}: {error:+.1f}%"
            index = schemes.index(pipeline.scheme)
            point = (record.iteration, error)
            marks.append(svg.dot(point, x, y, _dot_class(index), marker=index, tip=tip))
        marks.append(svg.line(_trend(run, "prediction_error"), x, y, "trend"))
        entries = [(svg.stroke("line trend"), "running median of the slowest pipeline")]
        if uncorrected:
            marks.append(svg.line(uncorrected, x, y, "before"))
            entries.append((svg.stroke("line before"), "by the profile alone, not corrected"))
        legend = _scheme_legend(schemes, *entries)
        panels.append(svg.plot(marks, x, y, describe, height=260) + legend)
    return panels


def _trend(run: Run, name: str) -> list[svg.Point]:
    """Running median of an error, in percent."""
    return running_median([(r.iteration, 100 * getattr(r, name)) for r in run.records])


def _schemes(runs: Sequence[Run]) -> list[Scheme]:
    return sorted({p.scheme for run in runs for record in run.records for p in record.pipelines})


def _dot_class(index: int) -> str:
    return f"f{index % NUM_COLORS} dot"


def _scheme_legend(schemes: Sequence[Scheme], *extra: tuple[str, str]) -> Markup:
    entries = [
        (svg.sign(_dot_class(index), index), str(scheme)) for index, scheme in enumerate(schemes)
    ]
    return svg.legend([*entries, *extra])


def _thin(items: Sequence[_Item]) -> Sequence[_Item]:
    """At most some thousand of `items`, evenly spread."""
    return items[:: ceil(len(items) / _MAX_DOTS) or 1] if items else items


_PARTS = {
    "compute": ("f0", "forward and backward"),
    "idle": ("hatched", "idle: bubbles, unequal pipelines, ranks without work"),
    "plan_wait": ("f6", "waiting for the plan"),
    "pull": ("f2", "waiting for the pull"),
    "push": ("f5", "waiting for the push"),
    "step": ("step", "optimizer step"),
    "other": ("rest", "other: data, agreement between ranks, logging"),
}


def draw_shares(runs: Sequence[Run]) -> list[Markup]:
    """One bar: what the ranks did, on average, in all iterations together."""
    panels = []
    for run in runs:
        shares = divide_time(run.records)
        times = {name: getattr(shares, name) for name in _PARTS}
        total = sum(times.values()) or 1.0
        cells, entries, left = [], [], 0.0
        for name, (css, text) in _PARTS.items():
            share = 100 * times[name] / total
            words = f"{text}: {share:.1f}%"
            if name == "idle" and all(isnan(r.bubble) for r in run.records):
                continue
            cells.append(svg.bar(left, left + share, "0", "100%", css, tip=words))
            entries.append((svg.swatch(css), words))
            left += share
        panels.append(
            Markup(
                f'<svg class="strip" role="img" aria-label="shares of time">{"".join(cells)}</svg>'
            )
            + svg.legend(entries)
        )
    return panels


def draw_lengths(runs: Sequence[Run]) -> list[Markup]:
    """Share of sequences and of tokens by length, with MaxLen of every scheme above."""
    all_lengths = [length for run in runs for length in run.lengths()]
    if not all_lengths:
        return [Markup('<p class="none">No plans, no lengths.</p>') for _ in runs]
    max_lens = [size for run in runs for size in run.max_len().values() if size > 0]
    low = max(1, min(all_lengths))
    high = max(all_lengths) + 1.0
    shown = [size for size in max_lens if size <= 4 * high]
    high = max([high, *(1.05 * size for size in shown)])
    high = max(high, 2.0 * low)
    x = svg.log_axis(low, high, title="length, tokens")
    num_bins = max(1, int(_BINS_PER_OCTAVE * np.log2(high / low)))
    edges = np.geomspace(low, high, num_bins + 1)
    shares = [_histogram(run.lengths(), edges) for run in runs]
    y = svg.value_axis(
        (share for pair in shares for column in pair for share in column),
        title="share",
        from_zero=True,
        label=lambda value: f"{value:.0f}%",
    )
    return [_draw_histogram(run, pair, edges, x, y) for run, pair in zip(runs, shares, strict=True)]


def _histogram(lengths: Sequence[int], edges: np.ndarray) -> tuple[list[float], list[float]]:
    """Percent of sequences and percent of tokens in each bin."""
    values = np.array(lengths, dtype=np.float64)
    if not values.size:
        return [], []
    sequences, _ = np.histogram(values, bins=edges)
    tokens, _ = np.histogram(values, bins=edges, weights=values)
    return (100 * sequences / values.size).tolist(), (100 * tokens / values.sum()).tolist()


def _draw_histogram(
    run: Run, shares: tuple[list[float], list[float]], edges: np.ndarray, x: svg.Axis, y: svg.Axis
) -> Markup:
    marks = []
    for column, (first, last) in enumerate(itertools.pairwise(edges)):
        left, right = x.percent(first), x.percent(last)
        middle = (left + right) / 2
        for share, css, sides, what in (
            (shares[0], "f0", (left, middle), "sequences"),
            (shares[1], "f1", (middle, right), "tokens"),
        ):
            if share and share[column] > 0:
                height = y.percent(share[column]) - y.percent(0.0)
                tip = (
                    f"{ceil(first):,} to {ceil(last) - 1:,} tokens: {share[column]:.1f}% of {what}"
                )
                marks.append(
                    svg.bar(
                        *sides, f"{100 - y.percent(0.0) - height:g}%", f"{height:g}%", css, tip=tip
                    )
                )
    limits = [(scheme, size) for scheme, size in run.max_len().items() if size > 0]
    marks += [svg.vertical(x.percent(size), "limit") for _, size in limits if size <= x.high]
    entries = [
        (svg.swatch("f0"), "share of sequences"),
        (svg.swatch("f1"), "share of tokens"),
    ]
    if limits:
        entries.append((svg.stroke("limit"), "MaxLen: the longest packed micro-batch of a scheme"))
    flags = "".join(_flag(scheme, size, x) for scheme, size in limits)
    return (
        Markup(f'<div class="flags">{flags}</div>')
        + svg.plot(marks, x, y, "histogram of sequence lengths", height=200)
        + svg.legend(entries)
    )


def _flag(scheme: Scheme, size: int, x: svg.Axis) -> str:
    """A line of its own for each scheme, at the place of its MaxLen, so that no two texts meet."""
    place = x.percent(size)
    text = f"{scheme} {size:,}" if size <= x.high else f"{scheme} {size:,} \N{RIGHTWARDS ARROW}"
    side = f"right:{100 - place:g}%" if place > 50 else f"left:{place:g}%"
    edge = "end" if place > 50 else "start"
    return f'<div><span class="{edge}" style="{side}">{Markup.escape(text)}</span></div>'


def draw_memory(runs: Sequence[Run]) -> list[Markup]:
    """Peak memory of each rank (bars), what the model expects of it (ticks), and the limit."""
    on_cpu = [run.facts.device == "cpu" for run in runs]
    memories = [
        [replace(m, model_bytes=None) for m in rank_memory(run)] if cpu else rank_memory(run)
        for run, cpu in zip(runs, on_cpu, strict=True)
    ]
    limits = [
        None if run.profile is None or cpu else run.profile.memory.memory_bytes
        for run, cpu in zip(runs, on_cpu, strict=True)
    ]
    sizes = [
        value
        for ranks in memories
        for m in ranks
        for value in (m.measured_bytes, m.model_bytes)
        if value
    ]
    if not sizes:
        return [Markup('<p class="none">Neither traces nor a memory model.</p>') for _ in runs]
    near = [limit for limit in limits if limit and limit < 3 * max(sizes)]
    unit, name = _byte_unit(max(sizes))
    y = svg.value_axis([0.0, *(n / unit for n in [*sizes, *near])], title=name, from_zero=True)
    num_ranks = max(len(ranks) for ranks in memories)
    x = svg.linear_axis(-0.5, num_ranks - 0.5, title="rank", num_ticks=8, integer=True)
    panels = []
    for ranks, limit, cpu in zip(memories, limits, on_cpu, strict=True):
        size = ceil(len(ranks) / _MAX_BARS)
        marks: list[str] = []
        for start in range(0, len(ranks), size):
            marks += _memory_marks(ranks[start : start + size], x, y, unit, name)
        entries = [(svg.swatch("f0"), "measured peak")]
        entries += [] if cpu else [(svg.stroke("model"), "memory model (App. B.1)")]
        if limit and limit in near:
            marks.insert(0, svg.horizontal(y.percent(limit / unit), "limit"))
            entries.append((svg.stroke("limit"), f"limit {limit / unit:,.2f} {name}"))
        plot = svg.plot(marks, x, y, "peak memory of each rank", height=200)
        panels.append(plot + svg.legend(entries) + (_CPU_MEMORY if cpu else Markup("")))
    return panels


_CPU_MEMORY = Markup(
    '<p class="none">On CPU ranks a process grows by more than its tensors (libraries, freed memory that it keeps), so '
    "neither the memory model, which counts tensors, nor its limit is drawn beside it.</p>"
)


def _memory_marks(
    group: Sequence[RankMemory], x: svg.Axis, y: svg.Axis, unit: float, name: str
) -> Iterator[str]:
    """Bar and tick of one rank, or of several where there are more ranks than room."""
    left, right = x.percent(group[0].rank - 0.4), x.percent(group[-1].rank + 0.4)
    who = f"rank {group[0].rank}" if len(group) == 1 else f"ranks {group[0].rank}-{group[-1].rank}"
    measured = max((m.measured_bytes for m in group if m.measured_bytes), default=None)
    model = max((m.model_bytes for m in group if m.model_bytes), default=None)
    texts = [
        f"{text} {size / unit:,.2f} {name}"
        for text, size in (("measured", measured), ("model", model))
        if size
    ]
    if measured:
        height = y.percent(measured / unit)
        tip = f"{who}: {', '.join(texts)}"
        yield svg.bar(left, right, f"{100 - height:g}%", f"{height:g}%", "f0", tip=tip)
    if model:
        level = 100 - y.percent(model / unit)
        yield f'<line class="model" x1="{left:g}%" x2="{right:g}%" y1="{level:g}%" y2="{level:g}%"/>'


def _byte_unit(size: float) -> tuple[float, str]:
    return (2.0**30, "GiB") if size >= 2**30 else (2.0**20, "MiB")


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
