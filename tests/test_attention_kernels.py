"""Kernels of attention behind one contract: called as the released packages want it, right against
fp64 through stand-ins with their signatures, and chosen by what was asked and what is there.
"""

from __future__ import annotations

import dataclasses
import math
import os
import re
import types
from concurrent.futures import ThreadPoolExecutor
from unittest import mock

import pytest
import torch
from distributed import run_distributed
from flash_standin import (
    CUDNN,
    LONG_TOKENS,
    PACKAGES,
    VARLEN,
    engine_uses,
    installed,
)
from models import tiny
from operators import Watching
from test_engine_parity import assert_parity, check_gradients

from ds_hydra.configs.hydra_config import ATTENTION_KERNELS, HydraConfig
from ds_hydra.doctor import findings
from ds_hydra.engine.model import (
    attention_choice,
    attention_contract,
    attention_cudnn,
    attention_kernels,
    attention_operator,
)
from ds_hydra.engine.model.attention import hydra_varlen
from ds_hydra.engine.model.attention_choice import choose, kernel_for, select_kernels
from ds_hydra.engine.model.attention_contract import Demand, LongSegment, Scoring
from ds_hydra.engine.model.attention_kernels import load_kernel
from ds_hydra.engine.model.attention_operator import (
    KernelUse,
    attend,
    attention_per_sequence,
    count_on_host,
)
from ds_hydra.engine.model.current_micro_batch import PackedMicroBatch, Segment, running
from ds_hydra.engine.model.micro_batches import long_segments
from ds_hydra.engine.model.stage_model import StageModel
from ds_hydra.engine.ranks.process import use_deterministic_kernels
from ds_hydra.engine.strategy_links import StrategyLinks
from ds_hydra.errors import HydraConfigError, UnsupportedModelError
from ds_hydra.sampler.cuts import cut_micro_batch
from ds_hydra.sampler.plan import PipelinePlan
from ds_hydra.strategy import Scheme

CPU, HALF = torch.device("cpu"), torch.bfloat16
ALL = (*PACKAGES, VARLEN, CUDNN)
HEADS = Demand(64, 64, HALF)


EXACT, NEARLY = {"rtol": 1e-10, "atol": 1e-10}, {"rtol": 1e-5, "atol": 1e-6}
"""Tolerances in fp64. NEARLY where sinks scale in fp32, or where scores are capped: then the
softmax that is compared with is in fp32, too.
"""


def name_of(package):
    return package.partition(" ")[0]


def packed_inputs(lengths, key_lengths=None, *, has_sinks=False):
    """Queries of 4 heads of 24, keys of 2, values of 13, and sinks; a gradient of the output."""
    torch.manual_seed(0)
    queries, keys = sum(lengths), sum(key_lengths or lengths)
    shapes = (1, 4, queries, 24), (1, 2, keys, 24), (1, 2, keys, 13), (1, 4, queries, 13), (4,)
    *inputs, weight, sinks = (torch.randn(shape, dtype=torch.float64) for shape in shapes)
    inputs += [sinks] * has_sinks
    return [t.requires_grad_() for t in inputs], weight


def scoring_of(inputs, **options):
    return Scoring(0.3, sinks_H=(*inputs, None)[3], **options)


def attend_packed(inputs, weight, lengths, *, package=CUDNN, **options):
    """Output of a kernel and gradients of its inputs; lengths of segments, or these."""
    micro_batch = lengths
    if not isinstance(lengths, PackedMicroBatch):
        micro_batch = PackedMicroBatch.build(lengths, CPU)
    use = KernelUse.of(load_kernel(name_of(package)), Demand(24, 13, inputs[0].dtype))
    heads_last = [t[0].transpose(0, 1) for t in inputs[:3]]
    out = attend(use, heads_last, micro_batch.boundaries, scoring_of(inputs, **options))
    return out, *torch.autograd.grad((out.transpose(0, 1)[None] * weight).sum(), inputs)


def attend_planned(calls, inputs, weight, lengths, **options):
    """The same where all long segments have plans, by `calls`."""
    attend_packed(inputs, weight, lengths, **options)
    plan(lengths)
    calls.clear()
    return attend_packed(inputs, weight, lengths, **options)


def plan(lengths, flops_of_pair=math.inf):
    """Let cuDNN plan what an iteration of one such micro-batch needs."""
    key_lengths = lengths
    if isinstance(lengths, PackedMicroBatch):
        lengths, key_lengths = lengths.lengths, lengths.key_lengths
    load_kernel(CUDNN).prepare(LongSegment.of(lengths, key_lengths), flops_of_pair)


def attend_one_by_one(inputs, weight, lengths, key_lengths=None, **options):
    """The same of each segment alone."""
    scoring = scoring_of(inputs, **options)
    wanted = attention_per_sequence(*inputs[:3], scoring, lengths, key_lengths)
    return wanted[0].transpose(0, 1), *torch.autograd.grad((wanted * weight).sum(), inputs)


