"""What an iteration did, for `metrics.jsonl` and DeepSpeed's monitors."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ds_hydra.sampler.plan import IterationPlan


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineMetrics:
    """Predicted and measured forward + backward time of one pipeline; measured is its slowest rank's."""

    tp: int
    pp: int
    ranks: tuple[int, ...]
    num_micro_batches: int
    num_tokens: int
    predicted_ms: float
    measured_ms: float
    prediction_error: float
    """Measured over predicted, minus 1; 0.0 without sequences."""


@dataclass(frozen=True, slots=True, kw_only=True)
class IterationMetrics:
    """One line of `metrics.jsonl`. Times in milliseconds; `tokens_per_s` counts tokens of sequences only."""

    iteration: int
    loss: float
    strategy: str
    num_tokens: int
    num_sequences: int
    iteration_ms: float
    tokens_per_s: float
    predicted_ms: float
    measured_ms: float
    """Forward + backward of the slowest pipeline."""
    imbalance: float
    """Measured slowest over fastest pipeline, minus 1; pipelines without sequences are not counted."""
    lr: float
    grad_norm: float
    planning_ms: float
    waited_ms: float
    """Time this iteration waited for its plan."""
    pull_ms: float
    """Time the link spent pulling, on the slowest rank, hidden behind computation or not."""
    push_ms: float
    """Time the link spent pushing, on the rank that waited least for others."""
    visible_pull_ms: float
    """Part of it that computation waited for, on the rank that waited longest."""
    visible_push_ms: float
    """What was left to push when the last rank had computed its last gradient."""
    step_ms: float
    pipelines: tuple[PipelineMetrics, ...]

    def to_json(self) -> dict[str, Any]:
        """The metrics as a JSON object."""
        return asdict(self)


def measure_pipelines(plan: IterationPlan, propagate_ms: Sequence[float]) -> tuple[PipelineMetrics, ...]:
    """Pipelines of `plan` with the slowest of their ranks' times; `propagate_ms[rank]`."""
    return tuple(
        PipelineMetrics(
            tp=p.scheme.tp,
            pp=p.scheme.pp,
            ranks=p.ranks,
            num_micro_batches=len(p.micro_batches),
            num_tokens=sum(sum(plan.row_lengths(row)) for row in p.micro_batches),
            predicted_ms=p.makespan_ms,
            measured_ms=(measured := max(propagate_ms[rank] for rank in p.ranks) if p.micro_batches else 0.0),
            prediction_error=measured / p.makespan_ms - 1 if measured and p.makespan_ms else 0.0,
        )
        for p in plan.pipelines
    )


def measured_imbalance(pipelines: Sequence[PipelineMetrics]) -> float:
    """Slowest over fastest busy pipeline, minus 1."""
    times = [p.measured_ms for p in pipelines if p.num_micro_batches]
    return max(times) / min(times) - 1 if times and min(times) > 0 else 0.0


class RunLog:
    """Writes `metrics.jsonl` and, if wanted, one JSON file per executed plan into a run folder."""

    def __init__(self, run_dir: Path, *, save_plans: bool):
        self._run_dir = run_dir
        self._plans = run_dir / "plans" if save_plans else None
        run_dir.mkdir(parents=True, exist_ok=True)
        if self._plans is not None:
            self._plans.mkdir(exist_ok=True)
        self._file = (run_dir / "metrics.jsonl").open("a", encoding="utf-8")

    def write(self, metrics: IterationMetrics, plan: IterationPlan) -> None:
        """Append one iteration."""
        document = {k: None if v != v else v for k, v in metrics.to_json().items()}  # NaN is not JSON
        self._file.write(json.dumps(document) + "\n")
        self._file.flush()
        if self._plans is not None:
            path = self._plans / f"iteration_{plan.iteration:06d}.json"
            path.write_text(json.dumps(plan.to_json()), encoding="utf-8")

    def write_profile(self, document: Mapping[str, Any]) -> None:
        """Keep the profile that this run measured; `hydra.profile` can name the file in the next run."""
        (self._run_dir / "profile.json").write_text(json.dumps(document, indent=1), encoding="utf-8")

    def close(self) -> None:
        """Close the file."""
        self._file.close()
