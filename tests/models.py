"""Small models of the families under test, equal on every rank for a given seed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import transformers
from torch import nn

VOCAB_SIZE = 251  # not divisible by 2, 3 or 4


def tiny(family: str, seed: int = 0, **overrides: Any) -> nn.Module:
    """An untrained model of `family` (see BUILDERS) with fp32 weights."""
    torch.manual_seed(seed)
    transformers.logging.set_verbosity_error()
    return BUILDERS[family](**overrides)


def with_plan(family: str, changes: dict[str, str], **overrides: Any) -> nn.Module:
    """A tiny model whose tp plan has these changes."""
    model = tiny(family, **overrides)
    model.config.base_model_tp_plan = {**model.config.base_model_tp_plan, **changes}
    return model


def with_a_mixer(family: str, **overrides: Any) -> nn.Module:
    """A tiny model with a linear outside of its layers that the tp plan slices, so that ranks of a
    TP group have whole micro-batches.
    """
    model = with_plan(family, {"rotary_emb.mixer": "colwise_gather_output"}, **overrides)
    model.model.rotary_emb.mixer = nn.Linear(2, 2)
    return model


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
    "gemma2": _builder("Gemma2ForCausalLM", "Gemma2Config", head_dim=8, sliding_window=7),
    "gemma3": _builder("Gemma3ForCausalLM", "Gemma3TextConfig", head_dim=8, sliding_window=7),
    "phi3": _builder("Phi3ForCausalLM", "Phi3Config"),
    "granite_swa": _builder("GraniteSWAForCausalLM", "GraniteSWAConfig", sliding_window=7),
    "olmo2": _builder("Olmo2ForCausalLM", "Olmo2Config"),
}

_ROUTED = {
    "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1,
    "n_shared_experts": 1, "moe_intermediate_size": 40, "first_k_dense_replace": 1,
}  # fmt: skip
_LATENT = {
    "num_key_value_heads": 4, "kv_lora_rank": 16, "q_lora_rank": 16, "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8, "v_head_dim": 12,
}  # fmt: skip

MIXTURES_OF_EXPERTS = {
    "mixtral": _builder("MixtralForCausalLM", "MixtralConfig", num_local_experts=4),
    "qwen3_moe": _builder(
        "Qwen3MoeForCausalLM",
        "Qwen3MoeConfig",
        num_experts=16,  # more than the tokens of some micro-batches reach
        num_experts_per_tok=2,
        moe_intermediate_size=40,
        head_dim=8,
    ),
    "deepseek_v3": _builder("DeepseekV3ForCausalLM", "DeepseekV3Config", **_ROUTED, **_LATENT),
    "gpt_oss": _builder(
        "GptOssForCausalLM",
        "GptOssConfig",
        num_local_experts=4,
        num_experts_per_tok=2,
        head_dim=8,
        sliding_window=7,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
    ),
    "ernie4_5_moe": _builder(
        "Ernie4_5_MoeForCausalLM",
        "Ernie4_5_MoeConfig",
        moe_num_experts=4,
        moe_k=2,
        moe_num_shared_experts=1,
        moe_layer_start_index=1,
        moe_layer_end_index=3,
        moe_intermediate_size=40,
        head_dim=8,
    ),
}

_NO_DROPOUT = dict.fromkeys(
    ("resid_pdrop", "embd_pdrop", "attn_pdrop", "hidden_dropout", "attention_dropout"), 0.0
)

OTHER_STRUCTURES = {
    "gpt2": _builder("GPT2LMHeadModel", "GPT2Config", **_NO_DROPOUT),
    "gpt_neox": _builder("GPTNeoXForCausalLM", "GPTNeoXConfig", **_NO_DROPOUT),
    "stablelm": _builder("StableLmForCausalLM", "StableLmConfig", **_NO_DROPOUT),
    "bloom": _builder("BloomForCausalLM", "BloomConfig", **_NO_DROPOUT),
    "apertus": _builder("ApertusForCausalLM", "ApertusConfig"),
    "minicpm3": _builder(
        "MiniCPM3ForCausalLM",
        "MiniCPM3Config",
        num_key_value_heads=4,
        kv_lora_rank=16,
        q_lora_rank=16,
        qk_rope_head_dim=8,
        qk_nope_head_dim=8,
        v_head_dim=12,
    ),
    "prophetnet": lambda disable_ngram_loss=True, eps=0.0: transformers.ProphetNetForCausalLM(
        transformers.ProphetNetConfig(
            disable_ngram_loss=disable_ngram_loss,
            eps=eps,
            vocab_size=VOCAB_SIZE,
            hidden_size=32,
            num_decoder_layers=2,
            num_decoder_attention_heads=4,
            decoder_ffn_dim=48,
            dropout=0.0,
            activation_dropout=0.0,
            attention_dropout=0.0,
        )
    ),
    "olmo_hybrid": _builder(
        "OlmoHybridForCausalLM",
        "OlmoHybridConfig",
        layer_types=["linear_attention", "full_attention"] * 2,
        linear_num_key_heads=2,
        linear_num_value_heads=2,
        linear_key_head_dim=8,
        linear_value_head_dim=8,
    ),
}
"""Learned positions and other names; attention and MLP side by side; layers that drop keyword
arguments; activations with parameters; latent attention; ALiBi, a table that is read without its
module, and modules with states of their own, which run one sequence after the other.
"""

WHOLE_FEATURES = {
    "glm4": _builder("Glm4ForCausalLM", "Glm4Config", head_dim=8),
    "olmo3": _builder("Olmo3ForCausalLM", "Olmo3Config", sliding_window=7),
}
"""Tp plans that gather or split features, beside phi3's and olmo2's."""

BUILDERS = FAMILIES | MIXTURES_OF_EXPERTS | OTHER_STRUCTURES | WHOLE_FEATURES
