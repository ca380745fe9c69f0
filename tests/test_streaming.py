"""Streamed layers: the gradients of one process, equal bits in any order, nothing left behind."""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import threading
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from deepspeed.utils import safe_get_local_grad
from distributed import run_distributed
from engines import refused, start_hydra
from faults import die, run_until_end
from models import VOCAB_SIZE, tiny
from passing_layers import (
    check_frozen,
    check_memory,
    link_memory,
    losses_with_frozen_layers,
    repeats,
)
from peer_homes import homes_in_parts
from single_process import random_examples
from test_engine_parity import assert_parity, check_gradients

from ds_hydra.engine import propagation
from ds_hydra.engine.ranks import hosts
from ds_hydra.engine.ranks.hosts import Hosts
from ds_hydra.engine.transfer import home as home_module
from ds_hydra.engine.transfer.schedule import check_streams
from ds_hydra.errors import HydraConfigError
from ds_hydra.strategy import Scheme
from ds_hydra.zero_link import Region

STRATEGIES = (
    "1x<4,1;stream>",
    "1x<2,1> + 1x<1,1;stream>",
    "1x<sp2,1;stream> + 1x<1,2;ckpt=3;stages=3,1;stream>",
)
"""Of homes in parts; the others are in `test_parity_table.py`."""

FROZEN = ("4x<1,1;stream>", "1x<2,2>", "2x<2,1;stream>", "1x<2,2>", "4x<1,1>")
MEASURED = ("4x<1,1>", "4x<1,1;stream>", "2x<2,1;stream>", "2x<1,2;stream>")


INSTEAD = ("4x<1,1;gather>", "1x<2,2>")


def refusals():
    """What each rank raises where memory is scarce, or cannot be opened by one rank."""
    raised = []
    for name, replacement in (
        ("available_bytes", lambda: 1000.0),
        ("_open", functools.partial(_closed_to_rank_2, hosts._open)),
    ):
        with mock.patch.object(hosts, name, replacement):
            raised.append(refused(start_streaming))
    with mock.patch.dict(hosts.ALLOCATORS, {"cpu": _full_on_rank_1}):
        raised.append(refused(start_streaming))
    return raised


def start_streaming():
    start_hydra(tiny("llama"), hydra={"strategies": ["4x<1,1;stream>"]})


def refused_on_two_hosts():
    """What each rank raises at the start and for one iteration, and losses of what the errors say
    to write.
    """
    hosts = Hosts(names=("a", "b"), of_rank=(0, 0, 1, 1))
    examples = random_examples((9, 17, 30, 5), VOCAB_SIZE, seed=0)
    with mock.patch.object(propagation, "find_hosts", return_value=hosts):
        at_start = refused(start_streaming)
        engine = start_hydra(tiny("llama"))
        forced = refused(lambda: engine.train_batch(examples, strategy="1x<2,2;stream>"))
        losses = [float(engine.train_batch(examples, strategy=s)) for s in INSTEAD]
        engine.destroy()
    return at_start, forced, losses


def _full_on_rank_1(nbytes, device, group):
    """A device without memory on one rank, which so comes to no rendezvous."""
    if dist.get_rank() == 1:
        raise torch.OutOfMemoryError("no memory left")
    return dist.barrier


def _closed_to_rank_2(open_memory, process, number, *identity, **names):
    if dist.get_rank() == 2:
        process, number = 1, 1 << 20
    return open_memory(process, number, *identity, **names)


def in_parts():
    """The same of homes that accelerators have."""
    with homes_in_parts():
        return {
            "parity": check_gradients("llama_tied", STRATEGIES),
            "repeats": repeats("2x<2,1;stream>"),
            "frozen": losses_with_frozen_layers(FROZEN),
            "memory": link_memory(MEASURED),
        }


