"""What the config.json of a decoder says: its shape, its experts, the schemes that divide them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ds_hydra.configs.files import check_count
from ds_hydra.errors import HydraConfigError
from ds_hydra.strategy.cost_models.analytic import Experts, ModelShape
from ds_hydra.strategy.cost_models.decoder import (
    count_experts,
    expert_size,
    find_layer_kinds,
    first_count,
    key_value_heads,
    layers_with_experts,
    read_decoder,
    shared_expert_size,
)
from ds_hydra.strategy.schemes.enumeration import power_of_two_schemes
from ds_hydra.strategy.schemes.scheme import Scheme


def describe_config(config: Mapping[str, Any], source: str) -> tuple[ModelShape, int]:
    """Shape and attention heads of the decoder in a config.json; raises HydraConfigError for one
    that the roofline does not know.
    """
    family = config.get("model_type", "the model")
    if config.get("is_encoder_decoder"):
        raise HydraConfigError(f"{source}: {family} has an encoder; ds_hydra trains decoders alone")
    wanted = ("num_hidden_layers", "hidden_size", "vocab_size", "num_attention_heads")
    missing = [name for name in wanted if config.get(name) is None]
    if find_layer_kinds(config):
        missing = [name for name in missing if name != "num_hidden_layers"]
    if missing:
        inner = "; its text_config may be one" if "text_config" in config else ""
        raise HydraConfigError(
            f"{source}: {family} has no {', '.join(missing)}, so it cannot be described{inner}"
        )
    heads = check_count(config["num_attention_heads"], f"{source}: num_attention_heads", least=1)
    decoder = read_decoder(config, source)
    means = decoder.means
    experts = find_experts(config, len(decoder.layers), source)
    size = first_count(config, ("intermediate_size", "moe_intermediate_size"))
    hidden = config["hidden_size"]
    by_sizes = ModelShape(
        num_layers=len(decoder.layers),
        hidden_size=hidden,
        intermediate_size=size or 4 * hidden,
        vocab_size=config["vocab_size"],
        key_value_share=key_value_heads(config, heads, source) / heads,
        attention_width=0 if means.attention_width == hidden else round(means.attention_width),
        experts=experts,
    )
    return by_sizes if by_sizes.means == means else replace(by_sizes, layer=means), heads


def find_experts(config: Mapping[str, Any], num_layers: int, source: str) -> Experts | None:
    """The experts that a config.json describes, None for a dense model; raises HydraConfigError
    where it has experts and does not say how many a token chooses.
    """
    num, chosen = count_experts(config, source)
    sparse = layers_with_experts(config, num_layers)
    if not num or not sparse:
        return None
    return Experts(
        num=num,
        chosen=chosen,
        size=expert_size(config),
        shared_size=shared_expert_size(config),
        layer_share=len(sparse) / num_layers,
    )


def expert_parallel_schemes(shape: ModelShape, heads: int, num_devices: int) -> list[Scheme]:
    """<spN,PP;ep=N> of powers of two that fit `num_devices` and divide heads and experts."""
    num = shape.experts.num if shape.experts is not None else 1
    return [
        Scheme(1, s.pp, sp=s.tp, ep=s.tp)
        for s in power_of_two_schemes(num_devices)
        if s.tp > 1 and heads % s.tp == 0 and num % s.tp == 0 and s.pp <= shape.num_layers
    ]
