"""Pull and push inside an iteration: what is sent, what stays in memory, and what runs beside
computation.
"""

from __future__ import annotations

import functools
from unittest import mock

import deepspeed
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
from ds_hydra.engine.transfer.stage_weights import FrozenKeeper, SlicePool, fingerprint
from ds_hydra.strategy import Strategy

BF16_TOLERANCE = 2**-8
"""bf16 rounds to 8 bits, an error of 2^-9 in each contribution; the sums themselves are fp32."""


def gradients_sent_in_bf16():
    """They differ by rounding only."""
    strategies = ("4x<1,1>", "1x<2,1> + 1x<1,2>", "1x<2,2>")
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
    engine = start_hydra(tiny("llama"), hydra={"link": {"overlap": False}}, bf16={"enabled": True})
    propagator = engine.hydra.propagator
    links, buffers = propagator.links, propagator.links.buffers
    links.pool = SlicePool(torch.device("cpu"), exact=True)
    grads_P, examples = engine._zero_gradient_shards(), random_examples((9, 5), VOCAB_SIZE)
    most_buffers = 0
    for text in ("4x<1,1>", "1x<2,1>", "1x<1,2> + 1x<2,1>", "1x<4,1>"):
        strategy = Strategy.parse(text)
        propagator.prepare([strategy])
        phases = hand_plan(strategy, examples).on_rank(propagator.rank)
        buffers.peak_bytes = 0
        allocated = []
        for _ in range(3):
            with NewMemory() as new, links.open(phases, training=True, grads_P=grads_P) as session:
                session.finish()
            allocated.append(new.nbytes)
        stated = link_memory(links, strategy)
        most_buffers = most_buffers or 2 * stated.exchange_bytes
        if stated.slice_bytes:  # an idle rank keeps what it holds for the next strategy
            assert links.pool.nbytes == stated.slice_bytes + stated.gradient_bytes, text
        assert 0 < buffers.peak_bytes <= stated.exchange_bytes + stated.relayed_bytes, text
        assert allocated[-1] == 0, text
        assert allocated[0] > 0 or text != "4x<1,1>"
        # Buffers of the strategies before are kept as long as they are the larger ones.
        assert buffers.nbytes <= most_buffers, text


def memory_over_iterations():
    """Iterations reuse the memory of those before, with the pool that the CPU gets."""
    # The same rounds at once every time
    engine = start_hydra(tiny("llama"), hydra={"link": {"overlap": False}})
    examples = random_examples((9, 17, 30, 5), VOCAB_SIZE, seed=0)
    held, links = [], engine.hydra.propagator.links
    for _ in range(4):
        for text in ("4x<1,1>", "1x<2,2>", "1x<2,1>"):
            engine.train_batch(examples, strategy=text)
        slabs = (slab.memory for slab in links.buffers._slabs)
        tensors = [*links.pool._held.values(), *slabs, *engine._zero_gradient_shards()]
        held.append(sorted((tensor.data_ptr(), tensor.nbytes) for tensor in tensors))
    assert held[2] == held[3]


