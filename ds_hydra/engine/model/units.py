"""Units of a model: parameters that travel together, and where the stage model has them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import nn


@dataclass(frozen=True, slots=True)
class Binding:
    """Where one parameter lives in the stage model: `module._parameters[attribute]`."""

    module: nn.Module
    attribute: str
    param: int


@dataclass(frozen=True, slots=True)
class Unit:
    """Parameters that travel together: the embedding and what else runs before the layers, one
    decoder layer, or all that follows.

    `modules`: those before whose forward the parameters have to be there; a layer, or the
    embedding, is the first.
    """

    name: str
    modules: tuple[nn.Module, ...]
    bindings: tuple[Binding, ...]


def shape_of(param: nn.Parameter) -> torch.Size:
    """Full shape, also of a parameter that `deepspeed.zero.Init` has already partitioned."""
    return param.ds_shape if hasattr(param, "ds_shape") else param.shape


def on_meta(param: nn.Parameter) -> nn.Parameter:
    """One like `param`, whole, without memory."""
    empty = torch.empty(shape_of(param), device="meta", dtype=param.dtype)
    return nn.Parameter(empty, param.requires_grad)


def bindings_of(owners: Iterable[nn.Module], index_of: Mapping[int, int]) -> tuple[Binding, ...]:
    """Where the parameters of `owners` themselves live; `index_of` by their `id`."""
    return tuple(
        Binding(module, attribute, index_of[id(param)])
        for module in owners
        for attribute, param in module._parameters.items()
        if param is not None
    )
