"""Faults injected, inputs fuzzed, memory over many iterations; writes docs/reliability.md.

    python benchmarks/reliability.py --out docs/reliability.md [PART ...]

Parts: `kill` (a rank is killed in every phase of an iteration; the others must name it, restarts
must give the same curve), `phases` (a rank is killed or stopped in every phase between an engine's
start and its end; the other one must name it, and nothing may be left behind), `between` (the same
in callbacks, under TRL and in the user's own collectives), `gathered` (a rank is killed at
random times while layers are gathered), `launch` (kills under torchrun and deepspeed),
`planner` (planning processes killed and stopped), `saves` (a process is killed at random times of
saving), `leak` (random strategies on 4 ranks), `shm` (a /dev/shm of 64 MB, mounted as root),
`folders` (damaged run folders are read or refused), `documents` (damaged documents of every
command), `configurations` (hostile values and Python objects), `examples` (every script, twice on 2
ranks, and its log), `fuzz`. Each replaces its section of the page, whose other sections stay. What
was measured is recorded in `--state` at once: an interrupted command continues where it was,
`--fresh` begins anew. Ranks are CPU processes on one machine (gloo); it uses the helpers of the
tests.
"""

from __future__ import annotations

import argparse
import gc
import json
import logging
import multiprocessing
import os
import random
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))

import command_documents
import faults
import hypothesis
import psutil
import restarted_script
import test_background
import test_checkpoint_files
import test_faults
import test_restarts
import torch.distributed as dist
from distributed import run_distributed
from engines import start_hydra
from example_runs import measure_examples
from fuzzing import check, fuzz_run_folders, inputs_like, targets
from holdings import Holdings, train_random_iteration
from lost_ranks import measure_between, measure_gathered, measure_kills, measure_phases
from models import tiny
from pages import how, put_section
from reliability_page import PARTS, STRATEGIES_OF_2, Records

LAUNCHES = (
    ("torchrun", "1:3:forward"), ("deepspeed", "1:5:backward"), ("torchrun", "0:5:push"), ("deepspeed", "0:4:pull"),
)  # fmt: skip
"""Launcher, and rank:iteration:phase of the kill."""

HYPOTHESIS_PIECE = 10_000
"""Inputs after which hypothesis starts anew with another seed; a piece is what an interruption
loses.
"""


def measure_launches(records: Records) -> None:
    """A rank is killed under a launcher; torchrun restarts by itself, deepspeed is started
    again.
    """
    folder = records.folder / "launch"
    whole = folder / "whole"

    def run_whole() -> dict[str, Any]:
        shutil.rmtree(whole, ignore_errors=True)
        faults.run_until_end(restarted_script.main, 2, whole, whole, [])
        return {"curve": faults.read_json_lines(whole / "losses")}

    records.measure("launch", {"launcher": "none"}, run_whole)
    wanted = dict(records.of("launch")[0]["curve"])
    for launcher, death in LAUNCHES:
        run = folder / f"{launcher} {death}"

        def launch(launcher: str = launcher, death: str = death, run: Path = run) -> dict[str, Any]:
            shutil.rmtree(run, ignore_errors=True)
            run.mkdir(parents=True)
            if launcher == "torchrun":
                codes = [test_restarts.torchrun(run, death)]
            else:
                codes = [test_restarts.deepspeed(run, "first.log", death)]
                codes += [test_restarts.deepspeed(run, "second.log")]
            text = "".join(path.read_text() for path in run.glob("*.log"))
            losses = faults.read_json_lines(run / "losses")
            starts = faults.read_json_lines(run / "starts")
            fault = float((run / "fault").read_text())
            return {
                "codes": codes,
                "named": f"rank {death[0]} is gone" in text,
                "num_losses": len(losses),
                "num_same": sum(wanted[iteration] == loss for iteration, loss in losses),
                "last": losses[-1][0],
                "steps": [step for step, *_ in starts],
                "resume_s": starts[-1][1] - fault,
            }

        records.measure("launch", {"launcher": launcher, "death": death}, launch)


