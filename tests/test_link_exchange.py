"""Pull and push on 4 gloo ranks: what arrives is what a slice of the full tensor holds, whatever
the route.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from distributed import run_distributed
from engines import refused
from link_cases import bucket_of, crop, decoder_specs, shards_of, strategy_buckets

from benchmarks.link_memory import packed_elements
from ds_hydra.engine.strategy_links import check_link_plans
from ds_hydra.engine.transfer.session import RoundWindow
from ds_hydra.errors import PlanMismatchError
from ds_hydra.strategy import Strategy
from ds_hydra.zero_link import plan_link
from ds_hydra.zero_link.buffers import pack_hop
from ds_hydra.zero_link.exchange import Link

NUM_LAYERS = 3
STRATEGIES = (
    "4x<1,1>", "1x<4,1>", "1x<1,3>", "1x<2,1> + 1x<1,2>", "1x<2,1> + 2x<1,1>", "1x<1,2> + 2x<1,1>",
    "1x<2,1>",
)  # fmt: skip
ROUTES = (
    {},
    {"ranks_per_node": 2},
    {"ranks_per_node": 3},
    {"ranks_per_node": 2, "independent_rounds": True},
)


class Case:
    """One strategy on all ranks: known shards, and room for slices and gradients."""

    def __init__(self, specs, text, dtype=torch.float32):
        self.rank, self.num_ranks = dist.get_rank(), dist.get_world_size()
        self.specs = specs
        self.rank_buckets = strategy_buckets(
            specs, Strategy.parse(text), self.num_ranks, NUM_LAYERS
        )
        generator = torch.Generator().manual_seed(0)
        self.full = [torch.randn(spec.numel, generator=generator).to(dtype) for spec in specs]
        self.shards_P = shards_of(specs, self.full, self.num_ranks)[self.rank]
        self.buckets = self.rank_buckets[self.rank]

    def plan(self, **options):
        return plan_link(self.specs, self.rank_buckets, self.rank, **options)

    def empty_slices(self):
        dtype = self.shards_P[0].dtype
        return [
            [torch.full((ref.region.numel,), torch.nan, dtype=dtype) for ref in b]
            for b in self.buckets
        ]

    def gradients(self, rank=None):
        """Known gradients of a rank's slices."""
        generator = torch.Generator().manual_seed(7 + (self.rank if rank is None else rank))
        buckets = self.rank_buckets[self.rank if rank is None else rank]
        return [
            [torch.randn(ref.region.numel, generator=generator) for ref in bucket]
            for bucket in buckets
        ]

    def empty_shards(self):
        return [torch.zeros(spec.shard_numel(self.num_ranks)) for spec in self.specs]

    def expected_slices(self):
        return [
            [
                crop(self.specs[ref.param], self.full[ref.param], ref.region).flatten()
                for ref in bucket
            ]
            for bucket in self.buckets
        ]

    def expected_sums(self):
        """This rank's shards of the float64 sum over all contributors."""
        sums = [torch.zeros(spec.numel, dtype=torch.float64) for spec in self.specs]
        for rank, buckets in enumerate(self.rank_buckets):
            for bucket, grads in zip(buckets, self.gradients(rank), strict=True):
                for ref, grad in zip(bucket, grads, strict=True):
                    if ref.pushes_gradient and ref.region.numel:
                        target = crop(self.specs[ref.param], sums[ref.param], ref.region)
                        target += grad.view_as(target)
        return shards_of(self.specs, sums, self.num_ranks)[self.rank]


def group_of_node(ranks_per_node):
    """This rank's node of that many ranks, of which the last one may have fewer; None without."""
    if ranks_per_node is None:
        return None
    found, everyone = None, range(dist.get_world_size())
    for begin in everyone[::ranks_per_node]:
        node = everyone[begin : begin + ranks_per_node]
        group = dist.new_group(list(node))  # of all nodes, on all ranks
        found = group if dist.get_rank() in node else found
    return found


def links(dtype=torch.float32, **more):
    """(pull, push) by the number of ranks of a node."""
    cpu, found = torch.device("cpu"), {}
    for ranks_per_node in (None, 2, 3):
        groups = [dist.new_group(list(range(dist.get_world_size()))) for _ in range(2)]
        nodes = [group_of_node(ranks_per_node) for _ in range(2)]
        found[ranks_per_node] = (
            Link(groups[0], cpu, node_group=nodes[0], **more),
            Link(groups[1], cpu, dtype, node_group=nodes[1], **more),
        )
    return found


