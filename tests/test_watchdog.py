"""The watchdogs of two or three ranks, in one process."""

from __future__ import annotations

import contextlib
import datetime
import os
import socket
import struct
import sys
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from queue import Queue
from types import SimpleNamespace
from unittest import mock

import pytest
import torch.distributed as dist
from distributed import wait_until

from ds_hydra.engine.ranks import agreement, watchdog
from ds_hydra.engine.ranks.watchdog import Watchdog
from ds_hydra.errors import HydraConfigError, HydraError, RankLostError


@contextlib.contextmanager
def connected(on_told=lambda told: told, num_ranks=2):
    """Watchdogs of all ranks; others than rank 0 do `on_told` with what it has told, then
    connect.
    """
    told = Queue()

    def make(rank):
        def exchange(text):
            for _ in range(1, num_ranks if rank == 0 else 0):
                told.put(text)
            return text or on_told(told.get())

        places = [""] * num_ranks
        return Watchdog(rank, num_ranks, exchange, places=places, silence_s=60, grace_s=60)

    with ThreadPoolExecutor(num_ranks) as pool:
        watchdogs = list(pool.map(make, range(num_ranks)))
    try:
        yield watchdogs
    finally:
        for one in watchdogs:
            one.close()


@pytest.fixture
def pair():
    with connected() as both:
        yield both


def close_without_a_word(one):
    """End as a process that is killed."""
    with mock.patch.object(one, "_tell"):
        one.close()


def wait_for_verdict(one):
    """Return what `one` gets to know of another rank."""
    wait_until(lambda: one._relevant_verdict() is not None)
    return one._relevant_verdict()


def test_a_second_thread_is_refused_while_the_first_one_is_inside(pair):
    def enter():
        with pair[0].section("evaluation"):
            pass

    with ThreadPoolExecutor(1) as pool, pair[0].section("propagation"):
        enter()
        with pytest.raises(HydraError, match="the engine is in propagation in another thread"):
            pool.submit(enter).result()
    with ThreadPoolExecutor(1) as pool:
        pool.submit(enter).result()


@pytest.mark.parametrize("leaving", [0, 1])
def test_a_rank_that_has_left_is_named_and_nothing_of_it_stays(pair, leaving):
    pair[leaving].close()
    other = pair[1 - leaving]
    wait_until(lambda: other.is_left)
    named = pytest.raises(RankLostError, match=f"rank {leaving} is gone: its engine was destroyed")
    with named, other.section("saving"):
        pass


@pytest.mark.parametrize("late", [0, 1])
@pytest.mark.parametrize("comes", [True, False])
def test_a_rank_that_leaves_waits_for_the_others_and_names_one_that_is_lost(pair, late, comes):
    waiting, order = pair[1 - late], []
    with (
        ThreadPoolExecutor(1) as pool,
        mock.patch.object(waiting, "close", wraps=waiting.close) as close,
    ):
        close.side_effect = lambda: order.append("ends") or mock.DEFAULT
        early = pool.submit(waiting.leave)
        wait_until(lambda: pair[late].is_left)
        order.append("the late one comes")
        if comes:
            pair[late].leave()
            early.result()
        else:
            close_without_a_word(pair[late])
            with pytest.raises(RankLostError, match=f"rank {late} is gone: its process ended"):
                early.result()
    assert order == ["the late one comes", "ends"]


def test_rank_0_tells_the_others_of_a_lost_rank():
    with connected(num_ranks=3) as three:
        with mock.patch.object(three[0], "_tell", wraps=three[0]._tell) as tell:
            close_without_a_word(three[2])
            wait_for_verdict(three[0])
            assert tell.called
        assert wait_for_verdict(three[1]).rank == 2


@pytest.mark.parametrize("pause_s", [12.0, 600.0], ids=["alive", "suspended"])
def test_no_rank_that_lives_is_taken_for_silent(monkeypatch, pause_s):
    """Signs of life come in time, and what was suspended for longer than a silence forgives."""
    ahead_s, looks = [0.0], Counter()
    clock = SimpleNamespace(monotonic=lambda: time.monotonic() + ahead_s[0])
    monkeypatch.setattr(watchdog, "TICK_S", 0.01)
    monkeypatch.setattr(watchdog, "time", clock)
    monkeypatch.setattr(Watchdog, "_say_who_waits", lambda one, _: looks.update([one._rank]))
    with connected() as both:
        for _ in range(8):
            ahead_s[0] += pause_s
            seen = looks.copy()
            wait_until(lambda seen=seen: all(looks[rank] > seen[rank] + 1 for rank in range(2)))
        assert [(one._verdict, list(one._peers)) for one in both] == [(None, [1]), (None, [0])]


