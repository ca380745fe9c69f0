"""The metrics of an iteration: a line of `metrics.jsonl`, written, read and documented from one
dataclass; and the files of a run folder.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import islice
from math import inf, isfinite, isnan, nan
from typing import Any

from ds_hydra.configs import files
from ds_hydra.errors import HydraConfigError
from ds_hydra.strategy.schemes.placement import read_ranks
from ds_hydra.strategy.schemes.scheme import Scheme, Strategy

METRICS_FILE, TRACE_FILE = "metrics.jsonl", "trace.jsonl"
RUN_FILE, PROFILE_FILE = "run.json", "profile.json"
METRICS_SCHEMA = "ds_hydra.metrics/1"


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineMetrics:
    """One pipeline in one iteration. Times are forward + backward in ms, 0.0 without sequences."""

    scheme: Scheme
    ranks: tuple[int, ...]
    num_micro_batches: int = 0
    num_tokens: int
    predicted_ms: float
    measured_ms: float
    """Milliseconds of its slowest rank."""
    profiled_ms: float = nan
    """Predicted milliseconds by the profile alone, without corrections; NaN where it has not the
    scheme, or a run does not say.
    """

    @property
    def prediction_error(self) -> float:
        """Measured over predicted, minus 1; 0.0 without sequences."""
        is_known = self.measured_ms and self.predicted_ms
        return self.measured_ms / self.predicted_ms - 1 if is_known else 0.0

    def to_json(self) -> dict[str, Any]:
        """The metrics as a JSON object that begins with the options of the scheme."""
        fields = _write_fields(self)
        scheme = fields.pop("scheme").to_json()
        return {**scheme, **fields, "prediction_error": _null(self.prediction_error)}

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> PipelineMetrics:
        """The pipeline in one entry; raises as `IterationMetrics.from_json`."""
        scheme = Scheme.from_json(document)
        return cls(scheme=scheme, ranks=read_ranks(document, scheme), **_read_fields(cls, document))


@dataclass(frozen=True, slots=True, kw_only=True)
class IterationMetrics:
    """One line of `metrics.jsonl`. Times are milliseconds; what is not a number is `null` there
    and NaN here. A field with a default is one that an older version may not have written.
    """

    iteration: int
    """Number of the iteration, from 0 on, as in the plan."""
    loss: float
    """Mean over the label tokens of the global batch."""
    strategy: str
    """Text form of the executed strategy."""
    strategy_index: int = -1
    """Position among the candidates; -1 for a forced strategy, and for phases that the planner put
    together.
    """
    num_tokens: int
    """Tokens of the global batch."""
    num_sequences: int = 0
    """Sequences of the global batch."""
    longest_tokens: int = 0
    """Tokens of its longest sequence."""
    iteration_ms: float
    """Milliseconds from the call of `train_batch` to its metrics."""
    tokens_per_s: float
    """`num_tokens` over `iteration_ms`: useful tokens, nothing is padded."""
    tflops_per_device: float = nan
    """FLOPs that the model needs for these sequences, over
    `iteration_ms` and all ranks, in 10^12 a second; `null` where they are not counted.
    """
    mfu: float = nan
    """`tflops_per_device` over the device's peak in 16 bit; `null` on CPU ranks, in fp32, and for a
    device that no file of `ds_hydra/configs/hardware` names.
    """
    predicted_ms: float
    """Forward + backward of the slowest pipeline, as planned; by FLOP counts, which say nothing of
    time, where a strategy was forced that no profile knows.
    """
    measured_ms: float
    """Forward + backward of the slowest pipeline."""
    imbalance: float
    """Measured time of the slowest over the fastest pipeline with work, minus 1."""
    bubble: float = nan
    """Share of all ranks' time, until the slowest pipeline was done, that was spent outside of
    forwards and backwards: pipeline bubbles, waiting for slower pipelines, ranks without work. TP
    collectives count as work.
    """
    pack_occupancy: float = nan
    """Tokens over MaxLen of all executed micro-batches; `null` without a profile."""
    balance_loss: float = nan
    """The part of `loss` that balances experts."""
    expert_imbalance: float = nan
    """Tokens of the most chosen expert over the mean of its layer, minus 1, in the worst layer;
    `null` without experts.
    """
    lr: float = nan
    """Learning rate, as DeepSpeed reports it."""
    grad_norm: float = nan
    """Norm of the whole gradient before clipping, as DeepSpeed reports it."""
    planning_ms: float = 0.0
    """Time spent on the plan, beside training."""
    waited_ms: float = 0.0
    """Time this iteration waited for its plan."""
    pull_ms: float = 0.0
    """Time the link spent pulling, on the slowest rank, hidden behind computation or not."""
    push_ms: float = 0.0
    """Time the link spent pushing, on the rank that waited least for others."""
    visible_pull_ms: float = 0.0
    """Part of `pull_ms` that computation waited for, on the rank that waited longest."""
    visible_push_ms: float = 0.0
    """Milliseconds of push that were left when the last rank had computed its last gradient."""
    step_ms: float = 0.0
    """Optimizer step of rank 0."""
    skipped_steps: int = 0
    """Iterations so far whose gradient was NaN or Inf and changed no weight."""
    straggler: int | None = None
    """The rank whose pipelines have been slower than predicted for some iterations, if there is
    one.
    """
    learned: Mapping[str, float] = field(default_factory=dict)
    """Factors between measured times and the profile's, known before this iteration, by their
    cause: `machine`, `scheme <2,1>`.
    """
    pipelines: tuple[PipelineMetrics, ...]
    """Metrics of each pipeline: `tp`, `pp` (and the options of its scheme, `sp`, `ckpt`, ..., where
    set), `ranks`, `num_micro_batches`, `num_tokens`, `predicted_ms`, `measured_ms`,
    `prediction_error`, and `profiled_ms`, which the profile alone would have predicted (`null`
    without one).
    """

    @property
    def prediction_error(self) -> float:
        """`measured_ms / predicted_ms - 1`: 0.1 where it took 10% longer than planned."""
        return self.measured_ms / self.predicted_ms - 1 if self.predicted_ms > 0 else nan

    @property
    def profile_error(self) -> float:
        """The same of what the profile alone says; NaN where that is not known of all pipelines."""
        pipelines, slowest_ms = iter(self.pipelines), 0.0
        for phase in self.parsed_strategy.in_turn:
            busy = [p for p in islice(pipelines, len(phase.schemes)) if p.measured_ms > 0]
            slowest_ms += max((p.profiled_ms for p in busy if isfinite(p.profiled_ms)), default=0.0)
        is_known = all(isfinite(p.profiled_ms) for p in self.pipelines if p.measured_ms > 0)
        return self.measured_ms / slowest_ms - 1 if is_known and slowest_ms > 0 else nan

    @property
    def parsed_strategy(self) -> Strategy:
        """The strategy that `strategy` names."""
        return _parse_strategy(self.strategy)

    def to_json(self) -> dict[str, Any]:
        """The metrics as a JSON object; NaN and infinity are null there."""
        return {
            "schema": METRICS_SCHEMA,
            **_write_fields(self),
            "prediction_error": _null(self.prediction_error),
            "learned": dict(self.learned),
            "pipelines": [p.to_json() for p in self.pipelines],
        }

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> IterationMetrics:
        """The metrics in one line; raises KeyError or HydraConfigError for a line of another
        kind.
        """
        if document.get("schema", METRICS_SCHEMA) != METRICS_SCHEMA:
            raise HydraConfigError(
                f"its schema is {document['schema']!r}, this version reads {METRICS_SCHEMA!r}; use the version of "
                "ds_hydra that wrote the run"
            )
        found = _read_fields(cls, document)
        found["strategy"] = str(_parse_strategy(found["strategy"]))
        for hidden in ("pull_ms", "push_ms"):  # older versions hid nothing
            found.setdefault(f"visible_{hidden}", found.get(hidden, 0.0))
        if document.get("straggler") is not None:
            found["straggler"] = files.read_count(document, "straggler")
        return cls(
            learned=_read_factors(document),
            pipelines=tuple(
                PipelineMetrics.from_json(files.check_object(entry, "a pipeline"))
                for entry in files.read_list(document, "pipelines")
            ),
            **found,
        )

    def monitor_events(self, num_samples: int) -> list[tuple[str, float, int]]:
        """Events for DeepSpeed's monitors (TensorBoard, W&B, CSV), at `num_samples` samples."""
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


