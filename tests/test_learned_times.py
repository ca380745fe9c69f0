"""What is learned of measured times: who is to blame, how soon, and how sure that is."""

from __future__ import annotations

import json
from math import log

import numpy as np
import pytest

from ds_hydra.strategy import Scheme, Strategy
from ds_hydra.strategy.profiles.learned import (
    Corrections,
    LearnedTimes,
    PipelineTime,
    names_of,
)

ONE, TWO, FOUR = Scheme(1, 1), Scheme(2, 1), Scheme(4, 1)
SINGLES, PAIRS, ALL = (Strategy.parse(text) for text in ("4x<1,1>", "2x<2,1>", "1x<4,1>"))
MIXED = Strategy.parse("1x<2,1> + 2x<1,1>")


def train(learned, strategies, num, *, seed=0, noise=0.02, shared=0.0, spikes=0.0, **truth):
    """`num` iterations whose strategies take turns; `truth` are factors by what they are due to."""
    generator = np.random.default_rng(seed)
    for number in range(num):
        strategy = strategies[number % len(strategies)]
        level = truth.get("machine", 1.0) * np.exp(shared * generator.standard_normal())
        if generator.random() < spikes:
            level *= 8
        learned.observe(
            [
                PipelineTime(
                    scheme,
                    100.0,
                    100.0
                    * level
                    * truth.get("schemes", {}).get(scheme, 1.0)
                    * np.exp(noise * generator.standard_normal()),
                )
                for scheme in strategy.schemes
            ],
        )
    return learned


def test_a_machine_that_is_slower_slows_down_what_was_never_run():
    learned = train(LearnedTimes(), [SINGLES, PAIRS, MIXED], 30, machine=1.5)
    assert learned.factor(ONE) == pytest.approx(1.5, rel=0.03)
    assert learned.factor(FOUR) == pytest.approx(1.5, rel=0.15)


def test_a_profile_of_other_hardware_is_no_news_about_schemes():
    learned = train(LearnedTimes(), [PAIRS], 3, machine=1000.0)
    assert learned.factor(FOUR) / learned.factor(TWO) == pytest.approx(1.0, abs=0.25)


def test_a_scheme_is_told_from_the_machine():
    schemes = {TWO: 2.0}
    learned = train(LearnedTimes(), [SINGLES, PAIRS, ALL, MIXED], 40, schemes=schemes)
    assert learned.factor(TWO) == pytest.approx(2.0, rel=0.03)
    assert learned.factor(ONE) == pytest.approx(1.0, rel=0.03)


def test_a_disturbed_iteration_moves_little():
    learned, found = LearnedTimes(), []
    for seed in range(60):
        train(learned, [SINGLES, PAIRS], 2, spikes=0.15, seed=seed)
        found.append(learned.factor(ONE))
    assert np.median(found) == pytest.approx(1.0, abs=0.1)


def test_what_all_pipelines_have_in_common_surprises_the_machine_alone():
    learned = train(LearnedTimes(), [MIXED], 40)
    train(learned, [MIXED], 1, machine=1.6, seed=1)
    surprise = dict(zip(learned.names, learned.surprise_F, strict=True))
    assert surprise.pop("machine") > 0.5
    assert max(map(abs, surprise.values())) < 0.2


@pytest.mark.parametrize("level", [2.0, 0.5])
def test_a_new_level_is_learned_within_eight_iterations(level):
    learned = train(LearnedTimes(), [SINGLES, PAIRS], 100)
    train(learned, [SINGLES, PAIRS], 8, machine=level, seed=1)
    assert learned.factor(ONE) == pytest.approx(level, rel=0.1)


def test_what_was_seen_long_ago_is_not_forgotten():
    learned = train(LearnedTimes(), [ALL], 20, schemes={FOUR: 1.5})
    learned = train(learned, [PAIRS, ALL], 20, schemes={FOUR: 1.5})
    train(learned, [PAIRS], 200)
    ratio = learned.factor(FOUR) / learned.factor(TWO)
    assert ratio == pytest.approx(1.5, rel=0.1)


def test_of_one_strategy_that_runs_for_long_the_parts_do_not_wander_apart():
    """A machine that gets three times slower bit by bit, and is as fast as before again at once."""
    learned = train(LearnedTimes(), [PAIRS, ALL], 40, schemes={FOUR: 1.5})
    for level in np.tile(np.geomspace(1.0, 3.0, 300), 10):
        train(learned, [PAIRS], 1, machine=level)
    assert learned.factors()["machine"] == pytest.approx(3.0, rel=0.25)
    assert learned.factor(TWO) == pytest.approx(3.0, rel=0.03)
    assert learned.factor(FOUR) == pytest.approx(4.5, rel=0.25)


def test_a_checkpoint_continues_bit_by_bit_and_leaves_out_what_is_gone():
    learned = train(LearnedTimes(), [SINGLES, PAIRS, MIXED], 20, schemes={TWO: 2.0})
    state = json.loads(json.dumps(learned.state_dict()))
    again = LearnedTimes.from_state(state, state["names"])
    for one in (learned, again):
        train(one, [SINGLES, PAIRS, ALL], 10, seed=3)
    assert again.state_dict() == learned.state_dict()
    kept = names_of([ONE])
    assert kept == {"machine", "scheme <1,1>"}
    fewer = LearnedTimes.from_state(state, kept)
    assert fewer.mean("scheme <1,1>") == state["mean"][state["names"].index("scheme <1,1>")]
    assert fewer.mean("scheme <2,1>") == 0.0
    with pytest.raises(ValueError, match="names"):
        LearnedTimes.from_state({**state, "mean": [0.0]}, kept)
    with pytest.raises(ValueError, match="noise"):
        LearnedTimes.from_state({**state, "noise": [1.0]}, kept)
    with pytest.raises(ValueError, match="names"):
        LearnedTimes.from_state({**state, "names": ["scheme <1,1>", *state["names"][1:]]}, kept)
    with pytest.raises(ValueError, match="not finite"):
        LearnedTimes.from_state({**state, "noise": [float("nan"), 1.0]}, kept)


def test_a_checkpoint_from_before_anything_was_learned_is_read():
    state = json.loads(json.dumps(LearnedTimes().state_dict()))
    assert LearnedTimes.from_state(state, ()).state_dict() == state


def test_corrections_survive_json():
    corrections = Corrections(
        factors={ONE: 1.5, TWO: 0.5},
        outside_ms={MIXED: 3.0},
        slow_ranks={3: 2.0},
    )
    assert Corrections.from_json(json.loads(json.dumps(corrections.to_json()))) == corrections
    assert corrections.pipeline_factors(MIXED) == [0.5, 1.5, 3.0]
    assert corrections.pipeline_factors(SINGLES) == [1.5, 1.5, 1.5, 3.0]
    assert corrections.pipeline_factors(ALL) == [2.0]
    assert [corrections.more_outside_ms(s) for s in (MIXED, ALL)] == [3.0, 0.0]
    assert log(corrections.slowdown(())) == 0.0
