"""Whole plans: legal, recomputable, within bounds, the same for equal input, refused with useful
advice.
"""

from __future__ import annotations

import itertools
import re
from dataclasses import fields, replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from reference import STRATEGIES_32B_64, make_batch, make_plan, make_profile, partitions
from shared_data import shared_json

from ds_hydra.errors import HydraConfigError, InfeasiblePlanError
from ds_hydra.lab.simulator.events import simulate_plan
from ds_hydra.sampler.planner.candidate import OneStrategy
from ds_hydra.sampler.planner.iteration import plan_iteration, profiled_times
from ds_hydra.sampler.planner.phase_plan import PlanningProblem
from ds_hydra.sampler.planner.planner_settings import PlannerSettings
from ds_hydra.sampler.schedule import makespan_ms
from ds_hydra.strategy.profiles.profile import Profile
from ds_hydra.strategy.schemes.scheme import Scheme, Strategy, parse_strategies

PROFILE = make_profile(
    {
        "<1,1>": (0.010, 1.0, 3.0),
        "<2,1>": (0.006, 0.6, 4.0),
        "<1,2>": (0.005, 0.5, 2.0),
        "<4,1>": (0.004, 0.4, 5.0),
        "<2,2>": (0.003, 0.3, 2.5),
        "<1,3>": (0.003, 0.3, 2.0),
    }
)
TRAFFIC_MS = {Scheme(1, 1): 12.0, Scheme(1, 2): 9.0}
TRAVELLING = {s: replace(PROFILE.latency[s], traffic_ms=ms) for s, ms in TRAFFIC_MS.items()}
PROFILE = replace(PROFILE, latency={**PROFILE.latency, **TRAVELLING})
MAX_LEN = {
    Scheme(1, 1): 20,
    Scheme(2, 1): 40,
    Scheme(1, 2): 25,
    Scheme(4, 1): 80,
    Scheme(2, 2): 50,
    Scheme(1, 3): 30,
}
STRATEGIES = parse_strategies(
    [
        "1x<4,1> + 4x<1,1>",
        "2x<2,1> + 2x<1,2>",
        "4x<2,1>",
        "2x<2,2>",
        "1x<2,2> + 1x<2,1> + 2x<1,1>",
        "2x<1,3>",
    ]
)

objectives = st.sampled_from(["exact", "closed_form"])
batches = st.lists(st.integers(1, 80), min_size=1, max_size=40)
subsets = st.lists(st.sampled_from(STRATEGIES), min_size=1, max_size=4, unique=True)


def plan(lengths, strategies=STRATEGIES, objective="exact", **changes):
    changes |= {"objective": objective, "max_len_override": MAX_LEN}
    return make_plan(lengths, strategies, PROFILE, 8, **changes)


def recompute(plan, objective, profile=PROFILE):
    """Makespan of every pipeline from its micro-batches and the profile alone."""
    result = []
    for pipeline in plan.pipelines:
        latency = profile.get_latency(pipeline.scheme)
        micro_batches = [
            latency.micro_batch_ms(plan.micro_batch_lengths(micro_batch))
            for micro_batch in pipeline.micro_batches
        ]
        result.append(
            makespan_ms(
                np.array(micro_batches), pipeline.scheme.pp, 1 / 3, objective == "exact", 0.0
            )
        )
    return result


@settings(deadline=None)
@given(batches, subsets, objectives, st.booleans())
def test_plans_are_legal_and_recomputable(lengths, strategies, objective, is_heuristic):
    longest = max(max(MAX_LEN[scheme] for scheme in s.schemes) for s in strategies)
    lengths = [min(length, longest) for length in lengths]
    quick = {"num_trials": 1, "max_refine_steps": 0} if is_heuristic else {}
    result = plan(lengths, strategies, objective, **quick)
    assert result.strategy in strategies
    placed = [i for p in result.pipelines for m in p.micro_batches for i in m]
    assert sorted(placed) == list(range(len(lengths)))
    for pipeline in result.pipelines:
        for micro_batch in pipeline.micro_batches:
            assert sum(result.micro_batch_lengths(micro_batch)) <= MAX_LEN[pipeline.scheme]
    times = recompute(result, objective)
    assert [p.makespan_ms for p in result.pipelines] == pytest.approx(times, rel=1e-12)
    assert result.makespan_ms == pytest.approx(max(times), rel=1e-12)
    assert 0 < result.lower_bound_ms <= result.makespan_ms
    assert all(p.lower_bound_ms <= p.makespan_ms * (1 + 1e-12) for p in result.pipelines)


