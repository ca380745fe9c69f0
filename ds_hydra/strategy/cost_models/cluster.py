"""Times of moving bytes on a cluster: pull and push of a strategy, activations between stages, the
optimizer.

Two levels: devices of a node share its interconnect to the other nodes. A slice crosses into a node
once, however many of its ranks need it, and spreads inside. All rates are as reached, in one
direction; transfers of different nodes do not disturb each other. Left out: casts, launches and the
latency of single messages in pull and push.

Elements of a pull are counted by shares of the model, for thousands of strategies of models that
nobody has loaded. Plans of the link agree where a node needs whole parameters; where
TP spans nodes this one may be above.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from math import lcm

import numpy as np

from ds_hydra.errors import HydraConfigError
from ds_hydra.strategy.cost_models.analytic import (
    Experts,
    Hardware,
    LayerMeans,
    ModelShape,
    find_shipped_hardware,
)
from ds_hydra.strategy.profiles.profile import LinkTimes, Profile
from ds_hydra.strategy.schemes.placement import coordinates
from ds_hydra.strategy.schemes.scheme import Scheme, Strategy

logger = logging.getLogger(__name__)

_PARAM_BYTES = 2
"""A parameter is pulled in 16 bit."""
_PUSHED_BYTES = 2
"""A gradient is pushed in 16 bit and summed in 32 by its owner: DeepSpeed's default for bf16."""
_MAIN_GRADIENT_BYTES = 4
"""Megatron-LM reduces its main gradients in 32 bit."""
_STEP_BYTES = 80
"""Bytes of memory traffic of a parameter in DeepSpeed's step, as measured: 74 on one H100 and 97 on
one H200, of models of 1.1 and 1.5 billion parameters. AdamW alone moves 30; the rest is the norm,
unscaling, clipping and casts.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """A model on `num_devices` of one kind of hardware."""

    shape: ModelShape
    hardware: Hardware
    num_devices: int
    gradient_bytes: float = _PUSHED_BYTES
    """Bytes of an element that is pushed where states are fully sharded (DeepSpeed's
    `communication_data_type`).
    """

    @property
    def step_ms(self) -> float:
        """Time of the optimizer on the shard of one rank."""
        shard = self.shape.num_params / self.num_devices
        return 1e3 * shard * _STEP_BYTES / self.hardware.memory_rate

    @property
    def end_ms(self) -> float:
        """Time of the optimizer, and of the host beside passes and step."""
        return self.step_ms + self.hardware.iteration_overhead_ms

    @lru_cache(maxsize=4096)  # noqa: B019 - a cluster is a small value, and few are made
    def link_times(
        self,
        strategy: Strategy,
        *,
        is_fully_sharded: bool = True,
    ) -> LinkTimes:
        """Pull, push and step of `strategy`. Where it gathers layers for every pass, their
        transfers are part of T; pull and push hold the first gather and the last reduction, which
        nothing hides.

        `is_fully_sharded`: states are cut over all ranks (ZeRO-3), else over the pipelines that
        hold the same slice (the distributed optimizer of Megatron-LM, homogeneous strategies only),
        which moves fewer bytes.
        """
        elements = self._node_elements(strategy, is_fully_sharded)
        layers = self.shape.num_layers
        widest = (
            max(self._held_share(s) * _widest_slice(s, layers) for s in set(strategy.schemes))
            * self.shape.num_params
        )
        # A rank has 1 / N of all in its own shard
        inside = widest * (1 - 1 / self.num_devices) / self.hardware.intra_node_rate
        across = elements / self.hardware.inter_node_rate
        # Both kinds of interconnect work at the same time
        slowest = 1e3 * max(inside, across)
        gradient_bytes = self.gradient_bytes if is_fully_sharded else _MAIN_GRADIENT_BYTES
        return LinkTimes(
            pull_ms=_PARAM_BYTES * slowest,
            push_ms=gradient_bytes * slowest,
            step_ms=self.end_ms,
        )

    def _held_share(self, scheme: Scheme) -> float:
        """Share of the model that TP ranks hold where ranks share its experts, whole ones."""
        experts = self.shape.num_layers * self.shape.means.expert_params / self.shape.num_params
        return 1 - experts * (1 - scheme.tp / scheme.ep) if scheme.ep > 1 else 1.0

    @property
    def _ranks_per_node(self) -> int:
        return min(self.hardware.devices_per_node, self.num_devices)

    def gather_ms(self, scheme: Scheme) -> float:
        """Milliseconds of all transfers for one micro-batch of gathered layers, by the slower kind
        of interconnect: weights are read forward and backward, gradients given away. Each time a
        layer crosses to a node once, for all its ranks: whole, also where TP spans nodes, each of
        which then needs a part. With `hpz` it crosses forward alone, unless TP leaves each rank of
        a node a slice of its own. Left out: further micro-batches then need no weights of other
        nodes.
        """
        element_bytes = 2 * _PARAM_BYTES + self.gradient_bytes
        held = self._held_share(scheme) * self.shape.num_params
        elements = held / scheme.tp * (1 - 1 / self.num_devices)
        # What the ranks of a node own need not come from others
        outside = self.shape.num_params * (1 - self._ranks_per_node / self.num_devices)
        if scheme.hpz and scheme.tp < self._ranks_per_node:
            # Backward reads the weights that forward has brought
            outside *= 1 - _PARAM_BYTES / element_bytes
        slowest = max(
            elements / self.hardware.intra_node_rate, outside / self.hardware.inter_node_rate
        )
        return 1e3 * element_bytes * slowest

    def _node_elements(self, strategy: Strategy, is_fully_sharded: bool) -> float:
        """Elements that the busiest node receives from other nodes in one pull."""
        node_size = self.hardware.devices_per_node
        if self.num_devices <= node_size:
            return 0.0
        nodes = _slices_of_nodes(strategy, node_size, self.shape.num_layers)
        # For homogeneous strategies, where every slice has as many holders
        num_holders = len(strategy.schemes) * strategy.schemes[0].num_shards
        return max(_needed_share(slices, num_holders, node_size / self.num_devices,
                                 is_fully_sharded) for slices in nodes) * self.shape.num_params  # fmt: skip

    def hop_ms(self, scheme: Scheme, micro_batch_tokens: int) -> float:
        """One activation from a stage to the next; ranks of a node share its interconnect to the
        next node.
        """
        is_inside = scheme.num_devices <= self.hardware.devices_per_node
        hardware = self.hardware
        latency_ms = hardware.intra_node_latency_ms if is_inside else hardware.inter_node_latency_ms
        rate = hardware.group_rate(scheme.num_devices, is_shared=True)
        # A rank sends its own shard to the rank at its place in the next stage
        tokens = 1e3 * micro_batch_tokens / scheme.num_shards
        return latency_ms + tokens * self.shape.hidden_size * _PARAM_BYTES / rate


Slice = tuple[int, int, float, float]
"""(tp, TP slice, begin and end of the stage as shares of the model) that some rank of a node
holds.
"""


def _stages(scheme: Scheme, num_layers: int) -> list[tuple[float, float]]:
    """Begin and end of each stage as shares of the model; embedding and head count as spread over
    all of them.
    """
    ends = (
        [sum(scheme.stages[: k + 1]) / num_layers for k in range(scheme.pp)]
        if scheme.stages
        else []
    )
    ends = ends or [(k + 1) / scheme.pp for k in range(scheme.pp)]
    return list(zip([0.0, *ends], ends))


def _widest_slice(scheme: Scheme, num_layers: int) -> float:
    """Share of the model that a rank of the largest stage pulls; ranks of an SP group hold the
    same.
    """
    return max(end - begin for begin, end in _stages(scheme, num_layers)) / scheme.tp


def _slices_of_nodes(strategy: Strategy, node_size: int, num_layers: int) -> set[tuple[Slice, ...]]:
    """The slices that the ranks of each node hold, nodes with the same slices once."""
    nodes: dict[int, list[Slice]] = {}
    stages = {scheme: _stages(scheme, num_layers) for scheme in set(strategy.schemes)}
    for scheme, ranks in zip(strategy.schemes, strategy.place()):
        # Sequence shards of a stage hold the same slice
        for (stage, _, t), rank in zip(coordinates(scheme), ranks):
            nodes.setdefault(rank // node_size, []).append((scheme.tp, t, *stages[scheme][stage]))
    return {tuple(slices) for slices in nodes.values()}


def _needed_share(
    slices: Sequence[Slice], num_holders: int, node_share: float, is_fully_sharded: bool
) -> float:
    """Share of the model that a node needs and does not own; otherwise owned by the `num_holders`
    of a slice.
    """
    if not is_fully_sharded:
        return sum((1 - slices.count(s) / num_holders) * (s[3] - s[2]) / s[0] for s in set(slices))
    # On this grid slices of different TP are whole blocks, and what overlaps counts once
    num_columns = lcm(*(s[0] for s in slices))
    edges = sorted({edge for s in slices for edge in s[2:]})
    is_needed = np.zeros((len(edges) - 1, num_columns), dtype=bool)
    for tp, t, begin, end in set(slices):
        width = num_columns // tp
        is_needed[edges.index(begin) : edges.index(end), t * width : (t + 1) * width] = True
    # Shards are even, so a node owns its share of whatever it needs
    return float(is_needed.mean(axis=1) @ np.diff(edges)) * (1 - node_share)


def try_cluster(
    profile: Profile,
    num_devices: int,
    gradient_bytes: float = _PUSHED_BYTES,
    devices_per_node: int | None = None,
) -> Cluster | None:
    """`find_cluster` with pushed gradients of so many bytes and, where these are known, nodes of so
    many devices, or None where the profile does not describe its model well enough.

    From files alone, never from measured iterations, so that a resumed run chooses as the one
    before.
    """
    try:
        found = find_cluster(profile, num_devices)
        if found is None:
            return None
        hardware = found.hardware
        if devices_per_node is not None:
            # A smaller node has fewer adapters, too: as many a device
            share = min(1.0, devices_per_node / hardware.devices_per_node)
            across = share * hardware.inter_node_rate
            hardware = replace(hardware, devices_per_node=devices_per_node, inter_node_rate=across)
        return replace(found, gradient_bytes=gradient_bytes, hardware=hardware)
    except HydraConfigError as error:
        logger.info("pull and push do not count in the choice of strategies: %s", error)
        return None


def find_cluster(profile: Profile, num_devices: int, hardware: str | None = None) -> Cluster | None:
    """The cluster that `profile` was measured on, or the one named (a shipped description or a
    path).

    None where the profile's hardware has no description: communication between stages, pull and
    push then count nothing, and the commands say so. Raises HydraConfigError for a name that is not
    known, or a profile that does not describe its model.
    """
    if hardware is not None:
        described = Hardware.load(hardware)
    else:
        document = find_shipped_hardware(profile.document["hardware"].get("name"))
        if document is None:
            return None
        described = Hardware.from_json(document, source=document["name"])
    return Cluster(shape=model_shape(profile), hardware=described, num_devices=num_devices)


def model_shape(profile: Profile) -> ModelShape:
    """The decoder that `profile` belongs to; raises HydraConfigError naming the field that is
    missing.
    """
    model = profile.document["model"]
    names = ("num_layers", "hidden_size", "intermediate_size", "vocab_size")
    missing = [name for name in names if model.get(name) is None]
    if missing:
        raise HydraConfigError(
            f"profile {profile.name!r}: model.{missing[0]} is missing, which the bytes of pull and push need; "
            f"add it to the profile"
        )
    return ModelShape(
        **{name: model[name] for name in names},
        key_value_share=profile.memory.key_value_share,
        attention_width=model.get("attention_width", 0),
        norms_heads=bool(model.get("norms_heads")),
        experts=Experts(**model["experts"]) if model.get("experts") else None,
        layer=LayerMeans.from_json(model["layer"]) if model.get("layer") else None,
    )
