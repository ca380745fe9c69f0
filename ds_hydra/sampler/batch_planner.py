"""The search of one plan: candidates in the order of their bounds, each dispatched, packed and
refined, until no bound can win.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import groupby
from typing import Any

import numpy as np

from ds_hydra.errors import HydraConfigError, InfeasiblePlanError
from ds_hydra.sampler.bounds import strategy_bound_ms
from ds_hydra.sampler.candidate_plan import CandidatePlan, find_trial
from ds_hydra.sampler.dispatch.dispatch import dispatch_sequences, dispatch_trials, fit_trials
from ds_hydra.sampler.dispatch.refine import (
    improve_dispatch,
    iteration_ms,
    order_micro_batches,
    pack_pipelines,
    perturb_and_refine,
    pipeline_cost,
    refine_pipelines,
)
from ds_hydra.sampler.ilp import SolverLimits
from ds_hydra.sampler.lockstep import lockstep_wait_ms
from ds_hydra.sampler.mixed_groups import Step
from ds_hydra.sampler.packing.packing import solve_packing
from ds_hydra.sampler.packing.packing_bounds import pipeline_bound_ms
from ds_hydra.sampler.phases import Palette, compose, find_palettes, strategy_of
from ds_hydra.sampler.plan import GlobalBatch, IterationPlan
from ds_hydra.sampler.planner_settings import PlannerSettings
from ds_hydra.sampler.problem import DispatchProblem, PipelineKind, make_problem
from ds_hydra.sampler.schedule import IntArray
from ds_hydra.strategy.profiles.corrections import NO_CORRECTIONS, UNKNOWN, Corrections
from ds_hydra.strategy.profiles.link_times import NO_LINKS, LinkTimes
from ds_hydra.strategy.profiles.profile import LatencyModel, Profile
from ds_hydra.strategy.schemes.placement import groups_of_all
from ds_hydra.strategy.schemes.scheme import Scheme, Strategy

_NUM_FIT_STEPS = 8

_NUM_TARGETS = 4
"""Fast pipelines that the slowest one exchanges sequences with, besides two of each scheme."""

_MAX_SOLVED = 4
"""Pipelines whose micro-batches are solved for in one iteration."""

_PERTURBATION_GAP, _PERTURBATION_REACH, _FULLY_PERTURBED = 0.01, 0.05, 1400
"""Perturbations are for plans more than 1% above their bound and less than 5% above the best plan
so far; fewer above so many sequences, because each takes time with their square.
"""


class BatchPlanner:
    """One mini-batch, sorted once, and the costs of its sequences, shared by all candidate
    strategies.
    """

    def __init__(
        self,
        batch: GlobalBatch,
        profile: Profile,
        num_devices: int,
        settings: PlannerSettings,
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
        self.order = np.argsort(-lengths, kind="stable")
        self.lengths = lengths[self.order]

    def plan(self, strategies: Sequence[Strategy]) -> tuple[IterationPlan, float]:
        """The best plan over `strategies`, and its time with pull and push."""
        feasible = [
            s for s in strategies if self.lengths.size == 0 or self.lengths[0] <= self.longest(s)
        ]
        if not feasible:
            raise self._no_plan(strategies)
        candidates = sorted((self._bound(s) for s in feasible), key=lambda c: c.least_ms)
        phases = self._best_phases(strategies, np.inf)  # quick, and others have to beat it
        phases_ms = sum(phase.iteration_ms for phase in phases) if phases else np.inf
        best = candidates[0]
        for candidate in candidates:
            least_ms = min(best.iteration_ms, phases_ms)
            if candidate.least_ms < least_ms:
                self._search(candidate, least_ms - candidate.least_link_ms)
                best = min(best, candidate, key=lambda c: c.iteration_ms)
        best_ms = min(best.iteration_ms, phases_ms)
        single = best if best.iteration_ms <= phases_ms else None
        trial = find_trial(single, best_ms, candidates, self.corrections.trial_ms, self._search)
        chosen = trial or single
        if chosen is None:
            return self._finish(phases), phases_ms
        trial_ms = max(0.0, chosen.iteration_ms - best_ms)
        self._solve_slowest(chosen)
        return self._finish([chosen], trial_ms), chosen.iteration_ms

    def phases_ms(self, strategies: Sequence[Strategy], limit_ms: float = np.inf) -> float:
        """Time with pull and push of the best plan of several phases; inf where it is not below
        `limit_ms`, or `strategies` are no palette for the mini-batch.
        """
        phases = self._best_phases(strategies, limit_ms)
        return sum(phase.iteration_ms for phase in phases) if phases else np.inf

    def time_ms(self, strategy: Strategy) -> float:
        """Time with pull and push of a plan that is not compared with its bound."""
        if self.lengths.size and self.lengths[0] > self.longest(strategy):
            return np.inf
        candidate, _ = self._start(strategy)
        self._search(candidate, np.inf)
        return candidate.iteration_ms

    def least_ms(self, strategy: Strategy) -> tuple[float, float]:
        """Lower bounds of propagation, and of the iteration with what pull and push add at
        least.
        """
        if self.lengths.size and self.lengths[0] > self.longest(strategy):
            return np.inf, np.inf
        candidate = self._bound(strategy)
        return candidate.least_propagation_ms, candidate.least_ms

    def longest(self, strategy: Strategy) -> int:
        """Largest MaxLen over the schemes of `strategy`, in tokens."""
        return max(self.max_len_tokens(scheme, strategy) for scheme in set(strategy.schemes))

    def max_len_tokens(self, scheme: Scheme, strategy: Strategy) -> int:
        """MaxLen of a pipeline of `strategy`: the setting, else by the memory model; 0 where
        nothing fits.
        """
        override = self.settings.max_len_override.get(scheme)
        return (
            override
            if override is not None
            else max(0, self.profile.max_len_tokens(scheme, self.num_devices, strategy))
        )

    def _no_plan(self, strategies: Iterable[Strategy]) -> InfeasiblePlanError:
        largest = max(self.longest(strategy) for strategy in strategies)
        position = int(self.order[0])
        advice = (
            f"lower hydra.context_length to {largest} or less, or "
            if largest > 0
            else f"states and slices alone fill the memory of {self.num_devices} devices; take more of them, "
        )
        return InfeasiblePlanError(
            f"iteration {self.batch.iteration}: sequence {position} has {self.lengths[0]} tokens, the "
            f"largest MaxLen over all candidate strategies is {largest}; {advice}raise "
            "hydra.memory_limit_bytes or add a strategy with higher TP to hydra.strategies"
        )

    def _best_phases(self, strategies: Sequence[Strategy], limit_ms: float) -> list[CandidatePlan]:
        """Phases of what `strategies` gather or leave on every rank alike, where that takes less
        than `limit_ms`. See [Note: Phases].
        """
        palettes = find_palettes(
            (
                scheme
                for strategy in strategies
                if strategy.gathers or not strategy.is_heterogeneous
                for scheme in strategy.schemes
            ),
            self.profile,
            self.num_devices,
            groups=groups_of_all(strategies),
            max_len_tokens=self.max_len_tokens,
            links_of=lambda strategy: self.settings.link_times.get(strategy, NO_LINKS),
            factor_of=lambda strategy: self.corrections.of(strategy).factors.get(
                strategy.schemes[0], 1.0
            ),
        )
        gathered = [palette for palette in palettes if not palette.keeps_slices]
        kept = [[palette] for palette in palettes if palette.keeps_slices]
        found: list[CandidatePlan] = []
        for alike in filter(None, [gathered, *kept]):
            longest = max(palette.longest for palette in alike)
            if not self.lengths.size or self.lengths[0] > longest:
                continue
            phases = self._compose_phases(alike, limit_ms)
            time_ms = sum(phase.iteration_ms for phase in phases)
            if phases and time_ms < limit_ms:
                found, limit_ms = phases, time_ms
        return found

    def _compose_phases(self, palettes: Sequence[Palette], limit_ms: float) -> list[CandidatePlan]:
        least_ms = max(palette.least_link_ms(self._num_buckets) for palette in palettes)
        keeps_slices = palettes[0].keeps_slices
        if keeps_slices:
            limit_ms, least_ms = limit_ms - least_ms, 0.0
        steps = compose(self.lengths, palettes, self.num_devices, least_ms, limit_ms)
        if not keeps_slices:
            return [self._gathered_phase(step, palettes[step.kind]) for step in steps]
        members: dict[Strategy, list[IntArray]] = {}
        for step in steps:
            members.setdefault(strategy_of(step, palettes[0])[0], []).append(step.members)
        phases, link = [], palettes[0].link
        for number, (strategy, own) in enumerate(members.items()):
            is_first, is_last = number == 0, number == len(members) - 1
            candidate = self._bound(
                strategy,
                members=np.sort(np.concatenate(own)),
                factors=self._factors(strategy, palettes[0]),
                # Pulled by the first phase, pushed by the last
                link=replace(link, pull_ms=is_first * link.pull_ms, push_ms=is_last * link.push_ms),
            )
            candidate.correction = UNKNOWN  # time outside of propagation is not a phase's
            self._search(candidate, np.inf)
            phases.append(candidate)
        return phases

    def _factors(self, strategy: Strategy, palette: Palette) -> list[float]:
        return [
            palette.factors[palette.schemes.index(scheme)] * self.corrections.slowdown(ranks)
            for scheme, ranks in zip(strategy.schemes, strategy.place())
        ]

    def _gathered_phase(self, step: Step, palette: Palette) -> CandidatePlan:
        strategy, assignment = strategy_of(step, palette)
        factors = self._factors(strategy, palette)
        problem = self._problem(strategy, self.lengths[step.members], factors)
        micro_batches = np.zeros_like(assignment)
        candidate = CandidatePlan(
            strategy=strategy,
            problem=problem,
            order=self.order[step.members],
            assignment=assignment,
            micro_batches=micro_batches,
            pipeline_ms=pack_pipelines(problem, assignment, micro_batches),
            link=palette.link,
            num_devices=self.num_devices,
            ranks_per_core=self.profile.ranks_per_core,
        )
        self._finish_micro_batches(candidate)
        return candidate

    def _problem(
        self, strategy: Strategy, lengths: IntArray, factors: Sequence[float]
    ) -> DispatchProblem:
        settings = self.settings
        return make_problem(
            lengths,
            self._kinds(strategy, factors),
            forward_fraction=settings.forward_fraction,
            is_exact=settings.objective == "exact",
        )

    def _kinds(self, strategy: Strategy, factors: Sequence[float]) -> list[PipelineKind]:
        """Neighbours of one scheme that are equally fast are one kind."""
        return [
            PipelineKind(
                sum(1 for _ in same),
                scheme.pp,
                self.max_len_tokens(scheme, strategy),
                _corrected(self.profile.get_latency(scheme), factor),
            )
            for (scheme, factor), same in groupby(zip(strategy.schemes, factors, strict=True))
        ]

    def _bound(self, strategy: Strategy, **own: Any) -> CandidatePlan:
        candidate, estimate = self._start(strategy, **own)
        # The estimate is no time of a packed plan: the bound may lie above it
        candidate.lower_bound_ms = strategy_bound_ms(candidate.problem, 1.5 * estimate)
        return candidate

    def _start(
        self,
        strategy: Strategy,
        *,
        members: IntArray | slice = slice(None),
        factors: Sequence[float] | None = None,
        link: LinkTimes | None = None,
    ) -> tuple[CandidatePlan, float]:
        """`strategy` dispatched, without a bound, and the estimate of its time; of `members` alone,
        positions in sorted order, and with what is known of a phase in place of the strategy's own
        where that is given.
        """
        if factors is None:
            factors = self.corrections.pipeline_factors(strategy)
        if link is None:
            link = self.settings.link_times.get(strategy, NO_LINKS)
        lengths = self.lengths[members]
        problem = self._problem(strategy, lengths, factors)
        # Only the first bucket's pull and the last one's push can be hidden by nothing
        num_rounds = max(1, self._num_buckets // min(scheme.pp for scheme in strategy.schemes))
        candidate = CandidatePlan(
            strategy=strategy,
            problem=problem,
            order=self.order[members],
            assignment=np.zeros_like(lengths),
            micro_batches=np.zeros_like(lengths),
            pipeline_ms=np.full(len(strategy.schemes), np.inf),
            link=link,
            least_link_ms=(link.pull_ms + link.push_ms) / num_rounds,
            correction=self.corrections.of(strategy),
            num_devices=self.num_devices,
            ranks_per_core=self.profile.ranks_per_core,
        )
        num_trials, seed = self.settings.num_trials, self.settings.seed
        return candidate, dispatch_trials(problem, num_trials, seed, candidate.assignment)

    @property
    def _num_buckets(self) -> int:
        """Layers that are pulled and pushed one by one; 0 where nothing overlaps."""
        return self.profile.memory.num_layers if self.settings.overlaps_links else 0

    def _search(self, candidate: CandidatePlan, best_ms: float) -> None:
        """Plans `candidate`; searches longer where it can still beat `best_ms`, the best one so
        far.
        """
        problem, assignment = candidate.problem, candidate.assignment
        micro_batches = candidate.micro_batches
        num_steps = self.settings.max_refine_steps
        enough_ms = candidate.lower_bound_ms * (1 + self.settings.enough_gap)
        estimate = improve_dispatch(problem, assignment, enough_ms, num_steps, _NUM_TARGETS)
        if candidate.ranks_per_core > 1.0:  # bounds say little, so ask what it is near to
            pipeline_ms = candidate.pipeline_ms = pack_pipelines(problem, assignment, micro_batches)
            if candidate.ends_ms(pipeline_ms).max() > best_ms * (1 + _PERTURBATION_REACH):
                return self._finish_micro_batches(candidate)
        if num_steps > 0 and estimate > enough_ms:
            fit_trials(problem, candidate.lower_bound_ms, estimate, _NUM_FIT_STEPS, assignment)
            improve_dispatch(problem, assignment, enough_ms, num_steps, _NUM_TARGETS)
        if self.settings.dispatch == "ideal":
            assignment[:] = self._ideal_dispatch(candidate)
        pipeline_ms = candidate.pipeline_ms = pack_pipelines(problem, assignment, micro_batches)
        refine_pipelines(
            problem, assignment, micro_batches, pipeline_ms, enough_ms, num_steps, _NUM_TARGETS
        )
        worth_ms = candidate.lower_bound_ms * (1 + _PERTURBATION_GAP)
        share = min(1.0, _FULLY_PERTURBED / max(1, problem.lengths.size))
        if num_steps > 0 and worth_ms < pipeline_ms.max() < best_ms * (1 + _PERTURBATION_REACH):
            perturb_and_refine(
                problem,
                assignment,
                micro_batches,
                pipeline_ms,
                worth_ms,
                num_steps,
                _NUM_TARGETS,
                int(self.settings.num_perturbations * share**2),
            )
        self._finish_micro_batches(candidate)

    def _finish_micro_batches(self, candidate: CandidatePlan) -> None:
        """Puts the packed micro-batches in the order that hides pull and push, and counts what is
        left of them.
        """
        problem, assignment = candidate.problem, candidate.assignment
        micro_batches = candidate.micro_batches
        order_micro_batches(problem, assignment, micro_batches)
        link = candidate.link
        candidate.iteration_ms = iteration_ms(
            problem,
            assignment,
            micro_batches,
            candidate.pipeline_ms,
            link.pull_ms,
            link.push_ms,
            self._num_buckets,
        )
        candidate.iteration_ms += self._lockstep_ms(candidate) + candidate.correction.outside_ms
        # On shared cores the slowest pipeline is faster once others have ended
        ends_ms = candidate.ends_ms(candidate.pipeline_ms)
        candidate.iteration_ms -= float(candidate.pipeline_ms.max() - ends_ms.max())

    def _lockstep_ms(self, candidate: CandidatePlan) -> float:
        """What pipelines wait for each other."""
        if not candidate.strategy.gathers:
            return 0.0
        return lockstep_wait_ms(
            candidate.problem, candidate.assignment, candidate.micro_batches, candidate.pipeline_ms
        )

    def _ideal_dispatch(self, candidate: CandidatePlan) -> IntArray:
        """The solution of Eq. (3) within the limits of the solver, in sorted order of the
        sequences.
        """
        found = dispatch_sequences(
            candidate.problem.lengths.tolist(),
            self._kinds(candidate.strategy, [1.0] * len(candidate.strategy.schemes)),
            seed=self.settings.seed,
            limits=replace(self.settings.solver_limits or SolverLimits(), gap_tolerance=1e-4),
        )
        return np.array(found.assignment, dtype=np.int64)

    def _solve_slowest(self, best: CandidatePlan) -> None:
        """Solves for the micro-batches of the slowest pipelines of `best` as long as that makes the
        iteration shorter.

        Only where an integer program is exact: by the closed form, and for one stage, whose time is
        that of the fewest micro-batches where no micro-batch waits for its traffic.
        """
        limits = self.settings.solver_limits
        if limits is None:
            return
        for _ in range(_MAX_SOLVED):
            slowest = int(best.pipeline_ms.argmax())
            members = np.flatnonzero(best.assignment == slowest)
            kind = best.problem.kind_of[slowest]
            cost = pipeline_cost(best.problem, kind)
            lengths, costs = best.problem.lengths[members], best.problem.sequence_ms[kind, members]
            bound = pipeline_bound_ms(lengths, costs, cost)
            is_solvable = not cost.is_exact or (cost.num_stages == 1 and cost.traffic_ms == 0.0)
            is_optimal = best.pipeline_ms[slowest] <= bound * (1 + limits.gap_tolerance)
            if is_optimal or not is_solvable:
                return
            micro_batches = best.micro_batches[members]
            solved_ms, _ = solve_packing(lengths, costs, cost, limits, micro_batches)
            if solved_ms >= best.pipeline_ms[slowest]:
                return
            best.pipeline_ms[slowest] = solved_ms
            best.micro_batches[members] = micro_batches
            self._finish_micro_batches(best)

    def _finish(self, phases: Sequence[CandidatePlan], trial_ms: float = 0.0) -> IterationPlan:
        batch = self.batch
        found = [phase.pipelines(batch, self.profile) for phase in phases]
        makespan = sum(
            max(pipeline.makespan_ms for pipeline in pipelines) + self._lockstep_ms(phase)
            for phase, pipelines in zip(phases, found)
        )
        return IterationPlan(
            iteration=batch.iteration,
            num_devices=self.num_devices,
            strategy=Strategy.of_phases([phase.strategy for phase in phases]),
            sample_indices=batch.sample_indices,
            lengths=batch.lengths,
            num_label_tokens=batch.num_label_tokens,
            pipelines=tuple(pipeline for pipelines in found for pipeline in pipelines),
            makespan_ms=makespan,
            lower_bound_ms=min(makespan, sum(phase.least_propagation_ms for phase in phases)),
            trial_ms=trial_ms,
        )


def _corrected(latency: LatencyModel, factor: float) -> LatencyModel:
    return latency if factor == 1.0 else latency.scaled(factor)
