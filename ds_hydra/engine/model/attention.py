"""Attention over a packed micro-batch: each token attends inside its own sequence, at the cost of
its own sequence.

Registered with transformers' AttentionInterface as `hydra_varlen`; no mask function is registered
under that name, so transformers builds no mask. Legend: B = 1 packed micro-batch, H query heads, K
key-value heads (after TP slicing), T tokens of the micro-batch, D head dimension.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ds_hydra.engine.parallel.ulysses import SequenceShard, gather_micro_batch, scatter_micro_batch
from ds_hydra.engine.ranks.host_memory import to_device
from ds_hydra.errors import UnsupportedModelError

ATTENTION_NAME = "hydra_varlen"


@dataclass(frozen=True, slots=True)
class PackedMicroBatch:
    """Where the sequences of a packed micro-batch are; passed through the model's own keyword
    arguments.
    """

    lengths: tuple[int, ...]
    cu_seqlens: Tensor
    """[num_sequences + 1] int32 on the compute device: begin of every sequence, then the
    micro-batch's length.
    """
    position_ids: Tensor
    """[1, T] on the compute device: positions that restart at 0 in every sequence; of this rank's
    sequence shard.
    """
    sequence_shard: SequenceShard | None = None
    """What this rank holds of the micro-batch where it is cut or padded; lengths are of the padded
    micro-batch.
    """
    num_padding: int = 0
    """Tokens of its last sequence where that is padding."""

    @classmethod
    def build(
        cls,
        lengths: Sequence[int],
        device: torch.device,
        sequence_shard: SequenceShard | None = None,
    ) -> PackedMicroBatch:
        """The micro-batch that concatenates sequences of `lengths` tokens, or a sequence shard of
        it.
        """
        positions = torch.cat([torch.arange(length) for length in lengths])
        padding = 0
        if sequence_shard is not None:
            padding = sequence_shard.num_padding(len(positions))
            lengths = [*lengths, padding] if padding else lengths
            positions = sequence_shard.cut(positions)
        ends = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)
        return cls(
            tuple(lengths),
            to_device(ends, device),
            to_device(positions.unsqueeze(0), device),
            sequence_shard,
            padding,
        )

    @property
    def num_tokens(self) -> int:
        """Tokens of the micro-batch, or of this rank's sequence shard, padding included."""
        return self.position_ids.shape[1]


@torch.compiler.disable  # the lengths of a micro-batch are not shapes: each micro-batch would compile anew
def hydra_varlen(
    module: nn.Module,
    query_BHTD: Tensor,
    key_BKTD: Tensor,
    value_BKTD: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    packed_micro_batch: PackedMicroBatch | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **_ignored: Any,
) -> tuple[Tensor, None]:
    """Causal attention inside each sequence of `packed_micro_batch`; returns ([1, T, H, D], None).

    Under sequence parallelism T are the tokens of this rank's sequence shard, and the call is
    collective over the SP group.

    `sliding_window` w lets a token see itself and the w - 1 tokens before it; `softcap` c replaces
    scores s by c tanh(s / c). `s_aux` [H] are attention sinks: scores of one more column in each
    softmax, which has no value. The number of query heads per key-value head is taken from the
    tensors, because under TP a rank may hold a replica of a key-value head.
    """
    if dropout:
        raise UnsupportedModelError(
            f"{type(module).__name__}: attention dropout {dropout} is not supported; set attention_dropout to 0 "
            "in the model's config"
        )
    if packed_micro_batch is None:
        raise UnsupportedModelError(
            f"{type(module).__name__}: the layers around it drop keyword arguments, so it never learns which tokens "
            "belong to one sequence"
        )
    if attention_mask is not None:
        raise UnsupportedModelError(
            f"{type(module).__name__}: the model hands it a mask of its own, and attention over a packed micro-batch "
            "knows causal, windowed and capped attention alone"
        )
    sequence_shard = packed_micro_batch.sequence_shard
    is_cut = sequence_shard is not None and sequence_shard.size > 1
    if is_cut:
        query_BHTD, key_BKTD, value_BKTD = gather_micro_batch(
            query_BHTD, key_BKTD, value_BKTD, sequence_shard
        )
        if s_aux is not None:
            s_aux = s_aux.chunk(sequence_shard.size)[sequence_shard.rank]
    out_BTHD = _attend(
        query_BHTD,
        key_BKTD,
        value_BKTD,
        packed_micro_batch,
        scaling,
        sliding_window,
        softcap,
        s_aux,
    )
    out_BTHD = scatter_micro_batch(out_BTHD, sequence_shard) if is_cut else out_BTHD
    return out_BTHD.contiguous(), None  # some families view it


