"""Pull and push of all ranks: what arrives is what a slice of the full tensor holds, whatever the
route.
"""

from __future__ import annotations

import dataclasses
import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from link_cases import World, decoder_specs, random_link, strategy_buckets

from benchmarks.link_memory import packed_elements
from ds_hydra.engine import strategy_links
from ds_hydra.errors import PlanMismatchError
from ds_hydra.strategy import Strategy
from ds_hydra.zero_link import buffers, plan_link

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
ANY_ROUTES = st.fixed_dictionaries(
    {"ranks_per_node": st.sampled_from([None, 1, 2, 3, 4]), "independent_rounds": st.booleans()}
)


@given(random_link(), ANY_ROUTES, st.sampled_from([torch.float32, torch.bfloat16]), st.data())
@settings(max_examples=40, deadline=None)
def test_a_pull_gives_slices_and_a_push_their_sums(link, routes, gradient_dtype, data):
    """Bit by bit: whole numbers have one sum, in whatever order, and are sent in 16 bits, too."""
    specs, _, rank_buckets = link
    world = World(specs, rank_buckets, routes["ranks_per_node"], gradient_dtype)
    plans, pushes = world.plans(**routes), world.plans(gradients=True, **routes)
    num_rounds = len(plans[0].rounds)
    # By direct routes, too, no round needs another one
    is_free = routes["independent_rounds"] or len(plans[0].rounds[0].hops) == 1
    world.pull(plans, data.draw(st.permutations(range(num_rounds))) if is_free else None)

    def whole(numel):
        return torch.randint(-5, 6, (numel,)).float()

    gradients, start = world.fresh(whole), [whole(spec.numel) for spec in specs]
    wanted = world.add_in_order(gradients, start)
    for _ in range(2):
        got = world.push(pushes, gradients, start)
        torch.testing.assert_close(got, wanted, rtol=0, atol=0)
    # One all-to-all for each hop of a round
    hops = sum(
        len(round_.hops) for round_ in (*plans[0].rounds, *pushes[0].rounds, *pushes[0].rounds)
    )
    posted = [n for group, n in world.wire.num_posted.items() if group.rank == 0]
    assert sum(posted) == hops


@given(random_link())
@settings(max_examples=40, deadline=None)
def test_owners_add_in_the_order_of_ranks(link):
    specs, _, rank_buckets = link
    world = World(specs, rank_buckets)
    gradients, start = world.fresh(torch.randn), [torch.randn(spec.numel) for spec in specs]
    got = world.push(world.plans(gradients=True), gradients, start)
    torch.testing.assert_close(got, world.add_in_order(gradients, start), rtol=0, atol=0)


@pytest.mark.parametrize("fused", [False, True])
def test_gradients_are_summed_by_classes_of_ranks_where_these_are_disjoint(fused):
    specs = decoder_specs(5, NUM_LAYERS, tied=True, frozen=True, fused=fused)
    classes = set()
    for text, routes, rank in itertools.product(STRATEGIES, ROUTES, range(4)):
        rank_buckets = strategy_buckets(specs, Strategy.parse(text), 4, NUM_LAYERS)
        plan = plan_link(specs, rank_buckets, rank, gradients=True, **routes)
        for hop in (hop for round_ in plan.rounds for hop in round_.hops):
            side = buffers.pack_hop(hop, rank, 4)
            classes.add(tuple(len(addition.begins) for addition in side.additions))
            assert max(side.shards.numel, side.slices.numel) <= packed_elements(plan)
    assert (4,) in classes  # four ranks contribute the same blocks
    assert any(len(found) > 1 and max(found) > 1 for found in classes)  # disjoint classes
    assert any(len(found) > 2 and max(found) == 1 for found in classes)  # rank by rank


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


def test_plans_that_differ_are_refused_before_any_exchange(monkeypatch):
    """Rank 2 plans from another model, or has another part of the same plan."""
    strategy = Strategy.parse("1x<2,1> + 2x<1,1>")

    def plans_of(hidden):
        specs = decoder_specs(hidden, NUM_LAYERS, tied=True)
        rank_buckets = strategy_buckets(specs, strategy, 4, NUM_LAYERS)
        pulls, pushes = (
            [plan_link(specs, rank_buckets, rank, gradients=gradients) for rank in range(4)]
            for gradients in (False, True)
        )
        return list(zip(pulls, pushes, strict=True))

    def check(plans):
        numbers = [[n for p in own for n in (p.digest, p.traffic_balance)] for own in plans]
        gathered = torch.tensor(numbers, dtype=torch.int64)
        monkeypatch.setattr(strategy_links, "gather_by_hosts", lambda *_: gathered)
        strategy_links.check_link_plans(strategy, plans[0], torch.device("cpu"))

    good, other = plans_of(5), plans_of(8)
    check(good)
    pull, push = good[2]
    part = dataclasses.replace(push, rounds=push.rounds[:-1])
    with pytest.raises(PlanMismatchError) as caught:
        check([*good[:2], (pull, other[2][1]), good[3]])
    assert "the link plan of the push of 1x<2,1> + 2x<1,1> has digest " in str(caught.value)
    assert "on rank 2 (1 of 4 ranks differ); nothing was exchanged." in str(caught.value)
    with pytest.raises(PlanMismatchError, match="do not fit together although their digests agree"):
        check([*good[:2], (pull, part), good[3]])
