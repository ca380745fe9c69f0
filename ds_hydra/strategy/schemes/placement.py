"""Placement of the ranks of a strategy: stages, and the groups that TP, SP, CP and PP need.

Pipelines are consecutive blocks of ranks, so stages and groups are ranges: equal ones are equal
values, however many ranks they have, and two strategies share a group where placement in blocks
gives it the same ranks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import groupby, pairwise, product
from typing import Any, TypeVar

from ds_hydra.configs.files import MAX_DEVICES, read_counts
from ds_hydra.errors import HydraConfigError
from ds_hydra.strategy.schemes.scheme import Scheme, Strategy

Ranks = TypeVar("Ranks", tuple[int, ...], range)

GroupKey = tuple[str, range]
"""(purpose, ranks)"""

MAX_GROUPS_OF_RANK = 27
"""Groups that one rank may be in. Each has a stream of its own, and a CUDA device 32 queues: the
others are the computation's, the link's, two of DeepSpeed's, and the group of all ranks that torch
begins with.
"""
LINK_GROUPS = 4
"""Most groups of pull and push among them."""


def group_limit(num_devices: int, chosen: int | None) -> int:
    """Most groups that there may be: as `chosen` in the configuration, else 256 or, on more
    devices, 4 for each, so that a rank is in about as many on all clusters.
    """
    return max(256, 4 * num_devices) if chosen is None else chosen


@lru_cache(maxsize=1024)
def coordinates(scheme: Scheme) -> tuple[tuple[int, int, int], ...]:
    """(stage, sequence shard, place in the TP group) of each rank of a pipeline, in the order of
    its ranks; sequence shard `c * sp + s` is number `s` of the SP group that has row `c`.

    >>> coordinates(Scheme(2, 2))
    ((0, 0, 0), (0, 0, 1), (1, 0, 0), (1, 0, 1))
    >>> coordinates(Scheme(1, 1, sp=2, cp=2, context_first=True))
    ((0, 0, 0), (0, 2, 0), (0, 1, 0), (0, 3, 0))
    """
    shards = [*range(scheme.num_shards)]
    if scheme.context_first:
        shards = [shard for s in range(scheme.sp) for shard in shards[s :: scheme.sp]]
    return tuple(product(range(scheme.pp), shards, range(scheme.tp)))


def stages_of(scheme: Scheme, ranks: Ranks) -> list[Ranks]:
    """The ranks of each stage of a pipeline of `scheme`."""
    return _in_parts(ranks, scheme.ranks_per_stage)


def _in_parts(ranks: Ranks, size: int) -> list[Ranks]:
    """Neighbours among `ranks`, `size` in each part: TP groups by TP, groups that share experts by
    SP x TP.
    """
    return [ranks[begin : begin + size] for begin in range(0, len(ranks), size)]


def _sp_groups(scheme: Scheme, ranks: Ranks) -> list[Ranks]:
    """The SP groups of a pipeline: ranks with the same slices and the same row, in the order of
    their sequence shards.
    """
    others = scheme.cp, scheme.cp_step
    return _groups_apart(scheme, ranks, (scheme.sp, scheme.sp_step), others)


def _cp_groups(scheme: Scheme, ranks: Ranks) -> list[Ranks]:
    """The CP groups of a pipeline: ranks with the same slices and the same place in their SP
    groups, in the order of their rows.
    """
    others = scheme.sp, scheme.sp_step
    return _groups_apart(scheme, ranks, (scheme.cp, scheme.cp_step), others)


def _groups_apart(
    scheme: Scheme, ranks: Ranks, own: tuple[int, int], others: tuple[int, int]
) -> list[Ranks]:
    """Groups of each stage, of `own` ranks and distance, for each place among `others` and in the
    TP group.
    """
    (size, step), (num_others, step_of_others) = own, others
    return [
        stage[begin : begin + size * step : step]
        for stage in stages_of(scheme, ranks)
        for place in range(num_others)
        for begin in range(place * step_of_others, place * step_of_others + scheme.tp)
    ]


@lru_cache(maxsize=4096)
def groups_of(strategy: Strategy) -> frozenset[GroupKey]:
    """Groups that `strategy` needs: one per TP, SP and CP group, one per SP x TP group that shares
    experts and is neither, and one per direction for each pipeline with PP > 1.
    """
    if strategy.phases:
        return frozenset().union(*map(groups_of, strategy.phases))
    keys: set[GroupKey] = set()
    for scheme, ranks in zip(strategy.schemes, strategy.blocks):
        if scheme.tp > 1:
            keys |= {("tp", group) for group in _in_parts(ranks, scheme.tp)}
        if scheme.sp > 1:
            keys |= {("sp", group) for group in _sp_groups(scheme, ranks)}
        if scheme.cp > 1:
            keys |= {("cp", group) for group in _cp_groups(scheme, ranks)}
        if scheme.ep > 1 and scheme.sp > 1 and scheme.tp > 1:
            keys |= {("ep", group) for group in _in_parts(ranks, scheme.sp * scheme.tp)}
        if scheme.pp > 1:
            keys |= {("pp_down", ranks), ("pp_up", ranks)}
    return frozenset(keys)


def communicator(key: GroupKey) -> GroupKey:
    """Process group that carries `key`. Groups inside of stages share one where their ranks are
    equal: no strategy has two of them, and strategies follow each other alike on all ranks. Two
    directions of a pipeline, pull and push may be under way at once.
    """
    purpose, ranks = key
    return ("stage" if purpose in ("tp", "sp", "cp", "ep") else purpose), ranks


def communicators(keys: Iterable[GroupKey]) -> list[GroupKey]:
    """Process groups that carry `keys`, in their order.

    >>> communicators([("sp", range(2)), ("tp", range(2)), ("pp_up", range(2))])
    [('stage', range(0, 2)), ('pp_up', range(0, 2))]
    """
    return [*dict.fromkeys(map(communicator, keys))]


def link_groups(num_ranks: int, ranks_per_node: int | None) -> list[GroupKey]:
    """Groups of pull and push; where ranks of a node relay, their second hops have groups of the
    node's ranks.
    """
    nodes = _in_parts(range(num_ranks), ranks_per_node) if ranks_per_node else []
    everyone: list[GroupKey] = [("pull", range(num_ranks)), ("push", range(num_ranks))]
    return everyone + [(purpose, node) for purpose in ("pull_node", "push_node") for node in nodes]


def count_groups(strategies: Iterable[Strategy]) -> int:
    """Process groups that `strategies` need together; those with the same ranks are shared."""
    return len(groups_of_all(strategies))


def most_groups_of_rank(keys: Iterable[GroupKey]) -> int:
    """The largest number of groups that one rank is in.

    >>> most_groups_of_rank([("tp", range(2)), ("tp", range(4)), ("tp", range(2, 4))])
    2
    """
    return max(Counter(rank for _, ranks in keys for rank in ranks).values(), default=0)


def most_multicast_objects(keys: Iterable[GroupKey], ranks_per_node: int) -> int:
    """The largest number of NVLink multicast objects that NCCL makes on one node: for each
    communicator with several ranks there, one at its start and one when it first sums.
    """
    nodes = Counter[int]()
    for _, ranks in communicators(keys):
        of_nodes = Counter(rank // ranks_per_node for rank in ranks)
        nodes.update(node for node, count in of_nodes.items() if count > 1)
    return 2 * max(nodes.values(), default=0)


def groups_of_all(strategies: Iterable[Strategy]) -> frozenset[GroupKey]:
    """Groups that `strategies` need together."""
    return frozenset().union(*map(groups_of, strategies))


def read_ranks(document: Mapping[str, Any], scheme: Scheme) -> tuple[int, ...]:
    """The ranks of a pipeline of `scheme` in a document; raises KeyError without them,
    HydraConfigError for others.
    """
    ranks = read_counts(document, "ranks", most=MAX_DEVICES - 1)
    if len(ranks) != scheme.num_devices:
        raise HydraConfigError(f"{len(ranks)} ranks for {scheme}, expected {scheme.num_devices}")
    return ranks


def slices_key(strategy: Strategy) -> Hashable:
    """Equal for strategies that need the same slices on every rank, of which the planner makes up
    many ([Note: Phases]).
    """
    if any(scheme.ep > 1 or scheme.pp > 1 for scheme in strategy.schemes):
        return strategy
    in_order = sorted(zip(strategy.blocks, strategy.schemes), key=lambda block: block[0].start)
    tp_of_rank = (scheme.tp for ranks, scheme in in_order for _ in ranks)
    runs = tuple((tp, sum(1 for _ in run)) for tp, run in groupby(tp_of_rank))
    return strategy.gathers, strategy.keeps_on_nodes, runs


def ends_of_phases(phases: Sequence[Strategy]) -> list[tuple[bool, bool]]:
    """Whether nothing is beside the first pull of each of an iteration's `phases`, and whether
    nothing is beside its last push: where the phase before, or after, has other slices, or there is
    none.
    """
    keys = [slices_key(phase) for phase in phases]
    differs = [True, *(a != b for a, b in pairwise(keys)), True]
    return [*pairwise(differs)]


@dataclass(frozen=True, slots=True)
class Role:
    """A rank's place in a strategy."""

    pipeline: int
    scheme: Scheme
    stage: int
    shard: int
    """The sequence shard of its micro-batches that it has."""
    tp_rank: int
    ranks: range
    """Ranks of the pipeline."""

    @classmethod
    def find(cls, strategy: Strategy, rank: int) -> Role | None:
        """The role of `rank`, or None where the strategy leaves it idle."""
        for index, (scheme, ranks) in enumerate(zip(strategy.schemes, strategy.blocks)):
            if rank in ranks:
                return cls(index, scheme, *coordinates(scheme)[rank - ranks.start], ranks)
        return None

    @property
    def rank(self) -> int:
        """The rank itself."""
        scheme = self.scheme
        of_stage = self.sp_rank * scheme.sp_step + self.cp_rank * scheme.cp_step + self.tp_rank
        return self.ranks[self.stage * scheme.ranks_per_stage + of_stage]

    @property
    def sp_rank(self) -> int:
        """Place of the rank in the SP group."""
        return self.shard % self.scheme.sp

    @property
    def cp_rank(self) -> int:
        """Number of the row of its micro-batches that it works on."""
        return self.shard // self.scheme.sp

    @property
    def tp_ranks(self) -> range:
        """The TP group."""
        begin = self.rank - self.ranks.start - self.tp_rank
        return self.ranks[begin : begin + self.scheme.tp]

    @property
    def sp_ranks(self) -> range:
        """The SP group."""
        row = self.stage * self.scheme.cp + self.cp_rank
        return _sp_groups(self.scheme, self.ranks)[row * self.scheme.tp + self.tp_rank]

    @property
    def cp_ranks(self) -> range:
        """The CP group."""
        place = (self.stage * self.scheme.sp + self.sp_rank) * self.scheme.tp + self.tp_rank
        return _cp_groups(self.scheme, self.ranks)[place]

    @property
    def ep_group(self) -> GroupKey:
        """The SP x TP group, inside which experts are shared: that for SP or TP where it is the
        same.
        """
        if self.scheme.tp == 1:
            return "sp", self.sp_ranks
        if self.scheme.sp == 1:
            return "tp", self.tp_ranks
        row = self.stage * self.scheme.cp + self.cp_rank
        return "ep", _in_parts(self.ranks, self.scheme.sp * self.scheme.tp)[row]

    @property
    def ep_place(self) -> int:
        """Place of the rank in the group that shares experts."""
        return self.sp_rank * self.scheme.tp + self.tp_rank

    @property
    def previous_rank(self) -> int | None:
        """The rank of the stage before that sends to this one; None in the first."""
        return self.rank - self.scheme.ranks_per_stage if self.stage > 0 else None

    @property
    def next_rank(self) -> int | None:
        """The rank of the next stage that receives from this one; None in the last."""
        is_last = self.stage == self.scheme.pp - 1
        return None if is_last else self.rank + self.scheme.ranks_per_stage
