"""Which strategy each iteration used, and what the run learned of its profile: how far each scheme
is off, factors over time, trials.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import ceil, isfinite, log
from statistics import median

from markupsafe import Markup

from ds_hydra.records.metrics import IterationMetrics
from ds_hydra.report import svg
from ds_hydra.report.run_folder import Run
from ds_hydra.report.svg import iteration_axis
from ds_hydra.strategy import Scheme

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
    """How far the profile was off for one scheme.

    `measured_over_profiled`: median over `num_pipelines` of what a pipeline took and what the
    profile alone says; where a run did not keep that, what the plan said.
    """

    scheme: Scheme
    num_pipelines: int
    measured_over_profiled: float


def scheme_errors(records: Sequence[IterationMetrics]) -> list[SchemeError]:
    """Of all schemes that ran, the one that the profile has most wrong first; those of less than
    three pipelines last.
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
    """Factors over iterations, with what trials cost, for each run; nothing where none learned."""
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
        trials = [r for r in run.records if r.trial_ms > 0]
        marks += [svg.vertical(x.percent(r.iteration), "trial") for r in trials]
        if trials:
            entries.append((svg.stroke("trial"), "a trial"))
        plot = svg.plot(marks, x, y, "factors learned over iterations")
        panels.append((plot + svg.legend(entries) if entries else Markup("")) + _describe(run))
    return panels


def _names(runs: Sequence[Run]) -> set[str]:
    """As many factors as there are colours: those that went farthest from 1."""
    reached: dict[str, float] = {}
    for name, value in (item for run in runs for r in run.records for item in r.learned.items()):
        reached[name] = max(reached.get(name, 0.0), abs(log(value)))
    return set(sorted(reached, key=lambda name: (-reached[name], name))[:NUM_COLORS])


def _compare_errors(run: Run) -> list[str]:
    """What the two errors among the figures of the page mean."""
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
    spreads = [r.micro_batch_spread for r in run.records if r.micro_batch_spread > 0]
    if spreads:
        lines.append(f"Times of single micro-batches scatter by {spreads[-1]:.1%}.")
    trials = [r for r in run.records if r.trial_ms > 0]
    if trials:
        share = run.records[-1].trials_share
        cost = f"; trials have cost {share:.1%} of the run's time" if isfinite(share) else ""
        lines.append(
            f"{len(trials)} of {len(run.records)} iterations were trials, expected to cost "
            f"{sum(r.trial_ms for r in trials) / 1000:,.1f} s more than the best known strategy{cost}."
        )
    elif any(r.learned for r in run.records):
        lines.append("No iteration was a trial.")
    return Markup("").join(Markup('<p class="none">{}</p>').format(line) for line in lines)
