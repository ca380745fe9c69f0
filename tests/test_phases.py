"""Iterations of several phases: what the planner puts together, and that it is legal and timed."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from reference import make_batch, make_profile

from ds_hydra.errors import HydraConfigError
from ds_hydra.lab.simulator.events import simulate_plan
from ds_hydra.sampler.plan import imbalance_of
from ds_hydra.sampler.planner import iteration as iteration_module
from ds_hydra.sampler.planner import menus as menus_module
from ds_hydra.sampler.planner.group_steps import MAX_CUTS, Cuts, MixedGroups, plan_steps
from ds_hydra.sampler.planner.iteration import plan_iteration, plan_strategy, plan_with_time
from ds_hydra.sampler.planner.menus import (
    GroupMenu,
    MenuEntry,
    find_menus,
    menu_entries,
    plan_phases,
)
from ds_hydra.sampler.planner.phase_plan import PhasePlan, PlanningProblem
from ds_hydra.sampler.planner.planner_settings import PlannerSettings
from ds_hydra.sampler.propose import GroupLimits, propose_phases
from ds_hydra.sampler.sample_bench import CandidateSettings, SampleBench
from ds_hydra.strategy.profiles.learned import NO_CORRECTIONS, Corrections
from ds_hydra.strategy.profiles.profile import LinkTimes, Profile
from ds_hydra.strategy.schemes.enumeration import num_cuts
from ds_hydra.strategy.schemes.placement import groups_of, groups_of_all, slices_key
from ds_hydra.strategy.schemes.scheme import Scheme, Strategy, parse_strategies

GATHERED = parse_strategies(["4x<1,1;gather>", "2x<sp2,1;gather>", "1x<sp4,1;gather>"])
PROFILE = make_profile(
    {"<1,1;gather>": (0, 1, 0), "<sp2,1;gather>": (0, 0.55, 0), "<sp4,1;gather>": (0, 0.3, 0)}
)
SETTINGS = PlannerSettings(
    solver="none",
    max_len_override={Scheme(1, 1, sp=n, gather=True): 30 * n for n in (1, 2, 4)},
)
LONG_AND_SHORT = [100] + [25] * 16


def plan(lengths, strategies=GATHERED, settings=SETTINGS, profile=PROFILE, num_devices=4):
    return plan_with_time(
        PlanningProblem(make_batch(lengths), profile, num_devices, settings), strategies
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


def test_a_plan_has_no_more_phases_than_can_be_read(monkeypatch):
    monkeypatch.setattr(menus_module, "MAX_PHASES", 4)
    found, time_ms = plan(LONG_AND_SHORT)
    assert len(found.in_turn) == 1
    assert time_ms == pytest.approx(150)
    monkeypatch.setattr(menus_module, "MAX_PHASES", 5)
    assert len(plan(LONG_AND_SHORT)[0].in_turn) == 5


def test_one_strategy_in_lockstep_is_planned_by_its_steps():
    """T(l) = 0.005 l^2 + 0.5 l + 2, at most 49 tokens. 33 tokens take 23.945 ms, and 17 + 10 beside
    them less; a second step of 17 beside 17 takes 11.945. By slowest pipelines alone one group
    would have one micro-batch of 43 tokens, and all would wait for the other's second.
    """
    profile = make_profile({"<sp2,1;gather>": (5e-3, 0.5, 2)})
    scheme = Scheme(1, 1, sp=2, gather=True)
    settings = replace(SETTINGS, max_len_override={scheme: 49})
    found, time_ms = plan([33, 17, 17, 17, 7, 2, 1], GATHERED[1:2], settings, profile)
    assert [len(pipeline.micro_batches) for pipeline in found.pipelines] == [2, 2]
    assert time_ms == found.makespan_ms == pytest.approx(23.945 + 11.945)


def test_steps_are_valued_by_the_objective_in_use():
    """By Eq. (1) 37 and 21 take 2 x 37 on a pipeline, not 58."""
    profile = make_profile({"<sp2,1;gather>": (0, 1, 0)})
    settings = replace(
        SETTINGS, max_len_override={GATHERED[1].schemes[0]: 50}, objective="closed_form"
    )
    found, time_ms = plan([37, 21, 21, 14], GATHERED[1:2], settings, profile)
    assert time_ms == found.makespan_ms


def test_a_solver_keeps_what_is_faster_in_steps():
    """By itself the slowest pipeline had rather fewer micro-batches, for whose steps all wait."""
    profile = make_profile({"<sp2,1;gather>": (1, 0, 200)})
    settings = replace(SETTINGS, max_len_override={GATHERED[1].schemes[0]: 50})
    without, with_solver = (
        plan([26, 11, 13, 27, 23, 17], GATHERED[1:2], replace(settings, solver=solver), profile)[1]
        for solver in ("none", "cbc")
    )
    assert with_solver <= without


def test_long_micro_batches_of_all_pipelines_are_one_step():
    """Each rank has one of 30 and one of 28 or 25 tokens: longest first everywhere."""
    lengths = [30] * 4 + [28] * 2 + [25] * 2
    found, time_ms = plan(lengths, GATHERED[:1])
    steps = zip(*(pipeline.micro_batches for pipeline in found.pipelines), strict=True)
    assert [{lengths[i] for (i,) in step} for step in steps] == [{30}, {28, 25}]
    assert time_ms == pytest.approx(30 + 28)


def test_a_printed_plan_says_which_phase_is_which():
    """A bound of 0 ms would say nothing, so it is left out."""
    lines = str(plan(LONG_AND_SHORT)[0]).splitlines()
    assert lines[0].endswith(", predicted 130.0 ms")
    assert lines[2] == "  phase 1: 1x<sp4,1;gather>"
    assert lines[3].split() == ["0-3", "<sp4,1;gather>", "1", "100", "100", "30.0"]
    assert lines[4] == "  phase 2: 4x<1,1;gather>"
    assert len({len(line) for line in lines if line.startswith("  0")}) == 1
    short = str(
        plan(
            [20, 10],
            parse_strategies(["1x<1,1>"]),
            num_devices=1,
            profile=make_profile({"<1,1>": (0, 1, 0)}),
        )[0]
    )
    assert short.splitlines()[0].endswith(", predicted 30.0 ms (lower bound 30.0 ms)")
    assert "phase" not in short


def test_a_solver_is_asked_for_a_plan_of_one_strategy_and_not_for_each_phase(monkeypatch):
    solved = []
    monkeypatch.setattr(PhasePlan, "solve_slowest", lambda phase: solved.append(phase.strategy))
    assert len(plan(LONG_AND_SHORT)[0].in_turn) == 5
    assert not solved
    found, _ = plan([20, 10], GATHERED[:1])
    assert solved == [found.strategy]


@pytest.mark.parametrize(("wide", "num_ends"), [("sp4", 1), ("4", 2)])
def test_first_pull_and_last_push_are_paid_where_slices_change(wide, num_ends):
    """A long sequence on all ranks, then four phases of short ones: ten layers, a tenth of 4 + 6
    ms beside all phases, or twice where the first has other slices.
    """
    strategies = parse_strategies(["4x<1,1;gather>", f"1x<{wide},1;gather>"])
    profile = make_profile(
        {str(s.schemes[0]): (0, t, 0) for s, t in zip(strategies, (1, 0.3))}, num_layers=10
    )
    settings = replace(
        SETTINGS,
        link_times={s: LinkTimes(pull_ms=4.0, push_ms=6.0) for s in strategies},
        overlaps_links=True,
        max_len_override={s.schemes[0]: n for s, n in zip(strategies, (30, 120))},
    )
    planning = PlanningProblem(make_batch(LONG_AND_SHORT), profile, 4, settings)
    found = plan_phases(planning, strategies)
    assert len(found.phases) == 5
    assert found.time_ms == pytest.approx(130 + num_ends)


def test_menus_of_one_tp_and_without_checkpointed_layers_are_composed_alone_too(monkeypatch):
    """Steps with other slices show their pull and push, so nothing of one TP is planned as if they
    were there.
    """
    strategies = (
        *GATHERED,
        *parse_strategies(["4x<1,1;ckpt=1;gather>", "2x<2,1;ckpt=1;gather>"]),
        *parse_strategies(["4x<1,1;ckpt=2;gather>", "2x<sp2,1;ckpt=2;gather>"]),
    )
    schemes = [strategy.schemes[0] for strategy in strategies]
    profile = make_profile({str(s): (0, 1 + s.ckpt, 0) for s in schemes}, num_layers=10)
    settings = replace(SETTINGS, max_len_override=dict.fromkeys(schemes, 120))
    composed = []

    def compose(_, menus, limit_ms):
        composed.append([{(s.ckpt, s.tp) for s in menu.schemes} for menu in menus])
        return []

    monkeypatch.setattr(menus_module, "_compose", compose)
    planning = PlanningProblem(make_batch(LONG_AND_SHORT), profile, 4, settings)
    plan_phases(planning, strategies)
    assert composed[0] == [{(0, 1)}, {(1, 1), (1, 2)}, {(2, 1)}]
    assert composed[1:] == [[{(0, 1)}, {(2, 1)}], [{(0, 1)}]]
    composed.clear()
    plan_phases(planning, GATHERED)
    assert composed == [[{(0, 1)}]]


def test_checkpointed_candidates_do_not_make_phases_slower():
    """Groups with checkpointed layers hold three times the tokens and take 1.3 times as long."""
    checkpointed = tuple(Strategy.alike(replace(s.schemes[0], ckpt=1), 4) for s in GATHERED)
    times = {1: 1.0, 2: 0.55, 4: 0.3}
    schemes = [s.schemes[0] for s in (*GATHERED, *checkpointed)]
    profile = make_profile(
        {str(s): (0, times[s.sp] * (1.3 if s.ckpt else 1), 0) for s in schemes}, num_layers=10
    )
    held = {s: 30 * s.sp * (3 if s.ckpt else 1) for s in schemes}
    settings = replace(SETTINGS, max_len_override=held)
    planning = PlanningProblem(make_batch([60] * 4 + [20] * 4), profile, 4, settings)
    for strategies in (GATHERED, (*GATHERED, *checkpointed)):
        assert plan_phases(planning, strategies).time_ms == pytest.approx(88)


@settings(max_examples=30, deadline=None)
@given(st.lists(st.integers(1, 120), min_size=1, max_size=40))
def test_plans_of_phases_are_never_slower_and_simulated_as_planned(lengths):
    found, time_ms = plan(lengths)
    held = SETTINGS.max_len_override
    alone = [s for s in GATHERED if max(lengths) <= held[s.schemes[0]]]
    assert time_ms <= min(plan(lengths, [strategy])[1] for strategy in alone) + 1e-9
    simulation = simulate_plan(found, PROFILE)
    assert simulation.propagation_ms == pytest.approx(found.makespan_ms)
    assert simulation.iteration_ms == pytest.approx(found.makespan_ms)


def test_phases_are_simulated_one_after_another():
    found, _ = plan(LONG_AND_SHORT)
    links = LinkTimes(pull_ms=4.0, push_ms=6.0, step_ms=1.0)
    simulation = simulate_plan(found, PROFILE, links_of=lambda _: links, overlap=False)
    assert simulation.iteration_ms == pytest.approx(130 + 10 + 1)
    assert simulation.propagation_ms == pytest.approx(130)
    assert simulation.bubble == pytest.approx(0)


def menus_of(times, num_devices, held=lambda _: 30):
    """Menus of schemes with T of `times`, which hold `held` tokens."""
    profile = make_profile(times)
    settings = PlannerSettings(max_len_override={s: held(s) for s in profile.latency})
    planning = PlanningProblem(make_batch([]), profile, num_devices, settings)
    return find_menus(menu_entries(planning, profile.latency), num_devices)


def texts_of(menus):
    return [[str(s) for s in menu.schemes] for menu in menus]


def test_a_menu_has_one_scheme_for_each_number_of_ranks():
    wide = {"<2,1;gather>": (0, 0.7, 0), "<sp2,1;gather>": (0, 0.55, 0)}
    one, three = {"<1,1;gather>": (0, 1, 0)}, {"<3,1;gather>": (0, 1, 0)}
    assert texts_of(menus_of(wide | one, 4)) == [["<1,1;gather>", "<sp2,1;gather>"]]
    assert menus_of(wide, 4) == []  # one size
    assert menus_of(one | three, 4) == []  # does not divide the ranks
    assert menus_of(wide | one, 4, held=lambda s: 30 if s.sp > 1 else 0) == []  # one holds any


def test_a_menu_needs_no_group_that_the_candidates_lack():
    """Candidates that leave ranks idle, or have a scheme on some ranks only."""
    texts = ["<1,1>", "<sp2,1>", "<sp4,1>", "<1,1;gather>", "<sp2,1;gather>"]
    profile = make_profile(dict.fromkeys(texts, (0, 1, 0)))
    settings_ = PlannerSettings(
        solver="none", max_len_override={s: 100 * s.num_devices for s in profile.latency}
    )
    lengths = [150, 150, 140, 60, 50, 40, 30, 20, 10]
    for candidates, has_phases in (
        (["4x<1,1>", "1x<sp2,1>", "1x<sp4,1>"], False),  # whose slices stay
        (["4x<1,1;gather>", "1x<sp2,1;gather> + 2x<1,1;gather>"], True),
    ):
        strategies = parse_strategies(candidates)
        found, _ = plan(lengths, strategies, settings_, profile)
        assert groups_of(found.strategy) <= groups_of_all(strategies), str(found.strategy)
        assert bool(found.strategy.phases) <= has_phases


def test_one_menu_for_long_sequences_and_one_for_short_ones():
    """<2,1> takes less for one sequence of 30 tokens, <sp2,1> for sixteen short ones."""
    times = {
        "<1,1;gather>": (0, 1, 0), "<2,1;gather>": (0, 0.7, 0), "<sp2,1;gather>": (0.01, 0.5, 0)
    }  # fmt: skip
    assert texts_of(menus_of(times, 4)) == [
        ["<1,1;gather>", "<2,1;gather>"],
        ["<1,1;gather>", "<sp2,1;gather>"],
    ]


def test_groups_of_all_sizes_are_found_where_there_are_too_many_cuts():
    """One long sequence takes all of the second half, 64 short ones a rank each of the first."""
    schemes = [Scheme(1, 1, sp=2**k, gather=True) for k in range(8)]
    times = {str(s): (0, (1 + 0.1 * k) / s.sp, 0) for k, s in enumerate(schemes)}
    (menu,) = menus_of(times, 128, held=lambda s: 30 * s.sp)
    sizes = (1, 2, 4, 8, 16, 32, 64, 128)
    assert tuple(s.sp for s in menu.schemes) == sizes
    groups = menu.groups_of_step(128)
    assert num_cuts(128, sizes) > MAX_CUTS >= len(groups._cuts.first)
    lengths = np.array([64 * 20 * 10 // 16, *[20] * 64])
    found = groups.step(0, lengths, groups.table_ms(lengths), np.arange(65))
    assert found.counts.tolist() == [64, 0, 0, 0, 0, 0, 1, 0]
    assert found.slowest_ms == pytest.approx(20)


OF_ANY_SIZE = [Scheme(1, 1, cp=n, gather=True) for n in (1, 2, 3, 4, 5, 6, 7, 8)]


def widest_menu(num_devices, schemes=OF_ANY_SIZE):
    times = {str(s): (0, 1 / s.cp, 0) for s in schemes}
    menus = menus_of(times, num_devices, held=lambda s: 30 * s.cp)
    return max(menus, key=lambda menu: len(menu.entries))


@pytest.mark.parametrize(
    ("num_devices", "sizes"),
    [
        (6, [1, 2, 4, 6]),
        (12, [1, 2, 4, 8, 12]),
        (24, [1, 2, 4, 8, 16, 24]),
        (40, [1, 2, 4, 8, 16, 32, 40]),
        (96, [1, 2, 4, 8, 16, 32, 96]),
    ],
)
def test_ranks_that_are_no_power_of_two_have_groups_of_all_and_of_powers_of_two(num_devices, sizes):
    wide = [Scheme(1, 1, cp=n, gather=True) for n in (16, 32, num_devices) if 8 < n <= num_devices]
    menu = widest_menu(num_devices, [s for s in OF_ANY_SIZE + wide if s.cp <= num_devices])
    assert [s.cp for s in menu.schemes] == sizes
    known = groups_of_all(menu.alike(num_devices))
    groups = menu.groups_of_step(num_devices)._cuts
    assert [int(n == num_devices) for n in sizes] in groups.first.tolist()
    assert len(groups.first) <= MAX_CUTS
    for counts in groups.first[:: len(groups.first) // 200 + 1]:
        assert counts @ sizes == num_devices
        strategy = Strategy(tuple(s for s, n in zip(menu.schemes, counts) for _ in range(n)))
        assert groups_of(strategy) <= known
        assert sorted(rank for ranks in strategy.place() for rank in ranks) == [*range(num_devices)]


def test_sizes_that_do_not_divide_each_other_are_in_menus_of_their_own():
    """On 6 ranks groups of 3 are not beside groups of 2 or 4, and no size is lost to another."""
    schemes = [s for s in OF_ANY_SIZE if s.cp in (1, 2, 3, 6)]
    times = {str(s): (0, 1 / s.cp, 0) for s in schemes}
    found = menus_of(times, 6, held=lambda s: 30 * s.cp)
    assert sorted([s.cp for s in menu.schemes] for menu in found) == [[1, 2, 6], [1, 3, 6]]


def test_steps_end_with_the_last_sequence(monkeypatch):
    """Where not all are looked at together, what fills the first of two steps is all of them."""
    lengths = np.array([6, 6, 4, 4])
    pair = MixedGroups(2, [1], [10], [1.0], [lambda lengths: 0.0 * lengths], Cuts.all([[2]]))
    step = pair.step
    monkeypatch.setattr(
        pair, "step", lambda *args: step(*args) if args[3].size < lengths.size else None
    )
    (found,) = plan_steps([pair], lengths, lambda slowest: float(slowest.sum()))
    assert found.members.size == lengths.size
    assert plan_steps([pair], lengths[:0], lambda slowest: float(slowest.sum())) == []


def test_sizes_that_do_not_divide_the_ranks_are_in_no_menu():
    """Candidates proposed by older versions have groups of 3, 5, 6 and 7 of 8 ranks, too."""
    assert [s.cp for s in widest_menu(4, OF_ANY_SIZE[:4]).schemes] == [1, 2, 4]
    assert [s.cp for s in widest_menu(8).schemes] == [1, 2, 4, 8]
    strategies = parse_strategies(
        ["8x<1,1;gather>", "2x<cp3,1;gather> + 2x<1,1;gather>", "1x<cp7,1;gather> + 1x<1,1;gather>"]
    )
    profile = make_profile({str(s): (0, 1 / s.cp, 0) for s in OF_ANY_SIZE})
    settings = replace(SETTINGS, max_len_override={s: 30 * s.cp for s in OF_ANY_SIZE})
    found, time_ms = plan([200, 28], strategies, settings, profile, 8)
    assert str(found.strategy) == "1x<cp7,1;gather> + 1x<1,1;gather>", "as it is written"
    assert time_ms == pytest.approx(200 / 7)


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


def test_proposed_where_they_make_global_batches_faster():
    batches = [make_batch(LONG_AND_SHORT, iteration) for iteration in range(3)]
    settings = CandidateSettings(num_devices=4, context_length=120, planner=SETTINGS)
    bench, every = SampleBench(batches, settings.world(held_profile()), settings), GroupLimits(100)
    found = propose_phases(bench, bench.world.profile, every, (), np.full(3, 150.0))
    assert set(found.strategies) == set(GATHERED)
    assert found.times_ms == pytest.approx(130)
    assert not found.are_refused
    none = propose_phases(bench, bench.world.profile, every, (), np.full(3, 130.2))
    assert none.strategies == ()
    assert none.times_ms == pytest.approx(130.2)
    assert not none.are_refused
    refused = propose_phases(bench, bench.world.profile, GroupLimits(0), (), np.full(3, 150.0))
    assert refused.strategies == ()
    assert refused.are_refused


def test_time_outside_of_propagation_is_not_counted_for_every_phase():
    corrections = Corrections(outside_ms=dict.fromkeys(GATHERED, 50.0))
    batch = make_batch(LONG_AND_SHORT)
    planning = PlanningProblem(batch, PROFILE, 4, SETTINGS, corrections)
    assert plan_phases(planning, GATHERED).time_ms == pytest.approx(130)
    widest = plan_strategy(planning, GATHERED[2])
    assert widest.iteration_ms == pytest.approx(150 + 50)


def test_strategies_are_planned_in_the_order_of_their_bounds_until_none_can_win(monkeypatch):
    """Beside phases of 60 ms; of equal times the one with a bound."""
    slow, equal, late = GATHERED
    known, tried = {slow: (5, 90), equal: (59, 60), late: (60, 1)}, []

    def plan_strategy(_, strategy, limit_ms):
        tried.append((strategy, limit_ms))
        return SimpleNamespace(iteration_ms=known[strategy][1], solve_slowest=lambda: None)

    for name, made in {
        "plan_phases": lambda *_: SimpleNamespace(phases=[None], time_ms=60),
        "iteration_bound_ms": lambda _, strategy, limit_ms: known[strategy][0],
        "plan_strategy": plan_strategy,
        "_finish": lambda _, phases: phases[0],
    }.items():
        monkeypatch.setattr(iteration_module, name, made)
    found, time_ms = plan_with_time(None, [late, equal, slow])
    assert tried == [(slow, 60), (equal, 60)]
    assert found.iteration_ms == time_ms == 60


def test_strategies_that_need_the_same_slices_share_link_plans():
    same = ["1x<sp4,1;gather>", "2x<sp2,1;gather>", "1x<sp2,1;ckpt=1;gather> + 2x<1,1;gather>"]
    assert len({slices_key(Strategy.parse(text)) for text in same}) == 1
    others = ["1x<4,1;gather>", "2x<2,1;gather>", "1x<sp2,2,1;gather>", "2x<1,1;gather>", "4x<1,1>"]
    keys = {slices_key(Strategy.parse(text)) for text in (*others, same[0])}
    assert len(keys) == 5  # <sp2,2,1> lies as 2x<2,1>
    kept = ["4x<1,1>", "1x<sp4,1>", "1x<cp2,1> + 2x<1,1;ckpt=1>"]
    assert len({slices_key(Strategy.parse(text)) for text in kept}) == 1
    others = ["2x<2,1>", "2x<1,2>", "2x<1,1>", "1x<2,1> + 2x<1,1>"]
    assert len({slices_key(Strategy.parse(text)) for text in (*others, kept[0])}) == 5


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
        plan_iteration(make_batch([5]), strategies=[strategy], profile=PROFILE, num_devices=4)
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


def test_a_menu_pays_the_slowest_pull_and_push_of_its_schemes():
    entries = tuple(
        MenuEntry(
            scheme=strategy.schemes[0],
            latency=PROFILE.latency[strategy.schemes[0]],
            factor=1.0,
            max_len_tokens=30,
            link=LinkTimes(pull_ms=ms, push_ms=2 * ms),
        )
        for strategy, ms in zip(GATHERED, (1.0, 3.0, 2.0))
    )
    assert GroupMenu(entries).link.pull_ms == 3.0


def test_phases_wait_for_slow_ranks():
    """A step of 25 tokens on each rank takes twice as long where rank 3 does."""
    for corrections, wanted_ms in ((NO_CORRECTIONS, 25), (Corrections(slow_ranks={3: 2.0}), 50)):
        planning = PlanningProblem(make_batch([25] * 4), PROFILE, 4, SETTINGS, corrections)
        assert plan_phases(planning, GATHERED).time_ms == pytest.approx(wanted_ms)


def test_steps_are_weighed_with_the_wait_for_their_weights(monkeypatch):
    weighed = []

    def plan_nothing(_kinds, _lengths, total_ms, *_):
        weighed.append(total_ms(np.array([10.0, 50.0])))
        return []

    monkeypatch.setattr(menus_module, "plan_steps", plan_nothing)
    latency = {s: replace(t, traffic_ms=40.0) for s, t in PROFILE.latency.items()}
    travelling = replace(PROFILE, latency=latency)
    plan_phases(PlanningProblem(make_batch([20] * 4), travelling, 4, SETTINGS), GATHERED)
    assert weighed[0] == 40 + 50
