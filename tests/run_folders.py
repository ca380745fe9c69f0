"""Run folders as training writes them, from real plans and made-up measurements."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np

from ds_hydra.configs.files import find_profile
from ds_hydra.lab.simulator.events import Simulation, simulate_plan
from ds_hydra.records.metrics import METRICS_FILE, METRICS_SCHEMA
from ds_hydra.records.timeline import Event, EventKind, Timeline, Track
from ds_hydra.sampler.plan import GlobalBatch, IterationPlan
from ds_hydra.sampler.planner.iteration import plan_iteration
from ds_hydra.sampler.planner.planner_settings import PlannerSettings
from ds_hydra.strategy import Profile, Strategy
from ds_hydra.strategy.profiles.profile import LinkTimes
from ds_hydra.strategy.schemes.scheme import parse_strategies

PROFILE = Profile.load(find_profile("a800_llama2_7b"))
NUM_RANKS = 8
STRATEGIES = ("1x<8,1>", "1x<4,1> + 2x<2,1>", "1x<4,1> + 1x<2,2>", "2x<2,2>", "3x<2,1>", "4x<1,2>")


def make_record(
    iteration: int,
    strategy: str,
    measured: Sequence[float] = (110.0,),
    predicted: float = 100.0,
    loss: float | None = 2.0,
) -> dict:
    """One line of metrics; `measured` times go to the pipelines in turn."""
    parsed = Strategy.parse(strategy)
    times = [measured[i % len(measured)] for i in range(len(parsed.schemes))]
    return {
        "iteration": iteration,
        "loss": loss,
        "strategy": strategy,
        "num_tokens": 1000,
        "num_sequences": 5,
        "iteration_ms": 200.0,
        "tokens_per_s": 5000.0 + iteration,
        "predicted_ms": predicted,
        "measured_ms": max(times),
        "imbalance": max(times) / min(times) - 1 if min(times) else 0.0,
        "lr": 1e-3,
        "grad_norm": 1.0,
        "planning_ms": 1.0,
        "waited_ms": 0.0,
        "pull_ms": 1.0,
        "push_ms": 1.0,
        "step_ms": 1.0,
        "pipelines": [
            {
                "tp": scheme.tp,
                "pp": scheme.pp,
                "ranks": list(ranks),
                "num_micro_batches": 1,
                "num_tokens": 500,
                "predicted_ms": predicted,
                "measured_ms": time,
            }
            for scheme, ranks, time in zip(parsed.schemes, parsed.place(), times, strict=True)
        ],
    }


def write_run(run_dir: Path, records: Iterable[dict], tail: str = "") -> Path:
    """A run that has metrics alone."""
    run_dir.mkdir(exist_ok=True)
    (run_dir / METRICS_FILE).write_text(
        "".join(json.dumps(record) + "\n" for record in records) + tail
    )
    return run_dir


LINKS = LinkTimes(pull_ms=40.0, push_ms=60.0, step_ms=20.0)


def make_plan(
    iteration: int, strategy: str | None = None, *, max_tokens: int = 9600
) -> IterationPlan:
    """The plan of a long-tailed global batch, under the best of the strategies or under a given
    one.
    """
    generator = np.random.default_rng(iteration)
    lengths = np.minimum(generator.lognormal(6.3, 1.3, size=60).astype(int) + 16, max_tokens)
    batch = GlobalBatch.of_lengths(lengths.tolist(), iteration)
    candidates = parse_strategies(
        [strategy] if strategy else [STRATEGIES[iteration % len(STRATEGIES)]]
    )
    return plan_iteration(
        batch,
        strategies=candidates,
        profile=PROFILE,
        num_devices=NUM_RANKS,
        settings=PlannerSettings(solver="none"),
    )


def timeline_of(simulation: Simulation, iteration: int, slowdown: float = 1.0) -> Timeline:
    """The timeline that a run would measure of an iteration that pushes after its last pass."""
    links, events = simulation.links, []
    for number, work in enumerate(simulation.works):
        starts_f, ends_f, starts_b, ends_b = slowdown * work.passes_ms() + links.pull_ms
        for kind, starts, ends in (
            (EventKind.FORWARD, starts_f, ends_f),
            (EventKind.BACKWARD, starts_b, ends_b),
        ):
            events += [
                Event(
                    pipeline=number, stage=stage, kind=kind, micro_batch=micro_batch,
                    start_ms=float(start), end_ms=float(ends[stage, micro_batch]),
                )
                for (stage, micro_batch), start in np.ndenumerate(starts)
            ]  # fmt: skip
    end = max(event.end_ms for event in events)
    stages = [(n, k) for n, work in enumerate(simulation.works) for k in range(work.scheme.pp)]
    if simulation.strategy.num_devices < simulation.num_devices:
        stages.append((-1, 0))
    events += [
        Event(pipeline=pipeline, stage=stage, kind=kind, start_ms=start, end_ms=start + duration)
        for pipeline, stage in stages
        for kind, start, duration in (
            (EventKind.PULL, 0.0, links.pull_ms),
            (EventKind.PUSH, end, links.push_ms),
            (EventKind.STEP, end + links.push_ms, links.step_ms),
        )
    ]
    return Timeline(
        iteration=iteration,
        strategy=str(simulation.strategy),
        num_devices=simulation.num_devices,
        pipelines=tuple(
            Track(scheme=w.scheme, ranks=w.ranks, num_micro_batches=w.num_micro_batches)
            for w in simulation.works
        ),
        events=tuple(events),
        duration_ms=end + links.push_ms + links.step_ms,
    )


def measure(plan: IterationPlan, slowdown: float = 1.05) -> Timeline:
    """The timeline that the plan promises, some per cent slower, with pull, push and step."""
    simulation = simulate_plan(plan, PROFILE, links_of=lambda _: LINKS, overlap=False)
    return timeline_of(simulation, plan.iteration, slowdown)


def metrics_line(plan: IterationPlan, timeline: Timeline, loss: float | None) -> dict:
    """The line of `metrics.jsonl` that belongs to a measured plan."""
    ends = [0.0] * len(plan.pipelines)
    for event in timeline.passes():
        ends[event.pipeline] = max(ends[event.pipeline], event.end_ms - LINKS.pull_ms)
    busy = [end for end in ends if end > 0]
    record = make_record(plan.iteration, str(plan.strategy), ends, plan.makespan_ms, loss)
    for entry, pipeline in zip(record["pipelines"], plan.pipelines, strict=True):
        rows = [plan.micro_batch_lengths(row) for row in pipeline.micro_batches]
        entry |= {
            "num_micro_batches": len(rows),
            "num_tokens": sum(map(sum, rows)),
            "predicted_ms": pipeline.makespan_ms,
        }
        assert tuple(entry["ranks"]) == tuple(pipeline.ranks)
    return record | {
        "schema": METRICS_SCHEMA,
        "strategy_index": 0,
        "num_tokens": plan.num_tokens,
        "num_sequences": len(plan.lengths),
        "longest_tokens": max(plan.lengths),
        "iteration_ms": timeline.duration_ms + 5.0,
        "tokens_per_s": plan.num_tokens / (timeline.duration_ms + 5.0) * 1e3,
        "prediction_error": max(ends) / plan.makespan_ms - 1,
        "imbalance": max(busy) / min(busy) - 1,
        "bubble": 0.1,
        "pack_occupancy": 0.8,
        "planning_ms": 10.0,
        "waited_ms": 1.0,
        "pull_ms": LINKS.pull_ms,
        "push_ms": LINKS.push_ms,
        "step_ms": LINKS.step_ms,
    }


def learn_from(folder: Path) -> None:
    """Gives the run what an engine writes that corrects plans."""
    path = folder / METRICS_FILE
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    for line in lines:
        number = line["iteration"]
        line["learned"] = {"machine": 1 + 0.01 * number, "scheme <2,1>": 0.9} if number else {}
        for pipeline in line["pipelines"]:
            pipeline["profiled_ms"] = pipeline["predicted_ms"] * (
                0.5 if pipeline["tp"] == 4 else 1.2
            )
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def trace_experts(folder: Path, experts: dict) -> None:
    """Gives every traced iteration the tokens of `experts`."""
    path = folder / "trace.jsonl"
    lines = [{**json.loads(line), "experts": experts} for line in path.read_text().splitlines()]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def write_run_folder(folder: Path, num_iterations: int = 14) -> Path:
    """A whole run; iteration 5 (if there is one) takes twice as long as planned."""
    (folder / "plans").mkdir(parents=True)
    with (folder / METRICS_FILE).open("w") as metrics, (folder / "trace.jsonl").open("w") as traces:
        for iteration in range(num_iterations):
            plan = make_plan(iteration)
            timeline = measure(plan, 2.0 if iteration == 5 else 1.02 + 0.01 * (iteration % 7))
            loss = 9.0 / (iteration + 2)
            metrics.write(json.dumps(metrics_line(plan, timeline, loss)) + "\n")
            peaks = [int(3e10 + 1e9 * rank) for rank in range(NUM_RANKS)]
            traces.write(json.dumps({**timeline.to_json(), "peak_bytes": peaks}) + "\n")
            (folder / f"plans/iteration_{iteration:06d}.json").write_text(
                json.dumps(plan.to_json())
            )
    (folder / "profile.json").write_text(json.dumps(dict(PROFILE.document)))
    model = {"type": "llama", "num_parameters": 6_700_000_000}
    hydra = {"activation_checkpointing": False, "memory_limit_bytes": None}
    run = {
        "schema": "ds_hydra.run/1", "num_ranks": NUM_RANKS, "device": "cuda", "model": model,
        "hydra": hydra,
    }  # fmt: skip
    (folder / "run.json").write_text(json.dumps(run))
    return folder
