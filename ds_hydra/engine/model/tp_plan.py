"""Modules that a TP group shares and the cut of each of their parameters, by the plans that
transformers ships for a model.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Container, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from torch import nn

from ds_hydra.engine.model.adapters import SUMMED, split_style
from ds_hydra.engine.model.decoder_parts import Binding, shape_of
from ds_hydra.engine.parallel import tensor_parallel
from ds_hydra.zero_link import ParamSpec, Slicing

_DISPATCHED, _WHOLE_EXPERTS = "ep_dispatch_experts", "grouped_gemm"
"""Styles of transformers' ep plans: a module of experts, and its parameters."""
_NUM_PACKED = 2
"""Matrices in a parameter of style packed_colwise: gate and up."""

_KEY_VALUE_PROJECTIONS = {"k_proj", "v_proj"}
_QUERY_PROJECTIONS = {"q_proj"}


def module_styles(base: nn.Module) -> Iterator[tuple[nn.Module, tuple[str, str]]]:
    """(module, (style, last name part)) of every module of `base` that its tp plan mentions."""
    plan = tp_plan(base)
    for name, module in base.named_modules():
        if (style := plan.get(_pattern(name))) is not None:
            yield module, (style, name.rsplit(".", 1)[-1])


def module_sides(base: nn.Module) -> dict[nn.Module, str]:
    """Modules whose features a TP group shares by the tp plan of `base` -> COLUMN or ROW."""
    sides = {
        m: tensor_parallel.STYLES[style].side
        for m, (style, _) in module_styles(base)
        if style in tensor_parallel.STYLES
    }
    return {module: side for module, side in sides.items() if side}


def expert_modules(base: nn.Module) -> list[nn.Module]:
    """Find the modules of experts that ranks may share, by the model's ep plan."""
    plan = ep_plan(base)
    return [m for name, m in base.named_modules() if plan.get(_pattern(name)) == _DISPATCHED]


def num_experts_of(base: nn.Module) -> dict[tuple[nn.Module, str], int]:
    """(module, attribute) of a parameter of experts that ranks may share -> how many it has."""
    plan = ep_plan(base)
    return {
        (module, attribute): param.shape[0]
        for name, module in base.named_modules()
        for attribute, param in module._parameters.items()
        if param is not None and plan.get(_pattern(f"{name}.{attribute}")) == _WHOLE_EXPERTS
    }


def parameter_styles(base: nn.Module) -> dict[tuple[nn.Module, str], tuple[str, str]]:
    """(module, attribute) of a parameter that the tp plan mentions, itself or its module -> (style,
    last name part); those of a LoRA layer belong to its parts.
    """
    styles = {
        (part, attribute): (part_style, name)
        for module, (style, name) in module_styles(base)
        if style != tensor_parallel.EXPERTS
        for part, part_style in split_style(module, style)
        for attribute in part._parameters
    }
    # They see this rank's features: their gradient is a part
    for activation in _sliced_activations(base):
        styles |= {
            (activation, attribute): (tensor_parallel.PARTIAL, "")
            for attribute in activation._parameters
        }
    plan = tp_plan(base)
    # Last: what a plan says of a parameter itself goes before what it says of its module
    for fqn, _ in base.named_parameters(remove_duplicate=False):
        if (style := plan.get(_pattern(fqn))) is not None:
            owner, _, attribute = fqn.rpartition(".")
            styles[base.get_submodule(owner), attribute] = (style, attribute)
    return styles


def _sliced_activations(base: nn.Module) -> Iterator[nn.Module]:
    """Activations between colwise and rowwise layers whose parameters are numbers for all
    features.
    """
    styles = {module: style for module, (style, _) in module_styles(base)}
    for parent in base.modules():
        activation = getattr(parent, "act_fn", None)
        if (
            isinstance(activation, nn.Module)
            and any(styles.get(child) == "colwise" for child in parent.children())
            and all(shape_of(param).numel() == 1 for param in activation.parameters())
        ):
            yield activation


def _before_latent(parent: nn.Module, styles: Mapping[nn.Module, str]) -> set[nn.Module]:
    """Find the down-projections of latent attention and their norms. The layers after them are
    colwise, so every rank has their whole gradient.
    """
    if not any(styles.get(child) == tensor_parallel.LATENT for child in parent.children()):
        return set()
    before = [child for name, child in parent.named_children() if "_a_" in name]
    return {part for child in before for part in child.modules()}  # those of adapters, too


def _pattern(name: str) -> str:
    """`name` as plans write it: an asterisk for every number."""
    return re.sub(r"(?<=\.)\d+(?=\.|$)", "*", name)


def find_unplanned(
    base: nn.Module, fqn_of: Mapping[tuple[nn.Module, str], str], beside: str = "colwise"
) -> list[str]:
    """Parameters beside layers of the style `beside` (same parent module) whose own module the tp
    plan does not mention; `fqn_of` (module, attribute).

    Their gradient would be partial on each rank of a TP group, or not; only the plan can say.
    """
    styles = {module: style for module, (style, _) in module_styles(base)}
    planned = parameter_styles(base).keys()
    parents = [
        module
        for module in base.modules()
        if any(styles.get(child) == beside for child in module.children())
    ]
    found = {
        fqn_of[module, attribute]
        for parent in parents
        for module in set(parent.modules()) - _before_latent(parent, styles)
        for attribute, param in module._parameters.items()
        if param is not None and (module, attribute) not in planned
    }
    return sorted(found)