def fastest_pipeline(lengths, scheme, objective):
    """Shortest time of one pipeline over all packings and micro-batch orders."""
    if not lengths:
        return 0.0
    latency = PROFILE.get_latency(scheme)
    best = np.inf
    for groups in partitions(lengths):
        if all(sum(group) <= MAX_LEN[scheme] for group in groups):
            for micro_batches in itertools.permutations(
                [latency.micro_batch_ms(group) for group in groups]
            ):
                best = min(
                    best,
                    makespan_ms(
                        np.array(micro_batches), scheme.pp, 1 / 3, objective == "exact", 0.0
                    ),
                )
    return best


def brute_force(lengths, strategy, objective):
    best = np.inf
    for owners in itertools.product(range(len(strategy.schemes)), repeat=len(lengths)):
        best = min(
            best,
            max(
                fastest_pipeline(
                    [l for l, o in zip(lengths, owners) if o == number], scheme, objective
                )
                for number, scheme in enumerate(strategy.schemes)
            ),
        )
    return best


@settings(deadline=None, max_examples=25)
@given(
    st.lists(st.integers(1, 30), min_size=1, max_size=4),
    st.sampled_from(
        parse_strategies(["1x<1,3> + 1x<2,1>", "2x<1,2>", "1x<2,2> + 1x<1,2>", "3x<2,1>"])
    ),
    objectives,
)
def test_bound_and_makespan_enclose_the_optimum(lengths, strategy, objective):
    lengths = [min(length, 25) for length in lengths]
    result = plan(lengths, [strategy], objective)
    optimum = brute_force(lengths, strategy, objective)
    assert result.lower_bound_ms <= optimum * (1 + 1e-9)
    assert optimum * (1 - 1e-9) <= result.makespan_ms <= optimum * 1.2


SHARED = replace(PROFILE, ranks_per_core=2.0)


@settings(deadline=None)
@given(batches, subsets, objectives)
def test_plans_of_ranks_that_share_cores_are_above_their_bounds(lengths, strategies, objective):
    overrides = PlannerSettings(objective=objective, max_len_override=MAX_LEN)
    longest = max(MAX_LEN[scheme] for strategy in strategies for scheme in strategy.schemes)
    batch = make_batch([min(length, longest) for length in lengths])
    plan = plan_iteration(
        batch, strategies=strategies, profile=SHARED, num_devices=8, settings=overrides
    )
    assert [p.makespan_ms for p in plan.pipelines] == pytest.approx(
        profiled_times(plan, SHARED, overrides)
    )
    alone = recompute(plan, objective)
    assert all(a / 2 <= p.makespan_ms + 1e-9 <= a + 2e-9 for p, a in zip(plan.pipelines, alone))
    bound_ms = OneStrategy(plan.strategy).bound_ms(PlanningProblem(batch, SHARED, 8, overrides))
    assert plan.lower_bound_ms <= plan.makespan_ms + 1e-9
    assert bound_ms <= plan.makespan_ms * (1 + 1e-9)


def test_a_long_sequence_may_run_on_alone_where_ranks_share_cores():
    profile = make_profile({"<1,1>": (0.0, 1.0, 0.0), "<2,1>": (0.0, 0.8, 0.0)})
    strategies, sharing = ("2x<1,1>", "1x<2,1>"), replace(profile, ranks_per_core=2.0)
    assert str(make_plan([60, 10], strategies, profile, 2).strategy) == "1x<2,1>"
    shared = make_plan([60, 10], strategies, sharing, 2)
    assert str(shared.strategy) == "2x<1,1>"
    assert [p.makespan_ms for p in shared.pipelines] == [10 + 50 / 2, 10]


def test_idle_ranks_leave_their_cores_to_others():
    profile = replace(make_profile({"<2,1>": (0.0, 0.6, 0.0)}, max_len=200), ranks_per_core=2.0)
    for text in ("1x<2,1>", "2x<2,1>"):
        found = make_plan([200], [text], profile, 4)
        assert max(p.makespan_ms for p in found.pipelines) == pytest.approx(60), text
        assert found.lower_bound_ms <= found.makespan_ms


def test_simulated_plans_of_ranks_that_share_cores_take_what_was_planned():
    profile = replace(make_profile({"<1,1>": (0.0, 1.0, 0.0)}), ranks_per_core=2.0)
    override = {Scheme(1, 1): 100}
    found = make_plan([90, 30, 20], ["4x<1,1>"], profile, 4, max_len_override=override)
    assert found.makespan_ms < 90
    assert simulate_plan(found, profile).propagation_ms == pytest.approx(found.makespan_ms)


