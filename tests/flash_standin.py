"""Flash attention in fp64 on the CPU behind the signatures of the released packages.

Parameters are those of flash-attn 2.8.3 (its sdist; `hopper/` of it and of the repository in August
2026 for flash-attn 3), flash-attn-4 4.0.0b36 (its wheel); torch's operators are called as they are.
Backward works on the output and the log-sum-exp that it is given, as the kernels do.
"""

from __future__ import annotations

import inspect
import sys
import types
from contextlib import contextmanager
from unittest import mock

import pytest
import torch

from ds_hydra.engine.model import (
    attention_choice,
    attention_contract,
    attention_cudnn,
    attention_kernels,
)
from ds_hydra.engine.model.attention_contract import Demand
from ds_hydra.engine.model.attention_operator import KernelUse


def _scores(query, key, scale, window, softcap, num_before):
    """[n, m] of one head and segment, before and after the cap, fp64; -inf where hidden."""
    raw = scores = query @ key.T * scale
    if softcap:
        scores = torch.tanh(raw / softcap) * softcap
    rows = torch.arange(len(query)).unsqueeze(1) + num_before
    columns = torch.arange(len(key)).unsqueeze(0)
    hidden = columns > rows
    if window is not None:
        hidden |= columns < rows - window
    return raw, scores.masked_fill(hidden, float("-inf"))


def _parts(query, key, ends, key_ends):
    groups = query.shape[1] // key.shape[1]
    for a, b, c, d in zip(ends[:-1], ends[1:], key_ends[:-1], key_ends[1:], strict=True):
        for head in range(query.shape[1]):
            yield slice(a, b), slice(c, d), head, head // groups


def forward(query, key, value, ends, key_ends, scale, window, softcap, is_causal=True):
    """Output like `value` and log-sum-exp [H, T] fp32, `window` tokens to the left."""
    q, k, v = (t.double() for t in (query, key, value))
    out = q.new_zeros(*q.shape[:2], v.shape[2])
    lse = q.new_zeros(q.shape[1], q.shape[0])
    for rows, columns, head, group in _parts(q, k, ends.tolist(), key_ends.tolist()):
        before = columns.stop - columns.start - (rows.stop - rows.start) * is_causal
        _, scores = _scores(q[rows, head], k[columns, group], scale, window, softcap, before)
        lse[head, rows] = scores.logsumexp(1)
        out[rows, head] = scores.softmax(1) @ v[columns, group]
    return out.to(query.dtype), lse if query.dtype == torch.float64 else lse.float()


def backward(
    grad, query, key, value, out, lse, ends, key_ends, scale, window, softcap, is_causal=True
):
    """Gradients of query, key and value."""
    q, k, v, o, g, lse = (t.double() for t in (query, key, value, out, grad, lse))
    grads = [torch.zeros_like(t) for t in (q, k, v)]
    dots = (g * o).sum(-1)
    for rows, columns, head, group in _parts(q, k, ends.tolist(), key_ends.tolist()):
        before = columns.stop - columns.start - (rows.stop - rows.start) * is_causal
        of_q, of_k = q[rows, head], k[columns, group]
        raw, scores = _scores(of_q, of_k, scale, window, softcap, before)
        weights = (scores - lse[head, rows].unsqueeze(1)).exp()
        assert weights.max() < torch.finfo(torch.float32).max, "kernels compute them in fp32"
        grads[2][columns, group] += weights.T @ g[rows, head]
        slope = weights * (g[rows, head] @ v[columns, group].T - dots[rows, head].unsqueeze(1))
        if softcap:
            slope = slope * (1 - torch.tanh(raw / softcap) ** 2)
        grads[0][rows, head] += slope @ of_k * scale
        grads[1][columns, group] += slope.T @ of_q * scale
    return tuple(a.to(b.dtype) for a, b in zip(grads, (query, key, value), strict=True))


class Calls(list):
    """Calls of the kernel, a dictionary each; `check` may raise as a kernel would."""

    lse_dims = 3

    def check(self, *shapes):
        pass


