"""Pull and push in the choice of a strategy: what they add, that the choice follows them, where
they come from.
"""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from reference import make_batch, make_plan, make_profile
from test_events import make_work
from test_planner import MAX_LEN, PROFILE, STRATEGIES

from ds_hydra.configs import HydraConfig
from ds_hydra.configs.ds_config import read_ds_config
from ds_hydra.configs.files import find_profile
from ds_hydra.engine.candidates import EngineCandidates, planner_settings
from ds_hydra.lab.simulator.events import simulate_iteration, simulate_plan
from ds_hydra.sampler.candidate_set import decide_candidates, gradient_bytes
from ds_hydra.sampler.planner import phase_plan
from ds_hydra.sampler.planner.iteration import plan_with_time
from ds_hydra.sampler.planner.phase_plan import PlanningProblem
from ds_hydra.sampler.planner.planner_settings import PlannerSettings
from ds_hydra.sampler.sample_bench import CandidateSettings
from ds_hydra.sampler.schedule import linked_ms
from ds_hydra.strategy.cost_models.cluster import try_cluster
from ds_hydra.strategy.profiles.profile import LinkTimes, Profile
from ds_hydra.strategy.proposal.histogram import LengthHistogram
from ds_hydra.strategy.schemes.scheme import Scheme, Strategy, parse_strategies

rows_ms = st.lists(st.floats(0.1, 50), min_size=1, max_size=8)
times_ms = st.floats(0, 60)


@settings(max_examples=80, deadline=None)
@given(rows_ms, st.sampled_from([1, 2, 4]), times_ms, times_ms, st.booleans())
def test_the_planner_counts_what_the_simulation_shows(rows, num_stages, pull_ms, push_ms, overlap):
    micro_batch_ms = np.array(rows)
    work = make_work(
        np.tile(micro_batch_ms / 3, (num_stages, 1)),
        np.tile(micro_batch_ms * 2 / 3, (num_stages, 1)),
    )
    simulation = simulate_iteration(
        [work], num_devices=num_stages, links=LinkTimes(pull_ms=pull_ms, push_ms=push_ms), overlap=overlap,
        num_layers=8,
    )  # fmt: skip
    buckets = 8 // num_stages if overlap else 0
    assert linked_ms(micro_batch_ms, num_stages, 1 / 3, pull_ms, push_ms, buckets) == pytest.approx(
        simulation.push_end_ms
    )


@pytest.mark.parametrize(
    ("computed_ms", "expected_ms"),
    [
        (10.0, 30 + 30 + 60 / 8),  # both passes wait for what travels
        (54.0, 30 + 24 / 8 + 36 + 30 / 8),  # the forward waits, the backward computes for 36 ms
        (90.0, 90 + 60 / 8),  # nothing waits but for the first layer and the last one
    ],
)
def test_a_forward_waits_once_for_gathered_layers(computed_ms, expected_ms):
    """Half of 60 ms of traffic is the forward's, as where weights stay on the node."""
    (strategy,) = parse_strategies(["8x<1,1;gather>"])
    profile = make_profile({"<1,1;gather>": (0.0, computed_ms / 100, 0.0)}, max_len=100)
    (scheme,) = profile.latency
    waiting = dataclasses.replace(profile.latency[scheme], traffic_ms=60.0)
    profile = dataclasses.replace(
        profile,
        latency={scheme: waiting},
        memory=dataclasses.replace(profile.memory, num_layers=8),
    )
    table = {strategy: LinkTimes(pull_ms=30.0, push_ms=30.0)}
    planner = with_links(table, overlaps_links=True)
    planner = dataclasses.replace(planner, max_len_override={scheme: 100})
    batch = PlanningProblem(make_batch([100] * 8), profile, 8, planner)
    plan, time_ms = plan_with_time(batch, [strategy])
    simulation = simulate_plan(plan, profile, links_of=table.get, overlap=True)
    assert time_ms == pytest.approx(simulation.push_end_ms)
    assert time_ms == pytest.approx(expected_ms)


LAYERED = dataclasses.replace(PROFILE, memory=dataclasses.replace(PROFILE.memory, num_layers=8))


def with_links(links: dict[Strategy, LinkTimes], **changes) -> PlannerSettings:
    return PlannerSettings(max_len_override=MAX_LEN, link_times=links, solver="none", **changes)


def run(lengths, strategies, planner):
    return plan_with_time(PlanningProblem(make_batch(lengths), LAYERED, 8, planner), strategies)


batches = st.lists(st.integers(1, 80), min_size=1, max_size=30)
links = st.lists(
    st.builds(LinkTimes, pull_ms=times_ms, push_ms=times_ms),
    min_size=len(STRATEGIES),
    max_size=len(STRATEGIES),
)


@settings(max_examples=40, deadline=None)
@given(batches, links, st.booleans())
def test_the_strategy_whose_iteration_is_shortest_wins(lengths, times, overlap):
    """Without perturbations every strategy is planned alone as among others, so the choice can be
    checked one by one.
    """
    table = dict(zip(STRATEGIES, times, strict=True))
    planner = with_links(table, overlaps_links=overlap)
    fitting = [
        s for s in STRATEGIES if max(lengths) <= max(MAX_LEN[scheme] for scheme in s.schemes)
    ]
    with mock.patch.object(phase_plan, "_NUM_PERTURBATIONS", 0):
        plan, time_ms = run(lengths, STRATEGIES, planner)
        alone = {s: run(lengths, [s], planner)[1] for s in fitting}
    assert time_ms == pytest.approx(min(alone.values()))
    simulation = simulate_plan(plan, LAYERED, links_of=table.get, overlap=overlap)
    assert time_ms == pytest.approx(simulation.push_end_ms)
    assert plan.makespan_ms == pytest.approx(simulation.propagation_ms)