@pytest.mark.parametrize("package", ALL)
@pytest.mark.parametrize(
    ("window", "softcap", "has_sinks"),
    [
        (None, None, False),
        (3, None, False),
        (None, 2.0, False),
        (3, None, True),
        (None, None, True),
    ],
)
def test_kernels_are_called_as_they_are(package, window, softcap, has_sinks):
    """Ends of sequences, fewer key-value heads, values that are padded, in fp64."""
    if softcap and package in (VARLEN, CUDNN):
        pytest.skip("torch's kernel has no cap")
    segments = [Segment(0, 5, 0, 5), Segment(1, 9, 3, 7)]  # all of one sequence, a piece of another
    micro_batch = PackedMicroBatch.of_segments(segments, (5, 9), CPU)
    lengths, key_lengths = (5, 4), (5, 7)
    inputs, weight = packed_inputs(lengths, key_lengths, has_sinks=has_sinks)
    options = {"window": window, "softcap": softcap}
    wanted = attend_one_by_one(inputs, weight, lengths, key_lengths, **options)
    with installed(package) as calls:
        found = attend_packed(inputs, weight, micro_batch, package=package, **options)
    torch.testing.assert_close(found, wanted, **(NEARLY if has_sinks or softcap else EXACT))
    left = None if window is None else window - 1
    assert calls[package] == [
        {"pass": "forward", "window": left, "softcap": softcap or 0.0},
        {"pass": "backward", "deterministic": False},
    ]


def test_backward_hands_on_the_gradients_of_heads_as_views():
    """Backward of an index would fill and copy a tensor for each of them."""
    heads = [torch.randn(1, 2, 5, 8, dtype=HALF, requires_grad=True) for _ in range(3)]
    with installed(VARLEN), running(PackedMicroBatch.build([3, 2], CPU)):
        out_BTHD, _ = hydra_varlen(None, *heads, None, scaling=0.3)
        names = set()
        with Watching(lambda function, _: names.add(function._opname)):
            out_BTHD.backward(torch.ones_like(out_BTHD))
    assert "transpose" in names
    assert "select_backward" not in names


def test_a_window_that_hides_nothing_is_left_out():
    ends = torch.tensor([0, 3], dtype=torch.int32), torch.tensor([0, 5], dtype=torch.int32)
    heads = torch.randn(3, 2, 8), torch.randn(5, 2, 8), torch.randn(5, 2, 8)
    with installed(VARLEN) as calls:
        for window in (4, 5):
            attend(
                KernelUse(VARLEN, 8, 8),
                heads,
                (*ends, count_on_host([3], [5])),
                Scoring(0.3, window),
            )
    assert [call["window"] for call in calls[VARLEN]] == [3, None]


@pytest.mark.parametrize("package", ALL)
def test_sums_have_one_order_where_kernels_are_deterministic(package, monkeypatch):
    fills = torch.utils.deterministic.fill_uninitialized_memory
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":16:8")  # the user's, which stays
    heads = [torch.randn(3, 2, 8, requires_grad=True) for _ in range(3)]
    ends = torch.tensor([0, 3], dtype=torch.int32)
    try:
        with installed(package) as calls:
            for device in ("cpu", "cuda"):  # nothing to set on the first
                use_deterministic_kernels(torch.device(device))
                use = KernelUse(name_of(package), 8, 8)
                boundaries = (ends, ends, count_on_host([3], [3]))
                attend(use, heads, boundaries, Scoring(0.3)).sum().backward()
            assert torch.is_deterministic_algorithms_warn_only_enabled()
            torch.use_deterministic_algorithms(True)  # the user's, as full_determinism
            use_deterministic_kernels(torch.device("cuda"))
            assert not torch.is_deterministic_algorithms_warn_only_enabled()
    finally:
        torch.use_deterministic_algorithms(False)
        torch.utils.deterministic.fill_uninitialized_memory = fills
    backward = [call for call in calls[package] if call["pass"] == "backward"]
    assert [call["deterministic"] for call in backward] == [False, True]
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":16:8"


@pytest.mark.parametrize("window", [None, 2], ids=["causal", "window"])
def test_attention_of_each_sequence_adds_in_one_order_too(window):
    """torch's operator has one order only where others without one are errors."""
    orders = []

    def note(function, _):
        if "attention" in function.name() and "backward" in function.name():
            is_asked = torch.are_deterministic_algorithms_enabled()
            orders.append(is_asked and not torch.is_deterministic_algorithms_warn_only_enabled())

    heads = [torch.randn(1, 2, 7, 8, requires_grad=True) for _ in range(3)]
    try:
        for mode in (False, True):
            torch.use_deterministic_algorithms(mode, warn_only=True)
            out = attention_per_sequence(*heads, Scoring(0.3, window), [4, 3])
            with Watching(note):
                out.sum().backward()
            assert torch.are_deterministic_algorithms_enabled() is mode
            assert torch.is_deterministic_algorithms_warn_only_enabled()
    finally:
        torch.use_deterministic_algorithms(False)
    half = len(orders) // 2
    assert half >= 2
    assert orders == [False] * half + [True] * half


def test_what_packages_of_other_releases_lack_is_named():
    def _flash_attn_varlen_forward(q, k, v, cu_seqlens_q, cu_seqlens_k):
        raise AssertionError

    module, flash_2 = types.ModuleType("old"), attention_kernels._FLASH["flash_attention_2"]
    module._flash_attn_varlen_forward = _flash_attn_varlen_forward
    with pytest.raises(
        attention_contract.MissingKernelError, match="old has no _flash_attn_varlen_"
    ):
        attention_kernels._flash(flash_2, module, "x", "x")
    module._flash_attn_varlen_backward = _flash_attn_varlen_forward
    with pytest.raises(attention_contract.MissingKernelError, match="knows no max_seqlen_q"):
        attention_kernels._flash(flash_2, module, "x", "x")


