"""Schemes with options in the engine: what is refused on all ranks, and training from a dataset.
Gradients under them are in test_parity_table.
"""

from __future__ import annotations

import functools
from pathlib import Path

import datasets
import pytest
from distributed import run_distributed
from engines import refused, small_profile, start_hydra, write_json
from models import VOCAB_SIZE, tiny
from single_process import random_examples

from ds_hydra.report.run_folder import load_run
from ds_hydra.strategy import Profile, Scheme, Strategy

NUM_LAYERS = 6

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
    """Every rank says why this model or engine cannot run a scheme."""
    examples = random_examples((9, 17), VOCAB_SIZE, seed=0)
    engine = start_hydra(tiny("llama", num_hidden_layers=NUM_LAYERS))
    everywhere = start_hydra(
        tiny("llama", num_hidden_layers=NUM_LAYERS), hydra={"activation_checkpointing": True}
    )
    both = "hydra.activation_checkpointing, or the model's own gradient checkpointing, checkpoints layers"
    for refusing, text, said in (
        (
            engine,
            "1x<1,2;stages=4,3>",
            "its stages have 7 layers, the model has 6; make them sum to 6",
        ),
        (engine, "4x<1,1;ckpt=7>", "ckpt=7 is above the model's 6 layers"),
        (everywhere, "4x<1,1;ckpt=2>", both),
    ):
        assert said in refused(functools.partial(refusing.train_batch, examples, text))
    assert float(engine.train_batch(examples, strategy="4x<1,1;ckpt=2>")) > 0  # usable as before


def checks(folder):
    refusals()
    dataset_runs(folder)


@pytest.mark.slow
@pytest.mark.distributed
def test_candidates_with_parts_train_from_a_dataset(tmp_path):
    """With times derived from the given profile, or measured; and the run folder can be read."""
    run_distributed(checks, 4, str(tmp_path), timeout_s=900)
    wide = [Scheme.parse(text) for text in ("<1,1;ckpt=4>", "<1,2;stages=3,1>")]
    for name in ("given", "measured"):
        run = load_run(tmp_path / name)
        assert len(run.records) == 3
        assert {str(r.strategy) for r in run.records} <= {
            str(Strategy.parse(text)) for text in CANDIDATES
        }
        assert run.traces.keys() <= {r.iteration for r in run.records}
        assert run.notes == ()
    measured, given = (Profile.load(tmp_path / n / "profile.json") for n in ("measured", "given"))
    assert set(wide) <= set(measured.latency) - measured.assumed
    assert set(wide) <= given.assumed
