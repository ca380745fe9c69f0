"""How often planning problems break what the planner promises.

Command: python benchmarks/planner_properties.py    (`--number`, `--first` of random ones, or
`--cases`)

No plan is faster than its lower bound. No superset of candidates gives a plan that is slower by
more than the search's tolerance. `tests/planner_instances.py` makes the random problems. A case is
a global batch of its lengths with the candidates of docs/benchmarks/simulate.json, or those that
are proposed. Ends with an error where a promise is broken.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from random import Random

sys.path.append(str(Path(__file__).resolve().parent.parent / "tests"))

from planner_instances import TOLERANCE, Problem, random_problem, slower_with_more, wrong_bounds

from ds_hydra.configs.hydra_config import HydraConfig
from ds_hydra.lab.simulator.cases import draw_batches, list_cases, load_case
from ds_hydra.sampler.candidate_set import decide_candidates
from ds_hydra.sampler.planner.planner_settings import PlannerSettings
from ds_hydra.sampler.sample_bench import CandidateSettings
from ds_hydra.strategy.cost_models.cluster import try_cluster
from ds_hydra.strategy.profiles.learned import NO_CORRECTIONS
from ds_hydra.strategy.profiles.profile import with_engine_layers
from ds_hydra.strategy.schemes.scheme import parse_strategies

ROOT = Path(__file__).resolve().parent.parent


def case_problem(name: str, candidates: list[str]) -> Problem:
    """Return a global batch of the case `name`; without `candidates` with those proposed for it."""
    workload = load_case(name).workload
    profile, number = with_engine_layers(workload.profile), workload.num_devices
    cluster = try_cluster(profile, number, 2.0)
    config = HydraConfig(
        context_length=workload.context_length, tokens_per_iteration=workload.tokens_per_iteration
    )
    settings = CandidateSettings.of(
        config,
        num_devices=number,
        given=parse_strategies(candidates),
        can_run=lambda scheme: scheme.ep == 1,
        cluster=cluster,
        num_link_groups=2,
    )
    found = decide_candidates(profile, workload.histogram, settings)
    assert found.profile is not None
    links = {s: cluster.link_times(s) for s in found.strategies} if cluster else {}
    (batch,) = draw_batches(workload.histogram, workload.tokens_per_iteration, 1, 7)
    return Problem(
        lengths=batch.lengths,
        strategies=found.strategies,
        profile=found.profile,
        num_devices=number,
        settings=PlannerSettings(solver="none", link_times=links),
        corrections=NO_CORRECTIONS,
    )


def problems(options: argparse.Namespace) -> Iterator[tuple[str, int, Problem]]:
    """Yield name, seed and problem of each that is asked for."""
    if not options.cases:
        for seed in range(options.first, options.first + options.number):
            yield f"problem {seed}", seed, random_problem(seed)
        return
    cases = json.loads((ROOT / "docs/benchmarks/simulate.json").read_text())["cases"]
    known = {case["name"]: case["strategies"] for case in cases}
    for seed, name in enumerate(list_cases()):
        yield name, seed, case_problem(name, known.get(name, []))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--number", type=int, default=5000, help="of random problems")
    parser.add_argument("--first", type=int, default=0, help="seed of the first one")
    parser.add_argument("--cases", action="store_true", help="the cases of the simulator instead")
    options = parser.parse_args()
    bounds = slower = number = 0
    told = time.monotonic()
    for name, seed, problem in problems(options):
        number += 1
        for sentence in wrong_bounds(problem):
            bounds += 1
            print(f"{name}: {sentence}", flush=True)
        for sentence in slower_with_more(problem, Random(seed)):
            slower += 1
            print(f"{name}: {sentence}", flush=True)
        if time.monotonic() - told > 30:
            told = time.monotonic()
            print(f"{number}: {name}", file=sys.stderr, flush=True)
    print(f"| {number} {'cases' if options.cases else 'random problems'} | violations |\n|---|--:|")
    print(f"| a plan is faster than its lower bound | {bounds} |")
    print(f"| more candidates, a plan slower by more than {TOLERANCE:.0%} | {slower} |")
    return int(bounds + slower > 0)


if __name__ == "__main__":
    sys.exit(main())
