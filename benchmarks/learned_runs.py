"""What learning from measured times wins end to end: a straggler.

    python benchmarks/learned_runs.py

Two runs of ds_hydra on 2 ranks take turns, iteration by iteration, on the same global batches, with
and without corrections; from iteration 40 on a process that never rests shares the core of the last
rank. Compared from 16 iterations later on.

Prints a Markdown table of ratios of pairs: median and quartiles. Needs a machine that does nothing
else.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("DS_ACCELERATOR", "cpu")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import argparse
import tempfile
from contextlib import ExitStack
from pathlib import Path

import numpy as np
from end_to_end import STRATEGIES, hardware, make_task, measure_profile, take_turns
from end_to_end_tables import Settings
from record_times import busy_process
from training_setup import ModelSize, Task
from workloads import WORKLOADS

from ds_hydra.sampler.warm_up import warm_up

NUM_RANKS, SLOW_FROM, MOVED_AFTER = 2, 40, 16


def times_of(names: list[str], task: Task, cores: list[int], slow_from: int | None) -> np.ndarray:
    """[contender, iteration], seconds; a process shares the last rank's core from `slow_from`."""
    with ExitStack() as stack:

        def disturb(number: int) -> None:
            if number == slow_from:
                stack.enter_context(busy_process(cores[-1]))

        steps, _ = take_turns(names, task, cores, len(task.batches) - 1, disturb)
    return np.array([[step["seconds"] for step in steps[name]] for name in names])


def row(what: str, ratios: np.ndarray) -> str:
    low, middle, high = np.quantile(ratios, [0.25, 0.5, 0.75])
    return f"| {what} | {middle:.2f} ({low:.2f}-{high:.2f}) | {ratios.size} |"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--iterations", type=int, default=80)
    parser.add_argument("--context", type=int, default=1024)
    args = parser.parse_args()
    cores = sorted(os.sched_getaffinity(0))[:NUM_RANKS]
    settings = Settings(
        num_ranks=NUM_RANKS,
        context_length=args.context,
        tokens_per_iteration=NUM_RANKS * args.context,
        iterations=args.iterations,
        warmup=0,
        model=ModelSize(),
    )
    warm_up()
    load = os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "profile.json"
        task = make_task(WORKLOADS["github"], settings, path, STRATEGIES[NUM_RANKS])
        measure_profile(task, cores)
        print(f"{hardware(cores)}, load {load:.1f} at the start\n", flush=True)
        print("| time of the first over the second | median (quartiles) | iterations |", flush=True)
        print("|---|---|---|")
        with_slow, without = times_of(["hydra_profiled", "hydra"], task, cores, SLOW_FROM)
        moved = slice(SLOW_FROM + MOVED_AFTER, None)
        print(row("a straggler: not corrected, corrected", (with_slow / without)[moved]))
        print(row("before it", (with_slow / without)[MOVED_AFTER:SLOW_FROM]), flush=True)


if __name__ == "__main__":
    main()
