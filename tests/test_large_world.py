"""Candidates that the engine proposes from the lengths of its data, where there are too many to try
all.
"""

from __future__ import annotations

import dataclasses
import functools
import logging

import datasets
import pytest
from distributed import run_distributed
from engines import ds_config, refused, small_profile, start_hydra, write_json
from models import tiny
from typer.testing import CliRunner

from ds_hydra.cli import app
from ds_hydra.configs import find_file
from ds_hydra.configs.hydra_config import HydraConfig
from ds_hydra.engine.checks.config_check import CheckRequest, check_config
from ds_hydra.errors import HydraConfigError, InfeasiblePlanError
from ds_hydra.sampler import sample_bench
from ds_hydra.sampler.candidate_set import decide_candidates
from ds_hydra.sampler.sample_bench import CandidateSettings
from ds_hydra.strategy import Profile
from ds_hydra.strategy.cost_models.cluster import try_cluster
from ds_hydra.strategy.profiles.profile import load_profile
from ds_hydra.strategy.proposal.histogram import LengthHistogram
from ds_hydra.strategy.schemes.enumeration import load_strategies
from ds_hydra.strategy.schemes.placement import count_groups, group_limit, groups_of
from ds_hydra.strategy.schemes.scheme import Scheme, parse_strategies


def settings_of(num_link_groups=2, **more):
    config = HydraConfig.parse(
        {"context_length": 32768, "tokens_per_iteration": 100_000, "max_process_groups": 256}
    )
    return dataclasses.replace(
        CandidateSettings.of(
            config,
            num_devices=64,
            given=(),
            can_run=lambda scheme: scheme.pp != 3,
            cluster=None,
            num_link_groups=num_link_groups,
        ),
        **{"num_batches": 4, **more},
    )


def test_64_ranks_get_few_candidates_for_their_data_within_their_groups():
    histogram = LengthHistogram.load(find_file("lengths", "commoncrawl")).limit(32768)
    profile = Profile.load(find_file("profiles", "a800_llama2_32b"))
    found = decide_candidates(profile, histogram, settings_of())
    assert decide_candidates(profile, histogram, settings_of()).strategies == found.strategies
    assert [kept.strategy for kept in found.reasons] == list(found.strategies)
    assert 1 < len(found.strategies) <= 20
    assert sum(kept.is_best_static for kept in found.reasons) == 1
    assert any(strategy.is_heterogeneous for strategy in found.strategies)
    assert not any(scheme.pp == 3 for s in found.strategies for scheme in s.schemes)
    bounded = decide_candidates(profile, histogram, settings_of(max_groups=24))
    started = decide_candidates(profile, None, settings_of(max_groups=24))
    groups = [set().union(*map(groups_of, found.strategies)) for found in (bounded, started)]
    assert sum(map(len, groups)) <= 24 - 2
    assert len(bounded.strategies) < len(found.strategies)
    with pytest.raises(HydraConfigError, match=r"hydra\.max_process_groups"):
        decide_candidates(profile, histogram, settings_of(256))


def test_256_ranks_have_groups_for_gathered_layers():
    """Four for each rank where nothing is chosen: pairs of all ranks alone are 128."""
    histogram = LengthHistogram.load(find_file("lengths", "github")).limit(32768)
    profile = Profile.load(find_file("profiles", "a800_llama2_32b"))
    settings = CandidateSettings(
        num_devices=256,
        context_length=32768,
        tokens_per_iteration=800_000,
        cluster=try_cluster(profile, 256),
        num_batches=2,
    )
    found = decide_candidates(profile, histogram, settings).strategies
    sizes = {s.num_devices for strategy in found if strategy.gathers for s in strategy.schemes}
    assert {2, 16} <= sizes
    assert 256 < count_groups(found) <= settings.group_limit == 1024
    assert [group_limit(n, None) for n in (8, 64, 1024)] == [256, 256, 4096]
    assert group_limit(1024, 300) == 300