def test_of_a_silent_rank_is_said_what_may_hold_it_and_which_key_waits_longer(pair):
    pair[0]._silence_s = 0.5  # rank 1 says that it is alive every 15 s
    wait_for_verdict(pair[0])
    with pytest.raises(RankLostError) as raised, pair[0].section("plan"):
        pass
    for part in ("host cut off, process stopped", "Python's lock", "hydra.faults.silence_s"):
        assert part in str(raised.value)


def test_a_peer_that_had_nothing_to_say_after_all_is_kept(pair):
    """The kernel may wake who listens and have nothing to read."""
    (peer,) = pair[0]._peers.values()
    with mock.patch.object(peer, "connection", mock.Mock(recv=mock.Mock(side_effect=TimeoutError))):
        pair[0]._receive(peer)
    assert pair[0]._peers == {1: peer}


def test_a_loss_that_was_raised_is_not_raised_again_when_leaving(pair):
    close_without_a_word(pair[1])
    wait_for_verdict(pair[0])
    with pytest.raises(RankLostError), pair[0].section("saving"):
        pass
    pair[0].leave()


def test_closing_gives_back_descriptors_and_threads_at_once(monkeypatch):
    monkeypatch.setattr(watchdog, "TICK_S", 1e6)  # a thread that sleeps on hangs
    before = len(os.listdir("/proc/self/fd")), threading.active_count()
    for _ in range(3):
        with connected():
            assert threading.active_count() == before[1] + 2
            time.sleep(0.1)  # until they wait
    assert (len(os.listdir("/proc/self/fd")), threading.active_count()) == before


def test_an_error_that_one_rank_alone_raises_is_told(pair):
    def fail(watchdog, error):
        with pytest.raises(type(error)), watchdog.section("loading"):
            raise error

    shared = HydraConfigError("on all ranks")
    setattr(shared, agreement._ON_ALL_RANKS, True)
    with mock.patch.object(pair[1], "_tell") as tell:
        fail(pair[1], shared)
        assert not tell.called
    with pair[0].section("nothing"):
        pass
    with pair[0].section("loading"):
        fail(pair[1], HydraConfigError("on this rank alone"))
        told = wait_for_verdict(pair[0]).text
        assert told == "failed in loading: HydraConfigError: on this rank alone"
    with pair[0].section("the next one"):
        assert not pair[0].is_left


@pytest.mark.parametrize("orderly", [False, True])
def test_a_rank_that_is_lost_between_two_calls_is_named(pair, caplog, orderly):
    """A collective that breaks and is not the engine's names the rank."""
    if orderly:
        with pair[0].section("propagation"):
            pass
        pair[1].close()
    else:
        close_without_a_word(pair[1])
    broken = RuntimeError("gloo: Connection closed by peer")
    loss = pair[0].find_cause(broken)
    assert str(loss).startswith("rank 1 is gone")
    assert "rank 0 was between two calls of the engine" in str(loss)
    assert ("last checkpoint" in str(loss)) == orderly, (
        "nothing was trained where it has just begun"
    )
    told = [record.getMessage() for record in caplog.records]
    assert told == ([] if orderly else [str(loss)])


def test_a_failure_between_two_calls_is_told_once_and_is_the_reason_of_the_end(pair):
    error = ValueError("in a callback")
    with mock.patch.object(pair[1], "_tell", wraps=pair[1]._tell) as tell:
        for _ in range(2):
            assert pair[1].find_cause(error) is None
    assert tell.call_count == 1
    verdict = wait_for_verdict(pair[0])
    assert verdict.text == "failed between two calls of the engine: ValueError: in a callback"
    assert verdict.section is not None
    pair[1].close()
    wait_until(lambda: pair[0]._verdict.section is None)
    named = pytest.raises(RankLostError, match=r"rank 1 failed between .*in a callback")
    with named, pair[0].section("saving"):
        pass


def test_ranks_that_fail_alike_do_not_take_each_other_for_lost(pair):
    for one in pair:
        one.find_cause(ValueError("on all ranks"))
    wait_until(lambda: all(one._verdict is not None for one in pair))
    assert [one._relevant_verdict() for one in pair] == [None, None]


