"""Checks of gathered layers, which do not stay with a rank; on each rank."""

from __future__ import annotations

import functools
import time
from random import Random

import pytest
import torch
import torch.distributed as dist
from engines import start_hydra
from models import VOCAB_SIZE, tiny
from single_process import random_examples

from benchmarks.link_memory import link_memory as link_bytes
from ds_hydra.engine.transfer.stage_weights import SlicePool
from ds_hydra.strategy import Strategy


def delay_rounds(links):
    """Make every round of this rank begin up to 2 ms late, so that threads and ranks meet in many
    orders.
    """
    random = Random(dist.get_rank())
    for link in (links.pull_link, links.push_link):
        for name in ("begin_pull", "begin_push"):

            def late(begin, *arguments):
                time.sleep(random.random() * 2e-3)
                return begin(*arguments)

            setattr(link, name, functools.partial(late, getattr(link, name)))


def repeats(text):
    """Whether losses and weights of three iterations repeat, with overlap, of late rounds and
    others, and without.
    """
    found = []
    for overlap, is_late in ((True, False), (False, False), (True, True)):
        engine = start_hydra(tiny("llama_tied"), hydra={"link": {"overlap": overlap}})
        if is_late:
            delay_rounds(engine.hydra.propagator.links)
        losses = [
            float(
                engine.train_batch(
                    random_examples((9, 17, 30, 5, 40, 3), VOCAB_SIZE, seed=seed), strategy=text
                )
            )
            for seed in range(3)
        ]
        found.append((losses, [p.ds_tensor.clone() for p in engine.hydra.stage_model.params]))
        engine.destroy()
    return [
        losses == found[0][0] and all(map(torch.equal, weights, found[0][1]))
        for losses, weights in found
    ]


def losses_with_frozen_layers(texts):
    """Evaluated and trained losses under each strategy in turn; embedding and two layers are
    frozen.
    """
    model = tiny("llama", num_hidden_layers=4)
    for param in (*model.model.embed_tokens.parameters(), *model.model.layers[:2].parameters()):
        param.requires_grad_(False)
    engine = start_hydra(model)
    examples = random_examples((9, 17, 30, 5), VOCAB_SIZE, seed=0)
    evaluated = [float(engine.eval_batch(examples, strategy=text)) for text in texts]
    return evaluated, [float(engine.train_batch(examples, strategy=text)) for text in texts]


def link_memory(texts):
    """(stated, held by the pool) of each strategy."""
    engine = start_hydra(tiny("llama", num_hidden_layers=8))
    links = engine.hydra.propagator.links
    examples = random_examples((9, 17, 30, 5), VOCAB_SIZE, seed=0)
    found = {}
    for text in texts:
        links.pool = SlicePool(torch.device("cpu"), exact=True)
        engine.train_batch(examples, strategy=text)
        found[text] = (link_bytes(links, Strategy.parse(text)), links.pool.nbytes)
    return found


def check_frozen(evaluated, trained):
    """Losses under each strategy in turn, of the same examples."""
    assert evaluated == pytest.approx([evaluated[0]] * len(evaluated), rel=1e-6)
    assert trained[0] == pytest.approx(evaluated[0], rel=1e-6)
    assert trained == sorted(trained, reverse=True), "nothing was trained"


def check_memory(found):
    """What was stated is what was held."""
    for text, (stated, held) in found.items():
        assert held == stated.slice_bytes + stated.gradient_bytes, text
