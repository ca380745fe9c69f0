"""Attention of a kernel as one operator with a gradient: what runs eagerly, and what torch.compile
keeps whole, for all lengths at once.

[Note: One graph for all lengths]
Lengths of a micro-batch are values of tensors here, not numbers that a compiler would specialise
on: `cu_seqlens`, `cu_keys`, and in a tensor of the CPU, so that nobody waits for the device, the
longest ones and where long segments are, as many numbers for every micro-batch. Eager layers call
the same functions without torch.library, whose wrappers cost tens of microseconds a call.

[Note: Sinks]
An attention sink is a score of one more column in each softmax, which has no value. With it the
logarithm of a row's sum is lse' = log(exp(lse) + exp(sink)), and the output exp(lse - lse') times
what it was. The kernel's backward computes probabilities as exp(score - lse) and needs the dot
product of gradient and output, so lse' and the scaled output give it the gradients with the sink;
the sink's own is -sum_t exp(sink - lse'_t) (gradient_t . output_t). So every kernel takes sinks.

Legend: as in `attention_kernels`.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ds_hydra.engine.model.attention_kernels import (
    Demand,
    Ends,
    Kernel,
    LongSegment,
    Scoring,
    load_kernel,
)

Boundaries = tuple[Tensor, Tensor, Tensor]
"""`cu_seqlens`, `cu_keys`, and what `count_on_host` gives."""
_MOST_LONG = 16
"""Long segments of a micro-batch that may have calls of their own."""


def count_on_host(lengths: Sequence[int], key_lengths: Sequence[int]) -> Tensor:
    """[5 + 5 x 16] int64 on the CPU: the longest of segments with `lengths`, the most keys of one,
    both of those that are not long, whether some segment sees keys before its own, and each that is
    long (`LongSegment`), or zeros.
    """
    found = [s for s in LongSegment.of(lengths, key_lengths) if s.is_long]
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
    """A kernel by name, and what queries (and keys) and values are padded to for it."""

    name: str
    query_width: int
    value_width: int

    @classmethod
    def of(cls, kernel: Kernel, demand: Demand) -> KernelUse:
        """How `kernel` runs what is asked for."""
        return cls(kernel.name, *kernel.padded_widths(demand.query_width, demand.value_width))


def attend(
    use: KernelUse, heads: Sequence[Tensor], boundaries: Boundaries, scoring: Scoring
) -> Tensor:
    """[T, H, E] of queries [T, H, D], keys [N, K, D] and values [N, K, E], causal.

    Zeros that pad add nothing to scores, and what values have of them is cut off.
    """
    query, key, value = heads
    value_width = value.shape[-1]
    query, key = _pad(query, use.query_width), _pad(key, use.query_width)
    value = _pad(value, use.value_width)
    run: Any = _run_operator if torch.compiler.is_compiling() else _apply
    # 0 stands for none, because the operator's schema has plain numbers.
    scale, window, softcap, sinks_H = scoring
    out: Tensor = run(
        query, key, value, sinks_H, *boundaries, use.name, scale, window or 0, softcap or 0.0
    )
    return out if use.value_width == value_width else out[..., :value_width]


def _pad(heads: Tensor, width: int) -> Tensor:
    missing = width - heads.shape[-1]
    return nn.functional.pad(heads, (0, missing)) if missing else heads


def _forward(
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
    """Without a window that hides nothing: kernels are faster without one."""
    return Scoring(scale, window if 0 < window < ends.longest_keys else None, softcap or None)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    query, key, value, sinks_H, *rest = inputs
    boundaries, ctx.options = rest[:3], rest[3:]
    ctx.save_for_backward(query, key, value, sinks_H, *output, *boundaries)


def _grads(ctx: Any, differentiate: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    saved = ctx.saved_tensors  # once: a checkpoint makes them anew
    *grads, grad_sinks = differentiate(grad, *saved, *ctx.options)
    return *grads, None if saved[3] is None else grad_sinks, *(None,) * 7


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


_operator = torch.library.custom_op(
    "ds_hydra::attention",
    _operate,
    mutates_args=(),
    schema=f"({_INPUTS.format('')}) -> (Tensor, Tensor)",
)
_gradient_operator = torch.library.custom_op(
    "ds_hydra::attention_backward",
    _differentiate,
    mutates_args=(),
    schema=f"(Tensor grad, {_INPUTS.format('Tensor out, Tensor lse, ')}) -> (Tensor, Tensor, Tensor, Tensor)",
)


@_operator.register_fake
def _(query: Tensor, _key: Tensor, value: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    tokens, heads, _width = query.shape
    out = query.new_empty(tokens, heads, value.shape[-1])
    return out, query.new_empty((heads, tokens), dtype=torch.float32)


@_gradient_operator.register_fake
def _(
    _grad: Tensor, query: Tensor, key: Tensor, value: Tensor, sinks_H: Tensor | None, *_: Any
) -> tuple[Tensor, ...]:
    grad_sinks = query.new_empty(0) if sinks_H is None else torch.empty_like(sinks_H)
    return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value), grad_sinks


def _backward_of_operator(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    return _grads(ctx, _gradient_operator, grad)


_operator.register_autograd(_backward_of_operator, setup_context=_save)


def _run_operator(*inputs: Any) -> Tensor:
    out: Tensor = _operator(*inputs)[0]
    return out
