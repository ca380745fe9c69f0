"""Measured times in the engine: only logged, or corrections of the plans to come that a resumed run
repeats.
"""

from __future__ import annotations

import json
import logging
from pathlib import Path

import datasets
import pytest
import torch.distributed as dist
from distributed import run_distributed
from engines import adamw, ds_config, small_profile
from models import tiny
from reference import make_batch, make_profile

import ds_hydra
from ds_hydra.configs.hydra_config import PlannerConfig
from ds_hydra.engine.telemetry.latency_tracker import LatencyTracker
from ds_hydra.errors import HydraConfigError
from ds_hydra.sampler.background import BackgroundPlanner
from ds_hydra.sampler.plan import IterationPlan
from ds_hydra.sampler.planner import plan_iteration
from ds_hydra.strategy import Scheme
from ds_hydra.strategy.schemes.scheme import parse_strategies

PROFILE = make_profile({"<1,1>": (0.0, 1.0, 2.0), "<2,1>": (0.0, 0.6, 2.0)})
STRATEGIES = parse_strategies(["2x<1,1>", "1x<2,1>"])


def plan_of(iteration, profile):
    lengths = [3 + (iteration * 7 + 5 * i) % 40 for i in range(8)]
    return plan_iteration(
        make_batch(lengths, iteration), strategies=STRATEGIES, profile=profile, num_devices=2
    )


def train(tracker, iterations, slowdown=2.0):
    """What the engine does, on a machine `slowdown` times slower than its profile; profiles and
    warnings.
    """
    used, warnings = [], []
    for iteration in iterations:
        used.append(tracker.profile_for(iteration))
        plan = plan_of(iteration, used[-1])
        truth = [
            slowdown
            * sum(
                PROFILE.latency[p.scheme].micro_batch_ms(plan.micro_batch_lengths(r))
                for r in p.micro_batches
            )
            for p in plan.pipelines
        ]
        warnings.append(tracker.observe(plan, truth))
    return used, warnings


def settings(**changes):
    return PlannerConfig(**{"lookahead": 3, "refit_interval": 4} | changes)


def test_plans_stay_as_profiled_unless_asked_and_drift_is_told_once():
    tracker = LatencyTracker(PROFILE, settings(refit="log"))
    used, warnings = train(tracker, range(30))
    assert all(profile is PROFILE for profile in used)
    assert sum(w is not None for w in warnings) == 1
    assert "off the predicted ones by +100%" in next(filter(None, warnings))
    _, warnings = train(LatencyTracker(PROFILE, settings(drift_threshold=1.1)), range(30))
    assert not any(warnings)


def test_corrections_hold_from_the_first_iteration_that_is_not_planned_yet():
    tracker = LatencyTracker(PROFILE, settings(refit="plan"))
    used, warnings = train(tracker, range(24))
    # Corrected after iterations 3, 7, ...; three are always planned ahead.
    changes = [i for i in range(1, 24) if used[i] is not used[i - 1]]
    assert changes == [6, 10, 14, 18, 22]
    assert plan_of(23, used[23]).makespan_ms == pytest.approx(
        2 * plan_of(23, PROFILE).makespan_ms, rel=0.02
    )
    assert used[23].document["schemes"][0]["linear_ms"] == used[23].latency[Scheme(1, 1)].linear_ms
    assert not any(warnings[14:])
    assert len(tracker._schedule) <= 3


@pytest.mark.parametrize("stop", [3, 4, 5, 6, 8, 13])
def test_a_resumed_run_plans_what_was_planned_ahead(stop):
    whole = LatencyTracker(PROFILE, settings(refit="plan"))
    train(whole, range(stop))
    state = json.loads(json.dumps(whole.state_dict()))
    more, _ = train(whole, range(stop, stop + 12))
    resumed = LatencyTracker(PROFILE, settings(refit="plan"), state)
    again, _ = train(resumed, range(stop, stop + 12))
    assert [p.latency for p in again] == [p.latency for p in more]
    fresh, _ = train(LatencyTracker(PROFILE, settings(refit="plan")), range(stop, stop + 12))
    assert [p.latency for p in fresh] != [p.latency for p in more]


