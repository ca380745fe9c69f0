"""Mixtures of experts with TP 1: gradients of one process, and what is refused."""

import pytest
from distributed import run_distributed
from models import MIXTURES_OF_EXPERTS, tiny
from test_engine_parity import assert_parity, check_gradients

from ds_hydra.configs.hydra_config import HydraConfig
from ds_hydra.engine.checks.estimate import estimate_profile, load_hardware
from ds_hydra.engine.model.packing_probe import check_packing
from ds_hydra.engine.model.stage_model import StageModel
from ds_hydra.errors import HydraConfigError, UnsupportedModelError
from ds_hydra.strategy import Scheme

CONFIG = HydraConfig(context_length=64, tokens_per_iteration=64)

STRATEGIES = (
    "4x<1,1>",
    "1x<1,4>",
    "1x<1,2> + 1x<sp2,1>",
    "1x<1,2;stream> + 2x<1,1;stream=1>",
    "2x<1,1;ckpt=2>",
)
"""Without TP; the last one leaves two ranks idle."""


def of_every_family():
    return {
        (family, *case): found
        for family in MIXTURES_OF_EXPERTS
        for case, found in check_gradients(family, STRATEGIES).items()
    }


@pytest.mark.slow
@pytest.mark.distributed
def test_gradients_equal_one_process():
    assert_parity(run_distributed(of_every_family, 4)[0])


@pytest.mark.parametrize("family", MIXTURES_OF_EXPERTS)
def test_the_probe_lets_them_pass_and_tp_is_refused_by_name(family):
    model = tiny(family)
    check_packing(model)
    with pytest.raises(UnsupportedModelError, match=r"styles that ds_hydra does not run.*use TP 1"):
        StageModel(model).check_scheme(Scheme(2, 1))


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
