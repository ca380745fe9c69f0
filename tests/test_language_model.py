"""A model that also reads images trains on text: as its own forward, its other parts frozen."""

from __future__ import annotations

import logging

import pytest
import torch
import transformers
from distributed import run_distributed
from models import VOCAB_SIZE
from test_engine_parity import assert_parity, check_gradients

from ds_hydra.engine.model.language_model import freeze_other_parts, language_model_of

TEXT = {
    "hidden_size": 32, "intermediate_size": 72, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "vocab_size": VOCAB_SIZE, "initializer_range": 0.1,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
_ROPE = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]}
_EYES = {"hidden_size": 32, "intermediate_size": 32, "num_heads": 2, "depth": 1}
MODELS = {
    "Gemma3": (
        {"sliding_window": 7},
        {**_EYES, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 28},
    ),
    "Qwen2_5_VL": ({"rope_parameters": _ROPE}, {**_EYES, "out_hidden_size": 32}),
    "Qwen3VL": (
        {"rope_parameters": _ROPE},
        {**_EYES, "out_hidden_size": 32, "deepstack_visual_indexes": [0]},
    ),
}
"""Settings of the text and of the vision part."""


def make(name):
    torch.manual_seed(0)
    text, vision = MODELS[name]
    config = getattr(transformers, f"{name}Config")(
        text_config=TEXT | text, vision_config=vision, tie_word_embeddings=False
    )
    model = getattr(transformers, f"{name}ForConditionalGeneration")(config).float()
    return model.eval()  # Gemma 3 wants to know in training which tokens are of images


def check(name):
    model = make(name)
    worst = check_gradients(model, ("2x<1,1>", "1x<1,2>", "1x<sp2,1>", "2x<1,1;gather>"))
    return worst, [n for n, p in model.named_parameters() if p.requires_grad]


@pytest.mark.distributed
@pytest.mark.parametrize(
    "name",
    [
        pytest.param("Gemma3", marks=pytest.mark.slow),
        pytest.param("Qwen3VL", marks=pytest.mark.slow),
        pytest.param("Qwen2_5_VL", marks=pytest.mark.nightly),  # put together as Qwen3VL
    ],
)
def test_text_trains_the_language_model_as_the_whole_model_does(name):
    worst, trained = run_distributed(check, 2, name)[0]
    assert_parity(worst)
    assert trained
    assert not [n for n in trained if "vis" in n or "multi_modal" in n]


def test_what_text_does_not_reach_is_frozen_and_named(caplog):
    model = make("Gemma3")
    inner = language_model_of(model)
    assert inner is language_model_of(model)
    assert type(inner) is transformers.Gemma3ForCausalLM
    with caplog.at_level(logging.WARNING):
        freeze_other_parts(model)
    assert "trains on text alone, as a Gemma3ForCausalLM" in caplog.messages[-1]
    assert "vision_tower" in caplog.messages[-1]
    frozen = {p for p in model.parameters() if not p.requires_grad}
    assert frozen == {*model.parameters()} - {*inner.parameters()}
    freeze_other_parts(model)
    assert len(caplog.messages) == 1, "what is frozen already is not said again"
    text = transformers.LlamaForCausalLM(transformers.LlamaConfig(**TEXT))
    assert language_model_of(text) is text
