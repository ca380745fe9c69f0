"""Figures of the simulator on the shipped cases: all numbers in a JSON file, tables as Markdown.

Command: python -m benchmarks.simulate --iterations 100 --out docs/benchmarks/simulate.json    (one
core is used)

A case that OUT holds already, with the same number of iterations, is not simulated again; remove
OUT to begin anew. `--all` simulates all cases, not only those of Fig. 10; `--document` writes every
case with what its paper says, `--page` the tables at the end of a page (`make reproduce` does all).
`--eager` gives ds_hydra the memory that the engine counts for layers of transformers without fused
kernels, and all communicators, in place of the profile's; others keep the profile's.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.pages import put_section
from benchmarks.simulate_tables import HEADROOM, document, headroom, results
from ds_hydra.lab.simulator.cases import Workload, list_cases, load_case
from ds_hydra.lab.simulator.compare import compare
from ds_hydra.lab.simulator.results import Planned, our_figure
from ds_hydra.lab.simulator.scenario import Scenario, bound_of
from ds_hydra.lab.simulator.spread import with_spread
from ds_hydra.lab.simulator.systems import Settings
from ds_hydra.sampler.warm_up import warm_up
from ds_hydra.strategy.cost_models.cluster import find_cluster
from ds_hydra.strategy.profiles.profile import Profile, with_engine_layers
from ds_hydra.strategy.schemes.scheme import schemes_of


def eager_profile(workload: Workload) -> Profile:
    """The profile with what the engine needs to run such a model of transformers in bf16."""
    import torch

    from ds_hydra.configs.hydra_config import HydraConfig
    from ds_hydra.engine.model.meta_model import build_random_stage_model, load_model_config
    from ds_hydra.engine.profiling.memory import as_the_engine_needs

    name = workload.profile.document["model"]["name"]
    config = HydraConfig(
        context_length=workload.context_length,
        tokens_per_iteration=workload.tokens_per_iteration,
    )
    stage_model = build_random_stage_model(
        load_model_config(name.replace("-", "_")),
        dtype=torch.bfloat16,
        device=torch.device("meta"),
        num_ranks=workload.num_devices,
    )
    found = as_the_engine_needs(
        with_engine_layers(workload.profile), stage_model, config, workload.num_devices
    )
    return replace(found, ranks_per_core=1.0)


def simulate(name: str, iterations: int, *, is_eager: bool = False) -> dict[str, Any]:
    case = load_case(name)
    workload = case.workload
    if is_eager:
        workload = replace(workload, own_profile=eager_profile(workload))
    workload = workload.linked_by(find_cluster(workload.profile, workload.num_devices))
    settings = Settings(iterations=iterations)
    start, start_cpu = time.perf_counter(), time.process_time()
    found = with_spread(compare(workload, settings))
    return {
        **found.to_json(),
        "bound_of_candidates_ms": bound_of_candidates_ms(found.ours, settings.scenario(workload)),
        "wall_s": time.perf_counter() - start,
        "cpu_s": time.process_time() - start_cpu,
        "figure": case.figure,
        "published": [
            {"what": e.what, "paper": e.paper, "ours": our_figure(found, e.metric)}
            for e in case.expected
        ],
    }


def bound_of_candidates_ms(planned: Planned, scenario: Scenario) -> float:
    """Propagation at least, in the mean of all global batches, of the schemes of the candidates."""
    own, schemes = scenario.knowing(planned.profile), schemes_of(planned.strategies)
    bounds = [bound_of(own, batch, schemes).perfect_balance_ms for batch in own.batches]
    return float(np.mean(bounds))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--iterations", type=int, default=100)
    parser.add_argument("--out", type=Path, required=True, help="JSON file with all numbers")
    parser.add_argument("--cases", default="", help="only cases whose name has this text in it")
    parser.add_argument("--all", action="store_true", help="all cases, not only those of Fig. 10")
    parser.add_argument("--document", type=Path, help="Markdown file of every simulated case")
    parser.add_argument("--page", type=Path, help="page whose section Results is replaced")
    parser.add_argument(
        "--eager", action="store_true", help="memory of layers without fused kernels"
    )
    arguments = parser.parse_args()
    known = json.loads(arguments.out.read_text()) if arguments.out.exists() else {"cases": []}
    done = {
        c["name"]: c
        for c in known["cases"]
        if c["iterations"] == arguments.iterations and "speedup_69_percent_seen" in c["systems"][0]
    }
    wanted = [n for n in list_cases() if arguments.all or load_case(n).figure == "Fig. 10"]
    wanted = [n for n in wanted if arguments.cases in n]
    warm_up()
    for number, name in enumerate(wanted, start=1):
        if name not in done:
            done[name] = simulate(name, arguments.iterations, is_eager=arguments.eager)
            arguments.out.write_text(json.dumps({"cases": list(done.values())}) + "\n")
        took = f"{done[name]['cpu_s']:.1f} s of CPU time"
        print(f"{number}/{len(wanted)} {name}: {took}", file=sys.stderr, flush=True)
    found = [done[name] for name in wanted]
    tables = results(found)
    print(tables)
    if arguments.page is not None:
        put_section(arguments.page, "Results", tables)
        put_section(arguments.page, HEADROOM, headroom(found))
    if arguments.document is not None:
        arguments.document.write_text(document(found, arguments.iterations), encoding="utf-8")


if __name__ == "__main__":
    main()