@pytest.mark.parametrize("num_workers", [0, 2])
def test_planning_processes_take_each_batch_with_the_profile_of_its_submission(num_workers):
    slow = PROFILE.with_latency(
        {
            s: type(m)(quadratic_ms=0.0, linear_ms=3.0, constant_ms=m.constant_ms)
            for s, m in PROFILE.latency.items()
        }
    )
    profiles = [PROFILE, slow, slow, PROFILE]
    batches = [make_batch([9, 20, 31, 4], i) for i in range(4)]
    with BackgroundPlanner(
        strategies=STRATEGIES, profile=PROFILE, num_devices=2, num_workers=num_workers
    ) as planner:
        for batch, profile in zip(batches, profiles, strict=True):
            planner.set_profile(profile)
            planner.submit(batch)
        found = [planner.get(batch.iteration).plan for batch in batches]
    for plan, batch, profile in zip(found, batches, profiles, strict=True):
        assert plan == plan_iteration(batch, strategies=STRATEGIES, profile=profile, num_devices=2)
    assert found[1].makespan_ms > 2 * found[0].makespan_ms


def test_the_keys_are_checked():
    for change in ({"refit": "on"}, {"refit_interval": 0}, {"drift_threshold": 0}):
        with pytest.raises(HydraConfigError, match=f"hydra.planner.{next(iter(change))}"):
            ds_hydra.configs.hydra_config.HydraConfig.parse(
                {"context_length": 8, "tokens_per_iteration": 8, "planner": change}
            )


def train_and_resume(folder):
    """Six iterations with corrections after every second one, and the last four again from a
    checkpoint.
    """
    folder = Path(folder)
    if dist.get_rank() == 0:  # a profile that is 1,000 times too fast
        document = small_profile(6_000_000, num_layers=4)
        for entry in document["schemes"]:
            entry |= {"quadratic_ms": 1e-7, "linear_ms": 1e-4 / entry["tp"], "constant_ms": 1e-3}
        (folder / "profile.json").write_text(json.dumps(document))
    dist.barrier()
    rows = [{"input_ids": [1 + (i * j) % 200 for j in range(5 + 3 * i)]} for i in range(24)]
    messages = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())
    logging.getLogger("ds_hydra").addHandler(handler)

    def start(run_dir):
        planner = {"refit": "plan", "refit_interval": 2, "lookahead": 2, "num_workers": 1}
        hydra = {
            "profile": str(folder / "profile.json"),
            "strategies": ["4x<1,1>", "1x<2,1> + 2x<1,1>", "2x<2,1>"],
            "tokens_per_iteration": 150,
            "run_dir": str(folder / run_dir),
            "planner": planner,
        }
        model = tiny("llama")
        engine, *_ = ds_hydra.initialize(
            model=model,
            optimizer=adamw(model),
            config=ds_config(hydra=hydra),
            training_data=datasets.Dataset.from_list(rows),
        )
        return engine

    engine = start("run")
    losses = [float(engine.train_batch()) for _ in range(4)]
    engine.save_checkpoint(str(folder))
    losses += [float(engine.train_batch()) for _ in range(6)]
    metrics = engine.last_metrics
    engine.destroy()
    resumed = start("resumed")
    resumed.load_checkpoint(str(folder))
    rest = [float(resumed.train_batch()) for _ in range(2)]
    resumed.destroy()
    return losses, rest, [p.prediction_error for p in metrics.pipelines], messages


@pytest.mark.distributed
def test_an_engine_corrects_its_plans_and_repeats_them_after_a_resume(tmp_path):
    results = run_distributed(train_and_resume, 4, str(tmp_path))
    losses, rest, errors, _ = results[0]
    assert all(result[:3] == (losses, rest, errors) for result in results)
    assert rest == losses[4:6]

    def plan(run, iteration):
        path = tmp_path / run / f"plans/iteration_{iteration:06d}.json"
        return IterationPlan.from_json(json.loads(path.read_text()))

    # Corrected after iteration 1 for 3 and later, after 3 for 5 and later: both from the
    # checkpoint.
    assert [plan("resumed", i) for i in (4, 5)] == [plan("run", i) for i in (4, 5)]
    assert plan("run", 2).makespan_ms < 0.1 < 1 < plan("run", 3).makespan_ms
    assert plan("run", 4).makespan_ms != plan("run", 6).makespan_ms
    lines = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    assert all(p["prediction_error"] > 10 for p in lines[0]["pipelines"] if p["num_micro_batches"])
    for pipeline in lines[-1]["pipelines"]:
        expected = (
            pipeline["measured_ms"] / pipeline["predicted_ms"] - 1 if pipeline["measured_ms"] else 0
        )
        assert pipeline["prediction_error"] == pytest.approx(expected)
        assert abs(expected) < 10
    assert any("profile again" in message for message in results[0][3])
    assert not any("profile again" in message for result in results[1:] for message in result[3])
