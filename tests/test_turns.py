"""The first rank of a node goes first, and the others wait as long as it lives."""

from __future__ import annotations

import itertools
import os
from unittest import mock

import pytest
import torch.distributed as dist
from distributed import run_distributed, wait_until
from engines import raised_by

from ds_hydra.engine.ranks import turns, watchdog
from ds_hydra.engine.ranks.turns import first_on_node, wait_for_all
from ds_hydra.errors import RankLostError


def take_turns(folder, local_ranks):
    """Return what this rank finds when its turn comes, twice."""
    rank, store = dist.get_rank(), dist.distributed_c10d._get_default_store()
    os.environ["LOCAL_RANK"] = str(local_ranks[rank])
    later = [other for other, local in enumerate(local_ranks) if local]
    seen = []
    for turn in range(2):
        with first_on_node("working"):
            seen.append(sorted(os.listdir(folder)))
            if local_ranks[rank] == 0:
                keys = [f"ds_hydra/turns/{turn}/{other}" for other in later]
                wait_until(lambda keys=keys: store.check(keys))
            (folder / f"{turn}.{rank}").touch()
    return seen


@pytest.mark.distributed
def test_the_first_rank_of_each_node_goes_first(tmp_path):
    seen = run_distributed(take_turns, 4, tmp_path, [0, 1, 0, 1])
    for rank in (1, 3):
        assert {"0.0", "0.2"} <= {*seen[rank][0]}
        assert {"1.0", "1.2"} <= {*seen[rank][1]}
    for rank in (0, 2):
        assert not {"0.1", "0.3"} & {*seen[rank][0]}


def waiting(beats_until_s, arrives_s=float("inf")):
    """Seconds that rank 1 of 2 waits for rank 0, which comes after `arrives_s`, and the error that
    ends it.
    """
    store, time_s = dist.HashStore(), [0.0]

    def sleep(seconds):
        time_s[0] += seconds
        if time_s[0] < beats_until_s:
            store.add("turn/beats", 1)
        if time_s[0] >= arrives_s:
            store.set("turn/0", "")
            store.set("turn/all", "")

    with mock.patch.multiple(dist, get_rank=lambda: 1, get_world_size=lambda: 2):
        _, said = raised_by(
            lambda: wait_for_all(store, "turn", "tokenising", lambda: time_s[0], sleep)
        )
    return time_s[0], said


def test_ranks_wait_as_long_as_there_are_signs_of_life():
    hours = 4 * 3600.0
    seconds, said = waiting(hours, hours)
    assert hours <= seconds < hours + 1
    assert not said
    seconds, said = waiting(hours)
    assert hours - 1 < seconds - turns._SILENT_S < hours + 1
    assert "rank 0 is tokenising and has given no sign of life" in said


def test_a_loss_that_the_watchdog_knows_ends_the_wait():
    calls = itertools.count()

    class Watchdog:
        def raise_loss(self):
            if next(calls) == 3:
                raise RankLostError("rank 0 is gone")

    with mock.patch.object(watchdog, "_watchdog", Watchdog()):
        assert waiting(turns._SILENT_S)[1] == "rank 0 is gone"
