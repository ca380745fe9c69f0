"""What config.json says of a decoder's layers, beside the models that transformers builds of it and
the parameters that their authors state.
"""

from __future__ import annotations

import json

import pytest
import torch
import transformers
from shared_data import shared_json
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from benchmarks.families import SETTINGS
from ds_hydra.engine.model.decoder_parts import find_text_config
from ds_hydra.errors import HydraConfigError
from ds_hydra.model_config import all_fields, read_config
from ds_hydra.strategy.cost_models.analytic import ModelShape
from ds_hydra.strategy.cost_models.decoder import COMPARED, describe_config, read_decoder
from ds_hydra.strategy.cost_models.flops import ModelFlops

CONFIGS = shared_json("model_configs.json")
STATED = {
    "deepseek-v3": ("671", "37", 1),
    "falcon-h1-7b": ("7.6", None, 2),
    "gemma-3-27b-it": ("27", None, 2),
    "glm-4.5-air": ("106", "12", 0),
    "gpt-neox-20b": ("20.6", None, 2),
    "gpt-oss-120b": ("117", "5.1", 1),
    "granite-4.0-h-small": ("32.2", "8.8", 2),
    "granite-4.0-h-tiny": ("7", "1", 0),
    "kimi-k2": ("1.0e3", "32", 1),
    "llama-3.1-8b": ("8.03", None, 2),
    "llama-3.3-70b": ("70.6", None, 2),
    "minicpm3-4b": ("4.1", None, 2),
    "mistral-small-24b-2501": ("23.6", None, 2),
    "mixtral-8x22b": ("141", "39", 2),
    "nemotron-h-8b": ("8.1", None, 2),
    "olmo-2-32b": ("32.2", None, 2),
    "phi-4": ("14.7", None, 2),
    "qwen2.5-72b": ("72.7", None, 2),
    "qwen3-235b-a22b": ("235", "22", 2),
    "qwen3-30b-a3b": ("30.5", "3.3", 2),
    "qwen3.5-4b": ("4", None, 2),
}
"""Billions of parameters that the authors state, all and those of a token, and how many of
embedding and head the latter have.
"""


def is_as_stated(billions: float, text: str) -> bool:
    """Within 1%, or the stated digits when it is rounded or cut to as many."""
    stated = float(text)
    unit = 100.0 if "e" in text else 10.0 ** -len(text.partition(".")[2])
    return abs(billions / stated - 1) <= 0.01 or stated - unit / 2 <= billions < stated + unit


@pytest.mark.parametrize("name", CONFIGS)
def test_models_have_the_parameters_that_their_authors_state(name, tmp_path):
    path = tmp_path / f"{name}.json"
    path.write_text(json.dumps(CONFIGS[name]))
    decoder = read_decoder(read_config(str(path))[0], name)
    size = decoder.size
    total, active, tables = STATED[name]
    assert is_as_stated(size.total / 1e9, total)
    without = (2 - tables) * size.tables / 2
    if active is None:
        assert size.active == size.total
    else:
        assert is_as_stated((size.active - without) / 1e9, active)


def test_layers_that_do_not_attend_are_not_quadratic():
    """Nemotron-H has 4 layers of 52 with attention, Granite 4 of 40."""
    for name, number, width in (
        ("nemotron-h-8b", 4, 32 * 128),
        ("granite-4.0-h-small", 4, 32 * 128),
    ):
        decoder = read_decoder(CONFIGS[name], name)
        assert decoder.windows == {None: number * width}
        flops = ModelFlops.of_decoder(decoder)
        assert flops.of([2000]) - 2 * flops.of([1000]) == pytest.approx(
            12 * number * width * (2000**2 / 2 - 2 * 1000**2 / 2)
        )
        shape, _ = describe_config(CONFIGS[name], name)
        assert shape.means.attention_width * len(decoder.layers) == pytest.approx(number * width)
    mixer = read_decoder(CONFIGS["nemotron-h-8b"], "x").layers[0]
    assert mixer.state_params == 2 * 128 * 64 * 128
    assert (mixer.mlp_params, mixer.attention_width) == (0, 0)


def test_latent_attention_has_dims_of_its_own():
    """187,105,280 elements a layer of DeepSeek-V3; scores by 192 features, values of 128."""
    layer = read_decoder(CONFIGS["deepseek-v3"], "x").layers[0]
    assert layer.mixer_params == 187_105_280
    assert layer.attention_width == 128 * (192 + 128) / 2
    full = {**CONFIGS["deepseek-v3"], "q_lora_rank": None}
    whole = read_decoder(full, "x").layers[0]
    assert whole.mixer_params - layer.mixer_params == 7168 * 128 * 192 - 1536 * (7168 + 128 * 192)