def _attend(
    query_BHTD: Tensor,
    key_BKTD: Tensor,
    value_BKTD: Tensor,
    packed_micro_batch: PackedMicroBatch,
    scaling: float | None,
    sliding_window: int | None,
    softcap: float | None,
    sinks_H: Tensor | None,
) -> Tensor:
    """[1, T, H, D] of whole sequences, by the best kernel there is; none takes sinks."""
    longest = max(packed_micro_batch.lengths)
    window = sliding_window if sliding_window is not None and sliding_window < longest else None
    scale = scaling if scaling is not None else query_BHTD.shape[-1] ** -0.5
    if query_BHTD.is_cuda and query_BHTD.dtype in _KERNEL_DTYPES and sinks_H is None:
        kernel = find_kernel(needs_softcap=softcap is not None)
        if kernel is not None:
            out_THD = kernel(
                query_BHTD[0].transpose(0, 1),
                key_BKTD[0].transpose(0, 1),
                value_BKTD[0].transpose(0, 1),
                packed_micro_batch.cu_seqlens,
                longest,
                scale,
                window,
                softcap,
            )
            return out_THD.unsqueeze(0)
    out_BHTD = attention_per_sequence(
        query_BHTD,
        key_BKTD,
        value_BKTD,
        packed_micro_batch.lengths,
        scale,
        window,
        softcap,
        sinks_H,
    )
    return out_BHTD.transpose(1, 2)


def attention_per_sequence(
    query_BHTD: Tensor,
    key_BKTD: Tensor,
    value_BKTD: Tensor,
    lengths: Sequence[int],
    scale: float,
    window: int | None,
    softcap: float | None,
    sinks_H: Tensor | None = None,
) -> Tensor:
    """One attention call per sequence: the cost is the sum over sequences, whatever the backend.

    `lengths` of the micro-batch's sequences add up to T; returns [1, H, T, D].
    """
    # split's backward is one concatenation; slicing each sequence would zero-fill a whole
    # micro-batch per sequence.
    sequences = zip(
        query_BHTD.split(lengths, dim=2),
        key_BKTD.split(lengths, dim=2),
        value_BKTD.split(lengths, dim=2),
        strict=True,
    )
    if softcap is not None or sinks_H is not None:
        parts = [_scored(q, k, v, scale, window, softcap, sinks_H) for q, k, v in sequences]
    elif window is not None:
        parts = [_windowed(q, k, v, scale, window) for q, k, v in sequences]
    else:
        parts = [
            F.scaled_dot_product_attention(
                q, k, v, is_causal=True, scale=scale, enable_gqa=_is_grouped(q, k)
            )
            for q, k, v in sequences
        ]
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=2)


def _is_grouped(query: Tensor, key: Tensor) -> bool:
    return query.shape[1] != key.shape[1]


def _windowed(query: Tensor, key: Tensor, value: Tensor, scale: float, window: int) -> Tensor:
    """Sliding window attention of one sequence in query blocks of `window`: linear in its
    length.
    """
    outputs = []
    for begin in range(0, query.shape[2], window):
        end = min(begin + window, query.shape[2])
        first = max(0, begin - window + 1)
        allowed = _window_mask(begin, end, first, window, query.device)
        outputs.append(
            F.scaled_dot_product_attention(
                query[:, :, begin:end],
                key[:, :, first:end],
                value[:, :, first:end],
                attn_mask=allowed,
                scale=scale,
                enable_gqa=_is_grouped(query, key),
            )
        )
    return torch.cat(outputs, dim=2)


_QUERY_BLOCK = 1024
"""Queries whose scores are worked on together."""


