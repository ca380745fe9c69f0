"""A linear layer's product, and where the gradient of its weight goes.

[Note: Products for weights]
Backward of a linear layer has two products, one for the gradient of its input and one for that of
its weight. Only the first is waited for: by the layer before, and under TP by the other ranks of
the group, which exchange it. The second one is therefore made

- last: the exchange is posted, then come the products of all linears that read the same input, then
  the exchange is waited for (the order of Megatron-LM's
  `linear_with_grad_accumulation_and_async_allreduce`; q, k and v have one exchange here);
- in the memory where the gradients of micro-batches add up (its "gradient accumulation fusion"),
  where the device multiplies 16-bit matrices into an fp32 one. A gradient that is made first and
  added afterwards is written once and read once more.

Autograd sees no gradient of such a weight. Its node still runs, after all uses of the weight, and
`WeightGradient` waits for the products that it was told to expect.

In a layer that torch compiles, backward of a linear is one operator. A compiler takes it for a
function of its arguments. So totals are not among them, or it would copy them to follow their
changes; handles are, numbers in tensors of the CPU, by which the operator finds what takes its
product. The gradient of the input is its result, and keeps it in the graph.

Legend: T tokens of a micro-batch, H input and O output features.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import Any, Protocol
from weakref import WeakValueDictionary

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class WeightGradient(Protocol):
    """Sink of the gradient of one weight [O, H], where `set_gradient` has given it one."""

    is_direct: bool
    """Whether products are made in the memory where they add up."""

    def expect_product(self) -> None:
        """`add_product` will be called once more, perhaps when autograd is done with the weight."""

    def add_product(self, grad_TO: Tensor, input_TH: Tensor) -> None:
        """Add `grad_TO.T @ input_TH`."""


def takes_products(weight: Tensor, shared: SharedBackward | None = None) -> bool:
    """Whether products for `weight` save a pass, or run beside the exchange of a `shared` input."""
    gradient = getattr(weight, "hydra_gradient", None)
    return gradient is not None and (gradient.is_direct or shared is not None)


def set_gradient(weight: Tensor, gradient: WeightGradient) -> None:
    """Let linears that `weight` is bound to hand their products to `gradient`."""
    weight.hydra_gradient = gradient  # type: ignore[attr-defined]
    weight.hydra_handle = new_handle(gradient)  # type: ignore[attr-defined]


_numbers = itertools.count(1)
# Weak: a handle must not keep the totals or the waiting products of an iteration alive.
_by_handle: WeakValueDictionary[int, Any] = WeakValueDictionary()


def new_handle(held: Any) -> Tensor:
    """[1] int64 on the CPU that stands for `held` in compiled code, while somebody has that."""
    number = next(_numbers)
    _by_handle[number] = held
    return torch.tensor([number])


def find_held(handle: Tensor) -> Any:
    """The object of `handle`, or None where it is gone."""
    return _by_handle.get(int(handle))


def multiply_into(total: Tensor, left: Tensor, right: Tensor, *, adds: bool) -> None:
    """Let `total` be the product of the matrices `left` and `right`, or grow by it, in one pass."""
    if total.dtype == left.dtype:
        if adds:
            total.addmm_(left, right)
        else:
            torch.mm(left, right, out=total)
    elif adds:
        torch.addmm(total, left, right, out_dtype=total.dtype, out=total)
    else:
        torch.mm(left, right, out_dtype=total.dtype, out=total)


LEAST_NUMEL = {"cpu": 2**19}
"""Elements of a weight from which a pass over its gradient costs more than 20 microseconds of
Python, by type of device; on others it always does.
"""


@functools.cache
def can_multiply_into(total: torch.dtype, factors: torch.dtype, device: torch.device) -> bool:
    """Whether `multiply_into` runs on `device`; tried once where the types differ.

    torch 2.13 has such products of CUDA devices only, and not every version adds to an fp32 matrix.
    """
    if total == factors:
        return True
    ones = torch.ones(16, 16, dtype=factors, device=device)
    sums = torch.zeros(16, 16, dtype=total, device=device)
    try:
        for adds in (False, True):
            multiply_into(sums, ones, ones, adds=adds)
    except (NotImplementedError, RuntimeError, TypeError):
        return False
    # 16 by the first product, and 16 more by the one that adds.
    return bool((sums == 32).all())


class SharedBackward:
    """Backward state that the linears of one tensor share: products that wait until the exchange of
    the tensor's gradient is posted.
    """

    def __init__(self) -> None:
        self._products: list[Callable[[], None]] = []
        self.handle = new_handle(self)

    def postpone(self, product: Callable[[], None]) -> None:
        """Run `product` beside the exchange."""
        self._products.append(product)

    def run(self) -> None:
        """Run the waiting products; the exchange is posted."""
        # One by one, so that each frees the gradient of an output.
        while self._products:
            self._products.pop(0)()

    def expect_reader(self) -> None:
        """A linear has read the tensor, and reads it again in backward."""

    def read(self, kept: Tensor) -> Callable[[], Tensor]:
        """A function that waits for the tensor of which a linear has `kept` something. Each linear
        that reads the tensor calls it once.
        """
        return lambda: kept


class _Linear(torch.autograd.Function):
    """See [Note: Products for weights]."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight_OH: Tensor,
        bias_O: Tensor | None,
        kept: Tensor,
        shared: SharedBackward | None,
    ) -> Tensor:
        needs_grad, trains_weight, ctx.trains_bias = ctx.needs_input_grad[:3]
        ctx.gradient = getattr(weight_OH, "hydra_gradient", None) if trains_weight else None
        ctx.shared = shared
        if shared is not None and trains_weight:
            shared.expect_reader()
        # Each is kept for one product: the input for the weight's, the weight for the input's.
        ctx.save_for_backward(kept if trains_weight else None, weight_OH if needs_grad else None)
        return F.linear(hidden, weight_OH, bias_O)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        kept, weight_OH = ctx.saved_tensors
        shared, gradient = ctx.shared, ctx.gradient
        grad_TO = _rows(grad)
        # Begun before the product for the input, beside which shards travel.
        is_shared = kept is not None and shared is not None
        read = shared.read(kept) if is_shared else lambda: kept
        grad_input = grad_weight = None
        if weight_OH is not None:
            grad_input = grad_TO.mm(weight_OH).view(*grad.shape[:-1], weight_OH.shape[1])
        grad_bias = grad_TO.sum(dim=0) if ctx.trains_bias else None
        if kept is not None:
            if gradient is None:
                grad_weight = grad_TO.T @ _rows(read())
            else:
                # Told now: autograd may be done with the weight before a product that waits.
                gradient.expect_product()
                # A tensor without gradient is not exchanged.
                if shared is None or weight_OH is None:
                    gradient.add_product(grad_TO, _rows(read()))
                else:
                    shared.postpone(lambda: gradient.add_product(grad_TO, _rows(read())))
        return grad_input, grad_weight, grad_bias, None, None


