"""Attention of a packed micro-batch by one call of torch's for each sequence: right wherever torch
runs, in any dtype, and what kernels are compared with.

[Note: Segments one by one]
Queries are the last of their keys: segment i has `lengths[i]` queries and `key_lengths[i]` keys, as
many where sequences are whole, and query j sees keys up to number key_length - length + j.

Legend: H query heads, K key-value heads, G = H / K, T queries, N keys, D head dimension; n and m
queries and keys of a segment.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ds_hydra.engine.model.attention_kernels import Scoring
from ds_hydra.engine.ranks.process import in_one_order, only_warns

_QUERY_BLOCK = 1024
"""Queries whose scores are worked on together."""

_FUSED_DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


def attention_per_sequence(
    query_BHTD: Tensor,
    key_BKND: Tensor,
    value_BKND: Tensor,
    scoring: Scoring,
    lengths: Sequence[int],
    key_lengths: Sequence[int] | None = None,
) -> Tensor:
    """One attention call per segment: the cost is the sum over them, whatever the backend.

    `lengths` add up to T, `key_lengths` (None: the same) to N; returns [1, H, T, D].
    """
    # Heads that share keys see one copy of them, in the forward pass and kept for backward.
    num_kv_heads = key_BKND.shape[1]
    query_KGTD = query_BHTD[0].unflatten(0, (num_kv_heads, -1))
    key_KGND, value_KGND = (
        heads[0].unsqueeze(1).expand(-1, query_KGTD.shape[1], -1, -1)
        for heads in (key_BKND, value_BKND)
    )
    key_lengths = lengths if key_lengths is None else key_lengths
    # split's backward is one concatenation; slicing each sequence would zero-fill a whole
    # micro-batch per sequence.
    segments = zip(
        query_KGTD.split(list(lengths), dim=2),
        key_KGND.split(list(key_lengths), dim=2),
        value_KGND.split(list(key_lengths), dim=2),
        strict=True,
    )
    scale, window, softcap, sinks_H = scoring
    if softcap is not None or sinks_H is not None:
        parts = [_scored(q, k, v, scoring) for q, k, v in segments]
    elif window is not None:
        parts = [_masked(q, k, v, scale, window, window) for q, k, v in segments]
    else:
        parts = [_causal(q, k, v, scale) for q, k, v in segments]
    whole = parts[0] if len(parts) == 1 else torch.cat(parts, dim=2)
    return whole.flatten(0, 1).unsqueeze(0)


def _causal(query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
    if query.shape[2] == key.shape[2]:
        return _fused(query, key, value, scale, is_causal=True)
    is_fused = query.device.type == "cpu" and query.dtype in _FUSED_DTYPES
    if is_fused and query.shape[-1] == value.shape[-1]:
        out: Tensor = _AfterOthers.apply(query, key, value, scale)
        return out
    return _masked(query, key, value, scale, None, _QUERY_BLOCK)


def _fused(query: Tensor, key: Tensor, value: Tensor, scale: float, **options: Any) -> Tensor:
    """torch's attention, whose backward adds in one order where that is asked for."""
    out = F.scaled_dot_product_attention(query, key, value, scale=scale, **options)
    if out.requires_grad and only_warns():
        node = out.grad_fn
        if "Attention" not in node.name():  # what cuts off columns that pad
            node = node.next_functions[0][0]
        order = contextlib.ExitStack()
        node.register_prehook(lambda _: order.enter_context(in_one_order()))
        node.register_hook(lambda *_: order.close())
    return out


