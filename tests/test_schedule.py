"""The 1F1B recurrence, and the bounds that are built on it; test_events.py has its simulation."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ds_hydra.sampler.schedule import (
    _critical_path,
    balance_micro_batches,
    ends_ms,
    makespan_ms,
    one_f_one_b_ms,
)

micro_batch_lists = st.lists(st.floats(0.1, 100.0), min_size=1, max_size=12)
stages = st.integers(1, 6)
fractions = st.sampled_from([0.25, 1 / 3, 0.5])


def closed_form_ms(micro_batches, num_stages):
    return makespan_ms(micro_batches, num_stages, 1 / 3, False, 0.0)


@given(st.floats(0.1, 100.0), st.integers(1, 12), stages, fractions)
def test_equal_micro_batches_take_the_closed_form(
    micro_batch, num_micro_batches, num_stages, fraction
):
    micro_batches = np.full(num_micro_batches, micro_batch)
    assert one_f_one_b_ms(micro_batches, num_stages, fraction) == pytest.approx(
        closed_form_ms(micro_batches, num_stages)
    )


@given(micro_batch_lists, stages, fractions)
def test_closed_form_is_never_faster(micro_batches, num_stages, fraction):
    micro_batches = np.array(micro_batches)
    assert one_f_one_b_ms(micro_batches, num_stages, fraction) <= closed_form_ms(
        micro_batches, num_stages
    ) * (1 + 1e-12)


def test_makespan_follows_the_objective():
    micro_batches = np.array([1.0, 9.0])
    assert makespan_ms(micro_batches, 2, 1 / 3, False, 0.0) == 27.0
    assert makespan_ms(micro_batches, 2, 1 / 3, True, 0.0) < 27.0
    assert [makespan_ms(np.zeros(0), 4, 1 / 3, is_exact, 0.0) for is_exact in (True, False)] == [
        0,
        0,
    ]


@given(micro_batch_lists, stages, fractions)
def test_critical_path_is_as_long_as_the_makespan(micro_batches, num_stages, fraction):
    micro_batches = np.array(micro_batches)
    path = np.zeros(micro_batches.size)
    makespan = _critical_path(micro_batches, num_stages, fraction, path)
    assert makespan == pytest.approx(one_f_one_b_ms(micro_batches, num_stages, fraction))
    assert path @ micro_batches == pytest.approx(makespan)


@settings(deadline=None)
@given(micro_batch_lists, st.integers(2, 5))
def test_no_division_into_micro_batches_beats_the_balance_ratio(micro_batches, num_stages):
    micro_batches = np.array(micro_batches)
    ratio = balance_micro_batches(num_stages).ratio[micro_batches.size]
    assert one_f_one_b_ms(micro_batches, num_stages, 1 / 3) >= ratio * micro_batches.sum() * (
        1 - 1e-12
    )


@pytest.mark.parametrize(
    ("num_stages", "num_micro_batches", "optimum"),
    [
        (2, 2, 22 / 15),
        (2, 3, 23 / 18),
        (2, 8, 1.0681606),
        (4, 4, 1.66),
        (4, 8, 1.2738482),
        (8, 16, 1.3156067),
    ],
)
def test_balance_is_near_the_linear_programs_optimum(num_stages, num_micro_batches, optimum):
    balance = balance_micro_batches(num_stages)
    reached = one_f_one_b_ms(
        balance.share[num_micro_batches, :num_micro_batches].copy(), num_stages, 1 / 3
    )
    assert optimum * 0.99 <= balance.ratio[num_micro_batches] <= optimum * (1 + 1e-7)
    assert optimum * (1 - 1e-7) <= reached <= optimum * 1.01


@settings(deadline=None)
@given(
    st.lists(st.tuples(st.floats(0.0, 100.0), st.integers(1, 4)), min_size=1, max_size=6),
    st.integers(0, 3),
    st.floats(1.0, 4.0),
)
def test_pipelines_end_as_their_ranks_share_cores(pipelines, num_idle, ranks_per_core):
    num_ranks = sum(ranks for _, ranks in pipelines) + num_idle
    cores = num_ranks / ranks_per_core
    # Seconds of a core that each rank of a pipeline needs: it had 1 / ranks_per_core of one.
    left = {j: ms / ranks_per_core for j, (ms, _) in enumerate(pipelines)}
    clock, ends = 0.0, {}
    while left:
        share = min(1.0, cores / sum(pipelines[j][1] for j in left))
        step = min(left.values())
        clock += step / share
        left = {j: work - step for j, work in left.items()}
        ends |= {j: clock for j, work in left.items() if work <= 0}
        left = {j: work for j, work in left.items() if work > 0}
    times = np.array([ms for ms, _ in pipelines])
    found = ends_ms(times, [ranks for _, ranks in pipelines], num_ranks, ranks_per_core)
    assert found == pytest.approx([ends[j] for j in range(len(pipelines))], rel=1e-9, abs=1e-9)


def test_with_a_core_for_every_rank_pipelines_take_their_time():
    times = np.array([0.1, 7.3, 2.0])
    assert ends_ms(times, [1, 2, 1], 5, 1.0) is times
    assert ends_ms(np.zeros(0), [], 4, 2.0).size == 0
