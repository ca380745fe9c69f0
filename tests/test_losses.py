"""Given losses and scores: gradients of one process that runs each sequence alone."""

from __future__ import annotations

import copy
import json
import math
import re

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from distributed import run_distributed
from engines import loss_and_gradients, small_profile, start_hydra
from models import VOCAB_SIZE, tiny
from single_process import random_examples
from test_engine_parity import RELATIVE_TOLERANCE, relative_errors
from test_examples import load

from ds_hydra import losses
from ds_hydra.engine.iteration import linearised
from ds_hydra.engine.losses.loss import WEIGHT
from ds_hydra.engine.losses.objective import Objective
from ds_hydra.errors import (
    HydraConfigError,
    HydraDataError,
    InfeasiblePlanError,
    PlanMismatchError,
)

of_example = load("post_training/own_losses.py")
LENGTHS = (9, 17, 30, 1, 5, 40, 3, 24)
STRATEGIES = ("4x<1,1>", "1x<4,1>", "1x<2,1> + 1x<1,2>", "1x<sp2,2,1>", "1x<cp2,2,1>", "2x<cp2,1>",
              "4x<1,1;gather>")  # fmt: skip
FEW_TOKENS = ("2x<cp2,1>", (2, 1)), ("1x<cp4,1>", (1, 2)), ("1x<cp2,2,1>", (2, 1))
"""Micro-batches with fewer tokens than rows, or with a row of padding alone."""
K = 3


def examples_with_fields(lengths=LENGTHS):
    """Examples with a column for every loss; half of them are the better ones of pairs."""
    return with_fields(random_examples(lengths, VOCAB_SIZE, seed=1), VOCAB_SIZE, seed=2)


def with_fields(examples, num_logits, *, seed):
    """`examples` with those columns; a head of `num_logits` rows."""
    generator = torch.Generator().manual_seed(seed)
    for number, example in enumerate(examples):
        length = len(example["input_ids"])

        def draw(*shape):
            return torch.rand(shape, generator=generator)

        ids = torch.stack(
            [torch.randperm(num_logits, generator=generator)[:K] for _ in range(length)]
        )
        example |= {
            "importance": draw(length) * 2,
            "advantages": float(draw() * 4 - 2),
            "old_log_probs": -draw(length) - 4.5,
            "reference_log_probs": -draw(length) - 4.5,
            "teacher_ids": ids,
            "teacher_log_probs": (draw(length, K) + 0.1).log() - 1.5,
            "pair": number // 2,
            "chosen": number % 2,
            "reference_log_prob": float(-5 * length + draw() * 4),
        }  # fmt: skip
    return examples


class OfTheUser(losses.Loss):
    """What a user would write: a margin below which log-probabilities do not count."""

    token_fields = ("importance",)
    needs_entropy = True

    def __call__(self, tokens):
        below_T = tokens.fields["importance"] * F.relu(-4.0 - tokens.log_probs_T)
        return (below_T - 0.01 * tokens.scores.entropy_T).sum()


class OfSequences(losses.Loss):
    """A mean over sequences, each of which is a mean over its tokens."""

    sequence_fields = ("advantages",)

    def __call__(self, tokens):
        each_T = -tokens.fields["advantages"] * tokens.log_probs_T / tokens.num_counted_T
        return torch.where(tokens.counts_T, each_T, 0.0).sum()

    def normaliser(self, counts, fields):
        return float(sum(bool(count.any()) for count in counts))


CASES = {
    "cross entropy": losses.CrossEntropy(label_smoothing=0.1, z_loss=0.01, weights="importance"),
    "plain": losses.CrossEntropy(),
    "grpo": of_example.GRPO(kl=0.04),
    "of sequences": OfSequences(),
    "distillation": of_example.Distillation(labels=0.3),
    "dpo": of_example.DPO(beta=0.2),
    "of the user": OfTheUser(),
}