def frozen_slices(folder):
    """Frozen slices stay until strategy or weights change."""
    examples = random_examples((9, 17, 30, 5), VOCAB_SIZE, seed=0)
    losses, pulled = {}, {}
    for keep in (True, False):
        model = tiny("llama")
        for name, param in model.named_parameters():
            param.requires_grad_("layers.1.mlp" in name)
        engine = start_hydra(model)
        if not keep:
            engine.hydra.propagator.links._frozen = None
        losses[keep], pulled[keep] = [], []
        frozen = model.get_input_embeddings().weight

        def train(text, evaluate=False, engine=engine, keep=keep):
            strategy = Strategy.parse(text)
            propagator = engine.hydra.propagator
            engine.hydra.propagator.prepare([strategy])
            link = propagator.links.link_for(strategy)
            session = propagator.links.open
            propagator.links.open = lambda *a, **k: (
                pulled[keep].append(opened := session(*a, **k)) or opened
            )
            run = engine.eval_batch if evaluate else engine.train_batch
            losses[keep].append(float(run(examples, strategy=strategy)))
            propagator.links.open = session
            plan = pulled[keep].pop().carrier.pull_plan
            pulled[keep].append("trained" if plan is not link.pull else "all")

        train("1x<2,2>")
        train("1x<2,2>")
        engine.save_checkpoint(folder, tag=str(keep))
        train("1x<2,2>", evaluate=True)
        train("4x<1,1>")
        train("1x<2,2>")
        with deepspeed.zero.GatheredParameters([frozen], modifier_rank=0):
            frozen.data.mul_(1.5)
        train("1x<2,2>")
        if dist.get_rank() == 2:
            frozen.ds_tensor.data[3] += 0.5
        train("1x<2,2>")
        train("1x<2,2>")
        engine.load_checkpoint(folder, tag=str(keep))
        train("1x<2,2>")
        train("1x<2,2>")
    assert losses[True] == losses[False]
    assert len(set(losses[True])) > 4, "the edits changed nothing"
    assert set(pulled[False]) == {"all"}
    assert pulled[True] == [
        "all", "trained", "trained", "all", "all", "all", "all", "trained", "all", "trained",
    ]  # fmt: skip


def edits_that_keep_sums():
    """Edits of words, 1024 in a row, under which many a sum of them stays."""

    def square(words):
        words[[0, 1029]] += 3
        words[[5, 1024]] -= 3

    def signs(words):
        words[[0, 5, 1024, 1029]] ^= -(2**63)

    def exchanged(words):
        words[[2, 3]] = words[[3, 2]]

    def moved_to_another_chunk(words):
        words[[2, -2]] = words[[-2, 2]]

    return square, signs, exchanged, moved_to_another_chunk


def test_frozen_slices_are_pulled_again_after_a_pull_that_did_not_end():
    keeper = FrozenKeeper(lambda: [torch.ones(3)], lambda changed: changed)
    assert keeper.choose("a", "all", "trained") == "all"
    assert keeper.choose("a", "all", "trained") == "all", "something has failed in between"
    keeper.mark_arrived()
    assert keeper.choose("a", "all", "trained") == "trained"
    assert keeper.choose("a", "all", "trained") == "trained", "they stay where another pull fails"
    assert keeper.choose("b", "all", "trained") == "all"


@pytest.mark.parametrize("edit", edits_that_keep_sums())
@pytest.mark.parametrize("offset", [0, 4, 3])  # 3: words of the storage are not words of the slice
def test_no_edit_of_frozen_weights_keeps_their_fingerprint(edit, offset):
    weight = torch.randn(2**20 + 5, generator=torch.Generator().manual_seed(0)).bfloat16()[offset:]
    before = fingerprint([weight])
    assert torch.equal(fingerprint([weight.clone()]), before)
    words = weight[: len(weight) // 4 * 4].view(torch.uint8).numpy().view("int64")
    edit(words)
    assert not torch.equal(fingerprint([weight]), before)


def failures():
    """Errors of the link's thread on all ranks, in a pull and in the push after it, reach the
    caller.

    Without TP and pipelines, where a rank would also wait for its neighbours.
    """
    engine = start_hydra(tiny("llama"))
    examples = random_examples((9, 17), VOCAB_SIZE, seed=0)
    links = engine.hydra.propagator.links
    engine.hydra.propagator.prepare([Strategy.parse("4x<1,1>")])
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


def link_checks(folder):
    gradients_sent_in_bf16()
    memory_of_exchanges()
    memory_over_iterations()
    frozen_slices(folder)
    failures()  # last: its groups are left in the middle of a round


@pytest.mark.slow
@pytest.mark.distributed
def test_rounding_memory_frozen_slices_and_errors_of_an_engines_link(tmp_path):
    run_distributed(link_checks, 4, str(tmp_path), timeout_s=900)
