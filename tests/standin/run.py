"""`python run.py RANKS CHECK [CHECK ...]`: checks on stand-in ranks, JSON on stdout.

A check is a function of one of `MODULES`, "name:argument" one with an argument. A process of its
own: a process knows one accelerator.
"""

from __future__ import annotations

import contextlib
import datetime
import functools
import importlib
import json
import multiprocessing
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.pop("DS_ACCELERATOR", None)
TESTS = Path(__file__).parent.parent
sys.path[:0] = [str(TESTS), str(TESTS.parent)]

TIMEOUT_S = 600
MODULES = ("standin.checks", "standin.faults", "standin.memory", "standin.uses")


def find_check(text: str) -> Callable[[], Any]:
    """The function of that name, with its argument if it has one."""
    name, _, argument = text.partition(":")
    for module in MODULES:
        if function := getattr(importlib.import_module(module), name, None):
            return functools.partial(function, argument) if argument else function
    raise AttributeError(f"no check is called {name}")


def run_rank(rank: int, world: int, folder: str, port: int, names: list[str], queue: Any) -> None:
    from distributed import rank_environment

    parent = os.getppid()
    os.environ.update(rank_environment(rank, world, port))
    import torch.distributed as dist

    from standin import device

    try:
        device.install()
        dist.init_process_group(
            device.NAME,
            init_method=f"file://{folder}/rendezvous",
            rank=rank,
            world_size=world,
            timeout=datetime.timedelta(seconds=120),
        )
        queue.put((rank, {name: find_check(name)() for name in names}))
    except BaseException:
        queue.put((rank, {"error": traceback.format_exc()}))
    while os.getppid() == parent:  # another rank may still read from this one's connections
        time.sleep(0.05)
    os._exit(0)


def main() -> None:
    world, names = int(sys.argv[1]), sys.argv[2:]
    with contextlib.redirect_stdout(sys.stderr), tempfile.TemporaryDirectory() as folder:
        import torch
        from distributed import free_port, load_what_ranks_use, start_forks

        from standin import device

        for name in names:  # imported once, before the ranks
            find_check(name)
        torch.set_num_threads(1)
        device.extension()
        load_what_ranks_use()
        context = multiprocessing.get_context("fork")
        queue = context.SimpleQueue()
        port = free_port()
        ranks = [
            context.Process(target=run_rank, args=(rank, world, folder, port, names, queue))
            for rank in range(world)
        ]
        start_forks(ranks)
        results: dict[int, Any] = {}
        end = time.monotonic() + TIMEOUT_S
        while len(results) < world and time.monotonic() < end:
            if queue.empty():
                time.sleep(0.05)
                continue
            rank, result = queue.get()
            results[rank] = result
            if "error" in result:
                break
        for process in ranks:
            process.kill()
    print(json.dumps(results))


if __name__ == "__main__":
    main()
