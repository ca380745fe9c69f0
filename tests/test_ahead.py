"""Rows of the next iteration beside this one: the same plans and rows on all ranks, errors where
they belong.
"""

from __future__ import annotations

import threading

import pytest
import torch
from reference import make_batch, make_profile

from ds_hydra.engine import planning
from ds_hydra.engine.planning import RowPrefetcher
from ds_hydra.errors import HydraError
from ds_hydra.sampler.background import PlannedIteration
from ds_hydra.sampler.planner.iteration import plan_iteration
from ds_hydra.strategy.schemes.scheme import parse_strategies

PROFILE = make_profile({"<1,1>": (0.01, 1.0, 3.0)})
STRATEGIES = parse_strategies(["2x<1,1>"])


def planned(iteration):
    plan = plan_iteration(
        make_batch([5, 9, 7 + iteration], iteration),
        strategies=STRATEGIES,
        profile=PROFILE,
        num_devices=2,
    )
    return PlannedIteration(plan=plan, planning_ms=1.5, waited_ms=0.25 * iteration, source="worker")


class Feed:
    """Of rank 0: plans that are ready early, but for those that are `late`."""

    def __init__(self, late=()):
        self.late = late

    def get(self, iteration):
        if iteration == "broken":
            raise HydraError("no plan")
        return planned(iteration)

    def peek(self, iteration):
        return None if iteration in self.late else planned(iteration).to_json() | {"waited_ms": 0.0}


class Ranks:
    """Two ranks in one process, which begin an iteration one after the other."""

    def __init__(self, monkeypatch, feed, fetch=None):
        self.rank, self.sent, self.feed = 0, b"", feed
        self.sizes, self.fetched = [], [[], []]
        monkeypatch.setattr(planning.dist, "get_rank", lambda: self.rank)
        monkeypatch.setattr(planning, "broadcast_bytes", self.broadcast)
        self.fetchers = [self.fetcher(rank, fetch) for rank in range(2)]
        self.ahead = [RowPrefetcher(torch.device("cpu")) for _ in range(2)]

    def broadcast(self, payload, source, device):
        if self.rank == 0:
            self.sent = payload
            self.sizes.append(len(payload))
        return self.sent

    def fetcher(self, rank, fetch):
        def noting(plan):
            beside = threading.current_thread() is not threading.main_thread()
            self.fetched[rank].append((plan.iteration, beside))
            if fetch is not None:
                fetch(rank, plan)
            return {0: plan.iteration}

        return noting

    def begin(self, iteration):
        """What each rank has; then both go on."""
        found = []
        for self.rank in range(2):
            plan, rows = self.ahead[self.rank].take(self.feed, iteration)
            try:
                own = self.fetchers[self.rank](plan.plan) if rows is None else rows.result()
                found.append((plan, own))
            except OSError as error:
                found.append((plan, str(error)))
        for each, fetch in zip(self.ahead, self.fetchers, strict=True):
            each.prefetch(fetch)
        return found


@pytest.mark.parametrize("late", [(), (2,), (1, 2, 3, 4)])
def test_all_ranks_have_the_plans_and_rows_that_they_have_without_it(monkeypatch, late):
    ranks = Ranks(monkeypatch, Feed(late))
    for iteration in range(4):
        for plan, rows in ranks.begin(iteration):
            assert plan == planned(iteration)
            assert rows == {0: iteration}
    for fetched in ranks.fetched:
        beside = [n for n in range(1, 4) if n not in late]
        assert [n for n, is_beside in fetched if is_beside and n < 4] == beside
        assert sorted(n for n, _ in fetched if n < 4) == [0, 1, 2, 3]


def test_each_plan_is_sent_once(monkeypatch):
    ranks = Ranks(monkeypatch, Feed())
    for iteration in range(3):
        ranks.begin(iteration)
    first, *others = ranks.sizes
    assert max(others) < 0.6 * first  # two plans, then one each


def test_rows_that_cannot_be_read_fail_in_their_own_iteration(monkeypatch):
    def fetch(rank, plan):
        if (rank, plan.iteration) == (1, 2):
            raise OSError("bad block")

    ranks = Ranks(monkeypatch, Feed(), fetch)
    found = [[rows for _, rows in ranks.begin(iteration)] for iteration in range(4)]
    assert found == [[{0: 0}] * 2, [{0: 1}] * 2, [{0: 2}, "bad block"], [{0: 3}] * 2]


def test_what_was_held_is_gone_where_other_iterations_come(monkeypatch):
    ranks = Ranks(monkeypatch, Feed())
    ranks.begin(0)
    for each in ranks.ahead:
        each.cancel()
    assert [rows for _, rows in ranks.begin(7)] == [{0: 7}] * 2
    assert [rows for _, rows in ranks.begin(3)] == [{0: 3}] * 2  # not 8, which is held


def test_an_error_of_the_planner_is_raised_on_all_ranks(monkeypatch):
    ranks = Ranks(monkeypatch, Feed())
    ranks.begin(0)
    for ranks.rank, words in ((0, "no plan"), (1, "rank 0: no plan")):
        with pytest.raises(HydraError, match=words):
            ranks.ahead[ranks.rank].take(ranks.feed, "broken")
