"""Systems of today in the simulator: against sums done by hand, and what each must never be."""

from __future__ import annotations

import dataclasses
from functools import partial
from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from reference import make_batch
from test_cluster import make_cluster
from test_simulator import checkpointing_document, make_scenario, small_profile

from ds_hydra.lab.simulator.cases import draw_batches, load_case
from ds_hydra.lab.simulator.fixed_length import pack_evenly
from ds_hydra.lab.simulator.mixed_groups import ContextParallel, fcp, flexsp
from ds_hydra.lab.simulator.scenario import PARTIAL, Scenario
from ds_hydra.lab.simulator.systems import (
    SYSTEMS,
    Settings,
    fixed_length,
    megatron_choices,
)
from ds_hydra.lab.simulator.ulysses import (
    LAYER_INPUT_BYTES,
    _rank_bytes,
    balanced_ulysses,
    packed_zero3,
    rank_tokens,
    recomputed,
    sharded_groups,
    sharded_ms,
)
from ds_hydra.sampler.planner.group_steps import (
    Cuts,
    MixedGroups,
    cut_for_deadline,
    find_cuts,
    plan_steps,
    sizes_used,
    solve_step,
)
from ds_hydra.strategy.cost_models.analytic import key_values_ms
from ds_hydra.strategy.cost_models.cluster import find_cluster
from ds_hydra.strategy.cost_models.costs import Costs
from ds_hydra.strategy.cost_models.estimate import estimate_from_config
from ds_hydra.strategy.profiles.profile import Profile
from ds_hydra.strategy.schemes.enumeration import cuts
from ds_hydra.strategy.schemes.scheme import Scheme, Strategy

BATCHES = [np.random.default_rng(i).integers(1, 100, 30).tolist() for i in range(4)]


def test_a_half_empty_micro_batch_is_spread():
    """Micro-batches of 10: {6, 4}, {5, 3}; two pipelines get 9 tokens each in place of 10 and 8."""
    lengths = np.array([6, 5, 4, 3])
    placed = pack_evenly(lengths, 10, 2)
    assert [[lengths[m].tolist() for m in own] for own in placed] == [[[6, 3]], [[5, 4]]]
    placed = pack_evenly(np.array([7, 7, 7, 3]), 10, 2)  # three micro-batches would be 2 and 1
    assert [len(own) for own in placed] == [2, 2]


def _solve(known, tried, found):
    """The best cut and the group of each sequence; writes times to `found`."""
    group_of = np.zeros(known[0].size, dtype=np.int64)
    more = *sizes_used(tried), 16, np.inf
    return solve_step(*known, tried, *more, found, group_of), group_of.tolist()


def test_no_cut_is_left_that_would_have_been_the_best():
    """All cuts at once, each left as soon as it cannot win, against each cut to its end."""
    rng, sizes = np.random.default_rng(1), (1, 2, 3, 4, 8)
    max_len, tried = np.array([40, 90, 140, 200, 420]), np.array(cuts(16, sizes))
    for _ in range(30):
        lengths = np.sort(rng.lognormal(2.5, 0.9, 25).clip(2, 390).astype(np.int64))[::-1].copy()
        costs = 1 + rng.uniform(0.0, 0.3, len(sizes)).cumsum()
        table = np.array([(1e-2 * lengths**2 + lengths) * c / n for n, c in zip(sizes, costs)])
        constants = rng.uniform(0.0, 30.0, len(sizes))
        known = lengths, table, constants, np.array(sizes), max_len
        solve = partial(_solve, known)
        times = np.full((len(tried) + 1, 2), np.inf)
        alone = [solve(tried[[n]], times[n]) for n in range(len(tried))]
        cut, group_of = solve(tried, times[-1])
        assert times[-1, 0] == times[:-1, 0].min() < np.inf
        assert group_of == alone[cut][1]
        assert times[cut].tolist() == times[-1].tolist()


