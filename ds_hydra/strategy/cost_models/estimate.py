"""Profile of a model by its config.json, on described hardware, without a measurement."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ds_hydra.configs import find_file
from ds_hydra.configs.files import read_json_object
from ds_hydra.strategy.cost_models.analytic import Hardware, predict_latency, predict_profile
from ds_hydra.strategy.cost_models.decoder import (
    describe_config,
    expert_parallel_schemes,
    read_decoder,
)
from ds_hydra.strategy.cost_models.flops import ModelFlops
from ds_hydra.strategy.profiles.profile import (
    ENGINE_LAYERS,
    Profile,
    engine_states,
    expert_memory,
)
from ds_hydra.strategy.schemes.enumeration import power_of_two_schemes
from ds_hydra.strategy.schemes.scheme import Scheme

_ELEMENT_BYTES = 2


def estimate_from_config(
    model: str,
    hardware_name: str,
    num_devices: int,
    context_length: int,
    expert_skew: float = 1.0,
    config: Mapping[str, Any] | None = None,
    *,
    float8: bool = False,
) -> tuple[Profile, tuple[str, ...]]:
    """Profile of `model` (a shipped preset, the path of a config.json, or any name of a `config`
    that is known) on the named hardware, and what it assumes, one sentence each. With experts it
    has schemes with ep, too, on whose busiest rank experts get `expert_skew` times the mean of
    tokens. With `float8` linear layers multiply in 8 bits.

    Raises HydraConfigError naming what of the model cannot be described.
    """
    path = find_file("models", model) if config is None else Path(model)
    config = read_json_object(path) if config is None else config
    shape, heads = describe_config(config, str(path))
    decoder = read_decoder(config, str(path))
    source = find_file("hardware", hardware_name)
    described = read_json_object(source)
    hardware = Hardware.from_json(described, source=str(source))
    means = shape.means
    params = means.params / shape.hidden_size**2
    schemes = [
        s
        for s in power_of_two_schemes(num_devices)
        if heads % s.tp == 0 and s.pp <= shape.num_layers
    ]
    schemes += expert_parallel_schemes(shape, heads, num_devices)
    document = predict_profile(
        shape,
        hardware,
        schemes,
        name=path.parent.name if path.name == "config.json" else path.name.removesuffix(".json"),
        memory={
            "activation_bytes_per_token_per_layer_per_hidden": {
                str(tp): shape.fused_activation_bytes(tp) for tp in {s.tp for s in schemes}
            },
            **engine_states(params, _ELEMENT_BYTES),
            **expert_memory(means.expert_params / means.params),
        },
        context_length=context_length,
        expert_skew=expert_skew,
        float8=float8,
    )
    document[ENGINE_LAYERS] = {
        "compiled_bytes": shape.activation_bytes(),
        "compiled_bytes_of_tp": shape.activation_bytes(2),
        "eager_bytes": shape.activation_bytes(compiled=False),
        "compiled_ms": 1e3 * shape.hidden_size * shape.bytes_again / hardware.memory_rate,
    }
    document["float8"] = "rowwise" if float8 else None
    document["tp_sequence_parallel"] = True
    document["model"]["flops"] = ModelFlops.of_decoder(decoder).to_json()
    document["model"]["parameters"] = asdict(decoder.size)
    document["model"]["num_attention_heads"] = heads
    document["model"]["num_key_value_heads"] = round(heads * shape.key_value_share)
    reached = described["efficiency"]
    assumed = [
        *(f"model: {sentence}" for sentence in decoder.unpriced),
        f"T: roofline of {hardware.name}, {reached['matmul']:.0%} of its peak in matmuls, "
        f"{reached['attention']:.0%} in attention ({described.get('source', 'no source given')})",
        "MFU: those shares are a ceiling of it; left out are P2P between stages, imbalance of experts without ep, slow "
        "devices, contention and loading of data, so that a run has less",
        f"memory: {shape.activation_bytes():.3g} bytes a token, layer and hidden unit, as compiled layers "
        f"keep, which write {shape.bytes_again:.3g} once more in backward "
        f"({shape.activation_bytes(compiled=False):.3g} without hydra.compile_layers), in other systems "
        f"{shape.kept_bytes:.3g} + 1.5 TP, of recomputed layers inputs in shards of TP groups, the engine's states, an "
        "eighth left free",
    ]
    if float8:
        one = Scheme(1, 1)
        ms, plain_ms = (
            predict_latency(shape, hardware, one, float8=f).micro_batch_ms([context_length])
            for f in (True, False)
        )
        assumed.append(
            "8-bit products: an estimate. Linear layers of decoder layers reach the same share of the 8-bit peak as of "
            "the 16-bit one, of which MFU is, and casts move 8 bytes for each number; head, attention and experts that "
            f"tokens choose from stay in 16 bit. T of {context_length:,} tokens under <1,1> is {ms / plain_ms:.2f} of "
            "that in 16 bit"
        )
    if config.get("sliding_window") and config.get("use_sliding_window", True):
        assumed.append("attention: over the whole sequence, though the model has a sliding window")
    if shape.experts is not None:
        assumed.append(
            f"experts: {shape.experts.chosen} of {shape.experts.num} for a token; with ep the busiest rank's get "
            f"{expert_skew:g} times the mean of tokens (--expert-skew)"
        )
    return Profile.from_json(document), tuple(assumed)
