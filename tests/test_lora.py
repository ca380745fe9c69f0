"""LoRA adapters of peft: gradients equal one process, only adapters train, what cannot run is
refused by name.
"""

from __future__ import annotations

import copy
import functools

import deepspeed
import pytest
import torch
import torch.distributed as dist
from distributed import run_distributed
from engines import ds_config, refused, start_hydra
from models import VOCAB_SIZE, tiny
from single_process import num_label_tokens, random_examples, summed_loss
from test_engine_parity import assert_parity, hand_plan, run_alone, worst_errors

import ds_hydra
from ds_hydra.engine.model.adapters import unwrap_adapters, with_resting_adapters
from ds_hydra.engine.model.stage_model import StageModel
from ds_hydra.errors import UnsupportedModelError
from ds_hydra.zero_link.layout import Slicing

peft = pytest.importorskip("peft", reason="the extra ds_hydra[peft] is not installed")

STRATEGIES = (
    "4x<1,1>",
    "1x<4,1>",
    "1x<1,2> + 1x<2,1>",
    "1x<sp2,2,1>",
    "1x<cp2,2,1>",
    "1x<sp2,1;gather> + 1x<2,1;gather>",
    "1x<sp2,2,1;gather>",
    "1x<2,2>",
)


def adapted(family="llama", **settings):
    """A tiny model with adapters whose B is not zero, so that A has a gradient."""
    return with_adapters(tiny(family), **settings)


def with_adapters(model, **settings):
    """`model` with adapters whose B is not zero."""
    settings = {"r": 4, "target_modules": "all-linear", **settings}
    torch.manual_seed(1)
    model = peft.get_peft_model(model, peft.LoraConfig(**settings))
    for name, param in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(param, std=0.1)
    return model


def errors_of(engine, examples, strategies, wanted):
    """The largest error of a gradient, its name, and the error of the loss, of each strategy."""
    return {s: worst_errors(engine, hand_plan(s, examples), examples, *wanted) for s in strategies}


def errors_under(model, strategies):
    """The engine, and its errors under each strategy."""
    examples = random_examples(LENGTHS, VOCAB_SIZE)
    wanted = run_alone(copy.deepcopy(model), examples)
    engine = start_hydra(model)
    return engine, errors_of(engine, examples, strategies, wanted)


LENGTHS = (5, 30, 12, 7, 90, 3)
SAVED = {
    "llama": ["embed_tokens", "lm_head"],
    "llama_tied": ["embed_tokens"],
    "qwen3": ["norm", "input_layernorm", "down_proj"],
}
SOME = ("1x<4,1>", "1x<1,2> + 1x<2,1>", "1x<sp2,1;gather> + 1x<2,1;gather>")


def saved_modules(family):
    """`modules_to_save` train, whose states alone the optimizer has, and what they stand for does
    not.
    """
    model = adapted(family, target_modules=["q_proj", "v_proj"], modules_to_save=SAVED[family])
    names = [name for name, p in model.named_parameters() if p.requires_grad]
    assert sum("modules_to_save" in name for name in names) >= len(SAVED[family])
    engine, errors = errors_under(model, SOME)
    assert_parity(errors)
    num_states = sum(group.numel() for group in engine.optimizer.fp32_partitioned_groups_flat)
    assert num_states == sum(p.ds_tensor.numel() for p in model.parameters() if p.requires_grad)
    examples = random_examples(LENGTHS, VOCAB_SIZE)
    before = {name: p.ds_tensor.clone() for name, p in model.named_parameters()}
    engine.train_batch(examples, strategy="2x<2,1>")
    said = "is in modules_to_save, and training runs what adapter 'default' had"
    with pytest.raises(UnsupportedModelError, match=said), model.disable_adapter():
        engine.eval_batch(examples)
    after = {name: p.ds_tensor for name, p in model.named_parameters()}
    return {name for name in after if not torch.equal(after[name], before[name])}, names


@pytest.mark.distributed
@pytest.mark.parametrize(
    "family",
    ["llama", *(pytest.param(f, marks=pytest.mark.nightly) for f in ("llama_tied", "qwen3"))],
)
def test_modules_to_save_train_and_what_they_stand_for_does_not(family):
    changed, trained = zip(*run_distributed(saved_modules, 4, family), strict=True)
    assert set().union(*changed) == {*trained[0]}


