"""What communication costs on any cluster: HexiScale App. B, Eqs. 1 and 3, as pure functions.

Seconds and bytes. A cluster is given by its own latency and bandwidth between every pair of
devices, so nodes may differ. `passes` is 12 with activation recomputation, 8 without. Equations are
literal; those that no profile needs are in `ds_hydra/lab/alpha_beta.py`.
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
