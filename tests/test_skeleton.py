"""Which models and schemes are accepted, and what is said of the others; no rank is started."""

from __future__ import annotations

import pytest
import transformers
from models import FAMILIES, tiny

from ds_hydra.engine.skeleton import Skeleton
from ds_hydra.errors import HydraConfigError, UnsupportedModelError
from ds_hydra.strategy import Scheme

SIZES = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 97,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def test_skeleton_holds_no_parameter_memory_and_leaves_the_model_alone():
    model = tiny("llama")
    implementation = model.config._attn_implementation
    skeleton = Skeleton(model)
    assert all(b.module._parameters[b.attribute].is_meta for unit in skeleton.units for b in unit.bindings)
    assert not any(p.is_meta for p in model.parameters())
    assert model.config._attn_implementation == implementation


@pytest.mark.parametrize("family", list(FAMILIES))
def test_every_parameter_is_in_a_unit_and_stages_partition_the_layers(family):
    skeleton = Skeleton(tiny(family))
    covered = {b.param for unit in skeleton.units for b in unit.bindings}
    assert covered == set(range(len(skeleton.specs)))
    for num_stages in (1, 2, 3, 4):
        layers = [
            i for stage in range(num_stages) for i in skeleton.stage_layers(Scheme(1, num_stages), stage)
        ]
        assert layers == list(range(skeleton.num_layers))
        sizes = [len(skeleton.stage_layers(Scheme(1, num_stages), stage)) for stage in range(num_stages)]
        assert max(sizes) - min(sizes) <= 1


def test_parameters_that_the_tp_plan_does_not_mention_refuse_tp():
    model = transformers.ApertusForCausalLM(transformers.ApertusConfig(**SIZES)).float()
    skeleton = Skeleton(model)
    skeleton.check_scheme(Scheme(1, 2))
    with pytest.raises(UnsupportedModelError, match=r"<2,1>.*act_fn.*use TP 1"):
        skeleton.check_scheme(Scheme(2, 1))


def test_styles_that_are_not_run_refuse_tp_by_name():
    with pytest.raises(
        UnsupportedModelError,
        match=r"fused weights: layers.*self_attn.qkv_proj \(colwise_g.*use TP 1",
    ):
        Skeleton(tiny("phi3")).check_scheme(Scheme(2, 1))


def test_attention_sinks_are_refused_at_the_start():
    config = transformers.GraniteSWAConfig(**SIZES) if hasattr(transformers, "GraniteSWAConfig") else None
    if config is None:
        pytest.skip("this transformers has no dense model with attention sinks")
    with pytest.raises(UnsupportedModelError, match="sinks"):
        Skeleton(transformers.GraniteSWAForCausalLM(config))


@pytest.mark.parametrize(
    ("scheme", "words"),
    [
        (Scheme(3, 1), "TP 3 does not divide the model's 4 attention heads; use TP 1, 2, 4"),
        (
            Scheme(1, 1, sp=3),
            r"<sp3,1>: SP 3 x TP 1 = 3 does not divide the model's 4 .*heads; use SP 1, 2, 4 with TP 1",
        ),
        (
            Scheme(2, 1, sp=4),
            r"<sp4,2,1>: SP 4 x TP 2 = 8 does not divide .*4 attention heads; use SP 1, 2 with TP 2",
        ),
        (Scheme(3, 1, sp=2), "TP 3 does not divide"),
        (
            Scheme(1, 2, repull=3),
            r"<1,2;repull=3>: no stage has more than the 2 layers .*nothing would be pulled",
        ),
        (Scheme(1, 5), "PP 5 is above the model's 4 layers; use PP 4 or less"),
    ],
)
def test_degrees_that_do_not_fit_are_refused_with_those_that_do(scheme, words):
    with pytest.raises(HydraConfigError, match=words):
        Skeleton(tiny("llama")).check_scheme(scheme)


def test_checkpointing_that_the_user_switched_on_stays_on_and_refuses_ckpt():
    model = tiny("llama")
    model.gradient_checkpointing_enable({"use_reentrant": False})
    skeleton = Skeleton(model)
    skeleton.bind(Scheme(1, 1), 0, skeleton._meta_params, lambda index: None)
    assert all(layer.gradient_checkpointing for layer in skeleton._layers)
    with pytest.raises(HydraConfigError, match=r"<1,1;ckpt=2>: .*the model's own gradient checkpointing"):
        skeleton.check_scheme(Scheme(1, 1, ckpt=2))


def test_key_value_heads_and_tp_must_divide_each_other():
    model = tiny("llama", num_attention_heads=6, num_key_value_heads=2, hidden_size=48)
    with pytest.raises(HydraConfigError, match=r"TP 3 and the model's 2 key-value heads.*use TP 1, 2, 6"):
        Skeleton(model).check_scheme(Scheme(3, 1))


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4},
        {
            "rope_type": "longrope",
            "rope_theta": 1e4,
            "short_factor": [1.0] * 4,
            "long_factor": [2.0] * 4,
            "original_max_position_embeddings": 8,
        },
    ],
)
def test_rotary_embeddings_that_follow_the_longest_position_refuse_sp(rope):
    skeleton = Skeleton(tiny("llama", rope_parameters=rope))
    skeleton.check_scheme(Scheme(2, 2))
    with pytest.raises(
        UnsupportedModelError, match=rf"<sp2,1>.*rotary embeddings of type '{rope['rope_type']}'.*SP 1"
    ):
        skeleton.check_scheme(Scheme(1, 1, sp=2))
    Skeleton(tiny("gemma3")).check_scheme(Scheme(1, 1, sp=2))  # two types of layers, both fixed
