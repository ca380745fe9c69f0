"""Pull and push inside an iteration: what is sent, what stays in memory, and what runs beside computation."""

from __future__ import annotations

import functools
import time
from random import Random

import pytest
import torch
import torch.distributed as dist
from distributed import run_distributed
from engines import start_hydra
from models import VOCAB_SIZE, tiny
from single_process import num_label_tokens, random_examples
from test_engine_parity import RELATIVE_TOLERANCE, check_gradients, hand_plan

from ds_hydra.strategy import Strategy

BF16_TOLERANCE = 2**-8
"""bf16 rounds to 8 bits, an error of 2^-9 in each contribution; the sums themselves are fp32."""


def gradients_sent_in_bf16():
    strategies = ("4x<1,1>", "1x<2,1> + 1x<1,2>", "1x<2,2>")
    return check_gradients("llama", strategies, {"link": {"gradient_dtype": "bf16"}})


@pytest.mark.distributed
def test_gradients_sent_in_bf16_differ_by_rounding_only():
    worst = run_distributed(gradients_sent_in_bf16, 4)[0]
    for case, (error, name, loss_error) in worst.items():
        assert RELATIVE_TOLERANCE < error < BF16_TOLERANCE, (
            f"{case}: gradient of {name} is off by {error:.1e}"
        )
        assert loss_error <= RELATIVE_TOLERANCE, case


SCHEMES = ((1, 1), (2, 1), (4, 1), (1, 2), (2, 2))


def random_strategy(random):
    """Schemes that fill 4 ranks or leave some idle."""
    schemes, free = [], 4
    while free and (not schemes or random.random() < 0.75):
        scheme = random.choice([s for s in SCHEMES if s[0] * s[1] <= free])
        schemes.append(scheme)
        free -= scheme[0] * scheme[1]
    return Strategy.parse(" + ".join(f"1x<{tp},{pp}>" for tp, pp in schemes))


def delay_rounds(propagator, random):
    """Make every round of this rank begin up to 2 ms late, so that threads and ranks meet in many orders."""
    for link in (propagator._pull_link, propagator._push_link):
        for name in ("begin_pull", "begin_push"):

            def late(begin, *arguments):
                time.sleep(random.random() * 2e-3)
                return begin(*arguments)

            setattr(link, name, functools.partial(late, getattr(link, name)))


def gradients_with_and_without_overlap(num_sequences):
    """Cases in which a sequence of strategies gives other bits with overlap than without."""
    engines = {
        overlap: start_hydra(tiny("llama_tied", num_hidden_layers=2), hydra={"link": {"overlap": overlap}})
        for overlap in (True, False)
    }
    mine = Random(dist.get_rank())
    delay_rounds(engines[True].hydra.propagator, mine)
    random = Random(0)
    different = []
    for number in range(num_sequences):
        strategies = [random_strategy(random) for _ in range(2)]
        lengths = [random.randint(2, 24) for _ in range(random.randint(1, 6))]
        examples = random_examples(lengths, VOCAB_SIZE, seed=number)
        tensors = [(e["input_ids"], e["labels"]) for e in examples]
        for strategy in strategies:
            plan = hand_plan(strategy, lengths, num_label_tokens(examples), empty_pipeline=number % 4 == 0)
            bits = {}
            for overlap, engine in engines.items():
                engine.hydra.prepare_forced(strategy)
                grads_P = engine._zero_gradient_shards()
                outcome = engine.hydra.propagator.train(plan, tensors.__getitem__, grads_P, 1.0)
                bits[overlap] = (outcome.loss_sum, [g.clone() for g in grads_P])
            same = bits[True][0] == bits[False][0] and all(map(torch.equal, bits[True][1], bits[False][1]))
            if not same or not all(g.isfinite().all() for g in bits[True][1]):
                different.append((number, str(strategy), lengths))
    return different


@pytest.mark.distributed
def test_overlap_changes_no_bit_of_200_random_sequences_of_strategies():
    for rank, different in enumerate(run_distributed(gradients_with_and_without_overlap, 4, 200)):
        assert different == [], f"rank {rank}"
