"""Inputs of the search about a model's layers and a cluster's interconnects, the hybrid strategies
of one layer, and the cost of a layer under each.

Times are milliseconds, sizes MB (2^20 bytes), batch sizes samples. Heterogeneous models
(encoder-decoder, Swin) are several layer types in order, each with its count.

[Note: Decision trees] Galvatron-BMW, §III-B. A tree splits N devices into PP stages, then the N /
PP devices of a stage level by level: each level applies one of DP, SDP (ZeRO-3) and TP at a power
of two, no paradigm twice. The order of the levels says whose groups are runs of neighbouring
devices. Activation checkpointing doubles the set.

[Note: What one layer costs] Galvatron-BMW, §III-A and §V. For a micro-batch of b samples on a
stage, with f = forward_ms, d = DP or SDP degree, n = TP degree:

    forward      f b / (d n) + 2 all-reduces of TP + one all-gather of sharded weights
    backward     2 f b / (d n) + 2 all-reduces of TP, one forward again where the layer checkpoints
    gradients    one all-reduce (DP) or reduce-scatter (SDP) in the last micro-batch, with one
                 all-gather in every one (SDP): they run beside the backward computation, and both
                 are slower for as long as they do

Sums are literal except for one rule of the originals' code: a TP group of at least half the stage
leaves only half of the backward computation to overlap with.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from itertools import permutations

from ds_hydra.errors import HydraConfigError
from ds_hydra.strategy.cost_models.analytic import Hardware
from ds_hydra.strategy.profiles.memory_model import EMBEDDING_BYTES_PER_ELEMENT
from ds_hydra.strategy.profiles.profile import Profile

OVERLAP_SLOWDOWN = 1.3
"""Slowdown where it was not measured: Galvatron-BMW's own (§V)."""
MB = float(1 << 20)
_STATE_BYTES = 16.0
"""Bytes of one parameter: 16-bit weight and gradient, fp32 weight and two Adam moments."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerProfile:
    """One type of layer: its computation, kept activations and exchanges."""

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
    message_mb: float
    """The layer's input for one sample, sequence x hidden x bytes of an element: what an all-reduce
    of the TP group moves, and what checkpointing keeps.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class EndProfile:
    """Embedding (first stage) or head (last stage)."""

    states_mb: float = 0.0
    activation_mb: float = 0.0
    """MB for one sample of a micro-batch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchInput:
    """Layers in order and the cluster they run on."""

    layers: Sequence[LayerProfile]
    num_devices: int
    all_reduce_ms_per_mb: Mapping[int, Mapping[tuple[int, bool], float]]
    """[PP degree][group size, consecutive devices]; of the volume 2 (n - 1) / n x message."""
    point_to_point_ms_per_mb: Mapping[int, float]
    """Milliseconds per MB between neighbouring stages, by PP degree."""
    embedding: EndProfile = field(default_factory=EndProfile)
    head: EndProfile = field(default_factory=EndProfile)
    context_mb: float = 0.0
    """MB of a device before any model: communicators, kernels, allocator."""
    overlap_slowdown: float = OVERLAP_SLOWDOWN
    """Slowdown of computation and gradient synchronisation at the same time (§V)."""

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
                f"profile {profile.name!r} does not say model.intermediate_size; add it"
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


class Paradigm(str, Enum):
    """Paradigm by which one level of a decision tree divides the devices below it."""

    DP = "DP"
    SDP = "SDP"
    TP = "TP"


@dataclass(frozen=True, slots=True)
class LayerStrategy:
    """Strategy of one layer on its N / PP devices: levels (paradigm, degree) from outer to
    inner.

    As text `PP-TP-DP`: `*` follows the degree whose groups are consecutive devices (only where both
    TP and DP divide the stage), `f` marks SDP, `-c` checkpointing: `1-2*-4f-c`.
    """

    pp: int
    levels: tuple[tuple[Paradigm, int], ...] = ()
    checkpoints: bool = False

    @property
    def tp(self) -> int:
        """Tensor parallel degree."""
        return self._degree(Paradigm.TP)

    @property
    def dp(self) -> int:
        """Data parallel degree, sharded or not: by what the batch is divided."""
        return self._degree(Paradigm.DP) * self._degree(Paradigm.SDP)

    @property
    def sdp(self) -> int:
        """Degree by which sharding divides the model states."""
        return self._degree(Paradigm.SDP)

    @property
    def num_devices(self) -> int:
        """PP x TP x DP."""
        return self.pp * self.tp * self.dp

    @property
    def is_tp_consecutive(self) -> bool:
        """Whether a TP group is a run of neighbouring devices, as it is without any DP.

        The trees of the originals read so: TP above DP means consecutive TP groups.
        """
        order = [paradigm for paradigm, _ in self.levels]
        return self.dp == 1 or Paradigm.TP not in order or order[0] is Paradigm.TP

    @property
    def is_dp_consecutive(self) -> bool:
        """Whether a data parallel group is a run of neighbouring devices."""
        return self.tp == 1 or not self.is_tp_consecutive

    @property
    def layout(self) -> tuple[int, int, bool]:
        """Layout of the layer's activations: (TP, DP, consecutive TP groups)."""
        return self.tp, self.dp, self.is_tp_consecutive

    def __str__(self) -> str:
        both = self.tp > 1 and self.dp > 1
        tp = f"{self.tp}{'*' if both and self.is_tp_consecutive else ''}"
        sharded = "f" if self.sdp > 1 else ""
        dp = f"{self.dp}{sharded}{'*' if both and not self.is_tp_consecutive else ''}"
        return f"{self.pp}-{tp}-{dp}{'-c' if self.checkpoints else ''}"

    def _degree(self, paradigm: Paradigm) -> int:
        return next((degree for found, degree in self.levels if found is paradigm), 1)


