"""Figures of the simulator on the shipped cases: all numbers in a JSON file, tables as Markdown.

Command: python -m benchmarks.simulate --iterations 100 --out docs/benchmarks/simulate.json    (one
core is used)

A case that OUT holds already, with the same number of iterations, is not simulated again; remove
OUT to begin anew. `--all` simulates all cases, not only those of Fig. 10; `--document` writes every
case with what its paper says, `--page` the tables at the end of a page (`make reproduce` does all).
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.pages import put_section
from benchmarks.simulate_tables import HEADROOM, document, headroom, results
from ds_hydra.lab.simulator.cases import list_cases, load_case
from ds_hydra.lab.simulator.compare import compare
from ds_hydra.lab.simulator.results import Planned, published_beside_ours
from ds_hydra.lab.simulator.scenario import Scenario, perfect_balance_ms
from ds_hydra.lab.simulator.systems import Settings
from ds_hydra.sampler.warm_up import warm_up
from ds_hydra.strategy.cost_models.cluster import find_cluster
from ds_hydra.strategy.schemes.scheme import schemes_of


def simulate(name: str, iterations: int) -> dict[str, Any]:
    case = load_case(name)
    workload = case.workload
    workload = workload.linked_by(find_cluster(workload.profile, workload.num_devices))
    settings = Settings(iterations=iterations)
    start, start_cpu = time.perf_counter(), time.process_time()
    found = compare(workload, settings)
    return {
        **found.to_json(),
        "bound_of_candidates_ms": bound_of_candidates_ms(found.ours, settings.scenario(workload)),
        "wall_s": time.perf_counter() - start,
        "cpu_s": time.process_time() - start_cpu,
        **published_beside_ours(case, found),
    }


def bound_of_candidates_ms(planned: Planned, scenario: Scenario) -> float:
    """Propagation at least, in the mean of all global batches, of the schemes of the candidates."""
    own, schemes = scenario.knowing(planned.profile), schemes_of(planned.strategies)
    return float(np.mean([perfect_balance_ms(own, batch, schemes) for batch in own.batches]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--iterations", type=int, default=100)
    parser.add_argument("--out", type=Path, required=True, help="JSON file with all numbers")
    parser.add_argument("--cases", default="", help="only cases whose name has this text in it")
    parser.add_argument("--all", action="store_true", help="all cases, not only those of Fig. 10")
    parser.add_argument("--document", type=Path, help="Markdown file of every simulated case")
    parser.add_argument("--page", type=Path, help="page whose section Results is replaced")
    arguments = parser.parse_args()
    known = json.loads(arguments.out.read_text()) if arguments.out.exists() else {"cases": []}
    done = {c["name"]: c for c in known["cases"] if c["iterations"] == arguments.iterations}
    wanted = [n for n in list_cases() if arguments.all or load_case(n).figure == "Fig. 10"]
    wanted = [n for n in wanted if arguments.cases in n]
    warm_up()
    for number, name in enumerate(wanted, start=1):
        if name not in done:
            done[name] = simulate(name, arguments.iterations)
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
