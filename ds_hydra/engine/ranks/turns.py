"""Rank 0 of each node goes first, and the other ranks wait as long as it lives: not in a
collective, whose limit of time (`ddp_timeout`) a large corpus outlasts while it is tokenised.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch.distributed as dist

from ds_hydra.engine.ranks.agreement import TICK_S
from ds_hydra.engine.ranks.watchdog import raise_loss
from ds_hydra.environment import is_first_on_host
from ds_hydra.errors import RankLostError

_SILENT_S = 1800.0
"""Seconds without a sign of life of any rank until the wait ends: torch's limit of a collective."""
_turns = itertools.count()


@contextlib.contextmanager
def first_on_node(what: str) -> Iterator[None]:
    """Run the block on rank 0 of each node first, on the others when all of these have ended it.

    Collective over all ranks. Raises RankLostError where another rank is lost, or none of those
    that do `what` gives a sign of life.
    """
    key = f"ds_hydra/turns/{next(_turns)}"
    store = dist.distributed_c10d._get_default_store()
    if not is_first_on_host():
        wait_for_all(store, key, what)
        yield
        return
    try:
        with _signs_of_life(store, key):
            yield
    finally:
        wait_for_all(store, key, what)


@contextlib.contextmanager
def _signs_of_life(store: Any, key: str) -> Iterator[None]:
    is_over = threading.Event()

    def beat() -> None:
        with contextlib.suppress(RuntimeError):  # the store has ended with its rank
            while not is_over.wait(TICK_S):
                store.add(f"{key}/beats", 1)

    thread = threading.Thread(target=beat, daemon=True)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()


def wait_for_all(
    store: Any,
    key: str,
    what: str,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> None:
    """Return when all ranks have come here with this `key` of the `store`."""
    num_ranks = dist.get_world_size()
    store.set(f"{key}/{dist.get_rank()}", "")
    if store.add(f"{key}/arrived", 1) == num_ranks:
        store.set(f"{key}/all", "")
    beats, heard, pause_s = -1, clock(), TICK_S / 64
    while not store.check([f"{key}/all"]):
        raise_loss()
        last, beats = beats, store.add(f"{key}/beats", 0)
        if beats != last:
            heard = clock()
        elif clock() - heard > _SILENT_S:
            missing = [rank for rank in range(num_ranks) if not store.check([f"{key}/{rank}"])]
            raise RankLostError(
                f"rank {', '.join(map(str, missing))} is {what} and has given no sign of life for {_SILENT_S:.0f} s"
            )
        sleep(pause_s)
        pause_s = min(2 * pause_s, TICK_S)
