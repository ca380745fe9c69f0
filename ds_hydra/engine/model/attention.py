"""Attention over a packed micro-batch: each token attends inside its own sequence, at the cost of
its own sequence.

Registered with transformers' AttentionInterface as `hydra_varlen`; no mask function is registered
under that name, so transformers builds no mask. Legend: B = 1 packed micro-batch, H query heads, K
key-value heads (after TP slicing), T tokens of the micro-batch, D head dimension.
"""

from __future__ import annotations

import functools
import inspect
import logging
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
from ds_hydra.engine.ranks.memory import to_device
from ds_hydra.errors import UnsupportedModelError

logger = logging.getLogger(__name__)

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
    widths = (query_BHTD.shape[-1], value_BKND.shape[-1])
    if query_BHTD.device.type in _KERNEL_DEVICES and sinks_H is None:
        kernel = find_kernel_for(widths, query_BHTD.dtype, needs_softcap=softcap is not None)
        if kernel is not None:
            out_THD = run_padded(
                kernel,
                [t[0].transpose(0, 1) for t in (query_BHTD, key_BKND, value_BKND)],
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
_KERNEL_DEVICES = ("cuda",)
_WIDTH_MULTIPLE, _MOST_WIDTH = 8, 256
"""Of the heads that flash attention 2 takes."""
_MOST_DIFFERENCE = 2e-2
"""Of 16 bit, against fp32: the mantissa of bf16 has 8 bits."""
_PROBE_LENGTHS, _PROBE_KEY_LENGTHS = (5, 64, 1, 90), (5, 100, 7, 90)
"""Whole sequences, and ends of others."""
_PROBE_WINDOW = 9

_refused: set[tuple[int, int, torch.dtype]] = set()
"""Widths of queries and values that the kernel of this device would not take at the start."""


def find_kernel_for(
    widths: tuple[int, int], dtype: torch.dtype, *, needs_softcap: bool
) -> _Kernel | None:
    """The kernel for queries and values of such `widths`; None where each sequence is a call."""
    if dtype not in _KERNEL_DTYPES or max(widths) > _MOST_WIDTH or (*widths, dtype) in _refused:
        return None
    return find_kernel(needs_softcap=needs_softcap)


def run_padded(kernel: _Kernel, heads: Sequence[Tensor], *arguments: Any) -> Tensor:
    """[T, H, D of values] of `kernel` for queries, keys and values [T, H, D], which are padded to
    one width that it takes: zeros add nothing to scores, and what values have of them is cut off.
    """
    value_width = heads[2].shape[-1]
    width = max(t.shape[-1] for t in heads)
    width += -width % _WIDTH_MULTIPLE
    query, key, value = (
        t if t.shape[-1] == width else nn.functional.pad(t, (0, width - t.shape[-1])) for t in heads
    )
    return kernel(query, key, value, *arguments)[..., :value_width]


def kernel_error(
    kernel: _Kernel, device: torch.device, dtype: torch.dtype, widths: tuple[int, int] = (64, 64)
) -> float:
    """Largest relative error of outputs and gradients of a packed micro-batch in `dtype`, causal
    and with a window, against fp32.
    """
    generator = torch.Generator(device=device).manual_seed(0)
    lengths, key_lengths = _PROBE_LENGTHS, _PROBE_KEY_LENGTHS
    shapes = ((8, lengths, widths[0]), (4, key_lengths, widths[0]), (4, key_lengths, widths[1]))
    inputs = [
        torch.randn((1, heads, sum(of), width), generator=generator, device=device).requires_grad_()
        for heads, of, width in shapes
    ]
    halves = [t.detach().to(dtype).requires_grad_() for t in inputs]
    ends, key_ends = (
        torch.tensor([0, *of], device=device).cumsum(0, dtype=torch.int32)
        for of in (lengths, key_lengths)
    )
    scale, errors = widths[0] ** -0.5, []
    for window in (None, _PROBE_WINDOW):
        wanted = attention_per_sequence(*inputs, lengths, scale, window, None, None, key_lengths)
        wanted_grads = torch.autograd.grad(wanted.square().sum(), inputs)
        heads_last = [t[0].transpose(0, 1) for t in halves]
        longest = (max(lengths), max(key_lengths))
        out_THD = run_padded(kernel, heads_last, ends, key_ends, *longest, scale, window, None)
        got = out_THD.transpose(0, 1).unsqueeze(0)
        grads = torch.autograd.grad(got.float().square().sum(), halves)
        pairs = zip((got, *grads), (wanted, *wanted_grads), strict=True)
        errors += [((a.float() - b).norm() / b.norm()).detach() for a, b in pairs]
    return float(torch.stack(errors).max())  # which is no number where any is none


def head_widths(config: Any) -> set[tuple[int, int]]:
    """Widths of queries and values that the attention of the model of `config` may have."""

    def get(name: str) -> int:
        value = getattr(config, name, None)
        return value if isinstance(value, int) else 0

    heads = get("num_attention_heads")
    plain = get("head_dim") or (get("hidden_size") // heads if heads else 0)
    latent = get("qk_nope_head_dim") + get("qk_rope_head_dim")
    found = {(latent, get("v_head_dim") or plain)} if latent else {(plain, plain)}
    if wide := get("global_head_dim"):  # of layers without a window
        found.add((wide, wide))
    return {widths for widths in found if min(widths) > 0}


def check_kernels(config: Any, device: torch.device, dtype: torch.dtype) -> None:
    """Run the kernel that will train the model of `config` on `device` in `dtype`, for each width
    of its heads. Where it refuses one, that width runs one call for each sequence from now on.

    Raises UnsupportedModelError where a kernel computes wrongly, or where a sequence's scores would
    all be held on an accelerator, because no kernel caps them.
    """
    if device.type not in _KERNEL_DEVICES:
        return
    if problem := find_softcap_problem(config, dtype):
        raise UnsupportedModelError(problem)
    if dtype in _KERNEL_DTYPES and find_kernel(needs_softcap=False) is None:
        logger.warning(
            "attention is one call for each sequence: torch %s has no kernel for packed micro-batches; "
            "pip install 'torch>=2.11', or flash-attn",
            torch.__version__,
        )
    for widths in sorted(head_widths(config)):
        kernel = find_kernel_for(widths, dtype, needs_softcap=False)
        if kernel is None:
            continue
        try:
            error = kernel_error(kernel, device, dtype, widths)
        except (RuntimeError, ValueError) as refusal:
            _refused.add((*widths, dtype))
            logger.warning(
                "attention is one call for each sequence where queries are %d wide and values %d: %s refuses them: %s",
                *widths,
                kernel.__name__,
                str(refusal).partition("\n")[0][:300],
            )
            continue
        if not error <= _MOST_DIFFERENCE:
            raise UnsupportedModelError(
                f"the attention kernel {kernel.__name__} is off by {error:.1e} for heads of {widths[0]} and values of "
                f"{widths[1]} in {dtype}, at most {_MOST_DIFFERENCE:g} is expected; reinstall flash-attn for this "
                "version of torch and CUDA, or remove it"
            )


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

    Backward adds in one order where `hydra.deterministic` has torch's deterministic algorithms on.
    """
    try:
        from flash_attn import flash_attn_varlen_func
    except ImportError:
        return None if needs_softcap else _torch_varlen_kernel()
    known = inspect.signature(flash_attn_varlen_func).parameters
    has_order = "deterministic" in known

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
            **(
                {"deterministic": torch.are_deterministic_algorithms_enabled()} if has_order else {}
            ),
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
