"""Rows for any trainer: legal, recomputable, near the optimum, without torch; the examples train
to the losses of one rank.
"""

from __future__ import annotations

import contextlib
import io
import json
import subprocess
import sys

import numpy as np
import pytest
import torch
from distributed import run_distributed
from hypothesis import given, settings
from hypothesis import strategies as st
from reference import make_profile, partitions
from test_examples import load

import ds_hydra
from ds_hydra.configs import load_model_preset
from ds_hydra.errors import HydraConfigError, InfeasiblePlanError
from ds_hydra.sampler.balance import balance_rows, read_latency
from ds_hydra.strategy import LatencyModel

COEFFICIENTS = LatencyModel(quadratic_ms=0.02, linear_ms=1.0, constant_ms=4.0)

batches = st.lists(st.integers(1, 50), min_size=1, max_size=40)


def balance(lengths, num_ranks=2, max_tokens=50, model=COEFFICIENTS, **options):
    return balance_rows(lengths, num_ranks=num_ranks, max_tokens=max_tokens, model=model, **options)


def row_ms(lengths):
    return sum(0.02 * n * n + n for n in lengths) + 4.0 if lengths else 0.0


def time_of(rows, lengths, lockstep):
    times = [[row_ms([lengths[i] for i in row]) for row in own] for own in rows]
    return sum(map(max, zip(*times, strict=True))) if lockstep else max(map(sum, times))


@settings(deadline=None)
@given(batches, st.integers(1, 7), st.integers(50, 120), st.booleans())
def test_rows_are_legal_and_recomputable(lengths, num_ranks, max_tokens, lockstep):
    found = balance(lengths, num_ranks, max_tokens, lockstep=lockstep)
    placed = [i for own in found.rows for row in own for i in row]
    assert sorted(placed) == list(range(len(lengths)))
    assert len(found.rows) == len(found.row_ms) == num_ranks
    for own in found.rows:
        assert all(sum(lengths[i] for i in row) <= max_tokens for row in own)
    assert found.predicted_ms == pytest.approx(time_of(found.rows, lengths, lockstep))
    assert 0 < found.lower_bound_ms <= found.predicted_ms
    assert found.num_label_tokens == sum(lengths) - len(lengths)
    assert found.num_label_sequences == sum(length > 1 for length in lengths)
    if lockstep:
        assert len({len(own) for own in found.rows}) == 1
        for wave in zip(*found.rows, strict=True):
            assert all(wave) or all(len(row) <= 1 for row in wave)
    else:
        assert all(row for own in found.rows for row in own)


def best_of_all(lengths, num_ranks, max_tokens):
    """The least sum of longest rows over all ways to divide `lengths` into rows: those of a wave
    are neighbours by time.
    """
    best = np.inf
    for rows in partitions(lengths):
        if all(sum(row) <= max_tokens for row in rows):
            times = sorted(map(row_ms, rows), reverse=True)
            best = min(best, sum(times[::num_ranks]))
    return best


@pytest.mark.parametrize("seed", range(12))
def test_lockstep_is_near_the_best_of_all_ways(seed):
    rng = np.random.default_rng(seed)
    lengths = [int(n) for n in 1 + 49 * rng.random(6) ** 2]
    found = balance(lengths, 2, 60).predicted_ms
    best = best_of_all(lengths, 2, 60)
    assert best * (1 - 1e-9) <= found <= best * 1.03


@pytest.mark.parametrize("lockstep", [True, False])
def test_time_is_balanced_and_not_tokens(lockstep):
    lengths = [100, *[25] * 12]  # 300 ms, and 37.5 ms each
    found = balance(lengths, 2, 400, lockstep=lockstep)
    of_longest = next(own for own in found.rows if any(0 in row for row in own))
    assert sum(lengths[i] for row in of_longest for i in row) == 150
    assert found.imbalance < 0.01


def test_rows_that_run_together_are_alike():
    rng = np.random.default_rng(0)
    lengths = [int(n) for n in 2 + 2000 * rng.random(300) ** 4]
    latency = LatencyModel(quadratic_ms=1e-4, linear_ms=0.1, constant_ms=1)
    found = balance(lengths, 8, 2048, latency)
    for wave in zip(*found.row_ms, strict=True):
        assert max(wave) < 1.08 * sum(wave) / 8
    assert found.imbalance < 0.04