def test_modules_that_are_saved_are_the_only_ones_that_are_pulled():
    model = adapted("llama", target_modules=["q_proj"], modules_to_save=["embed_tokens", "lm_head"])
    stage_model = StageModel(model)
    fqns = {spec.fqn for spec in stage_model.specs}
    assert "model.embed_tokens.modules_to_save.default.weight" in fqns
    assert not any("original_module" in fqn for fqn in fqns)
    assert len(stage_model.params) == len(list(model.parameters())) - 2


def later_states():
    """Losses with adapters off, on again, scaled anew and of the second adapter are one process's;
    a module that one rank replaces is named.
    """
    examples = random_examples([5, 30, 12, 7], VOCAB_SIZE)
    model = adapted()
    model.add_adapter("second", peft.LoraConfig(r=2, target_modules=["q_proj"]))
    torch.nn.init.normal_(
        model.base_model.model.model.layers[0].self_attn.q_proj.lora_B.second.weight
    )
    reference = copy.deepcopy(model)
    engine = start_hydra(model)
    losses = []

    def compare():
        with torch.no_grad():
            summed = sum(float(summed_loss(reference, example)) for example in examples)
        wanted = summed / num_label_tokens(examples)
        losses.append(round(wanted, 4))
        for strategy in ("2x<1,1>", "1x<2,1>"):
            found = float(engine.eval_batch(examples, strategy=strategy))
            assert found == pytest.approx(wanted, rel=1e-5)

    compare()
    with model.disable_adapter(), reference.disable_adapter():
        compare()
    compare()
    for one in (model, reference):
        one.base_model.model.model.layers[1].mlp.down_proj.scaling["default"] *= 3
    compare()
    for one in (model, reference):
        one.set_adapter("second")
    compare()
    mlp = model.base_model.model.model.layers[1].mlp
    plain = mlp.act_fn
    if dist.get_rank() == 1:  # the other rank hears of it
        mlp.act_fn = torch.nn.Identity()
    evaluate = functools.partial(engine.eval_batch, examples, strategy="2x<1,1>")
    named = "model.layers.1.mlp has other modules than at the start"
    assert named in refused(evaluate, UnsupportedModelError)
    mlp.act_fn = plain
    compare()
    assert len({*losses}) == 4


@pytest.mark.distributed
def test_state_set_after_the_start_is_taken_over_or_refused():
    run_distributed(later_states, 2)


def of_whole_features():
    """Errors where the tp plan gathers or splits features, and of latent attention."""
    families = ("glm4", "phi3", "olmo3", "minicpm3")
    return {family: errors_under(adapted(family), ("1x<2,1>",))[1] for family in families}


@pytest.mark.slow
@pytest.mark.distributed
def test_adapters_of_linears_with_whole_features_outside_equal_one_process():
    for errors in run_distributed(of_whole_features, 2)[0].values():
        assert_parity(errors)


def test_adapters_of_experts_are_refused_with_advice_that_works():
    with pytest.raises(UnsupportedModelError, match=r"target_modules=\['q_proj', 'v_proj'\]"):
        StageModel(adapted("mixtral"))
    StageModel(adapted("mixtral", target_modules=["q_proj", "v_proj"]))


def test_slices_of_an_adapter_follow_its_layer():
    stage_model = StageModel(adapted("llama_bias", lora_bias=True))
    rules = {
        spec.fqn.removeprefix("model.layers.0.").replace(".default", ""): (
            spec.slicing,
            spec.num_blocks,
        )
        for spec in stage_model.specs
    }
    assert rules["self_attn.k_proj.base_layer.weight"] == (Slicing.COLWISE, 2)
    assert rules["self_attn.k_proj.lora_A.weight"] == (Slicing.REPLICATED_PARTIAL_GRAD, 0)
    assert rules["self_attn.k_proj.lora_B.weight"] == (Slicing.COLWISE, 2)
    assert rules["mlp.down_proj.base_layer.bias"] == (Slicing.FIRST_RANK, 0)
    assert rules["mlp.down_proj.lora_A.weight"] == (Slicing.ROWWISE, 0)
    assert rules["mlp.down_proj.lora_B.weight"] == (Slicing.REPLICATED_PARTIAL_GRAD, 0)
    assert rules["mlp.down_proj.lora_B.bias"] == (Slicing.FIRST_RANK, 0)
    assert {spec.fqn for spec in stage_model.specs if spec.requires_grad} == {
        spec.fqn for spec in stage_model.specs if "lora_" in spec.fqn
    }


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"use_dora": True}, "Dora.* is not supported; use plain LoRA"),
        (
            {"trainable_token_indices": [3, 4]},
            r"embed_tokens: TrainableTokensWrapper .*modules_to_save=\['embed_tokens'\]",
        ),
        ({"target_modules": ["lm_head"]}, "adapter at the output head"),
        (
            {"target_modules": ["embed_tokens"]},
            r"Embedding on a Embedding is not supported; set target_modules",
        ),
    ],
)
def test_adapters_that_cannot_train_are_refused(settings, message):
    with pytest.raises(UnsupportedModelError, match=message):
        StageModel(adapted(**settings))


