"""How far single micro-batches scatter, learned from what ranks computed, whatever else is off; and
the plans that know it.
"""

from __future__ import annotations

import json
import tempfile
import time

import numpy as np
import pytest
import torch.distributed as dist
from distributed import run_distributed
from engines import long_on_four_ranks, start_hydra
from models import VOCAB_SIZE, tiny
from reference import make_batch, make_plan, make_profile
from single_process import random_examples

from ds_hydra.configs.hydra_config import PlannerConfig
from ds_hydra.engine.propagation import RankOutcome
from ds_hydra.engine.telemetry.latency_tracker import LatencyTracker, StragglerFinder
from ds_hydra.engine.telemetry.trace import Recorder
from ds_hydra.records.timeline import EventKind
from ds_hydra.sampler.phase_plan import MiniBatch
from ds_hydra.sampler.planner import plan_with_time
from ds_hydra.sampler.planner_settings import PlannerSettings
from ds_hydra.strategy.profiles.learned import (
    NOTHING_TOLD,
    Corrections,
    LearnedSpread,
    MicroBatchTime,
    tally,
    told_by,
)
from ds_hydra.strategy.schemes.scheme import Scheme, parse_strategies

NUM_RANKS = 4
TIMES = {
    "<1,1>": (1e-3, 1.0, 2.0),
    "<1,1;gather>": (1e-3, 1.0, 2.0),
    "<sp2,1;gather>": (0.5e-3, 0.55, 2.0),
    "<sp4,1;gather>": (0.25e-3, 0.3, 2.0),
}
PROFILE = make_profile(TIMES, max_len=60)
_OFF = {"<1,1>": 3.0, "<1,1;gather>": 1.5, "<sp2,1;gather>": 0.5, "<sp4,1;gather>": 1.0}
WRONG = make_profile({s: tuple(_OFF[s] * t for t in of) for s, of in TIMES.items()})
OVERRIDE = {Scheme(1, 1, sp=n, gather=True): 60 * n for n in (1, 2, 4)}
OPTIONS = {"solver": "none", "max_len_override": OVERRIDE}
SETTINGS = PlannerSettings(**OPTIONS)
GATHERED = parse_strategies(["4x<1,1;gather>", "2x<sp2,1;gather>", "1x<sp4,1;gather>"])
ONE = Scheme(1, 1)
KEPT = parse_strategies(["4x<1,1>"])


def make_tracker(state=None, profile=PROFILE, strategies=GATHERED, **planner):
    config = PlannerConfig(**{"lookahead": 3} | planner)
    return LatencyTracker(profile, strategies, config, SETTINGS, StragglerFinder(), state)


def train(
    tracker,
    strategies,
    num,
    *,
    spread,
    true=PROFILE,
    drift=0.0,
    slow_rank=1.0,
    disturbed=0.0,
    num_sequences=40,
    seed=0,
):
    """`num` iterations on a machine with the times of `true`, whose micro-batches scatter by
    `spread`, each for all ranks of its group alike, whose level moves by `drift` from one iteration
    to the next, which has a slow rank, and of whose micro-batches `disturbed` take three times as
    long.
    """
    draw = np.random.default_rng(seed)
    for iteration in range(num):
        lengths = np.random.default_rng(iteration).integers(5, 60, num_sequences).tolist()
        is_long = strategies is GATHERED and num_sequences == 40
        lengths = [200, *lengths] if is_long else lengths
        plan = make_plan(lengths, strategies, PROFILE, NUM_RANKS, iteration=iteration, **OPTIONS)
        level = np.exp(drift * draw.standard_normal())
        of_ranks = [{} for _ in range(NUM_RANKS)]
        measured_ms = []
        for number, phase in enumerate(plan.in_turn):
            for pipeline in phase.pipelines:
                slow = slow_rank if 3 in pipeline.ranks else 1.0
                total = 0.0
                for index, micro_batch in enumerate(pipeline.micro_batches):
                    lengths = plan.micro_batch_lengths(micro_batch)
                    ms = true.latency[pipeline.scheme].micro_batch_ms(lengths) * level * slow
                    ms *= np.exp(spread * draw.standard_normal())
                    ms *= 3.0 if draw.random() < disturbed else 1.0
                    total += ms
                    for rank in pipeline.ranks:
                        of_ranks[rank][number, index] = ms
                measured_ms.append(total)
        told = [tracker.tell_spread(plan, rank, ms) for rank, ms in enumerate(of_ranks)]
        tracker.observe(plan, measured_ms, sum(measured_ms), told)
    return tracker