def test_rows_as_long_as_the_longest_sequence_are_balanced():
    """Long sequences run beside long ones: a row of short ones has no room to take as long."""
    lengths = np.random.default_rng(0).lognormal(6.5, 1, 2000).astype(int) + 1
    latency = LatencyModel(quadratic_ms=1e-6, linear_ms=1e-2, constant_ms=1.0)
    assert balance(lengths.clip(max=8192), 8, 8192, latency).imbalance < 0.01


def test_fewer_sequences_than_ranks_leave_rows_empty():
    found = balance([30, 20, 10], 5)
    assert sorted(found.rows) == [((),), ((),), ((0,),), ((1,),), ((2,),)]
    assert sorted(balance([30, 20], 3, lockstep=False).rows) == [(), ((0,),), ((1,),)]


def test_whatever_describes_the_model(tmp_path):
    config = load_model_preset("llama2_7b")
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config))
    described = [read_latency(model) for model in ("llama2_7b", config, path, str(path))]
    assert len(set(described)) == 1
    assert described[0].quadratic_ms > 0
    assert read_latency(config, "a800") != described[0]
    profile = make_profile({"<1,1>": (0.02, 1.0, 4.0), "<2,1>": (1.0, 1.0, 1.0)})
    path.write_text(json.dumps(profile.document))
    assert read_latency(profile) == read_latency(path) == COEFFICIENTS


def test_lengths_of_arrays_and_tensors():
    lengths = [30, 20, 10]
    found = balance(lengths)
    assert balance(np.array(lengths)) == balance(torch.tensor(lengths)) == found
    assert balance([np.int64(n) for n in lengths]) == found


def test_labels_that_count():
    found = balance([30, 20, 10], label_tokens=[25, 0, 3])
    assert (found.num_label_tokens, found.num_label_sequences) == (28, 2)


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"num_ranks": 0}, "num_ranks is 0, expected a whole number from 1"),
        ({"max_tokens": 0}, "max_tokens is 0, expected a whole number from 1"),
        ({"lengths": []}, "lengths is empty"),
        ({"lengths": 7}, "lengths is 7, expected a list of whole numbers"),
        ({"lengths": [5, 0]}, r"lengths\[1\] is 0, expected a whole number from 1"),
        ({"lengths": [5, 2.5]}, r"lengths\[1\] is 2.5"),
        ({"label_tokens": [1]}, "label_tokens has 1 entries, expected one for each of 3 lengths"),
        ({"label_tokens": [1, 21, 1]}, "sequence 1 has 20 tokens, and label_tokens says that 21"),
        ({"label_tokens": [0, 0, 0]}, "no token of the 3 sequences counts"),
        ({"model": 7}, "model is 7, expected the fields of a config.json"),
        ({"model": "llama2_8b"}, "did you mean 'llama2_7b'"),
        ({"model": {"model_type": "gpt2"}}, "model: gpt2 has no num_hidden_layers"),
        ({"model": "a800_llama2_7b"}, "has no times of one rank, <1,1>"),
        ({"model": "llama2_7b", "hardware": "h1000"}, "not among the hardware"),
    ],
)
def test_bad_input_is_named(wrong, said):
    with pytest.raises(HydraConfigError, match=said):
        balance(**{"lengths": [30, 20, 10], **wrong})


def test_a_sequence_above_max_tokens_is_named_and_the_advice_works():
    with pytest.raises(
        InfeasiblePlanError,
        match=r"sequence 1 has 60 tokens, max_tokens is 50 \(2 sequences are longer\); set it to 70",
    ):
        balance([30, 60, 70])
    assert balance([30, 60, 70], max_tokens=70).rows


def test_without_torch():
    code = (
        "import sys, ds_hydra; "
        "ds_hydra.balance_rows([3, 2], num_ranks=2, max_tokens=4, model='llama2_7b'); "
        "print([m for m in ('torch', 'deepspeed', 'transformers') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
    assert ds_hydra.balance_rows is balance_rows


def run_both():
    with contextlib.redirect_stdout(io.StringIO()):
        return [
            load(f"balance/{name}.py").main(["--iterations", "4"]) for name in ("fsdp", "verl_like")
        ]


@pytest.mark.slow
@pytest.mark.distributed
def test_examples_train_to_the_losses_of_one_rank():
    two = run_distributed(run_both, 2)
    one = run_distributed(run_both, 1)
    assert two[0] == two[1]
    for found, expected in zip(two[0], one[0], strict=True):
        np.testing.assert_allclose(found, expected, rtol=2e-3, atol=1e-4)
    fsdp, policy = two[0]
    assert fsdp[-1] < fsdp[0] - 0.5
    assert policy[2] < policy[0]
