"""Link plans of all ranks fit together: every element has one source, comes back, and crosses few
wires.
"""

from __future__ import annotations

import dataclasses

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from link_cases import (
    World,
    crop,
    crop_of,
    decoder_specs,
    random_link,
    sent_elements,
    strategy_buckets,
)

from benchmarks.link_memory import relayed_elements
from ds_hydra.strategy import Strategy
from ds_hydra.zero_link import Region, plan_link
from ds_hydra.zero_link.plan import cut_cells


def plans_of(specs, rank_buckets, **options):
    return [plan_link(specs, rank_buckets, rank, **options) for rank in range(len(rank_buckets))]


def least_elements_across_nodes(specs, rank_buckets, ranks_per_node, gradients):
    """Brute force: for each element, the nodes other than its owner's in which a rank needs it."""
    num_ranks = len(rank_buckets)
    total = 0
    for param, spec in enumerate(specs):
        owner_node = np.arange(spec.numel) // spec.shard_numel(num_ranks) // ranks_per_node
        for node in range(-(-num_ranks // ranks_per_node)):
            needed = np.zeros(spec.numel, dtype=bool)
            for rank in range(node * ranks_per_node, min((node + 1) * ranks_per_node, num_ranks)):
                for bucket in rank_buckets[rank]:
                    for ref in bucket:
                        if ref.param == param and (ref.pushes_gradient or not gradients):
                            crop(spec, needed, ref.region)[...] = True
            total += int((needed & (owner_node != node)).sum())
    return total


def elements_across_nodes(plans, ranks_per_node):
    return sum(
        numel
        for plan in plans
        for peer, numel in sent_elements(plan).items()
        if peer // ranks_per_node != plan.rank // ranks_per_node
    )


ROUTES = st.fixed_dictionaries(
    {"ranks_per_node": st.sampled_from([None, 1, 2, 3, 4]), "independent_rounds": st.booleans()}
)


@given(random_link(), st.integers(1, 5), st.booleans())
@settings(max_examples=40, deadline=None)
def test_bytes_across_nodes_equal_the_lower_bound(link, ranks_per_node, gradients):
    specs, _, rank_buckets = link
    plans = plans_of(specs, rank_buckets, gradients=gradients, ranks_per_node=ranks_per_node)
    least = least_elements_across_nodes(specs, rank_buckets, ranks_per_node, gradients)
    assert elements_across_nodes(plans, ranks_per_node) == least
    direct = plans_of(specs, rank_buckets, gradients=gradients)
    assert elements_across_nodes(direct, ranks_per_node) >= least


def link_of(text, num_ranks, **options):
    specs = decoder_specs(8, 4, tied=True)
    return specs, strategy_buckets(specs, Strategy.parse(text), num_ranks, 4)


def test_a_layer_needed_in_different_rounds_crosses_once_unless_rounds_are_independent():
    # The node of ranks 2 and 3 needs layers 2 and 3 in rounds 0 and 1 (second stage) and in rounds
    # 3 and 4.
    specs, rank_buckets = link_of("1x<1,2> + 2x<1,1>", 4)
    rank_buckets = [rank_buckets[r] for r in (0, 2, 1, 3)]
    least = least_elements_across_nodes(specs, rank_buckets, 2, False)
    assert elements_across_nodes(plans_of(specs, rank_buckets, ranks_per_node=2), 2) == least
    independent = plans_of(specs, rank_buckets, ranks_per_node=2, independent_rounds=True)
    assert elements_across_nodes(independent, 2) > least
    assert all(r.relayed_until == i for p in independent for i, r in enumerate(p.rounds))


def test_what_is_relayed_stays_until_the_last_round_of_its_node():
    """The last layer comes in round 0 for rank 3, the second stage, and in round 3 for ranks 0 and
    1.
    """
    specs = decoder_specs(8, num_layers=3, tied=True)
    strategy = Strategy.parse("1x<2,1> + 1x<1,2> + 4x<1,1>")
    rank_buckets = strategy_buckets(specs, strategy, 8, 3)
    plans = plans_of(specs, rank_buckets, ranks_per_node=4)
    assert [plan.rounds[0].relayed_until for plan in plans] == [3] * 4 + [0] * 4
    World(specs, rank_buckets, 4).pull(plans)


def test_staging_ranks_of_a_node_share_the_work():
    specs, rank_buckets = link_of("8x<1,1>", 8)
    plans = plans_of(specs, rank_buckets, ranks_per_node=4)
    relayed = [relayed_elements(plan) for plan in plans]
    total = sum(spec.numel for spec in specs)
    assert all(relayed)
    assert max(relayed) <= total / 4  # at most what one of four others owns, round by round


def test_equal_blocks_are_packed_once_for_all_their_readers():
    specs, rank_buckets = link_of("4x<1,1>", 4)
    plan = plan_link(specs, rank_buckets, 1)
    for round_ in plan.rounds:
        (hop,) = round_.hops
        assert [batch.peers for batch in hop.outgoing] == [(0, 2, 3)]


def test_equal_inputs_give_equal_digests_on_all_ranks_and_any_difference_another():
    specs, rank_buckets = link_of("1x<2,1> + 2x<1,1>", 4)
    base = {plan.digest for plan in plans_of(specs, rank_buckets)}
    assert len(base) == 1
    (digest,) = base
    _, others = link_of("2x<2,1>", 4)
    frozen = [dataclasses.replace(s, requires_grad=s.fqn != "0.q") for s in specs]
    reordered = [*rank_buckets[:2], rank_buckets[3], ()]
    assert digest not in {
        plan_link(specs, others, 0).digest,
        plan_link(frozen, rank_buckets, 0).digest,
        plan_link(specs, reordered, 0).digest,
        plan_link(specs, rank_buckets, 0, gradients=True).digest,
        plan_link(specs, rank_buckets, 0, ranks_per_node=2).digest,
        plan_link(specs, rank_buckets, 0, ranks_per_node=2, independent_rounds=True).digest,
    }
    assert plan_link(specs, rank_buckets, 0, ranks_per_node=4).digest == digest, (
        "one node is direct"
    )


@given(random_link(), ROUTES)
@settings(max_examples=40, deadline=None)
def test_fingerprints_of_sent_and_received_messages_cancel(link, routes):
    specs, _, rank_buckets = link
    plans = plans_of(specs, rank_buckets, **routes)
    assert sum(plan.traffic_balance for plan in plans) % (1 << 64) == 0


def test_a_rank_whose_part_differs_unbalances_the_traffic():
    specs, rank_buckets = link_of("1x<2,1> + 2x<1,1>", 4)
    plans = plans_of(specs, rank_buckets)
    smaller = [*rank_buckets[:3], tuple(bucket[:-1] for bucket in rank_buckets[3])]
    plans[3] = plan_link(specs, smaller, 3)
    assert sum(plan.traffic_balance for plan in plans) % (1 << 64) != 0


@given(
    st.sets(
        st.builds(
            Region, st.integers(0, 4), st.integers(1, 4), st.integers(0, 3), st.integers(1, 3)
        ),
        min_size=1,
        max_size=4,
    )
)
def test_cells_cover_their_regions_once_and_cross_no_edge(regions):
    covered = np.zeros((8, 6), dtype=int)
    for cell in cut_cells(regions):
        crop_of(covered, cell)[...] += 1
        for region in regions:
            inside = np.zeros((8, 6), dtype=bool)
            crop_of(inside, region)[...] = True
            part = crop_of(inside, cell)
            assert part.all() or not part.any()
    wanted = np.zeros((8, 6), dtype=int)
    for region in regions:
        crop_of(wanted, region)[...] = 1
    np.testing.assert_array_equal(covered, wanted)
