"""SIGTERM as a request to engines: who is asked, what the handler that was there gets, and what
stays.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time

import pytest
import torch

from ds_hydra.engine.ranks import sigterm
from ds_hydra.engine.ranks.sigterm import Sigterm

DEVICE = torch.device("cpu")


class Engine:
    """A watcher."""


@pytest.fixture
def calls(monkeypatch):
    """Calls of the handler that the program has set."""
    made = []
    monkeypatch.setattr(sigterm, "gather_flags", lambda mine, _: [mine])
    monkeypatch.setattr(sigterm.dist, "get_rank", lambda: 0)
    before = signal.signal(signal.SIGTERM, lambda number, frame: made.append("own"))
    yield made
    signal.signal(signal.SIGTERM, before)


def arrives():
    signal.raise_signal(signal.SIGTERM)


def test_the_handler_that_was_there_is_called_though_the_answer_fails(calls):
    asked, engine = Sigterm(), Engine()
    asked.watch(engine, DEVICE)
    arrives()
    with pytest.raises(RuntimeError, match="a rank is lost"), asked.answering():
        raise RuntimeError("a rank is lost")
    assert calls == ["own"]
    asked.leave(engine)


def test_the_handler_that_was_there_is_called_after_the_answer_and_is_back_after_the_last(calls):
    asked, first, second = Sigterm(), Engine(), Engine()
    own = signal.getsignal(signal.SIGTERM)
    asked.watch(first, DEVICE)
    asked.watch(second, DEVICE)
    arrives()
    assert (asked.is_asked(first), asked.is_asked(Engine()), calls) == (True, False, [])
    with asked.answering():
        asked.leave(first)
        arrives()  # schedulers send it again
        assert calls == []
    assert calls == ["own"]
    asked.leave(second)
    assert signal.getsignal(signal.SIGTERM) is own
    assert calls == ["own"]
    asked.watch(first, DEVICE)
    assert not asked.is_asked(first), "the signal was answered"
    asked.leave(first)


def test_a_signal_that_no_engine_has_answered_goes_to_the_handler_that_was_there(calls):
    asked, engine = Sigterm(), Engine()
    asked.watch(engine, DEVICE)
    arrives()
    asked.leave(engine)
    assert calls == ["own"]


@pytest.mark.parametrize("chains", [True, False])
def test_a_handler_that_was_set_later_stays_and_may_call_the_one_before(calls, chains):
    asked, engine = Sigterm(), Engine()
    asked.watch(engine, DEVICE)
    ours = signal.getsignal(signal.SIGTERM)

    def later(number, frame):
        calls.append("later")
        if chains:
            ours(number, frame)

    signal.signal(signal.SIGTERM, later)
    asked.leave(engine)
    arrives()
    assert calls == ["later", "own"][: 1 + chains]
    calls.clear()
    asked.watch(engine, DEVICE)
    asked.leave(engine)
    assert signal.getsignal(signal.SIGTERM) is later
    arrives()
    assert set(calls) == {"later"}, "handlers that call each other would go on for ever"


def test_in_a_thread_a_word_says_that_nothing_is_saved(calls, caplog):
    asked, engine = Sigterm(), Engine()
    own = signal.getsignal(signal.SIGTERM)
    thread = threading.Thread(target=asked.watch, args=(engine, DEVICE), name="Train")
    thread.start()
    thread.join()
    (record,) = caplog.records
    assert "not be noticed on rank 0" in record.getMessage()
    assert "thread 'Train'" in record.getMessage()
    assert signal.getsignal(signal.SIGTERM) is own


def test_an_engine_that_ends_in_a_thread_leaves_the_signal_to_the_handler_that_was_there(calls):
    asked, engine = Sigterm(), Engine()
    asked.watch(engine, DEVICE)
    arrives()
    thread = threading.Thread(target=asked.leave, args=(engine,))
    thread.start()
    thread.join()
    arrives()
    assert calls == ["own", "own"]


def fork(action):
    """A process that forks off with what this one has set."""
    process = multiprocessing.get_context("fork").Process(target=action)
    process.start()
    return process


def leave_without_an_answer():
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    asked, engine = Sigterm(), Engine()
    asked.watch(engine, DEVICE)
    arrives()
    asked.leave(engine)


def watch_and_fork():
    """A data loader's worker, say, which is ended by SIGTERM."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    engine = Engine()
    sigterm.SIGTERM.watch(engine, DEVICE)
    runs, began = os.pipe()
    worker = fork(lambda: (os.write(began, b"x"), time.sleep(60)))
    os.read(runs, 1)  # Python drops signals that a fork gets before it runs
    worker.terminate()
    worker.join()
    os._exit(worker.exitcode == -signal.SIGTERM)


def test_without_a_handler_the_process_ends_as_it_would_have(calls):
    unanswered, with_worker = fork(leave_without_an_answer), fork(watch_and_fork)
    unanswered.join()
    with_worker.join()
    assert (unanswered.exitcode, with_worker.exitcode) == (-signal.SIGTERM, 1)