def held_up():
    """Whether sums are right where no rank adds before all have come to a collective, and how often
    computation waited.
    """
    with homes_in_parts():
        engine = start_hydra(tiny("llama"))
        engine.train_batch(
            random_examples((9, 17, 30, 5), VOCAB_SIZE, seed=0), strategy="4x<1,1;stream>"
        )
    home, specs = engine.hydra.propagator.links.home, engine.hydra.stage_model.specs
    home._passing_bytes, goes_on, add = 0, threading.Event(), home._adder.add

    def held(*arguments):
        assert goes_on.wait(60), "computation waits for a thread that waits for computation"
        add(*arguments)

    home._adder.add = held
    home.begin_sums(num_addends=8)
    dist.barrier()

    def add_ones():
        with mock.patch.object(home_module, "wait", wraps=home_module.wait) as waits:
            for param, spec in enumerate(specs):
                home.add(param, Region(0, spec.num_rows, 0, spec.num_cols), torch.ones(spec.numel))
        return waits.call_count

    num_waits = add_ones()
    dist.barrier()
    goes_on.set()
    home._pending[0][0].result(60)  # the one that was waited for in vain
    add_ones()
    num_pending = len(home._pending)  # nothing is held up any more: each was waited for
    home.finish_adds()
    dist.barrier()
    grads_P = [torch.zeros_like(grad_P) for grad_P in home.grads_P]
    home.collect(grads_P)
    sums = {float(value) for grad_P in grads_P for value in grad_P.unique()}
    return sums <= {0.0, 8.0}, 8.0 in sums, num_waits, num_pending


def lent():
    """Whether ZeRO-3's gradients lie in the home, and elements that DeepSpeed has beside it."""
    engine = start_hydra(tiny("llama"))
    examples = random_examples((9, 17, 30, 5), VOCAB_SIZE, seed=0)
    engine.train_batch(examples, strategy="2x<1,1>")
    before = engine.optimizer.grad_partitions_flat_buffer.numel()
    engine.train_batch(examples, strategy="4x<1,1;stream>")
    model, home = engine.hydra.stage_model, engine.hydra.propagator.links.home
    return before, engine.optimizer.grad_partitions_flat_buffer.numel(), [
        safe_get_local_grad(param).data_ptr() == grad_P.data_ptr()
        for param, grad_P in zip(model.params, home.grads_P, strict=True)
    ]  # fmt: skip


def checks():
    return {
        "repeats": repeats("2x<2,1;stream>"),
        "in parts": in_parts(),
        "lent": lent(),
        "held up": held_up(),
        "frozen": losses_with_frozen_layers(FROZEN),
        "memory": link_memory(MEASURED),
        "refusals": refusals(),
        "on two hosts": refused_on_two_hosts(),
    }


@pytest.fixture(scope="module")
def results():
    return run_distributed(checks, 4, timeout_s=900)


@pytest.mark.slow
@pytest.mark.distributed
def test_equal_bits(results):
    for result in results:
        assert result["repeats"] == [True] * 3


@pytest.mark.distributed
def test_frozen_layers_and_evaluation(results):
    for result in results:
        check_frozen(*result["frozen"])


@pytest.mark.distributed
def test_a_rank_holds_its_part_of_the_home_and_two_copied_layers(results):
    for result in results:
        found, shared, scratch = result["memory"]
        check_memory(found, shared)
        whole, streamed = found["4x<1,1>"][0], found["4x<1,1;stream>"][0]
        kept = whole.slice_bytes + whole.gradient_bytes
        assert streamed.slice_bytes + streamed.gradient_bytes - scratch < 0.35 * kept
        assert found["4x<1,1;stream>"][1] == 0


@pytest.mark.distributed
def test_zero_has_its_gradients_in_the_home(results):
    for result in results:
        before, after, is_there = result["lent"]
        assert before > after == 0
        assert all(is_there)


@pytest.mark.distributed
def test_homes_in_parts(results):
    assert_parity(results[0]["in parts"]["parity"])
    for result in results:
        assert result["in parts"]["repeats"] == [True] * 3
        check_frozen(*result["in parts"]["frozen"])
        check_memory(*result["in parts"]["memory"][:2])


@pytest.mark.distributed
def test_no_rank_waits_for_ever_for_gradients_that_another_one_adds(results):
    for result in results:
        are_right, are_there, num_waits, num_pending = result["held up"]
        assert are_right
        assert are_there
        assert 1 <= num_waits <= 4
        assert num_pending == 0


