"""`score` and a GRPO step against ZeRO-3 on Karmarkar-Karp's rows, on the same rollouts in one run.

    python benchmarks/rollouts.py

Contenders take turns as in `end_to_end.py`, one global batch each in a new order every time, every
rank on a core of its own. A line says the median time, and the ratio of medians and its spread over
global batches; losses and gradient norms are compared. Needs a machine that does nothing else.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("DS_ACCELERATOR", "cpu")

import numpy as np
from end_to_end import hardware, take_turns
from training_setup import ModelSize, Task
from workloads import Shape

from ds_hydra.sampler.warm_up import warm_up

NUM_RANKS, NUM_ROLLOUTS, SHORTEST, CONTEXT = 2, 64, 32, 4096
MEMORY_LIMIT_BYTES = 850_000_000
"""ds_hydra's: about the 8,192 tokens of a micro-batch that the others have too."""
TITLES = {
    "rollouts_kk_tokens": "ZeRO-3, Karmarkar-Karp on tokens, rows of 8,192",
    "rollouts_kk_flops": "ZeRO-3, Karmarkar-Karp on FLOPs, rows of 8,192",
    "rollouts_kk_flops_one_row": "ZeRO-3, Karmarkar-Karp on FLOPs, one row for each rank",
    "rollouts_hydra": "ds_hydra, `score` and `train_batch(loss=GRPO())`",
}


def draw(num: int, context: int, median: float, seed: int = 0) -> list[tuple[int, ...]]:
    """Lengths of `num` global batches of rollouts: log-normal (sigma 1), cut at 32 and the context;
    the longest of each is the context, where a generator was stopped.
    """
    rng = np.random.Generator(np.random.PCG64(seed))
    batches = []
    for _ in range(num):
        lengths = np.exp(rng.normal(np.log(median), 1.0, NUM_ROLLOUTS))
        lengths = np.clip(lengths, min(SHORTEST, context // 2), context).astype(int)
        lengths[rng.integers(NUM_ROLLOUTS)] = context
        batches.append(tuple(int(n) for n in lengths))
    return batches


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--iterations", type=int, default=8)
    parser.add_argument("--warmup", type=int, default=1)
    parser.add_argument("--median", type=float, default=350, help="length (default %(default)s)")
    parser.add_argument("--contenders", nargs="+", choices=list(TITLES), default=list(TITLES))
    parser.add_argument("--quick", action="store_true", help="tiny: shows that everything runs")
    parser.add_argument("--out", type=Path, default=Path("runs/rollouts.json"))
    args = parser.parse_args()
    model, context = ModelSize(), CONTEXT
    if args.quick:
        model = ModelSize(hidden_size=64, intermediate_size=128, vocab_size=256)
        context, args.iterations, args.median = 256, 2, 40
    num = args.warmup + args.iterations
    batches = draw(num, context, args.median)
    task = Task(
        workload="rollouts",
        batches=batches,
        shape=Shape(
            num_ranks=NUM_RANKS,
            context_length=context,
            tokens_per_iteration=max(map(sum, batches)),
            linear_flops=model.linear_flops,
            quadratic_flops=model.quadratic_flops,
        ),
        model=model,
        memory_limit_bytes=None if args.quick else MEMORY_LIMIT_BYTES,
        strategies=("2x<1,1>", "1x<sp2,1>"),
    )
    cores = sorted(os.sched_getaffinity(0))
    warm_up()
    names = [*dict.fromkeys([*args.contenders, "rollouts_hydra"])]
    load_before = os.getloadavg()[0]
    steps, failures = take_turns(names, task, cores, num)
    document = {
        "hardware": hardware(cores),
        "date": time.strftime("%Y-%m-%d"),
        "load": [load_before, os.getloadavg()[0]],
        "batches": [list(batch) for batch in batches[args.warmup :]],
        "contenders": {name: taken[args.warmup :] for name, taken in steps.items()},
        "failures": failures,
    }
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(document) + "\n")
    print(make_table(document))


def make_table(document: dict) -> str:
    """What was measured, as Markdown."""
    steps = document["contenders"]
    tokens = [sum(batch) for batch in document["batches"]]
    own = np.array([step["seconds"] for step in steps["rollouts_hydra"]])
    lines = [
        f"{len(tokens)} global batches of {NUM_ROLLOUTS} rollouts, {min(map(min, document['batches']))} to "
        f"{max(map(max, document['batches']))} tokens, {int(np.median(tokens)):,} in all (median). "
        f"{document['hardware']}; load {document['load'][0]:.1f} before, {document['load'][1]:.1f} after.",
        "",
        "| contender | median | CPU time of the slower rank | ds_hydra is faster by | by global batch |",
        "|---|---|---|---|---|",
    ]
    for name, taken in steps.items():
        seconds = np.array([step["seconds"] for step in taken])
        cpu = np.median([max(step["cpu_seconds"]) for step in taken])
        ratios = seconds / own
        lines.append(
            f"| {TITLES[name]} | {np.median(seconds):.2f} s | {cpu:.2f} s | "
            f"{np.median(ratios):.2f} | {ratios.min():.2f} to {ratios.max():.2f} |"
        )
    chosen = [step["metrics"]["strategy"] for step in steps["rollouts_hydra"]]
    counts = ", ".join(f"`{s}` {chosen.count(s)}" for s in dict.fromkeys(chosen))
    norms = [[step["metrics"]["grad_norm"] for step in taken] for taken in steps.values()]
    spread = np.ptp(norms, axis=0) / np.mean(norms, axis=0)
    lines += ["", f"Strategies: {counts}. Gradient norms differ by {spread.max():.1e} at most."]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
