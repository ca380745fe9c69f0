"""Schemes beside <TP,PP> in a proposal: which ones are considered, and what an engine does with
them.
"""

from __future__ import annotations

import json
import logging
from dataclasses import replace
from pathlib import Path

import datasets
import numpy as np
import pytest
import torch.distributed as dist
from distributed import run_distributed
from engines import adamw, ds_config, small_profile
from hypothesis import given, settings
from hypothesis import strategies as st
from models import tiny
from reference import make_profile
from spaces import full_space

import ds_hydra
from ds_hydra.configs import find_file
from ds_hydra.errors import HydraConfigError, InfeasiblePlanError
from ds_hydra.sampler.candidate_set import decide_candidates
from ds_hydra.sampler.sample_bench import CandidateSettings
from ds_hydra.strategy import Profile, Scheme, Strategy
from ds_hydra.strategy.cost_models.costs import World
from ds_hydra.strategy.proposal.histogram import LengthHistogram
from ds_hydra.strategy.proposal.program import usable_schemes
from ds_hydra.strategy.proposal.space import undominated

CONTEXT = 32768


def a800(model):
    return Profile.load(find_file("profiles", f"a800_llama2_{model}"))


def widened(profile, num_devices=32, context=CONTEXT, **kwargs):
    return full_space(profile, num_devices=num_devices, context_length=context, **kwargs)


def added(profile, **kwargs):
    return [s for s in widened(profile, **kwargs).latency if s not in profile.latency]


def test_schemes_that_hold_more_or_take_less_are_added_once():
    profile = a800("32b")
    extended = widened(profile)
    found = extended.latency.keys() - profile.latency.keys()
    assert found == extended.assumed
    assert {bool(s.ckpt) for s in found} == {s.sp > 1 for s in found} == {True, False}
    assert not any(s.stages for s in found), "uneven stages are not proposed"
    assert len(found) < 50
    assert widened(extended).document == extended.document
    for scheme in found:
        assert {
            Scheme(scheme.tp, scheme.pp),
            Scheme(scheme.tp * scheme.sp, scheme.pp),
        } <= profile.latency.keys()
        if scheme.ckpt:
            longest, without = (
                extended.max_len_tokens(s, 32) for s in (scheme, scheme.without_options())
            )
            assert without < CONTEXT
            assert longest >= 2 * without or longest >= CONTEXT / 8


def test_parts_are_tried_only_where_a_scheme_does_not_fit_the_context():
    profile = a800("7b")
    assert all(s.ckpt == 0 for s in added(profile, num_devices=16, context=4096))
    assert any(s.sp > 1 for s in added(profile, num_devices=16, context=4096))


def test_layers_that_are_checkpointed_already_are_not_checkpointed_again():
    known = a800("7b")
    again = Profile.from_json({**known.document, "activation_checkpointing": True})
    options = {"num_devices": 8, "context_length": 65536 * 4}
    assert any(s.ckpt for s in full_space(known, **options).latency)
    assert not any(s.ckpt for s in full_space(again, **options).latency)


def test_what_the_model_cannot_run_is_not_added():
    profile = a800("32b")
    found = added(profile, can_run=lambda scheme: scheme.num_shards == 1)
    assert found
    assert all(s.num_shards == 1 and s.ckpt for s in found)
    assert any(s.cp > 1 for s in added(profile, can_run=lambda scheme: scheme.sp == 1))
    three_heads = Profile.from_json(
        {**profile.document, "model": {**profile.document["model"], "num_attention_heads": 12}}
    )
    assert {s.sp * s.tp for s in added(three_heads) if s.sp > 1} == {2, 4}


@settings(max_examples=60)
@given(
    costs=st.lists(
        st.tuples(st.sampled_from([0, 0.01, 0.02]), st.sampled_from([0.5, 1, 2]), st.sampled_from([0, 1, 5])),
        min_size=4, max_size=4,
    ),
    micro_batches=st.lists(st.lists(st.integers(1, 40), min_size=1, max_size=3), min_size=1, max_size=3),
)  # fmt: skip
def test_a_dominated_scheme_is_never_faster(costs, micro_batches):
    """On any equal micro-batches that it holds, by 1F1B: (V + PP - 1) T."""
    texts = ("<4,1>", "<2,2>", "<1,4>", "<sp2,2,1>")
    profile = make_profile(dict(zip(texts, costs)), max_len=100)
    schemes = tuple(profile.latency)
    kept = undominated(World.of(profile, None, 4, 100), schemes)
    assert kept

    def time_ms(scheme, micro_batch, count):
        return (count + scheme.pp - 1) * profile.latency[scheme].micro_batch_ms(micro_batch)

    for scheme in set(schemes) - set(kept):
        held = profile.max_len_tokens(scheme, 4)
        better = [k for k in kept if profile.max_len_tokens(k, 4) >= held]
        for count, micro_batch in enumerate((r for r in micro_batches if sum(r) <= held), start=1):
            assert any(
                time_ms(k, micro_batch, count) <= time_ms(scheme, micro_batch, count) + 1e-9
                for k in better
            )


