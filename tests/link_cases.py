"""Links of random small models, and their plans carried out by ranks in one process."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.distributed as dist
from distributed import TIMEOUT_S
from hypothesis import strategies as st
from torch import Tensor

from ds_hydra.engine.transfer.session import RoundWindow
from ds_hydra.strategy import Scheme, Strategy
from ds_hydra.zero_link import BucketEntry, ParamSpec, RankBuckets, Region, Slicing, plan_link
from ds_hydra.zero_link.exchange import Link
from ds_hydra.zero_link.layout import LinkPlan

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
    counts = Counter[int]()
    for batch in (b for round_ in plan.rounds for hop in round_.hops for b in hop.outgoing):
        counts.update(dict.fromkeys(batch.peers, batch.numel))
    return counts


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


class Members(NamedTuple):
    """A group of neighbouring ranks as one of them has it."""

    rank: int
    ranks: tuple[int, ...]


class Wire:
    """All-to-alls of ranks that are threads of one process; they arrive when all have posted."""

    def __init__(self):
        self._lock = threading.Lock()
        self.num_posted = Counter[Members]()
        self._under_way: dict[Any, tuple[dict[int, Any], threading.Event]] = {}

    def all_to_all_single(self, incoming, outgoing, into, out, *, group, async_op):
        assert async_op
        with self._lock:
            self.num_posted[group] += 1
            key = group.ranks, self.num_posted[group]
            posted, has_come = self._under_way.setdefault(key, ({}, threading.Event()))
            posted[group.rank] = incoming.split(into), outgoing.split(out)
            if len(posted) == len(group.ranks):
                for place, rank in enumerate(group.ranks):
                    for received, peer in zip(posted[rank][0], group.ranks, strict=True):
                        received.copy_(posted[peer][1][place])
                has_come.set()

        def wait() -> None:
            assert has_come.wait(TIMEOUT_S), "another rank has not posted the exchange"

        return SimpleNamespace(wait=wait)


class World:
    """All ranks in one process: a thread and two links each, shards of known parameters, slices
    that a pull fills, and gradients that a push adds up.
    """

    def __init__(
        self,
        specs: Sequence[ParamSpec],
        rank_buckets: Sequence[RankBuckets],
        ranks_per_node: int | None = None,
        gradient_dtype: torch.dtype = torch.float32,
    ):
        self.specs, self.rank_buckets = specs, rank_buckets
        self.num_ranks = len(rank_buckets)
        torch.manual_seed(0)
        self.full = [torch.randn(spec.numel).bfloat16() for spec in specs]
        self.shards = shards_of(specs, self.full, self.num_ranks)
        self.wire, cpu = Wire(), torch.device("cpu")
        self.pulls, self.pushes = [], []
        everyone = tuple(range(self.num_ranks))
        with self._connected():
            for rank in everyone:
                size = ranks_per_node or self.num_ranks
                node = everyone[rank // size * size :][:size]
                groups = Members(rank, everyone), Members(rank, node)
                self.pulls.append(Link(groups[0], cpu, node_group=groups[1]))
                self.pushes.append(Link(groups[0], cpu, gradient_dtype, node_group=groups[1]))

    def plans(self, **options: Any) -> list[LinkPlan]:
        ranks = range(self.num_ranks)
        return [plan_link(self.specs, self.rank_buckets, rank, **options) for rank in ranks]

    def fresh(self, make: Callable[[int], Tensor]) -> list[list[list[Tensor]]]:
        """[rank][bucket][slot] flat tensors, of as many elements as the slices."""
        return [[[make(e.region.numel) for e in b] for b in mine] for mine in self.rank_buckets]

    def pull(self, plans: Sequence[LinkPlan], order: Sequence[int] | None = None) -> None:
        """Fill new slices, and check them. Ranks have different numbers of rounds under way."""
        slices = self.fresh(lambda numel: torch.full((numel,), torch.nan).bfloat16())

        def begin(rank: int, index: int) -> Any:
            own = bucket_of(slices[rank], index)
            return self.pulls[rank].begin_pull(plans[rank], index, self.shards[rank], own)

        self._run(begin, order or range(len(plans[0].rounds)))
        for buckets, got in zip(self.rank_buckets, slices, strict=True):
            wanted = [
                [crop(self.specs[e.param], self.full[e.param], e.region).flatten() for e in b]
                for b in buckets
            ]
            torch.testing.assert_close(got, wanted, rtol=0, atol=0)

    def push(
        self,
        plans: Sequence[LinkPlan],
        gradients: Sequence[Sequence[Sequence[Tensor]]],
        start: Sequence[Tensor],
    ) -> list[list[Tensor]]:
        """Shards of the sums: `gradients` added to what is there at the `start`."""
        sums = shards_of(self.specs, start, self.num_ranks)

        def begin(rank: int, index: int) -> Any:
            own = bucket_of(gradients[rank], index)
            return self.pushes[rank].begin_push(plans[rank], index, own, sums[rank])

        self._run(begin, range(len(plans[0].rounds))[::-1])
        return sums

    def add_in_order(
        self, gradients: Sequence[Sequence[Sequence[Tensor]]], start: Sequence[Tensor]
    ) -> list[list[Tensor]]:
        """The same by one process: rounds from the last to the first, in each the ranks."""
        totals = [tensor.clone() for tensor in start]
        for index in reversed(range(max(map(len, self.rank_buckets)))):
            for buckets, mine in zip(self.rank_buckets, gradients, strict=True):
                pairs = zip(bucket_of(buckets, index), bucket_of(mine, index), strict=True)
                for entry, gradient in pairs:
                    if entry.pushes_gradient and entry.region.numel:
                        spec = self.specs[entry.param]
                        target = crop(spec, totals[entry.param], entry.region)
                        target += gradient.view_as(target)
        return shards_of(self.specs, totals, self.num_ranks)

    def _connected(self) -> contextlib.ExitStack:
        stack = contextlib.ExitStack()
        for name, run in (
            ("all_to_all_single", self.wire.all_to_all_single),
            ("get_process_group_ranks", lambda group: list(group.ranks)),
        ):
            stack.enter_context(mock.patch.object(dist, name, run))
        return stack

    def _run(self, begin: Callable[[int, int], Any], order: Sequence[int]) -> None:
        def run_rank(rank: int) -> None:
            with RoundWindow(
                functools.partial(begin, rank), lambda _: None, depth=1 + rank % 3
            ) as rounds:
                for index in order:
                    rounds.post(index)

        with self._connected(), ThreadPoolExecutor(self.num_ranks) as threads:
            list(threads.map(run_rank, range(self.num_ranks)))
