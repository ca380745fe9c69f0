"""Sequence parallelism inside a TP group: between sliced layers each rank has a shard of the
micro-batch's tokens.

[Note: Shards of a micro-batch]
Under `hydra.tp_sequence_parallel` residual stream and norms are not repeated on every rank of a TP
group: a rank has T / TP tokens of a micro-batch, of a sequence shard of it under SP (Korthikanti et
al. 2022, "Reducing Activation Recomputation in Large Transformer Models", Sec. 4.2.2). Before a
block (attention, MLP, head) shards are all-gathered, after it partial outputs are reduce-scattered,
where TP alone reduces whole micro-batches; in backward the other way round. Parameters outside
blocks see the tokens of a shard alone, so their gradient is a partial sum on every rank of the
group: all of them push it, and owners add them up (`Slicing.REPLICATED_PARTIAL_GRAD`). The bias of
a row-wise layer is added by the first rank to its partial output, and sees the gradient of all
tokens. Micro-batches are padded to a multiple of TP as in [Note: Sequence shards of a micro-batch];
stages hand on shards.

The gathered micro-batch lives in forward alone. Linears that read it keep the shard, and gather
once more in backward where they have weights to train.

Legend: B = 1 micro-batch (modules may leave that out), T its tokens, t = T / TP those of a shard, H
hidden size, O output features.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

_all_gather: Callable[..., Any] = (
    getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
)
_reduce_scatter: Callable[..., Any] = (
    getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
)
"""The second names are those of torch before 2.13."""


COLUMN, ROW = "column-wise", "row-wise"
"""Sides of a block: linears whose output features are cut, and those whose input features are."""


@dataclass(frozen=True, slots=True)
class TokenShards:
    """The ranks of a TP group in the order of their shards. Methods are collective over them."""

    group: dist.ProcessGroup | None
    size: int

    def gather(self, shard_BtH: Tensor) -> tuple[Tensor, Callable[[], None]]:
        """[1, T, H] of all shards, valid once the returned function has been called."""
        shard = shard_BtH.flatten(0, -2).contiguous()
        micro_batch = shard.new_empty(len(shard) * self.size, shard.shape[1])
        work = _all_gather(micro_batch, shard, group=self.group, async_op=True)
        return micro_batch.view(*shard_BtH.shape[:-2], *micro_batch.shape), work.wait

    def reduce_scatter(self, partial_BTH: Tensor) -> Tensor:
        """[1, t, H]: this rank's shard of the sum of all ranks' `partial_BTH`."""
        shard, wait = self.post_reduce_scatter(partial_BTH)
        wait()
        return shard

    def post_reduce_scatter(self, partial_BTH: Tensor) -> tuple[Tensor, Callable[[], None]]:
        """The same, valid once the returned function has been called."""
        partial = partial_BTH.flatten(0, -2).contiguous()
        shard = partial.new_empty(partial.shape[0] // self.size, partial.shape[1])
        # Gloo would reduce whole micro-batches, which takes more than twice as long
        if partial.device.type == "cpu":
            parts = torch.empty_like(partial)
            work = dist.all_to_all_single(parts, partial, group=self.group, async_op=True)

            def wait() -> None:
                work.wait()
                torch.sum(parts.unflatten(0, (self.size, -1)), dim=0, out=shard)

            return shard.view(*partial_BTH.shape[:-2], *shard.shape), wait
        work = _reduce_scatter(shard, partial, group=self.group, async_op=True)
        return shard.view(*partial_BTH.shape[:-2], *shard.shape), work.wait


class LoneShard(TokenShards):
    """One rank that computes what a rank of a group of `size` does, with copies in place of what
    others would send.
    """

    def gather(self, shard_BtH: Tensor) -> tuple[Tensor, Callable[[], None]]:
        """[1, T, H]: this shard over and over."""
        return torch.cat([shard_BtH] * self.size, dim=-2), _nothing

    def post_reduce_scatter(self, partial_BTH: Tensor) -> tuple[Tensor, Callable[[], None]]:
        """[1, t, H]: the first shard of `partial_BTH`."""
        return partial_BTH.narrow(-2, 0, partial_BTH.shape[-2] // self.size).clone(), _nothing


@dataclass(slots=True)
class GatheredAgain:
    """The micro-batch that the linears of one block share in backward; gathered by the first,
    dropped after the last.
    """

    num_waiting: int = 0
    micro_batch: Tensor | None = None

    def get(self, shard_BtH: Tensor, shards: TokenShards) -> tuple[Tensor, Callable[[], None]]:
        """The micro-batch, valid once the returned function has been called."""
        if self.micro_batch is not None:
            return self.micro_batch, _nothing
        self.micro_batch, wait = shards.gather(shard_BtH)
        return self.micro_batch, wait

    def let_go(self) -> None:
        """One of the linears has done its backward pass."""
        self.num_waiting -= 1
        if self.num_waiting <= 0:
            self.micro_batch = None


def _nothing() -> None:
    pass


@dataclass(frozen=True, slots=True)
class BlockInput:
    """What a running block reads."""

    micro_batch: Tensor
    """[1, T, H] of all shards."""
    shard: Tensor
    """[1, t, H] of this rank, detached."""
    again: GatheredAgain


class _GatherShards(torch.autograd.Function):
    """All-gather in forward; in backward the ranks' partial gradients are reduce-scattered."""

    @staticmethod
    def forward(ctx: Any, shard: Tensor, shards: TokenShards) -> Tensor:
        ctx.shards = shards
        micro_batch, wait = shards.gather(shard)
        wait()
        return micro_batch

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return ctx.shards.reduce_scatter(grad), None


