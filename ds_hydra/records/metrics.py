"""The metrics of an iteration: a line of `metrics.jsonl`, and the files of a run folder."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import isfinite, isnan
from typing import Any

from ds_hydra.strategy.schemes.scheme import Scheme

METRICS_FILE, TRACE_FILE = "metrics.jsonl", "trace.jsonl"
RUN_FILE, PROFILE_FILE = "run.json", "profile.json"
METRICS_SCHEMA = "ds_hydra.metrics/1"


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineMetrics:
    """Predicted and measured forward + backward time of one pipeline; measured is its slowest
    rank's.
    """

    scheme: Scheme
    ranks: tuple[int, ...]
    num_micro_batches: int
    num_tokens: int
    predicted_ms: float
    measured_ms: float
    prediction_error: float
    """Measured over predicted, minus 1; 0.0 without sequences."""
    profiled_ms: float | None
    """Predicted by the profile alone, without what measured times say of it; None where it has not
    the scheme.
    """

    def to_json(self) -> dict[str, Any]:
        """The metrics as a JSON object that begins with the options of the scheme."""
        fields = {name: getattr(self, name) for name in self.__slots__ if name != "scheme"}
        return {**self.scheme.to_json(), **fields}


@dataclass(frozen=True, slots=True, kw_only=True)
class IterationMetrics:
    """One line of `metrics.jsonl`, described field by field in docs/metrics.md. Times in
    milliseconds.
    """

    iteration: int
    loss: float
    strategy: str
    strategy_index: int
    """Position among the candidates, -1 for a forced strategy."""
    num_tokens: int
    num_sequences: int
    longest_tokens: int
    iteration_ms: float
    tokens_per_s: float
    """Tokens of sequences only; nothing is padded."""
    tflops_per_device: float
    """What the model needs for these sequences (`flops.py`); NaN where that is not counted."""
    mfu: float
    """The same over the device's peak in 16 bit; NaN where that is not known."""
    predicted_ms: float
    measured_ms: float
    """Forward + backward of the slowest pipeline."""
    prediction_error: float
    """measured over predicted, minus 1."""
    imbalance: float
    """Measured slowest over fastest pipeline, minus 1; pipelines without sequences are not
    counted.
    """
    bubble: float
    """Share of all ranks' time, until the slowest pipeline was done, outside of forwards and
    backwards.
    """
    pack_occupancy: float
    """Tokens over MaxLen of the micro-batches; NaN where the run has no profile."""
    balance_loss: float
    """The part of `loss` that balances experts."""
    expert_imbalance: float
    """Tokens of the most chosen expert over the mean of its layer, minus 1, in the worst layer; NaN
    without experts.
    """
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
    skipped_steps: int
    """Iterations so far whose gradient was NaN or Inf and changed no weight."""
    straggler: int | None
    """The rank whose pipelines have been slower than predicted for some iterations, if there is
    one.
    """
    trial_ms: float
    """How much longer than the best known strategy this one was expected to take; above 0.0 only
    where it was tried because it could be better.
    """
    trials_share: float
    """Part of the run's time that trials have cost so far."""
    learned: Mapping[str, float]
    """Factors between measured times and the profile's, known before this iteration, by what they
    are due to.
    """
    pipelines: tuple[PipelineMetrics, ...]

    def to_json(self) -> dict[str, Any]:
        """The metrics as a JSON object; what is not a number is null there."""
        values = {name: getattr(self, name) for name in self.__slots__}
        fields = {
            k: None if isinstance(v, float) and not isfinite(v) else v for k, v in values.items()
        }
        return {
            "schema": METRICS_SCHEMA,
            **fields,
            "pipelines": [p.to_json() for p in self.pipelines],
        }

    def monitor_events(self, num_samples: int) -> list[tuple[str, float, int]]:
        """What DeepSpeed's monitors (TensorBoard, W&B, CSV) get, at `num_samples` samples."""
        values = {
            "train_loss": self.loss,
            "tokens_per_s": self.tokens_per_s,
            "tflops_per_device": self.tflops_per_device,
            "mfu": self.mfu,
            "imbalance": self.imbalance,
            "bubble": self.bubble,
            "plan_wait_ms": self.waited_ms,
            "link_ms": self.visible_pull_ms + self.visible_push_ms,
            "prediction_error": self.prediction_error,
            "pack_occupancy": self.pack_occupancy,
            "expert_imbalance": self.expert_imbalance,
            "strategy": self.strategy_index,
        }
        return [
            (f"Train/Samples/{name}", value, num_samples)
            for name, value in values.items()
            if isfinite(value)
        ]


def describe_flops(tflops_per_device: float, mfu: float) -> str:
    """TFLOP/s, and MFU where the device's peak is known.

    >>> describe_flops(411.4, 0.416), describe_flops(0.0123, float("nan"))
    ('411 TFLOP/s, MFU 41.6%', '0.0123 TFLOP/s')
    """
    share = "" if isnan(mfu) else f", MFU {mfu:.1%}"
    return f"{tflops_per_device:.3g} TFLOP/s{share}"