def _rows(tensor: Tensor) -> Tensor:
    """[T, ...] of the tokens; by one operator where a micro-batch has them, in place of three."""
    is_plain = tensor.dim() == 3 and tensor.shape[0] == 1
    return tensor.squeeze(0) if is_plain else tensor.flatten(0, -2)


def _backward(
    grad_TO: Tensor, weight_OH: Tensor, input_TH: Tensor, gradient: Tensor, shared: Tensor
) -> Tensor:
    """Gradient [T, H] of the input, and a product for the weight's; the last two are handles."""
    # Not by `find_held`: without its taker a product would be lost in silence.
    taker: WeightGradient = _by_handle[int(gradient)]
    later: SharedBackward | None = find_held(shared)
    taker.expect_product()
    add = functools.partial(taker.add_product, grad_TO, input_TH)
    grad_TH = grad_TO @ weight_OH
    if later is None:
        add()
    else:
        later.postpone(add)
    return grad_TH


# Not by custom_op, whose wrappers in Python take 9 microseconds of the host a call
_library = torch.library.Library("ds_hydra", "FRAGMENT")
# Totals do change, but are no arguments: a compiler has nothing to copy and to follow.
_library.define(
    "linear_backward(Tensor grad, Tensor weight, Tensor input, Tensor gradient, Tensor shared) -> Tensor"
)
_library.impl("linear_backward", _backward, "CompositeExplicitAutograd")
# Stands for nothing, because handles count from 1.
_NONE = torch.zeros(1, dtype=torch.int64)


@torch.library.register_fake("ds_hydra::linear_backward", lib=_library)
def _(grad_TO: Tensor, _weight: Tensor, input_TH: Tensor, *_: Tensor) -> Tensor:
    # The product is contiguous whatever strides the input has.
    return torch.empty_like(input_TH, memory_format=torch.contiguous_format)


class _TracedLinear(torch.autograd.Function):
    """See [Note: Products for weights], of compiled layers."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight_OH: Tensor,
        bias_O: Tensor | None,
        gradient: Tensor,
        shared: Tensor,
    ) -> Tensor:
        # Handles are saved as tensors: a layer that runs again saves those of its second pass.
        ctx.save_for_backward(hidden, weight_OH, gradient, shared)
        ctx.has_bias = bias_O is not None
        return F.linear(hidden, weight_OH, bias_O)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight_OH, gradient, shared = ctx.saved_tensors
        grad_TO = grad.flatten(0, -2)
        input_TH = hidden.flatten(0, -2)
        grad_TH = torch.ops.ds_hydra.linear_backward.default(
            grad_TO, weight_OH, input_TH, gradient, shared
        )
        grad_bias = grad_TO.sum(dim=0) if ctx.has_bias else None
        return grad_TH.view(hidden.shape), None, grad_bias, None, None


def trace_linear(
    linear: nn.Linear,
    plain: Callable[[Tensor], Tensor],
    hidden: Tensor,
    shared: SharedBackward | None = None,
) -> Tensor:
    """The same in a layer that torch compiles; `plain(hidden)` where nothing is gained, or no
    gradient of `hidden` would keep the operator in the graph.
    """
    weight = linear.weight
    if not (hidden.requires_grad and takes_products(weight, shared)):
        return plain(hidden)
    gradient = weight.hydra_handle  # type: ignore[attr-defined]
    handle = _NONE if shared is None else shared.handle
    output: Tensor = _TracedLinear.apply(hidden, weight, linear.bias, gradient, handle)
    return output


_apply: Callable[..., Tensor] = super(torch.autograd.Function, _Linear).apply
"""`apply` of torch without its work for functorch in each call, which is not used here."""


def apply_linear(
    hidden: Tensor,
    weight_OH: Tensor,
    bias_O: Tensor | None,
    kept: Tensor | None = None,
    shared: SharedBackward | None = None,
) -> Tensor:
    """Apply a linear to `hidden`. For backward it keeps `kept`, from which `shared` gets the input
    again, or the input.
    """
    return _apply(hidden, weight_OH, bias_O, hidden if kept is None else kept, shared)


apply_outside = torch.compiler.disable(apply_linear)
"""`apply_linear` in the middle of a layer that torch compiles."""
