"""Parts of a causal language model of any family, and the places of its parameters.

[Note: Parts of any family]
Names differ between families (`model.layers`, `transformer.h`, `gpt_neox.layers`). Layers are the
largest list of modules that is in no other list. Embedding and head are what transformers'
accessors give. What else runs before the first layer is tried.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers import PreTrainedModel


class Binding(NamedTuple):
    """Place of one parameter in the stage model: `module._parameters[attribute]`."""

    module: nn.Module
    attribute: str
    param: int


@dataclass(frozen=True, slots=True)
class Unit:
    """Parameters that travel together: the embedding and all else that runs before the layers, one
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
    """Bindings of the parameters that `owners` hold themselves; `index_of` by their `id`."""
    return tuple(
        Binding(module, attribute, index_of[id(param)])
        for module in owners
        for attribute, param in module._parameters.items()
        if param is not None
    )


def bind(bindings: Iterable[Binding], params: Any) -> None:
    """Put those of `params`, by their numbers, into the modules of `bindings`."""
    for module, attribute, param in bindings:
        module._parameters[attribute] = params[param]


@dataclass(frozen=True, slots=True)
class DecoderParts:
    """Parts of a causal language model."""

    base: nn.Module
    """The model without its head, whose configuration has the plans."""
    layers: nn.ModuleList
    embedding: nn.Embedding
    head: nn.Linear

    @classmethod
    def find(cls, model: nn.Module) -> DecoderParts:
        """Find the parts of `model`. Raises LookupError naming the one that it does not have."""
        lists = list(_outermost_lists(model))
        if not lists:
            raise LookupError("has no list of decoder layers")
        layers = max(lists, key=_num_elements)
        embedding, head = _embedding_of(model), model.get_output_embeddings()
        for name, part in (("input embedding", embedding), ("output head", head)):
            if getattr(part, "weight", None) is None:
                raise LookupError(f"has no {name} that transformers' accessor would give")
        return cls(_base_of(model, layers), layers, embedding, head)

    def outer_modules(self, model: nn.Module) -> list[nn.Module]:
        """Modules of `model` outside its layers that have parameters of their own, in the order in
        which they were made.
        """
        inside = set(self.layers.modules())
        return [
            m
            for m in model.modules()
            if m not in inside and any(p is not None for p in m._parameters.values())
        ]


def _outermost_lists(module: nn.Module) -> Iterator[nn.ModuleList]:
    for child in module.children():
        if isinstance(child, nn.ModuleList):
            if len(child):
                yield child
        else:
            yield from _outermost_lists(child)


def _num_elements(module: nn.Module) -> int:
    return sum(shape_of(param).numel() for param in module.parameters())


def _embedding_of(model: nn.Module) -> Any:
    try:
        return model.get_input_embeddings()
    except (NotImplementedError, AttributeError):
        return None


def _base_of(model: nn.Module, layers: nn.ModuleList) -> nn.Module:
    """transformers' base model, or its stand-in where a class does not say."""
    base: nn.Module = model.base_model
    if base is not model:
        return base
    holders = (m for m in model.children() if isinstance(m, PreTrainedModel))
    return next((m for m in holders if layers in m.modules()), model)


@contextlib.contextmanager
def noting_calls(modules: Iterable[nn.Module]) -> Iterator[dict[nn.Module, int]]:
    """Count the calls of each of `modules` inside the block."""
    calls: dict[nn.Module, int] = {}

    def note(module: nn.Module, _args: Any) -> None:
        calls[module] = calls.get(module, 0) + 1

    handles = [module.register_forward_pre_hook(note) for module in modules]
    try:
        yield calls
    finally:
        for handle in handles:
            handle.remove()


def with_holders(
    modules: Sequence[nn.Module], model: nn.Module, layers: nn.Module
) -> list[nn.Module]:
    """`modules` and the modules that contain one of them and not the `layers`: a parent may read
    what its child holds without calling it.
    """
    holders = [
        m
        for m in model.modules()
        if m not in modules and layers not in (inside := set(m.modules())) and inside & set(modules)
    ]
    return [*modules, *holders]
