"""ds_hydra against its closest rivals on global batches that people use today.

Command: python -m benchmarks.global_batches --model 7b --devices 8 --tokens 200000 --iterations 5

LLaMA 7B on 8 and 64 devices, 32B on 64 and 256, 0.2 to 4 million tokens in an iteration, on four
kinds of lengths: the shipped CommonCrawl and GitHub, chats (lognormal, median 540) and rollouts
(lognormal, median 6,000), all up to 32K. A line says the mean time of ds_hydra's own iterations,
how many times as long each rival takes, and what CPU time the point took, proposal included.
"""

from __future__ import annotations

import argparse
import time
from itertools import product

import numpy as np

from ds_hydra.configs import find_file
from ds_hydra.lab.simulator.cases import Workload
from ds_hydra.lab.simulator.compare import compare
from ds_hydra.lab.simulator.systems import DS_HYDRA, Settings
from ds_hydra.sampler.warm_up import warm_up
from ds_hydra.strategy.cost_models.cluster import find_cluster
from ds_hydra.strategy.cost_models.costs import Costs
from ds_hydra.strategy.profiles.profile import Profile
from ds_hydra.strategy.proposal.histogram import LengthHistogram

RIVALS = (
    "zero3", "deepspeed_balanced", "deepspeed_degrees", "flexsp", "flexsp_hidden", "fcp", "dynamic_cp",
)  # fmt: skip
CONTEXT = 32768
LOGNORMAL = {"chat": (540, 1.1), "rollout": (6000, 0.8)}
"""Median in tokens and standard deviation of the logarithm; the deviations are assumed."""
LENGTHS = ("commoncrawl", "github", *LOGNORMAL)
NUM_DRAWN = 200_000


def histogram(name: str) -> LengthHistogram:
    """The shipped one of that name, or a lognormal one."""
    if name not in LOGNORMAL:
        return LengthHistogram.load(find_file("lengths", name))
    median, sigma = LOGNORMAL[name]
    drawn = np.random.Generator(np.random.PCG64(0)).lognormal(np.log(median), sigma, NUM_DRAWN)
    lengths, counts = np.unique(np.clip(drawn, 8, CONTEXT).astype(np.int64), return_counts=True)
    return LengthHistogram.from_counts(dict(zip(lengths.tolist(), counts.tolist())), name=name)


def row(model: str, num_devices: int, tokens: int, lengths: str, iterations: int) -> str:
    """One line of the table."""
    profile = Profile.load(find_file("profiles", f"a800_llama2_{model}"))
    start = time.process_time()
    found = compare(
        Workload(
            name=f"{model} on {num_devices}",
            costs=Costs(profile, find_cluster(profile, num_devices)),
            histogram=histogram(lengths).limit(CONTEXT),
            num_devices=num_devices,
            context_length=CONTEXT,
            tokens_per_iteration=tokens,
        ),
        Settings(iterations=iterations, systems=RIVALS).sized(tokens),
    )
    own = found.get(DS_HYDRA)
    assert own is not None
    ratios = [found.speedup(name) for name in RIVALS]
    cells = [f"{ratio.value:.3f}" if ratio else "cannot run" for ratio in ratios]
    took = f"{time.process_time() - start:.0f}"
    head = (model, str(num_devices), f"{tokens / 1e6:g} M", lengths, str(own.iteration_ms.size))
    return f"| {' | '.join((*head, f'{own.iteration_ms.mean():,.0f}', *cells, took))} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", choices=("7b", "13b", "32b"), default="7b")
    parser.add_argument("--devices", type=int, nargs="+", default=[8])
    parser.add_argument("--tokens", type=int, nargs="+", default=[200_000])
    parser.add_argument("--lengths", choices=LENGTHS, nargs="+", default=list(LENGTHS))
    parser.add_argument(
        "--iterations", type=int, default=5, help="global batches, fewer of many tokens"
    )
    arguments = parser.parse_args()
    warm_up()
    heads = (
        "model",
        "devices",
        "tokens",
        "lengths",
        "global batches",
        "ds_hydra, ms",
        *RIVALS,
        "CPU s",
    )
    print(f"| {' | '.join(heads)} |\n{'|---' * len(heads)}|", flush=True)
    for devices, tokens, lengths in product(arguments.devices, arguments.tokens, arguments.lengths):
        print(row(arguments.model, devices, tokens, lengths, arguments.iterations), flush=True)


if __name__ == "__main__":
    main()