def test_functions_that_are_operators_are_called_by_their_schema():
    """flash-attn 2 and 3 have such functions, which torch.library.custom_op hides."""
    operator = torch.library.custom_op(
        "of_a_package::attend",
        lambda q, _alibi, scale, left=-1: q * scale + left,
        mutates_args=(),
        schema="(Tensor q, Tensor? alibi, float scale, int left=-1) -> Tensor",
    )
    call = attention_contract.Named(operator, "q", "left|other")
    given = {"q": torch.ones(2), "scale": 3.0, "causal": True}
    assert call(**given).tolist() == [2.0, 2.0]
    assert call(**given, left=4).tolist() == [7.0, 7.0]
    with pytest.raises(attention_contract.MissingKernelError, match="knows no causal"):
        attention_contract.Named(operator, "causal|is_causal")


@pytest.fixture
def flash_2_on_a_device():
    """flash-attn 2 alone is there, as strict as it is, and the CPU is its device."""
    with installed("flash_attention_2") as calls:

        def check(q, k, v):
            if q.shape[-1] > 256 or q.shape[-1] % 8 or q.shape[-1] != v.shape[-1]:
                raise RuntimeError(f"head sizes {q.shape[-1]} and {v.shape[-1]}\nsecond line")

        calls["flash_attention_2"].check = check
        yield calls["flash_attention_2"]


@pytest.mark.parametrize(
    ("widths", "calls_kernel"),
    [((192, 128), True), ((24, 24), True), ((20, 12), True), ((64, 96), True), ((512, 512), False)],
)
def test_widths_that_kernels_refuse_are_padded_or_run_by_sequence(
    flash_2_on_a_device, widths, calls_kernel
):
    torch.manual_seed(0)
    query, key = torch.randn(1, 4, 9, widths[0]), torch.randn(1, 2, 9, widths[0])
    inputs = (query, key, torch.randn(1, 2, 9, widths[1]))
    results = []
    for dtype in (HALF, torch.float32):  # the kernel takes 16 bit alone
        leaves = [t.to(dtype).requires_grad_() for t in inputs]
        with running(PackedMicroBatch.build([5, 4], CPU)):
            out, _ = hydra_varlen(torch.nn.Identity(), *leaves, None)
        assert out.shape == (1, 9, 4, widths[1])
        results.append((out, *torch.autograd.grad(out.float().square().sum(), leaves)))
    assert len(flash_2_on_a_device) == 2 * calls_kernel
    for got, wanted in zip(*results, strict=True):
        assert (got.float() - wanted).norm() <= 2e-2 * wanted.norm()


LATENT = types.SimpleNamespace(
    num_attention_heads=8, hidden_size=1024, head_dim=64, v_head_dim=128,
    qk_nope_head_dim=128, qk_rope_head_dim=64,
)  # fmt: skip
MIXED = types.SimpleNamespace(num_attention_heads=8, head_dim=128, global_head_dim=512)
PLAIN = types.SimpleNamespace(num_attention_heads=8, head_dim=64)
CAPPED = types.SimpleNamespace(num_attention_heads=8, head_dim=64, attn_logit_softcapping=50.0)


def test_kernels_are_tried_at_the_start_as_they_will_run(flash_2_on_a_device, caplog):
    assert attention_choice.head_widths(LATENT) == {(192, 128)}
    assert attention_choice.head_widths(MIXED) == {(128, 128), (512, 512)}
    (latent,) = select_kernels(LATENT, CPU, HALF)
    assert (
        str(latent)
        == "flash_attention_2 (flash-attn of unknown version) for heads of 192/128 in bfloat16"
    )
    assert 0 < latent.error < 2e-2
    assert flash_2_on_a_device
    assert not caplog.messages
    narrow, wide = select_kernels(MIXED, CPU, HALF)
    assert (narrow.name, wide.name) == ("flash_attention_2", "per_sequence")
    (warning,) = caplog.messages
    assert "one call for each sequence for heads of 512 in bfloat16" in warning
    assert "not flash_attention_2: it does not take heads of 512 with values of 512" in warning


def test_a_kernel_that_refuses_on_the_device_is_passed_over(flash_2_on_a_device, caplog):
    flash_2_on_a_device.check = raises(RuntimeError("no kernel image\nmore"))
    (choice,) = select_kernels(LATENT, CPU, HALF)
    assert choice.kernel is None
    assert kernel_for(192, 128, HALF, False) is None
    (warning,) = caplog.messages
    assert "not flash_attention_2: it refuses: no kernel image" in warning
    with pytest.raises(HydraConfigError, match=r'hydra.attention is "flash_attention_2".*it refuses: no kernel.*'
                       r'set it to "per_sequence", or to "auto"'):  # fmt: skip
        select_kernels(LATENT, CPU, HALF, request="flash_attention_2")


def raises(error):
    def fault(*_):
        raise error

    return fault


def wrong_output(outputs, _):
    outputs[0].mul_(1.1)


def wrong_tail(grads, ends):
    if ends.long:
        grads[1][ends.long[-1].last - 20 :] *= 1.3  # dk of the last keys of the long sequence


def in_long(fault):
    """The fault of what runs apart alone."""
    return lambda found, ends: fault(found, ends) if ends.long else None


OFF = r"it is off by \S+, at most 0.02 is expected"


