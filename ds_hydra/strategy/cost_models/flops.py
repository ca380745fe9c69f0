"""FLOPs that training a decoder needs, by the sequences' own lengths. Over the devices' peak they
are MFU.

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
from dataclasses import dataclass
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
from ds_hydra.strategy.cost_models.analytic import ModelShape, find_shipped_hardware
from ds_hydra.strategy.cost_models.cluster import model_shape
from ds_hydra.strategy.cost_models.decoder import Decoder
from ds_hydra.strategy.profiles.profile import Profile

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