def wanted_of(name, model, examples):
    """The loss in plain torch."""
    terms, sums, counts = [], [], []
    for example in examples:
        logits = model(input_ids=example["input_ids"][None], use_cache=False).logits[0, :-1]
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        keep = example["labels"][1:] != -100
        f = {
            k: torch.as_tensor(v)[1:][keep] if torch.as_tensor(v).dim() else v
            for k, v in example.items()
        }
        log_p = logits.log_softmax(-1)[keep]
        lp = log_p.gather(-1, f["labels"][:, None])[:, 0]
        sums.append(lp.sum())
        counts.append(int(keep.sum()))
        entropy = -(log_p.exp() * log_p).sum(-1)
        ce = -lp
        if name == "cross entropy":
            each = 0.9 * ce - 0.1 * log_p.mean(-1) + 0.01 * logits[keep].logsumexp(-1) ** 2
            terms.append(each * f["importance"])
        elif name == "plain":
            terms.append(ce)
        elif name == "grpo":
            ratio, a = (lp - f["old_log_probs"]).exp(), f["advantages"]
            gain = torch.minimum(ratio * a, ratio.clamp(0.8, 1.2) * a)
            r = f["reference_log_probs"] - lp
            terms.append(-gain + 0.04 * (r.exp() - r - 1))
        elif name == "of sequences":
            terms.append(ce * f["advantages"] / max(counts[-1], 1))
        elif name == "distillation":
            student = log_p.gather(-1, f["teacher_ids"])
            teacher = f["teacher_log_probs"]
            terms.append(0.7 * (teacher.exp() * (teacher - student)).sum(-1) + 0.3 * ce)
        elif name == "of the user":
            terms.append(f["importance"] * F.relu(-4.0 - lp) - 0.01 * entropy)
    if not terms:
        reference = torch.tensor([example["reference_log_prob"] for example in examples])
        rewards = torch.stack(sums) - reference
        return -F.logsigmoid(0.2 * (rewards[1::2] - rewards[::2])).mean()
    total = torch.cat(terms).sum()
    if name == "cross entropy":
        return total / sum(
            float(e["importance"][1:][e["labels"][1:] != -100].sum()) for e in examples
        )
    return total / (sum(c > 0 for c in counts) if name == "of sequences" else sum(counts))


def checks():
    model = tiny("llama", num_hidden_layers=2)
    reference = copy.deepcopy(model)
    names = [name for name, _ in model.named_parameters()]
    examples = all_examples = examples_with_fields()
    engine = start_hydra(model)
    errors = {}

    def compare(name, examples, strategies):
        reference.zero_grad()
        wanted = wanted_of(name, reference, examples)
        wanted.backward()
        gradients = [p.grad for p in reference.parameters()]
        for strategy in strategies:
            iteration = engine.hydra.source.plan(examples, strategy, 0, loss=CASES[name])
            iteration = linearised(iteration, engine.hydra.propagator)
            found, got = loss_and_gradients(
                engine, iteration.plan, iteration.load, iteration.objective
            )
            if examples is not all_examples:  # nearly all of what attends to two tokens is rounding
                got, gradients = ([torch.cat([*map(torch.flatten, g)])] for g in (got, gradients))
            worst = max(relative_errors(got, gradients, names[: len(got)]).values())
            errors[name, strategy, len(examples)] = worst, abs(found / float(wanted) - 1)

    for name in CASES:
        is_everywhere = name in ("cross entropy", "grpo", "distillation", "dpo")
        compare(name, examples, STRATEGIES if is_everywhere else STRATEGIES[2:3])
        for strategy, lengths in FEW_TOKENS if is_everywhere else ():
            compare(name, examples_with_fields(lengths), [strategy])
    return {
        "errors": errors,
        "evaluated": [
            float(engine.eval_batch(examples, "1x<2,2>", loss=CASES["dpo"])),
            float(engine.eval_batch(examples, "4x<1,1>", loss=CASES["dpo"])),
        ],
        "scores": scores(engine, reference, examples),
        "steps": [
            float(engine.train_batch(examples, strategy=s, loss=CASES["dpo"])) for s in STRATEGIES
        ],
        "mistakes": mistakes(engine, examples),
        "later": later_mistakes(engine, examples),
        "differing": differing(engine, examples),
    }


