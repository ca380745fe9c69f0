"""Streamed layers: the gradients of one process, equal bits in any order, nothing left behind."""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import threading
from pathlib import Path

import pytest
import torch.distributed as dist
from deepspeed.utils import safe_get_local_grad
from distributed import run_distributed
from engines import start_hydra
from faults import die, run_until_end
from models import VOCAB_SIZE, tiny
from nodes import hosts_or_skip, run_on_hosts
from passing_layers import (
    link_memory,
    losses_with_frozen_layers,
    repeats,
)
from peer_homes import homes_in_parts
from single_process import random_examples
from test_engine_parity import RELATIVE_TOLERANCE, assert_parity, check_gradients
from test_nodes import own_counters

from ds_hydra.engine.ranks import shared_memory
from ds_hydra.engine.transfer.stream_plan import check_streams
from ds_hydra.errors import HydraConfigError
from ds_hydra.strategy import Scheme

STRATEGIES = (
    "1x<4,1;stream>",
    "1x<2,1> + 1x<1,1;stream>",
    "1x<sp2,1;stream> + 1x<1,2;ckpt=3;stages=3,1;stream>",
)
"""Of homes in parts; the others are in `test_parity_table.py`."""

FROZEN = ("4x<1,1;stream>", "1x<2,2>", "2x<2,1;stream>", "1x<2,2>", "4x<1,1>")
MEASURED = ("4x<1,1>", "4x<1,1;stream>", "2x<2,1;stream>", "2x<1,2;stream=2>")


def refusals():
    """What each rank raises where memory is scarce, or cannot be opened by one rank."""
    raised = []
    for name, replacement in (
        ("available_bytes", lambda: 1000.0),
        ("_open", functools.partial(_closed_to_rank_2, shared_memory._open)),
    ):
        kept = getattr(shared_memory, name)
        setattr(shared_memory, name, replacement)
        try:
            start_hydra(tiny("llama"), hydra={"strategies": ["4x<1,1;stream>"]})
        except HydraConfigError as error:
            raised.append(str(error))
        setattr(shared_memory, name, kept)
    return raised


def _closed_to_rank_2(open_memory, *arguments):
    if dist.get_rank() != 2:
        return open_memory(*arguments)
    return open_memory(1, 1 << 20, *arguments[2:])


def in_parts():
    """The same of homes that accelerators have."""
    with homes_in_parts():
        return {
            "parity": check_gradients("llama_tied", STRATEGIES),
            "repeats": repeats("2x<2,1;stream>"),
            "frozen": losses_with_frozen_layers(FROZEN),
            "memory": link_memory(MEASURED),
        }


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
        "frozen": losses_with_frozen_layers(FROZEN),
        "memory": link_memory(MEASURED),
        "refusals": refusals(),
    }


@pytest.fixture(scope="module")
def results():
    return run_distributed(checks, 4, timeout_s=900)


@pytest.mark.distributed
def test_equal_bits(results):
    for result in results:
        assert result["repeats"] == [True] * 3


@pytest.mark.distributed
def test_frozen_layers_and_evaluation(results):
    for result in results:
        check_frozen(*result["frozen"])


def check_frozen(evaluated, trained):
    assert evaluated == pytest.approx([evaluated[0]] * len(evaluated), rel=1e-6)
    assert trained[0] == pytest.approx(evaluated[0], rel=1e-6)
    assert trained == sorted(trained, reverse=True), "nothing was trained"


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


def check_memory(found, shared):
    """What was stated is what was held, without the `shared` home where layers stream."""
    for text, (stated, held) in found.items():
        home = shared if "stream" in text else 0
        assert held == stated.slice_bytes + stated.gradient_bytes - home, text


@pytest.mark.distributed
def test_homes_in_parts(results):
    assert_parity(results[0]["in parts"]["parity"])
    for result in results:
        assert result["in parts"]["repeats"] == [True] * 3
        check_frozen(*result["in parts"]["frozen"])
        check_memory(*result["in parts"]["memory"][:2])


@pytest.mark.distributed
def test_memory_that_cannot_be_shared_is_refused_on_every_rank(results):
    for rank, result in enumerate(results):
        scarce, closed = result["refusals"]
        assert "<1,1;stream>: streamed layers need a home; leave stream out of" in scarce
        assert "of memory that the ranks of a host share, and 0.00 GB are free" in scarce
        assert "the memory of rank 0 on the same host cannot be opened" in closed, rank
        assert "start all ranks of a host as one user in one container" in closed


def test_an_accelerator_without_peer_memory_is_refused():
    check_streams([Scheme.parse("<1,1;stream>")], "cuda")
    with pytest.raises(HydraConfigError, match=r"<1,1;stream>: .* for cpu and cuda, not for npu;"):
        check_streams([Scheme.parse("<1,1;stream>")], "npu")


