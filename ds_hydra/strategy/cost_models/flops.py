"""Facts of a decoder's config.json (its shape, its experts, the schemes that divide them), and the
FLOPs that training it needs by the sequences' own lengths. Over the devices' peak they are MFU.

Forward and backward of a sequence of l tokens:

    matrices     6 FLOP for each token and active parameter, 4 where it is frozen
    attention    12 W for each layer that has it and pair of tokens that see each other: l^2 / 2 of
                 them, or w l - w^2 / 2 where a layer sees a window of w < l tokens
    states       6 FLOP for each token and multiplication with the state of a layer that has one
                 (`decoder.py`), whatever the sequence's length

Active are the parameters that a token is multiplied with: those of its own experts, those of the
head, not those of a table that is looked up. W is the mean width of all heads' queries and of their
values. What runs again (recomputation, flash attention's backward) counts once, as in PaLM's MFU
(Chowdhery et al., App. B), which counts attention whole where half of it is causal. Left out:
norms' and activations' own work, experts' routing.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ds_hydra.configs.files import (
    LARGEST,
    check_object,
    read_count,
    read_list,
    read_number,
    read_text,
)
from ds_hydra.errors import HydraConfigError
from ds_hydra.strategy.cost_models.analytic import Experts, ModelShape, find_shipped_hardware
from ds_hydra.strategy.cost_models.cluster import model_shape
from ds_hydra.strategy.cost_models.decoder import (
    Decoder,
    Fields,
    count_experts,
    expert_size,
    first_count,
    key_value_heads,
    layers_with_experts,
    read_decoder,
    shared_expert_size,
)
from ds_hydra.strategy.profiles.profile import Profile
from ds_hydra.strategy.schemes.enumeration import power_of_two_schemes
from ds_hydra.strategy.schemes.scheme import Scheme

_NORM_HEADS = """
    afmoe apertus dots1 exaone4 exaone_moe flex_olmo gemma3 gemma3n gemma4 glm4_moe hunyuan_v1_dense
    hunyuan_v1_moe lfm2 lfm2_moe minimax_m2 nanochat olmo2 olmo3 olmo_hybrid olmoe qwen3 qwen3_5
    qwen3_5_moe qwen3_moe qwen3_next
