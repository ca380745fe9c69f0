"""Other equations of HexiScale's App. B on any cluster: Eqs. 2, 4, 7 and 9, and where the
originals' code differs.

Seconds and bytes. `passes` is 96 with activation recomputation, 72 without. Equations are literal.
"""

from __future__ import annotations

from collections.abc import Sequence

from ds_hydra.strategy.cost_models.topology import (
    Interconnects,
    LayerShape,
    slowest_sum_s,
    spread_s,
)


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