def measure_planner(records: Records, num_faults: int) -> None:
    """A planning process is killed or stopped while it works; the plan must be the same, or the
    heuristic's.
    """
    logging.getLogger("ds_hydra.sampler.background").setLevel(logging.ERROR)

    def inject(fault: str) -> dict[str, Any]:
        batches = test_background.BATCHES
        with test_background.make_planner(num_workers=0) as planner:
            planner.submit(batches[0])
            wanted = planner.get(0).plan
        num_same, seconds = 0, []
        with test_background.make_planner(num_workers=1, deadline_s=120.0) as planner:
            planner.submit(batches[0])
            planner.get(0)
            for attempt in range(num_faults):
                (pid,) = planner.worker_pids
                os.kill(pid, signal.SIGSTOP)
                planner.deadline_s = 120.0 if fault == "killed" else 0.5
                planner.submit(batches[1])
                begin = time.monotonic()
                if fault == "killed":
                    os.kill(pid, signal.SIGKILL)
                assert planner.get(1).source == ("worker" if fault == "killed" else "deadline")
                planner.deadline_s = 120.0
                planner.submit(batches[0])
                num_same += planner.get(0).plan == wanted
                seconds.append(time.monotonic() - begin)
                print(f"  planning process {fault}: {attempt + 1} of {num_faults}", file=sys.stderr)
        return {
            "num_faults": num_faults,
            "num_same": num_same,
            "seconds": statistics.median(seconds),
        }

    for fault in ("killed", "stopped"):
        records.measure("planner", {"fault": fault}, lambda fault=fault: inject(fault))


def save_many(save_dir: Path, attempt: int) -> None:
    """Save more checkpoints than any machine does before it is killed."""
    for step in range(1000):
        tag, value = f"step{attempt}_{step % 3}", float(attempt * 1000 + step)
        test_checkpoint_files.save(save_dir, tag, value, numel=200_000)


def measure_saves(records: Records, num_kills: int) -> None:
    """How often a process was killed while it saved, and what could be loaded then."""

    def kill() -> dict[str, Any]:
        folder = records.folder / "saves"
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        test_checkpoint_files.save(folder, "step0", 0.0, numel=200_000)
        generator, num_good = random.Random(3), 0
        for attempt in range(1, num_kills + 1):
            process = multiprocessing.get_context("fork").Process(
                target=save_many, args=(folder, attempt)
            )
            process.start()
            time.sleep(generator.uniform(0.005, 0.08))
            process.kill()
            process.join()
            num_good += test_checkpoint_files.load(folder) >= 0
        return {"num_kills": num_kills, "num_good": num_good}

    records.measure("saves", {}, kill)