class _AfterOthers(torch.autograd.Function):
    """Causal attention on a CPU of queries that are the last of their keys, without a mask.

    The kernel runs twice, over the keys before all queries, and over the square of queries and
    their own keys; both softmaxes have one denominator, which backward takes for each of them (as
    in ring attention, Liu et al. 2023).
    """

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        num_before = key.shape[2] - query.shape[2]
        parts = [
            torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
                query, k, v, 0.0, is_causal, scale=scale
            )
            for k, v, is_causal in _before_and_own(key, value, num_before)
        ]
        total = torch.logaddexp(parts[0][1], parts[1][1])
        # Each part is normalised by its own keys: its share of the whole denominator weighs it.
        weights = [(logs - total).exp().unsqueeze(-1).to(query.dtype) for _, logs in parts]
        out: Tensor = sum(weight * part[0] for weight, part in zip(weights, parts, strict=True))
        ctx.save_for_backward(query, key, value, out, total)
        ctx.scale = scale
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, out, total = ctx.saved_tensors
        num_before = key.shape[2] - query.shape[2]
        grads = [
            torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
                grad, query, k, v, out, total, 0.0, is_causal, scale=ctx.scale
            )
            for k, v, is_causal in _before_and_own(key, value, num_before)
        ]
        grad_key, grad_value = (torch.cat([part[i] for part in grads], dim=2) for i in (1, 2))
        return grads[0][0] + grads[1][0], grad_key, grad_value, None


def _before_and_own(
    key: Tensor, value: Tensor, num_before: int
) -> list[tuple[Tensor, Tensor, bool]]:
    """Keys and values that all queries see, then those of the queries; whether they are causal."""
    return [
        (key[:, :, :num_before], value[:, :, :num_before], False),
        (key[:, :, num_before:], value[:, :, num_before:], True),
    ]


def _masked(
    query: Tensor, key: Tensor, value: Tensor, scale: float, window: int | None, block: int
) -> Tensor:
    """Attention of one segment in blocks of `block` queries, which see at most `window` keys: with
    blocks of the window linear in its length.
    """
    num_queries, num_before = query.shape[2], key.shape[2] - query.shape[2]
    outputs = []
    for begin in range(0, num_queries, block):
        end = min(begin + block, num_queries)
        keys, allowed = _visible(begin + num_before, end + num_before, window, query.device)
        outputs.append(
            _fused(
                query[:, :, begin:end],
                key[:, :, keys],
                value[:, :, keys],
                scale,
                attn_mask=allowed,
            )
        )
    return torch.cat(outputs, dim=2)


def _scored(query: Tensor, key: Tensor, value: Tensor, scoring: Scoring) -> Tensor:
    """Attention of one segment whose scores are capped by tanh or share their softmax with sinks,
    which no fused CPU kernel offers.
    """
    scale, window, softcap, sinks_H = scoring
    num_queries, num_before = query.shape[2], key.shape[2] - query.shape[2]
    num_groups = query.shape[1]
    key_KND, value_KND = key[:, 0], value[:, 0]
    outputs = []
    for begin in range(0, num_queries, _QUERY_BLOCK):
        end = min(begin + _QUERY_BLOCK, num_queries)
        keys, allowed = _visible(begin + num_before, end + num_before, window, query.device)
        scores = query[:, :, begin:end].flatten(1, 2) @ key_KND[:, keys].transpose(-1, -2) * scale
        scores = scores.unflatten(1, (num_groups, -1))
        if softcap is not None:
            scores = torch.tanh(scores / softcap) * softcap
        scores = scores.masked_fill(~allowed, float("-inf"))
        if sinks_H is not None:
            sinks = sinks_H.view(*scores.shape[:2], 1, 1).expand(*scores.shape[:3], 1)
            scores = torch.cat([scores, sinks], dim=-1)
        weights = scores.softmax(dim=-1, dtype=torch.float32).to(query.dtype)
        # Sinks have a part of the softmax and no value: their column is left out here.
        weights = weights[..., : keys.stop - keys.start].flatten(1, 2)
        outputs.append((weights @ value_KND[:, keys]).unflatten(1, (num_groups, -1)))
    return torch.cat(outputs, dim=2)


def _visible(
    begin: int, end: int, window: int | None, device: torch.device
) -> tuple[slice, Tensor]:
    """The keys that queries at positions `begin` to `end` see, and [end - begin, keys] True where
    position i may see position j: i - window < j <= i.
    """
    first = max(0, begin - window + 1) if window else 0
    queries = torch.arange(begin, end, device=device).unsqueeze(1)
    keys = torch.arange(first, end, device=device).unsqueeze(0)
    allowed = keys <= queries
    if window:
        allowed &= keys > queries - window
    return slice(first, end), allowed
