"""Tensor parallel collectives around a Hugging Face model's own modules, from its tp plan.

Hooks read the current group from a `TensorParallel` value when they run, so one set of hooks serves every TP
degree that strategies choose. Legend: T tokens of the packed row, H hidden, V vocabulary rows of this rank.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

IGNORED_LABEL = -100
"""Label of a position that does not count in the loss (transformers' convention)."""


class TensorParallel:
    """The TP group in which this rank runs its stage now; size 1 switches every hook off."""

    def __init__(self) -> None:
        self.group: dist.ProcessGroup | None = None
        self.size = 1
        self.rank = 0
        self.vocab_begin = 0
        self._shared_input: Tensor | None = None
        self._shared_copy: Tensor | None = None

    def enter(self, group: dist.ProcessGroup | None, size: int, rank: int, vocab_begin: int) -> None:
        """Use `group` from now on; `vocab_begin` is the first vocabulary row of this rank's slice."""
        self.group, self.size, self.rank, self.vocab_begin = group, size, rank, vocab_begin
        self.forget_input()

    def copy_to_group(self, hidden: Tensor) -> Tensor:
        """Identity whose backward sums gradients over the group, shared by modules with the same input.

        q, k and v (gate and up) read one tensor: one all-reduce serves all of them.
        """
        if self._shared_input is not hidden:
            self._shared_input, self._shared_copy = hidden, _CopyToGroup.apply(hidden, self.group)
        assert self._shared_copy is not None
        return self._shared_copy

    def forget_input(self) -> None:
        """Drop the shared input, so that it does not outlive its stage."""
        self._shared_input = self._shared_copy = None


class _CopyToGroup(torch.autograd.Function):
    """Identity in forward, all-reduce of the gradient in backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        grad = grad.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(grad, group=ctx.group)
        return grad, None


class _ReduceFromGroup(torch.autograd.Function):
    """All-reduce in forward, identity in backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        x = x.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


def hook_colwise(module: nn.Module, tp: TensorParallel) -> None:
    """Columnwise parallel linear: full input, sliced output features."""

    def before(_module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
        return (tp.copy_to_group(args[0]), *args[1:]) if tp.size > 1 else None

    module.register_forward_pre_hook(before)


def hook_rowwise(module: nn.Module, tp: TensorParallel) -> None:
    """Rowwise parallel linear: sliced input features, partial outputs summed over the group."""

    def after(_module: nn.Module, _args: tuple[Any, ...], output: Tensor) -> Tensor | None:
        return _ReduceFromGroup.apply(output, tp.group) if tp.size > 1 else None

    module.register_forward_hook(after)


def hook_embedding(module: nn.Embedding, tp: TensorParallel) -> None:
    """Vocabulary parallel embedding: rows of other ranks count as zero, then partial outputs are summed."""
    outside: list[Tensor] = []

    def before(_module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
        if tp.size == 1:
            return None
        local_ids = args[0] - tp.vocab_begin
        mask = (local_ids < 0) | (local_ids >= module.weight.shape[0])
        outside.append(mask)
        return (local_ids.masked_fill(mask, 0), *args[1:])

    def after(_module: nn.Module, _args: tuple[Any, ...], output: Tensor) -> Tensor | None:
        if tp.size == 1:
            return None
        return _ReduceFromGroup.apply(output.masked_fill(outside.pop().unsqueeze(-1), 0.0), tp.group)

    module.register_forward_pre_hook(before)
    module.register_forward_hook(after)


class _VocabParallelCrossEntropy(torch.autograd.Function):
    """Sum of cross entropies of tokens whose logits are split over the group by vocabulary."""

    @staticmethod
    def forward(ctx: Any, logits_TV: Tensor, targets_T: Tensor, tp: TensorParallel) -> Tensor:
        logits_TV = logits_TV.float()
        max_T = logits_TV.max(dim=-1).values
        dist.all_reduce(max_T, op=dist.ReduceOp.MAX, group=tp.group)
        exp_TV = (logits_TV - max_T.unsqueeze(-1)).exp_()
        local_T = targets_T - tp.vocab_begin
        outside_T = (local_T < 0) | (local_T >= logits_TV.shape[-1])
        local_T = local_T.masked_fill(outside_T, 0)
        target_T = logits_TV.gather(-1, local_T.unsqueeze(-1)).squeeze(-1) - max_T
        sums_2T = torch.stack([exp_TV.sum(dim=-1), target_T.masked_fill(outside_T, 0.0)])
        dist.all_reduce(sums_2T, group=tp.group)
        counts_T = targets_T != IGNORED_LABEL
        ctx.save_for_backward(exp_TV.div_(sums_2T[0].unsqueeze(-1)), local_T, outside_T, counts_T)
        return (sums_2T[0].log() - sums_2T[1]).masked_fill(~counts_T, 0.0).sum()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        probabilities_TV, local_T, outside_T, counts_T = ctx.saved_tensors
        one_T = (~outside_T).to(probabilities_TV.dtype)
        grad_TV = probabilities_TV.scatter_add(-1, local_T.unsqueeze(-1), -one_T.unsqueeze(-1))
        return grad_TV.mul_(counts_T.unsqueeze(-1) * grad), None, None


def summed_cross_entropy(logits_TV: Tensor, targets_T: Tensor, tp: TensorParallel) -> Tensor:
    """Sum over tokens of the cross entropy in fp32; no rank holds another rank's logits.

    `logits_TV` are this rank's vocabulary columns; targets equal to IGNORED_LABEL do not count. Collective
    over the TP group; every member gets the sum.
    """
    if tp.size == 1:
        return F.cross_entropy(logits_TV.float(), targets_T, ignore_index=IGNORED_LABEL, reduction="sum")
    return _VocabParallelCrossEntropy.apply(logits_TV, targets_T, tp)
