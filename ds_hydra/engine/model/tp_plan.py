"""transformers' tp plan of a model: which modules a TP group shares, and how each of their
parameters is cut.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from ds_hydra.engine.model.adapters import SUMMED, split_style
from ds_hydra.engine.parallel.tensor_parallel import EXPERTS, GATHERED, HOOKS, SPLIT
from ds_hydra.zero_link import Slicing

SUPPORTED_STYLES = {*HOOKS, "replicated_with_grad_allreduce"}
"""Styles that run on pulled slices."""
_NUM_PACKED = 2
"""Matrices in a parameter of style packed_colwise: gate and up."""

_KEY_VALUE_PROJECTIONS = {"k_proj", "v_proj"}
_QUERY_PROJECTIONS = {"q_proj"}


def module_styles(base: nn.Module) -> Iterator[tuple[nn.Module, tuple[str, str]]]:
    """(module, (style, last name part)) of every module of `base` that its tp plan mentions."""
    for name, module in base.named_modules():
        for style in _styles_of(base, name):
            yield module, (style, name.rsplit(".", 1)[-1])


def parameter_styles(base: nn.Module) -> dict[tuple[nn.Module, str], tuple[str, str]]:
    """(module, attribute) of a parameter that the tp plan mentions, itself or its module -> (style,
    last name part); those of a LoRA layer belong to its parts.
    """
    styles = {
        (part, attribute): (part_style, name)
        for module, (style, name) in module_styles(base)
        if style != EXPERTS
        for part, part_style in split_style(module, style)
        for attribute in part._parameters
    }
    for fqn, _ in base.named_parameters(remove_duplicate=False):
        for style in _styles_of(base, fqn):
            owner, _, attribute = fqn.rpartition(".")
            styles[base.get_submodule(owner), attribute] = (style, attribute)
    return styles


def _styles_of(base: nn.Module, name: str) -> Iterator[str]:
    pattern = re.sub(r"(?<=\.)\d+(?=\.|$)", "*", name)
    if (style := tp_plan(base).get(pattern)) is not None:
        yield style


def find_unplanned(base: nn.Module, fqn_of: Mapping[tuple[nn.Module, str], str]) -> list[str]:
    """Parameters beside colwise layers (same parent module) whose own module the tp plan does not
    mention; `fqn_of` (module, attribute).

    Their gradient would be partial on each rank of a TP group, or not; only the plan can say.
    """
    styles = {module: style for module, (style, _) in module_styles(base)}
    planned = parameter_styles(base).keys()
    parents = [
        module
        for module in base.modules()
        if any(styles.get(child) == "colwise" for child in module.children())
    ]
    found = {
        fqn_of[module, attribute]
        for parent in parents
        for module in parent.modules()
        for attribute, param in module._parameters.items()
        if param is not None and (module, attribute) not in planned
    }
    return sorted(found)


@dataclass(frozen=True, slots=True)
class Cut:
    """How a parameter is cut: the fields of `ParamSpec` of the same names."""

    slicing: Slicing
    num_blocks: int = 0
    cut_dim: int = 1
    num_packed: int = 1
    cut_multiple: int = 1


def cut_of(
    style: str, name: str, param: nn.Parameter, config: Any, *, cuts_micro_batches: bool
) -> Cut:
    """The cut of a parameter of a module `name`, or of one that the plan mentions itself.

    Where TP `cuts_micro_batches`, parameters that the tp plan does not mention see a shard of the
    tokens.
    """
    num_dims = param.dim()
    if style in ("colwise", GATHERED):
        is_head = style == "colwise"
        if is_head and name in _KEY_VALUE_PROJECTIONS:
            return Cut(Slicing.COLWISE, num_kv_heads(config))
        is_head = is_head and name in _QUERY_PROJECTIONS
        return Cut(Slicing.COLWISE, config.num_attention_heads if is_head else 0)
    if style == "packed_colwise":
        dim = max(num_dims - 2, 0)
        multiple = _aligned(param, param.shape[dim] // _NUM_PACKED)
        return Cut(Slicing.ROWWISE, cut_dim=dim, num_packed=_NUM_PACKED, cut_multiple=multiple)
    if style in ("rowwise", SPLIT):
        if num_dims == 1:
            return Cut(Slicing.FIRST_RANK)
        multiple = _aligned(param, param.shape[-1])
        return Cut(Slicing.ROWWISE, cut_dim=num_dims - 1, cut_multiple=multiple)
    if style == SUMMED and num_dims == 1:
        return Cut(Slicing.FIRST_RANK)
    if style in ("replicated_with_grad_allreduce", SUMMED):
        return Cut(Slicing.REPLICATED_PARTIAL_GRAD)
    return Cut(Slicing.REPLICATED_PARTIAL_GRAD if cuts_micro_batches else Slicing.REPLICATED)


def _aligned(param: nn.Parameter, width: int) -> int:
    """Multiple at which experts (3 dimensions) are cut: grouped products want strides of whole 16
    bytes.
    """
    multiple = 16 // param.element_size() if param.dim() == 3 else 1
    return multiple if width % multiple == 0 else 1


def num_kv_heads(config: Any) -> int:
    """Key-value heads of a layer; those of queries where `config` does not tell them apart."""
    return int(getattr(config, "num_key_value_heads", None) or config.num_attention_heads)


def tp_plan(model: nn.Module) -> dict[str, str]:
    """Pattern of module names -> style, as transformers ships it for the base model."""
    return dict(model.base_model.config.base_model_tp_plan or {})
