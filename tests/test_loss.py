"""Head and loss of a packed micro-batch in chunks against torch's own on whole logits, in one
process (parity tests cover the split vocabulary).
"""

from __future__ import annotations

import dataclasses
import functools
import types

import pytest
import torch
import torch.nn.functional as F
import transformers
import triton_interpreter
from models import tiny
from operators import Watching
from torch import nn

from benchmarks import families
from ds_hydra.engine.losses import loss as losses
from ds_hydra.engine.losses.loss import PLAIN, CrossEntropy, HeadLoss, Loss
from ds_hydra.engine.model.packing_probe import build_stage_model
from ds_hydra.engine.model.scheme_support import check_scheme
from ds_hydra.engine.parallel import logits as passes
from ds_hydra.engine.parallel.logit_transform import LogitTransform
from ds_hydra.engine.parallel.logits import IGNORED_LABEL, Vocabulary
from ds_hydra.engine.parallel.tensor_parallel import TensorParallel
from ds_hydra.errors import UnsupportedModelError
from ds_hydra.strategy import Scheme

NUM_TOKENS, HIDDEN, VOCABULARY, NUM_CANDIDATES = 19, 8, 11, 3


@pytest.fixture(
    params=[(1, False), (4 * VOCABULARY, False), (4 * VOCABULARY, True), (10**6, False)],
    ids=["token by token", "by fours", "by fours, triton", "at once"],
)
def _ways(request, monkeypatch):
    """Logits at a time; passes by operators of torch, or by kernels of Triton in its
    interpreter.
    """
    elements, by_triton = request.param
    monkeypatch.setitem(losses._CHUNK_ELEMENTS, "cpu", elements)
    monkeypatch.setitem(passes._ELEMENTS, "cpu", 2 * VOCABULARY)
    if by_triton:
        triton_interpreter.use()
        from ds_hydra.engine.parallel import logit_kernels

        monkeypatch.setattr(logit_kernels, "_BLOCK", 8)  # two blocks a row, the last one partly
        monkeypatch.setattr(passes, "find_kernels", lambda _: logit_kernels)


def make_case(dtype=torch.float32, *, bias=False):
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(1, NUM_TOKENS, HIDDEN, generator=generator).to(dtype).requires_grad_()
    head = nn.Linear(HIDDEN, VOCABULARY, bias=bias)
    with torch.no_grad():
        for param in head.parameters():
            param.copy_(torch.randn(param.shape, generator=generator))
    targets = torch.randint(0, VOCABULARY, (NUM_TOKENS,), generator=generator)
    targets[::5] = IGNORED_LABEL
    return hidden, head.to(dtype), targets


def make_loss(targets, loss=PLAIN, fields=None, scale=1.0, transform=None, chunks=None):
    def evaluate(tokens):
        if chunks is not None:
            chunks.append(len(tokens.counts_T))
        return loss(tokens) * scale

    vocabulary = Vocabulary(
        tp=TensorParallel(), num_columns=VOCABULARY, transform=transform or LogitTransform()
    )
    return HeadLoss(
        vocabulary=vocabulary, targets_T=targets, fields=fields or {}, loss=loss, evaluate=evaluate
    )


def run(loss_of, hidden, head, factor=1.0):
    for leaf in (hidden, *head.parameters()):
        leaf.grad = None
    loss = loss_of(hidden, head)
    (factor * loss).backward()
    return loss.detach(), hidden.grad, *(param.grad for param in head.parameters())


def assert_same(ours, wanted, tolerance=2e-6):
    """Of the norm of each."""
    for mine, expected in zip(ours, wanted, strict=True):
        assert mine.dtype == expected.dtype
        error = float((mine.double() - expected.double()).norm())
        assert error <= tolerance * float(expected.double().norm())


def cross_entropy(hidden, head, targets, make=lambda x: x):
    return F.cross_entropy(make(head(hidden)[0].float()), targets, reduction="sum")


@pytest.mark.usefixtures("_ways")
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("scale", [1.0, 1 / 77])
def test_loss_and_gradients_are_those_of_torch(scale, bias):
    hidden, head, targets = make_case(bias=bias)
    ours = run(make_loss(targets, scale=scale).of_hidden, hidden, head)
    assert_same(ours, run(lambda *x: cross_entropy(*x, targets) * scale, hidden, head))


