"""Small models of the families under test, equal on every rank for a given seed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import transformers
from torch import nn

VOCAB_SIZE = 251  # not divisible by 2, 3 or 4


def tiny(family: str, seed: int = 0, **overrides: Any) -> nn.Module:
    """An untrained model of `family` (see FAMILIES) with fp32 weights."""
    torch.manual_seed(seed)
    transformers.logging.set_verbosity_error()
    return FAMILIES[family](**overrides)


def _builder(model_class: str, config_class: str, **defaults: Any) -> Callable[..., nn.Module]:
    def build(**overrides: Any) -> nn.Module:
        settings = {
            "hidden_size": 32,
            "intermediate_size": 72,
            "num_hidden_layers": 4,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "vocab_size": VOCAB_SIZE,
            "max_position_embeddings": 256,
            "initializer_range": 0.1,  # larger than usual: attention and norms shall matter
            "pad_token_id": 0,
            "bos_token_id": 1,
            "eos_token_id": 2,
            **defaults,
            **overrides,
        }
        config = getattr(transformers, config_class)(**settings)
        return getattr(transformers, model_class)(config).float()

    return build


FAMILIES = {
    "llama": _builder("LlamaForCausalLM", "LlamaConfig", tie_word_embeddings=False),
    "llama_tied": _builder("LlamaForCausalLM", "LlamaConfig", tie_word_embeddings=True),
    "llama_bias": _builder("LlamaForCausalLM", "LlamaConfig", attention_bias=True, mlp_bias=True),
    "qwen2": _builder("Qwen2ForCausalLM", "Qwen2Config", tie_word_embeddings=True),
    "qwen3": _builder("Qwen3ForCausalLM", "Qwen3Config", head_dim=8),
    "mistral": _builder("MistralForCausalLM", "MistralConfig", sliding_window=7),
    "gemma2": _builder("Gemma2ForCausalLM", "Gemma2Config", head_dim=8, sliding_window=7),
    "gemma3": _builder("Gemma3ForCausalLM", "Gemma3TextConfig", head_dim=8, sliding_window=7),
    "phi3": _builder("Phi3ForCausalLM", "Phi3Config"),
}