def scores(engine, reference, examples):
    """Largest error of log-probabilities, entropies and mean logits."""
    errors = []
    for strategy, lengths in FEW_TOKENS:
        one_each = [{"input_ids": [5]} for _ in lengths]
        assert [s.tolist() for s in engine.score(one_each, strategy).log_probs] == [[0.0]] * 2
    for strategy in STRATEGIES:
        found = engine.score(examples, strategy, entropy=True, details=True)
        for example, log_probs, entropy, is_top1, mean in zip(examples, *found, strict=True):
            ids = example["input_ids"]
            logits, log_p, wanted = reference_log_probs(reference, ids)
            assert log_probs[0] == entropy[0] == 0
            assert len(log_probs) == len(ids)
            errors.append((log_probs[1:] - wanted).abs().max().item() if len(ids) > 1 else 0.0)
            of_entropy = -(log_p.exp() * log_p).sum(-1)
            errors.append((entropy[1:] - of_entropy).abs().max().item() if len(ids) > 1 else 0.0)
            errors.append((mean[1:] - logits.mean(-1)).abs().max().item() if len(ids) > 1 else 0.0)
            assert is_top1[1:].bool().tolist() == (logits.argmax(-1) == ids[1:]).tolist()
            assert is_top1[0] == mean[0] == 0
    return max(errors)


def train_each(engine, cases, strategy, errors):
    """The loss of each of `cases` (batch, loss), or what was raised, after which no step counts."""
    found = {}
    for name, (batch, loss) in cases.items():
        before = engine.global_steps
        try:
            found[name] = float(engine.train_batch(batch, strategy=strategy, loss=loss))
        except errors as error:
            found[name] = f"{type(error).__name__}: {error}"
            assert engine.global_steps == before
    return found


class Wrong(losses.Loss):
    """Returns what `make` makes of the tokens."""

    token_fields = ("importance",)

    def __init__(self, make):
        self.make = make

    def __call__(self, tokens):
        return self.make(tokens)


def mistakes(engine, examples):
    """What each rank raises for typical mistakes; training goes on afterwards."""
    without = [
        {k: v for k, v in e.items() if k != "importance"} if n == 4 else e
        for n, e in enumerate(examples)
    ]
    short = [
        e | {"importance": e["importance"][:-1]} if n == 2 else e for n, e in enumerate(examples)
    ]
    no_number = [
        e | {"importance": ["a"] * len(e["input_ids"])} if n == 5 else e
        for n, e in enumerate(examples)
    ]
    nan = [
        e | {"importance": e["importance"] * float("nan")} if n == 5 else e
        for n, e in enumerate(examples)
    ]
    weighted = losses.CrossEntropy(weights="importance")
    wrong_shape = Wrong(lambda tokens: tokens.log_probs_T)
    of_nan = Wrong(
        lambda tokens: (tokens.log_probs_T + tokens.fields["importance"] - 1e9).sqrt().sum()
    )
    cases = {
        "lacks": (without, weighted), "short": (short, weighted), "text": (no_number, weighted),
        "shape": (examples, wrong_shape), "nan": (examples, of_nan),
        "nan field": (nan, weighted),
        "raises": (examples, Wrong(lambda tokens: tokens.fields["missing"])),
        "no loss": (examples, "dpo"),
        "no weight": ([e | {"importance": e["importance"] * 0} for e in examples], weighted),
    }  # fmt: skip
    raised = train_each(engine, cases, "2x<2,1>", (HydraConfigError, HydraDataError))
    zero = [e | {"advantages": 0.0} for e in examples]
    raised["all 0"] = float(engine.train_batch(zero, strategy="4x<1,1>", loss=of_example.GRPO()))
    return raised


