"""Faults injected, inputs fuzzed, memory over many iterations; writes docs/reliability.md.

    python benchmarks/reliability.py --out docs/reliability.md [--kills 5] [--iterations 1000] [--inputs 100000]

Parts: `kill` (a rank is killed in every phase; the others must name it, restarts must give the same curve), `saves`
(a process is killed at random times of saving), `leak` (random strategies on 4 ranks), `fuzz`. Ranks are CPU processes
on one machine (gloo); it uses the helpers of the tests.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import random
import shutil
import statistics
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))

import faults
import psutil
import test_checkpoint_files
import test_faults
from distributed import run_distributed
from engines import start_hydra
from fuzzing import check, mutate, targets
from models import VOCAB_SIZE, tiny
from single_process import random_examples

STRATEGIES = (
    "4x<1,1>", "1x<4,1>", "1x<2,1> + 1x<1,2>", "1x<1,4>", "1x<2,2>", "1x<1,3> + 1x<1,1>", "2x<2,1>",
    "1x<2,1> + 1x<1,1>", "2x<1,2>", "1x<1,2> + 2x<1,1>",
)  # fmt: skip


def measure_kills(folder: Path, num_rounds: int) -> str:
    """One row per phase: runs, ranks that named the lost one, seconds to detect, curve after restarts."""
    faults.HANG_S = 600
    whole = folder / "whole"
    faults.run_until_end(test_faults.train_to_the_end, 3, whole, str(whole))
    wanted = dict(faults.read_json_lines(whole / "losses"))
    named: dict[str, list[bool]] = {}
    detected: dict[str, list[float]] = {}
    resumed: list[float] = []
    num_same = num_losses = 0
    for round_ in range(num_rounds):
        parts = folder / f"parts{round_}"
        for where, victim, at in test_faults.KILLS:
            victim = (victim + round_) % 3
            start = time.monotonic()
            ended = faults.run_until_end(
                test_faults.train_to_the_end, 3, parts, str(parts), where, victim, at
            )
            others = [rank for i, rank in enumerate(ended) if i != victim]
            named.setdefault(where, []).extend(
                f"rank {victim} is gone" in rank.stderr and rank.exit_code != 0 for rank in others
            )
            detected.setdefault(where, []).append(max(rank.seconds_after_fault for rank in others))
            resumed.append(time.monotonic() - start)
        faults.run_until_end(test_faults.train_to_the_end, 3, parts, str(parts))
        losses = faults.read_json_lines(parts / "losses")
        num_same += sum(wanted[iteration] == loss for iteration, loss in losses)
        num_losses += len(losses)
    rows = [
        f"| {where} | {len(detected[where])} | {sum(named[where])} of {len(named[where])} "
        f"| {statistics.median(detected[where]):.2f} | {max(detected[where]):.2f} |"
        for where in detected
    ]
    return "\n".join(
        [
            "SIGKILL of one rank of three, restart from the last checkpoint, until ten iterations are trained. "
            "Seconds: from the kill until the last of the other processes has ended with an error that names it.",
            "",
            "| killed in | runs | processes that named the rank | median s | worst s |",
            "|---|---|---|---|---|",
            *rows,
            "",
            f"Losses equal to the uninterrupted run, bit for bit: **{num_same} of {num_losses}**. A start, with "
            f"imports paid, resume and its iterations until the kill took {statistics.median(resumed):.1f} s (median).",
        ]
    )


def measure_saves(folder: Path, num_kills: int) -> str:
    """How often a process was killed while it saved, and what could be loaded then."""
    test_checkpoint_files.save(folder, "step0", 0.0, numel=200_000)
    generator, num_good = random.Random(3), 0
    for attempt in range(1, num_kills + 1):
        process = multiprocessing.get_context("fork").Process(
            target=test_checkpoint_files.save_many, args=(folder, attempt)
        )
        process.start()
        time.sleep(generator.uniform(0.005, 0.08))
        process.kill()
        process.join()
        num_good += test_checkpoint_files.load(folder) >= 0
    return (
        f"A process that saves without pause was killed {num_kills} times, 5 to 80 ms after its start; `latest` named "
        f"a checkpoint whose files all had their digests **{num_good} times**. The tests also kill it at every single "
        "operation on a file or folder, and in every write."
    )


def train_long(num_iterations: int) -> list[tuple[int, int, int]]:
    """(RSS bytes, open files, process groups) of this rank, every tenth of the run."""
    engine = start_hydra(tiny("llama_tied"))
    process = psutil.Process(os.getpid())
    generator = random.Random(5)  # the same choices on every rank
    samples = []
    for iteration in range(num_iterations):
        lengths = [generator.randint(2, 60) for _ in range(generator.randint(4, 12))]
        engine.train_batch(
            random_examples(lengths, VOCAB_SIZE, seed=iteration), strategy=generator.choice(STRATEGIES)
        )
        if iteration % max(1, num_iterations // 10) == max(1, num_iterations // 10) - 1:
            groups = len(engine.hydra.propagator.groups)
            samples.append((process.memory_info().rss, process.num_fds(), groups))
    return samples


def measure_leak(num_iterations: int) -> str:
    """Growth between the third tenth (everything compiled and cached) and the last."""
    per_rank = run_distributed(train_long, 4, num_iterations, timeout_s=3600)
    step = num_iterations / 10
    rows = []
    for rank, samples in enumerate(per_rank):
        rss = [sample[0] for sample in samples[2:]]
        xs = [step * i for i in range(len(rss))]
        slope, _ = statistics.linear_regression(xs, rss)
        rows.append(
            f"| {rank} | {rss[0] / 2**20:.1f} | {rss[-1] / 2**20:.1f} | {slope:+.0f} "
            f"| {samples[2][1]} -> {samples[-1][1]} | {samples[2][2]} -> {samples[-1][2]} |"
        )
    return "\n".join(
        [
            f"{num_iterations:,} iterations on 4 ranks, one of {len(STRATEGIES)} strategies drawn for each, 4 to 12 "
            "sequences of 2 to 60 tokens; after 30% of them and at the end.",
            "",
            "| rank | RSS after 30% (MiB) | at the end | bytes per iteration | open files | process groups |",
            "|---|---|---|---|---|---|",
            *rows,
        ]
    )


def measure_fuzz(folder: Path, num_inputs: int) -> str:
    """Every reader on mutated documents; raises where one crashes, is slow, or asks for memory."""
    rows = []
    for name, (reader, seed) in targets(folder).items():
        generator = random.Random(name)
        before = psutil.Process().memory_info().rss
        accepted, slowest = 0, 0.0
        for _ in range(num_inputs):
            value = mutate(seed, generator)
            start = time.perf_counter()
            accepted += check(reader, value) == "accepted"
            slowest = max(slowest, time.perf_counter() - start)
        growth = (psutil.Process().memory_info().rss - before) / 2**20
        rows.append(f"| {name} | {num_inputs:,} | {accepted:,} | 0 | {slowest * 1e3:.0f} | {growth:.1f} |")
        print(rows[-1], file=sys.stderr)
    return "\n".join(
        [
            "Valid documents with one to three places changed; each is read or refused with an error of ds_hydra. "
            "Anything else, or more than 1 s, ends the benchmark.",
            "",
            "| reader | inputs | accepted | other errors | slowest ms | RSS growth MiB |",
            "|---|---|---|---|---|---|",
            *rows,
        ]
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("docs/reliability.md"))
    parser.add_argument("--kills", type=int, default=5, help="rounds of kills, one per phase each")
    parser.add_argument("--saves", type=int, default=100)
    parser.add_argument("--iterations", type=int, default=1000)
    parser.add_argument("--inputs", type=int, default=100_000)
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="ds_hydra_reliability_"))
    (folder / "saves").mkdir()
    parts = [
        "# Reliability",
        "Written by `python "
        + " ".join(["benchmarks/reliability.py", *sys.argv[1:]])
        + "`; CPU ranks on one "
        f"machine with {os.cpu_count()} cores, gloo.",
        "## A rank is lost",
        measure_kills(folder, options.kills),
        "## A crash while saving",
        measure_saves(folder / "saves", options.saves),
        "## Many iterations",
        measure_leak(options.iterations),
        "## Damaged input",
        measure_fuzz(folder, options.inputs),
    ]
    options.out.write_text("\n\n".join(parts) + "\n", encoding="utf-8")
    shutil.rmtree(folder)


if __name__ == "__main__":
    main()
