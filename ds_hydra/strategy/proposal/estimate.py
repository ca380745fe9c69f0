"""A profile of any decoder of Hugging Face on described hardware, without a measurement."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ds_hydra.configs.files import check_count, find_file, read_json_object
from ds_hydra.errors import HydraConfigError
from ds_hydra.strategy.cost_models.analytic import Hardware, ModelShape, predict_profile
from ds_hydra.strategy.profiles.profile import Profile
from ds_hydra.strategy.profiles.states import engine_states
from ds_hydra.strategy.proposal.candidates import power_of_two_schemes

_FIELDS = {
    "num_layers": "num_hidden_layers",
    "hidden_size": "hidden_size",
    "intermediate_size": "intermediate_size",
    "vocab_size": "vocab_size",
}
_EXPERT_KEYS = ("num_experts", "num_local_experts", "n_routed_experts")
_ELEMENT_BYTES = 2


def estimate_from_config(
    model: str, hardware_name: str, num_devices: int, context_length: int
) -> tuple[Profile, tuple[str, ...]]:
    """Profile of `model` (a shipped preset, or the path of a config.json) on the named hardware,
    and what it assumes, one sentence each.

    Raises HydraConfigError naming what of the model cannot be described.
    """
    path = find_file("models", model)
    config = read_json_object(path)
    shape, heads = describe_model(config, str(path))
    source = find_file("hardware", hardware_name)
    described = read_json_object(source)
    hardware = Hardware.from_json(described, source=str(source))
    params = shape.layer_params / shape.hidden_size**2
    schemes = [
        s
        for s in power_of_two_schemes(num_devices)
        if heads % s.tp == 0 and s.pp <= shape.num_layers
    ]
    document = predict_profile(
        shape,
        hardware,
        schemes,
        name=path.parent.name if path.stem == "config" else path.stem,
        memory={
            "activation_bytes_per_token_per_layer_per_hidden": {
                str(tp): 36 + 1.5 * tp for tp in {scheme.tp for scheme in schemes}
            },
            **engine_states(params, _ELEMENT_BYTES),
        },
        context_length=context_length,
    )
    document["model"]["num_attention_heads"] = heads
    document["model"]["num_key_value_heads"] = round(heads * shape.key_value_share)
    reached = described["efficiency"]
    assumed = [
        f"T: roofline of {hardware.name}, {reached['matmul']:.0%} of its peak in matmuls, "
        f"{reached['attention']:.0%} in attention ({described.get('source', 'no source given')})",
        "memory: 36 + 1.5 TP bytes a token, layer and hidden unit, the engine's states, an eighth left free",
    ]
    if config.get("sliding_window") and config.get("use_sliding_window", True):
        assumed.append("attention: over the whole sequence, though the model has a sliding window")
    width = heads * (config.get("head_dim") or shape.hidden_size // heads)
    if width != shape.hidden_size:
        assumed.append(
            f"attention: as wide as the hidden size, {shape.hidden_size}, where heads have {width}"
        )
    return Profile.from_json(document), tuple(assumed)


def describe_model(config: Mapping[str, Any], source: str) -> tuple[ModelShape, int]:
    """Shape and attention heads of the decoder in a config.json; raises HydraConfigError for one
    that the roofline does not know.
    """
    family = config.get("model_type", "the model")
    if config.get("is_encoder_decoder"):
        raise HydraConfigError(f"{source}: {family} has an encoder; ds_hydra trains decoders alone")
    if key := next((key for key in _EXPERT_KEYS if (config.get(key) or 0) > 1), None):
        raise HydraConfigError(
            f"{source}: {family} is a mixture of experts ({key} = {config[key]}), which the roofline does not know; "
            "measure it (`ds-hydra profile`) and give --profile"
        )
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
    return ModelShape(**counts, key_value_share=key_value_heads / heads), heads