def test_mixed_groups_find_the_best_of_small_steps():
    """Against every cut and every placement of sequences in its groups."""
    rng = np.random.default_rng(0)
    sizes, max_len, constants = (1, 2, 4), np.array([60, 120, 240]), np.array([2.0, 3.0, 4.0])
    for _ in range(10):
        lengths = np.sort(rng.integers(5, 55, 5))[::-1].copy()
        table = np.array([(1e-2 * lengths**2 + lengths) / size for size in sizes])
        found, group_of = np.zeros(2), np.zeros(5, dtype=np.int64)
        tried = np.array(cuts(4, sizes))
        cut = solve_step(
            lengths,
            table,
            constants,
            np.array(sizes),
            max_len,
            tried,
            *sizes_used(tried),
            4,
            np.inf,
            found,
            group_of,
        )
        kinds = np.repeat(np.arange(3), tried[cut])
        ends = constants[kinds].copy()
        np.add.at(ends, group_of, table[kinds[group_of], np.arange(5)])
        assert found[0] == pytest.approx(ends[np.unique(group_of)].max())
        assert (np.bincount(group_of, lengths, kinds.size) <= max_len[kinds]).all()
        best = np.inf
        for counts in tried:
            kinds = np.repeat(np.arange(3), counts)
            for placed in product(range(kinds.size), repeat=5):
                ends = constants[kinds].copy()
                filled = np.zeros(kinds.size)
                for i, g in enumerate(placed):
                    ends[g] += table[kinds[g], i]
                    filled[g] += lengths[i]
                if (filled <= max_len[kinds]).all():
                    best = min(best, ends[filled > 0].max())
        assert best - 1e-9 <= found[0] <= 1.2 * best


@settings(deadline=None, max_examples=60)
@given(
    lengths=st.lists(st.integers(1, 120), min_size=1, max_size=25),
    num_ranks=st.sampled_from([4, 6, 8]),
    terms=st.sampled_from([(0.01, 1.0), (0.0, 1.0), (0.0, 0.0), (1.0, 0.0)]),
    constants=st.sampled_from([(0.0, 0.0, 0.0), (1.0, 3.0, 40.0)]),
)
def test_steps_are_legal_and_recomputable(lengths, num_ranks, terms, constants):
    """Every sequence once, no group above its MaxLen, no more groups than ranks, and the times."""
    sizes, held, constant_ms = np.array([1, 2, 4]), np.array([30, 60, 120]), np.array(constants)
    own = np.array(sorted(lengths, reverse=True))
    times = [lambda l, n=n: (terms[0] * l * l + terms[1] * l) / n for n in sizes]
    groups = MixedGroups(num_ranks, sizes, held, constant_ms, times)
    table = groups.table_ms(own)
    steps = plan_steps([groups], own, lambda slowest: float(slowest.sum()))
    assert sorted(i for step in steps for i in step.members) == list(range(own.size))
    for step in steps:
        kinds = np.repeat(np.arange(3), step.counts)
        assert step.counts @ sizes <= num_ranks
        assert (np.bincount(step.group_of, own[step.members], kinds.size) <= held[kinds]).all()
        ends = constant_ms[kinds]
        np.add.at(ends, step.group_of, table[kinds[step.group_of], step.members])
        used = np.unique(step.group_of)
        assert step.slowest_ms == pytest.approx(ends[used].max())
        assert step.device_ms == pytest.approx((ends * sizes[kinds])[used].sum())


def test_one_step_is_looked_for_once_and_steps_that_hold_too_little_in_strides(monkeypatch):
    """66 and 100 tokens share no group of 128, so that 200 steps are found where 131 hold the
    tokens: 69 numbers of steps between, and four shares of each.
    """
    tried = []
    step = MixedGroups.step
    monkeypatch.setattr(
        MixedGroups, "step", lambda *args: [tried.append(args[4].size), step(*args)][1]
    )
    times = [lambda lengths: lengths.astype(float), lambda lengths: lengths / 2]
    pair = MixedGroups(2, [1, 2], [128, 256], [1.0, 1.0], times)
    plan_steps([pair], np.array([60, 50, 40]), lambda slowest: float(slowest.sum()))
    assert tried == [3]
    tried.clear()
    lengths = np.array([100] * 200 + [66] * 200)
    assert len(plan_steps([pair], lengths, lambda slowest: float(slowest.sum()))) == 200
    assert len(tried) < 6000  # 13,441 one by one


def test_sequences_change_places_in_a_step():
    """8, 7, 6, 5, 4 on two groups: longest first to the earliest group ends at 17, best is 15."""
    lengths = np.array([8, 7, 6, 5, 4])
    pair = MixedGroups(2, [1], [100], [0.0], [lambda lengths: lengths.astype(float)])
    (step,) = plan_steps([pair], lengths, lambda slowest: float(slowest.sum()))
    sums = np.bincount(step.group_of, weights=lengths[step.members])
    assert step.slowest_ms == sums.max() == 15
    assert step.device_ms == lengths.sum()


