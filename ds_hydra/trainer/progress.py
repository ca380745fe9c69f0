"""What the Trainer shows of iterations: counters for its log, strategy and tokens/s in its bar."""

from __future__ import annotations

import sys
from collections.abc import Callable
from math import isfinite
from typing import Any

from transformers.trainer_callback import ProgressCallback

from ds_hydra.progress import Progress
from ds_hydra.records.metrics import IterationMetrics, describe_flops


class StrategyProgressCallback(ProgressCallback):
    """transformers' progress bar; `last_metrics()` gives what it shows of the iteration."""

    def __init__(self, last_metrics: Callable[[], IterationMetrics | None]):
        super().__init__()
        self._last_metrics = last_metrics

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """As transformers; without a terminal some lines in place of the bar."""
        self.current_step = 0
        if state.is_world_process_zero:
            self.training_bar = Progress(total=state.max_steps, dynamic_ncols=True)

    def on_prediction_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """As transformers, where somebody looks on."""
        if sys.stderr.isatty():
            super().on_prediction_step(args, state, control, **kwargs)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Show the iteration that has just ended."""
        super().on_step_end(args, state, control, **kwargs)
        metrics = self._last_metrics()
        if state.is_world_process_zero and metrics is not None:
            parts = [metrics.strategy, f"{metrics.tokens_per_s:,.0f} tokens/s"]
            if isfinite(metrics.tflops_per_device):
                parts.append(describe_flops(metrics.tflops_per_device, metrics.mfu))
            parts.append(f"loss {metrics.loss:.3f}")
            self.training_bar.set_postfix_str(" | ".join(parts))


class Counters:
    """What was trained since some moment."""

    def __init__(self) -> None:
        self.num_iterations = self.num_sequences = self.num_tokens = 0
        self._ms = self._imbalance = self._tflop = self._mfu_ms = 0.0

    def add(self, metrics: IterationMetrics) -> None:
        """Count one iteration."""
        self.num_iterations += 1
        self.num_sequences += metrics.num_sequences
        self.num_tokens += metrics.num_tokens
        self._ms += metrics.iteration_ms
        self._imbalance += metrics.imbalance
        self._tflop += metrics.tflops_per_device * metrics.iteration_ms
        self._mfu_ms += metrics.mfu * metrics.iteration_ms

    def summary(self) -> dict[str, float]:
        """Numbers for the log; without those that are not known."""
        numbers = {
            "tokens_per_second": round(self.num_tokens / self._ms * 1e3, 1),
            "tflops_per_device": float(f"{self._tflop / self._ms:.4g}"),
            "mfu": round(self._mfu_ms / self._ms, 4),
            "imbalance": round(self._imbalance / self.num_iterations, 4),
        }
        return {name: value for name, value in numbers.items() if isfinite(value)}
