"""What a training run did, from its `metrics.jsonl`: read, summarised, printed."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import nan
from pathlib import Path
from statistics import median
from typing import Any

from ds_hydra.errors import HydraConfigError
from ds_hydra.strategy import Scheme, Strategy

METRICS_FILE = "metrics.jsonl"
METRICS_SCHEMA = "ds_hydra.metrics/1"
_BAR_CELLS = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineRecord:
    """One pipeline in one iteration; times in ms, 0.0 for a pipeline without sequences."""

    scheme: Scheme
    ranks: tuple[int, ...]
    num_tokens: int
    predicted_ms: float
    measured_ms: float


@dataclass(frozen=True, slots=True, kw_only=True)
class IterationRecord:
    """One line of `metrics.jsonl`: predicted and measured time are those of the slowest pipeline.

    What a line does not say (a loss that is no number, a field that an older version did not write) is NaN.
    """

    iteration: int
    loss: float
    strategy: Strategy
    num_tokens: int
    iteration_ms: float
    tokens_per_s: float
    predicted_ms: float
    measured_ms: float
    imbalance: float
    pipelines: tuple[PipelineRecord, ...]
    num_sequences: int = 0
    longest_tokens: int = 0
    bubble: float = nan
    pack_occupancy: float = nan
    waited_ms: float = 0.0
    pull_ms: float = 0.0
    push_ms: float = 0.0
    visible_pull_ms: float = 0.0
    """Part of the pull that computation waited for; all of it where a run does not say."""
    visible_push_ms: float = 0.0
    step_ms: float = 0.0

    @property
    def prediction_error(self) -> float:
        """Measured over predicted, minus 1: 0.1 where it took 10% longer than planned."""
        return self.measured_ms / self.predicted_ms - 1 if self.predicted_ms > 0 else nan

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> IterationRecord:
        """The record in one line; raises KeyError, TypeError or ValueError for a line of another kind."""
        if document.get("schema", METRICS_SCHEMA) != METRICS_SCHEMA:
            raise ValueError(
                f"its schema is {document['schema']!r}, this version reads {METRICS_SCHEMA!r}; use the version of "
                "ds_hydra that wrote the run"
            )
        return cls(
            iteration=int(document["iteration"]),
            loss=_number(document["loss"]),
            strategy=Strategy.parse(document["strategy"]),
            num_tokens=int(document["num_tokens"]),
            iteration_ms=float(document["iteration_ms"]),
            tokens_per_s=float(document["tokens_per_s"]),
            predicted_ms=float(document["predicted_ms"]),
            measured_ms=float(document["measured_ms"]),
            imbalance=float(document["imbalance"]),
            pipelines=tuple(
                PipelineRecord(
                    scheme=Scheme.from_json(pipeline),
                    ranks=tuple(pipeline["ranks"]),
                    num_tokens=int(pipeline["num_tokens"]),
                    predicted_ms=float(pipeline["predicted_ms"]),
                    measured_ms=float(pipeline["measured_ms"]),
                )
                for pipeline in document["pipelines"]
            ),
            num_sequences=int(document.get("num_sequences", 0)),
            longest_tokens=int(document.get("longest_tokens", 0)),
            bubble=_number(document.get("bubble")),
            pack_occupancy=_number(document.get("pack_occupancy")),
            waited_ms=float(document.get("waited_ms", 0.0)),
            pull_ms=float(document.get("pull_ms", 0.0)),
            push_ms=float(document.get("push_ms", 0.0)),
            visible_pull_ms=float(document.get("visible_pull_ms", document.get("pull_ms", 0.0))),
            visible_push_ms=float(document.get("visible_push_ms", document.get("push_ms", 0.0))),
            step_ms=float(document.get("step_ms", 0.0)),
        )


def _number(value: Any) -> float:
    """A number as it is; NaN for null, which stands for what JSON cannot write."""
    return nan if value is None else float(value)


@dataclass(frozen=True, slots=True, kw_only=True)
class StrategyUse:
    """How often a strategy was used, and medians over those iterations."""

    strategy: Strategy
    num_iterations: int
    tokens_per_s: float
    predicted_ms: float
    measured_ms: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSummary:
    """A run in numbers. Prints as a table; strategies come most used first.

    `measured_over_predicted` and `absolute_error` (|measured / predicted - 1|) compare the slowest pipeline
    of each iteration, without pull, push and step; like `tokens_per_s` and `imbalance` they are medians.
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
    tokens_per_s: float
    imbalance: float

    def __str__(self) -> str:
        return "\n".join([*self._strategy_lines(), "", *self._number_lines()])

    def _strategy_lines(self) -> list[str]:
        width = max(len("strategy"), *(len(str(use.strategy)) for use in self.strategies))
        lines = [f"{'strategy':<{width}}  iterations        tokens/s  predicted   measured"]
        for use in self.strategies:
            share = use.num_iterations / self.num_iterations
            bar = "#" * max(1, round(share * _BAR_CELLS))
            lines.append(
                f"{use.strategy!s:<{width}}  {use.num_iterations:>4} {bar:<{_BAR_CELLS}} "
                f"{use.tokens_per_s:>10,.0f}  {use.predicted_ms:>6,.0f} ms  {use.measured_ms:>6,.0f} ms"
            )
        return lines

    def _number_lines(self) -> list[str]:
        return [
            f"{self.num_iterations} iterations, {self.num_tokens:,} tokens in {self.total_s:,.1f} s; "
            f"{len(self.strategies)} strategies, {self.num_heterogeneous} iterations heterogeneous",
            f"loss            {self.first_loss:.3f} -> {self.last_loss:.3f}",
            f"tokens/s        {self.tokens_per_s:,.0f} (median)",
            f"measured time   {self.measured_over_predicted:.2f} x predicted, "
            f"off by {self.absolute_error:.1%} (medians)",
            f"imbalance       {self.imbalance:.1%} (median)",
        ]


