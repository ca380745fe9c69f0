"""Report of a training run from its `metrics.jsonl`: read, summarised, printed; where the time of
iterations went.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from math import isfinite, isnan, log, nan
from pathlib import Path
from statistics import median
from typing import Any, TypeVar

from ds_hydra.configs import files
from ds_hydra.errors import HydraConfigError
from ds_hydra.records.metrics import METRICS_FILE, IterationMetrics, describe_flops
from ds_hydra.strategy import Scheme, Strategy

logger = logging.getLogger(__name__)

_Record = TypeVar("_Record")

_BAR_CELLS = 10
_MAX_LINES = 12
"""Strategies that a summary lists."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StrategyUse:
    """Number of a strategy's iterations, and medians over them."""

    strategy: Strategy
    num_iterations: int
    tokens_per_s: float
    predicted_ms: float
    measured_ms: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSummary:
    """A run in numbers. Prints as a table; strategies come most used first.

    `measured_over_predicted` and `absolute_error` (|measured / predicted - 1|) compare the slowest
    pipeline of each iteration, without pull, push and step; like `tokens_per_s` and `imbalance`
    they are medians.
    """

    num_iterations: int
    num_heterogeneous: int
    num_tokens: int
    total_s: float
    strategies: tuple[StrategyUse, ...]
    first_loss: float
    last_loss: float
    measured_over_predicted: float
    absolute_error: float
    profile_error: float
    """The absolute error of the profile alone; NaN where the run did not keep what it says."""
    tokens_per_s: float
    imbalance: float
    tflops_per_device: float = nan
    """NaN, as `mfu`, where the run did not count FLOPs, or does not know the device's peak."""
    mfu: float = nan

    def __str__(self) -> str:
        return "\n".join([*self._strategy_lines(), "", *self._number_lines()])

    def _strategy_lines(self) -> list[str]:
        shown = self.strategies[:_MAX_LINES]
        names = [_shorten(use.strategy) for use in shown]
        width = max(len("strategy"), *map(len, names))
        lines = [f"{'strategy':<{width}}  iterations        tokens/s  predicted   measured"]
        for name, use in zip(names, shown):
            share = use.num_iterations / self.num_iterations
            bar = "#" * max(1, round(share * _BAR_CELLS))
            lines.append(
                f"{name:<{width}}  {use.num_iterations:>4} {bar:<{_BAR_CELLS}} "
                f"{use.tokens_per_s:>10,.0f}  {use.predicted_ms:>6,.0f} ms  {use.measured_ms:>6,.0f} ms"
            )
        if others := self.strategies[_MAX_LINES:]:
            count = sum(use.num_iterations for use in others)
            lines.append(f"{len(others)} others in {count} iterations")
        return lines

    def _number_lines(self) -> list[str]:
        return [
            f"{self.num_iterations} iterations, {self.num_tokens:,} tokens in {self.total_s:,.1f} s; "
            f"{len(self.strategies)} strategies, {self.num_heterogeneous} iterations heterogeneous",
            f"loss            {self.first_loss:.3f} -> {self.last_loss:.3f}",
            f"tokens/s        {self.tokens_per_s:,.0f} (median)",
            *(
                []
                if isnan(self.tflops_per_device)
                else [
                    f"per device      {describe_flops(self.tflops_per_device, self.mfu)} (median)"
                ]
            ),
            f"measured time   {self.measured_over_predicted:.2f} x predicted, "
            f"off by {self.absolute_error:.1%} (medians)"
            + (
                ""
                if isnan(self.profile_error)
                else f"; the profile alone by {self.profile_error:.1%}"
            ),
            f"imbalance       {self.imbalance:.1%} (median)",
        ]


def _shorten(strategy: Strategy) -> str:
    """A line for `strategy`; of several phases the first."""
    phases = strategy.in_turn
    more = f" then {len(phases) - 1} more" if len(phases) > 1 else ""
    return f"{phases[0]}{more}"


def summarize_run(run_dir: str | Path) -> RunSummary:
    """The summary of the run in `run_dir`; raises HydraConfigError where there is no readable
    run.
    """
    return summarize_records(read_metrics(run_dir))


def summarize_records(records: Sequence[IterationMetrics]) -> RunSummary:
    """The summary of the iterations of a run, at least one."""
    ratios = [r.measured_ms / r.predicted_ms for r in records if r.predicted_ms > 0] or [
        float("nan")
    ]
    return RunSummary(
        num_iterations=len(records),
        num_heterogeneous=sum(r.parsed_strategy.is_heterogeneous for r in records),
        num_tokens=sum(r.num_tokens for r in records),
        total_s=sum(r.iteration_ms for r in records) / 1000,
        strategies=_count_strategies(records),
        first_loss=records[0].loss,
        last_loss=records[-1].loss,
        measured_over_predicted=median(ratios),
        absolute_error=median(abs(ratio - 1) for ratio in ratios),
        profile_error=_median_of_known(abs(r.profile_error) for r in records),
        tokens_per_s=median(r.tokens_per_s for r in records),
        imbalance=median(r.imbalance for r in records),
        tflops_per_device=_median_of_known(r.tflops_per_device for r in records),
        mfu=_median_of_known(r.mfu for r in records),
    )


