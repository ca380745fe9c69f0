"""Products for gradients of weights: made in the memory where they add up, beside the exchange of
the input's gradient, and complete before anybody is told so.
"""

from __future__ import annotations

import gc
import weakref
from collections import Counter
from contextlib import contextmanager
from dataclasses import dataclass
from unittest import mock

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from ds_hydra.engine.parallel import linear, tensor_parallel
from ds_hydra.engine.parallel.linear import apply_linear
from ds_hydra.engine.parallel.tensor_parallel import (
    TensorParallel,
    TokenShards,
    gather_input,
    hook_block,
    hook_colwise,
    hook_linear,
)
from ds_hydra.engine.transfer.stage_weights import SlicePool, StageWeights, _Gradient
from ds_hydra.zero_link import BucketEntry, ParamSpec

CPU = torch.device("cpu")
OUT, IN = 24, 16


@pytest.fixture(autouse=True)
def small_weights(monkeypatch):
    """Let the weights of these tests count as large ones."""
    monkeypatch.delitem(linear.LEAST_NUMEL, "cpu", raising=False)


@contextmanager
def products_into_fp32():
    """The CPU has what torch has for CUDA devices: products of 16-bit matrices in fp32."""
    library = torch.library.Library("aten", "IMPL")

    def mm(left, right, out_dtype, *, out):
        return out.copy_(left.to(out_dtype) @ right.to(out_dtype))

    def addmm(total, left, right, out_dtype, *, beta=1, alpha=1, out):
        assert total.data_ptr() == out.data_ptr()
        assert (beta, alpha) == (1, 1)
        return out.copy_(total + left.to(out_dtype) @ right.to(out_dtype))

    library.impl("mm.dtype_out", mm, "CPU")
    library.impl("addmm.dtype_out", addmm, "CPU")
    linear.can_multiply_into.cache_clear()
    try:
        yield
    finally:
        library._destroy()
        linear.can_multiply_into.cache_clear()


class Passes(TorchDispatchMode):
    """Counts operations that write something of `shape` and are no product."""

    def __init__(self, *shapes):
        super().__init__()
        self._shapes = [torch.Size(s) for s in shapes]
        self.counts = Counter()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        is_pass = torch.Tag.pointwise in function.tags or function._opname in ("copy_", "clone")
        if is_pass and isinstance(result, torch.Tensor) and result.shape in self._shapes:
            self.counts[function._opname] += 1
        return result


class Stage:
    """A linear without bias whose weight is the only one of a stage, in one bucket."""

    def __init__(self, dtype=torch.float32, *, gathers=False, tp=None, weight=None):
        spec = ParamSpec(fqn="weight", shape=(OUT, IN))
        bucket = (BucketEntry(0, spec.slice_region(1, 0), True),)
        slot_of = {0: 0} if gathers else None
        self.weights = StageWeights([spec], (bucket,), SlicePool(CPU), dtype, slot_of=slot_of)
        torch.manual_seed(0)
        self.weights.bucket_S[0][0].copy_(torch.randn(OUT * IN))
        self.linear = nn.Linear(IN, OUT, bias=False)
        self.linear._parameters["weight"] = self.weights.leaves[0]
        self.tp = tp or TensorParallel()
        hook_colwise(self.linear, self.tp)
        hook_linear(self.linear, self.tp)
        self.reports = []
        self.weights.on_gradient = self.reports.append

    @property
    def gradient(self):
        return self.weights.grad_bucket_S[0][0].view(OUT, IN)

    def run(self, rows, calls=1):
        """Forward and backward; what the gradient of the weight grows by, in fp64."""
        x = torch.randn(1, rows, IN).to(self.linear.weight.dtype).requires_grad_()
        grad = torch.randn(calls, rows, OUT).to(x.dtype)
        outputs = [self.linear(x * 1) for _ in range(calls)]
        torch.autograd.backward(torch.cat(outputs), grad)
        return grad.double().sum(0).T @ x.detach().double()[0]


def test_the_host_calls_little_for_a_linear():
    """A call of Python for each parameter and pass is time in which short micro-batches wait."""
    stage = Stage()
    assert not stage.linear._forward_pre_hooks
    assert not stage.linear._forward_hooks
    with mock.patch.object(_Gradient, "pass_by", return_value=None) as pass_by:
        stage.run(3)
        assert not pass_by.called
        stage.weights.expect_last_backward()
        stage.run(3)
        assert pass_by.call_count == 1


