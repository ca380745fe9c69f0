"""What a run learned of its profile: how far each scheme is off, factors over time, trials."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import isfinite, log
from statistics import median

from markupsafe import Markup

from ds_hydra.report import svg
from ds_hydra.report.lines import iteration_axis
from ds_hydra.report.run_folder import Run
from ds_hydra.report.run_report import IterationRecord
from ds_hydra.report.strip import NUM_COLORS
from ds_hydra.strategy import Scheme

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


def scheme_errors(records: Sequence[IterationRecord]) -> list[SchemeError]:
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
