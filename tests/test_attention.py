"""Packed attention equals each sequence alone, at the cost of each sequence alone."""

from __future__ import annotations

import inspect
import os
import sys
import types
from unittest.mock import patch

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ds_hydra.engine.doctor import findings
from ds_hydra.engine.model import attention
from ds_hydra.engine.model.attention import hydra_varlen
from ds_hydra.engine.model.current_micro_batch import PackedMicroBatch, Segment, running
from ds_hydra.engine.ranks.process_start import use_deterministic_kernels
from ds_hydra.errors import UnsupportedModelError

MODULE = torch.nn.Identity()


def dense_reference(query, key, value, *, window=None, softcap=None, sinks=None):
    """One sequence, every score computed and masked."""
    groups = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(groups, dim=1), value.repeat_interleave(groups, dim=1)
    scores = query @ key.transpose(-1, -2) * query.shape[-1] ** -0.5
    if softcap:
        scores = torch.tanh(scores / softcap) * softcap
    position = torch.arange(query.shape[2])
    distance = position.unsqueeze(1) - position.unsqueeze(0)
    hidden = (distance < 0) | (distance >= (window or query.shape[2]))
    scores = scores.masked_fill(hidden, float("-inf"))
    if sinks is None:
        return scores.softmax(-1) @ value
    total = scores.exp().sum(-1, keepdim=True) + sinks.exp().view(1, -1, 1, 1)
    return scores.exp() / total @ value


