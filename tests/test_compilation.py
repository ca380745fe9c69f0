"""`hydra.compile_layers`: one graph of a layer for all lengths, few launches beside products and
attention; gradients of compiled layers under schemes are in test_parity_table.
"""

from __future__ import annotations

import functools
import math
import re
import shutil
from unittest import mock

import numpy as np
import pytest
import torch
from distributed import run_distributed
from flash_standin import CUDNN, engine_uses, installed
from models import tiny, with_a_mixer
from test_engine_parity import assert_parity, check_gradients

from ds_hydra.engine.model import attention, attention_choice, attention_contract, attention_kernels
from ds_hydra.engine.model.attention_contract import LongSegment
from ds_hydra.engine.model.attention_operator import KernelUse
from ds_hydra.engine.model.current_micro_batch import PackedMicroBatch, running
from ds_hydra.engine.model.stage_forward import compile_each
from ds_hydra.engine.parallel import linear
from ds_hydra.errors import HydraConfigError

CPU = torch.device("cpu")


def test_a_missing_compiler_is_named_at_the_start():
    layer = torch.nn.Linear(2, 2)
    no_compiler = torch._inductor.config.patch({"cpp.cxx": (None, "/no/such/compiler")})
    with (
        no_compiler,
        pytest.raises(
            HydraConfigError,
            match=r"hydra\.compile_layers is true.*CXX.*set hydra\.compile_layers to",
        ),
    ):
        compile_each([layer])


class Layers:
    """The decoder layers of a tiny model, on a kernel's stand-in in fp32."""

    def __init__(self, family="llama", num_layers=2, kernel="flash_attention_2"):
        torch.manual_seed(0)
        self.model = tiny(family)
        attention.use_packed_attention(self.model)
        self.layers = list(self.model.model.layers)[:num_layers]
        config = self.model.config
        width = (
            getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        )
        use = KernelUse(kernel, width, width)
        attention_choice._in_use[width, width, torch.float32, False] = use

    def run(self, lengths):
        """Output, and gradients of the input and of all weights, of a micro-batch of `lengths`."""
        micro_batch = PackedMicroBatch.build(lengths, CPU)
        generator = torch.Generator().manual_seed(sum(lengths))
        shape = (1, sum(lengths), self.model.config.hidden_size)
        hidden = given = torch.randn(shape, generator=generator).requires_grad_()
        position = self.model.model.rotary_emb(hidden, micro_batch.position_ids)
        with running(micro_batch):
            for layer in self.layers:
                found = layer(hidden, position_embeddings=position)
                hidden = found[0] if isinstance(found, tuple) else found
        weights = [p for layer in self.layers for p in layer.parameters()]
        return hidden, *torch.autograd.grad(hidden.square().sum(), [given, *weights])


@pytest.fixture
def traced(monkeypatch):
    """torch.compile traces forward and backward, without a compiler behind it."""
    compiled = functools.partial(torch.compile, backend="aot_eager")
    monkeypatch.setattr(torch, "compile", compiled)
    monkeypatch.setattr("ds_hydra.engine.model.stage_forward._check_cpp_compiler", lambda: None)
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    yield torch._dynamo.utils.counters
    torch._dynamo.reset()


def micro_batches(num_iterations):
    """Lengths as the demo draws them, 6,144 tokens an iteration, at a hundredth; and shapes that
    happen to be equal to others.
    """
    rng = np.random.default_rng(0)
    yield from ([31, 1], [3], [1, 1], [7, 8, 9, 8])  # as many tokens as hidden units, or ends
    for _ in range(num_iterations):
        lengths, left = [], 61
        while left > 0:
            lengths.append(min(left, 41, max(1, int(rng.lognormal(2, 1.2)))))
            left -= lengths[-1]
        half = len(lengths) // 2
        yield from filter(lambda part: sum(part) > 1, (lengths[:half], lengths[half:]))


@pytest.mark.parametrize(
    "kernel", ["flash_attention_2", pytest.param(CUDNN, marks=pytest.mark.nightly)]
)
def test_one_graph_of_a_layer_serves_all_lengths(traced, kernel):
    with installed(kernel) as calls, mock.patch.object(attention_contract, "LONG_TOKENS", 30):
        layers = Layers(kernel=kernel)
        wanted = [layers.run(lengths) for lengths in ([4, 36, 1], [9])]
        compile_each(layers.layers)
        for lengths in micro_batches(16):
            layers.run(lengths)
            segments = LongSegment.of(lengths, lengths)
            attention_kernels.load_kernel(kernel).prepare(
                segments, math.inf
            )  # as before an iteration
        got = [layers.run(lengths) for lengths in ([4, 36, 1], [9])]
    assert any("tokens" in call for call in calls[kernel]) == (kernel == CUDNN)
    assert traced["stats"]["unique_graphs"] == 1, "two layers of one kind"
    assert not traced["graph_break"]
    for compiled, eager in zip(got, wanted, strict=True):
        torch.testing.assert_close(compiled, eager, rtol=1e-5, atol=1e-5)


