"""Records what pipelines take beside what the profile says, for `benchmarks/learned_times.py`.

    python benchmarks/record_times.py --ranks 4 --workload github --disturbed straggler --out FILE

trains as `end_to_end.py` does, on a profile measured at the start, for 64 iterations (the ranks
learn nothing): every other one under a candidate drawn at random, so that all of them are seen.
From the middle on (`load`: from the start on) a process takes half of a core (`load`, `straggler`
of one rank on its own core), or one rank is stopped for half of the time (`straggler`, where ranks
share cores).
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("DS_ACCELERATOR", "cpu")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import argparse
import json
import multiprocessing
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path

from end_to_end import STRATEGIES, Group, limit_memory, make_task, measure_profile
from end_to_end_tables import Settings
from training_setup import ModelSize
from workloads import WORKLOADS

from ds_hydra.sampler.warm_up import warm_up
from ds_hydra.strategy import Profile

CANDIDATES = {1: ("1x<1,1>", "1x<1,1;ckpt=2>"), **STRATEGIES}
DISTURBANCES = ("quiet", "load", "straggler")
_STOPPED_S = 0.02


def _busy(core: int) -> None:
    os.sched_setaffinity(0, {core})
    while True:
        pass


@contextmanager
def busy_process(core: int) -> Iterator[None]:
    """A process on `core` that never rests."""
    process = multiprocessing.get_context("fork").Process(target=_busy, args=(core,), daemon=True)
    process.start()
    try:
        yield
    finally:
        process.kill()
        process.join()


@contextmanager
def _half_stopped(pid: int) -> Iterator[None]:
    is_over = threading.Event()

    def stop_and_go() -> None:
        while not is_over.is_set():
            os.kill(pid, signal.SIGSTOP)
            time.sleep(_STOPPED_S)
            os.kill(pid, signal.SIGCONT)
            time.sleep(_STOPPED_S)

    thread = threading.Thread(target=stop_and_go)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()


def record(settings: Settings, workload: str, disturbed: str, profile_path: Path) -> list[dict]:
    """Metrics of all iterations; the profile is left at `profile_path`."""
    cores = sorted(os.sched_getaffinity(0))
    num, ranks = settings.iterations, settings.num_ranks
    task = make_task(WORKLOADS[workload], settings, profile_path, CANDIDATES[ranks])
    measure_profile(task, cores)
    if WORKLOADS[workload].limits_memory:
        limit = limit_memory(Profile.load(profile_path), settings)
        task = replace(task, memory_limit_bytes=limit)
    steps = []
    with Group("explored", task, cores) as group:
        group.answers()
        slow = ranks - 1
        disturb = {
            "quiet": nullcontext,
            "load": lambda: busy_process(cores[0]),
            "straggler": lambda: (
                busy_process(cores[slow])
                if ranks <= len(cores)
                else _half_stopped(group.pids[slow])
            ),
        }[disturbed]
        begin = 0 if disturbed == "load" else num // 2
        for _ in range(begin):
            steps.append(group.step()["metrics"])
        with disturb():
            for _ in range(begin, num):
                steps.append(group.step()["metrics"])
    return steps


def compact(metrics: dict) -> list:
    """[strategy, iteration_ms, waited_ms, [measured ms and predicted ms of each pipeline]]."""
    return [
        metrics["strategy"],
        round(metrics["iteration_ms"], 2),
        round(metrics["waited_ms"], 2),
        [
            [round(p["measured_ms"], 2), round(p["predicted_ms"], 2), p["num_tokens"]]
            for p in metrics["pipelines"]
        ],
    ]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, choices=list(CANDIDATES), default=4)
    parser.add_argument("--workload", choices=list(WORKLOADS), default="github")
    parser.add_argument("--disturbed", choices=DISTURBANCES, default="quiet")
    parser.add_argument("--iterations", type=int, default=64)
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    settings = Settings(
        num_ranks=args.ranks,
        context_length=args.context,
        tokens_per_iteration=args.ranks * args.context,
        iterations=args.iterations,
        warmup=0,
        model=ModelSize(),
    )
    warm_up()
    load = os.getloadavg()[0]
    profile_path = args.out.with_suffix(".profile")
    steps = record(settings, args.workload, args.disturbed, profile_path)
    profile_path.unlink()
    document = {
        "ranks": args.ranks,
        "workload": args.workload,
        "disturbed": args.disturbed,
        "cores": len(os.sched_getaffinity(0)),
        "load_before": round(load, 1),
        "iterations": [compact(metrics) for metrics in steps],
    }
    args.out.write_text(json.dumps(document, separators=(",", ":")) + "\n")


if __name__ == "__main__":
    main()
