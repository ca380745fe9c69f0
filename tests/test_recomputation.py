"""Checkpointed layers: attention runs once, and gradients are those of one process."""

from __future__ import annotations

import functools
import gc
from unittest import mock

import pytest
import torch
from distributed import run_distributed
from flash_standin import engine_uses, installed
from test_engine_parity import assert_parity, check_gradients
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import checkpoint

from ds_hydra.engine.model.attention_contract import Scoring
from ds_hydra.engine.model.attention_operator import KernelUse, attend, count_on_host
from ds_hydra.engine.parallel import recomputation, token_cuts
from ds_hydra.engine.parallel.offload import OffloadedLayer

KERNEL = "flash_attention_2"


def check_engine(family, strategies, hydra=None, overrides=None):
    """Calls of the kernel in forward and in backward passes, whose gradients are those of one
    process.
    """
    num_put, put = [], OffloadedLayer.put

    def counting(layer, tensor):
        num_put.append(1)
        return put(layer, tensor)

    with (
        installed(KERNEL) as calls,
        mock.patch.object(OffloadedLayer, "put", counting),
        engine_uses(KERNEL),
        mock.patch.object(token_cuts, "LEAST_PART_BYTES", 1),
        mock.patch("torch.compile", functools.partial(torch.compile, backend="aot_eager")),
    ):
        assert_parity(check_gradients(family, strategies, hydra, overrides))
    assert bool(num_put) == any("offload" in text for text in strategies)
    passes = [call["pass"] for call in calls[KERNEL]]
    return passes.count("forward"), passes.count("backward")


RUNS = {
    "options": (2, "llama", ("2x<1,1;ckpt=2>", "1x<2,1;ckpt=1>", "1x<1,2;ckpt=3>", "2x<1,1;gather;ckpt=2>"), {}),
    "offloaded": (
        2, "llama",
        ("2x<1,1;ckpt=2;offload>", "1x<2,1;ckpt=4;offload>", "1x<1,2;ckpt=3;offload>", "2x<1,1;gather;ckpt=4;offload>",
         "1x<sp2,1;ckpt=4;offload>", "1x<cp2,1;ckpt=4;offload;gather>"), {},
    ),
    "cut": (2, "llama", ("1x<sp2,1;ckpt=1>", "1x<cp2,1;ckpt=1>", "1x<cp2,1;gather;ckpt=2>"), {}),
    "both cuts": (4, "llama", ("1x<sp2,cp2,1;ckpt=2>", "1x<cp2,sp2,1;ckpt=1>"), {}),
    "compiled": (1, "llama", ("1x<1,1;ckpt=2>",), {"compile_layers": True}),
    "experts": (2, "mixtral", ("1x<2,1;ckpt=2>", "1x<cp2,1;ckpt=1>"), {}),
    "padded heads": (2, "deepseek_v3", ("1x<1,1;ckpt=2>", "1x<sp2,1;ckpt=2>"), {}),
    "sinks": (2, "gpt_oss", ("1x<1,1;ckpt=2>", "1x<sp2,1;ckpt=1>"), {}),
}  # fmt: skip
MARKS = {"options": (), "offloaded": pytest.mark.slow}
"""Of others gradients are rows of the parity table, whose attention is another one."""


@pytest.mark.distributed
@pytest.mark.parametrize(
    "run", [pytest.param(r, marks=MARKS.get(r, pytest.mark.nightly)) for r in RUNS]
)
def test_attention_of_a_checkpointed_layer_runs_once(run):
    size, family, strategies, hydra = RUNS[run]
    found = run_distributed(check_engine, size, family, strategies, hydra, timeout_s=600)
    for num_forward, num_backward in found:
        assert num_forward == num_backward > 0


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("strategies", "hydra"),
    [
        pytest.param(
            ("1x<2,1>", "1x<cp2,1>"), {"activation_checkpointing": True}, marks=pytest.mark.slow
        ),
        (("1x<2,1;ckpt=4>",), {}),
    ],
)
def test_attention_runs_again_where_all_layers_are_checkpointed(strategies, hydra):
    """They are so for memory."""
    found = run_distributed(check_engine, 2, "llama", strategies, hydra, timeout_s=600)
    for num_forward, num_backward in found:
        assert num_forward == 2 * num_backward > 0


@pytest.mark.parametrize("is_trained", [True, False])
def test_what_attention_has_returned_lives_as_long_as_it_is_needed(is_trained):
    """And attention whose inputs need no gradient runs again, for nothing else keeps its output."""
    boundaries = (*2 * [torch.tensor([0, 5, 9], dtype=torch.int32)], count_on_host([5, 4], [5, 4]))
    heads = torch.randn(3, 9, 2, 8, requires_grad=is_trained)
    weight = torch.ones(8, requires_grad=True)
    kept = []

    def layer(heads, weight):
        return attend(KernelUse(KERNEL, 8, 8), heads.unbind(), boundaries, Scoring(0.3)) * weight

    def run_once(run, *, keeps, once=recomputation.run_once):
        outputs = once(run, keeps=keeps)
        kept.extend(StorageWeakRef(one.untyped_storage()) for one in outputs)
        return outputs

    def run():
        options = {"use_reentrant": False, "context_fn": recomputation.contexts}
        return checkpoint(layer, heads, weight, **options).square().sum()

    gc.disable()  # nothing waits for it
    try:
        with installed(KERNEL) as calls, mock.patch.object(recomputation, "run_once", run_once):
            loss = run()
            assert [one.expired() for one in kept] == [not is_trained] * 2
            del loss
            assert all(one.expired() for one in kept)
            kept.clear()
            calls[KERNEL].clear()
            run().backward()
            assert all(one.expired() for one in kept)
            passes = [call["pass"] for call in calls[KERNEL]]
    finally:
        gc.enable()
    assert passes == (["forward", "backward"] if is_trained else ["forward", "forward"])
    wanted = (heads.grad, weight.grad)
    heads.grad = weight.grad = None
    with installed(KERNEL):
        layer(heads, weight).square().sum().backward()
    torch.testing.assert_close((heads.grad, weight.grad), wanted, rtol=0, atol=0)