@given(
    lengths=st.lists(st.integers(1, 23), min_size=1, max_size=5),
    groups=st.sampled_from([1, 2, 4]),
    window=st.sampled_from([None, 1, 3, 8]),
    softcap=st.sampled_from([None, 2.0]),
    has_sinks=st.booleans(),
    block=st.sampled_from([4, 1024]),
)
def test_packed_micro_batch_equals_its_sequences(
    lengths, groups, window, softcap, has_sinks, block
):
    torch.manual_seed(sum(lengths))
    total = sum(lengths)
    query = torch.randn(1, 4, total, 8, requires_grad=True)
    key = torch.randn(1, 4 // groups, total, 8, requires_grad=True)
    value = torch.randn(1, 4 // groups, total, 8, requires_grad=True)
    sinks = torch.randn(4, requires_grad=True) if has_sinks else None
    inputs = (query, key, value) if sinks is None else (query, key, value, sinks)
    micro_batch = PackedMicroBatch.build(lengths, torch.device("cpu"))
    options = {"sliding_window": window, "softcap": softcap, "s_aux": sinks}
    with patch.object(attention, "_QUERY_BLOCK", block), running(micro_batch):
        out, _ = hydra_varlen(MODULE, query, key, value, None, **options)
    parts = zip(
        query.split(lengths, 2), key.split(lengths, 2), value.split(lengths, 2), strict=True
    )
    wanted = torch.cat(
        [dense_reference(*p, window=window, softcap=softcap, sinks=sinks) for p in parts], 2
    ).transpose(1, 2)
    torch.testing.assert_close(out, wanted, rtol=1e-4, atol=1e-5)
    gradients = torch.autograd.grad(out.square().sum(), inputs, retain_graph=True)
    for got, expected in zip(
        gradients, torch.autograd.grad(wanted.square().sum(), inputs), strict=True
    ):
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)


@given(
    spans=st.lists(
        st.tuples(st.integers(0, 20), st.integers(1, 9)).map(lambda x: (x[0], sum(x))),
        min_size=1,
        max_size=4,
    ),
    groups=st.sampled_from([1, 2, 4]),
    window=st.sampled_from([None, 1, 3, 8]),
    softcap=st.sampled_from([None, 2.0]),
    has_sinks=st.booleans(),
    value_width=st.sampled_from([8, 6]),
)
def test_pieces_see_the_keys_before_them(spans, groups, window, softcap, has_sinks, value_width):
    """Each piece is the end of a sequence of which all keys are there."""
    torch.manual_seed(len(spans))
    ends = [end for _, end in spans]
    lengths = [end - begin for begin, end in spans]
    query = torch.randn(1, 4, sum(lengths), 8, requires_grad=True)
    key = torch.randn(1, 4 // groups, sum(ends), 8, requires_grad=True)
    value = torch.randn(1, 4 // groups, sum(ends), value_width, requires_grad=True)
    sinks = torch.randn(4, requires_grad=True) if has_sinks else None
    inputs = (query, key, value) if sinks is None else (query, key, value, sinks)
    with patch.object(attention, "_QUERY_BLOCK", 4):
        out = attention.attention_per_sequence(
            query, key, value, lengths, 8**-0.5, window, softcap, sinks, ends
        )
    parts = zip(query.split(lengths, 2), key.split(ends, 2), value.split(ends, 2), spans)
    wanted = torch.cat(
        [
            dense_reference(
                torch.cat([q.new_zeros(1, 4, begin, 8), q], 2),
                k,
                v,
                window=window,
                softcap=softcap,
                sinks=sinks,
            )[:, :, begin:]
            for q, k, v, (begin, _) in parts
        ],
        2,
    )
    torch.testing.assert_close(out, wanted, rtol=1e-4, atol=1e-5)
    weight = torch.randn_like(wanted)
    gradients = torch.autograd.grad((out * weight).sum(), inputs)
    for got, expected in zip(
        gradients, torch.autograd.grad((wanted * weight).sum(), inputs), strict=True
    ):
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)


def scores_computed(monkeypatch, lengths, window=None):
    """Query-key pairs that reach the attention kernel for a micro-batch of `lengths`."""
    pairs = []

    def counting(query, key, value, **_kwargs):
        pairs.append(query.shape[2] * key.shape[2])
        return torch.zeros(*query.shape[:-1], value.shape[-1])

    monkeypatch.setattr(attention.F, "scaled_dot_product_attention", counting)
    micro_batch = PackedMicroBatch.build(lengths, torch.device("cpu"))
    shape = (1, 2, micro_batch.num_tokens, 4)
    heads = [torch.zeros(shape) for _ in range(3)]
    with running(micro_batch):
        hydra_varlen(MODULE, *heads, None, sliding_window=window)
    return sum(pairs)


def test_cost_of_a_packed_micro_batch_is_the_sum_over_its_sequences(monkeypatch):
    assert scores_computed(monkeypatch, [4096]) == 4096**2
    assert scores_computed(monkeypatch, [128] * 32) == 4096**2 / 32


def test_cost_of_a_window_is_linear_in_the_length(monkeypatch):
    assert scores_computed(monkeypatch, [4096], window=128) < 2 * 128 * 4096


def test_positions_restart_in_every_sequence():
    micro_batch = PackedMicroBatch.build([3, 1, 2], torch.device("cpu"))
    assert micro_batch.position_ids.tolist() == [[0, 1, 2, 0, 0, 1]]
    assert micro_batch.cu_seqlens.tolist() == [0, 3, 4, 6]


def test_what_the_kernels_cannot_do_is_refused():
    micro_batch = PackedMicroBatch.build([2], torch.device("cpu"))
    heads = torch.zeros(1, 1, 2, 4)
    with running(micro_batch):
        with pytest.raises(UnsupportedModelError, match="attention_dropout"):
            hydra_varlen(MODULE, heads, heads, heads, None, dropout=0.1)
        with pytest.raises(UnsupportedModelError, match="a mask of its own"):
            hydra_varlen(MODULE, heads, heads, heads, torch.ones(2, 2))


def flash_attn_2(calls):
    """flash_attn_varlen_func with the arguments of flash-attn 2.8.3, on the CPU."""

    def flash_attn_varlen_func(
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p=0.0, softmax_scale=None,
        causal=False, window_size=(-1, -1), softcap=0.0, alibi_slopes=None, deterministic=False,
        return_attn_probs=False, block_table=None,
    ):  # fmt: skip
        attend = flash_attn_3(calls)
        return attend(
            q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, softmax_scale=softmax_scale,
            causal=causal, window_size=window_size, softcap=softcap, deterministic=deterministic,
        )  # fmt: skip

    return flash_attn_varlen_func


def flash_attn_3(calls):
    """The same with those of flash-attn 3 (folder hopper of 2.8.3), if it took the name of 2."""

    def flash_attn_varlen_func(
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, seqused_q=None, seqused_k=None,
        softmax_scale=None, causal=False, qv=None, q_descale=None, k_descale=None, v_descale=None,
        window_size=(-1, -1), attention_chunk=0, softcap=0.0, num_splits=1, pack_gqa=None, deterministic=False,
        sm_margin=0,
    ):  # fmt: skip
        assert causal
        assert max_seqlen_q == int(cu_seqlens_q.diff().max())
        assert max_seqlen_k == int(cu_seqlens_k.diff().max())
        calls.append({"deterministic": deterministic, "window": window_size, "softcap": softcap})
        heads = [t.transpose(0, 1).unsqueeze(0) for t in (q, k, v)]
        window = window_size[0] + 1 if window_size[0] >= 0 else None
        lengths, keys = cu_seqlens_q.diff().tolist(), cu_seqlens_k.diff().tolist()
        out = attention.attention_per_sequence(
            *heads, lengths, softmax_scale, window, softcap or None, None, keys
        )
        return out[0].transpose(0, 1)

    return flash_attn_varlen_func


@pytest.fixture(params=[flash_attn_2, flash_attn_3])
def with_flash_attn(monkeypatch, request):
    calls = []
    module = types.ModuleType("flash_attn")
    module.flash_attn_varlen_func = request.param(calls)
    monkeypatch.setitem(sys.modules, "flash_attn", module)
    find_kernel = attention.find_kernel
    find_kernel.cache_clear()
    yield calls
    find_kernel.cache_clear()


@pytest.mark.parametrize(("window", "softcap"), [(None, None), (3, 2.0)])
def test_flash_attn_is_called_as_it_is_and_adds_in_one_order(with_flash_attn, window, softcap):
    torch.manual_seed(0)
    query = torch.randn(1, 4, 9, 8)
    key, value = (torch.randn(1, 2, 12, 8) for _ in range(2))
    kernel = attention.find_kernel(needs_softcap=True)
    segments = [Segment(0, 5, 0, 5), Segment(1, 9, 3, 7)]  # all of one sequence, a piece of another
    micro_batch = PackedMicroBatch.of_segments(segments, (5, 9), torch.device("cpu"))
    heads_last = [t[0].transpose(0, 1) for t in (query, key, value)]
    ends = (micro_batch.cu_seqlens, micro_batch.cu_keys)
    got = kernel(*heads_last, *ends, 5, 7, 0.3, window, softcap)
    wanted = attention.attention_per_sequence(
        query, key, value, (5, 4), 0.3, window, softcap, None, (5, 7)
    )
    torch.testing.assert_close(got, wanted[0].transpose(0, 1))
    expected = (2, 0) if window else (-1, -1)
    assert with_flash_attn == [
        {"deterministic": False, "window": expected, "softcap": softcap or 0.0}
    ]


def test_flash_attn_adds_in_one_order_where_kernels_are_deterministic(with_flash_attn, monkeypatch):
    fills = torch.utils.deterministic.fill_uninitialized_memory
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":16:8")  # the user's, which stays
    kernel = attention.find_kernel(needs_softcap=False)
    heads, ends = [torch.randn(3, 2, 8)] * 3, torch.tensor([0, 3], dtype=torch.int32)
    try:
        use_deterministic_kernels(torch.device("cpu"))  # nothing to set there
        kernel(*heads, ends, ends, 3, 3, 0.3, None, None)
        use_deterministic_kernels(torch.device("cuda"))
        kernel(*heads, ends, ends, 3, 3, 0.3, None, None)
    finally:
        torch.use_deterministic_algorithms(False)
        torch.utils.deterministic.fill_uninitialized_memory = fills
    assert [call["deterministic"] for call in with_flash_attn] == [False, True]
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":16:8"


def strict(kernel):
    """`kernel` that refuses what flash attention 2 refuses."""

    def flash_attention_2(q, k, v, *arguments, **options):
        width = q.shape[-1]
        if width > 256 or width % 8 or not k.shape[-1] == v.shape[-1] == width:
            raise RuntimeError(f"head sizes {width} and {v.shape[-1]}\nsecond line")
        return kernel(q, k, v, *arguments, **options)

    return flash_attention_2


@pytest.fixture
def on_a_device(with_flash_attn, monkeypatch):
    """The CPU counts as a device with a kernel as strict as flash attention 2's."""
    kernel = strict(attention.find_kernel(needs_softcap=True))
    monkeypatch.setattr(attention, "find_kernel", lambda needs_softcap: kernel)
    monkeypatch.setattr(attention, "_KERNEL_DEVICES", ("cpu",))
    monkeypatch.setattr(attention, "_refused", set())
    return with_flash_attn


@pytest.mark.parametrize(
    ("widths", "calls_kernel"),
    [((192, 128), True), ((24, 24), True), ((20, 12), True), ((64, 96), True), ((512, 512), False)],
)
def test_widths_that_kernels_refuse_are_padded_or_run_by_sequence(
    on_a_device, widths, calls_kernel
):
    torch.manual_seed(0)
    query, key = torch.randn(1, 4, 9, widths[0]), torch.randn(1, 2, 9, widths[0])
    inputs = (query, key, torch.randn(1, 2, 9, widths[1]))
    results = []
    for dtype in (torch.bfloat16, torch.float32):  # the kernel takes 16 bit alone
        leaves = [t.to(dtype).requires_grad_() for t in inputs]
        with running(PackedMicroBatch.build([5, 4], torch.device("cpu"))):
            out, _ = hydra_varlen(MODULE, *leaves, None)
        assert out.shape == (1, 9, 4, widths[1])
        results.append((out, *torch.autograd.grad(out.float().square().sum(), leaves)))
    assert len(on_a_device) == calls_kernel
    for got, wanted in zip(*results, strict=True):
        assert (got.float() - wanted).norm() <= 2e-2 * wanted.norm()


def test_kernels_are_tried_at_the_start_as_they_will_run(on_a_device, monkeypatch, caplog):
    latent = types.SimpleNamespace(
        num_attention_heads=8, hidden_size=1024, head_dim=64, v_head_dim=128,
        qk_nope_head_dim=128, qk_rope_head_dim=64,
    )  # fmt: skip
    mixed = types.SimpleNamespace(num_attention_heads=8, head_dim=128, global_head_dim=512)
    assert attention.head_widths(latent) == {(192, 128)}
    assert attention.head_widths(mixed) == {(128, 128), (512, 512)}
    cpu, half = torch.device("cpu"), torch.bfloat16
    for config in (latent, mixed):
        attention.check_kernels(config, cpu, half)
    assert on_a_device
    assert not attention._refused
    assert not caplog.messages

    def refuse(*_, **__):
        raise RuntimeError("no kernel image\nmore")

    monkeypatch.setattr(attention, "find_kernel", lambda needs_softcap: refuse)
    attention.check_kernels(latent, cpu, half)
    assert attention._refused == {(192, 128, half)}
    (warning,) = caplog.messages
    assert "queries are 192 wide and values 128: refuse refuses them: no kernel image" in warning
    assert attention.find_kernel_for((192, 128), half, needs_softcap=False) is None
    monkeypatch.setattr(
        attention,
        "find_kernel",
        lambda needs_softcap: lambda q, k, v, *_: (q + k.sum() + v.sum()) * float("nan"),
    )
    with pytest.raises(UnsupportedModelError, match="is off by nan for heads of 128"):
        attention.check_kernels(mixed, cpu, half)


def test_a_torch_without_a_kernel_is_named(on_a_device, monkeypatch, caplog):
    """torch 2.10 has another varlen_attn."""
    monkeypatch.setattr(attention, "find_kernel", lambda needs_softcap: None)
    config = types.SimpleNamespace(num_attention_heads=8, head_dim=64)
    attention.check_kernels(config, torch.device("cpu"), torch.float32)
    assert not caplog.messages
    attention.check_kernels(config, torch.device("cpu"), torch.bfloat16)
    (warning,) = caplog.messages
    assert f"torch {torch.__version__} has no kernel" in warning
    assert "pip install 'torch>=2.11', or flash-attn" in warning


def test_the_doctor_tries_the_widths_that_models_have(on_a_device, monkeypatch):
    monkeypatch.setattr(findings, "find_kernel", attention.find_kernel)
    meta = types.SimpleNamespace(type="cuda")
    monkeypatch.setattr(
        findings,
        "kernel_error",
        lambda k, d, *rest: attention.kernel_error(k, torch.device("cpu"), *rest),
    )
    found = findings._check_attention(meta)
    assert found.status.value == "ok", found
    assert set(found.figures["relative_errors"]) == {"64", "128", "192/128", "256"}


def test_torchs_varlen_attention_takes_what_it_is_given(monkeypatch):
    from torch.nn.attention import varlen

    calls = []
    signature = inspect.signature(varlen.varlen_attn)

    def record(*arguments, **options):
        calls.append(signature.bind(*arguments, **options).arguments)
        return arguments[0]

    record.__signature__ = signature
    monkeypatch.setattr(varlen, "varlen_attn", record)
    attention.find_kernel.cache_clear()
    kernel = attention.find_kernel(needs_softcap=False)
    attention.find_kernel.cache_clear()
    query, key = torch.zeros(9, 4, 8), torch.zeros(9, 2, 8)
    ends = torch.tensor([0, 5, 9], dtype=torch.int32)
    kernel(query, key, key, ends, ends + 1, 5, 6, 0.3, 3, None)
    assert calls[0]["cu_seq_q"] is ends
    assert calls[0]["cu_seq_k"].tolist() == [1, 6, 10]
    assert calls[0]["window_size"] == (2, 0)
    assert calls[0]["enable_gqa"] is True


def test_softcap_without_a_kernel_is_refused_on_a_device(with_flash_attn, monkeypatch):
    capped = types.SimpleNamespace(attn_logit_softcapping=50.0)
    plain = types.SimpleNamespace(attn_logit_softcapping=None)
    cuda, half = torch.device("cuda"), torch.bfloat16
    attention.check_kernels(capped, cuda, half)
    attention.check_kernels(capped, torch.device("cpu"), torch.float32)
    with pytest.raises(UnsupportedModelError, match="enable bf16"):
        attention.check_kernels(capped, cuda, torch.float32)
    monkeypatch.setitem(sys.modules, "flash_attn", None)
    attention.find_kernel.cache_clear()
    with pytest.raises(UnsupportedModelError, match="pip install flash-attn"):
        attention.check_kernels(capped, cuda, half)
    attention.check_kernels(plain, cuda, torch.float32)