@pytest.mark.distributed
def test_memory_that_cannot_be_shared_is_refused_on_every_rank(results):
    for rank, result in enumerate(results):
        scarce, closed, full = result["refusals"]
        assert "<1,1;stream>: streamed layers need a home; leave stream out of" in scarce
        assert "of memory that the ranks of a host share, and 0.00 GB are free" in scarce
        assert "the memory of rank 0 on the same host cannot be opened" in closed, rank
        assert "start all ranks of a host as one user in one container" in closed
        assert "GB of cpu cannot be shared with the ranks of this host (no memory left)" in full


@pytest.mark.distributed
def test_layers_stream_on_one_host(results):
    for result in results:
        *errors, losses = result["on two hosts"]
        for error, instead in zip(errors, INSTEAD, strict=True):
            assert "there are 2 hosts; " in error
            assert error.endswith(f"'{instead}'")
        assert losses[0] > losses[1] > 0


def test_an_accelerator_without_peer_memory_is_refused():
    check_streams([Scheme.parse("<1,1;stream>")], "cuda")
    with pytest.raises(HydraConfigError, match=r"<1,1;stream>: .* for cpu and cuda, not for npu;"):
        check_streams([Scheme.parse("<1,1;stream>")], "npu")


def one_rank_dies(folder, where):
    """Rank 1 is killed the next time it comes to `where`, in the second iteration."""
    examples = random_examples((9, 5, 14, 7), VOCAB_SIZE, seed=0)
    with homes_in_parts() if where == "send" else contextlib.nullcontext():
        engine = start_hydra(tiny("llama_tied"), hydra={"faults": {"grace_s": 1}})
        engine.train_batch(examples, strategy="3x<1,1;stream>")
    if dist.get_rank() == 0:
        Path(folder, "owner").write_text(str(os.getpid()))
    if dist.get_rank() == 1:
        home = engine.hydra.propagator.links.home
        owner = {"adder": home._adder, "send": getattr(home, "_inbox", None)}.get(where, home)
        setattr(owner, "add" if where == "adder" else where, lambda *_: die(folder))
    engine.train_batch(examples, strategy="3x<1,1;stream>")


def stream_until_killed(folder, strategy, victim, delay_s):
    """Rank `victim` is killed `delay_s` after the first iteration, whatever it does then."""
    sizes = {"hidden_size": 128, "intermediate_size": 352, "num_hidden_layers": 6}
    engine = start_hydra(tiny("llama_tied", **sizes), hydra={"faults": {"grace_s": 1}})
    if dist.get_rank() == 0:
        Path(folder, "owner").write_text(str(os.getpid()))
    examples = random_examples((60, 50, 90, 70), VOCAB_SIZE, seed=0)
    engine.train_batch(examples, strategy=strategy)
    dist.barrier()
    if dist.get_rank() == victim:
        threading.Timer(delay_s, die, (folder,)).start()
    while True:
        engine.train_batch(examples, strategy=strategy)


@pytest.mark.distributed
@pytest.mark.timeout(700)
@pytest.mark.parametrize("where", ["fill", "adder", "collect", "send"])
def test_a_killed_rank_is_named_and_leaves_no_shared_memory(tmp_path, where):
    """In the adder it holds a lock that others wait for."""
    before = set(Path("/dev/shm").iterdir())
    ended = run_until_end(one_rank_dies, 3, tmp_path, str(tmp_path), where)
    assert ended[1].exit_code == -signal.SIGKILL
    for rank in (0, 2):
        assert ended[rank].exit_code in (1, 75), ended[rank].stderr
        assert "rank 1" in ended[rank].stderr, ended[rank].stderr
    name = f"ds_hydra_{(tmp_path / 'owner').read_text()}"
    left = {file.name for file in set(Path("/dev/shm").iterdir()) - before}
    assert not [file for file in left if "ds_hydra" in file]
    assert not any(name in text for text in open_files())


def open_files():
    """What all processes hold open."""
    for link in Path("/proc").glob("[0-9]*/fd/*"):
        with contextlib.suppress(OSError):
            yield str(link.readlink())
