"""The plots of a run. Each function draws one panel per run, on axes that the runs share.

Among them are which strategy each iteration used, and what the run learned of its profile: how far
each scheme is off, factors over time.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import ceil, isfinite, isnan, log
from statistics import median
from typing import TypeVar

import numpy as np
from markupsafe import Markup

from ds_hydra.records.metrics import IterationMetrics
from ds_hydra.report import svg
from ds_hydra.report.run_folder import RankMemory, Run, rank_memory
from ds_hydra.report.run_report import divide_time
from ds_hydra.report.svg import draw_lines, iteration_axis, running_median
from ds_hydra.strategy import Scheme

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
    """Thin out `items` to some thousand, evenly spread."""
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
    """One bar: work of the ranks, on average, in all iterations together."""
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
    """Peak memory of each rank (bars), its expected peak by the model (ticks), and the limit."""
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


NUM_COLORS = 8

_MAX_STRIP_CELLS = 400

_MAX_NAMED_STRATEGIES = 12


def strategy_colors(names: Iterable[str]) -> dict[str, str]:
    """CSS classes of strategies, most used first: eight colours, then the same with stripes, then
    grey.
    """
    classes = {}
    for index, name in enumerate(names):
        striped = " striped" if index >= NUM_COLORS else ""
        classes[name] = (
            f"f{index % NUM_COLORS}{striped}" if index < _MAX_NAMED_STRATEGIES else "rest"
        )
    return classes


def draw_strategies(runs: Sequence[Run]) -> list[Markup]:
    """A strip of colours, a column per iteration, above a legend that says when each strategy was
    used.
    """
    counts: defaultdict[str, int] = defaultdict(int)
    for run in runs:
        for record in run.records:
            counts[record.strategy] += 1
    colors = strategy_colors(sorted(counts, key=lambda name: (-counts[name], name)))
    return [draw_strip([(r.iteration, r.strategy) for r in run.records], colors) for run in runs]


def draw_strip(used: Sequence[tuple[int, str]], colors: Mapping[str, str]) -> Markup:
    """The strip and its legend for (iteration, strategy) pairs; a column of many iterations shows
    shares.
    """
    size = ceil(len(used) / _MAX_STRIP_CELLS)
    columns = [used[start : start + size] for start in range(0, len(used), size)]
    names = [name for name in colors if any(name == other for _, other in used)]
    strip = "".join(_strip_cells(columns, names, colors))
    first, last = used[0][0] - 0.5, used[-1][0] + 0.5
    axis = svg.linear_axis(first, last, title="iteration", num_ticks=8, integer=True)
    rows = "".join(
        _strip_row(name, columns, colors[name], used) for name in names if colors[name] != "rest"
    )
    num_rest = sum(colors[name] == "rest" for _, name in used)
    if num_rest:
        rows += (
            f'<li>{svg.swatch("rest")}<span class="name">{sum(colors[n] == "rest" for n in names)} other strategies'
            f'</span><span class="num">{num_rest:,} x</span><span class="num">{num_rest / len(used):.0%}</span></li>'
        )
    return Markup(
        f'<div class="plot"><svg class="strip over" role="img" aria-label="strategy of {len(used)} iterations">{strip}'
        f'</svg><div class="xs">{svg.tick_labels(axis)}</div><div class="xl">{axis.title}</div></div>'
        f'<ul class="uses">{rows}</ul>'
    )


def _strip_cells(
    columns: Sequence[Sequence[tuple[int, str]]], names: Sequence[str], colors: Mapping[str, str]
) -> Iterator[str]:
    width = 100 / len(columns)
    for index, column in enumerate(columns):
        top = 0.0
        for name in names:
            share = 100 * sum(name == other for _, other in column) / len(column)
            if not share:
                continue
            tip = f"iteration {_span(column)}: {name}" + (
                f" ({share:.0f}%)" if len(column) > 1 else ""
            )
            for css in colors[name].split():
                yield svg.bar(
                    index * width, (index + 1) * width, f"{top:g}%", f"{share:g}%", css, tip=tip
                )
            top += share


def _span(column: Sequence[tuple[int, str]]) -> str:
    first, last = column[0][0], column[-1][0]
    return f"{first}" if first == last else f"{first}-{last}"


def _strip_row(
    name: str,
    columns: Sequence[Sequence[tuple[int, str]]],
    css: str,
    used: Sequence[tuple[int, str]],
) -> str:
    width = 100 / len(columns)
    cells = "".join(
        svg.bar(index * width, (index + 1) * width, "0", "100%", css.split()[0])
        for index, column in enumerate(columns)
        if any(name == other for _, other in column)
    )
    count = sum(name == other for _, other in used)
    sign = (
        '<svg class="swatch">'
        + "".join(svg.bar(0, 100, "0", "100%", c) for c in css.split())
        + "</svg>"
    )
    return (
        f'<li>{sign}<span class="name">{Markup.escape(name)}</span><span class="num">{count:,} x</span>'
        f'<span class="num">{count / len(used):.0%}</span><svg class="when">{cells}</svg></li>'
    )


FEWEST = 3
"""Pipelines of a scheme from which its median says something."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SchemeError:
    """Error of the profile for one scheme.

    `measured_over_profiled`: median over `num_pipelines` of what a pipeline took and what the
    profile alone says; where a run did not keep that, what the plan said.
    """

    scheme: Scheme
    num_pipelines: int
    measured_over_profiled: float


