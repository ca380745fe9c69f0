"""Schemes with options in the engine: uneven stages, checkpointed layers, gathered ones; they
change no gradient.
"""

from __future__ import annotations

import functools
from pathlib import Path

import datasets
import pytest
import torch
from distributed import run_distributed
from engines import refused, small_profile, start_hydra, train_plan, write_json
from models import VOCAB_SIZE, tiny
from single_process import load_of, random_examples
from test_engine_parity import LENGTHS, hand_plan

from ds_hydra.engine.profiling.profiler import _count_saved_bytes
from ds_hydra.report.run_folder import load_run
from ds_hydra.strategy import Profile, Scheme, Strategy

NUM_LAYERS = 6

SAME_BITS = (
    ("4x<1,1>", ("4x<1,1;ckpt=1>", "4x<1,1;ckpt=6>", "4x<1,1;ckpt=3>")),
    ("2x<2,1>", ("2x<2,1;ckpt=4>", "2x<2,1;ckpt=6>")),
    ("1x<2,2>", ("1x<2,2;ckpt=4>", "1x<2,2;stages=3,3>", "1x<2,2;ckpt=6;stages=3,3>")),
    ("2x<1,2;stages=4,2>", ("2x<1,2;ckpt=2;stages=4,2>", "2x<1,2;ckpt=6;stages=4,2>")),
    ("1x<2,1> + 1x<1,2>", ("1x<2,1;ckpt=2> + 1x<1,2;ckpt=5>",)),
)  # fmt: skip


def bits_that_differ():
    """Strategies whose loss or gradient shards on this rank differ in a bit from those of the plain
    one.
    """
    engine = start_hydra(tiny("llama_tied", num_hidden_layers=NUM_LAYERS))
    propagator = engine.hydra.propagator
    examples = random_examples(LENGTHS, VOCAB_SIZE, seed=2)

    def run(text):
        plan = hand_plan(text, examples)
        with _count_saved_bytes() as kept:
            outcome, grads_P = train_plan(engine, plan, load_of(examples))
        evaluated = propagator.evaluate(plan, load_of(examples))
        loss = outcome.loss_sum, evaluated.loss_sum
        return loss, grads_P, sum(kept.values())

    different, kept = [], {}
    for plain, others in SAME_BITS:
        loss, grads_P, kept[plain] = run(plain)
        for text in others:
            other_loss, other_grads_P, kept[text] = run(text)
            if other_loss != loss or not all(map(torch.equal, grads_P, other_grads_P)):
                different.append(text)
    return different, kept


CANDIDATES = ["4x<1,1;ckpt=4>", "1x<1,2;stages=3,1> + 2x<1,1>", "2x<2,1>"]


def dataset_runs(folder):
    """Run folders of training from a dataset with candidates that have options; with a profile
    given, and measured.
    """
    document = small_profile(6_000_000, num_layers=4)
    document["memory"]["input_bytes_per_token_per_layer_per_hidden"] = 4
    document["schemes"].append(
        {"tp": 1, "pp": 2, "quadratic_ms": 0, "linear_ms": 0.05, "constant_ms": 1.0}
    )
    given = write_json(f"{folder}/profile.json", document)
    rows = [
        {"input_ids": [(7 * i + j) % VOCAB_SIZE for j in range(3 + 11 * i % 90)]} for i in range(40)
    ]
    for name, profile in (("given", given), ("measured", None)):
        hydra = {
            "profile": profile,
            "strategies": CANDIDATES,
            "tokens_per_iteration": 400,
            "run_dir": str(Path(folder) / name),
            "profiling": {"lengths": [16, 32, 48], "repeats": 1},
            "planner": {"num_workers": 0},
        }
        data = datasets.Dataset.from_list(rows)
        engine = start_hydra(tiny("llama"), hydra=hydra, training_data=data)
        for _ in range(3):
            engine.train_batch()
        engine.hydra.close()


def refusals():
    """What every rank says of schemes that this model or engine cannot run."""
    examples = random_examples((9, 17), VOCAB_SIZE, seed=0)
    engine = start_hydra(tiny("llama", num_hidden_layers=NUM_LAYERS))
    everywhere = start_hydra(
        tiny("llama", num_hidden_layers=NUM_LAYERS), hydra={"activation_checkpointing": True}
    )
    found = []
    for refusing, text in (
        (engine, "1x<1,2;stages=4,3>"),
        (engine, "4x<1,1;ckpt=7>"),
        (everywhere, "4x<1,1;ckpt=2>"),
    ):
        found.append(refused(functools.partial(refusing.train_batch, examples, text)))
    assert float(engine.train_batch(examples, strategy="4x<1,1;ckpt=2>")) > 0  # usable as before
    return found


def checks(folder):
    return {
        "bits": bits_that_differ(),
        "refusals": refusals(),
        "runs": dataset_runs(folder),
    }


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Where the ranks leave run folders."""
    return tmp_path_factory.mktemp("schemes")


@pytest.fixture(scope="module")
def results(folder):
    """What `checks` found on each of 4 ranks, started once."""
    return run_distributed(checks, 4, str(folder), timeout_s=900)


@pytest.mark.slow
@pytest.mark.distributed
def test_checkpoints_change_no_bit(results):
    for rank, result in enumerate(results):
        assert result["bits"][0] == [], f"rank {rank}"


@pytest.mark.slow
@pytest.mark.distributed
def test_checkpointed_layers_keep_less(results):
    kept = results[0]["bits"][1]
    assert kept["4x<1,1;ckpt=6>"] < 0.5 * kept["4x<1,1>"]
    assert kept["4x<1,1;ckpt=6>"] < kept["4x<1,1;ckpt=1>"] < kept["4x<1,1>"]


@pytest.mark.slow
@pytest.mark.distributed
def test_parts_that_do_not_fit_are_refused_on_all_ranks(results):
    for result in results:
        stages, ckpt, both = result["refusals"]
        assert "its stages have 7 layers, the model has 6; make them sum to 6" in stages
        assert "ckpt=7 is above the model's 6 layers" in ckpt
        assert (
            "hydra.activation_checkpointing, or the model's own gradient checkpointing, checkpoints layers"
            in both
        )


@pytest.mark.slow
@pytest.mark.distributed
def test_candidates_with_parts_train_from_a_dataset(results, folder):
    """With times derived from the given profile, or measured; and the run folder can be read."""
    wide = [Scheme.parse(text) for text in ("<1,1;ckpt=4>", "<1,2;stages=3,1>")]
    for name in ("given", "measured"):
        run = load_run(folder / name)
        assert len(run.records) == 3
        assert {str(r.strategy) for r in run.records} <= {
            str(Strategy.parse(text)) for text in CANDIDATES
        }
        assert run.traces.keys() <= {r.iteration for r in run.records}
        assert run.notes == ()
    measured, given = (Profile.load(folder / n / "profile.json") for n in ("measured", "given"))
    assert set(wide) <= set(measured.latency) - measured.assumed
    assert set(wide) <= given.assumed
