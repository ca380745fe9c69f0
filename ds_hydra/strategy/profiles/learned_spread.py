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

Where a rank has nothing to compare, other ranks and an iteration before stand in for it. With
r = log(sum of t / sum of p) of a rank's micro-batches of one scheme

    d = (r_now - r_before) of one rank - (r_now - r_before) of the next

has neither what the machine is off in either iteration nor what a rank or its scheme always is. Its
variance is s^2 times the sum of h = sum(p^2) / (sum of p)^2 of the four, 1/n of n equal
micro-batches, so d is multiplied with sqrt(2 / sum of h) to be as above. Only the first rank of a
pipeline tells r, for all its ranks take the same time, and the iteration before is the last of 16
in which both ranks had the schemes that they have now.

Each rank counts its |d| in bins, so that ranks need only add up counts. t is computation alone:
ranks that gather layers together end together, and the times until they end would be alike.

Left out: what all micro-batches of a rank share in an iteration (a slow rank is known as such).
Errors of T that neighbours do not share count as spread.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from math import inf, isfinite, log, sqrt
from typing import Any, NamedTuple

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
_NUM_BEFORE = 16
"""Iterations that ranks without differences of their own are compared with."""
_MOST = 0.3
"""Largest spread that plans count with: beyond it times are of something else than computation."""


class MicroBatchTime(NamedTuple):
    """One micro-batch on one rank: what the profile says and what its passes took, waits aside.

    `is_beside_link`: slices that stay are pulled or pushed beside it. `is_first_rank`: of its
    pipeline.
    """

    scheme: Scheme
    num_tokens: int
    profiled_ms: float
    computed_ms: float
    is_beside_link: bool = False
    is_first_rank: bool = True

    @property
    def is_known(self) -> bool:
        """Whether both times can be compared."""
        return self.profiled_ms > 0 and 0 < self.computed_ms < inf


def differences(micro_batches: Iterable[MicroBatchTime]) -> list[float]:
    """|d| of neighbours among the micro-batches of one rank in one iteration.

    >>> one = Scheme(1, 1)
    >>> own = [MicroBatchTime(one, 10, 5.0, ms) for ms in (5.0, 10.0, 5.0)]
    >>> [round(d, 3) for d in differences(own)]
    [0.693, 0.693]
    """
    of_scheme: dict[Scheme, list[MicroBatchTime]] = {}
    for micro_batch in micro_batches:
        if micro_batch.is_known and not micro_batch.is_beside_link:
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


class Level(NamedTuple):
    """Of a rank without differences of its own: its scheme as a number that all ranks have for it,
    -1.0 where there is none; r and h of its micro-batches ([Note: Spread of micro-batches]).
    """

    scheme: float = -1.0
    level: float = 0.0
    share: float = 0.0


def told_by(own: Sequence[MicroBatchTime], schemes: Sequence[Scheme]) -> list[float]:
    """What a rank tells the others of an iteration: counts of its differences, and its `Level`.
    `schemes`: all, in the same order on every rank.
    """
    found, level = differences(own), Level()
    if own and not found:
        longest = max(own, key=lambda m: m.profiled_ms)
        alike = [m for m in own if m.scheme == longest.scheme]
        if all(m.is_first_rank and m.is_known for m in alike):
            profiled_ms = sum(m.profiled_ms for m in alike)
            level = Level(
                float(schemes.index(longest.scheme)),
                log(sum(m.computed_ms for m in alike) / profiled_ms),
                sum(m.profiled_ms**2 for m in alike) / profiled_ms**2,
            )
    return [*tally(found), *level]


NOTHING_TOLD = (*tally([]), *Level())


@dataclass(slots=True)
class LearnedSpread:
    """What is known of the spread of single micro-batches; what all ranks tell gives the same on
    every rank.

    >>> learned = LearnedSpread()
    >>> one = Scheme(1, 1)
    >>> own = [MicroBatchTime(one, 10, 5.0, ms) for ms in (5.0, 5.2, 5.0)]
    >>> for _ in range(40):
    ...     learned.observe([told_by(own, [one])])
    >>> round(learned.value, 2)
    0.04
    """

    counts: list[float] = field(default_factory=lambda: tally([]))
    before: deque[dict[int, Level]] = field(default_factory=lambda: deque(maxlen=_NUM_BEFORE))
    """What ranks have told of the last iterations, the latest last."""

    def observe(self, told: Sequence[Sequence[float]]) -> None:
        """Take in one iteration: what each rank tells, in their order."""
        levels = {rank: Level(*own[_NUM_BINS:]) for rank, own in enumerate(told)}
        levels = {rank: level for rank, level in levels.items() if level.scheme >= 0}
        found = tally(self._since_before(levels))
        for own in told:
            found = [old + new for old, new in zip(found, own)]
        if levels:
            self.before.append(levels)
        if sum(found) > 0:
            self.counts = [_KEPT * old + new for old, new in zip(self.counts, found)]

    def _since_before(self, levels: Mapping[int, Level]) -> Iterator[float]:
        """|d| of each rank and the next of those that had their schemes in one iteration before."""
        left = dict(levels)
        for before in reversed(self.before):
            ranks = [r for r, now in left.items() if r in before and before[r].scheme == now.scheme]
            if len(ranks) > 1:
                pairs = [(left.pop(rank), before[rank]) for rank in ranks]
                for (now, was), (other_now, other_was) in pairwise(pairs):
                    off = (now.level - was.level) - (other_now.level - other_was.level)
                    shares = now.share + was.share + other_now.share + other_was.share
                    # As of two single micro-batches, whose variances add up to two.
                    yield abs(off) * sqrt(2 / shares)

    @property
    def value(self) -> float:
        """Standard deviation of the logarithm of a micro-batch's time; 0.0 before enough was
        seen, 0.3 at most.
        """
        *before, total = accumulate(self.counts)
        if total < _NUM_NEEDED:
            return 0.0
        # By the median, which a few micro-batches that stumble do not move.
        number = bisect_right(before, total / 2)
        if number in (0, _NUM_BINS - 1):
            return 0.0 if number == 0 else _MOST
        low, high = _EDGES[number - 1], _EDGES[number]
        share = (total / 2 - before[number - 1]) / self.counts[number]
        return min((low + share * (high - low)) / _MEDIAN_OF_DIFFERENCE, _MOST)

    # ---- checkpoints

    def state_dict(self) -> dict[str, Any]:
        """Plain values, for a checkpoint. Iterations before it are not among them: a run that
        continues may number other schemes and ranks.
        """
        return {"counts": list(self.counts)}

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> LearnedSpread:
        """What `state_dict` gave; ValueError where it is not that."""
        counts = [float(value) for value in state["counts"]]
        if len(counts) != _NUM_BINS or not all(map(isfinite, counts)) or min(counts) < 0:
            raise ValueError(f"expected {_NUM_BINS} counts of 0 or more, not {counts!r:.200}")
        return cls(counts)
