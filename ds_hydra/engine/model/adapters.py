"""LoRA adapters of `peft` on pulled slices.

[Note: LoRA under TP]
A LoRA layer computes W x + s B A x. Where W is cut by output features (colwise), B is cut like W
and every rank holds A, whose gradient is a sum over the ranks' rows of B. Where W is cut by input
features (rowwise), A is cut like W and every rank holds B, whose gradient is a sum over the ranks'
A x; the all-reduce after the layer sums W x and B A x alike. So an adapter needs no collective of
its own, and where W is cut with whole features outside the layer, these are exchanged outside of
both. A layer that every rank holds whole has an adapter of the same kind.
"""

from __future__ import annotations

import contextlib
import functools
import re
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from ds_hydra.engine.parallel.tensor_parallel import COLUMN, PARTIAL, ROW, STYLES
from ds_hydra.errors import HydraConfigError, UnsupportedModelError

SUMMED = "lora_summed"
"""Style of the B of a row-wise layer: held by every rank, its outputs and gradients are summed over
the group.
"""


@contextlib.contextmanager
def with_resting_adapters(model: nn.Module) -> Iterator[None]:
    """Count weights of adapters of a `PeftModel` that are not trained, as of one that is not
    active, as trained inside: their files would get the active one's weights.
    """
    adapters = getattr(model, "peft_config", {}).keys()
    resting = [
        param
        for name, param in model.named_parameters()
        if not param.requires_grad and _adapter_of(name) in adapters
    ]
    for param in resting:
        param.requires_grad_(True)
    try:
        yield
    finally:
        for param in resting:
            param.requires_grad_(False)


def _adapter_of(name: str) -> str:
    """Name of the adapter that has the parameter; "" of the model's own."""
    found = re.search(r"\.(?:lora_\w+|modules_to_save)\.(\w+)", name)
    return found[1] if found else ""


def unwrap_adapters(model: nn.Module) -> nn.Module:
    """Return the transformers model inside a `PeftModel`, adapters in place; another as it is.

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
    if isinstance(model, peft.PeftModel | peft.PeftMixedModel | peft.tuners.tuners_utils.BaseTuner):
        raise UnsupportedModelError(
            f"the model, or what it wraps, is a {type(model).__name__}; pass what get_peft_model(model, LoraConfig()) "
            "returns of a plain model, without mixed=True; model.add_adapter(name, config) adds another adapter"
        )
    for name, module in model.named_modules():
        if problem := _find_problem(module):
            raise UnsupportedModelError(f"adapter at {name}: {problem}")
    return model


def use_saved_modules(model: nn.Module) -> None:
    """Replace modules by their trained versions of `modules_to_save`. The replaced ones run nowhere
    and are pulled by nobody.
    """
    for parent in list(model.modules()):
        for name, child in list(parent._modules.items()):
            if child is not None and (adapter := find_saved_in_use(child)) is not None:
                saved: Any = child
                own = saved.modules_to_save[adapter] if adapter else saved.original_module
                parent._modules[name] = own


def find_saved_in_use(module: nn.Module) -> str | None:
    """Name of the adapter whose copy in `modules_to_save` runs, "" for none; None without
    copies.
    """
    peft = sys.modules.get("peft")
    if peft is None or not isinstance(module, peft.utils.other.ModulesToSaveWrapper):
        return None
    return next(iter(module.active_adapters), "") if not module.disable_adapters else ""


def is_lora(module: nn.Module) -> bool:
    """Whether `module` is a layer of `peft` with LoRA weights."""
    peft = sys.modules.get("peft")
    return peft is not None and isinstance(module, peft.tuners.lora.LoraLayer)


def is_linear(module: Any) -> bool:
    """Whether `module` is a linear layer of torch, or one that torchao has converted to 8 bits."""
    return type(module) is nn.Linear or is_converted(module)


def is_converted(module: nn.Module) -> bool:
    """Whether torchao's `convert_to_float8_training` has made `module`."""
    torchao = sys.modules.get("torchao.float8.float8_linear")
    return torchao is not None and type(module) is torchao.Float8Linear


def check_head(head: nn.Module) -> None:
    """Raise UnsupportedModelError for an adapter at the output head."""
    if is_lora(head):
        raise UnsupportedModelError(
            "adapter at the output head: ds_hydra cuts the head by vocabulary and has no rule for an adapter "
            "there; leave it out of LoraConfig.target_modules"
        )


def split_style(module: nn.Module, style: str) -> Iterator[tuple[nn.Module, str]]:
    """Find the modules that hold the parameters of `module`, each with its style (see [Note: LoRA
    under TP]).
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
    """Reason that `module`, of `peft` or not, cannot be trained; None where it can."""
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
    if type(module) is not peft.tuners.lora.Linear or not is_linear(module.base_layer):
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


def refuse_empty_merges() -> None:
    """Let `peft` raise HydraConfigError where it would merge weights that ZeRO-3 has in shards: the
    product of empty weights adds nothing, in silence.
    """
    peft: Any = sys.modules.get("peft")
    if peft is None or hasattr(peft.tuners.lora.Linear.get_delta_weight, "__wrapped__"):
        return
    product = peft.tuners.lora.Linear.get_delta_weight

    @functools.wraps(product)
    def checked(layer: Any, adapter: str) -> Any:
        weights = (
            layer.lora_A[adapter].weight,
            layer.lora_B[adapter].weight,
            layer.base_layer.weight,
        )
        if any(not weight.numel() and getattr(weight, "ds_numel", 0) for weight in weights):
            raise HydraConfigError(
                "this adapter cannot be merged here: ZeRO-3 has its weights in shards, also after destroy(); save it "
                "(trainer.save_model) and merge in one process (PeftModel.from_pretrained(model, folder)"
                ".merge_and_unload()), or merge and save inside "
                "deepspeed.zero.GatheredParameters(list(model.parameters()))"
            )
        return product(layer, adapter)

    peft.tuners.lora.Linear.get_delta_weight = checked


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


def check_optimizer(optimizer: Any) -> None:
    """Raise HydraConfigError for an optimizer of `peft` that is made for whole matrices."""
    if type(optimizer).__name__ == "LoraFAOptimizer":
        raise HydraConfigError(
            "LoraFAOptimizer looks for the matrices A and B of each adapter, and ZeRO-3 gives it flat shards, which it "
            "would step otherwise; freeze A (requires_grad_(False) on every lora_A) and take torch.optim.AdamW"
        )


def check_trains(model: nn.Module) -> None:
    """Raise HydraConfigError where no parameter of `model` can be trained."""
    if any(param.requires_grad for param in model.parameters()):
        return
    configs = getattr(model, "peft_config", {})
    is_loaded = any(getattr(config, "inference_mode", False) for config in configs.values())
    what = (
        "its adapters were loaded for inference: pass is_trainable=True to PeftModel.from_pretrained"
        if is_loaded
        else "call requires_grad_(True) on what shall be trained (merge_and_unload() leaves a model without)"
    )
    raise HydraConfigError(
        f"no parameter of this {type(model).__name__} requires gradients, so there is nothing to train; {what}"
    )