def test_what_ends_before_the_slowest_group_and_has_room_fills_a_step():
    """50 on two ranks takes 25 ms, and leaves two single ranks of 30 tokens, one with 20 already:
    of 26, 20, 9 and 4 that are left 20 goes to the empty one, 9 beside it would end at 29, and 4
    goes to the one that ends last.
    """
    lengths = np.array([50, 26, 20, 20, 9, 4])
    table = [lambda lengths: 1.0 * lengths, lambda lengths: 0.5 * lengths]
    groups = MixedGroups(4, [1, 2], [30, 60], [0.0, 0.0], table, cuts=Cuts.all([[2, 1]]))
    costs = groups.table_ms(lengths)
    step = groups.step(0, lengths, costs, np.array([0, 2]))
    assert step.slowest_ms == 25
    filled = groups.filled(lengths, costs, step, np.arange(6))
    assert filled.members.tolist() == [0, 2, 3, 5]
    assert filled.slowest_ms == 25
    assert filled.device_ms == 2 * 25 + 20 + 20 + 4
    assert np.bincount(filled.group_of, lengths[filled.members]).tolist() in (
        [20, 24, 50],
        [24, 20, 50],
    )
    little = MixedGroups(4, [1, 2], [23, 60], [0.0, 0.0], table, cuts=Cuts.all([[2, 1]]))
    assert little.filled(lengths, costs, step, np.arange(6)).members.tolist() == [0, 2, 3]


def test_short_sequences_run_beside_the_long_one_that_a_step_waits_for(monkeypatch):
    """Of a global batch with one sequence of up to 128K wide groups need long attention to hide
    their exchanges: ranks are busy in all steps, and without what fills them steps take longer.
    """
    workload = load_case("bytescale/github-7b").workload
    sizes = [2**k for k in range(7)]

    def sequences_ms(size):
        exchanged_ms = 0.012 if size > 8 else 0.003 if size > 1 else 0.0
        return lambda lengths: (
            lengths * (0.072 / size + np.maximum(1.7e-6 * lengths / size, exchanged_ms))
        )

    batches = draw_batches(workload.histogram, workload.tokens_per_iteration, 3, seed=1)
    global_batches = [np.sort(batch.lengths)[::-1].copy() for batch in batches]

    def plan():
        groups = MixedGroups(
            64, sizes, [14_000 * s for s in sizes], [20.0] * 7, [sequences_ms(s) for s in sizes]
        )
        plans = [
            plan_steps([groups], lengths, lambda slowest: float(slowest.sum()))
            for lengths in global_batches
        ]
        for lengths, steps in zip(global_batches, plans, strict=True):
            assert sorted(i for s in steps for i in s.members) == list(range(lengths.size))
        steps = [step for steps in plans for step in steps]
        return sum(s.slowest_ms for s in steps), sum(s.device_ms for s in steps) / 64

    total_ms, busy_ms = plan()
    assert busy_ms > 0.97 * total_ms
    monkeypatch.setattr(MixedGroups, "filled", lambda self, lengths, table, step, left: step)
    assert plan()[0] > 1.01 * total_ms


def test_no_exchange_fills_a_group_above_its_max_len():
    """40 and 20 beside 30, which takes 115 ms on its group; with the others it would add 9."""
    lengths = np.array([40, 30, 20])
    sequences_ms = [lambda lengths: 0.1 * lengths, lambda lengths: 0.5 * lengths]
    groups = MixedGroups(2, [1, 1], [60, 60], [1.0, 100.0], sequences_ms, cuts=Cuts.all([[1, 1]]))
    table = groups.table_ms(lengths)
    placed = groups.step(0, lengths, table, np.arange(3))
    improved = groups.improved(lengths, table, placed)
    assert improved.group_of.tolist() == [0, 1, 0]
    assert (improved.slowest_ms, improved.device_ms) == (115, 7 + 115)


@pytest.mark.parametrize("most", [4000, 1])
def test_groups_of_three_ranks_end_before_those_of_powers_of_two(most):
    """Two sequences of 60 on 6 ranks: 3 + 3, of all cuts, or exchanged for 4 + 2."""
    sizes = [1, 2, 3, 4]
    table = [lambda lengths, size=size: lengths / size for size in sizes]
    tried = find_cuts(6, tuple(sizes), anywhere=True, most=most)
    groups = MixedGroups(6, sizes, [100 * size for size in sizes], [0.0] * 4, table, cuts=tried)
    lengths = np.array([60, 60])
    found = groups.step(0, lengths, groups.table_ms(lengths), np.arange(2))
    assert found.slowest_ms == pytest.approx(20)
    assert found.counts.tolist() == [0, 0, 2, 0]