def train_long(num_iterations: int) -> list[dict[str, int]]:
    """What this rank holds, forty times in the run."""
    engine = start_hydra(tiny("llama_tied"))
    generator = random.Random(5)  # the same choices on every rank
    samples = []
    every = max(1, num_iterations // 40)
    for iteration in range(num_iterations):
        train_random_iteration(engine, generator, iteration)
        if iteration % every == every - 1:
            samples.append({"iteration": iteration + 1, **asdict(Holdings.of(engine))})
            if dist.get_rank() == 0:
                print(f"  {json.dumps(samples[-1])}", file=sys.stderr, flush=True)
    dist.barrier()  # ranks that leave close connections
    return samples


def measure_leak(records: Records, num_iterations: int) -> None:
    """One run; it cannot continue, because memory is the process's."""
    records.measure(
        "leak",
        {"iterations": num_iterations},
        lambda: {"ranks": run_distributed(train_long, 4, num_iterations, timeout_s=3 * 3600)},
    )


def train_in_shared_memory() -> dict[str, Any]:
    """Losses of an iteration of each of `STRATEGIES_OF_2`; the most bytes that /dev/shm held."""
    engine = start_hydra(tiny("llama_tied"))
    losses, used = [], []
    for iteration, strategy in enumerate(STRATEGIES_OF_2):
        losses.append(float(engine.train_batch(test_faults.data_of(iteration), strategy=strategy)))
        room = shutil.disk_usage("/dev/shm")
        used.append(room.used)
    engine.destroy()
    return {"losses": losses, "most_bytes": max(used), "room_bytes": room.total}


def print_training() -> None:
    """What `measure_shared_memory` starts where /dev/shm is small."""
    ranks = run_distributed(train_in_shared_memory, 2)
    print(json.dumps({"ranks": ranks, "left": sorted(os.listdir("/dev/shm"))}))


def measure_shared_memory(records: Records) -> None:
    """Two ranks train, layers gathered too, with /dev/shm as it is and with one of 64 MB."""
    mount = "mount -t tmpfs -o size=64m tmpfs /dev/shm && "
    for name, prepare in (("whole", ""), ("64 MB", mount)):
        shell = f'{prepare}exec "$0" -c "import reliability; reliability.print_training()"'
        command = ["unshare", "--mount", "sh", "-c", shell, sys.executable]
        folders = [str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]

        def train(command: list[str] = command, folders: list[str] = folders) -> dict[str, Any]:
            environment = os.environ | {"PYTHONPATH": os.pathsep.join(folders)}
            done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, check=True)
            return dict(json.loads(done.stdout.splitlines()[-1]))

        records.measure("shm", {"name": name}, train)


def measure_folders(records: Records, num_folders: int) -> None:
    """Run folders with damaged files, as `ds-hydra report` reads them; raises where one is neither
    read nor refused, or is slow.
    """

    def read() -> dict[str, Any]:
        with tempfile.TemporaryDirectory() as folder:
            return dict(fuzz_run_folders(Path(folder), num_folders))

    records.measure("folders", {"num": num_folders}, read)


def measure_documents(records: Records, num_documents: int) -> None:
    """Damaged documents of every command; raises where one is neither carried out nor refused, or
    is slow.
    """
    with tempfile.TemporaryDirectory() as folder:
        for command in command_documents.COMMANDS:
            records.measure(
                "documents",
                {"command": command, "num": num_documents},
                lambda command=command: without_failures(
                    command_documents.fuzz_command(command, Path(folder), num_documents)
                ),
            )


CONFIGURATIONS_PIECE = 1000


