"""Figures of the simulator on the paper's cases: a Markdown table on stdout, all numbers in a JSON file.

Command: python -m benchmarks.simulate --iterations 100 --out docs/benchmarks/simulate.json    (one core is used)

A case that OUT holds already, with the same number of iterations, is not simulated again.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from ds_hydra.sampler.planner import warm_up
from ds_hydra.simulator.cases import list_cases, load_case
from ds_hydra.simulator.cluster import find_cluster
from ds_hydra.simulator.compare import STATIC_SYSTEMS, Settings, compare

TARGETS = {
    "commoncrawl": {"given": (1.59, 1.70), "megatron": (1.47, 1.55), "best two-stage": (None, 1.15)},
    "github": {"given": (1.32, 1.45), "megatron": (1.22, 1.35), "best two-stage": (None, 1.08)},
}
"""Floor and aim of each geometric mean over the cases of Fig. 10."""
TWO_STAGE = ("two_stage", "static")
KEYS = ("speedup_of_propagation", "speedup")


def simulate(name: str, iterations: int) -> dict[str, Any]:
    workload = load_case(name).workload
    start = time.perf_counter()
    found = compare(
        workload, find_cluster(workload.profile, workload.num_devices), Settings(iterations=iterations)
    )
    return {**found.to_json(), "wall_s": time.perf_counter() - start}


def fig10_cases() -> list[str]:
    return [name for name in list_cases() if load_case(name).figure == "Fig. 10"]


def speedups(case: dict[str, Any], key: str) -> dict[str, float]:
    """Speed-up over each system; over the faster of the two systems that use the two-stage assignment."""
    found = {system["name"]: system[key] for system in case["systems"]}
    return {**found, "best two-stage": min(found[name] for name in TWO_STAGE)}


def geometric_mean(values: list[float]) -> float:
    return float(np.exp(np.mean(np.log(values))))


def case_table(cases: list[dict[str, Any]]) -> list[str]:
    lines = [
        "| case | propagation, ms | over Table 3 | over tuned | over tuned rows | over KK | over homogeneous two-stage "
        "| over static two-stage | iteration over tuned | imbalance | above the bound |",
        "|---" * 11 + "|",
    ]
    for case in cases:
        ours, ratio = case["systems"][0], speedups(case, "speedup_of_propagation")
        error = ours["propagation_ms_standard_error"]
        names = ("given", "megatron", "megatron_rows", "balanced", "two_stage", "static")
        cells = [
            case["name"].removeprefix("paper/"),
            f"{ours['propagation_ms']:,.0f} ± {error:,.0f}",
            *(f"{ratio[name]:.2f}" for name in names),
            f"{speedups(case, 'speedup')['megatron']:.2f}",
            f"{ours['imbalance']:.3f}",
            f"{case['distance_to_bound']:.1%}",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def mean_table(cases: list[dict[str, Any]]) -> list[str]:
    lines = [
        "| speed-up over (geometric mean of 18 cases) | propagation | smallest, largest "
        "| whole iterations | floor | aim |",
        "|---" * 6 + "|",
    ]
    labels = {system["name"]: system["label"] for case in cases for system in case["systems"]}
    for histogram, targets in TARGETS.items():
        mine = [case for case in cases if case["histogram"].startswith(histogram)]
        names = [*targets, *(n for n in labels if n not in targets and n != "ds_hydra")]
        for name in names:
            found = {key: [speedups(c, key)[name] for c in mine if name in speedups(c, key)] for key in KEYS}
            if not found["speedup"]:
                continue
            propagation, iteration = found["speedup_of_propagation"], found["speedup"]
            floor, aim = targets.get(name, (None, None))
            cells = [
                f"{histogram}: {labels.get(name, 'best static with two-stage assignment')}",
                f"{geometric_mean(propagation):.3f}",
                f"{min(propagation):.2f}, {max(propagation):.2f}",
                f"{geometric_mean(iteration):.3f}",
                "" if floor is None else f"{floor:.2f}",
                "" if aim is None else f"{aim:.2f}",
            ]
            lines.append(f"| {' | '.join(cells)} |")
        imbalance = float(np.mean([c["systems"][0]["imbalance"] for c in mine]))
        bound = float(np.mean([c["distance_to_bound"] for c in mine]))
        lines.append(f"| {histogram}: imbalance of ds_hydra, mean | {imbalance:.3f} | | | | 0.05 |")
        lines.append(
            f"| {histogram}: propagation above the perfect-balance bound, mean | {bound:.1%} | | | | |"
        )
    return lines


def slower_cases(cases: list[dict[str, Any]]) -> list[str]:
    """Cases in which a static system is faster, by propagation or whole iterations."""
    return [
        f"{case['name']}: {name} {key} {speedups(case, key)[name]:.3f}"
        for case in cases
        for key in KEYS
        for name in STATIC_SYSTEMS
        if speedups(case, key).get(name, 1.0) < 1.0
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--iterations", type=int, default=100)
    parser.add_argument("--out", type=Path, required=True, help="JSON file with all numbers")
    arguments = parser.parse_args()
    known = json.loads(arguments.out.read_text()) if arguments.out.exists() else {"cases": []}
    done = {c["name"]: c for c in known["cases"] if c["iterations"] == arguments.iterations}
    warm_up()
    for name in fig10_cases():
        if name not in done:
            done[name] = simulate(name, arguments.iterations)
            print(f"{name}: {done[name]['wall_s']:.1f} s", file=sys.stderr, flush=True)
            arguments.out.write_text(json.dumps({"cases": list(done.values())}, indent=1) + "\n")
    cases = [done[name] for name in fig10_cases()]
    slower = slower_cases(cases)
    print("\n".join([*mean_table(cases), "", *case_table(cases), ""]))
    print("slower than a static system: " + ("; ".join(slower) or "in no case"))


if __name__ == "__main__":
    main()
