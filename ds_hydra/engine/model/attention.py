"""Attention and rotary embeddings of a packed micro-batch: each token attends inside its own
sequence, at the cost of its own sequence.

Attention is registered with transformers' AttentionInterface as `hydra_varlen`; no mask function is
registered under that name, so transformers builds no mask.

[Note: Frequencies by length]
Frequencies of some rotary embeddings follow the length of a sequence (`dynamic`, `longrope`).
transformers takes the longest position that it sees and, for `dynamic`, remembers it. Here a
sequence gets what the model gives it alone, wherever it lies and whatever ran before, so that a
sequence shard of a micro-batch is as good as the micro-batch.

Legend: B = 1 packed micro-batch, H query heads, K key-value heads (after TP slicing), T tokens of
the micro-batch or queries, t those of a shard or a row, N keys, D head dimension.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map
from transformers import AttentionInterface, PretrainedConfig

from ds_hydra.engine.model import attention_choice
from ds_hydra.engine.model.attention_choice import kernel_for
from ds_hydra.engine.model.attention_contract import Scoring
from ds_hydra.engine.model.attention_operator import (
    Boundaries,
    KernelUse,
    attend,
    attention_per_sequence,
)
from ds_hydra.engine.model.current_micro_batch import (
    PackedMicroBatch,
    current_boundaries,
    current_micro_batch,
)
from ds_hydra.engine.parallel.token_cuts import attend_to_all_rows, attend_to_all_tokens
from ds_hydra.errors import UnsupportedModelError

ATTENTION_NAME = "hydra_varlen"


def hydra_varlen(
    module: nn.Module,
    query_BHTD: Tensor,
    key_BKTD: Tensor,
    value_BKTD: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **_ignored: Any,
) -> tuple[Tensor, None]:
    """Causal attention inside each sequence of the current micro-batch; returns ([1, T, H, D],
    None).

    Under sequence parallelism T are the tokens of this rank's sequence shard, and the call is
    collective over the SP group, under context parallelism over the CP group.

    `sliding_window` w lets a token see itself and the w - 1 tokens before it; `softcap` c replaces
    scores s by c tanh(s / c). `s_aux` [H] are attention sinks: scores of one more column in each
    softmax, which has no value. The number of query heads per key-value head is taken from the
    tensors, because under TP a rank may hold a replica of a key-value head.
    """
    if dropout:
        raise UnsupportedModelError(
            f"{type(module).__name__}: attention dropout {dropout} is not supported; load the model with "
            "from_pretrained(..., attention_dropout=0.0), or set the attribute of its modules that this comes from to 0"
        )
    if attention_mask is not None:
        raise UnsupportedModelError(
            f"{type(module).__name__}: the model hands it a mask of its own, and attention over a packed micro-batch "
            "knows causal, windowed and capped attention alone"
        )
    scale = scaling if scaling is not None else query_BHTD.shape[-1] ** -0.5
    scoring = Scoring(scale, sliding_window, softcap, s_aux)
    boundaries = current_boundaries()
    use = _find_kernel(query_BHTD, value_BKTD, softcap)
    if boundaries is None or use is None:
        out_BTHD = _attend_eagerly(query_BHTD, key_BKTD, value_BKTD, scoring)
    else:
        out_BTHD = _by_kernel(use, (query_BHTD, key_BKTD, value_BKTD), boundaries, scoring)
    return out_BTHD.contiguous(), None  # some families view it


def _find_kernel(query: Tensor, value: Tensor, softcap: float | None) -> KernelUse | None:
    if not attention_choice.has_kernels(query.device):
        return None
    return kernel_for(query.shape[-1], value.shape[-1], query.dtype, softcap is not None)


def _by_kernel(
    use: KernelUse, heads: Sequence[Tensor], boundaries: Boundaries, scoring: Scoring
) -> Tensor:
    # Backward of an index would fill and copy a tensor
    heads_last = [t.squeeze(0).transpose(0, 1) for t in heads]
    return attend(use, heads_last, boundaries, scoring).unsqueeze(0)


@torch.compiler.disable  # lengths are no shapes, and collectives keep the order of the schedule
def _attend_eagerly(
    query_BHTD: Tensor, key_BKTD: Tensor, value_BKTD: Tensor, scoring: Scoring
) -> Tensor:
    """[1, T, H, D] where other ranks have tokens of the micro-batch, or no kernel runs."""
    packed_micro_batch = current_micro_batch()
    assert packed_micro_batch is not None, "attention outside a stage model"
    layout = packed_micro_batch.layout
    is_cut = layout is not None and layout.size > 1
    sinks_H = scoring.sinks_H
    if is_cut and sinks_H is not None:
        # The exchange of SP gives rank i the i-th part of consecutive heads.
        sinks_H = sinks_H.chunk(layout.size)[layout.rank]

    def attend_to(query_BHTD: Tensor, key_BKND: Tensor, value_BKND: Tensor, heads: slice) -> Tensor:
        own = scoring._replace(sinks_H=None if sinks_H is None else sinks_H[heads])
        return _attend(query_BHTD, key_BKND, value_BKND, packed_micro_batch, own)

    def attend_to_rows(
        query_BHTD: Tensor, key_BKTD: Tensor, value_BKTD: Tensor, heads: slice
    ) -> Tensor:
        keys = packed_micro_batch.keys
        if keys is None:
            return attend_to(query_BHTD, key_BKTD, value_BKTD, heads)

        def attend_to_part(query: Tensor, key: Tensor, value: Tensor, own: slice) -> Tensor:
            # Counted among all heads of this rank, as its sinks are, not in SP's part.
            own = slice(heads.start + own.start, heads.start + own.stop)
            return attend_to(query, key, value, own)

        return attend_to_all_rows(query_BHTD, key_BKTD, value_BKTD, keys, attend_to_part)

    whole = query_BHTD, key_BKTD, value_BKTD
    if is_cut:
        return attend_to_all_tokens(*whole, layout, attend_to_rows)
    return attend_to_rows(*whole, slice(0, query_BHTD.shape[1]))


def _attend(
    query_BHTD: Tensor,
    key_BKND: Tensor,
    value_BKND: Tensor,
    packed_micro_batch: PackedMicroBatch,
    scoring: Scoring,
) -> Tensor:
    """[1, T, H, D] of segments and their N keys on this rank, by the kernel that was chosen."""
    heads = (query_BHTD, key_BKND, value_BKND)
    use = _find_kernel(query_BHTD, value_BKND, scoring.softcap)
    if use is not None:
        return _by_kernel(use, heads, packed_micro_batch.boundaries, scoring)
    lengths, key_lengths = packed_micro_batch.lengths, packed_micro_batch.key_lengths
    if scoring.window is not None and scoring.window >= max(key_lengths):
        scoring = scoring._replace(window=None)  # one that hides nothing would only cost masks
    return attention_per_sequence(*heads, scoring, lengths, key_lengths).transpose(1, 2)


def use_packed_attention(model: nn.Module) -> None:
    """Let the attention of `model` be `hydra_varlen`."""
    AttentionInterface.register(ATTENTION_NAME, hydra_varlen)
    for module in model.modules():
        if isinstance(getattr(module, "config", None), PretrainedConfig):
            module.config._attn_implementation = ATTENTION_NAME


def follow_each_sequence(model: nn.Module) -> None:
    """Let the rotary embeddings of `model` whose frequencies follow from lengths serve packed
    micro-batches.
    """
    for module in model.modules():
        if _types_by_length(module):
            module.forward = functools.partial(_forward, module, module.forward)


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
    """Run `plain` for each sequence of the micro-batch alone. `position_ids` add nothing to the
    micro-batch.
    """
    micro_batch = current_micro_batch()
    assert micro_batch is not None, "a model without its stage model"
    kwargs = {} if layer_type is None else {"layer_type": layer_type}
    original = _original_length(module, layer_type)
    tables: dict[int, Any] = {}
    # The longest first: lengths up to the original share one table, which has to fit all of them.
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
    if micro_batch.layout is None:
        return whole
    size, rank = micro_batch.layout.size, micro_batch.layout.rank
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
    """Reset what `dynamic` keeps of longer sequences. `longrope` keeps nothing."""
    prefix = "" if layer_type is None else f"{layer_type}_"
    if hasattr(module, f"{prefix}original_inv_freq"):
        setattr(module, f"{prefix}max_seq_len_cached", module.original_max_seq_len)
        setattr(module, f"{prefix}inv_freq", getattr(module, f"{prefix}original_inv_freq").clone())
