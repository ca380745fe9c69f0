"""Faults injected, inputs fuzzed, memory over many iterations; writes docs/reliability.md.

    python benchmarks/reliability.py --out docs/reliability.md [PART ...]

Parts: `kill` (a rank is killed in every phase of an iteration; the others must name it, restarts
must give the same curve), `phases` (a rank is killed or stopped in every phase between an engine's
start and its end; the other one must name it, and nothing may be left behind), `stream` (a rank is
killed at random times while layers stream), `launch` (kills under torchrun and deepspeed),
`planner` (planning processes killed and stopped), `saves` (a process is killed at random times of
saving), `leak` (random strategies on 4 ranks), `shm` (a /dev/shm of 64 MB, mounted as root),
`folders` (damaged run folders are read or refused), `fuzz`. What was measured is recorded in
`--state` at once: an interrupted command continues where it was, `--fresh` begins anew. Ranks are
CPU processes on one machine (gloo); it uses the helpers of the tests.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import gc
import json
import logging
import multiprocessing
import os
import platform
import random
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))

import faults
import hypothesis
import psutil
import restarted_script
import test_background
import test_checkpoint_files
import test_faults
import test_restarts
import test_streaming
import torch
import torch.distributed as dist
from distributed import run_distributed
from engines import start_hydra
from fuzzing import check, fuzz_run_folders, fuzz_with_coverage, inputs_like, targets
from holdings import STRATEGIES_OF_4, Holdings, train_random_iteration
from models import tiny

LAUNCHES = (
    ("torchrun", "1:3:forward"), ("deepspeed", "1:5:backward"), ("torchrun", "0:5:push"), ("deepspeed", "0:4:pull"),
)  # fmt: skip
"""Launcher, and rank:iteration:phase of the kill."""

STRATEGIES_OF_2 = ("2x<1,1>", "1x<2,1>", "1x<1,2>", "2x<1,1;stream>", "1x<2,1;stream>")
STREAMED = ("3x<1,1;stream>", "1x<2,1;stream> + 1x<1,1;stream>", "1x<1,3;stream=1>")

HYPOTHESIS_PIECE = 10_000
"""Inputs after which hypothesis starts anew with another seed; a piece is what an interruption
loses.
"""


class Records:
    """What was measured, one JSON object a line."""

    def __init__(self, folder: Path):
        self.folder = folder
        self._path = folder / "records.jsonl"
        folder.mkdir(parents=True, exist_ok=True)
        self.all = faults.read_json_lines(self._path) if self._path.exists() else []

    def of(self, part: str) -> list[dict[str, Any]]:
        return [record for record in self.all if record["part"] == part]

    def measure(
        self, part: str, keys: dict[str, Any], action: Callable[[], dict[str, Any]]
    ) -> None:
        """Record `action()` under `keys`, unless that is there already."""
        known = {"part": part, **keys}
        if any(known.items() <= record.items() for record in self.of(part)):
            return
        begin = time.monotonic()
        record = {**known, **action()}
        self.all.append(record)
        faults.append_json(self._path, record)
        print(
            f"{time.monotonic() - begin:6.1f} s  {json.dumps(record)[:200]}",
            file=sys.stderr,
            flush=True,
        )


def measure_kills(records: Records, num_rounds: int) -> None:
    """Rounds of kills, one per phase; after each round a run to the end."""
    faults.HANG_S = 600
    folder = records.folder / "kill"
    whole = folder / "whole"

    def run_whole() -> dict[str, Any]:
        shutil.rmtree(whole, ignore_errors=True)
        faults.run_until_end(test_faults.train_to_the_end, 3, whole, str(whole))
        return {"curve": faults.read_json_lines(whole / "losses")}

    records.measure("kill", {"round": -1}, run_whole)
    wanted = dict(records.of("kill")[0]["curve"])
    for round_ in range(num_rounds):
        parts = folder / f"round{round_}"
        for where, victim, at in (*test_faults.KILLS, (None, None, None)):
            victim = None if victim is None else (victim + round_) % 3
            arguments = (where, victim, at)
            keys = {"round": round_, "where": where}
            records.measure(
                "kill", keys, lambda parts=parts, a=arguments: run_once(parts, wanted, *a)
            )


def run_once(
    parts: Path, wanted: dict[int, float], where: str | None, victim: int | None, at: int | None
) -> dict[str, Any]:
    """One start that resumes; what the kill, if any, did."""
    for name in ("losses", "resumed"):
        (parts / name).unlink(missing_ok=True)
    ended = faults.run_until_end(
        test_faults.train_to_the_end, 3, parts, str(parts), where, victim, at, victim=victim
    )
    losses = faults.read_json_lines(parts / "losses") if (parts / "losses").exists() else []
    result = {
        "num_losses": len(losses),
        "num_same": sum(wanted[iteration] == loss for iteration, loss in losses),
        "last": losses[-1][0] if losses else None,
        "resume_s": faults.read_json_lines(parts / "resumed")[0],
    }
    if victim is not None:
        others = [rank for i, rank in enumerate(ended) if i != victim]
        result["num_others"] = len(others)
        result["num_named"] = sum(
            f"rank {victim} is gone" in rank.stderr and rank.exit_code != 0 for rank in others
        )
        result["detect_s"] = max(rank.seconds_after_fault for rank in others)
    return result


def measure_phases(records: Records) -> None:
    """A rank of two is killed or stopped in every phase of `whole_life`; the victims alternate."""
    faults.HANG_S = 120
    phases = (*faults.START_PHASES, *faults.LATER_PHASES)
    for index, where in enumerate(phases):
        for signal_name in ("SIGKILL", "SIGSTOP"):
            keys = {"where": where, "signal": signal_name}
            arguments = (records.folder, index % 2, where, signal_name)
            records.measure("phases", keys, lambda a=arguments: lose_a_rank(*a))


def lose_a_rank(records: Path, victim: int, where: str, signal_name: str) -> dict[str, Any]:
    """What the other rank of two did, and what both left behind."""
    folder = records / "phases"
    shutil.rmtree(folder, ignore_errors=True)
    (folder / "tmp").mkdir(parents=True)
    tempfile.tempdir = str(folder / "tmp")
    os.environ.update(TMPDIR=tempfile.tempdir, DS_HYDRA_RELIABILITY=str(folder))
    shared_memory = set(os.listdir("/dev/shm"))
    arguments = (str(folder), where, victim, getattr(signal, signal_name))
    try:
        ended = faults.run_until_end(test_faults.whole_life, 2, folder, *arguments, victim=victim)
    except AssertionError as error:
        return {"hangs": True, "text": str(error)[-2000:]}
    other = ended[1 - victim]
    named = f"rank {victim} is gone" in other.stderr or f"rank {victim} is silent" in other.stderr
    end = time.monotonic() + 20  # for planning processes to notice, which may still be starting
    while time.monotonic() < end and processes_with("DS_HYDRA_RELIABILITY", str(folder)):
        time.sleep(0.2)
    return {
        "hangs": False,
        "named": named,
        "exit_code": other.exit_code,
        "seconds": other.seconds_after_fault,
        "processes": [
            " ".join(psutil.Process(pid).cmdline())
            for pid in processes_with("DS_HYDRA_RELIABILITY", str(folder))
        ],
        "shared_memory": sorted(set(os.listdir("/dev/shm")) - shared_memory),
        "temp": sorted(os.listdir(folder / "tmp")),
        "text": "" if named else other.stderr[-2000:],
    }


def measure_streams(records: Records, num_kills: int) -> None:
    """A rank of three is killed at a random time while layers stream."""
    faults.HANG_S = 300
    generator = random.Random(1)
    for number in range(num_kills):
        delay_s = generator.uniform(0.0, 2.0)
        strategy, victim = STREAMED[number % len(STREAMED)], number // 2 % 3
        keys = {"number": number, "strategy": strategy, "victim": victim}
        arguments = (records.folder / "stream", strategy, victim, delay_s)
        records.measure("stream", keys, lambda a=arguments: kill_while_layers_stream(*a))


def kill_while_layers_stream(
    folder: Path, strategy: str, victim: int, delay_s: float
) -> dict[str, Any]:
    """What the other ranks of three did, and what is left of the home and in /dev/shm."""
    shutil.rmtree(folder, ignore_errors=True)
    before = set(os.listdir("/dev/shm"))
    function = test_streaming.stream_until_killed
    ended = faults.run_until_end(function, 3, folder, str(folder), strategy, victim, delay_s)
    others = [rank for index, rank in enumerate(ended) if index != victim]
    in_use = " ".join(what_processes_hold())
    left = [name for name in set(os.listdir("/dev/shm")) - before if name not in in_use]
    return {
        "delay_s": delay_s,
        "num_named": sum(
            f"rank {victim}" in rank.stderr and rank.exit_code != 0 for rank in others
        ),
        "seconds": max(rank.seconds_after_fault for rank in others),
        "homes": in_use.count(f"memfd:ds_hydra_{(folder / 'owner').read_text()} "),
        "shared_memory": left,
    }


def what_processes_hold() -> list[str]:
    """Files that any process has open or mapped."""
    held = []
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            held.append((process / "maps").read_text())
        with contextlib.suppress(OSError):
            for link in (process / "fd").iterdir():
                with contextlib.suppress(OSError):
                    held.append(str(link.readlink()))
    return held


def processes_with(name: str, value: str) -> list[int]:
    """Other processes that were started with an environment variable."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.pid != os.getpid() and process.environ().get(name) == value:
                found.append(process.pid)
    return found


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
                "steps": [step for step, _ in starts],
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
                target=test_checkpoint_files.save_many, args=(folder, attempt)
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
    """Two ranks train, layers streamed too, with /dev/shm as it is and with one of 64 MB."""
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