def test_groups_that_meet_a_deadline_are_no_more_than_there_are_ranks():
    """Three sequences of 8: on 4 ranks they take 2 ms, on 2 of 8 ranks 4; two of four ranks are one
    group more.
    """
    lengths, sizes = np.array([8, 8, 8]), np.array([1, 2, 4])
    known = lengths / sizes[:, None], np.zeros(3), sizes, np.array([100, 100, 100])
    for deadline, num_ranks, wanted in ((2, 8, None), (2, 12, [0, 0, 3]), (4, 8, [0, 4, 0])):
        counts = np.zeros(3, dtype=np.int64)
        is_met = cut_for_deadline(lengths, *known, deadline, num_ranks, counts)
        assert is_met == (wanted is not None)
        assert not is_met or counts.tolist() == wanted


def test_groups_of_their_own_are_no_slower_than_alike_ones():
    """FCP's groups have all sizes of FlexSP's, and attention of the ring costs no more without
    interconnects.
    """
    scenario = make_scenario(*BATCHES)
    ring_ms, mixed_ms = (run(scenario, name="a").iteration_ms.mean() for run in (fcp, flexsp))
    assert ring_ms <= 1.001 * mixed_ms
    assert mixed_ms <= 1.02 * balanced_ulysses(scenario, name="b").iteration_ms.mean()


def test_the_rank_with_most_heads_decides_about_attention():
    """Of 3 heads two ranks have 2 and 1: a l^2 of 2/3, where the rest is halved."""
    scenario = make_scenario([100])
    pair = next(g for g in sharded_groups(scenario, [0.0]) if g.size == 2)
    lengths = np.array([100])
    even = pair.latency.micro_batch_ms(lengths)
    uneven = dataclasses.replace(pair, num_heads=3).latency.micro_batch_ms(lengths)
    attention = pair.single.quadratic_ms * 100**2
    assert uneven - even == pytest.approx(attention * (2 / 3 - 1 / 2))


def test_exchanges_that_flexsp_hides_are_priced_as_ours():
    """T of groups of any degree is that of <spN,1;gather>, and no global batch takes longer."""
    workload = load_case("paper/github-7b-16gpu-f2").workload
    linked = workload.linked_by(find_cluster(workload.profile, workload.num_devices))
    scenario = Settings(iterations=3).scenario(linked)
    for group in sharded_groups(scenario, [0.0, 1.0], hides_exchanges=True):
        own = scenario.costs.latency(Scheme(1, 1, sp=group.size, gather=True))
        own = recomputed(own, group.checkpointed)
        for lengths in ([300], [32768], [100, 20000, 4096]):
            assert group.latency.micro_batch_ms(lengths) == pytest.approx(own.computed_ms(lengths))
    seen, hidden = (flexsp(scenario, name="a", hides_exchanges=h) for h in (False, True))
    assert (hidden.iteration_ms < seen.iteration_ms).all()


def test_some_layers_are_computed_again():
    """Time grows with their share, and so do the tokens that a rank holds."""
    scenario = make_scenario([100]).knowing(Profile.from_json(checkpointing_document()))
    groups = [g for g in sharded_groups(scenario, PARTIAL) if g.size == 1]
    assert [g.checkpointed for g in groups] == list(PARTIAL)
    times = [g.latency.micro_batch_ms(np.array([50])) for g in groups]
    attention_ms = groups[0].latency.quadratic_ms * 50**2
    again_ms = [*(times[0] - attention_ms for _ in PARTIAL[:-1]), times[0]]
    wanted = [times[0] + share / 3 * more for share, more in zip(PARTIAL, again_ms)]
    assert times == pytest.approx(wanted)
    _, each = _rank_bytes(scenario, 1.0, exchanges=False)
    memory = scenario.profile.memory
    # One layer is whole in backward, of four 2 bytes are kept
    assert each == memory.hidden_size * (memory.activation_bytes[1] + 4 * LAYER_INPUT_BYTES)
    held = [g.max_len for g in groups]
    assert held[1:] == sorted(held[1:])
    assert held[0] < held[-1]


def test_plain_zero3_has_no_groups_and_no_balance():
    short = [[length for length in batch if length <= 50] for batch in BATCHES]
    scenario = make_scenario(*short, context=50)
    plain = packed_zero3(scenario, name="a")
    assert "SP1" in plain.strategy
    by_time = balanced_ulysses(scenario, name="b").iteration_ms.mean()
    assert by_time <= plain.iteration_ms.mean()
    assert packed_zero3(make_scenario([900], context=900), name="c") is None