def scheme_errors(records: Sequence[IterationMetrics]) -> list[SchemeError]:
    """Errors of all schemes that ran, the largest first; schemes of less than three pipelines
    last.
    """
    ratios: dict[Scheme, list[float]] = {}
    for pipeline in (p for record in records for p in record.pipelines):
        said_ms = pipeline.profiled_ms if isfinite(pipeline.profiled_ms) else pipeline.predicted_ms
        if said_ms > 0 and pipeline.measured_ms > 0:
            ratios.setdefault(pipeline.scheme, []).append(pipeline.measured_ms / said_ms)
    errors = [
        SchemeError(scheme=s, num_pipelines=len(found), measured_over_profiled=median(found))
        for s, found in ratios.items()
    ]
    return sorted(
        errors,
        key=lambda e: (e.num_pipelines < FEWEST, -abs(log(e.measured_over_profiled)), e.scheme),
    )


def draw_learned(runs: Sequence[Run]) -> list[Markup]:
    """Factors over iterations, for each run that learned any."""
    names = _names(runs)
    if not names:
        return []
    x = iteration_axis(runs)
    values = [
        r.learned[name] for run in runs for r in run.records for name in names & r.learned.keys()
    ]
    y = svg.value_axis([*values, 1.0], title="measured over profiled")
    order = sorted(names)
    panels = []
    for run in runs:
        marks = [svg.horizontal(y.percent(1.0), "zero")]
        entries = []
        for index, name in enumerate(order):
            points = [(r.iteration, r.learned[name]) for r in run.records if name in r.learned]
            if points:
                marks.append(svg.line(points, x, y, f"f{index}"))
                entries.append((svg.stroke(f"line f{index}"), f"{name}: {points[-1][1]:.2f}"))
        plot = svg.plot(marks, x, y, "factors learned over iterations")
        panels.append((plot + svg.legend(entries) if entries else Markup("")) + _describe(run))
    return panels


def _names(runs: Sequence[Run]) -> set[str]:
    """Names of the factors that went farthest from 1, as many as there are colours."""
    reached: dict[str, float] = {}
    for name, value in (item for run in runs for r in run.records for item in r.learned.items()):
        reached[name] = max(reached.get(name, 0.0), abs(log(value)))
    return set(sorted(reached, key=lambda name: (-reached[name], name))[:NUM_COLORS])


def _compare_errors(run: Run) -> list[str]:
    """Explain the two errors among the figures of the page."""
    summary = run.summary
    if not (isfinite(summary.absolute_error) and isfinite(summary.profile_error)):
        return []
    text = (
        "Plans use the profile's times, corrected by what was measured before. Half of the iterations were within "
        f"{summary.absolute_error:.1%} of their plan; the profile alone would have been within "
        f"{summary.profile_error:.1%}."
    )
    if summary.profile_error < summary.absolute_error:
        text += (
            " The corrections did not pay here: they need some iterations of each scheme, and follow a machine whose "
            "speed changes."
        )
    return [text]


def _describe(run: Run) -> Markup:
    lines = _compare_errors(run)
    errors = scheme_errors(run.records)
    if errors and errors[0].num_pipelines >= FEWEST:
        worst = errors[0]
        lines.append(
            f"The profile is most wrong about {worst.scheme}: its pipelines took "
            f"{worst.measured_over_profiled:.2f} times what it says ({worst.num_pipelines} of them)."
        )
    return Markup("").join(Markup('<p class="none">{}</p>').format(line) for line in lines)


_Item = TypeVar("_Item")