def _ends(calls, q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k):
    for t in (q, k, v):
        assert t.dim() == 3
        assert t.stride(-1) == 1
    for cu, longest in ((cu_seqlens_q, max_seqlen_q), (cu_seqlens_k, max_seqlen_k)):
        assert cu.dtype == torch.int32
        assert cu.is_contiguous()
        assert isinstance(longest, int)
        assert longest == int(cu.diff().max())
    calls.check(q, k, v)
    return cu_seqlens_q, cu_seqlens_k


def _left(window_size):
    """Tokens to the left that are seen; None: all."""
    left, right = window_size
    assert right in ((-1, 0, None) if left in (-1, None) else (0,))
    return None if left in (-1, None) else left


def _nothing(*values):
    assert not any(value not in (None, False, 0, 0.0) for value in values), values


_READ = {
    *("q", "k", "v", "cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k", "softmax_scale"),
    *("causal", "is_causal", "window_size", "window_size_left", "window_size_right", "softcap"),
    *("dout", "softmax_lse", "deterministic", "return_lse"),
}  # fmt: skip
"""Arguments that a stand-in reads, beside the output and what backward fills."""


def _released(calls, forward_of, backward_of, unlimited=-1):
    """Functions with the names and parameters of a release, whose word for no window is
    `unlimited`. Other arguments than those that stand-ins read have to be what they are by default.
    """

    def read(function, given, *also):
        parameters = inspect.signature(function).parameters
        for name, value in given.items():
            if name not in _READ and name not in also:
                default = parameters[name].default
                if default is inspect.Parameter.empty:
                    _nothing(value)
                else:
                    assert not isinstance(value, torch.Tensor), name
                    assert value == default, name
        assert given.get("causal") or given.get("is_causal")
        names = ("q", "k", "v", "cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k")
        ends = _ends(calls, *(given[name] for name in names))
        assert unlimited is None or given["k"].shape[-1] == given["v"].shape[-1]
        sides = ("window_size_left", "window_size_right")
        window = given.get("window_size") or tuple(given[side] for side in sides)
        assert window[0] == unlimited or window[0] not in (-1, None)
        left = _left(window)
        return [given[n] for n in "qkv"], (*ends, given["softmax_scale"], left, given["softcap"])

    def attend(given):
        heads, options = read(functions[0], given)
        assert given.get("return_lse", True)
        calls.append({"pass": "forward", "window": options[3], "softcap": options[4]})
        return *forward(*heads, *options), None, None

    def differentiate(given):
        filled = [given[name] for name in ("dq", "dk", "dv")]
        assert (filled[0] is None) == (unlimited is None)
        lse = "softmax_lse" if "softmax_lse" in given else "lse"
        heads, options = read(functions[1], given, "out", lse, "dq", "dk", "dv")
        calls.append({"pass": "backward", "deterministic": given["deterministic"]})
        found = backward(given["dout"], *heads, given["out"], given[lse], *options)
        if filled[0] is None:
            return found
        for one, grad in zip(filled, found, strict=True):
            one.copy_(grad)
        return torch.empty(0)

    functions = []
    for (name, parameters), run in ((forward_of, attend), (backward_of, differentiate)):
        space = {"run": run}
        exec(f"def {name}({parameters}): return run(locals())", space)
        functions.append(space[name])
    return functions


def flash_2(calls):
    """`flash_attn.flash_attn_interface` of flash-attn 2.8.3."""
    return _released(
        calls,
        (
            "_flash_attn_varlen_forward",
            """q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p, softmax_scale, causal,
            window_size_left=-1, window_size_right=-1, softcap=0.0, alibi_slopes=None, return_softmax=False,
            block_table=None, leftpad_k=None, seqused_k=None, zero_tensors=False""",
        ),
        (
            "_flash_attn_varlen_backward",
            """dout, q, k, v, out, softmax_lse, dq, dk, dv, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k,
            dropout_p, softmax_scale, causal, window_size_left, window_size_right, softcap, alibi_slopes,
            deterministic, rng_state=None, zero_tensors=False""",
        ),
    )


