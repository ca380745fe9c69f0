"""Given losses and scores: gradients of one process that runs each sequence alone."""

from __future__ import annotations

import copy
import functools
import json
import math
import re

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from distributed import run_distributed
from engines import loss_and_gradients, refused, small_profile, start_hydra
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
    HydraError,
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

    def compare(name, examples, strategies):
        reference.zero_grad()
        wanted = wanted_of(name, reference, examples)
        wanted.backward()
        gradients = [p.grad for p in reference.parameters()]
        for strategy in strategies:
            iteration = engine.source.plan(examples, strategy, 0, loss=CASES[name])
            iteration = linearised(iteration, engine.propagator)
            found, got = loss_and_gradients(
                engine, iteration.plan, iteration.load, iteration.objective
            )
            if examples is not all_examples:  # nearly all of what attends to two tokens is rounding
                got, gradients = ([torch.cat([*map(torch.flatten, g)])] for g in (got, gradients))
            worst = max(relative_errors(got, gradients, names[: len(got)]).values())
            assert worst <= RELATIVE_TOLERANCE, (name, strategy, len(examples))
            assert abs(found / float(wanted) - 1) <= RELATIVE_TOLERANCE, (name, strategy)

    for name in CASES:
        is_everywhere = name in ("cross entropy", "distillation", "dpo")
        compare(name, examples, STRATEGIES if is_everywhere else STRATEGIES[2:3])
        for strategy, lengths in FEW_TOKENS if is_everywhere else ():
            compare(name, examples_with_fields(lengths), [strategy])
    evaluated = [
        float(engine.eval_batch(examples, s, of_example.DPO())) for s in ("1x<1,2>", "4x<1,1>")
    ]
    assert evaluated[0] == pytest.approx(evaluated[1], rel=1e-5)
    check_scores(engine, reference, examples)
    steps = [float(engine.train_batch(examples, strategy=s, loss=CASES["dpo"])) for s in STRATEGIES]
    assert steps == sorted(steps, reverse=True)
    assert steps[0] > steps[-1] > 0
    check_refused(engine, examples)


def check_scores(engine, reference, examples):
    """Log-probabilities, entropies and mean logits are those of one process."""
    for strategy, lengths in FEW_TOKENS:
        one_each = [{"input_ids": [5]} for _ in lengths]
        assert [s.tolist() for s in engine.score(one_each, strategy).log_probs] == [[0.0]] * 2
    for strategy in STRATEGIES:
        found = engine.score(examples, strategy, entropy=True, details=True)
        for example, log_probs, entropy, is_top1, mean in zip(examples, *found, strict=True):
            ids = example["input_ids"]
            logits, log_p, wanted = reference_log_probs(reference, ids)
            of_entropy = -(log_p.exp() * log_p).sum(-1)
            of_rest = [tensor[1:] for tensor in (log_probs, entropy, mean)]
            torch.testing.assert_close(
                of_rest, [wanted, of_entropy, logits.mean(-1)], rtol=0, atol=1e-4, check_dtype=False
            )
            assert len(log_probs) == len(ids)
            assert log_probs[0] == entropy[0] == is_top1[0] == mean[0] == 0
            assert is_top1[1:].bool().tolist() == (logits.argmax(-1) == ids[1:]).tolist()


class Wrong(losses.Loss):
    """Returns what `make` makes of the tokens."""

    token_fields = ("importance",)

    def __init__(self, make):
        self.make = make

    def __call__(self, tokens):
        return self.make(tokens)


def at_example_5(otherwise):
    """A loss that goes wrong on one rank in the middle of an iteration."""

    def make(tokens):
        if (tokens.fields["importance"] * tokens.counts_T).sum() > 0:
            return otherwise(tokens)
        return tokens.log_probs_T.sum()

    return Wrong(make)


class OfRank(losses.SequenceLoss):
    """A loss that reads the rank, in what nobody compares."""

    def of_sequences(self, sums_N, counts_N, fields):
        return sums_N.sum() * (1 + dist.get_rank())


