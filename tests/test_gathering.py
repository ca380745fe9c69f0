"""Layers gathered for every pass: gradients of one process, equal bits, memory of two layers."""

from __future__ import annotations

import copy
import json
import tempfile

import pytest
import torch
from distributed import run_distributed
from engines import gather_gradients, long_on_four_ranks, refused, start_hydra, train_plan
from models import VOCAB_SIZE, tiny
from parity_rows import row_of
from passing_layers import (
    check_frozen,
    check_memory,
    link_memory,
    losses_with_frozen_layers,
    repeats,
)
from single_process import load_of, random_examples
from test_engine_parity import (
    LENGTHS,
    RELATIVE_TOLERANCE,
    found_once,
    hand_plan,
    relative_errors,
    run_alone,
)
from test_parity_table import engine_for, model_of

from ds_hydra.errors import HydraConfigError
from ds_hydra.records.timeline import EventKind
from ds_hydra.strategy import Scheme, Strategy

IN_PHASES = (
    "1x<2,1;gather> + 2x<1,1;gather>",
    "3x<1,1;gather>",
    "4x<1,1;gather> then 1x<sp4,1;gather> then 1x<sp2,1;gather> + 2x<1,1;gather>",
    "3x<1,1;hpz>",
    "4x<1,1;hpz> then 1x<sp4,1;hpz> then 1x<sp2,1;gather> + 2x<1,1;gather> then 2x<cp2,1;hpz>",
)
"""A rank without work, or phases; pipelines with fewer micro-batches than others in both. Weights
that stay on the node, and phases after which they do not. Other families, and what else is trained,
have rows of the parity table.
"""


def passes_on_two_nodes():
    """Worst relative errors of gradients, of trained and evaluated losses, and worst error of
    scores; two nodes of two ranks, as far as routes go.
    """
    row = row_of("llama.dp.gather.nodes_of_2.tied")
    model = model_of(row)
    reference = copy.deepcopy(model)
    examples = random_examples(LENGTHS, VOCAB_SIZE, seed=1)
    loss, by_name = run_alone(reference, examples)
    scores = found_once(lambda: [scores_of(reference, example) for example in examples])
    engine = engine_for(model, row)
    name_of = {id(p): name for name, p in model.named_parameters()}
    names = [name_of[id(p)] for p in engine.hydra.stage_model.params]
    propagator, found = engine.hydra.propagator, {}
    for text in IN_PHASES:
        parsed = Strategy.parse(text)
        plan = hand_plan(parsed, examples)
        trains, grads_P = train_plan(engine, plan, load_of(examples))
        recorder = propagator.recorder
        for phase in range(len(parsed.in_turn)):
            kinds = {s[0] for s, own in zip(recorder.read(), recorder.phases) if own == phase}
            assert kinds >= {EventKind.PULL, EventKind.PUSH}, (text, phase)
        errors = relative_errors(
            gather_gradients(engine, grads_P), [by_name[name] for name in names], names
        )
        evaluates = propagator.evaluate(plan, load_of(examples))
        losses = [engine.hydra.gather_outcomes(o).loss() for o in (trains, evaluates)]
        found[text] = [
            max(errors.values()),
            *(abs(own / loss - 1) for own in losses),
            max(score_errors(engine, scores, examples, text) if " then " not in text else [0]),
        ]
    engine.destroy()
    return found


def scores_of(reference, example):
    ids = example["input_ids"]
    with torch.no_grad():
        logits = reference(input_ids=ids[None], use_cache=False).logits[0, :-1]
    return logits.log_softmax(-1).gather(-1, ids[1:, None])[:, 0]


def score_errors(engine, scores, examples, strategy):
    for wanted, found in zip(scores, engine.score(examples, strategy).log_probs, strict=True):
        yield float((found[1:] - wanted).abs().max())


def checks():
    return {
        "repeats": repeats("1x<2,1;gather> + 1x<cp2,1;gather>"),
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


@pytest.mark.slow
@pytest.mark.distributed
def test_gradients_losses_and_scores_equal_one_process():
    for of_rank in run_distributed(passes_on_two_nodes, world_size=4):
        for strategy, errors in of_rank.items():
            assert max(errors) <= RELATIVE_TOLERANCE, (strategy, errors)


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
