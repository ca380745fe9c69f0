"""Logits of a head's output, and the numbers of a row that passes over them find and take.

Legend: as in `logits`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class LogitTransform:
    """Map of a model from the output x of its head to logits: cap tanh(scale x / cap), or scale x
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

    def over(self, temperature: float) -> LogitTransform:
        """The transform of the same logits divided by `temperature`."""
        return LogitTransform(self.scale / temperature, self.cap / temperature)

    def logits(self, outputs: Tensor) -> Tensor:
        """Logits in fp32; a copy where they are not `outputs` themselves."""
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
    """Sums over each row of logits, fp32 [T]."""

    max_T: Tensor
    power_T: Tensor
    """Sum of exp(logit - max)."""
    expected_T: Tensor
    """Sum of exp(logit - max) logit, where asked for."""
    sum_T: Tensor


class RowGradients(NamedTuple):
    """Terms of the gradient of each row, fp32."""

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
