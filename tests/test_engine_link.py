"""Pull and push inside an iteration: what is sent, what stays in memory, and what runs beside
computation.
"""

from __future__ import annotations

import functools
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from distributed import run_distributed
from engines import refused, start_hydra
from models import VOCAB_SIZE, tiny
from single_process import random_examples
from test_engine_parity import RELATIVE_TOLERANCE, check_gradients, hand_plan
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from benchmarks.link_memory import link_memory
from ds_hydra.engine.transfer.stage_weights import SlicePool
from ds_hydra.strategy import Strategy

BF16_TOLERANCE = 2**-8
"""bf16 rounds to 8 bits, an error of 2^-9 in each contribution; the sums themselves are fp32."""


def gradients_sent_in_bf16():
    """They differ by rounding only."""
    strategies = ("1x<2,1> + 1x<1,2>",)
    found = check_gradients("llama", strategies, communication_data_type="bf16")
    for case, (error, name, loss_error) in found.items():
        assert RELATIVE_TOLERANCE < error < BF16_TOLERANCE, (case, name, error)
        assert loss_error <= RELATIVE_TOLERANCE, case


class NewMemory(TorchDispatchMode):
    """Bytes of the tensors that operators allocate while it is active; views and writes in place
    are none.
    """

    def __init__(self):
        super().__init__()
        self.nbytes = 0

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        known = {
            t.untyped_storage().data_ptr()
            for t in tree_leaves((args, kwargs))
            if isinstance(t, torch.Tensor)
        }
        result = operator(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if (
                isinstance(tensor, torch.Tensor)
                and tensor.untyped_storage().data_ptr() not in known
            ):
                self.nbytes += tensor.nbytes
        return result


def memory_of_exchanges():
    """An exchange holds what the plan states, and soon allocates nothing."""
    engine = start_hydra(tiny("llama"), bf16={"enabled": True})
    propagator = engine.propagator
    links, buffers = propagator.links, propagator.links.buffers
    links.pool = SlicePool(torch.device("cpu"), exact=True)
    grads_P, examples = engine._zero_gradient_shards(), random_examples((9, 5), VOCAB_SIZE)
    most_buffers = 0
    for text in ("4x<1,1>", "1x<2,1>", "1x<1,2> + 1x<2,1>", "1x<4,1>"):
        strategy = Strategy.parse(text)
        propagator.prepare([strategy])
        phases = hand_plan(strategy, examples).on_rank(propagator.rank)
        buffers, in_use, allocated = propagator.links.buffers, [0], []

        def take(*arguments, buffers=buffers, in_use=in_use):
            taken = type(buffers).take(buffers, *arguments)
            in_use.append(in_use[-1] + taken.nbytes)
            return taken

        def give_back(tensor, buffers=buffers, in_use=in_use):
            type(buffers).give_back(buffers, tensor)
            in_use.append(in_use[-1] - tensor.nbytes)

        buffers.take, buffers.give_back = take, give_back
        for _ in range(3):
            with NewMemory() as new, links.open(phases, training=True, grads_P=grads_P) as session:
                session.finish()
            allocated.append(new.nbytes)
        stated = link_memory(links, strategy)
        most_buffers = most_buffers or 2 * stated.exchange_bytes
        if stated.slice_bytes:  # an idle rank keeps what it holds for the next strategy
            assert links.pool.nbytes == stated.slice_bytes + stated.gradient_bytes, text
        assert 0 < max(in_use) <= stated.exchange_bytes + stated.relayed_bytes, text
        assert allocated[-1] == 0, text
        assert allocated[0] > 0 or text != "4x<1,1>"
        # Buffers of the strategies before are kept as long as they are the larger ones.
        assert buffers.nbytes <= most_buffers, text


def memory_over_iterations():
    """Iterations reuse the memory of those before, with the pool that the CPU gets."""
    engine = start_hydra(tiny("llama"))
    examples = random_examples((9, 17, 30, 5), VOCAB_SIZE, seed=0)
    held, links = [], engine.propagator.links
    for _ in range(4):
        for text in ("4x<1,1>", "1x<2,2>", "1x<2,1>"):
            engine.train_batch(examples, strategy=text)
        tensors = [
            *links.pool._held.values(),
            *links.buffers._free,
            *engine._zero_gradient_shards(),
        ]
        held.append(sorted((tensor.data_ptr(), tensor.nbytes) for tensor in tensors))
    assert held[2] == held[3]


def failures():
    """Errors of the link on all ranks, in a pull and in the push after it, reach the caller.

    Without TP and pipelines, where a rank would also wait for its neighbours.
    """
    engine = start_hydra(tiny("llama"))
    examples = random_examples((9, 17), VOCAB_SIZE, seed=0)
    links = engine.propagator.links
    engine.propagator.prepare([Strategy.parse("4x<1,1>")])
    for link, name in ((links.pull_link, "begin_pull"), (links.push_link, "begin_push")):
        begin = getattr(link, name)

        def fail_at_round_1(plan, index, *arguments, begin=begin, name=name):
            if index == 1:
                raise OSError(f"{name} is broken on purpose")
            return begin(plan, index, *arguments)

        with mock.patch.object(link, name, fail_at_round_1):
            train = functools.partial(engine.train_batch, examples, strategy="4x<1,1>")
            assert refused(train, OSError) == f"{name} is broken on purpose"
    dist.barrier()  # a rank that is ahead must not take back what others have yet to receive


def link_checks():
    gradients_sent_in_bf16()
    memory_of_exchanges()
    memory_over_iterations()
    failures()  # last: its groups are left in the middle of a round


@pytest.mark.slow
@pytest.mark.distributed
def test_rounding_memory_and_errors_of_an_engines_link():
    run_distributed(link_checks, 4, timeout_s=900)
