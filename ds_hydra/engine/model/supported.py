"""Which causal language models ds_hydra trains, by what their configuration and modules say."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from ds_hydra.engine.model.decoder_parts import DecoderParts
from ds_hydra.errors import UnsupportedModelError

_OF_OTHER_HEADS = ("summary_", "classifier_")
_PACKED_LAYER_TYPES = {"full_attention", "sliding_attention"}


def check_model(model: nn.Module) -> None:
    """Raise UnsupportedModelError naming the first part of `model` that ds_hydra cannot train."""
    name = type(model).__name__
    config = getattr(model, "config", None)
    if config is None or not hasattr(model, "base_model"):
        raise UnsupportedModelError(
            f"{name} is not a Hugging Face causal language model; pass e.g. a LlamaForCausalLM"
        )
    base_config = model.base_model.config
    for problem in _problems(model, config, base_config):
        raise UnsupportedModelError(f"{name} (model type {config.model_type!r}): {problem}")


def _problems(model: nn.Module, config: Any, base_config: Any) -> Iterator[str]:
    if getattr(config, "is_encoder_decoder", False):
        yield "encoder-decoder models are not supported; use a decoder-only model"
    if problem := find_other_inputs(config):
        yield problem
    try:
        DecoderParts.find(model)
    except LookupError as error:
        yield str(error)
    for key, value in vars(base_config).items():
        if "jitter" in key and value:
            yield f"{key} = {value}: noise in the router would depend on the strategy; set it to 0 in model.config"
        if key in ("expert_capacity", "capacity_factor") and value:
            yield (
                f"{key} = {value}: which tokens an expert drops would depend on the strategy; set it to None in "
                "model.config, or use a model that drops none"
            )
        if (
            ("dropout" in key or key.endswith("_pdrop"))
            and not key.startswith(_OF_OTHER_HEADS)
            and isinstance(value, int | float)
            and value
        ):
            yield f"{key} = {value}: dropout would depend on the strategy; set it to 0 in the model's config"
    if getattr(base_config, "use_bidirectional_attention", None) in (True, "all"):
        yield "bidirectional attention is not supported; set use_bidirectional_attention to None"
    if len({p.dtype for p in model.parameters()}) > 1:
        dtypes = sorted({str(p.dtype) for p in model.parameters()})
        yield f"parameters of several dtypes ({', '.join(dtypes)}); cast the model to one, e.g. model.float()"


def find_other_inputs(config: Any) -> str:
    """Why a model whose `config` has parts for images or sound is refused, and its text class; ""
    where it has none.
    """
    text = find_text_config(config)
    others = [key for key in ("vision_config", "audio_config") if getattr(config, key, None)]
    if text is config and not others:
        return ""
    kind = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(text.model_type)
    return "it has parts for other inputs than text, which no sequence would train; train " + (
        "a model of text alone" if text is config else f"{kind} with its {type(text).__name__}"
    )


def find_text_config(config: Any) -> Any:
    """The configuration of the language model inside `config`; itself where it is one."""
    try:
        return config.get_text_config()
    except (ValueError, AttributeError):  # of several, or of a type that has none
        return config


def other_layer_types(config: Any) -> list[str]:
    """Kinds of layers beside those whose attention ds_hydra computes for packed micro-batches."""
    return sorted(set(getattr(config, "layer_types", None) or ()) - _PACKED_LAYER_TYPES)