def summarize_run(run_dir: str | Path) -> RunSummary:
    """The summary of the run in `run_dir`; raises HydraConfigError where there is no readable run."""
    return summarize_records(read_metrics(run_dir))


def summarize_records(records: Sequence[IterationRecord]) -> RunSummary:
    """The summary of the iterations of a run, at least one."""
    ratios = [r.measured_ms / r.predicted_ms for r in records if r.predicted_ms > 0] or [float("nan")]
    return RunSummary(
        num_iterations=len(records),
        num_heterogeneous=sum(r.strategy.is_heterogeneous for r in records),
        num_tokens=sum(r.num_tokens for r in records),
        total_s=sum(r.iteration_ms for r in records) / 1000,
        strategies=_count_strategies(records),
        first_loss=records[0].loss,
        last_loss=records[-1].loss,
        measured_over_predicted=median(ratios),
        absolute_error=median(abs(ratio - 1) for ratio in ratios),
        tokens_per_s=median(r.tokens_per_s for r in records),
        imbalance=median(r.imbalance for r in records),
    )


def _count_strategies(records: Sequence[IterationRecord]) -> tuple[StrategyUse, ...]:
    groups: defaultdict[Strategy, list[IterationRecord]] = defaultdict(list)
    for record in records:
        groups[record.strategy].append(record)
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


def read_metrics(run_dir: str | Path) -> list[IterationRecord]:
    """The iterations of a run in order. Raises HydraConfigError naming the file, the line and what is wrong.

    Where a resumed run has an iteration again, the later record counts. Half a line at the end, as a killed
    run leaves it, is left out.
    """
    path = Path(run_dir) / METRICS_FILE
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise HydraConfigError(
            f"cannot read {path}: {error.strerror}; a run writes it into its hydra.run_dir"
        ) from error
    lines = text.splitlines()
    if lines and not text.endswith("\n") and not _is_json(lines[-1]):
        lines.pop()
    records = {}
    for number, line in enumerate(lines, start=1):
        record = _read_line(line, f"{path}, line {number}")
        records[record.iteration] = record
    if not records:
        raise HydraConfigError(f"{path} is empty: no iteration was finished")
    return [records[iteration] for iteration in sorted(records)]


def _read_line(line: str, place: str) -> IterationRecord:
    try:
        return IterationRecord.from_json(json.loads(line))
    except json.JSONDecodeError as error:
        raise HydraConfigError(f"{place} is not JSON: {error}") from error
    except KeyError as error:
        raise HydraConfigError(f"{place} has no {error}") from error
    except (AttributeError, TypeError, ValueError) as error:
        raise HydraConfigError(f"{place} is not the record of an iteration: {error}") from error


def _is_json(line: str) -> bool:
    try:
        json.loads(line)
    except ValueError:
        return False
    return True