def measure_fuzz(records: Records, num_inputs: int) -> None:
    """Every reader under hypothesis and under a coverage-guided fuzzer; raises where one crashes,
    or is slow.
    """
    folder = records.folder / "fuzz"
    folder.mkdir(exist_ok=True)
    gc.collect()
    gc.freeze()  # collecting the libraries' objects takes a quarter of a second, for which no reader is to blame
    readers = targets(folder)
    for name in readers:
        keys = {"reader": name, "fuzzer": "coverage", "num": num_inputs}
        records.measure(
            "fuzz", keys, lambda name=name: fuzz_with_coverage(name, num_inputs, folder)
        )
    for piece in range(-(-num_inputs // HYPOTHESIS_PIECE)):
        for name, (reader, valid) in readers.items():
            keys = {"reader": name, "fuzzer": "hypothesis", "piece": piece}
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


def table(head: Iterable[str], rows: Iterable[Iterable[Any]]) -> str:
    head = list(head)
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(str(cell) for cell in line) + " |" for line in lines)


def describe_kills(records: list[dict[str, Any]]) -> str:
    runs = [r for r in records if r["round"] >= 0]
    kills = [r for r in runs if r["where"] is not None]
    rows = []
    for where in dict.fromkeys(r["where"] for r in kills):
        mine = [r for r in kills if r["where"] == where]
        seconds = [r["detect_s"] for r in mine]
        named, others = sum(r["num_named"] for r in mine), sum(r["num_others"] for r in mine)
        rows.append(
            [
                where,
                len(mine),
                f"{named} of {others}",
                f"{statistics.median(seconds):.2f}",
                f"{max(seconds):.2f}",
            ]
        )
    same, losses = sum(r["num_same"] for r in runs), sum(r["num_losses"] for r in runs)
    resumes = [r["resume_s"] for r in runs]
    return "\n\n".join(
        [
            f"SIGKILL of one rank of three, {len(kills)} times; after each, a new start from the last checkpoint, "
            "until ten iterations are trained. Seconds: from the kill until the last of the others has ended.",
            table(["killed in", "runs", "others that ended with an error naming it", "median s", "worst s"], rows),
            f"Losses equal to the uninterrupted run, bit for bit: **{same} of {losses}**. Engine started and "
            f"checkpoint loaded in {statistics.median(resumes):.1f} s (median; imports not counted).",
        ]
    )  # fmt: skip


def describe_phases(records: list[dict[str, Any]]) -> str:
    rows = []
    for record in records:
        left = {key: record.get(key) for key in ("processes", "shared_memory", "temp")}
        rows.append(
            [
                record["where"],
                record["signal"],
                "hangs" if record["hangs"] else record["exit_code"],
                "yes" if record.get("named") else "no",
                f"{record.get('seconds', float('nan')):.1f}",
                ", ".join(f"{key}: {value}" for key, value in left.items() if value) or "nothing",
            ]
        )
    return "\n\n".join(
        [
            "One rank of two is killed or stopped in each phase of an engine's life; `silence_s` 6, `grace_s` 2. "
            "Seconds: from the signal until the other one has ended.",
            table(
                ["phase", "signal", "exit code of the other", "named", "seconds", "left behind"],
                rows,
            ),
        ]
    )


def describe_streams(records: list[dict[str, Any]]) -> str:
    rows = []
    for strategy in dict.fromkeys(r["strategy"] for r in records):
        mine = [r for r in records if r["strategy"] == strategy]
        seconds = [r["seconds"] for r in mine]
        rows.append(
            [
                f"`{strategy}`",
                len(mine),
                f"{sum(r['num_named'] for r in mine)} of {2 * len(mine)}",
                f"{statistics.median(seconds):.2f}",
                f"{max(seconds):.2f}",
                sum(r["homes"] for r in mine),
                sum(len(r["shared_memory"]) for r in mine),
            ]
        )
    return "\n\n".join(
        [
            f"SIGKILL of one rank of three, {len(records)} times, 0 to 2 s after the first of many iterations in which "
            "layers stream; the victims alternate. Seconds: from the kill until the last of the others has ended. "
            "Homes: processes that still hold one; files: what is new in /dev/shm and held by no process.",
            table(
                ["strategy", "kills", "others that ended naming it", "median s", "worst s", "homes left", "files left"],
                rows,
            ),
        ]
    )  # fmt: skip


def describe_launches(records: list[dict[str, Any]]) -> str:
    runs = [r for r in records if r["launcher"] != "none"]
    rows = [
        [
            r["launcher"],
            "rank {0} in {2} of iteration {1}".format(*r["death"].split(":")),
            " then ".join(map(str, r["codes"])),
            "yes" if r["named"] else "no",
            f"{r['num_same']} of {r['num_losses']}",
            f"{r['resume_s']:.1f}",
        ]
        for r in runs
    ]
    return "\n\n".join(
        [
            "Two ranks, `torchrun --max-restarts 2` (which restarts by itself) and `deepspeed` (started a second time "
            "by hand). Seconds: from the kill until training resumed, process starts and imports included.",
            table(
                [
                    "launcher",
                    "killed",
                    "exit codes",
                    "rank named",
                    "losses identical",
                    "seconds to resume",
                ],
                rows,
            ),
        ]
    )


def describe_planner(records: list[dict[str, Any]]) -> str:
    rows = [
        [
            r["fault"],
            r["num_faults"],
            f"{r['num_same']} of {r['num_faults']}",
            f"{r['seconds']:.1f}",
        ]
        for r in records
    ]
    return "\n\n".join(
        [
            "The planning process is stopped (SIGSTOP; deadline 0.5 s, then the heuristic's plan is used and the "
            "process replaced) or killed while it works. Seconds: until the next plan came from a new process.",
            table(["planning process", "faults", "next plans identical", "median s"], rows),
        ]
    )


def describe_saves(records: list[dict[str, Any]]) -> str:
    (record,) = records
    return (
        f"A process that saves without pause was killed {record['num_kills']} times, 5 to 80 ms after its start; "
        f"`latest` named a checkpoint whose files all had their digests **{record['num_good']} times**. The tests also "
        "kill it at every single operation on a file or folder, and in every write."
    )


def slope_of(samples: list[dict[str, int]], key: str) -> str:
    """Bytes per iteration, with the 95% interval that samples around a line would give."""
    xs, ys = [s["iteration"] for s in samples], [s[key] for s in samples]
    slope, intercept = statistics.linear_regression(xs, ys)
    rest = [y - slope * x - intercept for x, y in zip(xs, ys)]
    spread = sum(r * r for r in rest) / (len(xs) - 2)
    mean = statistics.fmean(xs)
    half = 1.96 * (spread / sum((x - mean) ** 2 for x in xs)) ** 0.5
    return f"{slope:+.0f} ± {half:.0f}"


def describe_leak(records: list[dict[str, Any]]) -> str:
    record = records[-1]
    memory, counts = [], []
    for rank, samples in enumerate(record["ranks"]):
        quarter, half, last = samples[len(samples) // 4], samples[len(samples) // 2], samples[-1]
        tail = samples[len(samples) // 2 :]
        memory.append(
            [
                rank,
                *(f"{s['malloc_bytes'] / 2**20:.2f}" for s in (quarter, half, last)),
                slope_of(tail, "malloc_bytes"),
                *(f"{s['rss_bytes'] / 2**20:.1f}" for s in (quarter, half, last)),
                slope_of(tail, "rss_bytes"),
            ]
        )
        keys = ("open_files", "process_groups", "threads", "tensors", "python_blocks")
        counts.append([rank, *(f"{quarter[key]:,} -> {last[key]:,}" for key in keys)])
    head = [
        f"{what} {when}"
        for what in ("malloc", "RSS")
        for when in ("after 25%", "50%", "100%", "slope")
    ]
    return "\n\n".join(
        [
            f"{record['iterations']:,} iterations on 4 ranks, one of {len(STRATEGIES_OF_4)} strategies drawn for each, "
            "4 to 12 sequences of 2 to 60 tokens. `malloc`: MiB handed out and not freed; RSS: MiB resident. Slopes: "
            "bytes per iteration over the last half. RSS follows malloc's high-water marks, which are kept on purpose "
            "(`engine/ranks/host_memory.py`).",
            table(["rank", *head], memory),
            "From 25% to the end:",
            table(
                [
                    "rank",
                    "open files",
                    "process groups",
                    "threads",
                    "live tensors",
                    "blocks of Python",
                ],
                counts,
            ),
        ]
    )


def describe_shared_memory(records: list[dict[str, Any]]) -> str:
    whole, small = (next(r for r in records if r["name"] == name) for name in ("whole", "64 MB"))
    is_same = [r["losses"] for r in whole["ranks"]] == [r["losses"] for r in small["ranks"]]
    most = max(rank["most_bytes"] for rank in small["ranks"])
    return (
        f"Two ranks train under {', '.join(f'`{s}`' for s in STRATEGIES_OF_2)} in a mount namespace of their own with "
        f"`mount -t tmpfs -o size=64m tmpfs /dev/shm`: losses {'equal' if is_same else 'differ from'} those with the "
        f"machine's /dev/shm, bit for bit; at most {most:,} bytes in it, {len(small['left'])} files left."
    )


def describe_folders(records: list[dict[str, Any]]) -> str:
    record = records[-1]
    return (
        f"{record['inputs']:,} run folders with one or two files damaged (values changed, bytes changed, cut, "
        "replaced), read as `ds-hydra report --perfetto --json` reads them: "
        f"{record['accepted']} read, {record['refused']} refused, **0 other errors**, the slowest "
        f"{record['slowest_ms'] / 1e3:.2f} s of CPU time."
    )  # fmt: skip


FUZZERS = ("hypothesis", "coverage")


def describe_fuzz(records: list[dict[str, Any]]) -> str:
    rows = []
    for name in dict.fromkeys(r["reader"] for r in records):
        for fuzzer in FUZZERS:
            mine = [r for r in records if (r["reader"], r["fuzzer"]) == (name, fuzzer)]
            if mine:
                total = [sum(r[key] for r in mine) for key in ("inputs", "accepted")]
                slowest = max(r["slowest_ms"] for r in mine)
                growth = max(r["rss_growth_mib"] for r in mine)
                rows.append(
                    [name, fuzzer, f"{total[0]:,}", f"{total[1]:,}", 0, f"{slowest:.1f}", f"{growth:.1f}",
                     mine[0].get("edges", "")]
                )  # fmt: skip
    num_readers = len({r["reader"] for r in records})
    totals = [sum(r["inputs"] for r in records if r["fuzzer"] == fuzzer) for fuzzer in FUZZERS]
    is_complete = min(totals) >= num_readers * 100_000
    return "\n\n".join(
        [
            "Each input is read, or refused with an error of ds_hydra; anything else, or more than 1 s of CPU time, "
            "ends the benchmark. `hypothesis` draws valid documents with changed places and any JSON value in any "
            "first-level place; `coverage` is libFuzzer (atheris) with a mutator that keeps inputs JSON: what reaches "
            "new code of a reader is kept and changed further."
            + ("" if is_complete else " Not complete: the same command continues up to 100,000 inputs a row."),
            table(
                ["reader", "fuzzer", "inputs", "accepted", "other errors", "slowest ms", "RSS growth MiB", "edges"],
                rows,
            ),
        ]
    )  # fmt: skip


PARTS: dict[str, tuple[str, Callable[[list[dict[str, Any]]], str]]] = {
    "kill": ("A rank is lost", describe_kills),
    "phases": ("A rank is lost, from the start to the end", describe_phases),
    "stream": ("A rank is lost while layers stream", describe_streams),
    "launch": ("Restarts under launchers", describe_launches),
    "planner": ("A planning process is lost", describe_planner),
    "saves": ("A crash while saving", describe_saves),
    "leak": ("Many iterations", describe_leak),
    "shm": ("A small /dev/shm", describe_shared_memory),
    "folders": ("Damaged run folders", describe_folders),
    "fuzz": ("Damaged input", describe_fuzz),
}

TESTED = (
    (
        "SIGKILL of a rank in pull, forward, backward, push, step, save",
        "the others end with an error naming it; a restart gives the same curve",
        "test_faults, test_restarts",
    ),
    (
        "SIGKILL of a rank while layers stream, with a lock of the sums held, too",
        "the others end with an error naming it; no memory of a home stays",
        "test_streaming",
    ),
    (
        "SIGKILL or SIGSTOP from the first collective of a start to the last `destroy`",
        "named by the others, nothing stays behind",
        "test_faults, test_watchdog",
    ),
    (
        "engines one after another in a process",
        "open files and threads stay constant, none stays alive",
        "test_engine_training",
    ),
    (
        "a rank stopped or failed, Ctrl-C on one rank",
        "named by the others, which end",
        "test_faults",
    ),
    (
        "planning process killed, hung, out of memory; all of them gone; none can start",
        "the same plans from a new process, or in line; a late one is replaced by the heuristic's plan",
        "test_background",
    ),
    (
        "another plan on one rank",
        "the same error on all ranks, nothing is exchanged",
        "test_faults",
    ),
    (
        "NaN or Inf in a gradient of one rank; overflow in fp16",
        "no weight changes, counted; the fp16 loss scale is halved, as in stock DeepSpeed",
        "test_faults, test_fp16",
    ),
    ("a slow rank", "named in the metrics", "test_straggler"),
    (
        "full disk under metrics, under a checkpoint",
        "training goes on; the checkpoint before stays",
        "test_faults, test_checkpoint_files",
    ),
    ("SIGTERM", "checkpoint after the iteration, exit code 0", "test_faults"),
    ("an exception in the user's data", "raised on all ranks, naming the example", "test_faults"),
    (
        "a crash at any moment of saving; files truncated, altered, missing, malicious",
        "the last good checkpoint loads; the file is named, nothing of it is run",
        "test_checkpoint_files",
    ),
    (
        "resume, on other numbers of ranks, with other candidates, from and to stock DeepSpeed",
        "bit-identical curve on the same ranks, the same state on others",
        "test_checkpoint",
    ),
    (
        "iterations of random strategies",
        "open files, process groups, threads, live tensors stay constant",
        "test_engine_training",
    ),
    ("damaged input of any reader", "read, or refused by an error of ds_hydra", "test_fuzz"),
    ("the whole job suspended and continued", "goes on", "test_faults"),
)
"""(fault, what happens, where it is tested)."""

TORCHRUN = """\
`torchrun --max-restarts` needs `TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1` in its environment: torch 2.13 otherwise keeps
one store for all restarts, in which restarted ranks look for the addresses of lost ones and hang
([issue 135712](https://github.com/pytorch/pytorch/issues/135712)). ds_hydra warns of it at the start."""


def machine() -> str:
    names = [line.split(":")[1].strip() for line in Path("/proc/cpuinfo").read_text().splitlines()
             if line.startswith("model name")]  # fmt: skip
    memory = psutil.virtual_memory().total / 2**30
    return (
        f"{os.cpu_count()} cores ({names[0] if names else platform.machine()}), {memory:.0f} GiB, gloo, torch "
        f"{torch.__version__}, Python {platform.python_version()}"
    )


def write(records: Records, out: Path, command: str) -> None:
    date = datetime.datetime.now(datetime.timezone.utc).date().isoformat()
    parts = [
        "# Reliability",
        f"Written by `{command}` on {date}; CPU ranks on one machine: {machine()}.",
        "## What is tested",
        "Each of these faults is injected in a test, most of them several times.",
        table(["fault", "what happens", "tests"], TESTED),
        TORCHRUN,
    ]
    for part, (title, describe) in PARTS.items():
        of_part = records.of(part)
        parts += [f"## {title}", describe(of_part) if of_part else "Not measured yet."]
    out.write_text("\n\n".join(parts) + "\n", encoding="utf-8")


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
    parser.add_argument("--stream-kills", type=int, default=20, help="while layers stream")
    parser.add_argument("--planner-faults", type=int, default=10, help="of each kind")
    parser.add_argument("--saves", type=int, default=100, help="kills while saving")
    parser.add_argument("--iterations", type=int, default=1000, help="of random strategies")
    parser.add_argument("--folders", type=int, default=1000, help="damaged run folders")
    parser.add_argument("--inputs", type=int, default=100_000, help="per reader and fuzzer")
    options = parser.parse_args()
    if unknown := set(options.parts) - PARTS.keys():
        parser.error(f"unknown part {sorted(unknown)}, expected some of {', '.join(PARTS)}")
    if options.fresh:
        shutil.rmtree(options.state, ignore_errors=True)
    records = Records(options.state.resolve())
    measures: dict[str, Callable[[], None]] = {
        "kill": lambda: measure_kills(records, options.kills),
        "phases": lambda: measure_phases(records),
        "stream": lambda: measure_streams(records, options.stream_kills),
        "launch": lambda: measure_launches(records),
        "planner": lambda: measure_planner(records, options.planner_faults),
        "saves": lambda: measure_saves(records, options.saves),
        "leak": lambda: measure_leak(records, options.iterations),
        "shm": lambda: measure_shared_memory(records),
        "folders": lambda: measure_folders(records, options.folders),
        "fuzz": lambda: measure_fuzz(records, options.inputs),
    }
    for part in options.parts or PARTS:
        print(f"{part}:", file=sys.stderr, flush=True)
        measures[part]()
        write(records, options.out, " ".join(["python benchmarks/reliability.py", *sys.argv[1:]]))
    print(f"wrote {options.out}", file=sys.stderr)


if __name__ == "__main__":
    main()
