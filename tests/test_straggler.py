"""The slow rank is named where accusations meet, and nobody where all are alike."""

from __future__ import annotations

import json
import random
from types import SimpleNamespace

import pytest

from ds_hydra.engine.telemetry.latency_tracker import StragglerFinder
from ds_hydra.strategy.schemes.scheme import Strategy

STRATEGIES = ("4x<1,1>", "2x<2,1>", "1x<2,1> + 2x<1,1>", "1x<1,3> + 1x<1,1>", "1x<4,1>")


def measured(strategy, slow_rank, factor, generator):
    """Pipelines of one iteration; 10% noise, and `factor` where the slow rank takes part."""
    parsed = Strategy.parse(strategy)
    return [
        SimpleNamespace(
            ranks=ranks,
            num_micro_batches=2,
            predicted_ms=50.0,
            measured_ms=80.0 * generator.uniform(0.9, 1.1) * (factor if slow_rank in ranks else 1),
        )
        for ranks in parsed.place()
    ]


@pytest.mark.parametrize("slow_rank", range(4))
def test_the_slow_rank_is_named(slow_rank):
    generator, finder = random.Random(slow_rank), StragglerFinder()
    found = [
        finder.observe(measured(generator.choice(STRATEGIES), slow_rank, 2.0, generator))
        for _ in range(40)
    ]
    assert found[:4] == [None] * 4
    assert set(found[-10:]) == {slow_rank}
    recovered = [finder.observe(measured("4x<1,1>", slow_rank, 1.0, generator)) for _ in range(30)]
    assert recovered[-1] is None


def test_nobody_is_accused_of_noise_or_of_a_wrong_profile():
    generator, finder = random.Random(5), StragglerFinder()
    found = {
        finder.observe(measured(generator.choice(STRATEGIES), None, 1.0, generator))
        for _ in range(200)
    }
    assert found == {None}


def test_ranks_that_are_always_together_are_not_told_apart():
    generator, finder = random.Random(6), StragglerFinder()
    found = {finder.observe(measured("2x<2,1>", 3, 3.0, generator)) for _ in range(40)}
    assert found == {None}


@pytest.mark.parametrize("strategies", [STRATEGIES, ("2x<1,1>",)])
def test_plans_count_with_a_slow_rank_soon_and_forgive_it(strategies):
    generator, finder = random.Random(7), StragglerFinder()
    for _ in range(40):
        finder.observe(measured(generator.choice(strategies), None, 1.0, generator))
        assert finder.slow_ranks() == {}
    for _ in range(12):
        finder.observe(measured(generator.choice(strategies), 1, 2.0, generator))
    assert finder.slow_ranks() == {1: pytest.approx(1.8, abs=0.4)}
    state = json.loads(json.dumps(finder.state_dict()))
    for _ in range(15):
        finder.observe(measured(generator.choice(strategies), None, 1.0, generator))
    assert finder.slow_ranks() == {}
    resumed = StragglerFinder()
    resumed.load_state_dict(state)
    assert resumed.slow_ranks() == {1: pytest.approx(1.8, abs=0.4)}
    with pytest.raises(ValueError, match="not finite"):
        resumed.load_state_dict({**state, "variance": float("nan")})


def test_what_is_expected_of_schemes_is_not_the_fault_of_ranks():
    generator, finder = random.Random(8), StragglerFinder()
    for _ in range(30):
        pipelines = measured("1x<2,1> + 2x<1,1>", 0, 2.0, generator)
        finder.observe(pipelines, [100.0, 50.0, 50.0])
    assert finder.slow_ranks() == {}


def test_a_rank_that_gets_no_work_is_believed_to_recover():
    finder = StragglerFinder()
    named = [finder.observe(pipelines_of(1.0, 4.0)) for _ in range(20)]
    assert named[-1] == 1
    slow = finder.slow_ranks()[1]
    idle = [finder.observe(pipelines_of(1.0, None)) for _ in range(300)]
    assert idle[0] == 1
    assert slow > 2
    assert (idle[-1], finder.slow_ranks()) == (None, {})
    # And is found again where it has not recovered
    assert [finder.observe(pipelines_of(1.0, 4.0)) for _ in range(20)][-1] == 1


def pipelines_of(*slowdowns):
    """Pipelines of one rank each, which take so much longer; None has no work."""
    return [
        SimpleNamespace(
            ranks=(rank,),
            num_micro_batches=0 if slowdown is None else 1,
            predicted_ms=0.0 if slowdown is None else 10.0,
            measured_ms=10.0 * (slowdown or 0.0),
        )
        for rank, slowdown in enumerate(slowdowns)
    ]
