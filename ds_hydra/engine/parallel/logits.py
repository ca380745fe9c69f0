"""Logits of a head's output: passes over them that find what a softmax of each row needs and put
the gradient in their place; and scores of tokens, which losses see, where logits may be cut by
vocabulary.

Operators of torch do them on a CPU, as many rows at a time as its cache holds; elsewhere kernels of
Triton (`logit_kernels.py`), one pass each, where Triton is there.

Legend: T rows, tokens of a packed micro-batch or of a part of it, V this rank's columns of the
vocabulary, K given columns of each row (candidates).
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from types import ModuleType

import torch
import torch.distributed as dist
from torch import Tensor

from ds_hydra.engine.parallel.logit_transform import LogitTransform, RowGradients, RowSums
from ds_hydra.engine.parallel.tensor_parallel import TensorParallel
from ds_hydra.sampler.data.examples import IGNORED_LABEL

_ELEMENTS, _OTHER_ELEMENTS = {"cpu": 2**18}, 2**26
"""Logits worked on at a time by operators of torch: on a CPU as many as its cache holds, elsewhere
256 MiB in fp32.
"""


def sum_rows(outputs_TV: Tensor, transform: LogitTransform, *, needs_expected: bool) -> RowSums:
    """Compute the sums for a softmax of each row; `outputs_TV` are the head's."""
    if (kernels := find_kernels(outputs_TV.device.type)) is not None:
        return RowSums(*kernels.sum_rows(outputs_TV, transform, needs_expected))
    found = []
    for rows in _chunks(outputs_TV):
        logits = transform.logits(outputs_TV[rows])
        max_T, sum_T = logits.amax(dim=-1), logits.sum(dim=-1)
        # Less the largest of the row: no power is above 1, so none overflows.
        powers = (logits - max_T.unsqueeze(-1)).exp_()
        power_T = powers.sum(dim=-1)
        # A stand-in where nobody asks, so that there are four sums in any case.
        expected_T = powers.mul_(logits).sum(dim=-1) if needs_expected else power_T
        found.append(torch.stack([max_T, power_T, expected_T, sum_T]))
    return RowSums(*torch.cat(found, dim=1))


def write_gradient(outputs_TV: Tensor, transform: LogitTransform, of: RowGradients) -> None:
    """Put the gradient by the head's output in its place."""
    if (kernels := find_kernels(outputs_TV.device.type)) is not None:
        kernels.write_gradient(outputs_TV, transform, of)
        return
    is_other_TK = of.ids_TK < 0
    # Columns of other ranks add 0 to column 0, which every rank has.
    ids_TK, of_given_TK = of.ids_TK.clamp(min=0), of.of_given_TK.masked_fill(is_other_TK, 0.0)
    for rows in _chunks(outputs_TV):
        logits = transform.logits(outputs_TV[rows])
        grad = (logits - of.normaliser_T[rows, None]).exp_()
        weight = of.of_normaliser_T[rows, None]
        if of.of_expected_T is not None:
            # d(expected logit) / d(logit) = p * (1 + logit - expected)
            above = 1.0 + logits - of.expected_T[rows, None]
            weight = above.mul_(of.of_expected_T[rows, None]).add_(weight)
        grad.mul_(weight)
        if of.of_sum_T is not None:
            grad.add_(of.of_sum_T[rows, None])
        grad.scatter_add_(-1, ids_TK[rows], of_given_TK[rows])
        outputs_TV[rows] = transform.multiply_slope_(grad, logits)


_DEVICES_OF_TRITON = ("cuda", "xpu")  # ROCm's are "cuda" too


@functools.cache
def find_kernels(device_type: str) -> ModuleType | None:
    """Kernels of Triton for such a device; None where operators of torch do the work."""
    if device_type not in _DEVICES_OF_TRITON:
        return None
    try:
        from ds_hydra.engine.parallel import logit_kernels
    except ImportError:
        return None
    return logit_kernels


