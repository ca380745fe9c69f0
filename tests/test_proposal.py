"""The program of Eq. (4) against its literal form, and what rounding makes of its answers."""

from __future__ import annotations

import json
import math
import re

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from reference import make_profile
from spaces import full_space

from ds_hydra.configs import find_file
from ds_hydra.errors import HydraConfigError
from ds_hydra.strategy import Profile, Scheme, Strategy, parse_strategies
from ds_hydra.strategy.cost_models.cluster import find_cluster
from ds_hydra.strategy.cost_models.costs import World
from ds_hydra.strategy.cost_models.estimate import estimate_from_config
from ds_hydra.strategy.proposal.histogram import LengthHistogram
from ds_hydra.strategy.proposal.program import (
    PRECISION,
    ProposalSettings,
    RelaxedStrategy,
    charge_ms,
    check_context,
    homogeneous_strategies,
    propose_from_histogram,
    relaxed_strategies,
    round_strategy,
    usable_schemes,
)
from ds_hydra.strategy.proposal.space import unpruned_schemes

PAPER = ProposalSettings(device_step=0.5, length_step=10, charge="per_sequence")


def profile_with_max_len(
    schemes: dict[str, tuple[float, float, float]], max_len: dict[int, int]
) -> Profile:
    """A profile whose MaxLen depends on TP only."""
    profile = make_profile(schemes, max_len=1_000_000)
    memory = profile.memory
    per_tp = {tp: tp * 1_000_000 / (longest + 0.5) for tp, longest in max_len.items()}
    object.__setattr__(memory, "activation_bytes", per_tp)
    return profile


