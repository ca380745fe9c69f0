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
import types
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from torch import nn

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


def check_patches(model: nn.Module, *, is_compiled: bool) -> None:
    """Raise UnsupportedModelError where Liger has patched `model` and none of its kernels runs
    here; say on the first rank what takes the place of its loss, and what compiled layers cost.
    """
    if not is_patched(model):
        return
    if get_accelerator().device_name() == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
        raise UnsupportedModelError(
            f"{type(model).__name__} is patched by Liger, whose Triton kernels do not run on a CPU; leave out "
            "use_liger_kernel or apply_liger_kernel_to_*"
        )
    _keep_out_of_graphs()
    is_first = not dist.is_initialized() or dist.get_rank() == 0
    if is_first and is_of_liger(model.forward):
        logger.warning(
            "%s has Liger's fused linear cross-entropy, in whose place ds_hydra computes its own; Liger's norms, "
            "rotary embedding and activations run",
            type(model).__name__,
        )
    if is_first and is_compiled:
        logger.warning(
            "%s has Liger's layers, whose kernels cut the graphs of hydra.compile_layers: both were slower than either "
            "where they were measured (docs/speed-on-a-gpu.md); leave out use_liger_kernel, or set "
            "hydra.compile_layers to false",
            type(model).__name__,
        )


def _keep_out_of_graphs() -> None:
    """Let compiled layers call each kernel of Liger, and functions that name one, as they are:
    torch 2.11's compiler fails where it looks into a kernel, and any into Triton's interpreter. The
    numbers that a function hands to its kernel would be a graph of their own, whose kernel for the
    CPU a compiler of C++ builds for more than a minute.
    """
    kernels = list(_kernels_of(torch.autograd.Function))
    for kernel in kernels:
        kernel.forward = staticmethod(_kept_out(kernel.forward))
    names = {kernel.__name__ for kernel in kernels}
    files = [file for name, file in sys.modules.items() if name.partition(".")[0] == _PACKAGE]
    for file in files:
        for name, function in list(vars(file).items()):
            is_plain = isinstance(function, types.FunctionType) and is_of_liger(function)
            if is_plain and names.intersection(function.__code__.co_names):
                setattr(file, name, _kept_out(function))


def _kernels_of(kind: Any) -> Iterator[Any]:
    """Kernels of Liger among the subclasses of `kind`, direct and indirect."""
    for function in kind.__subclasses__():
        if is_of_liger(function):
            yield function
        yield from _kernels_of(function)


def _kept_out(function: Any) -> Any:
    """`function`, which torch's compiler calls as it is; one that is kept out already stays."""
    is_kept_out = hasattr(function, "_torchdynamo_disable")
    return function if is_kept_out else torch.compiler.disable(function)


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
