"""Which layers of a stage are dropped and pulled again, when, and in which order. Pure.

Under `hydra.link.repull_layers` the slices of some layers of a stage share `REPULL_WINDOW` pieces of memory, its
slots. A layer's slot is its place among those layers modulo the window, so neighbours never share one: while one
layer computes, the next one arrives. 1F1B says in which order a stage uses its layers; whoever knows the plan of the
iteration knows that order for every rank, and with it what each rank will need again.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Literal

from ds_hydra.configs.hydra_config import REPULL_WINDOW
from ds_hydra.engine.pipeline import Pass, one_forward_one_backward
from ds_hydra.errors import HydraConfigError
from ds_hydra.strategy import Scheme
from ds_hydra.zero_link import LinkPlan, RankBuckets
from ds_hydra.zero_link.buffers import ALIGNMENT_BYTES


@dataclass(frozen=True, slots=True)
class Load:
    """One arrival of a layer in its slot, before use `use`; the slot is free once use `after` is over (-1: at once)."""

    position: int
    use: int
    after: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StageRepulls:
    """The layers of one stage that are pulled again: their buckets, and whether backward reads them.

    Backward does not come to layers below the first trained parameter. Empty where nothing is ever dropped.
    """

    buckets: tuple[int, ...] = ()
    has_backward: tuple[bool, ...] = ()

    @property
    def slot_of(self) -> dict[int, int]:
        """The slot of each bucket."""
        return {bucket: position % REPULL_WINDOW for position, bucket in enumerate(self.buckets)}

    def uses(self, passes: Iterable[Pass]) -> list[int]:
        """Positions of the layers in the order in which `passes` use them; one that is used twice in a row counts once.

        >>> StageRepulls(buckets=(1, 2, 3), has_backward=(True,) * 3).uses([Pass.FORWARD, Pass.BACKWARD])
        [0, 1, 2, 1, 0]
        """
        forward = range(len(self.buckets))
        backward = [position for position in reversed(forward) if self.has_backward[position]]
        order = (p for pass_ in passes for p in (forward if pass_ is Pass.FORWARD else backward))
        return [position for position, _ in groupby(order)]


NO_REPULLS = StageRepulls()


def check_repulls(wanted: int | Literal["all"], num_layers: int, device_type: str = "cpu") -> None:
    """Raise HydraConfigError where `hydra.link.repull_layers` = `wanted` cannot be served."""
    if wanted and device_type != "cpu":
        raise HydraConfigError(
            f"hydra.link.repull_layers is {json.dumps(wanted)}: re-pulls are served between CPU ranks (gloo) only; on "
            f"{device_type} set it to 0, and let more TP or PP save the memory"
        )
    if wanted != "all" and wanted > num_layers:
        raise HydraConfigError(
            f"hydra.link.repull_layers is {wanted}, the model has {num_layers} layers; set it to {num_layers} or "
            'less, or to "all"'
        )


def check_scheme_repulls(schemes: Iterable[Scheme], device_type: str) -> None:
    """Raise HydraConfigError where the re-pulls of `schemes`, which all have some, cannot be served."""
    for scheme in schemes if device_type != "cpu" else ():
        raise HydraConfigError(
            f"scheme {scheme}: re-pulls are served between CPU ranks (gloo) only; on {device_type} leave repull "
            "out of hydra.strategies, and let ckpt, or more TP or PP, save the memory"
        )


def choose_layers(num_layers: int, wanted: int | Literal["all"]) -> list[int]:
    """Which of a stage's `num_layers` are pulled again: `wanted` of them, spread evenly, the first one last.

    Between two of them others compute, which hides the exchange. No more than the window: nothing would be dropped.

    >>> choose_layers(8, 4), choose_layers(4, "all"), choose_layers(2, "all")
    ([1, 3, 5, 7], [0, 1, 2, 3], [])
    """
    count = num_layers if wanted == "all" else min(wanted, num_layers)
    if count <= REPULL_WINDOW:
        return []
    return [i for i in range(num_layers) if (i + 1) * count // num_layers > i * count // num_layers]


def stage_passes(num_stages: int, stage: int, num_micro_batches: int, *, training: bool) -> list[Pass]:
    """What a stage does in one iteration, in order."""
    if not training:
        return [Pass.FORWARD] * num_micro_batches
    return [pass_ for pass_, _ in one_forward_one_backward(num_stages, stage, num_micro_batches)]


def plan_loads(uses: Sequence[int]) -> list[Load]:
    """Every arrival that `uses` need, in order, each as early as its slot allows.

    Turning from forward to backward finds the last layers still in their slots, and back again the first ones.

    >>> [load.position for load in plan_loads([0, 1, 2, 1, 0])]
    [0, 1, 2, 0]
    """
    content = [-1] * REPULL_WINDOW
    last_use = [-1] * REPULL_WINDOW
    loads = []
    for use, position in enumerate(uses):
        slot = position % REPULL_WINDOW
        if content[slot] != position:
            loads.append(Load(position, use, last_use[slot]))
            content[slot] = position
        last_use[slot] = use
    return loads


def split_repulled(
    rank_buckets: Sequence[RankBuckets], repulls_of: Sequence[StageRepulls]
) -> tuple[list[RankBuckets], list[RankBuckets]]:
    """The buckets of all ranks with nothing in place of re-pulled ones; and the re-pulled ones alone.

    Equal ones stay one object, as plans like them.
    """
    known: dict[int, tuple[RankBuckets, RankBuckets]] = {}
    for buckets, repulls in zip(rank_buckets, repulls_of, strict=True):
        if id(buckets) not in known:
            kept = tuple(() if r in repulls.buckets else bucket for r, bucket in enumerate(buckets))
            known[id(buckets)] = kept, tuple(buckets[r] for r in repulls.buckets)
    both = [known[id(buckets)] for buckets in rank_buckets]
    return [kept for kept, _ in both], [served for _, served in both]


def served_bytes(plan: LinkPlan, sends_ahead: int, itemsize: int) -> int:
    """Most bytes of packed messages on this rank: `sends_ahead` layers for each reader, a window of its own."""

    def padded(numel: int) -> int:
        return -(-numel * itemsize // ALIGNMENT_BYTES) * ALIGNMENT_BYTES

    most_sent: dict[int, int] = {}
    most_received = 0
    for round_ in plan.rounds:
        phase = round_.phases[0]
        for batch in phase.outgoing:
            for peer in batch.peers:
                most_sent[peer] = max(most_sent.get(peer, 0), padded(batch.buffered_numel))
        most_received = max(most_received, padded(sum(batch.buffered_numel for batch in phase.incoming)))
    return sends_ahead * sum(most_sent.values()) + REPULL_WINDOW * most_received