def test_without_such_products_a_gradient_is_made_and_added():
    linear.can_multiply_into.cache_clear()
    assert not linear.can_multiply_into(torch.float32, torch.bfloat16, CPU)
    stage = Stage(torch.bfloat16)
    with Passes((OUT, IN)) as passes:
        wanted = [stage.run(5), stage.run(7)]
    assert passes.counts == {"copy_": 1, "add_": 1}
    torch.testing.assert_close(stage.gradient.double(), sum(wanted), rtol=2e-2, atol=5e-2)


@pytest.mark.parametrize("is_wrong", [True, False])
def test_products_that_a_device_refuses_or_gets_wrong_are_not_used(is_wrong, monkeypatch):
    def multiply(total, *_, adds):
        if not is_wrong:
            raise RuntimeError("self and mat2 must have the same dtype")
        total.fill_(16)

    monkeypatch.setattr(linear, "multiply_into", multiply)
    assert not linear.can_multiply_into.__wrapped__(torch.float32, torch.bfloat16, CPU)


class Events(list):
    """Events of backward, in their order."""

    def posted(self, *_, **__):
        self.append("posted")
        return mock.Mock(wait=lambda: self.append("waited"))


@pytest.fixture
def events(monkeypatch):
    found, multiply = Events(), linear.multiply_into

    def multiplied(*args, **kwargs):
        found.append("weight")
        multiply(*args, **kwargs)

    monkeypatch.setattr(tensor_parallel.dist, "all_reduce", found.posted)
    monkeypatch.setattr("ds_hydra.engine.transfer.stage_weights.multiply_into", multiplied)
    return found


@pytest.mark.parametrize("compiled", [False, True])
def test_products_run_between_the_post_of_an_exchange_and_its_end(events, compiled):
    tp = TensorParallel()
    tp.enter(None, 2, 0)
    stage, other = Stage(tp=tp), Stage(tp=tp)
    for of in (stage, other):
        if compiled:
            of.linear.forward = torch.compile(of.linear.forward, backend="aot_eager", dynamic=True)
        of.weights.on_gradient = lambda _: events.append("complete")
        of.weights.expect_last_backward()
    hidden = torch.randn(1, 5, IN, requires_grad=True) * 1
    output = stage.linear(hidden) + other.linear(hidden)  # as q and k, or gate and up
    output.sum().backward()
    assert events == ["posted", "weight", "complete", "weight", "complete", "waited"]
    for of in (stage, other):
        wanted = hidden[0].detach().sum(0).expand(OUT, IN)
        torch.testing.assert_close(of.gradient, wanted)