def layer_strategies(
    num_devices: int,
    *,
    checkpoints: bool = True,
    mixes_dp_and_sdp: bool = False,
) -> list[LayerStrategy]:
    """Every strategy of one layer on `num_devices` devices, for all PP degrees.

    `mixes_dp_and_sdp` keeps the trees that Takeaway #3 drops: SDP alone beats a mixture of both. On
    8 devices: 68 strategies before, 44 after Takeaway #3, 22 without checkpointing. Raises
    HydraConfigError where `num_devices` is not a power of two.
    """
    if num_devices < 1 or num_devices & (num_devices - 1):
        raise HydraConfigError(
            f"the search divides devices into halves, {num_devices} is not a power of two; give "
            f"{1 << max(num_devices, 1).bit_length() - 1} or {1 << max(num_devices, 1).bit_length()} devices"
        )
    strategies = []
    for pp in _powers_of_two(num_devices):
        for levels in _trees(num_devices // pp):
            mixes = {Paradigm.DP, Paradigm.SDP} <= {paradigm for paradigm, _ in levels}
            if mixes and not mixes_dp_and_sdp:
                continue
            strategies.append(LayerStrategy(pp, levels))
            if checkpoints:
                strategies.append(LayerStrategy(pp, levels, checkpoints=True))
    return strategies


def _trees(num_devices: int) -> Iterator[tuple[tuple[Paradigm, int], ...]]:
    """Ordered levels of distinct paradigms whose degrees multiply to `num_devices`."""
    for height in range(len(Paradigm) + 1):
        for order in permutations(sorted(Paradigm), height):
            for degrees in _factors(num_devices, height):
                yield tuple(zip(order, degrees, strict=True))


def _factors(product: int, count: int) -> Iterator[tuple[int, ...]]:
    """Ordered `count` powers of two of at least 2 with this product."""
    if count == 0:
        if product == 1:
            yield ()
        return
    for first in _powers_of_two(product)[1:]:
        for rest in _factors(product // first, count - 1):
            yield (first, *rest)


def _powers_of_two(largest: int) -> list[int]:
    return [1 << k for k in range(largest.bit_length())]


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerCost:
    """Milliseconds and MB of one layer on one rank for one micro-batch."""

    compute_ms: float
    """Forward and backward without synchronising gradients: C_no_grad_sync of Eq. 9."""
    slowdown_ms: float
    """Milliseconds that synchronising gradients beside it adds to the last micro-batch."""
    tail_ms: float
    """Milliseconds of that synchronisation after the backward pass."""
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
        if tp not in layer.activation_mb:
            raise HydraConfigError(
                f"layer {layer.name!r} has no activation_mb for TP {tp}, it has TP {sorted(layer.activation_mb)}; "
                "profile it, or search fewer devices"
            )
        mine = samples / dp
        forward = layer.forward_ms * mine / tp
        backward = 2 * forward
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
        whole, kept = layer.activation_mb[tp] * mine, layer.message_mb * mine
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
        """Milliseconds until the computation ends, and of the communication that is left then.

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
