"""Rehearsed iterations: which strategies, with which lengths, and what they do to T."""

from __future__ import annotations

import json
from dataclasses import asdict

import pytest

from ds_hydra.configs import find_file
from ds_hydra.configs.hydra_config import HydraConfig
from ds_hydra.engine.profiling import profiler
from ds_hydra.engine.profiling.rehearsal import (
    at_rehearsed_level,
    choose_rehearsals,
    level_factors,
    made_lengths,
    side_by_side,
)
from ds_hydra.strategy import Profile, Scheme
from ds_hydra.strategy.schemes.scheme import parse_strategies


def names(strategies):
    return [str(strategy) for strategy in strategies]


def test_every_scheme_is_rehearsed_alone_and_once_beside_another():
    strategies = parse_strategies(
        [
            "4x<1,1>",
            "2x<2,1>",
            "1x<2,1> + 2x<1,1>",
            "1x<1,2> + 2x<1,1>",
            "1x<2,1> + 1x<1,2>",  # both have been beside another by then
            "4x<1,1;gather>",
            "1x<4,1>",  # not profiled
        ]
    )
    schemes = [Scheme(1, 1), Scheme(2, 1), Scheme(1, 2)]
    chosen = names(choose_rehearsals([*strategies, strategies[0]], schemes))
    assert chosen == ["4x<1,1>", "2x<2,1>", "1x<2,1> + 2x<1,1>", "1x<1,2> + 2x<1,1>"]


def test_neighbours_have_half_of_the_ranks_each():
    schemes = [Scheme(1, 1), Scheme(2, 1), Scheme(4, 1), Scheme(8, 1)]
    assert names(side_by_side(schemes, 8)) == ["2x<2,1> + 4x<1,1>", "1x<4,1> + 2x<2,1>"]
    assert side_by_side(schemes, 1) == []


@pytest.mark.parametrize(("longest", "num_tokens"), [(4096, 6144), (2, 9), (32768, 2_097_152)])
def test_made_lengths_are_long_and_short_ones(longest, num_tokens):
    lengths = made_lengths(longest, num_tokens)
    assert num_tokens <= sum(lengths) < num_tokens + longest
    assert max(lengths) == max(2, longest // 2)
    assert min(lengths) >= 2


def run(strategy, ratio, number=0):
    return {"strategy": strategy, "run": number, "predicted_ms": 50.0, "measured_ms": 50.0 * ratio}


def test_a_rehearsal_moves_the_level_of_t_and_keeps_its_terms():
    document = json.loads(find_file("profiles", "a800_llama2_7b").read_text())
    before = Profile.from_json(document)
    scheme, other = Scheme(2, 1), Scheme(4, 1)
    # Pipelines of one strategy count as one; without noise all of it counts
    runs = [run("3x<2,1>", ratio) for ratio in (1.3, 1.4, 1.4**2 / 1.3)]
    found = {scheme: [*runs, run("1x<4,1> + 2x<2,1>", 1.4)], other: [run("2x<4,1>", 0.0)]}
    changed = at_rehearsed_level(document, found)
    after = Profile.from_json(changed)
    assert asdict(after.latency[scheme]) == pytest.approx(
        asdict(before.latency[scheme].scaled(1.4))
    )
    assert after.latency[other] == before.latency[other]  # too short for the clock
    entries = {Scheme.from_json(entry): entry for entry in changed["schemes"]}
    assert entries[scheme]["rehearsed"] == {"factor": 1.4, "runs": found[scheme]}
    assert "rehearsed" not in entries[other]


def test_what_scatters_counts_less():
    quiet = {
        Scheme(1, 1): [run("4x<1,1>", 0.8), run("1x<2,1> + 2x<1,1>", 0.82)],
        Scheme(2, 1): [run("2x<2,1>", 1.3), run("1x<2,1> + 2x<1,1>", 1.27)],
    }
    factors = level_factors(quiet)
    assert factors[Scheme(1, 1)] == pytest.approx(0.81, rel=0.01)
    assert factors[Scheme(2, 1)] == pytest.approx(1.285, rel=0.01)
    noisy = {
        Scheme(1, 1): [run("4x<1,1>", 0.4), run("1x<2,1> + 2x<1,1>", 1.6)],
        Scheme(2, 1): [run("2x<2,1>", 2.1), run("1x<2,1> + 2x<1,1>", 0.6)],
    }
    factors = level_factors(noisy)
    assert 0.9 < factors[Scheme(1, 1)] < factors[Scheme(2, 1)] < 1.1
    assert level_factors({}) == {}


def test_two_runs_that_agree_are_enough():
    config = HydraConfig.parse(
        {"context_length": 64, "tokens_per_iteration": 64} | {"profiling": {"repeats": 4}}
    )
    warm_up = 7.0
    times = {"quiet": iter([warm_up, 100.0, 101.0])}
    times["busy"] = iter([warm_up, 100.0, 150.0, 160.0, 90.0])
    times["late"] = iter([warm_up, 150.0, 100.0, 101.0])
    cases = [(name, profiler.ProbeMicroBatch(8)) for name in times]
    quiet = {"show_progress": False, "warms_up_each": False}
    found = profiler.measure_in_rounds(cases, lambda name, _: next(times[name]), config, **quiet)
    assert list(found.values()) == [100.5, 125.0, 101.0]