class Scaled(losses.Loss):
    def __init__(self, by, own, divided_by=1.0):
        self.by, self._own, self._divided_by = by, own, divided_by

    def __call__(self, tokens):
        return (tokens.log_probs_T * float(torch.as_tensor(self.by).sum())).sum()

    def normaliser(self, counts, fields):
        return self._divided_by


WHERE = r"the micro-batch of examples (\d, )*5(, \d)*"


def refused_cases(examples, rank):
    """(global batch, loss, strategy, what each rank raises) by name, on `rank`; the loss is a
    number where that is "".
    """

    def importance(make, numbers=range(8)):
        return [
            e | {"importance": make(e["importance"])} if n in numbers else e
            for n, e in enumerate(examples)
        ]

    def wrong(make):
        return Wrong(make), "2x<2,1>"

    def later(make):
        return at_example_5(make), "1x<1,2>"

    lacking = [dict(e) for e in examples]
    del lacking[4]["importance"]
    marked = importance(lambda x: x * 0)
    marked[5] = marked[5] | {"importance": marked[5]["importance"] + 1}
    weighted = losses.CrossEntropy(weights="importance"), "2x<2,1>"
    is_last = int(rank == 3)
    own = [e | {"advantages": e["advantages"] + is_last * (n == 2)} for n, e in enumerate(examples)]
    at_token = [e | {"old_log_probs": e["old_log_probs"] - is_last} for e in examples]
    of_nan = wrong(lambda of: (of.log_probs_T + of.fields["importance"] - 1e9).sqrt().sum())

    def alike(loss):
        return examples, loss, "2x<2,1>"

    return {
        "lacks": (lacking, *weighted, "CrossEntropy reads 'importance', which example 4 of the global batch lacks"),
        "short": (importance(lambda x: x[:-1], [2]), *weighted, "example 2.*expected 30 values"),
        "text": (
            importance(lambda x: ["a"] * len(x), [5]), *weighted,
            "example 5 of the global batch has as what cannot be read",
        ),
        "nan field": (
            importance(lambda x: x * math.nan, [5]), *weighted,
            "CrossEntropy reads 'importance', which example 5 of the global batch has with NaN at 0",
        ),
        "no weight": (importance(lambda x: x * 0), *weighted, "loss CrossEntropy is divided by 0.0"),
        "nan": (examples, *of_nan, "loss Wrong is not finite in the micro-batch of examples"),
        "no loss": (*alike("dpo"), "loss is 'dpo', expected an object of a subclass of"),
        # On one rank in the middle of an iteration
        "detached later": (
            marked, *later(lambda of: of.log_probs_T.detach().sum()),
            rf"Wrong returned a number that does not .* \(in {WHERE}\)",
        ),
        "raises later": (
            marked, *later(lambda of: [][0]), rf"loss Wrong raised IndexError for {WHERE}: list index",
        ),
        "shape later": (
            marked, *later(lambda of: of.log_probs_T), rf"loss Wrong returned \[\d+\], .* \(in {WHERE}\)",
        ),
        "constant later": (marked, *later(lambda of: torch.zeros(())), ""),
        # Where ranks do not have the same objective
        "advantages": (
            own, of_example.GRPO(), "2x<2,1>",
            r"'advantages' of example 2 of the global batch is .* on rank 0 and .* on rank 3 \(1 of 4 ranks differ\)",
        ),
        "old_log_probs": (
            at_token, of_example.GRPO(), "2x<2,1>", r"'old_log_probs' of example 0 of the global batch is \[9\] values",
        ),
        "unread": (at_token, losses.CrossEntropy(z_loss=0.1), "2x<2,1>", ""),
        "beta": (
            *alike(of_example.DPO(beta=0.1 + 0.1 * is_last)), "beta of loss DPO is 0.1 on rank 0 and 0.2 on rank 3",
        ),
        "class": (
            *alike(of_example.DPO() if rank else of_example.GRPO()),
            r"the loss is GRPO on rank 0 and DPO on rank 1 \(3 of 4",
        ),
        "without": (
            *alike(of_example.GRPO() if rank else None), "the loss is the mean cross entropy on rank 0 and GRPO on",
        ),
        "array": (*alike(Scaled(torch.tensor([1.0, is_last]), 0)), r"by of loss Scaled is \[2\] values"),
        "class attribute": (
            *alike(type("Odd", (Scaled,), {"odd": rank})(1.0, 0)), "odd of loss Odd is 0 on rank 0 and 1 on rank 1",
        ),
        "normaliser": (
            *alike(Scaled(1.0, 0, divided_by=2.0 + is_last)),
            "what loss Scaled is divided by is 2.0 on rank 0 and 3.0",
        ),
        "rounded": (*alike(Scaled(1.0, 0, divided_by=2.0 + rank * 2**-51)), ""),
        "of its own": (*alike(Scaled(1.0, own=rank)), ""),
        "of sequences": (*alike(OfRank()), "loss OfRank of the global batch is "),
    }  # fmt: skip


