"""Learning from measured times: corrects later plans, and finds slow ranks.

Every rank takes in the same times, so every rank knows the same; only rank 0 plans with it.

[Note: Slow ranks]
A slow rank is one whose pipelines take longer than predicted, whatever pipelines it is in. Ranks of
one pipeline wait for the slowest of them, so an iteration only accuses a pipeline. It acquits every
rank of a pipeline that was faster than the rank is believed to be, and confirms the slowest one of
a pipeline that was slower. Strategies change, and over some iterations the accusations meet in one
rank.
"""

from __future__ import annotations

import logging
import statistics
from collections.abc import Mapping, Sequence
from itertools import islice
from math import exp, inf, isfinite, log, sqrt
from statistics import median
from typing import Any

from ds_hydra.configs.hydra_config import PlannerConfig
from ds_hydra.records.metrics import PipelineMetrics
from ds_hydra.sampler.background import LOOKAHEAD
from ds_hydra.sampler.plan import IterationPlan
from ds_hydra.sampler.planner.iteration import profiled_times
from ds_hydra.sampler.planner.planner_settings import PlannerSettings
from ds_hydra.strategy import Profile, Strategy
from ds_hydra.strategy.profiles.learned import (
    NO_CORRECTIONS,
    Corrections,
    LearnedTimes,
    PipelineTime,
    are_plausible,
    names_of,
)

logger = logging.getLogger(__name__)

_RATE = 0.2
"""Weight of an iteration in the estimate of a rank: about five count."""
_NUM_NEEDED = 5
"""Iterations with two busy pipelines or more before anyone is accused."""
_SLOW = 1.15
"""Factor from which the plans to come count with a slow rank, where noise does not explain it."""
_STRAGGLER = 1.3
"""Factor from which a slow rank is named."""
_FIRST_NOISE = 0.1
_FORGOTTEN = 0.01
"""Share of the estimate of a rank that goes with each iteration in which it has no work: half of it
in 69.
"""


