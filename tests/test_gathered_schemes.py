"""What follows from a profile for schemes whose layers are gathered: T, its traffic, memory."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from link_cases import decoder_specs, strategy_buckets
from reference import make_batch, make_plan
from spaces import full_space, with_moving_weights
from test_cluster import PARAMS, make_cluster

from ds_hydra.configs import find_file
from ds_hydra.lab.simulator.events import simulate_plan
from ds_hydra.sampler.planner.phase_plan import PhasePlan, PlanningProblem
from ds_hydra.strategy.cost_models.cluster import find_cluster
from ds_hydra.strategy.cost_models.costs import Costs, World
from ds_hydra.strategy.profiles.profile import LatencyModel, Profile
from ds_hydra.strategy.proposal.space import undominated
from ds_hydra.strategy.schemes.scheme import Scheme, Strategy
from ds_hydra.zero_link import plan_link

DEVICES, CONTEXT = 8, 32768
PROFILE = Profile.load(find_file("profiles", "a800_llama2_13b"))
CLUSTER = find_cluster(PROFILE, DEVICES)
ONE, FOUR = Scheme.parse("<1,1;gather>"), Scheme.parse("<sp4,1;gather>")


def gathered(profile=PROFILE, **more):
    return with_moving_weights(profile, num_devices=DEVICES, cluster=CLUSTER, **more)


def measuring(entry):
    document = {**PROFILE.document, "schemes": [*PROFILE.document["schemes"], entry]}
    return Profile.from_json(document)


def test_a_micro_batch_takes_its_traffic_at_least():
    model = LatencyModel(quadratic_ms=0.0, linear_ms=1.0, constant_ms=5.0, traffic_ms=20.0)
    assert [model.micro_batch_ms(micro_batch) for micro_batch in ([], [1], [10, 4], [10, 9])] == [
        0.0,
        20.0,
        20.0,
        24.0,
    ]
    assert model.to_json()["traffic_ms"] == 20.0
    assert "traffic_ms" not in replace(model, traffic_ms=0.0).to_json()
    assert model.scaled(2.0).traffic_ms == 20.0


def test_one_rank_takes_pp_times_as_long_and_attention_no_less_than_under_tp():
    profile = Profile.load(find_file("profiles", "a800_llama2_32b"))
    found, latency = Costs(profile).single_rank, profile.latency
    source = {s.pp * latency[s].constant_ms: s for s in latency if s.tp == 1}[found.constant_ms]
    least = min(s.tp * latency[s].quadratic_ms for s in latency if s.tp > 1 and s.pp == 1)
    assert found.quadratic_ms == least > source.pp * latency[source].quadratic_ms
    below, kept, above = (
        found.micro_batch_ms([n]) / (source.pp * latency[source].micro_batch_ms([n]))
        for n in (1024, 2048, 4096)
    )
    assert 0.97 < below < 1 < above
    assert kept == pytest.approx(1)
    measured = LatencyModel(quadratic_ms=0.0, linear_ms=1.0, constant_ms=0.0)
    entry = {"tp": 1, "pp": 1, **measured.to_json()}
    known = {**PROFILE.document, "schemes": [*PROFILE.document["schemes"], entry]}
    assert Costs(Profile.from_json(known)).single_rank == measured
    assert Costs(Costs(PROFILE).table([Scheme(2, 1)])).single_rank is None


def test_gathered_schemes_are_estimated_and_marked():
    found = gathered()
    new = found.latency.keys() - PROFILE.latency.keys()
    assert new <= found.assumed
    # 40 heads: 8 ranks at most, with CP any number
    assert {str(s) for s in new} == {
        *("<1,1;gather>", "<sp2,1;gather>", "<sp4,1;gather>", "<sp8,1;gather>"),
        *("<cp2,1;gather>", "<cp4,1;gather>", "<cp8,1;gather>"),
        *("<2,1;gather>", "<4,1;gather>", "<8,1;gather>"),
        *("<sp2,2,1;gather>", "<sp4,2,1;gather>", "<sp2,4,1;gather>"),
        *("<cp2,2,1;gather>", "<cp4,2,1;gather>", "<cp2,4,1;gather>"),
    }
    single, four = Costs(PROFILE).single_rank, found.latency[FOUR]
    assert four.quadratic_ms == pytest.approx(single.quadratic_ms / 4)
    assert four.linear_ms > single.linear_ms / 4  # exchanges
    assert four.traffic_ms == found.latency[ONE].traffic_ms == CLUSTER.gather_ms(ONE) > 0
    two = Scheme.parse("<2,1;gather>")
    assert replace(found.latency[two], traffic_ms=0.0) == PROFILE.latency[Scheme(2, 1)]
    assert gathered(found).document == found.document
    assert Profile.from_json(found.document).latency == found.latency
    assert gathered(can_run=lambda scheme: False) is PROFILE


def test_checkpointed_layers_of_a_gathered_scheme_cost_computation_and_no_traffic():
    found, base = gathered(), FOUR
    more = replace(base, ckpt=PROFILE.memory.num_layers - 1)
    model = found.get_latency(more)
    without = found.latency[base]
    seen_ms = without.exchange_ms / 2
    share = more.ckpt / PROFILE.memory.num_layers
    wanted_ms = (1 + share / 3) * without.linear_ms + share * seen_ms
    assert model.linear_ms == pytest.approx(wanted_ms)
    assert model.quadratic_ms == without.quadratic_ms
    assert model.traffic_ms == without.traffic_ms
    assert found.max_len_tokens(more, DEVICES) > found.max_len_tokens(base, DEVICES)
    entry = Costs(found).extended([more]).document["schemes"][-1]
    assert entry["derived_from"] == "<sp4,1;gather>"


def test_the_full_space_gathers_where_links_are_known_or_that_was_measured():
    options = {"num_devices": DEVICES, "context_length": CONTEXT, "tokens_per_iteration": 100_000}
    full = full_space(PROFILE, **options, cluster=CLUSTER)
    assert any(scheme.gather for scheme in full.latency)
    unknown = full_space(PROFILE, **options)
    assert not any(scheme.gather for scheme in unknown.latency)
    again = full_space(full, **options, cluster=CLUSTER)
    assert again.latency == full.latency
    entry = {**ONE.to_json(), **PROFILE.get_latency(Scheme(2, 1)).to_json()}
    measured = full_space(measuring(entry), **options)
    assert ONE in measured.latency


def test_checkpointed_layers_follow_from_a_measured_gathered_scheme():
    """On hardware that nothing is known of, too."""
    entry = {**ONE.to_json(), **PROFILE.get_latency(Scheme(2, 1)).to_json()}
    known = with_moving_weights(
        measuring(entry), num_devices=DEVICES, cluster=None, tokens_per_iteration=300_000
    )
    followed = [s for s in known.latency if s.gather and s.ckpt]
    assert followed
    assert known.get_latency(ONE) == PROFILE.get_latency(Scheme(2, 1))
    for scheme in followed:
        assert known.get_latency(scheme).linear_ms > known.get_latency(ONE).linear_ms
        assert scheme in known.assumed


def test_a_scheme_that_waits_for_its_traffic_does_not_dominate_one_that_does_not():
    # Same devices, a little more memory; what decides is the traffic
    waits, two = Scheme.parse("<cp4,1;gather>"), FOUR
    T = LatencyModel(quadratic_ms=0.0, linear_ms=1.0, constant_ms=0.0)
    found = gathered()
    times = {two: T, waits: replace(T, traffic_ms=9.0)}
    slow = replace(found, latency={**found.latency, **times})
    assert slow.max_len_tokens(waits, DEVICES) > slow.max_len_tokens(two, DEVICES)
    assert undominated(World.of(slow, None, DEVICES, 1), [two, waits]) == (two, waits)
    fast = replace(slow, latency={**slow.latency, waits: T})
    assert undominated(World.of(fast, None, DEVICES, 1), [two, waits]) == (waits,)


def test_gathered_schemes_join_where_one_micro_batch_for_each_pipeline_is_enough():
    known = gathered()
    assert known.latency[ONE].traffic_ms == CLUSTER.gather_ms(ONE)
    variants = [replace(ONE, ckpt=ckpt) for ckpt in range(41)]
    all_known = Costs(known).extended(variants)
    held = [DEVICES * all_known.max_len_tokens(s, DEVICES) for s in variants]
    for tokens in (0.9 * held[0], held[0] + 1, 1.2 * held[0]):
        found = gathered(tokens_per_iteration=tokens)
        ones = [s for s in found.latency if s.gather and s.num_devices == 1]
        fewest = [np.searchsorted(held, room * tokens) for room in (0.94, 1.0, 1.06)]
        assert [s.ckpt for s in ones] == list(dict.fromkeys(fewest))
        for scheme in ones:
            slower = 1 + scheme.ckpt / 40 / 3
            assert found.latency[scheme].linear_ms == pytest.approx(
                slower * known.latency[ONE].linear_ms
            )
            assert found.latency[scheme].traffic_ms == known.latency[ONE].traffic_ms
    # They do not go with others, so none of them makes another one useless
    two = [Scheme.parse(text) for text in ("<2,1>", "<2,1;gather>")]
    assert undominated(World.of(known, None, DEVICES, 1), two) == tuple(two)
    named = Costs.of(PROFILE, DEVICES).extended([ONE])
    assert named.latency.keys() - PROFILE.latency.keys() == {ONE}


def test_layers_that_are_gathered_move_between_nodes_for_each_pass():
    cluster = make_cluster(8, devices_per_node=4)  # 1,000 bytes in a ms inside, 100 between nodes
    across = PARAMS / 2 / 1e2
    assert cluster.gather_ms(ONE) == pytest.approx((2 + 2 + 2) * across)
    alike = Strategy.parse("8x<1,1;gather>")
    times = cluster.link_times(alike)
    assert times.pull_ms == pytest.approx(2 * across)
    assert times.push_ms == pytest.approx(2 * across), "the rest counts in T"
    wide = replace(cluster, gradient_bytes=4)
    assert wide.link_times(alike).push_ms == pytest.approx(4 * across)
    assert wide.gather_ms(ONE) == pytest.approx((2 + 2 + 4) * across)


@pytest.mark.parametrize("text", ["<1,1;gather>", "<2,1;gather>"])
@pytest.mark.parametrize("num_nodes", [2, 3])
def test_the_price_of_a_gathered_layer_is_what_its_routes_carry_into_a_node(text, num_nodes):
    scheme, num_ranks = Scheme.parse(text), 4 * num_nodes
    cluster = make_cluster(num_ranks, devices_per_node=4)
    alike = Strategy.alike(scheme, num_ranks)
    specs = decoder_specs(96, 4, tied=False)
    rank_buckets = strategy_buckets(specs, alike, num_ranks, 4)

    def elements_into_nodes(ranks_per_node):
        entering = np.zeros(num_nodes)
        for rank in range(num_ranks):
            plan = plan_link(
                specs,
                rank_buckets,
                rank,
                ranks_per_node=ranks_per_node,
                independent_rounds=True,
            )
            for peer, numel in plan.sent_elements.items():
                entering[peer // 4] += numel * (peer // 4 != rank // 4)
        return entering.max() / sum(spec.numel for spec in specs)

    priced = cluster.gather_ms(scheme) * 1e2 / (2 + 2 + 2) / PARAMS  # 100 bytes in a ms
    assert elements_into_nodes(4) == pytest.approx(priced, rel=0.05)  # shards do not divide
    # Where each rank asked for itself, 4 / TP times as much would come
    assert elements_into_nodes(None) == pytest.approx(priced * 4 / scheme.tp, rel=0.1)


def test_gathered_micro_batches_run_in_lockstep():
    """Steps of 30 beside 10 and of 20 beside 60: 90, where the slower of both pipelines has 70."""
    latency = LatencyModel(quadratic_ms=0.0, linear_ms=1.0, constant_ms=0.0)
    found = replace(gathered(), latency={ONE: latency})
    planning = PlanningProblem(make_batch([60, 30, 20, 10]), found, 2)

    def wait_ms(assignment, micro_batches, pipeline_ms):
        phase = PhasePlan.of(planning, Strategy((ONE,) * 2))
        phase.assignment[:], phase.micro_batches[:] = assignment, micro_batches
        phase.pipeline_ms = np.array(pipeline_ms)
        return phase.wait_ms

    assert wait_ms([1, 0, 0, 1], [1, 0, 1, 0], [50.0, 70.0]) == 20.0
    assert wait_ms([1, 0, 0, 1], [0, 0, 0, 0], [50.0, 70.0]) == 0.0
    assert wait_ms([0, 0, 0, 0], [1, 0, 1, 0], [120.0, 0.0]) == 0.0
    options = {"max_len_override": {ONE: 60}, "solver": "none"}
    plan = make_plan([60] * 4, ["2x<1,1;gather>"], found, 2, **options)
    assert plan.makespan_ms == 120.0
    first, second = plan.pipelines
    rows = replace(first, micro_batches=((0,), (1,))), replace(second, micro_batches=((2,), (3,)))
    uneven = replace(plan, pipelines=rows, lengths=(30, 20, 10, 60), makespan_ms=90.0)
    assert simulate_plan(uneven, found).propagation_ms == pytest.approx(90.0)
