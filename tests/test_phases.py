"""Iterations of several phases: what the planner puts together, and that it is legal and timed."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from reference import make_batch, make_profile

from ds_hydra.errors import HydraConfigError
from ds_hydra.sampler.batch_planner import BatchPlanner
from ds_hydra.sampler.phases import MAX_CUTS, find_palettes
from ds_hydra.sampler.plan import IterationPlan, imbalance_of
from ds_hydra.sampler.planner import plan_with_time
from ds_hydra.sampler.planner_settings import PlannerSettings
from ds_hydra.sampler.propose_phases import PhaseSettings, propose_phases
from ds_hydra.simulator.events import simulate_plan
from ds_hydra.strategy.profiles.link_times import NO_LINKS, LinkTimes
from ds_hydra.strategy.profiles.profile import Profile
from ds_hydra.strategy.schemes.neighbours import num_cuts
from ds_hydra.strategy.schemes.placement import groups_of, groups_of_all, slices_key
from ds_hydra.strategy.schemes.scheme import Scheme, Strategy, parse_strategies

GATHERED = parse_strategies(["4x<1,1;gather>", "2x<sp2,1;gather>", "1x<sp4,1;gather>"])
PROFILE = make_profile(
    {"<1,1;gather>": (0, 1, 0), "<sp2,1;gather>": (0, 0.55, 0), "<sp4,1;gather>": (0, 0.3, 0)}
)
SETTINGS = PlannerSettings(
    solver="none",
    max_len_override={
        Scheme(1, 1, gather=True): 30,
        Scheme(1, 1, sp=2, gather=True): 60,
        Scheme(1, 1, sp=4, gather=True): 120,
    },
)
LONG_AND_SHORT = [100] + [25] * 16


def plan(lengths, strategies=GATHERED, settings=SETTINGS, profile=PROFILE, num_devices=4):
    return plan_with_time(
        make_batch(lengths),
        strategies=strategies,
        profile=profile,
        num_devices=num_devices,
        settings=settings,
    )


def test_a_long_sequence_on_all_ranks_then_short_ones_on_one_each():
    """By hand: 100 tokens on four ranks take 30 ms, a step of 25 tokens on each rank 25 ms.
    One strategy alone takes 150: the widest, which is the only one that holds 100 tokens.
    """
    found, time_ms = plan(LONG_AND_SHORT)
    assert str(found.strategy) == "1x<sp4,1;gather>" + 4 * " then 4x<1,1;gather>"
    assert found.makespan_ms == time_ms == pytest.approx(130)
    assert plan(LONG_AND_SHORT, GATHERED[2:])[1] == pytest.approx(150)
    assert found.imbalance == pytest.approx(0)
    assert [len(phase.pipelines) for phase in found.in_turn] == [1, 4, 4, 4, 4]
    assert found.in_turn[0].pipelines[0].micro_batches == ((0,),)
    assert [phase.makespan_ms for phase in found.in_turn] == pytest.approx([30, 25, 25, 25, 25])


def test_each_phase_pays_for_its_first_pull_and_its_last_push():
    """Ten layers: a tenth of 40 + 60 ms beside each of the five phases, and less where it pays."""
    links = {strategy: LinkTimes(pull_ms=40.0, push_ms=60.0) for strategy in GATHERED}
    profile = make_profile(
        {
            str(s.schemes[0]): (0, t.linear_ms, 0)
            for s, t in zip(GATHERED, PROFILE.latency.values())
        },
        num_layers=10,
    )
    settings = replace(SETTINGS, link_times=links)
    _, time_ms = plan(LONG_AND_SHORT, settings=settings, profile=profile)
    phased = BatchPlanner(make_batch(LONG_AND_SHORT), profile, 4, settings).phases_ms(GATHERED)
    assert time_ms <= phased
    assert phased >= 130 + 5 * 10


@given(st.lists(st.integers(1, 120), min_size=1, max_size=40))
def test_plans_of_phases_are_legal_and_never_slower(lengths):
    found, time_ms = plan(lengths)
    alone = [s for s in GATHERED if max(lengths) <= SETTINGS.max_len_override[s.schemes[0]]]
    assert time_ms <= min(plan(lengths, [strategy])[1] for strategy in alone) + 1e-9
    assert IterationPlan.from_json(found.to_json()) == found
    placed = [
        i for phase in found.in_turn for p in phase.pipelines for m in p.micro_batches for i in m
    ]
    assert sorted(placed) == list(range(len(lengths)))
    for pipeline in found.pipelines:
        for micro_batch in pipeline.micro_batches:
            held = SETTINGS.max_len_override[pipeline.scheme]
            assert sum(found.micro_batch_lengths(micro_batch)) <= held
    assert groups_of(found.strategy) <= groups_of_all(GATHERED)
    simulation = simulate_plan(found, PROFILE)
    assert simulation.propagation_ms == pytest.approx(found.makespan_ms)
    assert simulation.iteration_ms == pytest.approx(found.makespan_ms)
    of_rank: dict[int, list[tuple[float, float]]] = {}
    for event in simulation.timeline().events:
        for rank in simulation.runs[event.pipeline].work.ranks:
            of_rank.setdefault(rank, []).append((event.start_ms, event.end_ms))
    for spans in of_rank.values():
        assert all(b[0] >= a[1] - 1e-6 for a, b in zip(sorted(spans), sorted(spans)[1:]))


def test_phases_are_simulated_one_after_another():
    found, _ = plan(LONG_AND_SHORT)
    links = LinkTimes(pull_ms=4.0, push_ms=6.0, step_ms=1.0)
    simulation = simulate_plan(found, PROFILE, links_of=lambda _: links, overlap=False)
    assert simulation.iteration_ms == pytest.approx(130 + 5 * 10 + 1)
    assert simulation.propagation_ms == pytest.approx(130)
    assert simulation.bubble == pytest.approx(0)


def test_a_palette_has_one_scheme_for_each_number_of_ranks():
    schemes = [
        Scheme(2, 1, gather=True),
        Scheme(1, 1, sp=2, gather=True),
        Scheme(1, 1, gather=True),
    ]
    profile = make_profile(
        {str(s): (0, b, 0) for s, b in zip([*schemes, Scheme(3, 1)], (0.7, 0.55, 1, 1))}
    )

    def palettes(schemes, held=lambda *_: 30):
        return [
            [str(s) for s in palette.schemes]
            for palette in find_palettes(
                schemes, profile, 4, max_len_tokens=held, links_of=lambda _: NO_LINKS
            )
        ]

    assert palettes(schemes) == [["<1,1;gather>", "<sp2,1;gather>"]]
    assert palettes(schemes[:1] + schemes[2:]) == [["<1,1;gather>", "<2,1;gather>"]]
    assert palettes(schemes[:2]) == []  # one size
    assert palettes([Scheme(1, 1), Scheme(3, 1)]) == []  # nothing gathers
    assert palettes(schemes, held=lambda s, _: 30 if s.sp > 1 else 0) == []  # one size that holds


def test_one_palette_for_long_sequences_and_one_for_short_ones():
    """<2,1> takes less for one sequence of 30 tokens, <sp2,1> for sixteen short ones."""
    profile = make_profile(
        {"<1,1;gather>": (0, 1, 0), "<2,1;gather>": (0, 0.7, 0), "<sp2,1;gather>": (0.01, 0.5, 0)}
    )
    found = find_palettes(
        list(profile.latency), profile, 4,
        max_len_tokens=lambda *_: 30, links_of=lambda _: NO_LINKS,
    )  # fmt: skip
    assert [[str(s) for s in palette.schemes] for palette in found] == [
        ["<1,1;gather>", "<2,1;gather>"],
        ["<1,1;gather>", "<sp2,1;gather>"],
    ]


def test_the_smallest_groups_give_way_where_there_are_too_many_cuts():
    schemes = [Scheme(1, 1, sp=2**k, gather=True) for k in range(8)]
    profile = make_profile({str(s): (0, 1 / s.sp, 0) for s in schemes})
    (palette,) = find_palettes(
        schemes, profile, 128, max_len_tokens=lambda *_: 30, links_of=lambda _: NO_LINKS
    )
    assert [s.sp for s in palette.schemes] == [2, 4, 8, 16, 32, 64, 128]
    assert num_cuts(128, (2, 4, 8, 16, 32, 64, 128)) <= MAX_CUTS


def held_profile():
    """The same MaxLen out of a memory model: 30 tokens on a rank, states and layers of nothing."""
    document = PROFILE.document
    memory = {
        **document["memory"],
        "input_bytes_per_token_per_layer_per_hidden": 1e-9,
        "slice_bytes_per_layer_per_hidden2": 1e-9,
    }
    hardware = {**document["hardware"], "memory_bytes": 30.01 * 1.05}
    return Profile.from_json({**document, "memory": memory, "hardware": hardware})


def test_proposed_where_they_make_mini_batches_faster():
    batches = [make_batch(LONG_AND_SHORT, iteration) for iteration in range(3)]
    settings = PhaseSettings(
        num_devices=4, planner=SETTINGS, links_of=None, fits=lambda _: True, tolerance=0.01
    )
    found = propose_phases(held_profile(), batches, np.full(3, 150.0), settings)
    assert set(found.strategies) == set(GATHERED)
    assert found.times_ms == pytest.approx(130)
    assert not found.are_refused
    none = propose_phases(held_profile(), batches, np.full(3, 131.0), settings)
    assert none.strategies == ()
    assert none.times_ms == pytest.approx(131)
    assert not none.are_refused
    nowhere = replace(settings, fits=lambda _: False)
    refused = propose_phases(held_profile(), batches, np.full(3, 150.0), nowhere)
    assert refused.strategies == ()
    assert refused.are_refused


def test_strategies_that_need_the_same_slices_share_link_plans():
    same = ["1x<sp4,1;gather>", "2x<sp2,1;gather>", "1x<sp2,1;ckpt=1;gather> + 2x<1,1;gather>"]
    assert len({slices_key(Strategy.parse(text)) for text in same}) == 1
    others = ["1x<4,1;gather>", "2x<2,1;gather>", "1x<sp2,2,1;gather>", "2x<1,1;gather>", "4x<1,1>"]
    keys = {slices_key(Strategy.parse(text)) for text in (*others, same[0])}
    assert len(keys) == 5  # <sp2,2,1> lies as 2x<2,1>


def test_how_phases_are_written_and_where_they_are_refused():
    text = "1x<sp4,1;gather> then 2x<1,1;gather>"
    strategy = Strategy.parse(text)
    assert str(strategy) == text
    assert strategy == Strategy.parse(text) != strategy.phases[0]
    assert strategy.place() == ((0, 1, 2, 3), (0,), (1,))
    assert strategy.num_devices == 4
    assert Strategy.of_phases([strategy.phases[1]]) == Strategy.parse("2x<1,1;gather>")
    with pytest.raises(HydraConfigError, match=r"2 phases, .* list each in hydra.strategies"):
        parse_strategies([text])
    with pytest.raises(HydraConfigError, match="2 phases"):
        plan([5], [strategy])
    for wrong in (
        "then 4x<1,1>",
        "4x<1,1> then",
        "4x<1,1>then4x<1,1>",
        " then ".join(["<1,1>"] * 300),
    ):
        with pytest.raises(HydraConfigError):
            Strategy.parse(wrong)


def test_imbalance_is_that_of_ranks():
    assert imbalance_of([]) == 0.0
    assert imbalance_of([((0, 1), 3.0), ((0,), 1.0), ((1,), 1.0)]) == 0.0
