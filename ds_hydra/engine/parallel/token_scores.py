"""Log-probabilities of tokens, cross entropy, and what else losses ask of logits that may be cut by
vocabulary; in the memory of the logits where these may be overwritten.

Legend: T tokens of a packed micro-batch, V this rank's columns of the vocabulary, K candidates.
"""

from __future__ import annotations

from dataclasses import dataclass
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


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenScores:
    """What a model says of the tokens of a packed micro-batch, fp32; 0 where none is predicted."""

    counts_T: Tensor
    """[T] bool: whether a token is predicted there."""
    log_probs_T: Tensor
    """[T]: of the token that comes next."""
    log_normaliser_T: Tensor
    """[T]: log of the sum of exp(logits)."""
    entropy_T: Tensor | None = None
    """[T]: of the prediction, where asked for."""
    mean_log_prob_T: Tensor | None = None
    """[T]: over the vocabulary, where asked for."""
    candidate_log_probs_TK: Tensor | None = None
    """[T, K]: of given tokens, where asked for."""
    is_top1_T: Tensor | None = None
    """[T]: 1 where no other token is more probable than the one that comes next."""
    mean_logit_T: Tensor | None = None
    """[T]: over the vocabulary."""


class _Logits(torch.autograd.Function):
    """Target logit, log-normaliser, expected logit, sum of logits, whether the target's is the
    largest [T], and candidates' logits [T, K] of the whole vocabulary.

    Chunk by chunk in fp32; the gradient takes the place of the logits where nothing else needs
    them. Collective over the TP group in forward; every member has all outputs, and the gradient of
    its own columns needs no other's.
    """

    @staticmethod
    def forward(
        ctx: Any,
        logits_TV: Tensor,
        targets_T: Tensor,
        candidates_TK: Tensor,
        tp: TensorParallel,
        first_column: int,
        needs_expected: bool,
        reuses_logits: bool,
    ) -> tuple[Tensor, ...]:
        logits_TV = logits_TV.detach()
        ids_TK = torch.cat([targets_T.unsqueeze(-1), candidates_TK], dim=-1) - first_column
        inside_TK = (ids_TK >= 0) & (ids_TK < logits_TV.shape[-1])
        ids_TK = ids_TK.masked_fill(~inside_TK, 0)
        given_TK = logits_TV.gather(-1, ids_TK).float().masked_fill(~inside_TK, 0.0)
        max_T = logits_TV.amax(dim=-1).float()
        if tp.size > 1:
            dist.all_reduce(max_T, op=dist.ReduceOp.MAX, group=tp.group)
        sums = []
        for rows in micro_batch_chunks(logits_TV):
            chunk = logits_TV[rows].float()
            powers = (chunk - max_T[rows, None]).exp_()
            expected = (powers * chunk).sum(-1) if needs_expected else powers.new_zeros(len(chunk))
            sums.append(torch.stack([powers.sum(-1), expected, chunk.sum(-1)]))
        sums_T = torch.cat([torch.cat(sums, dim=1), given_TK.T])
        if tp.size > 1:
            dist.all_reduce(sums_T, group=tp.group)
        power_T, expected_T, sum_T, target_T = sums_T[:4]
        normaliser_T, expected_T = power_T.log() + max_T, expected_T / power_T
        ctx.save_for_backward(ids_TK, inside_TK, normaliser_T, expected_T)
        ctx.logits_TV, ctx.reuses_logits = logits_TV, reuses_logits
        ctx.needs_expected = needs_expected
        is_top1_T = (target_T >= max_T).float()
        ctx.mark_non_differentiable(is_top1_T)
        return target_T, normaliser_T, expected_T, sum_T, is_top1_T, sums_T[4:].T.contiguous()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        ids_TK, inside_TK, normaliser_T, expected_T = ctx.saved_tensors
        of_target_T, of_normaliser_T, of_expected_T, of_sum_T, _, of_candidates_TK = grads
        logits_TV, ctx.logits_TV = ctx.logits_TV, None
        grad_TV = logits_TV if ctx.reuses_logits else torch.empty_like(logits_TV)
        given_TK = torch.cat([of_target_T.unsqueeze(-1), of_candidates_TK], dim=-1) * inside_TK
        for rows in micro_batch_chunks(logits_TV):
            chunk = logits_TV[rows].float()
            weight = of_normaliser_T[rows, None]
            if ctx.needs_expected:
                # d(expected logit) / d(logit) = p * (1 + logit - expected)
                weight = weight + of_expected_T[rows, None] * (1 + chunk - expected_T[rows, None])
            grad = (chunk - normaliser_T[rows, None]).exp_().mul_(weight).add_(of_sum_T[rows, None])
            grad_TV[rows] = grad.scatter_add_(-1, ids_TK[rows], given_TK[rows]).to(grad_TV.dtype)
        return grad_TV, *[None] * 6


def score_tokens(
    logits_TV: Tensor,
    targets_T: Tensor,
    tp: TensorParallel,
    *,
    first_column: int,
    num_columns: int,
    entropy: bool = False,
    mean: bool = False,
    candidates_TK: Tensor | None = None,
) -> TokenScores:
    """Scores of `targets_T` by `logits_TV`, this rank's columns from `first_column` on of
    `num_columns`, which may be overwritten.

    `entropy`, `mean` and `candidates_TK` (token ids) ask for what they are called. Collective over
    the TP group; every member gets the scores.
    """
    counts_T = targets_T != IGNORED_LABEL
    ids_TK = targets_T.new_empty((len(targets_T), 0)) if candidates_TK is None else candidates_TK
    outputs = _Logits.apply(
        logits_TV, targets_T, ids_TK, tp, first_column, entropy, is_product(logits_TV)
    )
    target_T, normaliser_T, expected_T, sum_T, is_top1_T, given_TK = outputs

    def where_counted(values: Tensor) -> Tensor:
        counted = counts_T if values.dim() == 1 else counts_T.unsqueeze(-1)
        return torch.where(counted, values, 0.0)

    return TokenScores(
        counts_T=counts_T,
        log_probs_T=where_counted(target_T - normaliser_T),
        log_normaliser_T=where_counted(normaliser_T),
        entropy_T=where_counted(normaliser_T - expected_T) if entropy else None,
        mean_log_prob_T=where_counted(sum_T / num_columns - normaliser_T) if mean else None,
        candidate_log_probs_TK=None
        if candidates_TK is None
        else where_counted(given_TK - normaliser_T.unsqueeze(-1)),
        is_top1_T=where_counted(is_top1_T),
        mean_logit_T=where_counted(sum_T.detach() / num_columns),
    )
