"""Models that engines hold: each has one at a time, and gets its modules back in the end."""

from __future__ import annotations

import contextlib
import logging
import weakref
from collections.abc import Iterator
from typing import Any

import torch.distributed as dist
from deepspeed.runtime.zero import parameter_offload
from deepspeed.runtime.zero.partitioned_param_coordinator import PartitionedParameterCoordinator
from torch import nn

from ds_hydra.engine.model.adapters import refuse_empty_merges
from ds_hydra.engine.model.in_place import is_of_deepspeed
from ds_hydra.errors import HydraConfigError

logger = logging.getLogger(__name__)

_modules_of_engines: weakref.WeakSet[nn.Module] = weakref.WeakSet()
_told_of_empty: weakref.WeakSet[nn.Module] = weakref.WeakSet()
_are_shards_saved = False
"""Whether shards are saved beside the dictionary of empty weights that is asked for."""


def hold(model: nn.Module) -> None:
    """Note that an engine starts on `model`; DeepSpeed wants its weights in one piece."""
    for param in model.parameters():
        if not param.is_contiguous():  # an SVD has made it
            param.data = param.data.contiguous()
    _modules_of_engines.update(model.modules())
    refuse_empty_merges()
    if _tell_of_empty not in model._state_dict_pre_hooks.values():
        model.register_state_dict_pre_hook(_tell_of_empty)


@contextlib.contextmanager
def saving_shards() -> Iterator[None]:
    """Announce no state dictionary of empty weights inside."""
    global _are_shards_saved
    _are_shards_saved = True
    try:
        yield
    finally:
        _are_shards_saved = False


def _tell_of_empty(model: nn.Module, *_: Any) -> None:
    params = [*model.parameters()]
    trained = [param for param in params if param.requires_grad] or params  # as adapters are saved
    is_empty = any(param.numel() == 0 and getattr(param, "ds_numel", 0) for param in trained)
    is_told = model in _told_of_empty or _are_shards_saved
    if is_empty and not is_told and dist.is_initialized() and dist.get_rank() == 0:
        _told_of_empty.add(model)
        logger.warning(
            "weights in this state_dict() or save_pretrained() are empty, because ZeRO-3 has them in shards; save with "
            "engine.save_16bit_model or trainer.save_model, or inside deepspeed.zero.GatheredParameters"
        )


def let_go(model: nn.Module) -> None:
    """Take away what DeepSpeed leaves on modules and parameters, and in tables, of a destroyed
    engine, or of one whose start failed: it holds the engine, fp32 copies and states, and gathers
    parameters for it. Its weights stay in shards, so empty ones are still announced.
    """
    parameter_offload.FWD_MODULE_STACK[:] = [
        module for module in parameter_offload.FWD_MODULE_STACK if module is not model
    ]
    for module in model.modules():
        module._parameters = dict(module._parameters.items())
        for hooks in (module._forward_pre_hooks, module._forward_hooks):
            of_deepspeed = [key for key, hook in hooks.items() if is_of_deepspeed(hook)]
            for key in of_deepspeed:
                del hooks[key]
        _modules_of_engines.discard(module)
    for param in model.parameters():
        vars(param).pop("_z3_optimizer", None)
    # A table of DeepSpeed's, by engine and module, of what forward passes of its own release
    for method in vars(PartitionedParameterCoordinator).values():
        for cell in getattr(method, "__closure__", None) or ():
            getattr(cell.cell_contents, "cache_clear", lambda: None)()


def check_free(model: Any) -> None:
    """Raise HydraConfigError unless `model` is a module that no engine holds."""
    if not isinstance(model, nn.Module):
        raise HydraConfigError(
            f"model is {model!r}, expected a torch.nn.Module; load it first: "
            f"AutoModelForCausalLM.from_pretrained({str(model)!r})"
        )
    if any(module in _modules_of_engines for module in model.modules()):
        raise HydraConfigError(
            f"an engine holds this {type(model).__name__} (or a part of it), and ZeRO-3 has its parameters; go on with "
            "that engine, call its destroy() first (trainer.engine.destroy() of a Trainer), or load the model anew"
        )