def test_links_count_for_everyone_who_decides(tmp_path):
    """`propose`, `check` and an engine of 16 ranks get the same candidates of compiled layers, and
    others without links.
    """
    profile = load_profile("a800_llama2_7b")
    histogram = LengthHistogram.load(find_file("lengths", "github"))
    hydra = {"context_length": 16384, "tokens_per_iteration": 100_000, "seed": 0}
    settings = CandidateSettings.of(
        HydraConfig.parse(hydra),
        num_devices=16,
        given=(),
        can_run=lambda _: True,
        cluster=try_cluster(profile, 16),
        num_link_groups=2,
    )
    found = {str(s) for s in decide_candidates(profile, histogram, settings).strategies}
    report = check_config(
        CheckRequest(
            config=ds_config(
                hydra={**hydra, "profile": "a800_llama2_7b", "compile_layers": True},
                bf16={"enabled": True},
                communication_data_type="bf16",
            ),
            num_devices=16,
            histogram="github",
        )
    )
    assert set(report.strategies) == found
    out = tmp_path / "out.json"
    options = {"profile": "a800_llama2_7b", "histogram": "github", "devices": 16}
    options |= {"context": 16384, "tokens": 100_000, "out": out}
    arguments = [text for key, value in options.items() for text in (f"--{key}", str(value))]
    assert CliRunner().invoke(app, ["propose", *arguments]).exit_code == 0
    assert {str(s) for s in load_strategies(str(out))} == found
    without = decide_candidates(profile, histogram, dataclasses.replace(settings, cluster=None))
    assert {str(s) for s in without.strategies} != found


def train_on_proposals(folder):
    """Four ranks that count as many: candidates follow the data."""
    sample_bench.MAX_ENUMERATED_RANKS = 2
    document = small_profile(6_000_000, num_layers=4)
    document["schemes"][1]["linear_ms"] = 0.09
    # A scheme beyond these ranks
    document["schemes"].append(document["schemes"][0] | {"tp": 8})
    profile = write_json(f"{folder}/profile.json", document)

    def start(longest, hydra=None):
        rows = [{"input_ids": [1 + (i * j) % 200 for j in range(4 + i % 9)]} for i in range(60)]
        rows.append({"input_ids": [3] * longest})
        config = {
            "profile": profile,
            "tokens_per_iteration": 200,
            "memory_limit_bytes": 1_000_000,
        }
        config |= hydra or {}
        data = datasets.Dataset.from_list(rows)
        return start_hydra(tiny("llama"), hydra=config, training_data=data)

    told = []
    package, handler = logging.getLogger("ds_hydra"), logging.Handler(logging.INFO)
    handler.emit = lambda record: told.append(record.getMessage())
    package.addHandler(handler)
    package.setLevel(logging.INFO)
    engine = start(100)
    found = [str(s) for s in engine.source.candidates.strategies]
    described = "\n".join(told)
    losses = [float(engine.train_batch()) for _ in range(4)]
    engine.destroy()
    messages = []
    for hydra in (
        {"memory_limit_bytes": 600_000},
        {"memory_limit_bytes": 600_000, "strategies": ["2x<2,1>"]},
    ):
        messages.append(refused(functools.partial(start, 128, hydra), InfeasiblePlanError))
    return found, described, losses, messages


@pytest.mark.distributed
def test_four_ranks_propose_once_and_agree(tmp_path):
    results = run_distributed(train_on_proposals, 4, str(tmp_path))
    found, described, losses, _ = results[0]
    assert all((result[0], result[2]) == (found, losses) for result in results)
    strategies = parse_strategies(found)
    assert all(s.num_devices == 4 for s in strategies)
    assert any(s.schemes == (Scheme(2, 1),) * 2 for s in strategies), (
        "the static choice that fits the context"
    )
    assert len(strategies) > 1
    for strategy in found:
        assert described.count(f"\n  {strategy}: ") == 1, "each is named with its reason"
    assert "fastest for" in described
    assert "the best static strategy" in described
    assert "fastest for" not in results[1][1], "by the first rank alone"
    for result in results:
        for message in result[3]:
            assert (
                "no scheme fits a micro-batch of 128 tokens on 4 devices, the longest that fits has"
                in message
            )
            assert "activation checkpointing" in message
            assert "raise hydra.memory_limit_bytes" in message
