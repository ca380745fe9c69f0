"""The candidate set of a run: pruned on global batches, never slower than static, explained,
bounded.
"""

from __future__ import annotations

import dataclasses
import json
import re
from contextlib import nullcontext
from types import SimpleNamespace

import numpy as np
import pytest
from reference import make_batch, make_profile

from ds_hydra.configs import find_file
from ds_hydra.errors import HydraConfigError
from ds_hydra.lab.simulator.cases import load_case
from ds_hydra.sampler import propose as propose_module
from ds_hydra.sampler.candidate_set import CandidateSpace, decide_candidates
from ds_hydra.sampler.planner.iteration import plan_iteration
from ds_hydra.sampler.propose import (
    ForPhases,
    GroupLimits,
    _Choice,
    _menus,
    groups_of_gathered,
)
from ds_hydra.sampler.sample_bench import CandidateSettings
from ds_hydra.strategy import Profile, Strategy
from ds_hydra.strategy.cost_models.cluster import find_cluster
from ds_hydra.strategy.cost_models.costs import World
from ds_hydra.strategy.cost_models.estimate import estimate_from_config
from ds_hydra.strategy.profiles.profile import load_profile, with_engine_layers
from ds_hydra.strategy.proposal.histogram import LengthHistogram
from ds_hydra.strategy.proposal.program import usable_schemes
from ds_hydra.strategy.proposal.space import unpruned_schemes
from ds_hydra.strategy.schemes.enumeration import full_strategies, strategies_from_json
from ds_hydra.strategy.schemes.placement import (
    LINK_GROUPS,
    MAX_GROUPS_OF_RANK,
    count_groups,
    groups_of_all,
    most_groups_of_rank,
)
from ds_hydra.strategy.schemes.scheme import parse_strategies, schemes_of

CONTEXT, TOKENS = 32768, 65536


def flat_profile(name: str) -> Profile:
    """A shipped profile without pipelines of several stages, whose bounds take the planner long."""
    document = dict(Profile.load(find_file("profiles", name)).document)
    document["schemes"] = [entry for entry in document["schemes"] if entry["pp"] == 1]
    return Profile.from_json(document)


@pytest.fixture(scope="module")
def github() -> LengthHistogram:
    return LengthHistogram.load(find_file("lengths", "github"))


def propose(github, num_batches=16, **settings):
    """For short sequences of GitHub on 8 devices, among <TP,PP>."""
    known = CandidateSettings(
        num_devices=8,
        context_length=CONTEXT,
        tokens_per_iteration=TOKENS,
        space="plain",
        num_batches=num_batches,
        num_link_groups=0,
        max_enumerated=0,
        **settings,
    )
    return decide_candidates(flat_profile("a800_llama2_7b"), github, known).proposal


@pytest.fixture(scope="module")
def proposal(github):
    return propose(github)


def test_set_is_within_two_percent_of_all_strategies_on_new_batches(proposal, github):
    profile = flat_profile("a800_llama2_7b")
    every = full_strategies(usable_schemes(World.of(profile, None, 8, 1)), 8, 1 << 20)
    times = {"proposed": [], "every": []}
    for lengths in github.limit(CONTEXT).draw_batches(TOKENS, 12, seed=99):
        batch = make_batch(lengths.tolist())
        for name, strategies in (("proposed", proposal.strategies), ("every", every)):
            plan = plan_iteration(batch, strategies=strategies, profile=profile, num_devices=8)
            times[name].append(plan.makespan_ms)
    assert np.mean(times["proposed"]) <= 1.02 * np.mean(times["every"])


def test_set_is_never_slower_than_static_and_says_why_each_is_there(proposal):
    assert proposal.kept_ms <= proposal.best_static_ms
    assert proposal.kept_ms <= 1.002 * proposal.all_candidates_ms
    assert [k.is_best_static for k in proposal.kept].count(True) == 1
    assert sum(k.share_won for k in proposal.kept) == pytest.approx(1)
    for kept in proposal.kept:
        assert kept.is_best_static or kept.share_won > 0
        assert f"{kept.share_won:.0%}" in kept.reason
        assert kept.is_best_static == ("best static" in kept.reason)


def test_document_is_a_candidate_set(proposal):
    document = proposal.to_json()
    assert strategies_from_json(document) == proposal.strategies
    assert (document["num_devices"], document["context_length"]) == (8, CONTEXT)
    assert document["num_communicators"] == count_groups(proposal.strategies)
    assert [reason["strategy"] for reason in document["reasons"]] == document["strategies"]


