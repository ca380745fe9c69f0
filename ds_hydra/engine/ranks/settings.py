"""Comparison of settings between ranks: configuration, optimizer and schedule."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from typing import Any

import numpy as np
from deepspeed import DeepSpeedEngine
from torch import Tensor

from ds_hydra.configs.hydra_config import HydraConfig
from ds_hydra.engine.ranks.agreement import check_alike, run_together

_PATHS = ("run_dir", "profile", "tokenizer", "strategies", "faults.save_on_sigterm")


def comparable(config: HydraConfig) -> dict[str, Any]:
    """Settings that must be equal on all ranks, or some would wait for others. Files may lie
    elsewhere on each rank, and only rank 0 has planning processes.
    """
    values: dict[str, Any] = {}
    for key, value in config.model_dump(mode="json").items():
        inside = value if isinstance(value, dict) else {}
        values |= {f"{key}.{name}": of for name, of in inside.items()} or {key: value}
    del values["planner.num_workers"]
    values |= {key: "(a path)" for key in _PATHS if isinstance(values[key], str)}
    return {f"hydra.{key}": value for key, value in values.items()}


_SHOWN = (
    "steps_per_print", "wall_clock_breakdown", "memory_breakdown", "dump_state",
    "tensorboard", "wandb", "csv_monitor", "comet", "comms_logger", "flops_profiler",
)  # fmt: skip
"""Keys of a rank's output in DeepSpeed's config, which as a rule rank 0 alone has: not compared."""


def check_same_settings(engine: DeepSpeedEngine) -> None:
    """Raise PlanMismatchError, on all ranks, where one has other numbers than rank 0 in the model's
    configuration, in an adapter's, in DeepSpeed's, in the optimizer's groups or in the schedule:
    each would train its shards in its own way. Collective over all ranks.
    """
    values = run_together(partial(_settings_of, engine), engine.device)
    check_alike(dict(numbers_in(values, "")), engine.device)


def _settings_of(engine: DeepSpeedEngine) -> dict[str, Any]:
    scheduler = engine.lr_scheduler
    return {
        "model.config": engine.module.config.to_dict(),
        "peft_config": {
            k: v.to_dict() for k, v in getattr(engine.module, "peft_config", {}).items()
        },
        "deepspeed": {k: v for k, v in engine._config._param_dict.items() if k not in _SHOWN},
        "optimizer.param_groups": settings_of_groups(getattr(engine.optimizer, "param_groups", ())),
        "lr_scheduler": scheduler.state_dict() if hasattr(scheduler, "state_dict") else {},
    }


def settings_of_groups(groups: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Settings of an optimizer's `groups`, in the order of their names."""
    return [{key: group[key] for key in sorted(group) if key != "params"} for group in groups]


def numbers_in(value: Any, name: str) -> Iterator[tuple[str, float]]:
    """Yield the numbers inside of `value` with their places; texts may be places of files."""
    if isinstance(value, Mapping):
        for key, inside in value.items():
            yield from numbers_in(inside, f"{name}.{key}" if name else str(key))
    elif isinstance(value, list | tuple):
        for index, inside in enumerate(value):
            yield from numbers_in(inside, f"{name}[{index}]")
    elif isinstance(value, Tensor | np.ndarray | np.generic):
        yield from numbers_in(value.tolist(), name)
    elif isinstance(value, int | float):
        yield name, value


SAME_TO = 1e-6
"""Relative difference up to which numbers of ranks are equal: hosts with other libraries may differ
in the last digit.
"""


def digest_of_numbers(numbers: Iterable[tuple[str, float]]) -> float:
    """Return a digest of named numbers, of floats to seven digits, that a float64 holds exactly."""
    texts = [(name, f"{n:.7g}" if isinstance(n, float) else str(n)) for name, n in numbers]
    text = json.dumps(texts)
    return float(int.from_bytes(hashlib.sha256(text.encode()).digest()[:6], "little"))
