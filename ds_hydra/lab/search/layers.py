"""What the search knows about a model's layers and a cluster's interconnects (schema
`ds_hydra.layers/1`).

Times are milliseconds, sizes MB (2^20 bytes), batch sizes samples. Heterogeneous models
(encoder-decoder, Swin) are several layer types in order, each with its count.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ds_hydra.configs.files import (
    MAX_DEVICES,
    check_count,
    check_object,
    read_count,
    read_json_object,
    read_list,
    read_number,
    read_object,
    read_time,
    reading,
)
from ds_hydra.errors import HydraConfigError
from ds_hydra.strategy.cost_models.analytic import Hardware
from ds_hydra.strategy.profiles.memory_model import EMBEDDING_BYTES_PER_ELEMENT
from ds_hydra.strategy.profiles.profile import Profile

_LAYERS_SCHEMA = "ds_hydra.layers/1"
OVERLAP_SLOWDOWN = 1.3
"""Where it was not measured: Galvatron-BMW's own (§V)."""
MB = float(1 << 20)
_MOST_LAYERS = 4096
"""Layers that a search goes through one by one, for every batch and number of stages."""
_STATE_BYTES = 16.0
"""Of one parameter: 16-bit weight and gradient, fp32 weight and two Adam moments."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerProfile:
    """One type of layer: what it computes, keeps and exchanges."""

    name: str
    count: int
    forward_ms: float
    """Forward of one sample without TP."""
    weight_mb: float
    """All-reduced as gradients, all-gathered as sharded weights."""
    states_mb: float
    """Weights, gradients and optimizer states."""
    activation_mb: Mapping[int, float]
    """Kept for backward for one sample on one rank, by TP degree."""
    boundary_mb: Mapping[int, float]
    """The layer's input alone: what checkpointing keeps, by TP degree."""
    message_mb: float
    """One all-reduce of the TP group for one sample: sequence x hidden x bytes of an element."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EndProfile:
    """Embedding (first stage) or head (last stage)."""

    states_mb: float = 0.0
    activation_mb: float = 0.0
    """For one sample of a micro-batch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchInput:
    """Layers in order and the cluster they run on."""

    layers: Sequence[LayerProfile]
    num_devices: int
    all_reduce_ms_per_mb: Mapping[int, Mapping[tuple[int, bool], float]]
    """[PP degree][group size, consecutive devices]; of the volume 2 (n - 1) / n x message."""
    point_to_point_ms_per_mb: Mapping[int, float]
    """Between neighbouring stages, by PP degree."""
    embedding: EndProfile = field(default_factory=EndProfile)
    head: EndProfile = field(default_factory=EndProfile)
    context_mb: float = 0.0
    """What a device holds before any model: communicators, kernels, allocator."""
    backward_over_forward: float = 2.0
    overlap_slowdown: float = OVERLAP_SLOWDOWN
    """How much slower computation and gradient synchronisation run at the same time (§V)."""

    gathers_each_micro_batch: bool = True
    """Whether sharded weights are gathered for every micro-batch (ZeRO-3) or stay gathered for an
    iteration.
    """

    @property
    def num_layers(self) -> int:
        """All layers."""
        return sum(layer.count for layer in self.layers)

    @property
    def layer_types(self) -> list[int]:
        """Index into `layers` of every layer in order."""
        return [index for index, layer in enumerate(self.layers) for _ in range(layer.count)]

    @classmethod
    def load(cls, path: Path) -> SearchInput:
        """The input in the file `path`; raises HydraConfigError naming what is wrong."""
        return cls.from_json(read_json_object(path), source=str(path))

    @classmethod
    def from_json(cls, document: Mapping[str, Any], *, source: str = "layers") -> SearchInput:
        """The input in a `ds_hydra.layers/1` document; raises HydraConfigError naming what is
        wrong.
        """
        with reading(document, _LAYERS_SCHEMA, source):
            interconnects = read_object(document, "all_reduce_ms_per_mb")
            given = {
                "embedding": {},
                "head": {},
                "context_mb": 0.0,
                "backward_over_forward": 2.0,
                "overlap_slowdown": OVERLAP_SLOWDOWN,
                **document,
            }
            layers = tuple(
                _read_named_layer(check_object(layer, "a layer"))
                for layer in read_list(document, "layers")
            )
            if not layers:
                raise HydraConfigError("there are no layers; give at least one layer profile")
            num_layers = sum(layer.count for layer in layers)
            check_count(num_layers, "the sum of all counts of layers", most=_MOST_LAYERS)
            return cls(
                layers=layers,
                num_devices=read_count(document, "num_devices", least=1, most=MAX_DEVICES),
                all_reduce_ms_per_mb={
                    int(pp): {_read_group(group): read_time(groups, group) for group in groups}
                    for pp, groups in interconnects.items()
                },
                point_to_point_ms_per_mb=_by_degree(document, "point_to_point_ms_per_mb"),
                embedding=_read_end(read_object(given, "embedding")),
                head=_read_end(read_object(given, "head")),
                context_mb=read_number(given, "context_mb", least=0),
                backward_over_forward=read_number(given, "backward_over_forward", least=0),
                overlap_slowdown=read_number(given, "overlap_slowdown", least=1),
                gathers_each_micro_batch=bool(document.get("gathers_each_micro_batch", True)),
            )

    @classmethod
    def from_profile(
        cls, profile: Profile, hardware: Hardware, *, num_devices: int, sequence_tokens: int
    ) -> SearchInput:
        """The input of a profiled decoder; a sample is one sequence of `sequence_tokens` in 16-bit
        types.

        Forward is a third of T(l, P) of the profiled scheme with least TP, shared out over its
        layers; interconnects are those of `hardware`, the overlap slowdown is the profile's where
        it was measured. Raises HydraConfigError for a profile without a model's sizes.
        """
        memory, model = profile.memory, profile.document.get("model", {})
        if "intermediate_size" not in model:
            raise HydraConfigError(
                f"profile {profile.name!r} does not say model.intermediate_size; add it, or give --layers"
            )
        scheme = min(profile.latency, key=lambda s: (not s.is_plain, s.tp, s.pp))
        stage_ms = profile.latency[scheme].micro_batch_ms([sequence_tokens]) * scheme.num_devices
        hidden = memory.hidden_size
        weights = 4.0 * hidden**2 + 3.0 * hidden * model["intermediate_size"]
        message_mb = 2.0 * sequence_tokens * hidden / MB
        vocabulary_mb = EMBEDDING_BYTES_PER_ELEMENT * hidden * memory.vocab_size / MB
        degrees = [1 << k for k in range(num_devices.bit_length())]
        kept = {tp: size for tp, size in memory.activation_bytes.items() if tp in degrees}
        layer = LayerProfile(
            name="decoder",
            count=memory.num_layers,
            forward_ms=stage_ms / memory.num_layers / 3,
            weight_mb=2 * weights / MB,
            states_mb=_STATE_BYTES * weights / MB,
            activation_mb={
                tp: sequence_tokens * hidden / tp * size / MB for tp, size in kept.items()
            },
            boundary_mb=dict.fromkeys(kept, message_mb),
            message_mb=message_mb,
        )

        def ms_per_mb(span: int) -> float:
            return 1e3 * MB / hardware.group_rate(span)

        return cls(
            layers=(layer,),
            num_devices=num_devices,
            all_reduce_ms_per_mb={
                pp: {
                    (size, consecutive): ms_per_mb(size if consecutive else num_devices // pp)
                    for size in degrees[1:]
                    for consecutive in (True, False)
                    if size * pp <= num_devices
                }
                for pp in degrees
            },
            point_to_point_ms_per_mb={pp: ms_per_mb(num_devices) for pp in degrees},
            embedding=EndProfile(states_mb=vocabulary_mb),
            head=EndProfile(
                states_mb=vocabulary_mb,
                activation_mb=4.0 * sequence_tokens * memory.vocab_size / MB,
            ),
            context_mb=memory.reserved_bytes / MB,
            overlap_slowdown=profile.overlap_slowdown or OVERLAP_SLOWDOWN,
        )


def _by_degree(document: Mapping[str, Any], key: str) -> dict[int, float]:
    """The numbers at `key`, by TP or PP degree."""
    numbers = read_object(document, key)
    return {int(degree): read_number(numbers, degree, least=0) for degree in numbers}


def _read_named_layer(document: Mapping[str, Any]) -> LayerProfile:
    try:
        return _read_layer(document)
    except HydraConfigError as error:
        raise HydraConfigError(f"layer {document.get('name')!r:.80}: {error}") from error


def _read_layer(document: Mapping[str, Any]) -> LayerProfile:
    return LayerProfile(
        name=str(document["name"]),
        count=read_count(document, "count", least=1, most=_MOST_LAYERS),
        forward_ms=read_time(document, "forward_ms"),
        weight_mb=read_number(document, "weight_mb", least=0),
        states_mb=read_number(document, "states_mb", least=0),
        activation_mb=_by_degree(document, "activation_mb"),
        boundary_mb=_by_degree(document, "boundary_mb"),
        message_mb=read_number(document, "message_mb", least=0),
    )


def _read_end(document: Mapping[str, Any]) -> EndProfile:
    given = {"states_mb": 0.0, "activation_mb": 0.0, **document}
    if len(given) > 2:
        raise HydraConfigError(
            f"an embedding or head has {', '.join(given)[:80]}, expected states_mb and activation_mb alone"
        )
    return EndProfile(
        states_mb=read_number(given, "states_mb", least=0),
        activation_mb=read_number(given, "activation_mb", least=0),
    )


def _read_group(text: str) -> tuple[int, bool]:
    """`4` or `4_strided`."""
    size, _, kind = text.partition("_")
    if kind not in ("", "strided"):
        raise ValueError(f"group {text!r} is neither a size nor SIZE_strided")
    return int(size), kind == ""
