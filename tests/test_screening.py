"""Estimates of many strategies at once, heuristic times without plans, gathered proposals."""

from __future__ import annotations

import numpy as np
import pytest
from reference import make_batch
from spaces import with_moving_weights

from ds_hydra.configs import find_file
from ds_hydra.sampler import sample_bench
from ds_hydra.sampler.planner.dispatch import dispatch_trials
from ds_hydra.sampler.planner.iteration import plan_with_time, times_alone
from ds_hydra.sampler.planner.phase_plan import PlanningProblem
from ds_hydra.sampler.planner.planner_settings import PlannerSettings
from ds_hydra.sampler.planner.problem import PipelineKind, make_problem
from ds_hydra.sampler.sample_bench import (
    UNEVEN_STEPS,
    CandidateSettings,
    FastEstimator,
    SampleBench,
)
from ds_hydra.strategy.cost_models.cluster import find_cluster
from ds_hydra.strategy.cost_models.costs import World
from ds_hydra.strategy.profiles.profile import Profile
from ds_hydra.strategy.schemes.scheme import Scheme, Strategy, parse_strategies

NUM_DEVICES = 16
PUBLISHED = Profile.load(find_file("profiles", "a800_llama2_7b"))
CLUSTER = find_cluster(PUBLISHED, NUM_DEVICES)
PROFILE = with_moving_weights(PUBLISHED, num_devices=NUM_DEVICES, cluster=CLUSTER)
WORLD = World.of(PROFILE, CLUSTER, NUM_DEVICES, 16384)
STRATEGIES = parse_strategies(
    [
        "2x<8,1>",
        "1x<8,1> + 2x<2,2>",
        "1x<8,1;gather> + 1x<sp4,1;gather> + 4x<1,1;gather>",
        "1x<4,1> + 1x<2,2> + 4x<2,1>",
        "16x<1,1;gather>",
    ]
)
BATCH = make_batch([15000, 9000, 6000, *[800 + 37 * i for i in range(60)]])


def estimate_ms(strategy):
    """The greedy dispatch of one strategy alone."""
    counts = {s: strategy.schemes.count(s) for s in dict.fromkeys(strategy.schemes)}
    kinds = [
        PipelineKind(
            count,
            s.pp,
            PROFILE.max_len_tokens(s, NUM_DEVICES),
            PROFILE.get_latency(s),
        )
        for s, count in counts.items()
    ]
    lengths = np.sort(BATCH.lengths)[::-1]
    return dispatch_trials(make_problem(lengths, kinds), 1, 0, np.zeros_like(lengths))


def test_all_at_once_as_one_by_one():
    found = FastEstimator(STRATEGIES, WORLD).estimates_ms(BATCH)
    assert found[:-1] == pytest.approx([estimate_ms(s) for s in STRATEGIES[:-1]])
    assert np.isinf(found[-1])  # no micro-batch of 15,000 tokens on one rank
    assert FastEstimator((), WORLD).estimates_ms(BATCH).size == 0


def test_times_alone_are_those_of_the_plans():
    links = {s: CLUSTER.link_times(s) for s in STRATEGIES}
    settings = PlannerSettings(link_times=links).heuristic()

    def planning():
        return PlanningProblem(BATCH, PROFILE, NUM_DEVICES, settings)

    def time_ms(strategies):
        return plan_with_time(planning(), strategies)[1]

    found = times_alone(planning(), STRATEGIES)

    one_by_one = [time_ms([s]) for s in STRATEGIES[:-1]]
    assert found[:-1] == pytest.approx(one_by_one)
    assert np.isinf(found[-1])
    assert time_ms(STRATEGIES[:-1]) == pytest.approx(found.min())


def test_what_lockstep_costs_keeps_gathered_strategies_from_being_tried():
    """The same T and MaxLen, gathered and not: alike while each pipeline has one micro-batch."""
    plain, gathered = Scheme(1, 1), Scheme(1, 1, gather=True)
    known = PROFILE.get_latency(Scheme.parse("<1,1;gather>"))
    entries = [{**s.to_json(), **known.to_json()} for s in (plain, gathered)]
    profile = Profile.from_json({**PROFILE.document, "schemes": entries})
    strategies = [Strategy((scheme,) * 2) for scheme in (gathered, plain)]
    held = profile.max_len_tokens(gathered, 2)
    assert held > 0
    for lengths, ratio in (([held, held], 1.0), ([held // 2 + 1] * 3, UNEVEN_STEPS)):
        screen = FastEstimator(strategies, World.of(profile, None, 2, held))
        screen._max_len[:] = held
        with_lockstep, alone = screen.estimates_ms(make_batch(lengths))
        assert with_lockstep == pytest.approx(ratio * alone)


@pytest.mark.parametrize(("many", "num_tried"), [(sample_bench._MANY, 6), (0, 3)])
def test_half_of_the_global_batches_have_to_do_for_very_many_candidates(
    monkeypatch, many, num_tried
):
    monkeypatch.setattr(sample_bench, "_MANY", many)
    tried = []
    settings = CandidateSettings(num_devices=NUM_DEVICES, context_length=16384)
    bench = SampleBench([BATCH] * 6, WORLD, settings)
    winners = bench.winners_near(STRATEGIES, (), lambda done, of: tried.append((done, of)))
    assert tried == [(number + 1, 6) for number in range(num_tried)]
    assert set(winners) < set(STRATEGIES)
    assert all(bench.times_ms(strategy).shape == (6,) for strategy in winners)
