"""Dispatch: legal, its loads counted right, near brute force and the references."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from shared_data import shared_json

from ds_hydra.sampler.planner.dispatch import dispatch_sequences
from ds_hydra.sampler.planner.problem import PipelineKind, SolverLimits, make_problem
from ds_hydra.sampler.planner.refine import (
    apply_exchange,
    count_loads,
    estimate_after_ms,
    estimate_ms,
    pack_pipelines,
    refine_pipelines,
)
from ds_hydra.sampler.schedule import makespan_ms
from ds_hydra.strategy.profiles.profile import LatencyModel

kinds = st.builds(
    PipelineKind,
    num_pipelines=st.integers(1, 3),
    num_stages=st.integers(1, 3),
    max_len_tokens=st.integers(5, 30),
    latency=st.builds(
        LatencyModel,
        quadratic_ms=st.sampled_from([0.0, 0.1]),
        linear_ms=st.sampled_from([0.5, 1.0, 2.0]),
        constant_ms=st.just(0.0),
    ),
)
kind_lists = st.lists(kinds, min_size=1, max_size=3)
length_lists = st.lists(st.integers(1, 30), min_size=1, max_size=25)


def eq2(lengths, kind):
    """Eq. (2) without the constant."""
    costs = [kind.latency.sequence_ms(length) for length in lengths]
    return sum(costs) + max(costs, default=0.0) * (kind.num_stages - 1)


def recompute(assignment, lengths, pipelines):
    held = [
        [length for length, j in zip(lengths, assignment) if j == number]
        for number in range(len(pipelines))
    ]
    return max(eq2(mine, kind) for mine, kind in zip(held, pipelines))


def pipelines_of(kinds):
    return [kind for kind in kinds for _ in range(kind.num_pipelines)]


@settings(deadline=None)
@given(kind_lists, length_lists)
def test_dispatch_is_legal_and_recomputable(kinds, lengths):
    pipelines = pipelines_of(kinds)
    lengths = [min(length, max(kind.max_len_tokens for kind in kinds)) for length in lengths]
    found = dispatch_sequences(lengths, kinds)
    assert len(found.assignment) == len(lengths)
    assert all(
        length <= pipelines[j].max_len_tokens for length, j in zip(lengths, found.assignment)
    )
    assert found.objective_ms == pytest.approx(
        recompute(found.assignment, lengths, pipelines), rel=1e-12
    )
    assert found.lower_bound_ms <= found.objective_ms


@settings(deadline=None, max_examples=40)
@given(kind_lists, st.lists(st.integers(1, 30), min_size=1, max_size=5), st.booleans())
def test_dispatch_is_near_brute_force(kinds, lengths, is_ideal):
    pipelines = pipelines_of(kinds)
    lengths = [min(length, max(kind.max_len_tokens for kind in kinds)) for length in lengths]
    limits = SolverLimits(gap_tolerance=0.0) if is_ideal else None
    found = dispatch_sequences(lengths, kinds, limits=limits)
    optimum = min(
        recompute(assignment, lengths, pipelines)
        for assignment in itertools.product(range(len(pipelines)), repeat=len(lengths))
        if all(length <= pipelines[j].max_len_tokens for length, j in zip(lengths, assignment))
    )
    assert found.lower_bound_ms <= optimum * (1 + 1e-6)
    assert found.objective_ms >= optimum * (1 - 1e-9)
    assert found.objective_ms <= optimum * (1 + 1e-6 if is_ideal else 1.25)


def test_long_sequences_go_where_they_fit():
    small = PipelineKind(3, 1, 10, LatencyModel(quadratic_ms=0.0, linear_ms=1.0, constant_ms=0.0))
    large = PipelineKind(1, 1, 20, LatencyModel(quadratic_ms=0.0, linear_ms=1.0, constant_ms=0.0))
    found = dispatch_sequences([20, 11, 9, 9, 9], [small, large])
    assert found.assignment[:2] == (3, 3)
    assert sorted(found.assignment[2:]) == [0, 1, 2]
    alone = small._replace(num_pipelines=1)
    found = dispatch_sequences([20, 9, 9], [alone, large, alone])  # which stand apart
    assert found.assignment[0] == 1
    assert sorted(found.assignment[1:]) == [0, 2]


@given(kind_lists, length_lists)
@settings(deadline=None)
def test_loads_are_counted_right(kinds, lengths):
    problem = make_problem(np.array(sorted(lengths, reverse=True)), kinds, is_eq2=True)
    rng = np.random.default_rng(len(lengths))
    assignment = rng.integers(0, problem.kind_of.size, len(lengths))
    loads = count_loads(problem, assignment)
    for pipeline, kind in enumerate(pipelines_of(kinds)):
        mine = problem.lengths[assignment == pipeline]
        assert loads.tokens[pipeline] == mine.sum()
        two = [*np.flatnonzero(assignment == pipeline), -1, -1][:2]
        assert [loads.first[pipeline], loads.second[pipeline]] == two
        assert estimate_after_ms(problem, loads, pipeline, -1) == pytest.approx(
            eq2(mine.tolist(), kind)
        )


def test_exchanges_move_a_sequence_or_swap_two():
    assignment = np.array([0, 1, 0])
    apply_exchange(assignment, 0, np.array([0, 1, 1]))
    assert assignment.tolist() == [1, 0, 0]
    apply_exchange(assignment, 0, np.array([2, -1, 1]))
    assert assignment.tolist() == [1, 0, 1]


@given(kind_lists, length_lists)
@settings(deadline=None)
def test_refined_pipelines_take_what_their_micro_batches_take(kinds, lengths):
    problem = make_problem(np.array(sorted(lengths, reverse=True)), kinds, is_eq2=False)
    held = problem.max_len_tokens[problem.kind_of]
    assignment = np.full(len(lengths), held.argmax())
    if problem.lengths[0] > held.max():
        return
    micro_batches = np.zeros_like(assignment)
    pipeline_ms = pack_pipelines(problem, assignment, micro_batches)
    before_ms = pipeline_ms.max()
    after_ms = refine_pipelines(problem, assignment, micro_batches, pipeline_ms, 0.0, 100, 4)
    assert after_ms == pipeline_ms.max() <= before_ms
    for pipeline, kind in enumerate(problem.kind_of):
        own = assignment == pipeline
        times = np.bincount(micro_batches[own], problem.sequence_ms[kind][own]).astype(float)
        tokens = np.bincount(micro_batches[own], problem.lengths[own])
        assert tokens.max(initial=0) <= held[pipeline]
        found = makespan_ms(times, problem.num_stages[kind], 1 / 3, True, 0.0)
        assert pipeline_ms[pipeline] == pytest.approx(found)


def test_reference_instances():
    gaps = []
    for instance in shared_json("planner/reference_dispatch.json")["instances"]:
        kinds = [
            PipelineKind(
                1,
                pipeline["pp"],
                pipeline["max_len"],
                LatencyModel(
                    quadratic_ms=pipeline["quadratic_ms"],
                    linear_ms=pipeline["linear_ms"],
                    constant_ms=pipeline["constant_ms"],
                ),
            )
            for pipeline in instance["pipelines"]
        ]
        found = dispatch_sequences(instance["lengths"], kinds)
        assert found.lower_bound_ms <= instance["best_known_objective_ms"] * (1 + 1e-6), instance[
            "id"
        ]
        assert found.objective_ms >= instance["lower_bound_ms"] * (1 - 1e-6), instance["id"]
        gaps.append(found.objective_ms / instance["best_known_objective_ms"] - 1)
    assert np.mean(gaps) <= 0.005
    assert max(gaps) <= 0.02


@pytest.mark.parametrize("is_exact", [True, False])
@pytest.mark.parametrize("num_stages", [1, 2])
def test_a_pipeline_takes_at_least_the_traffic_of_its_micro_batches(num_stages, is_exact):
    """Four micro-batches of ten tokens, each of which waits for its weights."""
    given = {"load_ms": 10.0, "tokens": 40, "longest_ms": 4.0, "kind": 0, "max_len": 10}
    found = estimate_ms(
        **given,
        num_stages=num_stages,
        constant=100.0,
        traffic=1e4,
        ratio=np.ones((1, 64)),
        is_exact=is_exact,
        is_eq2=False,
    )
    assert found == 1e4 * (num_stages - 1 + 4)