def later_mistakes(engine, examples):
    """What each rank raises where a loss goes wrong on one rank in the middle of an iteration."""
    marked = [e | {"importance": e["importance"] * 0 + (n == 5)} for n, e in enumerate(examples)]

    def at_example_5(otherwise):
        def make(tokens):
            if (tokens.fields["importance"] * tokens.counts_T).sum() > 0:
                return otherwise(tokens)
            return tokens.log_probs_T.sum()

        return make

    cases = {
        "detached": lambda tokens: tokens.log_probs_T.detach().sum(),
        "raises": lambda tokens: [][0],
        "shape": lambda tokens: tokens.log_probs_T,
        "constant": lambda tokens: torch.zeros(()),
    }
    cases = {name: (marked, Wrong(at_example_5(make))) for name, make in cases.items()}
    return train_each(engine, cases, "2x<1,2>", HydraConfigError)


class OfRank(losses.SequenceLoss):
    """What nobody sees differs between ranks."""

    def of_sequences(self, sums_N, counts_N, fields):
        return sums_N.sum() * (1 + dist.get_rank())


class Scaled(losses.Loss):
    def __init__(self, by, own, divided_by=1.0):
        self.by, self._own, self._divided_by = by, own, divided_by

    def __call__(self, tokens):
        return (tokens.log_probs_T * float(torch.as_tensor(self.by).sum())).sum()

    def normaliser(self, counts, fields):
        return self._divided_by


def differing(engine, examples):
    """What each rank raises where ranks do not have the same objective."""
    rank = dist.get_rank()
    is_last = int(rank == 3)
    own = [e | {"advantages": e["advantages"] + is_last * (n == 2)} for n, e in enumerate(examples)]
    at_token = [e | {"old_log_probs": e["old_log_probs"] - is_last} for e in examples]
    cases = {
        "advantages": (own, of_example.GRPO()),
        "old_log_probs": (at_token, of_example.GRPO()),
        "unread": (at_token, losses.CrossEntropy(z_loss=0.1)),
        "beta": (examples, of_example.DPO(beta=0.1 + 0.1 * is_last)),
        "class": (examples, of_example.DPO() if rank else of_example.GRPO()),
        "without": (examples, of_example.GRPO() if rank else None),
        "array": (examples, Scaled(torch.tensor([1.0, is_last]), 0)),
        "class attribute": (examples, type("Odd", (Scaled,), {"odd": rank})(1.0, 0)),
        "normaliser": (examples, Scaled(1.0, 0, divided_by=2.0 + is_last)),
        "rounded": (examples, Scaled(1.0, 0, divided_by=2.0 + rank * 2**-51)),
        "of its own": (examples, Scaled(1.0, own=rank)),
        "of sequences": (examples, OfRank()),
    }
    return train_each(engine, cases, "2x<2,1>", PlanMismatchError)


@pytest.fixture(scope="module")
def results():
    return run_distributed(checks, 4, timeout_s=600)


@pytest.mark.distributed
def test_gradients_of_every_loss_equal_one_process(results):
    for case, (error, loss_error) in results[0]["errors"].items():
        assert error <= RELATIVE_TOLERANCE, case
        assert loss_error <= RELATIVE_TOLERANCE, case


@pytest.mark.distributed
def test_evaluation_scores_and_steps(results):
    for result in results:
        assert result["evaluated"][0] == pytest.approx(result["evaluated"][1], rel=1e-5)
        assert result["scores"] < 1e-4
        assert result["steps"] == sorted(result["steps"], reverse=True)
        assert result["steps"][0] > result["steps"][-1] > 0


