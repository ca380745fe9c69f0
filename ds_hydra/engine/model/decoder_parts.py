"""Where a model of any family has its decoder layers, embedding and head, and what stands in for a
layer of another stage.

Names differ between families (`model.layers`, `transformer.h`, `gpt_neox.layers`), so layers are
the largest list of modules that is in no other list, embedding and head are what transformers'
accessors give, and what else runs before the first layer is tried.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ds_hydra.engine.model.units import Binding, shape_of


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
        """The parts of `model`. Raises LookupError naming the one that it does not have."""
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
    """transformers' base model, or what stands for it where a class does not say."""
    base: nn.Module = model.base_model
    if base is not model:
        return base
    holders = (m for m in model.children() if isinstance(m, PreTrainedModel))
    return next((m for m in holders if layers in m.modules()), model)


class StageEnd(Exception):
    """Leaves the model's forward after the last layer of a stage that is not the last one."""

    def __init__(self, hidden: Tensor):
        super().__init__()
        self.hidden = hidden


class Slot(nn.Module):
    """Stands in for a layer of another stage.

    It answers as layers of the model do, with a tensor or with a tuple of `num_outputs` of which
    the hidden state is the first. The first one gives the hidden state of the stage before,
    whatever the model has made of its inputs; the one after a stage's own layers ends the forward;
    others pass the hidden state through.
    """

    def __init__(self, layer: nn.Module):
        super().__init__()
        self.__dict__["_layer"] = layer  # no child of it
        self.num_outputs = 0
        self.entering: Tensor | None = None
        self.ends = False

    def __getattr__(self, name: str) -> Any:
        """What the model asks its layer for, as the kind of its attention."""
        return getattr(self.__dict__["_layer"], name)

    def forward(self, hidden_states: Tensor, *_args: Any, **_kwargs: Any) -> Any:
        """`hidden_states`, or those that enter the stage; raises StageEnd where the stage ends."""
        if self.ends:
            raise StageEnd(hidden_states)
        hidden = hidden_states if self.entering is None else self.entering
        return (hidden, None)[: self.num_outputs] if self.num_outputs else hidden


def bind_zeros(bindings: Iterable[Binding], params: Sequence[nn.Parameter], device: Any) -> None:
    """Put zeros of the shapes of `params` into the modules of `bindings`: strides of 0, hence no
    memory.
    """
    for binding in bindings:
        meta = params[binding.param]
        zero = torch.zeros((), dtype=meta.dtype, device=device).expand(meta.shape)
        binding.module._parameters[binding.attribute] = nn.Parameter(zero, requires_grad=False)


@contextlib.contextmanager
def noting_calls(modules: Iterable[nn.Module]) -> Iterator[dict[nn.Module, int]]:
    """How often each of `modules` is called inside the block."""
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
