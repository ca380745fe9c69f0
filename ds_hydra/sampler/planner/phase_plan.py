"""One strategy on one global batch: its sequences dispatched to pipelines, packed into
micro-batches and refined.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import groupby

import numpy as np

from ds_hydra.errors import HydraConfigError
from ds_hydra.sampler.cuts import cut_micro_batches
from ds_hydra.sampler.plan import GlobalBatch, PipelinePlan
from ds_hydra.sampler.planner.bounds import is_impossible, pipeline_bound_ms, strategy_bound_ms
from ds_hydra.sampler.planner.dispatch import dispatch_sequences, dispatch_trials, fit_trials
from ds_hydra.sampler.planner.group_steps import Cuts, MixedGroups, plan_steps
from ds_hydra.sampler.planner.packing import solve_packing
from ds_hydra.sampler.planner.planner_settings import DEFAULT_SETTINGS, PlannerSettings
from ds_hydra.sampler.planner.problem import (
    EPSILON,
    DispatchProblem,
    PipelineKind,
    SolverLimits,
    make_problem,
)
from ds_hydra.sampler.planner.refine import (
    improve_dispatch,
    iteration_ms,
    order_micro_batches,
    pack_pipelines,
    perturb_and_refine,
    pipeline_cost,
    refine_pipelines,
)
from ds_hydra.sampler.schedule import (
    FloatArray,
    IntArray,
    ends_ms,
    makespan_ms,
    steps_ms,
)
from ds_hydra.strategy.profiles.learned import NO_CORRECTIONS, Corrections
from ds_hydra.strategy.profiles.profile import NO_LINKS, LinkTimes, Profile
from ds_hydra.strategy.schemes.scheme import Scheme, Strategy

_NUM_TRIALS = 4
"""Trials of Alg. 1 for each strategy; a heuristic plan has one."""

_NUM_FIT_STEPS, _MAX_REFINE_STEPS, _NUM_PERTURBATIONS = 8, 400, 12
"""Steps of MULTIFIT's bisection, exchanges between pipelines, and restarts of the refinement from a
disturbed plan.
"""

_ENOUGH_GAP = 1e-3
"""Share above its lower bound at which a strategy is not refined further."""

_NUM_TARGETS = 4
"""Fast pipelines that the slowest one exchanges sequences with, besides two of each scheme."""

_MAX_SOLVED = 4
"""Pipelines whose micro-batches are solved for in one iteration."""

_PERTURBATION_GAP, _PERTURBATION_REACH, _FULLY_PERTURBED = 0.01, 0.05, 1400
"""Perturbations are for plans more than 1% above their bound and less than 5% above the best plan
so far; fewer above so many sequences, because each takes time with their square.
"""

_MOST_KINDS = 8
"""Kinds of pipelines for which steps are tried: slow ranks may make every pipeline a kind."""


class PlanningProblem:
    """One global batch, sorted once, and the devices that it is planned for; shared by all
    candidates.
    """

    def __init__(
        self,
        batch: GlobalBatch,
        profile: Profile,
        num_devices: int,
        settings: PlannerSettings = DEFAULT_SETTINGS,
        corrections: Corrections = NO_CORRECTIONS,
    ) -> None:
        self.batch, self.profile, self.num_devices = batch, profile, num_devices
        self.settings, self.corrections = settings, corrections
        lengths = np.array(batch.lengths, dtype=np.int64)
        if lengths.size and lengths.min() < 1:
            raise HydraConfigError(
                f"sequence {lengths.argmin()} of iteration {batch.iteration} has {lengths.min()} tokens; "
                "remove sequences without tokens from the dataset"
            )
        # Stable: of equal lengths the order of the batch decides, on every machine
        self.order = np.argsort(-lengths, kind="stable")
        self.lengths = lengths[self.order]
        self.bounded: dict[Strategy, PhasePlan] = {}
        """Strategies whose bound was asked for: dispatched, for their plan to go on with."""

    @cached_property
    def num_buckets(self) -> int:
        """Layers that are pulled and pushed one by one; 0 where nothing overlaps."""
        return self.profile.memory.num_layers if self.settings.overlaps_links else 0

    def is_held(self, longest_tokens: int) -> bool:
        """Whether no sequence is longer than `longest_tokens`."""
        return not self.lengths.size or bool(self.lengths[0] <= longest_tokens)

    def longest(self, strategy: Strategy) -> int:
        """Largest MaxLen over the schemes of `strategy`, in tokens."""
        return max(self.max_len_tokens(scheme) for scheme in set(strategy.schemes))

    def max_len_tokens(self, scheme: Scheme) -> int:
        """MaxLen of `scheme`: the setting, else by the memory model; 0 where nothing fits."""
        override = self.settings.max_len_override.get(scheme)
        return (
            override
            if override is not None
            else max(0, self.profile.max_len_tokens(scheme, self.num_devices))
        )

    def links_of(self, strategy: Strategy) -> LinkTimes:
        """Pull and push of `strategy`; none where they are not known."""
        times = self.settings.link_times
        # Weights that stay on the nodes shorten gathers, which are in T, not pull and push
        return times.get(strategy) or times.get(strategy.crossing) or NO_LINKS

    def kinds(self, strategy: Strategy, factors: Sequence[float]) -> list[PipelineKind]:
        """Neighbours of one scheme that are equally fast are one kind."""
        return [
            PipelineKind(
                sum(1 for _ in same),
                scheme.pp,
                self.max_len_tokens(scheme),
                self.profile.get_latency(scheme).scaled(factor),
            )
            for (scheme, factor), same in groupby(zip(strategy.schemes, factors, strict=True))
        ]


@dataclass(slots=True, kw_only=True, eq=False)
class PhasePlan:
    """One strategy, and where the sequences of a global batch are (in sorted order) that it runs:
    all of them, or those of a phase.
    """

    planning: PlanningProblem
    strategy: Strategy
    kinds: Sequence[PipelineKind]
    problem: DispatchProblem
    order: IntArray
    """Positions of its sequences in the global batch."""
    link: LinkTimes
    outside_ms: float
    """Milliseconds outside of propagation beyond those of other strategies; 0.0 of a phase."""
    assignment: IntArray
    micro_batches: IntArray
    pipeline_ms: FloatArray
    """Time of each pipeline beside all others."""
    lower_bound_ms: float = 0.0
    """Lower bound of the slowest pipeline, beside all others; 0.0 before it is asked for."""
    iteration_ms: float = np.inf
    """Expected time of the slowest pipeline with pull and push, inf before the strategy is
    planned.
    """

    @classmethod
    def of(
        cls,
        planning: PlanningProblem,
        strategy: Strategy,
        *,
        members: IntArray | slice = slice(None),
        factors: Sequence[float] | None = None,
        link: LinkTimes | None = None,
    ) -> PhasePlan:
        """A plan in which nothing is dispatched yet. It has `members` alone, positions in sorted
        order. `factors` and `link` of a phase, where given, replace the known ones of the strategy.
        """
        settings, lengths = planning.settings, planning.lengths[members]
        is_phase = factors is not None
        if factors is None:
            factors = planning.corrections.pipeline_factors(strategy)
        kinds = planning.kinds(strategy, factors)
        return cls(
            planning=planning,
            strategy=strategy,
            kinds=kinds,
            problem=make_problem(
                lengths,
                kinds,
                forward_fraction=settings.forward_fraction,
                is_exact=settings.objective == "exact",
            ),
            order=planning.order[members],
            link=planning.links_of(strategy) if link is None else link,
            # Time outside of propagation is the iteration's and not a phase's
            outside_ms=0.0 if is_phase else planning.corrections.more_outside_ms(strategy),
            assignment=np.zeros_like(lengths),
            micro_batches=np.zeros_like(lengths),
            pipeline_ms=np.full(len(strategy.schemes), np.inf),
        )

    @property
    def ranks_per_core(self) -> float:
        """Ranks that share a core."""
        return self.planning.profile.ranks_per_core

    @property
    def least_link_ms(self) -> float:
        """Least milliseconds that pull and push add to propagation: the first bucket's pull and the
        last one's push, which nothing hides.
        """
        # The fewest stages have most layers each, so the least of pull and push is seen
        num_stages = min(scheme.pp for scheme in self.strategy.schemes)
        num_rounds = max(1, self.planning.num_buckets // num_stages)
        return (self.link.pull_ms + self.link.push_ms) / num_rounds

    @property
    def ranks_of_kinds(self) -> IntArray:
        """Ranks of a pipeline of each kind."""
        # Pipelines of a kind have one scheme, so the first of each tells
        first = np.unique(self.problem.kind_of, return_index=True)[1]
        return np.array([self.strategy.schemes[n].num_devices for n in first], dtype=np.int64)

    @property
    def least_propagation_ms(self) -> float:
        """Lower bound of propagation. Where ranks share cores the slowest pipeline may have one for
        itself, and all cores together have all the work.
        """
        if self.ranks_per_core == 1.0:
            return self.lower_bound_ms
        # A sequence keeps all ranks of its pipeline busy, so it is that many times as much work
        work = (self.problem.sequence_ms * self.ranks_of_kinds[:, None]).min(axis=0).sum()
        return max(
            self.lower_bound_ms / self.ranks_per_core, float(work / self.planning.num_devices)
        )

    @property
    def least_ms(self) -> float:
        """Lower bound of the iteration."""
        return self.least_propagation_ms + self.least_link_ms + self.outside_ms

    def is_beyond(self, limit_ms: float) -> bool:
        """Whether it is proved, before the dispatch, that no iteration takes `limit_ms` or less."""
        # Times of the problem are those beside all other ranks: one alone may be so much faster
        within_ms = (limit_ms - self.least_link_ms - self.outside_ms) * self.ranks_per_core
        # Rounding must not decide about an equal plan
        return is_impossible(self.problem, within_ms * (1 + EPSILON))

    @property
    def wait_ms(self) -> float:
        """Milliseconds by which the steps of all pipelines take longer than the slowest pipeline
        alone, where ranks gather layers in lockstep.
        """
        # Where nobody has a second micro-batch the only step is the slowest pipeline
        if not self.strategy.gathers or not self.micro_batches.any():
            return 0.0
        steps = steps_ms([self._times_ms(n) for n in range(len(self.strategy.schemes))])
        return max(0.0, float(steps.sum() - self.pipeline_ms.max()))

    @property
    def waits_for_weights(self) -> bool:
        """Whether its slowest pipeline waits for gathered weights."""
        # Of a step, in which each pipeline has one micro-batch: it takes its traffic at least,
        # and longer where computation does
        traffic_ms = float(self.problem.traffic_ms.max(initial=0.0))
        return 0.0 < traffic_ms >= float(self.pipeline_ms.max())

    def _times_ms(self, pipeline: int) -> FloatArray:
        """T of each micro-batch of `pipeline`."""
        problem, kind = self.problem, self.problem.kind_of[pipeline]
        members = np.flatnonzero(self.assignment == pipeline)
        sums = np.bincount(self.micro_batches[members], weights=problem.sequence_ms[kind, members])
        times: FloatArray = np.maximum(sums + problem.constant_ms[kind], problem.traffic_ms[kind])
        return times

    def ends_ms(self, times_ms: FloatArray) -> FloatArray:
        """Milliseconds at which pipelines end that take `times_ms` beside all others."""
        return ends_ms(
            times_ms,
            [scheme.num_devices for scheme in self.strategy.schemes],
            self.planning.num_devices,
            self.ranks_per_core,
        )

    def dispatch(self, *, is_bounded: bool = True) -> PhasePlan:
        """Dispatches the sequences greedily, and finds the lower bound with `is_bounded`."""
        settings = self.planning.settings
        estimate = dispatch_trials(
            self.problem,
            _NUM_TRIALS if settings.refines else 1,
            settings.seed,
            self.assignment,
        )
        if is_bounded:
            # The estimate is no time of a packed plan: the bound may lie above it
            self.lower_bound_ms = strategy_bound_ms(self.problem, 1.5 * estimate)
        return self

    def search(self, best_ms: float = np.inf) -> PhasePlan:
        """Improves the dispatch, packs and refines; searches longer where that can still beat
        `best_ms`, the best iteration so far.
        """
        problem, assignment, micro_batches = self.problem, self.assignment, self.micro_batches
        # Compared below with times of pipelines, which are without pull and push
        settings, best_ms = self.planning.settings, best_ms - self.least_link_ms
        num_steps = _MAX_REFINE_STEPS if settings.refines else 0
        # 0 where no bound was asked for: then no plan is good enough to stop at
        enough_ms = self.lower_bound_ms * (1 + _ENOUGH_GAP)
        estimate = improve_dispatch(problem, assignment, enough_ms, num_steps, _NUM_TARGETS)
        if self.ranks_per_core > 1.0:  # bounds say little, so ask what it is near to
            pipeline_ms = self.pipeline_ms = pack_pipelines(problem, assignment, micro_batches)
            if self.ends_ms(pipeline_ms).max() > best_ms * (1 + _PERTURBATION_REACH):
                return self.finish()
        if settings.refines and estimate > enough_ms:
            # Changes the assignment only where first-fit beats the estimate
            fit_trials(problem, self.lower_bound_ms, estimate, _NUM_FIT_STEPS, assignment)
            improve_dispatch(problem, assignment, enough_ms, num_steps, _NUM_TARGETS)
        if settings.dispatch == "ideal":
            assignment[:] = self._ideal_dispatch()
        pipeline_ms = self.pipeline_ms = pack_pipelines(problem, assignment, micro_batches)
        refine_pipelines(
            problem, assignment, micro_batches, pipeline_ms, enough_ms, num_steps, _NUM_TARGETS
        )
        worth_ms = self.lower_bound_ms * (1 + _PERTURBATION_GAP)
        share = min(1.0, _FULLY_PERTURBED / max(1, problem.lengths.size))
        if settings.refines and worth_ms < pipeline_ms.max() < best_ms * (1 + _PERTURBATION_REACH):
            perturb_and_refine(
                problem,
                assignment,
                micro_batches,
                pipeline_ms,
                worth_ms,
                num_steps,
                _NUM_TARGETS,
                int(_NUM_PERTURBATIONS * share**2),
            )
        self.finish()
        if settings.refines and self.wait_ms > 0.0 and len(self.kinds) <= _MOST_KINDS:
            self._search_steps()
        return self

    def _search_steps(self) -> None:
        """Cut the global batch into steps first ([Note: Mixed groups]), and keep what is faster.
        Where all ranks gather layers together, the search above does not see that a step ends with
        its slowest pipeline.
        """
        problem, kinds = self.problem, self.kinds
        groups = MixedGroups(
            self.strategy.num_devices,
            self.ranks_of_kinds.tolist(),
            [kind.max_len_tokens for kind in kinds],
            [kind.latency.constant_ms for kind in kinds],
            [kind.latency.sequences_ms for kind in kinds],
            Cuts.all([[kind.num_pipelines for kind in kinds]]),
        )
        # All ranks gather each layer together, so the most traffic is the floor of a step
        floor_ms = float(problem.traffic_ms.max())
        steps = plan_steps(
            [groups],
            problem.lengths,
            lambda slowest: float(np.maximum(slowest, floor_ms).sum()),
            float(self.pipeline_ms.max()) + self.wait_ms,
        )
        if not steps:
            return
        known = self._copy()
        for number, step in enumerate(steps):
            self.assignment[step.members] = step.group_of
            self.micro_batches[step.members] = number
        for pipeline in range(self.pipeline_ms.size):
            own = self.assignment == pipeline  # its micro-batches are numbered without gaps
            self.micro_batches[own] = np.unique(self.micro_batches[own], return_inverse=True)[1]
        # One stage each, as all pipelines whose layers are gathered
        of_pipelines = map(self._times_ms, range(self.pipeline_ms.size))
        exactly = problem.forward_fraction, problem.is_exact, 0.0
        self.pipeline_ms = np.array([makespan_ms(own, 1, *exactly) for own in of_pipelines])
        # Steps were chosen without pull and push: the whole iteration decides
        if self.finish().iteration_ms >= known.iteration_ms:
            self._take_back(known)

    def _copy(self) -> PhasePlan:
        """The same plan, which changes of this one do not reach."""
        return replace(
            self,
            assignment=self.assignment.copy(),
            micro_batches=self.micro_batches.copy(),
            pipeline_ms=self.pipeline_ms.copy(),
        )

    def _take_back(self, known: PhasePlan) -> None:
        """Take over the state of `known`, a copy of this plan from before."""
        self.assignment, self.micro_batches = known.assignment, known.micro_batches
        self.pipeline_ms, self.iteration_ms = known.pipeline_ms, known.iteration_ms

    def pack(self, assignment: IntArray) -> PhasePlan:
        """Packs the pipelines of `assignment` as they are."""
        self.assignment[:] = assignment
        self.pipeline_ms = pack_pipelines(self.problem, self.assignment, self.micro_batches)
        return self.finish()

    def finish(self) -> PhasePlan:
        """Puts the packed micro-batches in the order that hides pull and push, and counts the
        visible rest.
        """
        problem, link = self.problem, self.link
        order_micro_batches(problem, self.assignment, self.micro_batches, self.strategy.gathers)
        self.iteration_ms = iteration_ms(
            problem,
            self.assignment,
            self.micro_batches,
            self.pipeline_ms,
            link.pull_ms,
            link.push_ms,
            self.planning.num_buckets,
        )
        self.iteration_ms += self.wait_ms + self.outside_ms
        # On shared cores the slowest pipeline is faster once others have ended
        ends = self.ends_ms(self.pipeline_ms)
        self.iteration_ms -= float(self.pipeline_ms.max() - ends.max())
        return self

    def _ideal_dispatch(self) -> IntArray:
        """The solution of Eq. (3) within the limits of the solver, in sorted order of the
        sequences.
        """
        settings = self.planning.settings
        found = dispatch_sequences(
            self.problem.lengths.tolist(),
            self.planning.kinds(self.strategy, [1.0] * len(self.strategy.schemes)),
            seed=settings.seed,
            # The reference that greedy dispatch is compared with: solved nearly to the end
            limits=replace(settings.solver_limits or SolverLimits(), gap_tolerance=1e-4),
        )
        return np.array(found.assignment, dtype=np.int64)

    def solve_slowest(self) -> None:
        """Solves for the micro-batches of the slowest pipelines as long as that makes the iteration
        shorter.

        Only where an integer program is exact: by the closed form, and for one stage, whose time is
        that of the fewest micro-batches where no micro-batch waits for its traffic.
        """
        limits = self.planning.settings.solver_limits
        if limits is None:
            return
        for _ in range(_MAX_SOLVED):
            slowest = int(self.pipeline_ms.argmax())
            members = np.flatnonzero(self.assignment == slowest)
            kind = self.problem.kind_of[slowest]
            cost = pipeline_cost(self.problem, kind)
            lengths, costs = self.problem.lengths[members], self.problem.sequence_ms[kind, members]
            bound = pipeline_bound_ms(lengths, costs, cost)
            is_solvable = not cost.is_exact or (cost.num_stages == 1 and cost.traffic_ms == 0.0)
            is_optimal = self.pipeline_ms[slowest] <= bound * (1 + limits.gap_tolerance)
            if is_optimal or not is_solvable:
                return
            micro_batches = self.micro_batches[members]
            solved_ms, _ = solve_packing(lengths, costs, cost, limits, micro_batches)
            # The slowest one stays so: the others cannot shorten the iteration
            if solved_ms >= self.pipeline_ms[slowest]:
                return
            known = self._copy()
            self.pipeline_ms[slowest] = solved_ms
            self.micro_batches[members] = micro_batches
            if self.finish().iteration_ms > known.iteration_ms:  # others wait for longer steps
                self._take_back(known)
                return

    def pipelines(self) -> list[PipelinePlan]:
        """Pipelines of its part of a plan of the global batch."""
        found = [
            self._pipeline(pipeline, scheme, ranks)
            for pipeline, (scheme, ranks) in enumerate(
                zip(self.strategy.schemes, self.strategy.place())
            )
        ]
        # Where ranks share cores, the end of a pipeline depends on all others
        ends = self.ends_ms(np.array([p.makespan_ms for p in found])).tolist()
        return [replace(p, makespan_ms=end) for p, end in zip(found, ends)]

    def _pipeline(self, pipeline: int, scheme: Scheme, ranks: tuple[int, ...]) -> PipelinePlan:
        problem, kind = self.problem, self.problem.kind_of[pipeline]
        batch, latency = self.planning.batch, self.planning.profile.get_latency(scheme)
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
            rows=cut_micro_batches(placed, batch.lengths, scheme.cp, latency),
            makespan_ms=makespan_ms(
                times + problem.constant_ms[kind],
                int(problem.num_stages[kind]),
                problem.forward_fraction,
                problem.is_exact,
                problem.traffic_ms[kind],
            ),
            # With a core for itself it may be so much faster
            lower_bound_ms=bound_ms / self.ranks_per_core,
        )
