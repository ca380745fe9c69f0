"""Dropout of adapters and NEFTune: noise like chance, the same under every strategy, with the
gradients of one process that draws it for each sequence alone.
"""

from __future__ import annotations

import copy
import math

import numpy as np
import pytest
import torch
from distributed import run_distributed
from engines import start_hydra
from models import VOCAB_SIZE, tiny
from single_process import random_examples, summed_loss, token_mean_gradients
from test_engine_parity import assert_parity, run_alone
from test_examples import load
from test_lora import STRATEGIES, adapted, errors_of
from torch import nn

from ds_hydra import losses
from ds_hydra.engine.model.noise import (
    TokenDropout,
    keep_mask,
    layer_number,
    token_seeds,
    uniform_noise,
)

pytest.importorskip("peft", reason="the extra ds_hydra[peft] is not installed")

RATE, SEED = 0.3, 42
LENGTHS = [5, 30, 12, 7, 90, 3]


def mask(num_tokens=4096, num_features=512, rate=0.05, layer="a", sequence=0, iteration=0):
    seeds_T = token_seeds(SEED, iteration, sequence, 0, num_tokens)
    return keep_mask(seeds_T, layer_number(layer), rate, 0, num_features)


@pytest.mark.parametrize("rate", [0.05, 0.5, 0.9])
def test_masks_drop_as_many_as_chance_everywhere(rate):
    dropped = (~mask(rate=rate)).double()
    for dims in ((0, 1), 0, 1):
        mean = dropped.mean(dim=dims)
        num = dropped.numel() / mean.numel()
        z = (mean - rate) / math.sqrt(rate * (1 - rate) / num)
        assert float(z.abs().max()) < 5  # of 4,096 at most
        assert mean.numel() == 1 or 0.9 < float(z.std()) < 1.1


@pytest.mark.parametrize("rate", [0.05, 0.5])
def test_masks_of_neighbours_layers_and_sequences_are_independent(rate):
    one = mask(rate=rate)
    pairs = {f"features {n} apart": (one[:, n:], one[:, :-n]) for n in (1, 2, 3, 4, 5, 8)}
    pairs |= {f"tokens {n} apart": (one[n:], one[:-n]) for n in (1, 2, 64)}
    pairs["diagonal"] = (one[1:, 1:], one[:-1, :-1])
    # What xor alone would leave: three corners of a rectangle give the fourth.
    corners = one[1:, 4:] ^ one[:-1, 4:]
    pairs["corners"] = (corners, one[1:, :-4] ^ one[:-1, :-4])
    for other in ({"layer": "b"}, {"sequence": 1}, {"iteration": 1}):
        pairs[str(other)] = (one, mask(rate=rate, **other))
    for name, (left, right) in pairs.items():
        x, y = left.double().flatten(), right.double().flatten()
        correlation = float(((x - x.mean()) * (y - y.mean())).mean() / x.std() / y.std())
        assert abs(correlation) * math.sqrt(x.numel()) < 4.5, name


def test_parts_of_a_mask_are_those_of_the_whole():
    whole = mask(num_tokens=50, num_features=37, rate=0.5)
    seeds_T = token_seeds(SEED, 0, 0, 20, 40)
    part = keep_mask(seeds_T, layer_number("a"), 0.5, 9, 14)
    assert torch.equal(part, whole[20:40, 9:23])


@pytest.mark.parametrize(("rate", "kept"), [(0.0, True), (1.0, False)])
def test_rates_at_the_ends(rate, kept):
    assert (mask(num_tokens=64, rate=rate) == kept).all()


class AloneDropout(nn.Module):
    """Dropout of one process: the mask of the sequence that it runs alone."""

    sequence, iteration = 0, 0

    def __init__(self, name, rate):
        super().__init__()
        self.layer, self.rate = layer_number(name), rate

    def forward(self, x):
        seeds_T = token_seeds(SEED, type(self).iteration, type(self).sequence, 0, x.shape[-2])
        return x * keep_mask(seeds_T, self.layer, self.rate, 0, x.shape[-1]) / (1 - self.rate)


def draw_alone(model):
    """`model` with dropout that one process computes; the name is that of the layer in the base."""
    for name, module in model.get_base_model().base_model.named_modules():
        for adapter, dropout in getattr(module, "lora_dropout", {}).items():
            rate = round(dropout.p * 65536) / 65536
            module.lora_dropout[adapter] = AloneDropout(f"{name}.{adapter}", rate)
    return model


def count_sequences(model):
    """Let every forward of `model` from now on be about the next sequence, beginning with 0."""
    AloneDropout.sequence = -1

    def begin_sequence(_module, _args):
        AloneDropout.sequence += 1

    return model.register_forward_pre_hook(begin_sequence)


def reference_gradients(model, examples):
    """Loss, and gradients by name, with sequence i's own masks for example i."""
    handle = count_sequences(model)
    found = run_alone(model, examples)
    handle.remove()
    return found


def parity():
    torch.manual_seed(0)
    examples = random_examples(LENGTHS, VOCAB_SIZE)
    model = adapted("qwen3", lora_dropout=RATE)
    reference = draw_alone(copy.deepcopy(model))
    wanted = reference_gradients(reference, examples)
    without = token_mean_gradients(adapted("qwen3"), examples)[0]
    engine = start_hydra(model)
    strategies = (*STRATEGIES, "2x<1,2;ckpt=2>")
    errors = errors_of(engine, examples, strategies, wanted)
    assert abs(wanted[0] / without - 1) > 1e-3, "dropout changes the loss"
    # Outside training nothing is dropped.
    assert float(engine.eval_batch(examples, strategy="2x<2,1>")) == pytest.approx(
        without, rel=1e-5
    )
    with torch.no_grad():
        alone = [summed_loss(adapted("qwen3"), example) for example in examples]
    scores = engine.score(examples, strategy="1x<2,2>").log_probs
    counted = [e["labels"] != -100 for e in examples]
    for values, counts, wanted in zip(scores, counted, alone, strict=True):
        assert float(-values[1:][counts[1:]].sum()) == pytest.approx(float(wanted), rel=1e-4)
    return errors