class _ScatterSum(torch.autograd.Function):
    """Reduce-scatter of partial outputs in forward, all-gather of the gradient in backward."""

    @staticmethod
    def forward(ctx: Any, partial: Tensor, shards: TokenShards) -> Tensor:
        ctx.shards = shards
        return shards.reduce_scatter(partial)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        micro_batch, wait = ctx.shards.gather(grad)
        wait()
        return micro_batch, None


class _LinearOfMicroBatch(torch.autograd.Function):
    """A linear layer of the gathered micro-batch that keeps its shard only."""

    @staticmethod
    def forward(
        ctx: Any,
        micro_batch: Tensor,
        weight_OH: Tensor,
        bias_O: Tensor | None,
        block: BlockInput,
        shards: TokenShards,
    ) -> Tensor:
        ctx.shards, ctx.again = shards, block.again
        trains_weight, needs_grad = ctx.needs_input_grad[1], ctx.needs_input_grad[0]
        if trains_weight:
            ctx.again.num_waiting += 1
        ctx.save_for_backward(
            block.shard if trains_weight else None, weight_OH if needs_grad else None
        )
        return F.linear(micro_batch, weight_OH, bias_O)

    @staticmethod
    def backward(ctx: Any, grad_BTO: Tensor) -> tuple[Tensor | None, ...]:
        shard, weight_OH = ctx.saved_tensors
        micro_batch, wait = (None, _nothing) if shard is None else ctx.again.get(shard, ctx.shards)
        grad_TO = grad_BTO.flatten(0, -2)
        grad_micro_batch = None if weight_OH is None else grad_BTO @ weight_OH
        grad_bias = grad_TO.sum(dim=0) if ctx.needs_input_grad[2] else None
        grad_weight = None
        if micro_batch is not None:
            wait()
            grad_weight = grad_TO.T @ micro_batch.flatten(0, -2)
            ctx.again.let_go()
        return grad_micro_batch, grad_weight, grad_bias, None, None


@torch.compiler.disable
def gather_input(shard_BtH: Tensor, shards: TokenShards) -> BlockInput:
    """The whole micro-batch for a block that is about to run."""
    micro_batch: Tensor = _GatherShards.apply(shard_BtH, shards)
    return BlockInput(micro_batch, shard_BtH.detach(), GatheredAgain())


@torch.compiler.disable
def gather_shards(shard: Tensor, shards: TokenShards) -> Tensor:
    """[T, ...] of all shards [t, ...]; where it is differentiable, its gradients are parts of a
    sum.
    """
    whole: Tensor = _GatherShards.apply(shard.unsqueeze(0), shards)
    return whole.squeeze(0)


@torch.compiler.disable
def scatter_sum(partial_BTH: Tensor, shards: TokenShards) -> Tensor:
    """This rank's shard of the sum of the group's partial outputs."""
    shard: Tensor = _ScatterSum.apply(partial_BTH, shards)
    return shard


@torch.compiler.disable
def linear_of_micro_batch(linear: nn.Linear, block: BlockInput, shards: TokenShards) -> Tensor:
    """What `linear` makes of the micro-batch of `block`, without keeping that for backward."""
    output: Tensor = _LinearOfMicroBatch.apply(
        block.micro_batch, linear.weight, linear.bias, block, shards
    )
    return output


def find_blocks(layer: nn.Module, sides: Mapping[nn.Module, str]) -> Iterator[nn.Module]:
    """The modules of `layer` that read a whole micro-batch: parents of column-wise modules.

    `sides` are those of the modules that the tp plan slices, COLUMN or ROW. Raises ValueError
    saying what is in the way where the sliced modules of `layer` are not in blocks of column-wise
    modules and one row-wise module, which returns what the block does.
    """
    planned = {module for module in layer.modules() if sides.get(module) in (COLUMN, ROW)}
    for module in layer.modules():
        if "Attention" in type(module).__name__ and not planned & set(module.children()):
            raise ValueError("attention is not cut by heads")
    for block in layer.modules():
        found = [sides[child] for child in block.children() if child in planned]
        planned -= set(block.children())
        if not found:
            continue
        if block is layer or found.count(ROW) != 1 or len(found) == 1:
            name = "the layer itself" if block is layer else type(block).__name__
            raise ValueError(
                f"{name} has {found.count(COLUMN)} {COLUMN} and {found.count(ROW)} {ROW}"
            )
        yield block
    if planned:
        raise ValueError(f"{type(next(iter(planned))).__name__} is sliced by itself")


def input_name(block: nn.Module) -> str:
    """The argument of `block` that is the hidden state: its first."""
    return next(iter(inspect.signature(block.forward).parameters))
