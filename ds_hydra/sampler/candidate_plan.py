"""A candidate strategy on one mini-batch: its problem, and its plan once it has one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import exp

import numpy as np

from ds_hydra.sampler.problem import DispatchProblem
from ds_hydra.sampler.schedule import FloatArray, IntArray
from ds_hydra.strategy.profiles.corrections import UNKNOWN, Correction
from ds_hydra.strategy.profiles.link_times import LinkTimes
from ds_hydra.strategy.schemes.scheme import Strategy

_HOPE = 1.5
"""Standard deviations by which a strategy that is tried may be faster than expected."""


@dataclass(slots=True, kw_only=True)
class CandidatePlan:
    """One strategy, and once it is planned where its sequences are (in sorted order)."""

    strategy: Strategy
    problem: DispatchProblem
    order: IntArray
    """Where its sequences are in the mini-batch."""
    lower_bound_ms: float = 0.0
    assignment: IntArray
    micro_batches: IntArray
    value: FloatArray
    """Time of each pipeline."""
    link: LinkTimes
    least_link_ms: float = 0.0
    """What pull and push add to propagation at least."""
    correction: Correction = UNKNOWN
    """What measured times say of the strategy."""
    iteration_ms: float = np.inf
    """Time of the slowest pipeline with pull and push, inf before the strategy is planned."""

    @property
    def least_ms(self) -> float:
        """Lower bound of the iteration."""
        return self.lower_bound_ms + self.least_link_ms + self.correction.outside_ms

    def hoped(self, time_ms: float) -> float:
        """`time_ms` of this strategy as short as it may be for all that is known."""
        return time_ms * exp(-_HOPE * self.correction.spread)


def find_trial(
    best: CandidatePlan,
    candidates: Sequence[CandidatePlan],
    allowed_ms: float,
    search: Callable[[CandidatePlan, float], None],
) -> CandidatePlan | None:
    """The strategy that may turn out to be the fastest, if that is not the best one known and the
    attempt takes at most `allowed_ms` longer; `search` plans one that is to beat a time.
    """
    found, found_ms = None, best.hoped(best.iteration_ms)
    for candidate in candidates if allowed_ms > 0 else ():
        is_worth_it = candidate.hoped(candidate.least_ms) < found_ms
        if candidate is best or not is_worth_it:
            continue
        if candidate.least_ms > best.iteration_ms + allowed_ms:
            continue
        if candidate.iteration_ms == np.inf:
            search(candidate, best.iteration_ms - candidate.least_link_ms)
        hoped_ms = candidate.hoped(candidate.iteration_ms)
        if hoped_ms < found_ms and candidate.iteration_ms <= best.iteration_ms + allowed_ms:
            found, found_ms = candidate, hoped_ms
    return found
