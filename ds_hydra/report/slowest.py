"""Where the time of iterations went, and why the slowest ones were slow."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import isnan
from statistics import median

from ds_hydra.report.run_report import IterationRecord, PipelineRecord

_WORTH_A_WORD = 0.05
"""Share of the excess over a usual iteration below which a cause is not named."""
_MISPREDICTED = 0.10


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeShares:
    """One iteration, or a sum of them, cut into what ranks did on average; milliseconds, all 0 or
    more.

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


def divide_time(records: Sequence[IterationRecord]) -> TimeShares:
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


@dataclass(frozen=True, slots=True)
class Cause:
    """Part of an iteration's excess over a usual one."""

    excess_ms: float
    text: str


_FEWEST = 3
"""Iterations of which a median says what is usual: of two each would be as far from it."""


@dataclass(frozen=True, slots=True)
class SlowIteration:
    """A slow iteration: how often the median iteration would fit into it, and why, largest cause
    first.
    """

    record: IterationRecord
    times_median: float
    causes: tuple[Cause, ...]


def find_slowest(records: Sequence[IterationRecord], *, count: int = 10) -> list[SlowIteration]:
    """The `count` longest iterations, longest first."""
    usual = _Usual(records)
    few = (Cause(0.0, f"too few iterations to say what is usual ({len(records)})"),)
    is_known = len(records) >= _FEWEST
    slowest = sorted(records, key=lambda r: (-r.iteration_ms, r.iteration))[:count]
    return [
        SlowIteration(
            record,
            record.iteration_ms / usual.iteration_ms if usual.iteration_ms > 0 else 1.0,
            tuple(usual.explain(record)) if is_known else few,
        )
        for record in slowest
    ]


class _Usual:
    """Medians of a run, to which one iteration is compared."""

    def __init__(self, records: Sequence[IterationRecord]):
        self.iteration_ms = median(r.iteration_ms for r in records)
        self._predicted_ms = median(r.predicted_ms for r in records)
        self._tokens = median(r.num_tokens for r in records)
        self._longest = median(r.longest_tokens for r in records)
        errors = [r.prediction_error for r in records if not isnan(r.prediction_error)]
        self._ratio = 1 + (median(errors) if errors else 0.0)
        self._parts = {
            name: median(getattr(r, name) for r in records)
            for name in ("waited_ms", "visible_pull_ms", "visible_push_ms", "step_ms")
        }

    def explain(self, record: IterationRecord) -> list[Cause]:
        excess_ms = record.iteration_ms - self.iteration_ms
        if excess_ms <= 0:
            return [Cause(0.0, "no slower than usual")]
        causes = [
            Cause(
                (record.predicted_ms - self._predicted_ms) * self._ratio,
                self._describe_batch(record),
            ),
            self._misprediction(record),
            *self._parts_causes(record),
        ]
        named = [cause for cause in causes if cause.excess_ms > _WORTH_A_WORD * excess_ms]
        named.sort(key=lambda cause: -cause.excess_ms)
        return named or [
            Cause(excess_ms, "outside of what is measured: data loading, logging, other processes")
        ]

    def _describe_batch(self, record: IterationRecord) -> str:
        reasons = []
        if record.longest_tokens > 1.1 * self._longest > 0:
            reasons.append(
                f"its longest sequence has {record.longest_tokens:,} tokens, usual {self._longest:,.0f}"
            )
        if record.num_tokens > 1.1 * self._tokens:
            reasons.append(f"it has {record.num_tokens:,} tokens, usual {self._tokens:,.0f}")
        why = f" ({'; '.join(reasons)})" if reasons else ""
        return (
            f"planned to take {record.predicted_ms:,.0f} ms, usual {self._predicted_ms:,.0f}{why}"
        )

    def _misprediction(self, record: IterationRecord) -> Cause:
        excess_ms = record.measured_ms - record.predicted_ms * self._ratio
        busy = [p for p in record.pipelines if p.predicted_ms > 0]
        if not busy:
            return Cause(0.0, "")
        worst = max(busy, key=lambda p: p.measured_ms)
        late = [
            p for p in busy if p.measured_ms > (1 + _MISPREDICTED) * self._ratio * p.predicted_ms
        ]
        who = "every pipeline" if len(late) == len(busy) > 1 else _name(worst)
        ratio = worst.measured_ms / worst.predicted_ms
        return Cause(
            excess_ms, f"{who} took longer than planned ({ratio:.2f} x, usual {self._ratio:.2f} x)"
        )

    def _parts_causes(self, record: IterationRecord) -> list[Cause]:
        texts = {
            "waited_ms": "waited {:,.0f} ms for its plan",
            "visible_pull_ms": "pull took {:,.0f} ms, usual {:,.0f}",
            "visible_push_ms": "push took {:,.0f} ms, usual {:,.0f}",
            "step_ms": "optimizer step took {:,.0f} ms, usual {:,.0f}",
        }
        return [
            Cause(getattr(record, name) - usual, texts[name].format(getattr(record, name), usual))
            for name, usual in self._parts.items()
        ]


def _name(pipeline: PipelineRecord) -> str:
    first, last = pipeline.ranks[0], pipeline.ranks[-1]
    ranks = f"rank {first}" if first == last else f"ranks {first}-{last}"
    return f"{pipeline.scheme} on {ranks}"
