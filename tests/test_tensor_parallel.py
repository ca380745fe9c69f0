"""Sums over TP groups are made in place, and change nothing that anybody else reads; linear layers
that are more than a product are not cut.
"""

from __future__ import annotations

from contextlib import contextmanager
from types import MethodType
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from models import tiny
from operators import Watching
from torch import nn

from ds_hydra.engine.model.scheme_support import check_scheme
from ds_hydra.engine.model.stage_model import StageModel
from ds_hydra.engine.parallel import tensor_parallel
from ds_hydra.engine.parallel.tensor_parallel import TensorParallel, hook_rowwise
from ds_hydra.errors import UnsupportedModelError
from ds_hydra.strategy import Scheme

SIZE = 8


@contextmanager
def watching_copies():
    """Copies of tensors that are made."""
    copies = []

    def note(function, _):
        if function._opname in ("clone", "copy_"):
            copies.append(function._opname)

    with Watching(note):
        yield copies


@pytest.fixture
def tp(monkeypatch):
    """TP 2 of two ranks that have the same."""

    def all_reduce(x, group, async_op):
        x.mul_(2)
        return mock.Mock()

    monkeypatch.setattr(tensor_parallel.dist, "all_reduce", all_reduce)
    tp = TensorParallel()
    tp.enter(None, 2, 0)
    return tp


def hidden():
    torch.manual_seed(0)
    return torch.randn(1, 5, SIZE, requires_grad=True)


def weights(number):
    return [torch.randn(SIZE, SIZE) for _ in range(number)]


def grad_of(make, x):
    """Gradient of x in make(x), and how many tensors were copied for it."""
    out = make(x * 1)
    with watching_copies() as copies:
        (grad,) = torch.autograd.grad(out.sum(), x)
    return grad, len(copies)


ALONE = {
    "one layer": lambda copy, h, a, b: copy(h) @ a,
    "two layers": lambda copy, h, a, b: copy(h) @ a + copy(h) @ b,
    "one of its sequences": lambda copy, h, a, b: copy(h)[0] @ a,
}
SHARED = {
    "a sum": lambda copy, h, a, b: (copy(h) + h) @ a,
    "a sum the other way round": lambda copy, h, a, b: (h + copy(h)) @ a,
    "a sum of views": lambda copy, h, a, b: (copy(h).view(5, SIZE) + h.view(5, SIZE)) @ a,
    "parts of one": lambda copy, h, a, b: torch.cat([h, copy(h)]) @ a,
    "parts of the last dimension": lambda copy, h, a, b: torch.cat([h, copy(h)], -1) @ a.repeat(2, 1),
}  # fmt: skip


@pytest.mark.parametrize("name", [*ALONE, *SHARED])
def test_gradients_are_summed_where_nobody_else_has_them(tp, name):
    make, x, (a, b) = {**ALONE, **SHARED}[name], hidden(), weights(2)
    found, num_copies = grad_of(lambda h: make(tp.copy_to_group, h, a, b), x)
    plain, _ = grad_of(lambda h: make(lambda h: h, h, a, b), x)
    alone, _ = grad_of(lambda h: make(lambda h: h, h.detach(), a, b) + 0 * h.sum(), x)
    others, _ = grad_of(lambda h: make(lambda h: h.detach(), h, a, b) + 0 * h.sum(), x)
    assert alone.abs().sum() == 0
    torch.testing.assert_close(found, 2 * (plain - others) + others)
    assert num_copies == (name in SHARED)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("trains", [True, False])
def test_outputs_of_layers_are_summed_in_place(tp, bias, trains):
    layer, x = nn.Linear(SIZE, SIZE, bias=bias), hidden()
    wanted = 2 * layer(x)
    (wanted_grad,) = torch.autograd.grad((wanted * 3).sum(), x)
    hook_rowwise(layer, tp)
    with torch.set_grad_enabled(trains), watching_copies() as copies:
        out = layer(x)
        assert not copies
        torch.testing.assert_close(out, wanted)
        out *= 3  # as a layer may that has had an output of its own
    if trains:  # the sum hands its gradient on to each rank's part
        (grad,) = torch.autograd.grad(out.sum(), x)
        torch.testing.assert_close(2 * grad, wanted_grad)


def test_outputs_that_backward_reads_are_copied(tp):
    layer, x, (a,) = nn.Softmax(dim=-1), hidden(), weights(1)
    (wanted,) = torch.autograd.grad((layer(x) @ a).sum(), x)
    hook_rowwise(layer, tp)
    torch.testing.assert_close(torch.autograd.grad((layer(x) @ a).sum(), x)[0], wanted)


def test_outputs_that_somebody_keeps_are_an_error(tp):
    layer, x = nn.Linear(SIZE, SIZE), hidden()
    kept = []
    layer.register_forward_hook(lambda _module, _args, output: kept.append(output.square()))
    hook_rowwise(layer, tp)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        (layer(x).sum() + kept[0].sum()).backward()


class Scaled(nn.Linear):
    """As in quantisation-aware training: a scale is taken of all features of a token."""

    def forward(self, x):
        return F.linear(x / x.abs().amax(dim=-1, keepdim=True), self.weight)


def scaled(self, x):
    return F.linear(x / x.abs().amax(dim=-1, keepdim=True), self.weight)


def in_training_for_int4(model):
    qat = pytest.importorskip("torchao.quantization.qat")
    from torchao.quantization import quantize_

    weights = qat.IntxFakeQuantizeConfig(torch.int4, group_size=32)
    quantize_(model.model.layers[0].mlp, qat.QATConfig(weight_config=weights, step="prepare"))


EDITS = {
    "Scaled": lambda m: setattr(m.model.layers[0].mlp.down_proj, "__class__", Scaled),
    "Linear": lambda m: setattr(
        m.model.layers[0].mlp.down_proj, "forward", MethodType(scaled, m.model.layers[0].mlp.down_proj)
    ),
    "FakeQuantizedLinear": in_training_for_int4,
}  # fmt: skip


@pytest.mark.parametrize("kind", EDITS)
def test_linears_with_a_forward_of_their_own_refuse_tp(kind):
    """Each rank would take the scale of its own features: gradients were off by a third."""
    model = tiny("llama", hidden_size=64, intermediate_size=192)
    check_scheme(StageModel(model), Scheme(2, 1))
    EDITS[kind](model)
    stage_model = StageModel(model)
    for scheme in (Scheme(1, 2), Scheme(1, 1, sp=2), Scheme(1, 1, cp=2, gather=True)):
        check_scheme(stage_model, scheme)
    with pytest.raises(
        UnsupportedModelError, match=rf"<2,1>: \w+_proj of LlamaModel is a {kind} of .*use TP 1"
    ):
        check_scheme(stage_model, Scheme(2, 1))
