"""Schemes that a model can run under: limits of heads, tp plan and layers."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from types import MethodType
from typing import Any

from torch import nn
from transformers.modeling_layers import GradientCheckpointingLayer

from ds_hydra.engine.model.adapters import is_lora
from ds_hydra.engine.model.decoder_parts import module_styles, num_kv_heads, tp_plan
from ds_hydra.engine.model.stage_forward import NOT_ONCE
from ds_hydra.engine.model.stage_model import ModelAbilities, StageModel
from ds_hydra.engine.parallel.tensor_parallel import GATHERED, SPLIT, STYLES
from ds_hydra.errors import HydraConfigError, UnsupportedModelError
from ds_hydra.strategy import Scheme
from ds_hydra.zero_link import ParamSpec, Slicing


def check_context(abilities: ModelAbilities, config: Any, context_length: int) -> None:
    """Raise HydraConfigError where sequences may be longer than the positions that were learned."""
    if abilities.positions_end and context_length > config.max_position_embeddings:
        raise HydraConfigError(
            f"hydra.context_length is {context_length}, above the {config.max_position_embeddings} positions that "
            f"the model has (max_position_embeddings); set hydra.context_length to {config.max_position_embeddings} "
            "or less"
        )


def find_unseen_positions(config: Any, context_length: int) -> str | None:
    """Describe a context longer than that which the model was trained on; None where it is not."""
    positions = getattr(config, "max_position_embeddings", None)
    if positions is None or context_length <= positions:
        return None
    return (
        f"hydra.context_length is {context_length}, above the model's max_position_embeddings "
        f"of {positions}: rotary positions have no end, but the model has not seen them"
    )


def can_run(of: StageModel, scheme: Scheme) -> bool:
    """Whether `check_scheme` passes."""
    try:
        check_scheme(of, scheme)
    except HydraConfigError:
        return False
    return True


def check_scheme(of: StageModel, scheme: Scheme) -> None:
    """Raise HydraConfigError where the model `of` a stage model cannot run under `scheme`, naming
    degrees that work.
    """
    scheme.check_layers(of.num_layers)
    name = type(of.model).__name__
    _check_abilities(scheme, of.abilities, name)
    if scheme.gather:
        _check_layers_gathered(scheme, of, name)
    if scheme.ckpt:
        _check_checkpointing(scheme, of, name)
    if scheme.pp > 1 and of.no_pp_because:
        raise UnsupportedModelError(
            f"scheme {scheme}: the layers of {name} cannot be split into stages, because {of.no_pp_because}; use PP 1 "
            "in hydra.strategies"
        )
    if scheme.tp > 1:
        _check_tensor_parallel(scheme, of, name)
    if scheme.sp > 1:
        _check_sequence_parallel(scheme, of.config)
    if scheme.ep > 1:
        _check_expert_parallel(scheme, name, of.specs)


def _check_abilities(scheme: Scheme, abilities: ModelAbilities, name: str) -> None:
    """Refuse more than whole layers where sequences run one after the other, or states pass from
    token to token.
    """
    if abilities.boundaries_because and (scheme.tp > 1 or scheme.sp > 1 or scheme.cp > 1):
        raise UnsupportedModelError(
            f"scheme {scheme}: states pass from token to token in {name}, because {abilities.boundaries_because}; use "
            "TP 1, SP 1 and CP 1 in hydra.strategies"
        )
    if abilities.one_by_one_because and (scheme.tp > 1 or scheme.sp > 1 or scheme.cp > 1):
        raise UnsupportedModelError(
            f"scheme {scheme}: {name} runs the sequences of a micro-batch one after the other, because "
            f"{abilities.one_by_one_because}; use TP 1, SP 1 and CP 1 in hydra.strategies"
        )


def _check_layers_gathered(scheme: Scheme, of: StageModel, name: str) -> None:
    """Refuse layers that cannot come and go as `gather` wants it: each is read once in forward and
    once in backward.
    """
    because = of.abilities.no_gather_because or (NOT_ONCE if of.no_pp_because == NOT_ONCE else "")
    if of.abilities.one_by_one_because:
        because = f"it runs sequences one after the other ({of.abilities.one_by_one_because})"
    elif not of.has_plain_embedding:
        because = because or "it has more than an embedding before its layers"
    if because:
        raise UnsupportedModelError(
            f"scheme {scheme}: the layers of {name} cannot come and go, because {because}; leave gather out "
            "of hydra.strategies"
        )


def _check_sequence_parallel(scheme: Scheme, config: Any) -> None:
    """Refuse degrees that do not divide the heads."""
    heads = config.num_attention_heads
    if heads % (scheme.sp * scheme.tp):
        works = [d for d in range(1, heads + 1) if heads % (d * scheme.tp) == 0]
        raise HydraConfigError(
            f"scheme {scheme}: SP {scheme.sp} x TP {scheme.tp} = {scheme.sp * scheme.tp} does not divide the "
            f"model's {heads} attention heads; use SP {', '.join(map(str, works))} with TP {scheme.tp} in "
            "hydra.strategies"
        )


def check_context_parallel(scheme: Scheme, context_length: int) -> None:
    """Raise HydraConfigError where no sequence has a token for every row of a micro-batch."""
    if scheme.cp > context_length:
        raise HydraConfigError(
            f"scheme {scheme}: CP {scheme.cp} is above hydra.context_length, {context_length} tokens, so that rows of "
            f"every micro-batch would have none; use CP {context_length} or less in hydra.strategies"
        )


def _check_tensor_parallel(scheme: Scheme, of: StageModel, name: str) -> None:
    """Refuse degrees that do not divide the heads, and layers that the tp plan does not slice."""
    model = of.model
    if not of.after_head.splits_by_column:
        raise UnsupportedModelError(
            f"scheme {scheme}: what {name} makes of its head's output depends on more than each of its columns, which "
            "TP splits: on others, on a parameter or on a buffer; use TP 1 in hydra.strategies"
        )
    if not tp_plan(model):
        raise UnsupportedModelError(
            f"scheme {scheme}: transformers ships no base_model_tp_plan for {name}, which would say how its layers "
            "are sliced; use TP 1 in hydra.strategies"
        )
    if any(getattr(model.base_model.config, "activation_sparsity_pattern", None) or ()):
        raise UnsupportedModelError(
            f"scheme {scheme}: activations of {name} depend on all features of a layer "
            "(activation_sparsity_pattern), which TP cuts; use TP 1 in hydra.strategies"
        )
    _check_heads(scheme, model.base_model.config)
    _check_equal_layers(scheme, model)
    _check_features(scheme, model.base_model)
    _check_linears(scheme, model.base_model)
    _check_widths(scheme, of.specs)
    if of.unplanned:
        raise UnsupportedModelError(
            f"scheme {scheme}: parameters {', '.join(of.unplanned[:3])} are used between sliced layers, but "
            f"the tp plan of {name} does not say how; use TP 1 in hydra.strategies"
        )
    refused = [f"{m} ({s})" for m, s in tp_plan(model).items() if s not in STYLES]
    if refused:
        raise UnsupportedModelError(
            f"scheme {scheme}: the tp plan of {name} has styles that ds_hydra does not run, "
            f"as for fused weights: {', '.join(refused)}; use TP 1 in hydra.strategies"
        )
    of.float8.check_scheme(scheme)


def _check_heads(scheme: Scheme, config: Any) -> None:
    heads, kv_heads = config.num_attention_heads, num_kv_heads(config)
    divisors = [d for d in range(1, heads + 1) if heads % d == 0]
    if heads % scheme.tp:
        raise HydraConfigError(
            f"scheme {scheme}: TP {scheme.tp} does not divide the model's {heads} attention heads; "
            f"use TP {', '.join(map(str, divisors))} in hydra.strategies"
        )
    if kv_heads % scheme.tp and scheme.tp % kv_heads:
        works = [d for d in divisors if kv_heads % d == 0 or d % kv_heads == 0]
        raise HydraConfigError(
            f"scheme {scheme}: TP {scheme.tp} and the model's {kv_heads} key-value heads do not divide "
            f"each other; use TP {', '.join(map(str, works))} in hydra.strategies"
        )


def _check_equal_layers(scheme: Scheme, model: nn.Module) -> None:
    """Refuse key-value heads whose number differs between layers: the configuration has one."""
    widths = {
        module.out_features
        for module, (style, name) in module_styles(model.base_model)
        if style == "colwise" and name == "k_proj"
    }
    if len(widths) > 1:
        raise UnsupportedModelError(
            f"scheme {scheme}: layers of {type(model).__name__} have keys of {', '.join(map(str, sorted(widths)))} "
            "features, and TP cuts those of all layers alike; use TP 1 in hydra.strategies"
        )


def _check_features(scheme: Scheme, base: nn.Module) -> None:
    """Refuse features that are gathered or split in unequal parts."""
    for module, (style, name) in module_styles(base):
        if style not in (GATHERED, SPLIT):
            continue
        width = module.out_features if style == GATHERED else module.in_features
        if width % scheme.tp:
            raise HydraConfigError(
                f"scheme {scheme}: TP {scheme.tp} does not divide the {width} features that the tp plan of "
                f"{type(base).__name__} exchanges whole at {name}; use TP that does in hydra.strategies"
            )


def _check_linears(scheme: Scheme, base: nn.Module) -> None:
    """Refuse cut linear layers whose forward is neither torch's nor of the family that the tp plan
    is for: what they make of a slice need not be a part of what they make of the whole.
    """
    for module, (style, name) in module_styles(base):
        if style not in STYLES or not STYLES[style].side:
            continue
        linear = module.base_layer if is_lora(module) else module
        if isinstance(linear, nn.Linear) and _has_foreign_forward(linear):
            kind = type(linear)
            raise UnsupportedModelError(
                f"scheme {scheme}: {name} of {type(base).__name__} is a {kind.__name__} of {kind.__module__} with a "
                "forward of its own, which on a slice of its features may compute another number, as scales of "
                "quantisation are; use TP 1 in hydra.strategies"
            )


def _has_foreign_forward(linear: nn.Linear) -> bool:
    if isinstance(vars(linear).get("forward"), MethodType | partial):  # set by a user
        return True
    owner = next(kind for kind in type(linear).__mro__ if "forward" in vars(kind))
    known = ("torch.nn.", "transformers.models.", "ds_hydra.")
    return not owner.__module__.startswith(known)


def _check_widths(scheme: Scheme, specs: Sequence[ParamSpec]) -> None:
    """Refuse a TP group in which a rank would have nothing of a parameter."""
    for spec in specs:
        if scheme.ep > 1 and spec.num_experts:  # whole ones
            continue
        if spec.slicing is Slicing.ROWWISE and scheme.tp > spec.num_steps:
            raise HydraConfigError(
                f"scheme {scheme}: {spec.fqn} of width {spec.shape[spec.cut_dim] // spec.num_packed} is cut into at "
                f"most {spec.num_steps} parts, fewer than TP {scheme.tp}; use TP {spec.num_steps} or less in "
                "hydra.strategies"
            )


def _check_expert_parallel(scheme: Scheme, name: str, specs: Sequence[ParamSpec]) -> None:
    """Refuse models without experts that ranks may share, and degrees that do not divide them."""
    numbers = {spec.num_experts for spec in specs} - {0}
    if not numbers:
        raise UnsupportedModelError(
            f"scheme {scheme}: {name} has no experts that its ep plan shares; leave ep out of hydra.strategies"
        )
    for number in numbers:
        if number % scheme.ep:
            works = [d for d in range(1, number + 1) if number % d == 0]
            raise HydraConfigError(
                f"scheme {scheme}: ep {scheme.ep} does not divide the {number} experts of a layer; use ep "
                f"{', '.join(map(str, works))} in hydra.strategies"
            )


def _check_checkpointing(scheme: Scheme, of: StageModel, name: str) -> None:
    """Refuse `ckpt` where it says nothing, because layers are checkpointed anyway, or cannot be."""
    if any(of.always_checkpointed):
        raise HydraConfigError(
            f"scheme {scheme}: hydra.activation_checkpointing, or the model's own gradient checkpointing, "
            "checkpoints layers under every scheme; turn it off, or leave ckpt out of hydra.strategies"
        )
    if not all(isinstance(layer, GradientCheckpointingLayer) for layer in of.layers):
        raise UnsupportedModelError(
            f"scheme {scheme}: transformers cannot checkpoint the layers of {name}; leave "
            "ckpt out of hydra.strategies"
        )
