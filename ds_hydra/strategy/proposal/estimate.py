"""What the config.json of a decoder says: its shape, its experts, the schemes that divide them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ds_hydra.configs.files import check_count
from ds_hydra.errors import HydraConfigError
from ds_hydra.strategy.cost_models.analytic import Experts, ModelShape
from ds_hydra.strategy.proposal.candidates import power_of_two_schemes
from ds_hydra.strategy.schemes.scheme import Scheme

_FIELDS = {
    "num_layers": "num_hidden_layers",
    "hidden_size": "hidden_size",
    "intermediate_size": "intermediate_size",
    "vocab_size": "vocab_size",
}
_NUM_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
_NUM_CHOSEN = ("num_experts_per_tok", "num_experts_per_token", "moe_k", "moe_topk", "top_k_experts")
_NUM_SHARED = ("n_shared_experts", "num_shared_experts", "moe_num_shared_experts")
"""What families call these."""


def describe_model(config: Mapping[str, Any], source: str) -> tuple[ModelShape, int]:
    """Shape and attention heads of the decoder in a config.json; raises HydraConfigError for one
    that the roofline does not know.
    """
    family = config.get("model_type", "the model")
    if config.get("is_encoder_decoder"):
        raise HydraConfigError(f"{source}: {family} has an encoder; ds_hydra trains decoders alone")
    wanted = (*_FIELDS.values(), "num_attention_heads")
    missing = [name for name in wanted if config.get(name) is None]
    if missing:
        inner = "; its text_config may be one" if "text_config" in config else ""
        raise HydraConfigError(
            f"{source}: {family} has no {', '.join(missing)}, so it cannot be described{inner}"
        )
    counts = {
        field: check_count(config[name], f"{source}: {name}", least=1, most=1 << 32)
        for field, name in _FIELDS.items()
    }
    heads = check_count(config["num_attention_heads"], f"{source}: num_attention_heads", least=1)
    given = config.get("num_key_value_heads")
    key_value_heads = heads if given is None else check_count(
        given, f"{source}: num_key_value_heads", least=1, most=heads
    )  # fmt: skip
    head_size = config.get("v_head_dim") or config.get("head_dim")
    width = heads * head_size if isinstance(head_size, int) else counts["hidden_size"]
    shape = ModelShape(
        **counts,
        key_value_share=key_value_heads / heads,
        attention_width=0 if width == counts["hidden_size"] else width,
        experts=find_experts(config, counts["num_layers"], source),
    )
    return shape, heads


def find_experts(config: Mapping[str, Any], num_layers: int, source: str) -> Experts | None:
    """The experts that a config.json describes, None for a dense model; raises HydraConfigError
    where it has experts and does not say how many a token chooses.
    """
    num = _first_count(config, _NUM_EXPERTS)
    if num < 2:
        return None
    chosen = _first_count(config, _NUM_CHOSEN)
    if not 1 <= chosen <= num:
        raise HydraConfigError(
            f"{source}: {config.get('model_type')} has {num} experts, and a token chooses {chosen} of them "
            f"({' or '.join(_NUM_CHOSEN)}), expected 1 to {num}"
        )
    size = _first_count(config, ("moe_intermediate_size", "intermediate_size"))
    shared = _first_count(config, ("shared_expert_intermediate_size",))
    return Experts(
        num=num,
        chosen=chosen,
        size=size,
        shared_size=shared or _first_count(config, _NUM_SHARED) * size,
        layer_share=_layers_with_experts(config, num_layers) / num_layers,
    )


def _first_count(config: Mapping[str, Any], keys: Sequence[str]) -> int:
    """The first of `keys` that is a positive number, or the first of several; 0 without."""
    for key in keys:
        value = config.get(key)
        value = value[0] if isinstance(value, list | tuple) and value else value
        if isinstance(value, int) and value > 0:
            return value
    return 0


def _layers_with_experts(config: Mapping[str, Any], num_layers: int) -> int:
    kinds = config.get("mlp_layer_types")
    if isinstance(kinds, list | tuple) and len(kinds) == num_layers:
        return sum(kind != "dense" for kind in kinds)
    first = _first_count(config, ("first_k_dense_replace", "moe_layer_start_index"))
    step = _first_count(config, ("decoder_sparse_step", "moe_layer_freq")) or 1
    dense = config.get("mlp_only_layers") or ()
    return sum(i not in dense and (i + 1) % step == 0 for i in range(first, num_layers))


def expert_parallel_schemes(shape: ModelShape, heads: int, num_devices: int) -> list[Scheme]:
    """<spN,PP;ep=N> of powers of two that fit `num_devices` and divide heads and experts."""
    num = shape.experts.num if shape.experts is not None else 1
    return [
        Scheme(1, s.pp, sp=s.tp, ep=s.tp)
        for s in power_of_two_schemes(num_devices)
        if s.tp > 1 and heads % s.tp == 0 and num % s.tp == 0 and s.pp <= shape.num_layers
    ]