@pytest.mark.parametrize(
    ("name", "other", "way", "fault", "reason"),
    [
        ("flash_attention_3", "flash_attention_2", "forward", wrong_output, OFF),
        (CUDNN, VARLEN, "backward", wrong_tail, OFF),
        (CUDNN, VARLEN, "forward", in_long(lambda outputs, _: outputs[0].fill_(math.nan)), OFF),
        (CUDNN, VARLEN, "backward", in_long(raises(KeyError("lse"))), "it refuses: 'lse'"),
    ],
)
def test_a_kernel_that_fails_its_trial_is_passed_over_or_an_error(
    name, other, way, fault, reason, caplog, monkeypatch
):
    with installed(name, other):
        kernel = load_kernel(name)
        run = getattr(kernel, way)

        def run_wrong(*inputs):
            found = run(*inputs)
            fault(found, inputs[3 if way == "forward" else 6])
            return found

        attention_kernels._loaded[name] = dataclasses.replace(kernel, **{way: run_wrong})
        (choice,) = select_kernels(PLAIN, CPU, HALF)
        assert (choice.name, choice.failed) == (other, (name,))
        assert kernel_for(64, 64, HALF, False).name == other
        (warning,) = caplog.messages
        assert re.fullmatch(f"attention runs by {other}; not {name}: {reason}", warning)
        assert re.search(f"not {name}: {reason}", choice.describe())
        is_off = reason == OFF
        message = (
            rf'{name} \(.*\) is off by \S+ for heads of 64 in bfloat16.*set hydra.attention to "{other}" or "per_seq'
            if is_off
            else f'is "{name}".*{reason}; set it to "{other}" or "per_sequence", or to "auto"'
        )
        with pytest.raises(UnsupportedModelError if is_off else HydraConfigError, match=message):
            select_kernels(PLAIN, CPU, HALF, request=name)
        (choice,) = select_kernels(PLAIN, CPU, HALF, request=other)
        assert choice.name == other
        monkeypatch.setattr(findings, "_WIDTHS", ((64, 64),))
        found = findings.check_attention(CPU)
        assert found.status.value == "warning"
        assert re.search(f"not {name}: {reason}", found.text)
        assert f"reinstall {name}" in found.advice


WIDE, CAPPED_HEADS = Demand(256, 256, HALF), HEADS._replace(is_capped=True)
FLASH_2, FLASH_3, FLASH_4 = (f"flash_attention_{n}" for n in (2, 3, 4))
CHOICES = (
    # installed, heads, compute capability, deterministic: what runs, and why no faster one does
    (ALL, HEADS, None, False, FLASH_3, ""),
    (ALL, HEADS, 8, False, FLASH_3, ""),
    (ALL, HEADS, 9, False, FLASH_3, ""),
    (ALL, HEADS, 10, False, FLASH_4, "it runs on compute capability 8.x and 9.x, the device has 10.x"),
    (ALL, HEADS, 12, False, FLASH_4, ""),
    (ALL, Demand(192, 192, HALF), 10, False, FLASH_2, ""),
    (ALL, Demand(192, 128, HALF), 10, False, FLASH_4, ""),
    (ALL, Demand(64, 64, torch.float32), None, False, "per_sequence", "computes in 16 bit, not in float32"),
    ((FLASH_3, FLASH_2), WIDE, None, False, FLASH_3, ""),
    ((FLASH_3, FLASH_2), WIDE, None, True, FLASH_2, "up to a width of 192, heads have 256"),
    ((FLASH_2, VARLEN), HEADS, None, False, FLASH_2, ""),
    ((VARLEN,), HEADS, None, False, VARLEN, ""),
    ((VARLEN,), CAPPED_HEADS, None, False, "per_sequence", ""),
    ((CUDNN, FLASH_2, VARLEN), HEADS, None, False, CUDNN, ""),
    ((CUDNN, FLASH_3), HEADS, None, False, FLASH_3, ""),
    ((CUDNN, VARLEN), Demand(20, 12, HALF), None, False, CUDNN, ""),
    ((CUDNN, VARLEN), Demand(192, 128, HALF), None, False, VARLEN, "it does not take heads of 192 with values of 128"),
    ((CUDNN, FLASH_2), CAPPED_HEADS, None, False, FLASH_2, "not cudnn: it cannot cap scores"),
    ((CUDNN, VARLEN), HEADS, None, True, VARLEN, "no order of sums (hydra.deterministic)"),
    ((CUDNN, VARLEN), HEADS, 8, False, VARLEN, "not cudnn: it runs on compute capability 9.x, the device has 8.x"),
    ((CUDNN, VARLEN), HEADS, 10, False, VARLEN, "not cudnn: it runs on compute capability 9.x"),
)  # fmt: skip


@pytest.mark.parametrize("choice", CHOICES, ids=range(len(CHOICES)))
def test_the_fastest_kernel_that_takes_a_demand_is_chosen(choice, monkeypatch):
    packages, demand, generation, is_ordered, wanted, reason = choice
    monkeypatch.setattr(attention_choice, "_generation", lambda _: generation)
    with installed(*packages):
        found = choose(demand, is_ordered=is_ordered)
    assert found.name == wanted
    assert reason in found.describe()


def test_a_torch_without_the_operator_is_named(monkeypatch):
    with installed():
        attention_kernels._loaded.clear()
        monkeypatch.setattr(torch.ops.aten, "_flash_attention_forward", None)
        assert "not varlen: torch" in choose(HEADS).describe()


