"""Cost of communication, computation and memory on nodes that may differ: HexiScale, App. B, Eqs. 1
to 4, 7 and 9, and where the originals' code differs.

Seconds and bytes: a latency and a bandwidth between every pair of devices. `passes` of
communication is 12 with activation recomputation, 8 without; of computation 96 and 72. Equations
are literal.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

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


def data_parallel_s(
    interconnects: Interconnects, devices: Sequence[int], shape: LayerShape
) -> float:
    """COMM-DP-LAYER, Eq. 2, for the devices that hold one layer."""
    share = 12 * shape.hidden_size**2 * shape.type_bytes / len(devices)
    return 2 * slowest_sum_s(interconnects, devices, share)


def released_pipeline_hop_s(
    interconnects: Interconnects,
    stage: Sequence[int],
    following: Sequence[int],
    shape: LayerShape,
) -> float:
    """The originals' code in place of Eq. 3: the factor 2, forward and backward, covers the
    broadcast too, and the receiver is chosen for the sum.
    """
    return 2 * min(
        interconnects.transfer_s(d, e, shape.activation_bytes)
        + spread_s(interconnects, e, following, shape)
        for d in stage
        for e in following
    )


def compute_s(
    flops: Sequence[float], shape: LayerShape, *, passes: int = 96, head_share: float = 0.0
) -> float:
    """COMP-TP-LAYER, Eq. 4, on devices of `flops` FLOP/s each. `head_share` is V / (16 L H) in
    the originals' code, 0 in their text.
    """
    hidden, tokens = shape.hidden_size, shape.num_tokens
    needed = (
        passes * shape.micro_batch * tokens * hidden**2 * (1 + tokens / (6 * hidden) + head_share)
    )
    return float(needed / (min(flops) * len(flops)))


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
