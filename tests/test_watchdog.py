"""The watchdogs of two ranks, in one process."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from queue import Queue

import pytest

from ds_hydra.engine.ranks import agreement, watchdog
from ds_hydra.engine.ranks.watchdog import Watchdog
from ds_hydra.errors import HydraConfigError, RankLostError


@contextlib.contextmanager
def connected():
    """Watchdogs of ranks 0 and 1."""
    told = Queue()

    def make(rank):
        def exchange(text):
            if rank == 0:
                told.put(text)
            return text or told.get()

        return Watchdog(rank, 2, exchange, places=["", ""], silence_s=60, grace_s=60)

    with ThreadPoolExecutor(2) as pool:
        both = list(pool.map(make, range(2)))
    try:
        yield both
    finally:
        for watchdog in both:
            watchdog.close()


@pytest.fixture
def pair():
    with connected() as both:
        yield both


def wait_until(is_so):
    end = time.monotonic() + 30
    while not is_so():
        assert time.monotonic() < end
        time.sleep(0.01)


@pytest.mark.parametrize("leaving", [0, 1])
def test_a_rank_that_has_left_is_named_and_nothing_of_it_stays(pair, leaving):
    pair[leaving].close()
    other = pair[1 - leaving]
    wait_until(lambda: other.is_left)
    named = pytest.raises(RankLostError, match=f"rank {leaving} is gone: its engine was destroyed")
    with named, other.section("saving"):
        pass


@pytest.mark.parametrize("late", [0, 1])
def test_a_rank_that_leaves_waits_for_the_others(pair, late):
    with ThreadPoolExecutor(2) as pool:
        early = pool.submit(pair[1 - late].leave)
        wait_until(lambda: pair[late].is_left)
        time.sleep(0.2)
        assert not early.done()
        pair[late].leave()
        early.result(30)


@pytest.mark.parametrize("lost", [0, 1])
def test_a_rank_that_is_lost_while_the_others_leave_is_named(pair, lost, monkeypatch):
    with ThreadPoolExecutor(2) as pool:
        other = pool.submit(pair[1 - lost].leave)
        wait_until(lambda: pair[lost].is_left)
        monkeypatch.setattr(pair[lost], "_tell", lambda verdict: None)
        pair[lost].close()  # without a word, as a process that is killed
        with pytest.raises(RankLostError, match=f"rank {lost} is gone: its process ended"):
            other.result(30)


def test_a_loss_that_was_raised_is_not_raised_again_when_leaving(pair, monkeypatch):
    monkeypatch.setattr(pair[1], "_tell", lambda verdict: None)
    pair[1].close()
    wait_until(lambda: pair[0]._relevant_verdict() is not None)
    with pytest.raises(RankLostError), pair[0].section("saving"):
        pass
    pair[0].leave()


def test_closing_gives_back_descriptors_and_threads_at_once(monkeypatch):
    monkeypatch.setattr(watchdog, "TICK_S", 20.0)
    begin = time.monotonic()
    before = len(os.listdir("/proc/self/fd")), threading.active_count()
    for _ in range(3):
        with connected():
            assert threading.active_count() == before[1] + 2
            time.sleep(0.1)  # until they wait
    assert (len(os.listdir("/proc/self/fd")), threading.active_count()) == before
    assert time.monotonic() - begin < 20.0, "a thread has slept on"


def test_an_error_that_one_rank_alone_raises_is_told(pair):
    def fail(watchdog, error):
        with pytest.raises(type(error)), watchdog.section("loading"):
            raise error

    shared = HydraConfigError("on all ranks")
    setattr(shared, agreement._ON_ALL_RANKS, True)
    with pair[0].section("loading"):
        fail(pair[1], shared)
        time.sleep(0.1)
        assert pair[0]._relevant_verdict() is None
    with pair[0].section("loading"):
        fail(pair[1], HydraConfigError("on this rank alone"))
        wait_until(lambda: pair[0]._relevant_verdict() is not None)
        verdict = pair[0]._relevant_verdict()
        assert verdict.text == "failed in loading: HydraConfigError: on this rank alone"
    with pair[0].section("the next one"):
        assert not pair[0].is_left
