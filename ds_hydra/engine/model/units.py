"""Units of a model: parameters that travel together, and where the stage model has them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ds_hydra.errors import UnsupportedModelError


@dataclass(frozen=True, slots=True)
class Binding:
    """Where one parameter lives in the stage model: `module._parameters[attribute]`."""

    module: nn.Module
    attribute: str
    param: int


@dataclass(frozen=True, slots=True)
class Unit:
    """Parameters that travel together: the embedding, one decoder layer, or norm and head."""

    name: str
    modules: tuple[nn.Module, ...]
    bindings: tuple[Binding, ...]


class PassThrough(nn.Module):
    """Stands in for a layer of another stage, or for the final norm: returns the hidden state."""

    def forward(self, hidden_states: Tensor, *_args: Any, **_kwargs: Any) -> Tensor:
        """`hidden_states`, untouched."""
        return hidden_states


def shape_of(param: nn.Parameter) -> torch.Size:
    """Full shape, also of a parameter that `deepspeed.zero.Init` has already partitioned."""
    return param.ds_shape if hasattr(param, "ds_shape") else param.shape


def unit_of(name: str, modules: Sequence[nn.Module], index_of: dict[int, int]) -> Unit:
    """The unit of all parameters in `modules`; `index_of` by their `id`."""
    bindings = [
        Binding(module, attribute, index_of[id(param)])
        for root in modules
        for module in root.modules()
        for attribute, param in module._parameters.items()
        if param is not None
    ]
    return Unit(name, tuple(modules), tuple(bindings))


def check_units(model: nn.Module, units: Sequence[Unit]) -> None:
    """Raise UnsupportedModelError where `model` has parameters in none of its `units`."""
    covered = {binding.param for unit in units for binding in unit.bindings}
    missing = [n for i, (n, _) in enumerate(model.named_parameters()) if i not in covered]
    if missing:
        raise UnsupportedModelError(
            f"{type(model).__name__} has parameters outside embedding, layers, norm and head: "
            f"{', '.join(missing[:4])}; ds_hydra does not propagate through them"
        )
