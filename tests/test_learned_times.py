"""What is learned of measured times: who is to blame, how soon, and how sure that is."""

from __future__ import annotations

import json
from math import log

import numpy as np
import pytest

from ds_hydra.strategy import Scheme, Strategy
from ds_hydra.strategy.profiles.learned import (
    Correction,
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
        level *= truth.get("beside", 1.0) ** np.log2(len(strategy.schemes))
        learned.observe(
            strategy,
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


def factor(learned, strategy, scheme):
    return learned.correction(strategy).factors[scheme]


def test_a_machine_that_is_slower_slows_down_what_was_never_run():
    learned = train(LearnedTimes(), [SINGLES, PAIRS, MIXED], 30, machine=1.5)
    assert factor(learned, SINGLES, ONE) == pytest.approx(1.5, rel=0.03)
    assert factor(learned, ALL, FOUR) == pytest.approx(1.5, rel=0.15)


def test_a_profile_of_other_hardware_is_no_news_about_schemes():
    learned = train(LearnedTimes(), [PAIRS], 3, machine=1000.0)
    assert factor(learned, ALL, FOUR) / factor(learned, PAIRS, TWO) == pytest.approx(1.0, abs=0.25)


def test_a_scheme_is_told_from_the_machine():
    schemes = {TWO: 2.0}
    learned = train(LearnedTimes(), [SINGLES, PAIRS, ALL, MIXED], 40, schemes=schemes)
    assert factor(learned, PAIRS, TWO) == pytest.approx(2.0, rel=0.03)
    assert factor(learned, SINGLES, ONE) == pytest.approx(1.0, rel=0.03)
    assert factor(learned, MIXED, TWO) / factor(learned, MIXED, ONE) == pytest.approx(2.0, rel=0.05)


def test_running_beside_others_is_told_from_schemes():
    strategies = [Strategy((ONE,) * num) for num in (1, 2, 4)]
    learned = train(LearnedTimes(), strategies, 60, beside=1.2)
    eight = Strategy((ONE,) * 8)
    assert factor(learned, eight, ONE) / factor(learned, strategies[0], ONE) == pytest.approx(
        1.2**3, rel=0.12
    )


def test_a_disturbed_iteration_moves_little():
    learned, found = LearnedTimes(), []
    for seed in range(60):
        train(learned, [SINGLES, PAIRS], 2, spikes=0.15, seed=seed)
        found.append(factor(learned, SINGLES, ONE))
    assert np.median(found) == pytest.approx(1.0, abs=0.1)


@pytest.mark.parametrize("level", [2.0, 0.5])
def test_a_new_level_is_learned_within_eight_iterations(level):
    learned = train(LearnedTimes(), [SINGLES, PAIRS], 100)
    train(learned, [SINGLES, PAIRS], 8, machine=level, seed=1)
    assert factor(learned, SINGLES, ONE) == pytest.approx(level, rel=0.1)


def follow(step, seed):
    """[50] what is known of a machine whose level walks by `step` and scatters by 5% besides, and
    the level; the last half of 100 iterations.
    """
    generator, learned = np.random.default_rng(seed), LearnedTimes()
    walk = np.cumsum(step * generator.standard_normal(100))
    known = []
    for level in walk + 0.05 * generator.standard_normal(100):
        learned.observe(SINGLES, [PipelineTime(ONE, 1.0, float(np.exp(level)))] * 4)
        known.append(log(factor(learned, SINGLES, ONE)))
    return np.array(known)[50:], walk[50:]


def test_a_machine_is_followed_at_its_own_pace():
    """Drifting as slowly as it may the factor is 0.065 off a walk, as fast as it may it scatters by
    0.04 at rest.
    """
    assert np.mean([follow(0.0, seed)[0].std() for seed in (1, 2, 3)]) < 0.033
    errors = [np.median(np.abs(np.subtract(*follow(0.1, seed)))) for seed in (1, 2, 3)]
    assert np.mean(errors) < 0.055


def test_what_was_seen_long_ago_is_not_forgotten():
    learned = train(LearnedTimes(), [ALL], 20, schemes={FOUR: 1.5})
    learned = train(learned, [PAIRS, ALL], 20, schemes={FOUR: 1.5})
    train(learned, [PAIRS], 200)
    ratio = factor(learned, ALL, FOUR) / factor(learned, PAIRS, TWO)
    assert ratio == pytest.approx(1.5, rel=0.1)


def test_of_one_strategy_that_runs_for_long_the_parts_do_not_wander_apart():
    """A machine that gets three times slower bit by bit, and is as fast as before again at once."""
    learned = train(LearnedTimes(), [PAIRS, ALL], 40, schemes={FOUR: 1.5})
    for level in np.tile(np.geomspace(1.0, 3.0, 300), 10):
        train(learned, [PAIRS], 1, machine=level)
    assert learned.factors()["machine"] == pytest.approx(3.0, rel=0.25)
    assert factor(learned, PAIRS, TWO) == pytest.approx(3.0, rel=0.03)
    assert factor(learned, ALL, FOUR) == pytest.approx(4.5, rel=0.25)


def test_a_checkpoint_continues_bit_by_bit_and_leaves_out_what_is_gone():
    learned = train(LearnedTimes(), [SINGLES, PAIRS, MIXED], 20, schemes={TWO: 2.0})
    state = json.loads(json.dumps(learned.state_dict()))
    again = LearnedTimes.from_state(state, state["names"])
    for one in (learned, again):
        train(one, [SINGLES, PAIRS, ALL], 10, seed=3)
    assert again.state_dict() == learned.state_dict()
    kept = names_of([ONE], state["names"])
    assert {"machine", "scheme <1,1>", "strategy 4x<1,1>"} <= set(kept)
    assert not any("<2,1>" in name for name in kept)
    fewer = LearnedTimes.from_state(state, kept)
    assert fewer.mean("scheme <1,1>") == state["mean"][state["names"].index("scheme <1,1>")]
    assert fewer.mean("scheme <2,1>") == 0.0
    with pytest.raises(ValueError, match="names"):
        LearnedTimes.from_state({**state, "mean": [0.0]}, kept)
    with pytest.raises(ValueError, match="not finite"):
        LearnedTimes.from_state({**state, "noise": [float("nan"), 1.0]}, kept)


def test_a_checkpoint_from_before_anything_was_learned_is_read():
    state = json.loads(json.dumps(LearnedTimes().state_dict()))
    assert LearnedTimes.from_state(state, ()).state_dict() == state


def test_a_checkpoint_keeps_what_was_learned_of_strategies_cut_anew():
    gathered = Strategy.parse("1x<2,1;gather> + 2x<1,1;gather>")
    cut = Strategy.parse("1x<sp2,1> + 2x<1,1>")
    learned = train(LearnedTimes(), [gathered, cut, MIXED], 9)
    known = [*gathered.schemes, *cut.schemes, *MIXED.schemes]
    assert names_of(known, learned.names) == learned.names
    ours = {name for name in learned.names if name.startswith("strategy")}
    assert ours == {"strategy gathered", "strategy cut", f"strategy {MIXED}"}


def test_corrections_survive_json():
    corrections = Corrections(
        strategies={MIXED: Correction(factors={ONE: 1.5, TWO: 0.5}, outside_ms=3.0)},
        slow_ranks={3: 2.0},
    )
    assert Corrections.from_json(json.loads(json.dumps(corrections.to_json()))) == corrections
    assert corrections.pipeline_factors(MIXED) == [0.5, 1.5, 3.0]
    assert corrections.pipeline_factors(SINGLES) == [1.0, 1.0, 1.0, 2.0]
    assert log(corrections.slowdown(())) == 0.0
