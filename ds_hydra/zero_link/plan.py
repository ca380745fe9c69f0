"""What one rank exchanges to get its slices out of the ZeRO-3 shards, and gradients back to the
owners.

[Note: Rounds]
The unit of exchange is a bucket: the slices of one decoder layer, of the embedding, or of the head.
In round r every rank receives its own r-th bucket and serves the r-th bucket of everyone else.
Ranks with fewer buckets (later pipeline stages, idle ranks) take part in every round, because they
own shards that others need.

A push is the pull with roles swapped and rounds reversed, over the slices whose gradient a rank
contributes; owners add up what arrives. That one rule subsumes data parallel reduction, tied
embeddings and shared key-value heads. What several ranks need alike is packed once and sent to
each: an all-gather where that is everything, a broadcast where it is a part; their pushes are a
reduce-scatter and a reduction, in the order of ranks.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from ds_hydra.zero_link.direct import AskedBuckets, DirectPlanner
from ds_hydra.zero_link.layout import ParamSpec
from ds_hydra.zero_link.messages import SINGLE_NUMEL, LinkPlan, RankBuckets
from ds_hydra.zero_link.node_aware import NodePlanner

PLAN_VERSION = 2
"""Part of the digest: ranks with different planners do not exchange."""


def plan_link(
    params: Sequence[ParamSpec],
    rank_buckets: Sequence[RankBuckets],
    rank: int,
    *,
    gradients: bool = False,
    ranks_per_node: int | None = None,
    independent_rounds: bool = False,
) -> LinkPlan:
    """The part of `rank` in pulling every rank's buckets; with `gradients`, in pushing their
    gradients.

    `ranks_per_node` asks for node-aware routes between nodes of that many consecutive ranks (the
    last node may have fewer). With `independent_rounds` no round needs what an earlier one relayed,
    so that any round can run alone; a cell may then cross a node's boundary once for each round.

    Pure: every rank computes its own part from the same arguments, and the parts fit together
    because both ends enumerate blocks in the same order.
    """
    asked = AskedBuckets.of(rank_buckets, gradients)
    if ranks_per_node is not None and ranks_per_node < asked.num_ranks:
        planner: DirectPlanner = NodePlanner(
            params, asked, rank, ranks_per_node, independent_rounds
        )
    else:
        ranks_per_node = None
        planner = DirectPlanner(params, asked, rank)
    return LinkPlan(
        rank=rank,
        num_ranks=asked.num_ranks,
        ranks_per_node=ranks_per_node,
        gradients=gradients,
        digest=_digest(params, asked, (gradients, ranks_per_node, independent_rounds)),
        rounds=tuple(planner.round(index) for index in range(asked.num_rounds)),
    )


def _digest(params: Sequence[ParamSpec], asked: AskedBuckets, options: tuple[object, ...]) -> int:
    """63 bits of everything that the parts of all ranks follow from."""
    digest = hashlib.blake2b(digest_size=8)
    digest.update(repr((PLAN_VERSION, SINGLE_NUMEL, options, asked.ids.shape)).encode())
    digest.update(
        repr([(s.fqn, s.shape, s.slicing.value, s.requires_grad) for s in params]).encode()
    )
    for bucket in asked.buckets:
        refs = [
            (slot, r.param, r.region.row, r.region.num_rows, r.region.col, r.region.num_cols)
            for slot, r in bucket
        ]
        digest.update(repr(refs).encode())
    digest.update(asked.ids.tobytes())
    return int.from_bytes(digest.digest(), "big") >> 1
