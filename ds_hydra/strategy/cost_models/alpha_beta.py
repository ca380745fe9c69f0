"""What communication and computation cost on any cluster: HexiScale App. B, Eqs. 1-9, as pure
functions.

Seconds and bytes. A cluster is given by its own latency and bandwidth between every pair of
devices, so nodes may differ. `passes` is 12 (collectives) or 96 (FLOPs) with activation
recomputation, 8 or 72 without. Equations are literal; where the originals' code differs a parameter
says so.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ds_hydra.errors import HydraConfigError

FloatArray = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Interconnects:
    """`latency_s[d, e]` is alpha, `bytes_per_s[d, e]` beta, `flops[d]` c of Table 1."""

    latency_s: FloatArray
    bytes_per_s: FloatArray
    flops: FloatArray

    def __post_init__(self) -> None:
        num_devices = self.flops.size
        if (
            self.latency_s.shape != (num_devices, num_devices)
            or self.bytes_per_s.shape != self.latency_s.shape
        ):
            raise HydraConfigError(
                f"the topology has {num_devices} devices, latencies {self.latency_s.shape} and bandwidths "
                f"{self.bytes_per_s.shape}; give one row and column for each device"
            )
        between = ~np.eye(num_devices, dtype=bool)
        if not (np.isfinite(self.flops).all() and (self.flops > 0).all()):
            raise HydraConfigError("the topology has a device whose FLOP/s are not above 0")
        if not (self.bytes_per_s[between] > 0).all() or not (self.latency_s >= 0).all():
            raise HydraConfigError(
                "the topology has an interconnect whose bandwidth is not above 0, or whose latency is negative"
            )

    def transfer_s(self, source: int, target: int, num_bytes: float) -> float:
        """alpha + bytes / beta."""
        return float(self.latency_s[source, target] + num_bytes / self.bytes_per_s[source, target])


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerShape:
    """H, S, B_mb, B_type of Table 1; `vocab_size` and `num_layers` only for the originals'
    FLOPs.
    """

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
    return passes * _slowest_sum(interconnects, devices, share)


def data_parallel_s(
    interconnects: Interconnects, devices: Sequence[int], shape: LayerShape
) -> float:
    """COMM-DP-LAYER, Eq. 2, for the devices that hold one layer."""
    share = 12 * shape.hidden_size**2 * shape.type_bytes / len(devices)
    return 2 * _slowest_sum(interconnects, devices, share)


def _slowest_sum(interconnects: Interconnects, devices: Sequence[int], num_bytes: float) -> float:
    return max(
        sum(interconnects.transfer_s(d, e, num_bytes) for e in devices if e != d) for d in devices
    )


def pipeline_hop_s(
    interconnects: Interconnects,
    stage: Sequence[int],
    following: Sequence[int],
    shape: LayerShape,
    *,
    doubles_broadcast: bool = False,
) -> float:
    """COMM-PP-HOP, Eq. 3: send to the nearest device of the next stage, which spreads it there.

    `doubles_broadcast`: as in the originals' code the factor 2, forward and backward, covers the
    broadcast too, and the receiver is chosen for the sum.
    """
    size = shape.activation_bytes

    def send(source: int, target: int) -> float:
        return interconnects.transfer_s(source, target, size)

    def spread(source: int) -> float:
        return sum(
            interconnects.transfer_s(source, e, size / len(following))
            for e in following
            if e != source
        )

    pairs = [(d, e) for d in stage for e in following]
    if doubles_broadcast:
        return 2 * min(send(d, e) + spread(e) for d, e in pairs)
    source, target = min(pairs, key=lambda pair: send(*pair))
    return 2 * send(source, target) + spread(target)


def compute_s(
    interconnects: Interconnects,
    devices: Sequence[int],
    shape: LayerShape,
    *,
    passes: int = 96,
    head_share: float = 0.0,
) -> float:
    """COMP-TP-LAYER, Eq. 4. `head_share` is V / (16 L H) in the originals' code, 0 in their
    text.
    """
    hidden, tokens = shape.hidden_size, shape.num_tokens
    flops = (
        passes * shape.micro_batch * tokens * hidden**2 * (1 + tokens / (6 * hidden) + head_share)
    )
    return float(flops / (min(interconnects.flops[d] for d in devices) * len(devices)))


def pipeline_s(
    stage_s: Sequence[float],
    hop_s: Sequence[float],
    num_micro_batches: int,
    *,
    skips_first: bool = True,
) -> float:
    """PIPELINE-TIME, Eq. 7; `skips_first` takes the slowest stage from j = 2 on, as it is
    printed.
    """
    both = [stage + hop for stage, hop in zip(stage_s, hop_s)]
    slowest = max(both[1:] if skips_first and len(both) > 1 else both)
    return sum(both) + (num_micro_batches - 1) * slowest


def pipeline_columns_s(
    stage_s: Sequence[float], hop_s: Sequence[float], num_micro_batches: int
) -> float:
    """The originals' code in place of Eq. 7: each column of the schedule lasts as its slowest
    active stage.
    """
    both = [stage + hop for stage, hop in zip(stage_s, hop_s)]
    num_stages = len(both)
    columns = range(num_micro_batches + num_stages - 1)
    return sum(
        max(both[j] for j in range(num_stages) if 0 <= column - j < num_micro_batches)
        for column in columns
    )


def memory_bytes(num_devices: int, num_layers: int, shape: LayerShape) -> float:
    """MEM-CUMSUM, Eq. 9, with its first term for each layer of the stage."""
    states = 48 * shape.hidden_size**2 * shape.type_bytes / num_devices
    return num_layers * states + shape.activation_bytes