@pytest.mark.parametrize("strategies", [GATHERED, KEPT])
@pytest.mark.parametrize("spread", [0.0, 0.05, 0.1])
def test_a_spread_is_recovered_within_a_tenth(spread, strategies):
    """Beside a machine that drifts, a slow rank, schemes that the profile has wrong, and one
    micro-batch in fifty that is disturbed.
    """
    tracker = make_tracker(strategies=strategies)
    beside = {"drift": 0.3, "slow_rank": 1.5, "disturbed": 0.02, "true": WRONG}
    train(tracker, strategies, 60, spread=spread, **beside)
    assert tracker.spread.value == pytest.approx(spread, rel=0.1, abs=0.001)
    known = tracker.corrections_now(strategies).micro_batch_spread
    assert known == tracker.spread.value


@pytest.mark.parametrize(("strategies", "num_sequences"), [(GATHERED[:1], 4), (KEPT, 8)])
@pytest.mark.parametrize("spread", [0.0, 0.05, 0.1])
def test_it_is_within_a_quarter_where_ranks_have_one_to_three_micro_batches(
    spread, strategies, num_sequences
):
    """Of four ranks, beside the same: they are compared with each other and the iteration before;
    about 190 comparisons of which four share a disturbed micro-batch.
    """
    tracker = make_tracker(strategies=strategies)
    beside = {"drift": 0.3, "slow_rank": 1.5, "disturbed": 0.01, "true": WRONG}
    train(tracker, strategies, 200, spread=spread, num_sequences=num_sequences, **beside)
    assert tracker.spread.before
    assert tracker.spread.value == pytest.approx(spread, rel=0.25, abs=0.001)


def test_ranks_of_one_pipeline_tell_once_and_other_schemes_are_not_compared():
    tracker = make_tracker(strategies=GATHERED[1:])
    train(tracker, GATHERED[1:2], 3, spread=0.1, num_sequences=2)
    assert [*tracker.spread.before[-1]] == [0, 2]
    assert sum(tracker.spread.counts) == pytest.approx(1)  # the first iteration does not count
    train(tracker, GATHERED[2:], 1, spread=0.1, num_sequences=2)
    assert [*tracker.spread.before[-1]] == [0]
    assert sum(tracker.spread.counts) == pytest.approx(1)
    train(tracker, GATHERED[1:2], 1, spread=0.1, num_sequences=2)
    assert sum(tracker.spread.counts) == pytest.approx(2, abs=0.05)  # with the one before
    assert len(tracker.spread.before) == 4


def test_a_profile_that_is_wrong_for_long_sequences_is_no_spread():
    """Hardly: between the shortest and the longest it is off by a third, between neighbours by a
    tenth of that, although a rank has few micro-batches.
    """
    true = make_profile({**TIMES, "<1,1>": (8e-3, 1.0, 2.0)}, max_len=60)
    off = [
        true.latency[ONE].micro_batch_ms([n]) / PROFILE.latency[ONE].micro_batch_ms([n])
        for n in (5, 59)
    ]
    assert off[1] > 1.3 * off[0]
    tracker = train(make_tracker(strategies=KEPT), KEPT, 60, spread=0.0, true=true)
    assert tracker.spread.value < 0.04
    tracker = train(make_tracker(strategies=KEPT), KEPT, 60, spread=0.05, true=true)
    assert 0.045 < tracker.spread.value < 0.065


def test_what_a_pull_and_a_push_run_beside_is_not_counted():
    """The first and the last micro-batch of slices that stay; of gathered layers all count."""
    for strategies, num_left_out in ((KEPT, 2), (GATHERED, 0)):
        lengths = [200, *[25] * 80] if strategies is GATHERED else [25] * 80
        plan = make_plan(lengths, strategies, PROFILE, NUM_RANKS, **OPTIONS)
        tracker = make_tracker(strategies=strategies)
        own = plan.on_rank(0)
        places = [(n, m) for n, phase in enumerate(own) for m in range(len(phase.micro_batches))]
        schemes = {phase.role.scheme for phase in own if phase.micro_batches}
        told = tracker.tell_spread(plan, 0, dict.fromkeys(places, 1.0))
        counted = sum(told[: len(tracker.spread.counts)])
        alike = len(places) - num_left_out - len(schemes)
        assert 0 < alike - 1 <= counted <= alike