TRANSFORMS = {
    LogitTransform(cap=2.5): lambda x: torch.tanh(x / 2.5) * 2.5,
    LogitTransform(scale=0.25): lambda x: x * 0.25,
    LogitTransform(scale=2.0, cap=3.0): lambda x: torch.tanh(x * 2 / 3) * 3,
    LogitTransform(scale=2.0, cap=3.0).over(0.7): lambda x: torch.tanh(x * 2 / 3) * 3 / 0.7,
}


@pytest.mark.usefixtures("_ways")
@pytest.mark.parametrize("transform", TRANSFORMS, ids=str)
def test_logits_that_are_capped_or_scaled(transform):
    hidden, head, targets = make_case()
    ours = run(make_loss(targets, transform=transform).of_hidden, hidden, head)
    make = TRANSFORMS[transform]
    assert_same(ours, run(lambda *x: cross_entropy(*x, targets, make), hidden, head))


class AllScores(Loss):
    """Something of each score."""

    needs_entropy = needs_mean_log_prob = True
    candidates = "ids"
    token_fields = ("ids", "factors")

    def __call__(self, tokens):
        scores = tokens.scores
        per_token = (
            scores.log_probs_T * 0.3
            + scores.log_normaliser_T.square() * 0.1
            - scores.entropy_T * tokens.fields["factors"]
            + scores.mean_log_prob_T.exp()
            + scores.candidate_log_probs_TK.sin().sum(-1)
        )
        return torch.where(tokens.counts_T, per_token, 0.0).sum()


@pytest.mark.usefixtures("_ways")
@pytest.mark.parametrize("transform", [LogitTransform(), *TRANSFORMS], ids=str)
def test_scores_of_all_kinds_and_their_gradients(transform):
    hidden, head, targets = make_case()
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(0, VOCABULARY, (NUM_TOKENS, NUM_CANDIDATES), generator=generator)
    ids[3] = 7  # the same one three times
    fields = {"ids": ids, "factors": torch.rand(NUM_TOKENS, generator=generator)}
    make = TRANSFORMS.get(transform, lambda x: x)

    def wanted(hidden, head):
        x = make(head(hidden)[0])
        logs = x.log_softmax(-1)
        counted = targets != IGNORED_LABEL
        of_target = logs.gather(-1, targets.clamp(min=0)[:, None])[:, 0]
        per_token = (
            of_target * 0.3
            + x.logsumexp(-1).square() * 0.1
            + (logs.exp() * logs).sum(-1) * fields["factors"]
            + logs.mean(-1).exp()
            + logs.gather(-1, ids).sin().sum(-1)
        )
        return per_token[counted].sum()

    ours = run(make_loss(targets, AllScores(), fields, transform=transform).of_hidden, hidden, head)
    assert_same(ours, run(wanted, hidden, head))


@pytest.mark.usefixtures("_ways")
def test_sixteen_bit_logits_are_summed_in_fp32():
    hidden, head, targets = make_case(torch.bfloat16)
    ours = run(make_loss(targets).of_hidden, hidden, head)
    wanted = run(lambda *x: cross_entropy(*x, targets), hidden, head)
    assert ours[0].dtype == torch.float32
    torch.testing.assert_close(ours[0], wanted[0])
    assert {x.dtype for x in ours[1:]} == {torch.bfloat16}
    # Each chunk rounds the sum of the weight's gradient
    assert_same(ours[1:], wanted[1:], 1e-2)


def test_a_gradient_from_above_is_applied():
    hidden, head, targets = make_case()
    wanted = run(make_loss(targets, scale=3.0).of_hidden, hidden, head)
    found = run(make_loss(targets).of_hidden, hidden, head, factor=3.0)
    assert_same(found[1:], wanted[1:])