def longer_than_training_holds(profile):
    """What training says of a sequence above its MaxLen; errors of its scores and loss; the longest
    micro-batch of the plan of the scores.
    """
    model = tiny("llama")
    examples = random_examples((120, 30, 9, 60), VOCAB_SIZE, seed=3)
    reference = copy.deepcopy(model)
    engine = start_hydra(model, hydra={"profile": profile, "strategies": ["2x<1,1>", "1x<2,1>"]})
    with pytest.raises(InfeasiblePlanError) as refused:
        engine.train_batch(examples)
    wanted = [-reference_log_probs(reference, e["input_ids"])[2] for e in examples]
    errors = [
        float((-found[1:] - own).abs().max())
        for found, own in zip(engine.score(examples).log_probs, wanted, strict=True)
    ]
    counted = [own[e["labels"][1:] != -100] for own, e in zip(wanted, examples, strict=True)]
    mean = float(torch.cat(counted).mean())
    plan = engine.hydra.source.plan(examples, None, 0, forward_only=True).plan
    longest = max(sum(plan.lengths[p] for p in m) for x in plan.pipelines for m in x.micro_batches)
    return {
        "refused": str(refused.value),
        "scores": max(errors),
        "loss": abs(float(engine.eval_batch(examples)) / mean - 1),
        "longest": longest,
        "strategy": str(plan.strategy),
        "trained": float(engine.train_batch(examples[1:3])),
    }


def reference_log_probs(model, ids):
    """Logits [l - 1, V], their logarithms, and those of the tokens of one sequence that runs alone
    [l - 1].
    """
    with torch.no_grad():
        logits = model(input_ids=ids[None], use_cache=False).logits[0, :-1]
    log_p = logits.float().log_softmax(-1)
    return logits, log_p, log_p.gather(-1, ids[1:, None])[:, 0]


@pytest.mark.distributed
def test_what_training_does_not_hold_is_scored_and_evaluated(tmp_path):
    path = tmp_path / "profile.json"
    path.write_text(json.dumps(small_profile(400_000, num_layers=4)))
    for found in run_distributed(longer_than_training_holds, 2, str(path)):
        assert (
            "has 120 tokens, the largest MaxLen over all candidate strategies is 52"
            in (found["refused"])
        )
        assert found["scores"] < 1e-4
        assert found["loss"] < 1e-5
        assert found["strategy"] == "1x<2,1>"  # <1,1> holds 75
        assert 120 <= found["longest"] <= 149
        assert 0 < found["trained"] < 10


@pytest.mark.distributed
def test_mistakes_are_named_on_every_rank(results):
    for result in results:
        found = result["mistakes"]
        assert (
            "CrossEntropy reads 'importance', which example 4 of the global batch lacks"
            in found["lacks"]
        )
        assert "example 2" in found["short"]
        assert "expected 30 values" in found["short"]
        assert "example 5 of the global batch has as what cannot be read" in found["text"]
        assert "loss Wrong returned [9], expected one number" in found["shape"]
        assert "HydraDataError" in found["nan"]
        assert "loss Wrong is not finite in the micro-batch of examples" in found["nan"]
        assert (
            "CrossEntropy reads 'importance', which example 5 of the global batch has with NaN at 0"
            in found["nan field"]
        )
        assert "loss Wrong raised KeyError for example 0" in found["raises"]
        assert "loss is 'dpo', expected an object of a subclass of" in found["no loss"]
        assert "loss CrossEntropy is divided by 0.0" in found["no weight"]
        assert found["all 0"] == 0.0


@pytest.mark.distributed
def test_mistakes_of_one_rank_in_the_middle_are_named_on_every_rank(results):
    for result in results:
        found = result["later"]
        where = r"the micro-batch of examples (\d, )*5(, \d)*"
        assert re.search(
            rf"Wrong returned a number that does not .* \(in {where}\)", found["detached"]
        )
        assert re.search(rf"loss Wrong raised IndexError for {where}: list index", found["raises"])
        assert re.search(rf"loss Wrong returned \[\d+\], .* \(in {where}\)", found["shape"])
        assert math.isfinite(found["constant"])


