"""The event simulation against closed forms and schedules worked out by hand."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from reference import make_profile

from ds_hydra.lab.simulator.events import PipelineWork, simulate_iteration, simulate_plan
from ds_hydra.sampler.plan import GlobalBatch
from ds_hydra.sampler.planner.iteration import plan_iteration
from ds_hydra.sampler.schedule import one_f_one_b_ms
from ds_hydra.strategy.profiles.profile import LinkTimes
from ds_hydra.strategy.schemes.scheme import FORWARD_FRACTION, Scheme, Strategy


def make_work(forward_ms, backward_ms, *, tp=1, first_rank=0, hop_ms=0.0):
    """A pipeline whose `forward_ms[stage][micro_batch]` and `backward_ms[stage][micro_batch]` are
    given.
    """
    forward = np.array(forward_ms, dtype=float)
    scheme = Scheme(tp, forward.shape[0])
    return PipelineWork(
        scheme=scheme,
        ranks=tuple(range(first_rank, first_rank + scheme.num_devices)),
        forward_ms=forward,
        backward_ms=np.array(backward_ms, dtype=float),
        hop_ms=np.full(forward.shape[1], hop_ms),
    )


def simulate_one(work, **more):
    return simulate_iteration([work], num_devices=work.scheme.num_devices, **more)


def spans(work):
    """(start, end) of the forwards of each stage, and of its backwards."""
    starts_f, ends_f, starts_b, ends_b = work.passes_ms().tolist()
    return [
        [list(zip(*own)) for own in zip(starts, ends)]
        for starts, ends in ((starts_f, ends_f), (starts_b, ends_b))
    ]


def test_two_stages_three_unequal_micro_batches_by_hand():
    """Micro-batches of 1, 4, 2 ms forward and twice that backward.

    stage 0: F0 0-1 F1 1-5 B0 5-7 F2 7-9 B1 17-25 B2 25-29; stage 1: F0 1-2 B0 2-4 F1 5-9 B1 9-17 F2
    17-19 B2 19-23
    """
    work = make_work([[1, 4, 2]] * 2, [[2, 8, 4]] * 2)
    simulation = simulate_one(work)
    assert spans(work) == [
        [[(0, 1), (1, 5), (7, 9)], [(1, 2), (5, 9), (17, 19)]],
        [[(5, 7), (17, 25), (25, 29)], [(2, 4), (9, 17), (19, 23)]],
    ]
    assert simulation.propagation_ms == 29


def test_transfers_delay_the_receiver_only():
    """One micro-batch, two stages, a hop of 10 ms each way: F 0-1, F 11-12, B 12-14, B 24-26."""
    one = make_work([[1]] * 2, [[2]] * 2, hop_ms=10)
    assert spans(one) == [[[(0, 1)], [(11, 12)]], [[(24, 26)], [(12, 14)]]]
    assert simulate_one(one).propagation_ms == 26
    # Stage 0 sends micro-batch 0 and computes micro-batch 1 at once.
    two = make_work([[1, 1]] * 2, [[2, 2]] * 2, hop_ms=10)
    assert spans(two)[0][0] == [(0, 1), (1, 2)]


def test_stages_may_differ():
    """A last stage of double time: F0 0-1, F1 1-2 | F0 1-3 B0 3-7 F1 7-9 B1 9-13 | B0 7-9, B1
    13-15.
    """
    assert simulate_one(make_work([[1, 1], [2, 2]], [[2, 2], [4, 4]])).propagation_ms == 15


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.floats(0.1, 50), min_size=1, max_size=12),
    st.integers(1, 6),
    st.sampled_from([0.25, FORWARD_FRACTION, 0.5]),
)
def test_equals_the_planners_recurrence(micro_batch_ms, num_stages, forward_fraction):
    micro_batches = np.array(micro_batch_ms)
    work = make_work(
        np.tile(micro_batches * forward_fraction, (num_stages, 1)),
        np.tile(micro_batches * (1 - forward_fraction), (num_stages, 1)),
    )
    simulation = simulate_one(work)
    assert simulation.propagation_ms == pytest.approx(
        one_f_one_b_ms(micro_batches, num_stages, forward_fraction)
    )


LINKS = LinkTimes(pull_ms=12.0, push_ms=24.0, step_ms=5.0)


def test_without_overlap_everything_adds_up():
    slow = make_work([[6]], [[12]])
    fast = make_work([[2]], [[4]], first_rank=1)
    simulation = simulate_iteration([slow, fast], num_devices=3, links=LINKS)
    assert simulation.iteration_ms == 12 + 18 + 24 + 5
    assert (simulation.propagation_ms, simulation.exposed_link_ms) == (18, 36)
    assert simulation.imbalance == pytest.approx(2.0)


@pytest.mark.parametrize(
    ("forward", "backward", "expected"),
    [
        # Six layers. Computing is slower than the link: first layer 12/6 late, the last gradients
        # 24/6 after.
        (60, 120, 12 / 6 + 60 + 120 + 24 / 6),
        # The link is slower: the last layer runs after the pull, the push begins after the first
        # layer's backward.
        (6, 6, (12 + 6 / 6) + 6 / 6 + 24),
    ],
)
def test_overlap_hides_what_a_layerwise_link_can_hide(forward, backward, expected):
    work = make_work([[forward]], [[backward]])
    simulation = simulate_one(work, links=LINKS, overlap=True, num_layers=6)
    assert simulation.push_end_ms == pytest.approx(expected)
    assert simulation.iteration_ms == pytest.approx(expected + 5)


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.floats(0.5, 30), min_size=1, max_size=8),
    st.sampled_from([1, 2, 4]),
    st.floats(0, 60),
    st.floats(0, 60),
)
def test_overlap_never_loses_and_never_beats_the_parts(
    micro_batch_ms, num_stages, pull_ms, push_ms
):
    micro_batches = np.array(micro_batch_ms)
    work = make_work(
        np.tile(micro_batches, (num_stages, 1)), np.tile(2 * micro_batches, (num_stages, 1))
    )
    links = LinkTimes(pull_ms=pull_ms, push_ms=push_ms, step_ms=1.0)
    without = simulate_one(work, links=links, num_layers=8)
    with_overlap = simulate_one(work, links=links, overlap=True, num_layers=8)
    assert without.iteration_ms == pytest.approx(pull_ms + without.propagation_ms + push_ms + 1)
    assert with_overlap.iteration_ms <= without.iteration_ms + 1e-9
    assert (
        with_overlap.iteration_ms >= max(with_overlap.propagation_ms, pull_ms + push_ms) + 1 - 1e-9
    )


def test_a_plan_takes_what_the_planner_says():
    profile = make_profile({"<1,1>": (1e-4, 1.0, 3.0), "<2,2>": (4e-5, 0.3, 3.0)}, max_len=60)
    batch = GlobalBatch.of_lengths((50, 40, 9, 8, 7, 30, 3, 1), iteration=7)
    plan = plan_iteration(
        batch, strategies=[Strategy.parse("1x<2,2> + 3x<1,1>")], profile=profile, num_devices=8
    )
    simulation = simulate_plan(plan, profile)
    assert simulation.propagation_ms == pytest.approx(plan.makespan_ms)
    assert simulation.pipeline_ms == pytest.approx([p.makespan_ms for p in plan.pipelines])
    assert simulation.imbalance == pytest.approx(plan.imbalance)


def test_an_iteration_without_micro_batches():
    work = make_work(np.zeros((2, 0)), np.zeros((2, 0)))
    for overlap in (False, True):
        simulation = simulate_one(work, links=LINKS, overlap=overlap)
        assert simulation.iteration_ms == 12 + 24 + 5
        assert (simulation.bubble, simulation.imbalance) == (0.0, 0.0)