def _median_of_known(values: Iterable[float]) -> float:
    return median([value for value in values if not isnan(value)] or [nan])


def _count_strategies(records: Sequence[IterationMetrics]) -> tuple[StrategyUse, ...]:
    groups: defaultdict[Strategy, list[IterationMetrics]] = defaultdict(list)
    for record in records:
        groups[record.parsed_strategy].append(record)
    uses = [
        StrategyUse(
            strategy=strategy,
            num_iterations=len(group),
            tokens_per_s=median(r.tokens_per_s for r in group),
            predicted_ms=median(r.predicted_ms for r in group),
            measured_ms=median(r.measured_ms for r in group),
        )
        for strategy, group in groups.items()
    ]
    return tuple(sorted(uses, key=lambda use: (-use.num_iterations, str(use.strategy))))


def read_metrics(run_dir: str | Path, notes: list[str] | None = None) -> list[IterationMetrics]:
    """The iterations of a run in order. Raises HydraConfigError where there is none, naming the
    first line that cannot be read and what is wrong with it.

    Where a resumed run goes back to an iteration, what came from it on before does not count: it is
    no part of what was trained in the end. Half a line at the end, as
    a killed run leaves it, is left out; any other damaged line is left out with a note, or with a
    warning where nobody takes notes.
    """
    path = Path(run_dir) / METRICS_FILE
    try:
        lines, damaged = read_lines(path, _read_line)
    except OSError as error:
        raise HydraConfigError(
            f"cannot read {path}: {error.strerror}; a run writes it into its hydra.run_dir"
        ) from error
    records: list[IterationMetrics] = []
    for record in lines:
        while records and records[-1].iteration >= record.iteration:
            records.pop()
        records.append(record)
    if not records:
        raise HydraConfigError(
            str(damaged[0]) if damaged else f"{path} is empty: no iteration was finished"
        )
    if note := describe_damage(METRICS_FILE, damaged):
        logger.warning(note) if notes is None else notes.append(note)
    return records


def read_lines(
    path: Path, read: Callable[[dict[str, Any], str], _Record]
) -> tuple[list[_Record], list[HydraConfigError]]:
    """Read each line of `path` by `read`, which is told its place, too. Returns what was read, and
    the errors of damaged lines. Raises OSError.
    """
    found: list[_Record] = []
    damaged: list[HydraConfigError] = []
    for number, line in files.read_json_lines(path):
        try:
            if isinstance(line, HydraConfigError):
                raise line
            found.append(read(line, f"{path}, line {number}"))
        except HydraConfigError as error:
            damaged.append(error)
    return found, damaged


def describe_damage(name: str, damaged: Sequence[HydraConfigError]) -> str:
    """Describe the lines of a file that were left out; "" where there are none."""
    if not damaged:
        return ""
    count = f"1 line of {name}" if len(damaged) == 1 else f"{len(damaged)} lines of {name}"
    return (
        f"{count} cannot be read and {'is' if len(damaged) == 1 else 'are'} left out: {damaged[0]}."
    )


def _read_line(line: dict[str, Any], place: str) -> IterationMetrics:
    try:
        return IterationMetrics.from_json(line)
    except KeyError as error:
        raise HydraConfigError(f"{place} has no {error}") from error
    except HydraConfigError as error:
        raise HydraConfigError(f"{place} is not the record of an iteration: {error}") from error


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeShares:
    """One iteration, or a sum of them, cut into the work of ranks on average; milliseconds, all 0
    or more.

    `pull` and `push` are what computation waited for; what it hid is in `compute`.

    `compute` and `idle` divide the time of the slowest pipeline by the bubble; where a run did not
    measure the bubble, all of it is `compute`.
    """

    plan_wait: float
    pull: float
    compute: float
    idle: float
    push: float
    step: float
    other: float


def divide_time(records: Sequence[IterationMetrics]) -> TimeShares:
    """The time of all `records`."""
    idle = sum(0.0 if isnan(r.bubble) else max(0.0, r.bubble) * r.measured_ms for r in records)
    named = {
        "plan_wait": sum(r.waited_ms for r in records),
        "pull": sum(r.visible_pull_ms for r in records),
        "compute": sum(r.measured_ms for r in records) - idle,
        "idle": idle,
        "push": sum(r.visible_push_ms for r in records),
        "step": sum(r.step_ms for r in records),
    }
    other = sum(r.iteration_ms for r in records) - sum(named.values())
    return TimeShares(**named, other=max(0.0, other))


FEWEST = 3
"""Least number of values for a median: of two each would be as far from it."""


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
