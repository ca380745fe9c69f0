"""Modules of layers that carry states from token to token: which ones would mix the sequences of a
packed micro-batch, and how these run one sequence after the other.

[Note: Modules apart]
Recurrences and convolutions (gated delta nets, Mamba, LFM2's convolutions) see the tokens before a
token whatever sequence they are of, unless a kernel is told where sequences begin. Without such a
kernel the module alone, a child of its layer, runs each sequence by itself. Attention, experts and
all else of the model see the packed micro-batch, and each layer is called once, as layers that are
gathered and checkpointed have to be. Which modules these are is tried, not listed: on a small copy
each child of a layer runs a packed micro-batch and the same sequences alone.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from ds_hydra.engine.model.current_micro_batch import (
    current_micro_batch,
    is_computed_again,
    running,
)


def run_apart(layers: Iterable[nn.Module], kinds: frozenset[str]) -> None:
    """Let children of `layers` whose classes have these names run one sequence after the other."""
    for layer in layers:
        for child in layer.children():
            if type(child).__name__ in kinds:
                child.forward = functools.partial(_forward, child.forward)


@contextlib.contextmanager
def noting_mixed(layers: Iterable[nn.Module], most_difference: float) -> Iterator[set[str]]:
    """Note the classes of children of `layers` that mix sequences inside of the block, where they
    give what each sequence alone does.
    """
    kinds: set[str] = set()

    def compare(child: nn.Module, args: Any, kwargs: dict[str, Any], output: Any) -> Any:
        try:
            alone = _run_each(child.forward, args, kwargs)
            packed, wanted = _first(output), _first(alone)
            is_mixed = float((packed - wanted).norm()) > most_difference * float(wanted.norm())
        except Exception:  # a family's own code, which takes more than a row of tokens
            return None
        if not is_mixed:
            return None
        kinds.add(type(child).__name__)
        return alone

    handles = [
        child.register_forward_hook(compare, with_kwargs=True)
        for layer in layers
        for child in layer.children()
    ]
    try:
        yield kinds
    finally:
        for handle in handles:
            handle.remove()


def _first(output: Any) -> Tensor:
    first: Tensor = output[0] if isinstance(output, tuple) else output
    return first


@torch.compiler.disable  # lengths are no shapes
def _forward(plain: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    micro_batch = current_micro_batch()
    if micro_batch is None or len(micro_batch.lengths) == 1:
        return plain(*args, **kwargs)
    return _run_each(plain, args, kwargs)


def _run_each(plain: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
    """Run `plain` on each sequence of the current micro-batch and join the outputs along the
    tokens. Of arguments [1, T, ...] a call gets the sequence's tokens.
    """
    micro_batch = current_micro_batch()
    assert micro_batch is not None, "a model without its stage model"
    num_tokens, begin, outputs = micro_batch.num_tokens, 0, []
    for alone in micro_batch.each_alone():
        of_sequence = slice(begin, begin + alone.num_tokens)
        cut = functools.partial(_cut, of_sequence=of_sequence, num_tokens=num_tokens)
        with running(alone, again=is_computed_again()):
            outputs.append(plain(*tree_map(cut, args), **tree_map(cut, kwargs)))
        begin = of_sequence.stop
    return tree_map(_join, *outputs)


def _cut(value: Any, *, of_sequence: slice, num_tokens: int) -> Any:
    has_tokens = isinstance(value, Tensor) and value.dim() > 1 and value.shape[1] == num_tokens
    return value[:, of_sequence] if has_tokens else value


def _join(first: Any, *others: Any) -> Any:
    return torch.cat([first, *others], dim=1) if isinstance(first, Tensor) else first
