"""Gathered weights that stay on the node (`;hpz`): what crosses nodes, what it costs in memory, and
when the planner chooses it. Gradients are rows of the parity table.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from link_cases import World as Memories
from link_cases import decoder_specs, random_link, strategy_buckets
from reference import make_batch, make_profile
from test_cluster import PARAMS, make_cluster
from test_link_plan import elements_across_nodes, fill_shards, plans_of

from ds_hydra.configs import find_file
from ds_hydra.errors import HydraConfigError
from ds_hydra.lab.simulator.scenario import Scenario, priced
from ds_hydra.lab.simulator.systems import SYSTEMS
from ds_hydra.lab.simulator.ulysses import (
    optimizer_ms,
    packed_zero3,
    rank_tokens,
    zero3_traffic_ms,
)
from ds_hydra.sampler.planner.candidate import Phases
from ds_hydra.sampler.planner.iteration import plan_with_time, profiled_times
from ds_hydra.sampler.planner.phase_plan import PlanningProblem
from ds_hydra.sampler.planner.planner_settings import PlannerSettings
from ds_hydra.sampler.sample_bench import FastEstimator
from ds_hydra.strategy.cost_models.cluster import find_cluster
from ds_hydra.strategy.cost_models.costs import Costs, World
from ds_hydra.strategy.profiles.learned import (
    Corrections,
    LearnedTimes,
    PipelineTime,
    names_of,
)
from ds_hydra.strategy.profiles.profile import LinkTimes, Profile
from ds_hydra.strategy.proposal.space import candidate_schemes, unpruned_schemes
from ds_hydra.strategy.schemes.enumeration import neighbour_strategies
from ds_hydra.strategy.schemes.placement import ends_of_phases, groups_of, slices_key
from ds_hydra.strategy.schemes.scheme import Scheme, Strategy, parse_strategies
from ds_hydra.zero_link import Relayed

GATHERED, ON_NODES = Scheme.parse("<1,1;gather>"), Scheme.parse("<1,1;hpz>")
LAYERS = 4


def test_the_option_says_that_layers_are_gathered():
    scheme = Scheme.parse("<sp4,2,1;ckpt=3;hpz>")
    assert scheme.gather
    assert str(scheme) == "<sp4,2,1;ckpt=3;hpz>"
    assert Scheme.from_json(scheme.to_json()) == scheme
    assert Scheme.parse("<1,1;gather;hpz>") == ON_NODES != GATHERED
    assert scheme.without_options() == Scheme(2, 1, sp=4)
    assert Scheme.from_json({"tp": 1, "pp": 1, "hpz": True}) == ON_NODES
    with pytest.raises(HydraConfigError, match="hpz is for layers that are gathered; give gather"):
        Scheme(1, 1, hpz=True)
    with pytest.raises(HydraConfigError, match="ranks share experts; write ;gather"):
        Scheme.parse("<sp2,1;ep=2;hpz>")
    with pytest.raises(HydraConfigError, match="hpz"):
        Scheme.from_json({"tp": 1, "pp": 1, "gather": True, "hpz": 1})
    with pytest.raises(HydraConfigError, match="gather is for all layers of schemes of PP 1"):
        Scheme.parse("<1,2;hpz>")
    with pytest.raises(HydraConfigError, match="with and without hpz"):
        Strategy.parse("1x<1,1;hpz> + 1x<1,1;gather>")


def test_groups_are_those_of_gathered_layers_and_slices_are_not():
    on_nodes, crossing = Strategy.parse("4x<sp2,1;hpz>"), Strategy.parse("4x<sp2,1;gather>")
    assert groups_of(on_nodes) == groups_of(crossing)
    assert slices_key(on_nodes) != slices_key(crossing)
    assert slices_key(on_nodes) == slices_key(Strategy.parse("8x<1,1;hpz>"))
    assert ends_of_phases([on_nodes, crossing]) == [(True, True)] * 2


def plans(specs, rank_buckets, ranks_per_node, relayed):
    return plans_of(
        specs,
        rank_buckets,
        ranks_per_node=ranks_per_node,
        independent_rounds=True,
        relayed=relayed,
    )


@given(random_link(), st.integers(2, 5))
def test_what_has_crossed_once_is_there_for_all_later_pulls(link, ranks_per_node):
    specs, _, rank_buckets = link
    first, again = (
        plans(specs, rank_buckets, ranks_per_node, how) for how in (Relayed.STAYS, Relayed.IS_THERE)
    )
    world = Memories(specs, rank_buckets)
    fill_shards(world)
    world.run(first, push=False)
    wanted = [[[s.copy() for s in b] for b in buckets] for buckets in world.slices]
    for _ in range(2):
        for buckets in world.slices:
            for bucket in buckets:
                for slice_S in bucket:
                    slice_S[:] = np.nan
        world.run(again, push=False)
        for of_rank, own in zip(world.slices, wanted, strict=True):
            for bucket, its in zip(of_rank, own, strict=True):
                for a, b in zip(bucket, its, strict=True):
                    np.testing.assert_array_equal(a, b)
    assert sum(p.traffic_balance for p in again) % (1 << 64) == 0
    assert all(p.relayed_elements == 0 for p in again)
    assert {p.digest for p in first}.isdisjoint({p.digest for p in again})


@pytest.mark.parametrize(
    ("text", "share"), [("8x<1,1;hpz>", 0), ("4x<2,1;hpz>", 0), ("2x<4,1;hpz>", 1)]
)
def test_weights_cross_nodes_once_unless_each_rank_needs_a_slice_of_its_own(text, share):
    specs = decoder_specs(96, LAYERS, tied=False)
    rank_buckets = strategy_buckets(specs, Strategy.parse(text), 8, LAYERS)
    first, again = (plans(specs, rank_buckets, 4, how) for how in (Relayed.STAYS, Relayed.IS_THERE))
    crossing = elements_across_nodes(first, 4)
    # What several ranks of a TP group need crosses once in any case: norms, and keys of two heads
    assert elements_across_nodes(again, 4) == pytest.approx(share * crossing, rel=0.25)
    cluster = make_cluster(8)
    scheme = Strategy.parse(text).schemes[0]
    prices = [cluster.gather_ms(replace(scheme, hpz=hpz)) for hpz in (False, True)]
    assert prices[0] == pytest.approx(6 * PARAMS / 2 / 1e2)
    assert prices[1] == pytest.approx((4 + 2 * share) * PARAMS / 2 / 1e2)


def test_memory_is_what_relay_ranks_hold():
    specs = decoder_specs(96, LAYERS, tied=False)
    rank_buckets = strategy_buckets(specs, Strategy.parse("8x<1,1;hpz>"), 8, LAYERS)
    held = [p.relayed_elements for p in plans(specs, rank_buckets, 4, Relayed.STAYS)]
    total = sum(spec.numel for spec in specs)
    profile = Profile.load(find_file("profiles", "a800_llama2_7b"))
    memory = replace(profile.memory, devices_per_node=4, input_bytes=2)
    assert held == pytest.approx([memory.on_node_bytes(total, 8) / 2] * 8, rel=0.03)
    more = memory.rank_bytes(ON_NODES, 8, 0) - memory.rank_bytes(GATHERED, 8, 0)
    layer, ends = memory._num_params()
    assert more == pytest.approx((32 * layer + ends) * 2 / 4 / 2)
    assert memory.rank_bytes(ON_NODES, 4, 0) == memory.rank_bytes(GATHERED, 4, 0)  # one node


@pytest.mark.parametrize(("num_ranks", "per_node"), [(6, 4), (10, 8), (7, 3)])
def test_the_last_node_has_fewer_ranks_and_each_of_them_more(num_ranks, per_node):
    specs = decoder_specs(96, LAYERS, tied=False)
    everyone = Strategy.alike(ON_NODES, num_ranks)
    rank_buckets = strategy_buckets(specs, everyone, num_ranks, LAYERS)
    held = [p.relayed_elements for p in plans(specs, rank_buckets, per_node, Relayed.STAYS)]
    total = sum(spec.numel for spec in specs)
    memory = Profile.load(find_file("profiles", "a800_llama2_7b")).memory
    counted = replace(memory, devices_per_node=per_node).on_node_bytes(total, num_ranks) / 2
    alone = num_ranks % per_node == 1  # to whom shards go straight, in each pass
    # Owners of one place more go to some of the ranks
    assert alone or max(held) <= 1.25 * counted
    assert max(held) <= counted * (1 + 0.25 * (not alone))


STRATEGIES = parse_strategies(["8x<1,1;gather>", "4x<sp2,1;gather>"])
LENGTHS = (20,) * 8


def profile_of(traffic_ms, hpz_traffic_ms):
    profile = make_profile({"<1,1;gather>": (0, 1, 0), "<sp2,1;gather>": (0, 0.6, 0)})
    latency = {
        scheme: replace(model, traffic_ms=traffic_ms, hpz_traffic_ms=hpz_traffic_ms)
        for scheme, model in profile.latency.items()
    }
    return replace(profile, latency=latency)


def roomy(strategies, **more):
    """Settings of the planner under which every scheme holds 1,000 tokens, kept on nodes or not."""
    schemes = {scheme for strategy in strategies for scheme in strategy.schemes}
    twins = {s.staying for s in schemes} | {s.crossing for s in schemes}
    held = dict.fromkeys(schemes | twins, 1000)
    return PlannerSettings(solver="none", max_len_override=held, **more)


def planned(profile, lengths=LENGTHS, strategies=STRATEGIES, **max_len):
    held = {
        replace(scheme, hpz=hpz): max_len["on_nodes" if hpz else "crossing"] * scheme.num_devices
        for strategy in strategies
        for scheme in strategy.schemes
        for hpz in (False, True)
    }
    settings = PlannerSettings(solver="none", max_len_override=held)
    batch = PlanningProblem(make_batch(list(lengths)), profile, 8, settings)
    phases = Phases(strategies).plan(batch)
    return [str(phase.strategy) for phase in phases], sum(phase.iteration_ms for phase in phases)


def test_the_planner_keeps_weights_on_nodes_where_a_step_waits_for_them():
    """Eight ranks of 20 tokens compute 20 ms; their weights travel 50, or 30 with hpz."""
    waits = profile_of(50.0, 30.0)
    assert planned(waits, crossing=40, on_nodes=40) == (["8x<1,1;hpz>"], pytest.approx(30))
    # Where memory does not hold the sequences beside the weights they cross
    assert planned(waits, crossing=40, on_nodes=19) == (["8x<1,1;gather>"], pytest.approx(50))
    # Where computation takes longer nothing is kept
    computes = profile_of(15.0, 9.0)
    assert planned(computes, crossing=40, on_nodes=40) == (["8x<1,1;gather>"], pytest.approx(20))
    assert planned(profile_of(50.0, 0.0), crossing=40, on_nodes=40)[0] == ["8x<1,1;gather>"]


def test_weights_stay_where_gathered_layers_are_not_the_fastest_without():
    """Slices that stay take 45 ms, gathered layers 50 or 30."""
    profile = profile_of(50.0, 30.0)
    kept = make_profile({"<1,1>": (0, 2.25, 0), "<sp2,1>": (0, 1.2, 0)})
    profile = replace(profile, latency={**profile.latency, **kept.latency})
    strategies = (*STRATEGIES, *parse_strategies(["8x<1,1>", "4x<sp2,1>"]))
    batch = PlanningProblem(make_batch(list(LENGTHS)), profile, 8, roomy(strategies))
    (phase,) = Phases(strategies).plan(batch)
    assert str(phase.strategy) == "8x<1,1;hpz>"
    assert not Phases(parse_strategies(["8x<1,1>", "4x<sp2,1>"])).plan(batch), "they are no phases"


def test_candidates_that_keep_weights_have_their_links_and_what_was_learned():
    """Candidates of hpz alone, or gathered ones that the planner keeps: pull and push, factors."""
    link = LinkTimes(pull_ms=40, push_ms=60, step_ms=0)
    for how in ("gather", "hpz"):
        strategies = parse_strategies([f"8x<1,1;{how}>", f"4x<sp2,1;{how}>"])
        settings = roomy(strategies, link_times=dict.fromkeys(strategies, link))
        known = {s.schemes[0]: 2.0 for s in strategies}
        batch = PlanningProblem(
            make_batch(list(LENGTHS)),
            profile_of(50.0, 30.0),
            8,
            settings,
            Corrections(factors=known),
        )
        (phase,) = Phases(strategies).plan(batch)
        assert str(phase.strategy) == "8x<1,1;hpz>"
        assert phase.link.pull_ms + phase.link.push_ms == 100
        assert phase.iteration_ms == pytest.approx(40 + 100)


def test_times_of_plans_that_keep_weights_are_known():
    profile = profile_of(50.0, 30.0)
    batch = PlanningProblem(make_batch([40] * 8), profile, 8, roomy(STRATEGIES))
    plan, time_ms = plan_with_time(batch, STRATEGIES)
    assert str(plan.strategy) == "8x<1,1;hpz>"
    times = profiled_times(plan, profile, PlannerSettings(solver="none"))
    assert times == pytest.approx([time_ms] * 8)
    learned = LearnedTimes()
    learned.observe([PipelineTime(s, 40.0, 60.0) for s in plan.strategy.schemes])
    assert learned.names


def test_experts_that_ranks_share_do_not_stay():
    """Nobody asks for it, and planning goes on."""
    shared = Scheme.parse("<sp2,1;ep=2;gather>")
    assert shared.staying is shared
    profile = make_profile({"<1,1;gather>": (0, 1, 0), "<sp2,1;ep=2;gather>": (0, 0.6, 0)})
    strategies = parse_strategies(["4x<sp2,1;ep=2;gather>", "8x<1,1;gather>"])
    batch = PlanningProblem(make_batch(list(LENGTHS)), profile, 8, roomy(strategies))
    plan, _ = plan_with_time(batch, strategies)
    assert str(plan.strategy) == "8x<1,1;gather>"


def test_what_measured_hpz_is_for():
    """Phases, and no candidates of its own."""
    profile = make_profile({"<1,1;gather>": (0, 1, 30), "<1,1;hpz>": (0, 1, 10)}, input_bytes=2)
    profile = replace(profile, memory=replace(profile.memory, slice_bytes=2, memory_bytes=10**6))
    world = World.of(profile, None, 8, 100)
    assert unpruned_schemes(world, 0.0) == (GATHERED,)
    assert candidate_schemes(world, "measured") == (GATHERED,)
    again = replace(ON_NODES, ckpt=1)
    assert profile.get_latency(again).constant_ms == pytest.approx(10 * 4 / 3)
    mixed = parse_strategies(["8x<1,1;gather>", "8x<1,1;hpz>"])
    assert neighbour_strategies(mixed[0], [ON_NODES]) == ()
    estimates = FastEstimator(mixed, world).estimates_ms(make_batch([20] * 8))
    assert estimates == pytest.approx([50, 30])
    evaluated = profile_of(50.0, 30.0).forward_only(1 / 3, holds_longer=False)
    assert not any(model.hpz_traffic_ms for model in evaluated.latency.values())


def test_a_measured_time_decides_by_itself():
    profile = make_profile({"<1,1;gather>": (0, 1, 30), "<1,1;hpz>": (0, 1, 10)})
    own = parse_strategies(["8x<1,1;gather>", "4x<sp2,1;gather>"])
    more = {Scheme.parse(f"<sp2,1;{how}>"): 0.6 for how in ("gather", "hpz")}
    latency = dict(profile.latency)
    for scheme, linear in more.items():
        latency[scheme] = replace(latency[GATHERED], linear_ms=linear)
    profile = replace(profile, latency=latency)
    assert planned(profile, strategies=own, crossing=40, on_nodes=40) == (
        ["8x<1,1;hpz>"],
        pytest.approx(30),
    )


def test_prices_follow_from_those_of_gathered_layers():
    profile = Profile.load(find_file("profiles", "a800_llama2_7b"))
    costs = Costs(profile, find_cluster(profile, 16))
    crossing, on_nodes = costs.find(GATHERED), costs.find(ON_NODES)
    assert on_nodes.latency.traffic_ms == costs.cluster.gather_ms(ON_NODES)
    assert on_nodes.latency.traffic_ms == crossing.latency.hpz_traffic_ms
    assert on_nodes.latency.traffic_ms < crossing.latency.traffic_ms
    assert on_nodes.latency.linear_ms == crossing.latency.linear_ms
    assert on_nodes.marks == {"derived_from": "<1,1;gather>"}
    known = costs.extended([GATHERED])
    assert known.get_latency(ON_NODES)
    again, crossing_again = (replace(scheme, ckpt=16) for scheme in (ON_NODES, GATHERED))
    assert known.get_latency(again).traffic_ms == on_nodes.latency.traffic_ms
    assert known.get_latency(again).linear_ms == known.get_latency(crossing_again).linear_ms
    one_node = Costs(profile, find_cluster(profile, 8))
    assert one_node.find(GATHERED).latency.hpz_traffic_ms == 0
    assert "hpz_traffic_ms" not in one_node.find(GATHERED).latency.to_json()
    hardware = replace(costs.cluster.hardware, devices_per_node=1)  # nobody relays
    direct = replace(costs.cluster, hardware=hardware)
    assert direct.gather_ms(ON_NODES) == direct.gather_ms(GATHERED)


def rivals_on(num_devices):
    """Systems on ZeRO-3 on A800 nodes, with LLaMA 7B and short sequences: the scenario, and what an
    iteration takes besides what nothing hides.
    """
    profile = Profile.load(find_file("profiles", "a800_llama2_7b"))
    cluster = find_cluster(profile, num_devices)
    scenario = Scenario(
        costs=Costs(profile, cluster),
        num_devices=num_devices,
        context_length=1024,
        batches=(make_batch([100] * num_devices),),
    )
    names = ("deepspeed", "deepspeed_balanced", "deepspeed_degrees", "flexsp", "fcp")
    found = {name: SYSTEMS[name].run(scenario, name=name) for name in names}
    links = scenario.links(Strategy.alike(GATHERED, num_devices))
    ends_ms = optimizer_ms(scenario) + (links.pull_ms + links.push_ms) / 32
    return scenario, {name: float(own.iteration_ms[0]) - ends_ms for name, own in found.items()}


def test_systems_on_zero3_keep_weights_on_nodes_where_that_is_faster():
    scenario, found = rivals_on(16)
    on_nodes = replace(scenario, hpz=True)
    traffic = [zero3_traffic_ms(own) for own in (scenario, on_nodes)]
    assert traffic[1] == scenario.cluster.gather_ms(ON_NODES) < traffic[0]
    assert found == pytest.approx(dict.fromkeys(found, traffic[1]))  # they wait for nothing else
    tokens = [rank_tokens(own, 0.0, exchanges=False) for own in (scenario, on_nodes)]
    memory = scenario.profile.memory
    params = 32 * memory.state_bytes / 16 * 4096**2 + 2 * 4096 * memory.vocab_size
    per_token = 4096 * 32 * memory.activation_bytes[1]
    assert tokens[0] - tokens[1] == pytest.approx(params * 2 / 8 / 2 / per_token, abs=2)
    one_node, found = rivals_on(8)
    assert found == pytest.approx(dict.fromkeys(found, zero3_traffic_ms(one_node)))


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("tokens", [300, 800, 1600])
def test_single_ranks_on_zero3_are_charged_as_our_own_gathered_layers(tokens, overlap):
    """With few tokens they wait for layers, with many for none; between these a first forward waits
    for its gathers, and backward for its own computation.
    """
    profile = Profile.load(find_file("profiles", "a800_llama2_7b"))
    scenario = Scenario(
        costs=Costs(profile, find_cluster(profile, 16)),
        num_devices=16,
        context_length=tokens,
        batches=(make_batch([tokens] * 16),),
        hpz=True,
        overlap=overlap,
    )
    rival = packed_zero3(scenario, name="zero3")
    assert rival.strategy == "DP16 SP1"
    scenario, _ = priced(scenario, (ON_NODES,))
    own = scenario.planned_outcome(Strategy.alike(ON_NODES, 16), 0)
    assert rival.iteration_ms[0] == pytest.approx(own.iteration_ms)


def test_what_is_learned_of_passes_does_not_depend_on_where_weights_come_from():
    learned = LearnedTimes()
    slow = PipelineTime(scheme=GATHERED, profiled_ms=10.0, measured_ms=14.0)
    for _ in range(12):
        learned.observe([slow])
    assert learned.factor(ON_NODES) == learned.factor(GATHERED) > 1.2
    assert "scheme <1,1;gather>" in names_of([ON_NODES])
