"""Attention and rotary embeddings of a packed micro-batch: each token attends inside its own
sequence, at the cost of its own sequence.

Attention is registered with transformers' AttentionInterface as `hydra_varlen`; no mask function is
registered under that name, so transformers builds no mask.

[Note: Segments one by one]
Where no kernel takes all segments of a micro-batch, each runs alone. Queries are the last of their
keys: segment i has `lengths[i]` queries and `key_lengths[i]` keys, as many where sequences are
whole, and query j sees keys up to number key_length - length + j.

[Note: Frequencies by length]
Frequencies of some rotary embeddings follow the length of a sequence (`dynamic`, `longrope`).
transformers takes the longest position that it sees and, for `dynamic`, remembers it. Here a
sequence gets what the model gives it alone, wherever it lies and whatever ran before, so that a
sequence shard of a micro-batch is as good as the micro-batch.

Legend: B = 1 packed micro-batch, H query heads, K key-value heads (after TP slicing), G = H / K, T
tokens of the micro-batch or queries, N keys, D head dimension; n and m queries and keys of a
segment.
"""

from __future__ import annotations

import functools
import inspect
import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import tree_map
from transformers import AttentionInterface

from ds_hydra.engine.model.current_micro_batch import PackedMicroBatch, current_micro_batch
from ds_hydra.engine.parallel.token_cuts import (
    attend_to_all_rows,
    gather_micro_batch,
    scatter_micro_batch,
)
from ds_hydra.errors import UnsupportedModelError

logger = logging.getLogger(__name__)

ATTENTION_NAME = "hydra_varlen"


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
    packed_micro_batch = current_micro_batch()
    assert packed_micro_batch is not None, "attention outside a stage model"
    if attention_mask is not None:
        raise UnsupportedModelError(
            f"{type(module).__name__}: the model hands it a mask of its own, and attention over a packed micro-batch "
            "knows causal, windowed and capped attention alone"
        )
    layout = packed_micro_batch.layout
    is_cut = layout is not None and layout.size > 1
    if is_cut:
        query_BHTD, key_BKTD, value_BKTD = gather_micro_batch(
            query_BHTD, key_BKTD, value_BKTD, layout
        )
        if s_aux is not None:
            s_aux = s_aux.chunk(layout.size)[layout.rank]

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
    out_BTHD = scatter_micro_batch(out_BTHD, layout) if is_cut else out_BTHD
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


_QUERY_BLOCK = 1024
"""Queries whose scores are worked on together."""

_FUSED_DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


def attention_per_sequence(
    query_BHTD: Tensor,
    key_BKND: Tensor,
    value_BKND: Tensor,
    lengths: Sequence[int],
    scale: float,
    window: int | None,
    softcap: float | None,
    sinks_H: Tensor | None = None,
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
    if softcap is not None or sinks_H is not None:
        sinks_KG = None if sinks_H is None else sinks_H.view(num_kv_heads, -1)
        parts = [_scored(q, k, v, scale, window, softcap, sinks_KG) for q, k, v in segments]
    elif window is not None:
        parts = [_masked(q, k, v, scale, window, window) for q, k, v in segments]
    else:
        parts = [_causal(q, k, v, scale) for q, k, v in segments]
    whole = parts[0] if len(parts) == 1 else torch.cat(parts, dim=2)
    return whole.flatten(0, 1).unsqueeze(0)


def _causal(query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
    if query.shape[2] == key.shape[2]:
        return F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=scale)
    is_fused = query.device.type == "cpu" and query.dtype in _FUSED_DTYPES
    if is_fused and query.shape[-1] == value.shape[-1]:
        out: Tensor = _AfterOthers.apply(query, key, value, scale)
        return out
    return _masked(query, key, value, scale, None, _QUERY_BLOCK)


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
        weights = [(logs - total).exp().unsqueeze(-1).to(query.dtype) for _, logs in parts]
        out: Tensor = sum(weight * part[0] for weight, part in zip(weights, parts, strict=True))  # type: ignore[assignment]
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
            F.scaled_dot_product_attention(
                query[:, :, begin:end],
                key[:, :, keys],
                value[:, :, keys],
                attn_mask=allowed,
                scale=scale,
            )
        )
    return torch.cat(outputs, dim=2)


def _scored(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scale: float,
    window: int | None,
    softcap: float | None,
    sinks_KG: Tensor | None,
) -> Tensor:
    """Attention of one segment whose scores are capped by tanh or share their softmax with sinks,
    which no fused CPU kernel offers.
    """
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
        if sinks_KG is not None:
            sinks = sinks_KG[..., None, None].expand(*scores.shape[:3], 1)
            scores = torch.cat([scores, sinks], dim=-1)
        weights = scores.softmax(dim=-1, dtype=torch.float32).to(query.dtype)
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
    micro_batch = current_micro_batch()
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
    """What `dynamic` remembers of longer sequences; `longrope` remembers nothing."""
    prefix = "" if layer_type is None else f"{layer_type}_"
    if hasattr(module, f"{prefix}original_inv_freq"):
        setattr(module, f"{prefix}max_seq_len_cached", module.original_max_seq_len)
        setattr(module, f"{prefix}inv_freq", getattr(module, f"{prefix}original_inv_freq").clone())
