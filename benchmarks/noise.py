"""What scattering times do to ds_hydra and to systems that form groups, on the shipped cases.

Command: python -m benchmarks.noise --cases paper/commoncrawl-7b-8gpu-f3 --iterations 20

Times of single micro-batches scatter by 0, 5 and 10%, or those of ranks by 5%. All systems choose
without knowing what is drawn.
"""

from __future__ import annotations

import argparse
from collections.abc import Collection, Iterator

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
    """Lines of a Markdown table for those of NOISES with these `names`: ms of ds_hydra, and how
    many times as long each rival takes.
    """
    workload = load_case(case).workload
    workload = workload.linked_by(find_cluster(workload.profile, workload.num_devices))
    known: Comparison | None = None
    for text in names:
        settings = Settings(iterations=iterations, systems=RIVALS, noise=NOISES[text])
        found = compare(workload, settings, known)
        known = known or found
        times_ms = {result.name: result.iteration_ms.mean() for result in found.results}
        own_ms = times_ms[DS_HYDRA]
        over = [f"{times_ms[n] / own_ms:.3f}" if n in times_ms else "cannot run" for n in RIVALS]
        yield f"| {case} | {text} | {own_ms:,.0f} | {' | '.join(over)} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", nargs="+", default=["paper/commoncrawl-7b-8gpu-f3"])
    parser.add_argument("--iterations", type=int, default=20)
    parser.add_argument("--noises", nargs="+", choices=[*NOISES], default=[*NOISES])
    arguments = parser.parse_args()
    warm_up()
    heads = ("case", "noise", "ds_hydra", *RIVALS)
    print(f"| {' | '.join(heads)} |\n{'|---' * len(heads)}|")
    for case in arguments.cases:
        for row in rows(case, arguments.iterations, arguments.noises):
            print(row, flush=True)


if __name__ == "__main__":
    main()