def test_groups_with_the_same_ranks_are_counted_once():
    strategies = [
        Strategy.parse(t) for t in ("1x<4,1> + 2x<2,1>", "4x<2,1>", "2x<2,2>", "1x<1,3> + 5x<1,1>")
    ]
    assert count_groups(strategies) == 11
    keys = groups_of_all(strategies)
    most = most_groups_of_rank(keys)
    assert most < count_groups(strategies)
    assert GroupLimits(100, most).allow(keys)
    assert not GroupLimits(100, most - 1).allow(keys)


def test_communicators_are_bounded(github):
    assert propose(github, 8, max_groups=4).num_communicators <= 4
    with pytest.raises(HydraConfigError, match="more than 0; allow 2"):
        propose(github, 8, max_groups=0)


def test_progress_is_reported(github):
    profile = make_profile({"<1,1>": (0.0, 1.0, 0.0), "<2,1>": (0.0, 0.6, 0.0)})
    seen = []
    settings = CandidateSettings(
        num_devices=4, context_length=50, space="plain", num_batches=3, max_enumerated=0
    )
    decide_candidates(
        profile,
        LengthHistogram.from_counts({50: 7}),
        settings,
        lambda done, total: seen.append((done, total)),
    )
    assert seen == [(1, 3), (2, 3), (3, 3)]


def candidates_of_case(name, *, num_batches, compiled=True, **changes):
    """Those of the full space, with the engine's memory."""
    workload = dataclasses.replace(load_case(name).workload, **changes)
    profile = with_engine_layers(workload.profile, compiled=compiled)
    settings = CandidateSettings(
        num_devices=workload.num_devices,
        context_length=workload.context_length,
        tokens_per_iteration=workload.tokens_per_iteration,
        space="full",
        cluster=find_cluster(profile, workload.num_devices),
        num_batches=num_batches,
    )
    return decide_candidates(profile, workload.histogram, settings)


def test_phases_that_candidates_leave_no_communicators_for_take_their_place():
    """LLaMA 13B on 64 A100 of 40 GB, context 192K: groups of all sizes side by side are
    faster than what is found before them, which needs most groups of a rank.
    """
    found = candidates_of_case("flexsp/commoncrawl-13b-192k", num_batches=2).proposal
    assert any(kept.is_for_phases for kept in found.kept)
    assert len(found.strategies) == len(set(found.strategies))
    keys = groups_of_all(found.strategies)
    assert most_groups_of_rank(keys) <= MAX_GROUPS_OF_RANK - LINK_GROUPS
    assert found.kept_ms < 0.99 * found.all_candidates_ms


def test_what_stays_is_a_candidate_beside_phases_that_have_it_too(monkeypatch):
    """Phases for which communicators are missing hold the one strategy that stays."""
    stays, other, menu = parse_strategies(["1x<cp2,1;gather>", "1x<2,1>", "2x<1,1;gather>"])
    times = {stays: np.array([3.0, 9.0]), other: np.array([9.0, 9.0])}
    choice = propose_module._Choice(GroupLimits(9), [stays], [stays, other], dict(times))

    def propose_phases(_bench, _profile, _limits, beside, known_ms):
        if other in beside:
            return ForPhases(beside, (), known_ms, are_refused=True)
        return ForPhases(beside, (stays, menu), np.array([2.0, 2.0]), are_refused=False)

    monkeypatch.setattr(propose_module, "propose_phases", propose_phases)
    monkeypatch.setattr(propose_module, "groups_of_gathered", lambda *_: ())
    bench = SimpleNamespace(settings=SimpleNamespace(num_devices=2))
    found = propose_module._with_phases(bench, choice, None)
    assert found.chosen == [stays]
    assert found.strategies == (stays, menu)


def test_a_context_that_only_gathered_layers_hold_is_proposed_for():
    """LLaMA 32B on 32 A800, context 32K, eager layers: no slices fit beside such a sequence."""
    case = "paper/commoncrawl-32b-32gpu-f3"
    found = candidates_of_case(case, num_batches=2, compiled=False)
    assert all(strategy.gathers for strategy in found.strategies)
    kept = {str(kept.strategy): kept for kept in found.reasons if kept.is_for_phases}
    assert "32x<1,1;gather>" in kept
    assert any(k.strategy.schemes[0].num_devices == 32 for k in kept.values()), "a group of all"
    assert "put together" in kept["32x<1,1;gather>"].reason
    assert found.proposal is not None
    assert found.proposal.kept_ms < 0.95 * found.proposal.all_candidates_ms


