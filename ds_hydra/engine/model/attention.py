"""Attention over a packed micro-batch: each token attends inside its own sequence, at the cost of
its own sequence.

Registered with transformers' AttentionInterface as `hydra_varlen`; no mask function is registered
under that name, so transformers builds no mask. Legend: B = 1 packed micro-batch, H query heads, K
key-value heads (after TP slicing), T tokens of the micro-batch, D head dimension.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import AttentionInterface

from ds_hydra.engine.model.sequence_attention import attention_per_sequence
from ds_hydra.engine.model.sight import find_in_sight
from ds_hydra.engine.parallel.context_parallel import KeysOfRow, attend_to_all_rows
from ds_hydra.engine.parallel.ulysses import SequenceShard, gather_micro_batch, scatter_micro_batch
from ds_hydra.engine.ranks.host_memory import to_device
from ds_hydra.errors import UnsupportedModelError

ATTENTION_NAME = "hydra_varlen"


class Segment(NamedTuple):
    """Tokens `begin` to `end` of sequence `number` of a micro-batch, which has `length`."""

    number: int
    length: int
    begin: int
    end: int


@dataclass(frozen=True, slots=True)
class PackedMicroBatch:
    """Where the sequences of a packed micro-batch are; attention finds it `in_sight`."""

    segments: tuple[Segment, ...]
    """Whole sequences, or the pieces of them that a row has, in their order; then padding."""
    sequence_lengths: tuple[int, ...]
    """Of all sequences of the micro-batch, then 0 for padding."""
    cu_seqlens: Tensor
    """[num_segments + 1] int32 on the compute device: begin of every segment, then the number of
    tokens.
    """
    cu_keys: Tensor
    """The same of the keys that each segment attends to."""
    position_ids: Tensor
    """[1, T] on the compute device: positions that restart at 0 in every sequence; of this rank's
    sequence shard.
    """
    sequence_shard: SequenceShard | None = None
    """What this rank holds of the micro-batch, or of its row, where that is cut or padded; segments
    are those before.
    """
    keys: KeysOfRow | None = None
    """Where they are, where the micro-batch is cut into rows."""
    token_seeds_T: Tensor | None = None
    """[T] int64 of what noise begins with ([Note: Noise by counting]); None where there is none."""
    token_lengths_T: Tensor | None = None
    """[T] int64, beside the seeds: tokens of each token's sequence."""
    predicting: Tensor | None = None
    """[t] int64: places of the tokens that the head is asked about; None where it is about all."""

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
        whole = [Segment(number, length, 0, length) for number, length in enumerate(lengths)]
        return cls.of_segments(whole, lengths, device, sequence_shard)

    @classmethod
    def of_segments(
        cls,
        segments: Sequence[Segment],
        lengths: Sequence[int],
        device: torch.device,
        sequence_shard: SequenceShard | None = None,
        keys: KeysOfRow | None = None,
        least: int = 0,
    ) -> PackedMicroBatch:
        """The concatenated `segments` of a micro-batch of `lengths`, where they are cut padded to
        `least` tokens at least.
        """
        positions = torch.cat(
            [torch.arange(0), *(torch.arange(segment.begin, segment.end) for segment in segments)]
        )
        if sequence_shard is not None:
            padding = sequence_shard.padded(max(len(positions), least)) - len(positions)
            if padding:
                segments = [*segments, Segment(len(lengths), padding, 0, padding)]
            positions = sequence_shard.cut(positions, least=least)

        def boundaries(lengths: list[int]) -> Tensor:
            ends = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)
            return to_device(ends, device)

        return cls(
            segments=tuple(segments),
            sequence_lengths=(*lengths, 0),
            cu_seqlens=boundaries([segment.end - segment.begin for segment in segments]),
            cu_keys=boundaries([segment.end for segment in segments]),
            position_ids=to_device(positions.unsqueeze(0), device),
            sequence_shard=sequence_shard,
            keys=keys,
        )

    @property
    def lengths(self) -> tuple[int, ...]:
        """Tokens of each segment."""
        return tuple(segment.end - segment.begin for segment in self.segments)

    @property
    def key_lengths(self) -> tuple[int, ...]:
        """Tokens that the last token of each segment sees, itself among them."""
        return tuple(segment.end for segment in self.segments)

    @property
    def num_tokens(self) -> int:
        """Tokens of the micro-batch, or of this rank's sequence shard, padding included."""
        return self.position_ids.shape[1]


