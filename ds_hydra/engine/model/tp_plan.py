"""transformers' tp plan of a model: which modules a TP group shares, and how each of their
parameters is cut.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from torch import nn

from ds_hydra.engine.model.adapters import SUMMED, split_style
from ds_hydra.zero_link import Slicing

SUPPORTED_STYLES = {"colwise", "rowwise", "replicated_with_grad_allreduce"}
"""Styles that run on pulled slices."""

_KEY_VALUE_PROJECTIONS = {"k_proj", "v_proj"}
_QUERY_PROJECTIONS = {"q_proj"}


def module_styles(base: nn.Module) -> Iterator[tuple[nn.Module, tuple[str, str]]]:
    """(module, (style, last name part)) of every module of `base` that its tp plan mentions."""
    patterns = [
        (re.compile(pattern.replace(".", r"\.").replace("*", r"\d+")), style)
        for pattern, style in tp_plan(base).items()
    ]
    for name, module in base.named_modules():
        for pattern, style in patterns:
            if pattern.fullmatch(name):
                yield module, (style, name.rsplit(".", 1)[-1])


def parameter_styles(base: nn.Module) -> Iterator[tuple[nn.Module, tuple[str, str]]]:
    """As `module_styles`, of the modules that hold the parameters (the parts of a LoRA layer)."""
    for module, (style, name) in module_styles(base):
        for part, part_style in split_style(module, style):
            yield part, (part_style, name)


def find_unplanned(base: nn.Module, fqn_of: Mapping[tuple[nn.Module, str], str]) -> list[str]:
    """Parameters beside colwise layers (same parent module) whose own module the tp plan does not
    mention; `fqn_of` (module, attribute).

    Their gradient would be partial on each rank of a TP group, or not; only the plan can say.
    """
    styles = {module: style for module, (style, _) in module_styles(base)}
    planned = styles.keys() | dict(parameter_styles(base)).keys()
    parents = [
        module
        for module in base.modules()
        if any(styles.get(child) == "colwise" for child in module.children())
    ]
    found = {
        fqn_of[module, attribute]
        for parent in parents
        for module in parent.modules()
        if module not in planned
        for attribute, param in module._parameters.items()
        if param is not None
    }
    return sorted(found)


def slicing_of(
    style: str, name: str, attribute: str, config: Any, *, cuts_micro_batches: bool
) -> tuple[Slicing, int]:
    """Slicing rule and number of indivisible blocks of one parameter.

    Where TP `cuts_micro_batches`, parameters that the tp plan does not mention see a shard of the
    tokens.
    """
    if style == "colwise":
        if name in _KEY_VALUE_PROJECTIONS:
            return Slicing.COLWISE, num_kv_heads(config)
        return Slicing.COLWISE, config.num_attention_heads if name in _QUERY_PROJECTIONS else 0
    if style == "rowwise":
        return (Slicing.FIRST_RANK if attribute == "bias" else Slicing.ROWWISE), 0
    if style == SUMMED and attribute == "bias":
        return Slicing.FIRST_RANK, 0
    if style in ("replicated_with_grad_allreduce", SUMMED):
        return Slicing.REPLICATED_PARTIAL_GRAD, 0
    return (Slicing.REPLICATED_PARTIAL_GRAD if cuts_micro_batches else Slicing.REPLICATED), 0


def num_kv_heads(config: Any) -> int:
    """Key-value heads of a layer; those of queries where `config` does not tell them apart."""
    return int(getattr(config, "num_key_value_heads", None) or config.num_attention_heads)


def tp_plan(model: nn.Module) -> dict[str, str]:
    """Pattern of module names -> style, as transformers ships it for the base model."""
    return dict(model.base_model.config.base_model_tp_plan or {})
