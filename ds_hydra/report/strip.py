"""Which strategy each iteration used, as a strip of colours."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from math import ceil

from markupsafe import Markup

from ds_hydra.report import svg
from ds_hydra.report.run_folder import Run

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
            counts[str(record.strategy)] += 1
    colors = strategy_colors(sorted(counts, key=lambda name: (-counts[name], name)))
    return [
        draw_strip([(r.iteration, str(r.strategy)) for r in run.records], colors) for run in runs
    ]


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
