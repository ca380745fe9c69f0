"""Which buckets of a stage stream, and what of them has to be copied. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import NamedTuple

from ds_hydra.engine.parallel.one_f_one_b import Pass, one_forward_one_backward
from ds_hydra.engine.ranks.hosts import ALLOCATORS
from ds_hydra.errors import HydraConfigError
from ds_hydra.strategy import Scheme, Strategy
from ds_hydra.zero_link import ParamSpec, RankBuckets, Region

STREAM_WINDOW = 2
"""Slots in which copied slices of streamed layers take turns: of the layer that computes, and of
the next one.
"""


@dataclass(frozen=True, slots=True)
class Load:
    """One arrival of a layer in its slot, before use `use`; the slot is free once use `after` is
    over (-1: at once).
    """

    position: int
    use: int
    after: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """The layers of one stage whose copied slices take turns in slots: their buckets, and whether
    backward reads them.

    A layer's slot is its place among them modulo the window, so neighbours never share one.
    Backward does not come to layers below the first trained parameter.
    """

    buckets: tuple[int, ...] = ()
    has_backward: tuple[bool, ...] = ()

    @property
    def slot_of(self) -> dict[int, int]:
        """The slot of each bucket."""
        return {bucket: position % STREAM_WINDOW for position, bucket in enumerate(self.buckets)}

    def uses(self, passes: Iterable[Pass]) -> list[int]:
        """Positions of the layers in the order in which `passes` use them; one that is used twice
        in a micro-batch counts once.

        >>> window = Window(buckets=(1, 2, 3), has_backward=(True,) * 3)
        >>> window.uses([Pass.FORWARD, Pass.BACKWARD])
        [0, 1, 2, 1, 0]
        """
        forward = range(len(self.buckets))
        backward = [position for position in reversed(forward) if self.has_backward[position]]
        order = (p for pass_ in passes for p in (forward if pass_ is Pass.FORWARD else backward))
        return [position for position, _ in groupby(order)]


@dataclass(frozen=True, slots=True, kw_only=True)
class StageStreams:
    """Whether a stage's buckets stream, and which slices have to be copied."""

    is_streamed: bool = False
    """Whether gradients are added after every micro-batch."""
    window: Window = field(default_factory=Window)
    """The buckets that stream with slices that are copied, without the ones that share a
    parameter.
    """
    copied: frozenset[int] = frozenset()
    """Parameters that are copied: their slices are not in one piece."""


def check_streams(schemes: Sequence[Scheme], device_type: str) -> None:
    """Raise HydraConfigError where the layers of `schemes`, which all have some, cannot stream."""
    if schemes and device_type != "cpu" and device_type not in ALLOCATORS:
        raise HydraConfigError(
            f"scheme {schemes[0]}: streamed layers are read from memory that the ranks of a host share, which is "
            f"written for cpu and {', '.join(ALLOCATORS)}, not for {device_type}; leave stream out of "
            "hydra.strategies, and let ckpt, or more TP or PP, save the memory"
        )


class HomeBytes(NamedTuple):
    """What one rank has of a home: its part of the weights, and of the sums beside the fp32
    gradient shards that every engine has.
    """

    weights: int
    sums: int


def home_bytes(specs: Sequence[ParamSpec], itemsize: int, num_ranks: int) -> HomeBytes:
    """Of a home that `num_ranks` ranks share; sums take 8 bytes an element and 4 a row of a
    parameter.

    >>> home_bytes([ParamSpec(fqn="w", shape=(8, 4))], 2, 4)
    HomeBytes(weights=16, sums=40)
    """
    padded = [spec.shard_numel(num_ranks) * num_ranks for spec in specs]
    summed = [(n, s.num_rows) for n, s in zip(padded, specs, strict=True) if s.requires_grad]
    owned = sum(numel for numel, _ in summed) // num_ranks
    sums = sum(8 * numel + 4 * rows for numel, rows in summed) // num_ranks - 4 * owned
    return HomeBytes(sum(padded) * itemsize // num_ranks, sums)


def is_in_one_piece(spec: ParamSpec, region: Region) -> bool:
    """Whether a slice is a contiguous part of its parameter, or empty."""
    return not region.numel or region.num_cols == spec.num_cols or region.num_rows == 1


def copied_params(
    specs: Sequence[ParamSpec], buckets: RankBuckets, *, has_views: bool
) -> frozenset[int]:
    """Parameters among `buckets` that are copied: where a home `has_views`, as on the CPU, those
    whose slices are not in one piece.
    """
    refs = [ref for bucket in buckets for ref in bucket if ref.region.numel]
    return frozenset(
        r.param for r in refs if not (has_views and is_in_one_piece(specs[r.param], r.region))
    )


def only_copied(buckets: RankBuckets, copied: frozenset[int]) -> RankBuckets:
    """`buckets` with nothing but what is copied."""
    return tuple(tuple(ref for ref in bucket if ref.param in copied) for bucket in buckets)


def count_addends(strategy: Strategy, num_micro_batches: Sequence[int]) -> int:
    """At most how many addends an element gets where pipelines have `num_micro_batches`
    micro-batches.

    Each rank of a stage adds after every micro-batch, or once; tied embeddings are in two stages.

    >>> count_addends(Strategy.parse("1x<2,1> + 1x<1,1>"), [3, 4])
    10
    """
    of_pipelines = zip(strategy.schemes, num_micro_batches, strict=True)
    return max(
        1,
        sum(s.ranks_per_stage * min(s.pp, 2) * micro_batches for s, micro_batches in of_pipelines),
    )


def stage_passes(
    num_stages: int, stage: int, num_micro_batches: int, *, training: bool
) -> list[Pass]:
    """What a stage does in one iteration, in order."""
    if not training:
        return [Pass.FORWARD] * num_micro_batches
    return [pass_ for pass_, _ in one_forward_one_backward(num_stages, stage, num_micro_batches)]


def plan_loads(uses: Sequence[int]) -> list[Load]:
    """Every arrival that `uses` need, in order, each as early as its slot allows.

    Turning from forward to backward finds the last layers still in their slots, and back again the
    first ones.

    >>> [load.position for load in plan_loads([0, 1, 2, 1, 0])]
    [0, 1, 2, 0]
    """
    content = [-1] * STREAM_WINDOW
    last_use = [-1] * STREAM_WINDOW
    loads = []
    for use, position in enumerate(uses):
        slot = position % STREAM_WINDOW
        if content[slot] != position:
            loads.append(Load(position, use, last_use[slot]))
            content[slot] = position
        last_use[slot] = use
    return loads
