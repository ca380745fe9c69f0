"""Which causal language models ds_hydra trains, by what their configuration and modules say."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn

from ds_hydra.errors import UnsupportedModelError

_SUPPORTED_LAYER_TYPES = {"full_attention", "sliding_attention"}


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
    base = model.base_model
    missing = [part for part in ("embed_tokens", "layers", "norm") if not hasattr(base, part)]
    if missing or model.get_output_embeddings() is None:
        yield f"has no {', '.join(missing) or 'output head'} where ds_hydra looks for it"
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
            and isinstance(value, int | float)
            and value
        ):
            yield f"{key} = {value}: dropout would depend on the strategy; set it to 0 in the model's config"
    layer_types = set(getattr(base_config, "layer_types", None) or ())
    if layer_types - _SUPPORTED_LAYER_TYPES:
        yield f"layer types {sorted(layer_types - _SUPPORTED_LAYER_TYPES)} are not supported"
    if getattr(base_config, "use_bidirectional_attention", False):
        yield "bidirectional attention is not supported; set use_bidirectional_attention to false"
    if len({p.dtype for p in model.parameters()}) > 1:
        dtypes = sorted({str(p.dtype) for p in model.parameters()})
        yield f"parameters of several dtypes ({', '.join(dtypes)}); cast the model to one, e.g. model.float()"
