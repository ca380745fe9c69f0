"""Layers gathered for every pass: gradients of one process, equal bits, memory of two layers."""

from __future__ import annotations

import json
import tempfile

import pytest
from distributed import run_distributed
from engines import long_on_four_ranks, refused, start_hydra
from models import VOCAB_SIZE, tiny
from passing_layers import (
    check_frozen,
    check_memory,
    link_memory,
    losses_with_frozen_layers,
    repeats,
)
from single_process import random_examples

from ds_hydra.errors import HydraConfigError
from ds_hydra.strategy import Scheme, Strategy


def checks():
    return {
        "repeats": repeats("1x<2,1;gather> + 1x<cp2,1;gather>") + repeats("1x<2,1> + 1x<1,2>"),
        "frozen": losses_with_frozen_layers(
            ("4x<1,1;gather>", "1x<2,2>", "2x<2,1;gather>", "1x<2,2>", "4x<1,1>")
        ),
        "memory": link_memory(("4x<1,1>", "4x<1,1;gather>", "2x<2,1;gather>")),
        "phases": phases_by_the_planner(),
    }


def phases_by_the_planner():
    """An engine with three strategies that gather, under a profile by which a long sequence wants
    all ranks and short ones a rank each: what it did, and what strategies by hand give.
    """
    with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
        json.dump(long_on_four_ranks(gather=True), file)
        file.flush()
        strategies = ["4x<1,1;gather>", "2x<sp2,1;gather>", "1x<sp4,1;gather>"]
        engine = start_hydra(
            tiny("llama"),
            hydra={"strategies": strategies, "profile": file.name, "planner": {"refit": "log"}},
        )
    examples = random_examples((99, *[33] * 12), VOCAB_SIZE, seed=0)
    by_hand = [float(engine.eval_batch(examples, strategy=s)) for s in [*strategies[2:], "1x<4,1>"]]
    evaluated = float(engine.eval_batch(examples))
    scores = [engine.score(examples, s).log_probs for s in (None, "1x<4,1>")]
    trained = [float(engine.train_batch(examples)) for _ in range(3)]
    metrics = engine.last_metrics
    return {
        "losses": (by_hand, evaluated, trained),
        "scores": max(float((a - b).abs().max()) for a, b in zip(*scores, strict=True)),
        "metrics": metrics,
        "links": len(engine.hydra.propagator.links._links),
        "refused": refused(lambda: engine.train_batch(examples, "1x<4,1> then 4x<1,1>")),
    }


@pytest.fixture(scope="module")
def results():
    return run_distributed(checks, world_size=4)


@pytest.mark.distributed
def test_equal_bits(results):
    assert all(all(result["repeats"]) for result in results)


@pytest.mark.distributed
def test_frozen_layers_and_evaluation(results):
    for result in results:
        check_frozen(*result["frozen"])


@pytest.mark.distributed
def test_the_planner_puts_phases_together(results):
    for result in results:
        found = result["phases"]
        by_hand, evaluated, trained = found["losses"]
        assert by_hand == pytest.approx([evaluated] * 2, rel=1e-6)
        assert trained[0] == pytest.approx(evaluated, rel=1e-6)
        assert trained == sorted(trained, reverse=True)
        assert found["scores"] < 1e-5
        metrics = found["metrics"]
        assert metrics.strategy.startswith("1x<sp4,1;gather> then 4x<1,1;gather> then")
        phases = metrics.strategy.split(" then ")
        assert len(metrics.pipelines) == 1 + 4 * (len(phases) - 1)
        slowest = [metrics.pipelines[0].measured_ms] + [
            max(p.measured_ms for p in metrics.pipelines[n : n + 4])
            for n in range(1, len(metrics.pipelines), 4)
        ]
        assert metrics.measured_ms == pytest.approx(sum(slowest))
        assert found["links"] == 2  # one for all that gather, one for <4,1>
        assert "2 phases" in found["refused"]


@pytest.mark.distributed
def test_a_rank_holds_two_layers(results):
    for result in results:
        found = result["memory"]
        check_memory(found)
        (whole, _), (gathered, _) = found["4x<1,1>"], found["4x<1,1;gather>"]
        assert gathered.slice_bytes < 0.4 * whole.slice_bytes
        assert gathered.gradient_bytes < 0.4 * whole.gradient_bytes


def test_what_gather_is_for():
    assert str(Scheme.parse("<sp4,1;ckpt=2;gather>")) == "<sp4,1;ckpt=2;gather>"
    scheme = Scheme.parse("<2,1;gather>")
    assert Scheme.from_json(scheme.to_json()) == scheme != Scheme(2, 1)
    for text in ("<1,2;gather>", "<1,1;gather=2>", "<1,1;gather;gather>"):
        with pytest.raises(HydraConfigError):
            Scheme.parse(text)
    with pytest.raises(HydraConfigError, match="all pipelines or none"):
        Strategy.parse("1x<1,1;gather> + 1x<1,1>")