_parse_strategy = lru_cache(maxsize=4096)(Strategy.parse)


def _null(value: Any) -> Any:
    return None if isinstance(value, float) and not isfinite(value) else value


def _write_fields(metrics: PipelineMetrics | IterationMetrics) -> dict[str, Any]:
    return {f.name: _null(getattr(metrics, f.name)) for f in dataclasses.fields(metrics)}


def _read_fields(cls: type, document: Mapping[str, Any]) -> dict[str, Any]:
    """Read from `document` those fields of `cls` that are numbers or text. A field with a default
    may be missing or null, a loss null.
    """
    found: dict[str, Any] = {}
    for metric in dataclasses.fields(cls):
        name, is_optional = metric.name, metric.default is not dataclasses.MISSING
        if metric.type not in ("int", "float", "str") or (
            is_optional and document.get(name) is None
        ):
            continue
        if name == "loss" and document[name] is None:
            found[name] = nan
        elif metric.type == "str":
            found[name] = files.read_text(document, name)
        elif metric.type == "int":
            least = -1 if name == "strategy_index" else 0
            found[name] = files.read_count(document, name, least=least)
        elif name.endswith("_ms") or name == "tokens_per_s":
            found[name] = files.read_time(document, name)
        else:
            found[name] = files.read_number(document, name)
    return found


def _read_factors(document: Mapping[str, Any]) -> dict[str, float]:
    factors = files.check_object(document.get("learned") or {}, "learned")
    found = {str(name): files.read_number(factors, name) for name in factors}
    for name, factor in found.items():
        if not 0 < factor < inf:
            raise HydraConfigError(f"the factor {name!r} is {factor}, expected a number above 0")
    return found


def describe_flops(tflops_per_device: float, mfu: float) -> str:
    """TFLOP/s, and MFU where the device's peak is known.

    >>> describe_flops(411.4, 0.416), describe_flops(0.0123, float("nan"))
    ('411 TFLOP/s, MFU 41.6%', '0.0123 TFLOP/s')
    """
    share = "" if isnan(mfu) else f", MFU {mfu:.1%}"
    return f"{tflops_per_device:.3g} TFLOP/s{share}"
