"""Calls that Python makes in an iteration, and bytes that an optimizer step moves: what host and
step cost, counted and not timed.
"""

from __future__ import annotations

import contextlib
import cProfile
import pstats
from unittest import mock

import pytest
import torch
from distributed import run_distributed
from engines import start_hydra
from models import VOCAB_SIZE, tiny
from single_process import random_examples
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ds_hydra.engine.gradient_shards import GradientShards
from ds_hydra.engine.model.meta_model import build_random_stage_model
from ds_hydra.engine.parallel import linear
from ds_hydra.engine.profiling.profile_document import ProbeMicroBatch
from ds_hydra.engine.profiling.profiler import probe_plan
from ds_hydra.engine.profiling.rehearsal import run_once
from ds_hydra.engine.propagation import Propagator
from ds_hydra.strategy import Strategy

CPU = torch.device("cpu")
MOST_CALLS = {"2x<1,1>": 28_000, "1x<2,1>": 42_000, "2x<1,1;gather>": 35_000}
"""Calls of functions of Python and C in the computing thread, for 64 tokens and 16 layers; those of
the link are among them, some 6,500 to 10,500.
"""
MOST_CALLS_OF_LAYER, MOST_CALLS_OF_MICRO_BATCH = 340, 1000
"""Calls of both passes of a layer for one micro-batch, and of a micro-batch without its layers."""
MOST_CALLS_OF_OPERATOR = 12
"""That an operator of compiled layers makes around the function that it runs."""
WARM_UP = 3
"""Iterations until nothing is met for the first time."""


MOST_STEP_BYTES = 40
"""Bytes of a trained parameter in bf16 by torch's fused AdamW: norm 4, step 28, cast 6."""
ONLY_WRITTEN = ("copy_", "zero_", "fill_")


class Bytes(TorchDispatchMode):
    """Bytes that kernels inside read and write; views move none."""

    def __init__(self):
        super().__init__()
        self.total = 0

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        found = op(*args, **(kwargs or {}))
        if op.is_view or "empty" in op.name():
            return found
        name = op.name()
        given = [t for t in tree_leaves((args, kwargs or {})) if isinstance(t, torch.Tensor)]
        is_adam = "adam" in name
        if is_adam:  # of gradients nothing is written
            given = [t for group in args[:4] for t in group]
            written = [t for place in (0, 2, 3) for t in args[place]]
        elif name.split("::")[-1].split(".")[0].endswith("_"):
            written = args[0] if isinstance(args[0], (list, tuple)) else [args[0]]
            if any(text in name for text in ONLY_WRITTEN):
                own = {id(t) for t in written}
                given = [t for t in given if id(t) not in own]
        else:
            written = [t for t in tree_leaves(found) if isinstance(t, torch.Tensor)]
        self.total += sum(t.numel() * t.element_size() for t in (*given, *written))
        return found


def step_counted(own, clip, dtype):
    """Bytes of a step for each parameter of this rank, and the parameters after three of them, with
    shards lent to ZeRO-3 (`own`) or copied by it.
    """
    torch.manual_seed(0)
    model = tiny("llama", num_hidden_layers=2, hidden_size=64)
    lend = GradientShards._lend_shards if own else lambda _: None
    with mock.patch.object(GradientShards, "_lend_shards", lend):
        sections = {"bf16": {"enabled": True}} if dtype == "bf16" else {}
        engine = start_hydra(model, gradient_clipping=clip, **sections)
        examples = random_examples((20, 12, 18, 14), VOCAB_SIZE, seed=1)
        for _ in range(2):
            engine.train_batch(examples, strategy="2x<1,1>")
        engine._gradients._lend_norms()  # as on a device
        counted = Bytes()
        with contextlib.ExitStack() as stack:
            for of, name in ((GradientShards, "squares"), (type(engine), "_step_or_skip")):
                run = inside(counted, getattr(of, name))
                stack.enter_context(mock.patch.object(of, name, run))
            engine.train_batch(examples, strategy="2x<1,1>")
    grads = [grad.clone() for grad in engine._gradients._grads_P]
    masters = [flat.detach().clone() for flat in engine.optimizer.fp32_partitioned_groups_flat]
    numel = sum(flat.numel() for flat in masters)
    engine.destroy()
    return counted.total / numel, masters, grads


