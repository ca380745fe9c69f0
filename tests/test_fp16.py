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
    outcome = {}
    accelerator = get_accelerator()
    accelerator.is_fp16_supported = lambda: False
    start = functools.partial(start_hydra, tiny("llama_tied"), fp16=FP16)
    outcome["refused"] = refused(start, ValueError)
    # DeepSpeed asks whether the CPU computes in fp16 by itself; where it does not, torch emulates
    # it.
    accelerator.is_fp16_supported = lambda: True

    data = batches(12)
    model = tiny("llama_tied")
    stock, engine = start_stock(copy.deepcopy(model), fp16=FP16), start_hydra(model, fp16=FP16)
    before = weights_of(engine)
    overflows, curves = [], []
    for iteration in range(3):
        stock_step(stock, data[iteration])
        engine.train_batch(data[iteration], strategy=STRATEGIES[iteration])
        overflows.append((state_of(engine), state_of(stock), engine.last_metrics.skipped_steps))
    outcome["overflows"] = overflows
    outcome["unchanged by overflow"] = is_same(before, weights_of(engine))

    for each in (stock, engine):
        each.optimizer.loss_scale = 1024.0  # where nothing overflows
    for iteration in range(3, 8):
        curves.append((stock_step(stock, data[iteration]),
                       float(engine.train_batch(data[iteration], strategy=STRATEGIES[iteration % 3]))))  # fmt: skip
    outcome["curves"] = curves
    outcome["after good ones"] = state_of(engine), state_of(stock)
    outcome["changed by good ones"] = not is_same(before, weights_of(engine))
    outcome["norms"] = float(stock.get_global_grad_norm()), float(engine.get_global_grad_norm())

    before, scale = weights_of(engine), float(engine.optimizer.loss_scale)
    with gradient_on_rank_1(engine, float("inf")):
        engine.train_batch(data[8], strategy=STRATEGIES[0])
    outcome["inf on one rank"] = is_same(before, weights_of(engine)), scale, state_of(engine)

    engine.save_checkpoint(folder)
    resumed = start_hydra(tiny("llama_tied", seed=1), fp16=FP16)
    resumed.load_checkpoint(folder)
    outcome["resumed"] = state_of(resumed), state_of(engine)
    outcome["other precisions"] = norms_in_other_precisions(folder, data[9])
    outcome["continued"] = [
        [
            (
                float(e.train_batch(batch, strategy=s)),
                state_of(e),
                float(e.get_global_grad_norm()),
            )
            for batch, s in zip(data[9:], STRATEGIES)
        ]
        for e in (engine, resumed)
    ]
    outcome["from fp32"] = scale_after_fp32(folder, data[9])
    return outcome


def norms_in_other_precisions(folder, batch):
    """Of gradients of the first iteration after a checkpoint of fp16; the loss scale."""
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
    return state_of(engine)[0]


@pytest.mark.distributed
def test_the_loss_scale_follows_stock_deepspeed_and_is_resumed(tmp_path):
    for outcome in run_distributed(train_in_fp16, 2, str(tmp_path)):
        assert outcome["refused"] == "Type fp16 is not supported on your device."
        assert [mine for mine, _, _ in outcome["overflows"]] == [
            (2.0**29, 1, 1), (2.0**28, 2, 2), (2.0**27, 3, 3),
        ]  # fmt: skip
        assert [theirs for _, theirs, _ in outcome["overflows"]] == [
            mine for mine, _, _ in outcome["overflows"]
        ]
        assert [counted for _, _, counted in outcome["overflows"]] == [1, 2, 3]
        assert outcome["unchanged by overflow"]
        for theirs, mine in outcome["curves"]:
            assert mine == pytest.approx(theirs, rel=2e-3)  # activations have 11 bits
        mine, theirs = outcome["after good ones"]
        assert mine == theirs
        assert mine[0] > 1024
        assert outcome["changed by good ones"]
        assert outcome["norms"][1] == pytest.approx(outcome["norms"][0], rel=2e-2)
        unchanged, scale, state = outcome["inf on one rank"]
        assert unchanged
        assert state == (scale / 2, 4, 9)
        for norm, scale in outcome["other precisions"]:
            assert scale == 1
            assert norm == pytest.approx(outcome["continued"][0][0][2], rel=0.05)
        assert outcome["from fp32"] == 2.0**30
        resumed, saved = outcome["resumed"]
        assert resumed == saved
        first, again = outcome["continued"]
        assert first == again
        assert first[-1][1][1] == 4, "nothing more is skipped"