def test_a_dense_decoder_is_described_by_its_sizes_alone():
    """So that its times stay those of the sizes that a measured profile has."""
    for name in ("llama-3.1-8b", "qwen2.5-72b", "olmo-2-32b"):
        shape, _ = describe_config(CONFIGS[name], name)
        assert shape.layer is None
    shape, _ = describe_config(CONFIGS["gpt-neox-20b"], "x")
    assert shape.means.params == 12 * 6144**2
    assert (
        ModelShape(num_layers=1, hidden_size=8, intermediate_size=16, vocab_size=1).means.params
        == 640
    )


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"layer_types": ["rwkv"] * 32}, "layers of rwkv (layer_types) are counted as attention"),
        ({"lru_width": 64}, "layers that do not attend (lru_width) are counted as attention"),
        ({"num_nextn_predict_layers": 1}, "(num_nextn_predict_layers) are not counted"),
        ({"hidden_size_per_layer_input": 256}, "(hidden_size_per_layer_input) are not counted"),
        ({"model_type": "of_tomorrow"}, "for model_type of_tomorrow that was not compared"),
        ({"intermediate_size": None, "model_type": "new"}, "there is no intermediate_size"),
    ],
)
def test_what_cannot_be_priced_is_said_by_its_field(changes, words):
    decoder = read_decoder({**CONFIGS["llama-3.1-8b"], **changes}, "x")
    assert any(words in sentence for sentence in decoder.unpriced)
    assert read_decoder(CONFIGS["llama-3.1-8b"], "x").unpriced == ()


def test_damaged_sizes_are_errors_that_name_them():
    for name, key in (
        ("deepseek-v3", "kv_lora_rank"),
        ("deepseek-v3", "num_hidden_layers"),
        ("nemotron-h-8b", "ssm_state_size"),
        ("granite-4.0-h-tiny", "mamba_n_heads"),
        ("llama-3.1-8b", "intermediate_size"),
        ("gpt-oss-120b", "num_key_value_heads"),
    ):
        for wrong in ("many", -1, 1 << 40):
            with pytest.raises(HydraConfigError, match=key):
                read_decoder({**CONFIGS[name], key: wrong}, "x")


def built(model_type: str):
    """Configuration of a type by default, and its model without memory."""
    transformers.logging.set_verbosity_error()
    config = transformers.CONFIG_MAPPING[model_type]()
    kind = getattr(transformers, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[model_type])
    if not isinstance(config, kind.config_class):
        config = find_text_config(config)
    if model_type in SETTINGS:
        config = type(config)(**SETTINGS[model_type])
    with torch.device("meta"):
        model = kind(config)
    model.tie_weights()
    return config, model


def is_matrix(name: str, param: torch.nn.Parameter) -> bool:
    return sum(size > 1 for size in param.shape) > 1 and not name.endswith("bias")


KINDS = (
    "llama", "gpt_neox", "gpt2", "falcon", "deepseek_v3", "minicpm3", "qwen3_next", "nemotron_h", "granitemoehybrid",
    "falcon_h1", "jamba", "kimi_linear", "lfm2", "minimax", "gpt_oss", "llama4_text", "hunyuan_v1_moe",
)  # fmt: skip
"""One of each kind of layer."""


def check_against_the_model(model_type: str) -> None:
    config, model = built(model_type)
    matrices = sum(p.numel() for name, p in model.named_parameters() if is_matrix(name, p))
    decoder = read_decoder(all_fields(config), model_type)
    assert decoder.params == pytest.approx(matrices, rel=5e-3)
    routed = sum(
        p.numel() for name, p in model.named_parameters() if p.ndim == 3 and "experts" in name
    )
    assert sum(x.expert_params for x in decoder.layers) == pytest.approx(routed)


@pytest.mark.parametrize("model_type", KINDS)
def test_kinds_of_layers_have_the_parameters_of_the_model_that_is_built(model_type):
    check_against_the_model(model_type)


@pytest.mark.nightly
@pytest.mark.parametrize("model_type", sorted(COMPARED - set(KINDS)))
def test_every_type_that_is_called_compared_is(model_type):
    check_against_the_model(model_type)
