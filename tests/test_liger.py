"""Models that Liger has patched train with the gradients of one process that runs transformers' own
layers; its Triton kernels run in Triton's interpreter.
"""

from __future__ import annotations

import logging

import pytest
import test_engine_parity
import torch
import triton_interpreter
from distributed import run_distributed
from models import tiny
from test_engine_parity import assert_parity, check_gradients

from ds_hydra.engine.model import liger
from ds_hydra.errors import HydraConfigError, UnsupportedModelError

pytest.importorskip("liger_kernel", reason="needs liger-kernel")

STRATEGIES = (
    "2x<1,1>", "1x<2,1>", "1x<1,2>", "1x<sp2,1>", "2x<1,1;gather>", "1x<2,1;ckpt=1;gather>",
)  # fmt: skip
LENGTHS = (4, 2, 3)


def patch(model):
    from liger_kernel.transformers import _apply_liger_kernel_to_instance

    _apply_liger_kernel_to_instance(model=model)
    return model


def check_patched(family, strategies=STRATEGIES, hydra=None):
    """Also how many of Liger's kernels the engine has called, and what it has said."""
    triton_interpreter.use()
    from liger_kernel.ops import LigerFusedMoEFunction, LigerSiLUMulFunction, rms_norm, rope
    from liger_kernel.transformers.monkey_patch import _apply_liger_kernel

    calls = dict.fromkeys(("rms_norm", "rope", "mlp"), 0)

    def counting(name, function):
        def counted(*args, **kwargs):
            calls[name] += 1
            return function(*args, **kwargs)

        return counted

    rms_norm.rms_norm_forward = counting("rms_norm", rms_norm.rms_norm_forward)
    rope.rope_forward = counting("rope", rope.rope_forward)
    mlp = LigerFusedMoEFunction if family == "mixtral" else LigerSiLUMulFunction
    mlp.forward = counting("mlp", mlp.forward)
    said = []
    liger.logger.warning = lambda text, *args: said.append(text % args)
    gradients_of = test_engine_parity.token_mean_gradients

    def without_liger(reference, examples):
        """Gradients of the unpatched model; then the engine's is patched."""
        wanted = gradients_of(reference, examples)
        if family == "qwen3":  # as AutoLigerKernelForCausalLM does
            _apply_liger_kernel(family)
            model.__dict__.update(tiny(family, num_hidden_layers=2).__dict__)
        else:
            patch(model)
        calls.update(dict.fromkeys(calls, 0))
        return wanted

    test_engine_parity.token_mean_gradients = without_liger
    model = tiny(family, num_hidden_layers=2)
    return check_gradients(model, strategies, hydra, lengths=LENGTHS), calls, said


@pytest.mark.distributed
@pytest.mark.parametrize(
    "family",
    [
        pytest.param("llama", marks=pytest.mark.nightly),
        pytest.param("qwen3", marks=pytest.mark.nightly),
        pytest.param("mixtral", marks=pytest.mark.nightly),  # minutes of products by numpy
    ],
)
def test_models_of_liger_have_the_gradients_of_one_process(family):
    (worst, calls, said), (_, _, other) = run_distributed(check_patched, 2, family)
    assert_parity(worst)
    assert len(worst) > len(STRATEGIES) - 1
    assert min(calls.values()) > 0, calls
    assert [len(said), len(other)] == [1, 0]
    assert "fused linear cross-entropy, in whose place" in said[0]


def check_compiled():
    """Also the graphs that torch has compiled."""
    counted = torch._dynamo.utils.counters["stats"]
    before = counted["unique_graphs"]  # of tests before, in the process that was forked
    found = check_patched("llama", ("1x<1,1>",), {"compile_layers": True})
    return *found, counted["unique_graphs"] - before


@pytest.mark.distributed
def test_layers_of_liger_are_not_compiled():
    ((worst, calls, said, graphs),) = run_distributed(check_compiled, 1)
    assert_parity(worst)
    assert min(calls.values()) > 0, calls
    assert graphs == 0
    assert any("so hydra.compile_layers has no effect" in text for text in said)


def check_trainer(folder):
    """Losses of two iterations of HydraTrainer with transformers' layers and with Liger's."""
    triton_interpreter.use()
    import test_trainer

    import ds_hydra

    data = test_trainer.prepare(folder)
    losses, models = [], []
    for settings in (
        {},
        {"use_liger_kernel": True, "liger_kernel_config": {"rope": False, "swiglu": True}},
    ):
        args = test_trainer.training_arguments(
            folder, folder, hydra={"strategies": ["1x<1,1>"]}, max_steps=2, **settings
        )
        model = test_trainer.small_model()
        trainer = ds_hydra.HydraTrainer(model=model, args=args, train_dataset=data)
        trainer.train()
        losses.append([x["loss"] for x in trainer.state.log_history if "loss" in x])
        models.append(liger.is_patched(model))
    from transformers.models.llama import modeling_llama

    return losses, models, liger.is_of_liger(modeling_llama.apply_rotary_pos_emb)


@pytest.mark.distributed
def test_use_liger_kernel_of_training_arguments(tmp_path):
    ((plain, fused), models, has_rope), *_ = run_distributed(check_trainer, 1, str(tmp_path))
    assert len(plain) == 2
    torch.testing.assert_close(torch.tensor(fused), torch.tensor(plain), rtol=1e-4, atol=0)
    assert models == [False, True]
    assert not has_rope  # as liger_kernel_config says


def test_liger_does_not_know_the_model_or_a_setting():
    with pytest.raises(HydraConfigError, match=r"no kernels for models of type 'gpt2'.*llama"):
        liger.complete_settings(tiny("gpt2"), None)
    with pytest.raises(HydraConfigError, match=r"has 'geglu', which Liger does not take.*swiglu"):
        liger.complete_settings(tiny("llama"), {"geglu": True})
    wanted = {"rope": False, "cross_entropy": False, "fused_linear_cross_entropy": False}
    assert liger.complete_settings(tiny("llama"), {"rope": False}) == wanted


def test_a_patched_model_on_a_cpu_is_refused_by_name(monkeypatch, caplog):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    model = tiny("llama")
    with caplog.at_level(logging.WARNING):
        liger.check_patches(model)
    model.model.norm.forward = liger_method(model.model.norm)
    with pytest.raises(UnsupportedModelError, match="patched by Liger, whose Triton kernels do"):
        liger.check_patches(model)
    assert not caplog.records


def liger_method(module):
    def forward(self, hidden):
        return hidden

    forward.__module__ = "liger_kernel.transformers.rms_norm"
    return forward.__get__(module)