def test_only_what_is_slower_everywhere_is_dominated():
    def kept(sp):
        times = {"<2,1>": (0.01, 1, 1), "<1,2>": (0.01, 0.5, 1), "<sp2,1>": sp, "<1,1>": (1, 9, 9)}
        profile = make_profile(times, max_len=100)
        return [
            str(s) for s in undominated(World.of(profile, None, 2, 100), tuple(profile.latency))
        ]

    # <1,1> is alone on one device; <1,2> takes half the time of a micro-batch and two slots more.
    assert kept((0, 1, 1)) == ["<1,2>", "<sp2,1>", "<1,1>"]
    assert kept((0, 1, 2)) == ["<2,1>", "<1,2>", "<sp2,1>", "<1,1>"]
    assert kept((0.0101, 1, 1)) == ["<2,1>", "<1,2>", "<sp2,1>", "<1,1>"]
    assert kept((0.01, 1, 1)) == ["<1,2>", "<sp2,1>", "<1,1>"], "as fast, and holds more"


def propose(profile, space, *, num_devices=16, context=CONTEXT, **kwargs):
    settings = CandidateSettings(
        num_devices=num_devices, context_length=context, tokens_per_iteration=131072,
        space=space, num_batches=6, **kwargs,
    )  # fmt: skip
    lengths = LengthHistogram.load(find_file("lengths", "github"))
    return decide_candidates(profile, lengths, settings).proposal


def schemes_of(proposal):
    return {scheme for strategy in proposal.strategies for scheme in strategy.schemes}


def test_wide_set_contains_the_plain_one_and_is_faster():
    plain, wide = propose(a800("7b"), "plain"), propose(a800("7b"), "full")
    assert all(scheme.is_plain for scheme in schemes_of(plain))
    assert set(plain.strategies) < set(wide.strategies)
    assert wide.plain_ms == plain.kept_ms
    assert wide.kept_ms < 0.98 * plain.kept_ms
    assert set(wide.assumed) == {s for s in schemes_of(wide) if not s.is_plain}
    document = wide.to_json()
    assert document["space"] == "full"
    assert document["assumed_schemes"] == [str(s) for s in wide.assumed] != []
    assert document["expected_ms"]["plain"] == plain.kept_ms


def test_measured_space_has_what_was_measured_and_nothing_else():
    profile = a800("7b")
    assert propose(profile, "measured") == replace(propose(profile, "plain"), space="measured")
    sp = widened(profile, num_devices=16).document["schemes"]
    measured = [
        {k: v for k, v in e.items() if k != "estimated"} if e.get("sp") == 4 else e for e in sp
    ]
    known = Profile.from_json({**profile.document, "schemes": measured})
    assert {s.sp for s in usable_schemes(World.of(known, None, 16, 1), "measured")} == {1, 4}
    assert {s.sp for s in usable_schemes(World.of(known, None, 16, 1), "full")} == {1, 2, 4, 8}
    found = propose(known, "measured")
    assert {s.sp for s in schemes_of(found)} == {1, 4}
    assert found.assumed == ()


def test_a_context_that_only_extended_schemes_fit():
    with pytest.raises(
        HydraConfigError, match=r'hydra\.planner\.space to "full" \(--space full\), which fits'
    ):
        propose(a800("32b"), "measured")
    found = propose(a800("32b"), "full")
    assert found.plain_ms is None
    assert np.isfinite([found.kept_ms, found.best_static_ms]).all()
    static = next(k.strategy for k in found.kept if k.is_best_static)
    known = widened(a800("32b"), num_devices=16)
    assert known.max_len_tokens(static.schemes[0], 16) >= CONTEXT
    assert not static.schemes[0].is_plain
    widest = LengthHistogram.from_counts({9_000_000: 1})
    with pytest.raises(HydraConfigError, match=r"no scheme fits a micro-batch of 9000000 tokens"):
        decide_candidates(
            a800("32b"),
            widest,
            CandidateSettings(num_devices=16, context_length=9_000_000, space="full"),
        )


