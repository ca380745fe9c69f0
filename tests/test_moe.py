"""Mixtures of experts: gradients of one process, and what is refused."""

import pytest
from distributed import run_distributed
from models import MIXTURES_OF_EXPERTS, tiny
from test_engine_parity import assert_parity, check_gradients

from ds_hydra.configs.hydra_config import HydraConfig
from ds_hydra.engine.checks.config_check import estimate_profile, load_hardware
from ds_hydra.engine.model.packing_probe import check_packing
from ds_hydra.engine.model.stage_model import StageModel
from ds_hydra.errors import HydraConfigError, UnsupportedModelError
from ds_hydra.strategy import Scheme

CONFIG = HydraConfig(context_length=64, tokens_per_iteration=64)

STRATEGIES = (
    "4x<1,1>",
    "2x<2,1>",
    "1x<4,1>",
    "1x<2,2>",
    "1x<1,2> + 1x<sp2,1>",
    "1x<sp2,2,1>",
    "1x<1,2;stream> + 2x<1,1;stream=1>",
    "1x<2,1;stream> + 1x<1,2;ckpt=1>",
    "1x<2,1;ckpt=2>",
)
"""The last one leaves two ranks idle."""

WITHOUT_PP = ("4x<1,1>", "1x<4,1>", "1x<sp2,2,1>", "2x<1,1;stream> + 1x<2,1;ckpt=2>")

CUT_MICRO_BATCHES = {"tp_sequence_parallel": True}


def of_every_family():
    return {
        (family, *case): found
        for family in MIXTURES_OF_EXPERTS
        for case, found in check_gradients(
            family, STRATEGIES if tiny(family).config.base_model_pp_plan else WITHOUT_PP
        ).items()
    }


def with_shards_of_micro_batches():
    return {
        (family, *case): found
        for family in ("qwen2_moe", "qwen3_moe")
        for case, found in check_gradients(
            family, ("2x<2,1>", "1x<4,1;stream>", "1x<sp2,2,1>"), hydra=CUT_MICRO_BATCHES
        ).items()
    }


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize("what", [of_every_family, with_shards_of_micro_batches])
def test_gradients_equal_one_process(what):
    assert_parity(run_distributed(what, 4)[0])


@pytest.mark.distributed
def test_experts_under_tp_have_the_gradients_of_one_process():
    assert_parity(run_distributed(check_gradients, 2, "qwen2_moe", ("1x<2,1>", "1x<1,2>"))[0])


@pytest.mark.parametrize("family", MIXTURES_OF_EXPERTS)
def test_the_probe_lets_them_pass(family):
    check_packing(tiny(family))


def test_experts_are_cut_where_grouped_products_allow():
    """24 features of fp32: whole 16 bytes, four features, to a rank."""
    stage_model = StageModel(tiny("qwen3_moe"))
    widths = [
        spec.slice_shape(spec.slice_region(4, rank))
        for spec in stage_model.specs
        if "layers.0.mlp.experts" in spec.fqn
        for rank in range(4)
    ]
    assert widths == [(16, w, 32) for w in (8, 16, 8, 16)] + [(16, 32, w) for w in (4, 8, 4, 8)]
    with pytest.raises(HydraConfigError, match=r"experts.*width 24.*6 parts.*TP 8"):
        StageModel(tiny("qwen3_moe", num_attention_heads=8)).check_scheme(Scheme(8, 1))


def test_attention_that_is_not_cut_sees_whole_micro_batches():
    with pytest.raises(
        UnsupportedModelError, match=r"attention is not cut.*tp_sequence_parallel to false"
    ):
        StageModel(tiny("deepseek_v3"), tp_sequence_parallel=True).check_scheme(Scheme(2, 1))


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe", "deepseek_v3"])
def test_the_roofline_of_dense_layers_is_not_given_for_them(family):
    stage_model = StageModel(tiny(family))
    with pytest.raises(HydraConfigError, match=r"mixture of experts .* = \d+.*ds-hydra profile"):
        estimate_profile(stage_model, load_hardware("a800"), 8, CONFIG, name="estimate")


@pytest.mark.parametrize(
    ("family", "setting", "value", "message"),
    [
        (
            "qwen3_moe",
            "output_router_logits",
            True,
            "output_router_logits is true.*set .* to false",
        ),
        ("mixtral", "router_jitter_noise", 0.1, "router_jitter_noise = 0.1.*set it to 0"),
    ],
)
def test_what_would_depend_on_the_strategy_is_refused(family, setting, value, message):
    with pytest.raises(UnsupportedModelError, match=message):
        check_packing(tiny(family, **{setting: value}))
