"""Measured times in the engine: only logged, or corrections of the plans to come that a resumed run
repeats.
"""

from __future__ import annotations

import json
from pathlib import Path

import datasets
import pytest
import torch.distributed as dist
from distributed import run_distributed
from engines import small_profile, start_hydra
from models import tiny
from reference import make_batch, make_profile

from ds_hydra.configs.hydra_config import PlannerConfig
from ds_hydra.engine.telemetry.latency_tracker import LatencyTracker, StragglerFinder
from ds_hydra.sampler.background import BackgroundPlanner
from ds_hydra.sampler.plan import IterationPlan
from ds_hydra.sampler.planner.iteration import plan_iteration
from ds_hydra.sampler.planner.planner_settings import PlannerSettings, PlanningTask
from ds_hydra.strategy import Scheme
from ds_hydra.strategy.profiles.learned import NO_CORRECTIONS, Corrections
from ds_hydra.strategy.schemes.scheme import parse_strategies

PROFILE = make_profile({"<1,1>": (0.0, 1.0, 2.0), "<2,1>": (0.0, 0.6, 2.0)})
STRATEGIES = parse_strategies(["2x<1,1>", "1x<2,1>"])


def plan(batch, strategies=STRATEGIES, *, profile=PROFILE, corrections=NO_CORRECTIONS):
    return plan_iteration(
        batch, strategies=strategies, profile=profile, num_devices=2, corrections=corrections
    )


def plan_of(iteration, corrections=NO_CORRECTIONS):
    lengths = [3 + (iteration * 7 + 5 * i) % 40 for i in range(8)]
    return plan(make_batch(lengths, iteration), corrections=corrections)


def make_tracker(state=None, *, profile=PROFILE, strategies=STRATEGIES, **changes):
    planner = PlannerConfig(**changes)
    return LatencyTracker(profile, strategies, planner, PlannerSettings(), StragglerFinder(), state)


def train(tracker, iterations, slowdown=2.0):
    """What the engine does, on a machine `slowdown` times slower than its profile; corrections in
    force.
    """
    used = []
    for iteration in iterations:
        used.append(tracker.corrections_for(iteration))
        planned = plan_of(iteration, used[-1])
        truth = [
            slowdown
            * sum(
                PROFILE.latency[p.scheme].micro_batch_ms(planned.micro_batch_lengths(r))
                for r in p.micro_batches
            )
            for p in planned.pipelines
        ]
        tracker.observe(planned, truth, max(truth) + 5.0)
    return used


def test_plans_stay_as_profiled_unless_asked():
    tracker = make_tracker(refit="log")
    assert all(corrections is NO_CORRECTIONS for corrections in train(tracker, range(30)))
    assert tracker.corrections_now(STRATEGIES) is NO_CORRECTIONS


def test_strategies_cut_anew_leave_nothing_in_checkpoints():
    """Of a long run they are thousands, of which each is asked for once."""
    tracker = make_tracker(strategies=STRATEGIES[:1])
    for iteration in range(6):
        planned = plan(make_batch([30, 20], iteration), [STRATEGIES[iteration % 2]])
        tracker.observe(planned, [1.0] * len(planned.pipelines), 9.0)
    assert tracker.state_dict()["outside_ms"] == {"2x<1,1>": 8.0}


def test_corrections_hold_from_the_first_iteration_that_is_not_planned_yet():
    tracker = make_tracker()
    used = train(tracker, range(24))
    # Four are always planned ahead, and the first iteration of a run tells nothing.
    assert used[:5] == [NO_CORRECTIONS] * 5
    assert all(used[i] != used[i - 1] for i in range(5, 24))
    assert plan_of(23, used[23]).makespan_ms == pytest.approx(2 * plan_of(23).makespan_ms, rel=0.03)
    assert len(tracker._schedule) <= 5


@pytest.mark.parametrize("stop", [1, 3, 4, 8])
def test_a_resumed_run_plans_what_was_planned_ahead(stop):
    whole = make_tracker()
    train(whole, range(stop))
    state = json.loads(json.dumps(whole.state_dict()))
    more = train(whole, range(stop, stop + 12))
    resumed = make_tracker(state)
    again = train(resumed, range(stop, stop + 12))
    assert again == more
    assert resumed.state_dict() == whole.state_dict()
    fresh = train(make_tracker(), range(stop, stop + 12))
    assert fresh != more


def test_what_cannot_be_read_from_a_checkpoint_is_ignored_with_a_line_in_the_log(caplog):
    tracker = make_tracker()
    train(tracker, range(6))
    state = json.loads(json.dumps(tracker.state_dict()))
    samples = {"samples": {"<1,1>": [[1.0] * 6]}, "schedule": []}  # of version 0.1
    for damaged in (
        samples,
        {**state, "num_iterations": None},
        {**state, "schedule": [[3, {}]]},
        7,
    ):
        caplog.clear()
        assert make_tracker(damaged).corrections_now(STRATEGIES) is NO_CORRECTIONS
        assert [record.message.count("is ignored") for record in caplog.records] == [1]
    caplog.clear()
    fewer = make_profile({"<2,1>": (0.0, 0.6, 2.0)})
    kept = make_tracker(state, profile=fewer, strategies=STRATEGIES[1:])
    assert kept.learned.mean("machine") == tracker.learned.mean("machine")
    (line,) = [record.message for record in caplog.records]
    assert "<1,1>" in line
    assert "not in the profile" in line


