"""Layers gathered for every pass: gradients of one process, equal bits, memory of two layers."""

from __future__ import annotations

import pytest
import torch
from distributed import run_distributed
from engines import start_hydra
from models import FAMILIES, VOCAB_SIZE, tiny
from single_process import random_examples
from test_engine_parity import assert_parity, check_gradients

from ds_hydra.engine.parallel.one_f_one_b import Pass
from ds_hydra.engine.transfer.gathering import plan_rounds
from ds_hydra.engine.transfer.slices import SlicePool
from ds_hydra.engine.transfer.stream_plan import STREAM_WINDOW, Window
from ds_hydra.errors import HydraConfigError
from ds_hydra.strategy import Scheme, Strategy

STRATEGIES = (
    "4x<1,1;gather>",
    "1x<4,1;gather>",
    "1x<2,1;gather> + 1x<sp2,1;gather>",
    "1x<sp2,1;ckpt=2;gather> + 1x<1,1;gather>",
)


def families():
    """Parity of every tested family; phi3 runs with TP 1 alone, and without SP."""
    return {
        (family, *case): found
        for family in FAMILIES
        for case, found in check_gradients(
            family,
            ("3x<1,1;gather>",) if family == "phi3" else ("1x<2,1;gather> + 2x<1,1;gather>",),
        ).items()
    }


def repeats(text):
    """Losses and weights of three iterations with and without overlap."""
    found = []
    for overlap in (True, False, True):
        engine = start_hydra(tiny("llama"), hydra={"link": {"overlap": overlap}})
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


def frozen():
    """Losses of a model with frozen embedding and first layers, gathered and not, in turn."""
    model = tiny("llama", num_hidden_layers=4)
    for param in (*model.model.embed_tokens.parameters(), *model.model.layers[:2].parameters()):
        param.requires_grad_(False)
    engine = start_hydra(model)
    examples = random_examples((9, 17, 30, 5), VOCAB_SIZE, seed=0)
    texts = ("4x<1,1;gather>", "1x<2,2>", "2x<2,1;gather>", "1x<2,2>", "4x<1,1>")
    evaluated = [float(engine.eval_batch(examples, strategy=text)) for text in texts]
    return evaluated, [float(engine.train_batch(examples, strategy=text)) for text in texts]


def memory():
    """(stated, held by the pool) of gathered strategies and what a rank holds without."""
    engine = start_hydra(tiny("llama", num_hidden_layers=8))
    propagator = engine.hydra.propagator
    examples = random_examples((9, 17, 30, 5), VOCAB_SIZE, seed=0)
    found = {}
    for text in ("4x<1,1>", "4x<1,1;gather>", "2x<2,1;gather>"):
        propagator.links.pool = SlicePool(torch.device("cpu"), exact=True)
        engine.train_batch(examples, strategy=text)
        found[text] = (
            propagator.links.link_memory(Strategy.parse(text)),
            propagator.links.pool.nbytes,
        )
    return found, propagator.links.home


def checks():
    parity = check_gradients("llama_tied", STRATEGIES) | check_gradients(
        "qwen3", STRATEGIES, {"link": {"routes": "node", "devices_per_node": 2}}
    )
    return {
        "parity": parity,
        "without overlap": check_gradients("qwen2", STRATEGIES, {"link": {"overlap": False}}),
        "families": families(),
        "rows cut": check_gradients(
            "llama", ("1x<4,1;gather>", "2x<2,1;ckpt=2;gather>"), {"tp_sequence_parallel": True}
        ),
        "repeats": repeats("1x<2,1;gather> + 2x<1,1;gather>"),
        "frozen": frozen(),
        "memory": memory(),
    }


@pytest.fixture(scope="module")
def results():
    return run_distributed(checks, world_size=4)


@pytest.mark.distributed
def test_gradients_equal_one_process(results):
    for result in results:
        for kind in ("parity", "without overlap", "families", "rows cut"):
            assert_parity(result[kind])


