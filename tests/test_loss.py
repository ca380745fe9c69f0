"""Cross entropy of a packed micro-batch against torch's own, in one process (parity tests cover the
split vocabulary).
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from ds_hydra.engine.parallel import token_scores
from ds_hydra.engine.parallel.tensor_parallel import TensorParallel
from ds_hydra.engine.parallel.token_scores import IGNORED_LABEL, summed_cross_entropy

NUM_TOKENS, HIDDEN, VOCABULARY = 37, 8, 11


@pytest.fixture(
    params=[1, 4 * VOCABULARY, 10**6],
    ids=["micro-batch by micro-batch", "four micro-batches", "at once"],
)
def _chunks(request, monkeypatch):
    monkeypatch.setitem(token_scores._CHUNK_ELEMENTS, "cpu", request.param)


def make_case(dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(1, NUM_TOKENS, HIDDEN, generator=generator).to(dtype).requires_grad_()
    weight = torch.randn(VOCABULARY, HIDDEN, generator=generator).to(dtype).requires_grad_()
    targets = torch.randint(0, VOCABULARY, (NUM_TOKENS,), generator=generator)
    targets[::5] = IGNORED_LABEL
    return hidden, weight, targets


def run(loss_of, hidden, weight):
    hidden.grad = weight.grad = None
    loss = loss_of(F.linear(hidden, weight)[0])
    loss.backward()
    return loss.detach(), hidden.grad, weight.grad


@pytest.mark.usefixtures("_chunks")
@pytest.mark.parametrize("scale", [1.0, 1 / 77])
def test_loss_and_gradients_are_those_of_torch(scale):
    hidden, weight, targets = make_case()
    ours = run(lambda x: summed_cross_entropy(x, targets, TensorParallel(), scale), hidden, weight)
    torchs = run(lambda x: F.cross_entropy(x, targets, reduction="sum") * scale, hidden, weight)
    for mine, expected in zip(ours, torchs, strict=True):
        torch.testing.assert_close(mine, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.usefixtures("_chunks")
def test_sixteen_bit_logits_are_summed_in_fp32():
    hidden, weight, targets = make_case(torch.bfloat16)
    ours = run(lambda x: summed_cross_entropy(x, targets, TensorParallel()), hidden, weight)
    torchs = run(lambda x: F.cross_entropy(x.float(), targets, reduction="sum"), hidden, weight)
    assert ours[0].dtype == torch.float32
    torch.testing.assert_close(ours[0], torchs[0])
    assert ours[1].dtype == torch.bfloat16
    torch.testing.assert_close(ours[1:], torchs[1:], rtol=2e-2, atol=2e-2)


def test_a_gradient_from_above_is_applied():
    hidden, weight, targets = make_case()
    _, expected, _ = run(
        lambda x: summed_cross_entropy(x, targets, TensorParallel(), 3.0), hidden, weight
    )
    _, found, _ = run(
        lambda x: 3.0 * summed_cross_entropy(x, targets, TensorParallel()), hidden, weight
    )
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("factor", [1.0, 3.0])
def test_the_gradient_takes_the_place_of_the_logits(factor):
    """One copy of the largest tensor of a micro-batch, whatever gradient comes from above."""
    hidden, weight, targets = make_case()
    logits = F.linear(hidden, weight)
    places = []
    logits.register_hook(lambda grad: places.append(grad.data_ptr()))
    (factor * summed_cross_entropy(logits.squeeze(0), targets, TensorParallel())).backward()
    assert places == [logits.data_ptr()]


def test_logits_that_somebody_else_needs_are_left_alone():
    """A soft cap saves its output for backward; a leaf belongs to the caller."""
    hidden, weight, targets = make_case()

    def capped(loss_of):
        return lambda x: loss_of(torch.tanh(x / 5) * 5 + torch.tanh(x))

    ours = run(capped(lambda x: summed_cross_entropy(x, targets, TensorParallel())), hidden, weight)
    torchs = run(capped(lambda x: F.cross_entropy(x, targets, reduction="sum")), hidden, weight)
    for mine, expected in zip(ours, torchs, strict=True):
        torch.testing.assert_close(mine, expected, rtol=1e-5, atol=1e-6)
    leaf = torch.randn(NUM_TOKENS, VOCABULARY, requires_grad=True)
    before = leaf.detach().clone()
    summed_cross_entropy(leaf, targets, TensorParallel()).backward()
    torch.testing.assert_close(leaf.detach(), before, rtol=0, atol=0)


def test_no_gradient_is_made_and_nothing_overwritten_without_grad():
    hidden, weight, targets = make_case()
    with torch.no_grad():
        logits = F.linear(hidden, weight)[0]
        before = logits.clone()
        loss = summed_cross_entropy(logits, targets, TensorParallel())
    torch.testing.assert_close(logits, before, rtol=0, atol=0)
    torch.testing.assert_close(loss, F.cross_entropy(logits, targets, reduction="sum"))


def test_a_micro_batch_without_labels_has_no_loss_and_no_gradient():
    hidden, weight, targets = make_case()
    targets.fill_(IGNORED_LABEL)
    loss, grad, _ = run(
        lambda x: summed_cross_entropy(x, targets, TensorParallel()), hidden, weight
    )
    assert float(loss) == 0.0
    assert not grad.any()
