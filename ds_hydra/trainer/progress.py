"""The Trainer's progress bar, with strategy and tokens/s of the last iteration."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from transformers.trainer_callback import ProgressCallback

from ds_hydra.engine.telemetry.metrics import IterationMetrics


class StrategyProgressCallback(ProgressCallback):
    """transformers' progress bar; `last_metrics()` gives what it shows of the iteration."""

    def __init__(self, last_metrics: Callable[[], IterationMetrics | None]):
        super().__init__()
        self._last_metrics = last_metrics

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Show the iteration that has just ended."""
        super().on_step_end(args, state, control, **kwargs)
        metrics = self._last_metrics()
        if state.is_world_process_zero and metrics is not None:
            self.training_bar.set_postfix_str(
                f"{metrics.strategy} | {metrics.tokens_per_s:,.0f} tokens/s | loss {metrics.loss:.3f}"
            )
