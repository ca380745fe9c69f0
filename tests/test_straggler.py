"""The slow rank is named where accusations meet, and nobody where all are alike."""

from __future__ import annotations

import random
from types import SimpleNamespace

import pytest

from ds_hydra.engine.telemetry.straggler import StragglerFinder
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
