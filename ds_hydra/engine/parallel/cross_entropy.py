"""Cross entropy of this rank's columns of the vocabulary, in the memory of the logits where these
may be overwritten.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ds_hydra.engine.parallel.tensor_parallel import TensorParallel
from ds_hydra.sampler.data.examples import IGNORED_LABEL

_CHUNK_ELEMENTS, _LARGE_CHUNK_ELEMENTS = {"cpu": 2**18}, 2**26
"""Logits worked on at a time: on a CPU what its cache holds, elsewhere 256 MiB in fp32."""


class _SummedCrossEntropy(torch.autograd.Function):
    """`scale` times the sum of cross entropies; logits may be split over the group by vocabulary.

    The gradient is computed in forward, chunk by chunk, and takes the place of the logits where
    nothing else needs them: of the micro-batch's largest tensor there is one copy instead of three.
    """

    @staticmethod
    def forward(
        ctx: Any,
        logits_TV: Tensor,
        targets_T: Tensor,
        tp: TensorParallel,
        first_column: int,
        scale: float,
        reuses_logits: bool,
    ) -> Tensor:
        chunks = micro_batch_chunks(logits_TV)
        counts_T = targets_T != IGNORED_LABEL
        local_T = targets_T - first_column
        inside_T = counts_T & (local_T >= 0) & (local_T < logits_TV.shape[-1])
        local_T = local_T.masked_fill(~inside_T, 0)
        target_T = (
            logits_TV.gather(-1, local_T.unsqueeze(-1))
            .squeeze(-1)
            .float()
            .masked_fill(~inside_T, 0.0)
        )
        needs_gradient = ctx.needs_input_grad[0]
        logits_TV = logits_TV.detach()
        grad_TV = logits_TV if reuses_logits or not needs_gradient else torch.empty_like(logits_TV)
        logsumexp_T = torch.empty_like(target_T)

        def write_gradient(rows: slice) -> None:
            if needs_gradient:
                weights = counts_T[rows] * scale
                grad = (
                    (logits_TV[rows].float() - logsumexp_T[rows, None])
                    .exp_()
                    .mul_(weights.unsqueeze(-1))
                )
                hits = (weights * inside_T[rows]).neg_().to(grad.dtype)
                grad_TV[rows] = grad.scatter_add_(-1, local_T[rows, None], hits.unsqueeze(-1))

        if tp.size == 1:
            for rows in chunks:
                logsumexp_T[rows] = logits_TV[rows].float().logsumexp(dim=-1)
                write_gradient(rows)
        else:
            max_T = logits_TV.amax(dim=-1).float()
            dist.all_reduce(max_T, op=dist.ReduceOp.MAX, group=tp.group)
            sums_T = [(logits_TV[r].float() - max_T[r, None]).exp_().sum(dim=-1) for r in chunks]
            sums_2T = torch.stack([torch.cat(sums_T), target_T])
            dist.all_reduce(sums_2T, group=tp.group)
            logsumexp_T, target_T = sums_2T[0].log() + max_T, sums_2T[1]
            for rows in chunks:
                write_gradient(rows)
        ctx.save_for_backward(grad_TV if needs_gradient else None)
        return (logsumexp_T - target_T).masked_fill(~counts_T, 0.0).sum() * scale

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None, None, None]:
        (grad_TV,) = ctx.saved_tensors
        # Nobody else has `grad_TV`. On a device reading `grad` would wait for it.
        if grad.device.type != "cpu" or float(grad) != 1.0:
            grad_TV.mul_(grad.to(grad_TV.dtype))
        return grad_TV, None, None, None, None, None


def micro_batch_chunks(logits_TV: Tensor) -> list[slice]:
    """Consecutive rows, as many at a time as are worked on together."""
    num_rows, num_columns = logits_TV.shape
    elements = _CHUNK_ELEMENTS.get(logits_TV.device.type, _LARGE_CHUNK_ELEMENTS)
    step = max(1, elements // max(1, num_columns))
    return [slice(begin, min(begin + step, num_rows)) for begin in range(0, num_rows, step)]


_VIEWS = {
    "SqueezeBackward1",
    *(f"{kind}Backward0" for kind in ("Select", "Slice", "View", "UnsafeView", "Unsqueeze")),
}
_PRODUCTS = {
    "MmBackward0",
    "AddmmBackward0",
    "BmmBackward0",
    "LinearBackward0",
    "_LinearOfMicroBatchBackward",
}
"""Autograd nodes of a matrix product; its backward does not read its output."""


def is_product(tensor: Tensor) -> bool:
    """Whether `tensor` is a matrix product that may be overwritten, seen through views."""
    node = tensor.grad_fn
    while node is not None and node.name() in _VIEWS:
        node = node.next_functions[0][0]
    return node is not None and node.name() in _PRODUCTS


def summed_cross_entropy(
    logits_TV: Tensor,
    targets_T: Tensor,
    tp: TensorParallel,
    scale: float = 1.0,
    first_column: int = 0,
) -> Tensor:
    """`scale` times the sum over tokens of the cross entropy in fp32; no rank holds another rank's
    logits.

    `logits_TV` are this rank's vocabulary columns from `first_column` on, and may be overwritten;
    targets equal to IGNORED_LABEL do not count. Collective over the TP group; every member gets the
    sum.
    """
    return _SummedCrossEntropy.apply(
        logits_TV, targets_T, tp, first_column, scale, is_product(logits_TV)
    )
