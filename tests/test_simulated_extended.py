"""The full space of ds_hydra in the simulator: schemes, estimates, candidates, bounds."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from test_cluster import SHAPE, make_cluster
from test_simulator import make_workload, small_profile

from ds_hydra.lab.simulator.cases import load_case
from ds_hydra.lab.simulator.compare import compare
from ds_hydra.lab.simulator.systems import Settings
from ds_hydra.lab.simulator.ulysses import balance_micro_batches_by_time
from ds_hydra.sampler.candidate_set import decide_candidates
from ds_hydra.sampler.sample_bench import CandidateSettings
from ds_hydra.strategy.cost_models.cluster import find_cluster
from ds_hydra.strategy.cost_models.costs import World
from ds_hydra.strategy.profiles.profile import Profile, with_engine_layers
from ds_hydra.strategy.proposal.histogram import LengthHistogram
from ds_hydra.strategy.proposal.space import unpruned_schemes
from ds_hydra.strategy.schemes.scheme import Scheme

LONG = LengthHistogram.from_counts({5: 400, 20: 200, 200: 30}, name="long")
"""Now and then a sequence that takes longer alone than everything else together."""


@pytest.fixture(scope="module")
def comparison():
    workload = make_workload(histogram=LONG, context_length=200, tokens_per_iteration=400)
    systems = ("plain", "deepspeed", "two_stage")
    return compare(workload, Settings(iterations=6, systems=systems))


def derived(profile, cluster):
    world = World.of(profile, cluster, 8, 1)
    return world.costs.table(unpruned_schemes(world))


def test_groups_as_wide_as_a_profiled_one_need_no_links():
    profile = derived(small_profile(), None)
    assert {s for s in profile.latency if s.sp > 1} == {
        Scheme(1, 1, sp=2),
        Scheme(1, 1, sp=4),
        Scheme(2, 1, sp=2),
    }
    document = small_profile().document
    model = {**document["model"], "num_attention_heads": 2}
    heads = Profile.from_json({**document, "model": model})
    found = derived(heads, None).latency
    assert [str(s) for s in found if s.num_shards > 1] == [
        *("<sp2,1>", "<cp2,1>", "<cp4,1>", "<sp2,cp2,1>", "<cp2,2,1>"),
    ]


def test_extended_groups_exchange_over_the_links_by_hand():
    """<sp2,4,1> on two nodes of 4: ranks send half of what they hold, 2 * 10 / 8 bytes per token,
    80 times, in 40 exchanges.
    """
    profile = derived(small_profile(), make_cluster(8))
    found, base = profile.get_latency(Scheme(4, 1, sp=2)), profile.get_latency(Scheme(4, 1))
    rate = 100 / 4  # bytes in a ms: the ranks of a node share its link
    assert found.quadratic_ms == pytest.approx(base.quadratic_ms / 2)
    assert found.linear_ms == pytest.approx(
        base.linear_ms / 2 + 8 * SHAPE.num_layers * 2 * 10 / 8 / 2 / rate
    )
    assert found.constant_ms == base.constant_ms  # no overhead of collectives in this description
    slower = make_cluster(8)
    slower = dataclasses.replace(
        slower, hardware=dataclasses.replace(slower.hardware, collective_overhead_ms=0.5)
    )
    late = derived(small_profile(), slower).get_latency(Scheme(4, 1, sp=2))
    assert late.constant_ms == pytest.approx(base.constant_ms + 4 * SHAPE.num_layers * 0.5)
    inside = derived(small_profile(), make_cluster(8, devices_per_node=8))
    assert inside.get_latency(Scheme(4, 1, sp=2)).linear_ms < found.linear_ms


def test_the_extended_space_is_faster_and_its_strategies_are_named(comparison):
    ours, extended = comparison.planned["plain"], comparison.planned["ds_hydra"]
    assert comparison.results[0] is extended.result
    assert comparison.get("plain") is ours.result
    assert (extended.result.propagation_ms <= ours.result.propagation_ms * 1.001).all()
    assert extended.result.propagation_ms.sum() < 0.95 * ours.result.propagation_ms.sum()
    assert "<sp" in extended.result.strategy
    assert "<sp" not in ours.result.strategy


def test_document_names_the_space_and_keeps_the_rest_as_it_was(comparison):
    document = comparison.to_json()
    assert [s["name"] for s in document["systems"]] == [
        "ds_hydra", "plain", "deepspeed", "two_stage",
    ]  # fmt: skip
    assert document["strategies"] == [str(s) for s in comparison.planned["ds_hydra"].strategies]
    assert document["plain"]["strategies"] == [
        str(s) for s in comparison.planned["plain"].strategies
    ]
    assert document["plain"]["perfect_balance_ms"] > document["perfect_balance_ms"]
    assert document["plain"]["distance_to_bound"] >= 0
    assert document["space"] == "full"
    without = compare(make_workload(), Settings(iterations=2, systems=("two_stage",))).to_json()
    assert "plain" not in without


def test_other_systems_do_not_see_the_extended_space(comparison):
    alone = compare(
        comparison.workload,
        Settings(iterations=6, systems=("deepspeed", "two_stage"), space="plain"),
    )
    for name in ("deepspeed", "two_stage"):
        np.testing.assert_array_equal(
            alone.get(name).propagation_ms, comparison.get(name).propagation_ms
        )
    np.testing.assert_array_equal(
        alone.get("ds_hydra").propagation_ms, comparison.get("plain").propagation_ms
    )


def test_plans_of_both_planned_systems(comparison):
    for system in ("ds_hydra", "plain"):
        found = [comparison.simulate(i, system).propagation_ms for i in range(3)]
        assert found == pytest.approx(comparison.get(system).propagation_ms[:3])
    used = {s for plan in comparison.planned["ds_hydra"].plans for s in plan.strategy.schemes}
    assert any(scheme.sp > 1 for scheme in used)


def candidates_of_the_engine(workload, cluster, seed=0):
    settings = CandidateSettings(
        num_devices=workload.num_devices,
        context_length=workload.context_length,
        tokens_per_iteration=workload.tokens_per_iteration,
        space="full",
        cluster=cluster,
        num_batches=4,
        seed=seed,
    )
    return decide_candidates(with_engine_layers(workload.profile), workload.histogram, settings)


def test_simulated_candidates_are_those_of_the_engine():
    workload = load_case("paper/commoncrawl-7b-8gpu-f1").workload
    cluster = find_cluster(workload.profile, workload.num_devices)
    simulated = Settings(iterations=1, systems=(), num_proposal_batches=4)
    planned = compare(workload.linked_by(cluster), simulated).planned["ds_hydra"]
    found = candidates_of_the_engine(workload, cluster, simulated.seed + 1)
    assert planned.strategies == found.strategies
    assert any(s.gather for strategy in found.strategies for s in strategy.schemes)
    for strategy in found.strategies:
        for scheme in strategy.schemes:
            assert planned.profile.get_latency(scheme) == found.profile.get_latency(scheme)


def test_schemes_that_do_not_fit_still_say_what_others_take():
    """LLaMA 13B on 16 A800: <1,1> was profiled, does not fit, and is what <1,1;gather> takes."""
    workload = load_case("paper/github-13b-16gpu-f2").workload
    profile = with_engine_layers(workload.profile)
    cluster = find_cluster(profile, workload.num_devices)
    assert profile.max_len_tokens(Scheme(1, 1), workload.num_devices) < 0
    known = candidates_of_the_engine(workload, cluster).profile
    ones = [scheme for scheme in known.latency if scheme.gather and scheme.num_devices == 1]
    assert ones
    for scheme in ones:
        found, measured = known.get_latency(scheme), profile.get_latency(Scheme(1, 1))
        assert found.quadratic_ms >= measured.quadratic_ms


def test_micro_batches_by_time_are_packed_by_hand():
    """Two groups, two steps, room for 9 tokens: each goes to what then ends first."""
    lengths = np.array([6, 5, 4, 3, 2])
    micro_batches = np.zeros(5, dtype=np.int64)
    work = lengths.astype(np.float64)
    assert balance_micro_batches_by_time(lengths, work, 2, 2, 9, False, micro_batches)
    np.testing.assert_array_equal(micro_batches, [0, 1, 2, 3, 3])
    # By steps: 4 makes the first step longer by 3 beside the 5, a new one by 4; 3 fits beside the 6
    assert balance_micro_batches_by_time(lengths, work, 2, 2, 9, True, micro_batches)
    np.testing.assert_array_equal(micro_batches, [0, 1, 1, 0, 2])
    assert not balance_micro_batches_by_time(
        lengths, work, 2, 1, 9, False, micro_batches
    )  # 20 tokens, room for 18


def test_micro_batches_by_time_are_faster_than_first_fit_micro_batches():
    workload = load_case("paper/commoncrawl-7b-16gpu-f2").workload
    systems = ("deepspeed", "deepspeed_balanced", "deepspeed_degrees")
    found = compare(
        workload.linked_by(find_cluster(workload.profile, workload.num_devices)),
        Settings(iterations=2, systems=systems, space="plain"),
    )
    first_fit, by_time, any_degree = (found.get(name).iteration_ms for name in systems)
    assert (by_time < first_fit).all()
    assert (any_degree <= by_time).all()
    assert (any_degree < by_time).any()