def build_specs(
    named: Iterable[tuple[str, nn.Parameter]],
    base: nn.Module,
    *,
    bindings: Iterable[Binding],
    vocabulary: Container[nn.Module],
    cuts_micro_batches: bool,
) -> tuple[ParamSpec, ...]:
    """Build the spec of each `named` parameter for the link, in their order.

    `base`: the model whose modules have them, where `bindings` say.
    `vocabulary`: embedding and head, cut by rows whatever the plan says.
    """
    styles, num_experts = parameter_styles(base), num_experts_of(base)
    places = {param: (module, attribute) for module, attribute, param in bindings}
    specs = []
    for index, (fqn, param) in enumerate(named):
        place = places[index]
        style, name = styles.get(place, ("replicated", ""))
        spec = ParamSpec(
            fqn=fqn,
            shape=tuple(shape_of(param)),
            # The rows of embedding and head; others get their slicing below
            slicing=Slicing.COLWISE,
            requires_grad=param.requires_grad,
            num_experts=num_experts.get(place, 0),
        )
        if place[0] not in vocabulary:
            spec = _cut_by_plan(spec, style, name, base.config, cuts_micro_batches)
        specs.append(spec)
    return tuple(specs)


def _cut_by_plan(
    spec: ParamSpec,
    style: str,
    name: str,
    config: Any,
    cuts_micro_batches: bool,
) -> ParamSpec:
    """`spec` of a parameter of a module `name`, or of one that the plan mentions itself, with what
    says how it is cut.

    Where TP `cuts_micro_batches`, parameters that the tp plan does not mention see a shard of the
    tokens.
    """
    cut, shape = functools.partial(replace, spec), spec.shape
    num_dims = len(shape)
    if style == "packed_colwise" or (style == "colwise" and num_dims == 3):  # of experts
        # Of packed or stacked matrices a cut by features is no longer one range of rows
        dim, num_packed = max(num_dims - 2, 0), 1 if style == "colwise" else _NUM_PACKED
        multiple = _cut_multiple(shape, shape[dim] // num_packed)
        return cut(
            slicing=Slicing.ROWWISE, cut_dim=dim, num_packed=num_packed, cut_multiple=multiple
        )
    if style in ("colwise", tensor_parallel.GATHERED):
        is_head = style == "colwise"
        if is_head and name in _KEY_VALUE_PROJECTIONS:
            # Whole heads: fewer heads than ranks are held by several, and none is cut
            return cut(slicing=Slicing.COLWISE, num_blocks=num_kv_heads(config))
        is_head = is_head and name in _QUERY_PROJECTIONS
        # Features of an MLP, and those that ranks exchange whole, may be cut anywhere
        num_heads = config.num_attention_heads if is_head else 0
        return cut(slicing=Slicing.COLWISE, num_blocks=num_heads)
    if style in ("rowwise", tensor_parallel.SPLIT):
        if num_dims == 1:
            # A bias: added once, although every rank has a part of the products.
            return cut(slicing=Slicing.FIRST_RANK)
        multiple = _cut_multiple(shape, shape[-1])
        return cut(slicing=Slicing.ROWWISE, cut_dim=num_dims - 1, cut_multiple=multiple)
    if style == SUMMED and num_dims == 1:
        return cut(slicing=Slicing.FIRST_RANK)
    # Whole on every rank, which has a part of the gradient: owners add up what all push
    if style in (tensor_parallel.PARTIAL, SUMMED):
        return cut(slicing=Slicing.REPLICATED_PARTIAL_GRAD)
    return cut(
        slicing=Slicing.REPLICATED_PARTIAL_GRAD if cuts_micro_batches else Slicing.REPLICATED
    )


def _cut_multiple(shape: tuple[int, ...], width: int) -> int:
    """Return the number of features at whose multiples a parameter of `width` features is cut."""
    # Grouped products of experts (3 dimensions) want strides of whole 16 bytes. The dtype is not
    # asked: DeepSpeed casts the model after it was cut, and 8 features are enough in any of them.
    return math.gcd(width, 8) if len(shape) == 3 else 1


def num_kv_heads(config: Any) -> int:
    """Key-value heads of a layer; those of queries where `config` does not tell them apart."""
    return int(getattr(config, "num_key_value_heads", None) or config.num_attention_heads)


def tp_plan(model: nn.Module) -> dict[str, str]:
    """Pattern of module names -> style, as transformers ships it for the base model; without its
    embedding, whose rows TP ranks share in any case.
    """
    base = model.base_model
    modules = dict(base.named_modules())
    return {
        name: style
        for name, style in (base.config.base_model_tp_plan or {}).items()
        if style != "embedding_rowwise" or modules.get(name) is not base.get_input_embeddings()
    }


def ep_plan(model: nn.Module) -> dict[str, str]:
    """Expert parallel plan of `model`; see `tp_plan`."""
    return dict(getattr(model.base_model.config, "base_model_ep_plan", None) or {})