@pytest.mark.slow
@pytest.mark.distributed
def test_gradients_equal_one_process_under_every_strategy():
    assert_parity(run_distributed(parity, 4)[0])


def test_noise_of_the_embedding_is_even_and_of_each_token_and_feature():
    noise = uniform_noise(token_seeds(SEED, 0, 0, 0, 4096), layer_number("neftune"), 510).double()
    assert noise.shape == (4096, 510)
    assert float(noise.abs().max()) < 1
    for dims in ((0, 1), 0, 1):
        mean = noise.mean(dim=dims)
        z = mean * math.sqrt(3 * noise.numel() / mean.numel())  # the variance is 1/3
        assert float(z.abs().max()) < 5
    counts = torch.histc(noise, 64, -1, 1) / noise.numel() * 64
    assert float((counts - 1).abs().max()) < 5 * math.sqrt(64 / noise.numel())


ALPHA = 15.0


def with_noise_alone(model):
    """`model` with NEFTune as one process adds it to a sequence that it runs alone."""

    def add(_module, _args, output):
        num_tokens, num_features = output.shape[-2:]
        seeds_T = token_seeds(SEED, 0, AloneDropout.sequence, 0, num_tokens)
        noise = uniform_noise(seeds_T, layer_number("neftune"), num_features)
        return output + noise * (ALPHA / math.sqrt(num_tokens * num_features))

    model.get_input_embeddings().register_forward_hook(add)
    return model


def neftune_parity(family, strategies):
    examples = random_examples(LENGTHS, VOCAB_SIZE)
    model = tiny(family)
    with torch.no_grad():
        alone = [summed_loss(model, example) for example in examples]
    wanted = reference_gradients(with_noise_alone(copy.deepcopy(model)), examples)
    engine = start_hydra(model, hydra={"neftune_noise_alpha": ALPHA})
    errors = errors_of(engine, examples, strategies, wanted)
    without = float(torch.stack(alone).sum()) / sum(
        int((e["labels"][1:] != -100).sum()) for e in examples
    )
    assert abs(wanted[0] / without - 1) > 1e-4, "noise changes the loss"
    evaluated = float(engine.eval_batch(examples, strategy="2x<2,1>"))
    assert evaluated == pytest.approx(without, rel=1e-5), "evaluation knows none"
    return errors


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("family", "strategies"),
    [
        ("qwen3", STRATEGIES[1:4]),
        pytest.param("gemma3", (*STRATEGIES[:6], "2x<1,2;ckpt=2>"), marks=pytest.mark.nightly),
    ],
)
def test_neftune_equals_one_process_under_every_strategy(family, strategies):
    assert_parity(run_distributed(neftune_parity, 4, family, strategies)[0])


def pairs_and_steps():
    """Losses of a loss of pairs, and of steps, under two strategies each."""
    examples = [
        {**e, "pair": n // 2, "chosen": n % 2, "reference_log_prob": -20.0}
        for n, e in enumerate(random_examples(LENGTHS, VOCAB_SIZE))
    ]
    loss = load("post_training/own_losses.py").DPO()
    found = {}
    for strategy in ("2x<1,1>", "1x<2,1>"):
        model = adapted("llama", lora_dropout=RATE)
        engine = start_hydra(model)
        steps = [
            float(engine.train_batch(examples, strategy=strategy, loss=loss)) for _ in range(3)
        ]
        found[strategy] = steps
        engine.destroy()
    return found


@pytest.mark.distributed
def test_a_loss_of_pairs_sees_the_same_masks_twice_and_others_each_iteration():
    found = run_distributed(pairs_and_steps, 2)[0]
    first, second = found.values()
    np.testing.assert_allclose(first, second, rtol=1e-4)
    assert len({round(loss, 3) for loss in first}) == 3


def scores_and_what_training_sees():
    """[sequence] sums of log-probabilities: scored with and without noise, and trained."""
    examples = random_examples(LENGTHS, VOCAB_SIZE)
    engine = start_hydra(adapted("llama", lora_dropout=RATE))
    with_noise = engine.score(examples, strategy="1x<2,1>", noise=True).log_probs
    without = engine.score(examples).log_probs
    engine.train_batch(
        examples,
        strategy="2x<1,1>",
        loss=losses.CrossEntropy(label_smoothing=0.1),
        keep_scores=True,
    )
    trained = engine.last_scores.log_probs
    engine.destroy()
    counted = [e["labels"] != -100 for e in examples]
    return [
        [float(values[counts][1:].sum()) for values, counts in zip(scores, counted, strict=True)]
        for scores in (with_noise, without, trained)
    ]


@pytest.mark.distributed
def test_scores_with_noise_are_what_the_next_iteration_sees():
    with_noise, without, trained = run_distributed(scores_and_what_training_sees, 2)[0]
    np.testing.assert_allclose(with_noise, trained, rtol=1e-5)
    assert max(abs(np.array(without) / trained - 1)) > 1e-3


def test_only_adapters_drop():
    from ds_hydra.engine.model.stage_model import StageModel

    model = adapted("llama", lora_dropout=RATE)
    stage_model = StageModel(model)
    assert stage_model.has_noise
    assert not any(isinstance(m, TokenDropout) for m in model.modules()), "the copy alone"
    assert not StageModel(adapted("llama")).has_noise
