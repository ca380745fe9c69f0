"""Whether two checkouts make the same plans and proposals, and how long each takes.

Command: python benchmarks/same_plans.py OTHER    (the root of another checkout; `--proposals` too)

Each checkout plans the same global batches of every shipped case, with the candidates of
docs/benchmarks/simulate.json, in a process of its own; the two take turns, so that what else the
machine does hits both. Compared are digests of plans, with pull and push and without, heuristic
ones and such that measured times correct; with `--proposals` the candidates of the cases of the
paper's Fig. 10, too. The ratio of times is the median over cases.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
CASES = ROOT / "docs/benchmarks/simulate.json"


def serve() -> None:
    """Answers requests, one a line, with the package of the current folder."""
    from ds_hydra.configs.hydra_config import HydraConfig
    from ds_hydra.lab.simulator.cases import draw_batches, load_case
    from ds_hydra.sampler.candidate_set import decide_candidates
    from ds_hydra.sampler.planner.iteration import plan_iteration
    from ds_hydra.sampler.planner.planner_settings import PlannerSettings
    from ds_hydra.sampler.sample_bench import CandidateSettings
    from ds_hydra.sampler.warm_up import warm_up
    from ds_hydra.strategy.cost_models.cluster import try_cluster
    from ds_hydra.strategy.profiles.learned import NO_CORRECTIONS, Corrections
    from ds_hydra.strategy.profiles.profile import with_engine_layers
    from ds_hydra.strategy.schemes.scheme import parse_strategies

    def answer(name: str, texts: list[str] | None) -> dict[str, Any]:
        workload = load_case(name).workload
        profile, number = with_engine_layers(workload.profile), workload.num_devices
        cluster = try_cluster(profile, number, 2.0)
        config = HydraConfig(
            context_length=workload.context_length,
            tokens_per_iteration=workload.tokens_per_iteration,
            seed=2,
        )
        settings = CandidateSettings.of(
            config,
            num_devices=number,
            given=parse_strategies(texts or []),
            can_run=lambda scheme: scheme.ep == 1,
            cluster=cluster,
            num_link_groups=2,
        )
        begin = time.process_time()
        found = decide_candidates(profile, workload.histogram, settings)
        if texts is None:
            return {
                "found": [str(strategy) for strategy in found.strategies],
                "ms": [(time.process_time() - begin) * 1e3],
            }
        links = {s: cluster.link_times(s) for s in found.strategies} if cluster else {}
        linked = PlannerSettings(solver="none", link_times=links)
        alone = PlannerSettings(solver="none")
        rng = np.random.default_rng(0)
        schemes = {scheme for strategy in found.strategies for scheme in strategy.schemes}
        corrections = Corrections(
            factors={scheme: float(rng.uniform(0.9, 1.2)) for scheme in sorted(schemes, key=str)},
            outside_ms={strategy: float(rng.uniform(0, 20)) for strategy in found.strategies},
            slow_ranks={1: 1.1},
        )
        first, *others = draw_batches(workload.histogram, workload.tokens_per_iteration, 4, 7)
        plans, times = [], []
        for batch, own, known in [
            *((batch, linked, NO_CORRECTIONS) for batch in (first, *others)),
            (first, alone, NO_CORRECTIONS),
            (first, linked.heuristic(), NO_CORRECTIONS),
            (first, linked, corrections),
        ]:
            begin = time.process_time()
            plan = plan_iteration(
                batch,
                strategies=found.strategies,
                profile=found.profile,
                num_devices=number,
                settings=own,
                corrections=known,
            )
            times.append((time.process_time() - begin) * 1e3)
            plans.append([plan.digest, plan.makespan_ms, str(plan.strategy)])
        return {"found": plans, "ms": times}

    warm_up()
    for line in sys.stdin:
        print(json.dumps(answer(**json.loads(line))), flush=True)


def start(root: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "benchmarks/same_plans.py", "--serve"],
        cwd=root,
        env={**os.environ, "PYTHONPATH": str(root)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def ask(process: subprocess.Popen[str], request: dict[str, Any]) -> dict[str, Any]:
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(json.dumps(request) + "\n")
    process.stdin.flush()
    return json.loads(process.stdout.readline())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("other", nargs="?", type=Path)
    parser.add_argument("--proposals", action="store_true")
    parser.add_argument("--every", type=int, default=1, help="every N-th of the cases alone")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        serve()
        return
    cases = json.loads(CASES.read_text())["cases"][:: options.every]
    requests = [{"name": case["name"], "texts": case["strategies"]} for case in cases]
    if options.proposals:
        in_paper = [case for case in cases if case["figure"] == "Fig. 10"]
        requests += [{"name": case["name"], "texts": None} for case in in_paper]
    here, other = start(ROOT), start(options.other.resolve())
    num_equal, ratios = 0, {"plans": [], "proposals": []}
    for number, request in enumerate(requests):
        turn = [here, other] if number % 2 else [other, here]
        answers = {process.pid: ask(process, request) for process in turn}
        mine, theirs = answers[here.pid], answers[other.pid]
        is_plan = request["texts"] is not None
        ratios["plans" if is_plan else "proposals"].append(sum(mine["ms"]) / sum(theirs["ms"]))
        num_equal += mine["found"] == theirs["found"]
        if mine["found"] != theirs["found"]:
            differing = [pair for pair in zip(mine["found"], theirs["found"]) if pair[0] != pair[1]]
            print(f"{request['name']}: {differing[:3]}")
    print(f"{num_equal} of {len(requests)} cases are equal")
    for name, values in ratios.items():
        if values:
            low, middle, high = np.percentile(values, [25, 50, 75])
            print(f"{name}: CPU time {middle:.3f} of the other's, quartiles {low:.3f} {high:.3f}")


if __name__ == "__main__":
    main()
