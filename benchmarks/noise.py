"""What scattering times do to ds_hydra and to systems that form groups, on the shipped cases.

Command: python -m benchmarks.noise --cases paper/commoncrawl-7b-8gpu-f3 --iterations 20

Times of single micro-batches scatter by 0, 5 and 10%, or those of ranks by 5%. All systems choose
without knowing what is drawn. ds_hydra once plans as without noise, once for the noise there is.
"""

from __future__ import annotations

import argparse
from collections.abc import Collection, Iterator
from dataclasses import replace

from ds_hydra.lab.simulator.cases import load_case
from ds_hydra.lab.simulator.compare import compare
from ds_hydra.lab.simulator.results import Comparison
from ds_hydra.lab.simulator.scenario import Noise
from ds_hydra.lab.simulator.systems import DS_HYDRA, Settings
from ds_hydra.sampler.warm_up import warm_up
from ds_hydra.strategy.cost_models.cluster import find_cluster

RIVALS = ("deepspeed_balanced", "deepspeed_degrees", "flexsp", "fcp")
NOISES = {
    "none": None,
    "micro-batches 5%": Noise(of_micro_batch=0.05),
    "micro-batches 10%": Noise(of_micro_batch=0.1),
    "ranks 5%": Noise(of_rank=0.05),
}


def rows(case: str, iterations: int, names: Collection[str]) -> Iterator[str]:
    """Lines of a Markdown table for those of NOISES with these `names`: ms of ds_hydra, planned
    without and for the noise, and how many times as long each rival takes as the first and as the
    second.
    """
    workload = load_case(case).workload
    workload = workload.linked_by(find_cluster(workload.profile, workload.num_devices))
    known: Comparison | None = None
    for text in names:
        noise = NOISES[text]
        settings = Settings(iterations=iterations, systems=RIVALS, noise=noise)
        found = compare(workload, settings, known)
        known = known or found
        unaware = found
        if noise is not None:
            unplanned = replace(noise, is_planned_for=False)
            alone = replace(settings, systems=(), noise=unplanned)
            unaware = compare(workload, alone, known)
        times = [each.get(DS_HYDRA) for each in (unaware, found)]
        own = [f"{result.iteration_ms.mean():,.0f}" for result in times if result]
        cells = [_over(unaware, found, name) for name in RIVALS]
        yield f"| {case} | {text} | {' | '.join((*own, *cells))} |"


def _over(unaware: Comparison, found: Comparison, name: str) -> str:
    """How many times as long system `name` takes as ds_hydra: planned without the noise, and for
    it.
    """
    rival, *own = found.get(name), unaware.get(DS_HYDRA), found.get(DS_HYDRA)
    if rival is None:
        return "cannot run"
    time_ms = rival.iteration_ms.mean()
    return ", ".join(f"{time_ms / result.iteration_ms.mean():.3f}" for result in own if result)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", nargs="+", default=["paper/commoncrawl-7b-8gpu-f3"])
    parser.add_argument("--iterations", type=int, default=20)
    parser.add_argument("--noises", nargs="+", choices=[*NOISES], default=[*NOISES])
    arguments = parser.parse_args()
    warm_up()
    heads = ("case", "noise", "ds_hydra, planned without", "planned for it", *RIVALS)
    print(f"| {' | '.join(heads)} |\n{'|---' * len(heads)}|")
    for case in arguments.cases:
        for row in rows(case, arguments.iterations, arguments.noises):
            print(row, flush=True)


if __name__ == "__main__":
    main()
