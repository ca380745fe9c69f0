"""A cluster described by its nodes and interconnects, and the cost of a pipeline's communication on
it.

The file is a `ds_hydra.topology/1`:

    {"schema": "ds_hydra.topology/1",
     "nodes": [{"count": 4, "num_devices": 8, "device": "A800", "latency_s": 1e-5, "bytes_per_s":
     2e11}], "between_nodes": {"latency_s": 2e-5, "bytes_per_s": 2.5e10}}

`bytes_per_s` is what one device gets in one direction. Devices are numbered node by node.

What communication costs on it is HexiScale App. B, Eqs. 1 and 3, in seconds and bytes: a latency
and a bandwidth between every pair of devices, so nodes may differ. `passes` is 12 with activation
recomputation, 8 without. Equations are literal; those that no profile needs are in
`ds_hydra/lab/alpha_beta.py`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ds_hydra.configs.files import (
    MAX_DEVICES,
    MAX_PAIRED_DEVICES,
    check_object,
    read_count,
    read_json_object,
    read_list,
    read_number,
    read_object,
    read_text,
    reading,
)
from ds_hydra.errors import HydraConfigError
from ds_hydra.strategy.schemes.placement import stage_hops, tp_groups
from ds_hydra.strategy.schemes.scheme import Scheme, Strategy

FloatArray = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Interconnects:
    """`latency_s[d, e]` is alpha, `bytes_per_s[d, e]` beta of Table 1."""

    latency_s: FloatArray
    bytes_per_s: FloatArray

    def transfer_s(self, source: int, target: int, num_bytes: float) -> float:
        """alpha + bytes / beta."""
        return float(self.latency_s[source, target] + num_bytes / self.bytes_per_s[source, target])


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerShape:
    """H, S, B_mb, B_type of Table 1."""

    hidden_size: int
    num_tokens: int
    micro_batch: int = 1
    type_bytes: int = 2

    @property
    def activation_bytes(self) -> float:
        """B_mb S H B_type."""
        return float(self.micro_batch * self.num_tokens * self.hidden_size * self.type_bytes)


def tensor_parallel_s(
    interconnects: Interconnects, devices: Sequence[int], shape: LayerShape, passes: int = 12
) -> float:
    """COMM-TP-LAYER, Eq. 1."""
    share = shape.activation_bytes / len(devices)
    return passes * slowest_sum_s(interconnects, devices, share)


def slowest_sum_s(interconnects: Interconnects, devices: Sequence[int], num_bytes: float) -> float:
    """The device that takes longest to send `num_bytes` to each of the others."""
    return max(
        sum(interconnects.transfer_s(d, e, num_bytes) for e in devices if e != d) for d in devices
    )


def pipeline_hop_s(
    interconnects: Interconnects,
    stage: Sequence[int],
    following: Sequence[int],
    shape: LayerShape,
) -> float:
    """COMM-PP-HOP, Eq. 3: send to the nearest device of the next stage, which spreads it there."""
    size = shape.activation_bytes

    def send(pair: tuple[int, int]) -> float:
        return interconnects.transfer_s(*pair, size)

    source, target = min(((d, e) for d in stage for e in following), key=send)
    return 2 * send((source, target)) + spread_s(interconnects, target, following, shape)


def spread_s(
    interconnects: Interconnects, source: int, devices: Sequence[int], shape: LayerShape
) -> float:
    """The broadcast of Eq. 3: `source` gives each other one of `devices` its share of the
    activations.
    """
    share = shape.activation_bytes / len(devices)
    return sum(interconnects.transfer_s(source, e, share) for e in devices if e != source)


TOPOLOGY_SCHEMA = "ds_hydra.topology/1"
_HINT = (
    "; a node has num_devices, device, latency_s, bytes_per_s and optionally count, and 'between_nodes' "
    "has the two rates"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class InterconnectRate:
    """Latency in seconds and rate in bytes per second of one direction."""

    latency_s: float
    bytes_per_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """Devices of one kind and the interconnect between any two of them."""

    num_devices: int
    device: str
    inside: InterconnectRate


@dataclass(frozen=True, slots=True, kw_only=True)
class Topology:
    """Nodes in the order of their ranks, and the interconnect between any two of them; nodes may
    differ.
    """

    nodes: tuple[Node, ...]
    between: InterconnectRate
    source: str

    @property
    def num_devices(self) -> int:
        """Devices of all nodes."""
        return sum(node.num_devices for node in self.nodes)

    def check_one_kind(self) -> None:
        """Raise HydraConfigError for nodes with different devices, whose compute one device cannot
        tell.
        """
        kinds = sorted({node.device for node in self.nodes})
        if len(kinds) > 1:
            raise HydraConfigError(
                f"{self.source} has nodes of different devices ({', '.join(kinds)}), and one device can only be "
                "measured for its own kind; start ds-hydra profile on all ranks of that cluster, which measures "
                "every scheme as it is, or profile each kind with a topology of its own"
            )

    def interconnects(self) -> Interconnects:
        """Latency and rate between every pair of devices."""
        node_of = np.repeat(np.arange(len(self.nodes)), [node.num_devices for node in self.nodes])
        is_inside = node_of[:, None] == node_of[None, :]
        inside_latency = np.array([node.inside.latency_s for node in self.nodes])[node_of]
        inside_rate = np.array([node.inside.bytes_per_s for node in self.nodes])[node_of]
        return Interconnects(
            latency_s=np.where(is_inside, inside_latency[:, None], self.between.latency_s),
            bytes_per_s=np.where(is_inside, inside_rate[:, None], self.between.bytes_per_s),
        )

    @classmethod
    def from_json(cls, document: Mapping[str, Any], *, source: str = "topology") -> Topology:
        """The topology in a `ds_hydra.topology/1` document; raises HydraConfigError naming the
        error.
        """
        with reading(document, TOPOLOGY_SCHEMA, source, _HINT):
            nodes: list[Node] = []
            num_devices = 0
            for listed in read_list(document, "nodes"):
                entry = check_object(listed, "a node")
                count = read_count({"count": 1, **entry}, "count", least=1, most=MAX_DEVICES)
                node = Node(
                    num_devices=read_count(entry, "num_devices", least=1, most=MAX_DEVICES),
                    device=read_text(entry, "device"),
                    inside=_read_rate(entry),
                )
                num_devices += count * node.num_devices
                if num_devices > MAX_PAIRED_DEVICES:
                    raise HydraConfigError(
                        f"there are {num_devices} devices or more, expected at most {MAX_PAIRED_DEVICES}, between "
                        "each two of which there is a rate"
                    )
                nodes += [node] * count
            if not nodes:
                raise HydraConfigError("there is no node")
            between = _read_rate(read_object(document, "between_nodes"))
            return cls(nodes=tuple(nodes), between=between, source=source)

    @classmethod
    def load(cls, path: str | Path) -> Topology:
        """The topology in the JSON file `path`."""
        return cls.from_json(read_json_object(path), source=str(path))


def _read_rate(entry: Mapping[str, Any]) -> InterconnectRate:
    return InterconnectRate(
        latency_s=read_number(entry, "latency_s", least=0),
        bytes_per_s=read_number(entry, "bytes_per_s", least=1),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class StageParts:
    """Milliseconds of one micro-batch on one device of a scheme: the compute of a layer, and of
    embedding and head.
    """

    layer_ms: float
    ends_ms: float


def stage_ms(
    scheme: Scheme,
    parts: StageParts,
    interconnects: Interconnects,
    shape: LayerShape,
    *,
    num_layers: int,
    passes: int,
    cuts_micro_batches: bool = False,
) -> float:
    """T(l, scheme) from measured compute and computed communication.

    Communication is that of the slowest group of the cluster when it is filled with pipelines of
    `scheme`: `passes` / 2 all-reduces of the activations for each layer (Eq. 1 of HexiScale App. B;
    8 passes, 12 with activation checkpointing), one after the embedding, one before the head's
    input, and a send and a receive between the same ranks of neighbouring stages (Eq. 3 without its
    broadcast). Where TP `cuts_micro_batches`, an all-gather and a reduce-scatter are the two passes
    of an all-reduce, each block gathers once more in backward (10 or 14 passes for a layer, one
    more before the head), and stages hand on 1 / TP of a micro-batch. Stages have unequal work, so
    T is what the profiler measures: the time of PP micro-batches through 1F1B over 2 PP - 1.
    """
    reduce_ms = 1e3 * _slowest_all_reduce_s(interconnects, scheme, shape)
    handed_on = (
        replace(shape, num_tokens=-(-shape.num_tokens // scheme.tp))
        if cuts_micro_batches
        else shape
    )
    hop_ms = 1e3 * _slowest_hop_s(interconnects, scheme, handed_on)
    before_head_ms = reduce_ms * (1.5 if cuts_micro_batches else 1.0)
    base, extra = divmod(num_layers, scheme.pp)
    stages = [
        (base + (stage < extra)) * (parts.layer_ms + passes / 2 * reduce_ms)
        + (reduce_ms if stage == 0 else 0.0)
        + (parts.ends_ms + before_head_ms if stage == scheme.pp - 1 else hop_ms)
        for stage in range(scheme.pp)
    ]
    return ((scheme.pp - 1) * max(stages) + sum(stages)) / (2 * scheme.pp - 1)


def _slowest_all_reduce_s(interconnects: Interconnects, scheme: Scheme, shape: LayerShape) -> float:
    """One all-reduce of a micro-batch, two passes of Eq. 1, in the slowest TP group."""
    if scheme.tp == 1:
        return 0.0
    groups = {
        group for ranks in _pipelines(interconnects, scheme) for group in tp_groups(scheme, ranks)
    }
    return max(tensor_parallel_s(interconnects, group, shape, passes=2) for group in groups)


def _slowest_hop_s(interconnects: Interconnects, scheme: Scheme, shape: LayerShape) -> float:
    """Activations to the next stage and their gradient back, between the slowest pair of ranks."""
    if scheme.pp == 1:
        return 0.0
    return max(
        pipeline_hop_s(interconnects, [rank], [following], shape)
        for ranks in _pipelines(interconnects, scheme)
        for rank, following in stage_hops(scheme, ranks)
    )


def _pipelines(interconnects: Interconnects, scheme: Scheme) -> Sequence[tuple[int, ...]]:
    return Strategy.alike(scheme, len(interconnects.latency_s)).place()