def test_a_poor_menu_that_fits_gives_way_to_a_good_one_that_does_not():
    """LLaMA 32B on 64 A800, 800K tokens of GitHub-like lengths: communicators are left for a
    menu of checkpointed layers, which is 1.2 times as slow as one that needs those of the
    candidates.
    """
    case = "paper/github-32b-64gpu-f3"
    found = candidates_of_case(case, num_batches=2, tokens_per_iteration=800_000).proposal
    for_phases = [kept.strategy for kept in found.kept if kept.is_for_phases]
    good = {
        strategy.schemes[0].num_devices for strategy in for_phases if not strategy.schemes[0].ckpt
    }
    assert good >= {1, 2, 4, 8, 16, 32}
    assert found.kept_ms < 0.9 * found.all_candidates_ms


def test_gathered_groups_of_candidates_are_there_for_phases():
    """LLaMA 32B on 32 A800: two sequences of 16K are in no candidate, but in two groups of eight
    that one candidate has.
    """
    found = candidates_of_case("paper/commoncrawl-32b-32gpu-f1", num_batches=2)
    used = {s for strategy in found.strategies if strategy.gathers for s in strategy.schemes}
    widest = max(used, key=lambda scheme: scheme.num_devices)
    assert Strategy.alike(widest, 32) in found.strategies
    keys = groups_of_all(found.strategies)
    assert most_groups_of_rank(keys) <= MAX_GROUPS_OF_RANK - LINK_GROUPS


def test_groups_of_gathered_schemes_by_hand():
    chosen = parse_strategies(
        ["1x<sp4,1;gather> + 4x<1,1;gather>", "2x<sp4,1;ckpt=2;gather>", "1x<8,1>"]
    )
    wanted = parse_strategies(["2x<sp4,1;gather>", "8x<1,1;gather>"])
    many = GroupLimits(100)
    # Groups of one rank need no communicator: they come first. One size alone is no menu
    assert groups_of_gathered(chosen, (), 8, many) == (wanted[1], wanted[0])
    assert groups_of_gathered(chosen, wanted[:1], 8, many) == (wanted[1],)
    half = [chosen[0], chosen[2]]
    just = GroupLimits(count_groups(half))
    assert groups_of_gathered(half, (), 8, many) == (wanted[1], wanted[0])
    assert groups_of_gathered(half, (), 8, just) == (wanted[1],)
    assert groups_of_gathered(chosen, (), 8, GroupLimits(0)) == ()
    assert groups_of_gathered([*chosen, *wanted], (), 8, many) == ()
    assert groups_of_gathered(parse_strategies(["1x<sp4,1;gather>"]), (), 8, many) == ()


def test_what_helps_most_is_chosen_first():
    plain, best, good, late = parse_strategies(["8x<1,1>", "4x<2,1>", "2x<4,1>", "1x<8,1>"])
    times = {plain: [10.0, 10.0], good: [9.0, 9.0], best: [5.0, 5.0], late: [5.0, 4.0]}
    table = {strategy: np.array(ms) for strategy, ms in times.items()}
    choice = _Choice(GroupLimits(100), [], [plain], table)
    choice.grow()
    assert choice.chosen == [plain, late]
    choice = _Choice(GroupLimits(count_groups([plain, best])), [], [plain], table)
    choice.grow()
    assert choice.chosen == [plain, late]
    del table[late]
    choice = _Choice(GroupLimits(100), [], [plain], table)
    choice.grow()
    assert choice.chosen == [plain, best]