def test_flexsp_checkpoints_as_much_as_each_global_batch_needs():
    """Not as much as the context would: Ulysses, whose groups are alike, chooses so, too."""
    workload = load_case("flexsp/commoncrawl-7b-384k").workload
    linked = workload.linked_by(find_cluster(workload.profile, workload.num_devices))
    scenario = Settings(iterations=2).scenario(linked)
    alike = balanced_ulysses(scenario, name="a", chooses_degree=True).iteration_ms.mean()
    assert flexsp(scenario, name="b").iteration_ms.mean() <= 1.06 * alike


def test_megatron_recomputes_layers_of_a_mixture_and_shares_its_experts():
    profile, _ = estimate_from_config("qwen3_30b_a3b", "h100", 16, 32768)
    batch = make_batch([32768, 9000, 5000, 3000, 2000, 1000] * 4)
    scenario = Scenario(
        costs=Costs.of(profile, 16), num_devices=16, context_length=32768, batches=(batch,)
    )
    _, choices = megatron_choices(scenario)
    assert set(choices) > set(scenario.statics())
    schemes = [strategy.schemes[0] for strategy in choices]
    assert any(scheme.ckpt for scheme in schemes)
    assert any(scheme.ep > 1 for scheme in schemes)
    plain = fixed_length(scenario, scenario.statics(), name="a").iteration_ms[0]
    assert fixed_length(scenario, name="b").iteration_ms[0] < plain


def scenario_of(model, num_devices, context):
    profile, _ = estimate_from_config(model, "h100", num_devices, context)
    world = Costs.of(profile, num_devices)
    batches = (make_batch([context, 1000]),)
    return Scenario(costs=world, num_devices=num_devices, context_length=context, batches=batches)


@pytest.mark.parametrize(
    ("model", "num_devices", "context"),
    [("llama3_1_70b", 64, 2**17), ("llama2_7b", 8, 2**17), ("llama2_7b", 4, 2**19)],
)
def test_a_system_runs_where_one_of_its_shares_of_a_sequence_fits(model, num_devices, context):
    scenario = scenario_of(model, num_devices, context)
    heads = scenario.profile.memory.num_heads
    most = max(rank_tokens(scenario, share, exchanges=True) for share in PARTIAL)
    for name in ("deepspeed", "deepspeed_balanced", "deepspeed_degrees", "flexsp"):
        found = SYSTEMS[name].run(scenario, name=name)
        assert (found is not None) == (min(num_devices, heads) * most >= context), name


def test_megatron_fits_70b_at_128k_on_64_devices_and_cuts_sequences_where_nothing_else_fits():
    _, choices = megatron_choices(scenario_of("llama3_1_70b", 64, 2**17))
    assert {s.schemes[0].cp for s in choices} == {1}
    assert "2x<8,4;ckpt=80>" in map(str, choices)
    _, choices = megatron_choices(scenario_of("llama3_1_70b", 256, 2**21))
    assert min(s.schemes[0].cp for s in choices) > 1


def test_ring_hides_behind_attention():
    scenario = make_scenario([100])
    alone = ContextParallel(scenario=scenario, scheme=Scheme(1, 1), cp=2)
    lengths = np.array([100, 10])
    assert alone.sequences_ms(lengths) == pytest.approx((1e-3 * lengths**2 + lengths) / 2)
    linked = scenario.linked_by(make_cluster(4))
    ring = ContextParallel(scenario=linked, scheme=Scheme(1, 1), cp=2)
    cluster = linked.cluster
    sent = key_values_ms(cluster.shape, cluster.hardware, Scheme(1, 1, cp=2)) * lengths
    assert (sent > 0).all()
    expected = np.maximum(1e-3 * lengths**2 / 2, sent) + lengths / 2
    assert ring.sequences_ms(lengths) == pytest.approx(expected)
    assert ring.max_len == 2 * scenario.max_len_tokens(Scheme(1, 1))


def test_gathers_hide_but_for_a_first_and_a_last_layer():
    scenario = make_scenario([100])
    linked = scenario.linked_by(make_cluster(4))
    times = np.array([1e6, 2e6])
    hidden = sharded_ms(linked, times)
    ends = linked.links(Strategy.alike(Scheme(1, 1, gather=True), 4))
    layers = linked.profile.memory.num_layers
    assert hidden == pytest.approx(3e6 + (ends.pull_ms + ends.push_ms) / layers)
    assert sharded_ms(linked, times[:0]) == 0.0
    assert small_profile().latency.keys() == scenario.profile.latency.keys()