def pull(link, plan, shards_P, bucket_S):
    """Fill this rank's slices, of all its buckets, from all ranks' shards."""

    def begin(index):
        return link.begin_pull(plan, index, shards_P, bucket_of(bucket_S, index))

    with RoundWindow(begin, link.abandon) as rounds:
        for index in range(len(plan.rounds)):
            rounds.post(index)


def push(link, plan, grad_bucket_S, grads_P):
    """Add this rank's gradients of all its buckets to the owners' shards."""

    def begin(index):
        return link.begin_push(plan, index, bucket_of(grad_bucket_S, index), grads_P)

    with RoundWindow(begin, link.abandon) as rounds:
        for index in reversed(range(len(plan.rounds))):
            rounds.post(index)


def check_all_routes(hidden, single_numel, fused):
    """Every strategy by every route; blocks of `single_numel` elements and more travel alone."""
    from ds_hydra.zero_link import buffers, layout

    layout.SINGLE_NUMEL = buffers.SINGLE_NUMEL = single_numel
    by_node = links()
    specs = decoder_specs(hidden, NUM_LAYERS, tied=hidden > 2, frozen=hidden > 2, fused=fused)
    for text in STRATEGIES:
        case = Case(specs, text, torch.bfloat16)
        for routes in ROUTES:
            pull_link, push_link = by_node[routes.get("ranks_per_node")]
            slices = case.empty_slices()
            pull(pull_link, case.plan(**routes), case.shards_P, slices)
            torch.testing.assert_close(
                slices, case.expected_slices(), rtol=0, atol=0, msg=f"{text} {routes}"
            )
            results = []
            for _ in range(2):
                grads_P = case.empty_shards()
                push(push_link, case.plan(gradients=True, **routes), case.gradients(), grads_P)
                results.append(grads_P)
            torch.testing.assert_close(results[0], results[1], rtol=0, atol=0)
            wanted = [total.float() for total in case.expected_sums()]
            torch.testing.assert_close(
                results[0], wanted, rtol=1e-6, atol=1e-6, msg=f"{text} {routes}"
            )


def count_all_to_alls(run, *arguments):
    """How many `run(*arguments)` posts; messages on their own are none."""
    with (
        mock.patch.object(dist, "all_to_all_single", wraps=dist.all_to_all_single) as posted,
        mock.patch.object(dist, "batch_isend_irecv") as single,
    ):
        run(*arguments)
    assert not single.called
    return posted.call_count


def check_packed_rounds():
    """One all-to-all for each hop of a round: the same bits as messages, in slices and sums."""
    num_classes = set()
    for fused, gradient_dtype in ((False, torch.float32), (True, torch.bfloat16)):
        ways = [links(gradient_dtype, packs=packs) for packs in (False, True)]
        specs = decoder_specs(5, NUM_LAYERS, tied=True, frozen=True, fused=fused)
        for text, routes in itertools.product(STRATEGIES, ROUTES):
            (_, messages), (pulls, packed) = (way[routes.get("ranks_per_node")] for way in ways)
            case = Case(specs, text, torch.bfloat16)
            pull_plan, push_plan = case.plan(**routes), case.plan(gradients=True, **routes)
            slices, results = case.empty_slices(), []
            calls = count_all_to_alls(pull, pulls, pull_plan, case.shards_P, slices)
            assert calls == sum(len(round_.hops) for round_ in pull_plan.rounds)
            torch.testing.assert_close(slices, case.expected_slices(), rtol=0, atol=0, msg=text)
            for link in (messages, packed, packed):
                grads_P = [torch.full_like(grad, 0.3) for grad in case.empty_shards()]
                push(link, push_plan, case.gradients(), grads_P)
                results.append(grads_P)
            torch.testing.assert_close(results[0], results[1], rtol=0, atol=0, msg=text)
            torch.testing.assert_close(results[0], results[2], rtol=0, atol=0, msg=text)
            for round_ in push_plan.rounds:
                for hop in round_.hops:
                    side = pack_hop(hop, case.rank, 4)
                    num_classes.add(tuple(len(addition.begins) for addition in side.additions))
                    assert max(side.shards.numel, side.slices.numel) <= packed_elements(push_plan)
    return num_classes