def test_strategies_of_two_schemes_stay_and_extended_ones_come_on_top():
    """On 4 devices all of <TP,PP> are candidates, whatever they win."""
    found = propose(a800("7b"), "full", num_devices=4)
    plain = [s for s in found.strategies if all(scheme.is_plain for scheme in s.schemes)]
    settings = CandidateSettings(num_devices=4, context_length=CONTEXT)
    assert set(plain) == set(decide_candidates(a800("7b"), None, settings).strategies)
    assert len(plain) < len(found.strategies)
    assert found.plain_ms is None or found.kept_ms < found.plain_ms


def run_engines(folder):
    """Losses, candidates, schemes that trained, and warnings of engines in different spaces on 4
    ranks.
    """
    folder = Path(folder)
    document = small_profile(12_000_000, num_layers=4)
    document["memory"]["input_bytes_per_token_per_layer_per_hidden"] = 4
    document["memory"]["activation_bytes_per_token_per_layer_per_hidden"] = {
        "1": 100,
        "2": 100,
        "4": 100,
    }
    document["schemes"] = [
        {"tp": tp, "pp": 1, "quadratic_ms": a, "linear_ms": b, "constant_ms": c}
        for tp, a, b, c in ((1, 0.05, 0.1, 0.1), (2, 0.03, 0.08, 0.2), (4, 0.02, 0.07, 0.3))
    ]
    measured = {
        "tp": 1, "pp": 1, "sp": 4, "quadratic_ms": 0.0125, "linear_ms": 0.04, "constant_ms": 0.3,
    }  # fmt: skip
    if dist.get_rank() == 0:
        (folder / "tp.json").write_text(json.dumps(document))
        (folder / "sp.json").write_text(
            json.dumps({**document, "schemes": [*document["schemes"], measured]})
        )
    dist.barrier()
    rows = [
        {"input_ids": [1 + (i * j) % 200 for j in range(120 if i % 9 == 0 else 4 + i % 7)]}
        for i in range(60)
    ]
    warnings = []
    handler = logging.Handler()
    handler.emit = lambda record: warnings.append(record.getMessage())
    logging.getLogger("ds_hydra.engine").addHandler(handler)
    logging.getLogger("ds_hydra.engine").setLevel(logging.INFO)

    def start(space="measured", **hydra):
        model = tiny("llama", num_hidden_layers=4)
        planner = {"space": space, "num_workers": 0}
        section = {
            "profile": f"{folder}/tp.json",
            "tokens_per_iteration": 200,
            "planner": planner,
            **hydra,
        }
        engine, *_ = ds_hydra.initialize(
            model=model,
            optimizer=adamw(model),
            config=ds_config(hydra=section),
            training_data=datasets.Dataset.from_list(rows),
        )
        return engine

    def train(**hydra):
        warnings.clear()
        engine = start(**hydra)
        losses, used = [], set()
        for _ in range(2):
            losses.append(float(engine.train_batch()))
            used |= {str(s) for s in Strategy.parse(engine.last_metrics.strategy).schemes}
        found = [str(s) for s in engine.source.candidates.strategies]
        engine.destroy()
        return losses, found, used, list(warnings)

    found = {
        "plain": train(profile=f"{folder}/sp.json", space="plain"),
        "measured": train(profile=f"{folder}/sp.json"),
        "not measured": train(),
        "full": train(space="full", run_dir=str(folder / "run")),
        "checkpointed": train(space="full", memory_limit_bytes=300_000),
    }
    with pytest.raises(InfeasiblePlanError) as caught:
        start(memory_limit_bytes=300_000)
    return found, str(caught.value)


@pytest.mark.slow
@pytest.mark.distributed
def test_engines_train_on_what_their_space_allows(tmp_path):
    results = run_distributed(run_engines, 4, str(tmp_path))
    found, refused = results[0]
    for other, _ in results:
        for name, (losses, strategies, used, _) in other.items():
            assert (losses, strategies, used) == found[name][:3], name
            assert losses == pytest.approx(found["plain"][0], rel=1e-5), name
    enumerated = found["plain"][1]
    assert not any("sp" in text or "ckpt" in text for text in enumerated)
    assert found["not measured"][1] == enumerated
    assert set(enumerated) < set(found["measured"][1])
    assert set(enumerated) < set(found["full"][1])
    # The long sequence wants all ranks, and slices that stay are those of one strategy
    assert found["measured"][2] == {"<sp4,1>"}
    assert found["full"][2] == {"<sp4,1>"}
    assert any("ckpt" in text for text in found["checkpointed"][2])
    assert any(text.startswith("times of <sp4,1>") for text in found["full"][3]), found["full"][3]
    assert not any("times of" in text for text in found["measured"][3])
    assert not any("times of" in text for other, _ in results[1:] for text in other["full"][3])
    assert 'set hydra.planner.space to "full"' in refused
    logged = Profile.load(tmp_path / "run" / "profile.json")
    assert Scheme(1, 1, sp=4) in logged.assumed
