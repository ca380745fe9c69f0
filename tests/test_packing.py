"""Packing of one pipeline: legal, recomputable, within its bounds, near the references."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from reference import partitions
from shared_data import shared_json

from benchmarks.one_pipeline import pack_sequences
from ds_hydra.errors import HydraConfigError
from ds_hydra.sampler.planner.bounds import min_num_micro_batches
from ds_hydra.sampler.planner.packing import fewest_micro_batches
from ds_hydra.sampler.planner.problem import SolverLimits, make_model
from ds_hydra.sampler.schedule import makespan_ms
from ds_hydra.strategy.profiles.profile import LatencyModel

MAX_LEN = 30


@pytest.mark.parametrize("num_sequences", [3, 4, 5, 7, 8])
def test_equal_sequences_under_pp_have_a_micro_batch_each(num_sequences):
    """Where that is the best: unequal targets would leave one micro-batch without any."""
    latency = LatencyModel(quadratic_ms=0.05, linear_ms=0.5, constant_ms=0.1)
    lengths = [20] * num_sequences
    found = pack_sequences(lengths, latency=latency, max_len_tokens=1000, num_stages=2)
    alone = recompute([[i] for i in range(num_sequences)], lengths, latency, 2, True)
    assert recompute(found.micro_batches, lengths, latency, 2, True) <= 1.001 * alone


latencies = st.builds(
    LatencyModel,
    quadratic_ms=st.sampled_from([0.0, 0.05, 0.5]),
    linear_ms=st.sampled_from([0.5, 1.0]),
    constant_ms=st.sampled_from([0.0, 1.0, 10.0]),
    traffic_ms=st.sampled_from([0.0, 25.0]),
)
cases = {"latency": latencies, "num_stages": st.integers(1, 4), "is_exact": st.booleans()}


def pack(lengths, latency, num_stages, is_exact, **limits):
    return pack_sequences(
        lengths,
        latency=latency,
        num_stages=num_stages,
        max_len_tokens=MAX_LEN,
        is_exact=is_exact,
        **limits,
    )


def length_lists(size):
    return st.lists(st.integers(1, MAX_LEN), min_size=1, max_size=size)


def recompute(micro_batches, lengths, latency, num_stages, is_exact):
    times = np.array(
        [latency.micro_batch_ms(lengths[i] for i in micro_batch) for micro_batch in micro_batches]
    )
    return makespan_ms(times, num_stages, 1 / 3, is_exact, 0.0)


def fits(groups, lengths):
    return all(sum(lengths[i] for i in group) <= MAX_LEN for group in groups)


def brute_force(lengths, latency, num_stages, is_exact):
    best = np.inf
    for groups in partitions(list(range(len(lengths)))):
        if fits(groups, lengths):
            orders = itertools.permutations(groups) if is_exact and num_stages > 1 else [groups]
            best = min(
                best,
                *(
                    recompute(micro_batches, lengths, latency, num_stages, is_exact)
                    for micro_batches in orders
                ),
                np.inf,
            )
    return best


@settings(deadline=None)
@given(lengths=length_lists(40), **cases)
def test_micro_batches_are_legal_and_the_objective_can_be_recomputed(
    lengths, latency, num_stages, is_exact
):
    packing = pack(lengths, latency, num_stages, is_exact)
    assert sorted(i for micro_batch in packing.micro_batches for i in micro_batch) == list(
        range(len(lengths))
    )
    assert all(micro_batch for micro_batch in packing.micro_batches)
    assert fits(packing.micro_batches, lengths)
    assert packing.objective_ms == pytest.approx(
        recompute(packing.micro_batches, lengths, latency, num_stages, is_exact), rel=1e-12
    )
    assert packing.lower_bound_ms <= packing.objective_ms


@settings(deadline=None, max_examples=60)
@given(lengths=length_lists(5), **cases)
def test_bound_and_objective_enclose_the_optimum(lengths, latency, num_stages, is_exact):
    packing = pack(lengths, latency, num_stages, is_exact)
    optimum = brute_force(lengths, latency, num_stages, is_exact)
    assert packing.lower_bound_ms <= optimum * (1 + 1e-9)
    assert optimum * (1 - 1e-9) <= packing.objective_ms <= optimum * 1.2
    if packing.is_optimal:
        assert packing.objective_ms == pytest.approx(optimum)


@settings(deadline=None, max_examples=25)
@given(lengths=length_lists(6), **cases)
def test_integer_programs_keep_the_bound_valid(lengths, latency, num_stages, is_exact):
    limits = SolverLimits(gap_tolerance=0.0)
    packing = pack(lengths, latency, num_stages, is_exact, limits=limits)
    optimum = brute_force(lengths, latency, num_stages, is_exact)
    assert packing.lower_bound_ms <= optimum * (1 + 1e-6)
    assert packing.objective_ms >= optimum * (1 - 1e-9)
    if not is_exact or num_stages == 1:
        assert packing.objective_ms <= optimum * (1 + 1e-6)


@given(length_lists(7))
def test_min_num_micro_batches_is_a_lower_bound(lengths):
    fewest = min(
        len(groups) for groups in partitions(list(range(len(lengths)))) if fits(groups, lengths)
    )
    assert 1 <= min_num_micro_batches(np.array(sorted(lengths, reverse=True)), MAX_LEN) <= fewest


def test_the_fullest_micro_batch_that_has_room_takes_a_sequence():
    """Where the emptiest one did, 2 would find no place beside 6 and 3, or 5 and 4."""
    lengths, micro_batches = np.array([6, 5, 4, 3, 2]), np.zeros(5, dtype=np.int64)
    assert fewest_micro_batches(lengths, 10, 2, 0, micro_batches) == 2
    assert micro_batches.tolist() == [0, 1, 0, 1, 1]


def test_micro_batches_that_wait_for_their_weights_share_what_there_is():
    """20 + 10 and 5 take 30 and 25 ms, of which the second waits; 20 + 5 and 10 take 25 each."""
    latency = LatencyModel(quadratic_ms=0.0, linear_ms=1.0, constant_ms=0.0, traffic_ms=25.0)
    assert pack([20, 10, 5], latency, 1, True).objective_ms == pytest.approx(50)


def test_capacity_so_tight_that_only_the_integer_program_finds_the_micro_batches():
    # Four micro-batches of 100, filled exactly
    lengths = [57, 23, 20, 55, 24, 21, 43, 31, 26, 45, 33, 22]
    latency = LatencyModel(quadratic_ms=0.0, linear_ms=1.0, constant_ms=1000.0)
    kwargs = {"latency": latency, "num_stages": 1, "max_len_tokens": 100}
    heuristic = pack_sequences(lengths, **kwargs)
    solved = pack_sequences(lengths, **kwargs, limits=SolverLimits(gap_tolerance=0.0))
    assert len(heuristic.micro_batches) == 5
    assert not heuristic.is_optimal
    assert len(solved.micro_batches) == 4
    assert solved.is_optimal


@pytest.mark.parametrize("is_exact", [True, False])
@pytest.mark.parametrize("num_stages", [1, 3])
def test_corner_cases(num_stages, is_exact):
    latency = LatencyModel(quadratic_ms=0.1, linear_ms=1.0, constant_ms=2.0)
    none, one, full = (
        pack(lengths, latency, num_stages, is_exact) for lengths in ([], [7], [MAX_LEN] * 5)
    )
    assert none.micro_batches == ()
    assert none.objective_ms == 0.0
    assert one.micro_batches == ((0,),)
    assert one.is_optimal
    assert one.objective_ms == pytest.approx(num_stages * latency.micro_batch_ms([7]))
    assert sorted(full.micro_batches) == [(i,) for i in range(5)]
    assert full.objective_ms == pytest.approx(
        (num_stages - 1 + 5) * latency.micro_batch_ms([MAX_LEN])
    )


def test_reference_instances():
    gaps = []
    for instance in shared_json("planner/reference_packing.json")["instances"]:
        packing = pack_sequences(
            instance["lengths"],
            latency=LatencyModel(
                quadratic_ms=instance["quadratic_ms"],
                linear_ms=instance["linear_ms"],
                constant_ms=instance["constant_ms"],
            ),
            num_stages=instance["pp"],
            max_len_tokens=instance["max_len"],
            is_exact=False,
            limits=SolverLimits(),
        )
        best_known = instance["best_known_objective_ms"]
        assert packing.lower_bound_ms <= best_known * (1 + 1e-6), instance["id"]
        assert packing.objective_ms >= instance["lower_bound_ms"] * (1 - 1e-6), instance["id"]
        gaps.append(packing.objective_ms / best_known - 1)
    assert np.mean(gaps) <= 0.002
    assert max(gaps) <= 0.012


def test_a_missing_solver_is_named(monkeypatch):
    def fails(**_arguments):
        raise FileNotFoundError("no HiGHS library")  # what mip raises without it

    monkeypatch.setattr("mip.Model", fails)
    with pytest.raises(HydraConfigError, match=r"pip install 'ds_hydra\[highs\]'"):
        make_model(SolverLimits(solver="highs"))
