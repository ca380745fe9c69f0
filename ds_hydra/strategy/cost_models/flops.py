"""FLOPs that training needs, by the sequences' own lengths; over the devices' peak they are MFU.

Forward and backward of a sequence of l tokens:

    matrices     6 FLOP for each token and active parameter, 4 where it is frozen
    attention    12 W for each layer and pair of tokens that see each other: l^2 / 2 of them, or
                 w l - w^2 / 2 where a layer sees a window of w < l tokens

Active are the parameters that a token is multiplied with: those of its own experts, those of the
head, not those of a table that is looked up. W is the mean width of all heads' queries and of their
values. What runs again (recomputation, flash attention's backward) counts once, as in PaLM's MFU
(Chowdhery et al., App. B), which counts attention whole where half of it is causal. Left out:
norms' and activations' own work, experts' routing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ds_hydra.configs.files import (
    check_object,
    read_count,
    read_list,
    read_number,
    read_text,
)
from ds_hydra.errors import HydraConfigError
from ds_hydra.strategy.cost_models.analytic import ModelShape, find_shipped_hardware
from ds_hydra.strategy.cost_models.cluster import model_shape
from ds_hydra.strategy.profiles.profile import Profile

TRAINED_FLOP, FROZEN_FLOP = 6.0, 4.0
"""For each token and parameter: forward, gradient of the input, gradient of the parameter."""
_WHOLE, _WINDOWED = "full_attention", "sliding_attention"
_OTHER_MIXERS = ("mamba", "ssm_", "linear_num_", "conv_L_", "lru_", "hybrid_", "rwkv", "kda_")
"""Keys of a config.json begin with one of these where layers mix tokens by other means."""

_SOME_LAYERS = ("sliding_window_pattern", "max_window_layers")
"""Keys that only say which layers have a window to who knows the family."""


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
    def build(
        cls, per_token: float, config: Mapping[str, Any], *, width: float, num_layers: int
    ) -> ModelFlops:
        """Those of a model whose matrices take `per_token`, with attention as in its configuration
        (config.json); `width` of one layer.
        """
        try:
            windows = _find_windows(config, num_layers)
        except HydraConfigError as error:
            return cls(unknown=str(error))
        kinds = Counter(windows).items()
        attention = (Attention(width=width * count, window=window) for window, count in kinds)
        return cls(per_token=per_token, attention=tuple(attention))

    @classmethod
    def of_shape(cls, shape: ModelShape, config: Mapping[str, Any] | None = None) -> ModelFlops:
        """Those of a decoder by its sizes; without a `config` all layers see all tokens."""
        active = shape.num_layers * shape.active_layer_params + shape.vocab_size * shape.hidden_size
        return cls.build(
            TRAINED_FLOP * active,
            config or {},
            width=shape.heads_width,
            num_layers=shape.num_layers,
        )

    def to_json(self) -> dict[str, Any]:
        """What the "model" section of a profile says of it."""
        if self.unknown:
            return {"unknown": self.unknown}
        kinds = [{"width": kind.width, "window": kind.window} for kind in self.attention]
        return {"per_token": self.per_token, "attention": kinds}

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> ModelFlops:
        """What `to_json` gave; raises KeyError or HydraConfigError for anything else."""
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


def _find_windows(config: Mapping[str, Any], num_layers: int) -> list[int | None]:
    """The window of each layer, None for all tokens; raises HydraConfigError where some layers do
    not attend, or it is not known to what.
    """
    family = config.get("model_type", "the model")
    window = config.get("sliding_window") if config.get("use_sliding_window", True) else None
    kinds = config.get("layer_types")
    if isinstance(kinds, Sequence) and len(kinds) == num_layers:
        kinds = [_WHOLE if kind == "attention" else kind for kind in kinds]
        others = sorted({str(kind) for kind in kinds} - {_WHOLE, _WINDOWED})
        if others or (_WINDOWED in kinds and not isinstance(window, int)):
            what = ", ".join(others) or f"{_WINDOWED} without sliding_window"
            raise HydraConfigError(f"{family} has layers of {what}, whose FLOPs are not counted")
        return [window if kind == _WINDOWED else None for kind in kinds]
    others = sorted(
        key for key, value in config.items() if value and str(key).startswith(_OTHER_MIXERS)
    )
    if others:
        raise HydraConfigError(
            f"{family} has layers that do not attend ({others[0]}), whose FLOPs are not counted"
        )
    window = window if isinstance(window, int) and window > 0 else None
    if window and (family == "gemma2" or any(config.get(key) for key in _SOME_LAYERS)):
        raise HydraConfigError(
            f"{family} does not say which of its layers have a sliding window (layer_types)"
        )
    return [window] * num_layers


def profile_flops(profile: Profile) -> ModelFlops:
    """Those of the model of `profile`, which says them or its sizes."""
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
        return read_number(hardware, "peak_flops", least=1)
    return find_peak_flops(hardware.get("name"))


def find_peak_flops(device: str | None) -> float | None:
    """16-bit FLOP/s of a device at most, by the name that a profile or CUDA has for it; None where
    no shipped hardware file has that name.
    """
    document = find_shipped_hardware(device)
    return None if document is None else float(document["peak_flops"])