def inside(mode, run):
    """`run` under `mode`."""

    def counted(*arguments):
        with mode:
            return run(*arguments)

    return counted


def steps():
    """A step reads gradients where they are."""
    for dtype, clip in (("bf16", 0.0), ("fp32", 1e-3), ("fp32", 1e3)):
        (own, *of_own), (other, *of_other) = (
            step_counted(is_own, clip, dtype) for is_own in (True, False)
        )
        is_equal = all(
            torch.equal(a, b) for x, y in zip(of_own, of_other) for a, b in zip(x, y, strict=True)
        )
        assert is_equal, (dtype, clip)
        assert dtype != "bf16" or own <= MOST_STEP_BYTES < other
        assert other - own >= (7.5 if clip == 1e-3 else 15.5), (dtype, clip)


@pytest.mark.distributed
def test_a_step_reads_gradients_where_they_are():
    run_distributed(steps, 2)


def count_calls(step):
    """Calls of one `step`, after some that are like it."""
    for _ in range(WARM_UP):
        step()
    return calls_of(step)


def calls_of(step):
    profile = cProfile.Profile()
    profile.runcall(step)
    return pstats.Stats(profile).total_calls


def calls_of_iterations():
    engine = start_hydra(tiny("llama", num_hidden_layers=16))
    examples = random_examples((20, 12, 18, 14), VOCAB_SIZE, seed=1)
    found = {
        text: count_calls(lambda text=text: engine.train_batch(examples, strategy=text))
        for text in MOST_CALLS
    }
    gathered = engine.propagator.stage_model.params[0]
    gathered.all_gather([gathered])
    before = gathered.ds_status.name
    engine.train_batch(examples, strategy="2x<1,1>")
    return found, (before, gathered.ds_status.name)


@pytest.mark.distributed
def test_an_iteration_makes_few_calls():
    for found, states in run_distributed(calls_of_iterations, 2):
        for text, most in MOST_CALLS.items():
            assert found[text] <= most, found
        assert states == ("AVAILABLE", "NOT_AVAILABLE")  # a step releases what is gathered


def calls_of_micro_batch(num_layers):
    """Calls for one more micro-batch of four sequences of 16 tokens."""
    config = tiny("llama", num_hidden_layers=num_layers).config
    stage_model = build_random_stage_model(config, dtype=torch.float32, device=CPU, num_ranks=1)
    with contextlib.closing(Propagator(stage_model, device=CPU)) as propagator:
        strategy = Strategy.parse("1x<1,1>")
        propagator.prepare([strategy])
        plans = (probe_plan(strategy, 1, ProbeMicroBatch(16, 4), number) for number in (1, 3))
        few, many = (count_calls(lambda plan=plan: run_once(propagator, plan)) for plan in plans)
    return (many - few) / 2


def calls_of_both():
    few, many = map(calls_of_micro_batch, (4, 8))
    of_layer = (many - few) / 4
    return of_layer, few - 4 * of_layer


@pytest.mark.distributed
def test_a_layer_and_a_micro_batch_make_few_calls():
    ((of_layer, of_micro_batch),) = run_distributed(calls_of_both, 1)
    assert of_layer <= MOST_CALLS_OF_LAYER
    assert of_micro_batch <= MOST_CALLS_OF_MICRO_BATCH


def test_an_operator_of_compiled_layers_makes_few_calls():
    """torch.library.custom_op makes several times as many."""

    class Taker:
        def expect_product(self):
            pass

        def add_product(self, grad_TO, input_TH):
            pass

    taker = Taker()
    given = (*torch.randn(3, 4, 4).unbind(), linear.new_handle(taker), linear._NONE)
    operator = torch.ops.ds_hydra.linear_backward.default
    with torch.no_grad():
        operator(*given)
        alone, whole = (
            calls_of(lambda run=run: run(*given)) for run in (linear._backward, operator)
        )
    assert whole - alone <= MOST_CALLS_OF_OPERATOR