class StragglerFinder:
    """Estimates of all ranks' slowness. The same calls give the same answer on every rank.

    For each rank the logarithm of measured over predicted time of its pipelines, relative to the
    median pipeline of the iteration. Iterations with fewer than two busy pipelines say nothing.
    A rank that gets no work, perhaps because it was slow, is measured no more: what is believed of
    it fades, so that it gets some again.
    """

    def __init__(self) -> None:
        self._slowness: dict[int, float] = {}
        self._variance = _FIRST_NOISE**2
        """Variance of a pipeline around the slowest of its ranks."""
        self._num_seen = 0

    def observe(
        self, pipelines: Sequence[PipelineMetrics], expected_ms: Sequence[float] | None = None
    ) -> int | None:
        """Take in one iteration; the rank that is slow enough to be named, and above all others, if
        there is one.

        `expected_ms` is what each pipeline would take without slow ranks; by default as predicted.
        """
        if expected_ms is None:
            expected_ms = [p.predicted_ms for p in pipelines]
        ratios = {
            p.ranks: log(p.measured_ms / expected)
            for p, expected in zip(pipelines, expected_ms, strict=True)
            if p.num_micro_batches and expected > 0 and 0 < p.measured_ms < inf
        }
        if len(ratios) > 1:
            self._num_seen += 1
            median = statistics.median(ratios.values())
            for ranks, ratio in ratios.items():
                self._accuse(ranks, ratio - median)
        if self._slowness:
            usual = statistics.median_low(self._slowness.values())
            busy = {rank for p in pipelines if p.num_micro_batches for rank in p.ranks}
            for rank in self._slowness.keys() - busy:
                self._slowness[rank] += _FORGOTTEN * (usual - self._slowness[rank])
        return self._find()

    def _accuse(self, ranks: Sequence[int], ratio: float) -> None:
        slowest = max(self._slowness.setdefault(rank, 0.0) for rank in ranks)
        limit = 2 * sqrt(self._variance)
        left = min(max(ratio - slowest, -limit), limit)
        self._variance += _RATE / 2 * (left * left - self._variance)
        for rank in ranks:
            if self._slowness[rank] > ratio or self._slowness[rank] == slowest:
                self._slowness[rank] += _RATE * (ratio - self._slowness[rank])

    def slow_ranks(self) -> dict[int, float]:
        """Ranks that are slow beyond noise, and how many times as long as others their pipelines
        take.
        """
        if self._num_seen < _NUM_NEEDED:
            return {}
        usual = statistics.median_low(self._slowness.values())
        spread = sqrt(self._variance * _RATE / (2 - _RATE))
        least = max(log(_SLOW), 3 * spread)
        return {
            rank: exp(slowness - usual)
            for rank, slowness in self._slowness.items()
            if slowness - usual > least
        }

    def _find(self) -> int | None:
        if self._num_seen < _NUM_NEEDED:
            return None
        usual = statistics.median_low(self._slowness.values())
        first, *others = sorted(self._slowness, key=lambda rank: -self._slowness[rank])
        is_alone = not others or self._slowness[first] > self._slowness[others[0]] + 0.02
        is_slow = self._slowness[first] - usual >= log(_STRAGGLER)
        return first if is_slow and is_alone else None

    def state_dict(self) -> dict[str, Any]:
        """Plain values, for a checkpoint."""
        slowness = {str(rank): value for rank, value in self._slowness.items()}
        return {"slowness": slowness, "variance": self._variance, "num_seen": self._num_seen}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from `state_dict`; ValueError where it is not that."""
        slowness = {int(rank): float(value) for rank, value in state["slowness"].items()}
        variance, num_seen = float(state["variance"]), int(state["num_seen"])
        if not all(map(isfinite, [*slowness.values(), variance])):
            raise ValueError("values that are not finite")
        self._slowness, self._variance, self._num_seen = slowness, variance, num_seen


_LONGEST_MS = 3_600_000.0
"""A pipeline that took longer was suspended, or a clock was set."""
_OUTSIDE_RATE = 0.2
"""Weight of the last iteration in the time that a strategy takes outside of propagation."""


class LatencyTracker:
    """Corrections of a profile by measured iterations. Nothing is collective.

    With `refit` "plan" what is known after iteration k holds for iteration k + `LOOKAHEAD`: the
    first that is not planned yet. So what an iteration is planned with does not depend on when a
    plan is made, and a checkpoint that holds `state_dict` continues with the very same corrections.
    """

    def __init__(
        self,
        profile: Profile,
        strategies: Sequence[Strategy],
        planner: PlannerConfig,
        settings: PlannerSettings,
        straggler: StragglerFinder,
        state: Mapping[str, Any] | None = None,
        *,
        is_late: bool = False,
    ):
        """`is_late`: an iteration is taken in during the next one."""
        self.profiled = profile
        self.learned = LearnedTimes()
        self._straggler = straggler
        self._strategies = tuple(strategies)
        self._planner = planner
        self._settings = settings
        self._is_late = is_late
        self._schedule: list[tuple[int, Corrections]] = [(0, NO_CORRECTIONS)]
        self._outside_ms: dict[str, float] = {}
        """Time of an iteration of each strategy, less waiting for its plan, that no pipeline ran.
        """
        self._num_iterations = 0
        self._has_told_implausible = False
        self._has_begun = bool(state)
        if state:
            self._load(state)

    # ---- what plans are made with

    def corrections_for(self, iteration: int) -> Corrections:
        """Corrections for the plan of `iteration`: the last ones that are due by then."""
        due = (known for begin, known in reversed(self._schedule) if begin <= iteration)
        return next(due, NO_CORRECTIONS)

    def corrections_now(self, strategies: Sequence[Strategy]) -> Corrections:
        """All that is known now, for a plan that is made now; none with `refit` "log"."""
        if self._planner.refit != "plan" or not self._num_iterations:
            return NO_CORRECTIONS
        return Corrections(
            factors={scheme: self.learned.factor(scheme) for scheme in self.profiled.latency},
            outside_ms={strategy: self._extra_outside_ms(strategy) for strategy in strategies},
            slow_ranks=self._straggler.slow_ranks(),
        )

    def _extra_outside_ms(self, strategy: Strategy) -> float:
        """Milliseconds of pull, push and step of `strategy` above the shortest that is known; the
        median where `strategy` is unknown. 0.0 where the planner knows the links.
        """
        if not self._outside_ms or self._settings.link_times:
            return 0.0
        known = self._outside_ms.values()
        return self._outside_ms.get(str(strategy), median(known)) - min(known)

    # ---- taking in

    def profiled_ms(self, plan: IterationPlan) -> list[float | None]:
        """Time of each pipeline by the profile alone; None for a scheme that it has not."""
        return profiled_times(plan, self.profiled, self._settings)

    def expected_ms(self, plan: IterationPlan) -> list[float]:
        """Time of each pipeline as far as is known now, slow ranks aside."""
        known, found = iter(self.profiled_ms(plan)), []
        for phase in plan.in_turn:
            found += [
                pipeline.makespan_ms
                if profiled is None
                else profiled * self.learned.factor(pipeline.scheme)
                for pipeline, profiled in zip(phase.pipelines, known)
            ]
        return found

    def observe(
        self, plan: IterationPlan, measured_ms: Sequence[float], iteration_ms: float
    ) -> None:
        """Take in the measured time of every pipeline of `plan`, and of the iteration without
        waiting for its plan.

        Nothing is learned from a run's first iteration, which touches memory and loads kernels for
        the first time. After that one like it is an outlier.
        """
        if not self._has_begun:
            self._has_begun = True
            return
        slowdown = Corrections(slow_ranks=self._straggler.slow_ranks()).slowdown
        known, of_phases = iter(zip(self.profiled_ms(plan), measured_ms, strict=True)), []
        for phase in plan.in_turn:
            times = [
                PipelineTime(pipeline.scheme, profiled, measured / slowdown(pipeline.ranks))
                for pipeline, (profiled, measured) in zip(phase.pipelines, known)
                if profiled and pipeline.micro_batches
            ]
            of_phases.append(times)
        all_ms = [t.measured_ms for times in of_phases for t in times]
        if all_ms and self._are_plausible(plan, all_ms, iteration_ms):
            for times in of_phases:
                self.learned.observe(times)
            self._count(plan, measured_ms, iteration_ms)
        self._correct(plan.iteration)

    def _are_plausible(
        self, plan: IterationPlan, measured_ms: Sequence[float], iteration_ms: float
    ) -> bool:
        if are_plausible([*measured_ms, iteration_ms], _LONGEST_MS):
            return True
        if not self._has_told_implausible:
            self._has_told_implausible = True
            logger.warning(
                "iteration %d: measured times %s ms cannot be (above 0, %d at most); nothing is learned from such "
                "iterations",
                plan.iteration,
                [*measured_ms, iteration_ms],
                _LONGEST_MS,
            )
        return False

    def _count(
        self, plan: IterationPlan, measured_ms: Sequence[float], iteration_ms: float
    ) -> None:
        self._num_iterations += 1
        times = iter(measured_ms)
        slowest_ms = sum(max(islice(times, len(p.pipelines))) for p in plan.in_turn)
        if plan.strategy in self._strategies:  # those cut anew are ever more
            name, outside_ms = str(plan.strategy), max(0.0, iteration_ms - slowest_ms)
            old = self._outside_ms.get(name, outside_ms)
            self._outside_ms[name] = old + _OUTSIDE_RATE * (outside_ms - old)

    def _correct(self, iteration: int) -> None:
        begin = iteration + LOOKAHEAD + self._is_late
        self._schedule.append((begin, self.corrections_now(self._strategies)))
        # What is due before the next iteration is only needed in its last version.
        while len(self._schedule) > 1 and self._schedule[1][0] <= iteration + 1:
            del self._schedule[0]

    # ---- checkpoints

    def state_dict(self) -> dict[str, Any]:
        """Learned values, and the corrections that plans still need, for a checkpoint."""
        return {
            "learned": self.learned.state_dict(),
            "schedule": [(begin, known.to_json()) for begin, known in self._schedule],
            "outside_ms": dict(self._outside_ms),
            "straggler": self._straggler.state_dict(),
            "num_iterations": self._num_iterations,
        }

    def _load(self, state: Mapping[str, Any]) -> None:
        """Continue from `state_dict`. Factors gone from the profile are left out, and unreadable
        ones ignored, with one line in the log each.
        """
        try:
            kept = names_of(self.profiled.latency)
            learned = LearnedTimes.from_state(state["learned"], kept)
            schedule = [(int(begin), Corrections.from_json(c)) for begin, c in state["schedule"]]
            outside_ms = {str(name): float(ms) for name, ms in state["outside_ms"].items()}
            num_iterations = int(state["num_iterations"])
            self._straggler.load_state_dict(state["straggler"])
        except Exception as error:  # of whatever version or damage: training goes on without
            logger.warning(
                "what the checkpoint has learned of measured times is ignored: %r", error
            )
            return
        if gone := sorted(set(state["learned"]["names"]) - kept):
            logger.warning("learned times of %s are ignored: not in the profile", ", ".join(gone))
        self.learned, self._outside_ms = learned, outside_ms
        self._num_iterations = num_iterations
        if self._planner.refit == "plan":
            self._schedule = schedule
