"""Training runs the user's own modules: hooks and values that are set later, evaluation and
generation between iterations, and what an error leaves.
"""

from __future__ import annotations

import copy
from unittest import mock

import pytest
import torch
from distributed import run_distributed
from engines import start_hydra
from models import VOCAB_SIZE, tiny
from single_process import random_examples
from test_engine_parity import LENGTHS, assert_parity, hand_plan, run_alone, worst_errors

STRATEGIES = ("1x<2,1>", "1x<1,2>", "1x<1,1;ckpt=2> + 1x<1,1>", "2x<1,1;gather>")


def twice(_module, _args, output):
    return 2 * output


def changed_later():
    """Gradients, DeepSpeed's forward and generation are the reference's after each change of model
    and reference.
    """
    model = tiny("llama")
    reference = copy.deepcopy(model)
    engine, both = start_hydra(model), (model, reference)
    examples = random_examples(LENGTHS, VOCAB_SIZE, seed=1)
    ids = torch.arange(3, 20).view(1, -1)
    how = {"max_new_tokens": 4, "do_sample": False, "synced_gpus": True}

    def compare():
        engine.eval()
        with torch.no_grad():
            mine, theirs = (
                one(input_ids=ids, use_cache=False).logits for one in (engine, reference)
            )
            torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-5)
            assert torch.equal(engine.module.generate(ids, **how), reference.generate(ids, **how))
        engine.train()
        wanted = run_alone(reference, examples)
        plans = {text: hand_plan(text, examples) for text in STRATEGIES}
        assert_parity(
            {t: worst_errors(engine, plan, examples, *wanted) for t, plan in plans.items()}
        )

    compare()
    for one in both:
        one.model.layers[1].mlp.register_forward_hook(twice)
    handles = [m.model.layers[0].self_attn.o_proj.register_forward_hook(twice) for m in both]
    compare()
    for handle in handles:
        handle.remove()
    for one in both:
        one.model.layers[3].mlp.act_fn.forward = lambda x: x  # closes over nothing
        one.model.norm.variance_epsilon = 0.1
    compare()
    seen = []
    handle = model.model.layers[2].register_forward_pre_hook(lambda _, args: seen.append(1))
    compare()
    handle.remove()
    assert seen
    seen.clear()
    compare()
    assert not seen


@pytest.mark.distributed
def test_what_is_set_later_is_trained_and_evaluated():
    run_distributed(changed_later, 2, timeout_s=600)


def failing():
    """An error in a pass gives the modules back; DeepSpeed's backward hooks, which blocks of
    experts have, too, are out while passes run.
    """
    model = tiny("mixtral")
    engine = start_hydra(model)
    held = {name: module._parameters for name, module in model.named_modules()}
    hooks = {name: [*module._forward_hooks] for name, module in model.named_modules()}
    examples = random_examples([5, 9], VOCAB_SIZE)
    forward = engine.propagator.stage_model.forward_stage
    with (
        mock.patch.object(
            engine.propagator.stage_model, "forward_stage", side_effect=ValueError("no")
        ),
        pytest.raises(ValueError, match="no"),
    ):
        engine.train_batch(examples, strategy="1x<1,1>")
    assert all(module._parameters is held[name] for name, module in model.named_modules())
    assert hooks == {name: [*module._forward_hooks] for name, module in model.named_modules()}
    assert all(hasattr(param, "ds_tensor") for param in model.parameters())
    assert engine.propagator.stage_model.forward_stage == forward
    assert 0 < float(engine.train_batch(examples, strategy="1x<1,1>")) < 20
    engine.destroy()
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


@pytest.mark.distributed
def test_an_error_in_a_pass_gives_the_modules_back():
    run_distributed(failing, 1)
