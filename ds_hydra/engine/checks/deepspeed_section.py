"""Errors that DeepSpeed itself would raise for its part of the JSON, found without ranks and
without a GPU.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator, Mapping, Sequence
from difflib import get_close_matches
from typing import Any, get_args

import torch
from deepspeed.ops.adam import FusedAdam
from deepspeed.runtime import lr_schedules
from deepspeed.runtime.config import DEEPSPEED_OPTIMIZERS, DeepSpeedConfig, DeepSpeedConfigError
from deepspeed.runtime.config_utils import DeepSpeedConfigModel
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.zero.utils import ZERO_SUPPORTED_OPTIMIZERS
from deepspeed.utils.logging import log_levels
from pydantic import BaseModel, ValidationError

from ds_hydra.configs.ds_config import find_key
from ds_hydra.errors import HydraConfigError

_SECTION_OF = {
    "DeepSpeedZeroConfig": "zero_optimization",
    "DeepSpeedBF16Config": "bf16",
    "DeepSpeedFP16Config": "fp16",
    "DeepSpeedZeroOffloadOptimizerConfig": "zero_optimization.offload_optimizer",
    "DeepSpeedZeroOffloadParamConfig": "zero_optimization.offload_param",
    "CompileConfig": "compile",
    "CommsLoggerConfig": "comms_logger",
    "DeepSpeedFlopsProfilerConfig": "flops_profiler",
    "TensorBoardConfig": "tensorboard",
    "WandbConfig": "wandb",
    "CSVConfig": "csv_monitor",
    "CometConfig": "comet",
    "DeepSpeedMonitorConfig": "",
}
"""DeepSpeed's classes, as its errors call them, and the keys that users know."""

_ADAM_SWITCHES = frozenset(
    {"torch_adam", "adam_w_mode", "fused", "foreach", "maximize", "capturable"}
)
"""Parameters of AdamW that DeepSpeed or torch take beside those of the fused kernel."""


_EXAMPLES = {
    "optimizer": '{"type": "AdamW", "params": {"lr": 1e-4}}',
    "scheduler": '{"type": "WarmupLR", "params": {"warmup_num_steps": 100}}',
}


def find_deepspeed_problems(config: Mapping[str, Any]) -> list[str]:
    """Sentences on all that DeepSpeed would refuse in `config`, the JSON without "hydra" and with
    all fill-ins.

    Values "auto" are left out. Covers DeepSpeed's own validation of its sections, and what it reads
    without validation and fails at while it builds them.
    """
    plain = {"train_micro_batch_size_per_gpu": 1, **_without_auto(config)}
    problems = [*find_unbuildable(config)]
    if (level := plain.get("log_level")) is not None and str(level).lower() not in log_levels:
        problems.append(f"log_level is {level!r}, expected one of {', '.join(log_levels)}")
    if problems:  # DeepSpeed would say the same in other words
        plain = {key: plain[key] for key in plain.keys() - {"optimizer", "scheduler", "log_level"}}
    try:
        DeepSpeedConfig(dict(plain))
    except ValidationError as error:
        problems += [_explain(error.title, details) for details in error.errors()]
    except (
        DeepSpeedConfigError, AssertionError, ValueError, TypeError, KeyError, AttributeError,
    ) as error:  # fmt: skip
        problems.append(f"DeepSpeed refuses the configuration: {error}")
    return problems


def find_unbuildable(config: Mapping[str, Any]) -> Iterator[str]:
    """Find reasons that the optimizer and scheduler of `config` cannot be built, or lose values."""
    plain, sections = _without_auto(config), {}
    for key, example in _EXAMPLES.items():
        if (section := plain.get(key)) is None:
            continue
        params: Any = None
        if isinstance(section, Mapping):  # without any DeepSpeed builds an optimizer alone
            params = section.get("params", {} if key == "optimizer" else None)
        if not isinstance(params, Mapping):
            yield f"{key} is {section!r}, expected {example}"
            continue
        sections[key] = section
        for name, value in params.items():
            if isinstance(value, str) and _is_number(value):
                yield f"{key}.params.{name} is {value!r}, a text; write the number without quotes"
    if "optimizer" in sections:
        yield from _find_optimizer_problems(plain, config["optimizer"])
    if "scheduler" in sections:
        yield from _find_scheduler_problems(sections["scheduler"], config["scheduler"])


def check_buildable(config: Mapping[str, Any]) -> None:
    """Raise HydraConfigError with the sentences of `find_unbuildable`."""
    if problems := [*find_unbuildable(config)]:
        raise HydraConfigError("; ".join(problems))


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _without_auto(config: Mapping[str, Any]) -> dict[str, Any]:
    return {
        key: _without_auto(value) if isinstance(value, Mapping) else value
        for key, value in config.items()
        if value != "auto"
    }


def _explain(title: str, details: Any) -> str:
    """One error of pydantic, with the key that was meant."""
    *path, key = [str(part) for part in details["loc"]] or [""]
    dotted = ".".join(filter(None, [_SECTION_OF.get(title, title), *path, key]))
    if details["type"] != "extra_forbidden":
        given = details["input"]
        # Of what several fields have to do with each other DeepSpeed hands on all of them.
        found = "" if isinstance(given, BaseModel) or not key else f" is {given!r}"
        return f"{dotted}{found}: {details['msg'].replace('Input should', 'it should')}"
    known = _fields_of(title, path)
    has = f"it has {', '.join(known)}" if known else "remove it"
    return f"{dotted} is not a key of DeepSpeed; {_hint(key, known, has)}"