@pytest.mark.distributed
def test_equal_bits(results):
    assert all(all(result["repeats"]) for result in results)


@pytest.mark.distributed
def test_frozen_layers_and_evaluation(results):
    for result in results:
        evaluated, trained = result["frozen"]
        assert evaluated == pytest.approx([evaluated[0]] * 5, rel=1e-6)
        assert trained[0] == pytest.approx(evaluated[0], rel=1e-6)
        assert trained == sorted(trained, reverse=True)  # the same examples, step by step


@pytest.mark.distributed
def test_a_rank_holds_two_layers(results):
    for result in results:
        found, home = result["memory"]
        assert home is None
        for stated, held in found.values():
            assert held == stated.slice_bytes + stated.gradient_bytes
        (whole, _), (gathered, _) = found["4x<1,1>"], found["4x<1,1;gather>"]
        assert gathered.slice_bytes < 0.4 * whole.slice_bytes
        assert gathered.gradient_bytes < 0.4 * whole.gradient_bytes


@pytest.mark.parametrize("num_micro_batches", [0, 1, 2, 5])
@pytest.mark.parametrize("num_layers", [2, 3, 4, 7])
@pytest.mark.parametrize("first_trained", [0, 1, 2])
@pytest.mark.parametrize("num_kept", [0, 1])
def test_rounds_never_overwrite_what_is_used(
    num_micro_batches, num_layers, first_trained, num_kept
):
    buckets = tuple(range(num_kept, num_kept + num_layers))
    trained = tuple(position >= first_trained for position in range(num_layers))
    window = Window(buckets=buckets, has_backward=trained)
    rounds = plan_rounds(window, num_kept + num_layers, num_micro_batches, training=True)
    passes = [Pass.FORWARD, Pass.BACKWARD] * num_micro_batches
    assert list(rounds.uses[:-1]) == [buckets[p] for p in window.uses(passes)]
    for is_early in (False, True):
        carry_out(rounds, buckets, trained, num_micro_batches, is_early=is_early)


def carry_out(rounds, buckets, trained, num_micro_batches, *, is_early):
    """Every round as soon as it may be, or as late; what is used has to be there."""
    slots, grads, pushed = {}, {}, []
    open_rounds = [r for r in rounds.order if r.bucket in buckets]

    def post(round_):
        open_rounds.remove(round_)
        slot = buckets.index(round_.bucket) % STREAM_WINDOW
        if round_.is_push:
            assert grads.pop(slot) == round_.bucket
            pushed.append(round_.bucket)
        else:
            slots[slot] = round_.bucket

    for use, bucket in enumerate(rounds.uses[:-1]):
        needed = rounds.order[: max(rounds.pull_before[use], rounds.push_before[use]) + 1]
        assert all(r.after < use for r in needed), "waits for itself"
        for round_ in list(open_rounds):
            if round_ in needed or (is_early and round_.after < use):
                post(round_)
        slot = buckets.index(bucket) % STREAM_WINDOW
        assert slots[slot] == bucket
        if any(r.is_push and r.after == use for r in rounds.order):
            assert slot not in grads, "a gradient that was not pushed"
            grads[slot] = bucket
    for round_ in list(open_rounds):
        post(round_)
    wanted = [b for b, t in zip(buckets, trained, strict=True) if t] * num_micro_batches
    assert sorted(pushed) == sorted(wanted)


def test_what_gather_is_for():
    assert str(Scheme.parse("<sp4,1;ckpt=2;gather>")) == "<sp4,1;ckpt=2;gather>"
    scheme = Scheme.parse("<2,1;gather>")
    assert Scheme.from_json(scheme.to_json()) == scheme != Scheme(2, 1)
    for text in ("<1,2;gather>", "<1,1;stream;gather>", "<1,1;gather=2>", "<1,1;gather;gather>"):
        with pytest.raises(HydraConfigError):
            Scheme.parse(text)
    with pytest.raises(HydraConfigError, match="all pipelines or none"):
        Strategy.parse("1x<1,1;gather> + 1x<1,1>")
