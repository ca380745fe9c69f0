"""Bytes that a strategy makes a rank hold for propagation, counted from its link plans: tests
hold it against the memory that is there.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ds_hydra.engine.strategy_links import StrategyLink, StrategyLinks
from ds_hydra.engine.transfer.stage_weights import gradient_numel, slice_numel
from ds_hydra.strategy import Strategy
from ds_hydra.strategy.profiles.profile import EXCHANGE_BUFFERS
from ds_hydra.zero_link import Bucket, LinkPlan, ParamSpec, RankBuckets
from ds_hydra.zero_link.buffers import pack_hop


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkMemory:
    """Most bytes that a strategy makes this rank hold for propagation, activations left out."""

    slice_bytes: int
    gradient_bytes: int
    exchange_bytes: int
    """Packed buffers: two rounds in flight have four, each as large as the largest. And what an
    owner adds up at a time.

    Memory of the CPU is handed out with gaps, which may add as much again.
    """
    relayed_bytes: int
    """What this rank holds of other nodes' shards (pull) or sums for them (push), with node-aware
    routes.
    """


def link_memory(links: StrategyLinks, strategy: Strategy) -> LinkMemory:
    """Of `strategy` on this rank. Collective over all ranks where its links are not planned yet."""
    link, specs, itemsize = links.link_for(strategy), links.stage_model.specs, links._dtype.itemsize
    slot_of: dict[int, int] = {}
    if strategy.gathers and link.buckets:
        slot_of = links.stage_model.gather_window().slot_of
    kept = [bucket for r, bucket in enumerate(link.buckets) if r not in slot_of]
    in_slots = _slot_numels(gradient_numel, specs, link.buckets, slot_of).values()
    return LinkMemory(
        slice_bytes=_held_numel(specs, link.buckets, slot_of) * itemsize,
        gradient_bytes=sum(gradient_numel(specs, b) for b in kept) * 4 + sum(in_slots) * itemsize,
        exchange_bytes=_exchange_bytes(links, link),
        relayed_bytes=max(relayed_elements(link.pull) * itemsize, relayed_elements(link.push) * 4),
    )


def _held_numel(specs: list[ParamSpec], buckets: RankBuckets, slot_of: dict[int, int]) -> int:
    """Elements of all slices that a rank holds at once: buckets of its own, and the slots that the
    others share.
    """
    own = [slice_numel(specs, bucket) for r, bucket in enumerate(buckets) if r not in slot_of]
    return sum(own) + sum(_slot_numels(slice_numel, specs, buckets, slot_of).values())


def _slot_numels(
    numel_of: Callable[[list[ParamSpec], Bucket], int],
    specs: list[ParamSpec],
    buckets: RankBuckets,
    slot_of: dict[int, int],
) -> dict[int, int]:
    """Elements of each slot, in which slices or gradients (`numel_of`) of the buckets that share it
    take turns.
    """
    numels: dict[int, int] = {}
    for bucket, slot in slot_of.items():
        numels[slot] = max(numels.get(slot, 0), numel_of(specs, buckets[bucket]))
    return numels


def _exchange_bytes(links: StrategyLinks, link: StrategyLink) -> int:
    sent = ((link.pull, links._dtype.itemsize), (link.push, links._gradient_dtype.itemsize))
    buffers = EXCHANGE_BUFFERS * max(packed_elements(plan) * size for plan, size in sent)
    return buffers + 4 * summed_elements(link.push)


def summed_elements(plan: LinkPlan) -> int:
    """Elements of the largest sum of a push that is made beside the shards."""
    hops = (hop for round_ in plan.rounds for hop in round_.hops)
    packed = (pack_hop(hop, plan.rank, plan.num_ranks) for hop in hops)
    return max((addition.numel for side in packed for addition in side.additions), default=0)


def relayed_elements(plan: LinkPlan) -> int:
    """The most elements of other nodes that are relayed on a rank at once."""
    held = [0] * len(plan.rounds)
    for begin, round_ in enumerate(plan.rounds):
        for at in range(begin, min(round_.relayed_until + 1, len(held))):
            held[at] += round_.relayed_numel
    return max(held, default=0)


def packed_elements(plan: LinkPlan) -> int:
    """Elements that a rank sends from or receives into packed buffers at once, at most."""
    hops = (hop for round_ in plan.rounds for hop in round_.hops)
    sides = (batches for hop in hops for batches in (hop.outgoing, hop.incoming))
    return max((sum(b.numel * len(b.peers) for b in batches) for batches in sides), default=0)