def literal_time(world, histogram, settings):
    """t[N][L] for every L by Eq. (4) as it is written, device by device; {L: time}."""
    step, length_step = settings.device_step, settings.length_step
    schemes, num_devices = usable_schemes(world), world.num_devices
    num_bins = math.ceil(histogram.lengths_tokens[-1] / length_step)
    bin_of = -(-histogram.lengths_tokens // length_step)
    work = {
        s: [
            float(np.sum((charge_ms(world, s, histogram.lengths_tokens, settings)
                          * histogram.counts)[bin_of == l]))
            for l in range(num_bins + 1)
        ]
        for s in schemes
    }  # fmt: skip
    units = round(num_devices / step)
    t = [[0.0] + [math.inf] * num_bins for _ in range(units + 1)]
    for n in range(1, units + 1):
        for l in range(1, num_bins + 1):
            best = t[n - 1][l]
            top = min(l * length_step, int(histogram.lengths_tokens[-1]))
            for s in schemes:
                if world.max_len_tokens(s) < top:
                    continue
                for pipelines in range(1, n // s.num_devices + 1):
                    for before in range(l):
                        own = sum(work[s][before + 1 : l + 1]) / (pipelines * step)
                        best = min(best, max(t[n - pipelines * s.num_devices][before], own))
            t[n][l] = best
    occupied = sorted(set(bin_of.tolist()))
    return [t[units][l] for l in occupied]


@settings(max_examples=25)
@given(
    counts=st.dictionaries(st.integers(1, 60), st.integers(1, 9), min_size=1, max_size=6),
    costs=st.lists(
        st.tuples(st.floats(0, 0.1), st.floats(0.1, 3), st.floats(0, 5)), min_size=3, max_size=3
    ),
    num_devices=st.integers(4, 7),
)
def test_times_are_those_of_the_literal_program(counts, costs, num_devices):
    profile = profile_with_max_len(
        dict(zip(("<1,1>", "<2,1>", "<4,1>"), costs)), {1: 20, 2: 45, 4: 60}
    )
    histogram = LengthHistogram.from_counts(counts)
    world = World.of(profile, None, num_devices, 60)
    relaxed = relaxed_strategies(world, histogram, PAPER)
    expected = literal_time(world, histogram, PAPER)
    assert len(relaxed) == len(expected)
    for found, time_ms in zip(relaxed, expected):
        assert time_ms * (1 - 1e-9) <= found.time_ms <= time_ms * (1 + 2 * PRECISION)
        used = sum(scheme.num_devices * number for scheme, number in found.num_pipelines)
        assert used <= num_devices + 1e-6
        held = profile.max_len_tokens(found.longest_scheme, num_devices)
        assert held >= min(found.max_length_tokens, histogram.lengths_tokens[-1])


def test_rounding_goes_both_ways_and_keeps_the_longest_scheme():
    relaxed = RelaxedStrategy(
        max_length_tokens=9,
        num_pipelines=((Scheme(4, 1), 0.4), (Scheme(2, 1), 1.5), (Scheme(1, 1), 3.4)),
        longest_scheme=Scheme(4, 1),
        time_ms=1.0,
    )
    found = round_strategy(relaxed, 10, ())
    assert {str(s) for s in found} == {
        "1x<4,1> + 1x<2,1> + 3x<1,1>",
        "1x<4,1> + 1x<2,1> + 4x<1,1>",
        "1x<4,1> + 2x<2,1> + 2x<1,1>",
    }
    assert all(Scheme(4, 1) in s.schemes and s.num_devices <= 10 for s in found)
    assert Strategy.parse("1x<4,1> + 2x<2,1> + 2x<1,1>") in found


def test_free_devices_are_filled():
    relaxed = RelaxedStrategy(
        max_length_tokens=9,
        num_pipelines=((Scheme(4, 1), 1.6),),
        longest_scheme=Scheme(4, 1),
        time_ms=1.0,
    )
    assert round_strategy(relaxed, 7, ()) == (Strategy.parse("1x<4,1>"),)
    filled = round_strategy(relaxed, 7, (Scheme(4, 1), Scheme(2, 1), Scheme(1, 1)))
    assert filled == (Strategy.parse("1x<4,1> + 1x<2,1> + 1x<1,1>"),)


@pytest.mark.parametrize("num_devices", [6, 8, 12, 100])
@pytest.mark.parametrize("charge", ["per_micro_batch", "per_sequence"])
def test_every_proposed_strategy_holds_its_lengths_and_fits(num_devices, charge):
    profile = Profile.load(find_file("profiles", "a800_llama2_7b"))
    histogram = LengthHistogram.load(find_file("lengths", "github"))
    settings_ = ProposalSettings(charge=charge, tokens_per_iteration=100_000)
    context = 16384
    world = World.of(profile, None, num_devices, context)
    proposed = propose_from_histogram(world, histogram, settings_)
    for strategy, lengths in proposed.items():
        longest = max(profile.max_len_tokens(s, num_devices) for s in strategy.schemes)
        assert longest >= max(lengths, default=0)
        assert strategy.num_devices <= num_devices
    static = homogeneous_strategies(world)
    assert static
    assert set(static) <= proposed.keys()
    assert max(max(lengths, default=0) for lengths in proposed.values()) == context


def test_candidates_of_the_paper_are_found():
    """Four of the paper's seven for LLaMA 32B on CommonCrawl; its profile had other MaxLen
    values.
    """
    profile = Profile.load(find_file("profiles", "a800_llama2_32b"))
    histogram = LengthHistogram.load(find_file("lengths", "commoncrawl"))
    proposed = propose_from_histogram(
        World.of(profile, None, 64, 32768),
        histogram,
        ProposalSettings(tokens_per_iteration=200_000),
    )
    paper = parse_strategies(
        ["4x<16,1>", "1x<16,1> + 12x<4,1>", "1x<8,3> + 10x<4,1>", "1x<8,1> + 14x<4,1>"]
    )
    assert set(paper) <= proposed.keys()


def test_one_length_gives_one_scheme():
    profile = make_profile({"<1,1>": (0.0, 1.0, 0.0), "<2,1>": (0.0, 0.6, 0.0)})
    proposed = propose_from_histogram(
        World.of(profile, None, 4, 50),
        LengthHistogram.from_counts({50: 7}),
        ProposalSettings(tokens_per_iteration=400),
    )
    assert [*map(str, proposed)] == ["4x<1,1>", "2x<2,1>"]


def test_context_that_nothing_holds_is_refused_with_advice_that_works():
    profile = Profile.load(find_file("profiles", "a800_llama2_32b"))
    histogram = LengthHistogram.load(find_file("lengths", "commoncrawl"))

    def propose(num_devices, context_length):
        return propose_from_histogram(
            World.of(profile, None, num_devices, context_length),
            histogram,
            ProposalSettings(tokens_per_iteration=100_000),
        )

    with pytest.raises(HydraConfigError) as error:
        propose(16, 32768)
    text = str(error.value)
    assert "activation checkpointing" in text
    assert propose(16, int(re.search(r"lower the context to (\d+)", text)[1]))
    assert propose(int(re.search(r"use (\d+) devices", text)[1]), 32768)


def test_states_that_do_not_fit_are_said_to_and_how_many_devices_do(tmp_path):
    """No advice to recompute or to profile again; the number of devices that it names fits."""
    config = {
        "model_type": "llama", "num_hidden_layers": 100, "hidden_size": 16384, "intermediate_size": 49152,
        "vocab_size": 128000, "num_attention_heads": 128, "num_key_value_heads": 8,
    }  # fmt: skip
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config))

    def fits(number):
        profile, _ = estimate_from_config(str(path), "h100", number, 32768)
        cluster = find_cluster(profile, number)
        known = {"num_devices": number, "context_length": 32768, "cluster": cluster}
        wide = full_space(profile, tokens_per_iteration=1e6, **known)
        check_context(
            World.of(wide, cluster, number, 32768), is_full=True, tokens_per_iteration=1e6
        )

    with pytest.raises(HydraConfigError) as error:
        fits(32)
    text = str(error.value)
    assert re.search(
        r"because the states alone, 18 bytes a parameter, need 5\.\d+ TB, and the", text
    )
    assert "checkpointing" not in text
    assert "profile again" not in text
    fits(int(re.search(r"use (\d+) devices", text)[1]))


