"""Runs a function on several CPU ranks: the one way in which tests start processes."""

from __future__ import annotations

import contextlib
import datetime
import functools
import gc
import multiprocessing
import os
import random
import socket
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

TIMEOUT_S = float(os.environ.get("TEST_TIMEOUT_S", 800))
"""Only a hang takes so long; less than pytest waits for a test."""
may_start_ranks = True
"""Set for every test, so that those that start ranks can be told from the others."""


def run_distributed(
    function: Callable[..., Any], world_size: int, *args: Any, timeout_s: float = TIMEOUT_S
) -> list[Any]:
    """What `function(*args)` returns on each of `world_size` gloo ranks, in rank order.

    Ranks are forked, so `function` may be any module-level function and imports are paid once. The
    first failure ends the others and is raised here with the rank's own traceback. A rank waits for
    another one for up to a quarter of `timeout_s`.
    """
    assert may_start_ranks, "the test starts ranks: mark it with pytest.mark.distributed"
    load_what_ranks_use()
    context = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory() as folder:
        queue = context.SimpleQueue()
        rendezvous = str(Path(folder) / "rendezvous")
        port = free_port()
        ranks = [
            context.Process(
                target=_run_rank,
                args=(function, args, rank, world_size, rendezvous, port, queue, timeout_s),
            )
            for rank in range(world_size)
        ]
        start_forks(ranks)
        try:
            return _collect(ranks, queue, time.monotonic() + timeout_s)
        finally:
            for process in ranks:
                process.kill()
                process.join()
            remove_shared_memory(port)


def start_forks(ranks: Sequence[Any]) -> None:
    """Start processes that are forks of this one.

    What is there already is nothing that they shall look for garbage in: that would take each of
    them a third of a second at every engine's start, and copy the pages.
    """
    gc.freeze()
    for process in ranks:
        process.start()


@functools.cache
def load_what_ranks_use() -> None:
    """Before the fork, so that it is paid once: modules, compiled code."""
    # Imports torch's compiler, which every ZeRO-3 engine does while it starts.
    import deepspeed.runtime.zero.muon.original_muon  # noqa: F401
    import torch
    import transformers.models.llama.modeling_llama  # noqa: F401

    import ds_hydra.engine  # noqa: F401
    from ds_hydra.sampler.warm_up import warm_up

    # ZeRO-3 makes text of all parameters while it starts, and drops it.
    torch.set_printoptions(threshold=0, edgeitems=1)
    warm_up()


def wait_until(is_so: Callable[[], bool], limit_s: float = TIMEOUT_S) -> None:
    """Return once it is so, which others bring about; `limit_s` is for hangs."""
    end = time.monotonic() + limit_s
    while not is_so():
        assert time.monotonic() < end, "it does not come"
        time.sleep(0.005)


def free_port() -> int:
    """A port that nobody listens on, for a process that is still to start.

    Below the ports that the kernel hands out by itself, or another process could be given it
    meanwhile.
    """
    for port in random.SystemRandom().sample(range(20_000, 32_000), 100):
        with contextlib.suppress(OSError), socket.create_server(("", port)):
            return port
    raise AssertionError("100 ports between 20000 and 32000 are all in use")


def rank_environment(rank: int, world_size: int, port: int) -> dict[str, str]:
    """What DeepSpeed's launcher tells a rank when all are on this machine."""
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }


def remove_shared_memory(port: int) -> None:
    """What DeepSpeed's collectives on a CPU have left of ranks that met at `port`: 66 MiB of
    each.
    """
    for file in Path("/dev/shm").glob(f"deepspeed_allreduce_buffer_{os.getuid()}_*_{port}_*"):
        file.unlink(missing_ok=True)


def _collect(ranks: list[Any], queue: Any, deadline: float) -> list[Any]:
    results: dict[int, Any] = {}
    while len(results) < len(ranks):
        if not queue.empty():
            rank, error, value = queue.get()
            if error is not None:
                raise AssertionError(f"rank {rank} failed:\n{error}")
            results[rank] = value
            continue
        dead = [
            i
            for i, process in enumerate(ranks)
            if i not in results and process.exitcode not in (None, 0)
        ]
        if dead and queue.empty():
            raise AssertionError(f"rank {dead[0]} died with exit code {ranks[dead[0]].exitcode}")
        if time.monotonic() > deadline:
            missing = sorted(set(range(len(ranks))) - results.keys())
            raise AssertionError(f"ranks {missing} did not finish in time")
        time.sleep(0.01)
    return [results[rank] for rank in range(len(ranks))]


def _run_rank(
    function: Callable[..., Any],
    args: tuple[Any, ...],
    rank: int,
    world_size: int,
    rendezvous: str,
    port: int,
    queue: Any,
    timeout_s: float,
) -> None:
    parent = os.getppid()
    os.environ.update(rank_environment(rank, world_size, port))
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    try:
        dist.init_process_group(
            "gloo",
            init_method=f"file://{rendezvous}",
            rank=rank,
            world_size=world_size,
            timeout=datetime.timedelta(seconds=timeout_s / 4),
        )
        queue.put((rank, None, function(*args)))
    except BaseException:
        queue.put((rank, traceback.format_exc(), None))
    finally:
        # A rank that ends closes connections of which another may still read its last message.
        while os.getppid() == parent:
            time.sleep(0.2)
        os._exit(0)  # skip destructors