def test_names_of_the_configuration_are_those_of_kernels():
    known = {*attention_kernels.KERNELS}
    assert {*known, attention_kernels.PER_SEQUENCE} == set(ATTENTION_KERNELS)
    given = {"context_length": 64, "tokens_per_iteration": 64}
    for name in ("auto", *ATTENTION_KERNELS, "kernels-community/flash-attn3@v1"):
        assert HydraConfig.parse({**given, "attention": name}).attention == name
    with pytest.raises(ValueError, match="did you mean 'flash_attention_3'"):
        HydraConfig.parse({**given, "attention": "flash_attn_3"})
    with pytest.raises(ValueError, match='is "varlen_fa4": it is called "flash_attention_4" now'):
        HydraConfig.parse({**given, "attention": "varlen_fa4"})


@pytest.mark.parametrize(
    ("request_", "config", "dtype", "message"),
    [
        ("flash_attention_4", PLAIN, HALF, "flash-attn-4 is not installed; set it to \"flash_attention_2\" or"),
        ("flash_attention_2", PLAIN, torch.float32, "it computes in 16 bit, not in float32; set it to \"per_seq"),
        ("flash_attention_2", MIXED, HALF, "it does not take heads of 512 with values of 512; set it to \"per"),
        ("owner/other", PLAIN, HALF, "owner/other is no flash-attn2, flash-attn3 or flash-attn4"),
        ("kernels-community/flash-attn3", PLAIN, HALF, "kernels-community/flash-attn3 cannot be loaded"),
    ],
)  # fmt: skip
def test_a_kernel_that_was_asked_for_and_cannot_run_is_an_error(
    flash_2_on_a_device, request_, config, dtype, message
):
    with pytest.raises(HydraConfigError, match=rf'hydra.attention is "{request_}".*{message}'):
        select_kernels(config, CPU, dtype, request=request_)


def test_kernels_are_not_for_cpus():
    with pytest.raises(
        HydraConfigError, match=r'"varlen", which runs on GPUs.*compute on cpu; leave it at "auto"'
    ):
        select_kernels(PLAIN, CPU, torch.float32, request="varlen")
    for request in ("auto", "per_sequence"):
        assert select_kernels(PLAIN, CPU, torch.float32, request=request) == []


def test_what_the_model_was_loaded_with_is_honoured(caplog):
    with installed("flash_attention_2", "flash_attention_3"):
        for asked in ("flash_attention_2", "sdpa", "eager", None):
            (choice,) = select_kernels(PLAIN, CPU, HALF, asked_by_model=asked)
            wanted = asked if asked == "flash_attention_2" else "flash_attention_3"
            assert choice.name == wanted
        (choice,) = select_kernels(
            PLAIN, CPU, HALF, request="flash_attention_3", asked_by_model="flash_attention_2"
        )
        assert choice.name == "flash_attention_3"
        assert not caplog.messages
        for asked in ("flash_attention_4", "flex_attention", "kernels-community/vllm-flash-attn3"):
            (choice,) = select_kernels(PLAIN, CPU, HALF, asked_by_model=asked)
            assert choice.name == "flash_attention_3"
    asked_for = ("flash_attention_4", "flex_attention", "kernels-community/vllm-flash-attn3")
    for asked, message in zip(asked_for, caplog.messages, strict=True):
        assert message.startswith(f"the model's attn_implementation, {asked}, does not run: ")
        assert "; flash_attention_3 (flash-attn-3" in message
    assert "flash-attn-4 is not installed" in caplog.messages[0]


def test_the_stage_model_asks_for_what_its_model_was_loaded_with():
    model = tiny("llama").to(HALF)
    model.config._attn_implementation = "flash_attention_2"
    with installed("flash_attention_2", "flash_attention_3"):
        for key, wanted in (("auto", "flash_attention_2"), ("flash_attention_3",) * 2):
            stage_model = StageModel(model, attention_kernel=key)
            stage_model.to_device(CPU)
            assert [choice.name for choice in stage_model.attention_choices] == [wanted]
            assert kernel_for(8, 8, HALF, False).name == wanted


def test_kernels_of_the_hub_have_both_passes(monkeypatch):
    from transformers.integrations import hub_kernels

    loaded = []

    def get_kernel(name, revision=None, version=None):
        loaded.append((name, revision, version))
        module = types.ModuleType(name)
        if "vllm" not in name:  # which has no backward
            module.flash_attn_interface = types.SimpleNamespace(
                **{f.__name__: f for f in PACKAGES["flash_attention_3"][1]([])}
            )
        return module

    monkeypatch.setattr(hub_kernels, "get_kernel", get_kernel)
    monkeypatch.setattr(attention_kernels, "_has_downloaded", lambda name: name.endswith("attn3"))
    with installed():
        kernel = load_kernel("kernels-community/flash-attn3@main")
        assert kernel.generations == (8, 9)
        assert choose(HEADS).name == "kernels-community/flash-attn3"  # has been downloaded
        with pytest.raises(
            attention_contract.MissingKernelError, match="has no _flash_attn_forward"
        ):
            load_kernel("kernels-community/vllm-flash-attn3")
    assert loaded[0] == ("kernels-community/flash-attn3", "main", None)
    assert loaded[1][2] is not None


