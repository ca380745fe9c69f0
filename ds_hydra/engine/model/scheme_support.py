"""Schemes that a model can run under: limits of heads, tp plan and layers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import partial
from types import MethodType
from typing import Any

from torch import nn
from transformers.modeling_layers import GradientCheckpointingLayer

from ds_hydra.engine.model.adapters import is_lora
from ds_hydra.engine.model.stage_model import ModelAbilities, StageModel
from ds_hydra.engine.model.tp_plan import module_styles, num_kv_heads, tp_plan
from ds_hydra.engine.parallel.tensor_parallel import GATHERED, SPLIT, STYLES
from ds_hydra.errors import HydraConfigError, UnsupportedModelError
from ds_hydra.strategy import Scheme
from ds_hydra.zero_link import Slicing


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
    degrees that work; UnsupportedModelError where no other degree would.
    """
    scheme.check_layers(of.num_layers)
    uncut = (f"{reason}; use TP 1" for reason in _find_uncut(of)) if scheme.tp > 1 else ()
    for kind, found in (
        (UnsupportedModelError, _find_of_layers(scheme, of)),
        (UnsupportedModelError, uncut),
        (HydraConfigError, _find_degrees(scheme, of)),
    ):
        for problem in found:
            raise kind(f"scheme {scheme}: {problem} in hydra.strategies")
    if scheme.tp > 1:
        of.float8.check_scheme(scheme)


def check_context_parallel(scheme: Scheme, context_length: int) -> None:
    """Raise HydraConfigError where no sequence has a token for every row of a micro-batch."""
    if scheme.cp > context_length:
        raise HydraConfigError(
            f"scheme {scheme}: CP {scheme.cp} is above hydra.context_length, {context_length} tokens, so that rows of "
            f"every micro-batch would have none; use CP {context_length} or less in hydra.strategies"
        )


def _find_of_layers(scheme: Scheme, of: StageModel) -> Iterator[str]:
    """Find reasons, each with advice, that layers of the model cannot run as a scheme wants it."""
    name, abilities = type(of.model).__name__, of.abilities
    is_shared = scheme.tp > 1 or scheme.sp > 1 or scheme.cp > 1
    one_by_one = abilities.one_by_one_because
    if abilities.states_because and (scheme.sp > 1 or scheme.cp > 1):
        yield (
            f"states pass from token to token in {name}, because {abilities.states_because}, so that a rank needs "
            "whole sequences; use SP 1 and CP 1"
        )
    if one_by_one and is_shared:
        yield (
            f"{name} runs the sequences of a micro-batch one after the other, because {one_by_one}; use TP 1, SP 1 and "
            "CP 1"
        )
    if scheme.gather and (because := _not_gathered_because(of)):
        yield f"the layers of {name} cannot come and go, because {because}; leave gather out"
    if scheme.ckpt and not all(
        isinstance(layer, GradientCheckpointingLayer) for layer in of.layers
    ):
        yield f"transformers cannot checkpoint the layers of {name}; leave ckpt out"
    if scheme.pp > 1 and of.no_pp_because:
        yield f"the layers of {name} cannot be split into stages, because {of.no_pp_because}; use PP 1"
    if scheme.ep > 1 and not any(spec.num_experts for spec in of.specs):
        yield f"{name} has no experts that its ep plan shares; leave ep out"


def _not_gathered_because(of: StageModel) -> str:
    """Reason that layers cannot come and go as `gather` wants it: each is read once in forward and
    once in backward.
    """
    abilities = of.abilities
    if abilities.one_by_one_because:
        return f"it runs sequences one after the other ({abilities.one_by_one_because})"
    more = "" if of.has_plain_embedding else "it has more than an embedding before its layers"
    return abilities.no_gather_because or more


