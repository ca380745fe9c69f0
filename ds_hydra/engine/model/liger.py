"""Models that Liger has patched (`liger_kernel.transformers`): where their kernels run, what takes
the place of Liger's loss, and models that Liger does not know.

Norms, rotary embedding and activations of Liger run as layers of any other code do. Its fused
linear cross-entropy needs the whole head and is never called, because stages ask the model's
forward for logits.
"""

from __future__ import annotations

import inspect
import logging
import os
import sys
from collections.abc import Mapping
from typing import Any

import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from torch import nn

from ds_hydra.configs.hydra_config import HydraConfig
from ds_hydra.errors import HydraConfigError, UnsupportedModelError

logger = logging.getLogger(__name__)

_PACKAGE = "liger_kernel"
_LOSSES = ("cross_entropy", "fused_linear_cross_entropy")
"""Switches of Liger's losses, which ours takes the place of."""


def is_of_liger(function: Any) -> bool:
    """Whether Liger has defined `function`."""
    return (getattr(function, "__module__", None) or "").partition(".")[0] == _PACKAGE


def is_patched(model: nn.Module) -> bool:
    """Whether some module of `model`, or a function of its family's file, is of Liger."""
    if any(is_of_liger(module.forward) for module in model.modules()):
        return True
    files = {type(module).__module__ for module in model.modules()}
    functions = (vars(sys.modules[name]).values() for name in files if name in sys.modules)
    return any(is_of_liger(value) for of_file in functions for value in of_file if callable(value))


def check_patches(model: nn.Module) -> None:
    """Raise UnsupportedModelError where Liger has patched `model` and none of its kernels runs
    here; say on the first rank what takes the place of its loss.
    """
    if not is_patched(model):
        return
    if get_accelerator().device_name() == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
        raise UnsupportedModelError(
            f"{type(model).__name__} is patched by Liger, whose Triton kernels do not run on a CPU; leave out "
            "use_liger_kernel or apply_liger_kernel_to_*"
        )
    if is_of_liger(model.forward):
        _say(
            "%s has Liger's fused linear cross-entropy, in whose place ds_hydra computes its own; Liger's norms, "
            "rotary embedding and activations run",
            model,
        )


def choose_layers(config: HydraConfig, model: nn.Module) -> HydraConfig:
    """`config` without compiled layers where Liger has patched `model`: its kernels cut their
    graphs, and both together were slower than either.
    """
    if not config.compile_layers or not is_patched(model):
        return config
    _say(
        "%s has Liger's layers, so hydra.compile_layers has no effect: both together were slower than either "
        "(docs/speed-on-a-gpu.md); for compiled layers leave out use_liger_kernel",
        model,
    )
    return config.model_copy(update={"compile_layers": False})


def _say(text: str, model: nn.Module) -> None:
    if not dist.is_initialized() or dist.get_rank() == 0:
        logger.warning(text, type(model).__name__)


def complete_settings(model: Any, settings: Mapping[str, Any] | None) -> dict[str, Any]:
    """`liger_kernel_config` with which transformers patches `model`: `settings` without Liger's
    losses.

    Raises HydraConfigError where Liger is not there, or does not know the model or one of the
    settings: Liger itself would leave them out without a word.
    """
    try:
        from liger_kernel.transformers.monkey_patch import MODEL_TYPE_TO_APPLY_LIGER_FN as known
    except ImportError as error:
        raise HydraConfigError(
            f"use_liger_kernel=True: liger-kernel cannot be imported ({error}); pip install liger-kernel, or leave "
            "it out"
        ) from error
    kind = getattr(getattr(model, "config", None), "model_type", None)
    if kind not in known:
        raise HydraConfigError(
            f"use_liger_kernel=True: Liger has no kernels for models of type {kind!r}; leave it out and set "
            f"hydra.compile_layers (it knows {', '.join(sorted(known))})"
        )
    switches = [n for n in inspect.signature(known[kind]).parameters if n != "model"]
    if unknown := [name for name in settings or {} if name not in (*switches, *_LOSSES)]:
        raise HydraConfigError(
            f"liger_kernel_config has {', '.join(map(repr, unknown))}, which Liger does not take for models of type "
            f"{kind!r}; it takes {', '.join(switches)}"
        )
    off = {name: False for name in _LOSSES if name in switches}
    return {**(settings or {}), **off}