@pytest.mark.nightly
def test_sinks_windows_and_padded_heads_are_in_the_graph(traced):
    """gpt-oss: layers with a window and without are two kinds."""
    with installed("flash_attention_2"):
        layers = Layers("gpt_oss")
        wanted = layers.run([11, 9, 2])
        compile_each(layers.layers)
        for lengths in ([3, 4], [11, 9, 2], [15]):
            got = layers.run(lengths)
        got = layers.run([11, 9, 2])
    assert not traced["graph_break"]
    torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-5)


def count_launches(code):
    """Calls of a compiled graph that are no product and no attention."""
    body = code[code.index("def call(") :]
    calls = re.findall(
        r"^\s+(?:\w+ = )?(cpp_fused\w*|extern_kernels\.\w+|torch\.ops\.[\w.]+)\(", body, re.M
    )
    others = [
        c for c in calls if not re.search(r"extern_kernels\.(mm|addmm|bmm)|ds_hydra\.attention", c)
    ]
    assert len(others) < len(calls), "no product was found"
    return len(others)


@pytest.mark.nightly
@pytest.mark.skipif(
    shutil.which("g++") is None, reason="torch.compile needs a C++ compiler on CPUs"
)
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_a_compiled_layer_launches_little_beside_products_and_attention(family):
    from torch._inductor.utils import run_and_get_code

    torch._dynamo.reset()
    with installed("flash_attention_2"), torch._inductor.config.patch(fx_graph_cache=False):
        layers = Layers(family, num_layers=1)
        wanted = [layers.run(lengths) for lengths in ([5, 9, 3], [4] * 12)]
        compile_each(layers.layers)
        first, (forward, backward) = run_and_get_code(layers.run, [5, 9, 3])
        torch._dynamo.utils.counters.clear()
        second = layers.run([4] * 12)
    compiled_anew = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    assert not compiled_anew, "another number of sequences runs the same code"
    assert count_launches(forward) <= 8
    assert count_launches(backward) <= 12
    torch.testing.assert_close([first, second], wanted, rtol=1e-5, atol=1e-5)


def check_engine():
    traces = functools.partial(torch.compile, backend="aot_eager")
    multiply = mock.Mock(side_effect=linear.multiply_into)
    with (
        installed("flash_attention_2") as calls,
        engine_uses("flash_attention_2"),
        mock.patch("ds_hydra.engine.transfer.stage_weights.multiply_into", multiply),
        mock.patch("torch.compile", traces),
    ):
        strategies = ("1x<1,1>", "1x<1,1;ckpt=1>")
        assert_parity(check_gradients("llama", strategies, {"compile_layers": True}))
    counters = torch._dynamo.utils.counters
    assert counters["stats"]["unique_graphs"] == 2, "of a layer, and of one that runs again"
    others = [why for why in counters["graph_break"] if "function checkpointed" not in why]
    assert not others, "\n".join(others)
    assert {call["pass"] for call in calls["flash_attention_2"]} == {"forward", "backward"}
    micro_batches, linears = 4, 4 * 7
    added = "gradients of weights add up in products"
    assert multiply.call_count == 2 * micro_batches * linears, added


@pytest.mark.slow
@pytest.mark.distributed
def test_a_layer_of_the_engine_is_one_graph():
    """With its hooks, slices that come and go, and where it runs again in backward."""
    run_distributed(check_engine, 1, timeout_s=600)


def check_whole_micro_batches():
    traces = functools.partial(torch.compile, backend="aot_eager")
    model = with_a_mixer("llama", num_hidden_layers=2)
    with mock.patch("torch.compile", traces):
        options = {"compile_layers": True}
        return check_gradients(model, ("1x<2,1;ckpt=1>",), options, lengths=(4, 2))


@pytest.mark.slow
@pytest.mark.distributed
def test_products_that_wait_belong_to_the_pass_that_backward_repeats():
    """Where ranks of a TP group have whole micro-batches."""
    assert_parity(run_distributed(check_whole_micro_batches, 2, timeout_s=600)[0])