def test_a_model_that_no_plain_scheme_holds_is_proposed_for(tmp_path):
    """27 billion parameters on 8 H100, which only gathered layers hold."""
    shape = {
        **{"model_type": "llama", "num_hidden_layers": 62, "hidden_size": 5376, "head_dim": 128},
        **{"intermediate_size": 21504, "vocab_size": 262208},
        **{"num_attention_heads": 32, "num_key_value_heads": 16},
    }
    (tmp_path / "model.json").write_text(json.dumps(shape))
    profile, _ = estimate_from_config(str(tmp_path / "model.json"), "h100", 8, 4096)
    settings = CandidateSettings(
        num_devices=8,
        context_length=4096,
        tokens_per_iteration=16384,
        space="full",
        cluster=find_cluster(profile, 8),
        num_batches=1,
    )
    start = decide_candidates(profile, None, settings)  # as an engine before it reads its data
    assert start.strategies
    assert all(strategy.gathers for strategy in start.strategies)
    assert schemes_of(start.strategies) <= set(start.profile.latency)
    nothing = dataclasses.replace(settings, can_run=lambda _: False)
    with pytest.raises(HydraConfigError, match="no scheme that this model can run fits 8 devices"):
        decide_candidates(profile, None, nothing)
    for tokens in (16_384, 262_144):  # which no step of all devices holds
        more = dataclasses.replace(settings, tokens_per_iteration=tokens)
        found = decide_candidates(profile, LengthHistogram.from_counts({4096: 1}), more).strategies
        assert found
        assert all(strategy.gathers for strategy in found)
    # Where no group takes all devices, a sequence has to fit one of fewer: here of two, and alone
    for degree, context in ((2, 4096), (1, 2000)):
        narrow = dataclasses.replace(
            settings,
            context_length=context,
            can_run=lambda scheme, most=degree: scheme.cp == 1 and scheme.num_devices <= most,
        )
        for tokens in (context, 4 * context, 262_144):
            more = dataclasses.replace(narrow, tokens_per_iteration=tokens)
            assert decide_candidates(profile, LengthHistogram.from_counts({context: 1}), more)
    longer = dataclasses.replace(settings, context_length=65_536)
    kept = decide_candidates(profile, LengthHistogram.from_counts({65_536: 1}), longer).strategies
    assert all(scheme.offload for scheme in schemes_of(kept)), "the host keeps what has no room"
    longest = dataclasses.replace(settings, context_length=131_072)
    with pytest.raises(HydraConfigError, match=r"lower the context to 8\d{4}, or use 16 devices"):
        decide_candidates(profile, LengthHistogram.from_counts({131_072: 1}), longest)
    measured_so = Profile.from_json({**profile.document, "activation_checkpointing": True})
    with pytest.raises(HydraConfigError, match=r"lower the context to \d+, or use") as caught:
        decide_candidates(measured_so, LengthHistogram.from_counts({65_536: 1}), longer)
    (least,) = map(int, re.findall(r"lower the context to (\d+)", str(caught.value)))
    advised = dataclasses.replace(settings, context_length=least)
    assert decide_candidates(measured_so, LengthHistogram.from_counts({least: 1}), advised)


@pytest.mark.parametrize("num_devices", [3, 5, 7])
def test_odd_devices_have_candidates_where_a_device_alone_holds_no_model(num_devices):
    """LLaMA 7B: pipelines of two devices or more, one device left."""
    profile = load_profile("a800_llama2_7b")
    settings = CandidateSettings(
        num_devices=num_devices,
        context_length=8192,
        tokens_per_iteration=16384,
        space="full",
        cluster=find_cluster(profile, num_devices),
        num_batches=1,
    )
    start = decide_candidates(profile, None, settings).strategies
    assert f"{num_devices // 2}x<2,1>" in map(str, start)
    assert all(strategy.num_devices <= num_devices for strategy in start)


def test_phases_are_tried_with_groups_that_are_cut_in_one_way():
    """Others mix SP, CP and TP, for which a rank may lack communicators."""
    profile, _ = estimate_from_config("llama2_7b", "h100", 64, 131_072)
    world = World.of(profile, find_cluster(profile, 64, "h100"), 64, 131_072)
    known = world.costs.table(unpruned_schemes(world, 0.0))
    settings = CandidateSettings(num_devices=64, context_length=131_072)
    menus = list(_menus(known, settings))
    ways = [
        {way for s in menu for way in ("sp", "tp") if getattr(s.schemes[0], way) > 1}
        for menu in menus
    ]
    assert set() in ways
    assert {"sp", "tp"} in ways


@pytest.mark.parametrize("context", [396_278, 396_279])
def test_the_longest_context_that_is_advised_fits(context):
    settings = CandidateSettings(
        num_devices=8, context_length=context, tokens_per_iteration=4 * context, space="full"
    )
    profile = load_profile("a800_llama2_7b")
    said = nullcontext()
    if context > 396_278:
        said = pytest.raises(HydraConfigError, match="lower the context to 396278, or use 16 dev")
    with said:
        CandidateSpace(profile, settings).check_longest()