def merged():
    model = adapted()
    model.merge_adapter()
    return model


PREFIX = peft.PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)
LORA = peft.LoraConfig(target_modules=["q_proj"])
WRAPPED = r"without mixed=True; model\.add_adapter"


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: peft.get_peft_model(tiny("llama"), PREFIX), "adapter 'default' is of the PEFT type PREFIX_TUNING"),
        (merged, r"merged into the weights; call model\.unmerge_adapter"),
        (lambda: peft.get_peft_model(tiny("llama"), LORA, mixed=True), WRAPPED),
        (lambda: peft.get_peft_model(tiny("llama"), LORA).base_model, WRAPPED),
        (lambda: peft.PeftModel(peft.get_peft_model(tiny("llama"), LORA), LORA), WRAPPED),
    ],
)  # fmt: skip
def test_other_kinds_of_adapters_are_refused(make, message):
    with pytest.raises(UnsupportedModelError, match=message):
        unwrap_adapters(make())


def merged_weights():
    """What is said of merging weights in shards, with an engine and after it; the worst error of
    those that are merged as that says; what is said of a LoRA-FA optimizer.
    """
    from peft.optimizers import create_lorafa_optimizer

    model = adapted(target_modules=["q_proj"])
    b = model.base_model.model.model.layers[0].self_attn.q_proj.lora_B.default.weight
    b.data = b.data.t().contiguous().t()  # as add_weighted_adapter leaves it
    engine = start_hydra(model)
    engine.train_batch(random_examples(LENGTHS, VOCAB_SIZE))
    said = [refused(model.merge_and_unload), refused(model.merge_adapter)]
    engine.destroy()
    said.append(refused(model.merge_and_unload))
    layer = model.base_model.model.model.layers[0].self_attn.q_proj
    with deepspeed.zero.GatheredParameters([*model.parameters()]):
        product = (
            layer.lora_B.default.weight @ layer.lora_A.default.weight * layer.scaling["default"]
        )
        wanted = (layer.base_layer.weight + product).clone()
        merged = model.merge_and_unload().model.layers[0].self_attn.q_proj.weight
        error = float((merged - wanted).abs().max() / product.abs().max())
    model = adapted(target_modules=["q_proj"])
    optimizer = create_lorafa_optimizer(model, r=4, lora_alpha=8, lr=1e-3)
    start = functools.partial(ds_hydra.initialize, model=model, config=ds_config(hydra={}))
    said.append(refused(functools.partial(start, optimizer=optimizer)))
    return said, error


@pytest.mark.distributed
def test_weights_in_shards_are_not_merged_to_nothing():
    for said, error in run_distributed(merged_weights, 2):
        assert all("trainer.save_model" in text for text in said[:3])
        assert "LoraFAOptimizer looks for the matrices" in said[3]
        assert error < 1e-5


def test_adapters_that_rest_count_as_trained_while_weights_are_saved():
    config = peft.LoraConfig(target_modules=["q_proj"], modules_to_save=["lm_head"])
    model = peft.get_peft_model(tiny("llama"), config)
    model.add_adapter("weight", peft.LoraConfig(target_modules=["q_proj"]))

    def trained():
        return {name for name, param in model.named_parameters() if param.requires_grad}

    before = trained()
    with with_resting_adapters(model):
        more = trained() - before
    assert more
    assert all(".lora_A.weight.weight" in name or ".lora_B.weight.weight" in name for name in more)
    assert trained() == before
    model.set_adapter("weight")
    with with_resting_adapters(model):
        assert before < trained()
        assert not any("embed_tokens" in name for name in trained())
