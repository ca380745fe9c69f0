"""Passes over logits: what a softmax of each row needs, and the gradient in their place.

Operators of torch do them on a CPU, as many rows at a time as its cache holds; elsewhere kernels of
Triton (`logit_kernels.py`), one pass each, where Triton is there.

Legend: T rows, V this rank's columns of the vocabulary, K given columns of each row.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from types import ModuleType
from typing import NamedTuple

import torch
from torch import Tensor

_ELEMENTS, _OTHER_ELEMENTS = {"cpu": 2**18}, 2**26
"""Logits worked on at a time by operators of torch: on a CPU what its cache holds, elsewhere 256
MiB in fp32.
"""


@dataclass(frozen=True, slots=True)
class LogitTransform:
    """What a model makes of the output x of its head: logits cap tanh(scale x / cap), or scale x
    where `cap` is 0.
    """

    scale: float = 1.0
    cap: float = 0.0

    @classmethod
    def find(cls, outputs: Tensor, logits: Tensor) -> LogitTransform | None:
        """The one that makes `logits` of `outputs`, whose last element any cap cuts off; None where
        there is none.
        """
        large, most = float(outputs.flatten()[-1]), float(logits.flatten()[-1])
        if not 0 < most < float("inf"):
            return None
        found = cls(cap=most) if most < large * 1e-4 else cls(scale=most / large)
        return found if torch.allclose(found.logits(outputs), logits, rtol=1e-5) else None

    def logits(self, outputs: Tensor) -> Tensor:
        """In fp32; a copy where they are not `outputs` themselves."""
        if self == LogitTransform():
            return outputs.float()
        logits = outputs.float() * self.scale
        return logits.div_(self.cap).tanh_().mul_(self.cap) if self.cap else logits

    def multiply_slope_(self, grad: Tensor, logits: Tensor) -> Tensor:
        """The gradient by the head's output of `grad`, which is by `logits`; in its memory."""
        if self.cap:
            grad.mul_(1.0 - (logits / self.cap).square_())
        return grad.mul_(self.scale) if self.scale != 1.0 else grad


class RowSums(NamedTuple):
    """Of each row of logits, fp32 [T]."""

    max_T: Tensor
    power_T: Tensor
    """Sum of exp(logit - max)."""
    expected_T: Tensor
    """Sum of exp(logit - max) logit, where asked for."""
    sum_T: Tensor


class RowGradients(NamedTuple):
    """What the gradient of each row follows from, fp32."""

    normaliser_T: Tensor
    """[T]: log of the sum of exp(logits) over the whole vocabulary."""
    expected_T: Tensor
    """[T]: logit that the prediction expects, where anything is asked of it."""
    of_normaliser_T: Tensor
    of_expected_T: Tensor | None
    of_sum_T: Tensor | None
    """[T]: gradients by these and by the sum of the logits; None for none."""
    ids_TK: Tensor
    """[T, K] int64: columns with gradients of their own; -1 for another rank's."""
    of_given_TK: Tensor
    """[T, K]: these gradients; those of one column add up."""


def sum_rows(outputs_TV: Tensor, transform: LogitTransform, *, needs_expected: bool) -> RowSums:
    """What a softmax of each row needs; `outputs_TV` are the head's."""
    if (kernels := find_kernels(outputs_TV.device.type)) is not None:
        return RowSums(*kernels.sum_rows(outputs_TV, transform, needs_expected))
    found = []
    for rows in _chunks(outputs_TV):
        logits = transform.logits(outputs_TV[rows])
        max_T, sum_T = logits.amax(dim=-1), logits.sum(dim=-1)
        # Less the largest of the row: no power is above 1, so none overflows.
        powers = (logits - max_T.unsqueeze(-1)).exp_()
        power_T = powers.sum(dim=-1)
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