def _scored(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scale: float,
    window: int | None,
    softcap: float | None,
    sinks_H: Tensor | None,
) -> Tensor:
    """Attention of one sequence whose scores are capped by tanh or share their softmax with sinks,
    which no fused CPU kernel offers.
    """
    num_groups, length = query.shape[1] // key.shape[1], query.shape[2]
    key = key.repeat_interleave(num_groups, dim=1)
    value = value.repeat_interleave(num_groups, dim=1)
    outputs = []
    for begin in range(0, length, _QUERY_BLOCK):
        end = min(begin + _QUERY_BLOCK, length)
        first = max(0, begin - window + 1) if window else 0
        scores = query[:, :, begin:end] @ key[:, :, first:end].transpose(-1, -2) * scale
        if softcap is not None:
            scores = torch.tanh(scores / softcap) * softcap
        allowed = _window_mask(begin, end, first, window or length, query.device)
        scores = scores.masked_fill(~allowed, float("-inf"))
        if sinks_H is not None:
            sinks = sinks_H.view(1, -1, 1, 1).expand(*scores.shape[:3], 1)
            scores = torch.cat([scores, sinks], dim=-1)
        weights = scores.softmax(dim=-1, dtype=torch.float32).to(query.dtype)
        outputs.append(weights[..., : end - first] @ value[:, :, first:end])
    return torch.cat(outputs, dim=2)


def _window_mask(begin: int, end: int, first: int, window: int, device: torch.device) -> Tensor:
    """[end - begin, end - first] True where query position i may see key position j: i - window < j
    <= i.
    """
    queries = torch.arange(begin, end, device=device).unsqueeze(1)
    keys = torch.arange(first, end, device=device).unsqueeze(0)
    return (keys <= queries) & (keys > queries - window)


_Kernel = Callable[..., Tensor]
_KERNEL_DTYPES = (torch.float16, torch.bfloat16)


def check_kernels(config: Any, device: torch.device, dtype: torch.dtype) -> None:
    """Raise UnsupportedModelError where the model of `config` would hold all scores of a sequence
    on an accelerator, because no kernel caps them.
    """
    if device.type == "cuda" and (problem := find_softcap_problem(config, dtype)):
        raise UnsupportedModelError(problem)


def find_softcap_problem(config: Any, dtype: torch.dtype) -> str:
    """Why no kernel of an accelerator computes the attention of `config` in `dtype` with the
    packages installed here; "" where one does.
    """
    softcap = getattr(config, "attn_logit_softcapping", None)
    if not softcap or (dtype in _KERNEL_DTYPES and find_kernel(needs_softcap=True) is not None):
        return ""
    return (
        f"attn_logit_softcapping is {softcap}, which flash-attn alone computes, in 16 bit: without it the scores "
        f"of a sequence would take heads x length^2 numbers. pip install flash-attn and enable bf16 (now {dtype}), "
        "or set attn_logit_softcapping to null in the model's config"
    )


@cache
def find_kernel(needs_softcap: bool) -> _Kernel | None:
    """flash-attn's varlen kernel where installed, else torch's (which has no softcap), else
    None.

    The same plans give bit-identical losses, so flash-attn's backward adds in one order.
    """
    try:
        from flash_attn import flash_attn_varlen_func
    except ImportError:
        return None if needs_softcap else _torch_varlen_kernel()
    known = inspect.signature(flash_attn_varlen_func).parameters
    in_order = {"deterministic": True} if "deterministic" in known else {}

    def flash(q, k, v, cu_seqlens, longest, scale, window, softcap):  # type: ignore[no-untyped-def]
        return flash_attn_varlen_func(
            q,
            k,
            v,
            cu_seqlens,
            cu_seqlens,
            longest,
            longest,
            softmax_scale=scale,
            causal=True,
            window_size=(window - 1, 0) if window else (-1, -1),
            softcap=softcap or 0.0,
            **in_order,
        )

    return flash


def _torch_varlen_kernel() -> _Kernel | None:
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return None
    parameters = inspect.signature(varlen_attn).parameters
    if "window_size" not in parameters:  # older torch: another way to ask for causal attention
        return None

    def torch_varlen(q, k, v, cu_seqlens, longest, scale, window, softcap):  # type: ignore[no-untyped-def]
        grouped = q.shape[1] != k.shape[1]
        return varlen_attn(
            q,
            k,
            v,
            cu_seqlens,
            cu_seqlens,
            longest,
            longest,
            scale=scale,
            window_size=(window - 1 if window else -1, 0),
            **({"enable_gqa": True} if grouped and "enable_gqa" in parameters else {}),
        )

    return torch_varlen


def register() -> None:
    """Make `hydra_varlen` known to transformers; safe to call repeatedly."""
    from transformers import AttentionInterface

    AttentionInterface.register(ATTENTION_NAME, hydra_varlen)