@pytest.mark.distributed
def test_objectives_that_differ_between_ranks_are_named_on_every_rank(results):
    for result in results:
        found = result["differing"]
        assert "'advantages' of example 2 of the global batch is " in found["advantages"]
        assert " on rank 0 and " in found["advantages"]
        assert " on rank 3 (1 of 4 ranks differ)" in found["advantages"]
        assert (
            "'old_log_probs' of example 0 of the global batch is [9] values"
            in found["old_log_probs"]
        )
        assert "beta of loss DPO is 0.1 on rank 0 and 0.2 on rank 3" in found["beta"]
        assert "the loss is GRPO on rank 0 and DPO on rank 1 (3 of 4" in found["class"]
        assert "the loss is the mean cross entropy on rank 0 and GRPO on" in found["without"]
        assert "by of loss Scaled is [2] values" in found["array"]
        assert "odd of loss Odd is 0 on rank 0 and 1 on rank 1" in found["class attribute"]
        assert "what loss Scaled is divided by is 2.0 on rank 0 and 3.0" in found["normaliser"]
        assert "loss OfRank of the global batch is " in found["of sequences"]
        assert all(math.isfinite(found[name]) for name in ("unread", "rounded", "of its own"))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: losses.CrossEntropy(label_smoothing=1.0), "label_smoothing is 1.0"),
        (lambda: losses.CrossEntropy(z_loss=-1.0), "z_loss is -1.0"),
    ],
)
def test_settings_out_of_range(make, message):
    with pytest.raises(HydraConfigError, match=message):
        make()


def test_a_sequence_without_labelled_tokens_makes_no_nan():
    rows = [{"pair": 0, "chosen": c, "reference_log_prob": 0.0} for c in (0, 1)]
    rows += [{"pair": 1, "chosen": c, "reference_log_prob": 0.0} for c in (0, 1)]
    labels = [torch.tensor([1, 2, 3]), torch.full((3,), -100), *[torch.tensor([1, 2])] * 2]
    objective = Objective.read(of_example.DPO(), rows, labels)
    log_probs = [(l != -100) * torch.tensor([0.0, -1.0, -2.0])[: len(l)] for l in labels]
    weighted = objective.weighted(log_probs, labels)
    assert math.isfinite(weighted.value)
    assert all(bool(f[WEIGHT].isfinite()) for f in weighted.fields)


class Detached(losses.Loss):
    def __call__(self, tokens):
        return tokens.log_probs_T.detach().sum()


class DetachedSums(losses.SequenceLoss):
    def of_sequences(self, sums_N, counts_N, fields):
        return sums_N.detach().sum()


def test_a_loss_that_would_train_nothing_is_refused():
    rows, labels = [{}], [torch.tensor([1, 2, 3])]
    with pytest.raises(HydraConfigError, match=r"loss Detached .* nothing would be trained"):
        Objective.read(Detached(), rows, labels)
    objective = Objective.read(DetachedSums(), rows, labels)
    with pytest.raises(HydraConfigError, match=r"loss DetachedSums .* nothing would be trained"):
        objective.weighted([torch.zeros(3)], labels)
    with pytest.raises(
        HydraConfigError, match=r"Detached'>, expected an object .*\.CrossEntropy\(\)"
    ):
        Objective.read(Detached, rows, labels)


class Candidates(losses.Loss):
    token_fields, candidates = ("ids",), "ids"

    def __call__(self, tokens):
        return tokens.scores.candidate_log_probs_TK.sum()


def loss_with(**attributes):
    return type("Mine", (Candidates,), attributes)()


