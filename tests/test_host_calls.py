"""Calls that Python makes in an iteration: what the host costs, counted and not timed."""

from __future__ import annotations

import cProfile
import pstats

import pytest
from distributed import run_distributed
from engines import start_hydra
from models import VOCAB_SIZE, tiny
from single_process import random_examples

MOST_CALLS = {"2x<1,1>": 25_000, "1x<2,1>": 38_000, "2x<1,1;gather>": 28_000}
"""Of functions of Python and C, in the computing thread, for 64 tokens and 16 layers."""
WARM_UP = 3
"""Iterations until nothing is met for the first time."""


def count_calls(step):
    """Calls of one `step`, after some that are like it."""
    for _ in range(WARM_UP):
        step()
    profile = cProfile.Profile()
    profile.runcall(step)
    return pstats.Stats(profile).total_calls


def calls_of_iterations():
    engine = start_hydra(tiny("llama", num_hidden_layers=16))
    examples = random_examples((20, 12, 18, 14), VOCAB_SIZE, seed=1)
    found = {
        text: count_calls(lambda text=text: engine.train_batch(examples, strategy=text))
        for text in MOST_CALLS
    }
    gathered = engine.hydra.stage_model.params[0]
    gathered.all_gather([gathered])
    before = gathered.ds_status.name
    engine.train_batch(examples, strategy="2x<1,1>")
    return found, (before, gathered.ds_status.name)


@pytest.mark.distributed
def test_an_iteration_makes_few_calls():
    for found, states in run_distributed(calls_of_iterations, 2):
        for text, most in MOST_CALLS.items():
            assert found[text] <= most, found
        assert states == ("AVAILABLE", "NOT_AVAILABLE")  # a step releases what is gathered