def test_times_by_a_profile_that_lacks_schemes_of_the_plan():
    known = make_profile({"<1,1>": (0.0, 1.0, 0.0), "<2,1>": (0.0, 0.8, 0.0)})
    known = replace(known, ranks_per_core=2.0)
    override = {"max_len_override": {Scheme(1, 1): 100, Scheme(2, 1): 200}}
    made = make_plan([90, 90, 80], ["1x<2,1> + 2x<1,1>"], known, 4, **override)
    settings_ = PlannerSettings(**override)
    small = replace(make_profile({"<1,1>": (0.0, 1.0, 0.0)}), ranks_per_core=2.0)
    first, *others = profiled_times(made, small, settings_)
    assert first is None
    assert None not in others
    nothing = replace(make_profile({"<4,1>": (0.0, 1.0, 0.0)}), ranks_per_core=2.0)
    assert profiled_times(made, nothing, settings_) == [None] * 3


def test_one_sequence_leaves_pipelines_empty():
    result = plan([5])
    assert sum(len(p.micro_batches) for p in result.pipelines) == 1
    assert result.makespan_ms == result.lower_bound_ms
    assert result.imbalance == 0.0


def test_a_batch_without_sequences_is_an_empty_plan():
    result = plan([])
    assert result.makespan_ms == 0.0
    assert all(not p.micro_batches for p in result.pipelines)


def test_sample_indices_and_labels_pass_through():
    batch = make_batch([3, 4, 5], iteration=7)
    result = plan_iteration(batch, strategies=STRATEGIES, profile=PROFILE, num_devices=8)
    assert all(getattr(result, field.name) == getattr(batch, field.name) for field in fields(batch))


@given(st.lists(st.integers(1, 200), min_size=1, max_size=10), subsets)
@settings(deadline=None)
def test_advice_for_a_sequence_that_fits_nowhere_works(lengths, strategies):
    try:
        plan(lengths, strategies)
    except InfeasiblePlanError as error:
        message = str(error)
        assert f"sequence {lengths.index(max(lengths))} has {max(lengths)} tokens" in message
        advice = int(re.search(r"lower hydra.context_length to (\d+)", message)[1])
        plan([min(length, advice) for length in lengths], strategies)


def test_a_sequence_that_fits_only_one_candidate_selects_it():
    assert plan([80] + [1] * 30).strategy == Strategy.parse("1x<4,1> + 4x<1,1>")


def test_bad_input_is_refused_where_it_enters():
    with pytest.raises(HydraConfigError, match=r"strategy 9x<1,1> needs 9 ranks, there are 8"):
        plan([1], [Strategy.parse("9x<1,1>")])
    with pytest.raises(HydraConfigError, match=r"no candidate strategy; set hydra\.strategies"):
        plan([1], [])
    with pytest.raises(HydraConfigError, match="sequence 1 of iteration 0 has 0 tokens"):
        plan([1, 0])
    with pytest.raises(HydraConfigError, match=r"scheme <8,1> is not in profile"):
        make_plan([1], ["1x<8,1>"], PROFILE, 8, max_len_override={Scheme(8, 1): 100})


def test_settings_round_trip_through_json():
    uneven = {Scheme(1, 2, stages=(3, 1)): 7}
    changed = PlannerSettings(
        objective="closed_form", seed=3, max_len_override={**MAX_LEN, **uneven}
    )
    assert PlannerSettings.from_json(changed.to_json()) == changed


@pytest.mark.parametrize("name", ["cc_200K_ctx32K", "gh_100K_ctx32K"])
def test_64_gpus(name):
    profile = Profile.from_json(shared_json("profiles/a800_llama2_32b.json"))
    gaps = []
    for iteration, lengths in enumerate(shared_json(f"planner/{name}.json")["batches"][:20]):
        result = make_plan(lengths, STRATEGIES_32B_64, profile, 64, iteration=iteration)
        assert result.makespan_ms == pytest.approx(
            max(recompute(result, "exact", profile)), rel=1e-9
        )
        gaps.append(result.makespan_ms / result.lower_bound_ms - 1)
    assert np.mean(gaps) <= 0.03


@pytest.mark.parametrize("solver", ["cbc", "highs"])
def test_ideal_dispatch_is_legal_and_within_bounds(solver):
    lengths = [17, 25, 3, 20, 22, 9, 31, 8, 8, 25, 14, 40]
    result = plan(lengths, [Strategy.parse("2x<2,1> + 2x<1,2>")], dispatch="ideal", solver=solver)
    assert result.makespan_ms == pytest.approx(max(recompute(result, "exact")), rel=1e-12)
    assert (
        result.makespan_ms
        <= plan(lengths, [Strategy.parse("2x<2,1> + 2x<1,2>")]).makespan_ms * 1.05
    )