def _chunks(outputs_TV: Tensor) -> Iterator[slice]:
    num_rows, num_columns = outputs_TV.shape
    elements = _ELEMENTS.get(outputs_TV.device.type, _OTHER_ELEMENTS)
    step = max(1, elements // max(1, num_columns))
    return (slice(begin, min(begin + step, num_rows)) for begin in range(0, num_rows, step))


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenScores:
    """Scores of the tokens of a packed micro-batch, fp32; 0 where none is predicted."""

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


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """This rank's columns of the vocabulary, and the model's transform of them."""

    tp: TensorParallel
    num_columns: int
    """Columns of all ranks of the TP group."""
    transform: LogitTransform


class ScoredLogits:
    """Logits of some tokens, their scores of targets and candidates, and the gradient that follows
    from that of the `scores`.

    `outputs_TV` of the head are this rank's columns. `entropy`, `mean` and `candidates_TK` (token
    ids) ask for what they are called. Collective over the TP group; every member has the scores,
    and the gradient of its own columns needs no other's.
    """

    def __init__(
        self,
        outputs_TV: Tensor,
        targets_T: Tensor,
        vocabulary: Vocabulary,
        *,
        entropy: bool = False,
        mean: bool = False,
        candidates_TK: Tensor | None = None,
    ):
        self._outputs_TV, self._transform = outputs_TV, vocabulary.transform
        tp = vocabulary.tp
        ids_TK = targets_T.unsqueeze(-1)
        if candidates_TK is not None:
            ids_TK = torch.cat([ids_TK, candidates_TK], dim=-1)
        ids_TK = ids_TK - tp.first_row(vocabulary.num_columns)
        is_other_TK = (ids_TK < 0) | (ids_TK >= outputs_TV.shape[-1])
        self._ids_TK = ids_TK.masked_fill(is_other_TK, -1)
        # Columns of other ranks read column 0 here, and are 0 below.
        given_TK = outputs_TV.gather(-1, self._ids_TK.clamp(min=0))
        given_TK = self._transform.logits(given_TK).masked_fill(is_other_TK, 0.0)
        own = sum_rows(outputs_TV, self._transform, needs_expected=entropy)
        max_T, power_T, expected_T, sum_T = own
        if tp.size > 1:
            # As an online softmax joins its parts: one factor, never above 1, brings this rank's
            # powers, which are relative to its own maximum, to the maximum of all.
            max_T = max_T.clone()
            dist.all_reduce(max_T, op=dist.ReduceOp.MAX, group=tp.group)
            factor_T = (own.max_T - max_T).exp_()
            sums = torch.stack([power_T * factor_T, expected_T * factor_T, sum_T])
            # One all-reduce for all: of a given column each rank but its owner adds 0.
            sums = torch.cat([sums, given_TK.T])
            dist.all_reduce(sums, group=tp.group)
            (power_T, expected_T, sum_T), given_TK = sums[:3], sums[3:].T.contiguous()
        # Never the log of 0: the largest logit of a row has the power 1.
        self._normaliser_T, self._expected_T = power_T.log() + max_T, expected_T / power_T
        self._sum_T, self._given_TK = sum_T.contiguous(), given_TK
        # What the scores depend on, so that losses are differentiated by these numbers alone
        self._leaves = [self._normaliser_T, self._expected_T, self._sum_T, self._given_TK]
        if torch.is_grad_enabled():
            self._leaves = [leaf.requires_grad_() for leaf in self._leaves]
        counts_T = targets_T != IGNORED_LABEL
        normaliser_T, expected_T, sum_T, given_TK = self._leaves

        def where_counted(values: Tensor) -> Tensor:
            counted = counts_T if values.dim() == 1 else counts_T.unsqueeze(-1)
            return torch.where(counted, values, 0.0)

        num_columns = vocabulary.num_columns
        self.scores = TokenScores(
            counts_T=counts_T,
            log_probs_T=where_counted(given_TK[:, 0] - normaliser_T),
            log_normaliser_T=where_counted(normaliser_T),
            entropy_T=where_counted(normaliser_T - expected_T) if entropy else None,
            mean_log_prob_T=where_counted(sum_T / num_columns - normaliser_T) if mean else None,
            candidate_log_probs_TK=None
            if candidates_TK is None
            else where_counted(given_TK[:, 1:] - normaliser_T.unsqueeze(-1)),
            is_top1_T=where_counted((given_TK[:, 0].detach() >= max_T).float()),
            mean_logit_T=where_counted(sum_T.detach() / num_columns),
        )

    def write_gradient(self, value: Tensor) -> None:
        """Put the gradient of `value`, a function of the scores, in the place of the head's
        outputs.
        """
        grads: list[Tensor | None] = [None] * 4
        # A constant loss rightly trains nothing.
        if value.requires_grad:
            grads = list(torch.autograd.grad(value, self._leaves, allow_unused=True))
        of_normaliser_T, of_expected_T, of_sum_T, of_given_TK = grads
        if of_normaliser_T is None:
            of_normaliser_T = torch.zeros_like(self._normaliser_T)
        of = RowGradients(
            normaliser_T=self._normaliser_T.detach(),
            expected_T=self._expected_T.detach(),
            of_normaliser_T=of_normaliser_T,
            of_expected_T=of_expected_T,
            of_sum_T=of_sum_T,
            ids_TK=self._ids_TK,
            of_given_TK=torch.zeros_like(self._given_TK) if of_given_TK is None else of_given_TK,
        )
        with torch.no_grad():
            write_gradient(self._outputs_TV, self._transform, of)
