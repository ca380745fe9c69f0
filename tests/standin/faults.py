"""Faults put in on purpose, and what the stand-in says of them. Functions run on all ranks."""

from __future__ import annotations

from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from models import VOCAB_SIZE
from single_process import random_examples
from test_engine_parity import LENGTHS

from ds_hydra.engine import propagation
from ds_hydra.engine.parallel.one_f_one_b import PipelineStage
from ds_hydra.engine.transfer import link_thread
from standin import process_group
from standin.checks import full_allocator, observed, start
from standin.streams import Stream, stream


def without_the_wait_for_slices() -> int:
    """Races where the stream of the passes does not wait for what another thread's stream did."""
    engine = start("llama")
    examples = random_examples(LENGTHS, VOCAB_SIZE, seed=1)
    engine.train_batch(examples, strategy="2x<1,1>")

    def wait_on_the_host_alone(events: link_thread.BucketEvents, index: int) -> None:
        events._recorded[index].wait()

    with (
        mock.patch.object(link_thread.BucketEvents, "wait", wait_on_the_host_alone),
        observed() as found,
    ):
        engine.train_batch(examples, strategy="2x<1,1>")
    return found["num_races"]


def items() -> dict[str, int]:
    """Host waits of ds_hydra, and of somebody who reads the loss of every micro-batch."""
    engine = start("llama")
    examples = random_examples(LENGTHS, VOCAB_SIZE, seed=1)
    engine.train_batch(examples, strategy="2x<1,1>")
    original = propagation.Propagator._forward_micro_batch

    count = 0

    def read(*arguments: Any) -> Any:
        nonlocal count
        output = original(*arguments)
        output.sum().item()
        count += 1
        return output

    with observed() as found:
        engine.train_batch(examples, strategy="2x<1,1>")
    with (
        mock.patch.object(propagation.Propagator, "_forward_micro_batch", read),
        observed() as with_items,
    ):
        engine.train_batch(examples, strategy="2x<1,1>")
    return {"without": found["num_waits"], "with": with_items["num_waits"], "read": count}


def memory_between_messages() -> list[str]:
    """Where two stages wait for each other that take memory between a send and a receive, and whose
    allocators wait for the whole device.
    """
    engine = start("llama")
    examples = random_examples(LENGTHS, VOCAB_SIZE, seed=1)
    receive = PipelineStage._receive

    def receive_anew(stage: PipelineStage, like: torch.Tensor, *more: Any) -> torch.Tensor:
        return receive(stage, torch.empty_like(like), *more)

    with (
        mock.patch.object(process_group, "HANG_S", 2),
        mock.patch.object(PipelineStage, "_receive", receive_anew),
        full_allocator(),
    ):
        engine.train_batch(examples, strategy="1x<1,2>")
    return process_group.hangs[:]


def swapped_collectives() -> str:
    """What two collectives in another order on one rank lead to."""
    group = dist.new_group([0, 1])
    small, large = torch.ones(3, device="standin"), torch.ones(5, device="standin")
    process_group.checks_order = True
    try:
        for tensor in (small, large) if dist.get_rank() else (large, small):
            dist.all_reduce(tensor, group=group, async_op=True)
    except RuntimeError as error:
        return str(error)
    finally:
        process_group.checks_order = False
    return "nothing"


def swapped_messages() -> str:
    """What two messages of a pair, received in another order than sent, lead to."""
    group = dist.new_group([0, 1])
    small, large = torch.ones(3, device="standin"), torch.ones(5, device="standin")
    process_group.checks_order = True
    try:
        if dist.get_rank():
            dist.irecv(large, 0, group)
            dist.irecv(small, 0, group)
        else:
            dist.isend(small, 1, group)
            dist.isend(large, 1, group)
    except RuntimeError as error:
        return str(error)
    finally:
        process_group.checks_order = False
    return "nothing"


def a_tensor_of_the_cpu() -> str:
    """What a collective over a tensor that was left on the CPU leads to."""
    try:
        dist.all_reduce(torch.ones(2))
    except RuntimeError as error:
        return str(error)
    return "nothing"


def mixed_devices() -> str:
    """What a tensor that was left on the CPU leads to."""
    try:
        torch.ones(2, device="standin") + torch.ones(2)
    except RuntimeError as error:
        return str(error)
    return "nothing"


def a_block_freed_early() -> int:
    """Races where memory goes back while another stream uses it."""
    with observed() as found:
        block = torch.ones(8, device="standin")
        side = Stream()
        side.wait_stream(torch.standin.current_stream())
        with stream(side):
            block.add_(1)
        del block
    return found["num_races"]
