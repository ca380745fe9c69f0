"""Attention of a packed micro-batch as one operator with a gradient: by a kernel, for all lengths
at once, what runs eagerly and what torch.compile keeps whole; and by one call of torch's for each
sequence, right wherever torch runs, in any dtype, and what kernels are compared with.

[Note: One graph for all lengths]
Lengths of a micro-batch are values of tensors here, not numbers that a compiler would specialise
on: `cu_seqlens`, `cu_keys`, and in a tensor of the CPU, so that nobody waits for the device, the
longest ones and where long segments are, as many numbers for every micro-batch. Eager layers call
the same functions without torch.library, whose calls cost microseconds of the host.

[Note: Sinks]
An attention sink is a score of one more column in each softmax, which has no value. With it the
logarithm of a row's sum is lse' = log(exp(lse) + exp(sink)), and the output exp(lse - lse') times
what it was. The kernel's backward computes probabilities as exp(score - lse) and needs the dot
product of gradient and output, so lse' and the scaled output give it the gradients with the sink;
the sink's own is -sum_t exp(sink - lse'_t) (gradient_t . output_t). So every kernel takes sinks.

Legend: as in `attention_contract`.

[Note: Segments one by one]
Queries are the last of their keys: segment i has `lengths[i]` queries and `key_lengths[i]` keys, as
many where sequences are whole, and query j sees keys up to number key_length - length + j.

Legend: H query heads, K key-value heads, G = H / K, T queries, N keys, D head dimension; n and m
queries and keys of a segment.
"""

from __future__ import annotations

import contextlib
import heapq
import itertools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ds_hydra.engine.model.attention_contract import Demand, Ends, Kernel, LongSegment, Scoring
from ds_hydra.engine.model.attention_kernels import load_kernel
from ds_hydra.engine.parallel import recomputation
from ds_hydra.engine.ranks.process import in_one_order, only_warns

Boundaries = tuple[Tensor, Tensor, Tensor]
"""`cu_seqlens`, `cu_keys`, and the result of `count_on_host`."""
_MOST_LONG = 16
"""Long segments of a micro-batch that may have calls of their own."""


def count_on_host(lengths: Sequence[int], key_lengths: Sequence[int]) -> Tensor:
    """[5 + 5 x 16] int64 on the CPU: the longest of segments with `lengths`, the most keys of one,
    both of those that are not long, whether some segment sees keys before its own, and each that is
    long (`LongSegment`), or zeros.
    """
    found = LongSegment.of(lengths, key_lengths)
    # Back in their order, in which `attention_cudnn` takes their rows out of the others.
    long = sorted(heapq.nlargest(_MOST_LONG, found, key=lambda s: s.num_pairs))
    numbers = {segment.number for segment in long}
    rest = [
        max((n for number, n in enumerate(of) if number not in numbers), default=0)
        for of in (lengths, key_lengths)
    ]
    num_places = len(LongSegment._fields) * _MOST_LONG
    places = list(itertools.chain.from_iterable(long))
    places += [0] * (num_places - len(places))
    has_pieces = list(lengths) != list(key_lengths)
    return torch.tensor([max(lengths), max(key_lengths), *rest, has_pieces, *places])


class KernelUse(NamedTuple):
    """A kernel by name, and the widths to which queries (and keys) and values are padded for it."""

    name: str
    query_width: int
    value_width: int

    @classmethod
    def of(cls, kernel: Kernel, demand: Demand) -> KernelUse:
        """The use of `kernel` for `demand`, with padded widths."""
        return cls(kernel.name, *kernel.padded_widths(demand.query_width, demand.value_width))


def attend(
    use: KernelUse, heads: Sequence[Tensor], boundaries: Boundaries, scoring: Scoring
) -> Tensor:
    """[T, H, E] of queries [T, H, D], keys [N, K, D] and values [N, K, E], causal.

    Zeros that pad add nothing to scores, and what values have of them is cut off.
    """
    query, key, value = heads
    value_width = value.shape[-1]
    keeps = query.requires_grad or key.requires_grad or value.requires_grad
    query, key = _pad(query, use.query_width), _pad(key, use.query_width)
    value = _pad(value, use.value_width)
    run: Any = _run_operator if torch.compiler.is_compiling() else _apply
    # 0 stands for none, because the operator's schema has plain numbers.
    scale, window, softcap, sinks_H = scoring
    numbers = scale, window or 0, softcap or 0.0
    out: Tensor = run(query, key, value, sinks_H, *boundaries, use.name, *numbers, keeps)
    return out if use.value_width == value_width else out[..., :value_width]


