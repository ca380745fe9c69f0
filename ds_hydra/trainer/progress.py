"""What the Trainer shows of iterations: counters for its log, strategy and tokens/s in its bar."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from transformers.trainer_callback import ProgressCallback

from ds_hydra.engine.telemetry.metrics import IterationMetrics
from ds_hydra.progress import Progress


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
            self.training_bar.set_postfix_str(
                f"{metrics.strategy} | {metrics.tokens_per_s:,.0f} tokens/s | loss {metrics.loss:.3f}"
            )


class Counters:
    """What was trained since some moment."""

    def __init__(self) -> None:
        self.num_iterations = self.num_sequences = self.num_tokens = 0
        self._ms = self._imbalance = 0.0

    def add(self, metrics: IterationMetrics) -> None:
        """Count one iteration."""
        self.num_iterations += 1
        self.num_sequences += metrics.num_sequences
        self.num_tokens += metrics.num_tokens
        self._ms += metrics.iteration_ms
        self._imbalance += metrics.imbalance

    def summary(self) -> dict[str, float]:
        """Numbers for the log."""
        return {
            "tokens_per_second": round(self.num_tokens / self._ms * 1e3, 1),
            "imbalance": round(self._imbalance / self.num_iterations, 4),
        }