_ALL = slice(None)


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
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **_ignored: Any,
) -> tuple[Tensor, None]:
    """Causal attention inside each sequence of the micro-batch in sight; returns ([1, T, H, D],
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
    packed_micro_batch = find_in_sight()
    assert packed_micro_batch is not None, "attention outside a stage model"
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

    def attend(
        query_BHTD: Tensor, key_BKND: Tensor, value_BKND: Tensor, heads: slice = _ALL
    ) -> Tensor:
        return _attend(
            query_BHTD,
            key_BKND,
            value_BKND,
            packed_micro_batch,
            scaling,
            sliding_window,
            softcap,
            s_aux if s_aux is None else s_aux[heads],
        )

    keys = packed_micro_batch.keys
    if keys is None:
        out_BTHD = attend(query_BHTD, key_BKTD, value_BKTD)
    else:
        out_BTHD = attend_to_all_rows(query_BHTD, key_BKTD, value_BKTD, keys, attend)
    out_BTHD = scatter_micro_batch(out_BTHD, sequence_shard) if is_cut else out_BTHD
    return out_BTHD.contiguous(), None  # some families view it


def _attend(
    query_BHTD: Tensor,
    key_BKND: Tensor,
    value_BKND: Tensor,
    packed_micro_batch: PackedMicroBatch,
    scaling: float | None,
    sliding_window: int | None,
    softcap: float | None,
    sinks_H: Tensor | None,
) -> Tensor:
    """[1, T, H, D] of segments and their N keys, by the best kernel there is; none takes sinks."""
    longest = max(packed_micro_batch.key_lengths)
    window = sliding_window if sliding_window is not None and sliding_window < longest else None
    scale = scaling if scaling is not None else query_BHTD.shape[-1] ** -0.5
    if query_BHTD.is_cuda and query_BHTD.dtype in _KERNEL_DTYPES and sinks_H is None:
        kernel = find_kernel(needs_softcap=softcap is not None)
        if kernel is not None:
            out_THD = kernel(
                query_BHTD[0].transpose(0, 1),
                key_BKND[0].transpose(0, 1),
                value_BKND[0].transpose(0, 1),
                packed_micro_batch.cu_seqlens,
                packed_micro_batch.cu_keys,
                max(packed_micro_batch.lengths),
                longest,
                scale,
                window,
                softcap,
            )
            return out_THD.unsqueeze(0)
    out_BHTD = attention_per_sequence(
        query_BHTD,
        key_BKND,
        value_BKND,
        packed_micro_batch.lengths,
        scale,
        window,
        softcap,
        sinks_H,
        packed_micro_batch.key_lengths,
    )
    return out_BHTD.transpose(1, 2)


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


@functools.cache
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

    def flash(q, k, v, cu_seqlens, cu_keys, longest, longest_key, scale, window, softcap):  # type: ignore[no-untyped-def]
        return flash_attn_varlen_func(
            q,
            k,
            v,
            cu_seqlens,
            cu_keys,
            longest,
            longest_key,
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

    def torch_varlen(q, k, v, cu_seqlens, cu_keys, longest, longest_key, scale, window, softcap):  # type: ignore[no-untyped-def]
        grouped = q.shape[1] != k.shape[1]
        return varlen_attn(
            q,
            k,
            v,
            cu_seqlens,
            cu_keys,
            longest,
            longest_key,
            scale=scale,
            window_size=(window - 1 if window else -1, 0),
            **({"enable_gqa": True} if grouped and "enable_gqa" in parameters else {}),
        )

    return torch_varlen


def use_packed_attention(model: nn.Module) -> None:
    """Let the attention of `model` be `hydra_varlen`."""
    AttentionInterface.register(ATTENTION_NAME, hydra_varlen)
    for module in model.modules():
        if hasattr(module, "config"):
            module.config._attn_implementation = ATTENTION_NAME
