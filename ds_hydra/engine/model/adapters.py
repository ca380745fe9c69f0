"""LoRA adapters of `peft`: which ones run on pulled slices, and how a TP group shares their
weights.

[Note: LoRA under TP]
A LoRA layer computes W x + s B A x. Where W is cut by output features (colwise), B is cut like W
and every rank holds A, whose gradient is a sum over the ranks' rows of B. Where W is cut by input
features (rowwise), A is cut like W and every rank holds B, whose gradient is a sum over the ranks'
A x; the all-reduce after the layer sums W x and B A x alike. So an adapter needs no collective of
its own, and where W is cut with whole features outside the layer, these are exchanged outside of
both. A layer that every rank holds whole has an adapter of the same kind.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from ds_hydra.engine.parallel.tensor_parallel import PARTIAL, STYLES
from ds_hydra.engine.parallel.tp_sequence_parallel import COLUMN, ROW
from ds_hydra.errors import UnsupportedModelError

SUMMED = "lora_summed"
"""Style of the B of a row-wise layer: held by every rank, its outputs and gradients are summed over
the group.
"""


def unwrap_adapters(model: nn.Module) -> nn.Module:
    """The transformers model inside a `PeftModel`, its adapters in place; any other model as it is.

    Raises UnsupportedModelError naming the adapter that cannot be trained.
    """
    peft = sys.modules.get("peft")  # a model has no adapters unless someone has imported it
    if peft is None:
        return model
    if isinstance(model, peft.PeftModel):
        for name, config in model.peft_config.items():
            if config.peft_type != "LORA":
                kind = getattr(config.peft_type, "value", config.peft_type)
                raise UnsupportedModelError(
                    f"adapter {name!r} is of the PEFT type {kind}; ds_hydra trains LORA adapters (LoraConfig)"
                )
        model = model.get_base_model()
    for name, module in model.named_modules():
        if problem := _find_problem(module):
            raise UnsupportedModelError(f"adapter at {name}: {problem}")
    return model


def use_saved_modules(copied: nn.Module) -> None:
    """Put in `copied`, a copy that runs, what `modules_to_save` trains in the place of what it was
    made of, which then runs nowhere and is pulled by nobody.
    """
    for parent in list(copied.modules()):
        for name, child in list(parent._modules.items()):
            if child is not None and (adapter := find_saved_in_use(child)) is not None:
                saved: Any = child
                own = saved.modules_to_save[adapter] if adapter else saved.original_module
                parent._modules[name] = own


def find_saved_in_use(module: nn.Module) -> str | None:
    """Whose copy of a module in `modules_to_save` runs, "" for none; None for any other module."""
    peft = sys.modules.get("peft")
    if peft is None or not isinstance(module, peft.utils.other.ModulesToSaveWrapper):
        return None
    return next(iter(module.active_adapters), "") if not module.disable_adapters else ""


def is_lora(module: nn.Module) -> bool:
    """Whether `module` is a layer of `peft` with LoRA weights."""
    peft = sys.modules.get("peft")
    return peft is not None and isinstance(module, peft.tuners.lora.LoraLayer)


def check_head(head: nn.Module) -> None:
    """Raise UnsupportedModelError for an adapter at the output head."""
    if is_lora(head):
        raise UnsupportedModelError(
            "adapter at the output head: ds_hydra cuts the head by vocabulary and has no rule for an adapter "
            "there; leave it out of LoraConfig.target_modules"
        )


def split_style(module: nn.Module, style: str) -> Iterator[tuple[nn.Module, str]]:
    """The modules that hold the parameters of `module`, each with its style (see [Note: LoRA under
    TP]).
    """
    if not is_lora(module):
        yield module, style
        return
    side = STYLES[style].side if style in STYLES else ""
    lora_a, lora_b = {COLUMN: (PARTIAL, style), ROW: (style, SUMMED)}.get(side, (style, style))
    parts = {"base_layer": style, "lora_A": lora_a, "lora_B": lora_b}
    for part, part_style in parts.items():
        for child in getattr(module, part).modules():
            yield child, part_style


def _find_problem(module: nn.Module) -> str | None:
    """Why `module` cannot be trained, if it belongs to `peft`."""
    peft: Any = sys.modules["peft"]
    if isinstance(module, peft.utils.other.ModulesToSaveWrapper):
        return None
    if isinstance(module, peft.utils.other.AuxiliaryTrainingWrapper):
        return (
            f"{type(module).__name__} (trainable_token_indices) replaces rows of a table that ranks share by rows; "
            "train the whole table: modules_to_save=['embed_tokens'] in LoraConfig"
        )
    if not isinstance(module, peft.tuners.tuners_utils.BaseTunerLayer):
        return None
    if type(module) is not peft.tuners.lora.Linear or type(module.base_layer) is not nn.Linear:
        inner = type(getattr(module, "base_layer", module)).__name__
        return (
            f"{type(module).__module__.rsplit('.', 1)[-1]}.{type(module).__name__} on a {inner} is not supported; "
            "set target_modules to names of unquantised nn.Linear layers (target_modules=['q_proj', 'v_proj']), "
            "without those of experts and routers"
        )
    if module.lora_variant:
        variants = sorted({type(v).__name__ for v in module.lora_variant.values()})
        return (
            f"{', '.join(variants)} is not supported; use plain LoRA (for example use_dora=False)"
        )
    if module.merged:
        return (
            "the adapter is merged into the weights; call model.unmerge_adapter() before training"
        )
    return None


def unify_adapter_dtype(model: nn.Module, note: Callable[[str], None]) -> None:
    """Cast adapters that `peft` keeps in fp32 beside 16-bit weights: ZeRO-3 has fp32 masters of
    them anyway.
    """
    inner = unwrap_adapters(model)
    dtypes = {p.dtype for p in inner.parameters() if not p.requires_grad}
    mixed = [p for p in inner.parameters() if p.requires_grad and p.dtype not in dtypes]
    if len(dtypes) == 1 and dtypes != {torch.float32} and mixed:
        (dtype,) = dtypes
        note(
            f"adapters are cast from {mixed[0].dtype} to {dtype}; the optimizer keeps fp32 copies of them"
        )
        for param in mixed:
            param.data = param.data.to(dtype)