def test_the_doctor_tries_the_widths_that_models_have(flash_2_on_a_device, monkeypatch):
    found = findings.check_attention(CPU)
    assert found.status.value == "ok", found
    assert set(found.figures["relative_errors"]) == {"64", "128", "192/128", "256"}
    assert "flash_attention_2" in found.text
    assert "not flash_attention_3: flash-attn-3 is not installed" in found.text


def test_softcap_without_a_kernel_is_refused_on_a_device():
    with installed("flash_attention_2"):
        assert select_kernels(CAPPED, CPU, HALF)[0].name == "flash_attention_2"
        with pytest.raises(UnsupportedModelError, match="enable bf16"):
            select_kernels(CAPPED, CPU, torch.float32)
    with installed(VARLEN), pytest.raises(UnsupportedModelError, match="pip install flash-attn"):
        select_kernels(CAPPED, CPU, HALF)
    assert select_kernels(CAPPED, CPU, torch.float32) == []


def test_copies_of_gradients_are_counted_where_the_kernel_makes_them():
    assert attention_choice.keeps_copies("auto")  # not known before a device is there
    assert not attention_choice.keeps_copies("flash_attention_3")
    assert not attention_choice.keeps_copies("per_sequence")
    for package in ALL:
        with installed(package):
            select_kernels(PLAIN, CPU, HALF)
            found = attention_choice.keeps_copies("auto")
            assert found == (package in ("flash_attention_2", VARLEN))


def apart(calls):
    """Passes of shapes that cuDNN got."""
    return [(call["pass"], call["tokens"]) for call in calls if "tokens" in call]


def test_cudnn_runs_shapes_that_have_plans_which_no_iteration_builds(monkeypatch):
    """Building one waits for the device, on which another rank's collective may wait."""
    lengths = [110, 4]
    inputs, weight = packed_inputs(lengths)
    with installed(CUDNN) as calls:
        of_kernel = calls[CUDNN]
        plan(lengths)  # of heads that nobody has met
        without = attend_packed(inputs, weight, lengths)
        assert apart(of_kernel) == []
        assert [call["pass"] for call in of_kernel] == ["forward", "backward"]
        # A padded square of 128 has 8,192 pairs: one in an iteration is not worth a plan, two are
        monkeypatch.setattr(attention_cudnn, "_WORTH_FLOPS", 1.5 * 8192)
        plan(lengths, 1.0)
        assert apart(of_kernel) == []
        of_kernel.clear()
        plan([110, 120, 4], 1.0)
        # In the thread that computes, and in that of backward passes
        assert apart(of_kernel) == [("forward", 128), ("forward", 128), ("backward", 128)]
        of_kernel.clear()
        plan(lengths)
        assert of_kernel == []
        found = attend_packed(inputs, weight, lengths)
        assert apart(of_kernel) == [("forward", 128), ("backward", 128)]
    torch.testing.assert_close(found, without, **EXACT)


def test_long_segments_of_a_plan_are_those_of_all_pipelines_and_rows():
    lengths = (9000, 500, 60000, 5000)
    rows = cut_micro_batch((2, 1), lengths, 2)
    made = [
        (Scheme(1, 1), (0,), ((0,), (3,)), ()),
        (Scheme(1, 1, cp=2), (1, 2), ((2, 1),), (rows,)),
    ]
    pipelines = [
        PipelinePlan(
            scheme=scheme, ranks=ranks, micro_batches=own, makespan_ms=1.0, lower_bound_ms=0.0,
            rows=of_own,
        )
        for scheme, ranks, own, of_own in made
    ]  # fmt: skip
    phase = types.SimpleNamespace(pipelines=pipelines)
    found = long_segments(types.SimpleNamespace(in_turn=[phase], lengths=lengths))
    pieces = [p for row in rows for p in row if p.position == 2]
    assert [(s.end - s.begin, s.last - s.first) for s in found] == [
        (9000, 9000), (5000, 5000), *((p.end - p.begin, p.end) for p in pieces),
    ]  # fmt: skip
    assert len(pieces) == 3, "the middle two chunks are one"


def test_a_thread_without_plans_leaves_cudnn_alone():
    lengths = [110]
    inputs, weight = packed_inputs(lengths)
    with installed(CUDNN) as calls:
        attend_planned(calls[CUDNN], inputs, weight, lengths)
        calls[CUDNN].clear()
        with ThreadPoolExecutor(1) as pool:
            pool.submit(attend_packed, inputs, weight, lengths).result()
        assert apart(calls[CUDNN]) == []
        attend_packed(inputs, weight, lengths)
        assert apart(calls[CUDNN]) == [("forward", 128), ("backward", 128)]


@pytest.mark.parametrize("num_passes", [0, 1, 2])
def test_a_plan_that_fails_is_left_out_in_both_passes(num_passes, caplog):
    """After so many of its passes."""
    lengths = [110]
    inputs, weight = packed_inputs(lengths)
    left = [num_passes]

    def refuse(*_):
        left[0] -= 1
        if left[0] < 0:
            raise torch.OutOfMemoryError("no memory")

    with installed(CUDNN) as calls:
        wanted = attend_packed(inputs, weight, lengths)
        calls[CUDNN].check = refuse
        plan(lengths)
        del calls[CUDNN].check
        calls[CUDNN].clear()
        found = attend_packed(inputs, weight, lengths)
        plan(lengths)
        assert apart(calls[CUDNN]) == [], "it is not tried again"
    torch.testing.assert_close(found, wanted)
    (warning,) = caplog.messages
    assert re.search(r"cuDNN does not plan _Sizes\(num_queries=128, .* of _Heads\(", warning)
    assert warning.endswith("no memory")


