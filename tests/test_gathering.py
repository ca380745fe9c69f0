"""Layers gathered for every pass: equal bits, evaluation, phases by the planner, memory of two
layers. Gradients of one process are rows of the parity table.
"""

from __future__ import annotations

import functools
import time
from pathlib import Path
from random import Random

import pytest
import torch
import torch.distributed as dist
from distributed import run_distributed
from engines import long_on_four_ranks, refused, start_hydra, write_json
from models import VOCAB_SIZE, tiny
from single_process import random_examples

from benchmarks.link_memory import link_memory
from ds_hydra.engine.transfer.stage_weights import SlicePool
from ds_hydra.errors import HydraConfigError
from ds_hydra.strategy import Scheme, Strategy


def delay_rounds(links):
    """Make every round of this rank begin up to 2 ms late, so that ranks meet in many orders."""
    random = Random(dist.get_rank())
    for link in (links.pull_link, links.push_link):
        for name in ("begin_pull", "begin_push"):

            def late(begin, *arguments):
                time.sleep(random.random() * 2e-3)
                return begin(*arguments)

            setattr(link, name, functools.partial(late, getattr(link, name)))


def repeats(text):
    """Losses and weights of three iterations are the same where rounds are late."""
    found = []
    for is_late in (False, True):
        engine = start_hydra(tiny("llama_tied"))
        if is_late:
            delay_rounds(engine.propagator.links)
        data = [random_examples((9, 17, 30, 5, 40, 3), VOCAB_SIZE, seed=seed) for seed in range(3)]
        losses = [float(engine.train_batch(examples, strategy=text)) for examples in data]
        found.append((losses, [p.ds_tensor.clone() for p in engine.propagator.stage_model.params]))
        if "gather" not in text:  # computation waits for all of both
            metrics = engine.last_metrics
            assert 0 < metrics.pull_ms <= metrics.visible_pull_ms
            assert 0 < metrics.push_ms <= metrics.visible_push_ms
        engine.destroy()
    (losses, weights), late = found
    assert late[0] == losses
    assert all(map(torch.equal, late[1], weights))


def frozen_layers(texts):
    """Evaluated and trained losses do not depend on the strategy; embedding and two layers are
    frozen.
    """
    model = tiny("llama", num_hidden_layers=4)
    for param in (*model.model.embed_tokens.parameters(), *model.model.layers[:2].parameters()):
        param.requires_grad_(False)
    engine = start_hydra(model)
    examples = random_examples((9, 17, 30, 5), VOCAB_SIZE, seed=0)
    evaluated = [float(engine.eval_batch(examples, strategy=text)) for text in texts]
    trained = [float(engine.train_batch(examples, strategy=text)) for text in texts]
    assert evaluated == pytest.approx([evaluated[0]] * len(texts), rel=1e-6)
    assert trained[0] == pytest.approx(evaluated[0], rel=1e-6)
    assert trained == sorted(trained, reverse=True), "nothing was trained"


def memory(texts):
    """What was stated is what was held, and a rank holds two layers of those that are gathered."""
    engine = start_hydra(tiny("llama", num_hidden_layers=8))
    links = engine.propagator.links
    examples = random_examples((9, 17, 30, 5), VOCAB_SIZE, seed=0)
    found = {}
    for text in texts:
        links.pool = SlicePool(torch.device("cpu"), exact=True)
        engine.train_batch(examples, strategy=text)
        stated = found[text] = link_memory(links, Strategy.parse(text))
        assert links.pool.nbytes == stated.slice_bytes + stated.gradient_bytes, text
    whole, gathered = found["4x<1,1>"], found["4x<1,1;gather>"]
    assert gathered.slice_bytes < 0.4 * whole.slice_bytes
    assert gathered.gradient_bytes < 0.4 * whole.gradient_bytes


def phases_by_the_planner(folder):
    """An engine with three strategies that gather, under a profile by which a long sequence wants
    all ranks and short ones a rank each, beside strategies by hand.
    """
    profile = write_json(Path(folder, "profile.json"), long_on_four_ranks(gather=True))
    strategies = ["4x<1,1;gather>", "2x<sp2,1;gather>", "1x<sp4,1;gather>"]
    hydra = {"strategies": strategies, "profile": profile, "planner": {"refit": "log"}}
    engine = start_hydra(tiny("llama"), hydra=hydra)
    examples = random_examples((99, *[33] * 12), VOCAB_SIZE, seed=0)
    by_hand = [float(engine.eval_batch(examples, strategy=s)) for s in [*strategies[2:], "1x<4,1>"]]
    evaluated = float(engine.eval_batch(examples))
    assert by_hand == pytest.approx([evaluated] * 2, rel=1e-6)
    scores = [engine.score(examples, s).log_probs for s in (None, "1x<4,1>")]
    torch.testing.assert_close(*scores, rtol=0, atol=1e-5)
    trained = [float(engine.train_batch(examples)) for _ in range(3)]
    assert trained[0] == pytest.approx(evaluated, rel=1e-6)
    assert trained == sorted(trained, reverse=True)
    metrics = engine.last_metrics
    assert metrics.strategy.startswith("1x<sp4,1;gather> then 4x<1,1;gather> then")
    assert len(metrics.pipelines) == 1 + 4 * metrics.strategy.count(" then ")
    times = [pipeline.measured_ms for pipeline in metrics.pipelines]
    slowest = [times[0], *(max(times[n : n + 4]) for n in range(1, len(times), 4))]
    assert metrics.measured_ms == pytest.approx(sum(slowest))
    assert len(engine.propagator.links._links) == 2  # of all that gather, and of <4,1>
    assert "2 phases" in refused(lambda: engine.train_batch(examples, "1x<4,1> then 4x<1,1>"))


def checks(folder):
    repeats("1x<2,1;gather> + 1x<cp2,1;gather>")
    repeats("1x<2,1> + 1x<1,2>")
    frozen_layers(("4x<1,1;gather>", "1x<2,2>", "2x<2,1;gather>", "1x<2,2>", "4x<1,1>"))
    memory(("4x<1,1>", "4x<1,1;gather>", "2x<2,1;gather>"))
    phases_by_the_planner(folder)


@pytest.mark.slow
@pytest.mark.distributed
def test_bits_evaluation_memory_and_phases_of_gathered_layers(tmp_path):
    run_distributed(checks, 4, str(tmp_path))


def test_what_gather_is_for():
    assert str(Scheme.parse("<sp4,1;ckpt=2;gather>")) == "<sp4,1;ckpt=2;gather>"
    scheme = Scheme.parse("<2,1;gather>")
    assert Scheme.from_json(scheme.to_json()) == scheme != Scheme(2, 1)
    for text in ("<1,2;gather>", "<1,1;gather=2>", "<1,1;gather;gather>"):
        with pytest.raises(HydraConfigError):
            Scheme.parse(text)
    with pytest.raises(HydraConfigError, match="all pipelines or none"):
        Strategy.parse("1x<1,1;gather> + 1x<1,1>")
