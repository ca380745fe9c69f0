"""Rotary embeddings whose frequencies follow the length of a sequence (`dynamic`, `longrope`): each
sequence of a packed micro-batch has its own.

transformers takes the longest position in sight and, for `dynamic`, remembers it. Here a sequence
gets what the model gives it alone, wherever it lies and whatever ran before, so that a sequence
shard of a micro-batch is as good as the micro-batch.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from ds_hydra.engine.model.sight import find_in_sight


def follow_each_sequence(model: nn.Module) -> None:
    """Let the rotary embeddings of `model` whose frequencies follow from lengths serve packed
    micro-batches.
    """
    for module in model.modules():
        if _types_by_length(module):
            module.forward = functools.partial(_forward, module, module.forward)  # type: ignore[method-assign]


def _types_by_length(module: nn.Module) -> list[str]:
    found = getattr(module, "rope_type", None)
    types = found.values() if isinstance(found, dict) else [found]
    return [t for t in types if isinstance(t, str) and ("dynamic" in t or t == "longrope")]


def _forward(
    module: nn.Module,
    plain: Callable[..., Any],
    x: Tensor,
    position_ids: Tensor,
    layer_type: str | None = None,
) -> Any:
    """What `plain` gives each sequence of the micro-batch alone; `position_ids` say no more than
    the micro-batch does.
    """
    micro_batch = find_in_sight()
    assert micro_batch is not None, "a model without its stage model"
    kwargs = {} if layer_type is None else {"layer_type": layer_type}
    original = _original_length(module, layer_type)
    tables: dict[int, Any] = {}
    for length in sorted({segment.length for segment in micro_batch.segments}, reverse=True):
        if (key := max(length, original)) not in tables:  # one table for all that are no longer
            _forget_lengths(module, layer_type)
            positions = torch.arange(length, device=x.device).unsqueeze(0)
            tables[key] = plain(x, positions, **kwargs)
    parts = [
        tree_map(
            lambda table, part=part: table[:, part.begin : part.end],
            tables[max(part.length, original)],
        )
        for part in micro_batch.segments
    ]
    whole = tree_map(lambda *of_sequences: torch.cat(of_sequences, dim=1), *parts)
    if micro_batch.sequence_shard is None:
        return whole
    size, rank = micro_batch.sequence_shard.size, micro_batch.sequence_shard.rank
    return tree_map(lambda table: table.chunk(size, dim=1)[rank], whole)


def _original_length(module: Any, layer_type: str | None) -> int:
    """Tokens up to which frequencies stay as they are."""
    rope_type = module.rope_type if layer_type is None else module.rope_type[layer_type]
    if rope_type != "longrope":
        return int(getattr(module, "original_max_seq_len", 0))
    parameters = module.config.rope_parameters
    parameters = parameters if layer_type is None else parameters[layer_type]
    return int(parameters["original_max_position_embeddings"])


def _forget_lengths(module: Any, layer_type: str | None) -> None:
    """What `dynamic` remembers of longer sequences; `longrope` remembers nothing."""
    prefix = "" if layer_type is None else f"{layer_type}_"
    if hasattr(module, f"{prefix}original_inv_freq"):
        setattr(module, f"{prefix}max_seq_len_cached", module.original_max_seq_len)
        setattr(module, f"{prefix}inv_freq", getattr(module, f"{prefix}original_inv_freq").clone())
