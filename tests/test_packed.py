"""Rounds packed into one all-to-all, of all ranks in one process: slices and sums bit by bit."""

from __future__ import annotations

from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from link_cases import bucket_of, crop, random_link, shards_of

from benchmarks.link_memory import packed_elements
from ds_hydra.zero_link import buffers, plan_link
from ds_hydra.zero_link.exchange import Link

CPU = torch.device("cpu")


class Wire:
    """All-to-alls of ranks that post one after the other; nothing arrives before `deliver`."""

    def __init__(self):
        self.posted = []

    def all_to_all_single(self, incoming, outgoing, into, out, *, group, async_op):
        assert async_op
        self.posted.append((incoming.split(into), outgoing.split(out)))
        return mock.Mock()

    def deliver(self):
        for rank, (incoming, _) in enumerate(self.posted):
            for peer, (_, outgoing) in enumerate(self.posted):
                incoming[peer].copy_(outgoing[rank])
        self.posted.clear()


def run_rounds(plans, order, begin):
    """`begin(link, plan, index, rank)` on every rank, delivery, finish."""
    wire = Wire()
    links = [Link(None, CPU, packs=True) for _ in plans]
    with mock.patch.object(dist, "all_to_all_single", wire.all_to_all_single):
        for index in order:
            under_way = [begin(links[r], plan, index, r) for r, plan in enumerate(plans)]
            wire.deliver()
            for finish in under_way:
                finish()


@given(random_link())
@settings(max_examples=60, deadline=None)
def test_packed_rounds_of_random_links(link):
    specs, _, rank_buckets = link
    num_ranks = len(rank_buckets)
    torch.manual_seed(0)
    fulls = [torch.randn(spec.numel) for spec in specs]
    shards = shards_of(specs, fulls, num_ranks)
    slices = [
        [[torch.full((ref.region.numel,), torch.nan) for ref in bucket] for bucket in buckets]
        for buckets in rank_buckets
    ]
    pulls = [plan_link(specs, rank_buckets, rank) for rank in range(num_ranks)]
    run_rounds(
        pulls,
        range(len(pulls[0].rounds)),
        lambda link, plan, i, r: link.begin_pull(plan, i, shards[r], bucket_of(slices[r], i)),
    )
    for buckets, got in zip(rank_buckets, slices, strict=True):
        wanted = [
            [crop(specs[x.param], fulls[x.param], x.region).flatten() for x in b] for b in buckets
        ]
        torch.testing.assert_close(got, wanted, rtol=0, atol=0)

    grads = [[[torch.randn_like(s) for s in bucket] for bucket in mine] for mine in slices]
    start = [torch.randn(spec.numel) for spec in specs]
    sums = shards_of(specs, start, num_ranks)
    pushes = [plan_link(specs, rank_buckets, rank, gradients=True) for rank in range(num_ranks)]
    run_rounds(
        pushes,
        reversed(range(len(pushes[0].rounds))),
        lambda link, plan, i, r: link.begin_push(plan, i, bucket_of(grads[r], i), sums[r]),
    )
    wanted_sums = add_in_order(specs, rank_buckets, grads, start)
    torch.testing.assert_close(sums, shards_of(specs, wanted_sums, num_ranks), rtol=0, atol=0)
    for plan in pushes:
        most = packed_elements(plan)
        for round_ in plan.rounds:
            hop = buffers.pack_hop(round_.hops[0], plan.rank, num_ranks)
            assert max(hop.shards.numel, hop.slices.numel) <= most


def add_in_order(specs, rank_buckets, grads, start):
    """Rounds from the last to the first, in each the ranks in order, as one process adds them."""
    totals = [tensor.clone() for tensor in start]
    for index in reversed(range(max(map(len, rank_buckets)))):
        for buckets, mine in zip(rank_buckets, grads, strict=True):
            for ref, grad in zip(bucket_of(buckets, index), bucket_of(mine, index), strict=True):
                if ref.pushes_gradient and ref.region.numel:
                    target = crop(specs[ref.param], totals[ref.param], ref.region)
                    target += grad.view_as(target)
    return totals


BLOCKS = st.tuples(
    *[st.integers(0, 2), st.integers(0, 12), st.integers(3, 5), *[st.integers(1, 3)] * 2]
)
"""(key, offset, stride, rows, cols): rows of a block do not reach into each other."""


@given(st.lists(st.lists(BLOCKS, min_size=1, max_size=2), min_size=1, max_size=3))
@settings(max_examples=300, deadline=None)
def test_disjoint_blocks_are_told_from_those_that_share_an_element(tables):
    elements = [
        (key, offset + row * stride + col)
        for key, offset, stride, rows, cols in (block for table in tables for block in table)
        for row in range(rows)
        for col in range(cols)
    ]
    found = buffers._are_disjoint([np.array(table) for table in tables])
    assert found == (len(set(elements)) == len(elements))