def test_nothing_is_known_before_enough_was_seen_and_too_much_is_capped():
    learned = LearnedSpread()

    def tell(num):
        times = [5.0 * np.exp(0.1 * (n % 2)) for n in range(num + 1)]
        return told_by([MicroBatchTime(ONE, 10, 5.0, ms) for ms in times], [ONE])

    for _ in range(4):
        learned.observe([tell(4), tell(6)])
        assert learned.value == 0.0
    learned.observe([tell(20), NOTHING_TOLD])
    assert learned.value == pytest.approx(0.1 / 0.954, rel=0.2)
    for difference in (0.7, 9.0, float("inf")):
        loud = LearnedSpread(tally([difference] * 100))
        assert loud.value == 0.3
    before = list(learned.counts)
    learned.observe([NOTHING_TOLD] * 2)
    assert learned.counts == before, "an iteration without differences forgets nothing"


def test_a_machine_that_becomes_quiet_is_believed_after_some_iterations():
    tracker = train(make_tracker(), GATHERED, 60, spread=0.15)
    assert tracker.spread.value > 0.12
    train(tracker, GATHERED, 150, spread=0.03)
    assert tracker.spread.value == pytest.approx(0.03, rel=0.3)


def test_a_learned_spread_makes_steps_of_fewer_groups():
    """As the spread that `test_phases` gives by hand; with `refit` "log" nothing is counted."""
    batch = make_batch([25] * 4)
    profile = make_profile(
        {"<1,1;gather>": (0, 1, 0), "<sp2,1;gather>": (0, 0.55, 0), "<sp4,1;gather>": (0, 0.3, 0)}
    )

    def planned(tracker):
        known = tracker.corrections_now(GATHERED)
        return plan_with_time(MiniBatch(batch, profile, NUM_RANKS, SETTINGS, known), GATHERED)[0]

    quiet, loud = (
        train(make_tracker(profile=PROFILE), GATHERED, 30, spread=spread) for spread in (0.0, 0.25)
    )
    assert str(planned(quiet).strategy) == "4x<1,1;gather>"
    assert str(planned(loud).strategy) == "1x<sp4,1;gather>"
    logs = train(make_tracker(refit="log"), GATHERED, 100, spread=0.25)
    assert logs.spread.value == pytest.approx(0.25, rel=0.1)
    assert logs.corrections_now(GATHERED).micro_batch_spread == 0.0


@pytest.mark.parametrize("strategies", [GATHERED, KEPT])
def test_plans_for_the_largest_spread_are_legal_equal_and_as_long_as_without_at_least(strategies):
    for seed in range(20):
        lengths = np.random.default_rng(seed).integers(1, 60, 1 + 2 * seed).tolist()
        batch = make_batch(lengths)
        times = []
        for spread in (0.0, 0.3):
            known = Corrections(micro_batch_spread=spread)
            mini_batch = MiniBatch(batch, PROFILE, NUM_RANKS, SETTINGS, known)
            plan, time_ms = plan_with_time(mini_batch, strategies)
            assert plan == plan_with_time(mini_batch, strategies)[0]
            assert sorted(plan.lengths) == sorted(lengths)
            times.append(time_ms)
        assert times[1] >= times[0] * (1 - 1e-2)  # heuristics both


def test_ranks_that_share_cores_count_no_spread():
    document = PROFILE.document
    hardware = {**document["hardware"], "ranks_per_core": 2.0}
    shared = type(PROFILE).from_json({**document, "hardware": hardware})
    tracker = train(make_tracker(profile=shared), GATHERED, 30, spread=0.1)
    assert tracker.spread.value == pytest.approx(0.1, rel=0.15)
    assert tracker.corrections_now(GATHERED).micro_batch_spread == 0.0


