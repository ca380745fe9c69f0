"""Whether this process waits for another rank, and for which ones when an engine starts, before the
watchdog watches them.
"""

from __future__ import annotations

import contextlib
import linecache
import os
import re
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import torch.distributed as dist

_COLLECTIVES = tuple(
    str(Path(dist.__file__).parent / name)
    for name in ("distributed_c10d.py", "c10d_logger.py", "_functional_collectives.py")
)
_WAITS = re.compile(r"\.(wait|synchronize|item|tolist|cpu)\(")
"""Of a handle, and of a device that computes what a collective gives."""

_COLLECTIVE_WORDS = (
    "gloo", "NCCL", "onnection", "Broken pipe", "imed out", "ProcessGroup", "what others need in their home",
)  # fmt: skip


def find_wait(thread_id: int) -> tuple[int, int] | None:
    """Where a thread waits in a collective, equal as long as it stays there; None where it does
    anything else, such as writing a file or talking to a debugger.
    """
    frame = sys._current_frames().get(thread_id)
    if frame is None:
        return None
    name = frame.f_code.co_filename
    is_wait = name in _COLLECTIVES or _WAITS.search(linecache.getline(name, frame.f_lineno))
    return (id(frame), frame.f_lasti) if is_wait else None


def looks_like_a_lost_peer(error: BaseException) -> bool:
    """Whether an error comes from a collective; then it is worth waiting for the reason."""
    return isinstance(error, RuntimeError) and any(word in str(error) for word in _COLLECTIVE_WORDS)


EXIT_CODE = 75
"""Of a process that ends itself because it waits for a lost rank (EX_TEMPFAIL: a restart may
help).
"""


TICK_S = 0.5
VERDICT_WAIT_S = 10.0
"""Longest from a broken connection to the name of the lost rank, on a host with too much to do."""


@contextlib.contextmanager
def ends_after(seconds: float, start: int) -> Iterator[None]:
    """End the process, naming who is missing, where the block takes longer: a rank that stops
    before the first connection is seen by nobody.
    """

    def end() -> None:
        error = TimeoutError(f"no answer for {seconds:.0f} s")
        print(f"ds_hydra: {describe_missing(error, start)}", file=sys.stderr, flush=True)
        os._exit(EXIT_CODE)

    timer = threading.Timer(seconds, end)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def describe_missing(error: Exception, start: int) -> str:
    """Which ranks no longer answer, when a collective before the first connection broke or does
    not end.
    """
    missing = {0}  # the store is in its process, unless the launcher keeps it, and as silent
    asking = threading.Thread(target=_find_missing, args=(missing, start), daemon=True)
    asking.start()
    asking.join(2 * VERDICT_WAIT_S)
    ranks = ", ".join(map(str, sorted(missing))) or "unknown"
    return (
        f"rank {ranks} is gone before the engine started ({str(error).strip()[:200]}); rank {dist.get_rank()} cannot "
        "go on without it. Restart"
    )


def _find_missing(missing: set[int], start: int) -> None:
    """Put into `missing` the ranks that do not answer in the store; not if it is lost, too."""
    key = f"ds_hydra/alive/{start}"
    silent = set(range(dist.get_world_size()))
    with contextlib.suppress(RuntimeError):
        store = dist.distributed_c10d._get_default_store()
        store.set(f"{key}/{dist.get_rank()}", "1")
        end = time.monotonic() + VERDICT_WAIT_S
        while silent and time.monotonic() < end:
            silent = {rank for rank in silent if not store.check([f"{key}/{rank}"])}
            time.sleep(TICK_S)
        missing.clear()
        missing |= silent