def test_what_backward_by_another_kernel_reads_by_its_address_is_contiguous():
    lengths = [110]
    (query, key, value, *_), _ = packed_inputs(lengths)
    with installed(CUDNN) as calls:
        attend_planned(calls[CUDNN], *packed_inputs(lengths), lengths)
        ends = attention_operator._ends(*PackedMicroBatch.build(lengths, CPU).boundaries, None)
        heads = [t[0].transpose(0, 1) for t in (query, key, value)]
        heads[2] = torch.nn.functional.pad(heads[2], (0, 24 - 13))
        _, lse = load_kernel(CUDNN).forward(*heads, ends, Scoring(0.3))
        assert apart(calls[CUDNN])[-1] == ("forward", 128)
    assert lse.shape == (4, 110)
    assert lse.is_contiguous()


@pytest.mark.parametrize("window", [None, 9, 130])
@pytest.mark.parametrize("has_sinks", [False, True])
def test_windows_that_hide_something_and_sinks_are_not_for_cudnn(window, has_sinks):
    lengths = [5, 130, 110]
    inputs, weight = packed_inputs(lengths, has_sinks=has_sinks)
    wanted = attend_one_by_one(inputs, weight, lengths, window=window)
    with installed(CUDNN) as calls:
        found = attend_planned(calls[CUDNN], inputs, weight, lengths, window=window)
    torch.testing.assert_close(found, wanted, **(NEARLY if has_sinks else EXACT))
    assert any("tokens" in call for call in calls[CUDNN]) == (window != 9 and not has_sinks)


def test_as_many_long_sequences_run_apart_as_have_a_place():
    lengths = [1, *range(LONG_TOKENS, LONG_TOKENS + 18), 2]
    inputs, weight = packed_inputs(lengths)
    with installed(CUDNN) as calls:
        found = attend_planned(calls[CUDNN], inputs, weight, lengths)
        boundaries = PackedMicroBatch.build(lengths, CPU).boundaries
    torch.testing.assert_close(found, attend_one_by_one(inputs, weight, lengths), **EXACT)
    assert sum(call.get("tokens") == 128 for call in calls[CUDNN]) == 2 * 16
    ends = attention_operator._ends(*boundaries, None)
    assert ends[2:6] == (LONG_TOKENS + 17, LONG_TOKENS + 17, LONG_TOKENS + 1, LONG_TOKENS + 1)
    assert [sequence.number for sequence in ends.long] == list(range(3, 19)), "the longest ones"
    assert len(boundaries[2]) == len(PackedMicroBatch.build([3], CPU).boundaries[2])


def whole(*lengths):
    return [(length, 0, length) for length in lengths]


APART = (
    # Segments as (sequence's length, begin, end), and calls as (padded queries, keys)
    (whole(5, 130, 7, 101, 100, 3, 1), [(256, 256), (128, 128), (128, 128)]),  # behind others, side by side
    (whole(110, 4), [(128, 128)]),
    (whole(4, 110), [(128, 128)]),
    (whole(128), [(128, 128)]),  # nothing to pad, and nothing beside it
    (whole(110), [(128, 128)]),
    (whole(100, 300), [(128, 128), (512, 512)]),
    (whole(99, 5), []),
    ([(400, 300, 400)], [(128, 288), (128, 128)]),  # 12 keys go to the square
    ([(600, 540, 570), (30, 0, 30), (300, 0, 300)], [(32, 528), (64, 64), (512, 512)]),
    ([(300, 10, 300)], [(512, 512)]),  # too few keys before for a block
    ([(384, 256, 384)], [(128, 256), (128, 128)]),  # nothing to pad
    ([(5, 2, 5), (900, 700, 900), (7, 0, 7)], [(256, 688), (256, 256)]),
    ([(90, 60, 90), (12, 3, 12)], []),
    ([(4000, 3990, 4000)], []),  # too few queries to fill a device
)  # fmt: skip


@pytest.mark.parametrize(("segments", "apart"), APART)
@pytest.mark.parametrize("lse_dims", [3, 4])
def test_long_segments_run_apart_by_cudnn(segments, apart, lse_dims, monkeypatch):
    """Pieces over the first keys without a mask, and as a causal square over the others."""
    monkeypatch.setattr(attention_cudnn, "_GRID_TOKENS", 16)
    monkeypatch.setattr(attention_cudnn, "_GRID_STEPS", 1)
    sequence_lengths = [length for length, _, _ in segments]
    segments = [Segment(n, *segment) for n, segment in enumerate(segments)]
    lengths, key_lengths = [s.end - s.begin for s in segments], [s.end for s in segments]
    inputs, weight = packed_inputs(lengths, key_lengths)
    wanted = attend_one_by_one(inputs, weight, lengths, key_lengths)
    with installed(CUDNN) as calls:
        calls[CUDNN].lse_dims = lse_dims
        micro_batch = PackedMicroBatch.of_segments(segments, sequence_lengths, CPU)
        found = attend_planned(calls[CUDNN], inputs, weight, micro_batch)
    torch.testing.assert_close(found, wanted, **EXACT)
    for way in ("forward", "backward"):
        own = [c for c in calls[CUDNN] if c["pass"] == way and "tokens" in c]
        assert [(c["tokens"], c.get("keys", c["tokens"])) for c in own] == apart