def flash_3(calls):
    """`flash_attn_interface`, as in the repository since 2026."""
    return _released(
        calls,
        (
            "_flash_attn_forward",
            """q, k, v, k_new=None, v_new=None, qv=None, out_=None, cu_seqlens_q=None, cu_seqlens_k=None,
            cu_seqlens_k_new=None, seqused_q=None, seqused_k=None, max_seqlen_q=None, max_seqlen_k=None,
            page_table=None, kv_batch_idx=None, leftpad_k=None, rotary_cos=None, rotary_sin=None,
            seqlens_rotary=None, q_descale=None, k_descale=None, v_descale=None, softmax_scale=None, causal=False,
            window_size_left=-1, window_size_right=-1, attention_chunk=0, softcap=0.0, rotary_interleaved=True,
            scheduler_metadata=None, num_splits=1, pack_gqa=None, sm_margin=0""",
        ),
        (
            "_flash_attn_backward",
            """dout, q, k, v, out, softmax_lse, cu_seqlens_q=None, cu_seqlens_k=None, sequed_q=None, sequed_k=None,
            max_seqlen_q=None, max_seqlen_k=None, dq=None, dk=None, dv=None, softmax_scale=None, is_causal=False,
            window_size_left=-1, window_size_right=-1, softcap=0.0, deterministic=False, sm_margin=0""",
        ),
    )


def flash_3_first(calls):
    """The same as it is in the folder hopper of flash-attn 2.8.3."""
    return _released(
        calls,
        (
            "_flash_attn_forward",
            """q, k, v, k_new, v_new, qv, out, cu_seqlens_q, cu_seqlens_k, cu_seqlens_k_new, seqused_q, seqused_k,
            max_seqlen_q, max_seqlen_k, page_table, kv_batch_idx, leftpad_k, rotary_cos, rotary_sin,
            seqlens_rotary, q_descale, k_descale, v_descale, softmax_scale, causal, window_size=(-1, -1),
            attention_chunk=0, softcap=0.0, rotary_interleaved=True, scheduler_metadata=None, num_splits=1,
            pack_gqa=None, sm_margin=0""",
        ),
        (
            "_flash_attn_backward",
            """dout, q, k, v, out, softmax_lse, cu_seqlens_q, cu_seqlens_k, sequed_q, sequed_k, max_seqlen_q,
            max_seqlen_k, dq, dk, dv, softmax_scale, causal, window_size=(-1, -1), softcap=0.0,
            deterministic=False, sm_margin=0""",
        ),
    )


def flash_4(calls):
    """`flash_attn.cute.interface` of flash-attn-4 4.0.0b36."""
    return _released(
        calls,
        (
            "_flash_attn_fwd",
            """q, k, v, qv=None, cu_seqlens_q=None, cu_seqlens_k=None, seqused_q=None, seqused_k=None,
            max_seqlen_q=None, max_seqlen_k=None, min_seqlen_k=None, page_table=None, softmax_scale=None,
            causal=False, softcap=None, window_size_left=None, window_size_right=None, learnable_sink=None,
            tile_mn=None, mma_pv_is_rs=None, intra_wg_overlap=None, num_threads=384, num_splits=1, pack_gqa=None,
            _arch=None, score_mod=None, mask_mod=None, block_sparse_tensors=None, return_lse=False, out=None,
            lse=None, aux_tensors=None, aux_scalars=None, q_descale=None, k_descale=None, v_descale=None,
            gather_kv_indices=None, scheduler_metadata=None, seqlen_k_per_split=None,
            disable_scheduler_metadata=False, gather_bwd_recompute_p=False""",
        ),
        (
            "_flash_attn_bwd",
            """q, k, v, out, dout, lse, softmax_scale=None, causal=False, softcap=0.0, window_size_left=None,
            window_size_right=None, m_block_size=64, n_block_size=128, num_threads=256, pack_gqa=False,
            num_stages_Q=2, num_stages_dO=2, SdP_swapAB=False, dKV_swapAB=False, dQ_swapAB=False, AtomLayoutMSdP=2,
            AtomLayoutNdKV=2, AtomLayoutMdQ=2, V_in_regs=False, cu_seqlens_q=None, cu_seqlens_k=None,
            seqused_q=None, seqused_k=None, max_seqlen_q=None, max_seqlen_k=None, deterministic=False, dq=None,
            dk=None, dv=None, score_mod=None, score_mod_bwd=None, mask_mod=None, aux_tensors=None,
            aux_scalars=None, block_sparse_tensors=None, dlse=None, learnable_sink=None""",
        ),
        unlimited=None,
    )