def _pad(heads: Tensor, width: int) -> Tensor:
    missing = width - heads.shape[-1]
    if missing and not torch.compiler.is_compiling():  # compiled layers exchange nothing here
        recomputation.settle()
    return nn.functional.pad(heads, (0, missing)) if missing else heads


def _forward(*inputs: Any) -> tuple[Tensor, Tensor]:
    *rest, keeps = inputs
    return recomputation.run_once(lambda: _compute(*rest), keeps=keeps)


def _compute(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    sinks_H: Tensor | None,
    cu_seqlens: Tensor,
    cu_keys: Tensor,
    on_host: Tensor,
    kernel: str,
    *numbers: Any,
) -> tuple[Tensor, Tensor]:
    ends = _ends(cu_seqlens, cu_keys, on_host, sinks_H)
    scoring = _scoring(ends, *numbers)
    out, lse_HT = load_kernel(kernel).forward(query, key, value, ends, scoring)
    if sinks_H is not None:
        total_HT = torch.logaddexp(lse_HT, sinks_H.float().unsqueeze(1))
        out = (out * (lse_HT - total_HT).exp().t().unsqueeze(-1)).to(query.dtype)
        lse_HT = total_HT
    return out, lse_HT


def _backward(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    sinks_H: Tensor | None,
    out: Tensor,
    lse_HT: Tensor,
    cu_seqlens: Tensor,
    cu_keys: Tensor,
    on_host: Tensor,
    kernel: str,
    *numbers: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    recomputation.settle()
    ends = _ends(cu_seqlens, cu_keys, on_host, sinks_H)
    scoring = _scoring(ends, *numbers)
    grads = load_kernel(kernel).backward(grad, query, key, value, out, lse_HT, ends, scoring)
    if sinks_H is None:
        # The operator has four results, with sinks or without.
        return *grads, query.new_empty(0)
    dots_HT = (grad.float() * out).sum(dim=-1).t()
    grad_H = -((sinks_H.float().unsqueeze(1) - lse_HT).exp() * dots_HT).sum(dim=1)
    return *grads, grad_H.to(sinks_H.dtype)


def _ends(cu_seqlens: Tensor, cu_keys: Tensor, on_host: Tensor, sinks_H: Tensor | None) -> Ends:
    longest, longest_keys, rest, rest_keys, has_pieces, *places = on_host.tolist()
    size = len(LongSegment._fields)
    found = (LongSegment(*places[n : n + size]) for n in range(0, len(places), size))
    # Sinks change output and log-sum-exp afterwards, which no trial of a long segment has.
    # Places without a segment are zeros, and no segment ends at key 0.
    long = () if sinks_H is not None else tuple(s for s in found if s.last)
    sizes = longest, longest_keys, rest, rest_keys
    return Ends(cu_seqlens, cu_keys, *sizes, long, bool(has_pieces))


def _scoring(ends: Ends, scale: float, window: int, softcap: float) -> Scoring:
    """Scoring for a kernel, without a window that hides nothing: kernels are faster without one."""
    return Scoring(scale, window if 0 < window < ends.longest_keys else None, softcap or None)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    query, key, value, sinks_H, *rest = inputs
    boundaries, ctx.options = rest[:3], rest[3:-1]
    ctx.save_for_backward(query, key, value, sinks_H, *output, *boundaries)


def _grads(ctx: Any, differentiate: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    saved = ctx.saved_tensors  # once: a checkpoint makes them anew
    *grads, grad_sinks = differentiate(grad, *saved, *ctx.options)
    return *grads, None if saved[3] is None else grad_sinks, *(None,) * 8


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> Tensor:
        output = _forward(*inputs)
        _save(ctx, inputs, output)
        return output[0]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return _grads(ctx, _backward, grad)


_apply: Any = super(torch.autograd.Function, _Attention).apply  # as in `parallel.linear`

_INPUTS = (
    "Tensor query, Tensor key, Tensor value, Tensor? sinks, {}Tensor cu_seqlens, Tensor cu_keys, Tensor on_host, "
    "str kernel, float scale, int window, float softcap"
)


def _operate(*inputs: Any) -> tuple[Tensor, Tensor]:
    out, lse_HT = _forward(*inputs)
    return out.contiguous(), lse_HT.contiguous()  # as a compiler is told below


def _differentiate(grad: Tensor, *inputs: Any) -> tuple[Tensor, ...]:
    *grads, grad_sinks = _backward(grad, *inputs)
    return *(map(_laid_out, grads, inputs)), grad_sinks


def _laid_out(grad: Tensor, like: Tensor) -> Tensor:
    """`grad` with the strides that the compiler was told of."""
    if grad.stride() == torch.empty_like(like, device="meta").stride():
        return grad
    return torch.empty_like(like).copy_(grad)


# As `parallel.linear`'s: custom_op would cost three times as much of the host
_library = torch.library.Library("ds_hydra", "FRAGMENT")
_library.define(f"attention({_INPUTS.format('')}, bool keeps) -> (Tensor, Tensor)")
_library.define(
    f"attention_backward(Tensor grad, {_INPUTS.format('Tensor out, Tensor lse, ')}) -> "
    "(Tensor, Tensor, Tensor, Tensor)"
)
_library.impl("attention", _operate, "CompositeExplicitAutograd")
_library.impl("attention_backward", _differentiate, "CompositeExplicitAutograd")
_operator, _gradient_operator = (
    getattr(torch.ops.ds_hydra, name).default for name in ("attention", "attention_backward")
)


@torch.library.register_fake("ds_hydra::attention", lib=_library)
def _(query: Tensor, _key: Tensor, value: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    tokens, heads, _width = query.shape
    out = query.new_empty(tokens, heads, value.shape[-1])
    return out, query.new_empty((heads, tokens), dtype=torch.float32)


@torch.library.register_fake("ds_hydra::attention_backward", lib=_library)
def _(
    _grad: Tensor, query: Tensor, key: Tensor, value: Tensor, sinks_H: Tensor | None, *_: Any
) -> tuple[Tensor, ...]:
    grad_sinks = query.new_empty(0) if sinks_H is None else torch.empty_like(sinks_H)
    return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value), grad_sinks


def _backward_of_operator(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    return _grads(ctx, _gradient_operator, grad)


torch.library.register_autograd(
    "ds_hydra::attention", _backward_of_operator, setup_context=_save, lib=_library
)


def _run_operator(*inputs: Any) -> Tensor:
    out: Tensor = _operator(*inputs)[0]
    return out


_QUERY_BLOCK = 1024
"""Queries whose scores are worked on together."""


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


def _masked(
    query: Tensor, key: Tensor, value: Tensor, scale: float, window: int | None, block: int
) -> Tensor:
    """Attention of one segment in blocks of `block` queries, which see at most `window` keys: with
    blocks of the window linear in its length.
    """
    outputs = [
        _fused(query[:, :, rows], key[:, :, keys], value[:, :, keys], scale, attn_mask=allowed)
        for rows, keys, allowed in _blocks(query, key, window, block)
    ]
    return torch.cat(outputs, dim=2)


def _scored(query: Tensor, key: Tensor, value: Tensor, scoring: Scoring) -> Tensor:
    """Attention of one segment whose scores are capped by tanh or share their softmax with sinks,
    which no fused CPU kernel offers.
    """
    scale, window, softcap, sinks_H = scoring
    num_groups = query.shape[1]
    key_KND, value_KND = key[:, 0], value[:, 0]
    outputs = []
    for rows, keys, allowed in _blocks(query, key, window, _QUERY_BLOCK):
        scores = query[:, :, rows].flatten(1, 2) @ key_KND[:, keys].transpose(-1, -2) * scale
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


def _blocks(
    query: Tensor, key: Tensor, window: int | None, block: int
) -> Iterator[tuple[slice, slice, Tensor]]:
    """Blocks of queries, the keys that each of them sees, and [queries, keys] True where position i
    may see position j: i - window < j <= i.
    """
    num_queries, num_before = query.shape[2], key.shape[2] - query.shape[2]
    for begin in range(0, num_queries, block):
        rows = slice(begin, min(begin + block, num_queries))
        first = max(0, begin + num_before - window + 1) if window else 0
        keys = slice(first, rows.stop + num_before)
        positions_i = torch.arange(begin, rows.stop, device=query.device).unsqueeze(1) + num_before
        positions_j = torch.arange(first, keys.stop, device=query.device).unsqueeze(0)
        allowed = positions_j <= positions_i
        if window:
            allowed &= positions_j > positions_i - window
        yield rows, keys, allowed