def run_beside(*actions):
    """Threads that each run one of `actions`; their numbers."""
    threads = [threading.Thread(target=action, daemon=True) for action in actions]
    for thread in threads:
        thread.start()
    return [thread.ident for thread in threads]


def test_what_waits_for_a_rank_is_told_from_what_works(tmp_path):
    store = dist.FileStore(str(tmp_path / "store"), 2)
    end = threading.Event()
    read, write = os.pipe()

    def collective():
        with contextlib.suppress(RuntimeError, dist.DistStoreError):
            store.wait(["never"], datetime.timedelta(seconds=5))

    def debugger():
        os.read(read, 1)

    waits, sleeps, reads = run_beside(collective, lambda: end.wait(30), debugger)
    wait_until(lambda: agreement.find_wait(waits) is not None)
    assert agreement.find_wait(waits) == agreement.find_wait(waits)
    assert agreement.find_wait(sleeps) is None
    assert agreement.find_wait(reads) is None
    end.set()
    os.write(write, b"x")
    wait_until(lambda: reads not in sys._current_frames())
    os.close(write)
    os.close(read)


@pytest.mark.parametrize(
    ("where", "ends"), [((1, 2), True), (None, False)], ids=["in a collective", "elsewhere"]
)
def test_a_rank_ends_itself_where_it_waits_in_vain_and_nowhere_else(
    pair, where, ends, monkeypatch, capfd
):
    ended = threading.Event()
    monkeypatch.setattr(watchdog.os, "_exit", lambda code: ended.set())
    monkeypatch.setattr(watchdog, "find_wait", lambda thread: where)
    now = time.monotonic()
    pair[0]._end_if_stuck(now)
    pair[0]._end_if_stuck(now + 61)
    assert not ended.is_set()
    close_without_a_word(pair[1])
    wait_for_verdict(pair[0])
    pair[0]._wait = None
    pair[0]._end_if_stuck(now + 100)
    assert not ended.is_set()
    pair[0]._end_if_stuck(now + 161)
    assert ended.is_set() == ends
    assert ("ending rank 0" in capfd.readouterr().err) == ends


def test_a_rank_that_waits_long_for_others_to_call_the_same_says_so_once(pair, caplog):
    now = time.monotonic()
    pair[0].call = "save_checkpoint()", now
    for seconds in (1, 29, 31, 61):
        pair[0]._say_who_waits(now + seconds)
    (record,) = caplog.records
    assert "rank 0 has waited 30 s in save_checkpoint() for other ranks" in record.getMessage()


def test_strangers_do_not_hold_the_start():
    """Silent ones, talkative ones, one that claims another rank with the right token, one that says
    it is rank 1 with another token.
    """
    strangers = []

    def greet(told):
        host, port, token = told.split()
        for hello in (*[b""] * 5, b"GET / HTTP/1.0\r\n\r\n....", bytes.fromhex(token), b"\0" * 19):
            stranger = socket.create_connection((host, int(port)), 30)
            stranger.sendall(hello)
            strangers.append(stranger)
        for own, rank in ((bytes.fromhex(token), 7), (bytes(len(token) // 2), 1)):
            wrong = socket.create_connection((host, int(port)), 30)
            wrong.sendall(own + struct.pack("!i", rank))
            strangers.append(wrong)
        return told

    with connected(greet) as both:  # an error where a stranger is waited for
        assert [list(one._peers) for one in both] == [[1], [0]]
        both[1].close()
        wait_until(lambda: both[0].is_left)  # heard of rank 1 itself
    for stranger in strangers:
        stranger.close()


@pytest.mark.skipif(not socket.has_dualstack_ipv6(), reason="no IPv6 here")
def test_the_watchdog_listens_where_the_ranks_have_met(monkeypatch):
    monkeypatch.setenv("MASTER_ADDR", "::1")
    with connected() as both:
        assert [list(one._peers) for one in both] == [[1], [0]]


def test_a_port_that_is_closed_is_named_with_the_key_that_does_without_it(monkeypatch):
    monkeypatch.setattr(watchdog, "_CONNECT_TIMEOUT_S", 1.0)
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    with pytest.raises(HydraConfigError, match=rf"port {port} .* hydra\.faults\.watchdog to false"):
        watchdog.connect(1, 2, lambda _: f"127.0.0.1 {port} 00")
    with pytest.raises(
        HydraConfigError, match=r"ranks \[1\] did not reach .* hydra\.faults\.watch"
    ):
        watchdog.connect(0, 2, lambda text: text)
