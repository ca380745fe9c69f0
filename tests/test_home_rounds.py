"""Homes of several hosts fill and empty beside computation: equal bits, and nobody is early."""

from __future__ import annotations

import contextlib
import datetime
import signal
import threading
import time
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from distributed import run_distributed
from engines import start_hydra
from faults import die, run_until_end
from models import VOCAB_SIZE, tiny
from peer_homes import homes_in_parts
from single_process import random_examples
from test_engine_parity import assert_parity, check_gradients

from ds_hydra.engine import propagation
from ds_hydra.engine.ranks.hosts import Hosts
from ds_hydra.engine.transfer import home_rounds
from ds_hydra.engine.transfer.home_rounds import Milestone, Progress, progress_bytes
from ds_hydra.engine.transfer.link_session import Abandoned
from ds_hydra.strategy import Strategy

STRATEGIES = (
    "4x<1,1;stream>",
    "1x<2,2;stream>",
    "1x<2,1;stream> + 1x<1,2;stream>",
    "1x<4,1;stream>",
    "1x<sp2,1;stream> + 1x<1,1>",
)
SLOW = ("4x<1,1;stream>", "2x<2,1;stream>")
DELAY_S = 0.03
NUM_ROUNDS = 6
"""Of four layers, embedding and head."""


def on_two_hosts():
    """Engines started within take ranks 0 and 1 for one host, 2 and 3 for another."""
    hosts = Hosts(names=("a", "b"), of_rank=(0, 0, 1, 1))
    return mock.patch.object(propagation, "find_hosts", return_value=hosts)


def late(function, is_late, seen, what):
    """`function`, told to `seen`, and `DELAY_S` late if it `is_late`."""

    def delayed(*arguments, **named):
        seen.append(what)
        if is_late:
            time.sleep(DELAY_S)
        return function(*arguments, **named)

    return delayed


def iterations(text, *, overlap, in_parts, slow):
    """Losses and weights of three iterations and an evaluation, and what happened in which order in
    each; rank 1 receives late or adds late, if it is to.
    """
    seen, orders = [], []
    hydra = {"link": {"overlap": overlap}}
    with homes_in_parts() if in_parts else contextlib.nullcontext(), on_two_hosts():
        engine = start_hydra(tiny("llama_tied", num_hidden_layers=4), hydra=hydra)
        links = engine.hydra.propagator.links
        engine.hydra.prepare_forced(Strategy.parse(text))
        is_slow = dist.get_rank() == 1
        links.pull_link.finish = late(
            links.pull_link.finish, is_slow and slow == "receiving", seen, "received"
        )
        links.push_link.finish = late(links.push_link.finish, False, seen, "sent")
        links.home.add = late(links.home.add, is_slow and slow == "adding", seen, "add")
        model = engine.hydra.stage_model
        model.forward_stage = late(model.forward_stage, False, seen, "forward")
        losses = []
        for seed in range(3):
            examples = random_examples((9, 17, 30, 5, 40, 3), VOCAB_SIZE, seed=seed)
            losses.append(float(engine.train_batch(examples, strategy=text)))
            orders.append(list(seen))
            seen.clear()
        losses.append(float(engine.eval_batch(examples, strategy=text)))
        weights = [p.ds_tensor.clone() for p in model.params]
        engine.destroy()
    return losses, weights, orders


def compare():
    found = {}
    for in_parts in (False, True):
        for text in SLOW:
            wanted = iterations(text, overlap=False, in_parts=in_parts, slow="")
            for slow in ("", "receiving", "adding"):
                losses, weights, orders = iterations(
                    text, overlap=True, in_parts=in_parts, slow=slow
                )
                found[in_parts, text, slow] = (
                    losses == wanted[0],
                    all(map(torch.equal, weights, wanted[1])),
                    orders,
                )
            found[in_parts, text, "apart"] = True, True, wanted[2]
    return found


def parity():
    found = {}
    for in_parts in (False, True):
        with homes_in_parts() if in_parts else contextlib.nullcontext(), on_two_hosts():
            found[in_parts] = check_gradients("llama_tied", STRATEGIES)
    return found


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.timeout(900)
def test_equal_bits_whoever_is_late():
    for rank, result in enumerate(run_distributed(compare, 4, timeout_s=800)):
        for case, (losses, weights, orders) in result.items():
            assert losses, (rank, case)
            assert weights, (rank, case)
            began = [order[: order.index("forward")].count("received") for order in orders]
            left = [order[_last(order, "add") :].count("sent") for order in orders]
            for order in orders:
                assert order.count("received") == order.count("sent") == NUM_ROUNDS, case
            if case[2] == "apart":
                assert {*began, *left} == {NUM_ROUNDS}, case
            if rank == 1 and case[2] == "receiving":
                assert min(began) < NUM_ROUNDS, case
            if rank == 1 and case[2] == "adding":
                assert min(left) < NUM_ROUNDS, case


