"""The report as one HTML file that needs nothing else (of a run, of two runs side by side, of a
simulation), or as one JSON document for scripts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from math import isfinite, isnan
from pathlib import Path
from statistics import median
from typing import Any

import jinja2
from markupsafe import Markup

from ds_hydra.configs.files import write_whole
from ds_hydra.errors import HydraConfigError
from ds_hydra.records.metrics import IterationMetrics, describe_flops
from ds_hydra.records.timeline import Timeline
from ds_hydra.report import charts
from ds_hydra.report.charts import draw_experts, draw_learned, scheme_errors
from ds_hydra.report.run_folder import Run, rank_memory
from ds_hydra.report.run_report import RunSummary, divide_time, find_slowest
from ds_hydra.report.timelines import draw_gantt, timelines_of
from ds_hydra.version import __version__

_MAX_GANTTS = 12
_TEMPLATES = Path(__file__).parent / "templates"


@dataclass(frozen=True, slots=True)
class Section:
    """A part of the page: one panel for each run."""

    key: str
    title: str
    hint: str
    panels: Sequence[Markup]


@dataclass(frozen=True, slots=True)
class Choice:
    """An iteration that the selector offers."""

    name: str
    panel: Markup


def render_runs(runs: Sequence[Run]) -> str:
    """The page of one run, or of two or more side by side."""
    names = _distinct_names(runs)
    return _render(
        title=" and ".join(names),
        names=names,
        subtitles=[_describe_run(run) for run in runs],
        notes=[list(run.notes) for run in runs],
        figures=_figures(runs),
        sections=[
            Section(key, title, hint, panels)
            for key, title, hint, draw in _SECTIONS
            if (panels := draw(runs))
        ],
    )


def render_simulation(timelines: Sequence[Timeline], *, title: str, subtitle: str = "") -> str:
    """The page of simulated iterations: strip of strategies, and the Gantt chart of each (at most
    12).

    Iterations that come twice, predicted and measured, are drawn one above the other.
    """
    if not timelines:
        raise HydraConfigError("no timelines to draw: simulate at least one iteration")
    by_iteration: dict[int, list[Timeline]] = {}
    for timeline in timelines:
        by_iteration.setdefault(timeline.iteration, []).append(timeline)
    used = [(iteration, group[0].strategy) for iteration, group in sorted(by_iteration.items())]
    names = sorted(
        {name for _, name in used}, key=lambda name: (-sum(n == name for _, n in used), name)
    )
    slowest_first = sorted(
        by_iteration, key=lambda i: (-max(t.duration_ms for t in by_iteration[i]), i)
    )
    choices = [
        Choice(
            f"iteration {iteration}: {by_iteration[iteration][0].strategy} "
            f"({max(t.duration_ms for t in by_iteration[iteration]):,.0f} ms)",
            draw_gantt(by_iteration[iteration]),
        )
        for iteration in slowest_first[:_MAX_GANTTS]
    ]
    durations = [max(t.duration_ms for t in group) for group in by_iteration.values()]
    bubbles = [t.bubble for group in by_iteration.values() for t in group]
    return _render(
        title=title,
        names=[title],
        subtitles=[subtitle],
        notes=[[]],
        figures=[
            ("iterations", [f"{len(durations):,}"]),
            ("time of an iteration", [f"{median(durations):,.0f} ms"]),
            ("strategies", [f"{len(names)}"]),
            ("bubble", [f"{median(bubbles):.1%}"]),
        ],
        sections=[
            Section(*_STRATEGIES, [charts.draw_strip(used, charts.strategy_colors(names))]),
            Section(
                "gantt",
                "Timeline of an iteration",
                "A row per stage. Numbers are micro-batches.",
                [_selector(choices, "0")],
            ),
        ],
    )


def write_page(html: str, out: Path) -> None:
    """Write the page; a file that exists is replaced as a whole."""
    try:
        write_whole(out, [html])
    except OSError as error:
        raise HydraConfigError(
            f"cannot write {out}: {error.strerror}; name a file with --out"
        ) from error


@cache
def _environment() -> jinja2.Environment:
    return jinja2.Environment(
        loader=jinja2.FileSystemLoader(_TEMPLATES),
        autoescape=jinja2.select_autoescape(["html.j2"], default_for_string=True),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )


def _render(**values: object) -> str:
    style = Markup((_TEMPLATES / "report.css").read_text(encoding="utf-8"))
    script = Markup((_TEMPLATES / "report.js").read_text(encoding="utf-8"))
    template = _environment().get_template("report.html.j2")
    return template.render(style=style, script=script, version=__version__, **values)


def _distinct_names(runs: Sequence[Run]) -> list[str]:
    names = [run.name for run in runs]
    if len(set(names)) == len(names):
        return names
    return [f"{name} ({chr(ord('A') + index)})" for index, name in enumerate(names)]


def _describe_run(run: Run) -> str:
    facts, parts = run.facts, []
    if facts.model_type:
        size = facts.num_parameters
        unit = f"{size / 1e9:,.1f} billion" if size >= 1e9 else f"{size / 1e6:,.1f} million"
        parts.append(f"{facts.model_type} with {unit} parameters")
    ranks = f"{run.num_ranks} rank{'s' if run.num_ranks > 1 else ''}"
    parts.append(f"{ranks} ({facts.device})" if facts.device else ranks)
    if facts.started:
        parts.append(f"started {facts.started[:16].replace('T', ' ')}")
    return ", ".join(parts)


def _figures(runs: Sequence[Run]) -> list[tuple[str, list[str]]]:
    """The most important numbers: name and one text per run."""
    summaries = [run.summary for run in runs]
    shares = [divide_time(run.records) for run in runs]
    bubbles = [[r.bubble for r in run.records if not isnan(r.bubble)] for run in runs]
    packs = [[r.pack_occupancy for r in run.records if not isnan(r.pack_occupancy)] for run in runs]
    figures = [
        ("tokens per second", [f"{s.tokens_per_s:,.0f}" for s in summaries]),
        (
            "per device",
            [
                "not counted"
                if isnan(s.tflops_per_device)
                else describe_flops(s.tflops_per_device, s.mfu)
                for s in summaries
            ],
        ),
        ("loss", [f"{s.first_loss:.3f} \N{RIGHTWARDS ARROW} {s.last_loss:.3f}" for s in summaries]),
        ("iterations", [f"{s.num_iterations:,}" for s in summaries]),
        ("tokens", [f"{s.num_tokens:,}" for s in summaries]),
        ("time", [_duration(s.total_s) for s in summaries]),
        ("strategies", [f"{len(s.strategies)}" for s in summaries]),
        ("imbalance of pipelines", [f"{s.imbalance:.1%}" for s in summaries]),
        ("bubble", [f"{median(b):.1%}" if b else "not measured" for b in bubbles]),
        (
            "error of prediction",
            [
                "no prediction" if isnan(s.absolute_error) else f"{s.absolute_error:.1%}"
                for s in summaries
            ],
        ),
        *_profile_figure(summaries),
        (
            "waited for pull and push",
            [_share(s.pull + s.push, u) for s, u in zip(shares, summaries, strict=True)],
        ),
        (
            "waited for plans",
            [_share(s.plan_wait, u) for s, u in zip(shares, summaries, strict=True)],
        ),
        (
            "micro-batches filled to",
            [f"{median(p):.0%} of MaxLen" if p else "not measured" for p in packs],
        ),
    ]
    if len(runs) == 2 and summaries[0].tokens_per_s > 0:
        ratio = summaries[1].tokens_per_s / summaries[0].tokens_per_s
        figures[0][1][1] += f" ({ratio:.2f} x)"
    return figures


def _profile_figure(summaries: Sequence[RunSummary]) -> list[tuple[str, list[str]]]:
    """Figure of the error of the profile alone, where a run kept that."""
    errors = [s.profile_error for s in summaries]
    if all(isnan(error) for error in errors):
        return []
    texts = ["not recorded" if isnan(error) else f"{error:.1%}" for error in errors]
    return [("error of the profile alone", texts)]


def _share(part_ms: float, summary: RunSummary) -> str:
    total_ms = summary.total_s * 1000
    return f"{part_ms / total_ms:.1%} of time" if total_ms > 0 else "0%"


def _duration(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:,.1f} s"
    minutes = seconds / 60
    return f"{minutes:,.0f} min" if minutes < 120 else f"{minutes / 60:,.1f} h"


def _draw_gantts(runs: Sequence[Run]) -> list[Markup]:
    return [_gantts(run, str(index)) for index, run in enumerate(runs)]


def _gantts(run: Run, key: str) -> Markup:
    choices = []
    for iteration, why in _choose_iterations(run).items():
        drawn = timelines_of(run, iteration)
        if drawn:
            name = f"iteration {iteration}: {drawn[0].strategy}, {', '.join(why)}"
            choices.append(Choice(name, draw_gantt(drawn, run.plans.get(iteration))))
    return _selector(choices, key)


def _choose_iterations(run: Run) -> dict[int, list[str]]:
    """Choose up to 12 iterations worth a look, the slowest first, with reasons."""
    candidates = [r for r in run.records if r.iteration in run.traces]
    candidates = candidates or [r for r in run.records if r.iteration in run.plans]
    if not candidates:
        return {}
    by_time = sorted(candidates, key=lambda r: r.iteration_ms)
    chosen: dict[int, list[str]] = {}

    def add(record: IterationMetrics, why: str) -> None:
        chosen.setdefault(record.iteration, []).append(why)

    add(by_time[-1], f"slowest ({by_time[-1].iteration_ms:,.0f} ms)")
    middle = by_time[len(by_time) // 2]
    add(middle, f"median ({middle.iteration_ms:,.0f} ms)")
    add(by_time[0], f"fastest ({by_time[0].iteration_ms:,.0f} ms)")
    errors = [r for r in candidates if not isnan(r.prediction_error)]
    if errors:
        worst = max(errors, key=lambda r: abs(r.prediction_error))
        add(worst, f"largest error of the prediction ({worst.prediction_error:+.0%})")
    uneven = max(candidates, key=lambda r: r.imbalance)
    if uneven.imbalance > 0:
        add(uneven, f"largest imbalance ({uneven.imbalance:.0%})")
    add(candidates[-1], "last")
    seen = {r.strategy for r in candidates if r.iteration in chosen}
    for use in run.summary.strategies:
        example = next((r for r in reversed(candidates) if r.strategy == str(use.strategy)), None)
        if example is not None and str(use.strategy) not in seen and len(chosen) < _MAX_GANTTS:
            add(example, f"{example.iteration_ms:,.0f} ms")
    return chosen


def _selector(choices: Sequence[Choice], key: str) -> Markup:
    if not choices:
        return Markup('<p class="none">Neither traces nor plans with a profile.</p>')
    return Markup(_environment().get_template("selector.html.j2").render(choices=choices, key=key))


def _draw_slowest(runs: Sequence[Run]) -> list[Markup]:
    template = _environment().get_template("slowest.html.j2")
    return [Markup(template.render(slowest=find_slowest(run.records))) for run in runs]


_STRATEGIES = ("strategies", "Strategy of each iteration",
               "A column per iteration; the legend says when each strategy was used.")  # fmt: skip

_SECTIONS: tuple[tuple[str, str, str, Callable[[Sequence[Run]], Sequence[Markup]]], ...] = (
    ("loss", "Loss", "Mean over the label tokens of each iteration.", charts.draw_losses),
    ("throughput", "Tokens per second", "Tokens of sequences; no padding is counted, and none is computed.",
     charts.draw_throughputs),
    (*_STRATEGIES, charts.draw_strategies),
    ("shares", "Where the time went", "All iterations together, averaged over ranks.", charts.draw_shares),
    ("scatter", "Predicted and measured time of each pipeline",
     "Forward and backward of all micro-batches; above the line it took longer than planned.",
     charts.draw_scatter),
    ("errors", "Error of the prediction", "Above zero it took longer than planned.", charts.draw_errors),
    ("learned", "What was learned of the profile",
     "Factors that multiply the profile's times, known before each iteration; the eight that went farthest from 1.",
     draw_learned),
    ("gantt", "Timeline of an iteration",
     "A row per stage. Numbers are micro-batches. The plan predicts forwards and backwards; they are drawn from where "
     "the first measured forward began.",
     _draw_gantts),
    ("lengths", "Lengths of the sequences",
     "Short sequences are many, long ones hold the tokens; a scheme fits no micro-batch above its MaxLen.",
     charts.draw_lengths),
    ("memory", "Memory of each rank",
     "Most that was used so far: on a GPU what was allocated, on a CPU what the process grew by.",
     charts.draw_memory),
    ("experts", "Tokens of each expert",
     "In the last traced iteration, over the mean of the layer; and the most chosen expert of the worst layer.",
     draw_experts),
    ("slowest", "Slowest iterations, and why", "Compared with the median of the run.", _draw_slowest),
)  # fmt: skip
"""Panels of the page of runs: key, title, hint, and the function that draws it for each run."""


REPORT_SCHEMA = "ds_hydra.report/1"


def describe_runs(runs: Sequence[Run]) -> dict[str, Any]:
    """`ds_hydra.report/1`: the numbers of each run that its page shows. What is unknown is null."""
    return {"schema": REPORT_SCHEMA, "runs": [_describe(run) for run in runs]}


def describe_timelines(timelines: Sequence[Timeline]) -> dict[str, Any]:
    """`ds_hydra.report/1` of simulated iterations."""
    return {
        "schema": REPORT_SCHEMA,
        "timelines": len(timelines),
        "num_iterations": len({timeline.iteration for timeline in timelines}),
        "iterations": [
            {
                name: getattr(timeline, name)
                for name in ("iteration", "source", "strategy", "duration_ms", "bubble")
            }
            for timeline in timelines
        ],
    }


def _describe(run: Run) -> dict[str, Any]:
    summary = run.summary
    document = {
        "name": run.name,
        "num_ranks": run.num_ranks,
        **_fields(summary),
        "bubble": _median([r.bubble for r in run.records]),
        "pack_occupancy": _median([r.pack_occupancy for r in run.records]),
        "time_ms": asdict(divide_time(run.records)),
        "strategies": [{**_fields(u), "strategy": str(u.strategy)} for u in summary.strategies],
        "schemes": [{**_fields(e), "scheme": str(e.scheme)} for e in scheme_errors(run.records)],
        "max_len_tokens": {str(scheme): tokens for scheme, tokens in run.max_len().items()},
        "memory": [asdict(memory) for memory in rank_memory(run)],
        "slowest": [
            {
                "iteration": slow.record.iteration,
                "iteration_ms": slow.record.iteration_ms,
                "times_median": slow.times_median,
                "strategy": slow.record.strategy,
                "causes": [_fields(cause) for cause in slow.causes],
            }
            for slow in find_slowest(run.records)
        ],
        "traced_iterations": sorted(run.traces),
        "notes": list(run.notes),
    }
    return {key: _known(value) for key, value in document.items()}


def _known(value: Any) -> Any:
    """`value` with null for every number in it that is not known."""
    if isinstance(value, dict):
        return {key: _known(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_known(inner) for inner in value]
    return None if isinstance(value, float) and not isfinite(value) else value


def _fields(value: Any) -> dict[str, Any]:
    """Fields of a dataclass with slots, by name."""
    return {name: getattr(value, name) for name in value.__slots__}


def _median(values: Sequence[float]) -> float | None:
    known = [value for value in values if not isnan(value)]
    return median(known) if known else None