@dataclass(frozen=True)
class Twins(TokenShards):
    """Two ranks that have the same tokens; what is gathered arrives when it is waited for."""

    events: list

    def post_gather(self, shard):
        both = torch.cat([shard, shard], dim=-2)
        coming = torch.full_like(both, torch.nan)
        self.events.append("gather")

        def arrive():
            self.events.append("gathered")
            coming.copy_(both.detach())

        return coming, arrive

    def post_reduce_scatter(self, partial):
        self.events.append("posted")
        half = partial[:, : partial.shape[1] // 2] * 2
        return half, lambda: self.events.append("waited")


def test_products_run_beside_a_reduce_scatter_and_read_what_was_gathered(events):
    tp = TensorParallel(cuts_micro_batches=True)
    tp.enter(None, 2, 0)
    tp.shards = Twins(None, 2, events)
    stage = Stage(tp=tp)
    block = nn.Sequential(stage.linear)
    hook_block(block, tp)
    hidden = torch.randn(1, 3, IN, requires_grad=True) * 1
    output = block(hidden)
    assert events == ["gather", "gathered"]
    events.clear()
    output.sum().backward()
    assert events == ["gather", "posted", "gathered", "weight", "waited"]
    torch.testing.assert_close(stage.gradient, 2 * hidden[0].detach().sum(0).expand(OUT, IN))


@pytest.mark.parametrize("first_to_read", ["postponed", "at once"])
def test_no_linear_reads_what_is_gathered_before_it_is_there(first_to_read):
    """One product waits for the exchange, as for weights whose gradients add up; the other one is
    made at once, as in 8 bits.
    """
    stage, shards = Stage(), Twins(None, 2, [])
    weights = {"postponed": stage.linear.weight, "at once": torch.randn(OUT, IN).requires_grad_()}
    kept = torch.randn(1, 3, IN)
    shared = gather_input(kept.clone().requires_grad_(), shards)
    order = sorted(weights, key=lambda name: name == first_to_read)  # backward comes in reverse
    outputs = [
        apply_linear(shared.whole, weights[name], None, shared.kept, shared.backward)
        for name in order
    ]
    sum(output.sum() for output in outputs).backward()
    wanted = 2 * kept[0].sum(0).expand(OUT, IN)
    torch.testing.assert_close(weights["at once"].grad, wanted)
    torch.testing.assert_close(stage.gradient, wanted)


def test_nothing_waits_for_an_exchange_that_does_not_come(events):
    """The first layer's input, where embeddings are frozen."""
    tp = TensorParallel()
    tp.enter(None, 2, 0)
    stage = Stage(tp=tp)
    stage.weights.expect_last_backward()
    hidden = torch.randn(1, 5, IN)
    stage.linear(hidden).sum().backward()
    assert events == ["weight"]
    assert stage.reports == [0]


def test_a_weight_that_is_used_twice_is_complete_after_the_last_product(events):
    """A model that runs its sequences one by one uses it so, or a layer that is called again."""
    tp = TensorParallel()
    tp.enter(None, 2, 0)
    stage = Stage(tp=tp)
    stage.run(3, calls=2)
    assert stage.reports == []
    stage.weights.expect_last_backward()
    stage.weights.on_gradient = lambda _: events.append("complete")
    events.clear()
    stage.run(4, calls=2)
    assert events.count("weight") == 2
    assert events.count("complete") == 1
    assert "weight" not in events[events.index("complete") :]


def test_products_and_gradients_of_autograd_add_up():
    """Tied weights have both: an embedding reads them, too."""
    stage = Stage()
    x = torch.randn(1, 5, IN, requires_grad=True)
    stage.weights.expect_last_backward()
    (stage.linear(x).sum() + stage.linear.weight.square().sum()).backward()
    wanted = x.detach()[0].sum(0).expand(OUT, IN) + 2 * stage.linear.weight
    torch.testing.assert_close(stage.gradient, wanted.detach())
    assert stage.reports == [0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("gathers", [False, True])
def test_another_iteration_begins_as_the_first(dtype, gathers):
    """Gradients replace those of the iteration before, and are reported once, when they are
    complete.
    """
    with products_into_fp32():
        stage = Stage(dtype, gathers=gathers)
        for rows in ((5, 7), (3, 4), (6,)):
            stage.weights.begin_again()
            stage.reports.clear()
            wanted = 0
            for number, tokens in enumerate(rows):
                stage.weights.expect_next(0)
                assert not stage.reports
                if number == len(rows) - 1:
                    stage.weights.expect_last_backward()
                    assert not stage.reports, "the gradient of this micro-batch is missing"
                with Passes((OUT, IN), (IN, OUT)) as passes:
                    last = stage.run(tokens)
                assert not passes.counts, "a pass over the gradient beside the product"
                wanted = last if gathers else wanted + last
            assert stage.reports == [0]
            assert stage.linear.weight.grad is None
            tolerance = 1e-2 if gathers and dtype == torch.bfloat16 else 1e-6
            torch.testing.assert_close(
                stage.gradient.double(), wanted, rtol=tolerance, atol=tolerance
            )
        stage.weights.begin_again()
        with mock.patch.object(_Gradient, "pass_by", return_value=None) as pass_by:
            stage.run(3)
            assert not pass_by.called, "hooks are those of a last micro-batch"
        stage.weights.begin_again()
        stage.weights.zero_missing(0)  # an iteration that gives it no gradient
        assert not stage.gradient.any()


def test_slices_are_let_go_with_the_iteration():
    stage = Stage()
    stage.run(5)
    leaf, weights = weakref.ref(stage.linear.weight), weakref.ref(stage.weights)
    gc.disable()
    try:
        stage.linear._parameters["weight"] = None  # as when a stage is unbound
        del stage
        assert leaf() is None
        assert weights() is None
    finally:
        gc.enable()