def varlen(calls):
    """torch's operators, of which the CPU has none; returns what keeps them registered."""
    library = torch.library.Library("aten", "IMPL")

    def attend(
        query, key, value, cum_seq_q, cum_seq_k, max_q, max_k, dropout_p, is_causal, return_debug_mask, *,
        scale=None, window_size_left=None, window_size_right=None, **more,
    ):  # fmt: skip
        ends = _ends(calls, query, key, value, cum_seq_q, cum_seq_k, max_q, max_k)
        assert key.shape[-1] == value.shape[-1]
        _nothing(dropout_p, return_debug_mask, *more.values())
        assert is_causal == (window_size_left == -1)
        assert window_size_right == 0
        left = _left((window_size_left, window_size_right))
        calls.append({"pass": "forward", "window": left, "softcap": 0.0})
        out, lse = forward(query, key, value, *ends, scale, left, 0.0)
        return out, lse, torch.zeros(2, dtype=torch.uint64), torch.empty(0), torch.empty(0)

    def differentiate(
        grad_out, query, key, value, out, logsumexp, cum_seq_q, cum_seq_k, max_q, max_k, dropout_p, is_causal,
        rng_state, unused, *, scale=None, window_size_left=None, window_size_right=None,
    ):  # fmt: skip
        ends = _ends(calls, query, key, value, cum_seq_q, cum_seq_k, max_q, max_k)
        assert grad_out.stride(-1) == 1
        assert (rng_state.dtype, unused.numel(), dropout_p) == (torch.uint64, 0, 0.0)
        assert is_causal == (window_size_left == -1)
        left = _left((window_size_left, window_size_right))
        # As the operator asks, seen on an H200
        is_asked = torch.are_deterministic_algorithms_enabled()
        ordered = is_asked and not torch.is_deterministic_algorithms_warn_only_enabled()
        calls.append({"pass": "backward", "deterministic": ordered})
        return backward(grad_out, query, key, value, out, logsumexp, *ends, scale, left, 0.0)

    library.impl("_flash_attention_forward", attend, "CPU")
    library.impl("_flash_attention_backward", differentiate, "CPU")
    return library


def cudnn(calls):
    """torch's operators for cuDNN's attention, by their schemas in torch 2.13 and its CUDA sources.
    `calls.lse_dims` is 4 where logarithms have a last dimension of 1, as in torch's meta kernel.
    """
    library = torch.library.Library("aten", "IMPL")

    def check(is_causal, dense, *heads):
        query, key, value = heads
        for t, like in (*((t, query) for t in (query, *dense)), (key, key), (value, key)):
            assert t.dim() == 4
            assert (t.shape[0], t.shape[2]) == (1, like.shape[2])
            assert t.shape[-1] % 8 == 0
            assert t.shape[-1] <= 128
            tokens, width = t.shape[1] * t.shape[3], t.shape[3]
            # Plans are found by the strides of queries, keys and values alone.
            assert t.stride() == (t.shape[2] * tokens, width, tokens, 1)
            assert t.dtype == query.dtype
        assert not is_causal or query.shape[2] == key.shape[2], "the first row sees the first key"
        assert key.shape[2] > 1, "keys of one token are refused"
        assert key.shape[1] == value.shape[1]
        assert query.shape[1] % key.shape[1] == 0
        calls.check(*heads)
        ends = [torch.tensor([0, t.shape[2]]) for t in (query, key)]
        return [t[0].transpose(0, 1) for t in (*dense, *heads)], ends

    def note(way, query, key):
        of_keys = {} if key.shape[2] == query.shape[2] else {"keys": key.shape[2]}
        calls.append({"pass": way, "tokens": query.shape[2], **of_keys})

    def attend(
        query, key, value, attn_bias, compute_log_sumexp, dropout_p=0.0, is_causal=False,
        return_debug_mask=False, *, scale=None,
    ):  # fmt: skip
        _nothing(attn_bias, dropout_p, return_debug_mask)
        assert compute_log_sumexp
        heads, ends = check(is_causal, (), query, key, value)
        note("forward", query, key)
        out, lse = forward(*heads, *ends, scale, None, 0.0, is_causal)
        lse = lse.unsqueeze(0) if calls.lse_dims == 3 else lse[None, :, :, None]
        out = out.contiguous().unsqueeze(0).transpose(1, 2)
        seed = torch.zeros((), dtype=torch.int64)
        tokens = query.shape[2]
        return out, lse, None, None, tokens, tokens, seed, seed.clone(), None

    def differentiate(
        grad_out, query, key, value, out, logsumexp, philox_seed, philox_offset, attn_bias, cum_seq_q,
        cum_seq_k, max_q, max_k, dropout_p, is_causal, *, scale=None,
    ):  # fmt: skip
        _nothing(attn_bias, cum_seq_q, cum_seq_k, dropout_p)
        assert philox_seed.dtype == philox_offset.dtype == torch.int64  # sm100 casts them
        assert (max_q, max_k) == (query.shape[2], key.shape[2])
        (grad, out, *heads), ends = check(is_causal, (grad_out, out), query, key, value)
        wanted = (1, query.shape[1], query.shape[2], *[1] * (calls.lse_dims - 3))
        assert logsumexp.shape == wanted
        assert logsumexp.is_contiguous()
        assert logsumexp.dtype == (torch.float64 if query.dtype == torch.float64 else torch.float32)
        note("backward", query, key)
        lse = logsumexp.view(wanted[1:3])
        grads = backward(grad, *heads, out, lse, *ends, scale, None, 0.0, is_causal)
        return tuple(t.contiguous().unsqueeze(0).transpose(1, 2) for t in grads)

    library.impl("_scaled_dot_product_cudnn_attention", attend, "CPU")
    library.impl("_scaled_dot_product_cudnn_attention_backward", differentiate, "CPU")
    return library


