"""The bound of whole pipelines is above perfect balance, and below what the planner finds."""

from __future__ import annotations

import doctest

import numpy as np
import pytest
from reference import make_batch, make_profile

from benchmarks import whole_pipelines as bench
from ds_hydra.lab.simulator.scenario import Scenario, perfect_balance_ms
from ds_hydra.sampler.planner.iteration import plan_iteration
from ds_hydra.strategy import Strategy
from ds_hydra.strategy.cost_models.costs import Costs


def make_scenario(profile, lengths, num_devices):
    return Scenario(
        costs=Costs(profile),
        num_devices=num_devices,
        context_length=100,
        batches=(make_batch(lengths),),
    )


def test_half_a_pipeline_on_the_last_device_is_no_pipeline():
    profile = make_profile({"<2,1>": (0.0, 1.0, 0.0)})
    lengths = [10, 10]
    scenario = make_scenario(profile, lengths, 3)
    perfect = perfect_balance_ms(scenario, scenario.batches[0], list(profile.latency))
    assert perfect == pytest.approx(20 * 2 / 3)
    program = bench.WholePipelines(scenario, lengths, list(profile.latency))
    assert program.bound_ms(perfect, 100.0) == pytest.approx(20, rel=5e-3)
    assert program.least_devices(9.9) == np.inf, "ten tokens take ten ms"
    assert program.least_devices(11) == pytest.approx(4)


@pytest.mark.parametrize("seed", range(4))
def test_bounds_are_in_order(seed):
    rng = np.random.default_rng(seed)
    profile = make_profile(
        {"<1,1>": (0.01, 1.0, 2.0), "<2,1>": (0.006, 0.6, 2.0), "<4,1>": (0.004, 0.4, 2.0)}
    )
    lengths = sorted(rng.integers(3, 90, 12).tolist(), reverse=True)
    scenario = make_scenario(profile, lengths, 4)
    schemes = list(profile.latency)
    perfect = perfect_balance_ms(scenario, scenario.batches[0], schemes)
    strategies = [Strategy.parse(t) for t in ("4x<1,1>", "2x<2,1>", "1x<4,1>", "1x<2,1> + 2x<1,1>")]
    found = plan_iteration(
        scenario.batches[0], strategies=strategies, profile=profile, num_devices=4
    )
    bound = bench.WholePipelines(scenario, lengths, schemes).bound_ms(perfect, found.makespan_ms)
    assert perfect <= bound <= found.makespan_ms


def test_examples_of_the_docstrings():
    assert doctest.testmod(bench).failed == 0
