"""Latency coefficients out of measured times: non-negative least squares on T(l) = a l^2 + b l +
c.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np
import numpy.typing as npt

from ds_hydra.strategy.profiles.profile import LatencyModel

FloatArray = npt.NDArray[np.float64]

_SATURATION = 0.85
"""UtilLen(P) is the micro-batch length at which P reaches this share of its best tokens/s (App. C).
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class LatencyFit:
    """Fitted model, its relative residual at every measured length, and R^2 of the times."""

    model: LatencyModel
    lengths_tokens: tuple[int, ...]
    relative_residuals: tuple[float, ...]
    r_squared: float


def fit_latency(
    lengths_tokens: Sequence[int],
    times_ms: Sequence[float],
    num_sequences: Sequence[int] | None = None,
) -> LatencyFit:
    """Coefficients >= 0 that minimise the squared relative error of T for the measured
    micro-batches.

    Micro-batch i packs `num_sequences[i]` sequences (1 if not given) of `lengths_tokens[i]` tokens
    each.

    Relative, because a plan is made of micro-batches of all lengths. With three unknowns the exact
    non-negative optimum is the best unconstrained fit over all subsets of terms whose coefficients
    come out >= 0. Raises ValueError for fewer than two different lengths or times that are not
    positive.
    """
    lengths = np.asarray(lengths_tokens, dtype=np.float64)
    times = np.asarray(times_ms, dtype=np.float64)
    if len(set(lengths.tolist())) < 2 or not (np.isfinite(times) & (times > 0)).all():
        raise ValueError(
            f"need positive, finite times at two lengths or more, got {times_ms} at {lengths_tokens}"
        )
    counts = (
        np.ones_like(lengths)
        if num_sequences is None
        else np.asarray(num_sequences, dtype=np.float64)
    )
    terms = (
        np.stack([counts * lengths**2, counts * lengths, np.ones_like(lengths)], axis=1)
        / times[:, None]
    )
    # Rows are divided by their times, so that the residuals are relative errors.
    best = solve_non_negative(terms, np.ones(len(times)))
    predicted = (terms @ best) * times
    spread = float(np.sum((times - times.mean()) ** 2))
    return LatencyFit(
        model=LatencyModel(
            quadratic_ms=float(best[0]), linear_ms=float(best[1]), constant_ms=float(best[2])
        ),
        lengths_tokens=tuple(int(length) for length in lengths),
        relative_residuals=tuple(float(r) for r in predicted / times - 1),
        r_squared=1.0 - float(np.sum((times - predicted) ** 2)) / spread if spread else 1.0,
    )


def solve_non_negative(terms: FloatArray, target: FloatArray) -> FloatArray:
    """The x >= 0 of three terms that minimises |terms x - target|^2; terms [num_samples, 3]."""
    best, best_error = np.zeros(3), np.inf
    for size in (1, 2, 3):
        for subset in combinations(range(3), min(size, len(target))):
            solution = np.linalg.lstsq(terms[:, subset], target, rcond=None)[0]
            error = float(np.sum((terms[:, subset] @ solution - target) ** 2))
            if (solution >= 0).all() and error < best_error - 1e-15:
                best, best_error = np.zeros(3), error
                best[list(subset)] = solution
    return best


def saturation_tokens(model: LatencyModel, longest_tokens: int) -> int:
    """UtilLen: shortest micro-batch of one sequence, up to `longest_tokens`, at 85% of the best
    tokens/s in range.
    """
    lengths = np.unique(np.geomspace(1, max(longest_tokens, 1), 512).astype(np.int64))
    times = model.quadratic_ms * lengths**2 + model.linear_ms * lengths + model.constant_ms
    rates = lengths / np.maximum(times, 1e-12)
    return int(lengths[np.argmax(rates >= _SATURATION * rates.max())])