def test_a_checkpoint_keeps_it_and_one_without_it_or_damaged_is_read(caplog):
    tracker = train(make_tracker(), GATHERED, 30, spread=0.1)
    state = json.loads(json.dumps(tracker.state_dict()))
    assert make_tracker(state).spread.value == tracker.spread.value > 0
    compared = train(
        make_tracker(strategies=GATHERED[:1]), GATHERED[:1], 3, spread=0.1, num_sequences=4
    )
    assert compared.spread.before
    continued = make_tracker(compared.state_dict(), strategies=GATHERED)
    assert not continued.spread.before, "schemes and ranks may have other numbers now"
    assert continued.spread.counts == compared.spread.counts
    older = {key: value for key, value in state.items() if key != "spread"}
    assert make_tracker(older).spread.value == 0.0
    assert make_tracker(older).learned.names == tracker.learned.names
    assert not caplog.records
    counts = state["spread"]["counts"]
    for damaged in (
        {"counts": [1.0]},
        {"counts": [float("nan")] * len(counts)},
        {"counts": [-1.0, *counts[1:]]},
        None,
    ):
        assert make_tracker({**state, "spread": damaged}).spread.value == 0.0
    assert [record.message.count("is ignored") for record in caplog.records] == [1] * 4


def test_what_a_pass_waited_for_is_not_computation():
    recorder = Recorder()
    zero = recorder._zero
    for phase, kind, index, start, end in (
        (0, EventKind.FORWARD, 0, 0.0, 0.010),
        (0, EventKind.BACKWARD, 0, 0.010, 0.030),
        (1, EventKind.FORWARD, 0, 0.040, 0.050),
    ):
        recorder.add(kind, zero + start, zero + end, phase, index)
    recorder.add(EventKind.PULL, zero, zero + 0.045, 0)
    for start, end in ((0.001, 0.004), (0.010, 0.011), (0.028, 0.029), (0.030, 0.040)):
        recorder.add_wait(zero + start, zero + end)
    assert recorder.computed_ms() == {
        (0, 0): pytest.approx(25.0),
        (1, 0): pytest.approx(10.0),
    }
    # Waits before a pass, as for the first layer of a home, are none of its time either way.
    outcome = RankOutcome.of_phases([], recorder.computed_ms())
    assert outcome.busy_ms == pytest.approx(35.0)
    recorder.begin()
    assert recorder.computed_ms() == {}


def spreads_of_an_engine():
    """Two ranks that gather together, of which the second has passes that scatter by 0.3: what
    either counted of itself, and what both know after each iteration.
    """
    rank = dist.get_rank()
    document = long_on_four_ranks(gather=True)  # 40 tokens fit
    document["schemes"] = document["schemes"][:1]
    with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
        json.dump(document, file)
        file.flush()
        hydra = {
            "profile": file.name,
            "strategies": ["2x<1,1;gather>"],
            "planner": {"lookahead": 1, "refit": "plan"},
        }
        engine = start_hydra(tiny("llama"), hydra=hydra)
    model, draw = engine.hydra.stage_model, np.random.default_rng(1)
    tracker, forward, counts = engine.hydra.candidates.track(), model.forward_stage, []
    tell = tracker.tell_spread

    def scattering(*args, **kwargs):
        time.sleep(0.1 * float(np.exp(0.3 * draw.standard_normal() if rank else 0.0)))
        return forward(*args, **kwargs)

    def keep(*args):
        told = tell(*args)
        counts.append(told[: len(tracker.spread.counts)])
        return told

    model.forward_stage, tracker.tell_spread = scattering, keep
    known = []
    for _ in range(4):
        engine.train_batch(batch=random_examples([40] * 24, VOCAB_SIZE, seed=1))
        known.append(engine.last_metrics.micro_batch_spread)
    now = tracker.spread.value
    used = tracker.corrections_now(engine.hydra.candidates.strategies).micro_batch_spread
    engine.destroy()
    return LearnedSpread([5 * sum(of_bin) for of_bin in zip(*counts)]).value, known, now, used


@pytest.mark.distributed
def test_an_engine_learns_it_from_computation_alone():
    """Each of two ranks waits for the other in every layer, and is not taken for the other."""
    (quiet, known, now, used), (loud, *others) = run_distributed(spreads_of_an_engine, 2)
    assert others == [known, now, used], "both ranks know the same"
    assert known == [0.0] * 4, "of 66 differences, those of the first iteration left out"
    assert quiet < loud / 2
    assert 0 < used == now < loud