def measure_configurations(records: Records, num_inputs: int) -> None:
    """Hostile configurations, examined as `ds-hydra check` does; raises as `measure_documents`."""
    with tempfile.TemporaryDirectory() as folder:
        for piece in range(-(-num_inputs // CONFIGURATIONS_PIECE)):
            records.measure(
                "configurations",
                {"piece": piece},
                lambda piece=piece: without_failures(
                    command_documents.fuzz_configurations(
                        Path(folder), CONFIGURATIONS_PIECE, seed=piece + 1
                    )
                ),
            )


def without_failures(found: dict[str, Any]) -> dict[str, Any]:
    """What was counted, if nothing failed."""
    if failures := found.pop("failures"):
        raise AssertionError(f"{len(failures)} failures, the first:\n{failures[0]}")
    return found


def measure_fuzz(records: Records, num_inputs: int) -> None:
    """Every reader under hypothesis; raises where one crashes, or is slow."""
    folder = records.folder / "fuzz"
    folder.mkdir(exist_ok=True)
    gc.collect()
    gc.freeze()  # collecting the libraries' objects takes a quarter of a second, for which no reader is to blame
    logging.getLogger("ds_hydra.configs.ds_config").setLevel(logging.ERROR)  # it warns of odd keys
    readers = targets(folder)
    for piece in range(-(-num_inputs // HYPOTHESIS_PIECE)):
        for name, (reader, valid) in readers.items():
            keys = {"reader": name, "piece": piece}
            records.measure(
                "fuzz", keys, lambda r=reader, v=valid, piece=piece: run_hypothesis(r, v, piece)
            )


def run_hypothesis(reader: Callable[[Any], None], valid: Any, piece: int) -> dict[str, float]:
    """One piece of hypothesis' inputs."""
    process, counts = psutil.Process(), {"inputs": 0, "accepted": 0, "slowest_ms": 0.0}
    before = process.memory_info().rss

    @hypothesis.seed(piece)
    @hypothesis.settings(
        max_examples=HYPOTHESIS_PIECE,
        database=None,
        deadline=None,
        suppress_health_check=list(hypothesis.HealthCheck),
    )
    @hypothesis.given(inputs_like(valid))
    def run(value: Any) -> None:
        begin = time.process_time()
        counts["accepted"] += check(reader, value) == "accepted"
        counts["slowest_ms"] = max(counts["slowest_ms"], (time.process_time() - begin) * 1e3)
        counts["inputs"] += 1

    run()
    return {**counts, "rss_growth_mib": (process.memory_info().rss - before) / 2**20}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "parts", nargs="*", metavar="PART", help=f"of {', '.join(PARTS)}; all if none is named"
    )
    parser.add_argument("--out", type=Path, default=Path("docs/reliability.md"))
    parser.add_argument(
        "--state", type=Path, default=Path(".cache/reliability"), help="what is measured so far"
    )
    parser.add_argument("--fresh", action="store_true", help="forget what is measured so far")
    parser.add_argument("--kills", type=int, default=5, help="rounds of kills, one per phase each")
    parser.add_argument("--gathered-kills", type=int, default=20, help="while layers are gathered")
    parser.add_argument("--planner-faults", type=int, default=10, help="of each kind")
    parser.add_argument("--saves", type=int, default=100, help="kills while saving")
    parser.add_argument("--iterations", type=int, default=1000, help="of random strategies")
    parser.add_argument("--folders", type=int, default=1000, help="damaged run folders")
    parser.add_argument("--documents", type=int, default=500, help="damaged, of each command")
    parser.add_argument("--configurations", type=int, default=10_000, help="hostile ones")
    parser.add_argument("--rounds", type=int, default=2, help="of all examples")
    parser.add_argument("--inputs", type=int, default=100_000, help="per reader")
    options = parser.parse_args()
    if unknown := set(options.parts) - PARTS.keys():
        parser.error(f"unknown part {sorted(unknown)}, expected some of {', '.join(PARTS)}")
    if options.fresh:
        shutil.rmtree(options.state, ignore_errors=True)
    records = Records(options.state.resolve())
    measures: dict[str, Callable[[], None]] = {
        "kill": lambda: measure_kills(records, options.kills),
        "phases": lambda: measure_phases(records),
        "between": lambda: measure_between(records),
        "gathered": lambda: measure_gathered(records, options.gathered_kills),
        "launch": lambda: measure_launches(records),
        "planner": lambda: measure_planner(records, options.planner_faults),
        "saves": lambda: measure_saves(records, options.saves),
        "leak": lambda: measure_leak(records, options.iterations),
        "shm": lambda: measure_shared_memory(records),
        "folders": lambda: measure_folders(records, options.folders),
        "documents": lambda: measure_documents(records, options.documents),
        "configurations": lambda: measure_configurations(records, options.configurations),
        "examples": lambda: measure_examples(records, options.rounds),
        "fuzz": lambda: measure_fuzz(records, options.inputs),
    }
    for part in options.parts or PARTS:
        print(f"{part}:", file=sys.stderr, flush=True)
        words = [word for word in sys.argv[1:] if word not in ("--state", str(options.state))]
        where = how(" ".join(["python benchmarks/reliability.py", *words]))
        measures[part]()
        title, describe = PARTS[part]
        put_section(options.out, title, f"{where}\n\n{describe(records.of(part))}")
    print(f"wrote {options.out}", file=sys.stderr)


if __name__ == "__main__":
    main()