@pytest.mark.parametrize("tokens_at_a_time", [1, 5, 19, 1000])
def test_chunks_are_alike_on_all_ranks_of_a_tp_group(monkeypatch, tokens_at_a_time):
    monkeypatch.setitem(losses._CHUNK_ELEMENTS, "cpu", tokens_at_a_time * 6)
    hidden, head, targets = make_case()
    chunks = []
    make_loss(targets, chunks=chunks).of_hidden(hidden, head)
    tp = TensorParallel()
    tp.size = 2  # ranks have 5 and 6 columns
    loss = make_loss(targets)
    of_group = dataclasses.replace(loss, vocabulary=dataclasses.replace(loss.vocabulary, tp=tp))
    tokens = [rows.stop - rows.start for rows in of_group.chunks(hidden.device)]
    assert sum(tokens) == sum(chunks) == NUM_TOKENS
    assert max(tokens) <= max(1, tokens_at_a_time)
    assert max(tokens) - min(tokens) <= len(tokens)
    assert max(chunks) <= max(1, tokens_at_a_time * 6 // VOCABULARY)


def test_logits_of_a_whole_micro_batch_are_never_there(monkeypatch):
    """Nothing that is made in between has as many elements as a third of them."""
    monkeypatch.setitem(losses._CHUNK_ELEMENTS, "cpu", 4 * VOCABULARY)
    hidden, head, targets = make_case()
    largest = []

    def note(_function, result):
        if isinstance(result, torch.Tensor):
            largest.append(result.numel())

    with Watching(note):
        run(make_loss(targets).of_hidden, hidden, head)
    assert len(largest) > 50
    assert max(largest) <= max(NUM_TOKENS * HIDDEN, NUM_TOKENS * VOCABULARY // 3)


def test_a_model_that_makes_more_of_its_logits_keeps_them():
    hidden, head, targets = make_case()

    def make(x):
        return torch.tanh(x / 5) * 5 + torch.tanh(x)

    ours = run(lambda h, o: make_loss(targets).of_logits(make(o(h)[0])), hidden, head)
    assert_same(ours, run(lambda *x: cross_entropy(*x, targets, make), hidden, head))
    leaf = torch.randn(NUM_TOKENS, VOCABULARY, requires_grad=True)
    before = leaf.detach().clone()
    make_loss(targets).of_logits(leaf).backward()
    torch.testing.assert_close(leaf.detach(), before, rtol=0, atol=0)


def test_no_gradient_is_made_without_grad():
    hidden, head, targets = make_case()
    wanted = cross_entropy(hidden, head, targets)
    before = hidden.detach().clone()
    with torch.no_grad():
        loss = make_loss(targets).of_hidden(hidden, head)
    assert not loss.requires_grad
    torch.testing.assert_close(loss, wanted.detach())
    torch.testing.assert_close(hidden.detach(), before, rtol=0, atol=0)


@pytest.mark.parametrize("frozen", ["hidden", "head"])
def test_what_is_frozen_has_no_gradient(frozen):
    hidden, head, targets = make_case()
    hidden.requires_grad_(frozen != "hidden")
    head.requires_grad_(frozen != "head")
    loss, *grads = run(make_loss(targets).of_hidden, hidden, head)
    wanted_loss, *wanted = run(lambda *x: cross_entropy(*x, targets), hidden, head)
    torch.testing.assert_close(loss, wanted_loss)
    assert [g is None for g in grads] == [g is None for g in wanted]
    assert_same([g for g in grads if g is not None], [g for g in wanted if g is not None])


def test_a_micro_batch_without_labels_has_no_loss_and_no_gradient():
    hidden, head, targets = make_case()
    targets.fill_(IGNORED_LABEL)
    loss, *grads = run(make_loss(targets).of_hidden, hidden, head)
    assert float(loss) == 0.0
    assert not any(grad.any() for grad in grads)


class Changed(transformers.LlamaForCausalLM):
    """Its forward changes logits, or the loss, by what a test sets on it."""

    def __init__(self, config):
        super().__init__(config)
        self.temperature, self.z_loss = 1.0, 0.0
        self.scale = nn.Parameter(torch.ones(1)) if config.learns else None
        self.register_buffer("tempering", torch.tensor(config.tempering), persistent=False)
        self.register_buffer("class_weights", torch.ones(config.vocab_size), persistent=False)

    def forward(self, *args, labels=None, **kwargs):
        output = super().forward(*args, **kwargs)
        logits = output.logits * (16 / self.config.hidden_size) / self.temperature
        if self.scale is not None:
            logits = logits / self.scale if self.config.divides else logits * self.scale
        logits = logits * (1 + self.tempering)
        if self.config.num_tokens < logits.shape[-1]:
            logits[..., self.config.num_tokens :] = -1e4
        output.logits = logits
        if labels is not None:
            output.loss = nn.functional.cross_entropy(
                logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), self.class_weights
            )
            output.loss = output.loss + self.z_loss * logits.logsumexp(-1).square().mean()
        return output


def changed(**settings):
    config = tiny("llama").config
    usual = {"learns": False, "divides": False, "num_tokens": config.vocab_size, "tempering": 0.0}
    vars(config).update(usual | settings)
    return Changed(config)


def cooler():
    model = changed()
    model.temperature = 4.0
    return model


def with_forward(forward, of=""):
    """A model with `forward` of an instance, its own or a module's."""
    model = tiny("llama")
    module = model.get_submodule(of)
    module.forward = types.MethodType(forward, module)
    return model


def as_its_class(self, *args, **kwargs):
    return type(self).forward(self, *args, **kwargs)


def double(self, *args, **kwargs):
    output = as_its_class(self, *args, **kwargs)
    output.logits, output.loss = 2 * output.logits, None
    return output


def clamp(self, *args, **kwargs):
    output = as_its_class(self, *args, **kwargs)
    output.logits, output.loss = output.logits.clamp(-5, 5).bfloat16(), None
    return output


def careful(self, *args, **kwargs):
    assert kwargs["input_ids"].max() < 10
    return as_its_class(self, *args, **kwargs)


class Louder(nn.Linear):
    def forward(self, hidden):
        return 2.0 * super().forward(hidden)


def louder():
    model = tiny("llama")
    model.lm_head.__class__ = Louder
    return model


def cohere(**attributes):
    model = families.build("cohere")
    model.config.logit_scale = 3.0  # which its forward does not read
    vars(model).update(attributes)
    return model


WIDTH = 32
"""Of the tiny models; a small copy has another one."""
ON_MORE = [
    {"learns": True},
    {"learns": True, "divides": True},
    {"num_tokens": 221},
    {"tempering": 0.5},
]


@pytest.mark.parametrize(
    ("make", "transform"),
    [
        (lambda: tiny("llama"), LogitTransform()),
        (lambda: tiny("gemma2", final_logit_softcapping=20.0), LogitTransform(cap=20.0)),
        (lambda: tiny("granite_swa", logits_scaling=8.0), LogitTransform(scale=0.125)),
        (lambda: tiny("prophetnet"), None),
        (lambda: with_forward(as_its_class, "lm_head"), None),
        (lambda: with_forward(double), LogitTransform(scale=2.0)),
        (lambda: with_forward(careful), None),
        (lambda: with_forward(clamp), None),
        (louder, None),
        (changed, LogitTransform(scale=16 / WIDTH)),
        (cooler, LogitTransform(scale=4 / WIDTH)),
        (cohere, LogitTransform(scale=0.0625)),
        (lambda: cohere(logit_scale=0.25), LogitTransform(scale=0.25)),
        *((lambda more=more: changed(**more), None) for more in ON_MORE),
    ],
)
def test_what_a_model_makes_of_its_logits_is_found(make, transform):
    """With the attributes and sizes of the model, by code of an instance or of its class."""
    assert build_stage_model(make()).after_head.transform == transform


def test_logits_that_depend_on_more_than_each_other_need_a_whole_vocabulary():
    for more in ON_MORE:
        stage_model = build_stage_model(changed(**more))
        with pytest.raises(UnsupportedModelError, match=r"depends on more than each.*use TP 1"):
            check_scheme(stage_model, Scheme(2, 1))
    check_scheme(build_stage_model(with_forward(clamp)), Scheme(2, 1))


def test_a_scale_may_change_while_the_model_trains():
    model = cohere()
    stage_model = build_stage_model(model)
    model.logit_scale = 2.0
    stage_model.check_unchanged()
    assert stage_model.after_head.transform == LogitTransform(scale=2.0)


def test_a_loss_that_an_attribute_or_a_buffer_switches_on_is_refused():
    for switch_on in (
        lambda model: setattr(model, "z_loss", 0.1),
        lambda model: model.class_weights[:100].fill_(20.0),
    ):
        model = changed()
        stage_model = build_stage_model(model)
        switch_on(model)
        for found in (functools.partial(build_stage_model, model), stage_model.check_unchanged):
            with pytest.raises(UnsupportedModelError, match=r"returns a loss of .* where the mean"):
                found()
    model = changed()
    stage_model = build_stage_model(model)
    model.tempering.fill_(1.0)
    with pytest.raises(UnsupportedModelError, match=r"more than a scale or a cap.*set it before"):
        stage_model.check_unchanged()


def test_losses_are_found_by_both_ways_to_import_them():
    import ds_hydra
    from ds_hydra.losses import CrossEntropy as by_module

    assert ds_hydra.losses.CrossEntropy is by_module is CrossEntropy


def test_what_a_family_makes_of_labels_is_said_or_refused(caplog):
    with pytest.raises(UnsupportedModelError, match="ngram = 2 streams, smoothed by eps"):
        build_stage_model(tiny("prophetnet", disable_ngram_loss=False, eps=0.1))
    build_stage_model(tiny("llama"))
    assert "labels" not in caplog.text
    build_stage_model(families.build("bart"))
    assert (
        "BartForCausalLM: its forward of transformers.models.bart.modeling_bart does not shift labels"
        in caplog.text
    )
