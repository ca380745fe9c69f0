"""Log-probabilities of tokens, and what else losses ask of logits that may be cut by vocabulary.

Legend: T tokens of a packed micro-batch, V this rank's columns of the vocabulary, K candidates.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ds_hydra.engine.parallel.cross_entropy import is_product, micro_batch_chunks
from ds_hydra.engine.parallel.tensor_parallel import TensorParallel
from ds_hydra.sampler.data.examples import IGNORED_LABEL


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
