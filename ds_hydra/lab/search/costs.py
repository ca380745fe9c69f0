"""What one layer costs under one strategy: Galvatron-BMW §III-A and §V.

For a micro-batch of b samples on a stage, with f = forward_ms, d = DP or SDP degree, n = TP degree:

    forward      f b / (d n) + 2 all-reduces of TP + one all-gather of sharded weights
    backward     2 f b / (d n) + 2 all-reduces of TP, one forward again where the layer checkpoints
    gradients    one all-reduce (DP) or reduce-scatter (SDP) in the last micro-batch, with one
                 all-gather in every one (SDP): they run beside the backward computation, and both
                 are slower for as long as they do

Sums are literal except for one rule of the originals' code: a TP group of at least half the stage
leaves only half of the backward computation to overlap with.
"""

from __future__ import annotations

from dataclasses import dataclass

from ds_hydra.errors import HydraConfigError
from ds_hydra.lab.search.layers import LayerProfile, SearchInput
from ds_hydra.lab.search.space import LayerStrategy


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerCost:
    """Milliseconds and MB of one layer on one rank for one micro-batch."""

    compute_ms: float
    """Forward and backward without synchronising gradients: C_no_grad_sync of Eq. 9."""
    slowdown_ms: float
    """What the last micro-batch takes longer, because gradients are synchronised beside it."""
    tail_ms: float
    """What is left of that synchronisation when the backward pass is over."""
    forward_mb: float
    """O_f: kept from forward to backward."""
    backward_mb: float
    """O_b: needed only while this layer runs backward."""
    states_mb: float
    """O_ms: weights, gradients, optimizer states."""


class CostEstimator:
    """Costs from measured (or predicted) layer profiles and interconnect speeds."""

    def __init__(self, given: SearchInput):
        self._given = given

    def layer_cost(self, layer: LayerProfile, strategy: LayerStrategy, samples: float) -> LayerCost:
        """Raises HydraConfigError where the profile lacks the TP degree or the cluster the
        group.
        """
        tp, dp, sdp = strategy.tp, strategy.dp, strategy.sdp
        for key, sizes in (
            ("activation_mb", layer.activation_mb),
            ("boundary_mb", layer.boundary_mb),
        ):
            if tp not in sizes:
                raise HydraConfigError(
                    f"layer {layer.name!r} has no {key} for TP {tp}, it has TP {sorted(sizes)}; profile "
                    f"it, or search fewer devices"
                )
        mine = samples / dp
        forward = layer.forward_ms * mine / tp
        backward = forward * self._given.backward_over_forward
        all_reduces = 6 if strategy.checkpoints else 4
        exchanged = all_reduces * self._all_reduce_ms(
            strategy, layer.message_mb * mine, tp, is_tp=True
        )
        if strategy.checkpoints:
            backward += forward
        gradients = self._all_reduce_ms(strategy, layer.weight_mb / tp, dp, is_tp=False)
        # All-gather or reduce-scatter: half an all-reduce
        gathered = gradients / 2 if sdp > 1 else 0.0
        reduced = gradients - gathered
        hides = 0.5 if dp > 1 and tp > 1 and tp >= dp else 1.0
        every = 1.0 if self._given.gathers_each_micro_batch else 0.0
        quiet = every * gathered + sum(self._overlapped(backward, every * gathered, hides))
        synced, tail = self._overlapped(backward, gathered + reduced, hides)
        added = gathered + synced + tail - quiet
        slowdown = max(0.0, gathered + synced - quiet)
        whole, kept = layer.activation_mb[tp] * mine, layer.boundary_mb[tp] * mine
        gathers_mb = layer.weight_mb / tp * (1 - 1 / sdp)
        return LayerCost(
            compute_ms=forward + quiet + exchanged,
            slowdown_ms=slowdown,
            tail_ms=added - slowdown,
            forward_mb=kept if strategy.checkpoints else whole,
            backward_mb=(whole - kept if strategy.checkpoints else 0.0) + gathers_mb,
            states_mb=layer.states_mb / tp / sdp,
        )

    def transformation_ms(
        self, layer: LayerProfile, before: LayerStrategy, after: LayerStrategy, samples: float
    ) -> float:
        """Slice-Gather (§VI): a rank gathers the samples it lacks, in one direction of the two
        passes.

        Where TP grows that is forward, where it shrinks backward; slicing is free. Other groups of
        the same size: all samples but the share that stays.
        """
        if before.layout == after.layout:
            return 0.0
        wide = after if after.tp >= before.tp else before
        mine_mb = layer.message_mb * samples / wide.dp
        common = min(before.tp, after.tp) / wide.tp if before.tp != after.tp else 1 / wide.tp
        missing_mb = mine_mb * (1 - common)
        return missing_mb * self._ms_per_mb(wide, wide.tp, is_tp=True)

    def hop_ms(self, layer: LayerProfile, pp: int, samples: float) -> float:
        """Activations to the next stage and gradients back, for one micro-batch of `samples` on a
        rank.
        """
        if pp == 1:
            return 0.0
        if pp not in self._given.point_to_point_ms_per_mb:
            raise HydraConfigError(f"there is no point_to_point_ms_per_mb for PP {pp}; measure it")
        return 2 * layer.message_mb * samples * self._given.point_to_point_ms_per_mb[pp]

    def _overlapped(
        self, compute: float, communication: float, share: float
    ) -> tuple[float, float]:
        """Until the computation ends, and what of the communication is left then.

        Both begin together; while both run each takes `overlap_slowdown` times as long (§V).
        """
        together = min(compute * share, communication)
        return compute + together * (self._given.overlap_slowdown - 1), communication - together

    def _all_reduce_ms(
        self, strategy: LayerStrategy, message_mb: float, size: int, *, is_tp: bool
    ) -> float:
        if size == 1:
            return 0.0
        return 2 * (size - 1) / size * message_mb * self._ms_per_mb(strategy, size, is_tp=is_tp)

    def _ms_per_mb(self, strategy: LayerStrategy, size: int, *, is_tp: bool) -> float:
        consecutive = strategy.is_tp_consecutive if is_tp else strategy.is_dp_consecutive
        groups = self._given.all_reduce_ms_per_mb.get(strategy.pp, {})
        if size == 1:
            return 0.0
        if (size, consecutive) not in groups and size * strategy.pp == self._given.num_devices:
            consecutive = True  # the whole stage: there is only one such group
        if (size, consecutive) not in groups:
            raise HydraConfigError(
                f"there is no all_reduce_ms_per_mb for PP {strategy.pp} and groups of {size}"
                f"{'' if consecutive else ' strided'} devices; measure it"
            )
        return groups[size, consecutive]
