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

STRATEGIES = ("2x<1,1>", "1x<2,1>", "1x<1,2>", "1x<1,1;ckpt=2> + 1x<1,1>", "2x<1,1;gather>")


def twice(_module, _args, output):
    return 2 * output


def worst(engine, reference, examples, strategies=STRATEGIES):
    wanted = run_alone(reference, examples)
    plans = {text: hand_plan(text, examples) for text in strategies}
    return {text: worst_errors(engine, plan, examples, *wanted) for text, plan in plans.items()}


def changed_later():
    """Worst errors of gradients after each change of model and reference, and outputs of
    DeepSpeed's forward and of generation beside the reference's.
    """
    model = tiny("llama")
    reference = copy.deepcopy(model)
    engine = start_hydra(model)
    examples = random_examples(LENGTHS, VOCAB_SIZE, seed=1)
    ids = torch.arange(3, 20).view(1, -1)
    errors, outputs, lengths = [], [], []

    def compare():
        engine.eval()
        with torch.no_grad():
            pairs = [one(input_ids=ids, use_cache=False).logits for one in (engine, reference)]
            texts = [
                one.generate(ids, max_new_tokens=4, do_sample=False, synced_gpus=True)
                for one in (engine.module, reference)
            ]
        engine.train()
        outputs.append((float((pairs[0] - pairs[1]).abs().max()), torch.equal(*texts)))
        errors.append(worst(engine, reference, examples))

    compare()
    for one in (model, reference):
        one.model.layers[1].mlp.register_forward_hook(twice)
    both = (model, reference)
    handles = [m.model.layers[0].self_attn.o_proj.register_forward_hook(twice) for m in both]
    compare()
    for handle in handles:
        handle.remove()
    for one in both:
        one.model.layers[3].mlp.act_fn.forward = lambda x: x  # closes over nothing
        one.model.norm.variance_epsilon = 0.1
    compare()
    seen = []
    handle = model.model.layers[2].register_forward_pre_hook(
        lambda module, args: seen.append(args[0].shape)
    )
    compare()
    handle.remove()
    lengths.append(len(seen))
    before = len(seen)
    compare()
    return errors, outputs, lengths[0], len(seen) == before


@pytest.mark.distributed
def test_what_is_set_later_is_trained_and_evaluated():
    for errors, outputs, num_seen, stays in run_distributed(changed_later, 2, timeout_s=600):
        for of_strategy in errors:
            assert_parity(of_strategy)
        assert all(error < 1e-5 and is_same for error, is_same in outputs), outputs
        assert num_seen > 0
        assert stays


def failing():
    model = tiny("llama")
    engine = start_hydra(model)
    held = {name: module._parameters for name, module in model.named_modules()}
    hooks = {name: [*module._forward_hooks] for name, module in model.named_modules()}
    examples = random_examples([5, 9], VOCAB_SIZE)
    forward = engine.hydra.stage_model.forward_stage
    with (
        mock.patch.object(engine.hydra.stage_model, "forward_stage", side_effect=ValueError("no")),
        pytest.raises(ValueError, match="no"),
    ):
        engine.train_batch(examples, strategy="1x<1,1>")
    assert all(module._parameters is held[name] for name, module in model.named_modules())
    assert hooks == {name: [*module._forward_hooks] for name, module in model.named_modules()}
    assert all(hasattr(param, "ds_tensor") for param in model.parameters())
    assert engine.hydra.stage_model.forward_stage == forward
    loss = float(engine.train_batch(examples, strategy="1x<1,1>"))
    engine.destroy()
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
    return loss


@pytest.mark.distributed
def test_an_error_in_a_pass_gives_the_modules_back():
    (loss,) = run_distributed(failing, 1)
    assert loss > 0


def leaf_of_deepspeed():
    """Loss of a step of a mixture of experts, whose blocks DeepSpeed hooks in backward, too."""
    engine = start_hydra(tiny("mixtral"))
    return float(engine.train_batch(random_examples(LENGTHS, VOCAB_SIZE, seed=1), "1x<1,1>"))


@pytest.mark.distributed
def test_backward_hooks_of_deepspeed_are_out_while_passes_run():
    (loss,) = run_distributed(leaf_of_deepspeed, 1)
    assert 0 < loss < 20
