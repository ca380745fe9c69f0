"""Profiles of models that nobody measured, from a config.json and a description of hardware."""

from __future__ import annotations

import json

import pytest
from test_simulate_command import invoke

from ds_hydra.configs import list_files, load_model_preset
from ds_hydra.errors import HydraConfigError
from ds_hydra.strategy.profiles.memory_model import GRADIENT_BYTES, OPTIMIZER_BYTES
from ds_hydra.strategy.proposal.estimate import describe_model, estimate_from_config
from ds_hydra.strategy.schemes.scheme import Scheme

CONFIG = {
    "model_type": "qwen2", "num_hidden_layers": 4, "hidden_size": 64, "intermediate_size": 160,
    "vocab_size": 1000, "num_attention_heads": 8, "num_key_value_heads": 2,
}  # fmt: skip


def test_a_model_by_hand():
    shape, heads = describe_model(CONFIG, "x")
    assert heads == 8
    assert shape.layer_params == (2 + 2 / 4) * 64**2 + 3 * 64 * 160


def test_every_hardware_runs_a_preset_and_says_what_is_assumed():
    times = {}
    for name in set(list_files("hardware")) - {"cpu"}:
        profile, assumed = estimate_from_config("llama2_7b", name, 8, 16384)
        times[name] = profile.get_latency(Scheme(8, 1)).micro_batch_ms([16384])
        assert any("roofline" in sentence for sentence in assumed)
        fits = profile.max_len_tokens(Scheme(8, 1), 64)
        assert fits > 8192
    assert times["b200"] < times["h100"] < times["a100"] < times["h20"]
    states = profile.document["memory"]["sharded_fraction"]
    assert states == (2 + OPTIMIZER_BYTES) / (4 + OPTIMIZER_BYTES + GRADIENT_BYTES)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"hidden_size": None}, "qwen2 has no hidden_size, so it cannot be described"),
        ({"num_hidden_layers": None, "text_config": {}}, "its text_config may be one"),
        ({"num_experts": 8}, "mixture of experts (num_experts = 8)"),
        ({"is_encoder_decoder": True}, "has an encoder"),
        ({"vocab_size": "many"}, "vocab_size is 'many', expected a whole number"),
        ({"num_key_value_heads": 9}, "num_key_value_heads is 9"),
    ],
)
def test_models_that_cannot_be_described(changes, words):
    with pytest.raises(HydraConfigError) as caught:
        describe_model({**CONFIG, **changes}, "config.json")
    assert words in str(caught.value)


def test_simulate_takes_a_config_json(tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**load_model_preset("llama2_7b"), "num_hidden_layers": 4}))
    options = ["--hardware", "h100", "--devices", 8, "--iterations", 1, "--no-spread"]
    options += ["--systems", "megatron", "--space", "plain"]
    result = invoke("--model", path, *options, "--json")
    assert result.exit_code == 0, result.stderr
    assert json.loads(result.stdout)["num_devices"] == 8
    assert "assumed: context: 32768" in result.stderr
    for wrong, words in (
        (["--model", "llama2_7c", "--hardware", "h100", "--nodes", 1], "did you mean 'llama2_7b'"),
        (["--model", "llama2_7b", "--hardware", "h1000", "--nodes", 1], "did you mean 'h100'"),
        (["--model", "llama2_7b", "--nodes", 1], "--model needs --hardware"),
        (["--model", "llama2_7b", "--hardware", "h100"], "give --nodes or --devices"),
    ):
        assert words in invoke(*wrong).stderr
