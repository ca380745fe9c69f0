"""Faults put in on purpose, and what the stand-in says of them. Functions run on all ranks."""

from __future__ import annotations

from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from engines import raised_by
from models import VOCAB_SIZE
from single_process import random_examples
from test_engine_parity import LENGTHS

from ds_hydra.engine import propagation
from ds_hydra.engine.parallel.one_f_one_b import PipelineStage
from ds_hydra.engine.transfer.session import TransferSession
from standin import process_group
from standin.checks import full_allocator, observed, start
from standin.streams import Stream, stream


def without_the_wait_for_slices() -> int:
    """Races where the stream of the passes does not wait for the link's."""
    engine = start("llama")
    examples = random_examples(LENGTHS, VOCAB_SIZE, seed=1)
    engine.train_batch(examples, strategy="2x<1,1>")

    def post_alone(session: TransferSession, number: int) -> None:
        session._post_ahead_of(number)

    with (
        mock.patch.object(TransferSession, "_wait_for", post_alone),
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


def swapped_calls() -> list[str]:
    """What two collectives, and two messages of a pair, in another order on one rank lead to."""
    rank = dist.get_rank()
    small, large = torch.ones(3, device="standin"), torch.ones(5, device="standin")
    said = []
    for is_message in (False, True):
        group = dist.new_group([0, 1])
        process_group.checks_order = True
        try:
            for tensor in (small, large) if rank else (large, small):
                if not is_message:
                    dist.all_reduce(tensor, group=group, async_op=True)
                elif rank:
                    dist.irecv(tensor, 0, group)
                else:
                    dist.isend(tensor, 1, group)
            said.append("nothing")
        except RuntimeError as error:
            said.append(str(error))
        finally:
            process_group.checks_order = False
    return said


def tensors_of_the_cpu() -> list[str]:
    """What tensors that were left on the CPU lead to, in a collective and beside others."""
    return [
        raised_by(lambda: dist.all_reduce(torch.ones(2)))[1],
        raised_by(lambda: torch.ones(2, device="standin") + torch.ones(2))[1],
    ]


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