def _find_uncut(of: StageModel) -> Iterator[str]:
    """Find reasons that the model's layers cannot be cut, whatever the degree."""
    name, plan, base = type(of.model).__name__, tp_plan(of.model), of.model.base_model
    if not of.after_head.splits_by_column:
        yield (
            f"what {name} makes of its head's output depends on more than each of its columns, which TP splits: on "
            "others, on a parameter or on a buffer"
        )
    if not plan:
        yield f"transformers ships no base_model_tp_plan for {name}, which would say how its layers are sliced"
    if any(getattr(base.config, "activation_sparsity_pattern", None) or ()):
        yield (
            f"activations of {name} depend on all features of a layer (activation_sparsity_pattern), which TP cuts"
        )
    modules = list(module_styles(base))
    # The configuration has one number of key-value heads
    keys = {m.out_features for m, style in modules if style == ("colwise", "k_proj")}
    if len(keys) > 1:
        yield (
            f"layers of {name} have keys of {', '.join(map(str, sorted(keys)))} features, and TP cuts those of all "
            "layers alike"
        )
    for module, (style, part) in modules:
        linear = module.base_layer if is_lora(module) else module
        is_cut = style in STYLES and STYLES[style].side and isinstance(linear, nn.Linear)
        # What it makes of a slice need not be a part of what it makes of the whole
        if is_cut and _has_foreign_forward(linear):
            kind = type(linear)
            yield (
                f"{part} of {type(base).__name__} is a {kind.__name__} of {kind.__module__} with a forward of its own, "
                "which on a slice of its features may compute another number, as scales of quantisation are"
            )
    if of.unplanned:
        yield (
            f"parameters {', '.join(of.unplanned[:3])} are used between sliced layers, but the tp plan of {name} does "
            "not say how"
        )
    if refused := [f"{m} ({s})" for m, s in plan.items() if s not in STYLES]:
        yield (
            f"the tp plan of {name} has styles that ds_hydra does not run, as for fused weights: {', '.join(refused)}"
        )


def _has_foreign_forward(linear: nn.Linear) -> bool:
    """Whether a forward is neither torch's nor of the family that the tp plan is for."""
    if isinstance(vars(linear).get("forward"), MethodType | partial):  # set by a user
        return True
    owner = next(kind for kind in type(linear).__mro__ if "forward" in vars(kind))
    known = ("torch.nn.", "transformers.models.", "ds_hydra.")
    return not owner.__module__.startswith(known)


def _find_degrees(scheme: Scheme, of: StageModel) -> Iterator[str]:
    """Find degrees that do not divide what they share, with those that do."""
    tp, sp, ep, config = scheme.tp, scheme.sp, scheme.ep, of.model.base_model.config
    if scheme.ckpt and any(of.always_checkpointed):
        yield (
            "hydra.activation_checkpointing, or the model's own gradient checkpointing, checkpoints layers under every "
            "scheme; turn it off, or leave ckpt out"
        )
    if tp > 1:
        heads, kv_heads = config.num_attention_heads, num_kv_heads(config)
        divisors = _divisors(heads, of=sp) or _divisors(heads)
        works = [d for d in divisors if kv_heads % d == 0 or d % kv_heads == 0]
        if heads % tp:
            yield f"TP {tp} does not divide the model's {heads} attention heads; use TP {_listed(divisors)}"
        if kv_heads % tp and tp % kv_heads:
            yield (
                f"TP {tp} and the model's {kv_heads} key-value heads do not divide each other; use TP {_listed(works)}"
            )
        yield from _find_odd_widths(scheme, of)
    if sp > 1 and (heads := of.config.num_attention_heads) % (sp * tp):
        yield (
            f"SP {sp} x TP {tp} = {sp * tp} does not divide the model's {heads} attention heads; use SP "
            f"{_listed(_divisors(heads, of=tp))} with TP {tp}"
        )
    for number in {spec.num_experts for spec in of.specs if spec.num_experts}:
        if number % ep:
            yield f"ep {ep} does not divide the {number} experts of a layer; use ep {_listed(_divisors(number))}"


def _find_odd_widths(scheme: Scheme, of: StageModel) -> Iterator[str]:
    """Find features that are gathered or split in unequal parts, and parameters of which a rank
    would have nothing.
    """
    base = of.model.base_model
    for module, (style, part) in module_styles(base):
        width = {GATHERED: "out_features", SPLIT: "in_features"}.get(style)
        if width and getattr(module, width) % scheme.tp:
            yield (
                f"TP {scheme.tp} does not divide the {getattr(module, width)} features that the tp plan of "
                f"{type(base).__name__} exchanges whole at {part}; use TP that does"
            )
    for spec in of.specs:
        is_whole = scheme.ep > 1 and spec.num_experts
        if spec.slicing is Slicing.ROWWISE and scheme.tp > spec.num_steps and not is_whole:
            yield (
                f"{spec.fqn} of width {spec.shape[spec.cut_dim] // spec.num_packed} is cut into at most "
                f"{spec.num_steps} parts, fewer than TP {scheme.tp}; use TP {spec.num_steps} or less"
            )


def _divisors(number: int, of: int = 1) -> list[int]:
    """Numbers whose product with `of` divides `number`."""
    return [d for d in range(1, number + 1) if number % (d * of) == 0]


def _listed(numbers: Iterable[int]) -> str:
    return ", ".join(map(str, numbers))
