"""Links of random small models, and their plans carried out on one process with numpy."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st
from torch import Tensor

from ds_hydra.strategy import Scheme, Strategy
from ds_hydra.zero_link import BucketEntry, ParamSpec, RankBuckets, Region, Slicing
from ds_hydra.zero_link.layout import Batch, LinkPlan, Store, StridedBlock

HEADS, KV_HEADS, HEAD_DIM = 4, 2, 3


FUSED_PARTS = (
    (HEADS, HEADS * HEAD_DIM),
    (KV_HEADS, KV_HEADS * HEAD_DIM),
    (KV_HEADS, KV_HEADS * HEAD_DIM),
)
"""(blocks, rows) of q, k and v, one below the other in one matrix."""


def decoder_specs(
    hidden: int, num_layers: int, *, tied: bool, frozen: bool = False, fused: bool = False
) -> list[ParamSpec]:
    """A decoder whose sizes divide nothing: biases, q/k norms, grouped keys, an uneven vocabulary.

    With `fused` q stands for a matrix of q, k and v, of which a rank needs rows of each part.
    """
    wide = HEADS * HEAD_DIM
    specs = [ParamSpec(fqn="embed", shape=(11, hidden), slicing=Slicing.COLWISE)]
    for layer in range(num_layers):
        for name, shape, slicing, blocks in (
            ("norm", (hidden,), Slicing.REPLICATED, 0),
            ("qkv", (sum(rows for _, rows in FUSED_PARTS), hidden), Slicing.COLWISE, 0)
            if fused
            else ("q", (wide, hidden), Slicing.COLWISE, HEADS),
            ("q.bias", (wide,), Slicing.COLWISE, HEADS),
            ("k", (KV_HEADS * HEAD_DIM, hidden), Slicing.COLWISE, KV_HEADS),
            ("q_norm", (HEAD_DIM,), Slicing.REPLICATED_PARTIAL_GRAD, 0),
            ("o", (hidden, wide), Slicing.ROWWISE, 0),
            ("o.bias", (hidden,), Slicing.FIRST_RANK, 0),
        ):
            specs.append(
                ParamSpec(
                    fqn=f"{layer}.{name}",
                    shape=shape,
                    slicing=slicing,
                    num_blocks=blocks,
                    requires_grad=not (frozen and name == "k"),
                )
            )
    specs.append(ParamSpec(fqn="norm", shape=(hidden,)))
    if not tied:
        specs.append(ParamSpec(fqn="head", shape=(11, hidden), slicing=Slicing.COLWISE))
    return specs


def slice_regions(spec: ParamSpec, tp_size: int, tp_rank: int) -> list[Region]:
    """What a rank of a TP group needs of a parameter: one rectangle, or one of each part of a fused
    matrix.
    """
    if not spec.fqn.endswith("qkv"):
        return [spec.slice_region(tp_size, tp_rank)]
    regions, begin = [], 0
    for blocks, rows in FUSED_PARTS:
        part = ParamSpec(
            fqn=spec.fqn, shape=(rows, spec.num_cols), slicing=Slicing.COLWISE, num_blocks=blocks
        )
        region = part.slice_region(tp_size, tp_rank)
        regions.append(dataclasses.replace(region, row=begin + region.row))
        begin += rows
    return regions


def crop(spec: ParamSpec, full: Any, region: Region) -> Any:
    """The elements of a whole parameter that are in `region`, a view."""
    return crop_of(full.reshape(spec.num_rows, spec.num_cols), region)


def crop_of(matrix: Any, region: Region) -> Any:
    return matrix[
        region.row : region.row + region.num_rows, region.col : region.col + region.num_cols
    ]


def strategy_buckets(
    specs: Sequence[ParamSpec], strategy: Strategy, num_ranks: int, num_layers: int
) -> list[RankBuckets]:
    """Buckets of all ranks, cut into stages as the engine does it."""
    per_layer = 7
    embed, layers = (
        [0],
        [list(range(1 + i * per_layer, 1 + (i + 1) * per_layer)) for i in range(num_layers)],
    )
    head = list(range(1 + num_layers * per_layer, len(specs)))
    if specs[-1].fqn != "head":
        head.append(0)
    rank_buckets: list[RankBuckets] = [()] * num_ranks
    for scheme, ranks in zip(strategy.schemes, strategy.place(), strict=True):
        for place, rank in enumerate(ranks):
            stage, tp_rank = divmod(place, scheme.tp)
            base, extra = divmod(num_layers, scheme.pp)
            begin = stage * base + min(stage, extra)
            units = layers[begin : begin + base + (stage < extra)]
            if stage == 0:
                units = [embed, *units]
            if stage == scheme.pp - 1:
                units = [*units, head]
            seen: set[int] = set()
            buckets = []
            for unit in units:
                params = [p for p in unit if p not in seen]
                seen.update(params)
                buckets.append(
                    tuple(
                        BucketEntry(p, region, specs[p].pushes_gradient(tp_rank))
                        for p in params
                        for region in slice_regions(specs[p], scheme.tp, tp_rank)
                    )
                )
            rank_buckets[rank] = tuple(buckets)
    return rank_buckets


def bucket_of(buckets: Sequence[Any], index: int) -> Any:
    """What is of round `index`; nothing where there is no such bucket."""
    return buckets[index] if index < len(buckets) else ()


def sent_elements(plan: LinkPlan) -> Counter[int]:
    """Elements that leave a rank over the wire in a pull, for each rank they go to."""
    return _per_peer(
        batch for round_ in plan.rounds for hop in round_.hops for batch in hop.outgoing
    )


def received_elements(plan: LinkPlan) -> Counter[int]:
    """Elements that arrive over the wire in a pull, for each rank they come from."""
    return _per_peer(
        batch for round_ in plan.rounds for hop in round_.hops for batch in hop.incoming
    )


def _per_peer(batches: Iterable[Batch]) -> Counter[int]:
    counts = Counter[int]()
    for batch in batches:
        counts.update(dict.fromkeys(batch.peers, batch.numel))
    return counts


def local_elements(plan: LinkPlan) -> int:
    """Elements copied inside a rank."""
    return sum(a.numel for round_ in plan.rounds for hop in round_.hops for a, _ in hop.local)


def shards_of(
    specs: Sequence[ParamSpec], fulls: Sequence[Tensor], num_ranks: int
) -> list[list[Tensor]]:
    """[rank][param] flat shards of whole parameters, padded with zeros."""
    parts = []
    for spec, full in zip(specs, fulls, strict=True):
        size = spec.shard_numel(num_ranks)
        padded = torch.nn.functional.pad(full, (0, size * num_ranks - spec.numel))
        parts.append([padded[r * size : (r + 1) * size].clone() for r in range(num_ranks)])
    return [[part[rank] for part in parts] for rank in range(num_ranks)]


@st.composite
def random_link(draw, max_ranks: int = 9):
    """(specs, strategy, buckets of all ranks); some ranks may be idle, shards may be empty."""
    num_layers = draw(st.integers(1, 4))
    hidden = draw(st.sampled_from([1, 2, 5, 8]))
    tied, frozen, fused = (draw(st.booleans()) for _ in range(3))
    specs = decoder_specs(hidden, num_layers, tied=tied, frozen=frozen, fused=fused)
    num_ranks = draw(st.integers(1, max_ranks))
    schemes, free = [], num_ranks
    while free and (not schemes or draw(st.integers(0, 3))):
        fitting = [
            (tp, pp) for tp in (1, 2, 4) for pp in range(1, num_layers + 1) if tp * pp <= free
        ]
        tp, pp = draw(st.sampled_from(fitting))
        schemes.append(Scheme(tp, pp))
        free -= tp * pp
    strategy = Strategy(tuple(schemes))
    return specs, strategy, strategy_buckets(specs, strategy, num_ranks, num_layers)


class World:
    """The memory of all ranks: shards, slices, stages; messages are checked to fit together."""

    def __init__(self, specs: Sequence[ParamSpec], rank_buckets: Sequence[RankBuckets]):
        self.specs = specs
        self.num_ranks = len(rank_buckets)
        self.shards = [
            [np.zeros(spec.shard_numel(self.num_ranks)) for spec in specs]
            for _ in range(self.num_ranks)
        ]
        self.slices = [
            [[np.full(ref.region.numel, np.nan) for ref in bucket] for bucket in buckets]
            for buckets in rank_buckets
        ]
        self.stages: list[dict[int, np.ndarray]] = [{} for _ in range(self.num_ranks)]

    def place(
        self, rank: int, index: int, store: Store, piece: StridedBlock
    ) -> tuple[np.ndarray, np.ndarray]:
        memory = {
            Store.SHARD: lambda: self.shards[rank][piece.key],
            Store.SLICE: lambda: self.slices[rank][index][piece.key],
            Store.RELAY: lambda: self.stages[rank][piece.key],
        }[store]()
        rows, cols = np.indices((piece.rows, piece.cols))
        return memory, (piece.offset + rows * piece.stride + cols).ravel()

    def read(self, rank: int, index: int, batch: Batch) -> np.ndarray:
        parts = [np.empty(0)]
        for piece in batch.pieces:
            memory, at = self.place(rank, index, batch.store, piece)
            parts.append(memory[at])
        return np.concatenate(parts)

    def write(self, rank: int, index: int, batch: Batch, data: np.ndarray, *, add: bool) -> None:
        begin = 0
        for piece in batch.pieces:
            memory, at = self.place(rank, index, batch.store, piece)
            memory[at] = data[begin : begin + len(at)] + (memory[at] if add else 0)
            begin += len(at)
        assert begin == len(data)

    def run(self, plans: Sequence[LinkPlan], *, push: bool) -> int:
        """Carry out all rounds; returns the elements that crossed a wire."""
        sent = 0
        order = range(len(plans[0].rounds))
        for rank, plan in enumerate(plans):
            for begun, round_ in enumerate(plan.rounds):
                if begun in self.stages[rank] and not round_.relayed_numel:
                    continue  # what stays for the node
                self.stages[rank][begun] = (
                    np.zeros(round_.relayed_numel)
                    if push
                    else np.full(round_.relayed_numel, np.nan)
                )
        for index in reversed(order) if push else order:
            rounds = [plan.rounds[index] for plan in plans]
            steps = range(len(rounds[0].hops))
            assert all(len(r.hops) == len(steps) for r in rounds)
            for step in reversed(steps) if push else steps:
                sent += self._run_hop(index, [r.hops[step] for r in rounds], push)
        return sent

    def _run_hop(self, index, hops, push) -> int:
        wire: dict[tuple[int, int], list[np.ndarray]] = {}
        sizes: dict[tuple[int, int], list[list[int]]] = {}
        for rank, hop in enumerate(hops):
            for batch in hop.incoming if push else hop.outgoing:
                for peer in batch.peers:
                    wire.setdefault((rank, peer), []).append(self.read(rank, index, batch))
                    sizes.setdefault((rank, peer), []).append(
                        [sum(p.numel for p in m) for m in batch.messages]
                    )
        sent = sum(len(part) for parts in wire.values() for part in parts)
        for rank, hop in enumerate(hops):
            for batch in hop.outgoing if push else hop.incoming:
                for peer in batch.peers:
                    assert sizes[peer, rank].pop(0) == [
                        sum(p.numel for p in m) for m in batch.messages
                    ]
                    self.write(rank, index, batch, wire[peer, rank].pop(0), add=push)
            for shard_side, slice_side in hop.local:
                source, target = (slice_side, shard_side) if push else (shard_side, slice_side)
                self.write(rank, index, target, self.read(rank, index, source), add=push)
        assert not any(wire.values()), "a message that nobody expects"
        return sent
