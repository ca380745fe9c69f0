"""Products of linear layers in 8 bits, by torchao's float8 training, with scales on which the ranks
of a TP group agree.

[Note: Scales of 8-bit products]
A linear layer has three products: output (sums over I), gradient of the input (over O), gradient of
the weight (over T). torchao casts both operands of each by scales that it takes from them: one for
all of an operand ("tensorwise"), or one for each of its rows and columns that is summed over
("rowwise"). Where TP cuts an operand along what a scale is taken of, a rank sees a part of it, and
the group takes the largest of all parts: rowwise the token scales of what row-wise layers read and
of the gradient of what column-wise ones give, and weights where they are summed over a cut
dimension; tensorwise all that is cut. So all ranks multiply what one device would. Both operands of
a product share a message, and what is known in forward is kept for backward. Where ranks hold a
key-value head repeatedly, each has a part of the gradient of what it gives; parts are added up
before they are cast, and each rank takes its share of what follows from the sum.

Scales are powers of two. A cast is then the same number whatever else shares the tensor, but for
numbers that are too small beside the largest one; so a token's numbers hardly depend on which
sequences share its micro-batch, nor on how ranks share tokens.

16-bit slices stay what they are: casts live while a product runs. Under `hydra.compile_layers` they
are part of a layer's graph, or, where ranks exchange scales in between, graphs of their own.

Legend: T tokens of the micro-batch (of a sequence shard or row of it), I input and O output
features of this rank's slice.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torchao.float8.config import CastConfig, Float8LinearConfig, ScalingGranularity, ScalingType
from torchao.float8.float8_training_tensor import (
    GemmInputRole,
    LinearMMConfig,
    ScaledMMConfig,
    hp_tensor_and_scale_to_float8,
)
from torchao.float8.float8_utils import amax_to_scale, tensor_to_amax

from ds_hydra.engine.parallel.tensor_parallel import (
    COLUMN,
    ROW,
    SharedInput,
    TensorParallel,
)

_CUT = {COLUMN: "O", ROW: "I"}
"""Features that TP cuts, by the side of a linear."""


class EightBitLinear(nn.Linear):
    """A linear layer of the stage model that multiplies in 8 bits. It is made of another by its
    class alone, so that its parameters are bound as those of any other module.
    """

    casts: Float8LinearConfig
    tp: TensorParallel
    side: str
    """COLUMN or ROW where TP cuts it, else ""."""
    num_heads: int
    """Blocks of output features that are not cut; 0: may be cut anywhere."""
    is_compiled: bool
    """Whether layers are."""

    def forward(self, hidden: Tensor) -> Tensor:
        """[..., O] of `hidden` [..., I]. Collective over the TP group where it cuts the layer, in
        backward too.
        """
        if not hidden.numel():  # experts without tokens: nothing to take a scale of
            return super().forward(hidden)
        tp = self.tp
        shared = tp.shared if tp.shards is not None else None
        # Only of the gathered tensor is a shard kept, from which backward could gather it again.
        if shared is not None and hidden is not shared.whole:
            shared = None
        if shared is None and not (self.side and tp.size > 1):
            output: Tensor = _Products.apply(
                hidden, self.weight, self.casts, False, "", 1, None, None
            )
        else:
            cut = _CUT.get(self.side, "") if tp.size > 1 else ""
            is_repeated = 0 < self.num_heads < tp.size
            output = _in_group(
                hidden,
                self.weight,
                self.casts,
                self.is_compiled,
                cut,
                tp.size // self.num_heads if is_repeated else 1,
                tp.group,
                shared,
            )
        return output if self.bias is None else output + self.bias


class _Parts(NamedTuple):
    """Functions that are computed around a product."""

    amax: Callable[..., Tensor]
    cast: Callable[..., Tensor]


def _cast(
    tensor: Tensor,
    amax: Tensor,
    dtype: torch.dtype,
    rounds: bool,
    products: LinearMMConfig,
    role: GemmInputRole,
    axis: int | None,
) -> Tensor:
    """`tensor` in 8 bits, whose largest numbers are `amax`."""
    scale = amax_to_scale(amax, dtype, rounds)
    return hp_tensor_and_scale_to_float8(tensor, scale, dtype, products, role, axis)


_PLAIN = _Parts(tensor_to_amax, _cast)


@functools.cache
def _compiled() -> _Parts:
    return _Parts(*(torch.compile(part, dynamic=True) for part in _PLAIN))


@torch.compiler.disable
def _in_group(*args: Any) -> Tensor:
    """The products of a linear whose scales, or whose input, ranks exchange."""
    output: Tensor = _Products.apply(*args)
    return output


class _Operand(NamedTuple):
    """One of the two factors of a product."""

    tensor: Tensor
    features: str
    """Names of its two dimensions: T, I or O each."""
    role: GemmInputRole
    cast: CastConfig

    @property
    def is_tensorwise(self) -> bool:
        return self.cast.scaling_granularity is ScalingGranularity.TENSORWISE


@torch._dynamo.allow_in_graph
class _Products(torch.autograd.Function):
    """A linear layer without bias, and its two products in backward.

    `config` says how each operand is cast. Ranks of `group` have parts of the features `cut` ("":
    none). Of a `shared` input the shard alone is kept, which is gathered again.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight_OI: Tensor,
        config: Float8LinearConfig,
        compiles_parts: bool,
        cut: str,
        num_copies: int,
        group: dist.ProcessGroup | None,
        shared: SharedInput | None,
    ) -> Tensor:
        parts = _compiled() if compiles_parts else _PLAIN
        ctx.at = (config, parts, cut, group, shared)
        ctx.num_copies = num_copies
        known: dict[str, Tensor] = {}
        output_TO = _multiply(
            _Operand(hidden.flatten(0, -2), "TI", GemmInputRole.INPUT, config.cast_config_input),
            _Operand(weight_OI, "OI", GemmInputRole.WEIGHT, config.cast_config_weight),
            "I",
            ctx.at,
            known,
        )
        if shared is not None and ctx.needs_input_grad[1]:
            shared.backward.expect_reader()
        ctx.known = tuple(known)
        kept = hidden if shared is None else shared.kept
        ctx.save_for_backward(
            kept if ctx.needs_input_grad[1] else None,
            weight_OI if ctx.needs_input_grad[0] else None,
            *known.values(),
        )
        return output_TO.unflatten(0, hidden.shape[:-1])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        kept, weight_OI, *amaxes = ctx.saved_tensors
        config, _, _, group, shared = ctx.at
        known = dict(zip(ctx.known, amaxes, strict=True))
        grad_TO, role = grad.flatten(0, -2), GemmInputRole.GRAD_OUTPUT
        if ctx.num_copies > 1:
            grad_TO = _sum_of_copies(grad_TO, group, ctx.num_copies)
        is_shared = kept is not None and shared is not None
        read = shared.backward.read(kept) if is_shared else lambda: kept
        grad_hidden = grad_weight = None
        if weight_OI is not None:
            grad_hidden = _multiply(
                _Operand(grad_TO, "TO", role, config.cast_config_grad_output),
                _Operand(
                    weight_OI,
                    "OI",
                    GemmInputRole.WEIGHT,
                    config.cast_config_weight_for_grad_input,
                ),
                "O",
                ctx.at,
                known,
            ).unflatten(0, grad.shape[:-1])
        if kept is not None:
            hidden = read()  # only now: shards were gathered beside the product above
            grad_weight = _multiply(
                _Operand(grad_TO, "TO", role, config.cast_config_grad_output_for_grad_weight),
                _Operand(
                    hidden.flatten(0, -2),
                    "TI",
                    GemmInputRole.INPUT,
                    config.cast_config_input_for_grad_weight,
                ),
                "T",
                ctx.at,
                known,
            )
        if ctx.num_copies > 1:
            # Each copy has the whole now, and the group adds all of them up: a share from each.
            grad_hidden, grad_weight = (
                whole if whole is None else whole / ctx.num_copies
                for whole in (grad_hidden, grad_weight)
            )
        return grad_hidden, grad_weight, *[None] * 6