""".split()  # noqa: SIM905
"""Model types whose queries and keys pass norms, which no field of a config.json says."""


def describe_config(config: Mapping[str, Any], source: str) -> tuple[ModelShape, int]:
    """Shape and attention heads of the decoder in a config.json; raises HydraConfigError for one
    that the roofline does not know.
    """
    family = config.get("model_type", "the model")
    if config.get("is_encoder_decoder"):
        raise HydraConfigError(f"{source}: {family} has an encoder; ds_hydra trains decoders alone")
    fields = Fields(config, source)
    heads = fields.count("num_attention_heads", least=1)
    decoder = read_decoder(config, source)
    means = decoder.means
    experts = find_experts(config, len(decoder.layers), source)
    size = first_count(config, ("intermediate_size", "moe_intermediate_size"))
    by_sizes = ModelShape(
        num_layers=len(decoder.layers),
        hidden_size=fields.hidden,
        intermediate_size=size or 4 * fields.hidden,
        vocab_size=config["vocab_size"],
        key_value_share=key_value_heads(config, heads, source) / heads,
        attention_width=0
        if means.attention_width == fields.hidden
        else round(means.attention_width),
        norms_heads=family.removesuffix("_text") in _NORM_HEADS,
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


TRAINED_FLOP, FROZEN_FLOP = 6.0, 4.0
"""FLOP for each token and parameter: forward, gradient of the input, gradient of the parameter."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Attention:
    """Layers that attend alike: `width` is W of all of them together, `window` None where they see
    all tokens.
    """

    width: float
    window: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFlops:
    """FLOPs of one model. `per_token`: of its matrices; `unknown`: why they are not counted."""

    per_token: float = 0.0
    attention: tuple[Attention, ...] = ()
    unknown: str = ""

    def of(self, lengths_tokens: Iterable[int]) -> float:
        """FLOPs of training on sequences of these lengths; NaN where they are not counted.

        >>> llama = ModelFlops(per_token=6e9, attention=(Attention(width=32 * 4096),))
        >>> f"{llama.of([1000]):.3e}, {llama.of([1000, 1000]):.3e}, {llama.of([2000]):.3e}"
        '6.786e+12, 1.357e+13, 1.515e+13'
        """
        if self.unknown:
            return float("nan")
        lengths = np.fromiter(lengths_tokens, dtype=np.float64)
        flops = self.per_token * float(lengths.sum())
        for kind in self.attention:
            seen = lengths if kind.window is None else np.minimum(lengths, kind.window)
            flops += 12 * kind.width * float((seen * lengths - seen**2 / 2).sum())
        return flops

    def tflops(self, lengths_tokens: Iterable[int], time_ms: float, num_devices: int) -> float:
        """TFLOP/s of each device where they take so long; NaN where FLOPs or time are not known."""
        device_ms = time_ms * num_devices
        return self.of(lengths_tokens) / device_ms / 1e9 if device_ms > 0 else float("nan")

    @classmethod
    def of_decoder(cls, decoder: Decoder, matrices: float | None = None) -> ModelFlops:
        """FLOPs of a decoder whose matrices take `matrices` FLOPs a token; None: those of training
        all of them.
        """
        if decoder.unknown_mixers:
            return cls(unknown=decoder.unknown_mixers)
        if matrices is None:
            active = sum(layer.active_params for layer in decoder.layers)
            matrices = TRAINED_FLOP * (active + decoder.table_params)
        states = TRAINED_FLOP * sum(layer.state_params for layer in decoder.layers)
        attention = (Attention(width=w, window=seen) for seen, w in decoder.windows.items())
        return cls(per_token=matrices + states, attention=tuple(attention))

    @classmethod
    def of_shape(cls, shape: ModelShape) -> ModelFlops:
        """FLOPs of a decoder by its sizes, whose layers see all tokens."""
        means, number = shape.means, shape.num_layers
        used = number * (means.active_params + means.state_params)
        return cls(
            per_token=TRAINED_FLOP * (used + shape.vocab_size * shape.hidden_size),
            attention=(Attention(width=number * means.attention_width),),
        )

    def to_json(self) -> dict[str, Any]:
        """The entry in the "model" section of a profile."""
        if self.unknown:
            return {"unknown": self.unknown}
        kinds = [{"width": kind.width, "window": kind.window} for kind in self.attention]
        return {"per_token": self.per_token, "attention": kinds}

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> ModelFlops:
        """Read the document of `to_json`; raises KeyError or HydraConfigError for anything else."""
        if "unknown" in document:
            return cls(unknown=read_text(document, "unknown"))
        kinds = [check_object(kind, "attention") for kind in read_list(document, "attention")]
        return cls(
            per_token=read_number(document, "per_token", least=0),
            attention=tuple(
                Attention(
                    width=read_number(kind, "width", least=0),
                    window=None if kind["window"] is None else read_count(kind, "window", least=1),
                )
                for kind in kinds
            ),
        )


def profile_flops(profile: Profile) -> ModelFlops:
    """FLOPs of the model of `profile`, from the profile's own entry or by its sizes."""
    document = profile.document["model"].get("flops")
    if document is None:
        try:
            return ModelFlops.of_shape(model_shape(profile))
        except HydraConfigError as error:
            return ModelFlops(unknown=str(error))
    try:
        return ModelFlops.from_json(check_object(document, "model.flops"))
    except KeyError as error:
        raise HydraConfigError(
            f"profile {profile.name!r}: model.flops has no {error}; leave it out, or measure the profile anew"
        ) from error


def profile_peak_flops(profile: Profile) -> float | None:
    """16-bit FLOP/s of a device of `profile` at most, None where that is not known."""
    hardware = profile.document["hardware"]
    if hardware.get("peak_flops") is not None:
        return read_number(hardware, "peak_flops", least=1, most=1e6 * LARGEST)
    return find_peak_flops(hardware.get("name"))


def find_peak_flops(device: str | None) -> float | None:
    """16-bit FLOP/s of a device at most, by the name that a profile or CUDA has for it; None where
    no shipped hardware file has that name.
    """
    document = find_shipped_hardware(device)
    return None if document is None else float(document["peak_flops"])