def _hint(name: str, known: Iterable[str], otherwise: str, *, cutoff: float = 0.6) -> str:
    """The one of `known` that is nearest to `name`, or `otherwise`."""
    nearest = get_close_matches(name, known, n=1, cutoff=cutoff)
    return f"did you mean {nearest[0]!r}?" if nearest else otherwise


def _fields_of(title: str, path: Sequence[str]) -> list[str]:
    """Keys of the section at `path` that DeepSpeed's class `title` reads, aliases included."""
    kinds = {kind.__name__: kind for kind in _subclasses(DeepSpeedConfigModel)}
    kind: Any = kinds.get(title)
    for name in path:
        field = kind.model_fields.get(name) if kind is not None else None
        options = (field.annotation, *get_args(field.annotation)) if field is not None else ()
        kind = next((o for o in options if isinstance(o, type) and issubclass(o, BaseModel)), None)
    if kind is None:
        return []
    fields = kind.model_fields.items()
    return sorted({name for key, field in fields for name in (key, field.alias) if name})


def _subclasses(kind: type[Any]) -> Iterator[type[Any]]:
    for below in kind.__subclasses__():
        yield below
        yield from _subclasses(below)


def _find_optimizer_problems(config: Mapping[str, Any], written: Any) -> Iterator[str]:
    section = config["optimizer"]
    name = section.get("type")
    known = [optimizer.lower() for optimizer in DEEPSPEED_OPTIMIZERS]
    of_torch = getattr(torch.optim, name, None) if isinstance(name, str) else None
    if not isinstance(of_torch, type) or of_torch is torch.optim.Optimizer:
        of_torch = None
    if not isinstance(name, str) or (name.lower() not in known and of_torch is None):
        hint = _hint(str(name).lower(), known, f"DeepSpeed has {', '.join(known)}")
        if same := [o for o in dir(torch.optim) if o.lower() == str(name).lower() and o != name]:
            hint = f"did you mean {same[0]!r}?"  # torch's names are those of classes
        yield f"optimizer.type is {name!r}, which neither DeepSpeed nor torch.optim has; {hint}"
    elif name.lower() in ("adam", "adamw"):
        accepted = _arguments(FusedAdam) | _arguments(torch.optim.AdamW)
        accepted = dict.fromkeys([*accepted, *_ADAM_SWITCHES], False)
        yield from _compare_params("optimizer", section, written, accepted, name)
    elif name.lower() == "muon":
        halves = {*DeepSpeedEngine._MUON_HALF_KEYS, *DeepSpeedEngine._ADAM_HALF_KEYS}
        switches = ("muon_lr", "adam_lr", "torch_adam", "adam_w_mode")
        accepted = dict.fromkeys([*halves, *switches], False)
        yield from _compare_params("optimizer", section, written, accepted, name)
        if find_key(config, "zero_optimization.reduce_scatter") is not False:
            yield "zero_optimization.reduce_scatter has to be false where the optimizer is Muon"
    elif name == "LBFGS":
        yield "optimizer.type is 'LBFGS', which computes the loss several times in a step; take another one"
    elif of_torch is not None and name.lower() not in known:
        yield from _compare_params("optimizer", section, written, _arguments(of_torch), name)
        is_allowed = config.get("zero_allow_untested_optimizer")
        if not is_allowed and of_torch not in ZERO_SUPPORTED_OPTIMIZERS:
            yield (
                f"optimizer.type is {name!r}, which DeepSpeed has not tested with ZeRO: set "
                "zero_allow_untested_optimizer to true"
            )


def _find_scheduler_problems(section: Any, written: Any) -> Iterator[str]:
    name, known = section.get("type"), lr_schedules.VALID_LR_SCHEDULES
    if name in known:
        arguments = _arguments(getattr(lr_schedules, name))
        yield from _compare_params("scheduler", section, written, arguments, name)
    elif not isinstance(name, str) or not hasattr(torch.optim.lr_scheduler, name):
        hint = _hint(str(name), known, f"DeepSpeed has {', '.join(known)}")
        yield f"scheduler.type is {name!r}, which neither DeepSpeed nor torch has; {hint}"
    else:
        yield (
            f"scheduler.type is {name!r}, which torch builds for optimizers of its own alone; give ds_hydra.initialize "
            f"lr_scheduler=lambda optimizer: torch.optim.lr_scheduler.{name}(optimizer, ...), or a Trainer "
            "lr_scheduler_type"
        )


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
            hint = _hint(param, arguments, f"it takes {', '.join(sorted(arguments))}", cutoff=0.5)
            if param == "max_grad_norm":  # of old optimizers of DeepSpeed
                hint = 'write "gradient_clipping" beside "optimizer"'
            yield f"{key}.params.{param} is not a parameter of {name}; {hint}"
    for param, is_needed in arguments.items():
        if is_needed and param not in (written.get("params") or {}):
            yield f"{key}.params.{param} is missing, and {name} has no default for it"