def test_bubble_and_constant_are_charged_per_micro_batch():
    """100 tokens in micro-batches of 50 on two stages: (2 + 1) slots of (50 + 10) ms for 100
    tokens.
    """
    profile = make_profile({"<1,2>": (0.0, 1.0, 10.0)}, max_len=50)
    settings_ = ProposalSettings(tokens_per_iteration=100)
    object.__setattr__(profile, "saturation_tokens", {1: 50})
    charged = charge_ms(World.of(profile, None, 2, 100), Scheme(1, 2), np.array([100]), settings_)
    assert charged[0] == pytest.approx(3 * 60)


@pytest.mark.parametrize(
    ("num_devices", "expected"),
    [
        (6, {"<cp6,1;gather>", "<sp2,cp3,1;gather>", "<cp4,1;gather>"}),
        (24, {"<cp24,1;gather>", "<sp8,cp3,1;gather>", "<sp16,1;gather>"}),
        (32, {"<cp32,1;gather>", "<sp32,1;gather>"}),
    ],
)
def test_layers_are_gathered_by_all_devices_also_where_these_are_no_power_of_two(
    num_devices, expected
):
    profile, _ = estimate_from_config("llama3_1_8b", "h100", num_devices, 32768)
    world = World.of(profile, find_cluster(profile, num_devices), num_devices, 32768)
    found = {str(scheme) for scheme in unpruned_schemes(world, 0.0)}
    without = {re.sub(r";ckpt=\d+", "", text) for text in found}
    assert expected <= without
    sizes = {int(n) for n in re.findall(r"<cp(\d+),1;gather>", " ".join(without))}
    assert sizes - {num_devices} == {2**n for n in range(1, 6) if 2**n < num_devices}
