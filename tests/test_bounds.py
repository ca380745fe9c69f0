"""The bound of a strategy holds for every plan that is found, and is near them where that can be
expected.
"""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ds_hydra.sampler.planner.bounds import is_impossible, strategy_bound_ms
from ds_hydra.sampler.planner.dispatch import dispatch_trials, fit_trials
from ds_hydra.sampler.planner.problem import PipelineKind, make_problem
from ds_hydra.sampler.planner.refine import improve_dispatch, pack_pipelines, refine_pipelines
from ds_hydra.strategy.profiles.profile import LatencyModel

MUCH_MS = 1e6
LATENCIES = [
    LatencyModel(quadratic_ms=a, linear_ms=b, constant_ms=c, traffic_ms=traffic_ms)
    for a, b, c in product([0.0, 0.02], [0.0, 0.5, 1.0, 2.0], [0.0, 1.0, 8.0])
    for traffic_ms in (0.0, 20.0)
    if a or b or c
]
kinds = st.builds(
    PipelineKind,
    num_pipelines=st.integers(1, 3),
    num_stages=st.integers(1, 4),
    max_len_tokens=st.integers(20, 60),
    latency=st.sampled_from(LATENCIES),
)
kind_lists = st.lists(kinds, min_size=1, max_size=3)


def make(lengths, kinds, is_exact=True):
    largest = max(kind.max_len_tokens for kind in kinds)
    descending = np.array(sorted((min(length, largest) for length in lengths), reverse=True))
    return make_problem(descending, kinds, is_exact=is_exact)


def find_ms(problem):
    """Time of a good plan."""
    assignment, micro_batches = np.zeros_like(problem.lengths), np.zeros_like(problem.lengths)
    estimate = dispatch_trials(problem, 4, 0, assignment)
    fit_trials(problem, 0.0, estimate, 8, assignment)
    improve_dispatch(problem, assignment, 0.0, 100, 8)
    value = pack_pipelines(problem, assignment, micro_batches)
    return refine_pipelines(problem, assignment, micro_batches, value, 0.0, 100, 8)


# Equal ones need more micro-batches than `MAX_BALANCED_MICRO_BATCHES`.
equal_lengths = st.builds(
    lambda length, number: [length] * number, st.integers(1, 60), st.integers(1, 120)
)


@settings(deadline=None, max_examples=400)
@given(
    st.lists(st.integers(1, 60), min_size=1, max_size=30) | equal_lengths, kind_lists, st.booleans()
)
def test_no_plan_is_below_the_bound(lengths, kinds, is_exact):
    problem = make(lengths, kinds, is_exact)
    found_ms = find_ms(problem) * (1 + 1e-9)
    assert strategy_bound_ms(problem, MUCH_MS) <= found_ms
    assert not is_impossible(problem, found_ms)


@settings(deadline=None, max_examples=100)
@given(st.lists(st.integers(1, 60), min_size=1, max_size=4), kinds, st.booleans())
def test_no_plan_of_few_sequences_on_one_pipeline_is_below_the_bound(lengths, kind, is_exact):
    problem = make(lengths, [kind._replace(num_pipelines=1)], is_exact)
    assert strategy_bound_ms(problem, MUCH_MS) <= find_ms(problem) * (1 + 1e-9)


@pytest.mark.parametrize(("num_stages", "gap"), [(1, 0.01), (2, 0.04), (4, 0.06)])
def test_many_short_sequences_come_near_the_bound(num_stages, gap):
    latency = LatencyModel(quadratic_ms=0.001, linear_ms=1.0, constant_ms=5.0)
    lengths = [1 + (7 * i) % 40 for i in range(200)]
    problem = make(lengths, [PipelineKind(4, num_stages, 100, latency)])
    bound, found = strategy_bound_ms(problem, MUCH_MS), find_ms(problem)
    assert bound <= found <= bound * (1 + gap)
    assert is_impossible(problem, 0.99 * bound)
    assert not is_impossible(problem, found)


def test_long_sequences_that_cannot_share_need_a_pipeline_each():
    latency = LatencyModel(quadratic_ms=0.0, linear_ms=1.0, constant_ms=0.0)
    problem = make([50, 50, 50, 1, 1], [PipelineKind(2, 1, 50, latency)])
    assert strategy_bound_ms(problem, MUCH_MS) == pytest.approx(100.0, rel=1e-3)


@pytest.mark.parametrize("is_exact", [True, False])
def test_micro_batches_filled_to_the_last_token_are_possible(is_exact):
    latency = LatencyModel(quadratic_ms=0.02, linear_ms=0.5, constant_ms=0.0)
    problem = make([39, 39, 39], [PipelineKind(1, 1, 39, latency)], is_exact)
    assert strategy_bound_ms(problem, MUCH_MS) == pytest.approx(find_ms(problem), rel=1e-3)