@pytest.mark.parametrize("value", [0.0, -1.0, float("nan"), float("inf"), 7_200_000.0])
def test_times_that_cannot_be_are_ignored_with_one_line_in_the_log(value, caplog):
    tracker = make_tracker()
    train(tracker, range(6))
    before = tracker.learned.state_dict()
    for iteration in (6, 7):
        planned = plan_of(iteration)
        tracker.observe(planned, [value] * len(planned.pipelines), 10.0)
    tracker.observe(planned, [5.0] * len(planned.pipelines), float("nan"))
    assert tracker.learned.state_dict() == before
    assert [record.message.count("cannot be") for record in caplog.records] == [1]


@pytest.mark.parametrize("num_workers", [0, 2])
def test_planning_processes_take_each_batch_with_the_corrections_of_its_submission(num_workers):
    slow = Corrections(factors={Scheme(1, 1): 3.0})
    corrections = [NO_CORRECTIONS, slow, slow, NO_CORRECTIONS]
    batches = [make_batch([9, 20, 31, 4], i) for i in range(4)]
    task = PlanningTask(strategies=STRATEGIES[:1], profile=PROFILE, num_devices=2)
    with BackgroundPlanner(task, num_workers=num_workers) as planner:
        for batch, known in zip(batches, corrections, strict=True):
            planner.submit(batch, known)
        found = [planner.get(batch.iteration) for batch in batches]
    assert [planned.corrections for planned in found] == corrections
    for planned, batch, known in zip(found, batches, corrections, strict=True):
        assert planned.plan == plan(batch, STRATEGIES[:1], corrections=known)
    assert found[1].plan.makespan_ms > 2 * found[0].plan.makespan_ms


def train_and_resume(folder):
    """Twelve iterations, and four of them again from a checkpoint."""
    folder = Path(folder)
    if dist.get_rank() == 0:  # a profile that is 1,000 times too fast
        document = small_profile(6_000_000, num_layers=4)
        for entry in document["schemes"]:
            entry |= {"quadratic_ms": 1e-7, "linear_ms": 1e-4 / entry["tp"], "constant_ms": 1e-3}
        (folder / "profile.json").write_text(json.dumps(document))
    dist.barrier()
    data = datasets.Dataset.from_list(
        [{"input_ids": [1 + (i * j) % 200 for j in range(5 + 3 * i)]} for i in range(24)]
    )

    def start(run_dir):
        hydra = {
            "profile": str(folder / "profile.json"),
            "strategies": ["4x<1,1>", "1x<2,1> + 2x<1,1>", "2x<2,1>"],
            "tokens_per_iteration": 150,
            "run_dir": str(folder / run_dir),
            "planner": {"refit": "plan", "num_workers": 1},
        }
        return start_hydra(tiny("llama"), hydra=hydra, training_data=data)

    engine = start("run")
    losses = [float(engine.train_batch()) for _ in range(4)]
    engine.save_checkpoint(str(folder))
    losses += [float(engine.train_batch()) for _ in range(8)]
    metrics = engine.last_metrics
    engine.destroy()
    resumed = start("resumed")
    resumed.load_checkpoint(str(folder))
    rest = [float(resumed.train_batch()) for _ in range(4)]
    resumed.destroy()
    return losses, rest, [p.prediction_error for p in metrics.pipelines]


@pytest.mark.slow
@pytest.mark.distributed
def test_an_engine_corrects_its_plans_and_repeats_them_after_a_resume(tmp_path):
    results = run_distributed(train_and_resume, 4, str(tmp_path))
    losses, rest, _ = results[0]
    assert all(result == results[0] for result in results)
    assert rest == losses[4:8]

    def logged(run, iteration):
        path = tmp_path / run / f"plans/iteration_{iteration:06d}.json"
        return IterationPlan.from_json(json.loads(path.read_text()))

    # Corrected after iteration 1 for 5, after 3 for 7: from the checkpoint.
    assert [logged("resumed", i) for i in range(4, 8)] == [logged("run", i) for i in range(4, 8)]
    assert logged("run", 4).makespan_ms < 0.1 < 1 < logged("run", 5).makespan_ms
    assert logged("run", 6).makespan_ms != logged("run", 8).makespan_ms
    lines = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    assert all(p["prediction_error"] > 10 for p in lines[0]["pipelines"] if p["num_micro_batches"])
    for pipeline in lines[-1]["pipelines"]:
        expected = (
            pipeline["measured_ms"] / pipeline["predicted_ms"] - 1 if pipeline["measured_ms"] else 0
        )
        assert pipeline["prediction_error"] == pytest.approx(expected)
        assert abs(expected) < 10
    assert lines[-1]["learned"]["machine"] > 10
    assert all(p["profiled_ms"] < 0.1 for p in lines[-1]["pipelines"])
