"""What DeepSpeed itself would refuse in its part of the JSON, found without ranks and without a
GPU.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from difflib import get_close_matches
from typing import Any

import torch
from deepspeed.ops.adam import FusedAdam
from deepspeed.runtime import lr_schedules
from deepspeed.runtime.config import DEEPSPEED_OPTIMIZERS, DeepSpeedConfig, DeepSpeedConfigError
from deepspeed.runtime.config_utils import DeepSpeedConfigModel
from pydantic import ValidationError

_SECTION_OF = {
    "DeepSpeedZeroConfig": "zero_optimization",
    "DeepSpeedBF16Config": "bf16",
    "DeepSpeedFP16Config": "fp16",
}
"""DeepSpeed's classes, as its errors call them, and the keys that users know."""

_ADAM_SWITCHES = frozenset(
    {"torch_adam", "adam_w_mode", "fused", "foreach", "maximize", "capturable"}
)
"""Parameters of AdamW that DeepSpeed or torch take beside those of the fused kernel."""


def find_deepspeed_problems(config: Mapping[str, Any]) -> list[str]:
    """Sentences on what DeepSpeed would refuse in `config`, the JSON without "hydra" and with all
    fill-ins.

    Values "auto" are left out. Covers DeepSpeed's own validation of its sections, and what it reads
    without validation and fails at while it builds them: optimizer and scheduler.
    """
    plain = {"train_micro_batch_size_per_gpu": 1, **_without_auto(config)}
    problems = [*_find_optimizer_problems(plain.get("optimizer"), config.get("optimizer"))]
    problems += _find_scheduler_problems(plain.get("scheduler"), config.get("scheduler"))
    try:
        DeepSpeedConfig(dict(plain))
    except ValidationError as error:
        problems += [_explain(error.title, details) for details in error.errors()]
    except (
        DeepSpeedConfigError, AssertionError, ValueError, TypeError, KeyError, AttributeError,
    ) as error:  # fmt: skip
        problems.append(f"DeepSpeed refuses the configuration: {error}")
    return problems


def _without_auto(config: Mapping[str, Any]) -> dict[str, Any]:
    return {
        key: _without_auto(value) if isinstance(value, Mapping) else value
        for key, value in config.items()
        if value != "auto"
    }


def _explain(title: str, details: Any) -> str:
    """One error of pydantic, with the key that was meant."""
    *path, key = [str(part) for part in details["loc"]] or [""]
    dotted = ".".join([_SECTION_OF.get(title, title), *path, key])
    if details["type"] != "extra_forbidden":
        return f"{dotted} is {details['input']!r}: {details['msg'].replace('Input should', 'it should')}"
    known = [] if path else _fields_of(title)
    nearest = get_close_matches(key, known, n=1, cutoff=0.6)
    hint = f"did you mean {nearest[0]!r}?" if nearest else f"it has {', '.join(known)}"
    return f"{dotted} is not a key of DeepSpeed; {hint}"


def _fields_of(title: str) -> list[str]:
    """Keys of the section that DeepSpeed's class `title` reads, aliases included."""
    for section in DeepSpeedConfigModel.__subclasses__():
        if section.__name__ == title:
            fields = section.model_fields
            return sorted(
                {name for key, field in fields.items() for name in (key, field.alias) if name}
            )
    return []


def _find_optimizer_problems(section: Any, written: Any) -> Iterator[str]:
    if section is None:
        return
    if not isinstance(section, Mapping) or not isinstance(section.get("params", {}), Mapping):
        yield f'optimizer is {section!r}, expected {{"type": "AdamW", "params": {{"lr": 1e-4}}}}'
        return
    name = section.get("type")
    known = [optimizer.lower() for optimizer in DEEPSPEED_OPTIMIZERS]
    if not isinstance(name, str) or (name.lower() not in known and not hasattr(torch.optim, name)):
        nearest = get_close_matches(str(name).lower(), known, n=1)
        hint = f"did you mean {nearest[0]!r}?" if nearest else f"DeepSpeed has {', '.join(known)}"
        yield f"optimizer.type is {name!r}, which neither DeepSpeed nor torch.optim has; {hint}"
    elif name.lower() in ("adam", "adamw"):
        accepted = {*_arguments(FusedAdam), *_arguments(torch.optim.AdamW), *_ADAM_SWITCHES}
        yield from _compare_params(
            "optimizer", section, written, dict.fromkeys(accepted, False), name
        )


def _find_scheduler_problems(section: Any, written: Any) -> Iterator[str]:
    if section is None:
        return
    if not isinstance(section, Mapping) or not isinstance(section.get("params", {}), Mapping):
        yield (
            f'scheduler is {section!r}, expected {{"type": "WarmupLR", "params": {{"warmup_num_steps": 100}}}}'
        )
        return
    name, known = section.get("type"), lr_schedules.VALID_LR_SCHEDULES
    if name in known:
        arguments = _arguments(getattr(lr_schedules, name))
        yield from _compare_params("scheduler", section, written, arguments, name)
    elif not isinstance(name, str) or not hasattr(torch.optim.lr_scheduler, name):
        nearest = get_close_matches(str(name), known, n=1)
        hint = f"did you mean {nearest[0]!r}?" if nearest else f"DeepSpeed has {', '.join(known)}"
        yield f"scheduler.type is {name!r}, which neither DeepSpeed nor torch has; {hint}"


def _arguments(constructor: Any) -> dict[str, bool]:
    """Arguments of `constructor` but the first (parameters or optimizer), and whether each must be
    given.
    """
    parameters = list(inspect.signature(constructor).parameters.values())[1:]
    return {p.name: p.default is inspect.Parameter.empty for p in parameters}


def _compare_params(
    key: str, section: Mapping[str, Any], written: Any, arguments: Mapping[str, bool], name: str
) -> Iterator[str]:
    """Parameters that `name` does not take, and those it needs; "auto" in `written` counts as
    given.
    """
    given = section.get("params", {})
    for param in given:
        if param not in arguments:
            nearest = get_close_matches(param, arguments, n=1, cutoff=0.5)
            hint = (
                f"did you mean {nearest[0]!r}?"
                if nearest
                else f"it takes {', '.join(sorted(arguments))}"
            )
            yield f"{key}.params.{param} is not a parameter of {name}; {hint}"
    for param, is_needed in arguments.items():
        if is_needed and param not in (written.get("params") or {}):
            yield f"{key}.params.{param} is missing, and {name} has no default for it"