PACKAGES = {
    "flash_attention_2": ("flash_attn.flash_attn_interface", flash_2),
    "flash_attention_3": ("flash_attn_interface", flash_3),
    "flash_attention_3 of 2.8.3": ("flash_attn_interface", flash_3_first),
    "flash_attention_4": ("flash_attn.cute.interface", flash_4),
}
VARLEN = "varlen"
CUDNN = "cudnn"
LONG_TOKENS = 100
"""Tokens from which whole sequences are long while the stand-in of cuDNN is installed."""


@contextmanager
def installed(*names):
    """While open, the packages of `names` (of PACKAGES, VARLEN or CUDNN) are the ones that are
    installed, and the CPU is a device with kernels; yields what each was asked. What CUDNN leaves
    to VARLEN is among its own calls, unless that is installed, too.
    """
    calls = {name: Calls() for name in names}
    of_torch = {VARLEN, CUDNN}.intersection(names)
    known = {module for module, _ in PACKAGES.values()}
    modules = dict.fromkeys(known | {"flash_attn", "flash_attn.cute"})  # None: not installed
    for name in set(names) - of_torch:
        path, build = PACKAGES[name]
        for end in range(1, path.count(".") + 2):
            part = ".".join(path.split(".")[:end])
            modules[part] = modules[part] or types.ModuleType(part)
        for function in build(calls[name]):
            setattr(modules[path], function.__name__, function)
    left_out = dict.fromkeys({VARLEN, CUDNN} - of_torch, "it is left out")
    libraries = [varlen(calls.get(VARLEN, calls.get(CUDNN)))] if of_torch else []
    with pytest.MonkeyPatch.context() as patch:
        for name, module in modules.items():
            patch.setitem(sys.modules, name, module)
        patch.setattr(attention_choice, "_KERNEL_DEVICES", ("cpu",))
        patch.setattr(attention_choice, "_in_use", {})
        patch.setattr(attention_kernels, "_loaded", left_out)
        if CUDNN in names:
            libraries.append(cudnn(calls[CUDNN]))
            patch.setattr(attention_contract, "LONG_TOKENS", LONG_TOKENS)
            patch.setattr(attention_cudnn, "why_not", lambda: "")
        try:
            yield calls
        finally:
            for library in libraries:
                library._destroy()


def engine_uses(name):
    """While open, engines attend by the kernel of that name, in whatever type they compute."""

    def select(config, _device, dtype, **_):
        for widths in attention_choice.head_widths(config):
            use = KernelUse.of(attention_kernels.load_kernel(name), Demand(*widths, dtype))
            attention_choice._in_use[(*widths, dtype, False)] = use
        return []

    return mock.patch("ds_hydra.engine.model.stage_model.select_kernels", select)
