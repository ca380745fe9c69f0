"""Candidates that the engine proposes from the lengths of its data, where there are too many to try all."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import datasets
import pytest
import torch.distributed as dist
from distributed import run_distributed
from engines import adamw, ds_config, small_profile
from models import tiny

import ds_hydra
from ds_hydra.configs import find_file
from ds_hydra.configs.hydra_config import HydraConfig
from ds_hydra.engine import runtime
from ds_hydra.engine.groups import groups_of
from ds_hydra.engine.runtime import HydraRuntime
from ds_hydra.errors import HydraConfigError, InfeasiblePlanError
from ds_hydra.strategy import Profile
from ds_hydra.strategy.histogram import LengthHistogram
from ds_hydra.strategy.scheme import Scheme, parse_strategies


def refuse_pp_3(scheme):
    if scheme.pp == 3:
        raise HydraConfigError("PP 3 is above the layers")


def stand_in(histogram, *, max_process_groups=256, num_groups=2):
    """What proposing needs of an engine of 64 ranks, without the ranks."""
    lengths = next(histogram.draw_batches(2_000_000, 1, 0))
    engine = SimpleNamespace(
        _data=SimpleNamespace(lengths=lengths),
        _profile=None,
        config=HydraConfig.parse(
            {
                "context_length": 32768,
                "tokens_per_iteration": 100_000,
                "max_process_groups": max_process_groups,
            }
        ),
        num_ranks=64,
        _num_first_groups=num_groups,
        propagator=SimpleNamespace(groups=range(200)),  # others than at the start do not count
        skeleton=SimpleNamespace(check_scheme=refuse_pp_3),
        strategies=(),
        _device=SimpleNamespace(type="cuda"),
    )
    engine._model_can_run = lambda scheme: HydraRuntime._model_can_run(engine, scheme)
    engine._can_run = lambda scheme: HydraRuntime._can_run(engine, scheme)
    return engine


def test_64_ranks_get_few_candidates_for_their_data_within_their_groups():
    histogram = LengthHistogram.load(find_file("lengths", "commoncrawl")).limit(32768)
    profile = Profile.load(find_file("profiles", "a800_llama2_32b"))
    engine = stand_in(histogram)
    longest = int(engine._data.lengths.max())
    proposal = HydraRuntime._propose(engine, profile, longest)
    assert HydraRuntime._propose(engine, profile, longest).strategies == proposal.strategies
    assert 1 < len(proposal.strategies) <= 20
    assert sum(kept.is_best_static for kept in proposal.kept) == 1
    assert any(strategy.is_heterogeneous for strategy in proposal.strategies)
    assert not any(scheme.pp == 3 for s in proposal.strategies for scheme in s.schemes)
    few = stand_in(histogram, max_process_groups=72, num_groups=60)
    bounded = HydraRuntime._propose(few, profile, longest)
    assert len(set().union(*map(groups_of, bounded.strategies))) <= 12
    assert len(bounded.strategies) < len(proposal.strategies)
    with pytest.raises(HydraConfigError, match=r"hydra\.max_process_groups"):
        HydraRuntime._propose(stand_in(histogram, num_groups=256), profile, longest)


def train_on_proposals(folder):
    """Four ranks that count as many: candidates follow the data."""
    runtime.MAX_ENUMERATED_RANKS = 2
    folder = Path(folder)
    if dist.get_rank() == 0:
        document = small_profile(6_000_000, num_layers=4)
        document["schemes"][1]["linear_ms"] = 0.09
        document["schemes"].append(document["schemes"][0] | {"tp": 8})  # a scheme beyond these ranks
        (folder / "profile.json").write_text(json.dumps(document))
    dist.barrier()

    def start(longest, hydra=None):
        rows = [{"input_ids": [1 + (i * j) % 200 for j in range(4 + i % 9)]} for i in range(60)]
        rows.append({"input_ids": [3] * longest})
        model = tiny("llama")
        config = {
            "profile": f"{folder}/profile.json",
            "tokens_per_iteration": 200,
            "memory_limit_bytes": 1_000_000,
        }
        config |= hydra or {}
        engine, *_ = ds_hydra.initialize(
            model=model,
            optimizer=adamw(model),
            config=ds_config(hydra=config),
            training_data=datasets.Dataset.from_list(rows),
        )
        return engine

    engine = start(100)
    found = [str(s) for s in engine.hydra.strategies]
    described = engine.hydra.describe()
    losses = [float(engine.train_batch()) for _ in range(4)]
    engine.destroy()
    messages = []
    for hydra in (
        {"memory_limit_bytes": 600_000},
        {"memory_limit_bytes": 600_000, "strategies": ["2x<2,1>"]},
    ):
        with pytest.raises(InfeasiblePlanError) as caught:
            start(128, hydra)
        messages.append(str(caught.value))
    return found, described, losses, messages


@pytest.mark.distributed
def test_four_ranks_propose_once_and_agree(tmp_path):
    results = run_distributed(train_on_proposals, 4, str(tmp_path))
    found, described, losses, _ = results[0]
    assert all((result[0], result[2]) == (found, losses) for result in results)
    strategies = parse_strategies(found)
    assert all(s.num_devices == 4 for s in strategies)
    assert any(s.schemes == (Scheme(2, 1),) * 2 for s in strategies), (
        "the static choice that holds the context"
    )
    assert len(strategies) > 1
    assert "fastest for" in described
    assert "the best static strategy" in described
    for result in results:
        for message in result[3]:
            assert "no scheme holds a row of 128 tokens on 4 devices, the longest that fits has" in message
            assert "activation checkpointing" in message
            assert "raise hydra.memory_limit_bytes" in message