@pytest.mark.parametrize(
    ("loss", "ids", "message"),
    [
        (loss_with(normaliser=lambda *_: None), [[1], [2]], r"Mine raised TypeError for the norm.* of 2"),
        (loss_with(normaliser=lambda *_: {}["w"]), [[1], [2]], "Mine raised KeyError for the normaliser"),
        (loss_with(normaliser=lambda *_: "2"), [[1], [2]], None),
        (loss_with(token_fields="ids"), [[1], [2]], r"Mine has token_fields 'ids', expected a tuple"),
        (loss_with(candidates="x"), [[1], [2]], "Mine has candidates 'x', expected one of .* 'ids'"),
        (Candidates(), [[7], [251]], "candidates 'ids', which example 1 .* with 251 .* below 251"),
        (Candidates(), [[7], [-1]], "candidates 'ids', which example 1 of the global batch has with -1"),
        (Candidates(), [[7], [2.5]], "example 1 of the global batch has as torch.float32, expected int"),
        (Candidates(), [[7, 8], [2]], r"'ids', which has \[1\] for each .* example 1 and \[2\] for"),
        (Candidates(), [7, 8], r"which example 0 of .* has in shape \[3\], expected \[3, k\]"),
    ],
)  # fmt: skip
def test_mistakes_of_a_loss_name_it_and_the_example(loss, ids, message):
    rows = [{"ids": [i] * 3} for i in ids]
    labels = [torch.tensor([1, 2, 3])] * 2
    if message is None:
        assert Objective.read(loss, rows, labels, VOCAB_SIZE).normaliser == 2
        return
    with pytest.raises(HydraConfigError, match=message):
        Objective.read(loss, rows, labels, VOCAB_SIZE)


def test_candidates_are_asked_for_where_tokens_count():
    rows, labels = [{"ids": [[-100], [-1], [3]]}], [torch.tensor([1, -100, 3])]
    assert Objective.read(Candidates(), rows, labels, VOCAB_SIZE).normaliser == 1


def test_masked_values_of_fields_are_refused():
    held = np.ma.array([1.0, 2.0, 3.0], mask=[0, 1, 0])
    labels = [torch.tensor([1, 2, 3])]
    weighted = losses.CrossEntropy(weights="w")
    with pytest.raises(HydraConfigError, match=r"'w' of example 0 .* masked array with 1 values"):
        Objective.read(weighted, [{"w": held}], labels)
    assert Objective.read(weighted, [{"w": held.filled(0.5)}], labels).normaliser == 3.5
    assert Objective.read(weighted, [{"w": held[[0, 2, 2]]}], labels).normaliser == 6


class RaisingSums(losses.SequenceLoss):
    sequence_fields = ("reward",)

    def of_sequences(self, sums_N, counts_N, fields):
        return fields[0]["missing"]


class ManySums(losses.SequenceLoss):
    def of_sequences(self, sums_N, counts_N, fields):
        return sums_N


def test_mistakes_of_a_loss_of_sequences_name_it():
    labels = [torch.tensor([1, 2, 3])]
    for loss, message in (
        (RaisingSums(), "loss RaisingSums raised KeyError for the global batch of 1 examples"),
        (ManySums(), r"loss ManySums returned \[1\], expected one number: the sum over sequences"),
    ):
        objective = Objective.read(loss, [{"reward": 1.0}], labels)
        with pytest.raises(HydraConfigError, match=message):
            objective.weighted([torch.zeros(3)], labels)


def test_sequences_without_labelled_tokens_do_not_count_in_a_mean_of_sequences():
    rows = [{"advantages": 1.0}, {"advantages": 2.0}]
    labels = [torch.tensor([1, 2, 3]), torch.full((3,), -100)]
    assert Objective.read(OfSequences(), rows, labels).normaliser == 1
    with pytest.raises(
        HydraConfigError, match=r"OfSequences is divided by 0.* some token .* must count"
    ):
        Objective.read(OfSequences(), rows[1:], labels[1:])
