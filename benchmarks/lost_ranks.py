"""Ranks that are killed or stopped: who names them, what stays, and how training goes on."""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import signal
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import faults
import psutil
import test_faults
import torch.distributed as dist
import trl_runs
from engines import start_hydra
from models import VOCAB_SIZE, tiny
from reliability_page import Records
from single_process import random_examples


def measure_kills(records: Records, num_rounds: int) -> None:
    """Rounds of kills, one per phase; after each round a run to the end."""
    faults.HANG_S = 600
    folder = records.folder / "kill"
    whole = folder / "whole"

    nobody = (None, None, None, 0)
    for weights, kills in test_faults.KILLS.items():

        def run_whole(weights: str = weights) -> dict[str, Any]:
            shutil.rmtree(whole, ignore_errors=True)
            faults.run_until_end(
                test_faults.train_to_the_end, 3, whole, str(whole), *nobody, weights
            )
            return {"curve": faults.read_json_lines(whole / "losses")}

        records.measure("kill", {"round": -1, "weights": weights}, run_whole)
        curves = [r["curve"] for r in records.of("kill") if r["weights"] == weights]
        wanted = dict(curves[0])
        for round_ in range(num_rounds):
            parts = folder / f"{weights}{round_}"
            for where, victim, at, passes in (*kills, nobody):
                victim = None if victim is None else (victim + round_) % 3
                arguments = (where, victim, at, passes, weights)
                keys = {"round": round_, "weights": weights, "where": where, "passes": passes}
                records.measure(
                    "kill", keys, lambda p=parts, w=wanted, a=arguments: run_once(p, w, *a)
                )


def run_once(
    parts: Path,
    wanted: dict[int, float],
    where: str | None,
    victim: int | None,
    at: int | None,
    passes: int,
    weights: str,
) -> dict[str, Any]:
    """One start that resumes; what the kill, if any, did."""
    for name in ("losses", "starts"):
        (parts / name).unlink(missing_ok=True)
    arguments = (where, victim, at, passes, weights)
    ended = faults.run_until_end(
        test_faults.train_to_the_end, 3, parts, str(parts), *arguments, victim=victim
    )
    losses = faults.read_json_lines(parts / "losses") if (parts / "losses").exists() else []
    result = {
        "num_losses": len(losses),
        "num_same": sum(wanted[iteration] == loss for iteration, loss in losses),
        "last": losses[-1][0] if losses else None,
        "resume_s": faults.read_json_lines(parts / "starts")[0][2],
    }
    if victim is not None:
        others = [rank for i, rank in enumerate(ended) if i != victim]
        result["num_others"] = len(others)
        result["num_named"] = sum(
            f"rank {victim} is gone" in rank.stderr and rank.exit_code != 0 for rank in others
        )
        result["detect_s"] = max(rank.seconds for rank in others)
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


def measure_between(records: Records) -> None:
    """A rank of two is killed or stopped outside of the engine's calls; the victims alternate."""
    faults.HANG_S = 120
    for where in ("callback", "own collective", "own handle", "own object", "after training"):
        life = (
            trl_runs.life_with_callback if where == "callback" else test_faults.life_between_calls
        )
        for signal_name in ("SIGKILL", "SIGSTOP"):
            for victim in (0, 1):
                keys = {"where": where, "signal": signal_name, "victim": victim}
                arguments = (records.folder, victim, where, signal_name, life)
                records.measure("between", keys, lambda a=arguments: lose_a_rank(*a))


def lose_a_rank(
    records: Path,
    victim: int,
    where: str,
    signal_name: str,
    life: Callable[..., None] = test_faults.whole_life,
) -> dict[str, Any]:
    """What the other rank of two did, and what both left behind."""
    folder = records / "phases"
    shutil.rmtree(folder, ignore_errors=True)
    (folder / "tmp").mkdir(parents=True)
    tempfile.tempdir = str(folder / "tmp")
    os.environ.update(TMPDIR=tempfile.tempdir, DS_HYDRA_RELIABILITY=str(folder))
    shared_memory = set(os.listdir("/dev/shm"))
    arguments = (str(folder), where, victim, getattr(signal, signal_name))
    try:
        ended = faults.run_until_end(life, 2, folder, *arguments, victim=victim)
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
        "seconds": other.seconds,
        "processes": [
            " ".join(psutil.Process(pid).cmdline())
            for pid in processes_with("DS_HYDRA_RELIABILITY", str(folder))
        ],
        "shared_memory": sorted(set(os.listdir("/dev/shm")) - shared_memory),
        "temp": sorted(os.listdir(folder / "tmp")),
        "text": "" if named else other.stderr[-2000:],
    }


def measure_gathered(records: Records, num_kills: int) -> None:
    """A rank of three is killed at a random time while layers are gathered."""
    faults.HANG_S = 300
    generator = random.Random(1)
    for number in range(num_kills):
        delay_s = generator.uniform(0.0, 2.0)
        strategy, victim = GATHERED[number % len(GATHERED)], number // 2 % 3
        keys = {"number": number, "strategy": strategy, "victim": victim}
        arguments = (records.folder / "gathered", strategy, victim, delay_s)
        records.measure("gathered", keys, lambda a=arguments: kill_while_layers_pass(*a))


def train_until_killed(folder: str, strategy: str, victim: int, delay_s: float) -> None:
    """Rank `victim` is killed `delay_s` after the first iteration, whatever it does then."""
    sizes = {"hidden_size": 128, "intermediate_size": 352, "num_hidden_layers": 6}
    engine = start_hydra(tiny("llama_tied", **sizes), hydra={"faults": {"grace_s": 1}})
    examples = random_examples((60, 50, 90, 70), VOCAB_SIZE, seed=0)
    engine.train_batch(examples, strategy=strategy)
    dist.barrier()
    if dist.get_rank() == victim:
        threading.Timer(delay_s, faults.die, (folder,)).start()
    while True:
        engine.train_batch(examples, strategy=strategy)


def kill_while_layers_pass(
    folder: Path, strategy: str, victim: int, delay_s: float
) -> dict[str, Any]:
    """What the other ranks of three did, and what is left in /dev/shm."""
    shutil.rmtree(folder, ignore_errors=True)
    before = set(os.listdir("/dev/shm"))
    arguments = (str(folder), strategy, victim, delay_s)
    ended = faults.run_until_end(train_until_killed, 3, folder, *arguments)
    others = [rank for index, rank in enumerate(ended) if index != victim]
    in_use = " ".join(what_processes_hold())
    left = [name for name in set(os.listdir("/dev/shm")) - before if name not in in_use]
    return {
        "delay_s": delay_s,
        "num_named": sum(
            f"rank {victim}" in rank.stderr and rank.exit_code != 0 for rank in others
        ),
        "seconds": max(rank.seconds for rank in others),
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


GATHERED = (
    "3x<1,1;gather>",
    "1x<2,1;gather> + 1x<1,1;gather>",
    "1x<cp3,1;gather>",
)