ON_TWO_HOSTS = (
    "4x<1,1;stream>",
    "1x<2,2;stream=1>",
    "1x<2,1;stream> + 1x<1,2;stream=1>",
    "1x<4,1;stream>",
    "1x<sp2,1;stream> + 1x<1,1>",
)


def counted_bytes(engine, text):
    """Bytes that this host receives in one iteration, by its interface."""
    examples = random_examples((9, 17, 30, 5), VOCAB_SIZE, seed=0)
    for _ in range(2):  # the first makes connections
        dist.barrier()
        before = own_counters()
        dist.barrier()
        engine.train_batch(examples, strategy=text)
        dist.barrier()
        counted = own_counters() - before
    return counted.received_bytes - 66 * counted.received_packets


def bytes_beside_frozen():
    """Bytes that this host receives in an iteration in which the last layer alone is trained: as
    ever, and after an edit of a frozen weight; and the losses with those of one that pulls all.
    """
    found, losses = [], []
    examples = random_examples((9, 17, 30, 5), VOCAB_SIZE, seed=0)
    for keep in (True, False):
        model = tiny("llama", hidden_size=128, intermediate_size=352)
        for param in model.parameters():
            param.requires_grad_(False)
        for param in model.model.layers[-1].parameters():
            param.requires_grad_(True)
        engine = start_hydra(model, hydra={"link": {"keep_frozen": keep}})
        text = "4x<1,1;stream>"
        found.append(counted_bytes(engine, text))
        before = own_counters()
        engine.hydra.stage_model.params[3].ds_tensor.data.mul_(1.5)
        losses.append(float(engine.train_batch(examples, strategy=text)))
        found.append((own_counters() - before).received_bytes)
        losses.append(float(engine.train_batch(examples, strategy="4x<1,1>")))
        engine.destroy()
    return found, losses


def as_on_one_host(count):
    """Parity, repeats, and bytes that arrived at this host with a home and without one."""
    found = {
        "errors": {
            f"{family} {case}": [error, loss_error]
            for family in ("llama_tied", "qwen3")
            for case, (error, _, loss_error) in check_gradients(family, ON_TWO_HOSTS).items()
        },
        "repeats": repeats("1x<2,1;stream> + 2x<1,1;stream>"),
        "frozen": losses_with_frozen_layers(FROZEN),
    }
    with homes_in_parts():
        found["errors"] |= {
            f"in parts {case}": [error, loss_error]
            for case, (error, _, loss_error) in check_gradients("llama_tied", ON_TWO_HOSTS).items()
        }
        found["repeats"] += repeats("1x<2,1;stream> + 2x<1,1;stream>")
    if count:
        engine = start_hydra(tiny("llama", hidden_size=128, intermediate_size=352))
        found["bytes"] = {
            text: counted_bytes(engine, text) for text in ("4x<1,1>", "4x<1,1;stream>")
        }
        found["numel"] = sum(spec.numel for spec in engine.hydra.stage_model.specs)
        found["frozen bytes"] = bytes_beside_frozen()
    return found


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("ranks_on", [(2, 2), (2, 1, 1)])
def test_homes_of_several_hosts(tmp_path, ranks_on):
    """Gradients of one process, equal bits again and again, and every byte enters a host once."""
    with hosts_or_skip(len(ranks_on)) as hosts:
        ended = run_on_hosts(as_on_one_host, hosts, ranks_on, tmp_path, len(ranks_on) == 2)
    for rank in ended:
        assert rank.exit_code == 0, rank.stderr
        assert rank.value["repeats"] == [True] * 6
    assert len(ended[0].value["errors"]) == 3 * (
        len(ON_TWO_HOSTS) + 3
    )  # three can have an empty pipeline
    check_frozen(*ended[0].value["frozen"])
    for case, errors in ended[0].value["errors"].items():
        assert max(errors) <= RELATIVE_TOLERANCE, case
    for first in (ended[0].value, ended[2].value):
        if "bytes" in first:
            (kept, edited, *pulled), losses = first["frozen bytes"]
            assert kept < 0.5 * min(edited, *pulled)
            assert losses[:2] == losses[2:]
            assert losses[1] < losses[0]
            least = 4 * first["numel"]  # half of the weights and half of the gradients, in fp32
            for text, received in first["bytes"].items():
                assert least <= received <= 1.1 * least, text


def one_rank_dies(folder, where):
    """Rank 1 is killed the next time it comes to `where`, in the second iteration."""
    in_parts = homes_in_parts() if where == "send" else contextlib.nullcontext()
    with in_parts:
        _die_at(folder, where)


def _die_at(folder, where):
    engine = start_hydra(tiny("llama_tied"), hydra={"faults": {"grace_s": 1}})
    examples = random_examples((9, 5, 14, 7), VOCAB_SIZE, seed=0)
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