@pytest.mark.slow
@pytest.mark.distributed
def test_packed_rounds_give_the_same_bits():
    classes = set().union(*run_distributed(check_packed_rounds, 4))
    assert (4,) in classes  # four ranks contribute the same blocks
    assert any(len(found) > 1 and max(found) > 1 for found in classes)  # disjoint classes
    assert any(len(found) > 2 and max(found) == 1 for found in classes)  # rank by rank


def check_interleavings():
    """Ranks begin and finish rounds at different times; the order of each is the same on all."""
    by_node = links()
    case = Case(decoder_specs(5, NUM_LAYERS, tied=True), "1x<1,2> + 2x<1,1>")
    window = 1 + case.rank
    for routes in ROUTES:
        pull_link, push_link = by_node[routes.get("ranks_per_node")]
        slices, grads_P = case.empty_slices(), case.empty_shards()
        plan = case.plan(**routes)
        order = range(len(plan.rounds))

        def run(order, begin, window=window):
            under_way = []
            for index in order:
                under_way.append(begin(index))
                if len(under_way) == window:
                    under_way.pop(0)()
            for finish in under_way:
                finish()

        run(
            order,
            lambda i, p=plan, s=slices, link=pull_link: link.begin_pull(
                p, i, case.shards_P, bucket_of(s, i)
            ),
        )
        torch.testing.assert_close(slices, case.expected_slices(), rtol=0, atol=0)
        push_plan, grads = case.plan(gradients=True, **routes), case.gradients()
        run(
            reversed(order),
            lambda i, p=push_plan, g=grads, t=grads_P, link=push_link: link.begin_push(
                p, i, bucket_of(g, i), t
            ),
        )
        wanted = case.empty_shards()
        push(push_link, push_plan, grads, wanted)
        torch.testing.assert_close(grads_P, wanted, rtol=0, atol=0)


def check_independent_rounds_run_alone():
    pull_link, _ = links()[2]
    case = Case(decoder_specs(5, NUM_LAYERS, tied=True), "1x<1,2> + 2x<1,1>")
    plan = case.plan(ranks_per_node=2, independent_rounds=True)
    slices = case.empty_slices()
    for index in reversed(range(len(plan.rounds))):
        pull_link.begin_pull(plan, index, case.shards_P, bucket_of(slices, index))()
    torch.testing.assert_close(slices, case.expected_slices(), rtol=0, atol=0)


def check_tampered_plans():
    """Rank 2 plans from another model, or has another part of the same plan: caught on every rank
    before any exchange.
    """
    strategy = Strategy.parse("1x<2,1> + 2x<1,1>")
    case = Case(decoder_specs(5, NUM_LAYERS, tied=True), str(strategy))
    good = (case.plan(), case.plan(gradients=True))
    check_link_plans(strategy, good, torch.device("cpu"))
    other = Case(decoder_specs(8, NUM_LAYERS, tied=True), str(strategy))
    tampered = dataclasses.replace(good[1], rounds=good[1].rounds[:-1])
    digest, part = (
        "the link plan of the push of 1x<2,1> + 2x<1,1> has digest ",
        "do not fit together",
    )
    for plan, said in ((other.plan(gradients=True), digest), (tampered, part)):
        own = (good[0], plan) if case.rank == 2 else good
        check = functools.partial(check_link_plans, strategy, own, torch.device("cpu"))
        text = refused(check, PlanMismatchError)
        assert said in text
        where = "on rank 2 (1 of 4 ranks differ); nothing was exchanged."
        assert (where if said == digest else "although their digests agree") in text


def check_links():
    check_interleavings()
    check_independent_rounds_run_alone()
    check_tampered_plans()
    for hidden, single_numel, fused in ((5, 8, False), (2, 1 << 15, False), (5, 8, True)):
        check_all_routes(hidden, single_numel, fused)


@pytest.mark.distributed
def test_pull_gives_slices_bit_by_bit_and_push_the_same_sums_twice():
    """By every route; ranks may keep different numbers of rounds under way, and plans that differ
    are caught.
    """
    run_distributed(check_links, 4)
