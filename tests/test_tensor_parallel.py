"""Sums over TP groups change nothing that anybody else reads; linear layers that are more than a
product are not cut.
"""

from __future__ import annotations

from types import MethodType
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from models import tiny
from torch import nn

from ds_hydra.engine.model.scheme_support import check_scheme
from ds_hydra.engine.model.stage_model import StageModel
from ds_hydra.engine.parallel import tensor_parallel
from ds_hydra.engine.parallel.tensor_parallel import TensorParallel, hook_rowwise
from ds_hydra.errors import UnsupportedModelError
from ds_hydra.strategy import Scheme

SIZE = 8


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
    (grad,) = torch.autograd.grad(make(x * 1).sum(), x)
    return grad


READ_BY_OTHERS = {
    "one layer": lambda copy, h, a, b: copy(h) @ a,
    "two layers": lambda copy, h, a, b: copy(h) @ a + copy(h) @ b,
    "a sum": lambda copy, h, a, b: (copy(h) + h) @ a,
    "a sum of views": lambda copy, h, a, b: (copy(h).view(5, SIZE) + h.view(5, SIZE)) @ a,
    "parts of one": lambda copy, h, a, b: torch.cat([h, copy(h)]) @ a,
    "parts of the last dimension": lambda copy, h, a, b: torch.cat([h, copy(h)], -1) @ a.repeat(2, 1),
}  # fmt: skip


@pytest.mark.parametrize("name", READ_BY_OTHERS)
def test_gradients_that_others_have_are_not_summed_for_them(tp, name):
    make, x, (a, b) = READ_BY_OTHERS[name], hidden(), weights(2)
    found = grad_of(lambda h: make(tp.copy_to_group, h, a, b), x)
    plain = grad_of(lambda h: make(lambda h: h, h, a, b), x)
    others = grad_of(lambda h: make(lambda h: h.detach(), h, a, b) + 0 * h.sum(), x)
    torch.testing.assert_close(found, 2 * (plain - others) + others)


def test_outputs_are_summed_and_what_hooks_keep_stays(tp):
    layer, x, kept = nn.Linear(SIZE, SIZE), hidden(), []
    wanted = 2 * layer(x)
    (wanted_grad,) = torch.autograd.grad((3 * wanted / 2 + wanted / 2).sum(), x)
    layer.register_forward_hook(lambda _module, _args, output: kept.append(output))
    hook_rowwise(layer, tp)
    out = layer(x)
    torch.testing.assert_close(out, wanted)
    # The sum hands its gradient on to each rank's part
    (grad,) = torch.autograd.grad((3 * out + kept[0]).sum(), x)
    torch.testing.assert_close(grad, wanted_grad)


class Scaled(nn.Linear):
    """Takes a scale of all features of a token, as quantisation-aware training does."""

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