def test_what_is_long():
    def long_of(lengths, key_lengths):
        return [tuple(s) for s in LongSegment.of(lengths, key_lengths)]

    assert long_of([5000, 4095, 4096], [5000, 4095, 4096]) == [
        (0, 0, 5000, 0, 5000),
        (2, 9095, 13191, 9095, 13191),
    ]
    # 2,048 queries of 5,120 keys see as many pairs as a whole sequence of 4,096
    assert long_of([7, 2048], [9, 5120]) == [(1, 7, 2055, 9, 5129)]
    assert not long_of([2048], [5119])
    assert not long_of([1023], [1 << 20])
    assert long_of([1024], [1 << 20])


def on_grid(heads):
    """A whole sequence as cuDNN gets it."""
    number = len(heads)
    (block,) = attention_cudnn._blocks(LongSegment(0, 0, number, 0, number))
    padded, *_ = attention_cudnn._padded([heads], [], block)
    return padded


def test_keys_that_all_queries_see_stand_on_a_finer_grid():
    found, left = set(), []
    for before in range(0, 65536, 7):
        segment = LongSegment(0, 0, 2048, 0, before + 2048)
        *whole, square = attention_cudnn._blocks(segment)
        num_whole = whole[0].keys.stop if whole else 0
        assert square.keys == slice(num_whole, before + 2048)
        assert square.num_before == before - num_whole < max(128, before / 32)
        assert num_whole % 128 == 0
        found.add(num_whole)
        left.append(square.num_before)
    assert len(found) == 32 + 4 * 32
    assert sum(left) / len(left) < 400


def test_padded_lengths_are_few():
    """So that cuDNN builds few plans, and little is computed for nothing."""
    found = set()
    for length in range(4096, 65537, 7):
        padded = on_grid(torch.empty(length, 1, 1, device="meta")).shape[2]
        assert padded % 128 == 0
        assert length <= padded < length * 17 / 16
        found.add(padded)
    assert len(found) == 4 * 16 + 1


@pytest.mark.parametrize(
    ("holder", "name", "value", "why"),
    [
        (torch.backends.cuda, "is_built", lambda: False, "is not built for CUDA"),
        (torch.version, "hip", "7.0", "is not built for CUDA"),
        (torch.backends.cudnn, "is_available", lambda: False, "has no cuDNN"),
        (torch.backends.cuda, "cudnn_sdp_enabled", lambda: False, "was told by torch.backends.cuda.enable_cudnn_sdp"),
    ],
)  # fmt: skip
def test_a_torch_without_cudnn_says_so(monkeypatch, holder, name, value, why):
    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: True)
    monkeypatch.setattr(torch.backends.cudnn, "is_available", lambda: True)
    monkeypatch.setattr(torch.version, "hip", None)
    assert attention_cudnn.why_not() == ""
    monkeypatch.setattr(holder, name, value)
    assert attention_cudnn.why_not().startswith(why)
    with pytest.raises(attention_contract.MissingKernelError, match=why):
        attention_kernels._load(CUDNN)


def test_heads_that_come_too_late_for_a_trial_run_by_a_kernel_that_needs_none():
    with installed(CUDNN, VARLEN):
        select_kernels(PLAIN, CPU, HALF)
        assert kernel_for(64, 64, HALF, False).name == CUDNN
        assert kernel_for(32, 32, HALF, False).name == VARLEN


def noted(events, word, run):
    def run_and_note(*arguments, **options):
        events.append(word)
        return run(*arguments, **options)

    return run_and_note


def check_engine_with_cudnn():
    strategies = ("2x<1,1;ckpt=1>", "1x<2,1>", "1x<1,2>", "1x<sp2,1>", "1x<cp2,1>")
    events = []
    build, opens = attention_cudnn._Plans.build, StrategyLinks.open
    with (
        installed(CUDNN) as calls,
        engine_uses(CUDNN),
        mock.patch.object(attention_contract, "LONG_TOKENS", 8),
        mock.patch.object(attention_cudnn, "_GRID_TOKENS", 2),
        mock.patch.object(attention_cudnn, "_WORTH_FLOPS", 0),
        mock.patch.object(attention_cudnn._Plans, "build", noted(events, "plans", build)),
        mock.patch.object(StrategyLinks, "open", noted(events, "iteration", opens)),
    ):
        first = check_gradients("llama", strategies)
        calls[CUDNN].clear()
        again = check_gradients("llama", strategies)
    passes = {(call["pass"], "tokens" in call, "keys" in call) for call in calls[CUDNN]}
    return first, again, passes, events


@pytest.mark.slow
@pytest.mark.distributed
def test_strategies_have_one_gradient_where_long_sequences_run_apart():
    first, again, passes, events = run_distributed(check_engine_with_cudnn, 2)[0]
    assert_parity(first)
    assert_parity(again)
    assert len(events) >= 2 * 2 * 5
    assert events == ["plans", "iteration"] * (len(events) // 2), "none is built in an iteration"
    # By varlen, whole sequences and squares, keys before those of a piece (CP)
    kinds = (False, False), (True, False), (True, True)
    assert passes == {(way, *kind) for way in ("forward", "backward") for kind in kinds}