def _sum_of_copies(grad_TO: Tensor, group: dist.ProcessGroup | None, num_copies: int) -> Tensor:
    """The gradient of the features that `num_copies` neighbours in `group` give repeatedly, out of
    their parts.
    """
    size, rank = dist.get_world_size(group), dist.get_rank(group)
    # The copies have no group of their own; in the sum over all ranks other heads are zeros.
    grads_HTO = grad_TO.new_zeros(size // num_copies, *grad_TO.shape)
    grads_HTO[rank // num_copies] = grad_TO
    dist.all_reduce(grads_HTO, group=group)
    return grads_HTO[rank // num_copies]


def _multiply(
    left: _Operand, right: _Operand, summed: str, at: tuple[Any, ...], known: dict[str, Tensor]
) -> Tensor:
    """The product that sums over the features `summed`.

    `known`: largest numbers of whole operands, by their features, to which those of these are
    added. Collective over the group where an amax has to be agreed on.
    """
    config, parts, cut, group, *_ = at
    amaxes: dict[str, Tensor] = {}
    agreed: list[str] = []
    for operand in (left, right):
        tensor, features, _, cast = operand
        if cast.scaling_type is ScalingType.DISABLED:
            continue
        # A rowwise scale belongs to the dimension that is summed over, so no other product has it.
        if operand.is_tensorwise and features in known:
            amaxes[features] = known[features]
            continue
        amaxes[features] = parts.amax(
            tensor,
            scaling_granularity=cast.scaling_granularity,
            axiswise_dim=_axis(operand, summed),
        )
        # A rowwise scale is of one row: a rank has a part of it only where the cut runs along.
        if cut and cut in features and (operand.is_tensorwise or summed == cut):
            agreed.append(features)
    # One rank would take one scale of the whole operand, of which each here has a part.
    if agreed:
        mine = [amaxes[features].float() for features in agreed]
        largest = torch.cat([amax.flatten() for amax in mine])
        dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=group)
        agreed_on = largest.split([amax.numel() for amax in mine])
        for features, amax, of_all in zip(agreed, mine, agreed_on, strict=True):
            amaxes[features] = of_all.view(amax.shape)
    products = _products_of(config, left.tensor.shape[0] if summed == "T" else 0)
    factors = []
    for operand in (left, right):
        tensor, features, role, cast = operand
        if features not in amaxes:
            factors.append(tensor)
            continue
        amax = amaxes[features]
        if operand.is_tensorwise:
            known[features] = amax
        rounds, axis = config.round_scales_to_power_of_2, _axis(operand, summed)
        factors.append(parts.cast(tensor, amax, cast.target_dtype, rounds, products, role, axis))
    first, second = factors
    return torch.mm(
        first if left.features[1] == summed else first.t(),
        second if right.features[0] == summed else second.t(),
    )


def _axis(operand: _Operand, summed: str) -> int | None:
    """The dimension of which a scale is taken, as torchao counts; None for all."""
    if operand.is_tensorwise:
        return None
    return 0 if operand.features[0] == summed else -1


def _products_of(config: Float8LinearConfig, num_tokens: Any) -> LinearMMConfig:
    """torchao's settings of the products, as Float8Linear makes them of `config`. A weight's
    gradient sums over `num_tokens`, which the device takes in multiples of 16. Zeros are added
    unless it is known to be one.
    """
    # A symbolic length is not asked: each answer would be a guard, and a graph of its own.
    is_whole = type(num_tokens) is int and num_tokens % 16 == 0
    gemms = (
        config.gemm_config_output,
        config.gemm_config_grad_input,
        config.gemm_config_grad_weight,
    )
    pads = (config.pad_inner_dim, config.pad_inner_dim, config.pad_inner_dim or not is_whole)
    return LinearMMConfig(
        *(
            ScaledMMConfig(config.emulate, gemm.use_fast_accum, False, pad)
            for gemm, pad in zip(gemms, pads, strict=True)
        )
    )