def _last(order, what):
    return len(order) - 1 - order[::-1].index(what)


@pytest.mark.distributed
@pytest.mark.timeout(900)
def test_gradients_equal_one_process():
    for found in run_distributed(parity, 4, timeout_s=800)[0].values():
        assert_parity(found)


def one_rank_dies(folder, where):
    """Rank 1 is killed the next time it comes to `where`, in the second iteration."""
    with on_two_hosts():
        engine = start_hydra(tiny("llama_tied"), hydra={"faults": {"grace_s": 1}})
        examples = random_examples((9, 5, 14, 7), VOCAB_SIZE, seed=0)
        engine.train_batch(examples, strategy="4x<1,1;stream>")
        if dist.get_rank() == 1:
            links = engine.hydra.propagator.links
            getattr(links, where).finish = lambda *_: die(folder)
        engine.train_batch(examples, strategy="4x<1,1;stream>")


@pytest.mark.distributed
@pytest.mark.timeout(300)
@pytest.mark.parametrize("where", ["pull_link", "push_link"])
def test_a_rank_that_dies_in_a_round_is_named_by_those_that_wait_for_it(tmp_path, where):
    ended = run_until_end(one_rank_dies, 4, tmp_path, str(tmp_path), where)
    assert ended[1].exit_code == -signal.SIGKILL
    for rank in (0, 2, 3):
        assert ended[rank].exit_code in (1, 75), ended[rank].stderr
        assert "rank 1" in ended[rank].stderr, ended[rank].stderr


def test_progress_is_that_of_the_last_rank():
    memory = torch.zeros(progress_bytes(2), dtype=torch.uint8)
    first, second = (Progress(memory, (4, 5), place) for place in (0, 1))
    left = threading.Event()
    for _ in range(2):
        first.begin()
        first.report(Milestone.RECEIVED, 3)
        assert not first.is_reached(Milestone.RECEIVED, 1), (
            "the other one is in the iteration before"
        )
        second.begin()
        second.report(Milestone.RECEIVED, 2)
        second.report(Milestone.RECEIVED, 1)
        assert first.is_reached(Milestone.RECEIVED, 2)
        assert not second.is_reached(Milestone.RECEIVED, 3)
        first.wait(Milestone.RECEIVED, 2, left)
    second.fail()
    with pytest.raises(RuntimeError, match="rank 5 of this host did not exchange"):
        first.wait(Milestone.RECEIVED, 3, left)
    second.report(Milestone.RECEIVED, 3)
    assert not first.is_reached(Milestone.RECEIVED, 3), "who has failed gets no further"
    left.set()
    with pytest.raises(Abandoned):
        first.wait(Milestone.RECEIVED, 3, left)


def test_a_late_report_is_of_its_own_iteration():
    progress = Progress(torch.zeros(progress_bytes(1), dtype=torch.uint8), (0,), 0)
    progress.begin()
    report = progress.reporting(Milestone.ADDED, 3)
    progress.begin()
    report()
    assert not progress.is_reached(Milestone.ADDED, 1)


def test_the_rank_that_failed_is_named_and_own_computation_has_no_limit(monkeypatch):
    memory = torch.zeros(progress_bytes(3), dtype=torch.uint8)
    first, slow, failed = (Progress(memory, (4, 5, 6), place) for place in range(3))
    for progress in (first, slow, failed):
        progress.begin()
    first.report(Milestone.ADDED, 2)
    failed.fail()
    with pytest.raises(RuntimeError, match="rank 6 of this host did not"):
        first.wait(Milestone.ADDED, 2, threading.Event())
    failed.begin()
    longest = datetime.timedelta(seconds=0.2)
    monkeypatch.setattr(home_rounds, "default_pg_timeout", longest)
    with pytest.raises(RuntimeError, match=r"rank 5 of this host has not .* for 0 s"):
        first.wait(Milestone.ADDED, 2, threading.Event())
    slow.report(Milestone.ADDED, 3)
    timer = threading.Timer(0.5, first.reporting(Milestone.ADDED, 3))
    timer.start()
    first.wait(Milestone.ADDED, 3, threading.Event())
