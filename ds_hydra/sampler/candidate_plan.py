"""A candidate strategy on one mini-batch: its problem, and its plan once it has one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import exp

import numpy as np

from ds_hydra.sampler.dispatch.refine import pipeline_cost
from ds_hydra.sampler.packing.cuts import cut_micro_batches
from ds_hydra.sampler.packing.packing_bounds import pipeline_bound_ms
from ds_hydra.sampler.plan import GlobalBatch, PipelinePlan
from ds_hydra.sampler.problem import DispatchProblem
from ds_hydra.sampler.schedule import FloatArray, IntArray, ends_ms, makespan_ms
from ds_hydra.strategy.profiles.corrections import UNKNOWN, Correction
from ds_hydra.strategy.profiles.link_times import LinkTimes
from ds_hydra.strategy.profiles.profile import Profile
from ds_hydra.strategy.schemes.scheme import Scheme, Strategy

_OPTIMISM = 1.5
"""Standard deviations below its expected time that a strategy is tried at."""


@dataclass(slots=True, kw_only=True)
class CandidatePlan:
    """One strategy, and once it is planned where its sequences are (in sorted order)."""

    strategy: Strategy
    problem: DispatchProblem
    order: IntArray
    """Where its sequences are in the mini-batch."""
    lower_bound_ms: float = 0.0
    """Of the slowest pipeline, beside all others."""
    assignment: IntArray
    micro_batches: IntArray
    pipeline_ms: FloatArray
    """Time of each pipeline beside all others."""
    link: LinkTimes
    least_link_ms: float = 0.0
    """What pull and push add to propagation at least."""
    correction: Correction = UNKNOWN
    """What measured times say of the strategy."""
    num_devices: int
    """All ranks, idle ones among them."""
    ranks_per_core: float = 1.0
    iteration_ms: float = np.inf
    """Time of the slowest pipeline with pull and push, inf before the strategy is planned."""

    @property
    def least_propagation_ms(self) -> float:
        """Lower bound of propagation. Where ranks share cores the slowest pipeline may have one for
        itself, and all cores together have all the work.
        """
        if self.ranks_per_core == 1.0:
            return self.lower_bound_ms
        num_ranks = np.array([scheme.num_devices for scheme in self.strategy.schemes])
        of_kind = num_ranks[np.unique(self.problem.kind_of, return_index=True)[1]]
        work = (self.problem.sequence_ms * of_kind[:, None]).min(axis=0).sum()
        return max(self.lower_bound_ms / self.ranks_per_core, float(work / self.num_devices))

    @property
    def least_ms(self) -> float:
        """Lower bound of the iteration."""
        return self.least_propagation_ms + self.least_link_ms + self.correction.outside_ms

    def ends_ms(self, times_ms: FloatArray) -> FloatArray:
        """When pipelines end that take `times_ms` beside all others."""
        return ends_ms(
            times_ms,
            [scheme.num_devices for scheme in self.strategy.schemes],
            self.num_devices,
            self.ranks_per_core,
        )

    def optimistic_ms(self, time_ms: float) -> float:
        """`time_ms` of this strategy as short as it may be for all that is known."""
        return time_ms * exp(-_OPTIMISM * self.correction.spread)

    def pipelines(self, batch: GlobalBatch, profile: Profile) -> list[PipelinePlan]:
        """The part of a plan of `batch` that this one is."""
        found = [
            self._pipeline(pipeline, scheme, ranks, batch, profile)
            for pipeline, (scheme, ranks) in enumerate(
                zip(self.strategy.schemes, self.strategy.place())
            )
        ]
        ends = self.ends_ms(np.array([p.makespan_ms for p in found])).tolist()
        return [replace(p, makespan_ms=end) for p, end in zip(found, ends)]

    def _pipeline(
        self,
        pipeline: int,
        scheme: Scheme,
        ranks: tuple[int, ...],
        batch: GlobalBatch,
        profile: Profile,
    ) -> PipelinePlan:
        problem, kind = self.problem, self.problem.kind_of[pipeline]
        members = np.flatnonzero(self.assignment == pipeline)
        own = self.micro_batches[members]
        micro_batches = [members[own == n] for n in range(own.max(initial=-1) + 1)]
        placed = tuple(tuple(self.order[m].tolist()) for m in micro_batches)
        times = np.array([problem.sequence_ms[kind, m].sum() for m in micro_batches])
        bound_ms = pipeline_bound_ms(
            problem.lengths[members],
            problem.sequence_ms[kind, members],
            pipeline_cost(problem, kind),
        )
        return PipelinePlan(
            scheme=scheme,
            ranks=ranks,
            micro_batches=placed,
            rows=cut_micro_batches(placed, batch.lengths, scheme.cp, profile.get_latency(scheme)),
            makespan_ms=makespan_ms(
                times + problem.constant_ms[kind],
                int(problem.num_stages[kind]),
                problem.forward_fraction,
                problem.is_exact,
                problem.traffic_ms[kind],
            ),
            lower_bound_ms=bound_ms / self.ranks_per_core,
        )


def find_trial(
    best: CandidatePlan | None,
    best_ms: float,
    candidates: Sequence[CandidatePlan],
    allowed_ms: float,
    search: Callable[[CandidatePlan, float], None],
) -> CandidatePlan | None:
    """The candidate to run instead of the best known one, to learn its true time.

    First choice: the one that would be fastest if its time lay `_OPTIMISM` standard deviations
    below expectation. Else the fastest that never ran: a profile may be more wrong than profiles
    are. None if either takes more than `allowed_ms` above `best_ms`, or `allowed_ms` is 0. `best`
    is None where phases are best; `search` plans a candidate that is to beat a time.
    """
    if allowed_ms <= 0:
        return None
    most_ms = best_ms + allowed_ms
    found, found_ms = None, best_ms if best is None else best.optimistic_ms(best_ms)
    never_ran, never_ran_ms = None, np.inf
    for candidate in candidates:
        may_win = candidate.optimistic_ms(candidate.least_ms) < found_ms
        is_new = candidate.correction.is_new and candidate.least_ms < never_ran_ms
        if candidate is best or candidate.least_ms > most_ms or not (may_win or is_new):
            continue
        if candidate.iteration_ms == np.inf:
            search(candidate, best_ms - candidate.least_link_ms)
        if candidate.iteration_ms > most_ms:
            continue
        if candidate.optimistic_ms(candidate.iteration_ms) < found_ms:
            found, found_ms = candidate, candidate.optimistic_ms(candidate.iteration_ms)
        if candidate.correction.is_new and candidate.iteration_ms < never_ran_ms:
            never_ran, never_ran_ms = candidate, candidate.iteration_ms
    return found or never_ran
