"""How far the time of one micro-batch lies from what is known, as measured while training runs.

[Note: Spread of micro-batches] A rank computes n micro-batches of one scheme in an iteration, in
t_i where the profile says p_i. What the scheme, this rank and the whole machine are off in this
iteration is one factor of all n, and is not in

    d = log(t_i / p_i) - log(t_j / p_j)

Neighbours in order of predicted time a token are compared, of which the shorter takes half of the
longer at least: what T is off for long sequences and for short ones is nearly the same for both. Of
independent normal deviations with standard deviation s, d has sqrt(2) s, and half of all |d| are
below 0.6745 sqrt(2) s (0.6745 is the third quartile of the standard normal distribution). So s is
the median of |d| over 0.954. Up to half of the micro-batches may be disturbed, and their number
counts, not how far they are off.

Each rank counts its |d| in bins, so that ranks need only add up counts. t_i is computation alone:
ranks that gather layers together end together, and the times until they end would be alike.

Left out: what all micro-batches of a rank share in an iteration (a slow rank is known as such), and
what a rank with one micro-batch of a scheme did. Errors of T that neighbours do not share count as
spread.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from math import isfinite, log, sqrt
from typing import NamedTuple

from ds_hydra.strategy.schemes.scheme import Scheme

_LEAST, _BINS_PER_OCTAVE, _NUM_BINS = 0.005, 2, 20
_EDGES = tuple(_LEAST * 2 ** (n / _BINS_PER_OCTAVE) for n in range(_NUM_BINS - 1))
"""Of |d|. A median in the first bin, below a spread of half a percent, counts as none; the last bin
begins at 2.56.
"""
_MEDIAN_OF_DIFFERENCE = 0.6745 * sqrt(2)
_ALIKE = 2.0
"""Predicted times are compared up to this ratio."""
_KEPT = 1 - 1 / 64
"""Of all counts, from one iteration with differences to the next: about 64 count."""
_NUM_NEEDED = 50
"""Differences before a spread is known: to about 15%."""
_MOST = 0.3
"""Largest spread that plans count with: beyond it times are of something else than computation."""


class MicroBatchTime(NamedTuple):
    """One micro-batch on one rank: what the profile says and what its passes took, waits aside."""

    scheme: Scheme
    num_tokens: int
    profiled_ms: float
    computed_ms: float


def differences(micro_batches: Iterable[MicroBatchTime]) -> list[float]:
    """|d| of neighbours among the micro-batches of one rank in one iteration.

    >>> one = Scheme(1, 1)
    >>> own = [MicroBatchTime(one, 10, 5.0, ms) for ms in (5.0, 10.0, 5.0)]
    >>> [round(d, 3) for d in differences(own)]
    [0.693, 0.693]
    """
    of_scheme: dict[Scheme, list[MicroBatchTime]] = {}
    for micro_batch in micro_batches:
        if micro_batch.profiled_ms > 0 and micro_batch.computed_ms > 0 and micro_batch.num_tokens:
            of_scheme.setdefault(micro_batch.scheme, []).append(micro_batch)
    found = []
    for own in of_scheme.values():
        own.sort(key=lambda m: m.profiled_ms / m.num_tokens)
        for one, other in pairwise(own):
            if max(one.profiled_ms, other.profiled_ms) <= _ALIKE * min(
                one.profiled_ms, other.profiled_ms
            ):
                ratio = one.computed_ms * other.profiled_ms
                found.append(abs(log(ratio / (one.profiled_ms * other.computed_ms))))
    return found


def tally(found: Iterable[float]) -> list[float]:
    """How many of the differences are in each bin."""
    counts = [0.0] * _NUM_BINS
    for difference in found:
        counts[bisect_right(_EDGES, difference)] += 1.0
    return counts


@dataclass(slots=True)
class LearnedSpread:
    """What is known of the spread of single micro-batches; the same counts give the same on every
    rank.

    >>> learned = LearnedSpread()
    >>> learned.observe(tally([0.03, 0.06] * 50))
    >>> 0.03 < learned.value < 0.06
    True
    """

    counts: list[float] = field(default_factory=lambda: [0.0] * _NUM_BINS)

    def observe(self, counts: Sequence[float]) -> None:
        """Take in one iteration: counts of all ranks, added up."""
        if sum(counts) > 0:
            self.counts = [_KEPT * old + new for old, new in zip(self.counts, counts, strict=True)]

    @property
    def value(self) -> float:
        """Standard deviation of the logarithm of a micro-batch's time; 0.0 before enough was
        seen, 0.3 at most.
        """
        *before, total = accumulate(self.counts)
        if total < _NUM_NEEDED:
            return 0.0
        number = bisect_right(before, total / 2)
        if number in (0, _NUM_BINS - 1):
            return 0.0 if number == 0 else _MOST
        low, high = _EDGES[number - 1], _EDGES[number]
        share = (total / 2 - before[number - 1]) / self.counts[number]
        return min((low + share * (high - low)) / _MEDIAN_OF_DIFFERENCE, _MOST)

    @classmethod
    def from_state(cls, counts: Sequence[float]) -> LearnedSpread:
        """What `counts` was; ValueError where it is not that."""
        known = [float(value) for value in counts]
        if len(known) != _NUM_BINS or not all(isfinite(value) and value >= 0 for value in known):
            raise ValueError(f"expected {_NUM_BINS} counts of 0 or more, not {counts!r:.200}")
        return cls(known)


NO_COUNTS = (0.0,) * _NUM_BINS
