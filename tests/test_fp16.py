"""fp16: the loss scale is DeepSpeed's own. Overflow changes no weight, is counted, and halves the
scale.
"""

from __future__ import annotations

import copy
import functools

import pytest
import torch
from deepspeed.accelerator import get_accelerator
from distributed import run_distributed
from engines import gradient_on_rank_1, refused, start_hydra, start_stock, stock_step
from models import tiny
from test_engine_training import batches

FP16 = {"enabled": True, "initial_scale_power": 30, "loss_scale_window": 2, "hysteresis": 1}
"""Starts where every gradient overflows, doubles after two good iterations, halves at every bad
one.
"""

STRATEGIES = ("1x<1,2>", "2x<1,1>", "1x<2,1>")


def state_of(engine):
    return float(engine.optimizer.loss_scale), engine.skipped_steps, engine.global_steps


def weights_of(engine):
    """This rank's fp32 masters and 16-bit shards."""
    shards = [p.ds_tensor.clone() for p in engine.module.parameters()]
    return shards + [group.clone() for group in engine.optimizer.fp32_partitioned_groups_flat]


def is_same(before, after):
    return all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


def train_in_fp16(folder):
    """Overflows, good iterations, an Inf on one rank and a resume, beside stock DeepSpeed on the
    same data.
    """
    accelerator = get_accelerator()
    accelerator.is_fp16_supported = lambda: False
    start = functools.partial(start_hydra, tiny("llama_tied"), fp16=FP16)
    assert refused(start, ValueError) == "Type fp16 is not supported on your device."
    # DeepSpeed asks whether the CPU computes in fp16 by itself; where it does not, torch emulates
    # it.
    accelerator.is_fp16_supported = lambda: True

    data = batches(12)
    model = tiny("llama_tied")
    stock, engine = start_stock(copy.deepcopy(model), fp16=FP16), start_hydra(model, fp16=FP16)

    def step(iteration):
        """Losses of stock and of ours."""
        theirs = stock_step(stock, data[iteration])
        return theirs, float(engine.train_batch(data[iteration], STRATEGIES[iteration % 3]))

    before = weights_of(engine)
    for iteration in range(3):
        step(iteration)
        count = iteration + 1
        assert state_of(engine) == state_of(stock) == (2.0 ** (30 - count), count, count)
        assert engine.last_metrics.skipped_steps == count
    assert is_same(before, weights_of(engine)), "changed by overflow"

    for each in (stock, engine):
        each.optimizer.loss_scale = 1024.0  # where nothing overflows
    for iteration in range(3, 8):
        theirs, mine = step(iteration)
        assert mine == pytest.approx(theirs, rel=2e-3)  # activations have 11 bits
    assert state_of(engine) == state_of(stock)
    assert engine.optimizer.loss_scale > 1024
    assert not is_same(before, weights_of(engine))
    norms = [float(each.get_global_grad_norm()) for each in (stock, engine)]
    assert norms[1] == pytest.approx(norms[0], rel=2e-2)

    before, scale = weights_of(engine), float(engine.optimizer.loss_scale)
    with gradient_on_rank_1(engine, float("inf")):
        engine.train_batch(data[8], strategy=STRATEGIES[0])
    assert is_same(before, weights_of(engine))
    assert state_of(engine) == (scale / 2, 4, 9)

    engine.save_checkpoint(folder)
    resumed = start_hydra(tiny("llama_tied", seed=1), fp16=FP16)
    resumed.load_checkpoint(folder)
    assert state_of(resumed) == state_of(engine)
    norms = norms_in_other_precisions(folder, data[9])
    first, again = (
        [
            (float(e.train_batch(batch, strategy=s)), state_of(e), float(e.get_global_grad_norm()))
            for batch, s in zip(data[9:], STRATEGIES)
        ]
        for e in (engine, resumed)
    )
    assert first == again
    assert first[-1][1][1] == 4, "nothing more is skipped"
    for norm, scale in norms:
        assert scale == 1
        assert norm == pytest.approx(first[0][2], rel=0.05)
    assert scale_after_fp32(folder, data[9]) == 2.0**30


def norms_in_other_precisions(folder, batch):
    """Norms of gradients of the first iteration after a checkpoint of fp16, and loss scales."""
    found = []
    for sections in ({}, {"bf16": {"enabled": True}}):
        for options in ({}, {"load_optimizer_states": False}):
            engine = start_hydra(tiny("llama_tied", seed=1), **sections)
            engine.load_checkpoint(folder, **options)
            engine.train_batch(batch, strategy=STRATEGIES[0])
            norm, scale = engine.get_global_grad_norm(), engine.optimizer.loss_scale
            found.append((float(norm), float(scale)))
            engine.destroy()
    return found


def scale_after_fp32(folder, batch):
    """The loss scale of fp16 that goes on from a checkpoint of fp32."""
    engine = start_hydra(tiny("llama_tied"))
    engine.train_batch(batch, strategy=STRATEGIES[0])
    engine.save_checkpoint(f"{folder}/fp32")
    engine.destroy()
    engine = start_hydra(tiny("llama_tied", seed=1), fp16=FP16)
    engine.load_checkpoint(f"{folder}/fp32")
    engine.load_checkpoint(folder, load_module_only=True)  # of another scale
    return state_of(engine)[0]


@pytest.mark.slow
@pytest.mark.distributed
def test_the_loss_scale_follows_stock_deepspeed_and_is_resumed(tmp_path):
    run_distributed(train_in_fp16, 2, str(tmp_path))
