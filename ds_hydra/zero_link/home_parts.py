"""Which rank brings which part of the other hosts' shards to the home of its host.

[Note: Homes of several hosts]
Each host has a home, whose ranks read weights there and add gradients there. What the ranks of a
host own they bring themselves. What ranks of other hosts own comes in the rounds of a link: of the
owners on other hosts each is the business of one rank of the host, so every element enters a host
once, and the sum of its gradients leaves it once.

For the link a parameter is flat, and the part of an owner's shard that a host needs is one run of
it. A host needs the rows between the first and the last that its ranks read: all of what they read,
and with TP across hosts also the other columns of row-wise parameters.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from ds_hydra.zero_link.layout import ParamSpec, Region
from ds_hydra.zero_link.messages import RankBuckets, SliceRef


class HomeBytes(NamedTuple):
    """What one rank has of a home: its part of the weights, and of the sums beside the fp32
    gradient shards that every engine has.
    """

    weights: int
    sums: int


def home_bytes(
    specs: Sequence[ParamSpec], itemsize: int, num_ranks: int, ranks_of_host: int
) -> HomeBytes:
    """Of a home that `ranks_of_host` of `num_ranks` ranks share; sums take 8 bytes an element and
    4 a row of a parameter.

    >>> home_bytes([ParamSpec(fqn="w", shape=(8, 4))], 2, 4, 2)
    HomeBytes(weights=32, sums=112)
    """
    padded = [spec.shard_numel(num_ranks) * num_ranks for spec in specs]
    summed = [(n, s.num_rows) for n, s in zip(padded, specs, strict=True) if s.requires_grad]
    owned = sum(numel for numel, _ in summed) // num_ranks
    sums = sum(8 * numel + 4 * rows for numel, rows in summed) // ranks_of_host - 4 * owned
    return HomeBytes(sum(padded) * itemsize // ranks_of_host, sums)


class Need(NamedTuple):
    """Elements [begin, end) of a flat parameter that ranks of a host read, and whether one of them
    adds gradients.
    """

    begin: int
    end: int
    pushes_gradient: bool


def flat_specs(specs: Sequence[ParamSpec]) -> list[ParamSpec]:
    """`specs` as vectors, with shards where they were."""
    return [
        ParamSpec(fqn=spec.fqn, shape=(spec.numel,), requires_grad=spec.requires_grad)
        for spec in specs
    ]


def needs_of_host(
    specs: Sequence[ParamSpec], rank_buckets: Sequence[RankBuckets]
) -> dict[int, Need]:
    """What the ranks of one host, whose buckets these are, need of each parameter.

    >>> spec = ParamSpec(fqn="w", shape=(4, 6))
    >>> ref = SliceRef(0, Region(1, 2, 0, 6), True)
    >>> needs_of_host([spec], [((ref,),)])
    {0: Need(begin=6, end=18, pushes_gradient=True)}
    """
    needs: dict[int, Need] = {}
    distinct = {id(buckets): buckets for buckets in rank_buckets}.values()
    for ref in (ref for buckets in distinct for bucket in buckets for ref in bucket):
        if not ref.region.numel:
            continue
        num_cols, region = specs[ref.param].num_cols, ref.region
        begin, end = region.row * num_cols, (region.row + region.num_rows) * num_cols
        known = needs.get(ref.param, Need(begin, end, False))
        needs[ref.param] = Need(
            min(known.begin, begin),
            max(known.end, end),
            known.pushes_gradient or ref.pushes_gradient,
        )
    return needs


def firsts_of(rounds: Sequence[Sequence[int]]) -> tuple[tuple[int, ...], ...]:
    """The parameters of each of `rounds`; one that is in two comes in the first.

    >>> firsts_of([[0, 1], [2, 0]])
    ((0, 1), (2,))
    """
    first: dict[int, int] = {}
    for index, params in enumerate(rounds):
        for param in params:
            first.setdefault(param, index)
    return tuple(
        tuple(param for param in dict.fromkeys(params) if first[param] == index)
        for index, params in enumerate(rounds)
    )


def parts_from_other_hosts(
    specs: Sequence[ParamSpec],
    rounds: Sequence[Sequence[int]],
    rank_buckets: Sequence[RankBuckets],
    host_of: Sequence[int],
) -> list[RankBuckets]:
    """For each rank the runs of `flat_specs(specs)` that it brings to the home of its host, a
    bucket for each of `rounds`, which are parameters; one that is in two comes in the first.

    `rank_buckets` are what all ranks compute with.
    """
    members: dict[int, list[int]] = {}
    for rank, host in enumerate(host_of):
        members.setdefault(host, []).append(rank)
    needs = {
        host: needs_of_host(specs, [rank_buckets[rank] for rank in ranks])
        for host, ranks in members.items()
    }
    firsts = firsts_of(rounds)
    found = []
    for rank, host in enumerate(host_of):
        outside = [other for other, where in enumerate(host_of) if where != host]
        owners = outside[members[host].index(rank) :: len(members[host])]
        found.append(
            tuple(
                tuple(
                    ref
                    for param in params
                    if param in needs[host]
                    for ref in _runs(specs[param], param, needs[host][param], owners, len(host_of))
                )
                for params in firsts
            )
        )
    return found


def _runs(
    spec: ParamSpec, param: int, need: Need, owners: Sequence[int], num_ranks: int
) -> list[SliceRef]:
    shard = spec.shard_numel(num_ranks)
    bounds = [(max(need.begin, o * shard), min(need.end, (o + 1) * shard)) for o in owners]
    return [
        SliceRef(param, Region(begin, end - begin, 0, 1), need.pushes_gradient)
        for begin, end in bounds
        if begin < end
    ]