OF_ALL_RANKS = ("advantages", "old_log_probs", "beta", "class", "without", "array", "class attribute",
                "normaliser", "of sequences")  # fmt: skip
"""Cases in which ranks differ."""


def check_refused(engine, examples):
    """Each of `refused_cases` is named on this rank, and no step counts; training goes on."""
    for name, (batch, loss, strategy, said) in refused_cases(examples, dist.get_rank()).items():
        before = engine.global_steps
        train = functools.partial(engine.train_batch, batch, strategy=strategy, loss=loss)
        if not said:
            assert math.isfinite(train()), name
            continue
        text = refused(train, PlanMismatchError if name in OF_ALL_RANKS else HydraError)
        assert re.search(said, text), (name, text)
        assert engine.global_steps == before
    zero = [e | {"advantages": 0.0} for e in examples]
    assert float(engine.train_batch(zero, strategy="4x<1,1>", loss=of_example.GRPO())) == 0.0


@pytest.mark.slow
@pytest.mark.distributed
def test_losses_scores_and_mistakes_on_four_ranks():
    run_distributed(checks, 4, timeout_s=600)


def longer_than_training_holds(profile):
    """A sequence above the MaxLen of training is scored and evaluated."""
    model = tiny("llama")
    examples = random_examples((120, 30, 9, 60), VOCAB_SIZE, seed=3)
    reference = copy.deepcopy(model)
    engine = start_hydra(model, hydra={"profile": profile, "strategies": ["2x<1,1>", "1x<2,1>"]})
    said = refused(lambda: engine.train_batch(examples), InfeasiblePlanError)
    assert "has 120 tokens, the largest MaxLen over all candidate strategies is 52" in said
    wanted = [reference_log_probs(reference, e["input_ids"])[2] for e in examples]
    found = [values[1:] for values in engine.score(examples).log_probs]
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-4, check_dtype=False)
    counted = [own[e["labels"][1:] != -100] for own, e in zip(wanted, examples, strict=True)]
    assert float(engine.eval_batch(examples)) == pytest.approx(
        -float(torch.cat(counted).mean()), rel=1e-5
    )
    plan = engine.source.plan(examples, None, 0, forward_only=True).plan
    longest = max(sum(plan.lengths[p] for p in m) for x in plan.pipelines for m in x.micro_batches)
    assert str(plan.strategy) == "1x<2,1>"  # <1,1> holds 75
    assert 120 <= longest <= 149
    assert 0 < float(engine.train_batch(examples[1:3])) < 10


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
    run_distributed(longer_than_training_holds, 2, str(path))


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


class DetachedSums(losses.SequenceLoss):
    def of_sequences(self, sums_N, counts_N, fields):
        return sums_N.detach().sum()


def test_a_loss_that_would_train_nothing_is_refused():
    rows, labels = [{}], [torch.tensor([1, 2, 3])]
    objective = Objective.read(DetachedSums(), rows, labels)
    with pytest.raises(HydraConfigError, match=r"loss DetachedSums .* nothing would be trained"):
        objective.weighted([torch.zeros(3)], labels)
    with pytest.raises(
        HydraConfigError, match=r"DetachedSums'>, expected an object .*\.CrossEntropy\(\)"
    ):
        Objective.read(DetachedSums, rows, labels)


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