def test_rows_of_one_stage_end_with_the_longest_and_begin_with_the_second():
    options = {"max_len_override": MAX_LEN, "solver": "none"}
    plan = make_plan([20, 19, 18, 9, 8, 3], ["1x<1,1>"], PROFILE, 1, **options)
    times = [
        PROFILE.get_latency(Scheme(1, 1)).micro_batch_ms(plan.micro_batch_lengths(row))
        for row in plan.pipelines[0].micro_batches
    ]
    assert len(times) > 2
    assert times[-1] == max(times)
    assert times[0] == sorted(times)[-2]


def test_settings_travel_to_the_planning_processes():
    planner = with_links({STRATEGIES[0]: LinkTimes(pull_ms=3.0, push_ms=4.5)}, overlaps_links=False)
    assert PlannerSettings.from_json(planner.to_json()) == planner


def test_the_proposal_plans_as_the_run_does():
    config = HydraConfig.parse(
        {"context_length": 64, "tokens_per_iteration": 64, "activation_checkpointing": True}
    )
    settings = CandidateSettings.of(
        config, num_devices=2, given=(), can_run=lambda _: "", cluster=None, num_link_groups=0
    )
    run = planner_settings(config, STRATEGIES, lambda: None)
    assert settings.planner.forward_fraction == run.forward_fraction == 1 / 4


def test_the_proposal_counts_links():
    """With a pull that takes long on <1,1> alone, no candidate has <1,1> for which there is another
    choice.
    """
    profile = make_profile({"<1,1>": (1e-4, 1.0, 1.0), "<2,1>": (6e-5, 0.51, 1.0)}, max_len=400)

    def propose(links_of):
        settings = CandidateSettings(
            num_devices=4,
            context_length=200,
            tokens_per_iteration=800,
            num_batches=6,
            cluster=links_of and SimpleNamespace(link_times=links_of),
            space="measured",
            max_enumerated=0,
        )
        lengths = LengthHistogram.from_counts({20: 6, 60: 3, 200: 1})
        return decide_candidates(profile, lengths, settings).proposal

    def links_of(strategy):
        pull_ms = 1e4 if Scheme(1, 1) in strategy.schemes else 0.0
        return LinkTimes(pull_ms=pull_ms, push_ms=pull_ms)

    assert any(Scheme(1, 1) in strategy.schemes for strategy in propose(None).strategies)
    won = [kept.strategy for kept in propose(links_of).kept if kept.share_won > 0]
    assert won
    assert all(Scheme(1, 1) not in strategy.schemes for strategy in won)


A800 = Profile.load(find_profile("a800_llama2_32b"))
CANDIDATES = parse_strategies(["4x<16,1>", "1x<16,1> + 6x<8,1>", "8x<4,2>"])


HYDRA = {"context_length": 32768, "tokens_per_iteration": 200_000}


def settings_of(profile, strategies=CANDIDATES, sections=None, **link):
    stage = {"zero_optimization": {"stage": 3}}
    _, config = read_ds_config({**stage, "hydra": {**HYDRA, "link": link}, **(sections or {})})
    links = try_cluster(profile, 64, gradient_bytes(config))
    return planner_settings(config, strategies, lambda: links)


def test_the_engine_takes_links_from_the_description_of_the_profiles_hardware():
    times = settings_of(A800).link_times
    assert set(times) == set(CANDIDATES)
    assert times[CANDIDATES[1]].pull_ms > 1.5 * times[CANDIDATES[0]].pull_ms, (
        "a node of <8,1> needs twice as much"
    )
    half = settings_of(A800, sections={"bf16": {"enabled": True}}, overlap=False)
    assert half.link_times[CANDIDATES[0]].push_ms == pytest.approx(times[CANDIDATES[0]].push_ms / 2)
    assert half.link_times[CANDIDATES[0]].pull_ms == times[CANDIDATES[0]].pull_ms
    assert not half.overlaps_links
    assert settings_of(A800, CANDIDATES[:1]).link_times == {}, "nothing to choose"


def test_an_engine_counts_on_nodes_of_its_hosts():
    """Two hosts of four A800, of which the shipped description has eight in one."""
    _, config = read_ds_config({"zero_optimization": {"stage": 3}, "hydra": HYDRA})
    links = SimpleNamespace(devices_per_node=4)
    given = {"propagator": SimpleNamespace(links=links), "num_ranks": 8, "config": config}
    engine = SimpleNamespace(**given, _are_nodes=True, _host={})
    strategy = Strategy.parse("1x<8,1>")
    of_hosts = EngineCandidates._cluster(engine, A800).link_times(strategy)
    assert of_hosts.pull_ms > 2 * try_cluster(A800, 8).link_times(strategy).pull_ms
    here = Profile.from_json(EngineCandidates._on_these_hosts(engine, A800.document))
    # Of hpz: nothing where all ranks are on a node
    assert [p.memory.on_node_bytes(1e9, 8) for p in (A800, here)] == [0, 1e9 * 2 / 4 / 2]


def test_links_of_unknown_hardware_count_nothing(caplog):
    """So a profile measured on the ranks at hand plans as it did."""
    assert settings_of(PROFILE).link_times == {}
    model = {k: v for k, v in A800.document["model"].items() if k != "intermediate_size"}
    bare = dataclasses.replace(A800, document={**A800.document, "model": model})
    with caplog.at_level("INFO"):
        assert try_cluster(bare, 64) is None
    assert "model.intermediate_size is missing" in caplog.text
